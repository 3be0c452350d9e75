//! [`Segment`]: a segment as its owner uses it. Only this file changes words and headers.
//!
//! Each call takes the segment's lock, so that its bookkeeping (the map of used extents, the open writes, the dead
//! records) changes together with its words. Readers take no lock and never wait: they see the words.
//!
//! Invariants, while the lock is not held:
//! - an extent's units are claimed in the map ⇔ its slot is WRITING, READY or DEAD;
//! - every WRITING slot has an open write; every DEAD slot is in the list of dead records, or being processed by a
//!   reclaim;
//! - a slot is in the index ⇒ it is READY;
//! - a slot's fence, which is its entry in the epoch fences or else its word's epoch, never decreases, whatever
//!   versions come and go: a late begin always fails.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use moontide_types::limits::UNIT_BYTES;
use moontide_types::record::{Header, PageDigests, State, Word};
use moontide_types::{Epoch, Extent, Generation, MonoTime, NodeId, SegmentId, SlotId, Span, Term};

use crate::alloc::ExtentMap;
use crate::cell::{CloseOutcome, SlotRef, close_claims};
use crate::epoch_fence::EpochFences;
use crate::index::{IndexEntry, InsertOutcome};
use crate::shm::draft::RecordDraft;
use crate::shm::fill::{pages, pages_touched};
use crate::shm::grant::{
    BeginError, CommitError, FreedSlot, Grant, KillOutcome, PayloadWriter, ReclaimReport, StageError,
};
use crate::shm::index_region::IndexRegion;
use crate::shm::ledger::Ledgers;
use crate::shm::region::{HugePages, Region};
use crate::shm::segment::{SegmentDescriptor, SegmentError, SegmentMemory, SegmentRegions};
use crate::shm::trailer::Trailer;
use crate::shm::written::WrittenRanges;
use crate::word::Transition;

/// A segment as its owner uses it.
#[derive(Debug)]
pub struct Segment {
    pub(super) regions: SegmentRegions,
    bookkeeping: Mutex<SegmentBookkeeping>,
    /// Copy of [`SegmentBookkeeping::adopted_term`] for threads that serve reads without the lock. Written under the
    /// lock.
    adopted_term: AtomicU32,
    role: SegmentRole,
}

#[derive(Debug)]
struct SegmentBookkeeping {
    adopted_term: Term,
    used: ExtentMap,
    open_writes: HashMap<SlotId, OpenWrite>,
    /// By slot: a slot is killed only once before it is reused.
    dead: BTreeMap<SlotId, DeadRecord>,
    /// Fences of the slots that hold a copy of an older version.
    fences: EpochFences,
}

/// Writer of a WRITING record. A client's claim is a cell in its ledger; the node's own claims are recorded here as
/// well, so that no two of them cover the same bytes: a record may arrive in pieces, on several connections at once.
#[derive(Clone, Debug)]
struct OpenWrite {
    writer: PayloadWriter,
    kind: BeginKind,
    /// Ranges of the payload that threads of the node are filling.
    node_claims: Vec<Span>,
    /// Bytes of the payload that they have filled.
    written: WrittenRanges,
}

/// Kind of a begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BeginKind {
    /// A version above all that the slot has seen.
    New,
    /// A version that was complete before, on this node or another: see [`AtomicWord`](crate::AtomicWord).
    Copy,
}

/// Process that decides on the slots and extents of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SegmentRole {
    /// A master, by grants.
    Granted,
    /// The node itself, by [`Staging`](crate::Staging).
    Staging,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct DeadRecord {
    freed: FreedSlot,
    /// One-sided readers may hold a lease until this time.
    not_before: MonoTime,
}

impl Segment {
    /// Creates an empty segment with adopted term 0, which no master has, until [`Segment::adopt_term`].
    pub(super) fn create(
        shape: SegmentDescriptor,
        node: (NodeId, Generation),
        (huge, payload): (HugePages, SegmentMemory),
        role: SegmentRole,
    ) -> Result<Segment, SegmentError> {
        let bookkeeping = SegmentBookkeeping {
            adopted_term: Term::ZERO,
            used: ExtentMap::new(shape.units),
            open_writes: HashMap::new(),
            dead: BTreeMap::new(),
            fences: EpochFences::default(),
        };
        let adopted_term = AtomicU32::new(Term::ZERO.get());
        let regions = SegmentRegions::create(shape, node, huge, payload)?;
        Ok(Segment { regions, bookkeeping: Mutex::new(bookkeeping), adopted_term, role })
    }

    /// Returns whether the segment is the node's own, for [`Staging`](crate::Staging): masters do not grant in it and
    /// are not informed of it.
    pub fn is_staging(&self) -> bool {
        self.role == SegmentRole::Staging
    }

    /// Returns id, incarnation and size of the segment.
    pub fn shape(&self) -> SegmentDescriptor {
        self.regions.shape
    }

    /// Lets the kernel provide the memory of a range of the payload, as if it had been written. No byte changes. Does nothing
    /// if the payload is in device memory.
    pub fn populate(&self, at: u64, len: u64) -> std::io::Result<()> {
        self.regions.populate(at, len)
    }

    /// Returns the header region, to be sent to clients.
    pub fn headers(&self) -> &Region {
        &self.regions.headers
    }

    /// Returns the payload region, to be sent to clients.
    pub fn payload(&self) -> &Region {
        &self.regions.payload
    }

    /// Returns the units used by records in any state except FREE.
    pub fn taken_units(&self) -> u32 {
        self.bookkeeping().used.claimed_units()
    }

    /// Adopts `term` if it is newer; grants of any other term fail from now on. Returns the adopted term.
    pub fn adopt_term(&self, term: Term) -> Term {
        let mut bookkeeping = self.bookkeeping();
        bookkeeping.adopted_term = bookkeeping.adopted_term.max(term);
        // Relaxed: it only grows, and a thread that reads an older one refuses more than necessary.
        self.adopted_term.store(bookkeeping.adopted_term.get(), Ordering::Relaxed);
        bookkeeping.adopted_term
    }

    /// Returns the adopted term, or a slightly older one.
    pub fn adopted_term(&self) -> Term {
        Term::new(self.adopted_term.load(Ordering::Relaxed)).expect("a term was stored")
    }

    /// Calls `record` for every slot that is not FREE, with its header and trailer, for reports and for inspection.
    /// The root of a WRITING record is not valid yet. `record` runs under the segment's lock and must not call the
    /// heap.
    pub fn for_each_record(&self, mut record: impl FnMut(SlotId, &Header, Option<Trailer<'_>>)) {
        let _lock = self.bookkeeping();
        let mut scratch = Vec::new();
        for slot in (0..self.regions.shape.slots).map(SlotId) {
            let word = self.regions.word(slot).expect("in range").load();
            if word.state() == State::Free {
                continue;
            }
            // SAFETY: this is the owner, with the lock.
            let header = unsafe { self.regions.header(slot, word) }.expect("only the owner writes headers");
            let trailer = self.regions.trailer(&header, &mut scratch);
            record(slot, &header, trailer);
        }
    }

    fn bookkeeping(&self) -> MutexGuard<'_, SegmentBookkeeping> {
        assert!(
            self.regions.headers.is_mapped_here(),
            "segment used in a forked child, which has no mapping"
        );
        self.bookkeeping.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// FREE → WRITING, for a new version or, as a copy, for an older one.
    pub(super) fn begin(
        &self,
        grant: &Grant<'_>,
        kind: BeginKind,
        ledgers: &Ledgers,
    ) -> Result<(), BeginError> {
        let Grant { slot, epoch, record, .. } = *grant;
        let slots = self.regions.shape.slots;
        let word = self.regions.word(slot).ok_or(BeginError::Slot { slot, slots })?;
        if self.is_staging() {
            return Err(BeginError::Staging(self.regions.shape.segment));
        }
        if let (BeginKind::Copy, PayloadWriter::Client(client)) = (kind, grant.writer) {
            return Err(BeginError::Copy(client));
        }
        // The host would have to fill and digest a record with digests.
        if !self.regions.has_bytes() && (grant.writer == PayloadWriter::Node || !record.flags.digestless()) {
            return Err(BeginError::Device(self.regions.shape.segment));
        }
        let mut bookkeeping = self.bookkeeping();
        // Under the lock: `client_exited` forgets the ledger first and searches the client's records, under this
        // lock, after that. So it finds this record, or the begin fails here.
        if let PayloadWriter::Client(client) = grant.writer
            && ledgers.get(client).is_none()
        {
            return Err(BeginError::Client(client));
        }
        let epoch_matches_term = match kind {
            BeginKind::New => epoch.term() == grant.term,
            // An earlier master assigned the version, or this one; no version has a later term.
            BeginKind::Copy => epoch.term() <= grant.term,
        };
        let older =
            grant.term < bookkeeping.adopted_term && moontide_rt::mutation_enabled("begin-of-an-older-term");
        if grant.term != bookkeeping.adopted_term && !older || !epoch_matches_term {
            return Err(BeginError::Term {
                named: grant.term,
                epoch: epoch.term(),
                adopted: bookkeeping.adopted_term,
            });
        }
        let found = word.load();
        let repeats = found == Word::new(epoch, State::Writing)
            && bookkeeping.open_writes.get(&slot).is_some_and(|w| (w.writer, w.kind) == (grant.writer, kind));
        let usable = match kind {
            BeginKind::New => found.epoch() < epoch,
            // The slot's last version is allowed, too: commands about it were sent, and arrive, before this begin.
            BeginKind::Copy => found.epoch() != Epoch::MAX && epoch != Epoch::ZERO,
        };
        if !repeats && (found.state() != State::Free || !usable) {
            return Err(BeginError::Word { found, named: epoch });
        }
        let payload_offset = grant.extent.span().offset();
        let writing = Word::new(epoch, State::Writing);
        let draft = RecordDraft::new(&record, writing, payload_offset, grant.writer.tag())?;
        draft.check(grant.extent)?;
        let header = draft.header;
        if repeats {
            // The response to the first attempt was lost, unless that was for another record.
            // SAFETY: this is the owner, with the lock.
            let begun = unsafe { self.regions.header(slot, found) };
            return if begun == Ok(header) { Ok(()) } else { Err(BeginError::Word { found, named: epoch }) };
        }
        bookkeeping.used.try_claim(grant.extent)?;
        // SAFETY: this is the owner, with the lock; the slot is FREE, so no other process can read its header.
        unsafe { self.regions.write_header(slot, &header) };
        // SAFETY: the extent overlaps no other (the map has checked it), and no other process has access to it yet.
        unsafe {
            draft.write_trailer(&self.regions);
            pages(&header).for_each(|page| self.regions.write_digest(&header, page, 0));
        }
        let begun = match kind {
            BeginKind::New => word.begin(epoch),
            BeginKind::Copy => bookkeeping.fences.begin_copy(slot, word, epoch),
        };
        assert!(matches!(begun, Transition::Done(_)), "word changed although the owner holds its lock");
        bookkeeping.open_writes.insert(
            slot,
            OpenWrite { writer: grant.writer, kind, node_claims: vec![], written: Default::default() },
        );
        Ok(())
    }

    /// FREE → WRITING → READY in one call, by the rule for copies, for a record in a staging segment whose payload is
    /// already written. `index`: the index region for a record that local readers are to find.
    ///
    /// # Safety
    /// The caller must have exclusive access to the record's extent.
    pub(super) unsafe fn stage(
        &self,
        slot: SlotId,
        draft: &RecordDraft,
        digests: &[u8],
        index: Option<&IndexRegion>,
    ) -> Result<(), StageError> {
        assert!(self.is_staging(), "only staging segments stage records");
        let word = self.regions.word(slot).expect("slot of a staging chunk");
        let (header, extent) = (&draft.header, draft.extent());
        let version = header.word.epoch();
        draft.check(extent)?;
        let (found, expected) = (digests.len() as u64, draft.layout.digests().len());
        if found != expected {
            return Err(StageError::Digests { found, expected });
        }
        if !header.flags.digestless() {
            let found = header.digest_context().root_of(PageDigests::new(digests).iter());
            if found != header.root {
                return Err(StageError::Root { found, named: header.root });
            }
        }
        let mut bookkeeping = self.bookkeeping();
        let found = word.load();
        if found.state() != State::Free || found.epoch() == Epoch::MAX || version == Epoch::ZERO {
            return Err(BeginError::Word { found, named: version }.into());
        }
        bookkeeping.used.try_claim(extent).map_err(BeginError::from)?;
        // SAFETY: this is the owner, with the lock; the slot is FREE, so no other process can read its header. The
        // caller has exclusive access to the extent.
        unsafe {
            self.regions.write_header(slot, header);
            draft.write_trailer(&self.regions);
            draft.write_digests(&self.regions, digests);
        }
        // This record was not granted to any writer, so no process claims it between the two transitions.
        let begun = bookkeeping.fences.begin_copy(slot, word, version);
        let published = word.publish(version);
        let done = matches!((begun, published), (Transition::Done(_), Transition::Done(_)));
        assert!(done, "word changed although the owner holds its lock");
        if let Some(index_region) = index {
            self.insert_into_index(slot, header, index_region);
        }
        Ok(())
    }

    /// Returns the header of the record that has, or had last, this version of the slot, in any state; its root is not valid
    /// while the record is WRITING. `None` if the slot has another version.
    pub(super) fn header_at(&self, slot: SlotId, epoch: Epoch) -> Option<Header> {
        let _lock = self.bookkeeping();
        let word = self.regions.word(slot)?.load();
        if word.epoch() != epoch {
            return None;
        }
        // SAFETY: this is the owner, with the lock. An error: the slot was fenced in this epoch and never begun.
        unsafe { self.regions.header(slot, word) }.ok()
    }

    pub(super) fn commit(
        &self,
        slot: SlotId,
        epoch: Epoch,
        root: u64,
        writer: PayloadWriter,
        index_region: &IndexRegion,
        ledgers: &Ledgers,
    ) -> Result<(), CommitError> {
        let segment = self.regions.shape.segment;
        let word = self.regions.word(slot).ok_or(CommitError::Slot { segment, slot })?;
        let mut bookkeeping = self.bookkeeping();
        let found = word.load();
        if found == Word::new(epoch, State::Ready) {
            return self.published_as(slot, found, root);
        }
        if found != Word::new(epoch, State::Writing) {
            return Err(CommitError::Word { found, named: epoch });
        }
        let open =
            bookkeeping.open_writes.get(&slot).filter(|w| w.writer == writer).ok_or(CommitError::Writer)?;
        let ledger = match writer {
            PayloadWriter::Client(client) => Some(ledgers.get(client).ok_or(CommitError::Writer)?),
            PayloadWriter::Node if !open.node_claims.is_empty() => return Err(CommitError::Claimed),
            PayloadWriter::Node => {
                // SAFETY: this is the owner, with the lock.
                let header = unsafe { self.regions.header(slot, found) }.expect("written by begin");
                // Before the root, whose comparison would tell what the unwritten bytes are.
                if !open.written.is_complete(header.stripe_len) {
                    return Err(CommitError::Incomplete);
                }
                None
            }
        };
        let cells = || ledger.iter().flat_map(|ledger| ledger.cells_in_use());
        match close_claims(word, epoch, SlotRef::new(segment, slot), cells) {
            CloseOutcome::Closed => {}
            CloseOutcome::Claimed => return Err(CommitError::Claimed),
            CloseOutcome::Refused(found) => return Err(CommitError::Word { found, named: epoch }),
        }
        // SAFETY: this is the owner, with the lock.
        let mut header = unsafe { self.regions.header(slot, found) }.expect("written by begin");
        if !header.flags.digestless() {
            // SAFETY: the word is closed: no writer and no reader has access, or can get it.
            let digests = unsafe { self.regions.digests(&header) };
            let found = header.digest_context().root_of(digests.iter());
            if found != root {
                let reopened = word.reopen(epoch);
                assert!(
                    matches!(reopened, Transition::Done(_)),
                    "word changed although the owner holds its lock"
                );
                return Err(CommitError::Root { found, named: root });
            }
        }
        header.root = root;
        self.publish_closed(&mut bookkeeping, slot, &header, index_region);
        Ok(())
    }

    /// Last step of a commit: DEAD, to which the word was closed, → READY.
    fn publish_closed(
        &self,
        bookkeeping: &mut SegmentBookkeeping,
        slot: SlotId,
        header: &Header,
        index_region: &IndexRegion,
    ) {
        // SAFETY: this is the owner, with the lock; no writer and no reader has access, or can get it.
        unsafe { self.regions.write_header(slot, header) };
        let word = self.regions.word(slot).expect("the word was closed");
        let published = word.publish_closed(header.word.epoch());
        assert!(matches!(published, Transition::Done(_)), "word changed although the owner holds its lock");
        bookkeeping.open_writes.remove(&slot);
        self.insert_into_index(slot, header, index_region);
    }

    /// Inserts a READY record into the index. Another record of the same object may be in it, of this version or
    /// another: each has its own entry, and its kill removes only that one.
    fn insert_into_index(&self, slot: SlotId, header: &Header, index_region: &IndexRegion) {
        let segment = self.regions.shape.segment;
        // A single stripe is useless to a local reader.
        if header.stripe_count == 1
            && index_region.index().insert(&header.id, IndexEntry { segment, slot })
                == InsertOutcome::Overflow
        {
            index_region.count_overflow();
        }
    }

    /// WRITING → READY for a record that the node writes. Its whole payload is written, and the caller has claimed and
    /// digested it: no other claim covers a byte of it, and none is granted before it is READY. `header` is the
    /// record's, with its root.
    pub(super) fn publish_claimed(
        &self,
        slot: SlotId,
        header: &Header,
        index_region: &IndexRegion,
    ) -> Result<(), CommitError> {
        let word = self.regions.word(slot).expect("the slot is claimed");
        let mut bookkeeping = self.bookkeeping();
        // A client that claims this record by mistake reads its header before the claim fails; from here on no client
        // can.
        match word.close(header.word.epoch()) {
            Transition::Done(_) => {}
            // The record was killed.
            _ => return Err(CommitError::Word { found: word.load(), named: header.word.epoch() }),
        }
        self.publish_closed(&mut bookkeeping, slot, header, index_region);
        Ok(())
    }

    /// Returns why a whole record could not be claimed for publishing, or `Ok` if it is published already.
    pub(super) fn check_unclaimed(&self, slot: SlotId, epoch: Epoch, root: u64) -> Result<(), CommitError> {
        let segment = self.regions.shape.segment;
        let word = self.regions.word(slot).ok_or(CommitError::Slot { segment, slot })?;
        let bookkeeping = self.bookkeeping();
        let found = word.load();
        if found == Word::new(epoch, State::Ready) {
            return self.published_as(slot, found, root);
        }
        if found != Word::new(epoch, State::Writing) {
            return Err(CommitError::Word { found, named: epoch });
        }
        let by_node =
            bookkeeping.open_writes.get(&slot).is_some_and(|open| open.writer == PayloadWriter::Node);
        // The conflicting claim may have ended just now: then the next attempt succeeds.
        Err(if by_node { CommitError::Claimed } else { CommitError::Writer })
    }

    /// Checks that a READY record has the root that the caller passed: the response to the first
    /// attempt was lost, unless that was for other bytes. The caller holds the lock.
    fn published_as(&self, slot: SlotId, word: Word, root: u64) -> Result<(), CommitError> {
        // SAFETY: this is the owner, with the lock.
        let found = unsafe { self.regions.header(slot, word) }.expect("only the owner writes headers").root;
        if found == root { Ok(()) } else { Err(CommitError::Root { found, named: root }) }
    }

    /// Records that a thread of the node fills a range of a record's payload, which no other thread does, and returns
    /// the record's header, the range, and whether the whole payload was written before. Returns `None` if the node does
    /// not write this record, or if a claim overlaps the range. The caller has pinned the slot in a cell, which was
    /// granted on `word`.
    pub(super) fn add_node_claim(
        &self,
        slot: SlotId,
        word: Word,
        range_of: impl FnOnce(&Header) -> Option<Span>,
    ) -> Option<(Header, Span, bool)> {
        // Under the lock the header does not change: a commit, which changes it, removes the open write first.
        let mut bookkeeping = self.bookkeeping();
        let open = bookkeeping.open_writes.get_mut(&slot).filter(|w| w.writer == PayloadWriter::Node)?;
        // SAFETY: this is the owner, with the lock.
        let header = unsafe { self.regions.header(slot, word) }.expect("only the owner writes headers");
        let range = range_of(&header)?;
        if open.node_claims.iter().any(|other| other.overlaps(range)) {
            return None;
        }
        open.node_claims.push(range);
        Some((header, range, open.written.is_complete(header.stripe_len)))
    }

    /// Clears the digests of the pages that overlap `range`, whose bytes are about to change.
    pub(super) fn clear_digests(&self, header: &Header, range: Span) {
        // Under the lock: two claims may share a page, and both clear its digest.
        let _lock = self.bookkeeping();
        // SAFETY: the digest of a page is written here, or by the one claim that covers the whole page, or by begin.
        pages_touched(range).for_each(|page| unsafe { self.regions.write_digest(header, page, 0) });
    }

    /// Ends a claim of the node, which has written its range or not. If the record was killed in the meantime there is
    /// nothing to remove; its slot is not reused while it is pinned in the node's own cell, so the entry of no other
    /// record is affected.
    pub(super) fn end_node_claim(&self, slot: SlotId, header: &Header, range: Span, is_written: bool) {
        if let Some(open) = self.bookkeeping().open_writes.get_mut(&slot) {
            open.node_claims.retain(|claim| *claim != range);
            if is_written {
                open.written.add(range, header.stripe_len);
            }
        }
    }

    pub(super) fn kill(
        &self,
        slot: SlotId,
        epoch: Epoch,
        not_before: MonoTime,
        index_region: &IndexRegion,
    ) -> KillOutcome {
        let Some(word) = self.regions.word(slot) else { return KillOutcome::NotFound };
        let mut bookkeeping = self.bookkeeping();
        let old = match word.kill(epoch) {
            Transition::Done(old) => old,
            Transition::Already => {
                // The first kill refused new readers and waits for a lease; this one may know that the lease is over.
                if let Some(dead) = bookkeeping.dead.get_mut(&slot) {
                    dead.not_before = dead.not_before.min(not_before);
                }
                return KillOutcome::AlreadyDead;
            }
            Transition::Refused(now) if now == Word::new(epoch, State::Free) => {
                return KillOutcome::AlreadyDead;
            }
            Transition::Refused(_) => return KillOutcome::NotFound,
        };
        bookkeeping.open_writes.remove(&slot);
        // SAFETY: this is the owner, with the lock.
        let header = unsafe { self.regions.header(slot, old) }.expect("only the owner writes headers");
        let units = header.layout().expect("checked when decoded").units();
        let start = (header.payload_offset / UNIT_BYTES) as u32;
        let segment = self.regions.shape.segment;
        if old.state() == State::Ready {
            index_region.index().remove(&header.id, IndexEntry { segment, slot });
        }
        let freed = FreedSlot { segment, slot, epoch, extent: Extent { start, units } };
        bookkeeping.dead.insert(slot, DeadRecord { freed, not_before });
        KillOutcome::Killed
    }

    pub(super) fn fence_epoch(&self, slot: SlotId, epoch: Epoch) -> Transition {
        let mut bookkeeping = self.bookkeeping();
        match self.regions.word(slot) {
            // Staging slots are never granted, so no begin can be late.
            Some(word) if self.is_staging() => Transition::Refused(word.load()),
            Some(word) => bookkeeping.fences.fence_epoch(slot, word, epoch),
            None => Transition::Refused(Word::default()),
        }
    }

    /// Removes the dead records that are due from the list, and returns them with the number of the others.
    pub(super) fn take_dead(&self, now: MonoTime) -> (Vec<DeadRecord>, usize) {
        let mut bookkeeping = self.bookkeeping();
        let due =
            bookkeeping.dead.extract_if(.., |_, dead| dead.not_before <= now).map(|(_, dead)| dead).collect();
        (due, bookkeeping.dead.len())
    }

    /// Frees the records for which `pinned` is false, and puts the others back.
    pub(super) fn free_unpinned(
        &self,
        due: Vec<DeadRecord>,
        pinned: impl Fn(SegmentId, SlotId) -> bool,
        out: &mut ReclaimReport,
    ) {
        let mut bookkeeping = self.bookkeeping();
        for dead in due {
            let FreedSlot { segment, slot, epoch, extent } = dead.freed;
            if pinned(segment, slot) {
                bookkeeping.dead.insert(slot, dead);
                out.draining += 1;
                continue;
            }
            let word = self.regions.word(slot).expect("the slot was killed here");
            let freed = bookkeeping.fences.free(slot, word, epoch);
            assert!(matches!(freed, Transition::Done(_)), "slot is not DEAD: {freed:?}");
            bookkeeping.used.release(extent);
            out.freed.push(dead.freed);
        }
    }

    pub(super) fn slots_written_by(&self, writer: PayloadWriter) -> Vec<(SlotId, Epoch)> {
        let bookkeeping = self.bookkeeping();
        let written = bookkeeping.open_writes.iter().filter(|(_, open)| open.writer == writer);
        let epoch_of = |slot| self.regions.word(slot).expect("slot with an open write").load().epoch();
        written.map(|(&slot, _)| (slot, epoch_of(slot))).collect()
    }
}
