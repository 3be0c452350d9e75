//! [`Hop`]: ranks of one host that write pages into each other's memory, with nobody in between.
//!
//! Each rank runs a node whose segments lie in the rank's region of a [`World`], so that everybody has them mapped; an
//! ordinary master decides what goes where. Behind the segments is a page about them, and a [`Flag`] for every slot.
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
//! What follows from the rules of the store: a producer that dies gives back what it had, a consumer's memory is not
//! used again while it waits or reads, and one that comes late with an old ticket gets nothing. Kernels do the same by
//! addresses: [`Push::address`], [`Awaited::address`] and the offsets in a [`Ticket`].

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use moontide_heap::{Counted, FLAG_BYTES, Flag, Progress, Rank, SharedStay, WaitError, World};
use moontide_types::bounds::UNIT_BYTES;
use moontide_types::record::State;
use moontide_types::{Epoch, ErrorCode, Generation, NodeId, SegmentId, SlotId, Span};

use crate::config::PutOptions;
use crate::error::StoreError;
use crate::in_place::{PlaceOf, PlanInPlace};
use crate::put::Put;
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

/// Where a record is that is being written, for a process that waits for it. Its numbers may travel by any means: what
/// does not fit is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    /// Whose memory it lies in.
    pub rank: Rank,
    /// The segment.
    pub segment: SegmentId,
    /// Which incarnation of it.
    pub generation: Generation,
    /// The slot.
    pub slot: SlotId,
    /// The version.
    pub epoch: Epoch,
    /// Where the bytes lie in the rank's region.
    pub payload_offset: u64,
    /// How many.
    pub bytes: u64,
    /// Bytes of a page; the last one may be shorter.
    pub page_bytes: u64,
    /// Where the flag lies in the rank's region.
    pub flag_offset: u64,
}

impl Ticket {
    /// How many pages.
    pub fn pages(&self) -> u32 {
        u32::try_from(self.bytes.div_ceil(self.page_bytes.max(1))).unwrap_or(u32::MAX)
    }

    /// Bytes of the last page.
    pub fn last_page_bytes(&self) -> u64 {
        let before = u64::from(self.pages()).saturating_sub(1).saturating_mul(self.page_bytes);
        self.bytes.saturating_sub(before)
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
    world: Arc<World>,
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
        Ok(Hop { world, store, memory_bytes, cuts })
    }

    /// The world.
    pub fn world(&self) -> &Arc<World> {
        &self.world
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
        let Some(cut) = self.cut(owner.unwrap_or(self.world.rank())) else {
            return wrong("owner", "a rank of the world");
        };
        if !are_pages(bytes, page_bytes) {
            return wrong("page_bytes", PAGES_RULE);
        }
        let options = PutOptions { prefer: Some(cut.node), ..PutOptions::default() };
        let plan = self.store.open_in_place(key, bytes, &options)?;
        let (place, stripe) = (plan.place(), plan.stripe());
        // Another node of this host may have been the one with room.
        let rank = self.rank_of(place.node).ok_or(StoreError::refused(ErrorCode::NoSpace))?;
        let ticket = self.ticket(rank, place, stripe.payload_offset, bytes, page_bytes);
        let ticket = ticket.ok_or(StoreError::refused(ErrorCode::Internal))?;
        let span = Span::new(stripe.payload_offset, bytes).ok_or(StoreError::refused(ErrorCode::Internal))?;
        self.world.flag(rank, ticket.flag_offset).prepare(ticket.epoch, ticket.pages(), span);
        let written = (0..ticket.pages()).map(|_| AtomicBool::new(false)).collect();
        Ok(Push { world: Arc::clone(&self.world), plan, ticket, written })
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
            (stripe.medium == crate::Medium::Memory)
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
            && are_pages(ticket.bytes, ticket.page_bytes)
            && cut.flag_at(self.memory_bytes, ticket.segment, ticket.slot) == Some(ticket.flag_offset);
        if !is_well {
            return Err(wrong());
        }
        let span = Span::new(offset, ticket.bytes).ok_or_else(wrong)?;
        let Some(stay) = self.store.stay(place)? else { return Ok(None) };
        // The numbers are somebody's word. Whose bytes these are is said by the record's header once it is complete, and before
        // that by the flag, which its writer got ready before anybody could be told of it.
        let flag = self.world.flag(ticket.rank, ticket.flag_offset);
        match stay.complete_span().or_else(|| flag.span(ticket.epoch)) {
            Some(found) if found == span => {
                Ok(Some(Awaited { world: Arc::clone(&self.world), stay, span, ticket }))
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

/// Why a push has not become an object.
#[derive(Debug, thiserror::Error)]
pub enum NotCommitted {
    /// Pages are missing, and whoever writes them may go on: here it is again.
    #[error("pages are missing: commit when all of them are there")]
    Incomplete(Box<Push>),
    /// The store refused. The place is given back.
    #[error(transparent)]
    Store(#[from] StoreError),
}

/// A record on its way, at the producer. Dropping it gives the place back.
#[derive(Debug)]
#[must_use = "a push that is dropped is given back"]
pub struct Push {
    world: Arc<World>,
    plan: PlanInPlace,
    ticket: Ticket,
    /// Which pages this process has written: each once.
    written: Box<[AtomicBool]>,
}

impl Push {
    /// What the consumer needs.
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// When the reservation ends.
    pub fn until(&self) -> Instant {
        self.plan.until()
    }

    /// Where the record's word is in this process.
    pub fn word_address(&self) -> usize {
        self.plan.word().addr().get()
    }

    /// Where the bytes go in this process, for a kernel. It writes each page once, and flags it; then none of
    /// [`Push::write_page`] is called.
    pub fn address(&self) -> Option<usize> {
        self.plan.payload().map(|at| at.addr().get())
    }

    /// How far it is.
    pub fn progress(&self) -> Progress {
        self.flag().progress(self.ticket.epoch)
    }

    fn flag(&self) -> &Flag {
        self.world.flag(self.ticket.rank, self.ticket.flag_offset)
    }

    /// Writes a page, and flags it. Any thread, any order, each page once: a second time, or with another length than the
    /// page has, it is refused.
    #[expect(unsafe_code, reason = "memory that other processes map")]
    pub fn write_page(&self, page: u32, bytes: &[u8]) -> Result<Counted, StoreError> {
        let wrong = |what, rule| Err(StoreError::Argument { what, rule });
        let Some(written) = self.written.get(page as usize) else {
            return wrong("page", "below the number of pages");
        };
        let is_last = page as usize + 1 == self.written.len();
        let expected = if is_last { self.ticket.last_page_bytes() } else { self.ticket.page_bytes };
        if bytes.len() as u64 != expected {
            return wrong("the length of a page", "page_bytes, or what is left for the last one");
        }
        let Some(payload) = self.plan.payload() else {
            return Err(StoreError::refused(ErrorCode::Gone));
        };
        // Relaxed: it only decides who writes; what was written is ordered by the flag.
        if written.swap(true, Ordering::Relaxed) {
            return wrong("page", "written once");
        }
        let offset = u64::from(page) * self.ticket.page_bytes;
        // SAFETY: inside of the record by the lines above. The claim makes the record this process's alone, and the page
        // is this call's alone by the mark; `bytes` is not part of it, since nobody has a reference to it.
        unsafe {
            std::ptr::copy_nonoverlapping(
                bytes.as_ptr(),
                payload.as_ptr().add(offset as usize),
                bytes.len(),
            );
        }
        Ok(self.flag().page_done(self.ticket.epoch))
    }

    /// Makes it an object like any other. All pages must be flagged.
    pub fn commit(self) -> Result<Put, NotCommitted> {
        if self.progress() != Progress::Complete {
            return Err(NotCommitted::Incomplete(Box::new(self)));
        }
        Ok(self.plan.commit()?)
    }
}

/// A record that a consumer waits for. Its memory is not used again while this lives.
#[derive(Debug)]
pub struct Awaited {
    world: Arc<World>,
    stay: SharedStay,
    span: Span,
    ticket: Ticket,
}

/// What became of a wait.
#[derive(Debug)]
pub enum Wait {
    /// All pages are there.
    Arrived(Arrived),
    /// Not yet; wait longer, or give up.
    Late(Awaited),
    /// The producer has died or given up.
    Gone,
}

impl Awaited {
    /// What is waited for.
    pub fn ticket(&self) -> Ticket {
        self.ticket
    }

    /// Where the bytes are in this process, for a kernel that waits for the flag itself.
    pub fn address(&self) -> Option<usize> {
        self.stay.payload(self.span).map(|at| at.addr().get())
    }

    /// Where the record's word is in this process.
    pub fn word_address(&self) -> usize {
        self.stay.word().addr().get()
    }

    /// How far it is, without waiting.
    pub fn progress(&self) -> Progress {
        let flag = self.world.flag(self.ticket.rank, self.ticket.flag_offset);
        let flagged = || flag.progress(self.ticket.epoch);
        match (flagged(), self.stay.state()) {
            (Progress::Complete, _) => Progress::Complete,
            // Put by other means, without a flag.
            (_, Some(State::Ready)) => Progress::Complete,
            (found, Some(State::Writing)) => found,
            // It was complete and is being committed just now, or there is nobody any more who could complete it.
            _ if flagged() == Progress::Complete => Progress::Complete,
            _ => Progress::Gone,
        }
    }

    /// Copies the bytes, if all of them are there. `false`: they are not, and nothing was copied.
    ///
    /// # Panics
    /// If the room has another length, or in a forked child.
    #[expect(unsafe_code, reason = "memory that other processes map")]
    pub fn copy_into(&self, room: &mut [u8]) -> bool {
        assert_eq!(room.len() as u64, self.span.len());
        if self.progress() != Progress::Complete {
            return false;
        }
        let at = self.stay.payload(self.span).expect("it does not survive a fork: get the object again");
        // SAFETY: in bounds, as `payload` checks. Its pages are complete, says the flag, which nobody raises before, and
        // nobody writes them again before the stay ends. `room` is elsewhere: nobody has a reference to a record.
        unsafe { std::ptr::copy_nonoverlapping(at.as_ptr(), room.as_mut_ptr(), room.len()) };
        true
    }

    /// Looks at the flag until all pages are there.
    pub fn wait(self, timeout: Duration) -> Wait {
        let until = Instant::now() + timeout;
        let mut looks = 0u32;
        loop {
            match self.progress() {
                Progress::Complete => return Wait::Arrived(Arrived { awaited: self }),
                Progress::Gone => return Wait::Gone,
                Progress::NotYet if Instant::now() >= until => return Wait::Late(self),
                Progress::NotYet => {}
            }
            looks += 1;
            match looks {
                0..200 => std::hint::spin_loop(),
                200..400 => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_micros(20)),
            }
        }
    }
}

/// A record that has arrived, in place.
#[derive(Debug)]
pub struct Arrived {
    awaited: Awaited,
}

impl Arrived {
    /// Its bytes.
    ///
    /// # Panics
    /// In a forked child: the memory is not there.
    #[expect(unsafe_code, reason = "memory that other processes map")]
    pub fn bytes(&self) -> &[u8] {
        let Awaited { stay, span, .. } = &self.awaited;
        let at = stay.payload(*span).expect("it does not survive a fork: get the object again");
        // SAFETY: in bounds, as `payload` checks. Its pages are complete, says the flag, which nobody raises before, and
        // nobody writes them again before the stay ends.
        unsafe { std::slice::from_raw_parts(at.as_ptr(), span.len() as usize) }
    }

    /// What it was waited for by.
    pub fn ticket(&self) -> Ticket {
        self.awaited.ticket
    }
}
