//! Invalidations: objects that can no longer be read, for callers that cache or announce objects.

use moontide_types::limits::GROUPS_MAX;
use moontide_types::{ErrorCode, GroupId, ObjectId, Term};

use super::check::{self, at_least, at_most, copied, rule};
use super::context::RequestContext;
use super::response::{Response, ResponseBody, response_of};
use super::{ConvertError, Wire};
use crate::limits::{INVALIDATIONS_PER_RESPONSE_MAX, INVALIDATIONS_WAIT_MS_MAX};
use crate::v1;

/// Request for the invalidations since the last poll.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PollInvalidationsRequest<'a> {
    /// Request context.
    pub context: RequestContext<'a>,
    /// Position of the caller in each group.
    pub cursors: Vec<InvalidationCursor>,
    /// Time in milliseconds to wait for an invalidation.
    pub wait_ms: u32,
    /// Cluster of the cursors; 0 in the first poll.
    pub cluster: u64,
}

/// Position of a caller in the invalidations of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidationCursor {
    /// Group of the cursor.
    pub group: GroupId,
    /// Term of `next_sequence`.
    pub term: Term,
    /// Value from the last response; 0 in the first poll.
    pub next_sequence: u64,
}

impl<'a> Wire<'a> for PollInvalidationsRequest<'a> {
    type Message = v1::PollInvalidationsRequest;

    fn from_wire(m: &'a v1::PollInvalidationsRequest) -> Result<Self, ConvertError> {
        at_least("cursors", m.cursors.len(), 1u32)?;
        at_most("cursors", m.cursors.len(), GROUPS_MAX)?;
        at_most("wait_ms", m.wait_ms, INVALIDATIONS_WAIT_MS_MAX)?;
        let cursor = |m: &v1::InvalidationCursor| {
            let group = check::group("cursors.group", m.group)?;
            Ok(InvalidationCursor { group, term: check::term(m.term)?, next_sequence: m.next_sequence })
        };
        Ok(PollInvalidationsRequest {
            context: RequestContext::of(&m.context)?,
            cursors: m.cursors.iter().map(cursor).collect::<Result<_, ConvertError>>()?,
            wait_ms: m.wait_ms,
            cluster: m.cluster,
        })
    }

    fn to_wire(&self) -> v1::PollInvalidationsRequest {
        let cursor = |cursor: &InvalidationCursor| v1::InvalidationCursor {
            group: cursor.group.0.into(),
            term: cursor.term.get(),
            next_sequence: cursor.next_sequence,
        };
        v1::PollInvalidationsRequest {
            context: Some(self.context.to_wire()),
            cursors: self.cursors.iter().map(cursor).collect(),
            wait_ms: self.wait_ms,
            cluster: self.cluster,
        }
    }
}

/// Response of PollInvalidations.
pub type PollInvalidationsResponse<'a> = Response<'a, InvalidationBatch<'a>>;

/// Invalidations of several groups.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct InvalidationBatch<'a> {
    /// Groups with invalidations, or with an error code, e.g. because another master hosts the group.
    pub groups: Vec<(GroupId, Result<GroupInvalidations<'a>, ErrorCode>)>,
    /// Id of the cluster.
    pub cluster: u64,
}

/// Invalidations of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupInvalidations<'a> {
    /// Term of the group's master.
    pub term: Term,
    /// Cursor of the next poll.
    pub next_sequence: u64,
    /// Invalidations may be missing: the caller must re-check its keys.
    pub gap: bool,
    /// Packed ids of 16 bytes each.
    ids: &'a [u8],
}

/// Size of an id in bytes.
const ID_BYTES: usize = size_of::<ObjectId>();

impl GroupInvalidations<'_> {
    /// Iterates over the ids of objects that can no longer be read.
    pub fn ids(&self) -> impl ExactSizeIterator<Item = ObjectId> {
        let id = |bytes: &[u8]| ObjectId(bytes.try_into().expect("chunks of 16 bytes"));
        self.ids.chunks_exact(ID_BYTES).map(id)
    }
}

impl<'a> ResponseBody<'a> for InvalidationBatch<'a> {
    response_of!(v1::PollInvalidationsResponse);

    fn read(m: &'a v1::PollInvalidationsResponse) -> Result<Self, ConvertError> {
        at_most("groups", m.groups.len(), GROUPS_MAX)?;
        let all: usize = m.groups.iter().map(|group| group.ids.len()).sum();
        at_most("groups.ids", all / ID_BYTES, INVALIDATIONS_PER_RESPONSE_MAX)?;
        let group = |m: &'a v1::GroupInvalidations| {
            let group = check::group("groups.group", m.group)?;
            let invalidations = GroupInvalidations {
                term: check::term(m.term)?,
                next_sequence: m.next_sequence,
                gap: m.gap,
                ids: &m.ids,
            };
            if let Some(code) = check::code(m.code)? {
                let is_empty = invalidations.term == Term::ZERO
                    && invalidations.next_sequence == 0
                    && !invalidations.gap
                    && m.ids.is_empty();
                rule("groups.code", is_empty, "a group with a code has no other fields")?;
                return Ok((group, Err(code)));
            }
            at_least("groups.next_sequence", m.next_sequence, 1u32)?;
            rule("groups.ids", m.ids.len().is_multiple_of(ID_BYTES), "an id has 16 bytes")?;
            Ok((group, Ok(invalidations)))
        };
        let groups = m.groups.iter().map(group).collect::<Result<_, ConvertError>>()?;
        Ok(InvalidationBatch { groups, cluster: m.cluster })
    }

    fn write(&self) -> v1::PollInvalidationsResponse {
        let group = |(group, invalidations): &(GroupId, Result<GroupInvalidations<'_>, ErrorCode>)| {
            match invalidations {
                Ok(invalidations) => v1::GroupInvalidations {
                    group: group.0.into(),
                    code: 0,
                    term: invalidations.term.get(),
                    next_sequence: invalidations.next_sequence,
                    gap: invalidations.gap,
                    ids: copied(invalidations.ids),
                },
                Err(code) => {
                    v1::GroupInvalidations { group: group.0.into(), code: *code as u32, ..Default::default() }
                }
            }
        };
        let groups = self.groups.iter().map(group).collect();
        v1::PollInvalidationsResponse { context: None, groups, cluster: self.cluster }
    }
}
