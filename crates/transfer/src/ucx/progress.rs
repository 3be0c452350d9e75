//! Progress thread: the only thread that calls into UCX.
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
//! - UCX callbacks only store results in [`callbacks`]; they are read after UCX has returned. So UCX is never entered
//!   from a callback, and no panic of this crate can unwind through it.
//! - Closing by force returns at once while UCX still cancels the operations in flight. An operation's own callback
//!   releases its buffer, never the return of the close.
//! - A key or registration outlives the operations that use it.
//! - If UCX does not complete an operation within [`STUCK_MAX`] of the close, the operation fails: with
//!   [`UcxError::Stuck`] if UCX may still access its buffer, else (only the flush of a put is missing) with the reason
//!   of the close. Context and worker are leaked when the thread ends.

use std::collections::{BTreeSet, HashMap, VecDeque};
use std::ffi::{CStr, c_void};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::mpsc::SyncSender;
use std::time::Duration;

use moontide_rt::time::Instant;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use super::callbacks::{self, Completion};
use super::context::{Context, Worker, WorkerConfig, check};
use super::envelope::{Envelope, Kind};
use super::error::{Status, Transports, UcxError};
use super::handle::{
    Direction, Done, Endpoint, Local, Registration, RemoteKey, Reply, STUCK_MAX, Shared, Transfer, UcxCommand,
};
use super::library::Ucx;
use super::spin::AdaptiveSpin;
use super::state::{EndpointState, InFlight, Key, Pending, Region, State};
use super::sys::{self, Api, CallOutcome, RawStatus, Zeroed};
use super::version::{MIN_FOR_TRANSPORTS, MIN_FOR_USE};

/// How long a stopping worker waits for operations to complete after it closed their endpoints by force.
pub(super) const STOP_MAX: Duration = Duration::from_secs(3);

/// Rounds of progress before commands and deadlines are checked again.
const PROGRESS_BURST: u32 = 32;

/// Longest wait without a call into UCX: idle, with operations in flight, and while endpoints close. UCX signals events
/// on its descriptor; these bounds only limit the cost of a missed one.
const POLL_IDLE: Duration = Duration::from_secs(1);
const POLL_BUSY: Duration = Duration::from_millis(100);
const POLL_CLOSING: Duration = Duration::from_millis(1);

/// Most flushes in flight per endpoint. With one, each put would wait for two round trips; without a limit, each put
/// would be flushed separately. With four, puts that arrive during a round trip share the next free flush.
const FLUSHES_MAX: usize = 4;

/// Most lanes that UCX can report for one endpoint (its UCP_MAX_LANES is 16 or 64).
const LANES_MAX: usize = 64;

/// Runs the thread. Sends the worker's address to `started` once it serves.
pub(super) fn run(
    shared: Arc<Shared>,
    ucx: Ucx,
    config: &WorkerConfig,
    started: &SyncSender<Result<Vec<u8>, UcxError>>,
) {
    shared.set_progress_thread();
    // Runs after the loop, and also if a bug makes it panic: no caller may wait for a thread that has ended.
    struct CloseQueue(Arc<Shared>);
    impl Drop for CloseQueue {
        fn drop(&mut self) {
            self.0.close();
        }
    }
    let _close = CloseQueue(Arc::clone(&shared));
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
    // The order of the first two fields matters: the worker is dropped before its context.
    worker: Worker,
    context: Context,
    api: &'static Api,
    ucx: Ucx,
    shared: Arc<Shared>,
    owner: u64,
    allow_tcp: bool,
    next_id: u64,
    endpoints: HashMap<u64, EndpointState>,
    keys: HashMap<u64, Key>,
    regions: HashMap<u64, Region>,
    pending: HashMap<u64, Pending>,
    /// Deadlines of transfers and connects in `pending`.
    deadlines: BTreeSet<(Instant, u64)>,
    /// Endpoints with puts to flush.
    dirty: Vec<u64>,
    /// Endpoints that are closing.
    closing: Vec<u64>,
    /// Completions to run, then replies to send: in this order, since an abort promises the former.
    completed: Vec<(Done, Result<(), UcxError>)>,
    replies: Vec<(Reply<()>, Result<(), UcxError>)>,
    /// An operation was never completed by UCX.
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
            replies: Vec::new(),
            stuck: false,
        };
        Ok((engine, address))
    }

    /// Serves until a stop command. Returns the channels for the replies to stop commands.
    fn serve(&mut self) -> Vec<Reply<()>> {
        let mut commands = VecDeque::new();
        let mut spin = AdaptiveSpin::default();
        let mut stops = Vec::new();
        loop {
            self.shared.take(&mut commands);
            let mut worked = !commands.is_empty();
            for command in commands.drain(..) {
                match command {
                    UcxCommand::Stop { reply } => stops.push(reply),
                    other => self.handle(other),
                }
            }
            worked |= self.run_once();
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

    /// Makes progress on everything but the commands. Returns whether anything happened.
    fn run_once(&mut self) -> bool {
        self.flush_puts();
        let mut worked = false;
        for _ in 0..PROGRESS_BURST {
            // SAFETY: a live worker, on its own thread.
            if unsafe { (self.api.ucp_worker_progress)(self.worker.raw) } == 0 {
                break;
            }
            worked = true;
        }
        worked |= self.handle_callbacks();
        self.check_deadlines();
        worked | self.deliver()
    }

    /// Blocks until there is an event of UCX, a command, or a deadline.
    fn sleep(&mut self) {
        // SAFETY: a live worker, on its own thread.
        let status = unsafe { (self.api.ucp_worker_arm)(self.worker.raw) };
        if status == sys::UCS_ERR_BUSY || !self.shared.prepare_sleep() {
            return;
        }
        let mut poll_max = match (self.closing.is_empty(), self.pending.is_empty()) {
            (false, _) => POLL_CLOSING,
            (true, false) => POLL_BUSY,
            (true, true) => POLL_IDLE,
        };
        if let Some((deadline, _)) = self.deadlines.first() {
            poll_max = poll_max.min(deadline.saturating_duration_since(Instant::now()));
        }
        // SAFETY: UCX keeps the descriptor open as long as the worker, which outlives this borrow.
        let events = unsafe { BorrowedFd::borrow_raw(self.worker.event_fd) };
        let mut fds =
            [PollFd::from_borrowed_fd(events, PollFlags::IN), PollFd::new(&self.shared.wake, PollFlags::IN)];
        let timeout =
            Timespec { tv_sec: poll_max.as_secs() as i64, tv_nsec: i64::from(poll_max.subsec_nanos()) };
        // An error (a signal) only shortens the sleep.
        let _ = poll(&mut fds, Some(&timeout));
        if !fds[1].revents().is_empty() {
            // Whether it was readable or not: the queue is checked next.
            let _ = rustix::io::read(&self.shared.wake, &mut [0u8; 8]);
        }
    }

    fn handle(&mut self, command: UcxCommand) {
        match command {
            UcxCommand::Register { base, len, reply } => {
                let _ = reply.send(self.register(base, len));
            }
            UcxCommand::Unregister { id, reply } => {
                if let Some(region) = self.regions.get_mut(&id) {
                    region.dropped = Some(reply);
                    self.release_region(id);
                } else if let Some(reply) = reply {
                    let _ = reply.send(Ok(()));
                }
            }
            UcxCommand::Connect { address, owner, deadline, reply } => {
                self.connect(&address, owner, deadline, reply)
            }
            UcxCommand::Import { endpoint, key, base, len, reply } => {
                let _ = reply.send(self.import(endpoint, &key, base, len));
            }
            UcxCommand::Forget { key } => {
                if let Some(found) = self.keys.get_mut(&key) {
                    found.dropped = true;
                    self.release_key(key);
                }
            }
            UcxCommand::Transfer(transfer) => self.transfer(transfer),
            UcxCommand::Abort { endpoint, reply } => {
                self.close(endpoint, UcxError::Aborted);
                match self.endpoints.get_mut(&endpoint) {
                    Some(ep) if matches!(ep.state, State::Closing { .. }) => ep.waiting.push(reply),
                    Some(ep) if ep.keeps_buffers => self.replies.push((reply, Err(UcxError::Stuck))),
                    // Closed: completions of this round still come first.
                    _ => self.replies.push((reply, Ok(()))),
                }
            }
            UcxCommand::Close { endpoint } => {
                if let Some(ep) = self.endpoints.get_mut(&endpoint) {
                    ep.dropped = true;
                    self.close(endpoint, UcxError::Aborted);
                    self.settle(endpoint);
                }
            }
            UcxCommand::Stop { .. } => unreachable!("serve() handles Stop"),
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
        // SAFETY: a live context; the caller of UcxWorker::register guarantees the memory.
        check("ucp_mem_map", unsafe { (self.api.ucp_mem_map)(self.context.raw, &params, &mut raw) })?;
        let id = self.new_id();
        self.regions.insert(id, Region { raw, base: base.0.addr(), len, users: 0, dropped: None });
        let (mut packed, mut size) = (std::ptr::null_mut(), 0);
        // SAFETY: a live context and the memory handle that it just created.
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
            // SAFETY: UCX returned this size of the packed key; the key is valid until it is released.
            payload: unsafe { std::slice::from_raw_parts(packed.cast::<u8>(), size) },
        }
        .encode();
        // SAFETY: created by ucp_rkey_pack, released once.
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
            tracing::error!(status = %Status::new(status), "cannot unmap memory from UCX");
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
            err_handler_cb: Some(callbacks::on_failure),
            err_handler_arg: id as *mut c_void,
            ..sys::EpParams::zeroed()
        };
        let mut raw = std::ptr::null_mut();
        // SAFETY: a live worker; the address is a complete envelope payload, as a UCX worker created it.
        let status = unsafe { (self.api.ucp_ep_create)(self.worker.raw, &params, &mut raw) };
        if let Err(error) = check("ucp_ep_create", status) {
            // Some transports detect already here that no peer responds.
            let status = Status::new(status);
            let _ = reply.send(Err(if status.is_local() { error } else { UcxError::PeerLost { status } }));
            return;
        }
        self.endpoints.insert(
            id,
            EndpointState {
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
        // Endpoints connect lazily; a flush detects an unreachable peer.
        let flush = self.new_id();
        let issued = self.flush(raw, flush);
        self.deadlines.insert((deadline, flush));
        self.pending.insert(flush, Pending::Connect { endpoint: id, owner, deadline, reply });
        match issued {
            CallOutcome::Pending => {}
            CallOutcome::Done => self.complete(flush, sys::UCS_OK),
            CallOutcome::Failed(status) => self.complete(flush, status),
        }
    }

    fn connected(&mut self, id: u64, owner: u64, outcome: Result<(), UcxError>, reply: &Reply<Endpoint>) {
        let Some(ep) = self.endpoints.get_mut(&id) else { return };
        let outcome = match (&ep.state, outcome) {
            (State::Closing { reason, .. } | State::Closed { reason }, _) => Err(reason.clone()),
            (State::Open, outcome) => outcome.and_then(|()| self.accept_transports(id)),
        };
        let result = match outcome {
            // If the caller no longer waits, the handle is dropped here or in the channel, which sends a Close command.
            Ok(transports) => Ok(Endpoint::new(Arc::clone(&self.shared), id, owner, transports)),
            Err(error) => {
                self.endpoints.get_mut(&id).expect("seen above").dropped = true;
                self.close(id, error.clone());
                Err(error)
            }
        };
        let _ = reply.send(result);
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
        // SAFETY: a live endpoint; the key is a complete envelope payload, and its owner is the endpoint's peer.
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
            // Never issued, so the endpoint need not be closed.
            return self.completed.push((done, Err(UcxError::DeadlineExceeded)));
        }
        let Some(raw_key) = self.keys.get(&key).map(|key| key.raw) else {
            return self.completed.push((done, Err(UcxError::WrongEndpoint)));
        };
        let region = self.region_of(local, len);
        let id = self.new_id();
        let mut param = callbacks::callback(id);
        if let Some((_, memory)) = region {
            param.op_attr_mask |= sys::UCP_OP_ATTR_FIELD_MEMH;
            param.memh = memory;
        }
        // SAFETY: live endpoint and key; the caller of Endpoint::get or put guarantees the local memory, and its range
        // check the remote one.
        let issued = CallOutcome::from_ptr(unsafe {
            match direction {
                Direction::Get => {
                    (self.api.ucp_get_nbx)(raw_ep, local.0.cast(), len, remote, raw_key, &param)
                }
                Direction::Put => {
                    (self.api.ucp_put_nbx)(raw_ep, local.0.cast(), len, remote, raw_key, &param)
                }
            }
        });
        let own_reports = match issued {
            CallOutcome::Pending => 1,
            CallOutcome::Done => 0,
            CallOutcome::Failed(status) => {
                let error = self.failure(endpoint, status);
                return self.completed.push((done, Err(error)));
            }
        };
        let reports = own_reports + u8::from(direction == Direction::Put);
        if reports == 0 {
            return self.completed.push((done, Ok(())));
        }
        let region = region.map(|(region, _)| region);
        self.keys.get_mut(&key).expect("seen above").users += 1;
        if let Some(region) = region {
            self.regions.get_mut(&region).expect("seen above").users += 1;
        }
        self.deadlines.insert((deadline, id));
        let holds_buffer = own_reports > 0;
        let in_flight =
            InFlight { endpoint, key, region, deadline, reports, holds_buffer, error: None, done };
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

    /// Returns the registration that holds all of a local buffer. Old versions ignore or mishandle it, so they get
    /// none.
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

    fn flush(&self, raw: *mut sys::Ep, id: u64) -> CallOutcome {
        // SAFETY: a live endpoint; the parameters are copied.
        CallOutcome::from_ptr(unsafe { (self.api.ucp_ep_flush_nbx)(raw, &callbacks::callback(id)) })
    }

    /// Issues a flush for every put issued so far, where the endpoint may have another flush in flight.
    fn flush_puts(&mut self) {
        let mut dirty = std::mem::take(&mut self.dirty);
        dirty.retain(|&endpoint| {
            let id = self.next_id + 1;
            let Some(ep) = self.endpoints.get_mut(&endpoint) else { return false };
            // Closing has removed the unflushed puts.
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
                CallOutcome::Pending => {}
                CallOutcome::Done => self.complete(id, sys::UCS_OK),
                CallOutcome::Failed(status) => self.complete(id, status),
            }
            false
        });
        // The completions above cannot add to `dirty`: only new puts do.
        debug_assert!(self.dirty.is_empty());
        self.dirty = dirty;
    }

    /// Handles the results stored by callbacks. Returns whether there were any.
    fn handle_callbacks(&mut self) -> bool {
        let results = callbacks::take();
        let any = !(results.completions.is_empty() && results.failures.is_empty());
        // Failures first, so that operations that fail with them get that reason.
        for (endpoint, status) in results.failures {
            self.close(endpoint, UcxError::PeerLost { status: Status::new(status) });
        }
        for Completion { id, status, request } in results.completions {
            // SAFETY: the request has completed and is freed once.
            unsafe { (self.api.ucp_request_free)(request) };
            self.complete(id, status);
        }
        any
    }

    /// Handles one report on a pending entry.
    fn complete(&mut self, id: u64, status: RawStatus) {
        match self.pending.get_mut(&id) {
            // Already abandoned as stuck.
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
                self.pending_removed(endpoint);
            }
            Some(Pending::Connect { .. }) => {
                let Some(Pending::Connect { endpoint, owner, deadline, reply }) = self.pending.remove(&id)
                else {
                    unreachable!("matched above")
                };
                self.deadlines.remove(&(deadline, id));
                let outcome = self.outcome(endpoint, status);
                self.connected(endpoint, owner, outcome, &reply);
                self.pending_removed(endpoint);
            }
        }
    }

    /// Handles one of the reports that a transfer waits for.
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
        self.pending_removed(op.endpoint);
    }

    /// Converts a status of an operation on this endpoint. A failure of the peer closes the endpoint.
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

    /// Closes an endpoint by force. Operations in flight complete through their callbacks.
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
        match CallOutcome::from_ptr(ptr) {
            CallOutcome::Done => {}
            // SAFETY: a request without callback may be freed before it completes.
            CallOutcome::Pending => unsafe { (self.api.ucp_request_free)(ptr) },
            CallOutcome::Failed(status) => {
                tracing::warn!(status = %Status::new(status), "cannot close a UCX endpoint");
            }
        }
        self.closing.push(id);
        for put in unflushed {
            self.report(put, Err(reason.clone()));
        }
    }

    /// Accounts for a removed entry of `pending`.
    fn pending_removed(&mut self, endpoint: u64) {
        if let Some(ep) = self.endpoints.get_mut(&endpoint) {
            ep.in_flight -= 1;
        }
        self.settle(endpoint);
    }

    /// Finishes closing an endpoint if nothing is in flight, and removes it if its handle was dropped.
    fn settle(&mut self, id: u64) {
        let Some(ep) = self.endpoints.get_mut(&id) else { return };
        if let State::Closing { reason, .. } = &ep.state
            && ep.in_flight == 0
        {
            ep.state = State::Closed { reason: reason.clone() };
            self.replies.extend(ep.waiting.drain(..).map(|reply| (reply, Ok(()))));
            self.closing.retain(|closing| *closing != id);
        }
        if ep.dropped && matches!(ep.state, State::Closed { .. }) {
            self.endpoints.remove(&id);
        }
    }

    /// Closes endpoints with operations past their deadline, and abandons operations of endpoints that do not close.
    fn check_deadlines(&mut self) {
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
            let stuck = self.endpoints.get(&id).is_some_and(|ep| {
                matches!(ep.state, State::Closing { since, .. } if now.duration_since(since) >= STUCK_MAX)
            });
            if stuck {
                self.abandon(id);
            }
        }
    }

    /// Fails operations that UCX does not complete after the close of their endpoint. Callers get [`UcxError::Stuck`]
    /// for buffers that are lost.
    fn abandon(&mut self, id: u64) {
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
                // Keys and registrations in use are kept: UCX may still access them.
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
            "UCX does not complete operations of a closed endpoint; it is leaked when the worker stops"
        );
        let Some(ep) = self.endpoints.get_mut(&id) else { return };
        ep.in_flight = 0;
        ep.keeps_buffers = buffers > 0;
        let result = if buffers > 0 { Err(UcxError::Stuck) } else { Ok(()) };
        self.replies.extend(ep.waiting.drain(..).map(|reply| (reply, result.clone())));
        self.settle(id);
    }

    /// Runs completions, then sends replies to aborts. Returns whether there were any.
    fn deliver(&mut self) -> bool {
        if self.completed.is_empty() && self.replies.is_empty() {
            return false;
        }
        if !self.completed.is_empty() {
            // Capacity first: a completion may start the next operation.
            self.shared.completed(self.completed.len());
        }
        for (done, result) in self.completed.drain(..) {
            done.run(result);
        }
        for (reply, result) in self.replies.drain(..) {
            let _ = reply.send(result);
        }
        true
    }

    /// Closes everything and destroys the UCX worker, or leaks it if operations are stuck.
    fn stop(mut self) {
        let ids: Vec<u64> = self.endpoints.keys().copied().collect();
        for id in ids {
            if let Some(ep) = self.endpoints.get_mut(&id) {
                ep.dropped = true;
            }
            self.close(id, UcxError::WorkerStopped);
            self.settle(id);
        }
        let give_up_at = Instant::now() + STOP_MAX;
        while !self.endpoints.is_empty() && Instant::now() < give_up_at {
            if !self.run_once() {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        for id in self.closing.clone() {
            self.abandon(id);
        }
        self.deliver();
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
