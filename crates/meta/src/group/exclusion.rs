//! Exclusion: the durable decision to wait no longer for segments and disks that went away.
//!
//! A group gives up segments and disks that stay away, and answers removals with certainty from then on. If one of them
//! returns, this master treats its records as stale. But a master forgets with its process, and a later master trusts what
//! nodes report. So a group has a number of exclusions, which its master increments durably, in the registry or in the
//! file of the cluster, before it answers with certainty:
//!
//! ```text
//!   segment or disk given up ──▶ exclusion needed ──removal or upsert──▶ wanted ──written──▶ certain answer
//! ```
//!
//! A node in sync receives the number with the responses to its heartbeats, and reports it when it mounts its segments. A
//! segment with a lower number than the one that a new master begins with was away when a removal may have been
//! acknowledged without it.
//!
//! Without removals nothing is written, and a node may return after any number of changes of the master.

use std::time::Duration;

use moontide_types::{MonoTime, NodeId, SegmentId, SessionId};

use super::Group;
use crate::effect::Effects;
use crate::time::Now;

/// When a node was last in sync with a master of the group: all its records reported, and rejected ones gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SyncMark {
    /// Number of exclusions of the group at that time; zero if the node was never in sync.
    pub exclusion: u32,
    /// Time since then; [`Duration::MAX`] if the process of the node does not know.
    pub ago: Duration,
}

/// Whether a removal or an upsert can be undone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Certainty {
    /// It cannot.
    Certain,
    /// Not after the exclusion that was requested.
    AfterExclusion,
    /// By something that this master waits for, or that a later one would trust.
    Uncertain,
}

/// A higher number is an error of a node.
const EXCLUSIONS_MAX: u32 = 1 << 31;

/// Time within which an exclusion is expected to be durable. After it, removals and upserts no longer wait.
const EXCLUSION_WAIT: Duration = Duration::from_secs(5);

impl SyncMark {
    /// Mark of a node that was never in sync with a master of the group.
    pub const NONE: SyncMark = SyncMark { exclusion: 0, ago: Duration::MAX };
}

impl Group {
    /// Number of durable exclusions.
    pub fn exclusion(&self) -> u32 {
        self.exclusion
    }

    /// Returns the number of the exclusion that the master should make durable, if removals or upserts wait for it.
    pub fn wanted_exclusion(&self, now: Now) -> Option<u32> {
        let wanted = self.exclusion_needed && self.exclusion_wanted && !self.awaits_reports(now);
        wanted.then(|| self.exclusion + 1)
    }

    /// The number of exclusions is durable. Whatever is away now has a lower one.
    pub fn excluded(&mut self, number: u32, effects: &mut Effects) {
        if number <= self.exclusion {
            return;
        }
        (self.exclusion, self.exclusion_needed, self.exclusion_wanted) = (number, false, false);
        self.exclusion_awaited_since = None;
        // For segments that this master does not know it keeps no tombstones: they are stale from now on. For disks it
        // does, until `disk_reports_until`.
        if !moontide_rt::mutation_enabled("own-exclusion-ignored") {
            self.reports_until = MonoTime(0);
        }
        for removal in std::mem::take(&mut self.awaiting_exclusion) {
            self.kill_result(removal, false, effects);
        }
    }

    /// Whether a node has reported all records of this group, in memory and on disk, and has dropped the rejected ones.
    pub fn is_in_sync(&self, node: NodeId, session: SessionId, has_disk: bool) -> bool {
        // A node mounts its segments first, then its disk. A segment with a contradictory report is absent.
        let mounted = (!has_disk || self.by_name.contains_key(&(node, SegmentId::DISK)))
            && !self.absent.keys().any(|(absent, _)| *absent == node);
        self.nodes.get(&node).is_some_and(|node| {
            let is_in_sync = |&index: &u32| self.segment(index).is_in_sync();
            mounted && node.session == session && node.segments.iter().all(is_in_sync)
        })
    }

    /// Whether a segment or a disk was away when the group was excluded last, before this master began.
    ///
    /// A group waits at least `report_wait` before an exclusion. A segment that was in sync more recently was not away, but
    /// has not received the number, because the preceding master crashed.
    pub(super) fn was_excluded(&self, synced: SyncMark) -> bool {
        synced.exclusion < self.config.exclusion
            && synced.ago >= self.config.report_wait / 100 * 99
            && !moontide_rt::mutation_enabled("excluded-and-believed")
    }

    /// Learns the number that a node has seen. It is higher than that of the master only if the registry or the file of the
    /// cluster was lost; the next exclusion must be above it.
    pub(super) fn observe_sync_mark(&mut self, synced: SyncMark) {
        if synced.exclusion <= EXCLUSIONS_MAX {
            self.exclusion = self.exclusion.max(synced.exclusion);
        }
    }

    /// This master no longer waits for something that a later one would trust.
    pub(super) fn need_exclusion(&mut self) {
        self.exclusion_needed = !moontide_rt::mutation_enabled("given-up-without-exclusion");
    }

    /// Returns how certain a removal or an upsert is now.
    pub(super) fn certainty(&mut self, now: Now) -> Certainty {
        self.exclusion_wanted |= self.exclusion_needed;
        if self.awaits_reports(now) {
            return Certainty::Uncertain;
        }
        if !self.exclusion_needed {
            return Certainty::Certain;
        }
        let since = *self.exclusion_awaited_since.get_or_insert(now.mono);
        if now.mono.since(since) < EXCLUSION_WAIT { Certainty::AfterExclusion } else { Certainty::Uncertain }
    }
}
