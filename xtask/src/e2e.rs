//! `cargo xtask e2e`: real inference engines on the CPU, which find each other's KV caches through a cluster.
//!
//! Owns how the engines' environment is made, and the package put into it; what is tested stands in `python/e2e`.
//!
//! Invariant: what is tested is the wheel, as it would be installed by others.

use std::path::Path;

use crate::command::{Command, CommandError};
use crate::fakedriver;
use crate::machine::Machine;
use crate::venv::{Venv, Version};
use crate::wheel::{self, WheelError, Wheels};

/// The engines' wheels are for this one.
const PYTHON: Version = Version { minor: 12 };

/// What is wanted.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Options {
    /// All tests, not only those that take a few minutes.
    pub(crate) full: bool,
    /// Only those whose names have this in them, as pytest understands it.
    pub(crate) only: Option<String>,
}

/// Why it was not shown.
#[derive(Debug, thiserror::Error)]
pub(crate) enum E2eError {
    #[error("there is no Python {PYTHON} here with venv and pip, for which the engines' wheels are made")]
    NoInterpreter,
    #[error(transparent)]
    Wheel(#[from] WheelError),
    #[error(transparent)]
    Command(#[from] CommandError),
}

/// Installs the engines, if they are not there yet, and the package, and runs the tests.
pub(crate) fn run(root: &Path, machine: &Machine, options: &Options) -> Result<(), E2eError> {
    let interpreter = machine.interpreters.iter().find(|python| python.version == PYTHON);
    let python = &interpreter.ok_or(E2eError::NoInterpreter)?.program;
    let Wheels { moontide, compat } = wheel::run(root, machine, &wheel::Options::default())?;
    let engines = root.join(&machine.target_dir).join("engines");
    let folder = engines.to_string_lossy();
    let driver = fakedriver::build(root, machine)?;
    for command in [
        Command::new(python, &["-B", "python/e2e/install.py", &folder]),
        install(&engines, &moontide, &compat),
        pytest(root, &engines, options, &driver),
    ] {
        println!("$ {command}");
        command.run(root)?;
    }
    Ok(())
}

fn install(engines: &Path, moontide: &Path, compat: &Path) -> Command {
    let python = Venv::existing(engines.join("venv")).path("bin/python");
    let (moontide, compat) = (moontide.to_string_lossy(), compat.to_string_lossy());
    let words =
        ["pip", "install", "-q", "--no-deps", "--force-reinstall", "--python", &python, &moontide, &compat];
    Command::new(&Venv::existing(engines.join("tools")).path("bin/uv"), &words)
}

fn pytest(root: &Path, engines: &Path, options: &Options, driver: &str) -> Command {
    let venv = Venv::existing(engines.join("venv"));
    let mut words = vec!["-B", "-m", "pytest", "python/e2e", "-v", "-s", "-p", "no:cacheprovider"];
    if !options.full && options.only.is_none() {
        words.extend(["-m", "short"]);
    }
    if let Some(only) = &options.only {
        words.extend(["-k", only]);
    }
    // SGLang calls programs of its environment by name; the shim lets it run where there is no GPU.
    let path = format!("{}:{}", venv.path("bin"), std::env::var("PATH").unwrap_or_default());
    let shim = root.join("python/e2e/shim").to_string_lossy().into_owned();
    Command::new(&venv.path("bin/python"), &words)
        .env("PATH", &path)
        .env("PYTHONPATH", &shim)
        .env(fakedriver::VARIABLE, driver)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_short_tests_run_by_default() {
        let line = |options: &Options| {
            pytest(Path::new("/w"), Path::new("/w/target/engines"), options, "/w/fake.so").to_string()
        };
        assert!(line(&Options::default()).contains("-m short"));
        assert!(line(&Options::default()).contains("PYTHONPATH=/w/python/e2e/shim"));
        assert!(!line(&Options { full: true, only: None }).contains("short"));
        let one = line(&Options { full: false, only: Some("salt".to_owned()) });
        assert!(one.contains("-k salt") && !one.contains("short"), "{one}");
    }
}
