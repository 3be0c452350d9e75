//! Human-readable tables: faults, results of calls, latencies of gets.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::client::{DEADLINE, LATE};
use crate::faults::Done;
use crate::machine::LostTime;

/// Formats a time of the monotonic clock in seconds.
pub fn moment(nanos: u64) -> String {
    format!("{:.3}", nanos as f64 / 1e9)
}

/// Prints the faults by kind.
pub fn faults(done: &[Done]) {
    let mut kinds = BTreeMap::<String, (usize, u64, u64)>::new();
    for fault in done {
        let kind = kinds.entry(format!("{:?}", fault.kind)).or_default();
        let ms = (fault.end - fault.start) / 1_000_000;
        *kind = (kind.0 + 1, kind.1 + ms, kind.2.max(ms));
    }
    println!("{:32} {:>6} {:>10} {:>10}", "fault", "times", "mean ms", "longest ms");
    for (kind, (times, ms, longest)) in &kinds {
        println!("{kind:32} {times:>6} {:>10} {longest:>10}", ms / *times as u64);
    }
    println!("{:32} {:>6}", "all", done.len());
}

/// Prints the calls by result.
pub fn operations(counts: &BTreeMap<(&'static str, String), u64>, keys_written: u64) {
    println!("{:8} {:20} {:>10}", "call", "ended", "times");
    for ((call, ended), times) in counts {
        println!("{call:8} {ended:20} {times:>10}");
    }
    println!("{keys_written} keys were written");
}

/// Prints latencies of all gets, and of those that started during a fault.
pub fn latencies(gets: &[(u64, Duration)], faults: &[Done]) {
    let during = |start: u64| faults.iter().any(|fault| (fault.start..=fault.end).contains(&start));
    let all: Vec<Duration> = gets.iter().map(|(_, took)| *took).collect();
    let faulty: Vec<Duration> =
        gets.iter().filter(|(start, _)| during(*start)).map(|(_, took)| *took).collect();
    for (which, mut took) in [("all gets", all), ("gets during faults", faulty)] {
        took.sort_unstable();
        let share = |share: f64| took.get((took.len().saturating_sub(1) as f64 * share) as usize).copied();
        let [p50, p99, p999, max] = [0.5, 0.99, 0.999, 1.0].map(|at| share(at).unwrap_or_default());
        println!(
            "{which}: {} of them, p50 {p50:?}, p99 {p99:?}, p99.9 {p999:?}, max {max:?}; deadline {DEADLINE:?}, \
             at most {LATE:?} late",
            took.len()
        );
    }
}

/// Prints the time that the machine lost.
pub fn machine(lost: &LostTime) {
    let (lost, of) = lost.total();
    println!("the machine lost {lost:.1?} of {of:.1?} to others");
}
