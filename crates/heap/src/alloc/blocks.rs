//! Block records: a slab in which every unit of the segment belongs to exactly one block.
//!
//! ```text
//!   record, 28 bytes      start │ units │ prev │ next │ link          │ back                    │ before/after_free
//!                         u32   │ u32   │ u32  │ u32  │ u32           │ u32                     │ 2 × bool
//!     live block                                      │ owner's tag   │ LIVE                    │ free neighbours
//!     free block                                      │ next in bin   │ previous in bin, or NIL │ false
//!     vacant record                                   │ next vacant   │ VACANT                  │
//!
//!   physical order        NIL ⇄ [0, a) ⇄ [a, b) ⇄ … ⇄ [z, capacity) ⇄ NIL
//! ```
//!
//! Record 0 is the border, a block of no units that counts as live: the ring of `prev` and `next` closes over it, so
//! that neither merging nor splitting checks whether a neighbour exists. The same number is NIL in the bin lists,
//! which never contain the border.
//!
//! `units` could be derived (`next.start - start`) and the record be 20 bytes, but then a split would read a
//! neighbour that it otherwise does not touch, and a probe of a bin would cost two cache misses per block instead of
//! one.
//!
//! A live block records whether its neighbours are free. A free then waits for the block's own record only; otherwise
//! it would wait for its neighbours' records too, and among millions of scattered blocks each is a cache miss.
//! Updating the neighbours is a store, which does not stall.
//!
//! Invariants, with `live`, `free` and `vacant` counting records:
//!
//! * `block.start + block.units == block.next.start`, or `capacity` where `next` is the border;
//! * `block.next.prev == block` and `block.prev.next == block`;
//! * `block.units > 0` for every block but the border;
//! * no two neighbours are free, hence `free <= live + 1`;
//! * `block.before_free == block.prev.is_free()` and `block.after_free == block.next.is_free()`;
//! * `live + free + vacant + 1 == records.len() <= 2 * live_max + 2`, `live_max` being the most ever live at
//!   once.

use moontide_types::Extent;

use super::huge::advise_huge_pages;

/// Handle of a live block of one [`Allocator`](super::Allocator), valid until the block is freed.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct BlockRef(pub u32);

/// The border in physical order; "none" in a bin.
pub(super) const NIL: u32 = 0;

const LIVE: u32 = u32::MAX;
const VACANT: u32 = u32::MAX - 1;

/// Keeps every record's number below LIVE and VACANT, even if every block is one unit.
pub(super) const CAPACITY_UNITS_MAX: u32 = VACANT - 1;

#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    pub(super) start: u32,
    pub(super) units: u32,
    pub(super) prev: u32,
    pub(super) next: u32,
    pub(super) link: u32,
    pub(super) back: u32,
    pub(super) before_free: bool,
    pub(super) after_free: bool,
}

const _: () = assert!(size_of::<Block>() == 28);

impl Block {
    pub(super) fn is_free(&self) -> bool {
        self.back < VACANT
    }

    pub(super) fn is_live(&self) -> bool {
        self.back == LIVE
    }

    pub(super) fn extent(&self) -> Extent {
        Extent { start: self.start, units: self.units }
    }
}

#[derive(Debug)]
pub(super) struct Blocks {
    records: Vec<Block>,
    /// Head of the list of vacant records; the record vacated last is reused first, while it is still in cache.
    vacant: u32,
    vacant_count: u32,
}

impl Blocks {
    pub(super) fn new(blocks_expected: usize) -> Self {
        let mut records = Vec::with_capacity(blocks_expected + 1);
        advise_huge_pages(&mut records);
        records.push(Block {
            start: 0,
            units: 0,
            prev: NIL,
            next: NIL,
            link: NIL,
            back: LIVE,
            before_free: false,
            after_free: false,
        });
        Self { records, vacant: NIL, vacant_count: 0 }
    }

    /// Reserves `blocks` records in total, so that insertions up to that number do not move the slab.
    pub(super) fn reserve(&mut self, blocks: usize) {
        self.records.reserve_exact((blocks + 1).saturating_sub(self.records.len()));
        advise_huge_pages(&mut self.records);
    }

    pub(super) fn get(&self, block: u32) -> &Block {
        &self.records[block as usize]
    }

    pub(super) fn get_mut(&mut self, block: u32) -> &mut Block {
        &mut self.records[block as usize]
    }

    /// Returns the record of a live block. Panics for the border, whose number is never returned to a caller.
    pub(super) fn live(&self, block: BlockRef) -> &Block {
        let record = self.records.get(block.0 as usize).filter(|record| record.is_live() && block.0 != NIL);
        record.unwrap_or_else(|| panic!("{block:?} is not a live block"))
    }

    pub(super) fn set_live(&mut self, block: u32) {
        let record = self.get_mut(block);
        record.link = 0;
        record.back = LIVE;
    }

    /// Records in `prev` and `next` whether the units between them are free.
    pub(super) fn set_free_between(&mut self, prev: u32, next: u32, free: bool) {
        self.get_mut(prev).after_free = free;
        self.get_mut(next).before_free = free;
    }

    pub(super) fn set_extent(&mut self, block: u32, extent: Extent) {
        let record = self.get_mut(block);
        record.start = extent.start;
        record.units = extent.units;
    }

    /// Inserts a live block with tag 0 between `prev` and `next`. The caller sets `before_free` and `after_free`.
    pub(super) fn insert_between(&mut self, prev: u32, next: u32, extent: Extent) -> u32 {
        let Extent { start, units } = extent;
        let (before_free, after_free) = (false, false);
        let record = Block { start, units, prev, next, link: 0, back: LIVE, before_free, after_free };
        let block = self.vacant;
        let block = if block == NIL {
            if self.records.len() == self.records.capacity() {
                self.records.reserve(1);
                advise_huge_pages(&mut self.records);
            }
            self.records.push(record);
            (self.records.len() - 1) as u32
        } else {
            let slot = self.get_mut(block);
            debug_assert_eq!(slot.back, VACANT);
            let vacant_next = slot.link;
            *slot = record;
            self.vacant = vacant_next;
            self.vacant_count -= 1;
            block
        };
        self.get_mut(prev).next = block;
        self.get_mut(next).prev = block;
        block
    }

    /// Adds a record to the vacant list. The caller has removed it from the ring.
    pub(super) fn vacate(&mut self, block: u32) {
        debug_assert_ne!(block, NIL);
        let vacant = self.vacant;
        let record = self.get_mut(block);
        record.link = vacant;
        record.back = VACANT;
        self.vacant = block;
        self.vacant_count += 1;
    }

    /// Iterates over all blocks in address order.
    pub(super) fn in_order(&self) -> impl Iterator<Item = (u32, &Block)> {
        let mut at = NIL;
        std::iter::from_fn(move || {
            at = self.get(at).next;
            (at != NIL).then(|| (at, self.get(at)))
        })
    }

    /// Returns the number of live and free blocks, without the border.
    pub(super) fn count(&self) -> u32 {
        self.records.len() as u32 - 1 - self.vacant_count
    }

    pub(super) fn metadata_bytes(&self) -> usize {
        self.records.capacity() * size_of::<Block>()
    }
}
