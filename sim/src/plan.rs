//! [`RunPlan`]: parameters of a run. Each seed draws its own: sizes, load, and which faults occur how often. Leaving
//! out some faults exposes bugs that only occur without them.

use std::time::Duration;

use moontide_disk::{Faults, Times};
use moontide_meta::{Admission, OffloadTrigger};
use moontide_node::{BackendKind, EvictionPolicy};

use crate::coverage::{COINCIDENCES, PLACES};
use crate::faults::FaultKind;
use crate::rng::SimRng;

/// Default length of a run, in virtual time.
pub const LENGTH_DEFAULT: Duration = Duration::from_secs(600);

/// Parameters of a run.
#[derive(Clone, Debug)]
pub struct RunPlan {
    /// Virtual time until the end of the faults.
    pub length: Duration,
    /// Number of nodes.
    pub nodes: usize,
    /// Number of clients that put, get and remove.
    pub clients: usize,
    /// Number of masters; 1 without a registry.
    pub masters: usize,
    /// Whether the cluster has a registry.
    pub multi_master: bool,
    /// Number of groups.
    pub groups: u16,
    /// Number of keys shared by all clients.
    pub keys: usize,
    /// Length of the longest objects, in bytes.
    pub object_bytes_max: u64,
    /// Most replicas of a put.
    pub replicas_max: u8,
    /// Percentage of puts among all operations.
    pub puts_percent: u64,
    /// Percentage of removals among all operations.
    pub removals_percent: u64,
    /// Percentage of puts that replace an existing object.
    pub upserts_percent: u64,
    /// Segments per node.
    pub segments: usize,
    /// Units per segment.
    pub units: u32,
    /// Slots per segment.
    pub slots: u32,
    /// Capacity of a client's location cache, in objects.
    pub locations: usize,
    /// Mean pause of a client between two operations.
    pub think: Duration,
    /// Time to live of a node's session.
    pub session_ttl: Duration,
    /// Whether a restarted node keeps its id.
    pub stable_node_ids: bool,
    /// Limit of a node's copies from others, in bytes per second; 0 for none.
    pub copy_bytes_per_s: u64,
    /// Time from the loss of replicas until masters have them made again.
    pub repair_delay: Duration,
    /// Bytes per second that each node may receive from fuller ones.
    pub rebalance_bytes_per_s: u64,
    /// Bytes of an object that the clients of a host must read for a copy there; a read counts a mebibyte.
    pub hot_copy_bytes: u64,
    /// Time after which such a copy is released if it is not read.
    pub hot_copy_idle: Duration,
    /// Interval at which nodes get new keys for capabilities.
    pub capability_rotation: Duration,
    /// Disk of each node.
    pub disk: Option<DiskPlan>,
    /// How often a thread of a node is interrupted at a lock, a channel or the clock, per million.
    pub switch_per_million: u32,
    /// How often it stalls there for 50 ms to 60 s, per million.
    pub stall_per_million: u32,
    /// Places at which a thread of a node is delayed by up to this time, per thousand times that it is there.
    pub delays: Vec<(&'static str, u32, Duration)>,
    /// Places and coincidences at which a node is hit by a fault, per thousand times that it reaches one.
    pub aims: Vec<(&'static str, u32, AimedFault)>,
    /// Faults of the network.
    pub network: NetworkPlan,
    /// Largest drift of a clock, in parts per million.
    pub drift_ppm_max: u64,
    /// Kinds of faults, each with the mean time between two of them.
    pub faults: Vec<(FaultKind, Duration)>,
}

/// Disk of a node.
#[derive(Clone, Debug)]
pub struct DiskPlan {
    /// Layout of the disk.
    pub backend: BackendKind,
    /// Which records leave a full disk first.
    pub eviction_policy: EvictionPolicy,
    /// When masters command writes.
    pub offload: OffloadTrigger,
    /// Which objects masters have written.
    pub admission: Admission,
    /// Units per segment of memory: with less memory, more of the objects are on the disk alone.
    pub units: u32,
    /// Limit of the bytes on the disk.
    pub limit_bytes: u64,
    /// Memory for records that are read.
    pub staging_bytes: u64,
    /// Threads that read.
    pub read_threads: usize,
    /// Faults and durations of single operations.
    pub faults: Faults,
}

impl DiskPlan {
    fn draw(rng: &mut SimRng) -> DiskPlan {
        let backend =
            rng.choose(&[BackendKind::Bucket, BackendKind::Bucket, BackendKind::File, BackendKind::Offset]);
        DiskPlan {
            backend,
            eviction_policy: rng.choose(&[EvictionPolicy::Fifo, EvictionPolicy::Lru]),
            offload: rng.choose(&[OffloadTrigger::Evict, OffloadTrigger::Put]),
            admission: rng.choose(&[Admission::All, Admission::All, Admission::Accessed]),
            units: rng.choose(&[64, 128, 256, 1024]),
            limit_bytes: rng.choose(&[576 << 10, 1 << 20, 4 << 20]),
            staging_bytes: rng.choose(&[256 << 10, 1 << 20]),
            read_threads: rng.choose(&[1, 2]),
            faults: Faults {
                read_error_permille: rng.choose(&[0, 0, 1, 10]),
                write_error_permille: rng.choose(&[0, 0, 1, 10]),
                torn_write_permille: rng.choose(&[0, 0, 1, 10]),
                sync_error_permille: rng.choose(&[0, 0, 1, 10]),
                name_error_permille: rng.choose(&[0, 0, 1, 10]),
                no_space_permille: rng.choose(&[0, 0, 1, 10]),
                flipped_read_permille: rng.choose(&[0, 0, 0, 5]),
                short_permille: rng.choose(&[0, 10, 200]),
                capacity: None,
                latency: None,
                times: Times {
                    usual_max: Duration::from_micros(rng.choose(&[200, 2_000, 40_000])),
                    stall_permille: rng.choose(&[0, 0, 1, 5]),
                    slow_sync_permille: rng.choose(&[0, 0, 50, 500]),
                },
            },
        }
    }
}

/// What happens to a node at a place of its code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AimedFault {
    /// Its process is killed.
    Kill,
    /// Its host loses power.
    PowerLoss,
    /// The connections of its sessions break.
    Reset,
    /// A master of its sessions crashes.
    MasterCrash,
}

/// Faults of the network, in thousandths of the messages.
#[derive(Clone, Copy, Debug, Default)]
pub struct NetworkPlan {
    /// Messages that are lost.
    pub lost_permille: u32,
    /// Messages that arrive twice.
    pub twice_permille: u32,
    /// Messages that take up to four seconds.
    pub slow_permille: u32,
}

/// Operations of all clients together, about, in a run of [`LENGTH_DEFAULT`].
const OPS: u64 = 80_000;

impl RunPlan {
    /// Draws the plan of a seed.
    pub fn draw(seed: u64) -> RunPlan {
        let mut rng = SimRng::new(seed ^ 0x5eed_0f9a_51b1);
        let clients = rng.within(2, 8);
        let nodes = rng.within(1, 6);
        let masters = rng.choose(&[0, 0, 1, 2, 2, 3, 4]);
        let shared = masters > 0;
        let groups = if shared { rng.choose(&[2, 4, 4, 6]) } else { rng.choose(&[1, 1, 2, 4]) };
        let mut faults = Vec::new();
        let happens = |kind: &FaultKind| mean_ms(*kind) > 0 && (shared || !kind.is_of_many_masters());
        let mut disk_rng = SimRng::new(seed ^ 0xd15c);
        let mut moves_rng = SimRng::new(seed ^ 0x6d6f);
        let mut keys_rng = SimRng::new(seed ^ 0x6b65);
        let disk = (disk_rng.below(3) > 0).then(|| DiskPlan::draw(&mut disk_rng));
        let happens = |kind: &FaultKind| happens(kind) && (disk.is_some() || !kind.is_of_disks());
        let kinds = FaultKind::ALL.iter().copied().filter(happens);
        // A few seeds have no scheduled faults, and a few have all of them.
        let enabled = rng.choose(&[0, 200, 400, 400, 600, 1000]);
        for kind in kinds {
            if rng.permille(enabled) {
                let factor = rng.choose(&[500, 1_500, 3_000, 6_000]);
                faults.push((kind, Duration::from_millis(mean_ms(kind) * factor / 1_000)));
            }
        }
        let (aims, delays) = draw_aims(&mut disk_rng);
        RunPlan {
            length: LENGTH_DEFAULT,
            nodes: nodes as usize,
            clients: clients as usize,
            masters: masters.max(1),
            multi_master: shared,
            groups,
            keys: rng.choose(&[4, 20, 60, 200]),
            object_bytes_max: rng.choose(&[600, 9_000, 30_000]),
            replicas_max: rng.within(1, 3) as u8,
            puts_percent: rng.choose(&[15, 30, 45]),
            removals_percent: rng.choose(&[0, 5, 10, 20]),
            upserts_percent: rng.choose(&[0, 20, 50, 100]),
            // As the product plans them: every group has one on every node.
            segments: usize::from(groups) * rng.within(1, 2) as usize,
            units: rng.choose(&[256, 512, 1024, 2048]).min(disk.as_ref().map_or(u32::MAX, |disk| disk.units)),
            slots: rng.choose(&[16, 40, 120]),
            locations: rng.choose(&[0, 8, 1000]),
            think: LENGTH_DEFAULT / (OPS / clients) as u32,
            session_ttl: Duration::from_secs(rng.choose(&[4, 10])),
            stable_node_ids: rng.permille(500),
            copy_bytes_per_s: disk_rng.choose(&[0, 0, 64 << 10]),
            repair_delay: Duration::from_secs(disk_rng.choose(&[0, 3, 10])),
            rebalance_bytes_per_s: moves_rng.choose(&[0, 64 << 10, 1 << 30]),
            hot_copy_bytes: moves_rng.choose(&[0, 1 << 20, 3 << 20]),
            hot_copy_idle: Duration::from_secs(moves_rng.choose(&[1, 4, 20])),
            capability_rotation: Duration::from_secs(keys_rng.choose(&[1, 3, 20, 300])),
            disk,
            switch_per_million: rng.choose(&[0, 1_000, 10_000]),
            stall_per_million: rng.choose(&[0, 0, 2, 20]),
            aims,
            delays,
            network: NetworkPlan {
                lost_permille: rng.choose(&[0, 0, 2, 10, 30]),
                twice_permille: rng.choose(&[0, 10, 50]),
                slow_permille: rng.choose(&[0, 2, 20]),
            },
            drift_ppm_max: rng.choose(&[0, 100, 10_000]),
            faults,
        }
    }

    /// Returns the plan without faults.
    #[must_use]
    pub fn without_faults(self) -> RunPlan {
        let disk = self.disk.map(|disk| DiskPlan { faults: Faults::default(), ..disk });
        RunPlan {
            faults: Vec::new(),
            network: NetworkPlan::default(),
            drift_ppm_max: 0,
            disk,
            stall_per_million: 0,
            delays: Vec::new(),
            aims: Vec::new(),
            ..self
        }
    }
}

type Aims = Vec<(&'static str, u32, AimedFault)>;
type Delays = Vec<(&'static str, u32, Duration)>;

/// Draws the faults at places, and the delays there. Most seeds concentrate on one to three places: threads are often late
/// there, and all kinds of faults hit the node or its masters meanwhile. The others have a few at any places.
fn draw_aims(rng: &mut SimRng) -> (Aims, Delays) {
    use AimedFault::{Kill, MasterCrash, PowerLoss, Reset};
    let most = |rng: &mut SimRng| Duration::from_millis(rng.choose(&[30, 300, 3_000, 20_000, 20_000]));
    if rng.below(4) > 0 {
        let mut places: Vec<&str> = (0..rng.within(1, 2)).map(|_| rng.choose(PLACES)).collect();
        if rng.below(2) == 0 {
            // A removal that is not durable is the state that most guarantees are about.
            places.push("about to write removals");
        }
        let faults = [Kill, PowerLoss, Reset, MasterCrash];
        let aims = faults.map(|fault| (rng.choose(&places), rng.choose(&[0, 20, 50, 200]), fault));
        let delays = places.iter().map(|place| (*place, rng.choose(&[100, 300, 1_000]), most(rng)));
        return (aims.to_vec(), delays.collect());
    }
    let aim = |rng: &mut SimRng| {
        let at = if rng.below(2) == 0 { rng.choose(PLACES) } else { rng.choose(COINCIDENCES) };
        (at, rng.choose(&[20, 100, 500]), rng.choose(&[Kill, PowerLoss, PowerLoss, Reset, MasterCrash]))
    };
    let aims = (0..rng.below(4)).map(|_| aim(rng)).collect();
    let delays = (0..rng.within(1, 5)).map(|_| (rng.choose(PLACES), rng.choose(&[50, 200, 500]), most(rng)));
    (aims, delays.collect())
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
        | FaultKind::NodeNotStarted
        | FaultKind::Aimed
        | FaultKind::Drift => 0,
        FaultKind::MasterCrash => 100_000,
        FaultKind::MasterOutlived => 150_000,
        FaultKind::MasterPause | FaultKind::MasterRetired | FaultKind::MasterAdded => 60_000,
        FaultKind::MasterFrozen => 100_000,
        FaultKind::NodeCrash => 80_000,
        FaultKind::PowerLost | FaultKind::NodeStopped => 80_000,
        FaultKind::ClientCrash => 10_000,
        FaultKind::WallJump => 60_000,
        FaultKind::NodeDrained => 20_000,
        _ => 40_000,
    }
}
