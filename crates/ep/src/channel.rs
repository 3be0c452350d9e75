//! [`Channel`]: one rank's end of an exchange. It owns the state between steps; `step.rs` has the stages of a step.
//!
//! Channels are independent: each has its own barrier, members and buffers, so two of them may be in different steps,
//! or have excluded different ranks. Opening one is collective, as is every step.
//!
//! Invariants: between steps the stage is [`Stage::Idle`]. Dropping a guard of `step.rs` does not change the stage, and
//! the next dispatch is refused until the step was resumed and finished, or aborted. A rank that asks to rejoin is
//! [`Stage::Rejoining`] until it has entered: it may be admitted between two of its calls, and must not write before it
//! has met the others in a phase.

use std::sync::Arc;
use std::time::Duration;

use moontide_symmetric::{
    PhaseBarrier, Rank, RankSet, RejoinPoint, SharedBarrierMemory, SpinThenFutex, WaitError, World,
    WorldError,
};

use crate::layout::{Buffering, ChannelConfig, ChannelConfigError, Layout};
use crate::memory::ChannelMemory;
use crate::route::Routing;

/// Error of [`Channel::open`].
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    /// The configuration is invalid.
    #[error(transparent)]
    Shape(#[from] ChannelConfigError),
    /// The world has another number of ranks than the configuration.
    #[error("channel config has {shape} ranks, but the world has {world}")]
    Ranks {
        /// Ranks of the configuration.
        shape: usize,
        /// Ranks of the world.
        world: u32,
    },
    /// The channel does not fit into the regions, or `offset` is not a multiple of 64.
    #[error("channel of {bytes} bytes at offset {offset} does not fit into regions of {region} bytes")]
    RegionTooSmall {
        /// Size of the channel in bytes.
        bytes: u64,
        /// Offset of the channel in a region, in bytes.
        offset: u64,
        /// Size of a region in bytes.
        region: u64,
    },
    /// A rank opened the channel with another configuration.
    #[error("rank {0} opened the channel with another configuration")]
    ConfigMismatch(Rank),
    /// This process replaces one that had not opened the channel. Only ranks of the first generation can open a new
    /// channel.
    #[error("previous process of this rank exited before it opened the channel; start a new world")]
    NotOpenedBefore,
    /// Waiting for the other ranks failed.
    #[error(transparent)]
    World(#[from] WorldError),
}

impl From<WaitError> for OpenError {
    fn from(error: WaitError) -> OpenError {
        OpenError::World(error.into())
    }
}

/// Stage of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Stage {
    Idle,
    /// Arrived in the phase of the dispatch.
    Dispatching,
    /// Completed that phase.
    Dispatched,
    /// Arrived in the phase of the combine.
    Combining,
    /// The same, and in the phase of the next dispatch, which is the same phase.
    Overlapped,
    /// Asked to be admitted again, and not entered yet.
    Rejoining,
}

/// Tokens of a step whose results are outstanding.
#[derive(Debug)]
pub(crate) struct SentTokens {
    /// Number of tokens.
    pub(crate) tokens: usize,
    /// Per token, the ranks that it was sent to.
    pub(crate) destinations: Vec<RankSet>,
    /// Members when the tokens were sent.
    pub(crate) targets: RankSet,
}

/// One rank's end of an exchange of tokens and results.
#[derive(Debug)]
pub struct Channel {
    pub(crate) shape: ChannelConfig,
    pub(crate) layout: Layout,
    pub(crate) memory: ChannelMemory,
    pub(crate) barrier: PhaseBarrier<SharedBarrierMemory<World>>,
    pub(crate) me: Rank,
    pub(crate) stage: Stage,
    /// Number of the step; the last bit selects one of two buffers.
    pub(crate) step: u64,
    /// By the last bit of the step: two steps may be outstanding.
    pub(crate) sent: [SentTokens; 2],
    pub(crate) routing: Routing,
    /// Ranks whose tokens are being processed.
    pub(crate) sources: RankSet,
    pub(crate) spins: u32,
    pub(crate) auto_exclude: bool,
    pub(crate) poisons: bool,
    world: Arc<World>,
}

impl Channel {
    /// Opens a channel at `offset` of every rank's region. All ranks open it together, with the same arguments. A
    /// process that replaces an exited one after that opens it alone, and waits until the others admit it, which they
    /// do at the end of a step.
    ///
    /// # Safety
    /// This channel alone uses the [`ChannelConfig::bytes`] bytes from `offset` on, in all regions; they were zero when
    /// the first rank opened it; and this process opens it once in a [`World`].
    pub unsafe fn open(
        world: &Arc<World>,
        offset: u64,
        shape: ChannelConfig,
        timeout: Duration,
    ) -> Result<Channel, OpenError> {
        let layout = shape.layout()?;
        let region = world.shape();
        if shape.ranks != region.ranks as usize {
            return Err(OpenError::Ranks { shape: shape.ranks, world: region.ranks });
        }
        let fits = offset.checked_add(layout.bytes).is_some_and(|end| end <= region.bytes);
        if !fits || !offset.is_multiple_of(64) {
            return Err(OpenError::RegionTooSmall { bytes: layout.bytes, offset, region: region.bytes });
        }
        let (me, ranks) = (world.rank(), shape.ranks);
        let barrier_memory = world.barrier_memory(offset + layout.barrier);
        let is_rejoin = PhaseBarrier::is_initialized(&barrier_memory, me, ranks);
        if !is_rejoin && world.generation().0 > 1 {
            // The others may have opened it without this rank, or be about to: this rank cannot know.
            return Err(OpenError::NotOpenedBefore);
        }
        let config_record = |rank| world.at(rank, offset + layout.config_record, 64).cast::<[u64; 8]>();
        // SAFETY: this rank's own record, which others read after they have met this rank: in the barrier below, or in
        // the channel's own. It is written once; a successor finds it there.
        match unsafe { config_record(me).read() } {
            found if found == shape.config_record() => {}
            // SAFETY: as above.
            found if found == [0; 8] => unsafe { config_record(me).write(shape.config_record()) },
            _ => return Err(OpenError::ConfigMismatch(me)),
        }
        let mut members = RankSet::EMPTY;
        if !is_rejoin {
            PhaseBarrier::init_own(&barrier_memory, me, ranks);
            members = world.barrier(timeout)?;
        }
        let no_tokens = || SentTokens {
            tokens: 0,
            destinations: vec![RankSet::EMPTY; shape.tokens_max],
            targets: RankSet::EMPTY,
        };
        let mut channel = Channel {
            shape,
            layout,
            memory: ChannelMemory::new(world, offset, layout, shape.tokens_max, shape.top_k),
            barrier: PhaseBarrier::new(barrier_memory, me, ranks),
            me,
            stage: Stage::Idle,
            step: 0,
            sent: [no_tokens(), no_tokens()],
            routing: Routing::new(&shape),
            sources: RankSet::EMPTY,
            spins: SpinThenFutex::spins_for(ranks),
            auto_exclude: false,
            poisons: false,
            world: Arc::clone(world),
        };
        if is_rejoin {
            channel.rejoin(timeout)?;
            members = channel.members()?;
        }
        for rank in members.iter() {
            // SAFETY: written once, before its rank met this one.
            if unsafe { config_record(rank).read() } != shape.config_record() {
                return Err(OpenError::ConfigMismatch(rank));
            }
        }
        Ok(channel)
    }

    /// Returns the configuration of the channel.
    pub fn shape(&self) -> &ChannelConfig {
        &self.shape
    }

    /// Returns this rank.
    pub fn rank(&self) -> Rank {
        self.me
    }

    /// Sets whether late ranks are excluded at once, instead of being reported: then no rank waits longer than its
    /// timeout, and reports list the ranks that took part. Off by default.
    pub fn set_auto_exclude(&mut self, auto_exclude: bool) {
        self.auto_exclude = auto_exclude;
    }

    /// Sets how often to poll before sleeping; [`SPINS_UNTIL_DEADLINE`](moontide_symmetric::SPINS_UNTIL_DEADLINE)
    /// never
    /// sleeps. The default depends on whether every rank has a core.
    pub fn spin(&mut self, spins: u32) {
        self.spins = spins;
    }

    /// Sets whether memory is poisoned as soon as no rank may read it any more: results that use it are then NaN, and
    /// token metadata that is read too late ends the process. For tests; it costs as much as a step. All ranks must use
    /// the same setting.
    pub fn poison(&mut self, poisons: bool) {
        self.poisons = poisons;
    }

    /// Returns the number of system calls of this rank to sleep or to wake others, in this channel.
    pub fn futex_calls(&self) -> u64 {
        self.barrier.posts().futex_calls()
    }

    /// Returns the current members, as far as this rank can see.
    pub fn members(&self) -> Result<RankSet, WaitError> {
        Ok(self.barrier.membership(self.barrier.phase() + 1)?.members)
    }

    /// Excludes `ranks`: the others no longer wait for them.
    pub fn exclude(&mut self, ranks: RankSet) {
        self.barrier.exclude(ranks);
    }

    /// Rejoins after the others have excluded this rank. A step that it had begun is lost. If the others do not admit
    /// it within `timeout`, it stays excluded, and may call this again.
    pub fn rejoin(&mut self, timeout: Duration) -> Result<(), WaitError> {
        self.world.heartbeat();
        match self.stage {
            Stage::Rejoining => self.barrier.request_join_again(),
            _ => self.barrier.request_join(),
        }
        self.stage = Stage::Rejoining;
        let entry =
            self.barrier.await_admission(&mut self.barrier.posts().wait_strategy(self.spins, timeout))?;
        self.step = entry.odd_step.into();
        self.stage = Stage::Idle;
        Ok(())
    }

    /// Finishes a step whose guard was dropped, without results: the others get no results from this rank in it.
    pub fn abort_step(&mut self, timeout: Duration) -> Result<(), WaitError> {
        if self.stage == Stage::Rejoining {
            return Err(WaitError::Excluded);
        }
        if self.stage == Stage::Dispatching || self.stage == Stage::Overlapped {
            self.wait_phase(timeout)?;
            self.step += u64::from(self.stage == Stage::Overlapped);
            self.stage = Stage::Dispatched;
        }
        if self.stage == Stage::Dispatched {
            self.barrier.arrive(RankSet::EMPTY, RankSet::EMPTY);
            self.stage = Stage::Combining;
        }
        if self.stage == Stage::Combining {
            self.wait_phase(timeout)?;
            self.next_step();
        }
        Ok(())
    }

    /// Returns the index of the buffer that `step` uses.
    pub(crate) fn buffer(&self, step: u64) -> usize {
        match self.shape.buffering {
            Buffering::Single => 0,
            Buffering::Double => (step & 1) as usize,
        }
    }

    pub(crate) fn next_step(&mut self) {
        self.step += 1;
        self.stage = Stage::Idle;
    }

    /// Waits in the phase in which this rank has arrived.
    pub(crate) fn wait_phase(
        &mut self,
        timeout: Duration,
    ) -> Result<moontide_symmetric::PhaseOutcome, WaitError> {
        loop {
            let mut strategy = self.barrier.posts().wait_strategy(self.spins, timeout);
            match self.barrier.wait(self.barrier.phase(), &mut strategy) {
                Err(WaitError::Missing(ranks)) if self.auto_exclude => self.barrier.exclude(ranks),
                result => return result,
            }
        }
    }

    /// Arrives with the results of a step, and admits waiting ranks from the next step on.
    pub(crate) fn arrive(&mut self, dispatched: RankSet, combined: RankSet, next_step: u64) {
        let phase = self.barrier.phase() + 1;
        // If this rank is excluded, its next wait returns that.
        if let Ok(membership) = self.barrier.membership(phase) {
            self.barrier.admit(membership, RejoinPoint { phase: phase + 1, odd_step: next_step & 1 != 0 });
        }
        self.barrier.arrive(dispatched, combined);
    }

    /// Sends a heartbeat of this rank, once per step.
    pub(crate) fn heartbeat(&self) {
        self.world.heartbeat();
    }
}
