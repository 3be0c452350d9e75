//! [`SessionDriver`]: keeps a session with one master. It registers, mounts, reports, sends heartbeats, and starts
//! again when the session is lost. [`SessionManager`] has one driver for each master that hosts groups.
//!
//! ```text
//!   connect ──▶ open session ──▶ mount ──▶ stream ─────────────▶ (stop) ──▶ unmount
//!     ▲              │             ▲ │      │  ▲ stream failed: retry, same session
//!     │              │             └─┼──────┤  │ groups changed: mount the new ones
//!     └──────────────┴───────────────┴──────┴──┘
//!       failed, or the session is lost: after a backoff
//! ```
//!
//! All inputs arrive in [`SessionDriver::run_stream`], which is one `select` over the master's messages, the node's own
//! events, and the clock. The [`logic`](crate::logic) module decides which messages to send.
//!
//! Invariant: events are received at all times, so that senders never block and the queue does not grow; without a
//! session they are dropped, because the next one begins with a snapshot.

mod calls;
mod manager;
mod snapshot;

use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use moontide_auth::Credentials;
use moontide_proto::convert::{
    Address, Commands, MasterMessage, MasterMessageBody, NodeDetail, NumberedKey, Wire,
};
use moontide_proto::{CommandResult, PackedBuilder, v1};
use moontide_rt::{Backoff, SplitMix64, mark};
use moontide_transfer::{EngineKind, Peer};
use moontide_types::{Clock, ErrorCode, NodeId, SegmentId, SessionId, SystemClock, Term};
use tokio::sync::mpsc::{self, UnboundedReceiver};
use tokio::sync::watch;
use tokio_stream::wrappers::ReceiverStream;
use tracing::{debug, info, warn};
use v1::node_message::Body;

use self::calls::{Client, MasterError, code_of};
use self::manager::MapSignal;
use crate::capabilities::CapabilityKeys;
use crate::copier::Copier;
use crate::disk::DiskTier;
use crate::drain::DrainState;
use crate::event_router::{EventRouter, NodeEvent};
use crate::executor::ExecutorTask;
use crate::flush::FlushState;
use crate::index_gate::IndexGate;
use crate::logic::groups::{GroupSet, HostedGroups, mount_diff, set_of};
use crate::logic::outbox::{HeartbeatTracker, Outbox};
use crate::logic::report::{Reports, SegmentTerm, SlotChange};
use crate::logic::sync_marks::SyncGate;
use crate::logic::timing::{FLUSH_HEARTBEAT_INTERVAL, heartbeat_interval};
use crate::memory::{NodeMemory, NodeSegment};
use crate::metrics::Counters;
use crate::owner::NodeOwner;
use crate::status::Status;

pub(crate) use self::calls::{ClusterParams, learn_cluster};
pub(crate) use self::manager::SessionManager;

/// Timeout of a call to the master.
const CALL_TIMEOUT: Duration = Duration::from_secs(2);

/// Time for which begins and commits are reported after a session was lost: earlier reservations are valid for up to
/// `RESERVATION_MS_MAX`, by clocks of other hosts.
const REPORT_CHANGES_FOR: Duration = Duration::from_secs(60);

/// Limit of unacknowledged bytes above which no further snapshot is taken: a report of millions of records must not be
/// in memory at once.
const UNACKED_BYTES_MAX: usize = 8 << 20;

/// Capacity of the queue of messages that the connection has not sent yet.
const SEND_QUEUE_MAX: usize = 4;

/// Maximum number of events that are processed together.
const EVENTS_MAX: usize = 4096;

/// Time to wait for a master that does not know yet that it hosts a group.
const STALE_MASTER_DELAY: Duration = Duration::from_millis(100);

/// Maximum number of consecutive streams of a session that fail without an acknowledgement of the master.
const STREAM_FAILURES_MAX: u32 = 5;

/// Properties that do not change while the node runs.
#[derive(Clone, Debug)]
pub(crate) struct NodeDescriptor {
    pub(crate) node: NodeId,
    pub(crate) boot: u64,
    pub(crate) addresses: Vec<v1::Address>,
    pub(crate) topology: v1::Topology,
    /// Id of the cluster; the node refuses masters of another one.
    pub(crate) cluster: u64,
    pub(crate) groups: NonZeroU16,
    /// Certificate of the node; `None`: no TLS.
    pub(crate) credentials: Option<Arc<Credentials>>,
}

/// Components of a node that the drivers use.
#[derive(Debug)]
pub(crate) struct NodeComponents {
    pub(crate) memory: Arc<NodeMemory>,
    pub(crate) disk: Option<Arc<DiskTier>>,
    pub(crate) copier: Arc<Copier>,
    pub(crate) owner: Arc<NodeOwner>,
    pub(crate) capabilities: Arc<CapabilityKeys>,
    pub(crate) index_gate: Arc<IndexGate>,
    pub(crate) status: Arc<Status>,
    pub(crate) flush: Arc<FlushState>,
    pub(crate) drain: Arc<DrainState>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) tasks: moontide_rt::sync::mpsc::Sender<ExecutorTask>,
}

impl NodeComponents {
    /// Returns the reads since the start.
    fn reads(&self) -> v1::ReadCounters {
        v1::ReadCounters { corrupt: self.counters.corrupt_found(), ..self.owner.reads() }
    }
}

/// Returns the number of the registration and the addresses of a node from which records are copied.
fn peer_of(detail: &NodeDetail<'_>) -> (u64, Peer) {
    let address =
        |address: &Address<'_>| Some((EngineKind::from_name(address.engine)?, address.address.to_owned()));
    let addresses = detail.addresses.iter().filter_map(address).collect();
    (detail.registration, Peer { node: detail.node, addresses })
}

/// Keeps the session with one master.
#[derive(Debug)]
struct SessionDriver {
    master: Arc<str>,
    /// Name of the route. Each driver has its own, also one that is started again for the same master.
    route: Arc<str>,
    descriptor: Arc<NodeDescriptor>,
    components: Arc<NodeComponents>,
    router: Arc<EventRouter>,
    events: UnboundedReceiver<NodeEvent>,
    /// Groups that the master hosts. A closed channel means that it hosts none.
    hosted: watch::Receiver<HostedGroups>,
    map_signal: Arc<MapSignal>,
    stop: watch::Receiver<bool>,
    highest_term: Term,
    state: Option<SessionState>,
    backoff: Backoff,
    random: SplitMix64,
}

/// State of one session.
#[derive(Debug)]
struct SessionState {
    session: SessionId,
    /// Id of the master, and the newest key that it has sent.
    key: (Term, NumberedKey),
    /// Groups for which the keys of the master are accepted.
    keyed: GroupSet,
    /// Groups whose segments are mounted, with their terms.
    mounted: HostedGroups,
    outbox: Outbox,
    heartbeats: HeartbeatTracker,
    reports: Reports,
    /// Number of the message whose acknowledgement means that the master is synced, once it is queued.
    complete: Option<u64>,
    /// Which heartbeats show that the node is in sync.
    sync_gate: SyncGate,
    /// Reads before the session began: earlier sessions have counted them.
    reads_before: v1::ReadCounters,
}

impl SessionState {
    /// Whether the master has received the reports of all segments of its groups.
    fn is_reported(&self) -> bool {
        self.complete.is_some_and(|complete| complete <= self.outbox.acknowledged())
    }
}

/// Reason for the early end of an operation.
#[derive(Debug)]
enum Interrupted {
    Stop,
    Failed(MasterError),
}

/// The node stops, or the master hosts no groups.
#[derive(Debug)]
struct Stopped;

impl From<Stopped> for Interrupted {
    fn from(Stopped: Stopped) -> Interrupted {
        Interrupted::Stop
    }
}

impl From<MasterError> for Interrupted {
    fn from(error: MasterError) -> Interrupted {
        Interrupted::Failed(error)
    }
}

/// Reason for the end of a stream.
#[derive(Debug)]
enum StreamEnd {
    Stop,
    /// The master hosts other groups than before.
    Remount,
    /// The session continues with another stream.
    Broken(MasterError),
    /// The session has ended.
    Lost(MasterError),
}

impl SessionDriver {
    /// Runs until the node stops, in which case it unmounts the segments, or until the master hosts no groups.
    async fn run(mut self) {
        loop {
            let interrupted = self.session().await;
            self.end_session();
            match interrupted {
                Interrupted::Stop => return,
                Interrupted::Failed(error) => {
                    if matches!(&error, MasterError::Status(status) if code_of(status) == Some(ErrorCode::StaleSession))
                    {
                        self.backoff.reset(); // the master is running and waits for a new session
                    }
                    self.components.counters.attempt_failed();
                    warn!(master = %self.master, %error, "no session with the master; retrying");
                    self.map_signal.request_refresh(); // it may no longer be a master
                    self.components.status.change(|status| {
                        status.mounted = false;
                        status.registered = false;
                        status.last_error = Some(error.to_string());
                    });
                }
            }
            if self.pause().await.is_err() {
                return;
            }
        }
    }

    /// Ends the session, and cancels everything that belongs to it.
    fn end_session(&mut self) {
        self.router.mark_unsynced(&self.route);
        let Some(state) = self.state.take() else { return };
        self.router.set_session(&self.route, SessionId(0));
        self.components.memory.fills.cancel_session(state.session);
        if let Some(disk) = &self.components.disk {
            disk.end_session(state.session);
        }
        let _ = self.components.tasks.send(ExecutorTask::Session { begins: None, ends: Some(state.session) });
    }

    /// Runs one session from beginning to end.
    async fn session(&mut self) -> Interrupted {
        match self.try_session().await {
            Ok(never) => match never {},
            Err(interrupted) => interrupted,
        }
    }

    async fn try_session(&mut self) -> Result<std::convert::Infallible, Interrupted> {
        let mut client = self.connect().await?;
        self.open(&mut client).await?;
        let mut failures = 0;
        loop {
            let acknowledged = self.acknowledged();
            match self.run_stream(&mut client).await {
                StreamEnd::Stop => {
                    self.unmount(&mut client).await;
                    return Err(Interrupted::Stop);
                }
                StreamEnd::Lost(error) => return Err(Interrupted::Failed(error)),
                StreamEnd::Remount => {
                    self.mount(&mut client).await?;
                    continue;
                }
                StreamEnd::Broken(error) => {
                    let has_results = || self.state.as_ref().is_some_and(|state| state.outbox.has_results());
                    mark!("stream broken with results that are not acknowledged", has_results());
                    // A session whose streams fail at once makes no progress.
                    failures = if self.acknowledged() > acknowledged { 0 } else { failures + 1 };
                    if failures >= STREAM_FAILURES_MAX || self.is_lost() {
                        return Err(Interrupted::Failed(error));
                    }
                    self.components.counters.attempt_failed();
                    info!(master = %self.master, %error, "stream to the master failed; opening another");
                    self.map_signal.request_refresh();
                    self.components.status.change(|status| status.last_error = Some(error.to_string()));
                }
            }
            client = loop {
                self.pause().await?;
                match self.connect().await {
                    Ok(client) => break client,
                    Err(Interrupted::Stop) => return Err(Interrupted::Stop),
                    Err(Interrupted::Failed(error))
                        if self.is_lost() || matches!(error, MasterError::OtherCluster { .. }) =>
                    {
                        return Err(Interrupted::Failed(error));
                    }
                    Err(Interrupted::Failed(error)) => {
                        self.components.counters.attempt_failed();
                        debug!(%error, "master not reached");
                    }
                }
            };
        }
    }

    fn is_lost(&self) -> bool {
        self.state.as_ref().is_none_or(|c| c.heartbeats.is_lost(SystemClock.now()))
    }

    fn acknowledged(&self) -> u64 {
        self.state.as_ref().map_or(0, |c| c.outbox.acknowledged())
    }

    /// Registers, and mounts the segments of the master's groups.
    async fn open(&mut self, client: &mut Client) -> Result<(), Interrupted> {
        let requested = SystemClock.now();
        let request = calls::open_session(&self.descriptor, self.highest_term);
        let call = client.open_session(request);
        let grant = calls::opened(self.call(call).await?)?;
        if !self.components.owner.learn_id_key(grant.id_key) {
            return Err(MasterError::OtherIdKey.into());
        }
        self.highest_term = self.highest_term.max(grant.term);
        let (session, ttl) = (grant.session, grant.ttl);
        if grant.groups != u32::from(self.descriptor.groups.get()) {
            warn!(
                groups = grant.groups,
                planned = self.descriptor.groups,
                "number of groups of the cluster has changed; restart this node"
            );
        }
        self.components.counters.session();
        self.end_session();
        self.router.set_session(&self.route, session);
        let _ = self.components.tasks.send(ExecutorTask::Session { begins: Some(session), ends: None });
        self.state = Some(SessionState {
            session,
            key: (grant.term, grant.key),
            keyed: GroupSet::none(self.descriptor.groups),
            mounted: HostedGroups::new(),
            outbox: Outbox::new(session),
            heartbeats: HeartbeatTracker::new(requested, ttl),
            reports: Reports::default(),
            complete: None,
            sync_gate: SyncGate::default(),
            reads_before: self.components.reads(),
        });
        self.components.status.change(|status| {
            status.mounted = false;
            status.registered = true;
            status.term = grant.term;
        });
        info!(master = %self.master, %session, term = grant.term.get(), "session opened");
        self.mount(client).await
    }

    /// Mounts the segments of groups that the master hosts newly, and unmounts those of groups that it no longer hosts.
    async fn mount(&mut self, client: &mut Client) -> Result<(), Interrupted> {
        let hosted = self.hosted.borrow_and_update().clone();
        let Some(state) = &mut self.state else { return Ok(()) };
        let session = state.session;
        let (missing, lost) = mount_diff(self.descriptor.groups, &hosted, &state.mounted);
        state.complete = None;
        state.sync_gate.close();
        state.mounted.retain(|group, _| !lost.contains(*group));
        state.keyed = state.keyed.without(&lost);
        state.keyed.extend(&missing);
        let (signer, NumberedKey { rotation, key }) = &state.key;
        // Before the mount: the master signs with this key from then on.
        self.components.capabilities.hold(*signer, key, &missing);
        let rotation = *rotation;
        let memory = Arc::clone(&self.components.memory);
        let of = |groups: &GroupSet, node_segment: &NodeSegment| {
            self.router
                .group_of(node_segment.segment().shape().segment)
                .is_some_and(|group| groups.contains(group))
        };
        for node_segment in memory.segments().iter().filter(|node_segment| of(&lost, node_segment)) {
            state.reports.unmounted(node_segment.segment().shape().segment);
        }
        if let Some(disk) = &self.components.disk {
            disk.restrict(session, &set_of(self.descriptor.groups, &state.mounted));
        }
        let node_segments: Vec<&NodeSegment> =
            memory.segments().iter().filter(|node_segment| of(&missing, node_segment)).collect();
        // Before the specs are read: records begun from now on are either reported or in a snapshot.
        // Every segment is offered, so no short circuit.
        if node_segments.iter().filter(|node_segment| node_segment.offer()).count() > 0 {
            self.components.owner.report_changes_until(SystemClock.now().after(REPORT_CHANGES_FOR));
        }
        let mut mounted = missing;
        let mut terms = HostedGroups::new();
        for node_segments in node_segments.chunks(moontide_types::limits::BATCH_KEYS_MAX) {
            let specs: Vec<v1::SegmentSpec> =
                node_segments.iter().map(|node_segment| self.spec(node_segment)).collect();
            let occupied: Vec<bool> = specs.iter().map(|spec| spec.has_records).collect();
            let synced = self.router.sync_marks.to_wire(SystemClock.now());
            let request = calls::mount_segments(&self.descriptor, session, specs, synced, rotation);
            let call = client.mount_segments(request);
            let grants = calls::mounted(self.call(call).await?, node_segments.len())?;
            let mut not_hosted = GroupSet::none(self.descriptor.groups);
            for ((node_segment, grant), occupied) in node_segments.iter().zip(grants).zip(occupied) {
                match grant.code {
                    None => {}
                    // The master does not host the group yet, or no longer: the next map has the answer.
                    Some(ErrorCode::WrongMaster | ErrorCode::Retry) => {
                        self.router
                            .group_of(node_segment.segment().shape().segment)
                            .into_iter()
                            .for_each(|group| not_hosted.insert(group));
                        continue;
                    }
                    Some(code) => {
                        return Err(MasterError::Refused { what: "mount the segments", code }.into());
                    }
                }
                // Adopt the term before the snapshot: grants of older masters are refused from here on.
                node_segment.set_grant(grant.group, grant.term);
                terms.insert(grant.group, grant.term);
                self.highest_term = self.highest_term.max(grant.term);
                let shape = node_segment.segment().shape();
                let of =
                    SegmentTerm { segment: shape.segment, generation: shape.generation, term: grant.term };
                if let Some(state) = &mut self.state {
                    // A segment with a record begun during the call needs a snapshot as well: the record would not be
                    // reported otherwise.
                    state.reports.mounted(of, occupied || node_segment.is_occupied());
                }
            }
            mounted = mounted.without(&not_hosted);
        }
        info!(master = %self.master, %session, groups = mounted.len(), "segments mounted");
        if let Some(disk) = self.components.disk.clone()
            && !mounted.is_empty()
        {
            // Before the mount: the master must not receive the end of the inventory before its beginning.
            disk.announce_inventory(session);
            let spec = calls::disk_spec(memory.generation(), disk.is_occupied());
            let synced = self.router.sync_marks.to_wire(SystemClock.now());
            let request = calls::mount_segments(&self.descriptor, session, vec![spec], synced, rotation);
            let call = client.mount_segments(request);
            let grants = calls::mounted(self.call(call).await?, 1)?;
            if let Some(code) = grants.iter().find_map(|grant| grant.code) {
                return Err(MasterError::Refused { what: "mount the disk", code }.into());
            }
            disk.start_inventory(session, mounted.clone());
        }
        if let Some(state) = &mut self.state {
            state.mounted.extend(terms.into_iter().filter(|(group, _)| mounted.contains(*group)));
        }
        Ok(())
    }

    /// Returns the description of a segment for a mount.
    fn spec(&self, node_segment: &NodeSegment) -> v1::SegmentSpec {
        let group = self.router.group_of(node_segment.segment().shape().segment);
        calls::spec(node_segment, group)
    }

    /// Whether the master hosts groups whose segments are not mounted.
    fn has_unmounted_groups(&self) -> bool {
        let hosted = self.hosted.borrow();
        let groups = self.descriptor.groups;
        self.state.as_ref().is_some_and(|c| !mount_diff(groups, &hosted, &c.mounted).0.is_empty())
    }

    async fn unmount(&mut self, client: &mut Client) {
        let Some(state) = &self.state else { return };
        // The disk first: the session ends with the last segment.
        let disk = self.components.disk.iter().map(|_| SegmentId::DISK.0);
        let of_groups = |segment: &SegmentId| {
            self.router.group_of(*segment).is_some_and(|group| state.mounted.contains_key(&group))
        };
        let ids = self
            .components
            .memory
            .segments()
            .iter()
            .map(|node_segment| node_segment.segment().shape().segment);
        let all: Vec<u32> = disk.chain(ids.filter(of_groups).map(|segment| segment.0)).collect();
        for segments in all.chunks(moontide_types::limits::BATCH_KEYS_MAX) {
            let segments = segments.to_vec();
            let request = calls::unmount_segments(&self.descriptor, state.session, segments);
            match moontide_tasks::time::timeout(CALL_TIMEOUT / 2, client.unmount_segments(request)).await {
                Ok(Ok(_)) => {}
                Ok(Err(status)) => {
                    return warn!(%status, "cannot unmount segments; the session will expire");
                }
                Err(_) => return warn!("timeout of unmounting segments; the session will expire"),
            }
        }
        info!(session = %state.session, "segments unmounted");
    }

    /// Runs one stream of the session until it ends.
    async fn run_stream(&mut self, client: &mut Client) -> StreamEnd {
        let (to_master, messages) = mpsc::channel(SEND_QUEUE_MAX);
        if let Some(state) = &mut self.state {
            state.outbox.rewind();
        }
        self.send_heartbeat();
        let call = client.session(ReceiverStream::new(messages));
        // The master may wait for a message before it responds.
        if let Some(first) = self.next_message() {
            let _ = to_master.try_send(first);
        }
        let mut from_master = match self.call(call).await {
            Ok(stream) => stream,
            Err(Interrupted::Stop) => return StreamEnd::Stop,
            Err(Interrupted::Failed(error)) => return ended(error),
        };
        self.components.counters.stream();
        let ttl = self.state.as_ref().map_or(CALL_TIMEOUT, |c| c.heartbeats.ttl());
        let mut clock = moontide_tasks::time::interval(heartbeat_interval(ttl));
        clock.set_missed_tick_behavior(moontide_tasks::time::MissedTickBehavior::Delay);
        clock.reset();
        let mut flush_clock = moontide_tasks::time::interval(FLUSH_HEARTBEAT_INTERVAL);
        flush_clock.set_missed_tick_behavior(moontide_tasks::time::MissedTickBehavior::Delay);
        let mut flush_begun = self.components.flush.subscribe();
        let mut drain_changed = self.components.drain.subscribe();
        let mut stop = self.stop.clone();
        let mut hosted = self.hosted.clone();
        // Measured from the start of the stream, regardless of other events.
        let mut stale_master_delay = std::pin::pin!(moontide_tasks::time::sleep(STALE_MASTER_DELAY));
        loop {
            self.report_next().await;
            if let (Some(disk), Some(state)) = (&self.components.disk, &self.state) {
                disk.set_unacked_bytes(state.session, state.outbox.bytes());
            }
            let has_next = self.state.as_ref().is_some_and(|c| c.outbox.has_next());
            let has_unmounted_groups = self.has_unmounted_groups();
            let is_flushing = self.components.flush.has_begun();
            tokio::select! {
                () = stopped(&mut stop) => return StreamEnd::Stop,
                changed = hosted.changed() => return match changed {
                    Ok(()) => StreamEnd::Remount,
                    Err(_) => StreamEnd::Lost(MasterError::NotMaster),
                },
                () = &mut stale_master_delay, if has_unmounted_groups => {
                    self.map_signal.request_refresh();
                    return StreamEnd::Remount;
                },
                message = from_master.message() => match message {
                    Ok(Some(message)) => if let Err(error) = self.on_message(&message) {
                        return StreamEnd::Broken(error);
                    },
                    Ok(None) => return StreamEnd::Broken(MasterError::Ended),
                    Err(status) => return ended(status.into()),
                },
                permit = to_master.reserve(), if has_next => match permit {
                    Ok(permit) => if let Some(message) = self.next_message() {
                        permit.send(message);
                    },
                    // The connection is closed; the other direction has the reason.
                    Err(_) => match moontide_tasks::time::timeout(CALL_TIMEOUT, from_master.message()).await {
                        Ok(Err(status)) => return ended(status.into()),
                        _ => return StreamEnd::Broken(MasterError::Ended),
                    },
                },
                event = self.events.recv() => if let Some(event) = event {
                    self.take_events(event);
                },
                _ = clock.tick() => {
                    let now = SystemClock.now();
                    let Some(state) = &mut self.state else { return StreamEnd::Lost(MasterError::Ended) };
                    if state.heartbeats.is_lost(now) {
                        return StreamEnd::Lost(MasterError::NoHeartbeatAck);
                    }
                    if state.heartbeats.is_overdue(now) {
                        return StreamEnd::Broken(MasterError::NoHeartbeatAck);
                    }
                    self.send_heartbeat();
                },
                _ = flush_clock.tick(), if is_flushing => self.send_heartbeat(),
                // The condition above is computed again.
                _ = flush_begun.changed(), if !is_flushing => {},
                _ = drain_changed.changed() => self.send_heartbeat(),
            }
        }
    }

    fn next_message(&mut self) -> Option<v1::NodeMessage> {
        let highest_term = self.highest_term;
        self.state.as_mut()?.outbox.next(highest_term)
    }

    /// Handles a message of the master.
    fn on_message(&mut self, message: &v1::MasterMessage) -> Result<(), MasterError> {
        let has_unmounted_groups = self.has_unmounted_groups();
        let Some(state) = &mut self.state else { return Ok(()) };
        let message = MasterMessage::from_wire(message).map_err(MasterError::Message)?;
        let is_settled = !has_unmounted_groups && self.map_signal.is_followed(message.map_version);
        if message.session != state.session {
            return Err(MasterError::OtherSession);
        }
        self.highest_term = self.highest_term.max(message.term);
        self.map_signal.version(message.map_version);
        state.outbox.acked(message.acked_sequence);
        match message.body {
            MasterMessageBody::Commands(Commands { commands, .. }) if commands.is_empty() => {}
            MasterMessageBody::Commands(Commands { commands, sources, nodes }) => {
                self.components.copier.learn(nodes.iter().map(peer_of).collect());
                let (commands, sources) = (commands.iter().collect(), sources.iter().collect());
                let task = ExecutorTask::Commands { session: state.session, commands, sources };
                let _ = self.components.tasks.send(task);
            }
            MasterMessageBody::CapabilityKey(key) => {
                self.components.capabilities.hold(state.key.0, &key.key, &state.keyed);
                let held = v1::CapabilityKeyHeld { rotation: key.rotation };
                self.components.counters.capability_key();
                state.key.1 = key;
                state.outbox.push(Body::CapabilityKeyHeld(held));
            }
            MasterMessageBody::HeartbeatAck { heartbeat_id, ttl_ms, in_sync, flush, drain } => {
                drain.into_iter().for_each(|drain| self.components.drain.set(drain));
                state.heartbeats.acked(heartbeat_id, Duration::from_millis(ttl_ms.into()));
                let in_sync = state.sync_gate.filter(heartbeat_id, in_sync, &state.mounted);
                if self.router.sync_marks.record(&in_sync, state.heartbeats.last_acked()) {
                    for file in 0..self.router.sync_marks.files() {
                        let marks = Arc::clone(&self.router.sync_marks);
                        moontide_tasks::spawn_blocking(move || marks.write(file));
                    }
                }
                // An answer from before a change of the groups does not count.
                match flush.filter(|_| is_settled && state.is_reported()) {
                    Some(status) => self.components.flush.answered(&self.route, status),
                    None if self.components.flush.has_begun() => self.components.flush.outdated(&self.route),
                    None => {}
                }
            }
        }
        if state.is_reported() {
            self.backoff.reset();
            // If this was the last one, all masters are synced.
            let skip = moontide_rt::mutation_enabled("old-answer-taken-for-new");
            let sent = if skip { SystemClock.now() } else { state.heartbeats.last_acked() };
            if let Some(at) = self.router.mark_synced(&self.route, sent, &state.mounted) {
                self.components.index_gate.mark_synced(at);
                if !self.components.status.is_mounted() {
                    info!(session = %state.session, "all masters synced");
                }
                self.components.status.change(|status| {
                    status.mounted = true;
                    status.last_error = None;
                });
            }
        }
        Ok(())
    }

    /// Takes the snapshot of the next segment to report, if the master keeps up.
    async fn report_next(&mut self) {
        let Some(state) = &mut self.state else { return };
        if let Some((segment, first)) = state.reports.next_due() {
            if state.outbox.bytes() >= UNACKED_BYTES_MAX {
                return;
            }
            let memory = Arc::clone(&self.components.memory);
            let taken = moontide_tasks::spawn_blocking(move || snapshot::take(&memory, segment, first)).await;
            mark!("change during a snapshot", !self.events.is_empty());
            let (snapshot, unreadable) = match taken {
                Ok(Some(taken)) => taken,
                Ok(None) | Err(_) => return warn!(segment = segment.0, "no snapshot of segment"),
            };
            let first = first.min(snapshot.records);
            info!(segment = segment.0, records = snapshot.records - first, "segment reported");
            self.components.counters.reported(snapshot.records - first);
            for body in state.reports.snapshot(snapshot) {
                state.outbox.push(body);
            }
            if !unreadable.is_empty() {
                warn!(
                    segment = segment.0,
                    records = unreadable.len(),
                    "killed records without a readable key"
                );
                self.components.counters.unreadable(unreadable.len() as u64);
                self.components.owner.abandon(&unreadable);
            }
        }
        let hosted = self.hosted.borrow();
        let all_mounted = mount_diff(self.descriptor.groups, &hosted, &state.mounted).0.is_empty();
        if state.complete.is_none() && state.reports.is_complete() && all_mounted {
            state.complete = Some(state.outbox.last());
        }
    }

    /// Queues a heartbeat with the state of the node.
    fn send_heartbeat(&mut self) {
        let Some(state) = &mut self.state else { return };
        let Some(heartbeat_id) = state.heartbeats.heartbeat(SystemClock.now()) else { return };
        state.sync_gate.sends(heartbeat_id, state.complete.is_some());
        // A master that does not know all objects would take the flush for complete too early.
        let is_flushing = self.components.flush.has_begun() && state.is_reported();
        let memory = &self.components.memory;
        // Reads are counted once, for whichever group: only the default route sends them.
        let reads = if self.router.is_default_route(&self.route) {
            calls::since(self.components.reads(), &state.reads_before)
        } else {
            state.reads_before = self.components.reads();
            v1::ReadCounters::default()
        };
        let touched = memory.take_touched().bitmaps(memory.generation(), heartbeat_id);
        let own = |node_segment: &&NodeSegment| {
            let group = self.router.group_of(node_segment.segment().shape().segment);
            group.is_some_and(|group| state.mounted.contains_key(&group))
        };
        let heartbeat = v1::Heartbeat {
            heartbeat_id,
            reads: Some(reads),
            touched: self.router.route_touched(&set_of(self.descriptor.groups, &state.mounted), touched),
            segments: memory
                .segments()
                .iter()
                .filter(own)
                .take(moontide_types::limits::BATCH_KEYS_MAX)
                .map(calls::segment_status)
                .collect(),
            disk: self.components.disk.as_ref().map(|disk| disk.status()),
            pressure: Some(v1::Pressure {
                staging_permille: self.components.disk.as_ref().map_or(0, |disk| disk.staging_permille()),
                ..Default::default()
            }),
            flushing: is_flushing,
            draining: self.components.drain.is_draining(),
            remote_reads: memory.remote_reads().take(|segment| {
                self.router.group_of(segment).is_some_and(|group| state.mounted.contains_key(&group))
            }),
        };
        state.outbox.push(Body::Heartbeat(heartbeat));
    }

    /// Processes an event and all others that are queued.
    fn take_events(&mut self, first: NodeEvent) {
        let mut next = Some(first);
        let mut changes = Vec::new();
        for _ in 0..EVENTS_MAX {
            let Some(event) = next else { break };
            self.take_event(event, &mut changes);
            next = self.events.try_recv().ok();
        }
        if let Some(event) = next {
            self.take_event(event, &mut changes);
        }
        let Some(state) = &mut self.state else { return };
        for body in state.reports.changes(changes) {
            self.components.counters.changes(1);
            state.outbox.push(body);
        }
    }

    fn take_event(&mut self, event: NodeEvent, changes: &mut Vec<SlotChange>) {
        let Some(state) = &mut self.state else { return };
        match event {
            NodeEvent::Change(change) => changes.push(change),
            NodeEvent::Results { session, results } if session == state.session => {
                let results: PackedBuilder<CommandResult> = results.into_iter().collect();
                let results = v1::CommandResults { results: results.finish().into() };
                state.outbox.push(Body::CommandResults(results));
            }
            NodeEvent::Results { .. } => {} // of an ended session
            NodeEvent::Report(segment) => {
                state.reports.restart(segment);
                state.complete = None;
                state.sync_gate.close();
            }
            NodeEvent::Offloaded { session, notice } if session == state.session => {
                state.outbox.push(Body::Offloaded(notice));
            }
            NodeEvent::DiskEvicted { session, evicted } if session == state.session => {
                state.outbox.push(Body::DiskEvicted(evicted));
            }
            NodeEvent::Offloaded { .. } | NodeEvent::DiskEvicted { .. } => {} // of an ended session
        }
    }

    /// Connects to the master.
    async fn connect(&mut self) -> Result<Client, Interrupted> {
        let (master, descriptor) = (Arc::clone(&self.master), Arc::clone(&self.descriptor));
        let client =
            self.with_timeout(calls::connect_and_verify(&master, &descriptor), 2 * CALL_TIMEOUT).await??;
        Ok(client)
    }

    /// Calls the master, and processes events meanwhile.
    async fn call<T>(
        &mut self,
        call: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
    ) -> Result<T, Interrupted> {
        let response = self.with_timeout(call, CALL_TIMEOUT).await?;
        Ok(response.map_err(MasterError::from)?.into_inner())
    }

    async fn pause(&mut self) -> Result<(), Stopped> {
        let wait = self.backoff.pause(Duration::ZERO, self.random.next_u64());
        // One timer only. With two, a thread that is interrupted between the two polls sees only the end of the later one.
        match self.with_timeout(std::future::pending::<()>(), wait).await {
            Err(Interrupted::Stop) => Err(Stopped),
            Ok(()) | Err(Interrupted::Failed(_)) => Ok(()),
        }
    }

    /// Waits for a future, at most for `timeout`, and processes events meanwhile.
    async fn with_timeout<T>(
        &mut self,
        future: impl Future<Output = T>,
        timeout: Duration,
    ) -> Result<T, Interrupted> {
        let (mut stop, mut hosted) = (self.stop.clone(), self.hosted.clone());
        let (mut future, mut timeout) =
            (std::pin::pin!(future), std::pin::pin!(moontide_tasks::time::sleep(timeout)));
        loop {
            tokio::select! {
                biased;
                () = stopped(&mut stop) => return Err(Interrupted::Stop),
                () = groups_withdrawn(&mut hosted) => return Err(Interrupted::Stop),
                done = &mut future => return Ok(done),
                () = &mut timeout => return Err(Interrupted::Failed(MasterError::Timeout)),
                event = self.events.recv() => if let Some(event) = event {
                    self.take_events(event);
                },
            }
        }
    }
}

/// Waits until the node stops. A dropped sender means the same.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|&stop| stop).await;
}

/// Waits until the sender of the hosted groups is dropped: the master hosts none.
async fn groups_withdrawn(hosted: &mut watch::Receiver<HostedGroups>) {
    while hosted.changed().await.is_ok() {}
}

/// Returns the effect of a stream's end on its session.
fn ended(error: MasterError) -> StreamEnd {
    let code = match &error {
        MasterError::Status(status) => code_of(status),
        _ => None,
    };
    match code {
        // Stale, wrong master, or an invalid message: sending it again does not help.
        Some(
            ErrorCode::StaleSession
            | ErrorCode::WrongMaster
            | ErrorCode::StaleTerm
            | ErrorCode::InvalidArgument
            | ErrorCode::TooLarge
            | ErrorCode::Unsupported,
        ) => StreamEnd::Lost(error),
        _ => StreamEnd::Broken(error),
    }
}
