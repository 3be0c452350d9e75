//! [`SegmentSizes`]: sizes of the segments that accept new objects. A put uses them to choose its stripe length without
//! scanning the segments.

use std::collections::BTreeMap;

use moontide_types::Medium;

use crate::ids::TenantIndex;
use crate::segment::Segment;

/// Counts of segments by medium, tenant (if reserved for one) and units. There is one entry per distinct size: a
/// handful.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct SegmentSizes {
    counts: BTreeMap<(Medium, Option<TenantIndex>, u32), u32>,
}

impl SegmentSizes {
    /// Adds a segment that accepts new objects.
    pub(crate) fn add(&mut self, segment: &Segment) {
        *self.counts.entry(size_key(segment)).or_default() += 1;
    }

    /// Removes a segment that was added and no longer accepts new objects.
    pub(crate) fn remove(&mut self, segment: &Segment) {
        let key = size_key(segment);
        let count = self.counts.get_mut(&key).expect("segment was added");
        *count -= 1;
        if *count == 0 {
            self.counts.remove(&key);
        }
    }

    /// Returns the units of the largest segment that the tenant may use.
    pub(crate) fn largest(&self, medium: Medium, tenant: TenantIndex) -> Option<u32> {
        let largest_of = |tenant| {
            let range = (medium, tenant, 0)..=(medium, tenant, u32::MAX);
            self.counts.range(range).next_back().map(|(&(_, _, units), _)| units)
        };
        largest_of(None).max(largest_of(Some(tenant)))
    }
}

fn size_key(segment: &Segment) -> (Medium, Option<TenantIndex>, u32) {
    (segment.medium, segment.tenant, segment.units)
}
