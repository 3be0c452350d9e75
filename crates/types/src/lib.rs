//! The vocabulary of Moontide: what things are called, how large they may be, and how a record looks.
//!
//! Every other crate speaks in these types, in memory, on disk and on the wire. This crate owns no
//! thread, opens no file and waits for nothing.
//!
//! Reading order: [`bounds`] (limits, with their reasons), [`ids`](SegmentId), [`Key`] and [`ObjectId`],
//! [`Span`] and [`Extent`], [`ErrorCode`], [`Clock`], then [`record`]: the 128-byte header, the word in it,
//! the digests and the trailer; [`tensor`] is what stands in front of an object that is a tensor.

#![forbid(unsafe_code)]

pub mod bounds;
mod clock;
mod error;
mod id_batch;
mod ids;
mod key;
mod planted;
pub mod record;
mod span;
pub mod tensor;

pub use clock::{Clock, ManualClock, MonoTime, SystemClock, UnixMillis};
pub use error::{ErrorCode, UnknownErrorCode};
pub use ids::{
    BoundExceeded, ClientId, Epoch, Generation, GroupId, MapVersion, NodeId, SegmentId, SessionId, SlotId,
    Term,
};
pub use key::{IdKey, Key, KeyError, ObjectId, Tenant, TenantGeneration};
#[doc(hidden)]
pub use planted::planted;
pub use span::{Extent, Span};
