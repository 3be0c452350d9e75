//! [`run`]: one seed from beginning to end.
//!
//! ```text
//!   things break ──▶ all is mended: every client puts and gets ──▶ everything is removed ──▶ all space is free
//! ```

use std::collections::BTreeMap;
use std::hash::{DefaultHasher, Hasher};
use std::time::Duration;

use moontide_master::election::Board;
use moontide_types::MonoTime;

use crate::client::{Client, Mode};
use crate::clock::HostClock;
use crate::dice::Dice;
use crate::event::{Event, Events, Letter, Message, RegistryAnswer, RegistryRequest, Timer, Who, mark};
use crate::faults::{self, Fault, FaultCounts, FaultKind};
use crate::master::{LEASE, Master};
use crate::network::Network;
use crate::node::{Node, Platter};
use crate::oracle::{Oracle, Tally};
use crate::plan::Plan;
use crate::scene::Scene;
use crate::trace::line;

/// Within this time after everything was mended all clients must have put and got something. A master that has just
/// started waits for half a minute before it gives space out that an earlier one may have given.
const PROVED_WITHIN: Duration = Duration::from_secs(90);
/// Within this time everything is removed. A node that went away is waited for, for a minute.
const CLEANED_WITHIN: Duration = Duration::from_secs(150);
/// Within this time all space is free again: a reservation ends after half a minute, and so does a lease.
const DRAINED_WITHIN: Duration = Duration::from_secs(70);
/// How often it is looked.
const JUDGED_EVERY: Duration = Duration::from_millis(500);
/// How long a new master waits for nodes of the time before it, and some.
const UNSETTLED: Duration = Duration::from_secs(33);

/// What a run came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Summary {
    /// The seed.
    pub seed: u64,
    /// Events of all kinds.
    pub events: u64,
    /// How long it was, in virtual time.
    pub virtual_time: Duration,
    /// How long it took until all clients could put and get after everything was mended.
    pub proved_after: Duration,
    /// What clients saw.
    pub tally: Tally,
    /// What broke.
    pub faults: FaultCounts,
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
    /// Length of the run, which is a part of what has to be repeated.
    pub length: Duration,
    /// When, in virtual time.
    pub at: MonoTime,
    /// The number of the event.
    pub event: u64,
    /// What.
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
    Breaking,
    Proving,
    Cleaning,
    Draining,
    Over,
}

/// A master's place: its process comes and goes.
#[derive(Default)]
struct Throne {
    master: Option<Master>,
    life: u32,
    /// How many groups it had when it was looked at, and since when it has as many.
    hosted: (usize, MonoTime),
}

/// A node's place: its process comes and goes.
struct Seat {
    node: Option<Node>,
    life: u32,
    numbers: u64,
    /// What is on its disk, while no process has it.
    platter: Platter,
}

struct World {
    plan: Plan,
    dice: Dice,
    events: Events,
    network: Network,
    oracle: Oracle,
    clocks: BTreeMap<Who, HostClock>,
    board: Board,
    /// When the registry's document was changed last.
    written: MonoTime,
    thrones: Vec<Throne>,
    seats: Vec<Seat>,
    clients: Vec<Client>,
    /// Processes that are stopped, and what waits for them.
    paused: BTreeMap<Who, MonoTime>,
    backlog: BTreeMap<Who, Vec<Event>>,
    phase: Phase,
    phase_since: MonoTime,
    proved_after: Duration,
}

/// Runs one seed. With `shows_trace` every event is printed.
pub fn run(seed: u64, plan: &Plan, shows_trace: bool) -> Result<Summary, Violation> {
    let mut world = World::new(seed, plan);
    let (mut trace, mut count) = (DefaultHasher::new(), 0);
    while world.phase != Phase::Over {
        let event = world.events.next().expect("there is always something to do");
        let at = world.events.now();
        count += 1;
        mark(at, &event, &mut trace);
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
        proved_after: world.proved_after,
        tally: world.oracle.tally,
        faults: world.network.counts,
        terms: world.terms(),
        trace: trace.finish(),
    })
}

impl World {
    fn new(seed: u64, plan: &Plan) -> World {
        let mut dice = Dice::new(seed);
        let mut events = Events::default();
        faults::schedule(plan, dice.draw(), &mut events);
        let mut network = Network::new(plan.network, dice.draw(), plan.nodes);
        let everybody = std::iter::once(Who::Registry)
            .chain((0..plan.masters).map(Who::Master))
            .chain((0..plan.nodes).map(Who::Node))
            .chain((0..plan.clients).map(Who::Client));
        let mut clocks = BTreeMap::new();
        for who in everybody {
            let most = plan.drift_ppm_max;
            let drift = dice.within(0, 2 * most) as i64 - most as i64;
            if drift != 0 {
                network.counts.add(FaultKind::Drift);
            }
            clocks.insert(who, HostClock::new(drift, dice.below(1 << 50)));
        }
        let seat = |_| Seat { node: None, life: 0, numbers: 0, platter: Platter::default() };
        let mut world = World {
            dice,
            network,
            oracle: Oracle::new(plan.groups),
            clocks,
            board: Board::default(),
            written: MonoTime(0),
            thrones: (0..plan.masters).map(|_| Throne::default()).collect(),
            seats: (0..plan.nodes).map(seat).collect(),
            clients: Vec::new(),
            paused: BTreeMap::new(),
            backlog: BTreeMap::new(),
            phase: Phase::Breaking,
            phase_since: MonoTime(0),
            proved_after: Duration::ZERO,
            plan: plan.clone(),
            events,
        };
        // Where masters are added later, there is one at first.
        let adds = plan.faults.iter().any(|(kind, _)| *kind == FaultKind::MasterAdded);
        let masters = if adds { 1 } else { plan.masters };
        (0..masters).for_each(|master| world.starts(Who::Master(master)));
        (0..plan.nodes).for_each(|node| world.starts(Who::Node(node)));
        for client in 0..plan.clients {
            let seed = world.dice.draw();
            let mut scene = world.scene(Who::Client(client));
            let client = Client::start(client, plan, seed, &mut scene);
            world.clients.push(client);
        }
        world.events.at(MonoTime(0).after(plan.length), Event::Heals);
        world
    }

    fn scene(&mut self, who: Who) -> Scene<'_> {
        let life = match who {
            Who::Master(master) => self.thrones[master].life,
            Who::Registry => 0,
            Who::Node(node) => self.seats[node].life,
            Who::Client(_) => 0,
        };
        let clock = self.clocks[&who];
        let World { events, network, oracle, board, .. } = self;
        Scene { events, network, oracle, board, who, life, clock }
    }

    fn happens(&mut self, event: Event) -> Result<(), String> {
        let now = self.events.now();
        if let Some(who) = event.needs().filter(|who| self.paused.contains_key(who)) {
            self.backlog.entry(who).or_default().push(event);
            return Ok(());
        }
        match event {
            Event::Arrives(letter) => {
                if !self.network.is_lost(&letter, now) {
                    self.arrives(*letter)?;
                }
            }
            Event::Timer { who, life, timer } => self.wakes(who, life, timer)?,
            Event::Fault(fault) => self.breaks(fault),
            Event::Starts(who) => self.starts(who),
            Event::Resumes(who) => self.resumes(who, now),
            Event::Heals => self.heals(),
            Event::Judged => self.judges()?,
        }
        Ok(())
    }

    /// Runs something at a process that is there.
    fn arrives(&mut self, letter: Letter) -> Result<(), String> {
        let Letter { from, to, message } = letter;
        match to {
            Who::Registry => {
                self.registry(from, message);
                Ok(())
            }
            Who::Master(index) => {
                let Some(mut master) = self.thrones[index].master.take() else { return Ok(()) };
                let done = master.arrives(from, message, &mut self.scene(to));
                self.stays(index, master);
                done
            }
            Who::Node(index) => {
                let Some(mut node) = self.seats[index].node.take() else { return Ok(()) };
                node.arrives(from, message, &mut self.scene(to));
                self.sits_down(index, node);
                Ok(())
            }
            Who::Client(client) => {
                let World { clients, events, network, oracle, board, clocks, .. } = self;
                let mut scene =
                    Scene { events, network, oracle, board, who: to, life: 0, clock: clocks[&to] };
                clients[client].arrives(message, &mut scene)
            }
        }
    }

    fn wakes(&mut self, who: Who, life: u32, timer: Timer) -> Result<(), String> {
        match (who, timer) {
            (Who::Master(index), Timer::Master(timer)) if life == self.thrones[index].life => {
                let Some(mut master) = self.thrones[index].master.take() else { return Ok(()) };
                let done = master.wake(timer, &mut self.scene(who));
                self.stays(index, master);
                self.look_for_trouble();
                done
            }
            (Who::Node(index), Timer::Node(timer)) if life == self.seats[index].life => {
                let Some(mut node) = self.seats[index].node.take() else { return Ok(()) };
                node.wake(timer, &mut self.scene(who));
                self.sits_down(index, node);
                Ok(())
            }
            (Who::Client(client), Timer::Client(timer)) => {
                let World { clients, events, network, oracle, board, clocks, .. } = self;
                let mut scene = Scene { events, network, oracle, board, who, life: 0, clock: clocks[&who] };
                clients[client].wake(timer, &mut scene)
            }
            _ => Ok(()), // of an earlier life
        }
    }

    fn sits_down(&mut self, index: usize, node: Node) {
        if !node.is_mounted() {
            self.oracle.trouble(self.events.now());
        }
        self.seats[index].node = Some(node);
    }

    /// Something happened at a master: it stays, or has retired.
    fn stays(&mut self, index: usize, mut master: Master) {
        for _ in 0..master.take_handed_over() {
            self.network.counts.add(FaultKind::HandedOver);
        }
        if master.has_left() {
            self.network.counts.add(FaultKind::MasterRetired);
            let after = self.dice.within(100, 30_000);
            self.events.after_ms(after, Event::Starts(Who::Master(index)));
        } else {
            self.thrones[index].master = Some(master);
        }
    }

    /// A call to the registry, which has a clock of its own.
    fn registry(&mut self, from: Who, message: Message) {
        let Message::Registry { call, request } = message else { unreachable!("not for a registry") };
        let mut scene = self.scene(Who::Registry);
        let now = scene.now();
        let answer = |board: &mut Board| match request {
            RegistryRequest::Read => RegistryAnswer::Seen(board.read(now)),
            RegistryRequest::Write { token, document } => {
                RegistryAnswer::Wrote(board.write(token.as_ref(), &document))
            }
            RegistryRequest::Join { number, addresses, lease } => {
                board.join(now, number, &addresses, lease);
                RegistryAnswer::Done
            }
            RegistryRequest::Renew { number } => RegistryAnswer::Renewed(board.renew(now, number)),
            RegistryRequest::Remove { number } => {
                board.remove(number);
                RegistryAnswer::Done
            }
        };
        let answer = answer(scene.board);
        let writes = matches!(answer, RegistryAnswer::Wrote(true));
        scene.send(from, Message::RegistryAnswer { call, answer });
        if writes {
            self.written = self.events.now();
        }
    }

    /// The last term.
    fn terms(&mut self) -> u32 {
        if !self.plan.shared {
            return self.thrones[0].life;
        }
        let now = self.clocks[&Who::Registry].mono(self.events.now());
        self.board.read(now).document.map_or(0, |(_, document)| document.last_term)
    }

    /// While something is out of order, a put that replaces does not wait for everybody.
    fn look_for_trouble(&mut self) {
        let now = self.events.now();
        let written = self.plan.shared && now.since(self.written) <= UNSETTLED;
        let (mut hosted, mut settled) = (0, !written);
        for throne in &mut self.thrones {
            let service = throne.master.as_ref().and_then(Master::service);
            let count = service.map_or(0, |service| service.hosted_count());
            if throne.hosted.0 != count {
                throne.hosted = (count, now);
            }
            hosted += count;
            settled &= throne.hosted.1 == MonoTime(0) || now.since(throne.hosted.1) > UNSETTLED;
            let known = |service: &std::sync::Arc<moontide_master::Service>| {
                service.nodes().len() == self.seats.len()
            };
            settled &= count == 0 || service.is_some_and(known);
        }
        let mounted = |seat: &Seat| seat.node.as_ref().is_some_and(Node::is_mounted);
        let complete = hosted == usize::from(self.plan.groups);
        if !(settled && complete && self.paused.is_empty() && self.seats.iter().all(mounted)) {
            self.oracle.trouble(now);
        }
    }

    fn starts(&mut self, who: Who) {
        let seed = self.dice.draw();
        let plan = self.plan.clone();
        match who {
            Who::Master(index) if self.thrones[index].master.is_none() => {
                let throne = &mut self.thrones[index];
                throne.life += 1;
                // Nodes of the time before the first one there are none.
                let since = if throne.life == 1 && !plan.shared { MonoTime(0) } else { self.events.now() };
                throne.hosted = (usize::MAX, since);
                if throne.life == 1 && !plan.shared {
                    throne.hosted = (usize::from(plan.groups), since);
                }
                let master = Master::start(index, &plan, seed, &mut self.scene(who));
                self.thrones[index].master = Some(master);
            }
            Who::Node(index) if self.seats[index].node.is_none() => {
                self.seats[index].life += 1;
                let numbers = self.seats[index].numbers;
                let platter = std::mem::take(&mut self.seats[index].platter).recovered();
                let node = Node::start(index, &plan, seed, numbers, platter, &mut self.scene(who));
                self.sits_down(index, node);
            }
            _ => {}
        }
    }

    fn breaks(&mut self, fault: Fault) {
        let now = self.events.now();
        self.oracle.trouble(now);
        let until = |for_ms| now.after(Duration::from_millis(for_ms));
        match fault {
            Fault::Cut { kind, cut, for_ms } => {
                self.network.counts.add(kind);
                self.network.cut(cut, now, until(for_ms));
            }
            Fault::Crash { who, for_ms } => self.crashes(who, for_ms),
            Fault::Pause { who, for_ms } => {
                if self.paused.contains_key(&who) {
                    return;
                }
                self.network.counts.add(match who {
                    Who::Master(_) if Duration::from_millis(for_ms) > LEASE => FaultKind::MasterFrozen,
                    Who::Registry | Who::Master(_) => FaultKind::MasterPause,
                    Who::Node(_) => FaultKind::NodePause,
                    Who::Client(_) => FaultKind::ClientPause,
                });
                self.paused.insert(who, until(for_ms));
                self.events.at(until(for_ms), Event::Resumes(who));
            }
            Fault::Jump { who, by_ms } => {
                self.network.counts.add(FaultKind::WallJump);
                self.clocks.get_mut(&who).expect("everybody has a clock").jump(by_ms);
            }
            Fault::Slow { node, for_ms } => {
                self.network.counts.add(FaultKind::NodeSlow);
                self.network.slow_down(node, until(for_ms));
            }
            Fault::Reset { node } => {
                let streams: Vec<(u64, usize)> =
                    self.seats[node].node.iter().flat_map(|node| node.streams()).collect();
                for (stream, master) in streams {
                    let ends = (Who::Node(node), Who::Master(master));
                    self.network.break_stream(stream, &mut self.events, ends.0, ends.1);
                }
            }
            Fault::DiskFails { node, for_ms } => {
                self.network.counts.add(FaultKind::DiskFails);
                if let Some(mut there) = self.seats[node].node.take() {
                    there.disk_fails(Duration::from_millis(for_ms), &self.scene(Who::Node(node)));
                    self.seats[node].node = Some(there);
                }
            }
            Fault::Added { master } => {
                if self.thrones[master].master.is_none() {
                    self.network.counts.add(FaultKind::MasterAdded);
                    self.starts(Who::Master(master));
                }
            }
            Fault::Retired { master: index } => {
                if let Some(mut master) = self.thrones[index].master.take() {
                    master.retire(&mut self.scene(Who::Master(index)));
                    self.thrones[index].master = Some(master);
                }
            }
        }
    }

    fn crashes(&mut self, who: Who, for_ms: u64) {
        self.paused.remove(&who);
        self.backlog.remove(&who);
        match who {
            Who::Registry => return,
            Who::Master(index) => {
                if self.thrones[index].master.take().is_none() {
                    return;
                }
                let outlived = self.plan.shared && Duration::from_millis(for_ms) >= LEASE;
                let kind = if outlived { FaultKind::MasterOutlived } else { FaultKind::MasterCrash };
                self.network.counts.add(kind);
            }
            Who::Node(index) => {
                let Some(node) = self.seats[index].node.take() else { return };
                self.seats[index].numbers = node.numbers();
                self.seats[index].platter = node.platter();
                self.network.counts.add(FaultKind::NodeCrash);
            }
            Who::Client(client) => {
                self.network.counts.add(FaultKind::ClientCrash);
                let World { clients, events, network, oracle, board, clocks, .. } = self;
                let mut scene = Scene { events, network, oracle, board, who, life: 0, clock: clocks[&who] };
                if clients[client].crash(Duration::from_millis(for_ms), &mut scene) {
                    self.network.counts.add(FaultKind::PutCutShort);
                }
                return;
            }
        }
        self.events.after_ms(for_ms, Event::Starts(who));
    }

    fn resumes(&mut self, who: Who, now: MonoTime) {
        if self.paused.get(&who).is_none_or(|&until| until > now) {
            return; // it went on before, or was stopped again
        }
        self.paused.remove(&who);
        for event in self.backlog.remove(&who).into_iter().flatten() {
            self.events.at(now, event);
        }
    }

    fn heals(&mut self) {
        let now = self.events.now();
        self.network.heal();
        for who in self.paused.keys().copied().collect::<Vec<_>>() {
            self.paused.insert(who, now);
            self.resumes(who, now);
        }
        (0..self.thrones.len()).for_each(|master| self.starts(Who::Master(master)));
        (0..self.seats.len()).for_each(|node| self.starts(Who::Node(node)));
        self.set_modes(|_| Some(Mode::Proving { put: false }));
        self.enters(Phase::Proving);
    }

    fn set_modes(&mut self, mode: impl Fn(usize) -> Option<Mode>) {
        for index in 0..self.clients.len() {
            let World { clients, events, network, oracle, board, clocks, .. } = self;
            let who = Who::Client(index);
            let mut scene = Scene { events, network, oracle, board, who, life: 0, clock: clocks[&who] };
            if let Some(mode) = mode(index) {
                clients[index].set_mode(mode, &mut scene);
            }
        }
    }

    fn enters(&mut self, phase: Phase) {
        self.phase = phase;
        self.phase_since = self.events.now();
        self.events.after(JUDGED_EVERY, Event::Judged);
    }

    /// Looks whether what comes after the faults is done, and goes on, or complains when it takes too long.
    fn judges(&mut self) -> Result<(), String> {
        let since = self.events.now().since(self.phase_since);
        let (done, within) = match self.phase {
            Phase::Proving => {
                let proved = self.clients.iter().all(|client| client.mode() == Mode::Proved);
                (proved, PROVED_WITHIN)
            }
            Phase::Cleaning => (self.clients[0].mode() == Mode::Cleaned, CLEANED_WITHIN),
            Phase::Draining => (self.is_drained()?, DRAINED_WITHIN),
            Phase::Breaking | Phase::Over => return Ok(()),
        };
        if !done && since >= within {
            return Err(self.complaint(since));
        }
        if !done {
            self.events.after(JUDGED_EVERY, Event::Judged);
            return Ok(());
        }
        match self.phase {
            Phase::Proving => {
                self.proved_after = since;
                self.set_modes(|client| (client == 0).then_some(Mode::Cleaning { key: 0 }));
                self.enters(Phase::Cleaning);
            }
            Phase::Cleaning => self.enters(Phase::Draining),
            _ => self.phase = Phase::Over,
        }
        Ok(())
    }

    fn services(&self) -> impl Iterator<Item = &std::sync::Arc<moontide_master::Service>> {
        self.thrones.iter().filter_map(|throne| throne.master.as_ref()?.service())
    }

    fn is_drained(&self) -> Result<bool, String> {
        let mut free = true;
        for service in self.services() {
            service.audit()?;
            let stats = service.stats();
            free &= stats.objects == 0 && stats.free_units == stats.units && stats.taken_slots == 0;
        }
        let hosted: usize = self.services().map(|service| service.hosted_count()).sum();
        free &= hosted == usize::from(self.plan.groups);
        let taken: u64 = self.seats.iter().flat_map(|seat| &seat.node).map(Node::taken_units).sum();
        let stored: usize = self.seats.iter().flat_map(|seat| &seat.node).map(Node::disk_records).sum();
        Ok(free && taken == 0 && stored == 0)
    }

    fn complaint(&self, since: Duration) -> String {
        let modes: Vec<Mode> = self.clients.iter().map(Client::mode).collect();
        let mounted: Vec<bool> =
            self.seats.iter().map(|seat| seat.node.as_ref().is_some_and(Node::is_mounted)).collect();
        let taken: Vec<u64> =
            self.seats.iter().map(|seat| seat.node.as_ref().map_or(0, Node::taken_units)).collect();
        let stored: Vec<usize> =
            self.seats.iter().map(|seat| seat.node.as_ref().map_or(0, Node::disk_records)).collect();
        let stats = self.services().map(|service| {
            let s = service.stats();
            let hosted = service.hosted_count();
            format!(
                "{hosted} groups, {} objects ({} being written), units {} = {} live + {} reserved + {} draining + {} free, {} slots, {} sessions",
                s.objects, s.objects_writing, s.units, s.live_units, s.reserved_units, s.draining_units, s.free_units,
                s.taken_slots, s.sessions
            )
        });
        format!(
            "{:?} not done {} s after everything was mended; clients {modes:?}; nodes mounted {mounted:?}, units taken \
             {taken:?}, records on disks {stored:?}; masters: {}",
            self.phase,
            since.as_secs(),
            stats.collect::<Vec<_>>().join("; "),
        )
    }
}
