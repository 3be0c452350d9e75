//! Superblock and table entries: everything in the file except the records.
//!
//! ```text
//!  block 0      block 1 …                              …                                     last block
//!  ├ superblock ┼ table: 64 entries of 64 bytes a block ┼ data: records, whole blocks each ───┼ superblock ┤
//! ```
//!
//! The superblock is written once, when the file is created, at both ends: corruption of one of them loses nothing.
//!
//! An entry never crosses the boundary of a sector of 512 bytes. A crash during the write of a block leaves each sector
//! old or new, hence each entry old or new: a block of the table is written in place, without a journal.
//!
//! ```text
//!  entry   0   id               16 bytes       superblock   0   magic      8 bytes
//!         16   version           8                          8   version    4
//!         24   sequence          8                         12   entries    4
//!         32   first block       8                         16   file_len   8
//!         40   blocks            4                         24   zeros
//!         44   preamble blocks   4                       4092   CRC-32C    4
//!         48   stripe            2
//!         50   state             1    1 = in use
//!         51   zeros             9
//!         60   CRC-32C           4
//! ```
//!
//! All integers are little-endian. An entry of 64 zeros is free. One flipped bit in an entry is corrected with its CRC;
//! more of them lose this one record. Sequence numbers follow the order of writes and are never reused: where two
//! entries conflict, the bytes on the disk are those of the higher one.

use moontide_types::{Epoch, ObjectId};

use crate::backend::RecordId;
use crate::buffer::BLOCK_BYTES;

/// Bytes of an entry.
pub(super) const ENTRY_BYTES: usize = 64;

/// Entries in a block of the table.
pub(super) const ENTRIES_PER_BLOCK: u32 = (BLOCK_BYTES / ENTRY_BYTES) as u32;

/// Average size of a record, from which the default number of entries follows.
const RECORD_BYTES_AVERAGE: u64 = 64 << 10;

/// Minimum of the default number of entries: 256 KiB of table.
const ENTRIES_MIN: u32 = 4096;

/// Unit of a disk that is written completely or not at all.
const SECTOR_BYTES: usize = 512;

const _: () = assert!(SECTOR_BYTES.is_multiple_of(ENTRY_BYTES), "an entry never crosses a sector boundary");

const MAGIC: [u8; 8] = *b"MTOFFSET";
const VERSION: u32 = 1;
const STATE_USED: u8 = 1;
const BLOCK: u64 = BLOCK_BYTES as u64;

/// Layout of the file.
///
/// Invariants: `file_len` is whole blocks, `entries` whole blocks of entries, and at least one block is left for data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Geometry {
    /// Length of the file, in bytes.
    pub(super) file_len: u64,
    /// Entries of the table.
    pub(super) entries: u32,
}

impl Geometry {
    /// Returns the layout of a file of at most `bytes` bytes, if these are enough for a table and a block of data.
    pub(super) fn new(bytes: u64, entries: Option<u32>) -> Option<Geometry> {
        let default = || u32::try_from(bytes / RECORD_BYTES_AVERAGE).unwrap_or(u32::MAX).max(ENTRIES_MIN);
        let blocks = entries.unwrap_or_else(default).max(1).div_ceil(ENTRIES_PER_BLOCK);
        // The largest number of whole blocks that a u32 can count.
        let entries = blocks.min(u32::MAX / ENTRIES_PER_BLOCK) * ENTRIES_PER_BLOCK;
        Geometry { file_len: bytes / BLOCK * BLOCK, entries }.checked()
    }

    fn checked(self) -> Option<Geometry> {
        let whole = self.file_len.is_multiple_of(BLOCK)
            && self.entries > 0
            && self.entries.is_multiple_of(ENTRIES_PER_BLOCK);
        (whole && self.data_start() + 2 * BLOCK <= self.file_len).then_some(self)
    }

    /// Returns the offset of a block of the table.
    pub(super) fn table_block(&self, block: u32) -> u64 {
        BLOCK + u64::from(block) * BLOCK
    }

    /// Number of blocks of the table.
    pub(super) fn table_blocks(&self) -> u32 {
        self.entries / ENTRIES_PER_BLOCK
    }

    /// Returns the offset of the data.
    pub(super) fn data_start(&self) -> u64 {
        self.table_block(self.table_blocks())
    }

    /// Number of data blocks.
    pub(super) fn data_blocks(&self) -> u64 {
        (self.second_superblock() - self.data_start()) / BLOCK
    }

    /// Returns the offset of the second superblock.
    pub(super) fn second_superblock(&self) -> u64 {
        self.file_len - BLOCK
    }

    /// Encodes the superblock.
    pub(super) fn encode(&self, out: &mut [u8]) {
        assert_eq!(out.len(), BLOCK_BYTES, "a block");
        out.fill(0);
        out[0..8].copy_from_slice(&MAGIC);
        out[8..12].copy_from_slice(&VERSION.to_le_bytes());
        out[12..16].copy_from_slice(&self.entries.to_le_bytes());
        out[16..24].copy_from_slice(&self.file_len.to_le_bytes());
        let crc = crc32c::crc32c(&out[..BLOCK_BYTES - 4]);
        out[BLOCK_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
    }

    /// Decodes a superblock, if it is a valid one of this release.
    pub(super) fn decode(bytes: &[u8]) -> Option<Geometry> {
        let (fields, crc) = bytes.split_at_checked(BLOCK_BYTES - 4)?;
        let valid = crc == crc32c::crc32c(fields).to_le_bytes()
            && fields[0..8] == MAGIC
            && fields[8..12] == VERSION.to_le_bytes()
            && fields[24..].iter().all(|&byte| byte == 0);
        let geometry = Geometry { entries: u32_at(bytes, 12), file_len: u64_at(bytes, 16) };
        // A length near 2⁶⁴ would overflow in sums; no disk is that large.
        if valid && geometry.file_len < 1 << 60 { geometry.checked() } else { None }
    }
}

/// Table entry of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Id of the record.
    pub(super) name: RecordId,
    /// Position in the order of writes.
    pub(super) sequence: u64,
    /// First block of the record in the file.
    pub(super) first_block: u64,
    /// Number of blocks.
    pub(super) blocks: u32,
    /// Blocks to read for everything but the payload.
    pub(super) preamble_blocks: u32,
}

/// Content of a slot of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Slot {
    /// No entry.
    Free,
    /// A valid entry.
    Used(Entry),
    /// Invalid bytes.
    Corrupt,
}

impl Entry {
    /// Encodes the entry.
    pub(super) fn encode(&self) -> [u8; ENTRY_BYTES] {
        let mut bytes = [0; ENTRY_BYTES];
        bytes[0..16].copy_from_slice(&self.name.id.0);
        bytes[16..24].copy_from_slice(&self.name.version.bits().to_le_bytes());
        bytes[24..32].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.first_block.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.blocks.to_le_bytes());
        bytes[44..48].copy_from_slice(&self.preamble_blocks.to_le_bytes());
        bytes[48..50].copy_from_slice(&self.name.stripe.to_le_bytes());
        bytes[50] = STATE_USED;
        let crc = crc32c::crc32c(&bytes[..60]);
        bytes[60..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Returns the length of the record, in bytes.
    pub(super) fn len(&self) -> u64 {
        u64::from(self.blocks) * BLOCK
    }

    /// Returns the offset of the record.
    pub(super) fn offset(&self) -> u64 {
        self.first_block * BLOCK
    }

    /// Returns the number of bytes to read for everything but the payload.
    pub(super) fn preamble_read_len(&self) -> u64 {
        u64::from(self.preamble_blocks) * BLOCK
    }

    /// Whether the record is within the data of the file.
    fn fits(&self, geometry: &Geometry) -> bool {
        let data = geometry.data_start() / BLOCK..geometry.second_superblock() / BLOCK;
        let end = self.first_block.checked_add(self.blocks.into());
        self.first_block >= data.start
            && end.is_some_and(|end| end <= data.end)
            && self.preamble_blocks > 0
            && self.preamble_blocks <= self.blocks
    }
}

impl Slot {
    /// Decodes a slot of a table.
    pub(super) fn decode(bytes: &[u8; ENTRY_BYTES], geometry: &Geometry) -> Slot {
        if bytes == &[0; ENTRY_BYTES] {
            return Slot::Free;
        }
        let valid = bytes[60..] == crc32c::crc32c(&bytes[..60]).to_le_bytes()
            && bytes[50] == STATE_USED
            && bytes[51..60] == [0; 9];
        let Ok(version) = Epoch::from_bits(u64_at(bytes, 16)) else { return Slot::Corrupt };
        let id = ObjectId(*bytes.first_chunk().expect("an entry is longer than an id"));
        let stripe = u16::from_le_bytes([bytes[48], bytes[49]]);
        let entry = Entry {
            name: RecordId { id, version, stripe },
            sequence: u64_at(bytes, 24),
            first_block: u64_at(bytes, 32),
            blocks: u32_at(bytes, 40),
            preamble_blocks: u32_at(bytes, 44),
        };
        if valid && entry.fits(geometry) { Slot::Used(entry) } else { Slot::Corrupt }
    }

    /// Decodes a slot that is corrupt on the disk: if one flipped bit explains the corruption, returns the original.
    /// The entry is compared with the record itself, so a match by chance is not accepted.
    pub(super) fn decode_corrupt(bytes: &[u8; ENTRY_BYTES], geometry: &Geometry) -> Slot {
        let repaired = (0..ENTRY_BYTES * 8).map(|bit| {
            let mut bytes = *bytes;
            bytes[bit / 8] ^= 1 << (bit % 8);
            Slot::decode(&bytes, geometry)
        });
        repaired.into_iter().find(|&slot| slot != Slot::Corrupt).unwrap_or(Slot::Corrupt)
    }
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn geometry() -> Geometry {
        Geometry::new(1 << 20, Some(100)).expect("a megabyte is enough")
    }

    fn entry() -> Entry {
        let version = Epoch::from_bits(77).expect("small");
        let name = RecordId { id: crate::samples::id(3), version, stripe: 9 };
        Entry { name, sequence: 5, first_block: 40, blocks: 7, preamble_blocks: 2 }
    }

    #[test]
    fn geometry_covers_file_without_gaps() {
        let geometry = geometry();
        assert_eq!(geometry.entries, 128, "whole blocks");
        assert_eq!(geometry.data_start(), 3 * BLOCK);
        assert_eq!(geometry.data_start() + geometry.data_blocks() * BLOCK, geometry.second_superblock());
        assert_eq!(geometry.second_superblock() + BLOCK, geometry.file_len);
        assert_eq!(Geometry::new(1 << 40, None).map(|geometry| geometry.entries), Some(1 << 24));
        assert_eq!(Geometry::new(4 * BLOCK, Some(1)).map(|geometry| geometry.data_blocks()), Some(1));
        assert_eq!(Geometry::new(4 * BLOCK - 1, Some(1)), None);
        assert_eq!(Geometry::new(100 * BLOCK, Some(u32::MAX)), None);
    }

    #[test]
    fn flipped_bit_in_superblock_is_rejected() {
        let mut bytes = [0; BLOCK_BYTES];
        geometry().encode(&mut bytes);
        assert_eq!(Geometry::decode(&bytes), Some(geometry()));
        for bit in 0..BLOCK_BYTES * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Geometry::decode(&bytes), None, "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        assert_eq!(Geometry::decode(&bytes[..100]), None);
    }

    #[test]
    fn flipped_bit_in_entry_is_detected_and_corrected() {
        let mut bytes = entry().encode();
        assert_eq!(Slot::decode(&bytes, &geometry()), Slot::Used(entry()));
        for bit in 0..ENTRY_BYTES * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Slot::decode(&bytes, &geometry()), Slot::Corrupt, "bit {bit}");
            assert_eq!(Slot::decode_corrupt(&bytes, &geometry()), Slot::Used(entry()), "bit {bit}");
            let other = (bit + 100) % 512;
            bytes[other / 8] ^= 1 << (other % 8);
            assert_eq!(Slot::decode_corrupt(&bytes, &geometry()), Slot::Corrupt, "bits {bit} and {other}");
            bytes[other / 8] ^= 1 << (other % 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        assert_eq!(Slot::decode(&[0; ENTRY_BYTES], &geometry()), Slot::Free);
        let mut bytes = [0; ENTRY_BYTES];
        bytes[9] = 4;
        assert_eq!(Slot::decode(&bytes, &geometry()), Slot::Corrupt);
        assert_eq!(Slot::decode_corrupt(&bytes, &geometry()), Slot::Free);
    }

    #[test]
    fn entry_outside_data_area_is_corrupt() {
        let last = geometry().second_superblock() / BLOCK;
        let cases = [
            Entry { first_block: 2, ..entry() },
            Entry { first_block: last - 6, ..entry() },
            Entry { first_block: u64::MAX, ..entry() },
            Entry { blocks: 0, ..entry() },
            Entry { preamble_blocks: 0, ..entry() },
            Entry { preamble_blocks: 8, ..entry() },
        ];
        for entry in cases {
            assert_eq!(Slot::decode(&entry.encode(), &geometry()), Slot::Corrupt, "{entry:?}");
        }
        let end = Entry { first_block: last - 7, ..entry() };
        assert_eq!(Slot::decode(&end.encode(), &geometry()), Slot::Used(end));
    }
}
