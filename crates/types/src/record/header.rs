//! The 128-byte header of a record.
//!
//! [`FIELDS`] is the reference description of the bytes: tests compare encoder, decoder and `docs/formats.md`
//! with it. All integers are little-endian. Reserved bytes are zero, and the decoder checks them.
//!
//! Invariants of a decoded header:
//! `stripe_index < stripe_count ≤ STRIPES_MAX`, `stripe_offset + stripe_len ≤ object_len ≤ OBJECT_BYTES_MAX`,
//! `stripe_offset % PAGE_BYTES == 0`, a single stripe covers the object, and the layout of the sections is
//! valid ([`RecordLayout`]).

use crate::key::{ObjectId, TenantGeneration};
use crate::limits::{OBJECT_BYTES_MAX, PAGE_BYTES, STRIPES_MAX};
use crate::record::digest::DigestContext;
use crate::record::flags::RecordFlags;
use crate::record::layout::{LayoutError, RecordLayout};
use crate::record::word::{State, Word};

/// Size of a header in bytes.
pub const HEADER_BYTES: usize = 128;

/// The first four bytes of a header: `MTRC`.
pub const HEADER_MAGIC: u32 = u32::from_le_bytes(*b"MTRC");

/// Header version that this release writes, and the only one that it reads. The ids of records of version 1 were computed from the
/// key of the cluster.
pub const HEADER_VERSION: u16 = 2;

/// Offset of the word: the only field that changes while other threads may read it.
pub const WORD_OFFSET: usize = 24;

const CRC_OFFSET: usize = HEADER_BYTES - 4;
const RESERVED_OFFSET: usize = 104;

/// One field of the header, as listed in `docs/formats.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// Offset of the first byte.
    pub offset: usize,
    /// Number of bytes.
    pub bytes: usize,
    /// Name in `docs/formats.md`.
    pub name: &'static str,
}

const fn field(offset: usize, bytes: usize, name: &'static str) -> Field {
    Field { offset, bytes, name }
}

/// Every byte of the header, in order.
pub const FIELDS: &[Field] = &[
    field(0, 4, "magic"),
    field(4, 2, "version"),
    field(6, 2, "flags"),
    field(8, 16, "id"),
    field(WORD_OFFSET, 8, "word"),
    field(32, 8, "object_len"),
    field(40, 8, "stripe_offset"),
    field(48, 8, "stripe_len"),
    field(56, 8, "payload_offset"),
    field(64, 8, "root"),
    field(72, 2, "stripe_index"),
    field(74, 2, "stripe_count"),
    field(76, 4, "page_bytes"),
    field(80, 4, "digests_len"),
    field(84, 4, "key_len"),
    field(88, 4, "attributes_len"),
    field(92, 4, "trailer_crc"),
    field(96, 4, "id_key"),
    field(100, 4, "tenant_generation"),
    field(RESERVED_OFFSET, 20, "reserved"),
    field(CRC_OFFSET, 4, "crc"),
];

const _: () = {
    // The fields cover the header without gap or overlap.
    let (mut i, mut at) = (0, 0);
    while i < FIELDS.len() {
        assert!(FIELDS[i].offset == at);
        at += FIELDS[i].bytes;
        i += 1;
    }
    assert!(at == HEADER_BYTES);
    assert!(WORD_OFFSET.is_multiple_of(8), "the word is an atomic u64");
};

/// Error of the decoding of a header. A reader treats each of them as a miss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// The bytes are no record header.
    #[error("header magic {found:#010x}, expected {HEADER_MAGIC:#010x}")]
    Magic {
        /// Stored value.
        found: u32,
    },
    /// The header was written by another release.
    #[error("header version {found}, this release reads {HEADER_VERSION}")]
    Version {
        /// Stored value.
        found: u16,
    },
    /// The checksum does not match: the bytes are corrupt.
    #[error("header CRC {found:#010x}, computed {computed:#010x}")]
    Crc {
        /// Stored value.
        found: u32,
        /// Correct value.
        computed: u32,
    },
    /// A flag is unknown to this release.
    #[error("unknown flags {found:#06x}")]
    Flags {
        /// Stored value.
        found: u16,
    },
    /// A reserved byte is not zero.
    #[error("reserved bytes are not zero")]
    Reserved,
    /// The page size is not [`PAGE_BYTES`].
    #[error("page size {found}, expected {PAGE_BYTES}")]
    PageBytes {
        /// Stored value.
        found: u32,
    },
    /// Stripe index, count, offset or length contradict each other or exceed a limit.
    #[error(
        "stripe {index} of {count} at {offset} with {len} bytes does not fit an object of {object_len} bytes"
    )]
    Stripe {
        /// Index of the stripe.
        index: u16,
        /// Number of stripes.
        count: u16,
        /// Offset of the stripe in the object.
        offset: u64,
        /// Length of the stripe in bytes.
        len: u64,
        /// Length of the object in bytes.
        object_len: u64,
    },
    /// The layout of the sections is invalid.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The length of the digests does not match the length of the payload.
    #[error("{found} bytes of page digests, expected {expected}")]
    DigestsLen {
        /// Stored value.
        found: u32,
        /// Correct value.
        expected: u64,
    },
}

/// Fields of a header, including the word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Properties of the record that a reader must know.
    pub flags: RecordFlags,
    /// Object of the record.
    pub id: ObjectId,
    /// Version and state. On disk the state is always [`State::Ready`].
    pub word: Word,
    /// Length of the whole object in bytes.
    pub object_len: u64,
    /// Offset of this stripe in the object: a multiple of [`PAGE_BYTES`].
    pub stripe_offset: u64,
    /// Payload bytes in this record.
    pub stripe_len: u64,
    /// Offset of the payload: in the segment, or on disk from the first byte of the record.
    pub payload_offset: u64,
    /// Root of this stripe's page digests. In memory, while WRITING: the id of the client that may write.
    pub root: u64,
    /// Index of this stripe.
    pub stripe_index: u16,
    /// Number of stripes of the object.
    pub stripe_count: u16,
    /// Length of the tenant and key section in bytes.
    pub key_len: u32,
    /// Length of the attributes in bytes.
    pub attributes_len: u32,
    /// CRC-32C over the tenant and key section and the attributes.
    pub trailer_crc: u32,
    /// Number of the [`IdKey`](crate::IdKey) from which the id was computed.
    pub id_key: u32,
    /// Tenant generation from which the id was computed.
    pub tenant_generation: TenantGeneration,
}

impl Header {
    /// Returns the context that is part of the seed of the record's digests.
    pub fn digest_context(&self) -> DigestContext {
        let Header { id, stripe_index: stripe, stripe_len: len, .. } = *self;
        DigestContext { id, version: self.word.epoch(), stripe, len }
    }

    /// Returns the positions of the record's sections.
    pub fn layout(&self) -> Result<RecordLayout, LayoutError> {
        RecordLayout::new(self.stripe_len, self.key_len, self.attributes_len, self.flags)
    }

    /// Encodes the header and computes its CRC.
    ///
    /// # Panics
    /// If the fields contradict each other: a header that cannot be decoded must never be written.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let layout = self.check().expect("header must be valid before it is written");
        let digests_len = layout.digests().len() as u32; // ≤ 32 MiB: RecordLayout checked the payload length
        let mut bytes = [0; HEADER_BYTES];
        let mut writer = Writer { bytes: &mut bytes, at: 0 };
        writer.put(HEADER_MAGIC.to_le_bytes());
        writer.put(HEADER_VERSION.to_le_bytes());
        writer.put(self.flags.bits().to_le_bytes());
        writer.put(self.id.0);
        writer.put(self.word.bits().to_le_bytes());
        writer.put(self.object_len.to_le_bytes());
        writer.put(self.stripe_offset.to_le_bytes());
        writer.put(self.stripe_len.to_le_bytes());
        writer.put(self.payload_offset.to_le_bytes());
        writer.put(self.root.to_le_bytes());
        writer.put(self.stripe_index.to_le_bytes());
        writer.put(self.stripe_count.to_le_bytes());
        writer.put((PAGE_BYTES as u32).to_le_bytes());
        writer.put(digests_len.to_le_bytes());
        writer.put(self.key_len.to_le_bytes());
        writer.put(self.attributes_len.to_le_bytes());
        writer.put(self.trailer_crc.to_le_bytes());
        writer.put(self.id_key.to_le_bytes());
        writer.put(self.tenant_generation.0.to_le_bytes());
        debug_assert_eq!(writer.at, RESERVED_OFFSET);
        let crc = crc(&bytes);
        bytes[CRC_OFFSET..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Decodes a header. Does not check the state in the word: that is part of the caller's protocol.
    pub fn decode(bytes: &[u8; HEADER_BYTES]) -> Result<Header, HeaderError> {
        let magic = u32_at(bytes, 0);
        if magic != HEADER_MAGIC {
            return Err(HeaderError::Magic { found: magic });
        }
        let version = u16_at(bytes, 4);
        if version != HEADER_VERSION {
            return Err(HeaderError::Version { found: version });
        }
        let (found, computed) = (u32_at(bytes, CRC_OFFSET), crc(bytes));
        if found != computed {
            return Err(HeaderError::Crc { found, computed });
        }
        let flags = u16_at(bytes, 6);
        let Some(flags) = RecordFlags::from_bits(flags) else {
            return Err(HeaderError::Flags { found: flags });
        };
        if bytes[RESERVED_OFFSET..CRC_OFFSET] != [0; CRC_OFFSET - RESERVED_OFFSET] {
            return Err(HeaderError::Reserved);
        }
        let page_bytes = u32_at(bytes, 76);
        if u64::from(page_bytes) != PAGE_BYTES {
            return Err(HeaderError::PageBytes { found: page_bytes });
        }
        let header = Header {
            flags,
            id: ObjectId(array_at(bytes, 8)),
            word: Word::from_bits(u64_at(bytes, WORD_OFFSET)),
            object_len: u64_at(bytes, 32),
            stripe_offset: u64_at(bytes, 40),
            stripe_len: u64_at(bytes, 48),
            payload_offset: u64_at(bytes, 56),
            root: u64_at(bytes, 64),
            stripe_index: u16_at(bytes, 72),
            stripe_count: u16_at(bytes, 74),
            key_len: u32_at(bytes, 84),
            attributes_len: u32_at(bytes, 88),
            trailer_crc: u32_at(bytes, 92),
            id_key: u32_at(bytes, 96),
            tenant_generation: TenantGeneration(u32_at(bytes, 100)),
        };
        let expected = header.check()?.digests().len();
        let found = u32_at(bytes, 80);
        if u64::from(found) != expected {
            return Err(HeaderError::DigestsLen { found, expected });
        }
        Ok(header)
    }

    /// Checks the relations between fields that encoder and decoder require, and returns the positions of the sections.
    pub fn check(&self) -> Result<RecordLayout, HeaderError> {
        let Header { object_len, stripe_offset: offset, stripe_len: len, .. } = *self;
        let (index, count) = (self.stripe_index, self.stripe_count);
        let fits = object_len <= OBJECT_BYTES_MAX
            && index < count
            && usize::from(count) <= STRIPES_MAX
            && offset.is_multiple_of(PAGE_BYTES)
            && offset.checked_add(len).is_some_and(|end| end <= object_len)
            && (count > 1 || len == object_len);
        if !fits {
            return Err(HeaderError::Stripe { index, count, offset, len, object_len });
        }
        let layout = self.layout()?;
        layout.span_from(self.payload_offset)?;
        Ok(layout)
    }
}

/// Returns the CRC-32C of all bytes before the CRC, with the state bits of the word taken as zero: the state
/// changes during the life of a record, the epoch does not.
fn crc(bytes: &[u8; HEADER_BYTES]) -> u32 {
    let word = Word::from_bits(u64_at(bytes, WORD_OFFSET)).with_state(State::Free);
    let mut masked = *bytes;
    masked[WORD_OFFSET..WORD_OFFSET + 8].copy_from_slice(&word.bits().to_le_bytes());
    crc32c::crc32c(&masked[..CRC_OFFSET])
}

struct Writer<'a> {
    bytes: &'a mut [u8; HEADER_BYTES],
    at: usize,
}

impl Writer<'_> {
    fn put<const N: usize>(&mut self, value: [u8; N]) {
        self.bytes[self.at..self.at + N].copy_from_slice(&value);
        self.at += N;
    }
}

fn array_at<const N: usize>(bytes: &[u8; HEADER_BYTES], at: usize) -> [u8; N] {
    bytes[at..at + N].try_into().expect("N bytes")
}

fn u16_at(bytes: &[u8; HEADER_BYTES], at: usize) -> u16 {
    u16::from_le_bytes(array_at(bytes, at))
}

fn u32_at(bytes: &[u8; HEADER_BYTES], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}

fn u64_at(bytes: &[u8; HEADER_BYTES], at: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::Epoch;

    fn sample() -> Header {
        Header {
            flags: RecordFlags::NONE,
            id: ObjectId([0x11; 16]),
            word: Word::new(Epoch::from_bits(77).unwrap(), State::Ready),
            object_len: 1 << 20,
            stripe_offset: 0,
            stripe_len: 1 << 20,
            payload_offset: 8192,
            root: 0xdead_beef,
            stripe_index: 0,
            stripe_count: 1,
            key_len: 20,
            attributes_len: 0,
            trailer_crc: 5,
            id_key: 1,
            tenant_generation: TenantGeneration(0),
        }
    }

    #[test]
    fn header_round_trips() {
        let header = sample();
        assert_eq!(Header::decode(&header.encode()), Ok(header));
    }

    #[test]
    fn header_bit_flip_outside_state_is_rejected() {
        let good = sample().encode();
        for bit in 0..HEADER_BYTES * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            let is_state = bit / 8 == WORD_OFFSET && bit % 8 < 2;
            assert_eq!(Header::decode(&bad).is_ok(), is_state, "bit {bit}");
        }
    }

    #[test]
    fn inconsistent_header_fields_are_rejected() {
        let refused = |change: fn(&mut Header)| {
            let mut header = sample();
            change(&mut header);
            assert!(header.check().is_err(), "{header:?}");
        };
        refused(|h| h.stripe_count = 0);
        refused(|h| h.stripe_index = 1);
        refused(|h| h.stripe_len -= 1);
        refused(|h| h.object_len = OBJECT_BYTES_MAX + 1);
        refused(|h| (h.stripe_count, h.stripe_offset) = (2, 1));
        refused(|h| (h.stripe_count, h.stripe_offset) = (2, PAGE_BYTES));
        refused(|h| (h.stripe_count, h.stripe_index) = (STRIPES_MAX as u16 + 1, 0));
        refused(|h| h.payload_offset = u64::MAX - 100);
        refused(|h| h.payload_offset = 8192 + 512); // a payload of at least 4 KiB starts on a multiple of 4 KiB
        refused(|h| h.key_len = u32::MAX);
    }

    #[test]
    fn invalid_header_fields_with_valid_crc_are_rejected() {
        // The CRC is recomputed after each change, as a hostile or faulty writer would do.
        let refused = |at: usize, value: &[u8]| {
            let mut bytes = sample().encode();
            bytes[at..at + value.len()].copy_from_slice(value);
            let crc = crc(&bytes);
            bytes[CRC_OFFSET..].copy_from_slice(&crc.to_le_bytes());
            Header::decode(&bytes).unwrap_err()
        };
        assert_eq!(refused(6, &[2, 0]), HeaderError::Flags { found: 2 });
        assert_eq!(refused(110, &[1]), HeaderError::Reserved);
        assert_eq!(refused(76, &[0, 0, 1, 0]), HeaderError::PageBytes { found: 65536 });
        assert_eq!(refused(80, &[0, 0, 0, 0]), HeaderError::DigestsLen { found: 0, expected: 32 });
        assert_eq!(refused(4, &[1, 0]), HeaderError::Version { found: 1 });
        assert_eq!(refused(4, &[3, 0]), HeaderError::Version { found: 3 });
        assert!(matches!(refused(48, &[0; 8]), HeaderError::Stripe { .. }));
    }
}
