//! The framed door: the hot calls without gRPC. Here are its threads and the acceptor, in [`connection`] what happens
//! on a connection.
//!
//! Each thread is an event loop of its own; a connection stays on the thread that it was given to, the one with the
//! fewest, and its requests are handled where they are read. So a lone caller waits for no hand-over, and callers on
//! different threads meet only at the groups' locks.
//!
//! Bounds: connections by `connections_max`, memory of large bodies by [`LARGE_BODIES_BYTES_MAX`], time by the
//! constants of [`connection`].

mod connection;
mod reply;

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use moontide_types::ErrorCode;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Handle};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tracing::{debug, warn};

use crate::metrics::DoorCounters;
use crate::service::Service;
use connection::Connection;

/// Bodies above the size of a read buffer may take so much memory together; the connections of the others wait. 32
/// largest requests at a time are more than any number of cores works on.
const LARGE_BODIES_BYTES_MAX: usize = 512 << 20;

/// Connections that are being told that there is no room. Beyond them nobody is told.
const REFUSALS_MAX: usize = 64;

/// How long a thread waits at the end for replies that are due.
const GRACE: Duration = Duration::from_secs(5);

/// What connections share.
pub(crate) struct Shared {
    service: Arc<Service>,
    /// Number of this process, for HelloAck.
    caller: u64,
    inflight_max: u32,
    /// Permits are KiB of large bodies.
    large_bodies: Arc<Semaphore>,
    stopping: AtomicBool,
    /// There is another core for whoever has something to do while a thread looks for the next request.
    may_linger: bool,
}

/// What the door must know.
pub(crate) struct FrameDoorConfig {
    pub(crate) threads: usize,
    pub(crate) connections_max: u32,
    pub(crate) inflight_per_connection_max: u32,
    pub(crate) caller: u64,
}

/// The threads of the door.
pub(crate) struct FrameDoor {
    shared: Arc<Shared>,
    threads: Vec<DoorThread>,
    seats: Arc<Semaphore>,
    refusals: Arc<Semaphore>,
}

struct DoorThread {
    runtime: Handle,
    state: Arc<ThreadState>,
}

/// What the connections of one thread share.
#[derive(Default)]
struct ThreadState {
    counters: Arc<DoorCounters>,
    /// Connections with a reply that is due.
    busy: AtomicU64,
}

/// A connection's place; given back when it is dropped.
struct Seat {
    counters: Arc<DoorCounters>,
    _permit: OwnedSemaphorePermit,
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.counters.closed();
    }
}

impl FrameDoor {
    /// Starts the threads, which do nothing until [`FrameDoor::accept`] gives them connections. They end at most
    /// [`GRACE`] after `stop` becomes true or its sender is gone.
    pub(crate) fn start(
        config: FrameDoorConfig,
        service: Arc<Service>,
        stop: watch::Receiver<bool>,
    ) -> io::Result<(Arc<FrameDoor>, Vec<JoinHandle<()>>)> {
        let shared = Arc::new(Shared {
            service,
            caller: config.caller,
            inflight_max: config.inflight_per_connection_max,
            large_bodies: Arc::new(Semaphore::new(LARGE_BODIES_BYTES_MAX >> 10)),
            stopping: AtomicBool::new(false),
            may_linger: std::thread::available_parallelism().is_ok_and(|cores| cores.get() > 1),
        });
        let threads = (0..config.threads).map(|index| start_thread(index, &shared, stop.clone()));
        let (threads, joins) = threads.collect::<io::Result<(Vec<_>, Vec<_>)>>()?;
        let door = FrameDoor {
            shared,
            threads,
            seats: Arc::new(Semaphore::new(config.connections_max as usize)),
            refusals: Arc::new(Semaphore::new(REFUSALS_MAX)),
        };
        Ok((Arc::new(door), joins))
    }

    /// Counters of each thread.
    pub(crate) fn counters(&self) -> Vec<Arc<DoorCounters>> {
        self.threads.iter().map(|thread| Arc::clone(&thread.state.counters)).collect()
    }

    /// Accepts connections until `stop` becomes true.
    pub(crate) async fn accept(self: Arc<Self>, listener: TcpListener, mut stop: watch::Receiver<bool>) {
        loop {
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                _ = stop.wait_for(|&stop| stop) => return,
            };
            match accepted {
                Ok((socket, peer)) => {
                    debug!(%peer, "frame connection");
                    if let Err(error) = self.seat(socket) {
                        debug!(%peer, %error, "a connection ended before it began");
                    }
                }
                Err(error) if is_of_connection(&error) => {
                    debug!(%error, "a connection ended before it began")
                }
                Err(error) => {
                    // Out of descriptors or memory: it would fail again at once.
                    warn!(%error, "cannot accept connections");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }

    /// Gives a connection to the thread with the fewest.
    fn seat(&self, socket: TcpStream) -> io::Result<()> {
        socket.set_nodelay(true)?;
        keep_alive(&socket)?;
        let thread = self
            .threads
            .iter()
            .min_by_key(|thread| thread.state.counters.connections())
            .expect("a door has at least one thread");
        let Ok(permit) = Arc::clone(&self.seats).try_acquire_owned() else {
            thread.state.counters.refused();
            if let Ok(permit) = Arc::clone(&self.refusals).try_acquire_owned() {
                tokio::spawn(refuse(socket, permit));
            }
            return Ok(());
        };
        let counters = Arc::clone(&thread.state.counters);
        counters.opened();
        let seat = Seat { counters, _permit: permit };
        // The socket leaves this runtime's event loop for that of its thread.
        let socket = socket.into_std()?;
        let (shared, state) = (Arc::clone(&self.shared), Arc::clone(&thread.state));
        thread.runtime.spawn(async move {
            match TcpStream::from_std(socket) {
                Ok(socket) => Connection::new(socket, shared, state).run().await,
                Err(error) => warn!(%error, "cannot watch a connection"),
            }
            drop(seat);
        });
        Ok(())
    }
}

fn start_thread(
    index: usize,
    shared: &Arc<Shared>,
    mut stop: watch::Receiver<bool>,
) -> io::Result<(DoorThread, JoinHandle<()>)> {
    let runtime = Builder::new_current_thread().enable_io().enable_time().build()?;
    let handle = runtime.handle().clone();
    let state = Arc::new(ThreadState::default());
    let (shared, of_thread) = (Arc::clone(shared), Arc::clone(&state));
    let join = std::thread::Builder::new().name(format!("frame-{index}")).spawn(move || {
        runtime.block_on(async {
            // An error means that the server is gone, which is the end as well.
            let _ = stop.wait_for(|&stop| stop).await;
            shared.stopping.store(true, Ordering::Relaxed);
            let end = tokio::time::Instant::now() + GRACE;
            while of_thread.busy.load(Ordering::Relaxed) > 0 && tokio::time::Instant::now() < end {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        });
        // Connections that are idle, or have had their grace, end with the runtime.
    })?;
    Ok((DoorThread { runtime: handle, state }, join))
}

/// Says that there is no room, and closes.
async fn refuse(mut socket: TcpStream, _permit: OwnedSemaphorePermit) {
    let mut frame = Vec::new();
    reply::push_error(&mut frame, 0, ErrorCode::Busy, "this master has connections_max connections already");
    connection::say_goodbye(&mut socket, &frame).await;
}

/// Lets the kernel find out that a peer is gone: idle connections are legal, dead ones take a seat.
fn keep_alive(socket: &TcpStream) -> io::Result<()> {
    use rustix::net::sockopt;
    sockopt::set_socket_keepalive(socket, true)?;
    sockopt::set_tcp_keepidle(socket, Duration::from_secs(60))?;
    sockopt::set_tcp_keepintvl(socket, Duration::from_secs(10))?;
    sockopt::set_tcp_keepcnt(socket, 3)?;
    Ok(())
}

fn is_of_connection(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset)
}
