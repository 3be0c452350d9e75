//! `cargo xtask sim`: many seeds of the simulation, optimised, because a thousand of them are ten million operations.
//!
//! Owns the command only: the simulation parses the arguments.

use std::path::Path;

use crate::command::{Command, CommandError};

/// Runs the simulation with these words.
pub(crate) fn run(root: &Path, words: &[String]) -> Result<(), CommandError> {
    command(words).run(root)
}

fn command(words: &[String]) -> Command {
    let mut args = vec!["run", "--release", "--quiet", "--package", "moontide-sim", "--"];
    args.extend(words.iter().map(String::as_str));
    Command::new("cargo", &args)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sim_command_forwards_arguments() {
        let words = ["--seed".to_owned(), "7".to_owned()];
        let line = command(&words).to_string();
        assert_eq!(line, "cargo run --release --quiet --package moontide-sim -- --seed 7");
    }
}
