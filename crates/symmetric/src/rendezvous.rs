//! Rendezvous of the ranks of a world: a listener of rank 0, from which every rank gets the memory of all ranks.
//!
//! ```text
//!   rank r                                          rank 0, on a thread of its own
//!     │── JoinWorld(shape, r)  [pidfd of itself] ──▶│  same user? own pidfd? same shape? predecessor dead?
//!     │◀── World(shape)        [control] ───────────│
//!     │◀── WorldRegion(s)      [region of s] ───────│  × ranks
//! ```
//!
//! The thread runs as long as rank 0: a rank that has exited may be replaced at any time.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use moontide_heap::socket::{self, peer_of, pid_of_pidfd, receive, send, set_timeouts, wait_readable};
use moontide_heap::{Liveness, Protection, Region, ShmError, ShmListener};
use moontide_types::{Clock, ErrorCode, SystemClock};
use rustix::io::retry_on_intr;
use rustix::net::SocketAddrUnix;
use rustix::process::PidfdFlags;

use crate::error::WorldError;
use crate::message::WorldMessage;
use crate::ranks::{Rank, RankSet};
use crate::world_memory::{WorldMemory, WorldShape, control_bytes};

/// Maximum duration of one handshake: a rank that stops during it delays the others.
const HANDSHAKE_MAX: Duration = Duration::from_secs(2);
/// Interval of connection attempts while rank 0 does not listen yet.
const CONNECT_RETRY_INTERVAL: Duration = Duration::from_millis(5);
/// Interval at which the thread checks its stop flag.
const STOP_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Listener of rank 0, and its thread.
#[derive(Debug)]
pub(crate) struct RendezvousServer {
    path: PathBuf,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl RendezvousServer {
    /// Binds the listener and starts the thread.
    ///
    /// # Safety
    /// A process that connects maps the memory writable and must follow the rules of the world.
    pub(crate) unsafe fn open(path: &Path, memory: Arc<WorldMemory>) -> Result<RendezvousServer, ShmError> {
        // SAFETY: guaranteed by the caller.
        let listener = unsafe { ShmListener::bind(path, &[], Duration::ZERO) }?;
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, ranks) = (Arc::clone(&stop), memory.shape().ranks as usize);
        let mut server = RendezvousThread { listener, memory, pidfds: (0..ranks).map(|_| None).collect() };
        let thread = std::thread::Builder::new()
            .name("moontide-world".into())
            .spawn(move || {
                while !stopped.load(Ordering::Relaxed) {
                    // A rank that failed to connect got an error, or has exited; the next one may succeed.
                    if let Ok(Some(socket)) = server.listener.accept_timeout(STOP_POLL_INTERVAL) {
                        let _ = server.handshake(&socket);
                    }
                }
            })
            .map_err(ShmError::system("start a thread"))?;
        Ok(RendezvousServer { path: path.to_owned(), stop, thread: Some(thread) })
    }
}

impl Drop for RendezvousServer {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Handles the handshakes of ranks, one after the other.
struct RendezvousThread {
    listener: ShmListener,
    memory: Arc<WorldMemory>,
    /// Pidfd of the process that last connected as this rank.
    pidfds: Vec<Option<OwnedFd>>,
}

impl RendezvousThread {
    fn handshake(&mut self, socket: &OwnedFd) -> Result<(), ShmError> {
        set_timeouts(socket, HANDSHAKE_MAX)?;
        let (pid, uid) = peer_of(socket)?;
        let reject = |code, error| {
            // Best effort: the process may have exited.
            let _ = send(socket, WorldMessage::Rejected(code), &[]);
            Err(error)
        };
        let (message, mut descriptors) = match receive(socket) {
            Err(error @ ShmError::Message(_)) => return reject(ErrorCode::InvalidArgument, error),
            received => received?,
        };
        if !self.listener.allows(uid) {
            return reject(ErrorCode::PermissionDenied, ShmError::User { pid, uid });
        }
        let (WorldMessage::Join(shape, rank), 1) = (message, descriptors.len()) else {
            return reject(ErrorCode::InvalidArgument, ShmError::Unexpected { pid });
        };
        let is_valid = rank != Rank(0) && rank.index() < self.pidfds.len();
        if shape != self.memory.shape() {
            // The process gets the correct shape, but no memory.
            let _ = send(socket, WorldMessage::Accepted(self.memory.shape()), &[]);
            return Err(ShmError::Unexpected { pid });
        }
        if !is_valid {
            return reject(ErrorCode::InvalidArgument, ShmError::Unexpected { pid });
        }
        let pidfd = descriptors.remove(0);
        if pid == 0 || pid_of_pidfd(pidfd.as_fd()) != Some(pid) {
            return reject(ErrorCode::PermissionDenied, ShmError::Pidfd { pid });
        }
        if !self.is_vacant(rank)? {
            return reject(ErrorCode::Busy, ShmError::Unexpected { pid });
        }
        // SAFETY: sent to a rank of this world, for which the caller of `open` vouches.
        let control = unsafe { self.memory.control().fd() };
        send(socket, WorldMessage::Accepted(shape), &[control])?;
        for rank in RankSet::first(self.pidfds.len()).iter() {
            // SAFETY: as above.
            send(socket, WorldMessage::Region(rank), &[unsafe { self.memory.region(rank).fd() }])?;
        }
        self.pidfds[rank.index()] = Some(pidfd);
        Ok(())
    }

    /// Returns whether no process has this rank. Evicts a process that has exited; one that is alive, stopped or not,
    /// keeps the rank.
    fn is_vacant(&self, rank: Rank) -> Result<bool, ShmError> {
        let row = self.memory.row(rank);
        let member = match row.read(SystemClock.now(), Duration::MAX) {
            Liveness::Absent => return Ok(true),
            Liveness::Alive(member) | Liveness::Silent(member, _) => member,
        };
        let has_exited = match &self.pidfds[rank.index()] {
            Some(pidfd) => wait_readable(pidfd, Duration::ZERO)?,
            None => false,
        };
        Ok(has_exited && row.evict(member).is_ok())
    }
}

/// Gets a world's memory from rank 0, which may not have started yet.
pub(crate) fn connect(
    path: &Path,
    shape: WorldShape,
    rank: Rank,
    timeout: Duration,
) -> Result<WorldMemory, WorldError> {
    let address = SocketAddrUnix::new(path).map_err(|_| ShmError::Path)?;
    let started = Instant::now();
    let late = |what| {
        let source = io::Error::from(io::ErrorKind::TimedOut);
        move |_| ShmError::System { what, source }
    };
    let socket = loop {
        let socket = socket::open()?;
        set_timeouts(&socket, timeout.max(Duration::from_millis(1)))?;
        match retry_on_intr(|| rustix::net::connect(&socket, &address)) {
            Ok(()) => break socket,
            Err(errno) if started.elapsed() > timeout => {
                return Err(late("connect to rank 0 (is it running?)")(errno).into());
            }
            Err(_) => std::thread::sleep(CONNECT_RETRY_INTERVAL),
        }
    };
    // The owner of the socket provides the memory, so it must be of the same user.
    let (host_pid, host_uid) = peer_of(&socket)?;
    if host_uid != rustix::process::geteuid().as_raw() {
        return Err(ShmError::User { pid: host_pid, uid: host_uid }.into());
    }
    let me = rustix::process::getpid();
    let pid = me.as_raw_nonzero().get() as u32;
    let pidfd =
        rustix::process::pidfd_open(me, PidfdFlags::empty()).map_err(ShmError::system("pidfd_open"))?;
    send(&socket, WorldMessage::Join(shape, rank), &[pidfd.as_fd()])?;
    let one = |mut descriptors: Vec<OwnedFd>| match descriptors.len() {
        1 => Ok(descriptors.remove(0)),
        _ => Err(ShmError::Unexpected { pid }),
    };
    let control = match receive(&socket)? {
        (WorldMessage::Accepted(found), descriptors) if found == shape => one(descriptors)?,
        (WorldMessage::Accepted(found), _) => return Err(WorldError::OtherShape { found, ours: shape }),
        (WorldMessage::Rejected(code), _) => return Err(ShmError::Refused(code).into()),
        _ => return Err(ShmError::Unexpected { pid }.into()),
    };
    let control = Region::import(control, control_bytes(shape), Protection::AllWrite)?;
    let mut regions = Vec::new();
    for expected in RankSet::first(shape.ranks as usize).iter() {
        match receive(&socket)? {
            (WorldMessage::Region(found), descriptors) if found == expected => {
                // A rank may reserve parts of its own region and send them to others, and needs the descriptor for
                // that.
                let import = if expected == rank { Region::import_whole } else { Region::import };
                regions.push(import(one(descriptors)?, shape.bytes, Protection::AllWrite)?);
            }
            _ => return Err(ShmError::Unexpected { pid }.into()),
        }
    }
    Ok(WorldMemory::from_parts(shape, control, regions))
}
