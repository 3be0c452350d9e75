//! [`UcxServer`]: server side of UCX. Registers the segments and returns the keys that peers need.
//!
//! The CPU of the owner takes no part in a transfer, so it checks nothing: a peer with the key of a region can read and
//! write all of it. Therefore readers trust only digests, and the node digests a record that was written this way
//! before it commits it.

use moontide_heap::{NodeHeap, PayloadMemory, Segment};
use moontide_proto::convert::{AttachReply, AttachedRegion, encode};
use moontide_rt::sync::Arc;
use moontide_types::{Generation, SegmentId};

use super::{Registration, Ucx, UcxError, UcxWorker, WorkerConfig};
use crate::owner::Owner;

/// UCX worker of the owner, and its registered segments.
#[derive(Debug)]
pub struct UcxServer {
    /// Declared before the worker, which they need, and the owner, whose memory they refer to.
    registrations: Vec<(SegmentId, Generation, Registration)>,
    worker: UcxWorker,
    _owner: Arc<dyn Owner>,
}

impl UcxServer {
    /// Registers all segments that the owner has now.
    ///
    /// # Safety
    /// Peers with the keys read and write the memory without a request. They are trusted to write only what they were
    /// granted; and no code may rely on bytes that a peer was granted to write.
    pub unsafe fn start(
        ucx: &Ucx,
        config: WorkerConfig,
        owner: Arc<dyn Owner>,
    ) -> Result<UcxServer, UcxError> {
        let worker = UcxWorker::start(ucx, config)?;
        let mut registrations = Vec::new();
        let heap: &NodeHeap = owner.heap();
        // Segments of a device have no bytes in host memory.
        let in_host_memory = |segment: &Arc<Segment>| segment.shape().medium == PayloadMemory::Host;
        for segment in heap.segments().into_iter().filter(in_host_memory) {
            let (shape, payload) = (segment.shape(), segment.payload());
            // SAFETY: the payload is mapped as long as the heap lives, and `owner` keeps the heap alive; the caller
            // guarantees the rest.
            let registration = unsafe { worker.register(payload.base().as_ptr(), payload.len() as usize) }?;
            registrations.push((shape.segment, shape.generation, registration));
        }
        Ok(UcxServer { registrations, worker, _owner: owner })
    }

    /// Returns the body of the reply to Attach.
    pub fn attach_reply(&self) -> Vec<u8> {
        let regions = self.registrations.iter().map(|(segment, generation, registration)| AttachedRegion {
            segment: *segment,
            generation: *generation,
            key: registration.key(),
        });
        let reply = AttachReply { address: self.worker.address(), regions: regions.collect() };
        encode(&reply).expect("a node has at most as many regions as a reply can hold")
    }
}
