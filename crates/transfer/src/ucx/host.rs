//! [`UcxHost`]: the owner's end of UCX. Opens the segments to peers, and says how they get in.
//!
//! The owner's processor takes no part in a transfer, so it checks nothing: whoever has the key of a region reads and
//! writes all of it. That is why readers believe nothing but digests, and why a record that was written this way is
//! digested by the node before it is committed.

use moontide_heap::{Medium, NodeHeap, Segment};
use moontide_proto::convert::{AttachReply, AttachedRegion, encode};
use moontide_types::{Generation, SegmentId};

use super::{Registration, Ucx, UcxError, UcxWorker, WorkerConfig};
use crate::owner::Owner;
use crate::sync::Arc;

/// The owner's worker, and the regions that it has opened.
#[derive(Debug)]
pub struct UcxHost {
    /// Before the worker, which they need, and the heap, whose memory they are about.
    registrations: Vec<(SegmentId, Generation, Registration)>,
    worker: UcxWorker,
    _owner: Arc<dyn Owner>,
}

impl UcxHost {
    /// Opens all segments that the owner has now.
    ///
    /// # Safety
    /// Peers that are told the keys read and write the memory without asking. They are trusted to write only what they
    /// were granted; and nobody may rely on bytes that a peer was granted to write.
    pub unsafe fn start(ucx: &Ucx, config: WorkerConfig, owner: Arc<dyn Owner>) -> Result<UcxHost, UcxError> {
        let worker = UcxWorker::start(ucx, config)?;
        let mut registrations = Vec::new();
        let heap: &NodeHeap = owner.heap();
        // Of a device's segments the host has no bytes.
        let is_here = |segment: &Arc<Segment>| segment.shape().medium == Medium::Host;
        for segment in heap.segments().into_iter().filter(is_here) {
            let (shape, payload) = (segment.shape(), segment.payload());
            // SAFETY: the payload is mapped as long as the heap lives, which `owner` sees to; about the rest the caller
            // vouches.
            let registration = unsafe { worker.register(payload.base().as_ptr(), payload.len() as usize) }?;
            registrations.push((shape.segment, shape.generation, registration));
        }
        Ok(UcxHost { registrations, worker, _owner: owner })
    }

    /// The answer to Attach.
    pub fn attach_reply(&self) -> Vec<u8> {
        let regions = self.registrations.iter().map(|(segment, generation, registration)| AttachedRegion {
            segment: *segment,
            generation: *generation,
            key: registration.key(),
        });
        let reply = AttachReply { address: self.worker.address(), regions: regions.collect() };
        encode(&reply).expect("as many regions as a reply has room for")
    }
}
