//! Handshake of shm clients: accepted and rejected clients, and detection of their exit.

mod common;
#[path = "../../types/tests/support/not_run.rs"]
mod not_run;

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{TestNode, now};
use moontide_heap::{
    ExitMonitor, LEDGERS_PER_PROCESS_MAX, Liveness, Lookup, RawMessage, ShmError, ShmListener, ShmMessage,
    connect,
};
use moontide_types::{ClientId, ErrorCode};
use not_run::not_run;
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType,
};
use rustix::process::{PidfdFlags, pidfd_open};

const TIMEOUT: Duration = Duration::from_secs(5);

fn connect_raw(path: &Path) -> OwnedFd {
    let socket =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .unwrap();
    rustix::net::connect(&socket, &SocketAddrUnix::new(path).unwrap()).unwrap();
    socket
}

fn send(socket: &OwnedFd, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
    let mut ancillary = SendAncillaryBuffer::new(&mut space);
    assert!(descriptors.is_empty() || ancillary.push(SendAncillaryMessage::ScmRights(descriptors)));
    rustix::net::sendmsg(socket, &[IoSlice::new(bytes)], &mut ancillary, SendFlags::NOSIGNAL).unwrap();
}

fn reply(socket: &OwnedFd) -> ShmMessage {
    let mut bytes = [0; RawMessage::BYTES];
    let (len, _) = rustix::net::recv(socket, &mut bytes[..], rustix::net::RecvFlags::empty()).unwrap();
    ShmMessage::decode(&bytes[..len]).unwrap()
}

/// Serializes the tests of this file: one of them counts the process's descriptors.
fn serialize() -> std::sync::MutexGuard<'static, ()> {
    static LOCK: std::sync::Mutex<()> = std::sync::Mutex::new(());
    LOCK.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn descriptors_open() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn client_with_pidfd_of_another_process_is_rejected() {
    let _serial = serialize();
    let node = TestNode::new(1, 4, 64 << 10);
    let (listener, path) = node.bind_listener("pidfd");
    let mut child = Command::new("sleep").arg("60").spawn().unwrap();
    let child_pid = rustix::process::Pid::from_child(&child);
    let pidfd = pidfd_open(child_pid, PidfdFlags::empty()).unwrap();
    let hello = ShmMessage::Hello { pid: std::process::id() }.encode();
    for wrong in [pidfd.as_fd(), std::io::stdin().as_fd()] {
        let socket = connect_raw(&path);
        send(&socket, &hello, &[wrong]);
        let rejected = listener.handshake(listener.accept().unwrap(), &node.heap).unwrap_err();
        assert!(matches!(rejected, ShmError::Pidfd { .. }), "{rejected}");
        assert_eq!(reply(&socket), ShmMessage::Rejected(ErrorCode::PermissionDenied));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(node.heap.ledgers().clients().is_empty(), "a rejected client got a ledger");
}

#[test]
fn malformed_or_silent_handshake_fails_in_time_without_leaks() {
    let _serial = serialize();
    let node = TestNode::new(1, 4, 64 << 10);
    let (listener, path) = node.bind_listener("nonsense");
    let mine = pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).unwrap();
    let hello = ShmMessage::Hello { pid: 1 }.encode();
    let rejection = ShmMessage::Rejected(ErrorCode::Busy).encode();
    let before = descriptors_open();
    let cases: [(&str, &[u8], usize); 6] = [
        ("garbage", b"GET / HTTP/1.1", 0),
        ("too long", &[0; 4096], 0),
        ("no pidfd", &hello, 0),
        ("two descriptors", &hello, 2),
        ("many descriptors", &hello, 8),
        ("another message", &rejection, 1),
    ];
    for (name, bytes, descriptors) in cases {
        let socket = connect_raw(&path);
        send(&socket, bytes, &vec![mine.as_fd(); descriptors]);
        let rejected = listener.handshake(listener.accept().unwrap(), &node.heap);
        assert!(rejected.is_err(), "{name}");
    }
    let started = Instant::now();
    let silent = connect_raw(&path);
    assert!(listener.handshake(listener.accept().unwrap(), &node.heap).is_err());
    assert!(started.elapsed() < Duration::from_secs(4), "a silent client blocked the listener for too long");
    drop(silent);
    assert_eq!(descriptors_open(), before, "descriptors leaked");
    assert!(node.heap.ledgers().clients().is_empty());
}

#[test]
fn connect_to_missing_node_fails_immediately() {
    let _serial = serialize();
    let started = Instant::now();
    let path = std::env::temp_dir().join("moontide-no-such-node");
    // SAFETY: there is no node to share memory with.
    let error = unsafe { connect(&path, TIMEOUT, u64::MAX) }.unwrap_err();
    assert!(error.to_string().contains("is it running?"), "{error}");
    assert!(started.elapsed() < Duration::from_secs(1));
    let long = std::env::temp_dir().join("x".repeat(120));
    // SAFETY: as above.
    assert!(matches!(unsafe { connect(&long, TIMEOUT, u64::MAX) }.unwrap_err(), ShmError::Path));
}

/// Not a test: body of the child processes of this file, enabled by the environment variable.
#[test]
fn child() {
    let Ok(path) = std::env::var("MOONTIDE_TEST_SHM_SOCKET") else { return };
    // SAFETY: the node is this test's parent.
    match unsafe { connect(Path::new(&path), TIMEOUT, u64::MAX) } {
        Ok((local, _socket)) => {
            println!("connected as client {}", local.client());
            std::thread::sleep(Duration::from_secs(60));
        }
        Err(error) => println!("rejected: {error}"),
    }
}

fn child_command(path: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "child", "--nocapture"])
        .env("MOONTIDE_TEST_SHM_SOCKET", path)
        .stdout(Stdio::piped());
    command
}

#[test]
fn client_of_another_user_is_rejected() {
    let _serial = serialize();
    if !rustix::process::getuid().is_root() {
        return not_run("starting a process of another user needs root");
    }
    let node = TestNode::new(1, 4, 64 << 10);
    let (listener, path) = node.bind_listener("user");
    // The socket itself allows all users here, so that the node is what rejects.
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    // The test's binary may be where another user cannot access it: run a copy.
    let copy = std::env::temp_dir().join(format!("moontide-shm-listener-{}", std::process::id()));
    std::fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
    let mut command = Command::new(&copy);
    command.args(["--exact", "child", "--nocapture"]).env("MOONTIDE_TEST_SHM_SOCKET", &path);
    let child = command.stdout(Stdio::piped()).uid(65534).gid(65534).spawn().unwrap();
    let rejected = listener.handshake(listener.accept().unwrap(), &node.heap).unwrap_err();
    assert!(matches!(rejected, ShmError::User { uid: 65534, .. }), "{rejected}");
    let output = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
    std::fs::remove_file(&copy).unwrap();
    assert!(output.contains("rejected") && output.contains("PermissionDenied"), "{output}");
}

/// Not a test: body of a child process that listens in place of a node.
#[test]
fn impostor() {
    let Ok(path) = std::env::var("MOONTIDE_TEST_IMPOSTOR") else { return };
    let listener =
        rustix::net::socket_with(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)
            .unwrap();
    rustix::net::bind(&listener, &SocketAddrUnix::new(Path::new(&path)).unwrap()).unwrap();
    rustix::net::listen(&listener, 1).unwrap();
    println!("listening");
    let socket = rustix::net::accept(&listener).unwrap();
    let received =
        rustix::net::recv(&socket, &mut [0; RawMessage::BYTES][..], rustix::net::RecvFlags::empty());
    println!("received {} bytes", received.unwrap().0);
}

#[test]
fn socket_of_another_user_gets_nothing_from_client() {
    // Failure: a client sent its Hello to any process that listened at the path of a node's socket, and mapped what it got.
    use std::io::{BufRead, BufReader};
    let _serial = serialize();
    if !rustix::process::getuid().is_root() {
        return not_run("starting a process of another user needs root");
    }
    let path = std::env::temp_dir().join(format!("moontide-impostor-{}.sock", std::process::id()));
    let copy = std::env::temp_dir().join(format!("moontide-impostor-{}", std::process::id()));
    std::fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
    let mut command = Command::new(&copy);
    command.args(["--exact", "impostor", "--nocapture"]).env("MOONTIDE_TEST_IMPOSTOR", &path);
    let mut child = command.stdout(Stdio::piped()).uid(65534).gid(65534).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.contains("listening")));
    // SAFETY: nothing is mapped.
    let refused = unsafe { connect(&path, TIMEOUT, u64::MAX) }.unwrap_err();
    assert!(matches!(refused, ShmError::NodeUser { uid: 65534, .. }), "{refused}");
    assert!(lines.any(|line| line.contains("received 0 bytes")), "the client sent something");
    child.wait().unwrap();
    std::fs::remove_file(&copy).unwrap();
    std::fs::remove_file(&path).unwrap();
}

#[test]
fn file_of_the_socket_is_private() {
    let _serial = serialize();
    let node = TestNode::new(1, 4, 64 << 10);
    // Of the whole process; the tests of this file run one at a time.
    let umask = rustix::process::umask(rustix::fs::Mode::empty());
    let (_listener, path) = node.bind_listener("mode");
    rustix::process::umask(umask);
    let mode = std::os::unix::fs::PermissionsExt::mode(&std::fs::metadata(&path).unwrap().permissions());
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn client_exit_is_detected_by_pidfd_not_by_socket() {
    let _serial = serialize();
    let node = TestNode::new(1, 4, 64 << 10);
    let (listener, path) = node.bind_listener("exit");
    let monitor = ExitMonitor::new().unwrap();
    let mut child = child_command(&path).spawn().unwrap();
    let connected = listener.handshake(listener.accept().unwrap(), &node.heap).unwrap();
    assert_eq!(connected.pid, child.id());
    let client = connected.ledger.client();
    monitor.watch(client, connected.pidfd).unwrap();
    drop(connected.socket);
    assert_eq!(monitor.wait(Duration::from_millis(200)).unwrap(), [], "a closed socket is not an exit");
    let started = Instant::now();
    child.kill().unwrap();
    let exited = monitor.wait(TIMEOUT).unwrap();
    assert_eq!(exited.iter().map(|exited| exited.client()).collect::<Vec<_>>(), [client]);
    assert!(started.elapsed() < Duration::from_secs(1));
    child.wait().unwrap();
    assert_eq!(monitor.wait(Duration::from_millis(50)).unwrap(), [], "an exit is reported once");
    node.heap.client_exited(exited[0]);
    assert!(node.heap.ledgers().clients().is_empty());
}

#[test]
fn forked_child_cannot_use_or_release_parent_guards() {
    let _serial = serialize();
    let node = TestNode::new(1, 8, 1 << 20);
    let local = node.connect("fork");
    let mut reader = local.reader().unwrap();
    let object = node.put(b"k", &[7; 5000]);
    let Lookup::Hit(guard) = reader.get(&object.id, now()) else { panic!("a miss") };
    // SAFETY: the child calls only the heap and _exit.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let closed = matches!(reader.get(&object.id, now()), Lookup::Closed);
        let no_reader = local.reader().is_none();
        let no_claim = reader.claim(object.segment, object.slot, object.epoch).is_none();
        let no_clone = reader.clone_guard(&guard).is_none();
        let nothing_pinned = reader.pinned_bytes() == 0;
        let node_absent =
            local.board().liveness(now()) == Liveness::Absent && !local.board().is_usable(now());
        drop(guard);
        drop(reader);
        drop(local);
        let checks = [closed, no_reader, no_claim, no_clone, nothing_pinned, node_absent];
        let failed = checks.iter().position(|&ok| !ok);
        // SAFETY: ends the child without running the parent's destructors.
        unsafe { libc::_exit(failed.map_or(0, |n| n as i32 + 1)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child forked above.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    assert_eq!(status, 0, "the child failed check {} or died of signal {}", status >> 8, status & 0x7f);
    // The child dropped its copy of the guard; the parent's is still valid.
    let _ = node.kill(&object);
    assert_eq!(node.reclaim().freed.len(), 0);
    assert_eq!(guard.bytes(), [7; 5000]);
    drop(guard);
    assert_eq!(node.reclaim().freed.len(), 1);
}

#[test]
fn client_ids_are_sequential_and_limited_per_process() {
    let _serial = serialize();
    let node = TestNode::new(1, 4, 64 << 10);
    let (listener, path) = node.bind_listener("many");
    for number in 1..=LEDGERS_PER_PROCESS_MAX as u32 + 1 {
        let connected = std::thread::scope(|scope| {
            scope.spawn(|| {
                listener.handshake(listener.accept().unwrap(), &node.heap).map(|client| client.pid)
            });
            // SAFETY: node and client are this test.
            unsafe { connect(&path, TIMEOUT, u64::MAX) }
        });
        match connected {
            Ok((local, _)) => assert_eq!(local.client(), ClientId(number)),
            Err(ShmError::Refused(code)) => {
                assert_eq!((code, number as usize), (ErrorCode::Busy, LEDGERS_PER_PROCESS_MAX + 1));
            }
            Err(other) => panic!("{other}"),
        }
    }
    assert_eq!(node.heap.ledgers().clients().len(), LEDGERS_PER_PROCESS_MAX);
}

#[test]
fn bind_replaces_stale_socket_but_not_one_in_use() {
    let _serial = serialize();
    let node = TestNode::new(1, 4, 64 << 10);
    let (listener, path) = node.bind_listener("stale");
    // SAFETY: no client connects.
    let second = unsafe { ShmListener::bind(&path, &[], TIMEOUT) };
    assert!(second.unwrap_err().to_string().contains("is another node using it?"));
    drop(listener);
    // SAFETY: as above.
    assert!(unsafe { ShmListener::bind(&path, &[], TIMEOUT) }.is_ok());
}

#[test]
fn client_with_pidfd_of_a_thread_is_rejected() {
    let _serial = serialize();
    let node = TestNode::new(1, 4, 64 << 10);
    let (listener, path) = node.bind_listener("thread");
    // PIDFD_THREAD; rustix has no name for it.
    // SAFETY: creates a descriptor of this process.
    let pidfd = unsafe { libc::syscall(libc::SYS_pidfd_open, std::process::id(), libc::O_EXCL) };
    if pidfd < 0 {
        return not_run("pidfds of threads need Linux 6.9");
    }
    // SAFETY: created just above, with no other owner.
    let pidfd = unsafe { <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(pidfd as i32) };
    let socket = connect_raw(&path);
    send(&socket, &ShmMessage::Hello { pid: std::process::id() }.encode(), &[pidfd.as_fd()]);
    let rejected = listener.handshake(listener.accept().unwrap(), &node.heap).unwrap_err();
    assert!(matches!(rejected, ShmError::Pidfd { .. }), "{rejected}");
}
