//! A proxy that forwards streams badly: in small pieces, through small buffers, slowly, or only up to a point.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::time::Duration;

use rustix::net::sockopt;

use crate::kit::Rng;

/// How badly.
#[derive(Clone, Copy)]
pub struct Manners {
    /// Longest piece.
    pub piece_max: u64,
    /// Size of the sockets' buffers, if not the kernel's.
    pub buffer: Option<usize>,
    /// A connection is cut after at most so many bytes, both directions together.
    pub cut_within: Option<u64>,
    /// Bytes per second and direction.
    pub rate: Option<u64>,
}

pub struct Proxy {
    pub address: SocketAddr,
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<()>>,
}

impl Proxy {
    pub fn start(upstream: SocketAddr, manners: Manners, mut rng: Rng) -> Proxy {
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("it is bound");
        // What is accepted inherits the buffer.
        shrink(&listener, manners);
        let stop = Arc::<AtomicBool>::default();
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut pumps = Vec::new();
            let mut streams: Vec<TcpStream> = Vec::new();
            while let Ok((near, _)) = listener.accept() {
                if stopped.load(Ordering::SeqCst) {
                    break;
                }
                let Ok(far) = TcpStream::connect(upstream) else { continue };
                shrink(&near, manners);
                shrink(&far, manners);
                let budget = manners.cut_within.map_or(i64::MAX, |max| rng.within(0, max) as i64);
                let budget = Arc::new(AtomicI64::new(budget));
                for (from, to) in [(&near, &far), (&far, &near)] {
                    let (from, to) = (from.try_clone().expect("a handle"), to.try_clone().expect("a handle"));
                    let (budget, rng) = (Arc::clone(&budget), rng.fork());
                    pumps.push(std::thread::spawn(move || pump(from, to, manners, &budget, rng)));
                }
                streams.extend([near, far]);
                // Those that have ended need no descriptor.
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

fn shrink(socket: &impl std::os::fd::AsFd, manners: Manners) {
    if let Some(bytes) = manners.buffer {
        sockopt::set_socket_recv_buffer_size(socket, bytes).expect("a buffer's size");
        sockopt::set_socket_send_buffer_size(socket, bytes).expect("a buffer's size");
    }
}

fn pump(mut from: TcpStream, mut to: TcpStream, manners: Manners, budget: &AtomicI64, mut rng: Rng) {
    let _ = to.set_nodelay(true);
    let mut piece = vec![0; manners.piece_max as usize];
    loop {
        let wanted = rng.within(1, manners.piece_max + 1) as usize;
        let Ok(count @ 1..) = from.read(&mut piece[..wanted]) else { break };
        let left = budget.fetch_sub(count as i64, Ordering::SeqCst);
        let count = count.min(left.max(0) as usize);
        if to.write_all(&piece[..count]).is_err() || left <= count as i64 {
            break;
        }
        if let Some(rate) = manners.rate {
            std::thread::sleep(Duration::from_secs_f64(count as f64 / rate as f64));
        }
    }
    let _ = from.shutdown(Shutdown::Both);
    let _ = to.shutdown(Shutdown::Both);
}
