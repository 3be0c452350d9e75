//! A master and one node with a disk, and what the tests do with it: many objects at once, and who is on disk.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use moontide_client::{Medium, Put, PutOptions, Store, StoreConfig};
use moontide_disk::BackendKind;

use crate::kit::{Cluster, Folder, Numbers, Shape, connect, until, words};
use crate::readers::{Got, Object, Tally, Way, read};

/// What a put may take: a disk that is slower than the puts makes them wait.
pub const PATIENT: Duration = Duration::from_secs(60);

/// Threads that put or read.
pub const THREADS: usize = 4;

/// A master and a node, and the node's disk.
pub struct Scene {
    // The processes end before their disk goes.
    pub cluster: Cluster,
    disk: Folder,
}

/// How the node and its disk are.
#[derive(Clone, Copy, Debug)]
pub struct Sizes {
    pub memory_mib: usize,
    pub limit_mib: usize,
    pub staging_mib: usize,
}

impl Sizes {
    /// A disk that holds so many times the memory.
    pub fn times(memory_mib: usize, times: usize) -> Sizes {
        Sizes { memory_mib, limit_mib: times * memory_mib, staging_mib: (memory_mib / 2).max(16) }
    }
}

impl Scene {
    /// Starts both, with more words for the node.
    pub fn start(backend: BackendKind, sizes: Sizes, more: &str) -> Scene {
        let mut scene = Scene::without_node(backend, sizes, more);
        scene.cluster.add_node(&[]);
        scene.cluster.wait_for_nodes(1);
        scene
    }

    /// Starts the master; the caller starts the node.
    pub fn without_node(backend: BackendKind, sizes: Sizes, more: &str) -> Scene {
        let disk = Folder::new();
        let mut node_words = words(&format!(
            "--disk-backend {backend} --disk-limit {}MiB --disk-staging {}MiB {more}",
            sizes.limit_mib, sizes.staging_mib
        ));
        let dir = disk.path().join("tier").display().to_string();
        node_words.extend(["--disk-dir".to_owned(), dir]);
        let shape = Shape { nodes: 0, memory_mib: sizes.memory_mib, node_words, ..Shape::default() };
        Scene { cluster: Cluster::start(shape), disk }
    }

    /// The directory in which the tier's is.
    pub fn disk(&self) -> &Path {
        self.disk.path()
    }

    /// The tier's directory.
    pub fn tier(&self) -> String {
        self.disk.path().join("tier").display().to_string()
    }

    /// A store that waits for long, asks the master every time, and has its connections: that a busy machine lets some
    /// time out is not what is looked at here.
    #[track_caller]
    pub fn store(&self, local: bool) -> Store {
        static NEXT: AtomicUsize = AtomicUsize::new(0);
        let store = connect(StoreConfig { local, deadline: PATIENT, locations: 0, ..self.cluster.config() });
        until("the store reaches the node", PATIENT, || {
            let key = format!("hello-{}", NEXT.fetch_add(1, Ordering::Relaxed));
            store.put(key.as_bytes(), b"hello").is_ok()
        });
        store
    }

    #[track_caller]
    pub fn node_metrics(&self) -> Numbers {
        self.cluster.nodes[0].metrics()
    }

    /// Kills the node without a word and starts it again on the same disk.
    pub fn kill_and_restart(&mut self) {
        self.cluster.nodes[0].kill();
        self.cluster.restart_node(0);
    }
}

/// Does something with every object, from several threads.
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

/// Puts objects as fast as it goes; each must be acknowledged. How long it took, and the longest of them.
pub fn put_fast(stores: &[&Store], objects: &[Object]) -> (Duration, Duration) {
    let (began, longest) = (Instant::now(), Mutex::new(Duration::ZERO));
    for_each(stores, objects, |store, object| {
        let content = object.content();
        let began = Instant::now();
        let put = store.put_with(object.key(), &[&content], &PutOptions::default());
        let took = began.elapsed();
        match put {
            Ok(put) => assert_eq!(put, Put::Stored, "{}", object.key),
            Err(error) => panic!("the put of {} failed after {took:?}: {error}", object.key),
        }
        let mut longest = longest.lock().expect("no holder panics");
        *longest = took.max(*longest);
    });
    (began.elapsed(), longest.into_inner().expect("no holder panics"))
}

/// Reads objects, each whole and byte by byte.
pub fn read_fast(store: &Store, objects: &[Object]) -> Tally {
    let tally = Tally::default();
    for_each(&[store], objects, |store, object| {
        let began = Instant::now();
        tally.note(began, read(store, Way::Copy, object));
    });
    tally
}

/// Reads objects, of which none may be missing.
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

/// Those objects of which the master says that they are on disk; they may be in memory, too.
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

/// How many of these there are.
pub fn count_existing(store: &Store, objects: &[Object]) -> usize {
    let keys: Vec<&[u8]> = objects.iter().map(Object::key).collect();
    let there = keys.chunks(4096).map(|keys| store.exists_batch(keys).unwrap_or_default());
    there.map(|there| there.into_iter().filter(|there| *there).count()).sum()
}

/// Waits for the first of these that is read from the node's disk; since when the node runs. Who does not answer yet is
/// asked again.
#[track_caller]
pub fn first_hit(scene: &Scene, store: &Store, objects: &[Object]) -> Duration {
    let started = scene.cluster.nodes[0].started;
    let before = store.metrics().stats().hits_disk;
    for object in objects.iter().cycle() {
        if let Got::Right = read(store, Way::Copy, object) {
            break;
        }
        assert!(started.elapsed() < PATIENT, "nothing comes from disk after the restart");
    }
    let took = started.elapsed();
    assert!(store.metrics().stats().hits_disk > before, "the first hit came from memory");
    took
}

/// Their bytes, in MiB.
pub fn mib(objects: &[Object]) -> f64 {
    objects.iter().map(|object| object.len as f64).sum::<f64>() / f64::from(1 << 20)
}
