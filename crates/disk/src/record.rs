//! Format of a record on disk, the same in all three backends.
//!
//! ```text
//!  0        128        + 8 × pages     + key_len       + attributes_len  preamble_len   + stripe_len       len
//!  ├ header ─┼─ digests ────┼─ tenant+key ──┼─ attributes ──────┤ zeros ──────┼─ payload ────────┤ zeros ──┤
//! ```
//!
//! The preamble is everything before the payload: one read of it returns all metadata, and the payload is written
//! directly from memory and read directly into it.
//!
//! Invariants: a record starts and ends on a block of 4 KiB; `payload_offset` in its header is `preamble_len`, a
//! multiple of 4096 if `stripe_len ≥ 4096`, else of 512; its state is READY; it has digests. The zeros are not checked.
//!
//! Integrity: the header has a CRC; its `trailer_crc` covers tenant, key and attributes; its `root` covers the page
//! digests, and these the payload. A digest is seeded with (id, version, stripe, length), so a payload cannot be
//! mistaken for another one.

mod write;

use moontide_types::limits::{PAGE_BYTES, PAYLOAD_ALIGN, UNIT_BYTES};
use moontide_types::record::{
    HEADER_BYTES, Header, HeaderError, KeySection, PageDigests, State, TrailerError, trailer_crc,
};

use crate::backend::{RecordSource, WriteError};
use crate::buffer::BLOCK_BYTES;

pub(crate) use write::{PlacedRecord, WriteOps, run_writes};

const _: () =
    assert!(BLOCK_BYTES as u64 == PAYLOAD_ALIGN, "a payload that starts on a block is read without a copy");

/// Layout of a record on disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskLayout {
    /// Bytes before the payload.
    pub preamble_len: u64,
    /// Bytes of the record, whole blocks.
    pub len: u64,
    /// Bytes to read for everything but the payload, whole blocks. If they are more than `preamble_len`, they include
    /// the payload.
    pub preamble_read_len: u64,
}

impl DiskLayout {
    /// Returns the layout of a record with this header, which must be checked ([`Header::check`]) or decoded.
    pub fn of(header: &Header) -> DiskLayout {
        let digests_len = 8 * header.stripe_len.div_ceil(PAGE_BYTES);
        let used =
            HEADER_BYTES as u64 + digests_len + u64::from(header.key_len) + u64::from(header.attributes_len);
        let block = BLOCK_BYTES as u64;
        if header.stripe_len >= PAYLOAD_ALIGN {
            let preamble_len = used.next_multiple_of(block);
            let len = preamble_len + header.stripe_len.next_multiple_of(block);
            DiskLayout { preamble_len, len, preamble_read_len: preamble_len }
        } else {
            let preamble_len = used.next_multiple_of(UNIT_BYTES);
            let len = (preamble_len + header.stripe_len).next_multiple_of(block);
            DiskLayout { preamble_len, len, preamble_read_len: len }
        }
    }

    /// Returns the layout of a record to write. Checks all sections in memory against the header, except the payload,
    /// which every read verifies.
    pub(crate) fn of_source(source: &RecordSource<'_>) -> Result<DiskLayout, WriteError> {
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
        let valid = parts_fit
            && trailer_crc(source.key, source.attributes) == header.trailer_crc
            && KeySection::decode(source.key).is_ok()
            && header.digest_context().root_of(PageDigests::new(source.digests).iter()) == header.root;
        if valid { Ok(DiskLayout::of(header)) } else { Err(WriteError::Corrupt) }
    }
}

/// Returns the header of a record as it is on disk.
pub(crate) fn disk_header(header: &Header) -> Header {
    let payload_offset = DiskLayout::of(header).preamble_len;
    Header { word: header.word.with_state(State::Ready), payload_offset, ..*header }
}

/// Encodes everything before the payload, and for a small record the payload, too: [`DiskLayout::preamble_read_len`]
/// bytes.
///
/// # Panics
/// If [`DiskLayout::of_source`] refuses the source, or `out` has another length.
pub(crate) fn encode_preamble(source: &RecordSource<'_>, out: &mut [u8]) {
    let layout = DiskLayout::of(source.header);
    assert_eq!(out.len() as u64, layout.preamble_read_len, "length of the preamble");
    let mut at = 0;
    let mut put = |part: &[u8]| {
        out[at..at + part.len()].copy_from_slice(part);
        at += part.len();
    };
    put(&disk_header(source.header).encode());
    put(source.digests);
    put(source.key);
    put(source.attributes);
    let preamble_len = layout.preamble_len as usize; // ≤ out.len() or equal to it
    out[at..preamble_len].fill(0);
    let rest = &mut out[preamble_len..];
    if !rest.is_empty() {
        let (payload, padding) = rest.split_at_mut(source.payload.len());
        payload.copy_from_slice(source.payload);
        padding.fill(0);
    }
}

/// Decoded preamble: everything but the payload of a record.
#[derive(Clone, Copy, Debug)]
pub struct RecordPreamble<'a> {
    /// Header of the record.
    pub header: Header,
    /// Layout that follows from the header.
    pub layout: DiskLayout,
    /// Page digests; not yet compared with the root.
    pub digests: PageDigests<'a>,
    /// Tenant and key as stored.
    pub key: &'a [u8],
    /// Decoded tenant and key.
    pub section: KeySection<'a>,
    /// Attributes as stored; covered by the CRC, but not decoded.
    pub attributes: &'a [u8],
}

/// Reason why bytes are not the preamble of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PreambleError {
    /// There are too few bytes.
    #[error("{found} bytes, but the preamble has {needed}")]
    Short {
        /// Length of the preamble, or of a header if even that is incomplete.
        needed: u64,
        /// Number of bytes.
        found: u64,
    },
    /// The header is corrupt or missing.
    #[error(transparent)]
    Header(#[from] HeaderError),
    /// The state is not READY.
    #[error("state {found:?} instead of READY")]
    State {
        /// State in the header word.
        found: State,
    },
    /// The record has no digests.
    #[error("no digests")]
    Digestless,
    /// The payload offset is not the length of the preamble.
    #[error("payload offset {found} instead of {expected}")]
    PayloadOffset {
        /// Offset in the header.
        found: u64,
        /// Offset that follows from the layout.
        expected: u64,
    },
    /// Tenant, key or attributes do not match their CRC.
    #[error("trailer CRC {found:#010x}, computed {computed:#010x}")]
    TrailerCrc {
        /// CRC in the header.
        found: u32,
        /// CRC of the bytes.
        computed: u32,
    },
    /// Tenant or key is invalid.
    #[error(transparent)]
    Key(#[from] TrailerError),
}

/// Failed verification of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Corruption {
    /// The preamble is corrupt.
    #[error(transparent)]
    Preamble(#[from] PreambleError),
    /// The page digests do not match the root in the header.
    #[error("page digests do not match the root in the header")]
    Root,
    /// A page of the payload is corrupt.
    #[error("page {index} does not match its digest")]
    Page {
        /// Index of the page.
        index: u64,
    },
}

/// Decodes a header, and returns the layout of the record. Accepts any bytes.
pub fn decode_header(bytes: &[u8]) -> Result<(Header, DiskLayout), PreambleError> {
    let short = || PreambleError::Short { needed: HEADER_BYTES as u64, found: bytes.len() as u64 };
    let header = Header::decode(bytes.first_chunk().ok_or_else(short)?)?;
    if header.word.state() != State::Ready {
        return Err(PreambleError::State { found: header.word.state() });
    }
    if header.flags.digestless() {
        return Err(PreambleError::Digestless);
    }
    let layout = DiskLayout::of(&header);
    if header.payload_offset != layout.preamble_len {
        return Err(PreambleError::PayloadOffset {
            found: header.payload_offset,
            expected: layout.preamble_len,
        });
    }
    Ok((header, layout))
}

/// Decodes the preamble of a record; further bytes may follow. Accepts any bytes.
pub fn decode_preamble(bytes: &[u8]) -> Result<RecordPreamble<'_>, PreambleError> {
    let (header, layout) = decode_header(bytes)?;
    let short = PreambleError::Short { needed: layout.preamble_len, found: bytes.len() as u64 };
    let Some(preamble) = usize::try_from(layout.preamble_len).ok().and_then(|len| bytes.get(..len)) else {
        return Err(short);
    };
    // All sections fit: `preamble_len` is at least their sum.
    let digests_len = 8 * header.stripe_len.div_ceil(PAGE_BYTES) as usize;
    let (digests, rest) = preamble[HEADER_BYTES..].split_at(digests_len);
    let (key, rest) = rest.split_at(header.key_len as usize);
    let attributes = &rest[..header.attributes_len as usize];
    let section = decode_trailer(&header, key, attributes)?;
    Ok(RecordPreamble { header, layout, digests: PageDigests::new(digests), key, section, attributes })
}

/// Verifies tenant, key and attributes against a header.
pub(crate) fn decode_trailer<'a>(
    header: &Header,
    key: &'a [u8],
    attributes: &[u8],
) -> Result<KeySection<'a>, PreambleError> {
    let (found, computed) = (header.trailer_crc, trailer_crc(key, attributes));
    if found != computed {
        return Err(PreambleError::TrailerCrc { found, computed });
    }
    Ok(KeySection::decode(key)?)
}

impl RecordPreamble<'_> {
    /// Verifies that the page digests match the root in the header.
    pub fn verify_root(&self) -> Result<(), Corruption> {
        let root = self.header.digest_context().root_of(self.digests.iter());
        if root == self.header.root { Ok(()) } else { Err(Corruption::Root) }
    }
}

/// Verifies a payload against its preamble.
///
/// # Panics
/// If its length is not that in the header.
pub fn verify(preamble: &RecordPreamble<'_>, payload: &[u8]) -> Result<(), Corruption> {
    assert_eq!(payload.len() as u64, preamble.header.stripe_len, "payload length");
    preamble.verify_root()?;
    let context = preamble.header.digest_context();
    let pages = payload.chunks(PAGE_BYTES as usize).zip(preamble.digests.iter());
    for ((page, digest), index) in pages.zip(0..) {
        if context.page(index, page) != digest {
            return Err(Corruption::Page { index });
        }
    }
    Ok(())
}

/// Verifies all bytes of a record as read from the disk.
pub fn verify_record(bytes: &[u8]) -> Result<RecordPreamble<'_>, Corruption> {
    let preamble = decode_preamble(bytes)?;
    let DiskLayout { preamble_len, len, .. } = preamble.layout;
    let payload = usize::try_from(preamble_len + preamble.header.stripe_len)
        .ok()
        .and_then(|end| bytes.get(preamble_len as usize..end))
        .ok_or(PreambleError::Short { needed: len, found: bytes.len() as u64 })?;
    verify(&preamble, payload)?;
    Ok(preamble)
}

/// A record, or a corrupt part of one, found by an inspection.
#[derive(Clone, Debug)]
pub struct InspectedRecord<'a> {
    /// File that contains it, relative to the root of the tier.
    pub file: &'a str,
    /// Offset in the file.
    pub offset: u64,
    /// Length in bytes; 0 if unknown.
    pub len: u64,
    /// Header, and tenant and key, if these can be read.
    pub name: Option<(&'a Header, KeySection<'a>)>,
    /// Result of the checks.
    pub state: InspectedState,
}

/// State of an inspected record.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum InspectedState {
    /// It would be served. The payload was verified if requested.
    Ok,
    /// It would not be served.
    Corrupt {
        /// Description of the corruption.
        reason: String,
    },
    /// It was removed; its space is freed together with the rest of its file.
    Removed,
}

#[cfg(test)]
pub(crate) mod tests;
