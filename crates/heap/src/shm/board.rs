//! The board: what a node shows to every client of its host.
//!
//! One region, written by the node and read-only for everyone else:
//!
//! ```text
//!   0      4096                                       
//!   ├ page ─┤─ index: buckets of 8 entries of 8 bytes ─┤
//! ```
//!
//! The page says who the node is, carries its heartbeat, and whether the index may be used at all: a node
//! that has been without a master for too long closes it.

use std::time::Duration;

use moontide_types::{Clock, Generation, MonoTime, NodeId, SystemClock};

use crate::index::{ENTRIES_PER_BUCKET, Index};
use crate::liveness::{Liveness, Occupant, Row};
use crate::shm::region::{HugePages, Protection, Region, RegionError};
use crate::sync::{AtomicU64, Ordering};

const PAGE_BYTES: u64 = 4096;
const MAGIC: u64 = u64::from_le_bytes(*b"MTBOARD1");

/// The first page of the board. All fields but the atomics are written before anyone else can see it.
#[derive(Debug)]
#[repr(C)]
struct BoardPage {
    magic: u64,
    buckets: u64,
    slots_max: u64,
    node: u64,
    generation: u64,
    /// 1: the index may be used.
    open: AtomicU64,
    /// Objects that did not fit into the index.
    overflowed: AtomicU64,
    _spare: u64,
    row: Row,
}

const _: () = assert!(size_of::<BoardPage>() == 128 && size_of::<BoardPage>() as u64 <= PAGE_BYTES);

/// Why a region is not a board.
#[derive(Debug, thiserror::Error)]
pub enum BoardError {
    /// It could not be made or mapped.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// Its first page is not one of ours.
    #[error("not a board: magic {found:#018x}")]
    Magic {
        /// What stood there.
        found: u64,
    },
    /// Its parts do not add up to its length.
    #[error("a board of {len} bytes cannot hold {buckets} buckets")]
    Shape {
        /// Length of the region.
        len: u64,
        /// Buckets according to the page.
        buckets: u64,
    },
}

/// The owner's side.
#[derive(Debug)]
pub struct Board {
    region: Region,
    occupant: Occupant,
}

impl Board {
    /// A board for up to `slots_max` slots over all segments. The index starts closed.
    pub fn create(
        node: NodeId,
        generation: Generation,
        slots_max: u64,
        huge: HugePages,
    ) -> Result<Board, BoardError> {
        let buckets = Index::buckets_for(slots_max);
        let len = PAGE_BYTES + buckets * ENTRIES_PER_BUCKET as u64 * 8;
        let len = len.next_multiple_of(huge.page_bytes());
        let region = Region::create("moontide-board", len, huge, Protection::OwnerWrites)?;
        let page = BoardPage {
            magic: MAGIC,
            buckets,
            slots_max,
            node: node.0,
            generation: generation.0,
            open: AtomicU64::new(0),
            overflowed: AtomicU64::new(0),
            _spare: 0,
            row: Row::vacant(),
        };
        // SAFETY: the region is at least a page long, page-aligned, and nobody else has seen it yet.
        unsafe { region.base().cast::<BoardPage>().write(page) };
        let row = &page_of(&region).row;
        let occupant = row.join(std::process::id(), SystemClock.now()).expect("the row is new");
        Ok(Board { region, occupant })
    }

    /// The region, to be passed to clients.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// The index.
    pub fn index(&self) -> Index<'_> {
        index_of(&self.region, page_of(&self.region).buckets)
    }

    /// Says that the node is alive. Clients do not believe a board that is silent for longer than the door's `stale_after`.
    pub fn beat(&self, now: MonoTime) {
        let page = page_of(&self.region);
        page.row.beat(self.occupant, now).expect("only the owner writes the board");
    }

    /// Opens or closes the index for everyone.
    pub fn set_open(&self, open: bool) {
        // Release: whoever sees it open sees the index as it was then.
        page_of(&self.region).open.store(open.into(), Ordering::Release);
    }

    /// Counts an object that did not fit into the index.
    pub(crate) fn count_overflow(&self) {
        page_of(&self.region).overflowed.fetch_add(1, Ordering::Relaxed);
    }

    /// Objects that did not fit into the index so far.
    pub fn overflowed(&self) -> u64 {
        page_of(&self.region).overflowed.load(Ordering::Relaxed)
    }

    /// Slots over all segments that the index and the clients' touch bitmaps are made for.
    pub fn slots_max(&self) -> u64 {
        page_of(&self.region).slots_max
    }
}

/// A client's side.
#[derive(Debug)]
pub struct BoardView {
    region: Region,
    /// As checked when the board was imported.
    buckets: u64,
    node: (NodeId, Generation),
    stale_after: Duration,
}

impl BoardView {
    /// Looks at a board that was imported. It is believed for `stale_after` after its last beat.
    pub fn new(region: Region, stale_after: Duration) -> Result<BoardView, BoardError> {
        if region.len() < PAGE_BYTES {
            return Err(BoardError::Shape { len: region.len(), buckets: 0 });
        }
        let page = page_of(&region);
        if page.magic != MAGIC {
            return Err(BoardError::Magic { found: page.magic });
        }
        let (len, buckets) = (region.len(), page.buckets);
        let fits = buckets
            .checked_mul(ENTRIES_PER_BUCKET as u64 * 8)
            .and_then(|bytes| bytes.checked_add(PAGE_BYTES))
            .is_some_and(|end| Index::is_whole(buckets) && end <= len);
        if !fits {
            return Err(BoardError::Shape { len, buckets });
        }
        let node = (NodeId(page.node), Generation(page.generation));
        Ok(BoardView { region, buckets, node, stale_after })
    }

    /// The node and its incarnation.
    pub fn node(&self) -> (NodeId, Generation) {
        self.node
    }

    /// Whether local reads may be trusted at `now`: the node is alive and keeps its index open. Never in a forked
    /// child, which does not have the memory.
    #[inline]
    pub fn is_usable(&self, now: MonoTime) -> bool {
        if !self.region.is_here() {
            return false;
        }
        let page = page_of(&self.region);
        page.open.load(Ordering::Acquire) == 1 && now.since(page.row.last_beat()) <= self.stale_after
    }

    /// What the node's row says.
    pub fn liveness(&self, now: MonoTime) -> Liveness {
        if !self.region.is_here() {
            return Liveness::Absent;
        }
        page_of(&self.region).row.read(now, self.stale_after)
    }

    /// The index, for looking only: the mapping cannot be written.
    #[inline]
    pub(crate) fn index(&self) -> Index<'_> {
        index_of(&self.region, self.buckets)
    }
}

#[inline]
fn page_of(region: &Region) -> &BoardPage {
    // SAFETY: integers and atomics accept every bit pattern; what changes after creation is atomic.
    unsafe { &region.slice::<BoardPage>(0, 1)[0] }
}

#[inline]
fn index_of(region: &Region, buckets: u64) -> Index<'_> {
    Index::new(region.atomics(PAGE_BYTES, buckets * ENTRIES_PER_BUCKET as u64))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::{fields_of, page};

    #[test]
    fn the_page_is_drawn_as_it_is() {
        page::assert_fields(
            "Board",
            &fields_of!(BoardPage: magic, buckets, slots_max, node, generation, open, overflowed, _spare, row),
        );
    }
}
