//! [`World`]: the symmetric heap. Every rank owns a region of the same size, and all map all.
//!
//! A place in a world is `(rank, offset)`. Regions lie at different addresses in every process, so a pointer into the
//! own region is told to a peer's by `ptr − bases[me] + bases[peer]`: [`World::translate`].
//!
//! ```text
//!   rank 0 makes:   control region                               regions, one per rank, zeroed
//!                   ├ rows: who is alive (64 B per rank)         ├───────────┤├───────────┤├── …
//!                   └ posts: the world's own barrier               of rank 0    of rank 1
//! ```
//!
//! Ranks meet at a Unix socket of rank 0 (`rendezvous`). Memory outlives a rank that dies: the others keep what they
//! have mapped, and a process that comes in its place gets the same regions from rank 0. A predecessor must have ended,
//! by its pidfd: what it could still write are places of its rank, which are nobody else's, but they would be its
//! successor's. If rank 0 itself dies the others go on, and nobody can join any more.
//!
//! Not here: what lies in the regions, and who may touch what when. That is for the users of a world to state.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use moontide_types::{Clock, Generation, SystemClock};
use rustix::process::PidfdFlags;

use crate::flag::Flag;
use crate::liveness::{Liveness, NotYours, Occupant, Row};
use crate::phase::{Entry, PhaseBarrier, WaitError};
use crate::ranks::{RANKS_MAX, Rank, RankSet};
use crate::shm::door::{DoorError, wait_readable};
use crate::shm::posts::{Patience, RegionPosts};
use crate::shm::region::{HugePages, Protection, Region, RegionError};
use crate::shm::rendezvous::{self, Host};
use crate::sync::AtomicU64;

/// How large a world is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorldShape {
    /// How many ranks.
    pub ranks: u32,
    /// Length of each rank's region.
    pub bytes: u64,
}

/// How to join a world.
#[derive(Clone, Debug)]
pub struct WorldConfig {
    /// Its name: the path of rank 0's socket.
    pub path: PathBuf,
    /// Which rank this process is.
    pub rank: Rank,
    /// The same for all ranks.
    pub shape: WorldShape,
    /// Pages of the regions; rank 0 decides.
    pub huge: HugePages,
    /// How long to wait for the others.
    pub timeout: Duration,
}

/// Why a world could not be joined, or did not meet.
#[derive(Debug, thiserror::Error)]
pub enum WorldError {
    /// A world of no ranks, of too many, or without memory.
    #[error("a world has 1 to {RANKS_MAX} ranks with whole pages of memory; this one has {ranks} with {bytes} bytes",
        ranks = .0.ranks, bytes = .0.bytes)]
    Shape(WorldShape),
    /// Rank 0 has made another world under this name.
    #[error(
        "rank 0's world has {} ranks with {} bytes each, not {} with {}: give all ranks the same settings",
        found.ranks, found.bytes, ours.ranks, ours.bytes
    )]
    OtherShape {
        /// What rank 0 has.
        found: WorldShape,
        /// What this process wants.
        ours: WorldShape,
    },
    /// There is no such rank.
    #[error("rank {rank} of {ranks}: ranks count from 0")]
    Rank {
        /// Which was asked for.
        rank: Rank,
        /// How many there are.
        ranks: u32,
    },
    /// Rank 0 could not be reached, or refused.
    #[error(transparent)]
    Door(#[from] DoorError),
    /// Memory could not be made or mapped.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// Somebody else is this rank.
    #[error("rank {rank} is taken: {holder}")]
    Taken {
        /// Which rank.
        rank: Rank,
        /// By whom.
        holder: NotYours,
    },
    /// The others did not come, or have gone on.
    #[error(transparent)]
    Wait(#[from] WaitError),
}

/// The mapped memory of a world.
#[derive(Debug)]
pub(super) struct WorldMemory {
    shape: WorldShape,
    control: Region,
    regions: Vec<Region>,
}

impl WorldMemory {
    pub(super) fn create(shape: WorldShape, huge: HugePages) -> Result<WorldMemory, RegionError> {
        let control = Region::create(
            "moontide-world",
            control_bytes(shape),
            HugePages::IfAllowed,
            Protection::AllWrite,
        )?;
        let region = |_| Region::create("moontide-rank", shape.bytes, huge, Protection::AllWrite);
        let regions = (0..shape.ranks).map(region).collect::<Result<_, _>>()?;
        Ok(WorldMemory { shape, control, regions })
    }

    pub(super) fn from_parts(shape: WorldShape, control: Region, regions: Vec<Region>) -> WorldMemory {
        assert!(regions.len() == shape.ranks as usize && control.len() == control_bytes(shape));
        WorldMemory { shape, control, regions }
    }

    pub(super) fn shape(&self) -> WorldShape {
        self.shape
    }

    pub(super) fn control(&self) -> &Region {
        &self.control
    }

    pub(super) fn region(&self, rank: Rank) -> &Region {
        &self.regions[rank.index()]
    }

    pub(super) fn row(&self, rank: Rank) -> &Row {
        // SAFETY: every bit pattern is a row, and its words are atomics.
        let rows: &[Row] = unsafe { self.control.slice(0, self.shape.ranks.into()) };
        &rows[rank.index()]
    }
}

/// Rows, then posts; both are whole lines.
pub(super) fn control_bytes(shape: WorldShape) -> u64 {
    let ranks = shape.ranks as usize;
    let bytes = ranks * size_of::<Row>() + ranks * post_words(ranks) * size_of::<AtomicU64>();
    (bytes as u64).next_multiple_of(HugePages::IfAllowed.page_bytes())
}

fn post_words(ranks: usize) -> usize {
    PhaseBarrier::<RegionPosts<WorldMemory>>::words(ranks)
}

/// A rank's place in a world.
#[derive(Debug)]
pub struct World {
    memory: Arc<WorldMemory>,
    bases: Vec<NonNull<u8>>,
    me: Rank,
    occupant: Occupant,
    /// One at a time: a process is one rank.
    side: Mutex<Side>,
    spins: u32,
    /// Parts of the own region that somebody has.
    lent: Mutex<Vec<(u64, u64)>>,
    /// Rank 0's only.
    _host: Option<Host>,
}

/// A rank's side of the world's barrier.
#[derive(Debug)]
struct Side {
    barrier: PhaseBarrier<RegionPosts<WorldMemory>>,
    /// Asked to be let in.
    wishes: bool,
    /// Arrived, and not yet met.
    waits: bool,
}

// SAFETY: the bases are addresses of regions that `memory` keeps mapped.
unsafe impl Send for World {}
// SAFETY: as above.
unsafe impl Sync for World {}

impl World {
    /// Joins a world. The first time it waits for all ranks; a process that comes in place of one that died
    /// waits for nobody, and meets the others at its next [`World::barrier`].
    ///
    /// # Safety
    /// All ranks map each other's memory for writing. They must keep to the rules of whoever uses the world, as this
    /// process must.
    pub unsafe fn join(config: &WorldConfig) -> Result<World, WorldError> {
        let WorldConfig { path, rank: me, shape, huge, timeout } = config;
        let (me, ranks) = (*me, shape.ranks as usize);
        if ranks == 0 || ranks > RANKS_MAX || shape.bytes == 0 {
            return Err(WorldError::Shape(*shape));
        }
        if me.index() >= ranks {
            return Err(WorldError::Rank { rank: me, ranks: shape.ranks });
        }
        let (memory, host) = if me == Rank(0) {
            let memory = Arc::new(WorldMemory::create(*shape, *huge)?);
            PhaseBarrier::found(&world_posts(&memory), ranks);
            // SAFETY: the caller vouches for those who come.
            let host = unsafe { Host::open(path, Arc::clone(&memory)) }?;
            (memory, Some(host))
        } else {
            (Arc::new(rendezvous::enter(path, *shape, me, *timeout)?), None)
        };
        let occupant = memory
            .row(me)
            .join(std::process::id(), SystemClock.now())
            .map_err(|holder| WorldError::Taken { rank: me, holder })?;
        let mut barrier = PhaseBarrier::new(world_posts(&memory), me, ranks);
        let is_first = occupant.generation == Generation(1);
        if !is_first {
            barrier.wish();
        }
        let side = Side { barrier, wishes: !is_first, waits: false };
        let bases = RankSet::first(ranks).iter().map(|rank| memory.region(rank).base()).collect();
        let spins = Patience::spins_for(ranks);
        let world = World {
            memory,
            bases,
            me,
            occupant,
            side: Mutex::new(side),
            spins,
            lent: Mutex::default(),
            _host: host,
        };
        if is_first {
            world.barrier(*timeout)?;
        }
        Ok(world)
    }

    /// This process's rank.
    pub fn rank(&self) -> Rank {
        self.me
    }

    /// How many ranks there are, and how much memory each has.
    pub fn shape(&self) -> WorldShape {
        self.memory.shape
    }

    /// Which incarnation of its rank this process is, from 1.
    pub fn generation(&self) -> Generation {
        self.occupant.generation
    }

    /// Where the regions lie in this process, by rank.
    pub fn bases(&self) -> &[NonNull<u8>] {
        &self.bases
    }

    /// Where `len` bytes of a rank's region lie in this process. Valid while the world lives.
    ///
    /// # Panics
    /// If they reach beyond the region's end.
    pub fn at(&self, rank: Rank, offset: u64, len: u64) -> NonNull<u8> {
        let end = offset.checked_add(len).expect("a piece of the region");
        assert!(end <= self.memory.shape.bytes, "{end} is beyond a region of {}", self.memory.shape.bytes);
        // SAFETY: inside the region by the line above.
        unsafe { self.bases[rank.index()].add(offset as usize) }
    }

    /// The same place in a peer's region as `ptr` is in the own one: `ptr − bases[me] + bases[peer]`.
    ///
    /// # Panics
    /// If `ptr` is not in this rank's region.
    pub fn translate(&self, ptr: NonNull<u8>, peer: Rank) -> NonNull<u8> {
        let offset = ptr.addr().get().checked_sub(self.bases[self.me.index()].addr().get());
        self.at(peer, offset.expect("a pointer into the own region") as u64, 1)
    }

    /// Words of a rank's region. That nobody uses these bytes otherwise is a part of the rules that [`World::join`] speaks of.
    ///
    /// # Panics
    /// If they do not fit, or `offset` is no multiple of 8.
    pub fn words(&self, rank: Rank, offset: u64, count: u64) -> &[AtomicU64] {
        assert!(self.memory.region(rank).is_here(), "a forked child has none of the world's memory");
        self.memory.region(rank).atomics(offset, count)
    }

    /// A flag in a rank's region, as [`World::words`].
    ///
    /// # Panics
    /// If it does not fit, or `offset` is no multiple of 64.
    pub fn flag(&self, rank: Rank, offset: u64) -> &Flag {
        assert!(self.memory.region(rank).is_here(), "a forked child has none of the world's memory");
        // SAFETY: every bit pattern is a flag, whose words are atomics.
        unsafe { &self.memory.region(rank).slice::<Flag>(offset, 1)[0] }
    }

    /// A part of this rank's region as memory of its own, for a node that keeps records in it: once, and not by a process that
    /// came in another's place. Others may still read what was there.
    ///
    /// # Safety
    /// No other use may be made of these bytes, by any rank.
    pub unsafe fn lend(&self, offset: u64, len: u64) -> Result<Region, RegionError> {
        if self.occupant.generation != Generation(1) {
            return Err(RegionError::Inherited);
        }
        let mut lent = self.lent.lock().unwrap_or_else(PoisonError::into_inner);
        let end = offset.saturating_add(len);
        if lent.iter().any(|&(first, last)| offset < last && first < end) {
            return Err(RegionError::Lent { offset, len });
        }
        let part = self.memory.region(self.me).part((offset, len), Protection::AllWrite)?;
        lent.push((offset, end));
        Ok(part)
    }

    /// The posts of a barrier at `offset` of every rank's region. The bytes must be zero, or such posts already, and
    /// used for nothing else: a part of the rules that [`World::join`] speaks of.
    ///
    /// # Panics
    /// If they do not fit, or `offset` is no multiple of 64.
    pub fn posts(self: &Arc<World>, offset: u64) -> RegionPosts<World> {
        assert!(offset.is_multiple_of(64));
        let ranks = self.memory.shape.ranks as usize;
        let words = post_words(ranks);
        let post = |rank| self.at(rank, offset, (words * size_of::<AtomicU64>()) as u64).cast();
        let posts = RankSet::first(ranks).iter().map(post).collect();
        // SAFETY: in bounds and aligned; mapped while the world lives; atomics by the rules of the world.
        unsafe { RegionPosts::new(posts, words, Arc::clone(self)) }
    }

    /// Waits until all ranks are here, and says who they are: fewer than the world's if some were left out. An error names those that are not, and leaves this rank waiting in the same
    /// phase: call it again, or [`World::exclude`] them first.
    pub fn barrier(&self, timeout: Duration) -> Result<RankSet, WaitError> {
        self.beat();
        let mut side = self.side.lock().unwrap_or_else(PoisonError::into_inner);
        let Side { barrier, wishes, waits } = &mut *side;
        if !*waits {
            let next = barrier.phase() + 1;
            if !*wishes && barrier.roll(next).is_err() {
                // Left behind, which it is told by the others' going on. It comes back by coming.
                barrier.wish();
                *wishes = true;
            }
            if *wishes {
                barrier.enter(&mut barrier.posts().patience(self.spins, timeout))?;
                *wishes = false;
            }
            let roll = barrier.roll(barrier.phase() + 1)?;
            barrier.admit(roll, Entry { phase: barrier.phase() + 2, odd_step: false });
            barrier.arrive(roll.members, roll.members);
            *waits = true;
        }
        let met = barrier.wait(barrier.phase(), &mut barrier.posts().patience(self.spins, timeout));
        *waits = matches!(met, Err(WaitError::Missing(_)));
        met.map(|met| met.members)
    }

    /// Goes on without these ranks in the world's barrier.
    pub fn exclude(&self, ranks: RankSet) {
        self.side.lock().unwrap_or_else(PoisonError::into_inner).barrier.exclude(ranks);
    }

    /// A sign of life. Barriers give one; a rank that computes for long may want to.
    pub fn beat(&self) {
        // Who is no longer in the row has been replaced, and finds out at its next barrier.
        let _ = self.memory.row(self.me).beat(self.occupant, SystemClock.now());
    }

    /// The process that is a rank now; `None` if none is.
    pub fn process(&self, rank: Rank) -> Option<RankProcess> {
        let occupant = match self.liveness(rank, Duration::MAX) {
            Liveness::Absent => return None,
            Liveness::Alive(occupant) | Liveness::Silent(occupant, _) => occupant,
        };
        let pid = rustix::process::Pid::from_raw(occupant.pid.try_into().ok()?)?;
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok()?;
        // The number was this rank's before and after, so the descriptor is its process's.
        let is_same = matches!(
            self.liveness(rank, Duration::MAX),
            Liveness::Alive(again) | Liveness::Silent(again, _) if again == occupant
        );
        is_same.then_some(RankProcess(pidfd))
    }

    /// What is known of a rank that may be silent for `ttl`.
    pub fn liveness(&self, rank: Rank, ttl: Duration) -> Liveness {
        self.memory.row(rank).read(SystemClock.now(), ttl)
    }
}

/// A rank's process, which may end at any time.
#[derive(Debug)]
pub struct RankProcess(OwnedFd);

impl RankProcess {
    /// Whether it has ended.
    pub fn has_ended(&self) -> bool {
        // Who cannot be asked about is not relied on.
        wait_readable(&self.0, Duration::ZERO).unwrap_or(true)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // Its place is free for another process, which need not wait for this one's end.
        let _ = self.memory.row(self.me).put_out(self.occupant);
    }
}

fn world_posts(memory: &Arc<WorldMemory>) -> RegionPosts<WorldMemory> {
    let ranks = memory.shape.ranks as usize;
    let words = post_words(ranks);
    let first = (ranks * size_of::<Row>()) as u64;
    let bytes = (words * size_of::<AtomicU64>()) as u64;
    let post = |rank: Rank| {
        let words = memory.control.atomics(first + u64::from(rank.0) * bytes, words as u64);
        NonNull::new(words.as_ptr().cast_mut()).expect("a mapped address")
    };
    let posts = RankSet::first(ranks).iter().map(post).collect();
    // SAFETY: in bounds and aligned, as `atomics` checks; mapped while `memory` lives; only posts lie there.
    unsafe { RegionPosts::new(posts, words, Arc::clone(memory)) }
}
