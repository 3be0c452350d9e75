//! Results as JSON lines, their targets, errors and progress output.

use std::fmt::{self, Display};
use std::io::Write;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Map, Value};

/// Error of a benchmark.
#[derive(Debug, thiserror::Error)]
pub enum BenchError {
    /// The arguments are invalid.
    #[error(transparent)]
    Arguments(clap::Error),
    /// An operation of the operating system failed.
    #[error("{what}: {source}")]
    Io {
        /// The operation, e.g. `creating a directory`.
        what: &'static str,
        /// Error of the operating system.
        source: std::io::Error,
    },
    /// The measured code gave a wrong result: a measurement would be meaningless.
    #[error("{0}")]
    Wrong(String),
}

/// Returns a closure for `map_err` that adds the failed operation.
pub(crate) fn io(what: &'static str) -> impl FnOnce(std::io::Error) -> BenchError {
    move |source| BenchError::Io { what, source }
}

/// Returns the error for a wrong result of the measured code.
pub(crate) fn wrong(what: impl Display) -> BenchError {
    BenchError::Wrong(what.to_string())
}

/// Number of results so far that miss their target by more than a factor of two.
static GATE_FAILURES: AtomicU32 = AtomicU32::new(0);

/// Fails if a result so far misses its target by more than a factor of two. Smaller misses may be noise or slower
/// hardware; a factor of two is a regression.
pub(crate) fn check_gates() -> Result<(), BenchError> {
    match GATE_FAILURES.load(Ordering::Relaxed) {
        0 => Ok(()),
        misses => Err(BenchError::Wrong(format!(
            "{misses} results miss their targets by more than a factor of two"
        ))),
    }
}

/// One result, printed as a line of JSON.
#[derive(Debug)]
pub struct ResultRow(Map<String, Value>);

impl ResultRow {
    /// Creates a result of `case`.
    pub fn new(bench: &str, case: &str) -> ResultRow {
        let mut fields = Map::new();
        fields.insert("bench".into(), bench.into());
        fields.insert("case".into(), case.into());
        ResultRow(fields)
    }

    /// Adds a field.
    pub fn with(mut self, name: &str, value: impl Into<Value>) -> ResultRow {
        self.0.insert(name.into(), value.into());
        self
    }

    /// Adds a number, rounded to three decimals, or to an integer from 100 on.
    pub fn number(self, name: &str, value: f64) -> ResultRow {
        let rounded = if value.abs() >= 100.0 { value.round() } else { (value * 1000.0).round() / 1000.0 };
        self.with(name, rounded)
    }

    /// Adds a value, its target, and whether it is met. `at_least`: higher is better.
    pub fn with_target(self, name: &str, value: f64, target: f64, at_least: bool) -> ResultRow {
        let met = if at_least { value >= target } else { value <= target };
        let is_failure = if at_least { value < target / 2.0 } else { value > target * 2.0 };
        GATE_FAILURES.fetch_add(is_failure.into(), Ordering::Relaxed);
        self.number(name, value).number("target", target).with("met", met)
    }

    /// As [`ResultRow::with_target`], for a second value of the same row: the target fields have the prefix `name`.
    pub(crate) fn with_second_target(self, name: &str, value: f64, target: f64, at_least: bool) -> ResultRow {
        let met = if at_least { value >= target } else { value <= target };
        let is_failure = if at_least { value < target / 2.0 } else { value > target * 2.0 };
        GATE_FAILURES.fetch_add(is_failure.into(), Ordering::Relaxed);
        self.number(name, value).number(&format!("{name}_target"), target).with(&format!("{name}_met"), met)
    }

    /// Prints the row to standard output.
    pub fn print(self) {
        let mut out = std::io::stdout().lock();
        // A closed pipe ends the output, not the benchmark.
        let _ = writeln!(out, "{self}");
        let _ = out.flush();
    }
}

impl Display for ResultRow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&serde_json::to_string(&self.0).map_err(|_| fmt::Error)?)
    }
}

/// Progress of an operation on standard error, at most once per second.
pub(crate) struct Progress {
    what: String,
    total: u64,
    last: Instant,
    started: Instant,
}

impl Progress {
    /// Starts with an announcement.
    pub(crate) fn new(what: impl Display, total: u64) -> Progress {
        let now = Instant::now();
        eprintln!("{what} …");
        Progress { what: what.to_string(), total, last: now, started: now }
    }

    /// Reports that `done` of `total` is done.
    pub(crate) fn at(&mut self, done: u64) {
        if self.last.elapsed() >= Duration::from_secs(1) {
            self.last = Instant::now();
            let percent = done * 100 / self.total.max(1);
            eprintln!("  {}: {percent} % after {:.0} s", self.what, self.started.elapsed().as_secs_f64());
        }
    }
}
