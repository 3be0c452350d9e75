//! Bodies of data-plane frames that are messages: begin, commit, load and attach.

use moontide_types::bounds::{BATCH_KEYS_MAX, LEASE_MS_MAX};
use moontide_types::{Generation, SegmentId, Tenant};

use super::check::{self, at_least, at_most, copied, count, length, rule};
use super::objects::{AttributeSections, ListKind, ObjectList};
use super::{ConvertError, Wire};
use crate::limits::{
    ATTACH_BYTES_MAX, ATTACH_KEY_BYTES_MAX, ATTACH_REGIONS_MAX, ENGINE_BYTES_MAX, HANDLES_PER_ANSWER_MAX,
    OPS_PER_FRAME_MAX,
};
use crate::ops::{OpKind, TransferOp};
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
        let list = ObjectList::from_wire(&m.objects, &m.handles, ListKind::Begin)?;
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

/// Bring bytes from disk into staging slots.
///
/// Invariant: there is an operation, and each is a Load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadRequest<'a> {
    /// Which bytes.
    pub ops: Packed<'a, TransferOp>,
    /// How long the staging slots are wanted.
    pub lease_ms: u32,
}

impl<'a> Wire<'a> for LoadRequest<'a> {
    type Message = v1::LoadRequest;

    fn from_wire(m: &'a v1::LoadRequest) -> Result<Self, ConvertError> {
        let ops: Packed<'a, TransferOp> = check::records("ops", &m.ops, OPS_PER_FRAME_MAX)?;
        at_least("ops", ops.len(), 1usize)?;
        rule("ops", ops.iter().all(|op| op.kind == OpKind::Load), "every operation is a Load")?;
        at_least("lease_ms", m.lease_ms, 1u32)?;
        at_most("lease_ms", m.lease_ms, LEASE_MS_MAX)?;
        Ok(LoadRequest { ops, lease_ms: m.lease_ms })
    }

    fn to_wire(&self) -> v1::LoadRequest {
        v1::LoadRequest { ops: copied(self.ops.as_encoded()), lease_ms: self.lease_ms }
    }
}

/// Where the bytes are now. A request that failed as a whole is answered by the frame's status.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadReply<'a> {
    /// One entry per operation; its window is the life of the staging slot, which its handle names.
    pub list: ObjectList<'a>,
}

impl<'a> Wire<'a> for LoadReply<'a> {
    type Message = v1::LoadReply;

    fn from_wire(m: &'a v1::LoadReply) -> Result<Self, ConvertError> {
        let list = ObjectList::from_wire(&m.objects, &m.handles, ListKind::Load)?;
        at_most("objects", list.len(), OPS_PER_FRAME_MAX)?;
        Ok(LoadReply { list })
    }

    fn to_wire(&self) -> v1::LoadReply {
        v1::LoadReply { objects: self.list.objects_to_wire(), handles: self.list.handles_to_wire() }
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

/// Ask how a node's memory may be used one-sidedly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttachRequest<'a> {
    /// The transfer engine.
    pub engine: &'a str,
}

impl<'a> Wire<'a> for AttachRequest<'a> {
    type Message = v1::AttachRequest;

    fn from_wire(m: &'a v1::AttachRequest) -> Result<Self, ConvertError> {
        length("engine", &m.engine, 1, ENGINE_BYTES_MAX)?;
        Ok(AttachRequest { engine: &m.engine })
    }

    fn to_wire(&self) -> v1::AttachRequest {
        v1::AttachRequest { engine: self.engine.into() }
    }
}

/// Whom to connect to, and what opens each region. The fullest one fits into a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttachReply<'a> {
    /// The engine's own notation.
    pub address: &'a [u8],
    /// The regions.
    pub regions: Vec<AttachedRegion<'a>>,
}

impl<'a> Wire<'a> for AttachReply<'a> {
    type Message = v1::AttachReply;

    fn from_wire(m: &'a v1::AttachReply) -> Result<Self, ConvertError> {
        length("address", &m.address, 0, ATTACH_BYTES_MAX)?;
        at_most("regions", m.regions.len(), ATTACH_REGIONS_MAX)?;
        let regions = m.regions.iter().map(AttachedRegion::from_wire).collect::<Result<_, ConvertError>>()?;
        Ok(AttachReply { address: &m.address, regions })
    }

    fn to_wire(&self) -> v1::AttachReply {
        v1::AttachReply {
            address: copied(self.address),
            regions: self.regions.iter().map(AttachedRegion::to_wire).collect(),
        }
    }
}

/// One segment's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttachedRegion<'a> {
    /// The segment.
    pub segment: SegmentId,
    /// Which incarnation of it.
    pub generation: Generation,
    /// What opens it, in the engine's own notation.
    pub key: &'a [u8],
}

impl<'a> Wire<'a> for AttachedRegion<'a> {
    type Message = v1::AttachedRegion;

    fn from_wire(m: &'a v1::AttachedRegion) -> Result<Self, ConvertError> {
        length("regions.key", &m.key, 1, ATTACH_KEY_BYTES_MAX)?;
        Ok(AttachedRegion {
            segment: check::segment("regions.segment", m.segment)?,
            generation: Generation(m.generation),
            key: &m.key,
        })
    }

    fn to_wire(&self) -> v1::AttachedRegion {
        v1::AttachedRegion { segment: self.segment.0, generation: self.generation.0, key: copied(self.key) }
    }
}
