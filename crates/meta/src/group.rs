//! [`Group`]: the state of one group and the primitives that keep it consistent.
//!
//! The calls are in the modules below, one topic each: [`lookup`], [`put`], [`remove`], the calls for nodes in
//! [`nodes`] and [`report`], [`disk`], [`evict`], [`flush`], [`copies`], [`repair`], [`rebalance`], [`hot`], and [`tick`], which does all
//! time-dependent work. Watchers receive removed objects through [`invalidations`].
//!
//! An object is in exactly one of two states. Being written: it has a reservation with an owner and an end, and is in
//! the queue of reservations. Complete: it has at least one replica with all of its stripes, or waits for a node that has
//! some of them ([`missing_stripes`]), and is in a queue of its tenant. A removed object releases its locations: they
//! drain, and their extents are free when the nodes report them as free.

#[cfg(any(test, feature = "testing"))]
mod audit;
mod config;
mod copies;
mod disk;
mod evict;
mod exclusion;
mod flush;
mod handoff;
mod hot;
mod invalidations;
mod lookup;
mod missing_stripes;
mod nodes;
mod put;
mod rebalance;
mod remove;
mod repair;
mod report;
mod stats;
mod tick;
mod uses;
mod view;
mod warm_up;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use hashbrown::{HashMap, HashSet};
use moontide_rt::SplitMix64;
use moontide_types::limits::UNIT_BYTES;
use moontide_types::record::PinClass;
use moontide_types::{
    Epoch, ErrorCode, Generation, MonoTime, NodeId, ObjectId, SegmentId, SessionId, Tenant, Term,
};

#[cfg(any(test, feature = "testing"))]
pub use audit::{Audit, AuditedExtent, Violation};
pub use config::GroupConfig;
pub use copies::DrainMode;
pub use disk::{Admission, DiskSpec};
pub use evict::EvictReport;
pub use exclusion::SyncMark;
pub use flush::{FlushProgress, OffloadTrigger};
pub use handoff::{ExpectedSegment, GroupHandoff, HandoffObject, NodeKey};
pub use hot::RemoteReads;
pub use invalidations::{INVALIDATIONS_KEPT, Invalidations};
pub use lookup::{ListCursor, LookupCounts, LookupKey, LookupResult};
pub use nodes::{MountOutcome, MountSpec, SegmentView};
pub use put::{PutEnd, PutOptions, PutStart, Reservation};
pub use remove::RemoveOutcome;
pub use report::{ReportRecord, ReportState};
pub use stats::GroupStats;
pub use tick::TickBudget;
pub use view::{ObjectDetail, ObjectView, StripeLocation, StripeRange};

use crate::cohort::Cohorts;
use crate::effect::{CommandKind, Effect, Effects, NodeCommand};
use crate::eviction::EvictionOrder;
use crate::ids::{NONE, RecordRef, TenantIndex};
use crate::job::{Job, JobId, JobState};
use crate::placement::{Placement, SegmentCandidate, Topology};
use crate::queue::Queue;
use crate::record::{Record, RecordFlag, SlotLocation};
use crate::record_extension::{RecordExtension, RecordExtensions};
use crate::segment::{Segment, SegmentPhase};
use crate::segment_sizes::SegmentSizes;
use crate::sketch::Sketch;
use crate::slab::Slab;
use crate::table::Table;
use crate::tenant::{Quota, TenantUsage, Tenants};
use crate::time::{Now, Tick, Ticker};

/// A node with segments in this group.
#[derive(Debug)]
struct Node {
    session: SessionId,
    topology: Topology,
    segments: Vec<u32>,
}

/// A segment that went away.
#[derive(Clone, Copy, Debug)]
struct AbsentSegment {
    generation: Generation,
    /// The segment was mounted stale and had not dropped its records yet.
    stale: bool,
    /// The entry is dropped at this time.
    until: Tick,
}

/// A removal that waits for nodes.
#[derive(Debug)]
struct PendingRemoval {
    /// Object that is removed.
    id: ObjectId,
    epoch: Epoch,
    left: u32,
    waiter: Option<crate::effect::WaiterId>,
    /// Object whose put cannot be acknowledged before this removal is complete.
    replaced_by: Option<ObjectId>,
    /// A node could not be reached.
    pending: bool,
    /// The object was not in the index.
    not_found: bool,
    /// Job that waits for it.
    job: Option<JobId>,
}

/// A version in a slot of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct LocationVersion {
    segment: u32,
    slot: u32,
    epoch: Epoch,
}

impl LocationVersion {
    const FIRST: LocationVersion = LocationVersion { segment: 0, slot: 0, epoch: Epoch::ZERO };
    const LAST: LocationVersion = LocationVersion { segment: u32::MAX, slot: u32::MAX, epoch: Epoch::MAX };

    fn of(location: SlotLocation, epoch: Epoch) -> LocationVersion {
        LocationVersion { segment: location.segment, slot: location.slot, epoch }
    }
}

/// A Kill without an answer that shows the version to be dead.
#[derive(Clone, Copy, Debug)]
struct UnansweredKill {
    id: ObjectId,
    /// Whether the version is in the queue of refused kills: callers that repeat a removal do not make it longer.
    is_queued: bool,
}

/// State of one group.
#[derive(Debug)]
pub struct Group {
    config: GroupConfig,
    ticker: Ticker,
    rng: SplitMix64,
    placement: Box<dyn Placement>,
    /// Sequence number of the last epoch of this term.
    sequence: u64,

    slab: Slab,
    table: Table,
    extensions: RecordExtensions,
    cohorts: Cohorts,
    tenants: Tenants,
    /// Objects being written, ordered by the end of the reservation.
    writing: Queue,
    /// Complete objects that nodes are writing to their disks, in order of their commands.
    offloading: Queue,
    /// Offloads for which commands were sent, write-backs included.
    offloads: HashMap<ObjectId, disk::Offload>,
    /// Units of memory that they will free.
    offloading_units: u64,
    /// Offloads that keep the memory copy, and objects that wait for one.
    write_backs: flush::WriteBacks,
    /// Copies between nodes.
    copies: copies::Copies,
    repairs: repair::Repairs,
    rebalance: rebalance::Rebalance,
    hot: hot::HotObjects,
    /// Objects of which an offload timed out, or ended in part: nodes may still be writing them.
    late_offloads: HashSet<ObjectId>,
    /// Objects that their nodes refuse to write to disk: too large for it, or corrupted.
    not_offloadable: HashSet<ObjectId>,
    /// Objects on disk that are to be loaded into memory.
    to_promote: VecDeque<ObjectId>,
    /// Disks whose objects return to memory after a start of their nodes.
    warm_ups: Vec<warm_up::WarmUp>,
    /// Read counts, if they decide which objects are written to disk.
    sketch: Option<Sketch>,
    eviction_order: EvictionOrder,
    /// Objects that take memory, those being written included.
    objects_in_memory: u64,
    /// Objects with a time to live.
    expiring: BTreeSet<(u64, ObjectId)>,

    nodes: HashMap<NodeId, Node>,
    segments: Vec<Option<Segment>>,
    vacant_segments: Vec<u32>,
    by_name: HashMap<(NodeId, SegmentId), u32>,
    labels: HashMap<Box<str>, u32>,
    /// Segments that accept new objects.
    candidates: Vec<SegmentCandidate>,
    /// Sizes of the candidates.
    sizes: SegmentSizes,
    /// Segments whose report is complete and whose reallocation delay is not over.
    quarantined_segments: Vec<u32>,
    /// Segments that are gone and still have objects in the index.
    lost_segments: VecDeque<u32>,
    /// Objects with missing stripes, which nodes may bring back.
    incomplete: VecDeque<missing_stripes::IncompleteObject>,

    /// Draining locations that a one-sided reader may still read: (end of the lease, segment, slot).
    leased_drains: BTreeMap<(Tick, u32, u32), Epoch>,
    /// Released versions that no node has confirmed as dead yet. After a crash a node would report them as READY, so a
    /// removal of the object has to wait for them too.
    unconfirmed_kills: BTreeSet<(ObjectId, LocationVersion)>,
    /// Versions for which a Kill was sent and not answered. The slot may be free and in use again before the answer
    /// arrives.
    unanswered_kills: HashMap<LocationVersion, UnansweredKill>,
    /// Kills that removals wait for.
    kills: HashMap<LocationVersion, Vec<u64>>,
    /// Refused kills, to be sent again; each once.
    refused_kills: VecDeque<LocationVersion>,
    /// Refused reclaims of records on disks, to be sent again with them.
    refused_drops: VecDeque<LocationVersion>,
    /// Time at which they are sent again.
    retry_kills_at: MonoTime,
    removals: HashMap<u64, PendingRemoval>,
    removal_count: u64,
    /// Ids whose next put cannot be acknowledged yet, with the number of removals that it waits for. Separate from the
    /// records, because a reservation may be released and made again while the older version is being killed.
    replacing: HashMap<ObjectId, u32>,
    /// Ids in the index whose older version was on a node that did not confirm its kill: the replacement is not certain.
    uncertain_replacements: HashSet<ObjectId>,
    /// Removed versions that an unreachable node may still have.
    tombstones: HashMap<ObjectId, Epoch>,
    /// Segments that went away with their nodes' sessions, and when they are dropped. Per segment, because a returning
    /// node mounts one after the other.
    absent: HashMap<(NodeId, SegmentId), AbsentSegment>,
    /// Disks that went away, in the same way.
    absent_disks: HashMap<NodeId, Tick>,
    /// Number of durable exclusions, those by this master included.
    exclusion: u32,
    /// Whether a segment or a disk may exist that this master does not wait for, and that a later master would trust.
    exclusion_needed: bool,
    /// Whether a removal or an upsert would be certain after an exclusion.
    exclusion_wanted: bool,
    /// Time since which only the exclusion was missing.
    exclusion_awaited_since: Option<MonoTime>,
    /// Removals that wait for the exclusion.
    awaiting_exclusion: Vec<u64>,
    /// Until this time, segments unknown to this master may report their records.
    reports_until: MonoTime,
    /// The same for disks.
    disk_reports_until: MonoTime,
    /// Objects from the handoff of the preceding master that no node has reported yet.
    handoff: handoff::HandoffIndex,
    /// Before this time, nodes unknown to this master may have objects of an earlier term.
    unknown_nodes_until: MonoTime,

    jobs: BTreeMap<JobId, Job>,
    job_count: u64,
    /// Until this time, further memory may be mounted: other nodes join, or one that left returns.
    memory_expected_until: MonoTime,
    /// Units of failed puts, to be evicted beyond the watermarks.
    requested_units: u64,
    /// Above the high watermark, and not yet below the low one.
    evicting: bool,
    /// Far enough below the low watermark that more objects displace none.
    has_free_memory: bool,
    /// Tenants with a quota; those over it are evicted first.
    limited: Vec<TenantIndex>,

    /// Recent invalidations; `None` while there are no watchers.
    feed: Option<Box<invalidations::InvalidationFeed>>,

    stats: GroupStats,
    scratch: Vec<StripeLocation>,
    /// Objects found by a lookup, or read according to a heartbeat.
    found: Vec<RecordRef>,
}

impl Group {
    /// Creates a group without nodes and objects.
    pub fn new(config: GroupConfig, now: Now) -> Group {
        let first = config.previous_term == Term::ZERO;
        let wait = if first { Duration::ZERO } else { config.report_wait };
        let disk_wait = if first { config.report_wait } else { config.disk_rejoin_window };
        Group {
            ticker: Ticker::new(now.mono),
            rng: SplitMix64::new(config.seed),
            placement: config.placement.strategy(),
            sequence: 0,
            slab: Slab::new(),
            table: Table::new(),
            extensions: RecordExtensions::default(),
            cohorts: Cohorts::default(),
            tenants: Tenants::default(),
            writing: Queue::default(),
            offloading: Queue::default(),
            offloads: HashMap::new(),
            offloading_units: 0,
            write_backs: flush::WriteBacks::default(),
            copies: copies::Copies::default(),
            repairs: repair::Repairs::new(now.mono.after(config.repair_delay)),
            rebalance: rebalance::Rebalance::default(),
            hot: hot::HotObjects::default(),
            late_offloads: HashSet::new(),
            not_offloadable: HashSet::new(),
            to_promote: VecDeque::new(),
            warm_ups: vec![],
            sketch: (config.admission == Admission::Accessed).then(Sketch::default),
            eviction_order: EvictionOrder::default(),
            objects_in_memory: 0,
            expiring: BTreeSet::new(),
            nodes: HashMap::new(),
            segments: vec![],
            vacant_segments: vec![],
            by_name: HashMap::new(),
            labels: HashMap::new(),
            candidates: vec![],
            sizes: SegmentSizes::default(),
            quarantined_segments: vec![],
            lost_segments: VecDeque::new(),
            incomplete: VecDeque::new(),
            leased_drains: BTreeMap::new(),
            unconfirmed_kills: BTreeSet::new(),
            unanswered_kills: HashMap::new(),
            kills: HashMap::new(),
            refused_kills: VecDeque::new(),
            refused_drops: VecDeque::new(),
            retry_kills_at: MonoTime(0),
            removals: HashMap::new(),
            removal_count: 0,
            replacing: HashMap::new(),
            uncertain_replacements: HashSet::new(),
            tombstones: HashMap::new(),
            absent: HashMap::new(),
            absent_disks: HashMap::new(),
            exclusion: config.exclusion,
            exclusion_needed: !first && !moontide_rt::mutation_enabled("given-up-without-exclusion"),
            exclusion_wanted: false,
            exclusion_awaited_since: None,
            awaiting_exclusion: vec![],
            reports_until: now.mono.after(config.report_wait),
            disk_reports_until: now.mono.after(disk_wait),
            handoff: handoff::HandoffIndex::new(),
            unknown_nodes_until: now.mono.after(wait),
            jobs: BTreeMap::new(),
            // A group that is hosted again has none of its earlier jobs.
            job_count: u64::from(config.term.get()) << 32,
            memory_expected_until: now.mono.after(nodes::MEMORY_EXPECTED),
            requested_units: 0,
            evicting: false,
            has_free_memory: true,
            limited: vec![],
            feed: None,
            stats: GroupStats::default(),
            scratch: vec![],
            found: vec![],
            config,
        }
    }

    /// Configuration given at creation.
    pub fn config(&self) -> &GroupConfig {
        &self.config
    }

    /// Counters since the start of the group.
    pub fn stats(&self) -> &GroupStats {
        &self.stats
    }

    /// Number of objects, those being written included.
    pub fn objects(&self) -> usize {
        self.slab.len()
    }

    /// Number of objects being written.
    pub fn objects_writing(&self) -> u64 {
        self.writing.len()
    }

    /// Memory for objects and segments in bytes, without overhead of the process's allocator.
    pub fn memory_bytes(&self) -> usize {
        let segments: usize = self.segments.iter().flatten().map(Segment::memory_bytes).sum();
        self.slab.memory_bytes() + self.table.memory_bytes() + segments
    }

    /// Compares a term received from a peer with the own term. A higher one means that this master no longer owns the
    /// group.
    pub fn observe_term(&self, seen: Term, effects: &mut Effects) -> Result<(), ErrorCode> {
        if seen > self.config.term && !moontide_rt::mutation_enabled("higher-term-ignored") {
            effects.push(Effect::StepDown { seen });
            return Err(ErrorCode::WrongMaster);
        }
        Ok(())
    }

    /// Returns the index of a tenant in this group; adds the tenant if it has none. The index is valid while the tenant
    /// has objects, and until the next call that may add a tenant.
    pub fn tenant(&mut self, tenant: Tenant<'_>) -> Result<TenantIndex, ErrorCode> {
        self.tenant_except(tenant, &HashSet::new())
    }

    /// Returns the indices of several tenants, all valid until the next call that may add a tenant. `None`: too many.
    pub fn tenants_of_report(&mut self, tenants: &[Tenant<'_>]) -> Vec<Option<TenantIndex>> {
        let mut taken = HashSet::new();
        let mut index_of = |&tenant| {
            let index = self.tenant_except(tenant, &taken).ok();
            taken.extend(index);
            index
        };
        tenants.iter().map(&mut index_of).collect()
    }

    /// The same as [`Group::tenant`]; a new tenant does not get an index in `taken`.
    fn tenant_except(
        &mut self,
        tenant: Tenant<'_>,
        taken: &HashSet<TenantIndex>,
    ) -> Result<TenantIndex, ErrorCode> {
        let (segments, jobs) = (&self.segments, &self.jobs);
        self.tenants.find_or_create(tenant, |index| {
            taken.contains(&index)
                || segments.iter().flatten().any(|segment| segment.tenant == Some(index))
                || jobs.values().any(|job| job.tenant == index && job.status.state == JobState::Running)
        })
    }

    /// Returns the index of a tenant in this group, if it has one.
    pub fn find_tenant(&self, tenant: Tenant<'_>) -> Option<TenantIndex> {
        self.tenants.find(tenant)
    }

    /// Checks that no object of another tenant has this id. Otherwise returns the code for an object that is not there: a tenant must
    /// not learn what others have.
    pub fn check_tenant(&self, now: Now, id: ObjectId, tenant: Tenant<'_>) -> Result<(), ErrorCode> {
        let is_other = |at| *self.tenants.get(self.slab.get(at).tenant()).name != *tenant.as_str();
        if !self.find_id(id).is_some_and(is_other)
            || moontide_rt::mutation_enabled("put-of-another-tenant-ended")
        {
            return Ok(());
        }
        Err(if self.memory_is_unsettled(now) { ErrorCode::Retry } else { ErrorCode::Gone })
    }

    /// Sets this group's share of a tenant's quota.
    pub fn set_quota(&mut self, tenant: TenantIndex, quota: Quota) {
        self.tenants.get_mut(tenant).quota = quota;
        self.limited.retain(|&limited| limited != tenant);
        if quota != Quota::default() {
            self.limited.push(tenant);
        }
    }

    /// Returns all tenants with objects or a quota.
    pub fn tenants(&self) -> impl Iterator<Item = TenantUsage> {
        self.tenants.iter().filter(|(_, state)| !state.is_idle()).map(|(_, state)| state.usage())
    }

    /// Returns one tenant.
    pub fn tenant_usage(&self, tenant: TenantIndex) -> Option<TenantUsage> {
        self.tenants.iter().nth(tenant.0.into()).map(|(_, state)| state.usage())
    }

    fn next_epoch(&mut self) -> Result<Epoch, ErrorCode> {
        let epoch = Epoch::new(self.config.term, self.sequence + 1).map_err(|_| ErrorCode::Busy)?;
        self.sequence += 1;
        Ok(epoch)
    }

    /// Newest epoch that was granted.
    fn newest_epoch(&self) -> Epoch {
        Epoch::new(self.config.term, self.sequence).expect("next_epoch checked the sequence")
    }

    // -------------------------------------------------------------------------------------------- lookup

    /// Returns the record of an id, regardless of its key.
    fn find_id(&self, id: ObjectId) -> Option<RecordRef> {
        let matches = |number| RecordRef::from_number(number).is_some_and(|at| self.slab.get(at).id() == id);
        self.table.find(id, matches).and_then(RecordRef::from_number)
    }

    /// Returns the record of a key. A record of the same id with another key does not count.
    fn find(&self, lookup: &LookupKey<'_>) -> Option<RecordRef> {
        let at = self.find_id(lookup.id)?;
        (self.slab.with_key(at).1 == lookup.key.as_bytes()).then_some(at)
    }

    fn segment(&self, index: u32) -> &Segment {
        self.segments[index as usize].as_ref().expect("segment of a location exists")
    }

    fn segment_mut(&mut self, index: u32) -> &mut Segment {
        self.segments[index as usize].as_mut().expect("segment of a location exists")
    }

    /// Number of locations of a record, lost ones included.
    fn location_count(&self, record: &Record) -> usize {
        1 + self.extensions.get(record.extension).map_or(0, |extension| extension.locations.len())
    }

    fn location(&self, record: &Record, index: usize) -> SlotLocation {
        if index == 0 {
            return record.location();
        }
        self.extensions.get(record.extension).expect("several locations").locations[index - 1]
    }

    fn set_location(&mut self, at: RecordRef, index: usize, location: SlotLocation) {
        let record = self.slab.get_mut(at);
        if index == 0 {
            record.set_location(location);
        } else {
            self.extensions.get_mut(record.extension).expect("several locations").locations[index - 1] =
                location;
        }
    }

    fn stripes(&self, record: &Record) -> usize {
        self.extensions.get(record.extension).map_or(1, |extension| extension.stripes.into())
    }

    /// Whether a location can be read: it is not lost, and its segment is not lost.
    fn is_readable(&self, location: SlotLocation) -> bool {
        !location.is_lost() && self.segment(location.segment).is_readable()
    }

    /// Whether every stripe has a readable location. After a loss these may be stripes of different replicas, which
    /// together form one.
    fn has_complete_replica(&self, record: &Record) -> bool {
        let stripes = self.stripes(record);
        let rows = self.location_count(record) / stripes;
        let readable =
            |stripe: usize, row: usize| self.is_readable(self.location(record, row * stripes + stripe));
        (0..stripes).all(|stripe| (0..rows).any(|row| readable(stripe, row)))
    }

    fn is_expired(&self, record: &Record, now: Now) -> bool {
        record.extension != NONE
            && self
                .extensions
                .get(record.extension)
                .and_then(|extension| extension.expires)
                .is_some_and(|at| at <= now.unix)
    }

    /// End of the last lease on a complete object, leases on its cohort included.
    fn leased_until(&self, record: &Record) -> Tick {
        let cohort = self.extensions.get(record.extension).map_or(NONE, |extension| extension.cohort);
        let cohort_until = if cohort == NONE { Tick(0) } else { self.cohorts.get(cohort).until };
        record.until().max(cohort_until)
    }

    fn is_leased(&self, record: &Record, now: Now) -> bool {
        self.leased_until(record) > self.ticker.now(now.mono)
    }

    /// Time before which the locations of a record must not be reclaimed, if a reader may depend on them.
    fn lease_of(&self, record: &Record, now: Now) -> Option<Tick> {
        (!record.has(RecordFlag::Writing) && self.is_leased(record, now)).then(|| self.leased_until(record))
    }

    // --------------------------------------------------------------------------------------------- state

    /// Returns the queue that contains a record, by its state.
    fn queue_of<'a>(
        writing: &'a mut Queue,
        offloading: &'a mut Queue,
        tenants: &'a mut Tenants,
        record: &Record,
    ) -> &'a mut Queue {
        if record.has(RecordFlag::Writing) {
            return writing;
        }
        if record.has(RecordFlag::Offloading) {
            return offloading;
        }
        let tenant = tenants.get_mut(record.tenant());
        if record.has(RecordFlag::OnDisk) {
            return &mut tenant.on_disk;
        }
        match record.pin() {
            PinClass::None if record.is_used_again() => &mut tenant.used_again,
            PinClass::None => &mut tenant.used_once,
            PinClass::Soft => &mut tenant.soft,
            PinClass::Hard => &mut tenant.hard,
        }
    }

    /// Adds a record to its queue, as the last one used.
    fn enqueue(&mut self, at: RecordRef) {
        let number = self.eviction_order.next_use();
        self.slab.get_mut(at).set_last_use(number);
        let record = *self.slab.get(at);
        self.objects_in_memory += u64::from(record.is_in_memory());
        Group::queue_of(&mut self.writing, &mut self.offloading, &mut self.tenants, &record)
            .push(&mut self.slab, at);
    }

    fn dequeue(&mut self, at: RecordRef) {
        let record = *self.slab.get(at);
        self.objects_in_memory -= u64::from(record.is_in_memory());
        Group::queue_of(&mut self.writing, &mut self.offloading, &mut self.tenants, &record)
            .unlink(&mut self.slab, at);
    }

    /// Adds a record to slab, table and queue and charges its locations to the tenant.
    fn add_object(&mut self, record: &Record, key: &[u8]) -> Result<RecordRef, ErrorCode> {
        let at = self.slab.insert(record, key).map_err(|_| ErrorCode::Busy)?;
        self.table.insert(record.id(), at.number());
        self.enqueue(at);
        self.tenants.get_mut(record.tenant()).objects += 1;
        for index in 0..self.location_count(record) {
            let location = self.location(record, index);
            if !location.is_lost() {
                self.charge_location(at, location);
            }
        }
        if let Some(expires) = self.extensions.get(record.extension).and_then(|extension| extension.expires) {
            self.expiring.insert((expires.0, record.id()));
        }
        Ok(at)
    }

    /// Assigns a location to the record and charges it to the tenant.
    fn charge_location(&mut self, at: RecordRef, location: SlotLocation) {
        let tenant = self.slab.get(at).tenant();
        let segment = self.segment_mut(location.segment);
        segment.set_slot(location.slot, at);
        let units = segment.extent(location.block).units;
        self.tenants.get_mut(tenant).bytes += u64::from(units) * UNIT_BYTES;
    }

    /// Removes a record from everything but the segments. Its locations must have been released before.
    fn remove_record(&mut self, at: RecordRef) {
        debug_assert!(
            (0..self.location_count(self.slab.get(at)))
                .all(|i| self.location(self.slab.get(at), i).is_lost())
        );
        self.dequeue(at);
        let record = *self.slab.get(at);
        self.end_offload(record.id());
        self.late_offloads.remove(&record.id());
        self.not_offloadable.remove(&record.id());
        let mut was_readable = !record.has(RecordFlag::Writing);
        if let Some(extension) = self.extensions.remove(record.extension) {
            was_readable &= !extension.lacks_stripes;
            if let Some(expires) = extension.expires {
                self.expiring.remove(&(expires.0, record.id()));
            }
            if extension.cohort != NONE {
                self.cohorts.leave(extension.cohort, record.id());
            }
        }
        self.tenants.get_mut(record.tenant()).objects -= 1;
        let removed = self.table.remove(record.id(), at.number());
        debug_assert!(removed, "record is missing in the table");
        self.uncertain_replacements.remove(&record.id());
        self.invalidate(record.tenant(), record.id(), was_readable);
        if let Some(old) = self.slab.remove(at) {
            self.record_moved(old, at);
        }
    }

    /// Updates all references to a record whose number changed from `old` to `new`.
    fn record_moved(&mut self, old: RecordRef, new: RecordRef) {
        let record = *self.slab.get(new);
        let replaced = self.table.replace(record.id(), old.number(), new.number());
        debug_assert!(replaced, "record is missing in the table");
        Group::queue_of(&mut self.writing, &mut self.offloading, &mut self.tenants, &record)
            .record_moved(&mut self.slab, new);
        for index in 0..self.location_count(&record) {
            let location = self.location(&record, index);
            if !location.is_lost() {
                self.segment_mut(location.segment).set_slot(location.slot, new);
            }
        }
    }

    /// Releases one location of a record: it drains, and the node receives a command. A lost segment receives none.
    /// Returns whether a command was or will be sent.
    fn release_location(
        &mut self,
        at: RecordRef,
        index: usize,
        leased: Option<Tick>,
        effects: &mut Effects,
    ) -> bool {
        let record = *self.slab.get(at);
        let location = self.location(&record, index);
        if location.is_lost() {
            return false;
        }
        let (epoch, id, live) = (record.epoch(), record.id(), !record.has(RecordFlag::Writing));
        let may_be_written = live && self.may_be_offloading(&record) && self.node_has_disk(location.segment);
        let segment = self.segment_mut(location.segment);
        let units = segment.extent(location.block).units;
        segment.drain(location, epoch, id, live);
        if may_be_written {
            segment.may_be_written(location.slot);
        }
        let reachable = segment.is_readable();
        self.tenants.get_mut(record.tenant()).bytes -= u64::from(units) * UNIT_BYTES;
        self.set_location(at, index, SlotLocation::LOST);
        if reachable {
            let version = LocationVersion { segment: location.segment, slot: location.slot, epoch };
            self.unconfirmed_kills.insert((id, version));
            match leased {
                Some(until) => {
                    self.leased_drains.insert((until, location.segment, location.slot), epoch);
                }
                None => self.push_command(
                    CommandKind::Reclaim,
                    location.segment,
                    location.slot,
                    epoch,
                    id,
                    effects,
                ),
            }
        }
        reachable
    }

    /// Releases all locations of an object and removes it. A valid lease delays the reclaim, not the removal.
    fn drop_object(&mut self, at: RecordRef, now: Now, effects: &mut Effects) {
        let record = *self.slab.get(at);
        if self.may_be_offloading(&record) {
            // An offload in progress would leave the record on disk. A reclaim does not stop it, a kill does.
            let released =
                self.unconfirmed_versions(record.id()).filter(|version| version.epoch == record.epoch());
            let locations = (0..self.location_count(&record)).map(|index| self.location(&record, index));
            let locations = locations.filter(|&location| self.is_readable(location));
            let current = locations.map(|location| LocationVersion::of(location, record.epoch()));
            let versions: Vec<LocationVersion> =
                released.chain(current).filter(|version| self.node_has_disk(version.segment)).collect();
            for version in versions {
                self.send_kill(version, record.id(), effects);
            }
        }
        self.drop_without_kill(at, now, effects);
    }

    /// The same, after kill commands were sent where necessary.
    fn drop_without_kill(&mut self, at: RecordRef, now: Now, effects: &mut Effects) {
        let record = *self.slab.get(at);
        let leased = self.lease_of(&record, now);
        for index in 0..self.location_count(&record) {
            self.release_location(at, index, leased, effects);
        }
        self.remove_record(at);
    }

    fn push_command(
        &self,
        kind: CommandKind,
        segment: u32,
        slot: u32,
        epoch: Epoch,
        id: ObjectId,
        effects: &mut Effects,
    ) {
        let segment = self.segment(segment);
        let command = NodeCommand {
            kind,
            segment: segment.id,
            generation: segment.generation,
            slot: moontide_types::SlotId(slot),
            epoch,
            id,
        };
        effects.push(Effect::Command { session: segment.session, command });
    }

    /// Returns the extension of a record; adds one if it has none.
    fn extension_mut(&mut self, at: RecordRef) -> &mut RecordExtension {
        let record = self.slab.get_mut(at);
        if record.extension == NONE {
            let plain = RecordExtension::plain(record.object_len());
            record.extension = self.extensions.add(plain);
        }
        self.extensions.get_mut(record.extension).expect("extension was just added")
    }

    /// Turns a reservation into an object: changes the queue, the unit counts of the segments and the flags.
    fn complete_object(&mut self, at: RecordRef, root: u64) {
        self.dequeue(at);
        let record = self.slab.get_mut(at);
        record.set(RecordFlag::Writing, false);
        record.set_until(Tick(0));
        record.root = root;
        let record = *record;
        for index in 0..self.location_count(&record) {
            let location = self.location(&record, index);
            if !location.is_lost() {
                let segment = self.segment_mut(location.segment);
                let units = segment.extent(location.block).units;
                segment.complete(units);
            }
        }
        self.enqueue_stored(at);
        self.note_stored(at);
        self.retract_invalidation(record.id(), self.invalidation_count());
        self.stats.puts_completed += 1;
    }

    /// Whether nodes that may have objects of this group, in memory or on disk, have not reported yet.
    fn awaits_reports(&self, now: Now) -> bool {
        !self.absent_disks.is_empty() || self.unsettled(now, |_| true)
    }

    /// The same without disks, on which records are never partly written.
    fn memory_is_unsettled(&self, now: Now) -> bool {
        self.unsettled(now, |segment| !segment.is_disk())
    }

    fn unsettled(&self, now: Now, include: impl Fn(&Segment) -> bool) -> bool {
        let reporting = |segment: &Segment| segment.phase == SegmentPhase::Reporting && include(segment);
        now.mono < self.unknown_nodes_until
            || !self.absent.is_empty()
            || self.segments.iter().flatten().any(reporting)
    }
}
