//! A node that is told to end: it says goodbye, and nobody who has another replica notices.

use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use moontide_client::PutOptions;
use rustix::process::Signal;

use crate::content::Rng;
use crate::kit::{Cluster, KIB, SOON, Shape, sized, until, words};
use crate::readers::{Got, Object, StopAtEnd, Tally, Way, put_all, read, read_until, replicas};

const DRAIN: Duration = Duration::from_secs(3);
/// Around the drain: the goodbye to the master, threads that end, and a machine that is busy.
const AROUND: Duration = Duration::from_secs(5);

#[test]
fn a_node_that_is_told_to_end_ends_in_time_and_readers_go_on() {
    let mut rng = Rng::seeded();
    let node_words = words(&format!("--drain {}s", DRAIN.as_secs()));
    let mut cluster = Cluster::start(Shape { node_words, session_ttl_ms: 3000, ..Shape::default() });
    let objects: Vec<Object> =
        (0..sized(80, 1000)).map(|n| Object::new("twice", n, &mut rng, 1..200 * KIB)).collect();
    let single: Vec<Object> = (0..40).map(|n| Object::new("once", n, &mut rng, 1..50 * KIB)).collect();
    let (near, far) = (cluster.near(), cluster.far());
    let twice = replicas(2);
    put_all(&far, &objects, &twice);
    put_all(&far, &single, &PutOptions { near: false, ..PutOptions::default() });

    let (stop, tallies) = (AtomicBool::new(false), [Tally::default(), Tally::default()]);
    std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        for (store, tally) in [(&near, &tallies[0]), (&far, &tallies[1])] {
            let (rng, stop, objects) = (rng.fork(), &stop, &objects);
            scope.spawn(move || read_until(stop, store, objects, rng, &Way::ALL, tally));
        }
        let more = |more: u64, what: &str| {
            let before = tallies.each_ref().map(Tally::right);
            until(what, SOON, || {
                tallies
                    .each_ref()
                    .map(Tally::right)
                    .iter()
                    .zip(before)
                    .all(|(right, before)| *right > before + more)
            });
        };
        more(200, "reads before");
        cluster.nodes[0].signal(Signal::TERM);
        let told = Instant::now();
        until("the node's end", DRAIN + AROUND, || cluster.nodes[0].ended().is_some());
        println!("ended {:?} after it was told to", told.elapsed());
        assert_eq!(cluster.nodes[0].ended().unwrap().code(), Some(0));
        more(500, "reads after");
    });
    for (tally, by) in tallies.iter().zip(["near", "far"]) {
        tally.summary(&format!("gets {by}"));
        assert!(tally.lost().is_empty(), "gets {by} noticed: {:?}", tally.lost());
    }
    cluster.wait_for_nodes(2);
    for store in [&near, &far, &cluster.near(), &cluster.far()] {
        for object in &objects {
            let got = read(store, Way::Copy, object);
            assert!(matches!(got, Got::Right), "{} {got:?}", object.key);
        }
        for object in &single {
            let got = read(store, Way::Copy, object);
            assert!(!matches!(got, Got::Failed(_)), "{}, which had one replica: {got:?}", object.key);
        }
    }

    // Somebody who does not let go does not keep a node from ending, and keeps what it holds.
    let held: Vec<_> =
        objects.iter().map(|object| near.get_ref(object.key()).unwrap().unwrap()).take(20).collect();
    assert!(held.iter().any(|held| held.is_in_place()));
    cluster.nodes[1].signal(Signal::TERM);
    until("the end of a node whose memory is held", DRAIN + AROUND, || cluster.nodes[1].ended().is_some());
    assert_eq!(cluster.nodes[1].ended().unwrap().code(), Some(0));
    for (object, held) in objects.iter().zip(&held) {
        object.check(held, "held over the node's end");
    }
    drop(held);
    for object in &objects {
        let got = read(&far, Way::Copy, object);
        assert!(!matches!(got, Got::Failed(_)), "{} {got:?}", object.key);
    }
    cluster.end();
}
