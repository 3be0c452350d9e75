//! [`Masters`]: which master a client asks, as the shipped client has it: [`Routes`] made of the newest map that it has seen,
//! and another look at it when somebody says that he is not the one, or says nothing.

use std::collections::BTreeSet;
use std::num::NonZeroU16;
use std::time::Duration;

use moontide_client::decide::Routes;
use moontide_proto::v1;
use moontide_types::MonoTime;

use super::{Client, ClientTimer, object_id};
use crate::event::{Message, Request, Timer, Who};
use crate::master::index_of;
use crate::scene::Scene;

/// The map is not looked at more often than this.
const LOOK_MIN: Duration = Duration::from_millis(50);
/// How long masters have to answer.
const LOOK_MAX: Duration = Duration::from_secs(1);

/// Who hosts what, as far as it is known.
#[derive(Debug)]
pub(super) struct Masters {
    version: u64,
    routes: Routes,
    hosts: Vec<usize>,
    alone: bool,
    /// A call went wrong since the map was looked at.
    doubted: bool,
    looked: MonoTime,
    look: Option<Look>,
}

/// A look that is under way, and what is asked when it is over.
#[derive(Debug)]
struct Look {
    number: u64,
    calls: BTreeSet<u64>,
    newest: Option<v1::GroupMap>,
    parked: Option<(u64, usize, Request, Duration)>,
}

impl Masters {
    pub(super) fn new(groups: u16) -> Masters {
        let groups = NonZeroU16::new(groups).expect("a cluster has a group");
        Masters {
            version: 0,
            routes: Routes::new(groups, []),
            hosts: vec![],
            alone: false,
            doubted: true,
            looked: MonoTime(0),
            look: None,
        }
    }

    /// Somebody did not answer, or is not the one.
    pub(super) fn doubt(&mut self) {
        self.doubted = !self.alone;
    }

    pub(super) fn is_alone(&self) -> bool {
        self.alone
    }
}

impl Client {
    /// Asks the master of a key: at once, or when the map has been looked at. `patience`: how long for an answer.
    pub(super) fn call(
        &mut self,
        key: usize,
        request: Request,
        patience: Duration,
        scene: &mut Scene<'_>,
    ) -> u64 {
        let call = self.number();
        self.masters.look = None; // of a call that was given up
        if self.masters.doubted && scene.now().since(self.masters.looked) >= LOOK_MIN {
            self.look(scene);
            self.patience = 0; // it begins when it is asked
            if let Some(look) = &mut self.masters.look {
                look.parked = Some((call, key, request, patience));
            }
        } else {
            self.ask_host(call, key, request, patience, scene);
        }
        call
    }

    fn ask_host(
        &mut self,
        call: u64,
        key: usize,
        request: Request,
        patience: Duration,
        scene: &mut Scene<'_>,
    ) {
        match self.masters.routes.host(object_id(key)) {
            Some(host) => {
                let master = Who::Master(self.masters.hosts[usize::from(host)]);
                scene.send(master, Message::Call { call, request });
                self.have_patience(patience, scene);
            }
            None => {
                self.masters.doubt();
                self.have_patience(Duration::ZERO, scene);
            }
        }
    }

    fn look(&mut self, scene: &mut Scene<'_>) {
        let context = self.context(0, scene);
        let mut calls = BTreeSet::new();
        for master in 0..self.plan.masters {
            let call = self.number();
            let request = Request::Map(v1::GetGroupMapRequest { context: context.clone() });
            scene.send(Who::Master(master), Message::Call { call, request });
            calls.insert(call);
        }
        let number = self.number();
        self.masters.look = Some(Look { number, calls, newest: None, parked: None });
        scene.wake_in(LOOK_MAX, Timer::Client(ClientTimer::Look(number)));
    }

    pub(super) fn map_told(&mut self, call: u64, answer: v1::GetGroupMapResponse, scene: &mut Scene<'_>) {
        let seen = self.masters.version;
        let Some(look) = &mut self.masters.look else { return };
        if !look.calls.remove(&call) {
            return;
        }
        if let Some(map) = answer.map
            && look.newest.as_ref().is_none_or(|newest| newest.version < map.version)
        {
            look.newest = Some(map);
        }
        // Those that do not answer are not worth waiting for.
        let enough = look.newest.as_ref().is_some_and(|map| map.version > seen);
        if enough || look.calls.is_empty() {
            self.looked(scene);
        }
    }

    pub(super) fn look_over(&mut self, number: u64, scene: &mut Scene<'_>) {
        if self.masters.look.as_ref().is_some_and(|look| look.number == number) {
            self.looked(scene);
        }
    }

    fn looked(&mut self, scene: &mut Scene<'_>) {
        let Some(look) = self.masters.look.take() else { return };
        let masters = &mut self.masters;
        masters.looked = scene.now();
        masters.doubted = false;
        if let Some(map) = look.newest.filter(|map| map.version != masters.version) {
            let groups = NonZeroU16::new(map.groups as u16).expect("a cluster has a group");
            masters.version = map.version;
            masters.routes = Routes::new(groups, map.masters.iter().map(|master| &master.groups[..]));
            masters.hosts = map.masters.iter().map(|master| index_of(&master.grpc_address)).collect();
            masters.alone = map.alone;
        }
        if let Some((call, key, request, patience)) = look.parked {
            self.ask_host(call, key, request, patience, scene);
        }
    }
}
