//! Every call of the store, near by mapped memory and far over TCP, and of the store for tasks.

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use moontide_client::{AsyncStore, GetInto, Put, PutItem, PutOptions, Store, StoreConfig};
use moontide_types::{ErrorCode, NodeId};

use crate::content::{Rng, check, content};
use crate::kit::{Cluster, KIB, MIB, SOON, Shape, connect, is_full, sized, until};
use crate::readers::replicas;

/// Lengths around every boundary, and long ones.
fn lengths() -> Vec<usize> {
    let mut lengths =
        vec![0, 1, 511, 4095, 4096, 4097, 64 * KIB, 256 * KIB - 1, 256 * KIB, 256 * KIB + 1, 1_000_003];
    lengths.extend([16 * MIB + 5, 64 * MIB]);
    if is_full() {
        lengths.push(1024 * MIB);
    }
    lengths
}

fn nodes_of<'a>(stripes: impl IntoIterator<Item = &'a moontide_client::StripePlace>) -> BTreeSet<NodeId> {
    stripes.into_iter().map(|stripe| stripe.node).collect()
}

#[test]
fn what_was_put_is_got_by_every_call_near_and_far() {
    let mut rng = Rng::seeded();
    let memory_mib = sized(512, 4096);
    let cluster = Cluster::start(Shape { memory_mib, groups: sized(2, 1), ..Shape::default() });
    let patient = StoreConfig { deadline: Duration::from_secs(sized(20, 120)), ..cluster.config() };
    let stores =
        [("near", connect(patient.clone())), ("far", connect(StoreConfig { local: false, ..patient }))];
    assert_eq!(stores[0].1.nodes().unwrap().len(), 3);
    for (by, writer) in &stores {
        for len in lengths() {
            let key = format!("{by}-{len}");
            let key = key.as_bytes();
            let seed = rng.draw();
            let value = content(seed, len);
            assert_eq!(writer.put(key, &value).unwrap(), Put::Stored, "{by}-{len}");
            assert_eq!(writer.put(key, b"other").unwrap(), Put::Existed, "{by}-{len}");
            for (reads, store) in &stores {
                every_read(store, key, seed, &value, &format!("{by}-{len} read {reads}"), *reads == "near");
            }
            if len >= 64 * MIB {
                // Room for the others.
                assert!(writer.remove(key, false).unwrap());
            }
        }
    }
    let (near, far) = (&stores[0].1, &stores[1].1);
    assert_eq!(far.touch(&[b"near-1", b"nobody"]).unwrap(), [true, false]);
    assert_eq!(near.exists_batch(&[b"near-1", b"nobody"]).unwrap(), [true, false]);
    for (_, store) in &stores {
        assert!(store.get(b"nobody").unwrap().is_none());
        assert!(store.get_ref(b"nobody").unwrap().is_none());
        assert!(store.get_into(b"nobody", &mut [0; 8]).unwrap().is_none());
        assert!(store.get_range(b"nobody", 0, &mut [0; 8]).unwrap().is_none());
        assert!(store.get_location(b"nobody").unwrap().is_none());
        assert!(store.stat(b"nobody").unwrap().is_none());
        assert!(!store.remove(b"nobody", false).unwrap());
        assert_eq!(store.get(b"").unwrap_err().code(), ErrorCode::InvalidArgument);
    }
    // A removal is seen by everybody at once, also by those who remember where the object was.
    assert!(near.remove(b"far-262145", false).unwrap());
    assert!(far.remove(b"near-262145", true).unwrap());
    for (_, store) in &stores {
        for key in [b"far-262145".as_slice(), b"near-262145"] {
            assert!(store.get(key).unwrap().is_none());
            assert!(store.get_ref(key).unwrap().is_none());
            assert!(!store.exists(key).unwrap());
        }
        assert_eq!(store.metrics().stats().corrupt, 0);
    }
    assert_eq!(far.metrics().stats().hits_local, 0);
    drop(stores);
    cluster.check_books();
    cluster.end();
}

fn every_read(store: &Store, key: &[u8], seed: u64, value: &[u8], what: &str, near: bool) {
    let len = value.len();
    check(seed, len, &store.get(key).unwrap().unwrap(), what);
    let location = store.get_location(key).unwrap().unwrap();
    assert_eq!(location.len, len as u64, "{what}");
    let held = store.get_ref(key).unwrap().unwrap();
    check(seed, len, &held, what);
    assert!(held.verify(), "{what}");
    assert_eq!(held.is_in_place(), near && location.stripes.len() == 1, "{what}");
    drop(held);
    let mut into = vec![0xee; len + 10];
    assert_eq!(store.get_into(key, &mut into).unwrap(), Some(len), "{what}");
    check(seed, len, &into[..len], what);
    assert!(into[len..].iter().all(|&byte| byte == 0xee), "{what}: behind the object");
    if len > 0 {
        let error = store.get_into(key, &mut into[..len - 1]).unwrap_err();
        assert_eq!(error.code(), ErrorCode::InvalidArgument, "{what}");
    }
    for (offset, wanted) in [(0, len.min(MIB)), (len / 2, len / 2), (len / 3, 100), (len, 5)] {
        let mut part = vec![0; wanted];
        let got = store.get_range(key, offset as u64, &mut part).unwrap().unwrap();
        let end = len.min(offset + wanted);
        assert!(part[..got] == value[offset..end], "{what}: {wanted} from {offset}");
    }
    assert!(store.exists(key).unwrap(), "{what}");
    let info = store.stat(key).unwrap().unwrap();
    assert_eq!((info.len, info.epoch, info.writing), (len as u64, location.epoch, false), "{what}");
}

#[test]
fn batches_plans_lists_and_jobs_do_what_they_say() {
    let mut rng = Rng::seeded();
    let cluster = Cluster::start(Shape::default());
    for (by, store) in [("near", cluster.near()), ("far", cluster.far())] {
        let objects: Vec<(String, u64, usize)> =
            (0..500).map(|n| (format!("{by}-{n}"), rng.draw(), rng.within(0, 20_000))).collect();
        let values: Vec<Vec<u8>> = objects.iter().map(|(_, seed, len)| content(*seed, *len)).collect();
        let parts: Vec<[&[u8]; 2]> = values
            .iter()
            .map(|value| {
                let (front, back) = value.split_at(value.len() / 3);
                [front, back]
            })
            .collect();
        let items: Vec<PutItem<'_>> = objects
            .iter()
            .zip(&parts)
            .map(|((key, ..), parts)| PutItem { key: key.as_bytes(), parts })
            .collect();
        for (expected, again) in [(Put::Stored, "first"), (Put::Existed, "second")] {
            for outcome in store.put_batch(&items, &PutOptions::default()) {
                assert_eq!(outcome.unwrap(), expected, "the {again} time");
            }
        }
        let mut keys: Vec<&[u8]> = objects.iter().map(|(key, ..)| key.as_bytes()).collect();
        keys.push(b"nobody");
        let got = store.get_batch(&keys);
        for ((key, seed, len), got) in objects.iter().zip(&got) {
            check(*seed, *len, got.as_ref().unwrap().as_ref().unwrap(), key);
        }
        assert!(got.last().unwrap().as_ref().unwrap().is_none());
        let mut spaces = vec![vec![0; 20_000]; keys.len()];
        let mut wants: Vec<GetInto<'_>> =
            keys.iter().zip(&mut spaces).map(|(key, into)| GetInto { key, into }).collect();
        let lens = store.get_batch_into(&mut wants);
        for (((key, seed, len), got), space) in objects.iter().zip(&lens).zip(&spaces) {
            assert_eq!(*got.as_ref().unwrap(), Some(*len), "{key}");
            check(*seed, *len, &space[..*len], key);
        }
        assert!(lens.last().unwrap().as_ref().unwrap().is_none());

        // Pages of keys, none twice and none left out.
        let (mut listed, mut cursor) = (BTreeSet::new(), Vec::new());
        loop {
            let page = store.list(format!("{by}-").as_bytes(), &cursor, 64).unwrap();
            for key in page.keys {
                assert!(listed.insert(key.clone()), "{} is listed twice", String::from_utf8_lossy(&key));
            }
            cursor = page.next;
            if cursor.is_empty() {
                break;
            }
        }
        let expected: BTreeSet<Vec<u8>> = objects.iter().map(|(key, ..)| key.clone().into_bytes()).collect();
        assert!(listed == expected, "{} keys listed, {} expected", listed.len(), expected.len());

        let removed = store.remove_batch(&keys[..100], false);
        assert!(removed.iter().all(|removed| *removed.as_ref().unwrap()));
        assert!(store.get_batch(&keys[..100]).iter().all(|got| got.as_ref().unwrap().is_none()));
        let job = store.remove_by_prefix(format!("{by}-").as_bytes(), true).unwrap();
        until("the job's end", SOON, || {
            let page = store.list(format!("{by}-").as_bytes(), &[], 1).unwrap();
            page.keys.is_empty() && cluster.master.page(&format!("/jobs/{job}")).contains("\"done\"")
        });
        // Done is said when the index knows of none; nodes follow within moments.
        until("nobody reads what the job removed", SOON, || {
            store.get_batch(&keys).iter().all(|got| got.as_ref().unwrap().is_none())
        });

        plans(&store, by, rng.draw());
    }
    cluster.check_books();
    cluster.end();
}

fn plans(store: &Store, by: &str, seed: u64) {
    let len = 700_000;
    let value = content(seed, len);
    let key = format!("plan-{by}");
    let mut plan = store.open_for_write(key.as_bytes(), len as u64, &PutOptions::default()).unwrap();
    assert_eq!((plan.stripes().len(), plan.object_len()), (1, len as u64));
    plan.write(&[&value[..100], &value[100..]]).unwrap();
    assert!(store.get(key.as_bytes()).unwrap().is_none(), "not readable yet");
    let epoch = plan.epoch();
    assert_eq!(plan.commit(epoch).unwrap(), Put::Stored);
    check(seed, len, &store.get(key.as_bytes()).unwrap().unwrap(), &key);

    let key = format!("given-up-{by}");
    let plan = store.open_for_write(key.as_bytes(), 100, &PutOptions::default()).unwrap();
    plan.abort();
    until("the reservation is given back", SOON, || store.stat(key.as_bytes()).unwrap().is_none());
    assert_eq!(store.put(key.as_bytes(), b"another").unwrap(), Put::Stored);
    assert!(store.remove(key.as_bytes(), true).unwrap());
}

#[test]
fn replicas_and_stripes_lie_on_different_nodes() {
    let mut rng = Rng::seeded();
    let cluster = Cluster::start(Shape::default());
    let all: BTreeSet<NodeId> = cluster.ids().into_iter().collect();
    let stores = [("near", cluster.near()), ("far", cluster.far())];
    for (by, store) in &stores {
        for len in [1, 5000, 9 * MIB] {
            let (key, seed) = (format!("replicas-{by}-{len}"), rng.draw());
            let options = replicas(3);
            assert_eq!(
                store.put_with(key.as_bytes(), &[&content(seed, len)], &options).unwrap(),
                Put::Stored
            );
            let places = store.stat(key.as_bytes()).unwrap().unwrap().stripes;
            assert_eq!((places.len(), nodes_of(&places)), (3, all.clone()), "{key}");
            for (_, store) in &stores {
                check(seed, len, &store.get(key.as_bytes()).unwrap().unwrap(), &key);
            }
        }
        let (key, seed, len) = (format!("stripes-{by}"), rng.draw(), 9 * MIB + 77);
        // Memory of this host is not preferred: it would take all three.
        let options = PutOptions { stripes: Some(3), near: false, ..PutOptions::default() };
        assert_eq!(store.put_with(key.as_bytes(), &[&content(seed, len)], &options).unwrap(), Put::Stored);
        let places = store.stat(key.as_bytes()).unwrap().unwrap().stripes;
        assert_eq!(places.len(), 3, "{key}");
        assert_eq!(nodes_of(&places), all, "{key}");
        for (reads, store) in &stores {
            let what = format!("{key} read {reads}");
            every_read(store, key.as_bytes(), seed, &content(seed, len), &what, false);
        }
        // Another object takes its place.
        let options = PutOptions { upsert: true, replicas: 2, ..PutOptions::default() };
        let seed = rng.draw();
        assert_eq!(store.put_with(key.as_bytes(), &[&content(seed, 999)], &options).unwrap(), Put::Stored);
        for (reads, store) in &stores {
            let what = format!("{key} replaced, read {reads}");
            check(seed, 999, &store.get(key.as_bytes()).unwrap().unwrap(), &what);
            check(seed, 999, &store.get_ref(key.as_bytes()).unwrap().unwrap(), &what);
        }
    }
    drop(stores);
    cluster.check_books();
    cluster.end();
}

#[test]
fn tasks_have_the_same_calls() {
    let mut rng = Rng::seeded();
    let cluster = Cluster::start(Shape::default());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    for local in [true, false] {
        let config = StoreConfig { local, ..cluster.config() };
        let by = if local { "near" } else { "far" };
        let seeds: Vec<u64> = (0..lengths().len()).map(|_| rng.draw()).collect();
        runtime.block_on(async {
            let store = AsyncStore::connect(config).await.unwrap();
            for (len, &seed) in lengths().into_iter().zip(&seeds).filter(|(len, _)| *len <= 16 * MIB + 5) {
                let key = format!("{by}-{len}");
                let key = key.as_bytes();
                let value = Bytes::from(content(seed, len));
                let options = PutOptions::default();
                assert_eq!(store.put(key, value.clone(), &options).await.unwrap(), Put::Stored, "{by} {len}");
                assert_eq!(store.put(key, value, &options).await.unwrap(), Put::Existed, "{by} {len}");
                check(seed, len, &store.get(key).await.unwrap().unwrap(), by);
                let held = store.get_ref(key).await.unwrap().unwrap();
                check(seed, len, &held, by);
                assert_eq!(held.is_in_place(), local, "{by} {len}");
                assert!(store.exists(key).await.unwrap());
                check(seed, len, &store.blocking().clone().get_location(key).map(|_| held).unwrap(), by);
            }
            let items: Vec<(Bytes, Bytes)> = (0..100u64)
                .map(|n| (format!("{by}-batch-{n}").into(), content(n, 100 * n as usize).into()))
                .collect();
            let keys: Vec<Bytes> = items.iter().map(|(key, _)| key.clone()).collect();
            for outcome in store.put_batch(items, &PutOptions::default()).await.unwrap() {
                assert_eq!(outcome.unwrap(), Put::Stored);
            }
            for (n, got) in store.get_batch(keys.clone()).await.unwrap().into_iter().enumerate() {
                check(n as u64, 100 * n, &got.unwrap().unwrap(), by);
            }
            assert_eq!(store.touch(vec![keys[3].clone(), "nobody".into()]).await.unwrap(), [true, false]);
            assert_eq!(store.exists_batch(&[&keys[3], b"nobody"]).await.unwrap(), [true, false]);
            assert!(store.remove(&keys[3], false).await.unwrap());
            assert!(!store.remove(&keys[3], false).await.unwrap());
            assert!(store.get(&keys[3]).await.unwrap().is_none());
            assert!(store.get_ref(&keys[3]).await.unwrap().is_none());
            // Many tasks at the same time, some of which want the same.
            let tasks: Vec<_> = (0..200usize)
                .map(|n| {
                    let (store, key) = (store.clone(), keys[4 + n % 50].clone());
                    tokio::spawn(async move { (n, store.get(&key).await.unwrap().unwrap()) })
                })
                .collect();
            for task in tasks {
                let (n, bytes) = task.await.unwrap();
                let number = 4 + n % 50;
                check(number as u64, 100 * number, &bytes, by);
            }
        });
    }
    drop(runtime);
    cluster.check_books();
    cluster.end();
}
