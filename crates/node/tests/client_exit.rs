//! A process that maps the node's memory is killed while it writes one object and reads another.

mod support;

use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use moontide_heap::{SharedLookup, SharedReader};
use moontide_proto::FrameKind;
use moontide_transfer::shm::{ShmConfig, ShmEngine};
use moontide_transfer::{Engine, EngineKind, Metrics, Peer, call};
use moontide_types::{Clock, ErrorCode, NodeId, ObjectId, SystemClock};
use support::*;

/// Variable with the arguments of the child: node, address of the shm socket, file with a Begin, id to read.
const VARIABLE: &str = "MOONTIDE_TEST_CHILD";

/// Not a test by itself: the process that is killed.
#[test]
#[ignore = "started by the other one"]
fn child() {
    let Ok(arguments) = std::env::var(VARIABLE) else { return };
    let mut arguments = arguments.split('|');
    let mut next = || arguments.next().unwrap().to_owned();
    let node = NodeId(next().parse().unwrap());
    let peer = Peer { node, addresses: vec![(EngineKind::Shm, next())] };
    let begin = std::fs::read(next()).unwrap();
    let id = ObjectId(next().parse::<u128>().unwrap().to_be_bytes());
    // SAFETY: node and client are this test, which follows the protocol.
    let engine = unsafe { ShmEngine::new(ShmConfig::default(), Metrics::new()) };
    let link = engine.connect(&peer, deadline()).unwrap();
    call(&*link, FrameKind::Begin, begin, deadline()).unwrap();
    let mut reader = SharedReader::new(link.local().unwrap().clone()).unwrap();
    let SharedLookup::Hit(_guard) = reader.get(&id, SystemClock.now()) else { panic!("it was put") };
    println!("child writes and reads");
    std::thread::sleep(Duration::from_secs(600)); // until it is killed
}

/// Kills the child when it is dropped, also if the test panics.
struct KillOnDrop(Child);

impl Drop for KillOnDrop {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn killed_client_process_releases_its_writes_and_pins() {
    init_logs();
    let (master, dir) = (master(), TempDir::new());
    let node = node(&master);
    let client = Client::new(&master);
    let link = tcp(&node);
    let (_, all) = free_bytes(&node);
    client.put(&*link, "held", &content(1, 50_000));
    let reserved = client.put_start_soon("written", 50_000);
    let file = dir.0.join("begin");
    std::fs::write(&file, begin_body(&reserved)).unwrap();
    let socket = moontide_transfer::shm::address(node.addresses().shm_socket.as_ref().unwrap()).unwrap();
    let id = u128::from_be_bytes(client.id("held").0);
    let mut child = Command::new(std::env::current_exe().unwrap());
    child.args(["--exact", "child", "--ignored", "--nocapture"]);
    child.env(VARIABLE, format!("{}|{socket}|{}|{id}", node.id().0, file.display()));
    let mut child = KillOnDrop(child.stdout(Stdio::piped()).spawn().unwrap());
    let mut lines = BufReader::new(child.0.stdout.take().unwrap()).lines().map_while(Result::ok);
    assert!(lines.any(|line| line.contains("child writes and reads")), "the child has exited");

    assert_eq!(client.remove("held"), None);
    assert!(metric(&node, "memory_writing_bytes") > 0);
    assert!(matches!(client.put_start_as_other("written", 10), Err(ErrorCode::InProgress)));
    std::thread::sleep(Duration::from_millis(50));
    let (free, _) = free_bytes(&node);
    assert!(free < all, "the child holds it");
    drop(child);
    eventually("all space is free", || free_bytes(&node) == (all, all));
    eventually("no command is pending", || metric(&node, "commands_pending") == 0);
    eventually("the key can be put again", || client.put_start_as_other("written", 50_000).is_ok());
    assert_eq!(metric(&node, "shm_clients"), 0);
}
