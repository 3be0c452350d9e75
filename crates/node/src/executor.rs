//! [`CommandExecutor`]: the thread that executes the commands of masters, and the only one that reclaims.
//!
//! Reclaim runs after each batch of commands, every few milliseconds while a command waits for a slot, and at a longer
//! interval otherwise. A slot freed for a command completes it; a slot freed without one is reported to the master as a
//! change.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use moontide_disk::RecordId;
use moontide_heap::KillOutcome;
use moontide_proto::{CommandKind, CommandResult, CommandStatus, CopySource, NodeCommand};
use moontide_rt::mark;
use moontide_rt::sync::mpsc::{Receiver, RecvTimeoutError};
use moontide_rt::time::Instant;
use moontide_types::limits::LEASE_MS_MAX;
use moontide_types::record::{State, Word};
use moontide_types::{Clock, Epoch, ErrorCode, MonoTime, SessionId, SystemClock};
use tracing::warn;

use crate::copier::{Copier, CopyJob};
use crate::disk::{DiskTier, OffloadJob, PromoteJob, RemovalJob};
use crate::event_router::{EventRouter, NodeEvent};
use crate::logic::commands::{
    CommandId, CommandReply, CommandStep, DrainTracker, SegmentInfo, SlotVersion, after_fence, kill_reply,
    validate_command,
};
use crate::logic::report::SlotChange;
use crate::logic::timing::reclaim_interval;
use crate::memory::NodeMemory;
use crate::metrics::{CommandCounts, Counters};
use crate::slot_fills::FillTarget;

/// Drain time after which the node logs a warning: a reader still holds a removed object.
const DRAIN_OVERDUE_AFTER: Duration = Duration::from_secs(10);

/// Due time of a killed slot: it is not reclaimed before a Reclaim command.
const NEVER: MonoTime = MonoTime(u64::MAX);

/// A task for the executor.
#[derive(Debug)]
pub(crate) enum ExecutorTask {
    /// A session has begun, or one has ended, or both. The commands of an ended session are cancelled.
    Session { begins: Option<SessionId>, ends: Option<SessionId> },
    /// Commands of a master, and the sources of the copies among them, in order.
    Commands { session: SessionId, commands: Vec<NodeCommand>, sources: Vec<CopySource> },
    /// Records that their writers abandoned and that are dead.
    Abandoned(Vec<SlotVersion>),
    /// Stops the executor.
    Stop,
}

/// Executes commands.
#[derive(Debug)]
pub(crate) struct CommandExecutor {
    memory: Arc<NodeMemory>,
    disk: Option<Arc<DiskTier>>,
    copier: Arc<Copier>,
    counters: Arc<Counters>,
    events: Arc<EventRouter>,
    drains: DrainTracker,
    /// Commands of this round that wait for their slot.
    new_drains: Vec<(CommandId, SlotVersion)>,
    /// Commands whose slot holds an older record, which has to be freed first.
    retry: Vec<(SessionId, NodeCommand)>,
    results: Vec<(SessionId, CommandResult)>,
    counts: CommandCounts,
    /// Time at which a slot was last freed or added.
    progress: MonoTime,
    /// Last command of each session that another thread executes: Offload, Promote or Copy. Those up to it were accepted:
    /// the disk tier or the copier replies to them, and unacknowledged replies are sent again.
    last_passed_on: BTreeMap<SessionId, u64>,
}

impl CommandExecutor {
    pub(crate) fn new(
        memory: Arc<NodeMemory>,
        disk: Option<Arc<DiskTier>>,
        copier: Arc<Copier>,
        counters: Arc<Counters>,
        events: Arc<EventRouter>,
    ) -> CommandExecutor {
        CommandExecutor {
            memory,
            disk,
            copier,
            counters,
            events,
            drains: DrainTracker::default(),
            new_drains: Vec::new(),
            retry: Vec::new(),
            results: Vec::new(),
            counts: CommandCounts::default(),
            progress: MonoTime(0),
            last_passed_on: BTreeMap::new(),
        }
    }

    /// Runs until it receives [`ExecutorTask::Stop`].
    pub(crate) fn run(mut self, tasks: &Receiver<ExecutorTask>) {
        loop {
            let wait = reclaim_interval(!self.drains.is_empty(), self.progress, SystemClock.now());
            match tasks.recv_timeout(wait) {
                Ok(ExecutorTask::Stop) | Err(RecvTimeoutError::Disconnected) => return,
                Ok(first) => {
                    self.take(first);
                    while let Ok(more) = tasks.try_recv() {
                        match more {
                            ExecutorTask::Stop => return,
                            more => self.take(more),
                        }
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            self.round(SystemClock.now());
        }
    }

    pub(crate) fn take(&mut self, task: ExecutorTask) {
        match task {
            ExecutorTask::Session { begins, ends } => self.begin_session(begins, ends),
            ExecutorTask::Commands { session, commands, sources } => {
                let mut sources = sources.into_iter();
                for command in &commands {
                    let is_copy = command.kind == CommandKind::Copy;
                    let source = if is_copy { sources.next() } else { None };
                    self.execute(session, command, source);
                }
            }
            ExecutorTask::Abandoned(names) => {
                let now = SystemClock.now();
                names.into_iter().for_each(|name| self.drains.add(name, now));
                self.progress = now;
            }
            ExecutorTask::Stop => {}
        }
    }

    fn begin_session(&mut self, begins: Option<SessionId>, ends: Option<SessionId>) {
        self.send_results();
        if let Some(ends) = ends {
            self.new_drains.retain(|&((session, _), _)| session != ends);
            let waiting = self.retry.len();
            self.retry.retain(|&(session, _)| session != ends);
            self.counts.cancelled += (self.drains.end_session(ends) + waiting - self.retry.len()) as u64;
            self.last_passed_on.remove(&ends);
        }
        self.last_passed_on.extend(begins.map(|begins| (begins, 0)));
    }

    /// Executes a command. `source`: of a copy.
    fn execute(&mut self, session: SessionId, command: &NodeCommand, source: Option<CopySource>) {
        let Some(&last) = self.last_passed_on.get(&session) else { return }; // the session has ended
        let id = (session, command.command_id);
        let waits = |&(session, command): &(SessionId, NodeCommand)| (session, command.command_id) == id;
        if (self.drains.contains(id) || self.retry.iter().any(waits))
            && !moontide_rt::mutation_enabled("order-done-twice")
        {
            return; // sent again on a new stream, and still in progress
        }
        use CommandKind::{Copy, Offload, Promote};
        let is_passed_on = matches!(command.kind, Offload | Promote | Copy);
        if is_passed_on && command.command_id <= last && !moontide_rt::mutation_enabled("copy-executed-again")
        {
            return; // sent again: a command that was cancelled meanwhile must not start again
        }
        if is_passed_on {
            self.last_passed_on.insert(session, command.command_id);
        }
        self.counts.received += 1;
        let node_segment = self.memory.segment(command.segment);
        let info = node_segment.map(|node_segment| SegmentInfo {
            generation: node_segment.segment().shape().generation,
            adopted_term: node_segment.segment().adopted_term(),
            slots: node_segment.segment().shape().slots,
        });
        if let Err(code) = validate_command(command, info, self.disk.is_some()) {
            let reply = CommandReply::refused(code, Word::default());
            // Without the segment there is no such version in memory, but there may be one on the disk.
            let is_gone = matches!(code, ErrorCode::NotFound | ErrorCode::StaleGeneration);
            return if command.kind == CommandKind::Kill && is_gone {
                self.reply_when_durable(session, command, reply);
            } else {
                self.reply(id, reply);
            };
        }
        if let Some(disk) = self.disk.clone() {
            match command.kind {
                CommandKind::DropFromDisk => return self.drop_from_disk(&disk, session, command),
                CommandKind::Offload => return self.offload(&disk, session, command),
                CommandKind::Promote => return self.promote(&disk, session, command),
                CommandKind::Reclaim => {
                    mark!("reclaim while a removal is not durable", disk.is_removing(command.id));
                }
                _ => {}
            }
        }
        let Some(node_segment) = node_segment else { return };
        if matches!(command.kind, CommandKind::Kill | CommandKind::Reclaim) {
            // A promotion or copy in progress must not publish a record in the slot.
            let cancelled = self.memory.fills.cancel(command.segment, command.slot);
            mark!("promotion or copy cancelled", cancelled);
        }
        let done = CommandReply::done(Word::default());
        match command.kind {
            CommandKind::Kill => self.kill(session, command),
            CommandKind::Reclaim | CommandKind::FenceEpoch => self.fence_epoch(session, command),
            CommandKind::Scrub => {
                let reply = self.scrub(command);
                self.reply(id, reply);
            }
            CommandKind::Drain => {
                node_segment.close();
                self.reply(id, done);
            }
            CommandKind::AdoptTerm => {
                node_segment.set_grant(command.group, command.term);
                self.events.send(NodeEvent::Report(command.segment));
                self.reply(id, done);
            }
            CommandKind::Copy => self.copy(session, command, source),
            CommandKind::Offload | CommandKind::Promote | CommandKind::DropFromDisk => {
                unreachable!("valid only with a disk, and handled above")
            }
        }
    }

    fn kill(&mut self, session: SessionId, command: &NodeCommand) {
        let NodeCommand { segment, slot, epoch, .. } = *command;
        let heap = self.memory.heap();
        let killed = heap.kill(segment, slot, epoch, NEVER) != KillOutcome::NotFound;
        let reply = if killed {
            self.memory.record_transition(segment, slot, epoch, State::Dead);
            CommandReply::accepted(epoch)
        } else {
            let reply = kill_reply(epoch, heap.fence_epoch(segment, slot, epoch));
            if reply.status == CommandStatus::Done {
                self.memory.record_transition(segment, slot, epoch, State::Free);
            }
            reply
        };
        mark!("kill of a version that is not in its slot", !killed && self.disk.is_some());
        let ignored = self.disk.as_ref().is_some_and(|disk| disk.ignores_kill(killed));
        if ignored {
            self.reply((session, command.command_id), reply);
        } else {
            self.reply_when_durable(session, command, reply);
        }
    }

    /// Replies to a Kill. With a disk, the removal becomes durable before the reply, whatever the slot contains: after a
    /// crash, the disk would restore the record. This also holds for a record that is not found on disk: one that is
    /// being written or evicted is on the disk all the same.
    fn reply_when_durable(&mut self, session: SessionId, command: &NodeCommand, reply: CommandReply) {
        match &self.disk {
            Some(disk) => {
                disk.remove(removal(session, command, command.epoch, reply));
                self.count(&reply);
            }
            None => self.reply((session, command.command_id), reply),
        }
    }

    fn drop_from_disk(&mut self, disk: &DiskTier, session: SessionId, command: &NodeCommand) {
        let reply = CommandReply::done(Word::new(command.epoch, State::Free));
        disk.remove(removal(session, command, command.epoch, reply));
        self.count(&reply);
    }

    fn offload(&mut self, disk: &DiskTier, session: SessionId, command: &NodeCommand) {
        let Some(pin) = self.memory.heap().pin(command.segment, command.slot, command.epoch) else {
            return self.reply(
                (session, command.command_id),
                CommandReply::refused(ErrorCode::Gone, Word::default()),
            );
        };
        let bytes = pin.header().stripe_len;
        drop(pin);
        let lease_ms = if command.lease_ms == 0 { LEASE_MS_MAX } else { command.lease_ms };
        disk.offload(OffloadJob {
            session,
            command_id: command.command_id,
            segment: command.segment,
            slot: command.slot,
            epoch: command.epoch,
            id: command.id,
            bytes,
            until: Instant::now() + Duration::from_millis(lease_ms.into()),
        });
        self.counts.accepted += 1;
    }

    fn promote(&mut self, disk: &DiskTier, session: SessionId, command: &NodeCommand) {
        let name = RecordId { id: command.id, version: command.epoch, stripe: command.stripe };
        let begun = disk.begin_promotion(PromoteJob { name, target: fill_target(session, command) });
        self.passed_on(session, command, begun);
    }

    fn copy(&mut self, session: SessionId, command: &NodeCommand, source: Option<CopySource>) {
        let lease_ms = if command.lease_ms == 0 { LEASE_MS_MAX } else { command.lease_ms };
        let queued = source.is_some_and(|source| {
            self.copier.enqueue(CopyJob {
                target: fill_target(session, command),
                id: command.id,
                stripe: command.stripe,
                source,
                until: Instant::now() + Duration::from_millis(lease_ms.into()),
            })
        });
        self.passed_on(session, command, queued);
    }

    /// Counts a command that other threads reply to, or refuses it if they have stopped.
    fn passed_on(&mut self, session: SessionId, command: &NodeCommand, accepted: bool) {
        if accepted {
            self.counts.accepted += 1;
        } else {
            let refused = CommandReply::refused(ErrorCode::Busy, Word::default());
            self.reply((session, command.command_id), refused);
        }
    }

    fn fence_epoch(&mut self, session: SessionId, command: &NodeCommand) {
        let fenced = self.memory.heap().fence_epoch(command.segment, command.slot, command.epoch);
        match after_fence(command.kind, command.epoch, fenced) {
            CommandStep::Answer(reply) => {
                if reply.status == CommandStatus::Done {
                    self.memory.record_transition(command.segment, command.slot, command.epoch, State::Free);
                }
                self.reply((session, command.command_id), reply);
            }
            CommandStep::Clear(older) => {
                let _ = self.memory.heap().kill(command.segment, command.slot, older, MonoTime(0));
                self.memory.record_transition(command.segment, command.slot, older, State::Dead);
                let now = SystemClock.now();
                self.drains.add((command.segment, command.slot, older), now);
                self.retry.push((session, *command));
                self.progress = now;
            }
            CommandStep::Drain => {
                let name = (command.segment, command.slot, command.epoch);
                // Due at once, also if an earlier Kill made it wait for a Reclaim.
                let _ = self.memory.heap().kill(command.segment, command.slot, command.epoch, MonoTime(0));
                self.memory.record_transition(command.segment, command.slot, command.epoch, State::Dead);
                let now = SystemClock.now();
                let id = (session, command.command_id);
                self.drains.add_command(id, name, now);
                self.new_drains.push((id, name));
                self.progress = now;
            }
        }
    }

    /// Verifies a record against its digests.
    fn scrub(&self, command: &NodeCommand) -> CommandReply {
        let word = Word::new(command.epoch, State::Ready);
        let Some(pin) = self.memory.heap().pin(command.segment, command.slot, command.epoch) else {
            return CommandReply::refused(ErrorCode::Gone, Word::default());
        };
        let header = pin.header();
        if header.flags.digestless() {
            return CommandReply::refused(ErrorCode::Unsupported, word);
        }
        if header.digest_context().payload(pin.payload(), |_| ()) == header.root {
            return CommandReply::done(word);
        }
        self.counters.corrupt();
        let NodeCommand { segment, slot, epoch, .. } = command;
        warn!(segment = segment.0, slot = slot.0, %epoch, "record does not match its digests");
        CommandReply::refused(ErrorCode::Corrupt, word)
    }

    /// Reclaims, and sends the results.
    pub(crate) fn round(&mut self, now: MonoTime) {
        let mut reclaimed = self.memory.heap().reclaim(now);
        // Masters do not know the staging segment.
        reclaimed.freed.retain(|freed| self.memory.segment(freed.segment).is_some());
        for freed in &reclaimed.freed {
            let (segment, slot, epoch) = (freed.segment, freed.slot, freed.epoch);
            self.memory.record_transition(segment, slot, epoch, State::Free);
            let commands = self.drains.freed((segment, slot, epoch));
            if commands.is_empty() {
                self.events.send(NodeEvent::Change(SlotChange::Freed { segment, slot, epoch }));
            }
            for command in commands {
                self.reply(command, CommandReply::done(Word::new(epoch, State::Free)));
            }
        }
        if !reclaimed.freed.is_empty() {
            self.progress = now;
            self.counters.freed(reclaimed.freed.iter().map(|freed| freed.extent.span().len()).sum());
        }
        for (session, command) in std::mem::take(&mut self.retry) {
            self.fence_epoch(session, &command);
        }
        // The remaining records are dead for all readers, so the master need not wait with its response.
        for (command, (_, _, epoch)) in std::mem::take(&mut self.new_drains) {
            if self.drains.contains(command) {
                self.results.push((command.0, CommandReply::accepted(epoch).to(command.1)));
            }
        }
        self.send_results();
        self.warn_overdue(now);
        self.counts.outstanding = (self.drains.commands() + self.retry.len()) as u64;
        self.counters.commands(self.counts, self.drains.overdue() as u64);
    }

    fn reply(&mut self, (session, command_id): CommandId, reply: CommandReply) {
        self.count(&reply);
        self.results.push((session, reply.to(command_id)));
    }

    /// Counts a reply. Commands to which the disk threads reply later are counted as if they succeed.
    fn count(&mut self, reply: &CommandReply) {
        match reply.status {
            CommandStatus::Done => self.counts.done += 1,
            CommandStatus::Accepted => self.counts.accepted += 1,
            CommandStatus::Refused => self.counts.refused += 1,
        }
    }

    fn send_results(&mut self) {
        self.events.send_results(std::mem::take(&mut self.results));
    }

    fn warn_overdue(&mut self, now: MonoTime) {
        let overdue = self.drains.take_overdue(now, DRAIN_OVERDUE_AFTER);
        if overdue.is_empty() {
            return;
        }
        self.counters.overdue(overdue.len() as u64);
        for drain in overdue {
            let (segment, slot, epoch): (_, _, Epoch) = drain.name;
            // The ledgers do not identify the client that holds the record, only the number of clients.
            let clients = self.memory.heap().ledgers().clients().len();
            let seconds = now.since(drain.since).as_secs();
            warn!(segment = segment.0, slot = slot.0, %epoch, seconds, clients,
                "removed object is still held by a reader; its space is not freed");
        }
    }
}

/// Returns the slot that a Promote or Copy command fills.
fn fill_target(session: SessionId, command: &NodeCommand) -> FillTarget {
    FillTarget {
        command: (session, command.command_id),
        segment: command.segment,
        slot: command.slot,
        epoch: command.epoch,
        extent: command.extent,
        term: command.term,
    }
}

fn removal(session: SessionId, command: &NodeCommand, version: Epoch, reply: CommandReply) -> RemovalJob {
    RemovalJob { session, command_id: command.command_id, id: command.id, version, reply }
}

#[cfg(test)]
mod tests;
