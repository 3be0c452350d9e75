//! A node with a real master: mounting, puts and gets over the wire, removal, the pages, and the end.

mod support;

use std::time::{Duration, Instant};

use moontide_heap::{SharedLookup, SharedReader};
use moontide_node::{Node, NodeConfig, StartError};
use moontide_proto::CommitFlags;
use moontide_types::{Clock, ErrorCode, MonoTime, NodeId, SystemClock};
use support::*;

fn now() -> MonoTime {
    SystemClock.now()
}

#[test]
fn it_registers_and_gives_every_group_a_segment() {
    logs();
    let master = master();
    let node = node(&master);
    assert!(node.wait_until_mounted(SOON));
    let segments = json(&node, "/segments");
    let mut groups: Vec<u64> =
        segments["segments"].as_array().unwrap().iter().map(|s| s["group"].as_u64().unwrap()).collect();
    groups.sort_unstable();
    assert_eq!(groups, [0, 1, 2, 3]);
    let nodes = master.service().nodes();
    assert_eq!(nodes.len(), 1);
    assert_eq!(nodes[0].node, node.id());
    let engines: Vec<&str> = nodes[0].addresses.iter().map(|(engine, _)| &**engine).collect();
    assert_eq!(engines, ["tcp", "shm"]);
    assert_eq!(metric(&node, "session_mounted"), 1);
    assert_eq!(metric(&node, "index_open"), 1);
}

#[test]
fn objects_are_put_and_got_over_both_ways() {
    logs();
    let master = master();
    let node = node(&master);
    let client = Client::new(&master);
    let (tcp, shm) = (tcp(&node), shm(&node));
    for (n, len) in [1, 511, 4096, 300_000, 3_000_001].into_iter().enumerate() {
        let bytes = content(n as u64, len);
        let (by_tcp, by_shm) = (format!("tcp-{n}"), format!("shm-{n}"));
        client.put(&*tcp, &by_tcp, &bytes);
        client.put(&*shm, &by_shm, &bytes);
        for link in [&tcp, &shm] {
            assert!(client.get(&**link, &by_tcp).unwrap() == bytes, "{by_tcp}");
            assert!(client.get(&**link, &by_shm).unwrap() == bytes, "{by_shm}");
        }
        // In place, without a master.
        let mut reader = SharedReader::new(shm.local().unwrap().clone()).unwrap();
        match reader.get(&client.id(&by_tcp), now()) {
            SharedLookup::Hit(guard) => assert!(guard.bytes() == bytes),
            other => panic!("{other:?}"),
        }
    }
    let inspected: usize = (0..GROUPS)
        .map(|n| json(&node, &format!("/segments/{n}"))["records"].as_array().unwrap().len())
        .sum();
    assert_eq!(inspected, 10);
    assert_eq!(client.get(&*tcp, "other"), Err(ErrorCode::NotFound));
}

#[test]
fn what_is_removed_is_free_when_its_last_reader_lets_go() {
    logs();
    let master = master();
    let node = node(&master);
    let client = Client::new(&master);
    let shm = shm(&node);
    let bytes = content(9, 1 << 20);
    let (free_before, all) = free_bytes(&node);
    assert_eq!(free_before, all);
    client.put(&*shm, "held", &bytes);
    let (free_with, _) = free_bytes(&node);
    assert!(free_with < all);

    let mut reader = SharedReader::new(shm.local().unwrap().clone()).unwrap();
    let SharedLookup::Hit(guard) = reader.get(&client.id("held"), now()) else { panic!("it was put") };
    assert_eq!(client.remove("held"), None);
    assert!(!client.exists("held"));
    assert!(matches!(reader.get(&client.id("held"), now()), SharedLookup::Miss));
    // Long enough for many reclaims.
    std::thread::sleep(Duration::from_millis(100));
    assert_eq!(free_bytes(&node), (free_with, all), "the guard keeps it");
    assert!(guard.bytes() == bytes);
    assert!(metric(&node, "memory_draining_bytes") > 0);
    drop(guard);
    eventually("the space is free", || free_bytes(&node) == (all, all));
    eventually("all orders are answered", || metric(&node, "orders_outstanding") == 0);
    // And the master gives it out again: more than the rest of the memory would hold.
    for n in 0..70 {
        let name = format!("again-{n}");
        client.put(&*shm, &name, &bytes);
        assert_eq!(client.remove(&name), None);
    }
}

#[test]
fn sums_of_the_metrics_hold_while_things_change() {
    logs();
    let master = master();
    let node = node(&master);
    let client = Client::new(&master);
    let link = tcp(&node);
    let check = || {
        let (_, page) = http(node.addresses().admin.unwrap(), "/metrics");
        let value = |name: &str| -> u64 {
            let prefix = format!("moontide_node_{name} ");
            page.lines().find_map(|line| line.strip_prefix(&prefix)).expect(name).parse().unwrap()
        };
        let parts =
            ["live", "writing", "draining", "free"].map(|part| value(&format!("memory_{part}_bytes")));
        assert_eq!(parts.iter().sum::<u64>(), value("memory_all_bytes"), "{parts:?}");
        let answered =
            ["done", "accepted", "refused", "void"].map(|how| value(&format!("orders_{how}_total")));
        let sum = answered.iter().sum::<u64>() + value("orders_outstanding");
        assert_eq!(sum, value("orders_received_total"), "{answered:?}");
        assert!(page.contains("moontide_transfer_served_bytes_total"));
        value("orders_received_total")
    };
    check();
    for n in 0..20 {
        let name = format!("key-{n}");
        client.put(&*link, &name, &content(n, 10_000));
        check();
        if n % 2 == 0 {
            assert_eq!(client.remove(&name), None);
            check();
        }
    }
    assert!(check() >= 10);
}

#[test]
fn reads_are_told_to_the_master() {
    logs();
    let master = master();
    let node = node(&master);
    let client = Client::new(&master);
    let (tcp, shm) = (tcp(&node), shm(&node));
    client.put(&*tcp, "key", &content(1, 1000));
    let before = master.service().stats().reads;
    let mut reader = SharedReader::new(shm.local().unwrap().clone()).unwrap();
    for _ in 0..3 {
        assert!(matches!(reader.get(&client.id("key"), now()), SharedLookup::Hit(_)));
    }
    eventually("the master knows of reads in place", || {
        let reads = master.service().stats().reads;
        reads.memory_hits == before.memory_hits + 3 && reads.bytes >= before.bytes + 3000
    });
}

#[test]
fn a_put_that_is_given_up_is_free_at_once() {
    logs();
    let master = master();
    let node = node(&master);
    let client = Client::new(&master);
    let link = tcp(&node);
    let (_, all) = free_bytes(&node);
    let reserved = client.put_start_soon("aborted", 100_000);
    assert_eq!(begin(&*link, &reserved), None);
    assert!(metric(&node, "memory_writing_bytes") > 0);
    assert!(matches!(client.put_start_as_other("aborted", 10), Err(ErrorCode::InProgress)));
    assert_eq!(commit(&*link, &reserved, 0, CommitFlags::ABORT), None);
    eventually("the space is free", || free_bytes(&node) == (all, all));
    // The master heard of it: the key can be put again at once, long before the reservation would end.
    eventually("the key is free", || match client.put_start_as_other("aborted", 100_000) {
        Ok(_) => true,
        Err(ErrorCode::InProgress) => false,
        Err(other) => panic!("{other}"),
    });
    // A complete object is not given up by whoever knows its slot.
    let whole = client.put(&*link, "whole", b"bytes");
    assert_eq!(commit(&*link, &whole, 0, CommitFlags::ABORT), Some(ErrorCode::AlreadyExists));
    assert!(client.get(&*link, "whole").unwrap() == b"bytes");
}

#[test]
fn what_a_dead_writer_left_is_free_at_once() {
    logs();
    let master = master();
    let node = node(&master);
    let client = Client::new(&master);
    let link = tcp(&node);
    let (_, all) = free_bytes(&node);
    let reserved = client.put_start_soon("orphan", 100_000);
    assert_eq!(begin(&*link, &reserved), None);
    let handle = &reserved.handles[0];
    node.owner().abandoned(&[(handle.segment, handle.slot, reserved.object.epoch)]);
    eventually("the space is free", || free_bytes(&node) == (all, all));
    assert_eq!(begin(&*link, &reserved), Some(ErrorCode::StaleEpoch), "it is not begun again");
    eventually("the key can be put again", || client.put_start_as_other("orphan", 100_000).is_ok());
}

#[test]
fn begins_that_name_another_life_of_the_segment_are_refused() {
    logs();
    let master = master();
    let node = node(&master);
    let client = Client::new(&master);
    let link = tcp(&node);
    let mut reserved = client.put_start_soon("key", 1000);
    let right = reserved.handles[0];
    reserved.handles[0].generation.0 += 1;
    assert_eq!(begin(&*link, &reserved), Some(ErrorCode::StaleGeneration));
    reserved.handles[0] = right;
    reserved.handles[0].segment.0 = 99;
    assert_eq!(begin(&*link, &reserved), Some(ErrorCode::StaleGeneration));
    reserved.handles[0] = right;
    reserved.handles[0].term = moontide_types::Term::ZERO;
    assert_eq!(begin(&*link, &reserved), Some(ErrorCode::StaleTerm));
    reserved.handles[0] = right;
    assert_eq!(begin(&*link, &reserved), None);
    assert_eq!(begin(&*link, &reserved), None, "twice is harmless");
}

#[test]
fn a_node_without_a_master_says_what_to_do() {
    logs();
    // A port that is nobody's, and one at which somebody listens who never answers.
    let deaf = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addresses = ["127.0.0.1:1".parse().unwrap(), deaf.local_addr().unwrap()];
    std::thread::scope(|scope| {
        for address in addresses {
            scope.spawn(move || {
                let begun = Instant::now();
                let error = Node::start(node_config(address)).unwrap_err();
                assert!(begun.elapsed() < Duration::from_secs(15), "{:?}", begun.elapsed());
                assert!(matches!(error, StartError::Master { .. }), "{error}");
                let text = error.to_string();
                assert!(text.contains(&address.to_string()) && text.contains("moontide master"), "{text}");
            });
        }
    });
}

#[test]
fn an_address_that_is_taken_is_named() {
    logs();
    let master = master();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap();
    let config = || node_config(master.addresses().grpc);
    let error = Node::start(NodeConfig { listen: vec![address], ..config() }).unwrap_err();
    assert!(matches!(error, StartError::Serve(_)) && error.to_string().contains("`listen`"), "{error}");
    let error = Node::start(NodeConfig { admin_listen: Some(address), ..config() }).unwrap_err();
    assert!(
        matches!(error, StartError::Admin { .. }) && error.to_string().contains("`admin_listen`"),
        "{error}"
    );
    let door = Some("/nowhere/at/all.sock".into());
    let error = Node::start(NodeConfig { door, ..config() }).unwrap_err();
    assert!(matches!(error, StartError::Host(_)) && error.to_string().contains("`door`"), "{error}");
    assert!(master.service().nodes().is_empty());
}

#[test]
fn nodes_of_one_host_have_doors_of_their_own() {
    logs();
    let master = master();
    let config = || NodeConfig { door: None, memory_bytes: 8 << 20, ..node_config(master.addresses().grpc) };
    let nodes = [Node::start(config()).unwrap(), Node::start(config()).unwrap()];
    for node in &nodes {
        let door = node.addresses().door.clone().unwrap();
        assert!(door.to_str().unwrap().ends_with(&format!("moontide-{:016x}.sock", node.id().0)), "{door:?}");
        assert_eq!(shm(node).node(), node.id());
    }
    let closed = Node::start(NodeConfig { local: false, ..config() }).unwrap();
    assert_eq!(closed.addresses().door, None);
    assert_eq!(master.service().nodes().len(), 3);
}

#[test]
fn too_little_memory_for_the_groups_says_what_to_do() {
    logs();
    let master = master();
    let config = NodeConfig { memory_bytes: 3 << 20, ..node_config(master.addresses().grpc) };
    let error = Node::start(config).unwrap_err();
    assert!(matches!(error, StartError::Plan(_)) && error.to_string().contains("memory_bytes"), "{error}");
}

#[test]
fn a_shutdown_is_bounded_and_the_master_forgets_the_node() {
    logs();
    let master = master();
    let config = NodeConfig {
        drain: Duration::from_millis(300),
        node: Some(NodeId(5)),
        ..node_config(master.addresses().grpc)
    };
    let door = config.door.clone().unwrap();
    let node = Node::start(config).unwrap();
    assert_eq!(node.id(), NodeId(5));
    let client = Client::new(&master);
    let (shm, tcp) = (shm(&node), tcp(&node));
    client.put(&*shm, "key", &content(1, 100_000));
    assert!(client.get(&*tcp, "key").is_ok());
    // A reader that never lets go.
    let mut reader = SharedReader::new(shm.local().unwrap().clone()).unwrap();
    let SharedLookup::Hit(guard) = reader.get(&client.id("key"), now()) else { panic!("it was put") };
    let begun = Instant::now();
    node.shutdown();
    assert!(begun.elapsed() < Duration::from_secs(5), "{:?}", begun.elapsed());
    assert!(!door.exists());
    assert!(matches!(reader.get(&client.id("key"), now()), SharedLookup::Closed), "the index is closed");
    assert!(guard.bytes() == content(1, 100_000), "the memory stays for those who hold it");
    assert!(client.put_start("other", 10).is_err(), "no segment is left");
    assert!(!client.exists("key"));
}
