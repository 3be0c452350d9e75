//! [`NodeHeap`]: the owner's side of everything. Only what is in here changes words, headers and the index.
//!
//! Each call takes the lock of one segment, so that a segment's book-keeping (the map of taken extents, who
//! writes what, what is dying) changes together with its words. Readers take no lock and never wait: they see
//! the words.
//!
//! Invariants per segment, with its lock free:
//! - an extent's units are taken in the map ⇔ its slot is WRITING, READY or DEAD;
//! - every WRITING slot has a writer on record; every DEAD slot is in the list of dying ones;
//! - a slot is in the index ⇒ it is READY.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};

use moontide_types::bounds::UNIT_BYTES;
use moontide_types::record::{
    Attributes, DigestContext, Flags, Header, HeaderError, KeySection, LayoutError, PageDigests,
    RecordLayout, State, TrailerError, Word, trailer_crc,
};
use moontide_types::{
    ClientId, Clock, Epoch, ErrorCode, Extent, Generation, MonoTime, NodeId, ObjectId, SegmentId, SlotId,
    Span, SystemClock, TenantGeneration, Term,
};

use crate::alloc::{ClaimError, ExtentMap};
use crate::cell::{Cell, Expect, SlotName};
use crate::index::{Inserted, Place};
use crate::shm::board::{Board, BoardError};
use crate::shm::ledger::{ClientLedger, LedgerError, Ledgers, OwnCells};
use crate::shm::region::HugePages;
use crate::shm::segment::{SegmentError, SegmentRegions, SegmentShape};
use crate::word::Transition;

/// Who fills a record's payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Writer {
    /// A client process that maps the segment. If it dies, its records die.
    Client(ClientId),
    /// The node itself, for bytes that come over the network or from disk.
    Node,
}

/// A record that is to be written, as the master granted it.
#[derive(Clone, Copy, Debug)]
pub struct Grant<'a> {
    /// The slot for its header.
    pub slot: SlotId,
    /// Its version.
    pub epoch: Epoch,
    /// The term of the master that granted it.
    pub term: Term,
    /// The space for its payload and trailer.
    pub extent: Extent,
    /// What it will be.
    pub record: NewRecord<'a>,
    /// Who will write it.
    pub writer: Writer,
}

/// Everything about a record but its bytes.
#[derive(Clone, Copy, Debug)]
pub struct NewRecord<'a> {
    /// Its identity.
    pub id: ObjectId,
    /// Properties.
    pub flags: Flags,
    /// Length of the whole object.
    pub object_len: u64,
    /// Which stripe of how many.
    pub stripe_index: u16,
    /// How many stripes there are.
    pub stripe_count: u16,
    /// Where the stripe starts in the object.
    pub stripe_offset: u64,
    /// Length of the stripe: the payload of this record.
    pub stripe_len: u64,
    /// Tenant and key.
    pub key: KeySection<'a>,
    /// Attributes.
    pub attributes: &'a Attributes,
    /// Number of the key that made the id.
    pub id_key: u32,
    /// Generation of the tenant that went into the id.
    pub tenant_generation: TenantGeneration,
}

/// Why a record may not be begun. The master's book-keeping and the node's disagree, or the caller is late.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BeginError {
    /// There is no such segment here.
    #[error("no segment {0}")]
    Segment(SegmentId),
    /// There is no such slot in it.
    #[error("slot {slot} of a segment with {slots} slots")]
    Slot {
        /// The slot that was named.
        slot: SlotId,
        /// How many there are.
        slots: u32,
    },
    /// The grant is of another term than the one the segment obeys.
    #[error("granted in term {named}, the segment obeys term {obeyed}")]
    Term {
        /// Term of the grant.
        named: Term,
        /// Term of the segment's master.
        obeyed: Term,
    },
    /// The slot is taken, or its epoch has moved on.
    #[error("the slot is {found:?}, which does not allow epoch {named}")]
    Word {
        /// What the word is.
        found: Word,
        /// The epoch that was named.
        named: Epoch,
    },
    /// The extent is not the one that the record needs.
    #[error("{extent} for a record that takes {units} units from a multiple of {align} bytes")]
    Extent {
        /// What was granted.
        extent: Extent,
        /// What is needed.
        units: u32,
        /// How it must be aligned, in bytes.
        align: u64,
    },
    /// The extent overlaps a living one, or lies outside of the segment.
    #[error(transparent)]
    Space(#[from] ClaimError),
    /// The record cannot be laid out.
    #[error(transparent)]
    Layout(#[from] LayoutError),
    /// An attribute exceeds its bound.
    #[error(transparent)]
    Attributes(#[from] TrailerError),
    /// The header's fields contradict each other.
    #[error(transparent)]
    Header(#[from] HeaderError),
}

impl BeginError {
    /// The stable code for callers far away.
    pub fn code(&self) -> ErrorCode {
        match self {
            BeginError::Segment(_) => ErrorCode::StaleGeneration,
            BeginError::Term { .. } => ErrorCode::StaleTerm,
            BeginError::Word { .. } => ErrorCode::StaleEpoch,
            BeginError::Space(ClaimError::Overlap { .. }) => ErrorCode::Overlap,
            BeginError::Slot { .. } | BeginError::Space(_) => ErrorCode::OutOfBounds,
            BeginError::Extent { .. }
            | BeginError::Layout(_)
            | BeginError::Attributes(_)
            | BeginError::Header(_) => ErrorCode::InvalidArgument,
        }
    }
}

/// Why a record may not be published.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CommitError {
    /// There is no such segment or slot here.
    #[error("no slot {slot} in segment {segment}")]
    Slot {
        /// The segment that was named.
        segment: SegmentId,
        /// The slot that was named.
        slot: SlotId,
    },
    /// The slot is not being written in this version: the reservation ended.
    #[error("the slot is {found:?}, not being written in epoch {named}")]
    Word {
        /// What the word is.
        found: Word,
        /// The epoch that was named.
        named: Epoch,
    },
    /// Somebody else is writing it.
    #[error("the record is being written by another process")]
    Writer,
    /// The page digests behind the payload do not lead to the root.
    #[error("page digests lead to root {found:#018x}, the writer says {named:#018x}")]
    Root {
        /// What the digests lead to.
        found: u64,
        /// What the writer says.
        named: u64,
    },
}

impl CommitError {
    /// The stable code for callers far away.
    pub fn code(&self) -> ErrorCode {
        match self {
            CommitError::Slot { .. } => ErrorCode::StaleGeneration,
            CommitError::Word { .. } => ErrorCode::StaleEpoch,
            CommitError::Writer => ErrorCode::PermissionDenied,
            CommitError::Root { .. } => ErrorCode::Corrupt,
        }
    }
}

/// What became of a kill.
#[must_use]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Killed {
    /// No new reader gets in; the space comes back after a reclaim.
    Dying,
    /// It was dying already, or has been freed.
    Already,
    /// The slot holds another version, or there is no such slot.
    NotThere,
}

/// Space that came back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Freed {
    /// The segment.
    pub segment: SegmentId,
    /// The slot, FREE at `epoch`.
    pub slot: SlotId,
    /// The version that was there.
    pub epoch: Epoch,
    /// Its space.
    pub extent: Extent,
}

/// What a reclaim did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Reclaimed {
    /// What came back.
    pub freed: Vec<Freed>,
    /// What is dying but still in use, or whose time has not come.
    pub draining: usize,
}

/// A segment as its owner sees it.
#[derive(Debug)]
pub struct Segment {
    regions: SegmentRegions,
    books: Mutex<Books>,
}

#[derive(Debug)]
struct Books {
    obeyed: Term,
    taken: ExtentMap,
    writers: HashMap<SlotId, Writer>,
    dying: Vec<Dying>,
}

#[derive(Clone, Copy, Debug)]
struct Dying {
    freed: Freed,
    /// One-sided readers may hold a lease until then.
    not_before: MonoTime,
}

impl Segment {
    /// Number, size and incarnation.
    pub fn shape(&self) -> SegmentShape {
        self.regions.shape
    }

    /// The header region, to be passed to clients.
    pub fn headers(&self) -> &crate::shm::region::Region {
        &self.regions.headers
    }

    /// The payload region, to be passed to clients.
    pub fn payload(&self) -> &crate::shm::region::Region {
        &self.regions.payload
    }

    /// Units that are taken by records in any state but FREE.
    pub fn taken_units(&self) -> u32 {
        self.books().taken.claimed_units()
    }

    /// Obeys a newer term from now on; grants of older ones are refused. Returns the term that is obeyed.
    pub fn obey(&self, term: Term) -> Term {
        let mut books = self.books();
        books.obeyed = books.obeyed.max(term);
        books.obeyed
    }

    /// Every slot that is not FREE, with its header, as the books are now. For reports and for inspection.
    pub fn for_each_record(&self, mut record: impl FnMut(SlotId, &Header)) {
        let _books = self.books();
        for slot in (0..self.regions.shape.slots).map(SlotId) {
            let word = self.regions.word(slot).expect("in range").load();
            if word.state() == State::Free {
                continue;
            }
            // SAFETY: this is the owner, with the lock.
            let header = unsafe { self.regions.header(slot, word) };
            record(slot, &header.expect("only the owner writes headers"));
        }
    }

    fn books(&self) -> MutexGuard<'_, Books> {
        self.books.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn begin(&self, grant: &Grant<'_>) -> Result<(), BeginError> {
        let Grant { slot, epoch, record, .. } = *grant;
        let slots = self.regions.shape.slots;
        let word = self.regions.word(slot).ok_or(BeginError::Slot { slot, slots })?;
        let mut books = self.books();
        if grant.term != books.obeyed {
            return Err(BeginError::Term { named: grant.term, obeyed: books.obeyed });
        }
        let found = word.load();
        if found == Word::new(epoch, State::Writing) && books.writers.get(&slot) == Some(&grant.writer) {
            return Ok(()); // the answer to the first attempt was lost
        }
        if found.state() != State::Free || found.epoch() >= epoch {
            return Err(BeginError::Word { found, named: epoch });
        }
        record.attributes.check()?;
        let key_len = record.key.encoded_len();
        let mut trailer = Vec::with_capacity(key_len + 64);
        record.key.encode(&mut trailer);
        record.attributes.encode(&mut trailer);
        let (key_part, attributes_part) = trailer.split_at(key_len);
        let layout = RecordLayout::new(
            record.stripe_len,
            key_part.len() as u32,
            attributes_part.len() as u32,
            record.flags,
        )?;
        let payload_offset = grant.extent.span().offset();
        if grant.extent.units != layout.units() || !payload_offset.is_multiple_of(layout.align()) {
            let (units, align) = (layout.units(), layout.align());
            return Err(BeginError::Extent { extent: grant.extent, units, align });
        }
        let header = Header {
            flags: record.flags,
            id: record.id,
            word: Word::new(epoch, State::Writing),
            object_len: record.object_len,
            stripe_offset: record.stripe_offset,
            stripe_len: record.stripe_len,
            payload_offset,
            root: 0,
            stripe_index: record.stripe_index,
            stripe_count: record.stripe_count,
            key_len: key_part.len() as u32,
            attributes_len: attributes_part.len() as u32,
            trailer_crc: trailer_crc(key_part, attributes_part),
            id_key: record.id_key,
            tenant_generation: record.tenant_generation,
        };
        header.check()?;
        books.taken.try_claim(grant.extent)?;
        let begun = word.begin(epoch);
        assert!(matches!(begun, Transition::Done(_)), "only the owner changes words, under its lock");
        // SAFETY: this is the owner, with the lock; the slot has just become WRITING, and the writer learns of
        // it from the answer to this call only.
        unsafe { self.regions.write_header(slot, &header) };
        // SAFETY: the extent overlaps no other (the map said so), and its writer does not know of it yet.
        unsafe { self.regions.write_bytes(payload_offset + layout.key().offset(), &trailer) };
        books.writers.insert(slot, grant.writer);
        Ok(())
    }

    fn commit(
        &self,
        slot: SlotId,
        epoch: Epoch,
        root: u64,
        writer: Writer,
        board: &Board,
    ) -> Result<(), CommitError> {
        let segment = self.regions.shape.segment;
        let word = self.regions.word(slot).ok_or(CommitError::Slot { segment, slot })?;
        let mut books = self.books();
        let found = word.load();
        if found == Word::new(epoch, State::Ready) {
            return Ok(()); // the answer to the first attempt was lost
        }
        if found != Word::new(epoch, State::Writing) {
            return Err(CommitError::Word { found, named: epoch });
        }
        if books.writers.get(&slot) != Some(&writer) {
            return Err(CommitError::Writer);
        }
        // SAFETY: this is the owner, with the lock.
        let mut header = unsafe { self.regions.header(slot, found) }.expect("written by begin");
        if !header.flags.digestless() {
            let found = self.root_of_stored_digests(&header, epoch);
            if found != root {
                return Err(CommitError::Root { found, named: root });
            }
        }
        header.root = root;
        // SAFETY: this is the owner, with the lock; the writer is done, it says, and no reader is let in yet.
        unsafe { self.regions.write_header(slot, &header) };
        let published = word.publish(epoch);
        assert!(matches!(published, Transition::Done(_)), "only the owner changes words, under its lock");
        books.writers.remove(&slot);
        // A stripe alone is of no use to a local reader.
        if header.stripe_count == 1
            && board.index().insert(&header.id, Place { segment, slot }) == Inserted::Overflow
        {
            board.count_overflow();
        }
        Ok(())
    }

    fn root_of_stored_digests(&self, header: &Header, epoch: Epoch) -> u64 {
        let (layout, span) = self.regions.record_span(header).expect("begin checked it");
        let digests = layout.digests();
        let at = Span::new(span.offset() + digests.offset(), digests.len()).expect("inside the record");
        // SAFETY: the writer says that it is done; if it is not, the root does not match, now or when read.
        let section = unsafe { self.regions.bytes(at) };
        let context = DigestContext {
            id: header.id,
            version: epoch,
            stripe: header.stripe_index,
            len: header.stripe_len,
        };
        context.root_of(PageDigests::new(section).iter())
    }

    fn kill(&self, slot: SlotId, epoch: Epoch, not_before: MonoTime, board: &Board) -> Killed {
        let Some(word) = self.regions.word(slot) else { return Killed::NotThere };
        let mut books = self.books();
        let old = match word.kill(epoch) {
            Transition::Done(old) => old,
            Transition::Already => return Killed::Already,
            Transition::Refused(now) if now == Word::new(epoch, State::Free) => return Killed::Already,
            Transition::Refused(_) => return Killed::NotThere,
        };
        books.writers.remove(&slot);
        // SAFETY: this is the owner, with the lock.
        let header = unsafe { self.regions.header(slot, old) }.expect("only the owner writes headers");
        let units = header.layout().expect("checked when decoded").units();
        let start = (header.payload_offset / UNIT_BYTES) as u32;
        let segment = self.regions.shape.segment;
        if old.state() == State::Ready {
            board.index().remove(&header.id, Place { segment, slot });
        }
        let freed = Freed { segment, slot, epoch, extent: Extent { start, units } };
        books.dying.push(Dying { freed, not_before });
        Killed::Dying
    }

    fn burn(&self, slot: SlotId, epoch: Epoch) -> Transition {
        let _books = self.books();
        match self.regions.word(slot) {
            Some(word) => word.burn(epoch),
            None => Transition::Refused(Word::default()),
        }
    }

    /// Takes the dying records whose time has come out of the list. They are DEAD.
    fn take_dying(&self, now: MonoTime) -> (Vec<Dying>, usize) {
        let mut books = self.books();
        let (due, later): (Vec<_>, Vec<_>) = books.dying.drain(..).partition(|d| d.not_before <= now);
        books.dying = later;
        (due, books.dying.len())
    }

    /// Frees those that `pinned` does not name, and puts the others back.
    fn free_unpinned(
        &self,
        due: Vec<Dying>,
        pinned: impl Fn(SegmentId, SlotId) -> bool,
        out: &mut Reclaimed,
    ) {
        let mut books = self.books();
        for dying in due {
            let Freed { segment, slot, epoch, extent } = dying.freed;
            if pinned(segment, slot) {
                books.dying.push(dying);
                out.draining += 1;
                continue;
            }
            let freed = self.regions.word(slot).expect("it was killed here").free(epoch);
            assert!(matches!(freed, Transition::Done(_)), "DEAD until freed here: {freed:?}");
            books.taken.release(extent);
            out.freed.push(dying.freed);
        }
    }

    fn slots_written_by(&self, writer: Writer) -> Vec<(SlotId, Epoch)> {
        let books = self.books();
        let mine = books.writers.iter().filter(|&(_, &w)| w == writer);
        mine.map(|(&slot, _)| (slot, self.regions.word(slot).expect("in the books").load().epoch())).collect()
    }
}

/// Everything that a node shares with the processes of its host.
#[derive(Debug)]
pub struct NodeHeap {
    board: Board,
    ledgers: Ledgers,
    segments: RwLock<Vec<Arc<Segment>>>,
}

/// How a node's heap is made.
#[derive(Clone, Copy, Debug)]
pub struct HeapConfig {
    /// The node.
    pub node: NodeId,
    /// Its incarnation: grows with every start.
    pub generation: Generation,
    /// Slots over all segments that it may ever have; the index is sized for it.
    pub slots_max: u64,
    /// Pages of the index.
    pub huge: HugePages,
}

impl NodeHeap {
    /// A heap without segments. Its index is closed until [`Board::set_open`].
    pub fn create(config: HeapConfig) -> Result<NodeHeap, BoardError> {
        let board = Board::create(config.node, config.generation, config.slots_max, config.huge)?;
        let ledgers = Ledgers::new(config.slots_max);
        Ok(NodeHeap { board, ledgers, segments: RwLock::default() })
    }

    /// What the node shows to its clients.
    pub fn board(&self) -> &Board {
        &self.board
    }

    /// Who uses what.
    pub fn ledgers(&self) -> &Ledgers {
        &self.ledgers
    }

    /// Adds a segment of `slots` headers and `units` units.
    pub fn add_segment(&self, slots: u32, units: u32, huge: HugePages) -> Result<Arc<Segment>, SegmentError> {
        let mut segments = self.segments.write().unwrap_or_else(PoisonError::into_inner);
        let first_number = segments.iter().map(|s| u64::from(s.shape().slots)).sum::<u64>();
        let segment = SegmentId(segments.len() as u32);
        if first_number + u64::from(slots) > self.board.slots_max() {
            return Err(SegmentError::Bounds { segment, slots, units });
        }
        let shape = SegmentShape { segment, generation: Generation(1), slots, units, first_number };
        let books = Books {
            obeyed: Term::ZERO,
            taken: ExtentMap::new(units),
            writers: HashMap::new(),
            dying: Vec::new(),
        };
        let regions = SegmentRegions::create(shape, huge)?;
        let segment = Arc::new(Segment { regions, books: Mutex::new(books) });
        segments.push(Arc::clone(&segment));
        Ok(segment)
    }

    /// All segments.
    pub fn segments(&self) -> Vec<Arc<Segment>> {
        self.segments.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// One segment.
    pub fn segment(&self, segment: SegmentId) -> Option<Arc<Segment>> {
        let segments = self.segments.read().unwrap_or_else(PoisonError::into_inner);
        segments.get(segment.0 as usize).cloned()
    }

    /// A new client with a ledger of its own.
    pub fn admit(&self) -> Result<Arc<ClientLedger>, LedgerError> {
        self.ledgers.admit()
    }

    /// FREE → WRITING: the writer may claim the slot and fill the extent. Repeating it is harmless.
    pub fn begin(&self, segment: SegmentId, grant: &Grant<'_>) -> Result<(), BeginError> {
        self.segment(segment).ok_or(BeginError::Segment(segment))?.begin(grant)
    }

    /// WRITING → READY: readers get in, here through the index. Repeating it is harmless.
    pub fn commit(
        &self,
        segment: SegmentId,
        slot: SlotId,
        epoch: Epoch,
        root: u64,
        writer: Writer,
    ) -> Result<(), CommitError> {
        let owner = self.segment(segment).ok_or(CommitError::Slot { segment, slot })?;
        owner.commit(slot, epoch, root, writer, &self.board)
    }

    /// WRITING or READY → DEAD, at once. The space comes back by [`NodeHeap::reclaim`], not before `not_before`.
    pub fn kill(&self, segment: SegmentId, slot: SlotId, epoch: Epoch, not_before: MonoTime) -> Killed {
        match self.segment(segment) {
            Some(owner) => owner.kill(slot, epoch, not_before, &self.board),
            None => Killed::NotThere,
        }
    }

    /// A reservation was cancelled that may not have begun: a late begin is refused from now on.
    pub fn burn(&self, segment: SegmentId, slot: SlotId, epoch: Epoch) -> Transition {
        match self.segment(segment) {
            Some(owner) => owner.burn(slot, epoch),
            None => Transition::Refused(Word::default()),
        }
    }

    /// DEAD → FREE for everything that is due and that nobody names in a ledger. One scan for all.
    pub fn reclaim(&self, now: MonoTime) -> Reclaimed {
        let mut out = Reclaimed::default();
        let mut due = Vec::new();
        for segment in self.segments() {
            let (now_due, later) = segment.take_dying(now);
            out.draining += later;
            if !now_due.is_empty() {
                due.push((segment, now_due));
            }
        }
        if due.is_empty() {
            return out;
        }
        // All of them are DEAD by now, so whoever names one of them from here on is refused.
        let pins = self.ledgers.pins();
        for (segment, due) in due {
            segment.free_unpinned(due, |segment, slot| pins.contains(segment, slot), &mut out);
        }
        out
    }

    /// A client's process has ended: its pins are void, and what it was writing dies. Returns how many records
    /// that were.
    pub fn client_died(&self, client: ClientId) -> usize {
        self.ledgers.forget(client);
        let mut killed = 0;
        for segment in self.segments() {
            let id = segment.shape().segment;
            for (slot, epoch) in segment.slots_written_by(Writer::Client(client)) {
                // Nobody but the writer had access, so there is no lease to wait for.
                let dying = self.kill(id, slot, epoch, MonoTime(0)) == Killed::Dying;
                killed += usize::from(dying);
            }
        }
        killed
    }

    /// A pin of the node's own, for serving, receiving or writing to disk.
    pub fn pin(&self, segment: SegmentId, slot: SlotId, expect: Expect) -> Option<NodePin<'_>> {
        let owner = self.segment(segment)?;
        let cell = self.ledgers.own().take();
        let name = SlotName::new(segment, slot);
        let acquired = owner.regions.word(slot).and_then(|word| cell.acquire(name, word, expect).ok());
        let Some(word) = acquired else {
            self.ledgers.own().give(cell);
            return None;
        };
        Some(NodePin { owner, cell, cells: self.ledgers.own(), slot, word })
    }

    /// Says that the node is alive, by its own clock.
    pub fn beat(&self) {
        self.board.beat(SystemClock.now());
    }
}

/// A pin of the node's own.
#[derive(Debug)]
pub struct NodePin<'a> {
    owner: Arc<Segment>,
    cell: Arc<Cell>,
    cells: &'a OwnCells,
    slot: SlotId,
    word: Word,
}

impl NodePin<'_> {
    /// The record's header.
    pub fn header(&self) -> Header {
        // SAFETY: the pin was granted on this word.
        unsafe { self.owner.regions.header(self.slot, self.word) }.expect("only the owner writes headers")
    }

    /// The payload of a READY record; `None` for one that is being written.
    pub fn payload(&self) -> Option<&[u8]> {
        let header = self.header();
        let (_, span) = self.owner.regions.record_span(&header)?;
        let payload = Span::new(span.offset(), header.stripe_len)?;
        // SAFETY: READY bytes do not change under a pin.
        (self.word.state() == State::Ready).then(|| unsafe { self.owner.regions.bytes(payload) })
    }

    /// Fills a record that the node itself is writing; the root for [`NodeHeap::commit`].
    ///
    /// # Panics
    /// If the record is not being written, or the payload has another length than was granted.
    pub fn fill(&mut self, payload: &[u8]) -> u64 {
        assert_eq!(self.word.state(), State::Writing);
        // SAFETY: the pin was granted on WRITING, to the record's one writer.
        unsafe { crate::shm::fill::fill(&self.owner.regions, &self.header(), payload) }
    }
}

impl Drop for NodePin<'_> {
    fn drop(&mut self) {
        self.cell.release();
        self.cells.give(Arc::clone(&self.cell));
    }
}
