//! [`Disk`]: simulated disk of a node. The [`DiskImage`] survives the process; all other state is lost with it.
//!
//! The shipped disk has threads that write, remove, load and report; here each job takes simulated time, and the jobs
//! of one thread run one after the other. Shipped code encodes the reports.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use moontide_disk::RecordId;
use moontide_heap::{Grant, PayloadWriter, RecordSpec};
use moontide_node::logic::commands::{CommandId, CommandReply};
use moontide_node::logic::groups::GroupSet;
use moontide_node::logic::notice::{NoticeSubscribers, OffloadNoticeBuilder};
use moontide_node::logic::sync_marks::SyncMarks;
use moontide_proto::{CommandKind, NodeCommand, PackedBuilder, VersionedId, v1};
use moontide_types::record::{Attributes, Header, KeySection, State, Word};
use moontide_types::{Epoch, ErrorCode, MonoTime, ObjectId, SegmentId, SessionId, SlotId};

use super::{LONG_AGO, Node, NodeEvent, NodeTimer};
use crate::context::ProcessContext;
use crate::event::Timer;

/// Longest time that a job takes.
const JOB_MAX: Duration = Duration::from_millis(40);
/// When a removal that failed is tried again.
const AGAIN: Duration = Duration::from_secs(10);
/// Records per message of a full inventory.
const REPORTED_AT_ONCE: usize = 5;
/// Default delay of a write, unless the command sets one.
const ORDER_LASTS: Duration = Duration::from_secs(30);

/// A record on the disk.
#[derive(Clone, Debug)]
struct StoredRecord {
    header: Header,
    key: Vec<u8>,
    attributes: Vec<u8>,
    payload: Vec<u8>,
    /// Sequence number of the write.
    number: u64,
}

/// Content of a disk; survives the process.
#[derive(Clone, Debug, Default)]
pub(crate) struct DiskImage {
    records: BTreeMap<RecordId, StoredRecord>,
    /// Last removed version of each object.
    removed: BTreeMap<ObjectId, Epoch>,
    written: u64,
    /// File with the sync marks; empty if it was never written.
    sync_marks: String,
}

impl DiskImage {
    /// Returns the marks of earlier processes.
    pub(super) fn sync_marks(&self) -> SyncMarks {
        SyncMarks::from_text(&self.sync_marks).unwrap_or_default()
    }

    /// Returns the image as the next process finds it.
    pub(crate) fn recovered(mut self) -> DiskImage {
        let removed = std::mem::take(&mut self.removed);
        self.records.retain(|name, _| removed.get(&name.id).is_none_or(|&last| name.version > last));
        DiskImage { removed, ..self }
    }

    pub(crate) fn records(&self) -> usize {
        self.records.len()
    }

    fn remove(&mut self, id: ObjectId, version: Epoch) {
        let last = self.removed.entry(id).or_insert(version);
        *last = version.max(*last);
        self.records.retain(|name, _| name.id != id || name.version > version);
    }

    fn was_removed(&self, name: &RecordId) -> bool {
        self.removed.get(&name.id).is_some_and(|&last| name.version <= last)
    }
}

/// Job of a disk thread.
#[derive(Debug)]
enum Job {
    /// A record is to be written, if it is there and wanted by then.
    Offload { session: SessionId, command: NodeCommand, until: MonoTime },
    /// It is durable when this is over.
    Write { session: SessionId, command: u64, record: Box<StoredRecord> },
    /// A removal becomes durable and is acknowledged when this ends.
    Remove { session: SessionId, command: u64, id: ObjectId, version: Epoch, reply: CommandReply },
    /// Removals that failed are tried again.
    RemoveAgain,
    /// A record goes back into memory: its slot is taken.
    Promote { session: SessionId, command: NodeCommand },
    /// It is published.
    Publish { session: SessionId, command: NodeCommand },
    /// The next part of the inventory is sent to a session.
    Inventory { session: SessionId, groups: GroupSet, after: Option<RecordId> },
}

/// A node's disk, as its process has it.
#[derive(Debug)]
pub(super) struct Disk {
    disk_image: DiskImage,
    /// Most records.
    limit: usize,
    audience: NoticeSubscribers,
    /// Inventory scans of each session: those that were announced, and those that have not ended.
    scans: BTreeMap<SessionId, (u32, usize)>,
    promoting: BTreeMap<(SegmentId, SlotId), CommandId>,
    /// Last offload or load command of each session.
    taken: BTreeMap<SessionId, u64>,
    jobs: BTreeMap<u64, Job>,
    /// Until when each thread is busy.
    busy: BTreeMap<&'static str, MonoTime>,
    /// Until then nothing can be written.
    fails_until: MonoTime,
    failed: BTreeSet<(ObjectId, Epoch)>,
}

impl Disk {
    pub(super) fn new(disk_image: DiskImage, limit: usize) -> Disk {
        Disk {
            disk_image,
            limit,
            audience: NoticeSubscribers::default(),
            scans: BTreeMap::new(),
            promoting: BTreeMap::new(),
            taken: BTreeMap::new(),
            jobs: BTreeMap::new(),
            busy: BTreeMap::new(),
            fails_until: LONG_AGO,
            failed: BTreeSet::new(),
        }
    }

    pub(super) fn write_sync_marks(&mut self, marks: &SyncMarks) {
        self.disk_image.sync_marks = marks.to_text();
    }

    pub(super) fn disk_image(&self) -> &DiskImage {
        &self.disk_image
    }

    /// Returns whether all masters have the complete inventory.
    pub(super) fn is_told(&self) -> bool {
        self.scans.values().all(|&(_, running)| running == 0)
    }

    pub(super) fn heals(&mut self) {
        self.fails_until = LONG_AGO;
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
            has_records: self.disk_image.records() > 0,
            ..Default::default()
        }
    }

    /// Returns the usage for a heartbeat.
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
            used_bytes: self.disk_image.records() as u64,
            limit_bytes: self.limit as u64,
            objects: self.disk_image.records() as u64,
            backlog_bytes: 0,
        }
    }

    /// Counts an inventory scan: until it ends, the inventory of the session is incomplete.
    pub(super) fn announce(&mut self, session: SessionId) {
        let (announced, running) = self.scans.entry(session).or_default();
        (*announced, *running) = (*announced + 1, *running + 1);
    }

    pub(super) fn narrow(&mut self, session: SessionId, groups: &GroupSet) {
        self.audience.restrict(session, groups);
    }

    pub(super) fn end_session(&mut self, session: SessionId) {
        self.audience.end(session);
        self.scans.remove(&session);
        self.taken.remove(&session);
        self.promoting.retain(|_, &mut (of, _)| of != session);
    }

    /// Nothing is to appear in the slot any more.
    pub(super) fn cancel_promotion(&mut self, segment: SegmentId, slot: SlotId) {
        self.promoting.remove(&(segment, slot));
    }

    /// The bytes of a record.
    pub(super) fn read(&self, name: &RecordId) -> Option<Vec<u8>> {
        Some(self.disk_image.records.get(name)?.payload.clone())
    }

    fn is_wanted(&self, session: SessionId, command: &NodeCommand) -> bool {
        self.promoting.get(&(command.segment, command.slot)) == Some(&(session, command.command_id))
            && self.audience.is_live(session)
    }
}

fn name_of(command: &NodeCommand) -> RecordId {
    RecordId { id: command.id, version: command.epoch, stripe: command.stripe }
}

impl Node {
    fn disk(&mut self) -> &mut Disk {
        self.disk.as_mut().expect("only a node with a disk comes here")
    }

    /// Gives a job to one of the disk's threads, which takes one after the other.
    fn give_disk(&mut self, thread: &'static str, job: Job, cx: &mut ProcessContext<'_>) {
        let number = self.number();
        let (now, takes) = (cx.now(), self.rng.up_to(JOB_MAX));
        let disk = self.disk();
        let free = disk.busy.entry(thread).or_insert(now);
        *free = (*free).max(now).after(takes);
        let wait = free.since(now);
        disk.jobs.insert(number, job);
        cx.wake_in(wait, Timer::Node(NodeTimer::Disk { job: number }));
    }

    /// As [`Node::give_disk`], after a fixed time.
    fn give_disk_in(&mut self, wait: Duration, job: Job, cx: &mut ProcessContext<'_>) {
        let number = self.number();
        self.disk().jobs.insert(number, job);
        cx.wake_in(wait, Timer::Node(NodeTimer::Disk { job: number }));
    }

    /// Executes an admissible command on the disk.
    pub(super) fn disk_order(
        &mut self,
        session: SessionId,
        command: &NodeCommand,
        cx: &mut ProcessContext<'_>,
    ) {
        let disk = self.disk();
        if matches!(command.kind, CommandKind::Offload | CommandKind::Promote) {
            let taken = disk.taken.entry(session).or_default();
            if command.command_id <= *taken {
                return; // a repetition on a new stream: it has been or will be acknowledged
            }
            *taken = command.command_id;
        }
        match command.kind {
            CommandKind::Offload => {
                let lasts = match command.lease_ms {
                    0 => ORDER_LASTS,
                    lease_ms => Duration::from_millis(lease_ms.into()),
                };
                let until = cx.now().after(lasts);
                self.give_disk("write", Job::Offload { session, command: *command, until }, cx);
            }
            CommandKind::Promote => {
                disk.promoting.insert((command.segment, command.slot), (session, command.command_id));
                self.give_disk("load", Job::Promote { session, command: *command }, cx);
            }
            CommandKind::DropFromDisk => {
                let reply = CommandReply::done(Word::new(command.epoch, State::Free));
                self.remove_from_disk(session, command, reply, cx);
            }
            _ => unreachable!("not about the disk"),
        }
    }

    /// Removes a version and all earlier ones durably, then replies.
    pub(super) fn remove_from_disk(
        &mut self,
        session: SessionId,
        command: &NodeCommand,
        reply: CommandReply,
        cx: &mut ProcessContext<'_>,
    ) {
        let (command, id, version) = (command.command_id, command.id, command.epoch);
        self.give_disk("remove", Job::Remove { session, command, id, version, reply }, cx);
    }

    /// Sends the inventory of these groups after the disk was mounted.
    pub(super) fn begin_telling(
        &mut self,
        session: SessionId,
        groups: GroupSet,
        cx: &mut ProcessContext<'_>,
    ) {
        self.disk().audience.add(session, &groups);
        self.give_disk("report", Job::Inventory { session, groups, after: None }, cx);
    }

    /// A job of the disk is over.
    pub(super) fn disk_due(&mut self, number: u64, cx: &mut ProcessContext<'_>) {
        let Some(job) = self.disk.as_mut().and_then(|disk| disk.jobs.remove(&number)) else { return };
        let now = cx.now();
        match job {
            Job::Offload { session, command, until } => {
                if let Err(code) = self.offload(session, &command, until, cx) {
                    self.reply_to_command(
                        session,
                        command.command_id,
                        CommandReply::refused(code, Word::default()),
                        cx,
                    );
                }
            }
            Job::Write { session, command, record } => self.written(session, command, *record, cx),
            Job::Remove { session, command, id, version, reply } => {
                let disk = self.disk();
                let reply = if now < disk.fails_until {
                    disk.failed.insert((id, version));
                    self.give_disk_in(AGAIN, Job::RemoveAgain, cx);
                    CommandReply::refused(ErrorCode::DiskError, Word::default())
                } else {
                    disk.disk_image.remove(id, version);
                    reply
                };
                self.reply_to_command(session, command, reply, cx);
            }
            Job::RemoveAgain => {
                let disk = self.disk();
                if now < disk.fails_until {
                    self.give_disk_in(AGAIN, Job::RemoveAgain, cx);
                } else {
                    let failed = std::mem::take(&mut disk.failed);
                    failed.into_iter().for_each(|(id, version)| disk.disk_image.remove(id, version));
                }
            }
            Job::Promote { session, command } => match self.begin_promotion(session, &command) {
                Ok(()) => self.give_disk("load", Job::Publish { session, command }, cx),
                Err(code) => self.promoted(session, &command, Err(code), cx),
            },
            Job::Publish { session, command } => {
                let published = self.publish_promotion(session, &command);
                self.promoted(session, &command, published, cx);
            }
            Job::Inventory { session, groups, after } => self.tell_more(session, groups, after, cx),
        }
    }

    fn reply_to_command(
        &mut self,
        session: SessionId,
        command: u64,
        reply: CommandReply,
        cx: &mut ProcessContext<'_>,
    ) {
        self.send_event(NodeEvent::Results { session, results: vec![reply.to(command)] }, cx);
    }

    /// Starts to write a record; frees space for it first.
    fn offload(
        &mut self,
        session: SessionId,
        command: &NodeCommand,
        until: MonoTime,
        cx: &mut ProcessContext<'_>,
    ) -> Result<(), ErrorCode> {
        let now = cx.now();
        if now < self.disk().fails_until {
            return Err(ErrorCode::DiskError);
        }
        if !self.disk().audience.is_live(session) || until <= now {
            return Err(ErrorCode::Cancelled);
        }
        let pin =
            self.memory.heap.pin(command.segment, command.slot, command.epoch).ok_or(ErrorCode::Gone)?;
        if pin.header().id != command.id {
            return Err(ErrorCode::Gone);
        }
        let (header, payload) = (*pin.header(), pin.payload().to_vec());
        let (key, attributes) = (pin.key().to_vec(), pin.attributes().to_vec());
        drop(pin);
        self.free_space(cx);
        let disk_image = &mut self.disk().disk_image;
        disk_image.written += 1;
        let record = Box::new(StoredRecord { header, key, attributes, payload, number: disk_image.written });
        self.give_disk("write", Job::Write { session, command: command.command_id, record }, cx);
        Ok(())
    }

    /// Evicts the oldest record if the disk is full, and reports it to the masters.
    fn free_space(&mut self, cx: &mut ProcessContext<'_>) {
        let disk = self.disk();
        if disk.disk_image.records() < disk.limit {
            return;
        }
        let oldest = disk.disk_image.records.iter().min_by_key(|(_, stored)| stored.number);
        let Some((&name, _)) = oldest else { return };
        disk.disk_image.records.remove(&name);
        let concerned = disk.audience.iter().filter(|(_, groups)| groups.has_object(name.id));
        let sessions: Vec<SessionId> = concerned.map(|&(session, _)| session).collect();
        for session in sessions {
            let version = VersionedId { id: name.id, epoch: name.version };
            let versions: PackedBuilder<VersionedId> = [version].into_iter().collect();
            let evicted = v1::DiskEvicted { versions: versions.finish().into() };
            self.send_event(NodeEvent::DiskEvicted { session, evicted }, cx);
        }
    }

    /// Ends a write: the record is durable unless it was removed meanwhile. Reports it to the masters of its group.
    fn written(
        &mut self,
        session: SessionId,
        command: u64,
        record: StoredRecord,
        cx: &mut ProcessContext<'_>,
    ) {
        let (now, name) = (cx.now(), RecordId::of(&record.header));
        let disk = self.disk();
        let refused = if now < disk.fails_until {
            Some(ErrorCode::DiskError)
        } else if disk.disk_image.was_removed(&name) {
            Some(ErrorCode::Gone)
        } else {
            None
        };
        if let Some(code) = refused {
            return self.reply_to_command(session, command, CommandReply::refused(code, Word::default()), cx);
        }
        let mut builder = OffloadNoticeBuilder::default();
        builder.push(&record.header, &record.key, &record.attributes, false);
        disk.disk_image.records.entry(name).or_insert(record);
        let audience: Vec<(SessionId, bool)> = if disk.audience.is_live(session) {
            vec![(session, false)]
        } else {
            let concerned = disk.audience.iter().filter(|(_, groups)| groups.has_object(name.id));
            concerned.map(|&(session, _)| (session, true)).collect()
        };
        for (target, recovered) in audience {
            let notice = builder.message(recovered, |_| true);
            self.send_event(NodeEvent::Offloaded { session: target, notice }, cx);
        }
        self.reply_to_command(
            session,
            command,
            CommandReply::done(Word::new(name.version, State::Ready)),
            cx,
        );
    }

    fn begin_promotion(&mut self, session: SessionId, command: &NodeCommand) -> Result<(), ErrorCode> {
        let disk = self.disk.as_ref().expect("only a node with a disk comes here");
        let stored = disk.disk_image.records.get(&name_of(command)).ok_or(ErrorCode::Gone)?;
        let key = KeySection::decode(&stored.key).map_err(|_| ErrorCode::Corrupt)?;
        let attributes = Attributes::decode(&stored.attributes).map_err(|_| ErrorCode::Corrupt)?;
        if !disk.is_wanted(session, command) {
            return Err(ErrorCode::Cancelled);
        }
        let header = &stored.header;
        let record = RecordSpec {
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
        let (slot, epoch, extent) = (command.slot, command.epoch, command.extent);
        let grant = Grant { slot, epoch, term: command.term, extent, record, writer: PayloadWriter::Node };
        self.memory.heap.begin_copy(command.segment, &grant).map_err(|error| error.code())?;
        self.memory.note_copy(command.segment, slot, epoch, extent.units);
        Ok(())
    }

    fn publish_promotion(&mut self, session: SessionId, command: &NodeCommand) -> Result<(), ErrorCode> {
        let disk = self.disk.as_ref().expect("only a node with a disk comes here");
        let (segment, slot, epoch) = (command.segment, command.slot, command.epoch);
        let stored =
            disk.disk_image.records.get(&name_of(command)).filter(|_| disk.is_wanted(session, command));
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
        command: &NodeCommand,
        outcome: Result<(), ErrorCode>,
        cx: &mut ProcessContext<'_>,
    ) {
        let disk = self.disk();
        if disk.is_wanted(session, command) {
            disk.promoting.remove(&(command.segment, command.slot));
        }
        let reply = match outcome {
            Ok(()) => CommandReply::done(Word::new(command.epoch, State::Ready)),
            Err(code) => CommandReply::refused(code, Word::default()),
        };
        self.reply_to_command(session, command.command_id, reply, cx);
    }

    /// Sends the next part of the inventory, or its end.
    fn tell_more(
        &mut self,
        session: SessionId,
        groups: GroupSet,
        after: Option<RecordId>,
        cx: &mut ProcessContext<'_>,
    ) {
        let disk = self.disk();
        if !disk.audience.is_live(session) {
            return;
        }
        let is_next = |name: &RecordId| groups.has_object(name.id) && after.is_none_or(|last| *name > last);
        let mut builder = OffloadNoticeBuilder::default();
        let mut last = None;
        for (name, stored) in
            disk.disk_image.records.iter().filter(|(name, _)| is_next(name)).take(REPORTED_AT_ONCE)
        {
            // Some were in memory at the stop.
            let was_in_memory = name.id.0[0] % 2 == 0;
            builder.push(&stored.header, &stored.key, &stored.attributes, was_in_memory);
            last = Some(*name);
        }
        let notice = builder.message(true, |_| true);
        if last.is_some() {
            self.send_event(NodeEvent::Offloaded { session, notice }, cx);
            return self.give_disk("report", Job::Inventory { session, groups, after: last }, cx);
        }
        // The end is reported for all groups of the session at once, after the last scan.
        let Some((announced, running)) = disk.scans.get_mut(&session) else { return };
        *running -= 1;
        if *running == 0 {
            let notice = v1::OffloadNotice { recovery_end: true, inventories: *announced, ..notice };
            self.send_event(NodeEvent::Offloaded { session, notice }, cx);
        }
    }
}
