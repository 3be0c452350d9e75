//! [`PackedKeys`] and [`PackedBytes`]: many short byte strings in one field.
//!
//! ```text
//!  count u32 │ length u16 × count │ bytes of the first │ bytes of the second │ …
//! ```
//!
//! The lengths stand together so that one pass over them checks the whole; they sum exactly to the rest.

use moontide_types::Key;
use moontide_types::bounds::{BATCH_KEYS_MAX, KEY_BYTES_MAX};

use crate::limits::PACKED_BYTES_MAX;
use crate::packed::PackedError;

const COUNT_BYTES: usize = 4;
const LENGTH_BYTES: usize = 2;

/// At most [`BATCH_KEYS_MAX`] byte strings of at most 65,535 bytes each; they may be empty.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedBytes<'a> {
    encoded: &'a [u8],
    lengths: &'a [u8],
    bytes: &'a [u8],
}

impl<'a> PackedBytes<'a> {
    /// The encoded form of no element.
    pub const EMPTY: PackedBytes<'static> =
        PackedBytes { encoded: &[0; COUNT_BYTES], lengths: &[], bytes: &[] };

    /// Checks the count and that the lengths sum exactly to the rest.
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
            Some(left) => Err(PackedError::Excess { left }),
        }
    }

    /// The encoded form.
    pub fn as_encoded(&self) -> &'a [u8] {
        self.encoded
    }

    /// How many elements.
    pub fn len(&self) -> usize {
        self.lengths.len() / LENGTH_BYTES
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }

    /// The elements in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &'a [u8]> + use<'a> {
        let mut rest = self.bytes;
        each_length(self.lengths).map(move |len| {
            let (element, left) = rest.split_at(len); // decode() compared the sum of lengths with the rest
            rest = left;
            element
        })
    }
}

fn each_length(lengths: &[u8]) -> impl ExactSizeIterator<Item = usize> {
    lengths.chunks_exact(LENGTH_BYTES).map(|l| u16::from_le_bytes([l[0], l[1]]).into())
}

/// At most [`BATCH_KEYS_MAX`] keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PackedKeys<'a>(PackedBytes<'a>);

impl<'a> PackedKeys<'a> {
    /// Checks the array and every key in it.
    pub fn decode(encoded: &'a [u8]) -> Result<PackedKeys<'a>, PackedError> {
        let packed = PackedBytes::decode(encoded)?;
        for (index, bytes) in packed.iter().enumerate() {
            Key::new(bytes).map_err(|source| PackedError::Key { index, source })?;
        }
        Ok(PackedKeys(packed))
    }

    /// The encoded form.
    pub fn as_encoded(&self) -> &'a [u8] {
        self.0.encoded
    }

    /// How many keys.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The keys in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Key<'a>> + use<'a> {
        self.0.iter().map(|bytes| Key::new(bytes).expect("checked by decode"))
    }
}

/// Puts byte strings together. Lengths and bytes are collected apart, because the count comes first.
#[derive(Clone, Debug, Default)]
pub struct PackedBytesBuilder {
    lengths: Vec<u8>,
    bytes: Vec<u8>,
}

impl PackedBytesBuilder {
    /// None so far.
    pub fn new() -> PackedBytesBuilder {
        PackedBytesBuilder::default()
    }

    /// How many elements so far.
    pub fn len(&self) -> usize {
        self.lengths.len() / LENGTH_BYTES
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.lengths.is_empty()
    }

    /// Length of the encoded form.
    pub fn encoded_len(&self) -> usize {
        COUNT_BYTES + self.lengths.len() + self.bytes.len()
    }

    /// Adds one; fails, changing nothing, when the array would exceed a bound.
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

    /// The encoded form.
    pub fn finish(self) -> Vec<u8> {
        let mut encoded = Vec::with_capacity(self.encoded_len());
        encoded.extend_from_slice(&(self.len() as u32).to_le_bytes()); // ≤ BATCH_KEYS_MAX
        encoded.extend_from_slice(&self.lengths);
        encoded.extend_from_slice(&self.bytes);
        encoded
    }
}

/// Puts keys together.
#[derive(Clone, Debug, Default)]
pub struct PackedKeysBuilder(PackedBytesBuilder);

impl PackedKeysBuilder {
    /// None so far.
    pub fn new() -> PackedKeysBuilder {
        PackedKeysBuilder::default()
    }

    /// How many keys so far.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds one; fails, changing nothing, when the batch would exceed a bound: then send what there is.
    pub fn push(&mut self, key: Key<'_>) -> Result<(), PackedError> {
        self.0.push(key.as_bytes())
    }

    /// The encoded form.
    pub fn finish(self) -> Vec<u8> {
        self.0.finish()
    }
}

const _: () = assert!(KEY_BYTES_MAX <= u16::MAX as usize);
