//! Graceful shutdown of a node: it unregisters, and reads of objects with another replica are not affected.

use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use moontide_client::PutOptions;
use rustix::process::Signal;

use crate::content::Rng;
use crate::harness::{Cluster, KIB, STEP_TIMEOUT, Shape, sized, until, words};
use crate::readers::{Got, Object, StopAtEnd, Tally, Way, put_all, read, read_until, replicas};

const DRAIN: Duration = Duration::from_secs(3);
/// Time besides the drain: unregistering, joining threads, a busy machine.
const AROUND: Duration = Duration::from_secs(5);

#[test]
fn terminated_node_exits_within_drain_time_and_reads_continue() {
    let mut rng = Rng::seeded();
    let node_words = words(&format!("--drain-timeout {}s", DRAIN.as_secs()));
    let mut cluster = Cluster::start(Shape { node_words, session_ttl_ms: 3000, ..Shape::default() });
    let objects: Vec<Object> =
        (0..sized(80, 1000)).map(|n| Object::new("twice", n, &mut rng, 1..200 * KIB)).collect();
    let single: Vec<Object> = (0..40).map(|n| Object::new("once", n, &mut rng, 1..50 * KIB)).collect();
    let (local, remote) = (cluster.local(), cluster.remote());
    let twice = replicas(2);
    put_all(&remote, &objects, &twice);
    put_all(&remote, &single, &PutOptions { prefer_local: false, ..PutOptions::default() });

    let (stop, tallies) = (AtomicBool::new(false), [Tally::default(), Tally::default()]);
    std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        for (store, tally) in [(&local, &tallies[0]), (&remote, &tallies[1])] {
            let (rng, stop, objects) = (rng.fork(), &stop, &objects);
            scope.spawn(move || read_until(stop, store, objects, rng, &Way::ALL, tally));
        }
        let more = |more: u64, what: &str| {
            let before = tallies.each_ref().map(Tally::right);
            until(what, STEP_TIMEOUT, || {
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
        let signalled = Instant::now();
        until("exit of the node", DRAIN + AROUND, || cluster.nodes[0].ended().is_some());
        println!("exited {:?} after the signal", signalled.elapsed());
        assert_eq!(cluster.nodes[0].ended().unwrap().code(), Some(0));
        more(500, "reads after");
    });
    for (tally, by) in tallies.iter().zip(["local", "remote"]) {
        tally.summary(&format!("gets {by}"));
        assert!(tally.lost().is_empty(), "gets {by} failed: {:?}", tally.lost());
    }
    cluster.wait_for_nodes(2);
    for store in [&local, &remote, &cluster.local(), &cluster.remote()] {
        for object in &objects {
            let got = read(store, Way::Copy, object);
            assert!(matches!(got, Got::Right), "{} {got:?}", object.key);
        }
        for object in &single {
            let got = read(store, Way::Copy, object);
            assert!(!matches!(got, Got::Failed(_)), "{}, which had one replica: {got:?}", object.key);
        }
    }

    // A client that holds objects does not delay the shutdown, and its objects stay readable.
    let held: Vec<_> =
        objects.iter().map(|object| local.get_ref(object.key()).unwrap().unwrap()).take(20).collect();
    assert!(held.iter().any(|held| held.is_zero_copy()));
    cluster.nodes[1].signal(Signal::TERM);
    until("exit of a node whose memory is held", DRAIN + AROUND, || cluster.nodes[1].ended().is_some());
    assert_eq!(cluster.nodes[1].ended().unwrap().code(), Some(0));
    for (object, held) in objects.iter().zip(&held) {
        object.check(held, "held during the node's exit");
    }
    drop(held);
    for object in &objects {
        let got = read(&remote, Way::Copy, object);
        assert!(!matches!(got, Got::Failed(_)), "{} {got:?}", object.key);
    }
    cluster.end();
}
