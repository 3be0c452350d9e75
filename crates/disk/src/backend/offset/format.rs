//! Superblock and entries: what stands in the file around the records.
//!
//! ```text
//!  block 0      block 1 …                              …                                     last block
//!  ├ superblock ┼ table: 64 entries of 64 bytes a block ┼ data: records, whole blocks each ───┼ superblock ┤
//! ```
//!
//! The superblock is written once, when the file is made, and stands at both ends: damage to one of them loses nothing.
//!
//! An entry never straddles a sector of 512 bytes. A disk that is cut off in the middle of writing a block leaves each
//! sector old or new, hence each entry old or new: a block of the table is written in place, without a journal.
//!
//! ```text
//!  entry   0   id               16 bytes       superblock   0   magic      8 bytes
//!         16   version           8                          8   version    4
//!         24   sequence          8                         12   entries    4
//!         32   first block       8                         16   file_len   8
//!         40   blocks            4                         24   zeros
//!         44   head blocks       4                       4092   CRC-32C    4
//!         48   stripe            2
//!         50   state             1    1 = in use
//!         51   zeros             9
//!         60   CRC-32C           4
//! ```
//!
//! All integers are little-endian. An entry of 64 zeros is free. One flipped bit in an entry is put right with its CRC;
//! more of them lose this one record. Sequences are given in the order of writing and never
//! twice: where two entries contradict each other, the bytes on the disk are those of the higher one.

use moontide_types::{Epoch, ObjectId};

use crate::backend::RecordName;
use crate::buffer::BLOCK_BYTES;

/// Bytes of an entry.
pub(super) const ENTRY_BYTES: usize = 64;

/// Entries in a block of the table.
pub(super) const ENTRIES_PER_BLOCK: u32 = (BLOCK_BYTES / ENTRY_BYTES) as u32;

/// Bytes of a record on average, from which the number of entries follows unless it is given.
const RECORD_BYTES_AVERAGE: u64 = 64 << 10;

/// Entries unless told otherwise, at least: 256 KiB of table.
const ENTRIES_MIN: u32 = 4096;

/// The piece of a disk that is written whole or not at all.
const SECTOR_BYTES: usize = 512;

const _: () = assert!(SECTOR_BYTES.is_multiple_of(ENTRY_BYTES), "an entry never straddles a sector");

const MAGIC: [u8; 8] = *b"MTOFFSET";
const VERSION: u32 = 1;
const STATE_USED: u8 = 1;
const BLOCK: u64 = BLOCK_BYTES as u64;

/// Where the parts of the file stand.
///
/// Invariants: `file_len` is whole blocks, `entries` whole blocks of entries, and at least one block is left for data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Geometry {
    /// Length of the file.
    pub(super) file_len: u64,
    /// Entries of the table.
    pub(super) entries: u32,
}

impl Geometry {
    /// The parts of a file of at most `bytes`, if these are enough for a table and a block of data.
    pub(super) fn new(bytes: u64, entries: Option<u32>) -> Option<Geometry> {
        let usual = || u32::try_from(bytes / RECORD_BYTES_AVERAGE).unwrap_or(u32::MAX).max(ENTRIES_MIN);
        let blocks = entries.unwrap_or_else(usual).max(1).div_ceil(ENTRIES_PER_BLOCK);
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

    /// First byte of a block of the table.
    pub(super) fn table_block(&self, block: u32) -> u64 {
        BLOCK + u64::from(block) * BLOCK
    }

    /// Blocks of the table.
    pub(super) fn table_blocks(&self) -> u32 {
        self.entries / ENTRIES_PER_BLOCK
    }

    /// First byte of the data.
    pub(super) fn data_start(&self) -> u64 {
        self.table_block(self.table_blocks())
    }

    /// Blocks of data.
    pub(super) fn data_blocks(&self) -> u64 {
        (self.second_superblock() - self.data_start()) / BLOCK
    }

    /// First byte of the second superblock.
    pub(super) fn second_superblock(&self) -> u64 {
        self.file_len - BLOCK
    }

    /// The superblock.
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

    /// Reads a superblock, if it is one of this release.
    pub(super) fn decode(bytes: &[u8]) -> Option<Geometry> {
        let (fields, crc) = bytes.split_at_checked(BLOCK_BYTES - 4)?;
        let sound = crc == crc32c::crc32c(fields).to_le_bytes()
            && fields[0..8] == MAGIC
            && fields[8..12] == VERSION.to_le_bytes()
            && fields[24..].iter().all(|&byte| byte == 0);
        let geometry = Geometry { entries: u32_at(bytes, 12), file_len: u64_at(bytes, 16) };
        // A length near 2⁶⁴ would overflow in sums; no disk is that large.
        if sound && geometry.file_len < 1 << 60 { geometry.checked() } else { None }
    }
}

/// What the table says of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Entry {
    /// Whose record it is.
    pub(super) name: RecordName,
    /// When it was written, among the others.
    pub(super) sequence: u64,
    /// Its first block in the file.
    pub(super) first_block: u64,
    /// Its blocks.
    pub(super) blocks: u32,
    /// Blocks to read to know everything but the payload.
    pub(super) head_blocks: u32,
}

/// What stands in a slot of the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Slot {
    /// Nothing.
    Free,
    /// An entry.
    Used(Entry),
    /// Neither of them.
    Damaged,
}

impl Entry {
    /// The stored form.
    pub(super) fn encode(&self) -> [u8; ENTRY_BYTES] {
        let mut bytes = [0; ENTRY_BYTES];
        bytes[0..16].copy_from_slice(&self.name.id.0);
        bytes[16..24].copy_from_slice(&self.name.version.bits().to_le_bytes());
        bytes[24..32].copy_from_slice(&self.sequence.to_le_bytes());
        bytes[32..40].copy_from_slice(&self.first_block.to_le_bytes());
        bytes[40..44].copy_from_slice(&self.blocks.to_le_bytes());
        bytes[44..48].copy_from_slice(&self.head_blocks.to_le_bytes());
        bytes[48..50].copy_from_slice(&self.name.stripe.to_le_bytes());
        bytes[50] = STATE_USED;
        let crc = crc32c::crc32c(&bytes[..60]);
        bytes[60..].copy_from_slice(&crc.to_le_bytes());
        bytes
    }

    /// Bytes of the record.
    pub(super) fn len(&self) -> u64 {
        u64::from(self.blocks) * BLOCK
    }

    /// First byte of the record.
    pub(super) fn offset(&self) -> u64 {
        self.first_block * BLOCK
    }

    /// Bytes to read to know everything but the payload.
    pub(super) fn head_len(&self) -> u64 {
        u64::from(self.head_blocks) * BLOCK
    }

    /// Whether the record lies in the data of the file.
    fn fits(&self, geometry: &Geometry) -> bool {
        let data = geometry.data_start() / BLOCK..geometry.second_superblock() / BLOCK;
        let end = self.first_block.checked_add(self.blocks.into());
        self.first_block >= data.start
            && end.is_some_and(|end| end <= data.end)
            && self.head_blocks > 0
            && self.head_blocks <= self.blocks
    }
}

impl Slot {
    /// Reads a slot of a table.
    pub(super) fn decode(bytes: &[u8; ENTRY_BYTES], geometry: &Geometry) -> Slot {
        if bytes == &[0; ENTRY_BYTES] {
            return Slot::Free;
        }
        let sound = bytes[60..] == crc32c::crc32c(&bytes[..60]).to_le_bytes()
            && bytes[50] == STATE_USED
            && bytes[51..60] == [0; 9];
        let Ok(version) = Epoch::from_bits(u64_at(bytes, 16)) else { return Slot::Damaged };
        let id = ObjectId(*bytes.first_chunk().expect("an entry is longer than an id"));
        let stripe = u16::from_le_bytes([bytes[48], bytes[49]]);
        let entry = Entry {
            name: RecordName { id, version, stripe },
            sequence: u64_at(bytes, 24),
            first_block: u64_at(bytes, 32),
            blocks: u32_at(bytes, 40),
            head_blocks: u32_at(bytes, 44),
        };
        if sound && entry.fits(geometry) { Slot::Used(entry) } else { Slot::Damaged }
    }

    /// Reads a slot that is damaged on the disk: if one flipped bit explains the damage, as it was. What an entry names
    /// is held against the record itself, so nothing is believed that merely happens to fit.
    pub(super) fn decode_damaged(bytes: &[u8; ENTRY_BYTES], geometry: &Geometry) -> Slot {
        let repaired = (0..ENTRY_BYTES * 8).map(|bit| {
            let mut bytes = *bytes;
            bytes[bit / 8] ^= 1 << (bit % 8);
            Slot::decode(&bytes, geometry)
        });
        repaired.into_iter().find(|&slot| slot != Slot::Damaged).unwrap_or(Slot::Damaged)
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
        let name = RecordName { id: crate::samples::id(3), version, stripe: 9 };
        Entry { name, sequence: 5, first_block: 40, blocks: 7, head_blocks: 2 }
    }

    #[test]
    fn parts_tile_the_file() {
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
    fn any_flipped_bit_of_a_superblock_is_noticed() {
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
    fn any_flipped_bit_of_an_entry_is_noticed_and_put_right() {
        let mut bytes = entry().encode();
        assert_eq!(Slot::decode(&bytes, &geometry()), Slot::Used(entry()));
        for bit in 0..ENTRY_BYTES * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Slot::decode(&bytes, &geometry()), Slot::Damaged, "bit {bit}");
            assert_eq!(Slot::decode_damaged(&bytes, &geometry()), Slot::Used(entry()), "bit {bit}");
            let other = (bit + 100) % 512;
            bytes[other / 8] ^= 1 << (other % 8);
            assert_eq!(Slot::decode_damaged(&bytes, &geometry()), Slot::Damaged, "bits {bit} and {other}");
            bytes[other / 8] ^= 1 << (other % 8);
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        assert_eq!(Slot::decode(&[0; ENTRY_BYTES], &geometry()), Slot::Free);
        let mut bytes = [0; ENTRY_BYTES];
        bytes[9] = 4;
        assert_eq!(Slot::decode(&bytes, &geometry()), Slot::Damaged);
        assert_eq!(Slot::decode_damaged(&bytes, &geometry()), Slot::Free);
    }

    #[test]
    fn an_entry_outside_of_the_data_is_damage() {
        let last = geometry().second_superblock() / BLOCK;
        let cases = [
            Entry { first_block: 2, ..entry() },
            Entry { first_block: last - 6, ..entry() },
            Entry { first_block: u64::MAX, ..entry() },
            Entry { blocks: 0, ..entry() },
            Entry { head_blocks: 0, ..entry() },
            Entry { head_blocks: 8, ..entry() },
        ];
        for entry in cases {
            assert_eq!(Slot::decode(&entry.encode(), &geometry()), Slot::Damaged, "{entry:?}");
        }
        let end = Entry { first_block: last - 7, ..entry() };
        assert_eq!(Slot::decode(&end.encode(), &geometry()), Slot::Used(end));
    }
}
