//! `moontide bench disk`: how fast a disk tier reads and writes records, beside what the disk gives to `fio`.
//!
//! | file | what |
//! |---|---|
//! | `tier` | ours: a backend, its records, reads with verification |
//! | `fio` | the limit: `fio` with the same sizes and as many bytes in flight |
//! | `bare` | the limit where there is no `fio`: our engine with nothing around it |
//!
//! Ours and the limit take turns, round by round, on the same file system. A ratio is of two neighbours in time; the
//! middle of the ratios counts, and their spread stands beside it. Ours counts payload only: what it reads and writes
//! beside that is part of its cost.

mod bare;
mod fio;
mod tier;

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::Args as ClapArgs;
use moontide_disk::{BackendKind, EngineChoice, OsStorage, Storage};

use super::figures::{BenchError, Line, io, median, nothing_is_grossly_slow, spread};
use super::transfer::{seconds, size as record_size};
use crate::scratch::Scratch;
use crate::text;
use bare::BareLoop;
use fio::Fio;
use tier::{Case, Tier};

pub(super) const EXAMPLES: &str = "\
Examples:
  moontide bench disk --dir /mnt/ssd                       some minutes, and 5 GiB of the disk
  moontide bench disk --dir /mnt/ssd --size 256MiB --rounds 3 --seconds 0.3
      a quick look; figures are rough
  moontide bench disk --dir /mnt/ssd --records 1M --depths 32 --backend offset --json

Records are written to a new tier, a batch of 64 MiB and its syncs at a time, and read at random past the page cache:
found, read, verified. Beside it `fio` (from your distribution, as `apt install fio`) writes blocks of 1 MiB with an
fdatasync after each 64 MiB, and reads blocks of a record's size at random: ioengine=io_uring, direct=1, norandommap.
Depth d is d records in flight: ours has as many bytes in flight as fio, in pieces of 256 KiB; at depth 1 it is given one
record at a time, else 16 d (or what --memory holds) with a queue that is as deep. Without `fio` the limit is a loop of
our own: the same engine without records and verification.

fio reads into d blocks of memory again and again, which may stay in the processor's cache; ours reads into as many
records as it is given, as a node does. Where a disk is that fast, --against loop, which reads into as much memory as
ours, or a small --memory says what records cost.

  limit, ours   10^9 bytes of payload per second, the middle of the rounds
  ratio         the middle of ours / limit over the rounds
  ±             (largest - smallest) / middle over the rounds
  cpu           processor time of ours over the time it took: 100% is one core
--json prints one object per line instead; the target of a ratio is 0.9.";

/// What is aimed for.
const RATIO_TARGET: f64 = 0.9;
/// Bytes that are written and synced together, by us and by the limit: what a node writes at a time.
const BATCH_BYTES: u64 = 64 << 20;

/// How it is measured.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// Where the files go, in a new directory that is removed at the end [default: $TMPDIR, or the working directory].
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// How records stand on the disk: bucket, file or offset.
    #[arg(long, value_name = "NAME", default_value_t = BackendKind::Bucket)]
    backend: BackendKind,
    /// By which calls it is read and written: auto, uring or posix.
    #[arg(long, value_name = "NAME", default_value_t = EngineChoice::Auto)]
    engine: EngineChoice,
    /// Bytes of records, and as many for the limit: more than the disk's own cache.
    #[arg(long, value_parser = text::size, default_value = "2GiB")]
    size: u64,
    /// Sizes of a record.
    #[arg(long, value_delimiter = ',', value_parser = record_size, default_value = "1M,256K")]
    records: Vec<u64>,
    /// Records in flight.
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=128), default_value = "1,8,32")]
    depths: Vec<u16>,
    /// Memory that ours reads into, unless one record is in flight; at least two records for each in flight.
    #[arg(long, value_name = "SIZE", value_parser = memory, default_value = "256MiB")]
    memory: u64,
    /// How often ours and the limit take turns.
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1000), default_value_t = 5)]
    rounds: u16,
    /// How long one measurement of reads takes.
    #[arg(long, value_parser = seconds, default_value = "1")]
    seconds: f64,
    /// What ours is held against [default: fio if it is there].
    #[arg(long, value_enum)]
    against: Option<Against>,
    /// Decides which records are read.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Print JSON, an object per line.
    #[arg(long)]
    json: bool,
    /// Fail if a figure misses its target by more than a factor of two.
    #[arg(long)]
    gate: bool,
}

/// A limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Against {
    /// The program `fio`.
    Fio,
    /// Our engine without records.
    Loop,
}

/// Bytes in some time.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Measured {
    bytes_per_s: f64,
    /// Processor time over the time it took.
    cpu: f64,
}

impl Measured {
    fn new(bytes: u64, took: Duration, cpu: Duration) -> Measured {
        let took = took.as_secs_f64().max(1e-9);
        Measured { bytes_per_s: bytes as f64 / took, cpu: cpu.as_secs_f64() / took }
    }
}

/// What ours is held against.
enum Limit {
    Fio(Fio),
    Loop(BareLoop),
}

impl Limit {
    fn name(&self) -> &'static str {
        match self {
            Limit::Fio(_) => "fio",
            Limit::Loop(_) => "loop",
        }
    }

    /// Writes a new file, in order.
    fn write(&mut self, bytes: u64) -> Result<Measured, BenchError> {
        match self {
            Limit::Fio(fio) => fio.write(bytes),
            Limit::Loop(bare) => bare.write(bytes),
        }
    }

    /// Reads blocks of these files at random.
    fn read(&mut self, case: &Case, round: u64) -> Result<Measured, BenchError> {
        match self {
            Limit::Fio(fio) => fio.read(case),
            Limit::Loop(bare) => bare.read(case, round),
        }
    }
}

fn memory(text: &str) -> Result<u64, String> {
    let bytes = text::size(text)?;
    if bytes <= 1 << 40 { Ok(bytes) } else { Err("1 TiB at most".into()) }
}

/// Runs the cases.
pub(super) fn run(args: &Args) -> Result<(), BenchError> {
    let parent = args.dir.clone().or_else(|| std::env::var_os("TMPDIR").map(PathBuf::from));
    let parent = parent.unwrap_or_else(|| PathBuf::from("."));
    let scratch =
        Scratch::new(&parent, "moontide-bench-disk").map_err(io("making a directory; see --dir"))?;
    let storage = OsStorage::open(scratch.path(), args.engine).map_err(io("opening the directory"))?;
    let free = storage.space().map_err(io("asking for free space"))?.free;
    let needed = Tier::limit_bytes(args.size).saturating_add(args.size);
    if free < needed {
        let (needed, free) = (text::bytes(needed), text::bytes(free));
        let what = format!("{needed} are needed and {free} are free; take a smaller --size or another --dir");
        return Err(BenchError::Wrong(what));
    }
    let fio_is_there = fio::is_there();
    let against = args.against.unwrap_or(if fio_is_there { Against::Fio } else { Against::Loop });
    if !fio_is_there {
        eprintln!("fio is not there: install it (`apt install fio`, `dnf install fio`) to measure beside it");
        eprintln!("the limit is a loop of our own now: the same engine without records and verification");
        if args.against == Some(Against::Fio) {
            return Err(BenchError::Wrong("fio cannot be started; see `moontide bench disk --help`".into()));
        }
    }
    let mut report = Report { json: args.json, engine: storage.engine(), begun: false };
    for &record_bytes in &args.records {
        measure(args, scratch.path(), record_bytes, against, &mut report)?;
    }
    if args.gate { nothing_is_grossly_slow() } else { Ok(()) }
}

/// The cases of one record size, with files of their own.
fn measure(
    args: &Args,
    dir: &Path,
    record_bytes: u64,
    against: Against,
    report: &mut Report,
) -> Result<(), BenchError> {
    let dir = dir.join(format!("records-{record_bytes}"));
    std::fs::create_dir(&dir).map_err(io("making a directory"))?;
    let open = |name: &str| {
        let storage = OsStorage::open(&dir.join(name), args.engine).map_err(io("opening a directory"))?;
        Ok::<_, BenchError>(Arc::new(storage))
    };
    let storage = open("tier")?;
    let mut tier = Tier::open(Arc::clone(&storage), args.backend, args.size, record_bytes)?;
    let (engine, limit_storage) = (storage.engine(), open("limit")?);
    let mut limit = match against {
        Against::Fio => Limit::Fio(Fio::new(&dir.join("limit"), engine, storage.is_direct())),
        Against::Loop => Limit::Loop(BareLoop::new(limit_storage, args.seed)),
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
    let write = |round: u64, ours: bool, tier: &mut Tier, limit: &mut Limit| match ours {
        true => tier.write(round * count, count, record_bytes),
        false => limit.write(count * record_bytes),
    };
    let pairs = Pairs::take_turns(rounds, |round, ours| write(round, ours, &mut tier, &mut limit))?;
    report.print("write", args, limit.name(), &case, storage.is_direct(), None, &pairs);

    for &depth in &args.depths {
        let case = Case { depth: depth.into(), ..case };
        let mut reader = tier.reader(&case);
        let pairs = Pairs::take_turns(rounds, |round, ours| match ours {
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

/// Rounds of one case.
#[derive(Debug, Default)]
struct Pairs {
    ours: Vec<Measured>,
    limit: Vec<Measured>,
}

impl Pairs {
    /// Measures both sides in each round, each time another one first.
    fn take_turns(
        rounds: u64,
        mut measure: impl FnMut(u64, bool) -> Result<Measured, BenchError>,
    ) -> Result<Pairs, BenchError> {
        let mut pairs = Pairs::default();
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

fn rates(side: &[Measured]) -> Vec<f64> {
    side.iter().map(|measured| measured.bytes_per_s / 1e9).collect()
}

fn cpu(side: &[Measured]) -> f64 {
    median(side.iter().map(|measured| measured.cpu).collect())
}

/// Where results go.
struct Report {
    json: bool,
    engine: &'static str,
    /// The table has its head.
    begun: bool,
}

impl Report {
    #[expect(clippy::too_many_arguments, reason = "a line has as many columns")]
    fn print(
        &mut self,
        what: &str,
        args: &Args,
        limit: &str,
        case: &Case,
        direct: bool,
        registered: Option<bool>,
        pairs: &Pairs,
    ) {
        let (ours, bare, ratios) = (rates(&pairs.ours), rates(&pairs.limit), pairs.ratios());
        // Also when a table is printed: it keeps the count for --gate.
        let line = Line::new("disk", what)
            .with("backend", args.backend.name())
            .with("engine", self.engine)
            .with("direct", direct)
            .with("limit", limit)
            .with("bytes", case.record_bytes)
            .with("depth", if what == "read" { Some(case.depth) } else { None })
            .with("registered", registered)
            .with("memory_bytes", (what == "read").then(|| case.batch() * case.record_bytes))
            .number("gb_per_s", median(ours.clone()))
            .number("gb_per_s_spread", spread(&ours))
            .number("limit_gb_per_s", median(bare.clone()))
            .number("limit_gb_per_s_spread", spread(&bare))
            .against("ratio", median(ratios.clone()), RATIO_TARGET, true)
            .number("ratio_spread", spread(&ratios))
            .number("cpu", cpu(&pairs.ours))
            .number("limit_cpu", cpu(&pairs.limit));
        if self.json {
            line.print();
            return;
        }
        let mut out = std::io::stdout().lock();
        if !self.begun {
            self.begun = true;
            let cache = if direct {
                "past the page cache"
            } else {
                "through the page cache: these are not the disk's figures"
            };
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
            text::bytes(case.record_bytes),
            if what == "read" { case.depth.to_string() } else { "-".to_owned() },
            median(bare.clone()),
            percent(spread(&bare)),
            median(ours.clone()),
            percent(spread(&ours)),
            median(ratios.clone()),
            percent(spread(&ratios)),
            percent(cpu(&pairs.ours)),
        );
        let _ = out.flush();
    }
}
