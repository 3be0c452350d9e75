//! Session of a node: its pending commands, and the stream that carries them.
//!
//! Commands get their ids here, are kept until the node has sent a final result, and are sent again on a new stream
//! of the same session. There are never more of them than slots of the node, because each command refers to a slot
//! that is being freed; [`PENDING_COMMANDS_MAX`] protects against a node that accepts commands and never sends
//! results.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use hashbrown::HashMap;
use moontide_meta::{CommandKind, CommandOutcome, CopyPurpose, CopySource, NodeCommand};
use moontide_proto::convert::DiskStatus;
use moontide_proto::limits::SESSION_RECORDS_MAX;
use moontide_proto::{
    Capability, CommandFlags, CommandKind as WireKind, CommandResult, CommandStatus,
    CopyPurpose as WirePurpose, CopySource as WireSource, NodeCommand as WireCommand, PackedBuilder, v1,
};
use moontide_types::{ErrorCode, Extent, MapVersion, NodeId, SegmentId, SessionId, Term};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::Service;
use super::signing::OfferedKeys;
use super::stats::NodeReads;

/// Maximum number of commands without a result per session: 16 million take two gigabytes. At the limit the session ends.
const PENDING_COMMANDS_MAX: usize = 1 << 24;

/// How long a copy may wait at the node before it begins: the master keeps the source for longer than that.
const COPY_LEASE_MS: u32 = 30_000;

/// A registered node.
#[derive(Debug)]
pub(super) struct NodeSession {
    pub(super) node: NodeId,
    session: SessionId,
    /// Number of the session at this master: the newer session of a node has the larger one.
    number: u64,
    /// Id of the master.
    master: Term,
    pub(super) labels: [Box<str>; 3],
    pub(super) addresses: Vec<(Box<str>, Box<str>)>,
    queue: Mutex<CommandQueue>,
    keys: Mutex<OfferedKeys>,
    notify: Notify,
    /// Number of the open stream, 0 if there is none.
    open_stream: AtomicU64,
    /// Group of each mounted segment.
    pub(super) segments: Mutex<HashMap<SegmentId, usize>>,
    pub(super) reads: Mutex<NodeReads>,
    /// Status of its disk, if it has one.
    pub(super) disk: Mutex<Option<DiskStatus>>,
    /// Mounts of the disk that added it to a group.
    pub(super) disk_mounts: AtomicU32,
    /// Whether it has announced that it is to be emptied.
    pub(super) draining: AtomicBool,
    /// Whether an operator wants it to be emptied. `None`: the node knows.
    drain_order: Mutex<Option<bool>>,
}

#[derive(Debug, Default)]
struct CommandQueue {
    /// Id of the last command.
    last_id: u64,
    /// Commands without a final result, by id. A command that waits for a reader does not delay later ones.
    pending: BTreeMap<u64, PendingCommand>,
    /// Commands with this id or a higher one were not sent on the current stream.
    unsent: u64,
    /// Number of the last applied message of the node.
    acked: u64,
    /// Value of `acked` in the last message to the node.
    acked_sent: u64,
    /// Heartbeat to acknowledge: its id, and the TTL in milliseconds.
    heartbeat_ack: Option<v1::HeartbeatAck>,
    /// Number of the current stream.
    stream: u64,
    ended: bool,
}

#[derive(Clone, Copy, Debug)]
struct PendingCommand {
    group: usize,
    /// Term of the group.
    term: Term,
    command: NodeCommand,
}

/// A command with a result.
#[derive(Debug)]
pub(super) struct AnsweredCommand {
    pub(super) group: usize,
    pub(super) command: NodeCommand,
    pub(super) outcome: CommandOutcome,
}

impl NodeSession {
    pub(super) fn new(
        node: NodeId,
        (session, number): (SessionId, u64),
        master: Term,
        labels: [Box<str>; 3],
        addresses: Vec<(Box<str>, Box<str>)>,
        keys: OfferedKeys,
    ) -> NodeSession {
        NodeSession {
            node,
            session,
            number,
            master,
            labels,
            addresses,
            queue: Mutex::new(CommandQueue { unsent: 1, ..CommandQueue::default() }),
            keys: Mutex::new(keys),
            notify: Notify::new(),
            open_stream: AtomicU64::new(0),
            segments: Mutex::default(),
            reads: Mutex::default(),
            disk: Mutex::default(),
            disk_mounts: AtomicU32::new(0),
            draining: AtomicBool::new(false),
            drain_order: Mutex::default(),
        }
    }

    pub(super) fn session(&self) -> SessionId {
        self.session
    }

    pub(super) fn number(&self) -> u64 {
        self.number
    }

    /// Returns a number by which others tell the registrations of a node apart. It is no secret.
    pub(super) fn registration(&self) -> u64 {
        u64::from(self.master.get()) << 40 | self.number
    }

    /// Returns whether a stream of this session is open.
    pub(super) fn has_stream(&self) -> bool {
        // Relaxed: no other data depends on it.
        self.open_stream.load(Ordering::Relaxed) != 0
    }

    /// Returns whether segments of this session are mounted.
    pub(super) fn has_segments(&self) -> bool {
        !self.segments.lock().is_empty()
    }

    pub(super) fn pending_commands(&self) -> usize {
        self.queue.lock().pending.len()
    }

    /// Orders the node to announce that it is to be emptied, or no longer to. Sent with each heartbeat until it does.
    pub(super) fn order_drain(&self, drain: bool) {
        *self.drain_order.lock() = Some(drain);
    }

    /// Records what the node announces. Returns the order that it has not followed yet.
    pub(super) fn announced_drain(&self, draining: bool) -> Option<bool> {
        // Relaxed: a listing shows the value.
        self.draining.store(draining, Ordering::Relaxed);
        let mut order = self.drain_order.lock();
        *order = order.filter(|&wanted| wanted != draining);
        *order
    }

    /// Changes what the node knows of keys, and sends what is to be sent. Returns the result of `change`.
    pub(super) fn change_keys(&self, change: impl FnOnce(&mut OfferedKeys) -> bool) -> bool {
        let changed = change(&mut self.keys.lock());
        if changed {
            self.notify.notify_one();
        }
        changed
    }

    /// Enqueues a command.
    pub(super) fn enqueue(&self, group: usize, term: Term, command: NodeCommand) {
        let mut queue = self.queue.lock();
        if queue.pending.len() >= PENDING_COMMANDS_MAX {
            queue.ended = true;
        }
        if !queue.ended {
            queue.last_id += 1;
            let number = queue.last_id;
            let term =
                if moontide_rt::mutation_enabled("order-in-the-masters-term") { self.master } else { term };
            queue.pending.insert(number, PendingCommand { group, term, command });
        }
        drop(queue);
        self.notify.notify_one();
    }

    /// Discards the commands of a group that is no longer hosted here.
    pub(super) fn discard_commands(&self, group: usize) {
        self.queue.lock().pending.retain(|_, pending| pending.group != group);
    }

    /// Returns whether peers access its memory one-sidedly.
    pub(super) fn is_one_sided(&self) -> bool {
        self.addresses.iter().any(|(engine, _)| &**engine == "ucx")
    }

    /// Returns whether the session has ended.
    pub(super) fn is_ended(&self) -> bool {
        self.queue.lock().ended
    }

    /// Ends the session and its stream.
    pub(super) fn end(&self) {
        self.queue.lock().ended = true;
        self.notify.notify_waiters();
        self.notify.notify_one();
    }

    /// Starts a new stream of this session: commands without a final result are sent again.
    pub(super) fn attach(&self) -> u64 {
        let mut queue = self.queue.lock();
        queue.stream += 1;
        queue.unsent = if moontide_rt::mutation_enabled("orders-not-repeated") { queue.unsent } else { 1 };
        queue.acked_sent = 0;
        let stream = queue.stream;
        // Relaxed: under the lock, so that a later stream is not overwritten.
        self.open_stream.store(stream, Ordering::Relaxed);
        drop(queue);
        self.keys.lock().rewind();
        self.notify.notify_waiters();
        stream
    }

    /// A stream is over. Nothing changes if another one was opened since.
    fn detach(&self, stream: u64) {
        let closed = Ordering::Relaxed;
        let _ = self.open_stream.compare_exchange(stream, 0, closed, closed);
    }

    /// Checks the number of a message: `Ok(true)` for the next one, `Ok(false)` if it was applied before.
    pub(super) fn expect(&self, sequence: u64) -> Result<bool, ErrorCode> {
        let queue = self.queue.lock();
        if queue.ended {
            return Err(ErrorCode::StaleSession);
        }
        match sequence.cmp(&(queue.acked + 1)) {
            std::cmp::Ordering::Less => Ok(false),
            std::cmp::Ordering::Equal => Ok(true),
            std::cmp::Ordering::Greater => Err(ErrorCode::Retry),
        }
    }

    /// Records an applied message.
    pub(super) fn applied(&self, sequence: u64, heartbeat_ack: Option<v1::HeartbeatAck>) {
        let mut queue = self.queue.lock();
        queue.acked = queue.acked.max(sequence);
        queue.heartbeat_ack = heartbeat_ack.or(queue.heartbeat_ack.take());
        drop(queue);
        self.notify.notify_one();
    }

    /// Applies results of the node. Ignores unknown ids: these results are duplicates.
    pub(super) fn answered(&self, results: impl Iterator<Item = CommandResult>) -> Vec<AnsweredCommand> {
        let mut queue = self.queue.lock();
        let mut answered = vec![];
        for result in results {
            let Some(&PendingCommand { group, command, .. }) = queue.pending.get(&result.command_id) else {
                continue;
            };
            let (outcome, last) = match (result.status, result.code) {
                (CommandStatus::Refused, code) => {
                    (CommandOutcome::Refused(code.unwrap_or(ErrorCode::Internal)), true)
                }
                (CommandStatus::Done, _) => (CommandOutcome::Done, true),
                // Accepted is final for a kill; a reclaim is done only when the slot is free.
                (CommandStatus::Accepted, _) => (CommandOutcome::Accepted, command.kind == CommandKind::Kill),
            };
            if last {
                queue.pending.remove(&result.command_id);
            }
            answered.push(AnsweredCommand { group, command, outcome });
        }
        answered
    }

    /// Returns the next message for a stream, if there is one, and the nodes from which its commands copy. Fails if the
    /// stream is closed.
    fn message(
        &self,
        stream: u64,
        map_version: MapVersion,
    ) -> Result<Option<(v1::MasterMessage, BTreeSet<NodeId>)>, StreamClosed> {
        let mut queue = self.queue.lock();
        if queue.ended || queue.stream != stream {
            return Err(StreamClosed);
        }
        let queue = &mut *queue;
        let key = self.keys.lock().next_message();
        let mut commands = PackedBuilder::<WireCommand>::with_capacity(0);
        let (mut sources, mut nodes) = (PackedBuilder::<WireSource>::with_capacity(0), BTreeSet::new());
        let room = if key.is_some() { 0 } else { SESSION_RECORDS_MAX };
        for (&number, pending) in queue.pending.range(queue.unsent..).take(room) {
            commands.push(&wire_command(number, &pending.command, pending.term));
            if let CommandKind::Copy { source, purpose, .. } = pending.command.kind {
                sources.push(&wire_source(&source, purpose, pending.term));
                nodes.insert(source.node);
            }
            queue.unsent = number + 1;
        }
        let body = if key.is_some() {
            key
        } else if !commands.is_empty() {
            let (commands, sources) = (commands.finish().into(), sources.finish().into());
            Some(v1::master_message::Body::Commands(v1::Commands { commands, sources, nodes: vec![] }))
        } else if let Some(ack) = queue.heartbeat_ack.take() {
            Some(v1::master_message::Body::HeartbeatAck(ack))
        } else if queue.acked > queue.acked_sent {
            // An empty list of commands, which carries the acknowledgement.
            Some(v1::master_message::Body::Commands(v1::Commands::default()))
        } else {
            None
        };
        Ok(body.map(|body| {
            queue.acked_sent = queue.acked;
            let message = v1::MasterMessage {
                session: self.session.0,
                term: self.master.get(),
                map_version: map_version.0,
                acked_sequence: queue.acked,
                body: Some(body),
            };
            (message, nodes)
        }))
    }
}

/// Error: the session has ended, or has another stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StreamClosed;

fn wire_command(number: u64, command: &NodeCommand, term: Term) -> WireCommand {
    let (kind, flags) = match command.kind {
        CommandKind::Kill | CommandKind::Reclaim if command.segment == SegmentId::DISK => {
            return WireCommand {
                flags: CommandFlags::TOMBSTONE,
                epoch: command.epoch,
                id: command.id,
                ..WireCommand::new(number, WireKind::DropFromDisk, term)
            };
        }
        CommandKind::Kill => (WireKind::Kill, CommandFlags::TOMBSTONE),
        CommandKind::Reclaim => (WireKind::Reclaim, CommandFlags::NONE),
        CommandKind::Offload => (WireKind::Offload, CommandFlags::NONE),
        CommandKind::Promote { .. } => (WireKind::Promote, CommandFlags::NONE),
        CommandKind::Copy { .. } => (WireKind::Copy, CommandFlags::NONE),
    };
    let (stripe, extent, lease_ms) = match command.kind {
        CommandKind::Promote { stripe, extent } => (stripe, extent, 0),
        CommandKind::Copy { stripe, extent, .. } => (stripe, extent, COPY_LEASE_MS),
        _ => (0, Extent::default(), 0),
    };
    WireCommand {
        stripe,
        extent,
        lease_ms,
        payload_offset: extent.span().offset(),
        flags,
        segment: command.segment,
        generation: command.generation,
        slot: command.slot,
        epoch: command.epoch,
        id: command.id,
        ..WireCommand::new(number, kind, term)
    }
}

/// Returns the source of a copy for a node. `term`: of the group, which is that of the segments that it owns.
fn wire_source(source: &CopySource, purpose: CopyPurpose, term: Term) -> WireSource {
    WireSource {
        node: source.node,
        generation: source.generation,
        root: source.root,
        capability: Capability::default(), // signed when it is sent
        segment: source.segment,
        slot: source.slot,
        term,
        purpose: match purpose {
            CopyPurpose::Drain => WirePurpose::Drain,
            CopyPurpose::Repair => WirePurpose::Repair,
            CopyPurpose::Rebalance => WirePurpose::Rebalance,
            CopyPurpose::Hot => WirePurpose::Hot,
        },
    }
}

/// One stream of a session, for the gRPC server. While it exists, no other process can register as the node.
#[derive(Debug)]
pub struct SessionStream {
    service: Arc<Service>,
    node: Arc<NodeSession>,
    stream: u64,
}

impl Drop for SessionStream {
    fn drop(&mut self) {
        self.node.detach(self.stream);
    }
}

impl SessionStream {
    pub(super) fn new(service: Arc<Service>, node: Arc<NodeSession>) -> SessionStream {
        let stream = node.attach();
        SessionStream { service, node, stream }
    }

    /// Applies a message of the node. An error ends the stream; the node opens a new one.
    pub fn receive(&self, message: &v1::NodeMessage) -> Result<(), ErrorCode> {
        if message.session != self.node.session().0 {
            return Err(ErrorCode::StaleSession);
        }
        self.service.apply_node_message(&self.node, message)
    }

    /// Returns the next message to the node, if there is one now. Fails if the session has ended or has another stream.
    pub fn next_now(&self) -> Result<Option<v1::MasterMessage>, StreamClosed> {
        let next = self.node.message(self.stream, self.service.map_version())?;
        // Outside of the queue's lock: this takes other locks.
        Ok(next.map(|(mut message, sources)| {
            if let Some(v1::master_message::Body::Commands(commands)) = &mut message.body {
                commands.nodes = self.service.node_details(&sources);
                self.service.sign_sources(commands);
            }
            message
        }))
    }

    /// Waits for the next message to the node. Returns `None` if the session has ended or has another stream.
    pub async fn next(&self) -> Option<v1::MasterMessage> {
        loop {
            // Created before the check, so that no notification is missed.
            let notified = self.node.notify.notified();
            match self.next_now() {
                Ok(Some(message)) => return Some(message),
                Ok(None) => notified.await,
                Err(StreamClosed) => return None,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moontide_proto::convert::NumberedKey;
    use moontide_proto::{CapabilityKey, FixedRecord, Packed};
    use moontide_types::record::{State, Word};
    use moontide_types::{Epoch, Generation, MonoTime, ObjectId, SlotId};

    fn command(slot: u32, kind: CommandKind) -> NodeCommand {
        NodeCommand {
            kind,
            segment: SegmentId(3),
            generation: Generation(1),
            slot: SlotId(slot),
            epoch: Epoch::new(Term::new(2).unwrap(), 5).unwrap(),
            id: ObjectId([1; 16]),
        }
    }

    fn node() -> NodeSession {
        let empty = || Box::from("");
        let key = NumberedKey { rotation: 1, key: CapabilityKey::new([1; 32]) };
        let keys = OfferedKeys::new(key, MonoTime(0));
        let labels = [empty(), empty(), empty()];
        NodeSession::new(NodeId(1), (SessionId(9), 1), Term::new(2).unwrap(), labels, vec![], keys)
    }

    fn numbers(message: Option<(v1::MasterMessage, BTreeSet<NodeId>)>) -> Vec<u64> {
        let Some(v1::master_message::Body::Commands(commands)) = message.and_then(|(m, _)| m.body) else {
            return vec![];
        };
        Packed::<WireCommand>::decode(&commands.commands, SESSION_RECORDS_MAX)
            .unwrap()
            .iter()
            .map(|o| o.command_id)
            .collect()
    }

    fn result(command_id: u64, status: CommandStatus) -> CommandResult {
        CommandResult { command_id, word: Word::new(Epoch::ZERO, State::Dead), code: None, status }
    }

    #[test]
    fn unanswered_commands_are_resent_on_new_stream() {
        let node = node();
        let first = node.attach();
        for slot in 0..4 {
            node.enqueue(
                0,
                Term::new(2).unwrap(),
                command(slot, if slot == 0 { CommandKind::Kill } else { CommandKind::Reclaim }),
            );
        }
        assert_eq!(numbers(node.message(first, MapVersion(1)).ok().unwrap()), [1, 2, 3, 4]);
        assert!(node.message(first, MapVersion(1)).ok().unwrap().is_none());
        // Accepted is final for a kill, not for a reclaim; done is final for both.
        let results = [(1, CommandStatus::Accepted), (2, CommandStatus::Accepted), (3, CommandStatus::Done)];
        assert_eq!(node.answered(results.map(|(n, status)| result(n, status)).into_iter()).len(), 3);
        let second = node.attach();
        assert!(node.message(first, MapVersion(1)).is_err(), "the older stream is closed");
        assert_eq!(numbers(node.message(second, MapVersion(1)).ok().unwrap()), [2, 4]);
        // Duplicate results and results of unknown commands change nothing.
        let unexpected = [1, 3, 99, 0].map(|n| result(n, CommandStatus::Done));
        assert!(node.answered(unexpected.into_iter()).is_empty());
        assert_eq!(node.answered([2, 4].map(|n| result(n, CommandStatus::Done)).into_iter()).len(), 2);
        assert_eq!(node.pending_commands(), 0);
        node.end();
        assert!(node.message(second, MapVersion(1)).is_err());
        assert_eq!(WireCommand::BYTES, 80);
    }

    #[test]
    fn messages_are_applied_once_and_in_order() {
        let node = node();
        let stream = node.attach();
        assert_eq!(node.expect(1), Ok(true));
        node.applied(1, Some(v1::HeartbeatAck { heartbeat_id: 7, ttl_ms: 10_000, ..Default::default() }));
        assert_eq!(node.expect(1), Ok(false));
        assert_eq!(node.expect(3), Err(ErrorCode::Retry));
        let (message, _) = node.message(stream, MapVersion(1)).ok().unwrap().unwrap();
        assert_eq!(message.acked_sequence, 1);
        assert!(
            matches!(message.body, Some(v1::master_message::Body::HeartbeatAck(ack)) if ack.heartbeat_id == 7)
        );
        node.applied(2, None);
        assert_eq!(node.message(stream, MapVersion(1)).ok().unwrap().unwrap().0.acked_sequence, 2);
    }
}
