//! Invalidations: objects that have left the index, for watchers that keep copies or locations of them.
//!
//! [`Group::remove_record`] is the only function that removes an object from the index. It writes here, as does the loss of a
//! stripe ([`missing_stripes`](super::missing_stripes)), after which readers do not find an object. A replaced object has not left, unless the newer version is never completed. An object that moves between
//! memory, disks and replicas stays in the index and causes no invalidation.
//!
//! The last [`INVALIDATIONS_KEPT`] are kept, numbered from 1 on. A watcher sends the number that it expects next. If
//! that one is no longer kept, or there were no watchers at its time, the response is a gap, and the watcher has to
//! re-check its objects. Nothing is kept before the first request; until then a removal costs a branch.
//!
//! Numbers count within a term: the next master of the group starts again at 1, and knows at first only the objects
//! that nodes have reported. It returns nothing, not even a gap, before these nodes have reported or
//! `report_wait` is over: a watcher that re-checked earlier would consider an object gone that has not been reported
//! yet.

use std::collections::VecDeque;

use hashbrown::HashSet;
use moontide_types::ObjectId;

use super::Group;
use crate::segment::{Segment, SegmentPhase};
use crate::time::Now;

/// Number of invalidations kept: 1 MiB of ids. At 10,000 evictions per second, which is more than the turnover of a
/// node's memory, a watcher may be absent for six seconds. A watcher that polls is never more than one response behind.
pub const INVALIDATIONS_KEPT: usize = 65_536;

/// Response to a watcher.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Invalidations {
    /// Objects that have left, in order. They may include objects that have been put again since.
    pub ids: Vec<ObjectId>,
    /// Number to request next.
    pub next: u64,
    /// Earlier invalidations were not kept; they are in no list.
    pub gap: bool,
}

/// Invalidations kept for watchers, created by the first request.
#[derive(Debug)]
pub(super) struct InvalidationFeed {
    kept: VecDeque<ObjectId>,
    /// Number of the next invalidation.
    next: u64,
    /// Reservations that replaced a complete version: if one ends without completion, that version has left.
    replacing: HashSet<ObjectId>,
    /// The nodes have reported, or `report_wait` is over.
    is_open: bool,
}

impl InvalidationFeed {
    fn new() -> InvalidationFeed {
        InvalidationFeed {
            kept: VecDeque::with_capacity(INVALIDATIONS_KEPT),
            next: 1,
            replacing: HashSet::new(),
            is_open: false,
        }
    }

    fn add(&mut self, id: ObjectId) {
        if self.kept.len() == INVALIDATIONS_KEPT {
            self.kept.pop_front();
        }
        self.kept.push_back(id);
        self.next += 1;
    }

    /// Removes the last entry if it is this object; returns whether it was. The entry was added in the same command, so
    /// no watcher can have read it.
    fn remove_last(&mut self, id: ObjectId) -> bool {
        let is_last = self.kept.back() == Some(&id);
        if is_last {
            self.kept.pop_back();
            self.next -= 1;
        }
        is_last
    }
}

impl Group {
    /// Returns objects that have left the index since number `since`, at most `max` of them. A new watcher passes 0.
    /// Returns `None` while nodes have yet to report.
    pub fn invalidations(&mut self, now: Now, since: u64, max: usize) -> Option<Invalidations> {
        if self.feed.is_none() {
            self.feed = Some(Box::new(InvalidationFeed::new()));
            self.open_feed(now);
        }
        let feed = self.feed.as_ref().filter(|feed| feed.is_open)?;
        let oldest = feed.next - feed.kept.len() as u64;
        if !(oldest..=feed.next).contains(&since) {
            return Some(Invalidations { ids: vec![], next: feed.next, gap: true });
        }
        let skipped = (since - oldest) as usize; // ≤ INVALIDATIONS_KEPT
        let ids: Vec<ObjectId> = feed.kept.iter().skip(skipped).take(max).copied().collect();
        let next = since + ids.len() as u64;
        Some(Invalidations { ids, next, gap: false })
    }

    /// Number of the next invalidation; 0 while the feed is closed. A changed number means new invalidations.
    pub fn next_invalidation(&self) -> u64 {
        self.feed.as_ref().filter(|feed| feed.is_open).map_or(0, |feed| feed.next)
    }

    /// Opens the feed if the nodes have reported.
    pub(super) fn open_feed(&mut self, now: Now) {
        if self.feed.as_ref().is_some_and(|feed| !feed.is_open) && self.may_open_feed(now) {
            // Entries so far are part of the gap that every watcher receives first.
            self.feed = Some(Box::new(InvalidationFeed { is_open: true, ..InvalidationFeed::new() }));
        }
    }

    /// Number of the next invalidation, open or not; callers compare it to detect a new one.
    pub(super) fn invalidation_count(&self) -> u64 {
        self.feed.as_ref().map_or(0, |feed| feed.next)
    }

    /// Whether an object that is not in the index can be considered gone: nodes of the preceding term have reported, or
    /// `report_wait` is over. Objects from a handoff count as long as lookups return them.
    fn may_open_feed(&self, now: Now) -> bool {
        let reporting = |segment: &Segment| segment.phase == SegmentPhase::Reporting;
        let wait_over = now.mono > self.reports_until && !self.segments.iter().flatten().any(reporting);
        self.handoff.is_empty() && (wait_over || !self.awaits_reports(now))
    }

    /// Adds an invalidation for an object that leaves the index: a complete one, or a reservation that replaced one.
    pub(super) fn invalidate(&mut self, id: ObjectId, complete: bool) {
        if let Some(feed) = &mut self.feed
            && (complete || feed.replacing.remove(&id))
        {
            feed.add(id);
        }
    }

    /// Defers the invalidation just added: a reservation of the same id replaces the object. It is added again if the
    /// reservation ends without completion.
    pub(super) fn invalidate_unless_put(&mut self, id: ObjectId, mark: u64) {
        if let Some(feed) = &mut self.feed
            && feed.next != mark
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
            if feed.next != mark {
                feed.remove_last(id);
            }
        }
    }
}
