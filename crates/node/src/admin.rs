//! The HTTP page for operators.
//!
//! | request | answer |
//! |---|---|
//! | `GET /metrics` | Prometheus |
//! | `GET /health` | 200 while the process lives, with where its master is and how it stands with it |
//! | `GET /segments` | every segment with its grant and its space |
//! | `GET /segments/{n}` | one segment with every record in it, 65,536 at most |
//!
//! Answers are JSON. Keys are bytes and shown as UTF-8, with a replacement character for what is none; epochs, which
//! have 62 bits, are text.

mod seats;

use std::sync::Arc;

use axum::extract::{Path, State};
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router};
use moontide_types::bounds::UNIT_BYTES;
use moontide_types::record::State as Phase;
use moontide_types::{NodeId, SegmentId};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::decide::books::Usage;
use crate::memory::{Memory, Side};
use crate::metrics::Metrics;
use seats::SeatedListener;

/// Records in one answer: a page that a browser can still show.
const RECORDS_MAX: usize = 65_536;

/// What handlers share.
#[derive(Debug)]
pub(crate) struct Page {
    pub(crate) node: NodeId,
    pub(crate) master: String,
    pub(crate) metrics: Metrics,
}

type Shared = State<Arc<Page>>;

/// Serves until `stop` becomes true.
pub(crate) async fn serve(
    listener: TcpListener,
    page: Page,
    mut stop: watch::Receiver<bool>,
) -> std::io::Result<()> {
    axum::serve(SeatedListener::new(listener), router(page))
        .with_graceful_shutdown(async move {
            // An error means that the node is gone, which is the end as well.
            let _ = stop.wait_for(|&stop| stop).await;
        })
        .await
}

fn router(page: Page) -> Router {
    Router::new()
        .route("/metrics", get(metrics))
        .route("/health", get(health))
        .route("/segments", get(segments))
        .route("/segments/{segment}", get(segment))
        .fallback(async || failure("there is no such page; GET /metrics is one"))
        .with_state(Arc::new(page))
}

fn failure(message: &str) -> Response {
    (StatusCode::NOT_FOUND, Json(json!({"message": message}))).into_response()
}

async fn metrics(State(page): Shared) -> Response {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], page.metrics.render()).into_response()
}

async fn health(State(page): Shared) -> Json<Value> {
    let standing = page.metrics.status.get();
    Json(json!({
        "status": "ok",
        "node": page.node.0.to_string(),
        "master": page.master,
        "mounted": standing.mounted,
        "session": standing.session.map(|session| session.0.to_string()),
        "term": standing.term.get(),
        "index_open": page.metrics.keeper.is_open(),
        "trouble": standing.trouble,
    }))
}

async fn segments(State(page): Shared) -> Json<Value> {
    let segments: Vec<Value> = page.metrics.memory.sides().iter().map(shape).collect();
    Json(json!({"node": page.node.0.to_string(), "segments": segments}))
}

fn shape(side: &Side) -> Value {
    let (shape, grant) = (side.segment().shape(), side.grant());
    let Usage { live_units, writing_units, draining_units, free_units, free_slots, .. } = side.usage();
    json!({
        "segment": shape.segment.0,
        "generation": shape.generation.0.to_string(),
        "group": grant.map(|(group, _)| group.0),
        "term": grant.map(|(_, term)| term.get()),
        "draining": side.is_closed(),
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

async fn segment(State(page): Shared, Path(number): Path<String>) -> Response {
    let memory = Arc::clone(&page.metrics.memory);
    let Some(number) = number.parse().ok().map(SegmentId).filter(|n| memory.side(*n).is_some()) else {
        return failure("there is no such segment; GET /segments lists them");
    };
    // A look at every header, under the segment's lock: not on a thread that others wait for.
    match tokio::task::spawn_blocking(move || inspect(&memory, number)).await {
        Ok(Some(segment)) => Json(segment).into_response(),
        Ok(None) | Err(_) => failure("the segment is gone"),
    }
}

fn inspect(memory: &Memory, number: SegmentId) -> Option<Value> {
    let side = memory.side(number)?;
    let mut segment = shape(side);
    let (mut records, mut truncated) = (Vec::new(), false);
    side.segment().for_each_record(|slot, header, trailer| {
        if records.len() == RECORDS_MAX {
            truncated = true;
            return;
        }
        let state = match header.word.state() {
            Phase::Free => "free",
            Phase::Writing => "writing",
            Phase::Ready => "ready",
            Phase::Dead => "dead",
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
