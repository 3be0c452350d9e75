//! A group with obedient nodes, and a clock that moves when told: what the behaviour tests share.

#![allow(dead_code, reason = "every test binary uses another part")]

use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU16;
use std::ops::Deref;
use std::time::Duration;

use moontide_meta::{
    Ask, DiskSpec, Effect, Effects, Group, GroupConfig, Medium, MountSpec, Now, Order, OrderKind,
    OrderOutcome, PlaceView, PutEnd, PutOptions, PutStart, Removal, ReportRecord, ReportState, StripeView,
    TenantIx, TickBudget, Waiter,
};
use moontide_types::record::PinClass;
use moontide_types::{
    Epoch, ErrorCode, Extent, Generation, GroupId, IdKey, Key, MonoTime, NodeId, ObjectId, SegmentId,
    SessionId, SlotId, Tenant, TenantGeneration, Term, UnixMillis,
};

/// An order and whom it was given to. The nodes here have sessions of their own number times 100, and a few more when
/// they come back.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Routed {
    pub(crate) session: SessionId,
    pub(crate) order: Order,
}

impl Routed {
    pub(crate) fn node(&self) -> NodeId {
        NodeId(self.session.0 / 100)
    }
}

impl Deref for Routed {
    type Target = Order;

    fn deref(&self) -> &Order {
        &self.order
    }
}

/// A group, its clock, and the orders that its nodes have not carried out yet.
pub(crate) struct Bench {
    pub(crate) group: Group,
    pub(crate) now: Now,
    pub(crate) effects: Effects,
    pub(crate) orders: VecDeque<Routed>,
    pub(crate) tenant: TenantIx,
    /// Keys of all puts.
    pub(crate) names: HashMap<ObjectId, String>,
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

/// A node's session in one of its lives, fewer than 100 of them.
pub(crate) fn session(node: u64, life: u64) -> SessionId {
    SessionId(node * 100 + life)
}

impl Bench {
    pub(crate) fn with(config: GroupConfig) -> Bench {
        let now = Now { mono: MonoTime(1_000_000_000), unix: UnixMillis(1_800_000_000_000) };
        let mut group = Group::new(config, now);
        let tenant = group.tenant(Tenant::DEFAULT).unwrap();
        Bench {
            group,
            now,
            effects: vec![],
            orders: VecDeque::new(),
            tenant,
            names: HashMap::new(),
            removed: vec![],
        }
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
        self.mount_in(node, 0, segment, term, occupied);
    }

    /// The same in a later session of the node.
    pub(crate) fn mount_in(&mut self, node: u64, life: u64, segment: u32, term: Term, occupied: bool) {
        let spec = MountSpec {
            node: NodeId(node),
            session: session(node, life),
            segment: SegmentId(segment),
            generation: Generation(1),
            medium: Medium::Memory,
            units: 1000,
            slots: 100,
            labels: ["", "", ""],
            tenant: None,
            term,
            occupied,
            known: Term::ZERO,
            away: Duration::ZERO,
            one_sided: true,
        };
        self.group.mount(self.now, &spec, &mut self.effects).unwrap();
        self.settle();
    }

    /// Gives a node a disk.
    pub(crate) fn mount_disk(&mut self, node: u64, life: u64, occupied: bool) {
        let spec = DiskSpec {
            node: NodeId(node),
            session: session(node, life),
            generation: Generation(1),
            labels: ["", "", ""],
            occupied,
        };
        self.group.mount_disk(self.now, &spec, &mut self.effects);
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
                Effect::Order { session, order } => self.orders.push_back(Routed { session, order }),
                Effect::Removed { waiter, code } => self.removed.push((waiter, code)),
                Effect::StepDown { seen } => panic!("nobody knows term {seen}"),
            }
        }
        self.group.audit(self.now).unwrap();
    }

    /// The nodes do all that they were ordered to.
    pub(crate) fn obey(&mut self) {
        while let Some(order) = self.orders.pop_front() {
            self.carry_out(&order);
        }
    }

    /// A node does what it was ordered to, and says so.
    pub(crate) fn carry_out(&mut self, order: &Routed) {
        let outcome = match order.kind {
            OrderKind::Kill => OrderOutcome::Accepted,
            OrderKind::Reclaim | OrderKind::Promote { .. } => OrderOutcome::Done,
            OrderKind::Offload => match self.written(order) {
                Some(()) => OrderOutcome::Done,
                None => OrderOutcome::Refused(ErrorCode::Gone),
            },
        };
        self.answer(order, outcome);
    }

    /// A node says that the record which it was to write is on its disk.
    pub(crate) fn written(&mut self, order: &Routed) -> Option<()> {
        let key = self.names.get(&order.id)?.clone();
        let detail = self.group.query(self.now, &ask(&key)).filter(|detail| detail.epoch == order.epoch)?;
        let is_source = |place: &&PlaceView| {
            (place.node, place.segment, place.slot) == (order.node(), order.segment, order.slot)
        };
        let place = *detail.places.iter().find(is_source)?;
        let record = ReportRecord {
            object_len: detail.object_len,
            stripe: place.stripe,
            root: place.root,
            expires: detail.expires,
            ..self.on_disk(&key, detail.epoch)
        };
        self.notice(order.node().0, order.session, &record, false).unwrap();
        Some(())
    }

    /// A complete object of one KiB, as a node finds it on its disk.
    pub(crate) fn on_disk<'a>(&self, key: &'a str, epoch: Epoch) -> ReportRecord<'a> {
        ReportRecord {
            slot: SlotId(0),
            state: ReportState::Ready,
            epoch,
            id: id(key),
            tenant: self.tenant,
            key: key.as_bytes(),
            object_len: 1024,
            stripe: StripeView { index: 0, count: 1, offset: 0, len: 1024 },
            root: 77,
            extent: Extent::default(),
            payload_offset: 0,
            digestless: false,
            one_sided: false,
            touched: false,
            pin: PinClass::None,
            expires: None,
            cohort: None,
            parent: None,
        }
    }

    pub(crate) fn notice(
        &mut self,
        node: u64,
        session: SessionId,
        record: &ReportRecord<'_>,
        recovered: bool,
    ) -> Result<(), ErrorCode> {
        let name = (NodeId(node), session);
        let told = self.group.disk_notice(self.now, name, (record, 0), recovered, &mut self.effects);
        self.settle();
        told
    }

    pub(crate) fn answer(&mut self, order: &Routed, outcome: OrderOutcome) {
        let name = (order.node(), order.segment);
        self.group.order_outcome(name, order.kind, order.slot, order.epoch, outcome, &mut self.effects);
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
        self.names.insert(id(key), key.into());
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

    /// Free units of memory.
    pub(crate) fn free_units(&self) -> u64 {
        let memory = self.group.segments().filter(|view| view.medium != Medium::Disk);
        memory.map(|view| u64::from(view.free_units)).sum()
    }
}
