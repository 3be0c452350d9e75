//! [`Directory`]: names as a process sees them, as they are on the disk, and the changes between the two.
//!
//! Invariant: `live` is `durable` with all of `pending` applied, in order.

use std::collections::BTreeMap;

/// What a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Target {
    File(u64),
    Directory,
}

pub(super) type Names = BTreeMap<String, Target>;

/// A change of a directory.
#[derive(Clone, Debug)]
pub(super) enum Change {
    /// A new name, or one that stands for something else now.
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
    /// Changes the directory for the processes of the machine.
    pub(super) fn change(&mut self, change: Change) {
        apply(&mut self.live, &change);
        self.pending.push(change);
    }

    /// How many changes are not durable.
    pub(super) fn pending(&self) -> usize {
        self.pending.len()
    }

    /// Makes the oldest changes durable.
    pub(super) fn keep(&mut self, changes: usize) {
        for change in self.pending.drain(..changes) {
            apply(&mut self.durable, &change);
        }
    }

    /// The power is gone, with all that is not durable.
    pub(super) fn lose_pending(&mut self) {
        self.pending.clear();
        self.live = self.durable.clone();
    }

    /// All files that a name stands for, or may stand for after a crash. Some come twice.
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
