//! Puts: reservation at the master, transfer to the nodes, end at the master.

use std::time::Duration;

use moontide_client::logic::{NodeHealth, RETRY_BACKOFF};
use moontide_proto::convert::{PutConfig, PutStartResponse, Wire};
use moontide_proto::{
    CommitEntry, CommitFlags, FixedRecord, Handle, ObjectEntry, PackedBuilder, PackedBytesBuilder,
    PutEndEntry, PutEndFlags, PutEntry, VersionedId, v1,
};
use moontide_rt::Backoff;
use moontide_types::ErrorCode;
use moontide_types::limits::REPLICAS_MAX;
use moontide_types::record::Attributes;

use super::get::ReplicaList;
use super::{Client, OpOutcome, REPLY_TIMEOUT, State, outcome, packed};
use crate::context::ProcessContext;
use crate::event::{MasterReply, NodeOp, NodeReply, Request};

/// Pause before a put is retried whose node was unreachable.
const UNREACHABLE_PAUSE: Duration = Duration::from_millis(100);
/// Shortest pause before a retry of a put that found no space: nodes confirm an eviction within about a millisecond.
const NO_SPACE_RETRY_DELAY: Duration = Duration::from_millis(1);

#[derive(Debug)]
pub(super) struct Put {
    key: usize,
    len: u64,
    token: u64,
    upsert: bool,
    config: PutConfig,
    /// Caller id of this put alone: a retry may resume what it has started.
    caller: u64,
    backoff: Backoff,
    step: Step,
}

#[derive(Debug)]
enum Step {
    Starting {
        call: u64,
    },
    /// After a pause it starts again.
    Again,
    Writing(ObjectWrite),
    Ending {
        call: u64,
        writing: ObjectWrite,
        backoff: Backoff,
    },
}

/// Returns the attributes of a record, encoded.
fn attributes_of(config: &PutConfig) -> Vec<u8> {
    let mut section = vec![];
    Attributes { extra_replicas: config.replicas - 1, ..Attributes::default() }.encode(&mut section);
    section
}

/// Returns a list of one section; nothing if it is empty.
fn packed_section(section: &[u8]) -> Vec<u8> {
    if section.is_empty() {
        return vec![];
    }
    let mut sections = PackedBytesBuilder::new();
    sections.push(section).expect("a section is short");
    sections.finish()
}

/// A reservation that is being filled.
#[derive(Debug)]
struct ObjectWrite {
    object: ObjectEntry,
    replicas: Vec<Replica>,
    last: Option<ErrorCode>,
}

#[derive(Debug)]
struct Replica {
    handle: Handle,
    call: u64,
    begun: bool,
    root: Option<u64>,
    outcome: Option<Result<(), ErrorCode>>,
}

impl Client {
    pub(super) fn begin_put(&mut self, key: usize, upsert: bool, cx: &mut ProcessContext<'_>) {
        self.budget.earn();
        let replicas = self.rng.within(1, self.plan.replicas_max.into()) as u8;
        let config = PutConfig {
            replicas,
            // More than there are nodes would be refused by the shipped client.
            replicas_min: self.rng.within(1, u64::from(replicas).min(self.plan.nodes as u64)) as u8,
            upsert,
            ttl_ms: if self.rng.permille(50) { self.rng.within(100, 60_000) } else { 0 },
            ..PutConfig::default()
        };
        let len = if self.rng.permille(30) { 0 } else { self.rng.within(1, self.plan.object_bytes_max) };
        let (token, caller) = (self.rng.next_u64(), self.rng.next_u64());
        let (backoff, step) = (RETRY_BACKOFF, Step::Again);
        self.put_goes_on(Box::new(Put { key, len, token, upsert, config, caller, backoff, step }), cx);
    }

    /// A pause is over.
    pub(super) fn put_goes_on(&mut self, mut put: Box<Put>, cx: &mut ProcessContext<'_>) {
        match std::mem::replace(&mut put.step, Step::Again) {
            Step::Again => {
                let objects: PackedBuilder<PutEntry> =
                    [PutEntry { len: put.len, config: 0 }].into_iter().collect();
                let request = v1::PutStartRequest {
                    context: self.context(put.caller, cx),
                    keys: packed(put.key),
                    configs: vec![put.config.to_wire()],
                    objects: objects.finish().into(),
                    attributes: packed_section(&attributes_of(&put.config)).into(),
                };
                let call = self.call(put.key, Request::PutStart(request), REPLY_TIMEOUT, cx);
                put.step = Step::Starting { call };
                self.state = State::Put(put);
            }
            Step::Ending { writing, backoff, .. } => {
                let entry = writing.end(put.upsert);
                let entries: PackedBuilder<PutEndEntry> = [entry].into_iter().collect();
                let request = v1::PutEndRequest {
                    context: self.context(put.caller, cx),
                    entries: entries.finish().into(),
                    stripe_roots: vec![],
                };
                let call = self.call(put.key, Request::PutEnd(request), REPLY_TIMEOUT, cx);
                put.step = Step::Ending { call, writing, backoff };
                self.state = State::Put(put);
            }
            step @ (Step::Starting { .. } | Step::Writing(_)) => {
                put.step = step;
                self.state = State::Put(put);
            }
        }
    }

    /// Handles a timeout.
    pub(super) fn put_unanswered(&mut self, mut put: Box<Put>, cx: &mut ProcessContext<'_>) {
        match std::mem::replace(&mut put.step, Step::Again) {
            Step::Starting { .. } => {
                self.masters.mark_stale();
                self.start_again(put, Duration::ZERO, cx);
            }
            Step::Writing(mut writing) => {
                for replica in writing.replicas.iter_mut().filter(|replica| replica.outcome.is_none()) {
                    replica.outcome = Some(Err(ErrorCode::ConnectionLost));
                    self.node_health
                        .insert(replica.handle.node, (NodeHealth::Failed, cx.now().after(super::SUSPECT)));
                    writing.last = Some(ErrorCode::ConnectionLost);
                }
                self.end_writing(put, writing, cx);
            }
            Step::Ending { writing, backoff, .. } => {
                self.masters.mark_stale();
                self.end_again(put, writing, backoff, cx);
            }
            Step::Again => self.state = State::Put(put),
        }
    }

    fn start_again(&mut self, mut put: Box<Put>, asked: Duration, cx: &mut ProcessContext<'_>) {
        put.step = Step::Again;
        match self.pause_again(put.backoff, asked, cx) {
            Some(backoff) => {
                put.backoff = backoff;
                self.state = State::Put(put);
            }
            None => self.put_failed(put, cx),
        }
    }

    /// Retries at the current master after a pause.
    fn start_elsewhere(&mut self, put: Box<Put>, cx: &mut ProcessContext<'_>) {
        self.masters.mark_stale();
        self.start_again(put, Duration::ZERO, cx);
    }

    fn put_failed(&mut self, put: Box<Put>, cx: &mut ProcessContext<'_>) {
        self.state = State::Put(put);
        self.finish(OpOutcome::Failed, cx);
    }

    pub(super) fn put_answered(
        &mut self,
        put: Box<Put>,
        call: u64,
        reply: MasterReply,
        cx: &mut ProcessContext<'_>,
    ) {
        match (&put.step, reply) {
            (Step::Starting { call: waited }, MasterReply::Started(reply)) if *waited == call => {
                self.put_started(put, &reply, cx);
            }
            (Step::Ending { call: waited, .. }, MasterReply::Outcomes(reply)) if *waited == call => {
                let code = outcome(&reply).expect("the master speaks as it should");
                self.put_ended(put, code, cx);
            }
            _ => self.state = State::Put(put), // reply to a canceled call
        }
    }

    fn put_started(&mut self, mut put: Box<Put>, reply: &v1::PutStartResponse, cx: &mut ProcessContext<'_>) {
        let reply = PutStartResponse::from_wire(reply).expect("the master speaks as it should");
        let after = Duration::from_millis(reply.context().retry_after_ms.into()).max(NO_SPACE_RETRY_DELAY);
        let reservations = match reply.into_result() {
            Ok(reservations) => reservations,
            Err(context) if context.code == Some(ErrorCode::WrongMaster) => {
                return self.start_elsewhere(put, cx);
            }
            Err(context) => {
                let again = context.code.is_some_and(ErrorCode::is_retryable);
                return if again { self.start_again(put, after, cx) } else { self.put_failed(put, cx) };
            }
        };
        let (object, handles) = reservations.list.iter().next().expect("one key was asked for");
        match object.code {
            None => {}
            Some(ErrorCode::AlreadyExists) => {
                cx.oracle.tally.existed += 1;
                self.state = State::Put(put);
                return self.finish(OpOutcome::Nothing, cx);
            }
            Some(ErrorCode::NoSpace | ErrorCode::Busy | ErrorCode::Retry) => {
                return self.start_again(put, after, cx);
            }
            Some(ErrorCode::WrongMaster) => return self.start_elsewhere(put, cx),
            Some(_) => return self.put_failed(put, cx),
        }
        if self.rng.permille(20) {
            return self.give_back(put, &object, cx);
        }
        cx.oracle.granted(put.key, object.epoch, put.len, put.token);
        let mut writing = ObjectWrite { object, replicas: Vec::new(), last: None };
        for handle in handles.iter() {
            let (key, attributes) = (put.key, attributes_of(&put.config));
            let call = self.ask(handle.node, NodeOp::Begin { object, handle, key, attributes }, cx);
            writing.replicas.push(Replica { handle, call, begun: false, root: None, outcome: None });
        }
        put.step = Step::Writing(writing);
        self.start_timeout(REPLY_TIMEOUT, cx);
        self.state = State::Put(put);
    }

    /// Revokes a reservation. Does not wait: the master also releases the space when the reservation expires.
    fn give_back(&mut self, put: Box<Put>, object: &ObjectEntry, cx: &mut ProcessContext<'_>) {
        let mut versions = Vec::with_capacity(VersionedId::BYTES);
        VersionedId { id: object.id, epoch: object.epoch }.encode(&mut versions);
        let request = v1::PutRevokeRequest { context: self.context(0, cx), versions: versions.into() };
        self.call(put.key, Request::Revoke(request), REPLY_TIMEOUT, cx);
        self.state = State::Put(put);
        self.finish(OpOutcome::Nothing, cx);
    }

    pub(super) fn put_node_reply(
        &mut self,
        mut put: Box<Put>,
        call: u64,
        reply: &NodeReply,
        cx: &mut ProcessContext<'_>,
    ) {
        let Step::Writing(writing) = &mut put.step else {
            self.state = State::Put(put);
            return;
        };
        let (object, token) = (writing.object, put.token);
        let waited = |replica: &&mut Replica| replica.call == call && replica.outcome.is_none();
        let Some(replica) = writing.replicas.iter_mut().find(waited) else {
            self.state = State::Put(put);
            return;
        };
        let handle = replica.handle;
        match *reply {
            NodeReply::Refused(code) => {
                replica.outcome = Some(Err(code));
                writing.last = Some(code);
            }
            NodeReply::Done if !replica.begun => {
                replica.begun = true;
                replica.call = self.ask(handle.node, NodeOp::Write { object, handle, token }, cx);
            }
            NodeReply::Written { root } => {
                replica.root = Some(root);
                let entry = CommitEntry {
                    id: object.id,
                    epoch: object.epoch,
                    generation: handle.generation,
                    segment: handle.segment,
                    slot: handle.slot,
                    root,
                    capability: handle.capability,
                    term: handle.term,
                    flags: CommitFlags::NONE,
                };
                replica.call = self.ask(handle.node, NodeOp::Commit(entry), cx);
            }
            NodeReply::Done => replica.outcome = Some(Ok(())),
            NodeReply::Bytes(_) => unreachable!("nothing was read"),
        }
        self.start_timeout(REPLY_TIMEOUT, cx);
        if writing.replicas.iter().any(|replica| replica.outcome.is_none()) {
            self.state = State::Put(put);
            return;
        }
        let Step::Writing(writing) = std::mem::replace(&mut put.step, Step::Again) else {
            unreachable!("looked at above")
        };
        self.end_writing(put, writing, cx);
    }

    /// Every replica has an outcome. With fewer than are acceptable there is none.
    fn end_writing(&mut self, mut put: Box<Put>, mut writing: ObjectWrite, cx: &mut ProcessContext<'_>) {
        let well = writing.replicas.iter().filter(|replica| replica.outcome == Some(Ok(()))).count();
        if well < usize::from(put.config.replicas_min) {
            writing.replicas.iter_mut().for_each(|r| r.outcome = Some(Err(ErrorCode::Cancelled)));
        }
        put.step = Step::Ending { call: 0, writing, backoff: RETRY_BACKOFF };
        self.put_goes_on(put, cx);
    }

    fn end_again(
        &mut self,
        mut put: Box<Put>,
        writing: ObjectWrite,
        backoff: Backoff,
        cx: &mut ProcessContext<'_>,
    ) {
        match self.pause_again(backoff, Duration::ZERO, cx) {
            Some(backoff) => {
                put.step = Step::Ending { call: 0, writing, backoff };
                self.state = State::Put(put);
            }
            None => self.put_failed(put, cx),
        }
    }

    fn put_ended(&mut self, mut put: Box<Put>, code: Option<ErrorCode>, cx: &mut ProcessContext<'_>) {
        let Step::Ending { writing, backoff, .. } = std::mem::replace(&mut put.step, Step::Again) else {
            unreachable!("looked at by the caller")
        };
        match code {
            None | Some(ErrorCode::Pending) => {
                let now = cx.world_now();
                let epoch = writing.object.epoch;
                let replaces = put.upsert && code.is_none();
                cx.oracle.put_acked(put.key, epoch, replaces, self.called, now);
                cx.oracle.tally.pending += u64::from(code.is_some());
                self.remember_written(&writing);
                self.state = State::Put(put);
                self.finish(OpOutcome::Well, cx);
            }
            Some(ErrorCode::WrongMaster) => {
                self.masters.mark_stale();
                self.end_again(put, writing, backoff, cx);
            }
            Some(code) if code.is_retryable() => self.end_again(put, writing, backoff, cx),
            Some(code) => {
                let code = writing.last.unwrap_or(code);
                let lost = matches!(
                    code,
                    ErrorCode::Gone
                        | ErrorCode::StaleEpoch
                        | ErrorCode::StaleTerm
                        | ErrorCode::StaleGeneration
                        | ErrorCode::StaleSession
                        | ErrorCode::Overlap
                        | ErrorCode::PermissionDenied
                        | ErrorCode::ConnectionLost
                );
                let asked =
                    if code == ErrorCode::ConnectionLost { UNREACHABLE_PAUSE } else { Duration::ZERO };
                if (lost || code.is_retryable()) && self.budget.spend() {
                    self.start_again(put, asked, cx);
                } else {
                    self.put_failed(put, cx);
                }
            }
        }
    }

    /// Caches the location of the written object.
    fn remember_written(&mut self, writing: &ObjectWrite) {
        let id = writing.object.id;
        self.locations.forget_if(&id, |_| true);
        let all_well = writing.replicas.iter().all(|replica| replica.outcome == Some(Ok(())));
        let Some(root) = writing.root().filter(|_| all_well && writing.object.object_len > 0) else { return };
        let handle = |replica: &Replica| Handle { stripe_root: root, ..replica.handle };
        let handles = writing.replicas.iter().map(handle).collect();
        self.locations.put(id, ReplicaList { object: ObjectEntry { root, ..writing.object }, handles });
    }
}

impl ObjectWrite {
    fn root(&self) -> Option<u64> {
        self.replicas.iter().find_map(|replica| replica.root)
    }

    /// Returns the PutEnd entry.
    fn end(&self, replaces: bool) -> PutEndEntry {
        let mut outcomes = [None; REPLICAS_MAX];
        for replica in &self.replicas {
            outcomes[usize::from(replica.handle.replica)] = match replica.outcome {
                Some(Ok(())) => None,
                Some(Err(code)) => Some(code),
                None => Some(ErrorCode::Internal),
            };
        }
        PutEndEntry {
            id: self.object.id,
            epoch: self.object.epoch,
            root: self.root().unwrap_or(0),
            outcomes,
            replica_count: self.object.replica_count,
            flags: if replaces { PutEndFlags::REPLACES } else { PutEndFlags::NONE },
            stripe_count: 1,
        }
    }
}
