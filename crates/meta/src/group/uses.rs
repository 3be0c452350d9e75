//! Uses of objects, and the order of eviction that follows from them.

use moontide_types::record::PinClass;

use super::Group;
use crate::eviction::EvictionTrials;
use crate::ids::RecordRef;
use crate::record::RecordFlag;

impl Group {
    /// Reports sampled uses to the trials, and follows their rule. The caller does this for all groups that it hosts, with each
    /// tick. Without it, the group evicts in the order of the last use.
    pub fn exchange_eviction_trials(&mut self, trials: &mut EvictionTrials) {
        trials.exchange(self.config.group, self.objects_in_memory, &mut self.eviction_order);
    }

    /// Follows one of the eviction rules, for tests: without trials a group follows the first.
    #[cfg(any(test, feature = "testing"))]
    pub fn set_eviction_rule(&mut self, number: u64) {
        self.eviction_order.set_rule(number);
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

    /// Moves an object that cannot be evicted now behind all others: it is in use. In the queue of objects that were used once,
    /// two such objects would be tried in turn, and none of the other queue.
    pub(super) fn postpone_eviction(&mut self, at: RecordRef) {
        self.dequeue(at);
        self.slab.get_mut(at).set_used_again(true);
        self.enqueue(at);
    }

    /// Adds an object whose put has completed to its queue.
    pub(super) fn enqueue_stored(&mut self, at: RecordRef) {
        let (id, pin) = (self.slab.get(at).id(), self.slab.get(at).pin());
        let was_used = self.eviction_order.stored(id);
        self.slab.get_mut(at).set_used_again(was_used);
        self.enqueue(at);
        if self.eviction_order.keeps_old() && pin == PinClass::None {
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
