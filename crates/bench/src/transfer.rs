//! `moontide bench transfer`: throughput of transfers between two processes, compared with a baseline.
//!
//! | file | content |
//! |---|---|
//! | `case` | parameters of a case, records and memory for it, results |
//! | `owner` | process that owns the memory: `bench transfer-owner` |
//! | `baseline` | baseline of streams: plain sockets |
//! | `tcp` | cases of the TCP engine |
//! | `shm` | cases of shared memory |
//!
//! The engine and the baseline alternate, repeat by repeat, with the same sizes, number of threads and order of
//! records, on the same memory of the same process. A ratio compares two consecutive measurements; the result is the
//! median of the ratios and their range.

mod baseline;
mod case;
mod owner;
mod shm;
mod tcp;

use std::time::Duration;

use clap::Args as ClapArgs;

use crate::arguments::{seconds, transfer_bytes};
use crate::results::{BenchError, ResultRow, check_gates};
use case::Tally;

pub(super) use baseline::BaselineConnection;
pub(super) use owner::{OwnerArgs, OwnerProcess, serve as run_owner};

pub(super) const EXAMPLES: &str = "\
Examples:
  moontide bench transfer                             tcp, 4 KiB to 16 MiB, and shm, from 64 KiB on: 2 GiB, about ten minutes
  moontide bench transfer --quick                     three sizes, half a minute; less precise
  moontide bench transfer --only tcp --sizes 1M,4M    one engine, two sizes

Every result is one JSON object per line on standard output:
  gb_per_s, baseline_gb_per_s   throughput of the engine and of the baseline (tcp: plain blocking sockets; shm: memory
                                copies), measured alternately. With digests, the baseline also hashes every page
  ratio, ratio_range            median of engine / baseline over the repeats; (largest - smallest) / median
  target, met                   target of the ratio, and whether it is met
  *cpu_s_per_gb                 CPU time of both processes per 10^9 bytes
  *p50_us, *p99_us, *max_us     duration of one transfer
  connections_lost              connections that failed; expected: 0
  resubmitted                   frames that were sent again after that; expected: 0
  callers_4_over_1              throughput of four callers relative to one caller on the same connections";

/// Default sizes.
const SIZES: [u64; 6] = [4 << 10, 64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20];
/// Default sizes with `--quick`.
const SIZES_QUICK: [u64; 3] = [4 << 10, 256 << 10, 4 << 20];
const REPEATS: u16 = 5;
const REPEATS_QUICK: u16 = 3;
const SECONDS: f64 = 0.3;
const SECONDS_QUICK: f64 = 0.05;
/// Larger than any CPU cache.
const MEMORY_MIB: u64 = 1024;
const MEMORY_MIB_QUICK: u64 = 256;

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// Transfer sizes, in bytes or with suffix K or M [default: 4K,64K,256K,1M,4M,16M; quick: 4K,256K,4M]
    #[arg(long, value_delimiter = ',', value_parser = transfer_bytes)]
    sizes: Option<Vec<u64>>,
    /// Repeats of engine and baseline [default: 5; quick: 3]
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1000))]
    repeats: Option<u16>,
    /// Duration of one measurement in seconds [default: 0.3; quick: 0.05]
    #[arg(long, value_parser = seconds)]
    seconds: Option<f64>,
    /// Memory of the owner in MiB, half for reads, half for writes [default: 1024; quick: 256]
    #[arg(long, value_name = "MIB", value_parser = clap::value_parser!(u64).range(64..=65536))]
    memory: Option<u64>,
    /// Seed of the order of records
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Run only one engine
    #[arg(long, value_enum)]
    only: Option<TransferBench>,
    /// Use fewer sizes, fewer and shorter measurements, and less memory
    #[arg(long)]
    quick: bool,
    /// Fail if a result misses its target by more than a factor of two
    #[arg(long)]
    gate: bool,
}

/// Engine to measure.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum TransferBench {
    /// TCP on loopback.
    Tcp,
    /// Memory mapped by both processes.
    Shm,
}

impl Args {
    fn sizes(&self) -> Vec<u64> {
        let default = if self.quick { &SIZES_QUICK[..] } else { &SIZES[..] };
        self.sizes.clone().unwrap_or_else(|| default.to_vec())
    }

    fn repeats(&self) -> u16 {
        self.repeats.unwrap_or(if self.quick { REPEATS_QUICK } else { REPEATS })
    }

    fn span(&self) -> Duration {
        Duration::from_secs_f64(self.seconds.unwrap_or(if self.quick { SECONDS_QUICK } else { SECONDS }))
    }

    /// Number of records of `bytes` bytes for reads, and as many for writes.
    fn records(&self, bytes: u64) -> u32 {
        let mib = self.memory.unwrap_or(if self.quick { MEMORY_MIB_QUICK } else { MEMORY_MIB });
        // Every caller needs its own records.
        ((mib << 20) / 2 / bytes).max(8) as u32
    }
}

/// Runs the cases.
pub(super) fn run(args: &Args) -> Result<(), BenchError> {
    let is_selected = |part| args.only.is_none_or(|only| only == part);
    let mut tally = Tally::default();
    if is_selected(TransferBench::Tcp) {
        tcp::run(args, &mut tally)?;
    }
    if is_selected(TransferBench::Shm) {
        shm::run(args, &mut tally)?;
    }
    let Tally { targets, met } = tally;
    if targets == 0 && args.gate {
        let what = "no measured case has a target: shm is measured from 64K on, tcp has targets from 256K on; pass larger --sizes";
        return Err(BenchError::Wrong(what.into()));
    }
    ResultRow::new("transfer", "summary").with("targets", targets).with("met", met).print();
    if args.gate { check_gates() } else { Ok(()) }
}
