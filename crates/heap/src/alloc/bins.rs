//! [`Bins`]: lists of free blocks by usable length, and two levels of bitmaps of the non-empty ones.
//!
//! ```text
//!   row 0    rows: bit 0 ┐   columns[0]   one bin per length        0   1   2  …  63
//!   row 1    rows: bit 1 │   columns[1]   one bin per length       64  65  66  … 127
//!   row 2    rows: bit 2 │   columns[2]   2 lengths a bin         128 130 132  … 254
//!   row r    rows: bit r ┘   columns[r]   2^(r-1) lengths a bin   64 << (r-1)  …
//! ```
//!
//! A bin is the number `row * 64 + column`; bins ascend with the lengths that they hold. Two counts of trailing zeros
//! find the next non-empty bin.
//!
//! **The length of a block** is the part that a page-aligned request can use, [`usable_units`]: nearly all bytes of a
//! segment are requested with page alignment. A block binned by its raw length would be found either too late (up to
//! 7 units short after alignment) or, if the search adds 7 units, not at the gap that an equal object has just left.
//! A block that contains no whole page is a *sliver* and is in bins 1 to 7, where small requests search first.
//!
//! Invariants:
//!
//! * `min_units(bin) <= usable_units(block) < min_units(bin + 1)` for every block in a bin;
//! * `min_units(bin + 1) - min_units(bin) <= max(1, min_units(bin) / 64)`;
//! * a bin's bit is set if and only if its list is not empty; a row's bit if and only if one of its bins' is.

use super::PAGE_UNITS;
use super::blocks::{Block, Blocks, NIL};

const COLUMN_BITS: u32 = 6;
const COLUMNS: u32 = 1 << COLUMN_BITS;
const ROWS: u32 = u32::BITS - COLUMN_BITS + 1;
const BINS: usize = (ROWS * COLUMNS) as usize;

const _: () = assert!(COLUMNS == u64::BITS, "a row's columns are the bits of one word");
const _: () = assert!(ROWS <= u32::BITS, "the rows are the bits of one word");

/// Returns the units of a block that a page-aligned request can use; for a sliver its raw length, at most 7.
pub(super) fn usable_units(block: &Block) -> u32 {
    let gap = block.start.wrapping_neg() % PAGE_UNITS;
    if block.units >= gap + PAGE_UNITS { block.units - gap } else { block.units.min(PAGE_UNITS - 1) }
}

/// Returns the bin of blocks with this usable length.
pub(super) fn bin_of(units: u32) -> u32 {
    if units < COLUMNS {
        return units;
    }
    let shift = units.ilog2() - COLUMN_BITS;
    (shift << COLUMN_BITS) + (units >> shift)
}

/// Returns the first bin all of whose blocks have at least this usable length. May be one past the last.
pub(super) fn bin_above(units: u32) -> u32 {
    let bin = bin_of(units);
    bin + u32::from(min_units(bin) < units)
}

/// Returns the shortest usable length of a bin.
pub(super) fn min_units(bin: u32) -> u32 {
    let (row, column) = (bin >> COLUMN_BITS, bin & (COLUMNS - 1));
    if row == 0 { column } else { (COLUMNS + column) << (row - 1) }
}

/// Returns the units of a block in this bin if it is a sliver, otherwise 0.
fn sliver_units_of(bin: u32) -> u32 {
    if bin < PAGE_UNITS { min_units(bin) } else { 0 }
}

#[derive(Debug)]
pub(super) struct Bins {
    rows: u32,
    columns: [u64; ROWS as usize],
    heads: Box<[u32; BINS]>,
    /// Blocks in all lists.
    count: u32,
    /// Sum of [`usable_units`] of the slivers.
    sliver_units: u32,
}

impl Bins {
    pub(super) fn new() -> Self {
        Self { rows: 0, columns: [0; ROWS as usize], heads: Box::new([NIL; BINS]), count: 0, sliver_units: 0 }
    }

    pub(super) fn count(&self) -> u32 {
        self.count
    }

    pub(super) fn sliver_units(&self) -> u32 {
        self.sliver_units
    }

    pub(super) fn head(&self, bin: u32) -> u32 {
        self.heads[bin as usize]
    }

    /// Returns the first non-empty bin that is at least `bin`.
    pub(super) fn first_from(&self, bin: u32) -> Option<u32> {
        let (row, column) = (bin >> COLUMN_BITS, bin & (COLUMNS - 1));
        if row >= ROWS {
            return None;
        }
        let here = self.columns[row as usize] & (!0 << column);
        if here != 0 {
            return Some((row << COLUMN_BITS) + here.trailing_zeros());
        }
        // Two shifts, because row + 1 may be the width of the word.
        let above = self.rows >> row >> 1 << row << 1;
        if above == 0 {
            return None;
        }
        let row = above.trailing_zeros();
        Some((row << COLUMN_BITS) + self.columns[row as usize].trailing_zeros())
    }

    /// Returns the last non-empty bin.
    pub(super) fn last(&self) -> Option<u32> {
        let row = self.rows.checked_ilog2()?;
        Some((row << COLUMN_BITS) + self.columns[row as usize].ilog2())
    }

    /// Inserts a block at the head of its bin, which makes it free.
    pub(super) fn insert(&mut self, blocks: &mut Blocks, block: u32) {
        let record = blocks.get_mut(block);
        let bin = bin_of(usable_units(record));
        let head = self.heads[bin as usize];
        record.link = head;
        record.back = NIL;
        if head != NIL {
            blocks.get_mut(head).back = block;
        } else {
            self.columns[(bin >> COLUMN_BITS) as usize] |= 1 << (bin & (COLUMNS - 1));
            self.rows |= 1 << (bin >> COLUMN_BITS);
        }
        self.heads[bin as usize] = block;
        self.count += 1;
        self.sliver_units += sliver_units_of(bin);
    }

    /// Removes a block from `bin`. The caller sets its new state.
    pub(super) fn remove(&mut self, blocks: &mut Blocks, block: u32, bin: u32) {
        let &Block { link, back, .. } = blocks.get(block);
        if link != NIL {
            blocks.get_mut(link).back = back;
        }
        if back != NIL {
            blocks.get_mut(back).link = link;
        } else {
            debug_assert_eq!(self.heads[bin as usize], block);
            self.heads[bin as usize] = link;
            if link == NIL {
                let columns = &mut self.columns[(bin >> COLUMN_BITS) as usize];
                *columns &= !(1 << (bin & (COLUMNS - 1)));
                if *columns == 0 {
                    self.rows &= !(1 << (bin >> COLUMN_BITS));
                }
            }
        }
        self.count -= 1;
        self.sliver_units -= sliver_units_of(bin);
    }

    /// Moves a free block, whose range has changed, from `bin` to the bin of its new length. A block that remains in
    /// its bin keeps its position in the list, so that repeated splits of one long run touch no list at all.
    pub(super) fn move_block(&mut self, blocks: &mut Blocks, block: u32, bin: u32) {
        if bin_of(usable_units(blocks.get(block))) != bin {
            self.remove(blocks, block, bin);
            self.insert(blocks, block);
        }
    }

    pub(super) fn metadata_bytes(&self) -> usize {
        size_of_val(&*self.heads)
    }
}

#[cfg(test)]
mod tests {
    use moontide_types::Extent;

    use super::*;

    #[test]
    fn bins_ascend_without_gaps_and_are_narrow() {
        for bin in 0..BINS as u32 {
            assert_eq!(bin_of(min_units(bin)), bin);
            assert_eq!(bin_above(min_units(bin)), bin);
            if bin + 1 < BINS as u32 {
                let width = min_units(bin + 1) - min_units(bin);
                assert_eq!(bin_of(min_units(bin + 1) - 1), bin);
                assert!((1..=(min_units(bin) / COLUMNS).max(1)).contains(&width));
            }
        }
        assert_eq!(bin_of(u32::MAX), BINS as u32 - 1);
        assert_eq!(bin_above(u32::MAX), BINS as u32);
        assert_eq!(Bins::new().first_from(BINS as u32), None);
    }

    #[test]
    fn usable_units_is_page_aligned_part_or_sliver_length() {
        let check = |start, units, usable| {
            let mut blocks = Blocks::new(1);
            let block = blocks.insert_between(NIL, NIL, Extent { start, units });
            assert_eq!(usable_units(blocks.get(block)), usable, "start {start}, {units} units");
        };
        check(0, 8, 8);
        check(0, 7, 7);
        check(1, 14, 7);
        check(1, 15, 8);
        check(7, 9, 8);
        check(5, 2, 2);
        check(5, 100, 97);
    }
}
