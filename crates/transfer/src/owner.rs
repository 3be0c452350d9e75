//! [`Owner`]: the node's side of a transfer, and the checks before a byte is touched.
//!
//! | what an operation names | must be | else |
//! |---|---|---|
//! | segment, generation | one that the node has, in this incarnation | `StaleGeneration` |
//! | term | not newer than the one the segment obeys; for a write, the epoch's | `StaleTerm` |
//! | capability | as the owner judges | `PermissionDenied`, or the owner's reason |
//! | slot, epoch | READY (read) or being written by the node (write) in this epoch, under a cell | `Gone`, `StaleEpoch` |
//! | object, stripe | the header's | `Gone` |
//! | offset, length | inside the payload (or the digests) | `OutOfBounds` |
//!
//! An operation on the disk names no segment and slot: the owner finds the record by object, version and stripe, brings it
//! into memory of its own, and what follows is the same.

use std::fmt;
use std::time::{Duration, Instant};

use moontide_heap::{NodeClaim, NodeHeap, NodePin, Segment};
use moontide_proto::{CapabilityKey, FrameKind, Hello, OpFlags, Packed, TransferOp};
use moontide_types::record::Header;
use moontide_types::{ClientId, Epoch, ErrorCode, NodeId, SegmentId, SlotId, Span};

/// Who is on the other end of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caller {
    /// Somebody over the network; the number it drew when it started.
    Remote(u64),
    /// A process of this host that maps the node's memory.
    Local(ClientId),
}

/// Whoever owns the memory that peers read and write.
pub trait Owner: Send + Sync + fmt::Debug {
    /// Which node this is.
    fn node(&self) -> NodeId;

    /// The memory.
    fn heap(&self) -> &NodeHeap;

    /// Whether the peer may speak at all.
    fn greets(&self, hello: &Hello) -> Result<(), ErrorCode>;

    /// Whether the operation may be done, as far as that does not depend on the record; why not.
    fn admits(&self, op: &TransferOp) -> Result<(), ErrorCode>;

    /// Brings what operations on the disk are about into memory, all of it before this returns, and pins it. One answer
    /// for each operation.
    fn stage(&self, ops: &[TransferOp], _deadline: Instant) -> Vec<Result<NodePin<'_>, ErrorCode>> {
        ops.iter().map(|_| Err(ErrorCode::Unsupported)).collect()
    }

    /// Answers Begin, Commit, Load, Release and Attach: the body of the reply.
    fn call(
        &self,
        caller: Caller,
        kind: FrameKind,
        body: &[u8],
        deadline: Instant,
    ) -> Result<Vec<u8>, ErrorCode>;

    /// A process of this host has ended while it was writing these. They are dead.
    fn abandoned(&self, _records: &[(SegmentId, SlotId, Epoch)]) {}
}

/// How capabilities are judged.
#[derive(Clone, Debug)]
pub enum Capabilities {
    /// Not at all: everybody who gets in is trusted.
    Open,
    /// They must have been made with this key.
    Keyed(CapabilityKey),
}

impl Capabilities {
    /// Whether the operation's is good.
    pub fn admits(&self, op: &TransferOp) -> Result<(), ErrorCode> {
        match self {
            Capabilities::Keyed(key) if !key.admits(op) => Err(ErrorCode::PermissionDenied),
            Capabilities::Open | Capabilities::Keyed(_) => Ok(()),
        }
    }
}

/// A range of a READY record, pinned.
#[derive(Debug)]
pub(crate) struct Source<'a> {
    pin: NodePin<'a>,
    digests: bool,
    range: Span,
    /// Of a record in a device's memory: a copy of the range.
    copied: Option<Vec<u8>>,
}

impl Source<'_> {
    pub(crate) fn bytes(&self) -> &[u8] {
        if let Some(copied) = &self.copied {
            return copied;
        }
        let bytes = if self.digests { self.pin.digests() } else { self.pin.payload() };
        &bytes[self.range.offset() as usize..self.range.end() as usize]
    }
}

/// Checks reads and pins what they are about. What is on disk is brought into memory first, all of it together.
pub(crate) fn sources<'a>(
    owner: &'a dyn Owner,
    ops: Packed<'_, TransferOp>,
    deadline: Instant,
) -> Vec<Result<Source<'a>, ErrorCode>> {
    // Nobody has the disk read who may not. Each is asked about once: what is admitted counts as read.
    let of_disk = ops.iter().filter(|op| op.flags.contains(OpFlags::DISK));
    let admitted: Vec<(TransferOp, Result<(), ErrorCode>)> =
        of_disk.map(|op| (op, owner.admits(&op))).collect();
    let on_disk: Vec<TransferOp> =
        admitted.iter().filter(|(_, admitted)| admitted.is_ok()).map(|(op, _)| *op).collect();
    let mut admitted = admitted.into_iter();
    let mut staged = match on_disk.is_empty() {
        true => Vec::new(),
        false => owner.stage(&on_disk, deadline),
    }
    .into_iter();
    let source = |op: TransferOp| {
        if op.flags.contains(OpFlags::DISK) {
            admitted.next().map_or(Err(ErrorCode::Internal), |(_, admitted)| admitted)?;
            let pin = staged.next().unwrap_or(Err(ErrorCode::Internal))?;
            let range = Span::new(op.offset, op.len).ok_or(ErrorCode::OutOfBounds)?;
            return source_of(pin, range, &op);
        }
        let range = checked(owner, &op)?;
        source_of(owner.heap().pin(op.segment, op.slot, op.epoch).ok_or(ErrorCode::Gone)?, range, &op)
    };
    ops.iter().map(source).collect()
}

fn source_of<'a>(pin: NodePin<'a>, range: Span, op: &TransferOp) -> Result<Source<'a>, ErrorCode> {
    same_object(pin.header(), op)?;
    let digests = op.flags.contains(OpFlags::DIGESTS);
    let len = if digests { pin.digests().len() as u64 } else { pin.header().stripe_len };
    if range.end() > len {
        return Err(ErrorCode::OutOfBounds);
    }
    let copied = match pin.is_in_device() && !digests {
        false => None,
        // A device that does not answer has nothing any more that anybody could read.
        true => Some(pin.copy_out(range).map_err(|_| ErrorCode::Gone)?),
    };
    Ok(Source { pin, digests, range, copied })
}

/// How long a write waits for another on the same bytes: one whose connection broke, of which the thread that serves
/// it has not heard yet. Longer than that takes, and shorter than the caller waits for its answer. A commit waits as
/// long for such a write.
pub(crate) const CLAIM_WAIT_MAX: Duration = Duration::from_millis(900);

/// Checks a write and claims what it is about.
pub(crate) fn sink<'a>(
    owner: &'a dyn Owner,
    op: &TransferOp,
    deadline: Instant,
) -> Result<NodeClaim<'a>, ErrorCode> {
    let range = checked(owner, op)?;
    if op.term != op.epoch.term() {
        return Err(ErrorCode::StaleTerm);
    }
    let heap = owner.heap();
    let give_up = deadline.min(Instant::now() + CLAIM_WAIT_MAX);
    loop {
        // A claim on nothing tells what the record is: it is refused only if the node does not write it.
        let nothing = Span::new(0, 0).expect("empty");
        let probe = heap.claim_range(op.segment, op.slot, op.epoch, nothing).ok_or(ErrorCode::StaleEpoch)?;
        same_object(probe.header(), op)?;
        if range.end() > probe.header().stripe_len {
            return Err(ErrorCode::OutOfBounds);
        }
        drop(probe);
        if let Some(claim) = heap.claim_range(op.segment, op.slot, op.epoch, range) {
            return Ok(claim);
        }
        if Instant::now() >= give_up {
            return Err(ErrorCode::Busy);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// What can be said without looking at the record.
fn checked(owner: &dyn Owner, op: &TransferOp) -> Result<Span, ErrorCode> {
    if op.flags.contains(OpFlags::DISK) {
        return Err(ErrorCode::Unsupported); // disks are not written to by peers
    }
    let segment = owner.heap().segment(op.segment).ok_or(ErrorCode::StaleGeneration)?;
    if segment.shape().generation != op.generation {
        return Err(ErrorCode::StaleGeneration);
    }
    if !knows_term(&segment, op) {
        return Err(ErrorCode::StaleTerm);
    }
    owner.admits(op)?;
    Span::new(op.offset, op.len).ok_or(ErrorCode::OutOfBounds)
}

/// A master whose term the segment has not heard of cannot have granted anything on it.
fn knows_term(segment: &Segment, op: &TransferOp) -> bool {
    op.term <= segment.obeyed()
}

fn same_object(header: &Header, op: &TransferOp) -> Result<(), ErrorCode> {
    if header.id == op.id && header.stripe_index == op.stripe { Ok(()) } else { Err(ErrorCode::Gone) }
}
