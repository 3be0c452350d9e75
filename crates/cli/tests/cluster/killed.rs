//! A node is killed during writes and reads, and restarted with its id.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use moontide_client::{PutOutcome, Store};

use crate::content::Rng;
use crate::harness::{Cluster, KIB, STEP_TIMEOUT, Shape, sized, until};
use crate::readers::{Got, Object, StopAtEnd, Tally, Way, put_all, read, read_until, replicas};

/// Short, but several times the delay of a healthy node's heartbeats on a busy machine.
const TTL: Duration = Duration::from_millis(2000);
/// From the kill until the clients know: session expiry, a tick of the master, the clients' next poll of the map.
const KNOWN_AFTER: Duration = Duration::from_millis(2000 + 3000);
/// Tolerance for calls on a busy machine.
const SLOW: Duration = Duration::from_secs(5);

fn shape() -> Shape {
    // More than the tests write, so that nothing is evicted.
    Shape { memory_mib: 1024, session_ttl_ms: TTL.as_millis() as u64, ..Shape::default() }
}

/// An acknowledged put.
struct Done {
    object: Object,
    replicas: u8,
    began: Instant,
}

#[test]
fn puts_continue_after_node_kill_and_acknowledged_ones_are_correct() {
    let mut rng = Rng::seeded();
    let mut cluster = Cluster::start(shape());
    let stores = [cluster.local(), cluster.remote(), cluster.local(), cluster.remote()];
    let (stop, tally, done) = (AtomicBool::new(false), Tally::default(), Mutex::new(Vec::<Done>::new()));
    let count = |test: &dyn Fn(&Done) -> bool| done.lock().unwrap().iter().filter(|done| test(done)).count();
    let enough = sized(150, 1000);
    let killed_at = std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        for (writer, store) in stores.iter().enumerate() {
            let (mut rng, stop, tally, done) = (rng.fork(), &stop, &tally, &done);
            scope.spawn(move || {
                for number in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let object = Object::new(&format!("w{writer}"), number, &mut rng, 1..32 * KIB);
                    let options = replicas(if number % 2 == 0 { 2 } else { 1 });
                    let began = Instant::now();
                    match object.put(store, &options) {
                        Ok(put) => {
                            assert_eq!(put, PutOutcome::Stored, "{}", object.key);
                            tally.note(began, Got::Right);
                            let replicas = options.replicas;
                            done.lock().unwrap().push(Done { object, replicas, began });
                        }
                        Err(error) => tally.note(began, Got::Failed(error)),
                    }
                    // Limits the rate so that memory does not fill up.
                    std::thread::sleep(Duration::from_millis(2));
                }
            });
        }
        until("puts before the kill", STEP_TIMEOUT, || count(&|_| true) >= enough);
        cluster.nodes[1].kill();
        let killed_at = Instant::now();
        until("puts after the kill", 2 * STEP_TIMEOUT, || {
            count(&|done| done.began > killed_at + KNOWN_AFTER) >= enough
        });
        killed_at
    });
    tally.summary("puts");
    let longest = tally.longest();
    assert!(longest < KNOWN_AFTER + SLOW, "a put took {longest:?} although other nodes had space");
    let late = tally.lost_after(killed_at + KNOWN_AFTER);
    assert!(late.is_empty(), "puts failed after the node's session had ended: {late:?}");

    cluster.wait_for_nodes(2);
    assert_eq!(cluster.master.metrics().master("evicted_objects_total"), 0, "the test has too little memory");
    let mut lost = 0;
    for store in [cluster.local(), cluster.remote()] {
        for Done { object, replicas, began } in done.lock().unwrap().iter() {
            match read(&store, Way::Copy, object) {
                Got::Right => {}
                got if *replicas == 1 && *began < killed_at + KNOWN_AFTER => {
                    assert!(matches!(got, Got::Miss), "{} after the session's end: {got:?}", object.key);
                    lost += 1;
                }
                got => panic!("{}, stored with {replicas} replicas, {got:?}", object.key),
            }
        }
        assert_eq!(store.metrics().stats().corrupt, 0);
    }
    println!("{} puts acknowledged, {lost} reads of single replicas missed", done.lock().unwrap().len());
    check_rejoin(&mut cluster, &mut rng, &stores);
    cluster.end();
}

/// Restarts the killed node with its id, and checks that it accepts and serves objects.
fn check_rejoin(cluster: &mut Cluster, rng: &mut Rng, stores: &[Store]) {
    let id = cluster.id(1);
    cluster.restart_node(1);
    assert_eq!(cluster.id(1), id);
    cluster.wait_for_nodes(3);
    let objects: Vec<Object> = (0..20).map(|n| Object::new("back", n, rng, 1..300 * KIB)).collect();
    let fresh = cluster.remote();
    put_all(&fresh, &objects, &replicas(3));
    for object in &objects {
        let stripes = fresh.stat(object.key()).unwrap().unwrap().stripes;
        assert!(
            stripes.iter().any(|stripe| stripe.node == id),
            "{} is not on the restarted node",
            object.key
        );
    }
    // Clients that used it before the kill find it, too.
    for store in stores.iter().chain([&fresh]) {
        for object in &objects {
            for way in Way::ALL {
                let got = read(store, way, object);
                assert!(matches!(got, Got::Right), "{} {way:?} {got:?}", object.key);
            }
        }
    }
    // Kills the others, so that only the restarted node can serve its objects.
    cluster.nodes[0].kill();
    cluster.nodes[2].kill();
    cluster.wait_for_nodes(1);
    let served = |cluster: &Cluster| {
        cluster.nodes[1].metrics().sum("moontide_transfer_served_bytes_total", "direction=\"get\"")
    };
    let before = served(cluster);
    let end = Instant::now() + STEP_TIMEOUT;
    for object in &objects {
        loop {
            match read(&fresh, Way::Copy, object) {
                Got::Right => break,
                got => assert!(Instant::now() < end, "{} {got:?}", object.key),
            }
        }
    }
    assert!(served(cluster) > before, "the restarted node served nothing");
}

#[test]
fn gets_of_two_replicas_survive_node_kill() {
    let mut rng = Rng::seeded();
    let mut cluster = Cluster::start(shape());
    let objects: Vec<Object> =
        (0..sized(60, 400)).map(|n| Object::new("twice", n, &mut rng, 1..400 * KIB)).collect();
    put_all(&cluster.remote(), &objects, &replicas(2));
    let (local, remote) = (cluster.local(), cluster.remote());
    let (stop, tallies) = (AtomicBool::new(false), [Tally::default(), Tally::default()]);
    let rights = |tallies: &[Tally; 2]| tallies.each_ref().map(Tally::right);
    let enough = sized(300, 3000);
    let killed_at = std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        for (store, tally) in [(&local, &tallies[0]), (&remote, &tallies[1])] {
            for _ in 0..2 {
                let (rng, stop, objects) = (rng.fork(), &stop, &objects);
                scope.spawn(move || read_until(stop, store, objects, rng, &Way::ALL, tally));
            }
        }
        until("reads before the kill", STEP_TIMEOUT, || rights(&tallies).iter().all(|&right| right > enough));
        cluster.nodes[1].kill();
        let killed_at = Instant::now();
        until("the clients know of the kill", 2 * STEP_TIMEOUT, || killed_at.elapsed() > KNOWN_AFTER);
        let before = rights(&tallies);
        until("reads after the session's end", STEP_TIMEOUT, || {
            rights(&tallies).iter().zip(before).all(|(&right, before)| right > before + enough)
        });
        killed_at
    });
    for (tally, by) in tallies.iter().zip(["local", "remote"]) {
        tally.summary(&format!("gets {by}"));
        let late = tally.lost_after(killed_at + KNOWN_AFTER);
        assert!(late.is_empty(), "gets {by} were lost after the session's end: {late:?}");
        let misses = tally.lost().iter().filter(|lost| lost.reason == "a miss").count();
        assert_eq!(misses, 0, "gets {by} of objects with another replica missed");
    }
    // All objects, by clients from before the kill and by new ones.
    for store in [&local, &remote, &cluster.local(), &cluster.remote()] {
        for object in &objects {
            let got = read(store, Way::Copy, object);
            assert!(matches!(got, Got::Right), "{} {got:?}", object.key);
        }
        assert_eq!(store.metrics().stats().corrupt, 0);
    }
    cluster.end();
}
