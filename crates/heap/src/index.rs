//! The local index: from an object's id to its slot, in memory that readers map read-only.
//!
//! Buckets of 8 entries, two candidate buckets per id in the same 4 KiB page, one `u64` an entry:
//!
//! ```text
//!   bit 63 ──── 48 │ 47 ──── 32 │ 31 ──────── 0
//!          tag:16  │ segment:16 │  slot + 1 : 32      0 = empty
//! ```
//!
//! The table is sized at twice the slots and never grows, so an entry that finds both buckets full is not
//! indexed and counted; such an object is still found through the master. An entry is a hint: the tag has 16
//! bits, and the slot may have changed hands. The reader's proof is the id in the header, under a pin.

use moontide_types::bounds::SEGMENTS_PER_NODE_MAX;
use moontide_types::{ObjectId, SegmentId, SlotId};

use crate::planted::{Bug, planted};
use crate::sync::{AtomicU64, Ordering};

/// Entries of one bucket: one cache line.
pub const ENTRIES_PER_BUCKET: usize = 8;

/// Buckets of one page. Both candidates of an id lie in one page, because with millions of objects a look at
/// another page costs more than the look at the bucket.
const BUCKETS_PER_PAGE: u64 = (4096 / (ENTRIES_PER_BUCKET * size_of::<u64>())) as u64;

/// Where an object may be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Place {
    /// The segment.
    pub segment: SegmentId,
    /// The slot in it.
    pub slot: SlotId,
}

/// What became of an insertion.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Inserted {
    /// The entry is in the table.
    Indexed,
    /// Both buckets are full: local readers will not find the object.
    Overflow,
}

/// The table, on a slice of atomics that is a whole number of buckets.
#[derive(Clone, Copy, Debug)]
pub struct Index<'a> {
    entries: &'a [AtomicU64],
    pages: u64,
    buckets_per_page: u64,
}

impl<'a> Index<'a> {
    /// Buckets for `slots` slots: twice as many entries as slots, in whole pages.
    pub fn buckets_for(slots: u64) -> u64 {
        (2 * slots)
            .div_ceil(ENTRIES_PER_BUCKET as u64)
            .next_multiple_of(BUCKETS_PER_PAGE)
            .max(BUCKETS_PER_PAGE)
    }

    /// Whether a table can have this many buckets.
    pub fn is_whole(buckets: u64) -> bool {
        buckets > 0 && buckets.is_multiple_of(BUCKETS_PER_PAGE)
    }

    /// The table on `entries`.
    ///
    /// # Panics
    /// If there are not whole pages of buckets, or, for models, at least two buckets and no part of one.
    #[inline]
    pub fn new(entries: &'a [AtomicU64]) -> Index<'a> {
        let buckets = (entries.len() / ENTRIES_PER_BUCKET) as u64;
        let buckets_per_page = buckets.min(BUCKETS_PER_PAGE);
        assert!(entries.len().is_multiple_of(ENTRIES_PER_BUCKET) && buckets >= 2);
        assert!(buckets.is_multiple_of(buckets_per_page));
        Index { entries, pages: buckets / buckets_per_page, buckets_per_page }
    }

    /// Adds an entry. The slot must be READY: Release pairs with the Acquire in [`Index::find`], although the
    /// reader's pin would notice an entry that is too early.
    pub fn insert(&self, id: &ObjectId, place: Place) -> Inserted {
        let entry = entry(id, place);
        loop {
            let [a, b] = self.buckets_of(id);
            let vacant =
                |bucket: &[AtomicU64]| bucket.iter().filter(|e| e.load(Ordering::Relaxed) == 0).count();
            let bucket = if vacant(a) >= vacant(b) { a } else { b };
            let Some(empty) = bucket.iter().find(|e| e.load(Ordering::Relaxed) == 0) else {
                return Inserted::Overflow;
            };
            if planted(Bug::InsertByStore) {
                empty.store(entry, Ordering::Release);
                return Inserted::Indexed;
            }
            // Another thread of the owner may have taken the place meanwhile: look again.
            if empty.compare_exchange(0, entry, Ordering::Release, Ordering::Relaxed).is_ok() {
                return Inserted::Indexed;
            }
        }
    }

    /// Removes an entry; `false` if it was not there (it had overflowed).
    pub fn remove(&self, id: &ObjectId, place: Place) -> bool {
        let entry = entry(id, place);
        self.buckets_of(id).into_iter().flatten().any(|e| {
            // Relaxed: the word, not the index, keeps readers out.
            e.compare_exchange(entry, 0, Ordering::Relaxed, Ordering::Relaxed).is_ok()
        })
    }

    /// Asks `try_place` about every place where the object may be, until it says yes.
    #[inline]
    pub fn find<T>(&self, id: &ObjectId, mut try_place: impl FnMut(Place) -> Option<T>) -> Option<T> {
        let tag = tag(id);
        let buckets = self.buckets_of(id);
        // Both lines are on their way before the first one is looked at.
        buckets.iter().for_each(|bucket| prefetch(bucket.as_ptr()));
        for bucket in buckets {
            for e in bucket {
                let entry = e.load(Ordering::Acquire);
                if entry >> 48 == tag && entry as u32 != 0 {
                    let place = Place {
                        segment: SegmentId((entry >> 32) as u32 & 0xffff),
                        slot: SlotId(entry as u32 - 1),
                    };
                    if let Some(found) = try_place(place) {
                        return Some(found);
                    }
                }
            }
        }
        None
    }

    /// How many entries are taken. Reads the whole table.
    pub fn len(&self) -> usize {
        self.entries.iter().filter(|e| e.load(Ordering::Relaxed) != 0).count()
    }

    /// Whether no entry is taken. Reads the table up to the first one that is.
    pub fn is_empty(&self) -> bool {
        self.entries.iter().all(|e| e.load(Ordering::Relaxed) == 0)
    }

    #[inline]
    fn buckets_of(&self, id: &ObjectId) -> [&'a [AtomicU64]; 2] {
        let bits = id.as_u128();
        // The upper half chooses the page by its high bits, and gives the tag from its low ones; the lower half
        // chooses two different buckets in the page.
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

fn entry(id: &ObjectId, place: Place) -> u64 {
    assert!(place.segment.0 < SEGMENTS_PER_NODE_MAX);
    tag(id) << 48 | u64::from(place.segment.0) << 32 | (u64::from(place.slot.0) + 1)
}

/// Asks for a cache line ahead of its use.
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
    use super::*;

    fn table(slots: u64) -> Vec<AtomicU64> {
        let entries = Index::buckets_for(slots) as usize * ENTRIES_PER_BUCKET;
        std::iter::repeat_with(|| AtomicU64::new(0)).take(entries).collect()
    }

    /// Uniform ids, as keyed BLAKE3 makes them (splitmix64).
    fn id(n: u64) -> ObjectId {
        let mix = |mut z: u64| {
            z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
            z ^ (z >> 31)
        };
        let (a, b) = (mix(2 * n + 1), mix(2 * n + 2));
        ObjectId((u128::from(a) << 64 | u128::from(b)).to_le_bytes())
    }

    fn place(n: u64) -> Place {
        Place { segment: SegmentId(n as u32 % 5), slot: SlotId(n as u32) }
    }

    #[test]
    fn a_full_table_of_slots_overflows_next_to_never() {
        let slots = 100_000;
        let entries = table(slots);
        let index = Index::new(&entries);
        let overflow = (0..slots).filter(|&n| index.insert(&id(n), place(n)) == Inserted::Overflow).count();
        assert_eq!(overflow, 0);
        for n in 0..slots {
            let found = index.find(&id(n), |p| (p == place(n)).then_some(p));
            assert_eq!(found, Some(place(n)));
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
        assert!((0..slots).all(|n| index.remove(&id(n), place(n))));
        assert!(index.is_empty() && !index.remove(&id(1), place(1)));
    }

    #[test]
    fn overflow_is_said_and_harms_nobody() {
        let entries: Vec<_> = table(1).into_iter().take(2 * ENTRIES_PER_BUCKET).collect();
        let index = Index::new(&entries);
        let inserted: Vec<_> = (0..20).map(|n| index.insert(&id(n), place(n))).collect();
        assert_eq!(inserted.iter().filter(|&&i| i == Inserted::Indexed).count(), 16);
        assert_eq!(index.len(), 16);
        for n in 0..20 {
            let found = index.find(&id(n), |p| (p == place(n)).then_some(())).is_some();
            assert_eq!(found, inserted[n as usize] == Inserted::Indexed);
        }
    }

    #[test]
    fn one_id_may_stand_twice_while_a_new_version_replaces_an_old_one() {
        let entries = table(100);
        let index = Index::new(&entries);
        let _ = index.insert(&id(1), place(10));
        let _ = index.insert(&id(1), place(11));
        let mut seen = vec![];
        let _: Option<()> = index.find(&id(1), |p| {
            seen.push(p);
            None
        });
        assert_eq!(seen.len(), 2);
        assert!(index.remove(&id(1), place(10)));
        assert_eq!(index.find(&id(1), Some), Some(place(11)));
    }
}
