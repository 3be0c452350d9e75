//! A node that is killed while it is written to and read from, and comes back under its number.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use moontide_client::{Put, Store};

use crate::content::Rng;
use crate::kit::{Cluster, KIB, SOON, Shape, sized, until};
use crate::readers::{Got, Object, StopAtEnd, Tally, Way, put_all, read, read_until, replicas};

/// Short, and still some times what a busy machine keeps a healthy node from speaking.
const TTL: Duration = Duration::from_millis(2000);
/// From the kill until everybody knows: the session's end, a tick of the master, the clients' next look at the table.
const KNOWN_AFTER: Duration = Duration::from_millis(2000 + 3000);
/// What a call may take beyond that on a busy machine.
const SLOW: Duration = Duration::from_secs(5);

fn shape() -> Shape {
    // More than anybody writes here: nothing is evicted.
    Shape { memory_mib: 1024, session_ttl_ms: TTL.as_millis() as u64, ..Shape::default() }
}

/// A put that was answered with Ok.
struct Done {
    object: Object,
    replicas: u8,
    began: Instant,
}

#[test]
fn puts_go_on_when_a_node_is_killed_and_none_that_was_acknowledged_is_wrong() {
    let mut rng = Rng::seeded();
    let mut cluster = Cluster::start(shape());
    let stores = [cluster.near(), cluster.far(), cluster.near(), cluster.far()];
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
                            assert_eq!(put, Put::Stored, "{}", object.key);
                            tally.note(began, Got::Right);
                            let replicas = options.replicas;
                            done.lock().unwrap().push(Done { object, replicas, began });
                        }
                        Err(error) => tally.note(began, Got::Failed(error)),
                    }
                    // A pace at which the memory does not fill up.
                    std::thread::sleep(Duration::from_millis(2));
                }
            });
        }
        until("puts before the kill", SOON, || count(&|_| true) >= enough);
        cluster.nodes[1].kill();
        let killed_at = Instant::now();
        until("puts after the kill", 2 * SOON, || {
            count(&|done| done.began > killed_at + KNOWN_AFTER) >= enough
        });
        killed_at
    });
    tally.summary("puts");
    let longest = tally.longest();
    assert!(longest < KNOWN_AFTER + SLOW, "a put took {longest:?}, though other nodes had room");
    let late = tally.lost_after(killed_at + KNOWN_AFTER);
    assert!(late.is_empty(), "puts failed after the node's session had ended: {late:?}");

    cluster.wait_for_nodes(2);
    assert_eq!(cluster.master.metrics().master("evicted_objects_total"), 0, "the test has too little memory");
    let mut lost = 0;
    for store in [cluster.near(), cluster.far()] {
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
    comes_back(&mut cluster, &mut rng, &stores);
    cluster.end();
}

/// The node that was killed is started again under its number, takes objects and serves them.
fn comes_back(cluster: &mut Cluster, rng: &mut Rng, stores: &[Store]) {
    let id = cluster.id(1);
    cluster.restart_node(1);
    assert_eq!(cluster.id(1), id);
    cluster.wait_for_nodes(3);
    let objects: Vec<Object> = (0..20).map(|n| Object::new("back", n, rng, 1..300 * KIB)).collect();
    let fresh = cluster.far();
    put_all(&fresh, &objects, &replicas(3));
    for object in &objects {
        let places = fresh.stat(object.key()).unwrap().unwrap().stripes;
        assert!(
            places.iter().any(|place| place.node == id),
            "{} is not on the node that came back",
            object.key
        );
    }
    // Also those who knew it before find it.
    for store in stores.iter().chain([&fresh]) {
        for object in &objects {
            for way in Way::ALL {
                let got = read(store, way, object);
                assert!(matches!(got, Got::Right), "{} {way:?} {got:?}", object.key);
            }
        }
    }
    // Only the others go: what the node holds now is read from it alone.
    cluster.nodes[0].kill();
    cluster.nodes[2].kill();
    cluster.wait_for_nodes(1);
    let served = |cluster: &Cluster| {
        cluster.nodes[1].metrics().sum("moontide_transfer_served_bytes_total", "direction=\"get\"")
    };
    let before = served(cluster);
    let end = Instant::now() + SOON;
    for object in &objects {
        loop {
            match read(&fresh, Way::Copy, object) {
                Got::Right => break,
                got => assert!(Instant::now() < end, "{} {got:?}", object.key),
            }
        }
    }
    assert!(served(cluster) > before, "the node that came back serves");
}

#[test]
fn gets_of_two_replicas_survive_a_node_that_is_killed() {
    let mut rng = Rng::seeded();
    let mut cluster = Cluster::start(shape());
    let objects: Vec<Object> =
        (0..sized(60, 400)).map(|n| Object::new("twice", n, &mut rng, 1..400 * KIB)).collect();
    put_all(&cluster.far(), &objects, &replicas(2));
    let (near, far) = (cluster.near(), cluster.far());
    let (stop, tallies) = (AtomicBool::new(false), [Tally::default(), Tally::default()]);
    let rights = |tallies: &[Tally; 2]| tallies.each_ref().map(Tally::right);
    let enough = sized(300, 3000);
    let killed_at = std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        for (store, tally) in [(&near, &tallies[0]), (&far, &tallies[1])] {
            for _ in 0..2 {
                let (rng, stop, objects) = (rng.fork(), &stop, &objects);
                scope.spawn(move || read_until(stop, store, objects, rng, &Way::ALL, tally));
            }
        }
        until("reads before the kill", SOON, || rights(&tallies).iter().all(|&right| right > enough));
        cluster.nodes[1].kill();
        let killed_at = Instant::now();
        until("the node is known to be gone", 2 * SOON, || killed_at.elapsed() > KNOWN_AFTER);
        let before = rights(&tallies);
        until("reads after the session's end", SOON, || {
            rights(&tallies).iter().zip(before).all(|(&right, before)| right > before + enough)
        });
        killed_at
    });
    for (tally, by) in tallies.iter().zip(["near", "far"]) {
        tally.summary(&format!("gets {by}"));
        let late = tally.lost_after(killed_at + KNOWN_AFTER);
        assert!(late.is_empty(), "gets {by} were lost after the session's end: {late:?}");
        let misses = tally.lost().iter().filter(|lost| lost.why == "a miss").count();
        assert_eq!(misses, 0, "gets {by} of objects with another replica missed");
    }
    // All of them, by those who read through it and by somebody new.
    for store in [&near, &far, &cluster.near(), &cluster.far()] {
        for object in &objects {
            let got = read(store, Way::Copy, object);
            assert!(matches!(got, Got::Right), "{} {got:?}", object.key);
        }
        assert_eq!(store.metrics().stats().corrupt, 0);
    }
    cluster.end();
}
