//! Handles of a UCX worker, usable from any thread.
//!
//! Owns the queue of commands to the progress thread, not UCX itself: only the progress thread uses that.
//!
//! Invariants:
//! - Dropping a handle releases its resource. [`Registration`] waits until UCX has released the memory; the others only
//!   send a command to the progress thread.
//! - `done` runs exactly once: on the progress thread, or, for an operation refused before it was queued, on the
//!   calling thread before the call returns. It must not block; it may start further operations.
//! - Operations accepted and not completed ≤ [`INFLIGHT_MAX`].

use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread::ThreadId;
use std::time::Duration;

use moontide_rt::sync::Mutex;
use moontide_rt::time::Instant;

use super::envelope::{Envelope, Kind};
use super::error::{Transports, UcxError};

/// Most operations in flight on one worker. Eight peers with a send queue of 128 each; more would only wait inside UCX.
pub const INFLIGHT_MAX: usize = 1024;

/// How long UCX may take to complete operations after their endpoint was closed by force. It cancels queued ones and
/// waits for those that the network card still holds; that takes milliseconds, or a link timeout at worst.
pub(super) const STUCK_MAX: Duration = Duration::from_secs(5);
/// Time that a caller waits for the progress thread in addition to the time limit of that thread.
pub(super) const SLACK: Duration = Duration::from_secs(1);

/// Memory that peers may read and write. Dropping it ends their access, and waits until UCX has released the memory.
///
/// It must not be dropped by a completion: there the wait is impossible, and UCX releases the memory a moment after the
/// drop.
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

    /// Returns the address of the first registered byte, as peers use it.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Returns the number of registered bytes.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether nothing is registered.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the key that a peer needs to [`import`](Endpoint::import) this memory.
    pub fn key(&self) -> &[u8] {
        &self.key
    }
}

impl Drop for Registration {
    fn drop(&mut self) {
        let id = self.id;
        let released =
            self.shared.call("unregister", None, |reply| UcxCommand::Unregister { id, reply: Some(reply) });
        if let Err(UcxError::OnProgressThread { .. }) = released {
            // Cannot wait here; the type's documentation forbids this.
            tracing::error!(
                "registered memory was dropped by a completion; UCX releases it only a moment later"
            );
            let _ = self.shared.submit(UcxCommand::Unregister { id, reply: None });
        }
    }
}

/// Connection to one peer. Dropping it closes the connection by force; operations in flight fail.
#[derive(Debug)]
pub struct Endpoint {
    shared: Arc<Shared>,
    id: u64,
    owner: u64,
    transports: Transports,
}

/// Parameters of a read from a peer.
#[derive(Clone, Copy, Debug)]
pub struct Get<'a> {
    /// Key of the peer's memory.
    pub key: &'a RemoteKey,
    /// Address of the first byte at the peer.
    pub remote: u64,
    /// Address of the first byte in this process.
    pub local: *mut u8,
    /// Length in bytes.
    pub len: usize,
    /// Deadline. After it the endpoint is closed, since UCX cannot abort a single operation.
    pub deadline: Instant,
}

/// Parameters of a write to a peer.
#[derive(Clone, Copy, Debug)]
pub struct Put<'a> {
    /// Key of the peer's memory.
    pub key: &'a RemoteKey,
    /// Address of the first byte at the peer.
    pub remote: u64,
    /// Address of the first byte in this process.
    pub local: *const u8,
    /// Length in bytes.
    pub len: usize,
    /// Deadline. After it the endpoint is closed, since UCX cannot abort a single operation.
    pub deadline: Instant,
}

impl Endpoint {
    pub(super) fn new(shared: Arc<Shared>, id: u64, owner: u64, transports: Transports) -> Self {
        Self { shared, id, owner, transports }
    }

    /// Returns the transports of this endpoint.
    pub fn transports(&self) -> &Transports {
        &self.transports
    }

    /// Imports a [`Registration::key`] of this peer, which makes its memory accessible.
    pub fn import(&self, key: &[u8]) -> Result<RemoteKey, UcxError> {
        let envelope = Envelope::decode(key, Kind::Key)?;
        if envelope.owner != self.owner {
            return Err(UcxError::WrongOwner { endpoint: self.owner, key: envelope.owner });
        }
        let (endpoint, base, len) = (self.id, envelope.base, envelope.range);
        let key = envelope.payload.to_vec();
        self.shared.call("import", None, |reply| UcxCommand::Import { endpoint, key, base, len, reply })
    }

    /// Reads from the peer. `done(Ok)` means that the bytes are in the local buffer.
    ///
    /// # Safety
    /// `local..local + len` is valid for writes and not otherwise used until `done` has run — permanently, if it ran
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

    /// Writes to the peer. `done(Ok)` means that the bytes are in the peer's memory.
    ///
    /// # Safety
    /// `local..local + len` is valid for reads and not written until `done` has run — permanently, if it ran with
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

    /// Closes the connection. On return every operation of this endpoint has completed, and no local buffer is accessed
    /// any more; if UCX does not guarantee that, the error is [`UcxError::Stuck`].
    pub fn abort(&self) -> Result<(), UcxError> {
        let endpoint = self.id;
        let wait = STUCK_MAX + SLACK;
        match self.shared.call("abort", Some(wait), |reply| UcxCommand::Abort { endpoint, reply }) {
            // A stopped worker has closed everything.
            Err(UcxError::WorkerStopped) => Ok(()),
            Err(UcxError::DeadlineExceeded) => Err(UcxError::Stuck),
            other => other,
        }
    }

    /// Checks that the range is inside the registered memory of the peer.
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
        let _ = self.shared.submit(UcxCommand::Close { endpoint: self.id });
    }
}

/// Access to registered memory of a peer.
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

    /// Returns the address of the first byte, at the peer.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// Returns the number of bytes that the peer registered.
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether the peer registered nothing.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl Drop for RemoteKey {
    fn drop(&mut self) {
        let _ = self.shared.submit(UcxCommand::Forget { key: self.id });
    }
}

/// Address in this process, sent to the progress thread.
#[derive(Clone, Copy, Debug)]
pub(super) struct Local(pub(super) *mut u8);

// SAFETY: the caller of `register`, `get` or `put` guarantees the memory until completion, on whichever thread.
unsafe impl Send for Local {}

type Completion = Box<dyn FnOnce(Result<(), UcxError>) + Send>;

/// Completion of the caller; runs exactly once.
pub(super) struct Done(Option<Completion>);

impl Done {
    fn new(done: impl FnOnce(Result<(), UcxError>) + Send + 'static) -> Self {
        Self(Some(Box::new(done)))
    }

    /// Runs the completion. A panic in it is a bug of the caller and affects only that operation.
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
        // Reached only by a bug of this crate; the state of the buffer is unknown then.
        self.run_once(Err(UcxError::Stuck));
    }
}

/// Direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Direction {
    Get,
    Put,
}

/// Operation that is sent to the progress thread.
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

/// Channel for the reply to a command.
pub(super) type Reply<T> = SyncSender<Result<T, UcxError>>;

/// Command to the progress thread.
pub(super) enum UcxCommand {
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

/// State shared by handles and progress thread.
#[derive(Debug)]
pub(super) struct Shared {
    queue: Mutex<CommandQueue>,
    /// Written when a command is queued while the thread sleeps.
    pub(super) wake: OwnedFd,
    thread: OnceLock<ThreadId>,
}

/// Commands that the thread has not taken yet.
#[derive(Default)]
struct CommandQueue {
    commands: VecDeque<UcxCommand>,
    /// The thread polls, or is about to. The code that clears this writes to `wake`.
    sleeping: bool,
    /// Cleared permanently when the thread ends.
    open: bool,
    /// Operations accepted and not completed.
    operations: usize,
}

impl std::fmt::Debug for CommandQueue {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CommandQueue")
            .field("commands", &self.commands.len())
            .field("open", &self.open)
            .field("operations", &self.operations)
            .finish_non_exhaustive()
    }
}

impl Shared {
    /// Creates the state of a worker whose thread sleeps on `wake`.
    pub(super) fn new(wake: OwnedFd) -> Self {
        Self {
            queue: Mutex::new(CommandQueue { open: true, ..CommandQueue::default() }),
            wake,
            thread: OnceLock::new(),
        }
    }

    /// Queues a command. Not for transfers, which have a limit of their own.
    pub(super) fn submit(&self, command: UcxCommand) -> Result<(), UcxError> {
        let mut queue = self.queue.lock();
        if !queue.open {
            return Err(UcxError::WorkerStopped);
        }
        queue.commands.push_back(command);
        let wake = std::mem::take(&mut queue.sleeping);
        drop(queue);
        self.wake_if(wake);
        Ok(())
    }

    fn submit_transfer(&self, transfer: Transfer) -> Result<(), (Done, UcxError)> {
        let mut queue = self.queue.lock();
        if !queue.open {
            return Err((transfer.done, UcxError::WorkerStopped));
        }
        if queue.operations >= INFLIGHT_MAX {
            return Err((transfer.done, UcxError::QueueFull { limit: INFLIGHT_MAX }));
        }
        queue.operations += 1;
        queue.commands.push_back(UcxCommand::Transfer(transfer));
        let wake = std::mem::take(&mut queue.sleeping);
        drop(queue);
        self.wake_if(wake);
        Ok(())
    }

    fn wake_if(&self, wake: bool) {
        if wake {
            // Fails only if the counter is full, and then the thread wakes up anyway.
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }

    /// Sends a command to the progress thread and waits for the reply, at most for `wait`.
    pub(super) fn call<T>(
        &self,
        call: &'static str,
        wait: Option<Duration>,
        command: impl FnOnce(Reply<T>) -> UcxCommand,
    ) -> Result<T, UcxError> {
        if self.is_progress_thread() {
            return Err(UcxError::OnProgressThread { call });
        }
        let (reply, receiver) = sync_channel(1);
        self.submit(command(reply))?;
        let received = match wait {
            Some(wait) => receiver.recv_timeout(wait),
            // Local work of the thread, or bounded by the deadlines of operations in flight.
            None => receiver.recv().map_err(RecvTimeoutError::from),
        };
        match received {
            Ok(result) => result,
            Err(RecvTimeoutError::Timeout) => Err(UcxError::DeadlineExceeded),
            Err(RecvTimeoutError::Disconnected) => Err(UcxError::WorkerStopped),
        }
    }

    pub(super) fn is_progress_thread(&self) -> bool {
        self.thread.get() == Some(&std::thread::current().id())
    }

    /// Registers the calling thread as the progress thread.
    pub(super) fn set_progress_thread(&self) {
        let _ = self.thread.set(std::thread::current().id());
    }

    /// Moves all commands to `taken`, which must be empty. The thread counts as awake from here on.
    pub(super) fn take(&self, taken: &mut VecDeque<UcxCommand>) {
        debug_assert!(taken.is_empty());
        let mut queue = self.queue.lock();
        queue.sleeping = false;
        std::mem::swap(&mut queue.commands, taken);
    }

    /// Announces that the thread will poll `wake`. Returns `false` if a command must be handled first.
    #[must_use]
    pub(super) fn prepare_sleep(&self) -> bool {
        let mut queue = self.queue.lock();
        queue.sleeping = queue.commands.is_empty();
        queue.sleeping
    }

    /// Removes completed operations from the count of accepted ones.
    pub(super) fn completed(&self, operations: usize) {
        let mut queue = self.queue.lock();
        assert!(queue.operations >= operations, "more operations completed than accepted");
        queue.operations -= operations;
    }

    /// Closes the queue, and fails the commands in it.
    pub(super) fn close(&self) {
        let mut queue = self.queue.lock();
        queue.open = false;
        let left = std::mem::take(&mut queue.commands);
        drop(queue);
        for command in left {
            // The replies of other commands are dropped, which their callers see as a stopped worker.
            if let UcxCommand::Transfer(transfer) = command {
                transfer.done.run(Err(UcxError::WorkerStopped));
            }
        }
    }
}
