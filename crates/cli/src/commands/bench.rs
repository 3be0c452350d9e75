//! `moontide bench`: the benchmarks of [`moontide_bench`].

use clap::{ArgMatches, Command};
use moontide_bench::BenchError;

use super::CommandError;

pub(crate) fn command() -> Command {
    moontide_bench::command()
}

pub(crate) fn run(matches: &ArgMatches) -> Result<(), CommandError> {
    moontide_bench::run(matches).map_err(|error| match error {
        BenchError::Arguments(_) => CommandError::usage(error),
        BenchError::Io { .. } | BenchError::Wrong(_) => CommandError::failed(error),
    })
}
