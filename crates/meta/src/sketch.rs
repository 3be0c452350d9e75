//! [`Sketch`]: about how often an object was read lately, in half a byte per counter.
//!
//! A count-min sketch with four rows of 4-bit counters. It may say too much, because objects share counters, and never
//! too little, but for the halving: after [`SAMPLE`] reads all counters are halved, so that what was read long ago is
//! forgotten. 64 KiB per group, whatever the number of objects.

use moontide_types::ObjectId;

/// Counters per row: a power of two.
const COUNTERS: usize = 32 << 10;

const ROWS: usize = 4;

/// Reads after which everything counts half: eight per counter of a row, so that the counters hardly ever saturate.
const SAMPLE: u32 = 8 * COUNTERS as u32;

/// The largest count.
const COUNT_MAX: u8 = 15;

/// How often objects were read lately.
#[derive(Debug)]
pub(crate) struct Sketch {
    /// Two counters per byte.
    rows: [Box<[u8]>; ROWS],
    reads: u32,
}

impl Default for Sketch {
    fn default() -> Sketch {
        Sketch { rows: std::array::from_fn(|_| vec![0; COUNTERS / 2].into()), reads: 0 }
    }
}

impl Sketch {
    /// An object was read.
    pub(crate) fn add(&mut self, id: ObjectId) {
        for (row, counter) in self.rows.iter_mut().zip(places(id)) {
            let count = get(row, counter);
            if count < COUNT_MAX {
                row[counter / 2] += 1 << (counter % 2 * 4);
            }
        }
        self.reads += 1;
        if self.reads == SAMPLE {
            self.reads = 0;
            for byte in self.rows.iter_mut().flat_map(|row| row.iter_mut()) {
                // Both halves of the byte at once; the bit that would cross over is masked.
                *byte = *byte >> 1 & 0x77;
            }
        }
    }

    /// About how often, 0 to 15.
    pub(crate) fn count(&self, id: ObjectId) -> u8 {
        self.rows.iter().zip(places(id)).map(|(row, counter)| get(row, counter)).min().unwrap_or(0)
    }
}

fn get(row: &[u8], counter: usize) -> u8 {
    row[counter / 2] >> (counter % 2 * 4) & 0xf
}

/// One counter per row. An id is a keyed hash already: its bytes are as good as any.
fn places(id: ObjectId) -> [usize; ROWS] {
    std::array::from_fn(|row| {
        let at = row * 4;
        let bytes = id.0[at..at + 4].try_into().expect("four bytes");
        u32::from_le_bytes(bytes) as usize % COUNTERS
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn id(n: u64) -> ObjectId {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&n.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        bytes[8..].copy_from_slice(&(n ^ 0xabcd).wrapping_mul(0xd6e8_feb8_6659_fd93).to_le_bytes());
        ObjectId(bytes)
    }

    #[test]
    fn what_was_read_is_counted_and_the_rest_hardly_ever() {
        let mut sketch = Sketch::default();
        for n in 0..4_000 {
            sketch.add(id(n));
        }
        assert!((0..4_000).all(|n| sketch.count(id(n)) >= 1));
        let wrong = (100_000..110_000).filter(|&n| sketch.count(id(n)) > 0).count();
        assert!(wrong < 100, "{wrong} of 10,000 that nobody read");
    }

    #[test]
    fn counts_stop_at_their_largest_and_are_forgotten() {
        let mut sketch = Sketch::default();
        for _ in 0..100 {
            sketch.add(id(7));
        }
        assert_eq!(sketch.count(id(7)), COUNT_MAX);
        // Other objects are read until everything was halved four times.
        for n in 0..u64::from(SAMPLE) * 4 {
            sketch.add(id(1_000 + n % 64));
        }
        assert_eq!(sketch.count(id(7)), 0);
    }
}
