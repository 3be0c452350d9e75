//! What benchmarks share: results as JSON lines, progress for people, memory of the process, percentiles.

use std::fmt::Display;
use std::io::Write;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Map, Value};

/// A benchmark could not run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum BenchError {
    /// Something of the operating system.
    #[error("{what}: {source}")]
    Io {
        /// What was tried.
        what: &'static str,
        /// Why it failed.
        source: std::io::Error,
    },
    /// The thing that is measured does not do what it should: a figure would mean nothing.
    #[error("{0}")]
    Wrong(String),
}

/// For `map_err`.
pub(crate) fn io(what: &'static str) -> impl FnOnce(std::io::Error) -> BenchError {
    move |source| BenchError::Io { what, source }
}

/// Figures so far that miss their target by more than a factor of two.
static GROSS_MISSES: AtomicU32 = AtomicU32::new(0);

/// Whether all figures so far are within a factor of two of their targets. Machines differ and have bad minutes; a
/// factor of two is a mistake.
pub(crate) fn nothing_is_grossly_slow() -> Result<(), BenchError> {
    match GROSS_MISSES.load(Ordering::Relaxed) {
        0 => Ok(()),
        misses => Err(BenchError::Wrong(format!(
            "{misses} figures miss their targets by more than a factor of two"
        ))),
    }
}

/// One line of results.
pub(crate) struct Line(Map<String, Value>);

impl Line {
    /// A result of this case.
    pub(crate) fn new(bench: &str, case: &str) -> Line {
        let mut fields = Map::new();
        fields.insert("bench".into(), bench.into());
        fields.insert("case".into(), case.into());
        Line(fields)
    }

    /// Adds a field.
    pub(crate) fn with(mut self, name: &str, value: impl Into<Value>) -> Line {
        self.0.insert(name.into(), value.into());
        self
    }

    /// Adds a number, rounded to what it is worth.
    pub(crate) fn number(self, name: &str, value: f64) -> Line {
        let rounded = if value.abs() >= 100.0 { value.round() } else { (value * 1000.0).round() / 1000.0 };
        self.with(name, rounded)
    }

    /// Adds a figure, the target, and whether it is met. `at_least`: more is better.
    pub(crate) fn against(self, name: &str, value: f64, target: f64, at_least: bool) -> Line {
        let met = if at_least { value >= target } else { value <= target };
        let gross = if at_least { value < target / 2.0 } else { value > target * 2.0 };
        GROSS_MISSES.fetch_add(gross.into(), Ordering::Relaxed);
        self.number(name, value).number("target", target).with("met", met)
    }

    /// As [`Line::against`], for a second figure of the same line: its target has its name in front.
    pub(crate) fn also_against(self, name: &str, value: f64, target: f64, at_least: bool) -> Line {
        let met = if at_least { value >= target } else { value <= target };
        let gross = if at_least { value < target / 2.0 } else { value > target * 2.0 };
        GROSS_MISSES.fetch_add(gross.into(), Ordering::Relaxed);
        self.number(name, value).number(&format!("{name}_target"), target).with(&format!("{name}_met"), met)
    }

    /// Prints it.
    pub(crate) fn print(self) {
        let mut out = std::io::stdout().lock();
        // A closed pipe ends the output, not the benchmark.
        let _ = writeln!(out, "{}", Value::Object(self.0));
        let _ = out.flush();
    }
}

/// Says how far something is, on standard error, at most a few times a second.
pub(crate) struct Progress {
    what: String,
    total: u64,
    last: Instant,
    started: Instant,
}

impl Progress {
    /// Begins.
    pub(crate) fn new(what: impl Display, total: u64) -> Progress {
        let now = Instant::now();
        eprintln!("{what} …");
        Progress { what: what.to_string(), total, last: now, started: now }
    }

    /// So much is done.
    pub(crate) fn at(&mut self, done: u64) {
        if self.last.elapsed() >= Duration::from_secs(1) {
            self.last = Instant::now();
            let percent = done * 100 / self.total.max(1);
            eprintln!("  {}: {percent} % after {:.0} s", self.what, self.started.elapsed().as_secs_f64());
        }
    }
}

/// Resident memory of a process in bytes.
pub(crate) fn resident_bytes(pid: u32) -> Result<u64, BenchError> {
    let statm = std::fs::read_to_string(format!("/proc/{pid}/statm")).map_err(io("reading /proc"))?;
    let pages: u64 = statm.split(' ').nth(1).and_then(|pages| pages.parse().ok()).unwrap_or(0);
    Ok(pages * 4096)
}

/// Processor time that a process has used, of all its threads.
pub(crate) fn cpu_time(pid: u32) -> Result<Duration, BenchError> {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).map_err(io("reading /proc"))?;
    // Behind the name in parentheses, which may contain anything: user and system time are fields 14 and 15.
    let behind = stat.rsplit(')').next().unwrap_or("");
    let ticks: u64 = behind.split_whitespace().skip(11).take(2).filter_map(|t| t.parse::<u64>().ok()).sum();
    Ok(Duration::from_millis(ticks * 10)) // 100 ticks a second on every Linux
}

/// Percentiles of a sample, in microseconds.
pub(crate) struct Percentiles {
    sorted: Vec<u32>,
}

impl Percentiles {
    /// From nanoseconds, in any order.
    pub(crate) fn new(mut nanos: Vec<u32>) -> Percentiles {
        nanos.sort_unstable();
        Percentiles { sorted: nanos }
    }

    /// The value below which this share of the sample lies, in microseconds.
    pub(crate) fn micros(&self, share: f64) -> f64 {
        if self.sorted.is_empty() {
            return 0.0;
        }
        let at = ((self.sorted.len() - 1) as f64 * share).round() as usize;
        f64::from(self.sorted[at]) / 1000.0
    }
}

/// The middle of some figures.
pub(crate) fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or(0.0)
}

/// How far apart figures lie: (largest − smallest) / middle.
pub(crate) fn spread(figures: &[f64]) -> f64 {
    let largest = figures.iter().copied().fold(f64::MIN, f64::max);
    let smallest = figures.iter().copied().fold(f64::MAX, f64::min);
    let middle = median(figures.to_vec());
    if middle > 0.0 { (largest - smallest) / middle } else { 0.0 }
}
