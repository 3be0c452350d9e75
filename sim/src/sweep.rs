//! [`SeedSweep`]: runs many seeds on several threads until all are done or one violates a guarantee.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::coverage::COINCIDENCES;
use crate::faults::{FaultCounts, FaultKind};
use crate::oracle::OpTotals;
use crate::plan::RunPlan;
use crate::world::{Summary, Violation, run};
use moontide_types::MonoTime;

/// Of this number of seeds, one runs twice.
const RUNS_PER_REPETITION: u64 = 20;
/// Number of slowest seeds in the summary.
const SLOWEST: usize = 5;

/// Range of seeds to run.
#[derive(Clone, Copy, Debug)]
pub struct SeedSweep {
    /// First seed.
    pub first: u64,
    /// Number of seeds.
    pub seeds: u64,
    /// Virtual time of each run until the end of the faults.
    pub length: Duration,
    /// Number of threads.
    pub threads: usize,
    /// Deliberate bug to enable.
    pub mutation: Option<&'static str>,
    /// How often each of [`COINCIDENCES`] must have been reached.
    pub coverage_min: u64,
}

/// Results of the finished seeds.
#[derive(Debug, Default)]
struct SweepResults {
    done: u64,
    tally: OpTotals,
    faults: FaultCounts,
    events: u64,
    virtual_time: Duration,
    recovered_after_max: Duration,
    marks: BTreeMap<&'static str, u64>,
    slowest: Vec<(Duration, u64)>,
    /// Violation of the lowest seed that has one.
    violation: Option<Violation>,
}

impl SweepResults {
    fn add(&mut self, summary: &Summary, took: Duration) {
        self.done += 1;
        self.tally.merge(&summary.tally);
        self.faults.merge(&summary.faults);
        self.events += summary.events;
        self.virtual_time += summary.virtual_time;
        self.recovered_after_max = self.recovered_after_max.max(summary.recovered_after);
        for (name, count) in &summary.marks {
            *self.marks.entry(name).or_default() += count;
        }
        self.slowest.push((took, summary.seed));
        self.slowest.sort_by(|one, other| other.cmp(one));
        self.slowest.truncate(SLOWEST);
    }
}

/// Why a sweep has failed.
#[derive(Debug)]
pub enum SweepError {
    /// A guarantee was violated.
    Violation(Violation),
    /// Coincidences were reached too rarely, so that the sweep shows nothing about them.
    Rare {
        /// The summary.
        page: String,
        /// Their names.
        rare: Vec<&'static str>,
        /// How often each had to be reached.
        min: u64,
    },
}

impl std::fmt::Display for SweepError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            SweepError::Violation(violation) => violation.fmt(f),
            SweepError::Rare { page, rare, min } => {
                write!(f, "{page}reached less than {min} times: {}", rare.join("; "))
            }
        }
    }
}

impl std::error::Error for SweepError {}

impl SeedSweep {
    /// Runs all seeds; calls `progress` with a status line now and then. Returns a summary.
    pub fn run(&self, progress: &(dyn Fn(String) + Sync)) -> Result<String, SweepError> {
        let begun = Instant::now();
        let (next, results) = (AtomicU64::new(0), Mutex::new(SweepResults::default()));
        std::thread::scope(|scope| {
            for _ in 0..self.threads.max(1) {
                scope.spawn(|| self.work(&next, &results, begun, progress));
            }
        });
        let results = results.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
        if let Some(violation) = results.violation {
            return Err(SweepError::Violation(violation));
        }
        let page = self.page(&results, begun.elapsed());
        let count = |name: &&str| results.marks.get(*name).copied().unwrap_or(0);
        let rare = COINCIDENCES.iter().filter(|name| count(name) < self.coverage_min);
        let rare: Vec<&'static str> = rare.copied().collect();
        if rare.is_empty() { Ok(page) } else { Err(SweepError::Rare { page, rare, min: self.coverage_min }) }
    }

    /// Returns the plan of one seed.
    pub fn plan(&self, seed: u64) -> RunPlan {
        RunPlan { length: self.length, ..RunPlan::draw(seed) }
    }

    fn work(
        &self,
        next: &AtomicU64,
        results: &Mutex<SweepResults>,
        begun: Instant,
        progress: &(dyn Fn(String) + Sync),
    ) {
        loop {
            // Relaxed: only the uniqueness of the number matters.
            let at = next.fetch_add(1, Ordering::Relaxed);
            let seed = self.first.wrapping_add(at);
            if at >= self.seeds || lock(results).violation.is_some() {
                return;
            }
            let started = Instant::now();
            let plan = self.plan(seed);
            let done = run(seed, &plan, false, self.mutation).and_then(|summary| {
                if at.is_multiple_of(RUNS_PER_REPETITION) {
                    self.repeat(&plan, &summary)?;
                }
                Ok(summary)
            });
            let mut results = lock(results);
            match done {
                Ok(summary) => results.add(&summary, started.elapsed()),
                Err(found) => {
                    let lower = results.violation.as_ref().is_none_or(|known| found.seed < known.seed);
                    if lower {
                        results.violation = Some(found);
                    }
                    return;
                }
            }
            let every = (self.seeds / 20).max(1);
            if results.done.is_multiple_of(every) {
                let (done, ops) = (results.done, results.tally.ops);
                let seconds = begun.elapsed().as_secs();
                progress(format!("{done} of {} seeds, {ops} operations, {seconds} s", self.seeds));
            }
        }
    }

    /// Runs a seed again, after others and possibly on another thread: it must give the same history.
    fn repeat(&self, plan: &RunPlan, first: &Summary) -> Result<(), Violation> {
        let second = run(first.seed, plan, false, self.mutation)?;
        if second == *first {
            return Ok(());
        }
        let Summary { seed, events, trace, .. } = *first;
        let what = format!(
            "the seed gives two histories: {events} events with trace {trace:x}, and {} with {:x}",
            second.events, second.trace
        );
        Err(Violation { seed, length: plan.length, at: MonoTime(0), event: 0, what })
    }

    fn page(&self, results: &SweepResults, took: Duration) -> String {
        use std::fmt::Write;
        let OpTotals {
            ops,
            puts,
            replacements,
            existed,
            removals,
            pending,
            hits,
            misses,
            failed,
            remembered,
            hedges,
            from_disk,
        } = results.tally;
        let hours = results.virtual_time.as_secs_f64() / 3600.0;
        let mut page = String::new();
        // Writing to a string does not fail.
        let _ = writeln!(
            page,
            "{} seeds from {}, {ops} operations, {} events, {hours:.1} virtual hours in {:.1} s; {:.3} virtual hours per \
             second of a CPU, with repetitions of one seed in {RUNS_PER_REPETITION}",
            results.done,
            self.first,
            results.events,
            took.as_secs_f64(),
            hours / cpu_seconds()
        );
        let _ = writeln!(
            page,
            "puts {puts} ({replacements} replacing and checked for it), existed {existed}, removals {removals} (and {pending} \
             pending)"
        );
        let _ = writeln!(
            page,
            "gets: hits {hits} ({remembered} from a cached location, {hedges} hedged, {from_disk} from disks), misses {misses}; failed operations \
             {failed}"
        );
        let _ = writeln!(
            page,
            "after the end of the faults, all clients could put and get within {:.1} s",
            results.recovered_after_max.as_secs_f64()
        );
        for &kind in FaultKind::ALL {
            let _ = writeln!(page, "{:>10}  {}", results.faults.of(kind), kind.name());
        }
        let _ = writeln!(page, "coincidences:");
        for name in COINCIDENCES {
            let _ = writeln!(page, "{:>10}  {name}", results.marks.get(name).copied().unwrap_or(0));
        }
        let slowest = results.slowest.iter().map(|(took, seed)| format!("{seed} ({} ms)", took.as_millis()));
        let _ = writeln!(page, "slowest seeds: {}", slowest.collect::<Vec<_>>().join(", "));
        page
    }
}

/// CPU time of this process.
fn cpu_seconds() -> f64 {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
