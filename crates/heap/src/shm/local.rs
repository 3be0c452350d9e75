//! [`LocalHeap`]: a node's shared memory as a client uses it. Reads on the same host, in place, without a call or a
//! copy.
//!
//! A get looks up the index, pins the slot in the own ledger, checks the word, checks the header, and uses the bytes.
//! It writes no memory that another thread accesses, except for the own cell, which the node loads when it reclaims.
//!
//! ```text
//!   LocalHeap ── reader() ──▶ Reader (one per thread, owns a lane of cells)
//!                               ├─ get(id) ──────────▶ Guard       READY bytes, until dropped
//!                               └─ claim(slot, epoch) ▶ WriteClaim  bytes to fill, until dropped
//! ```

use std::collections::HashSet;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use moontide_rt::sync::{AtomicU64, Ordering};
use moontide_types::record::{Header, PageDigests, State, Word};
use moontide_types::{ClientId, Epoch, Generation, MonoTime, ObjectId, SegmentId, SlotId, Span};

use crate::cell::{CELLS_PER_LANE, Cell, ExpectedWord, SlotRef};
use crate::index::IndexEntry;
use crate::shm::grant::PayloadWriter;
use crate::shm::index_region::{IndexRegionError, IndexView};
use crate::shm::ledger::{LANES_PER_LEDGER, LONG_LIVED_LANES_MAX, LedgerError, LedgerWriter};
use crate::shm::read_counters::LaneReadCounters;
use crate::shm::region::Region;
use crate::shm::segment::{PayloadMemory, SegmentDescriptor, SegmentError, SegmentRegions};

/// Maximum number of segments of one node that a client maps: 4 TiB in segments of 1 GiB.
pub const SEGMENTS_MAPPED_MAX: usize = 4096;

/// Maximum number of lanes of one reader: 512 guards at once.
const LANES_PER_READER: usize = 32;

/// Reason why a client cannot use a node's memory.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The index region is invalid.
    #[error(transparent)]
    IndexRegion(#[from] IndexRegionError),
    /// The ledger is invalid.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// The segment is invalid.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// The segment's id exceeds the limit of a client.
    #[error("segment {0} exceeds the {SEGMENTS_MAPPED_MAX} segments that a client maps")]
    TooMany(SegmentId),
}

/// Memory of a node as one of its clients maps it.
#[derive(Debug)]
pub struct LocalHeap {
    client: ClientId,
    index_view: IndexView,
    ledger: LedgerWriter,
    segments: Box<[OnceLock<SegmentRegions>]>,
    /// Per lane of the ledger: length of the object that each cell pins, or pinned last. Process-private.
    lengths: Box<[LaneLengths]>,
    pinned_bytes_max: u64,
    /// Slots that a thread of this process is filling: one claim per slot. Process-private.
    claimed: Mutex<HashSet<SlotRef>>,
}

/// Written by the lane's one thread, read by it and by the next thread that acquires the lane.
#[derive(Debug, Default)]
#[repr(align(128))]
struct LaneLengths([AtomicU64; CELLS_PER_LANE]);

impl LocalHeap {
    /// Combines the imported parts. [`connect`](crate::connect) does this over the node's socket.
    ///
    /// A node whose last heartbeat is older than `stale_after` is not used. A reader that has `pinned_bytes_max`
    /// under guards must copy. The limit is per reader: a sum over all threads would be a cache line that all of them
    /// write.
    ///
    /// # Safety
    /// The regions are shared with other processes, and Rust's guarantees about the bytes under a [`Guard`] depend on
    /// all of them following the protocol: only the one writer of a record in state WRITING writes payload, under a
    /// claim. The node and all its clients are trusted to do so.
    pub unsafe fn new(
        client: ClientId,
        index_region: Region,
        ledger: Region,
        stale_after: Duration,
        pinned_bytes_max: u64,
    ) -> Result<LocalHeap, AttachError> {
        let index_view = IndexView::new(index_region, stale_after)?;
        let ledger = LedgerWriter::import(ledger)?;
        let segments = std::iter::repeat_with(OnceLock::new).take(SEGMENTS_MAPPED_MAX).collect();
        let lengths = std::iter::repeat_with(LaneLengths::default).take(ledger.lanes() as usize).collect();
        let claimed = Mutex::default();
        Ok(LocalHeap { client, index_view, ledger, segments, lengths, pinned_bytes_max, claimed })
    }

    /// Adds a segment. Ignores a segment that was added before.
    pub fn attach(
        &self,
        shape: SegmentDescriptor,
        headers: Region,
        payload: Region,
    ) -> Result<(), AttachError> {
        let entry = self.segments.get(shape.segment.0 as usize).ok_or(AttachError::TooMany(shape.segment))?;
        let regions = SegmentRegions::import(shape, self.index_view.node(), headers, payload)?;
        let _ = entry.set(regions);
        Ok(())
    }

    /// Returns this client's id at the node.
    pub fn client(&self) -> ClientId {
        self.client
    }

    /// Returns the node's index region.
    pub fn board(&self) -> &IndexView {
        &self.index_view
    }

    /// Returns the incarnation of a mapped segment.
    pub fn generation(&self, segment: SegmentId) -> Option<Generation> {
        self.segment(segment).map(|regions| regions.shape.generation)
    }

    /// Returns the memory that holds the bytes of a mapped segment's records.
    pub fn medium(&self, segment: SegmentId) -> Option<PayloadMemory> {
        self.segment(segment).map(|regions| regions.shape.medium)
    }

    /// Returns address and length of a segment's header region in this process, for registering it with a device. It
    /// remains mapped for the life of this value, read-only.
    pub fn headers(&self, segment: SegmentId) -> Option<(NonNull<u8>, u64)> {
        let headers = &self.segment(segment)?.headers;
        headers.is_mapped_here().then(|| (headers.base(), headers.len()))
    }

    /// Returns the address of a slot's word in this process, for atomic loads during the life of this value.
    pub fn word_at(&self, segment: SegmentId, slot: SlotId) -> Option<NonNull<u64>> {
        let regions = self.segment(segment).filter(|_| self.is_mapped_here())?;
        regions.word(slot).map(|_| regions.word_at(slot))
    }

    /// Returns a reader for one thread, for short use; `None` if too many threads have one, or in a forked child.
    pub fn reader(&self) -> Option<Reader<'_>> {
        self.reader_among(LANES_PER_LEDGER as usize)
    }

    /// Returns a reader that a thread keeps. Fails earlier than [`LocalHeap::reader`]: some lanes are reserved for
    /// short use.
    pub fn long_lived_reader(&self) -> Option<Reader<'_>> {
        self.reader_among(LONG_LIVED_LANES_MAX)
    }

    fn reader_among(&self, lanes: usize) -> Option<Reader<'_>> {
        if !self.is_mapped_here() {
            return None;
        }
        let lane = self.ledger.acquire_lane(lanes)?;
        Some(Reader { heap: self, lanes: vec![lane], counters: self.ledger.counters(lane), pin_budget: 0 })
    }

    /// Returns whether the mappings exist in this process: `false` in a child that was forked after they were made.
    #[inline]
    fn is_mapped_here(&self) -> bool {
        self.ledger.is_mapped_here()
    }

    /// Records that no thread of this process writes the slot any more.
    pub(super) fn release_claim(&self, name: SlotRef) {
        self.claimed().remove(&name);
    }

    fn claimed(&self) -> MutexGuard<'_, HashSet<SlotRef>> {
        self.claimed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    fn segment(&self, segment: SegmentId) -> Option<&SegmentRegions> {
        self.segments.get(segment.0 as usize)?.get()
    }
}

/// Result of a local get.
#[derive(Debug)]
pub enum Lookup<'h> {
    /// The object, in place.
    Hit(Guard<'h>),
    /// The object is not in the index, or not complete; ask the master.
    Miss,
    /// With this object the reader would exceed its limit of guards or bytes (an object above `pinned_bytes_max`
    /// always does): get a copy instead, or drop some guards.
    Full,
    /// The node's heartbeat is stale, or its index is closed: ask the master.
    Closed,
}

/// Read access of one thread.
#[derive(Debug)]
pub struct Reader<'h> {
    heap: &'h LocalHeap,
    lanes: Vec<u32>,
    /// Counters of the first lane: only this reader writes them as long as it has the lane.
    counters: &'h LaneReadCounters,
    /// Bytes that may certainly be pinned before the remaining guards have to be counted again. Counting them costs a
    /// load of all cells; an exact sum would cost every guard two atomic additions.
    pin_budget: u64,
}

/// A cell that pins nothing, and its position.
#[derive(Clone, Copy)]
struct VacantCell<'h> {
    cell: &'h Cell,
    lane: u32,
    index: usize,
}

impl<'h> Reader<'h> {
    /// Looks up an object, and counts the read in the ledger: see [`Ledgers::reads`](crate::Ledgers::reads). `now` is
    /// [`Clock::now`](moontide_types::Clock::now) or a coarser reading of the same clock; it is only compared with
    /// the node's heartbeat.
    #[inline]
    pub fn get(&mut self, id: &ObjectId, now: MonoTime) -> Lookup<'h> {
        let heap = self.heap;
        if !heap.index_view.is_usable(now) {
            return Lookup::Closed;
        }
        let Some(vacant) = self.vacant() else { return Lookup::Full };
        let found = heap.index_view.index().find(id, |entry| {
            let guard = self.pin(entry, vacant.cell, ExpectedWord::Ready)?;
            // The entry was a hint. This is the proof; a guard that is dropped here releases the cell.
            (guard.pin.header.id == *id).then_some(guard)
        });
        match found {
            Some(guard) => {
                heap.ledger.touch(guard.pin.regions.global_slot(guard.pin.slot));
                let admitted = self.admit(guard, vacant);
                if let Lookup::Hit(guard) = &admitted {
                    self.counters.hit(guard.pin.header.stripe_len);
                }
                admitted
            }
            None => {
                self.counters.miss();
                Lookup::Miss
            }
        }
    }

    /// Pins the slot and version that the master returned. Not counted: the master has counted this read.
    pub fn get_at(&mut self, segment: SegmentId, slot: SlotId, epoch: Epoch, now: MonoTime) -> Lookup<'h> {
        if !self.heap.index_view.is_usable(now) {
            return Lookup::Closed;
        }
        let Some(vacant) = self.vacant() else { return Lookup::Full };
        match self.pin(IndexEntry { segment, slot }, vacant.cell, ExpectedWord::ReadyAt(epoch)) {
            Some(guard) => {
                self.heap.ledger.touch(guard.pin.regions.global_slot(slot));
                self.admit(guard, vacant)
            }
            None => Lookup::Miss,
        }
    }

    /// Claims a slot that this process was granted: it may fill the record until the claim is dropped, even if the
    /// reservation ends in the meantime. Returns `None` if the reservation has already ended or was granted to
    /// another process, if another thread of this one has a claim on it, or if no cell is vacant.
    pub fn claim(&mut self, segment: SegmentId, slot: SlotId, epoch: Epoch) -> Option<WriteClaim<'h>> {
        if !self.heap.is_mapped_here() {
            return None;
        }
        let vacant = self.vacant()?;
        let Guard { pin } =
            self.pin(IndexEntry { segment, slot }, vacant.cell, ExpectedWord::WritingAt(epoch))?;
        if pin.header.root != PayloadWriter::Client(self.heap.client).tag() {
            return None; // granted to another process
        }
        self.note_length(vacant, pin.header.stripe_len);
        // A second claim ends here, together with its pin.
        self.heap
            .claimed()
            .insert(SlotRef::new(segment, slot))
            .then(|| WriteClaim { pin, continues_as_commit: false })
    }

    /// Keeps a slot from being reused, while another process writes this version in it or it is complete: its bytes
    /// are not reused before the result is dropped, even if the record is killed.
    pub fn hold_slot(
        &mut self,
        segment: SegmentId,
        slot: SlotId,
        epoch: Epoch,
    ) -> Result<SlotHold<'h>, SlotHoldError> {
        if !self.heap.is_mapped_here() {
            return Err(SlotHoldError::Ended);
        }
        let name = SlotRef::new(segment, slot);
        let regions = self.heap.segment(segment).ok_or(SlotHoldError::Ended)?;
        let word = regions.word(slot).ok_or(SlotHoldError::Ended)?;
        let vacant = self.vacant().ok_or(SlotHoldError::Full)?;
        let claimed = self.heap.claimed();
        if claimed.contains(&name) {
            return Err(SlotHoldError::Own);
        }
        // The header is not read: it changes when the record becomes complete.
        vacant.cell.acquire(name, word, ExpectedWord::BegunAt(epoch)).map_err(|_| SlotHoldError::Ended)?;
        drop(claimed);
        self.note_length(vacant, 0);
        Ok(SlotHold { heap: self.heap, cell: vacant.cell, regions, slot, epoch })
    }

    /// Returns a cell for kernels of this process, which write slot references into it themselves. The reader must
    /// not be used for anything else.
    pub(super) fn cell_for_kernels(&mut self) -> Option<&'h Cell> {
        self.vacant().map(|vacant| vacant.cell)
    }

    /// Creates a second guard for the same object, which may live longer than the first. Returns `None` if the object
    /// is dead, if no cell is vacant, or if the guard belongs to another heap, whose node does not scan the cells of
    /// this one.
    pub fn clone_guard(&mut self, guard: &Guard<'h>) -> Option<Guard<'h>> {
        if !self.heap.is_mapped_here() || !std::ptr::eq(self.heap, guard.pin.heap) {
            return None;
        }
        let vacant = self.vacant()?;
        let Pin { heap, regions, slot, word, header, .. } = guard.pin;
        if !vacant.cell.duplicate_pin(guard.pin.cell, regions.word(slot)?, word) {
            return None;
        }
        let clone = Guard { pin: Pin { heap, cell: vacant.cell, regions, slot, word, header } };
        match self.admit(clone, vacant) {
            Lookup::Hit(clone) => Some(clone),
            _ => None,
        }
    }

    #[inline]
    fn pin(&self, entry: IndexEntry, cell: &'h Cell, expect: ExpectedWord) -> Option<Guard<'h>> {
        let regions = self.heap.segment(entry.segment)?;
        regions.prefetch(entry.slot);
        self.heap.ledger.prefetch_touch(regions.global_slot(entry.slot));
        if !regions.has_bytes() && expect.is_for_reading() {
            return None; // bytes in a device's memory are read by other means
        }
        let word = regions.word(entry.slot)?;
        let seen = cell.acquire(SlotRef::new(entry.segment, entry.slot), word, expect).ok()?;
        // SAFETY: the pin was granted on this word.
        let header = match unsafe { regions.header(entry.slot, seen) } {
            Ok(header) if regions.record_span(&header).is_some() => header,
            _ => {
                cell.release();
                return None;
            }
        };
        Some(Guard { pin: Pin { heap: self.heap, cell, regions, slot: entry.slot, word: seen, header } })
    }

    /// Returns the guard if its bytes are within the limit.
    #[inline]
    fn admit(&mut self, guard: Guard<'h>, vacant: VacantCell<'h>) -> Lookup<'h> {
        let len = guard.pin.header.stripe_len;
        self.note_length(vacant, len);
        if len > self.pin_budget {
            // The guard's own cell is included in the count.
            match self.heap.pinned_bytes_max.checked_sub(self.pinned_bytes()) {
                Some(left) => self.pin_budget = left + len,
                None => return Lookup::Full,
            }
        }
        self.pin_budget -= len;
        Lookup::Hit(guard)
    }

    #[inline]
    fn note_length(&self, vacant: VacantCell<'_>, len: u64) {
        // Relaxed: only this thread reads it, or one that got the lane through `acquire_lane`.
        self.heap.lengths[vacant.lane as usize].0[vacant.index].store(len, Ordering::Relaxed);
    }

    #[inline]
    fn vacant(&mut self) -> Option<VacantCell<'h>> {
        let heap = self.heap;
        let in_lane = |lane| {
            let cells = heap.ledger.lane(lane);
            let cell = cells.vacant()?;
            Some(VacantCell { cell, lane, index: cells.index_of(cell) })
        };
        if let Some(vacant) = self.lanes.iter().find_map(|&lane| in_lane(lane)) {
            // An additional lane that is empty now is released for other threads.
            if let [_, .., last] = self.lanes[..]
                && vacant.lane != last
                && heap.ledger.lane(last).in_use().next().is_none()
            {
                self.lanes.pop();
                heap.ledger.release_lane(last);
            }
            return Some(vacant);
        }
        // A lane may be full of guards that its last reader left: then the next one is acquired.
        while self.lanes.len() < LANES_PER_READER {
            let lane = heap.ledger.acquire_lane(LONG_LIVED_LANES_MAX)?;
            self.lanes.push(lane);
            if let Some(vacant) = in_lane(lane) {
                return Some(vacant);
            }
        }
        None
    }

    /// Returns the bytes under the remaining guards of this reader.
    pub fn pinned_bytes(&self) -> u64 {
        if !self.heap.is_mapped_here() {
            return 0;
        }
        let in_lane = |&lane: &u32| {
            let lengths = &self.heap.lengths[lane as usize].0;
            self.heap
                .ledger
                .lane(lane)
                .in_use()
                .map(|index| lengths[index].load(Ordering::Relaxed))
                .sum::<u64>()
        };
        self.lanes.iter().map(in_lane).sum()
    }
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        if self.heap.is_mapped_here() {
            // Guards may remain. Their cells are not vacant, and the next thread that acquires the lane sees that.
            self.lanes.iter().for_each(|&lane| self.heap.ledger.release_lane(lane));
        }
    }
}

/// A slot pinned in a cell, with its word and header.
#[derive(Debug)]
struct Pin<'h> {
    heap: &'h LocalHeap,
    cell: &'h Cell,
    regions: &'h SegmentRegions,
    slot: SlotId,
    word: Word,
    header: Header,
}

impl Drop for Pin<'_> {
    #[inline]
    fn drop(&mut self) {
        if self.heap.is_mapped_here() {
            self.cell.release();
        }
    }
}

/// Reason why a slot cannot be held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SlotHoldError {
    /// The slot does not hold this version: the record was killed, or has never begun.
    Ended,
    /// This process is writing the record, and its commit needs that no cell of this process pins the slot.
    Own,
    /// The reader has reached its limit: drop some guards.
    Full,
}

/// Keeps a slot from being reused during its life, although its record may still be written, or be killed.
/// [`SlotHold::complete_span`] returns the bytes once they are complete.
#[derive(Debug)]
pub struct SlotHold<'h> {
    heap: &'h LocalHeap,
    cell: &'h Cell,
    regions: &'h SegmentRegions,
    slot: SlotId,
    epoch: Epoch,
}

impl SlotHold<'_> {
    /// Returns bytes of the segment's payload in this process; `None` if they exceed it. The caller must know from
    /// elsewhere that they belong to this record.
    pub fn payload(&self, span: Span) -> Option<NonNull<u8>> {
        self.regions.payload_at(span).filter(|_| self.heap.is_mapped_here())
    }

    /// Returns the state of the record's word. DEAD also for a moment during a commit, while the node scans for
    /// claims; `None` if the slot holds another version, which cannot happen during the life of this process.
    pub fn state(&self) -> Option<State> {
        if !self.heap.is_mapped_here() {
            return None;
        }
        let word = self.regions.word(self.slot).expect("slot of this segment").load();
        (word.epoch() == self.epoch).then(|| word.state())
    }

    /// Returns the record's range in the segment, once it is complete.
    pub fn complete_span(&self) -> Option<Span> {
        (self.state()? == State::Ready).then_some(())?;
        // SAFETY: the slot is pinned, and was READY after that: its header does not change until the pin is released.
        let header = unsafe { self.regions.header(self.slot, Word::new(self.epoch, State::Ready)) }.ok()?;
        Span::new(header.payload_offset, header.stripe_len)
    }

    /// Returns the held version.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }
}

impl Drop for SlotHold<'_> {
    fn drop(&mut self) {
        if self.heap.is_mapped_here() {
            self.cell.release();
        }
    }
}

/// Bytes of an object, in place. They do not change until the guard is dropped, even if the object is removed.
#[derive(Debug)]
pub struct Guard<'h> {
    pin: Pin<'h>,
}

impl Guard<'_> {
    /// Returns the payload.
    ///
    /// # Panics
    /// In a child that was forked after the guard was made: it does not have the memory.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        assert!(self.pin.heap.is_mapped_here(), "guard used in a forked child; get the object again");
        let header = &self.pin.header;
        let span = Span::new(header.payload_offset, header.stripe_len).expect("checked by record_span");
        // SAFETY: the pin was granted on READY, so no thread writes these bytes until it is released.
        unsafe { self.pin.regions.bytes(span) }
    }

    /// Returns the page digests as the writer stored them; none in a record without digests.
    ///
    /// # Panics
    /// As [`Guard::bytes`].
    pub fn digests(&self) -> PageDigests<'_> {
        assert!(self.pin.heap.is_mapped_here(), "guard used in a forked child; get the object again");
        // SAFETY: as for the payload: READY, and pinned.
        unsafe { self.pin.regions.digests(&self.pin.header) }
    }

    /// Returns the record's header.
    pub fn header(&self) -> &Header {
        &self.pin.header
    }

    /// Returns the object's version.
    pub fn version(&self) -> Epoch {
        self.pin.word.epoch()
    }

    /// Returns segment and slot of the object.
    pub fn location(&self) -> (SegmentId, SlotId) {
        (self.pin.regions.shape.segment, self.pin.slot)
    }

    /// Computes the digests and compares with the root. Returns `None` for a record without digests.
    pub fn verify(&self) -> Option<bool> {
        let Header { flags, root, .. } = self.pin.header;
        let context = self.pin.header.digest_context();
        (!flags.digestless()).then(|| context.payload(self.bytes(), |_| ()) == root)
    }
}

/// Claim of this process on a record. It has exclusive access to the bytes until the claim is dropped.
#[derive(Debug)]
pub struct WriteClaim<'h> {
    pin: Pin<'h>,
    /// A [`PendingCommit`](crate::PendingCommit) continues the exclusion after the drop.
    continues_as_commit: bool,
}

impl WriteClaim<'_> {
    /// Copies the payload into the record, with its page digests, and returns the root for the commit. Drop the
    /// claim, then commit: the node does not publish a record that is still claimed.
    ///
    /// # Panics
    /// If the payload's length is not the granted one, or in a forked child, or if the record's bytes are in a
    /// device's memory.
    pub fn fill(&mut self, payload: &[u8]) -> u64 {
        self.fill_parts(&[payload], |_| ())
    }

    /// As [`WriteClaim::fill`], with a payload in several parts; passes the digest of each page to `each`.
    ///
    /// # Panics
    /// As [`WriteClaim::fill`].
    pub fn fill_parts(&mut self, payload: &[&[u8]], each: impl FnMut(u64)) -> u64 {
        assert!(self.pin.heap.is_mapped_here(), "claim used in a forked child; start the put again");
        debug_assert_eq!(self.pin.word.state(), State::Writing);
        assert!(self.pin.regions.has_bytes(), "record is in device memory; push it instead");
        // SAFETY: the pin was granted on WRITING, this process is the record's one writer, and this is its one
        // claim.
        unsafe { self.pin.regions.fill(&self.pin.header, payload, each) }
    }

    /// Returns the address of the payload in this process, for writing it by other means than [`WriteClaim::fill`]:
    /// valid for the record's `stripe_len` bytes, with exclusive access for this process, until the claim is dropped.
    /// Such a record has no digests. Returns `None` in a forked child, and if the bytes are in a device's memory.
    pub fn payload(&self) -> Option<NonNull<u8>> {
        let header = &self.pin.header;
        let span = Span::new(header.payload_offset, header.stripe_len)?;
        self.pin.regions.payload_at(span).filter(|_| self.pin.heap.is_mapped_here())
    }

    /// Returns the header as granted; it has the writer's tag in the place of the root until the commit.
    pub fn header(&self) -> &Header {
        &self.pin.header
    }
}

impl WriteClaim<'_> {
    /// Releases the pin but not the entry in `claimed`, which [`LocalHeap::release_claim`] removes: until then no
    /// thread of this process can pin the slot again, so that the commit finds no pin.
    pub(super) fn into_commit(mut self) -> SlotRef {
        self.continues_as_commit = true;
        SlotRef::new(self.pin.regions.shape.segment, self.pin.slot)
    }
}

impl Drop for WriteClaim<'_> {
    fn drop(&mut self) {
        if self.pin.heap.is_mapped_here() && !self.continues_as_commit {
            self.pin.heap.release_claim(SlotRef::new(self.pin.regions.shape.segment, self.pin.slot));
        }
    }
}
