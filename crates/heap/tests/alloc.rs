//! The allocator compared with the naive model, over random sequences of steps, and cases that random steps would
//! rarely reach.

#[path = "alloc/model.rs"]
mod model;

use std::num::NonZeroU32;

use model::{Model, Op};
use moontide_heap::alloc::{Align, Allocator, BlockRef, RebuildError};
use moontide_types::Extent;
use proptest::prelude::*;

fn units(units: u32) -> NonZeroU32 {
    NonZeroU32::new(units).expect("not zero")
}

fn align() -> impl Strategy<Value = Align> {
    prop_oneof![Just(Align::Unit), Just(Align::Page)]
}

fn op(capacity: u32) -> impl Strategy<Value = Op> {
    let size = prop_oneof![4 => 1..=20u32, 4 => 1..=200u32, 1 => 1..=capacity];
    prop_oneof![
        10 => (size, align()).prop_map(|(size, align)| Op::Alloc { units: units(size), align }),
        8 => any::<u32>().prop_map(|rank| Op::Free { rank }),
        1 => any::<(u32, u32)>().prop_map(|(rank, tag)| Op::Tag { rank, tag }),
        1 => (0..capacity + 9, 0..=200u32).prop_map(|(start, units)| Op::Claim { extent: Extent { start, units } }),
        1 => Just(Op::Rebuild),
    ]
}

/// Returns a segment that is completely allocated.
fn full_of(sizes: &[u32]) -> Model {
    let mut model = Model::new(sizes.iter().sum());
    sizes.iter().for_each(|&size| model.step_unchecked(Op::Alloc { units: units(size), align: Align::Unit }));
    model
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]

    #[test]
    fn allocator_matches_model(
        (capacity, ops) in prop_oneof![1..200u32, 1000..6000u32]
            .prop_flat_map(|capacity| (Just(capacity), prop::collection::vec(op(capacity), 1..250)))
    ) {
        let mut model = Model::new(capacity);
        for op in ops {
            model.step(op);
        }
        model.finish();
    }

    /// More than 256 free runs in one bin, so that the limits on probes take effect.
    #[test]
    fn allocator_matches_model_with_many_free_runs_in_one_bin(
        sizes in prop::collection::vec(4096..4160u32, 600..800),
        requests in prop::collection::vec((4000..4300u32, align()), 1..20),
    ) {
        let mut model = full_of(&sizes);
        // Ranks after a freed block move up: this frees every other one.
        (0..sizes.len() as u32 / 2).for_each(|rank| model.step_unchecked(Op::Free { rank }));
        for (size, align) in requests {
            model.step(Op::Alloc { units: units(size), align });
        }
        model.finish();
    }

    #[test]
    fn allocator_is_deterministic(ops in prop::collection::vec((1..300u32, align(), any::<bool>()), 1..200)) {
        let run = || {
            let mut allocator = Allocator::new(8192);
            let mut live = Vec::new();
            let mut results = Vec::new();
            for &(size, align, free) in &ops {
                let result = allocator.alloc(units(size), align);
                live.extend(result.map(|allocation| allocation.block));
                results.push(result);
                if free && !live.is_empty() {
                    allocator.free(live.swap_remove(size as usize % live.len()));
                }
            }
            results
        };
        prop_assert_eq!(run(), run());
    }
}

#[test]
fn alloc_prefers_fitting_run_of_own_bin_to_larger_run() {
    // Two gaps, 652 and 700 units long; an object of 652 gets the gap of the equal one.
    let mut allocator = Allocator::new(1 << 20);
    let mut alloc = |size| allocator.alloc(units(size), Align::Page).expect("it fits");
    let (equal, _, longer, _) = (alloc(652), alloc(8), alloc(700), alloc(8));
    allocator.free(longer.block);
    allocator.free(equal.block);
    let again = allocator.alloc(units(652), Align::Page).expect("it fits");
    assert_eq!(again.extent, equal.extent);
}

#[test]
fn alloc_probes_at_most_256_runs_of_a_bin() {
    for (others, found) in [(255, true), (256, false)] {
        // The block that fits is freed first and is therefore the last of its bin; all runs start on a page.
        let mut allocator = Allocator::new(4160 + others * 8192 + 4096);
        let mut alloc = |size| allocator.alloc(units(size), Align::Unit).expect("it fits").block;
        let mut freed = vec![alloc(4159)];
        alloc(4097);
        for _ in 0..others {
            freed.push(alloc(4096));
            alloc(4096);
        }
        freed.into_iter().for_each(|block| _ = allocator.free(block));
        assert_eq!(allocator.stats().free_blocks, others + 1);
        assert_eq!(allocator.alloc(units(4159), Align::Unit).is_some(), found, "after {others} others");
    }
}

#[test]
fn free_all_equals_freeing_each() {
    let fill = || {
        let mut allocator = Allocator::new(10_000);
        let alloc = |at: u32| allocator.alloc(units(1 + at * 37 % 60), Align::Page).expect("it fits");
        let live: Vec<_> = (0..200).map(alloc).collect();
        (allocator, live)
    };
    let ((mut each, live), (mut all, _)) = (fill(), fill());
    let chosen: Vec<BlockRef> =
        live.iter().filter(|one| one.extent.units % 3 > 0).map(|one| one.block).collect();
    let one_by_one: Vec<_> = chosen.iter().map(|&block| (block, each.free(block))).collect();
    let mut together = Vec::new();
    all.free_all(&chosen, |block, extent| together.push((block, extent)));
    assert_eq!(one_by_one, together);
    assert_eq!(each.stats(), all.stats());
    assert!(each.free_runs().eq(all.free_runs()));
}

#[test]
fn block_metadata_is_recycled() {
    let mut allocator = Allocator::new(1 << 16);
    allocator.reserve_live(100);
    let reserved = allocator.stats().metadata_bytes;
    for round in 0..1000u32 {
        let alloc = |allocator: &mut Allocator, at: u32| {
            allocator.alloc(units(1 + (at * 7 + round) % 90), Align::Page)
        };
        let live: Vec<BlockRef> =
            (0..100).map(|at| alloc(&mut allocator, at).expect("it fits").block).collect();
        live.iter()
            .step_by(2)
            .chain(live.iter().skip(1).step_by(2))
            .for_each(|&block| _ = allocator.free(block));
    }
    assert_eq!(allocator.stats().metadata_bytes, reserved);
    assert_eq!(allocator.stats().free_blocks, 1);
}

#[test]
fn allocator_handles_largest_and_empty_segment() {
    let mut allocator = Allocator::new(u32::MAX - 2);
    let all = allocator.alloc(units(u32::MAX - 2), Align::Page).expect("it fits exactly");
    assert_eq!(allocator.alloc(units(1), Align::Unit), None);
    allocator.free(all.block);
    assert_eq!(allocator.alloc(units(u32::MAX), Align::Unit), None);
    let last = allocator.alloc(units(5), Align::Page).expect("it fits");
    assert!(last.extent.end() <= u64::from(u32::MAX - 2));

    let mut none = Allocator::new(0);
    assert_eq!(none.alloc(units(1), Align::Unit), None);
    assert_eq!(none.free_runs().count(), 0);
}

#[test]
#[should_panic(expected = "is not a live block")]
fn double_free_panics() {
    let mut allocator = Allocator::new(64);
    let block = allocator.alloc(units(8), Align::Page).expect("it fits").block;
    allocator.free(block);
    allocator.free(block);
}

#[test]
fn freeing_unallocated_block_panics() {
    for number in [0, 1, 2, 77, u32::MAX] {
        let freed = std::panic::catch_unwind(|| Allocator::new(64).free(BlockRef(number)));
        assert!(freed.is_err(), "block {number}");
    }
}

#[test]
fn rebuild_error_names_invalid_or_overlapping_extents() {
    let extent = |start, units| Extent { start, units };
    let check = |live: &[Extent], expected| assert_eq!(Allocator::rebuild(100, live).err(), expected);
    check(&[], None);
    check(&[extent(90, 10), extent(0, 90)], None);
    check(&[extent(5, 0)], Some(RebuildError::Empty { extent: extent(5, 0) }));
    let capacity_units = 100;
    check(&[extent(91, 10)], Some(RebuildError::OutOfRange { extent: extent(91, 10), capacity_units }));
    check(&[extent(u32::MAX, u32::MAX)], {
        Some(RebuildError::OutOfRange { extent: extent(u32::MAX, u32::MAX), capacity_units })
    });
    let (first, second) = (extent(10, 11), extent(20, 1));
    check(&[second, extent(50, 50), first], Some(RebuildError::Overlap { first, second }));
    check(&[first, first], Some(RebuildError::Overlap { first, second: first }));
    check(&[extent(3, 1); 500], Some(RebuildError::Overlap { first: extent(3, 1), second: extent(3, 1) }));
}
