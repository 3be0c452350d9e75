//! [`Keeper`]: says on the board that the node lives, and whether its index may be used.
//!
//! A thread of its own beats, so that a busy runtime is not taken for a dead node. The index is open while the master
//! knows of everything in it, and for [`local_stale_max`](crate::NodeConfig::local_stale_max) after it was last heard:
//! longer than that, and objects that were removed elsewhere might still be found here.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Duration;

use moontide_types::bounds::LOCAL_STALE_MS;
use moontide_types::{Clock, MonoTime, SystemClock};
use parking_lot::Mutex;
use tracing::{info, warn};

use crate::decide::pace::index_open;
use crate::memory::Memory;

/// Time between two beats.
const BEAT_EVERY: Duration = Duration::from_millis(100);

/// How long clients of this host believe the node without a beat. Twenty beats: no scheduler forgets a thread for so
/// long, and a node that is stopped is noticed long before its session at the master ends and its objects are written
/// off.
pub(crate) const STALE_AFTER: Duration = Duration::from_millis(LOCAL_STALE_MS as u64);

const _: () = assert!(STALE_AFTER.as_millis() >= 20 * BEAT_EVERY.as_millis());

/// Opens and closes the index.
#[derive(Debug)]
pub(crate) struct Keeper {
    memory: Arc<Memory>,
    stale_max: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// When masters last knew of everything.
    good: Option<MonoTime>,
    open: bool,
    shut: bool,
}

impl Keeper {
    pub(crate) fn new(memory: Arc<Memory>, stale_max: Duration) -> Keeper {
        Keeper { memory, stale_max, state: Mutex::default() }
    }

    /// All masters were heard, and knew of everything in the index then.
    pub(crate) fn good(&self, at: MonoTime) {
        let mut state = self.state.lock();
        state.good = state.good.max(Some(at));
        self.settle(&mut state);
    }

    /// Closes the index for good.
    pub(crate) fn shut(&self) {
        let mut state = self.state.lock();
        state.shut = true;
        self.settle(&mut state);
    }

    pub(crate) fn is_open(&self) -> bool {
        self.state.lock().open
    }

    fn settle(&self, state: &mut State) {
        let heard = index_open(state.good, SystemClock.now(), self.stale_max);
        // Peers who know a place are not served from it either; before the first master is heard nobody knows one.
        if !moontide_types::planted("stale-reads-served") {
            state.good.into_iter().for_each(|good| self.memory.stale_at(good.after(self.stale_max)));
        }
        let open = !state.shut && heard;
        if open == state.open {
            return;
        }
        state.open = open;
        self.memory.heap().board().set_open(open);
        match open {
            true => info!("index open: processes of this host find objects without asking"),
            false if state.shut => info!("index closed: the node shuts down"),
            false => warn!(
                stale_max_ms = self.stale_max.as_millis() as u64,
                "index closed, and reads refused: no master was heard for too long, and what is here may have been removed"
            ),
        }
    }

    /// Beats until told to stop.
    pub(crate) fn run(&self, stopped: &Receiver<()>) {
        loop {
            self.memory.heap().beat();
            self.settle(&mut self.state.lock());
            match stopped.recv_timeout(BEAT_EVERY) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }
}
