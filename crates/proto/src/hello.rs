//! The first frame of a connection: who speaks, in which versions. [`Hello`] is the body of Hello and HelloAck.

use crate::layout::{FieldValue, FixedRecord, RecordError};
use crate::limits::TOKEN_BYTES_MAX;
use moontide_types::NodeId;

/// Proof of who the caller is: up to [`TOKEN_BYTES_MAX`] bytes, none without authentication.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Token {
    bytes: [u8; TOKEN_BYTES_MAX],
    len: u8,
}

impl Token {
    /// No proof.
    pub const NONE: Token = Token { bytes: [0; TOKEN_BYTES_MAX], len: 0 };

    /// A token of at most [`TOKEN_BYTES_MAX`] bytes.
    pub fn new(token: &[u8]) -> Option<Token> {
        let mut bytes = [0; TOKEN_BYTES_MAX];
        bytes.get_mut(..token.len())?.copy_from_slice(token);
        Some(Token { bytes, len: token.len() as u8 }) // ≤ 64
    }

    /// The bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

impl std::fmt::Debug for Token {
    /// Shows the length only: a token must not reach a log.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Token({} bytes)", self.len)
    }
}

/// `length u16 | 64 bytes`, zero behind the token.
impl FieldValue for Token {
    const BYTES: usize = 2 + TOKEN_BYTES_MAX;
    fn put(&self, out: &mut [u8]) {
        let (len, bytes) = out.split_at_mut(2);
        u16::from(self.len).put(len);
        self.bytes.put(bytes);
    }
    fn take(bytes: &[u8]) -> Result<Self, u64> {
        let (len, bytes) = bytes.split_at(2);
        let len = u16::take(len)?;
        let (token, rest) = bytes.split_at_checked(len.into()).ok_or(u64::from(len))?;
        if rest.iter().any(|&b| b != 0) {
            return Err(len.into());
        }
        Token::new(token).ok_or(len.into())
    }
}

/// Protocol versions that a process speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProtocolVersions {
    /// The lowest.
    pub min: u16,
    /// The highest.
    pub max: u16,
}

impl ProtocolVersions {
    /// What this release speaks.
    pub const CURRENT: ProtocolVersions = ProtocolVersions { min: 1, max: 1 };

    /// The highest version that both speak.
    pub fn common(self, other: ProtocolVersions) -> Option<u16> {
        let highest = self.max.min(other.max);
        (highest >= self.min.max(other.min)).then_some(highest)
    }

    /// Whether the range is one: not empty, and 0 is no version.
    pub fn is_valid(self) -> bool {
        self.min > 0 && self.min <= self.max
    }
}

/// `min u16 | max u16`.
impl FieldValue for ProtocolVersions {
    const BYTES: usize = 4;
    fn put(&self, out: &mut [u8]) {
        let (min, max) = out.split_at_mut(2);
        self.min.put(min);
        self.max.put(max);
    }
    fn take(bytes: &[u8]) -> Result<Self, u64> {
        let (min, max) = bytes.split_at(2);
        Ok(ProtocolVersions { min: u16::take(min)?, max: u16::take(max)? })
    }
}

fixed_record! {
    /// Who speaks. The same in both directions; the answer's versions are the chosen one twice.
    pub struct Hello[96] {
        /// The node; 0 for a client or a master.
        0 node: NodeId,
        /// The process: a number it drew at random when it started.
        8 caller: u64,
        /// Versions it speaks: lowest `u16`, highest `u16`.
        16 versions: ProtocolVersions,
        /// Most requests that it wants to have, or lets the other have, in flight on this connection.
        20 inflight_max: u32,
        /// Abilities, one bit each; unknown ones are ignored, so that they can be offered to older peers.
        24 features: u32,
        /// Proof of who it is: length `u16`, 64 bytes.
        28 token: Token,
        spare 94,
    }
}

impl Hello {
    /// Reads the body of a Hello or HelloAck. What follows the record is of a later release and ignored: the
    /// first frame of a connection must be readable by every release.
    pub fn decode_body(body: &[u8]) -> Result<Hello, RecordError> {
        Hello::decode(body.get(..Hello::BYTES).unwrap_or(body))
    }

    fn check(&self) -> Result<(), RecordError> {
        Self::rule(self.versions.is_valid(), "1 ≤ lowest version ≤ highest")?;
        Self::rule(self.inflight_max > 0, "inflight_max > 0")
    }
}
