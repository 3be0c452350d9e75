//! Health of rails and choice of the rail that carries the next bytes.
//!
//! Owns the health of one rail, [`Rail`], and the choice among rails, [`choose`]. Both are pure: time is a
//! [`MonoTime`] and randomness a `u64`, each drawn by the caller. Does not own connections, queues or
//! threads.
//!
//! ```text
//!             failed                  backoff over, try_acquire
//!      Up ────────────▶ BackingOff ─────────────────────────────▶ Probing ──┐ PROBE_MAX without a report:
//!      ▲                    ▲                                     │  │  ▲   │ try_acquire starts another probe
//!      │                    └─────────────── failed ──────────────┘  │  └───┘
//!      └──────────────────────────────────── succeeded ──────────────┘
//! ```
//!
//! Invariants:
//! - `BACKOFF_BASE / 2 <= backoff <= BACKOFF_MAX` for every backoff.
//! - In `Probing` one attempt is running; [`Rail::try_acquire`] refuses others until it is reported or [`PROBE_MAX`]
//!   has passed.
//! - A rail that works is up at most `BACKOFF_MAX + 2 * PROBE_MAX` after it began to work, if callers keep calling
//!   [`Rail::try_acquire`].
//! - [`choose`] returns usable rails only.

use std::time::Duration;

use moontide_rt::Backoff;
use moontide_types::MonoTime;

/// Longest backoff after a first failure. A reset connection can be retried at once; a tenth of a second keeps a rail
/// that refuses connections from being tried in a tight loop.
pub const BACKOFF_BASE: Duration = Duration::from_millis(100);

/// Longest backoff. It bounds how long a repaired rail is idle; a try every 5 to 10 s costs next to nothing.
pub const BACKOFF_MAX: Duration = Duration::from_secs(10);

/// Time after which a probe without a report counts as lost, perhaps because its thread exited, and another one may
/// start. A caller must end its probe sooner than this; otherwise two probes may run at once.
pub const PROBE_MAX: Duration = Duration::from_secs(5);

/// A success this long after the rail came up clears its failures. An earlier one does not, so that a rail which passes
/// each probe and then breaks backs off longer every time. Not shorter than [`BACKOFF_MAX`]: a rail must work for at
/// least as long as it may have backed off.
pub const FAILURES_RESET_AFTER: Duration = Duration::from_secs(10);

/// Bytes added to the load of a rail on another NUMA node.
///
/// Crossing the link between sockets costs latency and a share of a link that computation uses too, so the local rail
/// is better as long as its queue is short. 1 MiB is 84 µs of a 100 Gbit/s rail (2^20 × 8 / 10^11): small transfers
/// stay on their node, while bulk transfers, which queue more than that at once, still fill every rail. The value is an
/// estimate, not a measurement.
pub const NUMA_PENALTY_BYTES: u64 = 1 << 20;

const _: () = assert!(BACKOFF_BASE.as_nanos() > 0 && BACKOFF_BASE.as_nanos() <= BACKOFF_MAX.as_nanos());
const _: () = assert!(FAILURES_RESET_AFTER.as_nanos() >= BACKOFF_MAX.as_nanos());

/// State of a rail; see the diagram above.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RailState {
    /// The rail carries traffic.
    Up {
        /// Time at which the rail came up.
        since: MonoTime,
    },
    /// The rail failed and is not used.
    BackingOff {
        /// Time from which on it may be probed.
        until: MonoTime,
    },
    /// Half open: one attempt is running, and its outcome decides.
    Probing {
        /// Time at which the attempt counts as lost.
        until: MonoTime,
    },
}

/// Health of one rail.
///
/// Reports do not identify their attempt, so a late report counts as a new one: the failure of a transfer begun before
/// an outage makes a rail back off that has recovered since. A caller with many transfers on one rail avoids this: it
/// reads [`Rail::state_version`] right after [`Rail::try_acquire`] returned `true`, and reports an outcome only if the
/// version is still the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rail {
    state: RailState,
    backoff: Backoff,
    state_version: u64,
}

impl Rail {
    /// Creates a rail that is up and has no failures.
    pub fn new(now: MonoTime) -> Rail {
        Rail {
            state: RailState::Up { since: now },
            backoff: Backoff::new(BACKOFF_BASE, BACKOFF_MAX),
            state_version: 0,
        }
    }

    /// Returns the current state.
    pub fn state(&self) -> RailState {
        self.state
    }

    /// Returns the number of failures since the last reset.
    pub fn failures(&self) -> u32 {
        self.backoff.failures()
    }

    /// Returns the number of state changes so far. An attempt that began under another version must not be reported:
    /// its outcome does not describe the current state.
    pub fn state_version(&self) -> u64 {
        self.state_version
    }

    /// Returns the time from which on [`Rail::try_acquire`] returns `true` if nothing is reported before. A caller
    /// without any usable rail should try again then. `MonoTime(0)` for a rail that is up.
    pub fn ready_at(&self) -> MonoTime {
        match self.state {
            RailState::Up { .. } => MonoTime(0),
            RailState::BackingOff { until } | RailState::Probing { until } => until,
        }
    }

    /// Returns whether [`Rail::try_acquire`] would return `true`, without claiming the probe. [`RailCandidate::usable`]
    /// uses it: a probe claimed for a rail that is then not chosen would keep that rail down for [`PROBE_MAX`].
    pub fn is_ready(&self, now: MonoTime) -> bool {
        now >= self.ready_at()
    }

    /// Returns whether the caller may use the rail now. After a backoff, `true` makes the caller's attempt the probe;
    /// the caller must report [`Rail::succeeded`] or [`Rail::failed`] within [`PROBE_MAX`].
    #[must_use = "`true` may have claimed the only probe"]
    pub fn try_acquire(&mut self, now: MonoTime) -> bool {
        let ready = self.is_ready(now);
        if ready && !matches!(self.state, RailState::Up { .. }) {
            self.enter(RailState::Probing { until: now.after(PROBE_MAX) });
        }
        ready
    }

    /// Reports a successful attempt.
    pub fn succeeded(&mut self, now: MonoTime) {
        match self.state {
            // Only a success resets the failures: a rail that was idle for as long has not shown that it works.
            RailState::Up { since } if now.since(since) >= FAILURES_RESET_AFTER => self.backoff.reset(),
            RailState::Up { .. } => {}
            // The attempt began before the failure that started the backoff; the failure is newer.
            RailState::BackingOff { .. } => {}
            RailState::Probing { .. } => self.enter(RailState::Up { since: now }),
        }
    }

    /// Reports a failed attempt. `random` shortens the backoff, so that rails which failed together, on one host or on
    /// a thousand, do not recover at the same time.
    pub fn failed(&mut self, now: MonoTime, random: u64) {
        // All transfers on a rail fail when it breaks. They count as one failure; otherwise a single broken cable would
        // cause the longest backoff at once.
        if matches!(self.state, RailState::BackingOff { .. }) {
            return;
        }
        let pause = self.backoff.pause(Duration::ZERO, random);
        self.enter(RailState::BackingOff { until: now.after(pause) });
    }

    fn enter(&mut self, state: RailState) {
        self.state = state;
        self.state_version += 1;
    }
}

/// State of a rail as input to [`choose`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RailCandidate {
    /// Number of the rail, chosen by the caller and returned by [`choose`].
    pub rail: usize,
    /// Whether the rail may be used now: connected, or ready for a probe; see [`Rail::is_ready`].
    pub usable: bool,
    /// Bytes passed to the rail and not yet completed. A slower rail drains slower, so speeds need no weights.
    pub in_flight_bytes: u64,
    /// NUMA node of the rail's NIC, if known.
    pub numa: Option<u32>,
}

impl RailCandidate {
    /// Returns the load seen from `numa`. Unknown NUMA nodes count as local: a penalty needs evidence.
    fn cost_bytes(&self, numa: Option<u32>) -> u64 {
        let remote = matches!((self.numa, numa), (Some(rail), Some(caller)) if rail != caller);
        self.in_flight_bytes.saturating_add(if remote { NUMA_PENALTY_BYTES } else { 0 })
    }
}

/// Returns the `rail` of the usable candidate with the fewest bytes in flight, seen from node `numa`; `None` if no
/// candidate is usable.
///
/// `turn` decides among equals: a caller that adds one each time uses them round robin, so the first rail of the list
/// is not favoured.
#[must_use]
pub fn choose(candidates: &[RailCandidate], numa: Option<u32>, turn: u64) -> Option<usize> {
    let usable = || candidates.iter().filter(|candidate| candidate.usable);
    let least = usable().map(|candidate| candidate.cost_bytes(numa)).min()?;
    let equals = || usable().filter(|candidate| candidate.cost_bytes(numa) == least);
    // At least one candidate costs `least`, and the remainder is below their number.
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

    /// One step of a history, with its expected result.
    #[derive(Clone, Copy, Debug)]
    enum Step {
        /// Expected result of `try_acquire`.
        Try(bool),
        Fail,
        Succeed,
    }
    use Step::{Fail, Succeed, Try};

    /// Runs `(at_ms, step)`s, then compares the failures and the time of readiness. With zero for `random` a backoff is
    /// the shortest possible: 50 ms, 100 ms, 200 ms and so on.
    fn check(steps: &[(u64, Step)], failures: u32, ready_at_ms: u64) {
        let mut rail = Rail::new(ms(0));
        for &(at_ms, step) in steps {
            let now = ms(at_ms);
            match step {
                Try(expected) => {
                    assert_eq!(rail.is_ready(now), expected, "is_ready at {at_ms} ms in {steps:?}");
                    assert_eq!(rail.try_acquire(now), expected, "try_acquire at {at_ms} ms in {steps:?}");
                }
                Fail => rail.failed(now, 0),
                Succeed => rail.succeeded(now),
            }
        }
        assert_eq!((rail.failures(), rail.ready_at()), (failures, ms(ready_at_ms)), "after {steps:?}");
    }

    #[test]
    fn healthy_rail_can_always_be_acquired() {
        check(&[], 0, 0);
        check(&[(0, Try(true)), (0, Try(true)), (5, Succeed), (5, Try(true))], 0, 0);
    }

    #[test]
    fn rail_backs_off_after_failure_then_allows_one_probe() {
        check(&[(1_000, Fail), (1_049, Try(false))], 1, 1_050);
        check(&[(1_000, Fail), (1_050, Try(true)), (1_050, Try(false))], 1, 6_050);
        check(&[(1_000, Fail), (1_050, Try(true)), (1_060, Succeed), (1_060, Try(true))], 1, 0);
        check(&[(1_000, Fail), (1_050, Try(true)), (1_060, Fail), (1_159, Try(false))], 2, 1_160);
    }

    #[test]
    fn concurrent_failures_count_once() {
        check(&[(1_000, Fail), (1_000, Fail), (1_001, Fail), (1_040, Fail)], 1, 1_050);
    }

    #[test]
    fn late_success_does_not_end_backoff() {
        check(&[(1_000, Fail), (1_010, Succeed), (1_010, Try(false))], 1, 1_050);
    }

    #[test]
    fn lost_probe_is_replaced() {
        check(
            &[(0, Fail), (50, Try(true)), (5_049, Try(false)), (5_050, Try(true)), (5_051, Try(false))],
            1,
            10_050,
        );
    }

    #[test]
    fn failure_count_resets_only_after_sustained_success() {
        // Up at 100, good until 10 s later: the next failure is the second, which backs off for half of 200 ms.
        let up = [(0, Fail), (100, Try(true)), (100, Succeed)];
        let after = |rest: &[(u64, Step)]| [&up[..], rest].concat();
        check(&after(&[(10_099, Succeed), (10_099, Fail)]), 2, 10_199);
        check(&after(&[(10_100, Succeed), (10_100, Fail)]), 1, 10_150);
        // Time without a success does not reset the failures.
        check(&after(&[(60_000, Fail)]), 2, 60_100);
    }

    #[test]
    fn rail_at_maximum_time_does_not_panic() {
        let mut rail = Rail::new(MonoTime(u64::MAX));
        rail.failed(MonoTime(u64::MAX), u64::MAX);
        assert!(rail.try_acquire(MonoTime(u64::MAX)));
        rail.succeeded(MonoTime(0));
        assert!(rail.try_acquire(MonoTime(0)));
    }

    const MIB: u64 = 1 << 20;

    /// Candidates are `(usable, in_flight_bytes, numa)`; rails are numbered from 10, so that an index is never a
    /// rail number.
    fn check_choice(
        candidates: &[(bool, u64, Option<u32>)],
        numa: Option<u32>,
        turn: u64,
        expected: Option<usize>,
    ) {
        let listed: Vec<RailCandidate> = (10..)
            .zip(candidates)
            .map(|(rail, &(usable, in_flight_bytes, numa))| RailCandidate {
                rail,
                usable,
                in_flight_bytes,
                numa,
            })
            .collect();
        assert_eq!(choose(&listed, numa, turn), expected, "{candidates:?} from {numa:?}, turn {turn}");
    }

    #[test]
    fn least_busy_usable_rail_is_chosen() {
        check_choice(&[], None, 7, None);
        check_choice(&[(false, 0, None), (false, 0, None)], None, 7, None);
        check_choice(&[(true, 5, None), (true, 4, None), (false, 0, None)], None, 7, Some(11));
        check_choice(&[(true, u64::MAX, Some(1))], Some(0), u64::MAX, Some(10));
    }

    #[test]
    fn remote_numa_rail_is_chosen_if_local_is_busier_by_penalty() {
        let (local, remote) = (Some(0), Some(1));
        check_choice(&[(true, 0, remote), (true, MIB - 1, local)], local, 0, Some(11));
        check_choice(&[(true, 0, remote), (true, MIB, local)], local, 0, Some(10));
        check_choice(&[(true, 0, remote), (true, MIB, local)], local, 1, Some(11));
        check_choice(&[(true, 0, remote), (true, MIB + 1, local)], local, 1, Some(10));
        check_choice(&[(true, 0, remote), (false, 0, local)], local, 0, Some(10));
        // An unknown NUMA node of the caller or of the rail causes no penalty.
        check_choice(&[(true, 0, remote), (true, 1, local)], None, 0, Some(10));
        check_choice(&[(true, 0, None), (true, 1, local)], local, 0, Some(10));
    }

    #[test]
    fn equal_rails_are_chosen_round_robin() {
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
        version: u64,
        probe: bool,
    }

    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    enum Outcome {
        Good,
        Bad,
        /// The thread exited: no report follows.
        Silent,
    }

    /// Interval at which the simulated callers poll.
    const POLL_MS: u64 = 50;

    proptest! {
        /// For any reports in any order, backoffs keep their bounds and at most one probe runs.
        #[test]
        fn backoff_is_bounded_and_at_most_one_probe_runs(
            history in vec((0u64..3_000, step(), any::<u64>()), 0..200),
        ) {
            let mut rail = Rail::new(MonoTime(0));
            let mut now = MonoTime(0);
            let mut probe_began: Option<MonoTime> = None;
            for (advance_ms, step, random) in history {
                now = now.after(Duration::from_millis(advance_ms));
                let before = rail.clone();
                match step {
                    Try(_) => {
                        let ready = rail.is_ready(now);
                        prop_assert_eq!(rail.try_acquire(now), ready);
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
                        if !matches!(before.state(), RailState::BackingOff { .. }) {
                            let backoff = rail.ready_at().since(now);
                            prop_assert!(backoff >= BACKOFF_BASE / 2, "{:?}", backoff);
                            prop_assert!(backoff <= BACKOFF_MAX, "{:?}", backoff);
                            prop_assert_eq!(rail.failures(), before.failures() + 1);
                        }
                    }
                    Succeed => {
                        rail.succeeded(now);
                        probe_began = None;
                    }
                }
                prop_assert!(rail.ready_at().since(now) <= BACKOFF_MAX.max(PROBE_MAX));
                let version_changed = rail.state_version() != before.state_version();
                prop_assert_eq!(version_changed, rail.state() != before.state());
            }
        }

        /// The link is good and bad by turns, callers poll every [`POLL_MS`], transfers take up to [`PROBE_MAX`] or
        /// are never reported. Once the link stays good, the rail comes up in bounded time and stays up. Callers
        /// that compare state versions never run two probes at once.
        #[test]
        fn rail_recovers_in_bounded_time_after_link_heals(
            turns in vec(1u64..20_000, 0..8),
            attempts in vec((1u64..=5_000, 0u8..10, any::<u64>()), 1..40),
            check_version: bool,
        ) {
            let healthy_from_ms: u64 = turns.iter().sum();
            let is_good = |at_ms: u64| {
                let mut end = 0;
                let turn = turns.iter().position(|turn| { end += turn; at_ms < end });
                turn.is_none_or(|turn| turn % 2 == 1)
            };
            let (backoff, probe) = (BACKOFF_MAX.as_millis() as u64, PROBE_MAX.as_millis() as u64);
            // The last bad transfer may begin just before the link heals, and fail as late as it can; then a
            // backoff, a poll, and the slowest possible probe.
            let up_by_ms = healthy_from_ms + probe + backoff + POLL_MS + probe;

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
                        _ if check_version && one.version != rail.state_version() => {}
                        Outcome::Good => rail.succeeded(now),
                        Outcome::Bad => rail.failed(now, random),
                        Outcome::Silent => {}
                    }
                }
                let was_up = matches!(rail.state(), RailState::Up { .. });
                let must_be_up = at_ms >= up_by_ms;
                prop_assert!(was_up || !must_be_up, "{:?} at {} ms, good from {}", rail, at_ms, healthy_from_ms);
                if rail.try_acquire(now) {
                    let &(duration_ms, luck, _) = drawn.next().unwrap();
                    // Ends are seen at polls: rounded down, so that none is seen after PROBE_MAX.
                    let duration_ms = (duration_ms / POLL_MS * POLL_MS).max(POLL_MS);
                    let outcome = match is_good(at_ms) {
                        _ if luck == 0 && at_ms < healthy_from_ms => Outcome::Silent,
                        true => Outcome::Good,
                        false => Outcome::Bad,
                    };
                    let duration_ms = if outcome == Outcome::Silent { probe } else { duration_ms };
                    let (ends, version) = (at_ms + duration_ms, rail.state_version());
                    out.push(Attempt { ends, outcome, version, probe: !was_up });
                }
                let probes = out.iter().filter(|one| one.probe).count();
                prop_assert!(!check_version || probes <= 1, "{} probes at {} ms", probes, at_ms);
            }
        }

        #[test]
        fn chosen_rail_is_usable_and_cheapest(
            rails in vec((any::<bool>(), 0u64..4 * MIB, proptest::option::of(0u32..3)), 0..16),
            numa in proptest::option::of(0u32..3),
            turn: u64,
        ) {
            let listed: Vec<RailCandidate> = (0..)
                .zip(rails)
                .map(|(rail, (usable, in_flight_bytes, numa))| {
                    RailCandidate { rail, usable, in_flight_bytes, numa }
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

        /// Rails that complete nothing differ by one transfer at most; idle rails by one turn.
        #[test]
        fn equal_rails_share_load_evenly(
            count in 1usize..=16,
            sizes in vec(1u64..8 * MIB, 1..200),
            first_turn in 0u64..1 << 60,
        ) {
            let mut rails: Vec<RailCandidate> = (0..count)
                .map(|rail| RailCandidate { rail, usable: true, in_flight_bytes: 0, numa: Some(0) })
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
