//! [`Sketch`]: approximate number of recent reads of an object, in half a byte per counter.
//!
//! A count-min sketch with four rows of 4-bit counters. It may overestimate, because objects share counters. It never
//! underestimates, except for the halving: after [`SAMPLE`] reads all counters are halved, so that old reads lose
//! weight. It takes 64 KiB per group, independent of the number of objects.

use moontide_types::ObjectId;

/// Counters per row: a power of two.
const COUNTERS: usize = 32 << 10;

const ROWS: usize = 4;

/// Reads between two halvings: eight per counter of a row, so that the counters rarely saturate.
const SAMPLE: u32 = 8 * COUNTERS as u32;

/// Largest count.
const COUNT_MAX: u8 = 15;

/// Approximate read counts.
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
    /// Counts one read of an object.
    pub(crate) fn add(&mut self, id: ObjectId) {
        for (row, counter) in self.rows.iter_mut().zip(counter_indices(id)) {
            let count = get(row, counter);
            if count < COUNT_MAX {
                row[counter / 2] += 1 << (counter % 2 * 4);
            }
        }
        self.reads += 1;
        if self.reads == SAMPLE {
            self.reads = 0;
            for byte in self.rows.iter_mut().flat_map(|row| row.iter_mut()) {
                // Halves both counters of the byte at once; the mask clears the bit that would cross over.
                *byte = *byte >> 1 & 0x77;
            }
        }
    }

    /// Returns the approximate number of recent reads, 0 to 15.
    pub(crate) fn count(&self, id: ObjectId) -> u8 {
        self.rows.iter().zip(counter_indices(id)).map(|(row, counter)| get(row, counter)).min().unwrap_or(0)
    }
}

fn get(row: &[u8], counter: usize) -> u8 {
    row[counter / 2] >> (counter % 2 * 4) & 0xf
}

/// Returns one counter index per row. An id is already a keyed hash, so any of its bytes are suitable.
fn counter_indices(id: ObjectId) -> [usize; ROWS] {
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
    fn sketch_counts_reads_with_few_false_positives() {
        let mut sketch = Sketch::default();
        for n in 0..4_000 {
            sketch.add(id(n));
        }
        assert!((0..4_000).all(|n| sketch.count(id(n)) >= 1));
        let wrong = (100_000..110_000).filter(|&n| sketch.count(id(n)) > 0).count();
        assert!(wrong < 100, "{wrong} of 10,000 unread objects have a count");
    }

    #[test]
    fn sketch_counts_saturate_and_decay() {
        let mut sketch = Sketch::default();
        for _ in 0..100 {
            sketch.add(id(7));
        }
        assert_eq!(sketch.count(id(7)), COUNT_MAX);
        // Reads other objects until all counters have been halved four times.
        for n in 0..u64::from(SAMPLE) * 4 {
            sketch.add(id(1_000 + n % 64));
        }
        assert_eq!(sketch.count(id(7)), 0);
    }
}
