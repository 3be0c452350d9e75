//! Checks the operations of one key for linearizability.
//!
//! The model is a register with a set of versions that a get may return. An upsert replaces the set by its own version,
//! a removal by nothing, also if it found nothing. A put without upsert adds its version: it promises nothing about
//! older ones. Neither does an upsert that is `Pending`: its version is stored. No two calls write the same version. Each
//! call takes effect once, at some time between its start and its end; the checker asks whether there are such times for
//! which every get is correct. Exceptions:
//!
//! * A miss is always correct: the store is a cache.
//! * A write or a removal with an uncertain result (an error, a timeout, a `Pending` removal, a killed client) takes
//!   effect at any time from its start on, or never, or is undone. So a get may return such a version at any time, and an
//!   uncertain removal ends nothing. A put that finds another version is uncertain too: the client may have repeated it.
//! * A get that starts before the write of its version ended says nothing about other gets: until its acknowledgement a
//!   write is uncertain.
//!
//! The remaining operations decide. If a version is returned after its write ended, no upsert or removal takes effect
//! from the end of the write to the start of the last get of this version, its *zone*. Zones that overlap form a
//! *block*. So times exist if and only if
//!
//! * no upsert or removal lies within a block;
//! * the zone of at most one upsert is in each block: only one upsert is the last one before it.
//!
//! The first is checked for each zone first: then the cause of a wrong get is a single operation. The idea of zones is
//! that of Gibbons and Korach, "Testing shared memories", 1997. Times are of the monotonic clock of the machine, taken
//! around each call.

use std::collections::HashMap;

use moontide_types::ErrorCode;

use crate::journal::{Kind, Outcome, Record};
use crate::value::Version;

/// Why a get is wrong. Times are nanoseconds from the end of the operation to the start of the get.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Violation {
    /// The bytes are not those of a version of the key.
    WrongBytes,
    /// No client has put the version.
    NeverPut,
    /// The put of the version started after the end of the get.
    PutLater,
    /// A removal started after the end of the write, and ended before the get. `found`: it found an object.
    Removed { found: bool, since: u64 },
    /// The same with an upsert.
    Replaced { by: Version, since: u64 },
    /// No single operation is the cause, but there is no order of the operations in which this get and those of the
    /// other version are correct.
    Contradiction { other: Version },
}

/// A write: its start, and its end if it is certain.
#[derive(Clone, Copy, Debug)]
struct Write {
    start: u64,
    end: Option<u64>,
    upsert: bool,
}

/// A certain removal or upsert.
#[derive(Clone, Copy, Debug)]
struct Reset {
    start: u64,
    end: u64,
    by: ResetBy,
}

/// In the order in which they are named as the cause of a wrong get.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ResetBy {
    Removal,
    Upsert(Version),
    /// A removal that found nothing.
    Absence,
}

impl Reset {
    fn is_within(&self, from: u64, to: u64) -> bool {
        self.start > from && self.end < to
    }
}

/// From the end of the write of a version to the start of the last get that returned it.
#[derive(Clone, Copy, Debug)]
struct Zone {
    from: u64,
    to: u64,
    upsert: bool,
    last: Record,
}

/// Operations of one key.
#[derive(Debug, Default)]
pub struct History {
    writes: HashMap<Version, Write>,
    resets: Vec<Reset>,
    gets: Vec<Record>,
}

impl History {
    /// Adds an operation, in any order.
    pub fn add(&mut self, record: &Record) {
        let &Record { kind, outcome, version, start, end, .. } = record;
        let mut reset = |by| self.resets.push(Reset { start, end, by });
        match (kind, outcome) {
            (Kind::Begin, _) => {
                self.writes.entry(version).or_insert(Write { start, end: None, upsert: false });
            }
            (Kind::Put, Outcome::Ok) | (Kind::Upsert, Outcome::Failed(ErrorCode::Pending)) => {
                self.writes.insert(version, Write { start, end: Some(end), upsert: false });
            }
            (Kind::Upsert, Outcome::Ok) => {
                reset(ResetBy::Upsert(version));
                self.writes.insert(version, Write { start, end: Some(end), upsert: true });
            }
            (Kind::Remove, Outcome::Ok) => reset(ResetBy::Removal),
            (Kind::Remove, Outcome::Absent) => reset(ResetBy::Absence),
            (Kind::Get, Outcome::Ok | Outcome::Wrong) => self.gets.push(*record),
            // Uncertain writes and removals, misses and failed gets.
            (Kind::Put | Kind::Upsert | Kind::Remove | Kind::Get, _) => {}
        }
    }

    /// Returns the wrong gets, each once.
    pub fn violations(&self) -> Vec<(Record, Violation)> {
        let mut found = vec![];
        let mut zones: HashMap<Version, Zone> = HashMap::new();
        for get in &self.gets {
            if let Some(violation) = self.violation(get) {
                found.push((*get, violation));
                continue;
            }
            let write = self.writes[&get.version];
            if let Some(from) = write.end.filter(|end| *end < get.start) {
                let zone = Zone { from, to: get.start, upsert: write.upsert, last: *get };
                let known = zones.entry(get.version).or_insert(zone);
                if zone.to > known.to {
                    *known = zone;
                }
            }
        }
        let mut zones: Vec<Zone> = zones.into_values().collect();
        zones.sort_unstable_by_key(|zone| (zone.from, zone.to));
        let mut rest = &zones[..];
        while let [first, ..] = rest {
            let (mut to, mut len) = (first.to, 1);
            while let Some(next) = rest.get(len).filter(|next| next.from < to) {
                (to, len) = (to.max(next.to), len + 1);
            }
            let block;
            (block, rest) = rest.split_at(len);
            found.extend(self.block_violation(block, to));
        }
        found
    }

    /// Checks one get.
    fn violation(&self, get: &Record) -> Option<Violation> {
        if get.outcome == Outcome::Wrong {
            return Some(Violation::WrongBytes);
        }
        let Some(write) = self.writes.get(&get.version) else { return Some(Violation::NeverPut) };
        if write.start > get.end {
            return Some(Violation::PutLater);
        }
        let written = write.end?;
        let within = self.resets.iter().filter(|reset| reset.is_within(written, get.start));
        let reset = within.min_by_key(|reset| (reset.by, reset.end))?;
        let since = get.start - reset.end;
        Some(match reset.by {
            ResetBy::Removal => Violation::Removed { found: true, since },
            ResetBy::Absence => Violation::Removed { found: false, since },
            ResetBy::Upsert(by) => Violation::Replaced { by, since },
        })
    }

    /// Checks zones that form a block, which ends at `to`.
    fn block_violation(&self, block: &[Zone], to: u64) -> Option<(Record, Violation)> {
        let contradiction = |one: &Zone, other: &Zone| {
            let (early, late) = if one.to < other.to { (one, other) } else { (other, one) };
            Some((late.last, Violation::Contradiction { other: early.last.version }))
        };
        let mut upserts = block.iter().filter(|zone| zone.upsert);
        if let (Some(one), Some(other)) = (upserts.next(), upserts.next()) {
            return contradiction(one, other);
        }
        let (first, last) = (block.first()?, block.iter().max_by_key(|zone| zone.to)?);
        let reset = self.resets.iter().find(|reset| reset.is_within(first.from, to));
        reset.and_then(|_| contradiction(first, last))
    }

    /// Returns the number of gets of versions that were written before another put without upsert. They are correct.
    pub fn gets_older_than_a_put(&self) -> usize {
        let puts: Vec<&Write> = self.writes.values().filter(|write| !write.upsert).collect();
        let is_older = |get: &&Record| {
            let written = self.writes.get(&get.version).and_then(|write| write.end);
            written.is_some_and(|written| {
                let ended = |put: &&Write| put.end.is_some_and(|end| end < get.start);
                puts.iter().any(|put| put.start > written && ended(put))
            })
        };
        self.gets.iter().filter(is_older).count()
    }
}

#[cfg(test)]
mod tests {
    use Kind::{Begin, Get, Put, Remove, Upsert};
    use Outcome::{Absent, Failed, Ok, Wrong};

    use super::*;
    use crate::value::KeyId;

    const PENDING: Outcome = Failed(ErrorCode::Pending);
    const LOST: Outcome = Failed(ErrorCode::ConnectionLost);

    /// Kind, outcome, version, start, end.
    type Call = (Kind, Outcome, u64, u64, u64);

    fn check(calls: &[Call]) -> Vec<Violation> {
        let mut history = History::default();
        for &(kind, outcome, version, start, end) in calls {
            let (key, version) = (KeyId::hot(1), Version(version));
            if matches!(kind, Put | Upsert) {
                let begin = Record { kind: Begin, outcome: Ok, life: 1, key, version, start, end: start };
                history.add(&begin);
            }
            history.add(&Record { kind, outcome, life: 1, key, version, start, end });
        }
        history.violations().into_iter().map(|(_, violation)| violation).collect()
    }

    #[track_caller]
    fn accepts(calls: &[Call]) {
        assert_eq!(check(calls), [], "{calls:?}");
    }

    #[track_caller]
    fn rejects(calls: &[Call], violation: Violation) {
        assert_eq!(check(calls), [violation], "{calls:?}");
    }

    #[test]
    fn read_of_the_last_write_or_a_miss_is_accepted() {
        accepts(&[]);
        accepts(&[(Get, Absent, 0, 1, 2)]);
        accepts(&[
            (Put, Ok, 7, 10, 20),
            (Get, Ok, 7, 30, 40),
            (Get, Absent, 0, 50, 60),
            (Get, Ok, 7, 70, 80),
        ]);
        accepts(&[(Put, Ok, 7, 10, 20), (Upsert, Ok, 8, 30, 40), (Get, Ok, 8, 41, 50)]);
        accepts(&[(Put, Ok, 7, 10, 20), (Remove, Ok, 0, 30, 40), (Put, Ok, 8, 50, 60), (Get, Ok, 8, 70, 80)]);
        accepts(&[(Put, Ok, 7, 10, 20), (Get, Ok, 7, 5, 11)]); // concurrent with the put
        accepts(&[(Put, Ok, 7, 10, 20), (Get, LOST, 0, 30, 40)]);
    }

    #[test]
    fn read_of_wrong_bytes_or_of_an_unwritten_version_is_rejected() {
        rejects(&[(Put, Ok, 7, 10, 20), (Get, Wrong, 0, 30, 40)], Violation::WrongBytes);
        rejects(&[(Get, Wrong, 0, 30, 40)], Violation::WrongBytes);
        rejects(&[(Put, Ok, 7, 10, 20), (Get, Ok, 8, 30, 40)], Violation::NeverPut);
        rejects(&[(Put, Ok, 7, 10, 20), (Get, Ok, 7, 5, 9)], Violation::PutLater);
        rejects(&[(Put, LOST, 7, 10, 20), (Get, Ok, 7, 5, 9)], Violation::PutLater);
    }

    #[test]
    fn read_of_a_removed_version_is_rejected() {
        let removed = |found, since| Violation::Removed { found, since };
        let put = (Put, Ok, 7, 10, 20);
        rejects(&[put, (Remove, Ok, 0, 30, 40), (Get, Ok, 7, 41, 50)], removed(true, 1));
        rejects(&[put, (Remove, Absent, 0, 30, 40), (Get, Ok, 7, 45, 50)], removed(false, 5));
        // A miss in between changes nothing, and neither do operations in another order of the journal.
        let miss = (Get, Absent, 0, 42, 44);
        rejects(&[(Get, Ok, 7, 45, 50), miss, (Remove, Ok, 0, 30, 40), put], removed(true, 5));
        // Removed, written again, removed again.
        let again = [put, (Remove, Ok, 0, 30, 40), (Put, Ok, 8, 50, 60), (Remove, Ok, 0, 70, 80)];
        rejects(&[&again[..], &[(Get, Ok, 8, 90, 95)]].concat(), removed(true, 10));
        rejects(&[&again[..3], &[(Get, Ok, 7, 90, 95)]].concat(), removed(true, 50));
        // An uncertain put does not excuse a version that another put wrote.
        rejects(
            &[put, (Put, LOST, 8, 25, 28), (Remove, Ok, 0, 30, 40), (Get, Ok, 7, 41, 50)],
            removed(true, 1),
        );
        // Two returned gets are two violations.
        let calls = [put, (Remove, Ok, 0, 30, 40), (Get, Ok, 7, 41, 50), (Get, Ok, 7, 61, 70)];
        assert_eq!(check(&calls), [removed(true, 1), removed(true, 21)]);
    }

    #[test]
    fn read_of_a_replaced_version_is_rejected() {
        let replaced = |by, since| Violation::Replaced { by: Version(by), since };
        let put = (Put, Ok, 7, 10, 20);
        rejects(&[put, (Upsert, Ok, 9, 30, 40), (Get, Ok, 7, 41, 50)], replaced(9, 1));
        let upserts = [put, (Upsert, Ok, 8, 30, 40), (Upsert, Ok, 9, 50, 60)];
        rejects(&[&upserts[..], &[(Get, Ok, 8, 61, 70)]].concat(), replaced(9, 1));
        let removal = [put, (Upsert, Ok, 9, 30, 40), (Remove, Ok, 0, 45, 46), (Get, Ok, 7, 47, 50)];
        rejects(&removal, Violation::Removed { found: true, since: 1 });
    }

    #[test]
    fn concurrent_changes_may_take_effect_in_either_order() {
        let put = (Put, Ok, 7, 10, 20);
        accepts(&[put, (Remove, Ok, 0, 30, 40), (Get, Ok, 7, 39, 50)]); // the get started before the end
        accepts(&[put, (Remove, Ok, 0, 15, 40), (Get, Ok, 7, 41, 50)]); // the removal before the end of the put
        accepts(&[put, (Upsert, Ok, 9, 30, 40), (Get, Ok, 7, 39, 50), (Get, Ok, 9, 31, 38)]);
        accepts(&[(Upsert, Ok, 8, 10, 20), (Upsert, Ok, 9, 10, 20), (Get, Ok, 8, 30, 40)]);
        accepts(&[
            (Upsert, Ok, 8, 10, 20),
            (Upsert, Ok, 9, 10, 20),
            (Get, Ok, 9, 30, 40),
            (Get, Ok, 9, 50, 60),
        ]);
        // Both were visible while both were being written.
        accepts(&[
            (Upsert, Ok, 8, 10, 20),
            (Upsert, Ok, 9, 10, 20),
            (Get, Ok, 8, 12, 13),
            (Get, Ok, 9, 30, 40),
        ]);
    }

    #[test]
    fn gets_that_order_concurrent_writes_differently_are_rejected() {
        let writes = [(Upsert, Ok, 8, 10, 20), (Upsert, Ok, 9, 10, 21)];
        let contradiction = |other| Violation::Contradiction { other: Version(other) };
        let gets = [(Get, Ok, 8, 30, 35), (Get, Ok, 9, 40, 45)];
        rejects(&[&writes[..], &gets].concat(), contradiction(8));
        let gets = [(Get, Ok, 9, 30, 35), (Get, Ok, 8, 40, 45)];
        rejects(&[&writes[..], &gets].concat(), contradiction(9));
        // The put is read at 60, so that the upsert of 9 took effect before 20. But 8 is read at 30.
        let calls = [
            (Upsert, Ok, 8, 5, 15),
            (Put, Ok, 7, 10, 20),
            (Upsert, Ok, 9, 10, 40),
            (Get, Ok, 8, 30, 31),
            (Get, Ok, 9, 50, 51),
        ];
        accepts(&calls);
        rejects(&[&calls[..], &[(Get, Ok, 7, 60, 61)]].concat(), contradiction(8));
        // The removal fits neither before 20 nor after 40, although it is in neither zone.
        let calls = [(Put, Ok, 7, 5, 10), (Put, Ok, 8, 15, 20), (Remove, Ok, 0, 12, 35)];
        let gets = [(Get, Ok, 7, 30, 31), (Get, Ok, 8, 40, 41)];
        rejects(&[&calls[..], &gets].concat(), contradiction(7));
        // A later write that is concurrent with the second get explains it.
        accepts(&[
            (Upsert, Ok, 8, 10, 20),
            (Upsert, Ok, 9, 10, 45),
            (Get, Ok, 8, 30, 35),
            (Get, Ok, 9, 40, 50),
        ]);
        accepts(&[
            (Upsert, Ok, 8, 10, 20),
            (Get, Ok, 8, 30, 35),
            (Upsert, Ok, 9, 25, 60),
            (Get, Ok, 9, 70, 75),
        ]);
    }

    #[test]
    fn pending_upsert_is_stored_and_ends_no_older_version() {
        let writes = [(Put, Ok, 7, 10, 20), (Upsert, PENDING, 9, 30, 40)];
        accepts(&[&writes[..], &[(Get, Ok, 9, 41, 50), (Get, Ok, 7, 51, 60), (Get, Ok, 9, 61, 70)]].concat());
        let removed = Violation::Removed { found: true, since: 10 };
        rejects(&[&writes[..], &[(Remove, Ok, 0, 50, 60), (Get, Ok, 9, 70, 80)]].concat(), removed);
    }

    #[test]
    fn put_without_upsert_ends_no_older_version() {
        let puts = [(Put, Ok, 7, 10, 20), (Put, Ok, 8, 30, 40)];
        accepts(&[&puts[..], &[(Get, Ok, 8, 50, 60), (Get, Ok, 7, 70, 80), (Get, Ok, 8, 90, 95)]].concat());
        let removed = Violation::Removed { found: true, since: 10 };
        rejects(&[&puts[..], &[(Remove, Ok, 0, 50, 60), (Get, Ok, 7, 70, 80)]].concat(), removed);
    }

    #[test]
    fn uncertain_changes_restrict_nothing() {
        let put = (Put, Ok, 7, 10, 20);
        accepts(&[put, (Remove, PENDING, 0, 30, 40), (Get, Ok, 7, 41, 50)]);
        accepts(&[put, (Remove, LOST, 0, 30, 40), (Get, Ok, 7, 41, 50)]);
        // A put that was not acknowledged takes effect at any later time, also after a removal.
        accepts(&[(Put, LOST, 7, 10, 20), (Remove, Ok, 0, 30, 40), (Get, Ok, 7, 41, 50)]);
        accepts(&[put, (Put, Absent, 8, 25, 28), (Remove, Ok, 0, 30, 40), (Get, Ok, 8, 41, 50)]);
        // The put of a killed client has only a start.
        let mut history = History::default();
        let (key, version) = (KeyId::hot(1), Version(7));
        history.add(&Record { kind: Begin, outcome: Ok, life: 1, key, version, start: 10, end: 10 });
        history.add(&Record {
            kind: Remove,
            outcome: Ok,
            life: 2,
            key,
            version: Version(0),
            start: 20,
            end: 30,
        });
        history.add(&Record { kind: Get, outcome: Ok, life: 2, key, version, start: 40, end: 50 });
        assert_eq!(history.violations(), []);
    }
}
