//! `cargo xtask`: the commands of this workspace that are more than one call of cargo.
//!
//! Owns the command line and its help. What the commands do lives beside it: [`ci`] runs every check in order,
//! [`tidy`] holds the checks that no compiler makes, [`fuzz`] runs the fuzz targets, [`chaos`] injects faults into a
//! cluster of real processes, [`sim`] simulates one, [`e2e`] runs inference engines on one, [`mutants`] enables bugs that
//! tests must detect, [`retries`] counts the retried tests of a run, [`advisories`] looks for known vulnerabilities,
//! [`quickstart`] runs the first lines of README.md, [`examples`] the programs of `examples/`; [`wheel`] builds the Python
//! package and [`python`] installs and tests it. [`machine`] lists what is installed, [`venv`] creates Python environments,
//! [`elf`] reads programs, [`closure`] lists what they are made of and [`sbom`] writes that down, [`fakedriver`] builds the
//! fake GPU driver of the tests, and [`command`] starts child processes in a known environment.
//!
//! Invariants: nothing here ships; nothing here writes outside the target directory, but for the one file that
//! [`wheel`] names.

#![forbid(unsafe_code)]

mod ci;

mod advisories;
mod chaos;
mod examples;
mod fuzz;
mod mutants;
mod python;
mod quickstart;
mod retries;
mod sim;
mod tidy;
mod wheel;

mod closure;
mod command;
mod e2e;
mod elf;
mod fakedriver;
mod machine;
mod sbom;
mod venv;

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use machine::Machine;

const HELP: &str = "\
cargo xtask: the workspace's own commands

usage: cargo xtask <command> [options]

commands:
  check                what to run between two edits: fmt, tidy, clippy, and the tests that take seconds
  ci                   run every check, in order, and stop at the first failure
      --list           list the steps and what each one is for
      --only <step>    run one step
  tidy                 check what no compiler checks: the direction of dependencies between our crates,
                       paths named in ARCHITECTURE.md, links in every *.md, headers and lengths of sources,
                       the number of `unsafe`
      --unsafe         print the numbers of `unsafe` instead, in the form of xtask/unsafe.md
  fuzz [target]        run all fuzz targets, or one
      --seconds <n>    time for each target (default 60)
  chaos                kill, stop, partition and starve real processes while clients check every read;
                       needs root, and etcd (MOONTIDE_ETCD names it if it is not in the path)
      --minutes <n>    duration (default 10)
      --seconds <n>    duration in seconds
      --seed <n>       repeat the faults of a run (default: drawn, and printed)
      --masters <n>    number of masters (default 3); one needs no etcd
      --slow-disks     syncs of disks take up to a second; needs a temporary directory on a real disk
  sim                  simulate a whole cluster on virtual time, seed by seed, until a guarantee is violated
      --seed <n>       the first seed (default 1)
      --seeds <n>      number of seeds (default 1)
      --seconds <n>    virtual time of each seed until all faults are healed (default 600)
      --threads <n>    seeds in parallel (default: one per core)
      --trace          print every event, of one seed
  mutants              enable mutations, one at a time, and run the tests that must detect them
      --list           list the mutants, their impact on a user, and the test that detects each
      --only <name>    run one
  sbom                 write the bill of materials of the program and the wheel into the target directory
  wheel                build the Python package and check what it requires of a system
      --zig            for systems with glibc 2.28 or later (default)
      --plain          for this machine only, with its own linker
      --out <dir>      output directory (default: wheels, in the target directory)
      --check-free-threaded   also compile for an interpreter without the global lock
  python               install the wheels into clean environments and run their tests there
      --wheel-dir <dir>       directory of the wheels
      --python <versions>     interpreters (default 3.11,3.12)
      --full           all tests on each, not only on the newest
      --torch          the tests that need torch or Triton, and only those; with --full also their long forms
  e2e                  test real inference engines (vLLM, SGLang, LMCache) on the CPU; installs them (4 GB)
      --full           all tests, not only those that take a few minutes
      --only <words>   tests with these words in their names
  help                 print this page

examples:
  cargo xtask check                            before a commit
  cargo xtask ci                               what CI runs
  cargo xtask ci --only clippy                 one step of it
  cargo xtask tidy                             after moving a file or adding a crate
  cargo xtask fuzz                             every target, a minute each
  cargo xtask fuzz <target> --seconds 3600     one target, an hour
  cargo xtask chaos --seconds 60               one minute of faults
  cargo xtask sim --seeds 1000                 ten million operations
  cargo xtask mutants                          whether the tests detect the bugs they are for
  cargo xtask e2e --only sglang                one engine, all its tests
  cargo xtask wheel && cargo xtask python      the Python package, from sources to its tests
";

/// Why a command of ours did not succeed.
#[derive(Debug, thiserror::Error)]
enum XtaskError {
    #[error("{0}\nsee `cargo xtask help`")]
    Usage(String),
    #[error(transparent)]
    Ci(#[from] ci::CiError),
    #[error(transparent)]
    Tidy(#[from] tidy::TidyError),
    #[error(transparent)]
    Fuzz(#[from] fuzz::FuzzError),
    #[error(transparent)]
    Child(#[from] command::CommandError),
    #[error(transparent)]
    Mutants(#[from] mutants::MutantsError),
    #[error(transparent)]
    Wheel(#[from] wheel::WheelError),
    #[error(transparent)]
    Python(#[from] python::PythonError),
    #[error(transparent)]
    E2e(#[from] e2e::E2eError),
    #[error(transparent)]
    Sbom(#[from] sbom::SbomError),
}

/// A command line that was understood.
#[derive(Debug, PartialEq, Eq)]
enum XtaskCommand {
    Help,
    Check,
    Ci { only: Option<ci::Step> },
    CiList,
    Tidy,
    TidyUnsafe,
    Fuzz { target: Option<String>, seconds: u32 },
    Chaos(chaos::Options),
    Sim { args: Vec<String> },
    Mutants(mutants::Options),
    Sbom,
    Wheel(wheel::Options),
    Python(python::Options),
    E2e(e2e::Options),
}

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match parse(&args).and_then(perform) {
        Ok(()) => ExitCode::SUCCESS,
        // `ci` ends with its own table and count, which must stay the last lines.
        Err(XtaskError::Ci(_)) => ExitCode::FAILURE,
        Err(failure) => {
            eprintln!("xtask: {failure}");
            ExitCode::FAILURE
        }
    }
}

fn perform(request: XtaskCommand) -> Result<(), XtaskError> {
    let root = workspace_root();
    match request {
        XtaskCommand::Help => print!("{HELP}"),
        XtaskCommand::CiList => print!("{}", ci::list()),
        XtaskCommand::Check => ci::run(&root, &Machine::probe(&root), ci::Step::CHECK)?,
        XtaskCommand::Ci { only } => {
            let steps = only.as_ref().map_or(ci::Step::ALL, std::slice::from_ref);
            ci::run(&root, &Machine::probe(&root), steps)?;
        }
        XtaskCommand::Tidy => tidy::run(&root)?,
        XtaskCommand::TidyUnsafe => tidy::print_unsafe(&root)?,
        XtaskCommand::Fuzz { target, seconds } => {
            fuzz::run_named(&root, &Machine::probe(&root), target.as_deref(), seconds)?;
        }
        XtaskCommand::Chaos(options) => chaos::run(&root, &options)?,
        XtaskCommand::Sim { args } => sim::run(&root, &args)?,
        XtaskCommand::Mutants(options) => mutants::run(&root, &Machine::probe(&root).target_dir, &options)?,
        XtaskCommand::Sbom => sbom::run(&root, &Machine::probe(&root))?,
        XtaskCommand::Wheel(options) => {
            wheel::run(&root, &Machine::probe(&root), &options)?;
        }
        XtaskCommand::Python(options) => python::run(&root, &Machine::probe(&root), &options)?,
        XtaskCommand::E2e(options) => e2e::run(&root, &Machine::probe(&root), &options)?,
    }
    Ok(())
}

fn parse(args: &[String]) -> Result<XtaskCommand, XtaskError> {
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    match args.as_slice() {
        [] | ["help" | "--help" | "-h", ..] | [_, "--help" | "-h"] => Ok(XtaskCommand::Help),
        ["check"] => Ok(XtaskCommand::Check),
        ["ci"] => Ok(XtaskCommand::Ci { only: None }),
        ["ci", "--list"] => Ok(XtaskCommand::CiList),
        ["ci", "--only", name] => match ci::Step::named(name) {
            Some(step) => Ok(XtaskCommand::Ci { only: Some(step) }),
            None => Err(XtaskError::Usage(format!("no step is called `{name}`; the steps:\n{}", ci::list()))),
        },
        ["tidy"] => Ok(XtaskCommand::Tidy),
        ["tidy", "--unsafe"] => Ok(XtaskCommand::TidyUnsafe),
        ["fuzz", rest @ ..] => parse_fuzz(rest),
        ["chaos", rest @ ..] => parse_chaos(rest),
        ["sim", rest @ ..] => {
            Ok(XtaskCommand::Sim { args: rest.iter().map(|word| (*word).to_owned()).collect() })
        }
        ["mutants"] => Ok(XtaskCommand::Mutants(mutants::Options::default())),
        ["mutants", "--list"] => Ok(XtaskCommand::Mutants(mutants::Options { list: true, only: None })),
        ["mutants", "--only", name] => {
            Ok(XtaskCommand::Mutants(mutants::Options { list: false, only: Some((*name).to_owned()) }))
        }
        ["sbom"] => Ok(XtaskCommand::Sbom),
        ["wheel", rest @ ..] => parse_wheel(rest),
        ["python", rest @ ..] => parse_python(rest),
        ["e2e"] => Ok(XtaskCommand::E2e(e2e::Options::default())),
        ["e2e", "--full"] => Ok(XtaskCommand::E2e(e2e::Options { full: true, only: None })),
        ["e2e", "--only", words] => {
            Ok(XtaskCommand::E2e(e2e::Options { full: false, only: Some((*words).to_owned()) }))
        }
        [command @ ("ci" | "e2e" | "mutants" | "sbom" | "tidy"), rest @ ..] => {
            Err(XtaskError::Usage(format!("`{command}` does not know `{}`", rest.join(" "))))
        }
        [name, ..] => Err(XtaskError::Usage(format!("no command is called `{name}`"))),
    }
}

fn parse_fuzz(mut rest: &[&str]) -> Result<XtaskCommand, XtaskError> {
    let (mut target, mut seconds) = (None, fuzz::LONG_SECONDS);
    loop {
        rest = match rest {
            [] => return Ok(XtaskCommand::Fuzz { target, seconds }),
            ["--seconds", number, tail @ ..] => {
                seconds = number.parse().map_err(|_| {
                    XtaskError::Usage(format!("`--seconds` wants a whole number, not `{number}`"))
                })?;
                tail
            }
            [name, tail @ ..] if target.is_none() && !name.starts_with('-') => {
                target = Some((*name).to_owned());
                tail
            }
            [other, ..] => return Err(XtaskError::Usage(format!("`fuzz` does not know `{other}`"))),
        }
    }
}

fn parse_chaos(mut rest: &[&str]) -> Result<XtaskCommand, XtaskError> {
    let mut options = chaos::Options::default();
    fn number<T: std::str::FromStr>(name: &str, text: &str) -> Result<T, XtaskError> {
        text.parse().map_err(|_| XtaskError::Usage(format!("`{name}` wants a whole number, not `{text}`")))
    }
    loop {
        rest = match rest {
            [] => return Ok(XtaskCommand::Chaos(options)),
            ["--minutes", text, tail @ ..] => {
                options.seconds = 60 * u32::from(number::<u16>("--minutes", text)?);
                tail
            }
            ["--seconds", text, tail @ ..] => {
                options.seconds = number("--seconds", text)?;
                tail
            }
            ["--seed", text, tail @ ..] => {
                options.seed = Some(number("--seed", text)?);
                tail
            }
            ["--masters", text, tail @ ..] => {
                options.masters = number("--masters", text)?;
                tail
            }
            ["--slow-disks", tail @ ..] => {
                options.slow_disks = true;
                tail
            }
            [other, ..] => return Err(XtaskError::Usage(format!("`chaos` does not know `{other}`"))),
        }
    }
}

fn parse_wheel(mut rest: &[&str]) -> Result<XtaskCommand, XtaskError> {
    let mut options = wheel::Options::default();
    loop {
        rest = match rest {
            [] => return Ok(XtaskCommand::Wheel(options)),
            [kind @ ("--zig" | "--plain"), tail @ ..] => {
                options.plain = *kind == "--plain";
                tail
            }
            ["--out", directory, tail @ ..] => {
                options.out = Some((*directory).to_owned());
                tail
            }
            ["--check-free-threaded", tail @ ..] => {
                options.free_threaded = true;
                tail
            }
            [other, ..] => return Err(XtaskError::Usage(format!("`wheel` does not know `{other}`"))),
        }
    }
}

fn parse_python(mut rest: &[&str]) -> Result<XtaskCommand, XtaskError> {
    let mut options = python::Options::default();
    loop {
        rest = match rest {
            [] => return Ok(XtaskCommand::Python(options)),
            ["--wheel-dir", directory, tail @ ..] => {
                options.wheel_dir = Some((*directory).to_owned());
                tail
            }
            ["--python", versions, tail @ ..] => {
                let parsed: Option<Vec<_>> = versions.split(',').map(venv::Version::parse).collect();
                options.versions = parsed.ok_or_else(|| {
                    XtaskError::Usage(format!(
                        "`--python` wants versions such as 3.11,3.12, not `{versions}`"
                    ))
                })?;
                tail
            }
            ["--full", tail @ ..] => {
                options.full = true;
                tail
            }
            ["--torch", tail @ ..] => {
                options.torch = true;
                tail
            }
            [other, ..] => return Err(XtaskError::Usage(format!("`python` does not know `{other}`"))),
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

    fn check(line: &str, expected: Option<XtaskCommand>) {
        let args: Vec<String> = line.split_whitespace().map(str::to_owned).collect();
        assert_eq!(parse(&args).ok(), expected, "{line:?}");
    }

    #[test]
    fn arguments_are_parsed_or_rejected() {
        let fuzz = |target: Option<&str>, seconds| {
            Some(XtaskCommand::Fuzz { target: target.map(str::to_owned), seconds })
        };
        check("", Some(XtaskCommand::Help));
        check("help", Some(XtaskCommand::Help));
        check("ci --help", Some(XtaskCommand::Help));
        check("check", Some(XtaskCommand::Check));
        check("check --only fmt", None);
        check("ci", Some(XtaskCommand::Ci { only: None }));
        check("ci --list", Some(XtaskCommand::CiList));
        check("ci --only clippy", Some(XtaskCommand::Ci { only: ci::Step::named("clippy") }));
        check("ci --only", None);
        check("ci --only nothing", None);
        check("tidy", Some(XtaskCommand::Tidy));
        check("tidy --unsafe", Some(XtaskCommand::TidyUnsafe));
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

        let chaos = |seconds, seed| {
            Some(XtaskCommand::Chaos(chaos::Options { seconds, seed, ..chaos::Options::default() }))
        };
        check("chaos", chaos(chaos::LONG_SECONDS, None));
        check("chaos --minutes 3 --seed 7", chaos(180, Some(7)));
        check("chaos --seconds 60", chaos(60, None));
        let one = chaos::Options { masters: 1, ..chaos::Options::default() };
        check("chaos --masters 1", Some(XtaskCommand::Chaos(one)));
        let slow = chaos::Options { slow_disks: true, ..chaos::Options::default() };
        check("chaos --slow-disks", Some(XtaskCommand::Chaos(slow)));
        check("chaos --minutes many", None);
        check("chaos now", None);

        let words = vec!["--seed".to_owned(), "7".to_owned()];
        check("sim --seed 7", Some(XtaskCommand::Sim { args: words }));
        let mutants = |list, only: Option<&str>| {
            Some(XtaskCommand::Mutants(mutants::Options { list, only: only.map(str::to_owned) }))
        };
        check("mutants", mutants(false, None));
        check("mutants --list", mutants(true, None));
        check("mutants --only x", mutants(false, Some("x")));
        check("mutants --only", None);
        let e2e = |full, only: Option<&str>| {
            Some(XtaskCommand::E2e(e2e::Options { full, only: only.map(str::to_owned) }))
        };
        check("e2e", e2e(false, None));
        check("e2e --full", e2e(true, None));
        check("e2e --only lmcache", e2e(false, Some("lmcache")));
        check("e2e --only", None);

        check("sbom", Some(XtaskCommand::Sbom));
        check("sbom now", None);
        let wheel = |plain, out: Option<&str>, free_threaded| {
            Some(XtaskCommand::Wheel(wheel::Options { plain, out: out.map(str::to_owned), free_threaded }))
        };
        check("wheel", wheel(false, None, false));
        check("wheel --zig", wheel(false, None, false));
        check("wheel --plain --out x", wheel(true, Some("x"), false));
        check("wheel --check-free-threaded", wheel(false, None, true));
        check("wheel --out", None);
        check("wheel now", None);

        let python = |options| Some(XtaskCommand::Python(options));
        check("python", python(python::Options::default()));
        let versions = vec![venv::Version { minor: 11 }, venv::Version { minor: 12 }];
        check(
            "python --python 3.11,3.12 --full",
            python(python::Options { versions, full: true, ..python::Options::default() }),
        );
        let wheel_dir = Some("x".to_owned());
        check(
            "python --wheel-dir x --torch",
            python(python::Options { wheel_dir, torch: true, ..python::Options::default() }),
        );
        check("python --python two", None);
        check("python --python", None);
    }
}
