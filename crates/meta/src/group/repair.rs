//! Repair: objects with fewer replicas than their writers asked for are copied again.
//!
//! The group does not count replicas at each change. After a loss it waits for [`GroupConfig::repair_delay`], so that a node
//! that only restarts or reconnects does not start copies, and then scans all objects, in ticks. Those with the fewest
//! replicas left are copied first, and of these the most valuable ones. If copies fail, or there is no place for them now, a
//! further scan follows after [`RESCAN_INTERVAL`]. The wanted number is an attribute of the record, so the next master knows
//! it from the reports of the nodes.
//!
//! Sources are locations in memory. A replica counts wherever it is readable; several locations on one node, in memory and
//! on its disk, are one replica. So are those in one rack, if the writer wants them in several.
//!
//! [`GroupConfig::repair_delay`]: super::GroupConfig::repair_delay

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::time::Duration;

use moontide_types::limits::UNIT_BYTES;
use moontide_types::{Domain, Medium, MonoTime, Spread};

use super::Group;
use super::copies::{CANDIDATES_MAX, CopyTargets, NotStarted, REFILL_MAX, TRIES_PER_COPY};
use super::flush::Candidate;
use crate::effect::{CopyPurpose, Effects};
use crate::ids::RecordRef;
use crate::record::{Record, RecordFlag, SlotLocation};
use crate::segment::{Segment, SegmentPhase};
use crate::time::Now;

/// Time until the next scan if the last one found objects that were not repaired.
const RESCAN_INTERVAL: Duration = Duration::from_secs(10);

/// An object that lacks replicas. Ordered by urgency: the fewer are left, the more urgent.
type Lacking = (Reverse<usize>, Candidate);

/// Objects that lack replicas.
#[derive(Debug)]
pub(super) struct Repairs {
    /// Time of the scan that follows a loss.
    scan_at: Option<MonoTime>,
    /// Time of the scan for objects that could not be repaired before; no scan before one that follows a loss.
    rescan_at: Option<MonoTime>,
    /// Where the scan in progress has got to.
    scan: Option<Scan>,
    candidates: BinaryHeap<Lacking>,
    /// Objects that are known to lack replicas since the begin of the last scan, and that only the next one tries again.
    set_aside: u64,
}

#[derive(Clone, Copy, Debug, Default)]
struct Scan {
    cursor: Option<RecordRef>,
}

impl Repairs {
    /// The nodes may have reported objects that lacked replicas before.
    pub(super) fn new(scan_at: MonoTime) -> Repairs {
        Repairs {
            scan_at: Some(scan_at),
            rescan_at: None,
            scan: None,
            candidates: BinaryHeap::new(),
            set_aside: 0,
        }
    }

    fn is_due(&self, now: Now) -> bool {
        let at_once = moontide_rt::mutation_enabled("repair-at-once");
        self.scan_at.or(self.rescan_at).is_some_and(|at| at <= now.mono || at_once)
    }

    /// Starts a scan.
    fn begin(&mut self) {
        *self = Repairs { scan_at: None, scan: Some(Scan::default()), ..Repairs::new(MonoTime(0)) };
    }
}

impl Group {
    /// Number of objects with fewer replicas than their writers asked for, at the last scan and not repaired since.
    pub fn objects_lacking_replicas(&self) -> u64 {
        self.repairs.candidates.len() as u64 + self.repairs.set_aside + self.repairs_in_flight()
    }

    /// Remembers that objects may lack replicas: they have lost locations.
    pub(super) fn repair_after_loss(&mut self, now: Now) {
        // A further loss does not delay a scan that is due for an earlier one.
        self.repairs.scan_at.get_or_insert(now.mono.after(self.config.repair_delay));
    }

    /// Remembers that an object has fewer replicas than wanted, if it has.
    pub(super) fn repair_if_lacking(&mut self, at: RecordRef) {
        let record = self.slab.get(at);
        if self.extra_replicas(record) > 0 && self.replicas_left(record) <= self.extra_replicas(record) {
            self.repairs.set_aside += 1;
        }
    }

    /// Remembers that a copy for a repair was not made.
    pub(super) fn repair_failed(&mut self) {
        self.repairs.set_aside += 1;
    }

    /// Continues the scan for objects that lack replicas, at most `slots` of them, and starts at most `copies` copies. Returns
    /// whether more could be done at once.
    pub(super) fn step_repairs(
        &mut self,
        now: Now,
        slots: usize,
        copies: usize,
        effects: &mut Effects,
    ) -> bool {
        if self.repairs.scan.is_none() && self.repairs.is_due(now) && !self.replicas_may_be_reported(now) {
            self.repairs.begin();
        }
        let mut scanned = 0;
        while let Some(Scan { cursor }) = self.repairs.scan
            && scanned < slots
            && self.repairs.candidates.len() < CANDIDATES_MAX
        {
            scanned += 1;
            let found = self.slab.previous(cursor);
            self.repairs.scan = found.map(|at| Scan { cursor: Some(at) });
            found.into_iter().for_each(|at| self.note_if_lacking(at));
        }
        let started = self.start_repairs(copies, effects);
        if self.repairs.scan.is_none() && self.repairs.set_aside > 0 {
            self.repairs.rescan_at.get_or_insert(now.mono.after(RESCAN_INTERVAL));
        }
        (slots > 0 && scanned >= slots) || (copies > 0 && started >= copies)
    }

    /// Whether nodes have yet to report, after a change of the master or when they return. Those that are away are not
    /// awaited: they had the delay.
    fn replicas_may_be_reported(&self, now: Now) -> bool {
        let is_reporting = |segment: &Segment| segment.phase == SegmentPhase::Reporting && !segment.is_disk();
        let is_awaited = now.mono < self.unknown_nodes_until;
        (is_awaited || self.segments.iter().flatten().any(is_reporting))
            && !moontide_rt::mutation_enabled("repair-before-reports")
    }

    fn note_if_lacking(&mut self, at: RecordRef) {
        let record = self.slab.get(at);
        let left = match self.extra_replicas(record) {
            0 => return,
            extra => match self.replicas_left(record) {
                left if left > extra => return,
                left => left,
            },
        };
        if record.has(RecordFlag::Writing) {
            return; // its end counts its replicas
        }
        let candidate = Candidate::new(record);
        let left = if moontide_rt::mutation_enabled("repair-in-any-order") { 0 } else { left };
        self.repairs.candidates.push((Reverse(left), candidate));
    }

    /// Starts copies of objects that lack replicas. Returns their number.
    pub(super) fn start_repairs(&mut self, budget: usize, effects: &mut Effects) -> usize {
        let (mut started, mut tried) = (0, 0);
        // The most urgent ones are known when the scan is complete.
        let is_scanned = self.repairs.scan.is_none() || self.repairs.candidates.len() >= CANDIDATES_MAX;
        while is_scanned && started < budget && tried < budget.saturating_mul(TRIES_PER_COPY) {
            let Some((left, candidate)) = self.repairs.candidates.pop() else { break };
            tried += 1;
            let Some(at) = self.find_id(candidate.id) else { continue };
            match self.repair(at, effects) {
                Ok(copies) => started += copies,
                Err(NotStarted::Unsuitable | NotStarted::NoPlace) => self.repairs.set_aside += 1,
                Err(reason) => {
                    if reason == NotStarted::NoSpace {
                        self.request_space_for_copy(candidate.bytes / UNIT_BYTES + 1);
                    }
                    self.repairs.candidates.push((left, candidate));
                    break;
                }
            }
        }
        started
    }

    /// Starts a copy of each stripe of an object of which replicas are missing. Returns their number.
    fn repair(&mut self, at: RecordRef, effects: &mut Effects) -> Result<usize, NotStarted> {
        let record = *self.slab.get(at);
        let (stripes, wanted) = (self.stripes(&record), 1 + self.extra_replicas(&record));
        let mut started = 0;
        for stripe in 0..stripes {
            if self.domains_of_stripe(&record, stripe) >= wanted {
                continue;
            }
            let source = (stripe..self.location_count(&record)).step_by(stripes).find(|&position| {
                let location = self.location(&record, position);
                self.is_readable(location) && self.segment(location.segment).medium == Medium::Memory
            });
            // If it is on disks only, a promotion brings it back to memory first.
            let source = source.ok_or(NotStarted::Unsuitable)?;
            match self.start_copy(at, source, CopyPurpose::Repair, CopyTargets::Any, effects) {
                Ok(()) => started += 1,
                Err(_) if started > 0 => self.repairs.set_aside += 1,
                Err(reason) => return Err(reason),
            }
        }
        Ok(started)
    }

    /// Handles the end of a copy that was made for a repair: the object may lack another replica.
    pub(super) fn repair_done(&mut self, at: RecordRef) {
        let record = self.slab.get(at);
        let (left, extra) = (self.replicas_left(record), self.extra_replicas(record));
        if left > extra {
            self.slab.get_mut(at).set(RecordFlag::UnderReplicated, false);
        } else {
            let candidate = Candidate::new(record);
            self.repairs.candidates.push((Reverse(left), candidate));
        }
        self.queue_write_back(at); // a copy on a disk may be lost, too
    }

    /// Continues after the end of a copy.
    pub(super) fn refill_repairs(&mut self, effects: &mut Effects) {
        self.start_repairs(REFILL_MAX, effects);
    }

    /// Number of replicas that the writer asked for, besides the first.
    pub(super) fn extra_replicas(&self, record: &Record) -> usize {
        self.extensions.get(record.extension).map_or(0, |extension| extension.extra_replicas.into())
    }

    /// Number of complete replicas on different nodes, or apart as the writer asked for: of the stripe that has the fewest.
    fn replicas_left(&self, record: &Record) -> usize {
        (0..self.stripes(record)).map(|stripe| self.domains_of_stripe(record, stripe)).min().unwrap_or(0)
    }

    /// Number of nodes with a readable location of a stripe, or of the hosts, racks or zones in which they are.
    fn domains_of_stripe(&self, record: &Record, stripe: usize) -> usize {
        let locations = (stripe..self.location_count(record))
            .step_by(self.stripes(record))
            .map(|position| self.location(record, position))
            .filter(|&location| self.is_readable(location));
        self.domains_of(record, locations)
    }

    /// Number of different parts of the cluster in which these locations of an object are.
    pub(super) fn domains_of(&self, record: &Record, locations: impl Iterator<Item = SlotLocation>) -> usize {
        let spread = self.spread(record);
        let mut domains: Vec<Domain<u32>> =
            locations.map(|location| self.segment(location.segment).site().domain(spread)).collect();
        domains.sort_unstable();
        domains.dedup();
        domains.len()
    }

    /// What the replicas of an object must not share, besides their node.
    pub(super) fn spread(&self, record: &Record) -> Option<Spread> {
        self.extensions.get(record.extension).and_then(|extension| extension.spread)
    }
}
