//! [`Campaign`]: many seeds, on several threads, one seed each at a time, until all are done or one breaks a promise.

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::faults::{FaultCounts, FaultKind};
use crate::oracle::Tally;
use crate::plan::Plan;
use crate::world::{Summary, Violation, run};

/// Seeds that took longest, as many as are told.
const SLOWEST: usize = 5;

/// Which seeds, and how.
#[derive(Clone, Copy, Debug)]
pub struct Campaign {
    /// The first seed.
    pub first: u64,
    /// How many.
    pub seeds: u64,
    /// Virtual time of each until everything is mended.
    pub length: Duration,
    /// Threads.
    pub threads: usize,
}

/// What came of it so far.
#[derive(Debug, Default)]
struct Results {
    done: u64,
    tally: Tally,
    faults: FaultCounts,
    events: u64,
    virtual_time: Duration,
    proved_after_max: Duration,
    slowest: Vec<(Duration, u64)>,
    /// Of the lowest seed that broke one.
    violation: Option<Violation>,
}

impl Results {
    fn add(&mut self, summary: &Summary, took: Duration) {
        self.done += 1;
        self.tally.merge(&summary.tally);
        self.faults.merge(&summary.faults);
        self.events += summary.events;
        self.virtual_time += summary.virtual_time;
        self.proved_after_max = self.proved_after_max.max(summary.proved_after);
        self.slowest.push((took, summary.seed));
        self.slowest.sort_by(|one, other| other.cmp(one));
        self.slowest.truncate(SLOWEST);
    }
}

impl Campaign {
    /// Runs all seeds; `progress` is told a line now and then. The answer: a page of figures.
    pub fn run(&self, progress: &(dyn Fn(String) + Sync)) -> Result<String, Violation> {
        let begun = Instant::now();
        let (next, results) = (AtomicU64::new(0), Mutex::new(Results::default()));
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

    /// The plan of one seed.
    pub fn plan(&self, seed: u64) -> Plan {
        Plan { length: self.length, ..Plan::draw(seed) }
    }

    fn work(
        &self,
        next: &AtomicU64,
        results: &Mutex<Results>,
        begun: Instant,
        progress: &(dyn Fn(String) + Sync),
    ) {
        loop {
            // Relaxed: a number that nobody else draws.
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

    fn page(&self, results: &Results, took: Duration) -> String {
        use std::fmt::Write;
        let Tally {
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
            "gets: hits {hits} ({remembered} begun at a remembered place, {hedges} hedged, {from_disk} answered by disks), misses {misses}; failed operations \
             {failed}"
        );
        let _ = writeln!(
            page,
            "after everything was mended, all clients could put and get within {:.1} s",
            results.proved_after_max.as_secs_f64()
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
