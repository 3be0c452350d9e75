//! The command `moontide`: one binary for the processes of a cluster and the tools around them.
//!
//! Here is only the choice of the subcommand; each is a file of `commands`, which also says which exit codes there
//! are.

mod commands;
mod http;
mod process;
mod scratch;
mod text;
mod trace;

use std::process::ExitCode;

use clap::Command;

const EXAMPLES: &str = "\
Examples:
  moontide dev                        a master and a node, to try things out
  moontide put hello - <<< world      store an object
  moontide get hello                  and get it back
  moontide doctor                     what this machine can do

Every command has its own --help with examples. Exit codes: 0 success, 1 failure, 2 wrong usage, 3 no such object,
4 the master cannot be reached.";

/// Does what the command line says.
pub fn main() -> ExitCode {
    // clap answers wrong usage itself, with exit code 2, and --help with 0.
    let matches = command().get_matches();
    let result = match matches.subcommand() {
        Some(("master", matches)) => commands::master::run(matches),
        Some(("node", matches)) => commands::node::run(matches),
        Some(("dev", matches)) => commands::dev::run(matches),
        Some(("put", matches)) => commands::store::put::run(matches),
        Some(("get", matches)) => commands::store::get::run(matches),
        Some(("rm", matches)) => commands::store::rm::run(matches),
        Some(("ls", matches)) => commands::store::ls::run(matches),
        Some(("stat", matches)) => commands::store::stat::run(matches),
        Some(("inspect", matches)) => commands::inspect::run(matches),
        Some(("doctor", matches)) => commands::doctor::run(matches),
        Some(("bench", matches)) => commands::bench::run(matches),
        Some(("completions", matches)) => commands::completions::run(matches, command()),
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
        .after_help(EXAMPLES)
        .subcommand(commands::master::command())
        .subcommand(commands::node::command())
        .subcommand(commands::dev::command())
        .subcommand(commands::store::put::command())
        .subcommand(commands::store::get::command())
        .subcommand(commands::store::rm::command())
        .subcommand(commands::store::ls::command())
        .subcommand(commands::store::stat::command())
        .subcommand(commands::inspect::command())
        .subcommand(commands::doctor::command())
        .subcommand(commands::bench::command())
        .subcommand(commands::completions::command())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        command().debug_assert();
    }
}
