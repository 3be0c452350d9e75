//! `moontide doctor`: what this machine can do, and what to change so that it can do more.
//!
//! | file | what |
//! |---|---|
//! | `system` | kernel, processors, limits, clock |
//! | `memory` | memory, shared memory, locked memory, huge pages |
//! | `io` | io_uring and direct I/O |
//! | `network` | loopback, ports, the master, RDMA |
//! | `devices` | UCX and GPUs |
//! | `foreign` | the one call that needs `unsafe` |
//!
//! Everything is tried rather than guessed where trying is harmless. A check never fails: what cannot be found out is
//! a finding, too. Only what plain use over TCP and memory needs decides the exit code.

mod devices;
mod foreign;
mod io;
mod memory;
mod network;
mod system;

use std::io::Write;

use clap::{ArgMatches, Args as ClapArgs, Command, FromArgMatches};
use serde_json::{Value, json};

use super::{Failure, written};

const EXAMPLES: &str = "\
Examples:
  moontide doctor                           one line per ability, with what to do next
  moontide doctor --json | jq .checks       the same as one JSON object
  moontide doctor --master master-0:7400    can a master on another host be reached?

States: ok, limited (works, and could do better), absent (not there; nothing else needs it unless it is marked needed).
Exit codes: 0 plain use over TCP and memory works here, 1 it does not, 2 wrong usage.";

/// What is looked at.
#[derive(Debug, ClapArgs)]
struct Args {
    /// The master that should be reachable, as host:port
    #[arg(long, env = "MOONTIDE_MASTER", default_value = "127.0.0.1:7400")]
    master: String,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// What was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// As good as it gets.
    Ok,
    /// It works, and could do better.
    Limited,
    /// Not there.
    Absent,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            State::Ok => "ok",
            State::Limited => "limited",
            State::Absent => "absent",
        }
    }
}

/// One ability of the machine.
#[derive(Clone, Debug)]
struct Check {
    name: &'static str,
    state: State,
    /// Whether plain use over TCP and memory needs it.
    needed: bool,
    found: String,
    /// What to do about it; nothing if all is well.
    next: Option<String>,
}

impl Check {
    fn new(name: &'static str, state: State, found: impl Into<String>) -> Check {
        Check { name, state, needed: false, found: found.into(), next: None }
    }

    fn ok(name: &'static str, found: impl Into<String>) -> Check {
        Check::new(name, State::Ok, found)
    }

    fn limited(name: &'static str, found: impl Into<String>, next: impl Into<String>) -> Check {
        Check { next: Some(next.into()), ..Check::new(name, State::Limited, found) }
    }

    fn absent(name: &'static str, found: impl Into<String>, next: impl Into<String>) -> Check {
        Check { next: Some(next.into()), ..Check::new(name, State::Absent, found) }
    }

    fn needed(self) -> Check {
        Check { needed: true, ..self }
    }

    fn is_broken(&self) -> bool {
        self.needed && self.state == State::Absent
    }

    fn to_json(&self) -> Value {
        json!({
            "name": self.name,
            "state": self.state.name(),
            "needed": self.needed,
            "found": self.found,
            "next": self.next,
        })
    }
}

/// What plain use over TCP and memory needs is not there.
#[derive(Debug, thiserror::Error)]
#[error("plain use over TCP and memory does not work here: {}; see the lines marked `needed`", names.join(", "))]
struct Broken {
    names: Vec<&'static str>,
}

pub(crate) fn command() -> Command {
    let doctor = Command::new("doctor");
    // After the arguments, whose own description would stand in its place.
    Args::augment_args(doctor).about("Say what this machine can do, and what to change").after_help(EXAMPLES)
}

pub(crate) fn run(matches: &ArgMatches) -> Result<(), Failure> {
    let args = Args::from_arg_matches(matches).map_err(Failure::usage)?;
    let checks = examine(&args.master);
    let names: Vec<_> = checks.iter().filter(|check| check.is_broken()).map(|check| check.name).collect();
    let mut out = std::io::stdout().lock();
    written(if args.json {
        let checks: Vec<Value> = checks.iter().map(Check::to_json).collect();
        writeln!(
            out,
            "{}",
            json!({ "version": env!("CARGO_PKG_VERSION"), "ok": names.is_empty(), "checks": checks })
        )
    } else {
        print(&checks, &mut out)
    })?;
    if names.is_empty() { Ok(()) } else { Err(Failure::failed(Broken { names })) }
}

/// All checks, from the ground up.
fn examine(master: &str) -> Vec<Check> {
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
        network::ports(),
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
        let mut lines = check.found.lines();
        let first = lines.next().unwrap_or_default();
        writeln!(out, "{:<8} {:<width$}  {first}{needed}", check.state.name(), check.name)?;
        for line in lines {
            writeln!(out, "{:<8} {:<width$}  {line}", "", "")?;
        }
        if let Some(next) = &check.next {
            writeln!(out, "{:<8} {:<width$}  → {next}", "", "")?;
        }
    }
    out.flush()
}

/// A small file of the kernel, without the newline; none if it cannot be read.
fn kernel_file(path: &str) -> Option<String> {
    let text = std::fs::read_to_string(path).ok()?;
    Some(text.trim_end().to_owned())
}

/// Names in a directory, sorted; none of them if it cannot be read.
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
    fn every_check_answers_and_says_what_to_do() {
        let checks = examine("127.0.0.1:1");
        assert!(checks.len() >= 18);
        for check in &checks {
            assert!(!check.found.is_empty(), "{check:?}");
            assert_eq!(check.next.is_none(), check.state == State::Ok, "{check:?}");
        }
        let mut names: Vec<_> = checks.iter().map(|check| check.name).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), checks.len(), "names are unique: scripts look for them");
    }

    #[test]
    fn only_what_is_needed_breaks_plain_use() {
        let absent = Check::absent("x", "nothing", "do something");
        assert!(!absent.is_broken());
        assert!(absent.clone().needed().is_broken());
        assert!(!Check::limited("x", "little", "do something").needed().is_broken());
        let mut out = vec![];
        print(&[absent.needed()], &mut out).unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "absent   x  nothing (needed)\n            → do something\n"
        );
        let mut out = vec![];
        print(&[Check::limited("x", "two\n0: one", "do something")], &mut out).unwrap();
        assert_eq!(
            String::from_utf8(out).unwrap(),
            "limited  x  two\n            0: one\n            → do something\n"
        );
    }
}
