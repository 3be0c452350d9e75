//! Who gets in at the door, who does not, and what the node notices of those who leave.

mod common;

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use common::{TestNode, now};
use moontide_heap::{DeathWatch, Door, DoorError, JOINS_PER_PROCESS_MAX, Liveness, Lookup, Message, join};
use moontide_types::{ClientId, ErrorCode};
use rustix::net::{
    AddressFamily, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, SocketAddrUnix, SocketFlags,
    SocketType,
};
use rustix::process::{PidfdFlags, pidfd_open};

const TIMEOUT: Duration = Duration::from_secs(5);

fn connect(path: &Path) -> OwnedFd {
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

fn answer(socket: &OwnedFd) -> Message {
    let mut bytes = [0; Message::BYTES];
    let (len, _) = rustix::net::recv(socket, &mut bytes[..], rustix::net::RecvFlags::empty()).unwrap();
    Message::decode(&bytes[..len]).unwrap()
}

/// Tests of this file run one after the other: one of them counts the process's descriptors.
fn alone() -> std::sync::MutexGuard<'static, ()> {
    static TURN: std::sync::Mutex<()> = std::sync::Mutex::new(());
    TURN.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

fn descriptors_open() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

#[test]
fn a_client_that_hands_over_somebody_elses_pidfd_is_refused() {
    let _turn = alone();
    let node = TestNode::new(1, 4, 64 << 10);
    let (door, path) = node.open_door("pidfd");
    let mut child = Command::new("sleep").arg("60").spawn().unwrap();
    let child_pid = rustix::process::Pid::from_child(&child);
    let pidfd = pidfd_open(child_pid, PidfdFlags::empty()).unwrap();
    let hello = Message::Hello { pid: std::process::id() }.encode();
    for wrong in [pidfd.as_fd(), std::io::stdin().as_fd()] {
        let socket = connect(&path);
        send(&socket, &hello, &[wrong]);
        let refused = door.admit(door.accept().unwrap(), &node.heap).unwrap_err();
        assert!(matches!(refused, DoorError::Pidfd { .. }), "{refused}");
        assert_eq!(answer(&socket), Message::Refusal(ErrorCode::PermissionDenied));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(node.heap.ledgers().clients().is_empty(), "nobody got a ledger");
}

#[test]
fn nonsense_and_silence_end_within_the_time_limit_and_leak_nothing() {
    let _turn = alone();
    let node = TestNode::new(1, 4, 64 << 10);
    let (door, path) = node.open_door("nonsense");
    let mine = pidfd_open(rustix::process::getpid(), PidfdFlags::empty()).unwrap();
    let hello = Message::Hello { pid: 1 }.encode();
    let refusal = Message::Refusal(ErrorCode::Busy).encode();
    let before = descriptors_open();
    let cases: [(&str, &[u8], usize); 6] = [
        ("garbage", b"GET / HTTP/1.1", 0),
        ("too long", &[0; 4096], 0),
        ("no pidfd", &hello, 0),
        ("two descriptors", &hello, 2),
        ("many descriptors", &hello, 8),
        ("another message", &refusal, 1),
    ];
    for (name, bytes, descriptors) in cases {
        let socket = connect(&path);
        send(&socket, bytes, &vec![mine.as_fd(); descriptors]);
        let refused = door.admit(door.accept().unwrap(), &node.heap);
        assert!(refused.is_err(), "{name}");
    }
    let started = Instant::now();
    let silent = connect(&path);
    assert!(door.admit(door.accept().unwrap(), &node.heap).is_err());
    assert!(started.elapsed() < Duration::from_secs(4), "a silent client held the door for too long");
    drop(silent);
    assert_eq!(descriptors_open(), before, "descriptors leaked");
    assert!(node.heap.ledgers().clients().is_empty());
}

#[test]
fn a_missing_node_is_reported_at_once() {
    let _turn = alone();
    let started = Instant::now();
    let path = std::env::temp_dir().join("moontide-nobody-is-here");
    // SAFETY: nobody is there to share memory with.
    let refused = unsafe { join(&path, TIMEOUT, u64::MAX) }.unwrap_err();
    assert!(refused.to_string().contains("is it running?"), "{refused}");
    assert!(started.elapsed() < Duration::from_secs(1));
    let long = std::env::temp_dir().join("x".repeat(120));
    // SAFETY: as above.
    assert!(matches!(unsafe { join(&long, TIMEOUT, u64::MAX) }.unwrap_err(), DoorError::Path));
}

/// Not a test: what the child processes of this file run, when told so by the environment.
#[test]
fn child() {
    let Ok(path) = std::env::var("MOONTIDE_TEST_DOOR") else { return };
    // SAFETY: the node is this test's parent.
    match unsafe { join(Path::new(&path), TIMEOUT, u64::MAX) } {
        Ok((local, _socket)) => {
            println!("joined as client {}", local.client());
            std::thread::sleep(Duration::from_secs(60));
        }
        Err(error) => println!("refused: {error}"),
    }
}

fn child_command(path: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["--exact", "child", "--nocapture"]).env("MOONTIDE_TEST_DOOR", path).stdout(Stdio::piped());
    command
}

#[test]
fn a_process_of_another_user_is_refused() {
    let _turn = alone();
    if !rustix::process::getuid().is_root() {
        eprintln!("not run: starting a process of another user needs root");
        return;
    }
    let node = TestNode::new(1, 4, 64 << 10);
    let (door, path) = node.open_door("user");
    // The socket itself lets everyone connect here, so that it is the node that refuses.
    std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o777)).unwrap();
    // The test's binary may lie where another user cannot reach it: run a copy.
    let copy = std::env::temp_dir().join(format!("moontide-door-{}", std::process::id()));
    std::fs::copy(std::env::current_exe().unwrap(), &copy).unwrap();
    let mut command = Command::new(&copy);
    command.args(["--exact", "child", "--nocapture"]).env("MOONTIDE_TEST_DOOR", &path);
    let child = command.stdout(Stdio::piped()).uid(65534).gid(65534).spawn().unwrap();
    let refused = door.admit(door.accept().unwrap(), &node.heap).unwrap_err();
    assert!(matches!(refused, DoorError::User { uid: 65534, .. }), "{refused}");
    let output = String::from_utf8(child.wait_with_output().unwrap().stdout).unwrap();
    std::fs::remove_file(&copy).unwrap();
    assert!(output.contains("refused") && output.contains("PermissionDenied"), "{output}");
}

#[test]
fn the_node_learns_of_a_death_by_the_pidfd_and_not_by_the_socket() {
    let _turn = alone();
    let node = TestNode::new(1, 4, 64 << 10);
    let (door, path) = node.open_door("death");
    let watch = DeathWatch::new().unwrap();
    let mut child = child_command(&path).spawn().unwrap();
    let visitor = door.admit(door.accept().unwrap(), &node.heap).unwrap();
    assert_eq!(visitor.pid, child.id());
    let client = visitor.ledger.client();
    watch.watch(client, visitor.pidfd).unwrap();
    drop(visitor.socket);
    assert_eq!(watch.wait(Duration::from_millis(200)).unwrap(), [], "a closed socket is no death");
    let started = Instant::now();
    child.kill().unwrap();
    let ended = watch.wait(TIMEOUT).unwrap();
    assert_eq!(ended.iter().map(|ended| ended.client()).collect::<Vec<_>>(), [client]);
    assert!(started.elapsed() < Duration::from_secs(1));
    child.wait().unwrap();
    assert_eq!(watch.wait(Duration::from_millis(50)).unwrap(), [], "reported once");
    node.heap.client_died(ended[0]);
    assert!(node.heap.ledgers().clients().is_empty());
}

#[test]
fn a_forked_child_cannot_use_or_harm_its_parents_guards() {
    let _turn = alone();
    let node = TestNode::new(1, 8, 1 << 20);
    let local = node.join("fork");
    let mut reader = local.reader().unwrap();
    let object = node.put(b"k", &[7; 5000]);
    let Lookup::Hit(guard) = reader.get(&object.id, now()) else { panic!("a miss") };
    // SAFETY: the child calls nothing but the heap and _exit.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        let closed = matches!(reader.get(&object.id, now()), Lookup::Closed);
        let no_reader = local.reader().is_none();
        let no_claim = reader.claim(object.segment, object.slot, object.epoch).is_none();
        let no_clone = reader.clone_guard(&guard).is_none();
        let nothing_pinned = reader.pinned_bytes() == 0;
        let nobody_there =
            local.board().liveness(now()) == Liveness::Absent && !local.board().is_usable(now());
        drop(guard);
        drop(reader);
        drop(local);
        let checks = [closed, no_reader, no_claim, no_clone, nothing_pinned, nobody_there];
        let failed = checks.iter().position(|&ok| !ok);
        // SAFETY: ends the child without running the parent's destructors.
        unsafe { libc::_exit(failed.map_or(0, |n| n as i32 + 1)) };
    }
    let mut status = 0;
    // SAFETY: waits for the child made above.
    assert_eq!(unsafe { libc::waitpid(pid, &mut status, 0) }, pid);
    assert_eq!(status, 0, "the child failed check {} or died of signal {}", status >> 8, status & 0x7f);
    // The child dropped its copy of the guard; the parent's still holds.
    let _ = node.kill(&object);
    assert_eq!(node.reclaim().freed.len(), 0);
    assert_eq!(guard.bytes(), [7; 5000]);
    drop(guard);
    assert_eq!(node.reclaim().freed.len(), 1);
}

#[test]
fn clients_are_numbered_and_a_process_cannot_take_all_the_places() {
    let _turn = alone();
    let node = TestNode::new(1, 4, 64 << 10);
    let (door, path) = node.open_door("many");
    for number in 1..=JOINS_PER_PROCESS_MAX as u32 + 1 {
        let joined = std::thread::scope(|scope| {
            scope.spawn(|| door.admit(door.accept().unwrap(), &node.heap).map(|visitor| visitor.pid));
            // SAFETY: node and client are this test.
            unsafe { join(&path, TIMEOUT, u64::MAX) }
        });
        match joined {
            Ok((local, _)) => assert_eq!(local.client(), ClientId(number)),
            Err(DoorError::Refused(code)) => {
                assert_eq!((code, number as usize), (ErrorCode::Busy, JOINS_PER_PROCESS_MAX + 1));
            }
            Err(other) => panic!("{other}"),
        }
    }
    assert_eq!(node.heap.ledgers().clients().len(), JOINS_PER_PROCESS_MAX);
}

#[test]
fn a_socket_that_was_left_behind_is_replaced_and_one_in_use_is_not() {
    let _turn = alone();
    let node = TestNode::new(1, 4, 64 << 10);
    let (door, path) = node.open_door("left-behind");
    // SAFETY: nobody enters.
    let second = unsafe { Door::open(&path, &[], TIMEOUT) };
    assert!(second.unwrap_err().to_string().contains("is another node running there?"));
    drop(door);
    // SAFETY: as above.
    assert!(unsafe { Door::open(&path, &[], TIMEOUT) }.is_ok());
}

#[test]
fn the_pidfd_of_a_thread_is_refused() {
    let _turn = alone();
    let node = TestNode::new(1, 4, 64 << 10);
    let (door, path) = node.open_door("thread");
    // PIDFD_THREAD; rustix has no name for it.
    // SAFETY: makes a descriptor of this process.
    let pidfd = unsafe { libc::syscall(libc::SYS_pidfd_open, std::process::id(), libc::O_EXCL) };
    if pidfd < 0 {
        eprintln!("not run: pidfds of threads need Linux 6.9");
        return;
    }
    // SAFETY: made just above, owned by nobody else.
    let pidfd = unsafe { <OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(pidfd as i32) };
    let socket = connect(&path);
    send(&socket, &Message::Hello { pid: std::process::id() }.encode(), &[pidfd.as_fd()]);
    let refused = door.admit(door.accept().unwrap(), &node.heap).unwrap_err();
    assert!(matches!(refused, DoorError::Pidfd { .. }), "{refused}");
}
