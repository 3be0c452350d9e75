//! What a node tells Prometheus: [`Counters`], which threads raise, and [`Metrics`], from which `/metrics` is rendered.
//!
//! Names are `moontide_node_<noun>_<unit>`, counters with `_total` behind; the transfers' own stand beside them as
//! `moontide_transfer_…`. Two sums hold on every page:
//!
//! * space: `memory_live + memory_writing + memory_draining + memory_free = memory_all` (`_bytes` each);
//! * orders: `orders_received = orders_done + orders_accepted + orders_refused + orders_void + orders_outstanding`:
//!   received are answered or outstanding. Void are those whose session ended before they were.
//!
//! With a disk a third: `disk_loads_requested = disk_loads_staged + disk_loads_read + disk_loads_missed +
//! disk_loads_failed`.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use moontide_types::bounds::UNIT_BYTES;
use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::decide::books::Usage;
use crate::disk::{DiskNumbers, DiskTier};
use crate::keeper::Keeper;
use crate::memory::Memory;
use crate::status::Status;

/// In front of every name.
const PREFIX: &str = "moontide_node";

/// Orders of masters, by what became of them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct OrderCounts {
    pub(crate) received: u64,
    pub(crate) done: u64,
    pub(crate) accepted: u64,
    pub(crate) refused: u64,
    /// Their session ended.
    pub(crate) void: u64,
    pub(crate) outstanding: u64,
}

/// What threads count.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    /// Together, so that their sum holds whenever somebody looks. The second: slots that drain for too long.
    orders: Mutex<(OrderCounts, u64)>,
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
}

/// Relaxed everywhere: numbers that nobody orders anything by.
fn raise(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Ordering::Relaxed);
}

impl Counters {
    pub(crate) fn orders(&self, counts: OrderCounts, overdue: u64) {
        *self.orders.lock() = (counts, overdue);
    }

    pub(crate) fn begun(&self, ok: bool) {
        raise(if ok { &self.begun } else { &self.begins_refused }, 1);
    }

    pub(crate) fn committed(&self, ok: bool) {
        raise(if ok { &self.committed } else { &self.commits_refused }, 1);
    }

    pub(crate) fn corrupt(&self) {
        raise(&self.corrupt, 1);
    }

    pub(crate) fn corrupt_found(&self) -> u64 {
        self.corrupt.load(Ordering::Relaxed)
    }

    pub(crate) fn freed(&self, bytes: u64) {
        raise(&self.freed_bytes, bytes);
    }

    pub(crate) fn overdue(&self, slots: u64) {
        raise(&self.overdue, slots);
    }

    pub(crate) fn session(&self) {
        raise(&self.sessions, 1);
    }

    pub(crate) fn stream(&self) {
        raise(&self.streams, 1);
    }

    pub(crate) fn attempt_failed(&self) {
        raise(&self.attempts_failed, 1);
    }

    pub(crate) fn reported(&self, records: u64) {
        raise(&self.reported, records);
    }

    pub(crate) fn changes(&self, messages: u64) {
        raise(&self.changes, messages);
    }

    pub(crate) fn unreadable(&self, records: u64) {
        raise(&self.unreadable, records);
    }
}

/// What the page is made of.
#[derive(Debug)]
pub(crate) struct Metrics {
    pub(crate) counters: Arc<Counters>,
    pub(crate) transfer: Arc<moontide_transfer::Metrics>,
    pub(crate) memory: Arc<Memory>,
    pub(crate) disk: Option<Arc<DiskTier>>,
    pub(crate) keeper: Arc<Keeper>,
    pub(crate) status: Arc<Status>,
}

impl Metrics {
    /// The page, in OpenMetrics' text format.
    pub(crate) fn render(&self) -> String {
        let (orders, overdue) = *self.counters.orders.lock();
        let page = Page {
            usage: self.memory.usage(),
            orders,
            overdue,
            segments: self.memory.sides().len() as u64,
            clients: self.memory.heap().ledgers().clients().len() as u64,
            overflowed: self.memory.heap().board().overflowed(),
            mounted: self.status.is_mounted(),
            open: self.keeper.is_open(),
            disk: self.disk.as_ref().map(|disk| disk.numbers()),
            counters: Arc::clone(&self.counters),
        };
        let mut registry = Registry::default();
        self.transfer.register(&mut registry);
        registry.sub_registry_with_prefix(PREFIX).register_collector(Box::new(page));
        let mut text = String::with_capacity(8 << 10);
        prometheus_client::encoding::text::encode(&mut text, &registry).expect("a String takes everything");
        text
    }
}

/// The numbers of one moment.
#[derive(Debug)]
struct Page {
    usage: Usage,
    orders: OrderCounts,
    overdue: u64,
    segments: u64,
    clients: u64,
    overflowed: u64,
    mounted: bool,
    open: bool,
    disk: Option<DiskNumbers>,
    counters: Arc<Counters>,
}

impl Collector for Page {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let (usage, orders, counters) = (&self.usage, &self.orders, &self.counters);
        let bytes = |units: u64| units * UNIT_BYTES;
        let gauges = [
            ("memory_live_bytes", "Memory of complete objects", bytes(usage.live_units)),
            ("memory_writing_bytes", "Memory of objects being written", bytes(usage.writing_units)),
            ("memory_draining_bytes", "Memory of removed objects not free yet", bytes(usage.draining_units)),
            ("memory_free_bytes", "Free memory", bytes(usage.free_units)),
            ("memory_all_bytes", "Memory for payload", bytes(usage.units)),
            ("slots_free_slots", "Free header slots", usage.free_slots),
            ("slots_all_slots", "Header slots", usage.slots),
            ("segments", "Segments", self.segments),
            ("orders_outstanding", "Orders whose slot is not free yet", orders.outstanding),
            ("drains_overdue_slots", "Removed objects held for more than 10 s", self.overdue),
            ("local_processes", "Processes of this host that map the memory", self.clients),
            ("session_mounted", "1 while a master knows of all segments", self.mounted.into()),
            ("index_open", "1 while processes of this host may use the index", self.open.into()),
        ];
        let (disk_gauges, disk_counts) =
            self.disk.as_ref().map_or((&[][..], &[][..]), |disk| (&disk.gauges[..], &disk.counts[..]));
        for (name, help, value) in gauges.into_iter().chain(disk_gauges.iter().copied()) {
            let value = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
            value.encode(encoder.encode_descriptor(name, help, None, value.metric_type())?)?;
        }
        let read = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let counts = [
            ("orders_received", "Orders of masters", orders.received),
            ("orders_done", "Orders carried out", orders.done),
            ("orders_accepted", "Kills carried out; the space waits for a reclaim", orders.accepted),
            ("orders_refused", "Orders refused", orders.refused),
            ("orders_void", "Orders whose session ended first", orders.void),
            ("begun_records", "Records begun", read(&counters.begun)),
            ("begins_refused", "Begins refused", read(&counters.begins_refused)),
            ("committed_records", "Records published or given up by their writer", read(&counters.committed)),
            ("commits_refused", "Commits refused", read(&counters.commits_refused)),
            ("corrupt_records", "Records that did not match their digests", read(&counters.corrupt)),
            ("freed_bytes", "Memory that came back", read(&counters.freed_bytes)),
            ("drains_overdue", "Removed objects that were held for more than 10 s", read(&counters.overdue)),
            ("sessions_opened", "Sessions with a master", read(&counters.sessions)),
            ("streams_opened", "Streams of sessions", read(&counters.streams)),
            ("attempts_failed", "Attempts to reach a master that failed", read(&counters.attempts_failed)),
            ("reported_records", "Records told in snapshots", read(&counters.reported)),
            ("reported_changes", "Messages about changes since", read(&counters.changes)),
            ("unreadable_records", "Records killed for an unreadable key", read(&counters.unreadable)),
            ("index_overflowed_records", "Records that found no place in the index", self.overflowed),
        ];
        for (name, help, value) in counts.into_iter().chain(disk_counts.iter().copied()) {
            let value = ConstCounter::new(value);
            value.encode(encoder.encode_descriptor(name, help, None, value.metric_type())?)?;
        }
        Ok(())
    }
}
