//! [`run`]: simulates one seed.
//!
//! ```text
//!   faults ──▶ all faults healed: every client puts and gets ──▶ everything is removed ──▶ all space is free
//! ```

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hasher};
use std::time::Duration;

use moontide_master::election::RegistryState;
use moontide_types::MonoTime;

use crate::client::{Client, Mode};
use crate::clock::HostClock;
use crate::context::ProcessContext;
use crate::event::{
    Envelope, Event, Events, Message, ProcessId, RegistryRequest, RegistryResponse, Timer, hash_event,
};
use crate::faults::{self, Fault, FaultCounts, FaultKind};
use crate::master::{Exclusions, LEASE, Master};
use crate::network::Network;
use crate::node::{DiskImage, Node};
use crate::oracle::{OpTotals, Oracle};
use crate::plan::RunPlan;
use crate::rng::SimRng;
use crate::trace::line;

/// Longest time after the faults are healed until all clients have put and got an object. A new master waits for half a
/// minute before it allocates space that an earlier one may have granted.
const RECOVERY_LIMIT: Duration = Duration::from_secs(90);
/// Longest time until everything is removed. The master waits for a missing node for one minute.
const CLEANUP_LIMIT: Duration = Duration::from_secs(150);
/// Longest time until all space is free again: reservations and leases expire after half a minute.
const DRAINED_WITHIN: Duration = Duration::from_secs(70);
/// Interval of progress checks.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// Result of a run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// Seed of the run.
    pub seed: u64,
    /// Number of events of all kinds.
    pub events: u64,
    /// Length of the run, in virtual time.
    pub virtual_time: Duration,
    /// Time from the end of the faults until all clients could put and get.
    pub recovered_after: Duration,
    /// Totals of the operations of all clients.
    pub tally: OpTotals,
    /// Number of faults of each kind.
    pub faults: FaultCounts,
    /// Last term of a master.
    pub terms: u32,
    /// Hash of all events, in order.
    pub trace: u64,
}

/// Violation of a guarantee.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// Seed of the run; needed to repeat it.
    pub seed: u64,
    /// Length of the run; needed to repeat it.
    pub length: Duration,
    /// Virtual time of the violation.
    pub at: MonoTime,
    /// Number of the event that caused it.
    pub event: u64,
    /// Description.
    pub what: String,
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Violation { seed, length, at, event, what } = self;
        write!(f, "seed {seed}, event {event}, {} ms: {what}; ", at.0 / 1_000_000)?;
        write!(f, "replay with `cargo xtask sim --seed {seed} --seconds {} --trace`", length.as_secs())
    }
}

impl std::error::Error for Violation {}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    FaultInjection,
    Recovery,
    Cleaning,
    Draining,
    Over,
}

/// Host of a master, whose process may exit and restart.
#[derive(Default)]
struct MasterHost {
    master: Option<Master>,
    incarnation: u32,
    exclusions: Exclusions,
}

/// Host of a node, whose process may exit and restart.
struct NodeHost {
    node: Option<Node>,
    incarnation: u32,
    numbers: u64,
    /// Content of the disk while no process runs.
    disk_image: DiskImage,
}

struct World {
    plan: RunPlan,
    rng: SimRng,
    events: Events,
    network: Network,
    oracle: Oracle,
    clocks: BTreeMap<ProcessId, HostClock>,
    registry: RegistryState,
    master_hosts: Vec<MasterHost>,
    node_hosts: Vec<NodeHost>,
    clients: Vec<Client>,
    /// Paused processes, with the time at which they resume.
    paused: BTreeMap<ProcessId, MonoTime>,
    backlog: BTreeMap<ProcessId, Vec<Event>>,
    phase: Phase,
    phase_since: MonoTime,
    recovered_after: Duration,
}

/// Runs one seed. Prints every event if `shows_trace` is set.
pub fn run(seed: u64, plan: &RunPlan, shows_trace: bool) -> Result<Summary, Violation> {
    let mut world = World::new(seed, plan);
    let (mut trace, mut count) = (DefaultHasher::new(), 0);
    while world.phase != Phase::Over {
        let event = world.events.next().expect("there is always something to do");
        let at = world.events.now();
        count += 1;
        hash_event(at, &event, &mut trace);
        if shows_trace {
            println!("{:>12} {}", at.0 / 1_000, line(&event));
        }
        let violation = |what| Violation { seed, length: plan.length, at, event: count, what };
        world.happens(event).map_err(violation)?;
    }
    Ok(Summary {
        seed,
        events: count,
        virtual_time: world.events.now().since(MonoTime(0)),
        recovered_after: world.recovered_after,
        tally: world.oracle.tally,
        faults: world.network.counts,
        terms: world.terms(),
        trace: trace.finish(),
    })
}

impl World {
    fn new(seed: u64, plan: &RunPlan) -> World {
        let mut rng = SimRng::new(seed);
        let mut events = Events::default();
        faults::schedule(plan, rng.next_u64(), &mut events);
        let mut network = Network::new(plan.network, rng.next_u64(), plan.nodes);
        let processes = std::iter::once(ProcessId::Registry)
            .chain((0..plan.masters).map(ProcessId::Master))
            .chain((0..plan.nodes).map(ProcessId::Node))
            .chain((0..plan.clients).map(ProcessId::Client));
        let mut clocks = BTreeMap::new();
        for process in processes {
            let most = plan.drift_ppm_max;
            let drift = rng.within(0, 2 * most) as i64 - most as i64;
            if drift != 0 {
                network.counts.add(FaultKind::Drift);
            }
            clocks.insert(process, HostClock::new(drift, rng.below(1 << 50)));
        }
        let host = |_| NodeHost { node: None, incarnation: 0, numbers: 0, disk_image: DiskImage::default() };
        let mut world = World {
            rng,
            network,
            oracle: Oracle::new(plan.groups),
            clocks,
            registry: RegistryState::default(),
            master_hosts: (0..plan.masters).map(|_| MasterHost::default()).collect(),
            node_hosts: (0..plan.nodes).map(host).collect(),
            clients: Vec::new(),
            paused: BTreeMap::new(),
            backlog: BTreeMap::new(),
            phase: Phase::FaultInjection,
            phase_since: MonoTime(0),
            recovered_after: Duration::ZERO,
            plan: plan.clone(),
            events,
        };
        // Where masters are added later, there is one at first.
        let adds = plan.faults.iter().any(|(kind, _)| *kind == FaultKind::MasterAdded);
        let masters = if adds { 1 } else { plan.masters };
        (0..masters).for_each(|master| world.starts(ProcessId::Master(master)));
        (0..plan.nodes).for_each(|node| world.starts(ProcessId::Node(node)));
        for client in 0..plan.clients {
            let seed = world.rng.next_u64();
            let mut cx = world.cx(ProcessId::Client(client));
            let client = Client::start(client, plan, seed, &mut cx);
            world.clients.push(client);
        }
        world.events.at(MonoTime(0).after(plan.length), Event::Heal);
        world
    }

    fn cx(&mut self, process: ProcessId) -> ProcessContext<'_> {
        let incarnation = match process {
            ProcessId::Master(master) => self.master_hosts[master].incarnation,
            ProcessId::Registry => 0,
            ProcessId::Node(node) => self.node_hosts[node].incarnation,
            ProcessId::Client(_) => 0,
        };
        let clock = self.clocks[&process];
        let World { events, network, oracle, registry, .. } = self;
        ProcessContext { events, network, oracle, registry, process, incarnation, clock }
    }

    fn happens(&mut self, event: Event) -> Result<(), String> {
        let now = self.events.now();
        if let Some(process) = event.needs().filter(|process| self.paused.contains_key(process)) {
            self.backlog.entry(process).or_default().push(event);
            return Ok(());
        }
        match event {
            Event::Deliver(envelope) => {
                if !self.network.drops(&envelope, now) {
                    self.arrives(*envelope)?;
                }
            }
            Event::Timer { process, incarnation, timer } => self.wakes(process, incarnation, timer)?,
            Event::Fault(fault) => self.breaks(fault),
            Event::Starts(process) => self.starts(process),
            Event::Resumes(process) => self.resumes(process, now),
            Event::Heal => self.heals(),
            Event::CheckProgress => self.judges()?,
        }
        Ok(())
    }

    /// Runs something at a process that is there.
    fn arrives(&mut self, envelope: Envelope) -> Result<(), String> {
        let Envelope { from, to, message } = envelope;
        match to {
            ProcessId::Registry => {
                self.registry(from, message);
                Ok(())
            }
            ProcessId::Master(index) => {
                let Some(mut master) = self.master_hosts[index].master.take() else { return Ok(()) };
                let done = master.arrives(from, message, &mut self.cx(to));
                self.keep_master(index, master);
                done
            }
            ProcessId::Node(index) => {
                let Some(mut node) = self.node_hosts[index].node.take() else { return Ok(()) };
                node.arrives(from, message, &mut self.cx(to));
                self.node_hosts[index].node = Some(node);
                Ok(())
            }
            ProcessId::Client(client) => {
                let World { clients, events, network, oracle, registry, clocks, .. } = self;
                let mut cx = ProcessContext {
                    events,
                    network,
                    oracle,
                    registry,
                    process: to,
                    incarnation: 0,
                    clock: clocks[&to],
                };
                clients[client].arrives(message, &mut cx)
            }
        }
    }

    fn wakes(&mut self, process: ProcessId, incarnation: u32, timer: Timer) -> Result<(), String> {
        match (process, timer) {
            (ProcessId::Master(index), Timer::Master(timer))
                if incarnation == self.master_hosts[index].incarnation =>
            {
                let Some(mut master) = self.master_hosts[index].master.take() else { return Ok(()) };
                let done = master.wake(timer, &mut self.cx(process));
                self.keep_master(index, master);
                done
            }
            (ProcessId::Node(index), Timer::Node(timer))
                if incarnation == self.node_hosts[index].incarnation =>
            {
                let Some(mut node) = self.node_hosts[index].node.take() else { return Ok(()) };
                node.wake(timer, &mut self.cx(process));
                self.node_hosts[index].node = Some(node);
                Ok(())
            }
            (ProcessId::Client(client), Timer::Client(timer)) => {
                let World { clients, events, network, oracle, registry, clocks, .. } = self;
                let mut cx = ProcessContext {
                    events,
                    network,
                    oracle,
                    registry,
                    process,
                    incarnation: 0,
                    clock: clocks[&process],
                };
                clients[client].wake(timer, &mut cx)
            }
            _ => Ok(()), // timer of an earlier incarnation
        }
    }

    /// Puts a master back after an event, or removes it if it has retired.
    fn keep_master(&mut self, index: usize, mut master: Master) {
        for _ in 0..master.take_handed_over() {
            self.network.counts.add(FaultKind::HandedOver);
        }
        if master.has_left() {
            self.network.counts.add(FaultKind::MasterRetired);
            let after = self.rng.within(100, 30_000);
            self.events.after_ms(after, Event::Starts(ProcessId::Master(index)));
        } else {
            self.master_hosts[index].master = Some(master);
        }
    }

    /// A call to the registry, which has a clock of its own.
    fn registry(&mut self, from: ProcessId, message: Message) {
        let Message::Registry { call, request } = message else { unreachable!("not for a registry") };
        let mut cx = self.cx(ProcessId::Registry);
        let now = cx.now();
        let reply = |registry: &mut RegistryState| match request {
            RegistryRequest::Read => RegistryResponse::Seen(registry.read(now)),
            RegistryRequest::Write { token, document } => {
                RegistryResponse::Wrote(registry.write(token.as_ref(), &document))
            }
            RegistryRequest::Join { number, addresses, lease } => {
                registry.join(now, number, &addresses, lease);
                RegistryResponse::Done
            }
            RegistryRequest::Renew { number } => RegistryResponse::Renewed(registry.renew(now, number)),
            RegistryRequest::Remove { number } => {
                registry.remove(number);
                RegistryResponse::Done
            }
        };
        let reply = reply(cx.registry);
        cx.send(from, Message::RegistryResponse { call, reply });
    }

    /// The last term.
    fn terms(&mut self) -> u32 {
        if !self.plan.multi_master {
            return self.master_hosts[0].incarnation;
        }
        let now = self.clocks[&ProcessId::Registry].mono(self.events.now());
        self.registry.read(now).document.map_or(0, |(_, document)| document.last_term)
    }

    fn starts(&mut self, process: ProcessId) {
        let seed = self.rng.next_u64();
        let plan = self.plan.clone();
        match process {
            ProcessId::Master(index) if self.master_hosts[index].master.is_none() => {
                let host = &mut self.master_hosts[index];
                host.incarnation += 1;
                let exclusions = Exclusions::clone(&host.exclusions);
                let master = Master::start(index, &plan, seed, &exclusions, &mut self.cx(process));
                self.master_hosts[index].master = Some(master);
            }
            ProcessId::Node(index) if self.node_hosts[index].node.is_none() => {
                self.node_hosts[index].incarnation += 1;
                let numbers = self.node_hosts[index].numbers;
                let disk_image = std::mem::take(&mut self.node_hosts[index].disk_image).recovered();
                let node = Node::start(index, &plan, seed, numbers, disk_image, &mut self.cx(process));
                self.node_hosts[index].node = Some(node);
            }
            _ => {}
        }
    }

    fn breaks(&mut self, fault: Fault) {
        let now = self.events.now();
        let until = |for_ms| now.after(Duration::from_millis(for_ms));
        match fault {
            Fault::Partition { kind, cut, for_ms } => {
                self.network.counts.add(kind);
                self.network.cut(cut, now, until(for_ms));
            }
            Fault::Crash { process, for_ms } => self.crashes(process, for_ms),
            Fault::Pause { process, for_ms } => {
                if self.paused.contains_key(&process) {
                    return;
                }
                self.network.counts.add(match process {
                    ProcessId::Master(_) if Duration::from_millis(for_ms) > LEASE => FaultKind::MasterFrozen,
                    ProcessId::Registry | ProcessId::Master(_) => FaultKind::MasterPause,
                    ProcessId::Node(_) => FaultKind::NodePause,
                    ProcessId::Client(_) => FaultKind::ClientPause,
                });
                self.paused.insert(process, until(for_ms));
                self.events.at(until(for_ms), Event::Resumes(process));
            }
            Fault::Jump { process, by_ms } => {
                self.network.counts.add(FaultKind::WallJump);
                self.clocks.get_mut(&process).expect("every process has a clock").jump(by_ms);
            }
            Fault::Slow { node, for_ms } => {
                self.network.counts.add(FaultKind::NodeSlow);
                self.network.slow_down(node, until(for_ms));
            }
            Fault::Reset { node } => {
                let streams: Vec<(u64, usize)> =
                    self.node_hosts[node].node.iter().flat_map(|node| node.streams()).collect();
                for (stream, master) in streams {
                    let ends = (ProcessId::Node(node), ProcessId::Master(master));
                    self.network.break_stream(stream, &mut self.events, ends.0, ends.1);
                }
            }
            Fault::DiskFails { node, for_ms } => {
                self.network.counts.add(FaultKind::DiskFails);
                if let Some(mut there) = self.node_hosts[node].node.take() {
                    there.disk_fails(Duration::from_millis(for_ms), &self.cx(ProcessId::Node(node)));
                    self.node_hosts[node].node = Some(there);
                }
            }
            Fault::Added { master } => {
                if self.master_hosts[master].master.is_none() {
                    self.network.counts.add(FaultKind::MasterAdded);
                    self.starts(ProcessId::Master(master));
                }
            }
            Fault::Retired { master: index } => {
                if let Some(mut master) = self.master_hosts[index].master.take() {
                    master.retire(&mut self.cx(ProcessId::Master(index)));
                    self.master_hosts[index].master = Some(master);
                }
            }
        }
    }

    fn crashes(&mut self, process: ProcessId, for_ms: u64) {
        self.paused.remove(&process);
        self.backlog.remove(&process);
        match process {
            ProcessId::Registry => return,
            ProcessId::Master(index) => {
                if self.master_hosts[index].master.take().is_none() {
                    return;
                }
                let outlived = self.plan.multi_master && Duration::from_millis(for_ms) >= LEASE;
                let kind = if outlived { FaultKind::MasterOutlived } else { FaultKind::MasterCrash };
                self.network.counts.add(kind);
            }
            ProcessId::Node(index) => {
                let Some(node) = self.node_hosts[index].node.take() else { return };
                self.node_hosts[index].numbers = node.numbers();
                self.node_hosts[index].disk_image = node.disk_image();
                self.network.counts.add(FaultKind::NodeCrash);
            }
            ProcessId::Client(client) => {
                self.network.counts.add(FaultKind::ClientCrash);
                let World { clients, events, network, oracle, registry, clocks, .. } = self;
                let mut cx = ProcessContext {
                    events,
                    network,
                    oracle,
                    registry,
                    process,
                    incarnation: 0,
                    clock: clocks[&process],
                };
                if clients[client].crash(Duration::from_millis(for_ms), &mut cx) {
                    self.network.counts.add(FaultKind::PutCutShort);
                }
                return;
            }
        }
        self.events.after_ms(for_ms, Event::Starts(process));
    }

    fn resumes(&mut self, process: ProcessId, now: MonoTime) {
        if self.paused.get(&process).is_none_or(|&until| until > now) {
            return; // it went on before, or was stopped again
        }
        self.paused.remove(&process);
        for event in self.backlog.remove(&process).into_iter().flatten() {
            self.events.at(now, event);
        }
    }

    fn heals(&mut self) {
        let now = self.events.now();
        self.network.heal();
        for process in self.paused.keys().copied().collect::<Vec<_>>() {
            self.paused.insert(process, now);
            self.resumes(process, now);
        }
        self.node_hosts.iter_mut().filter_map(|host| host.node.as_mut()).for_each(Node::disk_heals);
        (0..self.master_hosts.len()).for_each(|master| self.starts(ProcessId::Master(master)));
        (0..self.node_hosts.len()).for_each(|node| self.starts(ProcessId::Node(node)));
        self.set_modes(|_| Some(Mode::Verifying { put: false }));
        self.enters(Phase::Recovery);
    }

    fn set_modes(&mut self, mode: impl Fn(usize) -> Option<Mode>) {
        for index in 0..self.clients.len() {
            let World { clients, events, network, oracle, registry, clocks, .. } = self;
            let process = ProcessId::Client(index);
            let mut cx = ProcessContext {
                events,
                network,
                oracle,
                registry,
                process,
                incarnation: 0,
                clock: clocks[&process],
            };
            if let Some(mode) = mode(index) {
                clients[index].set_mode(mode, &mut cx);
            }
        }
    }

    fn enters(&mut self, phase: Phase) {
        self.phase = phase;
        self.phase_since = self.events.now();
        self.events.after(CHECK_INTERVAL, Event::CheckProgress);
    }

    /// Looks whether what comes after the faults is done, and goes on, or complains when it takes too long.
    fn judges(&mut self) -> Result<(), String> {
        let since = self.events.now().since(self.phase_since);
        let (done, within) = match self.phase {
            Phase::Recovery => {
                let proved = self.clients.iter().all(|client| client.mode() == Mode::Verified);
                (proved, RECOVERY_LIMIT)
            }
            Phase::Cleaning => (self.clients[0].mode() == Mode::Cleaned, CLEANUP_LIMIT),
            Phase::Draining => (self.is_drained()?, DRAINED_WITHIN),
            Phase::FaultInjection | Phase::Over => return Ok(()),
        };
        if !done && since >= within {
            return Err(self.complaint(since));
        }
        if !done {
            self.events.after(CHECK_INTERVAL, Event::CheckProgress);
            return Ok(());
        }
        match self.phase {
            Phase::Recovery => {
                self.recovered_after = since;
                self.set_modes(|client| (client == 0).then_some(Mode::Cleaning { key: 0 }));
                self.enters(Phase::Cleaning);
            }
            Phase::Cleaning => self.enters(Phase::Draining),
            _ => self.phase = Phase::Over,
        }
        Ok(())
    }

    fn services(&self) -> impl Iterator<Item = &std::sync::Arc<moontide_master::Service>> {
        self.master_hosts.iter().filter_map(|host| host.master.as_ref()?.service())
    }

    fn is_drained(&self) -> Result<bool, String> {
        let mut free = true;
        for service in self.services() {
            service.audit()?;
            let stats = service.stats();
            free &= stats.objects == 0 && stats.free_units == stats.units && stats.used_slots == 0;
        }
        let hosted: usize = self.services().map(|service| service.hosted_count()).sum();
        free &= hosted == usize::from(self.plan.groups);
        let taken: u64 = self.node_hosts.iter().flat_map(|host| &host.node).map(Node::taken_units).sum();
        let stored: usize = self.node_hosts.iter().flat_map(|host| &host.node).map(Node::disk_records).sum();
        Ok(free && taken == 0 && stored == 0)
    }

    fn complaint(&self, since: Duration) -> String {
        let modes: Vec<Mode> = self.clients.iter().map(Client::mode).collect();
        let mounted: Vec<bool> =
            self.node_hosts.iter().map(|host| host.node.as_ref().is_some_and(Node::is_mounted)).collect();
        let taken: Vec<u64> =
            self.node_hosts.iter().map(|host| host.node.as_ref().map_or(0, Node::taken_units)).collect();
        let stored: Vec<usize> =
            self.node_hosts.iter().map(|host| host.node.as_ref().map_or(0, Node::disk_records)).collect();
        let stats = self.services().map(|service| {
            let s = service.stats();
            let hosted = service.hosted_count();
            format!(
                "{hosted} groups, {} objects ({} being written), units {} = {} live + {} reserved + {} draining + {} free, {} slots, {} sessions",
                s.objects, s.objects_writing, s.units, s.live_units, s.reserved_units, s.draining_units, s.free_units,
                s.used_slots, s.sessions
            )
        });
        format!(
            "{:?} not done {} s after the end of the faults; clients {modes:?}; nodes mounted {mounted:?}, units taken \
             {taken:?}, records on disks {stored:?}; masters: {}",
            self.phase,
            since.as_secs(),
            stats.collect::<Vec<_>>().join("; "),
        )
    }
}
