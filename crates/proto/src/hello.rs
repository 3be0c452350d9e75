//! [`Hello`]: body of the Hello and HelloAck frames, with identity and protocol versions of the sender.

use crate::layout::{FieldValue, FixedRecord, RecordError};
use crate::limits::TOKEN_BYTES_MAX;
use moontide_types::NodeId;

/// Authentication token of a caller: up to [`TOKEN_BYTES_MAX`] bytes, empty without authentication.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Token {
    bytes: [u8; TOKEN_BYTES_MAX],
    len: u8,
}

impl Token {
    /// Empty token.
    pub const NONE: Token = Token { bytes: [0; TOKEN_BYTES_MAX], len: 0 };

    /// Creates a token of at most [`TOKEN_BYTES_MAX`] bytes; `None` if it is longer.
    pub fn new(token: &[u8]) -> Option<Token> {
        let mut bytes = [0; TOKEN_BYTES_MAX];
        bytes.get_mut(..token.len())?.copy_from_slice(token);
        Some(Token { bytes, len: token.len() as u8 }) // ≤ 64
    }

    /// Returns the bytes of the token.
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes[..usize::from(self.len)]
    }
}

impl std::fmt::Debug for Token {
    /// Prints the length only: a token must not reach a log.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Token({} bytes)", self.len)
    }
}

/// `length u16 | 64 bytes`, zero after the token.
impl FieldValue for Token {
    const BYTES: usize = 2 + TOKEN_BYTES_MAX;
    fn write_to(&self, out: &mut [u8]) {
        let (len, bytes) = out.split_at_mut(2);
        u16::from(self.len).write_to(len);
        self.bytes.write_to(bytes);
    }
    fn read_from(bytes: &[u8]) -> Result<Self, u64> {
        let (len, bytes) = bytes.split_at(2);
        let len = u16::read_from(len)?;
        let (token, rest) = bytes.split_at_checked(len.into()).ok_or(u64::from(len))?;
        if rest.iter().any(|&b| b != 0) {
            return Err(len.into());
        }
        Token::new(token).ok_or(len.into())
    }
}

/// Range of protocol versions that a process supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProtocolVersions {
    /// Lowest version.
    pub min: u16,
    /// Highest version.
    pub max: u16,
}

impl ProtocolVersions {
    /// Versions that this release supports. In version 1, clients computed ids from the key of the cluster.
    pub const CURRENT: ProtocolVersions = ProtocolVersions { min: 2, max: 2 };

    /// Returns the highest version that both ranges contain.
    pub fn negotiate(self, other: ProtocolVersions) -> Option<u16> {
        let highest = self.max.min(other.max);
        (highest >= self.min.max(other.min)).then_some(highest)
    }

    /// Returns whether the range is not empty and does not contain 0, which is no version.
    pub fn is_valid(self) -> bool {
        self.min > 0 && self.min <= self.max
    }
}

/// `min u16 | max u16`.
impl FieldValue for ProtocolVersions {
    const BYTES: usize = 4;
    fn write_to(&self, out: &mut [u8]) {
        let (min, max) = out.split_at_mut(2);
        self.min.write_to(min);
        self.max.write_to(max);
    }
    fn read_from(bytes: &[u8]) -> Result<Self, u64> {
        let (min, max) = bytes.split_at(2);
        Ok(ProtocolVersions { min: u16::read_from(min)?, max: u16::read_from(max)? })
    }
}

fixed_record! {
    /// Identity and protocol versions of the sender. The same record in both directions; in HelloAck both versions
    /// are the negotiated one.
    pub struct Hello[96] {
        /// Id of the node; 0 for a client or a master.
        0 node: NodeId,
        /// Random number of the process, chosen at its start.
        8 caller: u64,
        /// Supported versions: lowest `u16`, highest `u16`.
        16 versions: ProtocolVersions,
        /// Limit of requests in flight on this connection: requested in Hello, granted in HelloAck.
        20 inflight_max: u32,
        /// Feature bits. A receiver ignores unknown bits, so a sender may offer them to older peers.
        24 features: u32,
        /// Authentication token: length `u16`, 64 bytes.
        28 token: Token,
        reserved 94,
    }
}

impl Hello {
    /// Encodes the body of a Hello or HelloAck: the record, and the node on the host of the sender whose memory it maps, 0 if none.
    pub fn encode_body(&self, near: NodeId, out: &mut Vec<u8>) {
        self.encode(out);
        out.extend_from_slice(&near.0.to_le_bytes());
    }

    /// Returns the node on the host of the sender; 0 if it has none, or is of a release that does not say it.
    pub fn near_node(body: &[u8]) -> NodeId {
        let bytes = body.get(Hello::BYTES..Hello::BYTES + 8).and_then(|bytes| bytes.try_into().ok());
        NodeId(bytes.map_or(0, u64::from_le_bytes))
    }

    /// Decodes the body of a Hello or HelloAck. Ignores bytes after the record, which a later release may append:
    /// every release must be able to decode the first frame of a connection.
    pub fn decode_body(body: &[u8]) -> Result<Hello, RecordError> {
        Hello::decode(body.get(..Hello::BYTES).unwrap_or(body))
    }

    fn check(&self) -> Result<(), RecordError> {
        Self::rule(self.versions.is_valid(), "1 ≤ lowest version ≤ highest")?;
        Self::rule(self.inflight_max > 0, "inflight_max > 0")
    }
}
