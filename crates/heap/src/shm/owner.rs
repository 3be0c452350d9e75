//! [`Segment`]: one segment as its owner keeps it. Only what is in here changes words and headers.
//!
//! Each call takes the segment's lock, so that its books (the map of taken extents, who writes what, what is
//! dying) change together with its words. Readers take no lock and never wait: they see the words.
//!
//! Invariants, with the lock free:
//! - an extent's units are taken in the map ⇔ its slot is WRITING, READY or DEAD;
//! - every WRITING slot has a writer on record; every DEAD slot is in the list of dying ones, or in the hands
//!   of a reclaim;
//! - a slot is in the index ⇒ it is READY;
//! - a slot's fence, which is its floor or else its word's epoch, never falls, whatever versions come and go: a late begin
//!   stays refused.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use moontide_types::bounds::UNIT_BYTES;
use moontide_types::record::{Header, PageDigests, State, Word};
use moontide_types::{Epoch, Extent, Generation, MonoTime, NodeId, SegmentId, SlotId, Span, Term};

use crate::alloc::ExtentMap;
use crate::cell::{Shut, SlotName, shut_out_claims};
use crate::floor::Floors;
use crate::index::{Inserted, Place};
use crate::shm::board::Board;
use crate::shm::draft::Draft;
use crate::shm::fill::{pages, pages_touched};
use crate::shm::grant::{BeginError, CommitError, Freed, Grant, Killed, Reclaimed, StageError, Writer};
use crate::shm::ledger::Ledgers;
use crate::shm::region::{HugePages, Region};
use crate::shm::segment::{SegmentError, SegmentMemory, SegmentRegions, SegmentShape};
use crate::shm::trailer::Trailer;
use crate::word::Transition;

/// A segment as its owner sees it.
#[derive(Debug)]
pub struct Segment {
    pub(super) regions: SegmentRegions,
    books: Mutex<Books>,
    /// What [`Books::obeyed`] is, for those who serve reads and take no lock. Written under the lock.
    obeyed: AtomicU32,
    use_for: UseFor,
}

#[derive(Debug)]
struct Books {
    obeyed: Term,
    taken: ExtentMap,
    writing: HashMap<SlotId, Writing>,
    /// By slot: a slot dies once before it is used again.
    dying: BTreeMap<SlotId, Dying>,
    /// What fences a slot off that holds a copy of an older version.
    floors: Floors,
}

/// Who writes a record. A client's claim is a cell in its ledger; the node's own are noted here, too, so that no two
/// of them are about the same bytes: a record may arrive in pieces, on several connections at once.
#[derive(Clone, Debug)]
struct Writing {
    writer: Writer,
    kind: BeginKind,
    /// Ranges of the payload that threads of the node are filling.
    node_claims: Vec<Span>,
}

/// What is begun.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BeginKind {
    /// A version that is above all that the slot has seen.
    New,
    /// A version that was complete before, here or elsewhere: see [`AtomicWord`](crate::AtomicWord).
    Copy,
}

/// Who decides what goes where in a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UseFor {
    /// A master, by grants.
    Grants,
    /// The node itself, by [`Staging`](crate::Staging).
    Staging,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Dying {
    freed: Freed,
    /// One-sided readers may hold a lease until then.
    not_before: MonoTime,
}

impl Segment {
    /// An empty segment. It obeys term 0, which no master has, until [`Segment::obey`].
    pub(super) fn create(
        shape: SegmentShape,
        of: (NodeId, Generation),
        (huge, payload): (HugePages, SegmentMemory),
        use_for: UseFor,
    ) -> Result<Segment, SegmentError> {
        let books = Books {
            obeyed: Term::ZERO,
            taken: ExtentMap::new(shape.units),
            writing: HashMap::new(),
            dying: BTreeMap::new(),
            floors: Floors::default(),
        };
        let obeyed = AtomicU32::new(Term::ZERO.get());
        let regions = SegmentRegions::create(shape, of, huge, payload)?;
        Ok(Segment { regions, books: Mutex::new(books), obeyed, use_for })
    }

    /// Whether it is the node's own, for [`Staging`](crate::Staging): no master grants in it or is told of it.
    pub fn is_staging(&self) -> bool {
        self.use_for == UseFor::Staging
    }

    /// Number, size and incarnation.
    pub fn shape(&self) -> SegmentShape {
        self.regions.shape
    }

    /// The header region, to be passed to clients.
    pub fn headers(&self) -> &Region {
        &self.regions.headers
    }

    /// The payload region, to be passed to clients.
    pub fn payload(&self) -> &Region {
        &self.regions.payload
    }

    /// Units that are taken by records in any state but FREE.
    pub fn taken_units(&self) -> u32 {
        self.books().taken.claimed_units()
    }

    /// Obeys a newer term from now on; grants of any other are refused. Returns the term that is obeyed.
    pub fn obey(&self, term: Term) -> Term {
        let mut books = self.books();
        books.obeyed = books.obeyed.max(term);
        // Relaxed: it only grows, and whoever reads an older one refuses more than it would have to.
        self.obeyed.store(books.obeyed.get(), Ordering::Relaxed);
        books.obeyed
    }

    /// The term that is obeyed, or was a moment ago.
    pub fn obeyed(&self) -> Term {
        Term::new(self.obeyed.load(Ordering::Relaxed)).expect("a term was stored")
    }

    /// Every slot that is not FREE, with its header and what stands behind its payload, as the books are now. For
    /// reports and for inspection. The root of a WRITING record is not one yet. `record` runs under the segment's
    /// lock and must not call the heap.
    pub fn for_each_record(&self, mut record: impl FnMut(SlotId, &Header, Option<Trailer<'_>>)) {
        let _books = self.books();
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

    fn books(&self) -> MutexGuard<'_, Books> {
        assert!(self.regions.headers.is_here(), "a forked child has none of the node's memory");
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// FREE → WRITING, of a new version or, as a copy, of an older one.
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
        if let (BeginKind::Copy, Writer::Client(client)) = (kind, grant.writer) {
            return Err(BeginError::Copy(client));
        }
        // A record with digests would be filled, and digested, by a processor.
        if !self.regions.has_bytes() && (grant.writer == Writer::Node || !record.flags.digestless()) {
            return Err(BeginError::Device(self.regions.shape.segment));
        }
        let mut books = self.books();
        // Under the lock: `client_died` forgets the ledger first and looks for the client's records, under this
        // lock, after that. So it finds this record, or the record is refused here.
        if let Writer::Client(client) = grant.writer
            && ledgers.get(client).is_none()
        {
            return Err(BeginError::Client(client));
        }
        let of_its_time = match kind {
            BeginKind::New => epoch.term() == grant.term,
            // An earlier master gave the version, or this one; nobody has one of a later term.
            BeginKind::Copy => epoch.term() <= grant.term,
        };
        let older = grant.term < books.obeyed && moontide_types::planted("begin-of-an-older-term");
        if grant.term != books.obeyed && !older || !of_its_time {
            return Err(BeginError::Term { named: grant.term, epoch: epoch.term(), obeyed: books.obeyed });
        }
        let found = word.load();
        let repeats = found == Word::new(epoch, State::Writing)
            && books.writing.get(&slot).is_some_and(|w| (w.writer, w.kind) == (grant.writer, kind));
        let usable = match kind {
            BeginKind::New => found.epoch() < epoch,
            // Also the version that the slot had last: orders about that one were given, and arrive, before this one.
            BeginKind::Copy => found.epoch() != Epoch::MAX && epoch != Epoch::ZERO,
        };
        if !repeats && (found.state() != State::Free || !usable) {
            return Err(BeginError::Word { found, named: epoch });
        }
        let payload_offset = grant.extent.span().offset();
        let writing = Word::new(epoch, State::Writing);
        let draft = Draft::new(&record, writing, payload_offset, grant.writer.mark())?;
        draft.check(grant.extent)?;
        let header = draft.header;
        if repeats {
            // The answer to the first attempt was lost, unless it was about another record.
            // SAFETY: this is the owner, with the lock.
            let begun = unsafe { self.regions.header(slot, found) };
            return if begun == Ok(header) { Ok(()) } else { Err(BeginError::Word { found, named: epoch }) };
        }
        books.taken.try_claim(grant.extent)?;
        // SAFETY: this is the owner, with the lock; the slot is FREE, so nobody is let in to its header.
        unsafe { self.regions.write_header(slot, &header) };
        // SAFETY: the extent overlaps no other (the map said so), and nobody is let in to it yet.
        unsafe {
            draft.write_trailer(&self.regions);
            pages(&header).for_each(|page| self.regions.write_digest(&header, page, 0));
        }
        let begun = match kind {
            BeginKind::New => word.begin(epoch),
            BeginKind::Copy => books.floors.begin_copy(slot, word, epoch),
        };
        assert!(matches!(begun, Transition::Done(_)), "only the owner changes words, under its lock");
        books.writing.insert(slot, Writing { writer: grant.writer, kind, node_claims: Vec::new() });
        Ok(())
    }

    /// FREE → WRITING → READY in one go, by the rule for copies, for a record in a staging segment whose payload is there
    /// already. `index`: where local readers are to find it.
    ///
    /// # Safety
    /// The record's extent must be the caller's alone.
    pub(super) unsafe fn stage(
        &self,
        slot: SlotId,
        draft: &Draft,
        digests: &[u8],
        index: Option<&Board>,
    ) -> Result<(), StageError> {
        assert!(self.is_staging(), "what is granted in other segments is not staged there");
        let word = self.regions.word(slot).expect("a room's slot");
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
        let mut books = self.books();
        let found = word.load();
        if found.state() != State::Free || found.epoch() == Epoch::MAX || version == Epoch::ZERO {
            return Err(BeginError::Word { found, named: version }.into());
        }
        books.taken.try_claim(extent).map_err(BeginError::from)?;
        // SAFETY: this is the owner, with the lock; the slot is FREE, so nobody is let in to its header. Nor to the
        // extent, which is the caller's.
        unsafe {
            self.regions.write_header(slot, header);
            draft.write_trailer(&self.regions);
            draft.write_digests(&self.regions, digests);
        }
        // Nobody was granted this record to write, so nobody claims it between the two.
        let begun = books.floors.begin_copy(slot, word, version);
        let published = word.publish(version);
        let done = matches!((begun, published), (Transition::Done(_), Transition::Done(_)));
        assert!(done, "only the owner changes words, under its lock");
        if let Some(board) = index {
            self.show(slot, header, board);
        }
        Ok(())
    }

    pub(super) fn commit(
        &self,
        slot: SlotId,
        epoch: Epoch,
        root: u64,
        writer: Writer,
        board: &Board,
        ledgers: &Ledgers,
    ) -> Result<(), CommitError> {
        let segment = self.regions.shape.segment;
        let word = self.regions.word(slot).ok_or(CommitError::Slot { segment, slot })?;
        let mut books = self.books();
        let found = word.load();
        if found == Word::new(epoch, State::Ready) {
            return self.published_as(slot, found, root);
        }
        if found != Word::new(epoch, State::Writing) {
            return Err(CommitError::Word { found, named: epoch });
        }
        let writing = books.writing.get(&slot).filter(|w| w.writer == writer).ok_or(CommitError::Writer)?;
        let ledger = match writer {
            Writer::Client(client) => Some(ledgers.get(client).ok_or(CommitError::Writer)?),
            Writer::Node if !writing.node_claims.is_empty() => return Err(CommitError::Claimed),
            Writer::Node => None,
        };
        let cells = || ledger.iter().flat_map(|ledger| ledger.cells_in_use());
        match shut_out_claims(word, epoch, SlotName::new(segment, slot), cells) {
            Shut::Alone => {}
            Shut::Claimed => return Err(CommitError::Claimed),
            Shut::Refused(found) => return Err(CommitError::Word { found, named: epoch }),
        }
        // SAFETY: this is the owner, with the lock.
        let mut header = unsafe { self.regions.header(slot, found) }.expect("written by begin");
        if !header.flags.digestless() {
            // SAFETY: the word is shut: no writer and no reader is there, nor let in.
            let digests = unsafe { self.regions.digests(&header) };
            let found = header.digest_context().root_of(digests.iter());
            if found != root {
                let opened = word.open_again(epoch);
                assert!(
                    matches!(opened, Transition::Done(_)),
                    "only the owner changes words, under its lock"
                );
                return Err(CommitError::Root { found, named: root });
            }
        }
        header.root = root;
        self.let_readers_in(&mut books, slot, &header, board);
        Ok(())
    }

    /// The last step of a commit: DEAD, which the word was shut to, → READY.
    fn let_readers_in(&self, books: &mut Books, slot: SlotId, header: &Header, board: &Board) {
        // SAFETY: this is the owner, with the lock; no writer and no reader is there, nor let in.
        unsafe { self.regions.write_header(slot, header) };
        let published = self.regions.word(slot).expect("it was shut").publish_shut(header.word.epoch());
        assert!(matches!(published, Transition::Done(_)), "only the owner changes words, under its lock");
        books.writing.remove(&slot);
        self.show(slot, header, board);
    }

    /// Puts a READY record into the index. Another record of the same object may be there, of this version or another:
    /// each has its own entry, and takes only that one away when it dies.
    fn show(&self, slot: SlotId, header: &Header, board: &Board) {
        let segment = self.regions.shape.segment;
        // A stripe alone is of no use to a local reader.
        if header.stripe_count == 1
            && board.index().insert(&header.id, Place { segment, slot }) == Inserted::Overflow
        {
            board.count_overflow();
        }
    }

    /// WRITING → READY for a record that the node writes and of which the caller claims the whole payload, digested:
    /// no other claim has a byte of it, and none is granted before readers are let in. `header` is the record's, with
    /// its root.
    pub(super) fn publish_claimed(
        &self,
        slot: SlotId,
        header: &Header,
        board: &Board,
    ) -> Result<(), CommitError> {
        let word = self.regions.word(slot).expect("it is claimed");
        let mut books = self.books();
        // A client that asks for this record by mistake looks at its header before it is refused; none is let in to
        // do so from here on.
        match word.shut(header.word.epoch()) {
            Transition::Done(_) => {}
            // It was killed.
            _ => return Err(CommitError::Word { found: word.load(), named: header.word.epoch() }),
        }
        self.let_readers_in(&mut books, slot, header, board);
        Ok(())
    }

    /// Why the whole of a record could not be claimed to be published, or that it is published already.
    pub(super) fn unclaimed(&self, slot: SlotId, epoch: Epoch, root: u64) -> Result<(), CommitError> {
        let segment = self.regions.shape.segment;
        let word = self.regions.word(slot).ok_or(CommitError::Slot { segment, slot })?;
        let books = self.books();
        let found = word.load();
        if found == Word::new(epoch, State::Ready) {
            return self.published_as(slot, found, root);
        }
        if found != Word::new(epoch, State::Writing) {
            return Err(CommitError::Word { found, named: epoch });
        }
        let by_node = books.writing.get(&slot).is_some_and(|writing| writing.writer == Writer::Node);
        // Perhaps the claim that was in the way has ended just now: then the next attempt will do.
        Err(if by_node { CommitError::Claimed } else { CommitError::Writer })
    }

    /// Whether a READY record is the one that somebody says to have written: the answer to the first attempt was
    /// lost, unless it was about other bytes. The caller has the lock.
    fn published_as(&self, slot: SlotId, word: Word, root: u64) -> Result<(), CommitError> {
        // SAFETY: this is the owner, with the lock.
        let found = unsafe { self.regions.header(slot, word) }.expect("only the owner writes headers").root;
        if found == root { Ok(()) } else { Err(CommitError::Root { found, named: root }) }
    }

    /// Notes that a thread of the node fills a range of a record's payload, which no other thread does; the record's
    /// header, and the range. `None`: the node does not write this record, or somebody is at these bytes. The caller
    /// names the slot in a cell, which was granted on `word`.
    pub(super) fn note_node_claim(
        &self,
        slot: SlotId,
        word: Word,
        range_of: impl FnOnce(&Header) -> Option<Span>,
    ) -> Option<(Header, Span)> {
        // Under the lock the header stands still: a commit, which changes it, takes the record out of the books first.
        let mut books = self.books();
        let writing = books.writing.get_mut(&slot).filter(|w| w.writer == Writer::Node)?;
        // SAFETY: this is the owner, with the lock.
        let header = unsafe { self.regions.header(slot, word) }.expect("only the owner writes headers");
        let range = range_of(&header)?;
        if writing.node_claims.iter().any(|other| other.overlaps(range)) {
            return None;
        }
        writing.node_claims.push(range);
        Some((header, range))
    }

    /// The digests of the pages of which `range` is a part are not known any more: its bytes are about to change.
    pub(super) fn forget_digests(&self, header: &Header, range: Span) {
        // Under the lock: two claims may meet within a page, and both forget its digest.
        let _books = self.books();
        // SAFETY: the digest of a page is written here, or by the one claim that has the whole page, or by begin.
        pages_touched(range).for_each(|page| unsafe { self.regions.write_digest(header, page, 0) });
    }

    /// The node's claim has ended. If the record was killed meanwhile there is nothing to note; its slot is not
    /// used again while it is named in the node's own cell, so no other record's note is hit.
    pub(super) fn end_node_claim(&self, slot: SlotId, range: Span) {
        if let Some(writing) = self.books().writing.get_mut(&slot) {
            writing.node_claims.retain(|claim| *claim != range);
        }
    }

    pub(super) fn kill(&self, slot: SlotId, epoch: Epoch, not_before: MonoTime, board: &Board) -> Killed {
        let Some(word) = self.regions.word(slot) else { return Killed::NotThere };
        let mut books = self.books();
        let old = match word.kill(epoch) {
            Transition::Done(old) => old,
            Transition::Already => {
                // Killed so that nobody enters, with a lease to wait for; whoever kills again may know that it is over.
                if let Some(dying) = books.dying.get_mut(&slot) {
                    dying.not_before = dying.not_before.min(not_before);
                }
                return Killed::Already;
            }
            Transition::Refused(now) if now == Word::new(epoch, State::Free) => return Killed::Already,
            Transition::Refused(_) => return Killed::NotThere,
        };
        books.writing.remove(&slot);
        // SAFETY: this is the owner, with the lock.
        let header = unsafe { self.regions.header(slot, old) }.expect("only the owner writes headers");
        let units = header.layout().expect("checked when decoded").units();
        let start = (header.payload_offset / UNIT_BYTES) as u32;
        let segment = self.regions.shape.segment;
        if old.state() == State::Ready {
            board.index().remove(&header.id, Place { segment, slot });
        }
        let freed = Freed { segment, slot, epoch, extent: Extent { start, units } };
        books.dying.insert(slot, Dying { freed, not_before });
        Killed::Dying
    }

    pub(super) fn burn(&self, slot: SlotId, epoch: Epoch) -> Transition {
        let mut books = self.books();
        match self.regions.word(slot) {
            // Nothing was granted in there that could begin late.
            Some(word) if self.is_staging() => Transition::Refused(word.load()),
            Some(word) => books.floors.burn(slot, word, epoch),
            None => Transition::Refused(Word::default()),
        }
    }

    /// Takes the dying records whose time has come out of the list. They are DEAD.
    pub(super) fn take_dying(&self, now: MonoTime) -> (Vec<Dying>, usize) {
        let mut books = self.books();
        let due =
            books.dying.extract_if(.., |_, dying| dying.not_before <= now).map(|(_, dying)| dying).collect();
        (due, books.dying.len())
    }

    /// Frees those that `pinned` does not name, and puts the others back.
    pub(super) fn free_unpinned(
        &self,
        due: Vec<Dying>,
        pinned: impl Fn(SegmentId, SlotId) -> bool,
        out: &mut Reclaimed,
    ) {
        let mut books = self.books();
        for dying in due {
            let Freed { segment, slot, epoch, extent } = dying.freed;
            if pinned(segment, slot) {
                books.dying.insert(slot, dying);
                out.draining += 1;
                continue;
            }
            let word = self.regions.word(slot).expect("it was killed here");
            let freed = books.floors.free(slot, word, epoch);
            assert!(matches!(freed, Transition::Done(_)), "DEAD until freed here: {freed:?}");
            books.taken.release(extent);
            out.freed.push(dying.freed);
        }
    }

    pub(super) fn slots_written_by(&self, writer: Writer) -> Vec<(SlotId, Epoch)> {
        let books = self.books();
        let mine = books.writing.iter().filter(|(_, w)| w.writer == writer);
        mine.map(|(&slot, _)| (slot, self.regions.word(slot).expect("in the books").load().epoch())).collect()
    }
}
