//! [`Liveness`]: detects expired leases of members from the changes of their renewals. Pure logic.
//!
//! A renewal contains a time of the clock of the member's host, which is not comparable here. The lease of a member
//! counts from the time at which *this* process observed the last change of its renewal, by its own clock.
//!
//! A partitioned observer cannot observe renewals. After a whole lease without contact it restarts the count, so that
//! an outage of the API server does not expire all masters.

use std::collections::BTreeMap;
use std::time::Duration;

use moontide_types::MonoTime;

/// Observed Lease of a member.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LeaseObservation {
    /// Changes with every renewal, and with a new object of the same name.
    pub(super) renewal: String,
    pub(super) lease: Duration,
}

#[derive(Debug)]
struct Observation {
    lease: LeaseObservation,
    /// Time of the last observed change.
    since: MonoTime,
}

/// Last observations of all members.
#[derive(Debug, Default)]
pub(super) struct Liveness {
    members: BTreeMap<u32, Observation>,
    /// Time of the last contact with the API server.
    last_contact: MonoTime,
}

impl Liveness {
    /// Records all current members. Returns those whose lease has expired.
    pub(super) fn observe_all(
        &mut self,
        now: MonoTime,
        leases: &BTreeMap<u32, LeaseObservation>,
    ) -> Vec<u32> {
        self.members.retain(|number, _| leases.contains_key(number));
        for observation in self.members.values_mut() {
            if now.since(self.last_contact) >= observation.lease.lease {
                observation.since = now;
            }
        }
        for (&number, lease) in leases {
            self.observe(now, number, lease);
        }
        self.last_contact = now;
        let dead = |observation: &Observation| now.since(observation.since) >= observation.lease.lease;
        self.members.iter().filter(|(_, observation)| dead(observation)).map(|(&number, _)| number).collect()
    }

    /// Records one member.
    pub(super) fn observe(&mut self, now: MonoTime, number: u32, lease: &LeaseObservation) {
        match self.members.get(&number) {
            Some(observation) if observation.lease == *lease => {}
            _ => {
                self.members.insert(number, Observation { lease: lease.clone(), since: now });
            }
        }
    }

    /// Records contact with the API server: renewals are observed until `now`.
    pub(super) fn in_contact(&mut self, now: MonoTime) {
        self.last_contact = self.last_contact.max(now);
    }

    /// Returns the time at which the next lease expires, if it is not renewed.
    pub(super) fn next_end(&self) -> Option<MonoTime> {
        self.members.values().map(|observation| observation.since.after(observation.lease.lease)).min()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(5);

    fn at(seconds: u64) -> MonoTime {
        MonoTime(1_000_000_000_000).after(Duration::from_secs(seconds))
    }

    fn leases(renewals: &[(u32, &str)]) -> BTreeMap<u32, LeaseObservation> {
        renewals
            .iter()
            .map(|&(number, renewal)| (number, LeaseObservation { renewal: renewal.into(), lease: LEASE }))
            .collect()
    }

    #[test]
    fn member_expires_one_lease_after_last_observed_renewal() {
        let mut liveness = Liveness::default();
        let (one, renewed) = (leases(&[(7, "a")]), leases(&[(7, "b")]));
        assert!(liveness.observe_all(at(0), &one).is_empty(), "a new member is live");
        assert!(liveness.observe_all(at(4), &one).is_empty());
        assert_eq!(liveness.next_end(), Some(at(5)));
        assert_eq!(liveness.observe_all(at(5), &one), [7]);
        assert!(liveness.observe_all(at(6), &renewed).is_empty(), "the renewal was late");
        assert!(liveness.observe_all(at(10), &renewed).is_empty());
        assert_eq!(liveness.observe_all(at(11), &renewed), [7]);
        assert!(liveness.observe_all(at(12), &leases(&[])).is_empty());
        assert_eq!(liveness.next_end(), None);
    }

    #[test]
    fn lease_countdown_restarts_after_loss_of_contact() {
        let mut liveness = Liveness::default();
        let one = leases(&[(7, "a")]);
        liveness.observe_all(at(0), &one);
        assert!(
            liveness.observe_all(at(5), &one).is_empty(),
            "renewals were impossible without the API server"
        );
        assert!(liveness.observe_all(at(9), &one).is_empty());
        assert_eq!(liveness.observe_all(at(10), &one), [7]);
        // A watch is also contact.
        let mut liveness = Liveness::default();
        liveness.observe_all(at(0), &one);
        liveness.in_contact(at(4));
        assert_eq!(liveness.observe_all(at(8), &one), [7]);
    }

    #[test]
    fn renewal_seen_by_watch_extends_lease() {
        let mut liveness = Liveness::default();
        liveness.observe_all(at(0), &leases(&[(7, "a"), (8, "a")]));
        liveness.observe(at(4), 7, &leases(&[(7, "b")])[&7]);
        liveness.in_contact(at(4));
        assert_eq!(liveness.observe_all(at(5), &leases(&[(7, "b"), (8, "a")])), [8]);
    }
}
