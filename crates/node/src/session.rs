//! [`Driver`]: keeps a session with one master. Registers, mounts, reports, beats, and does it all again when the session
//! is lost. [`Fleet`] has one driver for each master that hosts groups.
//!
//! ```text
//!   reach ──▶ open session ──▶ mount ──▶ stream ─────────────▶ (stop) ──▶ unmount
//!     ▲            │             ▲ │      │  ▲ broken: again, same session
//!     │            │             └─┼──────┤  │ other groups: mounted beside
//!     └────────────┴───────────────┴──────┴──┘
//!       failed, or the session is lost: after a pause
//! ```
//!
//! Everything that happens arrives in [`Driver::converse`], which is one `select` over the master's messages, the node's
//! own events, and the clock. What to say is decided in [`decide`](crate::decide).
//!
//! Invariant: events are taken at all times, so that nobody waits and nothing piles up; without a session they are
//! dropped, because the next one begins with a snapshot.

mod calls;
mod fleet;
mod snapshot;

use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use moontide_proto::convert::{MasterBody, MasterMessage, Wire};
use moontide_proto::{OrderResult, PackedBuilder, v1};
use moontide_types::{Clock, ErrorCode, NodeId, SegmentId, SessionId, SystemClock, Term};
use tokio::sync::mpsc::{self, UnboundedReceiver};
use tokio::sync::watch;
use tokio_stream::wrappers::ReceiverStream;
use tracing::{debug, info, warn};
use v1::node_message::Body;

use self::calls::{Client, Failure, code_of};
use self::fleet::News;
use crate::decide::groups::{GroupSet, Hosted, behind, set_of};
use crate::decide::outgoing::{Beats, Outgoing};
use crate::decide::pace::{Backoff, beat_interval};
use crate::decide::report::{Change, Of, Reports};
use crate::disk::DiskTier;
use crate::keeper::Keeper;
use crate::lines::Lines;
use crate::memory::{Memory, Side};
use crate::metrics::Counters;
use crate::orders::Work;
use crate::owner::NodeOwner;
use crate::status::Status;

pub(crate) use self::calls::{Cluster, learn_cluster};
pub(crate) use self::fleet::Fleet;

/// How long one call to the master may take.
const CALL_MAX: Duration = Duration::from_secs(2);

/// How long begins and commits are told after a session was lost: reservations of before are still around for
/// `RESERVATION_MS_MAX`, counted by clocks that we do not know.
const TELL_FOR: Duration = Duration::from_secs(60);

/// Unacknowledged bytes above which no further snapshot is taken: a report of millions of records is not to stand in
/// memory all at once.
const UNACKED_BYTES_MAX: usize = 8 << 20;

/// Messages that the connection has not taken yet.
const ON_THE_WAY_MAX: usize = 4;

/// Events that are looked at together.
const EVENTS_MAX: usize = 4096;

/// How long a master that does not know yet that it hosts a group is given.
const BEHIND_PAUSE: Duration = Duration::from_millis(100);

/// Streams of one session that may break one after the other without a word from the master.
const BREAKS_MAX: u32 = 5;

/// What happens at the node and concerns the session.
#[derive(Debug)]
pub(crate) enum Event {
    /// A record changed.
    Change(Change),
    /// Orders were answered.
    Results { session: SessionId, results: Vec<OrderResult> },
    /// A segment is to be reported anew.
    Report(SegmentId),
    /// Records are on the disk.
    Offloaded { session: SessionId, notice: v1::OffloadNotice },
    /// Records have left the disk.
    DiskEvicted { session: SessionId, evicted: v1::DiskEvicted },
}

/// What does not change while the node runs.
#[derive(Clone, Debug)]
pub(crate) struct Facts {
    pub(crate) node: NodeId,
    pub(crate) boot: u64,
    pub(crate) addresses: Vec<v1::Address>,
    pub(crate) topology: v1::Topology,
    /// The cluster's number: another one is another world.
    pub(crate) cluster: u64,
    pub(crate) groups: NonZeroU16,
}

/// The parts of a node that the driver works with.
#[derive(Debug)]
pub(crate) struct Parts {
    pub(crate) memory: Arc<Memory>,
    pub(crate) disk: Option<Arc<DiskTier>>,
    pub(crate) owner: Arc<NodeOwner>,
    pub(crate) keeper: Arc<Keeper>,
    pub(crate) status: Arc<Status>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) work: std::sync::mpsc::Sender<Work>,
}

impl Parts {
    /// Reads since the start.
    fn reads(&self) -> v1::ReadCounters {
        v1::ReadCounters { corrupt: self.counters.corrupt_found(), ..self.owner.reads() }
    }
}

/// Keeps the session with one master.
#[derive(Debug)]
struct Driver {
    master: Arc<str>,
    /// Its line's name: a master that starts anew at the same address has another one.
    line: Arc<str>,
    facts: Arc<Facts>,
    parts: Arc<Parts>,
    lines: Arc<Lines>,
    events: UnboundedReceiver<Event>,
    /// The groups that the master hosts; nobody to say so any more means that it hosts none.
    wanted: watch::Receiver<Hosted>,
    news: Arc<News>,
    stop: watch::Receiver<bool>,
    highest_term: Term,
    conversation: Option<Conversation>,
    backoff: Backoff,
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
    /// Reads until the session began: they were counted in earlier ones.
    reads_before: v1::ReadCounters,
}

/// Why something ended before its time.
#[derive(Debug)]
enum Cut {
    Stop,
    Failed(Failure),
}

impl From<Failure> for Cut {
    fn from(failure: Failure) -> Cut {
        Cut::Failed(failure)
    }
}

/// Why a stream ended.
#[derive(Debug)]
enum End {
    Stop,
    /// The master hosts other groups than before.
    Remount,
    /// The session goes on, with another stream.
    Broken(Failure),
    /// The session is over.
    Lost(Failure),
}

impl Driver {
    /// Runs until told to stop, or until the master hosts nothing; takes the segments away from it at the end.
    async fn run(mut self) {
        loop {
            let cut = self.session().await;
            self.end_conversation();
            match cut {
                Cut::Stop => return,
                Cut::Failed(failure) => {
                    if matches!(&failure, Failure::Status(status) if code_of(status) == Some(ErrorCode::StaleSession))
                    {
                        self.backoff.reset(); // the master is there, and waits for us
                    }
                    self.parts.counters.attempt_failed();
                    warn!(master = %self.master, %failure, "no session with the master; trying again");
                    self.news.look(); // it may not be the master any more
                    self.parts.status.change(|standing| {
                        standing.mounted = false;
                        standing.session = None;
                        standing.trouble = Some(failure.to_string());
                    });
                }
            }
            if self.pause().await.is_err() {
                return;
            }
        }
    }

    /// The session is over: nothing of it is wanted any more.
    fn end_conversation(&mut self) {
        self.lines.bad(&self.line);
        let Some(conversation) = self.conversation.take() else { return };
        self.lines.set_session(&self.line, SessionId(0));
        if let Some(disk) = &self.parts.disk {
            disk.end_session(conversation.session);
        }
        let _ = self.parts.work.send(Work::Session { begins: None, ends: Some(conversation.session) });
    }

    /// One session from its beginning to its end.
    async fn session(&mut self) -> Cut {
        match self.try_session().await {
            Ok(never) => match never {},
            Err(cut) => cut,
        }
    }

    async fn try_session(&mut self) -> Result<std::convert::Infallible, Cut> {
        let mut client = self.reach().await?;
        self.open(&mut client).await?;
        let mut breaks = 0;
        loop {
            let acknowledged = self.acknowledged();
            match self.converse(&mut client).await {
                End::Stop => {
                    self.unmount(&mut client).await;
                    return Err(Cut::Stop);
                }
                End::Lost(failure) => return Err(Cut::Failed(failure)),
                End::Remount => {
                    self.mount(&mut client).await?;
                    continue;
                }
                End::Broken(failure) => {
                    // One that breaks as soon as it is there will not come to anything in this session.
                    breaks = if self.acknowledged() > acknowledged { 0 } else { breaks + 1 };
                    if breaks >= BREAKS_MAX || self.is_lost() {
                        return Err(Cut::Failed(failure));
                    }
                    self.parts.counters.attempt_failed();
                    info!(master = %self.master, %failure, "stream to the master broke; opening another");
                    self.news.look();
                    self.parts.status.change(|standing| standing.trouble = Some(failure.to_string()));
                }
            }
            client = loop {
                self.pause().await?;
                match self.reach().await {
                    Ok(client) => break client,
                    Err(Cut::Stop) => return Err(Cut::Stop),
                    Err(Cut::Failed(failure))
                        if self.is_lost() || matches!(failure, Failure::OtherCluster { .. }) =>
                    {
                        return Err(Cut::Failed(failure));
                    }
                    Err(Cut::Failed(failure)) => {
                        self.parts.counters.attempt_failed();
                        debug!(%failure, "master not reached");
                    }
                }
            };
        }
    }

    fn is_lost(&self) -> bool {
        self.conversation.as_ref().is_none_or(|c| c.beats.is_lost(SystemClock.now()))
    }

    fn acknowledged(&self) -> u64 {
        self.conversation.as_ref().map_or(0, |c| c.outgoing.acknowledged())
    }

    /// Registers, and mounts the segments of the master's groups.
    async fn open(&mut self, client: &mut Client) -> Result<(), Cut> {
        let asked = SystemClock.now();
        let request = calls::open_session(&self.facts, self.highest_term);
        let call = client.open_session(request);
        let grant = calls::opened(self.call(call).await?)?;
        self.highest_term = self.highest_term.max(grant.term);
        let (session, ttl) = (grant.session, grant.ttl);
        if grant.groups != u32::from(self.facts.groups.get()) {
            warn!(
                groups = grant.groups,
                planned = self.facts.groups,
                "the cluster's groups changed; restart this node"
            );
        }
        self.parts.counters.session();
        self.end_conversation();
        self.lines.set_session(&self.line, session);
        let _ = self.parts.work.send(Work::Session { begins: Some(session), ends: None });
        self.conversation = Some(Conversation {
            session,
            mounted: Hosted::new(),
            outgoing: Outgoing::new(session),
            beats: Beats::new(asked, ttl),
            reports: Reports::default(),
            complete: None,
            reads_before: self.parts.reads(),
        });
        self.parts.status.change(|standing| {
            standing.mounted = false;
            standing.session = Some(session);
            standing.term = grant.term;
        });
        info!(master = %self.master, session = session.0, term = grant.term.get(), "session opened");
        self.mount(client).await
    }

    /// Mounts the segments of groups that the master hosts and did not host before, and forgets those that it hosts no more.
    async fn mount(&mut self, client: &mut Client) -> Result<(), Cut> {
        let wanted = self.wanted.borrow_and_update().clone();
        let Some(conversation) = &mut self.conversation else { return Ok(()) };
        let session = conversation.session;
        let (missing, lost) = behind(self.facts.groups, &wanted, &conversation.mounted);
        conversation.complete = None;
        conversation.mounted.retain(|group, _| !lost.contains(*group));
        let memory = Arc::clone(&self.parts.memory);
        let of = |groups: &GroupSet, side: &Side| {
            self.lines.group_of(side.segment().shape().segment).is_some_and(|group| groups.contains(group))
        };
        for side in memory.sides().iter().filter(|side| of(&lost, side)) {
            conversation.reports.unmounted(side.segment().shape().segment);
        }
        if let Some(disk) = &self.parts.disk {
            disk.narrow(session, &set_of(self.facts.groups, &conversation.mounted));
        }
        let sides: Vec<&Side> = memory.sides().iter().filter(|side| of(&missing, side)).collect();
        // Before the segments are looked at: what is begun from now on is told, or seen.
        if sides.iter().any(|side| side.grant().is_some()) {
            self.parts.owner.tell_until(SystemClock.now().after(TELL_FOR));
        }
        let mut mounted = missing;
        let mut terms = Hosted::new();
        for sides in sides.chunks(moontide_types::bounds::BATCH_KEYS_MAX) {
            let specs: Vec<v1::SegmentSpec> = sides.iter().map(|side| self.spec(side)).collect();
            let occupied: Vec<bool> = specs.iter().map(|spec| spec.occupied).collect();
            let request = calls::mount_segments(&self.facts, session, specs);
            let call = client.mount_segments(request);
            let grants = calls::mounted(self.call(call).await?, sides.len())?;
            let mut elsewhere = GroupSet::none(self.facts.groups);
            for ((side, grant), occupied) in sides.iter().zip(grants).zip(occupied) {
                match grant.code {
                    None => {}
                    // It does not host the group yet, or not any more: the next map will tell.
                    Some(ErrorCode::WrongMaster | ErrorCode::Retry) => {
                        self.lines
                            .group_of(side.segment().shape().segment)
                            .into_iter()
                            .for_each(|group| elsewhere.insert(group));
                        continue;
                    }
                    Some(code) => return Err(Failure::Refused { what: "mount the segments", code }.into()),
                }
                // First the term, then the snapshot: what an older master granted is refused from here on.
                side.granted(grant.group, grant.term);
                terms.insert(grant.group, grant.term);
                self.highest_term = self.highest_term.max(grant.term);
                let shape = side.segment().shape();
                let of = Of { segment: shape.segment, generation: shape.generation, term: grant.term };
                if let Some(conversation) = &mut self.conversation {
                    // What was begun while the master was asked has a snapshot as well; it would not be told otherwise.
                    conversation.reports.mounted(of, occupied || side.is_occupied());
                }
            }
            mounted = mounted.without(&elsewhere);
        }
        info!(master = %self.master, session = session.0, groups = mounted.len(), "segments mounted");
        if let Some(disk) = self.parts.disk.clone()
            && !mounted.is_empty()
        {
            // Before the master has it: it must not hear that all is told before this is.
            disk.announce_telling(session);
            let spec = calls::disk_spec(memory.generation(), disk.is_occupied());
            let call = client.mount_segments(calls::mount_segments(&self.facts, session, vec![spec]));
            let grants = calls::mounted(self.call(call).await?, 1)?;
            if let Some(code) = grants.iter().find_map(|grant| grant.code) {
                return Err(Failure::Refused { what: "mount the disk", code }.into());
            }
            disk.begin_telling(session, mounted.clone());
        }
        if let Some(conversation) = &mut self.conversation {
            conversation.mounted.extend(terms.into_iter().filter(|(group, _)| mounted.contains(*group)));
        }
        Ok(())
    }

    /// A segment as it is offered.
    fn spec(&self, side: &Side) -> v1::SegmentSpec {
        let group = self.lines.group_of(side.segment().shape().segment);
        let away = group.and_then(|group| self.lines.away(group, SystemClock.now()));
        calls::spec(side, group, away)
    }

    /// Whether the master hosts groups whose segments are not mounted there.
    fn is_behind(&self) -> bool {
        let wanted = self.wanted.borrow();
        let groups = self.facts.groups;
        self.conversation.as_ref().is_some_and(|c| !behind(groups, &wanted, &c.mounted).0.is_empty())
    }

    async fn unmount(&mut self, client: &mut Client) {
        let Some(conversation) = &self.conversation else { return };
        // The disk first: with the last segment the session ends.
        let disk = self.parts.disk.iter().map(|_| SegmentId::DISK.0);
        let of_groups = |segment: &SegmentId| {
            self.lines.group_of(*segment).is_some_and(|group| conversation.mounted.contains_key(&group))
        };
        let sides = self.parts.memory.sides().iter().map(|side| side.segment().shape().segment);
        let all: Vec<u32> = disk.chain(sides.filter(of_groups).map(|segment| segment.0)).collect();
        for segments in all.chunks(moontide_types::bounds::BATCH_KEYS_MAX) {
            let segments = segments.to_vec();
            let request = calls::unmount_segments(&self.facts, conversation.session, segments);
            match tokio::time::timeout(CALL_MAX / 2, client.unmount_segments(request)).await {
                Ok(Ok(_)) => {}
                Ok(Err(status)) => {
                    return warn!(%status, "segments not unmounted; the session will end by itself");
                }
                Err(_) => return warn!("segments not unmounted in time; the session will end by itself"),
            }
        }
        info!(session = conversation.session.0, "segments unmounted");
    }

    /// One stream of the session, until it ends.
    async fn converse(&mut self, client: &mut Client) -> End {
        let (to_master, messages) = mpsc::channel(ON_THE_WAY_MAX);
        if let Some(conversation) = &mut self.conversation {
            conversation.outgoing.rewind();
        }
        self.beat();
        let call = client.session(ReceiverStream::new(messages));
        // The master may want to hear something before it answers.
        if let Some(first) = self.next_message() {
            let _ = to_master.try_send(first);
        }
        let mut from_master = match self.call(call).await {
            Ok(stream) => stream,
            Err(Cut::Stop) => return End::Stop,
            Err(Cut::Failed(failure)) => return ended(failure),
        };
        self.parts.counters.stream();
        let ttl = self.conversation.as_ref().map_or(CALL_MAX, |c| c.beats.ttl());
        let mut clock = tokio::time::interval(beat_interval(ttl));
        clock.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        clock.reset();
        let mut stop = self.stop.clone();
        let mut wanted = self.wanted.clone();
        // Counted from the beginning, whatever else happens on the stream meanwhile.
        let mut patience = std::pin::pin!(tokio::time::sleep(BEHIND_PAUSE));
        loop {
            self.report_next().await;
            if let (Some(disk), Some(conversation)) = (&self.parts.disk, &self.conversation) {
                disk.note_unheard(conversation.session, conversation.outgoing.bytes());
            }
            let has_next = self.conversation.as_ref().is_some_and(|c| c.outgoing.has_next());
            let is_behind = self.is_behind();
            tokio::select! {
                () = stopped(&mut stop) => return End::Stop,
                changed = wanted.changed() => return match changed {
                    Ok(()) => End::Remount,
                    Err(_) => End::Lost(Failure::NotMaster),
                },
                () = &mut patience, if is_behind => {
                    self.news.look();
                    return End::Remount;
                },
                message = from_master.message() => match message {
                    Ok(Some(message)) => if let Err(failure) = self.heard(&message) {
                        return End::Broken(failure);
                    },
                    Ok(None) => return End::Broken(Failure::Ended),
                    Err(status) => return ended(status.into()),
                },
                permit = to_master.reserve(), if has_next => match permit {
                    Ok(permit) => if let Some(message) = self.next_message() {
                        permit.send(message);
                    },
                    // The connection is gone; why, the other direction says.
                    Err(_) => match tokio::time::timeout(CALL_MAX, from_master.message()).await {
                        Ok(Err(status)) => return ended(status.into()),
                        _ => return End::Broken(Failure::Ended),
                    },
                },
                event = self.events.recv() => if let Some(event) = event {
                    self.take_events(event);
                },
                _ = clock.tick() => {
                    let now = SystemClock.now();
                    let Some(conversation) = &mut self.conversation else { return End::Lost(Failure::Ended) };
                    if conversation.beats.is_lost(now) {
                        return End::Lost(Failure::Silent);
                    }
                    if conversation.beats.is_silent(now) {
                        return End::Broken(Failure::Silent);
                    }
                    self.beat();
                },
            }
        }
    }

    fn next_message(&mut self) -> Option<v1::NodeMessage> {
        let highest_term = self.highest_term;
        self.conversation.as_mut()?.outgoing.next(highest_term)
    }

    /// A message of the master.
    fn heard(&mut self, message: &v1::MasterMessage) -> Result<(), Failure> {
        let Some(conversation) = &mut self.conversation else { return Ok(()) };
        let message = MasterMessage::from_wire(message).map_err(Failure::Message)?;
        if message.session != conversation.session {
            return Err(Failure::OtherSession);
        }
        self.highest_term = self.highest_term.max(message.term);
        self.news.version(message.map_version);
        conversation.outgoing.acked(message.acked_sequence);
        match message.body {
            MasterBody::Orders(orders) if orders.is_empty() => {}
            MasterBody::Orders(orders) => {
                let (session, orders) = (conversation.session, orders.iter().collect());
                let _ = self.parts.work.send(Work::Orders { session, orders });
            }
            MasterBody::HeartbeatAck { beat, ttl_ms } => {
                conversation.beats.acked(beat, Duration::from_millis(ttl_ms.into()));
            }
        }
        let acknowledged = conversation.outgoing.acknowledged();
        if conversation.complete.is_some_and(|complete| complete <= acknowledged) {
            self.backoff.reset();
            // All masters have, if this one was the last of them.
            let late = moontide_types::planted("old-answer-taken-for-new");
            let heard = if late { SystemClock.now() } else { conversation.beats.heard() };
            if let Some(at) = self.lines.good(&self.line, heard, &conversation.mounted) {
                self.parts.keeper.good(at);
                if !self.parts.status.is_mounted() {
                    info!(session = conversation.session.0, "the masters know of everything");
                }
                self.parts.status.change(|standing| {
                    standing.mounted = true;
                    standing.trouble = None;
                });
            }
        }
        Ok(())
    }

    /// Takes the snapshot of the next segment that is to be reported, if the master keeps up.
    async fn report_next(&mut self) {
        let Some(conversation) = &mut self.conversation else { return };
        if let Some((segment, first)) = conversation.reports.next_due() {
            if conversation.outgoing.bytes() >= UNACKED_BYTES_MAX {
                return;
            }
            let memory = Arc::clone(&self.parts.memory);
            let taken = tokio::task::spawn_blocking(move || snapshot::take(&memory, segment, first)).await;
            let (snapshot, unreadable) = match taken {
                Ok(Some(taken)) => taken,
                Ok(None) | Err(_) => return warn!(segment = segment.0, "no snapshot of a segment"),
            };
            let first = first.min(snapshot.records);
            info!(segment = segment.0, records = snapshot.records - first, "segment reported");
            self.parts.counters.reported(snapshot.records - first);
            for body in conversation.reports.snapshot(snapshot) {
                conversation.outgoing.push(body);
            }
            if !unreadable.is_empty() {
                warn!(
                    segment = segment.0,
                    records = unreadable.len(),
                    "records without a readable key were killed"
                );
                self.parts.counters.unreadable(unreadable.len() as u64);
                self.parts.owner.gave_up(&unreadable);
            }
        }
        let wanted = self.wanted.borrow();
        let all_mounted = behind(self.facts.groups, &wanted, &conversation.mounted).0.is_empty();
        if conversation.complete.is_none() && conversation.reports.is_complete() && all_mounted {
            conversation.complete = Some(conversation.outgoing.last());
        }
    }

    /// Says that the node lives, and how it is.
    fn beat(&mut self) {
        let Some(conversation) = &mut self.conversation else { return };
        let Some(beat) = conversation.beats.beat(SystemClock.now()) else { return };
        let memory = &self.parts.memory;
        // Reads are counted once, whichever groups they were of.
        let reads = if self.lines.is_first(&self.line) {
            calls::since(self.parts.reads(), &conversation.reads_before)
        } else {
            conversation.reads_before = self.parts.reads();
            v1::ReadCounters::default()
        };
        let touched = memory.take_touched().bitmaps(memory.generation(), beat);
        let own = |side: &&Side| {
            let group = self.lines.group_of(side.segment().shape().segment);
            group.is_some_and(|group| conversation.mounted.contains_key(&group))
        };
        let heartbeat = v1::Heartbeat {
            beat,
            reads: Some(reads),
            touched: self.lines.sort_touched(&set_of(self.facts.groups, &conversation.mounted), touched),
            segments: memory
                .sides()
                .iter()
                .filter(own)
                .take(moontide_types::bounds::BATCH_KEYS_MAX)
                .map(calls::segment_status)
                .collect(),
            disk: self.parts.disk.as_ref().map(|disk| disk.status()),
            pressure: Some(v1::Pressure {
                staging_permille: self.parts.disk.as_ref().map_or(0, |disk| disk.staging_permille()),
                ..Default::default()
            }),
        };
        conversation.outgoing.push(Body::Heartbeat(heartbeat));
    }

    /// An event, and all that are there with it.
    fn take_events(&mut self, first: Event) {
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
        let Some(conversation) = &mut self.conversation else { return };
        for body in conversation.reports.changes(changes) {
            self.parts.counters.changes(1);
            conversation.outgoing.push(body);
        }
    }

    fn take_event(&mut self, event: Event, changes: &mut Vec<Change>) {
        let Some(conversation) = &mut self.conversation else { return };
        match event {
            Event::Change(change) => changes.push(change),
            Event::Results { session, results } if session == conversation.session => {
                let results: PackedBuilder<OrderResult> = results.into_iter().collect();
                let results = v1::OrderResults { results: results.finish().into() };
                conversation.outgoing.push(Body::OrderResults(results));
            }
            Event::Results { .. } => {} // of a session that is over
            Event::Report(segment) => {
                conversation.reports.again(segment);
                conversation.complete = None;
            }
            Event::Offloaded { session, notice } if session == conversation.session => {
                conversation.outgoing.push(Body::Offloaded(notice));
            }
            Event::DiskEvicted { session, evicted } if session == conversation.session => {
                conversation.outgoing.push(Body::DiskEvicted(evicted));
            }
            Event::Offloaded { .. } | Event::DiskEvicted { .. } => {} // as above
        }
    }

    /// A connection to the master.
    async fn reach(&mut self) -> Result<Client, Cut> {
        let (master, facts) = (Arc::clone(&self.master), Arc::clone(&self.facts));
        let client = self.limited(calls::reach(&master, &facts), 2 * CALL_MAX).await??;
        Ok(client)
    }

    /// A call to the master, while events are taken.
    async fn call<T>(
        &mut self,
        call: impl Future<Output = Result<tonic::Response<T>, tonic::Status>>,
    ) -> Result<T, Cut> {
        let answer = self.limited(call, CALL_MAX).await?;
        Ok(answer.map_err(Failure::from)?.into_inner())
    }

    async fn pause(&mut self) -> Result<(), Cut> {
        let wait = self.backoff.wait();
        self.limited(tokio::time::sleep(wait), 2 * wait).await
    }

    /// Waits for something, for so long at most, and takes events meanwhile.
    async fn limited<T>(&mut self, what: impl Future<Output = T>, limit: Duration) -> Result<T, Cut> {
        let (mut stop, mut wanted) = (self.stop.clone(), self.wanted.clone());
        let (mut what, mut over) = (std::pin::pin!(what), std::pin::pin!(tokio::time::sleep(limit)));
        loop {
            tokio::select! {
                biased;
                () = stopped(&mut stop) => return Err(Cut::Stop),
                () = orphaned(&mut wanted) => return Err(Cut::Stop),
                done = &mut what => return Ok(done),
                () = &mut over => return Err(Cut::Failed(Failure::Slow)),
                event = self.events.recv() => if let Some(event) = event {
                    self.take_events(event);
                },
            }
        }
    }
}

/// Until the node stops; that whoever would say so is gone means the same.
async fn stopped(stop: &mut watch::Receiver<bool>) {
    let _ = stop.wait_for(|&stop| stop).await;
}

/// Until nobody says any more which groups the master hosts: it hosts none.
async fn orphaned(wanted: &mut watch::Receiver<Hosted>) {
    while wanted.changed().await.is_ok() {}
}

/// What a stream's end means for its session.
fn ended(failure: Failure) -> End {
    let code = match &failure {
        Failure::Status(status) => code_of(status),
        _ => None,
    };
    match code {
        // Too old, not its master, or it cannot be understood: saying it again changes nothing.
        Some(
            ErrorCode::StaleSession
            | ErrorCode::WrongMaster
            | ErrorCode::StaleTerm
            | ErrorCode::InvalidArgument
            | ErrorCode::TooLarge
            | ErrorCode::Unsupported,
        ) => End::Lost(failure),
        _ => End::Broken(failure),
    }
}
