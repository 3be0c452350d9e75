//! What all engines' cases share: the shape of a case, callers on threads, and the lines that say how it went.

use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use moontide_meta::Rng;
use moontide_transfer::sample::SampleConfig;
use moontide_transfer::{Direction, Link, Op, Target, run as run_ops};
use moontide_types::bounds::PAGE_BYTES;
use moontide_types::record::DigestContext;

use super::super::figures::{BenchError, Line, Percentiles, cpu_time, median, spread};
use super::owner::{OwnerProcess, wrong};

/// Memory of this process that transfers fill or come from, of all callers together: more than the caches of a core,
/// and the same for every number of callers.
const ARENA_BYTES: usize = 256 << 20;

/// How long a transfer, or a connection, may take: only what is broken takes that long.
pub(super) const PATIENCE: Duration = Duration::from_secs(10);

/// Most callers of a case.
pub(super) const CALLERS_MAX: usize = 4;

/// One case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Shape {
    pub(super) engine: &'static str,
    pub(super) direction: Direction,
    pub(super) bytes: u64,
    pub(super) connections: usize,
    pub(super) callers: usize,
    pub(super) digests: bool,
}

impl Shape {
    /// Pages of a transfer.
    pub(super) fn pages(&self) -> usize {
        self.bytes.div_ceil(PAGE_BYTES) as usize
    }

    fn line(&self, case: &str) -> Line {
        Line::new("transfer", case)
            .with("engine", self.engine)
            .with("direction", self.direction.name())
            .with("bytes", self.bytes)
            .with("connections", self.connections)
            .with("callers", self.callers)
            .with("digests", self.digests)
    }
}

/// A record as both sides name it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Known {
    pub(super) record: u32,
    pub(super) target: Target,
    pub(super) context: DigestContext,
}

/// What is measured with: an owner's records, and memory of this process.
#[derive(Debug)]
pub(super) struct World {
    pub(super) config: SampleConfig,
    pub(super) owner: OwnerProcess,
    /// Made before the clock runs, as a client has them from a master's answer.
    known: Vec<Known>,
    arena: Vec<u8>,
    seed: u64,
}

impl World {
    /// Starts an owner of these records.
    pub(super) fn new(config: SampleConfig, seed: u64) -> Result<World, BenchError> {
        let owner = OwnerProcess::start(&config)?;
        let known = (0..config.records())
            .map(|record| {
                let (target, context) = (config.target(record), config.digest_context(record));
                Known { record, target, context }
            })
            .collect();
        // What is put is as varied as what is got.
        let mut rng = Rng::new(seed);
        let len = ARENA_BYTES.max(2 * CALLERS_MAX * config.record_bytes as usize);
        let mut arena = Vec::with_capacity(len + 8);
        while arena.len() < len {
            arena.extend_from_slice(&rng.next_u64().to_le_bytes());
        }
        arena.truncate(len);
        Ok(World { config, owner, known, arena, seed })
    }

    /// For each of so many threads: its records, in the order of a repeat, and its memory. No two have a record in
    /// common, since two writers of one record would wait for each other.
    pub(super) fn split(
        &mut self,
        direction: Direction,
        threads: usize,
        repeat: u64,
    ) -> Vec<(Order<'_>, &mut [u8])> {
        let known = known_for(&self.known, &self.config, direction);
        let share = known.len() / threads;
        let orders = known.chunks(share).take(threads).enumerate().map(|(thread, known)| Order {
            known,
            rng: Rng::new(self.seed ^ (repeat << 32) ^ ((thread as u64) << 24)),
        });
        let len = self.arena.len() / threads;
        orders.zip(self.arena.chunks_mut(len)).collect()
    }

    /// For each of so many threads that move parts of the same transfers: the records, in the same order, and its
    /// memory.
    pub(super) fn split_parts(
        &mut self,
        direction: Direction,
        parts: usize,
        repeat: u64,
    ) -> Vec<(Order<'_>, &mut [u8])> {
        let known = known_for(&self.known, &self.config, direction);
        let len = self.arena.len() / parts;
        let seed = self.seed ^ (repeat << 32);
        self.arena
            .chunks_mut(len)
            .take(parts)
            .map(|memory| (Order { known, rng: Rng::new(seed) }, memory))
            .collect()
    }

    /// All records that can be moved this way, and the memory.
    pub(super) fn all(&mut self, direction: Direction) -> (&[Known], &mut [u8]) {
        (known_for(&self.known, &self.config, direction), &mut self.arena)
    }

    /// Processor time of both processes so far.
    fn cpu(&self) -> Result<Duration, BenchError> {
        Ok(cpu_time(std::process::id())? + cpu_time(self.owner.pid())?)
    }
}

/// The records that can be moved this way.
fn known_for<'a>(known: &'a [Known], config: &SampleConfig, direction: Direction) -> &'a [Known] {
    let (readable, writable) = known.split_at(config.readable as usize);
    match direction {
        Direction::Get => readable,
        Direction::Put => writable,
    }
}

/// Chooses records.
#[derive(Debug)]
pub(super) struct Order<'a> {
    known: &'a [Known],
    rng: Rng,
}

impl<'a> Order<'a> {
    /// The next record, and the piece of memory that goes with it.
    pub(super) fn next<'m>(&mut self, memory: &'m mut [u8], bytes: usize) -> (&'a Known, &'m mut [u8]) {
        let known = &self.known[self.rng.below(self.known.len())];
        let place = self.rng.below(memory.len() / bytes);
        (known, &mut memory[place * bytes..][..bytes])
    }
}

/// One transfer by us.
pub(super) fn move_ours(
    link: &dyn Link,
    shape: &Shape,
    known: &Known,
    memory: &mut [u8],
    digests: &mut [u64],
) -> Result<(), BenchError> {
    let op = match shape.direction {
        Direction::Get => Op::get(known.target, 0, memory),
        Direction::Put => Op::put(known.target, 0, memory),
    };
    let op = if shape.digests { op.digested(known.context, digests).map_err(wrong)? } else { op };
    let mut ops = [op];
    run_ops(link, &mut ops, Instant::now() + PATIENCE).map_err(wrong)?;
    match ops[0].outcome() {
        Some(Ok(())) => Ok(()),
        Some(Err(code)) => Err(wrong(format!("record {}: {code:?}", known.record))),
        None => Err(wrong(format!("record {}: no outcome", known.record))),
    }
}

/// Whether these are the digests of what is in a record.
pub(super) fn digests_match(known: &Known, content: &[u8], digests: &[u64]) -> bool {
    let pages = content.chunks(PAGE_BYTES as usize).enumerate();
    pages.map(|(index, page)| known.context.page(index as u64, page)).eq(digests.iter().copied())
}

/// The bytes are not what they should be.
pub(super) fn different(shape: &Shape, side: Side, known: &Known) -> BenchError {
    wrong(format!("{shape:?}, {side:?}: record {} does not hold what it should", known.record))
}

/// One measurement.
#[derive(Debug, Default)]
pub(in super::super) struct Run {
    pub(in super::super) bytes_per_s: f64,
    bytes: u64,
    pub(in super::super) nanos: Vec<u32>,
    cpu: Duration,
    /// Frames that were sent again because a connection broke: there should be none.
    pub(super) resubmitted: u64,
    /// Connections that broke: there should be none.
    pub(super) connections_lost: u64,
}

impl Run {
    /// What one thread did.
    fn add(&mut self, bytes: u64, took: Duration, mut nanos: Vec<u32>) {
        // Threads end with their last transfer, not all at once: each has its own time.
        self.bytes_per_s += bytes as f64 / took.as_secs_f64();
        self.bytes += bytes;
        self.nanos.append(&mut nanos);
    }
}

/// Lets every mover move again and again, each on its own thread, until the time is over.
pub(in super::super) fn timed<M>(movers: Vec<M>, span: Duration, bytes: u64) -> Result<Run, BenchError>
where
    M: FnMut() -> Result<(), BenchError> + Send,
{
    let together = Barrier::new(movers.len());
    let threads = std::thread::scope(|scope| {
        let threads: Vec<_> = movers
            .into_iter()
            .map(|mut mover| {
                let together = &together;
                scope.spawn(move || {
                    let mut nanos = Vec::with_capacity(4096);
                    together.wait();
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

/// As [`timed`], but all movers move parts of the same transfer, and nobody begins the next before all are done.
pub(super) fn timed_in_parts<M>(movers: Vec<M>, span: Duration, bytes: u64) -> Result<Run, BenchError>
where
    M: FnMut() -> Result<(), BenchError> + Send,
{
    let together = Barrier::new(movers.len());
    // The first thread says one round ahead which is the last: everybody has seen it when the barrier opens.
    let rounds = AtomicU64::new(u64::MAX);
    let failed = AtomicBool::new(false);
    let threads = std::thread::scope(|scope| {
        let threads: Vec<_> = movers
            .into_iter()
            .enumerate()
            .map(|(index, mut mover)| {
                let (together, rounds, failed) = (&together, &rounds, &failed);
                scope.spawn(move || {
                    let mut nanos = Vec::with_capacity(4096);
                    let mut outcome = Ok(());
                    together.wait();
                    let start = Instant::now();
                    let mut last = start;
                    for round in 0.. {
                        if index == 0 && (last - start >= span || failed.load(Ordering::Relaxed)) {
                            rounds.store(round, Ordering::Relaxed);
                        }
                        together.wait();
                        let now = Instant::now();
                        if round > 0 {
                            nanos.push((now - last).as_nanos().min(u32::MAX.into()) as u32);
                        }
                        last = now;
                        if rounds.load(Ordering::Relaxed) <= round {
                            break;
                        }
                        // A thread that failed keeps step, so that nobody waits for it.
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
        // The first thread's rounds are everybody's.
        if run.bytes == 0 {
            run.add(bytes * nanos.len() as u64, took, nanos);
        }
    }
    Ok(run)
}

/// Measurements of one case: ours and the bare limit's, pair by pair.
#[derive(Debug)]
pub(super) struct Pairs {
    pub(super) shape: Shape,
    ours: Vec<Run>,
    bare: Vec<Run>,
}

/// How a case is measured: [`Pairs::turn`] calls it for ours and for the bare limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Side {
    Ours,
    Bare,
}

impl Pairs {
    pub(super) fn new(shape: Shape) -> Pairs {
        Pairs { shape, ours: Vec::new(), bare: Vec::new() }
    }

    /// Measures both sides, and the other one first the next time.
    pub(super) fn turn(
        &mut self,
        world: &mut World,
        repeat: u64,
        mut measure: impl FnMut(&mut World, Side) -> Result<Run, BenchError>,
    ) -> Result<(), BenchError> {
        let order =
            if repeat.is_multiple_of(2) { [Side::Ours, Side::Bare] } else { [Side::Bare, Side::Ours] };
        for side in order {
            let before = world.cpu()?;
            let mut run = measure(world, side)?;
            run.cpu = world.cpu()?.saturating_sub(before);
            match side {
                Side::Ours => self.ours.push(run),
                Side::Bare => self.bare.push(run),
            }
        }
        Ok(())
    }

    /// Prints the case.
    pub(super) fn print(&self, target: Option<f64>, tally: &mut Tally) {
        let rates = |runs: &[Run]| median(runs.iter().map(|run| run.bytes_per_s / 1e9).collect());
        let cpu = |runs: &[Run]| {
            let seconds: f64 = runs.iter().map(|run| run.cpu.as_secs_f64()).sum();
            seconds / (runs.iter().map(|run| run.bytes).sum::<u64>().max(1) as f64 / 1e9)
        };
        let took = |runs: &[Run]| Percentiles::new(runs.iter().flat_map(|run| run.nanos.clone()).collect());
        let pairs = self.ours.iter().zip(&self.bare);
        let ratios: Vec<f64> = pairs.map(|(ours, bare)| ours.bytes_per_s / bare.bytes_per_s).collect();
        let (ours, bare) = (took(&self.ours), took(&self.bare));
        let line = self
            .shape
            .line(self.shape.direction.name())
            .number("gb_per_s", rates(&self.ours))
            .number("bare_gb_per_s", rates(&self.bare));
        tally
            .judge(line, "ratio", &ratios, target)
            .number("p50_us", ours.micros(0.5))
            .number("bare_p50_us", bare.micros(0.5))
            .number("p99_us", ours.micros(0.99))
            .number("bare_p99_us", bare.micros(0.99))
            .number("max_us", ours.micros(1.0))
            .number("bare_max_us", bare.micros(1.0))
            .number("cpu_s_per_gb", cpu(&self.ours))
            .number("bare_cpu_s_per_gb", cpu(&self.bare))
            .with("connections_lost", self.ours.iter().map(|run| run.connections_lost).sum::<u64>())
            .with("resubmitted", self.ours.iter().map(|run| run.resubmitted).sum::<u64>())
            .print();
    }

    /// Prints what this case moves over what another one does, ours only, pair by pair.
    pub(super) fn print_over(&self, other: &Pairs, case: &str, target: f64, tally: &mut Tally) {
        let pairs = self.ours.iter().zip(&other.ours);
        let ratios: Vec<f64> = pairs.map(|(this, other)| this.bytes_per_s / other.bytes_per_s).collect();
        let pairs = self.bare.iter().zip(&other.bare);
        let bare = pairs.map(|(this, other)| this.bytes_per_s / other.bytes_per_s).collect();
        let line = self.shape.line(case);
        tally.judge(line, "ratio", &ratios, Some(target)).number("bare_ratio", median(bare)).print();
    }
}

/// How many targets there were, and how many were met.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Tally {
    pub(super) targets: u32,
    pub(super) met: u32,
}

impl Tally {
    fn judge(&mut self, line: Line, name: &str, ratios: &[f64], target: Option<f64>) -> Line {
        let ratio = median(ratios.to_vec());
        let line = match target {
            Some(target) => {
                self.targets += 1;
                self.met += u32::from(ratio >= target);
                line.against(name, ratio, target, true)
            }
            None => line.number(name, ratio),
        };
        line.number(&format!("{name}_spread"), spread(ratios))
    }
}
