//! [`Status`]: the node's state with its masters, for waiters and for the admin endpoints.

use std::time::Duration;

use moontide_rt::sync::{Condvar, Mutex};
use moontide_rt::time::Instant;
use moontide_types::Term;

/// State of the node's registration with its masters.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct MasterStatus {
    /// Whether the masters have mounted all segments and acknowledged their complete reports.
    pub(crate) mounted: bool,
    /// Whether the node has a session with the master that it reached last.
    pub(crate) registered: bool,
    pub(crate) term: Term,
    /// Error of the last attempt to reach a master; `None` if it succeeded.
    pub(crate) last_error: Option<String>,
}

/// Shared [`MasterStatus`] with notification of changes.
#[derive(Debug, Default)]
pub(crate) struct Status {
    status: Mutex<MasterStatus>,
    changed: Condvar,
}

impl Status {
    pub(crate) fn change(&self, change: impl FnOnce(&mut MasterStatus)) {
        change(&mut self.status.lock());
        self.changed.notify_all();
    }

    pub(crate) fn get(&self) -> MasterStatus {
        self.status.lock().clone()
    }

    pub(crate) fn is_mounted(&self) -> bool {
        self.status.lock().mounted
    }

    /// Waits until the node is mounted. Returns `false` after `timeout`.
    pub(crate) fn wait_until_mounted(&self, timeout: Duration) -> bool {
        let end = Instant::now() + timeout;
        let mut status = self.status.lock();
        while !status.mounted {
            if self.changed.wait_until(&mut status, end).timed_out() {
                return status.mounted;
            }
        }
        true
    }
}
