//! [`Flag`]: how those who write a record's pages tell others that all of them are there, without a call.
//!
//! A record that is filled in pieces, by several threads or by a kernel's programs, has a flag beside the node's word.
//! The word says what the node and the master know; the flag is ahead of it, by the time that a commit takes.
//!
//! ```text
//!   word │ epoch:62 │ state:2 │     WRITING(e) ── the last page is there ──▶ READY(e)
//!   left │ mark of the epoch : 32 │ pages that are missing : 32 │
//!   digest │ sum of the pages' digests, of kernels that make them; 0 otherwise
//!   offset, bytes │ which bytes of the segment are meant
//! ```
//!
//! Who may touch it: before anybody writes pages, the holder of the record's claim alone ([`Flag::prepare`]); then all who
//! write pages for it, by read-modify-writes that name the epoch, so that one who is late (his claim has ended, and the slot is
//! another record's) changes nothing. The layout is fixed: kernels have it by offsets.

use moontide_types::record::{State, Word};
use moontide_types::{Epoch, Span};

use crate::planted::{Bug, planted, weakened};
use crate::sync::{AtomicU64, Ordering};
use crate::word::{AtomicWord, Transition};

/// Length of a flag: a line, so that two records' writers do not meet.
pub const FLAG_BYTES: u64 = 64;

/// Whether all pages of a record are there, in shared memory.
#[derive(Debug)]
#[repr(C, align(64))]
pub struct Flag {
    word: AtomicWord,
    left: AtomicU64,
    digest: AtomicU64,
    offset: AtomicU64,
    bytes: AtomicU64,
    spare: [AtomicU64; 3],
}

// The checkers' atomics are larger than real ones.
#[cfg(not(any(loom, shuttle)))]
const _: () = {
    assert!(size_of::<Flag>() as u64 == FLAG_BYTES);
    assert!(std::mem::offset_of!(Flag, left) == 8 && std::mem::offset_of!(Flag, digest) == 16);
};

/// What became of a page that was written.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Counted {
    /// Others are missing.
    More,
    /// It was the last one: the record is complete, and everybody can see that.
    Complete,
    /// The flag is about another version by now, or all of this one's pages were there: nothing has changed.
    Stale,
}

/// What a flag says of a version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// Pages are missing, or nobody has begun.
    NotYet,
    /// All of them are there, and visible to who sees this.
    Complete,
    /// The slot is a later version's.
    Gone,
}

impl Flag {
    /// A flag outside of shared memory, for models.
    pub fn new() -> Flag {
        let (word, left, digest) = (AtomicWord::new(Word::default()), AtomicU64::new(0), AtomicU64::new(0));
        let (offset, bytes) = (AtomicU64::new(0), AtomicU64::new(0));
        Flag { word, left, digest, offset, bytes, spare: std::array::from_fn(|_| AtomicU64::new(0)) }
    }

    /// Gets it ready for a version with so many pages, at least one, in these bytes of its segment.
    ///
    /// # Panics
    /// If there are no pages.
    pub fn prepare(&self, epoch: Epoch, pages: u32, span: Span) {
        assert!(pages > 0, "a record without pages is complete at once, and needs no flag");
        // Relaxed: those who count learn of the version by something that orders, such as the plan that they are given.
        self.left.store(mark_of(epoch) << 32 | u64::from(pages), Ordering::Relaxed);
        self.digest.store(0, Ordering::Relaxed);
        self.offset.store(span.offset(), Ordering::Relaxed);
        self.bytes.store(span.len(), Ordering::Relaxed);
        self.word.set(Word::new(epoch, State::Writing));
    }

    /// A page of this version has been written.
    pub fn page_done(&self, epoch: Epoch) -> Counted {
        // AcqRel on success: who counts last has seen all other pages, and lets others see them.
        let order = weakened(Bug::RelaxedCount, Ordering::AcqRel);
        let mut left = self.left.load(Ordering::Relaxed);
        loop {
            let is_other = left >> 32 != mark_of(epoch) && !planted(Bug::CountOfAnother);
            if is_other || left as u32 == 0 {
                return Counted::Stale;
            }
            match self.left.compare_exchange_weak(left, left - 1, order, Ordering::Relaxed) {
                Ok(_) => break,
                Err(found) => left = found,
            }
        }
        if left as u32 != 1 {
            return Counted::More;
        }
        match self.word.publish(epoch) {
            Transition::Refused(_) => Counted::Stale,
            Transition::Done(_) | Transition::Already => Counted::Complete,
        }
    }

    /// Which bytes of its segment this version is in, if it is this one's flag.
    pub fn span(&self, epoch: Epoch) -> Option<Span> {
        // Acquire, as in `load`: the place was stored before the word.
        let is_its = self.word.load().epoch() == epoch;
        let (offset, bytes) = (self.offset.load(Ordering::Relaxed), self.bytes.load(Ordering::Relaxed));
        Span::new(offset, bytes).filter(|_| is_its)
    }

    /// How far a version is.
    pub fn progress(&self, epoch: Epoch) -> Progress {
        progress_of(self.word.load(), epoch)
    }
}

/// A flag's words as they are at one moment, for memory that processors reach by copies alone. There, all who count are kernels,
/// or all are threads of one process that count for themselves and then say that all pages are there: a copy cannot be a
/// read-modify-write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FlagCopy {
    word: Word,
    left: u64,
    digest: u64,
    offset: u64,
    bytes: u64,
}

impl FlagCopy {
    /// What [`Flag::prepare`] writes.
    ///
    /// # Panics
    /// If there are no pages.
    pub fn prepared(epoch: Epoch, pages: u32, span: Span) -> FlagCopy {
        assert!(pages > 0, "a record without pages is complete at once, and needs no flag");
        FlagCopy {
            word: Word::new(epoch, State::Writing),
            left: mark_of(epoch) << 32 | u64::from(pages),
            digest: 0,
            offset: span.offset(),
            bytes: span.len(),
        }
    }

    /// The bytes as they lie in memory.
    pub fn encode(&self) -> [u8; FLAG_BYTES as usize] {
        let words = [self.word.bits(), self.left, self.digest, self.offset, self.bytes];
        let mut bytes = [0; FLAG_BYTES as usize];
        for (place, word) in bytes.chunks_exact_mut(8).zip(words) {
            place.copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    /// From the bytes as they lie in memory.
    pub fn decode(bytes: &[u8; FLAG_BYTES as usize]) -> FlagCopy {
        let word = |at: usize| u64::from_le_bytes(bytes[at * 8..at * 8 + 8].try_into().expect("8 bytes"));
        let (left, digest, offset, bytes) = (word(1), word(2), word(3), word(4));
        FlagCopy { word: Word::from_bits(word(0)), left, digest, offset, bytes }
    }

    /// As [`Flag::progress`].
    pub fn progress(&self, epoch: Epoch) -> Progress {
        progress_of(self.word, epoch)
    }

    /// As [`Flag::span`].
    pub fn span(&self, epoch: Epoch) -> Option<Span> {
        Span::new(self.offset, self.bytes).filter(|_| self.word.epoch() == epoch)
    }

    /// The same for who is to write all pages by copies: kernels find nothing to count on, and touch nothing. First
    /// [`FlagCopy::word_bytes`] go to their place, then [`FlagCopy::left_bytes`]. `None` if somebody has counted, or it is another
    /// version's.
    pub fn taken(&self, epoch: Epoch, pages: u32) -> Option<FlagCopy> {
        let span = Span::new(self.offset, self.bytes)?;
        let is_untouched = *self == FlagCopy::prepared(epoch, pages, span);
        is_untouched.then_some(FlagCopy { word: Word::new(epoch, State::Free), left: 0, ..*self })
    }

    /// The same with no page missing, of a flag that was taken: first [`FlagCopy::left_bytes`] go to their place, then
    /// [`FlagCopy::word_bytes`].
    pub fn completed(&self, epoch: Epoch) -> FlagCopy {
        FlagCopy { word: Word::new(epoch, State::Ready), left: mark_of(epoch) << 32, ..*self }
    }

    /// Where the counter lies in a flag, and its bytes.
    pub fn left_bytes(&self) -> (u64, [u8; 8]) {
        (8, self.left.to_le_bytes())
    }

    /// Where the word lies in a flag, and its bytes.
    pub fn word_bytes(&self) -> (u64, [u8; 8]) {
        (0, self.word.bits().to_le_bytes())
    }
}

fn progress_of(word: Word, epoch: Epoch) -> Progress {
    match word.epoch().cmp(&epoch) {
        std::cmp::Ordering::Less => Progress::NotYet,
        std::cmp::Ordering::Greater => Progress::Gone,
        std::cmp::Ordering::Equal if word.state() == State::Ready => Progress::Complete,
        std::cmp::Ordering::Equal => Progress::NotYet,
    }
}

impl Default for Flag {
    fn default() -> Flag {
        Flag::new()
    }
}

/// 32 bits that tell versions apart which one slot may have had. Sequences start anew with every term, so both are in it; two
/// versions of one term differ for 2³² sequences, and two of one sequence in all terms. Kernels compute the same.
fn mark_of(epoch: Epoch) -> u64 {
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
    fn the_last_page_completes_and_late_ones_change_nothing() {
        let flag = Flag::new();
        let (first, second) = (epoch(7), epoch(8 | 1 << 40));
        let span = Span::new(512, 2000).unwrap();
        flag.prepare(first, 2, span);
        assert_eq!((flag.span(first), flag.span(second)), (Some(span), None));
        assert_eq!(flag.progress(first), Progress::NotYet);
        assert_eq!(flag.page_done(second), Counted::Stale);
        assert_eq!(flag.page_done(first), Counted::More);
        assert_eq!(flag.page_done(first), Counted::Complete);
        assert_eq!(flag.page_done(first), Counted::Stale, "one page more than there are");
        assert_eq!((flag.progress(first), flag.progress(second)), (Progress::Complete, Progress::NotYet));
        flag.prepare(second, 1, span);
        assert_eq!(flag.page_done(first), Counted::Stale);
        assert_eq!((flag.progress(first), flag.progress(second)), (Progress::Gone, Progress::NotYet));
        assert_eq!(flag.page_done(second), Counted::Complete);
    }

    #[test]
    fn the_same_sequence_of_another_term_has_another_mark() {
        let marks: std::collections::HashSet<u64> =
            (0..1000).map(|term| mark_of(epoch(term << 40 | 5))).collect();
        assert_eq!(marks.len(), 1000);
        // What kernels compute: `mark_of` in python/moontide/kernels/layout.py.
        assert_eq!(mark_of(epoch(3 << 40 | 5)), (5 ^ (3 * 0x9E37_79B1)) & 0xFFFF_FFFF);
    }

    #[test]
    fn a_copy_is_what_lies_in_memory() {
        let (first, second) = (epoch(7), epoch(8));
        let span = Span::new(512, 2000).unwrap();
        let prepared = FlagCopy::prepared(first, 3, span);
        assert_eq!(FlagCopy::decode(&prepared.encode()), prepared);
        assert_eq!((prepared.span(first), prepared.span(second)), (Some(span), None));
        let flag = Flag::new();
        flag.prepare(first, 3, span);
        // SAFETY: a flag is 64 bytes of atomics, and this thread's.
        let bytes = unsafe { &*(&raw const flag).cast::<[u8; FLAG_BYTES as usize]>() };
        assert_eq!(*bytes, prepared.encode());
        let taken = prepared.taken(first, 3).unwrap();
        assert_eq!((taken.progress(first), taken.span(first)), (Progress::NotYet, Some(span)));
        let done = taken.completed(first);
        assert_eq!((done.progress(first), done.progress(second)), (Progress::Complete, Progress::NotYet));
        assert_eq!(prepared.progress(first), Progress::NotYet);
        assert_eq!(
            (prepared.taken(second, 3), prepared.taken(first, 2), done.taken(first, 3)),
            (None, None, None)
        );
        let mut copied = prepared.encode();
        for (at, bytes) in [done.left_bytes(), done.word_bytes()] {
            copied[at as usize..at as usize + 8].copy_from_slice(&bytes);
        }
        assert_eq!(FlagCopy::decode(&copied), done);
    }

    #[test]
    #[should_panic(expected = "without pages")]
    fn a_record_without_pages_has_no_flag() {
        Flag::new().prepare(epoch(1), 0, Span::new(0, 0).unwrap());
    }
}
