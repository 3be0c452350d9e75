//! Measurements: timed runs of callers, runs of several sides in rotating order, and their statistics.
//!
//! A ratio compares two consecutive runs, one of each side, so that a change of the machine's speed affects both. A
//! result is the median of the ratios and their range.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use crate::results::{BenchError, ResultRow};

/// One measurement of one side.
#[derive(Debug, Default)]
pub struct Run {
    pub(crate) bytes_per_s: f64,
    pub(crate) bytes: u64,
    /// Duration of each operation.
    pub(crate) nanos: Vec<u32>,
    /// CPU time, if the caller measured it.
    pub(crate) cpu: Duration,
    /// Frames that were sent again after a connection failed; expected: 0.
    pub(crate) resubmitted: u64,
    /// Connections that failed; expected: 0.
    pub(crate) connections_lost: u64,
}

impl Run {
    /// Adds the transfers of one thread.
    fn add(&mut self, bytes: u64, took: Duration, mut nanos: Vec<u32>) {
        // Threads end at different times, each after its last transfer, so each rate uses its own duration.
        self.bytes_per_s += bytes as f64 / took.as_secs_f64();
        self.bytes += bytes;
        self.nanos.append(&mut nanos);
    }
}

/// Repeats every mover on its own thread for `span`. A mover processes `bytes` bytes per call.
pub fn timed<M>(movers: Vec<M>, span: Duration, bytes: u64) -> Result<Run, BenchError>
where
    M: FnMut() -> Result<(), BenchError> + Send,
{
    let barrier = Barrier::new(movers.len());
    let threads = std::thread::scope(|scope| {
        let threads: Vec<_> = movers
            .into_iter()
            .map(|mut mover| {
                let barrier = &barrier;
                scope.spawn(move || {
                    let mut nanos = Vec::with_capacity(4096);
                    barrier.wait();
                    let start = Instant::now();
                    let mut last = start;
                    while last - start < span {
                        mover()?;
                        let now = Instant::now();
                        nanos.push((now - last).as_nanos().min(u32::MAX.into()) as u32);
                        last = now;
                    }
                    Ok((last - start, nanos))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("movers do not panic")).collect::<Vec<_>>()
    });
    let mut run = Run::default();
    for thread in threads {
        let (took, nanos) = thread?;
        run.add(bytes * nanos.len() as u64, took, nanos);
    }
    Ok(run)
}

/// As [`timed`], but all movers transfer parts of the same record, and the next transfer starts after all have
/// finished.
pub(crate) fn timed_in_parts<M>(movers: Vec<M>, span: Duration, bytes: u64) -> Result<Run, BenchError>
where
    M: FnMut() -> Result<(), BenchError> + Send,
{
    let barrier = Barrier::new(movers.len());
    // The first thread sets the last round before the barrier, so all threads see it after the barrier.
    let rounds = AtomicU64::new(u64::MAX);
    let failed = AtomicBool::new(false);
    let threads = std::thread::scope(|scope| {
        let threads: Vec<_> = movers
            .into_iter()
            .enumerate()
            .map(|(index, mut mover)| {
                let (barrier, rounds, failed) = (&barrier, &rounds, &failed);
                scope.spawn(move || {
                    let mut nanos = Vec::with_capacity(4096);
                    let mut outcome = Ok(());
                    barrier.wait();
                    let start = Instant::now();
                    let mut last = start;
                    for round in 0.. {
                        if index == 0 && (last - start >= span || failed.load(Ordering::Relaxed)) {
                            rounds.store(round, Ordering::Relaxed);
                        }
                        barrier.wait();
                        let now = Instant::now();
                        if round > 0 {
                            nanos.push((now - last).as_nanos().min(u32::MAX.into()) as u32);
                        }
                        last = now;
                        if rounds.load(Ordering::Relaxed) <= round {
                            break;
                        }
                        // A failed thread continues with the barrier, so that the others do not wait for it.
                        if outcome.is_ok() {
                            outcome = mover();
                            failed.fetch_or(outcome.is_err(), Ordering::Relaxed);
                        }
                    }
                    outcome.map(|()| (last - start, nanos))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("movers do not panic")).collect::<Vec<_>>()
    });
    let mut run = Run::default();
    for thread in threads {
        let (took, nanos) = thread?;
        // All threads have the same rounds; those of the first thread count.
        if run.bytes == 0 {
            run.add(bytes * nanos.len() as u64, took, nanos);
        }
    }
    Ok(run)
}

/// Measurements of one side.
#[derive(Debug, Default)]
pub struct RunSeries(Vec<Run>);

impl RunSeries {
    fn rates(&self) -> Vec<f64> {
        self.0.iter().map(|run| run.bytes_per_s).collect()
    }

    /// Median rate in bytes per second.
    pub fn rate(&self) -> f64 {
        median(self.rates())
    }

    /// Percentiles of the duration of an operation.
    pub(crate) fn took(&self) -> Percentiles {
        Percentiles::new(self.0.iter().flat_map(|run| run.nanos.clone()).collect())
    }

    /// Ratios to another side, one per repeat.
    pub fn over(&self, other: &RunSeries) -> Vec<f64> {
        self.rates().iter().zip(other.rates()).map(|(ours, baseline)| ours / baseline).collect()
    }
}

/// Measures all sides in each repeat, in rotating order. `side` measures the side of the given index in a repeat.
pub fn interleave<const SIDES: usize>(
    repeats: u64,
    mut side: impl FnMut(usize, u64) -> Result<Run, BenchError>,
) -> Result<[RunSeries; SIDES], BenchError> {
    let mut runs: [RunSeries; SIDES] = std::array::from_fn(|_| RunSeries::default());
    for repeat in 0..repeats {
        for turn in 0..SIDES {
            let which = (turn + repeat as usize) % SIDES;
            let run = side(which, repeat)?;
            runs[which].0.push(run);
        }
    }
    Ok(runs)
}

/// Adds the rates of both sides, their ratio with its range, and the duration of an operation to a row. `target` is the
/// smallest ratio that meets it.
pub fn compared(line: ResultRow, ours: &RunSeries, baseline: &RunSeries, target: Option<f64>) -> ResultRow {
    let ratios = ours.over(baseline);
    let (took, baseline_took) = (ours.took(), baseline.took());
    let line = line.number("gb_per_s", ours.rate() / 1e9).number("baseline_gb_per_s", baseline.rate() / 1e9);
    let line = match target {
        Some(target) => line.with_target("ratio", median(ratios.clone()), target, true),
        None => line.number("ratio", median(ratios.clone())),
    };
    percentiles(line.number("ratio_range", relative_range(&ratios)), &took)
        .number("baseline_p50_us", baseline_took.micros(0.5))
}

/// Adds percentiles of the duration of an operation to a row.
pub(crate) fn percentiles(line: ResultRow, took: &Percentiles) -> ResultRow {
    line.number("p50_us", took.micros(0.5))
        .number("p90_us", took.micros(0.9))
        .number("p99_us", took.micros(0.99))
        .number("p999_us", took.micros(0.999))
}

/// Percentiles of a sample, in microseconds.
pub(crate) struct Percentiles {
    sorted: Vec<u32>,
}

impl Percentiles {
    /// Creates percentiles from nanoseconds in any order.
    pub(crate) fn new(mut nanos: Vec<u32>) -> Percentiles {
        nanos.sort_unstable();
        Percentiles { sorted: nanos }
    }

    /// Value below which `share` of the sample is, in microseconds.
    pub(crate) fn micros(&self, share: f64) -> f64 {
        if self.sorted.is_empty() {
            return 0.0;
        }
        let at = ((self.sorted.len() - 1) as f64 * share).round() as usize;
        f64::from(self.sorted[at]) / 1000.0
    }
}

/// Median of the values; 0 if there are none.
pub(crate) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(0.0)
}

/// Relative range of the values: (largest − smallest) / median.
pub(crate) fn relative_range(values: &[f64]) -> f64 {
    let largest = values.iter().copied().fold(f64::MIN, f64::max);
    let smallest = values.iter().copied().fold(f64::MAX, f64::min);
    let middle = median(values.to_vec());
    if middle > 0.0 { (largest - smallest) / middle } else { 0.0 }
}
