//! Packed arrays inside `bytes` fields: keys and other short byte strings, fixed records, bits, codes.
//!
//! Each has a builder that owns its bytes, and a borrowed view. The view checks everything in `decode` and then
//! iterates without errors. Views never allocate.

mod bits;
mod bytes;
mod records;

pub use bits::{Bitmap, BitmapBuilder, Codes, CodesBuilder};
pub use bytes::{PackedBytes, PackedBytesBuilder, PackedKeys, PackedKeysBuilder};
pub use records::{Packed, PackedBuilder};

use moontide_types::limits::BATCH_KEYS_MAX;
use moontide_types::{ErrorCode, KeyError, UnknownErrorCode};

use crate::layout::RecordError;
use crate::limits::PACKED_BYTES_MAX;

/// Error of the decoding or building of a packed array.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PackedError {
    /// The array is shorter than its count or its lengths require.
    #[error("{found} bytes, at least {needed} are required")]
    Truncated {
        /// Number of bytes.
        found: usize,
        /// Required number of bytes.
        needed: usize,
    },
    /// Bytes follow the last element.
    #[error("{left} bytes follow the last element")]
    TrailingBytes {
        /// Number of these bytes.
        left: usize,
    },
    /// The array has too many elements.
    #[error("{found} elements, at most {max} are allowed")]
    TooMany {
        /// Number of elements.
        found: usize,
        /// Maximum number of elements.
        max: usize,
    },
    /// The array or an element has too many bytes.
    #[error("{found} bytes, at most {max} are allowed")]
    TooLong {
        /// Number of bytes.
        found: usize,
        /// Maximum number of bytes.
        max: usize,
    },
    /// The number of elements does not match the rest of the message.
    #[error("{found} elements, expected {expected}")]
    Count {
        /// Number of elements.
        found: usize,
        /// Expected number of elements.
        expected: usize,
    },
    /// A bit after the last element is set.
    #[error("bits after the last element are not zero")]
    ReservedBits,
    /// An element is no valid key.
    #[error("element {index}: {source}")]
    Key {
        /// Index of the element.
        index: usize,
        /// Error of the key.
        source: KeyError,
    },
    /// An element is no valid record.
    #[error("element {index}: {source}")]
    Record {
        /// Index of the element.
        index: usize,
        /// Error of the record.
        source: RecordError,
    },
    /// An element is no known error code.
    #[error("element {index}: {source}")]
    Code {
        /// Index of the element.
        index: usize,
        /// Number of the unknown code.
        source: UnknownErrorCode,
    },
}

impl PackedError {
    /// Returns the stable code.
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
