//! [`TouchMap`]: which slots were read since the last heartbeat, from the marks of clients (numbered over all segments)
//! and of the node's own serving threads (numbered within one), as bitmaps for the master.

use moontide_proto::limits::{TOUCH_BITMAPS_MAX, TOUCH_BYTES_MAX};
use moontide_proto::v1;
use moontide_types::Generation;

/// Most bytes of bitmaps in a heartbeat: a quarter of a message, and marks of 33 million slots.
const BYTES_MAX: usize = 4 << 20;

/// Marks of all segments, which have the same number of slots.
#[derive(Debug)]
pub struct TouchMap {
    slots: u32,
    /// One bit per slot, per segment; empty for one without marks.
    segments: Vec<Vec<u8>>,
}

impl TouchMap {
    pub fn new(segments: usize, slots: u32) -> TouchMap {
        TouchMap { slots, segments: vec![Vec::new(); segments] }
    }

    /// A slot by its number among all slots of the node.
    pub fn mark_number(&mut self, number: u64) {
        let slots = u64::from(self.slots);
        self.mark((number / slots) as usize, (number % slots) as u32);
    }

    /// A slot of a segment. One that there is not is passed over: clients write these numbers.
    pub fn mark(&mut self, segment: usize, slot: u32) {
        let Some(bits) = self.segments.get_mut(segment).filter(|_| slot < self.slots) else { return };
        if bits.is_empty() {
            bits.resize((self.slots as usize).div_ceil(8), 0);
        }
        bits[slot as usize / 8] |= 1 << (slot % 8);
    }

    /// For a heartbeat: the marked parts of each segment. What exceeds a heartbeat's bound is dropped, since marks are
    /// hints; `turn` says with which segment to begin, so that it is not always the same ones.
    pub fn bitmaps(&self, generation: Generation, turn: u64) -> Vec<v1::TouchBitmap> {
        let (mut bitmaps, mut bytes) = (Vec::new(), 0);
        let first = (turn % self.segments.len().max(1) as u64) as usize;
        let (before, after) = self.segments.split_at(first);
        for (segment, bits) in (first..).zip(after).chain((0..).zip(before)) {
            let pieces = bits.chunks(TOUCH_BYTES_MAX).enumerate();
            for (piece, bits) in pieces {
                let Some(first) = bits.iter().position(|&byte| byte != 0) else { continue };
                let last = bits.iter().rposition(|&byte| byte != 0).unwrap_or(first);
                bytes += last - first + 1;
                if bitmaps.len() == TOUCH_BITMAPS_MAX || bytes > BYTES_MAX {
                    return bitmaps;
                }
                bitmaps.push(v1::TouchBitmap {
                    segment: segment as u32,
                    generation: generation.0,
                    first_slot: ((piece * TOUCH_BYTES_MAX + first) * 8) as u32,
                    bits: bits[first..=last].to_vec().into(),
                });
            }
        }
        bitmaps
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moontide_proto::convert::{Heartbeat, Wire};

    /// What the master makes of the bitmaps.
    fn slots(map: &TouchMap) -> Vec<(u32, u32)> {
        let message = v1::Heartbeat { beat: 1, touched: map.bitmaps(Generation(7), 0), ..Default::default() };
        let beat = Heartbeat::from_wire(&message).unwrap();
        assert!(beat.touched.iter().all(|touched| touched.generation == Generation(7)));
        beat.touched.iter().flat_map(|t| t.slots().map(|slot| (t.segment.0, slot.0))).collect()
    }

    #[test]
    fn numbers_over_all_segments_become_slots_of_one() {
        let mut map = TouchMap::new(3, 100);
        assert!(map.bitmaps(Generation(7), 0).is_empty());
        for number in [0, 99, 100, 205, 299, 300, u64::MAX] {
            map.mark_number(number);
        }
        map.mark(1, 50);
        map.mark(1, 100);
        map.mark(9, 0);
        assert_eq!(slots(&map), [(0, 0), (0, 99), (1, 0), (1, 50), (2, 5), (2, 99)]);
        let bitmaps = map.bitmaps(Generation(7), 0);
        assert_eq!((bitmaps[1].first_slot, bitmaps[1].bits.len()), (0, 7), "only the marked part travels");
    }

    #[test]
    fn what_is_too_much_is_dropped_in_turns() {
        let slots = TOUCH_BYTES_MAX as u32 * 8;
        let mut map = TouchMap::new(100, slots);
        (0..100).for_each(|segment| [0, slots - 1].iter().for_each(|&slot| map.mark(segment, slot)));
        for turn in [0, 70, 199] {
            let bitmaps = map.bitmaps(Generation(7), turn);
            assert_eq!(bitmaps.len(), BYTES_MAX / TOUCH_BYTES_MAX);
            assert_eq!(u64::from(bitmaps[0].segment), turn % 100);
        }
    }

    #[test]
    fn a_long_bitmap_is_cut() {
        let per_piece = TOUCH_BYTES_MAX as u32 * 8;
        let mut map = TouchMap::new(1, 2 * per_piece + 10);
        let marked = [3, per_piece - 1, per_piece, 2 * per_piece + 9];
        marked.iter().for_each(|&slot| map.mark(0, slot));
        assert_eq!(slots(&map), marked.map(|slot| (0, slot)));
        assert_eq!(map.bitmaps(Generation(7), 0).len(), 3);
    }
}
