//! [`Rng`]: the group's own dice, so that the same seed and the same commands give the same placements.

/// SplitMix64: 64 bits of state, good enough to choose among segments, and the same on every machine.
#[derive(Clone, Debug)]
pub struct Rng(u64);

impl Rng {
    /// Dice that fall the same way for the same seed.
    pub fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// A number below `n`. The bias is below n / 2⁶⁴, and nothing here is a lottery.
    ///
    /// # Panics
    /// If `n` is 0.
    pub fn below(&mut self, n: usize) -> usize {
        assert!(n > 0, "nothing to choose from");
        ((u128::from(self.next_u64()) * n as u128) >> 64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_falls_the_same_way_and_covers_its_range() {
        let (mut a, mut b) = (Rng::new(7), Rng::new(7));
        let mut seen = [0; 10];
        for _ in 0..1000 {
            let n = a.below(10);
            assert_eq!(n, b.below(10));
            seen[n] += 1;
        }
        assert!(seen.iter().all(|&n| (50..200).contains(&n)), "{seen:?}");
    }
}
