//! `cargo xtask mutants`: deliberate mutants, each with the test that must detect it.
//!
//! Owns the table [`MUTANTS`]. The mutations are in the sources, behind `moontide_rt::mutation_enabled("name")`. An
//! environment variable enables them in a separate build (`--cfg mutation`), one build for all. Without a mutation every
//! test of the table must pass; with its mutation each must fail within its time limit. A test that hangs until the limit
//! has detected nothing.
//!
//! Some crates plant mutants in tests of their own, which pass when the mutant is found. Those that need no other build stand
//! in the table, too.

mod table;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{self, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use self::table::MUTANTS;
use crate::command::{Command, CommandError};

/// A mutation and the test that must detect it.
struct Mutant {
    name: &'static str,
    /// Source file of the mutation.
    location: &'static str,
    /// What would happen to a user.
    impact: &'static str,
    /// What finds it.
    test: Test,
    activation: Activation,
}

/// How a mutation is enabled.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Activation {
    /// By the environment: the test fails.
    Environment,
    /// By the test itself, which then passes.
    InTest,
}

/// A test.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Test {
    /// Its crate, without `moontide-`.
    package: &'static str,
    /// Its file in `tests/`; none: it is beside the sources.
    binary: Option<&'static str>,
    name: &'static str,
}

const fn test(package: &'static str, binary: &'static str, name: &'static str) -> Test {
    Test { package, binary: Some(binary), name }
}

const fn unit(package: &'static str, name: &'static str) -> Test {
    Test { package, binary: None, name }
}

/// How long a test may take, with a mutant or without. Most need less than a second; the slowest wait for leases to end, on
/// machines that have other things to do.
const LIMIT: Duration = Duration::from_secs(90);

/// Environment variable that enables a mutation.
const MUTATION_ENV: &str = "MOONTIDE_MUTATION";

/// What is wanted.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Options {
    /// Print the table and run nothing.
    pub(crate) list: bool,
    /// Name of the one mutant to run.
    pub(crate) only: Option<String>,
}

/// Why not all is well.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MutantsError {
    #[error("no mutant is called `{0}`; see `cargo xtask mutants --list`")]
    Unknown(String),
    #[error(transparent)]
    Build(#[from] CommandError),
    #[error("cargo built no test `{0}`")]
    NotBuilt(String),
    #[error("cannot run {what}: {source}")]
    NotRun { what: String, source: std::io::Error },
    #[error("{log} does not report one test run; does the test `{test}` exist?")]
    NoSuchTest { test: String, log: String },
    #[error("{count} of the tests fail without a mutation; see {logs}")]
    BaselineFailed { count: usize, logs: String },
    #[error("{count} of the mutants survived; see {logs}")]
    Survived { count: usize, logs: String },
}

/// What became of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Passed,
    Failed,
    /// It did not end in time.
    Hung,
}

/// Prints the table, or runs it.
pub(crate) fn run(root: &Path, target_dir: &str, options: &Options) -> Result<(), MutantsError> {
    let wanted = |mutant: &&Mutant| options.only.as_ref().is_none_or(|only| mutant.name == only);
    let mutants: Vec<&Mutant> = MUTANTS.iter().filter(wanted).collect();
    match &options.only {
        Some(name) if mutants.is_empty() => return Err(MutantsError::Unknown(name.clone())),
        _ => {}
    }
    if options.list {
        for mutant in mutants {
            println!(
                "{}\n    in {}, detected by {}\n    {}",
                mutant.name, mutant.location, mutant.test, mutant.impact
            );
        }
        return Ok(());
    }
    // Build for all mutants, even for one: with other packages selected, cargo would rebuild their dependencies.
    let bench = TestBinaries::build(root, target_dir, &MUTANTS.iter().collect::<Vec<_>>())?;
    println!("without a mutation:");
    let mut tests: Vec<Test> = mutants.iter().map(|mutant| mutant.test).collect();
    tests.sort_unstable();
    tests.dedup();
    let mut unhealthy = 0;
    for test in tests {
        let (outcome, seconds) = bench.run(test, None)?;
        unhealthy += usize::from(outcome != Outcome::Passed);
        println!("  {:<6} {seconds:>5.1} s  {test}", if outcome == Outcome::Passed { "ok" } else { "FAIL" });
    }
    if unhealthy > 0 {
        return Err(MutantsError::BaselineFailed {
            count: unhealthy,
            logs: bench.logs.display().to_string(),
        });
    }
    println!("\n{:<34} {:<40} {:>7}  detected by", "mutant", "location", "seconds");
    let mut survived = 0;
    for mutant in &mutants {
        let (outcome, seconds) = bench.run(mutant.test, Some(mutant))?;
        let found = mutant.is_detected(outcome);
        survived += usize::from(!found);
        let by = match outcome {
            _ if found => mutant.test.to_string(),
            Outcome::Hung => format!("SURVIVED: {} did not end", mutant.test),
            Outcome::Passed | Outcome::Failed => format!("SURVIVED: {} passed", mutant.test),
        };
        println!("{:<34} {:<40} {seconds:>7.1}  {by}", mutant.name, mutant.location);
    }
    println!("\n{} mutants, {} detected, {survived} survived", mutants.len(), mutants.len() - survived);
    match survived {
        0 => Ok(()),
        count => Err(MutantsError::Survived { count, logs: bench.logs.display().to_string() }),
    }
}

impl Mutant {
    fn is_detected(&self, outcome: Outcome) -> bool {
        outcome == if self.activation == Activation::Environment { Outcome::Failed } else { Outcome::Passed }
    }
}

impl std::fmt::Display for Test {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Test { package, binary, name } = self;
        write!(f, "{package}/{} {name}", binary.unwrap_or("lib"))
    }
}

/// The tests, built.
struct TestBinaries {
    root: PathBuf,
    logs: PathBuf,
    /// By crate and file.
    programs: BTreeMap<(String, Option<String>), PathBuf>,
}

impl TestBinaries {
    /// Builds the test binaries of these mutants.
    fn build(root: &Path, target_dir: &str, mutants: &[&Mutant]) -> Result<TestBinaries, MutantsError> {
        let target_dir = format!("{target_dir}/mutation");
        let build = |more: &str| {
            Command::cargo(&format!("test --no-run --locked {}{more}", targets(mutants)))
                .env("RUSTFLAGS", "--cfg mutation")
                .env("CARGO_TARGET_DIR", &target_dir)
        };
        println!("$ {}", build(""));
        build("").run(root)?;
        // Everything is built: this call only lists the binaries.
        let output = build(" --message-format=json").output(root)?;
        let logs = root.join(&target_dir).join("logs");
        let made = std::fs::create_dir_all(&logs);
        made.map_err(|source| MutantsError::NotRun { what: logs.display().to_string(), source })?;
        Ok(TestBinaries { root: root.to_owned(), logs, programs: programs(&output) })
    }

    /// Runs a test, with a mutation or without.
    fn run(&self, test: Test, mutant: Option<&Mutant>) -> Result<(Outcome, f64), MutantsError> {
        let key = (format!("moontide-{}", test.package), test.binary.map(str::to_owned));
        let program = self.programs.get(&key).ok_or_else(|| MutantsError::NotBuilt(test.to_string()))?;
        let name = mutant.map_or_else(|| format!("baseline {test}"), |mutant| mutant.name.to_owned());
        let log = self.logs.join(format!("{}.log", name.replace([' ', ':', '/'], "-")));
        let not_run = |source| MutantsError::NotRun { what: test.to_string(), source };
        let output = File::create(&log).map_err(not_run)?;
        let mut child = process::Command::new(program);
        child.args([test.name, "--exact", "--nocapture"]).env_remove(MUTATION_ENV);
        if let Some(mutant) = mutant.filter(|mutant| mutant.activation == Activation::Environment) {
            child.env(MUTATION_ENV, mutant.name);
        }
        child.current_dir(self.root.join("crates").join(test.package));
        child.stdin(Stdio::null()).stdout(output.try_clone().map_err(not_run)?).stderr(output);
        let began = Instant::now();
        let outcome = wait(child.spawn().map_err(not_run)?, LIMIT).map_err(not_run)?;
        let output = std::fs::read(&log).map_err(not_run)?;
        if !String::from_utf8_lossy(&output).contains("running 1 test") {
            let (test, log) = (test.to_string(), log.display().to_string());
            return Err(MutantsError::NoSuchTest { test, log });
        }
        Ok((outcome, began.elapsed().as_secs_f64()))
    }
}

/// Waits for a child, for so long at most.
fn wait(mut child: process::Child, limit: Duration) -> std::io::Result<Outcome> {
    let end = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(if status.success() { Outcome::Passed } else { Outcome::Failed });
        }
        if Instant::now() >= end {
            child.kill()?;
            child.wait()?;
            return Ok(Outcome::Hung);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Arguments of cargo that select the tests of these mutants.
fn targets(mutants: &[&Mutant]) -> String {
    let mut words: Vec<String> = vec![];
    for Mutant { test, .. } in mutants {
        words.push(format!("-p moontide-{}", test.package));
        words.push(test.binary.map_or_else(|| "--lib".to_owned(), |binary| format!("--test {binary}")));
    }
    words.sort_unstable();
    words.dedup();
    words.join(" ")
}

/// The programs in an answer of cargo, one JSON object a line.
fn programs(output: &str) -> BTreeMap<(String, Option<String>), PathBuf> {
    let messages = output.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    messages
        .filter_map(|message| {
            let (program, target) = (message["executable"].as_str()?, &message["target"]);
            // Our crates are called like their folders.
            let crate_folder =
                Path::new(message["manifest_path"].as_str()?).parent()?.file_name()?.to_str()?;
            let is_test = target["kind"].as_array()?.iter().any(|kind| kind == "test");
            let file = if is_test { Some(target["name"].as_str()?.to_owned()) } else { None };
            message["profile"]["test"]
                .as_bool()?
                .then(|| ((format!("moontide-{crate_folder}"), file), PathBuf::from(program)))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All sources below a folder.
    fn sources(folder: &Path, all: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                sources(&path, all);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                all.push(std::fs::read_to_string(&path).unwrap());
            }
        }
    }

    #[test]
    fn mutant_table_matches_switches_in_sources() {
        let root = crate::workspace_root();
        let by_switch = MUTANTS.iter().filter(|mutant| mutant.activation == Activation::Environment);
        for mutant in by_switch.clone() {
            let source = std::fs::read_to_string(root.join(mutant.location)).unwrap();
            assert!(
                source.contains(&format!("mutation_enabled(\"{}\")", mutant.name)),
                "{} in {}",
                mutant.name,
                mutant.location
            );
        }
        let mut all = vec![];
        sources(&root.join("crates"), &mut all);
        let mut in_sources: Vec<&str> = all
            .iter()
            .flat_map(|source| source.split("moontide_rt::mutation_enabled(\"").skip(1))
            .map(|rest| rest.split('"').next().unwrap())
            .collect();
        in_sources.sort_unstable();
        in_sources.dedup();
        // Those that their own tests enable are in the sources, too.
        in_sources.retain(|name| {
            let own = |mutant: &Mutant| mutant.name == *name && mutant.activation == Activation::InTest;
            !MUTANTS.iter().any(own)
        });
        let mut listed: Vec<&str> = by_switch.map(|mutant| mutant.name).collect();
        listed.sort_unstable();
        assert_eq!(in_sources, listed);
    }

    #[test]
    fn every_mutant_has_unique_name_and_existing_test() {
        let mut names: Vec<&str> = MUTANTS.iter().map(|mutant| mutant.name).collect();
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
        for Mutant { test, impact, .. } in MUTANTS {
            let mut all = vec![];
            sources(&crate::workspace_root().join("crates").join(test.package), &mut all);
            let function = format!("fn {}(", test.name.rsplit("::").next().unwrap());
            assert!(all.iter().any(|source| source.contains(&function)), "no {function} in {}", test.package);
            assert!(impact.ends_with('.'), "{impact}");
        }
    }

    #[test]
    fn test_binaries_are_parsed_from_cargo_messages() {
        let output = r#"
{"reason":"compiler-artifact","manifest_path":"/x/crates/meta/Cargo.toml","target":{"kind":["lib"],"name":"moontide_meta"},"profile":{"test":false},"executable":null}
{"reason":"compiler-artifact","manifest_path":"/x/crates/meta/Cargo.toml","target":{"kind":["lib"],"name":"moontide_meta"},"profile":{"test":true},"executable":"/t/meta-1"}
{"reason":"compiler-artifact","manifest_path":"/x/crates/meta/Cargo.toml","target":{"kind":["test"],"name":"group"},"profile":{"test":true},"executable":"/t/group-2"}
{"reason":"build-finished","success":true}
"#;
        let key = |binary: Option<&str>| ("moontide-meta".to_owned(), binary.map(str::to_owned));
        let found = programs(output);
        assert_eq!(found.get(&key(None)), Some(&PathBuf::from("/t/meta-1")));
        assert_eq!(found.get(&key(Some("group"))), Some(&PathBuf::from("/t/group-2")));
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn hanging_test_does_not_count_as_detection() {
        let sleeps = process::Command::new("sleep").arg("60").spawn().unwrap();
        assert_eq!(wait(sleeps, Duration::from_millis(50)).unwrap(), Outcome::Hung);
        let fails = process::Command::new("false").spawn().unwrap();
        assert_eq!(wait(fails, Duration::from_secs(10)).unwrap(), Outcome::Failed);
        assert!(MUTANTS.iter().all(|mutant| !mutant.is_detected(Outcome::Hung)));
    }
}
