//! [`BlockingLink`]: a link for threads, without a thread of its own.
//!
//! Its callers do the work (leader and followers). Each writes its own frame. Then, if nobody reads, it **leads**: it
//! reads replies, hands others theirs, sends gathered keys on, until its own has come; then it makes somebody lead
//! who still waits. So a lone caller writes and reads its socket directly and no thread is woken for it.
//!
//! ```text
//!   call ──► board or join ──► write ──► nobody reads? ──yes──► lead ──► own reply came ──► pass reading on
//!                                             │ no                ▲
//!                                             └──► park ──────────┘ made leader
//!                                                   └──► outcome handed over, or deadline
//! ```
//!
//! There is a second duty besides reading. A leader must not wait until it can write: a master that waits for us to
//! read would never read from us. What it cannot write at once is left in the connection, and a parked thread is
//! made to write it.
//!
//! Invariants:
//! - a thread that parks has seen, under the lock of the state, that somebody reads (`reading`) and that nothing is
//!   left unwritten (`unwritten`), and becomes a candidate for both in the same step;
//! - `reading` is false only if every thread whose request is in flight has yet to enter, and will see it;
//! - duties are handed over under that lock, and only to threads that are parked or about to park; one that leaves
//!   because of its deadline hands on what it was given;
//! - lock order: state, then a waiter's cell; the connection's own locks are taken with neither held.

mod connection;
mod waiter;

use std::sync::Arc;
use std::time::Instant;

use moontide_types::{Key, Tenant};
use parking_lot::{Condvar, Mutex, MutexGuard};

use self::connection::{Connection, Sent};
use self::waiter::{Duty, Waiter, Wake};
use super::backoff::Backoff;
use super::call::{self, Call, KeyResult, Located, LookupReply, Outcome};
use super::config::{Deadline, Known, LinkConfig, LinkLoad};
use super::error::LinkError;
use super::frames::{self, Frame, Outgoing};
use super::gather::Single;
use super::traffic::{Departure, Gathered, Traffic};

/// A link to a master for threads; any number of them share it.
///
/// Calls wait until the deadline of [`LinkConfig`], or of their own context. Dropping the link closes the connection.
#[derive(Debug)]
pub struct BlockingLink {
    config: LinkConfig,
    address: Arc<str>,
    state: Mutex<State>,
    /// A place in flight became free, or the connection broke.
    room: Condvar,
    /// An attempt to connect ended.
    connected: Condvar,
}

#[derive(Debug)]
struct State {
    connection: Option<Arc<Connection>>,
    /// Somebody is connecting; others wait for it.
    connecting: bool,
    backoff: Backoff,
    /// Something was answered on this connection.
    answered: bool,
    traffic: Traffic<Arc<Waiter>>,
    /// Somebody reads the connection, or has been made to.
    reading: bool,
    /// Something is left in the connection to be written, and nobody has been made to.
    unwritten: bool,
    waiting_for_room: usize,
    known: Known,
}

impl State {
    fn is_current(&self, connection: &Arc<Connection>) -> bool {
        self.connection.as_ref().is_some_and(|current| Arc::ptr_eq(current, connection))
    }
}

impl BlockingLink {
    /// Connects. Fails within [`LinkConfig::connect_ms`], saying where and why.
    pub fn connect(config: LinkConfig) -> Result<BlockingLink, LinkError> {
        config.validate()?;
        let address: Arc<str> = config.address.as_str().into();
        let connection = Connection::open(&config, &address, config.connect_until(None))?;
        let state = State {
            traffic: Traffic::new(connection.inflight_max),
            connection: Some(Arc::new(connection)),
            connecting: false,
            backoff: Backoff::default(),
            answered: false,
            reading: false,
            unwritten: false,
            waiting_for_room: 0,
            known: Known::default(),
        };
        let (room, connected) = (Condvar::new(), Condvar::new());
        Ok(BlockingLink { config, address, state: Mutex::new(state), room, connected })
    }

    /// Is the key a complete object? Leaves at once, or together with other keys of this tenant.
    pub fn exist_one(&self, tenant: Tenant<'_>, key: Key<'_>) -> Result<KeyResult<bool>, LinkError> {
        self.single(Gathered::Exist, tenant, key, 0).map(Outcome::into_exist)
    }

    /// Where is the object? Leaves at once, or together with other keys of this tenant and lease. 0 asks for no lease.
    pub fn lookup_one(
        &self,
        tenant: Tenant<'_>,
        key: Key<'_>,
        lease_ms: u32,
    ) -> Result<KeyResult<Located>, LinkError> {
        call::check_lease(lease_ms)?;
        self.single(Gathered::Lookup, tenant, key, lease_ms).map(Outcome::into_lookup)
    }

    /// Which keys are complete objects?
    pub fn exist(&self, tenant: Tenant<'_>, keys: &[Key<'_>]) -> Result<Vec<KeyResult<bool>>, LinkError> {
        let deadline = self.config.deadline();
        let context = self.config.context(tenant, self.known(), deadline.ms);
        let frame = self.exchange(call::outgoing_exist(&context, call::pack(keys)?)?, deadline)?;
        call::read_exist(frame, keys.len(), &self.address)
    }

    /// Where are the objects? 0 asks for no lease.
    pub fn lookup(
        &self,
        tenant: Tenant<'_>,
        keys: &[Key<'_>],
        lease_ms: u32,
        attributes: bool,
    ) -> Result<LookupReply, LinkError> {
        let deadline = self.config.deadline();
        let context = self.config.context(tenant, self.known(), deadline.ms);
        let outgoing = call::outgoing_lookup(&context, call::pack(keys)?, lease_ms, attributes)?;
        call::read_lookup(self.exchange(outgoing, deadline)?, keys.len(), &self.address)
    }

    /// Any call of the framed protocol, with the deadline of its context. The answer may say, in its own context,
    /// that the call failed.
    pub fn call<'a, C: Call<'a>>(&self, request: &C) -> Result<C::Reply, LinkError> {
        let outgoing = call::outgoing(request)?;
        let deadline = Deadline::after(request.context().deadline_ms);
        call::read(self.exchange(outgoing, deadline)?, &self.address)
    }

    /// What the contexts of further calls say about the master.
    pub fn set_known(&self, known: Known) {
        self.state.lock().known = known;
    }

    /// How busy the link is.
    pub fn load(&self) -> LinkLoad {
        self.state.lock().traffic.load()
    }

    fn known(&self) -> Known {
        self.state.lock().known
    }

    /// One key, gathered.
    fn single(
        &self,
        kind: Gathered,
        tenant: Tenant<'_>,
        key: Key<'_>,
        lease_ms: u32,
    ) -> Result<Outcome, LinkError> {
        let deadline = self.config.deadline();
        let waiter = Waiter::new();
        let mut state = self.state.lock();
        let connection = self.connected(&mut state, deadline)?;
        let single = Single { tenant, key, lease_ms, deadline: deadline.at, waiter: waiter.clone() };
        state.traffic.join(kind, single);
        let (departure, known) = (state.traffic.depart(), state.known);
        drop(state);
        if let Some(departure) = departure {
            let frame = departure.encode(&self.config, known);
            self.send(&connection, &frame, Some(deadline));
        }
        self.wait(&waiter, deadline)
    }

    /// One request of one caller.
    fn exchange(&self, outgoing: Outgoing, deadline: Deadline) -> Result<Frame, LinkError> {
        let waiter = Waiter::new();
        let mut state = self.state.lock();
        let mut connection = self.connected(&mut state, deadline)?;
        while state.traffic.is_full() {
            state.waiting_for_room += 1;
            let timed_out = self.room.wait_until(&mut state, deadline.at).timed_out();
            state.waiting_for_room -= 1;
            if timed_out && state.traffic.is_full() {
                return Err(deadline.error(&self.address));
            }
            connection = self.connected(&mut state, deadline)?; // it may have broken meanwhile
        }
        let request = state.traffic.board(outgoing.kind(), deadline.at, waiter.clone());
        drop(state);
        self.send(&connection, &outgoing.numbered(request), Some(deadline));
        self.wait(&waiter, deadline).map(Outcome::into_frame)
    }

    /// The connection; made anew if it broke. One thread connects, the others wait for it.
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
            state.backoff.check(Instant::now())?;
            state.connecting = true;
            let until = self.config.connect_until(Some(deadline));
            let opened = MutexGuard::unlocked(state, || Connection::open(&self.config, &self.address, until));
            state.connecting = false;
            self.connected.notify_all();
            match opened {
                Ok(connection) => {
                    state.traffic = Traffic::new(connection.inflight_max);
                    state.connection = Some(Arc::new(connection));
                    state.answered = false;
                }
                Err(error) => {
                    state.backoff.failed(Instant::now(), error.clone());
                    return Err(error);
                }
            }
        }
    }

    /// Waits for the outcome, doing what has to be done meanwhile.
    fn wait(&self, waiter: &Arc<Waiter>, deadline: Deadline) -> Result<Outcome, LinkError> {
        let mut duty = self.enter(waiter);
        loop {
            match duty {
                Some(Duty::Read(connection)) => self.lead(&connection, waiter, deadline),
                Some(Duty::Write(connection)) => self.flush(&connection, deadline),
                None => {}
            }
            duty = match waiter.park(deadline.at) {
                Wake::Outcome(outcome) => return outcome,
                Wake::Duty(duty) => Some(duty),
                Wake::TimedOut => return self.leave(waiter, deadline),
                Wake::Idle => self.enter(waiter),
            }
        }
    }

    /// Takes a duty that nobody has; otherwise the waiter becomes one that can be given a duty.
    fn enter(&self, waiter: &Waiter) -> Option<Duty> {
        let mut state = self.state.lock();
        if waiter.is_settled() {
            return None;
        }
        // Whoever waits has a connection: a broken one settles everybody.
        let connection = state.connection.clone()?;
        if std::mem::take(&mut state.unwritten) {
            return Some(Duty::Write(connection));
        }
        if !std::mem::replace(&mut state.reading, true) {
            return Some(Duty::Read(connection));
        }
        waiter.set_idle();
        None
    }

    /// Reads replies until the waiter's own has come or its time is over.
    fn lead(&self, connection: &Arc<Connection>, waiter: &Waiter, deadline: Deadline) {
        let _leadership = Leadership { link: self, connection };
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

    /// Hands a reply to whoever waits for it.
    fn deliver(&self, connection: &Arc<Connection>, frame: Frame) {
        let mut state = self.state.lock();
        if !state.is_current(connection) {
            return;
        }
        let flight = match state.traffic.arrive(&frame.header) {
            Ok(Some(flight)) => flight,
            Ok(None) => return,
            Err(error) => {
                drop(state);
                return self.fail(connection, LinkError::protocol(&self.address, error));
            }
        };
        state.answered = true;
        state.backoff.succeeded();
        self.depart(state, connection);
        flight.settle(frame, &self.address, |waiter, outcome| waiter.settle(outcome));
    }

    /// After something was taken out of flight: what may leave now does, before anybody is woken, so that the
    /// master has something to do meanwhile.
    fn depart(&self, mut state: MutexGuard<'_, State>, connection: &Arc<Connection>) {
        let departures: Vec<Departure> = std::iter::from_fn(|| state.traffic.depart()).collect();
        if state.waiting_for_room > 0 && !state.traffic.is_full() {
            self.room.notify_one();
        }
        let known = state.known;
        drop(state);
        for departure in departures {
            self.send(connection, &departure.encode(&self.config, known), None);
        }
    }

    /// Writes a frame, or leaves it to the thread that is writing. Without a deadline it does not wait.
    fn send(&self, connection: &Arc<Connection>, frame: &[u8], deadline: Option<Deadline>) {
        match connection.send(frame, deadline) {
            Ok(Sent::All) => {}
            Ok(Sent::Stuck) => self.pass_writing_on(connection),
            Err(_) => self.fail(connection, LinkError::lost(&self.address)),
        }
    }

    /// The duty to write.
    fn flush(&self, connection: &Arc<Connection>, deadline: Deadline) {
        match connection.flush(Some(deadline)) {
            Ok(Sent::All) => {}
            Ok(Sent::Stuck) => self.pass_writing_on(connection),
            Err(_) => self.fail(connection, LinkError::lost(&self.address)),
        }
    }

    /// Makes a parked thread write, by right of the connection's `writing`. If there is none, whoever waits next does it.
    fn pass_writing_on(&self, connection: &Arc<Connection>) {
        let mut state = self.state.lock();
        if state.is_current(connection) {
            state.unwritten =
                !state.traffic.find_waiter(|waiter| waiter.give(Duty::Write(connection.clone())));
        }
    }

    /// Makes a parked thread read, by right of `reading`. If there is none, whoever waits next takes the lead by
    /// itself.
    fn pass_reading_on(&self, connection: &Arc<Connection>) {
        let mut state = self.state.lock();
        if state.is_current(connection) {
            state.reading = state.traffic.find_waiter(|waiter| waiter.give(Duty::Read(connection.clone())));
        }
    }

    /// Makes a parked thread read if nobody does: those who gathered have parked, trusting in those in flight.
    fn appoint_reader(&self, connection: &Arc<Connection>) {
        let mut state = self.state.lock();
        if state.is_current(connection) && !state.reading {
            state.reading = state.traffic.find_waiter(|waiter| waiter.give(Duty::Read(connection.clone())));
        }
    }

    /// The deadline passed.
    fn leave(&self, waiter: &Arc<Waiter>, deadline: Deadline) -> Result<Outcome, LinkError> {
        let mut state = self.state.lock();
        let (outcome, duty) = waiter.close();
        let cancelled = state.traffic.leave(|other| Arc::ptr_eq(other, waiter));
        if let Some(connection) = state.connection.clone() {
            self.depart(state, &connection);
            if let Some(request) = cancelled
                && connection.send_if_idle(&frames::cancel(request)).is_err()
            {
                self.fail(&connection, LinkError::lost(&self.address));
            }
            self.appoint_reader(&connection);
        } else {
            drop(state);
        }
        match duty {
            Some(Duty::Read(connection)) => self.pass_reading_on(&connection),
            Some(Duty::Write(connection)) => self.pass_writing_on(&connection),
            None => {}
        }
        outcome.unwrap_or_else(|| Err(deadline.error(&self.address)))
    }

    /// The connection is of no more use: everybody who waits is told, and the next call connects again.
    fn fail(&self, connection: &Arc<Connection>, error: LinkError) {
        let mut state = self.state.lock();
        if !state.is_current(connection) {
            return;
        }
        state.connection = None;
        (state.reading, state.unwritten) = (false, false);
        if !state.answered {
            state.backoff.failed(Instant::now(), error.clone());
        }
        // Under the lock: nobody may find the link without connection and not know yet that its call failed.
        state.traffic.drain().iter().for_each(|waiter| waiter.settle(Err(error.clone())));
        self.room.notify_all();
        drop(state);
        // Whoever still reads or writes it wakes up.
        connection.shutdown();
    }
}

/// The duty to read, as long as somebody does it. Its end passes it on, also if the leader panics.
struct Leadership<'a> {
    link: &'a BlockingLink,
    connection: &'a Arc<Connection>,
}

impl Drop for Leadership<'_> {
    fn drop(&mut self) {
        self.link.pass_reading_on(self.connection);
    }
}
