//! [`run`]: simulates one seed.
//!
//! ```text
//!   faults ──▶ all faults healed: every client puts and gets ──▶ everything is removed ──▶ all space is free ──▶ nodes stop
//! ```

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hasher};
use std::rc::Rc;
use std::time::Duration;

use moontide_master::election::RegistryState;
use moontide_proto::v1;
use moontide_rt::sim::{self, FailureKind, WorldConfig};
use moontide_rt::{thread, with_mutation};
use moontide_types::{MonoTime, NodeId};

use crate::client::{Client, Mode};
use crate::clock::HostClock;
use crate::context::ProcessContext;
use crate::event::{
    Envelope, Event, Events, Message, ProcessId, RegistryRequest, RegistryResponse, Timer, hash_event,
};
use crate::faults::{self, Fault, FaultCounts, FaultKind};
use crate::links::{Links, Outgoing};
use crate::master::{Exclusions, LEASE, Master};
use crate::network::Network;
use crate::node::{DiskFailure, NodeHost};
use crate::oracle::{OpTotals, Oracle, WRONG_ANSWER};
use crate::plan::{AimedFault, RunPlan};
use crate::rng::SimRng;
use crate::trace::line;

/// Longest time after the faults are healed until all clients have put and got an object. A new master waits for half a
/// minute before it allocates space that an earlier one may have granted.
const RECOVERY_LIMIT: Duration = Duration::from_secs(90);
/// Longest time until everything is removed, for each key and once. The master waits for a missing node for one minute.
const CLEANUP_LIMIT: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(150));
/// Longest time until all space is free again: reservations and leases expire after half a minute.
const DRAINED_WITHIN: Duration = Duration::from_secs(70);
/// Longest time until all threads of nodes that are told to stop have ended.
const STOPPED_WITHIN: Duration = Duration::from_secs(30);
/// Longest time from the end of the faults until a node reports that it could not start because of one.
const NOT_STARTED_WITHIN: Duration = Duration::from_secs(5);
/// Interval of progress checks.
const CHECK_INTERVAL: Duration = Duration::from_millis(500);

/// Result of a run.
#[derive(Clone, Debug, PartialEq, Eq)]
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
    /// Hash of all events, in order, and of all switches between threads.
    pub trace: u64,
    /// How often each coincidence was reached.
    pub marks: BTreeMap<&'static str, u64>,
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

impl Violation {
    /// Whether a client was given an object that was removed or replaced.
    pub fn is_wrong_answer(&self) -> bool {
        self.what.starts_with(WRONG_ANSWER)
    }
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
    Stopping,
    Over,
}

/// Host of a master, whose process may exit and restart.
#[derive(Default)]
struct MasterHost {
    master: Option<Master>,
    incarnation: u32,
    exclusions: Exclusions,
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
    links: Rc<Links>,
    clients: Vec<Client>,
    /// Paused processes, with the time at which they resume.
    paused: BTreeMap<ProcessId, MonoTime>,
    backlog: BTreeMap<ProcessId, Vec<Event>>,
    phase: Phase,
    phase_since: MonoTime,
    recovered_after: Duration,
}

/// Longest virtual time of a run after its length.
const OVERTIME_MAX: Duration = Duration::from_secs(3600);

/// Runs one seed. Prints every event if `shows_trace` is set. `mutation` is a deliberate bug to enable.
pub fn run(
    seed: u64,
    plan: &RunPlan,
    shows_trace: bool,
    mutation: Option<&'static str>,
) -> Result<Summary, Violation> {
    let config = WorldConfig {
        switch_per_million: plan.switch_per_million,
        stall_per_million: plan.stall_per_million,
        wakes_late: true,
        time_max: plan.length + OVERTIME_MAX,
        ..WorldConfig::new(seed)
    };
    let its_plan = plan.clone();
    let report = sim::run(&config, move || {
        // All threads of a world are on one thread of the operating system, for which the mutation is enabled. The waits of
        // masters use the runtime, too.
        moontide_tasks::sim::with_runtime(seed, || {
            with_mutation(mutation, || World::new(seed, &its_plan).run(seed, shows_trace))
        })
    });
    match report {
        Ok(report) => {
            let summary = report.value?;
            Ok(Summary { trace: summary.trace ^ report.trace, marks: report.marks, ..summary })
        }
        Err(failure) => {
            let what = match &failure.kind {
                FailureKind::Panic { thread, message } if !shows_trace => {
                    format!("thread {thread:?} {message}")
                }
                _ => failure.to_string(),
            };
            let at = MonoTime(failure.elapsed.as_nanos() as u64);
            Err(Violation { seed, length: plan.length, at, event: 0, what })
        }
    }
}

/// Aimed faults are this far apart on average, or farther: a cluster that is hit all the time shows little.
const AIMED_FAULTS_APART: Duration = Duration::from_secs(5);

/// Delays threads of nodes at the places of the plan, and aims its faults.
fn set_hook(plan: &RunPlan, seed: u64, links: Rc<Links>) {
    let (delays, aims, length) = (plan.delays.clone(), plan.aims.clone(), plan.length);
    let most = length.div_duration_f64(AIMED_FAULTS_APART).ceil() as usize;
    let state = RefCell::new((SimRng::new(seed), 0));
    sim::set_mark_hook(Some(Rc::new(move |name| {
        let (aimed, delay) = {
            let (rng, count) = &mut *state.borrow_mut();
            let at_end = *count >= most || sim::elapsed() >= length;
            let aims = aims.iter().filter(|(at, ..)| *at == name && !at_end);
            let hit: Vec<AimedFault> =
                aims.filter(|(_, permille, _)| rng.permille(*permille)).map(|(.., fault)| *fault).collect();
            *count += hit.len();
            let delay = delays.iter().find(|(at, permille, _)| *at == name && rng.permille(*permille));
            (hit, delay.map(|(.., max)| rng.up_to(*max)))
        };
        if let Some(node) = links.running_node().filter(|_| !aimed.is_empty()) {
            aimed.into_iter().for_each(|fault| links.send(Outgoing::Aimed { node, fault }));
            // They happen here, or a little later.
            thread::yield_now();
        }
        delay.into_iter().for_each(thread::sleep);
    })));
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
        let links = Rc::new(Links::new());
        links.set_current();
        moontide_tasks::sim::set_network(Rc::clone(&links) as Rc<dyn moontide_tasks::sim::Network>);
        let node_hosts = (0..plan.nodes).map(|node| NodeHost::new(node, plan, rng.next_u64())).collect();
        set_hook(plan, rng.next_u64(), Rc::clone(&links));
        let mut world = World {
            rng,
            network,
            oracle: Oracle::new(plan.groups),
            clocks,
            registry: RegistryState::default(),
            master_hosts: (0..plan.masters).map(|_| MasterHost::default()).collect(),
            node_hosts,
            links,
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

    /// Handles events until all phases are over, or a guarantee is violated.
    fn run(mut self, seed: u64, shows_trace: bool) -> Result<Summary, Violation> {
        let done = self.drive(seed, shows_trace);
        for node in &mut self.node_hosts {
            node.kill(&self.links);
        }
        done
    }

    fn drive(&mut self, seed: u64, shows_trace: bool) -> Result<Summary, Violation> {
        let (mut trace, mut count) = (DefaultHasher::new(), 0);
        while self.phase != Phase::Over {
            self.events.set_now(MonoTime(sim::elapsed().as_nanos() as u64));
            self.take_outgoing();
            let Some(event) = self.events.next() else {
                let due = self.events.due().expect("there is always something to do");
                // A thread of a node that sends something ends the wait.
                thread::park_timeout(due.since(self.events.now()));
                continue;
            };
            let at = self.events.now();
            count += 1;
            hash_event(at, &event, &mut trace);
            if shows_trace {
                println!("{:>12} {}", at.0 / 1_000, line(&event));
            }
            if let Err(what) = self.happens(event) {
                return Err(Violation { seed, length: self.plan.length, at, event: count, what });
            }
        }
        let terms = self.terms();
        Ok(Summary {
            seed,
            events: count,
            virtual_time: self.events.now().since(MonoTime(0)),
            recovered_after: self.recovered_after,
            tally: self.oracle.tally,
            faults: self.network.counts,
            terms,
            trace: trace.finish(),
            marks: BTreeMap::new(),
        })
    }

    /// Sends what threads of nodes have given to the network.
    fn take_outgoing(&mut self) {
        for outgoing in self.links.take() {
            match outgoing {
                Outgoing::Message { from, to, message } => {
                    self.network.send(&mut self.events, from, to, message);
                }
                Outgoing::Aimed { node, fault } => self.hits(node, fault),
                Outgoing::Ended { node, incarnation, reason } => {
                    if self.node_hosts[node].incarnation() == incarnation {
                        self.not_started(node, &reason);
                    }
                }
            }
        }
    }

    /// A node, or one of its masters, is hit at a place of the node's code.
    fn hits(&mut self, node: usize, fault: AimedFault) {
        if self.phase != Phase::FaultInjection {
            return;
        }
        self.network.counts.add(FaultKind::Aimed);
        let most = self.rng.choose(&[300, 2_000, 8_000]);
        let for_ms = self.rng.within(50, most);
        let fault = match fault {
            AimedFault::Kill => Fault::Crash { process: ProcessId::Node(node), for_ms },
            AimedFault::PowerLoss => Fault::PowerOff { node, for_ms },
            AimedFault::Reset => Fault::Reset { node },
            AimedFault::MasterCrash => {
                let masters = self.links.streams(node);
                let Some(&(_, master)) = masters.get(self.rng.below(masters.len().max(1) as u64) as usize)
                else {
                    return;
                };
                Fault::Crash { process: ProcessId::Master(master), for_ms }
            }
        };
        // Half of them hit later: by then others may know what is not durable, or is not true any more.
        match self.rng.below(2) {
            0 => self.breaks(fault),
            _ => {
                let after = self.rng.choose(&[300, 2_000, 10_000]);
                let after = self.rng.within(1, after);
                self.events.after_ms(after, Event::Fault(fault));
            }
        }
    }

    /// A node could not open its disk. It is started again, as a supervisor would do.
    fn not_started(&mut self, node: usize, reason: &str) {
        // A process that was started before the end of the faults may have met one.
        let is_healed = self.phase != Phase::FaultInjection
            && self.events.now().since(self.phase_since) > NOT_STARTED_WITHIN;
        assert!(!is_healed, "node {node} does not start without faults: {reason}");
        self.network.counts.add(FaultKind::NodeNotStarted);
        self.node_hosts[node].kill(&self.links);
        let after = self.rng.within(100, 5_000);
        self.events.after_ms(after, Event::Starts(ProcessId::Node(node)));
    }

    fn cx(&mut self, process: ProcessId) -> ProcessContext<'_> {
        let incarnation = match process {
            ProcessId::Master(master) => self.master_hosts[master].incarnation,
            ProcessId::Registry => 0,
            ProcessId::Node(node) => self.node_hosts[node].incarnation(),
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
            // A host that was about to lose power has lost it at the end of the faults.
            Event::Fault(fault) if self.phase == Phase::FaultInjection || fault.is_end() => {
                self.breaks(fault)
            }
            Event::Fault(_) => {}
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
                match message {
                    Message::Ask { call, ask } => {
                        let near = self.near_node(from);
                        self.node_hosts[index].ask((from, near), call, ask, &self.links);
                    }
                    Message::Fetch { call, node, request } => {
                        self.node_hosts[index].fetch(from, call, (node, request), &self.links);
                    }
                    message => self.links.arrives(message),
                }
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

    /// Returns the node on the host of a client.
    fn near_node(&self, process: ProcessId) -> Option<NodeId> {
        let ProcessId::Client(client) = process else { return None };
        self.node_hosts[client % self.node_hosts.len()].id()
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
            ProcessId::Node(index) if !self.node_hosts[index].is_running() => {
                let clock = self.clocks[&process].of_process();
                let node = self.node_hosts[index].start(&plan, seed, clock, &self.links);
                self.network.register(node, index);
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
                if let ProcessId::Node(node) = process {
                    self.node_hosts[node].stop();
                }
                self.paused.insert(process, until(for_ms));
                self.events.at(until(for_ms), Event::Resumes(process));
            }
            Fault::Jump { process, by_ms } => {
                self.network.counts.add(FaultKind::WallJump);
                self.clocks.get_mut(&process).expect("every process has a clock").jump(by_ms);
                if let ProcessId::Node(node) = process {
                    self.node_hosts[node].jump_calendar(by_ms);
                }
            }
            Fault::Slow { node, for_ms } => {
                self.network.counts.add(FaultKind::NodeSlow);
                self.network.slow_down(node, until(for_ms));
            }
            Fault::Reset { node } => {
                for (stream, master) in self.links.streams(node) {
                    let ends = (ProcessId::Node(node), ProcessId::Master(master));
                    self.network.break_stream(stream, &mut self.events, ends.0, ends.1);
                }
            }
            Fault::DiskFails { node, failure, for_ms } => {
                self.network.counts.add(match failure {
                    DiskFailure::Writes => FaultKind::DiskFails,
                    DiskFailure::Full => FaultKind::DiskFull,
                });
                self.node_hosts[node].set_disk_fails(&self.plan, Some(failure));
                self.events.after_ms(for_ms, Event::Fault(Fault::DiskHeals { node }));
            }
            Fault::DiskHeals { node } => {
                if self.phase == Phase::FaultInjection {
                    self.node_hosts[node].set_disk_fails(&self.plan, None);
                }
            }
            Fault::PowerFails { node, operations, for_ms } => {
                if operations > 0 && self.node_hosts[node].is_running() {
                    self.node_hosts[node].lose_power_after(operations);
                }
                // The host goes down with its disk, or a little later: nothing that it does then is durable.
                let after = if operations > 0 { self.rng.below(2_000) } else { 0 };
                self.events.after_ms(after, Event::Fault(Fault::PowerOff { node, for_ms }));
            }
            Fault::PowerOff { node, for_ms } => {
                let process = ProcessId::Node(node);
                self.paused.remove(&process);
                self.backlog.remove(&process);
                if self.node_hosts[node].lose_power(&self.links) {
                    self.network.counts.add(FaultKind::PowerLost);
                    self.events.after_ms(for_ms, Event::Starts(process));
                }
            }
            Fault::Stop { node, for_ms } => {
                if self.node_hosts[node].shutdown() {
                    self.network.counts.add(FaultKind::NodeStopped);
                    let incarnation = self.node_hosts[node].incarnation();
                    self.events.after_ms(for_ms, Event::Fault(Fault::StopOver { node, incarnation }));
                }
            }
            Fault::StopOver { node, incarnation } => {
                if self.phase != Phase::Stopping && self.node_hosts[node].incarnation() == incarnation {
                    let process = ProcessId::Node(node);
                    self.paused.remove(&process);
                    self.backlog.remove(&process);
                    self.node_hosts[node].kill(&self.links);
                    self.starts(process);
                }
            }
            Fault::Drain { node, for_ms } => {
                if self.order_drain(node, true) {
                    self.network.counts.add(FaultKind::NodeDrained);
                    self.events.after_ms(for_ms, Event::Fault(Fault::Undrain { node }));
                }
            }
            Fault::Undrain { node } => {
                self.order_drain(node, false);
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

    /// An operator asks all masters to have a node emptied, or no longer. Returns whether one of them knows the node.
    fn order_drain(&self, node: usize, drain: bool) -> bool {
        let Some(node) = self.node_hosts[node].id() else { return false };
        let context = Some(v1::RequestContext { timeout_ms: 5_000, caller: 1, ..Default::default() });
        let request = v1::DrainNodeRequest { context, node: node.0, undrain: !drain };
        let ordered = self.services().map(|service| service.drain_node(&request));
        // All are asked.
        let known =
            ordered.filter(|response| response.context.as_ref().is_some_and(|context| context.code == 0));
        known.count() > 0
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
                if !self.node_hosts[index].kill(&self.links) {
                    return;
                }
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
        if let ProcessId::Node(node) = process {
            self.node_hosts[node].resume();
        }
        for event in self.backlog.remove(&process).into_iter().flatten() {
            self.events.at(now, event);
        }
    }

    fn heals(&mut self) {
        let now = self.events.now();
        sim::end_stalls();
        sim::set_mark_hook(None);
        self.network.heal();
        for process in self.paused.keys().copied().collect::<Vec<_>>() {
            self.paused.insert(process, now);
            self.resumes(process, now);
        }
        for node in 0..self.node_hosts.len() {
            // A host whose power is about to fail loses it now.
            if self.node_hosts[node].is_losing_power() {
                self.node_hosts[node].lose_power(&self.links);
            }
            self.node_hosts[node].heal_disk();
        }
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
                // The masters that were told to end a drain may have crashed since.
                for node in 0..self.node_hosts.len() {
                    if self.node_hosts[node].is_draining() {
                        self.order_drain(node, false);
                    }
                }
                let proved = self.clients.iter().all(|client| client.mode() == Mode::Verified);
                (proved, RECOVERY_LIMIT)
            }
            Phase::Cleaning => (
                self.clients[0].mode() == Mode::Cleaned,
                CLEANUP_LIMIT.0 * self.plan.keys as u32 + CLEANUP_LIMIT.1,
            ),
            Phase::Draining => (self.is_drained()?, DRAINED_WITHIN),
            Phase::Stopping => (self.node_hosts.iter().all(NodeHost::has_stopped), STOPPED_WITHIN),
            Phase::FaultInjection | Phase::Over => return Ok(()),
        };
        if !done && since >= within {
            // A panic: with the trace, its report lists the threads and what they wait for.
            panic!("{}", self.complaint(since));
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
            Phase::Draining => {
                for host in &self.node_hosts {
                    host.shutdown();
                }
                self.enters(Phase::Stopping);
            }
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
        let taken: u64 = self.node_hosts.iter().map(NodeHost::taken_units).sum();
        let stored: u64 = self.node_hosts.iter().map(NodeHost::disk_records).sum();
        Ok(free && taken == 0 && stored == 0)
    }

    fn complaint(&self, since: Duration) -> String {
        let modes: Vec<Mode> = self.clients.iter().map(Client::mode).collect();
        let mounted: Vec<bool> = self.node_hosts.iter().map(NodeHost::is_reported).collect();
        let taken: Vec<u64> = self.node_hosts.iter().map(NodeHost::taken_units).collect();
        let stored: Vec<u64> = self.node_hosts.iter().map(NodeHost::disk_records).collect();
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
