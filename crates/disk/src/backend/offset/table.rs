//! [`Table`]: the entries of all records, in memory as on the disk, and how they get there.
//!
//! The table is divided into up to [`SHARDS_MAX`] runs of blocks, each with its own locks:
//!
//! * `books` holds the bytes of its blocks and says which slots are free; held for moments only;
//! * `writing` is held while blocks of the shard are on their way to the disk, so that an older image of a block never
//!   overtakes a newer one.
//!
//! Lock order: `writing` of the shards in ascending order, then `books` of one shard at a time.
//!
//! A batch takes its slots from one shard while that has some, side by side where they were never used before: a
//! hundred records are two or three blocks to write, not a hundred. Which shard it is does not depend on the records,
//! so a table is full only when all of it is.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use parking_lot::Mutex;

use super::format::{ENTRIES_PER_BLOCK, ENTRY_BYTES, Entry, Geometry, Slot};
use crate::backend::scatter::run_for_each;
use crate::buffer::{Aligned, BLOCK_BYTES, Buffer};
use crate::record::run_writes;
use crate::storage::{File, Op, OpKind, Queue};

/// Shards, at most: more than there are threads that write.
const SHARDS_MAX: u32 = 64;

/// Bytes of one operation when all of the table is written.
const PIECE_BYTES_MAX: usize = 1 << 20;

/// Place of an entry in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct SlotNumber(pub(super) u32);

/// What is to stand in a slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Change {
    /// Which slot.
    pub(super) slot: SlotNumber,
    /// The entry, or nothing.
    pub(super) entry: Option<Entry>,
}

/// The entries of all records.
#[derive(Debug)]
pub(super) struct Table {
    file: File,
    geometry: Geometry,
    blocks_per_shard: u32,
    shards: Vec<Shard>,
    /// Where the next batch looks for slots first.
    turn: AtomicUsize,
}

#[derive(Debug)]
struct Shard {
    first_slot: u32,
    books: Mutex<Books>,
    writing: Mutex<()>,
}

#[derive(Debug)]
struct Books {
    /// The blocks as they are to stand on the disk. A vector of zeros, for which the system gives memory when it is first
    /// touched: 64 bytes for every entry that was ever used, and next to nothing for the others.
    image: Vec<u8>,
    /// Slots that were used before; the last one is used next.
    free: Vec<SlotNumber>,
    /// From here on no slot was ever used.
    fresh: u32,
    end: u32,
}

impl Table {
    /// A table in which the slots of `used` are taken.
    pub(super) fn new(file: File, geometry: Geometry, used: &[(SlotNumber, Entry)]) -> Table {
        let blocks_per_shard = geometry.table_blocks().div_ceil(SHARDS_MAX);
        let starts = (0..geometry.table_blocks()).step_by(blocks_per_shard as usize);
        let shards = starts.map(|first_block| {
            let blocks = blocks_per_shard.min(geometry.table_blocks() - first_block);
            let first_slot = first_block * ENTRIES_PER_BLOCK;
            let books = Books {
                image: vec![0; blocks as usize * BLOCK_BYTES],
                free: vec![],
                fresh: first_slot,
                end: first_slot + blocks * ENTRIES_PER_BLOCK,
            };
            Shard { first_slot, books: Mutex::new(books), writing: Mutex::new(()) }
        });
        let shards = shards.collect();
        let table = Table { file, geometry, blocks_per_shard, shards, turn: AtomicUsize::new(0) };
        let mut used: Vec<_> = used.to_vec();
        used.sort_unstable_by_key(|&(slot, _)| slot);
        for (slot, entry) in used {
            let shard = table.shard(slot);
            let mut books = shard.books.lock();
            let passed = books.fresh..slot.0;
            books.free.extend(passed.map(SlotNumber));
            books.fresh = slot.0 + 1;
            books.set(shard.first_slot, slot, Some(&entry));
        }
        table
    }

    /// Up to `count` free slots, which are the caller's until they are [given back](Table::give_back).
    pub(super) fn take(&self, count: usize) -> Vec<SlotNumber> {
        let mut slots = Vec::with_capacity(count);
        let turn = self.turn.fetch_add(1, Ordering::Relaxed); // any shard will do
        for step in 0..self.shards.len() {
            if slots.len() == count {
                break;
            }
            let mut books = self.shards[turn.wrapping_add(step) % self.shards.len()].books.lock();
            while slots.len() < count {
                let Some(slot) = books.take() else { break };
                slots.push(slot);
            }
        }
        slots
    }

    /// Takes a slot back that is durably free, or was never written.
    pub(super) fn give_back(&self, slot: SlotNumber) {
        self.shard(slot).books.lock().free.push(slot);
    }

    /// Writes entries, whole blocks at a time, and says of each whether it is written. One that is not may stand on the
    /// disk all the same. Nothing is durable before a sync.
    pub(super) fn write(&self, queue: &mut dyn Queue, changes: &[Change]) -> Vec<bool> {
        let mut blocks: BTreeMap<u32, usize> =
            changes.iter().map(|change| (change.slot.0 / ENTRIES_PER_BLOCK, 0)).collect();
        for (place, number) in blocks.values_mut().zip(0..) {
            *place = number;
        }
        let mut shards: Vec<u32> = blocks.keys().map(|block| block / self.blocks_per_shard).collect();
        shards.dedup();
        // Ascending, as the map is.
        let _writing: Vec<_> =
            shards.iter().map(|&shard| self.shards[shard as usize].writing.lock()).collect();
        for change in changes {
            let shard = self.shard(change.slot);
            shard.books.lock().set(shard.first_slot, change.slot, change.entry.as_ref());
        }
        let ops = blocks.keys().map(|&block| {
            let mut bytes = Aligned::zeroed(BLOCK_BYTES);
            let shard = &self.shards[(block / self.blocks_per_shard) as usize];
            let start = (block % self.blocks_per_shard) as usize * BLOCK_BYTES;
            bytes.copy_from_slice(&shard.books.lock().image[start..start + BLOCK_BYTES]);
            let offset = self.geometry.table_block(block);
            let (file, buffer) = (self.file.clone(), Buffer::Owned(bytes));
            (blocks[&block], Op { tag: 0, kind: OpKind::Write, file, offset, buffer })
        });
        let written = run_for_each(queue, blocks.len(), ops);
        changes.iter().map(|change| written[blocks[&(change.slot.0 / ENTRIES_PER_BLOCK)]].is_ok()).collect()
    }

    /// Writes all of the table, as at a start, when nobody else does; whether that went well.
    pub(super) fn write_all(&self, queue: &mut dyn Queue) -> bool {
        let pieces = self.shards.iter().flat_map(|shard| {
            let pieces = shard.books.lock().image.len().div_ceil(PIECE_BYTES_MAX);
            (0..pieces).map(move |piece| (shard, piece))
        });
        let ops = pieces.map(|(shard, piece)| {
            let books = shard.books.lock();
            let image = &books.image[piece * PIECE_BYTES_MAX..];
            let image = &image[..image.len().min(PIECE_BYTES_MAX)];
            let mut bytes = Aligned::zeroed(image.len());
            bytes.copy_from_slice(image);
            let first_block =
                shard.first_slot / ENTRIES_PER_BLOCK + (piece * PIECE_BYTES_MAX / BLOCK_BYTES) as u32;
            let offset = self.geometry.table_block(first_block);
            let (file, buffer) = (self.file.clone(), Buffer::Owned(bytes));
            Op { tag: 0, kind: OpKind::Write, file, offset, buffer }
        });
        run_writes(queue, ops).is_ok()
    }

    /// The entry that stands in a slot, or is to stand there.
    pub(super) fn entry(&self, slot: SlotNumber) -> Option<Entry> {
        let shard = self.shard(slot);
        let start = (slot.0 - shard.first_slot) as usize * ENTRY_BYTES;
        let books = shard.books.lock();
        match Slot::decode(books.image[start..].first_chunk()?, &self.geometry) {
            Slot::Used(entry) => Some(entry),
            Slot::Free | Slot::Damaged => None,
        }
    }

    fn shard(&self, slot: SlotNumber) -> &Shard {
        &self.shards[(slot.0 / ENTRIES_PER_BLOCK / self.blocks_per_shard) as usize]
    }
}

impl Books {
    fn take(&mut self) -> Option<SlotNumber> {
        self.free.pop().or_else(|| {
            let slot = (self.fresh < self.end).then_some(SlotNumber(self.fresh))?;
            self.fresh += 1;
            Some(slot)
        })
    }

    fn set(&mut self, first_slot: u32, slot: SlotNumber, entry: Option<&Entry>) {
        let start = (slot.0 - first_slot) as usize * ENTRY_BYTES;
        let bytes = entry.map_or([0; ENTRY_BYTES], Entry::encode);
        self.image[start..start + ENTRY_BYTES].copy_from_slice(&bytes);
    }
}
