//! `moontide completions`: completion scripts for shells.

use std::io::Write;

use clap::{ArgMatches, Args as ClapArgs, Command, FromArgMatches};
use clap_complete::Shell;

use super::{CommandError, ignore_broken_pipe};

const EXAMPLES: &str = "\
Examples:
  moontide completions bash > ~/.local/share/bash-completion/completions/moontide
  moontide completions zsh > ~/.zfunc/_moontide
  moontide completions fish > ~/.config/fish/completions/moontide.fish";

#[derive(Debug, ClapArgs)]
struct Args {
    /// Shell to complete for
    #[arg(value_enum)]
    shell: Shell,
}

pub(crate) fn command() -> Command {
    let completions = Command::new("completions");
    // Set after the arguments: the doc comment of the struct would replace it otherwise.
    Args::augment_args(completions).about("Print a shell completion script").after_help(EXAMPLES)
}

pub(crate) fn run(matches: &ArgMatches, mut whole: Command) -> Result<(), CommandError> {
    let args = Args::from_arg_matches(matches).map_err(CommandError::usage)?;
    let mut script = vec![];
    clap_complete::generate(args.shell, &mut whole, "moontide", &mut script);
    ignore_broken_pipe(std::io::stdout().write_all(&script))
}
