//! `moontide completions`: what a shell needs to complete our flags.

use std::io::Write;

use clap::{ArgMatches, Args as ClapArgs, Command, FromArgMatches};
use clap_complete::Shell;

use super::{Failure, written};

const EXAMPLES: &str = "\
Examples:
  moontide completions bash > ~/.local/share/bash-completion/completions/moontide
  moontide completions zsh > ~/.zfunc/_moontide
  moontide completions fish > ~/.config/fish/completions/moontide.fish";

/// For whom.
#[derive(Debug, ClapArgs)]
struct Args {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

pub(crate) fn command() -> Command {
    let completions = Command::new("completions");
    // After the arguments, whose own description would stand in its place.
    Args::augment_args(completions)
        .about("Print a script that completes our flags in a shell")
        .after_help(EXAMPLES)
}

pub(crate) fn run(matches: &ArgMatches, mut whole: Command) -> Result<(), Failure> {
    let args = Args::from_arg_matches(matches).map_err(Failure::usage)?;
    let mut script = vec![];
    clap_complete::generate(args.shell, &mut whole, "moontide", &mut script);
    written(std::io::stdout().write_all(&script))
}
