//! Records that are filled where they lie, by whoever can write memory of this host: threads, or kernels of a device.
//!
//! ```text
//!   producer                                          consumer, on the same host
//!     open_in_place ──▶ PlanInPlace ── its place ───▶  stay ──▶ bytes that are not used for anything else
//!       payload(): write pages, flag them                 wait for the flag, read
//!     commit ──▶ an object like any other               drop
//! ```
//!
//! The store does not see the bytes on their way, so such an object has no digests, and lies in one piece on one node of
//! this host. Whoever dies on the way gives back what it had: its claim ends with its process, and a node does not use
//! memory again that anybody names.

use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Instant;

use moontide_heap::{KernelCell, LocalHeap, NoStay, SharedClaim, SharedReader, SharedStay};
use moontide_proto::Medium;
use moontide_types::{Clock, Epoch, ErrorCode, Generation, NodeId, ObjectId, SegmentId, SlotId, SystemClock};

use crate::config::PutOptions;
use crate::error::StoreError;
use crate::plan::{StripePlace, WritePlan};
use crate::put::Put;
use crate::store::Store;

/// A place for an object's bytes in memory that this process can write. Dropping it gives the place back.
#[derive(Debug)]
#[must_use = "a plan that is dropped is given back"]
pub struct PlanInPlace {
    // Dropped in this order: the claim ends before the place is given back.
    claim: SharedClaim,
    plan: WritePlan,
    place: StripePlace,
}

/// A version of a record, and where it is: enough for another process of this host to wait for it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaceOf {
    /// The node.
    pub node: NodeId,
    /// Its segment.
    pub segment: SegmentId,
    /// Which incarnation of it.
    pub generation: Generation,
    /// The slot of its header.
    pub slot: SlotId,
    /// The version.
    pub epoch: Epoch,
}

impl Store {
    /// Reserves a place for an object that is written by other means than this crate's, in memory of this kind. `options` ask for one replica;
    /// [`PutOptions::prefer`] says on which node, and if that one has no room it is another one of this host.
    pub fn open_in_place(
        &self,
        medium: Medium,
        key: &[u8],
        len: u64,
        options: &PutOptions,
    ) -> Result<PlanInPlace, StoreError> {
        if options.replicas != 1 || options.stripes.is_some_and(|stripes| stripes != 1) || len == 0 {
            return Err(StoreError::Argument {
                what: "an object that is filled in place",
                rule: "one replica, in one stripe, and not empty",
            });
        }
        // In one piece, or not at all: a master would cut what is long, and make room for all of the pieces first.
        let options = PutOptions { stripes: Some(1), ..options.clone() };
        let mut plan = self.open_in(medium, key, len, &options)?;
        let [place] = plan.stripes()[..] else {
            return Err(StoreError::refused(ErrorCode::Internal)); // one replica in one stripe was asked for
        };
        plan.begin()?;
        let inner = &self.inner;
        let heap = inner.heap_of(place.node, inner.deadline())?;
        let mut reader = reader(&heap)?;
        let claim = reader.claim(place.segment, place.slot, plan.epoch());
        let claim = claim.ok_or(StoreError::refused(ErrorCode::StaleEpoch))?;
        Ok(PlanInPlace { claim, plan, place })
    }

    /// Makes sure that the memory of a record stays this version's, although it may still be on its way. `None`: it has
    /// ended, or never begun. A record that this process is writing is refused until it is committed.
    pub fn stay(&self, place: PlaceOf) -> Result<Option<SharedStay>, StoreError> {
        let heap = self.inner.heap_of(place.node, self.inner.deadline())?;
        if heap.generation(place.segment) != Some(place.generation) || !heap.board().is_usable(SystemClock.now()) {
            return Ok(None);
        }
        match reader(&heap)?.stay(place.segment, place.slot, place.epoch) {
            Ok(stay) => Ok(Some(stay)),
            Err(NoStay::Ended) => Ok(None),
            Err(NoStay::Full) => Err(StoreError::refused(ErrorCode::Busy)),
            Err(NoStay::Own) => {
                Err(StoreError::Argument { what: "a record that is waited for", rule: "another process's" })
            }
        }
    }

    /// A cell in which kernels of this process name what they read of a node's memory.
    pub fn kernel_cell(&self, node: NodeId) -> Result<KernelCell, StoreError> {
        let heap = self.inner.heap_of(node, self.inner.deadline())?;
        reader(&heap)?.into_kernel_cell().ok_or(StoreError::refused(ErrorCode::Busy))
    }
}

impl crate::store::Inner {
    /// The memory of a node of this host.
    fn heap_of(&self, node: NodeId, deadline: Instant) -> Result<Arc<LocalHeap>, StoreError> {
        let (_, link) = self.reach(node, deadline)?;
        link.local().cloned().ok_or(StoreError::Argument {
            what: "a node whose memory is used in place",
            rule: "on this host, of the same user, and `local` not switched off",
        })
    }
}

fn reader(heap: &Arc<LocalHeap>) -> Result<SharedReader, StoreError> {
    SharedReader::new(Arc::clone(heap)).ok_or(StoreError::refused(ErrorCode::Busy))
}

impl PlanInPlace {
    /// The version that the object will have.
    pub fn epoch(&self) -> Epoch {
        self.plan.epoch()
    }

    /// The object's id.
    pub fn id(&self) -> ObjectId {
        self.plan.id()
    }

    /// The object's length.
    #[expect(clippy::len_without_is_empty, reason = "it is never empty")]
    pub fn len(&self) -> u64 {
        self.place.len
    }

    /// When the reservation ends.
    pub fn until(&self) -> Instant {
        self.plan.until()
    }

    /// Where the bytes will lie.
    pub fn stripe(&self) -> StripePlace {
        self.place
    }

    /// What others need to wait for it.
    pub fn place(&self) -> PlaceOf {
        let StripePlace { node, segment, generation, slot, .. } = self.place;
        PlaceOf { node, segment, generation, slot, epoch: self.epoch() }
    }

    /// Where the bytes are to go, in this process: valid for [`PlanInPlace::len`] bytes while this lives, and nobody else's.
    /// `None` in a forked child, and where the bytes are in a device's memory.
    pub fn payload(&self) -> Option<NonNull<u8>> {
        self.claim.payload()
    }

    /// The heap that the record is in.
    pub(crate) fn heap(&self) -> &Arc<LocalHeap> {
        self.claim.heap()
    }

    /// Publishes the object. All bytes are written: nobody writes them from now on.
    pub fn commit(self) -> Result<Put, StoreError> {
        let PlanInPlace { claim, plan, place: _ } = self;
        let epoch = plan.epoch();
        // No thread of this process may name the slot before the node has looked who does.
        let _committing = claim.end_before_commit();
        plan.commit(epoch)
    }
}
