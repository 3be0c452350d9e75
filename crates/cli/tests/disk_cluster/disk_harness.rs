//! A master and one node with a disk, and helpers: parallel puts and reads, and objects on disk.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use moontide_client::{PutOptions, PutOutcome, Store, StoreConfig};
use moontide_disk::BackendKind;
use moontide_types::Medium;

use crate::harness::{Cluster, Folder, Numbers, Shape, connect, until, words};
use crate::readers::{Got, Object, Tally, Way, read};

/// Timeout of a put: puts wait for a slow disk.
pub const RELAXED_TIMEOUT: Duration = Duration::from_secs(60);

/// Number of threads that put or read.
pub const THREADS: usize = 4;

/// A master and a node, and the node's disk.
pub struct DiskCluster {
    // Dropped before the disk.
    pub cluster: Cluster,
    disk: Folder,
}

/// Sizes of the node's memory and disk.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub memory_mib: usize,
    pub limit_mib: usize,
    pub staging_mib: usize,
}

impl Sizes {
    /// A disk of `times` times the memory.
    pub fn times(memory_mib: usize, times: usize) -> Sizes {
        Sizes { memory_mib, limit_mib: times * memory_mib, staging_mib: (memory_mib / 2).max(16) }
    }
}

impl DiskCluster {
    /// Starts both, with further arguments of the node.
    pub fn start(backend: BackendKind, sizes: Sizes, more: &str) -> DiskCluster {
        let mut cluster = DiskCluster::without_node(backend, sizes, more);
        cluster.cluster.add_node(&[]);
        cluster.cluster.wait_for_nodes(1);
        cluster
    }

    /// Starts both, with sessions that end after this time.
    pub fn start_with_ttl(backend: BackendKind, sizes: Sizes, session_ttl_ms: u64) -> DiskCluster {
        let mut cluster =
            DiskCluster::with_shape(backend, sizes, "", Shape { session_ttl_ms, ..Shape::default() });
        cluster.cluster.add_node(&[]);
        cluster.cluster.wait_for_nodes(1);
        cluster
    }

    /// Starts both, with further arguments of the master and of the node.
    pub fn start_with_master(backend: BackendKind, sizes: Sizes, master: &str, more: &str) -> DiskCluster {
        let shape = Shape { master_words: words(master), ..Shape::default() };
        let mut cluster = DiskCluster::with_shape(backend, sizes, more, shape);
        cluster.cluster.add_node(&[]);
        cluster.cluster.wait_for_nodes(1);
        cluster
    }

    /// Starts the master; the caller starts the node.
    pub fn without_node(backend: BackendKind, sizes: Sizes, more: &str) -> DiskCluster {
        DiskCluster::with_shape(backend, sizes, more, Shape::default())
    }

    /// Starts the master of a cluster of this shape; the caller starts the node.
    pub fn with_shape(backend: BackendKind, sizes: Sizes, more: &str, shape: Shape) -> DiskCluster {
        DiskCluster::with_directories(backend, sizes, more, shape, &["tier"])
    }

    /// Starts the master; the caller starts the node, which has these directories below [`DiskCluster::disk`].
    pub fn with_directories(
        backend: BackendKind,
        sizes: Sizes,
        more: &str,
        shape: Shape,
        names: &[&str],
    ) -> DiskCluster {
        let disk = Folder::new();
        let mut node_words = words(&format!(
            "--disk-backend {backend} --disk-limit {}MiB --disk-staging {}MiB {more}",
            sizes.limit_mib, sizes.staging_mib
        ));
        for name in names {
            node_words.extend(["--disk-dir".to_owned(), disk.path().join(name).display().to_string()]);
        }
        let shape = Shape { nodes: 0, memory_mib: sizes.memory_mib, node_words, ..shape };
        DiskCluster { cluster: Cluster::start(shape), disk }
    }

    /// Parent of the tier's directory.
    pub fn disk(&self) -> &Path {
        self.disk.path()
    }

    /// Directory of the tier.
    pub fn tier(&self) -> String {
        self.disk.path().join("tier").display().to_string()
    }

    /// Connects a client with a long timeout and without location cache, and waits until it reaches the node, so that
    /// connect timeouts of a busy machine do not fail the test.
    #[track_caller]
    pub fn store(&self, local: bool) -> Store {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let store = connect(StoreConfig {
            shm: local,
            timeout: RELAXED_TIMEOUT,
            location_cache_entries: 0,
            ..self.cluster.config()
        });
        until("the store reaches the node", RELAXED_TIMEOUT, || {
            let key = format!("hello-{}", NEXT.fetch_add(1, Ordering::Relaxed));
            store.put(key.as_bytes(), b"hello").is_ok()
        });
        store
    }

    #[track_caller]
    pub fn node_metrics(&self) -> Numbers {
        self.cluster.nodes[0].metrics()
    }

    /// Kills the node with SIGKILL and restarts it on the same disk.
    pub fn kill_and_restart(&mut self) {
        self.cluster.nodes[0].kill();
        self.cluster.restart_node(0);
    }
}

/// Calls `work` for every object, from several threads.
pub fn for_each(stores: &[&Store], objects: &[Object], work: impl Fn(&Store, &Object) + Sync) {
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (next, work, store) = (&next, &work, stores[thread % stores.len()]);
            scope.spawn(move || {
                while let Some(object) = objects.get(next.fetch_add(1, Ordering::Relaxed)) {
                    work(store, object);
                }
            });
        }
    });
}

/// Puts objects at full speed and asserts that each is stored. Returns the total time and the longest put.
pub fn put_fast(stores: &[&Store], objects: &[Object]) -> (Duration, Duration) {
    let (began, longest) = (Instant::now(), Mutex::new(Duration::ZERO));
    for_each(stores, objects, |store, object| {
        let content = object.content();
        let began = Instant::now();
        let put = store.put_with(object.key(), &[&content], &PutOptions::default());
        let took = began.elapsed();
        match put {
            Ok(put) => assert_eq!(put, PutOutcome::Stored, "{}", object.key),
            Err(error) => panic!("the put of {} failed after {took:?}: {error}", object.key),
        }
        let mut longest = longest.lock().expect("no holder panics");
        *longest = took.max(*longest);
    });
    (began.elapsed(), longest.into_inner().expect("no holder panics"))
}

/// Reads objects and checks every byte.
pub fn read_fast(store: &Store, objects: &[Object]) -> Tally {
    let tally = Tally::default();
    for_each(&[store], objects, |store, object| {
        let began = Instant::now();
        tally.note(began, read(store, Way::Copy, object));
    });
    tally
}

/// Reads objects and asserts that none is missing.
#[track_caller]
pub fn read_all(store: &Store, objects: &[Object], what: &str) {
    let (began, before) = (Instant::now(), store.metrics().stats());
    let tally = read_fast(store, objects);
    let (took, after) = (began.elapsed(), store.metrics().stats());
    let lost = tally.lost();
    println!(
        "{what}: {} of {} objects read, {} from disk, at {:.0} MiB/s, the longest in {:?}",
        tally.right(),
        objects.len(),
        after.hits_disk - before.hits_disk,
        mib(objects) / took.as_secs_f64(),
        tally.longest()
    );
    assert!(lost.is_empty(), "{what}: {} objects are lost, as {:?}", lost.len(), &lost[..lost.len().min(3)]);
}

/// Returns the objects that are on disk according to the master; they may also be in memory.
pub fn on_disk(store: &Store, objects: &[Object]) -> Vec<Object> {
    let found = Mutex::new(Vec::new());
    for_each(&[store], objects, |store, object| {
        let info = store.stat(object.key()).unwrap_or_else(|error| panic!("{}: {error}", object.key));
        let on_disk = |info: moontide_client::ObjectInfo| {
            !info.writing && info.stripes.iter().any(|stripe| stripe.medium == Medium::Disk)
        };
        if info.is_some_and(on_disk) {
            found.lock().expect("no holder panics").push(object.clone());
        }
    });
    found.into_inner().expect("no holder panics")
}

/// Number of existing objects.
pub fn count_existing(store: &Store, objects: &[Object]) -> usize {
    let keys: Vec<&[u8]> = objects.iter().map(Object::key).collect();
    let there = keys.chunks(4096).map(|keys| store.exists_batch(keys));
    there.map(|there| there.iter().filter(|there| matches!(there, Ok(true))).count()).sum()
}

/// Waits for the first read from the node's disk, with retries; returns the time since the start of the node.
#[track_caller]
pub fn first_hit(cluster: &DiskCluster, store: &Store, objects: &[Object]) -> Duration {
    let started = cluster.cluster.nodes[0].started;
    let before = store.metrics().stats().hits_disk;
    for object in objects.iter().cycle() {
        if let Got::Right = read(store, Way::Copy, object) {
            break;
        }
        assert!(started.elapsed() < RELAXED_TIMEOUT, "no read from disk after the restart");
    }
    let took = started.elapsed();
    assert!(store.metrics().stats().hits_disk > before, "the first hit came from memory");
    took
}

/// Total size in MiB.
pub fn mib(objects: &[Object]) -> f64 {
    objects.iter().map(|object| object.len as f64).sum::<f64>() / f64::from(1 << 20)
}
