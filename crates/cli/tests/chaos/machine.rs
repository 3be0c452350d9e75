//! [`MachineMonitor`]: the time that the machine lost, so that a late call is judged by the time that the processes had.
//!
//! A virtual machine shares its cores. While the hypervisor runs something else, every process of this test stands still,
//! and a call whose deadline has passed cannot end before its process runs again. Bytes and removals are judged without
//! regard to any of this.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::journal::now;

/// Interval of the samples.
const PAUSE: Duration = Duration::from_millis(20);

/// Unit of the times in /proc/stat, which Linux fixes at 1/100 s for programs.
const TICK: Duration = Duration::from_millis(10);

/// A machine that lost this share of the time of a core is not fit for deadlines of seconds: one part in ten.
const LOST_SHARE: u64 = 10;

/// Samples until [`MachineMonitor::end`].
pub struct MachineMonitor {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<LostTime>,
}

impl MachineMonitor {
    pub fn start() -> MachineMonitor {
        let stop = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut lost = LostTime::default();
            let mut before = stolen_ticks(&read_stat());
            while !seen.load(Ordering::Relaxed) {
                std::thread::sleep(PAUSE);
                let stolen = stolen_ticks(&read_stat());
                lost.add(now(), most_stolen(&before, &stolen));
                before = stolen;
            }
            lost
        });
        MachineMonitor { stop, thread }
    }

    pub fn end(self) -> LostTime {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().expect("the monitor does not panic")
    }
}

/// The time that was taken from a core since the start, at each sample, in nanoseconds. A delay of the sampling thread does not
/// count: the processes of the test could cause it themselves.
#[derive(Debug, Default)]
pub struct LostTime {
    samples: Vec<(u64, u64)>,
}

impl LostTime {
    fn add(&mut self, at: u64, lost: u64) {
        let sum = self.samples.last().map_or(0, |(_, sum)| *sum);
        self.samples.push((at, sum + lost));
    }

    /// Returns the time lost between two moments, with what the samples around them count.
    pub fn between(&self, from: u64, to: u64) -> Duration {
        let first = self.samples.partition_point(|(at, _)| *at < from);
        let last = self.samples.partition_point(|(at, _)| *at < to).min(self.samples.len().saturating_sub(1));
        let sum =
            |index: Option<usize>| index.and_then(|index| self.samples.get(index)).map_or(0, |(_, sum)| *sum);
        Duration::from_nanos(sum(Some(last)).saturating_sub(sum(first.checked_sub(1))))
    }

    /// Returns true if the machine lost so much of this time that the duration of a call says nothing.
    pub fn excuses(&self, from: u64, to: u64) -> bool {
        let lost = self.between(from, to);
        !lost.is_zero() && lost >= Duration::from_nanos(to.saturating_sub(from) / LOST_SHARE)
    }

    /// Returns true if the machine lost so much of the whole time that the number of calls says little.
    pub fn is_large(&self) -> bool {
        let (lost, of) = self.total();
        !lost.is_zero() && lost >= of / LOST_SHARE as u32
    }

    /// Returns the time lost in all, and the duration of the samples.
    pub fn total(&self) -> (Duration, Duration) {
        let span = self.samples.first().zip(self.samples.last()).map_or((0, 0), |(a, b)| (b.1, b.0 - a.0));
        (Duration::from_nanos(span.0), Duration::from_nanos(span.1))
    }
}

fn read_stat() -> String {
    std::fs::read_to_string("/proc/stat").unwrap_or_default()
}

/// The time taken from each core, in ticks since the start of the machine: the eighth number of its line.
fn stolen_ticks(stat: &str) -> Vec<u64> {
    let cores = stat.lines().filter(|line| line.starts_with("cpu") && !line.starts_with("cpu "));
    cores.filter_map(|line| line.split_ascii_whitespace().nth(8)?.parse().ok()).collect()
}

/// What the core that lost most has lost since, in nanoseconds.
fn most_stolen(before: &[u64], now: &[u64]) -> u64 {
    let most = before.iter().zip(now).map(|(before, now)| now.saturating_sub(*before)).max();
    most.unwrap_or_default() * TICK.as_nanos() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn lost_time_excuses_only_calls_that_it_overlaps() {
        let mut lost = LostTime::default();
        for at in 1..=10 {
            lost.add(at * 100 * MS, if at == 5 { 60 * MS } else { 0 });
        }
        assert_eq!(lost.between(100 * MS, 400 * MS), Duration::ZERO);
        assert_eq!(lost.between(300 * MS, 600 * MS), Duration::from_millis(60));
        assert_eq!(lost.between(450 * MS, 460 * MS), Duration::from_millis(60), "the sample that ends later");
        assert_eq!(lost.between(600 * MS, 5000 * MS), Duration::ZERO, "no samples follow");
        assert!(lost.excuses(300 * MS, 800 * MS), "60 of 500 ms");
        assert!(!lost.excuses(0, 1000 * MS), "60 of 1000 ms");
        assert!(!lost.excuses(100 * MS, 100 * MS + 1), "nothing lost in a short time");
        assert_eq!(lost.total(), (Duration::from_millis(60), Duration::from_millis(900)));
        assert!(!lost.is_large() && !LostTime::default().is_large());
    }

    #[test]
    fn stolen_time_is_that_of_core_that_lost_most() {
        let stat = |a, b| {
            format!(
                "cpu  1 2 3 4 5 6 7 {} 0 0\ncpu0 1 2 3 4 5 6 7 {a} 0 0\ncpu1 1 2 3 4 5 6 7 {b} 0 0\n",
                a + b
            )
        };
        let (before, after) = (stolen_ticks(&stat(10, 20)), stolen_ticks(&stat(12, 27)));
        assert_eq!(before, [10, 20]);
        assert_eq!(most_stolen(&before, &after), 70 * MS);
        assert_eq!(most_stolen(&[], &[]), 0, "a system without /proc/stat");
    }
}
