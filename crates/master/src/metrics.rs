//! [`Metrics`]: Prometheus metrics of a master, rendered by `/metrics`.
//!
//! Names are `moontide_master_<noun>_<unit>`; counters have the suffix `_total`. Two sums hold in every response:
//!
//! * reads: `read_memory_hits + read_device_hits + read_disk_hits + read_misses = read_keys` (`_total` each); local
//!   reads arrive with the heartbeats of the nodes, the others are lookups at the master;
//! * memory: `memory_live + memory_reserved + memory_draining + memory_free = memory_capacity` (`_bytes` each).

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use moontide_meta::TenantUsage;
use moontide_tasks::ConnectionObserver;
use moontide_types::limits::UNIT_BYTES;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric, MetricEncoder, NoLabelSet};
use prometheus_client::metrics::MetricType;
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::Registry;

use crate::service::{MasterStats, Role, Service};

/// Prefix of every name.
const PREFIX: &str = "moontide_master";

/// Methods with a separate request counter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Method {
    Exist,
    GetReplicaList,
    PutStart,
    PutEnd,
    Remove,
    Other,
}

impl Method {
    const ALL: [Method; 6] = [
        Method::Exist,
        Method::GetReplicaList,
        Method::PutStart,
        Method::PutEnd,
        Method::Remove,
        Method::Other,
    ];

    fn name(self) -> &'static str {
        match self {
            Method::Exist => "exist",
            Method::GetReplicaList => "get_replica_list",
            Method::PutStart => "put_start",
            Method::PutEnd => "put_end",
            Method::Remove => "remove",
            Method::Other => "other",
        }
    }
}

/// Counters of one thread of a server, in separate cache lines; the metrics sum them over the threads.
///
/// All orderings are Relaxed: no other data depends on the numbers.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct ServerCounters {
    requests: [AtomicU64; Method::ALL.len()],
    connections: AtomicU64,
    connections_refused: AtomicU64,
    errors: AtomicU64,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
}

impl ServerCounters {
    pub(crate) fn request(&self, method: Method) {
        self.requests[method as usize].fetch_add(1, Ordering::Relaxed);
    }

    /// Counts a request that failed with an error frame, or a connection that violated the protocol.
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

impl ConnectionObserver for ServerCounters {
    fn opened(&self) {
        ServerCounters::opened(self);
    }

    fn closed(&self) {
        ServerCounters::closed(self);
    }

    fn refused(&self) {
        ServerCounters::refused(self);
    }

    fn read(&self, bytes: usize) {
        ServerCounters::read(self, bytes);
    }

    fn written(&self, bytes: usize) {
        ServerCounters::written(self, bytes);
    }
}

/// Counters of the threads of one server.
#[derive(Clone, Debug)]
pub(crate) struct ServerMetrics {
    pub(crate) protocol: &'static str,
    pub(crate) threads: Vec<Arc<ServerCounters>>,
}

impl ServerMetrics {
    fn sum(&self, of: impl Fn(&ServerCounters) -> &AtomicU64) -> u64 {
        self.threads.iter().map(|thread| of(thread).load(Ordering::Relaxed)).sum()
    }
}

/// Source of all metrics.
pub(crate) struct Metrics {
    service: Arc<Service>,
    servers: Vec<ServerMetrics>,
}

impl Metrics {
    pub(crate) fn new(service: Arc<Service>, servers: Vec<ServerMetrics>) -> Metrics {
        Metrics { service, servers }
    }

    /// Renders all metrics in the OpenMetrics text format.
    pub(crate) fn render(&self) -> String {
        let (is_leader, term) = match self.service.role() {
            Role::Leader { term } => (true, term),
            Role::SteppedDown { seen } => (false, seen),
            Role::Member { number, groups, .. } => (groups > 0, number),
        };
        let snapshot = MetricsSnapshot {
            stats: self.service.stats(),
            servers: self.servers.clone(),
            is_leader,
            is_ready: self.service.is_ready(),
            term: term.get(),
        };
        snapshot.render()
    }
}

/// Values of all metrics at one time.
#[derive(Debug, Default)]
struct MetricsSnapshot {
    stats: MasterStats,
    servers: Vec<ServerMetrics>,
    is_leader: bool,
    is_ready: bool,
    term: u32,
}

/// Name, help text, and getter of the value.
type MetricColumn<F> = (&'static str, &'static str, F);
type TenantColumn = MetricColumn<fn(&TenantUsage) -> u64>;
type ServerColumn = MetricColumn<fn(&ServerCounters) -> &AtomicU64>;

type Number = MetricColumn<fn(&MasterStats) -> u64>;

/// Gauges.
const GAUGES: &[Number] = &[
    ("objects", "Objects, including those being written", |s| s.objects),
    ("objects_writing", "Objects being written", |s| s.objects_writing),
    ("node_sessions", "Nodes with a session", |s| s.sessions),
    ("segments", "Segments in use", |s| s.segments),
    ("memory_capacity_bytes", "Memory of all segments", |s| s.units * UNIT_BYTES),
    ("memory_live_bytes", "Memory of complete objects", |s| s.live_units * UNIT_BYTES),
    ("memory_reserved_bytes", "Memory of objects being written", |s| s.reserved_units * UNIT_BYTES),
    ("memory_draining_bytes", "Memory of removed objects that nodes have not freed yet", |s| {
        s.draining_units * UNIT_BYTES
    }),
    ("memory_free_bytes", "Free memory", |s| s.free_units * UNIT_BYTES),
    ("slots_capacity", "Header slots in all segments", |s| s.slots),
    ("slots_used", "Header slots in use", |s| s.used_slots),
    ("index_memory_bytes", "Memory of the index", |s| s.memory_bytes),
    ("objects_disk_only", "Objects that are only on disks", |s| s.objects_on_disk),
    ("offload_pending_bytes", "Memory that is being written to disks", |s| s.offloading_units * UNIT_BYTES),
    ("write_back_pending_objects", "Objects that are to be written to disk and stay in memory", |s| {
        s.write_back_objects
    }),
    ("write_back_pending_bytes", "Bytes of these objects", |s| s.write_back_bytes),
    (
        "objects_missing_stripes",
        "Objects that cannot be read until a node returns with a part of them",
        |s| s.objects_missing_stripes,
    ),
    (
        "objects_lacking_replicas",
        "Objects with fewer replicas than their writers asked for, at the last scan and not repaired since",
        |s| s.objects_lacking_replicas,
    ),
    ("hot_copies", "Replicas beyond those that writers asked for: of objects that are read much", |s| {
        s.hot_copies
    }),
    ("disks", "Nodes with a disk", |s| s.disks),
    ("disks_read_only", "Disks that accept no writes: full, or writes failed", |s| s.disks_read_only),
    ("disk_used_bytes", "Bytes in use on disks", |s| s.disk_used_bytes),
    ("disk_limit_bytes", "Capacity limit of all disks", |s| s.disk_limit_bytes),
    ("commands_pending", "Commands without a result from the node", |s| s.pending_commands),
];

/// Counters.
const COUNTERS: &[Number] = &[
    ("read_keys", "Keys of all reads, local and remote", |s| s.reads.requested),
    ("read_memory_hits", "Keys found in memory", |s| s.reads.memory_hits),
    ("read_device_hits", "Keys found in the memory of a GPU", |s| s.reads.device_hits),
    ("read_disk_hits", "Keys found on disk", |s| s.reads.disk_hits),
    ("read_misses", "Keys that were not found or not ready", |s| s.reads.misses),
    ("read_bytes", "Bytes served by nodes", |s| s.reads.bytes),
    ("read_corrupt", "Reads that failed verification", |s| s.reads.corrupt),
    ("lookup_keys", "Keys of GetReplicaList", |s| s.group.lookups.requested),
    ("lookup_not_ready_keys", "Keys of GetReplicaList that were being written", |s| {
        s.group.lookups.not_ready
    }),
    ("exist_keys", "Keys of Exist", |s| s.group.lookups.exists),
    ("puts_started", "Reservations made", |s| s.group.puts_started),
    ("puts_completed", "Objects completed", |s| s.group.puts_completed),
    ("puts_expired", "Reservations that expired", |s| s.group.puts_expired),
    ("puts_no_space", "Puts refused because of no space", |s| s.group.puts_no_space),
    ("evicted_objects", "Objects evicted", |s| s.group.evicted_objects),
    ("evicted_bytes", "Bytes evicted, of all replicas", |s| s.group.evicted_bytes),
    ("expired_objects", "Objects that expired by their TTL", |s| s.group.expired_objects),
    ("removed_objects", "Objects removed by a call or a job", |s| s.group.removed_objects),
    ("lost_objects", "Objects lost with their last replica", |s| s.group.lost_objects),
    ("offloads_started", "Offload commands for objects", |s| s.group.offloads_started),
    ("offloaded_objects", "Objects offloaded to disk", |s| s.group.offloaded_objects),
    (
        "write_backs_skipped",
        "Objects not written to disk after their put: queue full, or refused by the disk",
        |s| s.group.write_backs_skipped,
    ),
    ("demoted_objects", "Objects dropped from memory that remain on disk", |s| s.group.demoted_objects),
    ("offloads_not_admitted", "Objects evicted without offload, because they were never read", |s| {
        s.group.offloads_not_admitted
    }),
    ("promoted_objects", "Objects promoted from disk to memory", |s| s.group.promoted_objects),
    ("copies_started", "Copies of records commanded to nodes", |s| s.group.copies_started),
    ("copied_records", "Records copied from node to node", |s| s.group.copied_records),
    ("copied_bytes", "Memory of records copied from node to node", |s| s.group.copied_bytes),
    ("copies_failed", "Copies that nodes refused or could not make", |s| s.group.copies_failed),
    ("copies_released", "Replicas released because they were not read", |s| s.group.copies_released),
    ("recovered_objects", "Objects found on disks after a start of a node", |s| s.group.recovered_objects),
    ("disk_evicted_records", "Records evicted from full disks", |s| s.group.disk_evicted),
    ("reclaimed_extents", "Extents freed by nodes", |s| s.group.reclaimed),
    ("commands_refused", "Commands refused by nodes", |s| s.group.commands_refused),
    ("reported_records", "Records reported by nodes", |s| s.group.reported),
    ("reported_records_rejected", "Reported records that were rejected or superseded", |s| {
        s.group.reported_killed
    }),
];

impl MetricsSnapshot {
    fn render(self) -> String {
        let mut registry = Registry::with_prefix(PREFIX);
        registry.register_collector(Box::new(self));
        let mut text = String::with_capacity(16 << 10);
        prometheus_client::encoding::text::encode(&mut text, &registry)
            .expect("writing to a String cannot fail");
        text
    }
}

impl Collector for MetricsSnapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        for (name, help, of) in GAUGES {
            gauge(&mut encoder, name, help, of(&self.stats))?;
        }
        gauge(
            &mut encoder,
            "leader",
            "1 if this master serves, 0 if it stepped down or hosts no groups",
            self.is_leader.into(),
        )?;
        gauge(
            &mut encoder,
            "ready",
            "1 if this master serves and a node is registered",
            self.is_ready.into(),
        )?;
        gauge(
            &mut encoder,
            "term",
            "Term or id of this master; after stepping down the higher term",
            self.term.into(),
        )?;
        for (name, help, of) in COUNTERS {
            let value = ConstCounter::new(of(&self.stats));
            value.encode(encoder.encode_descriptor(name, help, None, value.metric_type())?)?;
        }
        self.encode_tenants(&mut encoder)?;
        self.encode_servers(&mut encoder)
    }
}

impl MetricsSnapshot {
    fn encode_tenants(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let tenants = &self.stats.tenants;
        let columns: [TenantColumn; 4] = [
            ("tenant_used_bytes", "Live and reserved bytes of a tenant", |t| t.bytes),
            ("tenant_used_objects", "Objects of a tenant", |t| t.objects),
            ("tenant_quota_bytes", "Byte quota of a tenant; 0 for no limit", |t| t.quota.bytes_max),
            ("tenant_quota_objects", "Object quota of a tenant; 0 for no limit", |t| t.quota.objects_max),
        ];
        for (name, help, of) in columns {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Gauge)?;
            for tenant in tenants {
                family.encode_family(&[("tenant", &*tenant.name)])?.encode_gauge(&signed(of(tenant)))?;
            }
        }
        Ok(())
    }

    fn encode_servers(&self, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
        let mut family = encoder.encode_descriptor(
            "requests",
            "Requests by protocol and method",
            None,
            MetricType::Counter,
        )?;
        for server in &self.servers {
            for method in Method::ALL {
                let labels = [("protocol", server.protocol), ("method", method.name())];
                count(&mut family.encode_family(&labels)?, server.sum(|c| &c.requests[method as usize]))?;
            }
        }
        let mut family =
            encoder.encode_descriptor("connections", "Connections by protocol", None, MetricType::Gauge)?;
        for server in &self.servers {
            let open = server.sum(|c| &c.connections);
            family.encode_family(&[("protocol", server.protocol)])?.encode_gauge(&signed(open))?;
        }
        let columns: [ServerColumn; 4] = [
            ("connections_rejected", "Connections rejected or closed because of connections_max", |c| {
                &c.connections_refused
            }),
            ("protocol_errors", "Requests and connections that violated the protocol", |c| &c.errors),
            ("received_bytes", "Bytes received", |c| &c.read_bytes),
            ("sent_bytes", "Bytes sent", |c| &c.written_bytes),
        ];
        for (name, help, of) in columns {
            let mut family = encoder.encode_descriptor(name, help, None, MetricType::Counter)?;
            for server in &self.servers {
                count(&mut family.encode_family(&[("protocol", server.protocol)])?, server.sum(of))?;
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

/// Converts a value for the encoder, whose gauges are signed; no value reaches 2⁶³.
fn signed(value: u64) -> i64 {
    i64::try_from(value).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::service::ReadTotals;

    /// Returns the value of the sample `name`, which must occur exactly once.
    fn sample(page: &str, name: &str) -> u64 {
        let mut found = page.lines().filter_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        let value = found.next().unwrap_or_else(|| panic!("{name} is missing in\n{page}"));
        assert!(found.next().is_none(), "{name} occurs twice");
        value.parse().unwrap()
    }

    fn snapshot() -> MetricsSnapshot {
        let stats = MasterStats {
            units: 1111,
            live_units: 1000,
            reserved_units: 100,
            draining_units: 10,
            free_units: 1,
            reads: ReadTotals {
                requested: 2222,
                memory_hits: 2000,
                device_hits: 200,
                disk_hits: 20,
                misses: 2,
                ..ReadTotals::default()
            },
            tenants: vec![TenantUsage {
                name: "default".into(),
                quota: moontide_meta::Quota::default(),
                bytes: 7,
                objects: 3,
            }],
            ..MasterStats::default()
        };
        let servers =
            vec![ServerMetrics { protocol: "frame", threads: vec![Arc::default(), Arc::default()] }];
        servers[0].threads[0].request(Method::Exist);
        servers[0].threads[1].request(Method::Exist);
        MetricsSnapshot { stats, servers, is_leader: true, is_ready: true, term: 5 }
    }

    #[test]
    fn metric_parts_sum_to_totals() {
        let page = snapshot().render();
        let reads = |part: &str| sample(&page, &format!("moontide_master_read_{part}_total"));
        let hits = reads("memory_hits") + reads("device_hits") + reads("disk_hits");
        assert_eq!(hits + reads("misses"), reads("keys"));
        assert_eq!(reads("keys"), 2222);
        let units = |part: &str| sample(&page, &format!("moontide_master_memory_{part}_bytes"));
        assert_eq!(units("live") + units("reserved") + units("draining") + units("free"), units("capacity"));
        assert_eq!(units("capacity"), 1111 * UNIT_BYTES);
    }

    #[test]
    fn metrics_are_summed_over_threads_per_label() {
        let page = snapshot().render();
        let requests = "moontide_master_requests_total{protocol=\"frame\",method=\"exist\"}";
        assert_eq!(sample(&page, requests), 2);
        assert_eq!(sample(&page, "moontide_master_tenant_used_bytes{tenant=\"default\"}"), 7);
        assert_eq!(sample(&page, "moontide_master_term"), 5);
        assert!(page.ends_with("# EOF\n"));
    }

    #[test]
    fn metric_names_are_unique_and_prefixed() {
        let page = snapshot().render();
        let mut names: Vec<&str> = page.lines().filter_map(|line| line.strip_prefix("# TYPE ")).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
        assert!(names.iter().all(|name| name.starts_with("moontide_master_")), "{names:?}");
    }
}
