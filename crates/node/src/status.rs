//! [`Status`]: how the node stands with its master, for those who wait for it or ask.

use std::time::{Duration, Instant};

use moontide_types::{SessionId, Term};
use parking_lot::{Condvar, Mutex};

/// How it stands.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Standing {
    /// Whether a master knows of all segments and of all that is in them.
    pub(crate) mounted: bool,
    pub(crate) session: Option<SessionId>,
    pub(crate) term: Term,
    /// Why the last attempt to reach the master failed; none if it did not.
    pub(crate) trouble: Option<String>,
}

/// The same, shared.
#[derive(Debug, Default)]
pub(crate) struct Status {
    standing: Mutex<Standing>,
    changed: Condvar,
}

impl Status {
    pub(crate) fn change(&self, change: impl FnOnce(&mut Standing)) {
        change(&mut self.standing.lock());
        self.changed.notify_all();
    }

    pub(crate) fn get(&self) -> Standing {
        self.standing.lock().clone()
    }

    pub(crate) fn is_mounted(&self) -> bool {
        self.standing.lock().mounted
    }

    /// Whether it is mounted, now or within `timeout`.
    pub(crate) fn wait_until_mounted(&self, timeout: Duration) -> bool {
        let end = Instant::now() + timeout;
        let mut standing = self.standing.lock();
        while !standing.mounted {
            if self.changed.wait_until(&mut standing, end).timed_out() {
                return standing.mounted;
            }
        }
        true
    }
}
