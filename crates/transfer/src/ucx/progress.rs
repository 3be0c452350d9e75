//! The progress thread: the only one that calls into UCX.
//!
//! Owns the context, the worker, every endpoint, key, memory registration and operation in flight.
//!
//! ```text
//!  endpoint:   Open ──close(reason)──▶ Closing ──nothing in flight──▶ Closed ──handle dropped──▶ (gone)
//!                                         └─── STUCK_MAX passed ──────▲   (operations leaked, see below)
//!
//!  get:        issued ──▶ callback ──▶ done
//!  put:        issued ──▶ callback and flush ──▶ done       one flush covers every put issued before it
//! ```
//!
//! Invariants:
//! - UCX's callbacks only note what happened in [`mail`]; it is read after UCX has returned. So UCX is never entered
//!   from a callback, and no panic of ours can unwind through it.
//! - Closing by force returns at once while UCX still cancels what is in flight. Buffers are given back by the
//!   operations' own callbacks, never by the return of the close.
//! - A key or registration outlives the operations that use it.
//! - If UCX does not give an operation back within [`STUCK_MAX`] of the close, the operation fails: as
//!   [`UcxError::Stuck`] if UCX may still touch its buffer, else (only the flush of a put is missing) with the reason of
//!   the close. Context and worker are leaked when the thread ends.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ffi::{CStr, c_void};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::context::{Context, Worker, check};
use super::envelope::{Envelope, Kind};
use super::error::{Status, Transports, UcxError};
use super::library::{MIN_FOR_TRANSPORTS, MIN_FOR_USE, Ucx};
use super::mail::{self, Completion};
use super::spin::Spin;
use super::state::{Ep, InFlight, Key, Pending, Region, State};
use super::sys::{self, Api, Issued, RawStatus, Zeroed};
use super::worker::{
    Command, Direction, Done, Endpoint, Local, Registration, RemoteKey, Reply, Shared, Transfer, WorkerConfig,
};

/// How long UCX may take to give operations back after their endpoint was closed by force. It cancels what it can
/// and waits for what the network card still holds; that takes milliseconds, or a link timeout at worst.
pub(super) const STUCK_MAX: Duration = Duration::from_secs(5);
/// How long a stopping worker waits for the same.
pub(super) const STOP_MAX: Duration = Duration::from_secs(3);

/// Rounds of progress before commands and deadlines are looked at again.
const PROGRESS_BURST: u32 = 32;

/// Longest wait without a look at UCX: idle, with operations in flight, and while endpoints close. UCX announces
/// events on its descriptor; these bounds only limit what a missed one could cost.
const NAP_IDLE: Duration = Duration::from_secs(1);
const NAP_BUSY: Duration = Duration::from_millis(100);
const NAP_CLOSING: Duration = Duration::from_millis(1);

/// Flushes in flight per endpoint. One would make each put wait for two round trips, unbounded would flush each put
/// by itself; with four, puts that arrive during a round trip share the next free flush.
const FLUSHES_MAX: usize = 4;

/// Lanes that UCX can report for one endpoint (its UCP_MAX_LANES is 16 or 64).
const LANES_MAX: usize = 64;

/// Body of the thread. Answers `started` with the worker's address once it serves.
pub(super) fn run(
    shared: Arc<Shared>,
    ucx: Ucx,
    config: &WorkerConfig,
    started: &SyncSender<Result<Vec<u8>, UcxError>>,
) {
    shared.adopt();
    // Runs after the loop, and also if a bug makes it panic: nobody may wait for a thread that is gone.
    struct CloseInbox(Arc<Shared>);
    impl Drop for CloseInbox {
        fn drop(&mut self) {
            self.0.close();
        }
    }
    let _close = CloseInbox(Arc::clone(&shared));
    let (mut engine, address) = match Engine::new(Arc::clone(&shared), ucx, config) {
        Ok(engine) => engine,
        Err(error) => {
            let _ = started.send(Err(error));
            return;
        }
    };
    if started.send(Ok(address)).is_err() {
        return;
    }
    let stopped = engine.serve();
    shared.close();
    engine.stop();
    for reply in stopped {
        let _ = reply.send(Ok(()));
    }
}

struct Engine {
    // The order of the first two fields matters: the worker goes before its context.
    worker: Worker,
    context: Context,
    api: &'static Api,
    ucx: Ucx,
    shared: Arc<Shared>,
    owner: u64,
    allow_tcp: bool,
    next_id: u64,
    endpoints: HashMap<u64, Ep>,
    keys: HashMap<u64, Key>,
    regions: HashMap<u64, Region>,
    pending: HashMap<u64, Pending>,
    /// Deadlines of transfers and connects in `pending`.
    deadlines: BTreeSet<(Instant, u64)>,
    /// Endpoints with puts to flush.
    dirty: Vec<u64>,
    /// Endpoints that are closing.
    closing: Vec<u64>,
    /// Completions to run, then answers to give: in this order, since an abort promises the former.
    completed: Vec<(Done, Result<(), UcxError>)>,
    answers: Vec<(Reply<()>, Result<(), UcxError>)>,
    /// Some operation never came back.
    stuck: bool,
}

impl Engine {
    fn new(shared: Arc<Shared>, ucx: Ucx, config: &WorkerConfig) -> Result<(Self, Vec<u8>), UcxError> {
        let context = Context::new(ucx.api(), config)?;
        let worker = Worker::new(&context)?;
        let mut owner = [0; 8];
        rustix::rand::getrandom(&mut owner, rustix::rand::GetRandomFlags::empty())
            .map_err(|errno| UcxError::Os { call: "getrandom", errno })?;
        let owner = u64::from_le_bytes(owner);
        let payload = worker.address()?;
        let address = Envelope {
            kind: Kind::Address,
            made_by: ucx.version(),
            owner,
            base: 0,
            range: 0,
            payload: &payload,
        }
        .encode();
        let engine = Self {
            worker,
            context,
            api: ucx.api(),
            ucx,
            shared,
            owner,
            allow_tcp: config.allow_tcp,
            next_id: 1,
            endpoints: HashMap::new(),
            keys: HashMap::new(),
            regions: HashMap::new(),
            pending: HashMap::new(),
            deadlines: BTreeSet::new(),
            dirty: Vec::new(),
            closing: Vec::new(),
            completed: Vec::new(),
            answers: Vec::new(),
            stuck: false,
        };
        Ok((engine, address))
    }

    /// Serves until told to stop; returns who wants to know when that is done.
    fn serve(&mut self) -> Vec<Reply<()>> {
        let mut commands = VecDeque::new();
        let mut spin = Spin::default();
        let mut stops = Vec::new();
        loop {
            self.shared.take(&mut commands);
            let mut worked = !commands.is_empty();
            for command in commands.drain(..) {
                match command {
                    Command::Stop { reply } => stops.push(reply),
                    other => self.handle(other),
                }
            }
            worked |= self.turn();
            if !stops.is_empty() {
                return stops;
            }
            if worked {
                spin.worked();
            } else if spin.idle(Instant::now()) {
                self.sleep();
            } else {
                std::hint::spin_loop();
            }
        }
    }

    /// One look at everything but the commands. Says whether anything happened.
    fn turn(&mut self) -> bool {
        self.flush_puts();
        let mut worked = false;
        for _ in 0..PROGRESS_BURST {
            // SAFETY: a live worker, on its own thread.
            if unsafe { (self.api.ucp_worker_progress)(self.worker.raw) } == 0 {
                break;
            }
            worked = true;
        }
        worked |= self.read_mail();
        self.look_at_clock();
        worked | self.hand_back()
    }

    /// Blocks until there is an event of UCX, a command, or something to do by the clock.
    fn sleep(&mut self) {
        // SAFETY: a live worker, on its own thread.
        let status = unsafe { (self.api.ucp_worker_arm)(self.worker.raw) };
        if status == sys::UCS_ERR_BUSY || !self.shared.fall_asleep() {
            return;
        }
        let mut nap = match (self.closing.is_empty(), self.pending.is_empty()) {
            (false, _) => NAP_CLOSING,
            (true, false) => NAP_BUSY,
            (true, true) => NAP_IDLE,
        };
        if let Some((deadline, _)) = self.deadlines.first() {
            nap = nap.min(deadline.saturating_duration_since(Instant::now()));
        }
        // SAFETY: UCX keeps the descriptor open as long as the worker, which outlives this borrow.
        let events = unsafe { BorrowedFd::borrow_raw(self.worker.event_fd) };
        let mut fds =
            [PollFd::from_borrowed_fd(events, PollFlags::IN), PollFd::new(&self.shared.wake, PollFlags::IN)];
        let timeout = Timespec { tv_sec: nap.as_secs() as i64, tv_nsec: i64::from(nap.subsec_nanos()) };
        // An error (a signal) is a short nap.
        let _ = poll(&mut fds, Some(&timeout));
        if !fds[1].revents().is_empty() {
            // Whether it was readable or not: the queue is looked at next.
            let _ = rustix::io::read(&self.shared.wake, &mut [0u8; 8]);
        }
    }

    fn handle(&mut self, command: Command) {
        match command {
            Command::Register { base, len, reply } => {
                let _ = reply.send(self.register(base, len));
            }
            Command::Unregister { id, reply } => {
                if let Some(region) = self.regions.get_mut(&id) {
                    region.dropped = Some(reply);
                    self.release_region(id);
                } else if let Some(reply) = reply {
                    let _ = reply.send(Ok(()));
                }
            }
            Command::Connect { address, owner, deadline, reply } => {
                self.connect(&address, owner, deadline, reply)
            }
            Command::Import { endpoint, key, base, len, reply } => {
                let _ = reply.send(self.import(endpoint, &key, base, len));
            }
            Command::Forget { key } => {
                if let Some(found) = self.keys.get_mut(&key) {
                    found.dropped = true;
                    self.release_key(key);
                }
            }
            Command::Transfer(transfer) => self.transfer(transfer),
            Command::Abort { endpoint, reply } => {
                self.close(endpoint, UcxError::Aborted);
                match self.endpoints.get_mut(&endpoint) {
                    Some(ep) if matches!(ep.state, State::Closing { .. }) => ep.waiting.push(reply),
                    Some(ep) if ep.keeps_buffers => self.answers.push((reply, Err(UcxError::Stuck))),
                    // Closed: completions of this round still come first.
                    _ => self.answers.push((reply, Ok(()))),
                }
            }
            Command::Close { endpoint } => {
                if let Some(ep) = self.endpoints.get_mut(&endpoint) {
                    ep.dropped = true;
                    self.close(endpoint, UcxError::Aborted);
                    self.settle(endpoint);
                }
            }
            Command::Stop { .. } => unreachable!("serve() keeps these"),
        }
    }

    fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn register(&mut self, base: Local, len: usize) -> Result<Registration, UcxError> {
        let params = sys::MemMapParams {
            field_mask: sys::UCP_MEM_MAP_PARAM_FIELD_ADDRESS | sys::UCP_MEM_MAP_PARAM_FIELD_LENGTH,
            address: base.0.cast(),
            length: len,
            ..sys::MemMapParams::zeroed()
        };
        let mut raw = std::ptr::null_mut();
        // SAFETY: a live context; the caller of UcxWorker::register vouches for the memory.
        check("ucp_mem_map", unsafe { (self.api.ucp_mem_map)(self.context.raw, &params, &mut raw) })?;
        let id = self.new_id();
        self.regions.insert(id, Region { raw, base: base.0.addr(), len, users: 0, dropped: None });
        let (mut packed, mut size) = (std::ptr::null_mut(), 0);
        // SAFETY: a live context and the memory handle that it just made.
        let status = unsafe { (self.api.ucp_rkey_pack)(self.context.raw, raw, &mut packed, &mut size) };
        if let Err(error) = check("ucp_rkey_pack", status) {
            self.regions.get_mut(&id).expect("just inserted").dropped = Some(None);
            self.release_region(id);
            return Err(error);
        }
        let (base, len) = (base.0.addr() as u64, len as u64);
        let key = Envelope {
            kind: Kind::Key,
            made_by: self.ucx.version(),
            owner: self.owner,
            base,
            range: len,
            // SAFETY: UCX says that the packed key has this many bytes; it is ours until released.
            payload: unsafe { std::slice::from_raw_parts(packed.cast::<u8>(), size) },
        }
        .encode();
        // SAFETY: made by ucp_rkey_pack, released once.
        unsafe { (self.api.ucp_rkey_buffer_release)(packed) };
        Ok(Registration::new(Arc::clone(&self.shared), id, base, len, key))
    }

    fn release_region(&mut self, id: u64) {
        let Some(region) = self.regions.get_mut(&id) else { return };
        if region.users > 0 || region.dropped.is_none() {
            return;
        }
        let region = self.regions.remove(&id).expect("seen above");
        // SAFETY: mapped by this context, unmapped once, no operation uses it.
        let status = unsafe { (self.api.ucp_mem_unmap)(self.context.raw, region.raw) };
        if status != sys::UCS_OK {
            tracing::error!(status = %Status::new(status), "UCX cannot unmap memory");
        }
        if let Some(Some(reply)) = region.dropped {
            let _ = reply.send(Ok(()));
        }
    }

    fn connect(&mut self, address: &[u8], owner: u64, deadline: Instant, reply: Reply<Endpoint>) {
        let id = self.new_id();
        let params = sys::EpParams {
            field_mask: sys::UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
                | sys::UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
                | sys::UCP_EP_PARAM_FIELD_ERR_HANDLER,
            address: address.as_ptr().cast(),
            err_mode: sys::UCP_ERR_HANDLING_MODE_PEER,
            err_handler_cb: Some(mail::on_failure),
            err_handler_arg: id as *mut c_void,
            ..sys::EpParams::zeroed()
        };
        let mut raw = std::ptr::null_mut();
        // SAFETY: a live worker; the address came whole out of its envelope, as some UCX worker made it.
        let status = unsafe { (self.api.ucp_ep_create)(self.worker.raw, &params, &mut raw) };
        if let Err(error) = check("ucp_ep_create", status) {
            // Some transports notice already here that nobody answers.
            let status = Status::new(status);
            let _ = reply.send(Err(if status.is_local() { error } else { UcxError::PeerLost { status } }));
            return;
        }
        self.endpoints.insert(
            id,
            Ep {
                raw,
                state: State::Open,
                in_flight: 1,
                flushes: 0,
                unflushed: Vec::new(),
                dropped: false,
                keeps_buffers: false,
                waiting: Vec::new(),
            },
        );
        // Endpoints are wired up lazily; a flush brings out a peer that cannot be reached.
        let flush = self.new_id();
        let issued = self.flush(raw, flush);
        self.deadlines.insert((deadline, flush));
        self.pending.insert(flush, Pending::Connect { endpoint: id, owner, deadline, reply });
        match issued {
            Issued::Pending => {}
            Issued::Done => self.complete(flush, sys::UCS_OK),
            Issued::Failed(status) => self.complete(flush, status),
        }
    }

    fn connected(&mut self, id: u64, owner: u64, outcome: Result<(), UcxError>, reply: &Reply<Endpoint>) {
        let Some(ep) = self.endpoints.get_mut(&id) else { return };
        let outcome = match (&ep.state, outcome) {
            (State::Closing { reason, .. } | State::Closed { reason }, _) => Err(reason.clone()),
            (State::Open, outcome) => outcome.and_then(|()| self.accept_transports(id)),
        };
        let answer = match outcome {
            // If nobody waits any more, the handle is dropped here or in the channel, and says so by a command.
            Ok(transports) => Ok(Endpoint::new(Arc::clone(&self.shared), id, owner, transports)),
            Err(error) => {
                self.endpoints.get_mut(&id).expect("seen above").dropped = true;
                self.close(id, error.clone());
                Err(error)
            }
        };
        let _ = reply.send(answer);
    }

    fn accept_transports(&self, id: u64) -> Result<Transports, UcxError> {
        let found = self.ucx.version();
        if found < MIN_FOR_TRANSPORTS {
            return if self.allow_tcp {
                Ok(Transports::default())
            } else {
                Err(UcxError::TransportsUnknown { found })
            };
        }
        let mut entries = [sys::TransportEntry::zeroed(); LANES_MAX];
        let mut attr = sys::EpAttr {
            field_mask: sys::UCP_EP_ATTR_FIELD_TRANSPORTS,
            transports: sys::Transports {
                entries: entries.as_mut_ptr(),
                num_entries: LANES_MAX as u32,
                entry_size: size_of::<sys::TransportEntry>(),
            },
            ..sys::EpAttr::zeroed()
        };
        // SAFETY: a live endpoint; the array has the announced number of entries of the announced size.
        check("ucp_ep_query", unsafe { (self.api.ucp_ep_query)(self.endpoints[&id].raw, &mut attr) })?;
        let lanes = (attr.transports.num_entries as usize).min(LANES_MAX);
        let names = entries[..lanes]
            .iter()
            .filter(|entry| !entry.transport_name.is_null())
            // SAFETY: a terminated string of the context, which lives as long as this engine.
            .map(|entry| unsafe { CStr::from_ptr(entry.transport_name) }.to_string_lossy().into_owned())
            .collect();
        let transports = Transports::new(names);
        if transports.is_only_tcp() && !self.allow_tcp {
            return Err(UcxError::OnlyTcp { transports });
        }
        Ok(transports)
    }

    fn import(&mut self, endpoint: u64, key: &[u8], base: u64, len: u64) -> Result<RemoteKey, UcxError> {
        let raw_ep = self.open_endpoint(endpoint)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: a live endpoint; the key came whole out of its envelope, and its owner is the endpoint's peer.
        check("ucp_ep_rkey_unpack", unsafe {
            (self.api.ucp_ep_rkey_unpack)(raw_ep, key.as_ptr().cast(), &mut raw)
        })?;
        let id = self.new_id();
        self.keys.insert(id, Key { raw, users: 0, dropped: false });
        Ok(RemoteKey::new(Arc::clone(&self.shared), id, endpoint, base, len))
    }

    fn release_key(&mut self, id: u64) {
        let Some(key) = self.keys.get(&id) else { return };
        if key.dropped && key.users == 0 {
            // SAFETY: unpacked once, destroyed once, and no operation uses it.
            unsafe { (self.api.ucp_rkey_destroy)(key.raw) };
            self.keys.remove(&id);
        }
    }

    fn open_endpoint(&self, id: u64) -> Result<*mut sys::Ep, UcxError> {
        match self.endpoints.get(&id).map(|ep| (&ep.state, ep.raw)) {
            Some((State::Open, raw)) => Ok(raw),
            Some((State::Closing { reason, .. } | State::Closed { reason }, _)) => Err(reason.clone()),
            None => Err(UcxError::Aborted),
        }
    }

    fn transfer(&mut self, transfer: Transfer) {
        let Transfer { direction, endpoint, key, remote, local, len, deadline, done, .. } = transfer;
        let raw_ep = match self.open_endpoint(endpoint) {
            Ok(raw) => raw,
            Err(error) => return self.completed.push((done, Err(error))),
        };
        if deadline <= Instant::now() {
            // Never issued, so there is no need to close the endpoint over it.
            return self.completed.push((done, Err(UcxError::DeadlineExceeded)));
        }
        let Some(raw_key) = self.keys.get(&key).map(|key| key.raw) else {
            return self.completed.push((done, Err(UcxError::WrongEndpoint)));
        };
        let region = self.region_of(local, len);
        let id = self.new_id();
        let mut param = mail::callback(id);
        if let Some((_, memory)) = region {
            param.op_attr_mask |= sys::UCP_OP_ATTR_FIELD_MEMH;
            param.memh = memory;
        }
        // SAFETY: live endpoint and key; the caller of Endpoint::get or put vouches for the local memory, and its
        // range check for the remote one.
        let issued = Issued::from_ptr(unsafe {
            match direction {
                Direction::Get => {
                    (self.api.ucp_get_nbx)(raw_ep, local.0.cast(), len, remote, raw_key, &param)
                }
                Direction::Put => {
                    (self.api.ucp_put_nbx)(raw_ep, local.0.cast(), len, remote, raw_key, &param)
                }
            }
        });
        let own = match issued {
            Issued::Pending => 1,
            Issued::Done => 0,
            Issued::Failed(status) => {
                let error = self.failure(endpoint, status);
                return self.completed.push((done, Err(error)));
            }
        };
        let reports = own + u8::from(direction == Direction::Put);
        if reports == 0 {
            return self.completed.push((done, Ok(())));
        }
        let region = region.map(|(region, _)| region);
        self.keys.get_mut(&key).expect("seen above").users += 1;
        if let Some(region) = region {
            self.regions.get_mut(&region).expect("seen above").users += 1;
        }
        self.deadlines.insert((deadline, id));
        let in_flight =
            InFlight { endpoint, key, region, deadline, reports, holds_buffer: own > 0, error: None, done };
        self.pending.insert(id, Pending::Transfer(in_flight));
        let ep = self.endpoints.get_mut(&endpoint).expect("seen above");
        ep.in_flight += 1;
        if direction == Direction::Put {
            if ep.unflushed.is_empty() {
                self.dirty.push(endpoint);
            }
            ep.unflushed.push(id);
        }
    }

    /// The registration that holds all of a local buffer. Old versions ignore or mishandle it, so they get none.
    fn region_of(&self, local: Local, len: usize) -> Option<(u64, *mut sys::Mem)> {
        if self.ucx.version() < MIN_FOR_USE {
            return None;
        }
        let start = local.0.addr();
        self.regions
            .iter()
            .find(|(_, r)| {
                r.dropped.is_none()
                    && start >= r.base
                    && start - r.base <= r.len.saturating_sub(len)
                    && len <= r.len
            })
            .map(|(id, r)| (*id, r.raw))
    }

    fn flush(&self, raw: *mut sys::Ep, id: u64) -> Issued {
        // SAFETY: a live endpoint; the parameters are copied.
        Issued::from_ptr(unsafe { (self.api.ucp_ep_flush_nbx)(raw, &mail::callback(id)) })
    }

    /// Covers every put issued so far by a flush, as far as endpoints may have another one.
    fn flush_puts(&mut self) {
        let mut dirty = std::mem::take(&mut self.dirty);
        dirty.retain(|&endpoint| {
            let id = self.next_id + 1;
            let Some(ep) = self.endpoints.get_mut(&endpoint) else { return false };
            // Closing has taken the unflushed puts.
            if ep.unflushed.is_empty() {
                return false;
            }
            if ep.flushes >= FLUSHES_MAX {
                return true;
            }
            self.next_id = id;
            ep.flushes += 1;
            ep.in_flight += 1;
            let (raw, covers) = (ep.raw, std::mem::take(&mut ep.unflushed));
            let issued = self.flush(raw, id);
            self.pending.insert(id, Pending::Flush { endpoint, covers });
            match issued {
                Issued::Pending => {}
                Issued::Done => self.complete(id, sys::UCS_OK),
                Issued::Failed(status) => self.complete(id, status),
            }
            false
        });
        // Completions above cannot have dirtied an endpoint: only new puts do.
        debug_assert!(self.dirty.is_empty());
        self.dirty = dirty;
    }

    /// Reads what the callbacks noted.
    fn read_mail(&mut self) -> bool {
        let mail = mail::take();
        let any = !(mail.completions.is_empty() && mail.failures.is_empty());
        // Failures first: what fails with them then knows why.
        for (endpoint, status) in mail.failures {
            self.close(endpoint, UcxError::PeerLost { status: Status::new(status) });
        }
        for Completion { id, status, request } in mail.completions {
            // SAFETY: the request has completed and is given back once.
            unsafe { (self.api.ucp_request_free)(request) };
            self.complete(id, status);
        }
        any
    }

    /// One report on something pending.
    fn complete(&mut self, id: u64, status: RawStatus) {
        match self.pending.get_mut(&id) {
            // Already given up as stuck.
            None => {}
            Some(Pending::Transfer(op)) => {
                op.holds_buffer = false;
                let endpoint = op.endpoint;
                let outcome = self.outcome(endpoint, status);
                self.report(id, outcome);
            }
            Some(Pending::Flush { endpoint, covers }) => {
                let (endpoint, covers) = (*endpoint, std::mem::take(covers));
                self.pending.remove(&id);
                let outcome = self.outcome(endpoint, status);
                for put in covers {
                    self.report(put, outcome.clone());
                }
                if let Some(ep) = self.endpoints.get_mut(&endpoint) {
                    ep.flushes -= 1;
                }
                self.landed(endpoint);
            }
            Some(Pending::Connect { .. }) => {
                let Some(Pending::Connect { endpoint, owner, deadline, reply }) = self.pending.remove(&id)
                else {
                    unreachable!("matched above")
                };
                self.deadlines.remove(&(deadline, id));
                let outcome = self.outcome(endpoint, status);
                self.connected(endpoint, owner, outcome, &reply);
                self.landed(endpoint);
            }
        }
    }

    /// One of the reports that a transfer waits for.
    fn report(&mut self, id: u64, outcome: Result<(), UcxError>) {
        let Some(Pending::Transfer(op)) = self.pending.get_mut(&id) else { return };
        op.reports -= 1;
        if let Err(error) = outcome {
            op.error.get_or_insert(error);
        }
        if op.reports > 0 {
            return;
        }
        let Some(Pending::Transfer(op)) = self.pending.remove(&id) else { unreachable!("matched above") };
        self.deadlines.remove(&(op.deadline, id));
        if let Some(key) = self.keys.get_mut(&op.key) {
            key.users -= 1;
            self.release_key(op.key);
        }
        if let Some((id, region)) = op.region.and_then(|id| Some((id, self.regions.get_mut(&id)?))) {
            region.users -= 1;
            self.release_region(id);
        }
        self.completed.push((op.done, op.error.map_or(Ok(()), Err)));
        self.landed(op.endpoint);
    }

    /// What a status means on this endpoint. A failure that is the peer's closes it.
    fn outcome(&mut self, endpoint: u64, status: RawStatus) -> Result<(), UcxError> {
        if status >= 0 { Ok(()) } else { Err(self.failure(endpoint, status)) }
    }

    fn failure(&mut self, endpoint: u64, status: RawStatus) -> UcxError {
        if let Err(reason) = self.open_endpoint(endpoint) {
            return reason;
        }
        let status = Status::new(status);
        if status.is_local() {
            return UcxError::Call { call: "ucp_get or ucp_put", status };
        }
        let error = UcxError::PeerLost { status };
        self.close(endpoint, error.clone());
        error
    }

    /// Closes an endpoint by force. What is in flight comes back through its callbacks.
    fn close(&mut self, id: u64, reason: UcxError) {
        let Some(ep) = self.endpoints.get_mut(&id).filter(|ep| matches!(ep.state, State::Open)) else {
            return;
        };
        ep.state = State::Closing { reason: reason.clone(), since: Instant::now() };
        let unflushed = std::mem::take(&mut ep.unflushed);
        let param = sys::RequestParam {
            op_attr_mask: sys::UCP_OP_ATTR_FIELD_FLAGS,
            flags: sys::UCP_EP_CLOSE_FLAG_FORCE,
            ..sys::RequestParam::zeroed()
        };
        // SAFETY: a live endpoint with error handling on, as closing by force requires; it is not used again.
        let ptr = unsafe { (self.api.ucp_ep_close_nbx)(ep.raw, &param) };
        match Issued::from_ptr(ptr) {
            Issued::Done => {}
            // SAFETY: a request without callback may be given back before it completes.
            Issued::Pending => unsafe { (self.api.ucp_request_free)(ptr) },
            Issued::Failed(status) => {
                tracing::warn!(status = %Status::new(status), "UCX cannot close an endpoint");
            }
        }
        self.closing.push(id);
        for put in unflushed {
            self.report(put, Err(reason.clone()));
        }
    }

    /// An entry of `pending` is gone.
    fn landed(&mut self, endpoint: u64) {
        if let Some(ep) = self.endpoints.get_mut(&endpoint) {
            ep.in_flight -= 1;
        }
        self.settle(endpoint);
    }

    /// Moves a closing endpoint on if nothing holds it any more.
    fn settle(&mut self, id: u64) {
        let Some(ep) = self.endpoints.get_mut(&id) else { return };
        if let State::Closing { reason, .. } = &ep.state
            && ep.in_flight == 0
        {
            ep.state = State::Closed { reason: reason.clone() };
            self.answers.extend(ep.waiting.drain(..).map(|reply| (reply, Ok(()))));
            self.closing.retain(|closing| *closing != id);
        }
        if ep.dropped && matches!(ep.state, State::Closed { .. }) {
            self.endpoints.remove(&id);
        }
    }

    /// Closes endpoints whose operations are late, and gives up on those that do not close.
    fn look_at_clock(&mut self) {
        if self.deadlines.is_empty() && self.closing.is_empty() {
            return;
        }
        let now = Instant::now();
        while let Some((deadline, id)) =
            self.deadlines.first().copied().filter(|(deadline, _)| *deadline <= now)
        {
            self.deadlines.remove(&(deadline, id));
            let endpoint = match self.pending.get(&id) {
                Some(Pending::Transfer(op)) => op.endpoint,
                Some(Pending::Connect { endpoint, .. }) => *endpoint,
                Some(Pending::Flush { .. }) | None => continue,
            };
            self.close(endpoint, UcxError::DeadlineExceeded);
        }
        for id in self.closing.clone() {
            self.settle(id);
            let late = self.endpoints.get(&id).is_some_and(|ep| {
                matches!(ep.state, State::Closing { since, .. } if now.duration_since(since) >= STUCK_MAX)
            });
            if late {
                self.give_up(id);
            }
        }
    }

    /// UCX keeps operations of a closed endpoint: their callers learn that the buffers are lost.
    fn give_up(&mut self, id: u64) {
        self.stuck = true;
        let reason = self.open_endpoint(id).err().unwrap_or(UcxError::Aborted);
        let lost: Vec<u64> = self
            .pending
            .iter()
            .filter(|(_, pending)| match pending {
                Pending::Transfer(op) => op.endpoint == id,
                Pending::Flush { endpoint, .. } | Pending::Connect { endpoint, .. } => *endpoint == id,
            })
            .map(|(id, _)| *id)
            .collect();
        let mut buffers = 0;
        let operations = lost.len();
        for lost in lost {
            match self.pending.remove(&lost) {
                // Keys and registrations in use stay as they are: UCX may still look at them.
                Some(Pending::Transfer(op)) => {
                    self.deadlines.remove(&(op.deadline, lost));
                    buffers += usize::from(op.holds_buffer);
                    let error = if op.holds_buffer { UcxError::Stuck } else { reason.clone() };
                    self.completed.push((op.done, Err(error)));
                }
                Some(Pending::Connect { reply, deadline, .. }) => {
                    self.deadlines.remove(&(deadline, lost));
                    let _ = reply.send(Err(UcxError::DeadlineExceeded));
                }
                Some(Pending::Flush { .. }) | None => {}
            }
        }
        tracing::error!(
            operations,
            buffers,
            "UCX does not give operations back; it is leaked when the worker stops"
        );
        let Some(ep) = self.endpoints.get_mut(&id) else { return };
        ep.in_flight = 0;
        ep.keeps_buffers = buffers > 0;
        let answer = if buffers > 0 { Err(UcxError::Stuck) } else { Ok(()) };
        self.answers.extend(ep.waiting.drain(..).map(|reply| (reply, answer.clone())));
        self.settle(id);
    }

    /// Runs completions, then answers aborts.
    fn hand_back(&mut self) -> bool {
        if self.completed.is_empty() && self.answers.is_empty() {
            return false;
        }
        if !self.completed.is_empty() {
            // Room first: a completion may start the next operation.
            self.shared.completed(self.completed.len());
        }
        for (done, result) in self.completed.drain(..) {
            done.run(result);
        }
        for (reply, result) in self.answers.drain(..) {
            let _ = reply.send(result);
        }
        true
    }

    /// Closes everything and gives UCX back, or leaks it if it does not let go.
    fn stop(mut self) {
        let ids: Vec<u64> = self.endpoints.keys().copied().collect();
        for id in ids {
            if let Some(ep) = self.endpoints.get_mut(&id) {
                ep.dropped = true;
            }
            self.close(id, UcxError::WorkerStopped);
            self.settle(id);
        }
        let give_up = Instant::now() + STOP_MAX;
        while !self.endpoints.is_empty() && Instant::now() < give_up {
            if !self.turn() {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        for id in self.closing.clone() {
            self.give_up(id);
        }
        self.hand_back();
        if self.stuck {
            std::mem::forget(self);
            return;
        }
        for (_, key) in self.keys.drain() {
            // SAFETY: unpacked once, destroyed once; nothing is in flight.
            unsafe { (self.api.ucp_rkey_destroy)(key.raw) };
        }
        let regions: Vec<u64> = self.regions.keys().copied().collect();
        for id in regions {
            self.regions.get_mut(&id).expect("listed above").dropped.get_or_insert(None);
            self.release_region(id);
        }
    }
}
