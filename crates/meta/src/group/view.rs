//! Views of an object for callers: borrowed or copied, never the record itself.

use moontide_types::limits::{REPLICAS_MAX, UNIT_BYTES};
use moontide_types::record::PinClass;
use moontide_types::{Epoch, Extent, Generation, Medium, NodeId, ObjectId, SegmentId, SlotId, UnixMillis};

use super::Group;
use crate::ids::{NONE, RecordRef};
use crate::record::{Record, RecordFlag, SlotLocation};

/// Position of a stripe in its object.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StripeRange {
    /// Index of the stripe.
    pub index: u16,
    /// Number of stripes.
    pub count: u16,
    /// Offset in the object, in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub len: u64,
}

/// Location of one stripe of one replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StripeLocation {
    /// Node that owns the segment.
    pub node: NodeId,
    /// Segment on the node.
    pub segment: SegmentId,
    /// Incarnation of the segment.
    pub generation: Generation,
    /// Slot in the segment.
    pub slot: SlotId,
    /// Extent of the slot; the payload starts with it.
    pub extent: Extent,
    /// Storage medium of the segment.
    pub medium: Medium,
    /// Position of the stripe in the object.
    pub stripe: StripeRange,
    /// Root of the stripe's digests; 0 while writing.
    pub root: u64,
    /// Replica, numbered without gaps.
    pub replica: u8,
    /// A remote peer had one-sided access to the segment: verify even zero-copy reads.
    pub verify: bool,
}

impl StripeLocation {
    /// Offset of the payload in the segment, in bytes.
    pub fn payload_offset(&self) -> u64 {
        u64::from(self.extent.start) * UNIT_BYTES
    }
}

/// A readable object.
#[derive(Clone, Copy, Debug)]
pub struct ObjectView<'a> {
    /// Id of the object.
    pub id: ObjectId,
    /// Version.
    pub epoch: Epoch,
    /// Length in bytes.
    pub object_len: u64,
    /// Root digest; 0 while writing.
    pub root: u64,
    /// The object has no digests.
    pub digestless: bool,
    /// Fewer replicas than requested.
    pub fewer_replicas: bool,
    /// Resistance to eviction.
    pub pin: PinClass,
    /// Time at which the object expires.
    pub expires: Option<UnixMillis>,
    /// Label of the cohort.
    pub cohort: Option<&'a [u8]>,
    /// Hash of the preceding block.
    pub parent: Option<&'a [u8]>,
    /// From the handoff of the preceding master: the nodes may not have adopted this master's term yet.
    pub from_handoff: bool,
    /// Number of replicas in `locations`.
    pub replicas: u8,
    /// Locations of complete replicas, one after the other, stripe by stripe.
    pub locations: &'a [StripeLocation],
}

/// All properties of an object, for operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ObjectDetail {
    /// Id of the object.
    pub id: ObjectId,
    /// Key of the object.
    pub key: Box<[u8]>,
    /// Version.
    pub epoch: Epoch,
    /// Length in bytes.
    pub object_len: u64,
    /// Root digest; 0 while writing.
    pub root: u64,
    /// The object is being written.
    pub writing: bool,
    /// Resistance to eviction.
    pub pin: PinClass,
    /// Rest of the longest lease, in milliseconds.
    pub leased_ms: u32,
    /// Time at which the object expires.
    pub expires: Option<UnixMillis>,
    /// Label of the cohort.
    pub cohort: Option<Box<[u8]>>,
    /// All locations that are not lost.
    pub locations: Vec<StripeLocation>,
}

/// Returns offset and length of one stripe.
pub(super) fn stripe_of(object_len: u64, stripe_len: u64, index: usize, count: usize) -> StripeRange {
    let offset = index as u64 * stripe_len;
    StripeRange {
        index: index as u16, // ≤ STRIPES_MAX
        count: count as u16,
        offset,
        len: stripe_len.min(object_len - offset),
    }
}

impl Group {
    /// View of one location of a record.
    pub(super) fn location_view(&self, record: &Record, position: usize) -> StripeLocation {
        let (location, stripes) = (self.location(record, position), self.stripes(record));
        self.stripe_location(record, location, position % stripes, stripes, (position / stripes) as u8)
    }

    fn stripe_location(
        &self,
        record: &Record,
        location: SlotLocation,
        stripe: usize,
        stripes: usize,
        replica: u8,
    ) -> StripeLocation {
        let segment = self.segment(location.segment);
        let writing = record.has(RecordFlag::Writing);
        let extension = self.extensions.get(record.extension);
        let stripe_len = extension.map_or(record.object_len(), |extension| extension.stripe_len);
        let root = match extension {
            _ if writing => 0,
            Some(extension) if stripes > 1 => extension.stripe_roots[stripe],
            _ => record.root,
        };
        StripeLocation {
            node: segment.node,
            segment: segment.id,
            generation: segment.generation,
            slot: SlotId(location.slot),
            extent: segment.extent(location.block),
            medium: segment.medium,
            stripe: stripe_of(record.object_len(), stripe_len, stripe, stripes),
            root,
            replica,
            verify: segment.one_sided,
        }
    }

    /// Appends the locations of all completely readable replicas. Returns the number of replicas. The n-th replica
    /// consists of the n-th readable location of each stripe, those in memory first.
    pub(super) fn replica_views(&self, record: &Record, out: &mut Vec<StripeLocation>) -> u8 {
        let stripes = self.stripes(record);
        let rows = self.location_count(record) / stripes;
        let readable = |stripe: usize| {
            let locations = (0..rows).map(move |row| self.location(record, row * stripes + stripe));
            let locations = locations.filter(|&location| self.is_readable(location));
            let on_disk = |location: SlotLocation| self.segment(location.segment).is_disk();
            let in_memory = locations.clone().filter(move |&location| !on_disk(location));
            in_memory.chain(locations.filter(move |&location| on_disk(location)))
        };
        let replicas =
            (0..stripes).map(|stripe| readable(stripe).count()).min().unwrap_or(0).min(REPLICAS_MAX);
        for replica in 0..replicas {
            for stripe in 0..stripes {
                let location =
                    readable(stripe).nth(replica).expect("replica number is below the smallest count");
                out.push(self.stripe_location(record, location, stripe, stripes, replica as u8)); // ≤ REPLICAS_MAX
            }
        }
        replicas as u8
    }

    pub(super) fn object_view<'a>(
        &'a self,
        record: &Record,
        locations: &'a [StripeLocation],
        replicas: u8,
    ) -> ObjectView<'a> {
        let extension = self.extensions.get(record.extension);
        let cohort = extension.map_or(NONE, |extension| extension.cohort);
        ObjectView {
            id: record.id(),
            epoch: record.epoch(),
            object_len: record.object_len(),
            root: if record.has(RecordFlag::Writing) { 0 } else { record.root },
            digestless: record.has(RecordFlag::Digestless),
            fewer_replicas: record.has(RecordFlag::UnderReplicated),
            pin: record.pin(),
            expires: extension.and_then(|extension| extension.expires),
            cohort: (cohort != NONE).then(|| self.cohorts.get(cohort).label()),
            parent: extension.and_then(|extension| extension.parent.as_deref()),
            from_handoff: false,
            replicas,
            locations,
        }
    }

    pub(super) fn detail(&self, at: RecordRef, now: crate::Now) -> ObjectDetail {
        let (record, key) = self.slab.with_key(at);
        let locations = (0..self.location_count(record))
            .filter(|&index| self.is_readable(self.location(record, index)))
            .map(|index| self.location_view(record, index))
            .collect();
        let writing = record.has(RecordFlag::Writing);
        let left = self.ticker.left(self.leased_until(record), now.mono).as_millis();
        let view = self.object_view(record, &[], 0);
        ObjectDetail {
            id: view.id,
            key: key.into(),
            epoch: view.epoch,
            object_len: view.object_len,
            root: view.root,
            writing,
            pin: view.pin,
            leased_ms: if writing { 0 } else { u32::try_from(left).unwrap_or(u32::MAX) },
            expires: view.expires,
            cohort: view.cohort.map(Into::into),
            locations,
        }
    }
}
