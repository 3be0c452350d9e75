//! A proxy in front of a node that is slow on the way back, or cuts connections in the middle.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::time::{Duration, Instant};

use crate::content::Rng;

/// What can be changed while it runs.
#[derive(Debug, Default)]
pub struct Manners {
    upstream: Mutex<Option<SocketAddr>>,
    /// How much later what the node says arrives.
    delay_ms: AtomicU64,
    /// A connection is cut after at most so many bytes of the node; 0 for never.
    cut_within: AtomicU64,
    cuts: AtomicU64,
    stopped: AtomicBool,
}

pub struct Proxy {
    pub address: SocketAddr,
    manners: Arc<Manners>,
}

impl Proxy {
    /// Listens; whom it speaks for is told later.
    pub fn start(mut rng: Rng) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("it is bound");
        let manners = Arc::<Manners>::default();
        let shared = Arc::clone(&manners);
        // Threads end with their connections, which end with the node.
        std::thread::spawn(move || {
            while let Ok((near, _)) = listener.accept() {
                if shared.stopped.load(Ordering::SeqCst) {
                    return;
                }
                let upstream = *shared.upstream.lock().expect("no holder panics");
                let Some(far) = upstream.and_then(|upstream| TcpStream::connect(upstream).ok()) else {
                    continue;
                };
                carry(near, far, &shared, rng.fork());
            }
        });
        Proxy { address, manners }
    }

    pub fn speak_for(&self, upstream: SocketAddr) {
        *self.manners.upstream.lock().expect("no holder panics") = Some(upstream);
    }

    pub fn set_delay(&self, delay: Duration) {
        self.manners.delay_ms.store(delay.as_millis() as u64, Ordering::SeqCst);
    }

    pub fn cut_within(&self, bytes: u64) {
        self.manners.cut_within.store(bytes, Ordering::SeqCst);
    }

    /// How many connections were cut.
    pub fn cuts(&self) -> u64 {
        self.manners.cuts.load(Ordering::SeqCst)
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.manners.stopped.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
    }
}

fn carry(near: TcpStream, far: TcpStream, manners: &Arc<Manners>, mut rng: Rng) {
    let _ = near.set_nodelay(true).and(far.set_nodelay(true));
    let clone = |stream: &TcpStream| stream.try_clone().expect("a handle");
    let (mut from, mut to) = (clone(&near), clone(&far));
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut from, &mut to);
        let _ = (from.shutdown(Shutdown::Both), to.shutdown(Shutdown::Both));
    });
    // What the node says waits in a queue until its time has come, so that it is late but not slow.
    let (queue, queued) = mpsc::channel::<(Instant, Vec<u8>)>();
    let (mut from, shared) = (clone(&far), Arc::clone(manners));
    std::thread::spawn(move || {
        let mut space = vec![0; 64 << 10];
        while let Ok(count @ 1..) = from.read(&mut space) {
            let due = Instant::now() + Duration::from_millis(shared.delay_ms.load(Ordering::SeqCst));
            if queue.send((due, space[..count].to_vec())).is_err() {
                break;
            }
        }
    });
    let (mut to, shared) = (near, Arc::clone(manners));
    std::thread::spawn(move || {
        let (mut said, mut budget) = (0, None);
        for (due, bytes) in queued {
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            let within = shared.cut_within.load(Ordering::SeqCst);
            if within == 0 {
                budget = None;
            } else if budget.is_none() {
                budget = Some(said + rng.within(1, within as usize));
            }
            let count = budget.map_or(bytes.len(), |budget| bytes.len().min(budget - said));
            if to.write_all(&bytes[..count]).is_err() {
                break;
            }
            said += count;
            if budget == Some(said) {
                shared.cuts.fetch_add(1, Ordering::SeqCst);
                break;
            }
        }
        let _ = (to.shutdown(Shutdown::Both), far.shutdown(Shutdown::Both));
    });
}
