//! [`Client`]: runs one operation after the other, each with a deadline: put, get, remove and others.
//!
//! The [`logic`](moontide_client::logic) of the shipped client decides about retries, the choice of replicas and cached
//! locations. This file replaces the threads of the shipped client.

mod get;
mod masters;
mod put;

use std::collections::BTreeMap;
use std::sync::OnceLock;
use std::time::Duration;

use moontide_client::logic::{Budget, HedgeTimer, LocationCache, NodeHealth, RETRY_BACKOFF};
use moontide_proto::convert::{OutcomesResponse, Wire};
use moontide_proto::{PackedKeysBuilder, v1};
use moontide_rt::Backoff;
use moontide_types::{ErrorCode, IdKey, Key, MonoTime, NodeId, ObjectId, Tenant, TenantGeneration};

use self::get::{Get, ReplicaList};
use self::masters::Masters;
use self::put::Put;
use crate::context::ProcessContext;
use crate::event::{MasterReply, Message, NodeOp, NodeReply, ProcessId, Request, Timer};
use crate::plan::RunPlan;
use crate::rng::SimRng;

/// Most keys of any plan, with those that clients have for themselves.
const KEYS_MAX: usize = 256;
/// How long an operation may take.
const DEADLINE: Duration = Duration::from_secs(5);
/// Timeout of a reply.
const REPLY_TIMEOUT: Duration = Duration::from_secs(1);
/// Time for which a failed or slow node is tried last.
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

/// Timers of a client. A timer with an outdated number is ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum ClientTimer {
    /// A pause is over.
    Pause(u64),
    /// A reply timed out.
    Timeout(u64),
    /// The hedge delay is over.
    Hedge(u64),
    /// The map refresh timed out.
    MapRefresh(u64),
}

#[derive(Debug)]
enum State {
    Idle,
    Put(Box<Put>),
    Get(Box<Get>),
    Remove {
        key: usize,
        call: u64,
        sends: u32,
        backoff: Backoff,
    },
    /// A call whose result is ignored.
    Other {
        call: u64,
    },
}

/// Task of a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Mode {
    /// Anything, all the time.
    Busy,
    /// It has to put something, and to get it.
    Verifying { put: bool },
    /// It has.
    Verified,
    /// It removes all keys, one after the other.
    Cleaning { key: usize },
    /// It has.
    Cleaned,
}

/// A client's process.
#[derive(Debug)]
pub(crate) struct Client {
    index: usize,
    plan: RunPlan,
    rng: SimRng,
    mode: Mode,
    state: State,
    masters: Masters,
    budget: Budget,
    hedge: HedgeTimer,
    locations: LocationCache<ReplicaList>,
    /// Health of nodes that failed or were slow, with its expiry.
    node_health: BTreeMap<NodeId, (NodeHealth, MonoTime)>,
    /// Start of the operation, in world time.
    called: MonoTime,
    /// When it has to end, by the client's clock.
    deadline: MonoTime,
    numbers: u64,
    /// Which timers count.
    pause: u64,
    timeout: u64,
    hedged: u64,
}

/// How an operation ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum OpOutcome {
    Well,
    Nothing,
    Failed,
}

impl Client {
    pub(crate) fn start(index: usize, plan: &RunPlan, seed: u64, cx: &mut ProcessContext<'_>) -> Client {
        let mut client = Client {
            index,
            plan: plan.clone(),
            rng: SimRng::new(seed),
            mode: Mode::Busy,
            state: State::Idle,
            masters: Masters::new(plan.groups),
            budget: Budget::default(),
            hedge: HedgeTimer::default(),
            locations: LocationCache::new(plan.locations),
            node_health: BTreeMap::new(),
            called: MonoTime(0),
            deadline: MonoTime(0),
            numbers: 0,
            pause: 0,
            timeout: 0,
            hedged: 0,
        };
        client.think(cx);
        client
    }

    /// The process ends, and the next one knows nothing. Whether it was putting something.
    pub(crate) fn crash(&mut self, after: Duration, cx: &mut ProcessContext<'_>) -> bool {
        let putting = matches!(self.state, State::Put(_));
        self.state = State::Idle;
        self.masters = Masters::new(self.plan.groups);
        self.budget = Budget::default();
        self.hedge = HedgeTimer::default();
        self.locations.clear();
        self.node_health.clear();
        self.cancel_timers();
        self.pause_for(after, cx);
        putting
    }

    pub(crate) fn mode(&self) -> Mode {
        self.mode
    }

    /// What the client is there for from now on. An operation that is under way goes on.
    pub(crate) fn set_mode(&mut self, mode: Mode, cx: &mut ProcessContext<'_>) {
        self.mode = mode;
        if matches!(self.state, State::Idle) {
            self.think(cx);
        }
    }

    fn number(&mut self) -> u64 {
        self.numbers += 1;
        ((self.index as u64 + 1) << 40) | self.numbers
    }

    fn cancel_timers(&mut self) {
        (self.pause, self.timeout, self.hedged) = (0, 0, 0);
    }

    fn pause_for(&mut self, span: Duration, cx: &mut ProcessContext<'_>) {
        self.pause = self.number();
        cx.wake_in(span, Timer::Client(ClientTimer::Pause(self.pause)));
    }

    fn start_timeout(&mut self, span: Duration, cx: &mut ProcessContext<'_>) {
        self.timeout = self.number();
        cx.wake_in(span, Timer::Client(ClientTimer::Timeout(self.timeout)));
    }

    /// Nothing is under way; something will be.
    fn think(&mut self, cx: &mut ProcessContext<'_>) {
        let span = match self.mode {
            Mode::Busy => self.rng.up_to(2 * self.plan.think),
            Mode::Verifying { .. } | Mode::Cleaning { .. } => Duration::from_millis(100),
            Mode::Verified | Mode::Cleaned => return,
        };
        self.pause_for(span, cx);
    }

    /// Whether a pause would be longer than there is time. If not, it begins.
    fn pause_again(
        &mut self,
        mut backoff: Backoff,
        asked: Duration,
        cx: &mut ProcessContext<'_>,
    ) -> Option<Backoff> {
        let span = backoff.pause(asked, self.rng.next_u64());
        if cx.now().after(span) >= self.deadline {
            return None;
        }
        self.timeout = 0;
        self.pause_for(span, cx);
        Some(backoff)
    }

    fn health(&self, node: NodeId, now: MonoTime) -> NodeHealth {
        match self.node_health.get(&node) {
            Some(&(health, until)) if now < until => health,
            _ => NodeHealth::Good,
        }
    }

    fn suspect(&mut self, node: NodeId, health: NodeHealth, cx: &ProcessContext<'_>) {
        self.node_health.insert(node, (health, cx.now().after(SUSPECT)));
    }

    fn context(&self, caller: u64, cx: &ProcessContext<'_>) -> Option<v1::RequestContext> {
        let left = self.deadline.since(cx.now()).as_millis() as u32;
        Some(v1::RequestContext { caller, timeout_ms: left.max(1), ..Default::default() })
    }

    /// Sends an operation to a node. An unknown node does not reply.
    fn ask(&mut self, node: NodeId, ask: NodeOp, cx: &mut ProcessContext<'_>) -> u64 {
        let call = self.number();
        if let Some(index) = cx.network.find(node) {
            cx.send(ProcessId::Node(index), Message::Ask { call, ask });
        }
        call
    }

    fn begin(&mut self, cx: &mut ProcessContext<'_>) {
        cx.oracle.tally.ops += 1;
        self.called = cx.world_now();
        self.deadline = cx.now().after(DEADLINE);
        let own = self.plan.keys + self.index;
        match self.mode {
            Mode::Busy => self.begin_any(cx),
            Mode::Verifying { put: false } => self.begin_put(own, true, cx),
            Mode::Verifying { put: true } => self.begin_get(own, cx),
            Mode::Cleaning { key } => self.begin_remove(key, cx),
            Mode::Verified | Mode::Cleaned => {}
        }
    }

    fn begin_any(&mut self, cx: &mut ProcessContext<'_>) {
        let key = self.rng.below(self.plan.keys as u64) as usize;
        let kind = self.rng.below(100);
        let puts = self.plan.puts_percent;
        if kind < puts {
            let upsert = self.rng.below(100) < self.plan.upserts_percent;
            self.begin_put(key, upsert, cx);
        } else if kind < puts + self.plan.removals_percent {
            self.begin_remove(key, cx);
        } else if kind < 96 {
            self.begin_get(key, cx);
        } else {
            let (context, keys) = (self.context(0, cx), packed(key));
            let request = match self.rng.below(2) {
                0 => Request::Exist(v1::ExistRequest { context, keys }),
                _ => Request::Touch(v1::TouchRequest { context, keys, lease_ms: 2_000 }),
            };
            let call = self.call(key, request, REPLY_TIMEOUT, cx);
            self.state = State::Other { call };
        }
    }

    fn begin_remove(&mut self, key: usize, cx: &mut ProcessContext<'_>) {
        self.locations.forget_if(&object_id(key), |_| true);
        self.send_remove(key, 1, RETRY_BACKOFF, cx);
    }

    fn send_remove(&mut self, key: usize, sends: u32, backoff: Backoff, cx: &mut ProcessContext<'_>) {
        let force = self.mode != Mode::Busy || self.rng.permille(800);
        let request = v1::RemoveRequest { context: self.context(0, cx), keys: packed(key), force };
        let left = self.deadline.since(cx.now());
        // With several masters, one that does not reply may have been replaced.
        let timeout = if self.masters.is_single_master() { left + REPLY_TIMEOUT } else { REPLY_TIMEOUT };
        let call = self.call(key, Request::Remove(request), timeout, cx);
        self.state = State::Remove { key, call, sends, backoff };
    }

    /// Retries at the current master after a pause.
    fn remove_again(&mut self, key: usize, backoff: Backoff, cx: &mut ProcessContext<'_>) {
        self.masters.mark_stale();
        match self.pause_again(backoff, Duration::ZERO, cx) {
            Some(backoff) => self.state = State::Remove { key, call: 0, sends: 0, backoff },
            None => {
                self.state = State::Remove { key, call: 0, sends: 0, backoff };
                self.finish(OpOutcome::Failed, cx);
            }
        }
    }

    /// The operation is over.
    fn finish(&mut self, ended: OpOutcome, cx: &mut ProcessContext<'_>) {
        if ended == OpOutcome::Failed {
            cx.oracle.tally.failed += 1;
        }
        self.mode = match (self.mode, ended, &self.state) {
            (Mode::Verifying { put: false }, OpOutcome::Well, State::Put(_)) => Mode::Verifying { put: true },
            // What was put may have been evicted: once more.
            (Mode::Verifying { put: true }, OpOutcome::Nothing, State::Get(_)) => {
                Mode::Verifying { put: false }
            }
            (Mode::Verifying { put: true }, OpOutcome::Well, State::Get(_)) => Mode::Verified,
            (Mode::Cleaning { key }, OpOutcome::Well, State::Remove { key: removed, .. })
                if key == *removed =>
            {
                let all = self.plan.keys + self.plan.clients;
                if key + 1 < all { Mode::Cleaning { key: key + 1 } } else { Mode::Cleaned }
            }
            (mode, ..) => mode,
        };
        self.state = State::Idle;
        self.cancel_timers();
        self.think(cx);
    }

    /// Something that waited for time.
    pub(crate) fn wake(&mut self, timer: ClientTimer, cx: &mut ProcessContext<'_>) -> Result<(), String> {
        if let ClientTimer::MapRefresh(number) = timer {
            self.map_refresh_over(number, cx);
            return Ok(());
        }
        let current = match timer {
            ClientTimer::MapRefresh(_) => false,
            ClientTimer::Pause(number) => number == self.pause,
            ClientTimer::Timeout(number) => number == self.timeout,
            ClientTimer::Hedge(number) => number == self.hedged,
        };
        if !current {
            return Ok(());
        }
        match (std::mem::replace(&mut self.state, State::Idle), timer) {
            (State::Idle, _) => self.begin(cx),
            (State::Put(put), ClientTimer::Pause(_)) => self.put_goes_on(put, cx),
            (State::Put(put), _) => self.put_unanswered(put, cx),
            (State::Get(get), ClientTimer::Pause(_)) => self.get_goes_on(get, cx)?,
            (State::Get(get), ClientTimer::Hedge(_)) => self.hedge_get(get, cx),
            (State::Get(get), ClientTimer::Timeout(_) | ClientTimer::MapRefresh(_)) => {
                self.get_unanswered(get, cx)?;
            }
            // The connection was lost: repeat the removal once, it is idempotent.
            (State::Remove { key, sends: 1, backoff, .. }, _) if self.deadline > cx.now() => {
                self.send_remove(key, 2, backoff, cx);
            }
            (State::Remove { key, backoff, .. }, ClientTimer::Pause(_)) => {
                self.send_remove(key, 1, backoff, cx);
            }
            (State::Remove { key, backoff, .. }, _) if !self.masters.is_single_master() => {
                self.remove_again(key, backoff, cx);
            }
            (state @ (State::Remove { .. } | State::Other { .. }), _) => {
                self.masters.mark_stale();
                self.state = state;
                self.finish(OpOutcome::Failed, cx);
            }
        }
        Ok(())
    }

    /// A message arrives.
    pub(crate) fn arrives(&mut self, message: Message, cx: &mut ProcessContext<'_>) -> Result<(), String> {
        match message {
            Message::Reply { call, reply: MasterReply::Map(reply) } => {
                self.map_received(call, reply, cx);
                Ok(())
            }
            Message::Reply { call, reply } => self.answered(call, reply, cx),
            Message::NodeReply { call, reply } => self.reply(call, reply, cx),
            _ => unreachable!("not for a client"),
        }
    }

    fn answered(&mut self, call: u64, reply: MasterReply, cx: &mut ProcessContext<'_>) -> Result<(), String> {
        match (std::mem::replace(&mut self.state, State::Idle), reply) {
            (State::Put(put), reply) => self.put_answered(put, call, reply, cx),
            (State::Get(get), MasterReply::Found(reply)) if get.waits_for(call) => {
                return self.get_found(get, &reply, cx);
            }
            (State::Remove { key, call: waited, sends, backoff }, MasterReply::Outcomes(reply))
                if call == waited =>
            {
                let code = outcome(&reply)?;
                if code == Some(ErrorCode::WrongMaster) && !self.masters.is_single_master() {
                    self.remove_again(key, backoff, cx);
                    return Ok(());
                }
                self.state = State::Remove { key, call, sends, backoff };
                let ended = match code {
                    None | Some(ErrorCode::NotFound) => {
                        cx.oracle.removed(key, self.called, cx.world_now());
                        OpOutcome::Well
                    }
                    Some(ErrorCode::Pending) => {
                        cx.oracle.tally.pending += 1;
                        OpOutcome::Nothing
                    }
                    Some(_) => OpOutcome::Nothing,
                };
                self.finish(ended, cx);
            }
            (State::Other { call: waited }, _) if call == waited => self.finish(OpOutcome::Well, cx),
            (state, _) => self.state = state, // reply to a canceled call
        }
        Ok(())
    }

    fn reply(&mut self, call: u64, reply: NodeReply, cx: &mut ProcessContext<'_>) -> Result<(), String> {
        match std::mem::replace(&mut self.state, State::Idle) {
            State::Put(put) => {
                self.put_node_reply(put, call, &reply, cx);
                Ok(())
            }
            State::Get(get) => self.get_node_reply(get, call, reply, cx),
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
fn outcome(reply: &v1::OutcomesResponse) -> Result<Option<ErrorCode>, String> {
    let reply = OutcomesResponse::from_wire(reply).map_err(|error| error.to_string())?;
    match reply.into_result() {
        Ok(outcomes) => outcomes.codes.iter().next().ok_or_else(|| "no outcome for a key".to_owned()),
        Err(context) => Ok(context.code),
    }
}
