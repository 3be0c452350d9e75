//! [`MiniatureCache`]: a cache of sampled ids that follows one [`Rule`].

use hashbrown::HashMap;
use moontide_types::ObjectId;

use super::ghosts::Ghosts;
use super::{OLDEST, Rule, UseNumber};

const NONE: u32 = u32::MAX;

/// Indices of the queues.
const ONCE: usize = 0;
const AGAIN: usize = 1;

#[derive(Debug)]
pub(super) struct MiniatureCache {
    rule: Rule,
    capacity: u64,
    last_use: UseNumber,
    indices: HashMap<ObjectId, u32>,
    entries: Vec<Entry>,
    /// Indices of unused entries.
    vacant: Vec<u32>,
    queues: [Ends; 2],
    ghosts: Ghosts,
}

#[derive(Clone, Copy, Debug)]
struct Entry {
    id: ObjectId,
    used: UseNumber,
    older: u32,
    newer: u32,
    queue: usize,
}

/// Ends of a queue in order of the last use.
#[derive(Clone, Copy, Debug)]
struct Ends {
    oldest: u32,
    newest: u32,
}

impl MiniatureCache {
    /// Creates a cache without a limit.
    pub(super) fn new(rule: Rule) -> MiniatureCache {
        MiniatureCache {
            rule,
            capacity: u64::MAX,
            last_use: 0,
            indices: HashMap::new(),
            entries: vec![],
            vacant: vec![],
            queues: [Ends { oldest: NONE, newest: NONE }; 2],
            ghosts: Ghosts::default(),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.indices.len()
    }

    pub(super) fn capacity(&self) -> u64 {
        self.capacity
    }

    pub(super) fn resize(&mut self, capacity: u64) {
        self.capacity = capacity;
        self.ghosts.resize(capacity);
        while self.len() as u64 > capacity {
            self.evict();
        }
    }

    /// Removes the ids that are no longer sampled.
    pub(super) fn keep_only(&mut self, is_sampled: impl Fn(ObjectId) -> bool) {
        let dropped: Vec<ObjectId> = self.indices.keys().copied().filter(|&id| !is_sampled(id)).collect();
        for id in dropped {
            self.remove(id);
        }
    }

    /// Uses an object, which is stored if it is missing. Returns whether it was stored.
    pub(super) fn access(&mut self, id: ObjectId) -> bool {
        self.last_use += 1;
        if self.remove(id) {
            self.push(AGAIN, id);
            return true;
        }
        let reach = self.rule.ghost_reach.saturating_mul(self.capacity);
        let was_used = self.ghosts.take(id).is_some_and(|evictions| evictions <= reach);
        if self.len() as u64 >= self.capacity {
            self.evict();
        }
        let queue = if was_used { AGAIN } else { ONCE };
        if self.rule.keeps_old {
            self.push_oldest(queue, id)
        } else {
            self.push(queue, id)
        }
        false
    }

    fn evict(&mut self) {
        let age = |queue: usize| {
            let entry = self.entries.get(self.queues[queue].oldest as usize)?;
            Some(if entry.used == 0 { OLDEST } else { self.last_use - entry.used })
        };
        let queue = match (age(ONCE), age(AGAIN)) {
            (Some(once), Some(again)) if self.rule.evicts_once(once, again) => ONCE,
            (_, Some(_)) => AGAIN,
            (Some(_), None) => ONCE,
            (None, None) => return,
        };
        let victim = self.entries[self.queues[queue].oldest as usize].id;
        self.remove(victim);
        self.ghosts.insert(victim);
    }

    fn push(&mut self, queue: usize, id: ObjectId) {
        let older = self.queues[queue].newest;
        let index = self.add(Entry { id, used: self.last_use, older, newer: NONE, queue });
        match self.entries.get_mut(older as usize) {
            Some(older) => older.newer = index,
            None => self.queues[queue].oldest = index,
        }
        self.queues[queue].newest = index;
    }

    fn push_oldest(&mut self, queue: usize, id: ObjectId) {
        let newer = self.queues[queue].oldest;
        let index = self.add(Entry { id, used: 0, older: NONE, newer, queue });
        match self.entries.get_mut(newer as usize) {
            Some(newer) => newer.older = index,
            None => self.queues[queue].newest = index,
        }
        self.queues[queue].oldest = index;
    }

    fn add(&mut self, entry: Entry) -> u32 {
        let index = self.vacant.pop().unwrap_or_else(|| {
            self.entries.push(entry);
            self.entries.len() as u32 - 1
        });
        self.entries[index as usize] = entry;
        self.indices.insert(entry.id, index);
        index
    }

    /// Returns whether the object was stored.
    fn remove(&mut self, id: ObjectId) -> bool {
        let Some(index) = self.indices.remove(&id) else { return false };
        let Entry { older, newer, queue, .. } = self.entries[index as usize];
        match self.entries.get_mut(older as usize) {
            Some(older) => older.newer = newer,
            None => self.queues[queue].oldest = newer,
        }
        match self.entries.get_mut(newer as usize) {
            Some(newer) => newer.older = older,
            None => self.queues[queue].newest = older,
        }
        self.vacant.push(index);
        true
    }
}
