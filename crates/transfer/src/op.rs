//! What is to be moved: [`Op`]s between this process's memory and a range of a peer's record.
//!
//! An operation names the far end by what it belongs to ([`Target`]) and an offset, never by an address; the near end
//! is one or several slices. Bytes may be digested on the way, page by page while the page is in cache.
//!
//! Two faces of one thing: [`Op`] borrows the caller's memory, and whoever runs it does not return before all threads
//! have let go of it; [`OpCore`] is what engines work on: raw parts whose validity the borrow, or the owner of a
//! [`Transfer`](crate::Transfer), guarantees.

use std::marker::PhantomData;

use moontide_proto::{Capability, Handle, Medium, OpFlags, OpKind, TransferOp};
use moontide_types::bounds::PAGE_BYTES;
use moontide_types::record::DigestContext;
use moontide_types::{Epoch, ErrorCode, Generation, ObjectId, SegmentId, SlotId, Span, Term};

/// The far end: one stripe of one object at one node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    /// The segment.
    pub segment: SegmentId,
    /// Which incarnation of it.
    pub generation: Generation,
    /// The slot.
    pub slot: SlotId,
    /// The term in which the capability was made.
    pub term: Term,
    /// The version.
    pub epoch: Epoch,
    /// The object.
    pub id: ObjectId,
    /// Index of the stripe.
    pub stripe: u16,
    /// Where the stripe's payload starts in the segment. Only one-sided engines look at it.
    pub payload_offset: u64,
    /// Proof that the caller may.
    pub capability: Capability,
    /// How it is to be done.
    pub flags: OpFlags,
}

impl Target {
    /// The stripe that a handle from the master's answer names.
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
            // What is on disk is named by its version alone; its node brings it into memory first.
            flags: if handle.medium == Medium::Disk { OpFlags::DISK } else { OpFlags::NONE },
        }
    }

    /// The operation as it travels.
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

/// Which way the bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// From the peer to here.
    Get,
    /// From here to the peer.
    Put,
}

impl Direction {
    /// As written in metrics.
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

/// A piece of this process's memory.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Piece {
    pub(crate) base: *mut u8,
    pub(crate) len: usize,
}

/// Where the digests of an operation's pages go.
#[derive(Clone, Copy, Debug)]
struct DigestSink {
    context: DigestContext,
    out: *mut u64,
    pages: usize,
}

/// One operation without its borrow.
///
/// Invariants: `len` is the sum of the pieces; with a sink, `offset` is a multiple of the page size, the operation ends
/// at a page's end or at the stripe's, and the sink has one place per page.
#[derive(Clone, Debug)]
pub struct OpCore {
    direction: Direction,
    target: Target,
    offset: u64,
    len: u64,
    pieces: Vec<Piece>,
    sink: Option<DigestSink>,
}

// SAFETY: the pointers are used under the rules of `Link::start`: whoever built the operation keeps the memory valid
// and unshared until it has finished, on whatever thread.
unsafe impl Send for OpCore {}
// SAFETY: as above; engines give disjoint ranges of one operation to different threads.
unsafe impl Sync for OpCore {}

impl OpCore {
    /// Which way.
    pub fn direction(&self) -> Direction {
        self.direction
    }

    /// The far end.
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// First byte, counted from the first byte of the stripe's payload.
    pub fn offset(&self) -> u64 {
        self.offset
    }

    /// How many bytes.
    #[expect(clippy::len_without_is_empty, reason = "an operation is not a collection")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Whether pages are digested on the way.
    pub fn is_digested(&self) -> bool {
        self.sink.is_some()
    }

    #[cfg(test)]
    pub(crate) fn set_direction(&mut self, direction: Direction) {
        self.direction = direction;
    }

    /// Calls `visit` with the memory behind a range of the operation, piece by piece: (address, length).
    ///
    /// # Panics
    /// If the range reaches beyond the operation.
    pub fn visit(&self, range: Span, mut visit: impl FnMut(*mut u8, usize)) {
        assert!(range.end() <= self.len, "a range of this operation");
        let (mut skip, mut left) = (range.offset() as usize, range.len() as usize);
        for piece in &self.pieces {
            if left == 0 {
                break;
            }
            if skip >= piece.len {
                skip -= piece.len;
                continue;
            }
            let len = (piece.len - skip).min(left);
            visit(piece.base.wrapping_add(skip), len); // inside the piece
            skip = 0;
            left -= len;
        }
    }

    /// Notes the digest of a page, which somebody else computed. Nothing without a sink.
    ///
    /// # Safety
    /// Nobody else uses the page's place in the sink meanwhile.
    pub unsafe fn note_digest(&self, page: u64, digest: u64) {
        let Some(sink) = self.sink else { return };
        assert!((page as usize) < sink.pages, "a page of this operation");
        // SAFETY: inside the sink; this page's place is the caller's.
        unsafe { sink.out.add(page as usize).write(digest) };
    }

    /// The root over the digests of all pages; `None` without a sink, or if the operation is not on a whole stripe.
    ///
    /// # Safety
    /// All pages were digested, and nobody writes the sink meanwhile.
    pub unsafe fn root(&self) -> Option<u64> {
        let sink = self.sink.filter(|sink| self.offset == 0 && self.len == sink.context.len)?;
        // SAFETY: the sink has one place per page, and says the caller.
        let digests = unsafe { std::slice::from_raw_parts(sink.out, sink.pages) };
        Some(sink.context.root_of(digests.iter().copied()))
    }

    /// Digests one page of the operation, counted from its first; the bytes are all there. Nothing without a sink.
    ///
    /// # Safety
    /// Nobody writes the page's bytes or its place in the sink meanwhile.
    pub unsafe fn digest_page(&self, page: u64) {
        let Some(sink) = self.sink else { return };
        assert!((page as usize) < sink.pages, "a page of this operation");
        let start = page * PAGE_BYTES;
        let span = Span::new(start, (self.len - start).min(PAGE_BYTES)).expect("inside the operation");
        let index = self.offset / PAGE_BYTES + page;
        let mut parts: Vec<&[u8]> = Vec::new();
        let mut only: &[u8] = &[];
        self.visit(span, |base, len| {
            // SAFETY: memory of the operation, which the caller keeps still.
            let part = unsafe { std::slice::from_raw_parts(base, len) };
            if only.is_empty() { only = part } else { parts.push(part) }
        });
        let digest = if parts.is_empty() {
            sink.context.page(index, only)
        } else {
            sink.context.page_in_parts(index, std::iter::once(only).chain(parts))
        };
        // SAFETY: says the caller.
        unsafe { self.note_digest(page, digest) };
    }
}

/// Why an operation makes no sense.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpError {
    /// Digests are of whole pages.
    #[error(
        "an operation with digests on bytes {offset} to {end} of a stripe of {stripe_len}: it must start at a page and \
         end at a page's end or the stripe's"
    )]
    Pages {
        /// First byte.
        offset: u64,
        /// Behind the last.
        end: u64,
        /// Length of the stripe.
        stripe_len: u64,
    },
    /// One digest per page.
    #[error("{found} places for the digests of {needed} pages")]
    Places {
        /// How many there are.
        found: usize,
        /// How many are needed.
        needed: usize,
    },
}

/// One operation on memory that it borrows. After a run it knows its outcome.
#[derive(Debug)]
pub struct Op<'a> {
    core: OpCore,
    outcome: Option<Result<(), ErrorCode>>,
    _memory: PhantomData<&'a mut [u8]>,
}

impl<'a> Op<'a> {
    /// From the peer into a slice.
    pub fn get(from: Target, offset: u64, into: &'a mut [u8]) -> Op<'a> {
        Op::get_parts(from, offset, [into])
    }

    /// From the peer into several slices, which are filled in order.
    pub fn get_parts(from: Target, offset: u64, into: impl IntoIterator<Item = &'a mut [u8]>) -> Op<'a> {
        let pieces = into.into_iter().map(|part| Piece { base: part.as_mut_ptr(), len: part.len() });
        Op::new(Direction::Get, from, offset, pieces.collect())
    }

    /// From a slice to the peer.
    pub fn put(to: Target, offset: u64, from: &'a [u8]) -> Op<'a> {
        Op::put_parts(to, offset, [from])
    }

    /// From several slices, one behind the other, to the peer.
    pub fn put_parts(to: Target, offset: u64, from: impl IntoIterator<Item = &'a [u8]>) -> Op<'a> {
        // Never written through: the direction says so.
        let pieces = from.into_iter().map(|part| Piece { base: part.as_ptr().cast_mut(), len: part.len() });
        Op::new(Direction::Put, to, offset, pieces.collect())
    }

    fn new(direction: Direction, target: Target, offset: u64, pieces: Vec<Piece>) -> Op<'a> {
        let len = pieces.iter().map(|piece| piece.len as u64).sum();
        let core = OpCore { direction, target, offset, len, pieces, sink: None };
        Op { core, outcome: None, _memory: PhantomData }
    }

    /// Digests the pages on the way, one place in `out` per page.
    pub fn digested(mut self, context: DigestContext, out: &'a mut [u64]) -> Result<Op<'a>, OpError> {
        let OpCore { offset, len, .. } = self.core;
        let end = offset.saturating_add(len);
        let ends_well = end.is_multiple_of(PAGE_BYTES) || end == context.len;
        if !offset.is_multiple_of(PAGE_BYTES) || !ends_well || end > context.len {
            return Err(OpError::Pages { offset, end, stripe_len: context.len });
        }
        let needed = len.div_ceil(PAGE_BYTES) as usize;
        if out.len() != needed {
            return Err(OpError::Places { found: out.len(), needed });
        }
        self.core.sink = Some(DigestSink { context, out: out.as_mut_ptr(), pages: needed });
        Ok(self)
    }

    /// What became of it; `None` before the run, or if the run failed as a whole before it was known.
    pub fn outcome(&self) -> Option<Result<(), ErrorCode>> {
        self.outcome
    }

    /// What engines work on.
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
    fn a_range_over_several_slices_is_visited_in_order() {
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
    fn digests_are_of_whole_pages() {
        let context = |len| DigestContext { id: ObjectId([1; 16]), version: target().epoch, stripe: 0, len };
        let check = |offset: u64, len: usize, stripe_len: u64, places: usize| {
            let (bytes, mut out) = (vec![7; len], vec![0; places]);
            Op::put(target(), offset, &bytes).digested(context(stripe_len), &mut out).map(|_| ())
        };
        let page = PAGE_BYTES as usize;
        assert_eq!(check(0, page + 1, PAGE_BYTES + 1, 2), Ok(()));
        assert_eq!(check(PAGE_BYTES, page, 3 * PAGE_BYTES, 1), Ok(()));
        assert!(matches!(check(1, page, 2 * PAGE_BYTES, 1), Err(OpError::Pages { .. })));
        assert!(matches!(check(0, 100, PAGE_BYTES, 1), Err(OpError::Pages { .. })));
        assert_eq!(check(0, page, PAGE_BYTES, 2), Err(OpError::Places { found: 2, needed: 1 }));
    }

    #[test]
    fn digests_do_not_depend_on_how_the_memory_is_cut() {
        let len = 2 * PAGE_BYTES + 777;
        let context = DigestContext { id: ObjectId([1; 16]), version: target().epoch, stripe: 0, len };
        let bytes: Vec<u8> = (0..len).map(|i| (i * 7 + i / 1000) as u8).collect();
        let mut whole = Vec::new();
        context.payload(&bytes, |digest| whole.push(digest));
        for cut in [1, 4096, 300_000] {
            let mut out = [0; 3];
            let op = Op::put_parts(target(), 0, bytes.chunks(cut)).digested(context, &mut out).unwrap();
            // SAFETY: nobody else knows the memory.
            (0..3).for_each(|page| unsafe { op.core().digest_page(page) });
            assert_eq!(out.as_slice(), whole, "cut into pieces of {cut}");
        }
    }
}
