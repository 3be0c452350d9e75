//! In which order the replicas of an object are asked: [`order`].
//!
//! Near before far, memory before disk, those that answered before those that just failed; among equals the load is
//! spread by a number that the caller draws.

/// How far away a node is; nearer is less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Nearness {
    /// Its memory is mapped by this process.
    Mapped,
    /// On this host.
    Host,
    /// In the same rack.
    Rack,
    /// In the same zone.
    Zone,
    /// Anywhere, or nobody knows.
    Far,
}

impl Nearness {
    /// From labels of both sides; an empty one is unknown and equals nothing.
    pub fn of(mapped: bool, ours: [&str; 3], theirs: [&str; 3]) -> Nearness {
        let same = |at: usize| !ours[at].is_empty() && ours[at] == theirs[at];
        match () {
            () if mapped => Nearness::Mapped,
            () if same(0) => Nearness::Host,
            () if same(1) => Nearness::Rack,
            () if same(2) => Nearness::Zone,
            () => Nearness::Far,
        }
    }
}

/// A replica that could be asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// Which one: a number that means something to the caller.
    pub replica: usize,
    /// Whether it is on disk.
    pub disk: bool,
    /// How far its node is.
    pub nearness: Nearness,
    /// What its node did a moment ago.
    pub trust: Trust,
}

/// What a node did a moment ago; better is less.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Trust {
    /// Nothing is known against it.
    Good,
    /// Another one was faster.
    Slow,
    /// It failed.
    Failed,
}

/// Sorts candidates, best first. `draw` is any number; equal candidates are rotated by it.
pub fn order(candidates: &mut [Candidate], draw: u64) {
    // Those that failed last, whatever else they are: waiting for one costs more than any distance.
    let rank = |candidate: &Candidate| (candidate.trust, candidate.disk, candidate.nearness);
    candidates.sort_by_key(rank);
    let mut start = 0;
    while start < candidates.len() {
        let equal = candidates[start..].iter().take_while(|c| rank(c) == rank(&candidates[start])).count();
        candidates[start..start + equal].rotate_left((draw % equal as u64) as usize);
        start += equal;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(replica: usize, disk: bool, nearness: Nearness, trust: Trust) -> Candidate {
        Candidate { replica, disk, nearness, trust }
    }

    #[test]
    fn near_memory_comes_before_far_memory_before_disk_before_what_was_slow_or_failed() {
        use Nearness::*;
        let mut candidates = [
            candidate(0, true, Mapped, Trust::Good),
            candidate(1, false, Far, Trust::Good),
            candidate(2, false, Mapped, Trust::Failed),
            candidate(3, false, Host, Trust::Good),
            candidate(4, true, Far, Trust::Good),
            candidate(5, false, Mapped, Trust::Slow),
        ];
        order(&mut candidates, 7);
        assert_eq!(candidates.map(|c| c.replica), [3, 1, 0, 4, 5, 2]);
    }

    #[test]
    fn equals_share_the_load() {
        let mut firsts = [0; 3];
        for draw in 0..300 {
            let mut candidates =
                [0, 1, 2].map(|replica| candidate(replica, false, Nearness::Far, Trust::Good));
            order(&mut candidates, draw);
            firsts[candidates[0].replica] += 1;
        }
        assert_eq!(firsts, [100, 100, 100]);
    }

    #[test]
    fn labels_that_are_unknown_are_far() {
        let of = |ours, theirs| Nearness::of(false, ours, theirs);
        assert_eq!(of(["a", "r", "z"], ["a", "", ""]), Nearness::Host);
        assert_eq!(of(["a", "r", "z"], ["b", "r", "z"]), Nearness::Rack);
        assert_eq!(of(["a", "", "z"], ["b", "", "z"]), Nearness::Zone);
        assert_eq!(of(["", "", ""], ["", "", ""]), Nearness::Far);
        assert_eq!(Nearness::of(true, ["", "", ""], ["b", "", ""]), Nearness::Mapped);
    }
}
