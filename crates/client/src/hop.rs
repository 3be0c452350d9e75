//! [`Hop`]: ranks of one host that write pages into each other's memory, with nobody in between.
//!
//! Each rank runs a node whose segments lie in the rank's region of a [`World`], so that everybody has them mapped; an
//! ordinary master decides what goes where. Behind the segments is a page about them, and a [`Flag`](moontide_heap::Flag)
//! for every slot.
//!
//! ```text
//!   region of a rank:  0 … memory_bytes │ page │ flags, 64 B per slot
//!                      segments, one behind the other
//!
//!   producer                                              consumer
//!     open_for_write ─▶ Push ── ticket, by any means ──▶   expect ─▶ Awaited
//!       write_page, any thread, any order                    wait: looks at the flag
//!       the last one raises the flag  ─────────────────▶    Arrived: bytes in place
//!     commit: an object of the store, for everybody
//! ```
//!
//! The records may also be in memory of devices, at the same offsets of a [`DeviceWorld`]'s regions, and so may their flags; the page
//! about them, and what the nodes write, stay in the world's ([`Hop::open_on_device`]).
//!
//! What follows from the rules of the store: a producer that dies gives back what it had, a consumer's memory is not
//! used again while it waits or reads, and one that comes late with an old ticket gets nothing. Kernels do the same by
//! addresses: [`Push::address`], [`Awaited::address`] and the offsets in a [`Ticket`].
//!
//! | file | what |
//! |---|---|
//! | `ticket` | [`Ticket`] |
//! | `push` | [`Push`]: the producer's end of a record |
//! | `awaited` | [`Awaited`], [`Arrived`]: the consumer's |
//! | `ground` | where bytes and flags are, and how they are reached |
//! | `sight` | what kernels see of the host's memory: header words and ledger cells |

mod awaited;
mod ground;
mod push;
mod sight;
mod ticket;

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

pub use awaited::{Arrived, Awaited, Wait};
use ground::Ground;
use moontide_heap::{DeviceWorld, FLAG_BYTES, Rank, WaitError, World};
use moontide_types::bounds::UNIT_BYTES;
use moontide_types::record::State;
use moontide_types::{ErrorCode, NodeId, SegmentId, SlotId, Span};
pub use push::{NotCommitted, Push};
pub use sight::SightCell;
pub use ticket::Ticket;

use crate::config::PutOptions;
use crate::error::StoreError;
use crate::in_place::PlaceOf;
use crate::store::Store;

const PAGE_BYTES: u64 = 4096;
const MAGIC: u64 = u64::from_le_bytes(*b"MTHOP001");
/// Words of the page about a rank's memory: magic, node, segments, bytes and slots of each.
const WORDS: u64 = 5;
/// A node has at least so many slots in a segment, however small it is.
const SLOTS_MIN: u64 = 64;
/// More segments than groups and memory make are not provided for.
const SEGMENTS_SMALL: u64 = 256;

/// How a rank's node has cut its memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The node.
    pub node: NodeId,
    /// How many segments, one behind the other.
    pub segments: u32,
    /// Bytes of each.
    pub segment_bytes: u64,
    /// Slots of each.
    pub slots: u32,
}

impl Cut {
    fn slots_all(&self) -> u64 {
        u64::from(self.segments) * u64::from(self.slots)
    }

    fn flag_at(&self, memory_bytes: u64, segment: SegmentId, slot: SlotId) -> Option<u64> {
        let is_there = segment.0 < self.segments && slot.0 < self.slots;
        let number = u64::from(segment.0) * u64::from(self.slots) + u64::from(slot.0);
        is_there.then(|| memory_bytes + PAGE_BYTES + number * FLAG_BYTES)
    }

    /// Whether a rank's region has room for it.
    fn fits(&self, memory_bytes: u64, region_bytes: u64) -> bool {
        let flags = self.slots_all().checked_mul(FLAG_BYTES);
        let end = flags.and_then(|flags| flags.checked_add(memory_bytes.checked_add(PAGE_BYTES)?));
        let bytes = u64::from(self.segments).checked_mul(self.segment_bytes);
        let is_aligned = memory_bytes.is_multiple_of(PAGE_BYTES) && self.segments > 0 && self.slots > 0;
        is_aligned
            && bytes.is_some_and(|bytes| bytes <= memory_bytes)
            && end.is_some_and(|end| end <= region_bytes)
    }
}

/// Why ranks cannot push.
#[derive(Debug, thiserror::Error)]
pub enum HopError {
    /// The world is too small for the memory and its flags.
    #[error(
        "a region of {region_bytes} bytes has no room for {memory_bytes} bytes of records and their flags: make the \
         world's regions {} bytes long", Hop::region_bytes(*memory_bytes, *slot_bytes)
    )]
    Region {
        /// What there is.
        region_bytes: u64,
        /// For records.
        memory_bytes: u64,
        /// Bytes per slot.
        slot_bytes: u64,
    },
    /// The devices' world is not this one's.
    #[error(
        "the devices' regions have {found} bytes, the world's {needed}: join both as the same ranks, and as long as \
         each other"
    )]
    DeviceWorld {
        /// What there is.
        found: u64,
        /// What is needed.
        needed: u64,
    },
    /// A rank has another layout, or none.
    #[error("rank {0} has not set up its memory in the same way: all ranks open it with the same settings")]
    Other(Rank),
    /// The others did not come.
    #[error(transparent)]
    Wait(#[from] WaitError),
    /// The store refused.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A rank's access to the memory of all.
#[derive(Clone, Debug)]
pub struct Hop {
    ground: Ground,
    store: Store,
    memory_bytes: u64,
    cuts: Arc<[Cut]>,
}

impl Hop {
    /// How long the world's regions must be for so much memory, with a slot for each `slot_bytes` of it.
    pub fn region_bytes(memory_bytes: u64, slot_bytes: u64) -> u64 {
        let slots = memory_bytes / slot_bytes.max(UNIT_BYTES) + SLOTS_MIN * SEGMENTS_SMALL;
        (memory_bytes + PAGE_BYTES + slots * FLAG_BYTES).next_multiple_of(PAGE_BYTES)
    }

    /// Tells the others how this rank's node has cut the first `memory_bytes` of the rank's region, and learns the same of
    /// them. All ranks call it; it waits for them.
    ///
    /// # Safety
    /// What lies behind these bytes in every rank's region, up to its end, is used for nothing else.
    #[expect(unsafe_code, reason = "what others do with the bytes cannot be checked")]
    pub unsafe fn open(
        world: Arc<World>,
        store: Store,
        memory_bytes: u64,
        own: Cut,
        timeout: Duration,
    ) -> Result<Hop, HopError> {
        Hop::open_on(Ground::of_host(world), store, memory_bytes, own, timeout)
    }

    /// As [`Hop::open`], with the records' bytes and their flags in the ranks' regions of `device`, which are at least as long
    /// as the world's.
    ///
    /// # Safety
    /// As [`Hop::open`], in both worlds.
    #[expect(unsafe_code, reason = "what others do with the bytes cannot be checked")]
    pub unsafe fn open_on_device(
        world: Arc<World>,
        device: Arc<DeviceWorld>,
        store: Store,
        memory_bytes: u64,
        own: Cut,
        timeout: Duration,
    ) -> Result<Hop, HopError> {
        let shape = world.shape();
        let (ranks, found) = (device.bases().len(), device.region(device.rank()).len());
        if found < shape.bytes || ranks != shape.ranks as usize || device.rank() != world.rank() {
            return Err(HopError::DeviceWorld { found, needed: shape.bytes });
        }
        let ground = Ground::of_device(world, device)?;
        Hop::open_on(ground, store, memory_bytes, own, timeout)
    }

    fn open_on(
        ground: Ground,
        store: Store,
        memory_bytes: u64,
        own: Cut,
        timeout: Duration,
    ) -> Result<Hop, HopError> {
        let world = ground.world();
        let region_bytes = world.shape().bytes;
        if !own.fits(memory_bytes, region_bytes) {
            let slot_bytes = memory_bytes / own.slots_all().max(1);
            return Err(HopError::Region { region_bytes, memory_bytes, slot_bytes });
        }
        let page = world.words(world.rank(), memory_bytes, WORDS);
        let values = [own.node.0, own.segments.into(), own.segment_bytes, own.slots.into()];
        for (word, value) in page[1..].iter().zip(values) {
            word.store(value, Ordering::Relaxed);
        }
        // Release: who sees it sees the rest; the barrier would do, too.
        page[0].store(MAGIC, Ordering::Release);
        world.barrier(timeout)?;
        let cut_of = |number: u32| {
            let page = world.words(Rank(number), memory_bytes, WORDS);
            let word = |at: usize| page[at].load(Ordering::Acquire);
            let narrow = |at: usize| u32::try_from(word(at)).unwrap_or(0);
            let cut =
                Cut { node: NodeId(word(1)), segments: narrow(2), segment_bytes: word(3), slots: narrow(4) };
            let is_well = word(0) == MAGIC && cut.segments > 0 && cut.fits(memory_bytes, region_bytes);
            if is_well { Ok(cut) } else { Err(HopError::Other(Rank(number))) }
        };
        let cuts = (0..world.shape().ranks).map(cut_of).collect::<Result<_, _>>()?;
        Ok(Hop { ground, store, memory_bytes, cuts })
    }

    /// The world.
    pub fn world(&self) -> &Arc<World> {
        self.ground.world()
    }

    /// Where the ranks' regions with the records lie in this process, for kernels.
    pub fn bases(&self) -> Vec<u64> {
        self.ground.bases()
    }

    /// The store, for everything that is not in here.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// How a rank's memory is cut.
    pub fn cut(&self, rank: Rank) -> Option<Cut> {
        self.cuts.get(rank.index()).copied()
    }

    /// Whose node it is.
    pub fn rank_of(&self, node: NodeId) -> Option<Rank> {
        let at = self.cuts.iter().position(|cut| cut.node == node)?;
        Some(Rank(at as u32))
    }

    /// Reserves a place for an object that arrives in pages, in the owner's memory, or this rank's, if it has room.
    pub fn open_for_write(
        &self,
        key: &[u8],
        bytes: u64,
        page_bytes: u64,
        owner: Option<Rank>,
    ) -> Result<Push, StoreError> {
        let wrong = |what, rule| Err(StoreError::Argument { what, rule });
        let Some(cut) = self.cut(owner.unwrap_or(self.world().rank())) else {
            return wrong("owner", "a rank of the world");
        };
        if !are_pages(bytes, page_bytes) {
            return wrong("page_bytes", PAGES_RULE);
        }
        let options = PutOptions { prefer: Some(cut.node), ..PutOptions::default() };
        let plan = self.store.open_in_place(self.ground.medium(), key, bytes, &options)?;
        let (place, stripe) = (plan.place(), plan.stripe());
        // Another node of this host may have been the one with room.
        let rank = self.rank_of(place.node).ok_or(StoreError::refused(ErrorCode::NoSpace))?;
        let ticket = self.ticket(rank, place, stripe.payload_offset, bytes, page_bytes);
        let ticket = ticket.ok_or(StoreError::refused(ErrorCode::Internal))?;
        let span = Span::new(stripe.payload_offset, bytes).ok_or(StoreError::refused(ErrorCode::Internal))?;
        self.ground.prepare(&ticket, span)?;
        Ok(Push::new(self.ground.clone(), plan, ticket))
    }

    fn ticket(
        &self,
        rank: Rank,
        place: PlaceOf,
        offset: u64,
        bytes: u64,
        page_bytes: u64,
    ) -> Option<Ticket> {
        let cut = self.cut(rank)?;
        let payload_offset = u64::from(place.segment.0).checked_mul(cut.segment_bytes)?.checked_add(offset)?;
        let PlaceOf { segment, generation, slot, epoch, .. } = place;
        let flag_offset = cut.flag_at(self.memory_bytes, segment, slot)?;
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

    /// A complete object in these ranks' memory, and keeps it there; `None` if it is not there, or elsewhere.
    pub fn find(&self, key: &[u8], page_bytes: u64) -> Result<Option<Awaited>, StoreError> {
        let look = || match self.locate(key, page_bytes)? {
            Some(ticket) => self.expect(ticket),
            None => Ok(None),
        };
        match look() {
            Ok(Some(found)) => Ok(Some(found)),
            Err(error @ StoreError::Argument { .. }) => Err(error),
            // What was remembered of it may be old: the master knows.
            Ok(None) | Err(_) => {
                self.store.forget_location(key);
                look()
            }
        }
    }

    /// Where a complete object lies in these ranks' memory, as far as is remembered; `None` if it is not there, or elsewhere.
    fn locate(&self, key: &[u8], page_bytes: u64) -> Result<Option<Ticket>, StoreError> {
        if !are_pages(1, page_bytes) {
            return Err(StoreError::Argument { what: "page_bytes", rule: PAGES_RULE });
        }
        let Some(location) = self.store.get_location(key)? else { return Ok(None) };
        let of = |stripe: &crate::plan::StripePlace| {
            let rank = self.rank_of(stripe.node).filter(|_| stripe.len == location.len && stripe.len > 0)?;
            let place = PlaceOf {
                node: stripe.node,
                segment: stripe.segment,
                generation: stripe.generation,
                slot: stripe.slot,
                epoch: location.epoch,
            };
            (stripe.medium == self.ground.medium())
                .then(|| self.ticket(rank, place, stripe.payload_offset, stripe.len, page_bytes))?
        };
        Ok(location.stripes.iter().find_map(of))
    }

    /// Gets ready to wait for a record that another process writes, or has written: its memory stays as it is from now on.
    /// `None`: it has ended. One that this process is writing is refused.
    pub fn expect(&self, ticket: Ticket) -> Result<Option<Awaited>, StoreError> {
        let wrong = || StoreError::Argument { what: "a ticket", rule: "as another rank's plan has it" };
        let cut = self.cut(ticket.rank).ok_or_else(wrong)?;
        let place = PlaceOf {
            node: cut.node,
            segment: ticket.segment,
            generation: ticket.generation,
            slot: ticket.slot,
            epoch: ticket.epoch,
        };
        let start = u64::from(ticket.segment.0).checked_mul(cut.segment_bytes).ok_or_else(wrong)?;
        let offset = ticket.payload_offset.checked_sub(start).ok_or_else(wrong)?;
        let is_well = ticket.bytes > 0
            && offset.checked_add(ticket.bytes).is_some_and(|end| end <= cut.segment_bytes)
            && are_pages(ticket.bytes, ticket.page_bytes)
            && cut.flag_at(self.memory_bytes, ticket.segment, ticket.slot) == Some(ticket.flag_offset);
        if !is_well {
            return Err(wrong());
        }
        let span = Span::new(offset, ticket.bytes).ok_or_else(wrong)?;
        let Some(stay) = self.store.stay(place)? else { return Ok(None) };
        // The numbers are somebody's word. Whose bytes these are is said by the record's header once it is complete, and before
        // that by the flag, which its writer got ready before anybody could be told of it.
        let found = match stay.complete_span() {
            Some(found) => Some(found),
            None => self.ground.span(&ticket)?,
        };
        match found {
            Some(found) if found == span => {
                Ok(Some(Awaited::new(self.ground.clone(), stay, span, ticket)))
            }
            // It ended just now, perhaps before its writer had come that far.
            None if !matches!(stay.state(), Some(State::Writing | State::Ready)) => Ok(None),
            _ => Err(wrong()),
        }
    }
}

/// What pages must be.
const PAGES_RULE: &str = "a multiple of 512, and so large that there are fewer than 2³² pages";

fn are_pages(bytes: u64, page_bytes: u64) -> bool {
    page_bytes > 0
        && page_bytes.is_multiple_of(UNIT_BYTES)
        && u32::try_from(bytes.div_ceil(page_bytes)).is_ok()
}
