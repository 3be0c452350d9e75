//! [`Client`]: one operation after the other, each with an end by time: put, get, remove.

use std::sync::OnceLock;

use moontide_meta::{PlaceView, Rng};
use moontide_types::{Epoch, ErrorCode, IdKey, Key, MonoTime, ObjectId, SessionId, Tenant, TenantGeneration};

use crate::event::{Answer, Ask, Call, Event, Events, Message, Told};
use crate::network::Network;
use crate::oracle::Oracle;

/// Keys that all clients fight for.
pub(crate) const KEYS: usize = 40;
/// A call is repeated, or given up, after this time.
const PATIENCE_MS: u64 = 1_000;
/// How often the end of a put is asked for.
const ENDS_MAX: u32 = 20;

/// A key's bytes.
pub(crate) fn key_bytes(key: usize) -> Vec<u8> {
    format!("block-{key:04}").into_bytes()
}

/// The ids of all keys: hashing a name for every message would take most of a run's time.
fn ids() -> &'static [ObjectId] {
    static IDS: OnceLock<Vec<ObjectId>> = OnceLock::new();
    IDS.get_or_init(|| {
        let id_key = IdKey::new(1, [7; 32]);
        let id = |key| {
            let bytes = key_bytes(key);
            id_key.object_id(Tenant::DEFAULT, TenantGeneration(0), Key::new(&bytes).expect("short"))
        };
        (0..KEYS).map(id).collect()
    })
}

/// A key's id.
pub(crate) fn object_id(key: usize) -> ObjectId {
    ids()[key]
}

/// The key of an id.
pub(crate) fn key_of(id: ObjectId) -> usize {
    ids().iter().position(|&known| known == id).expect("an id of ours")
}

#[derive(Debug)]
enum State {
    Idle,
    PutStarting { key: usize, len: u64, token: u64 },
    PutWriting { key: usize, epoch: Epoch, results: Vec<Option<Result<u64, ErrorCode>>> },
    PutEnding { key: usize, epoch: Epoch, root: u64, outcomes: Vec<Option<ErrorCode>>, left: u32 },
    GetLooking { key: usize },
    GetReading { key: usize, epoch: Epoch, object_len: u64, root: u64, places: Vec<PlaceView>, at: usize },
    Removing { key: usize },
}

/// A client's process.
#[derive(Debug)]
pub(crate) struct Client {
    index: usize,
    rng: Rng,
    state: State,
    op: u64,
    called: MonoTime,
    wake: u64,
    pub(crate) ops: u64,
}

impl Client {
    pub(crate) fn new(index: usize, seed: u64) -> Client {
        let (state, called) = (State::Idle, MonoTime(0));
        Client { index, rng: Rng::new(seed), state, op: (index as u64 + 1) << 32, called, wake: 0, ops: 0 }
    }

    /// The process ends and another one takes its place: whatever it was doing is left as it is.
    pub(crate) fn crash(&mut self, events: &mut Events) {
        self.finish(events);
    }

    fn wake_in(&mut self, ms: u64, events: &mut Events) {
        self.wake += 1;
        events.after_ms(ms, Event::Client { client: self.index, wake: self.wake });
    }

    fn finish(&mut self, events: &mut Events) {
        self.state = State::Idle;
        self.op += 1;
        let pause = self.rng.below(60) as u64;
        self.wake_in(pause, events);
    }

    fn call(&self, call: Call, events: &mut Events, network: &mut Network) {
        network.send(events, Message::Call { client: self.index, op: self.op, call });
    }

    /// It is time for the next thing: an operation, or the end of the patience with one.
    pub(crate) fn wake(
        &mut self,
        wake: u64,
        events: &mut Events,
        network: &mut Network,
        oracle: &mut Oracle,
    ) {
        if wake != self.wake {
            return;
        }
        match &mut self.state {
            State::Idle => self.begin(events, network),
            State::PutWriting { .. } => self.end_put(events, network),
            State::PutEnding { left, .. } if *left > 0 => {
                *left -= 1;
                self.ask_end(events, network);
            }
            State::GetReading { .. } => self.read_next(events, network, oracle),
            State::GetLooking { .. } => {
                oracle.missed();
                self.finish(events);
            }
            State::PutStarting { .. } | State::PutEnding { .. } | State::Removing { .. } => {
                self.finish(events)
            }
        }
    }

    fn begin(&mut self, events: &mut Events, network: &mut Network) {
        self.ops += 1;
        self.op += 1;
        self.called = events.now();
        let key = self.rng.below(KEYS);
        match self.rng.below(10) {
            0..4 => {
                let len = [0, 100, 3_000, 9_000, 20_000][self.rng.below(5)] + self.rng.below(500) as u64;
                let (token, replicas) = (self.rng.next_u64(), 1 + self.rng.below(2) as u8);
                let upsert = self.rng.below(3) == 0;
                self.state = State::PutStarting { key, len, token };
                self.call(Call::PutStart { key, len, replicas, upsert }, events, network);
            }
            4..9 => {
                self.state = State::GetLooking { key };
                let lease_ms = [0, 0, 5_000][self.rng.below(3)];
                self.call(Call::Lookup { key, lease_ms }, events, network);
            }
            _ => {
                self.state = State::Removing { key };
                self.call(Call::Remove { key }, events, network);
            }
        }
        let patience =
            if matches!(self.state, State::Removing { .. }) { 5 * PATIENCE_MS } else { PATIENCE_MS };
        self.wake_in(patience, events);
    }

    /// The master has answered.
    pub(crate) fn answer(
        &mut self,
        op: u64,
        answer: Answer,
        events: &mut Events,
        network: &mut Network,
        oracle: &mut Oracle,
    ) -> Result<(), String> {
        if op != self.op {
            return Ok(());
        }
        match (&mut self.state, answer) {
            (&mut State::PutStarting { key, len, token }, Answer::Granted { epoch, places }) => {
                oracle.granted(epoch, key, len, token)?;
                self.state = State::PutWriting { key, epoch, results: vec![None; places.len()] };
                for (at, (place, session)) in places.into_iter().enumerate() {
                    let ask = Ask::Write { place, session, key, epoch, object_len: len, token };
                    self.ask(at, &place, ask, events, network);
                }
                self.wake_in(3 * PATIENCE_MS, events);
            }
            (&mut State::PutEnding { epoch, .. }, Answer::Ended) => {
                oracle.put_acked(epoch, events.now());
                self.finish(events);
            }
            (State::PutEnding { .. }, Answer::Refused(ErrorCode::Retry)) => {
                self.wake_in(PATIENCE_MS / 2, events)
            }
            (&mut State::GetLooking { key }, Answer::Found { epoch, object_len, root, places }) => {
                self.state = State::GetReading { key, epoch, object_len, root, places, at: 0 };
                self.read_at(events, network, oracle);
            }
            (State::GetLooking { .. }, Answer::Refused(_)) => {
                oracle.missed();
                self.finish(events);
            }
            (&mut State::Removing { key }, Answer::Removed(code)) => {
                if matches!(code, None | Some(ErrorCode::NotFound)) {
                    oracle.removed(key, self.called, events.now());
                }
                self.finish(events);
            }
            (_, Answer::Refused(_)) => self.finish(events),
            _ => {} // an answer to an earlier question of the same operation
        }
        Ok(())
    }

    fn ask(&self, at: usize, place: &PlaceView, ask: Ask, events: &mut Events, network: &mut Network) {
        let node = place.node.0 as usize - 1;
        network.send(events, Message::Ask { client: self.index, op: self.op, node, place: at, ask });
    }

    fn read_next(&mut self, events: &mut Events, network: &mut Network, oracle: &mut Oracle) {
        if let State::GetReading { at, .. } = &mut self.state {
            *at += 1;
        }
        self.read_at(events, network, oracle);
    }

    fn read_at(&mut self, events: &mut Events, network: &mut Network, oracle: &mut Oracle) {
        let State::GetReading { key, epoch, ref places, at, .. } = self.state else { return };
        let Some(&place) = places.get(at) else {
            oracle.missed();
            return self.finish(events);
        };
        self.ask(at, &place, Ask::Read { place, key, epoch }, events, network);
        self.wake_in(PATIENCE_MS, events);
    }

    /// A node has answered.
    pub(crate) fn told(
        &mut self,
        op: u64,
        place: usize,
        told: Told,
        events: &mut Events,
        network: &mut Network,
        oracle: &mut Oracle,
    ) -> Result<(), String> {
        if op != self.op {
            return Ok(());
        }
        match (&mut self.state, told) {
            (State::PutWriting { results, .. }, Told::Written(result)) => {
                results[place].get_or_insert(result);
                if results.iter().all(Option::is_some) {
                    self.end_put(events, network);
                }
            }
            (
                &mut State::GetReading { key, epoch, object_len, root, at, .. },
                Told::Bytes { epoch: given, root: stored, bytes },
            ) if place == at => {
                if (given, stored, bytes.0.len() as u64) != (epoch, root, object_len) {
                    return Err(format!("key {key}: the node has another {epoch} than the master says"));
                }
                oracle.read(key, epoch, &bytes.0, self.called)?;
                self.finish(events);
            }
            (&mut State::GetReading { at, .. }, Told::NotThere) if place == at => {
                self.read_next(events, network, oracle);
            }
            _ => {}
        }
        Ok(())
    }

    fn end_put(&mut self, events: &mut Events, network: &mut Network) {
        let State::PutWriting { key, epoch, ref results } = self.state else { return };
        let root = results.iter().flatten().find_map(|result| result.ok()).unwrap_or(0);
        let outcomes = results.iter().map(|result| match result {
            Some(Ok(_)) => None,
            Some(Err(code)) => Some(*code),
            None => Some(ErrorCode::DeadlineExceeded),
        });
        let outcomes = outcomes.collect();
        self.state = State::PutEnding { key, epoch, root, outcomes, left: ENDS_MAX };
        self.ask_end(events, network);
    }

    fn ask_end(&mut self, events: &mut Events, network: &mut Network) {
        let State::PutEnding { key, epoch, root, ref outcomes, .. } = self.state else { return };
        let call = Call::PutEnd { key, epoch, root, outcomes: outcomes.clone() };
        self.call(call, events, network);
        self.wake_in(PATIENCE_MS, events);
    }
}

/// A place, and the node's session in which it was given.
pub(crate) type GrantedPlace = (PlaceView, SessionId);
