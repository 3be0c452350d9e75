//! Ours and the bare limit in turns: a ratio is of two neighbours in time.

use super::super::figures::{BenchError, Line, Percentiles, median, spread};
use super::super::transfer::Run;

/// Runs of one side.
#[derive(Debug, Default)]
pub(super) struct Runs(Vec<Run>);

impl Runs {
    fn rates(&self) -> Vec<f64> {
        self.0.iter().map(|run| run.bytes_per_s).collect()
    }

    /// The middle of its rates, in bytes per second.
    pub(super) fn rate(&self) -> f64 {
        median(self.rates())
    }

    /// How long one took.
    pub(super) fn took(&self) -> Percentiles {
        Percentiles::new(self.0.iter().flat_map(|run| run.nanos.clone()).collect())
    }

    /// The ratios to another side, pair by pair.
    pub(super) fn over(&self, other: &Runs) -> Vec<f64> {
        self.rates().iter().zip(other.rates()).map(|(ours, bare)| ours / bare).collect()
    }
}

/// Lets sides take turns, each time in another order.
pub(super) fn take_turns<const SIDES: usize>(
    repeats: u64,
    mut side: impl FnMut(usize, u64) -> Result<Run, BenchError>,
) -> Result<[Runs; SIDES], BenchError> {
    let mut runs: [Runs; SIDES] = std::array::from_fn(|_| Runs::default());
    for repeat in 0..repeats {
        for turn in 0..SIDES {
            let which = (turn + repeat as usize) % SIDES;
            let run = side(which, repeat)?;
            runs[which].0.push(run);
        }
    }
    Ok(runs)
}

/// Adds ours and the bare side, and how they compare, to a line.
pub(super) fn compared(line: Line, ours: &Runs, bare: &Runs, target: Option<f64>) -> Line {
    let ratios = ours.over(bare);
    let (took, bare_took) = (ours.took(), bare.took());
    let line = line.number("gb_per_s", ours.rate() / 1e9).number("bare_gb_per_s", bare.rate() / 1e9);
    let line = match target {
        Some(target) => line.against("ratio", median(ratios.clone()), target, true),
        None => line.number("ratio", median(ratios.clone())),
    };
    percentiles(line.number("ratio_spread", spread(&ratios)), &took)
        .number("bare_p50_us", bare_took.micros(0.5))
}

/// Adds how long one took.
pub(super) fn percentiles(line: Line, took: &Percentiles) -> Line {
    line.number("p50_us", took.micros(0.5))
        .number("p90_us", took.micros(0.9))
        .number("p99_us", took.micros(0.99))
        .number("p999_us", took.micros(0.999))
}
