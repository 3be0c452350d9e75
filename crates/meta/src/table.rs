//! The table from an [`ObjectId`] to the reference of its record: extendible hashing in pages of 4 KiB.
//!
//! It owns references only. Records live elsewhere and hold the whole id; an entry keeps 32 bits of it, so a
//! match here is a strong hint (at 10^7 entries one lookup in 10^4 meets a stranger) and the record decides.
//! There are no locks: whoever owns the table is its only user.
//!
//! ```text
//!  63                            32 31              6 5      0   hash = the upper 64 bits of the id; the lower
//! +--------------------------------+-----------------+--------+   ones choose the group, so that within one
//! |            fragment            |     unused      |  line  |   they are not uniform
//! +--------------------------------+-----------------+--------+
//!   top `depth` bits: directory slot; low 6 bits: distance between the two lines
//!
//! directory  [page number; 2^depth]           all slots that begin with a page's prefix name that page
//! page       [line; 64]                       4 KiB
//! line       [fragment; 8] [reference + 1; 8]   64 bytes, one cache line; 0 for an empty slot
//! ```
//!
//! An entry stands in one of two lines, `line` or `line ^ distance`. The distance comes from the fragment,
//! which the entry holds, so an entry can be moved to its other line, to another page, or back, without its
//! record being read: a split is one pass over 4 KiB, and a full line gives way by moving one entry aside.
//!
//! Growth and shrinking go page by page: a page that cannot take an entry is split in two, one that has become
//! poor is merged with its buddy. Only what is kept for each page (the directory and [`PageInfo`]s, less than 20
//! bytes beside its 4096) is ever copied as a whole, once per doubling: 0.1 ms at 10^7 entries.
//!
//! All pages fill at the same pace and so split at about the same time. An entry takes 9.3 to 15.3 bytes,
//! depending on how far the table is from its next doubling; 12 on average.
//!
//! Invariants:
//!
//! ```text
//! directory.len() == 2^depth,  0 <= local_depth <= depth <= DEPTH_MAX for every page
//! depth == 0  or  some page has local_depth == depth
//! directory[prefix << (depth - local_depth) .. (prefix + 1) << (depth - local_depth)] == page, nowhere else
//! fragment >> (32 - local_depth) == prefix for every entry of a page
//! sum of all counts == len,  0 <= count <= PAGE_ENTRIES
//! 0 <= chunks.len() * CHUNK_PAGES - pages < 2 * CHUNK_PAGES
//! ```

use std::hint::black_box;

use moontide_types::ObjectId;

/// How many ids [`Table::candidates`] looks at together.
///
/// A core keeps 10 to 16 cache misses under way, and an id costs two: 32 ids keep it busy while the start and
/// the end of a batch, where the misses are few, stay a small part.
pub(crate) const BATCH: usize = 32;

/// Entries in a line: 8 x (4 + 4) bytes fill one cache line.
const LINE_SLOTS: usize = 8;

/// Lines in a page: 64 x 64 bytes are the 4 KiB in which the operating system counts memory, and 512 entries
/// are enough that two choices of line and one move fill a page to 97 % before it must be split.
const PAGE_LINES: usize = 64;

const PAGE_ENTRIES: usize = PAGE_LINES * LINE_SLOTS;

/// Pages in an allocation: 256 KiB. A chunk's memory is touched page by page, so an unused rest costs nothing.
///
/// glibc maps allocations above 128 KiB by themselves and unmaps them when freed, but raises that bound (to 32 MiB
/// at most) with each one freed. So the memory goes back to the system every time, rather than only to the
/// process's heap, if the process sets the bound itself: `mallopt(M_MMAP_THRESHOLD)` or
/// `GLIBC_TUNABLES=glibc.malloc.mmap_threshold=131072`.
const CHUNK_PAGES: usize = 64;

/// The longest prefix by which pages are told apart.
///
/// References have 32 bits, so there are at most 2^32 entries; 2^26 pages would hold 64 of them each. Uniform
/// ids come nowhere near. The fragment's six bits below the prefix choose the distance of an entry's lines.
const DEPTH_MAX: u8 = 26;

/// A page looks for a merge when its count falls to this or lower ...
const MERGE_COUNT_MAX: u16 = PAGE_ENTRIES as u16 / 4;

/// ... at each multiple of this: a refused merge is not tried again at every removal.
const MERGE_COUNT_STEP: u16 = 16;

/// Two buddies merge when they have at most this many entries together. Half a page keeps splits (at about
/// 500, leaving 250 + 250) and merges apart: some 240 insertions or removals in one page lie between them.
const MERGED_COUNT_MAX: u16 = PAGE_ENTRIES as u16 / 2;

const _: () = assert!(size_of::<Line>() == 64 && align_of::<Line>() == 64);
const _: () = assert!(size_of::<Page>() == 4096);
const _: () = assert!(size_of::<PageInfo>() == 8);
const _: () =
    assert!(PAGE_LINES == 1 << (32 - DEPTH_MAX), "prefix and distance must not share fragment bits");
const _: () = assert!((u32::MAX >> DEPTH_MAX) < MERGE_COUNT_MAX as u32, "all references fit at DEPTH_MAX");
const _: () = assert!(MERGE_COUNT_MAX < MERGED_COUNT_MAX && MERGED_COUNT_MAX < PAGE_ENTRIES as u16);

/// References by id. See the head of this file.
#[derive(Debug)]
pub(crate) struct Table {
    /// Page numbers, indexed by the top `depth` bits of the hash.
    directory: Vec<u32>,
    depth: u8,
    /// [`DEPTH_MAX`], except in the test of that bound.
    depth_max: u8,
    /// Pages `CHUNK_PAGES * i ..` are in `chunks[i]`, without holes. A chunk has its capacity from the start
    /// and never more, so its pages never move; it takes memory page by page, as they are pushed.
    chunks: Vec<Vec<Page>>,
    /// Beside the pages, because it is read and written when their lines are not.
    infos: Vec<PageInfo>,
    /// How many pages have each local depth: tells when the directory may be halved.
    pages_at_depth: [u32; DEPTH_MAX as usize + 1],
    len: usize,
}

/// What a batched lookup found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Candidate {
    /// No entry matches: the id is not in the table.
    #[default]
    None,
    /// One entry matches; its record decides whether it is the id's.
    One(u32),
    /// Several entries match, rare: ask [`Table::find`].
    Several,
}

impl Table {
    pub(crate) fn new() -> Table {
        let mut table = Table {
            directory: vec![0],
            depth: 0,
            depth_max: DEPTH_MAX,
            chunks: Vec::new(),
            infos: Vec::new(),
            pages_at_depth: [0; DEPTH_MAX as usize + 1],
            len: 0,
        };
        table.push_page(Page::EMPTY, PageInfo { prefix: 0, count: 0, local_depth: 0 });
        table
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Bytes of memory that the table holds, used or not.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.capacity() * size_of::<Page>()).sum::<usize>()
            + self.chunks.capacity() * size_of::<Vec<Page>>()
            + self.infos.capacity() * size_of::<PageInfo>()
            + self.directory.capacity() * size_of::<u32>()
    }

    /// The first reference among those whose fragment matches that `is` accepts.
    pub(crate) fn find(&self, id: ObjectId, mut is: impl FnMut(u32) -> bool) -> Option<u32> {
        let probe = Probe::of(id);
        let page = self.page(self.page_number(probe));
        page.matches(probe).map(|place| page.stored(place) - 1).find(|&reference| is(reference))
    }

    /// Looks up many ids at once; `out[i]` tells about `ids[i]`.
    ///
    /// The stages are loops of their own, and all but the last do not branch on what they load: the processor
    /// waits for the cache misses of many ids together, rather than of one after the other.
    ///
    /// # Panics
    ///
    /// If `ids` and `out` differ in length.
    pub(crate) fn candidates(&self, ids: &[ObjectId], out: &mut [Candidate]) {
        assert_eq!(ids.len(), out.len(), "one candidate for each id");
        for (ids, out) in ids.chunks(BATCH).zip(out.chunks_mut(BATCH)) {
            let mut numbers = [0; BATCH];
            for (number, &id) in numbers.iter_mut().zip(ids) {
                *number = self.page_number(Probe::of(id));
            }
            // Only asks for the lines. A load has far fewer instructions than a comparison, so more of them are under
            // way together: a fifth less time at 10^7 entries. A prefetch instruction would need `unsafe`.
            let mut touched = 0;
            for (&number, &id) in numbers.iter().zip(ids) {
                let (page, probe) = (self.page(number), Probe::of(id));
                touched |= page.0[probe.line].fragments[0];
                touched |= page.0[other_line(probe.line, probe.fragment)].fragments[0];
            }
            black_box(touched);
            let mut masks = [0; BATCH];
            for ((mask, &number), &id) in masks.iter_mut().zip(&numbers).zip(ids) {
                *mask = self.page(number).match_mask(Probe::of(id));
            }
            for (((candidate, &mask), &number), &id) in out.iter_mut().zip(&masks).zip(&numbers).zip(ids) {
                let mut places = Matches { mask, probe: Probe::of(id) };
                *candidate = match (places.next(), places.next()) {
                    (None, _) => Candidate::None,
                    (Some(place), None) => Candidate::One(self.page(number).stored(place) - 1),
                    (Some(_), Some(_)) => Candidate::Several,
                };
            }
        }
    }

    /// Adds an entry. The caller knows that the id has none.
    ///
    /// # Panics
    ///
    /// If `reference` is `u32::MAX`; or if more ids agree in their prefix and lines than pages can be split
    /// for, which ids made with a secret key do not do.
    pub(crate) fn insert(&mut self, id: ObjectId, reference: u32) {
        let stored = stored_of(reference).expect("reference u32::MAX stands for an empty slot");
        let probe = Probe::of(id);
        loop {
            let number = self.page_number(probe);
            if self.page_mut(number).put(probe, stored) {
                self.infos[number as usize].count += 1;
                self.len += 1;
                return;
            }
            self.split(number);
        }
    }

    /// Removes the entry of exactly this id and reference; false if there is none.
    pub(crate) fn remove(&mut self, id: ObjectId, reference: u32) -> bool {
        let Some((number, (line, slot))) = self.entry(id, reference) else { return false };
        self.page_mut(number).0[line].set(slot, 0, 0);
        self.len -= 1;
        let info = &mut self.infos[number as usize];
        info.count -= 1;
        if info.count.is_multiple_of(MERGE_COUNT_STEP) {
            self.merge_upwards(number);
        }
        true
    }

    /// The record has moved: its id now has the reference `new`. False if it did not have `old`.
    ///
    /// # Panics
    ///
    /// If `new` is `u32::MAX`.
    pub(crate) fn replace(&mut self, id: ObjectId, old: u32, new: u32) -> bool {
        let stored = stored_of(new).expect("reference u32::MAX stands for an empty slot");
        let Some((number, (line, slot))) = self.entry(id, old) else { return false };
        self.page_mut(number).0[line].references[slot] = stored;
        true
    }

    /// Where the entry with this id's fragment and this reference stands.
    fn entry(&self, id: ObjectId, reference: u32) -> Option<(u32, Place)> {
        let stored = stored_of(reference)?;
        let probe = Probe::of(id);
        let number = self.page_number(probe);
        let page = self.page(number);
        page.matches(probe).find(|&place| page.stored(place) == stored).map(|place| (number, place))
    }

    fn page_number(&self, probe: Probe) -> u32 {
        // Widened, because a shift by all 32 bits (depth 0) must give 0.
        self.directory[(u64::from(probe.fragment) >> (32 - self.depth)) as usize]
    }

    fn page(&self, number: u32) -> &Page {
        &self.chunks[number as usize / CHUNK_PAGES][number as usize % CHUNK_PAGES]
    }

    fn page_mut(&mut self, number: u32) -> &mut Page {
        &mut self.chunks[number as usize / CHUNK_PAGES][number as usize % CHUNK_PAGES]
    }

    /// Moves the entries of a page whose next prefix bit is 1 to a new page.
    fn split(&mut self, number: u32) {
        let PageInfo { prefix, count, local_depth } = self.infos[number as usize];
        assert!(
            local_depth < self.depth_max,
            "no place beside {count} ids that agree in {local_depth} bits: these ids are not uniform"
        );
        if local_depth == self.depth {
            self.double_directory();
        }
        let upper = self.page_mut(number).split_off(1 << (31 - local_depth));
        let upper_count = upper.count();
        self.infos[number as usize] =
            PageInfo { prefix: prefix << 1, count: count - upper_count, local_depth: local_depth + 1 };
        self.pages_at_depth[usize::from(local_depth)] -= 1;
        self.pages_at_depth[usize::from(local_depth) + 1] += 1;
        let upper_info =
            PageInfo { prefix: prefix << 1 | 1, count: upper_count, local_depth: local_depth + 1 };
        let upper_number = self.push_page(upper, upper_info);
        self.point_directory(upper_number);
    }

    /// Merges a page with its buddy, and the result with its own, while both are poor enough.
    fn merge_upwards(&mut self, mut number: u32) {
        while let Some(merged) = self.merge(number) {
            number = merged;
        }
        while self.depth > 0 && self.pages_at_depth[usize::from(self.depth)] == 0 {
            self.halve_directory();
        }
    }

    /// The number of the merged page, or nothing if page and buddy stay apart.
    fn merge(&mut self, number: u32) -> Option<u32> {
        let PageInfo { prefix, count, local_depth } = self.infos[number as usize];
        if count > MERGE_COUNT_MAX || local_depth == 0 {
            return None;
        }
        let buddy = self.directory[((prefix ^ 1) as usize) << (self.depth - local_depth)];
        let buddy_info = self.infos[buddy as usize];
        if buddy_info.local_depth != local_depth || count + buddy_info.count > MERGED_COUNT_MAX {
            return None;
        }
        // On a copy, because it may fail. With uniform ids it does not: none of 30,000 merges failed.
        let mut union = self.page(buddy).clone();
        if !union.put_all(self.page(number)) {
            return None;
        }
        *self.page_mut(buddy) = union;
        self.infos[buddy as usize] =
            PageInfo { prefix: prefix >> 1, count: count + buddy_info.count, local_depth: local_depth - 1 };
        self.pages_at_depth[usize::from(local_depth)] -= 1;
        self.pages_at_depth[usize::from(local_depth) - 1] += 1;
        self.point_directory(buddy);
        let moved = self.swap_remove_page(number);
        Some(if moved == buddy { number } else { buddy })
    }

    /// Lets all directory slots of a page's prefix name it.
    fn point_directory(&mut self, number: u32) {
        let PageInfo { prefix, local_depth, .. } = self.infos[number as usize];
        let free_bits = self.depth - local_depth;
        let first = (prefix as usize) << free_bits;
        self.directory[first..first + (1 << free_bits)].fill(number);
    }

    fn double_directory(&mut self) {
        let mut wide = Vec::with_capacity(self.directory.len() * 2);
        wide.extend(self.directory.iter().flat_map(|&number| [number, number]));
        self.directory = wide;
        self.depth += 1;
    }

    fn halve_directory(&mut self) {
        self.directory = self.directory.iter().copied().step_by(2).collect();
        self.depth -= 1;
    }

    /// The new page's number. The directory does not know it yet.
    fn push_page(&mut self, page: Page, info: PageInfo) -> u32 {
        let number = self.infos.len();
        if number / CHUNK_PAGES == self.chunks.len() {
            self.chunks.push(Vec::with_capacity(CHUNK_PAGES));
        }
        self.chunks[number / CHUNK_PAGES].push(page);
        self.infos.push(info);
        self.pages_at_depth[usize::from(info.local_depth)] += 1;
        number as u32 // At most 2^DEPTH_MAX pages.
    }

    /// Removes a page no directory slot names, and moves the last page into its place. Returns the number that
    /// the moved page had; this is `number` itself if that was the last page.
    fn swap_remove_page(&mut self, number: u32) -> u32 {
        let info = self.infos.swap_remove(number as usize);
        self.pages_at_depth[usize::from(info.local_depth)] -= 1;
        let last = self.infos.len();
        let page = self.chunks[last / CHUNK_PAGES].pop().expect("the last chunk with pages holds the last");
        if number as usize != last {
            *self.page_mut(number) = page;
            self.point_directory(number);
        }
        // One empty chunk stays, so that a page that comes and goes does not cost a chunk each time.
        if self.chunks.len() * CHUNK_PAGES - last >= 2 * CHUNK_PAGES {
            self.chunks.pop();
        }
        give_back(&mut self.chunks);
        give_back(&mut self.infos);
        last as u32
    }
}

/// Returns memory of a vector that has become four times too large; half of the rest stays for growth.
fn give_back<T>(vec: &mut Vec<T>) {
    if vec.capacity() / 4 > vec.len() {
        vec.shrink_to(vec.len() * 2);
    }
}

/// A reference as a slot holds it; none for the one value that would look like an empty slot.
fn stored_of(reference: u32) -> Option<u32> {
    reference.checked_add(1)
}

/// What the table looks at of an id.
#[derive(Clone, Copy, Debug)]
struct Probe {
    fragment: u32,
    /// One of the two lines; [`other_line`] is the other.
    line: usize,
}

impl Probe {
    fn of(id: ObjectId) -> Probe {
        let hash = (id.as_u128() >> 64) as u64;
        Probe { fragment: (hash >> 32) as u32, line: hash as usize % PAGE_LINES }
    }
}

/// The other line in which an entry with this fragment may stand. An involution. The distance is odd, so that
/// the two always differ: every entry has one even and one odd line.
fn other_line(line: usize, fragment: u32) -> usize {
    line ^ ((fragment as usize % PAGE_LINES) | 1)
}

#[derive(Clone, Copy, Debug)]
struct PageInfo {
    /// The `local_depth` top bits of all fragments in the page, right-aligned.
    prefix: u32,
    count: u16,
    local_depth: u8,
}

/// Line and slot.
type Place = (usize, usize);

#[derive(Clone, Debug)]
struct Page([Line; PAGE_LINES]);

impl Page {
    const EMPTY: Page = Page([Line::EMPTY; PAGE_LINES]);

    fn stored(&self, (line, slot): Place) -> u32 {
        self.0[line].references[slot]
    }

    fn count(&self) -> u16 {
        self.0.iter().map(|line| line.count() as u16).sum()
    }

    /// [`Line::match_mask`] of the probe's line, and above it that of the other. Both are made before either is
    /// looked at, so that their cache misses overlap.
    fn match_mask(&self, probe: Probe) -> u32 {
        let other = other_line(probe.line, probe.fragment);
        self.0[probe.line].match_mask(probe.fragment) | self.0[other].match_mask(probe.fragment) << LINE_SLOTS
    }

    fn matches(&self, probe: Probe) -> Matches {
        Matches { mask: self.match_mask(probe), probe }
    }

    /// False if neither line takes the entry, even if one of theirs moves aside.
    fn put(&mut self, probe: Probe, stored: u32) -> bool {
        let other = other_line(probe.line, probe.fragment);
        // The emptier one: this keeps lines even, so that full ones are rare until the page is nearly full.
        let line = if self.0[other].count() < self.0[probe.line].count() { other } else { probe.line };
        if let Some(slot) = self.0[line].vacancy() {
            self.0[line].set(slot, probe.fragment, stored);
            return true;
        }
        for line in [probe.line, other] {
            for slot in 0..LINE_SLOTS {
                let (fragment, reference) = self.0[line].get(slot);
                let refuge = other_line(line, fragment);
                if let Some(vacancy) = self.0[refuge].vacancy() {
                    self.0[refuge].set(vacancy, fragment, reference);
                    self.0[line].set(slot, probe.fragment, stored);
                    return true;
                }
            }
        }
        false
    }

    /// Adds the entries of another page; false if they do not all fit, and then only some were added.
    fn put_all(&mut self, other: &Page) -> bool {
        other.0.iter().enumerate().all(|(number, line)| {
            (0..LINE_SLOTS).map(|slot| line.get(slot)).all(|(fragment, stored)| {
                // Whichever of its lines an entry stands in may serve as its first.
                stored == 0 || self.put(Probe { fragment, line: number }, stored)
            })
        })
    }

    /// Moves the entries that have `bit` in their fragment to the same places of a new page.
    ///
    /// Selects with masks rather than branches: the bit is a coin toss for each of some 500 entries.
    fn split_off(&mut self, bit: u32) -> Page {
        let mut upper = Page::EMPTY;
        for (from, to) in self.0.iter_mut().zip(&mut upper.0) {
            for slot in 0..LINE_SLOTS {
                let (fragment, stored) = from.get(slot);
                let goes = if fragment & bit != 0 { u32::MAX } else { 0 };
                to.set(slot, fragment & goes, stored & goes);
                from.set(slot, fragment & !goes, stored & !goes);
            }
        }
        upper
    }
}

/// One cache line. Fragments and references stand apart, so that a probe compares eight neighbours at once.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct Line {
    fragments: [u32; LINE_SLOTS],
    /// Reference + 1; 0 says that the slot is empty, and then its fragment is 0, too.
    references: [u32; LINE_SLOTS],
}

impl Line {
    const EMPTY: Line = Line { fragments: [0; LINE_SLOTS], references: [0; LINE_SLOTS] };

    fn get(&self, slot: usize) -> (u32, u32) {
        (self.fragments[slot], self.references[slot])
    }

    fn set(&mut self, slot: usize, fragment: u32, stored: u32) {
        self.fragments[slot] = fragment;
        self.references[slot] = stored;
    }

    /// Bit `i + 1` tells whether slot `i` holds an entry with this fragment.
    ///
    /// From bit 1, because then all eight terms have the same shape, a shift, and LLVM makes vectors of them: 20
    /// instructions, no branch. From bit 0, the odd term out leaves it with four lanes and 50 instructions.
    fn match_mask(&self, fragment: u32) -> u32 {
        let mut mask = 0;
        for slot in 0..LINE_SLOTS {
            let hit = (self.fragments[slot] == fragment) & (self.references[slot] != 0);
            mask |= u32::from(hit) << (slot + 1);
        }
        mask
    }

    /// Bit `i + 1` tells whether slot `i` is empty.
    fn vacancy_mask(&self) -> u32 {
        let mut mask = 0;
        for slot in 0..LINE_SLOTS {
            mask |= u32::from(self.references[slot] == 0) << (slot + 1);
        }
        mask
    }

    fn count(&self) -> u32 {
        LINE_SLOTS as u32 - self.vacancy_mask().count_ones()
    }

    /// The first empty slot.
    fn vacancy(&self) -> Option<usize> {
        let mask = self.vacancy_mask();
        (mask != 0).then(|| mask.trailing_zeros() as usize - 1)
    }
}

/// The places of a [`Page::match_mask`], those of the probe's line first.
struct Matches {
    mask: u32,
    probe: Probe,
}

impl Iterator for Matches {
    type Item = Place;

    fn next(&mut self) -> Option<Place> {
        if self.mask == 0 {
            return None;
        }
        let place = self.mask.trailing_zeros() as usize - 1;
        self.mask &= self.mask - 1;
        let Probe { fragment, line } = self.probe;
        let line = if place < LINE_SLOTS { line } else { other_line(line, fragment) };
        Some((line, place % LINE_SLOTS))
    }
}

#[cfg(test)]
impl Table {
    /// Asserts the invariants at the head of this file.
    pub(crate) fn audit(&self) {
        assert_eq!(self.directory.len(), 1 << self.depth);
        assert!(self.depth <= DEPTH_MAX);
        assert!(self.depth == 0 || self.pages_at_depth[usize::from(self.depth)] > 0, "directory too deep");
        let (mut len, mut slots, mut at_depth) = (0, 0, [0; DEPTH_MAX as usize + 1]);
        for (number, info) in self.infos.iter().enumerate() {
            assert!(info.local_depth <= self.depth);
            let free_bits = self.depth - info.local_depth;
            let first = (info.prefix as usize) << free_bits;
            let range = &self.directory[first..first + (1 << free_bits)];
            assert!(range.iter().all(|&slot| slot as usize == number), "directory of page {number}");
            slots += range.len();
            at_depth[usize::from(info.local_depth)] += 1;
            let page = self.page(number as u32);
            assert_eq!(page.count(), info.count, "count of page {number}");
            len += usize::from(info.count);
            for line in &page.0 {
                for slot in 0..LINE_SLOTS {
                    let (fragment, stored) = line.get(slot);
                    if stored == 0 {
                        assert_eq!(fragment, 0, "an empty slot holds nothing");
                    } else {
                        assert_eq!(u64::from(fragment) >> (32 - info.local_depth), u64::from(info.prefix));
                    }
                }
            }
        }
        assert_eq!(len, self.len);
        // The ranges are the pages' own (above), so disjoint; with this they cover the directory.
        assert_eq!(slots, self.directory.len());
        assert_eq!(at_depth, self.pages_at_depth);
        assert_eq!(self.chunks.iter().map(Vec::len).sum::<usize>(), self.infos.len());
        assert!(self.chunks.iter().all(|chunk| chunk.capacity() == CHUNK_PAGES), "pages never move");
        assert!(self.chunks.len() * CHUNK_PAGES - self.infos.len() < 2 * CHUNK_PAGES);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    /// xorshift64*: enough to make ids that look uniform.
    struct Rng(u64);

    impl Rng {
        fn next(&mut self) -> u64 {
            self.0 ^= self.0 >> 12;
            self.0 ^= self.0 << 25;
            self.0 ^= self.0 >> 27;
            self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
        }

        fn below(&mut self, bound: usize) -> usize {
            ((u128::from(self.next()) * bound as u128) >> 64) as usize
        }
    }

    /// The `n`th id of a sequence in which all differ and any may be made without those before it.
    fn nth_id(n: u32) -> ObjectId {
        let hash = Rng(u64::from(n).wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1 << 63).next();
        ObjectId((u128::from(hash) << 64 | u128::from(n)).to_le_bytes())
    }

    /// An id of which only what the table looks at is given.
    fn id_at(fragment: u32, line: u64) -> ObjectId {
        ObjectId((u128::from(u64::from(fragment) << 32 | line) << 64).to_le_bytes())
    }

    fn one_candidate(table: &Table, id: ObjectId) -> Candidate {
        let mut out = [Candidate::None];
        table.candidates(&[id], &mut out);
        out[0]
    }

    #[test]
    fn an_entry_is_found_replaced_and_removed() {
        let (mut table, id) = (Table::new(), nth_id(1));
        assert_eq!(table.find(id, |_| true), None);
        assert_eq!(one_candidate(&table, id), Candidate::None);
        table.insert(id, 0);
        assert_eq!(table.find(id, |_| true), Some(0));
        assert_eq!(table.find(id, |_| false), None, "the record decides");
        assert!(!table.replace(id, 5, 6));
        assert!(!table.replace(nth_id(2), 0, 6));
        assert!(table.replace(id, 0, u32::MAX - 1));
        assert_eq!(one_candidate(&table, id), Candidate::One(u32::MAX - 1));
        assert!(!table.remove(id, 0), "moved away");
        assert!(!table.remove(id, u32::MAX), "not a reference");
        assert!(table.remove(id, u32::MAX - 1));
        assert!(!table.remove(id, u32::MAX - 1));
        assert_eq!(table.len(), 0);
        table.audit();
    }

    #[test]
    fn an_empty_slot_is_no_match_for_fragment_zero() {
        let (mut table, zero) = (Table::new(), id_at(0, 7));
        assert_eq!(table.find(zero, |_| true), None);
        assert_eq!(one_candidate(&table, zero), Candidate::None);
        table.insert(zero, 3);
        assert_eq!(one_candidate(&table, zero), Candidate::One(3));
        assert!(table.remove(zero, 3));
        assert_eq!(one_candidate(&table, zero), Candidate::None);
    }

    #[test]
    fn equal_fragments_are_told_apart_by_the_record() {
        let (mut table, id) = (Table::new(), id_at(0xABCD_EF01, 9));
        // 8 in each of two lines: as many as a page can hold of one probe.
        (0..16).for_each(|reference| table.insert(id, reference));
        assert_eq!(one_candidate(&table, id), Candidate::Several);
        assert!((0..16).all(|wanted| table.find(id, |reference| reference == wanted) == Some(wanted)));
        (0..16).for_each(|reference| assert!(table.remove(id, reference)));
        assert_eq!(one_candidate(&table, id), Candidate::None);
        table.audit();
    }

    #[test]
    #[should_panic(expected = "stands for an empty slot")]
    fn the_largest_reference_is_refused() {
        Table::new().insert(nth_id(1), u32::MAX);
    }

    #[test]
    #[should_panic(expected = "no place beside 16 ids that agree in 12 bits")]
    fn ids_that_no_split_parts_are_refused() {
        let mut table = Table { depth_max: 12, ..Table::new() };
        (0..17).for_each(|reference| table.insert(id_at(0xFFF0_0000, 8), reference));
    }

    #[test]
    fn a_full_line_gives_way_before_the_page_splits() {
        let mut table = Table::new();
        // 16 entries fill lines 0 and 1. All but one are bound to these (distance 1), that one may move to line 3.
        table.insert(id_at(0b11, 0), 99);
        (0..15).for_each(|reference| table.insert(id_at(1 << 31 >> reference, 0), reference));
        assert_eq!((table.page(0).0[0].count(), table.page(0).0[1].count()), (8, 8));
        table.insert(id_at(0x0F00_0000, 1), 15);
        assert_eq!(table.depth, 0, "no split was needed");
        assert_eq!(table.page(0).0[3].count(), 1);
        assert_eq!(table.find(id_at(0b11, 0), |_| true), Some(99), "found in its other line");
        assert_eq!(table.find(id_at(0x0F00_0000, 1), |_| true), Some(15));
        // The next one finds all 16 bound to these two lines.
        table.insert(id_at(0xF000_0000, 0), 16);
        assert_eq!((table.depth, table.infos.len()), (1, 2));
        table.audit();
        assert_eq!(table.len(), 18);
        assert!((0..15).all(|n| table.find(id_at(1 << 31 >> n, 0), |_| true) == Some(n)));
    }

    #[test]
    fn ids_that_agree_in_many_bits_are_parted_deep_down() {
        let mut table = Table::new();
        let ids: Vec<_> = (0..17).map(|n| id_at(0xABC0_0000 | n << 16, 5)).collect();
        (0..).zip(&ids).for_each(|(reference, &id)| table.insert(id, reference));
        // The top 11 bits agree: 11 splits leave one side empty, the 12th parts 16 from 1.
        assert_eq!((table.depth, table.infos.len()), (12, 13));
        table.audit();
        assert!(
            (0..).zip(&ids).all(|(reference, &id)| one_candidate(&table, id) == Candidate::One(reference))
        );
        // The page of the 16 refuses no merge, but looks for one only when it is empty; then up to the root at once.
        for (reference, &id) in ids.iter().enumerate() {
            assert_eq!(table.depth, if reference < 16 { 12 } else { 0 });
            assert!(table.remove(id, reference as u32));
            table.audit();
        }
        assert_eq!((table.depth, table.infos.len(), table.directory.len()), (0, 1, 1));
    }

    #[test]
    fn a_merge_that_does_not_fit_is_refused() {
        let mut table = Table::new();
        // 16 + 16 entries of lines 0 and 1 on both sides of the first bit.
        let ids: Vec<_> = (0..32).map(|n| id_at(((n % 2) << 31) | (n << 8), 0)).collect();
        (0..).zip(&ids).for_each(|(reference, &id)| table.insert(id, reference));
        assert_eq!((table.depth, table.infos.len()), (1, 2));
        // Two entries elsewhere, whose removal makes the first page's count a multiple of 16.
        (32..34).for_each(|reference| table.insert(id_at(0, 32), reference));
        (32..34).for_each(|reference| assert!(table.remove(id_at(0, 32), reference)));
        assert_eq!((table.infos[0].count, table.infos[1].count), (16, 16));
        assert_eq!(table.infos.len(), 2, "refused");
        table.audit();
        for (reference, &id) in ids.iter().enumerate() {
            assert_eq!(table.find(id, |_| true), Some(reference as u32));
            assert!(table.remove(id, reference as u32));
        }
        table.audit();
        assert_eq!(table.infos.len(), 1);
    }

    #[test]
    fn a_merge_uses_the_other_line_and_moves_entries_aside() {
        let probe = |n: u32, distance: u32| Probe { fragment: n << 8 | distance, line: 0 };
        let (mut page, mut other) = (Page::EMPTY, Page::EMPTY);
        // Lines 0 and 1 are full; all but one of their entries are bound to these two lines.
        assert!(page.put(probe(0, 3), 1));
        assert!((1..16).all(|n| page.put(probe(n, 1), n + 1)));
        // In the same lines of the other page: one that goes to line 5, one that needs the entry above to move.
        assert!(other.put(probe(16, 5), 17));
        assert!(other.put(probe(17, 1), 18));
        assert!(page.put_all(&other));
        assert_eq!([3, 5].map(|line| page.0[line].get(0)), [(3, 1), (16 << 8 | 5, 17)]);
        assert_eq!(page.count(), 18);
        // Once more, and nothing can move.
        assert!(!page.clone().put_all(&other));
    }

    /// Random steps against a map. Records are simulated by the ids that references stand for.
    fn check_against_map(seed: u64, steps: usize, len_max: usize, id: impl Fn(u32) -> ObjectId) {
        println!("seed {seed}, len_max {len_max}");
        let mut rng = Rng(seed);
        let (mut table, mut model) = (Table::new(), HashMap::<u32, u32>::new());
        let (mut live, mut next_reference) = (Vec::new(), 0);
        // Grows and shrinks in turns, so that splits and merges both happen often.
        let mut growing = true;
        for step in 0..steps {
            growing = if growing { live.len() < len_max } else { live.len() < len_max / 50 };
            match rng.below(10) {
                0 if !live.is_empty() => {
                    let n = live[rng.below(live.len())];
                    let old = model.insert(n, next_reference).unwrap();
                    assert!(table.replace(id(n), old, next_reference));
                    assert!(!table.replace(id(n), old, next_reference));
                    next_reference += 1;
                }
                dice if (dice < 8) == growing || live.is_empty() => {
                    let n = next_reference;
                    table.insert(id(n), n);
                    model.insert(n, n);
                    live.push(n);
                    next_reference += 1;
                }
                _ => {
                    let n = live.swap_remove(rng.below(live.len()));
                    let reference = model.remove(&n).unwrap();
                    assert!(table.remove(id(n), reference));
                    assert!(!table.remove(id(n), reference));
                }
            }
            let n = rng.below(next_reference as usize + 1) as u32;
            let expected = model.get(&n).copied();
            assert_eq!(table.find(id(n), |reference| Some(reference) == expected), expected);
            if step % (steps / 20) == 0 {
                table.audit();
                check_candidates(&table, &model, next_reference, &id);
            }
        }
        assert_eq!(table.len(), model.len());
        for n in live {
            assert!(table.remove(id(n), model[&n]));
        }
        table.audit();
        assert_eq!((table.len(), table.depth, table.infos.len()), (0, 0, 1), "an empty table is one page");
    }

    fn check_candidates(table: &Table, model: &HashMap<u32, u32>, end: u32, id: impl Fn(u32) -> ObjectId) {
        let ids: Vec<_> = (0..end).map(id).collect();
        let mut out = vec![Candidate::None; ids.len()];
        table.candidates(&ids, &mut out);
        for (n, candidate) in (0..end).zip(out) {
            let mut matches = Vec::new();
            table.find(ids[n as usize], |reference| {
                matches.push(reference);
                false
            });
            let expected = match matches[..] {
                [] => Candidate::None,
                [reference] => Candidate::One(reference),
                _ => Candidate::Several,
            };
            assert_eq!(candidate, expected);
            assert!(model.get(&n).is_none_or(|reference| matches.contains(reference)));
        }
    }

    #[test]
    fn random_steps_agree_with_a_map() {
        for (seed, len_max) in [(1, 300), (2, 3_000), (3, 30_000)] {
            check_against_map(seed, len_max * 6, len_max, nth_id);
        }
    }

    #[test]
    fn random_steps_agree_with_a_map_when_ids_collide() {
        // Few lines and few fragments: lines overflow from the start, pages split deep, merges are refused, and
        // several entries match one id.
        let collide = |n: u32| {
            let hash = (nth_id(n).as_u128() >> 64) as u64;
            id_at((hash >> 32) as u32 & 0xFF83_0006, hash & 1)
        };
        for seed in 4..8 {
            check_against_map(seed, 20_000, 1_500, collide);
        }
    }

    #[test]
    fn memory_follows_the_entries() {
        let mut table = Table::new();
        (0..1_000_000).for_each(|n| table.insert(nth_id(n), n));
        table.audit();
        let full = table.memory_bytes();
        assert!(full < 18_000_000, "{full} bytes for 10^6 entries");
        (100_000..1_000_000).for_each(|n| assert!(table.remove(nth_id(n), n)));
        table.audit();
        let shrunk = table.memory_bytes();
        assert!(shrunk * 4 < full, "{shrunk} of {full} bytes for a tenth of the entries");
        assert!((0..100_000).all(|n| table.find(nth_id(n), |reference| reference == n) == Some(n)));
        (0..100_000).for_each(|n| assert!(table.remove(nth_id(n), n)));
        table.audit();
        assert!(table.memory_bytes() <= 2 * CHUNK_PAGES * size_of::<Page>() + 1024);
    }

    /// Bytes per entry swing by two, as all pages split at about the same time: the mean over a swing counts.
    #[test]
    fn an_entry_takes_twelve_bytes_on_average() {
        let (mut table, mut n, mut sum) = (Table::new(), 0_u32, 0.0);
        // Steps of 2^(1/8) from 2^16 to 2^17.
        for step in 0..8 {
            let end = (65536.0 * 2_f64.powf(f64::from(step) / 8.0)) as u32;
            (n..end).for_each(|n| table.insert(nth_id(n), n));
            n = end;
            sum += table.memory_bytes() as f64 / f64::from(n);
        }
        assert!((11.0..12.5).contains(&(sum / 8.0)), "{} bytes", sum / 8.0);
    }
}
