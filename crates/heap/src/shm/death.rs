//! How the node learns that a client has ended: by its pidfd, and by nothing else.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use moontide_types::ClientId;
use rustix::event::epoll;
use rustix::io::Errno;

/// Why clients could not be watched.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {source}")]
pub struct WatchError {
    /// What was attempted.
    what: &'static str,
    /// The answer.
    source: Errno,
}

fn system(what: &'static str) -> impl FnOnce(Errno) -> WatchError {
    move |source| WatchError { what, source }
}

/// Proof that a client's process has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended(ClientId);

impl Ended {
    /// Whose process it was.
    pub fn client(self) -> ClientId {
        self.0
    }

    /// Takes somebody's word for it.
    ///
    /// # Safety
    /// The process must have ended: what it had pinned is used again, whatever it still reads or writes.
    pub unsafe fn assume(client: ClientId) -> Ended {
        Ended(client)
    }
}

/// Waits for clients to end.
#[derive(Debug)]
pub struct DeathWatch {
    epoll: OwnedFd,
    watched: Mutex<HashMap<ClientId, OwnedFd>>,
}

impl DeathWatch {
    /// Watches nobody yet.
    pub fn new() -> Result<DeathWatch, WatchError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system("make an epoll"))?;
        Ok(DeathWatch { epoll, watched: Default::default() })
    }

    /// Watches a client from now on.
    pub fn watch(&self, client: ClientId, pidfd: OwnedFd) -> Result<(), WatchError> {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        let data = epoll::EventData::new_u64(client.0.into());
        epoll::add(&self.epoll, &pidfd, data, epoll::EventFlags::IN).map_err(system("watch a pidfd"))?;
        watched.insert(client, pidfd);
        Ok(())
    }

    /// Waits until at least one client has ended or the time is up; those that have ended are no longer
    /// watched.
    pub fn wait(&self, timeout: Duration) -> Result<Vec<Ended>, WatchError> {
        let mut events = Vec::with_capacity(64);
        let timeout = timeout.try_into().expect("a time-out of less than 292 years");
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&timeout)) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(Vec::new()),
            Err(source) => return Err(system("wait for a client's end")(source)),
        }
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        let ended = events.iter().map(|event| ClientId(event.data.u64() as u32));
        let mut clients = Vec::new();
        for client in ended {
            if let Some(pidfd) = watched.remove(&client) {
                // Closing it is not enough: a child that the client forked may hold the same description, and
                // the epoll would report it for ever.
                let _ = epoll::delete(&self.epoll, &pidfd);
                clients.push(Ended(client));
            }
        }
        Ok(clients)
    }
}
