//! Shared harness of the behaviour tests: a group, nodes that execute all commands, and a clock that moves only on
//! request.

#![allow(dead_code, reason = "each test binary uses a different part")]

use std::collections::{HashMap, VecDeque};
use std::num::NonZeroU16;
use std::ops::Deref;
use std::time::Duration;

use moontide_meta::{
    CommandKind, CommandOutcome, DiskSpec, Effect, Effects, Group, GroupConfig, LookupKey, MountSpec,
    NodeCommand, Now, PutEnd, PutOptions, PutStart, RemoveOutcome, ReportRecord, ReportState, StripeLocation,
    StripeRange, SyncMark, TenantIndex, TickBudget, WaiterId,
};
use moontide_types::record::PinClass;
use moontide_types::{
    Epoch, ErrorCode, Extent, Generation, GroupId, IdKey, Key, Medium, MonoTime, NodeId, ObjectId, SegmentId,
    SessionId, SlotId, Tenant, TenantGeneration, Term, UnixMillis,
};

/// A command and its session. Session ids of node `n` are `n * 100` plus a small number that counts its sessions.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Routed {
    pub(crate) session: SessionId,
    pub(crate) command: NodeCommand,
}

impl Routed {
    pub(crate) fn node(&self) -> NodeId {
        NodeId(self.session.0 / 100)
    }
}

impl Deref for Routed {
    type Target = NodeCommand;

    fn deref(&self) -> &NodeCommand {
        &self.command
    }
}

/// A group, its clock, and the commands that its nodes have not executed yet.
pub(crate) struct GroupHarness {
    pub(crate) group: Group,
    pub(crate) now: Now,
    pub(crate) effects: Effects,
    pub(crate) commands: VecDeque<Routed>,
    pub(crate) tenant: TenantIndex,
    /// Keys of all puts.
    pub(crate) names: HashMap<ObjectId, String>,
    pub(crate) removed: Vec<(WaiterId, Option<ErrorCode>)>,
}

/// With watermarks that leave several objects of a small segment between them, and without moves for the balance of the nodes.
pub(crate) fn config(term: u32) -> GroupConfig {
    GroupConfig {
        rebalance_bytes_per_s: 0,
        eviction_high_watermark_permille: 950,
        eviction_low_watermark_permille: 900,
        ..GroupConfig::new(GroupId(0), NonZeroU16::new(1).unwrap(), Term::new(term).unwrap())
    }
}

pub(crate) fn id(key: &str) -> ObjectId {
    let id_key = IdKey::new(1, [7; 32]);
    id_key.object_id(Tenant::DEFAULT, TenantGeneration(0), Key::new(key.as_bytes()).unwrap())
}

pub(crate) fn lookup_key(key: &str) -> LookupKey<'_> {
    LookupKey { id: id(key), key: Key::new(key.as_bytes()).unwrap() }
}

/// Session of a node's n-th incarnation, n < 100.
pub(crate) fn session(node: u64, incarnation: u64) -> SessionId {
    SessionId(node * 100 + incarnation)
}

/// An empty segment of a node's memory.
pub(crate) fn memory(node: u64, units: u32) -> MountSpec<'static> {
    MountSpec {
        node: NodeId(node),
        session: session(node, 0),
        segment: SegmentId(0),
        generation: Generation(1),
        medium: Medium::Memory,
        units,
        slots: 100,
        labels: ["", "", ""],
        tenant: None,
        term: Term::ZERO,
        has_records: false,
        synced: SyncMark::NONE,
        one_sided: true,
    }
}

impl GroupHarness {
    pub(crate) fn with(config: GroupConfig) -> GroupHarness {
        let now = Now { mono: MonoTime(1_000_000_000), unix: UnixMillis(1_800_000_000_000) };
        let mut group = Group::new(config, now);
        let tenant = group.tenant(Tenant::DEFAULT).unwrap();
        GroupHarness {
            group,
            now,
            effects: vec![],
            commands: VecDeque::new(),
            tenant,
            names: HashMap::new(),
            removed: vec![],
        }
    }

    /// One node with one segment of 1,000 units and 100 slots for each number.
    pub(crate) fn new(nodes: &[u64]) -> GroupHarness {
        let mut harness = GroupHarness::with(config(1));
        for &node in nodes {
            harness.mount(node, 0, Term::ZERO, false);
        }
        harness
    }

    pub(crate) fn mount(&mut self, node: u64, segment: u32, term: Term, occupied: bool) {
        self.mount_in(node, 0, segment, term, occupied);
    }

    /// The same in a later session of the node.
    pub(crate) fn mount_in(&mut self, node: u64, incarnation: u64, segment: u32, term: Term, occupied: bool) {
        let session = session(node, incarnation);
        let segment = SegmentId(segment);
        self.mount_spec(&MountSpec { session, segment, term, has_records: occupied, ..memory(node, 1000) });
    }

    pub(crate) fn mount_spec(&mut self, spec: &MountSpec<'_>) {
        self.group.mount(self.now, spec, &mut self.effects).unwrap();
        self.settle();
    }

    /// Mounts a disk of a node.
    pub(crate) fn mount_disk(&mut self, node: u64, incarnation: u64, occupied: bool) {
        let spec = DiskSpec {
            node: NodeId(node),
            session: session(node, incarnation),
            generation: Generation(1),
            labels: ["", "", ""],
            occupied,
            synced: SyncMark::NONE,
        };
        self.group.mount_disk(self.now, &spec, &mut self.effects);
        self.settle();
    }

    pub(crate) fn advance(&mut self, by: Duration) {
        self.now.mono = self.now.mono.after(by);
        self.now.unix.0 += by.as_millis() as u64;
    }

    /// Runs the due work of the group.
    pub(crate) fn group_tick(&mut self) {
        while self.group.tick(self.now, &TickBudget::default(), &mut self.effects) {}
        self.settle();
    }

    /// Runs the due work of the group, and of its master.
    pub(crate) fn tick(&mut self) {
        self.group_tick();
        // The master stores it.
        if let Some(number) = self.group.wanted_exclusion(self.now) {
            self.group.excluded(number, &mut self.effects);
            self.settle();
        }
    }

    /// Collects effects and checks every invariant.
    pub(crate) fn settle(&mut self) {
        for effect in self.effects.drain(..) {
            match effect {
                Effect::Command { session, command } => self.commands.push_back(Routed { session, command }),
                Effect::Removed { waiter, code } => self.removed.push((waiter, code)),
                Effect::StepDown { seen } => panic!("unexpected step down to term {seen}"),
            }
        }
        self.group.audit(self.now).unwrap();
    }

    /// Lets the nodes execute all commands.
    pub(crate) fn run_commands(&mut self) {
        while let Some(command) = self.commands.pop_front() {
            self.run_command(&command);
        }
    }

    /// Lets a node execute a command and respond.
    pub(crate) fn run_command(&mut self, command: &Routed) {
        let outcome = match command.kind {
            CommandKind::Kill => CommandOutcome::Accepted,
            CommandKind::Reclaim | CommandKind::Promote { .. } | CommandKind::Copy { .. } => {
                CommandOutcome::Done
            }
            CommandKind::Offload => match self.write_to_disk(command) {
                Some(()) => CommandOutcome::Done,
                None => CommandOutcome::Refused(ErrorCode::Gone),
            },
        };
        self.respond(command, outcome);
    }

    /// Sends the notice that the record of an Offload command is on the node's disk.
    pub(crate) fn write_to_disk(&mut self, command: &Routed) -> Option<()> {
        let key = self.names.get(&command.id)?.clone();
        let detail =
            self.group.query(self.now, &lookup_key(&key)).filter(|detail| detail.epoch == command.epoch)?;
        let is_source = |location: &&StripeLocation| {
            (location.node, location.segment, location.slot)
                == (command.node(), command.segment, command.slot)
        };
        let location = *detail.locations.iter().find(is_source)?;
        let record = ReportRecord {
            object_len: detail.object_len,
            stripe: location.stripe,
            root: location.root,
            expires: detail.expires,
            ..self.on_disk(&key, detail.epoch)
        };
        self.notice(command.node().0, command.session, &record, false).unwrap();
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
            stripe: StripeRange { index: 0, count: 1, offset: 0, len: 1024 },
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
            extra_replicas: 0,
            spread: None,
            disk_replicas: 0,
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
        let result = self.group.disk_notice(self.now, name, (record, 0), recovered, &mut self.effects);
        self.settle();
        result
    }

    pub(crate) fn respond(&mut self, command: &Routed, outcome: CommandOutcome) {
        let name = (command.node(), command.segment);
        self.group.command_outcome(
            name,
            command.kind,
            command.slot,
            command.epoch,
            outcome,
            &mut self.effects,
        );
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
        let cohort = cohort.map(str::as_bytes);
        self.start_put(key, &PutStart { pin, cohort, ..self.put_start(key, len, options) })
    }

    /// The start of a put without attributes.
    pub(crate) fn put_start<'a>(&self, key: &'a str, len: u64, options: &'a PutOptions) -> PutStart<'a> {
        PutStart {
            object: lookup_key(key),
            tenant: self.tenant,
            caller: 7,
            object_len: len,
            attributes_len: 0,
            pin: PinClass::None,
            spread: None,
            disk_replicas: 0,
            expires: None,
            cohort: None,
            parent: None,
            options,
        }
    }

    pub(crate) fn start_put(&mut self, key: &str, put: &PutStart<'_>) -> Result<Epoch, ErrorCode> {
        self.names.insert(id(key), key.into());
        let started = self.group.put_start(self.now, put, &mut self.effects);
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
        let end = PutEnd { id: id(key), epoch, root: 77, outcomes, stripe_roots: &[], replaces: false };
        let ended = self.group.put_end(self.now, &end, &mut self.effects);
        self.settle();
        ended
    }

    pub(crate) fn end(&mut self, key: &str, epoch: Epoch) -> Result<(), ErrorCode> {
        self.end_with(key, epoch, &[None; 8])
    }

    /// Replaces an object of one KiB on a node; returns the epoch and the outcome of the PutEnd.
    pub(crate) fn upsert_on(&mut self, key: &str, node: u64) -> (Epoch, Result<(), ErrorCode>) {
        let local_node = Some(NodeId(node));
        let options = PutOptions { upsert: true, local_node, ..PutOptions::default() };
        let epoch = self.start_with(key, 1024, &options).unwrap();
        (epoch, self.end_replacing(key, epoch))
    }

    pub(crate) fn end_replacing(&mut self, key: &str, epoch: Epoch) -> Result<(), ErrorCode> {
        let outcomes = &[None; 8];
        let end = PutEnd { id: id(key), epoch, root: 77, outcomes, stripe_roots: &[], replaces: true };
        let ended = self.group.put_end(self.now, &end, &mut self.effects);
        self.settle();
        ended
    }

    pub(crate) fn put(&mut self, key: &str, len: u64) -> Epoch {
        let epoch = self.start(key, len).unwrap();
        self.end(key, epoch).unwrap();
        epoch
    }

    /// Returns epoch and number of replicas, or the code.
    pub(crate) fn lookup(&mut self, key: &str, lease_ms: u32) -> Result<(Epoch, u8), ErrorCode> {
        let mut response = Err(ErrorCode::Internal);
        self.group.lookup(self.now, lease_ms, &[lookup_key(key)], |_, found| {
            response = found.map(|object| (object.epoch, object.replicas));
        });
        self.settle();
        response
    }

    /// Node and segment of each location of an object, in the group's order.
    pub(crate) fn locations(&self, key: &str) -> Vec<(NodeId, SegmentId)> {
        let detail = self.group.query(self.now, &lookup_key(key));
        let locations = detail.map_or(vec![], |detail| detail.locations);
        locations.iter().map(|location| (location.node, location.segment)).collect()
    }

    pub(crate) fn exists(&mut self, key: &str) -> bool {
        let mut there = false;
        self.group.exist(self.now, &[lookup_key(key)], |_, response| there = response);
        there
    }

    pub(crate) fn remove(&mut self, key: &str, force: bool) -> RemoveOutcome {
        let removal = self.group.remove(self.now, &lookup_key(key), force, WaiterId(1), &mut self.effects);
        self.settle();
        removal
    }

    /// Free units of memory.
    pub(crate) fn free_units(&self) -> u64 {
        let memory = self.group.segments().filter(|view| view.medium != Medium::Disk);
        memory.map(|view| u64::from(view.free_units)).sum()
    }
}

/// Nodes with one segment of memory and a disk each.
pub(crate) fn disks(nodes: &[u64]) -> GroupHarness {
    with_disks(config(1), nodes)
}

pub(crate) fn with_disks(config: GroupConfig, nodes: &[u64]) -> GroupHarness {
    let mut harness = GroupHarness::with(config);
    for &node in nodes {
        harness.mount(node, 0, Term::ZERO, false);
        harness.mount_disk(node, 0, false);
    }
    harness
}

/// A complete object of one KiB, as its node reports it.
pub(crate) fn reported(
    harness: &GroupHarness,
    key: &'static str,
    epoch: Epoch,
    slot: u32,
) -> ReportRecord<'static> {
    let extent = Extent { start: 3 * slot, units: 3 };
    ReportRecord {
        slot: SlotId(slot),
        state: ReportState::Ready,
        epoch,
        id: id(key),
        tenant: harness.tenant,
        key: key.as_bytes(),
        object_len: 1024,
        stripe: StripeRange { index: 0, count: 1, offset: 0, len: 1024 },
        root: 77,
        extent,
        payload_offset: extent.span().offset(),
        digestless: false,
        one_sided: false,
        touched: false,
        pin: PinClass::None,
        expires: None,
        cohort: None,
        parent: None,
        extra_replicas: 0,
        spread: None,
        disk_replicas: 0,
    }
}

/// Evicts objects; the commands are not executed yet.
pub(crate) fn evict(harness: &mut GroupHarness, objects: usize) {
    harness.group.evict(harness.now, 0, objects, &mut harness.effects);
    harness.settle();
}

/// Ends a node's session.
pub(crate) fn lose_node(harness: &mut GroupHarness, node: u64, incarnation: u64) {
    harness.group.node_lost(harness.now, NodeId(node), session(node, incarnation), &mut harness.effects);
    harness.settle();
    harness.tick();
}

/// Returns a node with an empty memory and a disk that has not reported yet.
pub(crate) fn return_node(harness: &mut GroupHarness, node: u64, incarnation: u64) {
    harness.mount_disk(node, incarnation, true);
    harness.mount_in(node, incarnation, 0, Term::ZERO, false);
}

pub(crate) fn end_disk_report(harness: &mut GroupHarness, node: u64, incarnation: u64) {
    harness.group.disk_recovered(NodeId(node), session(node, incarnation)).unwrap();
    harness.settle();
}
