//! Shared memory of a node: regions that one process owns and others map, and the protocol for using them.
//!
//! Three kinds of process take part. The **node** owns the memory ([`NodeHeap`]) and alone changes words, headers and
//! the index. **Clients** on the same host read objects in place ([`LocalHeap`]) and fill the records that they were
//! granted. The **master**, usually on another host, keeps the [`Allocator`](alloc::Allocator) of each segment and
//! decides which object gets which extent.
//!
//! Reading order: [`word`](AtomicWord) and [`cell`] (the two halves of the protocol that admits readers and reclaims
//! memory), `epoch_fence` (copies of older versions), `staging_alloc` (allocation state of [`Staging`]),
//! [`index`](Index), [`liveness`](LivenessRow); then [`region`](Region), [`index_region`](IndexRegion),
//! [`ledger`](Ledgers) and [`segment`](SegmentDescriptor), which put these into shared memory; then [`NodeHeap`],
//! [`Staging`], [`LocalHeap`] and the [`ShmListener`] that connects them. [`alloc`] is independent of the others.
//!
//! Processes that are peers instead of node and clients use `moontide-symmetric`. For that crate, [`Region::slice`],
//! [`Region::subregion`], [`socket`] and [`AtomicWord::set`] are public, and [`DeviceMemory`] is what a segment needs of
//! a device.
//!
//! The first six use slices of atomics and run unchanged under model checkers (`--cfg loom`, `--cfg shuttle`). Model
//! builds leave out the rest.
//!
//! # Example: a put, a get and a removal
//!
//! ```
//! use std::num::NonZeroU32;
//! use std::time::Duration;
//!
//! use moontide_heap::alloc::{Align, Allocator};
//! use moontide_heap::*;
//! use moontide_types::record::{Attributes, KeySection, RecordFlags, RecordLayout};
//! use moontide_types::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // The node: one segment of 2 MiB with 64 slots, which accepts commands of the master with term 1.
//! let (node, generation, huge) = (NodeId(7), Generation(1), HugePages::Auto);
//! let heap = NodeHeap::create(HeapConfig { node, generation, slots_max: 64, huge })?;
//! let segment = heap.add_segment(64, 4096, huge)?;
//! let (term, segment_id) = (Term::new(1)?, segment.shape().segment);
//! segment.adopt_term(term);
//! heap.index_region().set_open(true);
//! heap.heartbeat(); // repeat it more often than the listener's `stale_after`
//!
//! // A client. Usually another process; here the same one, so a second thread runs the node's handshake.
//! let path = std::env::temp_dir().join(format!("moontide-example-{}", std::process::id()));
//! // SAFETY: node and client are this program, which follows the protocol.
//! let listener = unsafe { ShmListener::bind(&path, &[], Duration::from_secs(5)) }?;
//! let connected = std::thread::scope(|scope| {
//!     scope.spawn(|| listener.accept().and_then(|socket| listener.handshake(socket, &heap)));
//!     // SAFETY: as above.
//!     unsafe { connect(&path, Duration::from_secs(5), 1 << 30) }
//! });
//! let (local, _socket) = connected?;
//! # std::fs::remove_file(&path)?;
//!
//! // The master's decision: slot, epoch and extent.
//! let payload = vec![42; 600_000];
//! let (tenant, key) = (Tenant::DEFAULT, Key::new(b"prefix-0001")?);
//! let id_key = IdKey::new(1, [9; 32]);
//! let id = id_key.object_id(tenant, TenantGeneration(0), key);
//! let key = KeySection { tenant, key };
//! let layout = RecordLayout::new(payload.len() as u64, key.encoded_len() as u32, 0, RecordFlags::NONE)?;
//! let mut allocator = Allocator::new(segment.shape().units);
//! let units = NonZeroU32::new(layout.units()).ok_or("a record takes at least one unit")?;
//! let allocation = allocator.alloc(units, Align::Page).ok_or("full")?;
//! let (slot, epoch) = (SlotId(0), Epoch::new(term, 1)?);
//!
//! // The put: begin at the node, claim and fill in place, drop the claim, commit at the node.
//! let writer = PayloadWriter::Client(local.client());
//! let record = RecordSpec {
//!     id,
//!     flags: RecordFlags::NONE,
//!     object_len: payload.len() as u64,
//!     stripe_index: 0,
//!     stripe_count: 1,
//!     stripe_offset: 0,
//!     stripe_len: payload.len() as u64,
//!     key,
//!     attributes: &Attributes::default(),
//!     id_key: id_key.number(),
//!     tenant_generation: TenantGeneration(0),
//! };
//! heap.begin(segment_id, &Grant { slot, epoch, term, extent: allocation.extent, record, writer })?;
//! let mut reader = local.reader().ok_or("too many readers")?;
//! let root = reader.claim(segment_id, slot, epoch).ok_or("the reservation has expired")?.fill(&payload);
//! heap.commit(segment_id, slot, epoch, root, writer)?;
//!
//! // The get: no call and no copy.
//! let Lookup::Hit(guard) = reader.get(&id, SystemClock.now()) else { panic!("committed object not found") };
//! assert_eq!(guard.bytes(), payload);
//! assert_eq!(guard.verify(), Some(true));
//!
//! // The removal: new readers miss at once; the extent is free when the last guard is dropped.
//! assert_eq!(heap.kill(segment_id, slot, epoch, SystemClock.now()), KillOutcome::Killed);
//! assert!(heap.reclaim(SystemClock.now()).freed.is_empty());
//! assert_eq!(guard.bytes(), payload);
//! drop(guard);
//! assert_eq!(heap.reclaim(SystemClock.now()).freed[0].extent, allocation.extent);
//! allocator.free(allocation.block);
//! # Ok(())
//! # }
//! ```

#[cfg(not(target_pointer_width = "64"))]
compile_error!("regions are larger than a 32-bit address space; build for a 64-bit target");
#[cfg(not(target_endian = "little"))]
compile_error!("records are stored little-endian and shared in place; build for a little-endian target");

pub mod cell;
mod epoch_fence;
mod index;
mod liveness;
mod mutation;
mod staging_alloc;
mod word;

pub use index::{ENTRIES_PER_BUCKET, Index, IndexEntry, InsertOutcome};
pub use liveness::{Liveness, LivenessRow, MemberId, NotOwner};
pub use word::{AtomicWord, Transition};

pub mod alloc;

#[cfg(not(any(loom, shuttle)))]
mod shm;
#[cfg(not(any(loom, shuttle)))]
pub use shm::{
    Accepted, AttachError, BeginError, CLIENTS_MAX, ClientEvent, ClientExited, ClientLedger, CommitError,
    DeviceMemory, DeviceSlice, ExitMonitor, ExitMonitorError, FreedSlot, Grant, Guard, HeapConfig, HugePages,
    IndexRegion, IndexRegionError, IndexView, KernelCell, KillOutcome, LANES_PER_LEDGER,
    LEDGERS_PER_PROCESS_MAX, LedgerError, Ledgers, LocalHeap, LocalReadStats, Lookup, NodeCells, NodeClaim,
    NodeHeap, NodePin, PayloadMemory, PayloadWriter, PendingCommit, PerProcess, PinSet, ProcessToken,
    Protection, PublishFailure, RawMessage, Reader, ReclaimReport, RecordSpec, Region, RegionError,
    SEGMENTS_MAPPED_MAX, Segment, SegmentDescriptor, SegmentError, SharedClaim, SharedGuard, SharedLookup,
    SharedReader, SharedSlotHold, ShmClient, ShmError, ShmListener, ShmMessage, ShmMessageError, SlotHold,
    SlotHoldError, StageError, StagedRecord, Staging, StagingBuffer, StagingUsage, Trailer, WriteClaim,
    connect, open_stream, run_parallel, send_segment, socket,
};

/// Items that the model tests need beyond the public ones.
#[cfg(any(loom, shuttle))]
#[doc(hidden)]
pub mod model {
    use moontide_types::Epoch;

    pub use crate::epoch_fence::EpochFences;
    pub use crate::mutation::Mutation;
    pub use crate::staging_alloc::{StagingAllocator, StagingChunk};
    use crate::{AtomicWord, Transition};

    /// Calls [`AtomicWord::free`], which only the owner calls in other builds, after a scan.
    pub fn free(word: &AtomicWord, epoch: Epoch) -> Transition {
        word.free(epoch)
    }

    /// Calls [`AtomicWord::publish_closed`], which only the owner calls in other builds.
    pub fn publish_closed(word: &AtomicWord, epoch: Epoch) -> Transition {
        word.publish_closed(epoch)
    }
}
