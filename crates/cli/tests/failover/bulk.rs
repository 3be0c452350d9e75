//! Removals of many objects while masters are killed and groups move: they end, and nothing that they removed returns.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use moontide_client::{BulkProgress, BulkRemoval, BulkSelection, PutOptions, Store, StoreError};
use rustix::process::Signal;

use crate::content::Rng;
use crate::harness::{KIB, Process, STEP_TIMEOUT, sized, until, words};
use crate::masters_harness::MasterCluster;
use crate::readers::{Got, Object, Way, put_all, read, replicas};

const NODES: usize = 3;

/// Several masters, and nodes with a disk each.
struct BulkCluster(MasterCluster);

impl BulkCluster {
    /// Returns `None` without `etcd`.
    fn start(masters: usize) -> Option<BulkCluster> {
        let mut cluster = BulkCluster(MasterCluster::start(masters, 0)?);
        for at in 0..NODES {
            let node = cluster.start_node(at);
            cluster.0.cluster.nodes.push(node);
        }
        cluster.wait();
        Some(cluster)
    }

    /// Starts a node with its address, its id and its disk.
    fn start_node(&self, at: usize) -> Process {
        let (folder, name) = (self.0.cluster.folder(), format!("node-{at}"));
        let nodes = &self.0.cluster.nodes;
        let listen =
            nodes.get(at).map_or_else(crate::harness::free_address, |node| node.printed("tcp").into());
        let all = words(&format!(
            "node --master {} --node-id {:016x} --memory-bytes 64MiB --admin-listen 127.0.0.1:0 --listen {listen} \
             --shm-socket {}.sock --disk-dir {} --disk-limit 256MiB --disk-staging 16MiB",
            self.0.addresses(),
            0xb01c + at as u64,
            folder.join(&name).display(),
            folder.join(format!("disk-{at}")).display(),
        ));
        Process::start(folder, &name, &[], &all, "ready")
    }

    /// Waits until all nodes are in sync with all masters.
    #[track_caller]
    fn wait(&self) {
        self.0.wait_until_sure();
        self.0.wait_for_nodes();
        until("all nodes are in sync, with their disks", STEP_TIMEOUT, || {
            self.0.masters().all(|(_, master)| master.metrics().master("disks") == NODES as u64)
                && self.0.cluster.nodes.iter().all(|node| node.metrics().node("synced") == 1)
        });
    }

    /// Kills all processes, and starts them again.
    fn restart_all(&mut self) {
        let masters: Vec<usize> = self.0.masters().map(|(number, _)| number).collect();
        masters.iter().for_each(|&number| self.0.kill_master(number));
        self.0.cluster.nodes.iter_mut().for_each(Process::kill);
        masters.iter().for_each(|&number| self.0.restart_master(number));
        for at in 0..NODES {
            let node = self.start_node(at);
            self.0.cluster.nodes[at] = node;
        }
        self.wait();
    }
}

/// A removal in the background, with the number of objects that it has removed so far.
struct Removal {
    thread: JoinHandle<Result<BulkRemoval, StoreError>>,
    progress: Arc<AtomicU64>,
}

impl Removal {
    fn start(store: Store, selection: BulkSelection) -> Removal {
        let progress = Arc::new(AtomicU64::new(0));
        let seen = Arc::clone(&progress);
        let run = move || {
            store.remove_selected(
                &selection,
                true,
                STEP_TIMEOUT,
                |BulkProgress { removed, groups, groups_done, .. }| {
                    assert!(groups_done <= groups);
                    seen.store(removed, Ordering::Relaxed);
                },
            )
        };
        Removal { thread: std::thread::spawn(run), progress }
    }

    /// Waits until it has removed some objects. It cannot be done as long as a node with some of them is stopped.
    #[track_caller]
    fn wait_until_it_runs(&self) {
        until("the removal runs", STEP_TIMEOUT, || self.progress.load(Ordering::Relaxed) > 0);
        assert!(!self.thread.is_finished());
    }

    #[track_caller]
    fn wait_until_done(self, what: &str) {
        let removal = self.thread.join().expect("no panic").unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(removal.kept, 0, "{what}");
        println!("{what}: {removal:?}");
    }
}

fn make(name: &str, count: usize, rng: &mut Rng) -> Vec<Object> {
    (0..count).map(|n| Object::new(name, n, rng, KIB..60 * KIB)).collect()
}

fn keys(objects: &[Object]) -> Vec<&[u8]> {
    objects.iter().map(Object::key).collect()
}

/// Asserts that no object can be seen in any way.
#[track_caller]
fn check_gone(cluster: &BulkCluster, objects: &[Object], when: &str) {
    let store = cluster.0.relaxed();
    let keys = keys(objects);
    for (object, found) in objects.iter().zip(store.exists_batch(&keys)) {
        assert!(!found.expect("an answer"), "{} exists {when}", object.key);
    }
    for (object, got) in objects.iter().zip(store.get_batch(&keys)) {
        assert!(got.expect("an answer").is_none(), "{} is read {when}", object.key);
    }
    let (mut listed, mut cursor) = (vec![], vec![]);
    loop {
        let page = store.list(b"", &cursor, 1000).expect("a page");
        listed.extend(page.keys);
        cursor = page.next;
        if cursor.is_empty() {
            break;
        }
    }
    let back: Vec<_> = objects.iter().filter(|object| listed.iter().any(|key| key == object.key())).collect();
    assert!(back.is_empty(), "{} objects are listed {when}", back.len());
}

#[test]
fn removals_of_many_objects_follow_groups_and_nothing_returns() {
    let mut rng = Rng::seeded();
    let Some(mut cluster) = BulkCluster::start(3) else { return };
    let count = sized(150, 1500);
    let (kept, mut gone) = (make("kept", count, &mut rng), vec![]);
    let store = cluster.0.relaxed();
    put_all(&store, &kept, &PutOptions::default());
    for round in ["a master is killed", "groups are handed to a master that joins"] {
        let letter = if round.starts_with("a ") { "k" } else { "j" };
        let by_prefix = make(&format!("prefix-{letter}"), count, &mut rng);
        let by_regex = make(&format!("regex-{letter}"), count, &mut rng);
        put_all(&store, &by_prefix, &PutOptions::default());
        put_all(&store, &by_regex, &replicas(2));
        // Some are on disks only, some in memory only, some in both.
        store.evict(rng.within(0, 60) as u32).expect("an eviction");

        // A node that does not answer keeps both removals from ending.
        cluster.0.cluster.nodes[0].signal(Signal::STOP);
        let stopped_at = Instant::now();
        let removals = [
            Removal::start(
                cluster.0.relaxed(),
                BulkSelection::Prefix(format!("prefix-{letter}").into_bytes()),
            ),
            Removal::start(cluster.0.relaxed(), BulkSelection::Regex(format!("^regex-{letter}.*[0-9]$"))),
        ];
        removals.iter().for_each(Removal::wait_until_it_runs);
        if letter == "k" {
            let (most_loaded, groups) = cluster.0.most_loaded();
            cluster.0.kill_master(most_loaded);
            println!("master {most_loaded} with {groups} groups is killed");
            gone.push(most_loaded);
        } else {
            cluster.0.restart_master(gone.pop().expect("the killed master"));
            cluster.0.wait_for_shares();
        }
        println!("{round}: the node was stopped for {:?}", stopped_at.elapsed());
        cluster.0.cluster.nodes[0].signal(Signal::CONT);
        for removal in removals {
            removal.wait_until_done(round);
        }
        for objects in [&by_prefix, &by_regex] {
            check_gone(&cluster, objects, round);
        }
        // Durably: the processes know nothing any more.
        cluster.restart_all();
        for objects in [&by_prefix, &by_regex] {
            check_gone(&cluster, objects, &format!("after a restart of everything, when {round}"));
        }
    }
    // Also when nodes have had time to report everything.
    std::thread::sleep(Duration::from_millis(500));
    let there = kept.iter().filter(|object| match read(&store, Way::Copy, object) {
        Got::Right => true,
        // It was only in the memory of a killed node.
        Got::Miss => false,
        Got::Failed(error) => panic!("{}: {error}", object.key),
    });
    println!("{} of {} others exist", there.count(), kept.len());
    drop(store);
    cluster.0.end();
}

#[test]
fn operators_calls_cover_all_masters() {
    let mut rng = Rng::seeded();
    let Some(cluster) = BulkCluster::start(3) else { return };
    let store = cluster.0.relaxed();
    let objects = make("object", 200, &mut rng);
    put_all(&store, &objects, &PutOptions::default());
    store.set_tenant_quota("default", 1 << 30, 1000).expect("a quota");
    until("all masters know the quota", STEP_TIMEOUT, || {
        cluster
            .0
            .masters()
            .all(|(_, master)| master.page("/get_all_tenants").contains("\"objects_max\":1000"))
    });
    let tenants = store.tenants().expect("tenants");
    let own = tenants.iter().find(|tenant| tenant.name == "default").expect("the tenant of the objects");
    assert_eq!((own.objects, own.objects_max), (200, 1000), "summed over the masters");
    let segments = store.segments(None).expect("segments");
    assert_eq!(segments.len(), NODES * crate::masters_harness::GROUPS);

    let pinned = &objects[..20];
    let set = store.set_pin(&keys(pinned), moontide_client::PinClass::Hard);
    assert!(set.into_iter().all(|set| set.expect("an answer")));
    let evicted = store.evict(0).expect("an eviction");
    assert_eq!(evicted.objects, 180, "of the groups of all masters, without the pinned ones");
    let pins = store.stat_batch(&keys(&objects)).into_iter().map(|info| info.expect("an answer"));
    let pins = pins.filter(|info| info.as_ref().is_some_and(|info| info.pin as u8 == 2));
    assert_eq!(pins.count(), 20);
    drop(store);
    cluster.0.end();
}
