//! [`Fault`]s: what breaks, and when, drawn from the seed before anything runs; and [`FaultCounts`]: what did break.

use std::time::Duration;

use moontide_types::MonoTime;

use crate::dice::Dice;
use crate::event::{Event, Events, Who};
use crate::master::LEASE;
use crate::network::Cut;
use crate::plan::Plan;

macro_rules! kinds {
    ($($(#[$doc:meta])* $name:ident = $text:literal,)*) => {
        /// A kind of fault.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum FaultKind {
            $($(#[$doc])* $name,)*
        }

        impl FaultKind {
            /// All of them.
            pub const ALL: &[FaultKind] = &[$(FaultKind::$name,)*];

            /// What it is called.
            pub const fn name(self) -> &'static str {
                match self { $(FaultKind::$name => $text,)* }
            }
        }
    };
}

kinds! {
    /// A message never arrives.
    Lost = "message lost",
    /// A message takes long.
    Delayed = "message delayed",
    /// A message arrives twice.
    Twice = "message twice",
    /// A message overtakes one that was sent before it.
    Overtaken = "message overtaken",
    /// The connection of a node's session breaks.
    StreamBroken = "stream broken",
    /// A node is cut off from everybody.
    NodeCut = "node cut off",
    /// A master does not hear a node.
    NodeUnheard = "node unheard by master",
    /// A node does not hear a master.
    NodeDeaf = "node deaf to master",
    /// A client and the master are cut off from each other.
    ClientCut = "client cut off from master",
    /// The master does not hear a client.
    ClientUnheard = "client unheard by master",
    /// A client does not hear the master.
    ClientDeaf = "client deaf to master",
    /// A node does not hear a client.
    ClientUnheardByNode = "client unheard by node",
    /// A client does not hear a node.
    ClientDeafToNode = "client deaf to node",
    /// A master's process ends; the next one knows nothing.
    MasterCrash = "master crash",
    /// A node's process ends; its memory is gone.
    NodeCrash = "node crash",
    /// A client's process ends.
    ClientCrash = "client crash",
    /// A client's process ends in the middle of a put.
    PutCutShort = "client crash in a put",
    /// A master's process ends, and another one has taken its groups before it is there again.
    MasterOutlived = "master crash beyond its lease",
    /// A master is stopped, and goes on later.
    MasterPause = "master paused",
    /// A master is stopped for longer than its lease.
    MasterFrozen = "master paused beyond its lease",
    /// A master is added.
    MasterAdded = "master added",
    /// A master gives everything away and ends.
    MasterRetired = "master retires",
    /// A group is handed over.
    HandedOver = "group handed over",
    /// Two masters are cut off from each other.
    MastersCut = "masters cut off from each other",
    /// Nobody reaches the registry.
    RegistryAway = "registry away",
    /// A master does not reach the registry.
    RegistryCut = "registry away for one master",
    /// A node is stopped, and goes on later.
    NodePause = "node paused",
    /// A client is stopped, and goes on later.
    ClientPause = "client paused",
    /// A clock runs fast or slow.
    Drift = "clock drifts",
    /// A calendar is set.
    WallJump = "calendar jumps",
    /// A node takes its time.
    NodeSlow = "node slow",
    /// Nothing can be written to a node's disk.
    DiskFails = "disk fails",
}

impl FaultKind {
    /// Whether it takes a registry to happen.
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

/// How often each kind has happened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct FaultCounts([u64; FaultKind::ALL.len()]);

impl FaultCounts {
    /// One more.
    pub(crate) fn add(&mut self, kind: FaultKind) {
        self.0[kind as usize] += 1;
    }

    /// How many of a kind.
    pub fn of(&self, kind: FaultKind) -> u64 {
        self.0[kind as usize]
    }

    /// Those of another run, too.
    pub fn merge(&mut self, other: &FaultCounts) {
        self.0.iter_mut().zip(other.0).for_each(|(sum, more)| *sum += more);
    }
}

/// Something breaks.
#[derive(Clone, Copy, Debug, Hash)]
pub(crate) enum Fault {
    Cut { kind: FaultKind, cut: Cut, for_ms: u64 },
    Crash { who: Who, for_ms: u64 },
    Pause { who: Who, for_ms: u64 },
    Jump { who: Who, by_ms: i64 },
    Slow { node: usize, for_ms: u64 },
    Reset { node: usize },
    DiskFails { node: usize, for_ms: u64 },
    Added { master: usize },
    Retired { master: usize },
}

/// How long something is broken: mostly within a session's time, sometimes beyond it, seldom beyond any memory.
fn length_ms(dice: &mut Dice) -> u64 {
    let longest = dice.of(&[500, 3_000, 8_000, 8_000, 20_000, 20_000, 100_000]);
    dice.within(20, longest)
}

fn draw(kind: FaultKind, plan: &Plan, dice: &mut Dice) -> Option<Fault> {
    let node = dice.below(plan.nodes as u64) as usize;
    let client = dice.below(plan.clients as u64) as usize;
    let master = dice.below(plan.masters as u64) as usize;
    let for_ms = length_ms(dice);
    let (any_node, any_client, any_master) = (Who::Node(node), Who::Client(client), Who::Master(master));
    let lease_ms = LEASE.as_millis() as u64;
    let cut = |cut| Some(Fault::Cut { kind, cut, for_ms });
    match kind {
        FaultKind::NodeCut => cut(Cut::Around(any_node)),
        FaultKind::NodeUnheard => cut(Cut::OneWay(any_node, any_master)),
        FaultKind::NodeDeaf => cut(Cut::OneWay(any_master, any_node)),
        FaultKind::ClientCut => cut(Cut::Between(any_client, any_master)),
        FaultKind::ClientUnheard => cut(Cut::OneWay(any_client, any_master)),
        FaultKind::ClientDeaf => cut(Cut::OneWay(any_master, any_client)),
        FaultKind::ClientUnheardByNode => cut(Cut::OneWay(any_client, any_node)),
        FaultKind::ClientDeafToNode => cut(Cut::OneWay(any_node, any_client)),
        FaultKind::MasterCrash => Some(Fault::Crash { who: any_master, for_ms: dice.within(50, 4_000) }),
        FaultKind::MasterOutlived => {
            Some(Fault::Crash { who: any_master, for_ms: dice.within(lease_ms, 8 * lease_ms) })
        }
        FaultKind::NodeCrash => Some(Fault::Crash { who: any_node, for_ms: dice.within(50, 15_000) }),
        FaultKind::ClientCrash => Some(Fault::Crash { who: any_client, for_ms: dice.within(0, 500) }),
        FaultKind::MasterPause => Some(Fault::Pause { who: any_master, for_ms: for_ms.min(lease_ms) }),
        FaultKind::MasterFrozen => {
            Some(Fault::Pause { who: any_master, for_ms: dice.within(lease_ms + 1, 6 * lease_ms) })
        }
        FaultKind::MasterAdded => Some(Fault::Added { master }),
        FaultKind::MasterRetired => Some(Fault::Retired { master }),
        FaultKind::MastersCut => {
            let other = Who::Master((master + 1) % plan.masters);
            cut(Cut::Between(any_master, other))
        }
        FaultKind::RegistryAway => cut(Cut::Around(Who::Registry)),
        FaultKind::RegistryCut => cut(Cut::Between(any_master, Who::Registry)),
        FaultKind::NodePause => Some(Fault::Pause { who: any_node, for_ms }),
        FaultKind::ClientPause => Some(Fault::Pause { who: any_client, for_ms }),
        FaultKind::WallJump => {
            let who = dice.of(&[any_master, any_node, any_client]);
            let by_ms = dice.within(0, 7_200_000) as i64 - 3_600_000;
            Some(Fault::Jump { who, by_ms })
        }
        FaultKind::NodeSlow => Some(Fault::Slow { node, for_ms }),
        FaultKind::DiskFails => Some(Fault::DiskFails { node, for_ms }),
        FaultKind::StreamBroken => Some(Fault::Reset { node }),
        // These the network does by itself, or they are there from the beginning.
        FaultKind::Lost
        | FaultKind::Delayed
        | FaultKind::Twice
        | FaultKind::Overtaken
        | FaultKind::PutCutShort
        | FaultKind::HandedOver
        | FaultKind::Drift => None,
    }
}

/// Schedules all faults of a run.
pub(crate) fn schedule(plan: &Plan, seed: u64, events: &mut Events) {
    let mut dice = Dice::new(seed);
    for &(kind, every) in &plan.faults {
        let every = every.as_millis() as u64;
        let mut at = dice.below(2 * every);
        while at < plan.length.as_millis() as u64 {
            if let Some(fault) = draw(kind, plan, &mut dice) {
                events.at(MonoTime(0).after(Duration::from_millis(at)), Event::Fault(fault));
            }
            at += 1 + dice.below(2 * every);
        }
    }
}
