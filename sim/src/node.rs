//! [`Node`]: a shipped [`NodeHeap`](moontide_heap::NodeHeap) with real shared memory, and the shipped decisions of a
//! node ([`moontide_node::logic`]).
//!
//! A node has several threads that communicate by queues: one serves peers (`serve`), one executes commands
//! (`executor`), and one per master keeps a session (`session`); `session_manager` chooses the masters. Each takes an
//! entry of its queue after a random delay, so that the threads interleave as in the product. Some nodes have a
//! simulated disk (`disk`), whose content survives the process.

mod disk;
mod executor;
mod memory;
mod serve;
mod session;
mod session_manager;

use std::collections::{BTreeMap, VecDeque};
use std::num::NonZeroU16;
use std::time::Duration;

use moontide_node::SELF_FENCE_TIMEOUT_DEFAULT;
use moontide_node::logic::commands::SlotVersion;
use moontide_node::logic::report::SlotChange;
use moontide_node::logic::sync_marks::SyncMarks;
use moontide_node::logic::timing::may_open_index;
use moontide_proto::{CommandResult, NodeCommand, v1};
use moontide_types::{Generation, MonoTime, NodeId, SegmentId, SessionId};

use self::disk::Disk;
pub(crate) use self::disk::DiskImage;
use self::executor::CommandExecutor;
use self::memory::{MemoryParams, NodeMemory};
use self::session::SessionDriver;
use self::session_manager::SessionManager;
use crate::context::ProcessContext;
use crate::event::{Message, ProcessId, Timer};
use crate::plan::RunPlan;
use crate::rng::SimRng;

/// Longest time for which an entry stays in a queue.
const QUEUE_DELAY_MAX: Duration = Duration::from_millis(3);

/// Timers of a node. A timer with an outdated number is ignored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum NodeTimer {
    /// A driver reads its queue.
    Events { route: u64 },
    /// The command thread reads its queue.
    Work,
    /// It is time to reclaim.
    Reclaim { round: u64 },
    /// A pause of a driver is over.
    Pause { pause: u64 },
    /// A call to a master has taken too long.
    CallOver { call: u64 },
    /// It is time for a heartbeat on a stream.
    Heartbeat { stream: u64 },
    /// A master that did not know yet that it hosts a group may know it by now.
    Behind { number: u64 },
    /// It is time to refresh the map, or to stop waiting for it.
    MapRefresh { number: u64 },
    /// A thread of the disk has done something.
    Disk { job: u64 },
}

/// What concerns a session.
#[derive(Debug)]
enum NodeEvent {
    Change(SlotChange),
    Results {
        session: SessionId,
        results: Vec<CommandResult>,
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
                SlotChange::Begun(segment, _)
                | SlotChange::Committed { segment, .. }
                | SlotChange::Killed { segment, .. }
                | SlotChange::Freed { segment, .. },
            )
            | NodeEvent::Report(segment) => Some(*segment),
            _ => None,
        }
    }

    /// Returns the only session that gets the event, if it is for one session.
    fn session(&self) -> Option<SessionId> {
        match *self {
            NodeEvent::Results { session, .. }
            | NodeEvent::Offloaded { session, .. }
            | NodeEvent::DiskEvicted { session, .. } => Some(session),
            NodeEvent::Change(_) | NodeEvent::Report(_) => None,
        }
    }
}

/// Task of the command thread.
#[derive(Debug)]
enum ExecutorTask {
    Session { begins: Option<SessionId>, ends: Option<SessionId> },
    Commands { session: SessionId, commands: Vec<NodeCommand> },
    GivenUp(Vec<SlotVersion>),
}

/// A node's process.
#[derive(Debug)]
pub(crate) struct Node {
    index: usize,
    rng: SimRng,
    id: NodeId,
    boot: u64,
    groups: NonZeroU16,
    /// How many masters were named at its start.
    masters: usize,
    /// Used by no process of this host before.
    numbers: u64,
    memory: NodeMemory,
    session_manager: SessionManager,
    drivers: BTreeMap<u64, SessionDriver>,
    executor: CommandExecutor,
    disk: Option<Disk>,
    /// When it was in sync with a master of each group.
    sync_marks: SyncMarks,
    /// When all masters last did.
    synced_at: Option<MonoTime>,
    /// Until then begins and commits are reported, because a master may not know of them.
    tell_until: MonoTime,
    work: VecDeque<ExecutorTask>,
}

impl Node {
    /// A process that has just started.
    pub(crate) fn start(
        index: usize,
        plan: &RunPlan,
        seed: u64,
        numbers: u64,
        disk_image: DiskImage,
        cx: &mut ProcessContext<'_>,
    ) -> Node {
        let mut rng = SimRng::new(seed);
        // A disk belongs to one node: its number is on it.
        let keeps_number = plan.stable_node_ids || plan.disk_records > 0;
        let number = if keeps_number { index as u64 + 1 } else { (seed >> 16) | 1 };
        let id = NodeId(number);
        cx.network.register(id, index);
        let boot = rng.next_u64();
        // The product draws it from the calendar, and it only has to differ.
        let generation = Generation(rng.next_u64() >> 1);
        let groups = NonZeroU16::new(plan.groups).expect("a cluster has a group");
        let shape = MemoryParams { segments: plan.segments, units: plan.units, slots: plan.slots, groups };
        let mut node = Node {
            index,
            rng,
            id,
            boot,
            groups,
            masters: plan.masters,
            numbers,
            memory: NodeMemory::create(id, generation, shape),
            session_manager: SessionManager::default(),
            drivers: BTreeMap::new(),
            executor: CommandExecutor::default(),
            sync_marks: disk_image.sync_marks(),
            disk: (plan.disk_records > 0).then(|| Disk::new(disk_image, plan.disk_records)),
            synced_at: None,
            tell_until: LONG_AGO,
            work: VecDeque::new(),
        };
        node.refresh_map(cx);
        node.wake_to_reclaim(cx);
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
        self.session_manager.is_covered()
            && self.drivers.values().all(SessionDriver::is_good)
            && self.disk.as_ref().is_none_or(Disk::is_told)
    }

    /// What is on its disk.
    pub(crate) fn disk_image(&self) -> DiskImage {
        self.disk.as_ref().map(|disk| disk.disk_image().clone()).unwrap_or_default()
    }

    /// How many records that are.
    pub(crate) fn disk_records(&self) -> usize {
        self.disk.as_ref().map_or(0, |disk| disk.disk_image().records())
    }

    /// The disk can be written again.
    pub(crate) fn disk_heals(&mut self) {
        if let Some(disk) = &mut self.disk {
            disk.heals();
        }
    }

    /// Nothing can be written to the disk for so long.
    pub(crate) fn disk_fails(&mut self, span: Duration, cx: &ProcessContext<'_>) {
        if let Some(disk) = &mut self.disk {
            disk.fails(cx.now().after(span));
        }
    }

    /// Returns the open streams, each with its master.
    pub(crate) fn streams(&self) -> impl Iterator<Item = (u64, usize)> {
        self.drivers.values().filter_map(|driver| Some((driver.stream()?, driver.master())))
    }

    /// Units that are taken by records in any state.
    pub(crate) fn taken_units(&self) -> u64 {
        self.memory.taken_units()
    }

    /// Something that waited for time.
    pub(crate) fn wake(&mut self, timer: NodeTimer, cx: &mut ProcessContext<'_>) {
        match timer {
            NodeTimer::Events { route } => self.take_events(route, cx),
            NodeTimer::Work => self.take_work(cx),
            NodeTimer::Reclaim { round } => self.reclaim_due(round, cx),
            NodeTimer::Pause { pause } => self.pause_over(pause, cx),
            NodeTimer::CallOver { call } => self.call_over(call, cx),
            NodeTimer::Heartbeat { stream } => self.heartbeat_due(stream, cx),
            NodeTimer::Behind { number } => self.behind_due(number, cx),
            NodeTimer::MapRefresh { number } => self.map_refresh_due(number, cx),
            NodeTimer::Disk { job } => self.disk_due(job, cx),
        }
    }

    /// A message arrives.
    pub(crate) fn arrives(&mut self, from: ProcessId, message: Message, cx: &mut ProcessContext<'_>) {
        match message {
            Message::Ask { call, ask } => {
                let reply = self.serve(ask, cx);
                cx.send(from, Message::NodeReply { call, reply });
            }
            Message::NodeResponse { call, reply } => self.answered(call, reply, cx),
            Message::StreamOpened { stream } => self.stream_opened(stream, cx),
            Message::FromMaster { stream, message } => self.receive(stream, &message, cx),
            Message::StreamEnd { stream, code } => self.stream_ended(stream, code, cx),
            _ => unreachable!("not for a node"),
        }
    }

    /// Returns whether the node fences itself: without contact to a master for so long, its records may have been
    /// removed.
    fn is_stale(&self, now: MonoTime) -> bool {
        self.synced_at.is_some() && !may_open_index(self.synced_at, now, SELF_FENCE_TIMEOUT_DEFAULT)
    }

    /// Sends an event to the master that it concerns, if there is one.
    fn send_event(&mut self, event: NodeEvent, cx: &mut ProcessContext<'_>) {
        let group = event.segment().map(|segment| self.memory.group_of(segment));
        let concerns = |driver: &SessionDriver| match (event.session(), group) {
            (Some(session), _) => driver.session() == Some(session),
            (None, Some(group)) => driver.has_group(group),
            (None, None) => false,
        };
        let Some((&route, driver)) = self.drivers.iter_mut().find(|(_, driver)| concerns(driver)) else {
            return;
        };
        if driver.enqueue(event) {
            let lag = self.rng.up_to(QUEUE_DELAY_MAX);
            cx.wake_in(lag, Timer::Node(NodeTimer::Events { route }));
        }
    }

    fn give_work(&mut self, work: ExecutorTask, cx: &mut ProcessContext<'_>) {
        self.work.push_back(work);
        if self.work.len() == 1 {
            let lag = self.rng.up_to(QUEUE_DELAY_MAX);
            cx.wake_in(lag, Timer::Node(NodeTimer::Work));
        }
    }
}

/// A time long past on any clock.
const LONG_AGO: MonoTime = MonoTime(0);
