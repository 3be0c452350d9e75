//! A proxy in front of a node that delays responses or closes connections in the middle of a transfer.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use crate::content::Rng;

/// Settings that can be changed while the proxy runs.
#[derive(Debug, Default)]
pub struct FaultProfile {
    upstream: Mutex<Option<SocketAddr>>,
    /// Delay of the bytes from the node.
    delay_ms: AtomicU64,
    /// A connection is closed after at most this number of bytes from the node; 0 for never.
    cut_within: AtomicU64,
    cuts: AtomicU64,
    stopped: AtomicBool,
}

pub struct Proxy {
    pub address: SocketAddr,
    profile: Arc<FaultProfile>,
}

impl Proxy {
    /// Starts to listen; [`Proxy::set_upstream`] sets the node.
    pub fn start(mut rng: Rng) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("the listener is bound");
        let profile = Arc::<FaultProfile>::default();
        let shared = Arc::clone(&profile);
        // Threads end with their connections, which end with the node.
        std::thread::spawn(move || {
            while let Ok((client, _)) = listener.accept() {
                if shared.stopped.load(Ordering::SeqCst) {
                    return;
                }
                let upstream = *shared.upstream.lock().expect("no holder panics");
                let Some(server) = upstream.and_then(|upstream| TcpStream::connect(upstream).ok()) else {
                    continue;
                };
                carry(client, server, &shared, rng.fork());
            }
        });
        Proxy { address, profile }
    }

    pub fn set_upstream(&self, upstream: SocketAddr) {
        *self.profile.upstream.lock().expect("no holder panics") = Some(upstream);
    }

    pub fn set_delay(&self, delay: Duration) {
        self.profile.delay_ms.store(delay.as_millis() as u64, Ordering::SeqCst);
    }

    pub fn cut_within(&self, bytes: u64) {
        self.profile.cut_within.store(bytes, Ordering::SeqCst);
    }

    /// Number of closed connections.
    pub fn cuts(&self) -> u64 {
        self.profile.cuts.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.profile.stopped.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
    }
}

fn carry(client: TcpStream, server: TcpStream, profile: &Arc<FaultProfile>, mut rng: Rng) {
    let _ = client.set_nodelay(true).and(server.set_nodelay(true));
    let clone = |stream: &TcpStream| stream.try_clone().expect("a handle");
    let (mut from, mut to) = (clone(&client), clone(&server));
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
    });
    // Bytes from the node wait in a queue until they are due: this adds latency without limiting throughput.
    let (queue, queued) = mpsc::channel::<(Instant, Vec<u8>)>();
    let (mut from, shared) = (clone(&server), Arc::clone(profile));
    std::thread::spawn(move || {
        let mut space = vec![0; 64 << 10];
        while let Ok(count @ 1..) = from.read(&mut space) {
            let due = Instant::now() + Duration::from_millis(shared.delay_ms.load(Ordering::SeqCst));
            if queue.send((due, space[..count].to_vec())).is_err() {
                break;
            }
        }
    });
    let (mut to, shared) = (client, Arc::clone(profile));
    std::thread::spawn(move || {
        let (mut sent, mut budget) = (0, None);
        for (due, bytes) in queued {
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            let within = shared.cut_within.load(Ordering::SeqCst);
            if within == 0 {
                budget = None;
            } else if budget.is_none() {
                budget = Some(sent + rng.within(1, within as usize));
            }
            let count = budget.map_or(bytes.len(), |budget| bytes.len().min(budget - sent));
            if to.write_all(&bytes[..count]).is_err() {
                break;
            }
            sent += count;
            if budget == Some(sent) {
                shared.cuts.fetch_add(1, Ordering::SeqCst);
                break;
            }
        }
        let _ = (to.shutdown(Shutdown::Both), server.shutdown(Shutdown::Both));
    });
}
