//! [`LocalHeap`]: a client's side. Reads on the same host, in place, without a call and without a copy.
//!
//! A get is: look into the index, name the slot in the own ledger, look at the word, check the header, use
//! the bytes. Nothing is written that another thread reads or writes, but for the own cell, which the node
//! looks at when it reclaims.
//!
//! ```text
//!   LocalHeap ── reader() ──▶ Reader (one per thread, owns a group of cells)
//!                               ├─ get(id) ──────────▶ Guard       READY bytes, until dropped
//!                               └─ claim(slot, epoch) ▶ WriteClaim  bytes to fill, until dropped
//! ```

use std::collections::HashSet;
use std::ptr::NonNull;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use moontide_types::record::{Header, PageDigests, State, Word};
use moontide_types::{ClientId, Epoch, Generation, MonoTime, ObjectId, SegmentId, SlotId, Span};

use crate::cell::{CELLS_PER_GROUP, Cell, Expect, SlotName};
use crate::index::Place;
use crate::shm::board::{BoardError, BoardView};
use crate::shm::grant::Writer;
use crate::shm::ledger::{GROUPS_KEPT_MAX, GROUPS_PER_LEDGER, LedgerError, OwnLedger};
use crate::shm::reads::ReadCounts;
use crate::shm::region::Region;
use crate::shm::segment::{Medium, SegmentError, SegmentRegions, SegmentShape};
use crate::sync::{AtomicU64, Ordering};

/// Segments of one node that a client can map: 4 TiB in segments of 1 GiB.
pub const SEGMENTS_MAPPED_MAX: usize = 4096;

/// Groups that one reader may take: 512 guards at once.
const GROUPS_PER_READER: usize = 32;

/// Why a client cannot use a node's memory.
#[derive(Debug, thiserror::Error)]
pub enum AttachError {
    /// The board is not one.
    #[error(transparent)]
    Board(#[from] BoardError),
    /// The ledger is not one.
    #[error(transparent)]
    Ledger(#[from] LedgerError),
    /// The segment is not one.
    #[error(transparent)]
    Segment(#[from] SegmentError),
    /// More segments than a client can map.
    #[error("segment {0}: a client maps at most {SEGMENTS_MAPPED_MAX}")]
    TooMany(SegmentId),
}

/// A node's memory as one of its clients sees it.
#[derive(Debug)]
pub struct LocalHeap {
    client: ClientId,
    board: BoardView,
    ledger: OwnLedger,
    segments: Box<[OnceLock<SegmentRegions>]>,
    /// Per group of the ledger: how long the object is that each cell names, or named last. Process-private.
    lengths: Box<[Lengths]>,
    pinned_bytes_max: u64,
    /// Slots that a thread of this process is filling: one claim a slot. Process-private.
    claimed: Mutex<HashSet<SlotName>>,
}

/// Written by the group's one thread, read by it and by whoever has the group next.
#[derive(Debug, Default)]
#[repr(align(128))]
struct Lengths([AtomicU64; CELLS_PER_GROUP]);

impl LocalHeap {
    /// Puts the imported parts together. [`join`](crate::join) does this over the node's socket.
    ///
    /// A node that has not shown a sign of life for `stale_after` is not believed. A reader that has
    /// `pinned_bytes_max` under guards is told to copy. The limit is per reader: a sum over all threads would be a
    /// cache line that all of them write.
    ///
    /// # Safety
    /// The regions are shared with other processes, and Rust's guarantees about the bytes under a [`Guard`]
    /// rest on these keeping to the protocol: nobody writes payload but the one writer of a record in state
    /// WRITING, under a claim. The node and all its clients are trusted to do so.
    pub unsafe fn new(
        client: ClientId,
        board: Region,
        ledger: Region,
        stale_after: Duration,
        pinned_bytes_max: u64,
    ) -> Result<LocalHeap, AttachError> {
        let board = BoardView::new(board, stale_after)?;
        let ledger = OwnLedger::import(ledger)?;
        let segments = std::iter::repeat_with(OnceLock::new).take(SEGMENTS_MAPPED_MAX).collect();
        let lengths = std::iter::repeat_with(Lengths::default).take(ledger.groups() as usize).collect();
        let claimed = Mutex::default();
        Ok(LocalHeap { client, board, ledger, segments, lengths, pinned_bytes_max, claimed })
    }

    /// Adds a segment. A second offer of the same one is ignored.
    pub fn attach(&self, shape: SegmentShape, headers: Region, payload: Region) -> Result<(), AttachError> {
        let place = self.segments.get(shape.segment.0 as usize).ok_or(AttachError::TooMany(shape.segment))?;
        let regions = SegmentRegions::import(shape, self.board.node(), headers, payload)?;
        let _ = place.set(regions);
        Ok(())
    }

    /// This client's number at the node.
    pub fn client(&self) -> ClientId {
        self.client
    }

    /// The node's board.
    pub fn board(&self) -> &BoardView {
        &self.board
    }

    /// The incarnation of a segment that is mapped.
    pub fn generation(&self, segment: SegmentId) -> Option<Generation> {
        self.segment(segment).map(|regions| regions.shape.generation)
    }

    /// Where the bytes of a segment's records are, if it is mapped.
    pub fn medium(&self, segment: SegmentId) -> Option<Medium> {
        self.segment(segment).map(|regions| regions.shape.medium)
    }

    /// Where a segment's header region lies in this process, and its length: for who shows it to a device. It stays mapped
    /// while this lives, read-only.
    pub fn headers(&self, segment: SegmentId) -> Option<(NonNull<u8>, u64)> {
        let headers = &self.segment(segment)?.headers;
        headers.is_here().then(|| (headers.base(), headers.len()))
    }

    /// Where a slot's word lies in this process, for who reads it by an atomic load, as long as this lives.
    pub fn word_at(&self, segment: SegmentId, slot: SlotId) -> Option<NonNull<u64>> {
        let regions = self.segment(segment).filter(|_| self.is_here())?;
        regions.word(slot).map(|_| regions.word_at(slot))
    }

    /// A reader for one thread, for a moment; `None` if too many threads have one, or in a forked child.
    pub fn reader(&self) -> Option<Reader<'_>> {
        self.reader_among(GROUPS_PER_LEDGER as usize)
    }

    /// A reader that a thread keeps. `None` earlier than [`LocalHeap::reader`]: some room is left for those who need one
    /// for a moment only.
    pub fn lasting_reader(&self) -> Option<Reader<'_>> {
        self.reader_among(GROUPS_KEPT_MAX)
    }

    fn reader_among(&self, groups: usize) -> Option<Reader<'_>> {
        if !self.is_here() {
            return None;
        }
        let group = self.ledger.take_group(groups)?;
        Some(Reader { heap: self, groups: vec![group], counts: self.ledger.counts(group), allowance: 0 })
    }

    /// Whether the mappings are there: not in a child that was forked after they were made.
    #[inline]
    fn is_here(&self) -> bool {
        self.ledger.is_here()
    }

    /// No thread of this process writes it any more.
    pub(super) fn forget_claim(&self, name: SlotName) {
        self.claimed().remove(&name);
    }

    fn claimed(&self) -> MutexGuard<'_, HashSet<SlotName>> {
        self.claimed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    #[inline]
    fn segment(&self, segment: SegmentId) -> Option<&SegmentRegions> {
        self.segments.get(segment.0 as usize)?.get()
    }
}

/// What a local get found.
#[derive(Debug)]
pub enum Lookup<'h> {
    /// The object, in place.
    Hit(Guard<'h>),
    /// It is not here, or not complete; ask the master.
    Miss,
    /// With this object the reader would hold more guards or bytes than it may (one above `pinned_bytes_max` never
    /// fits): get a copy instead, or drop some.
    Full,
    /// The node is silent or has closed its index: ask the master.
    Closed,
}

/// One thread's way to read.
#[derive(Debug)]
pub struct Reader<'h> {
    heap: &'h LocalHeap,
    groups: Vec<u32>,
    /// Those of its first group: they are its own for as long as it has the group.
    counts: &'h ReadCounts,
    /// Bytes that may certainly be pinned before the guards that are left have to be counted again. Counting
    /// them costs a look at all cells; keeping an exact sum would cost every guard two atomic additions.
    allowance: u64,
}

/// A cell that names nothing, and where it is.
#[derive(Clone, Copy)]
struct Vacancy<'h> {
    cell: &'h Cell,
    group: u32,
    place: usize,
}

impl<'h> Reader<'h> {
    /// Looks for an object, and counts it in the ledger: see [`Ledgers::reads`](crate::Ledgers::reads). `now` is [`Clock::now`](moontide_types::Clock::now) or a coarser reading of the same
    /// clock; it is only compared with the node's beat.
    #[inline]
    pub fn get(&mut self, id: &ObjectId, now: MonoTime) -> Lookup<'h> {
        let heap = self.heap;
        if !heap.board.is_usable(now) {
            return Lookup::Closed;
        }
        let Some(vacancy) = self.vacant() else { return Lookup::Full };
        let found = heap.board.index().find(id, |place| {
            let guard = self.pin(place, vacancy.cell, Expect::Ready)?;
            // The entry was a hint. This is the proof; a guard that is dropped here releases the cell.
            (guard.pin.header.id == *id).then_some(guard)
        });
        match found {
            Some(guard) => {
                heap.ledger.touch(guard.pin.regions.number(guard.pin.slot));
                let admitted = self.admit(guard, vacancy);
                if let Lookup::Hit(guard) = &admitted {
                    self.counts.hit(guard.pin.header.stripe_len);
                }
                admitted
            }
            None => {
                self.counts.miss();
                Lookup::Miss
            }
        }
    }

    /// Pins the slot that the master named, in the version that the master named. Not counted: what is read on a
    /// master's word was counted by the master.
    pub fn get_at(&mut self, segment: SegmentId, slot: SlotId, epoch: Epoch, now: MonoTime) -> Lookup<'h> {
        if !self.heap.board.is_usable(now) {
            return Lookup::Closed;
        }
        let Some(vacancy) = self.vacant() else { return Lookup::Full };
        match self.pin(Place { segment, slot }, vacancy.cell, Expect::ReadyAt(epoch)) {
            Some(guard) => {
                self.heap.ledger.touch(guard.pin.regions.number(slot));
                self.admit(guard, vacancy)
            }
            None => Lookup::Miss,
        }
    }

    /// Claims a slot that this process was granted: the record stays its own to fill until the claim is
    /// dropped, even if the reservation ends meanwhile. `None`: it has ended already or was granted to another
    /// process, or another thread of this one has a claim on it, or no cell is vacant.
    pub fn claim(&mut self, segment: SegmentId, slot: SlotId, epoch: Epoch) -> Option<WriteClaim<'h>> {
        if !self.heap.is_here() {
            return None;
        }
        let vacancy = self.vacant()?;
        let Guard { pin } = self.pin(Place { segment, slot }, vacancy.cell, Expect::WritingAt(epoch))?;
        if pin.header.root != Writer::Client(self.heap.client).mark() {
            return None; // granted to another process
        }
        self.note_length(vacancy, pin.header.stripe_len);
        // A second claim ends here, and its pin with it.
        self.heap
            .claimed()
            .insert(SlotName::new(segment, slot))
            .then(|| WriteClaim { pin, is_to_be_committed: false })
    }

    /// Makes sure that a slot stays this version's, which is being written by another process or complete: its bytes are
    /// not used again before the result is dropped, whatever becomes of the record.
    pub fn stay(&mut self, segment: SegmentId, slot: SlotId, epoch: Epoch) -> Result<Stay<'h>, NoStay> {
        if !self.heap.is_here() {
            return Err(NoStay::Ended);
        }
        let name = SlotName::new(segment, slot);
        let regions = self.heap.segment(segment).ok_or(NoStay::Ended)?;
        let word = regions.word(slot).ok_or(NoStay::Ended)?;
        let vacancy = self.vacant().ok_or(NoStay::Full)?;
        let claimed = self.heap.claimed();
        if claimed.contains(&name) {
            return Err(NoStay::Own);
        }
        // The header is not looked at: it changes when the record becomes complete.
        vacancy.cell.acquire(name, word, Expect::BegunAt(epoch)).map_err(|_| NoStay::Ended)?;
        drop(claimed);
        self.note_length(vacancy, 0);
        Ok(Stay { heap: self.heap, cell: vacancy.cell, regions, slot, epoch })
    }

    /// A cell for kernels of this process, which name slots in it by themselves; nothing else uses it while the reader
    /// does nothing else.
    pub(super) fn cell_for_kernels(&mut self) -> Option<&'h Cell> {
        self.vacant().map(|vacancy| vacancy.cell)
    }

    /// A second guard for the same object, which may live longer than the first. `None`: the object is dying,
    /// or no cell is vacant, or the guard is of another heap, whose node does not look into this one's cells.
    pub fn clone_guard(&mut self, guard: &Guard<'h>) -> Option<Guard<'h>> {
        if !self.heap.is_here() || !std::ptr::eq(self.heap, guard.pin.heap) {
            return None;
        }
        let vacancy = self.vacant()?;
        let Pin { heap, regions, slot, word, header, .. } = guard.pin;
        if !vacancy.cell.acquire_again(guard.pin.cell, regions.word(slot)?, word) {
            return None;
        }
        let clone = Guard { pin: Pin { heap, cell: vacancy.cell, regions, slot, word, header } };
        match self.admit(clone, vacancy) {
            Lookup::Hit(clone) => Some(clone),
            _ => None,
        }
    }

    #[inline]
    fn pin(&self, place: Place, cell: &'h Cell, expect: Expect) -> Option<Guard<'h>> {
        let regions = self.heap.segment(place.segment)?;
        regions.prefetch(place.slot);
        self.heap.ledger.prefetch_touch(regions.number(place.slot));
        if !regions.has_bytes() && expect.is_for_reading() {
            return None; // what is in a device's memory is read by other means
        }
        let word = regions.word(place.slot)?;
        let seen = cell.acquire(SlotName::new(place.segment, place.slot), word, expect).ok()?;
        // SAFETY: the pin was granted on this word.
        let header = match unsafe { regions.header(place.slot, seen) } {
            Ok(header) if regions.record_span(&header).is_some() => header,
            _ => {
                cell.release();
                return None;
            }
        };
        Some(Guard { pin: Pin { heap: self.heap, cell, regions, slot: place.slot, word: seen, header } })
    }

    /// Lets a guard out if its bytes are within the limit.
    #[inline]
    fn admit(&mut self, guard: Guard<'h>, vacancy: Vacancy<'h>) -> Lookup<'h> {
        let len = guard.pin.header.stripe_len;
        self.note_length(vacancy, len);
        if len > self.allowance {
            // The guard's own cell is among those counted.
            match self.heap.pinned_bytes_max.checked_sub(self.pinned_bytes()) {
                Some(left) => self.allowance = left + len,
                None => return Lookup::Full,
            }
        }
        self.allowance -= len;
        Lookup::Hit(guard)
    }

    #[inline]
    fn note_length(&self, vacancy: Vacancy<'_>, len: u64) {
        // Relaxed: only this thread reads it, or one that got the group through `take_group`.
        self.heap.lengths[vacancy.group as usize].0[vacancy.place].store(len, Ordering::Relaxed);
    }

    #[inline]
    fn vacant(&mut self) -> Option<Vacancy<'h>> {
        let heap = self.heap;
        let in_group = |group| {
            let cells = heap.ledger.group(group);
            let cell = cells.vacant()?;
            Some(Vacancy { cell, group, place: cells.place_of(cell) })
        };
        if let Some(vacancy) = self.groups.iter().find_map(|&group| in_group(group)) {
            // A group that was needed once, and is empty now, is somebody else's again.
            if let [_, .., last] = self.groups[..]
                && vacancy.group != last
                && heap.ledger.group(last).in_use().next().is_none()
            {
                self.groups.pop();
                heap.ledger.give_group(last);
            }
            return Some(vacancy);
        }
        // A group may come full of guards that its last reader left behind: then the next one is taken.
        while self.groups.len() < GROUPS_PER_READER {
            let group = heap.ledger.take_group(GROUPS_KEPT_MAX)?;
            self.groups.push(group);
            if let Some(vacancy) = in_group(group) {
                return Some(vacancy);
            }
        }
        None
    }

    /// Bytes under the guards that this reader has handed out and that are left.
    pub fn pinned_bytes(&self) -> u64 {
        if !self.heap.is_here() {
            return 0;
        }
        let in_group = |&group: &u32| {
            let lengths = &self.heap.lengths[group as usize].0;
            self.heap
                .ledger
                .group(group)
                .in_use()
                .map(|place| lengths[place].load(Ordering::Relaxed))
                .sum::<u64>()
        };
        self.groups.iter().map(in_group).sum()
    }
}

impl Drop for Reader<'_> {
    fn drop(&mut self) {
        if self.heap.is_here() {
            // Guards may be left. Their cells are not vacant, and whoever takes the group next sees that.
            self.groups.iter().for_each(|&group| self.heap.ledger.give_group(group));
        }
    }
}

/// A slot named in a cell, with what was found there.
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
        if self.heap.is_here() {
            self.cell.release();
        }
    }
}

/// Why a slot cannot be made to stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum NoStay {
    /// It is not this version's: that has ended, or never begun.
    Ended,
    /// This process is writing the record, and its commit waits until nobody of this process names the slot.
    Own,
    /// The reader holds as much as it may: drop some.
    Full,
}

/// A slot that is not used again while this lives, although its record may still be on its way, or die. What lies in its
/// bytes is for a [`Flag`](crate::Flag) to say.
#[derive(Debug)]
pub struct Stay<'h> {
    heap: &'h LocalHeap,
    cell: &'h Cell,
    regions: &'h SegmentRegions,
    slot: SlotId,
    epoch: Epoch,
}

impl Stay<'_> {
    /// Bytes of the segment's payload, in this process; `None` if they reach beyond it. That they are this record's is
    /// the word of who told the place.
    pub fn payload(&self, span: Span) -> Option<NonNull<u8>> {
        self.regions.payload_at(span).filter(|_| self.heap.is_here())
    }

    /// What the node says of the record. DEAD also for a moment while a commit looks whether anybody still writes it;
    /// `None` if the slot is another version's, which it cannot be while this process lives.
    pub fn state(&self) -> Option<State> {
        if !self.heap.is_here() {
            return None;
        }
        let word = self.regions.word(self.slot).expect("a slot of this segment").load();
        (word.epoch() == self.epoch).then(|| word.state())
    }

    /// Which bytes of the segment are the record's, once it is complete.
    pub fn complete_span(&self) -> Option<Span> {
        (self.state()? == State::Ready).then_some(())?;
        // SAFETY: the slot is named, and was READY after that: its header stays as it is until the name is gone.
        let header = unsafe { self.regions.header(self.slot, Word::new(self.epoch, State::Ready)) }.ok()?;
        Span::new(header.payload_offset, header.stripe_len)
    }

    /// The version.
    pub fn epoch(&self) -> Epoch {
        self.epoch
    }
}

impl Drop for Stay<'_> {
    fn drop(&mut self) {
        if self.heap.is_here() {
            self.cell.release();
        }
    }
}

/// An object's bytes, in place. They stay as they are until the guard is dropped, whatever happens to the
/// object meanwhile.
#[derive(Debug)]
pub struct Guard<'h> {
    pin: Pin<'h>,
}

impl Guard<'_> {
    /// The payload.
    ///
    /// # Panics
    /// In a child that was forked after the guard was made: the memory is not there.
    #[inline]
    pub fn bytes(&self) -> &[u8] {
        assert!(self.pin.heap.is_here(), "a guard does not survive a fork: get the object again");
        let header = &self.pin.header;
        let span = Span::new(header.payload_offset, header.stripe_len).expect("checked by record_span");
        // SAFETY: the pin was granted on READY, so nobody writes these bytes until it is released.
        unsafe { self.pin.regions.bytes(span) }
    }

    /// The page digests, as the writer left them; none in a record without digests.
    ///
    /// # Panics
    /// As [`Guard::bytes`].
    pub fn digests(&self) -> PageDigests<'_> {
        assert!(self.pin.heap.is_here(), "a guard does not survive a fork: get the object again");
        // SAFETY: as for the payload: READY, and pinned.
        unsafe { self.pin.regions.digests(&self.pin.header) }
    }

    /// The record's header.
    pub fn header(&self) -> &Header {
        &self.pin.header
    }

    /// The object's version.
    pub fn version(&self) -> Epoch {
        self.pin.word.epoch()
    }

    /// Where the object is.
    pub fn place(&self) -> (SegmentId, SlotId) {
        (self.pin.regions.shape.segment, self.pin.slot)
    }

    /// Computes the digests and compares with the root; `None` for a record without digests.
    pub fn verify(&self) -> Option<bool> {
        let Header { flags, root, .. } = self.pin.header;
        let context = self.pin.header.digest_context();
        (!flags.digestless()).then(|| context.payload(self.bytes(), |_| ()) == root)
    }
}

/// A record that this process may fill. The bytes are its own until the claim is dropped.
#[derive(Debug)]
pub struct WriteClaim<'h> {
    pin: Pin<'h>,
    /// Its end is not the end of this process's writing.
    is_to_be_committed: bool,
}

impl WriteClaim<'_> {
    /// Copies the payload in, with its page digests; the root for the commit. Drop the claim, then commit: the
    /// node refuses to publish a record that is still claimed.
    ///
    /// # Panics
    /// If the payload has another length than was granted, or in a forked child, or if the record's bytes are in a device's
    /// memory.
    pub fn fill(&mut self, payload: &[u8]) -> u64 {
        self.fill_parts(&[payload], |_| ())
    }

    /// As [`WriteClaim::fill`], with a payload that lies in several places; `each` is told the digest of each page.
    ///
    /// # Panics
    /// As [`WriteClaim::fill`].
    pub fn fill_parts(&mut self, payload: &[&[u8]], each: impl FnMut(u64)) -> u64 {
        assert!(self.pin.heap.is_here(), "a claim does not survive a fork: start the put again");
        debug_assert_eq!(self.pin.word.state(), State::Writing);
        assert!(self.pin.regions.has_bytes(), "a device's memory is not filled by processors");
        // SAFETY: the pin was granted on WRITING, this process is the record's one writer, and this is its one
        // claim.
        unsafe { self.pin.regions.fill(&self.pin.header, payload, each) }
    }

    /// Where the payload is to go, in this process, for who writes it by other means than [`WriteClaim::fill`]: valid for
    /// the record's `stripe_len` bytes, and this process's alone, until the claim is dropped. Such a record has no
    /// digests. `None` in a forked child, and where the bytes are in a device's memory.
    pub fn payload(&self) -> Option<NonNull<u8>> {
        let header = &self.pin.header;
        let span = Span::new(header.payload_offset, header.stripe_len)?;
        self.pin.regions.payload_at(span).filter(|_| self.pin.heap.is_here())
    }

    /// The header as granted; in the place of its root stands the writer's number until the commit.
    pub fn header(&self) -> &Header {
        &self.pin.header
    }
}

impl WriteClaim<'_> {
    /// Lets go of the record, but not of its name, which [`LocalHeap::forget_claim`] ends: until then no thread of this process is
    /// let in to it, so that the commit finds nobody.
    pub(super) fn end_before_commit(mut self) -> SlotName {
        self.is_to_be_committed = true;
        SlotName::new(self.pin.regions.shape.segment, self.pin.slot)
    }
}

impl Drop for WriteClaim<'_> {
    fn drop(&mut self) {
        if self.pin.heap.is_here() && !self.is_to_be_committed {
            self.pin.heap.forget_claim(SlotName::new(self.pin.regions.shape.segment, self.pin.slot));
        }
    }
}
