//! A master that goes away and comes back, and a network that does: what the node serves meanwhile, and what the master
//! knows afterwards.

mod support;

use std::time::Duration;

use moontide_heap::{SharedLookup, SharedReader};
use moontide_master::{MasterConfig, Server};
use moontide_node::{Node, NodeConfig};
use moontide_proto::CommitFlags;
use moontide_transfer::{Op, run};
use moontide_types::{Clock, ErrorCode, SystemClock};
use support::*;

/// A master that can be started again where it was.
struct Lasting {
    config: MasterConfig,
    server: Option<Server>,
    _folder: Folder,
}

impl Lasting {
    fn start() -> Lasting {
        let folder = Folder::new();
        // What is reported later than that after a start may have been removed meanwhile, and is not believed.
        let (data_dir, reallocate_wait_ms) = (Some(folder.0.clone()), 3000);
        let [grpc_listen, frame_listen, admin_listen] = lasting_addresses();
        let config = MasterConfig {
            data_dir,
            reallocate_wait_ms,
            grpc_listen,
            frame_listen,
            admin_listen,
            ..master_config()
        };
        let server = Server::start(config.clone()).unwrap();
        Lasting { config, server: Some(server), _folder: folder }
    }

    fn server(&self) -> &Server {
        self.server.as_ref().unwrap()
    }

    fn leave(&mut self) {
        self.server = None;
    }

    fn come_back(&mut self) {
        self.server = Some(Server::start(self.config.clone()).unwrap());
    }
}

fn session_of(node: &Node) -> String {
    json(node, "/health")["session"].as_str().unwrap_or_default().to_owned()
}

#[test]
fn a_master_that_was_restarted_is_told_everything() {
    logs();
    let mut master = Lasting::start();
    let node = node(master.server());
    let (tcp, shm) = (tcp(&node), shm(&node));
    let name = |n: u64| format!("key-{n}");
    let (unfinished, given_up) = {
        let client = Client::new(master.server());
        for n in 0..40 {
            client.put(if n % 2 == 0 { &*tcp } else { &*shm }, &name(n), &content(n, 5000 + n as usize));
        }
        (0..10).for_each(|n| assert_eq!(client.remove(&name(n)), None));
        let unfinished = client.put_start_soon("unfinished", 70_000);
        assert_eq!(begin(&*tcp, &unfinished), None);
        let given_up = client.put_start_soon("given-up", 70_000);
        assert_eq!(begin(&*tcp, &given_up), None);
        (unfinished, given_up)
    };
    let bytes = content(77, 70_000);
    let root = write(&*tcp, &unfinished, &bytes);
    let first = session_of(&node);
    master.leave();
    master.come_back();
    eventually("the node has a new session", || ![String::new(), first.clone()].contains(&session_of(&node)));
    assert!(node.wait_until_mounted(SOON));

    let client = Client::new(master.server());
    for n in 10..40 {
        assert!(client.get(&*tcp, &name(n)).unwrap() == content(n, 5000 + n as usize), "{n}");
    }
    for n in 0..10 {
        assert!(!client.exists(&name(n)), "{n} was removed");
    }
    // What was being written is a put in progress for the new master, too, and ends well or not.
    assert!(!client.exists("unfinished"));
    assert_eq!(commit(&*tcp, &unfinished, root, CommitFlags::NONE), None);
    eventually("the put that the old master began is complete", || client.exists("unfinished"));
    assert!(client.get(&*tcp, "unfinished").unwrap() == bytes);
    assert_eq!(client.put_end(&unfinished, root), None, "its writer may say so as well");
    assert!(client.put_start_as_other("given-up", 10).is_err());
    assert_eq!(commit(&*tcp, &given_up, 0, CommitFlags::ABORT), None);
    eventually("the other one is gone", || client.put_start_as_other("given-up", 10).is_ok());
    // Old grants are void, new ones work.
    let late = Reserved { name: "late".into(), ..unfinished };
    assert!(begin(&*tcp, &late).is_some());
    client.put(&*tcp, "new", &bytes);
    assert!(client.get(&*shm, "new").unwrap() == bytes);
}

#[test]
fn without_a_master_it_serves_and_closes_the_index_after_a_while() {
    logs();
    let mut master = Lasting::start();
    let config = NodeConfig {
        local_stale_max: Duration::from_millis(800),
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
    let mut in_place = || match reader.get(&id, SystemClock.now()) {
        SharedLookup::Hit(guard) => {
            assert!(guard.bytes() == bytes);
            true
        }
        SharedLookup::Closed => false,
        other => panic!("{other:?}"),
    };
    assert!(in_place());
    let remote = || {
        let mut into = vec![0; bytes.len()];
        let mut ops = [Op::get(known.target(), 0, &mut into)];
        run(&*tcp, &mut ops, soon()).unwrap();
        match ops[0].outcome().expect("it has ended") {
            Ok(()) => Ok(into == bytes),
            Err(code) => Err(code),
        }
    };
    master.leave();
    assert_eq!(remote(), Ok(true), "peers who know where it is are served");
    let end = soon();
    while in_place() {
        assert!(std::time::Instant::now() < end, "the index does not close");
        std::thread::sleep(Duration::from_millis(5));
    }
    // It may have been removed by now, by a master that we do not hear.
    assert_eq!(remote(), Err(ErrorCode::StaleSession), "peers are not served any more, either");
    assert_eq!(metric(&node, "index_open"), 0);
    let health = json(&node, "/health");
    assert!(health["trouble"].is_string(), "{health}");

    master.come_back();
    let end = soon();
    while !in_place() {
        assert!(std::time::Instant::now() < end, "the index does not open again");
        std::thread::sleep(Duration::from_millis(5));
    }
    assert!(node.wait_until_mounted(SOON));
    assert_eq!(remote(), Ok(true), "and again, when it is heard");
    let client = Client::new(master.server());
    assert!(client.get(&*tcp, "key").unwrap() == bytes);
}

#[test]
fn a_broken_stream_goes_on_within_the_session() {
    logs();
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
        proxy.cut();
        // The kill arrives on the next stream.
        assert_eq!(client.remove(&name), None);
    }
    eventually("all space is free", || free_bytes(&node) == (all, all));
    eventually("all orders are answered", || {
        master.service().nodes().iter().all(|node| node.orders_outstanding == 0)
    });
    assert_eq!(session_of(&node), session);
    assert_eq!(metric(&node, "sessions_opened_total"), 1);
    assert!(metric(&node, "streams_opened_total") > 1);
}

#[test]
fn a_lost_session_is_followed_by_another_with_everything() {
    logs();
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
    eventually("the master gives the node up", || master.service().nodes().is_empty());
    assert!(!client.exists("key"));
    proxy.set_open(true);
    eventually("the node has a new session", || ![String::new(), first.clone()].contains(&session_of(&node)));
    assert!(node.wait_until_mounted(SOON));
    assert!(client.get(&*link, "key").unwrap() == bytes);

    // A reservation of the lost session: the node cannot know that it is void, the master does.
    assert_eq!(begin(&*link, &before), None);
    eventually("the master has it away", || begin(&*link, &before) == Some(ErrorCode::StaleEpoch));
    // One that had begun was reported, and can be given up.
    assert_eq!(commit(&*link, &begun, 0, CommitFlags::ABORT), None);
    eventually("only the object is left", || free_bytes(&node).0 == free_with);
    client.put(&*link, "reserved-before", &bytes);
    assert!(client.get(&*link, "reserved-before").unwrap() == bytes);
}

#[test]
fn a_shutdown_without_a_master_is_bounded() {
    logs();
    let mut master = Lasting::start();
    let node = node(master.server());
    master.leave();
    eventually("the node notices", || json(&node, "/health")["trouble"].is_string());
    let begun = std::time::Instant::now();
    node.shutdown();
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
}

#[test]
fn a_master_of_another_cluster_is_not_followed() {
    logs();
    let mut master = Lasting::start();
    let node = node(master.server());
    master.leave();
    master.config.data_dir = None;
    master.come_back();
    let trouble = || json(&node, "/health")["trouble"].as_str().unwrap_or_default().to_owned();
    eventually("the node says what is wrong", || trouble().contains("restart this node"));
    assert!(master.server().service().nodes().is_empty());
}
