//! [`Group`]: the state of one group and the primitives that keep its books consistent.
//!
//! The calls are in the modules below, one idea each: [`lookup`], [`put`], [`remove`], the nodes' side in [`nodes`]
//! and [`report`], [`disk`], [`evict`], and [`tick`], which does everything that waits for time. What has left is told in
//! [`departures`].
//!
//! An object is in exactly one of two states. Being written: it has a reservation with an owner and an end, and
//! stands in the queue of reservations. Complete: it has at least one replica with all of its stripes, and stands in
//! a queue of its tenant. An object that leaves takes its places with it: they drain, and the ranges come back when
//! the nodes say so.

mod audit;
mod departures;
mod disk;
mod evict;
mod inherit;
mod lookup;
mod nodes;
mod put;
mod remove;
mod report;
mod tick;
mod view;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::num::NonZeroU16;
use std::time::Duration;

use hashbrown::{HashMap, HashSet};
use moontide_types::bounds::{LEASE_MS_MAX, PAGE_BYTES, RESERVATION_MS_MAX, UNIT_BYTES};
use moontide_types::record::PinClass;
use moontide_types::{
    Epoch, ErrorCode, Generation, GroupId, MonoTime, NodeId, ObjectId, SegmentId, SessionId, Tenant, Term,
};

pub use audit::{Audit, Range, Violation};
pub use departures::{DEPARTURES_KEPT, Departures};
pub use disk::{Admission, DiskSpec};
pub use evict::EvictReport;
pub use inherit::{ExpectedSegment, Heirloom, Inheritance};
pub use lookup::{Ask, Found, ListCursor, LookupCounts};
pub use nodes::{Mount, MountSpec, SegmentView};
pub use put::{PutEnd, PutOptions, PutStart, Reservation};
pub use remove::Removal;
pub use report::{ReportRecord, ReportState};
pub use tick::TickBudget;
pub use view::{Detail, ObjectView, PlaceView, StripeView};

use crate::cohort::Cohorts;
use crate::effect::{Effect, Effects, Order, OrderKind};
use crate::extra::{Extra, Extras};
use crate::job::{Job, JobId};
use crate::placement::{Candidate, Placement, PlacementKind, Topology};
use crate::queue::Queue;
use crate::random::Rng;
use crate::record::{Flag, NONE, Place, Record};
use crate::segment::{Segment, SegmentPhase};
use crate::sizes::Sizes;
use crate::sketch::Sketch;
use crate::slab::{Ref, Slab};
use crate::table::Table;
use crate::tenant::{Quota, TenantIx, TenantUsage, Tenants};
use crate::time::{Now, Tick, Ticker};

/// What a group must know about itself and its cluster.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupConfig {
    /// Which group.
    pub group: GroupId,
    /// Of how many.
    pub groups: NonZeroU16,
    /// Its term: that of the master that runs it.
    pub term: Term,
    /// The term before it; zero if nobody has run it before, so that there is nothing from before.
    pub previous: Term,
    /// Whether its master was at work until this one took over, as far as this one knows. If not, nodes may have been without
    /// a master for any time.
    pub witnessed: bool,
    /// Decides placements.
    pub seed: u64,
    /// Where new objects go.
    pub placement: PlacementKind,
    /// Eviction begins above this share of bytes or slots, in thousandths.
    pub high_permille: u16,
    /// Eviction ends below this share, in thousandths.
    pub low_permille: u16,
    /// How long a writer has.
    pub reservation: Duration,
    /// How long nothing is given out in a segment that an earlier master, or an earlier session, may have given out
    /// parts of.
    pub reallocate_wait: Duration,
    /// How long a new master waits for nodes of the time before. Removals are not certain until then; what comes later is
    /// taken as empty, because it may hold what was removed.
    pub report_wait: Duration,
    /// How long a node that went away may come back with objects that were removed in the meantime.
    pub absence_max: Duration,
    /// How long a disk that went away, or was never heard of in this term, may come back with what it has. What was removed
    /// or forgotten meanwhile is remembered for it; after this time it is taken as empty, because nobody knows any more.
    pub disk_absence_max: Duration,
    /// How long a node has for writing an object to its disk.
    pub offload_window: Duration,
    /// What is worth being written to a disk.
    pub admission: Admission,
    /// Longest stripe; larger objects are cut, if the writer leaves it to us. Where segments are small, stripes are
    /// shorter, so that two fit into the largest one: an object larger than a segment can be stored, too.
    pub stripe_bytes_max: u64,
}

impl GroupConfig {
    /// Everything usual.
    pub fn new(group: GroupId, groups: NonZeroU16, term: Term) -> GroupConfig {
        GroupConfig {
            group,
            groups,
            term,
            previous: Term::new(term.get().saturating_sub(1)).expect("less than a term is one"),
            witnessed: false,
            seed: u64::from(group.0),
            placement: PlacementKind::default(),
            high_permille: 950,
            low_permille: 900,
            reservation: Duration::from_millis(RESERVATION_MS_MAX.into()),
            // A lease or a reservation of the time before, whichever is longer, and 1 % for clocks that run apart.
            reallocate_wait: Duration::from_millis(
                u64::from(LEASE_MS_MAX.max(RESERVATION_MS_MAX)) * 101 / 100,
            ),
            report_wait: Duration::from_secs(30),
            absence_max: Duration::from_secs(60),
            disk_absence_max: Duration::from_secs(900),
            offload_window: Duration::from_millis(LEASE_MS_MAX.into()),
            admission: Admission::default(),
            stripe_bytes_max: 256 << 20,
        }
    }
}

const _: () = assert!((256 << 20) % PAGE_BYTES == 0);

/// Counts since the group began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupStats {
    /// Reads and checks of keys.
    pub lookups: LookupCounts,
    /// Reservations made.
    pub puts_started: u64,
    /// Objects completed.
    pub puts_completed: u64,
    /// Reservations that ended by time.
    pub puts_expired: u64,
    /// Puts refused because nothing was free.
    pub puts_no_space: u64,
    /// Objects evicted.
    pub evicted_objects: u64,
    /// Their bytes, all replicas together.
    pub evicted_bytes: u64,
    /// Objects whose time to live was over.
    pub expired_objects: u64,
    /// Objects removed by a call or a job.
    pub removed_objects: u64,
    /// Objects lost with the last node that had them.
    pub lost_objects: u64,
    /// Objects that nodes were told to write to their disks.
    pub offloads_ordered: u64,
    /// Objects that are on disk because of it. The rest was refused, took too long, or was removed meanwhile.
    pub offloaded_objects: u64,
    /// Objects that left memory and are read from disk since.
    pub demoted_objects: u64,
    /// Objects evicted without being written, because nobody had read them.
    pub offloads_not_admitted: u64,
    /// Objects that were brought back from disk to memory.
    pub promoted_objects: u64,
    /// Objects that nodes found on their disks after a start.
    pub recovered_objects: u64,
    /// Records that left a disk because it was full.
    pub disk_evicted: u64,
    /// Ranges that nodes have given back.
    pub reclaimed: u64,
    /// Orders that nodes refused.
    pub orders_refused: u64,
    /// Reported records.
    pub reported: u64,
    /// Reported records that were refused, superseded or removed before.
    pub reported_killed: u64,
}

/// A node with segments in this group.
#[derive(Debug)]
struct Node {
    session: SessionId,
    topology: Topology,
    segments: Vec<u32>,
}

/// A segment that went away.
#[derive(Clone, Copy, Debug)]
struct Absence {
    generation: Generation,
    /// It had come too late, and had not got rid of what it brought.
    late: bool,
    /// It is forgotten then.
    until: Tick,
}

/// A removal that waits for nodes.
#[derive(Debug)]
struct Waiting {
    /// What is removed.
    id: ObjectId,
    epoch: Epoch,
    left: u32,
    waiter: Option<crate::effect::Waiter>,
    /// The object whose put cannot be acknowledged before.
    replaced_by: Option<ObjectId>,
    /// Some node could not be reached.
    pending: bool,
}

/// One group.
#[derive(Debug)]
pub struct Group {
    config: GroupConfig,
    ticker: Ticker,
    rng: Rng,
    placement: Box<dyn Placement>,
    /// The last epoch's place in this term.
    sequence: u64,

    slab: Slab,
    table: Table,
    extras: Extras,
    cohorts: Cohorts,
    tenants: Tenants,
    /// Objects being written, those that end first in front.
    writing: Queue,
    /// Complete objects that nodes are writing to their disks, those that were ordered first in front.
    offloading: Queue,
    /// When their time is over, and how many units of memory they will give back.
    offloads: HashMap<ObjectId, disk::Offload>,
    /// The sum of those units.
    offloading_units: u64,
    /// Objects of which an offload took too long, or ended in part: nodes may still be writing them.
    late_offloads: HashSet<ObjectId>,
    /// Objects that their nodes will not write to disk: too large for it, or damaged.
    unfit: HashSet<ObjectId>,
    /// Objects on disk that are wanted in memory.
    to_promote: VecDeque<ObjectId>,
    /// How often objects were read, if that decides what is written to disk.
    sketch: Option<Sketch>,
    /// Objects with a time to live.
    expiring: BTreeSet<(u64, ObjectId)>,

    nodes: HashMap<NodeId, Node>,
    segments: Vec<Option<Segment>>,
    vacant_segments: Vec<u32>,
    by_name: HashMap<(NodeId, SegmentId), u32>,
    labels: HashMap<Box<str>, u32>,
    /// Segments that take new objects.
    candidates: Vec<Candidate>,
    /// How large they are.
    sizes: Sizes,
    /// Segments whose report is complete and whose waiting time is not over.
    waiting_segments: Vec<u32>,
    /// Segments that are gone and still have objects in the index.
    lost_segments: VecDeque<u32>,

    /// Draining places that a one-sided reader may still read: (end of the lease, segment, slot).
    leased_drains: BTreeMap<(Tick, u32, u32), Epoch>,
    /// Draining places of which no node has said yet that they are dead: (object, segment, slot). After a crash they
    /// would be reported as READY, so that a removal of the object has to wait for them too.
    undead: BTreeSet<(ObjectId, u32, u32)>,
    /// Kills that somebody waits for: (segment, slot) to the removals.
    kills: HashMap<(u32, u32), Vec<u64>>,
    removals: HashMap<u64, Waiting>,
    removal_count: u64,
    /// Ids whose next put cannot be acknowledged yet, with the number of removals that it waits for. Apart from the
    /// records, because a reservation may be given up and made again while the older version is being killed.
    replacing: HashMap<ObjectId, u32>,
    /// Removed versions that a node which could not be reached may still have.
    tombstones: HashMap<ObjectId, Epoch>,
    /// Segments that went away with their nodes' sessions, and when they are forgotten. Segments, because a node that
    /// comes back mounts one after the other.
    absent: HashMap<(NodeId, SegmentId), Absence>,
    /// Disks that went away, in the same way.
    absent_disks: HashMap<NodeId, Tick>,
    /// When this master took the group.
    began_at: MonoTime,
    /// Until then, segments that this master has never heard of may report what they hold.
    reports_until: MonoTime,
    /// The same for disks.
    disk_reports_until: MonoTime,
    /// The master before has named all segments: one that some master has known, and that it did not name, was forgotten by it.
    all_listed: bool,
    /// What the master before handed on, and no node has reported yet.
    inherited: inherit::Inherited,
    /// Before this, nodes that this master has never heard of may have objects of an earlier term.
    settled_at: MonoTime,

    jobs: BTreeMap<JobId, Job>,
    job_count: u64,
    /// Units that a put asked for in vain: evicted beyond the watermarks.
    wanted_units: u64,
    /// Above the high watermark, and not yet below the low one.
    evicting: bool,
    /// Tenants with a quota; those over it are evicted first.
    limited: Vec<TenantIx>,

    /// What has left, for those who watch; none while nobody does.
    feed: Option<Box<departures::Feed>>,

    stats: GroupStats,
    scratch: Vec<PlaceView>,
}

impl Group {
    /// A group without nodes and objects.
    pub fn new(config: GroupConfig, now: Now) -> Group {
        let first = config.previous == Term::ZERO;
        let wait = if first { Duration::ZERO } else { config.report_wait };
        let disk_wait = if first { config.report_wait } else { config.disk_absence_max };
        Group {
            ticker: Ticker::new(now.mono),
            rng: Rng::new(config.seed),
            placement: config.placement.strategy(),
            sequence: 0,
            slab: Slab::new(),
            table: Table::new(),
            extras: Extras::default(),
            cohorts: Cohorts::default(),
            tenants: Tenants::default(),
            writing: Queue::default(),
            offloading: Queue::default(),
            offloads: HashMap::new(),
            offloading_units: 0,
            late_offloads: HashSet::new(),
            unfit: HashSet::new(),
            to_promote: VecDeque::new(),
            sketch: (config.admission == Admission::ReadBefore).then(Sketch::default),
            expiring: BTreeSet::new(),
            nodes: HashMap::new(),
            segments: vec![],
            vacant_segments: vec![],
            by_name: HashMap::new(),
            labels: HashMap::new(),
            candidates: vec![],
            sizes: Sizes::default(),
            waiting_segments: vec![],
            lost_segments: VecDeque::new(),
            leased_drains: BTreeMap::new(),
            undead: BTreeSet::new(),
            kills: HashMap::new(),
            removals: HashMap::new(),
            removal_count: 0,
            replacing: HashMap::new(),
            tombstones: HashMap::new(),
            absent: HashMap::new(),
            absent_disks: HashMap::new(),
            began_at: now.mono,
            reports_until: now.mono.after(config.report_wait),
            disk_reports_until: now.mono.after(disk_wait),
            all_listed: false,
            inherited: inherit::Inherited::new(),
            settled_at: now.mono.after(wait),
            jobs: BTreeMap::new(),
            job_count: 0,
            wanted_units: 0,
            evicting: false,
            limited: vec![],
            feed: None,
            stats: GroupStats::default(),
            scratch: vec![],
            config,
        }
    }

    /// What the group was made with.
    pub fn config(&self) -> &GroupConfig {
        &self.config
    }

    /// Its counts.
    pub fn stats(&self) -> &GroupStats {
        &self.stats
    }

    /// Objects, those being written included.
    pub fn objects(&self) -> usize {
        self.slab.len()
    }

    /// Objects being written.
    pub fn objects_writing(&self) -> u64 {
        self.writing.len()
    }

    /// Memory held for objects and segments, without what the allocator of the process adds.
    pub fn memory_bytes(&self) -> usize {
        let segments: usize = self.segments.iter().flatten().map(Segment::memory_bytes).sum();
        self.slab.memory_bytes() + self.table.memory_bytes() + segments
    }

    /// Holds a term that somebody has seen against our own. A higher one means that we are no longer master.
    pub fn seen_term(&self, seen: Term, effects: &mut Effects) -> Result<(), ErrorCode> {
        if seen > self.config.term && !moontide_types::planted("higher-term-ignored") {
            effects.push(Effect::StepDown { seen });
            return Err(ErrorCode::WrongMaster);
        }
        Ok(())
    }

    /// The number of a tenant in this group, which it gets if it has none.
    pub fn tenant(&mut self, tenant: Tenant<'_>) -> Result<TenantIx, ErrorCode> {
        self.tenants.named(tenant)
    }

    /// The number of a tenant in this group, if it has one.
    pub fn find_tenant(&self, tenant: Tenant<'_>) -> Option<TenantIx> {
        self.tenants.find(tenant)
    }

    /// Sets this group's share of a tenant's quota.
    pub fn set_quota(&mut self, tenant: TenantIx, quota: Quota) {
        self.tenants.get_mut(tenant).quota = quota;
        self.limited.retain(|&limited| limited != tenant);
        if quota != Quota::default() {
            self.limited.push(tenant);
        }
    }

    /// All tenants.
    pub fn tenants(&self) -> impl Iterator<Item = TenantUsage> {
        self.tenants.iter().map(|(_, state)| TenantUsage {
            name: state.name.clone(),
            quota: state.quota,
            bytes: state.bytes,
            objects: state.objects,
        })
    }

    /// One tenant.
    pub fn tenant_usage(&self, tenant: TenantIx) -> Option<TenantUsage> {
        self.tenants().nth(tenant.0.into())
    }

    fn next_epoch(&mut self) -> Result<Epoch, ErrorCode> {
        let epoch = Epoch::new(self.config.term, self.sequence + 1).map_err(|_| ErrorCode::Busy)?;
        self.sequence += 1;
        Ok(epoch)
    }

    /// The newest epoch given out.
    fn newest_epoch(&self) -> Epoch {
        Epoch::new(self.config.term, self.sequence).expect("next_epoch checked it")
    }

    // ------------------------------------------------------------------------------------------- finding

    /// The record of an id, whatever its key.
    fn find_id(&self, id: ObjectId) -> Option<Ref> {
        let is = |number| Ref::from_number(number).is_some_and(|at| self.slab.get(at).id() == id);
        self.table.find(id, is).and_then(Ref::from_number)
    }

    /// The record of a key. An id that belongs to another key is as good as none.
    fn find(&self, ask: &Ask<'_>) -> Option<Ref> {
        let at = self.find_id(ask.id)?;
        (self.slab.with_key(at).1 == ask.key.as_bytes()).then_some(at)
    }

    fn segment(&self, index: u32) -> &Segment {
        self.segments[index as usize].as_ref().expect("places name segments that are there")
    }

    fn segment_mut(&mut self, index: u32) -> &mut Segment {
        self.segments[index as usize].as_mut().expect("places name segments that are there")
    }

    /// How many places a record has, lost ones included.
    fn place_count(&self, record: &Record) -> usize {
        1 + self.extras.get(record.extra).map_or(0, |extra| extra.places.len())
    }

    fn place(&self, record: &Record, index: usize) -> Place {
        if index == 0 {
            return record.place();
        }
        self.extras.get(record.extra).expect("it has several places").places[index - 1]
    }

    fn set_place(&mut self, at: Ref, index: usize, place: Place) {
        let record = self.slab.get_mut(at);
        if index == 0 {
            record.set_place(place);
        } else {
            self.extras.get_mut(record.extra).expect("it has several places").places[index - 1] = place;
        }
    }

    fn stripes(&self, record: &Record) -> usize {
        self.extras.get(record.extra).map_or(1, |extra| extra.stripes.into())
    }

    /// Whether a place can be read: not lost, and its segment is there.
    fn is_readable(&self, place: Place) -> bool {
        !place.is_lost() && self.segment(place.segment).is_readable()
    }

    /// Whether every stripe can be read somewhere. After a loss these may be stripes of different replicas, which make
    /// one again.
    fn has_complete_replica(&self, record: &Record) -> bool {
        let stripes = self.stripes(record);
        let rows = self.place_count(record) / stripes;
        let readable =
            |stripe: usize, row: usize| self.is_readable(self.place(record, row * stripes + stripe));
        (0..stripes).all(|stripe| (0..rows).any(|row| readable(stripe, row)))
    }

    fn is_expired(&self, record: &Record, now: Now) -> bool {
        record.extra != NONE
            && self.extras.get(record.extra).and_then(|extra| extra.expires).is_some_and(|at| at <= now.unix)
    }

    /// When the last lease on a complete object ends, its cohort's included.
    fn leased_until(&self, record: &Record) -> Tick {
        let cohort = self.extras.get(record.extra).map_or(NONE, |extra| extra.cohort);
        let of_cohort = if cohort == NONE { Tick(0) } else { self.cohorts.get(cohort).until };
        record.until().max(of_cohort)
    }

    fn is_leased(&self, record: &Record, now: Now) -> bool {
        self.leased_until(record) > self.ticker.now(now.mono)
    }

    /// Until when the places of a record must not be reclaimed, if a reader may depend on them.
    fn lease_of(&self, record: &Record, now: Now) -> Option<Tick> {
        (!record.has(Flag::Writing) && self.is_leased(record, now)).then(|| self.leased_until(record))
    }

    // --------------------------------------------------------------------------------------------- books

    /// The queue in which a record stands, by its state.
    fn queue_of<'a>(
        writing: &'a mut Queue,
        offloading: &'a mut Queue,
        tenants: &'a mut Tenants,
        record: &Record,
    ) -> &'a mut Queue {
        if record.has(Flag::Writing) {
            return writing;
        }
        if record.has(Flag::Offloading) {
            return offloading;
        }
        let tenant = tenants.get_mut(record.tenant());
        if record.has(Flag::OnDisk) {
            return &mut tenant.on_disk;
        }
        match record.pin() {
            PinClass::None => &mut tenant.ordinary,
            PinClass::Soft => &mut tenant.soft,
            PinClass::Hard => &mut tenant.hard,
        }
    }

    fn enqueue(&mut self, at: Ref) {
        let record = *self.slab.get(at);
        Group::queue_of(&mut self.writing, &mut self.offloading, &mut self.tenants, &record)
            .push(&mut self.slab, at);
    }

    fn dequeue(&mut self, at: Ref) {
        let record = *self.slab.get(at);
        Group::queue_of(&mut self.writing, &mut self.offloading, &mut self.tenants, &record)
            .unlink(&mut self.slab, at);
    }

    /// Puts a record into slab, table and queue and counts its places for the tenant.
    fn add_object(&mut self, record: &Record, key: &[u8]) -> Result<Ref, ErrorCode> {
        let at = self.slab.insert(record, key).map_err(|_| ErrorCode::Busy)?;
        self.table.insert(record.id(), at.number());
        self.enqueue(at);
        self.tenants.get_mut(record.tenant()).objects += 1;
        for index in 0..self.place_count(record) {
            let place = self.place(record, index);
            if !place.is_lost() {
                self.count_place(at, place);
            }
        }
        if let Some(expires) = self.extras.get(record.extra).and_then(|extra| extra.expires) {
            self.expiring.insert((expires.0, record.id()));
        }
        Ok(at)
    }

    /// A place belongs to the record now.
    fn count_place(&mut self, at: Ref, place: Place) {
        let tenant = self.slab.get(at).tenant();
        let segment = self.segment_mut(place.segment);
        segment.set_slot(place.slot, at);
        let units = segment.extent(place.block).units;
        self.tenants.get_mut(tenant).bytes += u64::from(units) * UNIT_BYTES;
    }

    /// Takes a record out of everything but the segments, whose places must have been given up before.
    fn forget_object(&mut self, at: Ref) {
        debug_assert!(
            (0..self.place_count(self.slab.get(at))).all(|i| self.place(self.slab.get(at), i).is_lost())
        );
        self.dequeue(at);
        let record = *self.slab.get(at);
        if record.has(Flag::Offloading) {
            self.end_offload(record.id());
        }
        self.late_offloads.remove(&record.id());
        self.unfit.remove(&record.id());
        if let Some(extra) = self.extras.remove(record.extra) {
            if let Some(expires) = extra.expires {
                self.expiring.remove(&(expires.0, record.id()));
            }
            if extra.cohort != NONE {
                self.cohorts.leave(extra.cohort, record.id());
            }
        }
        self.tenants.get_mut(record.tenant()).objects -= 1;
        let removed = self.table.remove(record.id(), at.number());
        debug_assert!(removed, "every record is in the table");
        self.departs(record.id(), !record.has(Flag::Writing));
        if let Some(old) = self.slab.remove(at) {
            self.renamed(old, at);
        }
    }

    /// The record that was called `old` is called `new` now: tells everybody who names it.
    fn renamed(&mut self, old: Ref, new: Ref) {
        let record = *self.slab.get(new);
        let replaced = self.table.replace(record.id(), old.number(), new.number());
        debug_assert!(replaced, "every record is in the table");
        Group::queue_of(&mut self.writing, &mut self.offloading, &mut self.tenants, &record).renamed(
            &mut self.slab,
            old,
            new,
        );
        for index in 0..self.place_count(&record) {
            let place = self.place(&record, index);
            if !place.is_lost() {
                self.segment_mut(place.segment).set_slot(place.slot, new);
            }
        }
    }

    /// Gives up one place of a record: it drains, and the node is told. On a segment that is lost there is nobody to
    /// tell; the answer is whether there was.
    fn give_up_place(&mut self, at: Ref, index: usize, leased: Option<Tick>, effects: &mut Effects) -> bool {
        let record = *self.slab.get(at);
        let place = self.place(&record, index);
        if place.is_lost() {
            return false;
        }
        let (epoch, id, live) = (record.epoch(), record.id(), !record.has(Flag::Writing));
        let segment = self.segment_mut(place.segment);
        let units = segment.extent(place.block).units;
        segment.drain(place, epoch, id, live);
        let told = segment.is_readable();
        self.tenants.get_mut(record.tenant()).bytes -= u64::from(units) * UNIT_BYTES;
        self.set_place(at, index, Place::LOST);
        if told {
            self.undead.insert((id, place.segment, place.slot));
            match leased {
                Some(until) => {
                    self.leased_drains.insert((until, place.segment, place.slot), epoch);
                }
                None => self.order(OrderKind::Reclaim, place.segment, place.slot, epoch, id, effects),
            }
        }
        told
    }

    /// Gives up all places of an object and forgets it. A lease that is out delays the reclaim, not the end.
    fn drop_object(&mut self, at: Ref, now: Now, effects: &mut Effects) {
        let record = *self.slab.get(at);
        for index in 0..self.place_count(&record) {
            // What is being written to disk there would stay. A reclaim does not stop that, a kill does.
            let place = self.place(&record, index);
            if self.may_be_written(&record) && self.is_readable(place) && self.has_disk_beside(place) {
                self.order(OrderKind::Kill, place.segment, place.slot, record.epoch(), record.id(), effects);
            }
        }
        self.drop_places(at, now, effects);
    }

    /// The same, when nodes were told to kill what can be killed.
    fn drop_places(&mut self, at: Ref, now: Now, effects: &mut Effects) {
        let record = *self.slab.get(at);
        let leased = self.lease_of(&record, now);
        for index in 0..self.place_count(&record) {
            self.give_up_place(at, index, leased, effects);
        }
        self.forget_object(at);
    }

    fn order(
        &self,
        kind: OrderKind,
        segment: u32,
        slot: u32,
        epoch: Epoch,
        id: ObjectId,
        effects: &mut Effects,
    ) {
        let segment = self.segment(segment);
        let order = Order {
            kind,
            segment: segment.id,
            generation: segment.generation,
            slot: moontide_types::SlotId(slot),
            epoch,
            id,
        };
        effects.push(Effect::Order { session: segment.session, order });
    }

    /// The extra of a record, which it gets if it has none.
    fn extra_mut(&mut self, at: Ref) -> &mut Extra {
        let record = self.slab.get_mut(at);
        if record.extra == NONE {
            let plain = Extra::plain(record.object_len());
            record.extra = self.extras.add(plain);
        }
        self.extras.get_mut(record.extra).expect("it was just made")
    }

    /// Reservation → object: the queue, the books of its segments and the marks change.
    fn complete_object(&mut self, at: Ref, root: u64) {
        self.dequeue(at);
        let record = self.slab.get_mut(at);
        record.set(Flag::Writing, false);
        record.set_until(Tick(0));
        record.root = root;
        let record = *record;
        for index in 0..self.place_count(&record) {
            let place = self.place(&record, index);
            if !place.is_lost() {
                let segment = self.segment_mut(place.segment);
                let units = segment.extent(place.block).units;
                segment.complete(units);
            }
        }
        self.enqueue(at);
        self.stays(record.id(), self.departed());
        self.stats.puts_completed += 1;
    }

    /// Whether nodes that could have objects of this group, in memory or on disk, have not reported yet.
    fn is_unsettled(&self, now: Now) -> bool {
        !self.absent_disks.is_empty() || self.unsettled(now, |_| true)
    }

    /// The same without disks, on which nothing is ever half written.
    fn memory_is_unsettled(&self, now: Now) -> bool {
        self.unsettled(now, |segment| !segment.is_disk())
    }

    fn unsettled(&self, now: Now, counts: impl Fn(&Segment) -> bool) -> bool {
        let reporting = |segment: &Segment| segment.phase == SegmentPhase::Reporting && counts(segment);
        now.mono < self.settled_at || !self.absent.is_empty() || self.segments.iter().flatten().any(reporting)
    }
}
