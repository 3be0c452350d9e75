//! [`RegionPosts`]: the posts of a barrier in regions, and [`Patience`]: spinning first, then sleeping on a futex.
//!
//! Spinning is worth it only where the rank that is waited for runs at the same time. With fewer cores than ranks it
//! may well be waiting for this very core, so a rank gives it up almost at once.

use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64 as Count, Ordering as CountOrdering};
use std::time::Duration;

use moontide_types::{Clock, MonoTime, SystemClock};

use crate::phase::{Next, Posts, Wait, bell_at};
use crate::ranks::Rank;
use crate::sync::AtomicU64;

/// Never sleeps: a rank that must not call the system polls until its deadline.
pub const SPINS_UNTIL_DEADLINE: u32 = u32::MAX;

/// Polls before a rank sleeps where every rank has a core: some 100 µs, ten times what a wake-up costs.
const SPINS: u32 = 2000;
/// The same where ranks share cores: as long as a signal that is on its way needs.
const SPINS_CROWDED: u32 = 30;
/// Polls between two looks at the clock and at the members: some microseconds.
const SPINS_PER_LOOK: u32 = 64;

/// The posts of one barrier, one per rank, each at the same place of that rank's memory.
#[derive(Debug)]
pub struct RegionPosts<M> {
    posts: Vec<NonNull<AtomicU64>>,
    words: usize,
    /// Calls to the futex, to sleep and to wake.
    calls: Count,
    /// Keeps the memory mapped.
    _memory: Arc<M>,
}

// SAFETY: the posts are atomics in memory that stays mapped for as long as this value lives.
unsafe impl<M: Send + Sync> Send for RegionPosts<M> {}
// SAFETY: as above.
unsafe impl<M: Send + Sync> Sync for RegionPosts<M> {}

impl<M> RegionPosts<M> {
    /// Posts at these addresses.
    ///
    /// # Safety
    /// Each must be aligned and reach over `words` words that stay mapped while `memory` lives, and that
    /// every process touches as atomics only.
    pub(super) unsafe fn new(posts: Vec<NonNull<AtomicU64>>, words: usize, memory: Arc<M>) -> RegionPosts<M> {
        assert!(posts.iter().all(|post| post.is_aligned()));
        RegionPosts { posts, words, calls: Count::new(0), _memory: memory }
    }

    /// How often this process has called the system to sleep or to wake somebody.
    pub fn futex_calls(&self) -> u64 {
        self.calls.load(CountOrdering::Relaxed)
    }

    /// Patience for one wait in a barrier of these posts. `spins` as in [`Patience::spins_for`].
    pub fn patience(&self, spins: u32, timeout: Duration) -> Patience<'_> {
        Patience {
            calls: &self.calls,
            spins_left: spins,
            until_look: SPINS_PER_LOOK,
            timeout,
            deadline: None,
        }
    }
}

impl<M> Posts for RegionPosts<M> {
    #[inline]
    fn post(&self, rank: Rank) -> &[AtomicU64] {
        // SAFETY: says `new`; every bit pattern is an AtomicU64.
        unsafe { std::slice::from_raw_parts(self.posts[rank.index()].as_ptr(), self.words) }
    }

    #[cold]
    fn wake(&self, rank: Rank) {
        self.calls.fetch_add(1, CountOrdering::Relaxed);
        let bell = &self.post(rank)[bell_at(self.posts.len())];
        // SAFETY: the word is mapped; waking nobody does no harm.
        unsafe { libc::syscall(libc::SYS_futex, low_half(bell), libc::FUTEX_WAKE, 1) };
    }
}

/// How long a rank waits, and how.
#[derive(Debug)]
pub struct Patience<'a> {
    calls: &'a Count,
    spins_left: u32,
    until_look: u32,
    timeout: Duration,
    /// Counted from the first look at the clock, which who finds everyone there never takes.
    deadline: Option<MonoTime>,
}

impl Patience<'_> {
    /// How often a rank of such a world polls before it sleeps.
    pub fn spins_for(ranks: usize) -> u32 {
        let cores = std::thread::available_parallelism().map_or(1, |cores| cores.get());
        if cores < ranks { SPINS_CROWDED } else { SPINS }
    }

    fn deadline(&mut self, now: MonoTime) -> MonoTime {
        *self.deadline.get_or_insert(now.after(self.timeout))
    }
}

impl Wait for Patience<'_> {
    #[inline]
    fn next(&mut self) -> Next {
        if self.spins_left > 0 && self.until_look > 0 {
            self.until_look -= 1;
            if self.spins_left != SPINS_UNTIL_DEADLINE {
                self.spins_left -= 1;
            }
            return Next::Poll;
        }
        let now = SystemClock.now();
        if now >= self.deadline(now) {
            return Next::GiveUp;
        }
        if self.spins_left == 0 {
            return Next::Sleep;
        }
        self.until_look = SPINS_PER_LOOK;
        Next::Look
    }

    #[cold]
    fn sleep(&mut self, bell: &AtomicU64, seen: u64) {
        let now = SystemClock.now();
        let left = self.deadline(now).since(now);
        let left = libc::timespec {
            tv_sec: left.as_secs().try_into().unwrap_or(libc::time_t::MAX),
            tv_nsec: left.subsec_nanos().into(),
        };
        self.calls.fetch_add(1, CountOrdering::Relaxed);
        // SAFETY: the word is mapped and the time stands on this stack; the kernel compares and sleeps in one go.
        unsafe {
            libc::syscall(libc::SYS_futex, low_half(bell), libc::FUTEX_WAIT, seen as u32, &raw const left)
        };
    }
}

/// The half of a bell that changes with every ring, as the kernel wants it: 32 bits. Little-endian only, see lib.rs.
fn low_half(bell: &AtomicU64) -> *const u32 {
    std::ptr::from_ref(bell).cast()
}
