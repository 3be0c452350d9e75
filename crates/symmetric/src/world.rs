//! [`World`]: symmetric heap. Every rank owns a region of the same size, and all ranks map all regions.
//!
//! A location in a world is `(rank, offset)`. Regions have different addresses in every process, so a pointer into
//! the own region is translated to a peer's by `ptr − bases[me] + bases[peer]`: [`World::translate`].
//!
//! ```text
//!   rank 0 creates: control region                               regions, one per rank, zeroed
//!                   ├ liveness rows (64 B per rank)              ├───────────┤├───────────┤├── …
//!                   └ rank words of the world's own barrier        of rank 0    of rank 1
//! ```
//!
//! Ranks connect to a Unix socket of rank 0 (`rendezvous`). Memory outlives a rank that exits: the others keep their
//! mappings, and a replacement process gets the same regions from rank 0. The predecessor must have exited, according
//! to its pidfd: it could still write memory of its rank, which no other rank writes, but which its successor uses.
//! If rank 0 itself exits the others continue, and no process can join any more.
//!
//! The users of a world define the contents of the regions, and which rank may access which bytes when.

use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use moontide_heap::{HugePages, Liveness, MemberId, Protection, Region, socket};
use moontide_rt::sync::AtomicU64;
use moontide_types::{Clock, Generation, SystemClock};
use rustix::process::PidfdFlags;

use crate::barrier::{PhaseBarrier, RejoinPoint, WaitError};
use crate::barrier_memory::{SharedBarrierMemory, SpinThenFutex};
use crate::error::WorldError;
use crate::ranks::{RANKS_MAX, Rank, RankSet};
use crate::ready_flag::ReadyFlag;
use crate::rendezvous::{self, RendezvousServer};
use crate::world_memory::{WorldMemory, WorldShape, barrier_memory_of, words_per_rank};

/// Configuration of one rank of a world.
#[derive(Clone, Debug)]
pub struct WorldConfig {
    /// Path of rank 0's socket, which identifies the world.
    pub path: PathBuf,
    /// Rank of this process.
    pub rank: Rank,
    /// Size of the world, equal for all ranks.
    pub shape: WorldShape,
    /// Pages of the regions. The setting of rank 0 applies.
    pub huge: HugePages,
    /// Maximum time to wait for the other ranks.
    pub timeout: Duration,
}

/// A world as one rank uses it.
#[derive(Debug)]
pub struct World {
    memory: Arc<WorldMemory>,
    bases: Vec<NonNull<u8>>,
    me: Rank,
    member: MemberId,
    /// Locked for the whole call: a process is one rank.
    barrier: Mutex<BarrierState>,
    spins: u32,
    /// Reserved ranges of the own region, as (start, end).
    reserved: Mutex<Vec<(u64, u64)>>,
    /// Only in rank 0.
    _rendezvous: Option<RendezvousServer>,
}

/// The world's barrier as one rank uses it.
#[derive(Debug)]
struct BarrierState {
    barrier: PhaseBarrier<SharedBarrierMemory<WorldMemory>>,
    /// Has requested to join, and is not yet admitted.
    joining: bool,
    /// Has arrived in the current phase, which is not complete yet.
    waiting: bool,
}

// SAFETY: the bases are addresses of regions that `memory` keeps mapped.
unsafe impl Send for World {}
// SAFETY: as above.
unsafe impl Sync for World {}

impl World {
    /// Joins a world. The first process of a rank waits for all ranks; a replacement process does not wait, and
    /// synchronizes at its next [`World::barrier`].
    ///
    /// # Safety
    /// All ranks map each other's memory writable. They must follow the rules of the world's user, as this process
    /// must.
    pub unsafe fn join(config: &WorldConfig) -> Result<World, WorldError> {
        let WorldConfig { path, rank: me, shape, huge, timeout } = config;
        let (me, ranks) = (*me, shape.ranks as usize);
        if ranks == 0 || ranks > RANKS_MAX || shape.bytes == 0 {
            return Err(WorldError::Shape(*shape));
        }
        if me.index() >= ranks {
            return Err(WorldError::Rank { rank: me, ranks: shape.ranks });
        }
        let (memory, rendezvous) = if me == Rank(0) {
            let memory = Arc::new(WorldMemory::create(*shape, *huge)?);
            PhaseBarrier::init(&barrier_memory_of(&memory), ranks);
            // SAFETY: the caller vouches for the ranks that connect.
            let rendezvous = unsafe { RendezvousServer::open(path, Arc::clone(&memory)) }?;
            (memory, Some(rendezvous))
        } else {
            (Arc::new(rendezvous::connect(path, *shape, me, *timeout)?), None)
        };
        let member = memory
            .row(me)
            .join(std::process::id(), SystemClock.now())
            .map_err(|holder| WorldError::RankInUse { rank: me, holder })?;
        let mut barrier = PhaseBarrier::new(barrier_memory_of(&memory), me, ranks);
        let is_first = member.generation == Generation(1);
        if !is_first {
            barrier.request_join();
        }
        let barrier = BarrierState { barrier, joining: !is_first, waiting: false };
        let bases = RankSet::first(ranks).iter().map(|rank| memory.region(rank).base()).collect();
        let spins = SpinThenFutex::spins_for(ranks);
        let world = World {
            memory,
            bases,
            me,
            member,
            barrier: Mutex::new(barrier),
            spins,
            reserved: Mutex::default(),
            _rendezvous: rendezvous,
        };
        if is_first {
            world.barrier(*timeout)?;
        }
        Ok(world)
    }

    /// Returns this process's rank.
    pub fn rank(&self) -> Rank {
        self.me
    }

    /// Returns the number of ranks and the length of their regions.
    pub fn shape(&self) -> WorldShape {
        self.memory.shape()
    }

    /// Returns the incarnation of this rank, from 1.
    pub fn generation(&self) -> Generation {
        self.member.generation
    }

    /// Returns the addresses of the regions in this process, by rank.
    pub fn bases(&self) -> &[NonNull<u8>] {
        &self.bases
    }

    /// Returns the address in this process of `len` bytes of a rank's region. Valid during the life of the world.
    ///
    /// # Panics
    /// If they exceed the region.
    pub fn at(&self, rank: Rank, offset: u64, len: u64) -> NonNull<u8> {
        let end = offset.checked_add(len).expect("a range of the region");
        assert!(
            end <= self.memory.shape().bytes,
            "range ends at {end}, the region at {}",
            self.memory.shape().bytes
        );
        // SAFETY: inside the region by the line above.
        unsafe { self.bases[rank.index()].add(offset as usize) }
    }

    /// Translates a pointer into the own region to the same offset of a peer's: `ptr − bases[me] + bases[peer]`.
    ///
    /// # Panics
    /// If `ptr` is not in this rank's region.
    pub fn translate(&self, ptr: NonNull<u8>, peer: Rank) -> NonNull<u8> {
        let offset = ptr.addr().get().checked_sub(self.bases[self.me.index()].addr().get());
        self.at(peer, offset.expect("a pointer into the own region") as u64, 1)
    }

    /// Returns words of a rank's region. The rules of the world's user, see [`World::join`], must exclude other uses
    /// of these bytes.
    ///
    /// # Panics
    /// If the range exceeds the region, or `offset` is no multiple of 8.
    pub fn words(&self, rank: Rank, offset: u64, count: u64) -> &[AtomicU64] {
        assert!(
            self.memory.region(rank).is_mapped_here(),
            "world used in a forked child, which has no mapping"
        );
        // SAFETY: every bit pattern is a word; the rules of the world exclude accesses that are not atomic.
        unsafe { self.memory.region(rank).slice(offset, count) }
    }

    /// Returns a flag in a rank's region, under the rule of [`World::words`].
    ///
    /// # Panics
    /// If it exceeds the region, or `offset` is no multiple of 64.
    pub fn flag(&self, rank: Rank, offset: u64) -> &ReadyFlag {
        assert!(
            self.memory.region(rank).is_mapped_here(),
            "world used in a forked child, which has no mapping"
        );
        // SAFETY: every bit pattern is a flag, whose words are atomics.
        unsafe { &self.memory.region(rank).slice::<ReadyFlag>(offset, 1)[0] }
    }

    /// Returns a range of this rank's region as a region of its own, for a node that keeps records in it: once, and
    /// not in a replacement process, because other ranks may still read the records of its predecessor.
    ///
    /// # Safety
    /// These bytes must not be used otherwise, by any rank.
    pub unsafe fn reserve(&self, offset: u64, len: u64) -> Result<Region, WorldError> {
        if self.member.generation != Generation(1) {
            return Err(WorldError::NotEmpty);
        }
        let mut reserved = self.reserved.lock().unwrap_or_else(PoisonError::into_inner);
        let end = offset.saturating_add(len);
        if reserved.iter().any(|&(first, last)| offset < last && first < end) {
            return Err(WorldError::AlreadyReserved { offset, len });
        }
        let region = self.memory.region(self.me).subregion((offset, len), Protection::AllWrite)?;
        reserved.push((offset, end));
        Ok(region)
    }

    /// Returns the rank words of a barrier at `offset` of every rank's region. The bytes must be zero, or such rank
    /// words already, and the rules of the world's user, see [`World::join`], must exclude other uses of them.
    ///
    /// # Panics
    /// If they exceed the region, or `offset` is no multiple of 64.
    pub fn barrier_memory(self: &Arc<World>, offset: u64) -> SharedBarrierMemory<World> {
        assert!(offset.is_multiple_of(64));
        let ranks = self.memory.shape().ranks as usize;
        let words = words_per_rank(ranks);
        let address = |rank| self.at(rank, offset, (words * size_of::<AtomicU64>()) as u64).cast();
        let addresses = RankSet::first(ranks).iter().map(address).collect();
        // SAFETY: in bounds and aligned; mapped during the life of the world; atomics by the rules of the world.
        unsafe { SharedBarrierMemory::new(addresses, words, Arc::clone(self)) }
    }

    /// Waits until all members have arrived, and returns them: fewer than the world's ranks if some were excluded. On
    /// [`WaitError::Missing`] this rank remains in the same phase: call it again, or [`World::exclude`] the missing
    /// ranks first.
    pub fn barrier(&self, timeout: Duration) -> Result<RankSet, WaitError> {
        self.heartbeat();
        let mut state = self.barrier.lock().unwrap_or_else(PoisonError::into_inner);
        let BarrierState { barrier, joining, waiting } = &mut *state;
        if !*waiting {
            let next = barrier.phase() + 1;
            // The other ranks may have excluded this one. It rejoins with this call.
            if *joining {
                barrier.request_join_again();
            } else if barrier.membership(next).is_err() {
                barrier.request_join();
                *joining = true;
            }
            if *joining {
                barrier.await_admission(&mut barrier.posts().wait_strategy(self.spins, timeout))?;
                *joining = false;
            }
            let membership = barrier.membership(barrier.phase() + 1)?;
            barrier.admit(membership, RejoinPoint { phase: barrier.phase() + 2, odd_step: false });
            barrier.arrive(membership.members, membership.members);
            *waiting = true;
        }
        let outcome = barrier.wait(barrier.phase(), &mut barrier.posts().wait_strategy(self.spins, timeout));
        *waiting = matches!(outcome, Err(WaitError::Missing(_)));
        outcome.map(|outcome| outcome.members)
    }

    /// Excludes ranks from the world's barrier.
    pub fn exclude(&self, ranks: RankSet) {
        self.barrier.lock().unwrap_or_else(PoisonError::into_inner).barrier.exclude(ranks);
    }

    /// Stores a heartbeat. Barriers do so; a rank that computes for long may call it between them.
    pub fn heartbeat(&self) {
        // A rank that is no longer in the row has been replaced, and detects that at its next barrier.
        let _ = self.memory.row(self.me).heartbeat(self.member, SystemClock.now());
    }

    /// Returns the current process of a rank; `None` if there is none.
    pub fn process(&self, rank: Rank) -> Option<RankProcess> {
        let member = match self.liveness(rank, Duration::MAX) {
            Liveness::Absent => return None,
            Liveness::Alive(member) | Liveness::Silent(member, _) => member,
        };
        let pid = rustix::process::Pid::from_raw(member.pid.try_into().ok()?)?;
        let pidfd = rustix::process::pidfd_open(pid, PidfdFlags::empty()).ok()?;
        // The process id belonged to this rank before and after, so the descriptor is its process's.
        let is_same = matches!(
            self.liveness(rank, Duration::MAX),
            Liveness::Alive(again) | Liveness::Silent(again, _) if again == member
        );
        is_same.then_some(RankProcess(pidfd))
    }

    /// Returns the liveness of a rank, if heartbeats may be up to `ttl` old.
    pub fn liveness(&self, rank: Rank, ttl: Duration) -> Liveness {
        self.memory.row(rank).read(SystemClock.now(), ttl)
    }
}

/// Process of a rank, which may exit at any time.
#[derive(Debug)]
pub struct RankProcess(OwnedFd);

impl RankProcess {
    /// Returns whether the process has exited.
    pub fn has_ended(&self) -> bool {
        // If the state is unknown, the process counts as exited.
        socket::wait_readable(&self.0, Duration::ZERO).unwrap_or(true)
    }
}

impl Drop for World {
    fn drop(&mut self) {
        // The rank is free for another process, which need not wait for the exit of this one.
        let _ = self.memory.row(self.me).evict(self.member);
    }
}
