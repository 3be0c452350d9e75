//! `cargo xtask chaos`: a cluster of real processes to which everything happens, for as long as one likes.
//!
//! Owns how the test `chaos` of the command line's crate is built and told what to do; what happens there is its own. Built
//! optimised: figures of a debug build say nothing about deadlines.

use std::path::Path;

use crate::command::{Command, CommandError};

/// The form that is run unless told otherwise.
pub(crate) const LONG_SECONDS: u32 = 600;
pub(crate) const MASTERS: u8 = 3;

/// What is wanted.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Options {
    /// How long things happen.
    pub(crate) seconds: u32,
    /// Repeats the faults of a run; otherwise one is drawn, and printed.
    pub(crate) seed: Option<u64>,
    /// How many masters; several need an `etcd`.
    pub(crate) masters: u8,
}

impl Default for Options {
    fn default() -> Options {
        Options { seconds: LONG_SECONDS, seed: None, masters: MASTERS }
    }
}

/// Runs it.
pub(crate) fn run(root: &Path, options: &Options) -> Result<(), CommandError> {
    command(options).run(root)
}

pub(crate) fn command(options: &Options) -> Command {
    let test = "test --release --locked -p moontide-cli --test chaos -- --ignored --nocapture";
    let command = Command::cargo(test)
        .env("MOONTIDE_CHAOS_SECONDS", &options.seconds.to_string())
        .env("MOONTIDE_CHAOS_MASTERS", &options.masters.to_string());
    match options.seed {
        Some(seed) => command.env("MOONTIDE_SEED", &seed.to_string()),
        None => command,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_test_is_told_how_long_how_many_masters_and_which_seed() {
        let line = command(&Options { seconds: 60, seed: Some(7), masters: 1 }).to_string();
        let variables = ["MOONTIDE_CHAOS_SECONDS=60", "MOONTIDE_CHAOS_MASTERS=1", "MOONTIDE_SEED=7"];
        for part in variables.into_iter().chain(["--test chaos", "--ignored"]) {
            assert!(line.contains(part), "{line}");
        }
        assert!(!command(&Options::default()).to_string().contains("MOONTIDE_SEED"));
    }
}
