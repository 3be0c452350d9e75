//! [`TensorHeader`]: what stands in front of an object that is a tensor, so that whoever reads it needs no other source.
//!
//! ```text
//!   0        8   9     10    11     16                       80      124   128
//!   ┌────────┬───┬─────┬─────┬──────┬────────────────────────┬───────┬─────┐
//!   │"MTtensor"│ 1 │dtype│ dims│ zero │ shape: 8 × u64, or zero│ zero  │ crc │ then the elements, row by row
//!   └────────┴───┴─────┴─────┴──────┴────────────────────────┴───────┴─────┘
//! ```
//!
//! Numbers are little-endian; the checksum is CRC-32C of the 124 bytes before it. The elements begin at a multiple of 64
//! bytes, so that they are aligned wherever the object is.

/// Bytes of a header.
pub const TENSOR_HEADER_BYTES: usize = 128;

/// Most dimensions of a tensor.
pub const TENSOR_DIMS_MAX: usize = 8;

const MAGIC: [u8; 8] = *b"MTtensor";
const VERSION: u8 = 1;
const SHAPE_AT: usize = 16;
const CRC_AT: usize = TENSOR_HEADER_BYTES - 4;

macro_rules! dtypes {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $text:literal, $bytes:literal;)*) => {
        /// What an element is. **A number is never reused and never changes its meaning.**
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        #[non_exhaustive]
        pub enum Dtype {
            $($(#[$doc])* $name = $number,)*
        }

        impl Dtype {
            /// All of them.
            pub const ALL: &[Dtype] = &[$(Dtype::$name,)*];

            /// Its name, as numpy and torch write it.
            pub const fn name(self) -> &'static str {
                match self { $(Dtype::$name => $text,)* }
            }

            /// Bytes of an element.
            pub const fn bytes(self) -> usize {
                match self { $(Dtype::$name => $bytes,)* }
            }

            /// The one with this number.
            pub const fn from_number(number: u8) -> Option<Dtype> {
                match number {
                    $($number => Some(Dtype::$name),)*
                    _ => None,
                }
            }

            /// The one with this name.
            pub fn from_name(name: &str) -> Option<Dtype> {
                match name {
                    $($text => Some(Dtype::$name),)*
                    _ => None,
                }
            }
        }
    };
}

dtypes! {
    /// One byte, 0 or 1.
    Bool = 1, "bool", 1;
    /// Unsigned integers.
    Uint8 = 2, "uint8", 1;
    /// Of two bytes.
    Uint16 = 3, "uint16", 2;
    /// Of four bytes.
    Uint32 = 4, "uint32", 4;
    /// Of eight bytes.
    Uint64 = 5, "uint64", 8;
    /// Signed integers.
    Int8 = 6, "int8", 1;
    /// Of two bytes.
    Int16 = 7, "int16", 2;
    /// Of four bytes.
    Int32 = 8, "int32", 4;
    /// Of eight bytes.
    Int64 = 9, "int64", 8;
    /// IEEE half precision.
    Float16 = 10, "float16", 2;
    /// The upper half of a single precision number.
    Bfloat16 = 11, "bfloat16", 2;
    /// IEEE single precision.
    Float32 = 12, "float32", 4;
    /// IEEE double precision.
    Float64 = 13, "float64", 8;
    /// Four bits of exponent, three of mantissa, no infinity.
    Float8E4m3fn = 14, "float8_e4m3fn", 1;
    /// Five bits of exponent, two of mantissa.
    Float8E5m2 = 15, "float8_e5m2", 1;
    /// Two of single precision.
    Complex64 = 16, "complex64", 8;
    /// Two of double precision.
    Complex128 = 17, "complex128", 16;
}

/// What a tensor's elements are and how they are laid out: row by row, without gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorHeader {
    dtype: Dtype,
    dims: u8,
    shape: [u64; TENSOR_DIMS_MAX],
}

/// Why bytes are no tensor of ours, or a shape makes none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TensorError {
    /// It is something else: bytes that somebody put as such.
    #[error("the object is no tensor; get its bytes instead")]
    NotATensor,
    /// It was a tensor header once.
    #[error("the tensor's header is damaged or of a newer release; run the same release on both sides")]
    Damaged,
    /// Too many dimensions.
    #[error("a tensor has at most {TENSOR_DIMS_MAX} dimensions, not {0}; reshape it first")]
    Dims(usize),
    /// The elements have more bytes than there can be.
    #[error("the tensor's bytes cannot be counted in 63 bits")]
    TooLarge,
    /// The object is longer or shorter than its header says.
    #[error("the tensor's header speaks of {expected} bytes of elements, the object has {found}")]
    Length {
        /// What the header says.
        expected: u64,
        /// What is there.
        found: u64,
    },
}

impl TensorHeader {
    /// A tensor of this type and shape.
    pub fn new(dtype: Dtype, shape: &[u64]) -> Result<TensorHeader, TensorError> {
        let mut all = [0; TENSOR_DIMS_MAX];
        all.get_mut(..shape.len()).ok_or(TensorError::Dims(shape.len()))?.copy_from_slice(shape);
        let header = TensorHeader { dtype, dims: shape.len() as u8, shape: all };
        header.counted().ok_or(TensorError::TooLarge)?;
        Ok(header)
    }

    /// What an element is.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// How many there are in each dimension.
    pub fn shape(&self) -> &[u64] {
        &self.shape[..usize::from(self.dims)]
    }

    /// Bytes of all elements.
    pub fn payload_bytes(&self) -> u64 {
        self.counted().expect("counted when it was made")
    }

    fn counted(&self) -> Option<u64> {
        // The non-zero ones by themselves, too: a zero must not hide what cannot be counted, since strides are made of them.
        let bytes = |zeros: bool| {
            self.shape()
                .iter()
                .filter(|&&len| zeros || len > 0)
                .try_fold(self.dtype.bytes() as u64, |bytes, &len| {
                    bytes.checked_mul(len).filter(|&bytes| bytes <= i64::MAX as u64)
                })
        };
        bytes(false)?;
        bytes(true)
    }

    /// As it stands in front of the elements.
    pub fn encode(&self) -> [u8; TENSOR_HEADER_BYTES] {
        let mut bytes = [0; TENSOR_HEADER_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8] = VERSION;
        bytes[9] = self.dtype as u8;
        bytes[10] = self.dims;
        for (at, len) in self.shape.iter().enumerate() {
            bytes[SHAPE_AT + 8 * at..][..8].copy_from_slice(&len.to_le_bytes());
        }
        let crc = crc32c::crc32c(&bytes[..CRC_AT]);
        bytes[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// The header of an object that begins with these bytes and has `object_bytes`.
    pub fn decode(front: &[u8], object_bytes: u64) -> Result<TensorHeader, TensorError> {
        let bytes: &[u8; TENSOR_HEADER_BYTES] = front.first_chunk().ok_or(TensorError::NotATensor)?;
        if bytes[..8] != MAGIC {
            return Err(TensorError::NotATensor);
        }
        let crc = u32::from_le_bytes(bytes[CRC_AT..].try_into().expect("four bytes"));
        if crc != crc32c::crc32c(&bytes[..CRC_AT]) || bytes[8] != VERSION {
            return Err(TensorError::Damaged);
        }
        let dims = usize::from(bytes[10]);
        let dtype = Dtype::from_number(bytes[9]).ok_or(TensorError::Damaged)?;
        if dims > TENSOR_DIMS_MAX {
            return Err(TensorError::Damaged);
        }
        let mut shape = [0; TENSOR_DIMS_MAX];
        for (len, word) in shape.iter_mut().zip(bytes[SHAPE_AT..].chunks_exact(8)) {
            *len = u64::from_le_bytes(word.try_into().expect("eight bytes"));
        }
        let header = TensorHeader::new(dtype, &shape[..dims]).map_err(|_| TensorError::Damaged)?;
        // One form for each: whatever should be zero is.
        if header.encode() != *bytes {
            return Err(TensorError::Damaged);
        }
        let (expected, found) =
            (header.payload_bytes(), object_bytes.saturating_sub(TENSOR_HEADER_BYTES as u64));
        if expected != found {
            return Err(TensorError::Length { expected, found });
        }
        Ok(header)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn header(dtype: Dtype, shape: &[u64]) -> TensorHeader {
        TensorHeader::new(dtype, shape).unwrap()
    }

    #[test]
    fn every_type_and_shape_comes_back() {
        for &dtype in Dtype::ALL {
            assert_eq!(Dtype::from_name(dtype.name()), Some(dtype));
            for shape in [&[][..], &[0], &[7], &[3, 0, 5], &[1, 2, 3, 4, 5, 6, 7, 8]] {
                let header = header(dtype, shape);
                let len = header.payload_bytes() + TENSOR_HEADER_BYTES as u64;
                assert_eq!(TensorHeader::decode(&header.encode(), len), Ok(header));
            }
        }
    }

    #[test]
    fn every_changed_bit_is_noticed() {
        let bytes = header(Dtype::Bfloat16, &[4, 1024]).encode();
        let len = 4 * 1024 * 2 + 128;
        for bit in 0..bytes.len() * 8 {
            let mut bytes = bytes;
            bytes[bit / 8] ^= 1 << (bit % 8);
            let expected = if bit < 64 { TensorError::NotATensor } else { TensorError::Damaged };
            assert_eq!(TensorHeader::decode(&bytes, len), Err(expected), "bit {bit}");
        }
    }

    #[test]
    fn what_is_no_tensor_is_said_to_be_none() {
        let bytes = header(Dtype::Float32, &[2]).encode();
        assert_eq!(TensorHeader::decode(&bytes[..127], 127), Err(TensorError::NotATensor));
        assert_eq!(TensorHeader::decode(b"", 0), Err(TensorError::NotATensor));
        let wrong = TensorError::Length { expected: 8, found: 7 };
        assert_eq!(TensorHeader::decode(&bytes, 135), Err(wrong));
        assert_eq!(TensorHeader::new(Dtype::Uint8, &[1; 9]), Err(TensorError::Dims(9)));
        assert_eq!(TensorHeader::new(Dtype::Uint16, &[1 << 62, 2]), Err(TensorError::TooLarge));
        assert_eq!(
            TensorHeader::new(Dtype::Uint16, &[1 << 62, 2, 0]),
            Err(TensorError::TooLarge),
            "behind a zero"
        );
    }
}
