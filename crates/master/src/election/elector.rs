//! [`Elector`]: passes snapshots of the registry to the [`ElectionState`], and executes its plans at the service and
//! the registry.
//!
//! ```text
//!   join ──▶ renew ──▶ read ──▶ plan ──▶ release, host ──▶ claim or hand off ──▶ wait for a change ──┐
//!    ▲        │ ▲                                                                                    │
//!    └────────┘ └────────────────────────────────────────────────────────────────────────────────────┘
//!     membership lost: all groups are released
//! ```
//!
//! This file contains no decisions. Everything runs in one task, so that the plan of one snapshot is executed before
//! the next snapshot is read.

use std::collections::BTreeMap;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use moontide_meta::GroupHandoff;
use moontide_types::{Clock, GroupId, MonoTime, SystemClock, Term};
use tokio::sync::{mpsc, oneshot, watch};
use tracing::{info, warn};

use super::cluster_state::{ClusterState, MasterAddresses};
use super::handoff;
use super::proposal::Proposal;
use super::registry::{DocumentVersion, Registry, RegistryError, Snapshot};
use super::state::{ElectionPlan, ElectionState, GroupTransfer};
use crate::service::Service;

/// Number of renewals within one lease.
const RENEWALS_PER_LEASE: u32 = 5;

/// Delay after a failure of the registry.
const REGISTRY_RETRY_DELAY: Duration = Duration::from_millis(200);

/// Timeout of the handoff of all groups at shutdown.
const SHUTDOWN_HANDOFF_MAX: Duration = Duration::from_secs(5);

/// Number of terms that a registry may have lost, for example with a backup that was restored. Masters use some hundred a
/// day, of four million.
const LOST_TERMS_MAX: u32 = 4096;

/// Elector of a master.
#[derive(Debug)]
pub(crate) struct Elector {
    registry: Arc<dyn Registry>,
    addresses: MasterAddresses,
    lease: Duration,
    state: ElectionState,
    /// Groups for which nodes know higher terms than the registry.
    superseded: BTreeMap<GroupId, Term>,
    /// State of the groups, with their terms, from the time when this master lost its membership.
    retained: BTreeMap<GroupId, (Term, GroupHandoff)>,
}

impl Elector {
    /// Joins the registry. The id of the master is a new term.
    pub(crate) async fn join(
        registry: Arc<dyn Registry>,
        first: &ClusterState,
        addresses: MasterAddresses,
        lease: Duration,
    ) -> Result<Elector, RegistryError> {
        let state = enter(&*registry, first, &addresses, lease).await?;
        Ok(Elector {
            registry,
            addresses,
            lease,
            state,
            superseded: BTreeMap::new(),
            retained: BTreeMap::new(),
        })
    }

    /// Returns the id of this master.
    pub(crate) fn number(&self) -> Term {
        self.state.number()
    }

    /// Runs until shutdown, then hands off all groups if another master is available.
    pub(crate) async fn run(
        mut self,
        service: Arc<Service>,
        mut proposals: mpsc::Receiver<Proposal>,
        mut stop: watch::Receiver<bool>,
    ) {
        let mut pending: Option<Proposal> = None;
        let mut reachable = true;
        loop {
            if *stop.borrow() {
                self.state.retire();
                let handoff = self.hand_off_all(&service);
                if tokio::time::timeout(SHUTDOWN_HANDOFF_MAX, handoff).await.is_err() {
                    warn!("shutdown timeout: not all groups were handed off");
                }
                // Other masters claim what is left.
                if let Err(error) = self.registry.remove(self.number()).await {
                    warn!(%error, "cannot remove registry membership; it ends with its lease");
                }
                return;
            }
            let outcome = self.step(&service, pending.as_mut()).await;
            let snapshot = match outcome {
                Ok(StepOutcome::Done(snapshot)) => snapshot,
                Ok(StepOutcome::Again) => continue,
                Err(error) => {
                    // It is unknown whether a handoff was written. Until it is known, the group is served, unconfirmed.
                    if service.is_unconfirmed() {
                        self.state.hosted().keys().for_each(|&group| service.cancel_handoff(group));
                    }
                    if std::mem::replace(&mut reachable, false) {
                        warn!(%error, "registry unreachable; hosted groups remain, no group moves");
                    }
                    tokio::select! {
                        () = tokio::time::sleep(REGISTRY_RETRY_DELAY) => {}
                        _ = stop.wait_for(|&stop| stop) => {}
                    }
                    continue;
                }
            };
            if !std::mem::replace(&mut reachable, true) {
                info!("registry reachable again");
            }
            pending = None;
            tokio::select! {
                () = self.registry.changed(&snapshot, self.lease / RENEWALS_PER_LEASE) => {}
                () = service.superseded() => {}
                proposal = proposals.recv() => pending = proposal,
                _ = stop.wait_for(|&stop| stop) => {}
            }
        }
    }

    /// Hands off groups until none is left or no other master is available.
    async fn hand_off_all(&mut self, service: &Service) {
        while !self.state.hosted().is_empty() {
            match self.step(service, None).await {
                Ok(StepOutcome::Again) => {}
                Ok(StepOutcome::Done(_)) | Err(_) => break, // no other master, or no registry
            }
        }
    }

    /// Reads the registry once and executes the plan.
    async fn step(
        &mut self,
        service: &Service,
        proposal: Option<&mut Proposal>,
    ) -> Result<StepOutcome, RegistryError> {
        let sent = SystemClock.now();
        if self.registry.renew(self.number()).await? {
            let sent =
                if moontide_rt::mutation_enabled("lease-from-the-answer") { SystemClock.now() } else { sent };
            self.confirmed(sent, service);
        } else {
            warn!(master_id = self.number().get(), "lost registry membership; releasing all groups");
            // If no other master claims a group in the meantime, its state is still valid when this master claims it
            // again.
            for (&group, &term) in self.state.hosted() {
                self.retained.extend(service.begin_handoff(group).map(|handoff| (group, (term, handoff))));
            }
            if moontide_rt::mutation_enabled("expelled-and-hosting") {
                self.state.hosted().keys().for_each(|&group| service.cancel_handoff(group));
            } else {
                self.state.lost_membership().into_iter().for_each(|group| service.release_group(group));
            }
            let first = ClusterState::new(service.groups()).with_terms_above(service.newest_term());
            self.state = enter(&*self.registry, &first, &self.addresses, self.lease).await?;
            return Ok(StepOutcome::Again);
        }
        let snapshot = self.registry.read().await?;
        if let Some((_, document)) = &snapshot.document {
            check_groups(document, service.groups())?;
        }
        let plan = self.state.observe(SystemClock.now(), &snapshot);
        self.apply(&plan, &snapshot, service);
        let Some((version, document)) = &snapshot.document else {
            // It existed when this master joined: the registry has lost it.
            let first = ClusterState::new(service.groups()).with_terms_above(service.newest_term());
            self.registry.write(None, &first).await?;
            return Ok(StepOutcome::Again);
        };
        if let Some(next) = self.reclaimed(document, service) {
            self.registry.write(Some(version), &next).await?;
            return Ok(StepOutcome::Again);
        }
        if let Some(next) = plan.claim {
            // A claimed group has no handoff: a handoff that was received without a change of ownership is outdated.
            let claimed = next.groups_of(self.number());
            claimed.filter(|claimed| !self.state.hosted().contains_key(&claimed.group)).for_each(|claimed| {
                service.handoffs.discard(claimed.group);
            });
            self.registry.write(Some(version), &next).await?;
            return Ok(StepOutcome::Again);
        }
        if let Some(transfer) = plan.hand_off {
            self.hand_off(&transfer, version, document, service).await?;
            return Ok(StepOutcome::Again);
        }
        let excluding = service.wanted_exclusions();
        if !excluding.is_empty() {
            let next = document.with_exclusions(&excluding, self.number());
            if self.registry.write(Some(version), &next).await? {
                let groups: Vec<u16> = excluding.iter().map(|(group, _)| group.0).collect();
                info!(?groups, "absent nodes and disks excluded");
            }
            return Ok(StepOutcome::Again); // the service gets the numbers with the next snapshot
        }
        if let Some(proposal) = proposal
            && !self.propose(proposal, &snapshot, service).await?
        {
            return Ok(StepOutcome::Again);
        }
        Ok(StepOutcome::Done(snapshot))
    }

    /// Records a confirmed renewal that was sent at `sent`.
    fn confirmed(&mut self, sent: MonoTime, service: &Service) {
        self.state.renewed(sent);
        service.confirm_until(self.state.confirmed_until());
    }

    fn apply(&mut self, plan: &ElectionPlan, snapshot: &Snapshot, service: &Service) {
        let Some((_, document)) = &snapshot.document else { return };
        if !plan.release.is_empty() {
            info!(groups = ?numbers(&plan.release), "groups released, another master owns them");
        }
        plan.release.iter().for_each(|&group| service.release_group(group));
        let mut handoff_objects = 0;
        for assignment in &plan.host {
            // The handoff of the previous owner; or the own state, if no other master owned the group since.
            let retained =
                self.retained.remove(&assignment.group).filter(|(term, _)| *term == assignment.previous);
            let received = service.handoffs.take(assignment.group, assignment.previous);
            let handoff = received.or(retained.map(|(_, handoff)| handoff));
            handoff_objects += handoff.as_ref().map_or(0, |handoff| handoff.objects.len());
            service.host(*assignment, handoff);
        }
        if let Some(last) = plan.host.last() {
            let groups: Vec<GroupId> = plan.host.iter().map(|assignment| assignment.group).collect();
            let term = last.term.get();
            info!(groups = ?numbers(&groups), term, handoff_objects, "master hosts new groups");
        }
        // After `host`: a client that reads the map may send requests immediately.
        service.update_cluster_state(document, &snapshot.members);
        let is_vacant = |group: &GroupId| {
            let owner = document.group_owners[usize::from(group.0)];
            owner.is_none_or(|owner| !snapshot.members.contains_key(&owner.master))
        };
        self.retained.retain(|group, _| is_vacant(group));
        // A group whose handoff was started and not completed.
        self.state.hosted().keys().for_each(|&group| service.cancel_handoff(group));
    }

    /// Claims hosted groups again with higher terms if nodes know higher terms than the registry, which has lost data.
    /// Repeated until the registry has the new terms.
    fn reclaimed(&mut self, document: &ClusterState, service: &Service) -> Option<ClusterState> {
        for (group, seen) in service.take_superseded() {
            let known = self.superseded.entry(group).or_insert(seen);
            *known = (*known).max(seen);
        }
        let hosted = self.state.hosted();
        self.superseded.retain(|group, seen| hosted.get(group).is_some_and(|term| term < seen));
        // A node may name any term. A term that no registry has lost must not use up those of the cluster.
        let trusted = document.last_term.saturating_add(LOST_TERMS_MAX);
        self.superseded.retain(|group, seen| {
            let is_trusted = seen.get() <= trusted;
            if !is_trusted {
                warn!(
                    group = group.0,
                    named_term = seen.get(),
                    last_term = document.last_term,
                    "a node names a term that is too far from those of the registry, and is refused; if the registry \
                     was restored from an old backup, restart the nodes"
                );
            }
            is_trusted
        });
        let &highest = self.superseded.values().max()?;
        warn!(
            seen_term = highest.get(),
            "nodes have seen higher terms than the registry; claiming groups with new terms"
        );
        let groups: Vec<GroupId> = self.superseded.keys().copied().collect();
        let above = document.with_terms_above(highest);
        let (next, _) = above.with_owner(&groups, self.number(), &self.addresses)?;
        groups.iter().for_each(|&group| service.release_group(group));
        Some(next)
    }

    /// Sends the state of a group to its new owner, then writes the change of ownership.
    async fn hand_off(
        &mut self,
        transfer: &GroupTransfer,
        version: &DocumentVersion,
        document: &ClusterState,
        service: &Service,
    ) -> Result<(), RegistryError> {
        let changed = document.with_owner(&[transfer.group], transfer.to, &transfer.addresses);
        let (Some(handoff), Some((next, _))) = (service.begin_handoff(transfer.group), changed) else {
            return Ok(());
        };
        let objects = handoff.objects.len();
        let mut sending = std::pin::pin!(handoff::send(service, transfer, handoff));
        let sent = loop {
            tokio::select! {
                sent = &mut sending => break sent,
                // The handoff may take longer than a lease.
                () = tokio::time::sleep(self.lease / RENEWALS_PER_LEASE) => {
                    let sent_at = SystemClock.now();
                    match self.registry.renew(self.number()).await {
                        Ok(true) => self.confirmed(sent_at, service),
                        Ok(false) => return Ok(()), // handled by the next step
                        Err(error) => {
                            service.cancel_handoff(transfer.group); // ownership is unchanged
                            return Err(error);
                        }
                    }
                }
            }
        };
        // Not without the handoff: the other master may have an older one, from before this master went on serving the
        // group, and would use that.
        if let Err(reason) = sent {
            warn!(group = transfer.group.0, new_owner = transfer.addresses.grpc, %reason, "handoff failed");
            service.cancel_handoff(transfer.group);
            tokio::time::sleep(REGISTRY_RETRY_DELAY).await;
            return Ok(());
        }
        if self.registry.write(Some(version), &next).await? {
            info!(group = transfer.group.0, new_owner = transfer.addresses.grpc, objects, "group handed off");
        }
        Ok(())
    }

    /// Applies a proposal to the cluster state. Returns false if the step must be repeated.
    async fn propose(
        &self,
        proposal: &mut Proposal,
        snapshot: &Snapshot,
        service: &Service,
    ) -> Result<bool, RegistryError> {
        let Some((version, document)) = &snapshot.document else { return Ok(false) };
        let before = document.tenants.get(&proposal.tenant).copied().unwrap_or_default();
        let after = proposal.change.apply(before);
        if after != before {
            let next = document.with_tenant(&proposal.tenant, after);
            if let Err(reason) = next.encode() {
                warn!(tenant = proposal.tenant, %reason, "change of a tenant refused: the cluster state has no room for it");
                let (closed, _) = oneshot::channel();
                proposal.agreed = closed; // the caller gets `Unreachable`
                return Ok(true);
            }
            if !self.registry.write(Some(version), &next).await? {
                return Ok(false);
            }
            service.update_cluster_state(&next, &snapshot.members);
        }
        let (closed, _) = oneshot::channel();
        // The caller may be gone.
        let _ = std::mem::replace(&mut proposal.agreed, closed).send(after);
        Ok(true)
    }
}

/// Fails if the cluster state is of a cluster with another number of groups.
fn check_groups(document: &ClusterState, groups: NonZeroU16) -> Result<(), RegistryError> {
    let found = document.group_owners.len();
    if found == usize::from(groups.get()) {
        return Ok(());
    }
    Err(RegistryError::Malformed {
        address: "of this cluster".into(),
        what: "a cluster state",
        reason: format!("it has {found} groups, the cluster has {groups}"),
    })
}

fn numbers(groups: &[GroupId]) -> Vec<u16> {
    groups.iter().map(|group| group.0).collect()
}

/// Outcome of a step.
enum StepOutcome {
    /// No further work for this snapshot.
    Done(Snapshot),
    /// The step changed the registry: the snapshot is outdated.
    Again,
}

/// Takes a new term as id and joins. Removes a member with the same address: its process is gone, because this process
/// has bound the address.
async fn enter(
    registry: &dyn Registry,
    first: &ClusterState,
    addresses: &MasterAddresses,
    lease: Duration,
) -> Result<ElectionState, RegistryError> {
    loop {
        let snapshot = registry.read().await?;
        let (version, document) = match snapshot.document {
            Some((version, document)) => (Some(version), document),
            None => (None, first.clone()),
        };
        let Some((next, number)) = document.with_next_term() else {
            return Err(RegistryError::Malformed {
                address: format!("{registry:?}"),
                what: "a cluster state",
                reason: "all terms are used".into(),
            });
        };
        if !registry.write(version.as_ref(), &next).await? {
            continue;
        }
        for predecessor in snapshot.members.iter().filter(|(_, known)| known.grpc == addresses.grpc) {
            if let Ok(predecessor) = Term::new(*predecessor.0) {
                registry.remove(predecessor).await?;
            }
        }
        let sent_at = SystemClock.now();
        registry.join(number, addresses, lease).await?;
        return Ok(ElectionState::new(number, addresses.clone(), lease, sent_at));
    }
}
