//! [`PackedKeys`] and [`PackedBytes`]: arrays of short byte strings in one field.
//!
//! ```text
//!  count u32 │ length u16 × count │ bytes of the first │ bytes of the second │ …
//! ```
//!
//! The lengths are stored together, so that one pass over them checks the array; their sum is exactly the length of
//! the rest.

use moontide_types::Key;
use moontide_types::limits::{BATCH_KEYS_MAX, KEY_BYTES_MAX};

use crate::limits::PACKED_BYTES_MAX;
use crate::packed::PackedError;

const COUNT_BYTES: usize = 4;
const LENGTH_BYTES: usize = 2;

/// Array of at most [`BATCH_KEYS_MAX`] byte strings of 0 to 65,535 bytes each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedBytes<'a> {
    encoded: &'a [u8],
    lengths: &'a [u8],
    bytes: &'a [u8],
}

impl<'a> PackedBytes<'a> {
    /// Array without elements.
    pub const EMPTY: PackedBytes<'static> =
        PackedBytes { encoded: &[0; COUNT_BYTES], lengths: &[], bytes: &[] };

    /// Creates a view. Fails if the count is too large, or if the sum of the lengths is not the length of the rest.
    pub fn decode(encoded: &'a [u8]) -> Result<PackedBytes<'a>, PackedError> {
        let found = encoded.len();
        if found > PACKED_BYTES_MAX {
            return Err(PackedError::TooLong { found, max: PACKED_BYTES_MAX });
        }
        let truncated = |needed| PackedError::Truncated { found, needed };
        let (count, rest) = encoded.split_first_chunk().ok_or(truncated(COUNT_BYTES))?;
        let count = u32::from_le_bytes(*count) as usize;
        if count > BATCH_KEYS_MAX {
            return Err(PackedError::TooMany { found: count, max: BATCH_KEYS_MAX });
        }
        let lengths_len = count * LENGTH_BYTES;
        let (lengths, bytes) =
            rest.split_at_checked(lengths_len).ok_or(truncated(COUNT_BYTES + lengths_len))?;
        let sum: usize = each_length(lengths).sum(); // ≤ 4,096 × 65,535
        match bytes.len().checked_sub(sum) {
            None => Err(truncated(COUNT_BYTES + lengths_len + sum)),
            Some(0) => Ok(PackedBytes { encoded, lengths, bytes }),
            Some(left) => Err(PackedError::TrailingBytes { left }),
        }
    }

    /// Returns the encoded form.
    pub fn as_encoded(&self) -> &'a [u8] {
        self.encoded
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.lengths.len() / LENGTH_BYTES
    }

    /// Returns whether the array has no elements.
    pub fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }

    /// Iterates over the elements in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &'a [u8]> + use<'a> {
        let mut rest = self.bytes;
        each_length(self.lengths).map(move |len| {
            let (element, left) = rest.split_at(len); // decode() checked the sum of the lengths
            rest = left;
            element
        })
    }
}

fn each_length(lengths: &[u8]) -> impl ExactSizeIterator<Item = usize> {
    lengths.chunks_exact(LENGTH_BYTES).map(|l| u16::from_le_bytes([l[0], l[1]]).into())
}

/// Array of at most [`BATCH_KEYS_MAX`] keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedKeys<'a>(PackedBytes<'a>);

impl<'a> PackedKeys<'a> {
    /// Creates a view. Fails if the array or a key is invalid.
    pub fn decode(encoded: &'a [u8]) -> Result<PackedKeys<'a>, PackedError> {
        let packed = PackedBytes::decode(encoded)?;
        for (index, bytes) in packed.iter().enumerate() {
            Key::new(bytes).map_err(|source| PackedError::Key { index, source })?;
        }
        Ok(PackedKeys(packed))
    }

    /// Returns the encoded form.
    pub fn as_encoded(&self) -> &'a [u8] {
        self.0.encoded
    }

    /// Returns the number of keys.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether the array has no elements.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Iterates over the keys in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Key<'a>> + use<'a> {
        self.0.iter().map(|bytes| Key::new(bytes).expect("checked by decode"))
    }
}

/// Builder of [`PackedBytes`]. Collects lengths and bytes separately: the encoded form stores all lengths first.
#[derive(Clone, Debug, Default)]
pub struct PackedBytesBuilder {
    lengths: Vec<u8>,
    bytes: Vec<u8>,
}

impl PackedBytesBuilder {
    /// Creates an empty builder.
    pub fn new() -> PackedBytesBuilder {
        PackedBytesBuilder::default()
    }

    /// Returns the number of elements.
    pub fn len(&self) -> usize {
        self.lengths.len() / LENGTH_BYTES
    }

    /// Returns whether the array has no elements.
    pub fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }

    /// Returns the length of the encoded form in bytes.
    pub fn encoded_len(&self) -> usize {
        COUNT_BYTES + self.lengths.len() + self.bytes.len()
    }

    /// Appends an element. Fails, and changes nothing, if the array would exceed a limit.
    pub fn push(&mut self, element: &[u8]) -> Result<(), PackedError> {
        if self.len() == BATCH_KEYS_MAX {
            return Err(PackedError::TooMany { found: BATCH_KEYS_MAX + 1, max: BATCH_KEYS_MAX });
        }
        let max = usize::from(u16::MAX);
        let len =
            u16::try_from(element.len()).map_err(|_| PackedError::TooLong { found: element.len(), max })?;
        let found = self.encoded_len() + LENGTH_BYTES + element.len();
        if found > PACKED_BYTES_MAX {
            return Err(PackedError::TooLong { found, max: PACKED_BYTES_MAX });
        }
        self.lengths.extend_from_slice(&len.to_le_bytes());
        self.bytes.extend_from_slice(element);
        Ok(())
    }

    /// Returns the encoded form.
    pub fn finish(self) -> Vec<u8> {
        let mut encoded = Vec::with_capacity(self.encoded_len());
        encoded.extend_from_slice(&(self.len() as u32).to_le_bytes()); // ≤ BATCH_KEYS_MAX
        encoded.extend_from_slice(&self.lengths);
        encoded.extend_from_slice(&self.bytes);
        encoded
    }
}

/// Builder of [`PackedKeys`].
#[derive(Clone, Debug, Default)]
pub struct PackedKeysBuilder(PackedBytesBuilder);

impl PackedKeysBuilder {
    /// Creates an empty builder.
    pub fn new() -> PackedKeysBuilder {
        PackedKeysBuilder::default()
    }

    /// Returns the number of keys.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Returns whether the array has no elements.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Appends a key. Fails, and changes nothing, if the batch would exceed a limit: then send the keys so far.
    pub fn push(&mut self, key: Key<'_>) -> Result<(), PackedError> {
        self.0.push(key.as_bytes())
    }

    /// Returns the encoded form.
    pub fn finish(self) -> Vec<u8> {
        self.0.finish()
    }
}

const _: () = assert!(KEY_BYTES_MAX <= u16::MAX as usize);
