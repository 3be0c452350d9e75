//! [`PhaseBarrier`]: the ranks of a world wait for each other, phase by phase.
//!
//! Every rank has **rank words**: cache lines of memory that all ranks can access. In phase p a rank stores `p` into
//! its signal word in the rank words of every rank, and then polls its own rank words until the signal of every
//! member is `p`. No rank polls memory of another rank, and there is no counter: the phase number is the arrival.
//!
//! ```text
//!   rank words, in lines of 64 B (ranks up to a multiple of 8):
//!     signals of even phases        one word per rank, written by that rank   ┐ polled by the owner
//!     signals of odd phases         the same                                  ┘
//!     wake word                     changes:63 │ sleeping:1                     the owner sleeps on it
//!     member state, rejoin point    generation:62 │ state:2,  phase:63 │ odd:1  read by all in every phase
//!     phase                         the owner's last arrival                    written by the owner
//!
//!   signal:   phase:62 │ combined:1 │ dispatched:1
//! ```
//!
//! There are two sets of signals because a rank may be one phase ahead of another that still polls: its next signal
//! must not overwrite the last one. A rank that is two phases ahead no longer waits for this one, so its signals do
//! not matter here.
//!
//! **Completeness.** `dispatched` and `combined` are per receiver: "my data for you in this phase is complete". A
//! rank uses another's memory only with such a flag for exactly this phase. So ranks need not agree at each moment on
//! the membership: a rank that I exclude gets no such flag from me, and uses no stale data of mine.
//!
//! **Membership** is in the member states, and no rank keeps a copy of it. A rank that does not arrive is excluded by
//! a rank that timed out (ACTIVE → EXCLUDED), and all others see that in the same phase or the next. An excluded rank
//! writes nothing that others read, because a rank writes only words of its own. To rejoin it sets JOINING with a new
//! generation. The lowest member then stores, before its own arrival, the phase with which the rank begins (rejoin
//! point, → ACTIVE): a rank that passes that phase has seen it.
//!
//! Invariants: a phase never decreases, 0 is before the first one; generations grow; only rank r writes the signals
//! of r.

use moontide_rt::sync::{AtomicU64, Ordering, fence};
use moontide_rt::{mutation_enabled, weakened};

use crate::mutation::Mutation;
use crate::ranks::{Rank, RankSet};

/// Words of a cache line.
const LINE_WORDS: usize = 8;
/// Flag in the wake word: the owner sleeps or is about to.
const SLEEPING: u64 = 1;

/// Rank words of all ranks, and a way to wake their owners.
pub trait BarrierMemory {
    /// Returns the words of a rank: [`PhaseBarrier::words`] words, aligned to a cache line.
    fn rank_words(&self, rank: Rank) -> &[AtomicU64];
    /// Wakes the owner of the words, which sleeps on its wake word.
    fn wake(&self, rank: Rank);
}

/// Wait policy of a rank.
pub trait WaitStrategy {
    /// Returns the next action while a member is missing.
    fn next(&mut self) -> WaitAction;
    /// Sleeps until `wake_word` is no longer `seen`, or for a bounded time; may return early.
    fn sleep(&mut self, wake_word: &AtomicU64, seen: u64);
}

/// Action of a rank while a member is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WaitAction {
    /// Poll the own signals again.
    Poll,
    /// Poll the own signals and the membership again.
    CheckMembers,
    /// Sleep until the wake word changes.
    Sleep,
    /// Return a timeout error.
    TimedOut,
}

/// Position at which a rank rejoins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RejoinPoint {
    /// First phase of the rank.
    pub phase: u64,
    /// Whether the step that begins with it is an odd one: selects one of two buffers.
    pub odd_step: bool,
}

/// Membership as one rank sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Membership {
    /// Ranks that a phase waits for.
    pub members: RankSet,
    /// Ranks that asked to join.
    pub joining: RankSet,
}

/// Result of a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PhaseOutcome {
    /// Ranks that arrived and were not excluded, this rank included.
    pub members: RankSet,
    /// Ranks whose tokens for this rank are complete.
    pub dispatched: RankSet,
    /// Ranks whose results for this rank are complete.
    pub combined: RankSet,
}

/// Failure of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WaitError {
    /// These ranks have not arrived. Wait again, or go on without them: [`PhaseBarrier::exclude`].
    #[error("timed out waiting for rank {0}")]
    Missing(RankSet),
    /// The other ranks excluded this rank. It may rejoin: [`PhaseBarrier::request_join`].
    #[error("the other ranks have excluded this rank")]
    Excluded,
}

/// Signal of a rank to another: `phase:62 | combined:1 | dispatched:1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Signal(u64);

impl Signal {
    fn new(phase: u64, dispatched: bool, combined: bool) -> Signal {
        Signal(phase << 2 | u64::from(combined) << 1 | u64::from(dispatched))
    }

    fn phase(self) -> u64 {
        self.0 >> 2
    }

    fn combined(self) -> bool {
        self.0 & 2 != 0
    }

    fn dispatched(self) -> bool {
        self.0 & 1 != 0
    }
}

/// Membership of one rank: `generation:62 | state:2`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct MemberState(u64);

const EXCLUDED: u64 = 0;
const JOINING: u64 = 1;
const ACTIVE: u64 = 2;

impl MemberState {
    fn new(generation: u64, state: u64) -> MemberState {
        MemberState(generation << 2 | state)
    }

    fn generation(self) -> u64 {
        self.0 >> 2
    }

    fn state(self) -> u64 {
        self.0 & 3
    }
}

impl RejoinPoint {
    fn bits(self) -> u64 {
        self.phase << 1 | u64::from(self.odd_step)
    }

    fn from_bits(bits: u64) -> RejoinPoint {
        RejoinPoint { phase: bits >> 1, odd_step: bits & 1 != 0 }
    }
}

/// A barrier as one rank uses it.
#[derive(Debug)]
pub struct PhaseBarrier<M> {
    memory: M,
    me: Rank,
    ranks: usize,
    /// Incarnation of this rank in this barrier.
    generation: u64,
}

impl<M: BarrierMemory> PhaseBarrier<M> {
    /// Returns the number of words of one rank.
    pub fn words(ranks: usize) -> usize {
        2 * signal_words(ranks) + 3 * LINE_WORDS
    }

    /// Initializes a barrier on zeroed memory: all ranks are members from phase 1 on. One process calls it once,
    /// before any rank uses the barrier.
    pub fn init(memory: &M, ranks: usize) {
        for rank in RankSet::first(ranks).iter() {
            init_rank_words(memory.rank_words(rank), ranks);
        }
    }

    /// As [`PhaseBarrier::init`], for a rank's own words; every rank calls it before any rank arrives.
    pub fn init_own(memory: &M, me: Rank, ranks: usize) {
        init_rank_words(memory.rank_words(me), ranks);
    }

    /// Opens an initialized barrier as rank `me`.
    pub fn new(memory: M, me: Rank, ranks: usize) -> PhaseBarrier<M> {
        assert!(me.index() < ranks && memory.rank_words(me).len() == PhaseBarrier::<M>::words(ranks));
        let mut barrier = PhaseBarrier { memory, me, ranks, generation: 0 };
        barrier.generation = barrier.member_state(me).generation();
        barrier
    }

    /// Returns the own rank.
    pub fn me(&self) -> Rank {
        self.me
    }

    /// Returns the number of ranks, members or not.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Returns the incarnation of this rank, from 1.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns the memory of the barrier.
    pub fn posts(&self) -> &M {
        &self.memory
    }

    /// Returns the phase of this rank's last arrival. It is stored in shared memory.
    #[inline]
    pub fn phase(&self) -> u64 {
        self.phase_word().load(Ordering::Relaxed) // only this rank writes it
    }

    /// Returns whether this rank's words were ever initialized.
    pub fn is_initialized(memory: &M, me: Rank, ranks: usize) -> bool {
        memory.rank_words(me)[member_state_at(ranks)].load(Ordering::Acquire) != 0
    }

    /// Returns the members of `phase`.
    #[inline]
    pub fn membership(&self, phase: u64) -> Result<Membership, WaitError> {
        let mut membership = Membership { members: RankSet::EMPTY, joining: RankSet::EMPTY };
        for rank in RankSet::first(self.ranks).iter() {
            let member_state = self.member_state(rank);
            match member_state.state() {
                ACTIVE if self.rejoin_point(rank).phase <= phase => membership.members.insert(rank),
                JOINING => membership.joining.insert(rank),
                _ => {}
            }
            let is_mine = member_state == MemberState::new(self.generation, ACTIVE);
            if rank == self.me && !is_mine && !mutation_enabled(Mutation::ExclusionUnnoticed) {
                return Err(WaitError::Excluded);
            }
        }
        Ok(membership)
    }

    /// Arrives in the next phase: a rank that sees the arrival sees everything that this rank wrote before.
    /// `dispatched` and `combined` are the ranks for which this rank's data is complete. Returns the phase.
    #[inline]
    pub fn arrive(&self, dispatched: RankSet, combined: RankSet) -> u64 {
        let phase = self.phase() + 1;
        assert!(phase < 1 << 62, "4·10¹⁸ phases");
        self.phase_word().store(phase, Ordering::Relaxed);
        let at = self.signal_at(phase) + self.me.index();
        for rank in RankSet::first(self.ranks).iter() {
            let signal = Signal::new(phase, dispatched.contains(rank), combined.contains(rank));
            // Release; pairs with the Acquire in `wait`.
            let order = weakened(Mutation::RelaxedArrival, Ordering::Release);
            self.memory.rank_words(rank)[at].store(signal.0, order);
        }
        // Signal, then wake word; the sleeper uses the opposite order (see `wait`). One of the two sees the other.
        if !mutation_enabled(Mutation::ArrivalFenceMissing) {
            fence(Ordering::SeqCst);
        }
        self.wake_sleepers();
        phase
    }

    /// Waits until every member has arrived in `phase`. This rank must have arrived in it before.
    #[inline]
    pub fn wait(&self, phase: u64, strategy: &mut impl WaitStrategy) -> Result<PhaseOutcome, WaitError> {
        let (words, wake_word) = (self.memory.rank_words(self.me), self.wake_word(self.me));
        let signals = &words[self.signal_at(phase)..][..self.ranks];
        let mut members = self.membership(phase)?.members;
        let mut slept = false;
        let arrived = loop {
            let missing = missing(signals, members, phase);
            if missing.is_empty() {
                break Ok(());
            }
            match strategy.next() {
                WaitAction::Poll => std::hint::spin_loop(),
                WaitAction::CheckMembers => members = members.and(self.membership(phase)?.members),
                WaitAction::TimedOut => {
                    members = members.and(self.membership(phase)?.members);
                    let missing = self::missing(signals, members, phase);
                    if !missing.is_empty() {
                        break Err(WaitError::Missing(missing));
                    }
                }
                WaitAction::Sleep => {
                    let seen = wake_word.fetch_or(SLEEPING, Ordering::AcqRel) | SLEEPING;
                    slept = true;
                    // Wake word, then signals and members: the counterpart of `arrive` and `exclude`.
                    if !mutation_enabled(Mutation::SleepFenceMissing) {
                        fence(Ordering::SeqCst);
                    }
                    members = members.and(self.membership(phase)?.members);
                    if mutation_enabled(Mutation::SleepUnchecked)
                        || !self::missing(signals, members, phase).is_empty()
                    {
                        strategy.sleep(wake_word, seen);
                    }
                }
            }
        };
        if slept {
            // A wake word that keeps the flag would cost the other ranks a needless system call.
            wake_word.fetch_and(!SLEEPING, Ordering::Relaxed);
        }
        arrived?;
        // A rank that excluded this one did so before it arrived, so it is visible now; its data is not for this
        // rank.
        let members = members.and(self.membership(phase)?.members);
        let mut outcome = PhaseOutcome { members, dispatched: RankSet::EMPTY, combined: RankSet::EMPTY };
        for rank in members.iter() {
            // Acquire; pairs with the Release in `arrive`, as in `missing`. The rank may have gone on without this
            // one.
            let order = weakened(Mutation::RelaxedSignalRead, Ordering::Acquire);
            let signal = Signal(signals[rank.index()].load(order));
            if signal.phase() != phase {
                continue;
            }
            if signal.dispatched() || mutation_enabled(Mutation::FlagsIgnored) {
                outcome.dispatched.insert(rank);
            }
            if signal.combined() || mutation_enabled(Mutation::FlagsIgnored) {
                outcome.combined.insert(rank);
            }
        }
        Ok(outcome)
    }

    /// Excludes ranks: no rank waits for them any more. A rank that has rejoined in the meantime remains a member.
    pub fn exclude(&self, ranks: RankSet) {
        let phase = self.phase();
        for rank in ranks.iter().filter(|&rank| rank != self.me) {
            let seen = self.member_state(rank);
            if seen.state() == ACTIVE && self.rejoin_point(rank).phase <= phase {
                let excluded = MemberState::new(seen.generation(), EXCLUDED);
                // AcqRel; it fails if another rank excluded it first, or if the rank itself asks to rejoin.
                let _ = self.member_state_word(rank).compare_exchange(
                    seen.0,
                    excluded.0,
                    Ordering::AcqRel,
                    Ordering::Relaxed,
                );
            }
        }
        fence(Ordering::SeqCst);
        self.wake_sleepers();
    }

    /// Asks to join as a new incarnation: after [`WaitError::Excluded`], or as the replacement of a process that has
    /// exited.
    pub fn request_join(&mut self) {
        let word = self.member_state_word(self.me);
        let mut seen = MemberState(word.load(Ordering::Acquire));
        loop {
            let request = MemberState::new(seen.generation() + 1, JOINING);
            match word.compare_exchange(seen.0, request.0, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    self.generation = request.generation();
                    break;
                }
                Err(other) => seen = MemberState(other),
            }
        }
        // Ranks that wait for the previous incarnation need not wait any more.
        fence(Ordering::SeqCst);
        self.wake_sleepers();
    }

    /// Asks to join once more, after [`PhaseBarrier::await_admission`] timed out. A request that a member has granted in
    /// the meantime remains: the members count on this rank, and would lose it in the middle of a step.
    pub fn request_join_again(&mut self) {
        let seen = self.member_state(self.me);
        if seen.generation() != self.generation || seen.state() == EXCLUDED {
            self.request_join();
        }
    }

    /// Admits the joining ranks, if this rank is the lowest member. Called before an arrival after which a step may
    /// begin; `next` is that step.
    #[inline]
    pub fn admit(&self, membership: Membership, next: RejoinPoint) {
        if membership.joining.is_empty() || membership.members.lowest() != Some(self.me) {
            return;
        }
        for rank in membership.joining.iter() {
            let seen = self.member_state(rank);
            if seen.state() != JOINING {
                continue;
            }
            // First the rejoin point, then the state. Another rank that took itself for the lowest may have stored a
            // later phase.
            self.memory.rank_words(rank)[member_state_at(self.ranks) + 1]
                .fetch_max(next.bits(), Ordering::Release);
            let active = MemberState::new(seen.generation(), ACTIVE);
            let word = self.member_state_word(rank);
            let _ = word.compare_exchange(seen.0, active.0, Ordering::AcqRel, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        self.wake_sleepers();
    }

    /// Waits until the lowest member has admitted this rank, and until all members have arrived in the phase before
    /// its first one: only then have all members finished with its predecessor's data. Returns the first phase.
    pub fn await_admission(&self, strategy: &mut impl WaitStrategy) -> Result<RejoinPoint, WaitError> {
        let (wake_word, mine) = (self.wake_word(self.me), MemberState::new(self.generation, ACTIVE));
        while self.member_state(self.me) != mine {
            match strategy.next() {
                WaitAction::Poll | WaitAction::CheckMembers => std::hint::spin_loop(),
                WaitAction::TimedOut => return Err(WaitError::Missing(self.others())),
                WaitAction::Sleep => {
                    let seen = wake_word.fetch_or(SLEEPING, Ordering::AcqRel) | SLEEPING;
                    fence(Ordering::SeqCst);
                    if self.member_state(self.me) != mine {
                        strategy.sleep(wake_word, seen);
                    }
                    wake_word.fetch_and(!SLEEPING, Ordering::Relaxed);
                }
            }
        }
        let first = self.rejoin_point(self.me);
        if !mutation_enabled(Mutation::RejoinWithoutWait) {
            self.wait(first.phase - 1, strategy)?;
        }
        self.phase_word().store(first.phase - 1, Ordering::Relaxed);
        Ok(first)
    }

    /// Returns all other ranks: each of them could have admitted this rank.
    fn others(&self) -> RankSet {
        RankSet::first(self.ranks).without(RankSet::only(self.me))
    }

    /// Wakes all ranks that sleep.
    #[inline]
    fn wake_sleepers(&self) {
        for rank in RankSet::first(self.ranks).iter() {
            let wake_word = self.wake_word(rank);
            let seen = wake_word.load(Ordering::Relaxed);
            // One of the ranks that find the flag wakes the sleeper: the value is odd, so + 1 clears the flag and
            // counts.
            if seen & SLEEPING != 0
                && wake_word.compare_exchange(seen, seen + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            {
                self.memory.wake(rank);
            }
        }
    }

    fn member_state_word(&self, rank: Rank) -> &AtomicU64 {
        &self.memory.rank_words(rank)[member_state_at(self.ranks)]
    }

    fn member_state(&self, rank: Rank) -> MemberState {
        MemberState(self.member_state_word(rank).load(Ordering::Acquire))
    }

    fn rejoin_point(&self, rank: Rank) -> RejoinPoint {
        RejoinPoint::from_bits(
            self.memory.rank_words(rank)[member_state_at(self.ranks) + 1].load(Ordering::Acquire),
        )
    }

    fn wake_word(&self, rank: Rank) -> &AtomicU64 {
        &self.memory.rank_words(rank)[wake_word_at(self.ranks)]
    }

    fn phase_word(&self) -> &AtomicU64 {
        &self.memory.rank_words(self.me)[member_state_at(self.ranks) + LINE_WORDS]
    }

    fn signal_at(&self, phase: u64) -> usize {
        if mutation_enabled(Mutation::OneSignalSet) {
            0
        } else {
            (phase & 1) as usize * signal_words(self.ranks)
        }
    }
}

/// Returns the number of words for the signals of one parity.
fn signal_words(ranks: usize) -> usize {
    ranks.next_multiple_of(LINE_WORDS)
}

/// Returns the index of the wake word in the rank words.
pub(crate) fn wake_word_at(ranks: usize) -> usize {
    2 * signal_words(ranks)
}

fn member_state_at(ranks: usize) -> usize {
    wake_word_at(ranks) + LINE_WORDS
}

fn init_rank_words(words: &[AtomicU64], ranks: usize) {
    let first = RejoinPoint { phase: 1, odd_step: false };
    words[member_state_at(ranks) + 1].store(first.bits(), Ordering::Relaxed);
    words[member_state_at(ranks)].store(MemberState::new(1, ACTIVE).0, Ordering::Release);
}

#[inline]
fn missing(signals: &[AtomicU64], members: RankSet, phase: u64) -> RankSet {
    // Acquire; pairs with the Release in `arrive`.
    let order = weakened(Mutation::RelaxedSignalRead, Ordering::Acquire);
    members.iter().filter(|rank| Signal(signals[rank.index()].load(order)).phase() < phase).collect()
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    /// Barrier memory of one process, whose ranks do not sleep.
    #[derive(Debug)]
    struct VecMemory(Vec<Vec<AtomicU64>>);

    impl BarrierMemory for &VecMemory {
        fn rank_words(&self, rank: Rank) -> &[AtomicU64] {
            &self.0[rank.index()]
        }
        fn wake(&self, _rank: Rank) {}
    }

    /// Polls once, then times out.
    struct PollOnce;

    impl WaitStrategy for PollOnce {
        fn next(&mut self) -> WaitAction {
            WaitAction::TimedOut
        }
        fn sleep(&mut self, _wake_word: &AtomicU64, _seen: u64) {}
    }

    fn world(ranks: usize) -> VecMemory {
        let words = PhaseBarrier::<&VecMemory>::words(ranks);
        let memory = VecMemory((0..ranks).map(|_| (0..words).map(|_| AtomicU64::new(0)).collect()).collect());
        PhaseBarrier::init(&&memory, ranks);
        memory
    }

    fn barriers(memory: &VecMemory) -> Vec<PhaseBarrier<&VecMemory>> {
        let ranks = memory.0.len();
        (0..ranks).map(|rank| PhaseBarrier::new(memory, Rank(rank as u32), ranks)).collect()
    }

    #[test]
    fn phase_ends_when_all_arrive_and_timeout_names_missing_ranks() {
        let memory = world(3);
        let barriers = barriers(&memory);
        let all = RankSet::first(3);
        assert_eq!(barriers[0].arrive(all, RankSet::EMPTY), 1);
        let missing = WaitError::Missing([1, 2].into_iter().map(Rank).collect());
        assert_eq!(barriers[0].wait(1, &mut PollOnce), Err(missing));
        barriers[1].arrive(all, RankSet::EMPTY);
        assert_eq!(barriers[0].wait(1, &mut PollOnce), Err(WaitError::Missing(RankSet::only(Rank(2)))));
        barriers[2].arrive(RankSet::only(Rank(1)), all);
        let outcome = barriers[0].wait(1, &mut PollOnce).unwrap();
        assert_eq!(
            (outcome.members, outcome.dispatched),
            (all, RankSet::first(2)),
            "rank 2 dispatches nothing to rank 0"
        );
        assert_eq!(outcome.combined, RankSet::only(Rank(2)));
        assert_eq!(barriers[1].wait(1, &mut PollOnce).unwrap().dispatched, all);
    }

    #[test]
    fn excluded_rank_rejoins_with_new_generation() {
        let memory = world(2);
        let mut barriers = barriers(&memory);
        let all = RankSet::first(2);
        barriers[0].arrive(all, all);
        assert!(barriers[0].wait(1, &mut PollOnce).is_err());
        barriers[0].exclude(RankSet::only(Rank(1)));
        assert_eq!(barriers[0].wait(1, &mut PollOnce).unwrap().members, RankSet::only(Rank(0)));
        barriers[1].arrive(all, all);
        assert_eq!(barriers[1].wait(1, &mut PollOnce), Err(WaitError::Excluded));

        barriers[1].request_join();
        assert!(barriers[1].await_admission(&mut PollOnce).is_err(), "no member has admitted it");
        let next = RejoinPoint { phase: 3, odd_step: true };
        let membership = barriers[0].membership(2).unwrap();
        assert_eq!(membership.joining, RankSet::only(Rank(1)));
        barriers[0].admit(membership, next);
        barriers[0].arrive(all, all);
        assert!(barriers[0].wait(2, &mut PollOnce).is_ok(), "rank 1 is a member only from phase 3 on");
        assert_eq!(barriers[1].await_admission(&mut PollOnce), Ok(next));
        assert_eq!((barriers[1].generation(), barriers[1].phase()), (2, 2));
        barriers[0].arrive(all, all);
        assert_eq!(barriers[0].wait(3, &mut PollOnce), Err(WaitError::Missing(RankSet::only(Rank(1)))));
        barriers[1].arrive(all, all);
        assert_eq!(barriers[0].wait(3, &mut PollOnce).unwrap().combined, all);
        assert_eq!(barriers[1].wait(3, &mut PollOnce).unwrap().combined, all);
    }

    #[test]
    fn repeated_join_request_keeps_granted_one() {
        let memory = world(2);
        let mut barriers = barriers(&memory);
        let all = RankSet::first(2);
        barriers[0].exclude(RankSet::only(Rank(1)));
        barriers[1].request_join();
        assert!(barriers[1].await_admission(&mut PollOnce).is_err(), "no member has admitted it");
        let next = RejoinPoint { phase: 2, odd_step: false };
        barriers[0].admit(barriers[0].membership(1).unwrap(), next);
        barriers[0].arrive(all, all);
        barriers[0].wait(1, &mut PollOnce).unwrap();
        // Rank 0 begins a step with rank 1 before rank 1 asks again.
        barriers[0].arrive(all, all);
        barriers[1].request_join_again();
        assert_eq!(barriers[0].wait(2, &mut PollOnce), Err(WaitError::Missing(RankSet::only(Rank(1)))));
        assert_eq!(barriers[1].await_admission(&mut PollOnce), Ok(next));
        barriers[1].arrive(all, all);
        assert_eq!(barriers[0].wait(2, &mut PollOnce).unwrap().combined, all);
    }

    #[test]
    fn rank_excluded_again_before_it_began_renews_its_request() {
        let memory = world(2);
        let mut barriers = barriers(&memory);
        barriers[0].exclude(RankSet::only(Rank(1)));
        barriers[1].request_join();
        barriers[0].admit(barriers[0].membership(1).unwrap(), RejoinPoint { phase: 2, odd_step: false });
        barriers[0].arrive(RankSet::EMPTY, RankSet::EMPTY);
        barriers[0].arrive(RankSet::EMPTY, RankSet::EMPTY);
        barriers[0].exclude(RankSet::only(Rank(1)));
        barriers[1].request_join_again();
        assert_eq!(barriers[0].membership(3).unwrap().joining, RankSet::only(Rank(1)));
    }

    #[test]
    fn stale_exclusion_does_not_affect_rejoined_rank() {
        let memory = world(2);
        let mut barriers = barriers(&memory);
        barriers[0].arrive(RankSet::EMPTY, RankSet::EMPTY);
        barriers[1].request_join();
        let membership = barriers[0].membership(1).unwrap();
        barriers[0].admit(membership, RejoinPoint { phase: 2, odd_step: false });
        barriers[0].exclude(RankSet::only(Rank(1)));
        assert_eq!(barriers[0].membership(2).unwrap().members, RankSet::first(2));
    }

    #[test]
    fn barrier_words_fill_whole_cache_lines() {
        assert_eq!(PhaseBarrier::<&VecMemory>::words(8) * 8, 5 * 64);
        assert_eq!(PhaseBarrier::<&VecMemory>::words(9) * 8, 7 * 64);
    }
}
