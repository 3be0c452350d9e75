//! Loss and return of the master or of the network: what the node serves meanwhile, and what the master knows
//! afterwards.

mod support;

use std::time::Duration;

use moontide_heap::{SharedLookup, SharedReader};
use moontide_master::{MasterConfig, Server};
use moontide_node::{Node, NodeConfig};
use moontide_proto::CommitFlags;
use moontide_transfer::{Op, run};
use moontide_types::{Clock, ErrorCode, SystemClock};
use support::*;

/// A master that can be restarted at the same addresses.
struct RestartableMaster {
    config: MasterConfig,
    server: Option<Server>,
    _dir: TempDir,
}

impl RestartableMaster {
    fn start() -> RestartableMaster {
        let dir = TempDir::new();
        // Objects that are reported later than this after a start may have been removed meanwhile; the master drops
        // them.
        let (data_dir, reallocation_delay_ms) = (Some(dir.0.clone()), 3000);
        let [grpc_listen, frame_listen, admin_listen] = stable_addresses();
        let config = MasterConfig {
            data_dir,
            reallocation_delay_ms,
            grpc_listen,
            frame_listen,
            admin_listen,
            ..master_config()
        };
        let server = Server::start(config.clone()).unwrap();
        RestartableMaster { config, server: Some(server), _dir: dir }
    }

    fn server(&self) -> &Server {
        self.server.as_ref().unwrap()
    }

    fn stop(&mut self) {
        self.server = None;
    }

    fn restart(&mut self) {
        self.server = Some(Server::start(self.config.clone()).unwrap());
    }
}

/// Returns the number of sessions that the node has opened, if it has one now.
fn session_of(node: &Node) -> Option<u64> {
    let is_registered = json(node, "/health")["registered"].as_bool().expect("a flag");
    is_registered.then(|| metric(node, "sessions_opened_total"))
}

#[test]
fn restarted_master_receives_full_report() {
    init_logs();
    let mut master = RestartableMaster::start();
    let node = node(master.server());
    let (tcp, shm) = (tcp(&node), shm(&node));
    let name = |n: u64| format!("key-{n}");
    let (unfinished, aborted) = {
        let client = Client::new(master.server());
        for n in 0..40 {
            client.put(if n % 2 == 0 { &*tcp } else { &*shm }, &name(n), &content(n, 5000 + n as usize));
        }
        (0..10).for_each(|n| assert_eq!(client.remove(&name(n)), None));
        let unfinished = client.put_start_soon("unfinished", 70_000);
        assert_eq!(begin(&*tcp, &unfinished), None);
        let aborted = client.put_start_soon("aborted", 70_000);
        assert_eq!(begin(&*tcp, &aborted), None);
        (unfinished, aborted)
    };
    let bytes = content(77, 70_000);
    let root = write(&*tcp, &unfinished, &bytes);
    let first = session_of(&node);
    master.stop();
    master.restart();
    eventually("the node has a new session", || session_of(&node).is_some_and(|number| Some(number) > first));
    assert!(node.wait_until_mounted(TIMEOUT));

    let client = Client::new(master.server());
    for n in 10..40 {
        assert!(client.get(&*tcp, &name(n)).unwrap() == content(n, 5000 + n as usize), "{n}");
    }
    for n in 0..10 {
        assert!(!client.exists(&name(n)), "{n} was removed");
    }
    // Unfinished puts are in progress for the new master, too, and can be committed or aborted.
    assert!(!client.exists("unfinished"));
    assert_eq!(commit(&*tcp, &unfinished, root, CommitFlags::NONE), None);
    eventually("the put that the old master began is complete", || client.exists("unfinished"));
    assert!(client.get(&*tcp, "unfinished").unwrap() == bytes);
    assert_eq!(client.put_end(&unfinished, root), None, "its writer may end it as well");
    assert!(client.put_start_as_other("aborted", 10).is_err());
    assert_eq!(commit(&*tcp, &aborted, 0, CommitFlags::ABORT), None);
    eventually("the aborted put is gone", || client.put_start_as_other("aborted", 10).is_ok());
    // Grants of the old term are fenced, new ones work.
    let late = Reserved { name: "late".into(), ..unfinished };
    assert!(begin(&*tcp, &late).is_some());
    client.put(&*tcp, "new", &bytes);
    assert!(client.get(&*shm, "new").unwrap() == bytes);
}

#[test]
fn node_without_master_serves_until_self_fence_timeout() {
    init_logs();
    let mut master = RestartableMaster::start();
    let config = NodeConfig {
        self_fence_timeout: Duration::from_millis(800),
        ..node_config(master.server().addresses().grpc)
    };
    let node = Node::start(config).unwrap();
    let (tcp, shm) = (tcp(&node), shm(&node));
    let bytes = content(3, 100_000);
    let (id, known) = {
        let client = Client::new(master.server());
        client.put(&*tcp, "key", &bytes);
        (client.id("key"), client.lookup("key").unwrap())
    };
    let mut reader = SharedReader::new(shm.local().unwrap().clone()).unwrap();
    let mut zero_copy = || match reader.get(&id, SystemClock.now()) {
        SharedLookup::Hit(guard) => {
            assert!(guard.bytes() == bytes);
            true
        }
        SharedLookup::Closed => false,
        other => panic!("{other:?}"),
    };
    assert!(zero_copy());
    let remote = || {
        let mut into = vec![0; bytes.len()];
        let mut ops = [Op::get(known.target(), 0, &mut into)];
        run(&*tcp, &mut ops, deadline()).unwrap();
        match ops[0].outcome().expect("it has ended") {
            Ok(()) => Ok(into == bytes),
            Err(code) => Err(code),
        }
    };
    master.stop();
    assert_eq!(remote(), Ok(true), "peers that know the location are served");
    let end = deadline();
    while zero_copy() {
        assert!(std::time::Instant::now() < end, "the index does not close");
        std::thread::sleep(Duration::from_millis(5));
    }
    // The object may have been removed by a master that the node cannot reach.
    assert_eq!(remote(), Err(ErrorCode::StaleSession), "peers are refused, too");
    assert_eq!(metric(&node, "local_index_open"), 0);
    let health = json(&node, "/health");
    assert!(health["last_error"].is_string(), "{health}");

    master.restart();
    let end = deadline();
    while !zero_copy() {
        assert!(std::time::Instant::now() < end, "the index does not open again");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(node.wait_until_mounted(TIMEOUT));
    assert_eq!(remote(), Ok(true), "served again after contact with the master");
    let client = Client::new(master.server());
    assert!(client.get(&*tcp, "key").unwrap() == bytes);
}

#[test]
fn broken_stream_resumes_within_session() {
    init_logs();
    let master = master();
    let proxy = Proxy::new(master.addresses().grpc);
    let node = Node::start(node_config(proxy.address)).unwrap();
    let client = Client::new(&master);
    let link = tcp(&node);
    let session = session_of(&node);
    let (_, all) = free_bytes(&node);
    for n in 0..10 {
        let name = format!("key-{n}");
        client.put(&*link, &name, &content(n, 20_000));
        proxy.disconnect();
        // The Kill arrives on the next stream.
        assert_eq!(client.remove(&name), None);
    }
    eventually("all space is free", || free_bytes(&node) == (all, all));
    eventually("no command is pending", || {
        master.service().nodes().iter().all(|node| node.pending_commands == 0)
    });
    assert_eq!(session_of(&node), session);
    assert_eq!(metric(&node, "sessions_opened_total"), 1);
    assert!(metric(&node, "streams_opened_total") > 1);
}

#[test]
fn lost_session_is_replaced_and_fully_reported() {
    init_logs();
    let config = MasterConfig { session_ttl_ms: 400, ..master_config() };
    let master = Server::start(config).unwrap();
    let proxy = Proxy::new(master.addresses().grpc);
    let node = Node::start(node_config(proxy.address)).unwrap();
    let client = Client::new(&master);
    let link = tcp(&node);
    let bytes = content(1, 20_000);
    client.put(&*link, "key", &bytes);
    let (free_with, _) = free_bytes(&node);
    let before = client.put_start_soon("reserved-before", 50_000);
    let begun = client.put_start_soon("begun-before", 50_000);
    assert_eq!(begin(&*link, &begun), None);
    let first = session_of(&node);

    proxy.set_open(false);
    eventually("the session expires at the master", || master.service().nodes().is_empty());
    assert!(!client.exists("key"));
    proxy.set_open(true);
    eventually("the node has a new session", || session_of(&node).is_some_and(|number| Some(number) > first));
    assert!(node.wait_until_mounted(TIMEOUT));
    assert!(client.get(&*link, "key").unwrap() == bytes);

    // A reservation of the lost session: the node cannot know that it is invalid, but the master does.
    assert_eq!(begin(&*link, &before), None);
    eventually("the master has it reclaimed", || begin(&*link, &before) == Some(ErrorCode::StaleEpoch));
    // A record that had begun was reported, and can be aborted.
    assert_eq!(commit(&*link, &begun, 0, CommitFlags::ABORT), None);
    eventually("only the object is left", || free_bytes(&node).0 == free_with);
    client.put(&*link, "reserved-before", &bytes);
    assert!(client.get(&*link, "reserved-before").unwrap() == bytes);
}

#[test]
fn shutdown_without_master_is_bounded() {
    init_logs();
    let mut master = RestartableMaster::start();
    let node = node(master.server());
    master.stop();
    eventually("the node notices", || json(&node, "/health")["last_error"].is_string());
    let started = std::time::Instant::now();
    node.shutdown();
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
}

#[test]
fn master_of_another_cluster_is_rejected() {
    init_logs();
    let mut master = RestartableMaster::start();
    let node = node(master.server());
    master.stop();
    master.config.data_dir = None;
    master.restart();
    let last_error = || json(&node, "/health")["last_error"].as_str().unwrap_or_default().to_owned();
    eventually("the node reports the error", || last_error().contains("restart this node"));
    assert!(master.server().service().nodes().is_empty());
}
