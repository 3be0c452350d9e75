//! [`RequestTracker`]: requests in flight, their waiters, and the queued keys.
//!
//! Pure: no socket, no clock, no lock. Both links drive it; `W` is their handle of a waiter. Batches to send are
//! returned as [`OutgoingBatch`], and encoded and written outside of any lock.
//!
//! Invariant: while keys are queued, a request is in flight. So every caller that removes a request, after a reply or a
//! cancellation, calls [`RequestTracker::pop_batch`] afterwards, and no key is forgotten.

use std::sync::Arc;

use moontide_proto::{FrameHeader, FrameKind};
use moontide_rt::time::Instant;
use moontide_types::Tenant;

use super::batcher::{Batch, BatchKeys, KeyBatcher, SingleKey, remove_waiter};
use super::call::{self, Outcome};
use super::config::{LinkConfig, LinkLoad, MasterHint};
use super::error::{LinkError, ProtocolError};
use super::frames::Frame;
use super::table::Table;

/// Kind of a request in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestKind {
    /// Call of one caller, which decodes the reply itself.
    Call(FrameKind),
    /// Batch of single keys.
    Keys(BatchedCall),
}

/// Kinds of single-key calls.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BatchedCall {
    Exist,
    Lookup,
}

impl RequestKind {
    fn reply(self) -> FrameKind {
        match self {
            RequestKind::Call(reply) => reply,
            RequestKind::Keys(BatchedCall::Exist) => FrameKind::ExistReply,
            RequestKind::Keys(BatchedCall::Lookup) => FrameKind::GetReplicaListReply,
        }
    }
}

/// A request in flight.
#[derive(Debug)]
pub(super) struct InFlightRequest<W> {
    kind: RequestKind,
    /// One per key of a batch, otherwise one; `None` for canceled ones.
    waiters: Vec<Option<W>>,
    deadline: Instant,
}

impl<W> InFlightRequest<W> {
    /// Delivers the reply: each waiter gets its part.
    pub(super) fn settle(
        self,
        frame: Frame,
        address: &Arc<str>,
        mut deliver: impl FnMut(W, Result<Outcome, LinkError>),
    ) {
        let keys = self.waiters.len();
        match self.kind {
            RequestKind::Call(_) => {
                if let Some(waiter) = self.waiters.into_iter().flatten().next() {
                    deliver(waiter, Ok(Outcome::Frame(frame)));
                }
            }
            RequestKind::Keys(BatchedCall::Exist) => {
                let results = call::read_exist(frame, keys, address);
                each(self.waiters, results, Outcome::Exist, deliver);
            }
            RequestKind::Keys(BatchedCall::Lookup) => {
                let results = call::read_lookup_each(frame, keys, address);
                each(self.waiters, results, Outcome::Lookup, deliver);
            }
        }
    }

    /// Returns the remaining waiters.
    pub(super) fn into_waiters(self) -> impl Iterator<Item = W> {
        self.waiters.into_iter().flatten()
    }
}

/// Delivers one result to each waiter, or the same error to all.
fn each<W, T>(
    waiters: Vec<Option<W>>,
    results: Result<Vec<T>, LinkError>,
    outcome: impl Fn(T) -> Outcome,
    mut deliver: impl FnMut(W, Result<Outcome, LinkError>),
) {
    match results {
        Ok(results) => {
            let both = waiters.into_iter().zip(results);
            both.for_each(|(waiter, result)| {
                if let Some(waiter) = waiter {
                    deliver(waiter, Ok(outcome(result)));
                }
            });
        }
        Err(error) => waiters.into_iter().flatten().for_each(|waiter| deliver(waiter, Err(error.clone()))),
    }
}

/// Batch to send. It is already in the table; the caller encodes and writes it.
#[derive(Debug)]
pub(super) struct OutgoingBatch {
    request: u64,
    kind: BatchedCall,
    keys: BatchKeys,
    pub(super) deadline: Instant,
}

impl OutgoingBatch {
    /// Encodes the frame.
    pub(super) fn encode(self, config: &LinkConfig, hint: MasterHint) -> Vec<u8> {
        let BatchKeys { tenant, lease_ms, packed, .. } = self.keys;
        // The master need not work longer than the last waiter waits.
        let left_ms = self.deadline.saturating_duration_since(Instant::now()).as_millis();
        let timeout_ms = left_ms.clamp(1, config.timeout_ms.into()) as u32; // clamped to a u32
        let tenant = Tenant::new(&tenant).expect("checked when the first key joined");
        let context = config.context(tenant, hint, timeout_ms);
        let keys = packed.finish();
        let outgoing = match self.kind {
            BatchedCall::Exist => call::outgoing_exist(&context, keys),
            BatchedCall::Lookup => call::outgoing_lookup(&context, keys, lease_ms, false),
        };
        // Tenant, keys and lease were checked when they joined, and a batch is far below the request size limit.
        outgoing.expect("a batch is within all limits").numbered(self.request)
    }
}

/// Requests and queued keys of one link.
#[derive(Debug)]
pub(super) struct RequestTracker<W> {
    table: Table<InFlightRequest<W>>,
    exists: KeyBatcher<W>,
    lookups: KeyBatcher<W>,
}

impl<W> RequestTracker<W> {
    pub(super) fn new(inflight_max: u16) -> RequestTracker<W> {
        RequestTracker {
            table: Table::new(inflight_max),
            exists: KeyBatcher::new(),
            lookups: KeyBatcher::new(),
        }
    }

    pub(super) fn load(&self) -> LinkLoad {
        let queued = self.exists.queued() + self.lookups.queued();
        LinkLoad { in_flight: self.table.len(), queued_keys: queued }
    }

    pub(super) fn is_full(&self) -> bool {
        self.table.is_full()
    }

    fn batcher(&mut self, kind: BatchedCall) -> &mut KeyBatcher<W> {
        match kind {
            BatchedCall::Exist => &mut self.exists,
            BatchedCall::Lookup => &mut self.lookups,
        }
    }

    /// Queues a key; call [`pop_batch`](RequestTracker::pop_batch) afterwards.
    pub(super) fn push(&mut self, kind: BatchedCall, single: SingleKey<'_, W>) {
        self.batcher(kind).push(single);
    }

    /// Adds a call to the table. Returns its request number.
    ///
    /// # Panics
    /// If the table is full.
    pub(super) fn insert(&mut self, kind: FrameKind, deadline: Instant, waiter: W) -> u64 {
        let reply = kind.reply().expect("a call is a request");
        self.table.insert(InFlightRequest {
            kind: RequestKind::Call(reply),
            waiters: vec![Some(waiter)],
            deadline,
        })
    }

    /// Moves the next batch that may be sent into the table and returns it.
    pub(super) fn pop_batch(&mut self) -> Option<OutgoingBatch> {
        if self.table.is_full() {
            return None;
        }
        for kind in [BatchedCall::Exist, BatchedCall::Lookup] {
            if let Some(batch) = self.batcher(kind).pop_ready() {
                let Batch { keys, waiters, deadline } = batch;
                let request =
                    self.table.insert(InFlightRequest { kind: RequestKind::Keys(kind), waiters, deadline });
                return Some(OutgoingBatch { request, kind, keys, deadline });
            }
        }
        None
    }

    /// Removes the request that a frame answers; `None` if it was canceled.
    pub(super) fn take_reply(
        &mut self,
        header: &FrameHeader,
    ) -> Result<Option<InFlightRequest<W>>, ProtocolError> {
        let found = header.kind;
        let allowed = match found {
            FrameKind::Error => true,
            kind => kind.is_control() && !kind.is_request(),
        };
        if !allowed {
            return Err(ProtocolError::Kind { expected: FrameKind::Error, found });
        }
        let Some(in_flight) = self.table.get(header.request) else { return Ok(None) };
        let expected = in_flight.kind.reply();
        if found != expected && found != FrameKind::Error {
            return Err(ProtocolError::Kind { expected, found });
        }
        Ok(self.remove(header.request))
    }

    /// Cancels a waiter. If it was the last of its request, removes the request and returns its number.
    pub(super) fn cancel(&mut self, mut is_it: impl FnMut(&W) -> bool) -> Option<u64> {
        if self.exists.cancel(&mut is_it) || self.lookups.cancel(&mut is_it) {
            return None;
        }
        let mut emptied = None;
        for (request, in_flight) in self.table.iter_mut() {
            if remove_waiter(&mut in_flight.waiters, &mut is_it) {
                emptied = in_flight.waiters.iter().all(Option::is_none).then_some(request);
                break;
            }
        }
        self.remove(emptied?).and(emptied)
    }

    /// Removes a request whose deadline has passed.
    pub(super) fn expire(&mut self, now: Instant) -> Option<(u64, InFlightRequest<W>)> {
        let (request, _) = self.table.iter().find(|(_, in_flight)| in_flight.deadline <= now)?;
        self.remove(request).map(|in_flight| (request, in_flight))
    }

    /// Returns the earliest deadline of the requests in flight.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        self.table.iter().map(|(_, in_flight)| in_flight.deadline).min()
    }

    /// Offers something to the waiters in flight, one after the other. Returns whether one accepted.
    pub(super) fn find_waiter(&self, accepts: impl FnMut(&W) -> bool) -> bool {
        self.table.iter().flat_map(|(_, in_flight)| in_flight.waiters.iter().flatten()).any(accepts)
    }

    /// Removes and returns all waiters, after the connection broke.
    pub(super) fn drain(&mut self) -> Vec<W> {
        let requests: Vec<u64> = self.table.iter().map(|(request, _)| request).collect();
        let in_flight = requests.into_iter().filter_map(|request| self.table.remove(request));
        let mut all: Vec<W> = in_flight.flat_map(InFlightRequest::into_waiters).collect();
        all.extend(self.exists.drain());
        all.extend(self.lookups.drain());
        all
    }

    /// Removes a request from the table.
    fn remove(&mut self, request: u64) -> Option<InFlightRequest<W>> {
        let in_flight = self.table.remove(request)?;
        if let RequestKind::Keys(kind) = in_flight.kind {
            self.batcher(kind).returned();
        }
        Some(in_flight)
    }
}
