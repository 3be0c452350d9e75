//! Common code of all engines: parameters of a case, records and memory for it, results.

use std::time::{Duration, Instant};

use moontide_rt::SplitMix64;
use moontide_transfer::sample::SampleNodeConfig;
use moontide_transfer::{Direction, Link, Op, Target, run as run_ops};
use moontide_types::limits::PAGE_BYTES;
use moontide_types::record::DigestContext;

use super::owner::OwnerProcess;
use crate::measure::{Percentiles, Run, median, relative_range};
use crate::process::cpu_time;
use crate::results::{BenchError, ResultRow, wrong};

/// Local memory of the transfers of all callers barrier: larger than the caches of a core, and the same for every
/// number of callers.
const ARENA_BYTES: usize = 256 << 20;

/// Timeout of a transfer and of a connect; only failures take that long.
pub(super) const TRANSFER_TIMEOUT: Duration = Duration::from_secs(10);

/// Maximum number of callers of a case.
pub(super) const CALLERS_MAX: usize = 4;

/// Parameters of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TransferCase {
    pub(super) engine: &'static str,
    pub(super) direction: Direction,
    pub(super) bytes: u64,
    pub(super) connections: usize,
    pub(super) callers: usize,
    pub(super) digests: bool,
}

impl TransferCase {
    /// Number of pages of a transfer.
    pub(super) fn pages(&self) -> usize {
        self.bytes.div_ceil(PAGE_BYTES) as usize
    }

    fn line(&self, case: &str) -> ResultRow {
        ResultRow::new("transfer", case)
            .with("engine", self.engine)
            .with("direction", self.direction.name())
            .with("bytes", self.bytes)
            .with("connections", self.connections)
            .with("callers", self.callers)
            .with("digests", self.digests)
    }
}

/// A record: its index in the sample node, its target, and its digest context.
#[derive(Clone, Copy, Debug)]
pub(super) struct SampleRecord {
    pub(super) record: u32,
    pub(super) target: Target,
    pub(super) context: DigestContext,
}

/// An owner process with records, and local memory.
#[derive(Debug)]
pub(super) struct TransferFixture {
    pub(super) config: SampleNodeConfig,
    pub(super) owner: OwnerProcess,
    /// Computed before the measurement; a client gets them from the response of a master.
    records: Vec<SampleRecord>,
    arena: Vec<u8>,
    seed: u64,
}

impl TransferFixture {
    /// Starts an owner process with the records of `config`.
    pub(super) fn new(config: SampleNodeConfig, seed: u64) -> Result<TransferFixture, BenchError> {
        let owner = OwnerProcess::start(&config)?;
        let records = (0..config.records())
            .map(|record| {
                let (target, context) = (config.target(record), config.digest_context(record));
                SampleRecord { record, target, context }
            })
            .collect();
        // Puts send random bytes, as gets receive them.
        let mut rng = SplitMix64::new(seed);
        let len = ARENA_BYTES.max(2 * CALLERS_MAX * config.record_bytes as usize);
        let mut arena = Vec::with_capacity(len + 8);
        while arena.len() < len {
            arena.extend_from_slice(&rng.next_u64().to_le_bytes());
        }
        arena.truncate(len);
        Ok(TransferFixture { config, owner, records, arena, seed })
    }

    /// Returns, for each of `threads` threads, its records in the order of a repeat and its memory. The threads have
    /// disjoint records, because two writers of one record would wait for each other.
    pub(super) fn split(
        &mut self,
        direction: Direction,
        threads: usize,
        repeat: u64,
    ) -> Vec<(RecordOrder<'_>, &mut [u8])> {
        let records = records_for(&self.records, &self.config, direction);
        let share = records.len() / threads;
        let orders = records.chunks(share).take(threads).enumerate().map(|(thread, records)| RecordOrder {
            records,
            rng: SplitMix64::new(self.seed ^ (repeat << 32) ^ ((thread as u64) << 24)),
        });
        let len = self.arena.len() / threads;
        orders.zip(self.arena.chunks_mut(len)).collect()
    }

    /// Returns, for each of `parts` threads that transfer parts of the same records, the records in the same order and
    /// its memory.
    pub(super) fn split_parts(
        &mut self,
        direction: Direction,
        parts: usize,
        repeat: u64,
    ) -> Vec<(RecordOrder<'_>, &mut [u8])> {
        let records = records_for(&self.records, &self.config, direction);
        let len = self.arena.len() / parts;
        let seed = self.seed ^ (repeat << 32);
        self.arena
            .chunks_mut(len)
            .take(parts)
            .map(|memory| (RecordOrder { records, rng: SplitMix64::new(seed) }, memory))
            .collect()
    }

    /// Returns all records for a direction, and the memory.
    pub(super) fn all(&mut self, direction: Direction) -> (&[SampleRecord], &mut [u8]) {
        (records_for(&self.records, &self.config, direction), &mut self.arena)
    }

    /// CPU time of both processes so far.
    fn cpu(&self) -> Result<Duration, BenchError> {
        Ok(cpu_time(std::process::id())? + cpu_time(self.owner.pid())?)
    }
}

/// Returns the records for a direction.
fn records_for<'a>(
    records: &'a [SampleRecord],
    config: &SampleNodeConfig,
    direction: Direction,
) -> &'a [SampleRecord] {
    let (readable, writable) = records.split_at(config.readable as usize);
    match direction {
        Direction::Get => readable,
        Direction::Put => writable,
    }
}

/// Random sequence of records.
#[derive(Debug)]
pub(super) struct RecordOrder<'a> {
    records: &'a [SampleRecord],
    rng: SplitMix64,
}

impl<'a> RecordOrder<'a> {
    /// Returns the next record and the part of the memory for it.
    pub(super) fn next<'m>(
        &mut self,
        memory: &'m mut [u8],
        bytes: usize,
    ) -> (&'a SampleRecord, &'m mut [u8]) {
        let record = &self.records[self.rng.index(self.records.len())];
        let index = self.rng.index(memory.len() / bytes);
        (record, &mut memory[index * bytes..][..bytes])
    }
}

/// Runs one transfer with the engine.
pub(super) fn transfer(
    link: &dyn Link,
    case: &TransferCase,
    record: &SampleRecord,
    memory: &mut [u8],
    digests: &mut [u64],
) -> Result<(), BenchError> {
    let op = match case.direction {
        Direction::Get => Op::get(record.target, 0, memory),
        Direction::Put => Op::put(record.target, 0, memory),
    };
    let op = if case.digests { op.digested(record.context, digests).map_err(wrong)? } else { op };
    let mut ops = [op];
    run_ops(link, &mut ops, Instant::now() + TRANSFER_TIMEOUT).map_err(wrong)?;
    match ops[0].outcome() {
        Some(Ok(())) => Ok(()),
        Some(Err(code)) => Err(wrong(format!("record {}: {code:?}", record.record))),
        None => Err(wrong(format!("record {}: no outcome", record.record))),
    }
}

/// Returns true if `digests` are the page digests of `content`.
pub(super) fn digests_match(record: &SampleRecord, content: &[u8], digests: &[u64]) -> bool {
    let pages = content.chunks(PAGE_BYTES as usize).enumerate();
    pages.map(|(index, page)| record.context.page(index as u64, page)).eq(digests.iter().copied())
}

/// Error for a record with wrong content.
pub(super) fn different(case: &TransferCase, side: BenchSide, record: &SampleRecord) -> BenchError {
    wrong(format!("{case:?}, {side:?}: record {} has wrong content", record.record))
}

/// Measurements of one case: pairs of engine and baseline.
#[derive(Debug)]
pub(super) struct PairedRuns {
    pub(super) case: TransferCase,
    engine: Vec<Run>,
    baseline: Vec<Run>,
}

/// Side of a measurement; [`PairedRuns::turn`] measures both.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BenchSide {
    Engine,
    Baseline,
}

impl PairedRuns {
    pub(super) fn new(case: TransferCase) -> PairedRuns {
        PairedRuns { case, engine: Vec::new(), baseline: Vec::new() }
    }

    /// Measures both sides, in an order that alternates with `repeat`.
    pub(super) fn turn(
        &mut self,
        fixture: &mut TransferFixture,
        repeat: u64,
        mut measure: impl FnMut(&mut TransferFixture, BenchSide) -> Result<Run, BenchError>,
    ) -> Result<(), BenchError> {
        let order = if repeat.is_multiple_of(2) {
            [BenchSide::Engine, BenchSide::Baseline]
        } else {
            [BenchSide::Baseline, BenchSide::Engine]
        };
        for side in order {
            let before = fixture.cpu()?;
            let mut run = measure(fixture, side)?;
            run.cpu = fixture.cpu()?.saturating_sub(before);
            match side {
                BenchSide::Engine => self.engine.push(run),
                BenchSide::Baseline => self.baseline.push(run),
            }
        }
        Ok(())
    }

    /// Prints the result of the case.
    pub(super) fn print(&self, target: Option<f64>, tally: &mut Tally) {
        let rates = |runs: &[Run]| median(runs.iter().map(|run| run.bytes_per_s / 1e9).collect());
        let cpu = |runs: &[Run]| {
            let seconds: f64 = runs.iter().map(|run| run.cpu.as_secs_f64()).sum();
            seconds / (runs.iter().map(|run| run.bytes).sum::<u64>().max(1) as f64 / 1e9)
        };
        let took = |runs: &[Run]| Percentiles::new(runs.iter().flat_map(|run| run.nanos.clone()).collect());
        let pairs = self.engine.iter().zip(&self.baseline);
        let ratios: Vec<f64> =
            pairs.map(|(engine, baseline)| engine.bytes_per_s / baseline.bytes_per_s).collect();
        let (engine, baseline) = (took(&self.engine), took(&self.baseline));
        let line = self
            .case
            .line(self.case.direction.name())
            .number("gb_per_s", rates(&self.engine))
            .number("baseline_gb_per_s", rates(&self.baseline));
        tally
            .judge(line, "ratio", &ratios, target)
            .number("p50_us", engine.micros(0.5))
            .number("baseline_p50_us", baseline.micros(0.5))
            .number("p99_us", engine.micros(0.99))
            .number("baseline_p99_us", baseline.micros(0.99))
            .number("max_us", engine.micros(1.0))
            .number("baseline_max_us", baseline.micros(1.0))
            .number("cpu_s_per_gb", cpu(&self.engine))
            .number("baseline_cpu_s_per_gb", cpu(&self.baseline))
            .with("connections_lost", self.engine.iter().map(|run| run.connections_lost).sum::<u64>())
            .with("resubmitted", self.engine.iter().map(|run| run.resubmitted).sum::<u64>())
            .print();
    }

    /// Prints the throughput of this case relative to another one.
    pub(super) fn print_over(&self, other: &PairedRuns, case: &str, target: f64, tally: &mut Tally) {
        let pairs = self.engine.iter().zip(&other.engine);
        let ratios: Vec<f64> = pairs.map(|(this, other)| this.bytes_per_s / other.bytes_per_s).collect();
        let pairs = self.baseline.iter().zip(&other.baseline);
        let baseline = pairs.map(|(this, other)| this.bytes_per_s / other.bytes_per_s).collect();
        let line = self.case.line(case);
        tally.judge(line, "ratio", &ratios, Some(target)).number("baseline_ratio", median(baseline)).print();
    }
}

/// Number of targets, and of those that were met.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    pub(super) targets: u32,
    pub(super) met: u32,
}

impl Tally {
    fn judge(&mut self, line: ResultRow, name: &str, ratios: &[f64], target: Option<f64>) -> ResultRow {
        let ratio = median(ratios.to_vec());
        let line = match target {
            Some(target) => {
                self.targets += 1;
                self.met += u32::from(ratio >= target);
                line.with_target(name, ratio, target, true)
            }
            None => line.number(name, ratio),
        };
        line.number(&format!("{name}_range"), relative_range(ratios))
    }
}
