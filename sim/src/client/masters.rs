//! [`Masters`]: choice of the master, as in the shipped client: [`GroupRoutes`] of the newest known map, refreshed when
//! a master replies `WrongMaster` or not at all.

use std::collections::BTreeSet;
use std::num::NonZeroU16;
use std::time::Duration;

use moontide_client::logic::GroupRoutes;
use moontide_proto::v1;
use moontide_types::MonoTime;

use super::{Client, ClientTimer, object_id};
use crate::context::ProcessContext;
use crate::event::{Message, ProcessId, Request, Timer};
use crate::master::index_of;

/// Shortest interval between refreshes of the map.
const LOOK_MIN: Duration = Duration::from_millis(50);
/// Timeout of a map refresh.
const MAP_REFRESH_MAX: Duration = Duration::from_secs(1);

/// Group map of a client.
#[derive(Debug)]
pub(super) struct Masters {
    version: u64,
    routes: GroupRoutes,
    hosts: Vec<usize>,
    alone: bool,
    /// A call failed since the last refresh.
    doubted: bool,
    looked: MonoTime,
    refresh_map: Option<MapRefresh>,
}

/// Running refresh, and the call that waits for it.
#[derive(Debug)]
struct MapRefresh {
    number: u64,
    calls: BTreeSet<u64>,
    newest: Option<v1::GroupMap>,
    deferred: Option<(u64, usize, Request, Duration)>,
}

impl Masters {
    pub(super) fn new(groups: u16) -> Masters {
        let groups = NonZeroU16::new(groups).expect("a cluster has a group");
        Masters {
            version: 0,
            routes: GroupRoutes::new(groups, []),
            hosts: vec![],
            alone: false,
            doubted: true,
            looked: MonoTime(0),
            refresh_map: None,
        }
    }

    /// Marks the map as stale: a master did not reply, or does not host the group.
    pub(super) fn mark_stale(&mut self) {
        self.doubted = !self.alone;
    }

    pub(super) fn is_single_master(&self) -> bool {
        self.alone
    }
}

impl Client {
    /// Sends a request to the master of a key, at once or after a refresh of the map. `timeout` is that of the reply.
    pub(super) fn call(
        &mut self,
        key: usize,
        request: Request,
        timeout: Duration,
        cx: &mut ProcessContext<'_>,
    ) -> u64 {
        let call = self.number();
        self.masters.refresh_map = None; // of a call that was given up
        if self.masters.doubted && cx.now().since(self.masters.looked) >= LOOK_MIN {
            self.refresh_map(cx);
            self.timeout = 0; // starts when the request is sent
            if let Some(refresh_map) = &mut self.masters.refresh_map {
                refresh_map.deferred = Some((call, key, request, timeout));
            }
        } else {
            self.ask_host(call, key, request, timeout, cx);
        }
        call
    }

    fn ask_host(
        &mut self,
        call: u64,
        key: usize,
        request: Request,
        timeout: Duration,
        cx: &mut ProcessContext<'_>,
    ) {
        match self.masters.routes.host(object_id(key)) {
            Some(host) => {
                let master = ProcessId::Master(self.masters.hosts[usize::from(host)]);
                cx.send(master, Message::Call { call, request });
                self.start_timeout(timeout, cx);
            }
            None => {
                self.masters.mark_stale();
                self.start_timeout(Duration::ZERO, cx);
            }
        }
    }

    fn refresh_map(&mut self, cx: &mut ProcessContext<'_>) {
        let context = self.context(0, cx);
        let mut calls = BTreeSet::new();
        for master in 0..self.plan.masters {
            let call = self.number();
            let request = Request::Map(v1::GetGroupMapRequest { context: context.clone() });
            cx.send(ProcessId::Master(master), Message::Call { call, request });
            calls.insert(call);
        }
        let number = self.number();
        self.masters.refresh_map = Some(MapRefresh { number, calls, newest: None, deferred: None });
        cx.wake_in(MAP_REFRESH_MAX, Timer::Client(ClientTimer::MapRefresh(number)));
    }

    pub(super) fn map_received(
        &mut self,
        call: u64,
        reply: v1::GetGroupMapResponse,
        cx: &mut ProcessContext<'_>,
    ) {
        let seen = self.masters.version;
        let Some(refresh_map) = &mut self.masters.refresh_map else { return };
        if !refresh_map.calls.remove(&call) {
            return;
        }
        if let Some(map) = reply.map
            && refresh_map.newest.as_ref().is_none_or(|newest| newest.version < map.version)
        {
            refresh_map.newest = Some(map);
        }
        // Do not wait for the other masters.
        let enough = refresh_map.newest.as_ref().is_some_and(|map| map.version > seen);
        if enough || refresh_map.calls.is_empty() {
            self.looked(cx);
        }
    }

    pub(super) fn map_refresh_over(&mut self, number: u64, cx: &mut ProcessContext<'_>) {
        if self.masters.refresh_map.as_ref().is_some_and(|refresh_map| refresh_map.number == number) {
            self.looked(cx);
        }
    }

    fn looked(&mut self, cx: &mut ProcessContext<'_>) {
        let Some(refresh_map) = self.masters.refresh_map.take() else { return };
        let masters = &mut self.masters;
        masters.looked = cx.now();
        masters.doubted = false;
        if let Some(map) = refresh_map.newest.filter(|map| map.version != masters.version) {
            let groups = NonZeroU16::new(map.groups as u16).expect("a cluster has a group");
            masters.version = map.version;
            masters.routes = GroupRoutes::new(groups, map.masters.iter().map(|master| &master.groups[..]));
            masters.hosts = map.masters.iter().map(|master| index_of(&master.grpc_address)).collect();
            masters.alone = map.single_master;
        }
        if let Some((call, key, request, timeout)) = refresh_map.deferred {
            self.ask_host(call, key, request, timeout, cx);
        }
    }
}
