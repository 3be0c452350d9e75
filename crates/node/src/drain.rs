//! [`DrainState`]: whether this node is to be emptied.
//!
//! An operator tells any master, or the node itself before a stop. The sessions announce it to all masters with their
//! heartbeats, so that it holds for as long as the process runs, whichever master takes over a group. The masters place
//! nothing more here, and command other nodes to copy what is here.

use tokio::sync::watch;
use tracing::info;

/// See the top of the file.
#[derive(Debug)]
pub(crate) struct DrainState {
    draining: watch::Sender<bool>,
}

impl Default for DrainState {
    fn default() -> DrainState {
        DrainState { draining: watch::Sender::new(false) }
    }
}

impl DrainState {
    /// Starts or ends the drain: the sessions send heartbeats at once.
    pub(crate) fn set(&self, draining: bool) {
        let changed = self.draining.send_if_modified(|state| std::mem::replace(state, draining) != draining);
        if changed {
            info!(draining, "drain of this node changed");
        }
    }

    pub(crate) fn is_draining(&self) -> bool {
        *self.draining.borrow()
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<bool> {
        self.draining.subscribe()
    }
}
