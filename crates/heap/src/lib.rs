//! The ground under everything: memory that one process owns and others map, and the rules for using it.
//!
//! Three processes meet here. The **node** owns the memory ([`NodeHeap`]); it alone changes words, headers and
//! the index. **Clients** on the same host read objects in place ([`LocalHeap`]) and fill what they were
//! granted. The **master**, somewhere else, keeps the [`Allocator`](alloc::Allocator) of each segment and decides what goes where.
//!
//! Reading order: [`word`](AtomicWord) and [`cell`] (the two halves of the protocol that lets readers in and
//! memory out), [`index`](Index), [`liveness`](Row); then [`region`](Region), [`board`](Board), [`ledger`](Ledgers)
//! and [`segment`](SegmentShape), which put these into shared memory; then [`NodeHeap`], [`LocalHeap`] and the
//! [`Door`] between them; [`alloc`] stands by itself.
//!
//! The first four are written on slices of atomics and run unchanged under model checkers (`--cfg loom`,
//! `--cfg shuttle`), where the rest is left out.

#[cfg(not(target_pointer_width = "64"))]
compile_error!("regions are larger than a 32-bit address space");
#[cfg(not(target_endian = "little"))]
compile_error!("records are shared in place between processes and stored little-endian");

pub mod cell;
mod index;
mod liveness;
mod planted;
mod sync;
mod word;

pub use index::{ENTRIES_PER_BUCKET, Index, Inserted, Place};
pub use liveness::{Liveness, NotYours, Occupant, Row};
pub use word::{AtomicWord, Transition};

pub mod alloc;

#[cfg(not(any(loom, shuttle)))]
mod shm;
#[cfg(not(any(loom, shuttle)))]
pub use shm::{
    AttachError, BeginError, Board, BoardError, BoardView, CLIENTS_MAX, ClientLedger, CommitError,
    DeathWatch, Door, DoorError, Ended, Freed, GROUPS_PER_LEDGER, Grant, Guard, HeapConfig, HugePages,
    JOINS_PER_PROCESS_MAX, Killed, LedgerError, Ledgers, LocalHeap, Lookup, Message, MessageError, NewRecord,
    NodeClaim, NodeHeap, NodePin, OwnCells, Pins, Protection, Reader, Reclaimed, Region, RegionError,
    SEGMENTS_MAPPED_MAX, Segment, SegmentError, SegmentShape, Visitor, Welcome, WriteClaim, Writer, join,
    offer_segment,
};

/// What the model tests need beyond the public names.
#[cfg(any(loom, shuttle))]
#[doc(hidden)]
pub mod model {
    use moontide_types::Epoch;

    pub use crate::planted::{Bug, with_planted};
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
