//! `moontide bench meta`: benchmarks of the master's index.

pub(crate) mod fixture;
mod in_process;
mod loopback;
mod reports;

use clap::Args as ClapArgs;

use crate::results::{BenchError, check_gates};

pub(super) const EXAMPLES: &str = "\
Examples:
  moontide bench meta                                    all cases, ten million objects: 4 GiB, about four minutes
  moontide bench meta --objects 100000 --repeats 1       fewer objects, half a minute
  moontide bench meta --only loopback                    gRPC and frame server of a new master on loopback

Every result is one JSON object per line on standard output:
  target, met       target for ten million objects on two cores, and whether the result meets it; fixed costs weigh
                    more in smaller runs
  range             (largest - smallest) / median of the repeats
  baseline_echo_*   plain TCP echo of the same sizes in the same run
  *_cpu_ns_*        CPU time of the master, all threads
  share_of_growth   memory left after the removal, as a share of the memory of all objects";

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// Number of objects in the index
    #[arg(long, default_value_t = 10_000_000, value_parser = clap::value_parser!(u64).range(1000..=1_000_000_000))]
    objects: u64,
    /// Number of groups
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=4096))]
    groups: u16,
    /// Measurements per rate; the median is reported
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=1000))]
    repeats: u16,
    /// Seed of the random keys
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Run only one part
    #[arg(long, value_enum)]
    only: Option<MetaBench>,
    /// Fail if a result misses its target by more than a factor of two
    #[arg(long)]
    gate: bool,
}

/// A part of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum MetaBench {
    /// Index without network.
    InProcess,
    /// Reports without network.
    Reports,
    /// gRPC and frame server on loopback.
    Loopback,
}

/// Runs the cases.
pub(super) fn run(args: &Args) -> Result<(), BenchError> {
    let is_selected = |part| args.only.is_none_or(|only| only == part);
    if is_selected(MetaBench::InProcess) {
        in_process::run(args)?;
    }
    if is_selected(MetaBench::Reports) {
        in_process::ingest(args)?;
    }
    if is_selected(MetaBench::Loopback) {
        loopback::run(args)?;
    }
    if args.gate { check_gates() } else { Ok(()) }
}
