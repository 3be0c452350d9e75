//! Bytes that anyone can predict: payload as a pure function of key, version and length; and the dice.

use moontide_types::Epoch;

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// The finisher of splitmix64: every bit of the input reaches every bit of the output.
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// splitmix64: all choices of a run come from one printed seed through these.
pub struct Dice(u64);

impl Dice {
    pub fn new(seed: u64) -> Dice {
        Dice(mix(seed ^ GOLDEN))
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        mix(self.0)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub fn between(&mut self, first: u64, last: u64) -> u64 {
        first + self.below(last - first + 1)
    }

    /// Yes in `percent` of 100 throws.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// Lengths from 0 to 300 KiB: many small ones, some over one 256 KiB page.
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

/// A buffer for predicted bytes, used again and again.
#[derive(Default)]
pub struct Predicted {
    words: Vec<u64>,
}

impl Predicted {
    /// The payload of `key` in version `epoch`. The length goes into every word, so that the right bytes of
    /// another length are wrong bytes, too.
    pub fn bytes(&mut self, key: u64, epoch: Epoch, len: usize) -> &[u8] {
        let base = mix(mix(key ^ GOLDEN) ^ mix(epoch.bits()) ^ (len as u64).wrapping_mul(GOLDEN));
        self.words.clear();
        // A while loop, since this is most of the storm's work and the dev profile does not unroll iterators.
        let (mut word, count) = (0, len.div_ceil(8) as u64);
        self.words.reserve(count as usize);
        while word < count {
            self.words.push(mix(base.wrapping_add(word.wrapping_mul(GOLDEN))));
            word += 1;
        }
        // SAFETY: any bytes are u64s and the other way round.
        let (_, bytes, _) = unsafe { self.words.align_to::<u8>() };
        &bytes[..len]
    }

    /// What is wrong with `found`, exactly; `None` if every byte is right.
    pub fn judge(&mut self, key: u64, epoch: Epoch, found: &[u8]) -> Option<String> {
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
