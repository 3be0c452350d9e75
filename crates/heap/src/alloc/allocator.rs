//! [`Allocator`]: selects the range for an object.
//!
//! A two-level segregated fit over block records that are stored outside of the memory that they describe. `alloc`
//! probes
//!
//! ```text
//!   1  PROBE_SHORT_MAX blocks of the bins where some blocks fit and some do not   finds the gap of an equal object
//!   2  the first non-empty bin all of whose blocks fit                            the tightest such bin
//!   3  PROBE_LONG_MAX blocks of the bins of step 1                                last attempt before failing
//! ```
//!
//! and splits exactly: the units before and after the allocation are free at once. `free` merges with free neighbours
//! at once. Both take a bounded number of steps, whatever the number of blocks (except for growth of the slab, see
//! [`Allocator::reserve_live`]).
//!
//! Invariants:
//!
//! * `live_units + free_units == capacity_units`;
//! * `allocation.extent.units` is exactly the requested number;
//! * with [`Align::Page`], `allocation.extent.start % 8 == 0`;
//! * free runs are maximal: no two are adjacent.

use std::hint::black_box;
use std::num::NonZeroU32;

use super::bins::{Bins, bin_above, bin_of, usable_units};
use super::blocks::{Block, BlockRef, Blocks, CAPACITY_UNITS_MAX, NIL};
use moontide_types::Extent;

use super::PAGE_UNITS;

/// Blocks probed for a tight fit before a block of a larger bin is split. Each probe may be a cache miss.
const PROBE_SHORT_MAX: u32 = 8;

/// Blocks probed before an allocation fails: at most 256 cache misses, some tens of microseconds, when the caller's
/// next step is to evict.
const PROBE_LONG_MAX: u32 = 256;

/// Blocks whose records [`Allocator::free_all`] prefetches at a time: 16 * 3 lines are 3 KiB, which are still in the
/// first-level cache when they are used.
const WARM_MAX: usize = 16;

/// Requests below this fraction of the segment are cut from the upper end of a run, others from the lower end. Large
/// and small objects then accumulate at different ends of the free runs, and long runs survive longer. With KV sizes
/// of 64 KiB to 16 MiB in 1 GiB, churned at 85 % full, 0.3 % of the requests fail instead of 0.5 %. The fraction
/// matters little: 1/512 gave 0.3 % too, 1/4096 gave 0.4 %.
const SMALL_FRACTION: u32 = 1024;

/// Alignment of an extent's start.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Align {
    /// Any unit.
    Unit,
    /// A multiple of 8 units, 4 KiB.
    Page,
}

impl Align {
    /// Returns the first aligned start that is at least `start`. Saturates: no block reaches the last units of `u32`.
    fn first_from(self, start: u32) -> u32 {
        match self {
            Align::Unit => start,
            Align::Page => start.saturating_add(start.wrapping_neg() % PAGE_UNITS),
        }
    }

    /// Returns the last aligned start that is at most `start`.
    fn last_until(self, start: u32) -> u32 {
        match self {
            Align::Unit => start,
            Align::Page => start - start % PAGE_UNITS,
        }
    }
}

/// An allocated range.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Allocation {
    /// Handle for freeing the range.
    pub block: BlockRef,
    /// Allocated range, exactly as long as requested.
    pub extent: Extent,
}

/// Statistics of one [`Allocator`]. `free_units <= capacity_units`, `free_blocks <= live_blocks + 1`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct AllocStats {
    /// Length of the segment in units.
    pub capacity_units: u32,
    /// Units that are not allocated.
    pub free_units: u32,
    /// Number of allocations.
    pub live_blocks: u32,
    /// Number of free runs.
    pub free_blocks: u32,
    /// Longest page-aligned free run in units, from a bounded number of probes in the bin of the longest runs:
    /// `largest_run_units <= longest <= largest_run_units * 65 / 64`. Exact while that bin holds up to 256 runs. If
    /// no run contains a whole page, the length of the longest one, at most 7.
    pub largest_run_units: u32,
    /// Memory used by the block records and bins.
    pub metadata_bytes: usize,
}

/// Allocator of the ranges of one segment. Pure bookkeeping; touches no memory of the segment.
#[derive(Debug)]
pub struct Allocator {
    blocks: Blocks,
    bins: Bins,
    capacity_units: u32,
    free_units: u32,
    /// Live blocks of a page or more.
    page_blocks: u32,
}

/// Bins in which a request may find a block.
struct BinRange {
    /// First bin in which some block may fit.
    maybe: u32,
    /// First bin in which every block fits.
    sure: u32,
}

impl BinRange {
    fn new(units: u32, align: Align) -> Self {
        match align {
            Align::Page if units < PAGE_UNITS => BinRange { maybe: units, sure: PAGE_UNITS },
            Align::Page => BinRange { maybe: bin_of(units), sure: bin_above(units) },
            // Bins 1 to 7 are by raw length, all of which a small request can use.
            Align::Unit if units < PAGE_UNITS => BinRange { maybe: units, sure: units },
            // A run of `units` may be up to 7 units shorter after alignment, or be a sliver.
            Align::Unit => BinRange {
                maybe: bin_of((units - (PAGE_UNITS - 1)).max(PAGE_UNITS - 1)),
                sure: bin_above(units),
            },
        }
    }
}

impl Allocator {
    /// Creates an allocator with all of `capacity_units` free, in one run.
    ///
    /// # Panics
    /// If `capacity_units` exceeds 2^32 - 3 (2 TiB).
    pub fn new(capacity_units: u32) -> Self {
        let mut allocator = Self::empty(capacity_units, 0);
        allocator.append_free_until(capacity_units);
        allocator
    }

    /// Reserves block records for `live_max` allocations. Up to that number no `alloc` or `free` grows the slab,
    /// because there is at most one free run more than there are allocations.
    pub fn reserve_live(&mut self, live_max: u32) {
        self.blocks.reserve(2 * live_max as usize + 1);
    }

    /// Allocates exactly `units`.
    ///
    /// Returns `None` if no free run fits, or if every run that fits comes after more than 256 blocks of about its
    /// own length. In particular, with `longest` the longest page-aligned free run, `max(units, 8) <= longest * 64 /
    /// 65` never fails.
    pub fn alloc(&mut self, units: NonZeroU32, align: Align) -> Option<Allocation> {
        let units = units.get();
        let range = BinRange::new(units, align);
        let block = self
            .probe(&range, units, align, PROBE_SHORT_MAX)
            .or_else(|| self.bins.first_from(range.sure).map(|bin| self.bins.head(bin)))
            .or_else(|| self.probe(&range, units, align, PROBE_LONG_MAX))?;
        Some(self.split(block, units, align))
    }

    /// Frees a range and returns it.
    ///
    /// # Panics
    /// If `block` is not live. A block that was freed and whose number is in use again cannot be distinguished.
    pub fn free(&mut self, block: BlockRef) -> Extent {
        let &record = self.blocks.live(block);
        let (block, prev, next) = (block.0, record.prev, record.next);
        self.free_units += record.units;
        self.page_blocks -= u32::from(record.units >= PAGE_UNITS);

        // A free neighbour absorbs the block and keeps its own record, so that it often keeps its position in its bin
        // too. The records of live neighbours are only written, not read.
        match (record.before_free, record.after_free) {
            (false, false) => {
                self.bins.insert(&mut self.blocks, block);
                self.blocks.set_free_between(prev, next, true);
            }
            (true, false) => {
                let bin = bin_of(usable_units(self.blocks.get(prev)));
                let merged = self.blocks.get_mut(prev);
                merged.units += record.units;
                merged.next = next;
                let after = self.blocks.get_mut(next);
                after.prev = prev;
                after.before_free = true;
                self.blocks.vacate(block);
                self.bins.move_block(&mut self.blocks, prev, bin);
            }
            (false, true) => {
                let bin = bin_of(usable_units(self.blocks.get(next)));
                let merged = self.blocks.get_mut(next);
                merged.start = record.start;
                merged.units += record.units;
                merged.prev = prev;
                let before = self.blocks.get_mut(prev);
                before.next = next;
                before.after_free = true;
                self.blocks.vacate(block);
                self.bins.move_block(&mut self.blocks, next, bin);
            }
            (true, true) => {
                let &after = self.blocks.get(next);
                let bin = bin_of(usable_units(self.blocks.get(prev)));
                self.bins.remove(&mut self.blocks, next, bin_of(usable_units(&after)));
                let merged = self.blocks.get_mut(prev);
                merged.units += record.units + after.units;
                merged.next = after.next;
                self.blocks.get_mut(after.next).prev = prev;
                self.blocks.vacate(next);
                self.blocks.vacate(block);
                self.bins.move_block(&mut self.blocks, prev, bin);
            }
        }
        record.extent()
    }

    /// Frees many blocks, in order. With millions of scattered blocks a single `free` waits for two cache misses in
    /// sequence: the record, then its neighbours. This function overlaps the misses of 16 blocks.
    ///
    /// # Panics
    /// As [`free`](Self::free); some of the blocks have been freed then.
    pub fn free_all(&mut self, blocks: &[BlockRef], mut freed: impl FnMut(BlockRef, Extent)) {
        for chunk in blocks.chunks(WARM_MAX) {
            let prefetch =
                |record: &Block| self.blocks.get(record.prev).back ^ self.blocks.get(record.next).back;
            let loaded = chunk.iter().map(|&block| prefetch(self.blocks.live(block)));
            // Only the loads matter; `black_box` keeps the compiler from removing them.
            black_box(loaded.fold(0, |all, one| all ^ one));
            for &block in chunk {
                freed(block, self.free(block));
            }
        }
    }

    /// Returns the range of a live block.
    pub fn extent(&self, block: BlockRef) -> Extent {
        self.blocks.live(block).extent()
    }

    /// Returns the caller's tag of a live block; 0 after allocation.
    pub fn tag(&self, block: BlockRef) -> u32 {
        self.blocks.live(block).link
    }

    /// Sets the caller's tag of a live block.
    pub fn set_tag(&mut self, block: BlockRef, tag: u32) {
        self.blocks.live(block);
        self.blocks.get_mut(block.0).link = tag;
    }

    /// Returns the free units of runs without a whole page, which only blocks below a page can use. A run counts at most 7
    /// units.
    pub fn sliver_units(&self) -> u32 {
        self.bins.sliver_units()
    }

    /// Returns the number of allocations of a page or more.
    pub fn page_blocks(&self) -> u32 {
        self.page_blocks
    }

    /// Returns statistics for metrics and for the selection of a segment.
    pub fn stats(&self) -> AllocStats {
        let largest_run_units = self.bins.last().map_or(0, |bin| {
            let usable = self
                .list(bin)
                .take(PROBE_LONG_MAX as usize)
                .map(|block| usable_units(self.blocks.get(block)));
            usable.max().unwrap_or(0)
        });
        AllocStats {
            capacity_units: self.capacity_units,
            free_units: self.free_units,
            live_blocks: self.blocks.count() - self.bins.count(),
            free_blocks: self.bins.count(),
            largest_run_units,
            metadata_bytes: size_of::<Self>() + self.blocks.metadata_bytes() + self.bins.metadata_bytes(),
        }
    }

    /// Iterates over the free runs in address order. Visits all blocks.
    pub fn free_runs(&self) -> impl Iterator<Item = Extent> {
        self.blocks.in_order().filter(|(_, block)| block.is_free()).map(|(_, block)| block.extent())
    }

    /// Returns the tightest fit among the first `probes_max` blocks of the bins that hold fitting and other blocks.
    fn probe(&self, range: &BinRange, units: u32, align: Align, probes_max: u32) -> Option<u32> {
        let mut left = probes_max;
        let mut best: Option<(u32, u32)> = None;
        let mut from = range.maybe;
        while let Some(bin) = self.bins.first_from(from).filter(|&bin| bin < range.sure) {
            for block in self.list(bin) {
                if left == 0 {
                    return best.map(|(_, block)| block);
                }
                left -= 1;
                let record = self.blocks.get(block);
                let fits =
                    u64::from(align.first_from(record.start)) + u64::from(units) <= record.extent().end();
                if fits && best.is_none_or(|(tightest, _)| record.units < tightest) {
                    best = Some((record.units, block));
                }
            }
            from = bin + 1;
        }
        best.map(|(_, block)| block)
    }

    fn list(&self, bin: u32) -> impl Iterator<Item = u32> {
        let head = self.bins.head(bin);
        std::iter::successors(Some(head), |&block| Some(self.blocks.get(block).link))
            .take_while(|&block| block != NIL)
    }

    /// Allocates `units` from a free block that fits, and splits the block.
    fn split(&mut self, block: u32, units: u32, align: Align) -> Allocation {
        let &record = self.blocks.get(block);
        let bin = bin_of(usable_units(&record));
        let end = record.start + record.units;
        let small = units < self.capacity_units / SMALL_FRACTION;
        let start = if small { align.last_until(end - units) } else { align.first_from(record.start) };
        let extent = Extent { start, units };
        let front = Extent { start: record.start, units: start - record.start };
        let rest = Extent { start: start + units, units: end - (start + units) };
        self.free_units -= units;
        self.page_blocks += u32::from(units >= PAGE_UNITS);

        // The free record remains with the larger remainder; the live block gets a new record.
        let live = if front.units == 0 && rest.units == 0 {
            self.bins.remove(&mut self.blocks, block, bin);
            self.blocks.set_live(block);
            self.blocks.set_free_between(record.prev, record.next, false);
            block
        } else if front.units <= rest.units {
            self.blocks.set_extent(block, rest);
            let live = self.blocks.insert_between(record.prev, block, extent);
            self.blocks.get_mut(live).after_free = true;
            self.insert_free_between(record.prev, live, front);
            self.bins.move_block(&mut self.blocks, block, bin);
            live
        } else {
            self.blocks.set_extent(block, front);
            let live = self.blocks.insert_between(block, record.next, extent);
            self.blocks.get_mut(live).before_free = true;
            self.insert_free_between(live, record.next, rest);
            self.bins.move_block(&mut self.blocks, block, bin);
            live
        };
        Allocation { block: BlockRef(live), extent }
    }

    /// Inserts a free block between two live ones, unless it would be empty, and updates their flags.
    fn insert_free_between(&mut self, prev: u32, next: u32, extent: Extent) {
        if extent.units > 0 {
            let block = self.blocks.insert_between(prev, next, extent);
            self.bins.insert(&mut self.blocks, block);
        }
        self.blocks.set_free_between(prev, next, extent.units > 0);
    }

    /// Creates an allocator without any block: the caller must fill it with the `append_*` functions below.
    pub(super) fn empty(capacity_units: u32, blocks_expected: usize) -> Self {
        assert!(
            capacity_units <= CAPACITY_UNITS_MAX,
            "{capacity_units} units exceed the maximum of {CAPACITY_UNITS_MAX} units of a segment"
        );
        let blocks = Blocks::new(blocks_expected);
        Self { blocks, bins: Bins::new(), capacity_units, free_units: 0, page_blocks: 0 }
    }

    /// Appends a free run from the end of the last block to `end`, if it is not empty.
    pub(super) fn append_free_until(&mut self, end: u32) {
        let last = self.blocks.get(NIL).prev;
        let start = self.blocks.get(last).extent().end() as u32;
        if start < end {
            self.insert_free_between(last, NIL, Extent { start, units: end - start });
            self.free_units += end - start;
        }
    }

    /// Appends a live block. `extent` must start where the last block ends.
    pub(super) fn append_live(&mut self, extent: Extent) -> BlockRef {
        let last = self.blocks.get(NIL).prev;
        let &before = self.blocks.get(last);
        assert_eq!(before.extent().end(), u64::from(extent.start));
        let live = self.blocks.insert_between(last, NIL, extent);
        self.page_blocks += u32::from(extent.units >= PAGE_UNITS);
        self.blocks.get_mut(live).before_free = before.is_free();
        self.blocks.get_mut(NIL).before_free = false;
        BlockRef(live)
    }
}
