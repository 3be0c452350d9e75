//! Child processes in a known environment.
//!
//! Owns [`Command`]: what is printed is what runs, from the workspace root, with output inherited.
//!
//! Invariant: a child sees compiler flags only if its [`Command`] names them. `cargo run` also leaves variables about
//! the xtask package behind; build scripts that watch those would build again each time, so they are taken away.

use std::fmt;
use std::path::Path;
use std::process::{self, ExitStatus, Stdio};

/// Variables of the caller that change what cargo builds, and the one that names a cargo without `+toolchain`.
const NOT_INHERITED: &[&str] = &[
    "CARGO",
    "CARGO_BUILD_RUSTC_WORKSPACE_WRAPPER",
    "CARGO_BUILD_RUSTFLAGS",
    "CARGO_CRATE_NAME",
    "CARGO_ENCODED_RUSTDOCFLAGS",
    "CARGO_ENCODED_RUSTFLAGS",
    "CARGO_PRIMARY_PACKAGE",
    "OUT_DIR",
    "RUSTC_WORKSPACE_WRAPPER",
    "RUSTDOCFLAGS",
    "RUSTFLAGS",
];
const NOT_INHERITED_PREFIXES: &[&str] = &["CARGO_BIN_", "CARGO_MANIFEST_", "CARGO_PKG_"];

/// One child process, not yet started.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Command {
    env: Vec<(String, String)>,
    program: String,
    args: Vec<String>,
}

/// Why a child process did not do its work.
#[derive(Debug, thiserror::Error)]
pub(crate) enum CommandError {
    #[error("cannot start `{command}`: {source}")]
    NotStarted { command: String, source: std::io::Error },
    #[error("`{command}` ended with {status}{}", indent(.stderr))]
    Failed { command: String, status: ExitStatus, stderr: String },
}

impl Command {
    pub(crate) fn new(program: &str, args: &[&str]) -> Self {
        let args = args.iter().map(|arg| (*arg).to_owned()).collect();
        Self { env: Vec::new(), program: program.to_owned(), args }
    }

    /// `cargo` followed by the words of `line`.
    pub(crate) fn cargo(line: &str) -> Self {
        Self::new("cargo", &line.split_whitespace().collect::<Vec<_>>())
    }

    #[must_use]
    pub(crate) fn arg(mut self, word: &str) -> Self {
        self.args.push(word.to_owned());
        self
    }

    #[must_use]
    pub(crate) fn env(mut self, name: &str, value: &str) -> Self {
        self.env.push((name.to_owned(), value.to_owned()));
        self
    }

    /// Runs to the end with output inherited.
    pub(crate) fn run(&self, root: &Path) -> Result<(), CommandError> {
        let status = self.prepare(root).status().map_err(|source| self.not_started(source))?;
        if status.success() { Ok(()) } else { Err(self.failed(status, String::new())) }
    }

    /// Runs to the end and returns what it printed.
    pub(crate) fn output(&self, root: &Path) -> Result<String, CommandError> {
        let output = self.prepare(root).output().map_err(|source| self.not_started(source))?;
        if output.status.success() {
            Ok(String::from_utf8_lossy(&output.stdout).into_owned())
        } else {
            Err(self.failed(output.status, String::from_utf8_lossy(&output.stderr).into_owned()))
        }
    }

    /// Whether it runs and succeeds; prints nothing.
    pub(crate) fn succeeds(&self, root: &Path) -> bool {
        let mut child = self.prepare(root);
        child.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
        child.status().is_ok_and(|status| status.success())
    }

    fn prepare(&self, root: &Path) -> process::Command {
        let mut child = process::Command::new(&self.program);
        for (name, _) in std::env::vars_os() {
            if name.to_str().is_some_and(|name| !is_inherited(name)) {
                child.env_remove(name);
            }
        }
        child.args(&self.args).envs(self.env.iter().map(|(name, value)| (name, value))).current_dir(root);
        child
    }

    fn not_started(&self, source: std::io::Error) -> CommandError {
        CommandError::NotStarted { command: self.to_string(), source }
    }

    fn failed(&self, status: ExitStatus, stderr: String) -> CommandError {
        CommandError::Failed { command: self.to_string(), status, stderr }
    }
}

/// The line that a person can paste into a shell.
impl fmt::Display for Command {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, value) in &self.env {
            write!(f, "{name}={} ", quoted(value))?;
        }
        write!(f, "{}", self.program)?;
        self.args.iter().try_for_each(|arg| write!(f, " {}", quoted(arg)))
    }
}

fn quoted(word: &str) -> String {
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_=+./,:".contains(c);
    if !word.is_empty() && word.chars().all(plain) { word.to_owned() } else { format!("\"{word}\"") }
}

fn indent(stderr: &str) -> String {
    stderr.trim_end().lines().map(|line| format!("\n    {line}")).collect()
}

fn is_inherited(name: &str) -> bool {
    !NOT_INHERITED.contains(&name) && !NOT_INHERITED_PREFIXES.iter().any(|prefix| name.starts_with(prefix))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn command_displays_in_shell_syntax() {
        let command = Command::cargo("test --release -p moontide-heap").env("RUSTFLAGS", "--cfg loom");
        assert_eq!(command.to_string(), "RUSTFLAGS=\"--cfg loom\" cargo test --release -p moontide-heap");
    }

    #[test]
    fn caller_flags_and_package_variables_are_not_inherited() {
        for name in ["RUSTFLAGS", "CARGO_PKG_NAME", "CARGO_MANIFEST_DIR", "CARGO"] {
            assert!(!is_inherited(name), "{name}");
        }
        for name in ["PATH", "CARGO_HOME", "CARGO_TARGET_DIR", "CARGO_INCREMENTAL", "RUSTUP_TOOLCHAIN"] {
            assert!(is_inherited(name), "{name}");
        }
    }

    #[test]
    fn child_receives_environment_of_its_command() {
        let command = Command::new("sh", &["-c", "printf %s \"$RUSTFLAGS\""]).env("RUSTFLAGS", "--cfg loom");
        assert_eq!(command.output(Path::new("/")).unwrap(), "--cfg loom");
    }

    #[test]
    fn failing_child_returns_error_with_stderr() {
        let command = Command::new("sh", &["-c", "echo broken >&2; exit 3"]);
        assert!(command.output(Path::new("/")).unwrap_err().to_string().contains("broken"));
        assert!(command.run(Path::new("/")).is_err());
        assert!(!command.succeeds(Path::new("/")));
    }
}
