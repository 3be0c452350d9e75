//! [`Plan`]: what a run consists of. Each seed draws its own: how many of everything, how busy, and which faults, how
//! often. Faults that are never there together hide what only happens without one of them.

use std::time::Duration;

use crate::dice::Dice;
use crate::faults::FaultKind;

/// How long a run is unless told otherwise.
pub const LENGTH_DEFAULT: Duration = Duration::from_secs(600);

/// A run.
#[derive(Clone, Debug)]
pub struct Plan {
    /// Virtual time until everything is mended.
    pub length: Duration,
    /// Nodes.
    pub nodes: usize,
    /// Clients that put, get and remove.
    pub clients: usize,
    /// Masters, where there is a registry; otherwise one.
    pub masters: usize,
    /// Whether there is a registry.
    pub shared: bool,
    /// Groups of the cluster.
    pub groups: u16,
    /// Keys that all clients fight for.
    pub keys: usize,
    /// Longest objects, in bytes.
    pub object_bytes_max: u64,
    /// Most replicas of a put.
    pub replicas_max: u8,
    /// Of a hundred operations, how many are puts.
    pub puts_percent: u64,
    /// Of a hundred operations, how many are removals.
    pub removals_percent: u64,
    /// Of a hundred puts, how many replace what is there.
    pub upserts_percent: u64,
    /// Segments of a node.
    pub segments: usize,
    /// Units of a segment.
    pub units: u32,
    /// Slots of a segment.
    pub slots: u32,
    /// Places that a client remembers.
    pub locations: usize,
    /// Mean pause of a client between two operations.
    pub think: Duration,
    /// How long a node's session lasts without a word.
    pub session_ttl: Duration,
    /// Whether a node that starts again has its old number.
    pub keeps_number: bool,
    /// How many records each node's disk holds at most; 0 if they have none.
    pub disk_records: usize,
    /// How bad the network is.
    pub network: NetworkPlan,
    /// How far clocks are off, in parts per million.
    pub drift_ppm_max: u64,
    /// What breaks, and the mean time between two times.
    pub faults: Vec<(FaultKind, Duration)>,
}

/// How bad the network is, in thousandths of the messages.
#[derive(Clone, Copy, Debug, Default)]
pub struct NetworkPlan {
    /// Never arrive.
    pub lost_permille: u32,
    /// Arrive twice.
    pub twice_permille: u32,
    /// Take up to some seconds.
    pub slow_permille: u32,
}

/// Operations of all clients together, about, in a run of [`LENGTH_DEFAULT`].
const OPS: u64 = 40_000;

impl Plan {
    /// The plan of a seed.
    pub fn draw(seed: u64) -> Plan {
        let mut dice = Dice::new(seed ^ 0x5eed_0f9a_51b1);
        let clients = dice.within(2, 8);
        let nodes = dice.within(1, 6);
        let masters = dice.of(&[0, 0, 1, 2, 2, 3, 4]);
        let shared = masters > 0;
        let groups = if shared { dice.of(&[2, 4, 4, 6]) } else { dice.of(&[1, 1, 2, 4]) };
        let mut faults = Vec::new();
        let happens = |kind: &FaultKind| mean_ms(*kind) > 0 && (shared || !kind.is_of_many_masters());
        let disk_records = Dice::new(seed ^ 0xd15c).of(&[0, 0, 0, 6, 30, 200]);
        let happens = |kind: &FaultKind| happens(kind) && (disk_records > 0 || *kind != FaultKind::DiskFails);
        let kinds = FaultKind::ALL.iter().copied().filter(happens);
        // A few seeds break nothing but what is always there, and a few break everything.
        let enabled = dice.of(&[0, 200, 400, 400, 600, 1000]);
        for kind in kinds {
            if dice.permille(enabled) {
                let factor = dice.of(&[500, 1_500, 3_000, 6_000]);
                faults.push((kind, Duration::from_millis(mean_ms(kind) * factor / 1_000)));
            }
        }
        Plan {
            length: LENGTH_DEFAULT,
            nodes: nodes as usize,
            clients: clients as usize,
            masters: masters.max(1),
            shared,
            groups,
            keys: dice.of(&[4, 20, 60, 200]),
            object_bytes_max: dice.of(&[600, 9_000, 30_000]),
            replicas_max: dice.within(1, 3) as u8,
            puts_percent: dice.of(&[15, 30, 45]),
            removals_percent: dice.of(&[0, 5, 10, 20]),
            upserts_percent: dice.of(&[0, 20, 50, 100]),
            // As the product plans them: every group has one on every node.
            segments: usize::from(groups) * dice.within(1, 2) as usize,
            units: dice.of(&[256, 512, 1024, 2048]),
            slots: dice.of(&[16, 40, 120]),
            locations: dice.of(&[0, 8, 1000]),
            think: LENGTH_DEFAULT / (OPS / clients) as u32,
            session_ttl: Duration::from_secs(dice.of(&[4, 10])),
            keeps_number: dice.permille(500),
            disk_records,
            network: NetworkPlan {
                lost_permille: dice.of(&[0, 0, 2, 10, 30]),
                twice_permille: dice.of(&[0, 10, 50]),
                slow_permille: dice.of(&[0, 2, 20]),
            },
            drift_ppm_max: dice.of(&[0, 100, 10_000]),
            faults,
        }
    }

    /// Nothing breaks, and the network is good.
    #[must_use]
    pub fn calm(self) -> Plan {
        Plan { faults: Vec::new(), network: NetworkPlan::default(), drift_ppm_max: 0, ..self }
    }
}

/// The usual time between two faults of a kind; 0 for those that are not scheduled.
fn mean_ms(kind: FaultKind) -> u64 {
    match kind {
        FaultKind::Lost
        | FaultKind::Delayed
        | FaultKind::Twice
        | FaultKind::Overtaken
        | FaultKind::PutCutShort
        | FaultKind::HandedOver
        | FaultKind::Drift => 0,
        FaultKind::MasterCrash => 100_000,
        FaultKind::MasterOutlived => 150_000,
        FaultKind::MasterPause | FaultKind::MasterRetired | FaultKind::MasterAdded => 60_000,
        FaultKind::MasterFrozen => 100_000,
        FaultKind::NodeCrash => 80_000,
        FaultKind::ClientCrash => 10_000,
        FaultKind::WallJump => 60_000,
        _ => 40_000,
    }
}
