//! [`RawMessage`]: common form of the messages that processes of one host exchange together with descriptors: 64
//! bytes, little-endian; unused bytes are zero and checked.
//!
//! ```text
//!   0      4         8                          64
//!   ├ magic ┤ kind u32 ├ fields u64, in order … ─┤
//! ```

/// Reason why bytes are not a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShmMessageError {
    /// The length is not [`RawMessage::BYTES`].
    #[error("message of {len} bytes, expected {}", RawMessage::BYTES)]
    Length {
        /// Received length in bytes.
        len: usize,
    },
    /// The magic number is of another program or version.
    #[error("magic {found:#010x} is not that of a Moontide node of this release")]
    Magic {
        /// Received magic number.
        found: u32,
    },
    /// The message kind is unknown.
    #[error("message kind {kind} is unknown")]
    Kind {
        /// Received message kind.
        kind: u32,
    },
    /// A field is out of range, or an unused one is not zero.
    #[error("field {field} of message kind {kind} is invalid")]
    Field {
        /// Received message kind.
        kind: u32,
        /// Index of the field, from 0.
        field: usize,
    },
}

const MAGIC: u32 = u32::from_le_bytes(*b"MTD1");
const FIELDS: usize = 7;

/// A message whose kind and fields have no meaning yet. Kinds are unique among all messages of this form.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RawMessage {
    /// Message kind.
    pub kind: u32,
    /// Fields; zero if unused.
    pub fields: [u64; FIELDS],
}

impl RawMessage {
    /// Length of every message in bytes.
    pub const BYTES: usize = 8 + FIELDS * 8;

    /// Creates a message whose first fields are `fields`.
    ///
    /// # Panics
    /// If there are more than seven.
    pub fn new(kind: u32, fields: &[u64]) -> RawMessage {
        let mut message = RawMessage { kind, fields: [0; FIELDS] };
        message.fields[..fields.len()].copy_from_slice(fields);
        message
    }

    /// Encodes the message.
    pub fn encode(&self) -> [u8; RawMessage::BYTES] {
        let mut bytes = [0; RawMessage::BYTES];
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.kind.to_le_bytes());
        for (target, field) in bytes[8..].chunks_exact_mut(8).zip(self.fields) {
            target.copy_from_slice(&field.to_le_bytes());
        }
        bytes
    }

    /// Decodes a message of any kind.
    pub fn decode(bytes: &[u8]) -> Result<RawMessage, ShmMessageError> {
        let bytes: &[u8; RawMessage::BYTES] =
            bytes.try_into().map_err(|_| ShmMessageError::Length { len: bytes.len() })?;
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let magic = u32_at(0);
        if magic != MAGIC {
            return Err(ShmMessageError::Magic { found: magic });
        }
        Ok(RawMessage { kind: u32_at(4), fields: std::array::from_fn(|field| u64_at(8 + field * 8)) })
    }

    /// Returns a field that has at most 32 bits.
    pub fn narrow(&self, field: usize) -> Result<u32, ShmMessageError> {
        u32::try_from(self.fields[field]).map_err(|_| self.invalid(field))
    }

    /// Checks that all fields after the first `used` are zero.
    pub fn check_unused(&self, used: usize) -> Result<(), ShmMessageError> {
        match (used..FIELDS).find(|&field| self.fields[field] != 0) {
            Some(field) => Err(self.invalid(field)),
            None => Ok(()),
        }
    }

    /// Returns the error for an invalid field.
    pub fn invalid(&self, field: usize) -> ShmMessageError {
        ShmMessageError::Field { kind: self.kind, field }
    }
}
