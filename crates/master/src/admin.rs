//! Admin endpoints (HTTP): metrics, health, listings, and requests of operators.
//!
//! | request | response |
//! |---|---|
//! | `GET /metrics` | Prometheus |
//! | `GET /health` | 200 while the process responds |
//! | `GET /ready` | 200 if this master hosts groups and at least one node is registered, otherwise 503 |
//! | `GET /role` | leader, standby or stepped down, with the term |
//! | `GET /get_all_nodes` | registered nodes |
//! | `GET /get_all_segments` | segments with their state |
//! | `GET /get_all_keys?tenant=&prefix=&cursor=&limit=` | keys, page by page |
//! | `GET /query_key?key=&tenant=` | metadata of one key |
//! | `GET /batch_query_keys?keys=a,b&tenant=` | metadata of several keys; a comma in a key is written `%2C` |
//! | `POST /batch_query_keys?tenant=` | the same, with a JSON list of keys as body |
//! | `POST /set_pin?keys=a,b&pin=` | changes the pin class of objects: `none`, `soft` or `hard` |
//! | `POST /touch?keys=a,b` | marks objects as used |
//! | `POST /prefetch?keys=a,b` | promotes objects from disk to memory |
//! | `POST /remove_by_prefix?prefix=&force=` | starts a job: removes all keys with a prefix |
//! | `POST /remove_by_regex?pattern=&force=` | starts a job: removes all keys that match an expression |
//! | `POST /remove_all?tenant=&force=` | starts a job: removes all objects of a tenant, which must be named |
//! | `POST /evict?target_permille=` | evicts objects until at most this share of the memory is used |
//! | `GET /get_all_tenants` | tenants with quota and usage |
//! | `POST /tenants/{tenant}/quota?bytes_max=&objects_max=` | sets the quota of a tenant |
//! | `POST /segments/{node}/{segment}/drain?evict=` | starts a job: no new objects; the others move, or with `evict` leave |
//! | `POST /nodes/{node}/drain` | empties a node: its objects move to other nodes |
//! | `POST /nodes/{node}/undrain` | ends that: the node accepts new objects again |
//! | `GET /jobs/{job}` | progress of a job |
//!
//! Listings and changes cover the groups of this master. Quotas and drains of nodes reach all masters.
//!
//! A drained segment accepts no new objects. Its objects move to other segments; with `evict` the master evicts those that
//! are not in use instead. The job is done when the segment is empty. A drained node is empty when all its segments in
//! memory are: `GET /get_all_segments` shows them.
//!
//! Every `POST` needs the header [`ADMIN_HEADER`](moontide_tasks::ADMIN_HEADER), and every request a `Host` that is this one: see [`AdminGuard`].
//!
//! Responses are JSON; with `?format=text` or `Accept: text/plain` the listings of segments and keys are plain lines.
//! Keys are bytes, formatted by [`text`]: percent-decoding returns the key. `next_cursor` is the cursor of the next
//! page; plain-text responses have it in the header `moontide-next-cursor`. Errors are
//! `{"code", "name", "message", "hint"}` with a matching HTTP status.

mod changes;
mod response;
mod text;

use std::sync::Arc;
use std::time::Duration;

use axum::extract::{ConnectInfo, DefaultBodyLimit, RawQuery, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use bytes::Bytes;
use moontide_auth::ClientCertificates;
use moontide_proto::{Codes, PackedKeys, PackedKeysBuilder, v1};
use moontide_tasks::{ALPN_HTTP, AdminGuard, BoundedListener, ConnectionInfo, Protocol, TlsServer};
use moontide_types::limits::BATCH_KEYS_MAX;
use moontide_types::{ErrorCode, Key};
use serde_json::{Value, json};
use tokio::net::TcpListener;
use tokio::sync::watch;

use crate::access::{self, Refused};
use crate::metrics::{Metrics, ServerCounters};
use crate::service::{NodeInfo, Role, Service};
use response::{AdminError, Object, Segment, check};
use text::{Query, decode_value, from_hex, hex, show_key, unescape};

/// Connection limit, for scrapers, probes and operators.
const CONNECTIONS_MAX: usize = 256;

/// Time without a byte of a response after which a connection is closed. Longer than a call takes ([`TIMEOUT_MS`]) whose
/// request arrives slowly.
const ANSWER_MAX: Duration = Duration::from_secs(30);

/// Longest body of a request: as many keys of a kilobyte as a batch may have. All connections together may be receiving one.
const BODY_BYTES_MAX: usize = BATCH_KEYS_MAX << 10;

/// Timeout of a call in milliseconds.
const TIMEOUT_MS: u32 = 10_000;

/// Default number of keys of a response.
const KEYS_DEFAULT: usize = BATCH_KEYS_MAX;

/// Maximum number of keys of a response: a few megabytes of text.
const KEYS_MAX: usize = 16 * BATCH_KEYS_MAX;

/// Maximum number of segments of a response: the limit of one node, which exceeds the usual number in a cluster.
const SEGMENTS_MAX: usize = 65_536;

/// Header with the cursor of the next page, in plain-text responses.
const NEXT_CURSOR: HeaderName = HeaderName::from_static("moontide-next-cursor");

/// Shared state of the handlers.
struct AdminState {
    service: Arc<Service>,
    metrics: Metrics,
}

type Shared = State<Arc<AdminState>>;

/// Serves until `stop` becomes true.
pub(crate) async fn serve(
    listener: TcpListener,
    service: Arc<Service>,
    metrics: Metrics,
    counters: Arc<ServerCounters>,
    guard: AdminGuard,
    mut stop: watch::Receiver<bool>,
) -> std::io::Result<()> {
    let protocol = Protocol::Http1 { answer_max: ANSWER_MAX };
    let tls = TlsServer::new(service.credentials().cloned(), ClientCertificates::Optional, ALPN_HTTP);
    let listener = BoundedListener::new(listener, CONNECTIONS_MAX, protocol, counters).with_tls(tls);
    let router = router(AdminState { service, metrics }, guard);
    axum::serve(listener, router.into_make_service_with_connect_info::<ConnectionInfo>())
        .with_graceful_shutdown(async move {
            // An error means that the sender was dropped, which also means shutdown.
            let _ = stop.wait_for(|&stop| stop).await;
        })
        .await
}

fn router(state: AdminState, guard: AdminGuard) -> Router {
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
        .route("/set_pin", post(changes::set_pin))
        .route("/touch", post(changes::touch))
        .route("/prefetch", post(changes::prefetch))
        .route("/remove_by_prefix", post(changes::remove_by_prefix))
        .route("/remove_by_regex", post(changes::remove_by_regex))
        .route("/remove_all", post(changes::remove_all))
        .route("/evict", post(changes::evict))
        .route("/get_all_tenants", get(changes::get_all_tenants))
        .route("/tenants/{tenant}/quota", post(changes::set_quota))
        .route("/segments/{node}/{segment}/drain", post(changes::drain))
        .route("/nodes/{node}/drain", post(changes::drain_node))
        .route("/nodes/{node}/undrain", post(changes::undrain_node))
        .route("/jobs/{job}", get(changes::job))
        .fallback(async || {
            AdminError::new(ErrorCode::NotFound, "no such endpoint; see docs/master.md for the list")
        })
        .layer(DefaultBodyLimit::max(BODY_BYTES_MAX))
        .layer(from_fn_with_state(Arc::new(guard), check_request))
        .with_state(Arc::new(state))
}

/// Refuses requests that a page of another site may have caused, and callers that have no right to them.
async fn check_request(
    State(guard): State<Arc<AdminGuard>>,
    ConnectInfo(info): ConnectInfo<ConnectionInfo>,
    request: Request,
    next: Next,
) -> Response {
    let call = moontide_tasks::call_of_page(request.method(), request.uri().path());
    if let Err(Refused { text, .. }) = access::check_call(info.caller(), call) {
        return AdminError::new(ErrorCode::PermissionDenied, text).into_response();
    }
    match guard.check(request.method(), request.uri(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(denied) => AdminError::new(ErrorCode::PermissionDenied, denied.to_string()).into_response(),
    }
}

// ---------------------------------------------------------------------------------------------------- state

async fn metrics(State(state): Shared) -> Response {
    let kind = "application/openmetrics-text; version=1.0.0; charset=utf-8";
    ([(header::CONTENT_TYPE, kind)], state.metrics.render()).into_response()
}

async fn ready(State(state): Shared) -> Response {
    if state.service.is_ready() {
        Json(json!({"status": "ready"})).into_response()
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, Json(json!({"status": "not ready"}))).into_response()
    }
}

async fn role(State(state): Shared) -> Json<Value> {
    Json(match state.service.role() {
        Role::Leader { term } => json!({"role": "leader", "term": term.get()}),
        Role::SteppedDown { seen } => json!({"role": "stepped_down", "seen_term": seen.get()}),
        Role::Member { number, groups, confirmed } => {
            let role = if groups > 0 { "leader" } else { "standby" };
            json!({"role": role, "master_id": number.get(), "groups": groups, "lease_confirmed": confirmed})
        }
    })
}

// ------------------------------------------------------------------------------------------------- listings

/// Lists the registered nodes: at most a few thousand, so one page is enough.
async fn get_all_nodes(State(state): Shared) -> Json<Value> {
    let node = |info: &NodeInfo| {
        let [host, rack, zone] = &info.labels;
        let addresses =
            info.addresses.iter().map(|(engine, address)| json!({"engine": engine, "address": address}));
        json!({
            "node": info.node.to_string(),
            "host": host,
            "rack": rack,
            "zone": zone,
            "addresses": addresses.collect::<Vec<_>>(),
            "pending_commands": info.pending_commands,
        })
    };
    Json(json!({"nodes": state.service.nodes().iter().map(node).collect::<Vec<_>>()}))
}

async fn get_all_segments(
    State(state): Shared,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Result<Response, AdminError> {
    let query = Query(query.as_deref().unwrap_or_default());
    let mut segments: Vec<Segment> = Vec::new();
    let mut cursor = cursor_of(query)?;
    loop {
        let page = Some(v1::Pagination { cursor, limit: BATCH_KEYS_MAX as u32 }); // 4,096
        let request = v1::ListSegmentsRequest { context: context(query)?, page, node: 0 };
        let response = state.service.list_segments(&request);
        check(response.context.as_ref(), "cannot list segments")?;
        segments.extend(response.segments.iter().map(Segment::of));
        cursor = response.next_cursor;
        if cursor.is_empty() || segments.len() >= SEGMENTS_MAX {
            break;
        }
    }
    if wants_text(query, &headers) {
        let lines = segments.iter().map(|segment| format!("{}/{}", segment.node, segment.segment));
        return Ok(plain_text(lines, &cursor));
    }
    Ok(Json(json!({"segments": segments, "next_cursor": shown_cursor(&cursor)})).into_response())
}

async fn get_all_keys(
    State(state): Shared,
    RawQuery(query): RawQuery,
    headers: HeaderMap,
) -> Result<Response, AdminError> {
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
        let page = Some(v1::Pagination { cursor, limit: wanted });
        let request = v1::ListKeysRequest { context: context(query)?, page, prefix: prefix.clone() };
        let response = state.service.list_keys(&request);
        check(response.context.as_ref(), "cannot list keys")?;
        let packed = PackedKeys::decode(&response.keys).map_err(|error| internal_error(&error))?;
        keys.extend(packed.iter().map(|key| show_key(key.as_bytes())));
        cursor = response.next_cursor;
        if cursor.is_empty() || keys.len() >= limit {
            break;
        }
        // A rare prefix takes many rounds; other tasks need this thread, too.
        tokio::task::yield_now().await;
    }
    if wants_text(query, &headers) {
        return Ok(plain_text(keys.into_iter(), &cursor));
    }
    Ok(Json(json!({"keys": keys, "next_cursor": shown_cursor(&cursor)})).into_response())
}

/// Creates a plain-text response, one entry per line.
fn plain_text(lines: impl Iterator<Item = String>, cursor: &[u8]) -> Response {
    let text: String = lines.map(|line| line + "\n").collect();
    let mut response = ([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], text).into_response();
    if let Some(cursor) = shown_cursor(cursor) {
        let cursor = HeaderValue::try_from(cursor).expect("hexadecimal digits are valid in a header");
        response.headers_mut().insert(NEXT_CURSOR, cursor);
    }
    response
}

// ----------------------------------------------------------------------------------------------------- keys

async fn query_key(State(state): Shared, RawQuery(query): RawQuery) -> Result<Response, AdminError> {
    let query = Query(query.as_deref().unwrap_or_default());
    let key =
        value(query, "key")?.ok_or_else(|| AdminError::argument("key is missing; use /query_key?key=…"))?;
    let results = query_keys(&state, query, &[key])?;
    match results.into_iter().next() {
        Some((_, Ok(object))) => Ok(Json(object).into_response()),
        Some((key, Err(code))) => Err(AdminError::new(code, format!("key {key:?}: {}", code.name()))),
        None => Err(AdminError::new(ErrorCode::Internal, "response to a query of one key is empty")),
    }
}

async fn batch_query_keys(State(state): Shared, RawQuery(query): RawQuery) -> Result<Response, AdminError> {
    let query = Query(query.as_deref().unwrap_or_default());
    batch(&state, query, &keys_of(query)?)
}

/// Returns the keys of a query `keys=a,b`.
fn keys_of(query: Query<'_>) -> Result<Vec<Vec<u8>>, AdminError> {
    let raw = query.raw("keys").ok_or_else(|| AdminError::argument("keys are missing; use ?keys=a,b"))?;
    // Split at commas first: a comma of a key is still escaped.
    let keys =
        raw.split(|&byte| byte == b',').map(|key| decode_value(key).ok_or_else(|| wrong_escape("keys")));
    keys.collect()
}

async fn batch_query_keys_of_list(
    State(state): Shared,
    RawQuery(query): RawQuery,
    body: Bytes,
) -> Result<Response, AdminError> {
    let query = Query(query.as_deref().unwrap_or_default());
    let keys: Vec<String> = serde_json::from_slice(&body)
        .map_err(|error| AdminError::argument(format!("body is no JSON list of keys: {error}")))?;
    let keys = keys.iter().map(|key| unescape(key.as_bytes()).ok_or_else(|| wrong_escape("a key")));
    batch(&state, query, &keys.collect::<Result<Vec<_>, _>>()?)
}

/// Returns one object or error per key.
fn batch(state: &AdminState, query: Query<'_>, keys: &[Vec<u8>]) -> Result<Response, AdminError> {
    let results = query_keys(state, query, keys)?;
    let results = results.into_iter().map(|(key, result)| match result {
        Ok(object) => json!({"key": key, "ok": true, "object": object}),
        Err(code) => json!({"key": key, "ok": false, "code": code as u16, "name": code.name()}),
    });
    Ok(Json(json!({"keys": results.collect::<Vec<_>>()})).into_response())
}

/// A formatted key, and the object or the error code.
type Queried = (String, Result<Object, ErrorCode>);

fn query_keys(state: &AdminState, query: Query<'_>, keys: &[Vec<u8>]) -> Result<Vec<Queried>, AdminError> {
    if keys.len() > BATCH_KEYS_MAX {
        return Err(AdminError::new(
            ErrorCode::TooLarge,
            format!("{} keys, at most {BATCH_KEYS_MAX} are allowed", keys.len()),
        ));
    }
    let mut packed = PackedKeysBuilder::new();
    for key in keys {
        let key = Key::new(key).map_err(|error| AdminError::argument(error.to_string()))?;
        packed.push(key).map_err(|error| AdminError::new(ErrorCode::TooLarge, error.to_string()))?;
    }
    let request = v1::QueryKeysRequest { context: context(query)?, keys: packed.finish().into() };
    let response = state.service.query_keys(&request);
    check(response.context.as_ref(), "cannot query keys")?;
    let codes = Codes::decode(&response.codes, BATCH_KEYS_MAX).map_err(|error| internal_error(&error))?;
    let mut details = response.details.iter();
    let results = keys.iter().zip(codes.iter()).map(|(key, code)| {
        let result = match code {
            Some(code) => Err(code),
            None => details.next().map(Object::of).ok_or(ErrorCode::Internal),
        };
        (show_key(key), result)
    });
    Ok(results.collect())
}

// ------------------------------------------------------------------------------------------------ arguments

/// Creates the context of a call with the tenant of the query, or the default tenant.
fn context(query: Query<'_>) -> Result<Option<v1::RequestContext>, AdminError> {
    let tenant = value(query, "tenant")?.unwrap_or_default();
    let tenant = String::from_utf8(tenant).map_err(|_| AdminError::argument("tenant name must be ASCII"))?;
    Ok(Some(v1::RequestContext { tenant, timeout_ms: TIMEOUT_MS, ..Default::default() }))
}

fn value(query: Query<'_>, name: &str) -> Result<Option<Vec<u8>>, AdminError> {
    query.bytes(name).map(|value| value.ok_or_else(|| wrong_escape(name))).transpose()
}

fn wrong_escape(name: &str) -> AdminError {
    AdminError::argument(format!("invalid escape in {name}: % must be followed by two hexadecimal digits"))
}

fn number<T: std::str::FromStr>(raw: &[u8], name: &str) -> Result<T, AdminError> {
    let parsed = std::str::from_utf8(raw).ok().and_then(|text| text.parse().ok());
    parsed.ok_or_else(|| AdminError::argument(format!("{name} is no number in the allowed range")))
}

fn cursor_of(query: Query<'_>) -> Result<Bytes, AdminError> {
    let raw = query.raw("cursor").unwrap_or_default();
    from_hex(raw)
        .map(Bytes::from)
        .ok_or_else(|| AdminError::argument("invalid cursor; use next_cursor of the previous page"))
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

/// Creates the error of an invalid response of the service.
fn internal_error(error: &impl std::fmt::Display) -> AdminError {
    AdminError::new(ErrorCode::Internal, format!("invalid response of the service: {error}"))
}
