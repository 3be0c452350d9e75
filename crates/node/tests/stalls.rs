//! A network, or a node, that stalls for some time and then continues with earlier messages.

mod support;

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use moontide_node::{Node, NodeConfig};
use support::*;

/// Proxy between a node and its master that can hold back either direction without loss.
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
            for local in listener.incoming().map_while(Result::ok) {
                let Ok(remote) = TcpStream::connect(master) else { continue };
                let [to_master, to_node] = valves.clone();
                for (from, to, open) in [(&local, &remote, to_master), (&remote, &local, to_node)] {
                    let (from, to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    to.set_nodelay(true).unwrap();
                    std::thread::spawn(move || forward(from, to, &open));
                }
            }
        });
        Valves { address, to_master, to_node }
    }
}

fn forward(mut from: TcpStream, mut to: TcpStream, open: &AtomicBool) {
    let mut bytes = [0; 4096];
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        while !open.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(2));
        }
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(Shutdown::Both); // the other side may have closed it already
}

#[test]
fn stale_heartbeat_ack_does_not_reopen_index() {
    // Failure: a node that had stalled found removed objects in its index. Cause: it took minutes-old responses of the
    // master for current ones. Fix: a response confirms only the time at which its heartbeat was sent.
    init_logs();
    let master = master();
    let valves = Valves::new(master.addresses().grpc);
    let config =
        NodeConfig { self_fence_timeout: Duration::from_millis(1500), ..node_config(valves.address) };
    let node = Node::start(config).unwrap();
    let is_open = || metric(&node, "local_index_open") == 1;
    eventually("the index is open", is_open);
    // The master still acknowledges a heartbeat (there is one per second); the node does not receive the response.
    valves.to_node.store(false, Ordering::SeqCst);
    std::thread::sleep(Duration::from_millis(1100));
    valves.to_master.store(false, Ordering::SeqCst);
    let held = Instant::now();
    eventually("the index closes", || !is_open());
    // All delayed responses belong to heartbeats that are too old by now.
    std::thread::sleep(Duration::from_millis(1600).saturating_sub(held.elapsed()));
    valves.to_node.store(true, Ordering::SeqCst);
    let end = Instant::now() + Duration::from_millis(500);
    while Instant::now() < end {
        assert!(!is_open(), "opened by the acknowledgement of an old heartbeat");
        std::thread::sleep(Duration::from_millis(5));
    }
    valves.to_master.store(true, Ordering::SeqCst);
    eventually("the index is open again", is_open);
}
