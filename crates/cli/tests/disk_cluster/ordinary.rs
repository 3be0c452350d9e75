//! A node of an ordinary user: little memory may be locked, and a container may refuse io_uring. It works, and says once
//! what it goes without.
//!
//! Needs root to become somebody else, and says so and passes where that is missing.

use std::io;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt;
use std::process::Command;

use moontide_disk::BackendKind;

use crate::common::{moontide, run_command};
use crate::content::Rng;
use crate::kit::{KIB, Process};
use crate::readers::Object;
use crate::scene::{Scene, Sizes, on_disk, put_fast, read_all};

const NOBODY: u32 = 65534;
const LOCKED_MAX: u64 = 8 << 20;
const SIZES: Sizes = Sizes { memory_mib: 24, limit_mib: 512, staging_mib: 64 };

fn limit_locked_memory() -> io::Result<()> {
    use rustix::process::{Resource, Rlimit, setrlimit};
    let limit = Rlimit { current: Some(LOCKED_MAX), maximum: Some(LOCKED_MAX) };
    Ok(setrlimit(Resource::Memlock, limit)?)
}

/// From now on the kernel refuses this process a ring, as the usual filters of containers do.
fn forbid_io_uring() -> io::Result<()> {
    let statement = |code: u32, value: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k: value };
    let equal = |value: u32| libc::sock_filter { jf: 1, ..statement(libc::BPF_JMP | libc::BPF_JEQ, value) };
    let answer = |value: u32| statement(libc::BPF_RET, value);
    let mut filter = [
        // The first word of the data is the number of the system call.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        equal(libc::SYS_io_uring_setup as u32),
        answer(libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        answer(libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program outlives the calls, which change nothing but what the kernel allows this process.
    let done = unsafe {
        libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0
            && libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program) == 0
    };
    if done { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// A node of nobody, under a restriction; what it warned of.
fn run_as_nobody(engine: &str, restrict: fn() -> io::Result<()>) -> Option<Vec<String>> {
    if !rustix::process::geteuid().is_root() {
        println!("passed over: it becomes nobody, for which it needs to be root");
        return None;
    }
    let mut rng = Rng::seeded();
    let mut scene = Scene::without_node(BackendKind::Bucket, SIZES, &format!("--disk-engine {engine}"));
    for folder in [scene.cluster.folder(), scene.disk()] {
        chown(folder, Some(NOBODY), Some(NOBODY)).expect("root gives it away");
    }
    let mut may_start = Command::new(env!("CARGO_BIN_EXE_moontide"));
    if may_start.arg("--version").uid(NOBODY).gid(NOBODY).output().is_err() {
        println!("passed over: nobody may not start {}", env!("CARGO_BIN_EXE_moontide"));
        return None;
    }
    scene.cluster.add_node_prepared(&[], &|command| {
        command.uid(NOBODY).gid(NOBODY);
        // SAFETY: it makes system calls, with memory of its own stack only.
        unsafe { command.pre_exec(restrict) };
    });
    scene.cluster.wait_for_nodes(1);
    let store = scene.store(false);
    let objects: Vec<Object> =
        (0..160).map(|n| Object::new("ordinary", n, &mut rng, 256 * KIB..768 * KIB)).collect();
    put_fast(&[&store], &objects);
    read_all(&store, &objects, &format!("{engine} as nobody"));
    assert!(store.metrics().stats().hits_disk > 0, "nothing was read from disk");
    // Another process of this user maps the node's memory; those of others are not let in.
    for object in on_disk(&store, &objects).iter().take(3) {
        let mut get = moontide(&["get", &object.key, "--master", scene.cluster.grpc()]);
        get.uid(NOBODY).gid(NOBODY);
        let ended = run_command(get, b"");
        assert_eq!(ended.code, 0, "{}: {}", object.key, ended.err);
        object.check(&ended.out, "as nobody");
    }
    let warnings = warnings(&scene.cluster.nodes[0]);
    println!("{warnings:#?}");
    scene.cluster.end();
    Some(warnings)
}

fn warnings(node: &Process) -> Vec<String> {
    node.log_text().lines().filter(|line| line.contains(" WARN ")).map(str::to_owned).collect()
}

#[test]
fn an_ordinary_user_has_rings_without_registered_memory() {
    let Some(warnings) = run_as_nobody("uring", limit_locked_memory) else { return };
    let [one] = &warnings[..] else { panic!("one warning was expected: {warnings:#?}") };
    if one.contains("io_uring is not available") {
        println!("passed over: there is no io_uring here, so that nothing could be registered");
        return;
    }
    assert!(one.contains("RLIMIT_MEMLOCK"), "{one}");
}

#[test]
fn without_io_uring_a_node_writes_and_reads_by_posix() {
    let Some(warnings) = run_as_nobody("auto", forbid_io_uring) else { return };
    assert!(matches!(&warnings[..], [one] if one.contains("io_uring")), "{warnings:#?}");
}
