//! Objects with missing stripes: the nodes that have them are away, and may return.
//!
//! The stripes of an object are on several nodes. When one of them restarts, the object cannot be read, but nothing is lost:
//! its node reports the stripes on its disk, or in its memory if only the session had ended. Such an object stays in the index
//! as a complete object without a complete replica. Readers do not find it, a put replaces it, a removal kills it, and eviction
//! drops it in its turn, like any other.
//!
//! The same holds after a change of the master: nodes report at different times. A stripe on a disk proves that the object was
//! complete, because only complete objects are offloaded. (A stripe in memory may belong to a put that never ended; see
//! [`report`](super::report).)
//!
//! The object is dropped when no node is awaited any more.

use moontide_types::record::object_root;
use moontide_types::{Epoch, ObjectId};

use super::Group;
use crate::effect::Effects;
use crate::ids::RecordRef;
use crate::record::{Record, RecordFlag};
use crate::time::{Now, Tick};

/// A version with missing stripes.
#[derive(Clone, Copy, Debug)]
pub(super) struct IncompleteObject {
    id: ObjectId,
    epoch: Epoch,
    /// Nodes that this master does not know yet have until then.
    until: Tick,
}

impl Group {
    /// Keeps an object whose location was lost with a node, if the node may return with it. Returns `false` if the object is
    /// complete without it, or must be dropped.
    pub(super) fn keep_for_missing_stripes(&mut self, at: RecordRef, now: Now) -> bool {
        let record = *self.slab.get(at);
        let has_location =
            || (0..self.location_count(&record)).any(|index| !self.location(&record, index).is_lost());
        if !self.lacks_stripes(&record)
            || !has_location()
            || !self.stripes_may_return(now)
            || moontide_rt::mutation_enabled("striped-object-dropped-with-node")
        {
            return false;
        }
        if !self.await_stripes(at, now) {
            self.invalidate(record.id(), true);
        }
        self.locations_changed(at);
        true
    }

    /// Remembers an object with missing stripes. Returns whether it was remembered before.
    pub(super) fn await_stripes(&mut self, at: RecordRef, now: Now) -> bool {
        let record = self.slab.get(at);
        let (id, epoch) = (record.id(), record.epoch());
        let was_known = std::mem::replace(&mut self.extension_mut(at).lacks_stripes, true);
        if !was_known {
            let until = self.ticker.end(now.mono, self.config.reservation);
            self.incomplete.push_back(IncompleteObject { id, epoch, until });
        }
        was_known
    }

    /// Adds the root of a reported stripe to a complete object of several stripes. Returns `false` if it is not the root of
    /// this stripe.
    pub(super) fn add_stripe_root(&mut self, at: RecordRef, stripe: usize, root: u64) -> bool {
        let known = &mut self.extension_mut(at).stripe_roots[stripe];
        if *known == 0 {
            *known = root;
        }
        *known == root || moontide_rt::mutation_enabled("returned-stripe-unchecked")
    }

    /// Ends the wait for the stripes of an object if all are there. Computes its root, which no single report has.
    pub(super) fn stripe_returned(&mut self, at: RecordRef) {
        let record = *self.slab.get(at);
        if self.stripes(&record) == 1 || !self.has_complete_replica(&record) {
            return;
        }
        let extension = self.extension_mut(at);
        extension.lacks_stripes = false;
        let root = object_root(record.id(), record.epoch(), record.object_len(), &extension.stripe_roots);
        self.slab.get_mut(at).root = root;
    }

    /// Drops objects whose stripes do not return. Visits at most `budget` objects; returns whether it dropped as many.
    pub(super) fn drop_incomplete(&mut self, now: Now, budget: usize, effects: &mut Effects) -> bool {
        let may_return = self.stripes_may_return(now);
        let mut dropped = 0;
        for _ in 0..budget.min(self.incomplete.len()) {
            let Some(object) = self.incomplete.pop_front() else { break };
            let Some(at) = self.find_id(object.id) else { continue };
            let record = *self.slab.get(at);
            if record.epoch() != object.epoch || !self.lacks_stripes(&record) {
                continue;
            }
            if may_return || object.until > self.ticker.now(now.mono) {
                self.incomplete.push_back(object);
                continue;
            }
            self.drop_object(at, now, effects);
            self.stats.lost_objects += 1;
            dropped += 1;
        }
        dropped == budget
    }

    /// Whether a complete object lacks stripes.
    pub(super) fn lacks_stripes(&self, record: &Record) -> bool {
        !record.has(RecordFlag::Writing) && self.stripes(record) > 1 && !self.has_complete_replica(record)
    }

    /// Whether a node may return with stripes, or has yet to report them.
    fn stripes_may_return(&self, now: Now) -> bool {
        self.awaits_reports(now) || self.disks_may_return(now)
    }
}
