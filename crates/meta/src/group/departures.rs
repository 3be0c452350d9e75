//! Departures: objects that have left the index, so that whoever told others of them can take it back.
//!
//! [`Group::forget_object`] is the one way out of the index, and the one place that writes here. What is replaced by a
//! newer version has not left; it has if the newer one never comes. What moves between memory, disks and replicas stays in
//! the index and is not mentioned.
//!
//! The last [`DEPARTURES_KEPT`] are kept, numbered from 1 on. A watcher says the number that it wants next; if that is no
//! longer there, or nobody was watching then, it is told of a gap, and has to look by itself. Until somebody asks nothing
//! is kept, and an object that leaves costs a branch.
//!
//! Numbers count within a term: a group's next master begins again, and knows at first only what nodes have reported. It
//! tells of nothing, not even of a gap, before they have had their time: whoever looked earlier would take for gone what
//! has not been reported yet.

use std::collections::VecDeque;

use hashbrown::HashSet;
use moontide_types::ObjectId;

use super::Group;
use crate::segment::{Segment, SegmentPhase};
use crate::time::Now;

/// How many are kept: 1 MiB of ids. At 10,000 evictions a second, which is more than a node's memory turns over, a watcher
/// may be away for six seconds; one that follows is never behind by more than one answer.
pub const DEPARTURES_KEPT: usize = 65_536;

/// What a watcher is told.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Departures {
    /// Objects that have left, in the order in which they did. One that has come back since may be among them.
    pub ids: Vec<ObjectId>,
    /// The number to ask for next.
    pub next: u64,
    /// Some before these were not kept. What left before is in no list.
    pub gap: bool,
}

/// What is kept for watchers, once there is one.
#[derive(Debug)]
pub(super) struct Feed {
    kept: VecDeque<ObjectId>,
    /// The number that the next one gets.
    next: u64,
    /// Reservations in the place of a complete version: if they end without becoming complete, that version has left.
    replacing: HashSet<ObjectId>,
    /// Nodes have had their time to report.
    is_open: bool,
}

impl Feed {
    fn new() -> Feed {
        Feed {
            kept: VecDeque::with_capacity(DEPARTURES_KEPT),
            next: 1,
            replacing: HashSet::new(),
            is_open: false,
        }
    }

    fn add(&mut self, id: ObjectId) {
        if self.kept.len() == DEPARTURES_KEPT {
            self.kept.pop_front();
        }
        self.kept.push_back(id);
        self.next += 1;
    }

    /// Takes back what was added last, in the same command: nobody can have read it. Whether it was this object.
    fn take_back(&mut self, id: ObjectId) -> bool {
        let is_last = self.kept.back() == Some(&id);
        if is_last {
            self.kept.pop_back();
            self.next -= 1;
        }
        is_last
    }
}

impl Group {
    /// Objects that have left the index since number `since`, at most `max` of them; 0 for somebody who has just begun to
    /// watch. None: it is too early, because nodes have yet to report what they have.
    pub fn departures(&mut self, now: Now, since: u64, max: usize) -> Option<Departures> {
        if self.feed.is_none() {
            self.feed = Some(Box::new(Feed::new()));
            self.open_feed(now);
        }
        let feed = self.feed.as_ref().filter(|feed| feed.is_open)?;
        let oldest = feed.next - feed.kept.len() as u64;
        if !(oldest..=feed.next).contains(&since) {
            return Some(Departures { ids: vec![], next: feed.next, gap: true });
        }
        let skipped = (since - oldest) as usize; // ≤ DEPARTURES_KEPT
        let ids: Vec<ObjectId> = feed.kept.iter().skip(skipped).take(max).copied().collect();
        let next = since + ids.len() as u64;
        Some(Departures { ids, next, gap: false })
    }

    /// The number that the next departure gets; 0 while nothing is told. If it is another one than before, there are news.
    pub fn departures_next(&self) -> u64 {
        self.feed.as_ref().filter(|feed| feed.is_open).map_or(0, |feed| feed.next)
    }

    /// Watchers are told from now on, if it is time.
    pub(super) fn open_feed(&mut self, now: Now) {
        if self.feed.as_ref().is_some_and(|feed| !feed.is_open) && self.may_tell(now) {
            // What is kept by now is in the gap that everybody is told of first.
            self.feed = Some(Box::new(Feed { is_open: true, ..Feed::new() }));
        }
    }

    /// How many have left, for whoever has to know whether one more did.
    pub(super) fn departed(&self) -> u64 {
        self.feed.as_ref().map_or(0, |feed| feed.next)
    }

    /// Whether what is not in the index is nowhere, as far as anybody can wait for it: those that were there before have
    /// reported, or had their time. What a master before has handed on counts as long as it is answered from.
    fn may_tell(&self, now: Now) -> bool {
        let reporting = |segment: &Segment| segment.phase == SegmentPhase::Reporting;
        let had_time = now.mono > self.reports_until && !self.segments.iter().flatten().any(reporting);
        self.inherited.is_empty() && (had_time || !self.is_unsettled(now))
    }

    /// An object leaves the index: one that was complete, or a reservation.
    pub(super) fn departs(&mut self, id: ObjectId, complete: bool) {
        if let Some(feed) = &mut self.feed
            && (complete || feed.replacing.remove(&id))
        {
            feed.add(id);
        }
    }

    /// What has just left made room for a reservation of the same id, and has not left unless that comes to nothing.
    pub(super) fn departs_if_not_put(&mut self, id: ObjectId, mark: u64) {
        if let Some(feed) = &mut self.feed
            && feed.next != mark
            && feed.take_back(id)
            && !moontide_types::planted("replaced-and-never-written")
        {
            feed.replacing.insert(id);
        }
    }

    /// What has just left is there in another version.
    pub(super) fn stays(&mut self, id: ObjectId, mark: u64) {
        if let Some(feed) = &mut self.feed {
            feed.replacing.remove(&id);
            if feed.next != mark {
                feed.take_back(id);
            }
        }
    }
}
