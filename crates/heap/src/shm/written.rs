//! [`WrittenRanges`]: the bytes of a record that have arrived at the node. Pure.
//!
//! A record is published only when all of its bytes were written: the others are what an earlier record left in this memory,
//! perhaps one of another tenant. Digests do not show that. A writer that leaves out one byte finds its earlier value
//! with at most 256 attempts at the root.

use moontide_types::Span;

/// Most ranges of a record: with 16 bytes each, 64 KiB. Writers that fill a record in pieces of 4 KiB, in random order,
/// reach a thousand ranges at 16 MiB, and this limit at 64 MiB.
const RANGES_MAX: u64 = 4096;

/// Ranges of a payload in ascending order, with unwritten bytes between them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct WrittenRanges(Vec<Span>);

impl WrittenRanges {
    /// Adds a range of a payload of `len` bytes. A range that would exceed the limit is not added: its bytes count as not
    /// written.
    pub(super) fn add(&mut self, range: Span, len: u64) {
        if range.is_empty() {
            return;
        }
        // Ranges that touch this one become one with it.
        let first = self.0.partition_point(|other| other.end() < range.offset());
        let end = self.0.partition_point(|other| other.offset() <= range.end());
        if first == end {
            // Proportional to the payload: a peer cannot make the node keep more than 3 % of what it has reserved.
            if (self.0.len() as u64) < (16 + len / 512).min(RANGES_MAX) {
                self.0.insert(first, range);
            }
            return;
        }
        let from = self.0[first].offset().min(range.offset());
        let to = self.0[end - 1].end().max(range.end());
        self.0[first] = Span::new(from, to - from).expect("inside the payload");
        self.0.drain(first + 1..end);
    }

    /// Returns whether all `len` bytes of the payload are written.
    pub(super) fn is_complete(&self, len: u64) -> bool {
        let is_unchecked = moontide_rt::mutation_enabled("unwritten-bytes-published");
        len == 0 || is_unchecked || matches!(self.0[..], [all] if all.offset() == 0 && all.len() == len)
    }
}

#[cfg(test)]
mod tests {
    use moontide_rt::SplitMix64;

    use super::*;

    fn span(from: u64, to: u64) -> Span {
        Span::new(from, to - from).unwrap()
    }

    #[test]
    fn written_ranges_match_naive_set_of_bytes() {
        let seed = std::env::var("MOONTIDE_SEED").map_or(1, |seed| seed.parse().unwrap());
        println!("MOONTIDE_SEED={seed}");
        let mut random = SplitMix64::new(seed);
        let mut completed = 0;
        for _ in 0..300 {
            let len = 1 + random.next_u64() % 200;
            let (mut ranges, mut bytes) = (WrittenRanges::default(), vec![false; len as usize]);
            for _ in 0..60 {
                let from = random.next_u64() % len;
                let to = (from + random.next_u64() % 40).min(len);
                ranges.add(span(from, to), 1 << 20);
                bytes[from as usize..to as usize].fill(true);
                let runs = bytes.chunk_by(|a, b| a == b).map(|run| (run[0], run.len() as u64));
                let naive = runs.scan(0, |at, (written, len)| {
                    *at += len;
                    Some(written.then(|| span(*at - len, *at)))
                });
                assert_eq!(ranges.0, naive.flatten().collect::<Vec<_>>());
                assert_eq!(ranges.is_complete(len), bytes.iter().all(|&written| written));
            }
            completed += u32::from(ranges.is_complete(len));
        }
        assert!(completed > 10, "{completed} of 300 payloads were completed");
    }

    #[test]
    fn ranges_above_the_limit_count_as_not_written() {
        let (len, mut ranges) = (1024, WrittenRanges::default());
        for at in (0..len).step_by(2) {
            ranges.add(span(at, at + 1), len);
        }
        assert_eq!(ranges.0.len(), 18, "16, and one for each 512 bytes");
        assert!(!ranges.is_complete(len));
        // A later write of the same bytes counts.
        ranges.add(span(0, len), len);
        assert!(ranges.is_complete(len));
        assert!(WrittenRanges::default().is_complete(0), "an empty payload has no bytes to write");
        let (len, mut ranges) = (1 << 30, WrittenRanges::default());
        for at in 0..2 * RANGES_MAX {
            ranges.add(span(2 * at, 2 * at + 1), len);
        }
        assert_eq!(ranges.0.len() as u64, RANGES_MAX);
    }
}
