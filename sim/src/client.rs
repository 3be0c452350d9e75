//! [`Client`]: one operation after the other, each with an end by time: put, get, remove, and what else there is.
//!
//! What to do next is decided by the shipped client's [`decide`](moontide_client::decide): when something is tried again,
//! which replica is asked, which places are remembered. Around that stands what the shipped client does with threads.

mod get;
mod masters;
mod put;

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::time::Duration;

use moontide_client::decide::{Backoff, Budget, HedgeTimer, Locations, Trust};
use moontide_proto::convert::{OutcomesResponse, Wire};
use moontide_proto::{PackedKeysBuilder, v1};
use moontide_types::{ErrorCode, IdKey, Key, MonoTime, NodeId, ObjectId, Tenant, TenantGeneration};

use self::get::{Get, Placed};
use self::masters::Masters;
use self::put::Put;
use crate::dice::Dice;
use crate::event::{Answer, Ask, Message, Request, Timer, Told, Who};
use crate::plan::Plan;
use crate::scene::Scene;

/// Most keys of any plan, with those that clients have for themselves.
const KEYS_MAX: usize = 256;
/// How long an operation may take.
const DEADLINE: Duration = Duration::from_secs(5);
/// After so long without an answer a connection is given up.
const PATIENCE: Duration = Duration::from_secs(1);
/// How long a node that failed, or was slow, is asked last.
const SUSPECT: Duration = Duration::from_secs(1);

/// A key's bytes.
pub(crate) fn key_bytes(key: usize) -> Vec<u8> {
    format!("block-{key:04}").into_bytes()
}

/// The ids of all keys. Hashing a name for every message would take most of a run's time.
fn ids() -> &'static [ObjectId] {
    static IDS: OnceLock<Vec<ObjectId>> = OnceLock::new();
    IDS.get_or_init(|| {
        let id_key = IdKey::new(1, [7; 32]);
        let id = |key| {
            let bytes = key_bytes(key);
            id_key.object_id(Tenant::DEFAULT, TenantGeneration(0), Key::new(&bytes).expect("short"))
        };
        (0..KEYS_MAX).map(id).collect()
    })
}

/// A key's id.
pub(crate) fn object_id(key: usize) -> ObjectId {
    ids()[key]
}

/// The key of an id, for traces.
pub(crate) fn key_of(id: ObjectId) -> Option<usize> {
    ids().iter().position(|&known| known == id)
}

/// What a client wants to be woken for. Numbers tell whether it still does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ClientTimer {
    /// A pause is over.
    Pause(u64),
    /// There was no answer for too long.
    Patience(u64),
    /// A second replica may be asked.
    Hedge(u64),
    /// Masters had long enough to tell the map.
    Look(u64),
}

#[derive(Debug)]
enum State {
    Idle,
    Put(Box<Put>),
    Get(Box<Get>),
    Remove {
        key: usize,
        call: u64,
        said: u32,
        backoff: Backoff,
    },
    /// A call of which only the answer counts.
    Other {
        call: u64,
    },
}

/// What a client is there for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Anything, all the time.
    Busy,
    /// It has to put something, and to get it.
    Proving { put: bool },
    /// It has.
    Proved,
    /// It removes all keys, one after the other.
    Cleaning { key: usize },
    /// It has.
    Cleaned,
}

/// A client's process.
#[derive(Debug)]
pub(crate) struct Client {
    index: usize,
    plan: Plan,
    dice: Dice,
    mode: Mode,
    state: State,
    masters: Masters,
    budget: Budget,
    hedge: HedgeTimer,
    locations: Locations<Placed>,
    /// Until when nodes that failed, or were slow, are asked last.
    suspects: BTreeMap<NodeId, (Trust, MonoTime)>,
    /// When the operation was called, in true time.
    called: MonoTime,
    /// When it has to end, by the client's clock.
    deadline: MonoTime,
    numbers: u64,
    /// Which timers count.
    pause: u64,
    patience: u64,
    hedged: u64,
}

/// How an operation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Ended {
    Well,
    Nothing,
    Failed,
}

impl Client {
    pub(crate) fn start(index: usize, plan: &Plan, seed: u64, scene: &mut Scene<'_>) -> Client {
        let mut client = Client {
            index,
            plan: plan.clone(),
            dice: Dice::new(seed),
            mode: Mode::Busy,
            state: State::Idle,
            masters: Masters::new(plan.groups),
            budget: Budget::default(),
            hedge: HedgeTimer::default(),
            locations: Locations::new(plan.locations),
            suspects: BTreeMap::new(),
            called: MonoTime(0),
            deadline: MonoTime(0),
            numbers: 0,
            pause: 0,
            patience: 0,
            hedged: 0,
        };
        client.think(scene);
        client
    }

    /// The process ends, and the next one knows nothing. Whether it was putting something.
    pub(crate) fn crash(&mut self, after: Duration, scene: &mut Scene<'_>) -> bool {
        let putting = matches!(self.state, State::Put(_));
        self.state = State::Idle;
        self.masters = Masters::new(self.plan.groups);
        self.budget = Budget::default();
        self.hedge = HedgeTimer::default();
        self.locations.clear();
        self.suspects.clear();
        self.cancel_timers();
        self.pause_for(after, scene);
        putting
    }

    pub(crate) fn mode(&self) -> Mode {
        self.mode
    }

    /// What the client is there for from now on. An operation that is under way goes on.
    pub(crate) fn set_mode(&mut self, mode: Mode, scene: &mut Scene<'_>) {
        self.mode = mode;
        if matches!(self.state, State::Idle) {
            self.think(scene);
        }
    }

    fn number(&mut self) -> u64 {
        self.numbers += 1;
        ((self.index as u64 + 1) << 40) | self.numbers
    }

    fn cancel_timers(&mut self) {
        (self.pause, self.patience, self.hedged) = (0, 0, 0);
    }

    fn pause_for(&mut self, span: Duration, scene: &mut Scene<'_>) {
        self.pause = self.number();
        scene.wake_in(span, Timer::Client(ClientTimer::Pause(self.pause)));
    }

    fn have_patience(&mut self, span: Duration, scene: &mut Scene<'_>) {
        self.patience = self.number();
        scene.wake_in(span, Timer::Client(ClientTimer::Patience(self.patience)));
    }

    /// Nothing is under way; something will be.
    fn think(&mut self, scene: &mut Scene<'_>) {
        let span = match self.mode {
            Mode::Busy => self.dice.up_to(2 * self.plan.think),
            Mode::Proving { .. } | Mode::Cleaning { .. } => Duration::from_millis(100),
            Mode::Proved | Mode::Cleaned => return,
        };
        self.pause_for(span, scene);
    }

    /// Whether a pause would be longer than there is time. If not, it begins.
    fn pause_again(
        &mut self,
        mut backoff: Backoff,
        asked: Duration,
        scene: &mut Scene<'_>,
    ) -> Option<Backoff> {
        let span = backoff.pause(asked, self.dice.draw());
        if scene.now().after(span) >= self.deadline {
            return None;
        }
        self.patience = 0;
        self.pause_for(span, scene);
        Some(backoff)
    }

    fn trust(&self, node: NodeId, now: MonoTime) -> Trust {
        match self.suspects.get(&node) {
            Some(&(trust, until)) if now < until => trust,
            _ => Trust::Good,
        }
    }

    fn suspect(&mut self, node: NodeId, trust: Trust, scene: &Scene<'_>) {
        self.suspects.insert(node, (trust, scene.now().after(SUSPECT)));
    }

    fn context(&self, caller: u64, scene: &Scene<'_>) -> Option<v1::RequestContext> {
        let left = self.deadline.since(scene.now()).as_millis() as u32;
        Some(v1::RequestContext { caller, deadline_ms: left.max(1), ..Default::default() })
    }

    /// Asks a node. One that nobody knows does not answer.
    fn ask(&mut self, node: NodeId, ask: Ask, scene: &mut Scene<'_>) -> u64 {
        let call = self.number();
        if let Some(index) = scene.network.find(node) {
            scene.send(Who::Node(index), Message::Ask { call, ask });
        }
        call
    }

    fn begin(&mut self, scene: &mut Scene<'_>) {
        scene.oracle.tally.ops += 1;
        self.called = scene.true_now();
        self.deadline = scene.now().after(DEADLINE);
        let own = self.plan.keys + self.index;
        match self.mode {
            Mode::Busy => self.begin_any(scene),
            Mode::Proving { put: false } => self.begin_put(own, true, scene),
            Mode::Proving { put: true } => self.begin_get(own, scene),
            Mode::Cleaning { key } => self.begin_remove(key, scene),
            Mode::Proved | Mode::Cleaned => {}
        }
    }

    fn begin_any(&mut self, scene: &mut Scene<'_>) {
        let key = self.dice.below(self.plan.keys as u64) as usize;
        let kind = self.dice.below(100);
        let puts = self.plan.puts_percent;
        if kind < puts {
            let upsert = self.dice.below(100) < self.plan.upserts_percent;
            self.begin_put(key, upsert, scene);
        } else if kind < puts + self.plan.removals_percent {
            self.begin_remove(key, scene);
        } else if kind < 96 {
            self.begin_get(key, scene);
        } else {
            let (context, keys) = (self.context(0, scene), packed(key));
            let request = match self.dice.below(2) {
                0 => Request::Exist(v1::ExistRequest { context, keys }),
                _ => Request::Touch(v1::TouchRequest { context, keys, lease_ms: 2_000 }),
            };
            let call = self.call(key, request, PATIENCE, scene);
            self.state = State::Other { call };
        }
    }

    fn begin_remove(&mut self, key: usize, scene: &mut Scene<'_>) {
        self.locations.forget_if(&object_id(key), |_| true);
        self.say_remove(key, 1, Backoff::default(), scene);
    }

    fn say_remove(&mut self, key: usize, said: u32, backoff: Backoff, scene: &mut Scene<'_>) {
        let force = self.mode != Mode::Busy || self.dice.permille(800);
        let request = v1::RemoveRequest { context: self.context(0, scene), keys: packed(key), force };
        let left = self.deadline.since(scene.now());
        // Of several masters one that says nothing may not be there any more.
        let patience = if self.masters.is_alone() { left + PATIENCE } else { PATIENCE };
        let call = self.call(key, Request::Remove(request), patience, scene);
        self.state = State::Remove { key, call, said, backoff };
    }

    /// The master that was asked is not the one, or not there: the one who is, after a pause.
    fn remove_again(&mut self, key: usize, backoff: Backoff, scene: &mut Scene<'_>) {
        self.masters.doubt();
        match self.pause_again(backoff, Duration::ZERO, scene) {
            Some(backoff) => self.state = State::Remove { key, call: 0, said: 0, backoff },
            None => {
                self.state = State::Remove { key, call: 0, said: 0, backoff };
                self.finish(Ended::Failed, scene);
            }
        }
    }

    /// The operation is over.
    fn finish(&mut self, ended: Ended, scene: &mut Scene<'_>) {
        if ended == Ended::Failed {
            scene.oracle.tally.failed += 1;
        }
        self.mode = match (self.mode, ended, &self.state) {
            (Mode::Proving { put: false }, Ended::Well, State::Put(_)) => Mode::Proving { put: true },
            // What was put may have been evicted: once more.
            (Mode::Proving { put: true }, Ended::Nothing, State::Get(_)) => Mode::Proving { put: false },
            (Mode::Proving { put: true }, Ended::Well, State::Get(_)) => Mode::Proved,
            (Mode::Cleaning { key }, Ended::Well, State::Remove { key: removed, .. }) if key == *removed => {
                let all = self.plan.keys + self.plan.clients;
                if key + 1 < all { Mode::Cleaning { key: key + 1 } } else { Mode::Cleaned }
            }
            (mode, ..) => mode,
        };
        self.state = State::Idle;
        self.cancel_timers();
        self.think(scene);
    }

    /// Something that waited for time.
    pub(crate) fn wake(&mut self, timer: ClientTimer, scene: &mut Scene<'_>) -> Result<(), String> {
        if let ClientTimer::Look(number) = timer {
            self.look_over(number, scene);
            return Ok(());
        }
        let current = match timer {
            ClientTimer::Look(_) => false,
            ClientTimer::Pause(number) => number == self.pause,
            ClientTimer::Patience(number) => number == self.patience,
            ClientTimer::Hedge(number) => number == self.hedged,
        };
        if !current {
            return Ok(());
        }
        match (std::mem::replace(&mut self.state, State::Idle), timer) {
            (State::Idle, _) => self.begin(scene),
            (State::Put(put), ClientTimer::Pause(_)) => self.put_goes_on(put, scene),
            (State::Put(put), _) => self.put_unanswered(put, scene),
            (State::Get(get), ClientTimer::Pause(_)) => self.get_goes_on(get, scene)?,
            (State::Get(get), ClientTimer::Hedge(_)) => self.hedge_get(get, scene),
            (State::Get(get), ClientTimer::Patience(_) | ClientTimer::Look(_)) => {
                self.get_unanswered(get, scene)?;
            }
            // The connection was lost over it: once more, for it may be said twice.
            (State::Remove { key, said: 1, backoff, .. }, _) if self.deadline > scene.now() => {
                self.say_remove(key, 2, backoff, scene);
            }
            (State::Remove { key, backoff, .. }, ClientTimer::Pause(_)) => {
                self.say_remove(key, 1, backoff, scene);
            }
            (State::Remove { key, backoff, .. }, _) if !self.masters.is_alone() => {
                self.remove_again(key, backoff, scene);
            }
            (state @ (State::Remove { .. } | State::Other { .. }), _) => {
                self.masters.doubt();
                self.state = state;
                self.finish(Ended::Failed, scene);
            }
        }
        Ok(())
    }

    /// A message arrives.
    pub(crate) fn arrives(&mut self, message: Message, scene: &mut Scene<'_>) -> Result<(), String> {
        match message {
            Message::Answer { call, answer: Answer::Map(answer) } => {
                self.map_told(call, answer, scene);
                Ok(())
            }
            Message::Answer { call, answer } => self.answered(call, answer, scene),
            Message::Told { call, told } => self.told(call, told, scene),
            _ => unreachable!("not for a client"),
        }
    }

    fn answered(&mut self, call: u64, answer: Answer, scene: &mut Scene<'_>) -> Result<(), String> {
        match (std::mem::replace(&mut self.state, State::Idle), answer) {
            (State::Put(put), answer) => self.put_answered(put, call, answer, scene),
            (State::Get(get), Answer::Found(answer)) if get.waits_for(call) => {
                return self.get_found(get, &answer, scene);
            }
            (State::Remove { key, call: waited, said, backoff }, Answer::Outcomes(answer))
                if call == waited =>
            {
                let code = outcome(&answer)?;
                if code == Some(ErrorCode::WrongMaster) && !self.masters.is_alone() {
                    self.remove_again(key, backoff, scene);
                    return Ok(());
                }
                self.state = State::Remove { key, call, said, backoff };
                let ended = match code {
                    None | Some(ErrorCode::NotFound) => {
                        scene.oracle.removed(key, self.called, scene.true_now());
                        Ended::Well
                    }
                    Some(ErrorCode::Pending) => {
                        scene.oracle.tally.pending += 1;
                        Ended::Nothing
                    }
                    Some(_) => Ended::Nothing,
                };
                self.finish(ended, scene);
            }
            (State::Other { call: waited }, _) if call == waited => self.finish(Ended::Well, scene),
            (state, _) => self.state = state, // the answer to a call that was given up
        }
        Ok(())
    }

    fn told(&mut self, call: u64, told: Told, scene: &mut Scene<'_>) -> Result<(), String> {
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Put(put) => {
                self.put_told(put, call, &told, scene);
                Ok(())
            }
            State::Get(get) => self.get_told(get, call, told, scene),
            state => {
                self.state = state;
                Ok(())
            }
        }
    }
}

/// A key as it travels.
fn packed(key: usize) -> prost::bytes::Bytes {
    let (mut keys, bytes) = (PackedKeysBuilder::new(), key_bytes(key));
    keys.push(Key::new(&bytes).expect("short")).expect("one key fits");
    keys.finish().into()
}

/// The code of the one key that was asked for, or of the call.
fn outcome(answer: &v1::OutcomesResponse) -> Result<Option<ErrorCode>, String> {
    let answer = OutcomesResponse::from_wire(answer).map_err(|error| error.to_string())?;
    match answer.into_result() {
        Ok(outcomes) => outcomes.codes.iter().next().ok_or_else(|| "no outcome for a key".to_owned()),
        Err(context) => Ok(context.code),
    }
}
