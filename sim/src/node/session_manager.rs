//! [`SessionManager`]: sessions with the masters of the newest map that any master knows, as in the shipped node.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use moontide_node::logic::groups::{GroupSet, HostedGroups, set_of};
use moontide_proto::v1;
use moontide_types::{GroupId, Term};

use super::session::SessionDriver;
use super::{Node, NodeTimer};
use crate::context::ProcessContext;
use crate::event::{Message, NodeRequest, ProcessId, Timer};
use crate::master::index_of;

/// Interval of map refreshes while every group has a master.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// The same, while some group has no master.
const LOOK_SOON: Duration = Duration::from_millis(200);
/// Not more often than that.
const MAP_REFRESH_PAUSE: Duration = Duration::from_millis(50);
/// Timeout of one master.
const REPLY_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Debug)]
enum Step {
    /// Until the timer; `hasty`: it is a short pause because there is news.
    Waiting {
        number: u64,
        hasty: bool,
    },
    Looking {
        number: u64,
        calls: BTreeSet<u64>,
        newest: Option<v1::GroupMap>,
    },
}

/// Sessions of a node.
#[derive(Debug)]
pub(super) struct SessionManager {
    step: Step,
    /// The map may have changed since the last refresh.
    news: bool,
    /// The map that is followed.
    version: Option<u64>,
    covered: bool,
}

impl Default for SessionManager {
    fn default() -> SessionManager {
        SessionManager {
            step: Step::Waiting { number: 0, hasty: true },
            news: false,
            version: None,
            covered: false,
        }
    }
}

impl SessionManager {
    /// Whether every group has a master.
    pub(super) fn is_covered(&self) -> bool {
        self.covered
    }
}

impl Node {
    /// Asks all masters for the map.
    pub(super) fn refresh_map(&mut self, cx: &mut ProcessContext<'_>) {
        self.session_manager.news = false;
        let context = Some(v1::RequestContext {
            caller: self.boot,
            timeout_ms: REPLY_TIMEOUT.as_millis() as u32,
            ..Default::default()
        });
        let mut calls = BTreeSet::new();
        for master in 0..self.masters {
            let call = self.number();
            let request = NodeRequest::Map(v1::GetGroupMapRequest { context: context.clone() });
            cx.send(ProcessId::Master(master), Message::NodeCall { call, request });
            calls.insert(call);
        }
        let number = self.number();
        self.session_manager.step = Step::Looking { number, calls, newest: None };
        cx.wake_in(REPLY_TIMEOUT, Timer::Node(NodeTimer::MapRefresh { number }));
    }

    pub(super) fn map_received(
        &mut self,
        call: u64,
        reply: v1::GetGroupMapResponse,
        cx: &mut ProcessContext<'_>,
    ) {
        let Step::Looking { calls, newest, .. } = &mut self.session_manager.step else { return };
        if !calls.remove(&call) {
            return;
        }
        if let Some(map) = reply.map.filter(|map| map.groups == u32::from(self.groups.get()))
            && newest.as_ref().is_none_or(|newest| newest.version < map.version)
        {
            *newest = Some(map);
        }
        if calls.is_empty() {
            self.looked(cx);
        }
    }

    pub(super) fn map_refresh_due(&mut self, due: u64, cx: &mut ProcessContext<'_>) {
        match self.session_manager.step {
            Step::Waiting { number, .. } if number == due => self.refresh_map(cx),
            Step::Looking { number, .. } if number == due => self.looked(cx),
            _ => {}
        }
    }

    fn looked(&mut self, cx: &mut ProcessContext<'_>) {
        let number = self.number();
        let hasty = self.session_manager.news;
        let step = std::mem::replace(&mut self.session_manager.step, Step::Waiting { number, hasty });
        if let Step::Looking { newest: Some(map), .. } = step {
            self.follow(&map, cx);
        }
        let wait = if hasty {
            MAP_REFRESH_PAUSE
        } else if self.session_manager.covered {
            LOOK_EVERY
        } else {
            LOOK_SOON
        };
        cx.wake_in(wait, Timer::Node(NodeTimer::MapRefresh { number }));
    }

    /// Requests a refresh of the map.
    pub(super) fn news(&mut self, cx: &mut ProcessContext<'_>) {
        if let Step::Waiting { hasty: false, .. } = self.session_manager.step {
            let number = self.number();
            self.session_manager.step = Step::Waiting { number, hasty: true };
            cx.wake_in(MAP_REFRESH_PAUSE, Timer::Node(NodeTimer::MapRefresh { number }));
        } else {
            self.session_manager.news = true;
        }
    }

    /// A master has mentioned a version.
    pub(super) fn heard_of(&mut self, version: u64, cx: &mut ProcessContext<'_>) {
        if self.session_manager.version.is_none_or(|followed| version > followed) {
            self.news(cx);
        }
    }

    /// Has a driver for each master of the map, and no other.
    fn follow(&mut self, map: &v1::GroupMap, cx: &mut ProcessContext<'_>) {
        let older = self.session_manager.version.is_some_and(|version| map.version < version);
        let all_bad = self.drivers.values().all(|driver| !driver.is_good());
        if self.session_manager.version == Some(map.version) || older && !all_bad {
            return;
        }
        let mut hosts: BTreeMap<usize, (u32, HostedGroups)> = BTreeMap::new();
        let mut covered = GroupSet::none(self.groups);
        for master in &map.masters {
            let terms = master.terms.iter().map(|&term| Term::new(term).unwrap_or(Term::ZERO));
            let groups: HostedGroups =
                master.groups.iter().map(|&group| GroupId(group as u16)).zip(terms).collect();
            covered.extend(&set_of(self.groups, &groups));
            if !groups.is_empty() {
                hosts.insert(index_of(&master.grpc_address), (master.term, groups));
            }
        }
        self.session_manager.version = Some(map.version);
        self.session_manager.covered = covered.len() == usize::from(self.groups.get());
        // Those that host less first, so that no group has two lines.
        let is_same = |driver: &SessionDriver| {
            let host = hosts.get(&driver.master());
            host.is_some_and(|(number, _)| *number == driver.master_number() || map.single_master)
        };
        let gone = self.drivers.iter().filter(|(_, driver)| !is_same(driver));
        for route in gone.map(|(&route, _)| route).collect::<Vec<_>>() {
            self.dismiss(route, cx);
        }
        for (&route, driver) in &mut self.drivers {
            if let Some((_, groups)) = hosts.remove(&driver.master())
                && driver.wants(self.groups, groups)
            {
                // It takes notice when its thread runs.
                cx.wake_in(Duration::ZERO, Timer::Node(NodeTimer::Events { route }));
            }
        }
        for (master, (number, groups)) in hosts {
            let route = self.number();
            self.drivers.insert(route, SessionDriver::new(self.boot, master, number, self.groups, groups));
            self.open(route, cx);
        }
    }
}
