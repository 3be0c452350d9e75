//! Table from an [`ObjectId`] to the number of its record: extendible hashing in pages of 4 KiB.
//!
//! The table contains record numbers (references) only. Records are stored elsewhere and contain the whole id. An entry
//! keeps 32 bits of it, so a match here is a strong hint (at 10^7 entries one lookup in 10^4 matches another id), and
//! the record decides. There are no locks: the owner of the table is its only user.
//!
//! ```text
//!  63                            32 31              6 5      0   hash = the upper 64 bits of the id; the lower
//! +--------------------------------+-----------------+--------+   ones choose the group, so that within one
//! |            fragment            |     unused      |  line  |   they are not uniform
//! +--------------------------------+-----------------+--------+
//!   top `depth` bits: directory slot; low 6 bits: distance between the two lines
//!
//! directory  [page number; 2^depth]           all slots that begin with a page's prefix refer to that page
//! page       [line; 64]                       4 KiB
//! line       [fragment; 8] [reference + 1; 8]   64 bytes, one cache line; 0 for an empty slot
//! ```
//!
//! An entry is in one of two lines, `line` or `line ^ distance`. The distance is derived from the fragment, which is
//! part of the entry. So an entry can move to its other line, to another page, or back, without a read of its record: a
//! split is one pass over 4 KiB, and a full line moves one entry to its other line.
//!
//! The table grows and shrinks page by page: a page that cannot hold an entry is split in two, and a sparse page is
//! merged with its buddy. Only the per-page data (the directory and [`PageInfo`]s, less than 20 bytes besides the 4096)
//! is ever copied as a whole, once per doubling: 0.1 ms at 10^7 entries. All pages split at about the same time: an
//! entry takes 9.3 to 15.3 bytes, 12 on average.
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

/// Number of ids that [`Table::candidates`] processes together.
///
/// A core keeps 10 to 16 cache misses in flight, and an id costs two: 32 ids keep it busy.
pub(crate) const BATCH: usize = 32;

/// Entries per line: 8 x (4 + 4) bytes fill one cache line.
const LINE_SLOTS: usize = 8;

/// Lines per page: 4 KiB. With 512 entries, two choices of line and one move fill a page to 97 % before a split.
const PAGE_LINES: usize = 64;

const PAGE_ENTRIES: usize = PAGE_LINES * LINE_SLOTS;

/// Pages per allocation: 256 KiB. A chunk's memory is touched page by page, so an unused rest costs nothing.
///
/// glibc maps each allocation above 128 KiB separately and unmaps it when freed, but raises that threshold (to 32 MiB
/// at most) with each one freed. The memory returns to the system every time, rather than only to the process's heap,
/// only if the process sets the threshold itself: `mallopt(M_MMAP_THRESHOLD)` or
/// `GLIBC_TUNABLES=glibc.malloc.mmap_threshold=131072`.
const CHUNK_PAGES: usize = 64;

/// Longest prefix that distinguishes pages.
///
/// References have 32 bits, so there are at most 2^32 entries; 2^26 pages would hold 64 of them each. Uniform ids stay
/// far below. The fragment's six bits below the prefix choose the distance of an entry's lines.
const DEPTH_MAX: u8 = 26;

/// A page tries to merge when its count falls to this or lower ...
const MERGE_COUNT_MAX: u16 = PAGE_ENTRIES as u16 / 4;

/// ... at each multiple of this, so that a refused merge is not retried at every removal.
const MERGE_COUNT_STEP: u16 = 16;

/// Two buddies merge when they have at most this many entries together. Half a page keeps splits (at about 500, leaving
/// 250 + 250) and merges apart: some 240 insertions or removals in one page lie between them.
const MERGED_COUNT_MAX: u16 = PAGE_ENTRIES as u16 / 2;

const _: () = assert!(size_of::<CacheLine>() == 64 && align_of::<CacheLine>() == 64);
const _: () = assert!(size_of::<Page>() == 4096);
const _: () = assert!(size_of::<PageInfo>() == 8);
const _: () =
    assert!(PAGE_LINES == 1 << (32 - DEPTH_MAX), "prefix and distance must not share fragment bits");
const _: () = assert!((u32::MAX >> DEPTH_MAX) < MERGE_COUNT_MAX as u32, "all references fit at DEPTH_MAX");
const _: () = assert!(MERGE_COUNT_MAX < MERGED_COUNT_MAX && MERGED_COUNT_MAX < PAGE_ENTRIES as u16);

/// References by id. See the module documentation.
#[derive(Debug)]
pub(crate) struct Table {
    /// Page numbers, indexed by the top `depth` bits of the hash.
    directory: Vec<u32>,
    depth: u8,
    /// [`DEPTH_MAX`], except in the test of that bound.
    depth_max: u8,
    /// Pages `CHUNK_PAGES * i ..` are in `chunks[i]`, without holes. A chunk has its final capacity from the start, so
    /// its pages never move; it touches memory page by page, as they are pushed.
    chunks: Vec<Vec<Page>>,
    /// Separate from the pages, because it is read and written when their lines are not.
    infos: Vec<PageInfo>,
    /// Number of pages of each local depth: decides when the directory can be halved.
    pages_at_depth: [u32; DEPTH_MAX as usize + 1],
    len: usize,
}

/// Result of a batched lookup for one id.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum ProbeResult {
    /// No entry matches: the id is not in the table.
    #[default]
    None,
    /// One entry matches; its record decides whether it has the id.
    One(u32),
    /// Several entries match, which is rare: the caller uses [`Table::find`].
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

    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Memory of the table in bytes, used or not.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.chunks.iter().map(|chunk| chunk.capacity() * size_of::<Page>()).sum::<usize>()
            + self.chunks.capacity() * size_of::<Vec<Page>>()
            + self.infos.capacity() * size_of::<PageInfo>()
            + self.directory.capacity() * size_of::<u32>()
    }

    /// Returns the first reference with a matching fragment that `is_match` accepts.
    pub(crate) fn find(&self, id: ObjectId, mut is_match: impl FnMut(u32) -> bool) -> Option<u32> {
        let probe = Probe::of(id);
        let page = self.page(self.page_number(probe));
        page.matches(probe).map(|position| page.stored(position) - 1).find(|&reference| is_match(reference))
    }

    /// Looks up many ids at once; `out[i]` is the result for `ids[i]`.
    ///
    /// Each stage is a separate loop, and all but the last do not branch on loaded data: the processor waits for the
    /// cache misses of many ids together, rather than one after the other.
    ///
    /// # Panics
    ///
    /// If `ids` and `out` differ in length.
    pub(crate) fn candidates(&self, ids: &[ObjectId], out: &mut [ProbeResult]) {
        assert_eq!(ids.len(), out.len(), "ids and out differ in length");
        for (ids, out) in ids.chunks(BATCH).zip(out.chunks_mut(BATCH)) {
            let mut numbers = [0; BATCH];
            for (number, &id) in numbers.iter_mut().zip(ids) {
                *number = self.page_number(Probe::of(id));
            }
            // Only loads the lines. A load has far fewer instructions than a comparison, so more of them are in flight
            // together: a fifth less time at 10^7 entries. A prefetch instruction would need `unsafe`.
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
                let mut matches = Matches { mask, probe: Probe::of(id) };
                *candidate = match (matches.next(), matches.next()) {
                    (None, _) => ProbeResult::None,
                    (Some(position), None) => ProbeResult::One(self.page(number).stored(position) - 1),
                    (Some(_), Some(_)) => ProbeResult::Several,
                };
            }
        }
    }

    /// Adds an entry. The caller ensures that the id has none.
    ///
    /// # Panics
    ///
    /// If `reference` is `u32::MAX`; or if more ids agree in their prefix and lines than page splits can separate,
    /// which does not occur for ids made with a secret key.
    pub(crate) fn insert(&mut self, id: ObjectId, reference: u32) {
        let stored = stored_of(reference).expect("reference u32::MAX is reserved for empty slots");
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

    /// Removes the entry of exactly this id and reference. Returns `false` if there is none.
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

    /// Changes the reference of an id from `old` to `new`, because the record has moved. Returns `false` if it was not
    /// `old`.
    ///
    /// # Panics
    ///
    /// If `new` is `u32::MAX`.
    pub(crate) fn replace(&mut self, id: ObjectId, old: u32, new: u32) -> bool {
        let stored = stored_of(new).expect("reference u32::MAX is reserved for empty slots");
        let Some((number, (line, slot))) = self.entry(id, old) else { return false };
        self.page_mut(number).0[line].references[slot] = stored;
        true
    }

    /// Returns page and position of the entry with this id's fragment and this reference.
    fn entry(&self, id: ObjectId, reference: u32) -> Option<(u32, SlotPosition)> {
        let stored = stored_of(reference)?;
        let probe = Probe::of(id);
        let number = self.page_number(probe);
        let page = self.page(number);
        page.matches(probe)
            .find(|&position| page.stored(position) == stored)
            .map(|position| (number, position))
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
            "page of {count} ids with {local_depth} equal bits cannot be split: ids are not uniform"
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

    /// Merges a page with its buddy, and the result with its own buddy, while both are sparse enough.
    fn merge_upwards(&mut self, mut number: u32) {
        while let Some(merged) = self.merge(number) {
            number = merged;
        }
        while self.depth > 0 && self.pages_at_depth[usize::from(self.depth)] == 0 {
            self.halve_directory();
        }
    }

    /// Merges a page with its buddy. Returns the number of the merged page, or `None` if they stay separate.
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

    /// Sets all directory slots of a page's prefix to the page.
    fn point_directory(&mut self, number: u32) {
        let PageInfo { prefix, local_depth, .. } = self.infos[number as usize];
        let free_bits = self.depth - local_depth;
        let first = (prefix as usize) << free_bits;
        self.directory[first..first + (1 << free_bits)].fill(number);
    }

    fn double_directory(&mut self) {
        let mut doubled = Vec::with_capacity(self.directory.len() * 2);
        doubled.extend(self.directory.iter().flat_map(|&number| [number, number]));
        self.directory = doubled;
        self.depth += 1;
    }

    fn halve_directory(&mut self) {
        self.directory = self.directory.iter().copied().step_by(2).collect();
        self.depth -= 1;
    }

    /// Adds a page and returns its number. The directory does not refer to it yet.
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

    /// Removes a page to which no directory slot refers, and moves the last page into its position. Returns the old
    /// number of the moved page; this is `number` itself if that was the last page.
    fn swap_remove_page(&mut self, number: u32) -> u32 {
        let info = self.infos.swap_remove(number as usize);
        self.pages_at_depth[usize::from(info.local_depth)] -= 1;
        let last = self.infos.len();
        let page = self.chunks[last / CHUNK_PAGES].pop().expect("last chunk contains the last page");
        if number as usize != last {
            *self.page_mut(number) = page;
            self.point_directory(number);
        }
        // Keeps one empty chunk, so that adding and removing one page does not allocate a chunk each time.
        if self.chunks.len() * CHUNK_PAGES - last >= 2 * CHUNK_PAGES {
            self.chunks.pop();
        }
        shrink_if_sparse(&mut self.chunks);
        shrink_if_sparse(&mut self.infos);
        last as u32
    }
}

/// Frees memory of a vector whose capacity is four times too large; keeps twice the length for growth.
fn shrink_if_sparse<T>(vec: &mut Vec<T>) {
    if vec.capacity() / 4 > vec.len() {
        vec.shrink_to(vec.len() * 2);
    }
}

/// Returns a reference as stored in a slot; `None` for the one value that would look like an empty slot.
fn stored_of(reference: u32) -> Option<u32> {
    reference.checked_add(1)
}

/// The part of an id that the table uses.
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

/// Returns the other line of an entry with this fragment. An involution. The distance is odd, so that the two always
/// differ: every entry has one even and one odd line.
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
type SlotPosition = (usize, usize);

#[derive(Clone, Debug)]
struct Page([CacheLine; PAGE_LINES]);

impl Page {
    const EMPTY: Page = Page([CacheLine::EMPTY; PAGE_LINES]);

    fn stored(&self, (line, slot): SlotPosition) -> u32 {
        self.0[line].references[slot]
    }

    fn count(&self) -> u16 {
        self.0.iter().map(|line| line.count() as u16).sum()
    }

    /// [`CacheLine::match_mask`] of the probe's line, and above it that of the other line. Both are computed before
    /// either is used, so that their cache misses overlap.
    fn match_mask(&self, probe: Probe) -> u32 {
        let other = other_line(probe.line, probe.fragment);
        self.0[probe.line].match_mask(probe.fragment) | self.0[other].match_mask(probe.fragment) << LINE_SLOTS
    }

    fn matches(&self, probe: Probe) -> Matches {
        Matches { mask: self.match_mask(probe), probe }
    }

    /// Adds an entry. Returns `false` if neither line has space, even after moving one entry to its other line.
    fn put(&mut self, probe: Probe, stored: u32) -> bool {
        let other = other_line(probe.line, probe.fragment);
        // The emptier line: this keeps lines even, so that full ones are rare until the page is nearly full.
        let line = if self.0[other].count() < self.0[probe.line].count() { other } else { probe.line };
        if let Some(slot) = self.0[line].vacancy() {
            self.0[line].set(slot, probe.fragment, stored);
            return true;
        }
        for line in [probe.line, other] {
            for slot in 0..LINE_SLOTS {
                let (fragment, reference) = self.0[line].get(slot);
                let target = other_line(line, fragment);
                if let Some(vacancy) = self.0[target].vacancy() {
                    self.0[target].set(vacancy, fragment, reference);
                    self.0[line].set(slot, probe.fragment, stored);
                    return true;
                }
            }
        }
        false
    }

    /// Adds the entries of another page. Returns `false` if not all fit; then only some were added.
    fn put_all(&mut self, other: &Page) -> bool {
        other.0.iter().enumerate().all(|(number, line)| {
            (0..LINE_SLOTS).map(|slot| line.get(slot)).all(|(fragment, stored)| {
                // Either line of an entry may serve as its first.
                stored == 0 || self.put(Probe { fragment, line: number }, stored)
            })
        })
    }

    /// Moves the entries that have `bit` in their fragment to the same positions of a new page.
    ///
    /// Selects with masks rather than branches: the bit is unpredictable for each of some 500 entries.
    fn split_off(&mut self, bit: u32) -> Page {
        let mut upper = Page::EMPTY;
        for (from, to) in self.0.iter_mut().zip(&mut upper.0) {
            for slot in 0..LINE_SLOTS {
                let (fragment, stored) = from.get(slot);
                let mask = if fragment & bit != 0 { u32::MAX } else { 0 };
                to.set(slot, fragment & mask, stored & mask);
                from.set(slot, fragment & !mask, stored & !mask);
            }
        }
        upper
    }
}

/// One cache line. Fragments and references are separate arrays, so that a probe compares eight neighbours at once.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(64))]
struct CacheLine {
    fragments: [u32; LINE_SLOTS],
    /// Reference + 1; 0 for an empty slot, whose fragment is 0, too.
    references: [u32; LINE_SLOTS],
}

impl CacheLine {
    const EMPTY: CacheLine = CacheLine { fragments: [0; LINE_SLOTS], references: [0; LINE_SLOTS] };

    fn get(&self, slot: usize) -> (u32, u32) {
        (self.fragments[slot], self.references[slot])
    }

    fn set(&mut self, slot: usize, fragment: u32, stored: u32) {
        self.fragments[slot] = fragment;
        self.references[slot] = stored;
    }

    /// Returns a mask whose bit `i + 1` is set if slot `i` has an entry with this fragment.
    ///
    /// From bit 1, because then all eight terms have the same form, a shift, and LLVM vectorizes them: 20 instructions,
    /// no branch. From bit 0, the different first term leaves it with four lanes and 50 instructions.
    fn match_mask(&self, fragment: u32) -> u32 {
        let mut mask = 0;
        for slot in 0..LINE_SLOTS {
            let hit = (self.fragments[slot] == fragment) & (self.references[slot] != 0);
            mask |= u32::from(hit) << (slot + 1);
        }
        mask
    }

    /// Returns a mask whose bit `i + 1` is set if slot `i` is empty.
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

    /// Returns the first empty slot.
    fn vacancy(&self) -> Option<usize> {
        let mask = self.vacancy_mask();
        (mask != 0).then(|| mask.trailing_zeros() as usize - 1)
    }
}

/// Positions of a [`Page::match_mask`], those of the probe's line first.
struct Matches {
    mask: u32,
    probe: Probe,
}

impl Iterator for Matches {
    type Item = SlotPosition;

    fn next(&mut self) -> Option<SlotPosition> {
        if self.mask == 0 {
            return None;
        }
        let position = self.mask.trailing_zeros() as usize - 1;
        self.mask &= self.mask - 1;
        let Probe { fragment, line } = self.probe;
        let line = if position < LINE_SLOTS { line } else { other_line(line, fragment) };
        Some((line, position % LINE_SLOTS))
    }
}

#[cfg(test)]
impl Table {
    /// Asserts the invariants in the module documentation.
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
                        assert_eq!(fragment, 0, "fragment of an empty slot is not 0");
                    } else {
                        assert_eq!(u64::from(fragment) >> (32 - info.local_depth), u64::from(info.prefix));
                    }
                }
            }
        }
        assert_eq!(len, self.len);
        // The ranges belong to different pages (checked above), so they are disjoint; with this they cover the
        // directory.
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

    use moontide_rt::SplitMix64;

    use super::*;

    /// The `n`th id of a sequence of distinct ids, each computed independently of the others.
    fn nth_id(n: u32) -> ObjectId {
        let hash = SplitMix64::new(u64::from(n)).next_u64();
        ObjectId((u128::from(hash) << 64 | u128::from(n)).to_le_bytes())
    }

    /// An id with the given fragment and line; all other bits are 0.
    fn id_at(fragment: u32, line: u64) -> ObjectId {
        ObjectId((u128::from(u64::from(fragment) << 32 | line) << 64).to_le_bytes())
    }

    fn one_candidate(table: &Table, id: ObjectId) -> ProbeResult {
        let mut out = [ProbeResult::None];
        table.candidates(&[id], &mut out);
        out[0]
    }

    #[test]
    fn table_finds_replaces_and_removes_entry() {
        let (mut table, id) = (Table::new(), nth_id(1));
        assert_eq!(table.find(id, |_| true), None);
        assert_eq!(one_candidate(&table, id), ProbeResult::None);
        table.insert(id, 0);
        assert_eq!(table.find(id, |_| true), Some(0));
        assert_eq!(table.find(id, |_| false), None, "record did not match");
        assert!(!table.replace(id, 5, 6));
        assert!(!table.replace(nth_id(2), 0, 6));
        assert!(table.replace(id, 0, u32::MAX - 1));
        assert_eq!(one_candidate(&table, id), ProbeResult::One(u32::MAX - 1));
        assert!(!table.remove(id, 0), "reference was replaced");
        assert!(!table.remove(id, u32::MAX), "not a reference");
        assert!(table.remove(id, u32::MAX - 1));
        assert!(!table.remove(id, u32::MAX - 1));
        assert_eq!(table.len(), 0);
        table.audit();
    }

    #[test]
    fn empty_slot_does_not_match_fragment_zero() {
        let (mut table, zero) = (Table::new(), id_at(0, 7));
        assert_eq!(table.find(zero, |_| true), None);
        assert_eq!(one_candidate(&table, zero), ProbeResult::None);
        table.insert(zero, 3);
        assert_eq!(one_candidate(&table, zero), ProbeResult::One(3));
        assert!(table.remove(zero, 3));
        assert_eq!(one_candidate(&table, zero), ProbeResult::None);
    }

    #[test]
    fn equal_fragments_are_resolved_by_record() {
        let (mut table, id) = (Table::new(), id_at(0xABCD_EF01, 9));
        // 8 in each of two lines: the maximum of one probe in a page.
        (0..16).for_each(|reference| table.insert(id, reference));
        assert_eq!(one_candidate(&table, id), ProbeResult::Several);
        assert!((0..16).all(|expected| table.find(id, |reference| reference == expected) == Some(expected)));
        (0..16).for_each(|reference| assert!(table.remove(id, reference)));
        assert_eq!(one_candidate(&table, id), ProbeResult::None);
        table.audit();
    }

    #[test]
    #[should_panic(expected = "reserved for empty slots")]
    fn insert_of_reserved_reference_panics() {
        Table::new().insert(nth_id(1), u32::MAX);
    }

    #[test]
    #[should_panic(expected = "page of 16 ids with 12 equal bits cannot be split")]
    fn insert_of_too_many_colliding_ids_panics() {
        let mut table = Table { depth_max: 12, ..Table::new() };
        (0..17).for_each(|reference| table.insert(id_at(0xFFF0_0000, 8), reference));
    }

    #[test]
    fn insert_relocates_entry_before_page_splits() {
        let mut table = Table::new();
        // 16 entries fill lines 0 and 1. All but one can only be in these (distance 1); that one can move to line 3.
        table.insert(id_at(0b11, 0), 99);
        (0..15).for_each(|reference| table.insert(id_at(1 << 31 >> reference, 0), reference));
        assert_eq!((table.page(0).0[0].count(), table.page(0).0[1].count()), (8, 8));
        table.insert(id_at(0x0F00_0000, 1), 15);
        assert_eq!(table.depth, 0, "no split was needed");
        assert_eq!(table.page(0).0[3].count(), 1);
        assert_eq!(table.find(id_at(0b11, 0), |_| true), Some(99), "found in its other line");
        assert_eq!(table.find(id_at(0x0F00_0000, 1), |_| true), Some(15));
        // For the next insertion all 16 can only be in these two lines.
        table.insert(id_at(0xF000_0000, 0), 16);
        assert_eq!((table.depth, table.infos.len()), (1, 2));
        table.audit();
        assert_eq!(table.len(), 18);
        assert!((0..15).all(|n| table.find(id_at(1 << 31 >> n, 0), |_| true) == Some(n)));
    }

    #[test]
    fn ids_with_long_common_prefix_split_pages() {
        let mut table = Table::new();
        let ids: Vec<_> = (0..17).map(|n| id_at(0xABC0_0000 | n << 16, 5)).collect();
        (0..).zip(&ids).for_each(|(reference, &id)| table.insert(id, reference));
        // The top 11 bits agree: 11 splits leave one half empty, the 12th separates 16 from 1.
        assert_eq!((table.depth, table.infos.len()), (12, 13));
        table.audit();
        assert!(
            (0..).zip(&ids).all(|(reference, &id)| one_candidate(&table, id) == ProbeResult::One(reference))
        );
        // The page of the 16 could always merge, but tries it only when it is empty; then it merges up to the root at
        // once.
        for (reference, &id) in ids.iter().enumerate() {
            assert_eq!(table.depth, if reference < 16 { 12 } else { 0 });
            assert!(table.remove(id, reference as u32));
            table.audit();
        }
        assert_eq!((table.depth, table.infos.len(), table.directory.len()), (0, 1, 1));
    }

    #[test]
    fn page_merge_that_does_not_fit_is_skipped() {
        let mut table = Table::new();
        // 16 + 16 entries of lines 0 and 1 on both sides of the first bit.
        let ids: Vec<_> = (0..32).map(|n| id_at(((n % 2) << 31) | (n << 8), 0)).collect();
        (0..).zip(&ids).for_each(|(reference, &id)| table.insert(id, reference));
        assert_eq!((table.depth, table.infos.len()), (1, 2));
        // Two entries elsewhere, whose removal makes the first page's count a multiple of 16.
        (32..34).for_each(|reference| table.insert(id_at(0, 32), reference));
        (32..34).for_each(|reference| assert!(table.remove(id_at(0, 32), reference)));
        assert_eq!((table.infos[0].count, table.infos[1].count), (16, 16));
        assert_eq!(table.infos.len(), 2, "merge was refused");
        table.audit();
        for (reference, &id) in ids.iter().enumerate() {
            assert_eq!(table.find(id, |_| true), Some(reference as u32));
            assert!(table.remove(id, reference as u32));
        }
        table.audit();
        assert_eq!(table.infos.len(), 1);
    }

    #[test]
    fn page_merge_relocates_entries_to_fit() {
        let probe = |n: u32, distance: u32| Probe { fragment: n << 8 | distance, line: 0 };
        let (mut page, mut other) = (Page::EMPTY, Page::EMPTY);
        // Lines 0 and 1 are full; all but one of their entries can only be in these two lines.
        assert!(page.put(probe(0, 3), 1));
        assert!((1..16).all(|n| page.put(probe(n, 1), n + 1)));
        // In the same lines of the other page: one that goes to line 5, one that needs the entry above to move.
        assert!(other.put(probe(16, 5), 17));
        assert!(other.put(probe(17, 1), 18));
        assert!(page.put_all(&other));
        assert_eq!([3, 5].map(|line| page.0[line].get(0)), [(3, 1), (16 << 8 | 5, 17)]);
        assert_eq!(page.count(), 18);
        // A second time, nothing can move.
        assert!(!page.clone().put_all(&other));
    }

    /// Performs random steps on a table and on a map. References simulate records: each belongs to an id.
    fn check_against_map(seed: u64, steps: usize, len_max: usize, id: impl Fn(u32) -> ObjectId) {
        println!("seed {seed}, len_max {len_max}");
        let mut rng = SplitMix64::new(seed);
        let (mut table, mut model) = (Table::new(), HashMap::<u32, u32>::new());
        let (mut live, mut next_reference) = (Vec::new(), 0);
        // Grows and shrinks alternately, so that splits and merges both happen often.
        let mut growing = true;
        for step in 0..steps {
            growing = if growing { live.len() < len_max } else { live.len() < len_max / 50 };
            match rng.index(10) {
                0 if !live.is_empty() => {
                    let n = live[rng.index(live.len())];
                    let old = model.insert(n, next_reference).unwrap();
                    assert!(table.replace(id(n), old, next_reference));
                    assert!(!table.replace(id(n), old, next_reference));
                    next_reference += 1;
                }
                choice if (choice < 8) == growing || live.is_empty() => {
                    let n = next_reference;
                    table.insert(id(n), n);
                    model.insert(n, n);
                    live.push(n);
                    next_reference += 1;
                }
                _ => {
                    let n = live.swap_remove(rng.index(live.len()));
                    let reference = model.remove(&n).unwrap();
                    assert!(table.remove(id(n), reference));
                    assert!(!table.remove(id(n), reference));
                }
            }
            let n = rng.index(next_reference as usize + 1) as u32;
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
        let mut out = vec![ProbeResult::None; ids.len()];
        table.candidates(&ids, &mut out);
        for (n, candidate) in (0..end).zip(out) {
            let mut matches = Vec::new();
            table.find(ids[n as usize], |reference| {
                matches.push(reference);
                false
            });
            let expected = match matches[..] {
                [] => ProbeResult::None,
                [reference] => ProbeResult::One(reference),
                _ => ProbeResult::Several,
            };
            assert_eq!(candidate, expected);
            assert!(model.get(&n).is_none_or(|reference| matches.contains(reference)));
        }
    }

    #[test]
    fn table_matches_hash_map() {
        for (seed, len_max) in [(1, 300), (2, 3_000), (3, 30_000)] {
            check_against_map(seed, len_max * 6, len_max, nth_id);
        }
    }

    #[test]
    fn table_matches_hash_map_with_colliding_ids() {
        // Few lines and few fragments: lines overflow from the start, pages split deep, merges are refused, and several
        // entries match one id.
        let collide = |n: u32| {
            let hash = (nth_id(n).as_u128() >> 64) as u64;
            id_at((hash >> 32) as u32 & 0xFF83_0006, hash & 1)
        };
        for seed in 4..8 {
            check_against_map(seed, 20_000, 1_500, collide);
        }
    }

    #[test]
    fn table_memory_shrinks_with_entries() {
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

    /// All pages split at about the same time: the test checks the mean over one doubling.
    #[test]
    fn table_uses_twelve_bytes_per_entry_on_average() {
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
