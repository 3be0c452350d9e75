//! Metrics of a node: [`Counters`], which threads increment, and [`Metrics`], from which `/metrics` is rendered.
//!
//! Names are `moontide_node_<noun>_<unit>`, counters with the suffix `_total`; the metrics of transfers are called
//! `moontide_transfer_…`. Two sums hold in every snapshot:
//!
//! * space: `memory_live + memory_writing + memory_draining + memory_free = memory_capacity` (`_bytes` each);
//! * commands: `commands_received = commands_done + commands_accepted + commands_refused + commands_cancelled +
//!   commands_pending`. Commands are cancelled if their session ends before the reply.
//!
//! With a disk tier, a third:
//! `disk_loads = disk_load_staging_hits + disk_load_reads + disk_load_misses + disk_load_failures`.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use moontide_rt::sync::Mutex;
use moontide_types::limits::UNIT_BYTES;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::disk::{DiskMetrics, DiskTier};
use crate::index_gate::IndexGate;
use crate::logic::usage::UnitUsage;
use crate::memory::NodeMemory;
use crate::status::Status;

/// Prefix of all metric names.
const PREFIX: &str = "moontide_node";

/// Commands of masters by result.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct CommandCounts {
    pub(crate) received: u64,
    pub(crate) done: u64,
    pub(crate) accepted: u64,
    pub(crate) refused: u64,
    /// Commands whose session ended before the reply.
    pub(crate) cancelled: u64,
    pub(crate) outstanding: u64,
}

/// Counters that threads increment.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// In one lock, so that their sum always holds. The second value: slots that have been draining for too long.
    commands: Mutex<(CommandCounts, u64)>,
    begun: AtomicU64,
    begins_refused: AtomicU64,
    committed: AtomicU64,
    commits_refused: AtomicU64,
    corrupt: AtomicU64,
    freed_bytes: AtomicU64,
    overdue: AtomicU64,
    sessions: AtomicU64,
    streams: AtomicU64,
    attempts_failed: AtomicU64,
    reported: AtomicU64,
    changes: AtomicU64,
    unreadable: AtomicU64,
    copied_records: AtomicU64,
    copied_bytes: AtomicU64,
    copies_failed: AtomicU64,
    capabilities_refused: AtomicU64,
    capability_keys: AtomicU64,
}

/// Increments a counter. Relaxed: the values order nothing else.
fn increment(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

impl Counters {
    pub(crate) fn commands(&self, counts: CommandCounts, overdue: u64) {
        *self.commands.lock() = (counts, overdue);
    }

    pub(crate) fn begun(&self, ok: bool) {
        increment(if ok { &self.begun } else { &self.begins_refused }, 1);
    }

    pub(crate) fn committed(&self, ok: bool) {
        increment(if ok { &self.committed } else { &self.commits_refused }, 1);
    }

    pub(crate) fn corrupt(&self) {
        increment(&self.corrupt, 1);
    }

    pub(crate) fn corrupt_found(&self) -> u64 {
        self.corrupt.load(Ordering::Relaxed)
    }

    pub(crate) fn freed(&self, bytes: u64) {
        increment(&self.freed_bytes, bytes);
    }

    pub(crate) fn overdue(&self, slots: u64) {
        increment(&self.overdue, slots);
    }

    pub(crate) fn session(&self) {
        increment(&self.sessions, 1);
    }

    pub(crate) fn stream(&self) {
        increment(&self.streams, 1);
    }

    pub(crate) fn attempt_failed(&self) {
        increment(&self.attempts_failed, 1);
    }

    pub(crate) fn reported(&self, records: u64) {
        increment(&self.reported, records);
    }

    pub(crate) fn changes(&self, messages: u64) {
        increment(&self.changes, messages);
    }

    /// Counts a copy of another node's record: its bytes, or `None` if it failed.
    pub(crate) fn copied(&self, bytes: Option<u64>) {
        increment(if bytes.is_some() { &self.copied_records } else { &self.copies_failed }, 1);
        increment(&self.copied_bytes, bytes.unwrap_or(0));
    }

    /// Counts a key of a master that replaces its last one.
    pub(crate) fn capability_key(&self) {
        increment(&self.capability_keys, 1);
    }

    /// Counts a request whose capability was refused. Returns their number.
    pub(crate) fn capability_refused(&self) -> u64 {
        self.capabilities_refused.fetch_add(1, Ordering::Relaxed) + 1
    }

    pub(crate) fn unreadable(&self, records: u64) {
        increment(&self.unreadable, records);
    }
}

/// Sources of the metrics.
#[derive(Debug)]
pub(crate) struct Metrics {
    pub(crate) counters: Arc<Counters>,
    pub(crate) transfer: Arc<moontide_transfer::Metrics>,
    pub(crate) memory: Arc<NodeMemory>,
    pub(crate) disk: Option<Arc<DiskTier>>,
    pub(crate) index_gate: Arc<IndexGate>,
    pub(crate) status: Arc<Status>,
}

impl Metrics {
    /// Renders all metrics in the OpenMetrics text format.
    pub(crate) fn render(&self) -> String {
        let (commands, overdue) = *self.counters.commands.lock();
        let snapshot = MetricsSnapshot {
            usage: self.memory.usage(),
            commands,
            overdue,
            segments: self.memory.segments().len() as u64,
            clients: self.memory.heap().ledgers().clients().len() as u64,
            overflowed: self.memory.heap().index_region().overflowed(),
            mounted: self.status.is_mounted(),
            open: self.index_gate.is_open(),
            disk: self.disk.as_ref().map(|disk| disk.metrics()),
            counters: Arc::clone(&self.counters),
        };
        let mut registry = Registry::default();
        self.transfer.register(&mut registry);
        registry.sub_registry_with_prefix(PREFIX).register_collector(Box::new(snapshot));
        let mut text = String::with_capacity(8 << 10);
        prometheus_client::encoding::text::encode(&mut text, &registry)
            .expect("writing to a String never fails");
        text
    }
}

/// Values at one point in time.
#[derive(Debug)]
struct MetricsSnapshot {
    usage: UnitUsage,
    commands: CommandCounts,
    overdue: u64,
    segments: u64,
    clients: u64,
    overflowed: u64,
    mounted: bool,
    open: bool,
    disk: Option<DiskMetrics>,
    counters: Arc<Counters>,
}

impl Collector for MetricsSnapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let (usage, commands, counters) = (&self.usage, &self.commands, &self.counters);
        let bytes = |units: u64| units * UNIT_BYTES;
        let gauges = [
            ("memory_live_bytes", "Memory of complete objects", bytes(usage.live_units)),
            ("memory_writing_bytes", "Memory of objects being written", bytes(usage.writing_units)),
            (
                "memory_draining_bytes",
                "Memory of removed objects that is not free yet",
                bytes(usage.draining_units),
            ),
            ("memory_free_bytes", "Free memory", bytes(usage.free_units)),
            ("memory_capacity_bytes", "Memory for payload", bytes(usage.units)),
            ("slots_free", "Free header slots", usage.free_slots),
            ("slots_capacity", "Header slots", usage.slots),
            ("segments", "Segments", self.segments),
            ("commands_pending", "Commands whose slot is not free yet", commands.outstanding),
            ("overdue_drains", "Removed objects held for more than 10 s", self.overdue),
            ("shm_clients", "Processes of this host that map the memory", self.clients),
            ("synced", "1 while all masters have acknowledged complete reports", self.mounted.into()),
            ("local_index_open", "1 while processes of this host may use the local index", self.open.into()),
        ];
        let (disk_gauges, disk_counts) =
            self.disk.as_ref().map_or((&[][..], &[][..]), |disk| (&disk.gauges[..], &disk.counts[..]));
        for (name, help, value) in gauges.into_iter().chain(disk_gauges.iter().copied()) {
            let value = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            value.encode(encoder.encode_descriptor(name, help, None, value.metric_type())?)?;
        }
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counts = [
            ("commands_received", "Commands of masters", commands.received),
            ("commands_done", "Commands completed", commands.done),
            ("commands_accepted", "Kills executed whose space waits for a reclaim", commands.accepted),
            ("commands_refused", "Commands refused", commands.refused),
            ("commands_cancelled", "Commands whose session ended first", commands.cancelled),
            ("begins", "Records begun", read(&counters.begun)),
            ("begins_refused", "Begins refused", read(&counters.begins_refused)),
            ("commits", "Records published or aborted by their writer", read(&counters.committed)),
            ("commits_refused", "Commits refused", read(&counters.commits_refused)),
            ("corrupt_records", "Records that did not match their digests", read(&counters.corrupt)),
            ("freed_bytes", "Memory freed", read(&counters.freed_bytes)),
            (
                "overdue_drains_seen",
                "Removed objects that were held for more than 10 s",
                read(&counters.overdue),
            ),
            ("sessions_opened", "Sessions opened with masters", read(&counters.sessions)),
            ("streams_opened", "Session streams opened", read(&counters.streams)),
            ("master_connect_failures", "Failed attempts to reach a master", read(&counters.attempts_failed)),
            ("reported_records", "Records reported in snapshots", read(&counters.reported)),
            ("report_deltas", "Messages with changes since the snapshot", read(&counters.changes)),
            ("records_dropped_bad_key", "Records killed for an unreadable key", read(&counters.unreadable)),
            ("copied_records", "Records copied from other nodes", read(&counters.copied_records)),
            ("copied_bytes", "Memory of records copied from other nodes", read(&counters.copied_bytes)),
            (
                "copies_failed",
                "Records of other nodes that could not be copied",
                read(&counters.copies_failed),
            ),
            (
                "capability_keys",
                "Keys of capabilities that masters have replaced in their sessions",
                read(&counters.capability_keys),
            ),
            (
                "capabilities_refused",
                "Requests whose capability is not accepted: forged, or older than the keys of the node",
                read(&counters.capabilities_refused),
            ),
            ("local_index_overflows", "Records that did not fit into the local index", self.overflowed),
        ];
        for (name, help, value) in counts.into_iter().chain(disk_counts.iter().copied()) {
            let value = ConstCounter::new(value);
            value.encode(encoder.encode_descriptor(name, help, None, value.metric_type())?)?;
        }
        if let Some(disk) = &self.disk {
            let (name, help) =
                ("disk_throttled_seconds", "Time for which writes waited for the write rate limit");
            let value = ConstCounter::new(disk.throttled.as_secs_f64());
            value.encode(encoder.encode_descriptor(name, help, None, value.metric_type())?)?;
        }
        Ok(())
    }
}
