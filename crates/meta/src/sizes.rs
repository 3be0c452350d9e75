//! [`Sizes`]: how large the segments are that take new objects, so that a put can be cut to fit without a look at them.

use std::collections::BTreeMap;

use crate::segment::{Medium, Segment};
use crate::tenant::TenantIx;

/// Counts of segments by what they are made of, whom they are reserved for, and their units. There are as many entries
/// as different sizes: a handful.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Sizes {
    counts: BTreeMap<(Medium, Option<TenantIx>, u32), u32>,
}

impl Sizes {
    /// A segment takes new objects.
    pub(crate) fn add(&mut self, segment: &Segment) {
        *self.counts.entry(place(segment)).or_default() += 1;
    }

    /// A segment that was added takes none any more.
    pub(crate) fn remove(&mut self, segment: &Segment) {
        let place = place(segment);
        let count = self.counts.get_mut(&place).expect("it was added");
        *count -= 1;
        if *count == 0 {
            self.counts.remove(&place);
        }
    }

    /// The units of the largest segment that the tenant may use.
    pub(crate) fn largest(&self, medium: Medium, tenant: TenantIx) -> Option<u32> {
        let of = |tenant| {
            let range = (medium, tenant, 0)..=(medium, tenant, u32::MAX);
            self.counts.range(range).next_back().map(|(&(_, _, units), _)| units)
        };
        of(None).max(of(Some(tenant)))
    }
}

fn place(segment: &Segment) -> (Medium, Option<TenantIx>, u32) {
    (segment.medium, segment.tenant, segment.units)
}
