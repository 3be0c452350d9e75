//! What the shipped campaign does, step by step, with a [`Desk`] in the place of sockets and a clock. What follows from a
//! sight of the registry the shipped [`Candidate`] decides.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use moontide_master::Service;
use moontide_master::election::{Candidate, Document, Gift, Plan, Snapshot, Token};
use moontide_types::{GroupId, Term};

use super::LEASE;
use super::desk::{Away, Desk};

/// A lease is renewed so many times before it ends.
const RENEWALS_PER_LEASE: u32 = 5;
/// After a failure of the registry, before it is asked again.
const PAUSE: Duration = Duration::from_millis(200);
/// How long giving everything away at the end may take.
const FAREWELL_MAX: Duration = Duration::from_secs(5);
/// An estate that nobody has hosted after this time is of no use.
const ESTATE_KEPT_MAX: Duration = Duration::from_secs(30);

/// What came of a look.
enum Looked {
    Done,
    /// Something was done: what is there now is not what was seen.
    Again,
}

/// Joins, and runs until told to retire.
pub(super) async fn run(desk: Rc<Desk>, first: Document) {
    let candidate = loop {
        match enter(&desk, &first).await {
            Ok(candidate) => break candidate,
            Err(Away) => desk.sleep(PAUSE).await,
        }
        if desk.retires.get() {
            return;
        }
    };
    let service = (desk.open)(candidate.number());
    assert!(desk.service.set(Arc::clone(&service)).is_ok(), "it is opened once");
    let mut campaign = Election { desk, first, service, candidate };
    while !campaign.desk.retires.get() {
        match campaign.look().await {
            Ok(Looked::Again) => {}
            // A change is seen at once, or when it is time to renew.
            Ok(Looked::Done) => {
                let wait = campaign.desk.random_part(LEASE / RENEWALS_PER_LEASE);
                campaign.desk.sleep(wait).await;
            }
            Err(Away) => campaign.desk.sleep(PAUSE).await,
        }
    }
    campaign.candidate.retire();
    campaign.farewell().await;
}

struct Election {
    desk: Rc<Desk>,
    first: Document,
    service: Arc<Service>,
    candidate: Candidate,
}

impl Election {
    /// Gives away until nothing is left, or nobody takes it.
    async fn farewell(&mut self) {
        let until = self.desk.now.get().after(FAREWELL_MAX);
        while !self.candidate.hosted().is_empty() && self.desk.now.get() < until {
            match self.look().await {
                Ok(Looked::Again) => {}
                Ok(Looked::Done) | Err(Away) => break, // nobody is there, or nobody can be asked
            }
        }
        let _ = self.desk.remove(self.candidate.number()).await; // it will end by itself
    }

    /// Looks once, and does what follows.
    async fn look(&mut self) -> Result<Looked, Away> {
        let sent = self.desk.now.get();
        if self.desk.renew(self.candidate.number()).await? {
            self.candidate.renewed(sent);
            let until = sent.after(LEASE / 2);
            self.service.confirm_until(until);
            self.desk.confirmed_until.set(until);
        } else {
            self.candidate.expelled().into_iter().for_each(|group| self.service.lose(group));
            self.candidate = enter(&self.desk, &self.first).await?;
            return Ok(Looked::Again);
        }
        let seen = self.desk.read().await?;
        let plan = self.candidate.seen(self.desk.now.get(), &seen);
        self.apply(&plan, &seen);
        let Some((token, document)) = &seen.document else { return Ok(Looked::Done) };
        if let Some(next) = self.reclaimed(document) {
            self.desk.write(Some(token), &next).await?;
            return Ok(Looked::Again);
        }
        if let Some(next) = plan.take {
            // Whoever takes a group inherits nothing: what was handed over and then not given is out of date.
            for taken in next.groups_of(self.candidate.number()) {
                if !self.candidate.hosted().contains_key(&taken.group) {
                    self.desk.estates.borrow_mut().remove(&taken.group);
                }
            }
            self.desk.write(Some(token), &next).await?;
            return Ok(Looked::Again);
        }
        if let Some(gift) = plan.give {
            self.hand_over(&gift, token, document).await?;
            return Ok(Looked::Again);
        }
        Ok(Looked::Done)
    }

    fn apply(&self, plan: &Plan, seen: &Snapshot) {
        let Some((_, document)) = &seen.document else { return };
        plan.lose.iter().for_each(|&group| self.service.lose(group));
        for hosting in &plan.host {
            let mut estates = self.desk.estates.borrow_mut();
            let inherited = estates.remove(&hosting.group).map(|(estate, _)| estate);
            let inherited = inherited.filter(|estate| estate.term == hosting.previous);
            self.service.host(*hosting, inherited.map(|estate| (*estate).clone()));
        }
        self.service.learn(document, &seen.members);
        // One that was about to be handed over, and was not.
        self.candidate.hosted().keys().for_each(|&group| self.service.thaw(group));
    }

    /// Nodes know higher terms of our groups than the registry does: it has forgotten.
    fn reclaimed(&mut self, document: &Document) -> Option<Document> {
        let ousted = self.service.take_ousted();
        let ours = |&(group, seen): &(GroupId, Term)| {
            self.candidate.hosted().get(&group).is_some_and(|&term| term < seen)
        };
        let ours: Vec<(GroupId, Term)> = ousted.into_iter().filter(ours).collect();
        let highest = ours.iter().map(|&(_, seen)| seen).max()?;
        let groups: Vec<GroupId> = ours.iter().map(|&(group, _)| group).collect();
        groups.iter().for_each(|&group| self.service.lose(group));
        let above = document.with_terms_above(highest);
        let next = above.with_owner(&groups, self.candidate.number(), &self.desk.addresses());
        next.map(|(next, _)| next)
    }

    async fn hand_over(&self, gift: &Gift, token: &Token, document: &Document) -> Result<(), Away> {
        let given = document.with_owner(&[gift.group], gift.heir, &gift.addresses);
        let (Some(estate), Some((next, _))) = (self.service.freeze(gift.group), given) else {
            return Ok(());
        };
        self.desk.bequeath(&gift.addresses, gift.group, estate).await;
        if self.desk.write(Some(token), &next).await? {
            self.desk.handed_over.set(self.desk.handed_over.get() + 1);
        }
        Ok(())
    }
}

/// Forgets what was handed over and is of no use any more.
pub(super) fn tidy_estates(desk: &Desk) {
    let now = desk.now.get();
    desk.estates.borrow_mut().retain(|_, (_, since)| now.since(*since) < ESTATE_KEPT_MAX);
}

/// Takes a number, and joins. A member at the same addresses is gone.
async fn enter(desk: &Rc<Desk>, first: &Document) -> Result<Candidate, Away> {
    loop {
        let seen = desk.read().await?;
        let (token, document) = match seen.document {
            Some((token, document)) => (Some(token), document),
            None => (None, first.clone()),
        };
        let (next, number) = document.with_next_term().expect("few terms");
        if !desk.write(token.as_ref(), &next).await? {
            continue;
        }
        let addresses = desk.addresses();
        for predecessor in seen.members.iter().filter(|(_, known)| known.grpc == addresses.grpc) {
            desk.remove(Term::new(*predecessor.0).expect("members have terms as numbers")).await?;
        }
        let asked = desk.now.get();
        desk.join(number, LEASE).await?;
        return Ok(Candidate::new(number, addresses, LEASE, asked));
    }
}
