//! [`ElectionState`]: computes the plan of a master from a snapshot of the registry. Pure logic: equal snapshots give
//! equal plans.
//!
//! All masters read the same cluster state and members and compute the same distribution of vacant groups; each claims
//! only its own share. A master with an outdated snapshot loses the compare-and-swap, and plans again from a new one.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use moontide_types::{GroupId, MonoTime, Term};

use super::cluster_state::{ClusterState, GroupAssignment, MasterAddresses};
use super::registry::Snapshot;

/// Actions that follow from a snapshot of the registry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ElectionPlan {
    /// Groups to release immediately: another master owns them, or their term changed.
    pub release: Vec<GroupId>,
    /// Groups to host from now on, each in a new term.
    pub host: Vec<GroupAssignment>,
    /// Cluster state to write: claims vacant groups, or marks this master as retiring.
    pub claim: Option<ClusterState>,
    /// Group to hand off, if there is nothing else to do: this master has more than its share.
    pub hand_off: Option<GroupTransfer>,
}

/// Handoff of a group to another master.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GroupTransfer {
    /// Group that is handed off.
    pub group: GroupId,
    /// Id of the new owner.
    pub to: Term,
    /// Addresses of the new owner.
    pub addresses: MasterAddresses,
}

/// State of one master in the election.
#[derive(Clone, Debug)]
pub struct ElectionState {
    number: Term,
    addresses: MasterAddresses,
    lease: Duration,
    /// Time at which the last confirmed renewal was sent.
    renewed: MonoTime,
    hosted: BTreeMap<GroupId, Term>,
    /// Last observed members, and the time since which they are unchanged.
    stable_members: (Vec<u32>, MonoTime),
    /// Whether the master is shutting down: it claims no groups and hands off all.
    retiring: bool,
}

impl ElectionState {
    /// Creates the state of a master that joined with this id; `sent` is the time at which it sent the request.
    pub fn new(number: Term, addresses: MasterAddresses, lease: Duration, sent: MonoTime) -> ElectionState {
        ElectionState {
            number,
            addresses,
            lease,
            renewed: sent,
            hosted: BTreeMap::new(),
            stable_members: (vec![], sent),
            retiring: false,
        }
    }

    /// Returns the id of this master.
    pub fn number(&self) -> Term {
        self.number
    }

    /// Returns the hosted groups with their terms.
    pub fn hosted(&self) -> &BTreeMap<GroupId, Term> {
        &self.hosted
    }

    /// Records a confirmed renewal that was sent at `sent`.
    pub fn renewed(&mut self, sent: MonoTime) {
        self.renewed = self.renewed.max(sent);
    }

    /// Returns the time until which the lease is confirmed. The lease counts from the sending of its renewal; half of it
    /// is reserved for clock drift and for messages in flight.
    pub fn confirmed_until(&self) -> MonoTime {
        self.renewed.after(self.lease / 2)
    }

    /// Starts the shutdown: the master claims no groups any more, and hands off all groups to other masters.
    pub fn retire(&mut self) {
        self.retiring = true;
    }

    /// Records the loss of the membership. Returns the groups to release: all.
    pub fn lost_membership(&mut self) -> Vec<GroupId> {
        std::mem::take(&mut self.hosted).into_keys().collect()
    }

    /// Computes the plan for a snapshot of the registry.
    pub fn observe(&mut self, now: MonoTime, snapshot: &Snapshot) -> ElectionPlan {
        let Some((_, document)) = &snapshot.document else { return ElectionPlan::default() };
        let mut plan = ElectionPlan::default();
        let owned: Vec<GroupAssignment> = document.groups_of(self.number).collect();
        let before = std::mem::take(&mut self.hosted);
        self.hosted = owned.iter().map(|assignment| (assignment.group, assignment.term)).collect();
        if moontide_rt::mutation_enabled("replaced-and-hosting") {
            self.hosted.extend(before.clone());
        }
        plan.release =
            before.iter().filter(|&(g, t)| self.hosted.get(g) != Some(t)).map(|(&g, _)| g).collect();
        plan.host = owned;
        plan.host.retain(|assignment| before.get(&assignment.group) != Some(&assignment.term));
        let members: Vec<u32> = snapshot.members.keys().copied().collect();
        if self.stable_members.0 != members {
            self.stable_members = (members, now);
        }
        if !snapshot.members.contains_key(&self.number.get()) {
            return plan; // not a member: the members claim the vacant groups
        }
        if self.retiring && !document.retiring.contains(&self.number.get()) {
            plan.claim = Some(document.with_retiring(self.number));
            return plan;
        }
        let distribution = GroupDistribution::new(document, snapshot);
        let mine = distribution.vacant_for(self.number.get());
        if !distribution.vacant.is_empty() {
            if !mine.is_empty() && !self.retiring {
                plan.claim = document.with_owner(&mine, self.number, &self.addresses).map(|(next, _)| next);
            }
        } else if self.retiring || now.since(self.stable_members.1) >= self.lease {
            plan.hand_off = self.transfer(&distribution, snapshot);
        }
        plan
    }

    /// Returns a group for the least loaded master, if that has at least two groups less.
    fn transfer(&self, distribution: &GroupDistribution, snapshot: &Snapshot) -> Option<GroupTransfer> {
        let (&group, _) = self.hosted.last_key_value()?;
        let others = distribution.eligible().filter(|&(&number, _)| number != self.number.get());
        let (&least_loaded, &load) = others.min_by_key(|&(&number, &load)| (load, number))?;
        let hands_off = self.retiring || self.hosted.len() >= load + 2;
        hands_off.then(|| GroupTransfer {
            group,
            to: Term::new(least_loaded).expect("ids of members are terms"),
            addresses: snapshot.members[&least_loaded].clone(),
        })
    }
}

/// Distribution of the groups over the live masters.
struct GroupDistribution {
    loads: BTreeMap<u32, usize>,
    vacant: Vec<GroupId>,
    /// Masters that are shutting down.
    retiring: BTreeSet<u32>,
}

impl GroupDistribution {
    fn new(document: &ClusterState, snapshot: &Snapshot) -> GroupDistribution {
        let mut loads: BTreeMap<u32, usize> = snapshot.members.keys().map(|&number| (number, 0)).collect();
        let mut vacant = vec![];
        for (group, owner) in (0u16..).zip(&document.group_owners) {
            let owner =
                owner.filter(|_| group != 0 || !moontide_rt::mutation_enabled("group-of-the-living-taken"));
            match owner.and_then(|owner| loads.get_mut(&owner.master)) {
                Some(load) => *load += 1,
                None => vacant.push(GroupId(group)),
            }
        }
        GroupDistribution { loads, vacant, retiring: document.retiring.clone() }
    }

    /// Iterates over the masters that may get groups, with their loads.
    fn eligible(&self) -> impl Iterator<Item = (&u32, &usize)> {
        self.loads.iter().filter(|(number, _)| !self.retiring.contains(number))
    }

    /// Returns the vacant groups for this master: each group goes to the master with the lowest load at that point.
    fn vacant_for(&self, number: u32) -> Vec<GroupId> {
        let mut loads: BTreeMap<u32, usize> =
            self.eligible().map(|(&number, &load)| (number, load)).collect();
        let mut mine = vec![];
        for &group in &self.vacant {
            let least_loaded =
                loads.iter().min_by_key(|&(&number, &load)| (load, number)).map(|(&number, _)| number);
            let Some(least_loaded) = least_loaded else { break };
            *loads.entry(least_loaded).or_default() += 1;
            if least_loaded == number {
                mine.push(group);
            }
        }
        mine
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU16;

    use super::super::registry::DocumentVersion;
    use super::*;

    const LEASE: Duration = Duration::from_secs(4);

    /// In-memory registry and the states of its masters.
    struct ElectionHarness {
        document: ClusterState,
        members: BTreeMap<u32, MasterAddresses>,
        states: BTreeMap<u32, ElectionState>,
        now: MonoTime,
    }

    fn at(number: u32) -> MasterAddresses {
        MasterAddresses { grpc: format!("m{number}:1"), frame: format!("m{number}:2") }
    }

    impl ElectionHarness {
        fn new(groups: u16) -> ElectionHarness {
            ElectionHarness {
                document: ClusterState::new(NonZeroU16::new(groups).unwrap()),
                members: BTreeMap::new(),
                states: BTreeMap::new(),
                now: MonoTime(0),
            }
        }

        fn join(&mut self) -> u32 {
            let (next, number) = self.document.with_next_term().unwrap();
            self.document = next;
            self.members.insert(number.get(), at(number.get()));
            self.states.insert(number.get(), ElectionState::new(number, at(number.get()), LEASE, self.now));
            number.get()
        }

        fn kill(&mut self, number: u32) {
            self.members.remove(&number);
            self.states.remove(&number);
        }

        fn snapshot(&self) -> Snapshot {
            let version = DocumentVersion(self.document.version.to_string());
            Snapshot { document: Some((version, self.document.clone())), members: self.members.clone() }
        }

        /// Lets all masters observe and act in turn until no plan has an action. Returns the number of handoffs.
        fn settle(&mut self) -> usize {
            let mut handoffs = 0;
            for _ in 0..100 {
                let mut changed = false;
                for number in self.states.keys().copied().collect::<Vec<_>>() {
                    let snapshot = self.snapshot();
                    let plan = self.states.get_mut(&number).unwrap().observe(self.now, &snapshot);
                    if let Some(next) = plan.claim {
                        assert_eq!(next.version, self.document.version + 1);
                        (self.document, changed) = (next, true);
                    } else if let Some(transfer) = plan.hand_off {
                        let changed_owner =
                            self.document.with_owner(&[transfer.group], transfer.to, &transfer.addresses);
                        (self.document, changed) = (changed_owner.unwrap().0, true);
                        handoffs += 1;
                    }
                }
                if !changed {
                    return handoffs;
                }
            }
            panic!("no stable distribution: {:?}", self.document);
        }

        fn loads(&self) -> Vec<usize> {
            let load = |&number: &u32| self.document.groups_of(Term::new(number).unwrap()).count();
            self.members.keys().map(load).collect()
        }
    }

    #[test]
    fn first_master_claims_all_groups_and_hands_off_when_stable() {
        let mut harness = ElectionHarness::new(16);
        let first = harness.join();
        harness.settle();
        assert_eq!(harness.loads(), [16]);
        let term = harness.document.group_owners[0].unwrap().term;
        assert!(term > first, "a group has its own term");
        harness.join();
        assert_eq!(harness.settle(), 0, "the members have just changed");
        harness.now = harness.now.after(LEASE);
        assert_eq!(harness.settle(), 8);
        assert_eq!(harness.loads(), [8, 8]);
        harness.join();
        harness.settle();
        harness.now = harness.now.after(LEASE);
        harness.settle();
        let mut loads = harness.loads();
        loads.sort_unstable();
        assert_eq!(loads, [5, 5, 6]);
        assert_eq!(harness.settle(), 0, "the distribution is stable");
    }

    #[test]
    fn groups_of_dead_master_are_rebalanced_with_higher_terms() {
        let mut harness = ElectionHarness::new(16);
        let (one, two, three) = (harness.join(), harness.join(), harness.join());
        harness.settle();
        let before = harness.document.clone();
        harness.kill(two);
        harness.settle();
        assert_eq!(harness.loads().iter().sum::<usize>(), 16);
        assert!(harness.loads().iter().all(|&load| load == 8), "{:?}", harness.loads());
        for (old, new) in before.group_owners.iter().zip(&harness.document.group_owners) {
            let (old, new) = (old.unwrap(), new.unwrap());
            assert!(new.master == one || new.master == three);
            assert!(if old.master == two { new.term > old.term } else { new == old });
        }
    }

    #[test]
    fn lease_is_confirmed_for_half_and_superseded_master_releases() {
        let mut harness = ElectionHarness::new(4);
        let one = harness.join();
        harness.settle();
        let mut stale = harness.states[&one].clone();
        assert_eq!(stale.hosted().len(), 4);
        assert_eq!(stale.confirmed_until(), MonoTime(0).after(LEASE / 2));
        stale.renewed(MonoTime(0).after(LEASE));
        assert_eq!(stale.confirmed_until(), MonoTime(0).after(LEASE).after(LEASE / 2));
        harness.kill(one);
        harness.join();
        harness.settle();
        let plan = stale.observe(harness.now, &harness.snapshot());
        assert_eq!(plan.release.len(), 4);
        assert!(plan.host.is_empty() && plan.claim.is_none() && plan.hand_off.is_none());
        assert!(stale.lost_membership().is_empty());
    }

    #[test]
    fn retiring_master_hands_off_all_groups_unless_alone() {
        let mut harness = ElectionHarness::new(4);
        let one = harness.join();
        harness.settle();
        harness.join();
        harness.join();
        harness.settle();
        // Also after a long stable time: no master hands a group back to it.
        harness.now = harness.now.after(LEASE);
        harness.settle();
        harness.now = harness.now.after(LEASE);
        let load = harness.loads()[0];
        harness.states.get_mut(&one).unwrap().retire();
        assert_eq!(harness.settle(), load);
        assert_eq!(harness.loads()[0], 0);
        assert_eq!(harness.loads().iter().sum::<usize>(), 4);
        // A single master keeps its groups: there is no other master.
        let mut alone = ElectionHarness::new(4);
        let one = alone.join();
        alone.settle();
        alone.states.get_mut(&one).unwrap().retire();
        assert_eq!(alone.settle(), 0);
        assert_eq!(alone.loads(), [4]);
    }

    #[test]
    fn group_with_new_term_is_released_and_hosted_again() {
        let mut harness = ElectionHarness::new(1);
        let one = harness.join();
        harness.settle();
        let before = harness.states[&one].hosted().clone();
        let number = Term::new(one).unwrap();
        (harness.document, _) = harness.document.with_owner(&[GroupId(0)], number, &at(one)).unwrap();
        let snapshot = harness.snapshot();
        let plan = harness.states.get_mut(&one).unwrap().observe(harness.now, &snapshot);
        assert_eq!(plan.release, [GroupId(0)], "its state belongs to the old term");
        assert_eq!(plan.host.len(), 1);
        assert!(plan.host[0].term > before[&GroupId(0)]);
    }
}
