//! Admin HTTP server.
//!
//! | request | response |
//! |---|---|
//! | `GET /metrics` | Prometheus |
//! | `GET /health` | 200 while the process runs, with the address of the master and the state of the session |
//! | `GET /segments` | every segment with its grant and its usage |
//! | `GET /segments/{n}` | one segment with its records, at most 65,536 |
//!
//! A request must name this host in its `Host`: see [`AdminGuard`].
//!
//! Responses are JSON. Keys are bytes and shown as UTF-8, with a replacement character for invalid sequences; epochs,
//! which have 62 bits, are strings.

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{ConnectInfo, Path, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use moontide_auth::{ClientCertificates, Credentials};
use moontide_tasks::{
    ALPN_HTTP, AdminGuard, BoundedListener, ConnectionInfo, Protocol, TlsServer, call_of_page,
};
use moontide_types::limits::UNIT_BYTES;
use moontide_types::record::State as RecordState;
use moontide_types::{NodeId, SegmentId};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::logic::usage::UnitUsage;
use crate::memory::{NodeMemory, NodeSegment};
use crate::metrics::Metrics;

/// Maximum number of connections: a few scrapers, probes and operators, and as many of one host.
const CONNECTIONS_MAX: usize = 128;

/// Time without a byte of a response after which a connection is closed: a response takes seconds at most.
const ANSWER_MAX: Duration = Duration::from_secs(30);

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
    guard: AdminGuard,
    credentials: Option<Arc<Credentials>>,
    mut stop: watch::Receiver<bool>,
) -> std::io::Result<()> {
    let protocol = Protocol::Http1 { answer_max: ANSWER_MAX };
    let tls = TlsServer::new(credentials, ClientCertificates::Optional, ALPN_HTTP);
    let listener = BoundedListener::new(listener, CONNECTIONS_MAX, protocol, ()).with_tls(tls);
    axum::serve(listener, router(admin, guard).into_make_service_with_connect_info::<ConnectionInfo>())
        .with_graceful_shutdown(async move {
            // An error means that the node was dropped, which ends the server as well.
            let _ = stop.wait_for(|&stop| stop).await;
        })
        .await
}

fn router(admin: AdminState, guard: AdminGuard) -> Router {
    Router::new()
        .route("/metrics", get(metrics))
        .route("/health", get(health))
        .route("/segments", get(segments))
        .route("/segments/{segment}", get(segment))
        .fallback(async || failure("not found; try GET /metrics"))
        .layer(from_fn_with_state(Arc::new(guard), check_request))
        .with_state(Arc::new(admin))
}

/// Refuses requests that a page of another site may have caused, and callers that have no right to them.
async fn check_request(
    State(guard): State<Arc<AdminGuard>>,
    ConnectInfo(info): ConnectInfo<ConnectionInfo>,
    request: Request,
    next: Next,
) -> Response {
    let call = call_of_page(request.method(), request.uri().path());
    if let Err(denied) = info.caller().check(call) {
        return (StatusCode::FORBIDDEN, Json(json!({"message": denied.to_string()}))).into_response();
    }
    match guard.check(request.method(), request.uri(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(denied) => (StatusCode::FORBIDDEN, Json(json!({"message": denied.to_string()}))).into_response(),
    }
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
        "registered": status.registered,
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
