//! A disk whose removals stall or fail: no removal and no upsert is acknowledged before it is durable, so that a crash
//! of the node brings nothing back.
//!
//! A stall is a disk thread of the node that is stopped with ptrace, as by a sync that takes long. A failure is a full
//! `tmpfs` in a mount namespace of the node, which needs root.

use std::fs;
use std::io::Write;
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use moontide_client::{PutOptions, PutOutcome, Store, StoreConfig};
use moontide_disk::BackendKind;
use moontide_types::ErrorCode;

use crate::content::Rng;
use crate::disk_harness::{DiskCluster, RELAXED_TIMEOUT, Sizes, on_disk, put_fast};
use crate::full::may_mount;
use crate::harness::{KIB, connect, until};
use crate::not_run::not_run;
use crate::readers::Object;

const SIZES: Sizes = Sizes { memory_mib: 16, limit_mib: 256, staging_mib: 16 };

/// Timeout of the calls that must not succeed.
const SHORT: Duration = Duration::from_secs(2);

/// A thread of another process, stopped until this is dropped.
struct StoppedThread {
    resume: mpsc::Sender<()>,
    tracer: Option<JoinHandle<()>>,
}

impl StoppedThread {
    /// Stops the thread of this name. The kernel keeps 15 characters of it.
    fn stop(pid: u32, name: &str) -> StoppedThread {
        let tasks = fs::read_dir(format!("/proc/{pid}/task")).expect("the process runs");
        let is_named = |task: &fs::DirEntry| {
            fs::read_to_string(task.path().join("comm")).is_ok_and(|comm| comm.trim() == name)
        };
        let task = tasks.map(|task| task.expect("a task")).find(is_named).expect("the thread exists");
        let tid: i32 = task.file_name().to_str().and_then(|tid| tid.parse().ok()).expect("a number");
        let ((resume, resumed), (stopped, is_stopped)) = (mpsc::channel(), mpsc::channel());
        // All requests of a tracer come from one thread.
        let tracer = std::thread::spawn(move || {
            trace(libc::PTRACE_SEIZE, tid);
            trace(libc::PTRACE_INTERRUPT, tid);
            let mut status = 0;
            // SAFETY: writes to `status` only.
            #[expect(unsafe_code, reason = "no safe interface")]
            let waited = unsafe { libc::waitpid(tid, &mut status, libc::__WALL) };
            assert_eq!(waited, tid, "{}", std::io::Error::last_os_error());
            stopped.send(()).expect("the test waits");
            let _ = resumed.recv(); // or the test has ended
            trace(libc::PTRACE_DETACH, tid);
        });
        is_stopped.recv().expect("the thread stops");
        StoppedThread { resume, tracer: Some(tracer) }
    }
}

impl Drop for StoppedThread {
    fn drop(&mut self) {
        let _ = self.resume.send(());
        let ended = self.tracer.take().map(JoinHandle::join);
        assert!(std::thread::panicking() || ended.is_some_and(|ended| ended.is_ok()));
    }
}

fn trace(request: libc::c_uint, tid: i32) {
    // SAFETY: these requests read and write no memory of this process.
    #[expect(unsafe_code, reason = "no safe interface")]
    let result = unsafe { libc::ptrace(request, tid, 0, 0) };
    assert_eq!(result, 0, "ptrace {request} of {tid}: {}", std::io::Error::last_os_error());
}

fn short_store(cluster: &DiskCluster) -> Store {
    let config =
        StoreConfig { shm: false, timeout: SHORT, location_cache_entries: 0, ..cluster.cluster.config() };
    connect(config)
}

/// Regression: the node answered Reclaim while the tombstone of the Kill before it was still to be written, and the
/// master acknowledged the removal; after a crash of the node the object was back, and a replaced version likewise.
#[test]
fn stalled_disk_delays_acknowledgement_of_removal_and_upsert() {
    let mut rng = Rng::seeded();
    let mut cluster = DiskCluster::start(BackendKind::Bucket, SIZES, "");
    let (patient, store) = (cluster.store(false), short_store(&cluster));
    let upsert = PutOptions { upsert: true, ..PutOptions::default() };
    let victims = [
        Object::new("removed", 0, &mut rng, KIB..2 * KIB),
        Object::new("replaced", 0, &mut rng, KIB..2 * KIB),
    ];
    put_fast(&[&patient], &victims);
    // More than the memory, so that the first objects are on disk.
    let filler: Vec<Object> =
        (0..80).map(|n| Object::new("filler", n, &mut rng, 256 * KIB..512 * KIB)).collect();
    put_fast(&[&patient], &filler);
    until("the victims are on disk", RELAXED_TIMEOUT, || on_disk(&patient, &victims).len() == victims.len());
    let [removed, replaced] = &victims;

    let stopped = StoppedThread::stop(cluster.cluster.nodes[0].pid(), "moontide-remova");
    let started = Instant::now();
    let result = store.remove(removed.key(), true);
    assert!(result.is_err(), "a removal that is not durable was acknowledged: {result:?}");
    let result = store.put_with(replaced.key(), &[b"new"], &upsert);
    assert!(
        result.is_err(),
        "an upsert was acknowledged while the removal of the old version is not durable"
    );
    let limit = 2 * SHORT + Duration::from_secs(1);
    assert!(started.elapsed() < limit, "the calls took {:?}", started.elapsed());
    drop(stopped);

    until("the removal is acknowledged", RELAXED_TIMEOUT, || store.remove(removed.key(), true).is_ok());
    until("the upsert is acknowledged", RELAXED_TIMEOUT, || {
        store.put_with(replaced.key(), &[b"new"], &upsert).is_ok_and(|put| put == PutOutcome::Stored)
    });
    cluster.kill_and_restart();
    let store = cluster.store(false);
    // The inventory of the disk is complete when an object that was left alone is back.
    until("the disk is back", RELAXED_TIMEOUT, || !on_disk(&store, &filler).is_empty());
    for _ in 0..20 {
        assert_eq!(store.get(removed.key()).unwrap(), None, "a removed object is back");
        let found = store.get(replaced.key()).unwrap();
        assert!(found.as_ref().is_none_or(|found| found == "new"), "a replaced version is back");
        std::thread::sleep(Duration::from_millis(50));
    }
    cluster.cluster.end();
}

/// Regression: a removal that the full disk could not record was acknowledged.
#[test]
fn full_disk_delays_acknowledgement_of_removal() {
    if !may_mount() {
        return not_run("mounting a file system is not permitted");
    }
    let mut cluster = DiskCluster::without_node(BackendKind::Bucket, SIZES, "");
    let disk = cluster.disk().display().to_string();
    let script = format!("mount -t tmpfs -o size=64m none {disk} && exec \"$@\"");
    let through = ["unshare", "--mount", "sh", "-c", &script, "sh"].map(str::to_owned);
    cluster.cluster.add_node_prepared(&through, &|_| ());
    cluster.cluster.wait_for_nodes(1);
    let (patient, store) = (cluster.store(false), short_store(&cluster));
    assert_eq!(patient.put(b"victim", b"bytes").unwrap(), PutOutcome::Stored);
    // The mount namespace of the node is reachable through /proc.
    let ballast = format!("/proc/{}/root{disk}/ballast", cluster.cluster.nodes[0].pid());
    let mut file = fs::File::create(&ballast).expect("the file system is there");
    while file.write_all(&[0; 4096]).is_ok() {}
    let removed = store.remove(b"victim", true).map_err(|error| error.code());
    assert_eq!(removed, Err(ErrorCode::Pending), "a removal that cannot be written was acknowledged");
    assert_eq!(store.get(b"victim").unwrap(), None, "but no caller finds the object any more");
    let again = store.remove(b"victim", true).map_err(|error| error.code());
    assert!(again.is_err(), "the second removal was acknowledged: {again:?}");
    drop(file);
    fs::remove_file(&ballast).expect("the ballast exists");
    until("the removal is acknowledged", RELAXED_TIMEOUT, || store.remove(b"victim", true).is_ok());
    // Not `end`, which fails if a node has logged an error: this one did.
}
