//! Drain of a node: all its objects in memory move to other nodes, so that it can be stopped without a loss.

use moontide_proto::convert::Wire;
use moontide_proto::v1;
use moontide_types::{ErrorCode, NodeId};

use crate::error::StoreError;
use crate::metadata::check_context;
use crate::operators::SegmentState;
use crate::store::Store;

/// State of a node that is being emptied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DrainProgress {
    /// Segments of the node in memory.
    pub segments: u32,
    /// Segments that accept no new objects.
    pub segments_draining: u32,
    /// Bytes of objects that are on the node, or being written to it.
    pub bytes_left: u64,
}

impl DrainProgress {
    /// Whether the node has no objects in memory, and gets no new ones.
    pub fn is_empty(&self) -> bool {
        self.bytes_left == 0 && self.segments_draining == self.segments
    }
}

impl Store {
    /// Starts the drain of a node: it gets no new objects, and those in its memory move to other nodes, the most valuable
    /// ones first. Returns when the masters have accepted it; [`Store::drain_progress`] tells how far it is. Objects on
    /// its disk stay there. Fails with `NotFound` if no such node is registered.
    pub fn drain_node(&self, node: NodeId) -> Result<(), StoreError> {
        self.order_drain(node, false)
    }

    /// Ends the drain of a node: it gets new objects again. Those that have moved stay where they are.
    pub fn undrain_node(&self, node: NodeId) -> Result<(), StoreError> {
        self.order_drain(node, true)
    }

    fn order_drain(&self, node: NodeId, undrain: bool) -> Result<(), StoreError> {
        // One master that knows the node is enough: the node tells all others.
        let mut ordered = Err(StoreError::refused(ErrorCode::NotFound));
        let deadline = self.inner.deadline();
        for master in self.inner.cluster.masters().hosts() {
            let context = Some(self.inner.cluster.context(deadline).to_wire());
            let request = v1::DrainNodeRequest { context, node: node.0, undrain };
            let response = self
                .inner
                .cluster
                .call(master, deadline, move |mut master| async move { master.drain_node(request).await });
            match response.and_then(|response| check_context(&response.context)) {
                Ok(()) => ordered = Ok(()),
                Err(error) if ordered.is_err() && error.code() != ErrorCode::NotFound => ordered = Err(error),
                Err(_) => {}
            }
        }
        ordered
    }

    /// Returns what a node has in memory. Fails with `NotFound` if it is not registered.
    pub fn drain_progress(&self, node: NodeId) -> Result<DrainProgress, StoreError> {
        let segments = self.segments(Some(node))?;
        if segments.is_empty() {
            return Err(StoreError::refused(ErrorCode::NotFound));
        }
        let draining = segments.iter().filter(|segment| segment.state == SegmentState::Draining);
        Ok(DrainProgress {
            segments: segments.len() as u32, // at most 65,535 segments of a node
            segments_draining: draining.count() as u32,
            bytes_left: segments.iter().map(|segment| segment.live_bytes + segment.writing_bytes).sum(),
        })
    }
}
