//! [`RankStore`]: ranks of one host write pages directly into each other's memory.
//!
//! Each rank runs a node whose segments are in the rank's region of a [`World`], so that every rank has them mapped; an
//! ordinary master allocates the space. A layout page and a [`ReadyFlag`](moontide_symmetric::ReadyFlag) for every slot
//! follow the segments.
//!
//! ```text
//!   region of a rank:  0 … memory_bytes │ layout page │ flags, 64 B per slot
//!                      consecutive segments
//!
//!   producer                                              consumer
//!     open_for_write ─▶ PushWriter ── ticket, by any ──▶   open_for_read ─▶ PendingRecord
//!       write_page, any thread, any order  means             wait: polls the flag
//!       the last one sets the flag  ───────────────────▶    ReadyRecord: zero-copy bytes
//!     commit: an ordinary object of the store
//! ```
//!
//! The records and their flags may also be in device memory, at the same offsets of a [`DeviceWorld`]'s regions. The
//! layout page, and the headers that the nodes write, stay in the world's regions ([`RankStore::open_on_device`]).
//!
//! The rules of the store apply: the reservation of a producer that exits is released, a consumer's memory is not
//! reused while it waits or reads, and an outdated ticket is refused. Kernels use addresses instead of calls:
//! [`PushWriter::address`], [`PendingRecord::address`] and the offsets in a [`Ticket`].
//!
//! TLS is that of the parts: the [`Store`] that is passed to [`RankStore::open`] has the certificate of a tenant
//! ([`StoreConfig::ca`](crate::StoreConfig::ca), `cert` and `key`), the nodes and the master have their own in the same settings.
//!
//! | file | content |
//! |---|---|
//! | `ticket` | [`Ticket`] |
//! | `writer` | [`PushWriter`]: record at the producer |
//! | `pending` | [`PendingRecord`], [`ReadyRecord`]: record at the consumer |
//! | `memory` | memory of records and flags, on the host or on devices |
//! | `device_map` | host memory mapped for kernels: header words and ledger cells |
//! | `kernel_cell` | [`DeviceKernelCell`]: ledger cell of kernels |

mod device_map;
mod kernel_cell;
mod memory;
mod pending;
mod ticket;
mod writer;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

pub use kernel_cell::DeviceKernelCell;
use memory::RankMemory;
use moontide_symmetric::{DeviceWorld, READY_FLAG_BYTES, Rank, WaitError, World};
use moontide_types::limits::UNIT_BYTES;
use moontide_types::record::State;
use moontide_types::{ErrorCode, NodeId, SegmentId, SlotId, Span};
pub use pending::{PendingRecord, ReadyRecord, WaitOutcome};
pub use ticket::Ticket;
pub use writer::{PushCommitError, PushWriter};

use crate::config::PutOptions;
use crate::error::StoreError;
use crate::in_place::RecordAddress;
use crate::store::Store;

const PAGE_BYTES: u64 = 4096;
const MAGIC: u64 = u64::from_le_bytes(*b"MTHOP001");
/// Words of the layout page: magic, node, number of segments, bytes and slots per segment.
const WORDS: u64 = 5;
/// Least number of slots of a segment, however small it is.
const SLOTS_MIN: u64 = 64;
/// Most segments for which [`RankStore::region_bytes`] reserves [`SLOTS_MIN`] slots each.
const SEGMENTS_SMALL: u64 = 256;

/// Layout of a rank's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankLayout {
    /// Node of the rank.
    pub node: NodeId,
    /// Number of consecutive segments.
    pub segments: u32,
    /// Bytes per segment.
    pub segment_bytes: u64,
    /// Slots per segment.
    pub slots: u32,
}

impl RankLayout {
    fn slots_all(&self) -> u64 {
        u64::from(self.segments) * u64::from(self.slots)
    }

    fn flag_at(&self, memory_bytes: u64, segment: SegmentId, slot: SlotId) -> Option<u64> {
        let exists = segment.0 < self.segments && slot.0 < self.slots;
        let number = u64::from(segment.0) * u64::from(self.slots) + u64::from(slot.0);
        exists.then(|| memory_bytes + PAGE_BYTES + number * READY_FLAG_BYTES)
    }

    /// Returns whether the layout fits into a rank's region.
    fn fits(&self, memory_bytes: u64, region_bytes: u64) -> bool {
        let flags = self.slots_all().checked_mul(READY_FLAG_BYTES);
        let end = flags.and_then(|flags| flags.checked_add(memory_bytes.checked_add(PAGE_BYTES)?));
        let bytes = u64::from(self.segments).checked_mul(self.segment_bytes);
        let is_aligned = memory_bytes.is_multiple_of(PAGE_BYTES) && self.segments > 0 && self.slots > 0;
        is_aligned
            && bytes.is_some_and(|bytes| bytes <= memory_bytes)
            && end.is_some_and(|end| end <= region_bytes)
    }
}

/// Failure to open a [`RankStore`].
#[derive(Debug, thiserror::Error)]
pub enum RankStoreError {
    /// The world's regions are too small for the records and their flags.
    #[error(
        "a region of {region_bytes} bytes has no space for {memory_bytes} bytes of records and their flags; make the \
         world's regions {} bytes long", RankStore::region_bytes(*memory_bytes, *slot_bytes)
    )]
    Region {
        /// Length of a region, in bytes.
        region_bytes: u64,
        /// Bytes for records.
        memory_bytes: u64,
        /// Bytes per slot.
        slot_bytes: u64,
    },
    /// The device world does not match the world.
    #[error(
        "the regions of the devices have {found} bytes, those of the world {needed}; join both worlds with the same \
         ranks, and with device regions that are at least as long"
    )]
    DeviceWorld {
        /// Length of a device region, in bytes.
        found: u64,
        /// Required length, in bytes.
        needed: u64,
    },
    /// The layout of a rank is missing or invalid.
    #[error("rank {0} has no valid memory layout; open all ranks with the same settings")]
    LayoutMismatch(Rank),
    /// The other ranks did not arrive in time.
    #[error(transparent)]
    Wait(#[from] WaitError),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// Access of a rank to the memory of all ranks.
#[derive(Clone, Debug)]
pub struct RankStore {
    memory: RankMemory,
    store: Store,
    memory_bytes: u64,
    layouts: Arc<[RankLayout]>,
}

impl RankStore {
    /// Returns the length of the world's regions for `memory_bytes` of records with one slot per `slot_bytes`.
    pub fn region_bytes(memory_bytes: u64, slot_bytes: u64) -> u64 {
        let slots = memory_bytes / slot_bytes.max(UNIT_BYTES) + SLOTS_MIN * SEGMENTS_SMALL;
        (memory_bytes + PAGE_BYTES + slots * READY_FLAG_BYTES).next_multiple_of(PAGE_BYTES)
    }

    /// Publishes the layout of the first `memory_bytes` of this rank's region, and reads those of the other ranks. All
    /// ranks call it; it waits for them.
    ///
    /// # Safety
    /// The bytes from `memory_bytes` to the end of every rank's region are used for nothing else.
    #[expect(unsafe_code, reason = "what others do with the bytes cannot be checked")]
    pub unsafe fn open(
        world: Arc<World>,
        store: Store,
        memory_bytes: u64,
        own_layout: RankLayout,
        timeout: Duration,
    ) -> Result<RankStore, RankStoreError> {
        RankStore::open_on(RankMemory::of_host(world), store, memory_bytes, own_layout, timeout)
    }

    /// As [`RankStore::open`], with the bytes and flags of the records in the ranks' regions of `device`, which are at
    /// least as long as the world's.
    ///
    /// # Safety
    /// As [`RankStore::open`], in both worlds.
    #[expect(unsafe_code, reason = "what others do with the bytes cannot be checked")]
    pub unsafe fn open_on_device(
        world: Arc<World>,
        device: Arc<DeviceWorld>,
        store: Store,
        memory_bytes: u64,
        own_layout: RankLayout,
        timeout: Duration,
    ) -> Result<RankStore, RankStoreError> {
        let shape = world.shape();
        let (ranks, found) = (device.bases().len(), device.region(device.rank()).len());
        if found < shape.bytes || ranks != shape.ranks as usize || device.rank() != world.rank() {
            return Err(RankStoreError::DeviceWorld { found, needed: shape.bytes });
        }
        let memory = RankMemory::of_device(world, device)?;
        RankStore::open_on(memory, store, memory_bytes, own_layout, timeout)
    }

    fn open_on(
        memory: RankMemory,
        store: Store,
        memory_bytes: u64,
        own_layout: RankLayout,
        timeout: Duration,
    ) -> Result<RankStore, RankStoreError> {
        let world = memory.world();
        let region_bytes = world.shape().bytes;
        if !own_layout.fits(memory_bytes, region_bytes) {
            let slot_bytes = memory_bytes / own_layout.slots_all().max(1);
            return Err(RankStoreError::Region { region_bytes, memory_bytes, slot_bytes });
        }
        let page = world.words(world.rank(), memory_bytes, WORDS);
        let values = [
            own_layout.node.0,
            own_layout.segments.into(),
            own_layout.segment_bytes,
            own_layout.slots.into(),
        ];
        for (word, value) in page[1..].iter().zip(values) {
            word.store(value, Ordering::Relaxed);
        }
        // Release: pairs with the Acquire loads below; a rank that reads MAGIC reads the other words. The barrier
        // orders them, too.
        page[0].store(MAGIC, Ordering::Release);
        world.barrier(timeout)?;
        let layout_of = |number: u32| {
            let page = world.words(Rank(number), memory_bytes, WORDS);
            let word = |at: usize| page[at].load(Ordering::Acquire);
            let narrow = |at: usize| u32::try_from(word(at)).unwrap_or(0);
            let layout = RankLayout {
                node: NodeId(word(1)),
                segments: narrow(2),
                segment_bytes: word(3),
                slots: narrow(4),
            };
            let is_valid = word(0) == MAGIC && layout.segments > 0 && layout.fits(memory_bytes, region_bytes);
            if is_valid { Ok(layout) } else { Err(RankStoreError::LayoutMismatch(Rank(number))) }
        };
        let layouts = (0..world.shape().ranks).map(layout_of).collect::<Result<_, _>>()?;
        Ok(RankStore { memory, store, memory_bytes, layouts })
    }

    /// Returns the world.
    pub fn world(&self) -> &Arc<World> {
        self.memory.world()
    }

    /// Returns the addresses of the ranks' record regions in this process, for kernels.
    pub fn bases(&self) -> Vec<u64> {
        self.memory.bases()
    }

    /// Returns the underlying store.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Returns the layout of a rank's memory.
    pub fn layout(&self, rank: Rank) -> Option<RankLayout> {
        self.layouts.get(rank.index()).copied()
    }

    /// Returns the rank of a node.
    pub fn rank_of(&self, node: NodeId) -> Option<Rank> {
        let at = self.layouts.iter().position(|layout| layout.node == node)?;
        Some(Rank(at as u32))
    }

    /// Reserves memory for an object that is written in pages: in the memory of `owner`, by default this rank. If it
    /// has no space, another rank's memory is used.
    pub fn open_for_write(
        &self,
        key: &[u8],
        bytes: u64,
        page_bytes: u64,
        owner: Option<Rank>,
    ) -> Result<PushWriter, StoreError> {
        let wrong = |what, rule| Err(StoreError::InvalidArgument { what, rule });
        let Some(layout) = self.layout(owner.unwrap_or(self.world().rank())) else {
            return wrong("owner", "a rank of the world");
        };
        if !are_pages(bytes, page_bytes) {
            return wrong("page_bytes", PAGES_RULE);
        }
        let options = PutOptions { prefer: vec![layout.node.into()], ..PutOptions::default() };
        let plan = self.store.open_in_place(self.memory.medium(), key, bytes, &options)?;
        let (address, stripe) = (plan.record_address(), plan.stripe());
        // The master may have chosen another local node that has space.
        let rank = self.rank_of(address.node).ok_or(StoreError::refused(ErrorCode::NoSpace))?;
        let ticket = self.ticket(rank, address, stripe.payload_offset, bytes, page_bytes);
        let ticket = ticket.ok_or(StoreError::refused(ErrorCode::Internal))?;
        let span = Span::new(stripe.payload_offset, bytes).ok_or(StoreError::refused(ErrorCode::Internal))?;
        self.memory.prepare(&ticket, span)?;
        Ok(PushWriter::new(self.memory.clone(), plan, ticket))
    }

    fn ticket(
        &self,
        rank: Rank,
        address: RecordAddress,
        offset: u64,
        bytes: u64,
        page_bytes: u64,
    ) -> Option<Ticket> {
        let layout = self.layout(rank)?;
        let payload_offset =
            u64::from(address.segment.0).checked_mul(layout.segment_bytes)?.checked_add(offset)?;
        let RecordAddress { segment, generation, slot, epoch, .. } = address;
        let flag_offset = layout.flag_at(self.memory_bytes, segment, slot)?;
        Some(Ticket {
            rank,
            segment,
            generation,
            slot,
            epoch,
            payload_offset,
            bytes,
            page_bytes,
            flag_offset,
        })
    }

    /// Looks up a complete object in the ranks' memory and holds its slot. `None` if it does not exist, or is
    /// elsewhere.
    pub fn find(&self, key: &[u8], page_bytes: u64) -> Result<Option<PendingRecord>, StoreError> {
        let lookup = || match self.locate(key, page_bytes)? {
            Some(ticket) => self.open_for_read(ticket),
            None => Ok(None),
        };
        match lookup() {
            Ok(Some(found)) => Ok(Some(found)),
            Err(error @ StoreError::InvalidArgument { .. }) => Err(error),
            // The cached location may be stale: look it up at the master.
            Ok(None) | Err(_) => {
                self.store.forget_location(key);
                lookup()
            }
        }
    }

    /// Returns the ticket of a complete object in the ranks' memory, by the location cache or the master. `None` if it
    /// does not exist, or is elsewhere.
    fn locate(&self, key: &[u8], page_bytes: u64) -> Result<Option<Ticket>, StoreError> {
        if !are_pages(1, page_bytes) {
            return Err(StoreError::InvalidArgument { what: "page_bytes", rule: PAGES_RULE });
        }
        let Some(location) = self.store.get_location(key)? else { return Ok(None) };
        let of = |stripe: &crate::write_plan::StripeLocation| {
            let rank = self.rank_of(stripe.node).filter(|_| stripe.len == location.len && stripe.len > 0)?;
            let address = RecordAddress {
                node: stripe.node,
                segment: stripe.segment,
                generation: stripe.generation,
                slot: stripe.slot,
                epoch: location.epoch,
            };
            (stripe.medium == self.memory.medium())
                .then(|| self.ticket(rank, address, stripe.payload_offset, stripe.len, page_bytes))?
        };
        Ok(location.stripes.iter().find_map(of))
    }

    /// Holds the slot of a record that another process writes or has written, so that its memory is not reused. `None`:
    /// the record has ended. Fails for a record that this process itself is writing.
    pub fn open_for_read(&self, ticket: Ticket) -> Result<Option<PendingRecord>, StoreError> {
        let wrong = || StoreError::InvalidArgument {
            what: "a ticket",
            rule: "a valid ticket of another rank's writer",
        };
        let layout = self.layout(ticket.rank).ok_or_else(wrong)?;
        let address = RecordAddress {
            node: layout.node,
            segment: ticket.segment,
            generation: ticket.generation,
            slot: ticket.slot,
            epoch: ticket.epoch,
        };
        let start = u64::from(ticket.segment.0).checked_mul(layout.segment_bytes).ok_or_else(wrong)?;
        let offset = ticket.payload_offset.checked_sub(start).ok_or_else(wrong)?;
        let is_valid = ticket.bytes > 0
            && offset.checked_add(ticket.bytes).is_some_and(|end| end <= layout.segment_bytes)
            && are_pages(ticket.bytes, ticket.page_bytes)
            && layout.flag_at(self.memory_bytes, ticket.segment, ticket.slot) == Some(ticket.flag_offset);
        if !is_valid {
            return Err(wrong());
        }
        let span = Span::new(offset, ticket.bytes).ok_or_else(wrong)?;
        let Some(hold) = self.store.hold_slot(address)? else { return Ok(None) };
        // The ticket is not trusted. The span of the record is known from its header once it is complete, and before
        // that from the flag, which the writer prepares before it hands out the ticket.
        let found = match hold.complete_span() {
            Some(found) => Some(found),
            None => self.memory.span(&ticket)?,
        };
        match found {
            Some(found) if found == span => {
                Ok(Some(PendingRecord::new(self.memory.clone(), hold, span, ticket)))
            }
            // The record has just ended, possibly before its writer prepared the flag.
            None if !matches!(hold.state(), Some(State::Writing | State::Ready)) => Ok(None),
            _ => Err(wrong()),
        }
    }
}

/// Rule for `page_bytes`.
const PAGES_RULE: &str = "a multiple of 512, and large enough for fewer than 2³² pages";

fn are_pages(bytes: u64, page_bytes: u64) -> bool {
    page_bytes > 0
        && page_bytes.is_multiple_of(UNIT_BYTES)
        && u32::try_from(bytes.div_ceil(page_bytes)).is_ok()
}
