//! [`Placement`] strategies: the choice of a segment for new bytes. The group checks whether the chosen segment is
//! allowed and has enough space. If not, the group chooses again, and scans all segments before it fails.
//!
//! A strategy is deterministic: equal candidates, an equal request and an equal generator state give the same choice.

use moontide_rt::SplitMix64;
use moontide_types::{Domain, Labels, NodeId, SegmentId, Spread};

/// Position of a node in the cluster, as interned labels; 0 is unknown and equal to nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Topology {
    /// Interned host label.
    pub host: u32,
    /// Interned rack label.
    pub rack: u32,
    /// Interned zone label.
    pub zone: u32,
}

impl Topology {
    /// Distance of two nodes: 0 for the same host, 1 for the same rack, 2 for the same zone, 3 otherwise.
    pub fn distance(self, other: Topology) -> u32 {
        let same = |a: u32, b: u32| a != 0 && a == b;
        if same(self.host, other.host) {
            0
        } else if same(self.rack, other.rack) {
            1
        } else if same(self.zone, other.zone) {
            2
        } else {
            3
        }
    }
}

impl Topology {
    /// Returns the labels that are known.
    fn labels(self) -> Labels<u32> {
        let known = |label: u32| (label != 0).then_some(label);
        Labels { host: known(self.host), rack: known(self.rack), zone: known(self.zone) }
    }
}

/// A segment that accepts new objects.
#[derive(Clone, Copy, Debug)]
pub struct SegmentCandidate {
    /// Index of the segment in the group's table.
    pub index: u32,
    /// Node that owns the segment.
    pub node: NodeId,
    /// Id of the segment on its node.
    pub segment: SegmentId,
    /// Topology of the node.
    pub topology: Topology,
    /// Size in units.
    pub units: u32,
    /// Free units.
    pub free_units: u32,
}

impl SegmentCandidate {
    fn free_ratio(&self) -> f64 {
        f64::from(self.free_units) / f64::from(self.units)
    }
}

/// Location of an existing replica of the same object.
#[derive(Clone, Copy, Debug)]
pub struct ReplicaSite {
    /// Node that holds the replica.
    pub node: NodeId,
    /// Topology of the node.
    pub topology: Topology,
}

impl ReplicaSite {
    /// Returns the part of the cluster that has at most one replica of an object with this spread.
    pub(crate) fn domain(&self, spread: Option<Spread>) -> Domain<u32> {
        spread.map_or(Domain::Node(self.node), |spread| spread.domain(self.node, self.topology.labels()))
    }

    /// Whether two replicas of an object with this spread may be at these sites.
    pub(crate) fn is_apart(&self, other: &ReplicaSite, spread: Option<Spread>) -> bool {
        // A host may have nodes with and without the other labels.
        let on_one_host = spread.is_some() && self.topology.distance(other.topology) == 0;
        self.node != other.node && !on_one_host && self.domain(spread) != other.domain(spread)
    }
}

/// Constraints for the placement of one stripe.
#[derive(Clone, Copy, Debug)]
pub struct PlacementRequest<'a> {
    /// Topology of the writer, if known.
    pub writer: Option<Topology>,
    /// Locations of other replicas of the object.
    pub replicas: &'a [ReplicaSite],
}

/// Strategy that chooses a segment for one stripe.
pub trait Placement: Send + std::fmt::Debug {
    /// Returns the index of a candidate. `candidates` is never empty.
    fn choose(
        &self,
        candidates: &[SegmentCandidate],
        request: &PlacementRequest<'_>,
        rng: &mut SplitMix64,
    ) -> usize;
}

/// The available strategies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PlacementKind {
    /// Any segment.
    Random,
    /// The one of two random segments with more free space: almost as even as comparing all of them.
    #[default]
    FreeRatio,
    /// The first replica close to the writer, the others in other zones, racks and hosts.
    Topology,
}

impl PlacementKind {
    /// All strategies.
    pub const ALL: [PlacementKind; 3] =
        [PlacementKind::Random, PlacementKind::FreeRatio, PlacementKind::Topology];

    /// Creates the strategy.
    pub fn strategy(self) -> Box<dyn Placement> {
        match self {
            PlacementKind::Random => Box::new(Random),
            PlacementKind::FreeRatio => Box::new(FreeRatio),
            PlacementKind::Topology => Box::new(TopologyAware),
        }
    }

    /// Returns the name used in configuration files.
    pub fn name(self) -> &'static str {
        match self {
            PlacementKind::Random => "random",
            PlacementKind::FreeRatio => "free-ratio",
            PlacementKind::Topology => "topology",
        }
    }
}

#[derive(Debug)]
struct Random;

impl Placement for Random {
    fn choose(
        &self,
        candidates: &[SegmentCandidate],
        _request: &PlacementRequest<'_>,
        rng: &mut SplitMix64,
    ) -> usize {
        rng.index(candidates.len())
    }
}

#[derive(Debug)]
struct FreeRatio;

impl Placement for FreeRatio {
    fn choose(
        &self,
        candidates: &[SegmentCandidate],
        _request: &PlacementRequest<'_>,
        rng: &mut SplitMix64,
    ) -> usize {
        let (a, b) = (rng.index(candidates.len()), rng.index(candidates.len()));
        if candidates[b].free_ratio() > candidates[a].free_ratio() { b } else { a }
    }
}

#[derive(Debug)]
struct TopologyAware;

impl TopologyAware {
    /// Candidates sampled per choice: with 8 samples, a given third of the cluster is missed in 4 % of the choices.
    const SAMPLES: usize = 8;
}

impl Placement for TopologyAware {
    fn choose(
        &self,
        candidates: &[SegmentCandidate],
        request: &PlacementRequest<'_>,
        rng: &mut SplitMix64,
    ) -> usize {
        // Priorities: distance from the other replicas, then closeness to the writer, then free space.
        let score = |at: usize| {
            let candidate = &candidates[at];
            let apart =
                request.replicas.iter().map(|other| candidate.topology.distance(other.topology)).min();
            let closeness = request.writer.map_or(0, |writer| 3 - candidate.topology.distance(writer));
            (apart.unwrap_or(0), closeness, candidate.free_ratio())
        };
        let mut best = rng.index(candidates.len());
        for _ in 1..Self::SAMPLES {
            let other = rng.index(candidates.len());
            if score(other) > score(best) {
                best = other;
            }
        }
        best
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cluster(nodes: u64) -> Vec<SegmentCandidate> {
        (0..nodes)
            .map(|node| SegmentCandidate {
                index: node as u32,
                node: NodeId(node + 1),
                segment: SegmentId(0),
                topology: Topology {
                    host: node as u32 + 1,
                    rack: node as u32 / 2 + 1,
                    zone: node as u32 / 6 + 1,
                },
                units: 1000,
                free_units: 1000,
            })
            .collect()
    }

    #[test]
    fn free_ratio_placement_fills_segments_evenly() {
        let mut candidates = cluster(12);
        let mut rng = SplitMix64::new(1);
        let request = PlacementRequest { writer: None, replicas: &[] };
        for _ in 0..6_000 {
            let at = FreeRatio.choose(&candidates, &request, &mut rng);
            candidates[at].free_units -= 1;
        }
        let used: Vec<u32> = candidates.iter().map(|c| 1000 - c.free_units).collect();
        assert!(used.iter().all(|&used| (490..=510).contains(&used)), "{used:?}");
    }

    #[test]
    fn first_replica_is_close_to_writer_and_second_in_other_zone() {
        let candidates = cluster(12);
        let mut rng = SplitMix64::new(2);
        let writer = candidates[3].topology;
        let (mut close_hits, mut zone_hits) = (0, 0);
        for _ in 0..300 {
            let first = TopologyAware.choose(
                &candidates,
                &PlacementRequest { writer: Some(writer), replicas: &[] },
                &mut rng,
            );
            close_hits += u32::from(candidates[first].topology.distance(writer) <= 2);
            let replica = ReplicaSite { node: candidates[first].node, topology: candidates[first].topology };
            let request = PlacementRequest { writer: Some(writer), replicas: &[replica] };
            let second = TopologyAware.choose(&candidates, &request, &mut rng);
            zone_hits += u32::from(candidates[second].topology.distance(replica.topology) == 3);
        }
        assert!(close_hits > 290 && zone_hits > 290, "close {close_hits}, other zone {zone_hits} of 300");
    }

    #[test]
    fn sites_are_apart_if_no_known_label_of_the_spread_is_equal() {
        let site = |node: u64, host, rack, zone| ReplicaSite {
            node: NodeId(node),
            topology: Topology { host, rack, zone },
        };
        let one = site(1, 1, 2, 3);
        // Other labels are numbers of other texts, as in a group.
        for (other, apart) in [
            (site(1, 9, 8, 7), [false, false, false, false]),
            (site(2, 1, 2, 3), [true, false, false, false]),
            (site(2, 9, 2, 3), [true, true, false, false]),
            (site(2, 9, 8, 3), [true, true, true, false]),
            (site(2, 9, 8, 7), [true, true, true, true]),
            // A rack of the same name in another zone.
            (site(2, 9, 2, 7), [true, true, false, true]),
            // Unknown labels.
            (site(2, 0, 0, 0), [true, true, true, true]),
            (site(2, 1, 0, 0), [true, false, false, false]),
            (site(2, 9, 0, 0), [true, true, true, true]),
            (site(2, 9, 0, 3), [true, true, true, false]),
        ] {
            let spreads = std::iter::once(None).chain(Spread::ALL.map(Some));
            let found: Vec<bool> = spreads.map(|spread| one.is_apart(&other, spread)).collect();
            assert_eq!(found, apart, "{other:?}");
        }
        assert!(site(1, 0, 0, 0).is_apart(&site(2, 0, 0, 0), Some(Spread::Zone)));
    }

    #[test]
    fn empty_topology_labels_have_maximum_distance() {
        let unknown = Topology::default();
        assert_eq!(unknown.distance(unknown), 3);
        let host = Topology { host: 1, ..unknown };
        assert_eq!(host.distance(host), 0);
    }
}
