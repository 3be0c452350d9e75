//! Bodies of data-plane frames that are messages: begin and commit.

use moontide_types::Tenant;
use moontide_types::bounds::BATCH_KEYS_MAX;

use super::check::{self, copied, count};
use super::objects::{AttributeSections, ObjectList};
use super::{ConvertError, Wire};
use crate::limits::HANDLES_PER_ANSWER_MAX;
use crate::packed::{Codes, Packed, PackedKeys};
use crate::records::CommitEntry;
use crate::v1;

/// Open slots for writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BeginRequest<'a> {
    /// Whose keys.
    pub tenant: Tenant<'a>,
    /// Which keys.
    pub keys: PackedKeys<'a>,
    /// One entry per key, with the handles on this node.
    pub list: ObjectList<'a>,
    /// One section per key; `None` when none has any.
    pub attributes: Option<AttributeSections<'a>>,
}

impl<'a> Wire<'a> for BeginRequest<'a> {
    type Message = v1::BeginRequest;

    fn from_wire(m: &'a v1::BeginRequest) -> Result<Self, ConvertError> {
        let keys = check::keys("keys", &m.keys)?;
        let list = ObjectList::from_wire(&m.objects, &m.handles)?;
        count("objects", list.len(), keys.len())?;
        let attributes = AttributeSections::from_wire(&m.attributes, keys.len())?;
        Ok(BeginRequest { tenant: Tenant::new(&m.tenant)?, keys, list, attributes })
    }

    fn to_wire(&self) -> v1::BeginRequest {
        v1::BeginRequest {
            tenant: self.tenant.as_str().into(),
            keys: copied(self.keys.as_encoded()),
            objects: self.list.objects_to_wire(),
            handles: self.list.handles_to_wire(),
            attributes: AttributeSections::to_wire(self.attributes),
        }
    }
}

/// Publish or abandon slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommitRequest<'a> {
    /// Which slots.
    pub entries: Packed<'a, CommitEntry>,
}

impl<'a> Wire<'a> for CommitRequest<'a> {
    type Message = v1::CommitRequest;

    fn from_wire(m: &'a v1::CommitRequest) -> Result<Self, ConvertError> {
        Ok(CommitRequest { entries: check::records("entries", &m.entries, BATCH_KEYS_MAX)? })
    }

    fn to_wire(&self) -> v1::CommitRequest {
        v1::CommitRequest { entries: copied(self.entries.as_encoded()) }
    }
}

/// One outcome per handle of a Begin, or per entry of a Commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotOutcomes<'a> {
    /// The outcomes.
    pub codes: Codes<'a>,
}

impl<'a> Wire<'a> for SlotOutcomes<'a> {
    type Message = v1::SlotOutcomes;

    fn from_wire(m: &'a v1::SlotOutcomes) -> Result<Self, ConvertError> {
        Ok(SlotOutcomes { codes: check::codes("codes", &m.codes, HANDLES_PER_ANSWER_MAX)? })
    }

    fn to_wire(&self) -> v1::SlotOutcomes {
        v1::SlotOutcomes { codes: copied(self.codes.as_encoded()) }
    }
}
