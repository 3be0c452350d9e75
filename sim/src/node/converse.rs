//! [`Driver`]: keeps a session with one master, as the shipped one does, with events in the place of tasks.
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

use moontide_heap::Killed;
use moontide_node::decide::groups::{GroupSet, Hosted, behind, set_of};
use moontide_node::decide::orders::Name;
use moontide_node::decide::outgoing::{Beats, Outgoing};
use moontide_node::decide::pace::{Backoff, beat_interval};
use moontide_node::decide::report::{Of, ReportBuilder, Reported, Reports, Snapshot, record_of};
use moontide_proto::convert::{
    MasterBody, MasterMessage, MountSegmentsResponse, OpenSessionResponse, SegmentGrant, Wire,
};
use moontide_proto::{PackedBuilder, ProtocolVersions, v1};
use moontide_types::record::State;
use moontide_types::{ErrorCode, GroupId, MonoTime, SegmentId, SessionId, Term};
use v1::node_message::Body;

use super::memory::Memory;
use super::{LONG_AGO, Node, NodeEvent, NodeTimer, Work};
use crate::event::{Message, NodeAnswer, NodeRequest, Timer, Who};
use crate::scene::Scene;

/// How long one call to the master may take.
const CALL_MAX: Duration = Duration::from_secs(2);
/// How long begins and commits are told after a session was lost.
const TELL_FOR: Duration = Duration::from_secs(60);
/// Unacknowledged bytes above which no further snapshot is taken.
const UNACKED_BYTES_MAX: usize = 8 << 20;
/// How long a master that does not know yet that it hosts a group is given.
const BEHIND_PAUSE: Duration = Duration::from_millis(100);
/// Streams of one session that may break one after the other without a word from the master.
const BREAKS_MAX: u32 = 5;

/// How far the driver is.
#[derive(Debug)]
enum Stage {
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
        terms: Hosted,
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
pub(super) struct Driver {
    master: usize,
    /// The master's own, which it has from the registry.
    number: u32,
    /// The groups that the master hosts, as the map says.
    wanted: Hosted,
    groups: GroupSet,
    /// They have changed since something was mounted.
    changed: bool,
    /// When the master last knew of everything that concerns it, counted from when it was told.
    good: Option<MonoTime>,
    stage: Stage,
    highest_term: Term,
    conversation: Option<Conversation>,
    backoff: Backoff,
    breaks: u32,
    /// What was acknowledged when the stream began.
    acknowledged: u64,
    /// Which wait for a master that is behind counts.
    behind: u64,
    events: VecDeque<NodeEvent>,
}

/// One session.
#[derive(Debug)]
struct Conversation {
    session: SessionId,
    /// The groups whose segments are mounted, and the terms in which they are.
    mounted: Hosted,
    outgoing: Outgoing,
    beats: Beats,
    reports: Reports,
    /// The message with which the master knows of everything, once it has been said.
    complete: Option<u64>,
}

impl Driver {
    pub(super) fn new(boot: u64, master: usize, number: u32, groups: NonZeroU16, wanted: Hosted) -> Driver {
        Driver {
            master,
            number,
            groups: set_of(groups, &wanted),
            wanted,
            changed: false,
            good: None,
            stage: Stage::Pausing { pause: 0, same_session: false },
            highest_term: Term::ZERO,
            conversation: None,
            backoff: Backoff::new(boot),
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
        self.good.is_some()
    }

    pub(super) fn has_group(&self, group: GroupId) -> bool {
        self.groups.contains(group)
    }

    pub(super) fn session(&self) -> Option<SessionId> {
        self.conversation.as_ref().map(|c| c.session)
    }

    /// Whether these are other groups than before.
    pub(super) fn wants(&mut self, groups: NonZeroU16, wanted: Hosted) -> bool {
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
            Stage::Attaching { stream } | Stage::Streaming { stream } => Some(stream),
            _ => None,
        }
    }

    fn streams_on(&self, number: u64) -> bool {
        matches!(self.stage, Stage::Streaming { stream } if stream == number)
    }

    fn acknowledged_now(&self) -> u64 {
        self.conversation.as_ref().map_or(0, |c| c.outgoing.acknowledged())
    }

    fn is_lost(&self, now: MonoTime) -> bool {
        self.conversation.as_ref().is_none_or(|c| c.beats.is_lost(now))
    }

    fn is_behind(&self) -> bool {
        let groups = self.groups.of();
        self.conversation.as_ref().is_some_and(|c| !behind(groups, &self.wanted, &c.mounted).0.is_empty())
    }
}

fn context(caller: u64, session: Option<SessionId>) -> Option<v1::RequestContext> {
    Some(v1::RequestContext {
        caller,
        session: session.map_or(0, |session| session.0),
        deadline_ms: CALL_MAX.as_millis() as u32,
        ..Default::default()
    })
}

impl Node {
    fn driver(&mut self, line: u64) -> &mut Driver {
        self.drivers.get_mut(&line).expect("found by the caller")
    }

    /// The line of the driver that this is for.
    fn line(&self, concerns: impl Fn(&Driver) -> bool) -> Option<u64> {
        self.drivers.iter().find(|(_, driver)| concerns(driver)).map(|(&line, _)| line)
    }

    fn call(&mut self, line: u64, request: NodeRequest, scene: &mut Scene<'_>) -> u64 {
        let call = self.number();
        let master = Who::Master(self.driver(line).master);
        scene.send(master, Message::NodeCall { call, request });
        scene.wake_in(CALL_MAX, Timer::Node(NodeTimer::CallOver { call }));
        call
    }

    pub(super) fn open(&mut self, line: u64, scene: &mut Scene<'_>) {
        let versions = ProtocolVersions::CURRENT;
        let request = v1::OpenSessionRequest {
            context: context(self.boot, None),
            node: self.id.0,
            boot: self.boot,
            addresses: vec![v1::Address { engine: "tcp".into(), address: format!("node-{}:1", self.index) }],
            topology: Some(v1::Topology { host: format!("host-{}", self.index), ..Default::default() }),
            protocol_min: versions.min.into(),
            protocol_max: versions.max.into(),
            highest_term: self.driver(line).highest_term.get(),
        };
        let asked = scene.now();
        let call = self.call(line, NodeRequest::Open(request), scene);
        self.driver(line).stage = Stage::Opening { call, asked };
    }

    pub(super) fn answered(&mut self, call: u64, answer: NodeAnswer, scene: &mut Scene<'_>) {
        let waits = |driver: &Driver| match driver.stage {
            Stage::Opening { call: waited, .. }
            | Stage::Mounting { call: waited, .. }
            | Stage::MountingDisk { call: waited, .. } => waited == call,
            _ => false,
        };
        let line = self.line(waits);
        match (line, answer) {
            (_, NodeAnswer::Map(answer)) => self.map_told(call, answer, scene),
            (Some(line), NodeAnswer::Opened(answer)) => self.opened(line, &answer, scene),
            (Some(line), NodeAnswer::Mounted(answer)) => self.mounted(line, &answer, scene),
            (None, _) => {} // of a call that was given up
        }
    }

    pub(super) fn call_over(&mut self, call: u64, scene: &mut Scene<'_>) {
        let waits = |driver: &Driver| match driver.stage {
            Stage::Opening { call: waited, .. }
            | Stage::Mounting { call: waited, .. }
            | Stage::MountingDisk { call: waited, .. } => waited == call,
            Stage::Attaching { stream } => stream == call,
            _ => false,
        };
        let Some(line) = self.line(waits) else { return };
        match self.driver(line).stage {
            Stage::Attaching { .. } => self.broken(line, scene),
            _ => self.failed(line, None, scene),
        }
    }

    /// The session is over: nothing of it is wanted any more.
    fn end_conversation(&mut self, line: u64, scene: &mut Scene<'_>) {
        let driver = self.driver(line);
        driver.good = None;
        if let Some(ended) = driver.conversation.take() {
            if let Some(disk) = &mut self.disk {
                disk.end_session(ended.session);
            }
            self.give_work(Work::Session { begins: None, ends: Some(ended.session) }, scene);
        }
    }

    fn opened(&mut self, line: u64, answer: &v1::OpenSessionResponse, scene: &mut Scene<'_>) {
        let Stage::Opening { asked, .. } = self.driver(line).stage else { return };
        let answer = OpenSessionResponse::from_wire(answer).expect("the master speaks as it should");
        let Some(grant) = answer.body() else { return self.failed(line, answer.context().code, scene) };
        let (session, term) = (grant.session, answer.context().term);
        let ttl = Duration::from_millis(grant.ttl_ms.into());
        self.end_conversation(line, scene);
        self.give_work(Work::Session { begins: Some(session), ends: None }, scene);
        let driver = self.driver(line);
        driver.highest_term = driver.highest_term.max(term);
        driver.breaks = 0;
        driver.conversation = Some(Conversation {
            session,
            mounted: Hosted::new(),
            outgoing: Outgoing::new(session),
            beats: Beats::new(asked, ttl),
            reports: Reports::default(),
            complete: None,
        });
        self.mount(line, scene);
    }

    /// Mounts the segments of groups that the master hosts and did not host before, and forgets those that it hosts no
    /// more.
    fn mount(&mut self, line: u64, scene: &mut Scene<'_>) {
        let now = scene.now();
        let (groups, boot) = (self.groups, self.boot);
        let driver = self.drivers.get_mut(&line).expect("found by the caller");
        driver.changed = false;
        let Some(conversation) = &mut driver.conversation else { return };
        let session = conversation.session;
        let (missing, lost) = behind(groups, &driver.wanted, &conversation.mounted);
        conversation.complete = None;
        conversation.mounted.retain(|group, _| !lost.contains(*group));
        if let Some(disk) = &mut self.disk {
            disk.narrow(session, &set_of(groups, &conversation.mounted));
        }
        let sides = &self.memory.sides;
        for side in sides.iter().filter(|side| lost.contains(side.group)) {
            conversation.reports.unmounted(side.segment.shape().segment);
        }
        let offered = sides.iter().filter(|side| missing.contains(side.group));
        // Before the segments are looked at: what is begun from now on is told, or seen.
        if offered.clone().any(|side| side.grant.is_some()) {
            self.tell_until = self.tell_until.max(now.after(TELL_FOR));
        }
        let away = |group| self.known_at.get(&group).map(|&(at, term)| (now.since(at), term));
        let specs: Vec<v1::SegmentSpec> = offered.map(|side| side.spec(away(side.group))).collect();
        let offered: Vec<(SegmentId, bool)> =
            specs.iter().map(|spec| (SegmentId(spec.segment), spec.occupied)).collect();
        if offered.is_empty() {
            return self.attach(line, scene);
        }
        let request = v1::MountSegmentsRequest { context: context(boot, Some(session)), segments: specs };
        let call = self.call(line, NodeRequest::Mount(request), scene);
        self.driver(line).stage = Stage::Mounting { call, missing, offered };
    }

    fn mounted(&mut self, line: u64, answer: &v1::MountSegmentsResponse, scene: &mut Scene<'_>) {
        let driver = self.drivers.get_mut(&line).expect("found by the caller");
        if let Stage::MountingDisk { groups, terms, .. } = &driver.stage {
            let (groups, terms) = (groups.clone(), terms.clone());
            return self.disk_mounted(line, groups, terms, answer, scene);
        }
        let Stage::Mounting { missing, offered, .. } = &driver.stage else { return };
        let (mut mounted, offered) = (missing.clone(), offered.clone());
        let answer = MountSegmentsResponse::from_wire(answer).expect("the master speaks as it should");
        let grants: &[SegmentGrant] = answer.body().map_or(&[], |body| &body.grants);
        if answer.context().code.is_some() || grants.len() != offered.len() {
            let code = answer.context().code;
            return self.failed(line, code, scene);
        }
        let mut terms = Hosted::new();
        let mut elsewhere = GroupSet::none(self.groups);
        let Some(conversation) = &mut driver.conversation else { return };
        for (&(segment, occupied), grant) in offered.iter().zip(grants) {
            let side = &mut self.memory.sides[segment.0 as usize];
            match grant.code {
                None => {}
                // It does not host the group yet, or not any more: the next map will tell.
                Some(ErrorCode::WrongMaster | ErrorCode::Retry) => {
                    elsewhere.insert(side.group);
                    continue;
                }
                code => return self.failed(line, code, scene),
            }
            // First the term, then the snapshot: what an older master granted is refused from here on.
            side.granted(grant.group, grant.term);
            terms.insert(grant.group, grant.term);
            driver.highest_term = driver.highest_term.max(grant.term);
            let of = Of { segment, generation: side.segment.shape().generation, term: grant.term };
            // What was begun while the master was asked has a snapshot as well; it would not be told otherwise.
            conversation.reports.mounted(of, occupied || side.is_occupied());
        }
        mounted = mounted.without(&elsewhere);
        terms.retain(|group, _| mounted.contains(*group));
        let session = conversation.session;
        if mounted.is_empty() || self.disk.is_none() {
            return self.all_mounted(line, terms, scene);
        }
        let disk = self.disk.as_mut().expect("just looked");
        // Before the master has it: it must not hear that all is told before this is.
        disk.announce(session);
        let segments = vec![disk.spec(self.memory.generation.0)];
        let request = v1::MountSegmentsRequest { context: context(self.boot, Some(session)), segments };
        let call = self.call(line, NodeRequest::Mount(request), scene);
        self.driver(line).stage = Stage::MountingDisk { call, groups: mounted, terms };
    }

    fn disk_mounted(
        &mut self,
        line: u64,
        groups: GroupSet,
        terms: Hosted,
        answer: &v1::MountSegmentsResponse,
        scene: &mut Scene<'_>,
    ) {
        let answer = MountSegmentsResponse::from_wire(answer).expect("the master speaks as it should");
        let grant = answer.body().and_then(|body| body.grants.first());
        let code = answer.context().code.or(grant.and_then(|grant| grant.code));
        let Some(session) = self.driver(line).session() else { return };
        if code.is_some() || grant.is_none() {
            return self.failed(line, code, scene);
        }
        self.begin_telling(session, groups, scene);
        self.all_mounted(line, terms, scene);
    }

    fn all_mounted(&mut self, line: u64, terms: Hosted, scene: &mut Scene<'_>) {
        if let Some(conversation) = &mut self.driver(line).conversation {
            conversation.mounted.extend(terms);
        }
        self.attach(line, scene);
    }

    fn attach(&mut self, line: u64, scene: &mut Scene<'_>) {
        let stream = self.number();
        let driver = self.driver(line);
        driver.stage = Stage::Attaching { stream };
        driver.acknowledged = driver.acknowledged_now();
        let master = Who::Master(driver.master);
        let Some(conversation) = &mut driver.conversation else { return };
        conversation.outgoing.rewind();
        scene.send(master, Message::StreamOpen { stream, session: conversation.session });
        scene.wake_in(CALL_MAX, Timer::Node(NodeTimer::CallOver { call: stream }));
        self.beat(line, scene);
        // The master may want to hear something before it answers.
        self.say_next(line, stream, scene);
    }

    pub(super) fn stream_opened(&mut self, stream: u64, scene: &mut Scene<'_>) {
        let attaches =
            |driver: &Driver| matches!(driver.stage, Stage::Attaching { stream: s } if s == stream);
        let Some(line) = self.line(attaches) else { return };
        self.driver(line).stage = Stage::Streaming { stream };
        self.wake_to_beat(line, stream, scene);
        self.pump(line, scene);
    }

    fn wake_to_beat(&mut self, line: u64, stream: u64, scene: &mut Scene<'_>) {
        let ttl = self.driver(line).conversation.as_ref().map_or(CALL_MAX, |c| c.beats.ttl());
        scene.wake_in(beat_interval(ttl), Timer::Node(NodeTimer::Beat { stream }));
    }

    /// This end of the stream is closed.
    fn hang_up(&mut self, line: u64, scene: &mut Scene<'_>) {
        let driver = self.driver(line);
        if let Some(stream) = driver.stream() {
            scene.send(Who::Master(driver.master), Message::StreamEnd { stream, code: None });
        }
    }

    /// The session is no more: another one after a pause.
    fn failed(&mut self, line: u64, code: Option<ErrorCode>, scene: &mut Scene<'_>) {
        self.hang_up(line, scene);
        self.end_conversation(line, scene);
        if code == Some(ErrorCode::StaleSession) {
            self.driver(line).backoff.reset(); // the master is there, and waits for us
        }
        self.news(scene); // it may not be the master any more
        self.pause(line, false, scene);
    }

    /// The session goes on, with another stream.
    fn broken(&mut self, line: u64, scene: &mut Scene<'_>) {
        let driver = self.driver(line);
        // One that breaks as soon as it is there will not come to anything in this session.
        driver.breaks = if driver.acknowledged_now() > driver.acknowledged { 0 } else { driver.breaks + 1 };
        if driver.breaks >= BREAKS_MAX || driver.is_lost(scene.now()) {
            return self.failed(line, None, scene);
        }
        self.hang_up(line, scene);
        self.news(scene);
        self.pause(line, true, scene);
    }

    /// Its master hosts nothing any more.
    pub(super) fn dismiss(&mut self, line: u64, scene: &mut Scene<'_>) {
        self.hang_up(line, scene);
        self.end_conversation(line, scene);
        self.drivers.remove(&line);
    }

    fn pause(&mut self, line: u64, same_session: bool, scene: &mut Scene<'_>) {
        let pause = self.number();
        let driver = self.driver(line);
        driver.stage = Stage::Pausing { pause, same_session };
        let wait = driver.backoff.wait();
        scene.wake_in(wait, Timer::Node(NodeTimer::Pause { pause }));
    }

    pub(super) fn pause_over(&mut self, over: u64, scene: &mut Scene<'_>) {
        let pauses = |driver: &Driver| matches!(driver.stage, Stage::Pausing { pause, .. } if pause == over);
        let Some(line) = self.line(pauses) else { return };
        match self.driver(line).stage {
            Stage::Pausing { same_session: true, .. } => self.attach(line, scene),
            _ => self.open(line, scene),
        }
    }

    pub(super) fn stream_ended(&mut self, ended: u64, code: Option<ErrorCode>, scene: &mut Scene<'_>) {
        let Some(line) = self.line(|driver| driver.stream() == Some(ended)) else { return };
        match code {
            // Too old, not its master, or it cannot be understood: saying it again changes nothing.
            Some(
                ErrorCode::StaleSession
                | ErrorCode::WrongMaster
                | ErrorCode::StaleTerm
                | ErrorCode::InvalidArgument
                | ErrorCode::TooLarge
                | ErrorCode::Unsupported,
            ) => self.failed(line, code, scene),
            _ => self.broken(line, scene),
        }
    }

    pub(super) fn beat_due(&mut self, stream: u64, scene: &mut Scene<'_>) {
        let Some(line) = self.line(|driver| driver.streams_on(stream)) else { return };
        let now = scene.now();
        let Some(conversation) = &self.driver(line).conversation else { return };
        if conversation.beats.is_lost(now) {
            return self.failed(line, None, scene);
        }
        if conversation.beats.is_silent(now) {
            return self.broken(line, scene);
        }
        self.beat(line, scene);
        self.wake_to_beat(line, stream, scene);
        self.pump(line, scene);
    }

    /// Says that the node lives, and how it is.
    fn beat(&mut self, line: u64, scene: &mut Scene<'_>) {
        let groups = self.groups;
        let driver = self.drivers.get_mut(&line).expect("found by the caller");
        let Some(conversation) = &mut driver.conversation else { return };
        let now = scene.now();
        let Some(beat) = conversation.beats.beat(now) else { return };
        let mounted = set_of(groups, &conversation.mounted);
        let own = self.memory.sides.iter().filter(|side| mounted.contains(side.group));
        let segments = own.map(|side| side.status()).collect();
        conversation.outgoing.push(Body::Heartbeat(v1::Heartbeat {
            beat,
            reads: Some(v1::ReadCounters::default()),
            touched: self.memory.take_touched(beat, &mounted),
            segments,
            disk: self.disk.as_ref().map(|disk| disk.status(now)),
            pressure: Some(v1::Pressure::default()),
        }));
    }

    /// A message of the master.
    pub(super) fn heard(&mut self, stream: u64, message: &v1::MasterMessage, scene: &mut Scene<'_>) {
        let Some(line) = self.line(|driver| driver.stream() == Some(stream)) else { return };
        let driver = self.drivers.get_mut(&line).expect("just found");
        let Some(conversation) = &mut driver.conversation else { return };
        let message = MasterMessage::from_wire(message).expect("the master speaks as it should");
        if message.session != conversation.session {
            return self.broken(line, scene);
        }
        driver.highest_term = driver.highest_term.max(message.term);
        conversation.outgoing.acked(message.acked_sequence);
        let session = conversation.session;
        let mut work = None;
        match message.body {
            MasterBody::Orders(orders) if orders.is_empty() => {}
            MasterBody::Orders(orders) => {
                work = Some(Work::Orders { session, orders: orders.iter().collect() });
            }
            MasterBody::HeartbeatAck { beat, ttl_ms } => {
                conversation.beats.acked(beat, Duration::from_millis(ttl_ms.into()));
            }
        }
        let acknowledged = conversation.outgoing.acknowledged();
        let heard = conversation.beats.heard();
        if conversation.complete.is_some_and(|complete| complete <= acknowledged) {
            driver.backoff.reset();
            self.line_is_good(line, heard);
        }
        if let Some(work) = work {
            self.give_work(work, scene);
        }
        self.heard_of(message.map_version.0, scene);
        self.pump(line, scene);
    }

    /// The master knew of everything that concerns it, when it was told then.
    fn line_is_good(&mut self, line: u64, at: MonoTime) {
        let groups = self.groups;
        let driver = self.drivers.get_mut(&line).expect("found by the caller");
        let Some(conversation) = &driver.conversation else { return };
        let mounted = &conversation.mounted;
        let all_mounted = driver.groups.without(&set_of(groups, mounted)).is_empty();
        driver.good = all_mounted.then_some(at);
        self.known_at.extend(mounted.iter().map(|(&group, &term)| (group, (at, term))));
        let mut covered = GroupSet::none(groups);
        self.drivers.values().for_each(|driver| covered.extend(&driver.groups));
        if covered.len() == usize::from(groups.get()) {
            let hosts = self.drivers.values().filter(|driver| !driver.groups.is_empty());
            self.good = self.good.max(hosts.map(|driver| driver.good).min().flatten());
        }
    }

    /// What has happened at the node since the last time.
    pub(super) fn take_events(&mut self, line: u64, scene: &mut Scene<'_>) {
        let Some(driver) = self.drivers.get_mut(&line) else { return };
        let mut changes = Vec::new();
        let taken = std::mem::take(&mut driver.events);
        // Without a session they are dropped: the next one begins with a snapshot.
        let Some(conversation) = &mut driver.conversation else { return };
        for event in taken {
            match event {
                NodeEvent::Change(change) => changes.push(change),
                NodeEvent::Results { session, results } if session == conversation.session => {
                    let results: PackedBuilder<_> = results.into_iter().collect();
                    let results = v1::OrderResults { results: results.finish().into() };
                    conversation.outgoing.push(Body::OrderResults(results));
                }
                NodeEvent::Offloaded { session, notice } if session == conversation.session => {
                    conversation.outgoing.push(Body::Offloaded(notice));
                }
                NodeEvent::DiskEvicted { session, evicted } if session == conversation.session => {
                    conversation.outgoing.push(Body::DiskEvicted(evicted));
                }
                // Of a session that is over.
                NodeEvent::Results { .. } | NodeEvent::Offloaded { .. } | NodeEvent::DiskEvicted { .. } => {}
                NodeEvent::Report(segment) => {
                    conversation.reports.again(segment);
                    conversation.complete = None;
                }
            }
        }
        for body in conversation.reports.changes(changes) {
            conversation.outgoing.push(body);
        }
        self.pump(line, scene);
    }

    /// Says everything that there is to say, and mounts what there is to mount.
    fn pump(&mut self, line: u64, scene: &mut Scene<'_>) {
        let Stage::Streaming { stream } = self.driver(line).stage else { return };
        if self.driver(line).changed {
            self.hang_up(line, scene);
            return self.mount(line, scene);
        }
        while self.report_next(line, scene) {}
        while self.say_next(line, stream, scene) {}
        if self.driver(line).is_behind() {
            let number = self.number();
            self.driver(line).behind = number;
            scene.wake_in(BEHIND_PAUSE, Timer::Node(NodeTimer::Behind { number }));
        }
    }

    pub(super) fn behind_due(&mut self, number: u64, scene: &mut Scene<'_>) {
        let waits = |driver: &Driver| {
            driver.behind == number && matches!(driver.stage, Stage::Streaming { .. }) && driver.is_behind()
        };
        let Some(line) = self.line(waits) else { return };
        self.news(scene);
        self.hang_up(line, scene);
        self.mount(line, scene);
    }

    fn say_next(&mut self, line: u64, stream: u64, scene: &mut Scene<'_>) -> bool {
        let driver = self.driver(line);
        let (master, highest_term) = (Who::Master(driver.master), driver.highest_term);
        let next = driver.conversation.as_mut().and_then(|c| c.outgoing.next(highest_term));
        let Some(message) = next else { return false };
        scene.send(master, Message::FromNode { stream, message });
        true
    }

    /// Takes the snapshot of the next segment that is to be reported, if the master keeps up.
    fn report_next(&mut self, line: u64, scene: &mut Scene<'_>) -> bool {
        let groups = self.groups;
        let driver = self.drivers.get_mut(&line).expect("found by the caller");
        let Some(conversation) = &mut driver.conversation else { return false };
        let mut unreadable = Vec::new();
        let due = conversation.reports.next_due();
        if let Some((segment, first)) = due {
            if conversation.outgoing.bytes() >= UNACKED_BYTES_MAX {
                return false;
            }
            let Some((snapshot, killed)) = take_snapshot(&self.memory, segment, first) else { return false };
            for body in conversation.reports.snapshot(snapshot) {
                conversation.outgoing.push(body);
            }
            unreadable = killed;
        }
        let all_mounted = behind(groups, &driver.wanted, &conversation.mounted).0.is_empty();
        if conversation.complete.is_none() && conversation.reports.is_complete() && all_mounted {
            conversation.complete = Some(conversation.outgoing.last());
        }
        if !unreadable.is_empty() {
            self.gave_up(unreadable, scene);
        }
        due.is_some()
    }
}

/// The snapshot of a segment, its records numbered from `first` on, and what was killed because nobody can say what it
/// is.
fn take_snapshot(memory: &Memory, segment: SegmentId, first: u64) -> Option<(Snapshot, Vec<Name>)> {
    let side = memory.side(segment)?;
    let shape = side.segment.shape();
    let (_, term) = side.grant?;
    let of = Of { segment, generation: shape.generation, term };
    let mut builder = ReportBuilder::new(of, v1::ReportKind::Snapshot, first);
    let (mut writing, mut unreadable) = (Vec::new(), Vec::new());
    side.segment.for_each_record(|slot, header, trailer| {
        let Some(trailer) = trailer else {
            return unreadable.push((segment, slot, header.word.epoch()));
        };
        let record = record_of(slot, header);
        let (tenant, key) = (trailer.tenant.as_str(), trailer.key.as_bytes());
        builder.push(record, tenant, key, trailer.attributes);
        if header.word.state() == State::Writing {
            let attributes = trailer.attributes.into();
            writing.push(Reported { record, tenant: tenant.into(), key: key.into(), attributes });
        }
    });
    unreadable
        .retain(|&(segment, slot, epoch)| memory.heap.kill(segment, slot, epoch, LONG_AGO) == Killed::Dying);
    let (chunks, records) = builder.finish();
    Some((Snapshot { of, chunks, records, writing }, unreadable))
}
