//! A put: a reservation at the master, bytes to the nodes, and the end at the master.

use std::time::Duration;

use moontide_client::decide::{Backoff, Trust};
use moontide_proto::convert::{PutConfig, PutStartResponse, Wire};
use moontide_proto::{
    CommitEntry, CommitFlags, FixedRecord, Handle, ObjectEntry, PackedBuilder, PutEndEntry, PutEntry,
    VersionedId, v1,
};
use moontide_types::ErrorCode;
use moontide_types::bounds::REPLICAS_MAX;

use super::get::Placed;
use super::{Client, Ended, PATIENCE, State, outcome, packed};
use crate::event::{Answer, Ask, Request, Told};
use crate::scene::Scene;

/// Before a put whose node could not be reached is tried again.
const UNREACHABLE_PAUSE: Duration = Duration::from_millis(100);
/// Room comes back within some milliseconds when something can be evicted.
const PAUSE_FOR_ROOM: Duration = Duration::from_millis(5);

#[derive(Debug)]
pub(super) struct Put {
    key: usize,
    len: u64,
    token: u64,
    upsert: bool,
    config: PutConfig,
    /// Of this put alone: what it has begun it may begin again.
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
    Writing(Writing),
    Ending {
        call: u64,
        writing: Writing,
        backoff: Backoff,
    },
}

/// A reservation that is being filled.
#[derive(Debug)]
struct Writing {
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
    pub(super) fn begin_put(&mut self, key: usize, upsert: bool, scene: &mut Scene<'_>) {
        self.budget.earn();
        let replicas = self.dice.within(1, self.plan.replicas_max.into()) as u8;
        let config = PutConfig {
            replicas,
            // More than there are nodes would be refused by the shipped client.
            replicas_min: self.dice.within(1, u64::from(replicas).min(self.plan.nodes as u64)) as u8,
            upsert,
            ttl_ms: if self.dice.permille(50) { self.dice.within(100, 60_000) } else { 0 },
            ..PutConfig::default()
        };
        let len = if self.dice.permille(30) { 0 } else { self.dice.within(1, self.plan.object_bytes_max) };
        let (token, caller) = (self.dice.draw(), self.dice.draw());
        let (backoff, step) = (Backoff::default(), Step::Again);
        self.put_goes_on(Box::new(Put { key, len, token, upsert, config, caller, backoff, step }), scene);
    }

    /// A pause is over.
    pub(super) fn put_goes_on(&mut self, mut put: Box<Put>, scene: &mut Scene<'_>) {
        match std::mem::replace(&mut put.step, Step::Again) {
            Step::Again => {
                let objects: PackedBuilder<PutEntry> =
                    [PutEntry { len: put.len, config: 0 }].into_iter().collect();
                let request = v1::PutStartRequest {
                    context: self.context(put.caller, scene),
                    keys: packed(put.key),
                    configs: vec![put.config.to_wire()],
                    objects: objects.finish().into(),
                    attributes: Default::default(),
                };
                let call = self.call(put.key, Request::PutStart(request), PATIENCE, scene);
                put.step = Step::Starting { call };
                self.state = State::Put(put);
            }
            Step::Ending { writing, backoff, .. } => {
                let entry = writing.end();
                let entries: PackedBuilder<PutEndEntry> = [entry].into_iter().collect();
                let request = v1::PutEndRequest {
                    context: self.context(put.caller, scene),
                    entries: entries.finish().into(),
                    stripe_roots: vec![],
                };
                let call = self.call(put.key, Request::PutEnd(request), PATIENCE, scene);
                put.step = Step::Ending { call, writing, backoff };
                self.state = State::Put(put);
            }
            step @ (Step::Starting { .. } | Step::Writing(_)) => {
                put.step = step;
                self.state = State::Put(put);
            }
        }
    }

    /// Nobody has answered for too long.
    pub(super) fn put_unanswered(&mut self, mut put: Box<Put>, scene: &mut Scene<'_>) {
        match std::mem::replace(&mut put.step, Step::Again) {
            Step::Starting { .. } => {
                self.masters.doubt();
                self.start_again(put, Duration::ZERO, scene);
            }
            Step::Writing(mut writing) => {
                for replica in writing.replicas.iter_mut().filter(|replica| replica.outcome.is_none()) {
                    replica.outcome = Some(Err(ErrorCode::ConnectionLost));
                    self.suspects
                        .insert(replica.handle.node, (Trust::Failed, scene.now().after(super::SUSPECT)));
                    writing.last = Some(ErrorCode::ConnectionLost);
                }
                self.end_writing(put, writing, scene);
            }
            Step::Ending { writing, backoff, .. } => {
                self.masters.doubt();
                self.end_again(put, writing, backoff, scene);
            }
            Step::Again => self.state = State::Put(put),
        }
    }

    fn start_again(&mut self, mut put: Box<Put>, asked: Duration, scene: &mut Scene<'_>) {
        put.step = Step::Again;
        match self.pause_again(put.backoff, asked, scene) {
            Some(backoff) => {
                put.backoff = backoff;
                self.state = State::Put(put);
            }
            None => self.put_failed(put, scene),
        }
    }

    /// The master that was asked is not the one: the one who is, after a pause.
    fn start_elsewhere(&mut self, put: Box<Put>, scene: &mut Scene<'_>) {
        self.masters.doubt();
        self.start_again(put, Duration::ZERO, scene);
    }

    fn put_failed(&mut self, put: Box<Put>, scene: &mut Scene<'_>) {
        self.state = State::Put(put);
        self.finish(Ended::Failed, scene);
    }

    pub(super) fn put_answered(&mut self, put: Box<Put>, call: u64, answer: Answer, scene: &mut Scene<'_>) {
        match (&put.step, answer) {
            (Step::Starting { call: waited }, Answer::Started(answer)) if *waited == call => {
                self.put_started(put, &answer, scene);
            }
            (Step::Ending { call: waited, .. }, Answer::Outcomes(answer)) if *waited == call => {
                let code = outcome(&answer).expect("the master speaks as it should");
                self.put_ended(put, code, scene);
            }
            _ => self.state = State::Put(put), // the answer to a call that was given up
        }
    }

    fn put_started(&mut self, mut put: Box<Put>, answer: &v1::PutStartResponse, scene: &mut Scene<'_>) {
        let answer = PutStartResponse::from_wire(answer).expect("the master speaks as it should");
        let after = Duration::from_millis(answer.context().retry_after_ms.into()).max(PAUSE_FOR_ROOM);
        let reservations = match answer.into_result() {
            Ok(reservations) => reservations,
            Err(context) if context.code == Some(ErrorCode::WrongMaster) => {
                return self.start_elsewhere(put, scene);
            }
            Err(context) => {
                let again = context.code.is_some_and(ErrorCode::is_retryable);
                return if again { self.start_again(put, after, scene) } else { self.put_failed(put, scene) };
            }
        };
        let (object, handles) = reservations.list.iter().next().expect("one key was asked for");
        match object.code {
            None => {}
            Some(ErrorCode::AlreadyExists) => {
                scene.oracle.tally.existed += 1;
                self.state = State::Put(put);
                return self.finish(Ended::Nothing, scene);
            }
            Some(ErrorCode::NoSpace | ErrorCode::Busy | ErrorCode::Retry) => {
                return self.start_again(put, after, scene);
            }
            Some(ErrorCode::WrongMaster) => return self.start_elsewhere(put, scene),
            Some(_) => return self.put_failed(put, scene),
        }
        if self.dice.permille(20) {
            return self.give_back(put, &object, scene);
        }
        scene.oracle.granted(put.key, object.epoch, put.len, put.token);
        let mut writing = Writing { object, replicas: Vec::new(), last: None };
        for handle in handles.iter() {
            let (key, attributes) = (put.key, Vec::new());
            let call = self.ask(handle.node, Ask::Begin { object, handle, key, attributes }, scene);
            writing.replicas.push(Replica { handle, call, begun: false, root: None, outcome: None });
        }
        put.step = Step::Writing(writing);
        self.have_patience(PATIENCE, scene);
        self.state = State::Put(put);
    }

    /// The caller does not want it any more. Nobody waits: the master takes the space back by itself, too.
    fn give_back(&mut self, put: Box<Put>, object: &ObjectEntry, scene: &mut Scene<'_>) {
        let mut versions = Vec::with_capacity(VersionedId::BYTES);
        VersionedId { id: object.id, epoch: object.epoch }.encode(&mut versions);
        let request = v1::PutRevokeRequest { context: self.context(0, scene), versions: versions.into() };
        self.call(put.key, Request::Revoke(request), PATIENCE, scene);
        self.state = State::Put(put);
        self.finish(Ended::Nothing, scene);
    }

    pub(super) fn put_told(&mut self, mut put: Box<Put>, call: u64, told: &Told, scene: &mut Scene<'_>) {
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
        match *told {
            Told::Refused(code) => {
                replica.outcome = Some(Err(code));
                writing.last = Some(code);
            }
            Told::Done if !replica.begun => {
                replica.begun = true;
                replica.call = self.ask(handle.node, Ask::Write { object, handle, token }, scene);
            }
            Told::Written { root } => {
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
                replica.call = self.ask(handle.node, Ask::Commit(entry), scene);
            }
            Told::Done => replica.outcome = Some(Ok(())),
            Told::Bytes(_) => unreachable!("nothing was read"),
        }
        self.have_patience(PATIENCE, scene);
        if writing.replicas.iter().any(|replica| replica.outcome.is_none()) {
            self.state = State::Put(put);
            return;
        }
        let Step::Writing(writing) = std::mem::replace(&mut put.step, Step::Again) else {
            unreachable!("looked at above")
        };
        self.end_writing(put, writing, scene);
    }

    /// Every replica has an outcome. With fewer than are acceptable there is none.
    fn end_writing(&mut self, mut put: Box<Put>, mut writing: Writing, scene: &mut Scene<'_>) {
        let well = writing.replicas.iter().filter(|replica| replica.outcome == Some(Ok(()))).count();
        if well < usize::from(put.config.replicas_min) {
            writing.replicas.iter_mut().for_each(|r| r.outcome = Some(Err(ErrorCode::Cancelled)));
        }
        put.step = Step::Ending { call: 0, writing, backoff: Backoff::default() };
        self.put_goes_on(put, scene);
    }

    fn end_again(&mut self, mut put: Box<Put>, writing: Writing, backoff: Backoff, scene: &mut Scene<'_>) {
        match self.pause_again(backoff, Duration::ZERO, scene) {
            Some(backoff) => {
                put.step = Step::Ending { call: 0, writing, backoff };
                self.state = State::Put(put);
            }
            None => self.put_failed(put, scene),
        }
    }

    fn put_ended(&mut self, mut put: Box<Put>, code: Option<ErrorCode>, scene: &mut Scene<'_>) {
        let Step::Ending { writing, backoff, .. } = std::mem::replace(&mut put.step, Step::Again) else {
            unreachable!("looked at by the caller")
        };
        match code {
            None => {
                let now = scene.true_now();
                let epoch = writing.object.epoch;
                scene.oracle.put_acked(put.key, epoch, put.upsert, self.called, now);
                self.remember_written(&writing);
                self.state = State::Put(put);
                self.finish(Ended::Well, scene);
            }
            Some(ErrorCode::WrongMaster) => {
                self.masters.doubt();
                self.end_again(put, writing, backoff, scene);
            }
            Some(code) if code.is_retryable() => self.end_again(put, writing, backoff, scene),
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
                        | ErrorCode::ConnectionLost
                );
                let asked =
                    if code == ErrorCode::ConnectionLost { UNREACHABLE_PAUSE } else { Duration::ZERO };
                if (lost || code.is_retryable()) && self.budget.spend() {
                    self.start_again(put, asked, scene);
                } else {
                    self.put_failed(put, scene);
                }
            }
        }
    }

    /// What was written can be read at once where it is.
    fn remember_written(&mut self, writing: &Writing) {
        let id = writing.object.id;
        self.locations.forget_if(&id, |_| true);
        let all_well = writing.replicas.iter().all(|replica| replica.outcome == Some(Ok(())));
        let Some(root) = writing.root().filter(|_| all_well && writing.object.object_len > 0) else { return };
        let handle = |replica: &Replica| Handle { stripe_root: root, ..replica.handle };
        let handles = writing.replicas.iter().map(handle).collect();
        self.locations.put(id, Placed { object: ObjectEntry { root, ..writing.object }, handles });
    }
}

impl Writing {
    fn root(&self) -> Option<u64> {
        self.replicas.iter().find_map(|replica| replica.root)
    }

    /// What the master is told at the end.
    fn end(&self) -> PutEndEntry {
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
            form: 0,
            stripe_count: 1,
        }
    }
}
