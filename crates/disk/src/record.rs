//! What a record looks like on disk, the same in all three backends.
//!
//! ```text
//!  0        128        + 8 × pages     + key_len       + attributes_len   front_len      + stripe_len    len
//!  ├ header ─┼─ digests ────┼─ tenant+key ──┼─ attributes ──────┤ zeros ──────┼─ payload ────────┤ zeros ──┤
//! ```
//!
//! Everything but the payload stands in front of it: one read of the front tells all there is to know, and the payload
//! is written straight from memory and read straight into it.
//!
//! Invariants: a record starts and ends on a block of 4 KiB; `payload_offset` in its header is `front_len`, a multiple
//! of 4096 if `stripe_len ≥ 4096`, else of 512; its state is READY; it has digests. The zeros are not looked at.
//!
//! What protects what: the header has a CRC; `trailer_crc` in it covers tenant, key and attributes; `root` in it covers
//! the page digests, and these the payload. A digest is seeded with (id, version, stripe, length), so a payload cannot
//! be taken for another's.

mod write;

use moontide_types::bounds::{PAGE_BYTES, PAYLOAD_ALIGN, UNIT_BYTES};
use moontide_types::record::{
    HEADER_BYTES, Header, HeaderError, KeySection, PageDigests, State, TrailerError, trailer_crc,
};

use crate::backend::{Source, WriteError};
use crate::buffer::BLOCK_BYTES;

pub(crate) use write::{Placed, WriteOps, run_writes};

const _: () =
    assert!(BLOCK_BYTES as u64 == PAYLOAD_ALIGN, "a payload that starts on a block is read into its place");

/// Where the parts of a record stand on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskLayout {
    /// Bytes before the payload.
    pub front_len: u64,
    /// Bytes of the record: whole blocks.
    pub len: u64,
    /// Bytes to read to know everything but the payload: whole blocks. If they are more than `front_len`, the payload
    /// is among them.
    pub head_len: u64,
}

impl DiskLayout {
    /// The layout of a record with this header, which must have been checked ([`Header::check`]) or decoded.
    pub fn of(header: &Header) -> DiskLayout {
        let digests_len = 8 * header.stripe_len.div_ceil(PAGE_BYTES);
        let used =
            HEADER_BYTES as u64 + digests_len + u64::from(header.key_len) + u64::from(header.attributes_len);
        let block = BLOCK_BYTES as u64;
        if header.stripe_len >= PAYLOAD_ALIGN {
            let front_len = used.next_multiple_of(block);
            let len = front_len + header.stripe_len.next_multiple_of(block);
            DiskLayout { front_len, len, head_len: front_len }
        } else {
            let front_len = used.next_multiple_of(UNIT_BYTES);
            let len = (front_len + header.stripe_len).next_multiple_of(block);
            DiskLayout { front_len, len, head_len: len }
        }
    }

    /// The layout of a record that is to be written, if it can be: what stands in memory is held against its header, but
    /// for the payload, which is verified whenever it is read.
    pub(crate) fn of_source(source: &Source<'_>) -> Result<DiskLayout, WriteError> {
        let header = source.header;
        if header.flags.digestless() {
            return Err(WriteError::Digestless);
        }
        let parts_fit = header.check().is_ok_and(|layout| {
            source.payload.len() as u64 == header.stripe_len
                && source.digests.len() as u64 == layout.digests().len()
                && source.key.len() as u64 == u64::from(header.key_len)
                && source.attributes.len() as u64 == u64::from(header.attributes_len)
        });
        let sound = parts_fit
            && trailer_crc(source.key, source.attributes) == header.trailer_crc
            && KeySection::decode(source.key).is_ok()
            && header.digest_context().root_of(PageDigests::new(source.digests).iter()) == header.root;
        if sound { Ok(DiskLayout::of(header)) } else { Err(WriteError::Damaged) }
    }
}

/// The header of a record as it stands on disk.
pub(crate) fn disk_header(header: &Header) -> Header {
    let payload_offset = DiskLayout::of(header).front_len;
    Header { word: header.word.with_state(State::Ready), payload_offset, ..*header }
}

/// Writes everything before the payload, and for a small record the payload, too: [`DiskLayout::head_len`] bytes.
///
/// # Panics
/// If [`DiskLayout::of_source`] would refuse the source, or `out` is not that long.
pub(crate) fn encode_front(source: &Source<'_>, out: &mut [u8]) {
    let layout = DiskLayout::of(source.header);
    assert_eq!(out.len() as u64, layout.head_len, "room for the front");
    let mut at = 0;
    let mut put = |part: &[u8]| {
        out[at..at + part.len()].copy_from_slice(part);
        at += part.len();
    };
    put(&disk_header(source.header).encode());
    put(source.digests);
    put(source.key);
    put(source.attributes);
    let front_len = layout.front_len as usize; // ≤ out.len() or equal to it
    out[at..front_len].fill(0);
    let rest = &mut out[front_len..];
    if !rest.is_empty() {
        let (payload, padding) = rest.split_at_mut(source.payload.len());
        payload.copy_from_slice(source.payload);
        padding.fill(0);
    }
}

/// Everything but the payload of a record, as it stands in its first bytes.
#[derive(Clone, Copy, Debug)]
pub struct Front<'a> {
    /// Its header.
    pub header: Header,
    /// Where its parts stand.
    pub layout: DiskLayout,
    /// Its page digests; their root was not compared.
    pub digests: PageDigests<'a>,
    /// Tenant and key, as they are stored.
    pub key: &'a [u8],
    /// The same, decoded.
    pub section: KeySection<'a>,
    /// Attributes, as they are stored; under the CRC, but not decoded.
    pub attributes: &'a [u8],
}

/// Why bytes are not the front of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FrontError {
    /// There are too few of them.
    #[error("{found} bytes are there, {needed} are needed")]
    Short {
        /// How many the front has, or a header if it is not even that.
        needed: u64,
        /// How many there are.
        found: u64,
    },
    /// The header is damaged, or none at all.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// A record on disk is always READY.
    #[error("its state is {found:?}")]
    State {
        /// The state in its word.
        found: State,
    },
    /// A record on disk always has digests.
    #[error("it has no digests")]
    Digestless,
    /// The payload does not start behind the front.
    #[error("its payload is said to start at {found}, not at {expected}")]
    PayloadOffset {
        /// What the header says.
        found: u64,
        /// What it should say.
        expected: u64,
    },
    /// Tenant, key or attributes changed since they were written.
    #[error("trailer CRC {found:#010x}, computed {computed:#010x}")]
    TrailerCrc {
        /// What the header says.
        found: u32,
        /// What it should say.
        computed: u32,
    },
    /// Tenant and key break their rules.
    #[error(transparent)]
    Key(#[from] TrailerError),
}

/// Why a record is not what was written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Damage {
    /// Its front is damaged.
    #[error(transparent)]
    Front(#[from] FrontError),
    /// The digests in its front are not those that the header vouches for.
    #[error("the page digests do not have the header's root")]
    Root,
    /// A page of the payload is damaged.
    #[error("page {index} does not match its digest")]
    Page {
        /// Which one.
        index: u64,
    },
}

/// Reads a header and says where the record's parts stand. For any bytes.
pub fn decode_header(bytes: &[u8]) -> Result<(Header, DiskLayout), FrontError> {
    let short = || FrontError::Short { needed: HEADER_BYTES as u64, found: bytes.len() as u64 };
    let header = Header::decode(bytes.first_chunk().ok_or_else(short)?)?;
    if header.word.state() != State::Ready {
        return Err(FrontError::State { found: header.word.state() });
    }
    if header.flags.digestless() {
        return Err(FrontError::Digestless);
    }
    let layout = DiskLayout::of(&header);
    if header.payload_offset != layout.front_len {
        return Err(FrontError::PayloadOffset { found: header.payload_offset, expected: layout.front_len });
    }
    Ok((header, layout))
}

/// Reads the front of a record, whatever follows it. For any bytes.
pub fn decode_front(bytes: &[u8]) -> Result<Front<'_>, FrontError> {
    let (header, layout) = decode_header(bytes)?;
    let short = FrontError::Short { needed: layout.front_len, found: bytes.len() as u64 };
    let Some(front) = usize::try_from(layout.front_len).ok().and_then(|len| bytes.get(..len)) else {
        return Err(short);
    };
    // All of these fit: `front_len` is at least their sum.
    let digests_len = 8 * header.stripe_len.div_ceil(PAGE_BYTES) as usize;
    let (digests, rest) = front[HEADER_BYTES..].split_at(digests_len);
    let (key, rest) = rest.split_at(header.key_len as usize);
    let attributes = &rest[..header.attributes_len as usize];
    let section = decode_trailer(&header, key, attributes)?;
    Ok(Front { header, layout, digests: PageDigests::new(digests), key, section, attributes })
}

/// Checks tenant, key and attributes against a header.
pub(crate) fn decode_trailer<'a>(
    header: &Header,
    key: &'a [u8],
    attributes: &[u8],
) -> Result<KeySection<'a>, FrontError> {
    let (found, computed) = (header.trailer_crc, trailer_crc(key, attributes));
    if found != computed {
        return Err(FrontError::TrailerCrc { found, computed });
    }
    Ok(KeySection::decode(key)?)
}

impl Front<'_> {
    /// Whether the digests in the front are those that the header vouches for.
    pub fn verify_root(&self) -> Result<(), Damage> {
        let root = self.header.digest_context().root_of(self.digests.iter());
        if root == self.header.root { Ok(()) } else { Err(Damage::Root) }
    }
}

/// Whether a payload is the one that was written with this front.
///
/// # Panics
/// If it is not as long as the header says.
pub fn verify(front: &Front<'_>, payload: &[u8]) -> Result<(), Damage> {
    assert_eq!(payload.len() as u64, front.header.stripe_len, "the payload of this front");
    front.verify_root()?;
    let context = front.header.digest_context();
    let pages = payload.chunks(PAGE_BYTES as usize).zip(front.digests.iter());
    for ((page, digest), index) in pages.zip(0..) {
        if context.page(index, page) != digest {
            return Err(Damage::Page { index });
        }
    }
    Ok(())
}

/// Whether whole bytes of a record, as read from the disk, are what was written.
pub fn verify_record(bytes: &[u8]) -> Result<Front<'_>, Damage> {
    let front = decode_front(bytes)?;
    let DiskLayout { front_len, len, .. } = front.layout;
    let payload = usize::try_from(front_len + front.header.stripe_len)
        .ok()
        .and_then(|end| bytes.get(front_len as usize..end))
        .ok_or(FrontError::Short { needed: len, found: bytes.len() as u64 })?;
    verify(&front, payload)?;
    Ok(front)
}

/// A record, or what is left of one, as a look at a tier from outside finds it.
#[derive(Clone, Debug)]
pub struct Inspected<'a> {
    /// The file that it stands in, relative to the tier's root.
    pub file: &'a str,
    /// Its first byte there.
    pub offset: u64,
    /// Its length; 0 if it is not known.
    pub len: u64,
    /// Its header and tenant and key, if these can be read.
    pub name: Option<(&'a Header, KeySection<'a>)>,
    /// What it is worth.
    pub state: InspectedState,
}

/// What a record on disk is worth.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InspectedState {
    /// It would be served. Its payload was verified if that was asked for.
    Ok,
    /// It would not be served.
    Damaged {
        /// What is wrong.
        why: String,
    },
    /// It was removed; its space comes back with the others of its file.
    Removed,
}

#[cfg(test)]
pub(crate) mod tests;
