//! Nodes: sessions, segments, and the messages of their streams.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use moontide_meta::{
    Effects, HeartbeatOutcome, MountSpec, NodeTaken, OpenedSession, Quota, ReportRecord, ReportState,
    StripeRange, TenantIndex, TickBudget,
};
use moontide_proto::convert::{
    DiskStatus, Heartbeat, MountResult, MountResults, MountSegmentsRequest, NodeMessage, NodeMessageBody,
    OpenSessionRequest, OpenSessionResponse, RemoteReads, ReportChunk, SegmentSpec, SessionGrant, SyncMark,
    UnmountSegmentsRequest, Wire,
};
use moontide_proto::convert::{MountSegmentsResponse, ResponseContext};
use moontide_proto::{ProtocolVersions, ReportFlags, Stripe, v1};
use moontide_types::record::{AttributesRef, State};
use moontide_types::{
    ErrorCode, GroupId, Medium, MonoTime, NodeId, SegmentId, SessionId, Tenant, TenantGeneration, Term,
};

use super::node_session::{NodeSession, SessionStream};
use super::signing::OfferedKeys;
use super::{OutcomeCodes, Service, refused};

/// Longest interval of ticks: the delay with which a reservation or a session may end.
const TICK_MAX: Duration = Duration::from_millis(50);

/// Interval of ticks while a group has more work; other threads get its lock in between.
const TICK_AGAIN: Duration = Duration::from_micros(200);

/// Minimum time between two messages about refused nodes in the log.
const REFUSAL_LOGGED_EVERY: Duration = Duration::from_secs(1);

/// Interval at which the quotas of tenants are distributed over the groups.
const QUOTAS_EVERY: Duration = Duration::from_millis(200);

/// A registered node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NodeInfo {
    /// Id of the node.
    pub node: NodeId,
    /// Number of the node's registration.
    pub registration: u64,
    /// Host, rack and zone; empty if unknown.
    pub labels: [Box<str>; 3],
    /// Addresses of its transfer engines: engine and address.
    pub addresses: Vec<(Box<str>, Box<str>)>,
    /// Number of commands without a result.
    pub pending_commands: usize,
    /// Status of its disk, if it has one.
    pub disk: Option<DiskStatus>,
    /// Whether it is being emptied.
    pub draining: bool,
}

impl Service {
    /// Registers a node. Ends its earlier session, unless that belongs to another process with an open stream.
    pub fn open_session(&self, m: &v1::OpenSessionRequest) -> v1::OpenSessionResponse {
        let opened = OpenSessionRequest::from_wire(m).map_err(refused).and_then(|request| {
            let caller = self.caller(request.context)?;
            self.check_registered_term(request.node, request.boot_id, request.highest_term)?;
            let protocol =
                ProtocolVersions::CURRENT.negotiate(request.protocol).ok_or(ErrorCode::Unsupported)?;
            let now = self.now();
            let labels = [request.topology.host, request.topology.rack, request.topology.zone].map(Box::from);
            let addresses = request.addresses.iter().map(|a| (a.engine.into(), a.address.into())).collect();
            let key = self.signer.current_key(request.node, now.mono);
            let opened = {
                // Both under one lock: a thread that ends this session finds it in `nodes`.
                let mut sessions = self.sessions.lock();
                let has_stream = |session| self.nodes.read().get(&session).is_some_and(|n| n.has_stream());
                let opened = sessions.open(now.mono, request.node, request.boot_id, has_stream);
                if let Ok(OpenedSession { session, number, .. }) = opened {
                    let (id, keys) = ((session, number), OfferedKeys::new(key.clone(), now.mono));
                    let node = NodeSession::new(request.node, id, self.config.term, labels, addresses, keys);
                    self.nodes.write().insert(session, Arc::new(node));
                }
                opened
            };
            let OpenedSession { session, earlier, .. } = opened.map_err(|NodeTaken| {
                if self.may_log_refusal() {
                    tracing::warn!(
                        node = %request.node,
                        "registration refused: another process is registered as this node, and its stream is open; \
                         if two nodes have the same id, change one; otherwise this ends with that process"
                    );
                }
                ErrorCode::Retry
            })?;
            if let Some(earlier) = earlier {
                self.end_session(earlier, request.node);
            }
            let ttl_ms = self.config.session_ttl.as_millis() as u32;
            Ok((caller, session, ttl_ms, protocol, key))
        });
        match opened {
            Ok((caller, session, ttl_ms, protocol, capability_key)) => {
                let grant = SessionGrant {
                    session,
                    ttl_ms,
                    protocol,
                    groups: self.config.groups.get(),
                    id_key: self.config.id_key.number(),
                    id_key_secret: Some(self.config.id_key_secret.clone()),
                    capability_key,
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

    /// Mounts segments, each in one group.
    pub fn mount_segments(&self, m: &v1::MountSegmentsRequest) -> v1::MountSegmentsResponse {
        let mounted = MountSegmentsRequest::from_wire(m).map_err(refused).and_then(|request| {
            self.caller(request.context)?;
            let node = self.node_of(request.context.session)?;
            let rotation = request.capability_rotation;
            if !self.holds_key(&node, rotation) {
                return Err(ErrorCode::InvalidArgument);
            }
            let results = request.segments.iter().map(|spec| match spec.medium {
                Medium::Disk => self.mount_disk(&node, spec, &request.synced, rotation),
                Medium::Memory | Medium::Device => self.mount(&node, spec, &request.synced, rotation),
            });
            Ok(MountResults { results: results.collect() })
        });
        match mounted {
            Ok(results) => {
                let context = ResponseContext {
                    map_version: self.map_version(),
                    term: self.config.term,
                    ..Default::default()
                };
                MountSegmentsResponse::new(context, results).to_wire()
            }
            Err(code) => {
                v1::MountSegmentsResponse { context: Some(self.refusal(code)), ..Default::default() }
            }
        }
    }

    /// Unmounts segments.
    pub fn unmount_segments(&self, m: &v1::UnmountSegmentsRequest) -> v1::OutcomesResponse {
        let request = UnmountSegmentsRequest::from_wire(m).map_err(refused);
        let request = request.and_then(|r| Ok((r.context, (self.node_of(r.context.session)?, r))));
        let mut empty_node = None;
        let response = self.outcomes(request, |_, (node, request), codes| {
            *codes = OutcomeCodes::new(request.segments.len());
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
                        self.group_for_node(index)
                            .and_then(|mut group| {
                                if let Some(view) = group.find_segment(node.node, *segment) {
                                    // Relaxed: only a hint for the distribution of segments.
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
            empty_node = (!request.segments.is_empty() && node.segments.lock().is_empty()).then_some(node);
        });
        // A node without segments is shutting down: its session ends now, so that no client is sent to it.
        if let Some(node) = empty_node
            && self.sessions.lock().close(node.session()).is_some()
        {
            tracing::info!(
                node = %node.node,
                session = %node.session(),
                "session ended: node unmounted all segments"
            );
            self.end_session(node.session(), node.node);
        }
        response
    }

    /// Attaches a stream to a session; an earlier stream ends.
    pub fn attach(self: &Arc<Self>, session: SessionId) -> Option<SessionStream> {
        let node = self.node_of(Some(session)).ok()?;
        Some(SessionStream::new(Arc::clone(self), node))
    }

    /// Runs the periodic work of all groups and sessions. Returns the delay until the next tick.
    pub fn tick(&self) -> Duration {
        let now = self.now();
        let ended = self.sessions.lock().expire(now.mono);
        for info in ended {
            tracing::warn!(node = %info.node, session = %info.session, "session ended: no heartbeat");
            self.end_session(info.session, info.node);
        }
        self.rotate_capability_keys(now.mono);
        self.split_quotas(now.mono.0);
        let mut effects = Effects::new();
        let (mut more, mut invalidated) = (false, false);
        for mut group in self.hosted() {
            group.exchange_eviction_trials(&mut self.eviction_trials.lock());
            more |= group.tick(self.now(), &TickBudget::default(), &mut effects);
            self.deliver(&group, &mut effects);
            invalidated |= self.watchers.advance(group.index, group.open_invalidation_count());
        }
        if invalidated {
            self.watchers.wake();
        }
        if more { TICK_AGAIN } else { TICK_MAX }
    }

    /// Returns the registered nodes, sorted by id.
    pub fn nodes(&self) -> Vec<NodeInfo> {
        let info = |node: &Arc<NodeSession>| NodeInfo {
            node: node.node,
            registration: node.registration(),
            labels: node.labels.clone(),
            addresses: node.addresses.clone(),
            pending_commands: node.pending_commands(),
            disk: *node.disk.lock(),
            draining: node.draining.load(Ordering::Relaxed),
        };
        let mut nodes: Vec<NodeInfo> = self.nodes.read().values().map(info).collect();
        // A node that registers again has two sessions for a short time: the newer one, with the larger number, is used.
        nodes.sort_by_key(|node| (node.node, std::cmp::Reverse(node.registration)));
        nodes.dedup_by_key(|node| node.node);
        nodes
    }

    /// Checks the term that a process names when it registers. Only the process that has a session with mounted segments
    /// proves a newer term by it.
    fn check_registered_term(&self, node: NodeId, boot_id: u64, seen: Term) -> Result<(), ErrorCode> {
        let session = self.sessions.lock().of_node(node).filter(|own| own.boot_id == boot_id).copied();
        let session = session.and_then(|own| self.node_of(Some(own.session)).ok());
        self.observe_term(node, || session.is_some_and(|session| session.has_segments()), seen)
    }

    /// Handles a term that a node names. A single master that has mounted segments of it steps down if the term is higher
    /// than its own: another master has mounted them since. The word of any other process counts for nothing but its own
    /// segments. One of several masters asks its registry instead: the term may be that of another group.
    fn observe_term(
        &self,
        node: NodeId,
        has_segments: impl FnOnce() -> bool,
        seen: Term,
    ) -> Result<(), ErrorCode> {
        if self.config.multi_master || seen <= self.config.term {
            return Ok(());
        }
        if has_segments() || moontide_rt::mutation_enabled("newer-term-of-a-stranger-believed") {
            self.step_down(seen);
            return Err(ErrorCode::WrongMaster);
        }
        if self.may_log_refusal() {
            tracing::warn!(
                %node,
                named_term = seen.get(),
                own_term = self.config.term.get(),
                "node refused: it names a newer term than that of this master, which goes on serving the others; if \
                 another master runs with a copy of this data_dir, stop one of them; then restart the node"
            );
        }
        Err(ErrorCode::StaleTerm)
    }

    /// Returns whether to log that a node was refused: at most once per [`REFUSAL_LOGGED_EVERY`], because processes that
    /// are refused try again.
    fn may_log_refusal(&self) -> bool {
        let (now, last) = (self.now().mono, MonoTime(self.refusal_logged.load(Ordering::Relaxed)));
        // The first one is logged at any time of the clock. Relaxed: two threads may both log.
        let is_due = last == MonoTime(0) || now.since(last) >= REFUSAL_LOGGED_EVERY;
        if is_due {
            self.refusal_logged.store(now.0.max(1), Ordering::Relaxed);
        }
        is_due
    }

    /// Returns the node of a session.
    pub(crate) fn session_node(&self, session: SessionId) -> Option<NodeId> {
        self.nodes.read().get(&session).map(|node| node.node)
    }

    pub(super) fn node_of(&self, session: Option<SessionId>) -> Result<Arc<NodeSession>, ErrorCode> {
        let session = session.ok_or(ErrorCode::StaleSession)?;
        self.nodes.read().get(&session).cloned().ok_or(ErrorCode::StaleSession)
    }

    /// Ends a session: clients are no longer sent to its node.
    fn end_session(&self, session: SessionId, node: NodeId) {
        let now = self.now();
        let ended = self.nodes.write().remove(&session);
        if let Some(ended) = ended {
            ended.end();
            self.past_reads.lock().add(&ended.reads.lock());
            for (segment, index) in ended.segments.lock().drain() {
                let view =
                    self.group_for_node(index).ok().and_then(|group| group.find_segment(node, segment));
                if let Some(view) = view {
                    self.group_units[index].fetch_sub(view.units.into(), Ordering::Relaxed);
                }
            }
        }
        let mut effects = Effects::new();
        for mut group in self.hosted() {
            group.node_lost(now, node, session, &mut effects);
            self.signer.ended(group.index, node, session);
            self.deliver(&group, &mut effects);
        }
    }

    fn mount(
        &self,
        node: &NodeSession,
        spec: &SegmentSpec<'_>,
        synced: &[SyncMark],
        rotation: u64,
    ) -> MountResult {
        let refused = |code| MountResult {
            segment: spec.segment,
            code: Some(code),
            group: spec.group.unwrap_or(GroupId(0)),
            term: self.config.term,
        };
        if let Err(code) = self.observe_term(node.node, || node.has_segments(), spec.term) {
            return refused(code);
        }
        let exists = |group: &GroupId| usize::from(group.0) < self.group_slots.len();
        // Records of a segment belong to its group; a new segment without a group goes to the group with the fewest
        // units.
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
            medium: spec.medium, // a disk is refused by the group: it is mounted in all groups
            units: spec.units,
            slots: spec.slots,
            labels: [host, rack, zone],
            tenant: spec.tenant,
            term: spec.term,
            has_records: spec.has_records,
            synced: mark_of(synced, index),
            one_sided: node.is_one_sided(),
        };
        let mut effects = Effects::new();
        let mut group = match self.group_for_node(index) {
            Ok(group) => group,
            Err(code) => return refused(code),
        };
        let term = group.term();
        let before = group.find_segment(spec.node, spec.segment).map_or(0, |view| u64::from(view.units));
        // An ending session is marked before its segments are removed from the groups: either the mark is visible
        // here, or this segment is removed, too.
        let mounted = if node.is_ended() {
            Err(ErrorCode::StaleSession)
        } else {
            group.mount(self.now(), &spec, &mut effects)
        };
        self.deliver(&group, &mut effects);
        // Under the lock of the group: `release_group` removes these entries.
        let mut previous_group = None;
        if mounted.is_ok() {
            self.signer.mounted(index, node.node, node.session(), rotation);
            self.group_units[index]
                .fetch_add(u64::from(spec.units) - before.min(spec.units.into()), Ordering::Relaxed);
            previous_group = node.segments.lock().insert(spec.segment, index);
        }
        drop(group);
        if mounted.is_ok() {
            let elsewhere = previous_group.filter(|&other| other != index);
            if let Some(mut other) = elsewhere.and_then(|other| self.group_for_node(other).ok()) {
                let _ = other.unmount(self.now(), spec.node, spec.segment, &mut effects);
                self.deliver(&other, &mut effects);
            }
        }
        MountResult {
            segment: spec.segment,
            code: mounted.err(),
            group: GroupId(index as u16), // ≤ GROUPS_MAX
            term,
        }
    }

    /// Applies one message of a node's stream.
    pub(super) fn apply_node_message(
        &self,
        node: &NodeSession,
        m: &v1::NodeMessage,
    ) -> Result<(), ErrorCode> {
        let message = NodeMessage::from_wire(m).map_err(refused)?;
        self.observe_term(node.node, || node.has_segments(), message.highest_term)?;
        if self.sessions.lock().heartbeat(self.now().mono, node.session()) == HeartbeatOutcome::Stale {
            return Err(ErrorCode::StaleSession);
        }
        if !node.expect(message.sequence)? {
            return Ok(());
        }
        let mut heartbeat_ack = None;
        match &message.body {
            NodeMessageBody::Heartbeat(heartbeat) => {
                let drain = node.announced_drain(heartbeat.draining);
                self.heartbeat(node, heartbeat);
                heartbeat_ack = Some(v1::HeartbeatAck {
                    heartbeat_id: heartbeat.heartbeat_id,
                    ttl_ms: self.config.session_ttl.as_millis() as u32,
                    in_sync: self.groups_in_sync(node),
                    flush: heartbeat.flushing.then(|| self.flush(node)),
                    drain,
                });
            }
            NodeMessageBody::CommandResults(results) => {
                let mut effects = Effects::new();
                for answered in node.answered(results.iter()) {
                    let command = answered.command;
                    if let moontide_meta::CommandOutcome::Refused(code) = answered.outcome {
                        let (segment, slot) = (command.segment.0, command.slot.0);
                        if matches!(command.kind, moontide_meta::CommandKind::Copy { .. }) {
                            // Usual: the source was removed in the meantime. Another scan finds what must be copied.
                            tracing::debug!(node = %node.node, segment, slot, %code, "copy refused");
                        } else {
                            tracing::warn!(node = %node.node, segment, slot, %code, "command refused");
                        }
                    }
                    // Results for a group that is no longer hosted are ignored.
                    let Ok(mut group) = self.group_for_node(answered.group) else { continue };
                    let name = (node.node, command.segment);
                    group.command_outcome(
                        name,
                        command.kind,
                        command.slot,
                        command.epoch,
                        answered.outcome,
                        &mut effects,
                    );
                    self.deliver(&group, &mut effects);
                }
            }
            NodeMessageBody::Report(chunk) => {
                ignore_stale_report(node, chunk.segment, self.report(node, chunk))?
            }
            NodeMessageBody::ReportEnd(end) => {
                let outcome = self.segment_group(node, end.segment).and_then(|index| {
                    let mut effects = Effects::new();
                    let mut group = self.group_for_node(index)?;
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
                ignore_stale_report(node, end.segment, outcome)?;
            }
            NodeMessageBody::Offloaded(notice) => self.offloaded(node, notice)?,
            NodeMessageBody::DiskEvicted(evicted) => self.disk_evicted(node, evicted)?,
            &NodeMessageBody::CapabilityKeyHeld(rotation) => self.capability_key_held(node, rotation),
        }
        node.applied(message.sequence, heartbeat_ack);
        Ok(())
    }

    /// Returns the groups with which a node is in sync, with their numbers of exclusions.
    fn groups_in_sync(&self, node: &NodeSession) -> Vec<v1::GroupExclusion> {
        // Another master may own the groups already, and exclude this node.
        if self.is_unconfirmed() {
            return vec![];
        }
        let has_disk = node.disk.lock().is_some();
        // Without those that are being handed off.
        let served = (0..self.group_slots.len()).filter_map(|index| self.group(index).ok());
        let in_sync = served.filter(|group| group.is_in_sync(node.node, node.session(), has_disk));
        in_sync
            .map(|group| v1::GroupExclusion { group: group.index as u32, exclusion: group.exclusion() })
            .collect()
    }

    fn segment_group(&self, node: &NodeSession, segment: SegmentId) -> Result<usize, ErrorCode> {
        node.segments.lock().get(&segment).copied().ok_or(ErrorCode::NotFound)
    }

    fn heartbeat(&self, node: &NodeSession, heartbeat: &Heartbeat<'_>) {
        node.reads.lock().set(&heartbeat.reads);
        self.disk_status(node, heartbeat.disk);
        for mut group in self.hosted() {
            group.announce_drain(self.now(), node.node, node.session(), heartbeat.draining);
        }
        for touched in &heartbeat.touched {
            let group =
                self.segment_group(node, touched.segment).and_then(|index| self.group_for_node(index));
            let Ok(mut group) = group else { continue };
            let name = (node.node, touched.segment);
            group.touched(self.now(), name, touched.generation, touched.first_slot.0, touched.bits);
        }
        for reads in &heartbeat.remote_reads {
            let group = self.segment_group(node, reads.segment).and_then(|index| self.group_for_node(index));
            let Ok(mut group) = group else { continue };
            let RemoteReads { segment, generation, slot, epoch, reader, bytes } = *reads;
            let reads = moontide_meta::RemoteReads { segment, generation, slot, epoch, reader, bytes };
            let mut effects = Effects::new();
            group.remote_reads(self.now(), node.node, &reads, &mut effects);
            self.deliver(&group, &mut effects);
        }
    }

    fn report(&self, node: &NodeSession, chunk: &ReportChunk<'_>) -> Result<(), ErrorCode> {
        let index = self.segment_group(node, chunk.segment)?;
        let reported = chunk.records.iter().map(|record| {
            let alive = matches!(record.word.state(), State::Ready | State::Writing);
            (record.tenant, record.tenant_generation, alive && record.id_key == self.config.id_key.number())
        });
        let generations = self.update_generations(&chunk.tenants, reported);
        let now = self.now();
        let mut effects = Effects::new();
        let mut group = self.group_for_node(index)?;
        let tenants = group.tenants_of_report(&chunk.tenants);
        if tenants.contains(&None) {
            tracing::warn!(node = node.node.0, "too many tenants; records of some are dropped");
        }
        let mut sections = chunk.attributes.as_ref().map(|sections| sections.iter());
        let id_key = self.config.id_key.number();
        let records = chunk.records.iter().zip(chunk.keys.iter()).map(|(record, key)| {
            let attributes = match &mut sections {
                Some(sections) => sections.next().expect("one section per record").decode_ref(),
                None => AttributesRef::default(),
            };
            let state = record.word.state();
            let tenant = usize::from(record.tenant);
            // Ids of another id key or of an earlier generation of the tenant cannot be looked up.
            let current = state == State::Free
                || record.id_key == id_key
                    && record.tenant_generation == generations[tenant]
                    && tenants[tenant].is_some();
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
                tenant: tenants.get(tenant).copied().flatten().unwrap_or(TenantIndex(0)),
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
                extra_replicas: attributes.extra_replicas,
                spread: attributes.spread,
                disk_replicas: attributes.disk_replicas,
            }
        });
        let name = (node.node, chunk.segment);
        let outcome =
            group.report(now, name, chunk.generation, chunk.term, chunk.first_record, records, &mut effects);
        self.deliver(&group, &mut effects);
        outcome
    }

    /// Raises the generation of each tenant to the highest one of its valid records, and returns the current
    /// generations. A record is given by the index of its tenant, its generation, and whether it is valid.
    pub(super) fn update_generations(
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
            |name: &str| self.tenants.read().get(name).map_or(TenantGeneration(0), |info| info.generation);
        for (tenant, highest) in names.iter().zip(&mut highest) {
            let known = known(tenant.as_str());
            if *highest > known {
                let mut tenants = self.tenants.write();
                let info = tenants.entry_ref(tenant.as_str()).or_default();
                info.generation = info.generation.max(*highest);
            }
            *highest = known.max(*highest);
        }
        highest
    }

    /// Splits the quota of every tenant into shares that sum to it: the usage of each group, plus an equal part of
    /// the rest.
    fn split_quotas(&self, now_nanos: u64) {
        let last = self.quotas_split.load(Ordering::Relaxed);
        if now_nanos.saturating_sub(last) < QUOTAS_EVERY.as_nanos() as u64 {
            return;
        }
        self.quotas_split.store(now_nanos, Ordering::Relaxed);
        let limited: Vec<(Box<str>, Quota)> = {
            let tenants = self.tenants.read();
            let limited = tenants.iter().filter(|(_, info)| info.quota != Quota::default());
            limited.map(|(name, info)| (name.clone(), info.quota)).collect()
        };
        for (name, quota) in limited {
            self.split_quota(&name, quota);
        }
    }

    pub(super) fn split_quota(&self, name: &str, quota: Quota) {
        let Ok(tenant) = moontide_types::Tenant::new(name) else { return };
        let used: Vec<(usize, u64, u64)> = self
            .hosted()
            .map(|group| {
                let usage = group.find_tenant(tenant).and_then(|ix| group.tenant_usage(ix));
                usage.map_or((group.index, 0, 0), |usage| (group.index, usage.bytes, usage.objects))
            })
            .collect();
        if used.is_empty() {
            return; // other masters host all groups
        }
        // Other masters have the shares of their groups. 0 means no limit and remains 0; a limit never becomes 0.
        let part = |all: u64| match all {
            0 => 0,
            all => (u128::from(all) * used.len() as u128 / self.group_slots.len() as u128).max(1) as u64, // ≤ all
        };
        let bytes = shares(part(quota.bytes_max), used.iter().map(|used| used.1));
        let objects = shares(part(quota.objects_max), used.iter().map(|used| used.2));
        for ((index, ..), (bytes_max, objects_max)) in used.iter().zip(bytes.into_iter().zip(objects)) {
            let Ok(mut group) = self.group_for_node(*index) else { continue };
            let quota = Quota { bytes_max, objects_max };
            let known = group.find_tenant(tenant);
            let index = if quota == Quota::default() { known } else { group.tenant(tenant).ok() };
            if let Some(index) = index {
                group.set_quota(index, quota);
            }
        }
    }
}

/// Converts a stripe to the type of `moontide_meta`.
pub(super) fn stripe_view(Stripe { index, count, offset, len }: Stripe) -> StripeRange {
    StripeRange { index, count, offset, len }
}

/// Ignores a report about a segment that is no longer mounted, or that contradicts itself: the node would send it
/// repeatedly, and the messages after it would never be applied.
fn ignore_stale_report(
    node: &NodeSession,
    segment: SegmentId,
    outcome: Result<(), ErrorCode>,
) -> Result<(), ErrorCode> {
    match outcome {
        Err(
            code @ (ErrorCode::NotFound
            | ErrorCode::WrongMaster
            | ErrorCode::StaleTerm
            | ErrorCode::StaleGeneration
            | ErrorCode::OutOfBounds
            | ErrorCode::Overlap),
        ) => {
            tracing::warn!(node = %node.node, segment = segment.0, %code, "report ignored");
            Ok(())
        }
        outcome => outcome,
    }
}

/// Splits `all` into shares that sum to it; 0 (no limit) gives shares of 0. Otherwise a share is at least 1, because 0
/// would mean no limit: a quota smaller than the number of groups is exceeded by at most that number.
fn shares(all: u64, used: impl Iterator<Item = u64> + Clone) -> Vec<u64> {
    let count = used.clone().count() as u64;
    let sum: u64 = used.clone().sum();
    if all == 0 || count == 0 {
        return vec![0; count as usize];
    }
    if sum >= all {
        // Over the quota: all shares are reduced in proportion.
        let part = |used: u64| (u128::from(all) * u128::from(used) / u128::from(sum)) as u64;
        return used.map(|used| part(used).max(1)).collect();
    }
    let (each, rest) = ((all - sum) / count, (all - sum) % count);
    (0u64..).zip(used).map(|(at, used)| (used + each + u64::from(at < rest)).max(1)).collect()
}

/// Returns when a node was last in sync with a group, as it says.
pub(super) fn mark_of(synced: &[SyncMark], group: usize) -> moontide_meta::SyncMark {
    let of_group = |mark: &&SyncMark| usize::from(mark.group.0) == group;
    synced.iter().find(of_group).map_or(moontide_meta::SyncMark::NONE, |mark| moontide_meta::SyncMark {
        exclusion: mark.exclusion,
        ago: Duration::from_millis(mark.ago_ms),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quota_is_split_over_groups_with_at_least_one_each() {
        assert_eq!(shares(0, [5, 6].into_iter()), [0, 0]);
        assert!(shares(7, [].into_iter()).is_empty(), "a master without groups");
        assert_eq!(shares(100, [10, 0, 0].into_iter()), [40, 30, 30]);
        assert_eq!(shares(100, [0, 0, 0].into_iter()).iter().sum::<u64>(), 100);
        assert_eq!(shares(100, [150, 50].into_iter()), [75, 25], "over the quota");
        assert_eq!(shares(2, [0, 0, 0, 0].into_iter()), [1, 1, 1, 1], "never 0, which would be no limit");
    }
}
