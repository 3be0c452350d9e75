//! [`Ticket`]: where a record is that is being written, for a process that waits for it.

use moontide_heap::Rank;
use moontide_types::{Epoch, Generation, SegmentId, SlotId};

/// Where a record is that is being written. Its numbers may travel by any means: what does not fit is refused by
/// [`Hop::expect`](super::Hop::expect).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// Whose memory it lies in.
    pub rank: Rank,
    /// The segment.
    pub segment: SegmentId,
    /// Which incarnation of it.
    pub generation: Generation,
    /// The slot.
    pub slot: SlotId,
    /// The version.
    pub epoch: Epoch,
    /// Where the bytes lie in the rank's region.
    pub payload_offset: u64,
    /// How many.
    pub bytes: u64,
    /// Bytes of a page; the last one may be shorter.
    pub page_bytes: u64,
    /// Where the flag lies in the rank's region.
    pub flag_offset: u64,
}

impl Ticket {
    /// How many pages.
    pub fn pages(&self) -> u32 {
        u32::try_from(self.bytes.div_ceil(self.page_bytes.max(1))).unwrap_or(u32::MAX)
    }

    /// Bytes of the last page.
    pub fn last_page_bytes(&self) -> u64 {
        let before = u64::from(self.pages()).saturating_sub(1).saturating_mul(self.page_bytes);
        self.bytes.saturating_sub(before)
    }

    /// Its numbers, in the order of its fields.
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

    /// The ticket of which these are the numbers; `None` if one is too large for what it stands for.
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
    fn words_are_a_ticket_and_nonsense_is_none() {
        let words = [3, 2, u64::MAX, 7, 5 << 40 | 9, 1 << 40, 100_000, 4096, 1 << 41];
        let ticket = Ticket::from_words(words).unwrap();
        assert_eq!((ticket.words(), ticket.pages(), ticket.last_page_bytes()), (words, 25, 100_000 - 24 * 4096));
        for narrow in [0, 1, 3, 4] {
            let mut wrong = words;
            wrong[narrow] = u64::MAX;
            assert_eq!(Ticket::from_words(wrong), None, "{narrow}");
        }
    }
}
