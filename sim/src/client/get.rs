//! Gets: a location from the cache or the master, then replicas one after the other, verified.

use std::time::Duration;

use moontide_client::logic::{
    Distance, NodeHealth, RETRY_BACKOFF, ReplicaCandidate, RetryDecision, classify, sort_replicas,
};
use moontide_proto::convert::{GetReplicaListResponse, Wire};
use moontide_proto::{Handle, ObjectEntry, v1};
use moontide_rt::Backoff;
use moontide_types::record::DigestContext;
use moontide_types::{ErrorCode, Medium, MonoTime};

use super::{Client, ClientTimer, OpOutcome, REPLY_TIMEOUT, State, object_id, packed};
use crate::context::ProcessContext;
use crate::event::{NodeOp, NodeReply, Request, Timer};

/// Attempts of a get.
const ATTEMPTS_MAX: u32 = 4;
/// Look-ups per attempt.
const LOOKUPS_MAX: u32 = 8;

/// Locations of an object, as returned by the master.
#[derive(Clone, Debug)]
pub(super) struct ReplicaList {
    pub(super) object: ObjectEntry,
    pub(super) handles: Vec<Handle>,
}

#[derive(Debug)]
pub(super) struct Get {
    key: usize,
    attempt: u32,
    backoff: Backoff,
    step: Step,
}

#[derive(Debug)]
enum Step {
    /// After a pause the next attempt begins.
    Again,
    /// `sends`: consecutive sends of the look-up; the connection was lost after all but the last.
    Looking {
        call: u64,
        lookups: u32,
        sends: u32,
        backoff: Backoff,
    },
    Reading(Reading),
}

#[derive(Debug)]
struct Reading {
    placed: ReplicaList,
    from_memory: bool,
    /// Replicas in the order in which they are asked.
    replicas: Vec<usize>,
    next: usize,
    /// Replicas that are being asked: which, by which call, and since when.
    asked: Vec<(usize, u64, MonoTime)>,
    last: Option<ErrorCode>,
}

impl Get {
    pub(super) fn waits_for(&self, waited: u64) -> bool {
        matches!(self.step, Step::Looking { call, .. } if call == waited)
    }
}

impl Client {
    pub(super) fn begin_get(&mut self, key: usize, cx: &mut ProcessContext<'_>) {
        let get = Box::new(Get { key, attempt: 0, backoff: RETRY_BACKOFF, step: Step::Again });
        match self.locations.get(&object_id(key)) {
            Some(placed) => {
                cx.oracle.tally.remembered += 1;
                self.read(get, placed, true, cx);
            }
            None => self.look_up(get, 0, 1, RETRY_BACKOFF, cx),
        }
    }

    /// A pause is over.
    pub(super) fn get_goes_on(&mut self, get: Box<Get>, cx: &mut ProcessContext<'_>) -> Result<(), String> {
        match get.step {
            Step::Again => self.look_up(get, 0, 1, RETRY_BACKOFF, cx),
            Step::Looking { lookups, backoff, .. } => self.look_up(get, lookups, 1, backoff, cx),
            Step::Reading(_) => self.state = State::Get(get),
        }
        Ok(())
    }

    fn look_up(
        &mut self,
        mut get: Box<Get>,
        lookups: u32,
        sends: u32,
        backoff: Backoff,
        cx: &mut ProcessContext<'_>,
    ) {
        let lease_ms = if self.rng.permille(300) { 5_000 } else { 0 };
        let request = v1::GetReplicaListRequest {
            context: self.context(0, cx),
            keys: packed(get.key),
            lease_ms,
            attributes: false,
        };
        let call = self.call(get.key, Request::Lookup(request), REPLY_TIMEOUT, cx);
        get.step = Step::Looking { call, lookups, sends, backoff };
        self.state = State::Get(get);
    }

    pub(super) fn get_found(
        &mut self,
        mut get: Box<Get>,
        reply: &v1::GetReplicaListResponse,
        cx: &mut ProcessContext<'_>,
    ) -> Result<(), String> {
        let reply = GetReplicaListResponse::from_wire(reply).map_err(|error| error.to_string())?;
        let Step::Looking { lookups, backoff, .. } = get.step else {
            unreachable!("looked at by the caller")
        };
        let found = match reply.into_result() {
            Ok(found) => found,
            Err(context) if context.code == Some(ErrorCode::WrongMaster) => {
                self.look_elsewhere(get, lookups, backoff, cx);
                return Ok(());
            }
            Err(_) => {
                self.get_failed(get, cx);
                return Ok(());
            }
        };
        let (object, handles) = found.list.iter().next().expect("one key was asked for");
        match object.code {
            None => {
                let placed = ReplicaList { object, handles: handles.iter().collect() };
                if object.object_len == 0 {
                    // An empty object has no bytes to read: the look-up is the result.
                    cx.oracle.read(get.key, object.epoch, &[], self.called)?;
                    self.state = State::Get(get);
                    self.finish(OpOutcome::Well, cx);
                    return Ok(());
                }
                self.locations.put(object.id, placed.clone());
                self.read(get, placed, false, cx);
            }
            Some(ErrorCode::NotFound | ErrorCode::NotReady | ErrorCode::Gone) => self.get_missed(get, cx),
            Some(ErrorCode::Retry) if lookups + 1 < LOOKUPS_MAX => {
                match self.pause_again(backoff, Duration::ZERO, cx) {
                    Some(backoff) => {
                        get.step = Step::Looking { call: 0, lookups: lookups + 1, sends: 1, backoff };
                        self.state = State::Get(get);
                    }
                    None => self.get_failed(get, cx),
                }
            }
            Some(ErrorCode::WrongMaster) => self.look_elsewhere(get, lookups, backoff, cx),
            Some(_) => self.get_failed(get, cx),
        }
        Ok(())
    }

    /// Retries at the current master after a pause.
    fn look_elsewhere(
        &mut self,
        mut get: Box<Get>,
        lookups: u32,
        backoff: Backoff,
        cx: &mut ProcessContext<'_>,
    ) {
        self.masters.mark_stale();
        match self.pause_again(backoff, Duration::ZERO, cx) {
            Some(backoff) if !self.masters.is_single_master() => {
                get.step = Step::Looking { call: 0, lookups, sends: 1, backoff };
                self.state = State::Get(get);
            }
            _ => self.get_failed(get, cx),
        }
    }

    fn get_missed(&mut self, get: Box<Get>, cx: &mut ProcessContext<'_>) {
        cx.oracle.tally.misses += 1;
        self.state = State::Get(get);
        self.finish(OpOutcome::Nothing, cx);
    }

    fn get_failed(&mut self, get: Box<Get>, cx: &mut ProcessContext<'_>) {
        self.state = State::Get(get);
        self.finish(OpOutcome::Failed, cx);
    }

    fn read(&mut self, get: Box<Get>, placed: ReplicaList, from_memory: bool, cx: &mut ProcessContext<'_>) {
        self.budget.earn();
        let now = cx.now();
        let candidate = |(replica, handle): (usize, &Handle)| ReplicaCandidate {
            replica,
            disk: handle.medium == Medium::Disk,
            distance: Distance::Remote,
            health: self.health(handle.node, now),
        };
        let mut candidates: Vec<ReplicaCandidate> =
            placed.handles.iter().enumerate().map(candidate).collect();
        sort_replicas(&mut candidates, self.rng.next_u64());
        let replicas = candidates.iter().map(|candidate| candidate.replica).collect();
        let reading = Reading { placed, from_memory, replicas, next: 0, asked: vec![], last: None };
        self.read_next(get, reading, cx);
    }

    /// Asks the next replica; without one this attempt is over.
    fn read_next(&mut self, mut get: Box<Get>, mut reading: Reading, cx: &mut ProcessContext<'_>) {
        if reading.next >= reading.replicas.len() {
            return self.exhausted(get, reading, cx);
        }
        self.ask_next(&mut reading, cx);
        self.start_timeout(REPLY_TIMEOUT, cx);
        if reading.next < reading.replicas.len() {
            let timeout = self.hedge.delay(reading.placed.object.object_len);
            self.hedged = self.number();
            cx.wake_in(timeout, Timer::Client(ClientTimer::Hedge(self.hedged)));
        }
        get.step = Step::Reading(reading);
        self.state = State::Get(get);
    }

    fn ask_next(&mut self, reading: &mut Reading, cx: &mut ProcessContext<'_>) {
        let replica = reading.replicas[reading.next];
        reading.next += 1;
        let handle = reading.placed.handles[replica];
        let (id, epoch) = (reading.placed.object.id, reading.placed.object.epoch);
        let call = self.ask(handle.node, NodeOp::Read { id, epoch, handle }, cx);
        reading.asked.push((replica, call, cx.now()));
    }

    /// The first replica takes longer than is usual.
    pub(super) fn hedge_get(&mut self, mut get: Box<Get>, cx: &mut ProcessContext<'_>) {
        if let Step::Reading(reading) = &mut get.step
            && reading.next < reading.replicas.len()
            && self.budget.spend()
        {
            cx.oracle.tally.hedges += 1;
            if let Some(&(replica, ..)) = reading.asked.first() {
                self.suspect(reading.placed.handles[replica].node, NodeHealth::Slow, cx);
            }
            self.ask_next(reading, cx);
        }
        self.state = State::Get(get);
    }

    pub(super) fn get_unanswered(
        &mut self,
        mut get: Box<Get>,
        cx: &mut ProcessContext<'_>,
    ) -> Result<(), String> {
        match std::mem::replace(&mut get.step, Step::Again) {
            // The connection was lost over it: once more.
            Step::Looking { lookups, sends: 1, backoff, .. } => self.look_up(get, lookups, 2, backoff, cx),
            Step::Looking { lookups, backoff, .. } => self.look_elsewhere(get, lookups, backoff, cx),
            Step::Again => self.get_failed(get, cx),
            Step::Reading(mut reading) => {
                for (replica, ..) in std::mem::take(&mut reading.asked) {
                    self.suspect(reading.placed.handles[replica].node, NodeHealth::Failed, cx);
                }
                reading.last = Some(ErrorCode::ConnectionLost);
                self.read_next(get, reading, cx);
            }
        }
        Ok(())
    }

    pub(super) fn get_node_reply(
        &mut self,
        mut get: Box<Get>,
        call: u64,
        reply: NodeReply,
        cx: &mut ProcessContext<'_>,
    ) -> Result<(), String> {
        let mut reading = match std::mem::replace(&mut get.step, Step::Again) {
            Step::Reading(reading) if reading.asked.iter().any(|&(_, asked, _)| asked == call) => reading,
            step => {
                get.step = step;
                self.state = State::Get(get);
                return Ok(());
            }
        };
        let at = reading.asked.iter().position(|&(_, asked, _)| asked == call).expect("looked at above");
        let (replica, _, since) = reading.asked.remove(at);
        let handle = reading.placed.handles[replica];
        let object = reading.placed.object;
        let code = match reply {
            NodeReply::Bytes(payload) => {
                cx.oracle.tally.from_disk += u64::from(handle.medium == Medium::Disk);
                self.hedge.observe(object.object_len, cx.now().since(since));
                let context = DigestContext {
                    id: object.id,
                    version: object.epoch,
                    stripe: handle.stripe_index,
                    len: handle.stripe_len,
                };
                let whole = payload.0.len() as u64 == handle.stripe_len;
                if !whole || context.payload(&payload.0, |_| ()) != handle.stripe_root {
                    // The shipped client would read another replica. The simulation corrupts no bytes, so this is a
                    // bug.
                    return Err(format!("key {}: {} came with wrong bytes", get.key, object.epoch));
                }
                cx.oracle.read(get.key, object.epoch, &payload.0, self.called)?;
                self.state = State::Get(get);
                self.finish(OpOutcome::Well, cx);
                return Ok(());
            }
            NodeReply::Refused(code) => code,
            NodeReply::Done | NodeReply::Written { .. } => unreachable!("nothing was written"),
        };
        match classify(code) {
            RetryDecision::Relookup => {
                self.forget(&reading);
                self.attempt_again(get, None, cx);
            }
            RetryDecision::Final => self.get_failed(get, cx),
            RetryDecision::OtherReplica => {
                reading.last = Some(code);
                if reading.asked.is_empty() {
                    self.read_next(get, reading, cx);
                } else {
                    get.step = Step::Reading(reading);
                    self.state = State::Get(get);
                }
            }
        }
        Ok(())
    }

    fn forget(&mut self, reading: &Reading) {
        let object = &reading.placed.object;
        self.locations.forget_if(&object.id, |other| other.object.epoch == object.epoch);
    }

    /// No replica is left.
    fn exhausted(&mut self, get: Box<Get>, reading: Reading, cx: &mut ProcessContext<'_>) {
        self.forget(&reading);
        let code = reading.last.unwrap_or(ErrorCode::Unreachable);
        let in_time = cx.now() < self.deadline;
        // A cached location may be stale: a look-up at the master does not count as a retry.
        if in_time && (reading.from_memory || code.is_retryable() && self.budget.spend()) {
            self.attempt_again(get, Some(code), cx);
        } else {
            self.get_failed(get, cx);
        }
    }

    fn attempt_again(&mut self, mut get: Box<Get>, last: Option<ErrorCode>, cx: &mut ProcessContext<'_>) {
        get.attempt += 1;
        (self.timeout, self.hedged) = (0, 0);
        if get.attempt >= ATTEMPTS_MAX {
            // Every look-up found the object and every read found it gone: for the caller it does not exist.
            return match last {
                None | Some(ErrorCode::StaleSession) => self.get_missed(get, cx),
                Some(_) => self.get_failed(get, cx),
            };
        }
        get.step = Step::Again;
        if get.attempt == 1 {
            return self.look_up(get, 0, 1, RETRY_BACKOFF, cx);
        }
        match self.pause_again(get.backoff, Duration::ZERO, cx) {
            Some(backoff) => {
                get.backoff = backoff;
                self.state = State::Get(get);
            }
            None => self.get_failed(get, cx),
        }
    }
}
