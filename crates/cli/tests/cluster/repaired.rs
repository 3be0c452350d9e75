//! Objects with two replicas survive the drain of one node and the kill of another, and get their second replica back.

use std::time::{Duration, Instant};

use crate::content::Rng;
use crate::harness::{Cluster, KIB, STEP_TIMEOUT, Shape, sized, until, words};
use crate::readers::{Got, Object, Way, put_all, read, replicas};

/// Time from the loss of a node until its replicas are made again.
const REPAIR_DELAY: Duration = Duration::from_secs(1);

#[test]
fn drain_and_kill_lose_no_object_with_two_replicas_and_all_are_repaired() {
    let mut rng = Rng::seeded();
    let mut cluster = Cluster::start(Shape {
        nodes: 4,
        memory_mib: 512,
        session_ttl_ms: 2000,
        master_words: words(&format!("--repair-delay-ms {}", REPAIR_DELAY.as_millis())),
        ..Shape::default()
    });
    cluster.wait_for_nodes(4);
    let store = cluster.remote();
    let count = sized(200, 2000);
    let twice: Vec<Object> = (0..count).map(|n| Object::new("twice", n, &mut rng, 1..300 * KIB)).collect();
    let once: Vec<Object> = (0..count).map(|n| Object::new("once", n, &mut rng, 1..30 * KIB)).collect();
    put_all(&store, &twice, &replicas(2));
    put_all(&store, &once, &replicas(1));

    let drained = cluster.id(0);
    store.drain_node(drained).unwrap();
    until("the node is empty", 2 * STEP_TIMEOUT, || store.drain_progress(drained).unwrap().is_empty());
    let killed = cluster.id(1);
    let on_killed = |object: &Object| {
        store.stat(object.key()).unwrap().is_some_and(|info| info.stripes.iter().any(|s| s.node == killed))
    };
    let lost: Vec<bool> = once.iter().map(on_killed).collect();
    cluster.nodes[1].kill();
    let killed_at = Instant::now();
    let nodes_of = |object: &Object| {
        let info = store.stat(object.key()).unwrap().unwrap_or_else(|| panic!("{} is lost", object.key));
        let mut nodes: Vec<_> = info.stripes.iter().map(|stripe| stripe.node).collect();
        nodes.sort_unstable();
        nodes
    };
    let mut both = [cluster.id(2), cluster.id(3)];
    both.sort_unstable();
    until("all objects have two replicas again", 3 * STEP_TIMEOUT, || {
        twice.iter().all(|object| nodes_of(object) == both)
    });
    println!("{count} objects had two replicas {:?} after the kill", killed_at.elapsed());
    until("nothing is left to repair", STEP_TIMEOUT, || {
        cluster.master.metrics().master("objects_lacking_replicas") == 0
    });
    let fresh = cluster.remote();
    for object in &twice {
        for way in Way::ALL {
            let got = read(&fresh, way, object);
            assert!(matches!(got, Got::Right), "{} {way:?} {got:?}", object.key);
        }
    }
    for (object, was_on_killed) in once.iter().zip(lost) {
        let got = read(&fresh, Way::Copy, object);
        let right = if was_on_killed { matches!(got, Got::Miss) } else { matches!(got, Got::Right) };
        assert!(right, "{}, on the killed node: {was_on_killed}, {got:?}", object.key);
    }
    // The repaired replicas are as good as the others.
    cluster.nodes[2].kill();
    cluster.nodes[0].kill();
    cluster.wait_for_nodes(1);
    for object in &twice {
        let got = read(&fresh, Way::Copy, object);
        assert!(matches!(got, Got::Right), "{} {got:?}", object.key);
    }
    cluster.end();
}
