//! Calls of operators, and of clients at their start: jobs, listings, cluster information, quotas.
//!
//! All requests are checked and converted. Responses that only operators' tools display remain messages.

use moontide_types::limits::{GROUPS_MAX, KEY_BYTES_MAX};
use moontide_types::{ErrorCode, GroupId, NodeId, SegmentId};
use prost::bytes::Bytes;

use super::check::{self, at_least, at_most, copied, known, length, required, rule};
use super::context::RequestContext;
use super::response::{Response, ResponseBody, response_of};
use super::{ConvertError, Wire};
use crate::hello::ProtocolVersions;
use crate::limits::{CURSOR_BYTES_MAX, PATTERN_BYTES_MAX};
use crate::packed::PackedKeys;
use crate::v1;

/// One segment of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentRef {
    /// Id of the node.
    pub node: NodeId,
    /// Id of the segment.
    pub segment: SegmentId,
}

impl<'a> Wire<'a> for SegmentRef {
    type Message = v1::SegmentRef;

    fn from_wire(m: &'a v1::SegmentRef) -> Result<Self, ConvertError> {
        Ok(SegmentRef { node: NodeId(m.node), segment: check::segment("segment", m.segment)? })
    }

    fn to_wire(&self) -> v1::SegmentRef {
        v1::SegmentRef { node: self.node.0, segment: self.segment.0 }
    }
}

/// Secret of an id key: that of the cluster as sent to nodes, or that of a tenant as sent to its clients.
#[derive(Clone, PartialEq, Eq)]
pub struct IdKeySecret(pub [u8; 32]);

impl IdKeySecret {
    pub(super) fn from_wire(field: &'static str, bytes: &Bytes) -> Result<Option<IdKeySecret>, ConvertError> {
        if bytes.is_empty() {
            return Ok(None);
        }
        check::count(field, bytes.len(), 32)?;
        Ok(bytes[..].try_into().ok().map(IdKeySecret))
    }

    pub(super) fn to_wire(secret: &Option<IdKeySecret>) -> Bytes {
        secret.as_ref().map_or_else(Bytes::new, |secret| copied(&secret.0))
    }
}

impl std::fmt::Debug for IdKeySecret {
    /// Prints no bytes: the secret must not reach a log.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("IdKeySecret(..)")
    }
}

/// Position and size of a page of a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pagination<'a> {
    /// Cursor from the last page; empty for the first page.
    pub cursor: &'a [u8],
    /// Maximum number of entries.
    pub limit: u32,
}

impl<'a> Wire<'a> for Pagination<'a> {
    type Message = v1::Pagination;

    fn from_wire(m: &'a v1::Pagination) -> Result<Self, ConvertError> {
        length("page.cursor", &m.cursor, 0, CURSOR_BYTES_MAX)?;
        at_least("page.limit", m.limit, 1u32)?;
        at_most("page.limit", m.limit, moontide_types::limits::BATCH_KEYS_MAX)?;
        Ok(Pagination { cursor: &m.cursor, limit: m.limit })
    }

    fn to_wire(&self) -> v1::Pagination {
        v1::Pagination { cursor: copied(self.cursor), limit: self.limit }
    }
}

/// Declares a request with a context and fields, each with expressions to read and write it.
macro_rules! request {
    (
        $(#[$doc:meta])*
        $name:ident {
            $($(#[$field_doc:meta])* $field:ident: $type:ty,
                |$m:ident| $read:expr, |$value:ident| $write_field:ident: $write:expr;)*
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub struct $name<'a> {
            /// Request context.
            pub context: RequestContext<'a>,
            $($(#[$field_doc])* pub $field: $type,)*
        }

        impl<'a> Wire<'a> for $name<'a> {
            type Message = v1::$name;

            fn from_wire(message: &'a v1::$name) -> Result<Self, ConvertError> {
                Ok($name {
                    context: RequestContext::of(&message.context)?,
                    $($field: { let $m = message; $read },)*
                })
            }

            fn to_wire(&self) -> v1::$name {
                v1::$name {
                    context: Some(self.context.to_wire()),
                    $($write_field: { let $value = &self.$field; $write },)*
                }
            }
        }
    };
}

/// Checks a list of groups.
fn group_list(groups: &[u32]) -> Result<&[u32], ConvertError> {
    at_most("groups", groups.len(), GROUPS_MAX)?;
    for &group in groups {
        check::group("groups", group)?;
    }
    Ok(groups)
}

request! {
    /// Starts a job that removes every key with a prefix.
    RemoveByPrefixRequest {
        /// Prefix of the keys, 1 to [`KEY_BYTES_MAX`] bytes.
        prefix: &'a [u8],
            |m| { length("prefix", &m.prefix, 1, KEY_BYTES_MAX)?; &m.prefix }, |v| prefix: copied(v);
        /// Whether to remove leased and pinned objects, too.
        force: bool, |m| m.force, |v| force: *v;
        /// Groups in which the removal runs; empty for all.
        groups: &'a [u32], |m| group_list(&m.groups)?, |v| groups: v.to_vec();
    }
}

request! {
    /// Starts a job that removes every key that matches a regular expression.
    RemoveByRegexRequest {
        /// Regular expression, 1 to [`PATTERN_BYTES_MAX`] bytes.
        pattern: &'a str,
            |m| { length("pattern", &m.pattern, 1, PATTERN_BYTES_MAX)?; &m.pattern }, |v| pattern: (*v).into();
        /// Whether to remove leased and pinned objects, too.
        force: bool, |m| m.force, |v| force: *v;
        /// Groups in which the removal runs; empty for all.
        groups: &'a [u32], |m| group_list(&m.groups)?, |v| groups: v.to_vec();
    }
}

request! {
    /// Removes all objects of a tenant.
    RemoveAllRequest {
        /// Whether to remove leased and pinned objects, too.
        force: bool,
            |m| {
                // The tenant must be explicit: an accidental removal of all objects of "default" is expensive.
                let named = m.context.as_ref().is_some_and(|context| !context.tenant.is_empty());
                rule("context.tenant", named, "the tenant is given")?;
                m.force
            },
            |v| force: *v;
        /// With `force`: the tenant generation that another master returned; 0 for the next generation.
        generation: u32, |m| m.generation, |v| generation: *v;
        /// Groups in which the removal runs; empty for all.
        groups: &'a [u32], |m| group_list(&m.groups)?, |v| groups: v.to_vec();
    }
}

request! {
    /// Queries the progress of a job.
    GetJobRequest {
        /// Id of the job.
        job: u64, |m| m.job, |v| job: *v;
        /// Groups of a removal that the response covers; empty for all.
        groups: &'a [u32], |m| group_list(&m.groups)?, |v| groups: v.to_vec();
    }
}

request! {
    /// Lists keys of a tenant.
    ListKeysRequest {
        /// Position and size of the page.
        page: Pagination<'a>, |m| Pagination::from_wire(required("page", &m.page)?)?, |v| page: Some(v.to_wire());
        /// Only keys with this prefix.
        prefix: &'a [u8],
            |m| { length("prefix", &m.prefix, 0, KEY_BYTES_MAX)?; &m.prefix }, |v| prefix: copied(v);
    }
}

request! {
    /// Queries the metadata of keys.
    QueryKeysRequest {
        /// Keys of the objects.
        keys: PackedKeys<'a>, |m| check::keys("keys", &m.keys)?, |v| keys: copied(v.as_encoded());
    }
}

request! {
    /// Evicts objects until usage is below a ratio.
    EvictRequest {
        /// Target usage in thousandths of the capacity.
        target_permille: u32,
            |m| { at_most("target_permille", m.target_permille, 1000u32)?; m.target_permille },
            |v| target_permille: *v;
    }
}

request! {
    /// Sets the quota of the context's tenant.
    SetTenantQuotaRequest {
        /// Maximum number of bytes; 0 for no limit.
        bytes_max: u64, |m| m.bytes_max, |v| bytes_max: *v;
        /// Maximum number of objects; 0 for no limit.
        objects_max: u64, |m| m.objects_max, |v| objects_max: *v;
    }
}

request! {
    /// Lists tenants with their quotas.
    GetTenantsRequest {
        /// Position and size of the page.
        page: Pagination<'a>, |m| Pagination::from_wire(required("page", &m.page)?)?, |v| page: Some(v.to_wire());
    }
}

request! {
    /// Lists segments with their state.
    ListSegmentsRequest {
        /// Position and size of the page.
        page: Pagination<'a>, |m| Pagination::from_wire(required("page", &m.page)?)?, |v| page: Some(v.to_wire());
        /// Only segments of this node.
        node: Option<NodeId>,
            |m| (m.node != 0).then_some(NodeId(m.node)), |v| node: v.map_or(0, |node| node.0);
    }
}

request! {
    /// Starts to drain a segment: it accepts no new objects.
    DrainSegmentRequest {
        /// Segment to drain.
        segment: SegmentRef,
            |m| SegmentRef::from_wire(required("segment", &m.segment)?)?, |v| segment: Some(v.to_wire());
        /// Whether to evict the objects of the segment; otherwise they move to other segments.
        evict: bool, |m| m.evict, |v| evict: *v;
    }
}

request! {
    /// Starts or ends the drain of a node.
    DrainNodeRequest {
        /// Node to drain.
        node: NodeId, |m| { at_least("node", m.node, 1u64)?; NodeId(m.node) }, |v| node: v.0;
        /// Whether the drain ends.
        undrain: bool, |m| m.undrain, |v| undrain: *v;
    }
}

/// State of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobState {
    /// The job is not finished.
    Running,
    /// The job is complete.
    Done,
    /// The job failed with this code.
    Failed(ErrorCode),
}

/// Response of GetJob.
pub type GetJobResponse<'a> = Response<'a, JobStatus>;

/// Progress of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobStatus {
    /// Current state.
    pub state: JobState,
    /// Number of objects examined.
    pub examined: u64,
    /// Number of objects removed or evicted.
    pub affected: u64,
    /// Number of objects skipped because they are leased or pinned.
    pub skipped: u64,
    /// Total number of objects to examine, as far as known.
    pub total: u64,
    /// Groups that the master has lost since the start, with their part of a removal.
    pub lost: Vec<GroupId>,
}

impl<'a> ResponseBody<'a> for JobStatus {
    response_of!(v1::GetJobResponse);

    fn read(m: &'a v1::GetJobResponse) -> Result<Self, ConvertError> {
        let state = match (v1::JobState::try_from(m.state), check::code(m.code)?) {
            (Ok(v1::JobState::Running), None) => Some(JobState::Running),
            (Ok(v1::JobState::Done), None) => Some(JobState::Done),
            (Ok(v1::JobState::Failed), Some(code)) => Some(JobState::Failed(code)),
            _ => None,
        };
        at_most("lost_groups", m.lost_groups.len(), GROUPS_MAX)?;
        let lost = m.lost_groups.iter().map(|&group| check::group("lost_groups", group));
        Ok(JobStatus {
            lost: lost.collect::<Result<_, _>>()?,
            state: known("state", m.state, state)?,
            examined: m.examined,
            affected: m.affected,
            skipped: m.skipped,
            total: m.total,
        })
    }

    fn write(&self) -> v1::GetJobResponse {
        let (state, code) = match self.state {
            JobState::Running => (v1::JobState::Running, None),
            JobState::Done => (v1::JobState::Done, None),
            JobState::Failed(code) => (v1::JobState::Failed, Some(code)),
        };
        v1::GetJobResponse {
            context: None,
            state: state.into(),
            examined: self.examined,
            affected: self.affected,
            skipped: self.skipped,
            total: self.total,
            code: check::code_number(code),
            lost_groups: self.lost.iter().map(|group| group.0.into()).collect(),
        }
    }
}

/// Response of GetClusterInfo.
pub type GetClusterInfoResponse<'a> = Response<'a, ClusterInfo>;

/// Parameters of the cluster that a client needs to compute the ids of its tenant's objects.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterInfo {
    /// Id of the cluster.
    pub cluster: u64,
    /// Number of groups of the cluster.
    pub groups: u16,
    /// Number of the current id key.
    pub id_key: u32,
    /// Secret of the tenant's id key, if the caller may have it.
    pub tenant_id_key: Option<IdKeySecret>,
    /// Supported protocol versions.
    pub protocol: ProtocolVersions,
}

impl<'a> ResponseBody<'a> for ClusterInfo {
    response_of!(v1::GetClusterInfoResponse);

    fn read(m: &'a v1::GetClusterInfoResponse) -> Result<Self, ConvertError> {
        let protocol = ProtocolVersions {
            min: check::narrow("protocol_min", m.protocol_min, u16::MAX)?,
            max: check::narrow("protocol_max", m.protocol_max, u16::MAX)?,
        };
        rule("protocol_min", protocol.is_valid(), "1 ≤ lowest version ≤ highest")?;
        Ok(ClusterInfo {
            cluster: m.cluster,
            groups: check::groups("groups", m.groups)?,
            id_key: m.id_key,
            tenant_id_key: IdKeySecret::from_wire("tenant_id_key", &m.tenant_id_key)?,
            protocol,
        })
    }

    fn write(&self) -> v1::GetClusterInfoResponse {
        v1::GetClusterInfoResponse {
            context: None,
            cluster: self.cluster,
            groups: self.groups.into(),
            id_key: self.id_key,
            tenant_id_key: IdKeySecret::to_wire(&self.tenant_id_key),
            protocol_min: self.protocol.min.into(),
            protocol_max: self.protocol.max.into(),
        }
    }
}
