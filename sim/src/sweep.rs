//! [`SeedSweep`]: runs many seeds on several threads until all are done or one violates a guarantee.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::faults::{FaultCounts, FaultKind};
use crate::oracle::OpTotals;
use crate::plan::RunPlan;
use crate::world::{Summary, Violation, run};

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
        self.slowest.push((took, summary.seed));
        self.slowest.sort_by(|one, other| other.cmp(one));
        self.slowest.truncate(SLOWEST);
    }
}

impl SeedSweep {
    /// Runs all seeds; calls `progress` with a status line now and then. Returns a summary.
    pub fn run(&self, progress: &(dyn Fn(String) + Sync)) -> Result<String, Violation> {
        let begun = Instant::now();
        let (next, results) = (AtomicU64::new(0), Mutex::new(SweepResults::default()));
        std::thread::scope(|scope| {
            for _ in 0..self.threads.max(1) {
                scope.spawn(|| self.work(&next, &results, begun, progress));
            }
        });
        let results = results.into_inner().unwrap_or_else(|poisoned| poisoned.into_inner());
        match results.violation {
            Some(violation) => Err(violation),
            None => Ok(self.page(&results, begun.elapsed())),
        }
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
            let done = run(seed, &plan, false);
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
            "{} seeds from {}, {ops} operations, {} events, {hours:.1} virtual hours in {:.1} s",
            results.done,
            self.first,
            results.events,
            took.as_secs_f64()
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
        let slowest = results.slowest.iter().map(|(took, seed)| format!("{seed} ({} ms)", took.as_millis()));
        let _ = writeln!(page, "slowest seeds: {}", slowest.collect::<Vec<_>>().join(", "));
        page
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(|poisoned| poisoned.into_inner())
}
