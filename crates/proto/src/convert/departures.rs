//! What has left the store, for those who told others of it.

use moontide_types::bounds::GROUPS_MAX;
use moontide_types::{ErrorCode, GroupId, ObjectId, Term};

use super::answer::{Answer, AnswerBody, answer_of};
use super::check::{self, at_least, at_most, copied, rule};
use super::context::RequestContext;
use super::{ConvertError, Wire};
use crate::limits::{DEPARTURES_PER_ANSWER_MAX, DEPARTURES_WAIT_MS_MAX};
use crate::v1;

/// What has left since the caller asked last?
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GetDeparturesRequest<'a> {
    /// Who asks.
    pub context: RequestContext<'a>,
    /// Where it has got to, by group.
    pub cursors: Vec<DepartureCursor>,
    /// How long to wait if there is nothing to tell.
    pub wait_ms: u32,
    /// The cluster that the cursors are of; 0 for a caller that begins.
    pub cluster: u64,
}

/// Where a caller has got to in a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DepartureCursor {
    /// The group.
    pub group: GroupId,
    /// The term that `next` was given in.
    pub term: Term,
    /// What the last answer said; 0 for a caller that begins.
    pub next: u64,
}

impl<'a> Wire<'a> for GetDeparturesRequest<'a> {
    type Message = v1::GetDeparturesRequest;

    fn from_wire(m: &'a v1::GetDeparturesRequest) -> Result<Self, ConvertError> {
        at_least("cursors", m.cursors.len(), 1u32)?;
        at_most("cursors", m.cursors.len(), GROUPS_MAX)?;
        at_most("wait_ms", m.wait_ms, DEPARTURES_WAIT_MS_MAX)?;
        let cursor = |m: &v1::DepartureCursor| {
            let group = check::group("cursors.group", m.group)?;
            Ok(DepartureCursor { group, term: check::term(m.term)?, next: m.next })
        };
        Ok(GetDeparturesRequest {
            context: RequestContext::of(&m.context)?,
            cursors: m.cursors.iter().map(cursor).collect::<Result<_, ConvertError>>()?,
            wait_ms: m.wait_ms,
            cluster: m.cluster,
        })
    }

    fn to_wire(&self) -> v1::GetDeparturesRequest {
        let cursor = |cursor: &DepartureCursor| v1::DepartureCursor {
            group: cursor.group.0.into(),
            term: cursor.term.get(),
            next: cursor.next,
        };
        v1::GetDeparturesRequest {
            context: Some(self.context.to_wire()),
            cursors: self.cursors.iter().map(cursor).collect(),
            wait_ms: self.wait_ms,
            cluster: self.cluster,
        }
    }
}

/// The answer of GetDepartures.
pub type GetDeparturesResponse<'a> = Answer<'a, DeparturesAnswer<'a>>;

/// Groups with something to tell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeparturesAnswer<'a> {
    /// Each with what has left it, or with why it is to be looked for elsewhere.
    pub groups: Vec<(GroupId, Result<GroupDepartures<'a>, ErrorCode>)>,
    /// Number of the cluster.
    pub cluster: u64,
}

/// What has left a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupDepartures<'a> {
    /// The term of its master.
    pub term: Term,
    /// What to ask for next.
    pub next: u64,
    /// Something may have left that is in no answer.
    pub gap: bool,
    /// Ids of 16 bytes each.
    ids: &'a [u8],
}

/// Bytes of an id.
const ID_BYTES: usize = size_of::<ObjectId>();

impl GroupDepartures<'_> {
    /// Objects that a get would not find.
    pub fn ids(&self) -> impl ExactSizeIterator<Item = ObjectId> {
        let id = |bytes: &[u8]| ObjectId(bytes.try_into().expect("they were counted"));
        self.ids.chunks_exact(ID_BYTES).map(id)
    }
}

impl<'a> AnswerBody<'a> for DeparturesAnswer<'a> {
    answer_of!(v1::GetDeparturesResponse);

    fn read(m: &'a v1::GetDeparturesResponse) -> Result<Self, ConvertError> {
        at_most("groups", m.groups.len(), GROUPS_MAX)?;
        let all: usize = m.groups.iter().map(|group| group.ids.len()).sum();
        at_most("groups.ids", all / ID_BYTES, DEPARTURES_PER_ANSWER_MAX)?;
        let group = |m: &'a v1::GroupDepartures| {
            let group = check::group("groups.group", m.group)?;
            let told = GroupDepartures { term: check::term(m.term)?, next: m.next, gap: m.gap, ids: &m.ids };
            if let Some(code) = check::code(m.code)? {
                let is_empty = told.term == Term::ZERO && told.next == 0 && !told.gap && m.ids.is_empty();
                rule("groups.code", is_empty, "what failed tells nothing")?;
                return Ok((group, Err(code)));
            }
            at_least("groups.next", m.next, 1u32)?;
            rule("groups.ids", m.ids.len().is_multiple_of(ID_BYTES), "an id has 16 bytes")?;
            Ok((group, Ok(told)))
        };
        let groups = m.groups.iter().map(group).collect::<Result<_, ConvertError>>()?;
        Ok(DeparturesAnswer { groups, cluster: m.cluster })
    }

    fn write(&self) -> v1::GetDeparturesResponse {
        let group = |(group, told): &(GroupId, Result<GroupDepartures<'_>, ErrorCode>)| match told {
            Ok(told) => v1::GroupDepartures {
                group: group.0.into(),
                code: 0,
                term: told.term.get(),
                next: told.next,
                gap: told.gap,
                ids: copied(told.ids),
            },
            Err(code) => {
                v1::GroupDepartures { group: group.0.into(), code: *code as u32, ..Default::default() }
            }
        };
        let groups = self.groups.iter().map(group).collect();
        v1::GetDeparturesResponse { context: None, groups, cluster: self.cluster }
    }
}
