//! What a master tells Prometheus: [`Metrics`], the one struct from which `/metrics` is rendered.
//!
//! Names are `moontide_master_<noun>_<unit>`, counters with `_total` behind. Two sums hold on every page:
//!
//! * reads: `reads_memory_hits + reads_device_hits + reads_disk_hits + reads_misses = reads_requested` (`_keys_total`
//!   each); same-host reads arrive with the nodes' heartbeats, the others are the master's own lookups;
//! * space: `space_live + space_reserved + space_draining + space_free = space_all` (`_units` each).

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use moontide_meta::TenantUsage;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::service::{MasterStats, Role, Service};

/// In front of every name.
const PREFIX: &str = "moontide_master";

/// What is counted apart at a door.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Exist,
    GetReplicaList,
    PutStart,
    PutEnd,
    Remove,
    Other,
}

impl Call {
    const ALL: [Call; 6] =
        [Call::Exist, Call::GetReplicaList, Call::PutStart, Call::PutEnd, Call::Remove, Call::Other];

    fn name(self) -> &'static str {
        match self {
            Call::Exist => "exist",
            Call::GetReplicaList => "get_replica_list",
            Call::PutStart => "put_start",
            Call::PutEnd => "put_end",
            Call::Remove => "remove",
            Call::Other => "other",
        }
    }
}

/// What one thread of a door counts. Each thread has its own, on cache lines of its own; a page sums them.
///
/// All orderings are Relaxed: the numbers order nothing.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct DoorCounters {
    requests: [AtomicU64; Call::ALL.len()],
    connections: AtomicU64,
    connections_refused: AtomicU64,
    errors: AtomicU64,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
}

impl DoorCounters {
    pub(crate) fn request(&self, call: Call) {
        self.requests[call as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// A request that was answered with an error frame, or a connection that broke the rules.
    pub(crate) fn error(&self) {
        self.errors.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn refused(&self) {
        self.connections_refused.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn opened(&self) {
        self.connections.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn closed(&self) {
        self.connections.fetch_sub(1, Ordering::Relaxed);
    }

    pub(crate) fn connections(&self) -> u64 {
        self.connections.load(Ordering::Relaxed)
    }

    pub(crate) fn read(&self, bytes: usize) {
        self.read_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }

    pub(crate) fn written(&self, bytes: usize) {
        self.written_bytes.fetch_add(bytes as u64, Ordering::Relaxed);
    }
}

/// A door's name and the counters of its threads.
#[derive(Clone, Debug)]
pub(crate) struct DoorMetrics {
    pub(crate) door: &'static str,
    pub(crate) threads: Vec<Arc<DoorCounters>>,
}

impl DoorMetrics {
    fn sum(&self, of: impl Fn(&DoorCounters) -> &AtomicU64) -> u64 {
        self.threads.iter().map(|thread| of(thread).load(Ordering::Relaxed)).sum()
    }
}

/// Everything that `/metrics` shows.
pub(crate) struct Metrics {
    service: Arc<Service>,
    doors: Vec<DoorMetrics>,
}

impl Metrics {
    pub(crate) fn new(service: Arc<Service>, doors: Vec<DoorMetrics>) -> Metrics {
        Metrics { service, doors }
    }

    /// The page, in OpenMetrics' text format.
    pub(crate) fn render(&self) -> String {
        let (is_leader, term) = match self.service.role() {
            Role::Leader { term } => (true, term),
            Role::SteppedDown { seen } => (false, seen),
            Role::Member { number, groups, .. } => (groups > 0, number),
        };
        let page = Page {
            stats: self.service.stats(),
            doors: self.doors.clone(),
            is_leader,
            is_ready: self.service.is_ready(),
            term: term.get(),
        };
        page.render()
    }
}

/// The numbers of one moment.
#[derive(Debug, Default)]
struct Page {
    stats: MasterStats,
    doors: Vec<DoorMetrics>,
    is_leader: bool,
    is_ready: bool,
    term: u32,
}

/// Name, help, and where the number is.
type Column<F> = (&'static str, &'static str, F);
type TenantColumn = Column<fn(&TenantUsage) -> u64>;
type DoorColumn = Column<fn(&DoorCounters) -> &AtomicU64>;

type Number = Column<fn(&MasterStats) -> u64>;

/// What goes up and down.
const GAUGES: &[Number] = &[
    ("stored_objects", "Objects, those being written included", |s| s.objects),
    ("writing_objects", "Objects being written", |s| s.objects_writing),
    ("open_sessions", "Nodes with a session", |s| s.sessions),
    ("mounted_segments", "Segments in use", |s| s.segments),
    ("space_all_units", "Units of 512 bytes in all segments", |s| s.units),
    ("space_live_units", "Units of complete objects", |s| s.live_units),
    ("space_reserved_units", "Units of objects being written", |s| s.reserved_units),
    ("space_draining_units", "Units that nodes have not given back yet", |s| s.draining_units),
    ("space_free_units", "Free units", |s| s.free_units),
    ("header_all_slots", "Header slots in all segments", |s| s.slots),
    ("header_taken_slots", "Header slots in use", |s| s.taken_slots),
    ("index_memory_bytes", "Memory of the index", |s| s.memory_bytes),
    ("disk_only_objects", "Objects that are nowhere but on disks", |s| s.objects_on_disk),
    ("offloading_units", "Units of memory that are being written to disks", |s| s.offloading_units),
    ("disks_mounted", "Nodes with a disk", |s| s.disks),
    ("disks_closed", "Disks that take no more: full, or writes failed", |s| s.disks_closed),
    ("disk_used_bytes", "Bytes on disks", |s| s.disk_used_bytes),
    ("disk_limit_bytes", "Bytes that disks may hold", |s| s.disk_limit_bytes),
    ("outstanding_orders", "Orders that nodes have not answered yet", |s| s.orders_outstanding),
];

/// What only grows.
const COUNTERS: &[Number] = &[
    ("reads_requested_keys", "Keys that were to be read", |s| s.reads.requested),
    ("reads_memory_hits_keys", "Keys found in memory", |s| s.reads.memory_hits),
    ("reads_device_hits_keys", "Keys found in a GPU's memory", |s| s.reads.device_hits),
    ("reads_disk_hits_keys", "Keys found on disk", |s| s.reads.disk_hits),
    ("reads_misses_keys", "Keys that were not found or not ready", |s| s.reads.misses),
    ("reads_served_bytes", "Bytes that nodes have served", |s| s.reads.bytes),
    ("reads_corrupt_objects", "Reads that failed verification", |s| s.reads.corrupt),
    ("lookups_requested_keys", "Keys of GetReplicaList", |s| s.group.lookups.requested),
    ("lookups_not_ready_keys", "Keys of GetReplicaList that were being written", |s| {
        s.group.lookups.not_ready
    }),
    ("exist_requested_keys", "Keys of Exist", |s| s.group.lookups.exists),
    ("puts_started_objects", "Reservations made", |s| s.group.puts_started),
    ("puts_completed_objects", "Objects completed", |s| s.group.puts_completed),
    ("puts_expired_objects", "Reservations that ended by time", |s| s.group.puts_expired),
    ("puts_no_space_objects", "Puts refused for want of space", |s| s.group.puts_no_space),
    ("evicted_objects", "Objects evicted", |s| s.group.evicted_objects),
    ("evicted_bytes", "Bytes evicted, all replicas together", |s| s.group.evicted_bytes),
    ("expired_objects", "Objects whose time to live was over", |s| s.group.expired_objects),
    ("removed_objects", "Objects removed by a call or a job", |s| s.group.removed_objects),
    ("lost_objects", "Objects lost with the last node that had them", |s| s.group.lost_objects),
    ("offloads_ordered_objects", "Objects that nodes were told to write to disk", |s| {
        s.group.offloads_ordered
    }),
    ("offloaded_objects", "Objects that were written to disk", |s| s.group.offloaded_objects),
    ("demoted_objects", "Objects that left memory and stayed on disk", |s| s.group.demoted_objects),
    ("offloads_not_admitted_objects", "Objects evicted unwritten, because nobody had read them", |s| {
        s.group.offloads_not_admitted
    }),
    ("promoted_objects", "Objects brought back from disk to memory", |s| s.group.promoted_objects),
    ("recovered_objects", "Objects that nodes found on their disks at a start", |s| {
        s.group.recovered_objects
    }),
    ("disk_evicted_records", "Records that left a full disk", |s| s.group.disk_evicted),
    ("reclaimed_ranges", "Ranges that nodes have given back", |s| s.group.reclaimed),
    ("refused_orders", "Orders that nodes refused", |s| s.group.orders_refused),
    ("reported_records", "Records that nodes reported", |s| s.group.reported),
    ("reported_killed_records", "Reported records that were refused or superseded", |s| {
        s.group.reported_killed
    }),
];

impl Page {
    fn render(self) -> String {
        let mut registry = Registry::with_prefix(PREFIX);
        registry.register_collector(Box::new(self));
        let mut text = String::with_capacity(16 << 10);
        prometheus_client::encoding::text::encode(&mut text, &registry).expect("a String takes everything");
        text
    }
}

impl Collector for Page {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for (name, help, of) in GAUGES {
            gauge(&mut encoder, name, help, of(&self.stats))?;
        }
        gauge(
            &mut encoder,
            "role_leader",
            "1 while this master answers, 0 after it stepped down",
            self.is_leader.into(),
        )?;
        gauge(&mut encoder, "role_ready", "1 when this master is ready", self.is_ready.into())?;
        gauge(
            &mut encoder,
            "role_term",
            "This master's term, or the higher one that it has seen",
            self.term.into(),
        )?;
        for (name, help, of) in COUNTERS {
            let value = ConstCounter::new(of(&self.stats));
            value.encode(encoder.encode_descriptor(name, help, None, value.metric_type())?)?;
        }
        self.encode_tenants(&mut encoder)?;
        self.encode_doors(&mut encoder)
    }
}

impl Page {
    fn encode_tenants(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let tenants = &self.stats.tenants;
        let columns: [TenantColumn; 4] = [
            ("tenant_used_bytes", "Bytes live and reserved of a tenant", |t| t.bytes),
            ("tenant_used_objects", "Objects of a tenant", |t| t.objects),
            ("tenant_quota_bytes", "Most bytes of a tenant; 0 for no limit", |t| t.quota.bytes_max),
            ("tenant_quota_objects", "Most objects of a tenant; 0 for no limit", |t| t.quota.objects_max),
        ];
        for (name, help, of) in columns {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for tenant in tenants {
                family.encode_family(&[("tenant", &*tenant.name)])?.encode_gauge(&signed(of(tenant)))?;
            }
        }
        Ok(())
    }

    fn encode_doors(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let mut family = encoder.encode_descriptor(
            "handled_requests",
            "Requests by door and call",
            None,
            MetricType::Counter,
        )?;
        for door in &self.doors {
            for call in Call::ALL {
                let labels = [("door", door.door), ("call", call.name())];
                count(&mut family.encode_family(&labels)?, door.sum(|c| &c.requests[call as usize]))?;
            }
        }
        let mut family =
            encoder.encode_descriptor("open_connections", "Connections by door", None, MetricType::Gauge)?;
        for door in &self.doors {
            let open = door.sum(|c| &c.connections);
            family.encode_family(&[("door", door.door)])?.encode_gauge(&signed(open))?;
        }
        let columns: [DoorColumn; 4] = [
            ("refused_connections", "Connections beyond connections_max", |c| &c.connections_refused),
            ("door_errors", "Requests and connections that broke the protocol's rules", |c| &c.errors),
            ("door_read_bytes", "Bytes read", |c| &c.read_bytes),
            ("door_written_bytes", "Bytes written", |c| &c.written_bytes),
        ];
        for (name, help, of) in columns {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for door in &self.doors {
                count(&mut family.encode_family(&[("door", door.door)])?, door.sum(of))?;
            }
        }
        Ok(())
    }
}

fn gauge(encoder: &mut DescriptorEncoder<'_>, name: &str, help: &str, value: u64) -> fmt::Result {
    let value = ConstGauge::new(signed(value));
    value.encode(encoder.encode_descriptor(name, help, None, value.metric_type())?)
}

fn count(metric: &mut MetricEncoder<'_>, value: u64) -> fmt::Result {
    metric.encode_counter::<NoLabelSet, u64, u64>(&value, None)
}

/// The encoder's gauges are signed; no count of ours reaches 2⁶³.
fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::ReadSums;

    /// The value of the sample `name`, which stands once.
    fn sample(page: &str, name: &str) -> u64 {
        let mut found = page.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        let value = found.next().unwrap_or_else(|| panic!("{name} is missing in\n{page}"));
        assert!(found.next().is_none(), "{name} stands twice");
        value.parse().unwrap()
    }

    fn page() -> Page {
        let stats = MasterStats {
            units: 1111,
            live_units: 1000,
            reserved_units: 100,
            draining_units: 10,
            free_units: 1,
            reads: ReadSums {
                requested: 2222,
                memory_hits: 2000,
                device_hits: 200,
                disk_hits: 20,
                misses: 2,
                ..ReadSums::default()
            },
            tenants: vec![TenantUsage {
                name: "default".into(),
                quota: moontide_meta::Quota::default(),
                bytes: 7,
                objects: 3,
            }],
            ..MasterStats::default()
        };
        let doors = vec![DoorMetrics { door: "frame", threads: vec![Arc::default(), Arc::default()] }];
        doors[0].threads[0].request(Call::Exist);
        doors[0].threads[1].request(Call::Exist);
        Page { stats, doors, is_leader: true, is_ready: true, term: 5 }
    }

    #[test]
    fn sums_on_the_page_hold() {
        let page = page().render();
        let reads = |part: &str| sample(&page, &format!("moontide_master_reads_{part}_keys_total"));
        let hits = reads("memory_hits") + reads("device_hits") + reads("disk_hits");
        assert_eq!(hits + reads("misses"), reads("requested"));
        assert_eq!(reads("requested"), 2222);
        let units = |part: &str| sample(&page, &format!("moontide_master_space_{part}_units"));
        assert_eq!(units("live") + units("reserved") + units("draining") + units("free"), units("all"));
        assert_eq!(units("all"), 1111);
    }

    #[test]
    fn labels_and_threads_are_summed() {
        let page = page().render();
        let requests = "moontide_master_handled_requests_total{door=\"frame\",call=\"exist\"}";
        assert_eq!(sample(&page, requests), 2);
        assert_eq!(sample(&page, "moontide_master_tenant_used_bytes{tenant=\"default\"}"), 7);
        assert_eq!(sample(&page, "moontide_master_role_term"), 5);
        assert!(page.ends_with("# EOF\n"));
    }

    #[test]
    fn every_name_follows_the_rule_and_stands_once() {
        let page = page().render();
        let mut names: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
        assert!(names.iter().all(|name| name.starts_with("moontide_master_")), "{names:?}");
    }
}
