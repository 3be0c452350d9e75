//! [`Directory`]: names as processes see them, names on the disk, and the pending changes between the two.
//!
//! Invariant: `live` is `durable` with all of `pending` applied, in order.

use std::collections::BTreeMap;

/// Target of a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    File(u64),
    Directory,
}

pub(super) type Names = BTreeMap<String, Target>;

/// A change of a directory.
#[derive(Clone, Debug)]
pub(super) enum Change {
    /// A new name, or a new target of an existing one.
    Link(String, Target),
    Unlink(String),
    Rename(String, String),
}

/// A directory.
#[derive(Clone, Debug, Default)]
pub(super) struct Directory {
    pub(super) live: Names,
    pub(super) durable: Names,
    pending: Vec<Change>,
}

impl Directory {
    /// Applies a change for processes; it is not durable yet.
    pub(super) fn change(&mut self, change: Change) {
        apply(&mut self.live, &change);
        self.pending.push(change);
    }

    /// Number of changes that are not durable.
    pub(super) fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Makes the oldest `changes` changes durable.
    pub(super) fn keep(&mut self, changes: usize) {
        for change in self.pending.drain(..changes) {
            apply(&mut self.durable, &change);
        }
    }

    /// Drops all changes that are not durable, after a power failure.
    pub(super) fn drop_pending(&mut self) {
        self.pending.clear();
        self.live = self.durable.clone();
    }

    /// Returns all files that a name refers to, or may refer to after a crash. May contain duplicates.
    pub(super) fn files(&self) -> impl Iterator<Item = u64> {
        let pending = self.pending.iter().filter_map(|change| match change {
            Change::Link(_, target) => Some(target),
            Change::Unlink(_) | Change::Rename(..) => None,
        });
        self.live.values().chain(self.durable.values()).chain(pending).filter_map(|target| match target {
            Target::File(id) => Some(*id),
            Target::Directory => None,
        })
    }
}

fn apply(names: &mut Names, change: &Change) {
    match change {
        Change::Link(name, target) => {
            names.insert(name.clone(), *target);
        }
        Change::Unlink(name) => {
            names.remove(name);
        }
        Change::Rename(from, to) => {
            let target = names.remove(from).expect("changes are applied in order");
            names.insert(to.clone(), target);
        }
    }
}
