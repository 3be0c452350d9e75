//! Many writers, readers and removers at once, while the connection to the master is cut again and again. At the end
//! everything that was put and not removed is there to the byte, and when that is removed, too, all space is free.

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
const LASTS: Duration = Duration::from_secs(3);
const LOSSES: u64 = 5;

/// What one thread left behind: names with what is in them.
fn storm(client: &Client<'_>, link: &dyn Link, thread: u64, stop: &AtomicBool) -> Vec<(String, Vec<u8>)> {
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
fn nothing_is_lost_and_nothing_leaks() {
    logs();
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
            .map(|(thread, link)| scope.spawn(move || storm(&Client::new(master), &**link, thread, stop)))
            .collect();
        let end = Instant::now() + LASTS;
        while Instant::now() < end && threads.iter().all(|thread| !thread.is_finished()) {
            std::thread::sleep(Duration::from_millis(150));
            proxy.cut();
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
    eventually("no order is outstanding", || metric(&node, "orders_outstanding") == 0);
    assert!(metric(&node, "streams_opened_total") > 1);
    println!("{} objects at the end, {} records begun", kept.len(), metric(&node, "begun_records_total"));
}

/// Puts whatever becomes of it; what was tried.
fn put_on(master: &Server, link: &dyn Link, thread: u64, stop: &AtomicBool) -> Vec<(String, Vec<u8>)> {
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

/// Sessions end in the middle of puts, and reservations of one are used in the next. Whatever becomes of each put, what
/// the master says is there is there, and nothing else takes space.
#[test]
fn lost_sessions_leave_nothing_behind() {
    logs();
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
            .map(|(thread, link)| scope.spawn(move || put_on(master, &**link, thread, stop)))
            .collect();
        for _ in 0..LOSSES {
            eventually("the node has a session", || {
                node.wait_until_mounted(SOON) && !master.service().nodes().is_empty()
            });
            std::thread::sleep(Duration::from_millis(150));
            proxy.set_open(false);
            eventually("the master gives the node up", || master.service().nodes().is_empty());
            std::thread::sleep(Duration::from_millis(50));
            proxy.set_open(true);
        }
        stop.store(true, Ordering::Relaxed);
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    eventually("the node is back", || {
        metric(&node, "sessions_opened_total") > LOSSES
            && node.wait_until_mounted(SOON)
            && master.service().nodes().len() == 1
    });
    eventually("no put is left unfinished", || {
        metric(&node, "memory_writing_bytes") == 0 && master.service().stats().objects_writing == 0
    });
    let client = Client::new(&master);
    let mut there = 0;
    for (name, bytes) in &tried {
        match client.get(&*links[0], name) {
            Ok(found) => {
                assert!(found == *bytes, "{name}");
                there += 1;
                assert_eq!(client.remove(name), None, "{name}");
            }
            Err(ErrorCode::NotFound) => {}
            Err(other) => panic!("{name}: {other}"),
        }
    }
    eventually("all space is free", || free_bytes(&node) == (all, all));
    let stats = master.service().stats();
    assert_eq!((stats.live_units, stats.reserved_units, stats.objects), (0, 0, 0));
    println!("{there} of {} puts were there", tried.len());
}
