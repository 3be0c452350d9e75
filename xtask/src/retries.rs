//! Retries of tests: allowed after a stall of the machine or an abort inside UCX, counted, and refused for anything else.
//!
//! `.config/nextest.toml` lets nextest start every failed test again, whatever its failure was. This module reads
//! nextest's report after a run. An attempt that failed before the test passed must have an excuse: it ran while the
//! machine stalled ([`StallMonitor`]), or its output shows [`UCX_ABORT`]. UCX 1.22 has no such abort; libraries of
//! distributions do. Failures of pytest have one excuse, the stall: [`stalled_tests`].

use std::collections::VecDeque;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

/// A failed assertion of UCX while endpoints are wired up: file and message, in one line of output.
const UCX_ABORT: [&str; 2] = ["ucp_request.c", "got REP message"];

/// Where nextest writes the report of its default profile, under the target directory.
const REPORT: &str = "nextest/default/junit.xml";

/// How long the monitor sleeps between two looks at the clock.
const PROBE: Duration = Duration::from_millis(20);

/// A sleep that takes this much longer than [`PROBE`] is a stall: tests with pauses and deadlines of this order cannot be
/// expected to pass.
const STALL: Duration = Duration::from_millis(100);

/// Time that the hypervisor took from one core within [`STEAL_WINDOW`] that counts as a stall. The monitor itself sees
/// nothing of it if it wakes on another core.
const STEAL: Duration = Duration::from_millis(100);
const STEAL_WINDOW: Duration = Duration::from_millis(200);

/// Unit of the times in /proc/stat, which Linux fixes at 1/100 s for programs.
const TICK: Duration = Duration::from_millis(10);

/// Why the retries of a run are not acceptable.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RetriesError {
    #[error("cannot read the report of nextest, {path}: {source}")]
    Report { path: String, source: std::io::Error },
    #[error("the report of nextest has an attempt without a time: {0}")]
    Time(String),
    #[error(
        "passed only when retried, neither during a stall of the machine nor because of the abort inside UCX ({}): {}",
        UCX_ABORT.join(": "),
        .0.join(", ")
    )]
    NoExcuse(Vec<String>),
}

/// A period in which the monitor should have run several times, but did not run at all, or in which a core was taken away.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Stall {
    from: SystemTime,
    to: SystemTime,
}

/// A thread that sleeps for [`PROBE`] again and again, and records the sleeps that took too long and the periods in which a
/// core was taken away.
#[derive(Debug)]
pub(crate) struct StallMonitor {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Vec<Stall>>,
}

impl StallMonitor {
    pub(crate) fn start() -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let (mut stalls, mut steals) = (Vec::new(), Steals::default());
            while !seen.load(Ordering::Relaxed) {
                let (from, start) = (SystemTime::now(), Instant::now());
                std::thread::sleep(PROBE);
                if start.elapsed() >= PROBE + STALL {
                    stalls.push(Stall { from, to: SystemTime::now() });
                }
                let stolen = std::fs::read_to_string("/proc/stat").unwrap_or_default();
                stalls.extend(steals.add(SystemTime::now(), stolen_ticks(&stolen)));
            }
            stalls
        });
        Self { stop, thread }
    }

    /// Ends the thread and returns the stalls that it saw.
    pub(crate) fn finish(self) -> Vec<Stall> {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or_default()
    }
}

/// The time taken from each core, in ticks since the start of the machine: the eighth number of its line.
fn stolen_ticks(stat: &str) -> Vec<u64> {
    let cores = stat.lines().filter(|line| line.starts_with("cpu") && !line.starts_with("cpu "));
    cores.filter_map(|line| line.split_ascii_whitespace().nth(8)?.parse().ok()).collect()
}

/// What the cores had lost at the times of the last [`STEAL_WINDOW`].
#[derive(Debug, Default)]
struct Steals {
    samples: VecDeque<(SystemTime, Vec<u64>)>,
}

impl Steals {
    /// Adds a sample. Returns a stall if a core lost [`STEAL`] within the window; the next one starts after it.
    fn add(&mut self, at: SystemTime, stolen: Vec<u64>) -> Option<Stall> {
        while self
            .samples
            .front()
            .is_some_and(|(then, _)| at.duration_since(*then).is_ok_and(|age| age > STEAL_WINDOW))
        {
            self.samples.pop_front();
        }
        let from = self.samples.front().and_then(|(then, before)| {
            let lost = stolen.iter().zip(before).map(|(now, before)| now.saturating_sub(*before)).max()?;
            (TICK * u32::try_from(lost).unwrap_or(u32::MAX) >= STEAL).then_some(*then)
        });
        if from.is_some() {
            self.samples.clear();
        }
        self.samples.push_back((at, stolen));
        from.map(|from| Stall { from, to: at })
    }
}

/// Failed attempts of tests that passed later, by excuse.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Retries {
    pub(crate) ucx_aborts: usize,
    /// Tests that failed while the machine stalled.
    pub(crate) stalled: Vec<String>,
}

pub(crate) fn report_path(root: &Path, target_dir: &str) -> PathBuf {
    root.join(target_dir).join(REPORT)
}

/// Counts the failed attempts of tests that passed later.
pub(crate) fn count(report: &Path, stalls: &[Stall]) -> Result<Retries, RetriesError> {
    let text = std::fs::read_to_string(report)
        .map_err(|source| RetriesError::Report { path: report.display().to_string(), source })?;
    count_in(&text, stalls)
}

fn count_in(report: &str, stalls: &[Stall]) -> Result<Retries, RetriesError> {
    let (mut retries, mut others) = (Retries::default(), Vec::new());
    for case in report.split("<testcase ").skip(1) {
        for attempt in case.split("<flakyFailure ").skip(1) {
            let attempt = attempt.split("</flakyFailure>").next().unwrap_or_default();
            let (from, to) = period(attempt).ok_or_else(|| RetriesError::Time(test_name(case)))?;
            let is_abort = attempt.lines().any(|line| UCX_ABORT.iter().all(|part| line.contains(part)));
            if is_abort {
                retries.ucx_aborts += 1;
            } else if stalls.iter().any(|stall| stall.from <= to && from <= stall.to) {
                retries.stalled.push(test_name(case));
            } else {
                others.push(test_name(case));
            }
        }
    }
    if others.is_empty() { Ok(retries) } else { Err(RetriesError::NoExcuse(others)) }
}

/// Returns the failed tests of a run of pytest if each of them ran while the machine stalled; `None` if one did not, or
/// if no test is listed. A line of `failures` has start, end and name, separated by tabs.
pub(crate) fn stalled_tests(failures: &str, stalls: &[Stall]) -> Option<Vec<String>> {
    let time = |seconds: &str| {
        let seconds = Duration::try_from_secs_f64(seconds.parse().ok()?).ok()?;
        Some(SystemTime::UNIX_EPOCH + seconds)
    };
    let tests: Option<Vec<String>> = failures
        .lines()
        .map(|line| {
            let mut parts = line.split('\t');
            let (from, to) = (time(parts.next()?)?, time(parts.next()?)?);
            let name = parts.next()?.to_owned();
            stalls.iter().any(|stall| stall.from <= to && from <= stall.to).then_some(name)
        })
        .collect();
    tests.filter(|tests| !tests.is_empty())
}

/// Start and end of an attempt.
fn period(attempt: &str) -> Option<(SystemTime, SystemTime)> {
    let start: jiff::Timestamp = attribute(attempt, "timestamp")?.parse().ok()?;
    let start = SystemTime::from(start);
    let seconds: f64 = attribute(attempt, "time")?.parse().ok()?;
    Some((start, start + Duration::try_from_secs_f64(seconds).ok()?))
}

/// `package::binary test`, from the attributes of a test case.
fn test_name(case: &str) -> String {
    let part = |name| attribute(case, name).unwrap_or("?");
    format!("{} {}", part("classname"), part("name"))
}

/// Value of an attribute in the tag that `text` begins with.
fn attribute<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let tag = text.split('>').next()?;
    // A space before the name, so that `name` does not match `classname`, or the start of the tag.
    let start =
        if tag.starts_with(&format!("{name}=\"")) { 0 } else { tag.find(&format!(" {name}=\""))? + 1 };
    tag[start + name.len() + 2..].split('"').next()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Each attempt takes two seconds from this time on.
    const START: &str = "2026-01-02T03:04:05.500+01:00";

    fn report(outputs: &[&str]) -> String {
        let attempts: String = outputs
            .iter()
            .map(|output| {
                format!(
                    "<flakyFailure timestamp=\"{START}\" time=\"2.000\" message=\"process aborted\" \
                     type=\"test abort\">process aborted\n<system-err>{output}\n</system-err>\n</flakyFailure>\n"
                )
            })
            .collect();
        format!(
            "<testsuites name=\"nextest-run\"><testsuite name=\"moontide-transfer::ucx\">\n\
             <testcase name=\"idle_worker_sleeps\" classname=\"moontide-transfer::ucx\" time=\"1\"/>\n\
             <testcase name=\"get\" classname=\"moontide-transfer::ucx\" time=\"1\">\n{attempts}</testcase>\n\
             </testsuite></testsuites>\n"
        )
    }

    /// A stall of half a second that begins this long after the attempts.
    fn stall(after_ms: i64) -> Stall {
        let start: jiff::Timestamp = START.parse().unwrap();
        let from = jiff::Timestamp::from_millisecond(start.as_millisecond() + after_ms).unwrap();
        let from = SystemTime::from(from);
        Stall { from, to: from + Duration::from_millis(500) }
    }

    const ABORT: &str =
        "[h:1:0:2] ucp_request.c:7  Assertion `a&lt;b&apos; failed: req 0x1 ep 0x2: got REP message";

    #[test]
    fn ucx_aborts_are_counted() {
        assert_eq!(count_in(&report(&[]), &[]).unwrap(), Retries::default());
        assert_eq!(count_in(&report(&[ABORT, ABORT]), &[]).unwrap().ucx_aborts, 2);
    }

    #[test]
    fn failure_during_a_stall_is_named_and_counted() {
        for after_ms in [-400, 0, 1_000, 1_900] {
            let retries = count_in(&report(&["assertion failed"]), &[stall(after_ms)]).unwrap();
            assert_eq!(retries.stalled, ["moontide-transfer::ucx get"], "stall after {after_ms} ms");
        }
    }

    #[test]
    fn other_retried_failure_is_refused_and_named() {
        for outputs in
            [&["assertion failed"][..], &[ABORT, "got REP message"], &["ucp_request.c\ngot REP message"]]
        {
            let error = count_in(&report(outputs), &[stall(-600), stall(2_100)]).unwrap_err().to_string();
            assert!(error.ends_with(": moontide-transfer::ucx get"), "{error}");
        }
    }

    #[test]
    fn attempt_without_a_time_is_refused() {
        let report = report(&["assertion failed"]).replace("timestamp=", "start=");
        assert!(
            matches!(count_in(&report, &[stall(0)]), Err(RetriesError::Time(name)) if name.ends_with("ucx get"))
        );
    }

    #[test]
    fn failures_of_pytest_are_excused_only_if_each_ran_during_a_stall() {
        let start: jiff::Timestamp = START.parse().unwrap();
        let line = |after_s: i64, name: &str| {
            let from = start.as_second() + after_s;
            format!("{from}.5\t{}.5\ttests/test_{name}.py::test_it\n", from + 2)
        };
        let names = |names: &[&str]| {
            Some(names.iter().map(|name| format!("tests/test_{name}.py::test_it")).collect())
        };
        let (during, later) = (line(0, "a"), line(60, "b"));
        assert_eq!(stalled_tests(&during, &[stall(1_000)]), names(&["a"]));
        assert_eq!(
            stalled_tests(&format!("{during}{later}"), &[stall(1_000), stall(60_000)]),
            names(&["a", "b"])
        );
        assert_eq!(stalled_tests(&format!("{during}{later}"), &[stall(1_000)]), None);
        assert_eq!(stalled_tests(&during, &[]), None);
        assert_eq!(stalled_tests("", &[stall(0)]), None, "pytest failed, but no test did");
        assert_eq!(stalled_tests("pytest crashed", &[stall(0)]), None);
    }

    #[test]
    fn monitor_sees_no_stall_in_a_moment_and_ends() {
        let monitor = StallMonitor::start();
        std::thread::sleep(2 * PROBE);
        assert!(monitor.finish().iter().all(|stall| stall.to > stall.from));
    }

    #[test]
    fn core_that_loses_half_of_200_ms_is_a_stall() {
        let start = SystemTime::UNIX_EPOCH;
        // Each sample adds `ticks` to the second core, every 20 ms.
        let stalls = |ticks: &[u64]| {
            let (mut steals, mut total) = (Steals::default(), 0);
            let samples = ticks.iter().zip(0..).filter_map(|(ticks, n)| {
                total += ticks;
                steals.add(start + n * PROBE, vec![7, total])
            });
            samples.count()
        };
        assert_eq!(stalls(&[0; 30]), 0);
        assert_eq!(stalls(&[0, 0, 10, 0]), 1);
        assert_eq!(stalls(&[0, 5, 0, 5, 0]), 1);
        assert_eq!(stalls(&[0, 5, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 5]), 0, "too far apart");
        assert_eq!(stalls(&[0, 10, 0, 0, 10, 0]), 2);
        assert_eq!(stalls(&[9; 1]), 0, "the time before the first sample does not count");
    }

    #[test]
    fn stolen_time_is_the_eighth_number_of_each_core() {
        let stat =
            "cpu  1 2 3 4 5 6 7 80 9 10\ncpu0 1 2 3 4 5 6 7 30 9 10\ncpu1 1 2 3 4 5 6 7 50 9 10\nintr 5\n";
        assert_eq!(stolen_ticks(stat), [30, 50]);
        assert!(stolen_ticks("").is_empty());
    }

    #[test]
    fn missing_report_is_an_error() {
        let missing = report_path(Path::new("/nowhere"), "target");
        let error = count(&missing, &[]).unwrap_err().to_string();
        assert!(error.contains("/nowhere/target/nextest/default/junit.xml"), "{error}");
    }
}
