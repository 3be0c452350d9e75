//! [`NodeMemory`]: the heap, and the node's state of each segment: the master's grant, the space usage, and marks of
//! reads.

use std::num::NonZeroU16;
use std::sync::Arc;

use moontide_heap::{HeapConfig, HugePages, NodeHeap, Segment};
use moontide_node::logic::access::AccessBitmap;
use moontide_node::logic::groups::{GroupSet, group_of_segment};
use moontide_node::logic::usage::UsageTracker;
use moontide_proto::limits::TOUCH_BITMAPS_MAX;
use moontide_proto::v1;
use moontide_types::record::{State, Word};
use moontide_types::{Epoch, Generation, GroupId, NodeId, SegmentId, SlotId, Term};

#[derive(Debug)]
pub(super) struct NodeMemory {
    pub(super) heap: NodeHeap,
    pub(super) segments: Vec<NodeSegment>,
    pub(super) generation: Generation,
    slots: u32,
    touched: AccessBitmap,
    /// Marks for other masters than the one that took them.
    waiting: Vec<v1::TouchBitmap>,
}

/// How much memory a node has.
#[derive(Clone, Copy, Debug)]
pub(super) struct MemoryParams {
    pub(super) segments: usize,
    pub(super) units: u32,
    pub(super) slots: u32,
    pub(super) groups: NonZeroU16,
}

/// Segment with the node's state of it.
#[derive(Debug)]
pub(super) struct NodeSegment {
    pub(super) segment: Arc<Segment>,
    /// The group that it is for.
    pub(super) group: GroupId,
    usage_tracker: UsageTracker,
    /// The group that it belongs to, and the term that was adopted for it.
    pub(super) grant: Option<(GroupId, Term)>,
    pub(super) closed: bool,
    /// It was offered to a master.
    pub(super) was_offered: bool,
}

impl NodeMemory {
    pub(super) fn create(node: NodeId, generation: Generation, shape: MemoryParams) -> NodeMemory {
        let huge = HugePages::Auto;
        let slots_max = u64::from(shape.slots) * shape.segments as u64;
        let heap = NodeHeap::create(HeapConfig { node, generation, slots_max, huge }).expect("a small heap");
        let node_segment = |number: usize| NodeSegment {
            segment: heap.add_segment(shape.slots, shape.units, huge).expect("a small segment"),
            group: group_of_segment(node, SegmentId(number as u32), shape.groups),
            usage_tracker: UsageTracker::new(shape.units, shape.slots),
            grant: None,
            closed: false,
            was_offered: false,
        };
        let segments = (0..shape.segments).map(node_segment).collect();
        let touched = AccessBitmap::new(shape.segments, shape.slots);
        NodeMemory { heap, segments, generation, slots: shape.slots, touched, waiting: Vec::new() }
    }

    pub(super) fn group_of(&self, segment: SegmentId) -> GroupId {
        self.segments[segment.0 as usize].group
    }

    pub(super) fn node_segment(&self, segment: SegmentId) -> Option<&NodeSegment> {
        self.segments.get(segment.0 as usize)
    }

    pub(super) fn side_mut(&mut self, segment: SegmentId) -> Option<&mut NodeSegment> {
        self.segments.get_mut(segment.0 as usize)
    }

    /// A slot's word has become this. `units`: of its extent, where that is known.
    pub(super) fn note(
        &mut self,
        segment: SegmentId,
        slot: SlotId,
        epoch: Epoch,
        state: State,
        units: Option<u32>,
    ) {
        if let Some(node_segment) = self.side_mut(segment) {
            node_segment.usage_tracker.record(slot, Word::new(epoch, state), units);
        }
    }

    /// A version that may be older than what was there is brought back into a slot.
    pub(super) fn note_copy(&mut self, segment: SegmentId, slot: SlotId, version: Epoch, units: u32) {
        if let Some(node_segment) = self.side_mut(segment) {
            node_segment.usage_tracker.note_copy(slot, version, units);
        }
    }

    pub(super) fn touch(&mut self, segment: SegmentId, slot: SlotId) {
        self.touched.mark(segment.0 as usize, slot.0);
    }

    /// Takes all marks of what was read in segments of these groups.
    pub(super) fn take_touched(&mut self, heartbeat: u64, groups: &GroupSet) -> Vec<v1::TouchBitmap> {
        let fresh = AccessBitmap::new(self.segments.len(), self.slots);
        let taken = std::mem::replace(&mut self.touched, fresh).bitmaps(self.generation, heartbeat);
        self.waiting.extend(taken);
        let all = std::mem::take(&mut self.waiting);
        let concerns = |bitmap: &v1::TouchBitmap| groups.contains(self.group_of(SegmentId(bitmap.segment)));
        let (own, mut others): (Vec<_>, Vec<_>) = all.into_iter().partition(concerns);
        others.truncate(TOUCH_BITMAPS_MAX);
        self.waiting = others;
        own
    }

    pub(super) fn taken_units(&self) -> u64 {
        self.segments.iter().map(|node_segment| u64::from(node_segment.segment.taken_units())).sum()
    }
}

impl NodeSegment {
    /// Records that a master has mounted the segment. A newer term takes effect at once.
    pub(super) fn granted(&mut self, group: GroupId, term: Term) {
        let term = self.segment.adopt_term(term);
        self.grant = Some((group, term));
        self.closed = false;
    }

    pub(super) fn is_occupied(&self) -> bool {
        self.segment.taken_units() > 0
    }

    /// As it is offered to a master.
    pub(super) fn spec(&self) -> v1::SegmentSpec {
        let shape = self.segment.shape();
        v1::SegmentSpec {
            segment: shape.segment.0,
            generation: shape.generation.0,
            medium: v1::Medium::Memory.into(),
            units: shape.units,
            slots: shape.slots,
            numa: 0,
            group: Some(self.group.0.into()),
            term: self.grant.map_or(0, |(_, term)| term.get()),
            has_records: self.is_occupied(),
            tenant: String::new(),
        }
    }

    /// Returns the usage for a heartbeat.
    pub(super) fn status(&self) -> v1::SegmentStatus {
        let (shape, usage) = (self.segment.shape(), self.usage_tracker.usage());
        let state = if self.closed { v1::SegmentState::Draining } else { v1::SegmentState::Serving };
        v1::SegmentStatus {
            segment: shape.segment.0,
            generation: shape.generation.0,
            state: state.into(),
            live_units: usage.live_units as u32,
            writing_units: usage.writing_units as u32,
            draining_units: usage.draining_units as u32,
            free_units: usage.free_units as u32,
            free_slots: usage.free_slots as u32,
        }
    }
}
