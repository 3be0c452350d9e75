//! The bins: lists of free blocks by usable length, and two levels of bitmaps that say which are not empty.
//!
//! ```text
//!   row 0    rows: bit 0 ┐   columns[0]   one bin per length        0   1   2  …  63
//!   row 1    rows: bit 1 │   columns[1]   one bin per length       64  65  66  … 127
//!   row 2    rows: bit 2 │   columns[2]   2 lengths a bin         128 130 132  … 254
//!   row r    rows: bit r ┘   columns[r]   2^(r-1) lengths a bin   64 << (r-1)  …
//! ```
//!
//! A bin is the number `row * 64 + column`; bins ascend with the lengths that they hold. The next bin that is
//! not empty is found with two counts of trailing zeros.
//!
//! **Length of a block** is what a page-aligned request can use of it, [`usable_units`]: nearly all the bytes
//! of a segment are asked for with page alignment, and a block binned by its raw length would be found either
//! too late (up to 7 units short once aligned) or, searched for with 7 units to spare, not in the place that
//! an equal object has just left. A block that contains no whole page is a *sliver* and stands in bins 1 to
//! 7, where small requests look first.
//!
//! Invariants:
//!
//! * `floor(bin) <= usable_units(block) < floor(bin + 1)` for every block in a bin;
//! * `floor(bin + 1) - floor(bin) <= max(1, floor(bin) / 64)`;
//! * a bin's bit is set if and only if its list is not empty; a row's bit if and only if one of its bins' is.

use super::PAGE_UNITS;
use super::blocks::{Block, Blocks, NIL};

const COLUMN_BITS: u32 = 6;
const COLUMNS: u32 = 1 << COLUMN_BITS;
const ROWS: u32 = u32::BITS - COLUMN_BITS + 1;
const BINS: usize = (ROWS * COLUMNS) as usize;

const _: () = assert!(COLUMNS == u64::BITS, "a row's columns are the bits of one word");
const _: () = assert!(ROWS <= u32::BITS, "the rows are the bits of one word");

/// What a page-aligned request can use of a block; for a sliver its raw length, but at most 7.
pub(super) fn usable_units(block: &Block) -> u32 {
    let gap = block.start.wrapping_neg() % PAGE_UNITS;
    if block.units >= gap + PAGE_UNITS { block.units - gap } else { block.units.min(PAGE_UNITS - 1) }
}

/// The bin that holds blocks of this usable length.
pub(super) fn bin_of(units: u32) -> u32 {
    if units < COLUMNS {
        return units;
    }
    let shift = units.ilog2() - COLUMN_BITS;
    (shift << COLUMN_BITS) + (units >> shift)
}

/// The first bin all of whose blocks have at least this usable length. May be one past the last.
pub(super) fn bin_above(units: u32) -> u32 {
    let bin = bin_of(units);
    bin + u32::from(floor(bin) < units)
}

/// The shortest usable length of a bin.
pub(super) fn floor(bin: u32) -> u32 {
    let (row, column) = (bin >> COLUMN_BITS, bin & (COLUMNS - 1));
    if row == 0 { column } else { (COLUMNS + column) << (row - 1) }
}

#[derive(Debug)]
pub(super) struct Bins {
    rows: u32,
    columns: [u64; ROWS as usize],
    heads: Box<[u32; BINS]>,
    /// Blocks in all lists.
    count: u32,
}

impl Bins {
    pub(super) fn new() -> Self {
        Self { rows: 0, columns: [0; ROWS as usize], heads: Box::new([NIL; BINS]), count: 0 }
    }

    pub(super) fn count(&self) -> u32 {
        self.count
    }

    pub(super) fn head(&self, bin: u32) -> u32 {
        self.heads[bin as usize]
    }

    /// The first bin from `bin` on that is not empty.
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

    /// The last bin that is not empty.
    pub(super) fn last(&self) -> Option<u32> {
        let row = self.rows.checked_ilog2()?;
        Some((row << COLUMN_BITS) + self.columns[row as usize].ilog2())
    }

    /// Puts a block in front of its bin and thereby makes it free.
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
    }

    /// Takes a block out of `bin`. The caller says what becomes of it.
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
    }

    /// After a free block has changed its range: moves it from `bin` to where it belongs now. A block that
    /// stays in its bin keeps its place in the list, so that cutting slices off one long run touches no list
    /// at all.
    pub(super) fn refile(&mut self, blocks: &mut Blocks, block: u32, bin: u32) {
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
            assert_eq!(bin_of(floor(bin)), bin);
            assert_eq!(bin_above(floor(bin)), bin);
            if bin + 1 < BINS as u32 {
                let width = floor(bin + 1) - floor(bin);
                assert_eq!(bin_of(floor(bin + 1) - 1), bin);
                assert!((1..=(floor(bin) / COLUMNS).max(1)).contains(&width));
            }
        }
        assert_eq!(bin_of(u32::MAX), BINS as u32 - 1);
        assert_eq!(bin_above(u32::MAX), BINS as u32);
        assert_eq!(Bins::new().first_from(BINS as u32), None);
    }

    #[test]
    fn usable_length_is_the_aligned_part_or_the_sliver() {
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
