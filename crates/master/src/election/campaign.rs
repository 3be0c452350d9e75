//! [`Campaign`]: carries what the registry says to the [`Candidate`], and what that decides to the service and back.
//!
//! ```text
//!   join ──▶ renew ──▶ read ──▶ decide ──▶ lose, host ──▶ take or give ──▶ wait for a change ──┐
//!    ▲        │ ▲                                                                              │
//!    └────────┘ └──────────────────────────────────────────────────────────────────────────────┘
//!     not a member any more: everything is let go of
//! ```
//!
//! Nothing here decides. Everything is one task, so that what was decided from one sight of the registry is done before the
//! next one.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use moontide_meta::Inheritance;
use moontide_types::{Clock, GroupId, MonoTime, SystemClock, Term};
use tokio::sync::{mpsc, oneshot, watch};
use tracing::{info, warn};

use super::candidate::{Candidate, Gift, Plan};
use super::document::{Document, MasterAddresses, TenantChange, TenantEntry};
use super::estate;
use super::registry::{Registry, RegistryError, Snapshot, Token};
use crate::service::Service;

/// A lease is renewed so many times before it ends.
const RENEWALS_PER_LEASE: u32 = 5;

/// After a failure of the registry, before it is asked again.
const PAUSE: Duration = Duration::from_millis(200);

/// How long giving everything away at the end may take.
const FAREWELL_MAX: Duration = Duration::from_secs(5);

/// A change of what all masters agree on, which somebody waits for.
#[derive(Debug)]
pub(crate) struct Proposal {
    pub(crate) tenant: String,
    pub(crate) change: TenantChange,
    pub(crate) agreed: oneshot::Sender<TenantEntry>,
}

/// A master's part in the election.
#[derive(Debug)]
pub(crate) struct Campaign {
    registry: Arc<dyn Registry>,
    addresses: MasterAddresses,
    lease: Duration,
    candidate: Candidate,
    /// Groups of which nodes know higher terms than the registry.
    ousted: BTreeMap<GroupId, Term>,
    /// What was known of groups, and in which terms, when this master was expelled.
    own: BTreeMap<GroupId, (Term, Inheritance)>,
}

impl Campaign {
    /// Becomes a member. The number is a term that nobody had before.
    pub(crate) async fn join(
        registry: Arc<dyn Registry>,
        first: &Document,
        addresses: MasterAddresses,
        lease: Duration,
    ) -> Result<Campaign, RegistryError> {
        let candidate = enter(&*registry, first, &addresses, lease).await?;
        Ok(Campaign { registry, addresses, lease, candidate, ousted: BTreeMap::new(), own: BTreeMap::new() })
    }

    /// Its number.
    pub(crate) fn number(&self) -> Term {
        self.candidate.number()
    }

    /// Runs until told to stop, and gives everything away then, as far as somebody is there to take it.
    pub(crate) async fn run(
        mut self,
        service: Arc<Service>,
        mut proposals: mpsc::Receiver<Proposal>,
        mut stop: watch::Receiver<bool>,
    ) {
        let mut waiting: Option<Proposal> = None;
        let mut reachable = true;
        loop {
            if *stop.borrow() {
                self.candidate.retire();
                let farewell = self.farewell(&service);
                if tokio::time::timeout(FAREWELL_MAX, farewell).await.is_err() {
                    warn!("not everything was handed over in time");
                }
                return;
            }
            let looked = self.look(&service, waiting.as_mut()).await;
            let seen = match looked {
                Ok(Looked::Done(seen)) => seen,
                Ok(Looked::Again) => continue,
                Err(error) => {
                    // Whether a group was given away is not known; until it is, it is served, and nothing is certain.
                    if service.is_unconfirmed() {
                        self.candidate.hosted().keys().for_each(|&group| service.thaw(group));
                    }
                    if std::mem::replace(&mut reachable, false) {
                        warn!(%error, "the registry does not answer; what is hosted goes on, and nothing moves");
                    }
                    tokio::select! {
                        () = tokio::time::sleep(PAUSE) => {}
                        _ = stop.wait_for(|&stop| stop) => {}
                    }
                    continue;
                }
            };
            if !std::mem::replace(&mut reachable, true) {
                info!("the registry answers again");
            }
            waiting = None;
            tokio::select! {
                () = self.registry.changed(&seen, self.lease / RENEWALS_PER_LEASE) => {}
                () = service.ousted() => {}
                proposal = proposals.recv() => waiting = proposal,
                _ = stop.wait_for(|&stop| stop) => {}
            }
        }
    }

    /// Gives away until nothing is left, or nobody takes it.
    async fn farewell(&mut self, service: &Service) {
        while !self.candidate.hosted().is_empty() {
            match self.look(service, None).await {
                Ok(Looked::Again) => {}
                Ok(Looked::Done(_)) | Err(_) => break, // nobody is there, or nobody can be asked
            }
        }
        if let Err(error) = self.registry.remove(self.number()).await {
            warn!(%error, "membership not ended; it will end by itself");
        }
    }

    /// Looks once, and does what follows.
    async fn look(
        &mut self,
        service: &Service,
        proposal: Option<&mut Proposal>,
    ) -> Result<Looked, RegistryError> {
        let sent = SystemClock.now();
        if self.registry.renew(self.number()).await? {
            let sent =
                if moontide_types::planted("lease-from-the-answer") { SystemClock.now() } else { sent };
            self.confirmed(sent, service);
        } else {
            warn!(number = self.number().get(), "not a member any more: letting go of everything");
            // If nobody takes them meanwhile, what is known of them is still right when they are taken again.
            for (&group, &term) in self.candidate.hosted() {
                self.own.extend(service.freeze(group).map(|estate| (group, (term, estate))));
            }
            if moontide_types::planted("expelled-and-hosting") {
                self.candidate.hosted().keys().for_each(|&group| service.thaw(group));
            } else {
                self.candidate.expelled().into_iter().for_each(|group| service.lose(group));
            }
            let first = Document::new(service.groups()).with_terms_above(service.newest_term());
            self.candidate = enter(&*self.registry, &first, &self.addresses, self.lease).await?;
            return Ok(Looked::Again);
        }
        let seen = self.registry.read().await?;
        let plan = self.candidate.seen(SystemClock.now(), &seen);
        self.apply(&plan, &seen, service);
        let Some((token, document)) = &seen.document else {
            // It was there when we joined: the registry has lost it.
            let first = Document::new(service.groups()).with_terms_above(service.newest_term());
            self.registry.write(None, &first).await?;
            return Ok(Looked::Again);
        };
        if let Some(next) = self.reclaimed(document, service) {
            self.registry.write(Some(token), &next).await?;
            return Ok(Looked::Again);
        }
        if let Some(next) = plan.take {
            // Whoever takes a group inherits nothing: what was handed over and then not given is out of date.
            let taken = next.groups_of(self.number());
            taken.filter(|taken| !self.candidate.hosted().contains_key(&taken.group)).for_each(|taken| {
                service.estates.forget(taken.group);
            });
            self.registry.write(Some(token), &next).await?;
            return Ok(Looked::Again);
        }
        if let Some(gift) = plan.give {
            self.hand_over(&gift, token, document, service).await?;
            return Ok(Looked::Again);
        }
        if let Some(proposal) = proposal
            && !self.propose(proposal, &seen, service).await?
        {
            return Ok(Looked::Again);
        }
        Ok(Looked::Done(seen))
    }

    /// The registry has confirmed a renewal that was sent then.
    fn confirmed(&mut self, sent: MonoTime, service: &Service) {
        self.candidate.renewed(sent);
        service.confirm_until(sent.after(self.lease / 2));
    }

    fn apply(&mut self, plan: &Plan, seen: &Snapshot, service: &Service) {
        let Some((_, document)) = &seen.document else { return };
        if !plan.lose.is_empty() {
            info!(groups = ?numbers(&plan.lose), "groups are somebody else's");
        }
        plan.lose.iter().for_each(|&group| service.lose(group));
        let mut inherited = 0;
        for hosting in &plan.host {
            // Our own books, if nobody has had the group since; or what somebody has handed over.
            let own = self.own.remove(&hosting.group).filter(|(term, _)| *term == hosting.previous);
            let estate =
                service.estates.take(hosting.group, hosting.previous).or(own.map(|(_, estate)| estate));
            inherited += estate.as_ref().map_or(0, |estate| estate.objects.len());
            service.host(*hosting, estate);
        }
        if let Some(last) = plan.host.last() {
            let groups: Vec<GroupId> = plan.host.iter().map(|hosting| hosting.group).collect();
            info!(groups = ?numbers(&groups), term = last.term.get(), inherited, "groups are hosted here");
        }
        // After they are hosted: whoever reads the map may come at once.
        service.learn(document, &seen.members);
        let is_vacant = |group: &GroupId| {
            let owner = document.owners[usize::from(group.0)];
            owner.is_none_or(|owner| !seen.members.contains_key(&owner.master))
        };
        self.own.retain(|group, _| is_vacant(group));
        // One that was about to be handed over, and was not.
        self.candidate.hosted().keys().for_each(|&group| service.thaw(group));
    }

    /// Nodes know higher terms of our groups than the registry does: it has forgotten. What follows is a term above all. Said
    /// until the registry shows it.
    fn reclaimed(&mut self, document: &Document, service: &Service) -> Option<Document> {
        for (group, seen) in service.take_ousted() {
            let known = self.ousted.entry(group).or_insert(seen);
            *known = (*known).max(seen);
        }
        let hosted = self.candidate.hosted();
        self.ousted.retain(|group, seen| hosted.get(group).is_some_and(|term| term < seen));
        let &highest = self.ousted.values().max()?;
        warn!(seen = highest.get(), "nodes know higher terms than the registry, which must have lost them");
        let groups: Vec<GroupId> = self.ousted.keys().copied().collect();
        groups.iter().for_each(|&group| service.lose(group));
        let above = document.with_terms_above(highest);
        above.with_owner(&groups, self.number(), &self.addresses).map(|(next, _)| next)
    }

    async fn hand_over(
        &mut self,
        gift: &Gift,
        token: &Token,
        document: &Document,
        service: &Service,
    ) -> Result<(), RegistryError> {
        let given = document.with_owner(&[gift.group], gift.heir, &gift.addresses);
        let (Some(estate), Some((next, _))) = (service.freeze(gift.group), given) else { return Ok(()) };
        let objects = estate.objects.len();
        let mut sending = std::pin::pin!(estate::send(service.cluster(), gift, estate));
        let sent = loop {
            tokio::select! {
                sent = &mut sending => break sent,
                // It may take longer than a lease.
                () = tokio::time::sleep(self.lease / RENEWALS_PER_LEASE) => {
                    let asked = SystemClock.now();
                    match self.registry.renew(self.number()).await {
                        Ok(true) => self.confirmed(asked, service),
                        Ok(false) => return Ok(()), // the next look says what that means
                        Err(error) => {
                            service.thaw(gift.group); // nothing was given yet
                            return Err(error);
                        }
                    }
                }
            }
        };
        // The heir would be rebuilt from reports without it.
        if let Err(why) = sent {
            warn!(group = gift.group.0, heir = gift.addresses.grpc, %why, "the heir takes nothing");
        }
        if self.registry.write(Some(token), &next).await? {
            info!(group = gift.group.0, heir = gift.addresses.grpc, objects, "group handed over");
        }
        Ok(())
    }

    /// False: look again.
    async fn propose(
        &self,
        proposal: &mut Proposal,
        seen: &Snapshot,
        service: &Service,
    ) -> Result<bool, RegistryError> {
        let Some((token, document)) = &seen.document else { return Ok(false) };
        let before = document.tenants.get(&proposal.tenant).copied().unwrap_or_default();
        let after = proposal.change.of(before);
        if after != before {
            let next = document.with_tenant(&proposal.tenant, after);
            if !self.registry.write(Some(token), &next).await? {
                return Ok(false);
            }
            service.learn(&next, &seen.members);
        }
        let (unheard, _) = oneshot::channel();
        // Nobody may wait any more.
        let _ = std::mem::replace(&mut proposal.agreed, unheard).send(after);
        Ok(true)
    }
}

fn numbers(groups: &[GroupId]) -> Vec<u16> {
    groups.iter().map(|group| group.0).collect()
}

/// What came of a look.
enum Looked {
    /// Nothing more is to be done now.
    Done(Snapshot),
    /// Something was done: what is there now is not what was seen.
    Again,
}

/// Takes a number, and joins. A member at the same addresses is gone: we have bound them.
async fn enter(
    registry: &dyn Registry,
    first: &Document,
    addresses: &MasterAddresses,
    lease: Duration,
) -> Result<Candidate, RegistryError> {
    loop {
        let seen = registry.read().await?;
        let (token, document) = match seen.document {
            Some((token, document)) => (Some(token), document),
            None => (None, first.clone()),
        };
        let Some((next, number)) = document.with_next_term() else {
            return Err(RegistryError::Malformed {
                address: format!("{registry:?}"),
                what: "a document",
                why: "its terms are used up".into(),
            });
        };
        if !registry.write(token.as_ref(), &next).await? {
            continue;
        }
        for predecessor in seen.members.iter().filter(|(_, known)| known.grpc == addresses.grpc) {
            if let Ok(predecessor) = Term::new(*predecessor.0) {
                registry.remove(predecessor).await?;
            }
        }
        let asked = SystemClock.now();
        registry.join(number, addresses, lease).await?;
        return Ok(Candidate::new(number, addresses.clone(), lease, asked));
    }
}
