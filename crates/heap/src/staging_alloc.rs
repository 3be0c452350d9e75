//! [`StagingAllocator`]: allocation state of the ranges and slots of a staging segment.
//!
//! ```text
//!              alloc                      (published, killed)
//!   vacant ──────────▶ StagingChunk ──────────────────────▶ draining
//!     ▲                  │ free (never published)            │ sweep: its word is FREE
//!     └──────────────────┴───────────────────────────────────┘
//! ```
//!
//! A chunk is a range and a slot, and has one holder for both: the range is not reused before the slot is FREE, and a
//! slot is FREE only after a scan has found no ledger that pins it ([`scan`](crate::cell::scan)). So the holder of a
//! chunk has exclusive access to its bytes: a late reader either still pins the slot, and then the chunk drains, or
//! the word refuses it.
//!
//! Invariants: every slot is vacant, or in one chunk, or draining; chunks do not overlap.
#![cfg_attr(not(any(loom, shuttle)), expect(unreachable_pub, reason = "model builds show it to their tests"))]

use std::num::NonZeroU32;

use moontide_rt::mutation_enabled;
use moontide_types::record::State;
use moontide_types::{Extent, SlotId};

use crate::alloc::{Align, Allocation, Allocator};
use crate::mutation::Mutation;
use crate::word::AtomicWord;

/// A slot and its range. Not `Clone`: it is freed once.
#[derive(Debug)]
pub struct StagingChunk {
    slot: SlotId,
    allocation: Allocation,
}

impl StagingChunk {
    /// Returns the slot under which the chunk is published.
    pub fn slot(&self) -> SlotId {
        self.slot
    }

    /// Returns the range. It starts at a multiple of 4 KiB.
    pub fn extent(&self) -> Extent {
        self.allocation.extent
    }
}

/// Allocation state of one segment.
#[derive(Debug)]
pub struct StagingAllocator {
    allocator: Allocator,
    vacant: Vec<SlotId>,
    /// Published and then killed, in the order of [`StagingAllocator::drain`].
    draining: Vec<StagingChunk>,
    slots: u32,
}

impl StagingAllocator {
    /// Creates the state of an empty segment.
    pub fn new(slots: u32, units: u32) -> StagingAllocator {
        let mut allocator = Allocator::new(units);
        allocator.reserve_live(slots);
        // The lowest slot is allocated first.
        StagingAllocator {
            allocator,
            vacant: (0..slots).rev().map(SlotId).collect(),
            draining: Vec::new(),
            slots,
        }
    }

    /// Allocates a chunk of `units`. Returns `None` if no slot, or no range of this length, is vacant.
    pub fn alloc(&mut self, units: NonZeroU32) -> Option<StagingChunk> {
        let slot = *self.vacant.last()?;
        let allocation = self.allocator.alloc(units, Align::Page)?;
        self.vacant.pop();
        Some(StagingChunk { slot, allocation })
    }

    /// Frees a chunk that was never published: no other process has seen it.
    pub fn free(&mut self, chunk: StagingChunk) {
        self.allocator.free(chunk.allocation.block);
        self.vacant.push(chunk.slot);
    }

    /// Takes a chunk that was published and then killed. It becomes vacant at a [`StagingAllocator::sweep`] that
    /// finds its slot FREE.
    pub fn drain(&mut self, chunk: StagingChunk) {
        self.draining.push(chunk);
    }

    /// Frees the chunks that have drained, and returns their number. `word` returns the word of a slot. Only the
    /// holder of a chunk begins in its slot, so the slot of a draining chunk remains FREE. The load of the word is an
    /// Acquire, which pairs with the Release of its freeing: reads of the last reader happen before writes of the
    /// next holder.
    pub fn sweep<'w>(&mut self, word: impl Fn(SlotId) -> &'w AtomicWord) -> usize {
        let is_free = |chunk: &mut StagingChunk| {
            word(chunk.slot).load().state() == State::Free
                || mutation_enabled(Mutation::ChunkReusedWhilePinned)
        };
        let drained: Vec<StagingChunk> = self.draining.extract_if(.., is_free).collect();
        let count = drained.len();
        drained.into_iter().for_each(|chunk| self.free(chunk));
        count
    }

    /// Returns the number of vacant units.
    pub fn free_units(&self) -> u32 {
        self.allocator.stats().free_units
    }

    /// Returns the number of allocated chunks, published or not.
    pub fn allocated(&self) -> usize {
        self.slots as usize - self.vacant.len() - self.draining.len()
    }

    /// Returns the number of chunks that were killed and not yet swept.
    pub fn draining(&self) -> usize {
        self.draining.len()
    }
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;
    use moontide_types::Epoch;
    use moontide_types::record::Word;

    fn units(units: u32) -> NonZeroU32 {
        NonZeroU32::new(units).unwrap()
    }

    #[test]
    fn staging_alloc_fails_when_slots_or_units_run_out() {
        let mut chunks = StagingAllocator::new(2, 64);
        let first = chunks.alloc(units(8)).unwrap();
        assert!(chunks.alloc(units(64)).is_none(), "no range of 64 units is vacant");
        assert_eq!((chunks.allocated(), chunks.free_units()), (1, 56), "a failed allocation changes nothing");
        let second = chunks.alloc(units(8)).unwrap();
        assert!(chunks.alloc(units(8)).is_none(), "no slot is vacant");
        assert_ne!(first.slot(), second.slot());
        assert_ne!(first.extent(), second.extent());
        chunks.free(first);
        assert!(chunks.alloc(units(8)).is_some());
    }

    #[test]
    fn draining_chunk_is_reused_only_after_its_word_is_free() {
        let word = AtomicWord::new(Word::new(Epoch::from_bits(3).unwrap(), State::Dead));
        let mut chunks = StagingAllocator::new(1, 8);
        let chunk = chunks.alloc(units(8)).unwrap();
        chunks.drain(chunk);
        assert_eq!((chunks.sweep(|_| &word), chunks.allocated(), chunks.draining()), (0, 0, 1));
        assert!(chunks.alloc(units(8)).is_none());
        assert!(word.free(Epoch::from_bits(3).unwrap()).succeeded());
        assert_eq!((chunks.sweep(|_| &word), chunks.draining(), chunks.free_units()), (1, 0, 8));
        assert!(chunks.alloc(units(8)).is_some());
    }
}
