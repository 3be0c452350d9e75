//! What stands in every request and every answer.

use moontide_types::bounds::{BATCH_KEYS_MAX, GROUPS_MAX};
use moontide_types::{ErrorCode, GroupId, MapVersion, SessionId, Tenant, TenantGeneration, Term};

use super::answer::{Answer, AnswerBody, answer_of};
use super::check::{self, at_least, at_most, copied, length, required, rule};
use super::{ConvertError, Wire};
use crate::hello::Token;
use crate::limits::{ADDRESS_BYTES_MAX, DEADLINE_MS_MAX, RETRY_AFTER_MS_MAX, TOKEN_BYTES_MAX};
use crate::packed::Codes;
use crate::v1;

/// The calling process, by a number it drew at random when it started. Not a
/// [`ClientId`](moontide_types::ClientId), which a node gives to a process on its own host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct CallerId(pub u64);

/// Who asks, and what the caller believes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestContext<'a> {
    /// Whose keys are meant.
    pub tenant: Tenant<'a>,
    /// The group of all keys, if there is one such.
    pub group: Option<GroupId>,
    /// The caller's group map.
    pub map_version: MapVersion,
    /// The term that the caller believes this master has; zero if it does not know.
    pub term: Term,
    /// The calling process.
    pub caller: CallerId,
    /// The calling node's session.
    pub session: Option<SessionId>,
    /// How long the caller waits.
    pub deadline_ms: u32,
    /// Proof of who it is.
    pub token: Token,
}

impl<'a> RequestContext<'a> {
    /// The context of a request, which must have one.
    pub(super) fn of(context: &'a Option<v1::RequestContext>) -> Result<RequestContext<'a>, ConvertError> {
        RequestContext::from_wire(required("context", context)?)
    }
}

impl<'a> Wire<'a> for RequestContext<'a> {
    type Message = v1::RequestContext;

    fn from_wire(m: &'a v1::RequestContext) -> Result<Self, ConvertError> {
        at_least("context.deadline_ms", m.deadline_ms, 1u32)?;
        at_most("context.deadline_ms", m.deadline_ms, DEADLINE_MS_MAX)?;
        let max = TOKEN_BYTES_MAX as u64;
        let too_long = ConvertError::TooLarge { field: "context.token", found: m.token.len() as u64, max };
        Ok(RequestContext {
            tenant: if m.tenant.is_empty() { Tenant::DEFAULT } else { Tenant::new(&m.tenant)? },
            group: m.group.map(|g| check::group("context.group", g)).transpose()?,
            map_version: MapVersion(m.map_version),
            term: check::term(m.term)?,
            caller: CallerId(m.caller),
            session: (m.session != 0).then_some(SessionId(m.session)),
            deadline_ms: m.deadline_ms,
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
            deadline_ms: self.deadline_ms,
            token: copied(self.token.as_bytes()),
        }
    }
}

/// Who answers, and what it knows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResponseContext<'a> {
    /// The master's group map.
    pub map_version: MapVersion,
    /// The master's term.
    pub term: Term,
    /// Why the whole call failed.
    pub code: Option<ErrorCode>,
    /// When another attempt makes sense.
    pub retry_after_ms: u32,
    /// Generation of the request's tenant.
    pub tenant_generation: TenantGeneration,
    /// The newer map, if the caller's is too old.
    pub newer_map: Option<GroupMap<'a>>,
}

impl<'a> ResponseContext<'a> {
    /// The context of an answer, which must have one.
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

/// Which master hosts which group. No group has two masters; some may have none at the moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupMap<'a> {
    /// Rises with every change.
    pub version: MapVersion,
    /// Groups of the cluster.
    pub groups: u16,
    /// The masters.
    pub masters: Vec<MasterEntry<'a>>,
    /// There is one master, and never another.
    pub alone: bool,
}

/// One master and its groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MasterEntry<'a> {
    /// Where it serves gRPC.
    pub grpc_address: &'a str,
    /// Where it serves the framed protocol; empty if it does not.
    pub frame_address: &'a str,
    /// Its number.
    pub term: Term,
    /// The groups it hosts.
    pub groups: Vec<GroupId>,
    /// The term of each of them.
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
                let place = hosted.get_mut(usize::from(group.0));
                let free = place.is_some_and(|hosted| !std::mem::replace(hosted, true));
                rule("map.masters.groups", free, "every group is one of the cluster's and has one master")?;
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
        Ok(GroupMap { version: MapVersion(m.version), groups, masters, alone: m.alone })
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
            alone: self.alone,
        }
    }
}

/// The answer of a call that has nothing to say but an outcome per entry.
pub type OutcomesResponse<'a> = Answer<'a, Outcomes<'a>>;

/// An outcome per entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcomes<'a> {
    /// One per entry of the request.
    pub codes: Codes<'a>,
}

impl<'a> AnswerBody<'a> for Outcomes<'a> {
    answer_of!(v1::OutcomesResponse);

    fn read(m: &'a v1::OutcomesResponse) -> Result<Self, ConvertError> {
        Ok(Outcomes { codes: check::codes("codes", &m.codes, BATCH_KEYS_MAX)? })
    }

    fn write(&self) -> v1::OutcomesResponse {
        v1::OutcomesResponse { context: None, codes: copied(self.codes.as_encoded()) }
    }
}
