//! The ground under everything: memory that one process owns and others map, and the rules for using it.
//!
//! Three processes meet here. The **node** owns the memory ([`NodeHeap`]); it alone changes words, headers and
//! the index. **Clients** on the same host read objects in place ([`LocalHeap`]) and fill what they were
//! granted. The **master**, somewhere else, keeps the [`Allocator`](alloc::Allocator) of each segment and decides what goes where.
//!
//! Reading order: [`word`](AtomicWord) and [`cell`] (the two halves of the protocol that lets readers in and
//! memory out), `floor` (copies of older versions), `rooms` (who has what of [`Staging`]), [`index`](Index),
//! [`liveness`](Row); then [`region`](Region), [`board`](Board), [`ledger`](Ledgers) and [`segment`](SegmentShape), which
//! put these into shared memory; then [`NodeHeap`], [`Staging`], [`LocalHeap`] and the [`Door`] between them; [`alloc`]
//! stands by itself. Beside them, for processes that are equals: [`phase`](PhaseBarrier), how ranks wait for each other, and
//! the [`World`], in which each owns a region and maps everyone's.
//!
//! The first six and `phase` are written on slices of atomics and run unchanged under model checkers (`--cfg loom`,
//! `--cfg shuttle`), where the rest is left out.
//!
//! # A put and a get
//!
//! ```
//! use std::num::NonZeroU32;
//! use std::time::Duration;
//!
//! use moontide_heap::alloc::{Align, Allocator};
//! use moontide_heap::*;
//! use moontide_types::record::{Attributes, Flags, KeySection, RecordLayout};
//! use moontide_types::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // The node: one segment of 2 MiB with 64 slots, which obeys the master of term 1.
//! let (node, generation, huge) = (NodeId(7), Generation(1), HugePages::IfAllowed);
//! let heap = NodeHeap::create(HeapConfig { node, generation, slots_max: 64, huge })?;
//! let segment = heap.add_segment(64, 4096, huge)?;
//! let (term, segment_id) = (Term::new(1)?, segment.shape().segment);
//! segment.obey(term);
//! heap.board().set_open(true);
//! heap.beat(); // again and again, more often than the door's `stale_after`
//!
//! // A client. Usually another process; here the same one, so the node admits it on a second thread.
//! let path = std::env::temp_dir().join(format!("moontide-example-{}", std::process::id()));
//! // SAFETY: node and client are this program, which keeps to the protocol.
//! let door = unsafe { Door::open(&path, &[], Duration::from_secs(5)) }?;
//! let joined = std::thread::scope(|scope| {
//!     scope.spawn(|| door.accept().and_then(|socket| door.admit(socket, &heap)));
//!     // SAFETY: as above.
//!     unsafe { join(&path, Duration::from_secs(5), 1 << 30) }
//! });
//! let (local, _socket) = joined?;
//! # std::fs::remove_file(&path)?;
//!
//! // What the master decides: slot, epoch and extent.
//! let payload = vec![42; 600_000];
//! let (tenant, key) = (Tenant::DEFAULT, Key::new(b"prefix-0001")?);
//! let id_key = IdKey::new(1, [9; 32]);
//! let id = id_key.object_id(tenant, TenantGeneration(0), key);
//! let key = KeySection { tenant, key };
//! let layout = RecordLayout::new(payload.len() as u64, key.encoded_len() as u32, 0, Flags::NONE)?;
//! let mut allocator = Allocator::new(segment.shape().units);
//! let units = NonZeroU32::new(layout.units()).ok_or("a record takes at least one unit")?;
//! let allocation = allocator.alloc(units, Align::Page).ok_or("full")?;
//! let (slot, epoch) = (SlotId(0), Epoch::new(term, 1)?);
//!
//! // The put: begin at the node, claim and fill in place, drop the claim, commit at the node.
//! let writer = Writer::Client(local.client());
//! let record = NewRecord {
//!     id,
//!     flags: Flags::NONE,
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
//! let root = reader.claim(segment_id, slot, epoch).ok_or("the reservation has ended")?.fill(&payload);
//! heap.commit(segment_id, slot, epoch, root, writer)?;
//!
//! // The get: no call and no copy.
//! let Lookup::Hit(guard) = reader.get(&id, SystemClock.now()) else { panic!("it was committed") };
//! assert_eq!(guard.bytes(), payload);
//! assert_eq!(guard.verify(), Some(true));
//!
//! // The removal: no new reader at once; the space when the last guard is gone.
//! assert_eq!(heap.kill(segment_id, slot, epoch, SystemClock.now()), Killed::Dying);
//! assert!(heap.reclaim(SystemClock.now()).freed.is_empty());
//! assert_eq!(guard.bytes(), payload);
//! drop(guard);
//! assert_eq!(heap.reclaim(SystemClock.now()).freed[0].extent, allocation.extent);
//! allocator.free(allocation.block);
//! # Ok(())
//! # }
//! ```

#[cfg(not(target_pointer_width = "64"))]
compile_error!("regions are larger than a 32-bit address space");
#[cfg(not(target_endian = "little"))]
compile_error!("records are shared in place between processes and stored little-endian");

pub mod cell;
mod flag;
mod floor;
mod index;
mod liveness;
mod phase;
mod planted;
mod ranks;
mod rooms;
mod sync;
mod word;

pub use flag::{Counted, FLAG_BYTES, Flag, FlagCopy, Progress};
pub use index::{ENTRIES_PER_BUCKET, Index, Inserted, Place};
pub use liveness::{Liveness, NotYours, Occupant, Row};
pub use phase::{Entry, Met, Next, PhaseBarrier, Posts, Roll, Wait, WaitError};
pub use ranks::{RANKS_MAX, Rank, RankSet};
pub use word::{AtomicWord, Transition};

pub mod alloc;

#[cfg(not(any(loom, shuttle)))]
mod device;
#[cfg(not(any(loom, shuttle)))]
mod shm;
#[cfg(not(any(loom, shuttle)))]
pub use device::{
    AtomicDomain, DeviceConfig, DeviceError, DeviceFacts, DeviceOffer, DevicePart, DeviceRegion, DeviceWorld,
    DeviceWorldConfig, DeviceWorldError, Driver, HostWindow, Share, Sharing, Vendor, WindowAccess,
};
#[cfg(not(any(loom, shuttle)))]
pub use shm::{
    AttachError, BeginError, Board, BoardError, BoardView, CLIENTS_MAX, ClientLedger, CommitError,
    Committing, DeathWatch, Door, DoorError, Ended, Freed, GROUPS_PER_LEDGER, Grant, Guard, HeapConfig,
    HugePages, JOINS_PER_PROCESS_MAX, KernelCell, Killed, LedgerError, Ledgers, LocalHeap, LocalReads,
    Lookup, Medium, Message, MessageError, NewRecord, NoStay, NodeClaim, NodeHeap, NodePin, OwnCells,
    Patience, PerProcess, Pins, ProcessToken, Protection, RankProcess, Reader, Reclaimed, Region,
    RegionError, RegionPosts, SEGMENTS_MAPPED_MAX, SPINS_UNTIL_DEADLINE, Said, Segment, SegmentError,
    SegmentShape, SharedClaim, SharedGuard, SharedLookup, SharedReader, SharedStay, StageError, Staged,
    Staging, StagingRoom, StagingUse, Stay, Trailer, Unpublished, Visitor, WatchError, Welcome, World,
    WorldConfig, WorldError, WorldShape, WriteClaim, Writer, join, offer_segment, open_stream, with_helpers,
};

/// What the model tests need beyond the public names.
#[cfg(any(loom, shuttle))]
#[doc(hidden)]
pub mod model {
    use moontide_types::Epoch;

    pub use crate::floor::Floors;
    pub use crate::planted::{Bug, with_planted};
    pub use crate::rooms::{Room, Rooms};
    use crate::{AtomicWord, Transition};

    /// [`AtomicWord::free`], which is otherwise the owner's alone, after a scan.
    pub fn free(word: &AtomicWord, epoch: Epoch) -> Transition {
        word.free(epoch)
    }

    /// [`AtomicWord::publish_shut`], the owner's alone.
    pub fn publish_shut(word: &AtomicWord, epoch: Epoch) -> Transition {
        word.publish_shut(epoch)
    }
}
