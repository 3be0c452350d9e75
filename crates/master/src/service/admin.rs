//! Calls of operators, and of clients at their start: listings, metadata of keys, quotas, eviction, cluster
//! information.

use std::collections::{BTreeMap, BTreeSet};

use moontide_meta::{Effects, ListCursor, ObjectDetail, Quota, SegmentPhase, SegmentView};
use moontide_proto::convert::{
    ClusterInfo, EvictRequest, GetClusterInfoResponse, GetTenantsRequest, IdKeySecret, ListKeysRequest,
    ListSegmentsRequest, QueryKeysRequest, RequestContext, ResponseContext, SetTenantQuotaRequest, Wire,
};
use moontide_proto::limits::NODES_MAX;
use moontide_proto::{PackedBuilder, PackedKeysBuilder, ProtocolVersions, v1};
use moontide_types::limits::REQUEST_BYTES_MAX;
use moontide_types::{ErrorCode, Key, Medium, NodeId, Tenant, TenantGeneration, Term};
use prost::Message;

use super::nodes::NodeInfo;
use super::objects::handle;
use super::{CallContext, OutcomeCodes, Service, refused};
use crate::election::TenantChange;

/// Maximum number of objects that one call evicts per lock of a group.
const EVICT_PER_LOCK: usize = 256;

/// Maximum number of objects that one call evicts: bounds its duration.
const EVICT_PER_CALL: u64 = 1 << 20;

/// Bytes of a response reserved for its context: some numbers, no map.
const CONTEXT_BYTES_MAX: usize = 1 << 10;

impl Service {
    /// Lists keys of a tenant, page by page, unsorted.
    pub fn list_keys(&self, m: &v1::ListKeysRequest) -> v1::ListKeysResponse {
        let parsed = ListKeysRequest::from_wire(m)
            .map_err(refused)
            .and_then(|request| Ok((self.caller(request.context)?, request)));
        let (caller, request) = match parsed {
            Ok(parsed) => parsed,
            Err(code) => {
                return v1::ListKeysResponse { context: Some(self.refusal(code)), ..Default::default() };
            }
        };
        let now = self.now();
        let mut keys = PackedKeysBuilder::new();
        let (mut index, mut cursor) = parse_list_cursor(request.page.cursor);
        let mut next_cursor = vec![];
        while index < self.group_slots.len() {
            let Ok(group) = self.group_for_node(index) else {
                (index, cursor) = (index + 1, None);
                continue;
            };
            let left = request.page.limit as usize - keys.len();
            let Some(tenant) = group.find_tenant(caller.context.tenant) else {
                (index, cursor) = (index + 1, None);
                continue;
            };
            let ended = group.list(now, tenant, cursor, left, |key| {
                if !key.starts_with(request.prefix) {
                    return true;
                }
                Key::new(key).is_ok_and(|key| keys.push(key).is_ok())
            });
            // The group also stops at its own limit; then a page has fewer keys than requested.
            match ended {
                None => (index, cursor) = (index + 1, None),
                Some(at) => {
                    next_cursor = list_cursor(index, Some(at));
                    break;
                }
            }
            if keys.len() == request.page.limit as usize {
                if index < self.group_slots.len() {
                    next_cursor = list_cursor(index, None);
                }
                break;
            }
        }
        v1::ListKeysResponse {
            context: Some(self.context(Some(&caller))),
            keys: keys.finish().into(),
            next_cursor: next_cursor.into(),
        }
    }

    /// Returns the metadata of keys.
    pub fn query_keys(&self, m: &v1::QueryKeysRequest) -> v1::QueryKeysResponse {
        let parsed = QueryKeysRequest::from_wire(m)
            .map_err(refused)
            .and_then(|request| Ok((self.caller(request.context)?, request)));
        let (caller, request) = match parsed {
            Ok(parsed) => parsed,
            Err(code) => {
                return v1::QueryKeysResponse { context: Some(self.refusal(code)), ..Default::default() };
            }
        };
        let now = self.now();
        let mut details: Vec<Result<v1::ObjectDetail, ErrorCode>> =
            vec![Err(ErrorCode::NotFound); request.keys.len()];
        for (index, lookups, positions) in self.sort(&caller, request.keys).parts() {
            let group = self.group(index);
            for (lookup, &position) in lookups.iter().zip(positions) {
                let found = group.as_ref().map_err(|code| *code).and_then(|group| {
                    let detail = group.query(now, lookup).ok_or(ErrorCode::NotFound)?;
                    Ok(object_detail(detail, group.term()))
                });
                details[position as usize] = found;
            }
        }
        let mut codes = OutcomeCodes::new(details.len());
        for (at, detail) in details.iter().enumerate() {
            codes.set(at, detail.as_ref().err().copied());
        }
        v1::QueryKeysResponse {
            context: Some(self.context(Some(&caller))),
            codes: codes.0.into(),
            details: details.into_iter().flatten().collect(),
        }
    }

    /// Returns the group map.
    pub fn get_group_map(&self, m: &v1::GetGroupMapRequest) -> v1::GetGroupMapResponse {
        let map = self.map.read().clone();
        match self.check_context(&m.context) {
            Ok(_) => v1::GetGroupMapResponse { context: Some(self.context(None)), map: Some(map) },
            Err(code) => v1::GetGroupMapResponse { context: Some(self.refusal(code)), map: None },
        }
    }

    /// Returns the parameters that a client needs to compute the ids of its tenant's objects. The key is that of the tenant in the
    /// context, for callers of every role: nodes get the key of the cluster with their session.
    pub fn get_cluster_info(&self, m: &v1::GetClusterInfoRequest) -> v1::GetClusterInfoResponse {
        let caller = match self.check_context(&m.context) {
            Ok(caller) => caller,
            Err(code) => {
                return v1::GetClusterInfoResponse {
                    context: Some(self.refusal(code)),
                    ..Default::default()
                };
            }
        };
        let id_key = self.config.id_key.of_tenant(caller.context.tenant);
        let info = ClusterInfo {
            cluster: self.config.cluster,
            groups: self.config.groups.get(),
            id_key: id_key.number(),
            tenant_id_key: Some(IdKeySecret(*id_key.secret())),
            protocol: ProtocolVersions::CURRENT,
        };
        let context = ResponseContext {
            map_version: self.map_version(),
            term: self.config.term,
            tenant_generation: caller.generation,
            ..Default::default()
        };
        GetClusterInfoResponse::new(context, info).to_wire()
    }

    /// Returns the registered nodes and their addresses. Nodes that do not fit into a message are omitted, with a
    /// warning.
    pub fn get_nodes(&self, m: &v1::GetNodesRequest) -> v1::GetNodesResponse {
        if let Err(code) = self.check_context(&m.context) {
            return v1::GetNodesResponse { context: Some(self.refusal(code)), ..Default::default() };
        }
        let known = self.nodes();
        let mut nodes = Vec::with_capacity(known.len().min(NODES_MAX));
        let mut space = REQUEST_BYTES_MAX - CONTEXT_BYTES_MAX;
        for info in &known {
            let detail = node_detail(info);
            // The tag, and a length of at most three bytes.
            let bytes = detail.encoded_len() + 4;
            if nodes.len() == NODES_MAX || bytes > space {
                tracing::warn!(
                    known = known.len(),
                    returned = nodes.len(),
                    "too many nodes for one response"
                );
                break;
            }
            space -= bytes;
            nodes.push(detail);
        }
        let tenant_generation = self.generation_of(&m.context).0;
        let context = v1::ResponseContext { tenant_generation, ..self.context(None) };
        v1::GetNodesResponse { context: Some(context), nodes }
    }

    /// Returns the addresses of nodes. Those that are not registered are missing.
    pub(super) fn node_details(&self, wanted: &BTreeSet<NodeId>) -> Vec<v1::NodeDetail> {
        if wanted.is_empty() {
            return vec![];
        }
        self.nodes().iter().filter(|info| wanted.contains(&info.node)).map(node_detail).collect()
    }

    /// Returns the generation of the tenant of a request: clients need it to compute ids.
    fn generation_of(&self, context: &Option<v1::RequestContext>) -> TenantGeneration {
        let name = context.as_ref().map_or("", |context| context.tenant.as_str());
        let tenant = if name.is_empty() { Ok(Tenant::DEFAULT) } else { Tenant::new(name) };
        tenant.map_or(TenantGeneration(0), |tenant| self.tenant_info(tenant).generation)
    }

    /// Evicts objects until usage is below a ratio, as far as objects are neither leased nor pinned.
    pub fn evict(&self, m: &v1::EvictRequest) -> v1::EvictResponse {
        let target = EvictRequest::from_wire(m).map_err(refused).and_then(|request| {
            self.caller(request.context)?;
            Ok(request.target_permille as u16) // ≤ 1,000
        });
        let target = match target {
            Ok(target) => target,
            Err(code) => {
                return v1::EvictResponse { context: Some(self.refusal(code)), ..Default::default() };
            }
        };
        let (mut objects, mut bytes) = (0, 0);
        let mut effects = Effects::new();
        for index in 0..self.group_slots.len() {
            while objects < EVICT_PER_CALL {
                let Ok(mut group) = self.group_for_node(index) else { break };
                let evicted = group.evict(self.now(), target, EVICT_PER_LOCK, &mut effects);
                self.deliver(&group, &mut effects);
                objects += evicted.objects;
                bytes += evicted.bytes;
                if (evicted.objects as usize) < EVICT_PER_LOCK {
                    break;
                }
            }
        }
        v1::EvictResponse { context: Some(self.context(None)), objects, bytes }
    }

    /// Sets the quota of the context's tenant.
    pub async fn set_tenant_quota(&self, m: &v1::SetTenantQuotaRequest) -> v1::SetTenantQuotaResponse {
        let context = match self.try_set_tenant_quota(m).await {
            Ok(()) => self.context(None),
            Err(code) => self.refusal(code),
        };
        v1::SetTenantQuotaResponse { context: Some(context) }
    }

    async fn try_set_tenant_quota(&self, m: &v1::SetTenantQuotaRequest) -> Result<(), ErrorCode> {
        let request = SetTenantQuotaRequest::from_wire(m).map_err(refused)?;
        let context = self.caller(request.context)?.context;
        let (bytes_max, objects_max) = (request.bytes_max, request.objects_max);
        self.change_tenant(&context, TenantChange::Quota { bytes_max, objects_max }).await?;
        self.split_quota(context.tenant.as_str(), Quota { bytes_max, objects_max });
        Ok(())
    }

    /// Lists tenants with their quotas and usage, page by page, sorted by name.
    pub fn get_tenants(&self, m: &v1::GetTenantsRequest) -> v1::GetTenantsResponse {
        let request = GetTenantsRequest::from_wire(m).map_err(refused).and_then(|request| {
            self.caller(request.context)?;
            Ok(request)
        });
        let request = match request {
            Ok(request) => request,
            Err(code) => {
                return v1::GetTenantsResponse { context: Some(self.refusal(code)), ..Default::default() };
            }
        };
        let infos = self.tenants.read().clone();
        let usage = self.tenant_usage().into_iter().map(|(name, bytes, objects)| (name, (bytes, objects)));
        let mut usage: BTreeMap<Box<str>, (u64, u64)> = usage.collect();
        // A quota is known before the tenant has an object.
        for (name, _) in infos.iter().filter(|(_, info)| info.quota != Quota::default()) {
            usage.entry(name.clone()).or_default();
        }
        let mut all: Vec<v1::TenantInfo> = usage
            .into_iter()
            .map(|(name, (bytes, objects))| {
                let info = infos.get(&name).copied().unwrap_or_default();
                v1::TenantInfo {
                    name: name.into(),
                    generation: info.generation.0,
                    bytes_max: info.quota.bytes_max,
                    objects_max: info.quota.objects_max,
                    bytes,
                    objects,
                }
            })
            .filter(|tenant| request.page.cursor.is_empty() || tenant.name.as_bytes() > request.page.cursor)
            .collect();
        let limit = request.page.limit as usize;
        let next = if all.len() > limit { all[limit - 1].name.clone() } else { String::new() };
        all.truncate(limit);
        v1::GetTenantsResponse {
            context: Some(self.context(None)),
            tenants: all,
            next_cursor: next.into_bytes().into(),
        }
    }

    /// Lists segments with their state, page by page, sorted by node and segment.
    pub fn list_segments(&self, m: &v1::ListSegmentsRequest) -> v1::ListSegmentsResponse {
        let request = ListSegmentsRequest::from_wire(m).map_err(refused).and_then(|request| {
            self.caller(request.context)?;
            Ok(request)
        });
        let request = match request {
            Ok(request) => request,
            Err(code) => {
                return v1::ListSegmentsResponse { context: Some(self.refusal(code)), ..Default::default() };
            }
        };
        let mut all: Vec<(u16, Term, SegmentView)> = vec![];
        for group in self.hosted() {
            let (index, term) = (group.index as u16, group.term()); // ≤ GROUPS_MAX
            let views: Vec<_> = group.segments().filter(|view| view.medium != Medium::Disk).collect();
            drop(group);
            let wanted = views.into_iter().filter(|view| request.node.is_none_or(|node| node == view.node));
            all.extend(
                wanted.filter(|view| view.phase != SegmentPhase::Lost).map(|view| (index, term, view)),
            );
        }
        let cursor_of = |view: &SegmentView| {
            let mut cursor = view.node.0.to_be_bytes().to_vec();
            cursor.extend(view.segment.0.to_be_bytes());
            cursor
        };
        all.sort_by_key(|(_, _, view)| (view.node, view.segment));
        all.retain(|(_, _, view)| {
            request.page.cursor.is_empty() || &cursor_of(view)[..] > request.page.cursor
        });
        let limit = request.page.limit as usize;
        let next = if all.len() > limit { cursor_of(&all[limit - 1].2) } else { vec![] };
        all.truncate(limit);
        v1::ListSegmentsResponse {
            context: Some(self.context(None)),
            segments: all
                .iter()
                .map(|(group, term, view)| segment_detail(*group, view, term.get()))
                .collect(),
            next_cursor: next.into(),
        }
    }

    /// Checks a call that only has a context.
    fn check_context<'a>(
        &self,
        context: &'a Option<v1::RequestContext>,
    ) -> Result<CallContext<'a>, ErrorCode> {
        let context = context.as_ref().ok_or(ErrorCode::InvalidArgument)?;
        let context = RequestContext::from_wire(context).map_err(refused)?;
        self.caller(context)
    }
}

fn object_detail(detail: ObjectDetail, term: Term) -> v1::ObjectDetail {
    let mut handles = PackedBuilder::with_capacity(detail.locations.len());
    for location in &detail.locations {
        handles.push(&handle(location, term, false));
    }
    v1::ObjectDetail {
        key: detail.key.into_vec().into(),
        id: detail.id.0.to_vec().into(),
        epoch: detail.epoch.bits(),
        len: detail.object_len,
        root: detail.root,
        writing: detail.writing,
        pin: detail.pin as i32,
        leased_ms: detail.leased_ms,
        expires_unix_ms: detail.expires.map_or(0, |at| at.0),
        cohort: detail.cohort.map(Vec::from).unwrap_or_default().into(),
        handles: handles.finish().into(),
    }
}

fn node_detail(info: &NodeInfo) -> v1::NodeDetail {
    let address = |(engine, address): &(Box<str>, Box<str>)| v1::Address {
        engine: engine.clone().into(),
        address: address.clone().into(),
    };
    let [host, rack, zone] = info.labels.clone().map(String::from);
    v1::NodeDetail {
        node: info.node.0,
        registration: info.registration,
        addresses: info.addresses.iter().map(address).collect(),
        topology: Some(v1::Topology { host, rack, zone }),
        draining: info.draining,
    }
}

fn segment_detail(group: u16, view: &SegmentView, term: u32) -> v1::SegmentDetail {
    let state = match view.phase {
        SegmentPhase::Reporting | SegmentPhase::Quarantined => v1::SegmentState::Reporting,
        SegmentPhase::Serving => v1::SegmentState::Serving,
        SegmentPhase::Draining => v1::SegmentState::Draining,
        SegmentPhase::Lost => v1::SegmentState::Failed,
    };
    v1::SegmentDetail {
        node: view.node.0,
        spec: Some(v1::SegmentSpec {
            segment: view.segment.0,
            generation: view.generation.0,
            medium: view.medium.number().into(),
            units: view.units,
            slots: view.slots,
            group: Some(group.into()),
            term,
            ..Default::default()
        }),
        status: Some(v1::SegmentStatus {
            segment: view.segment.0,
            generation: view.generation.0,
            state: state.into(),
            live_units: view.live_units,
            writing_units: view.reserved_units,
            draining_units: view.draining_units,
            free_units: view.free_units,
            free_slots: view.slots - view.taken_slots,
        }),
    }
}

/// Encodes the position of a listing: `group u16 | cursor u32`, or `group u16` for the start of a group.
fn list_cursor(group: usize, cursor: Option<ListCursor>) -> Vec<u8> {
    let mut bytes = (group as u16).to_le_bytes().to_vec();
    if let Some(cursor) = cursor {
        bytes.extend(cursor.number().to_le_bytes());
    }
    bytes
}

/// Decodes the position of a listing. An invalid cursor starts at the beginning.
fn parse_list_cursor(cursor: &[u8]) -> (usize, Option<ListCursor>) {
    let group = |bytes: &[u8]| usize::from(u16::from_le_bytes([bytes[0], bytes[1]]));
    match cursor.len() {
        2 => (group(cursor), None),
        6 => {
            let number = u32::from_le_bytes([cursor[2], cursor[3], cursor[4], cursor[5]]);
            (group(cursor), Some(ListCursor::from_number(number)))
        }
        _ => (0, None),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use moontide_types::{IdKey, SystemClock};

    use super::*;
    use crate::service::ServiceConfig;

    #[test]
    fn callers_get_the_id_key_of_the_tenant_in_their_context_only() {
        let config = ServiceConfig { id_key: IdKey::new(4, [9; 32]), ..ServiceConfig::for_tests() };
        let service = Service::new(config, Arc::new(SystemClock));
        let info = |tenant: &str| {
            let context =
                v1::RequestContext { tenant: tenant.into(), timeout_ms: 1_000, ..Default::default() };
            service.get_cluster_info(&v1::GetClusterInfoRequest { context: Some(context) })
        };
        let mut seen = BTreeSet::new();
        for name in ["acme", "beta", "default"] {
            let info = info(name);
            let own = IdKey::new(4, [9; 32]).of_tenant(Tenant::new(name).unwrap());
            assert_eq!((info.id_key, &info.tenant_id_key[..]), (4, &own.secret()[..]), "{name}");
            assert!(!info.encode_to_vec().windows(32).any(|bytes| bytes == [9; 32]), "key of the cluster");
            seen.insert(info.tenant_id_key);
        }
        assert_eq!(seen.len(), 3);
        assert!(seen.contains(&info("").tenant_id_key), "the default tenant");
        let refused = info("a/b");
        assert!(refused.context.unwrap().code != 0 && refused.tenant_id_key.is_empty());
    }
}
