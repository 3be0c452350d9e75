//! Every call of the store, over shared memory and over TCP, and of the async store.

use std::collections::BTreeSet;
use std::time::Duration;

use bytes::Bytes;
use moontide_client::{AsyncStore, GetInto, PutItem, PutOptions, PutOutcome, Store, StoreConfig};
use moontide_types::{ErrorCode, NodeId};

use crate::content::{Rng, check, content};
use crate::harness::{Cluster, KIB, MIB, STEP_TIMEOUT, Shape, connect, is_full, sized, until};
use crate::readers::replicas;

/// Lengths around every boundary, and large ones.
fn lengths() -> Vec<usize> {
    let mut lengths =
        vec![0, 1, 511, 4095, 4096, 4097, 64 * KIB, 256 * KIB - 1, 256 * KIB, 256 * KIB + 1, 1_000_003];
    lengths.extend([16 * MIB + 5, 64 * MIB]);
    if is_full() {
        lengths.push(1024 * MIB);
    }
    lengths
}

fn nodes_of<'a>(stripes: impl IntoIterator<Item = &'a moontide_client::StripeLocation>) -> BTreeSet<NodeId> {
    stripes.into_iter().map(|stripe| stripe.node).collect()
}

#[test]
fn all_read_calls_return_put_bytes_locally_and_remotely() {
    let mut rng = Rng::seeded();
    let memory_mib = sized(512, 4096);
    let cluster = Cluster::start(Shape { memory_mib, groups: sized(2, 1), ..Shape::default() });
    let relaxed = StoreConfig { timeout: Duration::from_secs(sized(20, 120)), ..cluster.config() };
    let stores =
        [("local", connect(relaxed.clone())), ("remote", connect(StoreConfig { shm: false, ..relaxed }))];
    assert_eq!(stores[0].1.nodes().unwrap().len(), 3);
    for (by, writer) in &stores {
        for len in lengths() {
            let key = format!("{by}-{len}");
            let key = key.as_bytes();
            let seed = rng.draw();
            let value = content(seed, len);
            assert_eq!(writer.put(key, &value).unwrap(), PutOutcome::Stored, "{by}-{len}");
            assert_eq!(writer.put(key, b"other").unwrap(), PutOutcome::AlreadyExists, "{by}-{len}");
            for (reads, store) in &stores {
                every_read(store, key, seed, &value, &format!("{by}-{len} read {reads}"), *reads == "local");
            }
            if len >= 64 * MIB {
                // Frees space for the others.
                assert!(writer.remove(key, false).unwrap());
            }
        }
    }
    let (local, remote) = (&stores[0].1, &stores[1].1);
    for found in [
        remote.touch(&[b"local-1", b"missing_key", b""]),
        local.exists_batch(&[b"local-1", b"missing_key", b""]),
        local.prefetch(&[b"local-1", b"missing_key", b""]),
    ] {
        assert!(matches!(found[..], [Ok(true), Ok(false), Err(_)]), "{found:?}");
    }
    for (_, store) in &stores {
        assert!(store.get(b"missing_key").unwrap().is_none());
        assert!(store.get_ref(b"missing_key").unwrap().is_none());
        assert!(store.get_into(b"missing_key", &mut [0; 8]).unwrap().is_none());
        assert!(store.get_range(b"missing_key", 0, &mut [0; 8]).unwrap().is_none());
        assert!(store.get_location(b"missing_key").unwrap().is_none());
        assert!(store.stat(b"missing_key").unwrap().is_none());
        assert!(!store.remove(b"missing_key", false).unwrap());
        assert_eq!(store.get(b"").unwrap_err().code(), ErrorCode::InvalidArgument);
    }
    // All clients see a removal immediately, also those with a cached location.
    assert!(local.remove(b"remote-262145", false).unwrap());
    assert!(remote.remove(b"local-262145", true).unwrap());
    for (_, store) in &stores {
        for key in [b"remote-262145".as_slice(), b"local-262145"] {
            assert!(store.get(key).unwrap().is_none());
            assert!(store.get_ref(key).unwrap().is_none());
            assert!(!store.exists(key).unwrap());
        }
        assert_eq!(store.metrics().stats().corrupt, 0);
    }
    assert_eq!(remote.metrics().stats().hits_local, 0);
    drop(stores);
    cluster.check_accounting();
    cluster.end();
}

fn every_read(store: &Store, key: &[u8], seed: u64, value: &[u8], what: &str, local: bool) {
    let len = value.len();
    check(seed, len, &store.get(key).unwrap().unwrap(), what);
    let location = store.get_location(key).unwrap().unwrap();
    assert_eq!(location.len, len as u64, "{what}");
    let held = store.get_ref(key).unwrap().unwrap();
    check(seed, len, &held, what);
    assert!(held.verify(), "{what}");
    assert_eq!(held.is_zero_copy(), local && location.stripes.len() == 1, "{what}");
    drop(held);
    let mut into = vec![0xee; len + 10];
    assert_eq!(store.get_into(key, &mut into).unwrap(), Some(len), "{what}");
    check(seed, len, &into[..len], what);
    assert!(into[len..].iter().all(|&byte| byte == 0xee), "{what}: bytes after the object were written");
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
fn batch_list_write_plan_and_prefix_removal_calls_work() {
    let mut rng = Rng::seeded();
    let cluster = Cluster::start(Shape::default());
    for (by, store) in [("local", cluster.local()), ("remote", cluster.remote())] {
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
        for (expected, again) in [(PutOutcome::Stored, "first"), (PutOutcome::AlreadyExists, "second")] {
            for outcome in store.put_batch(&items, &PutOptions::default()) {
                assert_eq!(outcome.unwrap(), expected, "the {again} time");
            }
        }
        let mut keys: Vec<&[u8]> = objects.iter().map(|(key, ..)| key.as_bytes()).collect();
        keys.push(b"missing_key");
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

        // Pages list every key exactly once.
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
        let removal = store.remove_by_prefix(format!("{by}-").as_bytes(), true).unwrap();
        assert_eq!((removal.removed, removal.kept), (objects.len() as u64 - 100, 0));
        assert!(store.list(format!("{by}-").as_bytes(), &[], 1).unwrap().keys.is_empty());
        assert!(store.get_batch(&keys).iter().all(|got| got.as_ref().unwrap().is_none()));

        plans(&store, by, rng.draw());
    }
    cluster.check_accounting();
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
    assert_eq!(plan.commit(epoch).unwrap(), PutOutcome::Stored);
    check(seed, len, &store.get(key.as_bytes()).unwrap().unwrap(), &key);

    let key = format!("aborted-{by}");
    let plan = store.open_for_write(key.as_bytes(), 100, &PutOptions::default()).unwrap();
    plan.abort();
    until("the reservation is released", STEP_TIMEOUT, || store.stat(key.as_bytes()).unwrap().is_none());
    assert_eq!(store.put(key.as_bytes(), b"another").unwrap(), PutOutcome::Stored);
    assert!(store.remove(key.as_bytes(), true).unwrap());
}

#[test]
fn replicas_and_stripes_are_placed_on_different_nodes() {
    let mut rng = Rng::seeded();
    let cluster = Cluster::start(Shape::default());
    let all: BTreeSet<NodeId> = cluster.ids().into_iter().collect();
    let stores = [("local", cluster.local()), ("remote", cluster.remote())];
    for (by, store) in &stores {
        for len in [1, 5000, 9 * MIB] {
            let (key, seed) = (format!("replicas-{by}-{len}"), rng.draw());
            let options = replicas(3);
            assert_eq!(
                store.put_with(key.as_bytes(), &[&content(seed, len)], &options).unwrap(),
                PutOutcome::Stored
            );
            let stripes = store.stat(key.as_bytes()).unwrap().unwrap().stripes;
            assert_eq!((stripes.len(), nodes_of(&stripes)), (3, all.clone()), "{key}");
            for (_, store) in &stores {
                check(seed, len, &store.get(key.as_bytes()).unwrap().unwrap(), &key);
            }
        }
        let (key, seed, len) = (format!("stripes-{by}"), rng.draw(), 9 * MIB + 77);
        // Local memory is not preferred: it would take all three stripes.
        let options = PutOptions { stripes: Some(3), prefer_local: false, ..PutOptions::default() };
        assert_eq!(
            store.put_with(key.as_bytes(), &[&content(seed, len)], &options).unwrap(),
            PutOutcome::Stored
        );
        let stripes = store.stat(key.as_bytes()).unwrap().unwrap().stripes;
        assert_eq!(stripes.len(), 3, "{key}");
        assert_eq!(nodes_of(&stripes), all, "{key}");
        for (reads, store) in &stores {
            let what = format!("{key} read {reads}");
            every_read(store, key.as_bytes(), seed, &content(seed, len), &what, false);
        }
        // Replaced by another object.
        let options = PutOptions { upsert: true, replicas: 2, ..PutOptions::default() };
        let seed = rng.draw();
        assert_eq!(
            store.put_with(key.as_bytes(), &[&content(seed, 999)], &options).unwrap(),
            PutOutcome::Stored
        );
        for (reads, store) in &stores {
            let what = format!("{key} replaced, read {reads}");
            check(seed, 999, &store.get(key.as_bytes()).unwrap().unwrap(), &what);
            check(seed, 999, &store.get_ref(key.as_bytes()).unwrap().unwrap(), &what);
        }
    }
    drop(stores);
    cluster.check_accounting();
    cluster.end();
}

#[test]
fn async_store_supports_put_get_batch_touch_and_remove() {
    let mut rng = Rng::seeded();
    let cluster = Cluster::start(Shape::default());
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    for local in [true, false] {
        let config = StoreConfig { shm: local, ..cluster.config() };
        let by = if local { "local" } else { "remote" };
        let seeds: Vec<u64> = (0..lengths().len()).map(|_| rng.draw()).collect();
        runtime.block_on(async {
            let store = AsyncStore::connect(config).await.unwrap();
            for (len, &seed) in lengths().into_iter().zip(&seeds).filter(|(len, _)| *len <= 16 * MIB + 5) {
                let key = format!("{by}-{len}");
                let key = key.as_bytes();
                let value = Bytes::from(content(seed, len));
                let options = PutOptions::default();
                assert_eq!(
                    store.put(key, value.clone(), &options).await.unwrap(),
                    PutOutcome::Stored,
                    "{by} {len}"
                );
                assert_eq!(
                    store.put(key, value, &options).await.unwrap(),
                    PutOutcome::AlreadyExists,
                    "{by} {len}"
                );
                check(seed, len, &store.get(key).await.unwrap().unwrap(), by);
                let held = store.get_ref(key).await.unwrap().unwrap();
                check(seed, len, &held, by);
                assert_eq!(held.is_zero_copy(), local, "{by} {len}");
                assert!(store.exists(key).await.unwrap());
                check(seed, len, &store.blocking().clone().get_location(key).map(|_| held).unwrap(), by);
            }
            let items: Vec<(Bytes, Bytes)> = (0..100u64)
                .map(|n| (format!("{by}-batch-{n}").into(), content(n, 100 * n as usize).into()))
                .collect();
            let keys: Vec<Bytes> = items.iter().map(|(key, _)| key.clone()).collect();
            for outcome in store.put_batch(items, &PutOptions::default()).await.unwrap() {
                assert_eq!(outcome.unwrap(), PutOutcome::Stored);
            }
            for (n, got) in store.get_batch(keys.clone()).await.unwrap().into_iter().enumerate() {
                check(n as u64, 100 * n, &got.unwrap().unwrap(), by);
            }
            let some = vec![keys[3].clone(), "missing_key".into()];
            let touched = store.touch(some.clone()).await.unwrap();
            assert!(matches!(touched[..], [Ok(true), Ok(false)]), "{touched:?}");
            let exist = store.exists_batch(some).await.unwrap();
            assert!(matches!(exist[..], [Ok(true), Ok(false)]), "{exist:?}");
            assert!(store.remove(&keys[3], false).await.unwrap());
            assert!(!store.remove(&keys[3], false).await.unwrap());
            assert!(store.get(&keys[3]).await.unwrap().is_none());
            assert!(store.get_ref(&keys[3]).await.unwrap().is_none());
            // Many concurrent tasks, some with the same key.
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
    cluster.check_accounting();
    cluster.end();
}
