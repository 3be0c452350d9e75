//! Attacks on the data plane of a node: forged records, memory of earlier records, slow and silent connections, and the Unix
//! socket of a host.

use std::io::Read;
use std::net::TcpStream;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use moontide_client::{Store, StoreConfig};
use moontide_proto::{FrameKind, ObjectEntry, ObjectFlags};
use moontide_types::ErrorCode;
use moontide_types::record::DigestContext;

use crate::harness::{Cluster, Folder, KIB, MIB, Process, Shape, connect, until, words};
use crate::not_run::not_run;
use crate::peer::{Granted, Peer, frame};

fn one_node(memory_mib: usize) -> Cluster {
    let cluster = Cluster::start(Shape { nodes: 1, memory_mib, groups: 1, ..Shape::default() });
    cluster.wait_for_nodes(1);
    cluster
}

fn store_of(cluster: &Cluster, tenant: &str) -> Store {
    connect(StoreConfig { tenant: tenant.into(), ..cluster.config() })
}

fn peers(cluster: &Cluster) -> (Peer, Peer) {
    let master = Peer::connect(cluster.master.printed("frame"));
    (master, Peer::connect(cluster.nodes[0].printed("tcp")))
}

fn put(store: &Store, key: &[u8], bytes: &[u8]) {
    store.put(key, bytes).expect("memory is free");
}

/// Returns the resident memory of a process in MiB.
fn resident_mib(process: &Process) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", process.pid())).expect("it runs");
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).expect("Linux prints it");
    line.split_whitespace().nth(1).expect("a number").parse::<u64>().expect("a number") >> 10
}

#[test]
fn record_under_id_of_another_tenants_object_is_refused() {
    // Failure: a process that could reach the port of a node wrote a record under the id of another tenant's object, and the
    // next get on that host returned its bytes.
    let cluster = one_node(64);
    let victim = store_of(&cluster, "acme");
    put(&victim, b"key", b"the bytes of acme");
    let (mut master, mut node) = peers(&cluster);
    let own = master.put_start("mallory", b"own", 17);
    let target = master.put_start("acme", b"other key of acme", 17);
    let forged = [
        Granted { object: ObjectEntry { id: target.object.id, ..own.object }, ..own.clone() },
        Granted { key: target.key.clone(), ..own.clone() },
        Granted { key: b"key".to_vec(), ..own.clone() },
        Granted { tenant: "acme".into(), ..own.clone() },
        Granted { tenant: "acme".into(), key: b"key".to_vec(), ..own.clone() },
        Granted { object: ObjectEntry { id_key: own.object.id_key ^ 1, ..own.object }, ..own.clone() },
    ];
    for (number, forged) in forged.iter().enumerate() {
        assert_eq!(node.begin(forged), Err(ErrorCode::PermissionDenied), "forgery {number}");
    }
    assert_eq!(node.begin(&own), Ok(()), "the record as granted");
    let reader = store_of(&cluster, "acme");
    assert_eq!(&reader.get(b"key").expect("a call").expect("it is stored")[..], b"the bytes of acme");
    cluster.end();
}

#[test]
fn memory_of_removed_objects_is_not_readable() {
    // Failure: of eight records that were begun without digests and committed without their bytes, seven returned what
    // another tenant had stored there and removed.
    let cluster = one_node(64);
    let victim = store_of(&cluster, "acme");
    let secret = b"ACME-SECRET ".repeat(64 * KIB / 12);
    for n in 0..400u32 {
        put(&victim, &n.to_le_bytes(), &secret);
    }
    for n in 0..400u32 {
        assert!(victim.remove(&n.to_le_bytes(), false).is_ok());
    }
    let (mut master, mut node) = peers(&cluster);
    let len = secret.len() as u64;
    for n in 0..8u8 {
        let granted = master.put_start("mallory", &[b'k', n], len);
        let mut bare = granted.clone();
        bare.object.flags = bare.object.flags.with(ObjectFlags::DIGESTLESS);
        // The capability is for a record with digests.
        assert_eq!(node.begin(&bare), Err(ErrorCode::PermissionDenied), "a record without digests");
        assert_eq!(node.begin(&granted), Ok(()));
        // The right root, for one who knows or guesses the bytes, and a wrong one.
        let context = DigestContext { id: granted.object.id, version: granted.object.epoch, stripe: 0, len };
        let roots = [context.payload(&secret, |_| ()), 0];
        for root in roots {
            assert_eq!(node.commit(&granted, root), Err(ErrorCode::InvalidArgument), "nothing is written");
        }
        assert_eq!(node.write(&granted, 1, &secret[1..]), Ok(()));
        for root in roots {
            assert_eq!(node.commit(&granted, root), Err(ErrorCode::InvalidArgument), "a byte is missing");
        }
        assert!(node.read(&granted, 0, len).is_err(), "it is not published");
    }
    cluster.end();
}

#[test]
fn slow_bodies_hold_bounded_memory_and_end() {
    // Failure: 24 connections, each of which sent a body of 16 MiB but for its end, and then a byte now and then, held
    // 390 MiB of a node for ten minutes.
    const CONNECTIONS: usize = 24;
    const BODY: usize = 16 * MIB;
    let cluster = one_node(64);
    let store = cluster.remote();
    put(&store, b"key", b"bytes");
    let before = resident_mib(&cluster.nodes[0]);
    let address = cluster.nodes[0].printed("tcp");
    let begin = &frame(FrameKind::Begin, &vec![0; BODY], &[])[..];
    let began = Instant::now();
    let (most, ends) = std::thread::scope(|scope| {
        let attackers: Vec<_> = (0..CONNECTIONS)
            .map(|_| {
                scope.spawn(|| {
                    let mut peer = Peer::connect(address);
                    let (first, rest) = begin.split_at(begin.len() - 4096);
                    let mut sent = peer.send(first).is_ok();
                    for byte in rest {
                        sent = sent && peer.send(&[*byte]).is_ok();
                        if !sent || began.elapsed() > Duration::from_secs(60) {
                            break;
                        }
                        std::thread::sleep(Duration::from_millis(200));
                    }
                    began.elapsed()
                })
            })
            .collect();
        let mut most = 0;
        while !attackers.iter().all(std::thread::ScopedJoinHandle::is_finished) {
            most = most.max(resident_mib(&cluster.nodes[0]));
            assert!(store.get(b"key").expect("others are served").is_some());
            std::thread::sleep(Duration::from_millis(50));
        }
        let ends: Vec<Duration> = attackers.into_iter().map(|end| end.join().expect("no panic")).collect();
        (most, ends)
    });
    let last = ends.iter().max().expect("there are some");
    println!("resident {before} MiB before, at most {most} MiB; the last connection ended after {last:?}");
    // The budget is 64 MiB, of which one body is being decoded at most; the rest is 24 threads and their buffers.
    assert!(most < before + 128, "{before} MiB before, {most} MiB at most");
    assert!(*last < Duration::from_secs(30), "{last:?}");
    cluster.end();
}

#[test]
fn silent_connections_do_not_lock_others_out() {
    // Failure: connections without a handshake held their places, and then those with one and without a request.
    // The node has few descriptors, so that a few hundred connections are its limit.
    const DESCRIPTORS: u64 = 400;
    let mut cluster = Cluster::start(Shape { nodes: 0, memory_mib: 64, groups: 1, ..Shape::default() });
    cluster.add_node_prepared(&[], &|command| {
        let limit = || {
            use rustix::process::{Resource, Rlimit, setrlimit};
            let few = Rlimit { current: Some(DESCRIPTORS), maximum: Some(DESCRIPTORS) };
            Ok(setrlimit(Resource::Nofile, few)?)
        };
        // SAFETY: it only makes a system call, with memory of its own stack.
        unsafe { command.pre_exec(limit) };
    });
    cluster.wait_for_nodes(1);
    let store = cluster.remote();
    put(&store, b"key", b"bytes");
    let address = cluster.nodes[0].printed("tcp").to_owned();
    let silent: Vec<TcpStream> =
        (0..2 * DESCRIPTORS).filter_map(|_| TcpStream::connect(&address).ok()).collect();
    assert!(silent.len() as u64 > DESCRIPTORS, "the kernel accepts them for the node");
    until("a new connection among silent ones", Duration::from_secs(10), || {
        Peer::try_connect(&address).is_ok()
    });
    assert_eq!(&cluster.remote().get(b"key").expect("a call").expect("it is stored")[..], b"bytes");
    // With a handshake, one host gets half of the connections.
    let idle: Vec<Peer> = (0..DESCRIPTORS).map_while(|_| Peer::try_connect(&address).ok()).collect();
    println!("{} connections of one host are open", idle.len());
    assert!(idle.len() as u64 <= DESCRIPTORS / 4, "{} connections of one host", idle.len());
    assert_eq!(&store.get(b"key").expect("a call").expect("it is stored")[..], b"bytes");
    drop((silent, idle));
    cluster.end();
}

/// Listens on a Unix socket as another user, in place of a node. Prints a line when it listens, and one for each connection
/// on which a process has sent something.
const IMPOSTOR: &str = r#"
import os, socket, sys
path = sys.argv[1]
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
listener.bind(path)
os.chmod(path, 0o777)
listener.listen(8)
print("listening", flush=True)
while True:
    connection, _ = listener.accept()
    print("sent" if connection.recv(64) else "closed", flush=True)
"#;

#[test]
fn client_does_not_talk_to_another_users_socket() {
    // Failure: a client mapped the memory of any process that listened at the path of a node's socket, and read objects from it.
    if !rustix::process::geteuid().is_root() {
        return not_run("listening as another user needs root");
    }
    const OTHER_USER: u32 = 65534;
    let cluster = one_node(64);
    let socket = cluster.nodes[0].printed("shm").to_owned();
    let mode = std::fs::metadata(&socket).expect("the socket of the node").permissions().mode();
    assert_eq!(mode & 0o777, 0o600, "the socket is open to other users");
    // A place where another user may listen.
    let folder = cluster.folder().join("open");
    std::fs::create_dir(&folder).expect("the folder has space");
    for path in [cluster.folder(), &folder] {
        std::fs::set_permissions(path, PermissionsExt::from_mode(0o777)).expect("root may");
    }
    let false_socket = folder.join("node.sock");
    let mut impostor = Command::new("python3");
    impostor.args(["-c", IMPOSTOR]).arg(&false_socket).uid(OTHER_USER).gid(OTHER_USER).stdout(Stdio::piped());
    let Ok(mut impostor) = impostor.spawn() else { return not_run("the impostor needs python3") };
    let mut out = impostor.stdout.take().expect("stdout is piped");
    let mut line = [0; 10];
    out.read_exact(&mut line).expect("the impostor listens");
    assert_eq!(&line, b"listening\n");
    // The node's path now leads to the impostor, as if that had listened there first.
    std::fs::remove_file(&socket).expect("root may");
    std::os::unix::fs::symlink(&false_socket, &socket).expect("root may");
    let store = cluster.local();
    put(&store, b"key", b"bytes");
    assert_eq!(&store.get(b"key").expect("a call").expect("it is stored")[..], b"bytes");
    drop(store);
    impostor.kill().expect("it runs");
    impostor.wait().expect("it was started here");
    let mut said = String::new();
    out.read_to_string(&mut said).expect("the impostor prints text");
    assert!(
        said.contains("closed") && !said.contains("sent"),
        "the client connected and sent nothing: {said:?}"
    );
    cluster.end();
}

/// Checks that no file or directory under a path is accessible to other users.
fn assert_private(path: &Path) {
    let mode = std::fs::symlink_metadata(path).expect("it exists").permissions().mode();
    assert_eq!(mode & 0o077, 0, "{} has mode {mode:o}", path.display());
    if path.is_dir() {
        for entry in std::fs::read_dir(path).expect("a directory") {
            assert_private(&entry.expect("an entry").path());
        }
    }
}

#[test]
fn files_of_a_node_are_private_whatever_the_umask() {
    for backend in ["bucket", "file", "offset"] {
        let disk = Folder::new();
        // One directory is new, and the other one was made by an operator, open to everybody.
        let (new, open) = (disk.path().join("new/disk"), disk.path().join("open"));
        std::fs::create_dir(&open).expect("the folder has space");
        std::fs::set_permissions(&open, PermissionsExt::from_mode(0o777)).expect("it is ours");
        let (first, second) = (new.display(), open.display());
        let node_words = words(&format!(
            "--disk-dir {first} --disk-dir {second} --disk-limit 128MiB --disk-staging 64MiB --disk-backend {backend}"
        ));
        let master_words = words("--offload put");
        let shape =
            Shape { nodes: 0, memory_mib: 24, groups: 1, master_words, node_words, ..Shape::default() };
        let mut cluster = Cluster::start(shape);
        cluster.add_node_prepared(&[], &|command| {
            let no_umask = || {
                rustix::process::umask(rustix::fs::Mode::empty());
                Ok(())
            };
            // SAFETY: it only makes a system call.
            unsafe { command.pre_exec(no_umask) };
        });
        cluster.wait_for_nodes(1);
        let store = cluster.remote();
        for n in 0..20u32 {
            put(&store, &n.to_le_bytes(), &vec![7; 100 * KIB]);
        }
        until("objects on disk", Duration::from_secs(20), || {
            cluster.nodes[0].metrics().node("disk_records") >= 20
        });
        let check = || [&new, &open].into_iter().for_each(|dir| assert_private(dir));
        check();
        assert_private(Path::new(cluster.nodes[0].printed("shm")));
        // A node that stops writes a list of what is in its memory.
        cluster.nodes[0].signal(rustix::process::Signal::TERM);
        until("the end of the node", Duration::from_secs(20), || cluster.nodes[0].ended().is_some());
        check();
        assert!(new.join("memory.list").exists() || open.join("memory.list").exists());
    }
}
