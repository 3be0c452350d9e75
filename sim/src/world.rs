//! [`run`]: one seed from beginning to end.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

use moontide_meta::Rng;
use moontide_types::{MonoTime, Term};

use crate::client::Client;
use crate::event::{Event, Events, Message};
use crate::faults::{self, Fault, FaultPlan};
use crate::master::Master;
use crate::network::{Network, NetworkPlan};
use crate::node::{Node, TICK_MS};
use crate::oracle::Oracle;

/// What a run consists of, besides its seed.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    /// Nodes with segments.
    pub nodes: usize,
    /// Clients that put, get and remove.
    pub clients: usize,
    /// Virtual time.
    pub length: Duration,
    /// How bad the network is.
    pub network: NetworkPlan,
    /// How often things break.
    pub faults: FaultPlan,
}

impl Default for Plan {
    fn default() -> Plan {
        Plan {
            nodes: 3,
            clients: 4,
            length: Duration::from_secs(150),
            network: NetworkPlan::default(),
            faults: FaultPlan::default(),
        }
    }
}

/// What a run came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// The seed.
    pub seed: u64,
    /// Events of all kinds.
    pub events: u64,
    /// Operations begun by clients.
    pub ops: u64,
    /// Puts acknowledged.
    pub puts: u64,
    /// Removals acknowledged.
    pub removals: u64,
    /// Gets that gave bytes.
    pub hits: u64,
    /// Gets that gave none.
    pub misses: u64,
    /// Faults scheduled.
    pub faults: u64,
    /// Messages lost.
    pub lost: u64,
    /// The last term.
    pub terms: u32,
    /// Hash of all events in their order.
    pub trace: u64,
}

/// A promise was broken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Violation {
    /// The seed of the run.
    pub seed: u64,
    /// When, in virtual time.
    pub at: MonoTime,
    /// The number of the event.
    pub event: u64,
    /// What.
    pub what: String,
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Violation { seed, at, event, what } = self;
        write!(f, "seed {seed}, event {event}, {} ms: {what}; ", at.0 / 1_000_000)?;
        write!(f, "replay with `cargo run -p moontide-sim -- --seed {seed} --trace`")
    }
}

impl std::error::Error for Violation {}

const MASTER_TICK_MS: u64 = 100;

struct World {
    events: Events,
    network: Network,
    master: Option<Master>,
    term: u32,
    nodes: Vec<Node>,
    clients: Vec<Client>,
    oracle: Oracle,
    shows_trace: bool,
}

/// Runs one seed. With `shows_trace` every event is printed.
pub fn run(seed: u64, plan: &Plan, shows_trace: bool) -> Result<Summary, Violation> {
    let mut seeds = Rng::new(seed);
    let mut events = Events::default();
    let faults =
        faults::schedule(&plan.faults, seeds.next_u64(), plan.length, plan.nodes, plan.clients, &mut events);
    let mut world = World {
        network: Network::new(plan.network, seeds.next_u64(), plan.nodes),
        master: None,
        term: 0,
        nodes: (0..plan.nodes).map(|node| Node::new(node, seeds.next_u64())).collect(),
        clients: (0..plan.clients).map(|client| Client::new(client, seeds.next_u64())).collect(),
        oracle: Oracle::default(),
        events,
        shows_trace,
    };
    world.events.at(MonoTime(0), Event::MasterStarts);
    world.events.at(MonoTime(0), Event::Master);
    for node in 0..plan.nodes {
        world.events.at(MonoTime(node as u64 * 1_000_000), Event::Node { node });
    }
    for client in 0..plan.clients {
        world.events.after_ms(50 + client as u64, Event::Client { client, wake: 0 });
    }
    let end = MonoTime(0).after(plan.length);
    let (mut trace, mut count) = (DefaultHasher::new(), 0);
    while let Some(event) = world.events.next() {
        let at = world.events.now();
        if at > end {
            break;
        }
        count += 1;
        let line = format!("{} {event:?}", at.0);
        line.hash(&mut trace);
        if world.shows_trace {
            println!("{line}");
        }
        world.happens(event).map_err(|what| Violation { seed, at, event: count, what })?;
    }
    Ok(Summary {
        seed,
        events: count,
        ops: world.clients.iter().map(|client| client.ops).sum(),
        puts: world.oracle.puts,
        removals: world.oracle.removals,
        hits: world.oracle.hits,
        misses: world.oracle.misses,
        faults,
        lost: world.network.lost,
        terms: world.term,
        trace: trace.finish(),
    })
}

impl World {
    fn happens(&mut self, event: Event) -> Result<(), String> {
        let World { events, network, oracle, .. } = self;
        match event {
            Event::Client { client, wake } => self.clients[client].wake(wake, events, network, oracle),
            Event::Node { node } => {
                self.nodes[node].tick(events, network);
                events.after_ms(TICK_MS, Event::Node { node });
            }
            Event::Written { node, write } => self.nodes[node].written(write, events, network),
            Event::Master => {
                events.after_ms(MASTER_TICK_MS, Event::Master);
                if let Some(master) = &mut self.master {
                    master.tick(events, network)?;
                }
            }
            Event::MasterStarts => {
                self.term += 1;
                let term = Term::new(self.term).expect("few elections");
                self.master = Some(Master::start(term, events.now()));
            }
            Event::Arrives(message) if network.is_cut(&message, events.now()) => network.lost += 1,
            Event::Arrives(message) => self.arrives(message)?,
            Event::Fault(fault) => self.breaks(fault),
        }
        Ok(())
    }

    fn arrives(&mut self, message: Message) -> Result<(), String> {
        let World { events, network, oracle, master, nodes, clients, .. } = self;
        match message {
            Message::Answer { client, op, answer } => {
                return clients[client].answer(op, answer, events, network, oracle);
            }
            Message::Told { client, op, place, told } => {
                return clients[client].told(op, place, told, events, network, oracle);
            }
            Message::Ask { client, op, node, place, ask } => {
                nodes[node].ask((client, op, place), ask, events, network);
            }
            Message::Opened { node, attempt, session, term } => {
                nodes[node].opened(attempt, session, term, events, network);
            }
            Message::Heard { node, session, alive } => nodes[node].heard(session, alive, events.now()),
            Message::Answered { node, session, number, result } => {
                nodes[node].answered(session, number, result, events, network);
            }
            Message::Order { node, session, number, order } => {
                nodes[node].order(session, number, order, events, network);
            }
            Message::Call { .. }
            | Message::Open { .. }
            | Message::Beat { .. }
            | Message::Request { .. }
            | Message::Outcome { .. } => {
                // Nobody listens while there is no master.
                if let Some(master) = master {
                    arrives_at_master(master, message, events, network);
                }
            }
        }
        Ok(())
    }

    fn breaks(&mut self, fault: Fault) {
        let World { events, network, .. } = self;
        match fault {
            Fault::MasterCrashes { for_ms } => {
                if self.master.take().is_some() {
                    events.after_ms(for_ms, Event::MasterStarts);
                }
            }
            Fault::NodeSilent { node, for_ms } => {
                network.silence(node, events.now().after(Duration::from_millis(for_ms)));
            }
            Fault::NodeRestarts { node } => self.nodes[node].restart(),
            Fault::ClientCrashes { client } => self.clients[client].crash(events),
        }
    }
}

fn arrives_at_master(master: &mut Master, message: Message, events: &mut Events, network: &mut Network) {
    match message {
        Message::Call { client, op, call } => master.call(client, op, call, events, network),
        Message::Open { node, boot, attempt } => master.open(node, boot, attempt, events, network),
        Message::Beat { node, session } => master.beat(node, session, events, network),
        Message::Request { node, session, number, request } => {
            master.request(node, session, number, &request, events, network);
        }
        Message::Outcome { session, number, outcome, .. } => {
            master.outcome(session, number, outcome, events, network);
        }
        _ => unreachable!("not for the master"),
    }
}
