//! Nodes: sessions, segments, and what nodes say on their streams.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use moontide_meta::{
    Beat, Effects, Medium as MetaMedium, MountSpec, Quota, ReportRecord, ReportState, StripeView, TenantIx,
    TickBudget,
};
use moontide_proto::convert::{
    DiskStatus, Heartbeat, MountSegmentsRequest, NodeBody, NodeMessage, OpenSessionRequest,
    OpenSessionResponse, ReportChunk, SegmentGrant, SegmentGrants, SegmentSpec, SessionGrant,
    UnmountSegmentsRequest, Wire,
};
use moontide_proto::convert::{MountSegmentsResponse, ResponseContext};
use moontide_proto::{Medium, ProtocolVersions, ReportFlags, Stripe, v1};
use moontide_types::record::{AttributesRef, State};
use moontide_types::{ErrorCode, GroupId, NodeId, SegmentId, SessionId, Tenant, TenantGeneration};

use super::outbox::{NodeSession, SessionStream};
use super::{Codes, Service, refused};

/// Longest time between two ticks: how late a reservation or a session may end.
const TICK_MAX: Duration = Duration::from_millis(50);

/// A group that has more to do is given this pause, in which others get its lock.
const TICK_AGAIN: Duration = Duration::from_micros(200);

/// How often tenants' quotas are split anew among groups.
const QUOTAS_EVERY: Duration = Duration::from_millis(200);

/// A node that is registered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeInfo {
    /// The node.
    pub node: NodeId,
    /// Its session.
    pub session: SessionId,
    /// Host, rack and zone; empty if unknown.
    pub labels: [Box<str>; 3],
    /// How to reach it: engine and address.
    pub addresses: Vec<(Box<str>, Box<str>)>,
    /// Orders that it has not answered yet.
    pub orders_outstanding: usize,
    /// How its disk is, if it has one.
    pub disk: Option<DiskStatus>,
}

impl Service {
    /// Registers a node. Its earlier session ends by this.
    pub fn open_session(&self, m: &v1::OpenSessionRequest) -> v1::OpenSessionResponse {
        let opened = OpenSessionRequest::from_wire(m).map_err(refused).and_then(|request| {
            let caller = self.caller(request.context)?;
            self.hears_of(request.highest_term)?;
            let protocol =
                ProtocolVersions::CURRENT.common(request.protocol).ok_or(ErrorCode::Unsupported)?;
            let now = self.now();
            let labels = [request.topology.host, request.topology.rack, request.topology.zone].map(Box::from);
            let addresses = request.addresses.iter().map(|a| (a.engine.into(), a.address.into())).collect();
            let (session, earlier) = {
                // Both under one lock: whoever ends this session finds it among the nodes.
                let mut sessions = self.sessions.lock();
                let (session, earlier) = sessions.open(now.mono, request.node, request.boot);
                let node = NodeSession::new(request.node, session, self.config.term, labels, addresses);
                self.nodes.write().insert(session, Arc::new(node));
                (session, earlier)
            };
            if let Some(earlier) = earlier {
                self.end_session(earlier, request.node);
            }
            let ttl_ms = self.config.session_ttl.as_millis() as u32;
            Ok((caller, session, ttl_ms, protocol))
        });
        match opened {
            Ok((caller, session, ttl_ms, protocol)) => {
                let grant = SessionGrant {
                    session,
                    ttl_ms,
                    protocol,
                    groups: self.config.groups.get(),
                    id_key: self.config.id_key.number(),
                    id_key_secret: Some(self.config.id_key_secret.clone()),
                };
                let context = ResponseContext {
                    map_version: self.map_version(),
                    term: self.config.term,
                    tenant_generation: caller.generation,
                    ..ResponseContext::default()
                };
                OpenSessionResponse::new(context, grant).to_wire()
            }
            Err(code) => v1::OpenSessionResponse { context: Some(self.refusal(code)), ..Default::default() },
        }
    }

    /// Takes segments into use, each in one group.
    pub fn mount_segments(&self, m: &v1::MountSegmentsRequest) -> v1::MountSegmentsResponse {
        let mounted = MountSegmentsRequest::from_wire(m).map_err(refused).and_then(|request| {
            self.caller(request.context)?;
            let node = self.node_of(request.context.session)?;
            let grants = request.segments.iter().map(|spec| match spec.medium {
                Medium::Disk => self.mount_disk(&node, spec),
                Medium::Memory | Medium::Device => self.mount(&node, spec),
            });
            let grants = grants.collect();
            Ok(SegmentGrants { grants })
        });
        match mounted {
            Ok(grants) => {
                let context = ResponseContext {
                    map_version: self.map_version(),
                    term: self.config.term,
                    ..Default::default()
                };
                MountSegmentsResponse::new(context, grants).to_wire()
            }
            Err(code) => {
                v1::MountSegmentsResponse { context: Some(self.refusal(code)), ..Default::default() }
            }
        }
    }

    /// Takes segments out of use.
    pub fn unmount_segments(&self, m: &v1::UnmountSegmentsRequest) -> v1::OutcomesResponse {
        let request = UnmountSegmentsRequest::from_wire(m).map_err(refused);
        let request = request.and_then(|r| Ok((r.context, (self.node_of(r.context.session)?, r))));
        let mut leaves = None;
        let answer = self.outcomes(request, |_, (node, request), codes| {
            *codes = Codes::new(request.segments.len());
            for (at, segment) in request.segments.iter().enumerate() {
                if *segment == SegmentId::DISK {
                    codes.set(at, self.unmount_disk(&node).err());
                    continue;
                }
                let index = node.segments.lock().remove(segment);
                let code = match index {
                    None => Some(ErrorCode::NotFound),
                    Some(index) => {
                        let mut effects = Effects::new();
                        self.books(index)
                            .and_then(|mut group| {
                                if let Some(view) = group.find_segment(node.node, *segment) {
                                    // Relaxed: a hint for spreading segments.
                                    self.group_units[index].fetch_sub(view.units.into(), Ordering::Relaxed);
                                }
                                let unmounted = group.unmount(self.now(), node.node, *segment, &mut effects);
                                self.deliver(&group, &mut effects);
                                unmounted
                            })
                            .err()
                    }
                };
                codes.set(at, code);
            }
            leaves = (!request.segments.is_empty() && node.segments.lock().is_empty()).then_some(node);
        });
        // A node without segments has said goodbye: nobody is to wait for its heartbeat, or to be sent there.
        if let Some(node) = leaves
            && self.sessions.lock().close(node.session()).is_some()
        {
            tracing::info!(
                node = node.node.0,
                session = node.session().0,
                "session ended: the node has left"
            );
            self.end_session(node.session(), node.node);
        }
        answer
    }

    /// The stream of a session; an earlier one ends.
    pub fn attach(self: &Arc<Self>, session: SessionId) -> Option<SessionStream> {
        let node = self.node_of(Some(session)).ok()?;
        Some(SessionStream::new(Arc::clone(self), node))
    }

    /// Does what is due in all groups and sessions. The answer: after how long to come again.
    pub fn tick(&self) -> Duration {
        let now = self.now();
        let ended = self.sessions.lock().expire(now.mono);
        for info in ended {
            tracing::warn!(node = info.node.0, session = info.session.0, "session ended: no heartbeat");
            self.end_session(info.session, info.node);
        }
        self.split_quotas(now.mono.0);
        let mut effects = Effects::new();
        let (mut more, mut news) = (false, false);
        for mut group in self.hosted() {
            more |= group.tick(self.now(), &TickBudget::default(), &mut effects);
            self.deliver(&group, &mut effects);
            news |= self.watchers.is_news(group.index, group.departures_next());
        }
        if news {
            self.watchers.wake();
        }
        if more { TICK_AGAIN } else { TICK_MAX }
    }

    /// The nodes that are registered, by their number.
    pub fn nodes(&self) -> Vec<NodeInfo> {
        let info = |node: &Arc<NodeSession>| NodeInfo {
            node: node.node,
            session: node.session(),
            labels: node.labels.clone(),
            addresses: node.addresses.clone(),
            orders_outstanding: node.orders_outstanding(),
            disk: *node.disk.lock(),
        };
        let mut nodes: Vec<NodeInfo> = self.nodes.read().values().map(info).collect();
        // One that registers again has two sessions for a moment: the newer one, which has the larger number, counts.
        nodes.sort_by_key(|node| (node.node, std::cmp::Reverse(node.session)));
        nodes.dedup_by_key(|node| node.node);
        nodes
    }

    pub(super) fn node_of(&self, session: Option<SessionId>) -> Result<Arc<NodeSession>, ErrorCode> {
        let session = session.ok_or(ErrorCode::StaleSession)?;
        self.nodes.read().get(&session).cloned().ok_or(ErrorCode::StaleSession)
    }

    /// A session is over: nobody is sent to its node any more.
    fn end_session(&self, session: SessionId, node: NodeId) {
        let now = self.now();
        let gone = self.nodes.write().remove(&session);
        if let Some(gone) = gone {
            gone.end();
            self.past_reads.lock().add(&gone.reads.lock());
            for (segment, index) in gone.segments.lock().drain() {
                let view = self.books(index).ok().and_then(|group| group.find_segment(node, segment));
                if let Some(view) = view {
                    self.group_units[index].fetch_sub(view.units.into(), Ordering::Relaxed);
                }
            }
        }
        let mut effects = Effects::new();
        for mut group in self.hosted() {
            group.node_lost(now, node, session, &mut effects);
            self.deliver(&group, &mut effects);
        }
    }

    fn mount(&self, node: &NodeSession, spec: &SegmentSpec<'_>) -> SegmentGrant {
        let refused = |code| SegmentGrant {
            segment: spec.segment,
            code: Some(code),
            group: spec.group.unwrap_or(GroupId(0)),
            term: self.config.term,
        };
        let exists = |group: &GroupId| usize::from(group.0) < self.seats.len();
        // Records of a segment belong to the group that had it; a fresh one of no group goes where there is least.
        let index = match spec.group.filter(exists) {
            Some(group) => usize::from(group.0),
            None => {
                let units = |index: &usize| self.group_units[*index].load(Ordering::Relaxed);
                let Some(least) = self.hosted().map(|group| group.index).min_by_key(units) else {
                    return refused(ErrorCode::WrongMaster);
                };
                least
            }
        };
        let [host, rack, zone] = &node.labels;
        let spec = MountSpec {
            node: node.node,
            session: node.session(),
            segment: spec.segment,
            generation: spec.generation,
            medium: match spec.medium {
                Medium::Device => MetaMedium::Device,
                Medium::Disk => MetaMedium::Disk, // which the group refuses: a disk is mounted in all of them
                Medium::Memory => MetaMedium::Memory,
            },
            units: spec.units,
            slots: spec.slots,
            labels: [host, rack, zone],
            tenant: spec.tenant,
            term: spec.term,
            occupied: spec.occupied,
            known: spec.known_term,
            away: Duration::from_millis(spec.away_ms),
            one_sided: node.is_one_sided(),
        };
        let mut effects = Effects::new();
        let mut group = match self.books(index) {
            Ok(group) => group,
            Err(code) => return refused(code),
        };
        let term = group.term();
        let before = group.find_segment(spec.node, spec.segment).map_or(0, |view| u64::from(view.units));
        // A session that ends is marked before its segments are taken out of the groups: either that is seen here, or this
        // segment is among them.
        let mounted = if node.is_ended() {
            Err(ErrorCode::StaleSession)
        } else {
            group.mount(self.now(), &spec, &mut effects)
        };
        self.deliver(&group, &mut effects);
        // While the group is held: whoever lets go of it removes these traces.
        let mut before_in = None;
        if mounted.is_ok() {
            self.group_units[index]
                .fetch_add(u64::from(spec.units) - before.min(spec.units.into()), Ordering::Relaxed);
            before_in = node.segments.lock().insert(spec.segment, index);
        }
        drop(group);
        if mounted.is_ok() {
            let elsewhere = before_in.filter(|&other| other != index);
            if let Some(mut other) = elsewhere.and_then(|other| self.books(other).ok()) {
                let _ = other.unmount(self.now(), spec.node, spec.segment, &mut effects);
                self.deliver(&other, &mut effects);
            }
        }
        SegmentGrant {
            segment: spec.segment,
            code: mounted.err(),
            group: GroupId(index as u16), // ≤ GROUPS_MAX
            term,
        }
    }

    /// Applies one message of a node's stream.
    pub(super) fn node_says(&self, node: &NodeSession, m: &v1::NodeMessage) -> Result<(), ErrorCode> {
        let message = NodeMessage::from_wire(m).map_err(refused)?;
        self.hears_of(message.highest_term)?;
        if self.sessions.lock().beat(self.now().mono, node.session()) == Beat::Stale {
            return Err(ErrorCode::StaleSession);
        }
        if !node.expect(message.sequence)? {
            return Ok(());
        }
        let mut beat = None;
        match &message.body {
            NodeBody::Heartbeat(heartbeat) => {
                self.heartbeat(node, heartbeat);
                beat = Some((heartbeat.beat, self.config.session_ttl.as_millis() as u32));
            }
            NodeBody::OrderResults(results) => {
                let mut effects = Effects::new();
                for answered in node.answered(results.iter()) {
                    let order = answered.order;
                    if let moontide_meta::OrderOutcome::Refused(code) = answered.outcome {
                        tracing::warn!(node = node.node.0, segment = order.segment.0, slot = order.slot.0, %code, "order refused");
                    }
                    // Of a group that has gone nobody wants to know.
                    let Ok(mut group) = self.books(answered.group) else { continue };
                    let name = (node.node, order.segment);
                    group.order_outcome(
                        name,
                        order.kind,
                        order.slot,
                        order.epoch,
                        answered.outcome,
                        &mut effects,
                    );
                    self.deliver(&group, &mut effects);
                }
            }
            NodeBody::Report(chunk) => passable(node, chunk.segment, self.report(node, chunk))?,
            NodeBody::ReportEnd(end) => {
                let outcome = self.segment_group(node, end.segment).and_then(|index| {
                    let mut effects = Effects::new();
                    let mut group = self.books(index)?;
                    let name = (node.node, end.segment);
                    let outcome = group.report_end(
                        self.now(),
                        name,
                        end.generation,
                        end.term,
                        end.records,
                        &mut effects,
                    );
                    self.deliver(&group, &mut effects);
                    outcome
                });
                passable(node, end.segment, outcome)?;
            }
            NodeBody::Offloaded(notice) => self.offloaded(node, notice)?,
            NodeBody::DiskEvicted(evicted) => self.disk_evicted(node, evicted)?,
        }
        node.applied(message.sequence, beat);
        Ok(())
    }

    fn segment_group(&self, node: &NodeSession, segment: SegmentId) -> Result<usize, ErrorCode> {
        node.segments.lock().get(&segment).copied().ok_or(ErrorCode::NotFound)
    }

    fn heartbeat(&self, node: &NodeSession, heartbeat: &Heartbeat<'_>) {
        node.reads.lock().set(&heartbeat.reads);
        self.disk_status(node, heartbeat.disk);
        for touched in &heartbeat.touched {
            let group = self.segment_group(node, touched.segment).and_then(|index| self.books(index));
            let Ok(mut group) = group else { continue };
            let name = (node.node, touched.segment);
            group.touched(name, touched.generation, touched.first_slot.0, touched.bits);
        }
    }

    fn report(&self, node: &NodeSession, chunk: &ReportChunk<'_>) -> Result<(), ErrorCode> {
        let index = self.segment_group(node, chunk.segment)?;
        let told = chunk.records.iter().map(|record| {
            let alive = matches!(record.word.state(), State::Ready | State::Writing);
            (record.tenant, record.tenant_generation, alive && record.id_key == self.config.id_key.number())
        });
        let generations = self.learn_generations(&chunk.tenants, told);
        let now = self.now();
        let mut effects = Effects::new();
        let mut group = self.books(index)?;
        let tenants =
            chunk.tenants.iter().map(|&tenant| group.tenant(tenant)).collect::<Result<Vec<_>, _>>()?;
        let mut sections = chunk.attributes.as_ref().map(|sections| sections.iter());
        let id_key = self.config.id_key.number();
        let records = chunk.records.iter().zip(chunk.keys.iter()).map(|(record, key)| {
            let attributes = match &mut sections {
                Some(sections) => sections.next().expect("one section per record").decode_ref(),
                None => AttributesRef::default(),
            };
            let state = record.word.state();
            let tenant = usize::from(record.tenant);
            // Ids of another key or of an earlier generation of the tenant cannot be looked up any more.
            let current = state == State::Free
                || record.id_key == id_key && record.tenant_generation == generations[tenant];
            ReportRecord {
                slot: record.slot,
                state: match state {
                    State::Free => ReportState::Free,
                    State::Writing if current => ReportState::Writing,
                    State::Ready if current => ReportState::Ready,
                    State::Writing | State::Ready | State::Dead => ReportState::Dead,
                },
                epoch: record.word.epoch(),
                id: record.id,
                tenant: tenants.get(tenant).copied().unwrap_or(TenantIx(0)),
                key,
                object_len: record.object_len,
                stripe: stripe_view(record.stripe()),
                root: record.root,
                extent: record.extent,
                payload_offset: record.payload_offset,
                digestless: record.flags.contains(ReportFlags::DIGESTLESS),
                one_sided: record.flags.contains(ReportFlags::ONE_SIDED),
                touched: record.flags.contains(ReportFlags::TOUCHED),
                pin: attributes.pin,
                expires: attributes.expires,
                cohort: attributes.cohort,
                parent: attributes.parent,
            }
        });
        let name = (node.node, chunk.segment);
        let outcome =
            group.report(now, name, chunk.generation, chunk.term, chunk.first_record, records, &mut effects);
        self.deliver(&group, &mut effects);
        outcome
    }

    /// A tenant's generation is at least what any record says whose word counts; the answer is the current one for each
    /// of the tenants. Of a record: the position of its tenant, its generation, and whether it counts.
    pub(super) fn learn_generations(
        &self,
        names: &[Tenant<'_>],
        records: impl Iterator<Item = (u16, TenantGeneration, bool)>,
    ) -> Vec<TenantGeneration> {
        let mut highest = vec![TenantGeneration(0); names.len()];
        for (tenant, generation, counts) in records {
            if let Some(highest) = highest.get_mut(usize::from(tenant)).filter(|_| counts) {
                *highest = (*highest).max(generation);
            }
        }
        let known =
            |name: &str| self.tenants.read().get(name).map_or(TenantGeneration(0), |facts| facts.generation);
        for (tenant, highest) in names.iter().zip(&mut highest) {
            let known = known(tenant.as_str());
            if *highest > known {
                let mut tenants = self.tenants.write();
                let facts = tenants.entry_ref(tenant.as_str()).or_default();
                facts.generation = facts.generation.max(*highest);
            }
            *highest = known.max(*highest);
        }
        highest
    }

    /// Splits every tenant's quota into shares that sum to it: what each group uses, and an equal part of the rest.
    fn split_quotas(&self, now_nanos: u64) {
        let last = self.quotas_split.load(Ordering::Relaxed);
        if now_nanos.saturating_sub(last) < QUOTAS_EVERY.as_nanos() as u64 {
            return;
        }
        self.quotas_split.store(now_nanos, Ordering::Relaxed);
        let limited: Vec<(Box<str>, Quota)> = {
            let tenants = self.tenants.read();
            let limited = tenants.iter().filter(|(_, facts)| facts.quota != Quota::default());
            limited.map(|(name, facts)| (name.clone(), facts.quota)).collect()
        };
        for (name, quota) in limited {
            self.split_quota(&name, quota);
        }
    }

    pub(super) fn split_quota(&self, name: &str, quota: Quota) {
        let Ok(tenant) = moontide_types::Tenant::new(name) else { return };
        let used: Vec<(usize, u64, u64)> = self
            .hosted()
            .map(|mut group| {
                let usage = group.tenant(tenant).ok().and_then(|ix| group.tenant_usage(ix));
                usage.map_or((group.index, 0, 0), |usage| (group.index, usage.bytes, usage.objects))
            })
            .collect();
        if used.is_empty() {
            return; // others have all groups
        }
        // Other masters have the parts of their groups. No limit stays no limit, and a limit stays one.
        let part = |all: u64| match all {
            0 => 0,
            all => (u128::from(all) * used.len() as u128 / self.seats.len() as u128).max(1) as u64, // ≤ all
        };
        let bytes = shares(part(quota.bytes_max), used.iter().map(|used| used.1));
        let objects = shares(part(quota.objects_max), used.iter().map(|used| used.2));
        for ((index, ..), (bytes_max, objects_max)) in used.iter().zip(bytes.into_iter().zip(objects)) {
            let Ok(mut group) = self.books(*index) else { continue };
            if let Ok(ix) = group.tenant(tenant) {
                group.set_quota(ix, Quota { bytes_max, objects_max });
            }
        }
    }
}

/// The group's view of a stripe.
pub(super) fn stripe_view(Stripe { index, count, offset, len }: Stripe) -> StripeView {
    StripeView { index, count, offset, len }
}

/// A report about a segment that is no longer mounted, or that contradicts itself, is passed over: the node would send it
/// again and again, and nothing behind it would be heard.
fn passable(node: &NodeSession, segment: SegmentId, outcome: Result<(), ErrorCode>) -> Result<(), ErrorCode> {
    match outcome {
        Err(
            code @ (ErrorCode::NotFound
            | ErrorCode::WrongMaster
            | ErrorCode::StaleTerm
            | ErrorCode::StaleGeneration
            | ErrorCode::OutOfBounds
            | ErrorCode::Overlap),
        ) => {
            tracing::warn!(node = node.node.0, segment = segment.0, %code, "a report was passed over");
            Ok(())
        }
        outcome => outcome,
    }
}

/// Shares that sum to `all`; no limit stays no limit. A share is at least 1, because 0 would be none: a quota smaller
/// than the number of groups is exceeded by at most that number.
fn shares(all: u64, used: impl Iterator<Item = u64> + Clone) -> Vec<u64> {
    let count = used.clone().count() as u64;
    let sum: u64 = used.clone().sum();
    if all == 0 || count == 0 {
        return vec![0; count as usize];
    }
    if sum >= all {
        // Over the quota: everybody gives up in proportion.
        let part = |used: u64| (u128::from(all) * u128::from(used) / u128::from(sum)) as u64;
        return used.map(|used| part(used).max(1)).collect();
    }
    let (each, rest) = ((all - sum) / count, (all - sum) % count);
    (0u64..).zip(used).map(|(at, used)| (used + each + u64::from(at < rest)).max(1)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_sum_to_the_quota() {
        assert_eq!(shares(0, [5, 6].into_iter()), [0, 0]);
        assert!(shares(7, [].into_iter()).is_empty(), "a master without groups");
        assert_eq!(shares(100, [10, 0, 0].into_iter()), [40, 30, 30]);
        assert_eq!(shares(100, [0, 0, 0].into_iter()).iter().sum::<u64>(), 100);
        assert_eq!(shares(100, [150, 50].into_iter()), [75, 25], "over the quota");
        assert_eq!(shares(2, [0, 0, 0, 0].into_iter()), [1, 1, 1, 1], "never 0, which would be no limit");
    }
}
