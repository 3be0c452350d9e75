//! Objects with missing stripes: the nodes that have them are away, and may return.
//!
//! The stripes of an object are on several nodes. When one of them restarts, the object cannot be read, but nothing is lost:
//! its node reports the stripes on its disk, or in its memory if only the session had ended. Such an object stays in the index
//! as a complete object without a complete replica. Readers do not find it, a put replaces it, and a removal kills it. In its
//! turn, eviction drops it, or releases its memory if its stripes are on disk, too.
//!
//! The same holds after a change of the master: nodes report at different times. A stripe on a disk proves that the object was
//! complete, because only complete objects are offloaded. (A stripe in memory may belong to a put that never ended; see
//! [`report`](super::report).)
//!
//! The object is dropped when no node is awaited any more.

use std::collections::VecDeque;

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
    /// End of the wait, also if nodes leave and return all the time: by then each of them has been away for too long.
    end: Tick,
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
        self.lost_stripes(at, now);
        self.locations_changed(at);
        true
    }

    /// Remembers an object that has lost stripes, and tells watchers: readers do not find it.
    pub(super) fn lost_stripes(&mut self, at: RecordRef, now: Now) {
        if !self.await_stripes(at, now) {
            let record = *self.slab.get(at);
            self.invalidate(record.tenant(), record.id(), true);
        }
    }

    /// Remembers an object with missing stripes. Returns whether it was known to lack them.
    pub(super) fn await_stripes(&mut self, at: RecordRef, now: Now) -> bool {
        let record = self.slab.get(at);
        let (id, epoch) = (record.id(), record.epoch());
        let until = self.ticker.end(now.mono, self.config.reservation);
        let end = self.ticker.end(now.mono, self.config.disk_rejoin_window + self.config.reservation);
        let extension = self.extension_mut(at);
        let was_known = std::mem::replace(&mut extension.lacks_stripes, true);
        if !std::mem::replace(&mut extension.is_awaited, true) {
            self.incomplete.push_back(IncompleteObject { id, epoch, until, end });
        }
        was_known
    }

    /// Ends an object that has lost a location without which it is not complete, unless it waits for other stripes and has
    /// another location of this one.
    pub(super) fn end_unless_stripe_remains(
        &mut self,
        at: RecordRef,
        position: usize,
        lost: bool,
        now: Now,
        effects: &mut Effects,
    ) {
        if self.waits_with_stripe(at, position) {
            self.locations_changed(at);
        } else {
            self.end_if_incomplete(at, lost, now, effects);
        }
    }

    /// Whether an object waits for other stripes, and has the stripe of this position.
    pub(super) fn waits_with_stripe(&self, at: RecordRef, position: usize) -> bool {
        let record = *self.slab.get(at);
        self.extensions.get(record.extension).is_some_and(|extension| extension.lacks_stripes)
            && self.lacks_stripes(&record)
            && self.has_stripe(&record, position % self.stripes(&record), |_| true)
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
        let was_missing = std::mem::replace(&mut extension.lacks_stripes, false);
        let root = object_root(record.id(), record.epoch(), record.object_len(), &extension.stripe_roots);
        self.slab.get_mut(at).root = root;
        if was_missing {
            self.note_reported(at);
        }
    }

    /// Returns the number of objects that cannot be read because stripes are missing, as of the last tick.
    pub fn objects_missing_stripes(&self) -> u64 {
        self.incomplete.len() as u64
    }

    /// Drops objects whose stripes do not return. Visits at most `budget` objects; returns whether as many left the list.
    pub(super) fn drop_incomplete(&mut self, now: Now, budget: usize, effects: &mut Effects) -> bool {
        let (may_return, tick) = (self.stripes_may_return(now), self.ticker.now(now.mono));
        let mut done = 0;
        for _ in 0..budget.min(self.incomplete.len()) {
            let Some(object) = self.incomplete.pop_front() else { break };
            let Some(at) = self.find_id(object.id).filter(|&at| self.slab.get(at).epoch() == object.epoch)
            else {
                done += 1;
                continue;
            };
            let lacks_stripes = self.lacks_stripes(self.slab.get(at));
            if lacks_stripes && (may_return || object.until > tick) && object.end > tick {
                self.incomplete.push_back(object);
                continue;
            }
            done += 1;
            if lacks_stripes {
                self.drop_object(at, now, effects);
                self.stats.lost_objects += 1;
            } else if let Some(extension) = self.extensions.get_mut(self.slab.get(at).extension) {
                (extension.lacks_stripes, extension.is_awaited) = (false, false);
            }
        }
        if self.incomplete.is_empty() {
            self.incomplete = VecDeque::new();
        }
        done == budget
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
