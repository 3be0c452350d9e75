//! The programs of `examples/` that need no wheel: those in Rust and the shell scripts, run as a user would run them.
//!
//! Owns which programs run, with which arguments, and the development cluster that the Rust programs connect to. The
//! Python programs run with the installed wheel in [`crate::python`]; the tests of `moontide-cli` check the
//! configuration files.
//!
//! Invariant: a program decides itself whether its results are right. Nothing here looks at its output.

use std::path::Path;

use crate::command::{Command, CommandError};
use crate::machine::Machine;

/// The Rust programs, in the order in which they run, with their arguments.
const PROGRAMS: &[(&str, &str)] = &[
    ("put_get", ""),
    ("zero_copy", ""),
    ("batch_get", ""),
    ("invalidations", ""),
    ("decode", "first"),
    ("decode", "again"),
];

/// The shell scripts; each starts its own cluster.
const SCRIPTS: &[&str] = &["cluster.sh"];

/// For all programs together; each takes seconds.
const TIME_MAX: &str = "300";

/// All programs are built as parts of the workspace, so that the libraries of the test step are used again.
const BUILD: &str = "build --workspace --bin moontide --examples --locked";

/// Before the Rust programs: a cluster on free ports, which the programs find by `MOONTIDE_MASTER`.
const START: &str = r#"set -euo pipefail
lines=$(mktemp)
moontide dev --port-base 0 --memory 256MiB >"$lines" &
cluster=$!
trap 'kill $cluster 2>/dev/null || true; rm -f "$lines"' EXIT
for attempt in $(seq 300); do grep -q '^ready$' "$lines" && break; sleep 0.1; done
export MOONTIDE_MASTER=$(awk '$1 == "grpc" {print $2}' "$lines")
"#;

/// After them: the cluster must still run, and exit cleanly.
const STOP: &str = "kill $cluster\nwait $cluster\n";

/// Builds and runs the programs.
pub(crate) fn run(root: &Path, machine: &Machine) -> Result<(), CommandError> {
    let build = Command::cargo(BUILD);
    println!("$ {build}");
    build.run(root)?;

    let script = script(&root.join(&machine.target_dir).join("debug").to_string_lossy());
    println!("{script}");
    Command::new("timeout", &[TIME_MAX, "bash", "-c", &script]).run(root)
}

/// The commands of all programs, which are in `folder` and its subfolder `examples`.
fn script(folder: &str) -> String {
    let programs =
        PROGRAMS.iter().map(|(name, arguments)| format!("{name} {arguments}").trim_end().to_owned());
    let scripts = SCRIPTS.iter().map(|name| format!("env -u MOONTIDE_MASTER examples/shell/{name}"));
    let lines: String = programs.chain(scripts).map(|line| format!("{line}\n")).collect();
    format!("export PATH='{folder}:{folder}/examples':\"$PATH\"\n{START}{lines}{STOP}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Longer programs: whole engines, which show several parts together.
    const LONG: &[&str] = &["rust/decode.rs", "python/decode.py", "python/experts.py"];
    /// Longest small program.
    const LINES_MAX: usize = 80;

    /// Files of `examples/`, as "folder/name", with their text.
    fn files() -> Vec<(String, String)> {
        let examples = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().join("examples");
        let mut files = vec![];
        for folder in ["config", "python", "rust", "shell"] {
            for entry in std::fs::read_dir(examples.join(folder)).unwrap() {
                let entry = entry.unwrap();
                if entry.file_type().unwrap().is_file() {
                    let text = std::fs::read_to_string(entry.path()).unwrap();
                    files.push((format!("{folder}/{}", entry.file_name().to_str().unwrap()), text));
                }
            }
        }
        assert!(files.len() >= 12, "{files:?}");
        files
    }

    #[test]
    fn every_rust_and_shell_example_runs() {
        let mut found: Vec<String> = files().into_iter().map(|(path, _)| path).collect();
        found.retain(|path| path.starts_with("rust/") || path.starts_with("shell/"));
        found.sort();
        let programs = PROGRAMS.iter().map(|(name, _)| format!("rust/{name}.rs"));
        let mut expected: Vec<String> =
            programs.chain(SCRIPTS.iter().map(|name| format!("shell/{name}"))).collect();
        expected.sort();
        expected.dedup();
        assert_eq!(found, expected);
    }

    #[test]
    fn every_example_is_short_and_listed_in_its_readme() {
        let readme = include_str!("../../examples/README.md");
        for (path, text) in files() {
            assert!(readme.contains(&format!("]({path})")), "examples/README.md does not list {path}");
            let lines = text.lines().count();
            assert!(lines <= LINES_MAX || LONG.contains(&path.as_str()), "{path} has {lines} lines");
        }
    }

    #[test]
    fn programs_run_between_start_and_end_of_their_cluster() {
        let script = script("/x/debug");
        let at = |part: &str| script.find(part).unwrap_or_else(|| panic!("{part} is not in\n{script}"));
        assert!(script.starts_with("export PATH='/x/debug:/x/debug/examples':\"$PATH\"\n"));
        let order =
            ["moontide dev", "\nput_get\n", "\ndecode first\n", "\ndecode again\n", "cluster.sh\n", STOP];
        assert!(order.map(at).is_sorted());
    }
}
