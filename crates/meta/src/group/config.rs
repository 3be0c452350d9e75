//! [`GroupConfig`]: what a master configures of a group.

use std::num::NonZeroU16;
use std::time::Duration;

use moontide_types::limits::{LEASE_MS_MAX, PAGE_BYTES, RESERVATION_MS_MAX};
use moontide_types::{GroupId, Term};

use super::{Admission, OffloadTrigger};
use crate::placement::PlacementKind;

/// Configuration of a group.
#[derive(Clone, Debug, PartialEq)]
pub struct GroupConfig {
    /// Id of the group.
    pub group: GroupId,
    /// Number of groups of the cluster.
    pub groups: NonZeroU16,
    /// Term of the master that runs the group.
    pub term: Term,
    /// Preceding term; zero if no master has run the group before, so that no earlier objects exist.
    pub previous_term: Term,
    /// Number of durable exclusions of the group, from all earlier masters ([`Group::excluded`](super::Group::excluded)).
    pub exclusion: u32,
    /// Seed of the random generator for placements.
    pub seed: u64,
    /// Placement strategy of new objects.
    pub placement: PlacementKind,
    /// Share of bytes or slots, in thousandths, above which eviction starts.
    pub eviction_high_watermark_permille: u16,
    /// Share of bytes and slots, in thousandths, below which eviction stops.
    pub eviction_low_watermark_permille: u16,
    /// Time that a writer has for a put.
    pub reservation: Duration,
    /// Time for which the group allocates nothing in a segment of which an earlier master, or an earlier session, may
    /// have allocated parts.
    pub reallocation_delay: Duration,
    /// Time for which a new master waits for nodes of the preceding term. Removals are not certain until then. Segments
    /// that report later are treated as empty, because they may contain removed objects.
    pub report_wait: Duration,
    /// Time within which a node may return with objects that were removed in its absence.
    pub rejoin_window: Duration,
    /// Time within which a disk that went away, or has not reported in this term, may return with its records. The
    /// group keeps tombstones of versions that were removed or dropped in the meantime. After this time the disk is
    /// treated as empty, because the tombstones are gone.
    pub disk_rejoin_window: Duration,
    /// Time from the loss of replicas until they are made again from others: a node that only restarts or reconnects returns
    /// within it.
    pub repair_delay: Duration,
    /// Bytes per second that each node may receive for the balance of the nodes, of all groups together; 0: none.
    pub rebalance_bytes_per_s: u64,
    /// Difference between the fullest and the emptiest node, in thousandths of their memory, above which records move.
    pub rebalance_skew_permille: u16,
    /// Bytes of an object that the processes of one host must read within some seconds for a copy on its node; 0: no copies.
    pub hot_copy_bytes: u64,
    /// Time after which such a copy is released if it is not read.
    pub hot_copy_idle: Duration,
    /// Time that a node has for writing an object to its disk.
    pub offload_window: Duration,
    /// When objects are written to a disk.
    pub offload: OffloadTrigger,
    /// Which objects are written to a disk.
    pub admission: Admission,
    /// Maximum length of a stripe, in bytes; larger objects are split, unless the writer chooses the stripe length. If
    /// segments are small, stripes are shorter, so that two fit into the largest segment: an object larger than a
    /// segment can be stored, too.
    pub stripe_bytes_max: u64,
}

impl GroupConfig {
    /// Default configuration.
    pub fn new(group: GroupId, groups: NonZeroU16, term: Term) -> GroupConfig {
        GroupConfig {
            group,
            groups,
            term,
            previous_term: Term::new(term.get().saturating_sub(1)).expect("term minus one is a valid term"),
            exclusion: 0,
            seed: u64::from(group.0),
            placement: PlacementKind::default(),
            eviction_high_watermark_permille: 980,
            eviction_low_watermark_permille: 960,
            reservation: Duration::from_millis(RESERVATION_MS_MAX.into()),
            // A lease or a reservation of the preceding term, whichever is longer, and 1 % for clock drift.
            reallocation_delay: Duration::from_millis(
                u64::from(LEASE_MS_MAX.max(RESERVATION_MS_MAX)) * 101 / 100,
            ),
            report_wait: Duration::from_secs(30),
            rejoin_window: Duration::from_secs(60),
            disk_rejoin_window: Duration::from_secs(900),
            repair_delay: Duration::from_secs(30),
            rebalance_bytes_per_s: 128 << 20,
            rebalance_skew_permille: 100,
            hot_copy_bytes: 4 << 20,
            hot_copy_idle: Duration::from_secs(60),
            offload_window: Duration::from_millis(LEASE_MS_MAX.into()),
            offload: OffloadTrigger::default(),
            admission: Admission::default(),
            stripe_bytes_max: 256 << 20,
        }
    }
}

const _: () = assert!((256 << 20) % PAGE_BYTES == 0);
