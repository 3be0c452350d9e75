//! [`TransferOps`]: the operations in the body of a Read, Write, Release or Describe frame, decoded together with
//! the frame header. A `LoadRequest` carries those of Load.

use moontide_types::ErrorCode;

use crate::frame::{FrameHeader, FrameKind};
use crate::limits::OPS_PER_FRAME_MAX;
use crate::packed::{Packed, PackedError};
use crate::records::{OpKind, TransferOp};

/// Error of the decoding of a frame body with operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TransferOpsError {
    /// Frames of this kind carry no operations.
    #[error("frame of kind {kind:?} carries no operations")]
    Frame {
        /// Kind of the frame.
        kind: FrameKind,
    },
    /// The length of the body differs from the header.
    #[error("body of {found} bytes, header announces {announced}")]
    BodyLen {
        /// Length of the body in bytes.
        found: usize,
        /// Length in the header.
        announced: u32,
    },
    /// The kind of an operation does not match the kind of the frame.
    #[error("operation {index} is a {found:?} in a frame of kind {kind:?}")]
    Kind {
        /// Index of the operation.
        index: usize,
        /// Kind of the operation.
        found: OpKind,
        /// Kind of the frame.
        kind: FrameKind,
    },
    /// The sum of the lengths of a Write's operations is not the length of the payload.
    #[error("operations on {found} bytes, payload has {payload_len}")]
    Payload {
        /// Sum of the lengths of all operations in bytes.
        found: u64,
        /// Length of the payload in bytes.
        payload_len: u64,
    },
    /// The body is no valid packed array.
    #[error(transparent)]
    Packed(#[from] PackedError),
}

impl TransferOpsError {
    /// Returns the stable code.
    pub fn code(&self) -> ErrorCode {
        match self {
            TransferOpsError::Packed(error) => error.code(),
            _ => ErrorCode::InvalidArgument,
        }
    }
}

/// Operations of one Read, Write, Release or Describe frame.
///
/// Invariants: every operation is of the frame's kind; the lengths of a Write's operations sum to its payload length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferOps<'a>(Packed<'a, TransferOp>);

impl<'a> TransferOps<'a> {
    /// Decodes the body and compares it with the header.
    pub fn decode(header: &FrameHeader, body: &'a [u8]) -> Result<TransferOps<'a>, TransferOpsError> {
        let kind = header.kind;
        let expected = match kind {
            FrameKind::Read | FrameKind::Describe => OpKind::Read,
            FrameKind::Write => OpKind::Write,
            FrameKind::Release => OpKind::Release,
            kind => return Err(TransferOpsError::Frame { kind }),
        };
        if body.len() != header.body_len as usize {
            return Err(TransferOpsError::BodyLen { found: body.len(), announced: header.body_len });
        }
        let ops = Packed::<TransferOp>::decode(body, OPS_PER_FRAME_MAX)?;
        if let Some((index, op)) = ops.iter().enumerate().find(|(_, op)| op.kind != expected) {
            return Err(TransferOpsError::Kind { index, found: op.kind, kind });
        }
        let found = ops.iter().map(|op| op.len).sum(); // ≤ 1,024 × FRAME_PAYLOAD_BYTES_MAX
        if kind == FrameKind::Write && found != header.payload_len {
            return Err(TransferOpsError::Payload { found, payload_len: header.payload_len });
        }
        Ok(TransferOps(ops))
    }

    /// Returns the operations.
    pub fn ops(&self) -> Packed<'a, TransferOp> {
        self.0
    }
}
