//! Balance of the nodes: moves of records from full nodes to empty ones, such as a node that has joined.
//!
//! Once a second the group compares how full its nodes are. If the fullest and the emptiest one differ by more than
//! [`GroupConfig::rebalance_skew_permille`], it moves records from the nodes above the mean to those below it, until the
//! difference is half of that. No move takes a node across the mean, so that the moves end: a record that is longer than the
//! difference stays where it is. The records of least value move first: those that are read often stay near their readers,
//! and what is next to be evicted is kept. The moves are copies ([`copies`](super::copies)) of a bounded rate,
//! [`GroupConfig::rebalance_bytes_per_s`] for each node that takes records, and nodes make all other copies before them.
//!
//! ```text
//!   look ──▶ skewed: sources and their excess, targets ──▶ scan of the sources ──▶ moves, the least valuable first
//!    ▲                                                                               │
//!    └───────────────────────────────── a second later ──────────────────────────────┘
//! ```
//!
//! [`GroupConfig::rebalance_skew_permille`]: super::GroupConfig::rebalance_skew_permille
//! [`GroupConfig::rebalance_bytes_per_s`]: super::GroupConfig::rebalance_bytes_per_s

use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::time::Duration;

use moontide_types::limits::UNIT_BYTES;
use moontide_types::{Medium, MonoTime, NodeId};

use super::Group;
use super::copies::{CopyTargets, NotStarted, TRIES_PER_COPY};
use super::flush::Candidate;
use crate::effect::{CopyPurpose, Effects};
use crate::ids::RecordRef;
use crate::record::RecordFlag;
use crate::segment::SlotState;
use crate::time::Now;

/// Time between two comparisons of the nodes.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Time between two scans of a segment.
const SCAN_INTERVAL: Duration = Duration::from_secs(10);

/// Records of a segment that a scan finds for moves: those of least value. They take 512 KiB; a further scan finds the next.
const FOUND_MAX: usize = 1 << 14;

/// State of the balance.
#[derive(Debug, Default)]
pub(super) struct Rebalance {
    /// Time of the next comparison.
    look_at: MonoTime,
    /// Segments from which records move.
    sources: BTreeMap<u32, Source>,
    /// Segments to which they move. They take turns.
    targets: Vec<Target>,
    /// Bytes that may be moved per second.
    bytes_per_s: u64,
    /// Bytes that may be moved now. Negative after a record that was longer than what was left.
    allowance: i64,
    refilled_at: MonoTime,
}

/// A segment that is fuller than the mean.
#[derive(Debug, Default)]
struct Source {
    /// Units above the mean. Those of moves in flight do not count.
    excess: u64,
    /// Next slot of the scan.
    next_slot: u32,
    /// Time before which no further scan begins.
    scan_at: MonoTime,
    /// During the scan: the records of least value so far, the most valuable of them on top.
    scanned: BinaryHeap<Candidate>,
    /// After it: the least valuable one last.
    found: Vec<Candidate>,
}

/// A segment that is emptier than the mean.
#[derive(Clone, Copy, Debug)]
struct Target {
    index: u32,
    /// Units below the mean.
    room: u64,
}

/// Units of a node, or of a segment.
#[derive(Clone, Copy, Debug, Default)]
struct Usage {
    used: u64,
    units: u64,
}

impl Usage {
    fn add(&mut self, other: Usage) {
        *self = Usage { used: self.used + other.used, units: self.units + other.units };
    }

    fn permille(self) -> u64 {
        self.used * 1000 / self.units.max(1)
    }

    /// Units that would be in use at the mean of all.
    fn at_mean(self, all: Usage) -> u64 {
        // Units have 32 bits in a segment, and a group has at most some thousand segments.
        (u128::from(self.units) * u128::from(all.used) / u128::from(all.units.max(1))) as u64
    }
}

impl Group {
    /// Whether records are being moved for the balance of the nodes.
    pub fn is_rebalancing(&self) -> bool {
        !self.rebalance.sources.is_empty()
    }

    /// Compares the nodes if it is time, and continues the moves: scans at most `slots` slots, and starts at most `copies`
    /// moves. Returns whether more could be done at once.
    pub(super) fn step_rebalance(
        &mut self,
        now: Now,
        slots: usize,
        copies: usize,
        effects: &mut Effects,
    ) -> bool {
        if self.config.rebalance_bytes_per_s == 0 {
            return false;
        }
        if self.rebalance.look_at <= now.mono {
            self.rebalance.look_at = now.mono.after(LOOK_INTERVAL);
            self.compare_nodes();
        }
        self.rebalance.refill(now.mono);
        let mut left = slots;
        let sources: Vec<u32> = self.rebalance.sources.keys().copied().collect();
        for &index in &sources {
            left -= self.scan_source(index, now, left);
        }
        for index in sources {
            self.start_moves(index, copies, effects);
        }
        slots > 0 && left == 0
    }

    /// Determines which segments are too full, and which ones take their records.
    fn compare_nodes(&mut self) {
        let leaving = self.units_leaving();
        let (mut all, mut nodes) = (Usage::default(), BTreeMap::<NodeId, Usage>::new());
        let mut segments: Vec<(u32, NodeId, Usage)> = vec![];
        for candidate in &self.candidates {
            let segment = self.segment(candidate.index);
            if segment.medium != Medium::Memory || segment.tenant.is_some() {
                continue;
            }
            let moved = leaving.get(&(segment.node, segment.id)).copied().unwrap_or(0);
            let used = u64::from(segment.units - segment.free_units()).saturating_sub(moved);
            let usage = Usage { used, units: segment.units.into() };
            nodes.entry(segment.node).or_default().add(usage);
            segments.push((candidate.index, segment.node, usage));
            all.add(usage);
        }
        let permilles = || nodes.values().map(|usage| usage.permille());
        let skew = permilles().max().unwrap_or(0) - permilles().min().unwrap_or(0);
        // It stops well below the limit at which it begins, so that it does not begin again at once.
        let limit = u64::from(self.config.rebalance_skew_permille);
        let limit = if self.is_rebalancing() { limit / 2 } else { limit };
        if skew <= limit {
            self.rebalance.end();
            return;
        }
        let is_above = |node: &NodeId| nodes[node].used > nodes[node].at_mean(all);
        let sources = segments
            .iter()
            .filter(|(_, node, usage)| is_above(node) && usage.used > usage.at_mean(all))
            .map(|&(index, _, usage)| (index, usage.used - usage.at_mean(all)));
        let mut former = std::mem::take(&mut self.rebalance.sources);
        self.rebalance.sources = sources
            .map(|(index, excess)| (index, Source { excess, ..former.remove(&index).unwrap_or_default() }))
            .collect();
        let mut targets: Vec<(u64, u32, NodeId, u64)> = segments
            .iter()
            .filter(|(_, node, usage)| !is_above(node) && usage.used < usage.at_mean(all))
            .map(|&(index, node, usage)| (usage.permille(), index, node, usage.at_mean(all) - usage.used))
            .collect();
        targets.sort_unstable();
        let receivers: BTreeSet<NodeId> = targets.iter().map(|&(_, _, node, _)| node).collect();
        let rate = self.config.rebalance_bytes_per_s * receivers.len() as u64;
        self.rebalance.bytes_per_s = (rate / u64::from(self.config.groups.get())).max(1);
        self.rebalance.targets =
            targets.into_iter().map(|(_, index, _, room)| Target { index, room }).collect();
    }

    /// Scans the slots of a source for its records of least value. Returns the number of scanned slots.
    fn scan_source(&mut self, index: u32, now: Now, budget: usize) -> usize {
        let slots = self.segment(index).slot_count();
        let Some(source) = self.rebalance.sources.get_mut(&index) else { return 0 };
        if source.next_slot >= slots && source.found.is_empty() && source.scan_at <= now.mono {
            (source.next_slot, source.scan_at) = (0, now.mono.after(SCAN_INTERVAL));
        }
        let first = source.next_slot;
        let end = slots.min(first.saturating_add(budget as u32));
        let mut scanned = std::mem::take(&mut source.scanned);
        for slot in first..end {
            if let SlotState::Object(at) = self.segment(index).slot(slot)
                && !self.slab.get(at).has(RecordFlag::Writing)
            {
                scanned.push(Candidate::new(self.slab.get(at)));
                if scanned.len() > FOUND_MAX {
                    scanned.pop();
                }
            }
        }
        let source = self.rebalance.sources.get_mut(&index).expect("found above");
        source.next_slot = end;
        if end < slots {
            source.scanned = scanned;
        } else if first < end {
            source.found = scanned.into_sorted_vec();
            source.found.reverse();
        }
        end.saturating_sub(first) as usize
    }

    /// Starts moves of a source, as far as the rate allows.
    fn start_moves(&mut self, index: u32, budget: usize, effects: &mut Effects) {
        let (mut started, mut tried) = (0, 0);
        while started < budget && tried < budget.saturating_mul(TRIES_PER_COPY) && self.rebalance.may_move() {
            let Some(source) = self.rebalance.sources.get_mut(&index) else { return };
            if source.excess == 0 {
                return;
            }
            let Some(candidate) = source.found.pop() else { return };
            tried += 1;
            let Some(at) = self.find_id(candidate.id) else { continue };
            match self.move_for_balance(at, index, effects) {
                Ok(units) => {
                    started += 1;
                    self.rebalance.moved(index, units);
                }
                // A later scan finds it again; others may fit.
                Err(NotStarted::Unsuitable | NotStarted::NoPlace | NotStarted::NoSpace) => {}
                Err(NotStarted::Busy) => {
                    if let Some(source) = self.rebalance.sources.get_mut(&index) {
                        source.found.push(candidate);
                    }
                    return;
                }
            }
        }
    }

    /// Starts to move one stripe that an object has in a segment, to the first target with enough room. Returns its units.
    fn move_for_balance(
        &mut self,
        at: RecordRef,
        index: u32,
        effects: &mut Effects,
    ) -> Result<u64, NotStarted> {
        let record = *self.slab.get(at);
        let position = (0..self.location_count(&record))
            .find(|&position| self.location(&record, position).segment == index)
            .ok_or(NotStarted::Unsuitable)?;
        let units = u64::from(self.segment(index).extent(self.location(&record, position).block).units);
        let excess = self.rebalance.sources.get(&index).map_or(0, |source| source.excess);
        if units > excess && !moontide_rt::mutation_enabled("move-across-the-mean") {
            return Err(NotStarted::Unsuitable);
        }
        let mut reason = NotStarted::NoPlace;
        for turn in 0..self.rebalance.targets.len() {
            let Target { index: target, room } = self.rebalance.targets[turn];
            if room < units && !moontide_rt::mutation_enabled("move-across-the-mean") {
                continue;
            }
            let targets = CopyTargets::Of(&[target]);
            match self.start_copy(at, position, CopyPurpose::Rebalance, targets, effects) {
                Ok(()) => {
                    self.rebalance.targets[turn].room = room.saturating_sub(units);
                    // The next record goes to the next target.
                    self.rebalance.targets.rotate_left(turn + 1);
                    return Ok(units);
                }
                Err(NotStarted::Busy) => reason = NotStarted::Busy,
                Err(NotStarted::Unsuitable) => return Err(NotStarted::Unsuitable),
                Err(NotStarted::NoSpace | NotStarted::NoPlace) => {}
            }
        }
        Err(reason)
    }

    /// Forgets a segment that is lost or drains.
    pub(super) fn end_rebalance_of_segment(&mut self, index: u32) {
        self.rebalance.sources.remove(&index);
        self.rebalance.targets.retain(|target| target.index != index);
    }
}

impl Rebalance {
    fn end(&mut self) {
        self.sources.clear();
        self.targets.clear();
    }

    /// Lets more bytes move, for the time since the last call; at most what may move in a second.
    fn refill(&mut self, now: MonoTime) {
        let elapsed = now.since(self.refilled_at).min(Duration::from_secs(1));
        self.refilled_at = now;
        let more = (u128::from(self.bytes_per_s) * elapsed.as_micros() / 1_000_000) as i64;
        self.allowance = self.allowance.saturating_add(more).min(self.bytes_per_s as i64);
    }

    fn may_move(&self) -> bool {
        self.allowance > 0 || moontide_rt::mutation_enabled("rebalance-unlimited")
    }

    /// Counts a move that was started.
    fn moved(&mut self, index: u32, units: u64) {
        self.allowance -= (units * UNIT_BYTES) as i64;
        if let Some(source) = self.sources.get_mut(&index) {
            source.excess = source.excess.saturating_sub(units);
        }
    }
}
