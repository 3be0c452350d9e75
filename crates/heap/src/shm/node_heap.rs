//! [`NodeHeap`]: shared memory of a node as its owner uses it: index region, ledgers, segments, and the node's own
//! pins.

use std::io;
use std::sync::{Arc, PoisonError, RwLock};

use moontide_types::limits::UNIT_BYTES;
use moontide_types::record::{Header, RecordLayout, Word};
use moontide_types::{Clock, Epoch, Generation, MonoTime, NodeId, SegmentId, SlotId, Span, SystemClock};

use crate::cell::{Cell, ExpectedWord, SlotRef};
use crate::shm::device_slice::DeviceSlice;
use crate::shm::exit_monitor::ClientExited;
use crate::shm::fill::{page_span, pages};
use crate::shm::grant::{BeginError, CommitError, Grant, KillOutcome, PayloadWriter, ReclaimReport};
use crate::shm::index_region::{IndexRegion, IndexRegionError};
use crate::shm::ledger::{ClientLedger, LedgerError, Ledgers};
use crate::shm::owner::{BeginKind, Segment, SegmentRole};
use crate::shm::region::{HugePages, Region};
use crate::shm::segment::{PayloadMemory, SegmentDescriptor, SegmentError, SegmentMemory, SegmentRegions};
use crate::word::Transition;

/// Memory that a node shares with the processes of its host.
#[derive(Debug)]
pub struct NodeHeap {
    index_region: IndexRegion,
    ledgers: Ledgers,
    segments: RwLock<Vec<Arc<Segment>>>,
    node: (NodeId, Generation),
    huge: HugePages,
}

/// Configuration of a node's heap.
#[derive(Clone, Copy, Debug)]
pub struct HeapConfig {
    /// Id of the node.
    pub node: NodeId,
    /// Incarnation of the node: grows with every start.
    pub generation: Generation,
    /// Maximum number of slots of all segments; determines the size of the index.
    pub slots_max: u64,
    /// Pages of the index and of the header tables. With millions of objects a lookup on ordinary pages spends most
    /// of its time on TLB misses.
    pub huge: HugePages,
}

impl NodeHeap {
    /// Creates a heap without segments. Its index is closed until [`IndexRegion::set_open`].
    pub fn create(config: HeapConfig) -> Result<NodeHeap, IndexRegionError> {
        let index_region =
            IndexRegion::create(config.node, config.generation, config.slots_max, config.huge)?;
        let ledgers = Ledgers::new(config.slots_max);
        let node = (config.node, config.generation);
        Ok(NodeHeap { index_region, ledgers, segments: RwLock::default(), node, huge: config.huge })
    }

    /// Returns the index region, which clients map.
    pub fn index_region(&self) -> &IndexRegion {
        &self.index_region
    }

    /// Returns the ledgers, which contain all pins.
    pub fn ledgers(&self) -> &Ledgers {
        &self.ledgers
    }

    /// Adds a segment of `slots` headers and `units` units, a multiple of 8: whole pages of 4 KiB. The slots of all
    /// segments together are at most the heap's `slots_max`. `huge` is for the payload.
    ///
    /// The segment's generation is the heap's, so the node refuses grants for a segment with the same id of an
    /// earlier incarnation.
    pub fn add_segment(&self, slots: u32, units: u32, huge: HugePages) -> Result<Arc<Segment>, SegmentError> {
        self.add(slots, units, SegmentMemory::Owned(huge), SegmentRole::Granted)
    }

    /// As [`NodeHeap::add_segment`], in existing memory: all of `payload`, which is zero, or whose bytes are no
    /// longer used.
    ///
    /// # Safety
    /// From now on the bytes belong to the segment: they may be written only under a claim, even if they can be
    /// accessed in another way.
    pub unsafe fn add_segment_in(&self, slots: u32, payload: Region) -> Result<Arc<Segment>, SegmentError> {
        let units = u32::try_from(payload.len() / UNIT_BYTES).unwrap_or(u32::MAX);
        self.add(slots, units, SegmentMemory::External(payload), SegmentRole::Granted)
    }

    /// As [`NodeHeap::add_segment_in`], with the records' bytes in a device's memory, which is as long as
    /// `address_range`. Of the latter only the parts after the bytes are used. Such records have no digests, and are
    /// pushed by clients.
    ///
    /// # Safety
    /// As [`NodeHeap::add_segment_in`], of both.
    pub unsafe fn add_device_segment(
        &self,
        slots: u32,
        address_range: Region,
        bytes: DeviceSlice,
    ) -> Result<Arc<Segment>, SegmentError> {
        let units = u32::try_from(address_range.len() / UNIT_BYTES).unwrap_or(u32::MAX);
        self.add(slots, units, SegmentMemory::Device(address_range, bytes), SegmentRole::Granted)
    }

    /// As [`NodeHeap::add_segment`], for any memory and role.
    pub(super) fn add(
        &self,
        slots: u32,
        units: u32,
        payload: SegmentMemory,
        role: SegmentRole,
    ) -> Result<Arc<Segment>, SegmentError> {
        let mut segments = self.segments.write().unwrap_or_else(PoisonError::into_inner);
        let first_global_slot = segments.iter().map(|s| u64::from(s.shape().slots)).sum::<u64>();
        let segment = SegmentId(segments.len() as u32);
        if first_global_slot + u64::from(slots) > self.index_region.slots_max() {
            return Err(SegmentError::SlotsMax {
                slots,
                used: first_global_slot,
                max: self.index_region.slots_max(),
            });
        }
        let medium = match payload {
            SegmentMemory::Device(..) => PayloadMemory::Device,
            SegmentMemory::Owned(_) | SegmentMemory::External(_) => PayloadMemory::Host,
        };
        let shape =
            SegmentDescriptor { segment, generation: self.node.1, slots, units, first_global_slot, medium };
        let segment = Arc::new(Segment::create(shape, self.node, (self.huge, payload), role)?);
        segments.push(Arc::clone(&segment));
        Ok(segment)
    }

    /// Returns all segments, staging included.
    pub fn segments(&self) -> Vec<Arc<Segment>> {
        self.segments.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Returns a segment by its id.
    pub fn segment(&self, segment: SegmentId) -> Option<Arc<Segment>> {
        let segments = self.segments.read().unwrap_or_else(PoisonError::into_inner);
        segments.get(segment.0 as usize).cloned()
    }

    /// Creates a ledger for a new client.
    pub(crate) fn admit(&self, pid: u32) -> Result<Arc<ClientLedger>, LedgerError> {
        self.ledgers.admit(pid)
    }

    /// FREE → WRITING: the writer may claim the slot and fill the extent. The grant's term must be the one passed to
    /// [`Segment::adopt_term`]. Idempotent for the same grant.
    pub fn begin(&self, segment: SegmentId, grant: &Grant<'_>) -> Result<(), BeginError> {
        self.segment(segment).ok_or(BeginError::Segment(segment))?.begin(grant, BeginKind::New, &self.ledgers)
    }

    /// FREE → WRITING for a record that was complete before and is restored in its old version, from disk or from
    /// another node. The version may be below the slot's last one (but not equal to it), and of an earlier term than
    /// the grant's, which must be the term that the segment has adopted. The writer is [`PayloadWriter::Node`].
    /// Idempotent for the same grant.
    ///
    /// The slot's fence against late begins does not change: when the copy is freed the slot is FREE at the higher of
    /// the two, and a begin that failed before fails then, too.
    pub fn begin_copy(&self, segment: SegmentId, grant: &Grant<'_>) -> Result<(), BeginError> {
        self.segment(segment).ok_or(BeginError::Segment(segment))?.begin(
            grant,
            BeginKind::Copy,
            &self.ledgers,
        )
    }

    /// WRITING → READY: readers may pin the record, and local ones find it through the index. Idempotent for the same
    /// root, whichever writer calls.
    pub fn commit(
        &self,
        segment: SegmentId,
        slot: SlotId,
        epoch: Epoch,
        root: u64,
        writer: PayloadWriter,
    ) -> Result<(), CommitError> {
        let owner = self.segment(segment).ok_or(CommitError::Slot { segment, slot })?;
        owner.commit(slot, epoch, root, writer, &self.index_region, &self.ledgers)
    }

    /// WRITING → READY in one step, for a record that the node writes: claims all of it, computes the missing
    /// digests, compares with the root, and publishes without releasing the claim, so that a late write of the same
    /// bytes, from an abandoned connection, cannot come in between. Fails with [`CommitError::Claimed`] while such a
    /// write is in progress; retry later. Idempotent for the same root.
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
                owner.check_unclaimed(slot, epoch, root)
            }
        }
    }

    /// WRITING or READY → DEAD, at once. [`NodeHeap::reclaim`] frees the space, not before `not_before`. A second
    /// kill with an earlier time moves that time forward, and never back.
    pub fn kill(&self, segment: SegmentId, slot: SlotId, epoch: Epoch, not_before: MonoTime) -> KillOutcome {
        match self.segment(segment) {
            Some(owner) => owner.kill(slot, epoch, not_before, &self.index_region),
            None => KillOutcome::NotFound,
        }
    }

    /// Cancels a reservation that may not have begun: a late begin fails from now on. If the slot holds a copy of an
    /// older version, the word does not change and the result is `Refused` with it; a begin after the copy is gone
    /// fails, too.
    pub fn fence_epoch(&self, segment: SegmentId, slot: SlotId, epoch: Epoch) -> Transition {
        match self.segment(segment) {
            Some(owner) => owner.fence_epoch(slot, epoch),
            None => Transition::Refused(Word::default()),
        }
    }

    /// DEAD → FREE for all records that are due and not pinned in a ledger. One ledger scan for all.
    pub fn reclaim(&self, now: MonoTime) -> ReclaimReport {
        self.reclaim_in(self.segments(), now)
    }

    /// As [`NodeHeap::reclaim`], in these segments only.
    pub(super) fn reclaim_in(
        &self,
        segments: impl IntoIterator<Item = Arc<Segment>>,
        now: MonoTime,
    ) -> ReclaimReport {
        let mut out = ReclaimReport::default();
        let mut due = Vec::new();
        for segment in segments {
            let (now_due, later) = segment.take_dead(now);
            out.draining += later;
            if !now_due.is_empty() {
                due.push((segment, now_due));
            }
        }
        if due.is_empty() {
            return out;
        }
        // All of them are DEAD by now, so a later attempt to pin one of them fails.
        let pins = self.ledgers.pins();
        for (segment, due) in due {
            segment.free_unpinned(due, |segment, slot| pins.contains(segment, slot), &mut out);
        }
        out
    }

    /// Handles the exit of a client: drops its pins and kills its open writes. Returns the killed records.
    pub fn client_exited(&self, exited: ClientExited) -> Vec<(SegmentId, SlotId, Epoch)> {
        let client = exited.client();
        self.ledgers.forget(client);
        let mut killed = Vec::new();
        for segment in self.segments() {
            let id = segment.shape().segment;
            for (slot, epoch) in segment.slots_written_by(PayloadWriter::Client(client)) {
                // Only the writer had access, so there is no lease to wait for.
                if self.kill(id, slot, epoch, MonoTime(0)) == KillOutcome::Killed {
                    killed.push((id, slot, epoch));
                }
            }
        }
        killed
    }

    /// Pins a READY record for the node itself, which serves it or writes it to disk. Returns `None` if the slot is
    /// not READY at `epoch`.
    pub fn pin(&self, segment: SegmentId, slot: SlotId, epoch: Epoch) -> Option<NodePin<'_>> {
        let owner = self.segment(segment)?;
        let held = NodeCellPin::acquire(self, owner, slot, ExpectedWord::ReadyAt(epoch))?;
        let header = held.header();
        Some(NodePin { held, header })
    }

    /// Returns the header of a record in any state, also of one that a client writes; its root is not valid while the record
    /// is WRITING. `None` if the slot has another version.
    pub fn header(&self, segment: SegmentId, slot: SlotId, epoch: Epoch) -> Option<Header> {
        self.segment(segment)?.header_at(slot, epoch)
    }

    /// Returns whether the slot has this version, of an object of this tenant.
    pub fn is_of_tenant(&self, segment: SegmentId, slot: SlotId, epoch: Epoch, tenant: &str) -> bool {
        let Some(owner) = self.segment(segment) else { return false };
        let is_of_tenant = |header: Header| owner.regions.is_of_tenant(&header, tenant);
        // The slot may be reused while its bytes are read: then it has another version afterwards.
        owner.header_at(slot, epoch).is_some_and(is_of_tenant) && owner.header_at(slot, epoch).is_some()
    }

    /// Claims the payload of a record that was granted to [`PayloadWriter::Node`]. Returns `None` if the node does
    /// not write it in this version, or if a claim exists.
    pub fn claim(&self, segment: SegmentId, slot: SlotId, epoch: Epoch) -> Option<NodeClaim<'_>> {
        self.claim_part(segment, slot, epoch, |header| Span::new(0, header.stripe_len))
    }

    /// As [`NodeHeap::claim`], for a range of the payload: several threads may fill a record, each its own bytes.
    /// Returns `None`, too, if the range exceeds the payload.
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
        let held = NodeCellPin::acquire(self, owner, slot, ExpectedWord::WritingAt(epoch))?;
        let (header, range, was_complete) = held.owner.add_node_claim(slot, held.word, range_of)?;
        Some(NodeClaim { held, header, range, is_written: false, was_complete })
    }

    /// Stores a heartbeat with the time of the system clock.
    pub fn heartbeat(&self) {
        self.index_region.heartbeat(SystemClock.now());
    }
}

/// A slot that is pinned in one of the node's own cells.
#[derive(Debug)]
struct NodeCellPin<'a> {
    owner: Arc<Segment>,
    cell: Arc<Cell>,
    heap: &'a NodeHeap,
    slot: SlotId,
    word: Word,
}

impl<'a> NodeCellPin<'a> {
    fn acquire(
        heap: &'a NodeHeap,
        owner: Arc<Segment>,
        slot: SlotId,
        expect: ExpectedWord,
    ) -> Option<NodeCellPin<'a>> {
        let cell = heap.ledgers.own().acquire();
        let name = SlotRef::new(owner.regions.shape.segment, slot);
        match owner.regions.word(slot).and_then(|word| cell.acquire(name, word, expect).ok()) {
            Some(word) => Some(NodeCellPin { owner, cell, heap, slot, word }),
            None => {
                heap.ledgers.own().release(cell);
                None
            }
        }
    }

    fn header(&self) -> Header {
        // SAFETY: the pin was granted on this word.
        unsafe { self.owner.regions.header(self.slot, self.word) }.expect("only the owner writes headers")
    }
}

impl Drop for NodeCellPin<'_> {
    fn drop(&mut self) {
        self.cell.release();
        self.heap.ledgers.own().release(Arc::clone(&self.cell));
    }
}

/// Pin of the node on a READY record.
#[derive(Debug)]
pub struct NodePin<'a> {
    held: NodeCellPin<'a>,
    header: Header,
}

impl NodePin<'_> {
    /// Returns the record's header.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Returns whether the object belongs to this tenant.
    pub fn is_of_tenant(&self, tenant: &str) -> bool {
        self.held.owner.regions.is_of_tenant(&self.header, tenant)
    }

    /// Returns whether the payload is in a device's memory, from which [`NodePin::copy_out`] copies it.
    pub fn is_in_device(&self) -> bool {
        !self.held.owner.regions.has_bytes()
    }

    /// Returns the payload.
    ///
    /// # Panics
    /// If it is in a device's memory. Records with digests never are.
    pub fn payload(&self) -> &[u8] {
        assert!(!self.is_in_device(), "the payload is in device memory; use copy_out");
        let regions = &self.held.owner.regions;
        let payload =
            Span::new(self.header.payload_offset, self.header.stripe_len).expect("begin checked it");
        // SAFETY: READY bytes do not change under a pin.
        unsafe { regions.bytes(payload) }
    }

    /// Copies a range of the payload from host or device memory.
    ///
    /// # Panics
    /// If the range exceeds the payload.
    pub fn copy_out(&self, range: Span) -> io::Result<Vec<u8>> {
        assert!(range.end() <= self.header.stripe_len, "range exceeds the payload");
        match self.held.owner.regions.device() {
            None => Ok(self.payload()[range.offset() as usize..range.end() as usize].to_vec()),
            Some(device) => {
                let mut bytes = vec![0; range.len() as usize];
                device.read(self.header.payload_offset + range.offset(), &mut bytes)?;
                Ok(bytes)
            }
        }
    }

    /// Returns the page digests in stored form; empty for a record without digests.
    pub fn digests(&self) -> &[u8] {
        // SAFETY: as above.
        unsafe { self.held.owner.regions.digests(&self.header) }.as_bytes()
    }

    /// Returns tenant and key in stored form.
    pub fn key(&self) -> &[u8] {
        self.after_payload(RecordLayout::key)
    }

    /// Returns the attributes in stored form.
    pub fn attributes(&self) -> &[u8] {
        self.after_payload(RecordLayout::attributes)
    }

    fn after_payload(&self, part: impl FnOnce(&RecordLayout) -> Span) -> &[u8] {
        let layout = self.header.layout().expect("begin checked it");
        let part = part(&layout);
        let offset = self.header.payload_offset + part.offset();
        let span = Span::new(offset, part.len()).expect("begin checked it");
        // SAFETY: as above.
        unsafe { self.held.owner.regions.bytes(span) }
    }
}

/// Claim of a thread of the node on a record, or on a part of one, that it fills with bytes from the network or from
/// disk.
#[derive(Debug)]
pub struct NodeClaim<'a> {
    held: NodeCellPin<'a>,
    header: Header,
    /// Bytes of the payload to which this claim has exclusive access.
    range: Span,
    /// All of these bytes are written, by this claim.
    is_written: bool,
    /// The whole payload was written before this claim.
    was_complete: bool,
}

impl NodeClaim<'_> {
    /// Returns the header as granted; it has the writer's tag in the place of the root until the commit.
    pub fn header(&self) -> &Header {
        &self.header
    }

    /// Returns whether the object belongs to this tenant.
    pub fn is_of_tenant(&self, tenant: &str) -> bool {
        self.held.owner.regions.is_of_tenant(&self.header, tenant)
    }

    /// Returns the claimed range of the payload.
    pub fn range(&self) -> Span {
        self.range
    }

    /// Records that all claimed bytes are written. Without this they count as not written, and a record with such bytes
    /// is not published: a write that fails in the middle leaves bytes of an earlier record.
    pub fn set_written(&mut self) {
        self.is_written = true;
    }

    /// Returns a part of the claimed bytes for writing. Offsets are those of the payload. Clears the digests of its
    /// pages. When all claimed bytes are written, call [`NodeClaim::set_written`].
    ///
    /// # Panics
    /// If the part is not within the claim.
    pub fn bytes_mut(&mut self, part: Span) -> &mut [u8] {
        assert!(self.range.contains(part), "part of the payload is not within the claim");
        self.held.owner.clear_digests(&self.header, part);
        // SAFETY: ranges of claims do not overlap, readers get no pin while the record is WRITING, and the slot
        // is not reused while the claim's cell pins it.
        unsafe { self.held.owner.regions.bytes_mut(self.in_region(part)) }
    }

    /// Computes the digest of a page whose bytes are all written, best while they are in cache.
    ///
    /// # Panics
    /// If the claim does not cover the whole page.
    pub fn digest_page(&mut self, page: u64) {
        let span = page_span(&self.header, page);
        assert!(self.range.contains(span) && !span.is_empty(), "the claim does not cover the whole page");
        // SAFETY: no other claim covers the page, nothing borrows from this one, and readers get no pin.
        unsafe {
            let digest = self.header.digest_context().page(page, self.regions().bytes(self.in_region(span)));
            self.regions().write_digest(&self.header, page, digest);
        }
    }

    /// As [`NodeClaim::digest_page`], with a digest that the caller has computed from exactly the bytes of the page,
    /// so that they are not read twice: they were verified on their way from disk. A wrong one is detected when the
    /// digests do not lead to the record's root, unless that is wrong, too. Writing to the page clears it.
    ///
    /// # Panics
    /// If the claim does not cover the whole page.
    pub fn set_page_digest(&mut self, page: u64, digest: u64) {
        let span = page_span(&self.header, page);
        assert!(self.range.contains(span) && !span.is_empty(), "the claim does not cover the whole page");
        // SAFETY: no other claim covers the page, so no other thread writes its digest, and readers get no pin.
        unsafe { self.regions().write_digest(&self.header, page, digest) };
    }

    /// Computes the missing page digests and returns the root for [`NodeHeap::commit`]; 0 for a record without
    /// digests.
    ///
    /// # Panics
    /// If the claim does not cover the whole payload.
    pub fn complete(mut self) -> u64 {
        self.root()
    }

    /// Computes the missing page digests, compares with the root, and publishes the record: see
    /// [`NodeHeap::publish`]. On an error the record does not change, and the claim has ended.
    ///
    /// # Panics
    /// If the claim does not cover the whole payload.
    pub fn publish(mut self, root: u64) -> Result<(), CommitError> {
        // Before the root, whose comparison would tell what the unwritten bytes are.
        if !self.is_written && !self.was_complete {
            return Err(CommitError::Incomplete);
        }
        let found = self.root();
        if !self.header.flags.digestless() && found != root {
            return Err(CommitError::Root { found, named: root });
        }
        let header = Header { root, ..self.header };
        self.held.owner.publish_claimed(self.held.slot, &header, &self.held.heap.index_region)
    }

    fn root(&mut self) -> u64 {
        assert_eq!(self.range.len(), self.header.stripe_len, "only a claim on the whole record has a root");
        if self.header.flags.digestless() {
            return 0;
        }
        // SAFETY: no other claim exists, and readers get no pin.
        let known: Vec<u64> = unsafe { self.regions().digests(&self.header) }.iter().collect();
        let unknown = pages(&self.header).zip(known).filter(|&(_, digest)| digest == 0);
        unknown.for_each(|(page, _)| self.digest_page(page));
        // SAFETY: as above.
        self.header.digest_context().root_of(unsafe { self.regions().digests(&self.header) }.iter())
    }

    /// Copies the payload into the record, with its page digests, and returns the root for [`NodeHeap::commit`].
    ///
    /// # Panics
    /// If the payload's length is not the granted one, or the claim does not cover all of it.
    pub fn fill(&mut self, payload: &[u8]) -> u64 {
        assert_eq!(self.range.len(), self.header.stripe_len, "the claim does not cover the whole payload");
        // SAFETY: no other claim overlaps this one, granted on WRITING; a commit fails while it exists.
        let root = unsafe { self.regions().fill(&self.header, &[payload], |_| ()) };
        self.is_written = true;
        root
    }

    fn regions(&self) -> &SegmentRegions {
        &self.held.owner.regions
    }

    /// Returns the range of payload bytes in the region.
    fn in_region(&self, range: Span) -> Span {
        Span::new(self.header.payload_offset + range.offset(), range.len()).expect("inside the record")
    }
}

impl Drop for NodeClaim<'_> {
    fn drop(&mut self) {
        self.held.owner.end_node_claim(self.held.slot, &self.header, self.range, self.is_written);
    }
}
