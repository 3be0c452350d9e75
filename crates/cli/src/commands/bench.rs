//! `moontide bench`: figures that anyone can repeat, as JSON lines.
//!
//! Progress goes to standard error, one JSON object per result to standard output. Every figure that the machine
//! limits stands beside the bare limit measured in the same run.

mod figures;
mod meta;

use clap::{ArgMatches, Command, FromArgMatches, Subcommand};

use super::Failure;

/// What is measured.
#[derive(Debug, Subcommand)]
enum Bench {
    /// The master's index: memory, lookups, eviction and reports in process; both doors on loopback
    #[command(after_help = meta::EXAMPLES)]
    Meta(meta::Args),
}

pub(crate) fn command() -> Command {
    let bench =
        Command::new("bench").about("Measure, and print results as JSON lines").subcommand_required(true);
    Bench::augment_subcommands(bench)
}

pub(crate) fn run(matches: &ArgMatches) -> Result<(), Failure> {
    let bench = Bench::from_arg_matches(matches).map_err(Failure::usage)?;
    let measured = match bench {
        Bench::Meta(args) => meta::run(&args),
    };
    measured.map_err(Failure::failed)
}
