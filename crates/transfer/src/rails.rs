//! Which rail carries the next bytes, and which rails are left alone for a while.
//!
//! Owns the health of one rail, [`Rail`], and the choice among rails, [`choose`]. Both are pure: time is a
//! [`MonoTime`] and randomness a `u64`, each drawn by the caller. Does not own connections, queues or
//! threads.
//!
//! ```text
//!             failed                     pause over, may_try
//!      Up ─────────────▶ Paused ──────────────────────────────▶ Probing ──┐ PROBE_MAX without a word:
//!      ▲                    ▲                                   │  │  ▲   │ may_try starts another probe
//!      │                    └────────────── failed ─────────────┘  │  └───┘
//!      └─────────────────────────────────── succeeded ─────────────┘
//! ```
//!
//! Invariants:
//! - `PAUSE_BASE / 2 <= pause <= PAUSE_MAX` for every pause.
//! - In `Probing` one attempt is out; [`Rail::may_try`] refuses others until it is reported or [`PROBE_MAX`]
//!   is over.
//! - A rail that works is up at most `PAUSE_MAX + 2 * PROBE_MAX` after it began to work, if somebody keeps
//!   asking.
//! - [`choose`] names usable rails only.

use std::time::Duration;

use moontide_types::MonoTime;

/// The longest pause after a first failure. A reset connection is worth another try at once; a tenth of a
/// second keeps a rail that refuses from being asked in a tight loop.
pub const PAUSE_BASE: Duration = Duration::from_millis(100);

/// No pause is longer. It bounds what a repaired rail stands idle, and a try every 5 to 10 s costs nothing.
pub const PAUSE_MAX: Duration = Duration::from_secs(10);

/// A probe that has reported nothing for this long is lost, with the thread that ran it perhaps, and another
/// may start. Whoever probes gives up sooner than this, or two probes may run at once.
pub const PROBE_MAX: Duration = Duration::from_secs(5);

/// A success this long after the rail came up clears its failures; an earlier one does not, so that a rail
/// which answers each probe and then breaks is paused for longer every time. Not shorter than [`PAUSE_MAX`]:
/// to be trusted, a rail holds for at least as long as it may have been paused.
pub const FORGIVEN_AFTER: Duration = Duration::from_secs(10);

/// Bytes by which a rail of another NUMA node seems busier than it is.
///
/// Crossing the link between sockets costs latency and a share of a link that computation uses too, so the
/// near rail is right as long as its queue is short. 1 MiB is 84 µs of a 100 Gbit/s rail (2^20 × 8 / 10^11):
/// small transfers stay on their node, while bulk, which queues more than that at once, still fills every
/// rail. A judgement, not a measurement.
pub const NUMA_PENALTY_BYTES: u64 = 1 << 20;

const _: () = assert!(PAUSE_BASE.as_nanos() > 0 && PAUSE_BASE.as_nanos() <= PAUSE_MAX.as_nanos());
const _: () = assert!(FORGIVEN_AFTER.as_nanos() >= PAUSE_MAX.as_nanos());

/// What a rail is doing; see the drawing above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RailState {
    /// Carries traffic.
    Up {
        /// When it came up.
        since: MonoTime,
    },
    /// Failed, and is left alone.
    Paused {
        /// When it may be probed.
        until: MonoTime,
    },
    /// Half open: one attempt is out, and its outcome decides.
    Probing {
        /// When the attempt counts as lost.
        until: MonoTime,
    },
}

/// The health of one rail.
///
/// Reports carry no name, so a late one is taken for news: the failure of a transfer begun before an outage
/// pauses a rail that has recovered since. A caller with many transfers on one rail avoids this by noting
/// [`Rail::spell`] right after [`Rail::may_try`] said yes, and reporting only what still belongs to the
/// current spell.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rail {
    state: RailState,
    /// Failures not yet forgiven; the exponent of the next pause.
    failures: u32,
    spell: u64,
}

impl Rail {
    /// A rail of which nothing bad is known.
    pub fn new(now: MonoTime) -> Rail {
        Rail { state: RailState::Up { since: now }, failures: 0, spell: 0 }
    }

    /// What the rail is doing.
    pub fn state(&self) -> RailState {
        self.state
    }

    /// Failures not yet forgiven.
    pub fn failures(&self) -> u32 {
        self.failures
    }

    /// Counts changes of state: an attempt whose spell is over has nothing to say about the rail as it is
    /// now.
    pub fn spell(&self) -> u64 {
        self.spell
    }

    /// From when on [`Rail::may_try`] says yes, if nothing is reported before: when a caller without any
    /// usable rail should ask again. The beginning of time for a rail that is up.
    pub fn ready_at(&self) -> MonoTime {
        match self.state {
            RailState::Up { .. } => MonoTime(0),
            RailState::Paused { until } | RailState::Probing { until } => until,
        }
    }

    /// Whether [`Rail::may_try`] would say yes. Claims nothing: it is what [`Candidate::usable`] is made of,
    /// since a probe claimed for a rail that is then not chosen would keep that rail down for [`PROBE_MAX`].
    pub fn is_ready(&self, now: MonoTime) -> bool {
        now >= self.ready_at()
    }

    /// Whether the caller may use the rail now. Yes for a rail that was paused makes the caller's attempt the
    /// probe, of which it reports [`Rail::succeeded`] or [`Rail::failed`] within [`PROBE_MAX`].
    #[must_use = "a yes may have claimed the only probe"]
    pub fn may_try(&mut self, now: MonoTime) -> bool {
        let ready = self.is_ready(now);
        if ready && !matches!(self.state, RailState::Up { .. }) {
            self.enter(RailState::Probing { until: now.after(PROBE_MAX) });
        }
        ready
    }

    /// An attempt went well.
    pub fn succeeded(&mut self, now: MonoTime) {
        match self.state {
            // Only a success forgives: a rail that was idle for as long has proved nothing.
            RailState::Up { since } if now.since(since) >= FORGIVEN_AFTER => self.failures = 0,
            RailState::Up { .. } => {}
            // It began before the failure that caused the pause, which is the newer word.
            RailState::Paused { .. } => {}
            RailState::Probing { .. } => self.enter(RailState::Up { since: now }),
        }
    }

    /// An attempt failed; `random` places the end of the pause, so that rails which failed together, on one
    /// host or on a thousand, do not come back together.
    pub fn failed(&mut self, now: MonoTime, random: u64) {
        // All transfers on a rail fail when it breaks. They are one failure, or a single cut cable would earn
        // the longest pause at once.
        if matches!(self.state, RailState::Paused { .. }) {
            return;
        }
        self.failures = self.failures.saturating_add(1);
        self.enter(RailState::Paused { until: now.after(pause(self.failures, random)) });
    }

    fn enter(&mut self, state: RailState) {
        self.state = state;
        self.spell += 1;
    }
}

/// `PAUSE_BASE * 2^(failures - 1)`, at most [`PAUSE_MAX`], of which `random` takes away up to a half.
fn pause(failures: u32, random: u64) -> Duration {
    // 2^16 × 100 ms is far above the ceiling, and a `u32` holds it.
    let doublings = failures.saturating_sub(1).min(16);
    let longest = PAUSE_BASE.saturating_mul(1 << doublings).min(PAUSE_MAX);
    let half = longest / 2;
    // At most 5 × 10^9 ns: the remainder of a 64-bit number favours no value that anybody could notice.
    let span_nanos = u64::try_from((longest - half).as_nanos()).unwrap_or(u64::MAX - 1);
    half + Duration::from_nanos(random % (span_nanos + 1))
}

/// A rail as [`choose`] sees it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// The caller's name for it, which [`choose`] gives back.
    pub rail: usize,
    /// Whether it may be used now: connected, or ready for a probe; see [`Rail::is_ready`].
    pub usable: bool,
    /// Bytes given to it and not yet done. A slower rail drains slower, so speeds need no weights.
    pub in_flight_bytes: u64,
    /// The NUMA node of its NIC, if known.
    pub numa: Option<u32>,
}

impl Candidate {
    /// How busy it seems from `numa`. Unknown nodes count as near: a penalty needs evidence.
    fn cost_bytes(&self, numa: Option<u32>) -> u64 {
        let far = matches!((self.numa, numa), (Some(its), Some(ours)) if its != ours);
        self.in_flight_bytes.saturating_add(if far { NUMA_PENALTY_BYTES } else { 0 })
    }
}

/// The `rail` of the usable candidate with the fewest bytes in flight, seen from node `numa`; `None` if none
/// is usable.
///
/// Among equals `turn` decides: a caller that adds one each time uses them in rotation, and no rail is
/// favoured for being first in the list.
#[must_use]
pub fn choose(candidates: &[Candidate], numa: Option<u32>, turn: u64) -> Option<usize> {
    let usable = || candidates.iter().filter(|candidate| candidate.usable);
    let least = usable().map(|candidate| candidate.cost_bytes(numa)).min()?;
    let equals = || usable().filter(|candidate| candidate.cost_bytes(numa) == least);
    // At least one is as cheap as the cheapest, and the remainder is below their number.
    let count = equals().count().max(1) as u64;
    equals().nth((turn % count) as usize).map(|candidate| candidate.rail)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    const fn ms(ms: u64) -> MonoTime {
        MonoTime(ms * 1_000_000)
    }

    /// One step of a history, with what it should lead to.
    #[derive(Clone, Copy, Debug)]
    enum Step {
        /// `may_try` says this.
        Try(bool),
        Fail,
        Succeed,
    }
    use Step::{Fail, Succeed, Try};

    /// Plays `(at_ms, step)`s, and compares the failures and the time of readiness in the end. With zero for
    /// `random` a pause is the shortest it can be: 50 ms, 100 ms, 200 ms and so on.
    fn check(steps: &[(u64, Step)], failures: u32, ready_at_ms: u64) {
        let mut rail = Rail::new(ms(0));
        for &(at_ms, step) in steps {
            let now = ms(at_ms);
            match step {
                Try(expected) => {
                    assert_eq!(rail.is_ready(now), expected, "is_ready at {at_ms} ms in {steps:?}");
                    assert_eq!(rail.may_try(now), expected, "may_try at {at_ms} ms in {steps:?}");
                }
                Fail => rail.failed(now, 0),
                Succeed => rail.succeeded(now),
            }
        }
        assert_eq!((rail.failures(), rail.ready_at()), (failures, ms(ready_at_ms)), "after {steps:?}");
    }

    #[test]
    fn a_rail_that_works_is_always_tried() {
        check(&[], 0, 0);
        check(&[(0, Try(true)), (0, Try(true)), (5, Succeed), (5, Try(true))], 0, 0);
    }

    #[test]
    fn a_failure_pauses_and_then_one_probe_decides() {
        check(&[(1_000, Fail), (1_049, Try(false))], 1, 1_050);
        check(&[(1_000, Fail), (1_050, Try(true)), (1_050, Try(false))], 1, 6_050);
        check(&[(1_000, Fail), (1_050, Try(true)), (1_060, Succeed), (1_060, Try(true))], 1, 0);
        check(&[(1_000, Fail), (1_050, Try(true)), (1_060, Fail), (1_159, Try(false))], 2, 1_160);
    }

    #[test]
    fn transfers_that_fail_together_are_one_failure() {
        check(&[(1_000, Fail), (1_000, Fail), (1_001, Fail), (1_040, Fail)], 1, 1_050);
    }

    #[test]
    fn a_late_success_does_not_end_a_pause() {
        check(&[(1_000, Fail), (1_010, Succeed), (1_010, Try(false))], 1, 1_050);
    }

    #[test]
    fn a_lost_probe_is_replaced() {
        check(
            &[(0, Fail), (50, Try(true)), (5_049, Try(false)), (5_050, Try(true)), (5_051, Try(false))],
            1,
            10_050,
        );
    }

    #[test]
    fn a_flapping_rail_stays_punished_until_it_held_for_a_while() {
        // Up at 100, good until 10 s later: the next failure is the second, paused for half of 200 ms.
        let up = [(0, Fail), (100, Try(true)), (100, Succeed)];
        let after = |rest: &[(u64, Step)]| [&up[..], rest].concat();
        check(&after(&[(10_099, Succeed), (10_099, Fail)]), 2, 10_199);
        check(&after(&[(10_100, Succeed), (10_100, Fail)]), 1, 10_150);
        // Time without a success forgives nothing.
        check(&after(&[(60_000, Fail)]), 2, 60_100);
    }

    #[test]
    fn pauses_double_up_to_the_ceiling() {
        let longest_ms = [100, 100, 200, 400, 800, 1_600, 3_200, 6_400, 10_000, 10_000];
        for (failures, longest_ms) in (0..).zip(longest_ms) {
            let half = Duration::from_millis(longest_ms) / 2;
            assert_eq!(pause(failures, 0), half);
            assert_eq!(pause(failures, half.as_nanos() as u64), half * 2);
            assert_eq!(pause(failures, half.as_nanos() as u64 + 1), half);
        }
        assert_eq!(pause(u32::MAX, 0), PAUSE_MAX / 2);
    }

    #[test]
    fn the_end_of_time_is_no_panic() {
        let mut rail = Rail::new(MonoTime(u64::MAX));
        rail.failed(MonoTime(u64::MAX), u64::MAX);
        assert!(rail.may_try(MonoTime(u64::MAX)));
        rail.succeeded(MonoTime(0));
        assert!(rail.may_try(MonoTime(0)));
    }

    const MIB: u64 = 1 << 20;

    /// Candidates are `(usable, in_flight_bytes, numa)`; rails are numbered from 10, so that an index is no
    /// rail.
    fn check_choice(
        candidates: &[(bool, u64, Option<u32>)],
        numa: Option<u32>,
        turn: u64,
        expected: Option<usize>,
    ) {
        let listed: Vec<Candidate> = (10..)
            .zip(candidates)
            .map(|(rail, &(usable, in_flight_bytes, numa))| Candidate { rail, usable, in_flight_bytes, numa })
            .collect();
        assert_eq!(choose(&listed, numa, turn), expected, "{candidates:?} from {numa:?}, turn {turn}");
    }

    #[test]
    fn the_least_busy_usable_rail_is_chosen() {
        check_choice(&[], None, 7, None);
        check_choice(&[(false, 0, None), (false, 0, None)], None, 7, None);
        check_choice(&[(true, 5, None), (true, 4, None), (false, 0, None)], None, 7, Some(11));
        check_choice(&[(true, u64::MAX, Some(1))], Some(0), u64::MAX, Some(10));
    }

    #[test]
    fn a_far_rail_is_chosen_when_the_near_one_is_busier_by_the_penalty() {
        let (near, far) = (Some(0), Some(1));
        check_choice(&[(true, 0, far), (true, MIB - 1, near)], near, 0, Some(11));
        check_choice(&[(true, 0, far), (true, MIB, near)], near, 0, Some(10));
        check_choice(&[(true, 0, far), (true, MIB, near)], near, 1, Some(11));
        check_choice(&[(true, 0, far), (true, MIB + 1, near)], near, 1, Some(10));
        check_choice(&[(true, 0, far), (false, 0, near)], near, 0, Some(10));
        // Who does not know where it is, or what a rail is on, does not care.
        check_choice(&[(true, 0, far), (true, 1, near)], None, 0, Some(10));
        check_choice(&[(true, 0, None), (true, 1, near)], near, 0, Some(10));
    }

    #[test]
    fn equal_rails_take_turns() {
        let rails = [(true, 3, None), (false, 0, None), (true, 3, None), (true, 9, None), (true, 3, None)];
        for (turn, expected) in (0..).zip([10, 12, 14, 10, 12, 14]) {
            check_choice(&rails, None, turn, Some(expected));
        }
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![3 => Just(Try(true)), 1 => Just(Fail), 1 => Just(Succeed)]
    }

    /// A transfer of the simulation below.
    #[derive(Debug)]
    struct Attempt {
        ends: u64,
        outcome: Outcome,
        spell: u64,
        probe: bool,
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Outcome {
        Good,
        Bad,
        /// The thread died: nobody will report.
        Silent,
    }

    /// How often the simulated callers ask.
    const POLL_MS: u64 = 50;

    proptest! {
        /// Whatever is reported, in whatever order: pauses keep their bounds and one probe is out at most.
        #[test]
        fn any_history_keeps_the_invariants(history in vec((0u64..3_000, step(), any::<u64>()), 0..200)) {
            let mut rail = Rail::new(MonoTime(0));
            let mut now = MonoTime(0);
            let mut probe_began: Option<MonoTime> = None;
            for (advance_ms, step, random) in history {
                now = now.after(Duration::from_millis(advance_ms));
                let before = rail.clone();
                match step {
                    Try(_) => {
                        let ready = rail.is_ready(now);
                        prop_assert_eq!(rail.may_try(now), ready);
                        if let Some(began) = probe_began {
                            prop_assert_eq!(ready, now.since(began) >= PROBE_MAX, "two probes at once");
                        }
                        if ready && !matches!(before.state(), RailState::Up { .. }) {
                            probe_began = Some(now);
                        }
                    }
                    Fail => {
                        rail.failed(now, random);
                        probe_began = None;
                        if !matches!(before.state(), RailState::Paused { .. }) {
                            let pause = rail.ready_at().since(now);
                            prop_assert!(pause >= PAUSE_BASE / 2 && pause <= PAUSE_MAX, "{:?}", pause);
                            prop_assert_eq!(rail.failures(), before.failures() + 1);
                        }
                    }
                    Succeed => {
                        rail.succeeded(now);
                        probe_began = None;
                    }
                }
                prop_assert!(rail.ready_at().since(now) <= PAUSE_MAX.max(PROBE_MAX));
                prop_assert_eq!(rail.spell() != before.spell(), rail.state() != before.state());
            }
        }

        /// A link that is good and bad by turns, callers that ask every [`POLL_MS`], transfers that last up
        /// to [`PROBE_MAX`] or are never heard of again. Once the link is good for ever, the rail comes up in
        /// bounded time and stays so; callers that heed spells never run two probes at once.
        #[test]
        fn a_healed_link_is_found_out(
            turns in vec(1u64..20_000, 0..8),
            attempts in vec((1u64..=5_000, 0u8..10, any::<u64>()), 1..40),
            heedful: bool,
        ) {
            let heals_ms: u64 = turns.iter().sum();
            let is_good = |at_ms: u64| {
                let mut end = 0;
                let turn = turns.iter().position(|turn| { end += turn; at_ms < end });
                turn.is_none_or(|turn| turn % 2 == 1)
            };
            let (pause, probe) = (PAUSE_MAX.as_millis() as u64, PROBE_MAX.as_millis() as u64);
            // The last bad transfer may begin just before the link heals, and fail as late as it can; then a
            // pause, a poll, and a probe as slow as can be.
            let up_by_ms = heals_ms + probe + pause + POLL_MS + probe;

            let mut rail = Rail::new(ms(0));
            let mut out: Vec<Attempt> = vec![];
            let mut drawn = attempts.iter().cycle();
            for at_ms in (0..up_by_ms + 5_000).step_by(POLL_MS as usize) {
                let now = ms(at_ms);
                let (over, running): (Vec<_>, Vec<_>) = out.into_iter().partition(|one| one.ends <= at_ms);
                out = running;
                for one in over {
                    let &(_, _, random) = drawn.next().unwrap();
                    match one.outcome {
                        _ if heedful && one.spell != rail.spell() => {}
                        Outcome::Good => rail.succeeded(now),
                        Outcome::Bad => rail.failed(now, random),
                        Outcome::Silent => {}
                    }
                }
                let was_up = matches!(rail.state(), RailState::Up { .. });
                let late = at_ms >= up_by_ms;
                prop_assert!(was_up || !late, "{:?} at {} ms, good from {}", rail, at_ms, heals_ms);
                if rail.may_try(now) {
                    let &(lasts, luck, _) = drawn.next().unwrap();
                    // Ends are seen at polls: rounded down, so that none is seen after PROBE_MAX.
                    let lasts = (lasts / POLL_MS * POLL_MS).max(POLL_MS);
                    let outcome = match is_good(at_ms) {
                        _ if luck == 0 && at_ms < heals_ms => Outcome::Silent,
                        true => Outcome::Good,
                        false => Outcome::Bad,
                    };
                    let lasts = if outcome == Outcome::Silent { probe } else { lasts };
                    out.push(Attempt { ends: at_ms + lasts, outcome, spell: rail.spell(), probe: !was_up });
                }
                let probes = out.iter().filter(|one| one.probe).count();
                prop_assert!(!heedful || probes <= 1, "{} probes at {} ms", probes, at_ms);
            }
        }

        #[test]
        fn an_unusable_rail_is_never_chosen(
            rails in vec((any::<bool>(), 0u64..4 * MIB, proptest::option::of(0u32..3)), 0..16),
            numa in proptest::option::of(0u32..3),
            turn: u64,
        ) {
            let listed: Vec<Candidate> = (0..)
                .zip(rails)
                .map(|(rail, (usable, in_flight_bytes, numa))| {
                    Candidate { rail, usable, in_flight_bytes, numa }
                })
                .collect();
            match choose(&listed, numa, turn) {
                Some(rail) => {
                    prop_assert!(listed[rail].usable);
                    let cost = listed[rail].cost_bytes(numa);
                    prop_assert!(listed.iter().all(|one| !one.usable || one.cost_bytes(numa) >= cost));
                }
                None => prop_assert!(listed.iter().all(|one| !one.usable)),
            }
        }

        /// Rails that nothing is done on differ by one transfer at most; idle rails by one turn.
        #[test]
        fn equal_rails_share_the_load(
            count in 1usize..=16,
            sizes in vec(1u64..8 * MIB, 1..200),
            first_turn in 0u64..1 << 60,
        ) {
            let mut rails: Vec<Candidate> = (0..count)
                .map(|rail| Candidate { rail, usable: true, in_flight_bytes: 0, numa: Some(0) })
                .collect();
            let idle = rails.clone();
            let mut chosen = vec![0u64; count];
            for (turn, &size) in (first_turn..).zip(&sizes) {
                let rail = choose(&rails, Some(0), turn).unwrap();
                rails[rail].in_flight_bytes += size;
                chosen[choose(&idle, Some(0), turn).unwrap()] += 1;
            }
            let spread = |values: Vec<u64>| values.iter().max().unwrap() - values.iter().min().unwrap();
            let bytes = rails.iter().map(|rail| rail.in_flight_bytes).collect();
            prop_assert!(spread(bytes) <= *sizes.iter().max().unwrap());
            prop_assert!(spread(chosen) <= 1);
        }
    }
}
