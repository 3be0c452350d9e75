//! [`NodeModel`]: a node as the protocol describes it, in the plainest form: a list of words per segment.
//!
//! It does what the orders say, in the order of its session and no sooner than it is told to; it refuses what the
//! table of transitions does not allow; and it tells its master about every change, on one ordered stream per segment.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use moontide_meta::{Order, OrderKind, OrderOutcome, PlaceView, ReportState, StripeView};
use moontide_types::record::PinClass;
use moontide_types::{
    Epoch, ErrorCode, Extent, Generation, MonoTime, NodeId, ObjectId, SegmentId, SessionId, Term, UnixMillis,
};

use crate::disk::DiskModel;

/// What a record says about its object.
#[derive(Clone, Debug)]
pub(crate) struct RecordModel {
    pub(crate) id: ObjectId,
    pub(crate) key: Vec<u8>,
    pub(crate) tenant: u8,
    pub(crate) object_len: u64,
    pub(crate) stripe: StripeView,
    pub(crate) root: u64,
    pub(crate) extent: Extent,
    pub(crate) one_sided: bool,
    pub(crate) pin: PinClass,
    pub(crate) expires: Option<UnixMillis>,
    pub(crate) cohort: Option<Vec<u8>>,
    pub(crate) parent: Option<Vec<u8>>,
}

/// A slot's word, and who names it.
#[derive(Clone, Debug)]
pub(crate) struct Word {
    pub(crate) epoch: Epoch,
    pub(crate) state: ReportState,
    pub(crate) record: Option<RecordModel>,
    /// Ledger cells that name it; the writer's claim is one.
    pub(crate) holders: u32,
    /// A reclaim waits for the holders.
    pub(crate) reclaim: Option<Order>,
    /// The node killed it by itself.
    pub(crate) scrubbed: bool,
    /// It is being written to disk.
    pub(crate) pinned: bool,
    /// A copy from disk: nobody but the master knows of it, and answers to its orders say all.
    pub(crate) is_copy: bool,
    /// The epoch that the slot of a copy had before, and will have again.
    pub(crate) floor: Epoch,
}

impl Word {
    pub(crate) fn new() -> Word {
        Word {
            epoch: Epoch::ZERO,
            state: ReportState::Free,
            record: None,
            holders: 0,
            reclaim: None,
            scrubbed: false,
            pinned: false,
            is_copy: false,
            floor: Epoch::ZERO,
        }
    }

    pub(crate) fn is_free(&self) -> bool {
        self.state == ReportState::Free
    }
}

/// A change, as it travels.
#[derive(Clone, Debug)]
pub(crate) struct Change {
    pub(crate) slot: u32,
    pub(crate) epoch: Epoch,
    pub(crate) state: ReportState,
    pub(crate) record: Option<RecordModel>,
}

/// What the current master has been told about a segment in its current session.
#[derive(Clone, Debug)]
pub(crate) struct MountModel {
    /// No two mounts have the same.
    pub(crate) number: u64,
    /// Nothing may be given out before.
    pub(crate) usable_at: MonoTime,
    pub(crate) ended: bool,
    pub(crate) stream: VecDeque<Change>,
    pub(crate) sent: u64,
    pub(crate) snapshot: u64,
    /// Slots with a version that the master knows to be READY.
    pub(crate) known_ready: BTreeMap<u32, Epoch>,
    /// What the master has ordered to go.
    pub(crate) ordered: BTreeSet<(u32, Epoch)>,
}

/// A segment of a node.
#[derive(Clone, Debug)]
pub(crate) struct SegmentModel {
    pub(crate) id: SegmentId,
    pub(crate) generation: Generation,
    pub(crate) units: u32,
    /// The highest term it has adopted.
    pub(crate) term: Term,
    pub(crate) words: Vec<Word>,
    pub(crate) mount: Option<MountModel>,
    /// The last mount's number. A handle that was given in an earlier one is refused: its master has reckoned with what
    /// the node had when it mounted, and a begin after that would be one that nobody knows of.
    pub(crate) mounted_as: u64,
    /// Unmounted at this time or later it comes back empty: its master has forgotten what it removed meanwhile.
    pub(crate) wiped_after: MonoTime,
}

impl SegmentModel {
    pub(crate) fn new(id: u32, units: u32, slots: usize) -> SegmentModel {
        SegmentModel {
            id: SegmentId(id),
            generation: Generation(1),
            units,
            term: Term::ZERO,
            words: vec![Word::new(); slots],
            mount: None,
            mounted_as: 0,
            wiped_after: MonoTime(u64::MAX),
        }
    }

    /// Forgets everything: a new incarnation.
    pub(crate) fn wipe(&mut self) {
        self.generation = Generation(self.generation.0 + 1);
        self.words = vec![Word::new(); self.words.len()];
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.words.iter().all(Word::is_free)
    }

    /// All words that are not free, as the beginning of a stream.
    pub(crate) fn snapshot(&self) -> VecDeque<Change> {
        (0..self.words.len() as u32)
            .filter(|&slot| !self.words[slot as usize].is_free())
            .map(|slot| self.change(slot))
            .collect()
    }

    fn change(&self, slot: u32) -> Change {
        let word = &self.words[slot as usize];
        Change { slot, epoch: word.epoch, state: word.state, record: word.record.clone() }
    }

    pub(crate) fn tell(&mut self, slot: u32) {
        let change = self.change(slot);
        if self.words[slot as usize].is_copy {
            return;
        }
        if let Some(mount) = &mut self.mount {
            mount.stream.push_back(change);
        }
    }

    /// FREE → WRITING.
    pub(crate) fn begin(
        &mut self,
        place: &PlaceView,
        epoch: Epoch,
        record: RecordModel,
    ) -> Result<(), ErrorCode> {
        if place.generation != self.generation {
            return Err(ErrorCode::StaleGeneration);
        }
        let apart = |other: Extent| {
            other.end() <= u64::from(place.extent.start) || place.extent.end() <= u64::from(other.start)
        };
        let taken = self.words.iter().filter(|word| !word.is_free());
        if !taken.filter_map(|word| word.record.as_ref()).all(|other| apart(other.extent)) {
            return Err(ErrorCode::Overlap);
        }
        let word = &mut self.words[place.slot.0 as usize];
        if !word.is_free() || word.epoch >= epoch {
            return Err(ErrorCode::StaleEpoch);
        }
        *word = Word { epoch, state: ReportState::Writing, record: Some(record), holders: 1, ..Word::new() };
        self.tell(place.slot.0);
        Ok(())
    }

    /// WRITING → READY; the writer's claim goes in any case.
    pub(crate) fn commit(
        &mut self,
        slot: u32,
        epoch: Epoch,
        answers: &mut VecDeque<(Order, OrderOutcome)>,
    ) -> bool {
        let word = &mut self.words[slot as usize];
        if word.epoch != epoch || word.is_free() || word.state == ReportState::Ready {
            return word.epoch == epoch && word.state == ReportState::Ready;
        }
        word.holders = 0;
        if word.state == ReportState::Writing {
            word.state = ReportState::Ready;
            self.tell(slot);
            return true;
        }
        self.free_if_drained(slot, answers);
        false
    }

    /// The writer died: WRITING → DEAD, and its claim goes.
    pub(crate) fn abort(&mut self, slot: u32, epoch: Epoch, answers: &mut VecDeque<(Order, OrderOutcome)>) {
        let word = &mut self.words[slot as usize];
        if word.epoch != epoch || !matches!(word.state, ReportState::Writing | ReportState::Dead) {
            return;
        }
        word.holders = 0;
        if word.state == ReportState::Writing {
            word.state = ReportState::Dead;
            self.tell(slot);
        }
        self.free_if_drained(slot, answers);
    }

    /// A damaged record: READY → DEAD without anybody's order.
    pub(crate) fn scrub(&mut self, slot: u32) {
        let word = &mut self.words[slot as usize];
        if word.state == ReportState::Ready && !word.is_copy {
            word.state = ReportState::Dead;
            word.scrubbed = true;
            self.tell(slot);
        }
    }

    /// All readers let go; writers keep their claims.
    pub(crate) fn let_go(&mut self, answers: &mut VecDeque<(Order, OrderOutcome)>) {
        for slot in 0..self.words.len() as u32 {
            if self.words[slot as usize].state != ReportState::Writing {
                self.words[slot as usize].holders = 0;
                self.free_if_drained(slot, answers);
            }
        }
    }

    fn free_if_drained(&mut self, slot: u32, answers: &mut VecDeque<(Order, OrderOutcome)>) {
        let word = &mut self.words[slot as usize];
        if word.state == ReportState::Dead
            && word.holders == 0
            && !word.pinned
            && let Some(order) = word.reclaim.take()
        {
            let is_copy = word.is_copy;
            *word = Word { epoch: word.epoch.max(word.floor), is_copy, ..Word::new() };
            self.tell(slot);
            self.words[slot as usize].is_copy = false;
            answers.push_back((order, OrderOutcome::Done));
        }
    }

    /// A version was written to disk, or given up there: its slot may be freed.
    pub(crate) fn unpin(
        &mut self,
        slot: u32,
        epoch: Epoch,
        still: bool,
        answers: &mut VecDeque<(Order, OrderOutcome)>,
    ) {
        if self.words[slot as usize].epoch == epoch {
            self.words[slot as usize].pinned &= still;
            self.free_if_drained(slot, answers);
        }
    }

    fn execute(&mut self, order: Order, answers: &mut VecDeque<(Order, OrderOutcome)>) {
        let slot = order.slot.0;
        let word = &mut self.words[slot as usize];
        let outcome = match order.kind {
            OrderKind::Kill if word.epoch == order.epoch && !word.is_free() => {
                if word.state != ReportState::Dead {
                    word.state = ReportState::Dead;
                    self.tell(slot);
                }
                OrderOutcome::Accepted
            }
            OrderKind::Kill => OrderOutcome::Refused(ErrorCode::Gone),
            OrderKind::Offload | OrderKind::Promote { .. } => unreachable!("the disk has seen to it"),
            OrderKind::Reclaim if word.epoch > order.epoch => OrderOutcome::Done,
            OrderKind::Reclaim if word.is_free() => {
                if word.epoch < order.epoch {
                    word.epoch = order.epoch;
                    self.tell(slot);
                }
                OrderOutcome::Done
            }
            OrderKind::Reclaim if word.epoch < order.epoch => OrderOutcome::Refused(ErrorCode::Overlap),
            OrderKind::Reclaim => {
                if word.state != ReportState::Dead {
                    word.state = ReportState::Dead;
                    self.tell(slot);
                }
                let word = &mut self.words[slot as usize];
                if word.reclaim.is_some() || word.holders > 0 || word.pinned {
                    word.reclaim = Some(order);
                    OrderOutcome::Accepted
                } else {
                    word.reclaim = Some(order);
                    return self.free_if_drained(slot, answers);
                }
            }
        };
        answers.push_back((order, outcome));
    }
}

/// A node.
#[derive(Clone, Debug)]
pub(crate) struct NodeModel {
    pub(crate) id: NodeId,
    pub(crate) session: Option<SessionId>,
    pub(crate) orders: VecDeque<Order>,
    pub(crate) answers: VecDeque<(Order, OrderOutcome)>,
    pub(crate) segments: Vec<SegmentModel>,
    pub(crate) disk: Option<DiskModel>,
}

impl NodeModel {
    pub(crate) fn new(id: u64, segments: &[(u32, usize)], has_disk: bool) -> NodeModel {
        let segments =
            (0..).zip(segments).map(|(id, &(units, slots))| SegmentModel::new(id, units, slots)).collect();
        NodeModel {
            id: NodeId(id),
            session: None,
            orders: VecDeque::new(),
            answers: VecDeque::new(),
            segments,
            disk: has_disk.then(DiskModel::default),
        }
    }

    /// The session is over; whatever was under way in it is lost.
    pub(crate) fn disconnect(&mut self, wiped_after: MonoTime) {
        self.session = None;
        self.orders.clear();
        self.answers.clear();
        self.disk.iter_mut().for_each(DiskModel::disconnect);
        for segment in &mut self.segments {
            // A segment that was away before keeps the earlier end.
            segment.wiped_after =
                if segment.mount.is_some() { wiped_after } else { wiped_after.min(segment.wiped_after) };
            segment.mount = None;
            for word in &mut segment.words {
                word.reclaim = None;
            }
        }
    }

    /// Works off the next order of the session.
    pub(crate) fn execute_next(&mut self, refuse: bool) -> bool {
        let Some(order) = self.orders.pop_front() else { return false };
        if self.execute_on_disk(order, refuse) {
            return true;
        }
        let segment = self.segments.iter_mut().find(|segment| segment.id == order.segment);
        let segment = segment.expect("orders name segments of the node");
        if segment.generation != order.generation || segment.mount.is_none() {
            self.answers.push_back((order, OrderOutcome::Refused(ErrorCode::StaleGeneration)));
        } else if refuse && order.kind == OrderKind::Reclaim {
            self.answers.push_back((order, OrderOutcome::Refused(ErrorCode::Busy)));
        } else {
            segment.execute(order, &mut self.answers);
        }
        true
    }
}
