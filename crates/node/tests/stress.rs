//! Many concurrent writers, readers and removers while the connection to the master is interrupted repeatedly. At the
//! end, every object that was put and not removed has the right bytes, and after their removal all space is free.

mod support;

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use moontide_master::{MasterConfig, Server};
use moontide_node::Node;
use moontide_proto::CommitFlags;
use moontide_transfer::Link;
use moontide_types::ErrorCode;
use support::*;

const THREADS: u64 = 4;
const DURATION: Duration = Duration::from_secs(3);
const LOSSES: u64 = 5;

/// Puts, reads and removes objects until `stop` is set. Returns the names and bytes of the remaining objects.
fn stress(client: &Client<'_>, link: &dyn Link, thread: u64, stop: &AtomicBool) -> Vec<(String, Vec<u8>)> {
    let mut kept: Vec<(String, Vec<u8>)> = Vec::new();
    let mut round = 0;
    while !stop.load(Ordering::Relaxed) {
        round += 1;
        let seed = thread << 32 | round;
        let (name, bytes) = (format!("{thread}-{round}"), content(seed, (seed * 7919 % 60_000) as usize + 1));
        match round % 5 {
            0 => {
                let reserved = client.put_start_soon(&name, bytes.len() as u64);
                assert_eq!(begin(link, &reserved), None);
                assert_eq!(commit(link, &reserved, 0, CommitFlags::ABORT), None);
            }
            1 if !kept.is_empty() => {
                let (name, bytes) = &kept[(seed % kept.len() as u64) as usize];
                assert!(client.get(link, name).unwrap() == *bytes, "{name}");
            }
            2 if kept.len() > 20 => {
                let (name, _) = kept.swap_remove((seed % kept.len() as u64) as usize);
                assert_eq!(client.remove(&name), None, "{name}");
                assert!(!client.exists(&name));
            }
            _ => {
                client.put(link, &name, &bytes);
                kept.push((name, bytes));
            }
        }
    }
    kept
}

#[test]
fn reconnects_under_load_lose_no_object_and_leak_no_space() {
    init_logs();
    let master = master();
    let proxy = Proxy::new(master.addresses().grpc);
    let node = Node::start(node_config(proxy.address)).unwrap();
    let (_, all) = free_bytes(&node);
    let stop = AtomicBool::new(false);
    let links = [tcp(&node), shm(&node), tcp(&node), shm(&node)];
    let kept: Vec<(String, Vec<u8>)> = std::thread::scope(|scope| {
        let (master, stop) = (&master, &stop);
        let threads: Vec<_> = (0..THREADS)
            .zip(&links)
            .map(|(thread, link)| scope.spawn(move || stress(&Client::new(master), &**link, thread, stop)))
            .collect();
        let end = Instant::now() + DURATION;
        while Instant::now() < end && threads.iter().all(|thread| !thread.is_finished()) {
            std::thread::sleep(Duration::from_millis(150));
            proxy.disconnect();
        }
        stop.store(true, Ordering::Relaxed);
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(metric(&node, "sessions_opened_total"), 1);
    let client = Client::new(&master);
    for (name, bytes) in &kept {
        assert!(client.get(&*links[0], name).unwrap() == *bytes, "{name}");
        assert_eq!(client.remove(name), None, "{name}");
    }
    eventually("all space is free", || free_bytes(&node) == (all, all));
    eventually("no command is pending", || metric(&node, "commands_pending") == 0);
    assert!(metric(&node, "streams_opened_total") > 1);
    println!("{} objects at the end, {} records begun", kept.len(), metric(&node, "begins_total"));
}

/// Puts objects until `stop` is set, and ignores failures. Returns all names and bytes.
fn put_until(master: &Server, link: &dyn Link, thread: u64, stop: &AtomicBool) -> Vec<(String, Vec<u8>)> {
    let (client, mut tried) = (Client::new(master), Vec::new());
    while !stop.load(Ordering::Relaxed) {
        let seed = thread << 32 | tried.len() as u64;
        let (name, bytes) = (format!("{thread}-{seed}"), content(seed, (seed % 30_000) as usize + 1));
        if try_put(&client, link, &name, &bytes).is_err() {
            std::thread::sleep(Duration::from_millis(1));
        }
        tried.push((name, bytes));
    }
    tried
}

/// Sessions end during puts, and reservations of one are used in the next. Whatever the outcome of each put, every
/// object that the master knows is readable, and nothing else takes space.
#[test]
fn lost_sessions_under_load_leak_no_space_or_reservation() {
    init_logs();
    let config = MasterConfig { session_ttl_ms: 200, reservation_ms: 1000, ..master_config() };
    let master = Server::start(config).unwrap();
    let proxy = Proxy::new(master.addresses().grpc);
    let node = Node::start(node_config(proxy.address)).unwrap();
    let (_, all) = free_bytes(&node);
    let stop = AtomicBool::new(false);
    let links = [tcp(&node), shm(&node), tcp(&node)];
    let tried: Vec<(String, Vec<u8>)> = std::thread::scope(|scope| {
        let (master, stop) = (&master, &stop);
        let threads: Vec<_> = (0..links.len() as u64)
            .zip(&links)
            .map(|(thread, link)| scope.spawn(move || put_until(master, &**link, thread, stop)))
            .collect();
        for _ in 0..LOSSES {
            eventually("the node has a session", || {
                node.wait_until_mounted(TIMEOUT) && !master.service().nodes().is_empty()
            });
            std::thread::sleep(Duration::from_millis(150));
            proxy.set_open(false);
            eventually("the session of the node expires", || master.service().nodes().is_empty());
            std::thread::sleep(Duration::from_millis(50));
            proxy.set_open(true);
        }
        stop.store(true, Ordering::Relaxed);
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    eventually("the node has a session again", || {
        metric(&node, "sessions_opened_total") > LOSSES
            && node.wait_until_mounted(TIMEOUT)
            && master.service().nodes().len() == 1
    });
    eventually("no put is left unfinished", || {
        metric(&node, "memory_writing_bytes") == 0 && master.service().stats().objects_writing == 0
    });
    let client = Client::new(&master);
    let mut present = 0;
    for (name, bytes) in &tried {
        match client.get(&*links[0], name) {
            Ok(found) => {
                assert!(found == *bytes, "{name}");
                present += 1;
                // With sessions of 200 ms a busy machine may end one now, too: the removal is repeated then.
                eventually("the object is removed", || {
                    matches!(client.remove(name), None | Some(ErrorCode::NotFound))
                });
            }
            Err(ErrorCode::NotFound) => {}
            Err(other) => panic!("{name}: {other}"),
        }
    }
    eventually("all space is free", || free_bytes(&node) == (all, all));
    let stats = master.service().stats();
    assert_eq!((stats.live_units, stats.reserved_units, stats.objects), (0, 0, 0));
    println!("{present} of {} puts succeeded", tried.len());
}
