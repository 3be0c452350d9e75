//! [`Prefault`]: takes the memory of a node from the kernel after its start.
//!
//! The first write of a page is a page fault, in which the kernel finds, clears and maps it. For a copy from another node that
//! is most of its cost. A thread of low priority does it ahead of need. It stops if the host runs out of memory: what is
//! missing then is provided at the first write, as without it. A limit of a container is not seen.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use moontide_rt::thread::{self, JoinHandle};
use tracing::{info, warn};

use crate::memory::NodeMemory;

/// Bytes that the kernel provides at a time: a tenth of a millisecond, in which it lets no other thread run on this core.
const STEP_BYTES: u64 = 256 << 10;

/// Bytes after which the memory of the host is looked at again.
const CHECK_BYTES: u64 = 64 << 20;

/// Share of the host's memory that stays available, as a divisor.
const KEPT_AVAILABLE: u64 = 16;

/// A running prefault. Dropping it ends the thread.
#[derive(Debug)]
pub(crate) struct Prefault {
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl Prefault {
    pub(crate) fn start(memory: Arc<NodeMemory>) -> std::io::Result<Prefault> {
        let stop = Arc::<AtomicBool>::default();
        let stopped = Arc::clone(&stop);
        let thread = thread::Builder::new().name("moontide-fault".to_owned()).spawn(move || {
            thread::lower_priority();
            populate(&memory, &stopped);
        })?;
        Ok(Prefault { stop, thread: Some(thread) })
    }
}

impl Drop for Prefault {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn populate(memory: &NodeMemory, stop: &AtomicBool) {
    let (mut done, mut check_at) = (0, 0);
    for node_segment in memory.segments() {
        let segment = node_segment.segment();
        let bytes = segment.shape().payload_bytes();
        for at in (0..bytes).step_by(STEP_BYTES as usize) {
            if stop.load(Ordering::Relaxed) {
                return;
            }
            if done >= check_at {
                check_at = done + CHECK_BYTES;
                if is_scarce() {
                    warn!(bytes = done, "prefault ended: the host has little memory left");
                    return;
                }
            }
            if let Err(error) = segment.populate(at, STEP_BYTES) {
                // Kernels before 5.14 do not know the call.
                warn!(%error, bytes = done, "prefault ended");
                return;
            }
            done += STEP_BYTES.min(bytes - at);
        }
    }
    info!(bytes = done, "memory is prefaulted");
}

/// Whether the host has so little memory left that other processes may need it.
fn is_scarce() -> bool {
    let Ok(meminfo) = std::fs::read_to_string("/proc/meminfo") else { return true };
    let kib = |name: &str| -> Option<u64> {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        line.trim_start_matches(':').split_whitespace().next()?.parse().ok()
    };
    match (kib("MemAvailable"), kib("MemTotal")) {
        (Some(available), Some(total)) => available < total / KEPT_AVAILABLE,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::logic::segment_plan::SegmentPlan;
    use moontide_heap::HugePages;
    use moontide_types::{Generation, NodeId};

    fn resident_bytes() -> u64 {
        let statm = std::fs::read_to_string("/proc/self/statm").unwrap();
        statm.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096
    }

    #[test]
    fn memory_is_resident_after_the_prefault() {
        let plan = SegmentPlan { count: 2, units: 32 << 11, slots: 64 };
        let memory = NodeMemory::create(NodeId(1), Generation(1), plan, HugePages::Auto, None, None).unwrap();
        let before = resident_bytes();
        let memory = Arc::new(memory);
        let mut prefault = Prefault::start(Arc::clone(&memory)).unwrap();
        prefault.thread.take().unwrap().join().unwrap();
        let grown = resident_bytes() - before;
        assert!(grown >= 60 << 20, "{grown} of {} bytes are resident", 64 << 20);
    }
}
