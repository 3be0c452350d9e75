//! [`Disk`]: a node's disk. What is on the [`Platter`] outlives the process; everything else goes with it.
//!
//! The shipped disk has threads that write, remove, load and tell; here each of their jobs takes its time, and those of one
//! thread come one after the other. What is said of it, and to whom, is packed by the shipped code.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use moontide_disk::RecordName;
use moontide_heap::{Grant, NewRecord, Writer};
use moontide_node::decide::groups::GroupSet;
use moontide_node::decide::notice::{Audience, NoticeBuilder};
use moontide_node::decide::orders::{Answer, Numbered};
use moontide_proto::{Order, OrderKind, PackedBuilder, VersionedId, v1};
use moontide_types::record::{Attributes, Header, KeySection, State, Word};
use moontide_types::{Epoch, ErrorCode, MonoTime, ObjectId, SegmentId, SessionId, SlotId};

use super::{LONG_AGO, Node, NodeEvent, NodeTimer};
use crate::event::Timer;
use crate::scene::Scene;

/// Longest time that a job takes.
const JOB_MAX: Duration = Duration::from_millis(40);
/// When a removal that failed is tried again.
const AGAIN: Duration = Duration::from_secs(10);
/// Records that are told at a time, when everything is.
const TOLD_AT_ONCE: usize = 5;
/// How long a record may wait to be written, unless the order says otherwise.
const ORDER_LASTS: Duration = Duration::from_secs(30);

/// A record on the disk.
#[derive(Clone, Debug)]
struct Stored {
    header: Header,
    key: Vec<u8>,
    attributes: Vec<u8>,
    payload: Vec<u8>,
    /// In which order they were written.
    number: u64,
}

/// What outlives the process.
#[derive(Clone, Debug, Default)]
pub(crate) struct Platter {
    records: BTreeMap<RecordName, Stored>,
    /// Of each object the last version that was removed.
    removed: BTreeMap<ObjectId, Epoch>,
    written: u64,
}

impl Platter {
    /// As the next process finds it.
    pub(crate) fn recovered(mut self) -> Platter {
        let removed = std::mem::take(&mut self.removed);
        self.records.retain(|name, _| removed.get(&name.id).is_none_or(|&last| name.version > last));
        Platter { removed, ..self }
    }

    pub(crate) fn records(&self) -> usize {
        self.records.len()
    }

    fn remove(&mut self, id: ObjectId, version: Epoch) {
        let last = self.removed.entry(id).or_insert(version);
        *last = version.max(*last);
        self.records.retain(|name, _| name.id != id || name.version > version);
    }

    fn was_removed(&self, name: &RecordName) -> bool {
        self.removed.get(&name.id).is_some_and(|&last| name.version <= last)
    }
}

/// What a thread of the disk has to do.
#[derive(Debug)]
enum Job {
    /// A record is to be written, if it is there and wanted by then.
    Offload { session: SessionId, order: Order, until: MonoTime },
    /// It is durable when this is over.
    Write { session: SessionId, order: u64, record: Box<Stored> },
    /// A removal is durable when this is over, and answered.
    Remove { session: SessionId, order: u64, id: ObjectId, version: Epoch, answer: Answer },
    /// Removals that failed are tried again.
    RemoveAgain,
    /// A record goes back into memory: its slot is taken.
    Promote { session: SessionId, order: Order },
    /// It is published.
    Publish { session: SessionId, order: Order },
    /// The next of all that a session is told.
    Tell { session: SessionId, groups: GroupSet, after: Option<RecordName> },
}

/// A node's disk, as its process has it.
#[derive(Debug)]
pub(super) struct Disk {
    platter: Platter,
    /// Most records.
    limit: usize,
    audience: Audience,
    /// How many scans each session has yet to be told the end of.
    tellings: BTreeMap<SessionId, usize>,
    promoting: BTreeMap<(SegmentId, SlotId), Numbered>,
    /// The last order of each session to write or to bring back.
    taken: BTreeMap<SessionId, u64>,
    jobs: BTreeMap<u64, Job>,
    /// Until when each thread is busy.
    busy: BTreeMap<&'static str, MonoTime>,
    /// Until then nothing can be written.
    fails_until: MonoTime,
    failed: BTreeSet<(ObjectId, Epoch)>,
}

impl Disk {
    pub(super) fn new(platter: Platter, limit: usize) -> Disk {
        Disk {
            platter,
            limit,
            audience: Audience::default(),
            tellings: BTreeMap::new(),
            promoting: BTreeMap::new(),
            taken: BTreeMap::new(),
            jobs: BTreeMap::new(),
            busy: BTreeMap::new(),
            fails_until: LONG_AGO,
            failed: BTreeSet::new(),
        }
    }

    pub(super) fn platter(&self) -> &Platter {
        &self.platter
    }

    /// Whether masters have been told everything.
    pub(super) fn is_told(&self) -> bool {
        self.tellings.values().all(|&running| running == 0)
    }

    pub(super) fn fails(&mut self, until: MonoTime) {
        self.fails_until = self.fails_until.max(until);
    }

    /// As it is offered to a master.
    pub(super) fn spec(&self, generation: u64) -> v1::SegmentSpec {
        v1::SegmentSpec {
            segment: SegmentId::DISK.0,
            generation,
            medium: v1::Medium::Disk.into(),
            units: 1,
            slots: 1,
            occupied: self.platter.records() > 0,
            ..Default::default()
        }
    }

    /// As a heartbeat tells of it.
    pub(super) fn status(&self, now: MonoTime) -> v1::DiskStatus {
        let state = if now < self.fails_until {
            v1::DiskState::WriteFailed
        } else if self.is_told() {
            v1::DiskState::Serving
        } else {
            v1::DiskState::Recovering
        };
        v1::DiskStatus {
            state: state.into(),
            used_bytes: self.platter.records() as u64,
            limit_bytes: self.limit as u64,
            objects: self.platter.records() as u64,
            backlog_bytes: 0,
        }
    }

    /// Until it is told of more groups, a session is not told that everything is known.
    pub(super) fn announce(&mut self, session: SessionId) {
        *self.tellings.entry(session).or_default() += 1;
    }

    pub(super) fn narrow(&mut self, session: SessionId, groups: &GroupSet) {
        self.audience.narrow(session, groups);
    }

    pub(super) fn end_session(&mut self, session: SessionId) {
        self.audience.end(session);
        self.tellings.remove(&session);
        self.taken.remove(&session);
        self.promoting.retain(|_, &mut (of, _)| of != session);
    }

    /// Nothing is to appear in the slot any more.
    pub(super) fn cancel_promotion(&mut self, segment: SegmentId, slot: SlotId) {
        self.promoting.remove(&(segment, slot));
    }

    /// The bytes of a record.
    pub(super) fn read(&self, name: &RecordName) -> Option<Vec<u8>> {
        Some(self.platter.records.get(name)?.payload.clone())
    }

    fn is_wanted(&self, session: SessionId, order: &Order) -> bool {
        self.promoting.get(&(order.segment, order.slot)) == Some(&(session, order.order))
            && self.audience.is_live(session)
    }
}

fn name_of(order: &Order) -> RecordName {
    RecordName { id: order.id, version: order.epoch, stripe: order.stripe }
}

impl Node {
    fn disk(&mut self) -> &mut Disk {
        self.disk.as_mut().expect("only a node with a disk comes here")
    }

    /// Gives a job to one of the disk's threads, which takes one after the other.
    fn give_disk(&mut self, thread: &'static str, job: Job, scene: &mut Scene<'_>) {
        let number = self.number();
        let (now, takes) = (scene.now(), self.dice.up_to(JOB_MAX));
        let disk = self.disk();
        let free = disk.busy.entry(thread).or_insert(now);
        *free = (*free).max(now).after(takes);
        let wait = free.since(now);
        disk.jobs.insert(number, job);
        scene.wake_in(wait, Timer::Node(NodeTimer::Disk { job: number }));
    }

    /// As [`Node::give_disk`], after a fixed time.
    fn give_disk_in(&mut self, wait: Duration, job: Job, scene: &mut Scene<'_>) {
        let number = self.number();
        self.disk().jobs.insert(number, job);
        scene.wake_in(wait, Timer::Node(NodeTimer::Disk { job: number }));
    }

    /// An order about the disk; it is admissible.
    pub(super) fn disk_order(&mut self, session: SessionId, order: &Order, scene: &mut Scene<'_>) {
        let disk = self.disk();
        if matches!(order.kind, OrderKind::Offload | OrderKind::Promote) {
            let taken = disk.taken.entry(session).or_default();
            if order.order <= *taken {
                return; // said again on a new stream: it was answered, or will be
            }
            *taken = order.order;
        }
        match order.kind {
            OrderKind::Offload => {
                let lasts = match order.lease_ms {
                    0 => ORDER_LASTS,
                    lease_ms => Duration::from_millis(lease_ms.into()),
                };
                let until = scene.now().after(lasts);
                self.give_disk("write", Job::Offload { session, order: *order, until }, scene);
            }
            OrderKind::Promote => {
                disk.promoting.insert((order.segment, order.slot), (session, order.order));
                self.give_disk("load", Job::Promote { session, order: *order }, scene);
            }
            OrderKind::DropDisk => {
                let answer = Answer::done(Word::new(order.epoch, State::Free));
                self.remove_from_disk(session, order, answer, scene);
            }
            _ => unreachable!("not about the disk"),
        }
    }

    /// The version, and all before it, goes for good; then this is answered.
    pub(super) fn remove_from_disk(
        &mut self,
        session: SessionId,
        order: &Order,
        answer: Answer,
        scene: &mut Scene<'_>,
    ) {
        let (order, id, version) = (order.order, order.id, order.epoch);
        self.give_disk("remove", Job::Remove { session, order, id, version, answer }, scene);
    }

    /// The disk is mounted: everything of these groups that is on it is told.
    pub(super) fn begin_telling(&mut self, session: SessionId, groups: GroupSet, scene: &mut Scene<'_>) {
        self.disk().audience.add(session, &groups);
        self.give_disk("tell", Job::Tell { session, groups, after: None }, scene);
    }

    /// A job of the disk is over.
    pub(super) fn disk_due(&mut self, number: u64, scene: &mut Scene<'_>) {
        let Some(job) = self.disk.as_mut().and_then(|disk| disk.jobs.remove(&number)) else { return };
        let now = scene.now();
        match job {
            Job::Offload { session, order, until } => {
                if let Err(code) = self.offload(session, &order, until, scene) {
                    self.answer_order(session, order.order, Answer::refused(code, Word::default()), scene);
                }
            }
            Job::Write { session, order, record } => self.written(session, order, *record, scene),
            Job::Remove { session, order, id, version, answer } => {
                let disk = self.disk();
                let answer = if now < disk.fails_until {
                    disk.failed.insert((id, version));
                    self.give_disk_in(AGAIN, Job::RemoveAgain, scene);
                    Answer::refused(ErrorCode::DiskError, Word::default())
                } else {
                    disk.platter.remove(id, version);
                    answer
                };
                self.answer_order(session, order, answer, scene);
            }
            Job::RemoveAgain => {
                let disk = self.disk();
                if now < disk.fails_until {
                    self.give_disk_in(AGAIN, Job::RemoveAgain, scene);
                } else {
                    let failed = std::mem::take(&mut disk.failed);
                    failed.into_iter().for_each(|(id, version)| disk.platter.remove(id, version));
                }
            }
            Job::Promote { session, order } => match self.begin_promotion(session, &order) {
                Ok(()) => self.give_disk("load", Job::Publish { session, order }, scene),
                Err(code) => self.promoted(session, &order, Err(code), scene),
            },
            Job::Publish { session, order } => {
                let published = self.publish_promotion(session, &order);
                self.promoted(session, &order, published, scene);
            }
            Job::Tell { session, groups, after } => self.tell_more(session, groups, after, scene),
        }
    }

    fn answer_order(&mut self, session: SessionId, order: u64, answer: Answer, scene: &mut Scene<'_>) {
        self.tell(NodeEvent::Results { session, results: vec![answer.to(order)] }, scene);
    }

    /// Begins to write a record, for which there must be room.
    fn offload(
        &mut self,
        session: SessionId,
        order: &Order,
        until: MonoTime,
        scene: &mut Scene<'_>,
    ) -> Result<(), ErrorCode> {
        let now = scene.now();
        if now < self.disk().fails_until {
            return Err(ErrorCode::DiskError);
        }
        if !self.disk().audience.is_live(session) || until <= now {
            return Err(ErrorCode::Cancelled);
        }
        let pin = self.memory.heap.pin(order.segment, order.slot, order.epoch).ok_or(ErrorCode::Gone)?;
        if pin.header().id != order.id {
            return Err(ErrorCode::Gone);
        }
        let (header, payload) = (*pin.header(), pin.payload().to_vec());
        let (key, attributes) = (pin.key().to_vec(), pin.attributes().to_vec());
        drop(pin);
        self.make_room(scene);
        let platter = &mut self.disk().platter;
        platter.written += 1;
        let record = Box::new(Stored { header, key, attributes, payload, number: platter.written });
        self.give_disk("write", Job::Write { session, order: order.order, record }, scene);
        Ok(())
    }

    /// What was written first goes, and the masters are told.
    fn make_room(&mut self, scene: &mut Scene<'_>) {
        let disk = self.disk();
        if disk.platter.records() < disk.limit {
            return;
        }
        let oldest = disk.platter.records.iter().min_by_key(|(_, stored)| stored.number);
        let Some((&name, _)) = oldest else { return };
        disk.platter.records.remove(&name);
        let concerned = disk.audience.iter().filter(|(_, groups)| groups.has_object(name.id));
        let sessions: Vec<SessionId> = concerned.map(|&(session, _)| session).collect();
        for session in sessions {
            let version = VersionedId { id: name.id, epoch: name.version };
            let versions: PackedBuilder<VersionedId> = [version].into_iter().collect();
            let evicted = v1::DiskEvicted { versions: versions.finish().into() };
            self.tell(NodeEvent::DiskEvicted { session, evicted }, scene);
        }
    }

    /// A record is durable, unless it was removed meanwhile; whom it concerns is told.
    fn written(&mut self, session: SessionId, order: u64, record: Stored, scene: &mut Scene<'_>) {
        let (now, name) = (scene.now(), RecordName::of(&record.header));
        let disk = self.disk();
        let refused = if now < disk.fails_until {
            Some(ErrorCode::DiskError)
        } else if disk.platter.was_removed(&name) {
            Some(ErrorCode::Gone)
        } else {
            None
        };
        if let Some(code) = refused {
            return self.answer_order(session, order, Answer::refused(code, Word::default()), scene);
        }
        let mut builder = NoticeBuilder::default();
        builder.push(&record.header, &record.key, &record.attributes);
        disk.platter.records.entry(name).or_insert(record);
        let audience: Vec<(SessionId, bool)> = if disk.audience.is_live(session) {
            vec![(session, false)]
        } else {
            let concerned = disk.audience.iter().filter(|(_, groups)| groups.has_object(name.id));
            concerned.map(|&(session, _)| (session, true)).collect()
        };
        for (told, recovered) in audience {
            let notice = builder.message(recovered, |_| true);
            self.tell(NodeEvent::Offloaded { session: told, notice }, scene);
        }
        self.answer_order(session, order, Answer::done(Word::new(name.version, State::Ready)), scene);
    }

    fn begin_promotion(&mut self, session: SessionId, order: &Order) -> Result<(), ErrorCode> {
        let disk = self.disk.as_ref().expect("only a node with a disk comes here");
        let stored = disk.platter.records.get(&name_of(order)).ok_or(ErrorCode::Gone)?;
        let key = KeySection::decode(&stored.key).map_err(|_| ErrorCode::Corrupt)?;
        let attributes = Attributes::decode(&stored.attributes).map_err(|_| ErrorCode::Corrupt)?;
        if !disk.is_wanted(session, order) {
            return Err(ErrorCode::Cancelled);
        }
        let header = &stored.header;
        let record = NewRecord {
            id: header.id,
            flags: header.flags,
            object_len: header.object_len,
            stripe_index: header.stripe_index,
            stripe_count: header.stripe_count,
            stripe_offset: header.stripe_offset,
            stripe_len: header.stripe_len,
            key,
            attributes: &attributes,
            id_key: header.id_key,
            tenant_generation: header.tenant_generation,
        };
        let (slot, epoch, extent) = (order.slot, order.epoch, order.extent);
        let grant = Grant { slot, epoch, term: order.term, extent, record, writer: Writer::Node };
        self.memory.heap.begin_copy(order.segment, &grant).map_err(|error| error.code())?;
        self.memory.note_copy(order.segment, slot, epoch, extent.units);
        Ok(())
    }

    fn publish_promotion(&mut self, session: SessionId, order: &Order) -> Result<(), ErrorCode> {
        let disk = self.disk.as_ref().expect("only a node with a disk comes here");
        let (segment, slot, epoch) = (order.segment, order.slot, order.epoch);
        let stored = disk.platter.records.get(&name_of(order)).filter(|_| disk.is_wanted(session, order));
        let published = stored.ok_or(ErrorCode::Cancelled).and_then(|stored| {
            let mut claim = self.memory.heap.claim(segment, slot, epoch).ok_or(ErrorCode::Busy)?;
            claim.fill(&stored.payload);
            claim.publish(stored.header.root).map_err(|error| error.code())
        });
        let state = if published.is_ok() { State::Ready } else { State::Dead };
        if published.is_err() {
            let _ = self.memory.heap.kill(segment, slot, epoch, LONG_AGO);
        }
        self.memory.note(segment, slot, epoch, state, None);
        published
    }

    fn promoted(
        &mut self,
        session: SessionId,
        order: &Order,
        outcome: Result<(), ErrorCode>,
        scene: &mut Scene<'_>,
    ) {
        let disk = self.disk();
        if disk.is_wanted(session, order) {
            disk.promoting.remove(&(order.segment, order.slot));
        }
        let answer = match outcome {
            Ok(()) => Answer::done(Word::new(order.epoch, State::Ready)),
            Err(code) => Answer::refused(code, Word::default()),
        };
        self.answer_order(session, order.order, answer, scene);
    }

    /// Tells the next records, or that these were all.
    fn tell_more(
        &mut self,
        session: SessionId,
        groups: GroupSet,
        after: Option<RecordName>,
        scene: &mut Scene<'_>,
    ) {
        let disk = self.disk();
        if !disk.audience.is_live(session) {
            return;
        }
        let is_next = |name: &RecordName| groups.has_object(name.id) && after.is_none_or(|last| *name > last);
        let mut builder = NoticeBuilder::default();
        let mut last = None;
        for (name, stored) in disk.platter.records.iter().filter(|(name, _)| is_next(name)).take(TOLD_AT_ONCE)
        {
            builder.push(&stored.header, &stored.key, &stored.attributes);
            last = Some(*name);
        }
        let notice = builder.message(true, |_| true);
        if last.is_some() {
            self.tell(NodeEvent::Offloaded { session, notice }, scene);
            return self.give_disk("tell", Job::Tell { session, groups, after: last }, scene);
        }
        // That everything is known is said of all groups of the session, when it is so.
        let Some(running) = disk.tellings.get_mut(&session) else { return };
        *running -= 1;
        if *running == 0 {
            let notice = v1::OffloadNotice { recovery_end: true, ..notice };
            self.tell(NodeEvent::Offloaded { session, notice }, scene);
        }
    }
}
