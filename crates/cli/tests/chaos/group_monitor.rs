//! [`GroupMonitor`]: polls the number of groups of every master, from a namespace that is never partitioned.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::faults::Done;
use crate::journal::now;
use crate::machine::LostTime;
use crate::report;
use crate::world::{GROUPS, LEASE_MS};

/// Interval of the polls.
const PAUSE: Duration = Duration::from_millis(50);
/// Timeout of a poll: a stopped master does not respond.
const RESPONSE_TIMEOUT: Duration = Duration::from_millis(300);

/// Maximum time of a group without a master while no fault affects masters or registry: the lease of a master whose
/// fault has just ended may still run, and another master may have been killed with its groups.
pub const VACANT_MAX: Duration = Duration::from_millis(2 * LEASE_MS + 1500);

/// Time of a poll, index of the master, and number of its groups.
type Sample = (u64, usize, usize);

/// Polls until [`GroupMonitor::end`].
pub struct GroupMonitor {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Vec<Sample>>>,
}

impl GroupMonitor {
    /// `pages`: admin addresses of the masters.
    pub fn start(pages: &[String]) -> GroupMonitor {
        let stop = Arc::new(AtomicBool::new(false));
        let poll = |(at, page): (usize, &String)| {
            let (stop, page) = (Arc::clone(&stop), page.clone());
            std::thread::spawn(move || {
                let mut samples = vec![];
                while !stop.load(Ordering::Relaxed) {
                    samples.push((now(), at, groups_of(&page)));
                    std::thread::sleep(PAUSE);
                }
                samples
            })
        };
        let threads = pages.iter().enumerate().map(poll).collect();
        GroupMonitor { stop, threads }
    }

    /// Ends the polls; returns the intervals in which a group had no master.
    pub fn end(self) -> Vec<(u64, u64)> {
        self.stop.store(true, Ordering::Relaxed);
        let masters = self.threads.len();
        let samples =
            self.threads.into_iter().flat_map(|thread| thread.join().expect("pollers do not panic"));
        let mut samples: Vec<Sample> = samples.collect();
        samples.sort_unstable();
        vacancies(&samples, masters)
    }
}

fn vacancies(samples: &[Sample], masters: usize) -> Vec<(u64, u64)> {
    let mut hosted: Vec<Option<usize>> = vec![None; masters];
    let (mut spans, mut since) = (vec![], None);
    for &(at, master, groups) in samples {
        hosted[master] = Some(groups);
        let Some(sum) = hosted.iter().copied().sum::<Option<usize>>() else { continue };
        if sum < GROUPS {
            since.get_or_insert(at);
        } else if let Some(from) = since.take() {
            spans.push((from, at));
        }
    }
    spans.extend(since.zip(samples.last()).map(|(from, last)| (from, last.0)));
    spans
}

/// Longest part of a vacancy without a fault of masters or registry.
fn unexplained(vacancy: (u64, u64), faults: &[Done]) -> Duration {
    let mut faults: Vec<(u64, u64)> =
        faults.iter().filter(|fault| fault.kind.touches_election()).map(|f| (f.start, f.end)).collect();
    faults.sort_unstable();
    let (mut from, mut longest) = (vacancy.0, 0);
    for (start, end) in faults {
        longest = longest.max(start.min(vacancy.1).saturating_sub(from));
        from = from.max(end);
    }
    Duration::from_nanos(longest.max(vacancy.1.saturating_sub(from)))
}

/// Prints how long groups had no master; returns unexplained vacancies that are too long, except those that the machine
/// explains.
pub fn judge(vacancies: &[(u64, u64)], faults: &[Done], lost: &LostTime) -> Vec<String> {
    let longest = vacancies.iter().map(|(from, to)| to - from).max().unwrap_or_default();
    let parts = vacancies.iter().map(|&vacancy| unexplained(vacancy, faults));
    println!(
        "{} vacancies of groups, at most {:?}; at most {:?} without a fault of masters or \
         registry",
        vacancies.len(),
        Duration::from_nanos(longest),
        parts.max().unwrap_or_default()
    );
    let wrong = vacancies.iter().filter(|&&vacancy| unexplained(vacancy, faults) > VACANT_MAX);
    let (excused, wrong): (Vec<_>, Vec<_>) = wrong.partition(|(from, to)| lost.excuses(*from, *to));
    println!("{} of them are excused by time that the machine lost", excused.len());
    let text = |&(from, to): &(u64, u64)| {
        format!("from {} to {} some group had no master", report::moment(from), report::moment(to))
    };
    wrong.into_iter().map(text).collect()
}

/// Returns the number of groups of a master; 0 if it does not respond.
fn groups_of(page: &str) -> usize {
    let poll = || -> std::io::Result<String> {
        let address = page.parse().map_err(std::io::Error::other)?;
        let mut stream = TcpStream::connect_timeout(&address, RESPONSE_TIMEOUT)?;
        stream.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
        write!(stream, "GET /role HTTP/1.0\r\nhost: {page}\r\n\r\n")?;
        let mut response = String::new();
        stream.read_to_string(&mut response)?;
        Ok(response)
    };
    let response = poll().unwrap_or_default();
    if response.contains("\"leader\"") && !response.contains("\"groups\"") {
        return GROUPS; // a single master hosts all groups
    }
    let digits = response.split("\"groups\":").nth(1).unwrap_or_default();
    let digits: String = digits.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::faults::Kind;
    use crate::world::Part;

    #[test]
    fn vacancy_is_interval_with_unhosted_groups() {
        let all = GROUPS;
        let samples = [(1, 0, all), (2, 1, 0), (3, 0, all - 1), (4, 1, 0), (5, 1, 1), (6, 0, 0), (9, 1, 1)];
        assert_eq!(vacancies(&samples, 2), [(3, 5), (6, 9)]);
        assert_eq!(vacancies(&samples[..1], 2), [], "the other master was not polled yet");
    }

    #[test]
    fn vacancy_excludes_time_of_master_and_registry_faults() {
        let fault = |kind, start, end| Done { kind, start, end };
        let faults = [
            fault(Kind::Kill(Part::Master), 10, 20),
            fault(Kind::Stop(Part::Registry), 15, 30),
            fault(Kind::Kill(Part::Client), 40, 90),
        ];
        let check = |from, to, left| assert_eq!(unexplained((from, to), &faults), Duration::from_nanos(left));
        check(12, 28, 0);
        check(5, 28, 5);
        check(12, 47, 17);
        check(31, 47, 16);
        check(0, 9, 9);
    }
}
