//! Index region: local index, open flag and heartbeat of a node, mapped read-only by its clients.
//!
//! One region, written by the node and read-only for all other processes:
//!
//! ```text
//!   0      4096
//!   ├ page ─┤─ index: buckets of 8 entries of 8 bytes ─┤
//! ```
//!
//! The page contains the node's id, its heartbeat, and whether the index may be used at all: a node that has been
//! without a master for too long closes it.

use std::time::Duration;

use moontide_rt::sync::{AtomicU64, Ordering};
use moontide_types::{Clock, Generation, MonoTime, NodeId, SystemClock};

use crate::index::{ENTRIES_PER_BUCKET, Index};
use crate::liveness::{Liveness, LivenessRow, MemberId};
use crate::shm::region::{HugePages, Protection, Region, RegionError};

const PAGE_BYTES: u64 = 4096;
const MAGIC: u64 = u64::from_le_bytes(*b"MTBOARD1");

/// First page of the region. All fields except the atomics are written before another process can see it.
#[derive(Debug)]
#[repr(C)]
struct IndexRegionHeader {
    magic: u64,
    buckets: u64,
    slots_max: u64,
    node: u64,
    generation: u64,
    /// 1: the index may be used.
    open: AtomicU64,
    /// Objects that did not fit into the index.
    overflowed: AtomicU64,
    _reserved: u64,
    row: LivenessRow,
}

const _: () =
    assert!(size_of::<IndexRegionHeader>() == 128 && size_of::<IndexRegionHeader>() as u64 <= PAGE_BYTES);

/// Reason why a region is not an index region.
#[derive(Debug, thiserror::Error)]
pub enum IndexRegionError {
    /// The region could not be created or mapped.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The first page has another magic number.
    #[error("not an index region: magic {found:#018x}")]
    Magic {
        /// Magic number of the page.
        found: u64,
    },
    /// The region is too short for its index.
    #[error("index region of {len} bytes cannot hold {buckets} buckets")]
    Shape {
        /// Length of the region in bytes.
        len: u64,
        /// Number of buckets according to the page.
        buckets: u64,
    },
}

/// Index region as its owner uses it.
#[derive(Debug)]
pub struct IndexRegion {
    region: Region,
    member: MemberId,
}

impl IndexRegion {
    /// Creates an index region for up to `slots_max` slots of all segments. The index starts closed.
    pub fn create(
        node: NodeId,
        generation: Generation,
        slots_max: u64,
        huge: HugePages,
    ) -> Result<IndexRegion, IndexRegionError> {
        let buckets = Index::buckets_for(slots_max);
        let len = PAGE_BYTES + buckets * ENTRIES_PER_BUCKET as u64 * 8;
        let len = len.next_multiple_of(huge.page_bytes());
        let region = Region::create("moontide-index", len, huge, Protection::OwnerWrites)?;
        let page = IndexRegionHeader {
            magic: MAGIC,
            buckets,
            slots_max,
            node: node.0,
            generation: generation.0,
            open: AtomicU64::new(0),
            overflowed: AtomicU64::new(0),
            _reserved: 0,
            row: LivenessRow::vacant(),
        };
        // SAFETY: the region is at least a page long, page-aligned, and no other thread or process has seen it yet.
        unsafe { region.base().cast::<IndexRegionHeader>().write(page) };
        let row = &page_of(&region).row;
        let member = row.join(std::process::id(), SystemClock.now()).expect("the row is new");
        Ok(IndexRegion { region, member })
    }

    /// Returns the region, to be sent to clients.
    pub fn region(&self) -> &Region {
        &self.region
    }

    /// Returns the index.
    pub fn index(&self) -> Index<'_> {
        index_of(&self.region, page_of(&self.region).buckets)
    }

    /// Stores a heartbeat. Clients do not use the index if the last heartbeat is older than the listener's
    /// `stale_after`.
    pub fn heartbeat(&self, now: MonoTime) {
        let page = page_of(&self.region);
        page.row.heartbeat(self.member, now).expect("only the owner writes the index region");
    }

    /// Opens or closes the index for all clients.
    pub fn set_open(&self, open: bool) {
        // Release: a client that sees it open sees the index as it was then.
        page_of(&self.region).open.store(open.into(), Ordering::Release);
    }

    /// Counts an object that did not fit into the index.
    pub(crate) fn count_overflow(&self) {
        page_of(&self.region).overflowed.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the number of objects that did not fit into the index so far.
    pub fn overflowed(&self) -> u64 {
        page_of(&self.region).overflowed.load(Ordering::Relaxed)
    }

    /// Returns the maximum number of slots of all segments: the size of the index and of the clients' touch bitmaps.
    pub fn slots_max(&self) -> u64 {
        page_of(&self.region).slots_max
    }
}

/// Index region as a client uses it.
#[derive(Debug)]
pub struct IndexView {
    region: Region,
    /// Checked when the region was imported.
    buckets: u64,
    node: (NodeId, Generation),
    stale_after: Duration,
}

impl IndexView {
    /// Opens an imported region. Its index is usable for `stale_after` after its last heartbeat.
    pub fn new(region: Region, stale_after: Duration) -> Result<IndexView, IndexRegionError> {
        if region.len() < PAGE_BYTES {
            return Err(IndexRegionError::Shape { len: region.len(), buckets: 0 });
        }
        let page = page_of(&region);
        if page.magic != MAGIC {
            return Err(IndexRegionError::Magic { found: page.magic });
        }
        let (len, buckets) = (region.len(), page.buckets);
        let fits = buckets
            .checked_mul(ENTRIES_PER_BUCKET as u64 * 8)
            .and_then(|bytes| bytes.checked_add(PAGE_BYTES))
            .is_some_and(|end| Index::is_whole(buckets) && end <= len);
        if !fits {
            return Err(IndexRegionError::Shape { len, buckets });
        }
        let node = (NodeId(page.node), Generation(page.generation));
        Ok(IndexView { region, buckets, node, stale_after })
    }

    /// Returns the node and its incarnation.
    pub fn node(&self) -> (NodeId, Generation) {
        self.node
    }

    /// Returns whether local reads are allowed at `now`: the node is alive and its index is open. Always `false` in a
    /// forked child, which does not have the memory.
    #[inline]
    pub fn is_usable(&self, now: MonoTime) -> bool {
        if !self.region.is_mapped_here() {
            return false;
        }
        let page = page_of(&self.region);
        page.open.load(Ordering::Acquire) == 1 && now.since(page.row.last_heartbeat()) <= self.stale_after
    }

    /// Returns the liveness of the node.
    pub fn liveness(&self, now: MonoTime) -> Liveness {
        if !self.region.is_mapped_here() {
            return Liveness::Absent;
        }
        page_of(&self.region).row.read(now, self.stale_after)
    }

    /// Returns the index, for reading only: the mapping is not writable.
    #[inline]
    pub(crate) fn index(&self) -> Index<'_> {
        index_of(&self.region, self.buckets)
    }
}

#[inline]
fn page_of(region: &Region) -> &IndexRegionHeader {
    // SAFETY: integers and atomics accept every bit pattern; fields that change after creation are atomic.
    unsafe { &region.slice::<IndexRegionHeader>(0, 1)[0] }
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
    fn index_region_header_matches_formats_doc() {
        page::assert_fields(
            "Index region",
            &fields_of!(IndexRegionHeader: magic, buckets, slots_max, node, generation, open, overflowed, _reserved, row),
        );
    }
}
