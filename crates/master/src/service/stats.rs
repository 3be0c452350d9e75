//! Counters of the service, for metrics.

use std::collections::BTreeMap;

use moontide_meta::{GroupStats, LookupCounts, Quota, SegmentPhase, SegmentView, TenantUsage};
use moontide_proto::convert::{DiskState, ReadCounters};
use moontide_types::Medium;

use super::Service;

/// Values of all metrics.
#[derive(Clone, Debug, Default)]
pub struct MasterStats {
    /// Number of objects, including those being written.
    pub objects: u64,
    /// Number of objects being written.
    pub objects_writing: u64,
    /// Number of sessions of nodes.
    pub sessions: u64,
    /// Number of segments in use.
    pub segments: u64,
    /// Units of these segments. `live + reserved + draining + free = units`.
    pub units: u64,
    /// Units of complete objects.
    pub live_units: u64,
    /// Units of objects being written.
    pub reserved_units: u64,
    /// Units of removed objects that nodes have not freed yet.
    pub draining_units: u64,
    /// Free units.
    pub free_units: u64,
    /// Number of header slots.
    pub slots: u64,
    /// Number of slots in use.
    pub used_slots: u64,
    /// Memory of the index in bytes.
    pub memory_bytes: u64,
    /// Number of complete objects that are only on disks.
    pub objects_on_disk: u64,
    /// Units of memory that become free when the offloads in progress are complete.
    pub offloading_units: u64,
    /// Objects that are queued for a write to disk or being written, and stay in memory.
    pub write_back_objects: u64,
    /// Bytes of these objects.
    pub write_back_bytes: u64,
    /// Objects that cannot be read until a node returns with stripes of them.
    pub objects_missing_stripes: u64,
    /// Objects with fewer replicas than their writers asked for, at the last scan and not repaired since.
    pub objects_lacking_replicas: u64,
    /// Replicas beyond those that writers asked for.
    pub hot_copies: u64,
    /// Number of nodes with a disk.
    pub disks: u64,
    /// Number of disks that accept no writes.
    pub disks_read_only: u64,
    /// Bytes in use on disks.
    pub disk_used_bytes: u64,
    /// Capacity limit of all disks in bytes.
    pub disk_limit_bytes: u64,
    /// Sums of the counters of all groups.
    pub group: GroupStats,
    /// Local and remote reads.
    pub reads: ReadTotals,
    /// Number of commands without a result.
    pub pending_commands: u64,
    /// Usage of tenants in all groups.
    pub tenants: Vec<TenantUsage>,
}

/// Read counters: local reads are counted by the nodes, the others by the lookups of the master.
///
/// `memory_hits + device_hits + disk_hits + misses = requested`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReadTotals {
    /// Number of all reads.
    pub requested: u64,
    /// Found in memory: by a lookup, or by a local zero-copy read.
    pub memory_hits: u64,
    /// Local reads found in the memory of a GPU.
    pub device_hits: u64,
    /// Found only on disk.
    pub disk_hits: u64,
    /// Not found or not ready. A local miss is followed by a lookup, and only the lookup counts.
    pub misses: u64,
    /// Bytes served by nodes.
    pub bytes: u64,
    /// Reads that failed verification.
    pub corrupt: u64,
}

/// Read counters of a node that the totals need.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct NodeReads {
    memory: u64,
    device: u64,
    disk: u64,
    bytes: u64,
    corrupt: u64,
}

impl NodeReads {
    /// Sets the counters from a heartbeat, which contains totals since the start of the session.
    pub(super) fn set(&mut self, counters: &ReadCounters) {
        *self = NodeReads {
            memory: counters.local_memory,
            device: counters.local_device,
            disk: counters.local_disk,
            bytes: counters.bytes,
            corrupt: counters.corrupt,
        };
    }

    pub(super) fn add(&mut self, other: &NodeReads) {
        self.memory = self.memory.saturating_add(other.memory);
        self.device = self.device.saturating_add(other.device);
        self.disk = self.disk.saturating_add(other.disk);
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.corrupt = self.corrupt.saturating_add(other.corrupt);
    }
}

impl Service {
    /// Collects all counters, group after group.
    pub fn stats(&self) -> MasterStats {
        let mut stats = MasterStats::default();
        for group in self.hosted() {
            stats.objects += group.objects() as u64;
            stats.objects_writing += group.objects_writing();
            stats.memory_bytes += group.memory_bytes() as u64;
            stats.objects_on_disk += group.objects_on_disk();
            stats.offloading_units += group.offloading_units();
            let (objects, bytes) = group.write_back_backlog();
            stats.write_back_objects += objects;
            stats.write_back_bytes += bytes;
            stats.objects_missing_stripes += group.objects_missing_stripes();
            stats.objects_lacking_replicas += group.objects_lacking_replicas();
            stats.hot_copies += group.hot_copies();
            let in_use = |view: &SegmentView| view.phase != SegmentPhase::Lost && view.medium != Medium::Disk;
            for view in group.segments().filter(in_use) {
                stats.segments += 1;
                stats.units += u64::from(view.units);
                stats.live_units += u64::from(view.live_units);
                stats.reserved_units += u64::from(view.reserved_units);
                stats.draining_units += u64::from(view.draining_units);
                stats.free_units += u64::from(view.free_units);
                stats.slots += u64::from(view.slots);
                stats.used_slots += u64::from(view.taken_slots);
            }
            add(&mut stats.group, group.stats());
        }
        let mut reads = *self.past_reads.lock();
        for node in self.nodes.read().values() {
            stats.sessions += 1;
            stats.pending_commands += node.pending_commands() as u64;
            reads.add(&node.reads.lock());
            if let Some(disk) = *node.disk.lock() {
                stats.disks += 1;
                stats.disks_read_only +=
                    u64::from(matches!(disk.state, DiskState::Full | DiskState::WriteFailed));
                stats.disk_used_bytes += disk.used_bytes;
                stats.disk_limit_bytes += disk.limit_bytes;
            }
        }
        let lookups = stats.group.lookups;
        let misses = lookups.misses + lookups.not_ready;
        let memory_hits = lookups.hits + reads.memory;
        stats.reads = ReadTotals {
            // Counted at the request, not at the response, so a wrong sum is detectable.
            requested: lookups.requested + reads.memory + reads.device + reads.disk,
            memory_hits,
            device_hits: reads.device,
            disk_hits: lookups.hits_disk + reads.disk,
            misses,
            bytes: reads.bytes,
            corrupt: reads.corrupt,
        };
        let info = self.tenants.read();
        stats.tenants = self
            .tenant_usage()
            .into_iter()
            .map(|(name, bytes, objects)| {
                let quota = info.get(&name).map_or(Quota::default(), |info| info.quota);
                TenantUsage { name, quota, bytes, objects }
            })
            .collect();
        stats
    }

    /// Checks the invariants of every group, for tests and the simulation. Visits all objects.
    #[cfg(any(test, feature = "testing"))]
    pub fn audit(&self) -> Result<(), String> {
        for group in self.hosted() {
            group.audit(self.now()).map_err(|violation| format!("group {}: {violation}", group.index))?;
        }
        Ok(())
    }

    /// Returns name, bytes and objects of every tenant, sorted by name.
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
        offloads_started,
        offloaded_objects,
        write_backs_skipped,
        demoted_objects,
        offloads_not_admitted,
        promoted_objects,
        copies_started,
        copied_records,
        copied_bytes,
        copies_failed,
        copies_released,
        recovered_objects,
        disk_evicted,
        reclaimed,
        commands_refused,
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
    sum.offloads_started += offloads_started;
    sum.offloaded_objects += offloaded_objects;
    sum.write_backs_skipped += write_backs_skipped;
    sum.demoted_objects += demoted_objects;
    sum.offloads_not_admitted += offloads_not_admitted;
    sum.promoted_objects += promoted_objects;
    sum.copies_started += copies_started;
    sum.copied_records += copied_records;
    sum.copied_bytes += copied_bytes;
    sum.copies_failed += copies_failed;
    sum.copies_released += copies_released;
    sum.recovered_objects += recovered_objects;
    sum.disk_evicted += disk_evicted;
    sum.reclaimed += reclaimed;
    sum.commands_refused += commands_refused;
    sum.reported += reported;
    sum.reported_killed += reported_killed;
}
