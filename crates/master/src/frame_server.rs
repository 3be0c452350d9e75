//! Frame server: the hot calls without gRPC. This file owns the threads and the acceptor; [`connection`] handles one
//! connection.
//!
//! Each thread has its own event loop. A connection is assigned to the thread with the fewest connections and is
//! handled by it until it is closed. So a single caller waits for no thread switch, and callers on different threads
//! contend only for the locks of groups.
//!
//! Limits: connections by `connections_max` ([`Admission`] says which ones give way), memory of large bodies by
//! [`LARGE_BODIES_BYTES_MAX`], half of it for one address, time by the constants of [`connection`].

mod connection;
mod reply;

use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use moontide_auth::ClientCertificates;
use moontide_tasks::{Admission, Refusal, TlsServer};
use moontide_types::ErrorCode;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::{Builder, Handle};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tracing::{debug, warn};

use crate::metrics::ServerCounters;
use crate::service::Service;
use connection::Connection;

/// Maximum memory of all bodies larger than a read buffer; further connections with large bodies wait. 32 largest
/// requests at a time are enough to keep all cores busy.
const LARGE_BODIES_BYTES_MAX: usize = 512 << 20;

/// Maximum number of rejected connections that are being sent an error frame. Further ones are closed without it.
const REJECTS_IN_FLIGHT_MAX: usize = 64;

/// Name of the protocol over TLS.
const ALPN_FRAMES: &[u8] = b"moontide-frames";

/// Time for which a thread waits at shutdown for pending replies.
const GRACE: Duration = Duration::from_secs(5);

/// Shared state of all connections.
pub(crate) struct Shared {
    service: Arc<Service>,
    /// Random number of this process, for HelloAck.
    caller: u64,
    inflight_max: u32,
    /// One permit per KiB of large bodies.
    large_bodies: Arc<Semaphore>,
    stopping: AtomicBool,
    tls: TlsServer,
    /// Whether busy polling is allowed: the host has more than one core.
    may_busy_poll: bool,
}

/// Configuration of the frame server.
pub(crate) struct FrameServerConfig {
    pub(crate) threads: usize,
    pub(crate) connections_max: u32,
    pub(crate) inflight_per_connection_max: u32,
    pub(crate) caller: u64,
}

/// Threads of the frame server.
pub(crate) struct FrameServer {
    shared: Arc<Shared>,
    threads: Vec<ServerThread>,
    admission: Arc<Admission>,
    reject_permits: Arc<Semaphore>,
}

struct ServerThread {
    runtime: Handle,
    state: Arc<ThreadState>,
}

/// Shared state of the connections of one thread.
#[derive(Default)]
struct ThreadState {
    counters: Arc<ServerCounters>,
    /// Number of connections with a pending reply.
    busy: AtomicU64,
}

/// Counts a connection as open.
struct Opened(Arc<ServerCounters>);

impl Drop for Opened {
    fn drop(&mut self) {
        self.0.closed();
    }
}

impl FrameServer {
    /// Starts the threads, which are idle until [`FrameServer::accept`] assigns connections. They end at most [`GRACE`]
    /// after `stop` becomes true or its sender is dropped.
    pub(crate) fn start(
        config: FrameServerConfig,
        service: Arc<Service>,
        stop: watch::Receiver<bool>,
    ) -> io::Result<(Arc<FrameServer>, Vec<JoinHandle<()>>)> {
        let tls = TlsServer::new(service.credentials().cloned(), ClientCertificates::Required, ALPN_FRAMES);
        let shared = Arc::new(Shared {
            service,
            caller: config.caller,
            inflight_max: config.inflight_per_connection_max,
            large_bodies: Arc::new(Semaphore::new(LARGE_BODIES_BYTES_MAX >> 10)),
            stopping: AtomicBool::new(false),
            tls,
            may_busy_poll: std::thread::available_parallelism().is_ok_and(|cores| cores.get() > 1),
        });
        let threads = (0..config.threads).map(|index| start_thread(index, &shared, stop.clone()));
        let (threads, joins) = threads.collect::<io::Result<(Vec<_>, Vec<_>)>>()?;
        let server = FrameServer {
            shared,
            threads,
            admission: Admission::new(config.connections_max as usize),
            reject_permits: Arc::new(Semaphore::new(REJECTS_IN_FLIGHT_MAX)),
        };
        Ok((Arc::new(server), joins))
    }

    /// Returns the counters of each thread.
    pub(crate) fn counters(&self) -> Vec<Arc<ServerCounters>> {
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
                    if let Err(error) = self.assign(socket, peer.ip()) {
                        debug!(%peer, %error, "frame connection closed before its start");
                    }
                }
                Err(error) if is_of_connection(&error) => {
                    debug!(%error, "frame connection closed before its start")
                }
                Err(error) => {
                    // Out of descriptors or memory: an immediate retry would fail again.
                    warn!(%error, "cannot accept connections");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }

    /// Assigns a connection to the thread with the fewest connections.
    fn assign(&self, socket: TcpStream, peer: IpAddr) -> io::Result<()> {
        socket.set_nodelay(true)?;
        keep_alive(&socket)?;
        let thread = self
            .threads
            .iter()
            .min_by_key(|thread| thread.state.counters.connections())
            .expect("the frame server has at least one thread");
        let (place, evicted) = match self.admission.admit(peer) {
            Ok(admitted) => admitted,
            Err(refusal) => {
                thread.state.counters.refused();
                // The reason would have to be encrypted.
                let permit = Arc::clone(&self.reject_permits).try_acquire_owned();
                if let Some(permit) = permit.ok().filter(|_| !self.shared.tls.is_tls()) {
                    tokio::spawn(reject_connection(socket, refusal, permit));
                }
                return Ok(());
            }
        };
        thread.state.counters.opened();
        let opened = Opened(Arc::clone(&thread.state.counters));
        // The socket moves from the event loop of this runtime to that of its thread.
        let socket = socket.into_std()?;
        let (shared, state) = (Arc::clone(&self.shared), Arc::clone(&thread.state));
        thread.runtime.spawn(async move {
            let serve = async {
                let socket = match TcpStream::from_std(socket) {
                    Ok(socket) => socket,
                    Err(error) => {
                        return warn!(%error, "cannot register connection with the event loop");
                    }
                };
                // A failed handshake has been logged.
                if let Ok(Ok(stream)) =
                    tokio::time::timeout(connection::FRAME_TIME_MAX, shared.tls.accept(socket)).await
                {
                    Connection::new(stream, place, shared, state).run().await;
                }
            };
            tokio::select! {
                biased;
                () = serve => {}
                () = evicted => {
                    opened.0.refused();
                    debug!(%peer, "frame connection closed in favour of another one: no request");
                }
            }
            drop(opened);
        });
        Ok(())
    }
}

fn start_thread(
    index: usize,
    shared: &Arc<Shared>,
    mut stop: watch::Receiver<bool>,
) -> io::Result<(ServerThread, JoinHandle<()>)> {
    let runtime = Builder::new_current_thread().enable_io().enable_time().build()?;
    let handle = runtime.handle().clone();
    let state = Arc::new(ThreadState::default());
    let (shared, of_thread) = (Arc::clone(shared), Arc::clone(&state));
    let join = std::thread::Builder::new().name(format!("frame-{index}")).spawn(move || {
        runtime.block_on(async {
            // An error means that the sender was dropped, which also means shutdown.
            let _ = stop.wait_for(|&stop| stop).await;
            shared.stopping.store(true, Ordering::Relaxed);
            let end = tokio::time::Instant::now() + GRACE;
            while of_thread.busy.load(Ordering::Relaxed) > 0 && tokio::time::Instant::now() < end {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        });
        // Idle connections, and connections after the grace period, are closed with the runtime.
    })?;
    Ok((ServerThread { runtime: handle, state }, join))
}

/// Sends an error frame with `Busy`, and closes.
async fn reject_connection(mut socket: TcpStream, refusal: Refusal, _permit: OwnedSemaphorePermit) {
    let mut frame = Vec::new();
    let text = match refusal {
        Refusal::Full => "connection limit reached; see connections_max",
        Refusal::Address => "too many connections from this address: half of connections_max",
    };
    reply::push_error(&mut frame, 0, ErrorCode::Busy, text);
    connection::send_and_close(&mut socket, &frame).await;
}

/// Enables TCP keepalive: idle connections are allowed, but dead ones count against the limit.
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
