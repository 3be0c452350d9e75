//! A get: a place that is remembered or that the master tells, then replicas one after the other, verified.

use std::time::Duration;

use moontide_client::decide::{Backoff, Candidate, Nearness, Trust, Verdict, judge, order};
use moontide_proto::convert::{GetReplicaListResponse, Wire};
use moontide_proto::{Handle, Medium, ObjectEntry, v1};
use moontide_types::record::DigestContext;
use moontide_types::{ErrorCode, MonoTime};

use super::{Client, ClientTimer, Ended, PATIENCE, State, object_id, packed};
use crate::event::{Ask, Request, Timer, Told};
use crate::scene::Scene;

/// How often a get looks an object up before it gives up.
const ATTEMPTS_MAX: u32 = 4;
/// How often the master is asked in one attempt.
const LOOKUPS_MAX: u32 = 8;

/// Where an object is, as the master said.
#[derive(Clone, Debug)]
pub(super) struct Placed {
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
    /// `said`: how often in a row the connection was lost over it.
    Looking {
        call: u64,
        lookups: u32,
        said: u32,
        backoff: Backoff,
    },
    Reading(Reading),
}

#[derive(Debug)]
struct Reading {
    placed: Placed,
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
    pub(super) fn begin_get(&mut self, key: usize, scene: &mut Scene<'_>) {
        let get = Box::new(Get { key, attempt: 0, backoff: Backoff::default(), step: Step::Again });
        match self.locations.get(&object_id(key)) {
            Some(placed) => {
                scene.oracle.tally.remembered += 1;
                self.read(get, placed, true, scene);
            }
            None => self.look_up(get, 0, 1, Backoff::default(), scene),
        }
    }

    /// A pause is over.
    pub(super) fn get_goes_on(&mut self, get: Box<Get>, scene: &mut Scene<'_>) -> Result<(), String> {
        match get.step {
            Step::Again => self.look_up(get, 0, 1, Backoff::default(), scene),
            Step::Looking { lookups, backoff, .. } => self.look_up(get, lookups, 1, backoff, scene),
            Step::Reading(_) => self.state = State::Get(get),
        }
        Ok(())
    }

    fn look_up(
        &mut self,
        mut get: Box<Get>,
        lookups: u32,
        said: u32,
        backoff: Backoff,
        scene: &mut Scene<'_>,
    ) {
        let lease_ms = if self.dice.permille(300) { 5_000 } else { 0 };
        let request = v1::GetReplicaListRequest {
            context: self.context(0, scene),
            keys: packed(get.key),
            lease_ms,
            attributes: false,
        };
        let call = self.call(get.key, Request::Lookup(request), PATIENCE, scene);
        get.step = Step::Looking { call, lookups, said, backoff };
        self.state = State::Get(get);
    }

    pub(super) fn get_found(
        &mut self,
        mut get: Box<Get>,
        answer: &v1::GetReplicaListResponse,
        scene: &mut Scene<'_>,
    ) -> Result<(), String> {
        let answer = GetReplicaListResponse::from_wire(answer).map_err(|error| error.to_string())?;
        let Step::Looking { lookups, backoff, .. } = get.step else {
            unreachable!("looked at by the caller")
        };
        let found = match answer.into_result() {
            Ok(found) => found,
            Err(context) if context.code == Some(ErrorCode::WrongMaster) => {
                self.look_elsewhere(get, lookups, backoff, scene);
                return Ok(());
            }
            Err(_) => {
                self.get_failed(get, scene);
                return Ok(());
            }
        };
        let (object, handles) = found.list.iter().next().expect("one key was asked for");
        match object.code {
            None => {
                let placed = Placed { object, handles: handles.iter().collect() };
                if object.object_len == 0 {
                    // There are no bytes to ask for: the master's word is all there is.
                    scene.oracle.read(get.key, object.epoch, &[], self.called)?;
                    self.state = State::Get(get);
                    self.finish(Ended::Well, scene);
                    return Ok(());
                }
                self.locations.put(object.id, placed.clone());
                self.read(get, placed, false, scene);
            }
            Some(ErrorCode::NotFound | ErrorCode::NotReady | ErrorCode::Gone) => self.get_missed(get, scene),
            Some(ErrorCode::Retry) if lookups + 1 < LOOKUPS_MAX => {
                match self.pause_again(backoff, Duration::ZERO, scene) {
                    Some(backoff) => {
                        get.step = Step::Looking { call: 0, lookups: lookups + 1, said: 1, backoff };
                        self.state = State::Get(get);
                    }
                    None => self.get_failed(get, scene),
                }
            }
            Some(ErrorCode::WrongMaster) => self.look_elsewhere(get, lookups, backoff, scene),
            Some(_) => self.get_failed(get, scene),
        }
        Ok(())
    }

    /// The master that was asked is not the one, or not there: the one who is, after a pause.
    fn look_elsewhere(&mut self, mut get: Box<Get>, lookups: u32, backoff: Backoff, scene: &mut Scene<'_>) {
        self.masters.doubt();
        match self.pause_again(backoff, Duration::ZERO, scene) {
            Some(backoff) if !self.masters.is_alone() => {
                get.step = Step::Looking { call: 0, lookups, said: 1, backoff };
                self.state = State::Get(get);
            }
            _ => self.get_failed(get, scene),
        }
    }

    fn get_missed(&mut self, get: Box<Get>, scene: &mut Scene<'_>) {
        scene.oracle.tally.misses += 1;
        self.state = State::Get(get);
        self.finish(Ended::Nothing, scene);
    }

    fn get_failed(&mut self, get: Box<Get>, scene: &mut Scene<'_>) {
        self.state = State::Get(get);
        self.finish(Ended::Failed, scene);
    }

    fn read(&mut self, get: Box<Get>, placed: Placed, from_memory: bool, scene: &mut Scene<'_>) {
        self.budget.earn();
        let now = scene.now();
        let candidate = |(replica, handle): (usize, &Handle)| Candidate {
            replica,
            disk: handle.medium == Medium::Disk,
            nearness: Nearness::Far,
            trust: self.trust(handle.node, now),
        };
        let mut candidates: Vec<Candidate> = placed.handles.iter().enumerate().map(candidate).collect();
        order(&mut candidates, self.dice.draw());
        let replicas = candidates.iter().map(|candidate| candidate.replica).collect();
        let reading = Reading { placed, from_memory, replicas, next: 0, asked: vec![], last: None };
        self.read_next(get, reading, scene);
    }

    /// Asks the next replica; without one this attempt is over.
    fn read_next(&mut self, mut get: Box<Get>, mut reading: Reading, scene: &mut Scene<'_>) {
        if reading.next >= reading.replicas.len() {
            return self.exhausted(get, reading, scene);
        }
        self.ask_next(&mut reading, scene);
        self.have_patience(PATIENCE, scene);
        if reading.next < reading.replicas.len() {
            let patience = self.hedge.patience(reading.placed.object.object_len);
            self.hedged = self.number();
            scene.wake_in(patience, Timer::Client(ClientTimer::Hedge(self.hedged)));
        }
        get.step = Step::Reading(reading);
        self.state = State::Get(get);
    }

    fn ask_next(&mut self, reading: &mut Reading, scene: &mut Scene<'_>) {
        let replica = reading.replicas[reading.next];
        reading.next += 1;
        let handle = reading.placed.handles[replica];
        let (id, epoch) = (reading.placed.object.id, reading.placed.object.epoch);
        let call = self.ask(handle.node, Ask::Read { id, epoch, handle }, scene);
        reading.asked.push((replica, call, scene.now()));
    }

    /// The first replica takes longer than is usual.
    pub(super) fn hedge_get(&mut self, mut get: Box<Get>, scene: &mut Scene<'_>) {
        if let Step::Reading(reading) = &mut get.step
            && reading.next < reading.replicas.len()
            && self.budget.spend()
        {
            scene.oracle.tally.hedges += 1;
            if let Some(&(replica, ..)) = reading.asked.first() {
                self.suspect(reading.placed.handles[replica].node, Trust::Slow, scene);
            }
            self.ask_next(reading, scene);
        }
        self.state = State::Get(get);
    }

    pub(super) fn get_unanswered(&mut self, mut get: Box<Get>, scene: &mut Scene<'_>) -> Result<(), String> {
        match std::mem::replace(&mut get.step, Step::Again) {
            // The connection was lost over it: once more.
            Step::Looking { lookups, said: 1, backoff, .. } => self.look_up(get, lookups, 2, backoff, scene),
            Step::Looking { lookups, backoff, .. } => self.look_elsewhere(get, lookups, backoff, scene),
            Step::Again => self.get_failed(get, scene),
            Step::Reading(mut reading) => {
                for (replica, ..) in std::mem::take(&mut reading.asked) {
                    self.suspect(reading.placed.handles[replica].node, Trust::Failed, scene);
                }
                reading.last = Some(ErrorCode::ConnectionLost);
                self.read_next(get, reading, scene);
            }
        }
        Ok(())
    }

    pub(super) fn get_told(
        &mut self,
        mut get: Box<Get>,
        call: u64,
        told: Told,
        scene: &mut Scene<'_>,
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
        let code = match told {
            Told::Bytes(payload) => {
                self.hedge.observe(object.object_len, scene.now().since(since));
                let context = DigestContext {
                    id: object.id,
                    version: object.epoch,
                    stripe: handle.stripe_index,
                    len: handle.stripe_len,
                };
                let whole = payload.0.len() as u64 == handle.stripe_len;
                if !whole || context.payload(&payload.0, |_| ()) != handle.stripe_root {
                    // The shipped client would ask elsewhere. Here nothing can be damaged, so that it is a bug.
                    return Err(format!("key {}: {} came with wrong bytes", get.key, object.epoch));
                }
                scene.oracle.read(get.key, object.epoch, &payload.0, self.called)?;
                self.state = State::Get(get);
                self.finish(Ended::Well, scene);
                return Ok(());
            }
            Told::Refused(code) => code,
            Told::Done | Told::Written { .. } => unreachable!("nothing was written"),
        };
        match judge(code) {
            Verdict::Stale => {
                self.forget(&reading);
                self.attempt_again(get, None, scene);
            }
            Verdict::Final => self.get_failed(get, scene),
            Verdict::Elsewhere => {
                reading.last = Some(code);
                if reading.asked.is_empty() {
                    self.read_next(get, reading, scene);
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
    fn exhausted(&mut self, get: Box<Get>, reading: Reading, scene: &mut Scene<'_>) {
        self.forget(&reading);
        let code = reading.last.unwrap_or(ErrorCode::Unreachable);
        let in_time = scene.now() < self.deadline;
        // A place from memory may be of another time: the master knows better, and asking it is not a repetition.
        if in_time && (reading.from_memory || code.is_retryable() && self.budget.spend()) {
            self.attempt_again(get, Some(code), scene);
        } else {
            self.get_failed(get, scene);
        }
    }

    fn attempt_again(&mut self, mut get: Box<Get>, last: Option<ErrorCode>, scene: &mut Scene<'_>) {
        get.attempt += 1;
        (self.patience, self.hedged) = (0, 0);
        if get.attempt >= ATTEMPTS_MAX {
            // Found again and again, and gone when it was read: for the caller it is not there.
            return match last {
                None | Some(ErrorCode::StaleSession) => self.get_missed(get, scene),
                Some(_) => self.get_failed(get, scene),
            };
        }
        get.step = Step::Again;
        if get.attempt == 1 {
            return self.look_up(get, 0, 1, Backoff::default(), scene);
        }
        match self.pause_again(get.backoff, Duration::ZERO, scene) {
            Some(backoff) => {
                get.backoff = backoff;
                self.state = State::Get(get);
            }
            None => self.get_failed(get, scene),
        }
    }
}
