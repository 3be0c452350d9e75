//! The wire of Moontide: control-plane messages, packed forms, and the frame of the data plane.
//!
//! Owns what bytes mean between processes; decides nothing, opens no socket. Three layers, bottom up:
//!
//! 1. fixed little-endian records ([`FixedRecord`]: [`TransferOp`], [`ObjectEntry`], [`Handle`],
//!    [`ReportRecord`], [`Order`], …) and packed arrays of them ([`Packed`], [`PackedKeys`]);
//! 2. protobuf messages ([`v1`], from `proto/moontide/v1/control.proto`) that carry the packed arrays, over
//!    gRPC or behind a [`FrameHeader`]: one definition, one handler, two doors;
//! 3. [`convert`]: plain domain structs, borrowed from the messages, with every bound checked.
//!
//! Invariant: nothing that comes out of layer 3 breaks a bound of [`moontide_types::bounds`] or [`limits`],
//! and nothing on the way allocates more than its input's length times a small constant.

#![forbid(unsafe_code)]

pub mod limits;
#[macro_use]
mod layout;
mod capability;
mod frame;
mod hello;
mod ops;
mod packed;
mod records;

mod codec;
pub mod convert;

// Written by the compiler of build.rs: its comments are those of the .proto, its style is its own.
#[allow(missing_docs, unreachable_pub, clippy::all)]
#[allow(rustdoc::broken_intra_doc_links, rustdoc::invalid_html_tags, rustdoc::bare_urls)]
mod generated {
    tonic::include_proto!("moontide.v1");
}

/// The messages and services of `control.proto`, as generated. Decode, then go through [`convert`].
pub mod v1 {
    pub use crate::generated::*;
}

pub use capability::{Capability, CapabilityKey, Granted, Right};
pub use codec::{BoundedCodec, BoundedDecoder};
pub use frame::{
    FRAME_FIELDS, FRAME_HEADER_BYTES, FRAME_MAGIC, FRAME_VERSION, FrameError, FrameFlags, FrameHeader,
    FrameKind,
};
pub use hello::{Hello, ProtocolVersions, Token};
pub use layout::{FixedRecord, RecordError};
pub use ops::{OpFlags, OpKind, OpsError, TransferOp, TransferOps};
pub use packed::{
    Bitmap, BitmapBuilder, Codes, CodesBuilder, Packed, PackedBuilder, PackedBytes, PackedBytesBuilder,
    PackedError, PackedKeys, PackedKeysBuilder,
};
pub use records::{
    CommitEntry, CommitFlags, Handle, HandleFlags, Medium, ObjectEntry, ObjectFlags, OffloadFlags,
    OffloadRecord, Order, OrderFlags, OrderKind, OrderPhase, OrderResult, PutEndEntry, PutEntry, ReportFlags,
    ReportRecord, Stripe, VersionedId,
};
