//! Requests of a link ([`Call`]), and their results: [`KeyResult`], [`LookupEntry`], [`LookupReply`].

use std::sync::Arc;

use moontide_proto::convert::{
    self, Bounded, ConvertError, ExistRequest, ExistResponse, GetReplicaListRequest, GetReplicaListResponse,
    PutEndRequest, PutStartRequest, RemoveRequest, Replicas, RequestContext, Wire,
};
use moontide_proto::{FrameKind, Handle, ObjectEntry, PackedError, PackedKeysBuilder, v1};
use moontide_types::limits::LEASE_MS_MAX;
use moontide_types::{ErrorCode, Key};

use super::error::{LinkError, Rejection};
use super::frames::{Frame, RequestFrame};

/// Result for one key: a value, or the master's error code.
pub type KeyResult<T> = Result<T, ErrorCode>;

/// Request of the framed protocol, with the type of its reply.
pub trait Call<'a>: Wire<'a> {
    /// Kind of the request frame.
    const KIND: FrameKind;

    /// Reply message; its parsed form borrows from it.
    type Reply: Bounded;

    /// Returns the request context: caller, tenant and timeout.
    fn context(&self) -> &RequestContext<'a>;
}

macro_rules! calls {
    ($($request:ident => $reply:ident, $kind:ident;)*) => {
        $(impl<'a> Call<'a> for $request<'a> {
            const KIND: FrameKind = FrameKind::$kind;
            type Reply = v1::$reply;

            fn context(&self) -> &RequestContext<'a> {
                &self.context
            }
        })*
    };
}

calls! {
    ExistRequest => ExistResponse, Exist;
    GetReplicaListRequest => GetReplicaListResponse, GetReplicaList;
    PutStartRequest => PutStartResponse, PutStart;
    PutEndRequest => OutcomesResponse, PutEnd;
    RemoveRequest => OutcomesResponse, Remove;
}

/// Locations of one object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LookupEntry {
    /// Entry of the object. Its `first_handle` is an index into the handles of the original batch and has no meaning
    /// here.
    pub object: ObjectEntry,
    /// Handles of the object, by replica, then stripe.
    pub handles: Vec<Handle>,
}

/// Locations of the objects of a batch. Keeps the encoded reply: entries and handles are read in place.
#[derive(Clone, Debug)]
pub struct LookupReply {
    message: v1::GetReplicaListResponse,
    keys: usize,
    address: Arc<str>,
}

impl LookupReply {
    /// Returns the entries, one per key of the request and in its order. Checks all of them on every call: call it
    /// once.
    pub fn replicas(&self) -> Result<Replicas<'_>, LinkError> {
        parse_replicas(&self.message, self.keys, &self.address)
    }
}

/// Builds the frame of any call.
pub(super) fn outgoing<'a, C: Call<'a>>(call: &C) -> Result<RequestFrame, LinkError> {
    Ok(RequestFrame::new(C::KIND, call.context(), &call.to_wire())?)
}

/// Builds the frame of an Exist over packed keys.
pub(super) fn outgoing_exist(context: &RequestContext<'_>, keys: Vec<u8>) -> Result<RequestFrame, LinkError> {
    let message = v1::ExistRequest { context: Some(context.to_wire()), keys: keys.into() };
    Ok(RequestFrame::new(FrameKind::Exist, context, &message)?)
}

/// Builds the frame of a GetReplicaList over packed keys.
pub(super) fn outgoing_lookup(
    context: &RequestContext<'_>,
    keys: Vec<u8>,
    lease_ms: u32,
    attributes: bool,
) -> Result<RequestFrame, LinkError> {
    check_lease(lease_ms)?;
    let context_message = Some(context.to_wire());
    let message =
        v1::GetReplicaListRequest { context: context_message, keys: keys.into(), lease_ms, attributes };
    Ok(RequestFrame::new(FrameKind::GetReplicaList, context, &message)?)
}

/// Checks a lease. Called before a key joins a batch: one invalid lease would fail the whole batch.
pub(super) fn check_lease(lease_ms: u32) -> Result<(), LinkError> {
    if lease_ms <= LEASE_MS_MAX {
        return Ok(());
    }
    let (found, max) = (lease_ms.into(), LEASE_MS_MAX.into());
    Err(ConvertError::TooLarge { field: "lease_ms", found, max }.into())
}

/// Packs keys.
pub(super) fn pack(keys: &[Key<'_>]) -> Result<Vec<u8>, LinkError> {
    let mut packed = PackedKeysBuilder::new();
    for &key in keys {
        packed.push(key).map_err(|source| ConvertError::Packed { field: "keys", source })?;
    }
    Ok(packed.finish())
}

/// Decodes the message of a reply. Fails if its frame is an Error frame.
pub(super) fn read<M: Bounded>(frame: Frame, address: &Arc<str>) -> Result<M, LinkError> {
    if let (FrameKind::Error, Some(code)) = (frame.header.kind, frame.header.status) {
        return Err(Rejection::from_frame(code, &frame.body));
    }
    // A reply frame may have a status too; its message has the same code in its context, with the retry delay.
    convert::decode(frame.body).map_err(|error| LinkError::protocol(address, error))
}

/// Decodes the reply of an Exist; one result per key.
pub(super) fn read_exist(
    frame: Frame,
    keys: usize,
    address: &Arc<str>,
) -> Result<Vec<KeyResult<bool>>, LinkError> {
    let message: v1::ExistResponse = read(frame, address)?;
    let response = ExistResponse::from_wire(&message).map_err(|error| LinkError::protocol(address, error))?;
    let presence = response.into_result().map_err(|context| Rejection::from_context(&context))?;
    check_count("present", presence.present.len(), keys, address)?;
    Ok(match presence.codes {
        None => presence.present.iter().map(Ok).collect(),
        Some(codes) => {
            presence.present.iter().zip(codes.iter()).map(|(bit, code)| code.map_or(Ok(bit), Err)).collect()
        }
    })
}

/// Decodes the reply of a GetReplicaList; checks only its context.
pub(super) fn read_lookup(frame: Frame, keys: usize, address: &Arc<str>) -> Result<LookupReply, LinkError> {
    let message: v1::GetReplicaListResponse = read(frame, address)?;
    if message.context.as_ref().is_none_or(|context| context.code != 0) {
        parse_replicas(&message, keys, address)?;
    }
    Ok(LookupReply { message, keys, address: address.clone() })
}

/// Decodes the reply of a GetReplicaList; one result per key.
pub(super) fn read_lookup_each(
    frame: Frame,
    keys: usize,
    address: &Arc<str>,
) -> Result<Vec<KeyResult<LookupEntry>>, LinkError> {
    let message: v1::GetReplicaListResponse = read(frame, address)?;
    let replicas = parse_replicas(&message, keys, address)?;
    let each = replicas.list.iter().map(|(object, handles)| match object.code {
        Some(code) => Err(code),
        None => Ok(LookupEntry { object, handles: handles.iter().collect() }),
    });
    Ok(each.collect())
}

fn parse_replicas<'a>(
    message: &'a v1::GetReplicaListResponse,
    keys: usize,
    address: &Arc<str>,
) -> Result<Replicas<'a>, LinkError> {
    let response =
        GetReplicaListResponse::from_wire(message).map_err(|error| LinkError::protocol(address, error))?;
    let replicas = response.into_result().map_err(|context| Rejection::from_context(&context))?;
    check_count("objects", replicas.list.len(), keys, address)?;
    Ok(replicas)
}

/// Checks that there are as many results as keys.
fn check_count(
    field: &'static str,
    found: usize,
    expected: usize,
    address: &Arc<str>,
) -> Result<(), LinkError> {
    if found == expected {
        return Ok(());
    }
    let source = PackedError::Count { found, expected };
    Err(LinkError::protocol(address, ConvertError::Packed { field, source }))
}

/// Result that is delivered to a waiter.
#[derive(Debug)]
pub(super) enum Outcome {
    /// Reply of a call; the caller decodes it.
    Frame(Frame),
    /// One key of a batched Exist.
    Exist(KeyResult<bool>),
    /// One key of a batched GetReplicaList.
    Lookup(KeyResult<LookupEntry>),
}

impl Outcome {
    /// Returns the frame. The tracker keeps the kind of each request, so the variant matches.
    pub(super) fn into_frame(self) -> Frame {
        match self {
            Outcome::Frame(frame) => frame,
            other => unreachable!("call got {other:?} instead of a frame"),
        }
    }

    pub(super) fn into_exist(self) -> KeyResult<bool> {
        match self {
            Outcome::Exist(result) => result,
            other => unreachable!("exist_one got {other:?}"),
        }
    }

    pub(super) fn into_lookup(self) -> KeyResult<LookupEntry> {
        match self {
            Outcome::Lookup(result) => result,
            other => unreachable!("lookup_one got {other:?}"),
        }
    }
}
