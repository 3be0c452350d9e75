//! Election loop of the shipped master, with [`ElectionIo`] in place of sockets and a clock. The shipped
//! [`ElectionState`] decides what follows from a snapshot of the registry.

use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use moontide_master::Service;
use moontide_master::election::{
    ClusterState, DocumentVersion, ElectionPlan, ElectionState, GroupTransfer, Snapshot,
};
use moontide_types::{GroupId, Term};

use super::LEASE;
use super::election_io::{ElectionIo, RegistryUnavailable};

/// Renewals per lease.
const RENEWALS_PER_LEASE: u32 = 5;
/// Pause after a failure of the registry.
const PAUSE: Duration = Duration::from_millis(200);
/// Longest time for handing off all groups at shutdown.
const SHUTDOWN_HANDOFF_MAX: Duration = Duration::from_secs(5);
/// Time after which an unused handoff is dropped.
const HANDOFF_KEPT_MAX: Duration = Duration::from_secs(30);

/// Result of a step.
enum StepOutcome {
    Done,
    /// The registry was changed: the snapshot is stale.
    Again,
}

/// Joins, and runs until the master retires.
pub(super) async fn run(io: Rc<ElectionIo>, first: ClusterState) {
    let candidate = loop {
        match join_registry(&io, &first).await {
            Ok(candidate) => break candidate,
            Err(RegistryUnavailable) => io.sleep(PAUSE).await,
        }
        if io.retires.get() {
            return;
        }
    };
    let service = (io.open)(candidate.number());
    assert!(io.service.set(Arc::clone(&service)).is_ok(), "it is opened once");
    let mut election = Election { io, first, service, candidate };
    while !election.io.retires.get() {
        match election.refresh_map().await {
            Ok(StepOutcome::Again) => {}
            // A change is seen at once, or when it is time to renew.
            Ok(StepOutcome::Done) => {
                let wait = election.io.random_part(LEASE / RENEWALS_PER_LEASE);
                election.io.sleep(wait).await;
            }
            Err(RegistryUnavailable) => election.io.sleep(PAUSE).await,
        }
    }
    election.candidate.retire();
    election.farewell().await;
}

struct Election {
    io: Rc<ElectionIo>,
    first: ClusterState,
    service: Arc<Service>,
    candidate: ElectionState,
}

impl Election {
    /// Hands off groups until none is left, or no master takes them.
    async fn farewell(&mut self) {
        let until = self.io.now.get().after(SHUTDOWN_HANDOFF_MAX);
        while !self.candidate.hosted().is_empty() && self.io.now.get() < until {
            match self.refresh_map().await {
                Ok(StepOutcome::Again) => {}
                Ok(StepOutcome::Done) | Err(RegistryUnavailable) => break, // no other master, or no registry
            }
        }
        let _ = self.io.remove(self.candidate.number()).await; // it expires anyway
    }

    /// Reads the registry once, and applies the resulting plan.
    async fn refresh_map(&mut self) -> Result<StepOutcome, RegistryUnavailable> {
        let sent = self.io.now.get();
        if self.io.renew(self.candidate.number()).await? {
            self.candidate.renewed(sent);
            let until = self.candidate.confirmed_until();
            self.service.confirm_until(until);
            self.io.confirmed_until.set(until);
        } else {
            self.candidate.lost_membership().into_iter().for_each(|group| self.service.release_group(group));
            self.candidate = join_registry(&self.io, &self.first).await?;
            return Ok(StepOutcome::Again);
        }
        let seen = self.io.read().await?;
        let plan = self.candidate.observe(self.io.now.get(), &seen);
        self.apply(&plan, &seen);
        let Some((token, document)) = &seen.document else { return Ok(StepOutcome::Done) };
        if let Some(next) = self.reclaimed(document) {
            self.io.write(Some(token), &next).await?;
            return Ok(StepOutcome::Again);
        }
        if let Some(next) = plan.claim {
            // A claimed group gets no handoff: one that was sent without a change of ownership is stale.
            for taken in next.groups_of(self.candidate.number()) {
                if !self.candidate.hosted().contains_key(&taken.group) {
                    self.io.handoffs.borrow_mut().remove(&taken.group);
                }
            }
            self.io.write(Some(token), &next).await?;
            return Ok(StepOutcome::Again);
        }
        if let Some(transfer) = plan.hand_off {
            self.hand_over(&transfer, token, document).await?;
            return Ok(StepOutcome::Again);
        }
        let excluding = self.service.wanted_exclusions();
        if !excluding.is_empty() {
            let next = document.with_exclusions(&excluding, self.candidate.number());
            self.io.write(Some(token), &next).await?;
            return Ok(StepOutcome::Again);
        }
        Ok(StepOutcome::Done)
    }

    fn apply(&self, plan: &ElectionPlan, seen: &Snapshot) {
        let Some((_, document)) = &seen.document else { return };
        plan.release.iter().for_each(|&group| self.service.release_group(group));
        for hosting in &plan.host {
            let mut handoffs = self.io.handoffs.borrow_mut();
            let inherited = handoffs.remove(&hosting.group).map(|(handoff, _)| handoff);
            let inherited = inherited.filter(|handoff| handoff.term == hosting.previous);
            self.service.host(*hosting, inherited.map(|handoff| (*handoff).clone()));
        }
        self.service.update_cluster_state(document, &seen.members);
        // One that was about to be handed over, and was not.
        self.candidate.hosted().keys().for_each(|&group| self.service.cancel_handoff(group));
    }

    /// Nodes know higher terms of our groups than the registry does: it has forgotten.
    fn reclaimed(&mut self, document: &ClusterState) -> Option<ClusterState> {
        let superseded = self.service.take_superseded();
        let ours = |&(group, seen): &(GroupId, Term)| {
            self.candidate.hosted().get(&group).is_some_and(|&term| term < seen)
        };
        let ours: Vec<(GroupId, Term)> = superseded.into_iter().filter(ours).collect();
        let highest = ours.iter().map(|&(_, seen)| seen).max()?;
        let groups: Vec<GroupId> = ours.iter().map(|&(group, _)| group).collect();
        groups.iter().for_each(|&group| self.service.release_group(group));
        let above = document.with_terms_above(highest);
        let next = above.with_owner(&groups, self.candidate.number(), &self.io.addresses());
        next.map(|(next, _)| next)
    }

    async fn hand_over(
        &self,
        transfer: &GroupTransfer,
        token: &DocumentVersion,
        document: &ClusterState,
    ) -> Result<(), RegistryUnavailable> {
        let given = document.with_owner(&[transfer.group], transfer.to, &transfer.addresses);
        let (Some(handoff), Some((next, _))) = (self.service.begin_handoff(transfer.group), given) else {
            return Ok(());
        };
        if !self.io.send_handoff(&transfer.addresses, transfer.group, handoff).await {
            self.service.cancel_handoff(transfer.group);
            return Ok(());
        }
        if self.io.write(Some(token), &next).await? {
            self.io.handed_over.set(self.io.handed_over.get() + 1);
        }
        Ok(())
    }
}

/// Drops handoffs that were not used in time.
pub(super) fn expire_handoffs(io: &ElectionIo) {
    let now = io.now.get();
    io.handoffs.borrow_mut().retain(|_, (_, since)| now.since(*since) < HANDOFF_KEPT_MAX);
}

/// Takes a number, and joins. A member at the same addresses is gone.
async fn join_registry(
    io: &Rc<ElectionIo>,
    first: &ClusterState,
) -> Result<ElectionState, RegistryUnavailable> {
    loop {
        let seen = io.read().await?;
        let (token, document) = match seen.document {
            Some((token, document)) => (Some(token), document),
            None => (None, first.clone()),
        };
        let (next, number) = document.with_next_term().expect("few terms");
        if !io.write(token.as_ref(), &next).await? {
            continue;
        }
        let addresses = io.addresses();
        for predecessor in seen.members.iter().filter(|(_, known)| known.grpc == addresses.grpc) {
            io.remove(Term::new(*predecessor.0).expect("members have terms as numbers")).await?;
        }
        let asked = io.now.get();
        io.join(number, LEASE).await?;
        return Ok(ElectionState::new(number, addresses, LEASE, asked));
    }
}
