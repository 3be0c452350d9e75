//! [`EvictionOrder`]: which object is evicted first, learned from the traffic.
//!
//! Objects in memory are in two queues, each in order of the last use: those that were used once, by their put, and those that
//! were used again. An object that was evicted and is put again was used again. A [`Rule`] decides which queue the next victim
//! comes from. One rule is LRU; others evict objects that were used once earlier, or keep old objects. No rule is good for all
//! traffic. So miniature caches ([`MiniatureCache`]) try all of them on a sample of the ids, and the rule with the most hits is
//! used. The two queues are the same for all rules: a change of the rule moves no object.
//!
//! Miniature caches are from Waldspurger et al., "Cache Modeling and Optimization using Miniature Simulations" (ATC 2017).

mod ghosts;
mod miniature;

use hashbrown::HashMap;
use moontide_types::{GroupId, ObjectId};

use ghosts::Ghosts;
use miniature::MiniatureCache;

/// How the next victim is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rule {
    /// The age of objects that were used once counts this many times. With 1 the rule is LRU.
    once_weight: u64,
    /// An evicted object is forgotten after this many evictions, in multiples of the objects in memory.
    ghost_reach: u64,
    /// New objects are the first to be evicted. This keeps a part of a loop that does not fit into memory.
    keeps_old: bool,
}

/// Age of an object that is evicted before all others.
const OLDEST: u64 = u64::MAX;

/// More rules gave no more hits on recorded traces.
const RULES: [Rule; 6] = [
    Rule { once_weight: 1, ghost_reach: 1, keeps_old: false },
    Rule { once_weight: 2, ghost_reach: 1, keeps_old: false },
    Rule { once_weight: 8, ghost_reach: 1, keeps_old: false },
    Rule { once_weight: OLDEST, ghost_reach: 1, keeps_old: false },
    Rule { once_weight: OLDEST, ghost_reach: GHOST_REACH_MAX, keeps_old: false },
    Rule { once_weight: OLDEST, ghost_reach: GHOST_REACH_MAX, keeps_old: true },
];

const GHOST_REACH_MAX: u64 = 3;

impl Rule {
    /// Whether the oldest object that was used once is evicted before the oldest that was used again, given their ages in uses.
    fn evicts_once(&self, once_age: u64, again_age: u64) -> bool {
        once_age.saturating_mul(self.once_weight) >= again_age
    }
}

/// Objects of a miniature cache, at most. All caches together take about 2 MiB per master. With 1,024, a loop that barely fits
/// into memory was misjudged.
const SAMPLED_MAX: u64 = 4096;

/// Sampled uses between two choices of a rule.
const CHOICE_INTERVAL: u32 = 64;

/// A rule replaces another if it has this share more hits: the hits of a sample are not exact.
const ADVANTAGE: f64 = 0.02;

/// Sampled uses after which a hit counts half, in multiples of the objects of a miniature cache.
const HALF_LIFE: f64 = 16.0;

/// Position of a use among all uses of a group: later ones are larger. 0: the object is evicted before all others.
pub(crate) type UseNumber = u64;

/// Sampled uses that a group keeps for the trials, at most; others are not tried.
const PENDING_MAX: usize = 4096;

/// Decides which object of a group is evicted first.
#[derive(Debug, Default)]
pub(crate) struct EvictionOrder {
    /// Number of the last use.
    last_use: UseNumber,
    /// Index of the rule in use.
    rule: usize,
    ghosts: Ghosts,
    /// Whether the group has evicted.
    is_full: bool,
    /// One of `1 << shift` ids is sampled.
    shift: u32,
    /// Sampled uses that the trials have not seen.
    pending: Vec<ObjectId>,
}

impl EvictionOrder {
    /// Returns the number of a use that happens now.
    pub(crate) fn next_use(&mut self) -> UseNumber {
        self.last_use += 1;
        self.last_use
    }

    /// Handles the use of an object in memory or on a disk.
    pub(crate) fn used(&mut self, id: ObjectId) {
        if is_sampled(id, self.shift) && self.pending.len() < PENDING_MAX {
            self.pending.push(id);
        }
    }

    /// Handles a completed put. Returns whether the object was used before, as far as is known.
    pub(crate) fn stored(&mut self, id: ObjectId) -> bool {
        self.used(id);
        let reach = self.rule().ghost_reach.saturating_mul(self.ghosts.objects());
        self.ghosts.take(id).is_some_and(|evictions| evictions <= reach)
    }

    /// Whether new objects are evicted first.
    pub(crate) fn keeps_old(&self) -> bool {
        self.rule().keeps_old
    }

    /// Handles the eviction of an object of which nothing remains.
    pub(crate) fn evicted(&mut self, id: ObjectId) {
        self.ghosts.insert(id);
    }

    /// Frees memory that is not needed for this many objects.
    pub(crate) fn release_unused(&mut self, objects: u64) {
        self.ghosts.release_unused(objects);
    }

    /// Follows a rule from now on, until the next exchange with trials.
    #[cfg(any(test, feature = "testing"))]
    pub(crate) fn set_rule(&mut self, number: u64) {
        self.rule = (number % RULES.len() as u64) as usize;
    }

    /// Handles an eviction: memory is full with this many objects.
    pub(crate) fn memory_is_full(&mut self, objects: u64) {
        self.ghosts.resize(objects);
        self.is_full = true;
    }

    /// Whether the oldest object that was used once is evicted before the oldest that was used again.
    pub(crate) fn evicts_once(&self, once: UseNumber, again: UseNumber) -> bool {
        let age = |number: UseNumber| if number == 0 { OLDEST } else { self.last_use - number };
        self.rule().evicts_once(age(once), age(again))
    }

    fn rule(&self) -> &'static Rule {
        &RULES[self.rule]
    }
}

/// Chooses the rule of all groups of a master. The blocks of a prompt are in different groups, and are worth nothing if one of
/// them is missing: groups with different rules would evict different blocks of the same prompt.
#[derive(Debug)]
pub struct EvictionTrials {
    /// Index of the chosen rule.
    rule: usize,
    /// One of `1 << shift` ids is sampled.
    shift: u32,
    /// A cache for each rule.
    caches: [MiniatureCache; RULES.len()],
    /// Hits of each cache, earlier ones with less weight.
    hits: [f64; RULES.len()],
    /// Weight of a hit after one more sampled use.
    decay: f64,
    until_choice: u32,
    /// Objects in memory, by group, and their sum.
    objects: HashMap<GroupId, u64>,
    objects_sum: u64,
    /// Whether a group has evicted: until then, the caches have no limit.
    is_full: bool,
}

impl Default for EvictionTrials {
    fn default() -> EvictionTrials {
        EvictionTrials {
            rule: 0,
            shift: 0,
            caches: RULES.map(MiniatureCache::new),
            hits: [0.0; RULES.len()],
            decay: 1.0,
            until_choice: CHOICE_INTERVAL,
            objects: HashMap::new(),
            objects_sum: 0,
            is_full: false,
        }
    }
}

impl EvictionTrials {
    /// Tries the uses that a group has sampled, and tells it the rule.
    pub(crate) fn exchange(&mut self, group: GroupId, objects: u64, order: &mut EvictionOrder) {
        self.objects_sum += objects;
        self.objects_sum -= self.objects.insert(group, objects).unwrap_or(0);
        if order.is_full && !self.is_full {
            self.is_full = true;
            // Until now all rules had the same hits.
            self.hits = [0.0; RULES.len()];
        }
        if self.is_full {
            self.resize(self.objects_sum);
        }
        for id in order.pending.drain(..) {
            self.access(id);
        }
        (order.rule, order.shift) = (self.rule, self.shift);
    }

    /// Forgets the objects of a group that another master hosts.
    pub fn release(&mut self, group: GroupId) {
        self.objects_sum -= self.objects.remove(&group).unwrap_or(0);
    }

    /// Uses an object in each cache, and chooses a rule from time to time.
    fn access(&mut self, id: ObjectId) {
        if !is_sampled(id, self.shift) {
            return;
        }
        for (cache, hits) in self.caches.iter_mut().zip(&mut self.hits) {
            *hits = *hits * self.decay + f64::from(u8::from(cache.access(id)));
        }
        while self.caches.iter().any(|cache| cache.len() > SAMPLED_MAX as usize) {
            self.sample_less();
        }
        self.until_choice -= 1;
        if self.until_choice == 0 {
            self.until_choice = CHOICE_INTERVAL;
            let best = (1..RULES.len())
                .fold(0, |best, rule| if self.hits[rule] > self.hits[best] { rule } else { best });
            if self.hits[best] > self.hits[self.rule] * (1.0 + ADVANTAGE) {
                self.rule = best;
            }
        }
    }

    /// Sets the number of objects that fit into memory.
    fn resize(&mut self, objects: u64) {
        while self.shift > 0 && objects >> self.shift < SAMPLED_MAX / 4 {
            self.shift -= 1;
        }
        while objects >> self.shift > SAMPLED_MAX {
            self.sample_less();
        }
        let capacity = (objects >> self.shift).max(1);
        if self.caches[0].capacity() == capacity {
            return;
        }
        self.caches.iter_mut().for_each(|cache| cache.resize(capacity));
        self.decay = 0.5f64.powf(1.0 / (HALF_LIFE * capacity as f64));
    }

    fn sample_less(&mut self) {
        self.shift += 1;
        let shift = self.shift;
        self.caches.iter_mut().for_each(|cache| cache.keep_only(|id| is_sampled(id, shift)));
    }
}

/// An id is a keyed hash. Its first bytes choose the group; these bits are independent of them.
fn is_sampled(id: ObjectId, shift: u32) -> bool {
    hash(id).trailing_zeros() >= shift
}

fn hash(id: ObjectId) -> u64 {
    u64::from_le_bytes(id.0[8..].try_into().expect("the last eight bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u64) -> ObjectId {
        let mut generator = moontide_rt::SplitMix64::new(number);
        let words = [generator.next_u64(), generator.next_u64()];
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&words[0].to_le_bytes());
        bytes[8..].copy_from_slice(&words[1].to_le_bytes());
        ObjectId(bytes)
    }

    /// A cache of objects with the real order and plain lists.
    struct Cache {
        order: EvictionOrder,
        trials: EvictionTrials,
        /// (use, object): once, again.
        queues: [std::collections::BTreeMap<UseNumber, u64>; 2],
        places: std::collections::HashMap<u64, (usize, UseNumber)>,
        capacity: usize,
    }

    impl Cache {
        fn new(capacity: usize) -> Cache {
            Cache {
                order: EvictionOrder::default(),
                trials: EvictionTrials::default(),
                queues: Default::default(),
                places: Default::default(),
                capacity,
            }
        }

        fn access(&mut self, object: u64) -> bool {
            self.trials.exchange(GroupId(0), self.places.len() as u64, &mut self.order);
            if let Some((queue, number)) = self.places.remove(&object) {
                self.queues[queue].remove(&number);
                self.order.used(id(object));
                self.push(1, object);
                return true;
            }
            if self.places.len() == self.capacity {
                self.order.memory_is_full(self.places.len() as u64);
                let [once, again] =
                    [0, 1].map(|queue| self.queues[queue].first_key_value().map(|(&number, _)| number));
                let queue = match (once, again) {
                    (Some(once), Some(again)) => usize::from(!self.order.evicts_once(once, again)),
                    (once, _) => usize::from(once.is_none()),
                };
                let (_, victim) = self.queues[queue].pop_first().unwrap();
                self.places.remove(&victim);
                self.order.evicted(id(victim));
            }
            let again = self.order.stored(id(object));
            self.push(usize::from(again), object);
            false
        }

        fn push(&mut self, queue: usize, object: u64) {
            let number = self.order.next_use();
            self.queues[queue].insert(number, object);
            self.places.insert(object, (queue, number));
        }
    }

    #[test]
    fn order_is_lru_without_evictions_of_used_objects() {
        let mut cache = Cache::new(8);
        for object in 0..1000 {
            cache.access(object);
        }
        assert_eq!(cache.trials.rule, 0);
        let kept: Vec<u64> = cache.queues[0].values().copied().collect();
        assert_eq!(kept, (992..1000).collect::<Vec<_>>());
    }

    #[test]
    fn scan_does_not_evict_objects_in_use() {
        let (mut cache, mut hits, mut uses) = (Cache::new(100), 0, 0);
        let mut scanned = 1_000_000;
        // 80 objects in use; between two uses of the same one, 320 others are read once.
        for round in 0..200 {
            for object in 0..80 {
                let hit = cache.access(object);
                (hits, uses) = if round >= 100 { (hits + u32::from(hit), uses + 1) } else { (hits, uses) };
                for _ in 0..4 {
                    scanned += 1;
                    cache.access(scanned);
                }
            }
        }
        assert!(hits * 10 > uses * 9, "{hits} of {uses}");
        assert!(cache.order.rule().once_weight > 1);
    }

    #[test]
    fn groups_of_master_follow_one_rule() {
        let mut trials = EvictionTrials::default();
        let mut orders: [EvictionOrder; 2] = Default::default();
        orders.iter_mut().for_each(|order| order.memory_is_full(500));
        // A loop that is larger than memory.
        for object in (0..40).flat_map(|_| 0..1200) {
            let group = usize::try_from(object).unwrap() % 2;
            orders[group].used(id(object));
            trials.exchange(GroupId(group as u16), 500, &mut orders[group]);
        }
        assert_eq!(trials.objects_sum, 1000);
        assert!(orders.iter().all(EvictionOrder::keeps_old), "{:?}", RULES[trials.rule]);
        trials.release(GroupId(1));
        assert_eq!(trials.objects_sum, 500);
    }

    #[test]
    fn sample_is_bounded() {
        let mut trials = EvictionTrials::default();
        (0..100_000).for_each(|object| trials.access(id(object)));
        trials.resize(90_000);
        assert!(trials.caches.iter().all(|cache| cache.len() <= SAMPLED_MAX as usize));
        let shift = trials.shift;
        assert!((90_000 >> shift) <= SAMPLED_MAX);
        trials.resize(1000);
        assert!(trials.shift < shift);
        let mut order = EvictionOrder::default();
        (0..100_000).for_each(|object| order.used(id(object)));
        assert_eq!(order.pending.len(), PENDING_MAX);
    }
}
