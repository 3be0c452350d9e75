//! [`SessionDriver`]: keeps a session with one master like the shipped driver, with events in place of tasks.
//!
//! ```text
//!   open session ──▶ mount ──▶ attach ──▶ stream
//!     ▲   ▲           │ ▲         ▲          │ broken: again, same session
//!     │   └───────────┘ └─────────┼──────────┤ other groups: mounted beside
//!     │                           └──────────┤
//!     └──────────────────────────────────────┘
//!       failed, or the session is lost: after a pause
//! ```

use std::collections::VecDeque;
use std::num::NonZeroU16;
use std::time::Duration;

use moontide_heap::KillOutcome;
use moontide_node::logic::commands::SlotVersion;
use moontide_node::logic::groups::{GroupSet, HostedGroups, mount_diff, set_of};
use moontide_node::logic::outbox::{HeartbeatTracker, Outbox};
use moontide_node::logic::report::{
    ReportBuilder, ReportedRecord, Reports, SegmentTerm, Snapshot, record_of,
};
use moontide_node::logic::sync_marks::SyncGate;
use moontide_node::logic::timing::{MASTER_BACKOFF, heartbeat_interval};
use moontide_proto::convert::{
    MasterMessage, MasterMessageBody, MountResult, MountSegmentsResponse, OpenSessionResponse, Wire,
};
use moontide_proto::{PackedBuilder, ProtocolVersions, v1};
use moontide_rt::{Backoff, SplitMix64};
use moontide_types::record::State;
use moontide_types::{ErrorCode, GroupId, MonoTime, SegmentId, SessionId, Term};
use v1::node_message::Body;

use super::memory::NodeMemory;
use super::{ExecutorTask, LONG_AGO, Node, NodeEvent, NodeTimer};
use crate::context::ProcessContext;
use crate::event::{Message, NodeRequest, NodeResponse, ProcessId, Timer};

/// How long one call to the master may take.
const CALL_MAX: Duration = Duration::from_secs(2);
/// How long begins and commits are reported after a session was lost.
const TELL_FOR: Duration = Duration::from_secs(60);
/// Unacknowledged bytes above which no further snapshot is taken.
const UNACKED_BYTES_MAX: usize = 8 << 20;
/// How long a master that does not know yet that it hosts a group is given.
const BEHIND_PAUSE: Duration = Duration::from_millis(100);
/// Consecutive streams of one session that may break without a message from the master.
const BREAKS_MAX: u32 = 5;

/// How far the driver is.
#[derive(Debug)]
enum SessionStage {
    /// Until then; then another session, or another stream of this one.
    Pausing {
        pause: u64,
        same_session: bool,
    },
    Opening {
        call: u64,
        asked: MonoTime,
    },
    /// Segments that were offered, and whether they held something.
    Mounting {
        call: u64,
        missing: GroupSet,
        offered: Vec<(SegmentId, bool)>,
    },
    /// The disk, after the segments of these groups in these terms.
    MountingDisk {
        call: u64,
        groups: GroupSet,
        terms: HostedGroups,
    },
    Attaching {
        stream: u64,
    },
    Streaming {
        stream: u64,
    },
}

/// Keeps the session with one master.
#[derive(Debug)]
pub(super) struct SessionDriver {
    master: usize,
    /// The master's own, which it has from the registry.
    number: u32,
    /// Groups that the master hosts according to the map.
    wanted: HostedGroups,
    groups: GroupSet,
    /// They have changed since something was mounted.
    changed: bool,
    /// Time of the last complete report that the master has acknowledged.
    synced_at: Option<MonoTime>,
    stage: SessionStage,
    highest_term: Term,
    session_state: Option<SessionState>,
    backoff: Backoff,
    random: SplitMix64,
    breaks: u32,
    /// What was acknowledged when the stream began.
    acknowledged: u64,
    /// Which wait for a master that is behind counts.
    behind: u64,
    events: VecDeque<NodeEvent>,
}

/// One session.
#[derive(Debug)]
struct SessionState {
    session: SessionId,
    /// The groups whose segments are mounted, and the terms in which they are.
    mounted: HostedGroups,
    outgoing: Outbox,
    heartbeats: HeartbeatTracker,
    reports: Reports,
    /// Sequence number of the message that completes the report.
    complete: Option<u64>,
    sync_gate: SyncGate,
}

impl SessionDriver {
    pub(super) fn new(
        boot: u64,
        master: usize,
        number: u32,
        groups: NonZeroU16,
        wanted: HostedGroups,
    ) -> SessionDriver {
        SessionDriver {
            master,
            number,
            groups: set_of(groups, &wanted),
            wanted,
            changed: false,
            synced_at: None,
            stage: SessionStage::Pausing { pause: 0, same_session: false },
            highest_term: Term::ZERO,
            session_state: None,
            backoff: MASTER_BACKOFF,
            random: SplitMix64::new(boot),
            breaks: 0,
            acknowledged: 0,
            behind: 0,
            events: VecDeque::new(),
        }
    }

    pub(super) fn master(&self) -> usize {
        self.master
    }

    pub(super) fn master_number(&self) -> u32 {
        self.number
    }

    pub(super) fn is_good(&self) -> bool {
        self.synced_at.is_some()
    }

    pub(super) fn has_group(&self, group: GroupId) -> bool {
        self.groups.contains(group)
    }

    pub(super) fn session(&self) -> Option<SessionId> {
        self.session_state.as_ref().map(|c| c.session)
    }

    /// Whether these are other groups than before.
    pub(super) fn wants(&mut self, groups: NonZeroU16, wanted: HostedGroups) -> bool {
        self.groups = set_of(groups, &wanted);
        let changes = self.wanted != wanted;
        self.wanted = wanted;
        self.changed |= changes;
        changes
    }

    /// Whether its queue was empty.
    pub(super) fn enqueue(&mut self, event: NodeEvent) -> bool {
        self.events.push_back(event);
        self.events.len() == 1
    }

    pub(super) fn stream(&self) -> Option<u64> {
        match self.stage {
            SessionStage::Attaching { stream } | SessionStage::Streaming { stream } => Some(stream),
            _ => None,
        }
    }

    fn streams_on(&self, number: u64) -> bool {
        matches!(self.stage, SessionStage::Streaming { stream } if stream == number)
    }

    fn acknowledged_now(&self) -> u64 {
        self.session_state.as_ref().map_or(0, |c| c.outgoing.acknowledged())
    }

    fn is_lost(&self, now: MonoTime) -> bool {
        self.session_state.as_ref().is_none_or(|c| c.heartbeats.is_lost(now))
    }

    fn is_behind(&self) -> bool {
        let groups = self.groups.of();
        self.session_state
            .as_ref()
            .is_some_and(|c| !mount_diff(groups, &self.wanted, &c.mounted).0.is_empty())
    }
}

fn context(caller: u64, session: Option<SessionId>) -> Option<v1::RequestContext> {
    Some(v1::RequestContext {
        caller,
        session: session.map_or(0, |session| session.0),
        timeout_ms: CALL_MAX.as_millis() as u32,
        ..Default::default()
    })
}

impl Node {
    fn driver(&mut self, route: u64) -> &mut SessionDriver {
        self.drivers.get_mut(&route).expect("found by the caller")
    }

    /// The line of the driver that this is for.
    fn route(&self, concerns: impl Fn(&SessionDriver) -> bool) -> Option<u64> {
        self.drivers.iter().find(|(_, driver)| concerns(driver)).map(|(&route, _)| route)
    }

    fn call(&mut self, route: u64, request: NodeRequest, cx: &mut ProcessContext<'_>) -> u64 {
        let call = self.number();
        let master = ProcessId::Master(self.driver(route).master);
        cx.send(master, Message::NodeCall { call, request });
        cx.wake_in(CALL_MAX, Timer::Node(NodeTimer::CallOver { call }));
        call
    }

    pub(super) fn open(&mut self, route: u64, cx: &mut ProcessContext<'_>) {
        let versions = ProtocolVersions::CURRENT;
        let request = v1::OpenSessionRequest {
            context: context(self.boot, None),
            node: self.id.0,
            boot_id: self.boot,
            addresses: vec![v1::Address { engine: "tcp".into(), address: format!("node-{}:1", self.index) }],
            topology: Some(v1::Topology { host: format!("host-{}", self.index), ..Default::default() }),
            protocol_min: versions.min.into(),
            protocol_max: versions.max.into(),
            highest_term: self.driver(route).highest_term.get(),
        };
        let asked = cx.now();
        let call = self.call(route, NodeRequest::Open(request), cx);
        self.driver(route).stage = SessionStage::Opening { call, asked };
    }

    pub(super) fn answered(&mut self, call: u64, reply: NodeResponse, cx: &mut ProcessContext<'_>) {
        let waits = |driver: &SessionDriver| match driver.stage {
            SessionStage::Opening { call: waited, .. }
            | SessionStage::Mounting { call: waited, .. }
            | SessionStage::MountingDisk { call: waited, .. } => waited == call,
            _ => false,
        };
        let route = self.route(waits);
        match (route, reply) {
            (_, NodeResponse::Map(reply)) => self.map_received(call, reply, cx),
            (Some(route), NodeResponse::Opened(reply)) => self.opened(route, &reply, cx),
            (Some(route), NodeResponse::Mounted(reply)) => self.mounted(route, &reply, cx),
            (None, _) => {} // of a call that was given up
        }
    }

    pub(super) fn call_over(&mut self, call: u64, cx: &mut ProcessContext<'_>) {
        let waits = |driver: &SessionDriver| match driver.stage {
            SessionStage::Opening { call: waited, .. }
            | SessionStage::Mounting { call: waited, .. }
            | SessionStage::MountingDisk { call: waited, .. } => waited == call,
            SessionStage::Attaching { stream } => stream == call,
            _ => false,
        };
        let Some(route) = self.route(waits) else { return };
        match self.driver(route).stage {
            SessionStage::Attaching { .. } => self.broken(route, cx),
            _ => self.failed(route, None, cx),
        }
    }

    /// The session is over: nothing of it is wanted any more.
    fn end_session_state(&mut self, route: u64, cx: &mut ProcessContext<'_>) {
        let driver = self.driver(route);
        driver.synced_at = None;
        if let Some(ended) = driver.session_state.take() {
            if let Some(disk) = &mut self.disk {
                disk.end_session(ended.session);
            }
            self.give_work(ExecutorTask::Session { begins: None, ends: Some(ended.session) }, cx);
        }
    }

    fn opened(&mut self, route: u64, reply: &v1::OpenSessionResponse, cx: &mut ProcessContext<'_>) {
        let SessionStage::Opening { asked, .. } = self.driver(route).stage else { return };
        let reply = OpenSessionResponse::from_wire(reply).expect("the master speaks as it should");
        let Some(grant) = reply.body() else { return self.failed(route, reply.context().code, cx) };
        let (session, term) = (grant.session, reply.context().term);
        let ttl = Duration::from_millis(grant.ttl_ms.into());
        self.end_session_state(route, cx);
        self.give_work(ExecutorTask::Session { begins: Some(session), ends: None }, cx);
        let driver = self.driver(route);
        driver.highest_term = driver.highest_term.max(term);
        driver.breaks = 0;
        driver.session_state = Some(SessionState {
            session,
            mounted: HostedGroups::new(),
            outgoing: Outbox::new(session),
            heartbeats: HeartbeatTracker::new(asked, ttl),
            reports: Reports::default(),
            complete: None,
            sync_gate: SyncGate::default(),
        });
        self.mount(route, cx);
    }

    /// Mounts the segments of groups that the master hosts and did not host before, and forgets those that it hosts no
    /// more.
    fn mount(&mut self, route: u64, cx: &mut ProcessContext<'_>) {
        let now = cx.now();
        let (groups, boot) = (self.groups, self.boot);
        let driver = self.drivers.get_mut(&route).expect("found by the caller");
        driver.changed = false;
        let Some(session_state) = &mut driver.session_state else { return };
        let session = session_state.session;
        let (missing, lost) = mount_diff(groups, &driver.wanted, &session_state.mounted);
        session_state.complete = None;
        session_state.sync_gate.close();
        session_state.mounted.retain(|group, _| !lost.contains(*group));
        if let Some(disk) = &mut self.disk {
            disk.narrow(session, &set_of(groups, &session_state.mounted));
        }
        let segments = &mut self.memory.segments;
        for node_segment in segments.iter().filter(|node_segment| lost.contains(node_segment.group)) {
            session_state.reports.unmounted(node_segment.segment.shape().segment);
        }
        let mut offered_before = false;
        for node_segment in segments.iter_mut().filter(|node_segment| missing.contains(node_segment.group)) {
            offered_before |= std::mem::replace(&mut node_segment.was_offered, true);
        }
        let offered = segments.iter().filter(|node_segment| missing.contains(node_segment.group));
        // Set before the segments are scanned: everything begun from now on is reported or seen by the scan.
        if offered_before {
            self.tell_until = self.tell_until.max(now.after(TELL_FOR));
        }
        let specs: Vec<v1::SegmentSpec> = offered.map(|node_segment| node_segment.spec()).collect();
        let synced = self.sync_marks.to_wire(now);
        let offered: Vec<(SegmentId, bool)> =
            specs.iter().map(|spec| (SegmentId(spec.segment), spec.has_records)).collect();
        if offered.is_empty() {
            return self.attach(route, cx);
        }
        let request =
            v1::MountSegmentsRequest { context: context(boot, Some(session)), segments: specs, synced };
        let call = self.call(route, NodeRequest::Mount(request), cx);
        self.driver(route).stage = SessionStage::Mounting { call, missing, offered };
    }

    fn mounted(&mut self, route: u64, reply: &v1::MountSegmentsResponse, cx: &mut ProcessContext<'_>) {
        let driver = self.drivers.get_mut(&route).expect("found by the caller");
        if let SessionStage::MountingDisk { groups, terms, .. } = &driver.stage {
            let (groups, terms) = (groups.clone(), terms.clone());
            return self.disk_mounted(route, groups, terms, reply, cx);
        }
        let SessionStage::Mounting { missing, offered, .. } = &driver.stage else { return };
        let (mut mounted, offered) = (missing.clone(), offered.clone());
        let reply = MountSegmentsResponse::from_wire(reply).expect("the master speaks as it should");
        let grants: &[MountResult] = reply.body().map_or(&[], |body| &body.results);
        if reply.context().code.is_some() || grants.len() != offered.len() {
            let code = reply.context().code;
            return self.failed(route, code, cx);
        }
        let mut terms = HostedGroups::new();
        let mut elsewhere = GroupSet::none(self.groups);
        let Some(session_state) = &mut driver.session_state else { return };
        for (&(segment, occupied), grant) in offered.iter().zip(grants) {
            let node_segment = &mut self.memory.segments[segment.0 as usize];
            match grant.code {
                None => {}
                // The master does not host the group yet, or no longer: the next map resolves it.
                Some(ErrorCode::WrongMaster | ErrorCode::Retry) => {
                    elsewhere.insert(node_segment.group);
                    continue;
                }
                code => return self.failed(route, code, cx),
            }
            // First the term, then the snapshot: what an older master granted is refused from here on.
            node_segment.granted(grant.group, grant.term);
            terms.insert(grant.group, grant.term);
            driver.highest_term = driver.highest_term.max(grant.term);
            let of = SegmentTerm {
                segment,
                generation: node_segment.segment.shape().generation,
                term: grant.term,
            };
            // Segments with a begin during the mount call need a snapshot, too; it would not be reported otherwise.
            session_state.reports.mounted(of, occupied || node_segment.is_occupied());
        }
        mounted = mounted.without(&elsewhere);
        terms.retain(|group, _| mounted.contains(*group));
        let session = session_state.session;
        if mounted.is_empty() || self.disk.is_none() {
            return self.all_mounted(route, terms, cx);
        }
        let disk = self.disk.as_mut().expect("just looked");
        // Before the master has the disk: the end of the report must not arrive before the inventory.
        disk.announce(session);
        let segments = vec![disk.spec(self.memory.generation.0)];
        let synced = self.sync_marks.to_wire(cx.now());
        let request =
            v1::MountSegmentsRequest { context: context(self.boot, Some(session)), segments, synced };
        let call = self.call(route, NodeRequest::Mount(request), cx);
        self.driver(route).stage = SessionStage::MountingDisk { call, groups: mounted, terms };
    }

    fn disk_mounted(
        &mut self,
        route: u64,
        groups: GroupSet,
        terms: HostedGroups,
        reply: &v1::MountSegmentsResponse,
        cx: &mut ProcessContext<'_>,
    ) {
        let reply = MountSegmentsResponse::from_wire(reply).expect("the master speaks as it should");
        let grant = reply.body().and_then(|body| body.results.first());
        let code = reply.context().code.or(grant.and_then(|grant| grant.code));
        let Some(session) = self.driver(route).session() else { return };
        if code.is_some() || grant.is_none() {
            return self.failed(route, code, cx);
        }
        self.begin_telling(session, groups, cx);
        self.all_mounted(route, terms, cx);
    }

    fn all_mounted(&mut self, route: u64, terms: HostedGroups, cx: &mut ProcessContext<'_>) {
        if let Some(session_state) = &mut self.driver(route).session_state {
            session_state.mounted.extend(terms);
        }
        self.attach(route, cx);
    }

    fn attach(&mut self, route: u64, cx: &mut ProcessContext<'_>) {
        let stream = self.number();
        let driver = self.driver(route);
        driver.stage = SessionStage::Attaching { stream };
        driver.acknowledged = driver.acknowledged_now();
        let master = ProcessId::Master(driver.master);
        let Some(session_state) = &mut driver.session_state else { return };
        session_state.outgoing.rewind();
        cx.send(master, Message::StreamOpen { stream, session: session_state.session });
        cx.wake_in(CALL_MAX, Timer::Node(NodeTimer::CallOver { call: stream }));
        self.heartbeat(route, cx);
        // The master may need a message before it replies.
        self.say_next(route, stream, cx);
    }

    pub(super) fn stream_opened(&mut self, stream: u64, cx: &mut ProcessContext<'_>) {
        let attaches = |driver: &SessionDriver| matches!(driver.stage, SessionStage::Attaching { stream: s } if s == stream);
        let Some(route) = self.route(attaches) else { return };
        self.driver(route).stage = SessionStage::Streaming { stream };
        self.wake_to_beat(route, stream, cx);
        self.pump(route, cx);
    }

    fn wake_to_beat(&mut self, route: u64, stream: u64, cx: &mut ProcessContext<'_>) {
        let ttl = self.driver(route).session_state.as_ref().map_or(CALL_MAX, |c| c.heartbeats.ttl());
        cx.wake_in(heartbeat_interval(ttl), Timer::Node(NodeTimer::Heartbeat { stream }));
    }

    /// This end of the stream is closed.
    fn hang_up(&mut self, route: u64, cx: &mut ProcessContext<'_>) {
        let driver = self.driver(route);
        if let Some(stream) = driver.stream() {
            cx.send(ProcessId::Master(driver.master), Message::StreamEnd { stream, code: None });
        }
    }

    /// The session is no more: another one after a pause.
    fn failed(&mut self, route: u64, code: Option<ErrorCode>, cx: &mut ProcessContext<'_>) {
        self.hang_up(route, cx);
        self.end_session_state(route, cx);
        if code == Some(ErrorCode::StaleSession) {
            self.driver(route).backoff.reset(); // the master is there, and waits for us
        }
        self.news(cx); // it may not be the master any more
        self.pause(route, false, cx);
    }

    /// The session goes on, with another stream.
    fn broken(&mut self, route: u64, cx: &mut ProcessContext<'_>) {
        let driver = self.driver(route);
        // One that breaks as soon as it is there will not come to anything in this session.
        driver.breaks = if driver.acknowledged_now() > driver.acknowledged { 0 } else { driver.breaks + 1 };
        if driver.breaks >= BREAKS_MAX || driver.is_lost(cx.now()) {
            return self.failed(route, None, cx);
        }
        self.hang_up(route, cx);
        self.news(cx);
        self.pause(route, true, cx);
    }

    /// Its master hosts nothing any more.
    pub(super) fn dismiss(&mut self, route: u64, cx: &mut ProcessContext<'_>) {
        self.hang_up(route, cx);
        self.end_session_state(route, cx);
        self.drivers.remove(&route);
    }

    fn pause(&mut self, route: u64, same_session: bool, cx: &mut ProcessContext<'_>) {
        let pause = self.number();
        let driver = self.driver(route);
        driver.stage = SessionStage::Pausing { pause, same_session };
        let wait = driver.backoff.pause(Duration::ZERO, driver.random.next_u64());
        cx.wake_in(wait, Timer::Node(NodeTimer::Pause { pause }));
    }

    pub(super) fn pause_over(&mut self, over: u64, cx: &mut ProcessContext<'_>) {
        let pauses = |driver: &SessionDriver| matches!(driver.stage, SessionStage::Pausing { pause, .. } if pause == over);
        let Some(route) = self.route(pauses) else { return };
        match self.driver(route).stage {
            SessionStage::Pausing { same_session: true, .. } => self.attach(route, cx),
            _ => self.open(route, cx),
        }
    }

    pub(super) fn stream_ended(&mut self, ended: u64, code: Option<ErrorCode>, cx: &mut ProcessContext<'_>) {
        let Some(route) = self.route(|driver| driver.stream() == Some(ended)) else { return };
        match code {
            // Stale, not its master, or invalid: a repetition changes nothing.
            Some(
                ErrorCode::StaleSession
                | ErrorCode::WrongMaster
                | ErrorCode::StaleTerm
                | ErrorCode::InvalidArgument
                | ErrorCode::TooLarge
                | ErrorCode::Unsupported,
            ) => self.failed(route, code, cx),
            _ => self.broken(route, cx),
        }
    }

    pub(super) fn heartbeat_due(&mut self, stream: u64, cx: &mut ProcessContext<'_>) {
        let Some(route) = self.route(|driver| driver.streams_on(stream)) else { return };
        let now = cx.now();
        let Some(session_state) = &self.driver(route).session_state else { return };
        if session_state.heartbeats.is_lost(now) {
            return self.failed(route, None, cx);
        }
        if session_state.heartbeats.is_overdue(now) {
            return self.broken(route, cx);
        }
        self.heartbeat(route, cx);
        self.wake_to_beat(route, stream, cx);
        self.pump(route, cx);
    }

    /// Sends a heartbeat with the usage of the node.
    fn heartbeat(&mut self, route: u64, cx: &mut ProcessContext<'_>) {
        let groups = self.groups;
        let driver = self.drivers.get_mut(&route).expect("found by the caller");
        let Some(session_state) = &mut driver.session_state else { return };
        let now = cx.now();
        let Some(heartbeat) = session_state.heartbeats.heartbeat(now) else { return };
        session_state.sync_gate.sends(heartbeat, session_state.complete.is_some());
        let mounted = set_of(groups, &session_state.mounted);
        let own = self.memory.segments.iter().filter(|node_segment| mounted.contains(node_segment.group));
        let segments = own.map(|node_segment| node_segment.status()).collect();
        session_state.outgoing.push(Body::Heartbeat(v1::Heartbeat {
            heartbeat_id: heartbeat,
            reads: Some(v1::ReadCounters::default()),
            touched: self.memory.take_touched(heartbeat, &mounted),
            segments,
            disk: self.disk.as_ref().map(|disk| disk.status(now)),
            pressure: Some(v1::Pressure::default()),
            flushing: false,
        }));
    }

    /// A message of the master.
    pub(super) fn receive(&mut self, stream: u64, message: &v1::MasterMessage, cx: &mut ProcessContext<'_>) {
        let Some(route) = self.route(|driver| driver.stream() == Some(stream)) else { return };
        let driver = self.drivers.get_mut(&route).expect("just found");
        let Some(session_state) = &mut driver.session_state else { return };
        let message = MasterMessage::from_wire(message).expect("the master speaks as it should");
        if message.session != session_state.session {
            return self.broken(route, cx);
        }
        driver.highest_term = driver.highest_term.max(message.term);
        session_state.outgoing.acked(message.acked_sequence);
        let session = session_state.session;
        let mut work = None;
        match message.body {
            MasterMessageBody::Commands(commands) if commands.is_empty() => {}
            MasterMessageBody::Commands(commands) => {
                work = Some(ExecutorTask::Commands { session, commands: commands.iter().collect() });
            }
            MasterMessageBody::HeartbeatAck { heartbeat_id: heartbeat, ttl_ms, in_sync, .. } => {
                session_state.heartbeats.acked(heartbeat, Duration::from_millis(ttl_ms.into()));
                let in_sync = session_state.sync_gate.filter(heartbeat, in_sync, &session_state.mounted);
                let changed = self.sync_marks.record(&in_sync, session_state.heartbeats.last_acked());
                if let Some(disk) = self.disk.as_mut().filter(|_| changed) {
                    disk.write_sync_marks(&self.sync_marks);
                }
            }
        }
        let acknowledged = session_state.outgoing.acknowledged();
        let acked_at = session_state.heartbeats.last_acked();
        if session_state.complete.is_some_and(|complete| complete <= acknowledged) {
            driver.backoff.reset();
            self.route_synced(route, acked_at);
        }
        if let Some(work) = work {
            self.give_work(work, cx);
        }
        self.heard_of(message.map_version.0, cx);
        self.pump(route, cx);
    }

    /// Records that the master has the complete report of this time.
    fn route_synced(&mut self, route: u64, at: MonoTime) {
        let groups = self.groups;
        let driver = self.drivers.get_mut(&route).expect("found by the caller");
        let Some(session_state) = &driver.session_state else { return };
        let mounted = &session_state.mounted;
        let all_mounted = driver.groups.without(&set_of(groups, mounted)).is_empty();
        driver.synced_at = all_mounted.then_some(at);
        let mut covered = GroupSet::none(groups);
        self.drivers.values().for_each(|driver| covered.extend(&driver.groups));
        if covered.len() == usize::from(groups.get()) {
            let hosts = self.drivers.values().filter(|driver| !driver.groups.is_empty());
            self.synced_at = self.synced_at.max(hosts.map(|driver| driver.synced_at).min().flatten());
        }
    }

    /// What has happened at the node since the last time.
    pub(super) fn take_events(&mut self, route: u64, cx: &mut ProcessContext<'_>) {
        let Some(driver) = self.drivers.get_mut(&route) else { return };
        let mut changes = Vec::new();
        let taken = std::mem::take(&mut driver.events);
        // Without a session they are dropped: the next one begins with a snapshot.
        let Some(session_state) = &mut driver.session_state else { return };
        for event in taken {
            match event {
                NodeEvent::Change(change) => changes.push(change),
                NodeEvent::Results { session, results } if session == session_state.session => {
                    let results: PackedBuilder<_> = results.into_iter().collect();
                    let results = v1::CommandResults { results: results.finish().into() };
                    session_state.outgoing.push(Body::CommandResults(results));
                }
                NodeEvent::Offloaded { session, notice } if session == session_state.session => {
                    session_state.outgoing.push(Body::Offloaded(notice));
                }
                NodeEvent::DiskEvicted { session, evicted } if session == session_state.session => {
                    session_state.outgoing.push(Body::DiskEvicted(evicted));
                }
                // Of a session that is over.
                NodeEvent::Results { .. } | NodeEvent::Offloaded { .. } | NodeEvent::DiskEvicted { .. } => {}
                NodeEvent::Report(segment) => {
                    session_state.reports.restart(segment);
                    session_state.complete = None;
                    session_state.sync_gate.close();
                }
            }
        }
        for body in session_state.reports.changes(changes) {
            session_state.outgoing.push(body);
        }
        self.pump(route, cx);
    }

    /// Sends all pending messages, and mounts missing segments.
    fn pump(&mut self, route: u64, cx: &mut ProcessContext<'_>) {
        let SessionStage::Streaming { stream } = self.driver(route).stage else { return };
        if self.driver(route).changed {
            self.hang_up(route, cx);
            return self.mount(route, cx);
        }
        while self.report_next(route, cx) {}
        while self.say_next(route, stream, cx) {}
        if self.driver(route).is_behind() {
            let number = self.number();
            self.driver(route).behind = number;
            cx.wake_in(BEHIND_PAUSE, Timer::Node(NodeTimer::Behind { number }));
        }
    }

    pub(super) fn behind_due(&mut self, number: u64, cx: &mut ProcessContext<'_>) {
        let waits = |driver: &SessionDriver| {
            driver.behind == number
                && matches!(driver.stage, SessionStage::Streaming { .. })
                && driver.is_behind()
        };
        let Some(route) = self.route(waits) else { return };
        self.news(cx);
        self.hang_up(route, cx);
        self.mount(route, cx);
    }

    fn say_next(&mut self, route: u64, stream: u64, cx: &mut ProcessContext<'_>) -> bool {
        let driver = self.driver(route);
        let (master, highest_term) = (ProcessId::Master(driver.master), driver.highest_term);
        let next = driver.session_state.as_mut().and_then(|c| c.outgoing.next(highest_term));
        let Some(message) = next else { return false };
        cx.send(master, Message::FromNode { stream, message });
        true
    }

    /// Takes the snapshot of the next segment that is to be reported, if the master keeps up.
    fn report_next(&mut self, route: u64, cx: &mut ProcessContext<'_>) -> bool {
        let groups = self.groups;
        let driver = self.drivers.get_mut(&route).expect("found by the caller");
        let Some(session_state) = &mut driver.session_state else { return false };
        let mut unreadable = Vec::new();
        let due = session_state.reports.next_due();
        if let Some((segment, first)) = due {
            if session_state.outgoing.bytes() >= UNACKED_BYTES_MAX {
                return false;
            }
            let Some((snapshot, killed)) = take_snapshot(&self.memory, segment, first) else { return false };
            for body in session_state.reports.snapshot(snapshot) {
                session_state.outgoing.push(body);
            }
            unreadable = killed;
        }
        let all_mounted = mount_diff(groups, &driver.wanted, &session_state.mounted).0.is_empty();
        if session_state.complete.is_none() && session_state.reports.is_complete() && all_mounted {
            session_state.complete = Some(session_state.outgoing.last());
        }
        if !unreadable.is_empty() {
            self.gave_up(unreadable, cx);
        }
        due.is_some()
    }
}

/// Returns the snapshot of a segment with records numbered from `first`, and the slots that were killed because their
/// content is unknown.
fn take_snapshot(
    memory: &NodeMemory,
    segment: SegmentId,
    first: u64,
) -> Option<(Snapshot, Vec<SlotVersion>)> {
    let node_segment = memory.node_segment(segment)?;
    let shape = node_segment.segment.shape();
    let (_, term) = node_segment.grant?;
    let of = SegmentTerm { segment, generation: shape.generation, term };
    let mut builder = ReportBuilder::new(of, v1::ReportKind::Snapshot, first);
    let (mut writing, mut unreadable) = (Vec::new(), Vec::new());
    node_segment.segment.for_each_record(|slot, header, trailer| {
        let Some(trailer) = trailer else {
            return unreadable.push((segment, slot, header.word.epoch()));
        };
        let record = record_of(slot, header);
        let (tenant, key) = (trailer.tenant.as_str(), trailer.key.as_bytes());
        builder.push(record, tenant, key, trailer.attributes);
        if header.word.state() == State::Writing {
            let attributes = trailer.attributes.into();
            writing.push(ReportedRecord { record, tenant: tenant.into(), key: key.into(), attributes });
        }
    });
    unreadable.retain(|&(segment, slot, epoch)| {
        memory.heap.kill(segment, slot, epoch, LONG_AGO) == KillOutcome::Killed
    });
    let (chunks, records) = builder.finish();
    Some((Snapshot { of, chunks, records, writing }, unreadable))
}
