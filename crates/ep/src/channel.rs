//! [`Channel`]: one rank's end of an exchange. It owns the state between steps; `step.rs` has what happens in one.
//!
//! Channels are independent: each has its own barrier, members and buffers, so two of them may be in different steps, or
//! without different ranks. Opening one is collective, as is every step.
//!
//! Invariants: between steps the stage is [`Stage::Idle`]; a guard of `step.rs` that is dropped leaves the stage in
//! which it was, and the next send is refused until the step was taken up again and finished, or abandoned. Who asks
//! to come back is [`Stage::Out`] until it has entered: it may be let in while it is not looking, and must not write
//! before it has met the others.

use std::sync::Arc;
use std::time::Duration;

use moontide_heap::{
    Entry, Patience, PhaseBarrier, Rank, RankSet, RegionPosts, WaitError, World, WorldError,
};

use crate::layout::{Buffers, Layout, Shape, ShapeError};
use crate::places::Places;
use crate::route::Routing;

/// Why a channel could not be opened.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// No channel has this shape.
    #[error(transparent)]
    Shape(#[from] ShapeError),
    /// The world has another number of ranks than the shape.
    #[error("a channel for {shape} ranks in a world of {world}")]
    Ranks {
        /// Ranks of the shape.
        shape: usize,
        /// Ranks of the world.
        world: u32,
    },
    /// The channel reaches beyond the end of the regions.
    #[error("a channel of {bytes} bytes at {offset} does not fit into regions of {region} bytes")]
    Room {
        /// Its size.
        bytes: u64,
        /// Where it was to begin.
        offset: u64,
        /// Size of a region.
        region: u64,
    },
    /// A rank takes the channel for something else.
    #[error("rank {0} opened the channel with another shape")]
    Disagree(Rank),
    /// The process in whose place this one came had not opened the channel. Channels are opened by the ranks that were
    /// there first.
    #[error("the rank's process died before it had opened the channel; make a new world")]
    TooLate,
    /// The others did not come.
    #[error(transparent)]
    World(#[from] WorldError),
}

impl From<WaitError> for OpenError {
    fn from(error: WaitError) -> OpenError {
        OpenError::World(error.into())
    }
}

/// How far a step is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Idle,
    /// Arrived in the dispatch's phase.
    Sent,
    /// Met there.
    Received,
    /// Arrived in the return's phase.
    Returned,
    /// The same, and in the next dispatch's, which is the same phase.
    Crossed,
    /// Asked to be let in again, and not entered yet.
    Out,
}

/// What is remembered of tokens that are out.
#[derive(Debug)]
pub(crate) struct Outstanding {
    /// How many there are.
    pub(crate) tokens: usize,
    /// For each, the ranks that it went to.
    pub(crate) went_to: Vec<RankSet>,
    /// The members when they were sent.
    pub(crate) targets: RankSet,
}

/// One rank's end of an exchange of tokens and results.
#[derive(Debug)]
pub struct Channel {
    pub(crate) shape: Shape,
    pub(crate) layout: Layout,
    pub(crate) places: Places,
    pub(crate) barrier: PhaseBarrier<RegionPosts<World>>,
    pub(crate) me: Rank,
    pub(crate) stage: Stage,
    /// Counts steps; the last bit says which of two buffers.
    pub(crate) step: u64,
    /// By the step's last bit: two steps may be out at a time.
    pub(crate) out: [Outstanding; 2],
    pub(crate) routing: Routing,
    /// Who sent what is being worked on.
    pub(crate) sources: RankSet,
    pub(crate) spins: u32,
    pub(crate) leaves_behind: bool,
    pub(crate) poisons: bool,
    world: Arc<World>,
}

impl Channel {
    /// Opens a channel at `offset` of every rank's region. All ranks open it together, with the same arguments; a
    /// process that comes in place of one that died after that opens it alone, and waits until the others let it in,
    /// which they do at the end of a step.
    ///
    /// # Safety
    /// The bytes from `offset` on, [`Shape::bytes`] of them, are used by this channel alone, in all regions; they were zero
    /// when the first rank opened it; and this process opens it once in a [`World`].
    pub unsafe fn open(
        world: &Arc<World>,
        offset: u64,
        shape: Shape,
        timeout: Duration,
    ) -> Result<Channel, OpenError> {
        let layout = shape.layout()?;
        let region = world.shape();
        if shape.ranks != region.ranks as usize {
            return Err(OpenError::Ranks { shape: shape.ranks, world: region.ranks });
        }
        let fits = offset.checked_add(layout.bytes).is_some_and(|end| end <= region.bytes);
        if !fits || !offset.is_multiple_of(64) {
            return Err(OpenError::Room { bytes: layout.bytes, offset, region: region.bytes });
        }
        let (me, ranks) = (world.rank(), shape.ranks);
        let posts = world.posts(offset + layout.post);
        let comes_back = PhaseBarrier::is_founded(&posts, me, ranks);
        if !comes_back && world.generation().0 > 1 {
            // The others may have opened it without this rank, or be about to: nobody can tell.
            return Err(OpenError::TooLate);
        }
        let card = |rank| world.at(rank, offset + layout.card, 64).cast::<[u64; 8]>();
        // SAFETY: our own card, which others read when they have met us: in the barrier below, or in the channel's own. It
        // is written once; a successor finds it there.
        match unsafe { card(me).read() } {
            found if found == shape.card() => {}
            // SAFETY: as above.
            found if found == [0; 8] => unsafe { card(me).write(shape.card()) },
            _ => return Err(OpenError::Disagree(me)),
        }
        let mut members = RankSet::EMPTY;
        if !comes_back {
            PhaseBarrier::found_own(&posts, me, ranks);
            members = world.barrier(timeout)?;
        }
        let outstanding = || Outstanding {
            tokens: 0,
            went_to: vec![RankSet::EMPTY; shape.tokens_max],
            targets: RankSet::EMPTY,
        };
        let mut channel = Channel {
            shape,
            layout,
            places: Places::new(world, offset, layout, shape.tokens_max, shape.top_k),
            barrier: PhaseBarrier::new(posts, me, ranks),
            me,
            stage: Stage::Idle,
            step: 0,
            out: [outstanding(), outstanding()],
            routing: Routing::new(&shape),
            sources: RankSet::EMPTY,
            spins: Patience::spins_for(ranks),
            leaves_behind: false,
            poisons: false,
            world: Arc::clone(world),
        };
        if comes_back {
            channel.rejoin(timeout)?;
            members = channel.members()?;
        }
        for rank in members.iter() {
            // SAFETY: written once, before its rank met us.
            if unsafe { card(rank).read() } != shape.card() {
                return Err(OpenError::Disagree(rank));
            }
        }
        Ok(channel)
    }

    /// What the channel is made for.
    pub fn shape(&self) -> &Shape {
        &self.shape
    }

    /// This rank.
    pub fn rank(&self) -> Rank {
        self.me
    }

    /// Whether ranks that are late are left behind at once, instead of being reported: nobody waits longer than his
    /// time-out, and results say who took part. Off unless set.
    pub fn leave_behind(&mut self, leaves_behind: bool) {
        self.leaves_behind = leaves_behind;
    }

    /// How often to poll before sleeping; [`SPINS_UNTIL_DEADLINE`](moontide_heap::SPINS_UNTIL_DEADLINE) never sleeps.
    /// Unless set, it depends on whether every rank has a core.
    pub fn spin(&mut self, spins: u32) {
        self.spins = spins;
    }

    /// Whether memory is made unreadable as soon as nobody may read it any more: results that use it then are NaN, and
    /// notes that are taken for new ones end the process. For tests; it costs as much as a step. All ranks or none.
    pub fn poison(&mut self, poisons: bool) {
        self.poisons = poisons;
    }

    /// How often this rank has called the system to sleep or to wake others, in this channel.
    pub fn futex_calls(&self) -> u64 {
        self.barrier.posts().futex_calls()
    }

    /// Who is a member now, as far as this rank can see.
    pub fn members(&self) -> Result<RankSet, WaitError> {
        Ok(self.barrier.roll(self.barrier.phase() + 1)?.members)
    }

    /// Goes on without these ranks.
    pub fn exclude(&mut self, ranks: RankSet) {
        self.barrier.exclude(ranks);
    }

    /// Comes back after the others have gone on without this rank. What it had begun is lost. If they do not let it in
    /// in time it is out, and may ask again.
    pub fn rejoin(&mut self, timeout: Duration) -> Result<(), WaitError> {
        self.world.beat();
        self.stage = Stage::Out;
        self.barrier.wish();
        let entry = self.barrier.enter(&mut self.barrier.posts().patience(self.spins, timeout))?;
        self.step = entry.odd_step.into();
        self.stage = Stage::Idle;
        Ok(())
    }

    /// Finishes a step whose guard was dropped, without results: nobody gets anything from this rank in it.
    pub fn abandon(&mut self, timeout: Duration) -> Result<(), WaitError> {
        if self.stage == Stage::Out {
            return Err(WaitError::Excluded);
        }
        if self.stage == Stage::Sent || self.stage == Stage::Crossed {
            self.meet(timeout)?;
            self.step += u64::from(self.stage == Stage::Crossed);
            self.stage = Stage::Received;
        }
        if self.stage == Stage::Received {
            self.barrier.arrive(RankSet::EMPTY, RankSet::EMPTY);
            self.stage = Stage::Returned;
        }
        if self.stage == Stage::Returned {
            self.meet(timeout)?;
            self.next_step();
        }
        Ok(())
    }

    /// Which buffer the step uses.
    pub(crate) fn buffer(&self, step: u64) -> usize {
        match self.shape.buffers {
            Buffers::One => 0,
            Buffers::Two => (step & 1) as usize,
        }
    }

    pub(crate) fn next_step(&mut self) {
        self.step += 1;
        self.stage = Stage::Idle;
    }

    /// Waits in the phase in which this rank has arrived.
    pub(crate) fn meet(&mut self, timeout: Duration) -> Result<moontide_heap::Met, WaitError> {
        loop {
            let mut patience = self.barrier.posts().patience(self.spins, timeout);
            match self.barrier.wait(self.barrier.phase(), &mut patience) {
                Err(WaitError::Missing(ranks)) if self.leaves_behind => self.barrier.exclude(ranks),
                met => return met,
            }
        }
    }

    /// Arrives with what a step gives back, and says who may come in with the step that begins next.
    pub(crate) fn arrive_giving(&mut self, sends: RankSet, gives: RankSet, next_step: u64) {
        let phase = self.barrier.phase() + 1;
        // Excluded is found out where this rank waits.
        if let Ok(roll) = self.barrier.roll(phase) {
            self.barrier.admit(roll, Entry { phase: phase + 1, odd_step: next_step & 1 != 0 });
        }
        self.barrier.arrive(sends, gives);
    }

    /// A sign of life of this rank, once a step.
    pub(crate) fn beat(&self) {
        self.world.beat();
    }
}
