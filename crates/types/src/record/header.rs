//! The 128-byte header of a record.
//!
//! [`FIELDS`] is the one description of the bytes: encoder, decoder and `docs/formats.md` are tested
//! against it. All integers are little-endian. Spare bytes are zero and checked.
//!
//! Invariants of a decoded header:
//! `stripe_index < stripe_count ≤ STRIPES_MAX`, `stripe_offset + stripe_len ≤ object_len ≤ OBJECT_BYTES_MAX`,
//! `stripe_offset % PAGE_BYTES == 0`, a single stripe covers the object, and the layout of its parts can be
//! expressed ([`RecordLayout`]).

use crate::bounds::{OBJECT_BYTES_MAX, PAGE_BYTES, STRIPES_MAX};
use crate::key::{ObjectId, TenantGeneration};
use crate::record::digest::DigestContext;
use crate::record::flags::Flags;
use crate::record::layout::{LayoutError, RecordLayout};
use crate::record::word::{State, Word};

/// Size of a header.
pub const HEADER_BYTES: usize = 128;

/// The first four bytes of a header: `MTRC`.
pub const HEADER_MAGIC: u32 = u32::from_le_bytes(*b"MTRC");

/// The version this code writes, and the only one it reads.
pub const HEADER_VERSION: u16 = 1;

/// Where the word stands: it is the one field that changes while others may look.
pub const WORD_OFFSET: usize = 24;

const CRC_OFFSET: usize = HEADER_BYTES - 4;
const SPARE_OFFSET: usize = 104;

/// One field of the header, as drawn in `docs/formats.md`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Field {
    /// First byte.
    pub offset: usize,
    /// Number of bytes.
    pub bytes: usize,
    /// Name.
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
    field(SPARE_OFFSET, 20, "spare"),
    field(CRC_OFFSET, 4, "crc"),
];

const _: () = {
    // The fields tile the header without gap or overlap.
    let (mut i, mut at) = (0, 0);
    while i < FIELDS.len() {
        assert!(FIELDS[i].offset == at);
        at += FIELDS[i].bytes;
        i += 1;
    }
    assert!(at == HEADER_BYTES);
    assert!(WORD_OFFSET.is_multiple_of(8), "the word is an atomic u64");
};

/// Why 128 bytes are not a header. A reader treats each of them as a miss.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    /// Not one of our records.
    #[error("magic {found:#010x} is not a record's")]
    Magic {
        /// What stood there.
        found: u32,
    },
    /// Written by another release.
    #[error("header version {found}, this release reads {HEADER_VERSION}")]
    Version {
        /// What stood there.
        found: u16,
    },
    /// The bytes changed since they were written.
    #[error("header CRC {found:#010x}, computed {computed:#010x}")]
    Crc {
        /// What stood there.
        found: u32,
        /// What it should be.
        computed: u32,
    },
    /// A flag that this release does not know.
    #[error("unknown flags {found:#06x}")]
    Flags {
        /// What stood there.
        found: u16,
    },
    /// A spare byte is not zero.
    #[error("spare bytes are not zero")]
    Spare,
    /// Another page size than [`PAGE_BYTES`].
    #[error("page size {found} is not supported")]
    PageBytes {
        /// What stood there.
        found: u32,
    },
    /// Stripe numbers or offsets contradict each other or a bound.
    #[error("stripe {index} of {count} at {offset} with {len} bytes does not fit an object of {object_len}")]
    Stripe {
        /// Its index.
        index: u16,
        /// How many there are.
        count: u16,
        /// Where it starts in the object.
        offset: u64,
        /// Its length.
        len: u64,
        /// The object's length.
        object_len: u64,
    },
    /// The parts of the record cannot be laid out.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// The stated length of the digests is not the one that follows from the payload's.
    #[error("{found} bytes of page digests, expected {expected}")]
    DigestsLen {
        /// What stood there.
        found: u32,
        /// What it should be.
        expected: u64,
    },
}

/// A header's fields, the word included.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Properties of the record.
    pub flags: Flags,
    /// Whose bytes these are.
    pub id: ObjectId,
    /// Version and state. On disk the state is always [`State::Ready`].
    pub word: Word,
    /// Length of the whole object.
    pub object_len: u64,
    /// Where this stripe starts in the object: a multiple of [`PAGE_BYTES`].
    pub stripe_offset: u64,
    /// Payload bytes in this record.
    pub stripe_len: u64,
    /// Where the payload starts: in the segment, or on disk counted from the record's first byte.
    pub payload_offset: u64,
    /// Root of this stripe's page digests. In memory, while WRITING: the number of the client that may write.
    pub root: u64,
    /// Which stripe this is.
    pub stripe_index: u16,
    /// How many stripes the object has.
    pub stripe_count: u16,
    /// Length of the tenant and key section.
    pub key_len: u32,
    /// Length of the attributes.
    pub attributes_len: u32,
    /// CRC-32C over the tenant and key section and the attributes.
    pub trailer_crc: u32,
    /// Number of the [`IdKey`](crate::IdKey) that made the id.
    pub id_key: u32,
    /// Generation of the tenant that went into the id.
    pub tenant_generation: TenantGeneration,
}

impl Header {
    /// What the record's digests are bound to.
    pub fn digest_context(&self) -> DigestContext {
        let Header { id, stripe_index: stripe, stripe_len: len, .. } = *self;
        DigestContext { id, version: self.word.epoch(), stripe, len }
    }

    /// Where the record's parts stand.
    pub fn layout(&self) -> Result<RecordLayout, LayoutError> {
        RecordLayout::new(self.stripe_len, self.key_len, self.attributes_len, self.flags)
    }

    /// Writes the header. The CRC is computed here.
    ///
    /// # Panics
    /// If the fields contradict each other: a header that could not be read back must never be written.
    pub fn encode(&self) -> [u8; HEADER_BYTES] {
        let layout = self.check().expect("a header must be valid before it is written");
        let digests_len = layout.digests().len() as u32; // ≤ 32 MiB: RecordLayout checked the payload's length
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
        debug_assert_eq!(writer.at, SPARE_OFFSET);
        let crc = crc(&bytes);
        bytes[CRC_OFFSET..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Reads a header. The state in the word is not judged: that is the caller's protocol.
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
        let Some(flags) = Flags::from_bits(flags) else {
            return Err(HeaderError::Flags { found: flags });
        };
        if bytes[SPARE_OFFSET..CRC_OFFSET] != [0; CRC_OFFSET - SPARE_OFFSET] {
            return Err(HeaderError::Spare);
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

    /// The relations between fields that encoder and decoder both insist on; where the record's parts stand.
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

/// CRC-32C of everything before the CRC, with the word's state bits taken as zero: the state changes during
/// a record's life, the epoch does not.
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
            flags: Flags::NONE,
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
    fn what_is_written_is_read() {
        let header = sample();
        assert_eq!(Header::decode(&header.encode()), Ok(header));
    }

    #[test]
    fn every_flipped_bit_outside_the_state_is_noticed() {
        let good = sample().encode();
        for bit in 0..HEADER_BYTES * 8 {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            let is_state = bit / 8 == WORD_OFFSET && bit % 8 < 2;
            assert_eq!(Header::decode(&bad).is_ok(), is_state, "bit {bit}");
        }
    }

    #[test]
    fn relations_between_fields_are_checked() {
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
        refused(|h| h.payload_offset = 8192 + 512); // a payload of 4 KiB and more starts on 4 KiB
        refused(|h| h.key_len = u32::MAX);
    }

    #[test]
    fn a_valid_crc_does_not_excuse_bad_fields() {
        // Each change is followed by a fresh CRC, as a hostile or confused writer would do it.
        let refused = |at: usize, value: &[u8]| {
            let mut bytes = sample().encode();
            bytes[at..at + value.len()].copy_from_slice(value);
            let crc = crc(&bytes);
            bytes[CRC_OFFSET..].copy_from_slice(&crc.to_le_bytes());
            Header::decode(&bytes).unwrap_err()
        };
        assert_eq!(refused(6, &[2, 0]), HeaderError::Flags { found: 2 });
        assert_eq!(refused(110, &[1]), HeaderError::Spare);
        assert_eq!(refused(76, &[0, 0, 1, 0]), HeaderError::PageBytes { found: 65536 });
        assert_eq!(refused(80, &[0, 0, 0, 0]), HeaderError::DigestsLen { found: 0, expected: 32 });
        assert_eq!(refused(4, &[2, 0]), HeaderError::Version { found: 2 });
        assert!(matches!(refused(48, &[0; 8]), HeaderError::Stripe { .. }));
    }
}
