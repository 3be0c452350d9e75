//! Calls on keys that exist: exist, lookup, touch, pin, prefetch, remove.

use moontide_types::NodeId;
use moontide_types::bounds::{BATCH_KEYS_MAX, LEASE_MS_MAX};
use moontide_types::record::PinClass;

use super::answer::{Answer, AnswerBody, answer_of};
use super::check::{self, at_most, copied, known, rule};
use super::context::RequestContext;
use super::objects::{AttributeSections, ListKind, ObjectList};
use super::{ConvertError, Wire};
use crate::packed::{Bitmap, Codes, PackedKeys};
use crate::v1;

/// Which keys are complete objects?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExistRequest<'a> {
    /// Who asks.
    pub context: RequestContext<'a>,
    /// Which keys.
    pub keys: PackedKeys<'a>,
}

impl<'a> Wire<'a> for ExistRequest<'a> {
    type Message = v1::ExistRequest;

    fn from_wire(m: &'a v1::ExistRequest) -> Result<Self, ConvertError> {
        Ok(ExistRequest { context: RequestContext::of(&m.context)?, keys: check::keys("keys", &m.keys)? })
    }

    fn to_wire(&self) -> v1::ExistRequest {
        v1::ExistRequest { context: Some(self.context.to_wire()), keys: copied(self.keys.as_encoded()) }
    }
}

/// The answer of Exist.
pub type ExistResponse<'a> = Answer<'a, Presence<'a>>;

/// One bit per key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Presence<'a> {
    /// Whether each key is there.
    pub present: Bitmap<'a>,
    /// Why keys were not answered, if any were not; their bits are zero.
    pub codes: Option<Codes<'a>>,
}

impl<'a> AnswerBody<'a> for Presence<'a> {
    answer_of!(v1::ExistResponse);

    fn read(m: &'a v1::ExistResponse) -> Result<Self, ConvertError> {
        at_most("count", m.count, BATCH_KEYS_MAX)?;
        let len = m.count as usize;
        let present = check::bitmap("present", &m.present, len)?;
        let codes = if m.codes.is_empty() {
            None
        } else {
            let codes = check::codes("codes", &m.codes, BATCH_KEYS_MAX)?;
            check::count("codes", codes.len(), len)?;
            let consistent = present.iter().zip(codes.iter()).all(|(bit, code)| !bit || code.is_none());
            rule("codes", consistent, "a key that failed is not present")?;
            Some(codes)
        };
        Ok(Presence { present, codes })
    }

    fn write(&self) -> v1::ExistResponse {
        v1::ExistResponse {
            context: None,
            count: self.present.len() as u32, // ≤ BATCH_KEYS_MAX
            present: copied(self.present.as_encoded()),
            codes: self.codes.map_or_else(Default::default, |codes| copied(codes.as_encoded())),
        }
    }
}

/// Where are the bytes?
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GetReplicaListRequest<'a> {
    /// Who asks.
    pub context: RequestContext<'a>,
    /// Which keys.
    pub keys: PackedKeys<'a>,
    /// Lease wanted; 0 for none.
    pub lease_ms: u32,
    /// Whether attributes are wanted.
    pub attributes: bool,
}

impl<'a> Wire<'a> for GetReplicaListRequest<'a> {
    type Message = v1::GetReplicaListRequest;

    fn from_wire(m: &'a v1::GetReplicaListRequest) -> Result<Self, ConvertError> {
        at_most("lease_ms", m.lease_ms, LEASE_MS_MAX)?;
        Ok(GetReplicaListRequest {
            context: RequestContext::of(&m.context)?,
            keys: check::keys("keys", &m.keys)?,
            lease_ms: m.lease_ms,
            attributes: m.attributes,
        })
    }

    fn to_wire(&self) -> v1::GetReplicaListRequest {
        v1::GetReplicaListRequest {
            context: Some(self.context.to_wire()),
            keys: copied(self.keys.as_encoded()),
            lease_ms: self.lease_ms,
            attributes: self.attributes,
        }
    }
}

/// The answer of GetReplicaList.
pub type GetReplicaListResponse<'a> = Answer<'a, Replicas<'a>>;

/// Where the bytes are. An entry's code says the state: none complete, `NotReady` being written, `NotFound`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replicas<'a> {
    /// One entry per key.
    pub list: ObjectList<'a>,
    /// One section per key, if they were asked for.
    pub attributes: Option<AttributeSections<'a>>,
}

impl<'a> AnswerBody<'a> for Replicas<'a> {
    answer_of!(v1::GetReplicaListResponse);

    fn read(m: &'a v1::GetReplicaListResponse) -> Result<Self, ConvertError> {
        let list = ObjectList::from_wire(&m.objects, &m.handles, ListKind::Answer)?;
        Ok(Replicas { attributes: AttributeSections::from_wire(&m.attributes, list.len())?, list })
    }

    fn write(&self) -> v1::GetReplicaListResponse {
        v1::GetReplicaListResponse {
            context: None,
            objects: self.list.objects_to_wire(),
            handles: self.list.handles_to_wire(),
            attributes: AttributeSections::to_wire(self.attributes),
        }
    }
}

/// Mark objects as used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TouchRequest<'a> {
    /// Who asks.
    pub context: RequestContext<'a>,
    /// Which keys.
    pub keys: PackedKeys<'a>,
    /// Lease wanted; 0 for none.
    pub lease_ms: u32,
}

impl<'a> Wire<'a> for TouchRequest<'a> {
    type Message = v1::TouchRequest;

    fn from_wire(m: &'a v1::TouchRequest) -> Result<Self, ConvertError> {
        at_most("lease_ms", m.lease_ms, LEASE_MS_MAX)?;
        Ok(TouchRequest {
            context: RequestContext::of(&m.context)?,
            keys: check::keys("keys", &m.keys)?,
            lease_ms: m.lease_ms,
        })
    }

    fn to_wire(&self) -> v1::TouchRequest {
        v1::TouchRequest {
            context: Some(self.context.to_wire()),
            keys: copied(self.keys.as_encoded()),
            lease_ms: self.lease_ms,
        }
    }
}

/// Change how strongly objects resist eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetPinRequest<'a> {
    /// Who asks.
    pub context: RequestContext<'a>,
    /// Which keys.
    pub keys: PackedKeys<'a>,
    /// The new class.
    pub pin: PinClass,
}

impl<'a> Wire<'a> for SetPinRequest<'a> {
    type Message = v1::SetPinRequest;

    fn from_wire(m: &'a v1::SetPinRequest) -> Result<Self, ConvertError> {
        let pin = u8::try_from(m.pin).ok().and_then(PinClass::from_number);
        Ok(SetPinRequest {
            context: RequestContext::of(&m.context)?,
            keys: check::keys("keys", &m.keys)?,
            pin: known("pin", m.pin, pin)?,
        })
    }

    fn to_wire(&self) -> v1::SetPinRequest {
        v1::SetPinRequest {
            context: Some(self.context.to_wire()),
            keys: copied(self.keys.as_encoded()),
            pin: self.pin as i32,
        }
    }
}

/// Bring objects from disk to memory ahead of need.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefetchRequest<'a> {
    /// Who asks.
    pub context: RequestContext<'a>,
    /// Which keys.
    pub keys: PackedKeys<'a>,
    /// Where the bytes are wanted.
    pub near: Option<NodeId>,
}

impl<'a> Wire<'a> for PrefetchRequest<'a> {
    type Message = v1::PrefetchRequest;

    fn from_wire(m: &'a v1::PrefetchRequest) -> Result<Self, ConvertError> {
        Ok(PrefetchRequest {
            context: RequestContext::of(&m.context)?,
            keys: check::keys("keys", &m.keys)?,
            near: (m.near_node != 0).then_some(NodeId(m.near_node)),
        })
    }

    fn to_wire(&self) -> v1::PrefetchRequest {
        v1::PrefetchRequest {
            context: Some(self.context.to_wire()),
            keys: copied(self.keys.as_encoded()),
            near_node: self.near.map_or(0, |node| node.0),
        }
    }
}

/// Remove objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoveRequest<'a> {
    /// Who asks.
    pub context: RequestContext<'a>,
    /// Which keys.
    pub keys: PackedKeys<'a>,
    /// Also what is leased or pinned.
    pub force: bool,
}

impl<'a> Wire<'a> for RemoveRequest<'a> {
    type Message = v1::RemoveRequest;

    fn from_wire(m: &'a v1::RemoveRequest) -> Result<Self, ConvertError> {
        Ok(RemoveRequest {
            context: RequestContext::of(&m.context)?,
            keys: check::keys("keys", &m.keys)?,
            force: m.force,
        })
    }

    fn to_wire(&self) -> v1::RemoveRequest {
        v1::RemoveRequest {
            context: Some(self.context.to_wire()),
            keys: copied(self.keys.as_encoded()),
            force: self.force,
        }
    }
}
