//! `moontide doctor`: checks this host's capabilities and suggests fixes.
//!
//! | file | content |
//! |---|---|
//! | `system` | kernel, processor, limits, clock |
//! | `memory` | memory, shared memory, locked memory, huge pages |
//! | `io` | io_uring and direct I/O |
//! | `network` | loopback, ports, the master, RDMA |
//! | `devices` | UCX and GPUs |
//! | `uring_probe` | the only call that needs `unsafe` |
//!
//! Checks try an operation where that is harmless, instead of guessing. A check never fails: a missing answer of the
//! kernel is a result, too. Only the requirements of basic use (TCP and memory) determine the exit code.

mod devices;
mod io;
mod memory;
mod network;
mod system;
mod uring_probe;

use std::io::Write;

use clap::{ArgMatches, Args as ClapArgs, Command, FromArgMatches};
use moontide_auth::Credentials;
use serde_json::{Value, json};

use super::{CommandError, ignore_broken_pipe};
use crate::settings::CertificateArgs;

const EXAMPLES: &str = "\
Examples:
  moontide doctor                           one line per check, with hints
  moontide doctor --json | jq .checks       as one JSON object
  moontide doctor --master master-0:7400    also check a master on another host

States: ok, limited (works, with restrictions), missing (not available; optional unless it is marked needed).
Exit codes: 0 basic use (TCP and memory) works, 1 it does not, 2 wrong usage.";

#[derive(Debug, ClapArgs)]
struct Args {
    /// Address of a master to check, host:port
    #[arg(long, env = "MOONTIDE_MASTER", default_value = "127.0.0.1:7400")]
    master: String,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    certificate: CertificateArgs,
}

/// Result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum CheckState {
    /// Works without restrictions.
    Ok,
    /// Works, with restrictions.
    Limited,
    /// Not available.
    Missing,
}

impl CheckState {
    fn name(self) -> &'static str {
        match self {
            CheckState::Ok => "ok",
            CheckState::Limited => "limited",
            CheckState::Missing => "missing",
        }
    }
}

/// A check of one capability of the host.
#[derive(Clone, Debug)]
struct Check {
    name: &'static str,
    state: CheckState,
    /// Basic use (TCP and memory) requires it.
    needed: bool,
    detail: String,
    /// Suggested fix; `None` exactly if the state is `Ok`.
    hint: Option<String>,
}

impl Check {
    fn new(name: &'static str, state: CheckState, detail: impl Into<String>) -> Check {
        Check { name, state, needed: false, detail: detail.into(), hint: None }
    }

    fn ok(name: &'static str, detail: impl Into<String>) -> Check {
        Check::new(name, CheckState::Ok, detail)
    }

    fn limited(name: &'static str, detail: impl Into<String>, hint: impl Into<String>) -> Check {
        Check { hint: Some(hint.into()), ..Check::new(name, CheckState::Limited, detail) }
    }

    fn missing(name: &'static str, detail: impl Into<String>, hint: impl Into<String>) -> Check {
        Check { hint: Some(hint.into()), ..Check::new(name, CheckState::Missing, detail) }
    }

    fn needed(self) -> Check {
        Check { needed: true, ..self }
    }

    fn is_broken(&self) -> bool {
        self.needed && self.state == CheckState::Missing
    }

    fn to_json(&self) -> Value {
        json!({
            "name": self.name,
            "state": self.state.name(),
            "needed": self.needed,
            "detail": self.detail,
            "hint": self.hint,
        })
    }
}

/// Requirements of basic use are missing.
#[derive(Debug, thiserror::Error)]
#[error("basic use (TCP and memory) does not work on this host: {}; see the lines marked `needed`", names.join(", "))]
struct RequirementsMissing {
    names: Vec<&'static str>,
}

pub(crate) fn command() -> Command {
    let doctor = Command::new("doctor");
    // Set after the arguments: the doc comment of the struct would replace it otherwise.
    Args::augment_args(doctor).about("Check this host's capabilities and suggest fixes").after_help(EXAMPLES)
}

pub(crate) fn run(matches: &ArgMatches) -> Result<(), CommandError> {
    let args = Args::from_arg_matches(matches).map_err(CommandError::usage)?;
    let credentials = args.certificate.load()?;
    let checks = run_checks(&args.master, credentials.as_deref());
    let names: Vec<_> = checks.iter().filter(|check| check.is_broken()).map(|check| check.name).collect();
    let mut out = std::io::stdout().lock();
    ignore_broken_pipe(if args.json {
        let checks: Vec<Value> = checks.iter().map(Check::to_json).collect();
        writeln!(
            out,
            "{}",
            json!({ "version": env!("CARGO_PKG_VERSION"), "ok": names.is_empty(), "checks": checks })
        )
    } else {
        print(&checks, &mut out)
    })?;
    if names.is_empty() { Ok(()) } else { Err(CommandError::failed(RequirementsMissing { names })) }
}

/// Runs all checks, in the order of the output. `credentials`: for admin pages.
fn run_checks(master: &str, credentials: Option<&Credentials>) -> Vec<Check> {
    let mut checks = vec![
        system::kernel(),
        system::processor(),
        system::numa(),
        system::clock(),
        system::descriptors(),
        system::processes(),
        memory::memory(),
        memory::shared(),
        memory::locked(),
        memory::huge_pages(),
        io::io_uring(),
        io::direct(),
        network::loopback(),
        network::ports(credentials),
        network::master(master),
        network::rdma(),
        devices::ucx(),
    ];
    checks.extend(devices::gpus());
    checks
}

fn print(checks: &[Check], out: &mut impl Write) -> std::io::Result<()> {
    let width = checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
    for check in checks {
        let needed = if check.is_broken() { " (needed)" } else { "" };
        let mut lines = check.detail.lines();
        let first = lines.next().unwrap_or_default();
        writeln!(out, "{:<8} {:<width$}  {first}{needed}", check.state.name(), check.name)?;
        for line in lines {
            writeln!(out, "{:<8} {:<width$}  {line}", "", "")?;
        }
        if let Some(hint) = &check.hint {
            writeln!(out, "{:<8} {:<width$}  → {hint}", "", "")?;
        }
    }
    out.flush()
}

/// Reads a small file of the kernel, without the newline; `None` if it cannot be read.
fn kernel_file(path: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    Some(text.trim_end().to_owned())
}

/// Lists the names in a directory, sorted; empty if it cannot be read.
fn names_in(path: &str) -> Vec<String> {
    let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_check_has_unique_name_detail_and_hint_unless_ok() {
        let checks = run_checks("127.0.0.1:1", None);
        assert!(checks.len() >= 18);
        for check in &checks {
            assert!(!check.detail.is_empty(), "{check:?}");
            assert_eq!(check.hint.is_none(), check.state == CheckState::Ok, "{check:?}");
        }
        let mut names: Vec<_> = checks.iter().map(|check| check.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), checks.len(), "check names must be unique: scripts use them");
    }

    #[test]
    fn only_missing_required_check_is_broken() {
        let missing = Check::missing("x", "nothing", "do something");
        assert!(!missing.is_broken());
        assert!(missing.clone().needed().is_broken());
        assert!(!Check::limited("x", "little", "do something").needed().is_broken());
        let mut out = vec![];
        print(&[missing.needed()], &mut out).unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "missing  x  nothing (needed)\n            → do something\n"
        );
        let mut out = vec![];
        print(&[Check::limited("x", "two\n0: one", "do something")], &mut out).unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "limited  x  two\n            0: one\n            → do something\n"
        );
    }
}
