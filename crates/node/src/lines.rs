//! [`Lines`]: who is told what. A node has one line to each master that hosts groups; what happens at the node is told to the
//! master whom it concerns.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use moontide_proto::limits::TOUCH_BITMAPS_MAX;
use moontide_proto::v1;
use moontide_types::{GroupId, MonoTime, SegmentId, SessionId, Term};
use parking_lot::{Mutex, RwLock};
use tokio::sync::mpsc::UnboundedSender;

use crate::decide::groups::{GroupSet, Hosted, set_of};
use crate::decide::report::Change;
use crate::session::Event;

/// All lines.
#[derive(Debug)]
pub(crate) struct Lines {
    /// The group of each segment.
    segments: Vec<GroupId>,
    lines: RwLock<Vec<Line>>,
    /// When a master of each group last knew of everything.
    known_at: RwLock<BTreeMap<GroupId, (MonoTime, Term)>>,
    /// Marks of what was read that are for other lines than the one that has taken them.
    touched: Mutex<Vec<v1::TouchBitmap>>,
}

/// A line to one master.
#[derive(Debug)]
struct Line {
    master: Arc<str>,
    groups: GroupSet,
    session: SessionId,
    /// When the master last knew of everything that concerns it, counted from when it was told.
    good: Option<MonoTime>,
    events: UnboundedSender<Event>,
}

impl Lines {
    pub(crate) fn new(segments: Vec<GroupId>) -> Arc<Lines> {
        Arc::new(Lines {
            segments,
            lines: RwLock::default(),
            known_at: RwLock::default(),
            touched: Mutex::default(),
        })
    }

    /// One line for everything, whatever its session: for tests of what speaks into it.
    #[cfg(test)]
    pub(crate) fn one(events: UnboundedSender<Event>) -> Arc<Lines> {
        let groups = GroupSet::all(std::num::NonZeroU16::MIN);
        let line = Line { master: "".into(), groups, session: SessionId(0), good: None, events };
        let lines = Lines::new(vec![]);
        lines.lines.write().push(line);
        lines
    }

    /// Tells whoever it concerns. False: nobody is there to hear it.
    pub(crate) fn send(&self, event: Event) -> bool {
        let lines = self.lines.read();
        let by_session = |session: SessionId| lines.iter().find(|line| line.session == session);
        let by_segment = |segment: SegmentId| {
            let group = self.segments.get(segment.0 as usize)?;
            lines.iter().find(|line| line.groups.contains(*group))
        };
        let line = match &event {
            // For a test that listens to everything.
            _ if self.segments.is_empty() => lines.first(),
            Event::Change(change) => by_segment(segment_of(change)),
            Event::Report(segment) => by_segment(*segment),
            Event::Results { session, .. }
            | Event::Offloaded { session, .. }
            | Event::DiskEvicted { session, .. } => by_session(*session),
        };
        line.is_some_and(|line| line.events.send(event).is_ok())
    }

    /// A line to a master, without groups and session.
    pub(crate) fn open(&self, master: &Arc<str>, groups: GroupSet, events: UnboundedSender<Event>) {
        let master = Arc::clone(master);
        self.lines.write().push(Line { master, groups, session: SessionId(0), good: None, events });
    }

    /// There is no such line any more.
    pub(crate) fn close(&self, master: &str) {
        self.lines.write().retain(|line| *line.master != *master);
    }

    /// The groups that a master hosts. A line that has got more is not good before their master knows of them.
    pub(crate) fn set_groups(&self, master: &str, groups: GroupSet) {
        if let Some(line) = self.lines.write().iter_mut().find(|line| *line.master == *master) {
            if !groups.without(&line.groups).is_empty() {
                line.good = None;
            }
            line.groups = groups;
        }
    }

    /// The session of a line.
    pub(crate) fn set_session(&self, master: &str, session: SessionId) {
        if let Some(line) = self.lines.write().iter_mut().find(|line| *line.master == *master) {
            line.session = session;
        }
    }

    /// The master knew of everything in these groups, when it was told then. The answer: when all masters last did, if
    /// there is one for every group.
    pub(crate) fn good(&self, master: &str, at: MonoTime, mounted: &Hosted) -> Option<MonoTime> {
        let mut lines = self.lines.write();
        if let Some(line) = lines.iter_mut().find(|line| *line.master == *master) {
            let all_mounted = line.groups.without(&set_of(line.groups.of(), mounted)).is_empty();
            line.good = all_mounted.then_some(at);
            self.known_at.write().extend(mounted.iter().map(|(&group, &term)| (group, (at, term))));
        }
        let mut covered = GroupSet::none(lines.first()?.groups.of());
        lines.iter().for_each(|line| covered.extend(&line.groups));
        if covered.len() < usize::from(covered.of().get()) {
            return None;
        }
        lines.iter().filter(|line| !line.groups.is_empty()).map(|line| line.good).min().flatten()
    }
}

impl Lines {
    /// The master does not know of everything any more.
    pub(crate) fn bad(&self, master: &str) {
        if let Some(line) = self.lines.write().iter_mut().find(|line| *line.master == *master) {
            line.good = None;
        }
    }

    /// Whether no master knows of everything that concerns it.
    pub(crate) fn all_bad(&self) -> bool {
        self.lines.read().iter().all(|line| line.good.is_none())
    }

    /// Whether this is the line that is told what concerns no group.
    pub(crate) fn is_first(&self, master: &str) -> bool {
        let lines = self.lines.read();
        let first = |line: &&Line| line.groups.contains(GroupId(0));
        lines.iter().find(first).is_some_and(|line| *line.master == *master)
    }

    /// The group of a segment.
    pub(crate) fn group_of(&self, segment: SegmentId) -> Option<GroupId> {
        self.segments.get(segment.0 as usize).copied()
    }

    /// How long ago a master of the group last knew of everything, and in which term; nothing if none ever did.
    pub(crate) fn away(&self, group: GroupId, now: MonoTime) -> Option<(Duration, Term)> {
        self.known_at.read().get(&group).map(|&(at, term)| (now.since(at), term))
    }

    /// Of marks that were taken, and of those that others have taken, those of this line's groups.
    pub(crate) fn sort_touched(
        &self,
        groups: &GroupSet,
        taken: Vec<v1::TouchBitmap>,
    ) -> Vec<v1::TouchBitmap> {
        let concerns = |bitmap: &v1::TouchBitmap| {
            self.group_of(SegmentId(bitmap.segment)).is_some_and(|group| groups.contains(group))
        };
        let mut waiting = self.touched.lock();
        waiting.extend(taken);
        let (mut own, mut others): (Vec<_>, Vec<_>) = waiting.drain(..).partition(concerns);
        own.truncate(TOUCH_BITMAPS_MAX);
        // Hints: what nobody takes is forgotten.
        others.truncate(TOUCH_BITMAPS_MAX);
        *waiting = others;
        own
    }
}

fn segment_of(change: &Change) -> SegmentId {
    match change {
        Change::Begun(segment, _) => *segment,
        Change::Committed { segment, .. }
        | Change::Killed { segment, .. }
        | Change::Freed { segment, .. } => *segment,
    }
}
