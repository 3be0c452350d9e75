//! [`SharedBarrierMemory`]: rank words of a barrier in regions, and [`SpinThenFutex`]: spins first, then sleeps on a
//! futex.
//!
//! Spinning pays off only if the missing rank runs at the same time. With fewer cores than ranks it may be waiting
//! for this very core, so a rank yields the core almost at once.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64 as Count, Ordering as CountOrdering};
use std::time::Duration;

use moontide_rt::sync::AtomicU64;
use moontide_types::{Clock, MonoTime, SystemClock};

use crate::barrier::{BarrierMemory, WaitAction, WaitStrategy, wake_word_at};
use crate::ranks::Rank;

/// Number of spins that disables sleeping: a rank that must not call the system polls until its deadline.
pub const SPINS_UNTIL_DEADLINE: u32 = u32::MAX;

/// Polls before a rank sleeps if every rank has a core: about 100 µs, ten times the cost of a wake-up.
const SPINS: u32 = 2000;
/// The same if ranks share cores: the latency of a signal in flight.
const SPINS_OVERSUBSCRIBED: u32 = 30;
/// Polls between two checks of clock and members: some microseconds.
const SPINS_PER_CHECK: u32 = 64;

/// Rank words of one barrier, at the same offset of each rank's memory.
#[derive(Debug)]
pub struct SharedBarrierMemory<M> {
    rank_words: Vec<NonNull<AtomicU64>>,
    words: usize,
    /// Futex calls of this process, to sleep and to wake.
    calls: Count,
    /// Keeps the memory mapped.
    _memory: Arc<M>,
}

// SAFETY: the rank words are atomics in memory that remains mapped for the life of this value.
unsafe impl<M: Send + Sync> Send for SharedBarrierMemory<M> {}
// SAFETY: as above.
unsafe impl<M: Send + Sync> Sync for SharedBarrierMemory<M> {}

impl<M> SharedBarrierMemory<M> {
    /// Uses the rank words at these addresses.
    ///
    /// # Safety
    /// Each must be aligned and extend over `words` words that remain mapped during the life of `memory`, and that
    /// every process accesses as atomics only.
    pub(crate) unsafe fn new(
        rank_words: Vec<NonNull<AtomicU64>>,
        words: usize,
        memory: Arc<M>,
    ) -> SharedBarrierMemory<M> {
        assert!(rank_words.iter().all(|words| words.is_aligned()));
        SharedBarrierMemory { rank_words, words, calls: Count::new(0), _memory: memory }
    }

    /// Returns the number of futex calls of this process, to sleep or to wake a rank.
    pub fn futex_calls(&self) -> u64 {
        self.calls.load(CountOrdering::Relaxed)
    }

    /// Returns the wait strategy for one wait in this barrier. `spins` as in [`SpinThenFutex::spins_for`].
    pub fn wait_strategy(&self, spins: u32, timeout: Duration) -> SpinThenFutex<'_> {
        SpinThenFutex {
            calls: &self.calls,
            spins_left: spins,
            polls_until_check: SPINS_PER_CHECK,
            timeout,
            deadline: None,
        }
    }
}

impl<M> BarrierMemory for SharedBarrierMemory<M> {
    #[inline]
    fn rank_words(&self, rank: Rank) -> &[AtomicU64] {
        // SAFETY: guaranteed by the caller of `new`; every bit pattern is an AtomicU64.
        unsafe { std::slice::from_raw_parts(self.rank_words[rank.index()].as_ptr(), self.words) }
    }

    #[cold]
    fn wake(&self, rank: Rank) {
        self.calls.fetch_add(1, CountOrdering::Relaxed);
        let wake_word = &self.rank_words(rank)[wake_word_at(self.rank_words.len())];
        // SAFETY: the word is mapped; a wake-up without a sleeper is harmless.
        unsafe { libc::syscall(libc::SYS_futex, low_half(wake_word), libc::FUTEX_WAKE, 1) };
    }
}

/// Wait strategy that spins, and then sleeps on the wake word until a deadline.
#[derive(Debug)]
pub struct SpinThenFutex<'a> {
    calls: &'a Count,
    spins_left: u32,
    polls_until_check: u32,
    timeout: Duration,
    /// Starts at the first read of the clock; a wait that finds all ranks arrived never reads it.
    deadline: Option<MonoTime>,
}

impl SpinThenFutex<'_> {
    /// Returns the number of polls before a rank of a world of this size sleeps.
    pub fn spins_for(ranks: usize) -> u32 {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        if cores < ranks { SPINS_OVERSUBSCRIBED } else { SPINS }
    }

    fn deadline(&mut self, now: MonoTime) -> MonoTime {
        *self.deadline.get_or_insert(now.after(self.timeout))
    }
}

impl WaitStrategy for SpinThenFutex<'_> {
    #[inline]
    fn next(&mut self) -> WaitAction {
        if self.spins_left > 0 && self.polls_until_check > 0 {
            self.polls_until_check -= 1;
            if self.spins_left != SPINS_UNTIL_DEADLINE {
                self.spins_left -= 1;
            }
            return WaitAction::Poll;
        }
        let now = SystemClock.now();
        if now >= self.deadline(now) {
            return WaitAction::TimedOut;
        }
        if self.spins_left == 0 {
            return WaitAction::Sleep;
        }
        self.polls_until_check = SPINS_PER_CHECK;
        WaitAction::CheckMembers
    }

    #[cold]
    fn sleep(&mut self, wake_word: &AtomicU64, seen: u64) {
        let now = SystemClock.now();
        let left = self.deadline(now).since(now);
        let left = libc::timespec {
            tv_sec: left.as_secs().try_into().unwrap_or(libc::time_t::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        self.calls.fetch_add(1, CountOrdering::Relaxed);
        // SAFETY: the word is mapped and the time is on this stack; the kernel compares and sleeps atomically.
        unsafe {
            libc::syscall(
                libc::SYS_futex,
                low_half(wake_word),
                libc::FUTEX_WAIT,
                seen as u32,
                &raw const left,
            )
        };
    }
}

/// Returns the half of a wake word that changes with every wake-up, as the futex needs it: 32 bits. Little-endian
/// only, see lib.rs.
fn low_half(wake_word: &AtomicU64) -> *const u32 {
    std::ptr::from_ref(wake_word).cast()
}
