//! Packed arrays inside `bytes` fields: keys and other short byte strings, fixed records, bits, codes.
//!
//! Each has a builder that owns its bytes and a borrowed view that checks everything when it is made and then
//! iterates without allocating and without failing. Nothing here allocates on the reading side.

mod bits;
mod bytes;
mod records;

pub use bits::{Bitmap, BitmapBuilder, Codes, CodesBuilder};
pub use bytes::{PackedBytes, PackedBytesBuilder, PackedKeys, PackedKeysBuilder};
pub use records::{Packed, PackedBuilder};

use moontide_types::bounds::BATCH_KEYS_MAX;
use moontide_types::{ErrorCode, KeyError, UnknownErrorCode};

use crate::layout::RecordError;
use crate::limits::PACKED_BYTES_MAX;

/// Why some bytes are not the packed array they should be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PackedError {
    /// It ends before what it announces.
    #[error("{found} bytes, at least {needed} are announced")]
    Truncated {
        /// How many there are.
        found: usize,
        /// How many there should be.
        needed: usize,
    },
    /// There are bytes left over.
    #[error("{left} bytes follow the last element")]
    Excess {
        /// How many.
        left: usize,
    },
    /// More elements than allowed.
    #[error("{found} elements, at most {max} are allowed")]
    TooMany {
        /// How many there are.
        found: usize,
        /// How many there may be.
        max: usize,
    },
    /// More bytes than allowed.
    #[error("{found} bytes, at most {max} are allowed")]
    TooLong {
        /// How many there are.
        found: usize,
        /// How many there may be.
        max: usize,
    },
    /// Another number of elements than the rest of the message says.
    #[error("{found} elements, {expected} are needed")]
    Count {
        /// How many there are.
        found: usize,
        /// How many there should be.
        expected: usize,
    },
    /// A bit beyond the last element is set.
    #[error("bits behind the last element are not zero")]
    SpareBits,
    /// An element is no key.
    #[error("element {index}: {source}")]
    Key {
        /// Which one.
        index: usize,
        /// Why.
        source: KeyError,
    },
    /// An element is no valid record.
    #[error("element {index}: {source}")]
    Record {
        /// Which one.
        index: usize,
        /// Why.
        source: RecordError,
    },
    /// An element is no error code.
    #[error("element {index}: {source}")]
    Code {
        /// Which one.
        index: usize,
        /// Why.
        source: UnknownErrorCode,
    },
}

impl PackedError {
    /// The stable code.
    pub fn code(&self) -> ErrorCode {
        match self {
            PackedError::TooMany { .. } | PackedError::TooLong { .. } => ErrorCode::TooLarge,
            PackedError::Key { source: KeyError::KeyTooLong { .. }, .. } => ErrorCode::TooLarge,
            PackedError::Code { .. } => ErrorCode::Unsupported,
            _ => ErrorCode::InvalidArgument,
        }
    }
}

const _: () = assert!(BATCH_KEYS_MAX * 6 <= PACKED_BYTES_MAX, "a full batch of short keys fits");
