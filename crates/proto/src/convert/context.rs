//! Contexts of requests and responses, and the group map.

use moontide_types::limits::GROUPS_MAX;
use moontide_types::{ErrorCode, GroupId, MapVersion, SessionId, Tenant, TenantGeneration, Term};

use super::check::{self, at_least, at_most, copied, length, required, rule};
use super::{ConvertError, Wire};
use crate::hello::Token;
use crate::limits::{ADDRESS_BYTES_MAX, RETRY_AFTER_MS_MAX, TIMEOUT_MS_MAX, TOKEN_BYTES_MAX};
use crate::v1;

/// Random number of a calling process, chosen at its start. Not a [`ClientId`](moontide_types::ClientId), which a
/// node assigns to a process of its own host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallerId(pub u64);

/// Context of a request: identity of the caller, and its view of the cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestContext<'a> {
    /// Tenant of the keys.
    pub tenant: Tenant<'a>,
    /// Group of all keys, if they belong to one group.
    pub group: Option<GroupId>,
    /// Version of the caller's group map.
    pub map_version: MapVersion,
    /// Term of this master according to the caller; zero if unknown.
    pub term: Term,
    /// Calling process.
    pub caller: CallerId,
    /// Session of the calling node.
    pub session: Option<SessionId>,
    /// Timeout of the call in milliseconds.
    pub timeout_ms: u32,
    /// Authentication token.
    pub token: Token,
}

impl<'a> RequestContext<'a> {
    /// Converts the context of a request. Fails if it is missing.
    pub(super) fn of(context: &'a Option<v1::RequestContext>) -> Result<RequestContext<'a>, ConvertError> {
        RequestContext::from_wire(required("context", context)?)
    }
}

impl<'a> Wire<'a> for RequestContext<'a> {
    type Message = v1::RequestContext;

    fn from_wire(m: &'a v1::RequestContext) -> Result<Self, ConvertError> {
        at_least("context.timeout_ms", m.timeout_ms, 1u32)?;
        at_most("context.timeout_ms", m.timeout_ms, TIMEOUT_MS_MAX)?;
        let max = TOKEN_BYTES_MAX as u64;
        let too_long = ConvertError::TooLarge { field: "context.token", found: m.token.len() as u64, max };
        Ok(RequestContext {
            tenant: if m.tenant.is_empty() { Tenant::DEFAULT } else { Tenant::new(&m.tenant)? },
            group: m.group.map(|g| check::group("context.group", g)).transpose()?,
            map_version: MapVersion(m.map_version),
            term: check::term(m.term)?,
            caller: CallerId(m.caller),
            session: (m.session != 0).then_some(SessionId(m.session)),
            timeout_ms: m.timeout_ms,
            token: Token::new(&m.token).ok_or(too_long)?,
        })
    }

    fn to_wire(&self) -> v1::RequestContext {
        v1::RequestContext {
            tenant: self.tenant.as_str().into(),
            group: self.group.map(|g| g.0.into()),
            map_version: self.map_version.0,
            term: self.term.get(),
            caller: self.caller.0,
            session: self.session.map_or(0, |s| s.0),
            timeout_ms: self.timeout_ms,
            token: copied(self.token.as_bytes()),
        }
    }
}

/// Context of a response: view of the master, and the error code of the call.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResponseContext<'a> {
    /// Version of the master's group map.
    pub map_version: MapVersion,
    /// Term of the master.
    pub term: Term,
    /// Error code if the whole call failed.
    pub code: Option<ErrorCode>,
    /// Delay in milliseconds before a retry makes sense.
    pub retry_after_ms: u32,
    /// Generation of the tenant of the request.
    pub tenant_generation: TenantGeneration,
    /// Current map, if the caller's is outdated.
    pub newer_map: Option<GroupMap<'a>>,
}

impl<'a> ResponseContext<'a> {
    /// Converts the context of a response. Fails if it is missing.
    pub(super) fn of(context: &'a Option<v1::ResponseContext>) -> Result<ResponseContext<'a>, ConvertError> {
        ResponseContext::from_wire(required("context", context)?)
    }
}

impl<'a> Wire<'a> for ResponseContext<'a> {
    type Message = v1::ResponseContext;

    fn from_wire(m: &'a v1::ResponseContext) -> Result<Self, ConvertError> {
        at_most("context.retry_after_ms", m.retry_after_ms, RETRY_AFTER_MS_MAX)?;
        Ok(ResponseContext {
            map_version: MapVersion(m.map_version),
            term: check::term(m.term)?,
            code: check::code(m.code)?,
            retry_after_ms: m.retry_after_ms,
            tenant_generation: TenantGeneration(m.tenant_generation),
            newer_map: m.newer_map.as_ref().map(GroupMap::from_wire).transpose()?,
        })
    }

    fn to_wire(&self) -> v1::ResponseContext {
        v1::ResponseContext {
            map_version: self.map_version.0,
            term: self.term.get(),
            code: check::code_number(self.code),
            retry_after_ms: self.retry_after_ms,
            tenant_generation: self.tenant_generation.0,
            newer_map: self.newer_map.as_ref().map(Wire::to_wire),
        }
    }
}

/// Group map: which master hosts which group. No group has two masters; a group may have none at the moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupMap<'a> {
    /// Version; increases with every change.
    pub version: MapVersion,
    /// Number of groups of the cluster.
    pub groups: u16,
    /// Masters with their groups.
    pub masters: Vec<MasterEntry<'a>>,
    /// Single-master cluster: use the address from which the map was fetched.
    pub single_master: bool,
}

/// One master and its groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MasterEntry<'a> {
    /// Address of the gRPC server.
    pub grpc_address: &'a str,
    /// Address of the frame server; empty if there is none.
    pub frame_address: &'a str,
    /// Id of this master: a term that no other master had.
    pub term: Term,
    /// Groups that it hosts.
    pub groups: Vec<GroupId>,
    /// Term of each of these groups.
    pub terms: Vec<Term>,
}

impl<'a> Wire<'a> for GroupMap<'a> {
    type Message = v1::GroupMap;

    fn from_wire(m: &'a v1::GroupMap) -> Result<Self, ConvertError> {
        let groups = check::groups("map.groups", m.groups)?;
        at_most("map.masters", m.masters.len(), GROUPS_MAX)?;
        let mut hosted = vec![false; groups.into()];
        let mut masters = Vec::with_capacity(m.masters.len());
        for master in &m.masters {
            length("map.grpc_address", &master.grpc_address, 1, ADDRESS_BYTES_MAX)?;
            length("map.frame_address", &master.frame_address, 0, ADDRESS_BYTES_MAX)?;
            at_most("map.masters.groups", master.groups.len(), groups)?;
            let mut own = Vec::with_capacity(master.groups.len());
            for &group in &master.groups {
                let group = check::group("map.masters.groups", group)?;
                let entry = hosted.get_mut(usize::from(group.0));
                let unclaimed = entry.is_some_and(|hosted| !std::mem::replace(hosted, true));
                rule("map.masters.groups", unclaimed, "every group exists and has at most one master")?;
                own.push(group);
            }
            check::count("map.masters.terms", master.terms.len(), own.len())?;
            let terms = master.terms.iter().map(|&term| check::term(term)).collect::<Result<_, _>>()?;
            masters.push(MasterEntry {
                grpc_address: &master.grpc_address,
                frame_address: &master.frame_address,
                term: check::term(master.term)?,
                groups: own,
                terms,
            });
        }
        Ok(GroupMap { version: MapVersion(m.version), groups, masters, single_master: m.single_master })
    }

    fn to_wire(&self) -> v1::GroupMap {
        let master = |m: &MasterEntry<'_>| v1::MasterEntry {
            grpc_address: m.grpc_address.into(),
            frame_address: m.frame_address.into(),
            term: m.term.get(),
            groups: m.groups.iter().map(|g| g.0.into()).collect(),
            terms: m.terms.iter().map(|term| term.get()).collect(),
        };
        v1::GroupMap {
            version: self.version.0,
            groups: self.groups.into(),
            masters: self.masters.iter().map(master).collect(),
            single_master: self.single_master,
        }
    }
}
