//! `moontide bench`: figures that anyone can repeat, as JSON lines.
//!
//! Progress goes to standard error, one JSON object per result to standard output. Every figure that the machine
//! limits stands beside the bare limit measured in the same run.

mod figures;
mod meta;
mod transfer;

use clap::{ArgMatches, Command, FromArgMatches, Subcommand};

use super::Failure;

/// What is measured.
#[derive(Debug, Subcommand)]
enum Bench {
    /// The master's index: memory, lookups, eviction and reports in process; both doors on loopback
    #[command(after_help = meta::EXAMPLES)]
    Meta(meta::Args),
    /// Bytes between two processes: every engine beside the bare limit
    #[command(after_help = transfer::EXAMPLES)]
    Transfer(transfer::Args),
    /// The process whose memory `bench transfer` reads and writes
    #[command(hide = true)]
    TransferOwner(transfer::OwnerArgs),
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
        Bench::Transfer(args) => transfer::run(&args),
        Bench::TransferOwner(args) => transfer::run_owner(&args),
    };
    measured.map_err(Failure::failed)
}
