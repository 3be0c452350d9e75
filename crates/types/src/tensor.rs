//! [`TensorHeader`]: prefix of an object that is a tensor, with its dtype and shape, so that a reader needs no other
//! source.
//!
//! ```text
//!   0        8   9     10    11     16                       80      124   128
//!   ┌────────┬───┬─────┬─────┬──────┬────────────────────────┬───────┬─────┐
//!   │"MTtensor"│ 1 │dtype│ dims│ zero │ shape: 8 × u64, or zero│ zero  │ crc │ then the elements, row by row
//!   └────────┴───┴─────┴─────┴──────┴────────────────────────┴───────┴─────┘
//! ```
//!
//! Numbers are little-endian; the checksum is CRC-32C of the 124 bytes before it. The elements start at a multiple of
//! 64 bytes, so they are aligned at every location of the object.

/// Size of a header in bytes.
pub const TENSOR_HEADER_BYTES: usize = 128;

/// Maximum number of dimensions of a tensor.
pub const TENSOR_DIMS_MAX: usize = 8;

const MAGIC: [u8; 8] = *b"MTtensor";
const VERSION: u8 = 1;
const SHAPE_AT: usize = 16;
const CRC_AT: usize = TENSOR_HEADER_BYTES - 4;

macro_rules! dtypes {
    ($($(#[$doc:meta])* $name:ident = $number:literal, $text:literal, $bytes:literal;)*) => {
        /// Type of an element. **A number is never reused and never changes its meaning.**
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        #[non_exhaustive]
        pub enum Dtype {
            $($(#[$doc])* $name = $number,)*
        }

        impl Dtype {
            /// All types, in ascending order of their numbers.
            pub const ALL: &[Dtype] = &[$(Dtype::$name,)*];

            /// Returns the name that numpy and torch use.
            pub const fn name(self) -> &'static str {
                match self { $(Dtype::$name => $text,)* }
            }

            /// Returns the size of an element in bytes.
            pub const fn bytes(self) -> usize {
                match self { $(Dtype::$name => $bytes,)* }
            }

            /// Returns the type with this number.
            pub const fn from_number(number: u8) -> Option<Dtype> {
                match number {
                    $($number => Some(Dtype::$name),)*
                    _ => None,
                }
            }

            /// Returns the type with this name.
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
    /// Unsigned integer of one byte.
    Uint8 = 2, "uint8", 1;
    /// Unsigned integer of two bytes.
    Uint16 = 3, "uint16", 2;
    /// Unsigned integer of four bytes.
    Uint32 = 4, "uint32", 4;
    /// Unsigned integer of eight bytes.
    Uint64 = 5, "uint64", 8;
    /// Signed integer of one byte.
    Int8 = 6, "int8", 1;
    /// Signed integer of two bytes.
    Int16 = 7, "int16", 2;
    /// Signed integer of four bytes.
    Int32 = 8, "int32", 4;
    /// Signed integer of eight bytes.
    Int64 = 9, "int64", 8;
    /// IEEE half precision.
    Float16 = 10, "float16", 2;
    /// Upper half of an IEEE single precision number.
    Bfloat16 = 11, "bfloat16", 2;
    /// IEEE single precision.
    Float32 = 12, "float32", 4;
    /// IEEE double precision.
    Float64 = 13, "float64", 8;
    /// Four bits of exponent, three bits of mantissa, no infinity.
    Float8E4m3fn = 14, "float8_e4m3fn", 1;
    /// Five bits of exponent, two bits of mantissa.
    Float8E5m2 = 15, "float8_e5m2", 1;
    /// Complex number of two single precision numbers.
    Complex64 = 16, "complex64", 8;
    /// Complex number of two double precision numbers.
    Complex128 = 17, "complex128", 16;
}

/// Element type and shape of a tensor. The elements are stored row by row, without gaps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorHeader {
    dtype: Dtype,
    dims: u8,
    shape: [u64; TENSOR_DIMS_MAX],
}

/// Error of the decoding of a tensor header, or of an invalid shape.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum TensorError {
    /// The object does not start with a tensor header: it was put as plain bytes.
    #[error("object is no tensor; get its bytes instead")]
    NotATensor,
    /// The magic matches, but the rest of the header does not.
    #[error("tensor header is corrupt or of a newer release; run the same release on both sides")]
    Corrupt,
    /// The shape has too many dimensions.
    #[error("tensor has {0} dimensions, at most {TENSOR_DIMS_MAX} are allowed; reshape it first")]
    Dims(usize),
    /// The size of the elements exceeds 2⁶³ − 1 bytes.
    #[error("tensor is larger than 2^63 - 1 bytes")]
    TooLarge,
    /// The length of the object differs from the length in its header.
    #[error("tensor header declares {expected} bytes of elements, object has {found}")]
    Length {
        /// Bytes of elements according to the header.
        expected: u64,
        /// Bytes of the object after the header.
        found: u64,
    },
}

impl TensorHeader {
    /// Creates the header of a tensor of this type and shape.
    pub fn new(dtype: Dtype, shape: &[u64]) -> Result<TensorHeader, TensorError> {
        let mut all = [0; TENSOR_DIMS_MAX];
        all.get_mut(..shape.len()).ok_or(TensorError::Dims(shape.len()))?.copy_from_slice(shape);
        let header = TensorHeader { dtype, dims: shape.len() as u8, shape: all };
        header.checked_bytes().ok_or(TensorError::TooLarge)?;
        Ok(header)
    }

    /// Returns the type of the elements.
    pub fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Returns the length of each dimension.
    pub fn shape(&self) -> &[u64] {
        &self.shape[..usize::from(self.dims)]
    }

    /// Returns the size of all elements in bytes.
    pub fn payload_bytes(&self) -> u64 {
        self.checked_bytes().expect("checked by new")
    }

    /// Returns the size of all elements in bytes, if it fits in 63 bits.
    fn checked_bytes(&self) -> Option<u64> {
        // The product of the non-zero lengths must fit, too: strides are products of them, also if one length is zero.
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

    /// Encodes the header, including its checksum.
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

    /// Decodes the header of an object of `object_bytes` bytes that starts with `front`.
    pub fn decode(front: &[u8], object_bytes: u64) -> Result<TensorHeader, TensorError> {
        let bytes: &[u8; TENSOR_HEADER_BYTES] = front.first_chunk().ok_or(TensorError::NotATensor)?;
        if bytes[..8] != MAGIC {
            return Err(TensorError::NotATensor);
        }
        let crc = u32::from_le_bytes(bytes[CRC_AT..].try_into().expect("four bytes"));
        if crc != crc32c::crc32c(&bytes[..CRC_AT]) || bytes[8] != VERSION {
            return Err(TensorError::Corrupt);
        }
        let dims = usize::from(bytes[10]);
        let dtype = Dtype::from_number(bytes[9]).ok_or(TensorError::Corrupt)?;
        if dims > TENSOR_DIMS_MAX {
            return Err(TensorError::Corrupt);
        }
        let mut shape = [0; TENSOR_DIMS_MAX];
        for (len, word) in shape.iter_mut().zip(bytes[SHAPE_AT..].chunks_exact(8)) {
            *len = u64::from_le_bytes(word.try_into().expect("eight bytes"));
        }
        let header = TensorHeader::new(dtype, &shape[..dims]).map_err(|_| TensorError::Corrupt)?;
        // The encoding is unique: this checks that reserved bytes are zero.
        if header.encode() != *bytes {
            return Err(TensorError::Corrupt);
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
    fn tensor_header_round_trips_for_every_dtype_and_shape() {
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
    fn tensor_header_bit_flip_is_rejected() {
        let bytes = header(Dtype::Bfloat16, &[4, 1024]).encode();
        let len = 4 * 1024 * 2 + 128;
        for bit in 0..bytes.len() * 8 {
            let mut bytes = bytes;
            bytes[bit / 8] ^= 1 << (bit % 8);
            let expected = if bit < 64 { TensorError::NotATensor } else { TensorError::Corrupt };
            assert_eq!(TensorHeader::decode(&bytes, len), Err(expected), "bit {bit}");
        }
    }

    #[test]
    fn invalid_tensor_header_length_or_shape_is_rejected() {
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
            "a zero must not hide the overflow"
        );
    }
}
