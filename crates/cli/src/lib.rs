//! The command `moontide`: one binary for the processes of a cluster and the tools around them.
//!
//! ```text
//! moontide dev &                      a master and a node in one process
//! moontide put hello - <<< world      exit code 0
//! moontide get hello                  prints: world
//! moontide get nothing                exit code 3: no such object
//! ```
//!
//! This file only selects the subcommand. Each subcommand is a file of `commands`, which also defines the exit codes.
//! The crate has no interface for other programs: `docs/cli.md` defines the output that scripts can rely on, and
//! `crates/cli/tests` checks it. Programs use `moontide_client`.
//!
//! Reading order: `commands` (exit codes), `commands/master.rs` and `commands/node.rs` (settings, start, signals),
//! `commands/store.rs` (calls on objects), `commands/tenant.rs`, `commands/evict.rs` and `commands/segments.rs` (calls of
//! operators), `commands/certs.rs`, `commands/inspect.rs`, `commands/doctor.rs`, then `commands/bench.rs`, which
//! prints the figures of `docs/performance.md`.

mod commands;
mod format;
mod process;
mod settings;

use std::process::ExitCode;

use clap::Command;

const EXAMPLES: &str = "\
Examples:
  moontide dev                        run a master and a node for experiments
  moontide put hello - <<< world      store an object
  moontide get hello                  print it
  moontide doctor                     check this host's capabilities

Every command has its own --help with examples. Exit codes: 0 success, 1 failure, 2 wrong usage, 3 no such object,
4 the master cannot be reached.";

/// Runs the subcommand named on the command line.
pub fn main() -> ExitCode {
    // clap handles wrong usage (exit code 2) and --help (exit code 0).
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
        Some(("pin", matches)) => commands::store::mark::run_pin(matches),
        Some(("touch", matches)) => commands::store::mark::run_touch(matches),
        Some(("prefetch", matches)) => commands::store::mark::run_prefetch(matches),
        Some(("tenant", matches)) => commands::tenant::run(matches),
        Some(("evict", matches)) => commands::evict::run(matches),
        Some(("segments", matches)) => commands::segments::run(matches),
        Some(("certs", matches)) => commands::certs::run(matches),
        Some(("inspect", matches)) => commands::inspect::run(matches),
        Some(("doctor", matches)) => commands::doctor::run(matches),
        Some(("bench", matches)) => commands::bench::run(matches),
        Some(("completions", matches)) => commands::completions::run(matches, command()),
        _ => unreachable!("clap requires one of the subcommands above"),
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
        .subcommand(commands::store::mark::pin_command())
        .subcommand(commands::store::mark::touch_command())
        .subcommand(commands::store::mark::prefetch_command())
        .subcommand(commands::tenant::command())
        .subcommand(commands::evict::command())
        .subcommand(commands::segments::command())
        .subcommand(commands::certs::command())
        .subcommand(commands::inspect::command())
        .subcommand(commands::doctor::command())
        .subcommand(commands::bench::command())
        .subcommand(commands::completions::command())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clap_command_definition_is_valid() {
        command().debug_assert();
    }
}
