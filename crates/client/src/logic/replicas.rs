//! [`sort_replicas`]: order in which the replicas of an object are tried.
//!
//! Healthy nodes before failed ones, memory before disk, local before remote. Equal replicas are rotated by a number
//! from the caller, which spreads the load.

/// Distance of a node; the nearest is the smallest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Distance {
    /// This process has mapped the node's memory.
    Mapped,
    /// Same host.
    Host,
    /// Same rack.
    Rack,
    /// Same zone.
    Zone,
    /// Anywhere else, or unknown.
    Remote,
}

impl Distance {
    /// Compares the labels (host, rack, zone) of this process and of a node. An empty label is unknown and equals
    /// nothing.
    pub fn of(mapped: bool, ours: [&str; 3], theirs: [&str; 3]) -> Distance {
        let same = |at: usize| !ours[at].is_empty() && ours[at] == theirs[at];
        match () {
            () if mapped => Distance::Mapped,
            () if same(0) => Distance::Host,
            () if same(1) => Distance::Rack,
            () if same(2) => Distance::Zone,
            () => Distance::Remote,
        }
    }
}

/// Replica that can be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicaCandidate {
    /// Number of the replica, defined by the caller.
    pub replica: usize,
    /// Whether the replica is on disk.
    pub disk: bool,
    /// Distance of the node.
    pub distance: Distance,
    /// Recent health of the node.
    pub health: NodeHealth,
}

/// Recent health of a node; the best is the smallest.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum NodeHealth {
    /// No recent failure or slow read.
    Good,
    /// A hedge to another node was faster.
    Slow,
    /// The connection failed recently.
    Failed,
}

/// Sorts candidates, best first. Equal candidates are rotated by `spread`, which is any number.
pub fn sort_replicas(candidates: &mut [ReplicaCandidate], spread: u64) {
    // Failed nodes come last, whatever their distance: waiting for one costs more than any distance.
    let rank = |candidate: &ReplicaCandidate| (candidate.health, candidate.disk, candidate.distance);
    candidates.sort_by_key(rank);
    let mut start = 0;
    while start < candidates.len() {
        let equal = candidates[start..].iter().take_while(|c| rank(c) == rank(&candidates[start])).count();
        candidates[start..start + equal].rotate_left((spread % equal as u64) as usize);
        start += equal;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(replica: usize, disk: bool, distance: Distance, health: NodeHealth) -> ReplicaCandidate {
        ReplicaCandidate { replica, disk, distance, health }
    }

    #[test]
    fn replicas_sort_by_health_then_medium_then_distance() {
        use Distance::*;
        let mut candidates = [
            candidate(0, true, Mapped, NodeHealth::Good),
            candidate(1, false, Remote, NodeHealth::Good),
            candidate(2, false, Mapped, NodeHealth::Failed),
            candidate(3, false, Host, NodeHealth::Good),
            candidate(4, true, Remote, NodeHealth::Good),
            candidate(5, false, Mapped, NodeHealth::Slow),
        ];
        sort_replicas(&mut candidates, 7);
        assert_eq!(candidates.map(|c| c.replica), [3, 1, 0, 4, 5, 2]);
    }

    #[test]
    fn equal_replicas_share_load_evenly() {
        let mut firsts = [0; 3];
        for spread in 0..300 {
            let mut candidates =
                [0, 1, 2].map(|replica| candidate(replica, false, Distance::Remote, NodeHealth::Good));
            sort_replicas(&mut candidates, spread);
            firsts[candidates[0].replica] += 1;
        }
        assert_eq!(firsts, [100, 100, 100]);
    }

    #[test]
    fn distance_treats_unknown_labels_as_remote() {
        let of = |ours, theirs| Distance::of(false, ours, theirs);
        assert_eq!(of(["a", "r", "z"], ["a", "", ""]), Distance::Host);
        assert_eq!(of(["a", "r", "z"], ["b", "r", "z"]), Distance::Rack);
        assert_eq!(of(["a", "", "z"], ["b", "", "z"]), Distance::Zone);
        assert_eq!(of(["", "", ""], ["", "", ""]), Distance::Remote);
        assert_eq!(Distance::of(true, ["", "", ""], ["b", "", ""]), Distance::Mapped);
    }
}
