//! What is said at the door: messages of 64 bytes, little-endian, unused bytes zero and checked.
//!
//! ```text
//!   0      4         8                          64
//!   ├ magic ┤ kind u32 ├ fields u64, in order … ─┤
//! ```

use moontide_types::{ClientId, ErrorCode, Generation, SegmentId};

use crate::ranks::Rank;
use crate::shm::segment::{Medium, SegmentShape};
use crate::shm::world::WorldShape;

/// Why bytes are not a message.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MessageError {
    /// Another length than [`Message::BYTES`].
    #[error("a message of {len} bytes, expected {}", Message::BYTES)]
    Length {
        /// Its length.
        len: usize,
    },
    /// Not one of ours, or of another version.
    #[error("magic {found:#010x}: not a Moontide node, or another release")]
    Magic {
        /// What stood there.
        found: u32,
    },
    /// No such kind.
    #[error("message kind {kind} is unknown")]
    Kind {
        /// What stood there.
        kind: u32,
    },
    /// A field is out of its range, or an unused one is not zero.
    #[error("field {field} of message kind {kind} has no meaning")]
    Field {
        /// The kind.
        kind: u32,
        /// Which field, from 0.
        field: usize,
    },
}

/// The node lets a client in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Welcome {
    /// The client's number.
    pub client: ClientId,
    /// Length of the board.
    pub board_len: u64,
    /// Length of the ledger.
    pub ledger_len: u64,
    /// How long the board is believed after its last beat.
    pub stale_after_ms: u64,
    /// How many segment offers follow.
    pub segments: u32,
}

/// Everything that is said at the door.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// A client asks to be let in; its pidfd comes along.
    Hello {
        /// Its process, as it sees itself.
        pid: u32,
    },
    /// It may; board and ledger come along.
    Welcome(Welcome),
    /// A segment; headers and payload come along. The payload starts so many bytes into what its descriptor stands for.
    SegmentOffer(SegmentShape, u64),
    /// It may not.
    Refusal(ErrorCode),
    /// A client that is in opens a stream; one end comes along. What is said on it is not the door's business, but
    /// the node knows who says it.
    Stream,
    /// A process asks to be a rank of a world; its pidfd comes along.
    JoinWorld(WorldShape, Rank),
    /// It may; the control region comes along, and then one [`Message::WorldRegion`] per rank.
    World(WorldShape),
    /// The region of a rank, which comes along.
    WorldRegion(Rank),
}

const MAGIC: u32 = u32::from_le_bytes(*b"MTD1");
const FIELDS: usize = 7;

impl Message {
    /// Length of every message.
    pub const BYTES: usize = 8 + FIELDS * 8;

    /// The bytes of the message.
    pub fn encode(&self) -> [u8; Message::BYTES] {
        let mut fields = [0; FIELDS];
        let kind: u32 = match *self {
            Message::Hello { pid } => {
                fields[0] = pid.into();
                1
            }
            Message::Welcome(Welcome { client, board_len, ledger_len, stale_after_ms, segments }) => {
                let values = [client.0.into(), board_len, ledger_len, stale_after_ms, segments.into()];
                fields[..5].copy_from_slice(&values);
                2
            }
            Message::SegmentOffer(shape, payload_at) => {
                let SegmentShape { segment, generation, slots, units, first_number, medium } = shape;
                let counts = [slots.into(), units.into(), first_number];
                fields[..2].copy_from_slice(&[segment.0.into(), generation.0]);
                fields[2..5].copy_from_slice(&counts);
                fields[5..7].copy_from_slice(&[payload_at, medium as u64]);
                3
            }
            Message::Refusal(code) => {
                fields[0] = code as u64;
                4
            }
            Message::Stream => 5,
            Message::JoinWorld(WorldShape { ranks, bytes }, rank) => {
                fields[..3].copy_from_slice(&[ranks.into(), bytes, rank.0.into()]);
                6
            }
            Message::World(WorldShape { ranks, bytes }) => {
                fields[..2].copy_from_slice(&[ranks.into(), bytes]);
                7
            }
            Message::WorldRegion(rank) => {
                fields[0] = rank.0.into();
                8
            }
        };
        let mut bytes = [0; Message::BYTES];
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&kind.to_le_bytes());
        for (place, field) in bytes[8..].chunks_exact_mut(8).zip(fields) {
            place.copy_from_slice(&field.to_le_bytes());
        }
        bytes
    }

    /// Reads a message.
    pub fn decode(bytes: &[u8]) -> Result<Message, MessageError> {
        let bytes: &[u8; Message::BYTES] =
            bytes.try_into().map_err(|_| MessageError::Length { len: bytes.len() })?;
        let u32_at = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"));
        let u64_at = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let (magic, kind) = (u32_at(0), u32_at(4));
        if magic != MAGIC {
            return Err(MessageError::Magic { found: magic });
        }
        let field = |field: usize| u64_at(8 + field * 8);
        let narrow =
            |at: usize| u32::try_from(field(at)).map_err(|_| MessageError::Field { kind, field: at });
        let (message, used) = match kind {
            1 => (Message::Hello { pid: narrow(0)? }, 1),
            2 => {
                let welcome = Welcome {
                    client: ClientId(narrow(0)?),
                    board_len: field(1),
                    ledger_len: field(2),
                    stale_after_ms: field(3),
                    segments: narrow(4)?,
                };
                (Message::Welcome(welcome), 5)
            }
            3 => {
                let shape = SegmentShape {
                    segment: SegmentId(narrow(0)?),
                    generation: Generation(field(1)),
                    slots: narrow(2)?,
                    units: narrow(3)?,
                    first_number: field(4),
                    medium: Medium::from_number(field(6)).ok_or(MessageError::Field { kind, field: 6 })?,
                };
                (Message::SegmentOffer(shape, field(5)), 7)
            }
            4 => {
                let code = ErrorCode::try_from(narrow(0)?);
                (Message::Refusal(code.map_err(|_| MessageError::Field { kind, field: 0 })?), 1)
            }
            5 => (Message::Stream, 0),
            6 => (Message::JoinWorld(WorldShape { ranks: narrow(0)?, bytes: field(1) }, Rank(narrow(2)?)), 3),
            7 => (Message::World(WorldShape { ranks: narrow(0)?, bytes: field(1) }), 2),
            8 => (Message::WorldRegion(Rank(narrow(0)?)), 1),
            _ => return Err(MessageError::Kind { kind }),
        };
        match (used..FIELDS).find(|&at| field(at) != 0) {
            Some(at) => Err(MessageError::Field { kind, field: at }),
            None => Ok(message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_heard() {
        let shape = SegmentShape {
            segment: SegmentId(3),
            generation: Generation(1),
            slots: 4096,
            units: 1 << 21,
            first_number: 8192,
            medium: Medium::Device,
        };
        let welcome = Welcome {
            client: ClientId(9),
            board_len: 1 << 20,
            ledger_len: 1 << 16,
            stale_after_ms: 5000,
            segments: 2,
        };
        for message in [
            Message::Hello { pid: 77 },
            Message::Welcome(welcome),
            Message::SegmentOffer(shape, 0),
            Message::SegmentOffer(shape, 1 << 30),
            Message::Refusal(ErrorCode::PermissionDenied),
            Message::Stream,
            Message::JoinWorld(WorldShape { ranks: 8, bytes: 1 << 20 }, Rank(7)),
            Message::World(WorldShape { ranks: 8, bytes: 1 << 20 }),
            Message::WorldRegion(Rank(3)),
        ] {
            assert_eq!(Message::decode(&message.encode()), Ok(message));
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let good = Message::Hello { pid: 77 }.encode();
        assert_eq!(Message::decode(&good[..63]), Err(MessageError::Length { len: 63 }));
        let with = |at: usize, byte: u8| {
            let mut bad = good;
            bad[at] = byte;
            Message::decode(&bad)
        };
        assert!(matches!(with(0, 0), Err(MessageError::Magic { .. })));
        assert_eq!(with(4, 9), Err(MessageError::Kind { kind: 9 }));
        assert_eq!(with(12, 1), Err(MessageError::Field { kind: 1, field: 0 }), "a pid of 33 bits");
        assert_eq!(with(16, 1), Err(MessageError::Field { kind: 1, field: 1 }), "an unused field");
        let refusal = Message::Refusal(ErrorCode::Busy).encode();
        let mut bad = refusal;
        bad[8..10].copy_from_slice(&0u16.to_le_bytes());
        assert_eq!(Message::decode(&bad), Err(MessageError::Field { kind: 4, field: 0 }));
        let shape = SegmentShape {
            segment: SegmentId(0),
            generation: Generation(1),
            slots: 1,
            units: 8,
            first_number: 0,
            medium: Medium::Host,
        };
        let mut bad = Message::SegmentOffer(shape, 0).encode();
        bad[56] = 2;
        assert_eq!(Message::decode(&bad), Err(MessageError::Field { kind: 3, field: 6 }), "no such medium");
    }
}
