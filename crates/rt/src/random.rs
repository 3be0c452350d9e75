//! [`SplitMix64`]: pseudo-random numbers from a seed, for choices that a test must be able to repeat.
//!
//! The generator is written here, not taken from a library, so that no release of a library changes what an old seed
//! gives. Equal seeds give equal numbers on every machine.

/// Pseudo-random number generator of Steele, Lea and Flood, with 64 bits of state. Not for secrets.
///
/// Sequences of two seeds overlap if the seeds differ by a small multiple of the increment, which seeds from one
/// generator, from a counter or from a person do not.
#[derive(Clone, Debug)]
pub struct SplitMix64 {
    state: u64,
}

/// The golden ratio as a fraction of 2⁶⁴, made odd.
const INCREMENT: u64 = 0x9e37_79b9_7f4a_7c15;

impl SplitMix64 {
    /// Creates a generator. Equal seeds give equal numbers.
    #[inline]
    pub const fn new(seed: u64) -> SplitMix64 {
        SplitMix64 { state: seed }
    }

    /// Returns the next 64 bits.
    #[inline]
    pub const fn next_u64(&mut self) -> u64 {
        self.state = self.state.wrapping_add(INCREMENT);
        mix64(self.state)
    }

    /// Returns a number below `end`, as the remainder of the next 64 bits. The bias is below `end` / 2⁶⁴.
    ///
    /// # Panics
    ///
    /// If `end` is 0.
    #[inline]
    pub const fn below(&mut self, end: u64) -> u64 {
        self.next_u64() % end
    }

    /// Returns an index of a slice of this length, by multiplication, which is faster than [`SplitMix64::below`]. The
    /// bias is below `len` / 2⁶⁴.
    ///
    /// # Panics
    ///
    /// If `len` is 0.
    #[inline]
    pub const fn index(&mut self, len: usize) -> usize {
        assert!(len > 0, "an empty slice has no index");
        ((self.next_u64() as u128 * len as u128) >> 64) as usize
    }

    /// Returns a number in [0, 1), in steps of 2⁻⁵³.
    #[inline]
    pub const fn fraction(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Returns `true` in `permille` of 1000 calls. Draws no number for 0, so that a disabled choice does not change the
    /// others.
    #[inline]
    pub const fn chance(&mut self, permille: u32) -> bool {
        permille > 0 && self.below(1000) < permille as u64
    }

    /// Returns `true` in half of the calls.
    #[inline]
    pub const fn coin(&mut self) -> bool {
        self.next_u64() >> 63 == 1
    }

    /// Returns a number between `min` and `max` whose logarithm is about uniform: each doubling is equally probable. Uses
    /// integers alone, so that it is equal on every machine.
    ///
    /// # Panics
    ///
    /// If `min` is 0 or above `max`.
    pub const fn log_uniform(&mut self, min: u64, max: u64) -> u64 {
        assert!(min > 0 && min <= max, "no such range");
        let low = min << self.below((max / min).ilog2() as u64 + 1);
        let number = low + self.below(low);
        if number < max { number } else { max }
    }

    /// Fills `bytes`. Draws one number per 8 bytes; the last one may be used in part.
    pub fn fill(&mut self, bytes: &mut [u8]) {
        for chunk in bytes.chunks_mut(8) {
            chunk.copy_from_slice(&self.next_u64().to_le_bytes()[..chunk.len()]);
        }
    }
}

/// Mixes the bits of `word`, bijectively: every bit of the input affects every bit of the output. 0 stays 0.
#[inline]
pub const fn mix64(word: u64) -> u64 {
    let mut mixed = word;
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_match_reference_implementation() {
        let mut rng = SplitMix64::new(1_234_567);
        let expected: [u64; 5] = [
            6_457_827_717_110_365_317,
            3_203_168_211_198_807_973,
            9_817_491_932_198_370_423,
            4_593_380_528_125_082_431,
            16_408_922_859_458_223_821,
        ];
        assert_eq!(expected.map(|_| rng.next_u64()), expected);
    }

    #[test]
    fn rng_is_deterministic_per_seed_and_covers_range() {
        let (mut a, mut b) = (SplitMix64::new(7), SplitMix64::new(7));
        let mut seen = [[0; 10]; 2];
        for _ in 0..1000 {
            let (index, below) = (a.index(10), a.below(10) as usize);
            assert_eq!((index, below), (b.index(10), b.below(10) as usize));
            seen[0][index] += 1;
            seen[1][below] += 1;
        }
        assert!(seen.as_flattened().iter().all(|&n| (50..200).contains(&n)), "{seen:?}");
    }

    #[test]
    fn chance_follows_permille_and_draws_nothing_for_zero() {
        let (mut rng, mut same) = (SplitMix64::new(3), SplitMix64::new(3));
        assert!((0..100).all(|_| !rng.chance(0)));
        assert_eq!(rng.next_u64(), same.next_u64());
        assert!((0..100).all(|_| rng.chance(1000)));
        let hits = (0..10_000).filter(|_| rng.chance(100)).count();
        assert!((800..1200).contains(&hits), "{hits}");
        let heads = (0..10_000).filter(|_| rng.coin()).count();
        assert!((4500..5500).contains(&heads), "{heads}");
        assert!((0..10_000).all(|_| (0.0..1.0).contains(&rng.fraction())));
    }

    #[test]
    fn log_uniform_draws_each_doubling_equally_often() {
        let mut rng = SplitMix64::new(5);
        let mut doublings = [0; 4];
        for _ in 0..4000 {
            let number = rng.log_uniform(50, 700);
            assert!((50..=700).contains(&number));
            doublings[(number / 50).ilog2() as usize] += 1;
        }
        assert!(doublings.iter().all(|n| (850..1150).contains(n)), "{doublings:?}");
        assert_eq!(rng.log_uniform(9, 9), 9);
    }

    #[test]
    fn fill_writes_numbers_little_endian_and_truncates_the_last() {
        let (mut rng, mut same) = (SplitMix64::new(9), SplitMix64::new(9));
        let mut bytes = [0; 11];
        rng.fill(&mut bytes);
        assert_eq!(bytes[..8], same.next_u64().to_le_bytes());
        assert_eq!(bytes[8..], same.next_u64().to_le_bytes()[..3]);
        assert_eq!(rng.next_u64(), same.next_u64());
    }
}
