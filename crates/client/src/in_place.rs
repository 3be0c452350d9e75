//! Records that threads or device kernels fill directly in the memory of a local node.
//!
//! ```text
//!   producer                                                consumer, on the same host
//!     open_in_place ──▶ InPlaceWrite ── its address ──────▶  hold_slot ──▶ memory that is not reused
//!       payload(): write pages, flag them                       wait for the flag, read
//!     commit ──▶ an ordinary object                           drop
//! ```
//!
//! The store does not see the bytes, so such an object has no digests. It is one stripe on one local node. If a process
//! exits before the commit, its claim ends with it, and the node reuses the memory only when no ledger cell names it.

use std::ptr::NonNull;
use std::sync::Arc;

use moontide_heap::{KernelCell, LocalHeap, SharedClaim, SharedReader, SharedSlotHold, SlotHoldError};
use moontide_rt::time::Instant;
use moontide_types::{
    Clock, Epoch, ErrorCode, Generation, Medium, NodeId, ObjectId, SegmentId, SlotId, SystemClock,
};

use crate::config::PutOptions;
use crate::error::StoreError;
use crate::put::PutOutcome;
use crate::store::Store;
use crate::write_plan::{StripeLocation, WritePlan};

/// Reserved memory for an object that this process can write. Dropping it releases the reservation.
#[derive(Debug)]
#[must_use = "dropping it releases the reservation"]
pub struct InPlaceWrite {
    // Dropped in this order: the claim ends before the reservation is released.
    claim: SharedClaim,
    plan: WritePlan,
    location: StripeLocation,
}

/// Version and location of a record: enough for another local process to wait for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RecordAddress {
    /// Node that owns the memory.
    pub node: NodeId,
    /// Segment of the node.
    pub segment: SegmentId,
    /// Incarnation of the segment.
    pub generation: Generation,
    /// Slot of the record's header.
    pub slot: SlotId,
    /// Version of the record.
    pub epoch: Epoch,
}

impl Store {
    /// Reserves memory of kind `medium` for an object that is written by other means than this crate. `options` must
    /// ask for one replica; [`PutOptions::prefer`] names the node. If that node has no space, another local node is
    /// used. Only nodes in the memory of ranks (`Node::start_with_memory`) accept such objects.
    pub fn open_in_place(
        &self,
        medium: Medium,
        key: &[u8],
        len: u64,
        options: &PutOptions,
    ) -> Result<InPlaceWrite, StoreError> {
        if options.replicas != 1 || options.stripes.is_some_and(|stripes| stripes != 1) || len == 0 {
            return Err(StoreError::InvalidArgument {
                what: "an in-place write",
                rule: "of one replica, in one stripe, and not empty",
            });
        }
        // One stripe or failure: a master would split a long object, and free space for all stripes first.
        let options = PutOptions { stripes: Some(1), ..options.clone() };
        let mut plan = self.open_in(medium, key, len, &options)?;
        let [location] = plan.stripes()[..] else {
            return Err(StoreError::refused(ErrorCode::Internal)); // the request was for one replica in one stripe
        };
        plan.begin()?;
        let inner = &self.inner;
        let heap = inner.heap_of(location.node, inner.deadline())?;
        let mut reader = reader(&heap)?;
        let claim = reader.claim(location.segment, location.slot, plan.epoch());
        let claim = claim.ok_or(StoreError::refused(ErrorCode::StaleEpoch))?;
        Ok(InPlaceWrite { claim, plan, location })
    }

    /// Keeps the memory of a record from being reused for another version, even while the record is being written.
    /// `None`: the version has ended, or never begun. Fails for a record that this process itself is writing, until it
    /// is committed.
    pub fn hold_slot(&self, address: RecordAddress) -> Result<Option<SharedSlotHold>, StoreError> {
        let heap = self.inner.heap_of(address.node, self.inner.deadline())?;
        if heap.generation(address.segment) != Some(address.generation)
            || !heap.board().is_usable(SystemClock.now())
        {
            return Ok(None);
        }
        match reader(&heap)?.stay(address.segment, address.slot, address.epoch) {
            Ok(hold) => Ok(Some(hold)),
            Err(SlotHoldError::Ended) => Ok(None),
            Err(SlotHoldError::Full) => Err(StoreError::refused(ErrorCode::Busy)),
            Err(SlotHoldError::Own) => Err(StoreError::InvalidArgument {
                what: "a record to wait for",
                rule: "one that another process writes",
            }),
        }
    }

    /// Returns a ledger cell in which kernels of this process pin what they read of a node's memory.
    pub fn kernel_cell(&self, node: NodeId) -> Result<KernelCell, StoreError> {
        let heap = self.inner.heap_of(node, self.inner.deadline())?;
        reader(&heap)?.into_kernel_cell().ok_or(StoreError::refused(ErrorCode::Busy))
    }
}

impl crate::store::Inner {
    /// Returns the mapped memory of a local node.
    fn heap_of(&self, node: NodeId, deadline: Instant) -> Result<Arc<LocalHeap>, StoreError> {
        let (_, link) = self.reach(node, deadline)?;
        link.local().cloned().ok_or(StoreError::InvalidArgument {
            what: "a node whose memory is written in place",
            rule: "on this host and of the same user, with `shm` enabled",
        })
    }
}

fn reader(heap: &Arc<LocalHeap>) -> Result<SharedReader, StoreError> {
    SharedReader::new(Arc::clone(heap)).ok_or(StoreError::refused(ErrorCode::Busy))
}

impl InPlaceWrite {
    /// Returns the version that the object will have.
    pub fn epoch(&self) -> Epoch {
        self.plan.epoch()
    }

    /// Returns the id of the object.
    pub fn id(&self) -> ObjectId {
        self.plan.id()
    }

    /// Returns the length of the object, in bytes.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> u64 {
        self.location.len
    }

    /// Returns the time at which the reservation expires.
    pub fn expires_at(&self) -> Instant {
        self.plan.expires_at()
    }

    /// Returns the location of the bytes.
    pub fn stripe(&self) -> StripeLocation {
        self.location
    }

    /// Returns the address with which other processes wait for the record.
    pub fn record_address(&self) -> RecordAddress {
        let StripeLocation { node, segment, generation, slot, .. } = self.location;
        RecordAddress { node, segment, generation, slot, epoch: self.epoch() }
    }

    /// Returns the address of the payload in this process: valid for [`InPlaceWrite::len`] bytes while `self` lives,
    /// and not shared with other writers. `None` in a forked child, and if the bytes are in the memory of a device.
    pub fn payload(&self) -> Option<NonNull<u8>> {
        self.claim.payload()
    }

    /// Returns the heap of the record.
    pub(crate) fn heap(&self) -> &Arc<LocalHeap> {
        self.claim.heap()
    }

    /// Publishes the object. All bytes must be written; no thread or kernel may write them from now on.
    pub fn commit(self) -> Result<PutOutcome, StoreError> {
        let InPlaceWrite { claim, plan, location: _ } = self;
        let epoch = plan.epoch();
        // No thread of this process may pin the slot before the node has scanned the ledgers.
        let _committing = claim.end_before_commit();
        plan.commit(epoch)
    }
}
