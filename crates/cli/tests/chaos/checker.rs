//! Detects wrong reads from the journals of all clients.
//!
//! A get that started at `g` and returned version `v` of a key is wrong if
//!
//! * no client had announced a put of `v` under this key before the get ended;
//! * the put of `v` was acknowledged, and a removal of the key started after that and was acknowledged before `g`;
//! * the same with an upsert instead of a removal.
//!
//! A put that was not acknowledged may take effect at any later time, so its reads are not restricted. A removal that
//! found nothing guarantees nothing, and neither does a removal or an upsert that is pending: a node is unreachable.
//! Times are of the monotonic clock of the machine, taken around each call.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use crate::faults::{Done, Stop};
use crate::journal::{Kind, Outcome, Record};
use crate::report;
use crate::value::{KeyId, Version};

/// Events of a key.
#[derive(Debug, Default)]
struct History {
    /// Start of each put, and its acknowledgement.
    puts: HashMap<Version, (u64, Option<u64>)>,
    /// Removals and upserts: start, acknowledgement.
    ends: Vec<(u64, u64, Kind)>,
}

/// Result of the check.
#[derive(Debug, Default)]
pub struct Verdict {
    /// Description of each wrong read.
    pub wrong: Vec<String>,
    pub longest_get: Duration,
    /// Number of gets that failed after healing, by client and error.
    pub unanswered: BTreeMap<String, u64>,
    pub keys_written: u64,
    /// Number of calls by kind and result.
    counts: BTreeMap<(&'static str, String), u64>,
    /// Start and duration of gets, except those of clients that were stopped meanwhile.
    gets: Vec<(u64, Duration)>,
}

/// Checks all records. `stops`: times in which clients were stopped; `quiet`: time from which no fault is active.
pub fn judge(records: &[Record], stops: &[Stop], quiet: u64) -> Verdict {
    let mut histories: HashMap<KeyId, History> = HashMap::new();
    for record in records {
        let history = histories.entry(record.key).or_default();
        match (record.kind, record.outcome) {
            (Kind::Begin, _) => {
                history.puts.insert(record.version, (record.start, None));
            }
            (Kind::Put | Kind::Upsert, Outcome::Ok) => {
                history.puts.insert(record.version, (record.start, Some(record.end)));
                if record.kind == Kind::Upsert {
                    history.ends.push((record.start, record.end, Kind::Upsert));
                }
            }
            (Kind::Remove, Outcome::Ok) => history.ends.push((record.start, record.end, Kind::Remove)),
            _ => {}
        }
    }
    let mut verdict = Verdict::default();
    let mut written = HashSet::new();
    for record in records {
        let call = match record.kind {
            Kind::Begin => continue,
            Kind::Put | Kind::Upsert => "put",
            Kind::Remove => "remove",
            Kind::Get => "get",
        };
        let ended = match record.outcome {
            Outcome::Ok => "ok".to_owned(),
            Outcome::Absent => "absent".to_owned(),
            Outcome::Wrong => "WRONG".to_owned(),
            Outcome::Failed(code) => code.name().to_owned(),
        };
        *verdict.counts.entry((call, ended)).or_default() += 1;
        if call == "put" && record.outcome == Outcome::Ok {
            written.insert(record.key);
        }
        if record.kind == Kind::Get {
            if let Outcome::Failed(code) = record.outcome
                && record.start >= quiet
            {
                *verdict.unanswered.entry(format!("life {}: {}", record.life, code.name())).or_default() += 1;
            }
            let took = Duration::from_nanos(record.end - record.start);
            if !stops.iter().any(|stop| stop.touches(record)) {
                verdict.gets.push((record.start, took));
                verdict.longest_get = verdict.longest_get.max(took);
            }
            let since = match over(record, &histories[&record.key]) {
                Over::No => continue,
                Over::Replaced(since) => format!("{:?} was replaced {since:?} before", record.version),
                Over::Removed(since) => format!("{:?} was removed {since:?} before", record.version),
                Over::Never(reason) => reason,
            };
            let at = report::moment(record.start);
            verdict.wrong.push(format!("{at} {} by life {}: {since}", record.key.name(), record.life));
        }
    }
    verdict.keys_written = written.len() as u64;
    verdict
}

/// Reason why the result of a get is wrong.
enum Over {
    /// The result is correct.
    No,
    /// No client had put it.
    Never(String),
    /// Its removal was acknowledged this long before the get started.
    Removed(Duration),
    Replaced(Duration),
}

fn over(get: &Record, history: &History) -> Over {
    match get.outcome {
        Outcome::Wrong => return Over::Never("bytes that no client put; see the client's log".into()),
        Outcome::Ok => {}
        Outcome::Absent | Outcome::Failed(_) => return Over::No,
    }
    let Some((began, acknowledged)) = history.puts.get(&get.version) else {
        return Over::Never(format!("{:?} was never put", get.version));
    };
    if *began > get.end {
        return Over::Never(format!("{:?} was put later", get.version));
    }
    let Some(acknowledged) = *acknowledged else { return Over::No };
    let longest = |kind: Kind| {
        let ends = history
            .ends
            .iter()
            .filter(|(start, end, by)| *by == kind && *start >= acknowledged && *end <= get.start);
        ends.map(|(_, end, _)| Duration::from_nanos(get.start - end)).max()
    };
    match (longest(Kind::Remove), longest(Kind::Upsert)) {
        (Some(since), _) => Over::Removed(since),
        (None, Some(since)) => Over::Replaced(since),
        (None, None) => Over::No,
    }
}

impl Verdict {
    pub fn print(&self, faults: &[Done]) {
        report::operations(&self.counts, self.keys_written);
        report::latencies(&self.gets, faults);
        println!("{} wrong reads", self.wrong.len());
    }
}

#[cfg(test)]
mod tests {
    use moontide_types::ErrorCode;

    use super::*;

    fn record(kind: Kind, outcome: Outcome, version: u64, start: u64, end: u64) -> Record {
        Record { kind, outcome, life: 1, key: KeyId::hot(1), version: Version(version), start, end }
    }

    /// Asserts the number of wrong reads among records of kind, outcome, version, start, end.
    fn check(records: &[(Kind, Outcome, u64, u64, u64)], wrong: usize) {
        let records: Vec<Record> = records
            .iter()
            .map(|(kind, outcome, version, s, e)| record(*kind, *outcome, *version, *s, *e))
            .collect();
        assert_eq!(judge(&records, &[], u64::MAX).wrong.len(), wrong, "{records:#?}");
    }

    #[test]
    fn checker_flags_only_unwritten_corrupt_and_stale_reads() {
        use Kind::{Begin, Get, Put, Remove, Upsert};
        use Outcome::{Absent, Failed, Ok, Wrong};
        let pending = Failed(ErrorCode::Pending);
        let lost = Failed(ErrorCode::ConnectionLost);
        let put = [(Begin, Ok, 7, 10, 10), (Put, Ok, 7, 10, 20)];
        let then = |more: &[(Kind, Outcome, u64, u64, u64)], wrong| {
            check(&[&put[..], more].concat(), wrong);
        };
        then(&[(Get, Ok, 7, 30, 40)], 0);
        then(&[(Get, Absent, 0, 30, 40)], 0);
        then(&[(Get, Ok, 8, 30, 40)], 1); // never put
        then(&[(Get, Ok, 7, 5, 9)], 1); // read before it was put
        then(&[(Get, Ok, 7, 5, 11)], 0); // concurrent
        then(&[(Get, Wrong, 0, 30, 40)], 1);
        then(&[(Remove, Ok, 0, 30, 40), (Get, Ok, 7, 41, 50)], 1);
        then(&[(Remove, Ok, 0, 30, 40), (Get, Ok, 7, 39, 50)], 0); // started before the acknowledgement
        then(&[(Remove, Ok, 0, 15, 40), (Get, Ok, 7, 41, 50)], 0); // started before the put was acknowledged
        then(&[(Remove, pending, 0, 30, 40), (Get, Ok, 7, 41, 50)], 0);
        then(&[(Remove, Absent, 0, 30, 40), (Get, Ok, 7, 41, 50)], 0);
        let replaced = [(Begin, Ok, 9, 30, 30), (Upsert, Ok, 9, 30, 40)];
        then(&[&replaced[..], &[(Get, Ok, 7, 41, 50)]].concat(), 1);
        then(&[&replaced[..], &[(Get, Ok, 7, 39, 50)]].concat(), 0); // started before the acknowledgement
        then(&[&replaced[..], &[(Get, Ok, 9, 41, 50)]].concat(), 0);
        then(&[(Begin, Ok, 9, 30, 30), (Upsert, pending, 9, 30, 40), (Get, Ok, 7, 41, 50)], 0);
        then(&[&replaced[..], &[(Remove, Ok, 0, 45, 46), (Get, Ok, 7, 47, 50)]].concat(), 1);
        // Failures without active faults are reported.
        let failed =
            [(Get, lost, 7, 30, 35), (Get, lost, 7, 41, 45)].map(|(k, o, v, s, e)| record(k, o, v, s, e));
        assert_eq!(judge(&failed, &[], 40).unanswered.values().sum::<u64>(), 1);
        // A put that was not acknowledged may take effect at any later time.
        let lost =
            [(Begin, Ok, 7, 10, 10), (Put, lost, 7, 10, 20), (Remove, Ok, 0, 30, 40), (Get, Ok, 7, 41, 50)];
        check(&lost, 0);
    }
}
