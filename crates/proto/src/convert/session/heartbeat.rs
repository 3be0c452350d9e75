//! Heartbeat of a node: read counters, touched slots, status of segments and disk, pressure.

use moontide_types::limits::{BATCH_KEYS_MAX, SEGMENT_UNITS_MAX, SLOTS_PER_SEGMENT_MAX};
use moontide_types::{Epoch, Generation, NodeId, SegmentId, SlotId};

use crate::convert::check::{self, at_least, at_most, copied, known, length, rule};
use crate::convert::{ConvertError, Wire};
use crate::limits::{REMOTE_READS_MAX, TOUCH_BITMAPS_MAX, TOUCH_BYTES_MAX};
use crate::v1;

/// Read counters of a node; local hits and misses sum to local lookups.
pub type ReadCounters = v1::ReadCounters;

/// State of the flush of a node, in all groups of a master.
pub type FlushStatus = v1::FlushStatus;

/// Slots that were read since the last heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TouchBitmap<'a> {
    /// Id of the segment.
    pub segment: SegmentId,
    /// Generation of the segment.
    pub generation: Generation,
    /// Slot of the first bit.
    pub first_slot: SlotId,
    /// One bit per slot, least significant first.
    pub bits: &'a [u8],
}

impl TouchBitmap<'_> {
    /// Iterates over the slots whose bits are set.
    pub fn slots(&self) -> impl Iterator<Item = SlotId> {
        let first = self.first_slot.0;
        self.bits.iter().zip(0u32..).flat_map(move |(&byte, index)| {
            (0..8).filter(move |bit| byte >> bit & 1 == 1).map(move |bit| SlotId(first + index * 8 + bit))
        })
    }
}

/// State of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentState {
    /// In use.
    Serving = 1,
    /// Accepts no new objects.
    Draining = 2,
    /// The report of the segment is not complete yet.
    Reporting = 3,
    /// Failed; not usable.
    Failed = 4,
}

/// State and usage of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentStatus {
    /// Id of the segment.
    pub segment: SegmentId,
    /// Generation of the segment.
    pub generation: Generation,
    /// Current state.
    pub state: SegmentState,
    /// Units of READY records.
    pub live_units: u32,
    /// Units of WRITING records.
    pub writing_units: u32,
    /// Units of DEAD records that a reader may still pin.
    pub draining_units: u32,
    /// Units of no record.
    pub free_units: u32,
    /// Number of free slots.
    pub free_slots: u32,
}

impl<'a> Wire<'a> for SegmentStatus {
    type Message = v1::SegmentStatus;

    fn from_wire(m: &'a v1::SegmentStatus) -> Result<Self, ConvertError> {
        let state = match v1::SegmentState::try_from(m.state) {
            Ok(v1::SegmentState::Serving) => Some(SegmentState::Serving),
            Ok(v1::SegmentState::Draining) => Some(SegmentState::Draining),
            Ok(v1::SegmentState::Reporting) => Some(SegmentState::Reporting),
            Ok(v1::SegmentState::Failed) => Some(SegmentState::Failed),
            _ => None,
        };
        let parts = [m.live_units, m.writing_units, m.draining_units, m.free_units];
        let units: u64 = parts.iter().map(|&units| u64::from(units)).sum();
        at_most("segments.units", units, SEGMENT_UNITS_MAX)?;
        at_most("segments.free_slots", m.free_slots, SLOTS_PER_SEGMENT_MAX)?;
        Ok(SegmentStatus {
            segment: check::segment("segments.segment", m.segment)?,
            generation: Generation(m.generation),
            state: known("segments.state", m.state, state)?,
            live_units: m.live_units,
            writing_units: m.writing_units,
            draining_units: m.draining_units,
            free_units: m.free_units,
            free_slots: m.free_slots,
        })
    }

    fn to_wire(&self) -> v1::SegmentStatus {
        v1::SegmentStatus {
            segment: self.segment.0,
            generation: self.generation.0,
            state: self.state as i32,
            live_units: self.live_units,
            writing_units: self.writing_units,
            draining_units: self.draining_units,
            free_units: self.free_units,
            free_slots: self.free_slots,
        }
    }
}

/// State of a disk tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DiskState {
    /// Reads and writes.
    Serving = 1,
    /// Reads only: full.
    Full = 2,
    /// Reads only: writes failed.
    WriteFailed = 3,
    /// Scan after a start is in progress.
    Recovering = 4,
}

/// State and usage of the disk tier.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskStatus {
    /// Current state.
    pub state: DiskState,
    /// Bytes used.
    pub used_bytes: u64,
    /// Capacity limit in bytes.
    pub limit_bytes: u64,
    /// Number of objects on the disk.
    pub objects: u64,
    /// Bytes of offload commands that are not written yet.
    pub backlog_bytes: u64,
}

impl<'a> Wire<'a> for DiskStatus {
    type Message = v1::DiskStatus;

    fn from_wire(m: &'a v1::DiskStatus) -> Result<Self, ConvertError> {
        let state = match v1::DiskState::try_from(m.state) {
            Ok(v1::DiskState::Serving) => Some(DiskState::Serving),
            Ok(v1::DiskState::Full) => Some(DiskState::Full),
            Ok(v1::DiskState::WriteFailed) => Some(DiskState::WriteFailed),
            Ok(v1::DiskState::Recovering) => Some(DiskState::Recovering),
            _ => None,
        };
        Ok(DiskStatus {
            state: known("disk.state", m.state, state)?,
            used_bytes: m.used_bytes,
            limit_bytes: m.limit_bytes,
            objects: m.objects,
            backlog_bytes: m.backlog_bytes,
        })
    }

    fn to_wire(&self) -> v1::DiskStatus {
        v1::DiskStatus {
            state: self.state as i32,
            used_bytes: self.used_bytes,
            limit_bytes: self.limit_bytes,
            objects: self.objects,
            backlog_bytes: self.backlog_bytes,
        }
    }
}

/// Load of a node, in thousandths of each limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Pressure {
    /// Requests in flight, of the limits of the connections.
    pub inflight_permille: u32,
    /// Staging memory in use.
    pub staging_permille: u32,
    /// Ledger cells in use by the client with the most.
    pub ledger_permille: u32,
}

impl<'a> Wire<'a> for Pressure {
    type Message = v1::Pressure;

    fn from_wire(m: &'a v1::Pressure) -> Result<Self, ConvertError> {
        for permille in [m.inflight_permille, m.staging_permille, m.ledger_permille] {
            at_most("pressure", permille, 1000u32)?;
        }
        Ok(Pressure {
            inflight_permille: m.inflight_permille,
            staging_permille: m.staging_permille,
            ledger_permille: m.ledger_permille,
        })
    }

    fn to_wire(&self) -> v1::Pressure {
        v1::Pressure {
            inflight_permille: self.inflight_permille,
            staging_permille: self.staging_permille,
            ledger_permille: self.ledger_permille,
        }
    }
}

/// Reads of a record by processes of another host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteReads {
    /// Segment of the record.
    pub segment: SegmentId,
    /// Generation of the segment.
    pub generation: Generation,
    /// Slot of the record.
    pub slot: SlotId,
    /// Version of the record.
    pub epoch: Epoch,
    /// Node of the host that read.
    pub reader: NodeId,
    /// Bytes read.
    pub bytes: u64,
}

impl<'a> Wire<'a> for RemoteReads {
    type Message = v1::RemoteReads;

    fn from_wire(m: &'a v1::RemoteReads) -> Result<Self, ConvertError> {
        at_least("remote_reads.reader", m.reader, 1u64)?;
        rule("remote_reads.slot", m.slot < SLOTS_PER_SEGMENT_MAX, "slot < SLOTS_PER_SEGMENT_MAX")?;
        Ok(RemoteReads {
            segment: check::segment("remote_reads.segment", m.segment)?,
            generation: Generation(m.generation),
            slot: SlotId(m.slot),
            epoch: Epoch::from_bits(m.epoch)?,
            reader: NodeId(m.reader),
            bytes: m.bytes,
        })
    }

    fn to_wire(&self) -> v1::RemoteReads {
        v1::RemoteReads {
            segment: self.segment.0,
            generation: self.generation.0,
            slot: self.slot.0,
            epoch: self.epoch.bits(),
            reader: self.reader.0,
            bytes: self.bytes,
        }
    }
}

/// Periodic status of a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Heartbeat<'a> {
    /// Number of the heartbeat, from 1 on.
    pub heartbeat_id: u64,
    /// Reads since the session began.
    pub reads: ReadCounters,
    /// Slots that were read since the last heartbeat.
    pub touched: Vec<TouchBitmap<'a>>,
    /// Segments whose state changed, or all segments.
    pub segments: Vec<SegmentStatus>,
    /// Disk tier, if the node has one.
    pub disk: Option<DiskStatus>,
    /// Load of the node.
    pub pressure: Pressure,
    /// The node is about to stop and writes its objects to its disk.
    pub flushing: bool,
    /// The node is to be emptied.
    pub draining: bool,
    /// Records that processes of other hosts read.
    pub remote_reads: Vec<RemoteReads>,
}

impl<'a> Wire<'a> for Heartbeat<'a> {
    type Message = v1::Heartbeat;

    fn from_wire(m: &'a v1::Heartbeat) -> Result<Self, ConvertError> {
        at_least("heartbeat_id", m.heartbeat_id, 1u64)?;
        at_most("touched", m.touched.len(), TOUCH_BITMAPS_MAX)?;
        at_most("segments", m.segments.len(), BATCH_KEYS_MAX)?;
        at_most("remote_reads", m.remote_reads.len(), REMOTE_READS_MAX)?;
        let touched = |touched: &'a v1::TouchBitmap| {
            length("touched.bits", &touched.bits, 0, TOUCH_BYTES_MAX)?;
            let end = u64::from(touched.first_slot) + touched.bits.len() as u64 * 8;
            let fits = end <= u64::from(SLOTS_PER_SEGMENT_MAX);
            rule("touched.first_slot", fits, "first_slot + bits ≤ SLOTS_PER_SEGMENT_MAX")?;
            Ok(TouchBitmap {
                segment: check::segment("touched.segment", touched.segment)?,
                generation: Generation(touched.generation),
                first_slot: SlotId(touched.first_slot),
                bits: &touched.bits,
            })
        };
        Ok(Heartbeat {
            heartbeat_id: m.heartbeat_id,
            reads: m.reads.unwrap_or_default(),
            touched: m.touched.iter().map(touched).collect::<Result<_, ConvertError>>()?,
            segments: m.segments.iter().map(SegmentStatus::from_wire).collect::<Result<_, _>>()?,
            disk: m.disk.as_ref().map(DiskStatus::from_wire).transpose()?,
            pressure: m.pressure.as_ref().map(Pressure::from_wire).transpose()?.unwrap_or_default(),
            flushing: m.flushing,
            draining: m.draining,
            remote_reads: m.remote_reads.iter().map(RemoteReads::from_wire).collect::<Result<_, _>>()?,
        })
    }

    fn to_wire(&self) -> v1::Heartbeat {
        let touched = |touched: &TouchBitmap<'_>| v1::TouchBitmap {
            segment: touched.segment.0,
            generation: touched.generation.0,
            first_slot: touched.first_slot.0,
            bits: copied(touched.bits),
        };
        v1::Heartbeat {
            heartbeat_id: self.heartbeat_id,
            reads: Some(self.reads),
            touched: self.touched.iter().map(touched).collect(),
            segments: self.segments.iter().map(Wire::to_wire).collect(),
            disk: self.disk.as_ref().map(Wire::to_wire),
            pressure: Some(self.pressure.to_wire()),
            flushing: self.flushing,
            draining: self.draining,
            remote_reads: self.remote_reads.iter().map(Wire::to_wire).collect(),
        }
    }
}
