//! [`Metrics`]: metrics of this crate.
//!
//! Invariants: every operation that was started is counted once in `ops`, under its outcome, when its batch ends;
//! `bytes` counts the bytes of the operations with outcome `ok`.

use std::sync::Arc;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use moontide_types::ErrorCode;

use crate::engine_kind::EngineKind;
use crate::error::ConnectionError;
use crate::op::Direction;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct EngineLabel {
    engine: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DirectionLabels {
    engine: &'static str,
    direction: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OutcomeLabels {
    engine: &'static str,
    direction: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabels {
    engine: &'static str,
    reason: &'static str,
}

/// Counters and gauges of a process that transfers.
#[derive(Debug)]
pub struct Metrics {
    /// Counters of `ops` and `bytes` for successful operations, which are frequent, by engine and direction.
    success: [[SuccessCounters; 2]; 3],
    /// The same for `served_ops` and `served_bytes`.
    served_success: [[SuccessCounters; 2]; 3],
    bytes: Family<DirectionLabels, Counter>,
    ops: Family<OutcomeLabels, Counter>,
    resubmitted: Family<EngineLabel, Counter>,
    links: Family<EngineLabel, Gauge>,
    connects_failed: Family<EngineLabel, Counter>,
    connections: Family<EngineLabel, Gauge>,
    connections_ended: Family<ReasonLabels, Counter>,
    served_bytes: Family<DirectionLabels, Counter>,
    served_ops: Family<OutcomeLabels, Counter>,
    served_connections: Family<EngineLabel, Gauge>,
    served_ended: Family<ReasonLabels, Counter>,
}

/// Counters of successful operations and their bytes: handles, so that the hot path does no label lookup.
#[derive(Clone, Debug)]
struct SuccessCounters {
    ops: Counter,
    bytes: Counter,
}

const ENGINES: [EngineKind; 3] = [EngineKind::Shm, EngineKind::Ucx, EngineKind::Tcp];
const DIRECTIONS: [Direction; 2] = [Direction::Get, Direction::Put];
const _: () = assert!(ENGINES[0] as usize == 0 && ENGINES[1] as usize == 1 && ENGINES[2] as usize == 2);
const _: () = assert!(DIRECTIONS[0] as usize == 0 && DIRECTIONS[1] as usize == 1);

fn success_counters(
    ops: &Family<OutcomeLabels, Counter>,
    bytes: &Family<DirectionLabels, Counter>,
) -> [[SuccessCounters; 2]; 3] {
    ENGINES.map(|engine| {
        DIRECTIONS.map(|direction| {
            let (engine, direction) = (engine.name(), direction.name());
            let outcome = name_of(Ok(()));
            SuccessCounters {
                ops: ops.get_or_create(&OutcomeLabels { engine, direction, outcome }).clone(),
                bytes: bytes.get_or_create(&DirectionLabels { engine, direction }).clone(),
            }
        })
    })
}

impl Metrics {
    /// Creates metrics that are not registered yet.
    pub fn new() -> Arc<Metrics> {
        let (bytes, ops, served_bytes, served_ops) = Default::default();
        Arc::new(Metrics {
            success: success_counters(&ops, &bytes),
            served_success: success_counters(&served_ops, &served_bytes),
            bytes,
            ops,
            resubmitted: Family::default(),
            links: Family::default(),
            connects_failed: Family::default(),
            connections: Family::default(),
            connections_ended: Family::default(),
            served_bytes,
            served_ops,
            served_connections: Family::default(),
            served_ended: Family::default(),
        })
    }

    /// Registers the metrics under `moontide_transfer_…`.
    pub fn register(&self, registry: &mut Registry) {
        let registry = registry.sub_registry_with_prefix("moontide_transfer");
        registry.register("bytes", "Bytes transferred, by engine and direction", self.bytes.clone());
        registry.register("ops", "Operations by engine, direction and outcome", self.ops.clone());
        registry.register(
            "frame_retries",
            "Frames sent again on another connection, by engine",
            self.resubmitted.clone(),
        );
        registry.register("links", "Open links to peers, by chosen engine", self.links.clone());
        registry.register(
            "connect_failures",
            "Links that could not be opened, by engine",
            self.connects_failed.clone(),
        );
        registry.register("connections", "Open connections to peers, by engine", self.connections.clone());
        registry.register(
            "connections_closed",
            "Closed connections to peers, by engine and reason",
            self.connections_ended.clone(),
        );
        registry.register(
            "served_bytes",
            "Bytes served to peers, by engine and direction as the peer sees it",
            self.served_bytes.clone(),
        );
        registry.register(
            "served_ops",
            "Operations served to peers, by engine, direction and outcome",
            self.served_ops.clone(),
        );
        registry.register(
            "served_connections",
            "Open connections from peers, by engine",
            self.served_connections.clone(),
        );
        registry.register(
            "served_connections_closed",
            "Closed connections from peers, by engine and reason",
            self.served_ended.clone(),
        );
    }

    pub(crate) fn op(
        &self,
        engine: EngineKind,
        direction: Direction,
        bytes: u64,
        outcome: Result<(), ErrorCode>,
    ) {
        if outcome.is_ok() {
            let counters = &self.success[engine as usize][direction as usize];
            counters.ops.inc();
            counters.bytes.inc_by(bytes);
            return;
        }
        let (engine, direction, outcome) = (engine.name(), direction.name(), name_of(outcome));
        self.ops.get_or_create(&OutcomeLabels { engine, direction, outcome }).inc();
    }

    pub(crate) fn served(
        &self,
        engine: EngineKind,
        direction: Direction,
        bytes: u64,
        outcome: Result<(), ErrorCode>,
    ) {
        if outcome.is_ok() {
            let counters = &self.served_success[engine as usize][direction as usize];
            counters.ops.inc();
            counters.bytes.inc_by(bytes);
            return;
        }
        let (engine, direction, outcome) = (engine.name(), direction.name(), name_of(outcome));
        self.served_ops.get_or_create(&OutcomeLabels { engine, direction, outcome }).inc();
    }

    pub(crate) fn resubmitted(&self, engine: EngineKind) {
        self.resubmitted.get_or_create(&EngineLabel { engine: engine.name() }).inc();
    }

    pub(crate) fn link_opened(&self, engine: EngineKind) {
        self.links.get_or_create(&EngineLabel { engine: engine.name() }).inc();
    }

    pub(crate) fn link_closed(&self, engine: EngineKind) {
        self.links.get_or_create(&EngineLabel { engine: engine.name() }).dec();
    }

    pub(crate) fn connect_failed(&self, engine: EngineKind) {
        self.connects_failed.get_or_create(&EngineLabel { engine: engine.name() }).inc();
    }

    pub(crate) fn connection_opened(&self, engine: EngineKind) {
        self.connections.get_or_create(&EngineLabel { engine: engine.name() }).inc();
    }

    pub(crate) fn connection_ended(&self, engine: EngineKind, error: &ConnectionError) {
        let engine = engine.name();
        self.connections.get_or_create(&EngineLabel { engine }).dec();
        self.connections_ended.get_or_create(&ReasonLabels { engine, reason: error.name() }).inc();
    }

    pub(crate) fn served_opened(&self, engine: EngineKind) {
        self.served_connections.get_or_create(&EngineLabel { engine: engine.name() }).inc();
    }

    pub(crate) fn served_ended(&self, engine: EngineKind, error: &ConnectionError) {
        let engine = engine.name();
        self.served_connections.get_or_create(&EngineLabel { engine }).dec();
        self.served_ended.get_or_create(&ReasonLabels { engine, reason: error.name() }).inc();
    }
}

fn name_of(outcome: Result<(), ErrorCode>) -> &'static str {
    match outcome {
        Ok(()) => "ok",
        Err(code) => code.name(),
    }
}
