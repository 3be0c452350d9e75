//! Where the ranks of a world meet: a door of rank 0, through which everybody gets everybody's memory.
//!
//! ```text
//!   rank r                                          rank 0, on a thread of its own
//!     │── JoinWorld(shape, r)  [pidfd of itself] ──▶│  same user? own pidfd? same shape? predecessor dead?
//!     │◀── World(shape)        [control] ───────────│
//!     │◀── WorldRegion(s)      [region of s] ───────│  × ranks
//! ```
//!
//! The thread stays for as long as rank 0 does: a rank that died may be replaced at any time.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use moontide_types::{Clock, ErrorCode, SystemClock};
use rustix::io::retry_on_intr;
use rustix::net::SocketAddrUnix;
use rustix::process::PidfdFlags;

use crate::liveness::Liveness;
use crate::ranks::{Rank, RankSet};
use crate::shm::door::{
    Door, DoorError, peer_of, pid_behind, receive, send, set_timeouts, socket, system, wait_readable,
};
use crate::shm::message::Message;
use crate::shm::region::{Protection, Region};
use crate::shm::world::{WorldError, WorldMemory, WorldShape, control_bytes};

/// How long one greeting may take: a rank that stops on the doorstep keeps the others waiting.
const HANDSHAKE_MAX: Duration = Duration::from_secs(2);
/// How often a rank knocks while nobody has opened yet.
const KNOCK_EVERY: Duration = Duration::from_millis(5);
/// How often the thread looks whether it is to end.
const LISTEN: Duration = Duration::from_millis(50);

/// Rank 0's door and the thread behind it.
#[derive(Debug)]
pub(super) struct Host {
    path: PathBuf,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Host {
    /// Opens the door.
    ///
    /// # Safety
    /// Whoever enters maps the memory for writing and must keep to the rules of the world.
    pub(super) unsafe fn open(path: &Path, memory: Arc<WorldMemory>) -> Result<Host, DoorError> {
        // SAFETY: says the caller.
        let door = unsafe { Door::open(path, &[], Duration::ZERO) }?;
        let stop = Arc::new(AtomicBool::new(false));
        let (stopped, ranks) = (Arc::clone(&stop), memory.shape().ranks as usize);
        let mut porter = Porter { door, memory, pidfds: (0..ranks).map(|_| None).collect() };
        let thread = std::thread::Builder::new()
            .name("moontide-world".into())
            .spawn(move || {
                while !stopped.load(Ordering::Relaxed) {
                    // Who could not be let in has been told, or is gone; the next one may fare better.
                    if let Ok(Some(socket)) = porter.door.accept_within(LISTEN) {
                        let _ = porter.admit(&socket);
                    }
                }
            })
            .map_err(system("start a thread"))?;
        Ok(Host { path: path.to_owned(), stop, thread: Some(thread) })
    }
}

impl Drop for Host {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        let _ = std::fs::remove_file(&self.path);
    }
}

/// Lets ranks in, one after the other.
struct Porter {
    door: Door,
    memory: Arc<WorldMemory>,
    /// Of the process that was let in last as this rank.
    pidfds: Vec<Option<OwnedFd>>,
}

impl Porter {
    fn admit(&mut self, socket: &OwnedFd) -> Result<(), DoorError> {
        set_timeouts(socket, HANDSHAKE_MAX)?;
        let (pid, uid) = peer_of(socket)?;
        let refuse = |code, error| {
            // Best effort: it may be gone.
            let _ = send(socket, &Message::Refusal(code), &[]);
            Err(error)
        };
        let (message, mut descriptors) = receive(socket)?;
        if !self.door.allows(uid) {
            return refuse(ErrorCode::PermissionDenied, DoorError::User { pid, uid });
        }
        let (Message::JoinWorld(shape, rank), 1) = (message, descriptors.len()) else {
            return refuse(ErrorCode::InvalidArgument, DoorError::Unexpected { pid });
        };
        let is_possible = rank != Rank(0) && rank.index() < self.pidfds.len();
        if shape != self.memory.shape() {
            // It is told the right one, and gets no memory.
            let _ = send(socket, &Message::World(self.memory.shape()), &[]);
            return Err(DoorError::Unexpected { pid });
        }
        if !is_possible {
            return refuse(ErrorCode::InvalidArgument, DoorError::Unexpected { pid });
        }
        let pidfd = descriptors.remove(0);
        if pid == 0 || pid_behind(pidfd.as_fd()) != Some(pid) {
            return refuse(ErrorCode::PermissionDenied, DoorError::Pidfd { pid });
        }
        if !self.is_vacant(rank)? {
            return refuse(ErrorCode::Busy, DoorError::Unexpected { pid });
        }
        // SAFETY: to a rank of this world, which the caller of `open` vouches for.
        let control = unsafe { self.memory.control().fd() };
        send(socket, &Message::World(shape), &[control])?;
        for rank in RankSet::first(self.pidfds.len()).iter() {
            // SAFETY: as above.
            send(socket, &Message::WorldRegion(rank), &[unsafe { self.memory.region(rank).fd() }])?;
        }
        self.pidfds[rank.index()] = Some(pidfd);
        Ok(())
    }

    /// Whether nobody is this rank any more. Who has died is put out; who is alive, stopped or not, keeps it.
    fn is_vacant(&self, rank: Rank) -> Result<bool, DoorError> {
        let row = self.memory.row(rank);
        let occupant = match row.read(SystemClock.now(), Duration::MAX) {
            Liveness::Absent => return Ok(true),
            Liveness::Alive(occupant) | Liveness::Silent(occupant, _) => occupant,
        };
        let has_ended = match &self.pidfds[rank.index()] {
            Some(pidfd) => wait_readable(pidfd, Duration::ZERO)?,
            None => false,
        };
        Ok(has_ended && row.put_out(occupant).is_ok())
    }
}

/// Gets a world's memory from rank 0, which may still be on its way.
pub(super) fn enter(
    path: &Path,
    shape: WorldShape,
    rank: Rank,
    timeout: Duration,
) -> Result<WorldMemory, WorldError> {
    let address = SocketAddrUnix::new(path).map_err(|_| DoorError::Path)?;
    let started = Instant::now();
    let late = |what| {
        let source = io::Error::from(io::ErrorKind::TimedOut);
        move |_| DoorError::System { what, source }
    };
    let socket = loop {
        let socket = socket()?;
        set_timeouts(&socket, timeout.max(Duration::from_millis(1)))?;
        match retry_on_intr(|| rustix::net::connect(&socket, &address)) {
            Ok(()) => break socket,
            Err(errno) if started.elapsed() > timeout => {
                return Err(late("reach rank 0 (is it running?)")(errno).into());
            }
            Err(_) => std::thread::sleep(KNOCK_EVERY),
        }
    };
    // Whoever made the socket hands out the memory: not a stranger.
    let (host_pid, host_uid) = peer_of(&socket)?;
    if host_uid != rustix::process::geteuid().as_raw() {
        return Err(DoorError::User { pid: host_pid, uid: host_uid }.into());
    }
    let me = rustix::process::getpid();
    let pid = me.as_raw_nonzero().get() as u32;
    let pidfd = rustix::process::pidfd_open(me, PidfdFlags::empty()).map_err(system("pidfd_open"))?;
    send(&socket, &Message::JoinWorld(shape, rank), &[pidfd.as_fd()])?;
    let one = |mut descriptors: Vec<OwnedFd>| match descriptors.len() {
        1 => Ok(descriptors.remove(0)),
        _ => Err(DoorError::Unexpected { pid }),
    };
    let control = match receive(&socket)? {
        (Message::World(found), descriptors) if found == shape => one(descriptors)?,
        (Message::World(found), _) => return Err(WorldError::OtherShape { found, ours: shape }),
        (Message::Refusal(code), _) => return Err(DoorError::Refused(code).into()),
        _ => return Err(DoorError::Unexpected { pid }.into()),
    };
    let control = Region::import(control, control_bytes(shape), Protection::AllWrite)?;
    let mut regions = Vec::new();
    for expected in RankSet::first(shape.ranks as usize).iter() {
        match receive(&socket)? {
            (Message::WorldRegion(found), descriptors) if found == expected => {
                // A rank may lend parts of its own region to others, and needs the descriptor for that.
                let import = if expected == rank { Region::import_whole } else { Region::import };
                regions.push(import(one(descriptors)?, shape.bytes, Protection::AllWrite)?);
            }
            _ => return Err(DoorError::Unexpected { pid }.into()),
        }
    }
    Ok(WorldMemory::from_parts(shape, control, regions))
}
