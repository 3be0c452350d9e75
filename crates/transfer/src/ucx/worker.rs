//! The handles of a UCX worker: what any thread may hold and call.
//!
//! Owns the queue of commands to the progress thread, not UCX itself: that is the progress thread's alone.
//!
//! Invariants:
//! - A handle's drop gives back what it stands for. [`Registration`] waits until UCX has let go of the memory; the
//!   others only tell the progress thread.
//! - `done` runs exactly once: on the progress thread, or, for an operation refused before it was handed over, on the
//!   calling thread before the call returns. It must not block; what it may do is start further operations.
//! - Operations accepted and not completed ≤ [`INFLIGHT_MAX`].

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread::{JoinHandle, ThreadId};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rustix::event::{EventfdFlags, eventfd};

use super::envelope::{Envelope, Kind};
use super::error::{Transports, UcxError};
use super::library::{OldVersions, Ucx};
use super::progress::{self, STOP_MAX, STUCK_MAX};

/// Operations in flight on one worker. Eight peers with a send queue of 128 each; more would only wait inside UCX.
pub const INFLIGHT_MAX: usize = 1024;

/// How often UCX asks after silent peers. Its own default of 20 s is longer than most of our deadlines.
const KEEPALIVE: Duration = Duration::from_secs(1);

/// How long a caller waits for the progress thread beyond the time that the thread has to answer.
const SLACK: Duration = Duration::from_secs(1);

/// How a worker uses UCX. Whatever is left out comes from UCX's own environment variables (`UCX_TLS`, …).
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// Transports that UCX may use, comma separated (its option `TLS`).
    pub tls: Option<String>,
    /// Network devices that UCX may use, comma separated (its option `NET_DEVICES`).
    pub net_devices: Option<String>,
    /// Accept endpoints that run over TCP only. For tests.
    pub allow_tcp: bool,
    /// Accept a UCX that is older than [`MIN_FOR_USE`](super::MIN_FOR_USE). For tests.
    pub old_versions: OldVersions,
    /// How often UCX asks after silent peers.
    pub keepalive: Duration,
}

impl Default for WorkerConfig {
    /// Everything but TCP, unless the environment says otherwise (`UCX_TLS`). Over TCP, UCX answers gets by messages,
    /// and an owner does not always survive the death of a reader.
    fn default() -> Self {
        let tls = std::env::var_os("UCX_TLS").is_none().then(|| "^tcp".to_owned());
        Self {
            tls,
            net_devices: None,
            allow_tcp: false,
            old_versions: OldVersions::Refuse,
            keepalive: KEEPALIVE,
        }
    }
}

/// A UCX worker and the thread that runs it. Dropping it closes every endpoint by force and joins the thread.
#[derive(Debug)]
pub struct UcxWorker {
    shared: Arc<Shared>,
    address: Vec<u8>,
    thread: Option<JoinHandle<()>>,
}

impl UcxWorker {
    /// Starts a progress thread with a context and a worker of its own.
    pub fn start(ucx: &Ucx, config: WorkerConfig) -> Result<Self, UcxError> {
        ucx.usable(config.old_versions)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| UcxError::Os { call: "eventfd", errno })?;
        let shared = Arc::new(Shared {
            inbox: Mutex::new(Inbox { open: true, ..Inbox::default() }),
            wake,
            thread: OnceLock::new(),
        });
        let (started, answer) = sync_channel(1);
        let thread = {
            let (shared, ucx) = (Arc::clone(&shared), *ucx);
            std::thread::Builder::new()
                .name("moontide-ucx".into())
                .spawn(move || progress::run(shared, ucx, &config, &started))
                .map_err(|error| UcxError::Os {
                    call: "clone",
                    errno: rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::AGAIN),
                })?
        };
        match answer.recv().unwrap_or(Err(UcxError::WorkerStopped)) {
            Ok(address) => Ok(Self { shared, address, thread: Some(thread) }),
            Err(error) => {
                // The thread has nothing left to do but to return.
                let _ = thread.join();
                Err(error)
            }
        }
    }

    /// What a peer needs to [`connect`](Self::connect) to this worker.
    pub fn address(&self) -> &[u8] {
        &self.address
    }

    /// Opens memory to every peer that learns the [`Registration::key`], for reading and writing.
    ///
    /// Transfers whose *local* side lies in registered memory use the registration too, and spare UCX making a
    /// temporary one.
    ///
    /// # Safety
    /// `base..base + len` is mapped and stays so until the registration has been dropped, and nobody relies on its
    /// contents not being changed by peers.
    pub unsafe fn register(&self, base: *mut u8, len: usize) -> Result<Registration, UcxError> {
        self.shared.call("register", None, |reply| Command::Register { base: Local(base), len, reply })
    }

    /// Leads to the worker whose [`address`](Self::address) is given, once it has answered or needs not to.
    ///
    /// Fails with [`UcxError::OnlyTcp`] if UCX found nothing better than TCP, and with
    /// [`UcxError::DeadlineExceeded`] or [`UcxError::PeerLost`] if the peer does not answer.
    pub fn connect(&self, peer_address: &[u8], deadline: Instant) -> Result<Endpoint, UcxError> {
        let envelope = Envelope::decode(peer_address, Kind::Address)?;
        let (address, owner) = (envelope.payload.to_vec(), envelope.owner);
        let wait = deadline.saturating_duration_since(Instant::now()) + STUCK_MAX + SLACK;
        self.shared.call("connect", Some(wait), |reply| Command::Connect { address, owner, deadline, reply })
    }
}

impl Drop for UcxWorker {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        let (reply, stopped) = sync_channel(1);
        if self.shared.submit(Command::Stop { reply }).is_ok() {
            if self.shared.is_progress_thread() {
                // Dropped by a completion: the thread stops after it, and nobody is left to join it.
                return;
            }
            if let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(STOP_MAX + SLACK) {
                tracing::error!("UCX does not return; its thread is left behind");
                return;
            }
        }
        if thread.join().is_err() {
            tracing::error!("the UCX progress thread panicked");
        }
    }
}

/// Memory that peers may read and write. Dropping it closes the memory to them, and waits until UCX has let go of it.
///
/// Not to be dropped by a completion: there the wait is impossible, and UCX lets go a moment after the drop.
#[derive(Debug)]
pub struct Registration {
    shared: Arc<Shared>,
    id: u64,
    base: u64,
    len: u64,
    key: Vec<u8>,
}

impl Registration {
    pub(super) fn new(shared: Arc<Shared>, id: u64, base: u64, len: u64, key: Vec<u8>) -> Self {
        Self { shared, id, base, len, key }
    }

    /// Address of the first registered byte, as peers name it.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Registered bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether nothing is registered.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// What a peer needs to [`import`](Endpoint::import) this memory.
    pub fn key(&self) -> &[u8] {
        &self.key
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let id = self.id;
        let let_go =
            self.shared.call("unregister", None, |reply| Command::Unregister { id, reply: Some(reply) });
        if let Err(UcxError::OnProgressThread { .. }) = let_go {
            // Cannot wait here; the type's documentation says not to do this.
            tracing::error!(
                "registered memory was given up by a completion; UCX lets go of it a moment later"
            );
            let _ = self.shared.submit(Command::Unregister { id, reply: None });
        }
    }
}

/// A way to one peer. Dropping it closes the way by force; operations in flight fail.
#[derive(Debug)]
pub struct Endpoint {
    shared: Arc<Shared>,
    id: u64,
    owner: u64,
    transports: Transports,
}

/// The bytes to read from a peer.
#[derive(Clone, Copy, Debug)]
pub struct Get<'a> {
    /// Memory of the peer.
    pub key: &'a RemoteKey,
    /// First byte there.
    pub remote: u64,
    /// First byte here.
    pub local: *mut u8,
    /// How many.
    pub len: usize,
    /// When to give up: the endpoint is then closed, since UCX cannot take back a single operation.
    pub deadline: Instant,
}

/// The bytes to write to a peer.
#[derive(Clone, Copy, Debug)]
pub struct Put<'a> {
    /// Memory of the peer.
    pub key: &'a RemoteKey,
    /// First byte there.
    pub remote: u64,
    /// First byte here.
    pub local: *const u8,
    /// How many.
    pub len: usize,
    /// When to give up: the endpoint is then closed, since UCX cannot take back a single operation.
    pub deadline: Instant,
}

impl Endpoint {
    pub(super) fn new(shared: Arc<Shared>, id: u64, owner: u64, transports: Transports) -> Self {
        Self { shared, id, owner, transports }
    }

    /// What UCX runs this endpoint over.
    pub fn transports(&self) -> &Transports {
        &self.transports
    }

    /// Makes the memory behind a [`Registration::key`] of this peer usable.
    pub fn import(&self, key: &[u8]) -> Result<RemoteKey, UcxError> {
        let envelope = Envelope::decode(key, Kind::Key)?;
        if envelope.owner != self.owner {
            return Err(UcxError::WrongOwner { endpoint: self.owner, key: envelope.owner });
        }
        let (endpoint, base, len) = (self.id, envelope.base, envelope.range);
        let key = envelope.payload.to_vec();
        self.shared.call("import", None, |reply| Command::Import { endpoint, key, base, len, reply })
    }

    /// Reads from the peer. `done(Ok)` says that the bytes are in place.
    ///
    /// # Safety
    /// `local..local + len` is valid for writes and not otherwise used until `done` has run — for good, if it ran
    /// with [`UcxError::Stuck`].
    pub unsafe fn get(&self, get: Get<'_>, done: impl FnOnce(Result<(), UcxError>) + Send + 'static) {
        let Get { key, remote, local, len, deadline } = get;
        self.start(Transfer {
            direction: Direction::Get,
            endpoint: self.id,
            key: key.id,
            remote,
            local: Local(local),
            len,
            deadline,
            done: Done::new(done),
            refused: self.check(key, remote, len).err(),
        });
    }

    /// Writes to the peer. `done(Ok)` says that the bytes are in the peer's memory.
    ///
    /// # Safety
    /// `local..local + len` is valid for reads and not written until `done` has run — for good, if it ran with
    /// [`UcxError::Stuck`].
    pub unsafe fn put(&self, put: Put<'_>, done: impl FnOnce(Result<(), UcxError>) + Send + 'static) {
        let Put { key, remote, local, len, deadline } = put;
        self.start(Transfer {
            direction: Direction::Put,
            endpoint: self.id,
            key: key.id,
            remote,
            local: Local(local.cast_mut()),
            len,
            deadline,
            done: Done::new(done),
            refused: self.check(key, remote, len).err(),
        });
    }

    /// Closes the way to the peer. On return every operation of this endpoint has completed, and no local buffer is
    /// touched any more; if that cannot be had from UCX, the error is [`UcxError::Stuck`].
    pub fn abort(&self) -> Result<(), UcxError> {
        let endpoint = self.id;
        let wait = STUCK_MAX + SLACK;
        match self.shared.call("abort", Some(wait), |reply| Command::Abort { endpoint, reply }) {
            // A worker that has stopped has closed everything.
            Err(UcxError::WorkerStopped) => Ok(()),
            Err(UcxError::DeadlineExceeded) => Err(UcxError::Stuck),
            other => other,
        }
    }

    /// Whether the range is the peer's to give.
    fn check(&self, key: &RemoteKey, address: u64, len: usize) -> Result<(), UcxError> {
        if key.endpoint != self.id || !Arc::ptr_eq(&key.shared, &self.shared) {
            return Err(UcxError::WrongEndpoint);
        }
        let len = len as u64;
        // `key.base + key.len` does not wrap: the envelope was checked.
        let inside =
            address >= key.base && address.checked_add(len).is_some_and(|end| end <= key.base + key.len);
        if inside {
            Ok(())
        } else {
            Err(UcxError::OutOfRange { address, len, base: key.base, range: key.len })
        }
    }

    fn start(&self, mut transfer: Transfer) {
        let refused = match transfer.refused.take() {
            Some(error) => Some((transfer.done, Err(error))),
            None if transfer.len == 0 => Some((transfer.done, Ok(()))),
            None => self.shared.submit_transfer(transfer).err().map(|(done, error)| (done, Err(error))),
        };
        if let Some((done, result)) = refused {
            done.run(result);
        }
    }
}

impl Drop for Endpoint {
    fn drop(&mut self) {
        let _ = self.shared.submit(Command::Close { endpoint: self.id });
    }
}

/// Memory of a peer.
#[derive(Debug)]
pub struct RemoteKey {
    shared: Arc<Shared>,
    id: u64,
    endpoint: u64,
    base: u64,
    len: u64,
}

impl RemoteKey {
    pub(super) fn new(shared: Arc<Shared>, id: u64, endpoint: u64, base: u64, len: u64) -> Self {
        Self { shared, id, endpoint, base, len }
    }

    /// Address of the first byte, in the peer.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Bytes that the peer registered.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether the peer registered nothing.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for RemoteKey {
    fn drop(&mut self) {
        let _ = self.shared.submit(Command::Forget { key: self.id });
    }
}

/// An address in this process on its way to the progress thread.
#[derive(Clone, Copy, Debug)]
pub(super) struct Local(pub(super) *mut u8);

// SAFETY: the caller of `register`, `get` or `put` vouches for the memory until completion, on whichever thread.
unsafe impl Send for Local {}

type Completion = Box<dyn FnOnce(Result<(), UcxError>) + Send>;

/// The caller's completion; runs once, come what may.
pub(super) struct Done(Option<Completion>);

impl Done {
    fn new(done: impl FnOnce(Result<(), UcxError>) + Send + 'static) -> Self {
        Self(Some(Box::new(done)))
    }

    /// Runs the completion. A panic in it is the caller's bug and stays with that one operation.
    pub(super) fn run(mut self, result: Result<(), UcxError>) {
        self.run_once(result);
    }

    fn run_once(&mut self, result: Result<(), UcxError>) {
        let Some(done) = self.0.take() else { return };
        if catch_unwind(AssertUnwindSafe(move || done(result))).is_err() {
            tracing::error!("the completion of a UCX operation panicked");
        }
    }
}

impl Drop for Done {
    fn drop(&mut self) {
        // Only a bug of ours gets here; nothing is known about the buffer then.
        self.run_once(Err(UcxError::Stuck));
    }
}

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Get,
    Put,
}

/// One operation on its way to the progress thread.
pub(super) struct Transfer {
    pub(super) direction: Direction,
    pub(super) endpoint: u64,
    pub(super) key: u64,
    pub(super) remote: u64,
    pub(super) local: Local,
    pub(super) len: usize,
    pub(super) deadline: Instant,
    pub(super) done: Done,
    refused: Option<UcxError>,
}

/// Where an answer goes.
pub(super) type Reply<T> = SyncSender<Result<T, UcxError>>;

/// Everything that the progress thread can be asked for.
pub(super) enum Command {
    Register { base: Local, len: usize, reply: Reply<Registration> },
    Unregister { id: u64, reply: Option<Reply<()>> },
    Connect { address: Vec<u8>, owner: u64, deadline: Instant, reply: Reply<Endpoint> },
    Import { endpoint: u64, key: Vec<u8>, base: u64, len: u64, reply: Reply<RemoteKey> },
    Forget { key: u64 },
    Transfer(Transfer),
    Abort { endpoint: u64, reply: Reply<()> },
    Close { endpoint: u64 },
    Stop { reply: Reply<()> },
}

/// What handles and progress thread share.
#[derive(Debug)]
pub(super) struct Shared {
    inbox: Mutex<Inbox>,
    /// Written when the thread sleeps and has got a command.
    pub(super) wake: OwnedFd,
    thread: OnceLock<ThreadId>,
}

/// Commands not yet taken.
#[derive(Default)]
struct Inbox {
    commands: VecDeque<Command>,
    /// The thread polls, or is about to: whoever clears this writes to `wake`.
    sleeping: bool,
    /// Cleared for good when the thread ends.
    open: bool,
    /// Accepted and not completed.
    operations: usize,
}

impl std::fmt::Debug for Inbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Inbox")
            .field("commands", &self.commands.len())
            .field("open", &self.open)
            .field("operations", &self.operations)
            .finish_non_exhaustive()
    }
}

impl Shared {
    /// Queues a command. Not for transfers, which have a limit of their own.
    fn submit(&self, command: Command) -> Result<(), UcxError> {
        let mut inbox = self.inbox.lock();
        if !inbox.open {
            return Err(UcxError::WorkerStopped);
        }
        inbox.commands.push_back(command);
        let wake = std::mem::take(&mut inbox.sleeping);
        drop(inbox);
        self.wake_if(wake);
        Ok(())
    }

    fn submit_transfer(&self, transfer: Transfer) -> Result<(), (Done, UcxError)> {
        let mut inbox = self.inbox.lock();
        if !inbox.open {
            return Err((transfer.done, UcxError::WorkerStopped));
        }
        if inbox.operations >= INFLIGHT_MAX {
            return Err((transfer.done, UcxError::QueueFull { limit: INFLIGHT_MAX }));
        }
        inbox.operations += 1;
        inbox.commands.push_back(Command::Transfer(transfer));
        let wake = std::mem::take(&mut inbox.sleeping);
        drop(inbox);
        self.wake_if(wake);
        Ok(())
    }

    fn wake_if(&self, wake: bool) {
        if wake {
            // Can only fail with a full counter, and then the thread wakes up just the same.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    /// Asks the progress thread and waits for the answer, `wait` at most.
    fn call<T>(
        &self,
        call: &'static str,
        wait: Option<Duration>,
        command: impl FnOnce(Reply<T>) -> Command,
    ) -> Result<T, UcxError> {
        if self.is_progress_thread() {
            return Err(UcxError::OnProgressThread { call });
        }
        let (reply, answer) = sync_channel(1);
        self.submit(command(reply))?;
        let answer = match wait {
            Some(wait) => answer.recv_timeout(wait),
            // Local work of the thread, or bounded by the deadlines of operations in flight.
            None => answer.recv().map_err(RecvTimeoutError::from),
        };
        match answer {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => Err(UcxError::DeadlineExceeded),
            Err(RecvTimeoutError::Disconnected) => Err(UcxError::WorkerStopped),
        }
    }

    fn is_progress_thread(&self) -> bool {
        self.thread.get() == Some(&std::thread::current().id())
    }

    /// The progress thread says who it is.
    pub(super) fn adopt(&self) {
        let _ = self.thread.set(std::thread::current().id());
    }

    /// Moves every command to the empty `taken`. The thread is awake from here on.
    pub(super) fn take(&self, taken: &mut VecDeque<Command>) {
        debug_assert!(taken.is_empty());
        let mut inbox = self.inbox.lock();
        inbox.sleeping = false;
        std::mem::swap(&mut inbox.commands, taken);
    }

    /// Announces that the thread will poll `wake`; false if there is a command to see to first.
    #[must_use]
    pub(super) fn fall_asleep(&self) -> bool {
        let mut inbox = self.inbox.lock();
        inbox.sleeping = inbox.commands.is_empty();
        inbox.sleeping
    }

    /// Makes room for as many operations.
    pub(super) fn completed(&self, operations: usize) {
        let mut inbox = self.inbox.lock();
        assert!(inbox.operations >= operations, "more operations completed than accepted");
        inbox.operations -= operations;
    }

    /// Takes no more commands, and fails those that nobody has taken.
    pub(super) fn close(&self) {
        let mut inbox = self.inbox.lock();
        inbox.open = false;
        let left = std::mem::take(&mut inbox.commands);
        drop(inbox);
        for command in left {
            // The other commands' replies are dropped, which their callers read as a stopped worker.
            if let Command::Transfer(transfer) = command {
                transfer.done.run(Err(UcxError::WorkerStopped));
            }
        }
    }
}
