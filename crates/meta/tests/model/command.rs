//! [`Command`]: one step of a sequence, and the strategies that generate them.
//!
//! Commands identify objects, nodes and segments by small numbers, which the harness takes modulo the existing count.
//! So a sequence stays meaningful after any of its commands is removed, which makes shrinking work.

use moontide_meta::DrainMode;
use moontide_types::Spread;
use proptest::prelude::*;

/// Parameters of a put.
#[derive(Clone, Debug)]
pub(crate) struct Put {
    pub(crate) key: u8,
    pub(crate) len: u64,
    pub(crate) replicas: u8,
    pub(crate) replicas_min: u8,
    pub(crate) stripes: Option<u16>,
    pub(crate) upsert: bool,
    pub(crate) one_sided: bool,
    pub(crate) ttl_ms: u64,
    pub(crate) pin: u8,
    pub(crate) cohort: Option<u8>,
    pub(crate) parent: bool,
    pub(crate) caller: u8,
    pub(crate) local: Option<u8>,
    pub(crate) preferred: Option<u8>,
    /// Number of a spread; 0 for none.
    pub(crate) spread: u8,
    pub(crate) disk_replicas: u8,
}

/// One step. Indices are taken modulo the existing count; an index of puts counts from the newest.
#[derive(Clone, Debug)]
pub(crate) enum Command {
    /// Only the reservation.
    PutStart(Put),
    /// Reservation, writes at all nodes, and the end.
    PutWhole(Put),
    /// Writes and publishes all locations of a put at the nodes.
    WriteAll {
        put: u8,
    },
    Begin {
        put: u8,
        location: u8,
    },
    Commit {
        put: u8,
        location: u8,
    },
    /// Begins all locations, and publishes those whose bits are set.
    WriteSome {
        put: u8,
        published: u8,
    },
    /// The writer's process dies: its claims at all nodes are released.
    WriterDies {
        put: u8,
    },
    /// The PutEnd; set bits are replicas reported as failed although they were written.
    PutEnd {
        put: u8,
        failed: u8,
    },
    Revoke {
        put: u8,
    },
    Lookup {
        key: u8,
        lease_ms: u32,
    },
    Exist {
        key: u8,
    },
    Touch {
        key: u8,
        lease_ms: u32,
    },
    SetPin {
        key: u8,
        pin: u8,
    },
    Remove {
        key: u8,
        force: bool,
    },
    Job {
        tenant: u8,
        kind: u8,
        force: bool,
    },
    /// A node executes `count` commands of its session.
    Execute {
        node: u8,
        count: u8,
        refuse: bool,
    },
    /// `count` of its responses arrive.
    Respond {
        node: u8,
        count: u8,
    },
    /// `count` records of a segment's report arrive.
    Report {
        segment: u8,
        count: u8,
    },
    /// The end of a segment's snapshot arrives.
    ReportEnd {
        segment: u8,
    },
    /// All messages in flight arrive, of all nodes.
    Settle,
    /// A local reader pins a slot.
    Hold {
        segment: u8,
        slot: u8,
    },
    /// All local readers of a node release their slots.
    ReleaseReaders {
        node: u8,
    },
    /// The node finds a corrupted record and kills it without a command.
    Scrub {
        segment: u8,
        slot: u8,
    },
    /// The next record that a node writes to its disk is durable.
    DiskWrite {
        node: u8,
    },
    /// A node sends a notice of a record that it wrote, or that it found on its disk.
    DiskNotice {
        node: u8,
        found: bool,
        count: u8,
    },
    /// The next record that a node promotes from its disk is READY.
    DiskPromote {
        node: u8,
    },
    /// A full disk of a node evicts a record.
    DiskEvict {
        node: u8,
        index: u8,
    },
    DiskStatus {
        node: u8,
        accepts: bool,
    },
    /// Eviction, and the resulting work of nodes: afterwards objects that are not in use are only on disk.
    Demote {
        objects: u8,
    },
    /// Promotion commands for all requested objects, which the nodes begin to execute.
    Promote {
        key: u8,
    },
    /// A node's process ends and starts again.
    Restart {
        node: u8,
    },
    /// A node announces that it is about to stop.
    Flush {
        node: u8,
    },
    /// A node is flushed completely, its process ends and starts again.
    StopAndStart {
        node: u8,
    },
    /// A node's process ends, and the master detects it.
    CrashNode {
        node: u8,
    },
    Prefetch {
        key: u8,
    },
    Tick {
        budget: u8,
    },
    Advance {
        ms: u32,
    },
    Evict {
        target_permille: u16,
        objects: u8,
    },
    Quota {
        tenant: u8,
        units: u16,
        objects: u8,
    },
    Drain {
        segment: u8,
        mode: DrainMode,
    },
    Undrain {
        segment: u8,
    },
    /// The processes of a node's host read much of an object.
    RemoteReads {
        key: u8,
        reader: u8,
    },
    /// A node makes the next copy that it was commanded to make.
    Copy {
        node: u8,
    },
    /// Permanent unmount: the node drops the segment's records.
    Unmount {
        segment: u8,
    },
    /// The node's session ends; the node itself continues.
    Lose {
        node: u8,
    },
    /// The node mounts its unmounted segments whose bits are clear, in its session or a new one.
    Mount {
        node: u8,
        segments: u8,
    },
    /// The node opens a new session before the master detects the loss of the old one, and mounts some segments in it.
    Reconnect {
        node: u8,
        segments: u8,
    },
    /// The master crashes; another one starts with the next term.
    Crash,
    /// Reports under foreign terms.
    ForeignTerm {
        segment: u8,
    },
}

fn len() -> impl Strategy<Value = u64> {
    prop_oneof![
        1 => Just(0),
        6 => 1u64..2_000,
        5 => 2_000u64..20_000,
        2 => 20_000u64..60_000,
        2 => Just(300 << 10),
        1 => Just(40 << 20),
    ]
}

fn put() -> impl Strategy<Value = Put> {
    let layout =
        (0u8..6, len(), 1u8..=3, 1u8..=3, prop_oneof![3 => Just(None), 1 => (1u16..3).prop_map(Some)]);
    let options = (
        prop::bool::weighted(0.4),
        prop::bool::weighted(0.2),
        prop_oneof![4 => Just(0u64), 1 => 1u64..40_000],
        prop_oneof![5 => Just(0u8), 1 => Just(1u8), 1 => Just(2u8)],
        prop_oneof![3 => Just(None), 1 => (0u8..2).prop_map(Some)],
        any::<bool>(),
    );
    let origin = (
        0u8..3,
        prop_oneof![3 => Just(None), 1 => (0u8..4).prop_map(Some)],
        prop_oneof![3 => Just(None), 1 => (0u8..4).prop_map(Some)],
        prop_oneof![3 => Just(0u8), 1 => Just(Spread::Rack.number())],
        prop_oneof![4 => Just(0u8), 1 => 1u8..=2],
    );
    (layout, options, origin).prop_map(|(layout, options, origin)| {
        let (key, len, replicas, min, stripes) = layout;
        let (upsert, one_sided, ttl_ms, pin, cohort, parent) = options;
        let (caller, local, preferred, spread, disk_replicas) = origin;
        let replicas_min = min.min(replicas);
        Put {
            key,
            len,
            replicas,
            replicas_min,
            stripes,
            upsert,
            one_sided,
            ttl_ms,
            pin,
            cohort,
            parent,
            caller,
            local,
            preferred,
            spread,
            disk_replicas: disk_replicas.min(replicas),
        }
    })
}

fn drain_mode() -> impl Strategy<Value = DrainMode> {
    prop_oneof![1 => Just(DrainMode::Keep), 3 => Just(DrainMode::Move), 2 => Just(DrainMode::Evict)]
}

fn lease_ms() -> impl Strategy<Value = u32> {
    prop_oneof![2 => Just(0u32), 3 => 1u32..6_000, 1 => Just(30_000u32), 1 => Just(u32::MAX)]
}

/// Generates one command.
pub(crate) fn command() -> impl Strategy<Value = Command> {
    let recent = || prop_oneof![5 => Just(0u8), 3 => 0u8..3, 1 => 0u8..16];
    let key = || 0u8..6;
    let client = prop_oneof![
        4 => put().prop_map(Command::PutStart),
        8 => put().prop_map(Command::PutWhole),
        5 => recent().prop_map(|put| Command::WriteAll { put }),
        3 => (recent(), 0u8..16).prop_map(|(put, published)| Command::WriteSome { put, published }),
        2 => (recent(), 0u8..6).prop_map(|(put, location)| Command::Begin { put, location }),
        3 => (recent(), 0u8..6).prop_map(|(put, location)| Command::Commit { put, location }),
        1 => recent().prop_map(|put| Command::WriterDies { put }),
        5 => (recent(), prop_oneof![3 => Just(0u8), 1 => 0u8..8]).prop_map(|(put, failed)| Command::PutEnd { put, failed }),
        1 => recent().prop_map(|put| Command::Revoke { put }),
        5 => (key(), lease_ms()).prop_map(|(key, lease_ms)| Command::Lookup { key, lease_ms }),
        1 => key().prop_map(|key| Command::Exist { key }),
        1 => (key(), lease_ms()).prop_map(|(key, lease_ms)| Command::Touch { key, lease_ms }),
        1 => (key(), 0u8..3).prop_map(|(key, pin)| Command::SetPin { key, pin }),
        2 => (key(), 0u8..4).prop_map(|(key, reader)| Command::RemoteReads { key, reader }),
        5 => (key(), any::<bool>()).prop_map(|(key, force)| Command::Remove { key, force }),
        1 => (0u8..2, 0u8..3, any::<bool>()).prop_map(|(tenant, kind, force)| Command::Job { tenant, kind, force }),
    ];
    let node = || 0u8..4;
    let segment = || 0u8..6;
    let few = || prop_oneof![2 => Just(1u8), 2 => 1u8..5, 1 => Just(u8::MAX)];
    let nodes = prop_oneof![
        6 => (node(), few(), prop::bool::weighted(0.05)).prop_map(|(node, count, refuse)| Command::Execute { node, count, refuse }),
        6 => (node(), few()).prop_map(|(node, count)| Command::Respond { node, count }),
        6 => (segment(), few()).prop_map(|(segment, count)| Command::Report { segment, count }),
        4 => segment().prop_map(|segment| Command::ReportEnd { segment }),
        4 => Just(Command::Settle),
        2 => (segment(), 0u8..16).prop_map(|(segment, slot)| Command::Hold { segment, slot }),
        2 => node().prop_map(|node| Command::ReleaseReaders { node }),
        1 => (segment(), 0u8..16).prop_map(|(segment, slot)| Command::Scrub { segment, slot }),
        1 => segment().prop_map(|segment| Command::ForeignTerm { segment }),
    ];
    let operator = prop_oneof![
        6 => prop_oneof![Just(0u8), 1u8..4, Just(u8::MAX)].prop_map(|budget| Command::Tick { budget }),
        4 => prop_oneof![3 => 1u32..50, 3 => 50u32..6_000, 2 => 6_000u32..31_000, 1 => 31_000u32..70_000].prop_map(|ms| Command::Advance { ms }),
        1 => (0u16..=1000, 1u8..8).prop_map(|(target_permille, objects)| Command::Evict { target_permille, objects }),
        1 => (0u8..2, prop_oneof![Just(0u16), 1u16..200], prop_oneof![Just(0u8), 1u8..4])
            .prop_map(|(tenant, units, objects)| Command::Quota { tenant, units, objects }),
        3 => (segment(), drain_mode()).prop_map(|(segment, mode)| Command::Drain { segment, mode }),
        1 => segment().prop_map(|segment| Command::Undrain { segment }),
        4 => node().prop_map(|node| Command::Copy { node }),
        1 => segment().prop_map(|segment| Command::Unmount { segment }),
        2 => node().prop_map(|node| Command::Lose { node }),
        6 => (node(), 0u8..4).prop_map(|(node, segments)| Command::Mount { node, segments }),
        1 => (node(), 0u8..4).prop_map(|(node, segments)| Command::Reconnect { node, segments }),
        1 => Just(Command::Crash),
    ];
    let disk = prop_oneof![
        6 => node().prop_map(|node| Command::DiskWrite { node }),
        7 => (node(), any::<bool>(), few()).prop_map(|(node, found, count)| Command::DiskNotice { node, found, count }),
        3 => node().prop_map(|node| Command::DiskPromote { node }),
        1 => (node(), 0u8..8).prop_map(|(node, index)| Command::DiskEvict { node, index }),
        1 => (node(), prop::bool::weighted(0.7)).prop_map(|(node, accepts)| Command::DiskStatus { node, accepts }),
        2 => node().prop_map(|node| Command::CrashNode { node }),
        2 => node().prop_map(|node| Command::Flush { node }),
        1 => node().prop_map(|node| Command::StopAndStart { node }),
        3 => key().prop_map(|key| Command::Prefetch { key }),
        3 => (0u16..400, 1u8..4).prop_map(|(target_permille, objects)| Command::Evict { target_permille, objects }),
    ];
    prop_oneof![5 => client, 4 => nodes, 2 => operator, 3 => disk]
}

/// Generates one command of a sequence that is mostly about disks.
pub(crate) fn disk_command() -> impl Strategy<Value = Command> {
    let key = || 0u8..6;
    let node = || prop::sample::select(vec![0u8, 2, 3]);
    let few = || prop_oneof![2 => Just(1u8), 1 => Just(u8::MAX)];
    // Short objects and hardly any pressure: an object is on disk only because a command moved it there.
    let disk_replicas = prop_oneof![2 => Just(0u8), 1 => 1u8..3];
    let local = prop_oneof![3 => Just(None), 2 => node().prop_map(Some)];
    let small = (key(), any::<bool>(), local, 1u8..3, disk_replicas).prop_map(
        |(key, upsert, local, replicas, disk_replicas)| Put {
            key,
            len: 700,
            replicas,
            replicas_min: 1,
            stripes: None,
            upsert,
            one_sided: false,
            ttl_ms: 0,
            pin: 0,
            cohort: None,
            parent: false,
            caller: 1,
            local,
            preferred: None,
            spread: 0,
            disk_replicas: disk_replicas.min(replicas),
        },
    );
    let striped = (key(), 1u8..3).prop_map(|(key, replicas)| Put {
        key,
        len: 300 << 10,
        replicas,
        replicas_min: 1,
        stripes: Some(2),
        upsert: true,
        one_sided: false,
        ttl_ms: 0,
        pin: 0,
        cohort: None,
        parent: false,
        caller: 1,
        local: None,
        preferred: None,
        spread: 0,
        disk_replicas: 0,
    });
    let disk = prop_oneof![
        10 => small.prop_map(Command::PutWhole),
        2 => striped.prop_map(Command::PutWhole),
        8 => (1u8..8).prop_map(|objects| Command::Demote { objects }),
        6 => key().prop_map(|key| Command::Promote { key }),
        3 => node().prop_map(|node| Command::Restart { node }),
        3 => node().prop_map(|node| Command::Flush { node }),
        2 => node().prop_map(|node| Command::StopAndStart { node }),
        4 => node().prop_map(|node| Command::DiskWrite { node }),
        6 => (node(), any::<bool>(), few()).prop_map(|(node, found, count)| Command::DiskNotice { node, found, count }),
        5 => node().prop_map(|node| Command::DiskPromote { node }),
        4 => (0u8..6, drain_mode()).prop_map(|(segment, mode)| Command::Drain { segment, mode }),
        2 => (0u8..6).prop_map(|segment| Command::Undrain { segment }),
        5 => node().prop_map(|node| Command::Copy { node }),
        3 => (node(), 0u8..8).prop_map(|(node, index)| Command::DiskEvict { node, index }),
        6 => (key(), any::<bool>()).prop_map(|(key, force)| Command::Remove { key, force }),
        4 => (key(), prop_oneof![3 => Just(0u32), 1 => Just(3_000)]).prop_map(|(key, lease_ms)| Command::Lookup { key, lease_ms }),
        5 => (node(), few(), prop::bool::weighted(0.1)).prop_map(|(node, count, refuse)| Command::Execute { node, count, refuse }),
        5 => (node(), few()).prop_map(|(node, count)| Command::Respond { node, count }),
        3 => (0u8..6, few()).prop_map(|(segment, count)| Command::Report { segment, count }),
        3 => Just(Command::Settle),
        2 => node().prop_map(|node| Command::Mount { node, segments: 0 }),
        3 => Just(Command::Tick { budget: u8::MAX }),
        2 => prop_oneof![Just(16u32), Just(31_000), Just(61_000)].prop_map(|ms| Command::Advance { ms }),
    ];
    prop_oneof![9 => disk, 1 => command()]
}
