//! [`ShmEngine`] and [`ShmLink`]: gets and puts in the shared memory of a node on this host.
//!
//! Operations run to completion on the caller's thread when they are started, since they only access memory. A put
//! needs a Begin before and a Commit after it, by [`Link::start_call`] on the same link. For a record on the node's
//! disk, the link first asks the node to load it into memory that this process maps as well.

use std::collections::VecDeque;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::task::{Context, Poll};
use std::time::Duration;

use moontide_heap::{Guard, LocalHeap, Lookup, PayloadMemory, Reader, connect, open_stream};
use moontide_proto::convert::{LoadReply, LoadRequest, Wire, decode, encode};
use moontide_proto::limits::{DISK_PART_BYTES, OPS_PER_FRAME_MAX};
use moontide_proto::{FrameKind, OpFlags, OpKind, Packed, PackedBuilder, TransferOp, v1};
use moontide_rt::Backoff;
use moontide_rt::sync::{Arc, Mutex, lock};
use moontide_rt::time::Instant;
use moontide_types::limits::PAGE_BYTES;
use moontide_types::{Clock, ErrorCode, NodeId, Span, SystemClock};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::engine::{Engine, EngineUnavailable, Link, Peer, Pending, Score, WaitMode, call};
use crate::engine_kind::EngineKind;
use crate::error::{ConnectionError, PeerName, TransferError};
use crate::framing::{disk_parts, plan};
use crate::metrics::Metrics;
use crate::op::{Direction, OpCore, Target};
use crate::shm::socket_of;
use crate::tcp::connection::{Connection, code_at};
use crate::tcp::request::{Request, RequestError};
use crate::tcp::socket::Socket;

/// Configuration of the shared-memory engine.
#[derive(Clone, Debug)]
pub struct ShmConfig {
    /// Most bytes that one reader may pin for zero-copy reads; above this it must copy.
    pub pinned_bytes_max: u64,
}

impl Default for ShmConfig {
    fn default() -> ShmConfig {
        ShmConfig { pinned_bytes_max: 1 << 30 }
    }
}

/// Engine that reaches peers on the same host.
#[derive(Debug)]
pub struct ShmEngine {
    config: ShmConfig,
    metrics: Arc<Metrics>,
}

impl ShmEngine {
    /// Creates an engine.
    ///
    /// # Safety
    /// As [`connect`]: the nodes that the engine connects to, and their clients, are trusted to keep to the protocol.
    pub unsafe fn new(config: ShmConfig, metrics: Arc<Metrics>) -> ShmEngine {
        ShmEngine { config, metrics }
    }
}

fn socket_of_peer(peer: &Peer) -> Result<PathBuf, EngineUnavailable> {
    let mut addresses = peer.addresses_of(EngineKind::Shm).peekable();
    addresses.peek().ok_or(EngineUnavailable::NoAddress)?;
    let sockets = addresses.filter_map(socket_of);
    sockets.into_iter().find(|socket| socket.exists()).ok_or(EngineUnavailable::OtherHost)
}

impl Engine for ShmEngine {
    fn kind(&self) -> EngineKind {
        EngineKind::Shm
    }

    fn score(&self, peer: &Peer) -> Result<Score, EngineUnavailable> {
        socket_of_peer(peer).map(|_| Score::SAME_MEMORY)
    }

    fn connect(&self, peer: &Peer, deadline: Instant) -> Result<Arc<dyn Link>, TransferError> {
        let unreachable = |what, source| TransferError::Unreachable {
            node: peer.node,
            last: ConnectionError::System { what, peer: PeerName::Local(0), source },
        };
        let path = socket_of_peer(peer)
            .map_err(|_| unreachable("find the shm socket of", rustix::io::Errno::NOENT))?;
        let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
        // SAFETY: the creator of the engine upholds the contract, which is the same.
        let connected = unsafe { connect(&path, left, self.config.pinned_bytes_max) };
        let (heap, socket) = connected
            .map_err(|error| TransferError::AttachRejected { node: peer.node, reason: Arc::new(error) })?;
        let (found, _) = heap.board().node();
        if found != peer.node {
            let last = ConnectionError::WrongNode { peer: PeerName::Local(0), found, expected: peer.node };
            return Err(TransferError::Unreachable { node: peer.node, last });
        }
        self.metrics.link_opened(EngineKind::Shm);
        let (heap, stream) = (std::sync::Arc::new(heap), Mutex::new(None));
        let link = ShmLink { node: peer.node, heap, socket, stream, metrics: Arc::clone(&self.metrics) };
        Ok(Arc::new(link))
    }
}

/// Mapped memory of a node, and the stream for calls to it.
#[derive(Debug)]
pub struct ShmLink {
    node: NodeId,
    /// Shared with zero-copy readers, which may outlive the link.
    heap: std::sync::Arc<LocalHeap>,
    socket: OwnedFd,
    /// Stream for calls; opened when first needed, and again after it broke.
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

/// Lease of records loaded from disk; released as soon as they are copied.
const LOAD_LEASE_MS: u32 = 2_000;

impl ShmLink {
    /// Runs operations on records on the disk, part by part.
    fn run_on_disk(
        &self,
        ops: &[&OpCore],
        reader: &mut Reader<'_>,
        deadline: Instant,
    ) -> Vec<Result<(), ErrorCode>> {
        let mut outcomes = vec![Ok(()); ops.len()];
        let parts = ops.iter().enumerate().flat_map(|(index, op)| {
            disk_parts(op.offset(), op.len()).map(move |range| DiskPart { index, op, range })
        });
        let mut parts: VecDeque<DiskPart<'_>> = parts.collect();
        let mut backoff = BUSY_BACKOFF;
        while !parts.is_empty() {
            let mut batch: Vec<DiskPart<'_>> = Vec::with_capacity(LOADS_PER_CALL);
            let mut bytes = 0;
            while let Some(&part) = parts.front() {
                let fits = batch.len() < LOADS_PER_CALL && bytes + part.range.len() <= LOAD_BYTES_PER_CALL;
                if !fits {
                    break;
                }
                parts.pop_front();
                // The rest of an operation that has failed is not needed.
                if outcomes[part.index].is_ok() {
                    bytes += part.range.len();
                    batch.push(part);
                }
            }
            if batch.is_empty() {
                break;
            }
            let results = self.load_and_copy(&batch, reader, deadline);
            let results = results.unwrap_or_else(|code| vec![PartOutcome::Ended(Err(code)); batch.len()]);
            let mut is_busy = false;
            for (part, result) in batch.into_iter().zip(results).rev() {
                match result {
                    PartOutcome::NodeBusy if Instant::now() < deadline => {
                        is_busy = true;
                        parts.push_front(part);
                    }
                    PartOutcome::NodeBusy => outcomes[part.index] = Err(ErrorCode::Busy),
                    PartOutcome::Ended(Ok(())) => {}
                    PartOutcome::Ended(failed) => outcomes[part.index] = failed,
                }
            }
            if is_busy {
                let left = deadline.saturating_duration_since(Instant::now());
                std::thread::sleep(backoff.pause(Duration::ZERO, u64::from(std::process::id())).min(left));
            }
        }
        outcomes
    }

    /// Asks the node to load parts of records, copies them, and releases them.
    fn load_and_copy(
        &self,
        parts: &[DiskPart<'_>],
        reader: &mut Reader<'_>,
        deadline: Instant,
    ) -> Result<Vec<PartOutcome>, ErrorCode> {
        let mut load_ops = PackedBuilder::<TransferOp>::with_capacity(parts.len());
        for part in parts {
            load_ops.push(&part.to_wire(part.op.target(), OpFlags::DISK, OpKind::Load));
        }
        let load_ops = load_ops.finish();
        let load_ops = Packed::decode(&load_ops, OPS_PER_FRAME_MAX).map_err(|error| error.code())?;
        let request = LoadRequest { ops: load_ops, lease_ms: LOAD_LEASE_MS };
        let request = encode(&request).map_err(|error| error.code())?;
        let code = |error: TransferError| error.code();
        let reply = call(self, FrameKind::Load, request, deadline).map_err(code)?;
        let reply: v1::LoadReply = decode(reply.into()).map_err(|error| error.code())?;
        let reply = LoadReply::from_wire(&reply).map_err(|error| error.code())?;
        if reply.list.len() != parts.len() {
            return Err(ErrorCode::InvalidArgument);
        }
        let mut release = PackedBuilder::<TransferOp>::with_capacity(parts.len());
        let mut outcomes = Vec::with_capacity(parts.len());
        for (part, (entry, handles)) in parts.iter().zip(reply.list.iter()) {
            let outcome = match (entry.code, handles.iter().next()) {
                (Some(ErrorCode::Busy), _) => PartOutcome::NodeBusy,
                (Some(code), _) => PartOutcome::Ended(Err(code)),
                (None, None) => PartOutcome::Ended(Err(ErrorCode::Internal)),
                (None, Some(handle)) => {
                    let target = Target::of(&handle, part.op.target().id, part.op.target().epoch);
                    release.push(&part.to_wire(&target, OpFlags::NONE, OpKind::Release));
                    PartOutcome::Ended(self.copy_part(part, &target, reader))
                }
            };
            outcomes.push(outcome);
        }
        if !release.is_empty() {
            // If the call fails, the lease ends anyway.
            let _ = call(self, FrameKind::Release, release.finish(), deadline);
        }
        Ok(outcomes)
    }

    /// Runs gets of records in device memory, which only the node's process can access: the node copies them and sends
    /// them over the stream.
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
            // In every case, no thread accesses the caller's memory after this.
            stream.wait(&request);
            let codes = match request.take_result() {
                Some(Ok(codes)) => codes,
                Some(Err(RequestError::Refused(code))) => return Err(code),
                Some(Err(RequestError::Failed(failure))) => return Err(failure.code()),
                Some(Err(RequestError::Deadline)) => return Err(ErrorCode::DeadlineExceeded),
                Some(Err(RequestError::Aborted)) | None => return Err(ErrorCode::Cancelled),
            };
            for (index, part) in frame.parts.iter().enumerate() {
                if let Some(code) = code_at(&codes, index) {
                    outcomes[part.op] = Err(code);
                }
            }
        }
        Ok(outcomes)
    }

    /// Returns whether an operation reads a record in device memory.
    fn is_on_device(&self, op: &OpCore) -> bool {
        let is_plain = !op.target().flags.contains(OpFlags::DIGESTS) && op.direction() == Direction::Get;
        is_plain && self.heap.medium(op.target().segment) == Some(PayloadMemory::Device)
    }

    /// Copies the range of an operation out of a record in memory.
    fn copy_from(&self, op: &OpCore, target: &Target, reader: &mut Reader<'_>) -> Result<(), ErrorCode> {
        let guard = self.pin(target, reader)?;
        let digests = op.target().flags.contains(OpFlags::DIGESTS);
        let source = if digests { guard.digests().as_bytes() } else { guard.bytes() };
        copy_out(op, whole(op), &guard, source, op.offset())
    }

    /// Copies a part out of staging memory.
    fn copy_part(
        &self,
        part: &DiskPart<'_>,
        target: &Target,
        reader: &mut Reader<'_>,
    ) -> Result<(), ErrorCode> {
        let guard = self.pin(target, reader)?;
        // A record that is longer than a part is loaded as records without digests, with the parts as their payload.
        let digests = part.op.target().flags.contains(OpFlags::DIGESTS) && !guard.header().flags.digestless();
        let source = if digests { guard.digests().as_bytes() } else { guard.bytes() };
        let start = (part.op.offset() + part.range.offset()) % DISK_PART_BYTES;
        copy_out(part.op, part.range, &guard, source, start)
    }

    fn pin<'r>(&self, target: &Target, reader: &'r mut Reader<'_>) -> Result<Guard<'r>, ErrorCode> {
        if self.heap.generation(target.segment) != Some(target.generation) {
            return Err(self.or_connection_lost(ErrorCode::StaleGeneration));
        }
        match reader.get_at(target.segment, target.slot, target.epoch, SystemClock.now()) {
            Lookup::Hit(guard) => Ok(guard),
            Lookup::Miss => Err(ErrorCode::Gone),
            Lookup::Full => Err(ErrorCode::Busy),
            Lookup::Closed => Err(self.or_connection_lost(ErrorCode::Unreachable)),
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
                    return Err(ErrorCode::Unsupported); // the CPU cannot write device memory
                }
                let header = claim.header();
                if header.id != target.id || header.stripe_index != target.stripe {
                    return Err(ErrorCode::Gone);
                }
                if op.offset() != 0 || op.len() != header.stripe_len {
                    // A record is filled in one operation: its digests are computed during the copy.
                    return Err(ErrorCode::Unsupported);
                }
                let mut parts: Vec<&[u8]> = Vec::new();
                // SAFETY: the caller of `start` keeps the memory valid, and no other code writes it.
                op.visit(whole(op), |base, len| parts.push(unsafe { std::slice::from_raw_parts(base, len) }));
                let mut page = 0;
                claim.fill_parts(&parts, |digest| {
                    // SAFETY: only this thread uses the entries of the digests.
                    unsafe { op.set_digest(page, digest) };
                    page += 1;
                });
                Ok(())
            }
        }
    }

    /// Returns the code for an operation that failed: of a node that has exited, the successor must be reached.
    fn or_connection_lost(&self, code: ErrorCode) -> ErrorCode {
        if self.is_closed() { ErrorCode::ConnectionLost } else { code }
    }

    /// Returns the stream for calls, opening it if necessary.
    fn stream(&self) -> Result<Arc<Connection>, ConnectionError> {
        let mut slot = lock(&self.stream);
        if let Some(stream) = slot.take_if(|stream| stream.is_dead()) {
            stream.stop();
        }
        if let Some(stream) = &*slot {
            return Ok(Arc::clone(stream));
        }
        let peer = PeerName::Local(0);
        let stream = open_stream(self.socket.as_fd())
            .map_err(|_| ConnectionError::Closed { peer })
            .and_then(|stream| Socket::new(stream, peer))?;
        let stream = Arc::new(Connection::new(stream, Duration::from_secs(1), CALLS_IN_FLIGHT_MAX));
        *slot = Some(Arc::clone(&stream));
        Ok(stream)
    }
}

/// Most loads in one call, so that the first records of a long list do not wait for the last ones.
const LOADS_PER_CALL: usize = 16;

/// Most bytes of the loads in one call: half of the smallest staging memory of a node.
const LOAD_BYTES_PER_CALL: u64 = 4 * DISK_PART_BYTES;

/// Pauses between attempts to load while the node's staging memory is full.
const BUSY_BACKOFF: Backoff = Backoff::new(Duration::from_millis(1), Duration::from_millis(50));

/// Outcome of one attempt to read a part.
#[derive(Clone, Copy, Debug)]
enum PartOutcome {
    Ended(Result<(), ErrorCode>),
    /// Other readers hold the node's staging memory, for a short time.
    NodeBusy,
}

/// Part of an operation that the node loads from its disk.
#[derive(Clone, Copy)]
struct DiskPart<'a> {
    /// Index of the operation.
    index: usize,
    op: &'a OpCore,
    /// Bytes of the operation, counted from its first byte.
    range: Span,
}

impl DiskPart<'_> {
    /// Returns the wire form of an operation on the part; its target is on the disk or in staging.
    fn to_wire(self, target: &Target, medium: OpFlags, kind: OpKind) -> TransferOp {
        let digests = self.op.target().flags.contains(OpFlags::DIGESTS);
        let flags = if digests { medium.with(OpFlags::DIGESTS) } else { medium };
        Target { flags, ..*target }.to_wire(kind, self.op.offset() + self.range.offset(), self.range.len())
    }
}

/// Most calls in flight on the stream; the node handles them in order.
const CALLS_IN_FLIGHT_MAX: usize = 64;

fn whole(op: &OpCore) -> Span {
    Span::new(0, op.len()).expect("an operation is shorter than 2⁶⁴")
}

/// Copies `range` of an operation out of `source`, the payload or the digests of a pinned record, from `start` on; page
/// by page where pages are digested. The range then starts with a page of the operation, and ends with one.
fn copy_out(op: &OpCore, range: Span, guard: &Guard<'_>, source: &[u8], start: u64) -> Result<(), ErrorCode> {
    let (header, target) = (guard.header(), op.target());
    if header.id != target.id || header.stripe_index != target.stripe {
        return Err(ErrorCode::Gone);
    }
    let end = start.checked_add(range.len()).ok_or(ErrorCode::OutOfBounds)?;
    let bytes = source.get(start as usize..end as usize).ok_or(ErrorCode::OutOfBounds)?;
    let copy = |piece: Span| {
        let mut from = (piece.offset() - range.offset()) as usize;
        op.visit(piece, |base, len| {
            // SAFETY: the caller of `start` keeps the memory valid and unshared. It does not overlap the node's memory,
            // which is writable only under a claim.
            unsafe { std::ptr::copy_nonoverlapping(bytes[from..from + len].as_ptr(), base, len) };
            from += len;
        });
    };
    if !op.is_digested() {
        copy(range);
        return Ok(());
    }
    for page in range.offset() / PAGE_BYTES..range.end().div_ceil(PAGE_BYTES) {
        let start = page * PAGE_BYTES;
        copy(Span::new(start, (op.len() - start).min(PAGE_BYTES)).expect("inside the operation"));
        // SAFETY: the page was copied above, and only this thread uses the memory and the entry of the digest.
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

    fn is_closed(&self) -> bool {
        let mut socket = [PollFd::new(&self.socket, PollFlags::empty())];
        let polled = poll(&mut socket, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        polled.is_ok() && socket[0].revents().intersects(PollFlags::HUP | PollFlags::ERR)
    }

    fn local(&self) -> Option<&std::sync::Arc<LocalHeap>> {
        Some(&self.heap)
    }

    unsafe fn start(&self, ops: Vec<OpCore>, deadline: Instant, _: WaitMode) -> Box<dyn Pending> {
        let reader = self.heap.reader();
        let mut outcomes = Vec::with_capacity(ops.len());
        if let Some(mut reader) = reader {
            let is_on_disk =
                |op: &OpCore| op.target().flags.contains(OpFlags::DISK) && op.direction() == Direction::Get;
            let on_disk: Vec<&OpCore> = ops.iter().filter(|op| is_on_disk(op)).collect();
            let mut loaded = self.run_on_disk(&on_disk, &mut reader, deadline).into_iter();
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
            // No lane of the ledger is free for this thread.
            outcomes.resize(ops.len(), Some(Err(ErrorCode::Busy)));
        }
        Box::new(CompletedOps { outcomes })
    }

    fn start_call(
        &self,
        kind: FrameKind,
        body: Vec<u8>,
        deadline: Instant,
        wait_mode: WaitMode,
    ) -> Box<dyn Pending> {
        let checked = Request::check_call(kind, &body);
        let request = Request::call(kind, body, deadline);
        let (started, reply) = (Instant::now(), Vec::new());
        let (node, ended) = (self.node, checked.err().map(Err));
        if ended.is_some() {
            return Box::new(PendingCall { node, stream: None, request, started, reply, ended });
        }
        let stream = match self.stream() {
            Ok(stream) if wait_mode == WaitMode::Blocking => {
                stream.submit(&request);
                Some(stream)
            }
            Ok(stream) => {
                stream.submit_async(Arc::clone(&request));
                Some(stream)
            }
            Err(failure) => {
                request.finish(Err(RequestError::Failed(failure)));
                None
            }
        };
        Box::new(PendingCall { node, stream, request, started, reply, ended })
    }
}

/// Operations that completed when they were started.
#[derive(Debug)]
struct CompletedOps {
    outcomes: Vec<Option<Result<(), ErrorCode>>>,
}

impl Pending for CompletedOps {
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

/// A running call.
#[derive(Debug)]
struct PendingCall {
    node: NodeId,
    stream: Option<Arc<Connection>>,
    request: Arc<Request>,
    started: Instant,
    reply: Vec<u8>,
    ended: Option<Result<(), TransferError>>,
}

impl PendingCall {
    fn settle(&mut self) -> Result<(), TransferError> {
        if let Some(ended) = &self.ended {
            return ended.clone();
        }
        let result = match self.request.take_result() {
            Some(Ok(body)) => {
                self.reply = body;
                Ok(())
            }
            Some(Err(RequestError::Refused(code))) => Err(TransferError::Refused { code }),
            Some(Err(RequestError::Failed(last))) => {
                Err(TransferError::ConnectionLost { node: self.node, last })
            }
            Some(Err(RequestError::Deadline)) => {
                Err(TransferError::Deadline { waited: self.started.elapsed() })
            }
            Some(Err(RequestError::Aborted)) | None => Err(TransferError::Aborted),
        };
        self.ended = Some(result.clone());
        result
    }
}

impl Pending for PendingCall {
    fn wait(&mut self) -> Result<(), TransferError> {
        if let Some(stream) = &self.stream {
            stream.wait(&self.request);
        }
        self.settle()
    }

    fn poll(&mut self, context: &mut Context<'_>) -> Poll<Result<(), TransferError>> {
        if self.ended.is_none() && !self.request.waiter.poll(context.waker()) {
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

impl Drop for PendingCall {
    fn drop(&mut self) {
        self.abort();
    }
}
