//! Which reads are wrong, by the notes of all clients together.
//!
//! A get that began at `g` and brought version `v` of a key is wrong if
//!
//! * nobody had announced a put of `v` under this key before the get ended;
//! * the put of `v` was acknowledged, and after that a removal of the key began, which was acknowledged before `g`;
//! * the same with a put that replaces instead of a removal, and that was acknowledged more than [`REPLACED_MAX`] before `g`.
//!
//! A put that was not acknowledged may come to be at any later time, so nothing is said about when it may be read. A removal
//! that is pending, or found nothing, promises nothing. A node that is cut off from its master goes on serving to those who know
//! it, also what was replaced elsewhere: an object's new version does not wait for nodes that cannot be reached. Times are of one clock of the machine, taken around each call.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::time::Duration;

use crate::faults::{Done, Stop};
use crate::journal::{Kind, Outcome, Record};
use crate::report;
use crate::value::{KeyId, Version};

/// For how long a version that was replaced may still be read: as long as a node is cut off, and until it has come back to
/// its master and was told.
pub const REPLACED_MAX: Duration = Duration::from_secs(10);

/// What happened to a key.
#[derive(Debug, Default)]
struct History {
    /// When each put began, and when it was acknowledged.
    puts: HashMap<Version, (u64, Option<u64>)>,
    /// Removals, and puts that replace: began, acknowledged.
    ends: Vec<(u64, u64, Kind)>,
}

/// What came of it all.
#[derive(Debug, Default)]
pub struct Verdict {
    /// Each wrong read, in words.
    pub wrong: Vec<String>,
    pub longest_get: Duration,
    /// Gets that failed though nothing was wrong any more, by client and why: how many.
    pub unanswered: BTreeMap<String, u64>,
    /// How many reads brought a version that had been replaced, and the longest time since.
    replaced: (u64, Duration),
    pub keys_written: u64,
    /// How often each call ended how.
    counts: BTreeMap<(&'static str, String), u64>,
    /// When gets began and how long they took, but for those of clients that were stopped meanwhile.
    gets: Vec<(u64, Duration)>,
}

/// Judges all records. `stops`: when clients stood still, during which time went on without them; `calm`: from when on all is
/// well.
pub fn judge(records: &[Record], stops: &[Stop], calm: u64) -> Verdict {
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
                && record.start >= calm
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
                Over::Replaced(since) if since <= REPLACED_MAX => {
                    verdict.replaced = (verdict.replaced.0 + 1, verdict.replaced.1.max(since));
                    continue;
                }
                Over::Replaced(since) => format!("{:?} was replaced {since:?} before", record.version),
                Over::Removed(since) => format!("{:?} was removed {since:?} before", record.version),
                Over::Never(why) => why,
            };
            let at = report::moment(record.start);
            verdict.wrong.push(format!("{at} {} by life {}: {since}", record.key.name(), record.life));
        }
    }
    verdict.keys_written = written.len() as u64;
    verdict
}

/// Why a get should not have brought what it brought.
enum Over {
    /// It was right.
    No,
    /// Nobody had put it.
    Never(String),
    /// An answer had said so, so long before the get began.
    Removed(Duration),
    Replaced(Duration),
}

fn over(get: &Record, history: &History) -> Over {
    match get.outcome {
        Outcome::Wrong => return Over::Never("bytes that nobody put; its log says which".into()),
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
        let (times, longest) = self.replaced;
        println!(
            "{times} reads of what had been replaced, the longest {longest:?} before; up to {REPLACED_MAX:?} are allowed"
        );
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

    /// How many reads are wrong among these: kind, outcome, version, start, end.
    fn check(records: &[(Kind, Outcome, u64, u64, u64)], wrong: usize) {
        let records: Vec<Record> = records
            .iter()
            .map(|(kind, outcome, version, s, e)| record(*kind, *outcome, *version, *s, *e))
            .collect();
        assert_eq!(judge(&records, &[], u64::MAX).wrong.len(), wrong, "{records:#?}");
    }

    #[test]
    fn reads_of_what_was_never_put_or_is_over_are_wrong_and_no_others() {
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
        then(&[(Get, Ok, 7, 5, 11)], 0); // beside it
        then(&[(Get, Wrong, 0, 30, 40)], 1);
        then(&[(Remove, Ok, 0, 30, 40), (Get, Ok, 7, 41, 50)], 1);
        then(&[(Remove, Ok, 0, 30, 40), (Get, Ok, 7, 39, 50)], 0); // began before the answer
        then(&[(Remove, Ok, 0, 15, 40), (Get, Ok, 7, 41, 50)], 0); // began before the put was done
        then(&[(Remove, pending, 0, 30, 40), (Get, Ok, 7, 41, 50)], 0);
        then(&[(Remove, Absent, 0, 30, 40), (Get, Ok, 7, 41, 50)], 0);
        let replaced = [(Begin, Ok, 9, 30, 30), (Upsert, Ok, 9, 30, 40)];
        let allowed = REPLACED_MAX.as_nanos() as u64;
        then(&[&replaced[..], &[(Get, Ok, 7, 41 + allowed, 50 + allowed)]].concat(), 1);
        then(&[&replaced[..], &[(Get, Ok, 7, 41, 50)]].concat(), 0); // by somebody who is cut off
        then(&[&replaced[..], &[(Get, Ok, 9, 41 + allowed, 50 + allowed)]].concat(), 0);
        then(&[&replaced[..], &[(Remove, Ok, 0, 45, 46), (Get, Ok, 7, 47, 50)]].concat(), 1);
        // Nobody fails when all is well.
        let failed =
            [(Get, lost, 7, 30, 35), (Get, lost, 7, 41, 45)].map(|(k, o, v, s, e)| record(k, o, v, s, e));
        assert_eq!(judge(&failed, &[], 40).unanswered.values().sum::<u64>(), 1);
        // A put that was not acknowledged may be there at any later time.
        let lost =
            [(Begin, Ok, 7, 10, 10), (Put, lost, 7, 10, 20), (Remove, Ok, 0, 30, 40), (Get, Ok, 7, 41, 50)];
        check(&lost, 0);
    }
}
