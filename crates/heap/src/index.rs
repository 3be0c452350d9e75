//! Local index: object id → slot, in memory that readers map read-only.
//!
//! Buckets of 8 entries, two candidate buckets per id in the same 4 KiB page, one `u64` an entry:
//!
//! ```text
//!   bit 63 ──── 48 │ 47 ──── 32 │ 31 ──────── 0
//!          tag:16  │ segment:16 │  slot + 1 : 32      0 = empty
//! ```
//!
//! The table has twice as many entries as slots and never grows. An entry that finds both buckets full is not
//! indexed, and is counted; such an object is still found through the master. An entry is a hint: the tag has 16
//! bits, and the slot may hold another record by now. The reader's proof is the id in the header, under a pin.

use moontide_rt::mutation_enabled;
use moontide_rt::sync::{AtomicU64, Ordering};
use moontide_types::limits::SEGMENTS_PER_NODE_MAX;
use moontide_types::{ObjectId, SegmentId, SlotId};

use crate::mutation::Mutation;

/// Entries of one bucket: one cache line.
pub const ENTRIES_PER_BUCKET: usize = 8;

/// Buckets of one page. Both candidates of an id are in one page, because with millions of objects an access to
/// another page (TLB miss) costs more than an access to another bucket.
const BUCKETS_PER_PAGE: u64 = (4096 / (ENTRIES_PER_BUCKET * size_of::<u64>())) as u64;

/// Possible location of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct IndexEntry {
    /// Id of a segment of this node, below `SEGMENTS_PER_NODE_MAX`.
    pub segment: SegmentId,
    /// Slot of the segment.
    pub slot: SlotId,
}

/// Result of an insertion.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InsertOutcome {
    /// The entry is in the table.
    Indexed,
    /// Both buckets are full: local readers will not find the object.
    Overflow,
}

/// Index table on a slice of atomics whose length is a whole number of buckets.
#[derive(Clone, Copy, Debug)]
pub struct Index<'a> {
    entries: &'a [AtomicU64],
    pages: u64,
    buckets_per_page: u64,
}

impl<'a> Index<'a> {
    /// Returns the number of buckets for `slots` slots: twice as many entries as slots, in whole pages.
    pub fn buckets_for(slots: u64) -> u64 {
        (2 * slots)
            .div_ceil(ENTRIES_PER_BUCKET as u64)
            .next_multiple_of(BUCKETS_PER_PAGE)
            .max(BUCKETS_PER_PAGE)
    }

    /// Returns whether `buckets` is a valid number of buckets: whole pages, at least one.
    pub fn is_whole(buckets: u64) -> bool {
        buckets > 0 && buckets.is_multiple_of(BUCKETS_PER_PAGE)
    }

    /// Uses `entries` as the table.
    ///
    /// # Panics
    /// If `entries` is not whole pages of buckets, or, for models, at least two whole buckets.
    #[inline]
    pub fn new(entries: &'a [AtomicU64]) -> Index<'a> {
        let buckets = (entries.len() / ENTRIES_PER_BUCKET) as u64;
        let buckets_per_page = buckets.min(BUCKETS_PER_PAGE);
        assert!(entries.len().is_multiple_of(ENTRIES_PER_BUCKET) && buckets >= 2);
        assert!(buckets.is_multiple_of(buckets_per_page));
        Index { entries, pages: buckets / buckets_per_page, buckets_per_page }
    }

    /// Adds an entry. The slot must be READY. Release pairs with the Acquire in [`Index::find`], although the
    /// reader's pin would detect an entry that is visible too early.
    pub fn insert(&self, id: &ObjectId, location: IndexEntry) -> InsertOutcome {
        let entry = entry(id, location);
        loop {
            let [a, b] = self.buckets_of(id);
            let vacant =
                |bucket: &[AtomicU64]| bucket.iter().filter(|e| e.load(Ordering::Relaxed) == 0).count();
            let bucket = if vacant(a) >= vacant(b) { a } else { b };
            let Some(empty) = bucket.iter().find(|e| e.load(Ordering::Relaxed) == 0) else {
                return InsertOutcome::Overflow;
            };
            if mutation_enabled(Mutation::InsertByStore) {
                empty.store(entry, Ordering::Release);
                return InsertOutcome::Indexed;
            }
            // Another thread of the owner has filled the entry in the meantime: retry.
            if empty.compare_exchange(0, entry, Ordering::Release, Ordering::Relaxed).is_ok() {
                return InsertOutcome::Indexed;
            }
        }
    }

    /// Removes an entry. Returns `false` if it was not in the table because it had overflowed.
    pub fn remove(&self, id: &ObjectId, location: IndexEntry) -> bool {
        let entry = entry(id, location);
        self.buckets_of(id).into_iter().flatten().any(|e| {
            // Relaxed: the word, not the index, keeps readers out.
            e.compare_exchange(entry, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        })
    }

    /// Calls `try_entry` with each possible location of the object until it returns `Some`.
    #[inline]
    pub fn find<T>(&self, id: &ObjectId, mut try_entry: impl FnMut(IndexEntry) -> Option<T>) -> Option<T> {
        let tag = tag(id);
        let buckets = self.buckets_of(id);
        // Prefetch both lines before the first one is loaded.
        buckets.iter().for_each(|bucket| prefetch(bucket.as_ptr()));
        for bucket in buckets {
            for e in bucket {
                let entry = e.load(Ordering::Acquire);
                if entry >> 48 == tag && entry as u32 != 0 {
                    let location = IndexEntry {
                        segment: SegmentId((entry >> 32) as u32 & 0xffff),
                        slot: SlotId(entry as u32 - 1),
                    };
                    if let Some(found) = try_entry(location) {
                        return Some(found);
                    }
                }
            }
        }
        None
    }

    /// Returns the number of used entries. Reads the whole table.
    pub fn len(&self) -> usize {
        self.entries.iter().filter(|e| e.load(Ordering::Relaxed) != 0).count()
    }

    /// Returns whether no entry is used. Reads the table up to the first used one.
    pub fn is_empty(&self) -> bool {
        self.entries.iter().all(|e| e.load(Ordering::Relaxed) == 0)
    }

    #[inline]
    fn buckets_of(&self, id: &ObjectId) -> [&'a [AtomicU64]; 2] {
        let bits = id.as_u128();
        // The upper half selects the page by its high bits and provides the tag in its low ones; the lower half
        // selects two different buckets of the page.
        let scale = |random: u64, range: u64| ((u128::from(random) * u128::from(range)) >> 64) as u64;
        let (upper, lower) = ((bits >> 64) as u64, bits as u64);
        let page = scale(upper, self.pages) * self.buckets_per_page;
        let first = scale(lower, self.buckets_per_page);
        let step = 1 + scale(lower.rotate_left(32), self.buckets_per_page - 1);
        let second = (first + step) % self.buckets_per_page;
        [first, second].map(|bucket| {
            let at = (page + bucket) as usize * ENTRIES_PER_BUCKET;
            &self.entries[at..at + ENTRIES_PER_BUCKET]
        })
    }
}

#[inline]
fn tag(id: &ObjectId) -> u64 {
    (id.as_u128() >> 64) as u64 & 0xffff
}

fn entry(id: &ObjectId, location: IndexEntry) -> u64 {
    assert!(location.segment.0 < SEGMENTS_PER_NODE_MAX);
    tag(id) << 48 | u64::from(location.segment.0) << 32 | (u64::from(location.slot.0) + 1)
}

/// Prefetches a cache line.
#[inline(always)]
pub(crate) fn prefetch<T>(_at: *const T) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: a prefetch of any address is harmless.
    unsafe {
        std::arch::x86_64::_mm_prefetch::<{ std::arch::x86_64::_MM_HINT_T0 }>(_at.cast());
    }
}

const _: () = assert!(SEGMENTS_PER_NODE_MAX == 1 << 16);

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use moontide_rt::mix64;

    use super::*;

    fn table(slots: u64) -> Vec<AtomicU64> {
        let entries = Index::buckets_for(slots) as usize * ENTRIES_PER_BUCKET;
        std::iter::repeat_with(|| AtomicU64::new(0)).take(entries).collect()
    }

    /// Uniform ids, as keyed BLAKE3 computes them.
    fn id(n: u64) -> ObjectId {
        let (a, b) = (mix64(2 * n + 1), mix64(2 * n + 2));
        ObjectId((u128::from(a) << 64 | u128::from(b)).to_le_bytes())
    }

    fn location(n: u64) -> IndexEntry {
        IndexEntry { segment: SegmentId(n as u32 % 5), slot: SlotId(n as u32) }
    }

    #[test]
    fn index_at_full_load_has_no_overflow_and_few_false_candidates() {
        let slots = 100_000;
        let entries = table(slots);
        let index = Index::new(&entries);
        let overflow =
            (0..slots).filter(|&n| index.insert(&id(n), location(n)) == InsertOutcome::Overflow).count();
        assert_eq!(overflow, 0);
        for n in 0..slots {
            let found = index.find(&id(n), |p| (p == location(n)).then_some(p));
            assert_eq!(found, Some(location(n)));
        }
        // A false candidate needs the same 16-bit tag in one of two buckets: about 8 in 65,536 look-ups.
        let mut false_candidates = 0;
        for n in slots..2 * slots {
            let _: Option<()> = index.find(&id(n), |_| {
                false_candidates += 1;
                None
            });
        }
        assert!(false_candidates < 60, "{false_candidates} of {slots} misses had a false candidate");
        assert!((0..slots).all(|n| index.remove(&id(n), location(n))));
        assert!(index.is_empty() && !index.remove(&id(1), location(1)));
    }

    #[test]
    fn index_overflow_is_reported_and_keeps_other_entries() {
        let entries: Vec<_> = table(1).into_iter().take(2 * ENTRIES_PER_BUCKET).collect();
        let index = Index::new(&entries);
        let inserted: Vec<_> = (0..20).map(|n| index.insert(&id(n), location(n))).collect();
        assert_eq!(inserted.iter().filter(|&&i| i == InsertOutcome::Indexed).count(), 16);
        assert_eq!(index.len(), 16);
        for n in 0..20 {
            let found = index.find(&id(n), |p| (p == location(n)).then_some(())).is_some();
            assert_eq!(found, inserted[n as usize] == InsertOutcome::Indexed);
        }
    }

    #[test]
    fn index_holds_old_and_new_version_of_one_id() {
        let entries = table(100);
        let index = Index::new(&entries);
        let _ = index.insert(&id(1), location(10));
        let _ = index.insert(&id(1), location(11));
        let mut seen = vec![];
        let _: Option<()> = index.find(&id(1), |p| {
            seen.push(p);
            None
        });
        assert_eq!(seen.len(), 2);
        assert!(index.remove(&id(1), location(10)));
        assert_eq!(index.find(&id(1), Some), Some(location(11)));
    }
}
