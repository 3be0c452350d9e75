//! A network, or a node, that stands still for a while and then goes on with what was under way before.

mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use moontide_node::{Node, NodeConfig};
use support::*;

/// Stands between a node and its master, and can hold back either direction without losing anything.
struct Valves {
    address: SocketAddr,
    to_master: Arc<AtomicBool>,
    to_node: Arc<AtomicBool>,
}

impl Valves {
    fn new(master: SocketAddr) -> Valves {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let (to_master, to_node) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicBool::new(true)));
        let valves = [Arc::clone(&to_master), Arc::clone(&to_node)];
        // Ends with the test's process.
        std::thread::spawn(move || {
            for near in listener.incoming().map_while(Result::ok) {
                let Ok(far) = TcpStream::connect(master) else { continue };
                let [to_master, to_node] = valves.clone();
                for (from, to, open) in [(&near, &far, to_master), (&far, &near, to_node)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    to.set_nodelay(true).unwrap();
                    std::thread::spawn(move || pass_on(from, to, &open));
                }
            }
        });
        Valves { address, to_master, to_node }
    }
}

fn pass_on(mut from: TcpStream, mut to: TcpStream, open: &AtomicBool) {
    let mut bytes = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        while !open.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(2));
        }
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both); // the other side may have gone first
}

#[test]
fn an_old_answer_that_is_read_late_does_not_open_the_index() {
    // Failure: a node that had stood still found removed objects in its index. Cause: it took answers of the master that
    // were minutes old for news of now. Fix: what an answer confirms is as old as the beat that it answers.
    logs();
    let master = master();
    let valves = Valves::new(master.addresses().grpc);
    let config = NodeConfig { local_stale_max: Duration::from_millis(1500), ..node_config(valves.address) };
    let node = Node::start(config).unwrap();
    let is_open = || metric(&node, "index_open") == 1;
    eventually("the index is open", is_open);
    // A beat, of which there is one a second, is still answered; the node does not hear of it.
    valves.to_node.store(false, Ordering::SeqCst);
    std::thread::sleep(Duration::from_millis(1100));
    valves.to_master.store(false, Ordering::SeqCst);
    let held = Instant::now();
    eventually("the index closes", || !is_open());
    // Whatever is answered was sent before: by now it says too little.
    std::thread::sleep(Duration::from_millis(1600).saturating_sub(held.elapsed()));
    valves.to_node.store(true, Ordering::SeqCst);
    let end = Instant::now() + Duration::from_millis(500);
    while Instant::now() < end {
        assert!(!is_open(), "by an answer to a beat of long ago");
        std::thread::sleep(Duration::from_millis(5));
    }
    valves.to_master.store(true, Ordering::SeqCst);
    eventually("the index is open again", is_open);
}
