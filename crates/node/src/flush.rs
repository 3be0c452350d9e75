//! [`FlushState`]: the flush of a stopping node, shared between the thread that stops it and its sessions.
//!
//! The sessions announce the flush with their heartbeats, and record the answers. The masters command the writes: a node
//! never writes a record on its own, because a master that does not know of a record on a disk would acknowledge a
//! removal of the object without it.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use moontide_proto::v1::FlushStatus;
use moontide_rt::sync::{Mutex, MutexGuard};
use moontide_types::{Clock, SystemClock};
use tokio::sync::watch;

use crate::logic::flush::FlushMonitor;

/// State of the flush; there is at most one in the life of a node.
#[derive(Debug)]
pub(crate) struct FlushState {
    begun: watch::Sender<bool>,
    cancelled: AtomicBool,
    monitor: Mutex<FlushMonitor>,
}

impl Default for FlushState {
    fn default() -> FlushState {
        FlushState {
            begun: watch::Sender::new(false),
            cancelled: AtomicBool::new(false),
            monitor: Mutex::default(),
        }
    }
}

impl FlushState {
    /// Begins the flush: the sessions send heartbeats at once.
    pub(crate) fn begin(&self) {
        self.begun.send_replace(true);
    }

    pub(crate) fn has_begun(&self) -> bool {
        *self.begun.borrow()
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<bool> {
        self.begun.subscribe()
    }

    /// Records the answer of a master.
    pub(crate) fn answered(&self, master: &Arc<str>, status: FlushStatus) {
        self.monitor.lock().answered(master, status, SystemClock.now());
    }

    /// Forgets the answer of a master to which not all objects of its groups are reported.
    pub(crate) fn outdated(&self, master: &Arc<str>) {
        self.monitor.lock().outdated(master, SystemClock.now());
    }

    /// Returns the monitor. While it is locked, the flush does not end, so that routes and groups of masters can change
    /// together with it.
    pub(crate) fn monitor(&self) -> MutexGuard<'_, FlushMonitor> {
        self.monitor.lock()
    }

    /// Whether there is nothing to wait for from these masters.
    pub(crate) fn is_over(&self, masters: &[Arc<str>]) -> bool {
        self.is_cancelled() || self.monitor.lock().is_over(masters, SystemClock.now())
    }

    /// Whether these masters have nothing left to write.
    pub(crate) fn is_complete(&self, masters: &[Arc<str>]) -> bool {
        self.monitor.lock().is_complete(masters)
    }

    /// Returns what is left to write, at these masters.
    pub(crate) fn left(&self, masters: &[Arc<str>]) -> FlushStatus {
        self.monitor.lock().sum(masters)
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        // Relaxed: the flag orders nothing else.
        self.cancelled.load(Ordering::Relaxed)
    }
}

/// Ends the wait of [`Node::shutdown`](crate::Node::shutdown) for writes to disk, from another thread.
#[derive(Clone, Debug)]
pub struct FlushCanceller(pub(crate) Arc<FlushState>);

impl FlushCanceller {
    /// Ends the flush, or lets none begin. Objects that are not on disk are lost.
    pub fn cancel(&self) {
        self.0.cancelled.store(true, Ordering::Relaxed);
    }
}
