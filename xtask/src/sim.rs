//! `cargo xtask sim`: many seeds of the simulation, optimised, because a thousand of them are ten million operations. Also the
//! flags of all builds whose threads and clocks are those of a simulated world.
//!
//! Owns the commands only: the simulation parses the arguments.

use std::path::Path;

use crate::command::{Command, CommandError};

/// A simulated world replaces locks and clocks of the whole build. With assertions and mutations, which debug builds have; and
/// with the settings of tokio that are not stable yet, because one of them is the seed of the choices of `select!`.
const FLAGS: &str = "--cfg sim --cfg tokio_unstable -C debug-assertions";

/// Runs the simulation with these words.
pub(crate) fn run(root: &Path, target_dir: &str, words: &[String]) -> Result<(), CommandError> {
    command(target_dir, words).run(root)
}

/// A command of cargo that builds for simulated worlds, in a target directory of its own.
pub(crate) fn build(command: Command, target_dir: &str) -> Command {
    command
        .env("RUSTFLAGS", FLAGS)
        .env("RUSTDOCFLAGS", FLAGS)
        .env("CARGO_TARGET_DIR", &format!("{target_dir}/sim"))
}

fn command(target_dir: &str, words: &[String]) -> Command {
    let mut args = vec!["run", "--release", "--quiet", "--package", "moontide-sim", "--"];
    args.extend(words.iter().map(String::as_str));
    build(Command::new("cargo", &args), target_dir)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sim_command_forwards_arguments() {
        let words = ["--seed".to_owned(), "7".to_owned()];
        let line = command("target", &words).to_string();
        assert!(line.ends_with(" cargo run --release --quiet --package moontide-sim -- --seed 7"), "{line}");
        assert!(line.contains("CARGO_TARGET_DIR=target/sim "), "{line}");
    }
}
