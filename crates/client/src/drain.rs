//! Drain of a node: all its objects in memory move to other nodes, so that it can be stopped without a loss.

use std::time::Duration;

use moontide_proto::convert::Wire;
use moontide_proto::v1;
use moontide_rt::time::Instant;
use moontide_types::limits::{BATCH_KEYS_MAX, UNIT_BYTES};
use moontide_types::{ErrorCode, NodeId};

use crate::cluster::{Master, next_counter};
use crate::error::StoreError;
use crate::logic::{RETRY_BACKOFF, is_unanswered};
use crate::metadata::check_context;
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
        let deadline = self.inner.deadline();
        let mut backoff = RETRY_BACKOFF;
        loop {
            match self.sum_of_masters(node, deadline) {
                Ok(DrainProgress { segments: 0, .. }) => {
                    return Err(StoreError::refused(ErrorCode::NotFound));
                }
                // A group has moved, or has no master at the moment.
                Err(error) if is_unanswered(error.code()) && Instant::now() < deadline => {
                    std::thread::sleep(backoff.pause(Duration::ZERO, next_counter()));
                    let cluster = &self.inner.cluster;
                    cluster.refresh_map(cluster.masters().version(), deadline);
                }
                done => return done,
            }
        }
    }

    fn sum_of_masters(&self, node: NodeId, deadline: Instant) -> Result<DrainProgress, StoreError> {
        let masters = self.inner.cluster.masters();
        // The segments of a group without a master would be missing.
        if !masters.is_complete() {
            return Err(StoreError::refused(ErrorCode::WrongMaster));
        }
        let mut sum = DrainProgress::default();
        for master in masters.hosts() {
            self.add_segments(master, node, deadline, &mut sum)?;
        }
        Ok(sum)
    }

    /// Adds the segments of a node at one master.
    fn add_segments(
        &self,
        master: &Master,
        node: NodeId,
        deadline: Instant,
        sum: &mut DrainProgress,
    ) -> Result<(), StoreError> {
        let mut cursor = bytes::Bytes::new();
        loop {
            let context = Some(self.inner.cluster.context(deadline).to_wire());
            let page = Some(v1::Pagination { cursor, limit: BATCH_KEYS_MAX as u32 });
            let request = v1::ListSegmentsRequest { context, page, node: node.0 };
            let response = self.inner.cluster.call(master, deadline, move |mut master| async move {
                master.list_segments(request).await
            })?;
            check_context(&response.context)?;
            for detail in &response.segments {
                let Some(status) = &detail.status else { continue };
                sum.segments += 1;
                sum.segments_draining += u32::from(status.state() == v1::SegmentState::Draining);
                sum.bytes_left +=
                    (u64::from(status.live_units) + u64::from(status.writing_units)) * UNIT_BYTES;
            }
            if response.next_cursor.is_empty() {
                return Ok(());
            }
            cursor = response.next_cursor;
        }
    }
}
