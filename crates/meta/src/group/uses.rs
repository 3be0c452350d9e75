//! Uses of objects, and the order of eviction that follows from them.

use super::Group;
use crate::eviction::EvictionTrials;
use crate::ids::RecordRef;
use crate::record::RecordFlag;

impl Group {
    /// Reports sampled uses to the trials, and follows their rule. The caller does this for all groups that it hosts, about ten
    /// times per second. Without it, the group evicts in the order of the last use.
    pub fn exchange_eviction_trials(&mut self, trials: &mut EvictionTrials) {
        trials.exchange(self.config.group, self.objects_in_memory, &mut self.eviction_order);
    }

    /// Handles a use: the object is the last of those that were used again.
    pub(super) fn note_use(&mut self, at: RecordRef) {
        let record = self.slab.get(at);
        // Reservations are in order of their ends.
        if record.has(RecordFlag::Writing) {
            return;
        }
        self.eviction_order.used(record.id());
        // Offloads are in order of their commands.
        if record.has(RecordFlag::Offloading) {
            self.slab.get_mut(at).set_used_again(true);
            return;
        }
        self.dequeue(at);
        self.slab.get_mut(at).set_used_again(true);
        self.enqueue(at);
    }

    /// Handles the use of the blocks of a prompt, given in order. The last one counts as used first: without its predecessors a
    /// block is worth nothing, so that it has to be evicted before them.
    pub(super) fn note_uses(&mut self, blocks: impl DoubleEndedIterator<Item = RecordRef>) {
        for at in blocks.rev() {
            self.note_use(at);
        }
    }

    /// Moves an object that cannot be evicted now behind the others of its queue.
    pub(super) fn postpone_eviction(&mut self, at: RecordRef) {
        self.dequeue(at);
        self.enqueue(at);
    }

    /// Adds an object whose put has completed to its queue.
    pub(super) fn enqueue_stored(&mut self, at: RecordRef) {
        let id = self.slab.get(at).id();
        let was_used = self.eviction_order.stored(id);
        self.slab.get_mut(at).set_used_again(was_used);
        self.enqueue(at);
        if self.eviction_order.keeps_old() {
            self.move_to_front(at);
        }
    }

    /// Makes an object the first of its queue.
    fn move_to_front(&mut self, at: RecordRef) {
        let record = *self.slab.get(at);
        let queue = Group::queue_of(&mut self.writing, &mut self.offloading, &mut self.tenants, &record);
        queue.unlink(&mut self.slab, at);
        queue.push_oldest(&mut self.slab, at);
        self.slab.get_mut(at).set_last_use(0);
    }
}
