//! Cluster whose nodes have disks: every read call returns offloaded objects, also after a restart, and no removed
//! ones.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use moontide_client::{GetInto, Store, StoreConfig};
use moontide_master::{MasterConfig, Server};
use moontide_node::{BackendKind, DiskConfig, IoEngine, Node, NodeConfig};
use moontide_rt::SplitMix64;

const MIB: usize = 1 << 20;

/// Temporary directory, removed on drop.
struct Directory(PathBuf);

impl Directory {
    fn new(name: &str) -> Directory {
        let path = std::env::temp_dir().join(format!("moontide-client-disk-{}-{name}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Directory(path)
    }
}

impl Drop for Directory {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

fn master() -> Server {
    let free = "127.0.0.1:0".parse().unwrap();
    let config = MasterConfig {
        grpc_listen: free,
        frame_listen: free,
        admin_listen: free,
        groups: Some(2),
        reallocation_delay_ms: 0,
        ..MasterConfig::default()
    };
    Server::start(config).unwrap()
}

fn node(master: &Server, memory_bytes: usize, disk: DiskConfig) -> Node {
    let config = NodeConfig {
        master: master.addresses().grpc.to_string(),
        memory_bytes: memory_bytes as u64,
        disk: Some(disk),
        ..NodeConfig::default()
    };
    Node::start(config).unwrap()
}

fn disk(dir: &Directory, backend: BackendKind) -> DiskConfig {
    DiskConfig {
        backend,
        limit_bytes: Some(2 << 30),
        staging_bytes: 32 << 20,
        ..DiskConfig::new(dir.0.clone())
    }
}

fn stores(master: &Server) -> [(&'static str, Store); 2] {
    let config = StoreConfig::new(master.addresses().grpc.to_string());
    let remote = StoreConfig { shm: false, ..config.clone() };
    [("local", Store::connect(config).unwrap()), ("remote", Store::connect(remote).unwrap())]
}

fn content(seed: u64, len: usize) -> Vec<u8> {
    let mut bytes = vec![0; len];
    SplitMix64::new(seed).fill(&mut bytes);
    bytes
}

/// Length of the n-th object: around every boundary, 256 KiB on average.
fn len_of(n: u64) -> usize {
    [700 << 10, 1, 4096, 262_144, 262_145, 5_000, 1 << 20, 100_000][(n % 8) as usize]
}

fn key(n: u64) -> Vec<u8> {
    format!("object-{n}").into_bytes()
}

fn fill(store: &Store, objects: std::ops::Range<u64>) {
    for n in objects {
        store.put(&key(n), &content(n, len_of(n))).unwrap_or_else(|error| panic!("object {n}: {error}"));
    }
}

fn check(store: &Store, how: &str, objects: impl Iterator<Item = u64>) {
    for n in objects {
        let got = store.get(&key(n)).unwrap_or_else(|error| panic!("object {n} read {how}: {error}"));
        let got = got.unwrap_or_else(|| panic!("object {n} is gone, read {how}"));
        assert!(got == content(n, len_of(n)), "object {n} has other bytes, read {how}");
    }
}

/// Waits until a condition holds; fails after 20 s.
fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn fills_restarts_and_removes(backend: BackendKind, engine: IoEngine) {
    let name = format!("{backend}-{engine}");
    let dir = Directory::new(&name);
    let master = master();
    let disk = DiskConfig { io_engine: engine, ..disk(&dir, backend) };
    // About 96 MiB into 24 MiB.
    let objects = 300;
    let running = node(&master, 24 * MIB, disk.clone());
    let id = running.id();
    let stores = stores(&master);
    fill(&stores[0].1, 0..objects);
    for (how, store) in &stores {
        check(store, how, 0..objects);
        assert!(store.metrics().stats().hits_disk > 0, "no get was served from disk, read {how}");
    }
    let remote = &stores[1].1;
    // Batches and ranges.
    for first in (0..objects).step_by(50) {
        let keys: Vec<Vec<u8>> = (first..first + 50).map(key).collect();
        let mut buffers: Vec<Vec<u8>> = (first..first + 50).map(|n| vec![0; len_of(n)]).collect();
        let mut gets: Vec<GetInto<'_>> =
            keys.iter().zip(&mut buffers).map(|(key, into)| GetInto { key, into }).collect();
        let lens = remote.get_batch_into(&mut gets);
        for ((n, len), into) in (first..).zip(lens).zip(&buffers) {
            assert_eq!(len.unwrap(), Some(len_of(n)), "object {n}");
            assert!(*into == content(n, len_of(n)), "object {n}");
        }
    }
    for (how, store) in &stores {
        let mut part = vec![0; 1000];
        let n = (0..objects).find(|n| len_of(*n) == 700 << 10).unwrap();
        assert_eq!(store.get_range(&key(n), 300_000, &mut part).unwrap(), Some(1000), "{how}");
        assert_eq!(part, content(n, len_of(n))[300_000..301_000], "{how}");
    }
    // Some objects are removed, then the node is restarted.
    for n in (0..objects).step_by(10) {
        assert!(remote.remove(&key(n), true).unwrap(), "object {n}");
    }
    running.shutdown();
    let running = node(&master, 24 * MIB, disk);
    assert_eq!(running.id(), id, "a node with a disk keeps its id");
    // Objects only in memory are lost; those on disk exist, except the removed ones.
    let before = remote.metrics().stats().hits_disk;
    let mut found = 0;
    eventually("the disk is reported", || {
        remote.get(&key(1)).is_ok() && remote.list(b"object-", b"", 4000).unwrap().keys.len() > 100
    });
    std::thread::sleep(Duration::from_millis(300));
    for n in 0..objects {
        match remote.get(&key(n)).unwrap() {
            Some(got) => {
                assert!(n % 10 != 0, "object {n} was removed");
                assert!(got == content(n, len_of(n)), "object {n} has other bytes");
                found += 1;
            }
            None => continue,
        }
    }
    assert!(found >= 150, "only {found} of {objects} objects survived");
    assert!(remote.metrics().stats().hits_disk > before);
    running.shutdown();
}

#[test]
fn bucket_io_uring_stores_more_than_memory_and_survives_restart() {
    fills_restarts_and_removes(BackendKind::Bucket, IoEngine::Uring);
}

#[test]
fn bucket_posix_stores_more_than_memory_and_survives_restart() {
    fills_restarts_and_removes(BackendKind::Bucket, IoEngine::Posix);
}

#[test]
fn file_backend_stores_more_than_memory_and_survives_restart() {
    fills_restarts_and_removes(BackendKind::File, IoEngine::Auto);
}

#[test]
fn offset_backend_stores_more_than_memory_and_survives_restart() {
    fills_restarts_and_removes(BackendKind::Offset, IoEngine::Auto);
}

#[test]
fn reread_and_prefetched_objects_are_promoted_to_memory() {
    let dir = Directory::new("promote");
    let master = master();
    let running = node(&master, 64 * MIB, disk(&dir, BackendKind::Bucket));
    let stores = stores(&master);
    let remote = &stores[1].1;
    for n in 0..100u64 {
        remote.put(&key(n), &content(n, MIB)).unwrap();
    }
    // Free memory for promotions: the removed objects were put last, and are in memory.
    for n in 70..100u64 {
        assert!(remote.remove(&key(n), true).unwrap());
    }
    let on_disk = |n: u64| {
        let info = remote.stat(&key(n)).unwrap().unwrap();
        info.stripes.iter().all(|stripe| stripe.medium == moontide_types::Medium::Disk)
    };
    let old: Vec<u64> = (0..70).filter(|&n| on_disk(n)).collect();
    assert!(old.len() > 10, "{} objects are on disk", old.len());
    eventually("an object that is read again is promoted", || {
        assert_eq!(remote.get(&key(old[0])).unwrap().unwrap(), content(old[0], MIB));
        !on_disk(old[0])
    });
    assert_eq!(
        remote.prefetch(&[&key(old[1]), b"missing"]).into_iter().collect::<Result<Vec<_>, _>>().unwrap(),
        [true, false]
    );
    eventually("a prefetched object is promoted", || !on_disk(old[1]));
    for n in &old {
        assert_eq!(remote.get(&key(*n)).unwrap().unwrap(), content(*n, MIB));
    }
    // The object is in memory and on disk: a removal removes both.
    assert!(remote.remove(&key(old[0]), true).unwrap());
    running.shutdown();
    let running = node(&master, 64 * MIB, disk(&dir, BackendKind::Bucket));
    eventually("the other objects are reported", || remote.exists(&key(old[2])).unwrap());
    std::thread::sleep(Duration::from_millis(200));
    assert!(remote.get(&key(old[0])).unwrap().is_none(), "a removed object exists again");
    running.shutdown();
}
