//! [`Op`]: a get or put between memory of this process and a range of a record at a peer.
//!
//! An operation addresses the record by its identity ([`Target`]) and an offset, never by a pointer. The local side is
//! one or several slices. Bytes may be digested during the transfer, page by page while the page is in cache.
//!
//! [`Op`] borrows the caller's memory, and the function that runs it returns only after all threads have stopped using
//! the memory. [`OpCore`] is the form that engines work on: raw parts whose validity the borrow, or the owner of a
//! [`Transfer`](crate::Transfer), guarantees.

use std::marker::PhantomData;

use moontide_proto::{Capability, Handle, OpFlags, OpKind, TransferOp};
use moontide_types::limits::PAGE_BYTES;
use moontide_types::record::DigestContext;
use moontide_types::{Epoch, ErrorCode, Generation, Medium, ObjectId, SegmentId, SlotId, Span, Term};

/// Address of one stripe of one object at a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// Segment that holds the record.
    pub segment: SegmentId,
    /// Incarnation of the segment.
    pub generation: Generation,
    /// Header slot of the record in the segment.
    pub slot: SlotId,
    /// Term in which the capability was made.
    pub term: Term,
    /// Version of the record.
    pub epoch: Epoch,
    /// Id of the object.
    pub id: ObjectId,
    /// Index of the stripe in the object.
    pub stripe: u16,
    /// Offset of the stripe's payload in the segment, in bytes. Only one-sided engines use it.
    pub payload_offset: u64,
    /// Proof that the caller may access the record.
    pub capability: Capability,
    /// Options of the operation; [`OpFlags::DISK`] if the record is on the node's disk.
    pub flags: OpFlags,
}

impl Target {
    /// Returns the target of a handle that the master returned.
    pub fn of(handle: &Handle, id: ObjectId, epoch: Epoch) -> Target {
        Target {
            segment: handle.segment,
            generation: handle.generation,
            slot: handle.slot,
            term: handle.term,
            epoch,
            id,
            stripe: handle.stripe_index,
            payload_offset: handle.payload_offset,
            capability: handle.capability,
            // A record on disk is identified by its version alone; its node reads it into memory first.
            flags: if handle.medium == Medium::Disk { OpFlags::DISK } else { OpFlags::NONE },
        }
    }

    /// Returns the wire form of an operation on this target.
    pub fn to_wire(&self, kind: OpKind, offset: u64, len: u64) -> TransferOp {
        TransferOp {
            kind,
            flags: self.flags,
            stripe: self.stripe,
            segment: self.segment,
            generation: self.generation,
            slot: self.slot,
            term: self.term,
            epoch: self.epoch,
            id: self.id,
            offset,
            len,
            capability: self.capability,
        }
    }
}

/// Direction of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the peer to this process.
    Get,
    /// From this process to the peer.
    Put,
}

impl Direction {
    /// Returns the name used in metrics.
    pub fn name(self) -> &'static str {
        match self {
            Direction::Get => "get",
            Direction::Put => "put",
        }
    }

    pub(crate) fn op_kind(self) -> OpKind {
        match self {
            Direction::Get => OpKind::Read,
            Direction::Put => OpKind::Write,
        }
    }
}

/// Slice of this process's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct MemorySlice {
    pub(crate) base: *mut u8,
    pub(crate) len: usize,
}

/// Array for the digests of an operation's pages.
#[derive(Clone, Copy, Debug)]
struct DigestSink {
    context: DigestContext,
    out: *mut u64,
    pages: usize,
}

/// Operation without its borrow.
///
/// Invariants: `len` is the sum of the lengths of the slices. With a sink, `offset` is a multiple of the page size, the
/// operation ends at the end of a page or of the stripe, and the sink has one entry per page.
#[derive(Clone, Debug)]
pub struct OpCore {
    direction: Direction,
    target: Target,
    offset: u64,
    len: u64,
    slices: Vec<MemorySlice>,
    sink: Option<DigestSink>,
}

// SAFETY: the pointers are used under the rules of `Link::start`: the code that built the operation keeps the memory
// valid and unshared until the operation has finished, on whichever thread.
unsafe impl Send for OpCore {}
// SAFETY: as above; engines give disjoint ranges of one operation to different threads.
unsafe impl Sync for OpCore {}

impl OpCore {
    /// Returns the direction.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// Returns the address of the stripe at the peer.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Returns the offset of the first byte in the stripe's payload.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// Returns the length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "an operation is not a collection")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns whether pages are digested during the transfer.
    pub fn is_digested(&self) -> bool {
        self.sink.is_some()
    }

    #[cfg(test)]
    pub(crate) fn set_direction(&mut self, direction: Direction) {
        self.direction = direction;
    }

    /// Calls `visit` with the memory behind a range of the operation, slice by slice: (address, length).
    ///
    /// # Panics
    /// If the range ends beyond the operation.
    pub fn visit(&self, range: Span, mut visit: impl FnMut(*mut u8, usize)) {
        assert!(range.end() <= self.len, "range must be within the operation");
        let (mut skip, mut left) = (range.offset() as usize, range.len() as usize);
        for slice in &self.slices {
            if left == 0 {
                break;
            }
            if skip >= slice.len {
                skip -= slice.len;
                continue;
            }
            let len = (slice.len - skip).min(left);
            visit(slice.base.wrapping_add(skip), len); // inside the slice
            skip = 0;
            left -= len;
        }
    }

    /// Stores the digest of a page, computed by the caller. Does nothing without a sink.
    ///
    /// # Safety
    /// No other code uses the page's entry in the sink during the call.
    pub unsafe fn set_digest(&self, page: u64, digest: u64) {
        let Some(sink) = self.sink else { return };
        assert!((page as usize) < sink.pages, "page must be within the operation");
        // SAFETY: inside the sink; the caller has exclusive use of this page's entry.
        unsafe { sink.out.add(page as usize).write(digest) };
    }

    /// Returns the root over the digests of all pages; `None` without a sink, or if the operation covers only part of
    /// the stripe.
    ///
    /// # Safety
    /// All pages were digested, and no other code writes the sink during the call.
    pub unsafe fn root(&self) -> Option<u64> {
        let sink = self.sink.filter(|sink| self.offset == 0 && self.len == sink.context.len)?;
        // SAFETY: the sink has one entry per page; the caller guarantees that all are written and none is being
        // written.
        let digests = unsafe { std::slice::from_raw_parts(sink.out, sink.pages) };
        Some(sink.context.root_of(digests.iter().copied()))
    }

    /// Digests one page of the operation, counted from its first. All bytes of the page have arrived. Does nothing
    /// without a sink.
    ///
    /// # Safety
    /// No other code writes the page's bytes or its entry in the sink during the call.
    pub unsafe fn digest_page(&self, page: u64) {
        let Some(sink) = self.sink else { return };
        assert!((page as usize) < sink.pages, "page must be within the operation");
        let start = page * PAGE_BYTES;
        let span = Span::new(start, (self.len - start).min(PAGE_BYTES)).expect("inside the operation");
        let index = self.offset / PAGE_BYTES + page;
        let mut parts: Vec<&[u8]> = Vec::new();
        let mut only: &[u8] = &[];
        self.visit(span, |base, len| {
            // SAFETY: memory of the operation, which the caller keeps unchanged.
            let part = unsafe { std::slice::from_raw_parts(base, len) };
            if only.is_empty() { only = part } else { parts.push(part) }
        });
        let digest = if parts.is_empty() {
            sink.context.page(index, only)
        } else {
            sink.context.page_from_parts(index, std::iter::once(only).chain(parts))
        };
        // SAFETY: the caller guarantees exclusive use of the page's entry.
        unsafe { self.set_digest(page, digest) };
    }
}

/// Reason why an operation is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpError {
    /// The operation does not cover whole pages; digests are of whole pages.
    #[error(
        "operation with digests covers bytes {offset} to {end} of a stripe of {stripe_len}; it must start at a page and \
         end at the end of a page or of the stripe"
    )]
    Pages {
        /// Offset of the first byte.
        offset: u64,
        /// Offset behind the last byte.
        end: u64,
        /// Length of the stripe in bytes.
        stripe_len: u64,
    },
    /// The array for digests has the wrong length; it must have one entry per page.
    #[error("array for digests has {found} entries, but the operation has {needed} pages")]
    DigestCount {
        /// Length of the array.
        found: usize,
        /// Pages of the operation.
        needed: usize,
    },
}

/// Operation on memory that it borrows. After a run it holds its outcome.
#[derive(Debug)]
pub struct Op<'a> {
    core: OpCore,
    outcome: Option<Result<(), ErrorCode>>,
    _memory: PhantomData<&'a mut [u8]>,
}

impl<'a> Op<'a> {
    /// Creates a get from the peer into a slice.
    pub fn get(from: Target, offset: u64, into: &'a mut [u8]) -> Op<'a> {
        Op::get_parts(from, offset, [into])
    }

    /// Creates a get from the peer into several slices, which are filled in order.
    pub fn get_parts(from: Target, offset: u64, into: impl IntoIterator<Item = &'a mut [u8]>) -> Op<'a> {
        let slices = into.into_iter().map(|part| MemorySlice { base: part.as_mut_ptr(), len: part.len() });
        Op::new(Direction::Get, from, offset, slices.collect())
    }

    /// Creates a put from a slice to the peer.
    pub fn put(to: Target, offset: u64, from: &'a [u8]) -> Op<'a> {
        Op::put_parts(to, offset, [from])
    }

    /// Creates a put of several slices, concatenated, to the peer.
    pub fn put_parts(to: Target, offset: u64, from: impl IntoIterator<Item = &'a [u8]>) -> Op<'a> {
        // The memory is never written: a put only reads it.
        let slices =
            from.into_iter().map(|part| MemorySlice { base: part.as_ptr().cast_mut(), len: part.len() });
        Op::new(Direction::Put, to, offset, slices.collect())
    }

    fn new(direction: Direction, target: Target, offset: u64, slices: Vec<MemorySlice>) -> Op<'a> {
        let len = slices.iter().map(|slice| slice.len as u64).sum();
        let core = OpCore { direction, target, offset, len, slices, sink: None };
        Op { core, outcome: None, _memory: PhantomData }
    }

    /// Requests digests of the pages, computed during the transfer: one entry of `out` per page.
    pub fn digested(mut self, context: DigestContext, out: &'a mut [u64]) -> Result<Op<'a>, OpError> {
        let OpCore { offset, len, .. } = self.core;
        let end = offset.saturating_add(len);
        let ends_at_page = end.is_multiple_of(PAGE_BYTES) || end == context.len;
        if !offset.is_multiple_of(PAGE_BYTES) || !ends_at_page || end > context.len {
            return Err(OpError::Pages { offset, end, stripe_len: context.len });
        }
        let needed = len.div_ceil(PAGE_BYTES) as usize;
        if out.len() != needed {
            return Err(OpError::DigestCount { found: out.len(), needed });
        }
        self.core.sink = Some(DigestSink { context, out: out.as_mut_ptr(), pages: needed });
        Ok(self)
    }

    /// Returns the outcome; `None` before the run, or if the run failed as a whole before the outcome was known.
    pub fn outcome(&self) -> Option<Result<(), ErrorCode>> {
        self.outcome
    }

    /// Returns the form that engines work on.
    pub fn core(&self) -> &OpCore {
        &self.core
    }

    pub(crate) fn set_outcome(&mut self, outcome: Option<Result<(), ErrorCode>>) {
        self.outcome = outcome;
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn target() -> Target {
        Target {
            segment: SegmentId(0),
            generation: Generation(1),
            slot: SlotId(0),
            term: Term::ZERO,
            epoch: Epoch::from_bits(1).unwrap(),
            id: ObjectId([1; 16]),
            stripe: 0,
            payload_offset: 0,
            capability: Capability::default(),
            flags: OpFlags::NONE,
        }
    }

    #[test]
    fn range_across_slices_is_visited_in_order() {
        let (mut a, mut b, mut c) = ([1u8; 3], [2u8; 0], [3u8; 5]);
        let op = Op::get_parts(target(), 0, [&mut a[..], &mut b[..], &mut c[..]]);
        let visited = |offset, len| {
            let mut lens = Vec::new();
            op.core().visit(Span::new(offset, len).unwrap(), |_, len| lens.push(len));
            lens
        };
        assert_eq!(visited(0, 8), [3, 5]);
        assert_eq!(visited(2, 2), [1, 1]);
        assert_eq!(visited(3, 4), [4]);
        assert_eq!(visited(8, 0), [0usize; 0]);
    }

    #[test]
    fn digested_op_requires_whole_pages() {
        let context = |len| DigestContext { id: ObjectId([1; 16]), version: target().epoch, stripe: 0, len };
        let check = |offset: u64, len: usize, stripe_len: u64, entries: usize| {
            let (bytes, mut out) = (vec![7; len], vec![0; entries]);
            Op::put(target(), offset, &bytes).digested(context(stripe_len), &mut out).map(|_| ())
        };
        let page = PAGE_BYTES as usize;
        assert_eq!(check(0, page + 1, PAGE_BYTES + 1, 2), Ok(()));
        assert_eq!(check(PAGE_BYTES, page, 3 * PAGE_BYTES, 1), Ok(()));
        assert!(matches!(check(1, page, 2 * PAGE_BYTES, 1), Err(OpError::Pages { .. })));
        assert!(matches!(check(0, 100, PAGE_BYTES, 1), Err(OpError::Pages { .. })));
        assert_eq!(check(0, page, PAGE_BYTES, 2), Err(OpError::DigestCount { found: 2, needed: 1 }));
    }

    #[test]
    fn digests_are_independent_of_memory_slicing() {
        let len = 2 * PAGE_BYTES + 777;
        let context = DigestContext { id: ObjectId([1; 16]), version: target().epoch, stripe: 0, len };
        let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + i / 1000) as u8).collect();
        let mut whole = Vec::new();
        context.payload(&bytes, |digest| whole.push(digest));
        for slice_len in [1, 4096, 300_000] {
            let mut out = [0; 3];
            let op = Op::put_parts(target(), 0, bytes.chunks(slice_len)).digested(context, &mut out).unwrap();
            // SAFETY: no other code knows the memory.
            (0..3).for_each(|page| unsafe { op.core().digest_page(page) });
            assert_eq!(out.as_slice(), whole, "slices of {slice_len} bytes");
        }
    }
}
