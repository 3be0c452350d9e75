//! [`UcxWorker`]: starts and stops the progress thread, the only thread that calls UCX.

use std::sync::Arc;
use std::sync::mpsc::{RecvTimeoutError, sync_channel};
use std::thread::JoinHandle;

use moontide_rt::time::Instant;
use rustix::event::{EventfdFlags, eventfd};

use super::context::WorkerConfig;
use super::envelope::{Envelope, Kind};
use super::error::UcxError;
use super::handle::{Endpoint, Local, Registration, SLACK, STUCK_MAX, Shared, UcxCommand};
use super::library::Ucx;
use super::progress::{self, STOP_MAX};

/// UCX worker and its progress thread. Dropping it closes every endpoint by force and joins the thread.
#[derive(Debug)]
pub struct UcxWorker {
    shared: Arc<Shared>,
    address: Vec<u8>,
    thread: Option<JoinHandle<()>>,
}

impl UcxWorker {
    /// Starts a progress thread with its own context and worker.
    pub fn start(ucx: &Ucx, config: WorkerConfig) -> Result<Self, UcxError> {
        ucx.usable(config.old_versions)?;
        let wake = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)
            .map_err(|errno| UcxError::Os { call: "eventfd", errno })?;
        let shared = Arc::new(Shared::new(wake));
        let (started, result) = sync_channel(1);
        let thread = {
            let (shared, ucx) = (Arc::clone(&shared), *ucx);
            std::thread::Builder::new()
                .name("moontide-ucx".into())
                .spawn(move || progress::run(shared, ucx, &config, &started))
                .map_err(|error| UcxError::Os {
                    call: "clone",
                    errno: rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::AGAIN),
                })?
        };
        match result.recv().unwrap_or(Err(UcxError::WorkerStopped)) {
            Ok(address) => Ok(Self { shared, address, thread: Some(thread) }),
            Err(error) => {
                // The thread returns without further work.
                let _ = thread.join();
                Err(error)
            }
        }
    }

    /// Returns the address that a peer needs to [`connect`](Self::connect) to this worker.
    pub fn address(&self) -> &[u8] {
        &self.address
    }

    /// Makes memory readable and writable for every peer that has the [`Registration::key`].
    ///
    /// Transfers whose *local* side is in registered memory use the registration too, which saves UCX a temporary
    /// registration.
    ///
    /// # Safety
    /// `base..base + len` is mapped and stays so until the registration has been dropped, and no code relies on its
    /// contents not being changed by peers.
    pub unsafe fn register(&self, base: *mut u8, len: usize) -> Result<Registration, UcxError> {
        self.shared.call("register", None, |reply| UcxCommand::Register { base: Local(base), len, reply })
    }

    /// Connects to the worker with the given [`address`](Self::address). Returns after the peer has responded, or at
    /// once if the transport needs no response.
    ///
    /// Fails with [`UcxError::OnlyTcp`] if UCX found nothing better than TCP, and with [`UcxError::DeadlineExceeded`]
    /// or [`UcxError::PeerLost`] if the peer does not respond.
    pub fn connect(&self, peer_address: &[u8], deadline: Instant) -> Result<Endpoint, UcxError> {
        let envelope = Envelope::decode(peer_address, Kind::Address)?;
        let (address, owner) = (envelope.payload.to_vec(), envelope.owner);
        let wait = deadline.saturating_duration_since(Instant::now()) + STUCK_MAX + SLACK;
        self.shared.call("connect", Some(wait), |reply| UcxCommand::Connect {
            address,
            owner,
            deadline,
            reply,
        })
    }
}

impl Drop for UcxWorker {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        let (reply, stopped) = sync_channel(1);
        if self.shared.submit(UcxCommand::Stop { reply }).is_ok() {
            if self.shared.is_progress_thread() {
                // Dropped by a completion: the thread stops after it, and is not joined.
                return;
            }
            if let Err(RecvTimeoutError::Timeout) = stopped.recv_timeout(STOP_MAX + SLACK) {
                tracing::error!("a call into UCX does not return; its thread is not joined");
                return;
            }
        }
        if thread.join().is_err() {
            tracing::error!("the UCX progress thread panicked");
        }
    }
}
