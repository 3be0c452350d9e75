//! [`Candidate`]: what a master does about what the registry says. Pure: the same sights give the same plans.
//!
//! Everybody sees the same document and the same members, and computes the same distribution of what is vacant; each takes
//! only its own part. Who sees something else, or is too slow, loses the compare-and-swap, looks again, and finds less to do.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use moontide_types::{GroupId, MonoTime, Term};

use super::document::{Document, Hosting, MasterAddresses};
use super::registry::Snapshot;

/// How sure a master is of its groups.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standing {
    /// The registry has confirmed its lease within half of it.
    Confirmed,
    /// It has not: somebody else may have taken its groups by now, or will.
    Unconfirmed,
}

/// What follows from a sight of the registry.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Plan {
    /// Groups to let go of at once: they are somebody else's.
    pub lose: Vec<GroupId>,
    /// Groups to host from now on, in a new term each.
    pub host: Vec<Hosting>,
    /// What to write, to take groups that nobody has, or to say that this one leaves.
    pub take: Option<Document>,
    /// A group to hand over, if nothing else is to be done: this one has more than its share.
    pub give: Option<Gift>,
}

/// A group that is to go to another master.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gift {
    /// The group.
    pub group: GroupId,
    /// To whom: its number.
    pub heir: Term,
    /// Where that one is reached.
    pub addresses: MasterAddresses,
}

/// A master among others.
#[derive(Clone, Debug)]
pub struct Candidate {
    number: Term,
    addresses: MasterAddresses,
    lease: Duration,
    /// When the last renewal that was confirmed was sent.
    renewed: MonoTime,
    hosted: BTreeMap<GroupId, Term>,
    /// The last term in which each group was seen in the hands of a member.
    witnessed: BTreeMap<GroupId, Term>,
    /// The members that were seen last, and since when they are the same.
    company: (Vec<u32>, MonoTime),
    /// Whether it takes groups at all.
    retiring: bool,
}

impl Candidate {
    /// A master that joined under this number; `asked`: when it sent that.
    pub fn new(number: Term, addresses: MasterAddresses, lease: Duration, asked: MonoTime) -> Candidate {
        Candidate {
            number,
            addresses,
            lease,
            renewed: asked,
            hosted: BTreeMap::new(),
            witnessed: BTreeMap::new(),
            company: (vec![], asked),
            retiring: false,
        }
    }

    /// Its number.
    pub fn number(&self) -> Term {
        self.number
    }

    /// The groups that it hosts.
    pub fn hosted(&self) -> &BTreeMap<GroupId, Term> {
        &self.hosted
    }

    /// A renewal was confirmed that was sent then.
    pub fn renewed(&mut self, sent: MonoTime) {
        self.renewed = self.renewed.max(sent);
    }

    /// How sure it is. The lease counts from when its renewal was sent; half of it is kept for clocks that run apart and
    /// for what is under way.
    pub fn standing(&self, now: MonoTime) -> Standing {
        if now.since(self.renewed) < self.lease / 2 { Standing::Confirmed } else { Standing::Unconfirmed }
    }

    /// Takes nothing any more, and gives everything away while somebody is there to take it.
    pub fn retire(&mut self) {
        self.retiring = true;
    }

    /// It is no member any more: everything goes.
    pub fn expelled(&mut self) -> Vec<GroupId> {
        std::mem::take(&mut self.hosted).into_keys().collect()
    }

    /// What follows from what the registry says.
    pub fn seen(&mut self, now: MonoTime, snapshot: &Snapshot) -> Plan {
        let Some((_, document)) = &snapshot.document else { return Plan::default() };
        let mut plan = Plan::default();
        let owned: Vec<Hosting> = document.groups_of(self.number).collect();
        let before = std::mem::take(&mut self.hosted);
        self.hosted = owned.iter().map(|hosting| (hosting.group, hosting.term)).collect();
        if moontide_types::planted("replaced-and-hosting") {
            self.hosted.extend(before.clone());
        }
        plan.lose = before.iter().filter(|&(g, t)| self.hosted.get(g) != Some(t)).map(|(&g, _)| g).collect();
        plan.host = owned;
        plan.host.retain(|hosting| before.get(&hosting.group) != Some(&hosting.term));
        for hosting in &mut plan.host {
            hosting.witnessed = self.witnessed.get(&hosting.group) == Some(&hosting.previous);
        }
        self.witnessed.extend(document.hosted_by(|master| snapshot.members.contains_key(&master)));
        let members: Vec<u32> = snapshot.members.keys().copied().collect();
        if self.company.0 != members {
            self.company = (members, now);
        }
        if !snapshot.members.contains_key(&self.number.get()) {
            return plan; // not counted: whoever is will take what is vacant
        }
        if self.retiring && !document.retiring.contains(&self.number.get()) {
            plan.take = Some(document.with_retiring(self.number));
            return plan;
        }
        let share = Distribution::new(document, snapshot);
        let mine = share.vacant_for(self.number.get());
        if !share.vacant.is_empty() {
            if !mine.is_empty() && !self.retiring {
                plan.take = document.with_owner(&mine, self.number, &self.addresses).map(|(next, _)| next);
            }
        } else if self.retiring || now.since(self.company.1) >= self.lease {
            plan.give = self.gift(&share, snapshot);
        }
        plan
    }

    /// The group that goes to the poorest, if that one has at least two less.
    fn gift(&self, share: &Distribution, snapshot: &Snapshot) -> Option<Gift> {
        let (&group, _) = self.hosted.last_key_value()?;
        let others = share.takers().filter(|&(&number, _)| number != self.number.get());
        let (&poorest, &load) = others.min_by_key(|&(&number, &load)| (load, number))?;
        let gives = self.retiring || self.hosted.len() >= load + 2;
        gives.then(|| Gift {
            group,
            heir: Term::new(poorest).expect("members have terms as numbers"),
            addresses: snapshot.members[&poorest].clone(),
        })
    }
}

/// How groups are spread over those who live.
struct Distribution {
    loads: BTreeMap<u32, usize>,
    vacant: Vec<GroupId>,
    /// Those who are leaving.
    retiring: BTreeSet<u32>,
}

impl Distribution {
    fn new(document: &Document, snapshot: &Snapshot) -> Distribution {
        let mut loads: BTreeMap<u32, usize> = snapshot.members.keys().map(|&number| (number, 0)).collect();
        let mut vacant = vec![];
        for (group, owner) in (0u16..).zip(&document.owners) {
            let owner = owner.filter(|_| group != 0 || !moontide_types::planted("group-of-the-living-taken"));
            match owner.and_then(|owner| loads.get_mut(&owner.master)) {
                Some(load) => *load += 1,
                None => vacant.push(GroupId(group)),
            }
        }
        Distribution { loads, vacant, retiring: document.retiring.clone() }
    }

    /// Those who may be given something.
    fn takers(&self) -> impl Iterator<Item = (&u32, &usize)> {
        self.loads.iter().filter(|(number, _)| !self.retiring.contains(number))
    }

    /// The part of what is vacant that this one is to take: each goes to whoever has least by then.
    fn vacant_for(&self, number: u32) -> Vec<GroupId> {
        let mut loads: BTreeMap<u32, usize> = self.takers().map(|(&number, &load)| (number, load)).collect();
        let mut mine = vec![];
        for &group in &self.vacant {
            let poorest =
                loads.iter().min_by_key(|&(&number, &load)| (load, number)).map(|(&number, _)| number);
            let Some(poorest) = poorest else { break };
            *loads.entry(poorest).or_default() += 1;
            if poorest == number {
                mine.push(group);
            }
        }
        mine
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU16;

    use super::super::registry::Token;
    use super::*;

    const LEASE: Duration = Duration::from_secs(4);

    /// A registry that is a value.
    struct World {
        document: Document,
        members: BTreeMap<u32, MasterAddresses>,
        candidates: BTreeMap<u32, Candidate>,
        now: MonoTime,
    }

    fn at(number: u32) -> MasterAddresses {
        MasterAddresses { grpc: format!("m{number}:1"), frame: format!("m{number}:2") }
    }

    impl World {
        fn new(groups: u16) -> World {
            World {
                document: Document::new(NonZeroU16::new(groups).unwrap()),
                members: BTreeMap::new(),
                candidates: BTreeMap::new(),
                now: MonoTime(0),
            }
        }

        fn join(&mut self) -> u32 {
            let (next, number) = self.document.with_next_term().unwrap();
            self.document = next;
            self.members.insert(number.get(), at(number.get()));
            self.candidates.insert(number.get(), Candidate::new(number, at(number.get()), LEASE, self.now));
            number.get()
        }

        fn dies(&mut self, number: u32) {
            self.members.remove(&number);
            self.candidates.remove(&number);
        }

        fn snapshot(&self) -> Snapshot {
            let token = Token(self.document.version.to_string());
            Snapshot { document: Some((token, self.document.clone())), members: self.members.clone() }
        }

        /// Everybody looks, in turn, until nobody has anything to do.
        fn settle(&mut self) -> usize {
            let mut gifts = 0;
            for _ in 0..100 {
                let mut changed = false;
                for number in self.candidates.keys().copied().collect::<Vec<_>>() {
                    let snapshot = self.snapshot();
                    let plan = self.candidates.get_mut(&number).unwrap().seen(self.now, &snapshot);
                    if let Some(next) = plan.take {
                        assert_eq!(next.version, self.document.version + 1);
                        (self.document, changed) = (next, true);
                    } else if let Some(gift) = plan.give {
                        let given = self.document.with_owner(&[gift.group], gift.heir, &gift.addresses);
                        (self.document, changed) = (given.unwrap().0, true);
                        gifts += 1;
                    }
                }
                if !changed {
                    return gifts;
                }
            }
            panic!("they do not come to rest: {:?}", self.document);
        }

        fn loads(&self) -> Vec<usize> {
            let load = |&number: &u32| self.document.groups_of(Term::new(number).unwrap()).count();
            self.members.keys().map(load).collect()
        }
    }

    #[test]
    fn the_first_takes_all_and_later_ones_are_given_their_share_when_things_are_quiet() {
        let mut world = World::new(16);
        let first = world.join();
        world.settle();
        assert_eq!(world.loads(), [16]);
        let term = world.document.owners[0].unwrap().term;
        assert!(term > first, "a group's term is its own");
        world.join();
        assert_eq!(world.settle(), 0, "the company has just changed");
        world.now = world.now.after(LEASE);
        assert_eq!(world.settle(), 8);
        assert_eq!(world.loads(), [8, 8]);
        world.join();
        world.settle();
        world.now = world.now.after(LEASE);
        world.settle();
        let mut loads = world.loads();
        loads.sort_unstable();
        assert_eq!(loads, [5, 5, 6]);
        assert_eq!(world.settle(), 0, "and there it rests");
    }

    #[test]
    fn what_a_dead_one_had_is_shared_by_the_rest_at_once_and_in_higher_terms() {
        let mut world = World::new(16);
        let (one, two, three) = (world.join(), world.join(), world.join());
        world.settle();
        let before = world.document.clone();
        world.dies(two);
        world.settle();
        assert_eq!(world.loads().iter().sum::<usize>(), 16);
        assert!(world.loads().iter().all(|&load| load == 8), "{:?}", world.loads());
        for (old, new) in before.owners.iter().zip(&world.document.owners) {
            let (old, new) = (old.unwrap(), new.unwrap());
            assert!(new.master == one || new.master == three);
            assert!(if old.master == two { new.term > old.term } else { new == old });
        }
    }

    #[test]
    fn who_was_replaced_lets_go_and_who_cannot_renew_is_not_sure() {
        let mut world = World::new(4);
        let one = world.join();
        world.settle();
        let mut stale = world.candidates[&one].clone();
        assert_eq!(stale.hosted().len(), 4);
        assert_eq!(
            stale.standing(MonoTime(0).after(LEASE / 2 - Duration::from_nanos(1))),
            Standing::Confirmed
        );
        assert_eq!(stale.standing(MonoTime(0).after(LEASE / 2)), Standing::Unconfirmed);
        stale.renewed(MonoTime(0).after(LEASE));
        assert_eq!(stale.standing(MonoTime(0).after(LEASE)), Standing::Confirmed);
        world.dies(one);
        world.join();
        world.settle();
        let plan = stale.seen(world.now, &world.snapshot());
        assert_eq!(plan.lose.len(), 4);
        assert!(plan.host.is_empty() && plan.take.is_none() && plan.give.is_none());
        assert!(stale.expelled().is_empty());
    }

    #[test]
    fn one_that_retires_gives_everything_away() {
        let mut world = World::new(4);
        let one = world.join();
        world.settle();
        world.join();
        world.join();
        world.settle();
        // Also when things have been quiet for long: nobody gives it anything back.
        world.now = world.now.after(LEASE);
        world.settle();
        world.now = world.now.after(LEASE);
        let load = world.loads()[0];
        world.candidates.get_mut(&one).unwrap().retire();
        assert_eq!(world.settle(), load);
        assert_eq!(world.loads()[0], 0);
        assert_eq!(world.loads().iter().sum::<usize>(), 4);
        // Alone it keeps what it has: there is nobody to take it.
        let mut alone = World::new(4);
        let one = alone.join();
        alone.settle();
        alone.candidates.get_mut(&one).unwrap().retire();
        assert_eq!(alone.settle(), 0);
        assert_eq!(alone.loads(), [4]);
    }

    #[test]
    fn a_group_that_is_taken_again_in_another_term_is_hosted_anew() {
        let mut world = World::new(1);
        let one = world.join();
        world.settle();
        let before = world.candidates[&one].hosted().clone();
        let number = Term::new(one).unwrap();
        (world.document, _) = world.document.with_owner(&[GroupId(0)], number, &at(one)).unwrap();
        let snapshot = world.snapshot();
        let plan = world.candidates.get_mut(&one).unwrap().seen(world.now, &snapshot);
        assert_eq!(plan.lose, [GroupId(0)], "what it knew belongs to the old term");
        assert_eq!(plan.host.len(), 1);
        assert!(plan.host[0].term > before[&GroupId(0)]);
    }
}
