//! [`ShmServer`]: node side of shared memory. Accepts client processes, serves their streams, and detects their exit.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use moontide_heap::{ClientEvent, ExitMonitor, ExitMonitorError, ShmClient, ShmError, ShmListener};
use moontide_rt::sync::{Arc, Mutex, lock};
use tracing::{debug, info, warn};

use crate::error::PeerName;
use crate::metrics::Metrics;
use crate::owner::{Owner, PeerIdentity};
use crate::tcp::server::{Shared as StreamServer, TcpServerConfig};

/// Interval at which waiting threads check whether they must stop.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Most handshakes at the same time, each on a thread; further processes wait in the kernel's queue. A silent one is closed
/// after two seconds.
const HANDSHAKES_MAX: usize = 64;

/// Interval at which the acceptor checks whether a handshake has ended, at their limit.
const HANDSHAKE_POLL_INTERVAL: Duration = Duration::from_millis(10);

/// Configuration of a shared-memory server.
#[derive(Clone, Debug)]
pub struct ShmServerConfig {
    /// Path of the Unix socket.
    pub socket: PathBuf,
    /// Users whose processes may attach, besides the user of this process.
    pub extra_uids: Vec<u32>,
    /// How long clients trust the node without a heartbeat. The owner of the heap must send heartbeats more often.
    pub stale_after: Duration,
    /// Most streams at the same time.
    pub streams_max: usize,
}

/// Error of [`ShmServer::start`].
#[derive(Debug, thiserror::Error)]
pub enum ShmServerError {
    /// The listener cannot be opened.
    #[error("cannot listen on {path}: {source}")]
    Listen {
        /// Path of the socket.
        path: PathBuf,
        /// Error of the listener.
        source: ShmError,
    },
    /// The monitor for client exits cannot be created.
    #[error(transparent)]
    Watch(#[from] ExitMonitorError),
    /// A thread could not be started.
    #[error("cannot start a thread: {0}")]
    Thread(std::io::Error),
}

/// Lets processes of this host use the owner's memory. Dropping it stops accepting processes and ends the streams;
/// attached processes keep the memory mapped.
#[derive(Debug)]
pub struct ShmServer {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    socket: PathBuf,
}

#[derive(Debug)]
struct Shared {
    listener: ShmListener,
    owner: Arc<dyn Owner>,
    streams: Arc<StreamServer>,
    exits: ExitMonitor,
    clients: Mutex<Vec<JoinHandle<()>>>,
    handshakes: AtomicUsize,
    stopped: AtomicBool,
}

impl ShmServer {
    /// Opens the listener and starts the threads.
    ///
    /// # Safety
    /// As [`ShmListener::bind`]: a process that attaches maps the payload for writing and is trusted to keep to the
    /// protocol.
    pub unsafe fn start(
        config: ShmServerConfig,
        owner: Arc<dyn Owner>,
        metrics: Arc<Metrics>,
    ) -> Result<ShmServer, ShmServerError> {
        let ShmServerConfig { socket: path, extra_uids, stale_after, streams_max } = config;
        // SAFETY: the caller upholds the contract, which is the same.
        let bound = unsafe { ShmListener::bind(&path, &extra_uids, stale_after) };
        let listener = bound.map_err(|source| ShmServerError::Listen { path: path.clone(), source })?;
        let stream_config = TcpServerConfig {
            listen: Vec::new(),
            connections_max: streams_max,
            connections_per_peer_max: streams_max.div_ceil(2),
            ..TcpServerConfig::default()
        };
        let streams = StreamServer::new(stream_config, Arc::clone(&owner), metrics);
        let (exits, clients, stopped) = (ExitMonitor::new()?, Mutex::default(), AtomicBool::new(false));
        let handshakes = AtomicUsize::new(0);
        let shared = Arc::new(Shared { listener, owner, streams, exits, clients, handshakes, stopped });
        let mut server = ShmServer { shared, threads: Vec::new(), socket: path };
        server.spawn("moontide-shm", Shared::accept_clients)?;
        server.spawn("moontide-exits", Shared::handle_exits)?;
        Ok(server)
    }

    /// Returns the path of the Unix socket.
    pub fn socket(&self) -> &std::path::Path {
        &self.socket
    }

    fn spawn(&mut self, name: &str, run: fn(&Arc<Shared>)) -> Result<(), ShmServerError> {
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || run(&shared));
        self.threads.push(thread.map_err(ShmServerError::Thread)?);
        Ok(())
    }
}

impl Drop for ShmServer {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::SeqCst);
        for thread in self.threads.drain(..) {
            // A panic was printed by the thread itself.
            let _ = thread.join();
        }
        let clients = std::mem::take(&mut *lock(&self.shared.clients));
        for client in clients {
            let _ = client.join();
        }
        self.shared.streams.stop();
    }
}

impl Shared {
    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    fn accept_clients(self: &Arc<Self>) {
        while !self.is_stopped() {
            if self.handshakes.load(Ordering::SeqCst) >= HANDSHAKES_MAX {
                std::thread::sleep(HANDSHAKE_POLL_INTERVAL);
                continue;
            }
            match self.listener.accept_timeout(STOP_POLL_INTERVAL) {
                Ok(None) => {}
                Ok(Some(socket)) => {
                    let shared = Arc::clone(self);
                    // One thread per client, so that a slow handshake does not delay other clients.
                    let thread =
                        std::thread::Builder::new().name("moontide-client".into()).stack_size(256 << 10);
                    self.handshakes.fetch_add(1, Ordering::SeqCst);
                    let spawned = thread.spawn(move || {
                        let attached = shared.listener.handshake(socket, shared.owner.heap());
                        shared.handshakes.fetch_sub(1, Ordering::SeqCst);
                        match attached {
                            Ok(client) => shared.serve_client(client),
                            Err(error) => warn!(%error, "shm client rejected"),
                        }
                    });
                    let mut clients = lock(&self.clients);
                    clients.retain(|client| !client.is_finished());
                    match spawned {
                        Ok(thread) => clients.push(thread),
                        Err(error) => {
                            self.handshakes.fetch_sub(1, Ordering::SeqCst);
                            warn!(%error, "cannot start a thread for an shm client");
                        }
                    }
                }
                Err(error) => {
                    warn!(%error, "cannot poll the shm socket");
                    std::thread::sleep(STOP_POLL_INTERVAL);
                }
            }
        }
    }

    /// Serves the streams that a process opens, until it closes its connection or exits.
    fn serve_client(self: &Arc<Self>, mut process: ShmClient) {
        let client = process.ledger.client();
        let pid = process.pid;
        info!(client = client.0, pid, uid = process.uid, "shm client attached");
        let pidfd = match process.pidfd.try_clone() {
            Ok(pidfd) => std::mem::replace(&mut process.pidfd, pidfd),
            Err(error) => return warn!(pid, %error, "cannot monitor shm client for its exit"),
        };
        if let Err(error) = self.exits.watch(client, pidfd) {
            return warn!(pid, %error, "cannot monitor shm client for its exit");
        }
        while !self.is_stopped() {
            match process.poll(STOP_POLL_INTERVAL) {
                Ok(ClientEvent::Idle) => {}
                Ok(ClientEvent::Stream(stream)) => {
                    let served =
                        self.streams.serve(stream, PeerName::Local(pid), Some(PeerIdentity::Local(client)));
                    if let Err(failure) = served {
                        debug!(pid, %failure, "cannot serve a stream of shm client");
                    }
                }
                // It may still read the mapped memory; its pidfd reports its exit.
                Ok(ClientEvent::Closed) => return,
                Err(error) => return warn!(pid, %error, "shm client sent an invalid message"),
            }
        }
    }

    fn handle_exits(self: &Arc<Self>) {
        while !self.is_stopped() {
            match self.exits.wait(STOP_POLL_INTERVAL) {
                Ok(exits) => {
                    for exit in exits {
                        let client = exit.client().0;
                        let abandoned = self.owner.heap().client_exited(exit);
                        let count = abandoned.len();
                        info!(client, abandoned = count, "shm client exited");
                        if count > 0 {
                            self.owner.on_client_exit(&abandoned);
                        }
                    }
                }
                Err(error) => {
                    warn!(%error, "cannot wait for exits of shm clients");
                    std::thread::sleep(STOP_POLL_INTERVAL);
                }
            }
        }
    }
}
