//! [`NodeHeap`]: the owner's side of everything: board, ledgers and segments, and the node's own pins.

use std::sync::{Arc, PoisonError, RwLock};

use moontide_types::bounds::UNIT_BYTES;
use moontide_types::record::{Header, RecordLayout, Word};
use moontide_types::{Clock, Epoch, Generation, MonoTime, NodeId, SegmentId, SlotId, Span, SystemClock};

use crate::cell::{Cell, Expect, SlotName};
use crate::device::{DeviceError, DevicePart};
use crate::shm::board::{Board, BoardError};
use crate::shm::death::Ended;
use crate::shm::fill::{page_span, pages};
use crate::shm::grant::{BeginError, CommitError, Grant, Killed, Reclaimed, Writer};
use crate::shm::ledger::{ClientLedger, LedgerError, Ledgers};
use crate::shm::owner::{BeginKind, Segment, UseFor};
use crate::shm::region::{HugePages, Region};
use crate::shm::segment::{Medium, SegmentError, SegmentMemory, SegmentRegions, SegmentShape};
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
    ///
    /// The segment's generation is the heap's: what was granted in an earlier life of the node, on a segment of the same
    /// number, is refused.
    pub fn add_segment(&self, slots: u32, units: u32, huge: HugePages) -> Result<Arc<Segment>, SegmentError> {
        self.add(slots, units, SegmentMemory::New(huge), UseFor::Grants)
    }

    /// As [`NodeHeap::add_segment`], in memory that is there already: all of `payload`, which is zero, or whose bytes
    /// nobody cares for any more.
    ///
    /// # Safety
    /// From now on the bytes are the segment's: nobody writes them but under a claim, even where they can be reached
    /// by another way.
    pub unsafe fn add_segment_in(&self, slots: u32, payload: Region) -> Result<Arc<Segment>, SegmentError> {
        let units = u32::try_from(payload.len() / UNIT_BYTES).unwrap_or(u32::MAX);
        self.add(slots, units, SegmentMemory::Given(payload), UseFor::Grants)
    }

    /// As [`NodeHeap::add_segment_in`], with the records' bytes in a device's memory, which is as long as `outline`: of
    /// that only what stands behind the bytes is used. Such records have no digests, and are written by clients who push.
    ///
    /// # Safety
    /// As [`NodeHeap::add_segment_in`], of both.
    pub unsafe fn add_segment_of_device(
        &self,
        slots: u32,
        outline: Region,
        bytes: DevicePart,
    ) -> Result<Arc<Segment>, SegmentError> {
        let units = u32::try_from(outline.len() / UNIT_BYTES).unwrap_or(u32::MAX);
        self.add(slots, units, SegmentMemory::OfDevice(outline, bytes), UseFor::Grants)
    }

    /// As [`NodeHeap::add_segment`], for either use.
    pub(super) fn add(
        &self,
        slots: u32,
        units: u32,
        payload: SegmentMemory,
        use_for: UseFor,
    ) -> Result<Arc<Segment>, SegmentError> {
        let mut segments = self.segments.write().unwrap_or_else(PoisonError::into_inner);
        let first_number = segments.iter().map(|s| u64::from(s.shape().slots)).sum::<u64>();
        let segment = SegmentId(segments.len() as u32);
        if first_number + u64::from(slots) > self.board.slots_max() {
            return Err(SegmentError::SlotsMax { slots, used: first_number, max: self.board.slots_max() });
        }
        let medium = match payload {
            SegmentMemory::OfDevice(..) => Medium::Device,
            SegmentMemory::New(_) | SegmentMemory::Given(_) => Medium::Host,
        };
        let shape = SegmentShape { segment, generation: self.node.1, slots, units, first_number, medium };
        let segment = Arc::new(Segment::create(shape, self.node, (self.huge, payload), use_for)?);
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
        self.segment(segment).ok_or(BeginError::Segment(segment))?.begin(grant, BeginKind::New, &self.ledgers)
    }

    /// FREE → WRITING for a record that was complete before and comes back in its old version, from disk or from another
    /// node. The version may be below what the slot has seen (not the same, though), and of an earlier term than the
    /// grant's, which must be the one that the segment obeys. The writer is [`Writer::Node`]. Repeating it with the same
    /// grant is harmless.
    ///
    /// The slot's fence against late begins stays where it is: when the copy is freed the slot is FREE at the higher of
    /// the two, and whatever was refused before is refused then.
    pub fn begin_copy(&self, segment: SegmentId, grant: &Grant<'_>) -> Result<(), BeginError> {
        self.segment(segment).ok_or(BeginError::Segment(segment))?.begin(
            grant,
            BeginKind::Copy,
            &self.ledgers,
        )
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

    /// WRITING → READY in one step, for a record that the node writes: claims the whole of it, digests what is not yet,
    /// compares with the root, and lets readers in without letting go of the claim. A late write of the same bytes,
    /// from a connection that was given up, cannot come in between. [`CommitError::Claimed`]: one is at it just now; try
    /// again in a moment. Repeating it with the same root is harmless.
    pub fn publish(
        &self,
        segment: SegmentId,
        slot: SlotId,
        epoch: Epoch,
        root: u64,
    ) -> Result<(), CommitError> {
        match self.claim(segment, slot, epoch) {
            Some(claim) => claim.publish(root),
            None => {
                let owner = self.segment(segment).ok_or(CommitError::Slot { segment, slot })?;
                owner.unclaimed(slot, epoch, root)
            }
        }
    }

    /// WRITING or READY → DEAD, at once. The space comes back by [`NodeHeap::reclaim`], not before `not_before`. A
    /// second kill with an earlier time brings it forward, and never puts it off.
    pub fn kill(&self, segment: SegmentId, slot: SlotId, epoch: Epoch, not_before: MonoTime) -> Killed {
        match self.segment(segment) {
            Some(owner) => owner.kill(slot, epoch, not_before, &self.board),
            None => Killed::NotThere,
        }
    }

    /// A reservation was cancelled that may not have begun: a late begin is refused from now on. Where a copy of an older
    /// version stands in the slot the word stays as it is, which is the answer; the begin is refused when the copy is
    /// gone, too.
    pub fn burn(&self, segment: SegmentId, slot: SlotId, epoch: Epoch) -> Transition {
        match self.segment(segment) {
            Some(owner) => owner.burn(slot, epoch),
            None => Transition::Refused(Word::default()),
        }
    }

    /// DEAD → FREE for everything that is due and that nobody names in a ledger. One scan for all.
    pub fn reclaim(&self, now: MonoTime) -> Reclaimed {
        self.reclaim_in(self.segments(), now)
    }

    /// As [`NodeHeap::reclaim`], in these segments only.
    pub(super) fn reclaim_in(
        &self,
        segments: impl IntoIterator<Item = Arc<Segment>>,
        now: MonoTime,
    ) -> Reclaimed {
        let mut out = Reclaimed::default();
        let mut due = Vec::new();
        for segment in segments {
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

    /// A client's process has ended: its pins are void, and what it was writing dies. Returns which records those
    /// were.
    pub fn client_died(&self, ended: Ended) -> Vec<(SegmentId, SlotId, Epoch)> {
        let client = ended.client();
        self.ledgers.forget(client);
        let mut killed = Vec::new();
        for segment in self.segments() {
            let id = segment.shape().segment;
            for (slot, epoch) in segment.slots_written_by(Writer::Client(client)) {
                // Nobody but the writer had access, so there is no lease to wait for.
                if self.kill(id, slot, epoch, MonoTime(0)) == Killed::Dying {
                    killed.push((id, slot, epoch));
                }
            }
        }
        killed
    }

    /// A pin of the node's own on a READY record, for serving it or writing it to disk. `None`: it is not READY,
    /// or of another version than `epoch`.
    pub fn pin(&self, segment: SegmentId, slot: SlotId, epoch: Epoch) -> Option<NodePin<'_>> {
        let owner = self.segment(segment)?;
        let held = OwnPin::acquire(self, owner, slot, Expect::ReadyAt(epoch))?;
        let header = held.header();
        Some(NodePin { held, header })
    }

    /// The node's own claim on the payload of a record that it was granted as [`Writer::Node`]. `None`: the node does
    /// not write it in this version, or a claim is there already.
    pub fn claim(&self, segment: SegmentId, slot: SlotId, epoch: Epoch) -> Option<NodeClaim<'_>> {
        self.claim_part(segment, slot, epoch, |header| Span::new(0, header.stripe_len))
    }

    /// As [`NodeHeap::claim`], on a range of the payload: several threads may fill a record, each its own bytes.
    /// `None`, too, if the range reaches beyond the payload.
    pub fn claim_range(
        &self,
        segment: SegmentId,
        slot: SlotId,
        epoch: Epoch,
        range: Span,
    ) -> Option<NodeClaim<'_>> {
        self.claim_part(segment, slot, epoch, |header| (range.end() <= header.stripe_len).then_some(range))
    }

    fn claim_part(
        &self,
        segment: SegmentId,
        slot: SlotId,
        epoch: Epoch,
        range_of: impl FnOnce(&Header) -> Option<Span>,
    ) -> Option<NodeClaim<'_>> {
        let owner = self.segment(segment)?;
        let held = OwnPin::acquire(self, owner, slot, Expect::WritingAt(epoch))?;
        let (header, range) = held.owner.note_node_claim(slot, held.word, range_of)?;
        Some(NodeClaim { held, header, range })
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
    heap: &'a NodeHeap,
    slot: SlotId,
    word: Word,
}

impl<'a> OwnPin<'a> {
    fn acquire(heap: &'a NodeHeap, owner: Arc<Segment>, slot: SlotId, expect: Expect) -> Option<OwnPin<'a>> {
        let cell = heap.ledgers.own().take();
        let name = SlotName::new(owner.regions.shape.segment, slot);
        match owner.regions.word(slot).and_then(|word| cell.acquire(name, word, expect).ok()) {
            Some(word) => Some(OwnPin { owner, cell, heap, slot, word }),
            None => {
                heap.ledgers.own().give(cell);
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
        self.heap.ledgers.own().give(Arc::clone(&self.cell));
    }
}

/// A READY record that the node itself is using.
#[derive(Debug)]
pub struct NodePin<'a> {
    held: OwnPin<'a>,
    header: Header,
}

impl NodePin<'_> {
    /// The record's header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Whether the payload is in a device's memory, out of which [`NodePin::copy_out`] brings it.
    pub fn is_in_device(&self) -> bool {
        !self.held.owner.regions.has_bytes()
    }

    /// The payload.
    ///
    /// # Panics
    /// If it is in a device's memory, which no record with digests is.
    pub fn payload(&self) -> &[u8] {
        assert!(!self.is_in_device(), "a payload in memory of the host");
        let regions = &self.held.owner.regions;
        let payload =
            Span::new(self.header.payload_offset, self.header.stripe_len).expect("begin checked it");
        // SAFETY: READY bytes do not change under a pin.
        unsafe { regions.bytes(payload) }
    }

    /// Copies a part of the payload, wherever it is.
    ///
    /// # Panics
    /// If the part is not in the payload.
    pub fn copy_out(&self, part: Span) -> Result<Vec<u8>, DeviceError> {
        assert!(part.end() <= self.header.stripe_len, "a part of the payload");
        match self.held.owner.regions.device() {
            None => Ok(self.payload()[part.offset() as usize..part.end() as usize].to_vec()),
            Some(device) => {
                let mut bytes = vec![0; part.len() as usize];
                device.read(self.header.payload_offset + part.offset(), &mut bytes)?;
                Ok(bytes)
            }
        }
    }

    /// The page digests, as they are stored; none in a record without digests.
    pub fn digests(&self) -> &[u8] {
        // SAFETY: as above.
        unsafe { self.held.owner.regions.digests(&self.header) }.as_bytes()
    }

    /// Tenant and key, as they are stored.
    pub fn key(&self) -> &[u8] {
        self.behind_payload(RecordLayout::key)
    }

    /// Attributes, as they are stored.
    pub fn attributes(&self) -> &[u8] {
        self.behind_payload(RecordLayout::attributes)
    }

    fn behind_payload(&self, part: impl FnOnce(&RecordLayout) -> Span) -> &[u8] {
        let layout = self.header.layout().expect("begin checked it");
        let part = part(&layout);
        let offset = self.header.payload_offset + part.offset();
        let span = Span::new(offset, part.len()).expect("begin checked it");
        // SAFETY: as above.
        unsafe { self.held.owner.regions.bytes(span) }
    }
}

/// A record, or a part of one, that a thread of the node is filling, with bytes from the network or from disk.
#[derive(Debug)]
pub struct NodeClaim<'a> {
    held: OwnPin<'a>,
    header: Header,
    /// The bytes of the payload that are this claim's alone.
    range: Span,
}

impl NodeClaim<'_> {
    /// The header as granted; in the place of its root stands the writer's mark until the commit.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Which bytes of the payload are claimed.
    pub fn range(&self) -> Span {
        self.range
    }

    /// A part of the claimed bytes, named as in the payload, to be changed. Digests of its pages are forgotten.
    ///
    /// # Panics
    /// If the part is not in the claim.
    pub fn bytes_mut(&mut self, part: Span) -> &mut [u8] {
        assert!(self.range.contains(part), "a part of what is claimed");
        self.held.owner.forget_digests(&self.header, part);
        // SAFETY: ranges of claims do not overlap, readers are not let in while the record is WRITING, and the slot
        // is not reused while the claim's cell names it.
        unsafe { self.held.owner.regions.bytes_mut(self.in_region(part)) }
    }

    /// Digests a page whose bytes are all there, best while they are in cache.
    ///
    /// # Panics
    /// If the claim does not have the whole page.
    pub fn seal_page(&mut self, page: u64) {
        let span = page_span(&self.header, page);
        assert!(self.range.contains(span) && !span.is_empty(), "a page is sealed by whoever has all of it");
        // SAFETY: no other claim has the page, nothing borrows from this one, and readers are not let in.
        unsafe {
            let digest = self.header.digest_context().page(page, self.regions().bytes(self.in_region(span)));
            self.regions().write_digest(&self.header, page, digest);
        }
    }

    /// As [`NodeClaim::seal_page`], with a digest that the caller has computed from exactly the bytes that stand there, so
    /// that they are not looked at twice: they were verified on their way from disk. A wrong one is noticed when the
    /// digests do not lead to the record's root, unless that is wrong, too. Changing the page forgets it.
    ///
    /// # Panics
    /// If the claim does not have the whole page.
    pub fn seal_page_as(&mut self, page: u64, digest: u64) {
        let span = page_span(&self.header, page);
        assert!(self.range.contains(span) && !span.is_empty(), "a page is sealed by whoever has all of it");
        // SAFETY: no other claim has the page, so nobody else writes its digest, and readers are not let in.
        unsafe { self.regions().write_digest(&self.header, page, digest) };
    }

    /// Digests the pages that were not sealed when they were written, and gives the root for
    /// [`NodeHeap::commit`]; 0 for a record without digests.
    ///
    /// # Panics
    /// If the claim is not on the whole payload.
    pub fn complete(mut self) -> u64 {
        self.root()
    }

    /// Digests the pages that were not sealed, compares with the root, and lets readers in: see [`NodeHeap::publish`].
    /// On an error the record is as it was, and the claim has ended.
    ///
    /// # Panics
    /// If the claim is not on the whole payload.
    pub fn publish(mut self, root: u64) -> Result<(), CommitError> {
        let found = self.root();
        if !self.header.flags.digestless() && found != root {
            return Err(CommitError::Root { found, named: root });
        }
        let header = Header { root, ..self.header };
        self.held.owner.publish_claimed(self.held.slot, &header, &self.held.heap.board)
    }

    fn root(&mut self) -> u64 {
        assert_eq!(self.range.len(), self.header.stripe_len, "only the whole record has a root");
        if self.header.flags.digestless() {
            return 0;
        }
        // SAFETY: no other claim is there, and readers are not let in.
        let known: Vec<u64> = unsafe { self.regions().digests(&self.header) }.iter().collect();
        let unknown = pages(&self.header).zip(known).filter(|&(_, digest)| digest == 0);
        unknown.for_each(|(page, _)| self.seal_page(page));
        // SAFETY: as above.
        self.header.digest_context().root_of(unsafe { self.regions().digests(&self.header) }.iter())
    }

    /// Copies the payload in, with its page digests; the root for [`NodeHeap::commit`].
    ///
    /// # Panics
    /// If the payload has another length than was granted, or the claim is not on all of it.
    pub fn fill(&mut self, payload: &[u8]) -> u64 {
        assert_eq!(self.range.len(), self.header.stripe_len, "a claim on a part is filled by its bytes");
        // SAFETY: no other claim overlaps this one, granted on WRITING; a commit is refused while it is there.
        unsafe { self.regions().fill(&self.header, &[payload], |_| ()) }
    }

    fn regions(&self) -> &SegmentRegions {
        &self.held.owner.regions
    }

    /// Where bytes of the payload are in the region.
    fn in_region(&self, range: Span) -> Span {
        Span::new(self.header.payload_offset + range.offset(), range.len()).expect("inside the record")
    }
}

impl Drop for NodeClaim<'_> {
    fn drop(&mut self) {
        self.held.owner.end_node_claim(self.held.slot, self.range);
    }
}
