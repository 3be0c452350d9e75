//! [`Table`]: the entries of all records, in memory as on the disk, and their writes.
//!
//! The table is divided into up to [`SHARDS_MAX`] ranges of blocks, each with its own locks:
//!
//! * `state` holds the bytes of its blocks and the free slots; never held during I/O;
//! * `writing` is held while blocks of the shard are in flight to the disk, so that an older image of a block never
//!   overtakes a newer one.
//!
//! Lock order: `writing` of the shards in ascending order, then `state` of one shard at a time.
//!
//! A batch takes its slots from one shard as long as it has free ones, adjacent where they were never used before: a
//! hundred records need two or three block writes, not a hundred. The choice of the shard does not depend on the
//! records, so a table is full only when all shards are.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicUsize, Ordering};

use moontide_rt::sync::Mutex;

use super::format::{ENTRIES_PER_BLOCK, ENTRY_BYTES, Entry, Geometry, Slot};
use crate::backend::batch_io::run_batch;
use crate::buffer::{AlignedBuf, BLOCK_BYTES, Buffer};
use crate::record::run_writes;
use crate::storage::{File, Op, OpKind, Queue};

/// Maximum number of shards: more than there are writing threads.
const SHARDS_MAX: u32 = 64;

/// Size of one operation when the whole table is written.
const PIECE_BYTES_MAX: usize = 1 << 20;

/// Index of an entry in the table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct SlotNumber(pub(super) u32);

/// New content of a slot.
#[derive(Clone, Copy, Debug)]
pub(super) struct Change {
    /// Slot to change.
    pub(super) slot: SlotNumber,
    /// New entry; `None` clears the slot.
    pub(super) entry: Option<Entry>,
}

/// The entries of all records.
#[derive(Debug)]
pub(super) struct Table {
    file: File,
    geometry: Geometry,
    blocks_per_shard: u32,
    shards: Vec<Shard>,
    /// Shard at which the next batch starts to search for slots.
    turn: AtomicUsize,
}

#[derive(Debug)]
struct Shard {
    first_slot: u32,
    state: Mutex<ShardState>,
    writing: Mutex<()>,
}

#[derive(Debug)]
struct ShardState {
    /// The blocks as they should be on the disk. A vector of zeros, for which the system allocates memory on first
    /// access: 64 bytes for every entry that was ever used, and almost nothing for the others.
    image: Vec<u8>,
    /// Slots that were used before; the last one is used next.
    free: Vec<SlotNumber>,
    /// First slot that was never used.
    fresh: u32,
    end: u32,
}

impl Table {
    /// Creates a table in which the slots of `used` are occupied.
    pub(super) fn new(file: File, geometry: Geometry, used: &[(SlotNumber, Entry)]) -> Table {
        let blocks_per_shard = geometry.table_blocks().div_ceil(SHARDS_MAX);
        let starts = (0..geometry.table_blocks()).step_by(blocks_per_shard as usize);
        let shards = starts.map(|first_block| {
            let blocks = blocks_per_shard.min(geometry.table_blocks() - first_block);
            let first_slot = first_block * ENTRIES_PER_BLOCK;
            let state = ShardState {
                image: vec![0; blocks as usize * BLOCK_BYTES],
                free: vec![],
                fresh: first_slot,
                end: first_slot + blocks * ENTRIES_PER_BLOCK,
            };
            Shard { first_slot, state: Mutex::new(state), writing: Mutex::new(()) }
        });
        let shards = shards.collect();
        let table = Table { file, geometry, blocks_per_shard, shards, turn: AtomicUsize::new(0) };
        let mut used: Vec<_> = used.to_vec();
        used.sort_unstable_by_key(|&(slot, _)| slot);
        for (slot, entry) in used {
            let shard = table.shard(slot);
            let mut state = shard.state.lock();
            let skipped = state.fresh..slot.0;
            state.free.extend(skipped.map(SlotNumber));
            state.fresh = slot.0 + 1;
            state.set(shard.first_slot, slot, Some(&entry));
        }
        table
    }

    /// Allocates up to `count` free slots, until they are [freed](Table::free).
    pub(super) fn alloc(&self, count: usize) -> Vec<SlotNumber> {
        let mut slots = Vec::with_capacity(count);
        let turn = self.turn.fetch_add(1, Ordering::Relaxed); // any shard is valid
        for step in 0..self.shards.len() {
            if slots.len() == count {
                break;
            }
            let mut state = self.shards[turn.wrapping_add(step) % self.shards.len()].state.lock();
            while slots.len() < count {
                let Some(slot) = state.take() else { break };
                slots.push(slot);
            }
        }
        slots
    }

    /// Frees a slot that is durably clear, or was never written.
    pub(super) fn free(&self, slot: SlotNumber) {
        self.shard(slot).state.lock().free.push(slot);
    }

    /// Writes entries, whole blocks at a time. Returns for each whether it was written; one that was not may be on the
    /// disk all the same. Nothing is durable before a sync.
    pub(super) fn write(&self, queue: &mut dyn Queue, changes: &[Change]) -> Vec<bool> {
        let mut blocks: BTreeMap<u32, usize> =
            changes.iter().map(|change| (change.slot.0 / ENTRIES_PER_BLOCK, 0)).collect();
        for (index, number) in blocks.values_mut().zip(0..) {
            *index = number;
        }
        let mut shards: Vec<u32> = blocks.keys().map(|block| block / self.blocks_per_shard).collect();
        shards.dedup();
        // Ascending, like the map.
        let _writing: Vec<_> =
            shards.iter().map(|&shard| self.shards[shard as usize].writing.lock()).collect();
        for change in changes {
            let shard = self.shard(change.slot);
            shard.state.lock().set(shard.first_slot, change.slot, change.entry.as_ref());
        }
        let ops = blocks.keys().map(|&block| {
            let mut bytes = AlignedBuf::zeroed(BLOCK_BYTES);
            let shard = &self.shards[(block / self.blocks_per_shard) as usize];
            let start = (block % self.blocks_per_shard) as usize * BLOCK_BYTES;
            bytes.copy_from_slice(&shard.state.lock().image[start..start + BLOCK_BYTES]);
            let offset = self.geometry.table_block(block);
            let (file, buffer) = (self.file.clone(), Buffer::Owned(bytes));
            (blocks[&block], Op { tag: 0, kind: OpKind::Write, file, offset, buffer })
        });
        let written = run_batch(queue, blocks.len(), ops);
        changes.iter().map(|change| written[blocks[&(change.slot.0 / ENTRIES_PER_BLOCK)]].is_ok()).collect()
    }

    /// Writes the whole table, at a start without concurrent writers. Returns whether that succeeded.
    pub(super) fn write_all(&self, queue: &mut dyn Queue) -> bool {
        let pieces = self.shards.iter().flat_map(|shard| {
            let pieces = shard.state.lock().image.len().div_ceil(PIECE_BYTES_MAX);
            (0..pieces).map(move |piece| (shard, piece))
        });
        let ops = pieces.map(|(shard, piece)| {
            let state = shard.state.lock();
            let image = &state.image[piece * PIECE_BYTES_MAX..];
            let image = &image[..image.len().min(PIECE_BYTES_MAX)];
            let mut bytes = AlignedBuf::zeroed(image.len());
            bytes.copy_from_slice(image);
            let first_block =
                shard.first_slot / ENTRIES_PER_BLOCK + (piece * PIECE_BYTES_MAX / BLOCK_BYTES) as u32;
            let offset = self.geometry.table_block(first_block);
            let (file, buffer) = (self.file.clone(), Buffer::Owned(bytes));
            Op { tag: 0, kind: OpKind::Write, file, offset, buffer }
        });
        run_writes(queue, ops).is_ok()
    }

    /// Returns the entry of a slot, as in memory.
    pub(super) fn entry(&self, slot: SlotNumber) -> Option<Entry> {
        let shard = self.shard(slot);
        let start = (slot.0 - shard.first_slot) as usize * ENTRY_BYTES;
        let state = shard.state.lock();
        match Slot::decode(state.image[start..].first_chunk()?, &self.geometry) {
            Slot::Used(entry) => Some(entry),
            Slot::Free | Slot::Corrupt => None,
        }
    }

    fn shard(&self, slot: SlotNumber) -> &Shard {
        &self.shards[(slot.0 / ENTRIES_PER_BLOCK / self.blocks_per_shard) as usize]
    }
}

impl ShardState {
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
