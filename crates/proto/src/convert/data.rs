//! Protobuf bodies of data-plane frames: begin, commit, load, attach and describe.

use moontide_types::limits::{BATCH_KEYS_MAX, LEASE_MS_MAX};
use moontide_types::{ErrorCode, Generation, SegmentId, Tenant};

use super::check::{self, at_least, at_most, copied, count, length, rule};
use super::objects::{AttributeSections, ObjectList, ObjectListKind};
use super::{ConvertError, Wire};
use crate::limits::{
    ATTACH_BYTES_MAX, ATTACH_KEY_BYTES_MAX, ATTACH_REGIONS_MAX, ENGINE_BYTES_MAX, HANDLES_PER_RESPONSE_MAX,
    OPS_PER_FRAME_MAX,
};
use crate::packed::{Codes, Packed, PackedBytes, PackedKeys};
use crate::records::{CommitEntry, OpKind, TransferOp};
use crate::v1;

/// Opens slots for writing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BeginRequest<'a> {
    /// Tenant of the keys.
    pub tenant: Tenant<'a>,
    /// Keys of the objects.
    pub keys: PackedKeys<'a>,
    /// One entry per key, with the handles of this node.
    pub list: ObjectList<'a>,
    /// One section per key; `None` if no object has attributes.
    pub attributes: Option<AttributeSections<'a>>,
}

impl<'a> Wire<'a> for BeginRequest<'a> {
    type Message = v1::BeginRequest;

    fn from_wire(m: &'a v1::BeginRequest) -> Result<Self, ConvertError> {
        let keys = check::keys("keys", &m.keys)?;
        let list = ObjectList::from_wire(&m.objects, &m.handles, ObjectListKind::Begin)?;
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

/// Publishes or aborts slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CommitRequest<'a> {
    /// One entry per slot.
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

/// Loads bytes from disk into staging slots.
///
/// Invariant: there is at least one operation, and each is a Load.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadRequest<'a> {
    /// Load operations.
    pub ops: Packed<'a, TransferOp>,
    /// Requested validity of the staging slots in milliseconds.
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

/// Staging slots with the loaded bytes. A request that fails as a whole is reported by the status of the frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LoadReply<'a> {
    /// One entry per operation; its validity is that of the staging slot in its handle.
    pub list: ObjectList<'a>,
}

impl<'a> Wire<'a> for LoadReply<'a> {
    type Message = v1::LoadReply;

    fn from_wire(m: &'a v1::LoadReply) -> Result<Self, ConvertError> {
        let list = ObjectList::from_wire(&m.objects, &m.handles, ObjectListKind::Load)?;
        at_most("objects", list.len(), OPS_PER_FRAME_MAX)?;
        Ok(LoadReply { list })
    }

    fn to_wire(&self) -> v1::LoadReply {
        v1::LoadReply { objects: self.list.objects_to_wire(), handles: self.list.handles_to_wire() }
    }
}

/// Descriptions of records, for a copy. A request that fails as a whole is reported by the status of the frame.
///
/// Invariant: there is one entry per code, and an entry with a code is empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DescribeReply<'a> {
    /// Packed outcomes.
    pub codes: Codes<'a>,
    /// Descriptions of the records (`moontide_types::record::RecordDescription`).
    pub records: PackedBytes<'a>,
}

impl<'a> Wire<'a> for DescribeReply<'a> {
    type Message = v1::DescribeReply;

    fn from_wire(m: &'a v1::DescribeReply) -> Result<Self, ConvertError> {
        let codes = check::codes("codes", &m.codes, OPS_PER_FRAME_MAX)?;
        let records = check::byte_strings("records", &m.records)?;
        count("records", records.len(), codes.len())?;
        let is_either = |(code, record): (Option<ErrorCode>, &[u8])| code.is_none() != record.is_empty();
        rule("records", codes.iter().zip(records.iter()).all(is_either), "either a code or a record")?;
        Ok(DescribeReply { codes, records })
    }

    fn to_wire(&self) -> v1::DescribeReply {
        v1::DescribeReply {
            codes: copied(self.codes.as_encoded()),
            records: copied(self.records.as_encoded()),
        }
    }
}

/// One outcome per handle of a Begin, or per entry of a Commit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SlotOutcomes<'a> {
    /// Packed outcomes.
    pub codes: Codes<'a>,
}

impl<'a> Wire<'a> for SlotOutcomes<'a> {
    type Message = v1::SlotOutcomes;

    fn from_wire(m: &'a v1::SlotOutcomes) -> Result<Self, ConvertError> {
        Ok(SlotOutcomes { codes: check::codes("codes", &m.codes, HANDLES_PER_RESPONSE_MAX)? })
    }

    fn to_wire(&self) -> v1::SlotOutcomes {
        v1::SlotOutcomes { codes: copied(self.codes.as_encoded()) }
    }
}

/// Requests the data for one-sided access to a node's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttachRequest<'a> {
    /// Name of the transfer engine.
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

/// Worker address, and the remote key of each region. The largest reply fits into a frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AttachReply<'a> {
    /// Worker address in the format of the engine.
    pub address: &'a [u8],
    /// One entry per region.
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

/// Payload region of one segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttachedRegion<'a> {
    /// Id of the segment.
    pub segment: SegmentId,
    /// Generation of the segment.
    pub generation: Generation,
    /// Remote key in the format of the engine.
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
