//! A master that is killed and started again, while readers go on.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use moontide_client::{Put, PutOptions};
use moontide_types::ErrorCode;

use crate::content::Rng;
use crate::kit::{Cluster, KIB, SOON, Shape, sized, until};
use crate::readers::{Got, Object, StopAtEnd, Tally, Way, put_all, read, read_until, replicas};

#[test]
fn a_master_that_was_killed_learns_everything_again() {
    let mut rng = Rng::seeded();
    let mut cluster = Cluster::start(Shape { session_ttl_ms: 3000, ..Shape::default() });
    let objects: Vec<Object> =
        (0..sized(200, 5000)).map(|n| Object::new("kept", n, &mut rng, 0..100 * KIB)).collect();
    let (near, far) = (cluster.near(), cluster.far());
    let half = objects.len() / 2;
    put_all(&near, &objects[..half], &PutOptions::default());
    put_all(&far, &objects[half..], &replicas(2));
    let removed = Object::new("removed", 0, &mut rng, KIB..2 * KIB);
    put_all(&far, std::slice::from_ref(&removed), &PutOptions::default());
    assert!(far.remove(removed.key(), false).unwrap());
    let term = cluster.master.metrics().master("role_term");

    let (stop, in_place) = (AtomicBool::new(false), AtomicU64::new(0));
    let [near_tally, far_tally] = [Tally::default(), Tally::default()];
    let found_again = std::thread::scope(|scope| {
        let _stop = StopAtEnd(&stop);
        let (mut near_rng, far_rng) = (rng.fork(), rng.fork());
        let (stop, objects, near, in_place, tally) = (&stop, &objects, &near, &in_place, &near_tally);
        scope.spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                let object = &objects[near_rng.within(0, objects.len())];
                let began = Instant::now();
                match near.get_ref(object.key()) {
                    Ok(Some(held)) => {
                        object.check(&held, "in place");
                        in_place.fetch_add(held.is_in_place().into(), Ordering::Relaxed);
                        tally.note(began, Got::Right);
                    }
                    Ok(None) => tally.note(began, Got::Miss),
                    Err(error) => tally.note(began, Got::Failed(error)),
                }
            }
        });
        let (far, tally) = (&far, &far_tally);
        scope.spawn(move || read_until(stop, far, objects, far_rng, &Way::ALL, tally));

        let read_in_place = |more: u64, what: &str| {
            let before = in_place.load(Ordering::Relaxed);
            until(what, SOON, || in_place.load(Ordering::Relaxed) > before + more);
        };
        read_in_place(200, "reads in place before");
        cluster.master.kill();
        read_in_place(sized(2000, 100_000), "reads in place without a master");
        cluster.restart_master();
        let restarted = Instant::now();
        cluster.wait_for_nodes(3);
        let fresh = cluster.far();
        for object in &objects[..] {
            let end = restarted + SOON;
            loop {
                match read(&fresh, Way::Copy, object) {
                    Got::Right => break,
                    got => assert!(Instant::now() < end, "{} is not found again: {got:?}", object.key),
                }
            }
        }
        println!("everything was found again {:?} after the restart", restarted.elapsed());
        let found_again = Instant::now();
        read_in_place(200, "reads in place after");
        let before = far_tally.right();
        until("far reads after", SOON, || far_tally.right() > before + 200);
        found_again
    });
    near_tally.summary("gets near");
    far_tally.summary("gets far");
    assert!(near_tally.lost().is_empty(), "reads in place need no master: {:?}", near_tally.lost());
    let late = far_tally.lost_after(found_again + Duration::from_secs(1));
    assert!(late.is_empty(), "far reads failed after everything was found again: {late:?}");

    assert!(cluster.master.metrics().master("role_term") > term, "the new master has a higher term");
    // Everybody who was there before goes on: reads, replaces, removes, writes.
    for store in [&near, &far, &cluster.near()] {
        for object in &objects {
            let got = read(store, Way::Copy, object);
            assert!(matches!(got, Got::Right), "{} {got:?}", object.key);
        }
        assert!(store.get(removed.key()).unwrap().is_none(), "what was removed stays so");
    }
    for (store, object) in [&near, &far].into_iter().zip(&objects) {
        let replaced = Object { seed: rng.draw(), len: 5000, key: object.key.clone() };
        let options = PutOptions { upsert: true, ..PutOptions::default() };
        assert_eq!(replaced.put(store, &options).unwrap(), Put::Stored);
        for store in [&near, &far] {
            let got = read(store, Way::Copy, &replaced);
            assert!(matches!(got, Got::Right), "{} {got:?}", replaced.key);
        }
        // Whether a node that has not come back holds it, too, is not known yet: then the removal is pending.
        let removal = store.remove(object.key(), true);
        assert!(
            removal.as_ref().map_or_else(|error| error.code() == ErrorCode::Pending, |there| *there),
            "{removal:?}"
        );
        for store in [&near, &far] {
            assert!(store.get(object.key()).unwrap().is_none(), "{} was removed", object.key);
        }
    }
    drop((near, far));
    cluster.check_books();
    cluster.end();
}
