//! [`Metrics`]: what this crate counts.
//!
//! Sums that hold: every operation that was started is counted once in `ops`, under its outcome, when its batch ends;
//! `bytes` are those of the operations with outcome `ok`.

use std::sync::Arc;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use moontide_types::ErrorCode;

use crate::engine::EngineKind;
use crate::error::Failure;
use crate::op::Direction;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct OfEngine {
    engine: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Way {
    engine: &'static str,
    direction: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Outcome {
    engine: &'static str,
    direction: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct Why {
    engine: &'static str,
    why: &'static str,
}

/// Counters and gauges of a process that transfers.
#[derive(Debug)]
pub struct Metrics {
    /// Of [`Metrics::ops`] and [`Metrics::bytes`], by engine and direction: those that go well, which are many.
    well: [[Well; 2]; 3],
    /// The same, served.
    served_well: [[Well; 2]; 3],
    bytes: Family<Way, Counter>,
    ops: Family<Outcome, Counter>,
    resubmitted: Family<OfEngine, Counter>,
    links: Family<OfEngine, Gauge>,
    connects_failed: Family<OfEngine, Counter>,
    connections: Family<OfEngine, Gauge>,
    connections_ended: Family<Why, Counter>,
    served_bytes: Family<Way, Counter>,
    served_ops: Family<Outcome, Counter>,
    served_connections: Family<OfEngine, Gauge>,
    served_ended: Family<Why, Counter>,
}

/// Operations that went well, and their bytes: handles, so that nothing is looked up for them.
#[derive(Clone, Debug)]
struct Well {
    ops: Counter,
    bytes: Counter,
}

const ENGINES: [EngineKind; 3] = [EngineKind::Shm, EngineKind::Ucx, EngineKind::Tcp];
const DIRECTIONS: [Direction; 2] = [Direction::Get, Direction::Put];
const _: () = assert!(ENGINES[0] as usize == 0 && ENGINES[1] as usize == 1 && ENGINES[2] as usize == 2);
const _: () = assert!(DIRECTIONS[0] as usize == 0 && DIRECTIONS[1] as usize == 1);

fn well(ops: &Family<Outcome, Counter>, bytes: &Family<Way, Counter>) -> [[Well; 2]; 3] {
    ENGINES.map(|engine| {
        DIRECTIONS.map(|direction| {
            let (engine, direction) = (engine.name(), direction.name());
            let outcome = name_of(Ok(()));
            Well {
                ops: ops.get_or_create(&Outcome { engine, direction, outcome }).clone(),
                bytes: bytes.get_or_create(&Way { engine, direction }).clone(),
            }
        })
    })
}

impl Metrics {
    /// Metrics that nobody reads yet.
    pub fn new() -> Arc<Metrics> {
        let (bytes, ops, served_bytes, served_ops) = Default::default();
        Arc::new(Metrics {
            well: well(&ops, &bytes),
            served_well: well(&served_ops, &served_bytes),
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

    /// Adds them to a registry, under `moontide_transfer_…`.
    pub fn register(&self, registry: &mut Registry) {
        let registry = registry.sub_registry_with_prefix("moontide_transfer");
        registry.register("bytes", "Bytes that arrived, by engine and direction", self.bytes.clone());
        registry.register("ops", "Operations by engine, direction and outcome", self.ops.clone());
        registry.register(
            "resubmitted",
            "Frames that were sent again on another connection, by engine",
            self.resubmitted.clone(),
        );
        registry.register(
            "links",
            "Peers that are reached, by the engine that was chosen",
            self.links.clone(),
        );
        registry.register(
            "connects_failed",
            "Links that an engine could not open, by engine",
            self.connects_failed.clone(),
        );
        registry.register("connections", "Connections that are open, by engine", self.connections.clone());
        registry.register(
            "connections_ended",
            "Connections that ended, by engine and reason",
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
            "Connections of peers that are open, by engine",
            self.served_connections.clone(),
        );
        registry.register(
            "served_ended",
            "Connections of peers that ended, by engine and reason",
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
            let well = &self.well[engine as usize][direction as usize];
            well.ops.inc();
            well.bytes.inc_by(bytes);
            return;
        }
        let (engine, direction, outcome) = (engine.name(), direction.name(), name_of(outcome));
        self.ops.get_or_create(&Outcome { engine, direction, outcome }).inc();
    }

    pub(crate) fn served(
        &self,
        engine: EngineKind,
        direction: Direction,
        bytes: u64,
        outcome: Result<(), ErrorCode>,
    ) {
        if outcome.is_ok() {
            let well = &self.served_well[engine as usize][direction as usize];
            well.ops.inc();
            well.bytes.inc_by(bytes);
            return;
        }
        let (engine, direction, outcome) = (engine.name(), direction.name(), name_of(outcome));
        self.served_ops.get_or_create(&Outcome { engine, direction, outcome }).inc();
    }

    pub(crate) fn resubmitted(&self, engine: EngineKind) {
        self.resubmitted.get_or_create(&OfEngine { engine: engine.name() }).inc();
    }

    pub(crate) fn link_opened(&self, engine: EngineKind) {
        self.links.get_or_create(&OfEngine { engine: engine.name() }).inc();
    }

    pub(crate) fn link_closed(&self, engine: EngineKind) {
        self.links.get_or_create(&OfEngine { engine: engine.name() }).dec();
    }

    pub(crate) fn connect_failed(&self, engine: EngineKind) {
        self.connects_failed.get_or_create(&OfEngine { engine: engine.name() }).inc();
    }

    pub(crate) fn connection_opened(&self, engine: EngineKind) {
        self.connections.get_or_create(&OfEngine { engine: engine.name() }).inc();
    }

    pub(crate) fn connection_ended(&self, engine: EngineKind, why: &Failure) {
        let engine = engine.name();
        self.connections.get_or_create(&OfEngine { engine }).dec();
        self.connections_ended.get_or_create(&Why { engine, why: why.name() }).inc();
    }

    pub(crate) fn served_opened(&self, engine: EngineKind) {
        self.served_connections.get_or_create(&OfEngine { engine: engine.name() }).inc();
    }

    pub(crate) fn served_ended(&self, engine: EngineKind, why: &Failure) {
        let engine = engine.name();
        self.served_connections.get_or_create(&OfEngine { engine }).dec();
        self.served_ended.get_or_create(&Why { engine, why: why.name() }).inc();
    }
}

fn name_of(outcome: Result<(), ErrorCode>) -> &'static str {
    match outcome {
        Ok(()) => "ok",
        Err(code) => code.name(),
    }
}
