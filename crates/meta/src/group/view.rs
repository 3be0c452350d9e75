//! What a caller gets to see of an object: borrowed or copied, never the record itself.

use moontide_types::bounds::{REPLICAS_MAX, UNIT_BYTES};
use moontide_types::record::PinClass;
use moontide_types::{Epoch, Extent, Generation, NodeId, ObjectId, SegmentId, SlotId, UnixMillis};

use super::Group;
use crate::record::{Flag, NONE, Place, Record};
use crate::segment::Medium;
use crate::slab::Ref;

/// Which part of an object a stripe is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StripeView {
    /// Which one.
    pub index: u16,
    /// Of how many.
    pub count: u16,
    /// Where it starts in the object.
    pub offset: u64,
    /// Its length.
    pub len: u64,
}

/// One stripe of one replica.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaceView {
    /// Whose memory.
    pub node: NodeId,
    /// The segment.
    pub segment: SegmentId,
    /// Which incarnation of it.
    pub generation: Generation,
    /// The slot.
    pub slot: SlotId,
    /// The slot's extent; the payload starts with it.
    pub extent: Extent,
    /// What the segment is made of.
    pub medium: Medium,
    /// Which part of the object.
    pub stripe: StripeView,
    /// Root of the stripe's digests; 0 while writing.
    pub root: u64,
    /// Which replica, counted without gap.
    pub replica: u8,
    /// A remote peer had one-sided access to the segment: verify even in place.
    pub verify: bool,
}

impl PlaceView {
    /// Where the payload starts in the segment, in bytes.
    pub fn payload_offset(&self) -> u64 {
        u64::from(self.extent.start) * UNIT_BYTES
    }
}

/// An object that can be read.
#[derive(Clone, Copy, Debug)]
pub struct ObjectView<'a> {
    /// Its id.
    pub id: ObjectId,
    /// Its version.
    pub epoch: Epoch,
    /// Its length.
    pub object_len: u64,
    /// Its root digest.
    pub root: u64,
    /// Without digests.
    pub digestless: bool,
    /// Fewer replicas than asked for.
    pub fewer_replicas: bool,
    /// How strongly it resists eviction.
    pub pin: PinClass,
    /// When it expires.
    pub expires: Option<UnixMillis>,
    /// Its cohort.
    pub cohort: Option<&'a [u8]>,
    /// The block before it.
    pub parent: Option<&'a [u8]>,
    /// Known from the master before: the nodes may not obey our term yet.
    pub inherited: bool,
    /// How many replicas are listed.
    pub replicas: u8,
    /// Complete replicas, one after the other, stripe by stripe.
    pub places: &'a [PlaceView],
}

/// Everything about an object, for operators.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Detail {
    /// Its id.
    pub id: ObjectId,
    /// Its key.
    pub key: Box<[u8]>,
    /// Its version.
    pub epoch: Epoch,
    /// Its length.
    pub object_len: u64,
    /// Its root digest; 0 while writing.
    pub root: u64,
    /// Being written.
    pub writing: bool,
    /// How strongly it resists eviction.
    pub pin: PinClass,
    /// Longest lease still out, in milliseconds.
    pub leased_ms: u32,
    /// When it expires.
    pub expires: Option<UnixMillis>,
    /// Its cohort.
    pub cohort: Option<Box<[u8]>>,
    /// All places that are not lost.
    pub places: Vec<PlaceView>,
}

/// Offset and length of one stripe.
pub(super) fn stripe_of(object_len: u64, stripe_len: u64, index: usize, count: usize) -> StripeView {
    let offset = index as u64 * stripe_len;
    StripeView {
        index: index as u16, // ≤ STRIPES_MAX
        count: count as u16,
        offset,
        len: stripe_len.min(object_len - offset),
    }
}

impl Group {
    fn place_view(
        &self,
        record: &Record,
        place: Place,
        stripe: usize,
        stripes: usize,
        replica: u8,
    ) -> PlaceView {
        let segment = self.segment(place.segment);
        let writing = record.has(Flag::Writing);
        let extra = self.extras.get(record.extra);
        let stripe_len = extra.map_or(record.object_len(), |extra| extra.stripe_len);
        let root = match extra {
            _ if writing => 0,
            Some(extra) if stripes > 1 => extra.stripe_roots[stripe],
            _ => record.root,
        };
        PlaceView {
            node: segment.node,
            segment: segment.id,
            generation: segment.generation,
            slot: SlotId(place.slot),
            extent: segment.extent(place.block),
            medium: segment.medium,
            stripe: stripe_of(record.object_len(), stripe_len, stripe, stripes),
            root,
            replica,
            verify: segment.one_sided,
        }
    }

    /// Appends the places of all replicas that can be read completely; the answer is their number. The n-th replica is
    /// made of the n-th place of each stripe that can be read, those in memory first.
    pub(super) fn replica_views(&self, record: &Record, out: &mut Vec<PlaceView>) -> u8 {
        let stripes = self.stripes(record);
        let rows = self.place_count(record) / stripes;
        let readable = |stripe: usize| {
            let places = (0..rows).map(move |row| self.place(record, row * stripes + stripe));
            let places = places.filter(|&place| self.is_readable(place));
            let on_disk = |place: Place| self.segment(place.segment).is_disk();
            let in_memory = places.clone().filter(move |&place| !on_disk(place));
            in_memory.chain(places.filter(move |&place| on_disk(place)))
        };
        let replicas =
            (0..stripes).map(|stripe| readable(stripe).count()).min().unwrap_or(0).min(REPLICAS_MAX);
        for replica in 0..replicas {
            for stripe in 0..stripes {
                let place = readable(stripe).nth(replica).expect("counted");
                out.push(self.place_view(record, place, stripe, stripes, replica as u8)); // ≤ REPLICAS_MAX
            }
        }
        replicas as u8
    }

    pub(super) fn object_view<'a>(
        &'a self,
        record: &Record,
        places: &'a [PlaceView],
        replicas: u8,
    ) -> ObjectView<'a> {
        let extra = self.extras.get(record.extra);
        let cohort = extra.map_or(NONE, |extra| extra.cohort);
        ObjectView {
            id: record.id(),
            epoch: record.epoch(),
            object_len: record.object_len(),
            root: if record.has(Flag::Writing) { 0 } else { record.root },
            digestless: record.has(Flag::Digestless),
            fewer_replicas: record.has(Flag::Fewer),
            pin: record.pin(),
            expires: extra.and_then(|extra| extra.expires),
            cohort: (cohort != NONE).then(|| self.cohorts.get(cohort).label()),
            parent: extra.and_then(|extra| extra.parent.as_deref()),
            inherited: false,
            replicas,
            places,
        }
    }

    pub(super) fn detail(&self, at: Ref, now: crate::Now) -> Detail {
        let (record, key) = self.slab.with_key(at);
        let stripes = self.stripes(record);
        let places = (0..self.place_count(record))
            .filter(|&index| self.is_readable(self.place(record, index)))
            .map(|index| {
                let replica = (index / stripes) as u8;
                self.place_view(record, self.place(record, index), index % stripes, stripes, replica)
            })
            .collect();
        let writing = record.has(Flag::Writing);
        let left = self.ticker.left(self.leased_until(record), now.mono).as_millis();
        let view = self.object_view(record, &[], 0);
        Detail {
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
            places,
        }
    }
}
