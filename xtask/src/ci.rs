//! `cargo xtask ci`: every check in order, the same on a laptop and on a CI machine.
//!
//! Owns the list of steps and the report of a run: each step with its number and its commands, then a table, then one
//! line with the counts. [`plan`] is pure: what a step runs follows from the [`Machine`] alone.
//!
//! Invariants: a run stops at the first step that fails. A step that cannot run on this machine says so and counts as
//! neither passed nor failed; under `CI=true` it fails, except for [`advisories`].

use std::fmt::Write as _;
use std::path::Path;
use std::time::Instant;

use crate::advisories;
use crate::chaos;
use crate::command::{Command, CommandError};
use crate::examples;
use crate::fuzz::{self, FuzzError};
use crate::machine::Machine;
use crate::python::{self, PythonError};
use crate::quickstart::{self, QuickstartError};
use crate::retries::{self, RetriesError, StallMonitor};
use crate::sim;
use crate::tidy::{self, TidyError};
use crate::venv;
use crate::wheel::{self, WheelError};

/// Benches that CI runs for a moment, so that they keep compiling and running: (package, bench).
/// The figures of such a run mean nothing.
const SMOKE_BENCHES: &[(&str, &str)] = &[
    ("moontide-heap", "alloc"),
    ("moontide-heap", "local_get"),
    ("moontide-types", "digest"),
    ("moontide-types", "object_ids"),
    ("moontide-proto", "capabilities"),
];

/// Benchmarks of the command `moontide` at a small size. In process, nothing may be twice as slow as its target at the
/// full size; on loopback the load of the machine dominates, and only the results are checked.
const SMOKE_COMMANDS: &[&str] = &[
    "bench meta --objects 200000 --repeats 3 --only in-process --gate",
    "bench meta --objects 100000 --repeats 1 --only loopback",
    "bench transfer --quick --only shm --gate",
    "bench transfer --quick --only tcp",
    "bench local --quick --gate",
    "bench remote --quick",
    "bench mixed --seconds 3 --objects 500",
    "bench blocks --quick",
    "bench ep --quick",
];

/// How often a measurement is made that misses its targets. What is twice as slow as it should be is so each time.
const BENCH_RUNS_MAX: u32 = 3;

/// Duration of the chaos test in CI; `cargo xtask chaos` runs the long form.
const CHAOS_SECONDS: u32 = 60;
/// CI repeats the same faults. The long form draws a new seed.
const CHAOS_SEED: u64 = 101;

/// Models for loom, built at once: cargo chooses the features of dependencies for all packages that it builds, so that one
/// package after the other would compile many of them again.
const LOOM_MODELS: &str = "-p moontide-heap -p moontide-symmetric -p moontide-blocks \
                           --test loom --test loom_barrier --test loom_ready_flag";

/// Tests in simulated worlds, built at once for the same reason.
const WORLDS: &str = "-p moontide-rt -p moontide-disk -p moontide-node -p moontide-sim \
                      --test world --test crash_fibers --test explore --test seeds";

/// CI repeats the same property tests, so that a change is judged by what it changed. `cargo nextest run` draws a new
/// seed each time.
const PROPTEST_SEED: &str = "101";

/// The steps, declared in the order in which they run: cheap ones first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Step {
    Fmt,
    Tidy,
    Clippy,
    Test,
    Doctest,
    Doc,
    Loom,
    Shuttle,
    Fibers,
    BenchSmoke,
    Chaos,
    Quickstart,
    Examples,
    Wheel,
    Python,
    Kernels,
    Fuzz,
    Deny,
    Advisories,
    /// Part of `cargo xtask check` alone: the step `Test` runs these tests too.
    QuickTest,
}

impl Step {
    /// What `cargo xtask check` runs: the loop between two edits.
    pub(crate) const CHECK: &[Self] = &[Self::Fmt, Self::Tidy, Self::Clippy, Self::QuickTest];

    /// What `cargo xtask ci` runs.
    pub(crate) const ALL: &[Self] = &[
        Self::Fmt,
        Self::Tidy,
        Self::Clippy,
        Self::Test,
        Self::Doctest,
        Self::Doc,
        Self::Loom,
        Self::Shuttle,
        Self::Fibers,
        Self::BenchSmoke,
        Self::Chaos,
        Self::Quickstart,
        Self::Examples,
        Self::Wheel,
        Self::Python,
        Self::Kernels,
        Self::Fuzz,
        Self::Deny,
        Self::Advisories,
    ];

    pub(crate) fn named(name: &str) -> Option<Self> {
        Self::ALL.iter().copied().find(|step| step.name() == name)
    }

    fn name(self) -> &'static str {
        match self {
            Self::Fmt => "fmt",
            Self::Tidy => "tidy",
            Self::Clippy => "clippy",
            Self::Test => "test",
            Self::Doctest => "doctest",
            Self::Doc => "doc",
            Self::Loom => "loom",
            Self::Shuttle => "shuttle",
            Self::Fibers => "fibers",
            Self::BenchSmoke => "bench-smoke",
            Self::Chaos => "chaos",
            Self::Quickstart => "quickstart",
            Self::Examples => "examples",
            Self::Wheel => "wheel",
            Self::Python => "python",
            Self::Kernels => "kernels",
            Self::Fuzz => "fuzz",
            Self::Deny => "deny",
            Self::Advisories => "advisories",
            Self::QuickTest => "quick-test",
        }
    }

    fn purpose(self) -> &'static str {
        match self {
            Self::Fmt => "sources are formatted",
            Self::Tidy => "dependencies point down, pages name what exists, files open with their purpose",
            Self::Clippy => "no warning anywhere, tests and benches included",
            Self::Test => "unit, integration and property tests; replay of the fuzz corpus",
            Self::Doctest => "examples in the documentation run",
            Self::Doc => "documentation builds without a dead link",
            Self::Loom => "every interleaving of the small concurrent cores, weak orderings included",
            Self::Shuttle => "random interleavings of larger concurrent scenarios",
            Self::Fibers => {
                "shipped code in simulated worlds, with drawn schedules, stalls and power failures"
            }
            Self::BenchSmoke => "benches compile and run, and nothing is twice as slow as it should be",
            Self::Chaos => {
                "reads are correct while real processes are killed, stopped, partitioned and out of disk space"
            }
            Self::Quickstart => "the first lines of README.md work as they stand",
            Self::Examples => "the Rust and shell programs of examples/ succeed on a local cluster",
            Self::Wheel => "the Python package builds, is within its size limit, and needs only glibc 2.28",
            Self::Python => "it installs into a clean environment, and its tests pass there",
            Self::Kernels => {
                "tensors of torch; the Triton kernels, interpreted, and compiled for NVIDIA and AMD GPUs"
            }
            Self::Fuzz => "each fuzz target for a few seconds",
            Self::Deny => "licences, bans, duplicates and sources of dependencies",
            Self::Advisories => "no dependency has a known vulnerability; not run without the database",
            Self::QuickTest => "tests that kill no process, need no service and take seconds",
        }
    }
}

/// A step failed; the run has already printed which one and why.
#[derive(Debug, thiserror::Error)]
#[error("a step failed")]
pub(crate) struct CiError;

/// Why one step failed.
#[derive(Debug, thiserror::Error)]
enum StepError {
    #[error(transparent)]
    Command(#[from] CommandError),
    #[error(transparent)]
    Tidy(#[from] TidyError),
    #[error(transparent)]
    Fuzz(#[from] FuzzError),
    #[error(transparent)]
    Quickstart(#[from] QuickstartError),
    #[error(transparent)]
    Wheel(#[from] WheelError),
    #[error(transparent)]
    Python(#[from] PythonError),
    #[error(transparent)]
    Retries(#[from] RetriesError),
    #[error("this step must run under CI=true: {0}")]
    Skipped(String),
}

/// The work of a step on this machine.
#[derive(Debug, PartialEq, Eq)]
enum Plan {
    Commands {
        commands: Vec<Command>,
        note: Option<String>,
    },
    /// Measurements. One that misses its target is repeated: other programs may use the machine, too.
    Benches {
        commands: Vec<Command>,
    },
    /// All tests under nextest, and the count of those that it retried.
    Nextest {
        command: Command,
    },
    Tidy,
    Fuzz {
        targets: Vec<String>,
    },
    Quickstart,
    Examples,
    Wheel,
    Python,
    Kernels,
    Advisories,
    /// The machine lacks something that the step needs.
    NotRun {
        reason: String,
    },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Outcome {
    Passed,
    Failed,
    NotRun,
}

/// A line of the closing table.
#[derive(Debug, Clone, Copy)]
struct Row {
    step: Step,
    seconds: f64,
    outcome: Outcome,
}

/// Every step with its purpose, one line each.
pub(crate) fn list() -> String {
    Step::ALL.iter().map(|step| format!("{:<12} {}\n", step.name(), step.purpose())).collect()
}

/// Runs these steps in order.
pub(crate) fn run(root: &Path, machine: &Machine, steps: &[Step]) -> Result<(), CiError> {
    let mut rows: Vec<Row> = Vec::new();
    for (number, &step) in (1..).zip(steps) {
        println!("\n== {number}/{} {}: {}", steps.len(), step.name(), step.purpose());
        let start = Instant::now();
        let outcome = match perform(root, machine, plan(step, machine)) {
            Ok(outcome) => outcome,
            Err(error) => {
                println!("xtask: {error}");
                Outcome::Failed
            }
        };
        rows.push(Row { step, seconds: start.elapsed().as_secs_f64(), outcome });
        if outcome == Outcome::Failed {
            break;
        }
    }
    print!("\n{}", summary(&rows));
    if rows.iter().any(|row| row.outcome == Outcome::Failed) { Err(CiError) } else { Ok(()) }
}

fn perform(root: &Path, machine: &Machine, plan: Plan) -> Result<Outcome, StepError> {
    match plan {
        Plan::Commands { commands, note } => {
            if let Some(note) = note {
                println!("NOTE: {note}");
            }
            for command in commands {
                println!("$ {command}");
                command.run(root)?;
            }
        }
        Plan::Benches { commands } => {
            for command in commands {
                println!("$ {command}");
                run_bench(root, &command)?;
            }
        }
        Plan::Nextest { command } => run_nextest(root, machine, &command)?,
        Plan::Tidy => {
            println!("$ cargo xtask tidy");
            tidy::run(root)?;
        }
        Plan::Quickstart => quickstart::run(root)?,
        Plan::Examples => examples::run(root, machine)?,
        Plan::Wheel => {
            wheel::run(root, machine, &wheel::Options::default())?;
        }
        Plan::Python => python::run(root, machine, &python::Options::default())?,
        Plan::Kernels => {
            python::run(root, machine, &python::Options { torch: true, ..Default::default() })?;
        }
        Plan::Fuzz { targets } => fuzz::run(root, machine, &targets, fuzz::SMOKE_SECONDS)?,
        Plan::Advisories => {
            if let Some(reason) = advisories::run(root)? {
                println!("NOT RUN: {reason}");
                return Ok(Outcome::NotRun);
            }
        }
        Plan::NotRun { reason } if machine.is_ci => return Err(StepError::Skipped(reason)),
        Plan::NotRun { reason } => {
            println!("NOT RUN: {reason}");
            return Ok(Outcome::NotRun);
        }
    }
    Ok(Outcome::Passed)
}

/// Runs a measurement, at most [`BENCH_RUNS_MAX`] times until it meets its targets.
fn run_bench(root: &Path, command: &Command) -> Result<(), StepError> {
    for run in 2..=BENCH_RUNS_MAX {
        match command.run(root) {
            Ok(()) => return Ok(()),
            Err(error) => println!("{error}\nmeasured again, run {run} of at most {BENCH_RUNS_MAX}"),
        }
    }
    Ok(command.run(root)?)
}

/// Runs the tests, and prints which were retried because the machine stalled or UCX aborted; any other retry is a
/// failure.
fn run_nextest(root: &Path, machine: &Machine, command: &Command) -> Result<(), StepError> {
    let report = retries::report_path(root, &machine.target_dir);
    // The report of an earlier run must not be taken for that of this one.
    let _ = std::fs::remove_file(&report);
    println!("$ {command}");
    let monitor = StallMonitor::start();
    let result = command.run(root);
    let stalls = monitor.finish();
    println!("stalls of the machine: {}", stalls.len());
    result?;
    let retries = retries::count(&report, &stalls)?;
    println!("UCX aborts retried: {}", retries.ucx_aborts);
    println!("failures during a stall retried: {}", retries.stalled.len());
    for test in retries.stalled {
        println!("  {test}");
    }
    Ok(())
}

fn plan(step: Step, machine: &Machine) -> Plan {
    match step {
        Step::Fmt => commands([Command::cargo("fmt --all --check")]),
        Step::Tidy => Plan::Tidy,
        Step::Clippy => {
            commands([Command::cargo("clippy --workspace --all-targets --locked -- -D warnings")])
        }
        Step::Test if machine.has_nextest => {
            let command = Command::cargo("nextest run --workspace --locked");
            Plan::Nextest { command: command.env("PROPTEST_RNG_SEED", PROPTEST_SEED) }
        }
        // Only nextest enforces the time limits and reports retries.
        Step::Test if machine.is_ci => Plan::NotRun { reason: "cargo-nextest is not installed".to_owned() },
        // `--all-targets` would run benches too, and doctests have a step of their own.
        Step::Test => Plan::Commands {
            commands: vec![Command::cargo("test --workspace --locked --lib --bins --tests --examples")],
            note: Some(
                "cargo-nextest is not installed (`cargo install --locked cargo-nextest`); \
                 using `cargo test`, without its time limits"
                    .to_owned(),
            ),
        },
        Step::QuickTest if machine.has_nextest => {
            commands([Command::cargo("nextest run --workspace --locked --profile quick")])
        }
        Step::QuickTest => Plan::NotRun {
            reason: "cargo-nextest is not installed (`cargo install --locked cargo-nextest`)".to_owned(),
        },
        Step::Doctest => commands([Command::cargo("test --doc --workspace --locked")]),
        Step::Doc => {
            let doc = Command::cargo("doc --workspace --no-deps --locked --document-private-items");
            commands([doc.env("RUSTDOCFLAGS", "-D warnings")])
        }
        Step::Loom => commands([model_check("loom", LOOM_MODELS)]),
        Step::Shuttle => commands([
            model_check("shuttle", "-p moontide-heap --test shuttle"),
            model_check("shuttle", "-p moontide-symmetric --test shuttle_barrier"),
            model_check("shuttle", "-p moontide-transfer --lib"),
            model_check("shuttle", "-p moontide-client --lib"),
        ]),
        Step::Fibers => commands([
            sim::tests(WORLDS),
            sim::tests("-p moontide-sim --lib"),
            sim::tests("-p moontide-sim --doc"),
        ]),
        Step::BenchSmoke => {
            let benches = SMOKE_BENCHES.iter().map(|(package, bench)| {
                Command::cargo(&format!("bench -p {package} --bench {bench} --locked -- --quick"))
            });
            let gates = SMOKE_COMMANDS.iter().map(|arguments| {
                Command::cargo(&format!("run --release -p moontide-cli --locked -- {arguments}"))
            });
            Plan::Benches { commands: benches.chain(gates).collect() }
        }
        Step::Chaos if machine.has_namespaces && machine.has_etcd => {
            let options =
                chaos::Options { seconds: CHAOS_SECONDS, seed: Some(CHAOS_SEED), ..Default::default() };
            commands([chaos::command(&options)])
        }
        Step::Chaos => Plan::NotRun {
            reason: "it needs etcd, and network namespaces with nft, which only root can create".to_owned(),
        },
        Step::Quickstart => Plan::Quickstart,
        Step::Examples => Plan::Examples,
        Step::Wheel | Step::Python | Step::Kernels if machine.interpreters.is_empty() => {
            Plan::NotRun { reason: venv::NO_INTERPRETER.to_owned() }
        }
        Step::Wheel => Plan::Wheel,
        Step::Python => Plan::Python,
        Step::Kernels => Plan::Kernels,
        Step::Fuzz => match fuzz::missing_tool(machine) {
            None => Plan::Fuzz { targets: machine.fuzz_targets.clone() },
            Some(reason) => Plan::NotRun { reason },
        },
        Step::Deny if machine.has_cargo_deny => commands([deny()]),
        Step::Advisories if machine.has_cargo_deny => Plan::Advisories,
        Step::Deny | Step::Advisories => Plan::NotRun {
            reason: "cargo-deny is not installed (`cargo install --locked cargo-deny`)".to_owned(),
        },
    }
}

fn commands(commands: impl IntoIterator<Item = Command>) -> Plan {
    Plan::Commands { commands: commands.into_iter().collect(), note: None }
}

/// An exception from a ban that is no longer needed fails as well: the next duplicate would hide behind it.
fn deny() -> Command {
    Command::cargo("deny --locked check bans licenses sources -D unmatched-skip -D unnecessary-skip")
}

/// A model checker replaces the atomics of our crates. A wrapper of rustc tells only these; what they depend on is that of
/// other release builds, and cargo keeps the crates of each wrapper apart. The tests of the checker `name` are in the
/// integration test of that name.
fn model_check(name: &str, what: &str) -> Command {
    Command::cargo(&format!("test --release {what} --locked"))
        .env("RUSTC_WORKSPACE_WRAPPER", &format!("xtask/rustc/{name}"))
}

/// The table, how to repeat what failed, and the count as the last line.
fn summary(rows: &[Row]) -> String {
    let count = |outcome| rows.iter().filter(|row| row.outcome == outcome).count();
    let mut text = format!("{:<12} {:>8}  result\n", "step", "seconds");
    for Row { step, seconds, outcome } in rows {
        let result = match outcome {
            Outcome::Passed => "ok",
            Outcome::Failed => "FAIL",
            Outcome::NotRun => "not run",
        };
        let _ = writeln!(text, "{:<12} {seconds:>8.1}  {result}", step.name());
    }
    text.push('\n');
    if let Some(row) = rows.iter().find(|row| row.outcome == Outcome::Failed) {
        let name = row.step.name();
        let _ = writeln!(text, "step {name} failed; to run it alone: cargo xtask ci --only {name}");
    }
    let _ = writeln!(text, "{} passed, {} failed", count(Outcome::Passed), count(Outcome::Failed));
    text
}

#[cfg(test)]
#[path = "../../crates/types/tests/support/not_run.rs"]
mod not_run;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::venv::{Interpreter, Version};

    fn machine() -> Machine {
        Machine {
            has_nextest: true,
            has_nightly: true,
            has_cargo_fuzz: true,
            has_cargo_deny: true,
            has_namespaces: true,
            has_etcd: true,
            interpreters: vec![Interpreter {
                version: Version { minor: 12 },
                program: "/usr/bin/python3.12".to_owned(),
            }],
            is_ci: false,
            target_dir: "target".to_owned(),
            fuzz_targets: vec!["frame".to_owned()],
        }
    }

    fn lines(plan: Plan) -> Vec<String> {
        match plan {
            Plan::Commands { commands, .. } | Plan::Benches { commands } => {
                commands.iter().map(Command::to_string).collect()
            }
            other => panic!("not a list of commands: {other:?}"),
        }
    }

    #[test]
    fn steps_resolve_by_their_listed_names() {
        for step in Step::ALL {
            assert_eq!(Step::named(step.name()), Some(*step));
            assert!(list().contains(&format!("\n{} ", step.name())) || list().starts_with(step.name()));
        }
        assert_eq!(Step::named("nothing"), None);
    }

    #[test]
    fn model_checkers_share_dependencies_with_release_builds() {
        assert_eq!(
            lines(plan(Step::Loom, &machine())),
            ["RUSTC_WORKSPACE_WRAPPER=xtask/rustc/loom cargo test --release \
              -p moontide-heap -p moontide-symmetric -p moontide-blocks \
              --test loom --test loom_barrier --test loom_ready_flag --locked"]
        );
        for line in lines(plan(Step::Shuttle, &machine())) {
            assert!(
                line.starts_with("RUSTC_WORKSPACE_WRAPPER=xtask/rustc/shuttle cargo test --release "),
                "{line}"
            );
        }
    }

    #[test]
    fn wrapper_of_a_model_checker_adds_its_cfg() {
        let root = crate::workspace_root();
        for checker in ["loom", "shuttle"] {
            let wrapper = root.join("xtask/rustc").join(checker);
            let cfg =
                Command::new(&wrapper.to_string_lossy(), &["rustc", "--print", "cfg"]).output(&root).unwrap();
            assert!(cfg.lines().any(|line| line == checker), "{cfg}");
        }
    }

    #[test]
    fn simulated_worlds_keep_assertions_and_are_built_at_once() {
        let lines = lines(plan(Step::Fibers, &machine()));
        for line in &lines {
            assert!(line.contains("--cfg sim ") && line.contains("-C debug-assertions"), "{line}");
        }
        for test in ["world", "crash_fibers", "explore", "seeds"] {
            assert!(lines[0].contains(&format!("--test {test}")), "{}", lines[0]);
        }
        assert!(lines[1].ends_with("-p moontide-sim --lib --locked"), "{}", lines[1]);
        assert!(lines[2].ends_with("-p moontide-sim --doc --locked"), "{}", lines[2]);
    }

    #[test]
    fn missing_nextest_falls_back_to_cargo_test_with_note() {
        let Plan::Commands { commands, note } =
            plan(Step::Test, &Machine { has_nextest: false, ..machine() })
        else {
            panic!("the test step must run")
        };
        assert!(commands[0].to_string().starts_with("cargo test --workspace --locked"));
        assert!(note.unwrap().contains("cargo install --locked cargo-nextest"));
        let Plan::Nextest { command } = plan(Step::Test, &machine()) else { panic!("nextest must run") };
        assert_eq!(command.to_string(), "PROPTEST_RNG_SEED=101 cargo nextest run --workspace --locked");
    }

    #[test]
    fn missing_optional_tools_are_reported_as_not_run() {
        let without = Machine { has_cargo_fuzz: false, has_cargo_deny: false, ..machine() };
        let without = Machine { has_etcd: false, ..without };
        for step in [Step::Fuzz, Step::Deny, Step::Advisories, Step::Chaos] {
            assert!(matches!(plan(step, &without), Plan::NotRun { .. }), "{step:?}");
            assert!(!matches!(plan(step, &machine()), Plan::NotRun { .. }), "{step:?}");
        }
    }

    #[test]
    fn steps_that_need_python_are_not_run_without_it() {
        let without = Machine { interpreters: Vec::new(), ..machine() };
        let steps =
            [(Step::Wheel, Plan::Wheel), (Step::Python, Plan::Python), (Step::Kernels, Plan::Kernels)];
        for (step, there) in steps {
            assert_eq!(plan(step, &machine()), there);
            let Plan::NotRun { reason } = plan(step, &without) else {
                panic!("{step:?} needs an interpreter")
            };
            assert!(reason.contains("python3-venv"), "{reason}");
        }
    }

    #[test]
    fn every_command_of_cargo_is_locked() {
        for step in [Step::ALL, Step::CHECK].concat() {
            let (Plan::Commands { commands, .. } | Plan::Benches { commands }) = plan(step, &machine())
            else {
                continue;
            };
            // `cargo fmt` resolves no dependencies.
            for command in commands.iter().filter(|_| step != Step::Fmt) {
                assert!(command.to_string().contains(" --locked"), "{command}");
            }
        }
        let aliases = std::fs::read_to_string(crate::workspace_root().join(".cargo/config.toml")).unwrap();
        assert!(aliases.contains("xtask = \"run --quiet --locked "), "{aliases}");
    }

    /// What cargo-deny says, with our settings, about a package with these dependencies, which lie in directories beside it.
    fn bans_of(name: &str, dependencies: &[(&str, &str)]) -> Result<String, CommandError> {
        let directory = std::env::temp_dir().join(format!("moontide-xtask-{name}-{}", std::process::id()));
        let package = |at: &Path, name: &str, version: &str, more: &str| {
            std::fs::create_dir_all(at.join("src")).unwrap();
            std::fs::write(at.join("src/lib.rs"), "").unwrap();
            let package =
                format!("name = \"{name}\"\nversion = \"{version}\"\nedition = \"2024\"\npublish = false");
            std::fs::write(at.join("Cargo.toml"), format!("[package]\n{package}\n{more}")).unwrap();
        };
        let mut more = "[workspace]\nexclude = [\"dependencies\"]\n[dependencies]\n".to_owned();
        for (number, (name, version)) in dependencies.iter().enumerate() {
            let path = format!("dependencies/{number}");
            package(&directory.join(&path), name, version, "");
            more += &format!("d{number} = {{ package = \"{name}\", path = \"{path}\" }}\n");
        }
        package(&directory, "fixture", "1.0.0", &more);
        let root = crate::workspace_root();
        let (manifest, config) = (directory.join("Cargo.toml"), root.join("deny.toml"));
        let answer = Command::cargo("deny --offline --manifest-path")
            .arg(&manifest.to_string_lossy())
            .arg("--config")
            .arg(&config.to_string_lossy())
            .arg("check")
            .arg("bans")
            .output(&root);
        std::fs::remove_dir_all(directory).unwrap();
        answer
    }

    #[test]
    fn second_tls_and_second_version_are_refused() {
        if !Command::cargo("deny --version").succeeds(Path::new(".")) {
            return not_run::not_run("cargo-deny is not installed");
        }
        bans_of("good", &[("rustls", "0.23.0"), ("other", "1.0.0")]).unwrap();
        for banned in ["aws-lc-rs", "native-tls", "openssl", "openssl-sys", "rsa"] {
            let error = bans_of("banned", &[(banned, "1.0.0")]).unwrap_err().to_string();
            assert!(error.contains(&format!("crate '{banned} = 1.0.0' is explicitly banned")), "{error}");
        }
        let error = bans_of("twice", &[("other", "1.0.0"), ("other", "2.0.0")]).unwrap_err().to_string();
        assert!(error.contains("found 2 duplicate entries for crate 'other'"), "{error}");
    }

    #[test]
    fn bans_fail_on_exceptions_that_are_not_needed() {
        let line = &lines(plan(Step::Deny, &machine()))[0];
        assert!(
            line.contains(" bans ") && line.ends_with(" -D unmatched-skip -D unnecessary-skip"),
            "{line}"
        );
    }

    #[test]
    fn step_that_cannot_run_fails_in_ci_only() {
        let plan = || Plan::NotRun { reason: "no tool".to_owned() };
        let root = Path::new(".");
        assert!(matches!(perform(root, &machine(), plan()), Ok(Outcome::NotRun)));
        let ci = Machine { is_ci: true, ..machine() };
        assert!(matches!(perform(root, &ci, plan()), Err(StepError::Skipped(reason)) if reason == "no tool"));
    }

    #[test]
    fn every_smoke_bench_is_one_command() {
        let lines = lines(plan(Step::BenchSmoke, &machine()));
        assert_eq!(lines.len(), SMOKE_BENCHES.len() + SMOKE_COMMANDS.len());
        assert_eq!(lines[0], "cargo bench -p moontide-heap --bench alloc --locked -- --quick");
    }

    #[test]
    fn summary_ends_with_counts_and_names_failed_step() {
        let row = |step, outcome| Row { step, seconds: 1.25, outcome };
        let good = summary(&[row(Step::Fmt, Outcome::Passed), row(Step::Fuzz, Outcome::NotRun)]);
        assert!(good.ends_with("\n1 passed, 0 failed\n"), "{good}");
        assert!(good.contains("not run"), "{good}");
        let bad = summary(&[row(Step::Fmt, Outcome::Passed), row(Step::Clippy, Outcome::Failed)]);
        assert!(bad.contains("cargo xtask ci --only clippy\n"), "{bad}");
        assert!(bad.ends_with("\n1 passed, 1 failed\n"), "{bad}");
    }
}
