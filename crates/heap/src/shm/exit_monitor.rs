//! [`ExitMonitor`]: detects that a client has exited, by its pidfd and by nothing else.

use std::collections::HashMap;
use std::os::fd::OwnedFd;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use moontide_types::ClientId;
use rustix::event::epoll;
use rustix::io::Errno;

/// Failed system call of the monitor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what}: {source}")]
pub struct ExitMonitorError {
    what: &'static str,
    source: Errno,
}

fn system(what: &'static str) -> impl FnOnce(Errno) -> ExitMonitorError {
    move |source| ExitMonitorError { what, source }
}

/// Proof that a client's process has exited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ClientExited(ClientId);

impl ClientExited {
    /// Returns the client whose process exited.
    pub fn client(self) -> ClientId {
        self.0
    }

    /// Creates the proof without a check.
    ///
    /// # Safety
    /// The process must have exited: the memory that it had pinned is reused, even if it still reads or writes it.
    pub unsafe fn assume(client: ClientId) -> ClientExited {
        ClientExited(client)
    }
}

/// Waits for clients to exit.
#[derive(Debug)]
pub struct ExitMonitor {
    epoll: OwnedFd,
    watched: Mutex<HashMap<ClientId, OwnedFd>>,
}

impl ExitMonitor {
    /// Creates a monitor without clients.
    pub fn new() -> Result<ExitMonitor, ExitMonitorError> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(system("create an epoll"))?;
        Ok(ExitMonitor { epoll, watched: Default::default() })
    }

    /// Starts to watch a client.
    pub fn watch(&self, client: ClientId, pidfd: OwnedFd) -> Result<(), ExitMonitorError> {
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        let data = epoll::EventData::new_u64(client.0.into());
        epoll::add(&self.epoll, &pidfd, data, epoll::EventFlags::IN).map_err(system("watch a pidfd"))?;
        watched.insert(client, pidfd);
        Ok(())
    }

    /// Waits until at least one client has exited or the timeout has passed, and stops watching the exited clients.
    pub fn wait(&self, timeout: Duration) -> Result<Vec<ClientExited>, ExitMonitorError> {
        let mut events = Vec::with_capacity(64);
        let timeout = timeout.try_into().expect("a timeout of less than 292 years");
        match epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut events), Some(&timeout)) {
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(Vec::new()),
            Err(source) => return Err(system("wait for the exit of a client")(source)),
        }
        let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        let exited = events.iter().map(|event| ClientId(event.data.u64() as u32));
        let mut clients = Vec::new();
        for client in exited {
            if let Some(pidfd) = watched.remove(&client) {
                // Closing the pidfd is not enough: a child that the client forked may hold the same description, and
                // the epoll would report it again and again.
                let _ = epoll::delete(&self.epoll, &pidfd);
                clients.push(ClientExited(client));
            }
        }
        Ok(clients)
    }
}
