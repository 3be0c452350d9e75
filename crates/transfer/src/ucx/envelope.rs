//! [`Envelope`]: header for worker addresses and remote keys in transit.
//!
//! UCX parses both without checking their length, so a truncated or foreign blob makes it read out of bounds. Therefore
//! this crate wraps them, and unwraps them before UCX parses them. The checksum protects against corruption, not
//! against an attacker: a process that can reach the control plane of a node is trusted with its memory anyway.
//!
//! ```text
//!  0        4     5     6       8       10      12      16       24      32      40      44
//!  ├ magic ─┼ ver ┼ kind┼ major ┼ minor ┼ zero ─┼ len ──┼ owner ─┼ base ─┼ range ┼ crc ──┼ payload[len] …
//! ```
//! Integers are little-endian; `crc` is the CRC-32C of everything else. `major.minor` is the UCX that made the
//! payload, `owner` a random number per worker, `base + range` the registered memory (zero in an address).

use super::version::UcxVersion;

const MAGIC: [u8; 4] = *b"MTUX";
const FORMAT: u8 = 1;
const HEADER_LEN: usize = 44;
const CRC_AT: usize = 40;
/// Real payloads have tens to hundreds of bytes, a few thousand with many network devices.
const PAYLOAD_MAX: usize = 64 * 1024;

/// Reason why an address or a key was rejected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvelopeError {
    /// The length is less than that of a header, or not the one in the header.
    #[error("UCX blob has {found} bytes instead of {expected}")]
    Length {
        /// Length in the header, or the length of a header.
        expected: usize,
        /// Length of the received bytes.
        found: usize,
    },
    /// The bytes are not an envelope.
    #[error("UCX blob does not start with the magic number")]
    Magic,
    /// The envelope has an unknown version.
    #[error("UCX blob has format {found}, supported is {known}")]
    Format {
        /// Version in the header.
        found: u8,
        /// Supported version.
        known: u8,
    },
    /// A key where an address was expected, or the reverse.
    #[error("UCX blob is of kind {found}, expected is kind {expected}")]
    Kind {
        /// Kind in the header.
        found: u8,
        /// Kind that the call needs.
        expected: u8,
    },
    /// The bytes were corrupted in transit.
    #[error("UCX blob has checksum {found:08x}, computed is {computed:08x}")]
    Checksum {
        /// Checksum in the header.
        found: u32,
        /// Checksum of the received bytes.
        computed: u32,
    },
    /// The registered range wraps around the address space.
    #[error("UCX key has an invalid range {base:#x}+{range}")]
    Range {
        /// Address of the first byte.
        base: u64,
        /// Length in bytes.
        range: u64,
    },
}

/// Kind of the payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    Address = 1,
    Key = 2,
}

/// An address or a key with its metadata.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Envelope<'a> {
    pub(super) kind: Kind,
    pub(super) made_by: UcxVersion,
    pub(super) owner: u64,
    pub(super) base: u64,
    pub(super) range: u64,
    pub(super) payload: &'a [u8],
}

impl<'a> Envelope<'a> {
    pub(super) fn encode(&self) -> Vec<u8> {
        assert!(self.payload.len() <= PAYLOAD_MAX, "UCX returned a blob of {} bytes", self.payload.len());
        let mut out = Vec::with_capacity(HEADER_LEN + self.payload.len());
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&[FORMAT, self.kind as u8]);
        out.extend_from_slice(&self.made_by.major.to_le_bytes());
        out.extend_from_slice(&self.made_by.minor.to_le_bytes());
        out.extend_from_slice(&[0; 2]);
        out.extend_from_slice(&(self.payload.len() as u32).to_le_bytes());
        out.extend_from_slice(&self.owner.to_le_bytes());
        out.extend_from_slice(&self.base.to_le_bytes());
        out.extend_from_slice(&self.range.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(self.payload);
        let crc = checksum(&out);
        out[CRC_AT..HEADER_LEN].copy_from_slice(&crc.to_le_bytes());
        out
    }

    pub(super) fn decode(bytes: &'a [u8], kind: Kind) -> Result<Self, EnvelopeError> {
        if bytes.len() < HEADER_LEN {
            return Err(EnvelopeError::Length { expected: HEADER_LEN, found: bytes.len() });
        }
        if bytes[..4] != MAGIC {
            return Err(EnvelopeError::Magic);
        }
        if bytes[4] != FORMAT {
            return Err(EnvelopeError::Format { found: bytes[4], known: FORMAT });
        }
        let expected = HEADER_LEN + u32_at(bytes, 12) as usize;
        if bytes.len() != expected || expected > HEADER_LEN + PAYLOAD_MAX {
            return Err(EnvelopeError::Length { expected, found: bytes.len() });
        }
        let (found, computed) = (u32_at(bytes, CRC_AT), checksum(bytes));
        if found != computed {
            return Err(EnvelopeError::Checksum { found, computed });
        }
        if bytes[5] != kind as u8 {
            return Err(EnvelopeError::Kind { found: bytes[5], expected: kind as u8 });
        }
        let (base, range) = (u64_at(bytes, 24), u64_at(bytes, 32));
        if base.checked_add(range).is_none() {
            return Err(EnvelopeError::Range { base, range });
        }
        Ok(Self {
            kind,
            made_by: UcxVersion { major: u16_at(bytes, 6), minor: u16_at(bytes, 8) },
            owner: u64_at(bytes, 16),
            base,
            range,
            payload: &bytes[HEADER_LEN..],
        })
    }
}

/// Computes the CRC-32C of everything but the four bytes that hold it.
fn checksum(bytes: &[u8]) -> u32 {
    crc32c::crc32c_append(crc32c::crc32c(&bytes[..CRC_AT]), &bytes[HEADER_LEN..])
}

fn u16_at(bytes: &[u8], at: usize) -> u16 {
    u16::from_le_bytes([bytes[at], bytes[at + 1]])
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(std::array::from_fn(|i| bytes[at + i]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Envelope<'static> {
        Envelope {
            kind: Kind::Key,
            made_by: UcxVersion { major: 1, minor: 22 },
            owner: 7,
            base: 0x1000,
            range: 0x2000,
            payload: b"payload",
        }
    }

    #[test]
    fn envelope_round_trips() {
        let bytes = sample().encode();
        assert_eq!(bytes.len(), HEADER_LEN + 7);
        assert_eq!(Envelope::decode(&bytes, Kind::Key), Ok(sample()));
    }

    #[test]
    fn every_flipped_bit_is_rejected() {
        let good = sample().encode();
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Envelope::decode(&bad, Kind::Key).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn truncated_or_extended_envelope_is_rejected() {
        let good = sample().encode();
        for len in 0..good.len() {
            let rejected = Envelope::decode(&good[..len], Kind::Key);
            assert!(matches!(rejected, Err(EnvelopeError::Length { .. })), "length {len}");
        }
        let mut longer = good;
        longer.push(0);
        assert!(matches!(Envelope::decode(&longer, Kind::Key), Err(EnvelopeError::Length { .. })));
    }

    #[test]
    fn key_envelope_is_rejected_as_address() {
        let bytes = sample().encode();
        assert_eq!(
            Envelope::decode(&bytes, Kind::Address),
            Err(EnvelopeError::Kind { found: 2, expected: 1 })
        );
    }

    #[test]
    fn range_beyond_address_space_is_rejected() {
        let bytes = Envelope { base: u64::MAX, range: 2, ..sample() }.encode();
        assert_eq!(
            Envelope::decode(&bytes, Kind::Key),
            Err(EnvelopeError::Range { base: u64::MAX, range: 2 })
        );
    }
}
