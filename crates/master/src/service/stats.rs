//! What the service counts, for metrics.

use std::collections::BTreeMap;

use moontide_meta::{GroupStats, LookupCounts, Medium, Quota, SegmentPhase, SegmentView, TenantUsage};
use moontide_proto::convert::{DiskState, ReadCounters};

use super::Service;

/// Everything that metrics show.
#[derive(Clone, Debug, Default)]
pub struct MasterStats {
    /// Objects, those being written included.
    pub objects: u64,
    /// Objects being written.
    pub objects_writing: u64,
    /// Sessions of nodes.
    pub sessions: u64,
    /// Segments in use.
    pub segments: u64,
    /// Their units. `live + reserved + draining + free = units`.
    pub units: u64,
    /// Units of complete objects.
    pub live_units: u64,
    /// Units of objects being written.
    pub reserved_units: u64,
    /// Units that nodes have not given back yet.
    pub draining_units: u64,
    /// The rest.
    pub free_units: u64,
    /// Header slots.
    pub slots: u64,
    /// Slots that are not free.
    pub taken_slots: u64,
    /// Memory held by the index.
    pub memory_bytes: u64,
    /// Complete objects that are nowhere but on disks.
    pub objects_on_disk: u64,
    /// Units of memory that will be free when what is being written to disks is there.
    pub offloading_units: u64,
    /// Nodes with a disk.
    pub disks: u64,
    /// Of these, those that take no more.
    pub disks_closed: u64,
    /// Bytes on disks.
    pub disk_used_bytes: u64,
    /// Bytes that disks may hold.
    pub disk_limit_bytes: u64,
    /// Counts of all groups, summed.
    pub group: GroupStats,
    /// Reads, wherever they happened.
    pub reads: ReadSums,
    /// Orders without an answer.
    pub orders_outstanding: u64,
    /// Tenants over all groups.
    pub tenants: Vec<TenantUsage>,
}

/// Reads, counted where they are decided: same-host reads by the nodes, the others by the master's lookups.
///
/// `memory_hits + device_hits + disk_hits + misses = requested`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadSums {
    /// All of them.
    pub requested: u64,
    /// Found in memory: by a lookup, or in place on the same host.
    pub memory_hits: u64,
    /// Found in a GPU's memory on the same host.
    pub device_hits: u64,
    /// Found on disk alone.
    pub disk_hits: u64,
    /// Not found or not ready. A local miss is followed by a lookup, which counts instead of it.
    pub misses: u64,
    /// Bytes that nodes have served.
    pub bytes: u64,
    /// Reads that failed verification.
    pub corrupt: u64,
}

/// A node's counters, as far as sums need them.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Reads {
    memory: u64,
    device: u64,
    disk: u64,
    bytes: u64,
    corrupt: u64,
}

impl Reads {
    /// A heartbeat carries sums since the session was opened.
    pub(super) fn set(&mut self, counters: &ReadCounters) {
        *self = Reads {
            memory: counters.local_memory,
            device: counters.local_device,
            disk: counters.local_disk,
            bytes: counters.bytes,
            corrupt: counters.corrupt,
        };
    }

    pub(super) fn add(&mut self, other: &Reads) {
        self.memory = self.memory.saturating_add(other.memory);
        self.device = self.device.saturating_add(other.device);
        self.disk = self.disk.saturating_add(other.disk);
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.corrupt = self.corrupt.saturating_add(other.corrupt);
    }
}

impl Service {
    /// Counts of everything, group after group.
    pub fn stats(&self) -> MasterStats {
        let mut stats = MasterStats::default();
        for group in self.hosted() {
            stats.objects += group.objects() as u64;
            stats.objects_writing += group.objects_writing();
            stats.memory_bytes += group.memory_bytes() as u64;
            stats.objects_on_disk += group.objects_on_disk();
            stats.offloading_units += group.offloading_units();
            let in_use = |view: &SegmentView| view.phase != SegmentPhase::Lost && view.medium != Medium::Disk;
            for view in group.segments().filter(in_use) {
                stats.segments += 1;
                stats.units += u64::from(view.units);
                stats.live_units += u64::from(view.live_units);
                stats.reserved_units += u64::from(view.reserved_units);
                stats.draining_units += u64::from(view.draining_units);
                stats.free_units += u64::from(view.free_units);
                stats.slots += u64::from(view.slots);
                stats.taken_slots += u64::from(view.taken_slots);
            }
            add(&mut stats.group, group.stats());
        }
        let mut reads = *self.past_reads.lock();
        for node in self.nodes.read().values() {
            stats.sessions += 1;
            stats.orders_outstanding += node.orders_outstanding() as u64;
            reads.add(&node.reads.lock());
            if let Some(disk) = *node.disk.lock() {
                stats.disks += 1;
                stats.disks_closed +=
                    u64::from(matches!(disk.state, DiskState::Full | DiskState::WriteFailed));
                stats.disk_used_bytes += disk.used_bytes;
                stats.disk_limit_bytes += disk.limit_bytes;
            }
        }
        let lookups = stats.group.lookups;
        let misses = lookups.misses + lookups.not_ready;
        let memory_hits = lookups.hits + reads.memory;
        stats.reads = ReadSums {
            // Counted when a key is asked for, not when it is answered: the sum can fail.
            requested: lookups.requested + reads.memory + reads.device + reads.disk,
            memory_hits,
            device_hits: reads.device,
            disk_hits: lookups.hits_disk + reads.disk,
            misses,
            bytes: reads.bytes,
            corrupt: reads.corrupt,
        };
        let facts = self.tenants.read();
        stats.tenants = self
            .tenant_usage()
            .into_iter()
            .map(|(name, bytes, objects)| {
                let quota = facts.get(&name).map_or(Quota::default(), |facts| facts.quota);
                TenantUsage { name, quota, bytes, objects }
            })
            .collect();
        stats
    }

    /// Not for programs: holds every group against its invariants, for a simulation. Looks at everything.
    #[doc(hidden)]
    pub fn audit(&self) -> Result<(), String> {
        for group in self.hosted() {
            group.audit(self.now()).map_err(|violation| format!("group {}: {violation}", group.index))?;
        }
        Ok(())
    }

    /// Name, bytes and objects of every tenant, by name.
    pub(super) fn tenant_usage(&self) -> Vec<(Box<str>, u64, u64)> {
        let mut sums: BTreeMap<Box<str>, (u64, u64)> = BTreeMap::new();
        for group in self.hosted() {
            for usage in group.tenants() {
                let sum = sums.entry(usage.name).or_default();
                sum.0 += usage.bytes;
                sum.1 += usage.objects;
            }
        }
        sums.into_iter().map(|(name, (bytes, objects))| (name, bytes, objects)).collect()
    }
}

fn add(sum: &mut GroupStats, group: &GroupStats) {
    let GroupStats {
        lookups: LookupCounts { requested, hits, hits_disk, misses, not_ready, exists },
        puts_started,
        puts_completed,
        puts_expired,
        puts_no_space,
        evicted_objects,
        evicted_bytes,
        expired_objects,
        removed_objects,
        lost_objects,
        offloads_ordered,
        offloaded_objects,
        demoted_objects,
        offloads_not_admitted,
        promoted_objects,
        recovered_objects,
        disk_evicted,
        reclaimed,
        orders_refused,
        reported,
        reported_killed,
    } = *group;
    sum.lookups.requested += requested;
    sum.lookups.hits += hits;
    sum.lookups.hits_disk += hits_disk;
    sum.lookups.misses += misses;
    sum.lookups.not_ready += not_ready;
    sum.lookups.exists += exists;
    sum.puts_started += puts_started;
    sum.puts_completed += puts_completed;
    sum.puts_expired += puts_expired;
    sum.puts_no_space += puts_no_space;
    sum.evicted_objects += evicted_objects;
    sum.evicted_bytes += evicted_bytes;
    sum.expired_objects += expired_objects;
    sum.removed_objects += removed_objects;
    sum.lost_objects += lost_objects;
    sum.offloads_ordered += offloads_ordered;
    sum.offloaded_objects += offloaded_objects;
    sum.demoted_objects += demoted_objects;
    sum.offloads_not_admitted += offloads_not_admitted;
    sum.promoted_objects += promoted_objects;
    sum.recovered_objects += recovered_objects;
    sum.disk_evicted += disk_evicted;
    sum.reclaimed += reclaimed;
    sum.orders_refused += orders_refused;
    sum.reported += reported;
    sum.reported_killed += reported_killed;
}
