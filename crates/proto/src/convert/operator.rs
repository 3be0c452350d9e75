//! Calls of operators and of clients at start: jobs, listings, cluster information, quotas.
//!
//! Requests are converted with their bounds. Answers that only an operator's tool shows stay messages.

use moontide_types::bounds::KEY_BYTES_MAX;
use moontide_types::{ErrorCode, NodeId, SegmentId};
use prost::bytes::Bytes;

use super::answer::{Answer, AnswerBody, answer_of};
use super::check::{self, at_least, at_most, copied, known, length, required, rule};
use super::context::RequestContext;
use super::{ConvertError, Wire};
use crate::hello::ProtocolVersions;
use crate::limits::{CURSOR_BYTES_MAX, PATTERN_BYTES_MAX};
use crate::packed::PackedKeys;
use crate::v1;

/// One segment of one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentRef {
    /// The node.
    pub node: NodeId,
    /// The segment.
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

/// The secret of an id key, on its way to those who may have it.
#[derive(Clone, PartialEq, Eq)]
pub struct IdKeySecret(pub [u8; 32]);

impl IdKeySecret {
    pub(super) fn from_wire(bytes: &Bytes) -> Result<Option<IdKeySecret>, ConvertError> {
        if bytes.is_empty() {
            return Ok(None);
        }
        check::count("id_key_secret", bytes.len(), 32)?;
        Ok(bytes[..].try_into().ok().map(IdKeySecret))
    }

    pub(super) fn to_wire(secret: &Option<IdKeySecret>) -> Bytes {
        secret.as_ref().map_or_else(Bytes::new, |secret| copied(&secret.0))
    }
}

impl std::fmt::Debug for IdKeySecret {
    /// Shows nothing: the secret must not reach a log.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("IdKeySecret(..)")
    }
}

/// A page of a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Page<'a> {
    /// Where the last page ended; empty for the first.
    pub cursor: &'a [u8],
    /// Most entries wanted.
    pub limit: u32,
}

impl<'a> Wire<'a> for Page<'a> {
    type Message = v1::Page;

    fn from_wire(m: &'a v1::Page) -> Result<Self, ConvertError> {
        length("page.cursor", &m.cursor, 0, CURSOR_BYTES_MAX)?;
        at_least("page.limit", m.limit, 1u32)?;
        at_most("page.limit", m.limit, moontide_types::bounds::BATCH_KEYS_MAX)?;
        Ok(Page { cursor: &m.cursor, limit: m.limit })
    }

    fn to_wire(&self) -> v1::Page {
        v1::Page { cursor: copied(self.cursor), limit: self.limit }
    }
}

/// Declares a request made of a context and a few fields, each with how to read it and how to write it.
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
            /// Who asks.
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

request! {
    /// Start removing every key with a prefix.
    RemoveByPrefixRequest {
        /// The prefix.
        prefix: &'a [u8],
            |m| { length("prefix", &m.prefix, 1, KEY_BYTES_MAX)?; &m.prefix }, |v| prefix: copied(v);
        /// Also what is leased or pinned.
        force: bool, |m| m.force, |v| force: *v;
    }
}

request! {
    /// Start removing every key that a regular expression matches.
    RemoveByRegexRequest {
        /// The expression.
        pattern: &'a str,
            |m| { length("pattern", &m.pattern, 1, PATTERN_BYTES_MAX)?; &m.pattern }, |v| pattern: (*v).into();
        /// Also what is leased or pinned.
        force: bool, |m| m.force, |v| force: *v;
    }
}

request! {
    /// Remove everything of a tenant.
    RemoveAllRequest {
        /// Also what is leased or pinned.
        force: bool,
            |m| {
                // "default" for want of a name would be a costly misunderstanding here.
                let named = m.context.as_ref().is_some_and(|context| !context.tenant.is_empty());
                rule("context.tenant", named, "the tenant is named")?;
                m.force
            },
            |v| force: *v;
        /// By force: the generation that another master has answered with; 0 for the next one.
        generation: u32, |m| m.generation, |v| generation: *v;
    }
}

request! {
    /// How far is a job?
    GetJobRequest {
        /// Its number.
        job: u64, |m| m.job, |v| job: *v;
    }
}

request! {
    /// Keys of a tenant.
    ListKeysRequest {
        /// Which page.
        page: Page<'a>, |m| Page::from_wire(required("page", &m.page)?)?, |v| page: Some(v.to_wire());
        /// Only keys with this prefix.
        prefix: &'a [u8],
            |m| { length("prefix", &m.prefix, 0, KEY_BYTES_MAX)?; &m.prefix }, |v| prefix: copied(v);
    }
}

request! {
    /// Everything the master knows about some keys.
    QueryKeysRequest {
        /// Which keys.
        keys: PackedKeys<'a>, |m| check::keys("keys", &m.keys)?, |v| keys: copied(v.as_encoded());
    }
}

request! {
    /// Evict until usage is below a ratio.
    EvictRequest {
        /// Usage to reach, in thousandths of the capacity.
        target_permille: u32,
            |m| { at_most("target_permille", m.target_permille, 1000u32)?; m.target_permille },
            |v| target_permille: *v;
    }
}

request! {
    /// Set the quota of the context's tenant.
    SetTenantQuotaRequest {
        /// Most bytes; 0 for no limit.
        bytes_max: u64, |m| m.bytes_max, |v| bytes_max: *v;
        /// Most objects; 0 for no limit.
        objects_max: u64, |m| m.objects_max, |v| objects_max: *v;
    }
}

request! {
    /// Tenants with their quotas.
    GetTenantsRequest {
        /// Which page.
        page: Page<'a>, |m| Page::from_wire(required("page", &m.page)?)?, |v| page: Some(v.to_wire());
    }
}

request! {
    /// Segments with their state.
    ListSegmentsRequest {
        /// Which page.
        page: Page<'a>, |m| Page::from_wire(required("page", &m.page)?)?, |v| page: Some(v.to_wire());
        /// Only segments of this node.
        node: Option<NodeId>,
            |m| (m.node != 0).then_some(NodeId(m.node)), |v| node: v.map_or(0, |node| node.0);
    }
}

request! {
    /// Move or evict everything out of a segment.
    DrainSegmentRequest {
        /// The segment.
        segment: SegmentRef,
            |m| SegmentRef::from_wire(required("segment", &m.segment)?)?, |v| segment: Some(v.to_wire());
        /// Evict instead of moving.
        evict: bool, |m| m.evict, |v| evict: *v;
    }
}

/// What a job is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum JobState {
    /// It goes on.
    Running,
    /// All done.
    Done,
    /// It gave up.
    Failed(ErrorCode),
}

/// The answer of GetJob.
pub type JobProgress<'a> = Answer<'a, JobStatus>;

/// How far a job is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobStatus {
    /// What it is doing.
    pub state: JobState,
    /// Objects looked at.
    pub examined: u64,
    /// Objects dealt with.
    pub affected: u64,
    /// Objects left alone because they are leased or pinned.
    pub skipped: u64,
    /// Objects to look at in all, as far as known.
    pub total: u64,
}

impl<'a> AnswerBody<'a> for JobStatus {
    answer_of!(v1::GetJobResponse);

    fn read(m: &'a v1::GetJobResponse) -> Result<Self, ConvertError> {
        let state = match (v1::JobState::try_from(m.state), check::code(m.code)?) {
            (Ok(v1::JobState::Running), None) => Some(JobState::Running),
            (Ok(v1::JobState::Done), None) => Some(JobState::Done),
            (Ok(v1::JobState::Failed), Some(code)) => Some(JobState::Failed(code)),
            _ => None,
        };
        Ok(JobStatus {
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
        }
    }
}

/// The answer of GetClusterInfo.
pub type ClusterInfo<'a> = Answer<'a, ClusterFacts>;

/// What a client must know before it can compute ids.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ClusterFacts {
    /// Number of the cluster.
    pub cluster: u64,
    /// Groups of the cluster.
    pub groups: u16,
    /// Number of the current id key.
    pub id_key: u32,
    /// Its secret, for those who may have it.
    pub id_key_secret: Option<IdKeySecret>,
    /// Versions that are served.
    pub protocol: ProtocolVersions,
}

impl<'a> AnswerBody<'a> for ClusterFacts {
    answer_of!(v1::GetClusterInfoResponse);

    fn read(m: &'a v1::GetClusterInfoResponse) -> Result<Self, ConvertError> {
        let protocol = ProtocolVersions {
            min: check::narrow("protocol_min", m.protocol_min, u16::MAX)?,
            max: check::narrow("protocol_max", m.protocol_max, u16::MAX)?,
        };
        rule("protocol_min", protocol.is_valid(), "1 ≤ lowest version ≤ highest")?;
        Ok(ClusterFacts {
            cluster: m.cluster,
            groups: check::groups("groups", m.groups)?,
            id_key: m.id_key,
            id_key_secret: IdKeySecret::from_wire(&m.id_key_secret)?,
            protocol,
        })
    }

    fn write(&self) -> v1::GetClusterInfoResponse {
        v1::GetClusterInfoResponse {
            context: None,
            cluster: self.cluster,
            groups: self.groups.into(),
            id_key: self.id_key,
            id_key_secret: IdKeySecret::to_wire(&self.id_key_secret),
            protocol_min: self.protocol.min.into(),
            protocol_max: self.protocol.max.into(),
        }
    }
}
