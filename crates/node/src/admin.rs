//! Admin HTTP server.
//!
//! | request | response |
//! |---|---|
//! | `GET /metrics` | Prometheus |
//! | `GET /health` | 200 while the process runs, with the address of the master and the state of the session |
//! | `GET /segments` | every segment with its grant and its usage |
//! | `GET /segments/{n}` | one segment with its records, at most 65,536 |
//!
//! Responses are JSON. Keys are bytes and shown as UTF-8, with a replacement character for invalid sequences; epochs,
//! which have 62 bits, are strings.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use moontide_tasks::BoundedListener;
use moontide_types::limits::UNIT_BYTES;
use moontide_types::record::State as RecordState;
use moontide_types::{NodeId, SegmentId};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::logic::usage::UnitUsage;
use crate::memory::{NodeMemory, NodeSegment};
use crate::metrics::Metrics;

/// Maximum number of connections: a few scrapers, probes and operators.
const CONNECTIONS_MAX: usize = 64;

/// Time without data after which a connection is closed, to free its permit.
const IDLE_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum number of records in one response: a browser can still show it.
const RECORDS_MAX: usize = 65_536;

/// State that the handlers share.
#[derive(Debug)]
pub(crate) struct AdminState {
    pub(crate) node: NodeId,
    pub(crate) master: String,
    pub(crate) metrics: Metrics,
}

type Shared = State<Arc<AdminState>>;

/// Serves until `stop` becomes true.
pub(crate) async fn serve(
    listener: TcpListener,
    admin: AdminState,
    mut stop: watch::Receiver<bool>,
) -> std::io::Result<()> {
    let listener = BoundedListener::new(listener, CONNECTIONS_MAX, (), Some(IDLE_TIMEOUT));
    axum::serve(listener, router(admin))
        .with_graceful_shutdown(async move {
            // An error means that the node was dropped, which ends the server as well.
            let _ = stop.wait_for(|&stop| stop).await;
        })
        .await
}

fn router(admin: AdminState) -> Router {
    Router::new()
        .route("/metrics", get(metrics))
        .route("/health", get(health))
        .route("/segments", get(segments))
        .route("/segments/{segment}", get(segment))
        .fallback(async || failure("not found; try GET /metrics"))
        .with_state(Arc::new(admin))
}

fn failure(message: &str) -> Response {
    (StatusCode::NOT_FOUND, Json(json!({"message": message}))).into_response()
}

async fn metrics(State(admin): Shared) -> Response {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], admin.metrics.render()).into_response()
}

async fn health(State(admin): Shared) -> Json<Value> {
    let status = admin.metrics.status.get();
    Json(json!({
        "status": "ok",
        "node": admin.node.to_string(),
        "master": admin.master,
        "mounted": status.mounted,
        "session": status.session.map(|session| session.0.to_string()),
        "term": status.term.get(),
        "local_index_open": admin.metrics.index_gate.is_open(),
        "last_error": status.last_error,
    }))
}

async fn segments(State(admin): Shared) -> Json<Value> {
    let segments: Vec<Value> = admin.metrics.memory.segments().iter().map(describe).collect();
    Json(json!({"node": admin.node.to_string(), "segments": segments}))
}

fn describe(node_segment: &NodeSegment) -> Value {
    let (shape, grant) = (node_segment.segment().shape(), node_segment.grant());
    let UnitUsage { live_units, writing_units, draining_units, free_units, free_slots, .. } =
        node_segment.usage();
    json!({
        "segment": shape.segment.0,
        "generation": shape.generation.0.to_string(),
        "group": grant.map(|(group, _)| group.0),
        "term": grant.map(|(_, term)| term.get()),
        "draining": node_segment.is_closed(),
        "unit_bytes": UNIT_BYTES,
        "units": shape.units,
        "live_units": live_units,
        "writing_units": writing_units,
        "draining_units": draining_units,
        "free_units": free_units,
        "slots": shape.slots,
        "free_slots": free_slots,
    })
}

async fn segment(State(admin): Shared, Path(number): Path<String>) -> Response {
    let memory = Arc::clone(&admin.metrics.memory);
    let Some(number) = number.parse().ok().map(SegmentId).filter(|n| memory.segment(*n).is_some()) else {
        return failure("no such segment; GET /segments lists them");
    };
    // The scan of all headers takes the segment's lock: not on a runtime thread.
    match tokio::task::spawn_blocking(move || inspect(&memory, number)).await {
        Ok(Some(segment)) => Json(segment).into_response(),
        Ok(None) | Err(_) => failure("segment not found"),
    }
}

fn inspect(memory: &NodeMemory, number: SegmentId) -> Option<Value> {
    let node_segment = memory.segment(number)?;
    let mut segment = describe(node_segment);
    let (mut records, mut truncated) = (Vec::new(), false);
    node_segment.segment().for_each_record(|slot, header, trailer| {
        if records.len() == RECORDS_MAX {
            truncated = true;
            return;
        }
        let state = match header.word.state() {
            RecordState::Free => "free",
            RecordState::Writing => "writing",
            RecordState::Ready => "ready",
            RecordState::Dead => "dead",
        };
        let units = header.layout().map_or(0, |layout| layout.units());
        records.push(json!({
            "slot": slot.0,
            "state": state,
            "epoch": header.word.epoch().to_string(),
            "id": format!("{:032x}", u128::from_be_bytes(header.id.0)),
            "tenant": trailer.map(|trailer| trailer.tenant.as_str()),
            "key": trailer.map(|trailer| String::from_utf8_lossy(trailer.key.as_bytes())),
            "extent_start": header.payload_offset / UNIT_BYTES,
            "extent_units": units,
            "stripe_index": header.stripe_index,
            "stripe_count": header.stripe_count,
            "length": header.stripe_len,
            "object_length": header.object_len,
        }));
    });
    segment["records"] = Value::Array(records);
    segment["truncated"] = truncated.into();
    Some(segment)
}
