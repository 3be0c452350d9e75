//! [`Fault`]s: drawn from the seed before the run starts. [`FaultCounts`]: the faults that occurred.

use std::time::Duration;

use moontide_types::MonoTime;

use crate::event::{Event, Events, ProcessId};
use crate::master::LEASE;
use crate::network::Partition;
use crate::node::DiskFailure;
use crate::plan::RunPlan;
use crate::rng::SimRng;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// Kind of fault.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum FaultKind {
            $($(#[$doc])* $name,)*
        }

        impl FaultKind {
            /// All kinds.
            pub const ALL: &[FaultKind] = &[$(FaultKind::$name,)*];

            /// Returns the name of the kind.
            pub const fn name(self) -> &'static str {
                match self { $(FaultKind::$name => $text,)* }
            }
        }
    };
}

kinds! {
    /// A message is lost.
    Lost = "message lost",
    /// A message is delayed.
    Delayed = "message delayed",
    /// A message arrives twice.
    Twice = "message twice",
    /// A message overtakes one that was sent before it.
    Overtaken = "message overtaken",
    /// The connection of a node's session breaks.
    StreamBroken = "stream broken",
    /// A node is partitioned from all processes.
    NodeCut = "node cut off",
    /// Messages from a node to a master are lost.
    NodeUnheard = "node unheard by master",
    /// Messages from a master to a node are lost.
    NodeDeaf = "node deaf to master",
    /// A client and a master are partitioned.
    ClientCut = "client cut off from master",
    /// Messages from a client to a master are lost.
    ClientUnheard = "client unheard by master",
    /// Messages from a master to a client are lost.
    ClientDeaf = "client deaf to master",
    /// Messages from a client to a node are lost.
    ClientUnheardByNode = "client unheard by node",
    /// Messages from a node to a client are lost.
    ClientDeafToNode = "client deaf to node",
    /// A master's process exits; the next one starts without state.
    MasterCrash = "master crash",
    /// A node's process exits; its memory is lost.
    NodeCrash = "node crash",
    /// A node's host loses power: its process exits, and what its disk has not synced may be lost.
    PowerLost = "power lost",
    /// A node is hit by a fault at a place of its code.
    Aimed = "node hit at a place of its code",
    /// A node's process is told to stop, and is killed if it takes long.
    NodeStopped = "node told to stop",
    /// An operator has a node emptied.
    NodeDrained = "node drained",
    /// A node's process exits at its start, because its disk fails.
    NodeNotStarted = "node not started",
    /// A client's process exits.
    ClientCrash = "client crash",
    /// A client's process exits during a put.
    PutCutShort = "client crash in a put",
    /// A master's process exits, and another master takes its groups before it restarts.
    MasterOutlived = "master crash beyond its lease",
    /// A master is paused and resumes.
    MasterPause = "master paused",
    /// A master is paused for longer than its lease.
    MasterFrozen = "master paused beyond its lease",
    /// A master is added.
    MasterAdded = "master added",
    /// A master hands off its groups and exits.
    MasterRetired = "master retires",
    /// A group is handed off.
    HandedOver = "group handed over",
    /// Two masters are partitioned.
    MastersCut = "masters cut off from each other",
    /// The registry is partitioned from all processes.
    RegistryAway = "registry away",
    /// A master and the registry are partitioned.
    RegistryCut = "registry away for one master",
    /// A node is paused and resumes.
    NodePause = "node paused",
    /// A client is paused and resumes.
    ClientPause = "client paused",
    /// A clock runs fast or slow.
    Drift = "clock drifts",
    /// A wall clock is set.
    WallJump = "calendar jumps",
    /// A node is slow.
    NodeSlow = "node slow",
    /// Writes to a node's disk fail.
    DiskFails = "disk fails",
    /// A node's disk is full.
    DiskFull = "disk full",
}

impl FaultKind {
    /// Returns whether the fault needs a disk.
    pub(crate) const fn is_of_disks(self) -> bool {
        matches!(
            self,
            FaultKind::PowerLost | FaultKind::NodeNotStarted | FaultKind::DiskFails | FaultKind::DiskFull
        )
    }

    /// Returns whether the fault needs a registry.
    pub(crate) const fn is_of_many_masters(self) -> bool {
        matches!(
            self,
            FaultKind::MasterOutlived
                | FaultKind::MasterFrozen
                | FaultKind::MasterAdded
                | FaultKind::MasterRetired
                | FaultKind::HandedOver
                | FaultKind::MastersCut
                | FaultKind::RegistryAway
                | FaultKind::RegistryCut
        )
    }
}

/// Number of faults of each kind.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FaultCounts([u64; FaultKind::ALL.len()]);

impl Default for FaultCounts {
    fn default() -> FaultCounts {
        FaultCounts([0; FaultKind::ALL.len()])
    }
}

impl FaultCounts {
    /// One more.
    pub(crate) fn add(&mut self, kind: FaultKind) {
        self.0[kind as usize] += 1;
    }

    /// Returns the number of faults of a kind.
    pub fn of(&self, kind: FaultKind) -> u64 {
        self.0[kind as usize]
    }

    /// Adds the counts of another run.
    pub fn merge(&mut self, other: &FaultCounts) {
        self.0.iter_mut().zip(other.0).for_each(|(sum, more)| *sum += more);
    }
}

/// Something breaks.
#[derive(Clone, Copy, Debug, Hash)]
pub(crate) enum Fault {
    Partition {
        kind: FaultKind,
        cut: Partition,
        for_ms: u64,
    },
    Crash {
        process: ProcessId,
        for_ms: u64,
    },
    Pause {
        process: ProcessId,
        for_ms: u64,
    },
    Jump {
        process: ProcessId,
        by_ms: i64,
    },
    Slow {
        node: usize,
        for_ms: u64,
    },
    Reset {
        node: usize,
    },
    DiskFails {
        node: usize,
        failure: DiskFailure,
        for_ms: u64,
    },
    DiskHeals {
        node: usize,
    },
    /// After this number of operations of the disk, or at once if there is no disk.
    PowerFails {
        node: usize,
        operations: u64,
        for_ms: u64,
    },
    PowerOff {
        node: usize,
        for_ms: u64,
    },
    /// The node is told to stop; it is killed and started again after this time.
    Stop {
        node: usize,
        for_ms: u64,
    },
    /// The time of the stop is over.
    StopOver {
        node: usize,
        incarnation: u32,
    },
    /// An operator has the node emptied, and ends that after a time.
    Drain {
        node: usize,
        for_ms: u64,
    },
    Undrain {
        node: usize,
    },
    Added {
        master: usize,
    },
    Retired {
        master: usize,
    },
}

impl Fault {
    /// Whether this is the end of a fault that began earlier.
    pub(crate) fn is_end(&self) -> bool {
        matches!(self, Fault::DiskHeals { .. } | Fault::StopOver { .. })
    }
}

/// How long something is broken: mostly within a session's time, sometimes beyond it, seldom beyond any memory.
fn length_ms(rng: &mut SimRng) -> u64 {
    let longest = rng.choose(&[500, 3_000, 8_000, 8_000, 20_000, 20_000, 100_000]);
    rng.within(20, longest)
}

fn draw(kind: FaultKind, plan: &RunPlan, rng: &mut SimRng) -> Option<Fault> {
    let node = rng.below(plan.nodes as u64) as usize;
    let client = rng.below(plan.clients as u64) as usize;
    let master = rng.below(plan.masters as u64) as usize;
    let for_ms = length_ms(rng);
    let (any_node, any_client, any_master) =
        (ProcessId::Node(node), ProcessId::Client(client), ProcessId::Master(master));
    let lease_ms = LEASE.as_millis() as u64;
    let cut = |cut| Some(Fault::Partition { kind, cut, for_ms });
    match kind {
        FaultKind::NodeCut => cut(Partition::Around(any_node)),
        FaultKind::NodeUnheard => cut(Partition::OneWay(any_node, any_master)),
        FaultKind::NodeDeaf => cut(Partition::OneWay(any_master, any_node)),
        FaultKind::ClientCut => cut(Partition::Between(any_client, any_master)),
        FaultKind::ClientUnheard => cut(Partition::OneWay(any_client, any_master)),
        FaultKind::ClientDeaf => cut(Partition::OneWay(any_master, any_client)),
        FaultKind::ClientUnheardByNode => cut(Partition::OneWay(any_client, any_node)),
        FaultKind::ClientDeafToNode => cut(Partition::OneWay(any_node, any_client)),
        FaultKind::MasterCrash => Some(Fault::Crash { process: any_master, for_ms: rng.within(50, 4_000) }),
        FaultKind::MasterOutlived => {
            Some(Fault::Crash { process: any_master, for_ms: rng.within(lease_ms, 8 * lease_ms) })
        }
        FaultKind::NodeCrash => Some(Fault::Crash { process: any_node, for_ms: rng.within(50, 15_000) }),
        FaultKind::ClientCrash => Some(Fault::Crash { process: any_client, for_ms: rng.within(0, 500) }),
        FaultKind::MasterPause => Some(Fault::Pause { process: any_master, for_ms: for_ms.min(lease_ms) }),
        FaultKind::MasterFrozen => {
            Some(Fault::Pause { process: any_master, for_ms: rng.within(lease_ms + 1, 6 * lease_ms) })
        }
        FaultKind::MasterAdded => Some(Fault::Added { master }),
        FaultKind::MasterRetired => Some(Fault::Retired { master }),
        FaultKind::MastersCut => {
            let other = ProcessId::Master((master + 1) % plan.masters);
            cut(Partition::Between(any_master, other))
        }
        FaultKind::RegistryAway => cut(Partition::Around(ProcessId::Registry)),
        FaultKind::RegistryCut => cut(Partition::Between(any_master, ProcessId::Registry)),
        FaultKind::NodePause => Some(Fault::Pause { process: any_node, for_ms }),
        FaultKind::ClientPause => Some(Fault::Pause { process: any_client, for_ms }),
        FaultKind::WallJump => {
            let process = rng.choose(&[any_master, any_node, any_client]);
            let by_ms = rng.within(0, 7_200_000) as i64 - 3_600_000;
            Some(Fault::Jump { process, by_ms })
        }
        FaultKind::NodeSlow => Some(Fault::Slow { node, for_ms }),
        FaultKind::DiskFails => Some(Fault::DiskFails { node, failure: DiskFailure::Writes, for_ms }),
        FaultKind::DiskFull => Some(Fault::DiskFails { node, failure: DiskFailure::Full, for_ms }),
        FaultKind::PowerLost => {
            let (operations, for_ms) = (rng.choose(&[0, 1]) * rng.below(200), rng.within(1_000, 60_000));
            Some(Fault::PowerFails { node, operations, for_ms })
        }
        FaultKind::NodeStopped => Some(Fault::Stop { node, for_ms: rng.within(50, 10_000) }),
        FaultKind::StreamBroken => Some(Fault::Reset { node }),
        FaultKind::NodeDrained => Some(Fault::Drain { node, for_ms: rng.within(500, 60_000) }),
        // The network injects these itself, or they exist from the beginning.
        FaultKind::Lost
        | FaultKind::Delayed
        | FaultKind::Twice
        | FaultKind::Overtaken
        | FaultKind::PutCutShort
        | FaultKind::HandedOver
        | FaultKind::NodeNotStarted
        | FaultKind::Aimed
        | FaultKind::Drift => None,
    }
}

/// Schedules all faults of a run.
pub(crate) fn schedule(plan: &RunPlan, seed: u64, events: &mut Events) {
    let mut rng = SimRng::new(seed);
    for &(kind, every) in &plan.faults {
        let every = every.as_millis() as u64;
        let mut at = rng.below(2 * every);
        while at < plan.length.as_millis() as u64 {
            if let Some(fault) = draw(kind, plan, &mut rng) {
                events.at(MonoTime(0).after(Duration::from_millis(at)), Event::Fault(fault));
            }
            at += 1 + rng.below(2 * every);
        }
    }
}
