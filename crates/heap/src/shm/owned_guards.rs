//! [`SharedReader`] and [`SharedGuard`]: [`Reader`] and [`Guard`] that keep their heap alive, for threads, futures
//! and bindings that cannot name a lifetime.
//!
//! Each holds the borrowing form with an extended lifetime, and the `Arc` that makes it valid. Invariants: the
//! borrowing value is dropped before the `Arc`; nothing returns the long borrow, so references that a caller gets
//! from here borrow from the reader or the guard itself.

use std::fmt;
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use moontide_types::record::{Header, PageDigests, State};
use moontide_types::{Epoch, MonoTime, ObjectId, SegmentId, SlotId, Span};

use crate::cell::{Cell, SlotRef};
use crate::shm::local::{Guard, LocalHeap, Lookup, Reader, SlotHold, SlotHoldError, WriteClaim};

/// [`Reader`] without a lifetime: read access of one thread.
#[derive(Debug)]
pub struct SharedReader {
    // Fields are dropped in this order: the borrow first.
    reader: MaybeDangling<Reader<'static>>,
    heap: Arc<LocalHeap>,
}

/// [`Guard`] without a lifetime: bytes of an object, in place. It may outlive its reader.
#[derive(Debug)]
pub struct SharedGuard {
    // Fields are dropped in this order: the borrow first.
    guard: MaybeDangling<Guard<'static>>,
    /// Never read: keeps the heap alive from which the guard borrows.
    _heap: Arc<LocalHeap>,
}

/// [`WriteClaim`] without a lifetime: a record that this process may fill.
#[derive(Debug)]
pub struct SharedClaim {
    // Fields are dropped in this order: the borrow first.
    claim: MaybeDangling<WriteClaim<'static>>,
    heap: Arc<LocalHeap>,
}

/// A written record that is about to be committed: until this is dropped, no other thread of this process can pin it.
#[derive(Debug)]
pub struct PendingCommit {
    heap: Arc<LocalHeap>,
    name: SlotRef,
}

impl Drop for PendingCommit {
    fn drop(&mut self) {
        self.heap.release_claim(self.name);
    }
}

/// [`SlotHold`] without a lifetime: keeps a slot from being reused.
#[derive(Debug)]
pub struct SharedSlotHold {
    // Fields are dropped in this order: the borrow first.
    hold: MaybeDangling<SlotHold<'static>>,
    heap: Arc<LocalHeap>,
}

/// Cell in which kernels of this process pin slots of a node, one at a time, by the protocol of [`Cell::acquire`].
/// Only they use it until this is dropped; a slot that a kernel has left in it remains pinned until the process
/// exits.
#[derive(Debug)]
pub struct KernelCell {
    cell: MaybeDangling<&'static Cell>,
    /// Keeps the cell's lane.
    _reader: SharedReader,
}

/// Result of a get through a [`SharedReader`]: [`Lookup`].
#[derive(Debug)]
pub enum SharedLookup {
    /// The object, in place.
    Hit(SharedGuard),
    /// The object is not in the index, or not complete; ask the master.
    Miss,
    /// With this object the reader would exceed its limit of guards or bytes: get a copy instead, or drop some
    /// guards.
    Full,
    /// The node's heartbeat is stale, or its index is closed: ask the master.
    Closed,
}

const _: () = {
    const fn crosses_threads<T: Send + Sync + 'static>() {}
    crosses_threads::<SharedReader>();
    crosses_threads::<SharedGuard>();
    crosses_threads::<SharedClaim>();
    crosses_threads::<SharedSlotHold>();
    crosses_threads::<KernelCell>();
    crosses_threads::<SharedLookup>();
};

impl SharedReader {
    /// Returns a reader for one thread; `None` if too many threads have one, or in a forked child.
    pub fn new(heap: Arc<LocalHeap>) -> Option<SharedReader> {
        // SAFETY: the heap is where the `Arc` points, which does not move with the `Arc` and remains valid as long as
        // this `Arc` or a clone of it exists. The reader is stored beside this one and dropped before it; the guards
        // that it returns leave this module only as `SharedGuard`, each beside a clone of its own.
        let extended: &'static LocalHeap = unsafe { &*Arc::as_ptr(&heap) };
        let reader = MaybeDangling::new(extended.long_lived_reader()?);
        Some(SharedReader { reader, heap })
    }

    /// Returns the heap that it reads.
    pub fn heap(&self) -> &Arc<LocalHeap> {
        &self.heap
    }

    /// Looks up an object: [`Reader::get`].
    #[inline]
    pub fn get(&mut self, id: &ObjectId, now: MonoTime) -> SharedLookup {
        let found = self.reader.get(id, now);
        self.share(found)
    }

    /// Pins the slot and version that the master returned: [`Reader::get_at`].
    #[inline]
    pub fn get_at(&mut self, segment: SegmentId, slot: SlotId, epoch: Epoch, now: MonoTime) -> SharedLookup {
        let found = self.reader.get_at(segment, slot, epoch, now);
        self.share(found)
    }

    /// Claims a slot that this process was granted: [`Reader::claim`].
    pub fn claim(&mut self, segment: SegmentId, slot: SlotId, epoch: Epoch) -> Option<SharedClaim> {
        let claim = MaybeDangling::new(self.reader.claim(segment, slot, epoch)?);
        Some(SharedClaim { claim, heap: Arc::clone(&self.heap) })
    }

    /// Keeps a slot from being reused: [`Reader::hold_slot`].
    pub fn stay(
        &mut self,
        segment: SegmentId,
        slot: SlotId,
        epoch: Epoch,
    ) -> Result<SharedSlotHold, SlotHoldError> {
        let hold = MaybeDangling::new(self.reader.hold_slot(segment, slot, epoch)?);
        Ok(SharedSlotHold { hold, heap: Arc::clone(&self.heap) })
    }

    /// Turns the reader into a cell for kernels.
    pub fn into_kernel_cell(mut self) -> Option<KernelCell> {
        let cell = MaybeDangling::new(self.reader.cell_for_kernels()?);
        Some(KernelCell { cell, _reader: self })
    }

    #[inline]
    fn share(&self, found: Lookup<'static>) -> SharedLookup {
        match found {
            Lookup::Hit(guard) => SharedLookup::Hit(SharedGuard {
                guard: MaybeDangling::new(guard),
                _heap: Arc::clone(&self.heap),
            }),
            Lookup::Miss => SharedLookup::Miss,
            Lookup::Full => SharedLookup::Full,
            Lookup::Closed => SharedLookup::Closed,
        }
    }
}

impl SharedClaim {
    /// Ends writing: releases the pin for the commit, which must be over before the result is dropped.
    pub fn end_before_commit(self) -> PendingCommit {
        let SharedClaim { claim, heap } = self;
        let name = claim.into_inner().into_commit();
        PendingCommit { heap, name }
    }

    /// Returns the address of the payload: [`WriteClaim::payload`].
    pub fn payload(&self) -> Option<NonNull<u8>> {
        self.claim.payload()
    }

    /// Returns the heap of the claimed record.
    pub fn heap(&self) -> &Arc<LocalHeap> {
        &self.heap
    }

    /// Returns the header as granted: [`WriteClaim::header`].
    pub fn header(&self) -> &Header {
        self.claim.header()
    }
}

impl SharedSlotHold {
    /// Returns bytes of the segment's payload: [`SlotHold::payload`].
    pub fn payload(&self, span: Span) -> Option<NonNull<u8>> {
        self.hold.payload(span)
    }

    /// Returns the heap of the held slot.
    pub fn heap(&self) -> &Arc<LocalHeap> {
        &self.heap
    }

    /// Returns the record's range in the segment: [`SlotHold::complete_span`].
    pub fn complete_span(&self) -> Option<Span> {
        self.hold.complete_span()
    }

    /// Returns the state of the record's word: [`SlotHold::state`].
    pub fn state(&self) -> Option<State> {
        self.hold.state()
    }

    /// Returns the held version.
    pub fn epoch(&self) -> Epoch {
        self.hold.epoch()
    }
}

impl KernelCell {
    /// Returns the address of the cell in this process.
    pub fn address(&self) -> usize {
        self.cell.address()
    }

    /// Returns the heap whose ledger contains the cell.
    pub fn heap(&self) -> &Arc<LocalHeap> {
        self._reader.heap()
    }

    /// Returns the value that a kernel writes into the cell to pin a slot.
    pub fn name(segment: SegmentId, slot: SlotId) -> u64 {
        SlotRef::new(segment, slot).bits()
    }
}

impl SharedGuard {
    /// Returns the payload.
    ///
    /// # Panics
    /// In a child that was forked after the guard was made: it does not have the memory.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        self.guard.bytes()
    }

    /// Returns the page digests: [`Guard::digests`].
    pub fn digests(&self) -> PageDigests<'_> {
        self.guard.digests()
    }

    /// Returns the record's header.
    pub fn header(&self) -> &Header {
        self.guard.header()
    }

    /// Returns the object's version.
    pub fn version(&self) -> Epoch {
        self.guard.version()
    }

    /// Returns segment and slot of the object.
    pub fn place(&self) -> (SegmentId, SlotId) {
        self.guard.location()
    }

    /// Computes the digests and compares with the root. Returns `None` for a record without digests.
    pub fn verify(&self) -> Option<bool> {
        self.guard.verify()
    }
}

/// A value with a borrow that may end while a function still has the value as its argument: `drop(guard)` may drop
/// the last `Arc`. A plain reference promises the compiler that it remains valid until the function returns; inside
/// of `MaybeUninit` it promises nothing. Always initialised.
struct MaybeDangling<T>(MaybeUninit<T>);

impl<T> MaybeDangling<T> {
    #[inline]
    fn new(value: T) -> MaybeDangling<T> {
        MaybeDangling(MaybeUninit::new(value))
    }

    fn into_inner(self) -> T {
        let value = std::mem::ManuallyDrop::new(self);
        // SAFETY: initialised by `new`, and not used after this.
        unsafe { value.0.assume_init_read() }
    }
}

impl<T> Deref for MaybeDangling<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: initialised by `new`.
        unsafe { self.0.assume_init_ref() }
    }
}

impl<T> DerefMut for MaybeDangling<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: initialised by `new`.
        unsafe { self.0.assume_init_mut() }
    }
}

impl<T> Drop for MaybeDangling<T> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: initialised by `new`, and not used after this.
        unsafe { self.0.assume_init_drop() };
    }
}

impl<T: fmt::Debug> fmt::Debug for MaybeDangling<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        T::fmt(self, f)
    }
}
