//! [`SharedReader`] and [`SharedGuard`]: [`Reader`] and [`Guard`] that keep their heap alive by themselves, for
//! threads, futures and bindings that cannot name a lifetime.
//!
//! Each holds the borrowing form with its lifetime extended, and the `Arc` that makes this true. Invariants: what
//! borrows is dropped before the `Arc` is given back; nothing hands out the long borrow, so whatever a caller gets
//! from here borrows from the reader or the guard itself.

use std::fmt;
use std::mem::MaybeUninit;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use moontide_types::record::{Header, PageDigests, State};
use moontide_types::{Epoch, MonoTime, ObjectId, SegmentId, SlotId, Span};

use crate::cell::{Cell, SlotName};
use crate::shm::local::{Guard, LocalHeap, Lookup, NoStay, Reader, Stay, WriteClaim};

/// One thread's way to read, without a lifetime: [`Reader`].
#[derive(Debug)]
pub struct SharedReader {
    // Fields are dropped in this order: the borrow first.
    reader: Lent<Reader<'static>>,
    heap: Arc<LocalHeap>,
}

/// An object's bytes, in place, without a lifetime: [`Guard`]. It may outlive its reader.
#[derive(Debug)]
pub struct SharedGuard {
    // Fields are dropped in this order: the borrow first.
    guard: Lent<Guard<'static>>,
    /// Never looked at: it keeps alive what the guard borrows from.
    _heap: Arc<LocalHeap>,
}

/// A record that this process may fill, without a lifetime: [`WriteClaim`].
#[derive(Debug)]
pub struct SharedClaim {
    // Fields are dropped in this order: the borrow first.
    claim: Lent<WriteClaim<'static>>,
    heap: Arc<LocalHeap>,
}

/// A record that is written, and about to be committed: until this is dropped, no other thread of this process gets at it.
#[derive(Debug)]
pub struct Committing {
    heap: Arc<LocalHeap>,
    name: SlotName,
}

impl Drop for Committing {
    fn drop(&mut self) {
        self.heap.forget_claim(self.name);
    }
}

/// A slot that is not used again, without a lifetime: [`Stay`].
#[derive(Debug)]
pub struct SharedStay {
    // Fields are dropped in this order: the borrow first.
    stay: Lent<Stay<'static>>,
    heap: Arc<LocalHeap>,
}

/// A cell in which kernels of this process name slots of a node, one at a time, by the rule of [`Cell::acquire`]. It is no
/// one else's until this is dropped; what a kernel has left in it then stays named until the process ends.
#[derive(Debug)]
pub struct KernelCell {
    cell: Lent<&'static Cell>,
    /// It keeps the cell's group for this.
    _reader: SharedReader,
}

/// What a get through a [`SharedReader`] found: [`Lookup`].
#[derive(Debug)]
pub enum SharedLookup {
    /// The object, in place.
    Hit(SharedGuard),
    /// It is not here, or not complete; ask the master.
    Miss,
    /// With this object the reader would hold more guards or bytes than it may: get a copy instead, or drop some.
    Full,
    /// The node is silent or has closed its index: ask the master.
    Closed,
}

const _: () = {
    const fn crosses_threads<T: Send + Sync + 'static>() {}
    crosses_threads::<SharedReader>();
    crosses_threads::<SharedGuard>();
    crosses_threads::<SharedClaim>();
    crosses_threads::<SharedStay>();
    crosses_threads::<KernelCell>();
    crosses_threads::<SharedLookup>();
};

impl SharedReader {
    /// A reader for one thread; `None` if too many threads have one, or in a forked child.
    pub fn new(heap: Arc<LocalHeap>) -> Option<SharedReader> {
        // SAFETY: the heap stands where the `Arc` points, which does not move with the `Arc` and stays as long as
        // this one or a clone is there. The reader is kept beside this one and dropped before it; the guards that
        // it hands out leave this module only as `SharedGuard`, each beside a clone of its own.
        let lasting: &'static LocalHeap = unsafe { &*Arc::as_ptr(&heap) };
        let reader = Lent::new(lasting.lasting_reader()?);
        Some(SharedReader { reader, heap })
    }

    /// The heap that it reads.
    pub fn heap(&self) -> &Arc<LocalHeap> {
        &self.heap
    }

    /// Looks for an object: [`Reader::get`].
    #[inline]
    pub fn get(&mut self, id: &ObjectId, now: MonoTime) -> SharedLookup {
        let found = self.reader.get(id, now);
        self.share(found)
    }

    /// Pins the slot that the master named, in the version that the master named: [`Reader::get_at`].
    #[inline]
    pub fn get_at(&mut self, segment: SegmentId, slot: SlotId, epoch: Epoch, now: MonoTime) -> SharedLookup {
        let found = self.reader.get_at(segment, slot, epoch, now);
        self.share(found)
    }

    /// Claims a slot that this process was granted: [`Reader::claim`].
    pub fn claim(&mut self, segment: SegmentId, slot: SlotId, epoch: Epoch) -> Option<SharedClaim> {
        let claim = Lent::new(self.reader.claim(segment, slot, epoch)?);
        Some(SharedClaim { claim, heap: Arc::clone(&self.heap) })
    }

    /// Makes sure that a slot stays a version's: [`Reader::stay`].
    pub fn stay(&mut self, segment: SegmentId, slot: SlotId, epoch: Epoch) -> Result<SharedStay, NoStay> {
        let stay = Lent::new(self.reader.stay(segment, slot, epoch)?);
        Ok(SharedStay { stay, heap: Arc::clone(&self.heap) })
    }

    /// A cell for kernels; the reader is for nothing else from now on.
    pub fn into_kernel_cell(mut self) -> Option<KernelCell> {
        let cell = Lent::new(self.reader.cell_for_kernels()?);
        Some(KernelCell { cell, _reader: self })
    }

    #[inline]
    fn share(&self, found: Lookup<'static>) -> SharedLookup {
        match found {
            Lookup::Hit(guard) => {
                SharedLookup::Hit(SharedGuard { guard: Lent::new(guard), _heap: Arc::clone(&self.heap) })
            }
            Lookup::Miss => SharedLookup::Miss,
            Lookup::Full => SharedLookup::Full,
            Lookup::Closed => SharedLookup::Closed,
        }
    }
}

impl SharedClaim {
    /// The end of writing: lets go of the record for the commit, which is to be over before the result is dropped.
    pub fn end_before_commit(self) -> Committing {
        let SharedClaim { claim, heap } = self;
        let name = claim.into_inner().end_before_commit();
        Committing { heap, name }
    }

    /// Where the payload is to go: [`WriteClaim::payload`].
    pub fn payload(&self) -> Option<NonNull<u8>> {
        self.claim.payload()
    }

    /// The heap that it is of.
    pub fn heap(&self) -> &Arc<LocalHeap> {
        &self.heap
    }

    /// The header as granted: [`WriteClaim::header`].
    pub fn header(&self) -> &Header {
        self.claim.header()
    }
}

impl SharedStay {
    /// Bytes of the segment's payload: [`Stay::payload`].
    pub fn payload(&self, span: Span) -> Option<NonNull<u8>> {
        self.stay.payload(span)
    }

    /// The heap that it is of.
    pub fn heap(&self) -> &Arc<LocalHeap> {
        &self.heap
    }

    /// Which bytes of the segment are the record's: [`Stay::complete_span`].
    pub fn complete_span(&self) -> Option<Span> {
        self.stay.complete_span()
    }

    /// What the node says of the record: [`Stay::state`].
    pub fn state(&self) -> Option<State> {
        self.stay.state()
    }

    /// The version.
    pub fn epoch(&self) -> Epoch {
        self.stay.epoch()
    }
}

impl KernelCell {
    /// Where the cell is in this process.
    pub fn address(&self) -> usize {
        self.cell.address()
    }

    /// The heap whose ledger it is in.
    pub fn heap(&self) -> &Arc<LocalHeap> {
        self._reader.heap()
    }

    /// What a kernel writes into it to name a slot.
    pub fn name(segment: SegmentId, slot: SlotId) -> u64 {
        SlotName::new(segment, slot).bits()
    }
}

impl SharedGuard {
    /// The payload.
    ///
    /// # Panics
    /// In a child that was forked after the guard was made: the memory is not there.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        self.guard.bytes()
    }

    /// The page digests: [`Guard::digests`].
    pub fn digests(&self) -> PageDigests<'_> {
        self.guard.digests()
    }

    /// The record's header.
    pub fn header(&self) -> &Header {
        self.guard.header()
    }

    /// The object's version.
    pub fn version(&self) -> Epoch {
        self.guard.version()
    }

    /// Where the object is.
    pub fn place(&self) -> (SegmentId, SlotId) {
        self.guard.place()
    }

    /// Computes the digests and compares with the root; `None` for a record without digests.
    pub fn verify(&self) -> Option<bool> {
        self.guard.verify()
    }
}

/// A value with a borrow that may end while a function still has the value as its argument: `drop(guard)` may give
/// back the last `Arc`. A plain reference promises the compiler that it stays valid until the function returns;
/// inside of `MaybeUninit` it promises nothing. Always initialised.
struct Lent<T>(MaybeUninit<T>);

impl<T> Lent<T> {
    #[inline]
    fn new(value: T) -> Lent<T> {
        Lent(MaybeUninit::new(value))
    }

    fn into_inner(self) -> T {
        let lent = std::mem::ManuallyDrop::new(self);
        // SAFETY: initialised by `new`, and not used after this.
        unsafe { lent.0.assume_init_read() }
    }
}

impl<T> Deref for Lent<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: initialised by `new`.
        unsafe { self.0.assume_init_ref() }
    }
}

impl<T> DerefMut for Lent<T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: initialised by `new`.
        unsafe { self.0.assume_init_mut() }
    }
}

impl<T> Drop for Lent<T> {
    #[inline]
    fn drop(&mut self) {
        // SAFETY: initialised by `new`, and not used after this.
        unsafe { self.0.assume_init_drop() };
    }
}

impl<T: fmt::Debug> fmt::Debug for Lent<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        T::fmt(self, f)
    }
}
