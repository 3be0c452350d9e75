//! Naive model: a map of live extents, from which everything else follows, compared after every step.
//!
//! It owns one [`Allocator`] and one [`ExtentMap`], applies each step to both, and panics at the first difference. It
//! checks, with `live` its map and `runs` the gaps between its entries:
//!
//! * `free_runs() == runs`: hence no overlap, no leak, and every merge is done;
//! * `live_units + free_units == capacity_units`, `free_blocks <= live_blocks + 1`;
//! * `largest_run_units <= longest <= largest_run_units * 65 / 64`;
//! * an allocation has the requested length and alignment, and is free in the map; its tag does not change;
//! * a failed allocation: with at most 256 runs, none of them fits; always, `max(units, 8) > longest * 64 / 65`;
//! * a rebuild from `live` has the same runs.

use std::collections::BTreeMap;
use std::num::NonZeroU32;

use moontide_heap::alloc::{Align, Allocator, BlockRef, ClaimError, ExtentMap, PAGE_UNITS};
use moontide_types::Extent;

/// One step. A block is selected by its rank in address order, modulo the number of blocks; a step that needs a block
/// is skipped while there is none.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    /// Allocate a range.
    Alloc {
        /// Length of the range.
        units: NonZeroU32,
        /// Alignment of the range.
        align: Align,
    },
    /// Free a block.
    Free {
        /// Rank of the block.
        rank: u32,
    },
    /// Set the tag of a block.
    Tag {
        /// Rank of the block.
        rank: u32,
        /// New tag.
        tag: u32,
    },
    /// Claim a range in the map that the allocator has not allocated.
    Claim {
        /// Claimed range.
        extent: Extent,
    },
    /// Continue with an allocator that is rebuilt from the live extents.
    Rebuild,
}

struct Live {
    units: u32,
    block: BlockRef,
    tag: u32,
}

/// An allocator, a map, and their expected state.
pub(crate) struct Model {
    capacity_units: u32,
    allocator: Allocator,
    map: ExtentMap,
    live: BTreeMap<u32, Live>,
}

impl Model {
    /// Creates a model in which everything is free.
    pub(crate) fn new(capacity_units: u32) -> Self {
        let (allocator, map) = (Allocator::new(capacity_units), ExtentMap::new(capacity_units));
        Self { capacity_units, allocator, map, live: BTreeMap::new() }
    }

    /// Applies a step and compares.
    pub(crate) fn step(&mut self, op: Op) {
        self.step_unchecked(op);
        self.compare();
    }

    /// Applies a step without comparing; for the setup of a test.
    pub(crate) fn step_unchecked(&mut self, op: Op) {
        match op {
            Op::Alloc { units, align } => self.alloc(units, align),
            Op::Free { rank } => self.free(rank),
            Op::Tag { rank, tag } => self.tag(rank, tag),
            Op::Claim { extent } => self.claim(extent),
            Op::Rebuild => self.rebuild(),
        }
    }

    /// Frees everything, from the lowest address to the highest, and expects one free run.
    pub(crate) fn finish(mut self) {
        while !self.live.is_empty() {
            self.free(0);
        }
        self.compare();
        assert!(self.allocator.free_runs().eq(self.runs()));
        assert_eq!(self.allocator.stats().free_blocks, u32::from(self.capacity_units > 0));
        assert_eq!(self.map.claimed_units(), 0);
    }

    fn alloc(&mut self, units: NonZeroU32, align: Align) {
        let runs = self.runs();
        let fits = |run: &Extent| aligned_units(*run, align) >= units.get();
        let Some(allocation) = self.allocator.alloc(units, align) else {
            assert!(
                runs.len() > 256 || !runs.iter().any(fits),
                "allocation of {units} units failed though they fit"
            );
            let longest = u64::from(longest_page_run(&runs));
            assert!(
                u64::from(units.get().max(PAGE_UNITS)) * 65 > longest * 64,
                "allocation of {units} of {longest} units failed"
            );
            return;
        };
        let extent = allocation.extent;
        assert_eq!(extent.units, units.get());
        assert!(align == Align::Unit || extent.start.is_multiple_of(PAGE_UNITS), "{extent} is not aligned");
        assert!(runs.iter().any(|run| run.start <= extent.start && extent.end() <= run.end()));
        assert_eq!(self.allocator.tag(allocation.block), 0);
        assert!(self.map.is_free(extent));
        self.map.try_claim(extent).expect("the allocator returns only free ranges");
        // Derived from the range, so that a tag that moved to another block is detected.
        let tag = extent.start ^ 0x5a5a_5a5a;
        self.allocator.set_tag(allocation.block, tag);
        self.live.insert(extent.start, Live { units: extent.units, block: allocation.block, tag });
    }

    fn free(&mut self, rank: u32) {
        let Some(start) = self.start_of(rank) else { return };
        let Live { units, block, tag } = self.live.remove(&start).expect("a live block");
        let extent = Extent { start, units };
        assert_eq!(self.allocator.tag(block), tag);
        assert_eq!(self.allocator.extent(block), extent);
        assert_eq!(self.allocator.free(block), extent);
        assert!(!self.map.is_free(extent));
        self.map.release(extent);
        assert!(self.map.is_free(extent));
    }

    fn tag(&mut self, rank: u32, tag: u32) {
        let Some(start) = self.start_of(rank) else { return };
        let live = self.live.get_mut(&start).expect("a live block");
        live.tag = tag;
        self.allocator.set_tag(live.block, tag);
    }

    fn claim(&mut self, extent: Extent) {
        let taken = self.live.iter().map(|(&start, live)| Extent { start, units: live.units });
        let overlap =
            taken.filter(|live| u64::from(live.start) < extent.end() && u64::from(extent.start) < live.end());
        let first_taken = overlap.map(|live| live.start.max(extent.start)).next();
        let capacity_units = self.capacity_units;
        let expected = if extent.units == 0 {
            Err(ClaimError::Empty { extent })
        } else if extent.end() > u64::from(capacity_units) {
            Err(ClaimError::OutOfRange { extent, capacity_units })
        } else {
            first_taken
                .map_or(Ok(()), |first_taken_unit| Err(ClaimError::Overlap { extent, first_taken_unit }))
        };
        assert_eq!(self.map.is_free(extent), expected.is_ok());
        assert_eq!(self.map.try_claim(extent), expected);
        if expected.is_ok() {
            self.map.release(extent);
        }
    }

    fn rebuild(&mut self) {
        // Not in address order: every other extent first.
        let starts: Vec<u32> = self.live.keys().copied().collect();
        let starts: Vec<u32> =
            starts.iter().step_by(2).chain(starts.iter().skip(1).step_by(2)).copied().collect();
        let extents: Vec<Extent> =
            starts.iter().map(|&start| Extent { start, units: self.live[&start].units }).collect();
        let (mut allocator, blocks) =
            Allocator::rebuild(self.capacity_units, &extents).expect("disjoint extents");
        for (start, block) in starts.into_iter().zip(blocks) {
            let live = self.live.get_mut(&start).expect("a live block");
            live.block = block;
            allocator.set_tag(block, live.tag);
        }
        self.allocator = allocator;
    }

    fn compare(&self) {
        let runs = self.runs();
        assert!(self.allocator.free_runs().eq(runs.iter().copied()), "the free runs should be {runs:?}");
        let live_units: u32 = self.live.values().map(|live| live.units).sum();
        let stats = self.allocator.stats();
        assert_eq!(stats.capacity_units, self.capacity_units);
        assert_eq!(stats.free_units + live_units, self.capacity_units);
        assert_eq!(stats.live_blocks as usize, self.live.len());
        assert_eq!(stats.free_blocks as usize, runs.len());
        assert!(stats.free_blocks <= stats.live_blocks + 1);
        let slivers = runs.iter().filter(|run| longest_page_run(&[**run]) == 0);
        let sliver_units: u32 = slivers.map(|run| run.units.min(7)).sum();
        assert_eq!(self.allocator.sliver_units(), sliver_units);
        let page_blocks = self.live.values().filter(|live| live.units >= PAGE_UNITS).count();
        assert_eq!(self.allocator.page_blocks() as usize, page_blocks);
        let (longest, largest) = (u64::from(longest_page_run(&runs)), u64::from(stats.largest_run_units));
        if longest > 0 {
            assert!(largest <= longest && longest * 64 <= largest * 65, "{largest} for {longest}");
        }
        assert_eq!(self.map.claimed_units(), live_units);
        for (&start, live) in &self.live {
            assert_eq!(self.allocator.extent(live.block), Extent { start, units: live.units });
            assert_eq!(self.allocator.tag(live.block), live.tag);
        }
    }

    /// Returns the gaps between the live extents.
    fn runs(&self) -> Vec<Extent> {
        let border = (self.capacity_units, 0);
        let live = self.live.iter().map(|(&start, live)| (start, live.units)).chain([border]);
        let mut at = 0;
        let gaps = live.map(|(start, units)| {
            let gap = Extent { start: at, units: start - at };
            at = start + units;
            gap
        });
        gaps.filter(|gap| gap.units > 0).collect()
    }

    fn start_of(&self, rank: u32) -> Option<u32> {
        let rank = (rank as usize).checked_rem(self.live.len())?;
        self.live.keys().nth(rank).copied()
    }
}

/// Returns the usable length of a run from its first aligned start.
fn aligned_units(run: Extent, align: Align) -> u32 {
    match align {
        Align::Unit => run.units,
        Align::Page => run.end().saturating_sub(u64::from(run.start.next_multiple_of(PAGE_UNITS))) as u32,
    }
}

/// Returns the length of the longest page-aligned run of at least a page; 0 if no run contains a page.
fn longest_page_run(runs: &[Extent]) -> u32 {
    let usable = runs.iter().map(|&run| aligned_units(run, Align::Page));
    usable.filter(|&units| units >= PAGE_UNITS).max().unwrap_or(0)
}
