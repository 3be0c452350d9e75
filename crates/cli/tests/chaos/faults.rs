//! Faults of a [`World`], each with a start and an end, drawn from a seed.
//!
//! Kinds are drawn from a deck that contains each kind at least once and is reshuffled when it is empty, so that a
//! short run has all kinds. Up to three faults are active at a time. The end of a fault restarts a killed process,
//! continues a stopped one, heals a partition, or empties a full disk.

use std::time::{Duration, Instant};

use crate::content::Rng;
use crate::journal::{Record, now};
use crate::net::Host;
use crate::report;
use crate::world::{self, Part, World};

/// Kind of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    Kill(Part),
    Stop(Part),
    /// Partition between two kinds of processes.
    Cut(Part, Part, Direction),
    /// Partition of a host from all others.
    Alone(Part),
    DiskFull,
    /// Kill of all processes at once.
    KillAll,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Direction {
    Both,
    /// Packets from the first to the second are lost.
    There,
    Back,
}

use Direction::{Back, Both, There};
use Part::{Client, Master, Node, Registry};

/// Kinds, and their number in the deck.
const DECK: &[(Kind, usize)] = &[
    (Kind::Kill(Master), 3),
    (Kind::Kill(Node), 2),
    (Kind::Kill(Client), 2),
    (Kind::Stop(Master), 2),
    (Kind::Stop(Node), 2),
    (Kind::Stop(Client), 1),
    (Kind::Cut(Node, Master, Both), 2),
    (Kind::Cut(Node, Master, There), 1),
    (Kind::Cut(Node, Master, Back), 1),
    (Kind::Cut(Client, Node, Both), 1),
    (Kind::Cut(Client, Node, There), 1),
    (Kind::Cut(Client, Node, Back), 1),
    (Kind::Cut(Client, Master, Both), 1),
    (Kind::Cut(Client, Master, There), 1),
    (Kind::Cut(Client, Master, Back), 1),
    (Kind::Alone(Master), 1),
    (Kind::Alone(Node), 1),
    (Kind::DiskFull, 2),
    (Kind::KillAll, 1),
    // Only with several masters.
    (Kind::Kill(Registry), 1),
    (Kind::Stop(Registry), 1),
    (Kind::Cut(Master, Registry, Both), 2),
    (Kind::Cut(Master, Registry, There), 1),
    (Kind::Cut(Master, Registry, Back), 1),
    (Kind::Alone(Registry), 1),
    (Kind::Cut(Master, Master, Both), 1),
    (Kind::Cut(Master, Master, There), 1),
];

/// More of them with slow disks: a removal that was acknowledged before it was durable returns only if its node and the
/// masters that remember it are killed within the time of a sync.
const SLOW_DISKS_DECK: &[(Kind, usize)] = &[(Kind::KillAll, 5)];

/// Maximum number of active faults.
const OPEN_MAX: usize = 3;
/// Time between the starts of two faults.
const PAUSE_MS: std::ops::Range<usize> = 500..4000;
/// Duration of most faults.
const SHORT_MS: std::ops::Range<usize> = 50..1500;
/// Duration of some faults: longer than a node's session TTL and a master's lease.
const LONG_MS: std::ops::Range<usize> = 1500..5000;

impl Kind {
    /// One in this number of faults is long.
    fn long_one_in(self) -> u64 {
        if self.touches_election() { 2 } else { 4 }
    }

    /// Returns true if masters may lose groups by it, or cannot acquire any.
    pub fn touches_election(self) -> bool {
        let of = |part| part == Master || part == Registry;
        match self {
            Kind::Kill(part) | Kind::Stop(part) | Kind::Alone(part) => of(part),
            Kind::Cut(one, other, _) => of(one) && of(other),
            Kind::DiskFull => false,
            Kind::KillAll => true,
        }
    }
}

/// A finished fault.
#[derive(Clone, Debug)]
pub struct Done {
    pub kind: Kind,
    pub start: u64,
    pub end: u64,
}

/// Time in which a client was stopped.
#[derive(Clone, Copy, Debug)]
pub struct Stop {
    life: u32,
    start: u64,
    end: u64,
}

impl Stop {
    /// Returns true if a call overlaps with it.
    pub fn touches(&self, record: &Record) -> bool {
        self.life == record.life && record.start <= self.end && record.end >= self.start
    }
}

/// Target of a fault.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Target {
    Process(Part, usize),
    Pair(Host, Host),
    Host(Host),
    Disk(usize),
    All,
}

impl Target {
    /// Returns true if healing one would heal the other.
    fn overlaps(&self, other: &Target) -> bool {
        match (self, other) {
            (Target::Host(host), Target::Pair(one, two)) | (Target::Pair(one, two), Target::Host(host)) => {
                host == one || host == two
            }
            (Target::Host(_), Target::Host(_)) => true,
            (Target::Pair(one, two), Target::Pair(three, four)) => {
                (one, two) == (three, four) || (one, two) == (four, three)
            }
            (one, other) => one == other,
        }
    }
}

struct Open {
    kind: Kind,
    target: Target,
    start: u64,
    until: Instant,
    /// Life of the stopped client.
    life: Option<u32>,
}

pub struct Faults {
    rng: Rng,
    slow_disks: bool,
    deck: Vec<Kind>,
    next_at: Instant,
    open: Vec<Open>,
    pub done: Vec<Done>,
    stops: Vec<Stop>,
}

impl Faults {
    pub fn new(rng: Rng, slow_disks: bool) -> Faults {
        let next_at = Instant::now() + Duration::from_secs(1);
        Faults { rng, slow_disks, deck: vec![], next_at, open: vec![], done: vec![], stops: vec![] }
    }

    /// Ends faults that are due, and starts the next one if it is due.
    pub fn step(&mut self, world: &mut World) {
        let moment = Instant::now();
        while let Some(at) = self.open.iter().position(|open| open.until <= moment) {
            let open = self.open.swap_remove(at);
            self.end(world, open);
        }
        if moment >= self.next_at && self.open.len() < OPEN_MAX {
            self.begin(world);
            self.next_at =
                moment + Duration::from_millis(self.rng.within(PAUSE_MS.start, PAUSE_MS.end) as u64);
        }
    }

    /// Ends all faults.
    pub fn heal(&mut self, world: &mut World) {
        for open in std::mem::take(&mut self.open) {
            self.end(world, open);
        }
        world.net.heal();
    }

    /// Times in which clients were stopped.
    pub fn stops(&self) -> Vec<Stop> {
        self.stops.clone()
    }

    fn draw(&mut self) -> Kind {
        if self.deck.is_empty() {
            let more = if self.slow_disks { SLOW_DISKS_DECK } else { &[] };
            let all = DECK.iter().chain(more);
            self.deck = all.flat_map(|(kind, times)| std::iter::repeat_n(*kind, *times)).collect();
            for at in (1..self.deck.len()).rev() {
                let other = self.rng.within(0, at + 1);
                self.deck.swap(at, other);
            }
        }
        self.deck.pop().expect("the deck was filled")
    }

    fn begin(&mut self, world: &mut World) {
        if self.open.iter().any(|open| open.kind == Kind::KillAll) {
            return; // no process is running
        }
        // A kind without a target is skipped, and another one drawn, at most once per kind.
        let drawn = (0..DECK.len()).find_map(|_| {
            let kind = self.draw();
            self.target(world, kind).map(|target| (kind, target))
        });
        let Some((kind, target)) = drawn else { return };
        let span = if self.rng.draw().is_multiple_of(kind.long_one_in()) { LONG_MS } else { SHORT_MS };
        let duration = Duration::from_millis(self.rng.within(span.start, span.end) as u64);
        let mut life = None;
        let start = now();
        match (&kind, &target) {
            (Kind::Kill(_), Target::Process(part, at)) => world.part(*part)[*at].kill(),
            (Kind::Stop(_), Target::Process(part, at)) => {
                let process = &mut world.part(*part)[*at];
                life = (*part == Client).then(|| world::client_life(*at, process.life()));
                process.stop();
            }
            (Kind::Cut(_, _, direction), Target::Pair(one, other)) => {
                if *direction != Back {
                    world.net.cut(one, other);
                }
                if *direction != There {
                    world.net.cut(other, one);
                }
            }
            (Kind::Alone(_), Target::Host(host)) => world.net.isolate(host),
            (Kind::DiskFull, Target::Disk(at)) => world.disks[*at].fill(),
            (Kind::KillAll, _) => {
                for part in Part::ALL {
                    world.part(part).iter_mut().for_each(|process| process.kill());
                }
            }
            (kind, target) => unreachable!("{kind:?} of {target:?}"),
        }
        println!("{} {kind:?} {target:?} for {duration:?}", report::moment(start));
        self.open.push(Open { kind, target, start, until: Instant::now() + duration, life });
    }

    /// Returns a random target without an active fault.
    fn target(&mut self, world: &mut World, kind: Kind) -> Option<Target> {
        let mut candidates = vec![];
        match kind {
            Kind::Kill(part) | Kind::Stop(part) => {
                let running = world.part(part).iter().enumerate().filter(|(_, process)| process.is_running());
                candidates.extend(running.map(|(at, _)| Target::Process(part, at)));
            }
            Kind::Cut(one, other, _) => {
                let hosts = |world: &mut World, part| -> Vec<Host> {
                    world.part(part).iter().map(|process| process.host.clone()).collect()
                };
                let (ones, others) = (hosts(world, one), hosts(world, other));
                for one in &ones {
                    // A client on a node's host reaches the node without a network.
                    let others = others.iter().filter(|other| *other != one);
                    candidates.extend(others.map(|other| Target::Pair(one.clone(), other.clone())));
                }
            }
            Kind::Alone(part) => {
                candidates.extend(world.part(part).iter().map(|process| Target::Host(process.host.clone())));
            }
            Kind::DiskFull => candidates.extend((0..world.disks.len()).map(Target::Disk)),
            // Only without other active faults, whose ends would restart processes.
            Kind::KillAll if self.open.is_empty() => candidates.push(Target::All),
            Kind::KillAll => {
                // Later.
                self.deck.insert(self.deck.len() / 2, kind);
                return None;
            }
        }
        candidates.retain(|target| !self.open.iter().any(|open| open.target.overlaps(target)));
        (!candidates.is_empty()).then(|| candidates.swap_remove(self.rng.within(0, candidates.len())))
    }

    fn end(&mut self, world: &mut World, open: Open) {
        match (&open.kind, &open.target) {
            (Kind::Kill(_), Target::Process(part, at)) => world.part(*part)[*at].start(),
            (Kind::Stop(_), Target::Process(part, at)) => world.part(*part)[*at].resume(),
            (Kind::Cut(..), Target::Pair(one, other)) => world.net.heal_pair(one, other),
            (Kind::Alone(_), Target::Host(host)) => world.net.heal_host(host),
            (Kind::DiskFull, Target::Disk(at)) => world.disks[*at].empty(),
            (Kind::KillAll, _) => {
                for part in Part::ALL {
                    world.part(part).iter_mut().for_each(|process| process.start());
                }
            }
            (kind, target) => unreachable!("{kind:?} of {target:?}"),
        }
        let end = now();
        println!("{} {:?} ended", report::moment(end), open.kind);
        self.stops.extend(open.life.map(|life| Stop { life, start: open.start, end }));
        self.done.push(Done { kind: open.kind, start: open.start, end });
    }
}
