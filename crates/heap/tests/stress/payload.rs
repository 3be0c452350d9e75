//! Predictable bytes: payload as a pure function of key, version and length; and random numbers.

use moontide_rt::{SplitMix64, mix64};
use moontide_types::Epoch;

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// Random numbers: all choices of a run come from one printed seed.
pub struct Rng(SplitMix64);

impl Rng {
    pub fn new(seed: u64) -> Rng {
        Rng(SplitMix64::new(mix64(seed ^ GOLDEN)))
    }

    pub fn next(&mut self) -> u64 {
        self.0.next_u64()
    }

    /// Returns a number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.0.below(end)
    }

    pub fn between(&mut self, first: u64, last: u64) -> u64 {
        first + self.below(last - first + 1)
    }

    /// Returns true in `percent` of 100 calls.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// Returns a length from 0 to 300 KiB: many small ones, some above one 256 KiB page.
    pub fn payload_len(&mut self) -> u64 {
        match self.below(100) {
            0..2 => 0,
            2..25 => self.below(600),
            25..60 => self.below(16 << 10),
            60..92 => self.between(4 << 10, 100 << 10),
            _ => self.between(200 << 10, 300 << 10),
        }
    }
}

/// Reusable buffer for predicted bytes.
#[derive(Default)]
pub struct Predicted {
    words: Vec<u64>,
}

impl Predicted {
    /// Returns the payload of `key` in version `epoch`. The length goes into every word, so that the right bytes of
    /// another length are wrong bytes, too.
    pub fn bytes(&mut self, key: u64, epoch: Epoch, len: usize) -> &[u8] {
        let base = mix64(mix64(key ^ GOLDEN) ^ mix64(epoch.bits()) ^ (len as u64).wrapping_mul(GOLDEN));
        self.words.clear();
        // A while loop, since this is most of the test's work and the dev profile does not unroll iterators.
        let (mut word, count) = (0, len.div_ceil(8) as u64);
        self.words.reserve(count as usize);
        while word < count {
            self.words.push(mix64(base.wrapping_add(word.wrapping_mul(GOLDEN))));
            word += 1;
        }
        // SAFETY: any bytes are u64s, and vice versa.
        let (_, bytes, _) = unsafe { self.words.align_to::<u8>() };
        &bytes[..len]
    }

    /// Describes the difference between `found` and the expected bytes; `None` if there is none.
    pub fn compare(&mut self, key: u64, epoch: Epoch, found: &[u8]) -> Option<String> {
        let expected = self.bytes(key, epoch, found.len());
        if expected == found {
            return None;
        }
        let differs = |&at: &usize| expected[at] != found[at];
        let first = (0..found.len()).find(differs).unwrap_or(0);
        let count = (0..found.len()).filter(differs).count();
        let upto = (first + 16).min(found.len());
        Some(format!(
            "{count} of {} bytes differ, the first at {first}: expected {:02x?}, found {:02x?}",
            found.len(),
            &expected[first..upto],
            &found[first..upto],
        ))
    }
}
