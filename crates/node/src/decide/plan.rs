//! [`SegmentPlan`]: into how many segments a node's memory is cut. Every group of the cluster gets at least one, since a
//! group without a segment on a node could store nothing there.

use moontide_types::bounds::{SEGMENT_UNITS_MAX, SEGMENTS_PER_NODE_MAX, UNIT_BYTES};

/// Smaller ones hold no object of a usual size.
pub const SEGMENT_BYTES_MIN: u64 = 1 << 20;

/// Fewer slots than that are not worth a header page.
const SLOTS_MIN: u64 = 64;

/// Most slots of a segment that a master takes: its books number them in 30 bits.
const SLOTS_MAX: u64 = 1 << 30;

/// Segments of equal size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentPlan {
    pub count: u32,
    /// Of each: whole pages.
    pub units: u32,
    /// Of each.
    pub slots: u32,
}

impl SegmentPlan {
    pub fn bytes(&self) -> u64 {
        u64::from(self.units) * UNIT_BYTES
    }

    pub fn slots_all(&self) -> u64 {
        u64::from(self.slots) * u64::from(self.count)
    }
}

/// What the memory is cut by.
#[derive(Clone, Copy, Debug)]
pub struct PlanArgs {
    pub memory_bytes: u64,
    pub segment_bytes_max: u64,
    pub slot_bytes: u64,
    /// Groups of the cluster.
    pub groups: u16,
    /// Of the pages that the memory is made of.
    pub page_bytes: u64,
}

/// Why memory cannot be cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// Each group gets less than a segment.
    #[error(
        "{memory_bytes} bytes of memory in {segments} segments, at least one for each of the cluster's {groups} groups, are \
         {segment_bytes} bytes each, less than {SEGMENT_BYTES_MIN}: raise memory_bytes to {}, or lower the master's `groups` \
         (only a new cluster can)",
        u64::from(*segments) * SEGMENT_BYTES_MIN
    )]
    TooSmall {
        /// What there is.
        memory_bytes: u64,
        /// How many segments it would be.
        segments: u32,
        /// Groups of the cluster.
        groups: u16,
        /// What each would have.
        segment_bytes: u64,
    },
    /// More segments than can be named.
    #[error(
        "{memory_bytes} bytes in segments of at most {segment_bytes_max} are more than {SEGMENTS_PER_NODE_MAX} segments: \
         raise segment_bytes_max"
    )]
    TooMany {
        /// What there is.
        memory_bytes: u64,
        /// The largest segment allowed.
        segment_bytes_max: u64,
    },
}

/// Cuts the memory.
pub fn plan(args: PlanArgs) -> Result<SegmentPlan, PlanError> {
    let PlanArgs { memory_bytes, segment_bytes_max, slot_bytes, groups, page_bytes } = args;
    let largest = segment_bytes_max.min(u64::from(SEGMENT_UNITS_MAX) * UNIT_BYTES);
    let count = memory_bytes.div_ceil(largest.max(1)).max(u64::from(groups)).max(1);
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
    fn memory_is_cut_by_size_and_by_groups() {
        // (memory, largest segment, groups) → (segments, bytes of each, slots of each)
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
    fn slots_have_bounds() {
        let few = PlanArgs { slot_bytes: GIB, ..args(GIB, GIB, 1) };
        assert_eq!(plan(few).unwrap().slots, 64);
        let many = PlanArgs { slot_bytes: 1, ..args(4 * GIB, 4 * GIB, 1) };
        assert_eq!(plan(many).unwrap().slots, 1 << 30);
    }

    #[test]
    fn too_little_memory_is_refused_with_advice() {
        let error = plan(args(8 * MIB, GIB, 16)).unwrap_err();
        assert!(matches!(error, PlanError::TooSmall { segments: 16, segment_bytes: 524_288, .. }), "{error}");
        assert!(error.to_string().contains("16777216") && error.to_string().contains("`groups`"), "{error}");
        let error = plan(args(1 << 50, MIB, 16)).unwrap_err();
        assert!(matches!(error, PlanError::TooMany { .. }));
    }

    #[test]
    fn reserved_huge_pages_are_not_cut() {
        let plan = plan(PlanArgs { page_bytes: 2 * MIB, ..args(15 * MIB, GIB, 3) }).unwrap();
        assert_eq!((plan.count, plan.bytes()), (3, 4 * MIB));
    }
}
