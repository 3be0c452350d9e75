//! Invalidations: objects that have left the index, for watchers that keep copies or locations of them.
//!
//! [`Group::remove_record`] is the only function that removes an object from the index. It writes here, as does the loss of a
//! stripe ([`missing_stripes`](super::missing_stripes)), after which readers do not find an object. A replaced object has not left, unless the newer version is never completed. An object that moves between
//! memory, disks and replicas stays in the index and causes no invalidation.
//!
//! A watcher belongs to a tenant, and learns nothing of the others: the invalidations of each tenant are numbered for themselves. The
//! last [`INVALIDATIONS_KEPT`] of all tenants are kept. A watcher sends the number that it expects next. If that one is no longer
//! kept, or there were no watchers at its time, the response is a gap, and the watcher has to re-check its objects. Invalidations of
//! other tenants cause a gap only for a watcher that has not polled since one of its own. Nothing is kept before the first request;
//! until then a removal costs a branch.
//!
//! Numbers count within a term: the next master of the group starts again at 1, and knows at first only the objects
//! that nodes have reported. It returns nothing, not even a gap, before these nodes have reported or
//! `report_wait` is over: a watcher that re-checked earlier would consider an object gone that has not been reported
//! yet.

use std::collections::VecDeque;

use hashbrown::{HashMap, HashSet};
use moontide_types::{ObjectId, Tenant};

use super::Group;
use crate::ids::TenantIndex;
use crate::segment::{Segment, SegmentPhase};
use crate::tenant::TENANTS_MAX;
use crate::time::Now;

/// Number of invalidations kept, of all tenants: 1 MiB of ids. At 10,000 evictions per second, which is more than the turnover of a
/// node's memory, a watcher may be absent for six seconds. A watcher that polls is never more than one response behind.
pub const INVALIDATIONS_KEPT: usize = 65_536;

/// Response to a watcher.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Invalidations {
    /// Objects of the tenant that have left, in order. They may include objects that have been put again since.
    pub ids: Vec<ObjectId>,
    /// Number to request next.
    pub next: u64,
    /// Earlier invalidations were not kept; they are in no list.
    pub gap: bool,
}

/// Invalidations kept for watchers, created by the first request.
#[derive(Debug)]
pub(super) struct InvalidationFeed {
    /// By name: the group may give the index of a tenant without objects to another one.
    by_name: HashMap<Box<str>, u32>,
    tenants: Vec<TenantFeed>,
    /// Tenants of the kept invalidations, oldest first.
    order: VecDeque<u32>,
    /// Number of the first invalidation of a tenant that has had none.
    first: u64,
    /// 1 and the number of invalidations of all tenants.
    count: u64,
    /// Reservations that replaced a complete version: if one ends without completion, that version has left.
    replacing: HashSet<ObjectId>,
    /// The nodes have reported, or `report_wait` is over.
    is_open: bool,
}

/// Kept invalidations of one tenant.
#[derive(Debug)]
struct TenantFeed {
    kept: VecDeque<ObjectId>,
    /// Number of the next invalidation.
    next: u64,
}

impl TenantFeed {
    fn drop_oldest(&mut self) {
        self.kept.pop_front();
        // Otherwise every tenant would hold the memory of its longest list.
        if self.kept.capacity() > 4 * self.kept.len() {
            self.kept.shrink_to(2 * self.kept.len());
        }
    }
}

impl InvalidationFeed {
    fn new() -> InvalidationFeed {
        InvalidationFeed {
            by_name: HashMap::new(),
            tenants: vec![],
            order: VecDeque::with_capacity(INVALIDATIONS_KEPT),
            first: 1,
            count: 1,
            replacing: HashSet::new(),
            is_open: false,
        }
    }

    fn add(&mut self, tenant: &str, id: ObjectId) {
        let number = self.tenant(tenant);
        if self.order.len() == INVALIDATIONS_KEPT
            && let Some(oldest) = self.order.pop_front()
        {
            self.tenants[oldest as usize].drop_oldest();
        }
        self.order.push_back(number);
        let feed = &mut self.tenants[number as usize];
        feed.kept.push_back(id);
        feed.next += 1;
        self.count += 1;
    }

    /// Returns the number of a tenant. There is a limit, since tenants come and go: beyond it, all are forgotten.
    fn tenant(&mut self, name: &str) -> u32 {
        if let Some(&number) = self.by_name.get(name) {
            return number;
        }
        if self.tenants.len() == TENANTS_MAX {
            // No tenant has a greater number. So a watcher gets a gap, unless it has received all there was.
            self.first = self.tenants.iter().map(|feed| feed.next).fold(self.first, u64::max);
            self.by_name.clear();
            self.tenants.clear();
            self.order.clear();
        }
        let number = self.tenants.len() as u32; // ≤ TENANTS_MAX
        self.tenants.push(TenantFeed { kept: VecDeque::new(), next: self.first });
        self.by_name.insert(name.into(), number);
        number
    }

    fn since(&self, tenant: &str, since: u64, max: usize) -> Invalidations {
        let Some(&number) = self.by_name.get(tenant) else {
            return Invalidations { ids: vec![], next: self.first, gap: since != self.first };
        };
        let TenantFeed { kept, next } = &self.tenants[number as usize];
        let oldest = next - kept.len() as u64;
        if !(oldest..=*next).contains(&since) {
            return Invalidations { ids: vec![], next: *next, gap: true };
        }
        let skipped = (since - oldest) as usize; // ≤ INVALIDATIONS_KEPT
        let ids: Vec<ObjectId> = kept.iter().skip(skipped).take(max).copied().collect();
        let next = since + ids.len() as u64;
        Invalidations { ids, next, gap: false }
    }

    /// Removes the last entry if it is this object; returns whether it was. The entry was added in the same command, so
    /// no watcher can have read it.
    fn remove_last(&mut self, id: ObjectId) -> bool {
        let Some(&number) = self.order.back() else { return false };
        let feed = &mut self.tenants[number as usize];
        let is_last = feed.kept.back() == Some(&id);
        if is_last {
            feed.kept.pop_back();
            feed.next -= 1;
            self.order.pop_back();
            self.count -= 1;
        }
        is_last
    }
}

impl Group {
    /// Returns objects of a tenant that have left the index since its number `since`, at most `max` of them. A new watcher
    /// passes 0. Returns `None` while nodes have yet to report.
    pub fn invalidations(
        &mut self,
        now: Now,
        tenant: Tenant<'_>,
        since: u64,
        max: usize,
    ) -> Option<Invalidations> {
        if self.feed.is_none() {
            self.feed = Some(Box::new(InvalidationFeed::new()));
            self.open_feed(now);
        }
        let feed = self.feed.as_ref().filter(|feed| feed.is_open)?;
        Some(feed.since(tenant.as_str(), since, max))
    }

    /// Count of the invalidations of all tenants; 0 while the feed is closed. A changed count means new invalidations.
    pub fn open_invalidation_count(&self) -> u64 {
        self.feed.as_ref().filter(|feed| feed.is_open).map_or(0, |feed| feed.count)
    }

    /// Opens the feed if the nodes have reported.
    pub(super) fn open_feed(&mut self, now: Now) {
        if self.feed.as_ref().is_some_and(|feed| !feed.is_open) && self.may_open_feed(now) {
            // Entries so far are part of the gap that every watcher receives first.
            self.feed = Some(Box::new(InvalidationFeed { is_open: true, ..InvalidationFeed::new() }));
        }
    }

    /// The same, open or not; callers compare it to detect a new one.
    pub(super) fn invalidation_count(&self) -> u64 {
        self.feed.as_ref().map_or(0, |feed| feed.count)
    }

    /// Whether an object that is not in the index can be considered gone: nodes of the preceding term have reported, or
    /// `report_wait` is over. Objects from a handoff count as long as lookups return them.
    fn may_open_feed(&self, now: Now) -> bool {
        let reporting = |segment: &Segment| segment.phase == SegmentPhase::Reporting;
        let wait_over = now.mono > self.reports_until && !self.segments.iter().flatten().any(reporting);
        self.handoff.is_empty() && (wait_over || !self.awaits_reports(now))
    }

    /// Adds an invalidation for an object that leaves the index: a complete one, or a reservation that replaced one.
    pub(super) fn invalidate(&mut self, tenant: TenantIndex, id: ObjectId, complete: bool) {
        if let Some(feed) = &mut self.feed
            && (complete || feed.replacing.remove(&id))
        {
            feed.add(&self.tenants.get(tenant).name, id);
        }
    }

    /// Defers the invalidation just added: a reservation of the same id replaces the object. It is added again if the
    /// reservation ends without completion.
    pub(super) fn invalidate_unless_put(&mut self, id: ObjectId, mark: u64) {
        if let Some(feed) = &mut self.feed
            && feed.count != mark
            && feed.remove_last(id)
            && !moontide_rt::mutation_enabled("replaced-and-never-written")
        {
            feed.replacing.insert(id);
        }
    }

    /// Retracts the invalidation just added: another version of the object exists.
    pub(super) fn retract_invalidation(&mut self, id: ObjectId, mark: u64) {
        if let Some(feed) = &mut self.feed {
            feed.replacing.remove(&id);
            if feed.count != mark {
                feed.remove_last(id);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(number: u8) -> ObjectId {
        ObjectId([number; 16])
    }

    #[test]
    fn watchers_of_forgotten_tenants_get_gap_unless_they_have_all() {
        let mut feed = InvalidationFeed::new();
        assert_eq!(feed.since("a", 1, 9), Invalidations { ids: vec![], next: 1, gap: false });
        for _ in 0..3 {
            feed.add("a", id(1));
        }
        feed.add("b", id(2));
        for number in 2..TENANTS_MAX {
            feed.add(&format!("tenant-{number}"), id(3));
        }
        assert_eq!(feed.since("a", 1, 9).ids.len(), 3, "nothing is forgotten at the limit");
        feed.add("another", id(4));
        assert_eq!(feed.tenants.len(), 1);
        assert_eq!(feed.since("another", 4, 9), Invalidations { ids: vec![id(4)], next: 5, gap: false });
        for (tenant, since) in [("a", 1), ("a", 3), ("b", 1), ("b", 2), ("b", 5), ("c", 1)] {
            let response = feed.since(tenant, since, 9);
            assert_eq!(response, Invalidations { ids: vec![], next: 4, gap: true }, "{tenant} since {since}");
        }
        assert!(!feed.since("a", 4, 9).gap, "tenant has received all");
        feed.add("a", id(5));
        assert_eq!(feed.since("a", 4, 9), Invalidations { ids: vec![id(5)], next: 5, gap: false });
        assert!(feed.since("a", 3, 9).gap);
    }

    #[test]
    fn memory_of_dropped_invalidations_is_freed() {
        let mut feed = InvalidationFeed::new();
        for tenant in ["a", "b"] {
            for _ in 0..INVALIDATIONS_KEPT {
                feed.add(tenant, id(1));
            }
        }
        assert_eq!(feed.tenants[0].kept.capacity(), 0);
        assert_eq!((feed.tenants[1].kept.len(), feed.order.len()), (INVALIDATIONS_KEPT, INVALIDATIONS_KEPT));
    }
}
