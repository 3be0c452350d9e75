//! `cargo xtask`: the commands of this workspace that are more than one call of cargo.
//!
//! Owns the command line and its help. What the commands do lives beside it: [`ci`] runs every check in order,
//! [`tidy`] holds the checks that no compiler makes, [`fuzz`] runs the fuzz targets,
//! [`quickstart`] the first lines of README.md; [`machine`] knows
//! what is installed, and [`command`] starts child processes in a known environment.
//!
//! Invariants: nothing here ships; nothing here writes outside the target directory.

mod ci;

mod fuzz;
mod quickstart;
mod tidy;

mod command;
mod machine;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use machine::Machine;

const HELP: &str = "\
cargo xtask: the workspace's own commands

usage: cargo xtask <command> [options]

commands:
  ci                   run every check, in order, and stop at the first failure
      --list           list the steps and what each one is for
      --only <step>    run one step
  tidy                 check what no compiler checks: the direction of dependencies between our crates,
                       paths named in ARCHITECTURE.md, links in every *.md, headers and lengths of sources
  fuzz [target]        run all fuzz targets, or one
      --seconds <n>    time for each target (default 60)
  help                 print this page

examples:
  cargo xtask ci                               what CI runs
  cargo xtask ci --only clippy                 one step of it
  cargo xtask tidy                             after moving a file or adding a crate
  cargo xtask fuzz                             every target, a minute each
  cargo xtask fuzz <target> --seconds 3600     one target, an hour
";

/// Why a command of ours did not succeed.
#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error("{0}\nsee `cargo xtask help`")]
    Usage(String),
    #[error(transparent)]
    Ci(#[from] ci::CiError),
    #[error(transparent)]
    Tidy(#[from] tidy::TidyError),
    #[error(transparent)]
    Fuzz(#[from] fuzz::FuzzError),
}

/// A command line that was understood.
#[derive(Debug, PartialEq, Eq)]
enum Request {
    Help,
    Ci { only: Option<ci::Step> },
    CiList,
    Tidy,
    Fuzz { target: Option<String>, seconds: u32 },
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match parse(&args).and_then(perform) {
        Ok(()) => ExitCode::SUCCESS,
        // `ci` ends with its own table and count, which must stay the last lines.
        Err(Failure::Ci(_)) => ExitCode::FAILURE,
        Err(failure) => {
            eprintln!("xtask: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn perform(request: Request) -> Result<(), Failure> {
    let root = workspace_root();
    match request {
        Request::Help => print!("{HELP}"),
        Request::CiList => print!("{}", ci::list()),
        Request::Ci { only } => ci::run(&root, &Machine::probe(&root), only)?,
        Request::Tidy => tidy::run(&root)?,
        Request::Fuzz { target, seconds } => {
            fuzz::run_named(&root, &Machine::probe(&root), target.as_deref(), seconds)?;
        }
    }
    Ok(())
}

fn parse(args: &[String]) -> Result<Request, Failure> {
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args.as_slice() {
        [] | ["help" | "--help" | "-h", ..] | [_, "--help" | "-h"] => Ok(Request::Help),
        ["ci"] => Ok(Request::Ci { only: None }),
        ["ci", "--list"] => Ok(Request::CiList),
        ["ci", "--only", name] => match ci::Step::named(name) {
            Some(step) => Ok(Request::Ci { only: Some(step) }),
            None => Err(Failure::Usage(format!("no step is called `{name}`; the steps:\n{}", ci::list()))),
        },
        ["tidy"] => Ok(Request::Tidy),
        ["fuzz", rest @ ..] => parse_fuzz(rest),
        [command @ ("ci" | "tidy"), rest @ ..] => {
            Err(Failure::Usage(format!("`{command}` does not know `{}`", rest.join(" "))))
        }
        [name, ..] => Err(Failure::Usage(format!("no command is called `{name}`"))),
    }
}

fn parse_fuzz(mut rest: &[&str]) -> Result<Request, Failure> {
    let (mut target, mut seconds) = (None, fuzz::LONG_SECONDS);
    loop {
        rest = match rest {
            [] => return Ok(Request::Fuzz { target, seconds }),
            ["--seconds", number, tail @ ..] => {
                seconds = number.parse().map_err(|_| {
                    Failure::Usage(format!("`--seconds` wants a whole number, not `{number}`"))
                })?;
                tail
            }
            [name, tail @ ..] if target.is_none() && !name.starts_with('-') => {
                target = Some((*name).to_owned());
                tail
            }
            [other, ..] => return Err(Failure::Usage(format!("`fuzz` does not know `{other}`"))),
        }
    }
}

/// The checkout that this xtask belongs to.
///
/// Asked at run time first, because a binary in a shared target directory may have been built by another checkout.
fn workspace_root() -> PathBuf {
    let manifest_dir = std::env::var_os("CARGO_MANIFEST_DIR")
        .map_or_else(|| PathBuf::from(env!("CARGO_MANIFEST_DIR")), PathBuf::from);
    manifest_dir.parent().map_or(manifest_dir.clone(), Path::to_path_buf)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(line: &str, expected: Option<Request>) {
        let args: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        assert_eq!(parse(&args).ok(), expected, "{line:?}");
    }

    #[test]
    fn command_lines_are_understood_or_refused() {
        let fuzz = |target: Option<&str>, seconds| {
            Some(Request::Fuzz { target: target.map(str::to_owned), seconds })
        };
        check("", Some(Request::Help));
        check("help", Some(Request::Help));
        check("ci --help", Some(Request::Help));
        check("ci", Some(Request::Ci { only: None }));
        check("ci --list", Some(Request::CiList));
        check("ci --only clippy", Some(Request::Ci { only: ci::Step::named("clippy") }));
        check("ci --only", None);
        check("ci --only nothing", None);
        check("tidy", Some(Request::Tidy));
        check("tidy now", None);
        check("fuzz", fuzz(None, fuzz::LONG_SECONDS));
        check("fuzz frame", fuzz(Some("frame"), fuzz::LONG_SECONDS));
        check("fuzz --seconds 5", fuzz(None, 5));
        check("fuzz frame --seconds 5", fuzz(Some("frame"), 5));
        check("fuzz --seconds 5 frame", fuzz(Some("frame"), 5));
        check("fuzz --seconds soon", None);
        check("fuzz frame record", None);
        check("fuzz --forever", None);
        check("deploy", None);
    }
}
