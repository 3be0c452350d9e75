//! [`PayloadCursor`]: the memory behind the payload of a frame, in wire order, one chunk at a time.
//!
//! A chunk is passed to the kernel in one call. Digested pages are whole within their chunk, so that they can be
//! digested right after they are received, or right before they are sent, while they are in cache.

use moontide_types::Span;
use moontide_types::limits::PAGE_BYTES;

use crate::framing::FramePart;
use crate::op::OpCore;
use crate::tcp::socket::IOVECS_MAX;

/// Most bytes of a chunk without digests. At this size a call takes a few hundred microseconds; larger chunks save
/// little.
const CHUNK_BYTES_MAX: u64 = 1 << 20;

/// Memory for one call, as iovecs.
#[derive(Debug)]
pub(crate) struct Chunk {
    iovecs: [libc::iovec; IOVECS_MAX],
    first: usize,
    count: usize,
    bytes: u64,
    /// (operation, page) pairs that the chunk completes.
    pages: Vec<(usize, u64)>,
}

impl Chunk {
    /// Creates an empty chunk.
    pub(crate) fn new() -> Chunk {
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        Chunk { iovecs: [empty; IOVECS_MAX], first: 0, count: 0, bytes: 0, pages: Vec::new() }
    }

    /// Appends memory.
    ///
    /// # Panics
    /// If the chunk has [`IOVECS_MAX`] iovecs.
    pub(crate) fn push(&mut self, base: *mut u8, len: usize) {
        self.iovecs[self.count] = libc::iovec { iov_base: base.cast(), iov_len: len };
        self.count += 1;
        self.bytes += len as u64;
    }

    fn clear(&mut self) {
        (self.first, self.count, self.bytes) = (0, 0, 0);
        self.pages.clear();
    }

    /// Returns the number of remaining bytes.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the remaining iovecs.
    pub(crate) fn iovecs(&mut self) -> &mut [libc::iovec] {
        &mut self.iovecs[self.first..self.count]
    }

    /// Marks the first `bytes` remaining bytes as done.
    pub(crate) fn advance(&mut self, mut bytes: usize) {
        self.bytes -= bytes as u64;
        while bytes > 0 {
            let iovec = &mut self.iovecs[self.first];
            let step = bytes.min(iovec.iov_len);
            iovec.iov_base = iovec.iov_base.cast::<u8>().wrapping_add(step).cast();
            iovec.iov_len -= step;
            bytes -= step;
            if iovec.iov_len == 0 {
                self.first += 1;
            }
        }
    }

    /// Digests the pages that the chunk completes.
    ///
    /// # Safety
    /// All bytes have arrived, and no other code writes them, or the entries of the digests, during the call.
    pub(crate) unsafe fn digest(&self, ops: &[OpCore]) {
        // SAFETY: the caller upholds the contract, which is the same.
        self.pages.iter().for_each(|&(op, page)| unsafe { ops[op].digest_page(page) });
    }
}

/// Iterator over the memory of the parts of a frame.
#[derive(Debug)]
pub(crate) struct PayloadCursor<'a> {
    ops: &'a [OpCore],
    parts: &'a [FramePart],
    part: usize,
    done_in_part: u64,
}

impl<'a> PayloadCursor<'a> {
    /// Creates a cursor at the first byte.
    pub(crate) fn new(ops: &'a [OpCore], parts: &'a [FramePart]) -> PayloadCursor<'a> {
        PayloadCursor { ops, parts, part: 0, done_in_part: 0 }
    }

    /// Sets `chunk` to the next chunk; empty at the end. `on_wire` returns which parts have bytes on the wire.
    pub(crate) fn next(&mut self, chunk: &mut Chunk, on_wire: impl Fn(usize) -> bool) {
        chunk.clear();
        while let Some(part) = self.parts.get(self.part) {
            if !on_wire(self.part) || self.done_in_part == part.range.len() {
                self.part += 1;
                self.done_in_part = 0;
                continue;
            }
            let op = &self.ops[part.op];
            let start = part.range.offset() + self.done_in_part;
            let left = part.range.end() - start;
            let len = if op.is_digested() {
                let page_left = PAGE_BYTES - start % PAGE_BYTES;
                let len = left.min(page_left);
                if chunk.bytes > 0 && chunk.bytes + len > PAGE_BYTES {
                    return;
                }
                len
            } else {
                let free = CHUNK_BYTES_MAX.saturating_sub(chunk.bytes);
                if free == 0 || (!chunk.pages.is_empty() && chunk.bytes >= PAGE_BYTES) {
                    return;
                }
                left.min(free)
            };
            let range = Span::new(start, len).expect("inside the part");
            let mut iovecs = 0;
            op.visit(range, |_, _| iovecs += 1);
            if iovecs > IOVECS_MAX - chunk.count {
                if chunk.count > 0 {
                    return;
                }
                return self.first_iovecs(chunk, part, start);
            }
            op.visit(range, |base, len| chunk.push(base, len));
            if op.is_digested() {
                chunk.pages.push((part.op, start / PAGE_BYTES));
            }
            self.done_in_part += len;
        }
    }

    /// Adds the first slices of a range that has more slices than a call takes. The page that it completes, if any, is
    /// digested from all of its slices; the earlier ones were in earlier chunks.
    fn first_iovecs(&mut self, chunk: &mut Chunk, part: &FramePart, start: u64) {
        let op = &self.ops[part.op];
        let page_end = (start / PAGE_BYTES + 1) * PAGE_BYTES;
        let end = part.range.end().min(page_end);
        let rest = Span::new(start, end - start).expect("inside the part");
        op.visit(rest, |base, len| {
            if chunk.count < IOVECS_MAX {
                chunk.push(base, len);
            }
        });
        if op.is_digested() && start + chunk.bytes == end {
            chunk.pages.push((part.op, start / PAGE_BYTES));
        }
        self.done_in_part += chunk.bytes;
    }
}

#[cfg(test)]
mod tests {
    use moontide_types::ObjectId;
    use moontide_types::record::DigestContext;

    use super::*;
    use crate::op::Op;
    use crate::op::tests::target;

    /// Iterates over an operation in slices of `slice_len` bytes and returns (bytes, pages) of each chunk.
    fn chunks(len: usize, slice_len: usize, digested: bool) -> Vec<(u64, usize)> {
        let memory = vec![1; len];
        let pages = len.div_ceil(PAGE_BYTES as usize);
        let mut digests = vec![0; pages];
        let context =
            DigestContext { id: ObjectId([1; 16]), version: target().epoch, stripe: 0, len: len as u64 };
        let mut op = Op::put_parts(target(), 0, memory.chunks(slice_len));
        if digested {
            op = op.digested(context, &mut digests).unwrap();
        }
        let ops = [op.core().clone()];
        let parts = [FramePart { op: 0, range: Span::new(0, len as u64).unwrap() }];
        let mut cursor = PayloadCursor::new(&ops, &parts);
        let mut chunk = Chunk::new();
        let mut out = Vec::new();
        loop {
            cursor.next(&mut chunk, |_| true);
            if chunk.bytes() == 0 {
                break;
            }
            // SAFETY: no other code knows the memory.
            unsafe { chunk.digest(&ops) };
            out.push((chunk.bytes(), chunk.pages.len()));
        }
        drop(op);
        let mut expected = Vec::new();
        context.payload(&memory, |digest| expected.push(digest));
        assert!(!digested || digests == expected, "{len} bytes in slices of {slice_len}");
        out
    }

    #[test]
    fn digested_payload_is_chunked_by_page() {
        let page = PAGE_BYTES;
        assert_eq!(chunks(3 << 20, 3 << 20, false), [(1 << 20, 0); 3]);
        assert_eq!(chunks(600_000, 600_000, true), [(page, 1), (page, 1), (600_000 - 2 * page, 1)]);
        let summed = |chunks: Vec<(u64, usize)>| {
            (chunks.iter().map(|c| c.0).sum::<u64>(), chunks.iter().map(|c| c.1).sum::<usize>())
        };
        assert_eq!(summed(chunks(600_000, 1000, true)), (600_000, 3), "more slices than a call takes");
        assert_eq!(summed(chunks(600_000, 1000, false)), (600_000, 0));
        assert_eq!(chunks(0, 1, true), []);
    }

    #[test]
    fn chunk_advance_crosses_slice_boundaries() {
        let mut memory = [0u8; 10];
        let mut chunk = Chunk::new();
        let base = memory.as_mut_ptr();
        chunk.push(base, 4);
        chunk.push(base.wrapping_add(4), 6);
        chunk.advance(3);
        assert_eq!((chunk.bytes(), chunk.iovecs().len()), (7, 2));
        chunk.advance(1);
        assert_eq!((chunk.bytes(), chunk.iovecs().len()), (6, 1));
        chunk.advance(6);
        assert_eq!((chunk.bytes(), chunk.iovecs().len()), (0, 0));
    }
}
