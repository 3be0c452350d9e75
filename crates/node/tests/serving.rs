//! A node with a real master: mount, puts and gets over the wire, removal, admin endpoints, and shutdown.

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
fn node_registers_with_segment_for_every_group() {
    init_logs();
    let master = master();
    let node = node(&master);
    assert!(node.wait_until_mounted(TIMEOUT));
    assert_eq!(json(&node, "/health")["node"], node.id().to_string());
    let segments = json(&node, "/segments");
    assert_eq!(segments["node"], node.id().to_string());
    let mut groups: Vec<u64> =
        segments["segments"].as_array().unwrap().iter().map(|s| s["group"].as_u64().unwrap()).collect();
    groups.sort_unstable();
    assert_eq!(groups, [0, 1, 2, 3]);
    let nodes = master.service().nodes();
    assert_eq!(nodes.len(), 1);
    assert_eq!(nodes[0].node, node.id());
    let engines: Vec<&str> = nodes[0].addresses.iter().map(|(engine, _)| &**engine).collect();
    assert_eq!(engines, ["tcp", "shm"]);
    assert_eq!(metric(&node, "synced"), 1);
    assert_eq!(metric(&node, "local_index_open"), 1);
}

#[test]
fn put_get_round_trips_over_tcp_and_shm() {
    init_logs();
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
        // Zero-copy, without a master.
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
fn removed_object_is_freed_when_last_reader_releases_it() {
    init_logs();
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
    assert_eq!(free_bytes(&node), (free_with, all), "the guard holds it");
    assert!(guard.bytes() == bytes);
    assert!(metric(&node, "memory_draining_bytes") > 0);
    drop(guard);
    eventually("the space is free", || free_bytes(&node) == (all, all));
    eventually("no command is pending", || metric(&node, "commands_pending") == 0);
    // The master allocates the space again: these are more bytes than the rest of the memory holds.
    for n in 0..70 {
        let name = format!("again-{n}");
        client.put(&*shm, &name, &bytes);
        assert_eq!(client.remove(&name), None);
    }
}

#[test]
fn memory_and_command_metrics_sum_to_their_totals() {
    init_logs();
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
        assert_eq!(parts.iter().sum::<u64>(), value("memory_capacity_bytes"), "{parts:?}");
        let replied =
            ["done", "accepted", "refused", "cancelled"].map(|how| value(&format!("commands_{how}_total")));
        let sum = replied.iter().sum::<u64>() + value("commands_pending");
        assert_eq!(sum, value("commands_received_total"), "{replied:?}");
        assert!(page.contains("moontide_transfer_served_bytes_total"));
        value("commands_received_total")
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
fn shm_reads_are_reported_to_master() {
    init_logs();
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
    eventually("the master counts the zero-copy reads", || {
        let reads = master.service().stats().reads;
        reads.memory_hits == before.memory_hits + 3 && reads.bytes >= before.bytes + 3000
    });
}

#[test]
fn aborted_put_frees_space_and_key_before_reservation_timeout() {
    init_logs();
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
    // The node reports the abort: the key can be put again at once, long before the reservation expires.
    eventually("the key is free", || match client.put_start_as_other("aborted", 100_000) {
        Ok(_) => true,
        Err(ErrorCode::InProgress) => false,
        Err(other) => panic!("{other}"),
    });
    // A complete object cannot be aborted, even with its slot and epoch.
    let whole = client.put(&*link, "whole", b"bytes");
    assert_eq!(commit(&*link, &whole, 0, CommitFlags::ABORT), Some(ErrorCode::AlreadyExists));
    assert!(client.get(&*link, "whole").unwrap() == b"bytes");
}

#[test]
fn put_of_dead_writer_is_freed_and_cannot_begin_again() {
    init_logs();
    let master = master();
    let node = node(&master);
    let client = Client::new(&master);
    let link = tcp(&node);
    let (_, all) = free_bytes(&node);
    let reserved = client.put_start_soon("orphan", 100_000);
    assert_eq!(begin(&*link, &reserved), None);
    let handle = &reserved.handles[0];
    node.owner().on_client_exit(&[(handle.segment, handle.slot, reserved.object.epoch)]);
    eventually("the space is free", || free_bytes(&node) == (all, all));
    assert_eq!(begin(&*link, &reserved), Some(ErrorCode::StaleEpoch), "it cannot begin again");
    eventually("the key can be put again", || client.put_start_as_other("orphan", 100_000).is_ok());
}

#[test]
fn begin_with_wrong_generation_segment_or_term_is_refused() {
    init_logs();
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
    // The capability covers the term, so that only a master can name an older one.
    assert_eq!(begin(&*link, &reserved), Some(ErrorCode::PermissionDenied));
    reserved.handles[0] = right;
    assert_eq!(begin(&*link, &reserved), None);
    assert_eq!(begin(&*link, &reserved), None, "idempotent");
}

#[test]
fn start_without_master_fails_with_advice() {
    init_logs();
    // A port without a listener, and a listener that never responds.
    let silent = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let addresses = ["127.0.0.1:1".parse().unwrap(), silent.local_addr().unwrap()];
    std::thread::scope(|scope| {
        for address in addresses {
            scope.spawn(move || {
                let started = Instant::now();
                let error = Node::start(node_config(address)).unwrap_err();
                assert!(started.elapsed() < Duration::from_secs(15), "{:?}", started.elapsed());
                assert!(matches!(error, StartError::Master { .. }), "{error}");
                let text = error.to_string();
                assert!(text.contains(&address.to_string()) && text.contains("moontide master"), "{text}");
            });
        }
    });
}

#[test]
fn start_with_unusable_address_names_the_setting() {
    init_logs();
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
    let socket = Some("/nowhere/at/all.sock".into());
    let error = Node::start(NodeConfig { shm_socket: socket, ..config() }).unwrap_err();
    assert!(matches!(error, StartError::Shm(_)) && error.to_string().contains("`shm_socket`"), "{error}");
    assert!(master.service().nodes().is_empty());
}

#[test]
fn nodes_on_one_host_have_separate_shm_sockets() {
    init_logs();
    let master = master();
    let config =
        || NodeConfig { shm_socket: None, memory_bytes: 8 << 20, ..node_config(master.addresses().grpc) };
    let nodes = [Node::start(config()).unwrap(), Node::start(config()).unwrap()];
    for node in &nodes {
        let socket = node.addresses().shm_socket.clone().unwrap();
        let name = format!("moontide-{:016x}.sock", node.id().0);
        assert!(socket.to_str().unwrap().ends_with(&name), "{socket:?}");
        assert_eq!(shm(node).node(), node.id());
    }
    let closed = Node::start(NodeConfig { shm: false, ..config() }).unwrap();
    assert_eq!(closed.addresses().shm_socket, None);
    assert_eq!(master.service().nodes().len(), 3);
}

#[test]
fn start_with_too_little_memory_fails_with_advice() {
    init_logs();
    let master = master();
    let config = NodeConfig { memory_bytes: 3 << 20, ..node_config(master.addresses().grpc) };
    let error = Node::start(config).unwrap_err();
    assert!(matches!(error, StartError::Plan(_)) && error.to_string().contains("memory_bytes"), "{error}");
}

#[test]
fn shutdown_is_bounded_and_unregisters_node() {
    init_logs();
    let master = master();
    let config = NodeConfig {
        drain_timeout: Duration::from_millis(300),
        node_id: Some(NodeId(5)),
        ..node_config(master.addresses().grpc)
    };
    let socket = config.shm_socket.clone().unwrap();
    let node = Node::start(config).unwrap();
    assert_eq!(node.id(), NodeId(5));
    let client = Client::new(&master);
    let (shm, tcp) = (shm(&node), tcp(&node));
    client.put(&*shm, "key", &content(1, 100_000));
    assert!(client.get(&*tcp, "key").is_ok());
    // A reader that never releases its guard.
    let mut reader = SharedReader::new(shm.local().unwrap().clone()).unwrap();
    let SharedLookup::Hit(guard) = reader.get(&client.id("key"), now()) else { panic!("it was put") };
    let started = Instant::now();
    node.shutdown();
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
    assert!(!socket.exists());
    assert!(matches!(reader.get(&client.id("key"), now()), SharedLookup::Closed), "the index is closed");
    assert!(guard.bytes() == content(1, 100_000), "the memory stays mapped for holders of guards");
    assert!(client.put_start("other", 10).is_err(), "no segment is left");
    assert!(!client.exists("key"));
}
