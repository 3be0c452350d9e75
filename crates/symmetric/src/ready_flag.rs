//! [`ReadyFlag`]: shows in shared memory that all pages of a record are written, without a call.
//!
//! A record that several threads or a kernel's programs fill page by page has a flag beside the node's word. The word
//! is the state that node and master know; the flag is ahead of it by the duration of a commit.
//!
//! ```text
//!   word │ epoch:62 │ state:2 │     WRITING(e) ── the last page is written ──▶ READY(e)
//!   pages_left │ tag of the epoch : 32 │ missing pages : 32 │
//!   digest │ sum of the pages' digests, if kernels compute them; otherwise 0
//!   offset, bytes │ range of the record in the segment
//! ```
//!
//! Write access: before pages are written, only the holder of the record's claim ([`ReadyFlag::prepare`]); then all
//! writers of its pages, by read-modify-writes with the epoch, so that a late writer (its claim has ended, and the
//! slot holds another record) changes nothing. The layout is fixed: kernels use its offsets.

use moontide_heap::{AtomicWord, Transition};
use moontide_rt::sync::{AtomicU64, Ordering};
use moontide_rt::{mutation_enabled, weakened};
use moontide_types::record::{State, Word};
use moontide_types::{Epoch, Span};

use crate::mutation::Mutation;

/// Length of a flag: a cache line, so that writers of two records do not share one.
pub const READY_FLAG_BYTES: u64 = 64;

/// Flag in shared memory: whether all pages of a record are written.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct ReadyFlag {
    word: AtomicWord,
    pages_left: AtomicU64,
    digest: AtomicU64,
    offset: AtomicU64,
    bytes: AtomicU64,
    reserved: [AtomicU64; 3],
}

// Atomics of the model checkers are larger than real ones.
#[cfg(not(any(loom, shuttle)))]
const _: () = {
    assert!(size_of::<ReadyFlag>() as u64 == READY_FLAG_BYTES);
    assert!(
        std::mem::offset_of!(ReadyFlag, pages_left) == 8 && std::mem::offset_of!(ReadyFlag, digest) == 16
    );
};

/// Result of counting a page.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageOutcome {
    /// Other pages are missing.
    Pending,
    /// It was the last page: the record is complete, and all processes can see it.
    Complete,
    /// The flag is for another version, or all pages of this one were counted before: nothing has changed.
    Stale,
}

/// Progress of a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RecordProgress {
    /// Pages are missing, or writing has not begun.
    Pending,
    /// All pages are written, and visible to a thread that sees this.
    Complete,
    /// The slot holds a later version.
    Gone,
}

impl ReadyFlag {
    /// Creates a flag outside of shared memory, for models.
    pub fn new() -> ReadyFlag {
        let (word, left, digest) = (AtomicWord::new(Word::default()), AtomicU64::new(0), AtomicU64::new(0));
        let (offset, bytes) = (AtomicU64::new(0), AtomicU64::new(0));
        ReadyFlag {
            word,
            pages_left: left,
            digest,
            offset,
            bytes,
            reserved: std::array::from_fn(|_| AtomicU64::new(0)),
        }
    }

    /// Prepares the flag for a version with `pages` pages, at least one, in the range `span` of its segment.
    ///
    /// # Panics
    /// If `pages` is 0.
    pub fn prepare(&self, epoch: Epoch, pages: u32, span: Span) {
        assert!(pages > 0, "a record without pages is complete at once; it needs no flag");
        // Relaxed: page writers learn of the version through something that orders, such as the plan that they
        // receive.
        self.pages_left.store(epoch_tag(epoch) << 32 | u64::from(pages), Ordering::Relaxed);
        self.digest.store(0, Ordering::Relaxed);
        self.offset.store(span.offset(), Ordering::Relaxed);
        self.bytes.store(span.len(), Ordering::Relaxed);
        self.word.set(Word::new(epoch, State::Writing));
    }

    /// Counts a written page of this version.
    pub fn page_done(&self, epoch: Epoch) -> PageOutcome {
        // AcqRel on success: the last counter has seen all other pages, and makes them visible to others.
        let order = weakened(Mutation::RelaxedCount, Ordering::AcqRel);
        let mut left = self.pages_left.load(Ordering::Relaxed);
        loop {
            let is_other = left >> 32 != epoch_tag(epoch) && !mutation_enabled(Mutation::CountOfOtherVersion);
            if is_other || left as u32 == 0 {
                return PageOutcome::Stale;
            }
            match self.pages_left.compare_exchange_weak(left, left - 1, order, Ordering::Relaxed) {
                Ok(_) => break,
                Err(found) => left = found,
            }
        }
        if left as u32 != 1 {
            return PageOutcome::Pending;
        }
        match self.word.publish(epoch) {
            Transition::Refused(_) => PageOutcome::Stale,
            Transition::Done(_) | Transition::Already => PageOutcome::Complete,
        }
    }

    /// Returns the range of this version in its segment, if the flag is for this version.
    pub fn span(&self, epoch: Epoch) -> Option<Span> {
        // Acquire, as in `load`: `prepare` stored the range before the word.
        let is_current = self.word.load().epoch() == epoch;
        let (offset, bytes) = (self.offset.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed));
        Span::new(offset, bytes).filter(|_| is_current)
    }

    /// Returns the progress of a version.
    pub fn progress(&self, epoch: Epoch) -> RecordProgress {
        progress_of(self.word.load(), epoch)
    }
}

/// Copy of a flag's words, for memory that the host can only access by copies. There, either all page writers are
/// kernels, or all are threads of one process that count among themselves and then mark the record as complete: a
/// copy cannot be a read-modify-write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadyFlagSnapshot {
    word: Word,
    left: u64,
    digest: u64,
    offset: u64,
    bytes: u64,
}

impl ReadyFlagSnapshot {
    /// Returns the words that [`ReadyFlag::prepare`] writes.
    ///
    /// # Panics
    /// If `pages` is 0.
    pub fn prepared(epoch: Epoch, pages: u32, span: Span) -> ReadyFlagSnapshot {
        assert!(pages > 0, "a record without pages is complete at once; it needs no flag");
        ReadyFlagSnapshot {
            word: Word::new(epoch, State::Writing),
            left: epoch_tag(epoch) << 32 | u64::from(pages),
            digest: 0,
            offset: span.offset(),
            bytes: span.len(),
        }
    }

    /// Returns the bytes in memory layout.
    pub fn encode(&self) -> [u8; READY_FLAG_BYTES as usize] {
        let words = [self.word.bits(), self.left, self.digest, self.offset, self.bytes];
        let mut bytes = [0; READY_FLAG_BYTES as usize];
        for (target, word) in bytes.chunks_exact_mut(8).zip(words) {
            target.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// Reads the bytes in memory layout.
    pub fn decode(bytes: &[u8; READY_FLAG_BYTES as usize]) -> ReadyFlagSnapshot {
        let word = |at: usize| u64::from_le_bytes(bytes[at * 8..at * 8 + 8].try_into().expect("8 bytes"));
        let (left, digest, offset, bytes) = (word(1), word(2), word(3), word(4));
        ReadyFlagSnapshot { word: Word::from_bits(word(0)), left, digest, offset, bytes }
    }

    /// As [`ReadyFlag::progress`].
    pub fn progress(&self, epoch: Epoch) -> RecordProgress {
        progress_of(self.word, epoch)
    }

    /// As [`ReadyFlag::span`].
    pub fn span(&self, epoch: Epoch) -> Option<Span> {
        Span::new(self.offset, self.bytes).filter(|_| self.word.epoch() == epoch)
    }

    /// Returns the words that reserve the record for a writer that writes all pages by copies: kernels find nothing
    /// to count, and change nothing. The caller writes [`ReadyFlagSnapshot::word_bytes`] first, then
    /// [`ReadyFlagSnapshot::left_bytes`]. `None` if a page was counted or the flag is for another version.
    pub fn reserved_for_copy(&self, epoch: Epoch, pages: u32) -> Option<ReadyFlagSnapshot> {
        let span = Span::new(self.offset, self.bytes)?;
        let is_untouched = *self == ReadyFlagSnapshot::prepared(epoch, pages, span);
        is_untouched.then_some(ReadyFlagSnapshot { word: Word::new(epoch, State::Free), left: 0, ..*self })
    }

    /// Returns the words of the complete record, for a flag that was reserved: the caller writes
    /// [`ReadyFlagSnapshot::left_bytes`] first, then [`ReadyFlagSnapshot::word_bytes`].
    pub fn completed(&self, epoch: Epoch) -> ReadyFlagSnapshot {
        ReadyFlagSnapshot { word: Word::new(epoch, State::Ready), left: epoch_tag(epoch) << 32, ..*self }
    }

    /// Returns the offset of the page counter in a flag, and its bytes.
    pub fn left_bytes(&self) -> (u64, [u8; 8]) {
        (8, self.left.to_le_bytes())
    }

    /// Returns the offset of the word in a flag, and its bytes.
    pub fn word_bytes(&self) -> (u64, [u8; 8]) {
        (0, self.word.bits().to_le_bytes())
    }
}

fn progress_of(word: Word, epoch: Epoch) -> RecordProgress {
    match word.epoch().cmp(&epoch) {
        std::cmp::Ordering::Less => RecordProgress::Pending,
        std::cmp::Ordering::Greater => RecordProgress::Gone,
        std::cmp::Ordering::Equal if word.state() == State::Ready => RecordProgress::Complete,
        std::cmp::Ordering::Equal => RecordProgress::Pending,
    }
}

impl Default for ReadyFlag {
    fn default() -> ReadyFlag {
        ReadyFlag::new()
    }
}

/// Returns 32 bits that distinguish the versions that one slot may have had. Sequences restart with every term, so
/// the tag contains both; two versions of one term differ within 2³² sequences, and two with the same sequence differ
/// in all terms. Kernels compute the same tag.
fn epoch_tag(epoch: Epoch) -> u64 {
    let bits = epoch.bits();
    (bits ^ (bits >> 40).wrapping_mul(0x9E37_79B1)) & u64::from(u32::MAX)
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    fn epoch(bits: u64) -> Epoch {
        Epoch::from_bits(bits).unwrap()
    }

    #[test]
    fn last_page_completes_record_and_stale_pages_are_ignored() {
        let flag = ReadyFlag::new();
        let (first, second) = (epoch(7), epoch(8 | 1 << 40));
        let span = Span::new(512, 2000).unwrap();
        flag.prepare(first, 2, span);
        assert_eq!((flag.span(first), flag.span(second)), (Some(span), None));
        assert_eq!(flag.progress(first), RecordProgress::Pending);
        assert_eq!(flag.page_done(second), PageOutcome::Stale);
        assert_eq!(flag.page_done(first), PageOutcome::Pending);
        assert_eq!(flag.page_done(first), PageOutcome::Complete);
        assert_eq!(flag.page_done(first), PageOutcome::Stale, "more pages counted than the record has");
        assert_eq!(
            (flag.progress(first), flag.progress(second)),
            (RecordProgress::Complete, RecordProgress::Pending)
        );
        flag.prepare(second, 1, span);
        assert_eq!(flag.page_done(first), PageOutcome::Stale);
        assert_eq!(
            (flag.progress(first), flag.progress(second)),
            (RecordProgress::Gone, RecordProgress::Pending)
        );
        assert_eq!(flag.page_done(second), PageOutcome::Complete);
    }

    #[test]
    fn epoch_tag_differs_between_terms() {
        let tags: std::collections::HashSet<u64> =
            (0..1000).map(|term| epoch_tag(epoch(term << 40 | 5))).collect();
        assert_eq!(tags.len(), 1000);
        // Kernels compute the same: `epoch_tag` in python/moontide/kernels/layout.py.
        assert_eq!(epoch_tag(epoch(3 << 40 | 5)), (5 ^ (3 * 0x9E37_79B1)) & 0xFFFF_FFFF);
    }

    #[test]
    fn ready_flag_snapshot_matches_memory_layout() {
        let (first, second) = (epoch(7), epoch(8));
        let span = Span::new(512, 2000).unwrap();
        let prepared = ReadyFlagSnapshot::prepared(first, 3, span);
        assert_eq!(ReadyFlagSnapshot::decode(&prepared.encode()), prepared);
        assert_eq!((prepared.span(first), prepared.span(second)), (Some(span), None));
        let flag = ReadyFlag::new();
        flag.prepare(first, 3, span);
        // SAFETY: a flag is 64 bytes of atomics, and only this thread accesses it.
        let bytes = unsafe { &*(&raw const flag).cast::<[u8; READY_FLAG_BYTES as usize]>() };
        assert_eq!(*bytes, prepared.encode());
        let reserved = prepared.reserved_for_copy(first, 3).unwrap();
        assert_eq!((reserved.progress(first), reserved.span(first)), (RecordProgress::Pending, Some(span)));
        let done = reserved.completed(first);
        assert_eq!(
            (done.progress(first), done.progress(second)),
            (RecordProgress::Complete, RecordProgress::Pending)
        );
        assert_eq!(prepared.progress(first), RecordProgress::Pending);
        assert_eq!(
            (
                prepared.reserved_for_copy(second, 3),
                prepared.reserved_for_copy(first, 2),
                done.reserved_for_copy(first, 3)
            ),
            (None, None, None)
        );
        let mut copied = prepared.encode();
        for (at, bytes) in [done.left_bytes(), done.word_bytes()] {
            copied[at as usize..at as usize + 8].copy_from_slice(&bytes);
        }
        assert_eq!(ReadyFlagSnapshot::decode(&copied), done);
    }

    #[test]
    #[should_panic(expected = "without pages")]
    fn ready_flag_for_zero_pages_panics() {
        ReadyFlag::new().prepare(epoch(1), 0, Span::new(0, 0).unwrap());
    }
}
