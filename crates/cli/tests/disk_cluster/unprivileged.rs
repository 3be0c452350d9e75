//! A node of an unprivileged user, with little lockable memory or without io_uring, as in a container. It works, and
//! logs one warning about the missing feature.
//!
//! Needs root to change the user; otherwise the tests are not run, which is a failure under `CI=true`.

use std::io;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::process::Command;

use moontide_disk::BackendKind;

use crate::common::run_command;
use crate::content::Rng;
use crate::disk_harness::{DiskCluster, Sizes, on_disk, put_fast, read_all};
use crate::harness::{KIB, Process};
use crate::not_run::not_run;
use crate::readers::Object;

const NOBODY: u32 = 65534;
const LOCKED_MAX: u64 = 8 << 20;
const SIZES: Sizes = Sizes { memory_mib: 24, limit_mib: 512, staging_mib: 64 };

fn limit_locked_memory() -> io::Result<()> {
    use rustix::process::{Resource, Rlimit, setrlimit};
    let limit = Rlimit { current: Some(LOCKED_MAX), maximum: Some(LOCKED_MAX) };
    Ok(setrlimit(Resource::Memlock, limit)?)
}

/// Makes the kernel refuse io_uring_setup in this process, as the usual seccomp filters of containers do.
fn forbid_io_uring() -> io::Result<()> {
    let statement = |code: u32, value: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k: value };
    let equal = |value: u32| libc::sock_filter { jf: 1, ..statement(libc::BPF_JMP | libc::BPF_JEQ, value) };
    let ret = |value: u32| statement(libc::BPF_RET, value);
    let mut filter = [
        // The first word of the data is the number of the system call.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        equal(libc::SYS_io_uring_setup as u32),
        ret(libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        ret(libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program outlives the calls, which change nothing but what the kernel allows this process.
    let done = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program) == 0
    };
    if done { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Runs a node as the user nobody, under a restriction; returns its warnings.
fn run_as_nobody(engine: &str, restrict: fn() -> io::Result<()>) -> Option<Vec<String>> {
    if !rustix::process::geteuid().is_root() {
        not_run("changing the user needs root");
        return None;
    }
    let mut rng = Rng::seeded();
    let mut cluster =
        DiskCluster::without_node(BackendKind::Bucket, SIZES, &format!("--disk-io-engine {engine}"));
    for folder in [cluster.cluster.folder(), cluster.disk()] {
        chown(folder, Some(NOBODY), Some(NOBODY)).expect("root may change the owner");
    }
    // The binary may be where another user cannot access it: run a copy.
    let copy = cluster.cluster.folder().join("moontide");
    std::fs::copy(env!("CARGO_BIN_EXE_moontide"), &copy).expect("the folder has space");
    let script = format!("shift; exec '{}' \"$@\"", copy.display());
    let through = ["sh", "-c", &script, "sh"].map(str::to_owned);
    cluster.cluster.add_node_prepared(&through, &|command| {
        command.uid(NOBODY).gid(NOBODY);
        // SAFETY: it only makes system calls, with memory of its own stack.
        unsafe { command.pre_exec(restrict) };
    });
    cluster.cluster.wait_for_nodes(1);
    let store = cluster.store(false);
    let objects: Vec<Object> =
        (0..160).map(|n| Object::new("ordinary", n, &mut rng, 256 * KIB..768 * KIB)).collect();
    put_fast(&[&store], &objects);
    read_all(&store, &objects, &format!("{engine} as nobody"));
    assert!(store.metrics().stats().hits_disk > 0, "nothing was read from disk");
    // Another process of this user maps the node's memory; processes of other users are rejected.
    for object in on_disk(&store, &objects).iter().take(3) {
        let mut get = Command::new(&copy);
        get.args(["get", &object.key, "--master", cluster.cluster.grpc()]).env_clear();
        get.uid(NOBODY).gid(NOBODY);
        let ended = run_command(get, b"");
        assert_eq!(ended.code, 0, "{}: {}", object.key, ended.err);
        object.check(&ended.out, "as nobody");
    }
    let warnings = warnings(&cluster.cluster.nodes[0]);
    println!("{warnings:#?}");
    cluster.cluster.end();
    Some(warnings)
}

fn warnings(node: &Process) -> Vec<String> {
    node.log_text().lines().filter(|line| line.contains(" WARN ")).map(str::to_owned).collect()
}

#[test]
fn unprivileged_node_uses_io_uring_without_registered_memory() {
    let Some(warnings) = run_as_nobody("uring", limit_locked_memory) else { return };
    let [one] = &warnings[..] else { panic!("one warning was expected: {warnings:#?}") };
    if one.contains("io_uring is not available") {
        return not_run("no io_uring, so that no memory can be registered");
    }
    assert!(one.contains("RLIMIT_MEMLOCK"), "{one}");
}

#[test]
fn node_without_io_uring_falls_back_to_posix() {
    let Some(warnings) = run_as_nobody("auto", forbid_io_uring) else { return };
    assert!(matches!(&warnings[..], [one] if one.contains("io_uring")), "{warnings:#?}");
}
