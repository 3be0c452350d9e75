//! [`AccessBitmap`]: slots that were read since the last heartbeat, as bitmaps for the master. The marks come from
//! clients (numbered over all segments) and from the node's own serving threads (numbered within a segment).

use moontide_proto::limits::{TOUCH_BITMAPS_MAX, TOUCH_BYTES_MAX};
use moontide_proto::v1;
use moontide_types::Generation;

/// Maximum size of the bitmaps in a heartbeat: a quarter of a message, the marks of 33 million slots.
const BYTES_MAX: usize = 4 << 20;

/// Access marks of all segments, which have the same number of slots.
#[derive(Debug)]
pub(crate) struct AccessBitmap {
    slots: u32,
    /// One bit per slot, per segment; empty for a segment without marks.
    segments: Vec<Vec<u8>>,
}

impl AccessBitmap {
    pub(crate) fn new(segments: usize, slots: u32) -> AccessBitmap {
        AccessBitmap { slots, segments: vec![Vec::new(); segments] }
    }

    /// Marks a slot by its number among all slots of the node.
    pub(crate) fn mark_number(&mut self, number: u64) {
        let slots = u64::from(self.slots);
        self.mark((number / slots) as usize, (number % slots) as u32);
    }

    /// Marks a slot of a segment. Ignores a slot out of range: clients write these numbers.
    pub(crate) fn mark(&mut self, segment: usize, slot: u32) {
        let Some(bits) = self.segments.get_mut(segment).filter(|_| slot < self.slots) else { return };
        if bits.is_empty() {
            bits.resize((self.slots as usize).div_ceil(8), 0);
        }
        bits[slot as usize / 8] |= 1 << (slot % 8);
    }

    /// Returns the bitmaps for a heartbeat: the marked range of each segment. Marks beyond the limit of a heartbeat are
    /// dropped, since they are hints; `turn` selects the first segment, so that not always the same ones are dropped.
    pub(crate) fn bitmaps(&self, generation: Generation, turn: u64) -> Vec<v1::TouchBitmap> {
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

    /// Decodes the bitmaps as the master does.
    fn slots(map: &AccessBitmap) -> Vec<(u32, u32)> {
        let message =
            v1::Heartbeat { heartbeat_id: 1, touched: map.bitmaps(Generation(7), 0), ..Default::default() };
        let heartbeat = Heartbeat::from_wire(&message).unwrap();
        assert!(heartbeat.touched.iter().all(|touched| touched.generation == Generation(7)));
        heartbeat.touched.iter().flat_map(|t| t.slots().map(|slot| (t.segment.0, slot.0))).collect()
    }

    #[test]
    fn access_bitmap_maps_global_numbers_to_segment_slots() {
        let mut map = AccessBitmap::new(3, 100);
        assert!(map.bitmaps(Generation(7), 0).is_empty());
        for number in [0, 99, 100, 205, 299, 300, u64::MAX] {
            map.mark_number(number);
        }
        map.mark(1, 50);
        map.mark(1, 100);
        map.mark(9, 0);
        assert_eq!(slots(&map), [(0, 0), (0, 99), (1, 0), (1, 50), (2, 5), (2, 99)]);
        let bitmaps = map.bitmaps(Generation(7), 0);
        assert_eq!((bitmaps[1].first_slot, bitmaps[1].bits.len()), (0, 7), "only the marked range is sent");
    }

    #[test]
    fn access_bitmaps_over_byte_limit_are_dropped_round_robin() {
        let slots = TOUCH_BYTES_MAX as u32 * 8;
        let mut map = AccessBitmap::new(100, slots);
        (0..100).for_each(|segment| [0, slots - 1].iter().for_each(|&slot| map.mark(segment, slot)));
        for turn in [0, 70, 199] {
            let bitmaps = map.bitmaps(Generation(7), turn);
            assert_eq!(bitmaps.len(), BYTES_MAX / TOUCH_BYTES_MAX);
            assert_eq!(u64::from(bitmaps[0].segment), turn % 100);
        }
    }

    #[test]
    fn long_access_bitmap_is_split() {
        let per_piece = TOUCH_BYTES_MAX as u32 * 8;
        let mut map = AccessBitmap::new(1, 2 * per_piece + 10);
        let marked = [3, per_piece - 1, per_piece, 2 * per_piece + 9];
        marked.iter().for_each(|&slot| map.mark(0, slot));
        assert_eq!(slots(&map), marked.map(|slot| (0, slot)));
        assert_eq!(map.bitmaps(Generation(7), 0).len(), 3);
    }
}
