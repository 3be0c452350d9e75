//! [`Fleet`]: which masters a node talks to, as the shipped one has it: it follows the newest map that any of them knows.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use moontide_node::decide::groups::{GroupSet, Hosted, set_of};
use moontide_proto::v1;
use moontide_types::{GroupId, Term};

use super::converse::Driver;
use super::{Node, NodeTimer};
use crate::event::{Message, NodeRequest, Timer, Who};
use crate::master::index_of;
use crate::scene::Scene;

/// How often the map is asked for when all is well.
const LOOK_EVERY: Duration = Duration::from_secs(5);
/// The same, while some group has no master.
const LOOK_SOON: Duration = Duration::from_millis(200);
/// Not more often than that.
const LOOK_PAUSE: Duration = Duration::from_millis(50);
/// How long one master has to answer.
const ANSWER_MAX: Duration = Duration::from_secs(1);

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

/// Who is talked to.
#[derive(Debug)]
pub(super) struct Fleet {
    step: Step,
    /// Something may have changed since the last look.
    news: bool,
    /// The map that is followed.
    version: Option<u64>,
    covered: bool,
}

impl Default for Fleet {
    fn default() -> Fleet {
        Fleet { step: Step::Waiting { number: 0, hasty: true }, news: false, version: None, covered: false }
    }
}

impl Fleet {
    /// Whether every group has a master.
    pub(super) fn is_covered(&self) -> bool {
        self.covered
    }
}

impl Node {
    /// Asks all masters for the map.
    pub(super) fn look(&mut self, scene: &mut Scene<'_>) {
        self.fleet.news = false;
        let context = Some(v1::RequestContext {
            caller: self.boot,
            deadline_ms: ANSWER_MAX.as_millis() as u32,
            ..Default::default()
        });
        let mut calls = BTreeSet::new();
        for master in 0..self.masters {
            let call = self.number();
            let request = NodeRequest::Map(v1::GetGroupMapRequest { context: context.clone() });
            scene.send(Who::Master(master), Message::NodeCall { call, request });
            calls.insert(call);
        }
        let number = self.number();
        self.fleet.step = Step::Looking { number, calls, newest: None };
        scene.wake_in(ANSWER_MAX, Timer::Node(NodeTimer::Look { number }));
    }

    pub(super) fn map_told(&mut self, call: u64, answer: v1::GetGroupMapResponse, scene: &mut Scene<'_>) {
        let Step::Looking { calls, newest, .. } = &mut self.fleet.step else { return };
        if !calls.remove(&call) {
            return;
        }
        if let Some(map) = answer.map.filter(|map| map.groups == u32::from(self.groups.get()))
            && newest.as_ref().is_none_or(|newest| newest.version < map.version)
        {
            *newest = Some(map);
        }
        if calls.is_empty() {
            self.looked(scene);
        }
    }

    pub(super) fn look_due(&mut self, due: u64, scene: &mut Scene<'_>) {
        match self.fleet.step {
            Step::Waiting { number, .. } if number == due => self.look(scene),
            Step::Looking { number, .. } if number == due => self.looked(scene),
            _ => {}
        }
    }

    fn looked(&mut self, scene: &mut Scene<'_>) {
        let number = self.number();
        let hasty = self.fleet.news;
        let step = std::mem::replace(&mut self.fleet.step, Step::Waiting { number, hasty });
        if let Step::Looking { newest: Some(map), .. } = step {
            self.follow(&map, scene);
        }
        let wait = if hasty {
            LOOK_PAUSE
        } else if self.fleet.covered {
            LOOK_EVERY
        } else {
            LOOK_SOON
        };
        scene.wake_in(wait, Timer::Node(NodeTimer::Look { number }));
    }

    /// The map should be looked at.
    pub(super) fn news(&mut self, scene: &mut Scene<'_>) {
        if let Step::Waiting { hasty: false, .. } = self.fleet.step {
            let number = self.number();
            self.fleet.step = Step::Waiting { number, hasty: true };
            scene.wake_in(LOOK_PAUSE, Timer::Node(NodeTimer::Look { number }));
        } else {
            self.fleet.news = true;
        }
    }

    /// A master has mentioned a version.
    pub(super) fn heard_of(&mut self, version: u64, scene: &mut Scene<'_>) {
        if self.fleet.version.is_none_or(|followed| version > followed) {
            self.news(scene);
        }
    }

    /// Has a driver for each master of the map, and no other.
    fn follow(&mut self, map: &v1::GroupMap, scene: &mut Scene<'_>) {
        let older = self.fleet.version.is_some_and(|version| map.version < version);
        let all_bad = self.drivers.values().all(|driver| !driver.is_good());
        if self.fleet.version == Some(map.version) || older && !all_bad {
            return;
        }
        let mut hosts: BTreeMap<usize, (u32, Hosted)> = BTreeMap::new();
        let mut covered = GroupSet::none(self.groups);
        for master in &map.masters {
            let terms = master.terms.iter().map(|&term| Term::new(term).unwrap_or(Term::ZERO));
            let groups: Hosted =
                master.groups.iter().map(|&group| GroupId(group as u16)).zip(terms).collect();
            covered.extend(&set_of(self.groups, &groups));
            if !groups.is_empty() {
                hosts.insert(index_of(&master.grpc_address), (master.term, groups));
            }
        }
        self.fleet.version = Some(map.version);
        self.fleet.covered = covered.len() == usize::from(self.groups.get());
        // Those that host less first, so that no group has two lines.
        let is_same = |driver: &Driver| {
            let host = hosts.get(&driver.master());
            host.is_some_and(|(number, _)| *number == driver.master_number() || map.alone)
        };
        let gone = self.drivers.iter().filter(|(_, driver)| !is_same(driver));
        for line in gone.map(|(&line, _)| line).collect::<Vec<_>>() {
            self.dismiss(line, scene);
        }
        for (&line, driver) in &mut self.drivers {
            if let Some((_, groups)) = hosts.remove(&driver.master())
                && driver.wants(self.groups, groups)
            {
                // It takes notice when its thread runs.
                scene.wake_in(Duration::ZERO, Timer::Node(NodeTimer::Events { line }));
            }
        }
        for (master, (number, groups)) in hosts {
            let line = self.number();
            self.drivers.insert(line, Driver::new(self.boot, master, number, self.groups, groups));
            self.open(line, scene);
        }
    }
}
