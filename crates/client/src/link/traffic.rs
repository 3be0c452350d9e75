//! [`Traffic`]: which requests are in flight, who waits for them, and what may leave next.
//!
//! Pure: no socket, no clock, no lock. Both links drive it; `W` is how they reach a waiter. What leaves is returned
//! as a [`Departure`], to be encoded and written outside of any lock.
//!
//! Invariant: while keys are gathered, something is in flight. So whoever takes something out of flight, by an answer
//! or by giving up, asks [`Traffic::depart`] afterwards, and no key is forgotten.

use std::sync::Arc;
use std::time::Instant;

use moontide_proto::{FrameHeader, FrameKind};
use moontide_types::Tenant;

use super::call::{self, Outcome};
use super::config::{Known, LinkConfig, LinkLoad};
use super::error::{LinkError, ProtocolError};
use super::frames::Frame;
use super::gather::{Batch, Gather, Keys, Single, vacate};
use super::table::Table;

/// What a flight asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Asks {
    /// A call of one caller, who decodes the answer itself.
    Call(FrameKind),
    /// Gathered keys.
    Keys(Gathered),
}

/// The two kinds of single-key calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Gathered {
    Exist,
    Lookup,
}

impl Asks {
    fn reply(self) -> FrameKind {
        match self {
            Asks::Call(reply) => reply,
            Asks::Keys(Gathered::Exist) => FrameKind::ExistReply,
            Asks::Keys(Gathered::Lookup) => FrameKind::GetReplicaListReply,
        }
    }
}

/// A request in flight.
#[derive(Debug)]
pub(super) struct Flight<W> {
    asks: Asks,
    /// One per key of gathered keys, otherwise one; `None` for those who gave up.
    waiters: Vec<Option<W>>,
    deadline: Instant,
}

impl<W> Flight<W> {
    /// Gives everybody their part of the answer.
    pub(super) fn settle(
        self,
        frame: Frame,
        address: &Arc<str>,
        mut tell: impl FnMut(W, Result<Outcome, LinkError>),
    ) {
        let keys = self.waiters.len();
        match self.asks {
            Asks::Call(_) => {
                if let Some(waiter) = self.waiters.into_iter().flatten().next() {
                    tell(waiter, Ok(Outcome::Frame(frame)));
                }
            }
            Asks::Keys(Gathered::Exist) => {
                let results = call::read_exist(frame, keys, address);
                each(self.waiters, results, Outcome::Exist, tell);
            }
            Asks::Keys(Gathered::Lookup) => {
                let results = call::read_lookup_each(frame, keys, address);
                each(self.waiters, results, Outcome::Lookup, tell);
            }
        }
    }

    /// Those who still wait.
    pub(super) fn into_waiters(self) -> impl Iterator<Item = W> {
        self.waiters.into_iter().flatten()
    }
}

/// One result for each waiter, or the same error for all.
fn each<W, T>(
    waiters: Vec<Option<W>>,
    results: Result<Vec<T>, LinkError>,
    outcome: impl Fn(T) -> Outcome,
    mut tell: impl FnMut(W, Result<Outcome, LinkError>),
) {
    match results {
        Ok(results) => {
            let both = waiters.into_iter().zip(results);
            both.for_each(|(waiter, result)| {
                if let Some(waiter) = waiter {
                    tell(waiter, Ok(outcome(result)));
                }
            });
        }
        Err(error) => waiters.into_iter().flatten().for_each(|waiter| tell(waiter, Err(error.clone()))),
    }
}

/// Gathered keys that leave now: in the table already, to be encoded and written.
#[derive(Debug)]
pub(super) struct Departure {
    request: u64,
    kind: Gathered,
    keys: Keys,
    pub(super) deadline: Instant,
}

impl Departure {
    /// The frame.
    pub(super) fn encode(self, config: &LinkConfig, known: Known) -> Vec<u8> {
        let Keys { tenant, lease_ms, packed, .. } = self.keys;
        // The master need not work for longer than the last of them waits.
        let left_ms = self.deadline.saturating_duration_since(Instant::now()).as_millis();
        let deadline_ms = left_ms.clamp(1, config.deadline_ms.into()) as u32; // clamped to a u32
        let tenant = Tenant::new(&tenant).expect("was a tenant when the first key joined");
        let context = config.context(tenant, known, deadline_ms);
        let keys = packed.finish();
        let outgoing = match self.kind {
            Gathered::Exist => call::outgoing_exist(&context, keys),
            Gathered::Lookup => call::outgoing_lookup(&context, keys, lease_ms, false),
        };
        // Tenant, keys and lease were checked when they joined, and the batch is far below the largest request.
        outgoing.expect("a gathered batch keeps all bounds").numbered(self.request)
    }
}

/// Everything that is under way on one link.
#[derive(Debug)]
pub(super) struct Traffic<W> {
    table: Table<Flight<W>>,
    exists: Gather<W>,
    lookups: Gather<W>,
}

impl<W> Traffic<W> {
    pub(super) fn new(inflight_max: u16) -> Traffic<W> {
        Traffic { table: Table::new(inflight_max), exists: Gather::new(), lookups: Gather::new() }
    }

    pub(super) fn load(&self) -> LinkLoad {
        let gathered = self.exists.gathered() + self.lookups.gathered();
        LinkLoad { in_flight: self.table.len(), gathered }
    }

    pub(super) fn is_full(&self) -> bool {
        self.table.is_full()
    }

    fn gather(&mut self, kind: Gathered) -> &mut Gather<W> {
        match kind {
            Gathered::Exist => &mut self.exists,
            Gathered::Lookup => &mut self.lookups,
        }
    }

    /// A key that may leave with others; ask [`depart`](Traffic::depart) afterwards.
    pub(super) fn join(&mut self, kind: Gathered, single: Single<'_, W>) {
        self.gather(kind).join(single);
    }

    /// Puts a call into flight.
    ///
    /// # Panics
    /// If the table is full.
    pub(super) fn board(&mut self, kind: FrameKind, deadline: Instant, waiter: W) -> u64 {
        let reply = kind.reply().expect("a call is a request");
        self.table.insert(Flight { asks: Asks::Call(reply), waiters: vec![Some(waiter)], deadline })
    }

    /// The next batch of gathered keys that may leave.
    pub(super) fn depart(&mut self) -> Option<Departure> {
        if self.table.is_full() {
            return None;
        }
        for kind in [Gathered::Exist, Gathered::Lookup] {
            if let Some(batch) = self.gather(kind).depart() {
                let Batch { keys, waiters, deadline } = batch;
                let request = self.table.insert(Flight { asks: Asks::Keys(kind), waiters, deadline });
                return Some(Departure { request, kind, keys, deadline });
            }
        }
        None
    }

    /// The flight that a frame answers; `None` if nobody waits for it any more.
    pub(super) fn arrive(&mut self, header: &FrameHeader) -> Result<Option<Flight<W>>, ProtocolError> {
        let found = header.kind;
        let may_come = match found {
            FrameKind::Error => true,
            kind => kind.is_control() && !kind.is_request(),
        };
        if !may_come {
            return Err(ProtocolError::Kind { expected: FrameKind::Error, found });
        }
        let Some(flight) = self.table.get(header.request) else { return Ok(None) };
        let expected = flight.asks.reply();
        if found != expected && found != FrameKind::Error {
            return Err(ProtocolError::Kind { expected, found });
        }
        Ok(self.land(header.request))
    }

    /// Somebody gives up. The number of the request that nobody waits for now, if it was the last.
    pub(super) fn leave(&mut self, mut is_it: impl FnMut(&W) -> bool) -> Option<u64> {
        if self.exists.leave(&mut is_it) || self.lookups.leave(&mut is_it) {
            return None;
        }
        let mut left = None;
        for (request, flight) in self.table.iter_mut() {
            if vacate(&mut flight.waiters, &mut is_it) {
                left = flight.waiters.iter().all(Option::is_none).then_some(request);
                break;
            }
        }
        self.land(left?).and(left)
    }

    /// A flight whose time is over.
    pub(super) fn expire(&mut self, now: Instant) -> Option<(u64, Flight<W>)> {
        let (request, _) = self.table.iter().find(|(_, flight)| flight.deadline <= now)?;
        self.land(request).map(|flight| (request, flight))
    }

    /// When the next flight's time is over.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.table.iter().map(|(_, flight)| flight.deadline).min()
    }

    /// The first waiter in flight that will have it.
    pub(super) fn find_waiter(&self, accepts: impl FnMut(&W) -> bool) -> bool {
        self.table.iter().flat_map(|(_, flight)| flight.waiters.iter().flatten()).any(accepts)
    }

    /// Everybody, when the connection broke.
    pub(super) fn drain(&mut self) -> Vec<W> {
        let requests: Vec<u64> = self.table.iter().map(|(request, _)| request).collect();
        let flights = requests.into_iter().filter_map(|request| self.table.remove(request));
        let mut all: Vec<W> = flights.flat_map(Flight::into_waiters).collect();
        all.extend(self.exists.drain());
        all.extend(self.lookups.drain());
        all
    }

    /// Takes a flight out of the table.
    fn land(&mut self, request: u64) -> Option<Flight<W>> {
        let flight = self.table.remove(request)?;
        if let Asks::Keys(kind) = flight.asks {
            self.gather(kind).returned();
        }
        Some(flight)
    }
}
