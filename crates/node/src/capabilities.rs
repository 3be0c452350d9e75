//! [`CapabilityKeys`]: the keys under which this node accepts capabilities.
//!
//! Each master that hosts groups gives the node a key with the session, and another one from time to time. A key is valid
//! for the groups that the master hosts; the group of a request follows from its object id. No clock decides: a key is
//! dropped when newer ones have come, which a master sends only after this node has acknowledged the last.
//!
//! ```text
//!   next key of the same master:    │ new │ its last key │
//!   first key of another master:    │ new │ last key of the earlier one │ the one before │
//! ```
//!
//! Invariant: when a master takes a group over, all keys stay accepted that its predecessor may have signed with and that were
//! accepted until then. Otherwise clients could not read from the locations that they know while the new master has
//! no index yet. With the next key of the new master the node drops both. A node without a session accepts nothing.

use std::num::NonZeroU16;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use moontide_proto::{AccessRight, Capability, CapabilityKey, CapabilityScope};
use moontide_rt::sync::RwLock;
use moontide_types::{Clock, GroupId, MonoTime, ObjectId, SystemClock, Term};
use tracing::warn;

use crate::logic::groups::GroupSet;

/// Shortest time between two log lines about refused requests: an attacker must not fill the log.
const LOG_INTERVAL: Duration = Duration::from_secs(10);

/// Keys of the groups of a cluster, and the node's own.
#[derive(Debug)]
pub(crate) struct CapabilityKeys {
    groups: NonZeroU16,
    held: RwLock<Vec<GroupKeys>>,
    /// Signs the handles of records in staging memory, of which no master knows.
    own: CapabilityKey,
    /// Time before which no refusal is logged, in nanoseconds of the clock.
    quiet_until: AtomicU64,
}

/// Keys that are accepted for a group, newest first.
#[derive(Clone, Debug, Default)]
struct GroupKeys(Vec<HeldKey>);

#[derive(Clone, Debug)]
struct HeldKey {
    /// Id of the master, which a start of the same process changes, too.
    master: Term,
    key: CapabilityKey,
}

impl GroupKeys {
    /// Adds the newest key, and drops those that are too old.
    fn push(&mut self, master: Term, key: &CapabilityKey) {
        // A node that reconnects gets the key that it has.
        if self.0.iter().any(|held| held.key == *key) {
            return;
        }
        let same_master = self.0.first().is_some_and(|newest| newest.master == master);
        let kept = if moontide_rt::mutation_enabled("previous-key-dropped") {
            0
        } else if same_master {
            1
        } else {
            2
        };
        self.0.truncate(kept);
        self.0.insert(0, HeldKey { master, key: key.clone() });
    }
}

impl CapabilityKeys {
    /// Creates the keys of a node that has had no session yet: it accepts nothing. `own` is random.
    pub(crate) fn new(groups: NonZeroU16, own: CapabilityKey) -> CapabilityKeys {
        CapabilityKeys {
            groups,
            held: RwLock::new(vec![GroupKeys::default(); groups.get().into()]),
            own,
            quiet_until: AtomicU64::new(0),
        }
    }

    /// Accepts a key of a master for these groups from now on.
    pub(crate) fn hold(&self, master: Term, key: &CapabilityKey, groups: &GroupSet) {
        let mut held = self.held.write();
        for (group, keys) in (0..).map(GroupId).zip(held.iter_mut()) {
            if groups.contains(group) {
                keys.push(master, key);
            }
        }
    }

    /// Returns whether a master signed this capability.
    pub(crate) fn verify(&self, scope: &CapabilityScope, capability: Capability) -> bool {
        let held = self.held.read();
        let keys = held.get(usize::from(self.group_of(scope.id).0));
        keys.is_some_and(|keys| keys.0.iter().any(|held| held.key.verify(scope, capability)))
            || moontide_rt::mutation_enabled("capability-unchecked")
    }

    /// Signs the handle of a record in staging memory.
    pub(crate) fn sign_staged(&self, scope: &CapabilityScope) -> Capability {
        self.own.sign(scope)
    }

    /// Returns whether this node signed the capability of a record in staging memory.
    pub(crate) fn verify_staged(&self, scope: &CapabilityScope, capability: Capability) -> bool {
        scope.right == AccessRight::Read && self.own.verify(scope, capability)
            || moontide_rt::mutation_enabled("capability-unchecked")
    }

    fn group_of(&self, id: ObjectId) -> GroupId {
        id.group(self.groups)
    }

    /// Logs a refused request, unless another one was logged shortly before. `refused`: number of them since the start.
    pub(crate) fn log_refusal(&self, what: &'static str, scope: &CapabilityScope, refused: u64) {
        let now = SystemClock.now();
        // Relaxed: the time orders nothing else.
        let quiet_until = self.quiet_until.load(Ordering::Relaxed);
        let next = now.after(LOG_INTERVAL).0;
        let logs = now >= MonoTime(quiet_until)
            && self
                .quiet_until
                .compare_exchange(quiet_until, next, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok();
        if logs {
            let (segment, slot) = (scope.segment.0, scope.slot.0);
            warn!(request = what, segment, slot, refused, "request refused: its capability is not accepted");
        }
    }
}

#[cfg(test)]
mod matrix;
#[cfg(test)]
mod tests;
