//! [`Host`]: the node's end of shared memory. Lets processes in, serves their streams, and notices when they end.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::Duration;

use moontide_heap::{DeathWatch, Door, DoorError, Said, Visitor, WatchError};
use tracing::{debug, info, warn};

use crate::error::Name;
use crate::metrics::Metrics;
use crate::owner::{Caller, Owner};
use crate::sync::{Arc, Mutex, lock};
use crate::tcp::server::{ServerConfig, Shared as Sessions};

/// How often threads that wait look whether they shall stop.
const LOOK: Duration = Duration::from_millis(200);

/// How a host behaves.
#[derive(Clone, Debug)]
pub struct HostConfig {
    /// The door's path.
    pub door: PathBuf,
    /// Users whose processes may enter, besides this process's own.
    pub more_uids: Vec<u32>,
    /// How long clients believe the node without a beat. Whoever owns the heap beats more often.
    pub stale_after: Duration,
    /// Most streams at a time.
    pub streams_max: usize,
}

/// Why a host could not be started.
#[derive(Debug, thiserror::Error)]
pub enum HostError {
    /// The door cannot be opened.
    #[error("open the door at {path}: {source}")]
    Door {
        /// Where.
        path: PathBuf,
        /// Why not.
        source: DoorError,
    },
    /// The end of clients could not be noticed.
    #[error(transparent)]
    Watch(#[from] WatchError),
    /// No thread.
    #[error("start a thread: {0}")]
    Thread(std::io::Error),
}

/// Lets processes of this host use the owner's memory. Dropping it lets nobody in any more and ends the streams; the
/// memory stays mapped by those who are in.
#[derive(Debug)]
pub struct Host {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
    door: PathBuf,
}

#[derive(Debug)]
struct Shared {
    door: Door,
    owner: Arc<dyn Owner>,
    sessions: Arc<Sessions>,
    deaths: DeathWatch,
    visitors: Mutex<Vec<JoinHandle<()>>>,
    stopped: AtomicBool,
}

impl Host {
    /// Opens the door.
    ///
    /// # Safety
    /// As [`Door::open`]: whoever enters maps the payload for writing and is trusted to keep to the protocol.
    pub unsafe fn start(
        config: HostConfig,
        owner: Arc<dyn Owner>,
        metrics: Arc<Metrics>,
    ) -> Result<Host, HostError> {
        let HostConfig { door: path, more_uids, stale_after, streams_max } = config;
        // SAFETY: says the caller.
        let opened = unsafe { Door::open(&path, &more_uids, stale_after) };
        let door = opened.map_err(|source| HostError::Door { path: path.clone(), source })?;
        let streams =
            ServerConfig { listen: Vec::new(), connections_max: streams_max, ..ServerConfig::default() };
        let sessions = Sessions::new(streams, Arc::clone(&owner), metrics);
        let (deaths, visitors, stopped) = (DeathWatch::new()?, Mutex::default(), AtomicBool::new(false));
        let shared = Arc::new(Shared { door, owner, sessions, deaths, visitors, stopped });
        let mut host = Host { shared, threads: Vec::new(), door: path };
        host.spawn("moontide-door", Shared::let_in)?;
        host.spawn("moontide-deaths", Shared::notice_deaths)?;
        Ok(host)
    }

    /// Where the door is.
    pub fn door(&self) -> &std::path::Path {
        &self.door
    }

    fn spawn(&mut self, name: &str, run: fn(&Arc<Shared>)) -> Result<(), HostError> {
        let shared = Arc::clone(&self.shared);
        let thread = std::thread::Builder::new().name(name.into()).spawn(move || run(&shared));
        self.threads.push(thread.map_err(HostError::Thread)?);
        Ok(())
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.shared.stopped.store(true, Ordering::SeqCst);
        for thread in self.threads.drain(..) {
            // A panic was told by the thread itself.
            let _ = thread.join();
        }
        let visitors = std::mem::take(&mut *lock(&self.shared.visitors));
        for visitor in visitors {
            let _ = visitor.join();
        }
        self.shared.sessions.stop();
    }
}

impl Shared {
    fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::SeqCst)
    }

    fn let_in(self: &Arc<Self>) {
        while !self.is_stopped() {
            match self.door.accept_within(LOOK) {
                Ok(None) => {}
                Ok(Some(socket)) => {
                    let shared = Arc::clone(self);
                    // A thread each, so that one that is slow at the door keeps nobody else waiting.
                    let thread =
                        std::thread::Builder::new().name("moontide-visitor".into()).stack_size(256 << 10);
                    let spawned =
                        thread.spawn(move || match shared.door.admit(socket, shared.owner.heap()) {
                            Ok(visitor) => shared.attend(visitor),
                            Err(error) => warn!(%error, "a process was not let in"),
                        });
                    let mut visitors = lock(&self.visitors);
                    visitors.retain(|visitor| !visitor.is_finished());
                    match spawned {
                        Ok(thread) => visitors.push(thread),
                        Err(error) => warn!(%error, "no thread for a process at the door"),
                    }
                }
                Err(error) => {
                    warn!(%error, "the door cannot be watched");
                    std::thread::sleep(LOOK);
                }
            }
        }
    }

    /// Serves the streams that a process opens, until it closes its connection or ends.
    fn attend(self: &Arc<Self>, mut visitor: Visitor) {
        let client = visitor.ledger.client();
        let pid = visitor.pid;
        info!(client = client.0, pid, uid = visitor.uid, "a process maps the node's memory");
        let pidfd = match visitor.pidfd.try_clone() {
            Ok(pidfd) => std::mem::replace(&mut visitor.pidfd, pidfd),
            Err(error) => return warn!(pid, %error, "a process cannot be watched"),
        };
        if let Err(error) = self.deaths.watch(client, pidfd) {
            return warn!(pid, %error, "a process cannot be watched");
        }
        while !self.is_stopped() {
            match visitor.listen(LOOK) {
                Ok(Said::Nothing) => {}
                Ok(Said::Stream(stream)) => {
                    let served = self.sessions.serve(stream, Name::Local(pid), Some(Caller::Local(client)));
                    if let Err(failure) = served {
                        debug!(pid, %failure, "a stream is not served");
                    }
                }
                // It may go on reading what it has mapped; its end is noticed by its pidfd.
                Ok(Said::Closed) => return,
                Err(error) => return warn!(pid, %error, "a process says something that makes no sense"),
            }
        }
    }

    fn notice_deaths(self: &Arc<Self>) {
        while !self.is_stopped() {
            match self.deaths.wait(LOOK) {
                Ok(ended) => {
                    for ended in ended {
                        let client = ended.client().0;
                        let abandoned = self.owner.heap().client_died(ended);
                        let count = abandoned.len();
                        info!(client, abandoned = count, "a process that mapped the node's memory has ended");
                        if count > 0 {
                            self.owner.abandoned(&abandoned);
                        }
                    }
                }
                Err(error) => {
                    warn!(%error, "the end of processes cannot be noticed");
                    std::thread::sleep(LOOK);
                }
            }
        }
    }
}
