//! [`NodeModel`]: a simple model of a node as the protocol describes it: a list of words per segment.
//!
//! It executes commands in the order of its session, when the test requests it; it refuses transitions that the table
//! does not allow; and it reports every change to its master, on one ordered stream per segment.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use moontide_meta::{
    CommandKind, CommandOutcome, NodeCommand, ReportState, StripeLocation, StripeRange, SyncMark,
};
use moontide_types::record::PinClass;
use moontide_types::{
    Epoch, ErrorCode, Extent, Generation, MonoTime, NodeId, ObjectId, SegmentId, SessionId, Spread, Term,
    UnixMillis,
};

use crate::disk::DiskModel;

/// Properties of an object in a record.
#[derive(Clone, Debug)]
pub(crate) struct RecordModel {
    pub(crate) id: ObjectId,
    pub(crate) key: Vec<u8>,
    pub(crate) tenant: u8,
    pub(crate) object_len: u64,
    pub(crate) stripe: StripeRange,
    pub(crate) root: u64,
    pub(crate) extent: Extent,
    pub(crate) one_sided: bool,
    pub(crate) pin: PinClass,
    pub(crate) expires: Option<UnixMillis>,
    pub(crate) cohort: Option<Vec<u8>>,
    pub(crate) parent: Option<Vec<u8>>,
    pub(crate) extra_replicas: u8,
    pub(crate) spread: Option<Spread>,
    pub(crate) disk_replicas: u8,
}

/// Word of a slot, with its holders.
#[derive(Clone, Debug)]
pub(crate) struct Word {
    pub(crate) epoch: Epoch,
    pub(crate) state: ReportState,
    pub(crate) record: Option<RecordModel>,
    /// Ledger cells that name it; the writer's claim is one.
    pub(crate) holders: u32,
    /// A reclaim that waits for the holders.
    pub(crate) reclaim: Option<NodeCommand>,
    /// The node killed it without a command.
    pub(crate) scrubbed: bool,
    /// An offload is reading it.
    pub(crate) pinned: bool,
    /// A copy from disk: only the master knows of it, and responses to commands contain all of its changes.
    pub(crate) is_copy: bool,
    /// Epoch of the slot before the copy, which it will have again.
    pub(crate) epoch_before_copy: Epoch,
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
            epoch_before_copy: Epoch::ZERO,
        }
    }

    pub(crate) fn is_free(&self) -> bool {
        self.state == ReportState::Free
    }
}

/// A change, as sent to the master.
#[derive(Clone, Debug)]
pub(crate) struct Change {
    pub(crate) slot: u32,
    pub(crate) epoch: Epoch,
    pub(crate) state: ReportState,
    pub(crate) record: Option<RecordModel>,
}

/// State of a segment's mount at the current master in the current session.
#[derive(Clone, Debug)]
pub(crate) struct MountModel {
    /// Unique number of the mount.
    pub(crate) number: u64,
    /// The master allocates nothing before this time.
    pub(crate) usable_at: MonoTime,
    pub(crate) ended: bool,
    pub(crate) stream: VecDeque<Change>,
    pub(crate) sent: u64,
    pub(crate) snapshot: u64,
    /// Slots with a version that the master knows to be READY.
    pub(crate) known_ready: BTreeMap<u32, Epoch>,
    /// Versions that the master has commanded to drop.
    pub(crate) commanded: BTreeSet<(u32, Epoch)>,
}

/// A segment of a node.
#[derive(Clone, Debug)]
pub(crate) struct SegmentModel {
    pub(crate) id: SegmentId,
    pub(crate) generation: Generation,
    pub(crate) units: u32,
    /// Highest term that the segment has adopted.
    pub(crate) term: Term,
    pub(crate) words: Vec<Word>,
    pub(crate) mount: Option<MountModel>,
    /// Number of the last mount. The node rejects locations granted in an earlier one: its master relies on the node's
    /// state at the mount, and a later begin would be unknown to it.
    pub(crate) mounted_as: u64,
    /// If it is unmounted at this time or later, it returns empty: its master has dropped the tombstones of the
    /// meantime.
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

    /// Drops all records and starts a new incarnation.
    pub(crate) fn wipe(&mut self) {
        self.generation = Generation(self.generation.0 + 1);
        self.words = vec![Word::new(); self.words.len()];
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.words.iter().all(Word::is_free)
    }

    /// All words that are not free, as the start of a stream.
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

    pub(crate) fn report_change(&mut self, slot: u32) {
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
        location: &StripeLocation,
        epoch: Epoch,
        record: RecordModel,
    ) -> Result<(), ErrorCode> {
        if location.generation != self.generation {
            return Err(ErrorCode::StaleGeneration);
        }
        let apart = |other: Extent| {
            other.end() <= u64::from(location.extent.start) || location.extent.end() <= u64::from(other.start)
        };
        let taken = self.words.iter().filter(|word| !word.is_free());
        if !taken.filter_map(|word| word.record.as_ref()).all(|other| apart(other.extent)) {
            return Err(ErrorCode::Overlap);
        }
        let word = &mut self.words[location.slot.0 as usize];
        if !word.is_free() || word.epoch >= epoch {
            return Err(ErrorCode::StaleEpoch);
        }
        *word = Word { epoch, state: ReportState::Writing, record: Some(record), holders: 1, ..Word::new() };
        self.report_change(location.slot.0);
        Ok(())
    }

    /// WRITING → READY; the writer's claim is released in any case.
    pub(crate) fn commit(
        &mut self,
        slot: u32,
        epoch: Epoch,
        responses: &mut VecDeque<(NodeCommand, CommandOutcome)>,
    ) -> bool {
        let word = &mut self.words[slot as usize];
        if word.epoch != epoch || word.is_free() || word.state == ReportState::Ready {
            return word.epoch == epoch && word.state == ReportState::Ready;
        }
        word.holders = 0;
        if word.state == ReportState::Writing {
            word.state = ReportState::Ready;
            self.report_change(slot);
            return true;
        }
        self.free_if_drained(slot, responses);
        false
    }

    /// Death of the writer: WRITING → DEAD, and its claim is released.
    pub(crate) fn abort(
        &mut self,
        slot: u32,
        epoch: Epoch,
        responses: &mut VecDeque<(NodeCommand, CommandOutcome)>,
    ) {
        let word = &mut self.words[slot as usize];
        if word.epoch != epoch || !matches!(word.state, ReportState::Writing | ReportState::Dead) {
            return;
        }
        word.holders = 0;
        if word.state == ReportState::Writing {
            word.state = ReportState::Dead;
            self.report_change(slot);
        }
        self.free_if_drained(slot, responses);
    }

    /// A corrupted record: READY → DEAD without a command.
    pub(crate) fn scrub(&mut self, slot: u32) {
        let word = &mut self.words[slot as usize];
        if word.state == ReportState::Ready && !word.is_copy {
            word.state = ReportState::Dead;
            word.scrubbed = true;
            self.report_change(slot);
        }
    }

    /// Releases all readers; writers keep their claims.
    pub(crate) fn release_readers(&mut self, responses: &mut VecDeque<(NodeCommand, CommandOutcome)>) {
        for slot in 0..self.words.len() as u32 {
            if self.words[slot as usize].state != ReportState::Writing {
                self.words[slot as usize].holders = 0;
                self.free_if_drained(slot, responses);
            }
        }
    }

    fn free_if_drained(&mut self, slot: u32, responses: &mut VecDeque<(NodeCommand, CommandOutcome)>) {
        let word = &mut self.words[slot as usize];
        if word.state == ReportState::Dead
            && word.holders == 0
            && !word.pinned
            && let Some(command) = word.reclaim.take()
        {
            let is_copy = word.is_copy;
            *word = Word { epoch: word.epoch.max(word.epoch_before_copy), is_copy, ..Word::new() };
            self.report_change(slot);
            self.words[slot as usize].is_copy = false;
            responses.push_back((command, CommandOutcome::Done));
        }
    }

    /// Ends the offload of a version: its slot may be freed.
    pub(crate) fn unpin(
        &mut self,
        slot: u32,
        epoch: Epoch,
        pinned: bool,
        responses: &mut VecDeque<(NodeCommand, CommandOutcome)>,
    ) {
        if self.words[slot as usize].epoch == epoch {
            self.words[slot as usize].pinned &= pinned;
            self.free_if_drained(slot, responses);
        }
    }

    fn execute(&mut self, command: NodeCommand, responses: &mut VecDeque<(NodeCommand, CommandOutcome)>) {
        let slot = command.slot.0;
        let word = &mut self.words[slot as usize];
        let outcome = match command.kind {
            CommandKind::Kill if word.epoch == command.epoch && !word.is_free() => {
                if word.state != ReportState::Dead {
                    word.state = ReportState::Dead;
                    self.report_change(slot);
                }
                CommandOutcome::Accepted
            }
            CommandKind::Kill => CommandOutcome::Refused(ErrorCode::Gone),
            CommandKind::Offload | CommandKind::Promote { .. } => unreachable!("handled by the disk"),
            CommandKind::Copy { .. } => unreachable!("handled by the node"),
            CommandKind::Reclaim if word.epoch > command.epoch => CommandOutcome::Done,
            CommandKind::Reclaim if word.is_free() => {
                if word.epoch < command.epoch {
                    word.epoch = command.epoch;
                    self.report_change(slot);
                }
                CommandOutcome::Done
            }
            CommandKind::Reclaim if word.epoch < command.epoch => CommandOutcome::Refused(ErrorCode::Overlap),
            CommandKind::Reclaim => {
                if word.state != ReportState::Dead {
                    word.state = ReportState::Dead;
                    self.report_change(slot);
                }
                let word = &mut self.words[slot as usize];
                if word.reclaim.is_some() || word.holders > 0 || word.pinned {
                    word.reclaim = Some(command);
                    CommandOutcome::Accepted
                } else {
                    word.reclaim = Some(command);
                    return self.free_if_drained(slot, responses);
                }
            }
        };
        responses.push_back((command, outcome));
    }
}

/// A node.
#[derive(Clone, Debug)]
pub(crate) struct NodeModel {
    pub(crate) id: NodeId,
    pub(crate) session: Option<SessionId>,
    pub(crate) commands: VecDeque<NodeCommand>,
    pub(crate) responses: VecDeque<(NodeCommand, CommandOutcome)>,
    pub(crate) segments: Vec<SegmentModel>,
    pub(crate) disk: Option<DiskModel>,
    /// Copies of other nodes' records into slots of this node, in progress.
    pub(crate) copies: VecDeque<NodeCommand>,
    /// When it was last in sync with a master: the number of exclusions, and the time.
    pub(crate) synced: Option<(u32, MonoTime)>,
}

impl NodeModel {
    pub(crate) fn new(id: u64, segments: &[(u32, usize)], has_disk: bool) -> NodeModel {
        let segments =
            (0..).zip(segments).map(|(id, &(units, slots))| SegmentModel::new(id, units, slots)).collect();
        NodeModel {
            id: NodeId(id),
            session: None,
            commands: VecDeque::new(),
            responses: VecDeque::new(),
            segments,
            disk: has_disk.then(DiskModel::default),
            copies: VecDeque::new(),
            synced: None,
        }
    }

    /// Returns the sync mark for a mount.
    pub(crate) fn sync_mark(&self, now: MonoTime) -> SyncMark {
        let mark = |(exclusion, at)| SyncMark { exclusion, ago: now.since(at) };
        self.synced.map_or(SyncMark::NONE, mark)
    }

    /// Ends the session; all messages in flight are lost.
    pub(crate) fn disconnect(&mut self, wiped_after: MonoTime) {
        self.session = None;
        self.commands.clear();
        self.responses.clear();
        self.copies.clear();
        self.disk.iter_mut().for_each(DiskModel::disconnect);
        for segment in &mut self.segments {
            // A segment that was unmounted before keeps the earlier end.
            segment.wiped_after =
                if segment.mount.is_some() { wiped_after } else { wiped_after.min(segment.wiped_after) };
            segment.mount = None;
            for word in &mut segment.words {
                word.reclaim = None;
            }
        }
    }

    /// Executes the next command of the session.
    pub(crate) fn execute_next(&mut self, refuse: bool) -> bool {
        let Some(command) = self.commands.pop_front() else { return false };
        if let CommandKind::Copy { .. } = command.kind {
            match refuse {
                true => self.responses.push_back((command, CommandOutcome::Refused(ErrorCode::Busy))),
                false => self.copies.push_back(command),
            }
            return true;
        }
        if matches!(command.kind, CommandKind::Kill | CommandKind::Reclaim) {
            let into = |copy: &NodeCommand| (copy.segment, copy.slot) == (command.segment, command.slot);
            if let Some(index) = self.copies.iter().position(into) {
                let copy = self.copies.remove(index).expect("position was found above");
                self.responses.push_back((copy, CommandOutcome::Refused(ErrorCode::Cancelled)));
            }
        }
        if self.execute_on_disk(command, refuse) {
            return true;
        }
        let segment = self.segments.iter_mut().find(|segment| segment.id == command.segment);
        let segment = segment.expect("segment of a command exists");
        if segment.generation != command.generation || segment.mount.is_none() {
            self.responses.push_back((command, CommandOutcome::Refused(ErrorCode::StaleGeneration)));
        } else if refuse && command.kind == CommandKind::Reclaim {
            self.responses.push_back((command, CommandOutcome::Refused(ErrorCode::Busy)));
        } else {
            segment.execute(command, &mut self.responses);
        }
        true
    }
}
