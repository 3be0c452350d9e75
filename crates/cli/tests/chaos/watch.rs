//! [`Watch`]: somebody who asks every master, again and again, how many groups it hosts, from where no cut is between.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::faults::Done;
use crate::journal::now;
use crate::report;
use crate::world::{GROUPS, LEASE_MS};

/// Between two questions, and how long an answer may take: one that is stopped answers nothing.
const PAUSE: Duration = Duration::from_millis(50);
const ANSWER_MAX: Duration = Duration::from_millis(300);

/// How long a group may be without a master while no master and no registry is in trouble: one whose trouble has just ended
/// may have a lease that runs, and another may die with its share.
pub const VACANT_MAX: Duration = Duration::from_millis(2 * LEASE_MS + 1500);

/// When a master was asked, and how many groups it hosts.
type Sample = (u64, usize, usize);

/// Asks until it is told to end.
pub struct Watch {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<Vec<Sample>>>,
}

impl Watch {
    /// `pages`: where masters show them.
    pub fn start(pages: &[String]) -> Watch {
        let stop = Arc::new(AtomicBool::new(false));
        let ask = |(at, page): (usize, &String)| {
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
        let threads = pages.iter().enumerate().map(ask).collect();
        Watch { stop, threads }
    }

    /// When not all groups were hosted by somebody: from, to.
    pub fn end(self) -> Vec<(u64, u64)> {
        self.stop.store(true, Ordering::Relaxed);
        let masters = self.threads.len();
        let samples = self.threads.into_iter().flat_map(|thread| thread.join().expect("it only asks"));
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

/// The longest part of a vacancy in which nothing was wrong with any master or the registry.
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

/// Says how long groups were without a master; those that were so for too long without a reason.
pub fn judge(vacancies: &[(u64, u64)], faults: &[Done]) -> Vec<String> {
    let longest = vacancies.iter().map(|(from, to)| to - from).max().unwrap_or_default();
    let parts = vacancies.iter().map(|&vacancy| unexplained(vacancy, faults));
    println!(
        "{} times some group had no master, for {:?} at the longest; {:?} at the longest while no master and no \
         registry was in trouble",
        vacancies.len(),
        Duration::from_nanos(longest),
        parts.max().unwrap_or_default()
    );
    let wrong = vacancies.iter().filter(|&&vacancy| unexplained(vacancy, faults) > VACANT_MAX);
    let text = |&(from, to): &(u64, u64)| {
        format!("from {} to {} some group had no master", report::moment(from), report::moment(to))
    };
    wrong.map(text).collect()
}

/// None hosted: that is also what nobody answers.
fn groups_of(page: &str) -> usize {
    let ask = || -> std::io::Result<String> {
        let address = page.parse().map_err(std::io::Error::other)?;
        let mut stream = TcpStream::connect_timeout(&address, ANSWER_MAX)?;
        stream.set_read_timeout(Some(ANSWER_MAX))?;
        write!(stream, "GET /role HTTP/1.0\r\nhost: {page}\r\n\r\n")?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        Ok(answer)
    };
    let answer = ask().unwrap_or_default();
    if answer.contains("\"leader\"") && !answer.contains("\"groups\"") {
        return GROUPS; // it is alone, and hosts all
    }
    let digits = answer.split("\"groups\":").nth(1).unwrap_or_default();
    let digits: String = digits.chars().take_while(char::is_ascii_digit).collect();
    digits.parse().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::faults::Kind;
    use crate::world::Part;

    #[test]
    fn vacancies_are_where_the_sum_is_too_small() {
        let all = GROUPS;
        let samples = [(1, 0, all), (2, 1, 0), (3, 0, all - 1), (4, 1, 0), (5, 1, 1), (6, 0, 0), (9, 1, 1)];
        assert_eq!(vacancies(&samples, 2), [(3, 5), (6, 9)]);
        assert_eq!(vacancies(&samples[..1], 2), [], "the other was not asked yet");
    }

    #[test]
    fn what_a_fault_explains_is_not_counted() {
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
