//! Messages of the shm handshake between a client and a node: see [`RawMessage`] for their form.

use moontide_types::{ClientId, ErrorCode, Generation, SegmentId};

use crate::shm::raw_message::{RawMessage, ShmMessageError};
use crate::shm::segment::{PayloadMemory, SegmentDescriptor};

/// Acceptance of a client by the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Accepted {
    /// Id of the client.
    pub client: ClientId,
    /// Length of the index region in bytes.
    pub board_len: u64,
    /// Length of the ledger in bytes.
    pub ledger_len: u64,
    /// Time in milliseconds after the last heartbeat for which the client may use the index.
    pub stale_after_ms: u64,
    /// Number of segment messages that follow.
    pub segments: u32,
}

/// Message of the shm handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShmMessage {
    /// A client asks for access; carries its pidfd.
    Hello {
        /// Process id as the client sees itself.
        pid: u32,
    },
    /// The node accepts; carries the index region and the ledger.
    Accepted(Accepted),
    /// A segment; carries headers and payload. The number is the payload's offset in bytes in its descriptor's
    /// memory.
    Segment(SegmentDescriptor, u64),
    /// The node rejects the client.
    Rejected(ErrorCode),
    /// A connected client opens a stream; carries one end of it. The listener does not interpret the stream, but the
    /// node knows which client uses it.
    Stream,
}

impl From<ShmMessage> for RawMessage {
    fn from(message: ShmMessage) -> RawMessage {
        match message {
            ShmMessage::Hello { pid } => RawMessage::new(1, &[pid.into()]),
            ShmMessage::Accepted(Accepted { client, board_len, ledger_len, stale_after_ms, segments }) => {
                let fields = [client.0.into(), board_len, ledger_len, stale_after_ms, segments.into()];
                RawMessage::new(2, &fields)
            }
            ShmMessage::Segment(shape, payload_at) => {
                let SegmentDescriptor { segment, generation, slots, units, first_global_slot, medium } =
                    shape;
                let fields = [
                    segment.0.into(),
                    generation.0,
                    slots.into(),
                    units.into(),
                    first_global_slot,
                    payload_at,
                    medium as u64,
                ];
                RawMessage::new(3, &fields)
            }
            ShmMessage::Rejected(code) => RawMessage::new(4, &[code as u64]),
            ShmMessage::Stream => RawMessage::new(5, &[]),
        }
    }
}

impl TryFrom<RawMessage> for ShmMessage {
    type Error = ShmMessageError;

    fn try_from(raw: RawMessage) -> Result<ShmMessage, ShmMessageError> {
        let (message, used) = match raw.kind {
            1 => (ShmMessage::Hello { pid: raw.narrow(0)? }, 1),
            2 => {
                let accepted = Accepted {
                    client: ClientId(raw.narrow(0)?),
                    board_len: raw.fields[1],
                    ledger_len: raw.fields[2],
                    stale_after_ms: raw.fields[3],
                    segments: raw.narrow(4)?,
                };
                (ShmMessage::Accepted(accepted), 5)
            }
            3 => {
                let shape = SegmentDescriptor {
                    segment: SegmentId(raw.narrow(0)?),
                    generation: Generation(raw.fields[1]),
                    slots: raw.narrow(2)?,
                    units: raw.narrow(3)?,
                    first_global_slot: raw.fields[4],
                    medium: PayloadMemory::from_number(raw.fields[6]).ok_or(raw.invalid(6))?,
                };
                (ShmMessage::Segment(shape, raw.fields[5]), 7)
            }
            4 => {
                let code = ErrorCode::try_from(raw.narrow(0)?).map_err(|_| raw.invalid(0))?;
                (ShmMessage::Rejected(code), 1)
            }
            5 => (ShmMessage::Stream, 0),
            kind => return Err(ShmMessageError::Kind { kind }),
        };
        raw.check_unused(used)?;
        Ok(message)
    }
}

impl ShmMessage {
    /// Encodes the message.
    pub fn encode(self) -> [u8; RawMessage::BYTES] {
        RawMessage::from(self).encode()
    }

    /// Decodes a message.
    pub fn decode(bytes: &[u8]) -> Result<ShmMessage, ShmMessageError> {
        RawMessage::decode(bytes)?.try_into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_round_trip() {
        let shape = SegmentDescriptor {
            segment: SegmentId(3),
            generation: Generation(1),
            slots: 4096,
            units: 1 << 21,
            first_global_slot: 8192,
            medium: PayloadMemory::Device,
        };
        let accepted = Accepted {
            client: ClientId(9),
            board_len: 1 << 20,
            ledger_len: 1 << 16,
            stale_after_ms: 5000,
            segments: 2,
        };
        for message in [
            ShmMessage::Hello { pid: 77 },
            ShmMessage::Accepted(accepted),
            ShmMessage::Segment(shape, 0),
            ShmMessage::Segment(shape, 1 << 30),
            ShmMessage::Rejected(ErrorCode::PermissionDenied),
            ShmMessage::Stream,
        ] {
            assert_eq!(ShmMessage::decode(&message.encode()), Ok(message));
        }
    }

    #[test]
    fn malformed_messages_are_rejected() {
        let good = ShmMessage::Hello { pid: 77 }.encode();
        assert_eq!(ShmMessage::decode(&good[..63]), Err(ShmMessageError::Length { len: 63 }));
        let with = |at: usize, byte: u8| {
            let mut bad = good;
            bad[at] = byte;
            ShmMessage::decode(&bad)
        };
        assert!(matches!(with(0, 0), Err(ShmMessageError::Magic { .. })));
        assert_eq!(with(4, 6), Err(ShmMessageError::Kind { kind: 6 }), "a message of the ranks of a world");
        assert_eq!(with(12, 1), Err(ShmMessageError::Field { kind: 1, field: 0 }), "pid of 33 bits");
        assert_eq!(
            with(16, 1),
            Err(ShmMessageError::Field { kind: 1, field: 1 }),
            "unused field is not zero"
        );
        let rejected = ShmMessage::Rejected(ErrorCode::Busy).encode();
        let mut bad = rejected;
        bad[8..10].copy_from_slice(&0u16.to_le_bytes());
        assert_eq!(ShmMessage::decode(&bad), Err(ShmMessageError::Field { kind: 4, field: 0 }));
        let shape = SegmentDescriptor {
            segment: SegmentId(0),
            generation: Generation(1),
            slots: 1,
            units: 8,
            first_global_slot: 0,
            medium: PayloadMemory::Host,
        };
        let mut bad = ShmMessage::Segment(shape, 0).encode();
        bad[56] = 2;
        assert_eq!(
            ShmMessage::decode(&bad),
            Err(ShmMessageError::Field { kind: 3, field: 6 }),
            "medium 2 is unknown"
        );
    }
}
