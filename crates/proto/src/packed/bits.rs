//! [`Bitmap`]: one bit per element, least significant first. [`Codes`]: one `u16` per element, 0 for success.

use moontide_types::{ErrorCode, UnknownErrorCode};

use crate::layout::{code_from_number, code_number};
use crate::packed::PackedError;

/// One bit for each of a known number of elements; unused bits are zero.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bitmap<'a> {
    bytes: &'a [u8],
    len: usize,
}

impl<'a> Bitmap<'a> {
    /// Creates a view. Fails unless the bytes are exactly those of `len` bits.
    pub fn decode(bytes: &'a [u8], len: usize) -> Result<Bitmap<'a>, PackedError> {
        let (found, needed) = (bytes.len(), len.div_ceil(8));
        if found < needed {
            return Err(PackedError::Truncated { found, needed });
        }
        if found > needed {
            return Err(PackedError::TrailingBytes { left: found - needed });
        }
        let used_in_last = len % 8;
        if used_in_last != 0 && bytes[needed - 1] >> used_in_last != 0 {
            return Err(PackedError::ReservedBits);
        }
        Ok(Bitmap { bytes, len })
    }

    /// Returns the encoded form.
    pub fn as_encoded(&self) -> &'a [u8] {
        self.bytes
    }

    /// Returns the number of bits.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the bit at `index`; `None` after the last.
    pub fn get(&self, index: usize) -> Option<bool> {
        (index < self.len).then(|| self.bytes[index / 8] >> (index % 8) & 1 == 1)
    }

    /// Iterates over the bits in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = bool> + use<'a> {
        let bytes = self.bytes;
        (0..self.len).map(move |i| bytes[i / 8] >> (i % 8) & 1 == 1)
    }

    /// Returns the number of set bits.
    pub fn count_ones(&self) -> usize {
        self.bytes.iter().map(|b| b.count_ones() as usize).sum()
    }
}

/// Builder of a [`Bitmap`].
#[derive(Clone, Debug, Default)]
pub struct BitmapBuilder {
    bytes: Vec<u8>,
    len: usize,
}

impl BitmapBuilder {
    /// Appends a bit.
    pub fn push(&mut self, bit: bool) {
        if self.len.is_multiple_of(8) {
            self.bytes.push(0);
        }
        self.bytes[self.len / 8] |= u8::from(bit) << (self.len % 8);
        self.len += 1;
    }

    /// Returns the number of bits.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the encoded form.
    pub fn finish(self) -> Vec<u8> {
        self.bytes
    }
}

impl FromIterator<bool> for BitmapBuilder {
    fn from_iter<I: IntoIterator<Item = bool>>(bits: I) -> Self {
        let mut builder = BitmapBuilder::default();
        bits.into_iter().for_each(|bit| builder.push(bit));
        builder
    }
}

/// One outcome per element.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Codes<'a>(&'a [u8]);

impl<'a> Codes<'a> {
    /// Creates a view. Fails if there are more than `max` codes, or if a code is unknown.
    pub fn decode(bytes: &'a [u8], max: usize) -> Result<Codes<'a>, PackedError> {
        let (count, left) = (bytes.len() / 2, bytes.len() % 2);
        if count > max {
            return Err(PackedError::TooMany { found: count, max });
        }
        if left != 0 {
            return Err(PackedError::TrailingBytes { left });
        }
        for (index, number) in numbers(bytes).enumerate() {
            if code_from_number(number).is_none() {
                return Err(PackedError::Code { index, source: UnknownErrorCode(number.into()) });
            }
        }
        Ok(Codes(bytes))
    }

    /// Returns the encoded form.
    pub fn as_encoded(&self) -> &'a [u8] {
        self.0
    }

    /// Returns the number of outcomes.
    pub fn len(&self) -> usize {
        self.0.len() / 2
    }

    /// Returns whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Iterates over the outcomes in order; `None` is success.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Option<ErrorCode>> + use<'a> {
        numbers(self.0).map(|number| code_from_number(number).expect("checked by decode"))
    }
}

fn numbers(bytes: &[u8]) -> impl ExactSizeIterator<Item = u16> {
    bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]))
}

/// Builder of [`Codes`].
#[derive(Clone, Debug, Default)]
pub struct CodesBuilder(Vec<u8>);

impl CodesBuilder {
    /// Appends an outcome; `None` is success.
    pub fn push(&mut self, code: Option<ErrorCode>) {
        self.0.extend_from_slice(&code_number(&code).to_le_bytes());
    }

    /// Returns the number of outcomes.
    pub fn len(&self) -> usize {
        self.0.len() / 2
    }

    /// Returns whether the length is 0.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the encoded form.
    pub fn finish(self) -> Vec<u8> {
        self.0
    }
}

impl FromIterator<Option<ErrorCode>> for CodesBuilder {
    fn from_iter<I: IntoIterator<Item = Option<ErrorCode>>>(codes: I) -> Self {
        let mut builder = CodesBuilder::default();
        codes.into_iter().for_each(|code| builder.push(code));
        builder
    }
}
