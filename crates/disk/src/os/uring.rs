//! [`UringQueue`]: many concurrent operations for one thread, with one io_uring.
//!
//! The kernel reads and writes the buffers by address while [`Queue::run`] is active. This is sound because:
//!
//! * An [`OsOp`], and with it the borrow of its buffer, stays in its slot from the push until its completion is reaped:
//!   `in flight ⊆ occupied slots`.
//! * [`InFlightOps`] does not end while anything is in flight, not even if the source panics: it waits in Drop. If the
//!   kernel refuses even the wait, the process aborts: nothing else keeps the buffers from being reused.
//!
//! Every slot has at most one entry in the submission queue, which has as many entries as there are slots: it is never
//! full, and the completion queue, twice as long, does not overflow.
//!
//! A ring belongs to the thread that created it (`SINGLE_ISSUER`, `DEFER_TASKRUN`: the kernel then completes operations
//! when that thread waits, and does not interrupt it). A queue that moves to another thread creates a new ring there.

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ThreadId};

use std::os::fd::AsRawFd;

use io_uring::types::{Fd, FsyncFlags};
use io_uring::{IoUring, Probe, opcode, squeue};

use super::op::{OpProgress, OsOp};
use super::posix::{self, PosixQueue};
use crate::storage::{OpKind, OpSource, Queue, QueueConfig, RegisteredMemory};

/// Name of the engine in logs and metrics.
pub(crate) const NAME: &str = "uring";

/// Upper bound of the depth: no SSD is faster with more operations, and a ring is locked memory.
const DEPTH_MAX: usize = 4096;

/// Bytes per registered buffer: the kernel's limit.
const CHUNK_BYTES: usize = 1 << 30;

/// Runs operations on a ring.
pub(crate) struct UringQueue {
    depth: usize,
    memory: Option<RegisteredMemory>,
    /// `None` if the kernel refused it: operations then run one by one.
    ring: Option<Ring>,
    fallback: Arc<UringFallback>,
}

/// A ring of one thread.
struct Ring {
    ring: IoUring,
    thread: ThreadId,
    /// Memory that the kernel keeps pinned, in buffers of [`CHUNK_BYTES`].
    fixed: Option<RegisteredMemory>,
}

/// Logs once per storage that io_uring is refused: the queue of every thread may detect it.
#[derive(Debug)]
pub(crate) struct UringFallback {
    root: PathBuf,
    warned: AtomicBool,
}

impl UringFallback {
    /// Creates the log state of the storage in `root`.
    pub(crate) fn new(root: &Path) -> UringFallback {
        UringFallback { root: root.to_owned(), warned: AtomicBool::new(false) }
    }

    /// Logs the refusal of io_uring.
    pub(crate) fn warn(&self, reason: &io::Error) {
        if !self.warned.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                root = %self.root.display(),
                %reason,
                "io_uring is not available; using the posix engine: slower, with one operation at a time per thread"
            );
        }
    }
}

/// Checks whether the kernel allows io_uring with all operations that are needed.
pub(crate) fn probe() -> io::Result<()> {
    let mut ring = build(1)?;
    let mut probe = Probe::new();
    ring.submitter().register_probe(&mut probe)?;
    let codes = [
        opcode::Read::CODE,
        opcode::Write::CODE,
        opcode::ReadFixed::CODE,
        opcode::WriteFixed::CODE,
        opcode::Fsync::CODE,
    ];
    if !codes.iter().all(|code| probe.is_supported(*code)) {
        return Err(io::Error::new(
            io::ErrorKind::Unsupported,
            "io_uring of this kernel lacks required operations",
        ));
    }
    // A filter of system calls may allow the creation of a ring and forbid its use.
    // SAFETY: this operation has no buffer.
    unsafe { ring.submission().push(&opcode::Nop::new().build()) }.expect("the ring is empty");
    ring.submit_and_wait(1)?;
    match ring.completion().next() {
        Some(completion) if completion.result() == 0 => Ok(()),
        _ => Err(io::Error::other("io_uring returned no completion")),
    }
}

/// Creates a ring for the calling thread, with the fastest flags that the kernel supports.
fn build(depth: usize) -> io::Result<IoUring> {
    let entries = depth as u32;
    let mut builder = IoUring::builder();
    // Linux 6.1.
    builder.setup_coop_taskrun().setup_single_issuer().setup_defer_taskrun();
    let unknown = |err: &io::Error| err.raw_os_error() == Some(libc::EINVAL);
    match builder.build(entries) {
        Err(err) if unknown(&err) => {}
        result => return result,
    }
    // Linux 5.19.
    let mut builder = IoUring::builder();
    builder.setup_coop_taskrun();
    match builder.build(entries) {
        Err(err) if unknown(&err) => IoUring::new(entries),
        result => result,
    }
}

impl UringQueue {
    /// Creates a queue for the calling thread.
    pub(crate) fn new(config: &QueueConfig, fallback: Arc<UringFallback>) -> UringQueue {
        let depth = config.depth.clamp(1, DEPTH_MAX);
        let ring = Ring::new(depth, config.registered, &fallback);
        UringQueue { depth, memory: config.registered, ring, fallback }
    }
}

impl Ring {
    fn new(depth: usize, memory: Option<RegisteredMemory>, fallback: &UringFallback) -> Option<Ring> {
        let ring = match build(depth) {
            Ok(ring) => ring,
            Err(reason) => {
                fallback.warn(&reason);
                return None;
            }
        };
        let fixed = memory.filter(|memory| memory.len > 0 && register(&ring, *memory));
        Some(Ring { ring, thread: thread::current().id(), fixed })
    }

    /// Returns the index of the registered buffer that holds all of these bytes.
    fn fixed_index(&self, address: usize, len: usize) -> Option<u16> {
        let fixed = self.fixed?;
        let start = address.checked_sub(fixed.address)?;
        let last = start + len.checked_sub(1)?;
        let chunk = start / CHUNK_BYTES;
        (last < fixed.len && last / CHUNK_BYTES == chunk).then_some(chunk as u16)
    }

    fn entry(&self, op: &mut OsOp<'_>) -> squeue::Entry {
        let fd = Fd(op.file().file.as_raw_fd());
        let offset = op.offset();
        match op.kind() {
            OpKind::Read => {
                let (_, rest) = op.rest_mut();
                let (start, len) = (rest.as_mut_ptr(), rest.len());
                match self.fixed_index(start.addr(), len) {
                    Some(index) => {
                        opcode::ReadFixed::new(fd, start, len as u32, index).offset(offset).build()
                    }
                    None => opcode::Read::new(fd, start, len as u32).offset(offset).build(),
                }
            }
            OpKind::Write => {
                let rest = op.rest();
                let (start, len) = (rest.as_ptr(), rest.len());
                match self.fixed_index(start.addr(), len) {
                    Some(index) => {
                        opcode::WriteFixed::new(fd, start, len as u32, index).offset(offset).build()
                    }
                    None => opcode::Write::new(fd, start, len as u32).offset(offset).build(),
                }
            }
            OpKind::Sync => opcode::Fsync::new(fd).flags(FsyncFlags::DATASYNC).build(),
        }
    }
}

/// Registers memory with a ring. Without it, operations are only slower.
fn register(ring: &IoUring, memory: RegisteredMemory) -> bool {
    static WARNED: AtomicBool = AtomicBool::new(false);

    let mut buffers = vec![];
    for start in (0..memory.len).step_by(CHUNK_BYTES) {
        let base = std::ptr::with_exposed_provenance_mut(memory.address.wrapping_add(start));
        buffers.push(libc::iovec { iov_base: base, iov_len: CHUNK_BYTES.min(memory.len - start) });
    }
    // SAFETY: the kernel checks that the memory exists, and holds its pages as long as the ring exists. It accesses
    // them only for an operation within them, whose buffer proves that the addresses are owned at that time.
    match unsafe { ring.submitter().register_buffers(&buffers) } {
        Ok(()) => true,
        Err(reason) => {
            if !WARNED.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    bytes = memory.len,
                    %reason,
                    "cannot register memory with io_uring; its pages are pinned for every operation, which is \
                     slower; raise the limit of locked memory (RLIMIT_MEMLOCK)"
                );
            }
            false
        }
    }
}

impl Queue for UringQueue {
    fn engine(&self) -> &'static str {
        if self.ring.is_some() { NAME } else { posix::NAME }
    }

    fn is_registered(&self) -> bool {
        self.ring.as_ref().is_some_and(|ring| ring.fixed.is_some())
    }

    fn run<'a>(&mut self, source: &mut dyn OpSource<'a>) {
        if self.ring.as_ref().is_some_and(|ring| ring.thread != thread::current().id()) {
            // Drop the old ring first: the memory pinned by both would count twice.
            self.ring = None;
            self.ring = Ring::new(self.depth, self.memory, &self.fallback);
        }
        match &mut self.ring {
            Some(ring) => run(ring, self.depth, source),
            None => PosixQueue.run(source),
        }
    }
}

fn run<'a>(ring: &mut Ring, depth: usize, source: &mut dyn OpSource<'a>) {
    let mut ops = InFlightOps::new(ring, depth);
    loop {
        ops.fill(source);
        if ops.in_flight == 0 {
            return;
        }
        ops.wait();
        while let Some((slot, result)) = ops.reap() {
            match ops.op(slot).advance(result) {
                OpProgress::Again => ops.push(slot),
                OpProgress::Ended(result) => {
                    let done = ops.take(slot).end(result);
                    source.done(done);
                }
            }
            // The disk must not be idle while the source processes the remaining completions.
            ops.fill(source);
            ops.submit_early();
        }
    }
}

/// Operations of one run.
struct InFlightOps<'r, 'a> {
    ring: &'r mut Ring,
    /// Never grows beyond its capacity, so that its elements do not move.
    slots: Vec<Option<OsOp<'a>>>,
    free: Vec<usize>,
    depth: usize,
    /// Pushed, and not yet reaped.
    in_flight: usize,
    /// Pushed, and possibly not yet submitted to the kernel.
    unsubmitted: usize,
}

impl<'r, 'a> InFlightOps<'r, 'a> {
    fn new(ring: &'r mut Ring, depth: usize) -> InFlightOps<'r, 'a> {
        let (slots, free) = (Vec::with_capacity(depth), vec![]);
        InFlightOps { ring, slots, free, depth, in_flight: 0, unsubmitted: 0 }
    }

    /// Takes as many operations as are available and fit.
    fn fill(&mut self, source: &mut dyn OpSource<'a>) {
        while self.in_flight < self.depth {
            let Some(op) = source.next() else { return };
            match OsOp::begin(op) {
                Ok(op) => {
                    let slot = self.free.pop().unwrap_or_else(|| {
                        self.slots.push(None);
                        self.slots.len() - 1
                    });
                    self.slots[slot] = Some(op);
                    self.push(slot);
                }
                Err(done) => source.done(done),
            }
        }
    }

    fn op(&mut self, slot: usize) -> &mut OsOp<'a> {
        self.slots[slot].as_mut().expect("the operation is in flight")
    }

    fn take(&mut self, slot: usize) -> OsOp<'a> {
        self.free.push(slot);
        self.slots[slot].take().expect("the operation is in flight")
    }

    /// Pushes the rest of an operation to the submission queue.
    fn push(&mut self, slot: usize) {
        let op = self.slots[slot].as_mut().expect("the slot is occupied");
        let entry = self.ring.entry(op).user_data(slot as u64);
        // SAFETY: the operation borrows or owns the buffer and the file, and stays in its slot, untouched, until its
        // completion is reaped; Drop waits for it.
        unsafe { self.ring.ring.submission().push(&entry) }.expect("the queue has an entry for every slot");
        self.in_flight += 1;
        self.unsubmitted += 1;
    }

    /// Takes the next completion. Its operation is no longer in flight.
    fn reap(&mut self) -> Option<(usize, io::Result<usize>)> {
        let completion = self.ring.ring.completion().next()?;
        self.in_flight -= 1;
        let result = match usize::try_from(completion.result()) {
            Ok(bytes) => Ok(bytes),
            Err(_) => Err(io::Error::from_raw_os_error(-completion.result())),
        };
        Some((completion.user_data() as usize, result))
    }

    /// Submits pushed operations, if they are at least a quarter of the depth: with small operations, a system call for
    /// each would cost more than it gains.
    fn submit_early(&mut self) {
        if self.unsubmitted * 4 >= self.depth && self.ring.ring.submit().is_ok() {
            // If it fails, or submits fewer, `wait` submits the rest.
            self.unsubmitted = 0;
        }
    }

    /// Submits pushed operations, and waits until a completion can be reaped.
    fn wait(&mut self) {
        loop {
            let result = self.ring.ring.submit_and_wait(1);
            if !self.ring.ring.completion().is_empty() {
                break;
            }
            match result.err().and_then(|err| err.raw_os_error()) {
                None | Some(libc::EINTR) => {}
                // Temporary lack of memory.
                Some(libc::EAGAIN | libc::EBUSY) => thread::yield_now(),
                Some(errno) => {
                    tracing::error!(errno, in_flight = self.in_flight, "cannot wait for io_uring; aborting");
                    // The kernel may still write to buffers that this thread would free.
                    std::process::abort();
                }
            }
        }
        self.unsubmitted = 0;
    }
}

impl Drop for InFlightOps<'_, '_> {
    fn drop(&mut self) {
        while self.in_flight > 0 {
            self.wait();
            while self.reap().is_some() {}
        }
    }
}

impl fmt::Debug for UringQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UringQueue")
            .field("engine", &self.engine())
            .field("depth", &self.depth)
            .field("registered", &self.is_registered())
            .finish()
    }
}
