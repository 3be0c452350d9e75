//! Warm-up: objects that were in memory when their node was stopped return to memory after its start.
//!
//! The node marks them in the inventory of its disk ([`ReportRecord::touched`](super::report::ReportRecord)). After the
//! inventory, the group promotes them, a few at a time so that reads from the disk wait little, and only into free memory of
//! the node: nothing is evicted for them.

use std::collections::VecDeque;

use moontide_types::limits::UNIT_BYTES;
use moontide_types::{Medium, ObjectId};

use super::Group;
use crate::effect::Effects;
use crate::record::RecordFlag;
use crate::segment::{SegmentPhase, SlotState};
use crate::time::Now;

/// Maximum number of bytes that are loaded at the same time from one disk, by all groups together.
const BYTES_MAX: u64 = 64 << 20;

/// The same for objects.
const OBJECTS_MAX: usize = 1024;

/// How often the promotion of an object is commanded. A node without staging memory at that moment refuses it.
const ATTEMPTS_MAX: u8 = 4;

/// A disk whose objects return to memory.
#[derive(Debug)]
pub(super) struct WarmUp {
    disk: u32,
    next_slot: u32,
    in_flight: Vec<Loading>,
    /// Objects whose promotion was refused, tried again after all others: slot on the disk and number of attempts.
    refused: VecDeque<(u32, u8)>,
}

/// An object being promoted.
#[derive(Debug)]
struct Loading {
    id: ObjectId,
    len: u64,
    /// Its slot on the disk.
    slot: u32,
    attempts: u8,
}

/// What is left to do of a warm-up.
enum Progress {
    /// Nothing.
    Done,
    /// It waits for the node.
    Waits,
    /// The budget of this tick is used up.
    More,
}

impl Group {
    /// Begins the warm-up from a disk whose inventory is complete.
    pub(super) fn begin_warm_up(&mut self, disk: u32) {
        self.warm_ups.push(WarmUp { disk, next_slot: 0, in_flight: vec![], refused: VecDeque::new() });
    }

    /// Ends the warm-up from a disk that is lost.
    pub(super) fn end_warm_up(&mut self, disk: u32) {
        self.warm_ups.retain(|warm_up| warm_up.disk != disk);
    }

    /// Continues all warm-ups. Scans at most `budget` slots. Returns whether more work is due.
    pub(super) fn step_warm_ups(&mut self, now: Now, budget: usize, effects: &mut Effects) -> bool {
        let (mut more, mut budget) = (false, budget);
        // Taken out while it runs, so that warm-up and group can be borrowed mutably at the same time.
        let mut warm_ups = std::mem::take(&mut self.warm_ups);
        warm_ups.retain_mut(|warm_up| match self.step_warm_up(warm_up, now, &mut budget, effects) {
            Progress::Done => false,
            Progress::Waits => true,
            Progress::More => {
                more = true;
                true
            }
        });
        self.warm_ups = warm_ups;
        more
    }

    fn step_warm_up(
        &mut self,
        warm_up: &mut WarmUp,
        now: Now,
        budget: &mut usize,
        effects: &mut Effects,
    ) -> Progress {
        // A location that is being filled counts as unconfirmed until its node has answered.
        let ended = warm_up.in_flight.extract_if(.., |loading| !self.has_unconfirmed_kill(loading.id));
        // What was refused is still on disk only; other objects are skipped when it is their turn.
        let refused = ended.filter(|loading| loading.attempts < ATTEMPTS_MAX);
        warm_up.refused.extend(refused.map(|loading| (loading.slot, loading.attempts)));
        let mut bytes: u64 = warm_up.in_flight.iter().map(|loading| loading.len).sum();
        let bytes_max = BYTES_MAX / u64::from(self.config.groups.get());
        while *budget > 0 {
            *budget -= 1;
            let is_scanned = warm_up.next_slot >= self.segment(warm_up.disk).slot_count();
            if is_scanned && warm_up.refused.is_empty() {
                return if warm_up.in_flight.is_empty() { Progress::Done } else { Progress::Waits };
            }
            if bytes >= bytes_max || warm_up.in_flight.len() >= OBJECTS_MAX {
                return Progress::Waits;
            }
            let Some(room) = self.room_for_warm_up(warm_up.disk) else {
                return Progress::Waits; // the node has yet to mount its memory
            };
            if room == 0 {
                return Progress::Done;
            }
            let (slot, attempts) = match warm_up.refused.front() {
                Some(&refused) if is_scanned => {
                    warm_up.refused.pop_front();
                    refused
                }
                _ => {
                    warm_up.next_slot += 1;
                    (warm_up.next_slot - 1, 0)
                }
            };
            let SlotState::Object(at) = self.segment(warm_up.disk).slot(slot) else { continue };
            let record = *self.slab.get(at);
            // Of an object of several stripes, this node loads those on its disk, mostly one.
            let stripe_len = self.extensions.get(record.extension).map(|extension| extension.stripe_len);
            let (id, len) = (record.id(), stripe_len.unwrap_or(record.object_len()));
            let is_wanted = len <= room
                && self.is_read_from_disk(&record)
                && record.has(RecordFlag::Visited)
                && !self.is_expired(&record, now)
                && !self.has_unconfirmed_kill(id);
            if !is_wanted {
                continue;
            }
            self.promote(at, effects);
            if self.has_unconfirmed_kill(id) {
                warm_up.in_flight.push(Loading { id, len, slot, attempts: attempts + 1 });
                bytes += len;
            }
        }
        Progress::More
    }

    /// Returns the bytes that can be added to the memory of a disk's node before the low watermark is reached. `None`: it
    /// has no memory in this group.
    fn room_for_warm_up(&self, disk: u32) -> Option<u64> {
        let segments = self.nodes.get(&self.segment(disk).node)?.segments.iter();
        let memory = segments
            .map(|&index| self.segment(index))
            .filter(|segment| segment.medium == Medium::Memory && segment.phase == SegmentPhase::Serving);
        let (mut units, mut free) = (0, 0);
        for segment in memory {
            units += u64::from(segment.units);
            free += u64::from(segment.free_units().saturating_sub(segment.gap_units()));
        }
        let kept_free =
            units * u64::from(1000 - self.config.eviction_low_watermark_permille.min(1000)) / 1000;
        (units > 0).then(|| free.saturating_sub(kept_free) * UNIT_BYTES)
    }
}
