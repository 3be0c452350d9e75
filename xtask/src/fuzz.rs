//! Runs the fuzz targets under libFuzzer, for the CI step and for `cargo xtask fuzz`.
//!
//! Owns the command line of a fuzz run and its scratch directories. Replaying the stored corpus on stable Rust is not
//! done here: it is part of the ordinary tests.
//!
//! Invariant: the checkout stays clean. libFuzzer writes new inputs into the first corpus directory it is given, so
//! it gets a copy under the target directory; what crashes is written there too. The copy grows from run to run.
//! (cargo-fuzz itself still makes an empty `fuzz/artifacts`, which git ignores.)

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::command::{Command, CommandError};
use crate::machine::Machine;

/// Each target in CI: enough to see that it still runs and that the corpus holds.
pub(crate) const SMOKE_SECONDS: u32 = 10;
/// Each target of `cargo xtask fuzz` when nothing else is asked for.
pub(crate) const LONG_SECONDS: u32 = 60;
/// A target that needs more than this, sanitizer included, has lost a bound.
const RSS_LIMIT_MB: u32 = 4096;

/// Why fuzzing did not succeed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FuzzError {
    #[error("cannot fuzz: {0}")]
    NotPossible(String),
    #[error("no fuzz target is called `{name}`; there are: {known}")]
    UnknownTarget { name: String, known: String },
    #[error("cannot prepare {path}: {source}")]
    Scratch { path: String, source: io::Error },
    #[error("the fuzz targets do not build: {0}")]
    NotBuilt(CommandError),
    #[error(
        "target {target}: {source}\n\
         what crashed is under {artifacts}; once fixed, add it to fuzz/corpus/{target}, which the tests replay"
    )]
    Crashed { target: String, artifacts: String, source: CommandError },
}

/// What keeps this machine from fuzzing, with the remedy; `None` when nothing does.
pub(crate) fn missing_tool(machine: &Machine) -> Option<String> {
    if machine.fuzz_targets.is_empty() {
        Some("there are no targets in fuzz/fuzz_targets".to_owned())
    } else if !machine.has_nightly {
        Some("no nightly toolchain (`rustup toolchain install nightly`)".to_owned())
    } else if !machine.has_cargo_fuzz {
        Some("cargo-fuzz is not installed (`cargo install --locked cargo-fuzz`)".to_owned())
    } else {
        None
    }
}

/// `cargo xtask fuzz`: one target or all of them. A missing tool is an error here, because someone asked.
pub(crate) fn run_named(
    root: &Path,
    machine: &Machine,
    target: Option<&str>,
    seconds: u32,
) -> Result<(), FuzzError> {
    if let Some(obstacle) = missing_tool(machine) {
        return Err(FuzzError::NotPossible(obstacle));
    }
    let targets = chosen(machine, target)?;
    run(root, machine, &targets, seconds)
}

/// Fuzzes each target for `seconds`. Builds all first, then runs as many at once as the machine has cores: a run of
/// libFuzzer has one thread. A single target's output is shown as it comes, the output of several only if they fail.
pub(crate) fn run(root: &Path, machine: &Machine, targets: &[String], seconds: u32) -> Result<(), FuzzError> {
    let build = build_command(targets);
    println!("$ {build}");
    build.run(root).map_err(FuzzError::NotBuilt)?;
    for target in targets {
        FuzzPaths::of(machine, target).prepare(root)?;
    }
    let next = AtomicUsize::new(0);
    let run_until_failure = || {
        while let Some(target) = targets.get(next.fetch_add(1, Ordering::Relaxed)) {
            let paths = FuzzPaths::of(machine, target);
            let command = paths.command(seconds);
            println!("$ {command}");
            let result = if targets.len() == 1 { command.run(root) } else { command.output(root).map(drop) };
            result.map_err(|source| {
                next.store(targets.len(), Ordering::Relaxed);
                FuzzError::Crashed { target: target.clone(), artifacts: paths.artifacts, source }
            })?;
        }
        Ok(())
    };
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        let workers: Vec<_> = (0..cores.min(targets.len())).map(|_| scope.spawn(run_until_failure)).collect();
        workers.into_iter().try_for_each(|worker| worker.join().expect("a worker does not panic"))
    })
}

/// Builds one target, or all if there are several.
fn build_command(targets: &[String]) -> Command {
    let mut args = vec!["+nightly", "fuzz", "build", "--features", "libfuzzer"];
    if let [only] = targets {
        args.push(only);
    }
    Command::new("cargo", &args)
}

fn chosen(machine: &Machine, target: Option<&str>) -> Result<Vec<String>, FuzzError> {
    match target {
        None => Ok(machine.fuzz_targets.clone()),
        Some(name) if machine.fuzz_targets.iter().any(|known| known == name) => Ok(vec![name.to_owned()]),
        Some(name) => {
            Err(FuzzError::UnknownTarget { name: name.to_owned(), known: machine.fuzz_targets.join(", ") })
        }
    }
}

/// Where one target reads and writes; paths start at the workspace root.
struct FuzzPaths {
    target: String,
    seeds: String,
    corpus: String,
    artifacts: String,
}

impl FuzzPaths {
    fn of(machine: &Machine, target: &str) -> Self {
        Self {
            target: target.to_owned(),
            seeds: format!("fuzz/corpus/{target}"),
            corpus: format!("{}/fuzz/corpus/{target}", machine.target_dir),
            artifacts: format!("{}/fuzz/artifacts/{target}/", machine.target_dir),
        }
    }

    fn command(&self, seconds: u32) -> Command {
        let Self { target, corpus, artifacts, .. } = self;
        Command::new(
            "cargo",
            &[
                "+nightly",
                "fuzz",
                "run",
                "--features",
                "libfuzzer",
                target,
                corpus,
                "--",
                &format!("-max_total_time={seconds}"),
                &format!("-rss_limit_mb={RSS_LIMIT_MB}"),
                &format!("-artifact_prefix={artifacts}"),
            ],
        )
    }

    /// Makes the scratch directories and copies the stored corpus over what earlier runs have found.
    fn prepare(&self, root: &Path) -> Result<(), FuzzError> {
        let scratch = |path: &str, source| FuzzError::Scratch { path: path.to_owned(), source };
        for directory in [&self.corpus, &self.artifacts] {
            std::fs::create_dir_all(root.join(directory)).map_err(|source| scratch(directory, source))?;
        }
        let seeds = root.join(&self.seeds);
        if seeds.is_dir() {
            copy_files(&seeds, &root.join(&self.corpus)).map_err(|source| scratch(&self.corpus, source))?;
        }
        Ok(())
    }
}

fn copy_files(source: &Path, target: &Path) -> io::Result<()> {
    for entry in std::fs::read_dir(source)? {
        let entry = entry?;
        if entry.file_type()?.is_file() {
            std::fs::copy(entry.path(), target.join(entry.file_name()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Machine {
        Machine {
            has_nextest: true,
            has_nightly: true,
            has_cargo_fuzz: true,
            has_cargo_deny: true,
            has_namespaces: true,
            has_etcd: true,
            interpreters: Vec::new(),
            is_ci: false,
            target_dir: "target".to_owned(),
            fuzz_targets: vec!["frame".to_owned(), "record".to_owned()],
        }
    }

    #[test]
    fn fuzz_command_uses_copy_of_corpus() {
        assert_eq!(
            FuzzPaths::of(&machine(), "frame").command(10).to_string(),
            "cargo +nightly fuzz run --features libfuzzer frame target/fuzz/corpus/frame -- \
             -max_total_time=10 -rss_limit_mb=4096 -artifact_prefix=target/fuzz/artifacts/frame/"
        );
    }

    #[test]
    fn one_target_is_built_alone() {
        let frame = "frame".to_owned();
        assert_eq!(
            build_command(std::slice::from_ref(&frame)).to_string(),
            "cargo +nightly fuzz build --features libfuzzer frame"
        );
        assert_eq!(
            build_command(&[frame, "record".to_owned()]).to_string(),
            "cargo +nightly fuzz build --features libfuzzer"
        );
    }

    #[test]
    fn prepare_copies_seeds_and_keeps_earlier_corpus() {
        let root = std::env::temp_dir().join(format!("moontide-xtask-fuzz-{}", std::process::id()));
        let place = FuzzPaths::of(&machine(), "frame");
        std::fs::create_dir_all(root.join(&place.seeds)).unwrap();
        std::fs::create_dir_all(root.join(&place.corpus)).unwrap();
        std::fs::write(root.join(&place.seeds).join("seed"), b"a").unwrap();
        std::fs::write(root.join(&place.corpus).join("found"), b"b").unwrap();

        place.prepare(&root).unwrap();

        assert_eq!(std::fs::read(root.join(&place.corpus).join("seed")).unwrap(), b"a");
        assert_eq!(std::fs::read(root.join(&place.corpus).join("found")).unwrap(), b"b");
        assert_eq!(std::fs::read_dir(root.join(&place.seeds)).unwrap().count(), 1);
        std::fs::remove_dir_all(root).unwrap();
    }

    #[test]
    fn missing_tool_message_names_remedy() {
        assert_eq!(missing_tool(&machine()), None);
        let without_nightly = Machine { has_nightly: false, ..machine() };
        assert!(missing_tool(&without_nightly).unwrap().contains("rustup toolchain install nightly"));
        let without_tool = Machine { has_cargo_fuzz: false, ..machine() };
        assert!(missing_tool(&without_tool).unwrap().contains("cargo install --locked cargo-fuzz"));
        let without_targets = Machine { fuzz_targets: Vec::new(), ..machine() };
        assert!(missing_tool(&without_targets).unwrap().contains("fuzz/fuzz_targets"));
    }

    #[test]
    fn unknown_target_error_lists_available_targets() {
        assert_eq!(chosen(&machine(), None).unwrap(), ["frame", "record"]);
        assert_eq!(chosen(&machine(), Some("record")).unwrap(), ["record"]);
        let error = chosen(&machine(), Some("recrod")).unwrap_err().to_string();
        assert!(error.contains("frame, record"), "{error}");
    }
}
