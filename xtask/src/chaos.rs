//! `cargo xtask chaos`: fault injection into a cluster of real processes.
//!
//! Owns the build and the arguments of the test `chaos` of the cli crate. The build is optimised: the timing of a debug
//! build is not representative.

use std::path::Path;

use crate::command::{Command, CommandError};

/// Default duration.
pub(crate) const LONG_SECONDS: u32 = 600;
pub(crate) const MASTERS: u8 = 3;

/// Options of a run.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Options {
    /// Duration of the fault phase.
    pub(crate) seconds: u32,
    /// Seed of the faults; drawn and printed if not given.
    pub(crate) seed: Option<u64>,
    /// Number of masters; more than one needs etcd.
    pub(crate) masters: u8,
    /// Syncs of disks take long.
    pub(crate) slow_disks: bool,
}

impl Default for Options {
    fn default() -> Options {
        Options { seconds: LONG_SECONDS, seed: None, masters: MASTERS, slow_disks: false }
    }
}

/// Builds and runs the test.
pub(crate) fn run(root: &Path, options: &Options) -> Result<(), CommandError> {
    command(options).run(root)
}

pub(crate) fn command(options: &Options) -> Command {
    // The program as it ships. Only nodes that can delay their syncs need another build.
    let features = if options.slow_disks { "--features moontide-disk/testing " } else { "" };
    let test =
        format!("test --release --locked -p moontide-cli {features}--test chaos -- --ignored --nocapture");
    let command = Command::cargo(&test)
        .env("MOONTIDE_CHAOS_SECONDS", &options.seconds.to_string())
        .env("MOONTIDE_CHAOS_MASTERS", &options.masters.to_string())
        .env("MOONTIDE_CHAOS_SLOW_DISKS", &options.slow_disks.to_string());
    match options.seed {
        Some(seed) => command.env("MOONTIDE_SEED", &seed.to_string()),
        None => command,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chaos_command_passes_all_options() {
        let options = Options { seconds: 60, seed: Some(7), masters: 1, slow_disks: true };
        let line = command(&options).to_string();
        let variables = [
            "MOONTIDE_CHAOS_SECONDS=60",
            "MOONTIDE_CHAOS_MASTERS=1",
            "MOONTIDE_CHAOS_SLOW_DISKS=true",
            "MOONTIDE_SEED=7",
        ];
        for part in variables.into_iter().chain(["--test chaos", "--ignored"]) {
            assert!(line.contains(part), "{line}");
        }
        assert!(!command(&Options::default()).to_string().contains("MOONTIDE_SEED"));
    }

    #[test]
    fn only_slow_disks_need_another_build_than_the_shipped_one() {
        let slow = Options { slow_disks: true, ..Options::default() };
        assert!(command(&slow).to_string().contains("--features moontide-disk/testing --test chaos"));
        assert!(!command(&Options::default()).to_string().contains("--features"));
    }
}
