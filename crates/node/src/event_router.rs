//! [`NodeEvent`], and [`EventRouter`], which sends each event to the master of its group. There is one route per master that hosts groups.

use std::sync::Arc;

use moontide_proto::limits::{SESSION_RECORDS_MAX, TOUCH_BITMAPS_MAX};
use moontide_proto::{CommandResult, v1};
use moontide_rt::sync::{Mutex, RwLock};
use moontide_types::{GroupId, MonoTime, SegmentId, SessionId};
use tokio::sync::mpsc::UnboundedSender;
use tracing::debug;

use crate::logic::groups::{GroupSet, HostedGroups, set_of};
use crate::logic::report::SlotChange;
use crate::sync_marks::SyncMarkStore;

/// An event at the node that concerns a session.
#[derive(Debug)]
pub(crate) enum NodeEvent {
    /// A slot has changed.
    Change(SlotChange),
    /// Results of commands.
    Results { session: SessionId, results: Vec<CommandResult> },
    /// A segment has to be reported again.
    Report(SegmentId),
    /// Records were written to disk.
    Offloaded { session: SessionId, notice: v1::OffloadNotice },
    /// Records were removed from disk.
    DiskEvicted { session: SessionId, evicted: v1::DiskEvicted },
}

/// Routes to all masters.
#[derive(Debug)]
pub(crate) struct EventRouter {
    /// Group of each segment.
    segments: Vec<GroupId>,
    routes: RwLock<Vec<MasterRoute>>,
    /// When this node was in sync with a master of each group.
    pub(crate) sync_marks: Arc<SyncMarkStore>,
    /// Access marks that one route has taken and that belong to the groups of other routes.
    touched: Mutex<Vec<v1::TouchBitmap>>,
}

/// Route to one master.
#[derive(Debug)]
struct MasterRoute {
    master: Arc<str>,
    groups: GroupSet,
    session: SessionId,
    /// Start of the last report after which the master was synced for all groups of the route.
    synced_at: Option<MonoTime>,
    events: UnboundedSender<NodeEvent>,
}

impl EventRouter {
    pub(crate) fn new(segments: Vec<GroupId>, sync_marks: Arc<SyncMarkStore>) -> Arc<EventRouter> {
        Arc::new(EventRouter { segments, routes: RwLock::default(), sync_marks, touched: Mutex::default() })
    }

    /// Returns a router with one route for all events, regardless of their session.
    #[cfg(test)]
    pub(crate) fn single(events: UnboundedSender<NodeEvent>) -> Arc<EventRouter> {
        let groups = GroupSet::all(std::num::NonZeroU16::MIN);
        let route = MasterRoute { master: "".into(), groups, session: SessionId(0), synced_at: None, events };
        let routes = EventRouter::new(vec![], SyncMarkStore::open(&[]));
        routes.routes.write().push(route);
        routes
    }

    /// Sends an event to the master that it concerns. Returns `false` if there is no route to it.
    pub(crate) fn send(&self, event: NodeEvent) -> bool {
        let routes = self.routes.read();
        let by_session = |session: SessionId| routes.iter().find(|route| route.session == session);
        let by_segment = |segment: SegmentId| {
            let group = self.segments.get(segment.0 as usize)?;
            routes.iter().find(|route| route.groups.contains(*group))
        };
        let route = match &event {
            // A test router: its only route receives everything.
            _ if self.segments.is_empty() => routes.first(),
            NodeEvent::Change(change) => by_segment(segment_of(change)),
            NodeEvent::Report(segment) => by_segment(*segment),
            NodeEvent::Results { session, .. }
            | NodeEvent::Offloaded { session, .. }
            | NodeEvent::DiskEvicted { session, .. } => by_session(*session),
        };
        route.is_some_and(|route| route.events.send(event).is_ok())
    }

    /// Sends the results of commands to the sessions that issued them.
    pub(crate) fn send_results(&self, mut results: Vec<(SessionId, CommandResult)>) {
        results.sort_by_key(|&(session, _)| session);
        for of_session in results.chunk_by(|a, b| a.0 == b.0) {
            for results in of_session.chunks(SESSION_RECORDS_MAX) {
                let (session, results) = (results[0].0, results.iter().map(|&(_, result)| result).collect());
                debug!(%session, "command results sent");
                self.send(NodeEvent::Results { session, results });
            }
        }
    }

    /// Whether a session has not ended.
    pub(crate) fn has_session(&self, session: SessionId) -> bool {
        // A test router accepts all sessions.
        self.segments.is_empty() || self.routes.read().iter().any(|route| route.session == session)
    }

    /// Adds a route to a master, without a session.
    pub(crate) fn open(&self, master: &Arc<str>, groups: GroupSet, events: UnboundedSender<NodeEvent>) {
        let master = Arc::clone(master);
        self.routes.write().push(MasterRoute {
            master,
            groups,
            session: SessionId(0),
            synced_at: None,
            events,
        });
    }

    /// Removes the route to a master.
    pub(crate) fn close(&self, master: &str) {
        self.routes.write().retain(|route| *route.master != *master);
    }

    /// Sets the groups that a master hosts. A route with additional groups is unsynced until the master is synced for
    /// them.
    pub(crate) fn set_groups(&self, master: &str, groups: GroupSet) {
        if let Some(route) = self.routes.write().iter_mut().find(|route| *route.master == *master) {
            if !groups.without(&route.groups).is_empty() {
                route.synced_at = None;
            }
            route.groups = groups;
        }
    }

    /// Sets the session of a route.
    pub(crate) fn set_session(&self, master: &str, session: SessionId) {
        if let Some(route) = self.routes.write().iter_mut().find(|route| *route.master == *master) {
            route.session = session;
        }
    }

    /// Records that a master was synced for the groups `mounted`, by a message sent at `at`. Returns the time since
    /// which all masters are synced, if every group has a route.
    pub(crate) fn mark_synced(&self, master: &str, at: MonoTime, mounted: &HostedGroups) -> Option<MonoTime> {
        let mut routes = self.routes.write();
        if let Some(route) = routes.iter_mut().find(|route| *route.master == *master) {
            let all_mounted = route.groups.without(&set_of(route.groups.of(), mounted)).is_empty();
            route.synced_at = all_mounted.then_some(at);
        }
        let mut covered = GroupSet::none(routes.first()?.groups.of());
        routes.iter().for_each(|route| covered.extend(&route.groups));
        if covered.len() < usize::from(covered.of().get()) {
            return None;
        }
        routes.iter().filter(|route| !route.groups.is_empty()).map(|route| route.synced_at).min().flatten()
    }
}

impl EventRouter {
    /// Records that a master is no longer synced.
    pub(crate) fn mark_unsynced(&self, master: &str) {
        if let Some(route) = self.routes.write().iter_mut().find(|route| *route.master == *master) {
            route.synced_at = None;
        }
    }

    /// Returns the masters that host groups.
    pub(crate) fn masters(&self) -> Vec<Arc<str>> {
        let routes = self.routes.read();
        let hosting = routes.iter().filter(|route| !route.groups.is_empty());
        hosting.map(|route| Arc::clone(&route.master)).collect()
    }

    /// Whether no master is synced.
    pub(crate) fn none_synced(&self) -> bool {
        self.routes.read().iter().all(|route| route.synced_at.is_none())
    }

    /// Whether this route carries events that concern no group.
    pub(crate) fn is_default_route(&self, master: &str) -> bool {
        let routes = self.routes.read();
        let first = |route: &&MasterRoute| route.groups.contains(GroupId(0));
        routes.iter().find(first).is_some_and(|route| *route.master == *master)
    }

    /// Returns the group of a segment.
    pub(crate) fn group_of(&self, segment: SegmentId) -> Option<GroupId> {
        self.segments.get(segment.0 as usize).copied()
    }

    /// Returns the access marks for `groups`, from `taken` and from those kept for this route. Keeps the others.
    pub(crate) fn route_touched(
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
        // Marks are hints: those that no route takes are dropped.
        others.truncate(TOUCH_BITMAPS_MAX);
        *waiting = others;
        own
    }
}

fn segment_of(change: &SlotChange) -> SegmentId {
    match change {
        SlotChange::Begun(segment, _) => *segment,
        SlotChange::Committed { segment, .. }
        | SlotChange::Killed { segment, .. }
        | SlotChange::Freed { segment, .. } => *segment,
    }
}
