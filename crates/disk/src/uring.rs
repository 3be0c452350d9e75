//! [`UringQueue`]: many operations at a time for one thread, through one io_uring.
//!
//! The kernel reads and writes the buffers while [`Queue::run`] goes on, by address. What makes this sound:
//!
//! * A [`Transfer`], and with it the borrow of its buffer, stays in its slot from the push until its completion is
//!   reaped: `in flight ⊆ taken slots`.
//! * [`Flight`] does not end while anything is in flight, not even by a panic of the work: it waits in Drop. If the
//!   kernel does not even let it wait, then the process ends: nothing else keeps the buffers from being used again.
//!
//! Every slot has at most one entry in the submission queue, which has as many places as there are slots: it is never
//! full, and the completion queue, twice as long, does not overflow.
//!
//! A ring belongs to the thread that made it (`SINGLE_ISSUER`, `DEFER_TASKRUN`: the kernel then finishes operations
//! when that thread waits, and does not interrupt it). A queue that moves to another thread makes a new ring there.

use std::fmt;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, ThreadId};

use std::os::fd::AsRawFd;

use io_uring::types::{Fd, FsyncFlags};
use io_uring::{IoUring, Probe, opcode, squeue};

use crate::os::{Fallback, Step, Transfer};
use crate::posix::{self, PosixQueue};
use crate::storage::{OpKind, Queue, QueueConfig, RegisteredMemory, Work};

/// The engine's name in logs and metrics.
pub(crate) const NAME: &str = "uring";

/// Operations in flight, whatever the configuration says: no SSD is faster with more, and a ring is locked memory.
const DEPTH_MAX: usize = 4096;

/// Bytes per registered buffer: the kernel's limit.
const CHUNK_BYTES: usize = 1 << 30;

/// Runs operations on a ring.
pub(crate) struct UringQueue {
    depth: usize,
    memory: Option<RegisteredMemory>,
    /// None if the kernel refused: then the operations are run one by one.
    ring: Option<Ring>,
    fallback: Arc<Fallback>,
}

/// A ring of one thread.
struct Ring {
    ring: IoUring,
    thread: ThreadId,
    /// Memory that the kernel keeps pinned, in buffers of [`CHUNK_BYTES`].
    fixed: Option<RegisteredMemory>,
}

/// Whether the kernel lets us use io_uring, with all that we need of it.
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
            "the kernel's io_uring lacks reads and writes",
        ));
    }
    // A filter of system calls may allow to make a ring and forbid to use it.
    // SAFETY: this operation has no buffer.
    unsafe { ring.submission().push(&opcode::Nop::new().build()) }.expect("the ring is empty");
    ring.submit_and_wait(1)?;
    match ring.completion().next() {
        Some(answer) if answer.result() == 0 => Ok(()),
        _ => Err(io::Error::other("io_uring does not answer")),
    }
}

/// A ring for the calling thread, with what the kernel knows of what makes it fast.
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
    /// A queue for the calling thread.
    pub(crate) fn new(config: &QueueConfig, fallback: Arc<Fallback>) -> UringQueue {
        let depth = config.depth.clamp(1, DEPTH_MAX);
        let ring = Ring::new(depth, config.registered, &fallback);
        UringQueue { depth, memory: config.registered, ring, fallback }
    }
}

impl Ring {
    fn new(depth: usize, memory: Option<RegisteredMemory>, fallback: &Fallback) -> Option<Ring> {
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

    /// Which registered buffer holds all of these bytes.
    fn fixed_index(&self, address: usize, len: usize) -> Option<u16> {
        let fixed = self.fixed?;
        let start = address.checked_sub(fixed.address)?;
        let last = start + len.checked_sub(1)?;
        let chunk = start / CHUNK_BYTES;
        (last < fixed.len && last / CHUNK_BYTES == chunk).then_some(chunk as u16)
    }

    fn entry(&self, transfer: &mut Transfer<'_>) -> squeue::Entry {
        let fd = Fd(transfer.file().file.as_raw_fd());
        let offset = transfer.offset();
        match transfer.kind() {
            OpKind::Read => {
                let (_, rest) = transfer.rest_mut();
                let (start, len) = (rest.as_mut_ptr(), rest.len());
                match self.fixed_index(start.addr(), len) {
                    Some(index) => {
                        opcode::ReadFixed::new(fd, start, len as u32, index).offset(offset).build()
                    }
                    None => opcode::Read::new(fd, start, len as u32).offset(offset).build(),
                }
            }
            OpKind::Write => {
                let rest = transfer.rest();
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

/// Pins memory for a ring. Refused is not wrong, only slower.
fn register(ring: &IoUring, memory: RegisteredMemory) -> bool {
    static SAID: AtomicBool = AtomicBool::new(false);

    let mut buffers = vec![];
    for start in (0..memory.len).step_by(CHUNK_BYTES) {
        let base = std::ptr::with_exposed_provenance_mut(memory.address.wrapping_add(start));
        buffers.push(libc::iovec { iov_base: base, iov_len: CHUNK_BYTES.min(memory.len - start) });
    }
    // SAFETY: the kernel checks that there is memory, and keeps its pages as long as the ring. It touches them only for
    // an operation within them, whose buffer proves that somebody owns the addresses now.
    match unsafe { ring.submitter().register_buffers(&buffers) } {
        Ok(()) => true,
        Err(reason) => {
            if !SAID.swap(true, Ordering::Relaxed) {
                tracing::warn!(
                    bytes = memory.len,
                    %reason,
                    "memory is not registered with io_uring: its pages are pinned for every operation; slower, still \
                     right. The limit on locked memory (RLIMIT_MEMLOCK) may be too low"
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

    fn run<'a>(&mut self, work: &mut dyn Work<'a>) {
        if self.ring.as_ref().is_some_and(|ring| ring.thread != thread::current().id()) {
            // Given back first: what both pin would count twice.
            self.ring = None;
            self.ring = Ring::new(self.depth, self.memory, &self.fallback);
        }
        match &mut self.ring {
            Some(ring) => run(ring, self.depth, work),
            None => PosixQueue.run(work),
        }
    }
}

fn run<'a>(ring: &mut Ring, depth: usize, work: &mut dyn Work<'a>) {
    let mut flight = Flight::new(ring, depth);
    loop {
        flight.fill(work);
        if flight.in_flight == 0 {
            return;
        }
        flight.wait();
        while let Some((slot, answer)) = flight.reap() {
            match flight.transfer(slot).advance(answer) {
                Step::Again => flight.push(slot),
                Step::Ended(result) => {
                    let done = flight.take(slot).end(result);
                    work.done(done);
                }
            }
            // The disk must not stand idle while the work looks at the rest of what has come.
            flight.fill(work);
            flight.submit_early();
        }
    }
}

/// The operations of one run.
struct Flight<'r, 'a> {
    ring: &'r mut Ring,
    /// Never grows past its capacity, so that what is in it does not move.
    slots: Vec<Option<Transfer<'a>>>,
    free: Vec<usize>,
    depth: usize,
    /// Pushed, and not yet reaped.
    in_flight: usize,
    /// Pushed, and perhaps not yet seen by the kernel.
    unsubmitted: usize,
}

impl<'r, 'a> Flight<'r, 'a> {
    fn new(ring: &'r mut Ring, depth: usize) -> Flight<'r, 'a> {
        let (slots, free) = (Vec::with_capacity(depth), vec![]);
        Flight { ring, slots, free, depth, in_flight: 0, unsubmitted: 0 }
    }

    /// Takes as many operations as there are and fit.
    fn fill(&mut self, work: &mut dyn Work<'a>) {
        while self.in_flight < self.depth {
            let Some(op) = work.next() else { return };
            match Transfer::begin(op) {
                Ok(transfer) => {
                    let slot = self.free.pop().unwrap_or_else(|| {
                        self.slots.push(None);
                        self.slots.len() - 1
                    });
                    self.slots[slot] = Some(transfer);
                    self.push(slot);
                }
                Err(done) => work.done(done),
            }
        }
    }

    fn transfer(&mut self, slot: usize) -> &mut Transfer<'a> {
        self.slots[slot].as_mut().expect("in flight until now")
    }

    fn take(&mut self, slot: usize) -> Transfer<'a> {
        self.free.push(slot);
        self.slots[slot].take().expect("in flight until now")
    }

    /// Gives the rest of an operation to the kernel.
    fn push(&mut self, slot: usize) {
        let transfer = self.slots[slot].as_mut().expect("a slot that is taken");
        let entry = self.ring.entry(transfer).user_data(slot as u64);
        // SAFETY: the buffer and the file are borrowed or owned by the transfer, which stays in its slot, untouched,
        // until its completion is reaped; Drop waits for it.
        unsafe { self.ring.ring.submission().push(&entry) }.expect("a place for every slot");
        self.in_flight += 1;
        self.unsubmitted += 1;
    }

    /// The next operation that the kernel has answered. It is not in flight any more.
    fn reap(&mut self) -> Option<(usize, io::Result<usize>)> {
        let completion = self.ring.ring.completion().next()?;
        self.in_flight -= 1;
        let answer = match usize::try_from(completion.result()) {
            Ok(bytes) => Ok(bytes),
            Err(_) => Err(io::Error::from_raw_os_error(-completion.result())),
        };
        Some((completion.user_data() as usize, answer))
    }

    /// Submits what was pushed, if it is a good part of what the disk should be busy with: a system call each would
    /// cost more than it gains when operations are small.
    fn submit_early(&mut self) {
        if self.unsubmitted * 4 >= self.depth && self.ring.ring.submit().is_ok() {
            // One that fails, or submits less, is tried again by the wait.
            self.unsubmitted = 0;
        }
    }

    /// Submits what was pushed, and waits until something can be reaped.
    fn wait(&mut self) {
        loop {
            let answer = self.ring.ring.submit_and_wait(1);
            if !self.ring.ring.completion().is_empty() {
                break;
            }
            match answer.err().and_then(|err| err.raw_os_error()) {
                None | Some(libc::EINTR) => {}
                // No memory for now.
                Some(libc::EAGAIN | libc::EBUSY) => thread::yield_now(),
                Some(errno) => {
                    tracing::error!(errno, in_flight = self.in_flight, "io_uring cannot be waited for");
                    // The kernel may go on to write to buffers that this thread would give back.
                    std::process::abort();
                }
            }
        }
        self.unsubmitted = 0;
    }
}

impl Drop for Flight<'_, '_> {
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
