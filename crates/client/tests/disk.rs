//! A cluster whose nodes have disks: what memory cannot hold is read back from there, by every call, also after a
//! restart; what was removed is not.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use moontide_client::{GetInto, Store, StoreConfig};
use moontide_master::{MasterConfig, Server};
use moontide_node::{BackendKind, DiskConfig, EngineChoice, Node, NodeConfig};

const MIB: usize = 1 << 20;

/// A directory that goes away with its owner.
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
        groups: 2,
        reallocate_wait_ms: 0,
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
    let far = StoreConfig { local: false, ..config.clone() };
    [("near", Store::connect(config).unwrap()), ("far", Store::connect(far).unwrap())]
}

fn content(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        bytes.extend_from_slice(&state.to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// Lengths of the n-th object: around every boundary, 256 KiB on the average.
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

/// Waits until something holds; the test is wrong if it takes long.
fn eventually(what: &str, mut holds: impl FnMut() -> bool) {
    let until = Instant::now() + Duration::from_secs(20);
    while !holds() {
        assert!(Instant::now() < until, "{what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn fills_restarts_and_removes(backend: BackendKind, engine: EngineChoice) {
    let name = format!("{backend}-{engine}");
    let dir = Directory::new(&name);
    let master = master();
    let disk = DiskConfig { engine, ..disk(&dir, backend) };
    // About 96 MiB into 24 MiB.
    let objects = 300;
    let running = node(&master, 24 * MIB, disk.clone());
    let id = running.id();
    let stores = stores(&master);
    fill(&stores[0].1, 0..objects);
    for (how, store) in &stores {
        check(store, how, 0..objects);
        assert!(store.metrics().stats().hits_disk > 0, "something came from disk, read {how}");
    }
    let far = &stores[1].1;
    // Batches and ranges.
    for first in (0..objects).step_by(50) {
        let keys: Vec<Vec<u8>> = (first..first + 50).map(key).collect();
        let mut room: Vec<Vec<u8>> = (first..first + 50).map(|n| vec![0; len_of(n)]).collect();
        let mut gets: Vec<GetInto<'_>> =
            keys.iter().zip(&mut room).map(|(key, into)| GetInto { key, into }).collect();
        let lens = far.get_batch_into(&mut gets);
        for ((n, len), into) in (first..).zip(lens).zip(&room) {
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
    // Some are removed, and the node goes away without a word to say so.
    for n in (0..objects).step_by(10) {
        assert!(far.remove(&key(n), true).unwrap(), "object {n}");
    }
    running.shutdown();
    let running = node(&master, 24 * MIB, disk);
    assert_eq!(running.id(), id, "a node with a disk comes back as the same one");
    // What was in memory alone is lost; what was on disk is there, and nothing that was removed.
    let before = far.metrics().stats().hits_disk;
    let mut there = 0;
    eventually("the disk is told", || {
        far.get(&key(1)).is_ok() && far.list(b"object-", b"", 4000).unwrap().keys.len() > 100
    });
    std::thread::sleep(Duration::from_millis(300));
    for n in 0..objects {
        match far.get(&key(n)).unwrap() {
            Some(got) => {
                assert!(n % 10 != 0, "object {n} was removed");
                assert!(got == content(n, len_of(n)), "object {n} has other bytes");
                there += 1;
            }
            None => continue,
        }
    }
    assert!(there >= 150, "only {there} of {objects} came back");
    assert!(far.metrics().stats().hits_disk > before);
    running.shutdown();
}

#[test]
fn buckets_by_io_uring_hold_what_memory_cannot() {
    fills_restarts_and_removes(BackendKind::Bucket, EngineChoice::Uring);
}

#[test]
fn buckets_by_posix_hold_what_memory_cannot() {
    fills_restarts_and_removes(BackendKind::Bucket, EngineChoice::Posix);
}

#[test]
fn files_hold_what_memory_cannot() {
    fills_restarts_and_removes(BackendKind::File, EngineChoice::Auto);
}

#[test]
fn one_large_file_holds_what_memory_cannot() {
    fills_restarts_and_removes(BackendKind::Offset, EngineChoice::Auto);
}

#[test]
fn what_is_read_again_comes_back_to_memory_and_can_be_prefetched() {
    let dir = Directory::new("promote");
    let master = master();
    let running = node(&master, 64 * MIB, disk(&dir, BackendKind::Bucket));
    let stores = stores(&master);
    let far = &stores[1].1;
    for n in 0..100u64 {
        far.put(&key(n), &content(n, MIB)).unwrap();
    }
    // Room in memory, so that something can come back: what is removed was put last, and is in memory.
    for n in 70..100u64 {
        assert!(far.remove(&key(n), true).unwrap());
    }
    let on_disk = |n: u64| {
        let info = far.stat(&key(n)).unwrap().unwrap();
        info.stripes.iter().all(|stripe| stripe.medium == moontide_client::Medium::Disk)
    };
    let old: Vec<u64> = (0..70).filter(|&n| on_disk(n)).collect();
    assert!(old.len() > 10, "{} objects are on disk", old.len());
    eventually("an object that is read again comes back to memory", || {
        assert_eq!(far.get(&key(old[0])).unwrap().unwrap(), content(old[0], MIB));
        !on_disk(old[0])
    });
    assert_eq!(far.prefetch(&[&key(old[1]), b"nobody"]).unwrap(), [true, false]);
    eventually("what is prefetched comes back to memory", || !on_disk(old[1]));
    for n in &old {
        assert_eq!(far.get(&key(*n)).unwrap().unwrap(), content(*n, MIB));
    }
    // In memory and on disk: a removal takes both.
    assert!(far.remove(&key(old[0]), true).unwrap());
    running.shutdown();
    let running = node(&master, 64 * MIB, disk(&dir, BackendKind::Bucket));
    eventually("the others are told", || far.exists(&key(old[2])).unwrap());
    std::thread::sleep(Duration::from_millis(200));
    assert!(far.get(&key(old[0])).unwrap().is_none(), "what was removed stays removed");
    running.shutdown();
}
