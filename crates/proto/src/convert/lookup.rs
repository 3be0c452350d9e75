//! Calls on existing keys: exist, lookup, touch, pin, prefetch, remove.

use moontide_types::NodeId;
use moontide_types::limits::{BATCH_KEYS_MAX, LEASE_MS_MAX};
use moontide_types::record::PinClass;

use super::check::{self, at_most, copied, known, rule};
use super::context::RequestContext;
use super::objects::{AttributeSections, ObjectList, ObjectListKind};
use super::response::{Response, ResponseBody, response_of};
use super::{ConvertError, Wire};
use crate::packed::{Bitmap, Codes, PackedKeys};
use crate::v1;

/// Checks which keys are complete objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExistRequest<'a> {
    /// Request context.
    pub context: RequestContext<'a>,
    /// Keys of the objects.
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

/// Response of Exist.
pub type ExistResponse<'a> = Response<'a, Presence<'a>>;

/// Existence of keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Presence<'a> {
    /// One bit per key: whether the object is complete.
    pub present: Bitmap<'a>,
    /// One code per key, if a key failed; the bits of failed keys are zero.
    pub codes: Option<Codes<'a>>,
}

impl<'a> ResponseBody<'a> for Presence<'a> {
    response_of!(v1::ExistResponse);

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

/// Looks up the locations of objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GetReplicaListRequest<'a> {
    /// Request context.
    pub context: RequestContext<'a>,
    /// Keys of the objects.
    pub keys: PackedKeys<'a>,
    /// Requested lease in milliseconds; 0 for none.
    pub lease_ms: u32,
    /// Whether the response includes attributes.
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

/// Response of GetReplicaList.
pub type GetReplicaListResponse<'a> = Response<'a, Replicas<'a>>;

/// Locations of objects. The code of an entry is its state: no code: complete; `NotReady`: being written; `NotFound`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Replicas<'a> {
    /// One entry per key.
    pub list: ObjectList<'a>,
    /// One section per key, if the request asked for attributes.
    pub attributes: Option<AttributeSections<'a>>,
}

impl<'a> ResponseBody<'a> for Replicas<'a> {
    response_of!(v1::GetReplicaListResponse);

    fn read(m: &'a v1::GetReplicaListResponse) -> Result<Self, ConvertError> {
        let list = ObjectList::from_wire(&m.objects, &m.handles, ObjectListKind::Response)?;
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

/// Marks objects as used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TouchRequest<'a> {
    /// Request context.
    pub context: RequestContext<'a>,
    /// Keys of the objects.
    pub keys: PackedKeys<'a>,
    /// Requested lease in milliseconds; 0 for none.
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

/// Changes the pin class of objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SetPinRequest<'a> {
    /// Request context.
    pub context: RequestContext<'a>,
    /// Keys of the objects.
    pub keys: PackedKeys<'a>,
    /// New pin class.
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

/// Promotes objects from disk to memory before they are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefetchRequest<'a> {
    /// Request context.
    pub context: RequestContext<'a>,
    /// Keys of the objects.
    pub keys: PackedKeys<'a>,
    /// Node that will read the objects.
    pub target_node: Option<NodeId>,
}

impl<'a> Wire<'a> for PrefetchRequest<'a> {
    type Message = v1::PrefetchRequest;

    fn from_wire(m: &'a v1::PrefetchRequest) -> Result<Self, ConvertError> {
        Ok(PrefetchRequest {
            context: RequestContext::of(&m.context)?,
            keys: check::keys("keys", &m.keys)?,
            target_node: (m.target_node != 0).then_some(NodeId(m.target_node)),
        })
    }

    fn to_wire(&self) -> v1::PrefetchRequest {
        v1::PrefetchRequest {
            context: Some(self.context.to_wire()),
            keys: copied(self.keys.as_encoded()),
            target_node: self.target_node.map_or(0, |node| node.0),
        }
    }
}

/// Removes objects.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoveRequest<'a> {
    /// Request context.
    pub context: RequestContext<'a>,
    /// Keys of the objects.
    pub keys: PackedKeys<'a>,
    /// Whether to remove leased and pinned objects, too.
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
