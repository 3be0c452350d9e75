//! The envelope in which worker addresses and remote keys travel.
//!
//! UCX parses both without looking at their length, so a truncated or foreign blob makes it read wild memory. Ours
//! are therefore wrapped, and unwrapped before UCX sees them. The checksum guards against accidents, not against an
//! attacker: whoever can speak to a node's control plane is trusted with its memory anyway.
//!
//! ```text
//!  0        4     5     6       8       10      12      16       24      32      40      44
//!  ├ magic ─┼ ver ┼ kind┼ major ┼ minor ┼ zero ─┼ len ──┼ owner ─┼ base ─┼ range ┼ crc ──┼ payload[len] …
//! ```
//! Integers are little-endian; `crc` is the CRC-32C of everything else. `major.minor` is the UCX that made the
//! payload, `owner` a random number per worker, `base + range` the registered memory (zero in an address).

use super::error::UcxVersion;

const MAGIC: [u8; 4] = *b"MTUX";
const FORMAT: u8 = 1;
const HEADER_LEN: usize = 44;
const CRC_AT: usize = 40;
/// Real payloads have tens to hundreds of bytes, a few thousand with many network devices.
const PAYLOAD_MAX: usize = 64 * 1024;

/// Why an address or a key was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EnvelopeError {
    /// Shorter than its header, or than its header says; or longer than both.
    #[error("UCX blob has {found} bytes instead of {expected}")]
    Length {
        /// What the header asks for, or the length of a header.
        expected: usize,
        /// What arrived.
        found: usize,
    },
    /// Not one of ours.
    #[error("UCX blob does not start with our magic")]
    Magic,
    /// Made by a version of us that we do not know.
    #[error("UCX blob has format {found}, known is {known}")]
    Format {
        /// The version in the header.
        found: u8,
        /// The version that we read.
        known: u8,
    },
    /// A key where an address was wanted, or the reverse.
    #[error("UCX blob is of kind {found}, wanted is kind {wanted}")]
    Kind {
        /// The kind in the header.
        found: u8,
        /// The kind that the call needs.
        wanted: u8,
    },
    /// Damaged on its way.
    #[error("UCX blob has checksum {found:08x}, computed is {computed:08x}")]
    Checksum {
        /// The checksum in the header.
        found: u32,
        /// The checksum of what arrived.
        computed: u32,
    },
    /// The registered range wraps around the address space.
    #[error("UCX key describes an impossible range {base:#x}+{range}")]
    Range {
        /// First byte.
        base: u64,
        /// Length.
        range: u64,
    },
}

/// What the payload is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum Kind {
    Address = 1,
    Key = 2,
}

/// An address or a key with what we know about it.
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
        assert!(self.payload.len() <= PAYLOAD_MAX, "UCX made a blob of {} bytes", self.payload.len());
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

    pub(super) fn decode(bytes: &'a [u8], wanted: Kind) -> Result<Self, EnvelopeError> {
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
        if bytes[5] != wanted as u8 {
            return Err(EnvelopeError::Kind { found: bytes[5], wanted: wanted as u8 });
        }
        let (base, range) = (u64_at(bytes, 24), u64_at(bytes, 32));
        if base.checked_add(range).is_none() {
            return Err(EnvelopeError::Range { base, range });
        }
        Ok(Self {
            kind: wanted,
            made_by: UcxVersion { major: u16_at(bytes, 6), minor: u16_at(bytes, 8) },
            owner: u64_at(bytes, 16),
            base,
            range,
            payload: &bytes[HEADER_LEN..],
        })
    }
}

/// CRC-32C of everything but the four bytes that hold it.
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
    fn what_goes_in_comes_out() {
        let bytes = sample().encode();
        assert_eq!(bytes.len(), HEADER_LEN + 7);
        assert_eq!(Envelope::decode(&bytes, Kind::Key), Ok(sample()));
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let good = sample().encode();
        for bit in 0..good.len() * 8 {
            let mut bad = good.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(Envelope::decode(&bad, Kind::Key).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn every_truncation_is_noticed() {
        let good = sample().encode();
        for len in 0..good.len() {
            let refused = Envelope::decode(&good[..len], Kind::Key);
            assert!(matches!(refused, Err(EnvelopeError::Length { .. })), "length {len}");
        }
        let mut longer = good;
        longer.push(0);
        assert!(matches!(Envelope::decode(&longer, Kind::Key), Err(EnvelopeError::Length { .. })));
    }

    #[test]
    fn a_key_is_no_address() {
        let bytes = sample().encode();
        assert_eq!(Envelope::decode(&bytes, Kind::Address), Err(EnvelopeError::Kind { found: 2, wanted: 1 }));
    }

    #[test]
    fn a_range_past_the_end_of_memory_is_refused() {
        let bytes = Envelope { base: u64::MAX, range: 2, ..sample() }.encode();
        assert_eq!(
            Envelope::decode(&bytes, Kind::Key),
            Err(EnvelopeError::Range { base: u64::MAX, range: 2 })
        );
    }
}
