//! A node with several disk directories: objects are spread over them and survive restarts; one that fails is excluded, and
//! removed objects do not return with it.

use moontide_disk::BackendKind;

use crate::content::Rng;
use crate::disk_harness::{DiskCluster, RELAXED_TIMEOUT, Sizes, count_existing, on_disk, put_fast, read_all};
use crate::full::may_mount;
use crate::harness::{KIB, Shape, until};
use crate::not_run::not_run;
use crate::readers::Object;

const SIZES: Sizes = Sizes { memory_mib: 24, limit_mib: 256, staging_mib: 16 };

fn objects(count: usize, rng: &mut Rng) -> Vec<Object> {
    (0..count).map(|number| Object::new("several", number, rng, 256 * KIB..768 * KIB)).collect()
}

const DIRECTORIES: [&str; 3] = ["first", "second", "third"];

/// Starts a master and a node with three directories. `through` returns what is put before the command of the node.
fn start(backend: BackendKind, more: &str, through: impl Fn(&str) -> Vec<String>) -> DiskCluster {
    let mut cluster = DiskCluster::with_directories(backend, SIZES, more, Shape::default(), &DIRECTORIES);
    let disk = cluster.disk().display().to_string();
    cluster.cluster.add_node_prepared(&through(&disk), &|_| ());
    cluster.cluster.wait_for_nodes(1);
    cluster
}

#[test]
fn objects_in_several_directories_survive_crash_and_removed_ones_stay_away() {
    for backend in BackendKind::ALL {
        let mut rng = Rng::seeded();
        let mut cluster = start(backend, "", |_| Vec::new());
        let store = cluster.store(false);
        let objects = objects(160, &mut rng);
        put_fast(&[&store], &objects);
        let kept = on_disk(&store, &objects);
        let (removed, kept) = kept.split_at(kept.len() / 4);
        for object in removed {
            store.remove(object.key(), true).expect("the node is there");
        }
        for dir in DIRECTORIES {
            let used = directory_bytes(&cluster.disk().join(dir));
            assert!(used > 4 << 20, "{backend}: {dir} has {used} bytes");
        }
        cluster.kill_and_restart();
        until("objects exist", RELAXED_TIMEOUT, || count_existing(&store, kept) == kept.len());
        read_all(&store, kept, "after the crash");
        assert_eq!(count_existing(&store, removed), 0, "{backend}");
        cluster.cluster.end();
    }
}

fn directory_bytes(dir: &std::path::Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let entries = std::fs::read_dir(dir).expect("the directory exists");
    let sizes = entries.map(|entry| {
        let entry = entry.unwrap();
        match entry.file_type().unwrap().is_dir() {
            true => directory_bytes(&entry.path()),
            false => entry.metadata().unwrap().blocks() * 512,
        }
    });
    sizes.sum()
}

/// A file system without any space left cannot make removals durable.
#[test]
fn directory_that_cannot_store_removals_is_excluded() {
    if !may_mount() {
        return not_run("mounting a file system is not permitted");
    }
    let mut rng = Rng::seeded();
    // The process that fills the file system is in the mount namespace of the node, and waits for a file.
    let cluster = start(BackendKind::File, "--disk-exclude-after 2s", |disk| {
        let script = format!(
            "mkdir -p {disk}/second && mount -t tmpfs -o size=64m none {disk}/second && {{ \
             (while [ ! -e {disk}/fill ]; do sleep 0.05; done; head -c 1G /dev/zero > {disk}/second/ballast; \
             touch {disk}/filled) & }} && exec \"$@\""
        );
        ["unshare", "--mount", "sh", "-c", &script, "sh"].map(str::to_owned).to_vec()
    });
    let store = cluster.store(false);
    let objects = objects(160, &mut rng);
    put_fast(&[&store], &objects);
    let before = on_disk(&store, &objects);
    assert!(before.len() > 40, "{} objects are on disk", before.len());
    std::fs::write(cluster.disk().join("fill"), "").unwrap();
    until("the file system is full", RELAXED_TIMEOUT, || cluster.disk().join("filled").exists());
    // Removals fail until the directory is excluded. Then they are certain.
    let mut removed = Vec::new();
    for object in &before[..20] {
        until("the removal is certain", RELAXED_TIMEOUT, || store.remove(object.key(), true).is_ok());
        removed.push(object.clone());
    }
    assert_eq!(cluster.node_metrics().node("disk_directories_excluded"), 1);
    let left: Vec<Object> = before[20..].to_vec();
    let existing: Vec<Object> =
        left.iter().filter(|object| store.exists(object.key()).unwrap()).cloned().collect();
    assert!(!existing.is_empty() && existing.len() < left.len(), "{} of {}", existing.len(), left.len());
    read_all(&store, &existing, "after the exclusion");
    assert_eq!(count_existing(&store, &removed), 0);
    let log = cluster.cluster.nodes[0].log_text();
    assert!(log.contains("disk directory excluded"), "{log}");
    let mut errors = log.lines().filter(|line| line.contains(" ERROR ") || line.contains("panicked at"));
    assert!(errors.all(|line| line.contains("cannot write removal to disk")), "{log}");
}
