//! A group with obedient nodes, and a clock that moves when told: what the behaviour tests share.

#![allow(dead_code, reason = "every test binary uses another part")]

use std::collections::VecDeque;
use std::num::NonZeroU16;
use std::time::Duration;

use moontide_meta::{
    Ask, Effect, Effects, Group, GroupConfig, Medium, MountSpec, Now, Order, OrderKind, OrderOutcome, PutEnd,
    PutOptions, PutStart, Removal, TenantIx, TickBudget, Waiter,
};
use moontide_types::record::PinClass;
use moontide_types::{
    Epoch, ErrorCode, Generation, GroupId, IdKey, Key, MonoTime, NodeId, ObjectId, SegmentId, SessionId,
    Tenant, TenantGeneration, Term, UnixMillis,
};

/// A group, its clock, and the orders that its nodes have not carried out yet.
pub(crate) struct Bench {
    pub(crate) group: Group,
    pub(crate) now: Now,
    pub(crate) effects: Effects,
    pub(crate) orders: VecDeque<Order>,
    pub(crate) tenant: TenantIx,
    pub(crate) removed: Vec<(Waiter, Option<ErrorCode>)>,
}

pub(crate) fn config(term: u32) -> GroupConfig {
    GroupConfig::new(GroupId(0), NonZeroU16::new(1).unwrap(), Term::new(term).unwrap())
}

pub(crate) fn id(key: &str) -> ObjectId {
    let id_key = IdKey::new(1, [7; 32]);
    id_key.object_id(Tenant::DEFAULT, TenantGeneration(0), Key::new(key.as_bytes()).unwrap())
}

pub(crate) fn ask(key: &str) -> Ask<'_> {
    Ask { id: id(key), key: Key::new(key.as_bytes()).unwrap() }
}

impl Bench {
    pub(crate) fn with(config: GroupConfig) -> Bench {
        let now = Now { mono: MonoTime(1_000_000_000), unix: UnixMillis(1_800_000_000_000) };
        let mut group = Group::new(config, now);
        let tenant = group.tenant(Tenant::DEFAULT).unwrap();
        Bench { group, now, effects: vec![], orders: VecDeque::new(), tenant, removed: vec![] }
    }

    /// One node with one segment of 1,000 units and 100 slots for each number.
    pub(crate) fn new(nodes: &[u64]) -> Bench {
        let mut bench = Bench::with(config(1));
        for &node in nodes {
            bench.mount(node, 0, Term::ZERO, false);
        }
        bench
    }

    pub(crate) fn mount(&mut self, node: u64, segment: u32, term: Term, occupied: bool) {
        let spec = MountSpec {
            node: NodeId(node),
            session: SessionId(node * 100),
            segment: SegmentId(segment),
            generation: Generation(1),
            medium: Medium::Memory,
            units: 1000,
            slots: 100,
            labels: ["", "", ""],
            tenant: None,
            term,
            occupied,
        };
        self.group.mount(self.now, &spec, &mut self.effects).unwrap();
        self.settle();
    }

    pub(crate) fn advance(&mut self, by: Duration) {
        self.now.mono = self.now.mono.after(by);
        self.now.unix.0 += by.as_millis() as u64;
    }

    pub(crate) fn tick(&mut self) {
        while self.group.tick(self.now, &TickBudget::default(), &mut self.effects) {}
        self.settle();
    }

    /// Sorts effects and checks every invariant.
    pub(crate) fn settle(&mut self) {
        for effect in self.effects.drain(..) {
            match effect {
                Effect::Order { order, .. } => self.orders.push_back(order),
                Effect::Removed { waiter, code } => self.removed.push((waiter, code)),
                Effect::StepDown { seen } => panic!("nobody knows term {seen}"),
            }
        }
        self.group.audit(self.now).unwrap();
    }

    /// The nodes do all that they were ordered to.
    pub(crate) fn obey(&mut self) {
        while let Some(order) = self.orders.pop_front() {
            let outcome = match order.kind {
                OrderKind::Kill => OrderOutcome::Accepted,
                OrderKind::Reclaim => OrderOutcome::Done,
            };
            self.answer(&order, outcome);
        }
    }

    pub(crate) fn answer(&mut self, order: &Order, outcome: OrderOutcome) {
        let nodes: Vec<NodeId> = self.group.segments().map(|view| view.node).collect();
        for node in nodes {
            let name = (node, order.segment);
            self.group.order_outcome(name, order.kind, order.slot, order.epoch, outcome, &mut self.effects);
        }
        self.settle();
    }

    pub(crate) fn start_with(
        &mut self,
        key: &str,
        len: u64,
        options: &PutOptions,
    ) -> Result<Epoch, ErrorCode> {
        self.start_full(key, len, options, PinClass::None, None)
    }

    pub(crate) fn start_full(
        &mut self,
        key: &str,
        len: u64,
        options: &PutOptions,
        pin: PinClass,
        cohort: Option<&str>,
    ) -> Result<Epoch, ErrorCode> {
        let put = PutStart {
            ask: ask(key),
            tenant: self.tenant,
            caller: 7,
            object_len: len,
            attributes_len: 0,
            pin,
            expires: None,
            cohort: cohort.map(str::as_bytes),
            parent: None,
            options,
        };
        let started = self.group.put_start(self.now, &put, &mut self.effects);
        let epoch = started.map(|reservation| reservation.object.epoch);
        self.settle();
        epoch
    }

    pub(crate) fn start(&mut self, key: &str, len: u64) -> Result<Epoch, ErrorCode> {
        self.start_with(key, len, &PutOptions::default())
    }

    pub(crate) fn end_with(
        &mut self,
        key: &str,
        epoch: Epoch,
        outcomes: &[Option<ErrorCode>],
    ) -> Result<(), ErrorCode> {
        let end = PutEnd { id: id(key), epoch, root: 77, outcomes, stripe_roots: &[] };
        let ended = self.group.put_end(self.now, &end, &mut self.effects);
        self.settle();
        ended
    }

    pub(crate) fn end(&mut self, key: &str, epoch: Epoch) -> Result<(), ErrorCode> {
        self.end_with(key, epoch, &[None; 8])
    }

    pub(crate) fn put(&mut self, key: &str, len: u64) -> Epoch {
        let epoch = self.start(key, len).unwrap();
        self.end(key, epoch).unwrap();
        epoch
    }

    /// Epoch and number of replicas, or the code.
    pub(crate) fn look(&mut self, key: &str, lease_ms: u32) -> Result<(Epoch, u8), ErrorCode> {
        let mut answer = Err(ErrorCode::Internal);
        self.group.lookup(self.now, lease_ms, &[ask(key)], |_, found| {
            answer = found.map(|object| (object.epoch, object.replicas));
        });
        self.settle();
        answer
    }

    pub(crate) fn has(&mut self, key: &str) -> bool {
        let mut there = false;
        self.group.exist(self.now, &[ask(key)], |_, answer| there = answer);
        there
    }

    pub(crate) fn remove(&mut self, key: &str, force: bool) -> Removal {
        let removal = self.group.remove(self.now, &ask(key), force, Waiter(1), &mut self.effects);
        self.settle();
        removal
    }

    pub(crate) fn free_units(&self) -> u64 {
        self.group.segments().map(|view| u64::from(view.free_units)).sum()
    }
}
