//! The command `moontide`: one binary for the processes of a cluster and the tools around them.
//!
//! Here is only the choice of the subcommand; each is a file of [`commands`]. Exit codes: 0 success, 1 failure, 2 wrong
//! usage.

mod commands;

use std::process::ExitCode;

use clap::Command;

fn main() -> ExitCode {
    // clap answers wrong usage itself, with exit code 2, and --help with 0.
    let matches = command().get_matches();
    let result = match matches.subcommand() {
        Some(("master", matches)) => commands::master::run(matches),
        Some(("bench", matches)) => commands::bench::run(matches),
        _ => unreachable!("clap insists on one of our subcommands"),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => {
            eprintln!("moontide: {failure}");
            failure.exit_code()
        }
    }
}

fn command() -> Command {
    Command::new("moontide")
        .version(env!("CARGO_PKG_VERSION"))
        .about("A distributed store for KV caches")
        .subcommand_required(true)
        .arg_required_else_help(true)
        .subcommand(commands::master::command())
        .subcommand(commands::bench::command())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }
}
