//! [`Node`]: a shipped [`NodeHeap`](moontide_heap::NodeHeap) with real shared memory, and around it what the shipped node
//! decides ([`moontide_node::decide`]).
//!
//! A node has several threads that talk by queues: one serves peers (`serve`), one carries out orders (`obey`), and one
//! for each master talks to that one (`converse`); `fleet` knows who they are. Each takes what is in its queue a moment
//! later, so that they get in each other's way here, too. Some have a disk, which is made up (`disk`); what it holds outlives
//! the process.

mod converse;
mod disk;
mod fleet;
mod memory;
mod obey;
mod serve;

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU16;
use std::time::Duration;

use moontide_node::LOCAL_STALE_MAX_DEFAULT;
use moontide_node::decide::orders::Name;
use moontide_node::decide::pace::index_open;
use moontide_node::decide::report::Change;
use moontide_proto::{Order, OrderResult, v1};
use moontide_types::{Generation, GroupId, MonoTime, NodeId, SegmentId, SessionId, Term};

use self::converse::Driver;
use self::disk::Disk;
pub(crate) use self::disk::Platter;
use self::fleet::Fleet;
use self::memory::{Memory, Shape};
use self::obey::Obedience;
use crate::dice::Dice;
use crate::event::{Message, Timer, Who};
use crate::plan::Plan;
use crate::scene::Scene;

/// Longest time that a thread leaves something in its queue.
const LAG_MAX: Duration = Duration::from_millis(3);

/// What a node wants to be woken for. Numbers tell whether it still does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum NodeTimer {
    /// A driver looks into its queue.
    Events { line: u64 },
    /// The thread for orders looks into its queue.
    Work,
    /// It is time to reclaim.
    Reclaim { round: u64 },
    /// A pause of a driver is over.
    Pause { pause: u64 },
    /// A call to a master has taken too long.
    CallOver { call: u64 },
    /// It is time for a heartbeat on a stream.
    Beat { stream: u64 },
    /// A master that did not know yet that it hosts a group may know it by now.
    Behind { number: u64 },
    /// It is time to look at the map, or to stop waiting for it.
    Look { number: u64 },
    /// A thread of the disk has done something.
    Disk { job: u64 },
}

/// What concerns a session.
#[derive(Debug)]
enum NodeEvent {
    Change(Change),
    Results {
        session: SessionId,
        results: Vec<OrderResult>,
    },
    Report(SegmentId),
    /// Records are on the disk.
    Offloaded {
        session: SessionId,
        notice: v1::OffloadNotice,
    },
    /// A record leaves it.
    DiskEvicted {
        session: SessionId,
        evicted: v1::DiskEvicted,
    },
}

impl NodeEvent {
    fn segment(&self) -> Option<SegmentId> {
        match self {
            NodeEvent::Change(
                Change::Begun(segment, _)
                | Change::Committed { segment, .. }
                | Change::Killed { segment, .. }
                | Change::Freed { segment, .. },
            )
            | NodeEvent::Report(segment) => Some(*segment),
            _ => None,
        }
    }

    /// The session that alone is to hear of it.
    fn session(&self) -> Option<SessionId> {
        match *self {
            NodeEvent::Results { session, .. }
            | NodeEvent::Offloaded { session, .. }
            | NodeEvent::DiskEvicted { session, .. } => Some(session),
            NodeEvent::Change(_) | NodeEvent::Report(_) => None,
        }
    }
}

/// What the thread for orders is given to do.
#[derive(Debug)]
enum Work {
    Session { begins: Option<SessionId>, ends: Option<SessionId> },
    Orders { session: SessionId, orders: Vec<Order> },
    GivenUp(Vec<Name>),
}

/// A node's process.
#[derive(Debug)]
pub(crate) struct Node {
    index: usize,
    dice: Dice,
    id: NodeId,
    boot: u64,
    groups: NonZeroU16,
    /// How many masters were named at its start.
    masters: usize,
    /// Used by no process of this host before.
    numbers: u64,
    memory: Memory,
    fleet: Fleet,
    drivers: BTreeMap<u64, Driver>,
    obedience: Obedience,
    disk: Option<Disk>,
    /// When a master of each group last knew of everything.
    known_at: BTreeMap<GroupId, (MonoTime, Term)>,
    /// When all masters last did.
    good: Option<MonoTime>,
    /// Until then begins and commits are told, because a master may not know of them.
    tell_until: MonoTime,
    work: VecDeque<Work>,
}

impl Node {
    /// A process that has just started.
    pub(crate) fn start(
        index: usize,
        plan: &Plan,
        seed: u64,
        numbers: u64,
        platter: Platter,
        scene: &mut Scene<'_>,
    ) -> Node {
        let mut dice = Dice::new(seed);
        // A disk belongs to one node: its number is on it.
        let keeps_number = plan.keeps_number || plan.disk_records > 0;
        let number = if keeps_number { index as u64 + 1 } else { (seed >> 16) | 1 };
        let id = NodeId(number);
        scene.network.enlist(id, index);
        let boot = dice.draw();
        // The product draws it from the calendar, and it only has to differ.
        let generation = Generation(dice.draw() >> 1);
        let groups = NonZeroU16::new(plan.groups).expect("a cluster has a group");
        let shape = Shape { segments: plan.segments, units: plan.units, slots: plan.slots, groups };
        let mut node = Node {
            index,
            dice,
            id,
            boot,
            groups,
            masters: plan.masters,
            numbers,
            memory: Memory::create(id, generation, shape),
            fleet: Fleet::default(),
            drivers: BTreeMap::new(),
            obedience: Obedience::default(),
            disk: (plan.disk_records > 0).then(|| Disk::new(platter, plan.disk_records)),
            known_at: BTreeMap::new(),
            good: None,
            tell_until: LONG_AGO,
            work: VecDeque::new(),
        };
        node.look(scene);
        node.wake_to_reclaim(scene);
        node
    }

    /// The highest number that this process, or one before it, has used.
    pub(crate) fn numbers(&self) -> u64 {
        self.numbers
    }

    fn number(&mut self) -> u64 {
        self.numbers += 1;
        ((self.index as u64 + 1) << 40) | self.numbers
    }

    /// Whether masters know of everything here.
    pub(crate) fn is_mounted(&self) -> bool {
        self.fleet.is_covered()
            && self.drivers.values().all(Driver::is_good)
            && self.disk.as_ref().is_none_or(Disk::is_told)
    }

    /// What is on its disk.
    pub(crate) fn platter(&self) -> Platter {
        self.disk.as_ref().map(|disk| disk.platter().clone()).unwrap_or_default()
    }

    /// How many records that are.
    pub(crate) fn disk_records(&self) -> usize {
        self.disk.as_ref().map_or(0, |disk| disk.platter().records())
    }

    /// Nothing can be written to the disk for so long.
    pub(crate) fn disk_fails(&mut self, span: Duration, scene: &Scene<'_>) {
        if let Some(disk) = &mut self.disk {
            disk.fails(scene.now().after(span));
        }
    }

    /// The streams that it talks on, and to whom.
    pub(crate) fn streams(&self) -> impl Iterator<Item = (u64, usize)> {
        self.drivers.values().filter_map(|driver| Some((driver.stream()?, driver.master())))
    }

    /// Units that are taken by records in any state.
    pub(crate) fn taken_units(&self) -> u64 {
        self.memory.taken_units()
    }

    /// Something that waited for time.
    pub(crate) fn wake(&mut self, timer: NodeTimer, scene: &mut Scene<'_>) {
        match timer {
            NodeTimer::Events { line } => self.take_events(line, scene),
            NodeTimer::Work => self.take_work(scene),
            NodeTimer::Reclaim { round } => self.reclaim_due(round, scene),
            NodeTimer::Pause { pause } => self.pause_over(pause, scene),
            NodeTimer::CallOver { call } => self.call_over(call, scene),
            NodeTimer::Beat { stream } => self.beat_due(stream, scene),
            NodeTimer::Behind { number } => self.behind_due(number, scene),
            NodeTimer::Look { number } => self.look_due(number, scene),
            NodeTimer::Disk { job } => self.disk_due(job, scene),
        }
    }

    /// A message arrives.
    pub(crate) fn arrives(&mut self, from: Who, message: Message, scene: &mut Scene<'_>) {
        match message {
            Message::Ask { call, ask } => {
                let told = self.serve(ask, scene);
                scene.send(from, Message::Told { call, told });
            }
            Message::NodeAnswer { call, answer } => self.answered(call, answer, scene),
            Message::StreamOpened { stream } => self.stream_opened(stream, scene),
            Message::FromMaster { stream, message } => self.heard(stream, &message, scene),
            Message::StreamEnd { stream, code } => self.stream_ended(stream, code, scene),
            _ => unreachable!("not for a node"),
        }
    }

    /// Whether no master was heard for so long that what is here may have been removed.
    fn is_stale(&self, now: MonoTime) -> bool {
        self.good.is_some() && !index_open(self.good, now, LOCAL_STALE_MAX_DEFAULT)
    }

    /// Tells the master whom it concerns, if there is one.
    fn tell(&mut self, event: NodeEvent, scene: &mut Scene<'_>) {
        let group = event.segment().map(|segment| self.memory.group_of(segment));
        let concerns = |driver: &Driver| match (event.session(), group) {
            (Some(session), _) => driver.session() == Some(session),
            (None, Some(group)) => driver.has_group(group),
            (None, None) => false,
        };
        let Some((&line, driver)) = self.drivers.iter_mut().find(|(_, driver)| concerns(driver)) else {
            return;
        };
        if driver.enqueue(event) {
            let lag = self.dice.up_to(LAG_MAX);
            scene.wake_in(lag, Timer::Node(NodeTimer::Events { line }));
        }
    }

    fn give_work(&mut self, work: Work, scene: &mut Scene<'_>) {
        self.work.push_back(work);
        if self.work.len() == 1 {
            let lag = self.dice.up_to(LAG_MAX);
            scene.wake_in(lag, Timer::Node(NodeTimer::Work));
        }
    }
}

/// A time long past on any clock.
const LONG_AGO: MonoTime = MonoTime(0);
