//! Uses of objects: a used object becomes the last of its queue, so that eviction takes those first that were not used for the
//! longest time.

use super::Group;
use crate::ids::RecordRef;
use crate::record::RecordFlag;

impl Group {
    /// Moves a used object to the end of its queue.
    pub(super) fn note_use(&mut self, at: RecordRef) {
        let record = self.slab.get(at);
        // Reservations are in order of their ends, offloads in order of their commands.
        if record.has(RecordFlag::Writing) || record.has(RecordFlag::Offloading) || record.next().is_none() {
            return;
        }
        self.dequeue(at);
        self.enqueue(at);
    }

    /// Handles the use of the blocks of a prompt, given in order. The last one counts as used first: without its predecessors a
    /// block is worth nothing, so that it has to be evicted before them.
    pub(super) fn note_uses(&mut self, blocks: impl DoubleEndedIterator<Item = RecordRef>) {
        for at in blocks.rev() {
            self.note_use(at);
        }
    }
}
