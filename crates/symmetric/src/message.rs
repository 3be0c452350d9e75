//! Messages of the rendezvous between the ranks of a world and rank 0: see [`RawMessage`] for their form.

use moontide_heap::{RawMessage, ShmMessageError};
use moontide_types::ErrorCode;

use crate::ranks::Rank;
use crate::world_memory::WorldShape;

/// Message of the rendezvous.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WorldMessage {
    /// Rank 0 rejects the process. The same message as that of a node to a client.
    Rejected(ErrorCode),
    /// A process asks to become a rank of a world; carries its pidfd.
    Join(WorldShape, Rank),
    /// Rank 0 accepts; carries the control region. One [`WorldMessage::Region`] per rank follows.
    Accepted(WorldShape),
    /// Region of a rank, which the message carries.
    Region(Rank),
}

impl From<WorldMessage> for RawMessage {
    fn from(message: WorldMessage) -> RawMessage {
        match message {
            WorldMessage::Rejected(code) => RawMessage::new(4, &[code as u64]),
            WorldMessage::Join(WorldShape { ranks, bytes }, rank) => {
                RawMessage::new(6, &[ranks.into(), bytes, rank.0.into()])
            }
            WorldMessage::Accepted(WorldShape { ranks, bytes }) => RawMessage::new(7, &[ranks.into(), bytes]),
            WorldMessage::Region(rank) => RawMessage::new(8, &[rank.0.into()]),
        }
    }
}

impl TryFrom<RawMessage> for WorldMessage {
    type Error = ShmMessageError;

    fn try_from(raw: RawMessage) -> Result<WorldMessage, ShmMessageError> {
        let shape = || Ok(WorldShape { ranks: raw.narrow(0)?, bytes: raw.fields[1] });
        let (message, used) = match raw.kind {
            4 => {
                let code = ErrorCode::try_from(raw.narrow(0)?).map_err(|_| raw.invalid(0))?;
                (WorldMessage::Rejected(code), 1)
            }
            6 => (WorldMessage::Join(shape()?, Rank(raw.narrow(2)?)), 3),
            7 => (WorldMessage::Accepted(shape()?), 2),
            8 => (WorldMessage::Region(Rank(raw.narrow(0)?)), 1),
            kind => return Err(ShmMessageError::Kind { kind }),
        };
        raw.check_unused(used)?;
        Ok(message)
    }
}

impl WorldMessage {
    /// Encodes the message.
    pub fn encode(self) -> [u8; RawMessage::BYTES] {
        RawMessage::from(self).encode()
    }

    /// Decodes a message.
    pub fn decode(bytes: &[u8]) -> Result<WorldMessage, ShmMessageError> {
        RawMessage::decode(bytes)?.try_into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: WorldShape = WorldShape { ranks: 8, bytes: 1 << 20 };

    #[test]
    fn world_messages_round_trip() {
        for message in [
            WorldMessage::Rejected(ErrorCode::Busy),
            WorldMessage::Join(SHAPE, Rank(7)),
            WorldMessage::Accepted(SHAPE),
            WorldMessage::Region(Rank(3)),
        ] {
            assert_eq!(WorldMessage::decode(&message.encode()), Ok(message));
        }
    }

    #[test]
    fn malformed_world_messages_are_rejected() {
        let with = |message: WorldMessage, at: usize, byte: u8| {
            let mut bad = message.encode();
            bad[at] = byte;
            WorldMessage::decode(&bad)
        };
        let region = WorldMessage::Region(Rank(3));
        assert_eq!(with(region, 4, 1), Err(ShmMessageError::Kind { kind: 1 }), "a client's message");
        assert_eq!(with(region, 4, 9), Err(ShmMessageError::Kind { kind: 9 }));
        assert_eq!(with(region, 12, 1), Err(ShmMessageError::Field { kind: 8, field: 0 }), "rank of 33 bits");
        assert_eq!(
            with(WorldMessage::Join(SHAPE, Rank(7)), 32, 1),
            Err(ShmMessageError::Field { kind: 6, field: 3 }),
            "unused field is not zero"
        );
        let rejected = WorldMessage::Rejected(ErrorCode::Busy);
        assert_eq!(with(rejected, 11, 1), Err(ShmMessageError::Field { kind: 4, field: 0 }), "unknown code");
    }
}
