//! [`PhaseBarrier`]: how the ranks of a world wait for each other, phase by phase.
//!
//! Every rank has a **post**: some lines of memory that all ranks can reach. In phase p a rank writes `p` into its
//! word of everybody's post and then polls its own post until everyone's word says `p`. Nobody polls memory of
//! another rank, and nothing is counted: arrival *is* the phase number.
//!
//! ```text
//!   post of a rank, in lines of 64 B (ranks up to a multiple of 8):
//!     signals of even phases   one word per rank, written by that rank   ┐ polled by the owner
//!     signals of odd phases    the same                                  ┘
//!     bell                     changes:63 │ parked:1                       the owner sleeps on it
//!     standing, entry          generation:62 │ state:2,  phase:63 │ odd:1  read by all in every phase
//!     phase                    the owner's last arrival                    written by the owner
//!
//!   signal:   phase:62 │ gives:1 │ sends:1
//! ```
//!
//! Two lines of signals, because a rank may be one phase ahead of another that still polls: its next signal must not
//! hide the last one. Who is two ahead has stopped waiting for us, so what it has written means nothing to us.
//!
//! **Who counts whom.** `sends` and `gives` are said to one rank: "what I owed you in this phase is complete". A rank
//! uses another's memory only on such a word for exactly this phase. So ranks need not agree at each moment on who is a
//! member: whom I left out hears no such word from me, and takes nothing stale for mine.
//!
//! **Who is waited for** says `standing`, and nobody keeps a copy of it. A rank that does not come is taken out by
//! whoever lost patience (ACTIVE → OUT) and everyone else sees that in the same phase or the next. Out, it writes
//! nothing that anybody reads, because all that a rank writes are places of its own. To come back it says so
//! (→ WISHING, with a new generation), and the lowest member tells it, before its own arrival, with which phase
//! to begin (→ ACTIVE, `entry`): who passes that phase has seen it.
//!
//! Invariants: a phase never falls, 0 is before the first one; generations grow; only its owner writes a rank's signals.

use crate::planted::{Bug, planted, weakened};
use crate::ranks::{Rank, RankSet};
use crate::sync::{AtomicU64, Ordering, fence};

/// Words of a line.
const LINE: usize = 8;
const PARKED: u64 = 1;

/// The posts of all ranks, and a way to wake their owners.
pub trait Posts {
    /// The post of a rank: [`PhaseBarrier::words`] words, aligned to a line.
    fn post(&self, rank: Rank) -> &[AtomicU64];
    /// Wakes the owner of a post, which sleeps because its bell had a certain value.
    fn wake(&self, rank: Rank);
}

/// How a rank waits.
pub trait Wait {
    /// What to do while somebody is missing.
    fn next(&mut self) -> Next;
    /// Sleeps until `bell` is no longer `seen`, or for a while; may return early.
    fn sleep(&mut self, bell: &AtomicU64, seen: u64);
}

/// What to do while somebody is missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Next {
    /// Look again at the own post.
    Poll,
    /// Look again at the own post, and at who is a member.
    Look,
    /// Sleep until the bell rings.
    Sleep,
    /// It has taken too long.
    GiveUp,
}

/// Where a rank that comes back begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Entry {
    /// Its first phase.
    pub phase: u64,
    /// Whether the step that begins with it is an odd one: which of two buffers is used.
    pub odd_step: bool,
}

/// Who is a member, as far as a rank can see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Roll {
    /// Those that are waited for.
    pub members: RankSet,
    /// Those that wish to come in.
    pub wishing: RankSet,
}

/// What came about in a phase.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Met {
    /// Who was waited for to the end, this rank included.
    pub members: RankSet,
    /// Whose tokens for this rank are complete.
    pub sends: RankSet,
    /// Whose returns to this rank are complete.
    pub gives: RankSet,
}

/// Why a phase did not end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum WaitError {
    /// These have not arrived. Wait again, or go on without them: [`PhaseBarrier::exclude`].
    #[error("no sign of rank {0} in time")]
    Missing(RankSet),
    /// The others have gone on without this rank. It may come back: [`PhaseBarrier::wish`].
    #[error("the others have gone on without this rank")]
    Excluded,
}

/// A signal: `phase:62 | gives:1 | sends:1`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Signal(u64);

impl Signal {
    fn new(phase: u64, sends: bool, gives: bool) -> Signal {
        Signal(phase << 2 | u64::from(gives) << 1 | u64::from(sends))
    }

    fn phase(self) -> u64 {
        self.0 >> 2
    }

    fn gives(self) -> bool {
        self.0 & 2 != 0
    }

    fn sends(self) -> bool {
        self.0 & 1 != 0
    }
}

/// A rank's place among the others: `generation:62 | state:2`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Standing(u64);

const OUT: u64 = 0;
const WISHING: u64 = 1;
const ACTIVE: u64 = 2;

impl Standing {
    fn new(generation: u64, state: u64) -> Standing {
        Standing(generation << 2 | state)
    }

    fn generation(self) -> u64 {
        self.0 >> 2
    }

    fn state(self) -> u64 {
        self.0 & 3
    }
}

impl Entry {
    fn bits(self) -> u64 {
        self.phase << 1 | u64::from(self.odd_step)
    }

    fn from_bits(bits: u64) -> Entry {
        Entry { phase: bits >> 1, odd_step: bits & 1 != 0 }
    }
}

/// One rank's side of a barrier.
#[derive(Debug)]
pub struct PhaseBarrier<P> {
    posts: P,
    me: Rank,
    ranks: usize,
    /// Which incarnation of the rank this is, in this barrier.
    generation: u64,
}

impl<P: Posts> PhaseBarrier<P> {
    /// Words of one post.
    pub fn words(ranks: usize) -> usize {
        2 * signal_words(ranks) + 3 * LINE
    }

    /// Founds a barrier on zeroed posts: all ranks are members from phase 1 on. Once, by one process, before any rank
    /// uses it.
    pub fn found(posts: &P, ranks: usize) {
        for rank in RankSet::first(ranks).iter() {
            found_post(posts.post(rank), ranks);
        }
    }

    /// As [`PhaseBarrier::found`], for a rank's own post; all ranks do so before any of them arrives.
    pub fn found_own(posts: &P, me: Rank, ranks: usize) {
        found_post(posts.post(me), ranks);
    }

    /// This rank's side of a barrier that was founded.
    pub fn new(posts: P, me: Rank, ranks: usize) -> PhaseBarrier<P> {
        assert!(me.index() < ranks && posts.post(me).len() == PhaseBarrier::<P>::words(ranks));
        let mut barrier = PhaseBarrier { posts, me, ranks, generation: 0 };
        barrier.generation = barrier.standing(me).generation();
        barrier
    }

    /// This rank.
    pub fn me(&self) -> Rank {
        self.me
    }

    /// How many ranks there are, members or not.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Which incarnation of this rank it is.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// What the posts lie in.
    pub fn posts(&self) -> &P {
        &self.posts
    }

    /// The phase in which this rank arrived last. It lives in shared memory.
    #[inline]
    pub fn phase(&self) -> u64 {
        self.phase_word().load(Ordering::Relaxed) // written by this rank alone
    }

    /// Whether anybody has ever been in this rank's place.
    pub fn is_founded(posts: &P, me: Rank, ranks: usize) -> bool {
        posts.post(me)[standing_at(ranks)].load(Ordering::Acquire) != 0
    }

    /// Who takes part in `phase`.
    #[inline]
    pub fn roll(&self, phase: u64) -> Result<Roll, WaitError> {
        let mut roll = Roll { members: RankSet::EMPTY, wishing: RankSet::EMPTY };
        for rank in RankSet::first(self.ranks).iter() {
            let standing = self.standing(rank);
            match standing.state() {
                ACTIVE if self.entry_of(rank).phase <= phase => roll.members.insert(rank),
                WISHING => roll.wishing.insert(rank),
                _ => {}
            }
            let is_mine = standing == Standing::new(self.generation, ACTIVE);
            if rank == self.me && !is_mine && !planted(Bug::ExclusionUnnoticed) {
                return Err(WaitError::Excluded);
            }
        }
        Ok(roll)
    }

    /// Arrives in the next phase: everything that this rank wrote before is seen by whoever sees it arrive. `sends` and
    /// `gives` are those to whom it says that what it owes them is complete. Returns the phase.
    #[inline]
    pub fn arrive(&self, sends: RankSet, gives: RankSet) -> u64 {
        let phase = self.phase() + 1;
        assert!(phase < 1 << 62, "4·10¹⁸ phases");
        self.phase_word().store(phase, Ordering::Relaxed);
        let at = self.signal_at(phase) + self.me.index();
        for rank in RankSet::first(self.ranks).iter() {
            let signal = Signal::new(phase, sends.contains(rank), gives.contains(rank));
            // Release; pairs with the Acquire in `wait`.
            let order = weakened(Bug::RelaxedArrival, Ordering::Release);
            self.posts.post(rank)[at].store(signal.0, order);
        }
        // Signal, then bell; the sleeper does it the other way round (see `wait`). One of the two sees the other.
        if !planted(Bug::ArrivalFenceMissing) {
            fence(Ordering::SeqCst);
        }
        self.ring_all();
        phase
    }

    /// Waits until every member has arrived in `phase`, in which this rank has arrived.
    #[inline]
    pub fn wait(&self, phase: u64, how: &mut impl Wait) -> Result<Met, WaitError> {
        let (post, bell) = (self.posts.post(self.me), self.bell(self.me));
        let signals = &post[self.signal_at(phase)..][..self.ranks];
        let mut members = self.roll(phase)?.members;
        let mut parked = false;
        let met = loop {
            let missing = missing(signals, members, phase);
            if missing.is_empty() {
                break Ok(());
            }
            match how.next() {
                Next::Poll => std::hint::spin_loop(),
                Next::Look => members = members.and(self.roll(phase)?.members),
                Next::GiveUp => {
                    members = members.and(self.roll(phase)?.members);
                    let missing = self::missing(signals, members, phase);
                    if !missing.is_empty() {
                        break Err(WaitError::Missing(missing));
                    }
                }
                Next::Sleep => {
                    let seen = bell.fetch_or(PARKED, Ordering::AcqRel) | PARKED;
                    parked = true;
                    // Bell, then signals and members: the other half of `arrive` and `exclude`.
                    if !planted(Bug::ParkFenceMissing) {
                        fence(Ordering::SeqCst);
                    }
                    members = members.and(self.roll(phase)?.members);
                    if planted(Bug::ParkUnchecked) || !self::missing(signals, members, phase).is_empty() {
                        how.sleep(bell, seen);
                    }
                }
            }
        };
        if parked {
            // A bell that stays set would cost the others a call to the system for nobody.
            bell.fetch_and(!PARKED, Ordering::Relaxed);
        }
        met?;
        // Who left us out did so before it arrived, so we see it now; and what it gives is not for us.
        let members = members.and(self.roll(phase)?.members);
        let mut met = Met { members, sends: RankSet::EMPTY, gives: RankSet::EMPTY };
        for rank in members.iter() {
            // Acquire; pairs with the Release in `arrive`, as in `missing`. It may have gone on without us just now.
            let order = weakened(Bug::RelaxedLookout, Ordering::Acquire);
            let signal = Signal(signals[rank.index()].load(order));
            if signal.phase() != phase {
                continue;
            }
            if signal.sends() || planted(Bug::WordIgnored) {
                met.sends.insert(rank);
            }
            if signal.gives() || planted(Bug::WordIgnored) {
                met.gives.insert(rank);
            }
        }
        Ok(met)
    }

    /// Goes on without these ranks: nobody waits for them any more. Who has come back meanwhile stays.
    pub fn exclude(&self, ranks: RankSet) {
        let phase = self.phase();
        for rank in ranks.iter().filter(|&rank| rank != self.me) {
            let seen = self.standing(rank);
            if seen.state() == ACTIVE && self.entry_of(rank).phase <= phase {
                let out = Standing::new(seen.generation(), OUT);
                // AcqRel; a failure means that somebody else did it, or that the rank itself asks to come back.
                let _ = self.standing_word(rank).compare_exchange(
                    seen.0,
                    out.0,
                    Ordering::AcqRel,
                    Ordering::Relaxed,
                );
            }
        }
        fence(Ordering::SeqCst);
        self.ring_all();
    }

    /// Asks to be let in again, as a new incarnation: after [`WaitError::Excluded`], or in place of a process that
    /// has ended.
    pub fn wish(&mut self) {
        let word = self.standing_word(self.me);
        let mut seen = Standing(word.load(Ordering::Acquire));
        loop {
            let wish = Standing::new(seen.generation() + 1, WISHING);
            match word.compare_exchange(seen.0, wish.0, Ordering::AcqRel, Ordering::Acquire) {
                Ok(_) => {
                    self.generation = wish.generation();
                    break;
                }
                Err(other) => seen = Standing(other),
            }
        }
        // Whoever waits for the incarnation before need not do so any more.
        fence(Ordering::SeqCst);
        self.ring_all();
    }

    /// Lets those in who wish, if this rank is the lowest member. Called before an arrival after which a step may
    /// begin; `next` is that step.
    #[inline]
    pub fn admit(&self, roll: Roll, next: Entry) {
        if roll.wishing.is_empty() || roll.members.lowest() != Some(self.me) {
            return;
        }
        for rank in roll.wishing.iter() {
            let seen = self.standing(rank);
            if seen.state() != WISHING {
                continue;
            }
            // First when, then that. Another that took itself for the lowest may have named a later phase.
            self.posts.post(rank)[standing_at(self.ranks) + 1].fetch_max(next.bits(), Ordering::Release);
            let active = Standing::new(seen.generation(), ACTIVE);
            let word = self.standing_word(rank);
            let _ = word.compare_exchange(seen.0, active.0, Ordering::AcqRel, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst);
        self.ring_all();
    }

    /// Waits until the lowest member has let this rank in, and until all members have arrived in the phase before its
    /// first one: only then is everyone done with what its predecessor wrote. Says where to begin.
    pub fn enter(&self, how: &mut impl Wait) -> Result<Entry, WaitError> {
        let (bell, mine) = (self.bell(self.me), Standing::new(self.generation, ACTIVE));
        while self.standing(self.me) != mine {
            match how.next() {
                Next::Poll | Next::Look => std::hint::spin_loop(),
                Next::GiveUp => return Err(WaitError::Missing(self.absent_members())),
                Next::Sleep => {
                    let seen = bell.fetch_or(PARKED, Ordering::AcqRel) | PARKED;
                    fence(Ordering::SeqCst);
                    if self.standing(self.me) != mine {
                        how.sleep(bell, seen);
                    }
                    bell.fetch_and(!PARKED, Ordering::Relaxed);
                }
            }
        }
        let entry = self.entry_of(self.me);
        if !planted(Bug::EntryUnmet) {
            self.wait(entry.phase - 1, how)?;
        }
        self.phase_word().store(entry.phase - 1, Ordering::Relaxed);
        Ok(entry)
    }

    /// Everyone else: those of whom nobody has let this rank in.
    fn absent_members(&self) -> RankSet {
        RankSet::first(self.ranks).without(RankSet::only(self.me))
    }

    /// Wakes whoever sleeps.
    #[inline]
    fn ring_all(&self) {
        for rank in RankSet::first(self.ranks).iter() {
            let bell = self.bell(rank);
            let seen = bell.load(Ordering::Relaxed);
            // One of those who find it parked wakes it: parked is odd, so the sum clears it and counts.
            if seen & PARKED != 0
                && bell.compare_exchange(seen, seen + 1, Ordering::AcqRel, Ordering::Relaxed).is_ok()
            {
                self.posts.wake(rank);
            }
        }
    }

    fn standing_word(&self, rank: Rank) -> &AtomicU64 {
        &self.posts.post(rank)[standing_at(self.ranks)]
    }

    fn standing(&self, rank: Rank) -> Standing {
        Standing(self.standing_word(rank).load(Ordering::Acquire))
    }

    fn entry_of(&self, rank: Rank) -> Entry {
        Entry::from_bits(self.posts.post(rank)[standing_at(self.ranks) + 1].load(Ordering::Acquire))
    }

    fn bell(&self, rank: Rank) -> &AtomicU64 {
        &self.posts.post(rank)[bell_at(self.ranks)]
    }

    fn phase_word(&self) -> &AtomicU64 {
        &self.posts.post(self.me)[standing_at(self.ranks) + LINE]
    }

    fn signal_at(&self, phase: u64) -> usize {
        if planted(Bug::OneSignalLine) { 0 } else { (phase & 1) as usize * signal_words(self.ranks) }
    }
}

/// Words for the signals of one parity.
fn signal_words(ranks: usize) -> usize {
    ranks.next_multiple_of(LINE)
}

/// Where the bell stands in a post.
pub(crate) fn bell_at(ranks: usize) -> usize {
    2 * signal_words(ranks)
}

fn standing_at(ranks: usize) -> usize {
    bell_at(ranks) + LINE
}

fn found_post(post: &[AtomicU64], ranks: usize) {
    let first = Entry { phase: 1, odd_step: false };
    post[standing_at(ranks) + 1].store(first.bits(), Ordering::Relaxed);
    post[standing_at(ranks)].store(Standing::new(1, ACTIVE).0, Ordering::Release);
}

#[inline]
fn missing(signals: &[AtomicU64], members: RankSet, phase: u64) -> RankSet {
    // Acquire; pairs with the Release in `arrive`.
    let order = weakened(Bug::RelaxedLookout, Ordering::Acquire);
    members.iter().filter(|rank| Signal(signals[rank.index()].load(order)).phase() < phase).collect()
}

#[cfg(all(test, not(any(loom, shuttle))))]
mod tests {
    use super::*;

    /// Posts of one process; nobody sleeps.
    #[derive(Debug)]
    struct Flat(Vec<Vec<AtomicU64>>);

    impl Posts for &Flat {
        fn post(&self, rank: Rank) -> &[AtomicU64] {
            &self.0[rank.index()]
        }
        fn wake(&self, _rank: Rank) {}
    }

    /// Looks once.
    struct Once;

    impl Wait for Once {
        fn next(&mut self) -> Next {
            Next::GiveUp
        }
        fn sleep(&mut self, _bell: &AtomicU64, _seen: u64) {}
    }

    fn world(ranks: usize) -> Flat {
        let words = PhaseBarrier::<&Flat>::words(ranks);
        let flat = Flat((0..ranks).map(|_| (0..words).map(|_| AtomicU64::new(0)).collect()).collect());
        PhaseBarrier::found(&&flat, ranks);
        flat
    }

    fn sides(flat: &Flat) -> Vec<PhaseBarrier<&Flat>> {
        let ranks = flat.0.len();
        (0..ranks).map(|rank| PhaseBarrier::new(flat, Rank(rank as u32), ranks)).collect()
    }

    #[test]
    fn a_phase_ends_when_all_have_arrived_and_names_those_who_have_not() {
        let flat = world(3);
        let sides = sides(&flat);
        let all = RankSet::first(3);
        assert_eq!(sides[0].arrive(all, RankSet::EMPTY), 1);
        let missing = WaitError::Missing([1, 2].into_iter().map(Rank).collect());
        assert_eq!(sides[0].wait(1, &mut Once), Err(missing));
        sides[1].arrive(all, RankSet::EMPTY);
        assert_eq!(sides[0].wait(1, &mut Once), Err(WaitError::Missing(RankSet::only(Rank(2)))));
        sides[2].arrive(RankSet::only(Rank(1)), all);
        let met = sides[0].wait(1, &mut Once).unwrap();
        assert_eq!((met.members, met.sends), (all, RankSet::first(2)), "rank 2 sends nothing to rank 0");
        assert_eq!(met.gives, RankSet::only(Rank(2)));
        assert_eq!(sides[1].wait(1, &mut Once).unwrap().sends, all);
    }

    #[test]
    fn who_is_left_out_learns_it_and_comes_back_as_another() {
        let flat = world(2);
        let mut sides = sides(&flat);
        let all = RankSet::first(2);
        sides[0].arrive(all, all);
        assert!(sides[0].wait(1, &mut Once).is_err());
        sides[0].exclude(RankSet::only(Rank(1)));
        assert_eq!(sides[0].wait(1, &mut Once).unwrap().members, RankSet::only(Rank(0)));
        sides[1].arrive(all, all);
        assert_eq!(sides[1].wait(1, &mut Once), Err(WaitError::Excluded));

        sides[1].wish();
        assert!(sides[1].enter(&mut Once).is_err(), "nobody has let it in");
        let next = Entry { phase: 3, odd_step: true };
        let roll = sides[0].roll(2).unwrap();
        assert_eq!(roll.wishing, RankSet::only(Rank(1)));
        sides[0].admit(roll, next);
        sides[0].arrive(all, all);
        assert!(sides[0].wait(2, &mut Once).is_ok(), "it takes part from phase 3 on");
        assert_eq!(sides[1].enter(&mut Once), Ok(next));
        assert_eq!((sides[1].generation(), sides[1].phase()), (2, 2));
        sides[0].arrive(all, all);
        assert_eq!(sides[0].wait(3, &mut Once), Err(WaitError::Missing(RankSet::only(Rank(1)))));
        sides[1].arrive(all, all);
        assert_eq!(sides[0].wait(3, &mut Once).unwrap().gives, all);
        assert_eq!(sides[1].wait(3, &mut Once).unwrap().gives, all);
    }

    #[test]
    fn an_exclusion_that_comes_late_does_not_meet_the_next_incarnation() {
        let flat = world(2);
        let mut sides = sides(&flat);
        sides[0].arrive(RankSet::EMPTY, RankSet::EMPTY);
        sides[1].wish();
        let roll = sides[0].roll(1).unwrap();
        sides[0].admit(roll, Entry { phase: 2, odd_step: false });
        sides[0].exclude(RankSet::only(Rank(1)));
        assert_eq!(sides[0].roll(2).unwrap().members, RankSet::first(2));
    }

    #[test]
    fn posts_are_lines() {
        assert_eq!(PhaseBarrier::<&Flat>::words(8) * 8, 5 * 64);
        assert_eq!(PhaseBarrier::<&Flat>::words(9) * 8, 7 * 64);
    }
}
