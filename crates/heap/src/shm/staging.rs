//! [`Staging`]: memory of the node's own into which records are read from disk, and from which peers and processes of the
//! host read them as from any segment.
//!
//! ```text
//!            take            bytes_mut: read from disk, verify          publish             release, or drop
//!   Staging ──────▶ StagingRoom ───────────────────────────▶ StagingRoom ──────▶ Staged ──────────────────▶ draining
//!      ▲                │ drop                                  │ drop            READY(version)   DEAD, until no cell
//!      └────────────────┴───────────────────────────────────────┴───────────────────────────────────  names the slot
//! ```
//!
//! It is one segment of the [`NodeHeap`], mapped by the clients like the others, but no master grants in it: begins are
//! refused, and only a [`StagingRoom`] is published. Slots are used by the rule for copies (see `word`), since versions
//! come and go in any order, and a version may come twice.
//!
//! **A room's bytes are its holder's alone.** Ranges of rooms do not overlap, and a range is not taken again before its
//! slot is FREE, which is after a scan of all ledgers that began when no reader was let in any more (see `rooms` and
//! `cell`). A reader that comes later than that finds a word that does not let it in, or the next record.
//!
//! Space comes back without a call: whoever reclaims frees the slots, usually the node's own thread, and `take` looks at
//! the words when it finds nothing vacant. If that is not enough it reclaims by itself, in this segment only.
//!
//! Locks: staging before segment; nothing here is called with a segment's lock held.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use moontide_types::bounds::UNIT_BYTES;
use moontide_types::record::{State, Word};
use moontide_types::{Clock, Epoch, Extent, MonoTime, SegmentId, SlotId, Span, SystemClock};

use crate::alloc::PAGE_UNITS;
use crate::rooms::{Room, Rooms};
use crate::shm::draft::Draft;
use crate::shm::grant::{NewRecord, StageError};
use crate::shm::node_heap::{NodeHeap, NodePin};
use crate::shm::owner::{Segment, UseFor};
use crate::shm::region::HugePages;
use crate::shm::segment::{SegmentError, SegmentMemory};

/// What rooms are multiples of, in bytes: what direct I/O wants.
const ROOM_BYTES: u64 = PAGE_UNITS as u64 * UNIT_BYTES;

/// Room for records on their way from disk.
pub struct Staging {
    heap: Arc<NodeHeap>,
    segment: Arc<Segment>,
    rooms: Mutex<Rooms>,
}

/// How much of a [`Staging`] is in use. The rooms of all kinds are at most its slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagingUse {
    /// All of its memory.
    pub total_bytes: u64,
    /// What is in no room, perhaps in several pieces.
    pub free_bytes: u64,
    /// Rooms and published records in somebody's hands.
    pub held_rooms: usize,
    /// Rooms of records that were released and are still being read, or not yet reclaimed.
    pub draining_rooms: usize,
}

impl Staging {
    /// Adds a segment to the heap, for staging: at most `slots` rooms at a time, `units` of 512 bytes. The slots count
    /// among the heap's `slots_max`.
    pub fn new(
        heap: &Arc<NodeHeap>,
        slots: u32,
        units: u32,
        huge: HugePages,
    ) -> Result<Staging, SegmentError> {
        let segment = heap.add(slots, units, SegmentMemory::New(huge), UseFor::Staging)?;
        let rooms = Mutex::new(Rooms::new(slots, units));
        Ok(Staging { heap: Arc::clone(heap), segment, rooms })
    }

    /// The segment that it stands in.
    pub fn segment(&self) -> &Arc<Segment> {
        &self.segment
    }

    /// Address and length of the memory, for registering it with the kernel. To be used through rooms only.
    pub fn memory(&self) -> (usize, usize) {
        let payload = self.segment.payload();
        (payload.base().as_ptr().addr(), payload.len() as usize)
    }

    /// Room for `len` bytes, aligned to 4 KiB. `None`: as much is not vacant, even after what can be reclaimed was.
    ///
    /// # Panics
    /// If `len` is 0 or no multiple of 4096.
    pub fn take(self: &Arc<Self>, len: u64) -> Option<StagingRoom> {
        assert!(len > 0 && len.is_multiple_of(ROOM_BYTES), "a room of {len} bytes");
        let units = NonZeroU32::new(u32::try_from(len / UNIT_BYTES).ok()?)?;
        let mut rooms = self.rooms();
        let swept = |rooms: &mut Rooms| if self.sweep(rooms) > 0 { rooms.take(units) } else { None };
        let room = rooms.take(units).or_else(|| swept(&mut rooms)).or_else(|| {
            if rooms.draining() == 0 {
                return None;
            }
            self.heap.reclaim_in([Arc::clone(&self.segment)], SystemClock.now());
            swept(&mut rooms)
        })?;
        drop(rooms);
        Some(StagingRoom { staging: Arc::clone(self), room: Some(room) })
    }

    /// How much is in use, as the words are now.
    pub fn in_use(&self) -> StagingUse {
        let mut rooms = self.rooms();
        self.sweep(&mut rooms);
        StagingUse {
            total_bytes: self.total_bytes(),
            free_bytes: u64::from(rooms.free_units()) * UNIT_BYTES,
            held_rooms: rooms.held(),
            draining_rooms: rooms.draining(),
        }
    }

    /// All of its memory.
    pub fn total_bytes(&self) -> u64 {
        self.segment.shape().payload_bytes()
    }

    /// What is in no room, perhaps in several pieces.
    pub fn free_bytes(&self) -> u64 {
        self.in_use().free_bytes
    }

    fn sweep(&self, rooms: &mut Rooms) -> usize {
        rooms.sweep(|slot| self.segment.regions.word(slot).expect("a room's slot"))
    }

    fn rooms(&self) -> MutexGuard<'_, Rooms> {
        self.rooms.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the memory is there: not in a child that was forked since.
    fn is_here(&self) -> bool {
        self.segment.payload().is_here()
    }
}

// By hand: the heap behind it is of no use on a screen.
impl fmt::Debug for Staging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Staging").field("segment", &self.segment.shape()).finish_non_exhaustive()
    }
}

/// A piece of a [`Staging`] that is its holder's alone. Drop gives it back.
pub struct StagingRoom {
    staging: Arc<Staging>,
    /// Taken out when the room changes hands.
    room: Option<Room>,
}

/// A room whose content was not published, and why.
#[derive(Debug, thiserror::Error)]
#[error("not published: {error}")]
pub struct Unpublished {
    /// The room, as it was.
    pub room: StagingRoom,
    /// What is wrong.
    pub error: StageError,
}

impl StagingRoom {
    /// Its length.
    #[expect(clippy::len_without_is_empty, reason = "a room is never empty")]
    pub fn len(&self) -> u64 {
        self.extent().span().len()
    }

    /// Where it is in the segment.
    pub fn extent(&self) -> Extent {
        self.room().extent()
    }

    /// Its bytes: whatever was there before, until somebody fills them. They start on a multiple of 4 KiB.
    ///
    /// # Panics
    /// In a forked child.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        assert!(self.staging.is_here(), "a forked child has none of the node's memory");
        // SAFETY: the extent is this room's: `Rooms` gives no two that overlap, and nobody but `Staging` gives out space
        // in this segment. Its slot is FREE, so no reader is let in to it, and none is left of the record that was here
        // before: its slot was made FREE after a scan that found no cell naming it, and that happened before `take` gave
        // the range out again. Two slices of it cannot be there at once, says the borrow of `self`.
        unsafe { self.staging.segment.regions.bytes_mut(self.extent().span()) }
    }

    /// What is in the room is this record, its payload from byte `payload_at` on: lets readers in, in the given version.
    /// Page digests (as they are stored, little-endian; none for a record without digests) and what else stands behind a
    /// payload are written here, over whatever stood there. The caller has verified the payload against the digests;
    /// that these lead to the root is checked. `indexed`: local readers find it by its id, if it is a whole object;
    /// others, and these too, find it by slot and version.
    ///
    /// A record that does not fit is refused, and the room comes back with its payload as it was.
    pub fn publish(
        mut self,
        version: Epoch,
        payload_at: u64,
        record: NewRecord<'_>,
        digests: &[u8],
        root: u64,
        indexed: bool,
    ) -> Result<Staged, Unpublished> {
        let staged = self.draft(version, payload_at, &record, root).and_then(|draft| {
            let board = indexed.then(|| self.staging.heap.board());
            // SAFETY: the record lies in the room, which is the caller's: see `bytes_mut`.
            unsafe { self.staging.segment.stage(self.room().slot(), &draft, digests, board) }
                .map(|()| draft.extent())
        });
        match staged {
            Ok(extent) => {
                let staging = Arc::clone(&self.staging);
                Ok(Staged { staging, room: self.room.take(), extent, version })
            }
            Err(error) => Err(Unpublished { room: self, error }),
        }
    }

    /// The record in its place, if that is in the room.
    fn draft(&self, version: Epoch, at: u64, record: &NewRecord<'_>, root: u64) -> Result<Draft, StageError> {
        let room = self.extent().span();
        // A sum that is too large does not fit the room either.
        let payload_offset = room.offset().saturating_add(at);
        let draft = Draft::new(record, Word::new(version, State::Ready), payload_offset, root)?;
        let (needed, align) = (u64::from(draft.layout.units()) * UNIT_BYTES, draft.layout.align());
        // Rooms start on a multiple of 4 KiB, so what is aligned in the room is aligned in the segment.
        let fits = Span::new(at, needed).is_some_and(|span| span.end() <= room.len());
        if !fits || !at.is_multiple_of(align) {
            return Err(StageError::Room { at, needed, room: room.len(), align });
        }
        Ok(draft)
    }

    fn room(&self) -> &Room {
        self.room.as_ref().expect("taken out only when the value ends")
    }
}

impl fmt::Debug for StagingRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StagingRoom").field("room", &self.room).finish_non_exhaustive()
    }
}

impl Drop for StagingRoom {
    fn drop(&mut self) {
        if let Some(room) = self.room.take() {
            self.staging.rooms().give(room);
        }
    }
}

/// A record in a [`Staging`] that readers are let in to. Drop releases it at once.
pub struct Staged {
    staging: Arc<Staging>,
    /// Taken out when it is released.
    room: Option<Room>,
    extent: Extent,
    version: Epoch,
}

impl Staged {
    /// The segment, of the heap's generation.
    pub fn segment(&self) -> SegmentId {
        self.staging.segment.shape().segment
    }

    /// The slot.
    pub fn slot(&self) -> SlotId {
        self.room.as_ref().expect("taken out only when the value ends").slot()
    }

    /// Where the record is: its payload starts with it.
    pub fn extent(&self) -> Extent {
        self.extent
    }

    /// Its version.
    pub fn version(&self) -> Epoch {
        self.version
    }

    /// A pin of the node's own. `None` only if somebody killed the record in the heap.
    pub fn pin(&self) -> Option<NodePin<'_>> {
        self.staging.heap.pin(self.segment(), self.slot(), self.version)
    }

    /// Lets no new reader in. The room comes back when nobody names its slot any more, and not before `not_before`: a
    /// peer that reads without the node's help may hold a lease until then.
    pub fn release(mut self, not_before: MonoTime) {
        self.end(not_before);
    }

    fn end(&mut self, not_before: MonoTime) {
        let Some(room) = self.room.take() else { return };
        if !self.staging.is_here() {
            return; // the parent's record
        }
        // Whatever it says: after this the slot is DEAD, or somebody killed it before and it may be FREE already.
        let _ = self.staging.heap.kill(
            self.staging.segment.shape().segment,
            room.slot(),
            self.version,
            not_before,
        );
        self.staging.rooms().drain(room);
    }
}

impl fmt::Debug for Staged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Staged");
        shown.field("room", &self.room).field("version", &self.version).finish_non_exhaustive()
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        self.end(MonoTime(0));
    }
}
