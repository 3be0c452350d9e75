//! Published policies in their plain form, for comparison, and Belady's algorithm.
//!
//! The blocks of a request are used from the last one to the first: a block is worth nothing without its predecessors. This
//! favours every policy below.

use std::collections::{BTreeSet, VecDeque};

use super::list::Lists;
use super::{Cache, NumberedRequest, NumberedTrace, Tier, TierCounts};
use crate::results::BenchError;

/// Implements [`Cache`] for policies that see one block after the other.
macro_rules! block_caches {
    ($($cache:ty),*) => {
        $(impl Cache for $cache {
            fn tier(&mut self, block: u32) -> Option<Tier> {
                self.is_stored(block).then_some(Tier::Memory)
            }

            fn request(&mut self, _: usize, request: &NumberedRequest, _: usize) -> Result<(), BenchError> {
                request.blocks.iter().rev().for_each(|&block| self.access(block));
                Ok(())
            }
        })*
    };
}

block_caches!(Lru, S3Fifo, Arc, WTinyLfu);

/// Least recently used.
pub(super) struct Lru {
    lists: Lists,
    capacity: usize,
}

impl Lru {
    pub(super) fn new(blocks: usize, capacity: usize) -> Lru {
        Lru { lists: Lists::new(blocks, 1), capacity }
    }

    fn is_stored(&self, block: u32) -> bool {
        self.lists.list(block).is_some()
    }

    fn access(&mut self, block: u32) {
        self.lists.push(0, block);
        if self.lists.len(0) > self.capacity {
            let oldest = self.lists.first(0).expect("the list is not empty");
            self.lists.remove(oldest);
        }
    }
}

/// Least recently used, in memory and on a disk. Inclusive: a block that is read from the disk is promoted, and stays on the
/// disk. A block that is evicted from memory is written to the disk, unless it is there.
pub(super) struct InclusiveLru {
    memory: Lists,
    disk: Lists,
    capacity: usize,
    disk_capacity: usize,
    counts: TierCounts,
}

impl InclusiveLru {
    pub(super) fn new(blocks: usize, capacity: usize, disk_capacity: usize) -> InclusiveLru {
        let lists = || Lists::new(blocks, 1);
        InclusiveLru {
            memory: lists(),
            disk: lists(),
            capacity,
            disk_capacity,
            counts: TierCounts::default(),
        }
    }

    fn access(&mut self, block: u32) {
        let (was_in_memory, was_on_disk) =
            (self.memory.list(block).is_some(), self.disk.list(block).is_some());
        if was_on_disk {
            self.disk.push(0, block);
            self.counts.promoted += u64::from(!was_in_memory);
        }
        self.memory.push(0, block);
        if self.memory.len(0) <= self.capacity {
            return;
        }
        let victim = self.memory.first(0).expect("the list is not empty");
        self.memory.remove(victim);
        if self.disk.list(victim).is_none() {
            self.counts.written += 1;
            self.disk.push(0, victim);
        }
        if self.disk.len(0) > self.disk_capacity {
            let oldest = self.disk.first(0).expect("the list is not empty");
            self.disk.remove(oldest);
        }
    }
}

impl Cache for InclusiveLru {
    fn tier(&mut self, block: u32) -> Option<Tier> {
        match self.memory.list(block) {
            Some(_) => Some(Tier::Memory),
            None => self.disk.list(block).map(|_| Tier::Disk),
        }
    }

    fn request(&mut self, _: usize, request: &NumberedRequest, _: usize) -> Result<(), BenchError> {
        request.blocks.iter().rev().for_each(|&block| self.access(block));
        Ok(())
    }

    fn counts(&self) -> TierCounts {
        self.counts
    }
}

/// S3-FIFO: a small queue for new blocks, a main queue, and ghosts of the small one.
pub(super) struct S3Fifo {
    lists: Lists,
    uses: Vec<u8>,
    capacity: usize,
}

impl S3Fifo {
    const SMALL: usize = 0;
    const MAIN: usize = 1;
    const GHOST: usize = 2;

    pub(super) fn new(blocks: usize, capacity: usize) -> S3Fifo {
        S3Fifo { lists: Lists::new(blocks, 3), uses: vec![0; blocks], capacity }
    }

    fn is_stored(&self, block: u32) -> bool {
        matches!(self.lists.list(block), Some(S3Fifo::SMALL | S3Fifo::MAIN))
    }

    fn access(&mut self, block: u32) {
        if self.is_stored(block) {
            self.uses[block as usize] = (self.uses[block as usize] + 1).min(3);
            return;
        }
        let to = if self.lists.list(block).is_some() { S3Fifo::MAIN } else { S3Fifo::SMALL };
        while self.lists.len(S3Fifo::SMALL) + self.lists.len(S3Fifo::MAIN) >= self.capacity {
            self.evict();
        }
        self.uses[block as usize] = 0;
        self.lists.push(to, block);
    }

    fn evict(&mut self) {
        let small_target = (self.capacity / 10).max(1);
        if self.lists.len(S3Fifo::SMALL) >= small_target || self.lists.len(S3Fifo::MAIN) == 0 {
            let Some(block) = self.lists.first(S3Fifo::SMALL) else { return };
            if self.uses[block as usize] > 1 {
                self.lists.push(S3Fifo::MAIN, block);
                return;
            }
            self.lists.push(S3Fifo::GHOST, block);
            if self.lists.len(S3Fifo::GHOST) > self.capacity {
                let oldest = self.lists.first(S3Fifo::GHOST).expect("the list is not empty");
                self.lists.remove(oldest);
            }
            return;
        }
        let block = self.lists.first(S3Fifo::MAIN).expect("the main queue is not empty");
        if self.uses[block as usize] > 0 {
            self.uses[block as usize] -= 1;
            self.lists.push(S3Fifo::MAIN, block);
        } else {
            self.lists.remove(block);
        }
    }
}

/// ARC: two lists by recency, used once and used more often, each with ghosts, and a target that adapts.
pub(super) struct Arc {
    lists: Lists,
    capacity: usize,
    /// Target length of [`Arc::ONCE`].
    target: f64,
}

impl Arc {
    const ONCE: usize = 0;
    const OFTEN: usize = 1;
    const ONCE_GHOST: usize = 2;
    const OFTEN_GHOST: usize = 3;

    pub(super) fn new(blocks: usize, capacity: usize) -> Arc {
        Arc { lists: Lists::new(blocks, 4), capacity, target: 0.0 }
    }

    fn is_stored(&self, block: u32) -> bool {
        matches!(self.lists.list(block), Some(Arc::ONCE | Arc::OFTEN))
    }

    fn access(&mut self, block: u32) {
        let len = |list| self.lists.len(list) as f64;
        match self.lists.list(block) {
            Some(Arc::ONCE | Arc::OFTEN) => self.lists.push(Arc::OFTEN, block),
            Some(list @ (Arc::ONCE_GHOST | Arc::OFTEN_GHOST)) => {
                let was_once = list == Arc::ONCE_GHOST;
                let ratio = len(Arc::OFTEN_GHOST) / len(Arc::ONCE_GHOST).max(1.0);
                let step = if was_once { ratio.max(1.0) } else { -(1.0 / ratio.max(1e-9)).max(1.0) };
                self.target = (self.target + step).clamp(0.0, self.capacity as f64);
                self.replace(!was_once);
                self.lists.push(Arc::OFTEN, block);
            }
            _ => {
                let once = self.lists.len(Arc::ONCE) + self.lists.len(Arc::ONCE_GHOST);
                let all: usize = (0..4).map(|list| self.lists.len(list)).sum();
                if once >= self.capacity {
                    if self.lists.len(Arc::ONCE) < self.capacity {
                        self.remove_first(Arc::ONCE_GHOST);
                        self.replace(false);
                    } else {
                        self.remove_first(Arc::ONCE);
                    }
                } else if all >= self.capacity {
                    if all >= 2 * self.capacity {
                        self.remove_first(Arc::OFTEN_GHOST);
                    }
                    self.replace(false);
                }
                self.lists.push(Arc::ONCE, block);
            }
        }
    }

    fn remove_first(&mut self, list: usize) {
        if let Some(block) = self.lists.first(list) {
            self.lists.remove(block);
        }
    }

    /// Evicts a block, if the cache is full.
    fn replace(&mut self, was_often_ghost: bool) {
        let once = self.lists.len(Arc::ONCE);
        if once + self.lists.len(Arc::OFTEN) < self.capacity {
            return;
        }
        let is_over = once as f64 > self.target || (was_often_ghost && once as f64 >= self.target);
        let (from, to) = if once > 0 && (is_over || self.lists.len(Arc::OFTEN) == 0) {
            (Arc::ONCE, Arc::ONCE_GHOST)
        } else {
            (Arc::OFTEN, Arc::OFTEN_GHOST)
        };
        if let Some(block) = self.lists.first(from) {
            self.lists.push(to, block);
        }
    }
}

/// W-TinyLFU: a window of 1 %, admission by frequency, a main part of two LRU segments. The frequencies are exact, and halved
/// as often as those of a sketch.
pub(super) struct WTinyLfu {
    lists: Lists,
    uses: Vec<u8>,
    counted: usize,
    capacity: usize,
}

impl WTinyLfu {
    const WINDOW: usize = 0;
    const PROBATION: usize = 1;
    const PROTECTED: usize = 2;

    pub(super) fn new(blocks: usize, capacity: usize) -> WTinyLfu {
        WTinyLfu { lists: Lists::new(blocks, 3), uses: vec![0; blocks], counted: 0, capacity }
    }

    fn is_stored(&self, block: u32) -> bool {
        self.lists.list(block).is_some()
    }

    fn access(&mut self, block: u32) {
        let window = (self.capacity / 100).max(1);
        let main = self.capacity - window;
        self.uses[block as usize] = (self.uses[block as usize] + 1).min(15);
        self.counted += 1;
        if self.counted >= 10 * self.capacity {
            self.counted = 0;
            self.uses.iter_mut().for_each(|uses| *uses /= 2);
        }
        match self.lists.list(block) {
            Some(WTinyLfu::PROBATION | WTinyLfu::PROTECTED) => {
                self.lists.push(WTinyLfu::PROTECTED, block);
                if self.lists.len(WTinyLfu::PROTECTED) > main * 4 / 5 {
                    let oldest = self.lists.first(WTinyLfu::PROTECTED).expect("the list is not empty");
                    self.lists.push(WTinyLfu::PROBATION, oldest);
                }
            }
            _ => self.lists.push(WTinyLfu::WINDOW, block),
        }
        if self.lists.len(WTinyLfu::WINDOW) <= window {
            return;
        }
        let candidate = self.lists.first(WTinyLfu::WINDOW).expect("the list is not empty");
        self.lists.push(WTinyLfu::PROBATION, candidate);
        if self.lists.len(WTinyLfu::PROBATION) + self.lists.len(WTinyLfu::PROTECTED) > main {
            let victim = self.lists.first(WTinyLfu::PROBATION).expect("the candidate is there");
            let is_admitted = self.uses[candidate as usize] > self.uses[victim as usize];
            self.lists.remove(if is_admitted { victim } else { candidate });
        }
    }
}

/// Belady's algorithm: evicts the block whose next use is latest; of those with the same next use the deepest.
pub(super) struct Belady {
    /// Stored blocks: (request of the next use, position, block).
    stored: BTreeSet<(u32, u32, u32)>,
    /// Key of each stored block.
    keys: Vec<Option<(u32, u32)>>,
    /// Requests that use each block, in order, from the next one on.
    uses: Vec<VecDeque<u32>>,
    capacity: usize,
}

impl Belady {
    pub(super) fn new(trace: &NumberedTrace, capacity: usize) -> Belady {
        let mut uses = vec![VecDeque::new(); trace.distinct];
        for (index, request) in (0..).zip(&trace.requests) {
            for &block in &request.blocks {
                if uses[block as usize].back() != Some(&index) {
                    uses[block as usize].push_back(index);
                }
            }
        }
        Belady { stored: BTreeSet::new(), keys: vec![None; trace.distinct], uses, capacity }
    }
}

impl Cache for Belady {
    fn tier(&mut self, block: u32) -> Option<Tier> {
        self.keys[block as usize].is_some().then_some(Tier::Memory)
    }

    fn request(&mut self, index: usize, request: &NumberedRequest, _: usize) -> Result<(), BenchError> {
        for (position, &block) in (0..).zip(&request.blocks) {
            let uses = &mut self.uses[block as usize];
            while uses.front().is_some_and(|&next| next as usize <= index) {
                uses.pop_front();
            }
            let next = uses.front().copied().unwrap_or(u32::MAX);
            if let Some((next, position)) = self.keys[block as usize].replace((next, position)) {
                self.stored.remove(&(next, position, block));
            }
            self.stored.insert((next, position, block));
        }
        while self.stored.len() > self.capacity {
            let (_, _, victim) = self.stored.pop_last().expect("more than the capacity");
            self.keys[victim as usize] = None;
        }
        Ok(())
    }
}
