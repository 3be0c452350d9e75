//! [`Liveness`]: which members live, for one who sees only that their renewals change. Pure.
//!
//! A renewal carries a time by the clock of the member's host, which means nothing here. What counts is when *this* process
//! saw it change: from then on the member lives for its lease, by this process's own clock.
//!
//! An observer that was cut off itself knows nothing: members could not be seen renewing. After a whole lease without a look
//! it begins to count anew, so that an API server that was away for a while does not cost every master its groups.

use std::collections::BTreeMap;
use std::time::Duration;

use moontide_types::MonoTime;

/// What a member shows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Sign {
    /// Changes with every renewal, and with a new object of the same name.
    pub(super) mark: String,
    pub(super) lease: Duration,
}

#[derive(Debug)]
struct Observation {
    sign: Sign,
    since: MonoTime,
}

/// The members, as they were seen.
#[derive(Debug, Default)]
pub(super) struct Liveness {
    members: BTreeMap<u32, Observation>,
    /// When there was contact last.
    looked: MonoTime,
}

impl Liveness {
    /// All members there are. Returns those whose lease has run out.
    pub(super) fn look(&mut self, now: MonoTime, signs: &BTreeMap<u32, Sign>) -> Vec<u32> {
        self.members.retain(|number, _| signs.contains_key(number));
        for observation in self.members.values_mut() {
            if now.since(self.looked) >= observation.sign.lease {
                observation.since = now;
            }
        }
        for (&number, sign) in signs {
            self.see(now, number, sign);
        }
        self.looked = now;
        let dead = |observation: &Observation| now.since(observation.since) >= observation.sign.lease;
        self.members.iter().filter(|(_, observation)| dead(observation)).map(|(&number, _)| number).collect()
    }

    /// One member.
    pub(super) fn see(&mut self, now: MonoTime, number: u32, sign: &Sign) {
        match self.members.get(&number) {
            Some(observation) if observation.sign == *sign => {}
            _ => {
                self.members.insert(number, Observation { sign: sign.clone(), since: now });
            }
        }
    }

    /// There is contact: whoever renews would be seen.
    pub(super) fn in_contact(&mut self, now: MonoTime) {
        self.looked = self.looked.max(now);
    }

    /// When the next lease runs out, if it is not renewed.
    pub(super) fn next_end(&self) -> Option<MonoTime> {
        self.members.values().map(|observation| observation.since.after(observation.sign.lease)).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(5);

    fn at(seconds: u64) -> MonoTime {
        MonoTime(1_000_000_000_000).after(Duration::from_secs(seconds))
    }

    fn signs(marks: &[(u32, &str)]) -> BTreeMap<u32, Sign> {
        marks.iter().map(|&(number, mark)| (number, Sign { mark: mark.into(), lease: LEASE })).collect()
    }

    #[test]
    fn a_member_lives_for_its_lease_from_when_its_renewal_was_seen() {
        let mut liveness = Liveness::default();
        let (one, renewed) = (signs(&[(7, "a")]), signs(&[(7, "b")]));
        assert!(liveness.look(at(0), &one).is_empty(), "who is seen first lives");
        assert!(liveness.look(at(4), &one).is_empty());
        assert_eq!(liveness.next_end(), Some(at(5)));
        assert_eq!(liveness.look(at(5), &one), [7]);
        assert!(liveness.look(at(6), &renewed).is_empty(), "it was only slow");
        assert!(liveness.look(at(10), &renewed).is_empty());
        assert_eq!(liveness.look(at(11), &renewed), [7]);
        assert!(liveness.look(at(12), &signs(&[])).is_empty());
        assert_eq!(liveness.next_end(), None);
    }

    #[test]
    fn who_did_not_look_for_a_lease_begins_to_count_anew() {
        let mut liveness = Liveness::default();
        let one = signs(&[(7, "a")]);
        liveness.look(at(0), &one);
        assert!(liveness.look(at(5), &one).is_empty(), "there may have been renewals that nobody could make");
        assert!(liveness.look(at(9), &one).is_empty());
        assert_eq!(liveness.look(at(10), &one), [7]);
        // A watch is contact too.
        let mut liveness = Liveness::default();
        liveness.look(at(0), &one);
        liveness.in_contact(at(4));
        assert_eq!(liveness.look(at(8), &one), [7]);
    }

    #[test]
    fn a_watch_tells_of_renewals_too() {
        let mut liveness = Liveness::default();
        liveness.look(at(0), &signs(&[(7, "a"), (8, "a")]));
        liveness.see(at(4), 7, &signs(&[(7, "b")])[&7]);
        liveness.in_contact(at(4));
        assert_eq!(liveness.look(at(5), &signs(&[(7, "b"), (8, "a")])), [8]);
    }
}
