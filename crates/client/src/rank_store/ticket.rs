//! [`Ticket`]: location of a record that is being written, for a process that waits for it.

use moontide_symmetric::Rank;
use moontide_types::{Epoch, Generation, SegmentId, SlotId};

/// Location of a record that is being written. Its values may be sent by any means:
/// [`RankStore::open_for_read`](super::RankStore::open_for_read) refuses an invalid ticket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// Rank that owns the memory.
    pub rank: Rank,
    /// Segment of the rank's node.
    pub segment: SegmentId,
    /// Incarnation of the segment.
    pub generation: Generation,
    /// Slot of the record's header.
    pub slot: SlotId,
    /// Version of the record.
    pub epoch: Epoch,
    /// Offset of the bytes in the rank's region.
    pub payload_offset: u64,
    /// Length of the record.
    pub bytes: u64,
    /// Bytes per page; the last page may be shorter.
    pub page_bytes: u64,
    /// Offset of the flag in the rank's region.
    pub flag_offset: u64,
}

impl Ticket {
    /// Returns the number of pages.
    pub fn pages(&self) -> u32 {
        u32::try_from(self.bytes.div_ceil(self.page_bytes.max(1))).unwrap_or(u32::MAX)
    }

    /// Returns the length of the last page, in bytes.
    pub fn last_page_bytes(&self) -> u64 {
        let before = u64::from(self.pages()).saturating_sub(1).saturating_mul(self.page_bytes);
        self.bytes.saturating_sub(before)
    }

    /// Returns the values, in the order of the fields.
    pub fn words(&self) -> [u64; 9] {
        [
            self.rank.0.into(),
            self.segment.0.into(),
            self.generation.0,
            self.slot.0.into(),
            self.epoch.bits(),
            self.payload_offset,
            self.bytes,
            self.page_bytes,
            self.flag_offset,
        ]
    }

    /// Creates a ticket from its values; `None` if one is out of range for its field.
    pub fn from_words(words: [u64; 9]) -> Option<Ticket> {
        let [rank, segment, generation, slot, epoch, payload_offset, bytes, page_bytes, flag_offset] = words;
        let narrow = |word| u32::try_from(word).ok();
        Some(Ticket {
            rank: Rank(narrow(rank)?),
            segment: SegmentId(narrow(segment)?),
            generation: Generation(generation),
            slot: SlotId(narrow(slot)?),
            epoch: Epoch::from_bits(epoch).ok()?,
            payload_offset,
            bytes,
            page_bytes,
            flag_offset,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ticket_words_round_trip_and_invalid_words_are_rejected() {
        let words = [3, 2, u64::MAX, 7, 5 << 40 | 9, 1 << 40, 100_000, 4096, 1 << 41];
        let ticket = Ticket::from_words(words).unwrap();
        assert_eq!(
            (ticket.words(), ticket.pages(), ticket.last_page_bytes()),
            (words, 25, 100_000 - 24 * 4096)
        );
        for narrow in [0, 1, 3, 4] {
            let mut wrong = words;
            wrong[narrow] = u64::MAX;
            assert_eq!(Ticket::from_words(wrong), None, "{narrow}");
        }
    }
}
