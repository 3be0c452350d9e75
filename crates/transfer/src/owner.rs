//! [`Owner`]: the server side of a transfer, and the checks before memory is accessed.
//!
//! | field of the operation | must be | else |
//! |---|---|---|
//! | segment, generation | a segment of the node, in its current incarnation | `StaleGeneration` |
//! | term | not newer than the term that the segment has adopted; for a write, the epoch's | `StaleTerm` |
//! | slot, epoch | READY (read) or being written by the node (write) in this epoch, under a cell | `Gone`, `StaleEpoch` |
//! | object, stripe | equal to the header's | `Gone` |
//! | capability | accepted by the owner | `PermissionDenied`, or the owner's code |
//! | tenant of the record | that of the peer's certificate, if it names one | `PermissionDenied` |
//! | offset, length | inside the payload (or the digests) | `OutOfBounds` |
//!
//! An operation on the disk has no valid segment and slot: the owner finds the record by object, version and stripe and
//! reads it into its own memory. The remaining checks are the same.

use std::fmt;
use std::time::Duration;

use moontide_auth::Identity;
use moontide_heap::{NodeClaim, NodeHeap, NodePin, Segment};
#[cfg(feature = "testing")]
use moontide_proto::FixedRecord as _;
use moontide_proto::limits::DISK_PART_BYTES;
use moontide_proto::{
    AccessRight, Capability, CapabilityScope, FrameKind, Hello, OpFlags, OpKind, Packed, RecordShape,
    TransferOp,
};
use moontide_rt::time::Instant;
use moontide_types::record::Header;
use moontide_types::{ClientId, Epoch, ErrorCode, NodeId, SegmentId, SlotId, Span};

/// Identity of the peer of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PeerIdentity {
    /// Process on the network; the random number that it drew at its start.
    Remote(u64),
    /// Process on this host that maps the node's memory.
    Local(ClientId),
}

/// Owner of the memory that peers read and write.
pub trait Owner: Send + Sync + fmt::Debug {
    /// Returns the id of this node.
    fn node(&self) -> NodeId;

    /// Returns the memory of this node.
    fn heap(&self) -> &NodeHeap;

    /// Checks whether the peer may connect at all; otherwise returns the code for its rejection. `peer`: the identity in its
    /// certificate, if the connection uses TLS.
    fn authorize_peer(&self, hello: &Hello, peer: Option<&Identity>) -> Result<(), ErrorCode>;

    /// Checks whether the operation is allowed; otherwise returns the code for its rejection. `record`: header of the
    /// record in memory that the operation names, pinned; `None` for a record on the disk.
    fn authorize_op(&self, op: &TransferOp, record: Option<&Header>) -> Result<(), ErrorCode>;

    /// Notifies that processes of another host, which has the node `near`, have read about as many bytes of records in
    /// memory since the last notice, and that this operation was one of those reads.
    fn on_remote_reads(&self, _near: NodeId, _op: &TransferOp, _bytes: u64) {}

    /// Reads the records of operations on the disk into memory, all of them before this returns, and pins them. Returns
    /// one result per operation: a record that is longer than a part ([`DISK_PART_BYTES`]) is represented by a record
    /// without digests, with the part of the payload, or of the digests, as its payload.
    fn stage(&self, ops: &[TransferOp], _deadline: Instant) -> Vec<Result<NodePin<'_>, ErrorCode>> {
        ops.iter().map(|_| Err(ErrorCode::Unsupported)).collect()
    }

    /// Handles Begin, Commit, Load, Release, Attach and Describe. Returns the body of the reply. `tenant`: the only one whose
    /// records the caller may use; `None`: any.
    fn call(
        &self,
        caller: PeerIdentity,
        tenant: Option<&str>,
        kind: FrameKind,
        body: &[u8],
        deadline: Instant,
    ) -> Result<Vec<u8>, ErrorCode>;

    /// Notifies that a local client process exited while it was writing `records`. They are DEAD.
    fn on_client_exit(&self, _records: &[(SegmentId, SlotId, Epoch)]) {}
}

/// Returns whether the capability of an operation grants it. `record` is as in [`Owner::authorize_op`]; `verify` compares a
/// capability with a scope under the keys of the owner.
pub fn is_granted(
    op: &TransferOp,
    record: Option<&Header>,
    verify: impl Fn(&CapabilityScope, Capability) -> bool,
) -> bool {
    let verify = |right| verify(&op.capability_scope(right), op.capability);
    let may_write = || record.is_some_and(|header| verify(AccessRight::Write(RecordShape::of(header))));
    match op.kind {
        OpKind::Write => may_write(),
        // The writer of a record reads it with the capability of its put, which it has in its cache.
        OpKind::Read => verify(AccessRight::Read) || may_write(),
        OpKind::Load | OpKind::Release => verify(AccessRight::Read),
    }
}

/// Refuses a record of another tenant than that of the peer, whatever capability it shows: that may have been stolen.
/// `is_of` compares the tenant of the record. `tenant`: the only one whose records the peer may use; `None`: any.
///
/// # Errors
/// The code of the refusal.
pub fn check_tenant(tenant: Option<&str>, is_of: impl FnOnce(&str) -> bool) -> Result<(), ErrorCode> {
    let allowed = tenant.is_none_or(is_of) || moontide_rt::mutation_enabled("tenant-of-record-unchecked");
    if allowed { Ok(()) } else { Err(ErrorCode::PermissionDenied) }
}

/// Pinned range of a READY record.
#[derive(Debug)]
pub(crate) struct PinnedRange<'a> {
    pin: NodePin<'a>,
    digests: bool,
    range: Span,
    /// Copy of the range, if the record is in the memory of a device.
    copied: Option<Vec<u8>>,
}

impl PinnedRange<'_> {
    pub(crate) fn bytes(&self) -> &[u8] {
        if let Some(copied) = &self.copied {
            return copied;
        }
        let bytes = if self.digests { self.pin.digests() } else { self.pin.payload() };
        &bytes[self.range.offset() as usize..self.range.end() as usize]
    }
}

/// Checks reads and pins their records. Records on disk are read into memory first, all in one call.
pub(crate) fn pin_reads<'a>(
    owner: &'a dyn Owner,
    tenant: Option<&str>,
    ops: Packed<'_, TransferOp>,
    deadline: Instant,
) -> Vec<Result<PinnedRange<'a>, ErrorCode>> {
    // The disk is read only for authorized operations. Each is authorized once: the owner counts an authorized one as a
    // read.
    let disk_ops = ops.iter().filter(|op| op.flags.contains(OpFlags::DISK));
    let authorized: Vec<(TransferOp, Result<(), ErrorCode>)> =
        disk_ops.map(|op| (op, owner.authorize_op(&op, None))).collect();
    let on_disk: Vec<TransferOp> =
        authorized.iter().filter(|(_, authorized)| authorized.is_ok()).map(|(op, _)| *op).collect();
    let mut authorized = authorized.into_iter();
    let mut staged = match on_disk.is_empty() {
        true => Vec::new(),
        false => owner.stage(&on_disk, deadline),
    }
    .into_iter();
    let pin_read = |op: TransferOp| {
        if op.flags.contains(OpFlags::DISK) {
            authorized.next().map_or(Err(ErrorCode::Internal), |(_, authorized)| authorized)?;
            let pin = staged.next().unwrap_or(Err(ErrorCode::Internal))?;
            check_tenant(tenant, |tenant| pin.is_of_tenant(tenant))?;
            return staged_range(pin, &op);
        }
        let (pin, range) = pin_checked(owner, tenant, &op)?;
        pinned_range(pin, range, &op)
    };
    ops.iter().map(pin_read).collect()
}

/// Checks a read of a record in memory by a peer that may read those of all tenants, and pins the record. The range of the
/// operation is ignored.
///
/// # Errors
/// The code of the refusal.
pub fn pin_record<'a>(owner: &'a dyn Owner, op: &TransferOp) -> Result<NodePin<'a>, ErrorCode> {
    pin_checked(owner, None, op).map(|(pin, _)| pin)
}

fn pin_checked<'a>(
    owner: &'a dyn Owner,
    tenant: Option<&str>,
    op: &TransferOp,
) -> Result<(NodePin<'a>, Span), ErrorCode> {
    let range = checked(owner, op)?;
    let pin = owner.heap().pin(op.segment, op.slot, op.epoch).ok_or(ErrorCode::Gone)?;
    same_object(pin.header(), op)?;
    check_tenant(tenant, |tenant| pin.is_of_tenant(tenant))?;
    owner.authorize_op(op, Some(pin.header()))?;
    Ok((pin, range))
}

/// Returns the range of an operation in what [`Owner::stage`] has pinned for it.
fn staged_range<'a>(pin: NodePin<'a>, op: &TransferOp) -> Result<PinnedRange<'a>, ErrorCode> {
    // A whole record is no longer than the first part. Only parts have no digests: no such record is on a disk.
    let range = Span::new(op.offset % DISK_PART_BYTES, op.len).ok_or(ErrorCode::OutOfBounds)?;
    let flags = if pin.header().flags.digestless() { OpFlags::NONE } else { op.flags };
    pinned_range(pin, range, &TransferOp { flags, ..*op })
}

fn pinned_range<'a>(pin: NodePin<'a>, range: Span, op: &TransferOp) -> Result<PinnedRange<'a>, ErrorCode> {
    same_object(pin.header(), op)?;
    let digests = op.flags.contains(OpFlags::DIGESTS);
    let len = if digests { pin.digests().len() as u64 } else { pin.header().stripe_len };
    if range.end() > len {
        return Err(ErrorCode::OutOfBounds);
    }
    let copied = match pin.is_in_device() && !digests {
        false => None,
        // If the device does not respond, its records can no longer be read.
        true => Some(pin.copy_out(range).map_err(|_| ErrorCode::Gone)?),
    };
    Ok(PinnedRange { pin, digests, range, copied })
}

/// How long a write waits for another write of the same bytes: one whose connection broke, and whose serving thread has
/// not noticed that yet. Longer than that takes, and shorter than the caller waits for its reply. A commit waits as
/// long for such a write.
pub(crate) const CLAIM_WAIT_MAX: Duration = Duration::from_millis(900);

/// Checks a write and claims its range.
pub(crate) fn claim_write<'a>(
    owner: &'a dyn Owner,
    tenant: Option<&str>,
    op: &TransferOp,
    deadline: Instant,
) -> Result<NodeClaim<'a>, ErrorCode> {
    let range = checked(owner, op)?;
    if op.term != op.epoch.term() {
        return Err(ErrorCode::StaleTerm);
    }
    let heap = owner.heap();
    let give_up_at = deadline.min(Instant::now() + CLAIM_WAIT_MAX);
    loop {
        // A claim of an empty range returns the header: it fails only if the node does not write the record.
        let empty = Span::new(0, 0).expect("empty range");
        let probe = heap.claim_range(op.segment, op.slot, op.epoch, empty).ok_or(ErrorCode::StaleEpoch)?;
        same_object(probe.header(), op)?;
        check_tenant(tenant, |tenant| probe.is_of_tenant(tenant))?;
        owner.authorize_op(op, Some(probe.header()))?;
        if range.end() > probe.header().stripe_len {
            return Err(ErrorCode::OutOfBounds);
        }
        drop(probe);
        if let Some(claim) = heap.claim_range(op.segment, op.slot, op.epoch, range) {
            return Ok(claim);
        }
        if Instant::now() >= give_up_at {
            return Err(ErrorCode::Busy);
        }
        moontide_rt::thread::sleep(Duration::from_millis(1));
    }
}

/// Serves a read as a server does, with all its checks; for simulated worlds, which have no sockets. `half_read` is called when
/// half of the bytes have been read: a peer may be slow, and the record stays pinned meanwhile.
///
/// # Errors
/// The code of the refusal.
#[cfg(feature = "testing")]
pub fn serve_read(
    owner: &dyn Owner,
    tenant: Option<&str>,
    op: &TransferOp,
    deadline: Instant,
    half_read: impl FnOnce(),
) -> Result<Vec<u8>, ErrorCode> {
    let mut encoded = Vec::with_capacity(TransferOp::BYTES);
    op.encode(&mut encoded);
    let ops = Packed::decode(&encoded, 1).map_err(|error| error.code())?;
    let pinned = pin_reads(owner, tenant, ops, deadline).pop().unwrap_or(Err(ErrorCode::Internal))?;
    let (first, rest) = pinned.bytes().split_at(pinned.bytes().len() / 2);
    let first = first.to_vec();
    half_read();
    Ok([&first, rest].concat())
}

/// Serves a write of a whole payload as a server does, with all its checks. Returns the root. `claimed` is called before the
/// bytes arrive: a peer may be slow, and the range stays claimed meanwhile.
///
/// # Errors
/// The code of the refusal.
#[cfg(feature = "testing")]
pub fn serve_write(
    owner: &dyn Owner,
    tenant: Option<&str>,
    op: &TransferOp,
    payload: &[u8],
    deadline: Instant,
    claimed: impl FnOnce(),
) -> Result<u64, ErrorCode> {
    let mut claim = claim_write(owner, tenant, op, deadline)?;
    claimed();
    Ok(claim.fill(payload))
}

/// Runs the checks that do not need the record.
fn checked(owner: &dyn Owner, op: &TransferOp) -> Result<Span, ErrorCode> {
    if op.flags.contains(OpFlags::DISK) {
        return Err(ErrorCode::Unsupported); // peers cannot write to the disk
    }
    let segment = owner.heap().segment(op.segment).ok_or(ErrorCode::StaleGeneration)?;
    if segment.shape().generation != op.generation {
        return Err(ErrorCode::StaleGeneration);
    }
    if !knows_term(&segment, op) {
        return Err(ErrorCode::StaleTerm);
    }
    Span::new(op.offset, op.len).ok_or(ErrorCode::OutOfBounds)
}

/// Returns whether the segment has adopted the operation's term. A master with a newer term cannot have granted
/// anything on this segment yet.
fn knows_term(segment: &Segment, op: &TransferOp) -> bool {
    op.term <= segment.adopted_term()
}

fn same_object(header: &Header, op: &TransferOp) -> Result<(), ErrorCode> {
    if header.id == op.id && header.stripe_index == op.stripe { Ok(()) } else { Err(ErrorCode::Gone) }
}
