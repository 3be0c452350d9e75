//! The HTTP door for operators: metrics, health, and what is where.
//!
//! | request | answer |
//! |---|---|
//! | `GET /metrics` | Prometheus |
//! | `GET /health` | 200 while the process lives |
//! | `GET /ready` | 200 when it serves, 503 before and after |
//! | `GET /role` | leader or stepped down, with the term |
//! | `GET /get_all_segments` | every segment with its state |
//! | `GET /get_all_keys?tenant=&prefix=&cursor=&limit=` | keys, page by page |
//! | `GET /query_key?key=&tenant=` | everything about one key |
//! | `GET /batch_query_keys?keys=a,b&tenant=` | about several; a comma in a key is written `%2C` |
//! | `POST /batch_query_keys?tenant=` | the same, with a JSON list of keys as body |
//! | `POST /segments/{node}/{segment}/drain?evict=` | starts a job: moves everything away, or evicts it |
//! | `GET /jobs/{job}` | how far a job is |
//!
//! Answers are JSON; with `?format=text` or `Accept: text/plain` the two listings are plain lines. Keys are bytes and
//! shown as [`text`] says: percent-decoding gives them back. A page that is not the last names the next one in
//! `next_cursor`, in plain text in the header `moontide-next-cursor`. Failures are
//! `{"code", "name", "message", "hint"}` with a fitting status.

mod answer;
mod text;

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, Path, RawQuery, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use bytes::Bytes;
use moontide_proto::{Codes, PackedKeys, PackedKeysBuilder, v1};
use moontide_types::bounds::{BATCH_KEYS_MAX, REQUEST_BYTES_MAX};
use moontide_types::{ErrorCode, Key};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::metrics::{DoorCounters, Metrics};
use crate::seats::SeatedListener;
use crate::service::{NodeInfo, Role, Service};
use answer::{Failure, Job, Object, Segment, check};
use text::{Query, decode_value, from_hex, hex, show_key, unescape};

/// A few scrapers, probes and people.
const CONNECTIONS_MAX: usize = 256;

/// A connection that says nothing for so long is closed: it takes a seat.
const IDLE_MAX: Duration = Duration::from_secs(10);

/// How long a call of this door may take.
const DEADLINE_MS: u32 = 10_000;

/// Keys of a page unless told otherwise.
const KEYS_DEFAULT: usize = BATCH_KEYS_MAX;

/// Most keys in one answer: some megabytes of text.
const KEYS_MAX: usize = 16 * BATCH_KEYS_MAX;

/// Most segments in one answer: as many as a node may have, which is more than a cluster has.
const SEGMENTS_MAX: usize = 65_536;

/// Where the next page begins, for answers that are not JSON.
const NEXT_CURSOR: HeaderName = HeaderName::from_static("moontide-next-cursor");

/// What handlers share.
struct Door {
    service: Arc<Service>,
    metrics: Metrics,
}

type Shared = State<Arc<Door>>;

/// Serves until `stop` becomes true.
pub(crate) async fn serve(
    listener: TcpListener,
    service: Arc<Service>,
    metrics: Metrics,
    counters: Arc<DoorCounters>,
    mut stop: watch::Receiver<bool>,
) -> std::io::Result<()> {
    let listener = SeatedListener::new(listener, CONNECTIONS_MAX, counters, Some(IDLE_MAX));
    axum::serve(listener, router(Door { service, metrics }))
        .with_graceful_shutdown(async move {
            // An error means that the server is gone, which is the end as well.
            let _ = stop.wait_for(|&stop| stop).await;
        })
        .await
}

fn router(door: Door) -> Router {
    Router::new()
        .route("/metrics", get(metrics))
        .route("/health", get(async || Json(json!({"status": "ok"}))))
        .route("/ready", get(ready))
        .route("/role", get(role))
        .route("/get_all_nodes", get(get_all_nodes))
        .route("/get_all_segments", get(get_all_segments))
        .route("/get_all_keys", get(get_all_keys))
        .route("/query_key", get(query_key))
        .route("/batch_query_keys", get(batch_query_keys).post(batch_query_keys_of_list))
        .route("/segments/{node}/{segment}/drain", post(drain))
        .route("/jobs/{job}", get(job))
        .fallback(async || Failure::new(ErrorCode::NotFound, "there is no such page; GET /metrics is one"))
        .layer(DefaultBodyLimit::max(REQUEST_BYTES_MAX))
        .with_state(Arc::new(door))
}

// ---------------------------------------------------------------------------------------------------- state

async fn metrics(State(door): Shared) -> Response {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], door.metrics.render()).into_response()
}

async fn ready(State(door): Shared) -> Response {
    if door.service.is_ready() {
        Json(json!({"status": "ready"})).into_response()
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"status": "not ready"}))).into_response()
    }
}

async fn role(State(door): Shared) -> Json<Value> {
    Json(match door.service.role() {
        Role::Leader { term } => json!({"role": "leader", "term": term.get()}),
        Role::SteppedDown { seen } => json!({"role": "stepped_down", "seen_term": seen.get()}),
        Role::Member { number, groups, confirmed } => {
            let role = if groups > 0 { "leader" } else { "standby" };
            json!({"role": role, "number": number.get(), "groups": groups, "confirmed": confirmed})
        }
    })
}

// ------------------------------------------------------------------------------------------------- listings

/// The nodes that are registered; there are some thousands at most, so that one page holds them.
async fn get_all_nodes(State(door): Shared) -> Json<Value> {
    let node = |info: &NodeInfo| {
        let [host, rack, zone] = &info.labels;
        let addresses =
            info.addresses.iter().map(|(engine, address)| json!({"engine": engine, "address": address}));
        json!({
            "node": info.node.0.to_string(),
            "session": info.session.0.to_string(),
            "host": host,
            "rack": rack,
            "zone": zone,
            "addresses": addresses.collect::<Vec<_>>(),
            "orders_outstanding": info.orders_outstanding,
        })
    };
    Json(json!({"nodes": door.service.nodes().iter().map(node).collect::<Vec<_>>()}))
}

async fn get_all_segments(
    State(door): Shared,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Result<Response, Failure> {
    let query = Query(query.as_deref().unwrap_or_default());
    let mut segments: Vec<Segment> = Vec::new();
    let mut cursor = cursor_of(query)?;
    loop {
        let page = Some(v1::Page { cursor, limit: BATCH_KEYS_MAX as u32 }); // 4,096
        let request = v1::ListSegmentsRequest { context: context(query)?, page, node: 0 };
        let response = door.service.list_segments(&request);
        check(response.context.as_ref(), "listing segments")?;
        segments.extend(response.segments.iter().map(Segment::of));
        cursor = response.next_cursor;
        if cursor.is_empty() || segments.len() >= SEGMENTS_MAX {
            break;
        }
    }
    if wants_text(query, &headers) {
        let lines = segments.iter().map(|segment| format!("{}/{}", segment.node, segment.segment));
        return Ok(lines_of(lines, &cursor));
    }
    Ok(Json(json!({"segments": segments, "next_cursor": shown_cursor(&cursor)})).into_response())
}

async fn get_all_keys(
    State(door): Shared,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Result<Response, Failure> {
    let query = Query(query.as_deref().unwrap_or_default());
    let limit = match query.raw("limit") {
        None => KEYS_DEFAULT,
        Some(raw) => number::<usize>(raw, "limit")?.clamp(1, KEYS_MAX),
    };
    let prefix: Bytes = value(query, "prefix")?.unwrap_or_default().into();
    let mut keys: Vec<String> = Vec::new();
    let mut cursor = cursor_of(query)?;
    loop {
        let wanted = (limit - keys.len()).min(BATCH_KEYS_MAX) as u32; // ≤ 4,096
        let page = Some(v1::Page { cursor, limit: wanted });
        let request = v1::ListKeysRequest { context: context(query)?, page, prefix: prefix.clone() };
        let response = door.service.list_keys(&request);
        check(response.context.as_ref(), "listing keys")?;
        let packed = PackedKeys::decode(&response.keys).map_err(|error| broken(&error))?;
        keys.extend(packed.iter().map(|key| show_key(key.as_bytes())));
        cursor = response.next_cursor;
        if cursor.is_empty() || keys.len() >= limit {
            break;
        }
        // A prefix that few keys have takes many rounds; others use this thread, too.
        tokio::task::yield_now().await;
    }
    if wants_text(query, &headers) {
        return Ok(lines_of(keys.into_iter(), &cursor));
    }
    Ok(Json(json!({"keys": keys, "next_cursor": shown_cursor(&cursor)})).into_response())
}

/// Plain lines.
fn lines_of(lines: impl Iterator<Item = String>, cursor: &[u8]) -> Response {
    let text: String = lines.map(|line| line + "\n").collect();
    let mut response = ([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], text).into_response();
    if let Some(cursor) = shown_cursor(cursor) {
        let cursor = HeaderValue::try_from(cursor).expect("hexadecimal digits can stand in a header");
        response.headers_mut().insert(NEXT_CURSOR, cursor);
    }
    response
}

// ----------------------------------------------------------------------------------------------------- keys

async fn query_key(State(door): Shared, RawQuery(query): RawQuery) -> Result<Response, Failure> {
    let query = Query(query.as_deref().unwrap_or_default());
    let key = value(query, "key")?.ok_or_else(|| Failure::argument("name the key: /query_key?key=…"))?;
    let answers = query_keys(&door, query, &[key])?;
    match answers.into_iter().next() {
        Some((_, Ok(object))) => Ok(Json(object).into_response()),
        Some((key, Err(code))) => Err(Failure::new(code, format!("key {key:?}: {}", code.name()))),
        None => Err(Failure::new(ErrorCode::Internal, "one key was asked for, none was answered")),
    }
}

async fn batch_query_keys(State(door): Shared, RawQuery(query): RawQuery) -> Result<Response, Failure> {
    let query = Query(query.as_deref().unwrap_or_default());
    let raw =
        query.raw("keys").ok_or_else(|| Failure::argument("name the keys: /batch_query_keys?keys=a,b"))?;
    // Commas first: one that belongs to a key is still escaped.
    let keys =
        raw.split(|&byte| byte == b',').map(|key| decode_value(key).ok_or_else(|| wrong_escape("keys")));
    batch(&door, query, &keys.collect::<Result<Vec<_>, _>>()?)
}

async fn batch_query_keys_of_list(
    State(door): Shared,
    RawQuery(query): RawQuery,
    body: Bytes,
) -> Result<Response, Failure> {
    let query = Query(query.as_deref().unwrap_or_default());
    let keys: Vec<String> = serde_json::from_slice(&body)
        .map_err(|error| Failure::argument(format!("the body must be a JSON list of keys: {error}")))?;
    let keys = keys.iter().map(|key| unescape(key.as_bytes()).ok_or_else(|| wrong_escape("a key")));
    batch(&door, query, &keys.collect::<Result<Vec<_>, _>>()?)
}

/// An object per key, or an error.
fn batch(door: &Door, query: Query<'_>, keys: &[Vec<u8>]) -> Result<Response, Failure> {
    let answers = query_keys(door, query, keys)?;
    let answers = answers.into_iter().map(|(key, answer)| match answer {
        Ok(object) => json!({"key": key, "ok": true, "object": object}),
        Err(code) => json!({"key": key, "ok": false, "code": code as u16, "name": code.name()}),
    });
    Ok(Json(json!({"keys": answers.collect::<Vec<_>>()})).into_response())
}

/// A key as it is shown, and the object or why there is none.
type Queried = (String, Result<Object, ErrorCode>);

fn query_keys(door: &Door, query: Query<'_>, keys: &[Vec<u8>]) -> Result<Vec<Queried>, Failure> {
    if keys.len() > BATCH_KEYS_MAX {
        return Err(Failure::new(
            ErrorCode::TooLarge,
            format!("{} keys, at most {BATCH_KEYS_MAX}", keys.len()),
        ));
    }
    let mut packed = PackedKeysBuilder::new();
    for key in keys {
        let key = Key::new(key).map_err(|error| Failure::argument(error.to_string()))?;
        packed.push(key).map_err(|error| Failure::new(ErrorCode::TooLarge, error.to_string()))?;
    }
    let request = v1::QueryKeysRequest { context: context(query)?, keys: packed.finish().into() };
    let response = door.service.query_keys(&request);
    check(response.context.as_ref(), "querying keys")?;
    let codes = Codes::decode(&response.codes, BATCH_KEYS_MAX).map_err(|error| broken(&error))?;
    let mut details = response.details.iter();
    let answers = keys.iter().zip(codes.iter()).map(|(key, code)| {
        let answer = match code {
            Some(code) => Err(code),
            None => details.next().map(Object::of).ok_or(ErrorCode::Internal),
        };
        (show_key(key), answer)
    });
    Ok(answers.collect())
}

// ----------------------------------------------------------------------------------------------------- jobs

async fn drain(
    State(door): Shared,
    Path((node, segment)): Path<(String, String)>,
    RawQuery(query): RawQuery,
) -> Result<Response, Failure> {
    let query = Query(query.as_deref().unwrap_or_default());
    let evict = match query.raw("evict") {
        None | Some(b"false" | b"0") => false,
        Some(b"" | b"true" | b"1") => true,
        Some(_) => return Err(Failure::argument("evict is true or false")),
    };
    let (node, segment) = (number(node.as_bytes(), "node")?, number(segment.as_bytes(), "segment")?);
    let segment = Some(v1::SegmentRef { node, segment });
    let response =
        door.service.drain_segment(&v1::DrainSegmentRequest { context: context(query)?, segment, evict });
    check(response.context.as_ref(), "draining a segment")?;
    Ok((StatusCode::ACCEPTED, Json(json!({"job": response.job.to_string()}))).into_response())
}

async fn job(State(door): Shared, Path(job): Path<String>) -> Result<Json<Job>, Failure> {
    let job = number(job.as_bytes(), "job")?;
    let response = door.service.get_job(&v1::GetJobRequest { context: context(Query(""))?, job });
    check(response.context.as_ref(), "asking for a job")?;
    Ok(Json(Job::of(job, &response)))
}

// ------------------------------------------------------------------------------------------------ arguments

/// The context of a call: the tenant named in the query, or the default one.
fn context(query: Query<'_>) -> Result<Option<v1::RequestContext>, Failure> {
    let tenant = value(query, "tenant")?.unwrap_or_default();
    let tenant = String::from_utf8(tenant).map_err(|_| Failure::argument("a tenant's name is ASCII"))?;
    Ok(Some(v1::RequestContext { tenant, deadline_ms: DEADLINE_MS, ..Default::default() }))
}

fn value(query: Query<'_>, name: &str) -> Result<Option<Vec<u8>>, Failure> {
    query.bytes(name).map(|value| value.ok_or_else(|| wrong_escape(name))).transpose()
}

fn wrong_escape(name: &str) -> Failure {
    Failure::argument(format!("{name}: a % must be followed by two hexadecimal digits"))
}

fn number<T: std::str::FromStr>(raw: &[u8], name: &str) -> Result<T, Failure> {
    let parsed = std::str::from_utf8(raw).ok().and_then(|text| text.parse().ok());
    parsed.ok_or_else(|| Failure::argument(format!("{name} must be a number in range")))
}

fn cursor_of(query: Query<'_>) -> Result<Bytes, Failure> {
    let raw = query.raw("cursor").unwrap_or_default();
    from_hex(raw)
        .map(Bytes::from)
        .ok_or_else(|| Failure::argument("cursor: use next_cursor of the page before"))
}

fn shown_cursor(cursor: &[u8]) -> Option<String> {
    (!cursor.is_empty()).then(|| hex(cursor))
}

fn wants_text(query: Query<'_>, headers: &HeaderMap) -> bool {
    match query.raw("format") {
        Some(format) => format == b"text",
        None => headers
            .get(header::ACCEPT)
            .and_then(|accept| accept.to_str().ok())
            .is_some_and(|accept| accept.contains("text/plain") && !accept.contains("application/json")),
    }
}

/// The service answered something that it must not.
fn broken(error: &impl std::fmt::Display) -> Failure {
    Failure::new(ErrorCode::Internal, format!("the answer cannot be read: {error}"))
}
