//! `moontide bench disk`: throughput of a disk tier, compared with `fio`.
//!
//! | file | content |
//! |---|---|
//! | `tier` | the disk tier: a backend, its records, reads with verification |
//! | `fio` | the limit: `fio` with the same sizes and bytes in flight |
//! | `baseline` | the limit without `fio`: the same I/O engine without records |
//!
//! The tier ("ours") and the limit alternate, round by round, on the same file system. A ratio compares two consecutive
//! measurements; the result is the median of the ratios and their range. The tier counts payload only: other bytes that
//! it reads and writes are part of its cost.

mod baseline;
mod fio;
mod tier;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Args as ClapArgs;
use moontide_disk::{BackendKind, IoEngine, OsStorage, Storage};
use moontide_settings::parse_size;

use crate::arguments::{format_bytes, seconds, transfer_bytes};
use crate::measure::{median, relative_range};
use crate::results::{BenchError, ResultRow, check_gates, io};
use crate::scratch::Scratch;
use baseline::BaselineLoop;
use fio::Fio;
use tier::{Case, Tier};

pub(super) const EXAMPLES: &str = "\
Examples:
  moontide bench disk --dir /mnt/ssd                       a few minutes, 5 GiB of disk space
  moontide bench disk --dir /mnt/ssd --size 256MiB --rounds 3 --seconds 0.3
      quick, less precise
  moontide bench disk --dir /mnt/ssd --records 1M --depths 32 --backend offset --json

Writes records to a new tier, in batches of 64 MiB with syncs, and reads them at random with direct I/O: lookup, read,
verification. For comparison `fio` (a package of your distribution, e.g. `apt install fio`) writes blocks of 1 MiB with
an fdatasync after each 64 MiB, and reads blocks of the record size at random: ioengine=io_uring, direct=1, norandommap.
Depth d means d records in flight: the tier has as many bytes in flight as fio, in pieces of 256 KiB; at depth 1 it gets
one record at a time, else 16 d (or as many as fit into --memory), with a queue of that depth. Without `fio` the limit
is a loop with the same I/O engine, without records and verification.

fio reuses d blocks of memory, which may stay in the CPU cache; the tier reads into as many records as it gets, like a
node. On a disk faster than that difference use --against loop, which reads into as much memory as the tier, or a small
--memory to measure the cost of records.

  limit, ours   10^9 bytes of payload per second, median of the rounds; ours is the tier
  ratio         median of ours / limit over the rounds
  ±             (largest - smallest) / median over the rounds
  cpu           CPU time of the tier / elapsed time: 100% is one core
--json prints one object per line instead; the target of the ratio is 0.9.";

/// Target of the ratio.
const RATIO_TARGET: f64 = 0.9;
/// Bytes that the tier and the limit write between two syncs: the batch of a node.
const BATCH_BYTES: u64 = 64 << 20;

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// Directory of the files; a new subdirectory is removed at the end [default: $TMPDIR, or the working directory]
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Disk layout: bucket, file or offset
    #[arg(long, value_name = "NAME", default_value_t = BackendKind::Bucket)]
    backend: BackendKind,
    /// Disk I/O engine: auto, uring or posix
    #[arg(long, value_name = "NAME", default_value_t = IoEngine::Auto)]
    engine: IoEngine,
    /// Bytes of records, and as many for the limit; should exceed the cache of the disk
    #[arg(long, value_parser = parse_size, default_value = "2GiB")]
    size: u64,
    /// Record sizes
    #[arg(long, value_delimiter = ',', value_parser = transfer_bytes, default_value = "1M,256K")]
    records: Vec<u64>,
    /// Records in flight
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=128), default_value = "1,8,32")]
    depths: Vec<u16>,
    /// Memory into which the tier reads at depths above 1; at least two records per record in flight
    #[arg(long, value_name = "SIZE", value_parser = memory, default_value = "256MiB")]
    memory: u64,
    /// Rounds of tier and limit
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1000), default_value_t = 5)]
    rounds: u16,
    /// Duration of one measurement of reads in seconds
    #[arg(long, value_parser = seconds, default_value = "1")]
    seconds: f64,
    /// Limit to compare with [default: fio if installed]
    #[arg(long, value_enum)]
    against: Option<Baseline>,
    /// Seed of the order of records
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print JSON, one object per line
    #[arg(long)]
    json: bool,
    /// Fail if a result misses its target by more than a factor of two
    #[arg(long)]
    gate: bool,
}

/// Kind of limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Baseline {
    /// The program `fio`.
    Fio,
    /// The same I/O engine without records.
    Loop,
}

/// Throughput and CPU use of one measurement.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Measurement {
    bytes_per_s: f64,
    /// CPU time / elapsed time.
    cpu: f64,
}

impl Measurement {
    fn new(bytes: u64, took: Duration, cpu: Duration) -> Measurement {
        let took = took.as_secs_f64().max(1e-9);
        Measurement { bytes_per_s: bytes as f64 / took, cpu: cpu.as_secs_f64() / took }
    }
}

/// The limit to compare with.
enum BaselineRun {
    Fio(Fio),
    Loop(BaselineLoop),
}

impl BaselineRun {
    fn name(&self) -> &'static str {
        match self {
            BaselineRun::Fio(_) => "fio",
            BaselineRun::Loop(_) => "loop",
        }
    }

    /// Writes a new file sequentially.
    fn write(&mut self, bytes: u64) -> Result<Measurement, BenchError> {
        match self {
            BaselineRun::Fio(fio) => fio.write(bytes),
            BaselineRun::Loop(baseline) => baseline.write(bytes),
        }
    }

    /// Reads random blocks of the written files.
    fn read(&mut self, case: &Case, round: u64) -> Result<Measurement, BenchError> {
        match self {
            BaselineRun::Fio(fio) => fio.read(case),
            BaselineRun::Loop(baseline) => baseline.read(case, round),
        }
    }
}

fn memory(text: &str) -> Result<u64, String> {
    let bytes = parse_size(text)?;
    if bytes <= 1 << 40 { Ok(bytes) } else { Err("must be at most 1 TiB".into()) }
}

/// Runs the cases.
pub(super) fn run(args: &Args) -> Result<(), BenchError> {
    let parent = args.dir.clone().or_else(|| std::env::var_os("TMPDIR").map(PathBuf::from));
    let parent = parent.unwrap_or_else(|| PathBuf::from("."));
    let scratch =
        Scratch::new(&parent, "moontide-bench-disk").map_err(io("creating a directory; see --dir"))?;
    let storage = OsStorage::open(scratch.path(), args.engine).map_err(io("opening the directory"))?;
    let free = storage.space().map_err(io("reading the free space"))?.free;
    let needed = Tier::limit_bytes(args.size).saturating_add(args.size);
    if free < needed {
        let (needed, free) = (format_bytes(needed), format_bytes(free));
        let what =
            format!("needs {needed} of disk space, {free} are free; use a smaller --size or another --dir");
        return Err(BenchError::Wrong(what));
    }
    let has_fio = fio::is_installed();
    let against = args.against.unwrap_or(if has_fio { Baseline::Fio } else { Baseline::Loop });
    if !has_fio {
        eprintln!(
            "fio is not installed; install it (`apt install fio`, `dnf install fio`) to compare with it"
        );
        eprintln!("using a loop with the same I/O engine as the limit, without records and verification");
        if args.against == Some(Baseline::Fio) {
            return Err(BenchError::Wrong("cannot start fio; see `moontide bench disk --help`".into()));
        }
    }
    let mut report = Report { json: args.json, engine: storage.engine(), has_head: false };
    for &record_bytes in &args.records {
        measure(args, scratch.path(), record_bytes, against, &mut report)?;
    }
    if args.gate { check_gates() } else { Ok(()) }
}

/// Measures the cases of one record size, with separate files.
fn measure(
    args: &Args,
    dir: &Path,
    record_bytes: u64,
    against: Baseline,
    report: &mut Report,
) -> Result<(), BenchError> {
    let dir = dir.join(format!("records-{record_bytes}"));
    std::fs::create_dir(&dir).map_err(io("creating a directory"))?;
    let open = |name: &str| {
        let storage = OsStorage::open(&dir.join(name), args.engine).map_err(io("opening a directory"))?;
        Ok::<_, BenchError>(Arc::new(storage))
    };
    let storage = open("tier")?;
    let mut tier = Tier::open(Arc::clone(&storage), args.backend, args.size, record_bytes)?;
    let (engine, limit_storage) = (storage.engine(), open("limit")?);
    let mut limit = match against {
        Baseline::Fio => BaselineRun::Fio(Fio::new(&dir.join("limit"), engine, storage.is_direct())),
        Baseline::Loop => BaselineRun::Loop(BaselineLoop::new(limit_storage, args.seed)),
    };

    let rounds = u64::from(args.rounds);
    let count = args.size.div_ceil(record_bytes).div_ceil(rounds);
    let case = Case {
        record_bytes,
        depth: 1,
        memory_bytes: args.memory,
        span: Duration::from_secs_f64(args.seconds),
        seed: args.seed,
    };
    let write = |round: u64, ours: bool, tier: &mut Tier, limit: &mut BaselineRun| match ours {
        true => tier.write(round * count, count, record_bytes),
        false => limit.write(count * record_bytes),
    };
    let pairs = PairedRuns::interleave(rounds, |round, ours| write(round, ours, &mut tier, &mut limit))?;
    report.print("write", args, limit.name(), &case, storage.is_direct(), None, &pairs);

    for &depth in &args.depths {
        let case = Case { depth: depth.into(), ..case };
        let mut reader = tier.reader(&case);
        let pairs = PairedRuns::interleave(rounds, |round, ours| match ours {
            true => tier.read(&mut reader, &case, round),
            false => limit.read(&case, round),
        })?;
        report.print(
            "read",
            args,
            limit.name(),
            &case,
            storage.is_direct(),
            Some(reader.is_registered()),
            &pairs,
        );
    }
    drop((tier, limit));
    std::fs::remove_dir_all(&dir).map_err(io("removing the files"))
}

/// Measurements of one case: pairs of tier and limit.
#[derive(Debug, Default)]
struct PairedRuns {
    ours: Vec<Measurement>,
    limit: Vec<Measurement>,
}

impl PairedRuns {
    /// Measures both sides in each round, in alternating order.
    fn interleave(
        rounds: u64,
        mut measure: impl FnMut(u64, bool) -> Result<Measurement, BenchError>,
    ) -> Result<PairedRuns, BenchError> {
        let mut pairs = PairedRuns::default();
        for round in 0..rounds {
            let ours_first = round.is_multiple_of(2);
            for ours in [ours_first, !ours_first] {
                let measured = measure(round, ours)?;
                if ours { pairs.ours.push(measured) } else { pairs.limit.push(measured) }
            }
        }
        Ok(pairs)
    }

    fn ratios(&self) -> Vec<f64> {
        self.ours.iter().zip(&self.limit).map(|(ours, limit)| ours.bytes_per_s / limit.bytes_per_s).collect()
    }
}

fn rates(side: &[Measurement]) -> Vec<f64> {
    side.iter().map(|measured| measured.bytes_per_s / 1e9).collect()
}

fn cpu(side: &[Measurement]) -> f64 {
    median(side.iter().map(|measured| measured.cpu).collect())
}

/// Output of the results.
struct Report {
    json: bool,
    engine: &'static str,
    /// The head of the table was printed.
    has_head: bool,
}

impl Report {
    #[expect(clippy::too_many_arguments, reason = "one argument per group of columns")]
    fn print(
        &mut self,
        what: &str,
        args: &Args,
        limit: &str,
        case: &Case,
        direct: bool,
        registered: Option<bool>,
        pairs: &PairedRuns,
    ) {
        let (ours, baseline, ratios) = (rates(&pairs.ours), rates(&pairs.limit), pairs.ratios());
        // Also for the table: the row counts the gate failures.
        let line = ResultRow::new("disk", what)
            .with("backend", args.backend.name())
            .with("engine", self.engine)
            .with("direct", direct)
            .with("limit", limit)
            .with("bytes", case.record_bytes)
            .with("depth", if what == "read" { Some(case.depth) } else { None })
            .with("registered", registered)
            .with("memory_bytes", (what == "read").then(|| case.batch() * case.record_bytes))
            .number("gb_per_s", median(ours.clone()))
            .number("gb_per_s_range", relative_range(&ours))
            .number("limit_gb_per_s", median(baseline.clone()))
            .number("limit_gb_per_s_range", relative_range(&baseline))
            .with_target("ratio", median(ratios.clone()), RATIO_TARGET, true)
            .number("ratio_range", relative_range(&ratios))
            .number("cpu", cpu(&pairs.ours))
            .number("limit_cpu", cpu(&pairs.limit));
        if self.json {
            line.print();
            return;
        }
        let mut out = std::io::stdout().lock();
        if !self.has_head {
            self.has_head = true;
            let cache = if direct { "direct I/O" } else { "page cache, does not measure the disk" };
            let _ = writeln!(
                out,
                "{} backend, engine {}, {cache}; the limit is {limit}",
                args.backend, self.engine
            );
            let _ = writeln!(
                out,
                "{:<6} {:>9} {:>5}  {:>10} {:>6}  {:>9} {:>6}  {:>6} {:>6}  {:>5}",
                "what", "record", "depth", "limit GB/s", "±", "ours GB/s", "±", "ratio", "±", "cpu"
            );
        }
        let percent = |share: f64| format!("{:.0}%", share * 100.0);
        let _ = writeln!(
            out,
            "{what:<6} {:>9} {:>5}  {:>10.3} {:>6}  {:>9.3} {:>6}  {:>6.3} {:>6}  {:>5}",
            format_bytes(case.record_bytes),
            if what == "read" { case.depth.to_string() } else { "-".to_owned() },
            median(baseline.clone()),
            percent(relative_range(&baseline)),
            median(ours.clone()),
            percent(relative_range(&ours)),
            median(ratios.clone()),
            percent(relative_range(&ratios)),
            percent(cpu(&pairs.ours)),
        );
        let _ = out.flush();
    }
}
