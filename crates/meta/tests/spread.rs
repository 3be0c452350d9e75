//! Spread: replicas that their writer wants on different hosts, in different racks or zones are placed so by puts, repairs
//! and drains, or not at all.

mod common;

use std::time::Duration;

use common::{GroupHarness, config, lookup_key, lose_node, memory, reported, session};
use moontide_meta::{DrainMode, GroupConfig, MountSpec, PutOptions, PutStart, ReportRecord, StripeLocation};
use moontide_types::{Epoch, ErrorCode, Extent, Generation, NodeId, SegmentId, SlotId, Spread, Term};

const KIB: u64 = 1024;

/// Nodes with numbers from 1 and these labels: host, rack, zone.
fn labelled(labels: &[[&'static str; 3]]) -> GroupHarness {
    let mut harness = GroupHarness::with(config(1));
    for (number, &labels) in (1..).zip(labels) {
        harness.mount_spec(&MountSpec { labels, ..memory(number, 1000) });
    }
    harness
}

/// Nodes with numbers from 1, in these racks.
fn racks(racks: &[&'static str]) -> GroupHarness {
    labelled(&racks.iter().map(|rack| ["", rack, ""]).collect::<Vec<_>>())
}

fn options(replicas: u8, replicas_min: u8) -> PutOptions {
    PutOptions { replicas, replicas_min, ..PutOptions::default() }
}

/// Puts an object and returns its nodes, sorted.
fn put(
    harness: &mut GroupHarness,
    key: &str,
    options: &PutOptions,
    spread: Spread,
) -> Result<Vec<u64>, ErrorCode> {
    let start = PutStart { spread: Some(spread), ..harness.put_start(key, KIB, options) };
    let epoch = harness.start_put(key, &start)?;
    harness.end(key, epoch).unwrap();
    Ok(nodes_of(harness, key))
}

fn nodes_of(harness: &GroupHarness, key: &str) -> Vec<u64> {
    let mut nodes: Vec<u64> = harness.locations(key).iter().map(|(node, _)| node.0).collect();
    nodes.sort_unstable();
    nodes
}

/// Lets time pass, in seconds, with a tick in each of them.
fn seconds(harness: &mut GroupHarness, seconds: u64) {
    for _ in 0..seconds {
        harness.advance(Duration::from_secs(1));
        harness.tick();
        harness.run_commands();
    }
}

#[test]
fn replicas_of_a_put_share_no_label_of_the_spread() {
    // Hosts 1 and 2, and 3 and 4, are in one rack each; racks r1 and r2, and r3, are in one zone each.
    let mut harness = labelled(&[
        ["h1", "r1", "z1"],
        ["h1", "r1", "z1"],
        ["h2", "r1", "z1"],
        ["h3", "r2", "z1"],
        ["h4", "r3", "z2"],
        ["h5", "r3", "z2"],
    ]);
    for (spread, label, most) in [
        (Spread::Host, &["h1", "h1", "h2", "h3", "h4", "h5"], 5),
        (Spread::Rack, &["r1", "r1", "r1", "r2", "r3", "r3"], 3),
        (Spread::Zone, &["z1", "z1", "z1", "z1", "z2", "z2"], 2),
    ] {
        for n in 0..20 {
            let nodes = put(&mut harness, &format!("{spread}-{n}"), &options(8, 1), spread).unwrap();
            let mut labels: Vec<&str> = nodes.iter().map(|&node| label[node as usize - 1]).collect();
            labels.sort_unstable();
            let different = labels.is_sorted_by(|a, b| a < b);
            assert!(different && labels.len() == most, "spread {spread}: nodes {nodes:?}, labels {labels:?}");
            let key = format!("{spread}-{n}-all");
            assert_eq!(
                put(&mut harness, &key, &options(most as u8, most as u8), spread).unwrap().len(),
                most
            );
        }
        let too_many = options(6, most as u8 + 1);
        assert_eq!(put(&mut harness, "too-many", &too_many, spread), Err(ErrorCode::NoSpace), "{spread}");
    }
    assert_eq!(harness.group.stats().evicted_objects, 0, "an eviction would not help");
}

#[test]
fn unknown_labels_are_equal_to_nothing_but_a_host_has_one_rack() {
    let mut harness = racks(&["", "", "r", "r"]);
    for n in 0..20 {
        let nodes = put(&mut harness, &format!("k{n}"), &options(4, 3), Spread::Rack).unwrap();
        assert!(nodes == [1, 2, 3] || nodes == [1, 2, 4], "{nodes:?}");
    }
    let mut harness = labelled(&[["h", "", ""], ["h", "", ""], ["h", "r", ""], ["i", "", ""]]);
    for n in 0..20 {
        let nodes = put(&mut harness, &format!("k{n}"), &options(4, 2), Spread::Rack).unwrap();
        assert!(nodes.len() == 2 && nodes[1] == 4, "{nodes:?}");
    }
}

#[test]
fn preferred_place_in_the_rack_of_another_replica_is_passed_over() {
    let mut harness = racks(&["a", "a", "b", "b"]);
    let prefer = |nodes: &[u64]| nodes.iter().map(|&node| NodeId(node).into()).collect();
    for n in 0..10 {
        let preferred = PutOptions { preferred: prefer(&[2, 1, 4]), ..options(2, 2) };
        let nodes = put(&mut harness, &format!("k{n}"), &preferred, Spread::Rack).unwrap();
        assert_eq!(nodes, [2, 4]);
        let preferred = PutOptions { preferred: prefer(&[2, 1]), ..options(2, 2) };
        let nodes = put(&mut harness, &format!("other-{n}"), &preferred, Spread::Rack).unwrap();
        assert!(nodes == [2, 3] || nodes == [2, 4], "{nodes:?}");
    }
}

#[test]
fn stripes_of_one_replica_leave_racks_for_the_others() {
    let mut harness = racks(&["a", "a", "b", "b", "c", "c"]);
    for n in 0..10 {
        let key = format!("k{n}");
        let striped = PutOptions { stripes: Some(2), ..options(3, 3) };
        let start = PutStart { spread: Some(Spread::Rack), ..harness.put_start(&key, 512 * KIB, &striped) };
        // A node has space for one of these stripes.
        let started = harness.start_put(&key, &start);
        if n > 0 {
            assert_eq!(started, Err(ErrorCode::NoSpace));
            continue;
        }
        started.unwrap();
        let rack = |node: NodeId| (node.0 - 1) / 2;
        let racks: Vec<u64> = harness.locations(&key).iter().map(|&(node, _)| rack(node)).collect();
        assert_eq!(racks.len(), 6);
        let of_replicas: Vec<&[u64]> = racks.chunks(2).collect();
        assert!(of_replicas.iter().all(|own| own.iter().all(|rack| rack == &own[0])), "{of_replicas:?}");
        let mut firsts: Vec<u64> = of_replicas.iter().map(|own| own[0]).collect();
        firsts.sort_unstable();
        assert_eq!(firsts, [0, 1, 2]);
    }
}

#[test]
fn repair_places_no_replica_in_the_rack_of_another() {
    let mut harness = racks(&["a", "a", "a", "b", "c"]);
    let keys: Vec<String> = (0..30).map(|n| format!("k{n}")).collect();
    for key in &keys {
        let prefer = PutOptions { preferred: vec![NodeId(4).into()], ..options(2, 2) };
        put(&mut harness, key, &prefer, Spread::Rack).unwrap();
    }
    lose_node(&mut harness, 4, 0);
    seconds(&mut harness, 60);
    let on_first_rack = keys.iter().filter(|key| nodes_of(&harness, key)[0] <= 3).count();
    assert!(on_first_rack > 5, "{on_first_rack} of 30 objects have a replica in rack a");
    for key in &keys {
        let nodes = nodes_of(&harness, key);
        assert!(nodes.len() == 2 && nodes[0] <= 3 && nodes[1] == 5, "{key}: {nodes:?}");
    }
    // Without another rack there is no place for a second replica, until one joins.
    lose_node(&mut harness, 5, 0);
    seconds(&mut harness, 60);
    assert!(keys.iter().all(|key| nodes_of(&harness, key).len() == 1));
    harness.mount_spec(&MountSpec { labels: ["", "d", ""], ..memory(6, 1000) });
    seconds(&mut harness, 60);
    assert!(keys.iter().all(|key| nodes_of(&harness, key)[1] == 6));
}

#[test]
fn drain_moves_a_replica_only_to_a_rack_without_one() {
    let mut harness = racks(&["a", "b", "b"]);
    let prefer = PutOptions { preferred: vec![NodeId(1).into(), NodeId(2).into()], ..options(2, 2) };
    assert_eq!(put(&mut harness, "k", &prefer, Spread::Rack), Ok(vec![1, 2]));
    harness.group.drain(NodeId(1), SegmentId(0), DrainMode::Move).unwrap();
    seconds(&mut harness, 5);
    assert_eq!(nodes_of(&harness, "k"), [1, 2], "node 3 is in the rack of node 2");
    harness.group.drain(NodeId(2), SegmentId(0), DrainMode::Move).unwrap();
    seconds(&mut harness, 5);
    assert_eq!(nodes_of(&harness, "k"), [1, 3], "the replica of node 2 may stay in its rack");
    harness.mount_spec(&MountSpec { labels: ["", "c", ""], ..memory(4, 1000) });
    seconds(&mut harness, 5);
    assert_eq!(nodes_of(&harness, "k"), [3, 4]);
}

#[test]
fn next_master_knows_the_spread_from_the_reports() {
    let mut harness = GroupHarness::with(GroupConfig { report_wait: Duration::from_secs(5), ..config(2) });
    let epoch = Epoch::new(Term::new(1).unwrap(), 9).unwrap();
    let mount = |harness: &mut GroupHarness, node, rack, occupied| {
        let term = if occupied { Term::new(1).unwrap() } else { Term::ZERO };
        let labels = ["", rack, ""];
        harness.mount_spec(&MountSpec { labels, term, has_records: occupied, ..memory(node, 1000) });
    };
    for (node, rack) in [(1, "a"), (2, "b")] {
        mount(&mut harness, node, rack, true);
        let extent = Extent { start: 0, units: 3 };
        let record = ReportRecord {
            slot: SlotId(0),
            extent,
            payload_offset: extent.span().offset(),
            extra_replicas: 1,
            spread: Some(Spread::Rack),
            ..reported(&harness, "k", epoch, 0)
        };
        let (now, name, term) = (harness.now, (NodeId(node), SegmentId(0)), Term::new(2).unwrap());
        let generation = Generation(1);
        harness.group.report(now, name, generation, term, 0, [record], &mut harness.effects).unwrap();
        harness.group.report_end(now, name, generation, term, 1, &mut harness.effects).unwrap();
        harness.settle();
    }
    for (node, rack) in [(3, "a"), (4, "a"), (5, "c")] {
        mount(&mut harness, node, rack, false);
    }
    seconds(&mut harness, 10);
    lose_node(&mut harness, 2, 0);
    seconds(&mut harness, 60);
    assert_eq!(nodes_of(&harness, "k"), [1, 5]);
}

/// Lets a node return in its next session, with the record of one object that it had.
fn return_with(
    harness: &mut GroupHarness,
    node: u64,
    rack: &'static str,
    key: &'static str,
    own: StripeLocation,
) {
    let (term, session) = (Term::new(1).unwrap(), session(node, 1));
    let labels = ["", rack, ""];
    harness.mount_spec(&MountSpec { labels, session, term, has_records: true, ..memory(node, 1000) });
    let epoch = harness.group.query(harness.now, &lookup_key(key)).unwrap().epoch;
    let record = ReportRecord {
        extent: own.extent,
        payload_offset: own.extent.span().offset(),
        root: own.root,
        extra_replicas: 1,
        spread: Some(Spread::Rack),
        ..reported(harness, key, epoch, own.slot.0)
    };
    let (now, name) = (harness.now, (NodeId(node), SegmentId(0)));
    harness.group.report(now, name, own.generation, term, 0, [record], &mut harness.effects).unwrap();
    harness.group.report_end(now, name, own.generation, term, 1, &mut harness.effects).unwrap();
    harness.settle();
}

/// Nodes 1, 2 and 3 in racks a, b and b have a replica each of an object that wants two, in two racks: node 2 was away.
fn with_superfluous_replica() -> GroupHarness {
    let mut harness = racks(&["a", "b", "b"]);
    let prefer = PutOptions { preferred: vec![NodeId(1).into(), NodeId(2).into()], ..options(2, 2) };
    assert_eq!(put(&mut harness, "k", &prefer, Spread::Rack), Ok(vec![1, 2]));
    let detail = harness.group.query(harness.now, &lookup_key("k")).unwrap();
    let own = *detail.locations.iter().find(|location| location.node == NodeId(2)).unwrap();
    lose_node(&mut harness, 2, 0);
    // Longer than repairs wait, and less than nodes are awaited.
    seconds(&mut harness, 32);
    assert_eq!(nodes_of(&harness, "k"), [1, 3]);
    return_with(&mut harness, 2, "b", "k", own);
    assert_eq!(nodes_of(&harness, "k"), [1, 2, 3]);
    harness
}

#[test]
fn superfluous_replica_is_released_in_the_rack_that_has_two() {
    let mut harness = with_superfluous_replica();
    seconds(&mut harness, 200);
    let nodes = nodes_of(&harness, "k");
    assert!(nodes == [1, 2] || nodes == [1, 3], "{nodes:?}");
}

#[test]
fn replicas_in_one_rack_are_repaired_as_one() {
    let mut harness = with_superfluous_replica();
    lose_node(&mut harness, 1, 0);
    seconds(&mut harness, 60);
    assert_eq!(nodes_of(&harness, "k"), [2, 3], "there is no other rack");
    assert_eq!(harness.group.objects_lacking_replicas(), 1);
    harness.mount_spec(&MountSpec { labels: ["", "c", ""], ..memory(4, 1000) });
    seconds(&mut harness, 60);
    assert_eq!(nodes_of(&harness, "k"), [2, 3, 4]);
    assert_eq!(harness.group.objects_lacking_replicas(), 0);
}
