//! Space of a segment: extents of records, free ranges between them, and a drawing.

/// State of the record in an extent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// READY: can be read.
    Live,
    /// WRITING: being written.
    Writing,
    /// DEAD: killed, possibly still read, not yet reclaimed.
    Draining,
}

impl Kind {
    const ALL: [(Kind, char); 3] = [(Kind::Live, '#'), (Kind::Writing, 'w'), (Kind::Draining, 'd')];
}

/// Consecutive units of one record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Extent {
    pub(super) start: u64,
    pub(super) units: u64,
    pub(super) kind: Kind,
}

impl Extent {
    fn end(&self) -> u64 {
        self.start + self.units
    }
}

/// Extents of a segment, sorted by start and clipped to the segment.
pub(super) struct Map {
    units: u64,
    extents: Vec<Extent>,
}

/// Free units between extents.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct FreeRanges {
    pub(super) count: u64,
    pub(super) free: u64,
    pub(super) largest: u64,
}

impl FreeRanges {
    /// `1 - largest / free`: 0 if the free space is contiguous, approaches 1 the more it is scattered.
    pub(super) fn fragmentation(&self) -> f64 {
        if self.free == 0 { 0.0 } else { 1.0 - self.largest as f64 / self.free as f64 }
    }
}

/// A map drawn as text.
pub(super) struct Drawing {
    /// Units per character.
    pub(super) step: u64,
    pub(super) rows: Vec<String>,
}

impl Map {
    /// Creates a map from the response of a node, which may be wrong: extents are clipped to the segment.
    pub(super) fn new(units: u64, extents: impl Iterator<Item = Extent>) -> Map {
        let mut extents: Vec<Extent> = extents
            .filter(|extent| extent.start < units)
            .map(|extent| Extent { units: extent.units.min(units - extent.start), ..extent })
            .collect();
        extents.sort_by_key(|extent| extent.start);
        Map { units, extents }
    }

    /// Returns the gaps between extents.
    pub(super) fn holes(&self) -> FreeRanges {
        let mut holes = FreeRanges::default();
        let mut at = 0;
        let ends = self.extents.iter().map(|extent| (extent.start, extent.end()));
        for (start, end) in ends.chain([(self.units, self.units)]) {
            if start > at {
                holes.count += 1;
                holes.free += start - at;
                holes.largest = holes.largest.max(start - at);
            }
            at = at.max(end);
        }
        holes
    }

    /// Draws at most `rows` lines of at most `width` characters. A character shows free only if all of its units are
    /// free; otherwise it shows the most frequent kind of its used units.
    pub(super) fn draw(&self, width: usize, rows: usize) -> Drawing {
        let cells_max = (width * rows) as u64;
        let step = self.units.div_ceil(cells_max).max(1);
        let cells = self.units.div_ceil(step) as usize;
        let mut counts = vec![[0u64; Kind::ALL.len()]; cells];
        for extent in &self.extents {
            let column = Kind::ALL.iter().position(|(kind, _)| *kind == extent.kind).unwrap_or(0);
            let mut at = extent.start;
            while at < extent.end() {
                let cell = at / step;
                let end = ((cell + 1) * step).min(extent.end());
                counts[cell as usize][column] += end - at;
                at = end;
            }
        }
        let text: Vec<char> = counts.iter().map(character).collect();
        Drawing { step, rows: text.chunks(width).map(|row| row.iter().collect()).collect() }
    }
}

fn character(counts: &[u64; Kind::ALL.len()]) -> char {
    let most = counts.iter().max().copied().unwrap_or(0);
    let column = counts.iter().position(|count| *count == most).unwrap_or(0);
    if most == 0 { '.' } else { Kind::ALL[column].1 }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn live(start: u64, units: u64) -> Extent {
        Extent { start, units, kind: Kind::Live }
    }

    fn check(units: u64, extents: &[Extent], holes: (u64, u64, u64)) {
        let (count, free, largest) = holes;
        assert_eq!(Map::new(units, extents.iter().copied()).holes(), FreeRanges { count, free, largest });
    }

    #[test]
    fn free_ranges_are_gaps_between_extents() {
        check(10, &[], (1, 10, 10));
        check(10, &[live(0, 10)], (0, 0, 0));
        check(10, &[live(2, 3), live(8, 1)], (3, 6, 3));
        check(10, &[live(5, 5), live(0, 5)], (0, 0, 0));
        // Invalid responses: overlaps, and extents outside of the segment.
        check(10, &[live(0, 6), live(2, 2), live(8, u64::MAX)], (1, 2, 2));
        check(10, &[live(10, 1), live(u64::MAX, u64::MAX)], (1, 10, 10));
        check(0, &[], (0, 0, 0));
    }

    #[test]
    fn fragmentation_is_one_minus_largest_over_free() {
        assert_eq!(FreeRanges { count: 1, free: 10, largest: 10 }.fragmentation(), 0.0);
        assert_eq!(FreeRanges { count: 4, free: 100, largest: 25 }.fragmentation(), 0.75);
        assert_eq!(FreeRanges::default().fragmentation(), 0.0);
    }

    #[test]
    fn drawing_never_shows_used_units_as_free() {
        let map =
            Map::new(1000, [live(999, 1), Extent { start: 10, units: 7, kind: Kind::Writing }].into_iter());
        let drawing = map.draw(10, 2);
        assert_eq!(drawing.step, 50);
        assert_eq!(drawing.rows, ["w.........", ".........#"]);
        let exact = Map::new(7, [live(0, 2)].into_iter()).draw(5, 2);
        assert_eq!((exact.step, exact.rows), (1, vec!["##...".to_owned(), "..".to_owned()]));
        assert!(Map::new(0, std::iter::empty()).draw(10, 2).rows.is_empty());
        let huge = Map::new(u64::from(u32::MAX), [live(0, u64::from(u32::MAX))].into_iter()).draw(80, 16);
        assert!(huge.rows.len() <= 16 && huge.rows.iter().all(|row| row.len() <= 80));
    }
}
