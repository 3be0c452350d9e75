//! [`SegmentPlan`]: number and size of a node's segments. Every group of the cluster gets at least one, since a group
//! without a segment on a node cannot store anything there.

use moontide_types::limits::{SEGMENT_UNITS_MAX, SEGMENTS_PER_NODE_MAX, UNIT_BYTES};

/// Minimum size of a segment. Smaller ones hold no object of a typical size.
pub(crate) const SEGMENT_BYTES_MIN: u64 = 1 << 20;

/// Minimum number of slots of a segment: fewer do not fill a header page.
const SLOTS_MIN: u64 = 64;

/// Maximum number of slots that a master accepts in a segment: it numbers them with 30 bits.
const SLOTS_MAX: u64 = 1 << 30;

/// Segments of equal size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentPlan {
    /// Number of segments.
    pub count: u32,
    /// Size of each segment in units: whole memory pages.
    pub units: u32,
    /// Header slots of each segment.
    pub slots: u32,
}

impl SegmentPlan {
    /// Returns the bytes of one segment.
    pub fn bytes(&self) -> u64 {
        u64::from(self.units) * UNIT_BYTES
    }

    pub(crate) fn slots_all(&self) -> u64 {
        u64::from(self.slots) * u64::from(self.count)
    }
}

/// Inputs of [`plan`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlanArgs {
    pub(crate) memory_bytes: u64,
    pub(crate) segment_bytes_max: u64,
    pub(crate) slot_bytes: u64,
    /// Groups of the cluster.
    pub(crate) groups: u16,
    /// Page size of the memory.
    pub(crate) page_bytes: u64,
}

/// Failure to divide the memory into segments.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// The segments would be smaller than `SEGMENT_BYTES_MIN`.
    #[error(
        "{memory_bytes} bytes of memory in {segments} segments, at least one for each of the cluster's {groups} \
         groups, are {segment_bytes} bytes each, less than {SEGMENT_BYTES_MIN}; raise memory_bytes to {}, or \
         create a new cluster with fewer `groups`",
        u64::from(*segments) * SEGMENT_BYTES_MIN
    )]
    TooSmall {
        /// Memory of the node, in bytes.
        memory_bytes: u64,
        /// Number of segments that are needed.
        segments: u32,
        /// Groups of the cluster.
        groups: u16,
        /// Bytes of each segment.
        segment_bytes: u64,
    },
    /// More than [`SEGMENTS_PER_NODE_MAX`] segments.
    #[error(
        "{memory_bytes} bytes in segments of at most {segment_bytes_max} are more than {SEGMENTS_PER_NODE_MAX} \
         segments; raise segment_bytes_max"
    )]
    TooMany {
        /// Memory of the node, in bytes.
        memory_bytes: u64,
        /// Configured maximum size of a segment.
        segment_bytes_max: u64,
    },
}

/// Divides the memory into segments of equal size.
pub(crate) fn plan(args: PlanArgs) -> Result<SegmentPlan, PlanError> {
    let PlanArgs { memory_bytes, segment_bytes_max, slot_bytes, groups, page_bytes } = args;
    let bytes_max = segment_bytes_max.min(u64::from(SEGMENT_UNITS_MAX) * UNIT_BYTES);
    let count = memory_bytes.div_ceil(bytes_max.max(1)).max(u64::from(groups)).max(1);
    let too_many = PlanError::TooMany { memory_bytes, segment_bytes_max };
    let count = u32::try_from(count).ok().filter(|&count| count <= SEGMENTS_PER_NODE_MAX).ok_or(too_many)?;
    let bytes = memory_bytes / u64::from(count) / page_bytes * page_bytes;
    if bytes < SEGMENT_BYTES_MIN {
        return Err(PlanError::TooSmall { memory_bytes, segments: count, groups, segment_bytes: bytes });
    }
    let slots = (bytes / slot_bytes.max(1)).clamp(SLOTS_MIN, SLOTS_MAX);
    Ok(SegmentPlan { count, units: (bytes / UNIT_BYTES) as u32, slots: slots as u32 }) // both bounded above
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;
    const GIB: u64 = 1 << 30;

    fn args(memory_bytes: u64, segment_bytes_max: u64, groups: u16) -> PlanArgs {
        PlanArgs { memory_bytes, segment_bytes_max, slot_bytes: 8192, groups, page_bytes: 4096 }
    }

    #[test]
    fn memory_is_split_into_segments_by_size_and_groups() {
        // (memory, maximum segment, groups) → (segments, bytes of each, slots of each)
        let cases = [
            ((GIB, GIB, 1), (1, GIB, 131_072)),
            ((GIB, GIB, 16), (16, 64 * MIB, 8192)),
            ((64 * GIB, GIB, 16), (64, GIB, 131_072)),
            ((64 * GIB + 5000, GIB, 4), (65, (64 * GIB + 5000) / 65 / 4096 * 4096, 0)),
            ((4 * MIB, GIB, 4), (4, MIB, 128)),
            ((10 * MIB, 3 * MIB, 1), (4, 10 * MIB / 4, 320)),
        ];
        for ((memory, largest, groups), (count, bytes, slots)) in cases {
            let plan = plan(args(memory, largest, groups)).unwrap();
            assert_eq!((plan.count, plan.bytes()), (count, bytes), "{memory} {largest} {groups}");
            assert!(slots == 0 || plan.slots == slots, "{plan:?}");
            assert!(plan.bytes() * u64::from(plan.count) <= memory && plan.units.is_multiple_of(8));
        }
    }

    #[test]
    fn slot_count_is_clamped_to_min_and_max() {
        let few = PlanArgs { slot_bytes: GIB, ..args(GIB, GIB, 1) };
        assert_eq!(plan(few).unwrap().slots, 64);
        let many = PlanArgs { slot_bytes: 1, ..args(4 * GIB, 4 * GIB, 1) };
        assert_eq!(plan(many).unwrap().slots, 1 << 30);
    }

    #[test]
    fn too_small_or_too_many_segments_are_refused_with_advice() {
        let error = plan(args(8 * MIB, GIB, 16)).unwrap_err();
        assert!(matches!(error, PlanError::TooSmall { segments: 16, segment_bytes: 524_288, .. }), "{error}");
        assert!(error.to_string().contains("16777216") && error.to_string().contains("`groups`"), "{error}");
        let error = plan(args(1 << 50, MIB, 16)).unwrap_err();
        assert!(matches!(error, PlanError::TooMany { .. }));
    }

    #[test]
    fn segment_size_is_multiple_of_huge_page() {
        let plan = plan(PlanArgs { page_bytes: 2 * MIB, ..args(15 * MIB, GIB, 3) }).unwrap();
        assert_eq!((plan.count, plan.bytes()), (3, 4 * MIB));
    }
}
