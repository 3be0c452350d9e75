//! The extent map compared with one boolean per unit.

use moontide_heap::alloc::{ClaimError, ExtentMap};
use moontide_types::Extent;
use proptest::prelude::*;

/// Claims in the naive way, and returns the expected result of the map.
fn claim(units: &mut [bool], extent: Extent) -> Result<(), ClaimError> {
    if extent.units == 0 {
        return Err(ClaimError::Empty { extent });
    }
    if extent.end() > units.len() as u64 {
        return Err(ClaimError::OutOfRange { extent, capacity_units: units.len() as u32 });
    }
    let range = extent.start as usize..extent.end() as usize;
    if let Some(taken) = units[range.clone()].iter().position(|&taken| taken) {
        return Err(ClaimError::Overlap { extent, first_taken_unit: extent.start + taken as u32 });
    }
    units[range].fill(true);
    Ok(())
}

proptest! {
    #[test]
    fn extent_map_matches_model(
        capacity in 1..700u32,
        steps in prop::collection::vec((any::<prop::sample::Index>(), 0..200u32, any::<bool>()), 1..200),
    ) {
        let mut map = ExtentMap::new(capacity);
        let mut units = vec![false; capacity as usize];
        let mut live: Vec<Extent> = Vec::new();
        for (index, length, release) in steps {
            if release && !live.is_empty() {
                let extent = live.swap_remove(index.index(live.len()));
                map.release(extent);
                units[extent.start as usize..extent.end() as usize].fill(false);
            } else {
                let extent = Extent { start: index.index(capacity as usize + 70) as u32, units: length };
                let free = map.is_free(extent);
                let expected = claim(&mut units, extent);
                prop_assert_eq!(free, expected.is_ok());
                prop_assert_eq!(map.try_claim(extent), expected);
                live.extend(expected.ok().map(|()| extent));
            }
            prop_assert_eq!(map.claimed_units() as usize, units.iter().filter(|&&taken| taken).count());
        }
    }

    #[test]
    fn release_of_unclaimed_extent_panics_without_change(start in 0..190u32, units in 1..60u32) {
        let claimed = Extent { start: 100, units: 50 };
        let extent = Extent { start, units };
        let inside = start >= claimed.start && extent.end() <= claimed.end();
        let mut map = ExtentMap::new(250);
        map.try_claim(claimed).expect("it is free");
        let released = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| map.release(extent)));
        prop_assert_eq!(released.is_ok(), inside);
        prop_assert_eq!(map.claimed_units(), if inside { 50 - units } else { 50 });
    }
}

#[test]
fn claim_and_release_are_exact_at_word_boundaries() {
    for (start, units) in [(0, 64), (63, 1), (63, 2), (64, 64), (1, 126), (0, 256), (255, 1), (0, 1)] {
        let mut map = ExtentMap::new(256);
        let extent = Extent { start, units };
        map.try_claim(extent).expect("it is free");
        for unit in 0..256 {
            let inside = start <= unit && unit < start + units;
            assert_eq!(map.is_free(Extent { start: unit, units: 1 }), !inside, "unit {unit} of {extent}");
        }
        map.release(extent);
        assert!(map.is_free(Extent { start: 0, units: 256 }));
    }
}

#[test]
fn extent_beyond_32_bits_is_out_of_range() {
    let extent = Extent { start: u32::MAX, units: u32::MAX };
    let refused = ExtentMap::new(100).try_claim(extent);
    assert_eq!(refused, Err(ClaimError::OutOfRange { extent, capacity_units: 100 }));
}
