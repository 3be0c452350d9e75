//! What can be asked over a link ([`Call`]), and what comes back: [`KeyResult`], [`Located`], [`LookupReply`].

use std::sync::Arc;

use moontide_proto::convert::{
    self, Bounded, ConvertError, ExistRequest, ExistResponse, GetReplicaListRequest, GetReplicaListResponse,
    PutEndRequest, PutStartRequest, RemoveRequest, Replicas, RequestContext, Wire,
};
use moontide_proto::{FrameKind, Handle, ObjectEntry, PackedError, PackedKeysBuilder, v1};
use moontide_types::bounds::LEASE_MS_MAX;
use moontide_types::{ErrorCode, Key};

use super::error::{LinkError, Rejection};
use super::frames::{Frame, Outgoing};

/// What a master says about one key: an answer, or why there is none.
pub type KeyResult<T> = Result<T, ErrorCode>;

/// A request that runs on the framed protocol, with the message that answers it.
pub trait Call<'a>: Wire<'a> {
    /// The kind of its frame.
    const KIND: FrameKind;

    /// The answer; its plain form borrows from it.
    type Reply: Bounded;

    /// Who asks, and for how long.
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

/// Where one object is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Located {
    /// The object. Its `first_handle` is a position in the batch it came with and means nothing here.
    pub object: ObjectEntry,
    /// Its handles, by replica, then stripe.
    pub handles: Vec<Handle>,
}

/// Where the objects of a batch are. Keeps the answer as it came: entries and handles are read in place.
#[derive(Clone, Debug)]
pub struct LookupReply {
    message: v1::GetReplicaListResponse,
    keys: usize,
    address: Arc<str>,
}

impl LookupReply {
    /// The entries, one per key of the request and in its order. Checks all of them each time: ask once.
    pub fn replicas(&self) -> Result<Replicas<'_>, LinkError> {
        located(&self.message, self.keys, &self.address)
    }
}

/// The frame of any call.
pub(super) fn outgoing<'a, C: Call<'a>>(call: &C) -> Result<Outgoing, LinkError> {
    Ok(Outgoing::new(C::KIND, call.context(), &call.to_wire())?)
}

/// The frame of an Exist over keys that are packed already.
pub(super) fn outgoing_exist(context: &RequestContext<'_>, keys: Vec<u8>) -> Result<Outgoing, LinkError> {
    let message = v1::ExistRequest { context: Some(context.to_wire()), keys: keys.into() };
    Ok(Outgoing::new(FrameKind::Exist, context, &message)?)
}

/// The frame of a GetReplicaList over keys that are packed already.
pub(super) fn outgoing_lookup(
    context: &RequestContext<'_>,
    keys: Vec<u8>,
    lease_ms: u32,
    attributes: bool,
) -> Result<Outgoing, LinkError> {
    check_lease(lease_ms)?;
    let context_message = Some(context.to_wire());
    let message =
        v1::GetReplicaListRequest { context: context_message, keys: keys.into(), lease_ms, attributes };
    Ok(Outgoing::new(FrameKind::GetReplicaList, context, &message)?)
}

/// Asked before a key joins a batch: one wrong lease would spoil the answer of all.
pub(super) fn check_lease(lease_ms: u32) -> Result<(), LinkError> {
    if lease_ms <= LEASE_MS_MAX {
        return Ok(());
    }
    let (found, max) = (lease_ms.into(), LEASE_MS_MAX.into());
    Err(ConvertError::TooLarge { field: "lease_ms", found, max }.into())
}

/// A batch of keys in their packed form.
pub(super) fn pack(keys: &[Key<'_>]) -> Result<Vec<u8>, LinkError> {
    let mut packed = PackedKeysBuilder::new();
    for &key in keys {
        packed.push(key).map_err(|source| ConvertError::Packed { field: "keys", source })?;
    }
    Ok(packed.finish())
}

/// The message of an answer, whose frame must be no error.
pub(super) fn read<M: Bounded>(frame: Frame, address: &Arc<str>) -> Result<M, LinkError> {
    if let (FrameKind::Error, Some(code)) = (frame.header.kind, frame.header.status) {
        return Err(Rejection::from_frame(code, &frame.body));
    }
    // A reply may have a status as well; its message says the same in its context, and when to come again.
    convert::decode(frame.body).map_err(|error| LinkError::protocol(address, error))
}

/// One answer per key of an Exist.
pub(super) fn read_exist(
    frame: Frame,
    keys: usize,
    address: &Arc<str>,
) -> Result<Vec<KeyResult<bool>>, LinkError> {
    let message: v1::ExistResponse = read(frame, address)?;
    let answer = ExistResponse::from_wire(&message).map_err(|error| LinkError::protocol(address, error))?;
    let presence = answer.into_result().map_err(|context| Rejection::from_context(&context))?;
    check_count("present", presence.present.len(), keys, address)?;
    Ok(match presence.codes {
        None => presence.present.iter().map(Ok).collect(),
        Some(codes) => {
            presence.present.iter().zip(codes.iter()).map(|(bit, code)| code.map_or(Ok(bit), Err)).collect()
        }
    })
}

/// The answer of a GetReplicaList, unread but for its context.
pub(super) fn read_lookup(frame: Frame, keys: usize, address: &Arc<str>) -> Result<LookupReply, LinkError> {
    let message: v1::GetReplicaListResponse = read(frame, address)?;
    if message.context.as_ref().is_none_or(|context| context.code != 0) {
        located(&message, keys, address)?;
    }
    Ok(LookupReply { message, keys, address: address.clone() })
}

/// One answer per key of a GetReplicaList, each by itself.
pub(super) fn read_lookup_each(
    frame: Frame,
    keys: usize,
    address: &Arc<str>,
) -> Result<Vec<KeyResult<Located>>, LinkError> {
    let message: v1::GetReplicaListResponse = read(frame, address)?;
    let replicas = located(&message, keys, address)?;
    let each = replicas.list.iter().map(|(object, handles)| match object.code {
        Some(code) => Err(code),
        None => Ok(Located { object, handles: handles.iter().collect() }),
    });
    Ok(each.collect())
}

fn located<'a>(
    message: &'a v1::GetReplicaListResponse,
    keys: usize,
    address: &Arc<str>,
) -> Result<Replicas<'a>, LinkError> {
    let answer =
        GetReplicaListResponse::from_wire(message).map_err(|error| LinkError::protocol(address, error))?;
    let replicas = answer.into_result().map_err(|context| Rejection::from_context(&context))?;
    check_count("objects", replicas.list.len(), keys, address)?;
    Ok(replicas)
}

/// As many answers as keys.
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

/// What is handed to whoever waits.
#[derive(Debug)]
pub(super) enum Outcome {
    /// The reply of a call, to be decoded by its caller.
    Frame(Frame),
    /// One key of a gathered Exist.
    Exist(KeyResult<bool>),
    /// One key of a gathered GetReplicaList.
    Lookup(KeyResult<Located>),
}

impl Outcome {
    /// Whoever waits gets what it asked for: traffic keeps the kind of each flight.
    pub(super) fn into_frame(self) -> Frame {
        match self {
            Outcome::Frame(frame) => frame,
            other => unreachable!("asked for a frame, got {other:?}"),
        }
    }

    pub(super) fn into_exist(self) -> KeyResult<bool> {
        match self {
            Outcome::Exist(result) => result,
            other => unreachable!("asked whether a key exists, got {other:?}"),
        }
    }

    pub(super) fn into_lookup(self) -> KeyResult<Located> {
        match self {
            Outcome::Lookup(result) => result,
            other => unreachable!("asked where a key is, got {other:?}"),
        }
    }
}
