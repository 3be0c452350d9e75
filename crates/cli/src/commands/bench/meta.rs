//! `moontide bench meta`: the master's index.

mod in_process;
mod loopback;
mod reports;
mod world;

use clap::Args as ClapArgs;

use super::figures::{BenchError, nothing_is_grossly_slow};

pub(super) const EXAMPLES: &str = "\
Examples:
  moontide bench meta                                    all cases, ten million objects: 4 GiB, some four minutes
  moontide bench meta --objects 100000 --repeats 1       the same in half a minute
  moontide bench meta --only loopback                    both doors, with a master of its own on loopback

Every result is one JSON object per line on standard output:
  target, met   what we aim for at ten million objects on two cores, and whether the figure beside it reaches it;
                smaller runs have fixed costs that count for more
  spread        (largest - smallest) / middle of the repeats
  bare_echo_*   a bare TCP echo of the same sizes in the same run: what the machine allows
  *_cpu_ns_*    processor time of the master, of all its threads
  share_of_growth   memory that remains after the removal, as a part of what the objects had taken";

/// How it is measured.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// Objects in the index.
    #[arg(long, default_value_t = 10_000_000, value_parser = clap::value_parser!(u64).range(1000..=1_000_000_000))]
    objects: u64,
    /// Groups that share them.
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=4096))]
    groups: u16,
    /// How often each rate is measured; the middle one counts.
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u16).range(1..=1000))]
    repeats: u16,
    /// Decides which keys are asked for.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Only one part.
    #[arg(long, value_enum)]
    only: Option<Part>,
    /// Fail if a figure misses its target by more than a factor of two.
    #[arg(long)]
    gate: bool,
}

/// A part of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Part {
    /// The index without a network.
    InProcess,
    /// Reports, without a network.
    Reports,
    /// Both doors, on loopback.
    Loopback,
}

/// Runs the cases.
pub(super) fn run(args: &Args) -> Result<(), BenchError> {
    let wanted = |part| args.only.is_none_or(|only| only == part);
    if wanted(Part::InProcess) {
        in_process::run(args)?;
    }
    if wanted(Part::Reports) {
        in_process::ingest(args)?;
    }
    if wanted(Part::Loopback) {
        loopback::run(args)?;
    }
    if args.gate { nothing_is_grossly_slow() } else { Ok(()) }
}

/// Dice for choosing keys: the same seed chooses the same ones.
struct Dice(moontide_meta::Rng);

impl Dice {
    fn new(seed: u64) -> Dice {
        Dice(moontide_meta::Rng::new(seed))
    }

    fn below(&mut self, n: u64) -> u64 {
        self.0.below(n as usize) as u64
    }
}
