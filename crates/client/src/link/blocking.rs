//! [`BlockingLink`]: link for threads, without a thread of its own.
//!
//! Its callers do the I/O (leader and followers). Each writes its own frame. Then, if no thread reads, it **leads**: it
//! reads replies, passes them to their callers and sends queued keys until its own reply has arrived; then it passes
//! the reader role to a waiting thread. So a lone caller writes and reads its socket directly, and no thread wakes up
//! for it.
//!
//! ```text
//!   call ──► insert or push ──► write ──► no reader? ──yes──► lead ──► own reply ──► pass on the reader role
//!                                             │ no              ▲
//!                                             └──► park ────────┘ reader role received
//!                                                   └──► outcome received, or deadline
//! ```
//!
//! The second role is writing. A leader must not block on a write: a master that waits for the client to read would
//! never read from it. The bytes that the leader cannot write at once stay in the connection, and a parked thread gets
//! the writer role.
//!
//! Invariants:
//! - A thread that parks has seen, under the lock of the state, that there is a reader (`reading`) and that nothing is
//!   left unwritten (`unwritten`), and becomes a candidate for both roles in the same step.
//! - `reading` is false only if every thread whose request is in flight has yet to enter, and will see it.
//! - Roles are passed on under that lock, and only to threads that are parked or about to park. A thread that leaves at
//!   its deadline passes on the role it was given.
//! - Lock order: state, then the state of a waiter. The connection's own locks are taken with neither held.

mod connection;
mod waiter;

use std::sync::Arc;

use moontide_rt::sync::{Condvar, Mutex, MutexGuard};
use moontide_rt::time::Instant;
use moontide_types::{Key, Tenant};

use self::connection::{Connection, SendOutcome};
use self::waiter::{IoRole, Waiter, WakeReason};
use super::batcher::SingleKey;
use super::call::{self, Call, KeyResult, LookupEntry, LookupReply, Outcome};
use super::config::{Deadline, LinkConfig, LinkLoad, MasterHint};
use super::error::LinkError;
use super::frames::{self, Frame, RequestFrame};
use super::reconnect::Reconnect;
use super::tracker::{BatchedCall, OutgoingBatch, RequestTracker};

/// Link to a master for threads; any number of them share it.
///
/// Calls wait until the deadline of [`LinkConfig`], or of their own context. Dropping the link closes the connection.
#[derive(Debug)]
pub struct BlockingLink {
    config: LinkConfig,
    address: Arc<str>,
    state: Mutex<State>,
    /// Signaled when a request leaves the table, and when the connection breaks.
    not_full: Condvar,
    /// Signaled when an attempt to connect ends.
    connected: Condvar,
}

#[derive(Debug)]
struct State {
    connection: Option<Arc<Connection>>,
    /// A thread is connecting; others wait for it.
    connecting: bool,
    reconnect: Reconnect,
    /// This connection has delivered a reply.
    got_reply: bool,
    tracker: RequestTracker<Arc<Waiter>>,
    /// A thread has the reader role.
    reading: bool,
    /// Bytes are left in the connection, and no thread has the writer role.
    unwritten: bool,
    waiting_for_space: usize,
    hint: MasterHint,
}

impl State {
    fn is_current(&self, connection: &Arc<Connection>) -> bool {
        self.connection.as_ref().is_some_and(|current| Arc::ptr_eq(current, connection))
    }
}

impl BlockingLink {
    /// Connects. Fails within [`LinkConfig::connect_timeout_ms`]; the error names the address and the reason.
    pub fn connect(config: LinkConfig) -> Result<BlockingLink, LinkError> {
        BlockingLink::connect_until(config, None)
    }

    /// The same, with a deadline of the caller.
    pub(crate) fn connect_until(
        config: LinkConfig,
        until: Option<Instant>,
    ) -> Result<BlockingLink, LinkError> {
        config.validate()?;
        let address: Arc<str> = config.address.as_str().into();
        let own = config.connect_until(None);
        let connection = Connection::open(&config, &address, until.map_or(own, |until| until.min(own)))?;
        let state = State {
            tracker: RequestTracker::new(connection.inflight_max),
            connection: Some(Arc::new(connection)),
            connecting: false,
            reconnect: Reconnect::default(),
            got_reply: false,
            reading: false,
            unwritten: false,
            waiting_for_space: 0,
            hint: MasterHint::default(),
        };
        let (not_full, connected) = (Condvar::new(), Condvar::new());
        Ok(BlockingLink { config, address, state: Mutex::new(state), not_full, connected })
    }

    /// Returns whether the key is a complete object. Sent at once, or batched with other keys of this tenant.
    pub fn exist_one(&self, tenant: Tenant<'_>, key: Key<'_>) -> Result<KeyResult<bool>, LinkError> {
        self.exist_one_until(tenant, key, None)
    }

    /// The same, with a deadline of the caller.
    pub(crate) fn exist_one_until(
        &self,
        tenant: Tenant<'_>,
        key: Key<'_>,
        until: Option<Instant>,
    ) -> Result<KeyResult<bool>, LinkError> {
        self.single(BatchedCall::Exist, tenant, key, 0, until).map(Outcome::into_exist)
    }

    /// Returns the locations of an object. Sent at once, or batched with other keys of this tenant and lease.
    /// `lease_ms` 0 requests no lease.
    pub fn lookup_one(
        &self,
        tenant: Tenant<'_>,
        key: Key<'_>,
        lease_ms: u32,
    ) -> Result<KeyResult<LookupEntry>, LinkError> {
        self.lookup_one_until(tenant, key, lease_ms, None)
    }

    /// The same, with a deadline of the caller.
    pub(crate) fn lookup_one_until(
        &self,
        tenant: Tenant<'_>,
        key: Key<'_>,
        lease_ms: u32,
        until: Option<Instant>,
    ) -> Result<KeyResult<LookupEntry>, LinkError> {
        call::check_lease(lease_ms)?;
        self.single(BatchedCall::Lookup, tenant, key, lease_ms, until).map(Outcome::into_lookup)
    }

    /// Returns which keys are complete objects.
    pub fn exist(&self, tenant: Tenant<'_>, keys: &[Key<'_>]) -> Result<Vec<KeyResult<bool>>, LinkError> {
        self.exist_until(tenant, keys, None)
    }

    /// The same, with a deadline of the caller.
    pub(crate) fn exist_until(
        &self,
        tenant: Tenant<'_>,
        keys: &[Key<'_>],
        until: Option<Instant>,
    ) -> Result<Vec<KeyResult<bool>>, LinkError> {
        let deadline = self.config.deadline(until);
        let context = self.config.context(tenant, self.hint(), deadline.ms);
        let frame = self.exchange(call::outgoing_exist(&context, call::pack(keys)?)?, deadline)?;
        call::read_exist(frame, keys.len(), &self.address)
    }

    /// Returns the locations of objects. `lease_ms` 0 requests no lease.
    pub fn lookup(
        &self,
        tenant: Tenant<'_>,
        keys: &[Key<'_>],
        lease_ms: u32,
        attributes: bool,
    ) -> Result<LookupReply, LinkError> {
        self.lookup_until(tenant, keys, lease_ms, attributes, None)
    }

    /// The same, with a deadline of the caller.
    pub(crate) fn lookup_until(
        &self,
        tenant: Tenant<'_>,
        keys: &[Key<'_>],
        lease_ms: u32,
        attributes: bool,
        until: Option<Instant>,
    ) -> Result<LookupReply, LinkError> {
        let deadline = self.config.deadline(until);
        let context = self.config.context(tenant, self.hint(), deadline.ms);
        let outgoing = call::outgoing_lookup(&context, call::pack(keys)?, lease_ms, attributes)?;
        call::read_lookup(self.exchange(outgoing, deadline)?, keys.len(), &self.address)
    }

    /// Makes any call of the framed protocol, with the deadline of its context. The context of the reply may hold an
    /// error.
    pub fn call<'a, C: Call<'a>>(&self, request: &C) -> Result<C::Reply, LinkError> {
        self.call_for(request, request.context().timeout_ms)
    }

    /// The same, with a time to wait other than the timeout of the context.
    pub(crate) fn call_for<'a, C: Call<'a>>(&self, request: &C, wait_ms: u32) -> Result<C::Reply, LinkError> {
        let outgoing = call::outgoing(request)?;
        call::read(self.exchange(outgoing, Deadline::after(wait_ms))?, &self.address)
    }

    /// Sets the map version and term that further calls send to the master.
    pub fn set_known(&self, hint: MasterHint) {
        self.state.lock().hint = hint;
    }

    /// Returns the load of the link.
    pub fn load(&self) -> LinkLoad {
        self.state.lock().tracker.load()
    }

    fn hint(&self) -> MasterHint {
        self.state.lock().hint
    }

    /// Sends one key, batched with others.
    fn single(
        &self,
        kind: BatchedCall,
        tenant: Tenant<'_>,
        key: Key<'_>,
        lease_ms: u32,
        until: Option<Instant>,
    ) -> Result<Outcome, LinkError> {
        let deadline = self.config.deadline(until);
        let waiter = Waiter::new();
        let mut state = self.state.lock();
        let connection = self.connected(&mut state, deadline)?;
        let single = SingleKey { tenant, key, lease_ms, deadline: deadline.at, waiter: waiter.clone() };
        state.tracker.push(kind, single);
        let (batch, hint) = (state.tracker.pop_batch(), state.hint);
        drop(state);
        if let Some(batch) = batch {
            let frame = batch.encode(&self.config, hint);
            self.send(&connection, &frame, Some(deadline));
        }
        self.wait(&waiter, deadline)
    }

    /// Sends one request and waits for its reply.
    fn exchange(&self, outgoing: RequestFrame, deadline: Deadline) -> Result<Frame, LinkError> {
        let waiter = Waiter::new();
        let mut state = self.state.lock();
        let mut connection = self.connected(&mut state, deadline)?;
        while state.tracker.is_full() {
            state.waiting_for_space += 1;
            let timed_out = self.not_full.wait_until(&mut state, deadline.at).timed_out();
            state.waiting_for_space -= 1;
            if timed_out && state.tracker.is_full() {
                return Err(deadline.error(&self.address));
            }
            connection = self.connected(&mut state, deadline)?; // the old one may have broken
        }
        let request = state.tracker.insert(outgoing.kind(), deadline.at, waiter.clone());
        drop(state);
        self.send(&connection, &outgoing.numbered(request), Some(deadline));
        self.wait(&waiter, deadline).map(Outcome::into_frame)
    }

    /// Returns the connection; reconnects if it broke. One thread connects, the others wait for it.
    fn connected(
        &self,
        state: &mut MutexGuard<'_, State>,
        deadline: Deadline,
    ) -> Result<Arc<Connection>, LinkError> {
        loop {
            if let Some(connection) = &state.connection {
                return Ok(connection.clone());
            }
            if state.connecting {
                if self.connected.wait_until(state, deadline.at).timed_out() {
                    return Err(deadline.error(&self.address));
                }
                continue;
            }
            state.reconnect.check(Instant::now())?;
            state.connecting = true;
            let until = self.config.connect_until(Some(deadline));
            let opened = MutexGuard::unlocked(state, || Connection::open(&self.config, &self.address, until));
            state.connecting = false;
            self.connected.notify_all();
            match opened {
                Ok(connection) => {
                    state.tracker = RequestTracker::new(connection.inflight_max);
                    state.connection = Some(Arc::new(connection));
                    state.got_reply = false;
                }
                Err(error) => {
                    state.reconnect.failed(Instant::now(), error.clone());
                    return Err(error);
                }
            }
        }
    }

    /// Waits for the outcome; reads or writes meanwhile if the thread has the role.
    fn wait(&self, waiter: &Arc<Waiter>, deadline: Deadline) -> Result<Outcome, LinkError> {
        let mut role = self.enter(waiter);
        loop {
            match role {
                Some(IoRole::Read(connection)) => self.lead(&connection, waiter, deadline),
                Some(IoRole::Write(connection)) => self.flush(&connection, deadline),
                None => {}
            }
            role = match waiter.park(deadline.at) {
                WakeReason::Outcome(outcome) => return outcome,
                WakeReason::Role(role) => Some(role),
                WakeReason::TimedOut => return self.leave(waiter, deadline),
                WakeReason::Idle => self.enter(waiter),
            }
        }
    }

    /// Takes a role that no thread has. Otherwise the waiter becomes a candidate for roles.
    fn enter(&self, waiter: &Waiter) -> Option<IoRole> {
        let mut state = self.state.lock();
        if waiter.is_settled() {
            return None;
        }
        // A waiting thread has a connection: a broken one settles all waiters.
        let connection = state.connection.clone()?;
        if std::mem::take(&mut state.unwritten) {
            return Some(IoRole::Write(connection));
        }
        if !std::mem::replace(&mut state.reading, true) {
            return Some(IoRole::Read(connection));
        }
        waiter.set_idle();
        None
    }

    /// Reads replies until the waiter's own arrives or its deadline passes.
    fn lead(&self, connection: &Arc<Connection>, waiter: &Waiter, deadline: Deadline) {
        let _role = ReaderGuard { link: self, connection };
        let mut incoming = connection.incoming();
        loop {
            loop {
                match incoming.next() {
                    Ok(Some(frame)) => self.deliver(connection, frame),
                    Ok(None) => break,
                    Err(error) => return self.fail(connection, LinkError::protocol(&self.address, error)),
                }
            }
            if waiter.is_settled() {
                return;
            }
            let Some(remaining) = deadline.remaining() else { return };
            if connection.receive(&mut incoming, remaining).is_err() {
                return self.fail(connection, LinkError::lost(&self.address));
            }
        }
    }

    /// Passes a reply to its waiters.
    fn deliver(&self, connection: &Arc<Connection>, frame: Frame) {
        let mut state = self.state.lock();
        if !state.is_current(connection) {
            return;
        }
        let request = match state.tracker.take_reply(&frame.header) {
            Ok(Some(request)) => request,
            Ok(None) => return,
            Err(error) => {
                drop(state);
                return self.fail(connection, LinkError::protocol(&self.address, error));
            }
        };
        state.got_reply = true;
        state.reconnect.succeeded();
        self.send_ready(state, connection);
        request.settle(frame, &self.address, |waiter, outcome| waiter.settle(outcome));
    }

    /// Sends the batches that are ready after a request has left the table. Sends them before any thread wakes up, so
    /// that the master has work meanwhile.
    fn send_ready(&self, mut state: MutexGuard<'_, State>, connection: &Arc<Connection>) {
        let batches: Vec<OutgoingBatch> = std::iter::from_fn(|| state.tracker.pop_batch()).collect();
        if state.waiting_for_space > 0 && !state.tracker.is_full() {
            self.not_full.notify_one();
        }
        let hint = state.hint;
        drop(state);
        for batch in batches {
            self.send(connection, &batch.encode(&self.config, hint), None);
        }
    }

    /// Writes a frame, or leaves it to the thread that is writing. Does not wait without a deadline.
    fn send(&self, connection: &Arc<Connection>, frame: &[u8], deadline: Option<Deadline>) {
        match connection.send(frame, deadline) {
            Ok(SendOutcome::All) => {}
            Ok(SendOutcome::Stuck) => self.pass_writing_on(connection),
            Err(_) => self.fail(connection, LinkError::lost(&self.address)),
        }
    }

    /// Performs the writer role.
    fn flush(&self, connection: &Arc<Connection>, deadline: Deadline) {
        match connection.flush(Some(deadline)) {
            Ok(SendOutcome::All) => {}
            Ok(SendOutcome::Stuck) => self.pass_writing_on(connection),
            Err(_) => self.fail(connection, LinkError::lost(&self.address)),
        }
    }

    /// Passes the right to write (the connection's `writing`) to a parked thread. If there is none, the next thread
    /// that enters takes it.
    fn pass_writing_on(&self, connection: &Arc<Connection>) {
        let mut state = self.state.lock();
        if state.is_current(connection) {
            state.unwritten =
                !state.tracker.find_waiter(|waiter| waiter.give(IoRole::Write(connection.clone())));
        }
    }

    /// Passes the right to read (`reading`) to a parked thread. If there is none, the next thread that enters takes it.
    fn pass_reading_on(&self, connection: &Arc<Connection>) {
        let mut state = self.state.lock();
        if state.is_current(connection) {
            state.reading = state.tracker.find_waiter(|waiter| waiter.give(IoRole::Read(connection.clone())));
        }
    }

    /// Gives the reader role to a parked thread if no thread has it: threads with queued keys park and rely on the
    /// requests in flight.
    fn appoint_reader(&self, connection: &Arc<Connection>) {
        let mut state = self.state.lock();
        if state.is_current(connection) && !state.reading {
            state.reading = state.tracker.find_waiter(|waiter| waiter.give(IoRole::Read(connection.clone())));
        }
    }

    /// Cancels a call at its deadline.
    fn leave(&self, waiter: &Arc<Waiter>, deadline: Deadline) -> Result<Outcome, LinkError> {
        let mut state = self.state.lock();
        let (outcome, role) = waiter.close();
        let cancelled = state.tracker.cancel(|other| Arc::ptr_eq(other, waiter));
        if let Some(connection) = state.connection.clone() {
            self.send_ready(state, &connection);
            if let Some(request) = cancelled
                && connection.send_if_idle(&frames::cancel(request)).is_err()
            {
                self.fail(&connection, LinkError::lost(&self.address));
            }
            self.appoint_reader(&connection);
        } else {
            drop(state);
        }
        match role {
            Some(IoRole::Read(connection)) => self.pass_reading_on(&connection),
            Some(IoRole::Write(connection)) => self.pass_writing_on(&connection),
            None => {}
        }
        outcome.unwrap_or_else(|| Err(deadline.error(&self.address)))
    }

    /// Drops a broken connection: all waiters get the error, and the next call reconnects.
    fn fail(&self, connection: &Arc<Connection>, error: LinkError) {
        let mut state = self.state.lock();
        if !state.is_current(connection) {
            return;
        }
        state.connection = None;
        (state.reading, state.unwritten) = (false, false);
        if !state.got_reply {
            state.reconnect.failed(Instant::now(), error.clone());
        }
        // Under the lock: no thread may find the link without a connection before its own call is failed.
        state.tracker.drain().iter().for_each(|waiter| waiter.settle(Err(error.clone())));
        self.not_full.notify_all();
        drop(state);
        // Wakes threads that still read or write.
        connection.shutdown();
    }
}

/// The reader role. Dropping it passes the role on, also if the leader panics.
struct ReaderGuard<'a> {
    link: &'a BlockingLink,
    connection: &'a Arc<Connection>,
}

impl Drop for ReaderGuard<'_> {
    fn drop(&mut self) {
        self.link.pass_reading_on(self.connection);
    }
}
