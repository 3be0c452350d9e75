//! Requests that change something: keys of objects, removals of many objects, evictions, quotas and drains.
//!
//! A request changes the groups of this master only, except quotas, the generation of a tenant, and drains of nodes.

use axum::Json;
use axum::extract::{Path, RawQuery, State};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use moontide_proto::{Codes, PackedKeysBuilder, v1};
use moontide_types::limits::BATCH_KEYS_MAX;
use moontide_types::{ErrorCode, InvalidNodeId, Key, NodeId};
use serde_json::json;

use super::response::{AdminError, Job, Tenant, check};
use super::text::{Query, show_key};
use super::{AdminState, KEYS_MAX, Shared, context, internal_error, keys_of, number, value};

// ----------------------------------------------------------------------------------------------------- keys

/// Marks objects as used.
pub(super) async fn touch(State(state): Shared, RawQuery(query): RawQuery) -> Result<Response, AdminError> {
    each_key(query.as_deref(), |context, keys| {
        state.service.touch(&v1::TouchRequest { context, keys, lease_ms: 0 })
    })
}

/// Promotes objects from disk to memory.
pub(super) async fn prefetch(
    State(state): Shared,
    RawQuery(query): RawQuery,
) -> Result<Response, AdminError> {
    each_key(query.as_deref(), |context, keys| {
        state.service.prefetch(&v1::PrefetchRequest { context, keys, target_node: 0 })
    })
}

/// Changes the pin class of objects.
pub(super) async fn set_pin(State(state): Shared, RawQuery(query): RawQuery) -> Result<Response, AdminError> {
    let pin = match Query(query.as_deref().unwrap_or_default()).raw("pin") {
        Some(b"none") => v1::PinClass::None,
        Some(b"soft") => v1::PinClass::Soft,
        Some(b"hard") => v1::PinClass::Hard,
        _ => return Err(AdminError::argument("pin must be none, soft or hard")),
    };
    each_key(query.as_deref(), |context, keys| {
        state.service.set_pin(&v1::SetPinRequest { context, keys, pin: pin.into() })
    })
}

/// Makes a call for the keys of the query. Responds with one outcome per key.
fn each_key(
    query: Option<&str>,
    call: impl FnOnce(Option<v1::RequestContext>, Bytes) -> v1::OutcomesResponse,
) -> Result<Response, AdminError> {
    let query = Query(query.unwrap_or_default());
    let keys = keys_of(query)?;
    let mut packed = PackedKeysBuilder::new();
    for key in &keys {
        let key = Key::new(key).map_err(|error| AdminError::argument(error.to_string()))?;
        packed.push(key).map_err(|error| AdminError::new(ErrorCode::TooLarge, error.to_string()))?;
    }
    let response = call(context(query)?, packed.finish().into());
    check(response.context.as_ref(), "cannot change the objects")?;
    let codes = Codes::decode(&response.codes, BATCH_KEYS_MAX).map_err(|error| internal_error(&error))?;
    let results = keys.iter().zip(codes.iter()).map(|(key, code)| match code {
        None => json!({"key": show_key(key), "ok": true}),
        Some(code) => {
            json!({"key": show_key(key), "ok": false, "code": code as u16, "name": code.name()})
        }
    });
    Ok(Json(json!({"keys": results.collect::<Vec<_>>()})).into_response())
}

// ----------------------------------------------------------------------------------------------------- jobs

/// Starts a job that removes all keys with a prefix.
pub(super) async fn remove_by_prefix(
    State(state): Shared,
    RawQuery(query): RawQuery,
) -> Result<Response, AdminError> {
    let query = Query(query.as_deref().unwrap_or_default());
    let prefix = value(query, "prefix")?.filter(|prefix| !prefix.is_empty());
    let prefix =
        prefix.ok_or_else(|| AdminError::argument("prefix is missing; use /remove_all for all objects"))?;
    let (context, force) = (context(query)?, flag(query, "force")?);
    let request = v1::RemoveByPrefixRequest { context, prefix: prefix.into(), force, groups: vec![] };
    started(&state.service.remove_by_prefix(&request))
}

/// Starts a job that removes all keys that match an expression.
pub(super) async fn remove_by_regex(
    State(state): Shared,
    RawQuery(query): RawQuery,
) -> Result<Response, AdminError> {
    let query = Query(query.as_deref().unwrap_or_default());
    let pattern = value(query, "pattern")?.unwrap_or_default();
    let pattern = String::from_utf8(pattern).ok().filter(|pattern| !pattern.is_empty());
    let pattern = pattern.ok_or_else(|| AdminError::argument("pattern is missing, or not UTF-8"))?;
    let (context, force) = (context(query)?, flag(query, "force")?);
    let request = v1::RemoveByRegexRequest { context, pattern, force, groups: vec![] };
    started(&state.service.remove_by_regex(&request))
}

/// Starts a job that removes all objects of a tenant.
pub(super) async fn remove_all(
    State(state): Shared,
    RawQuery(query): RawQuery,
) -> Result<Response, AdminError> {
    let query = Query(query.as_deref().unwrap_or_default());
    let (context, force) = (context(query)?, flag(query, "force")?);
    let request = v1::RemoveAllRequest { context, force, generation: 0, groups: vec![] };
    started(&state.service.remove_all(&request).await)
}

fn started(response: &v1::StartJobResponse) -> Result<Response, AdminError> {
    check(response.context.as_ref(), "cannot start the removal")?;
    let body = json!({"job": response.job.to_string(), "groups": response.groups});
    Ok((StatusCode::ACCEPTED, Json(body)).into_response())
}

pub(super) async fn job(State(state): Shared, Path(job): Path<String>) -> Result<Json<Job>, AdminError> {
    let job = number(job.as_bytes(), "job")?;
    let response = state.service.get_any_job(job);
    check(response.context.as_ref(), "cannot get job")?;
    Ok(Json(Job::of(job, &response)))
}

// ------------------------------------------------------------------------------------------- memory, tenants

/// Evicts objects until usage is below a ratio.
pub(super) async fn evict(State(state): Shared, RawQuery(query): RawQuery) -> Result<Response, AdminError> {
    let query = Query(query.as_deref().unwrap_or_default());
    let target = query.raw("target_permille").ok_or_else(|| {
        AdminError::argument("target_permille is missing: thousandths of the memory that may stay in use")
    })?;
    let target_permille = number(target, "target_permille")?;
    let response = state.service.evict(&v1::EvictRequest { context: context(query)?, target_permille });
    check(response.context.as_ref(), "cannot evict")?;
    Ok(Json(json!({"objects": response.objects, "bytes": response.bytes})).into_response())
}

/// Lists tenants with quota and usage.
pub(super) async fn get_all_tenants(
    State(state): Shared,
    RawQuery(query): RawQuery,
) -> Result<Response, AdminError> {
    let query = Query(query.as_deref().unwrap_or_default());
    let mut tenants: Vec<Tenant> = Vec::new();
    let mut cursor = Bytes::new();
    while tenants.len() < KEYS_MAX {
        let page = Some(v1::Pagination { cursor, limit: BATCH_KEYS_MAX as u32 }); // 4,096
        let response = state.service.get_tenants(&v1::GetTenantsRequest { context: context(query)?, page });
        check(response.context.as_ref(), "cannot list tenants")?;
        tenants.extend(response.tenants.iter().map(Tenant::of));
        cursor = response.next_cursor;
        if cursor.is_empty() {
            break;
        }
    }
    Ok(Json(json!({"tenants": tenants})).into_response())
}

/// Sets the quota of a tenant; a limit that the query does not name is lifted.
pub(super) async fn set_quota(
    State(state): Shared,
    Path(tenant): Path<String>,
    RawQuery(query): RawQuery,
) -> Result<Response, AdminError> {
    let query = Query(query.as_deref().unwrap_or_default());
    let limit = |name| query.raw(name).map_or(Ok(0), |raw| number::<u64>(raw, name));
    let (bytes_max, objects_max) = (limit("bytes_max")?, limit("objects_max")?);
    let context = context(query)?.map(|context| v1::RequestContext { tenant: tenant.clone(), ..context });
    let request = v1::SetTenantQuotaRequest { context, bytes_max, objects_max };
    let response = state.service.set_tenant_quota(&request).await;
    check(response.context.as_ref(), "cannot set the quota")?;
    let body = json!({"tenant": tenant, "bytes_max": bytes_max, "objects_max": objects_max});
    Ok(Json(body).into_response())
}

// --------------------------------------------------------------------------------------------------- drains

pub(super) async fn drain(
    State(state): Shared,
    Path((node, segment)): Path<(String, String)>,
    RawQuery(query): RawQuery,
) -> Result<Response, AdminError> {
    let query = Query(query.as_deref().unwrap_or_default());
    let evict = flag(query, "evict")?;
    let segment =
        Some(v1::SegmentRef { node: node_of(&node)?.0, segment: number(segment.as_bytes(), "segment")? });
    let response =
        state.service.drain_segment(&v1::DrainSegmentRequest { context: context(query)?, segment, evict });
    check(response.context.as_ref(), "cannot drain segment")?;
    Ok((StatusCode::ACCEPTED, Json(json!({"job": response.job.to_string()}))).into_response())
}

pub(super) async fn drain_node(
    State(state): Shared,
    Path(node): Path<String>,
) -> Result<Response, AdminError> {
    order_drain(&state, &node, false)
}

pub(super) async fn undrain_node(
    State(state): Shared,
    Path(node): Path<String>,
) -> Result<Response, AdminError> {
    order_drain(&state, &node, true)
}

fn order_drain(state: &AdminState, node: &str, undrain: bool) -> Result<Response, AdminError> {
    let node = node_of(node)?;
    let context = context(Query(""))?;
    let response = state.service.drain_node(&v1::DrainNodeRequest { context, node: node.0, undrain });
    check(response.context.as_ref(), "cannot drain node")?;
    Ok((StatusCode::ACCEPTED, Json(json!({"node": node.to_string(), "drain": !undrain}))).into_response())
}

fn node_of(node: &str) -> Result<NodeId, AdminError> {
    node.parse().map_err(|error: InvalidNodeId| AdminError::argument(error.to_string()))
}

/// Returns a switch of the query, off if it is absent.
fn flag(query: Query<'_>, name: &str) -> Result<bool, AdminError> {
    match query.raw(name) {
        None | Some(b"false" | b"0") => Ok(false),
        Some(b"" | b"true" | b"1") => Ok(true),
        Some(_) => Err(AdminError::argument(format!("{name} must be true or false"))),
    }
}
