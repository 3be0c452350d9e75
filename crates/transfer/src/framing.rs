//! Splits a batch into frames. Pure.
//!
//! Small operations share frames, up to [`OPS_PER_FRAME_MAX`] in a frame. Large ones are split, at the page boundaries
//! of the stripe, into pieces that use several connections at once. Operations on the disk are split at the boundaries
//! of the parts that a node reads ([`DISK_PART_BYTES`]).
//!
//! Invariants: every byte of every operation is in exactly one frame; a frame has one direction, at most
//! [`FRAME_BYTES_MAX`] bytes and [`OPS_PER_FRAME_MAX`] operations; all pieces of an operation but the first begin at a
//! page of the stripe; a piece of an operation on the disk is within one part.

use moontide_proto::OpFlags;
use moontide_proto::limits::{DISK_PART_BYTES, FRAME_PAYLOAD_BYTES_MAX, OPS_PER_FRAME_MAX};
use moontide_types::Span;
use moontide_types::limits::PAGE_BYTES;

use crate::op::{Direction, OpCore};

/// Most payload bytes in a frame that this crate sends. A connection that fails loses the frames in flight, and frames
/// behind a large one wait for it: 4 MiB take a millisecond at 4 GB/s. Larger frames are not faster, since frames
/// follow each other without a gap.
pub(crate) const FRAME_BYTES_MAX: u64 = 4 << 20;

/// Least bytes per connection: below a megabyte, waking a second thread on both sides costs about as much as it saves.
pub(crate) const SHARE_BYTES_MIN: u64 = 1 << 20;

const _: () =
    assert!(FRAME_BYTES_MAX <= FRAME_PAYLOAD_BYTES_MAX && FRAME_BYTES_MAX.is_multiple_of(PAGE_BYTES));
const _: () = assert!(SHARE_BYTES_MIN.is_multiple_of(PAGE_BYTES) && DISK_PART_BYTES <= SHARE_BYTES_MIN);

/// Part of an operation that one frame carries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FramePart {
    /// Index of the operation in the batch.
    pub(crate) op: usize,
    /// Bytes of the operation, counted from its first byte.
    pub(crate) range: Span,
}

/// Content of one frame.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FramePlan {
    pub(crate) direction: Direction,
    pub(crate) parts: Vec<FramePart>,
    pub(crate) bytes: u64,
}

/// Splits a batch for `connections` connections.
pub(crate) fn plan(ops: &[OpCore], connections: usize) -> Vec<FramePlan> {
    let mut frames = Vec::new();
    for direction in [Direction::Get, Direction::Put] {
        let of_direction = || ops.iter().enumerate().filter(|(_, op)| op.direction() == direction);
        let total: u64 = of_direction().map(|(_, op)| op.len()).sum();
        // A node replies to a frame when all of it is in memory: with small frames it reads the next ones from its disk
        // while it sends the first.
        let share = if of_direction().any(|(_, op)| is_on_disk(op)) {
            SHARE_BYTES_MIN
        } else {
            share(total, connections)
        };
        let mut open: Option<FramePlan> = None;
        for (index, op) in of_direction() {
            for range in pieces(op, share) {
                let fits = open
                    .as_ref()
                    .is_some_and(|f| f.bytes + range.len() <= share && f.parts.len() < OPS_PER_FRAME_MAX);
                if !fits {
                    frames.extend(open.replace(FramePlan { direction, parts: Vec::new(), bytes: 0 }));
                }
                let frame = open.as_mut().expect("opened above");
                frame.parts.push(FramePart { op: index, range });
                frame.bytes += range.len();
            }
        }
        frames.extend(open);
    }
    frames
}

/// Returns the most bytes per frame.
fn share(total: u64, connections: usize) -> u64 {
    let even = total.div_ceil(connections.max(1) as u64).next_multiple_of(PAGE_BYTES);
    even.clamp(SHARE_BYTES_MIN, FRAME_BYTES_MAX)
}

fn is_on_disk(op: &OpCore) -> bool {
    op.target().flags.contains(OpFlags::DISK)
}

/// Splits an operation into the ranges of its pieces, counted from its first byte.
fn pieces(op: &OpCore, share: u64) -> impl Iterator<Item = Span> {
    let (offset, len, on_disk) = (op.offset(), op.len(), is_on_disk(op));
    split(len, move |start| match on_disk {
        true => disk_part_end(offset, start),
        // A rest that fits is not split.
        false if len - start <= share => len,
        // The first piece ends at a page boundary of the stripe, so that all others begin at one.
        false => (offset + start + share) / PAGE_BYTES * PAGE_BYTES - offset,
    })
}

/// Splits a range that starts at `offset` of a record, or of its digests, at the boundaries of the parts that a node
/// reads from its disk. The pieces are counted from `offset`.
pub(crate) fn disk_parts(offset: u64, len: u64) -> impl Iterator<Item = Span> {
    split(len, move |start| disk_part_end(offset, start))
}

/// Returns the end of the part in which byte `start` of a range is; both are counted from the `offset` of the range.
fn disk_part_end(offset: u64, start: u64) -> u64 {
    start + DISK_PART_BYTES - (offset + start) % DISK_PART_BYTES
}

/// Splits `len` bytes; `end_of` returns the end of the piece that begins at a byte. No bytes are one empty piece.
fn split(len: u64, end_of: impl Fn(u64) -> u64) -> impl Iterator<Item = Span> {
    let mut next = Some(0);
    std::iter::from_fn(move || {
        let start = next?;
        let end = len.min(end_of(start));
        next = (end < len).then_some(end);
        Span::new(start, end - start)
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::op::Op;
    use crate::op::tests::target;

    fn ops(shapes: &[(bool, u64, u64)], memory: &mut [u8]) -> Vec<OpCore> {
        let memory = &*memory;
        shapes
            .iter()
            .map(|&(put, offset, len)| {
                let part = &memory[..len as usize];
                let mut op = Op::put(target(), offset, part).core().clone();
                if !put {
                    op.set_direction(Direction::Get);
                }
                op
            })
            .collect()
    }

    #[test]
    fn plan_merges_small_ops_and_splits_large_ones() {
        let mut memory = vec![0; 64 << 20];
        let mut frames = |shapes: &[(bool, u64, u64)], connections| {
            plan(&ops(shapes, &mut memory), connections)
                .iter()
                .map(|f| (f.parts.len(), f.bytes))
                .collect::<Vec<_>>()
        };
        assert_eq!(frames(&[(false, 0, 4096); 3], 2), [(3, 12288)]);
        assert_eq!(frames(&[(false, 0, 1)], 4), [(1, 1)]);
        assert_eq!(frames(&[(false, 0, 0)], 4), [(1, 0)], "an empty object is requested too");
        assert_eq!(
            frames(&[(false, 0, 256 << 10)], 2),
            [(1, 256 << 10)],
            "too small for a second connection"
        );
        assert_eq!(frames(&[(true, 0, 2 << 20)], 2), [(1, 1 << 20), (1, 1 << 20)]);
        assert_eq!(frames(&[(true, 0, 2 << 20)], 1), [(1, 2 << 20)]);
        assert_eq!(frames(&[(false, 0, 16 << 20)], 1), [(1, 4 << 20); 4]);
        assert_eq!(frames(&[(false, 0, 8), (true, 0, 8)], 1), [(1, 8), (1, 8)], "one direction per frame");
        assert_eq!(frames(&[(false, 0, 1); 1025], 1), [(1024, 1024), (1, 1)]);
    }

    #[test]
    fn disk_ops_are_split_at_parts() {
        const MIB: u64 = 1 << 20;
        let parts = |offset, len| disk_parts(offset, len).map(|s| (s.offset(), s.len())).collect::<Vec<_>>();
        assert_eq!(parts(0, 0), [(0, 0)]);
        assert_eq!(parts(0, MIB), [(0, MIB)]);
        assert_eq!(parts(0, MIB + 1), [(0, MIB), (MIB, 1)]);
        assert_eq!(parts(3 * MIB - 5, 10), [(0, 5), (5, 5)]);
        assert_eq!(parts(MIB / 4, 2 * MIB), [(0, MIB * 3 / 4), (MIB * 3 / 4, MIB), (MIB * 7 / 4, MIB / 4)]);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        #[test]
        fn every_byte_is_in_one_frame(
            shapes in prop::collection::vec((any::<bool>(), 0..3u64 << 18, 0..12u64 << 20), 0..12),
            connections in 1..9usize,
        ) {
            let mut memory = vec![0; 12 << 20];
            let ops = ops(&shapes, &mut memory);
            let frames = plan(&ops, connections);
            let mut next = vec![0; ops.len()];
            let mut seen = vec![false; ops.len()];
            for frame in &frames {
                prop_assert!(frame.bytes <= FRAME_BYTES_MAX && frame.parts.len() <= OPS_PER_FRAME_MAX);
                prop_assert_eq!(frame.bytes, frame.parts.iter().map(|p| p.range.len()).sum::<u64>());
                for part in &frame.parts {
                    let op = &ops[part.op];
                    prop_assert_eq!(op.direction(), frame.direction);
                    prop_assert_eq!(part.range.offset(), next[part.op], "in order, without a gap");
                    let at = op.offset() + part.range.offset();
                    prop_assert!(part.range.offset() == 0 || at.is_multiple_of(PAGE_BYTES));
                    next[part.op] = part.range.end();
                    seen[part.op] = true;
                }
            }
            for (index, op) in ops.iter().enumerate() {
                prop_assert!(seen[index]);
                prop_assert_eq!(next[index], op.len());
            }
        }
    }
}
