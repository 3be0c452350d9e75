//! [`ShmEngine`] and [`ShmLink`]: gets and puts in memory that a node of this host shares.
//!
//! Operations run on the caller's thread, to their end, when they are started: there is nothing to wait for but the
//! memory itself. A put needs its Begin before and its Commit after, by [`Link::start_call`] on the same link. What is on
//! the node's disk is loaded by the node first, into memory that this process maps as well.

use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use moontide_heap::{Guard, LocalHeap, Lookup, Medium, Reader, join, open_stream};
use moontide_proto::convert::{LoadReply, LoadRequest, Wire, decode, encode};
use moontide_proto::limits::OPS_PER_FRAME_MAX;
use moontide_proto::{FrameKind, OpFlags, OpKind, Packed, PackedBuilder, TransferOp, v1};
use moontide_types::bounds::PAGE_BYTES;
use moontide_types::{Clock, ErrorCode, NodeId, Span, SystemClock};

use crate::engine::{Engine, EngineKind, Link, NotSuited, Peer, Pending, Score, Waiting, call};
use crate::error::{Failure, Name, TransferError};
use crate::metrics::Metrics;
use crate::op::{Direction, OpCore, Target};
use crate::plan::plan;
use crate::shm::door_of;
use crate::sync::{Arc, Mutex, lock};
use crate::tcp::connection::{Connection, code_at};
use crate::tcp::request::{NoAnswer, Request};
use crate::tcp::socket::Socket;

/// How the engine behaves.
#[derive(Clone, Debug)]
pub struct ShmConfig {
    /// Bytes that one reader may hold in place before it is told to copy.
    pub pinned_bytes_max: u64,
}

impl Default for ShmConfig {
    fn default() -> ShmConfig {
        ShmConfig { pinned_bytes_max: 1 << 30 }
    }
}

/// Shared memory, for peers on the same host.
#[derive(Debug)]
pub struct ShmEngine {
    config: ShmConfig,
    metrics: Arc<Metrics>,
}

impl ShmEngine {
    /// An engine with this configuration.
    ///
    /// # Safety
    /// As [`join`]: the nodes that it connects to, and their clients, are trusted to keep to the protocol.
    pub unsafe fn new(config: ShmConfig, metrics: Arc<Metrics>) -> ShmEngine {
        ShmEngine { config, metrics }
    }
}

fn door(peer: &Peer) -> Result<PathBuf, NotSuited> {
    let mut addresses = peer.addresses_of(EngineKind::Shm).peekable();
    addresses.peek().ok_or(NotSuited::NoAddress)?;
    let doors = addresses.filter_map(door_of);
    doors.into_iter().find(|door| door.exists()).ok_or(NotSuited::OtherHost)
}

impl Engine for ShmEngine {
    fn kind(&self) -> EngineKind {
        EngineKind::Shm
    }

    fn score(&self, peer: &Peer) -> Result<Score, NotSuited> {
        door(peer).map(|_| Score::SAME_MEMORY)
    }

    fn connect(&self, peer: &Peer, deadline: Instant) -> Result<Arc<dyn Link>, TransferError> {
        let unreachable = |what, source| TransferError::Unreachable {
            node: peer.node,
            last: Failure::System { what, peer: Name::Local(0), source },
        };
        let path = door(peer).map_err(|_| unreachable("find the door of", rustix::io::Errno::NOENT))?;
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        // SAFETY: says whoever made the engine.
        let joined = unsafe { join(&path, left, self.config.pinned_bytes_max) };
        let (heap, socket) =
            joined.map_err(|error| TransferError::NotLetIn { node: peer.node, why: Arc::new(error) })?;
        let (found, _) = heap.board().node();
        if found != peer.node {
            let last = Failure::Node { peer: Name::Local(0), found, expected: peer.node };
            return Err(TransferError::Unreachable { node: peer.node, last });
        }
        self.metrics.link_opened(EngineKind::Shm);
        let (heap, stream) = (std::sync::Arc::new(heap), Mutex::new(None));
        let link = ShmLink { node: peer.node, heap, socket, stream, metrics: Arc::clone(&self.metrics) };
        Ok(Arc::new(link))
    }
}

/// A node's memory, mapped.
#[derive(Debug)]
pub struct ShmLink {
    node: NodeId,
    /// Shared with those who read in place: they may outlive the link.
    heap: std::sync::Arc<LocalHeap>,
    socket: OwnedFd,
    /// The stream for calls; made when first needed, and again after it broke.
    stream: Mutex<Option<Arc<Connection>>>,
    metrics: Arc<Metrics>,
}

impl Drop for ShmLink {
    fn drop(&mut self) {
        if let Some(stream) = lock(&self.stream).take() {
            stream.stop();
        }
        self.metrics.link_closed(EngineKind::Shm);
    }
}

/// How long what was loaded from disk is kept for us; it is given back as soon as it is copied.
const LOAD_LEASE_MS: u32 = 2_000;

impl ShmLink {
    /// Runs operations on the disk: has the node load all of them, copies, and gives the memory back.
    fn run_on_disk(
        &self,
        ops: &[&OpCore],
        reader: &mut Reader<'_>,
        deadline: Instant,
    ) -> Result<Vec<Result<(), ErrorCode>>, ErrorCode> {
        let mut wanted = PackedBuilder::<TransferOp>::with_capacity(ops.len());
        for op in ops {
            let flags = OpFlags::DISK;
            wanted.push(&Target { flags, ..*op.target() }.to_wire(OpKind::Load, op.offset(), op.len()));
        }
        let wanted = wanted.finish();
        let ops_wanted = Packed::decode(&wanted, OPS_PER_FRAME_MAX).map_err(|error| error.code())?;
        let request = LoadRequest { ops: ops_wanted, lease_ms: LOAD_LEASE_MS };
        let request = encode(&request).map_err(|error| error.code())?;
        let code = |error: TransferError| error.code();
        let reply = call(self, FrameKind::Load, request, deadline).map_err(code)?;
        let reply: v1::LoadReply = decode(reply.into()).map_err(|error| error.code())?;
        let reply = LoadReply::from_wire(&reply).map_err(|error| error.code())?;
        if reply.list.len() != ops.len() {
            return Err(ErrorCode::InvalidArgument);
        }
        let mut release = PackedBuilder::<TransferOp>::with_capacity(ops.len());
        let mut outcomes = Vec::with_capacity(ops.len());
        for (op, (entry, handles)) in ops.iter().zip(reply.list.iter()) {
            let outcome = match (entry.code, handles.iter().next()) {
                (Some(code), _) => Err(code),
                (None, None) => Err(ErrorCode::Internal),
                (None, Some(handle)) => {
                    let target = Target::of(&handle, op.target().id, op.target().epoch);
                    release.push(&target.to_wire(OpKind::Release, 0, 0));
                    self.copy_from(op, &target, reader)
                }
            };
            outcomes.push(outcome);
        }
        if !release.is_empty() {
            // If it does not arrive, the time that was asked for ends by itself.
            let _ = call(self, FrameKind::Release, release.finish(), deadline);
        }
        Ok(outcomes)
    }

    /// Runs gets of records in a device's memory, which only the node's process reaches: it copies them, and sends them by
    /// the stream.
    fn run_on_device(
        &self,
        ops: &[&OpCore],
        deadline: Instant,
    ) -> Result<Vec<Result<(), ErrorCode>>, ErrorCode> {
        let ops: Arc<[OpCore]> = ops.iter().map(|&op| op.clone()).collect();
        let mut outcomes = vec![Ok(()); ops.len()];
        for frame in plan(&ops, 1) {
            let stream = self.stream().map_err(|failure| failure.code())?;
            let request = Request::transfer(&ops, frame.clone(), deadline);
            stream.submit(&request);
            // Whatever becomes of it, nobody touches the caller's memory after this.
            stream.wait(&request);
            let answer = match request.take_answer() {
                Some(Ok(codes)) => codes,
                Some(Err(NoAnswer::Refused(code))) => return Err(code),
                Some(Err(NoAnswer::Failed(failure))) => return Err(failure.code()),
                Some(Err(NoAnswer::Deadline)) => return Err(ErrorCode::DeadlineExceeded),
                Some(Err(NoAnswer::Aborted)) | None => return Err(ErrorCode::Cancelled),
            };
            for (place, part) in frame.parts.iter().enumerate() {
                if let Some(code) = code_at(&answer, place) {
                    outcomes[part.op] = Err(code);
                }
            }
        }
        Ok(outcomes)
    }

    /// Whether an operation reads a record whose bytes are in a device's memory.
    fn is_on_device(&self, op: &OpCore) -> bool {
        let is_plain = !op.target().flags.contains(OpFlags::DIGESTS) && op.direction() == Direction::Get;
        is_plain && self.heap.medium(op.target().segment) == Some(Medium::Device)
    }

    /// Copies what an operation wants out of a record in memory.
    fn copy_from(&self, op: &OpCore, target: &Target, reader: &mut Reader<'_>) -> Result<(), ErrorCode> {
        if self.heap.generation(target.segment) != Some(target.generation) {
            return Err(ErrorCode::StaleGeneration);
        }
        let digests = op.target().flags.contains(OpFlags::DIGESTS);
        match reader.get_at(target.segment, target.slot, target.epoch, SystemClock.now()) {
            Lookup::Hit(guard) if digests => copy_out(op, &guard, guard.digests().as_bytes()),
            Lookup::Hit(guard) => copy_out(op, &guard, guard.bytes()),
            Lookup::Miss => Err(ErrorCode::Gone),
            Lookup::Full => Err(ErrorCode::Busy),
            Lookup::Closed => Err(ErrorCode::Unreachable),
        }
    }

    fn run(&self, op: &OpCore, reader: &mut Reader<'_>) -> Result<(), ErrorCode> {
        let target = op.target();
        let digests = target.flags.contains(OpFlags::DIGESTS) && op.direction() == Direction::Get;
        if !digests && target.flags != OpFlags::NONE && target.flags != OpFlags::BACKGROUND {
            return Err(ErrorCode::Unsupported);
        }
        match op.direction() {
            Direction::Get => self.copy_from(op, target, reader),
            Direction::Put => {
                if self.heap.generation(target.segment) != Some(target.generation) {
                    return Err(ErrorCode::StaleGeneration);
                }
                let claim = reader.claim(target.segment, target.slot, target.epoch);
                let mut claim = claim.ok_or(ErrorCode::StaleEpoch)?;
                if claim.payload().is_none() {
                    return Err(ErrorCode::Unsupported); // a device's memory is not filled by processors
                }
                let header = claim.header();
                if header.id != target.id || header.stripe_index != target.stripe {
                    return Err(ErrorCode::Gone);
                }
                if op.offset() != 0 || op.len() != header.stripe_len {
                    // A record is filled in one go: its digests are computed on the way.
                    return Err(ErrorCode::Unsupported);
                }
                let mut parts: Vec<&[u8]> = Vec::new();
                // SAFETY: the caller of `start` keeps the memory valid, and nobody writes it.
                op.visit(whole(op), |base, len| parts.push(unsafe { std::slice::from_raw_parts(base, len) }));
                let mut page = 0;
                claim.fill_parts(&parts, |digest| {
                    // SAFETY: the places for the digests are this thread's.
                    unsafe { op.note_digest(page, digest) };
                    page += 1;
                });
                Ok(())
            }
        }
    }

    /// The stream for calls.
    fn stream(&self) -> Result<Arc<Connection>, Failure> {
        let mut place = lock(&self.stream);
        if let Some(stream) = place.take_if(|stream| stream.is_dead()) {
            stream.stop();
        }
        if let Some(stream) = &*place {
            return Ok(Arc::clone(stream));
        }
        let peer = Name::Local(0);
        let stream = open_stream(self.socket.as_fd())
            .map_err(|_| Failure::Closed { peer })
            .and_then(|stream| Socket::new(stream, peer))?;
        let stream = Arc::new(Connection::new(stream, Duration::from_secs(1), CALLS_IN_FLIGHT_MAX));
        *place = Some(Arc::clone(&stream));
        Ok(stream)
    }
}

/// Loads in one call: while the node has several on its disk, none waits for all of a long list.
const LOADS_TOGETHER: usize = 16;

/// Calls in flight on the stream; the node answers them one after the other.
const CALLS_IN_FLIGHT_MAX: usize = 64;

fn whole(op: &OpCore) -> Span {
    Span::new(0, op.len()).expect("an operation is shorter than 2⁶⁴")
}

/// Copies a range out of a pinned record, of its payload or of its digests; page by page where pages are digested.
fn copy_out(op: &OpCore, guard: &Guard<'_>, of: &[u8]) -> Result<(), ErrorCode> {
    let (header, target) = (guard.header(), op.target());
    if header.id != target.id || header.stripe_index != target.stripe {
        return Err(ErrorCode::Gone);
    }
    let end = op.offset().checked_add(op.len()).ok_or(ErrorCode::OutOfBounds)?;
    let bytes = of.get(op.offset() as usize..end as usize).ok_or(ErrorCode::OutOfBounds)?;
    let copy = |range: Span| {
        let mut from = range.offset() as usize;
        op.visit(range, |base, len| {
            // SAFETY: the caller of `start` keeps the memory valid and unshared; it is not the node's, since
            // nobody has that writable but under a claim.
            unsafe { std::ptr::copy_nonoverlapping(bytes[from..from + len].as_ptr(), base, len) };
            from += len;
        });
    };
    if !op.is_digested() {
        copy(whole(op));
        return Ok(());
    }
    for page in 0..op.len().div_ceil(PAGE_BYTES) {
        let start = page * PAGE_BYTES;
        copy(Span::new(start, (op.len() - start).min(PAGE_BYTES)).expect("inside the operation"));
        // SAFETY: the page was copied just now, and memory and place are this thread's.
        unsafe { op.digest_page(page) };
    }
    Ok(())
}

impl Link for ShmLink {
    fn engine(&self) -> EngineKind {
        EngineKind::Shm
    }

    fn node(&self) -> NodeId {
        self.node
    }

    fn local(&self) -> Option<&std::sync::Arc<LocalHeap>> {
        Some(&self.heap)
    }

    unsafe fn start(&self, ops: Vec<OpCore>, deadline: Instant, _: Waiting) -> Box<dyn Pending> {
        let reader = self.heap.reader();
        let mut outcomes = Vec::with_capacity(ops.len());
        if let Some(mut reader) = reader {
            let is_on_disk =
                |op: &OpCore| op.target().flags.contains(OpFlags::DISK) && op.direction() == Direction::Get;
            let on_disk: Vec<&OpCore> = ops.iter().filter(|op| is_on_disk(op)).collect();
            let mut loaded = Vec::with_capacity(on_disk.len());
            // As many as one call carries.
            for lot in on_disk.chunks(LOADS_TOGETHER) {
                let done = self.run_on_disk(lot, &mut reader, deadline);
                loaded.extend(done.unwrap_or_else(|code| vec![Err(code); lot.len()]));
            }
            let mut loaded = loaded.into_iter();
            let on_device: Vec<&OpCore> =
                ops.iter().filter(|op| !is_on_disk(op) && self.is_on_device(op)).collect();
            let mut copied = match on_device.is_empty() {
                true => Vec::new(),
                false => self
                    .run_on_device(&on_device, deadline)
                    .unwrap_or_else(|code| vec![Err(code); on_device.len()]),
            }
            .into_iter();
            for op in &ops {
                let outcome = match is_on_disk(op) {
                    true => loaded.next().unwrap_or(Err(ErrorCode::Internal)),
                    false if self.is_on_device(op) => copied.next().unwrap_or(Err(ErrorCode::Internal)),
                    false => self.run(op, &mut reader),
                };
                self.metrics.op(EngineKind::Shm, op.direction(), op.len(), outcome);
                outcomes.push(Some(outcome));
            }
        } else {
            // As many threads as the ledger has room for are at it.
            outcomes.resize(ops.len(), Some(Err(ErrorCode::Busy)));
        }
        Box::new(Finished { outcomes })
    }

    fn start_call(
        &self,
        kind: FrameKind,
        body: Vec<u8>,
        deadline: Instant,
        waiting: Waiting,
    ) -> Box<dyn Pending> {
        let checked = Request::check_call(kind, &body);
        let request = Request::call(kind, body, deadline);
        let (started, reply) = (Instant::now(), Vec::new());
        let (node, ended) = (self.node, checked.err().map(Err));
        if ended.is_some() {
            return Box::new(Call { node, stream: None, request, started, reply, ended });
        }
        let stream = match self.stream() {
            Ok(stream) if waiting == Waiting::Here => {
                stream.submit(&request);
                Some(stream)
            }
            Ok(stream) => {
                stream.hand_over(Arc::clone(&request));
                Some(stream)
            }
            Err(failure) => {
                request.finish(Err(NoAnswer::Failed(failure)));
                None
            }
        };
        Box::new(Call { node, stream, request, started, reply, ended })
    }
}

/// Operations that ran when they were started.
#[derive(Debug)]
struct Finished {
    outcomes: Vec<Option<Result<(), ErrorCode>>>,
}

impl Pending for Finished {
    fn wait(&mut self) -> Result<(), TransferError> {
        Ok(())
    }

    fn poll(&mut self, _: &mut Context<'_>) -> Poll<Result<(), TransferError>> {
        Poll::Ready(Ok(()))
    }

    fn abort(&mut self) {}

    fn outcomes(&self) -> &[Option<Result<(), ErrorCode>>] {
        &self.outcomes
    }

    fn take_reply(&mut self) -> Vec<u8> {
        Vec::new()
    }
}

/// A call under way.
#[derive(Debug)]
struct Call {
    node: NodeId,
    stream: Option<Arc<Connection>>,
    request: Arc<Request>,
    started: Instant,
    reply: Vec<u8>,
    ended: Option<Result<(), TransferError>>,
}

impl Call {
    fn settle(&mut self) -> Result<(), TransferError> {
        if let Some(ended) = &self.ended {
            return ended.clone();
        }
        let result = match self.request.take_answer() {
            Some(Ok(body)) => {
                self.reply = body;
                Ok(())
            }
            Some(Err(NoAnswer::Refused(code))) => Err(TransferError::Refused { code }),
            Some(Err(NoAnswer::Failed(last))) => Err(TransferError::Lost { node: self.node, last }),
            Some(Err(NoAnswer::Deadline)) => Err(TransferError::Deadline { waited: self.started.elapsed() }),
            Some(Err(NoAnswer::Aborted)) | None => Err(TransferError::Aborted),
        };
        self.ended = Some(result.clone());
        result
    }
}

impl Pending for Call {
    fn wait(&mut self) -> Result<(), TransferError> {
        if let Some(stream) = &self.stream {
            stream.wait(&self.request);
        }
        self.settle()
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), TransferError>> {
        if self.ended.is_none() && !self.request.seat.poll(context.waker()) {
            return Poll::Pending;
        }
        Poll::Ready(self.settle())
    }

    fn abort(&mut self) {
        if let Some(stream) = self.stream.take().filter(|_| self.ended.is_none()) {
            stream.abort(&self.request);
            let _ = self.settle();
        }
    }

    fn outcomes(&self) -> &[Option<Result<(), ErrorCode>>] {
        &[]
    }

    fn take_reply(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.reply)
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.abort();
    }
}
