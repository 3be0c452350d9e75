//! Preferred places: a put tries the nodes and segments that its caller names, in order, before all others.

mod common;

use common::GroupHarness;
use moontide_meta::PutOptions;
use moontide_types::{NodeId, Place, SegmentId, Term};

const KIB: u64 = 1024;

#[test]
fn local_node_and_preferred_places_override_placement() {
    let mut harness = GroupHarness::new(&[1, 2, 3]);
    for n in 0..10 {
        let key = format!("local-{n}");
        let local = PutOptions { local_node: Some(NodeId(2)), ..PutOptions::default() };
        harness.start_with(&key, KIB, &local).unwrap();
        assert_eq!(harness.locations(&key), [(NodeId(2), SegmentId(0))]);
        let key = format!("preferred-{n}");
        let place = Place { node: NodeId(3), segment: Some(SegmentId(0)) };
        let preferred = PutOptions { preferred: vec![place], ..local };
        harness.start_with(&key, KIB, &preferred).unwrap();
        assert_eq!(harness.locations(&key), [(NodeId(3), SegmentId(0))], "preferred places come first");
    }
}

#[test]
fn replicas_take_preferred_places_in_order_and_skip_full_and_absent_ones() {
    let mut harness = GroupHarness::new(&[1, 2, 3, 4, 5]);
    harness.mount(4, 1, Term::ZERO, false);
    let segment = |node, segment| Place { node: NodeId(node), segment: Some(SegmentId(segment)) };
    // Node 9 does not exist, and node 1 has no segment 7.
    let preferred = vec![NodeId(9).into(), segment(4, 1), segment(1, 7), NodeId(2).into(), segment(5, 0)];
    let two = PutOptions { replicas: 2, replicas_min: 2, preferred, ..PutOptions::default() };
    for n in 0..10 {
        harness.start_with(&format!("k{n}"), KIB, &two).unwrap();
        assert_eq!(
            harness.locations(&format!("k{n}")),
            [(NodeId(4), SegmentId(1)), (NodeId(2), SegmentId(0))]
        );
    }
    // Without space in the first place that exists, the next ones are used; without space in all, other nodes are.
    let only = |place: Place| PutOptions { preferred: vec![place], ..PutOptions::default() };
    let fill = |harness: &mut GroupHarness, name: &str, place: Place| {
        let name = |n: usize| format!("{name}-{n}");
        (0..).find(|&n| {
            harness.start_with(&name(n), KIB, &only(place)).unwrap();
            harness.locations(&name(n))[0].0 != place.node
        })
    };
    let filled = fill(&mut harness, "two", NodeId(2).into()).unwrap();
    assert!(filled > 10, "node 2 had space for {filled} objects only");
    harness.start_with("next", KIB, &two).unwrap();
    assert_eq!(harness.locations("next"), [(NodeId(4), SegmentId(1)), (NodeId(5), SegmentId(0))]);
    fill(&mut harness, "five", NodeId(5).into());
    harness.start_with("other", KIB, &two).unwrap();
    let other = harness.locations("other");
    assert_eq!(other[0], (NodeId(4), SegmentId(1)));
    assert!([1, 3].map(NodeId).contains(&other[1].0), "{other:?}");
}
