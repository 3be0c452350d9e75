//! [`Flow`]: the memory behind a frame's payload, in the order of the wire, a chunk at a time.
//!
//! A chunk is what is handed to the kernel in one go. Pages that are digested are whole within their chunk, so that
//! they can be digested right after they came, or right before they go, while they are in cache.

use moontide_types::Span;
use moontide_types::bounds::PAGE_BYTES;

use crate::op::OpCore;
use crate::plan::Part;
use crate::tcp::socket::PIECES_MAX;

/// Bytes of a chunk without digests. A larger one saves no more calls than one in a few hundred microseconds.
const CHUNK_BYTES_MAX: u64 = 1 << 20;

/// Pieces of memory for one call.
#[derive(Debug)]
pub(crate) struct Chunk {
    pieces: [libc::iovec; PIECES_MAX],
    first: usize,
    count: usize,
    bytes: u64,
    /// (operation, page) that the chunk completes.
    pages: Vec<(usize, u64)>,
}

impl Chunk {
    /// Nothing.
    pub(crate) fn new() -> Chunk {
        let nothing = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        Chunk { pieces: [nothing; PIECES_MAX], first: 0, count: 0, bytes: 0, pages: Vec::new() }
    }

    /// Adds memory behind what is there.
    ///
    /// # Panics
    /// If there is no room for another piece.
    pub(crate) fn push(&mut self, base: *mut u8, len: usize) {
        self.pieces[self.count] = libc::iovec { iov_base: base.cast(), iov_len: len };
        self.count += 1;
        self.bytes += len as u64;
    }

    fn clear(&mut self) {
        (self.first, self.count, self.bytes) = (0, 0, 0);
        self.pages.clear();
    }

    /// Bytes that are left.
    pub(crate) fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The pieces that are left.
    pub(crate) fn pieces(&mut self) -> &mut [libc::iovec] {
        &mut self.pieces[self.first..self.count]
    }

    /// So many bytes are done.
    pub(crate) fn advance(&mut self, mut bytes: usize) {
        self.bytes -= bytes as u64;
        while bytes > 0 {
            let piece = &mut self.pieces[self.first];
            let step = bytes.min(piece.iov_len);
            piece.iov_base = piece.iov_base.cast::<u8>().wrapping_add(step).cast();
            piece.iov_len -= step;
            bytes -= step;
            if piece.iov_len == 0 {
                self.first += 1;
            }
        }
    }

    /// Digests the pages that the chunk completes.
    ///
    /// # Safety
    /// The bytes are all there, and nobody writes them, or the digests' places, meanwhile.
    pub(crate) unsafe fn digest(&self, ops: &[OpCore]) {
        // SAFETY: says the caller.
        self.pages.iter().for_each(|&(op, page)| unsafe { ops[op].digest_page(page) });
    }
}

/// Walks over the parts of a frame.
#[derive(Debug)]
pub(crate) struct Flow<'a> {
    ops: &'a [OpCore],
    parts: &'a [Part],
    part: usize,
    done_in_part: u64,
}

impl<'a> Flow<'a> {
    /// From the first byte.
    pub(crate) fn new(ops: &'a [OpCore], parts: &'a [Part]) -> Flow<'a> {
        Flow { ops, parts, part: 0, done_in_part: 0 }
    }

    /// The next chunk, into `chunk`; empty at the end. `wanted` says which parts have bytes on the wire.
    pub(crate) fn next(&mut self, chunk: &mut Chunk, wanted: impl Fn(usize) -> bool) {
        chunk.clear();
        while let Some(part) = self.parts.get(self.part) {
            if !wanted(self.part) || self.done_in_part == part.range.len() {
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
                let room = CHUNK_BYTES_MAX.saturating_sub(chunk.bytes);
                if room == 0 || (!chunk.pages.is_empty() && chunk.bytes >= PAGE_BYTES) {
                    return;
                }
                left.min(room)
            };
            let range = Span::new(start, len).expect("inside the part");
            let mut pieces = 0;
            op.visit(range, |_, _| pieces += 1);
            if pieces > PIECES_MAX - chunk.count {
                if chunk.count > 0 {
                    return;
                }
                return self.one_piece(chunk, part, start);
            }
            op.visit(range, |base, len| chunk.push(base, len));
            if op.is_digested() {
                chunk.pages.push((part.op, start / PAGE_BYTES));
            }
            self.done_in_part += len;
        }
    }

    /// A range of more pieces than a call takes: as many of them as fit. The page that it completes, if any, is
    /// digested from all of its pieces, of which the earlier ones went with earlier chunks.
    fn one_piece(&mut self, chunk: &mut Chunk, part: &Part, start: u64) {
        let op = &self.ops[part.op];
        let page_end = (start / PAGE_BYTES + 1) * PAGE_BYTES;
        let end = part.range.end().min(page_end);
        let rest = Span::new(start, end - start).expect("inside the part");
        op.visit(rest, |base, len| {
            if chunk.count < PIECES_MAX {
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

    /// Walks over an operation in pieces of `cut` bytes and gives (bytes, pages) of each chunk.
    fn chunks(len: usize, cut: usize, digested: bool) -> Vec<(u64, usize)> {
        let memory = vec![1; len];
        let pages = len.div_ceil(PAGE_BYTES as usize);
        let mut digests = vec![0; pages];
        let context =
            DigestContext { id: ObjectId([1; 16]), version: target().epoch, stripe: 0, len: len as u64 };
        let mut op = Op::put_parts(target(), 0, memory.chunks(cut));
        if digested {
            op = op.digested(context, &mut digests).unwrap();
        }
        let ops = [op.core().clone()];
        let parts = [Part { op: 0, range: Span::new(0, len as u64).unwrap() }];
        let mut flow = Flow::new(&ops, &parts);
        let mut chunk = Chunk::new();
        let mut out = Vec::new();
        loop {
            flow.next(&mut chunk, |_| true);
            if chunk.bytes() == 0 {
                break;
            }
            // SAFETY: nobody else knows the memory.
            unsafe { chunk.digest(&ops) };
            out.push((chunk.bytes(), chunk.pages.len()));
        }
        drop(op);
        let mut expected = Vec::new();
        context.payload(&memory, |digest| expected.push(digest));
        assert!(!digested || digests == expected, "{len} bytes in pieces of {cut}");
        out
    }

    #[test]
    fn chunks_are_pages_where_pages_are_digested() {
        let page = PAGE_BYTES;
        assert_eq!(chunks(3 << 20, 3 << 20, false), [(1 << 20, 0); 3]);
        assert_eq!(chunks(600_000, 600_000, true), [(page, 1), (page, 1), (600_000 - 2 * page, 1)]);
        let summed = |chunks: Vec<(u64, usize)>| {
            (chunks.iter().map(|c| c.0).sum::<u64>(), chunks.iter().map(|c| c.1).sum::<usize>())
        };
        assert_eq!(summed(chunks(600_000, 1000, true)), (600_000, 3), "more pieces than a call takes");
        assert_eq!(summed(chunks(600_000, 1000, false)), (600_000, 0));
        assert_eq!(chunks(0, 1, true), []);
    }

    #[test]
    fn advancing_goes_over_pieces() {
        let mut memory = [0u8; 10];
        let mut chunk = Chunk::new();
        let base = memory.as_mut_ptr();
        chunk.push(base, 4);
        chunk.push(base.wrapping_add(4), 6);
        chunk.advance(3);
        assert_eq!((chunk.bytes(), chunk.pieces().len()), (7, 2));
        chunk.advance(1);
        assert_eq!((chunk.bytes(), chunk.pieces().len()), (6, 1));
        chunk.advance(6);
        assert_eq!((chunk.bytes(), chunk.pieces().len()), (0, 0));
    }
}
