//! A proxy that forwards streams with faults: fragmented, through small buffers, slowly, or only up to a point.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use rustix::net::sockopt;

use crate::harness::Rng;

/// Faults of a proxy.
#[derive(Clone, Copy)]
pub struct ProxyFaults {
    /// Longest fragment in bytes.
    pub fragment_max: u64,
    /// Size of the sockets' buffers; `None`: the kernel's default.
    pub buffer_bytes: Option<usize>,
    /// A connection breaks after at most this many bytes, in both directions together.
    pub break_within: Option<u64>,
    /// Bytes per second and direction.
    pub rate: Option<u64>,
}

pub struct Proxy {
    pub address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Proxy {
    pub fn start(upstream: SocketAddr, faults: ProxyFaults, mut rng: Rng) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("the listener is bound");
        // Accepted sockets inherit the buffer size.
        set_buffers(&listener, faults);
        let stop = Arc::<AtomicBool>::default();
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut pumps = Vec::new();
            let mut streams: Vec<TcpStream> = Vec::new();
            while let Ok((downstream, _)) = listener.accept() {
                if stopped.load(Ordering::SeqCst) {
                    break;
                }
                let Ok(upstream) = TcpStream::connect(upstream) else { continue };
                set_buffers(&downstream, faults);
                set_buffers(&upstream, faults);
                let budget = faults.break_within.map_or(i64::MAX, |max| rng.within(0, max) as i64);
                let budget = Arc::new(AtomicI64::new(budget));
                for (from, to) in [(&downstream, &upstream), (&upstream, &downstream)] {
                    let (from, to) = (from.try_clone().expect("a handle"), to.try_clone().expect("a handle"));
                    let (budget, rng) = (Arc::clone(&budget), rng.fork());
                    pumps.push(std::thread::spawn(move || pump(from, to, faults, &budget, rng)));
                }
                streams.extend([downstream, upstream]);
                // Ended streams need no descriptor.
                if pumps.iter().all(std::thread::JoinHandle::is_finished) {
                    pumps.clear();
                    streams.clear();
                }
            }
            streams.iter().for_each(|stream| drop(stream.shutdown(Shutdown::Both)));
            pumps.into_iter().for_each(|pump| pump.join().expect("a pump does not panic"));
        });
        Proxy { address, stop, thread: Some(thread) }
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::SeqCst);
        let _ = TcpStream::connect(self.address);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn set_buffers(socket: &impl std::os::fd::AsFd, faults: ProxyFaults) {
    if let Some(bytes) = faults.buffer_bytes {
        sockopt::set_socket_recv_buffer_size(socket, bytes).expect("set the buffer size");
        sockopt::set_socket_send_buffer_size(socket, bytes).expect("set the buffer size");
    }
}

fn pump(mut from: TcpStream, mut to: TcpStream, faults: ProxyFaults, budget: &AtomicI64, mut rng: Rng) {
    let _ = to.set_nodelay(true);
    let mut fragment = vec![0; faults.fragment_max as usize];
    loop {
        let len = rng.within(1, faults.fragment_max + 1) as usize;
        let Ok(count @ 1..) = from.read(&mut fragment[..len]) else { break };
        let left = budget.fetch_sub(count as i64, Ordering::SeqCst);
        let count = count.min(left.max(0) as usize);
        if to.write_all(&fragment[..count]).is_err() || left <= count as i64 {
            break;
        }
        if let Some(rate) = faults.rate {
            std::thread::sleep(Duration::from_secs_f64(count as f64 / rate as f64));
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
