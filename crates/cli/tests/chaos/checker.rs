//! Examines the journals of all clients: wrong gets ([`History`] decides for each key), failures after healing, numbers
//! and latencies of calls.

use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::time::Duration;

use crate::client::{DEADLINE, LATE};
use crate::faults::{Done, Stop};
use crate::journal::{Kind, Outcome, Record};
use crate::linearizability::{History, Violation};
use crate::machine::LostTime;
use crate::report;
use crate::value::KeyId;
use crate::world::TEST_LIFE;

/// Number of wrong gets that are described.
const DESCRIBED_MAX: usize = 20;

/// Result of the check.
#[derive(Debug, Default)]
pub struct Verdict {
    /// Wrong gets, by cause.
    pub wrong: BTreeMap<&'static str, u64>,
    /// Descriptions of the first wrong gets.
    pub described: Vec<String>,
    /// The longest get that ended too late.
    pub late_get: Option<Duration>,
    /// Number of gets that failed after healing, by client and error.
    pub unanswered: BTreeMap<String, u64>,
    /// Number of gets that were late, or failed after healing, while the machine lost time.
    excused: u64,
    pub keys_written: u64,
    /// Gets of a version that is older than that of a put without upsert: correct, but worth knowing.
    older_than_put: usize,
    /// Number of calls of clients by kind and result.
    counts: BTreeMap<(&'static str, String), u64>,
    /// Start and duration of gets, except those of clients that were stopped meanwhile.
    gets: Vec<(u64, Duration)>,
}

/// Checks all records. `stops`: times in which clients were stopped; `quiet`: time from which no fault is active; `lost`:
/// time that the machine lost, which excuses late gets, and gets that failed after healing.
pub fn judge(records: &[Record], stops: &[Stop], quiet: u64, lost: &LostTime) -> Verdict {
    let mut histories: HashMap<KeyId, History> = HashMap::new();
    let mut verdict = Verdict::default();
    let mut written = HashSet::new();
    for record in records {
        histories.entry(record.key).or_default().add(record);
        let call = match record.kind {
            Kind::Begin => continue,
            Kind::Put => "put",
            Kind::Upsert => "upsert",
            Kind::Remove => "remove",
            Kind::Get => "get",
        };
        let ended = match record.outcome {
            Outcome::Ok => "ok".to_owned(),
            Outcome::Absent if record.kind == Kind::Put => "exists".to_owned(),
            Outcome::Absent => "absent".to_owned(),
            Outcome::Wrong => "WRONG".to_owned(),
            Outcome::Failed(code) => code.name().to_owned(),
        };
        if record.life != TEST_LIFE {
            *verdict.counts.entry((call, ended)).or_default() += 1;
        }
        if matches!(record.kind, Kind::Put | Kind::Upsert) && record.outcome == Outcome::Ok {
            written.insert(record.key);
        }
        if record.kind == Kind::Get {
            if let Outcome::Failed(code) = record.outcome
                && record.start >= quiet
            {
                // What was lost since healing may have delayed what this get needed.
                if lost.excuses(quiet, record.end) || lost.excuses(record.start, record.end) {
                    verdict.excused += 1;
                } else {
                    *verdict
                        .unanswered
                        .entry(format!("life {}: {}", record.life, code.name()))
                        .or_default() += 1;
                }
            }
            let took = Duration::from_nanos(record.end - record.start);
            // The test itself reads many keys at once, with a longer timeout.
            if record.life != TEST_LIFE && !stops.iter().any(|stop| stop.touches(record)) {
                verdict.gets.push((record.start, took));
                let is_late = took > DEADLINE + LATE;
                if is_late && lost.excuses(record.start, record.end) {
                    verdict.excused += 1;
                } else if is_late {
                    verdict.late_get = verdict.late_get.max(Some(took));
                }
            }
        }
    }
    verdict.keys_written = written.len() as u64;
    verdict.older_than_put = histories.values().map(History::gets_older_than_a_put).sum();
    let mut wrong: Vec<(Record, Violation)> = histories.values().flat_map(History::violations).collect();
    wrong.sort_unstable_by_key(|(get, _)| get.start);
    for (_, violation) in &wrong {
        *verdict.wrong.entry(cause(*violation)).or_default() += 1;
    }
    verdict.described =
        wrong.iter().take(DESCRIBED_MAX).map(|(get, violation)| describe(get, *violation, records)).collect();
    verdict
}

/// Returns the keys that any client may have written.
pub fn keys(records: &[Record]) -> Vec<KeyId> {
    let begun = records.iter().filter(|record| record.kind == Kind::Begin).map(|record| record.key);
    begun.collect::<BTreeSet<KeyId>>().into_iter().collect()
}

fn cause(violation: Violation) -> &'static str {
    match violation {
        Violation::WrongBytes => "wrong bytes",
        Violation::NeverPut => "never put",
        Violation::PutLater => "put later",
        Violation::Removed { found: true, .. } => "removed",
        Violation::Removed { found: false, .. } => "removed, when nothing was found",
        Violation::Replaced { .. } => "replaced",
        Violation::Contradiction { .. } => "contradicts another get",
    }
}

/// Describes a wrong get, with all operations of the key except misses and gets of other versions.
fn describe(get: &Record, violation: Violation, records: &[Record]) -> String {
    let is_other = |record: &Record| {
        record.kind == Kind::Get && (record.outcome != Outcome::Ok || record.version != get.version)
    };
    let mut history: Vec<&Record> =
        records.iter().filter(|record| record.key == get.key && !is_other(record)).collect();
    history.sort_unstable_by_key(|record| record.start);
    let mut text = format!(
        "{} {} by life {}: {:x?}: {violation:x?}",
        report::moment(get.start),
        get.key.name(),
        get.life,
        get.version
    );
    for Record { kind, outcome, life, version, start, end, .. } in history {
        let (from, to) = (report::moment(*start), report::moment(*end));
        text += &format!("\n  {from} to {to} life {life}: {kind:?} {version:x?} {outcome:?}");
    }
    text
}

impl Verdict {
    pub fn print(&self, faults: &[Done]) {
        report::operations(&self.counts, self.keys_written);
        report::latencies(&self.gets, faults);
        println!("{} gets of a version older than that of a put without upsert", self.older_than_put);
        println!("{} late or failed gets are excused by time that the machine lost", self.excused);
        println!("{} wrong gets: {:?}", self.wrong.values().sum::<u64>(), self.wrong);
    }
}

#[cfg(test)]
mod tests {
    use moontide_types::ErrorCode;

    use super::*;
    use crate::value::Version;

    fn record(kind: Kind, outcome: Outcome, version: u64, start: u64, end: u64) -> Record {
        Record { kind, outcome, life: 1, key: KeyId::hot(1), version: Version(version), start, end }
    }

    #[test]
    fn wrong_gets_and_failures_after_healing_are_counted() {
        let records = [
            record(Kind::Begin, Outcome::Ok, 7, 10, 10),
            record(Kind::Put, Outcome::Ok, 7, 10, 20),
            record(Kind::Get, Outcome::Ok, 7, 21, 22),
            record(Kind::Remove, Outcome::Ok, 0, 23, 25),
            record(Kind::Get, Outcome::Failed(ErrorCode::ConnectionLost), 0, 30, 35),
            record(Kind::Get, Outcome::Failed(ErrorCode::ConnectionLost), 0, 41, 45),
            record(Kind::Get, Outcome::Ok, 7, 50, 60),
            record(Kind::Get, Outcome::Wrong, 0, 70, 80),
        ];
        let verdict = judge(&records, &[], 40, &LostTime::default());
        assert_eq!(verdict.wrong, BTreeMap::from([("removed", 1), ("wrong bytes", 1)]));
        assert_eq!(verdict.described.len(), 2);
        assert_eq!(verdict.unanswered.values().sum::<u64>(), 1);
        assert_eq!(verdict.keys_written, 1);
        // A version of one key does not excuse that of another.
        let other = Record { key: KeyId::hot(2), ..records[2] };
        assert_eq!(
            judge(&[records[0], records[1], other], &[], 40, &LostTime::default()).wrong,
            BTreeMap::from([("never put", 1)])
        );
    }
}
