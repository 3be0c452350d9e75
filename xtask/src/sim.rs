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
pub(crate) fn run(root: &Path, words: &[String]) -> Result<(), CommandError> {
    command(words).run(root)
}

/// Tests with the words of `what` in simulated worlds. Little optimised: what CI runs takes a minute or two of CPU time even so, and
/// to compile with all optimisations would take several more.
pub(crate) fn tests(what: &str) -> Command {
    build("test", &format!("{what} --locked"), " -C opt-level=1")
}

fn command(words: &[String]) -> Command {
    words.iter().fold(build("run", "--quiet --locked --package moontide-sim --", ""), |command, word| {
        command.arg(word)
    })
}

/// A build for simulated worlds. With a target, even if it is that of the machine, the flags are not for build scripts and
/// procedural macros: those, and what they depend on, are the same as in other release builds. Cargo keeps builds with other
/// flags apart.
fn build(subcommand: &str, what: &str, more_flags: &str) -> Command {
    let flags = format!("{FLAGS}{more_flags}");
    Command::cargo(&format!("{subcommand} --release --target host-tuple {what}"))
        .env("RUSTFLAGS", &flags)
        .env("RUSTDOCFLAGS", &flags)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sim_command_forwards_arguments() {
        let words = ["--seed".to_owned(), "7".to_owned()];
        let line = command(&words).to_string();
        assert!(
            line.ends_with(
                " cargo run --release --target host-tuple --quiet --locked --package moontide-sim -- --seed 7"
            ),
            "{line}"
        );
    }
}
