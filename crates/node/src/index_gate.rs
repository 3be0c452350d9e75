//! [`IndexGate`]: publishes heartbeats and opens or closes the local index.
//!
//! A dedicated thread publishes the heartbeats, so that clients do not take a busy runtime for a dead node. The index
//! is open while the masters are synced, and for [`self_fence_timeout`](crate::NodeConfig::self_fence_timeout) after
//! the last contact. After that time, the index might still hold objects that were removed elsewhere.

use std::sync::Arc;
use std::time::Duration;

use moontide_rt::mark;
use moontide_rt::sync::Mutex;
use moontide_rt::sync::mpsc::{Receiver, RecvTimeoutError};
use moontide_types::limits::SHM_HEARTBEAT_TIMEOUT_MS;
use moontide_types::{Clock, MonoTime, SystemClock};
use tracing::{info, warn};

use crate::logic::timing::may_open_index;
use crate::memory::NodeMemory;

/// Time between two heartbeats.
const HEARTBEAT_INTERVAL: Duration = Duration::from_millis(100);

/// Time without a heartbeat after which local clients stop trusting the node. Twenty heartbeats: no scheduler delays a
/// thread for so long, and clients notice a stopped node long before its session at the master expires and its objects
/// are removed.
pub(crate) const HEARTBEAT_TIMEOUT: Duration = Duration::from_millis(SHM_HEARTBEAT_TIMEOUT_MS as u64);

const _: () = assert!(HEARTBEAT_TIMEOUT.as_millis() >= 20 * HEARTBEAT_INTERVAL.as_millis());

/// Opens and closes the local index.
#[derive(Debug)]
pub(crate) struct IndexGate {
    memory: Arc<NodeMemory>,
    self_fence_timeout: Duration,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Last time at which all masters were synced.
    synced_at: Option<MonoTime>,
    open: bool,
    closed: bool,
}

impl IndexGate {
    pub(crate) fn new(memory: Arc<NodeMemory>, self_fence_timeout: Duration) -> IndexGate {
        IndexGate { memory, self_fence_timeout, state: Mutex::default() }
    }

    /// Records that all masters were synced at `at`.
    pub(crate) fn mark_synced(&self, at: MonoTime) {
        let mut state = self.state.lock();
        state.synced_at = state.synced_at.max(Some(at));
        self.update(&mut state);
    }

    /// Closes the index permanently.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        state.closed = true;
        self.update(&mut state);
    }

    pub(crate) fn is_open(&self) -> bool {
        self.state.lock().open
    }

    fn update(&self, state: &mut State) {
        let synced = may_open_index(state.synced_at, SystemClock.now(), self.self_fence_timeout);
        // Remote peers that know a location are refused, too. Before the first sync no peer knows one.
        if !moontide_rt::mutation_enabled("stale-reads-served")
            && let Some(at) = state.synced_at
        {
            self.memory.set_stale_at(at.after(self.self_fence_timeout));
        }
        let open = !state.closed && synced;
        if open == state.open {
            return;
        }
        state.open = open;
        mark!("self-fence while a peer reads", !open && !self.memory.heap().ledgers().pins().is_empty());
        self.memory.heap().index_region().set_open(open);
        match open {
            true => info!("local index open"),
            false if state.closed => info!("local index closed: node shuts down"),
            false => warn!(
                self_fence_timeout_ms = self.self_fence_timeout.as_millis() as u64,
                "self-fenced: no contact with a master; local index closed, reads refused"
            ),
        }
    }

    /// Closes the index if it is stale, and then publishes a heartbeat. After a pause of the process, a heartbeat before
    /// the update would make clients trust an index that misses the removals of that time.
    fn beat(&self, heartbeat: impl FnOnce()) {
        if moontide_rt::mutation_enabled("beat-before-close") {
            heartbeat();
            return self.update(&mut self.state.lock());
        }
        self.update(&mut self.state.lock());
        heartbeat();
    }

    /// Publishes heartbeats until `stopped` receives a message or is disconnected.
    pub(crate) fn run(&self, stopped: &Receiver<()>) {
        loop {
            self.beat(|| self.memory.heap().heartbeat());
            match stopped.recv_timeout(HEARTBEAT_INTERVAL) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use moontide_heap::HugePages;
    use moontide_types::{Generation, NodeId};

    use super::*;
    use crate::logic::segment_plan::SegmentPlan;

    fn memory() -> Arc<NodeMemory> {
        let plan = SegmentPlan { count: 1, units: 64, slots: 4 };
        Arc::new(NodeMemory::create(NodeId(1), Generation(1), plan, HugePages::Auto, None, None).unwrap())
    }

    #[test]
    fn peers_are_refused_as_soon_as_index_closes() {
        // A clock that lags would pass by chance right after its tick.
        let memory = memory();
        for _ in 0..100 {
            let gate = IndexGate::new(Arc::clone(&memory), Duration::from_millis(1));
            gate.mark_synced(SystemClock.now());
            while gate.is_open() {
                gate.beat(|| ());
            }
            assert!(memory.is_stale(), "the index is closed, and peers are served");
        }
    }

    #[test]
    fn stale_index_is_closed_before_next_heartbeat() {
        let timeout = Duration::from_millis(20);
        let gate = IndexGate::new(memory(), timeout);
        gate.mark_synced(SystemClock.now());
        assert!(gate.is_open());
        // The process was stopped for longer than the timeout.
        moontide_rt::thread::sleep(2 * timeout);
        gate.beat(|| assert!(!gate.is_open(), "heartbeat of a stale index"));
    }
}
