//! What a data-plane frame asks for: [`TransferOp`]s. They are the body of Read, Write and Release, which
//! [`TransferOps`] reads together with the frame's header; a `LoadRequest` carries those of Load.
//!
//! An operation names bytes by what they belong to — segment and generation, slot and epoch, object — and by
//! an offset within; never by an address. The owner compares all of it before it touches a byte. The
//! capability stands here and not in the frame's header because one frame carries operations on many slots,
//! and each slot was granted by itself.

use moontide_types::bounds::{OBJECT_BYTES_MAX, STRIPES_MAX};
use moontide_types::{Epoch, ErrorCode, Generation, ObjectId, SegmentId, SlotId, Span, Term};

use crate::capability::Capability;
use crate::frame::{FrameHeader, FrameKind};
use crate::layout::RecordError;
use crate::limits::{FRAME_PAYLOAD_BYTES_MAX, OPS_PER_FRAME_MAX};
use crate::packed::{Packed, PackedError};

numbered! {
    /// What is to be done with the bytes.
    pub enum OpKind(u8) {
        /// Send them.
        Read = 1,
        /// Take them; the slot was begun before.
        Write = 2,
        /// Bring them from disk into a staging slot; answered by a handle on that slot.
        Load = 3,
        /// Give a staging slot back.
        Release = 4,
    }
}

flags! {
    /// How it is to be done.
    pub struct OpFlags(u8) {
        /// The disk's copy is meant: segment, generation and slot are zero, (id, epoch, stripe) names it.
        DISK = 0,
        /// The range counts in the record's page digests instead of its payload. Only for Read: digests are
        /// written by whoever commits the record.
        DIGESTS = 1,
        /// Of low priority: prefetch and repair.
        BACKGROUND = 2,
    }
}

fixed_record! {
    /// One operation on one range of one stripe.
    ///
    /// Invariants: `stripe < STRIPES_MAX`, `offset + len ≤ OBJECT_BYTES_MAX`, `len ≤ FRAME_PAYLOAD_BYTES_MAX`;
    /// [`OpFlags::DIGESTS`] only with Read; with [`OpFlags::DISK`] it is a Read or Load, and segment, generation and slot are zero; a Load is
    /// always from disk. For slots of a segment `stripe` repeats what the header says.
    pub struct TransferOp[80] {
        /// What to do.
        0 kind: OpKind,
        /// How.
        1 flags: OpFlags,
        /// Index of the stripe.
        2 stripe: u16,
        /// The segment.
        4 segment: SegmentId,
        /// Which incarnation of it.
        8 generation: Generation,
        /// The slot.
        16 slot: SlotId,
        /// The term in which the capability was made.
        20 term: Term,
        /// The version.
        24 epoch: Epoch,
        /// The object.
        32 id: ObjectId,
        /// First byte, counted from the first byte of the stripe's payload (or of its digests).
        48 offset: u64,
        /// Number of bytes.
        56 len: u64,
        /// Proof that the caller may.
        64 capability: Capability,
    }
}

impl TransferOp {
    fn check(&self) -> Result<(), RecordError> {
        let disk = self.flags.contains(OpFlags::DISK);
        let nowhere = self.segment.0 == 0 && self.generation.0 == 0 && self.slot.0 == 0;
        Self::rule(usize::from(self.stripe) < STRIPES_MAX, "stripe < STRIPES_MAX")?;
        Self::rule(self.len <= FRAME_PAYLOAD_BYTES_MAX, "len ≤ FRAME_PAYLOAD_BYTES_MAX")?;
        Self::rule(
            Span::new(self.offset, self.len).is_some_and(|span| span.end() <= OBJECT_BYTES_MAX),
            "offset + len ≤ OBJECT_BYTES_MAX",
        )?;
        Self::rule(!disk || nowhere, "a disk operation names no slot")?;
        Self::rule(
            !disk || matches!(self.kind, OpKind::Read | OpKind::Load),
            "disks are read and loaded from",
        )?;
        Self::rule(disk || self.kind != OpKind::Load, "a load is from disk")?;
        let digests = self.flags.contains(OpFlags::DIGESTS);
        Self::rule(!digests || self.kind == OpKind::Read, "digests are only read")
    }
}

/// Why a body is not the operations that its frame announces.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpsError {
    /// Frames of this kind carry something else.
    #[error("the body of {kind:?} is not packed operations")]
    Frame {
        /// The frame's kind.
        kind: FrameKind,
    },
    /// Not the body that the header announced.
    #[error("a body of {found} bytes, {announced} were announced")]
    BodyLen {
        /// How many there are.
        found: usize,
        /// How many there should be.
        announced: u32,
    },
    /// An operation that a frame of this kind cannot ask for.
    #[error("operation {index} is a {found:?}, the frame is a {kind:?}")]
    Kind {
        /// Which one.
        index: usize,
        /// What it is.
        found: OpKind,
        /// The frame's kind.
        kind: FrameKind,
    },
    /// The operations of a Write take exactly the payload.
    #[error("operations on {found} bytes, the payload has {payload_len}")]
    Payload {
        /// Bytes of all operations.
        found: u64,
        /// Bytes of the payload.
        payload_len: u64,
    },
    /// Not packed operations.
    #[error(transparent)]
    Packed(#[from] PackedError),
}

impl OpsError {
    /// The stable code.
    pub fn code(&self) -> ErrorCode {
        match self {
            OpsError::Packed(error) => error.code(),
            _ => ErrorCode::InvalidArgument,
        }
    }
}

/// The operations of one Read, Write or Release frame.
///
/// Invariants: every operation is of the frame's kind; those of a Write take exactly its payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferOps<'a>(Packed<'a, TransferOp>);

impl<'a> TransferOps<'a> {
    /// Holds the body against the header.
    pub fn decode(header: &FrameHeader, body: &'a [u8]) -> Result<TransferOps<'a>, OpsError> {
        let kind = header.kind;
        let expected = match kind {
            FrameKind::Read => OpKind::Read,
            FrameKind::Write => OpKind::Write,
            FrameKind::Release => OpKind::Release,
            kind => return Err(OpsError::Frame { kind }),
        };
        if body.len() != header.body_len as usize {
            return Err(OpsError::BodyLen { found: body.len(), announced: header.body_len });
        }
        let ops = Packed::<TransferOp>::decode(body, OPS_PER_FRAME_MAX)?;
        if let Some((index, op)) = ops.iter().enumerate().find(|(_, op)| op.kind != expected) {
            return Err(OpsError::Kind { index, found: op.kind, kind });
        }
        let found = ops.iter().map(|op| op.len).sum(); // ≤ 1,024 × FRAME_PAYLOAD_BYTES_MAX
        if kind == FrameKind::Write && found != header.payload_len {
            return Err(OpsError::Payload { found, payload_len: header.payload_len });
        }
        Ok(TransferOps(ops))
    }

    /// The operations.
    pub fn ops(&self) -> Packed<'a, TransferOp> {
        self.0
    }
}
