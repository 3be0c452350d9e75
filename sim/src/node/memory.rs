//! [`Memory`]: the heap, and beside each segment what the process knows of it: the master's grant, the books of its
//! space, and marks of what was read.

use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::Duration;

use moontide_heap::{HeapConfig, HugePages, NodeHeap, Segment};
use moontide_node::decide::books::Books;
use moontide_node::decide::groups::{GroupSet, group_of_segment};
use moontide_node::decide::touch::TouchMap;
use moontide_proto::limits::TOUCH_BITMAPS_MAX;
use moontide_proto::v1;
use moontide_types::record::{State, Word};
use moontide_types::{Epoch, Generation, GroupId, NodeId, SegmentId, SlotId, Term};

#[derive(Debug)]
pub(super) struct Memory {
    pub(super) heap: NodeHeap,
    pub(super) sides: Vec<Side>,
    pub(super) generation: Generation,
    slots: u32,
    touched: TouchMap,
    /// Marks that are for another master than the one that has taken them.
    waiting: Vec<v1::TouchBitmap>,
}

/// How much memory a node has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Shape {
    pub(super) segments: usize,
    pub(super) units: u32,
    pub(super) slots: u32,
    pub(super) groups: NonZeroU16,
}

/// What stands beside a segment.
#[derive(Debug)]
pub(super) struct Side {
    pub(super) segment: Arc<Segment>,
    /// The group that it is for.
    pub(super) group: GroupId,
    books: Books,
    /// The group that it belongs to, and the term that was adopted for it.
    pub(super) grant: Option<(GroupId, Term)>,
    pub(super) closed: bool,
}

impl Memory {
    pub(super) fn create(node: NodeId, generation: Generation, shape: Shape) -> Memory {
        let huge = HugePages::IfAllowed;
        let slots_max = u64::from(shape.slots) * shape.segments as u64;
        let heap = NodeHeap::create(HeapConfig { node, generation, slots_max, huge }).expect("a small heap");
        let side = |number: usize| Side {
            segment: heap.add_segment(shape.slots, shape.units, huge).expect("a small segment"),
            group: group_of_segment(node, SegmentId(number as u32), shape.groups),
            books: Books::new(shape.units, shape.slots),
            grant: None,
            closed: false,
        };
        let sides = (0..shape.segments).map(side).collect();
        let touched = TouchMap::new(shape.segments, shape.slots);
        Memory { heap, sides, generation, slots: shape.slots, touched, waiting: Vec::new() }
    }

    pub(super) fn group_of(&self, segment: SegmentId) -> GroupId {
        self.sides[segment.0 as usize].group
    }

    pub(super) fn side(&self, segment: SegmentId) -> Option<&Side> {
        self.sides.get(segment.0 as usize)
    }

    pub(super) fn side_mut(&mut self, segment: SegmentId) -> Option<&mut Side> {
        self.sides.get_mut(segment.0 as usize)
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
        if let Some(side) = self.side_mut(segment) {
            side.books.note(slot, Word::new(epoch, state), units);
        }
    }

    /// A version that may be older than what was there is brought back into a slot.
    pub(super) fn note_copy(&mut self, segment: SegmentId, slot: SlotId, version: Epoch, units: u32) {
        if let Some(side) = self.side_mut(segment) {
            side.books.note_copy(slot, version, units);
        }
    }

    pub(super) fn touch(&mut self, segment: SegmentId, slot: SlotId) {
        self.touched.mark(segment.0 as usize, slot.0);
    }

    /// Takes all marks of what was read in segments of these groups.
    pub(super) fn take_touched(&mut self, beat: u64, groups: &GroupSet) -> Vec<v1::TouchBitmap> {
        let fresh = TouchMap::new(self.sides.len(), self.slots);
        let taken = std::mem::replace(&mut self.touched, fresh).bitmaps(self.generation, beat);
        self.waiting.extend(taken);
        let all = std::mem::take(&mut self.waiting);
        let concerns = |bitmap: &v1::TouchBitmap| groups.contains(self.group_of(SegmentId(bitmap.segment)));
        let (own, mut others): (Vec<_>, Vec<_>) = all.into_iter().partition(concerns);
        others.truncate(TOUCH_BITMAPS_MAX);
        self.waiting = others;
        own
    }

    pub(super) fn taken_units(&self) -> u64 {
        self.sides.iter().map(|side| u64::from(side.segment.taken_units())).sum()
    }
}

impl Side {
    /// A master has taken it into use. A newer term is obeyed from now on.
    pub(super) fn granted(&mut self, group: GroupId, term: Term) {
        let term = self.segment.obey(term);
        self.grant = Some((group, term));
        self.closed = false;
    }

    pub(super) fn is_occupied(&self) -> bool {
        self.segment.taken_units() > 0
    }

    /// As it is offered to a master, so long after one last knew of everything in it.
    pub(super) fn spec(&self, away: Option<(Duration, Term)>) -> v1::SegmentSpec {
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
            occupied: self.is_occupied(),
            tenant: String::new(),
            away_ms: away.map_or(0, |(away, _)| away.as_millis() as u64),
            known_term: away.map_or(0, |(_, term)| term.get()),
        }
    }

    /// As a heartbeat tells of it.
    pub(super) fn status(&self) -> v1::SegmentStatus {
        let (shape, usage) = (self.segment.shape(), self.books.usage());
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
