//! [`NodeHeap`]: the owner's side of everything: board, ledgers and segments, and the node's own pins.

use std::sync::{Arc, PoisonError, RwLock};

use moontide_types::record::{Header, Word};
use moontide_types::{Clock, Epoch, Generation, MonoTime, NodeId, SegmentId, SlotId, Span, SystemClock};

use crate::cell::{Cell, Expect, SlotName};
use crate::shm::board::{Board, BoardError};
use crate::shm::death::Ended;
use crate::shm::fill::fill;
use crate::shm::grant::{BeginError, CommitError, Grant, Killed, Reclaimed, Writer};
use crate::shm::ledger::{ClientLedger, LedgerError, Ledgers, OwnCells};
use crate::shm::owner::Segment;
use crate::shm::region::HugePages;
use crate::shm::segment::{SegmentError, SegmentPages, SegmentShape};
use crate::word::Transition;

/// Everything that a node shares with the processes of its host.
#[derive(Debug)]
pub struct NodeHeap {
    board: Board,
    ledgers: Ledgers,
    segments: RwLock<Vec<Arc<Segment>>>,
    node: (NodeId, Generation),
    huge: HugePages,
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
    /// Pages of the index and of the header tables. With millions of objects a look-up on ordinary pages spends
    /// most of its time on finding out where they are.
    pub huge: HugePages,
}

impl NodeHeap {
    /// A heap without segments. Its index is closed until [`Board::set_open`].
    pub fn create(config: HeapConfig) -> Result<NodeHeap, BoardError> {
        let board = Board::create(config.node, config.generation, config.slots_max, config.huge)?;
        let ledgers = Ledgers::new(config.slots_max);
        let node = (config.node, config.generation);
        Ok(NodeHeap { board, ledgers, segments: RwLock::default(), node, huge: config.huge })
    }

    /// What the node shows to its clients.
    pub fn board(&self) -> &Board {
        &self.board
    }

    /// Who uses what.
    pub fn ledgers(&self) -> &Ledgers {
        &self.ledgers
    }

    /// Adds a segment of `slots` headers and `units` units, a multiple of 8: whole pages of 4 KiB. The slots of all
    /// segments together are at most the heap's `slots_max`. `huge` is for the payload.
    pub fn add_segment(&self, slots: u32, units: u32, huge: HugePages) -> Result<Arc<Segment>, SegmentError> {
        let mut segments = self.segments.write().unwrap_or_else(PoisonError::into_inner);
        let first_number = segments.iter().map(|s| u64::from(s.shape().slots)).sum::<u64>();
        let segment = SegmentId(segments.len() as u32);
        if first_number + u64::from(slots) > self.board.slots_max() {
            return Err(SegmentError::SlotsMax { slots, used: first_number, max: self.board.slots_max() });
        }
        let shape = SegmentShape { segment, generation: Generation(1), slots, units, first_number };
        let pages = SegmentPages { headers: self.huge, payload: huge };
        let segment = Arc::new(Segment::create(shape, self.node, pages)?);
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
    pub(crate) fn admit(&self, pid: u32) -> Result<Arc<ClientLedger>, LedgerError> {
        self.ledgers.admit(pid)
    }

    /// FREE → WRITING: the writer may claim the slot and fill the extent. The grant's term must be the one given to
    /// [`Segment::obey`]. Repeating it with the same grant is harmless.
    pub fn begin(&self, segment: SegmentId, grant: &Grant<'_>) -> Result<(), BeginError> {
        self.segment(segment).ok_or(BeginError::Segment(segment))?.begin(grant, &self.ledgers)
    }

    /// WRITING → READY: readers get in, here through the index. Repeating it with the same root is harmless, whoever
    /// asks.
    pub fn commit(
        &self,
        segment: SegmentId,
        slot: SlotId,
        epoch: Epoch,
        root: u64,
        writer: Writer,
    ) -> Result<(), CommitError> {
        let owner = self.segment(segment).ok_or(CommitError::Slot { segment, slot })?;
        owner.commit(slot, epoch, root, writer, &self.board, &self.ledgers)
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
    pub fn client_died(&self, ended: Ended) -> usize {
        let client = ended.client();
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

    /// A pin of the node's own on a READY record, for serving it or writing it to disk. `None`: it is not READY,
    /// or of another version than `epoch`.
    pub fn pin(&self, segment: SegmentId, slot: SlotId, epoch: Epoch) -> Option<NodePin<'_>> {
        let owner = self.segment(segment)?;
        let held = OwnPin::acquire(self, owner, slot, Expect::ReadyAt(epoch))?;
        Some(NodePin { held })
    }

    /// The node's own claim on a record that it was granted as [`Writer::Node`], one at a time. `None`: it is not
    /// being written by the node, or claimed already.
    pub fn claim(&self, segment: SegmentId, slot: SlotId, epoch: Epoch) -> Option<NodeClaim<'_>> {
        let owner = self.segment(segment)?;
        let held = OwnPin::acquire(self, Arc::clone(&owner), slot, Expect::WritingAt(epoch))?;
        owner.note_node_claim(slot).then(|| NodeClaim { held })
    }

    /// Says that the node is alive, by its own clock.
    pub fn beat(&self) {
        self.board.beat(SystemClock.now());
    }
}

/// A slot named in a cell of the node's own.
#[derive(Debug)]
struct OwnPin<'a> {
    owner: Arc<Segment>,
    cell: Arc<Cell>,
    cells: &'a OwnCells,
    slot: SlotId,
    word: Word,
}

impl<'a> OwnPin<'a> {
    fn acquire(heap: &'a NodeHeap, owner: Arc<Segment>, slot: SlotId, expect: Expect) -> Option<OwnPin<'a>> {
        let cells = heap.ledgers.own();
        let cell = cells.take();
        let name = SlotName::new(owner.regions.shape.segment, slot);
        match owner.regions.word(slot).and_then(|word| cell.acquire(name, word, expect).ok()) {
            Some(word) => Some(OwnPin { owner, cell, cells, slot, word }),
            None => {
                cells.give(cell);
                None
            }
        }
    }

    fn header(&self) -> Header {
        // SAFETY: the pin was granted on this word.
        unsafe { self.owner.regions.header(self.slot, self.word) }.expect("only the owner writes headers")
    }
}

impl Drop for OwnPin<'_> {
    fn drop(&mut self) {
        self.cell.release();
        self.cells.give(Arc::clone(&self.cell));
    }
}

/// A READY record that the node itself is using.
#[derive(Debug)]
pub struct NodePin<'a> {
    held: OwnPin<'a>,
}

impl NodePin<'_> {
    /// The record's header.
    pub fn header(&self) -> Header {
        self.held.header()
    }

    /// The payload.
    pub fn payload(&self) -> &[u8] {
        let regions = &self.held.owner.regions;
        let header = self.header();
        let (layout, span) = regions.record_span(&header).expect("begin checked it");
        let payload = Span::new(span.offset(), layout.payload().len()).expect("inside the record");
        // SAFETY: READY bytes do not change under a pin.
        unsafe { regions.bytes(payload) }
    }
}

/// A record that the node itself is filling, with bytes from the network or from disk.
#[derive(Debug)]
pub struct NodeClaim<'a> {
    held: OwnPin<'a>,
}

impl NodeClaim<'_> {
    /// Copies the payload in, with its page digests; the root for [`NodeHeap::commit`].
    ///
    /// # Panics
    /// If the payload has another length than was granted.
    pub fn fill(&mut self, payload: &[u8]) -> u64 {
        // SAFETY: there is one claim at a time, granted on WRITING; a commit is refused while it is there.
        unsafe { fill(&self.held.owner.regions, &self.held.header(), payload) }
    }
}

impl Drop for NodeClaim<'_> {
    fn drop(&mut self) {
        self.held.owner.end_node_claim(self.held.slot);
    }
}
