//! Many small objects, written by several processes and threads, some removed and some replaced; all are read again.

use std::collections::BTreeSet;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use moontide_client::{PutItem, PutOptions, PutOutcome, Store};

use crate::content::{Rng, check, content};
use crate::harness::{Cluster, Shape, connect, sized, until};

/// Environment variable of a writer process: `master seed first end`.
const ROLE: &str = "MOONTIDE_CLUSTER_WRITER";
const BATCH: usize = 500;

fn key(number: usize) -> String {
    format!("many-{number:06}")
}

/// Content and length of an object, as first written or as replaced.
fn seed_and_len(seed: u64, number: usize, replaced: bool) -> (u64, usize) {
    let mut rng = Rng::new(seed ^ (number as u64) << 1 ^ u64::from(replaced));
    (rng.draw(), rng.within(1024, 4097))
}

fn is_removed(number: usize) -> bool {
    number % 10 == 3
}

fn is_replaced(number: usize) -> bool {
    number % 10 == 7
}

/// Writes a share of the objects, removes some and replaces others.
fn write(store: &Store, seed: u64, numbers: std::ops::Range<usize>) {
    let put = |numbers: &[usize], replaced: bool| {
        let options = PutOptions { upsert: replaced, ..PutOptions::default() };
        let objects: Vec<(String, Vec<u8>)> = numbers
            .iter()
            .map(|&number| {
                let (seed, len) = seed_and_len(seed, number, replaced);
                (key(number), content(seed, len))
            })
            .collect();
        let parts: Vec<[&[u8]; 1]> = objects.iter().map(|(_, value)| [&value[..]]).collect();
        let items: Vec<PutItem<'_>> = objects
            .iter()
            .zip(&parts)
            .map(|((key, _), parts)| PutItem { key: key.as_bytes(), parts })
            .collect();
        for (outcome, (key, _)) in store.put_batch(&items, &options).into_iter().zip(&objects) {
            assert_eq!(outcome.unwrap_or_else(|error| panic!("{key}: {error}")), PutOutcome::Stored, "{key}");
        }
    };
    let all: Vec<usize> = numbers.collect();
    for part in all.chunks(BATCH) {
        put(part, false);
        let replaced: Vec<usize> = part.iter().copied().filter(|&number| is_replaced(number)).collect();
        put(&replaced, true);
        let removed: Vec<String> =
            part.iter().copied().filter(|&number| is_removed(number)).map(key).collect();
        let removed: Vec<&[u8]> = removed.iter().map(String::as_bytes).collect();
        for outcome in store.remove_batch(&removed, false) {
            assert!(outcome.expect("a removal"), "a removed object did not exist");
        }
    }
}

/// Reads all keys; checks every byte of existing objects, and that removed ones are missing.
fn verify(store: &Store, seed: u64, total: usize) {
    let all: Vec<usize> = (0..total).collect();
    for part in all.chunks(BATCH) {
        let keys: Vec<String> = part.iter().copied().map(key).collect();
        let keys: Vec<&[u8]> = keys.iter().map(String::as_bytes).collect();
        for (&number, got) in part.iter().zip(store.get_batch(&keys)) {
            let got = got.unwrap_or_else(|error| panic!("{}: {error}", key(number)));
            if is_removed(number) {
                assert!(got.is_none(), "{} was removed", key(number));
                continue;
            }
            let (seed, len) = seed_and_len(seed, number, is_replaced(number));
            let got = got.unwrap_or_else(|| panic!("{} is missing", key(number)));
            check(seed, len, &got, &key(number));
        }
    }
}

/// Runs a writer process: one thread writes half of its share over shared memory, another half over TCP.
fn be_writer(role: &str) {
    let words: Vec<&str> = role.split(' ').collect();
    let &[master, seed, first, end] = &words[..] else { panic!("no role {role:?}") };
    let (seed, first, end): (u64, usize, usize) =
        (seed.parse().unwrap(), first.parse().unwrap(), end.parse().unwrap());
    let config = moontide_client::StoreConfig {
        timeout: crate::harness::CALL,
        ..moontide_client::StoreConfig::new(master)
    };
    let remote = connect(moontide_client::StoreConfig { shm: false, ..config.clone() });
    let local = connect(config);
    let middle = first + (end - first) / 2;
    std::thread::scope(|scope| {
        scope.spawn(|| write(&local, seed, first..middle));
        scope.spawn(|| write(&remote, seed, middle..end));
    });
}

#[test]
fn hundred_thousand_keys_return_last_written_value() {
    if let Ok(role) = std::env::var(ROLE) {
        return be_writer(&role);
    }
    let seed = Rng::seeded().draw();
    let total = sized(100_000, 400_000);
    let cluster = Cluster::start(Shape {
        memory_mib: sized(512, 1536),
        node_words: crate::harness::words("--bytes-per-slot 2048"),
        ..Shape::default()
    });
    let began = Instant::now();
    let writers = 2;
    let mut children: Vec<_> = (0..writers)
        .map(|writer| {
            let (first, end) = (total * writer / writers, total * (writer + 1) / writers);
            let me = std::env::current_exe().expect("a path to this test");
            Command::new(me)
                .args(["--exact", "many::hundred_thousand_keys_return_last_written_value", "--nocapture"])
                .env(ROLE, format!("{} {seed} {first} {end}", cluster.grpc()))
                .stdout(Stdio::null())
                .spawn()
                .expect("this test starts")
        })
        .collect();
    until("end of the writers", Duration::from_secs(sized(120, 600)), || {
        children.iter_mut().all(|child| child.try_wait().expect("our child").is_some())
    });
    for child in &mut children {
        assert!(child.wait().expect("our child").success(), "a writer failed");
    }
    let written = began.elapsed();
    let page = cluster.master.metrics();
    assert_eq!(page.master("evicted_objects_total"), 0, "the test has too little memory");
    assert_eq!(page.master("objects"), (total - total / 10) as u64);
    let (local, remote) = (cluster.local(), cluster.remote());
    std::thread::scope(|scope| {
        scope.spawn(|| verify(&local, seed, total));
        scope.spawn(|| verify(&remote, seed, total));
    });
    println!("{total} keys written in {written:?}, all read twice in {:?}", began.elapsed() - written);
    for (store, stats) in [(&local, local.metrics().stats()), (&remote, remote.metrics().stats())] {
        let missed = total as u64 / 10;
        assert_eq!((stats.gets, stats.misses), (total as u64, missed), "{store:?}: {stats:?}");
        assert_eq!((stats.gets_failed, stats.corrupt), (0, 0), "{stats:?}");
    }
    assert_eq!(local.metrics().stats().hits_local, (total - total / 10) as u64);

    let (mut listed, mut cursor) = (BTreeSet::new(), Vec::new());
    loop {
        let page = remote.list(b"many-", &cursor, 4096).unwrap();
        listed.extend(page.keys);
        cursor = page.next;
        if cursor.is_empty() {
            break;
        }
    }
    let expected: BTreeSet<Vec<u8>> =
        (0..total).filter(|&number| !is_removed(number)).map(|number| key(number).into_bytes()).collect();
    assert!(listed == expected, "{} keys listed, {} expected", listed.len(), expected.len());
    drop((local, remote));
    cluster.check_accounting();
    cluster.end();
}
