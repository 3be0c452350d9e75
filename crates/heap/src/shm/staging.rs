//! [`Staging`]: memory of the node's own into which records are read from disk. Peers and processes of the host read
//! them there as in any segment.
//!
//! ```text
//!            alloc              bytes_mut: read from disk, verify    publish                  release, or drop
//!   Staging ──────▶ StagingBuffer ───────────────────▶ StagingBuffer ──────▶ StagedRecord ────────────────▶ draining
//!      ▲                │ drop                            │ drop             READY(version)  DEAD, until no cell
//!      └────────────────┴─────────────────────────────────┴────────────────────────────────────  pins the slot
//! ```
//!
//! It is one segment of the [`NodeHeap`], which the clients map like the others, but no master grants in it: begins
//! fail, and only a [`StagingBuffer`] is published. Slots follow the rule for copies (see `word`), since versions
//! come in any order, and a version may come twice.
//!
//! **The holder of a buffer has exclusive access to its bytes.** Ranges of buffers do not overlap, and a range is not
//! reused before its slot is FREE, which is after a scan of all ledgers that began when no reader could pin the slot
//! any more (see `staging_alloc` and `cell`). A later reader finds a word that refuses it, or the next record.
//!
//! Space is freed without a call: any reclaim frees the slots, usually the one of the node's own thread, and `alloc`
//! loads the words when it finds nothing vacant. If that is not enough it reclaims itself, in this segment only.
//!
//! Locks: staging before segment; nothing in this file is called with a segment's lock held.

use std::fmt;
use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use moontide_types::limits::UNIT_BYTES;
use moontide_types::record::{State, Word};
use moontide_types::{Clock, Epoch, Extent, MonoTime, SegmentId, SlotId, Span, SystemClock};

use crate::alloc::PAGE_UNITS;
use crate::shm::draft::RecordDraft;
use crate::shm::grant::{RecordSpec, StageError};
use crate::shm::node_heap::{NodeHeap, NodePin};
use crate::shm::owner::{Segment, SegmentRole};
use crate::shm::region::HugePages;
use crate::shm::segment::{SegmentError, SegmentMemory};
use crate::staging_alloc::{StagingAllocator, StagingChunk};

/// Buffers are multiples of this number of bytes, and aligned to it, as direct I/O requires.
const BUFFER_ALIGN_BYTES: u64 = PAGE_UNITS as u64 * UNIT_BYTES;

/// Memory for records in flight from disk.
pub struct Staging {
    heap: Arc<NodeHeap>,
    segment: Arc<Segment>,
    allocator: Mutex<StagingAllocator>,
}

/// Usage of a [`Staging`]. The number of buffers of all kinds is at most its number of slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StagingUsage {
    /// Length of the whole memory in bytes.
    pub total_bytes: u64,
    /// Bytes that are in no buffer, possibly in several pieces.
    pub free_bytes: u64,
    /// Number of buffers and published records that are in use.
    pub used_buffers: usize,
    /// Number of released records that are still being read, or not yet reclaimed.
    pub draining_buffers: usize,
}

impl Staging {
    /// Adds a segment for staging to the heap: at most `slots` buffers at a time, `units` units of 512 bytes. The
    /// slots count towards the heap's `slots_max`.
    pub fn new(
        heap: &Arc<NodeHeap>,
        slots: u32,
        units: u32,
        huge: HugePages,
    ) -> Result<Staging, SegmentError> {
        let segment = heap.add(slots, units, SegmentMemory::Owned(huge), SegmentRole::Staging)?;
        let allocator = Mutex::new(StagingAllocator::new(slots, units));
        Ok(Staging { heap: Arc::clone(heap), segment, allocator })
    }

    /// Returns the segment of this staging memory.
    pub fn segment(&self) -> &Arc<Segment> {
        &self.segment
    }

    /// Returns address and length of the memory, for registering it with the kernel. It may be accessed through
    /// buffers only.
    pub fn memory(&self) -> (usize, usize) {
        let payload = self.segment.payload();
        (payload.base().as_ptr().addr(), payload.len() as usize)
    }

    /// Allocates a buffer of `len` bytes, aligned to 4 KiB. Returns `None` if not enough is vacant, even after a
    /// reclaim.
    ///
    /// # Panics
    /// If `len` is 0 or no multiple of 4096.
    pub fn alloc(self: &Arc<Self>, len: u64) -> Option<StagingBuffer> {
        assert!(
            len > 0 && len.is_multiple_of(BUFFER_ALIGN_BYTES),
            "buffer length of {len} bytes is not a positive multiple of {BUFFER_ALIGN_BYTES}"
        );
        let units = NonZeroU32::new(u32::try_from(len / UNIT_BYTES).ok()?)?;
        // Not under the lock, which no simulated world replaces: the world may run another thread at a look at the clock.
        let now = SystemClock.now();
        let mut allocator = self.allocator();
        let after_sweep = |allocator: &mut StagingAllocator| {
            if self.sweep(allocator) > 0 { allocator.alloc(units) } else { None }
        };
        let chunk = allocator.alloc(units).or_else(|| after_sweep(&mut allocator)).or_else(|| {
            if allocator.draining() == 0 {
                return None;
            }
            self.heap.reclaim_in([Arc::clone(&self.segment)], now);
            after_sweep(&mut allocator)
        })?;
        drop(allocator);
        Some(StagingBuffer { staging: Arc::clone(self), chunk: Some(chunk) })
    }

    /// Returns the current usage.
    pub fn in_use(&self) -> StagingUsage {
        let mut allocator = self.allocator();
        self.sweep(&mut allocator);
        StagingUsage {
            total_bytes: self.total_bytes(),
            free_bytes: u64::from(allocator.free_units()) * UNIT_BYTES,
            used_buffers: allocator.allocated(),
            draining_buffers: allocator.draining(),
        }
    }

    /// Returns the length of the whole memory in bytes.
    pub fn total_bytes(&self) -> u64 {
        self.segment.shape().payload_bytes()
    }

    /// Returns the bytes that are in no buffer, possibly in several pieces.
    pub fn free_bytes(&self) -> u64 {
        self.in_use().free_bytes
    }

    fn sweep(&self, allocator: &mut StagingAllocator) -> usize {
        allocator.sweep(|slot| self.segment.regions.word(slot).expect("slot of a staging chunk"))
    }

    fn allocator(&self) -> MutexGuard<'_, StagingAllocator> {
        self.allocator.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns whether the memory is mapped in this process: `false` in a child that was forked after it was made.
    fn is_mapped_here(&self) -> bool {
        self.segment.payload().is_mapped_here()
    }
}

// Not derived: the output would contain the whole heap.
impl fmt::Debug for Staging {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Staging").field("segment", &self.segment.shape()).finish_non_exhaustive()
    }
}

/// Range of a [`Staging`] to which its holder has exclusive access. Drop frees it.
pub struct StagingBuffer {
    staging: Arc<Staging>,
    /// `None` after the chunk was published, while the value is dropped.
    chunk: Option<StagingChunk>,
}

/// Buffer whose content was not published, with the reason.
#[derive(Debug, thiserror::Error)]
#[error("not published: {error}")]
pub struct PublishFailure {
    /// The buffer, unchanged.
    pub buffer: StagingBuffer,
    /// Reason of the failure.
    pub error: StageError,
}

impl StagingBuffer {
    /// Returns the length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "a buffer is never empty")]
    pub fn len(&self) -> u64 {
        self.extent().span().len()
    }

    /// Returns the range of the buffer in the segment.
    pub fn extent(&self) -> Extent {
        self.chunk().extent()
    }

    /// Returns the bytes, with their previous content until they are filled. They start at a multiple of 4 KiB.
    ///
    /// # Panics
    /// In a forked child.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        assert!(self.staging.is_mapped_here(), "staging buffer used in a forked child, which has no mapping");
        // SAFETY: the extent belongs to this buffer: `StagingAllocator` returns no two that overlap, and only
        // `Staging`
        // allocates space in this segment. Its slot is FREE, so no reader can pin it, and none is left of the record
        // that
        // was here before: its slot was made FREE after a scan that found no cell pinning it, and that happened
        // before
        // `alloc` returned the range again. Two slices of it cannot exist at once, because of the borrow of `self`.
        unsafe { self.staging.segment.regions.bytes_mut(self.extent().span()) }
    }

    /// Publishes the content of the buffer as this record, with its payload at offset `payload_at`, in the given
    /// version. Writes the page digests (in stored form, little-endian; none for a record without digests) and the
    /// trailer after the payload, over the previous content. The caller has verified the payload against the digests;
    /// this function checks that they lead to the root. With `indexed`, local readers find the record by its id if it
    /// is a whole object; all readers find it by slot and version.
    ///
    /// Fails for a record that does not fit, and returns the buffer with its payload unchanged.
    pub fn publish(
        mut self,
        version: Epoch,
        payload_at: u64,
        record: RecordSpec<'_>,
        digests: &[u8],
        root: u64,
        indexed: bool,
    ) -> Result<StagedRecord, PublishFailure> {
        let staged = self.draft(version, payload_at, &record, root).and_then(|draft| {
            let index_region = indexed.then(|| self.staging.heap.index_region());
            // SAFETY: the record is in the buffer, to which the caller has exclusive access: see `bytes_mut`.
            unsafe { self.staging.segment.stage(self.chunk().slot(), &draft, digests, index_region) }
                .map(|()| draft.extent())
        });
        match staged {
            Ok(extent) => {
                let staging = Arc::clone(&self.staging);
                Ok(StagedRecord { staging, chunk: self.chunk.take(), extent, version })
            }
            Err(error) => Err(PublishFailure { buffer: self, error }),
        }
    }

    /// Computes the record at offset `at`, and checks that it fits the buffer.
    fn draft(
        &self,
        version: Epoch,
        at: u64,
        record: &RecordSpec<'_>,
        root: u64,
    ) -> Result<RecordDraft, StageError> {
        let buffer = self.extent().span();
        // A saturated sum does not fit the buffer either.
        let payload_offset = buffer.offset().saturating_add(at);
        let draft = RecordDraft::new(record, Word::new(version, State::Ready), payload_offset, root)?;
        let (needed, align) = (u64::from(draft.layout.units()) * UNIT_BYTES, draft.layout.align());
        // Buffers start at a multiple of 4 KiB, so an offset aligned in the buffer is aligned in the segment.
        let fits = Span::new(at, needed).is_some_and(|span| span.end() <= buffer.len());
        if !fits || !at.is_multiple_of(align) {
            return Err(StageError::Buffer { at, needed, buffer: buffer.len(), align });
        }
        Ok(draft)
    }

    fn chunk(&self) -> &StagingChunk {
        self.chunk.as_ref().expect("taken only when the value ends")
    }
}

impl fmt::Debug for StagingBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StagingBuffer").field("chunk", &self.chunk).finish_non_exhaustive()
    }
}

impl Drop for StagingBuffer {
    fn drop(&mut self) {
        if let Some(chunk) = self.chunk.take() {
            self.staging.allocator().free(chunk);
        }
    }
}

/// A readable record in a [`Staging`]. Drop releases it at once.
pub struct StagedRecord {
    staging: Arc<Staging>,
    /// `None` after the release.
    chunk: Option<StagingChunk>,
    extent: Extent,
    version: Epoch,
}

impl StagedRecord {
    /// Returns the segment. Its generation is the heap's.
    pub fn segment(&self) -> SegmentId {
        self.staging.segment.shape().segment
    }

    /// Returns the slot.
    pub fn slot(&self) -> SlotId {
        self.chunk.as_ref().expect("taken only when the value ends").slot()
    }

    /// Returns the extent of the record. It starts with the payload.
    pub fn extent(&self) -> Extent {
        self.extent
    }

    /// Returns the version.
    pub fn version(&self) -> Epoch {
        self.version
    }

    /// Pins the record for the node itself. Returns `None` only if the record was killed in the heap.
    pub fn pin(&self) -> Option<NodePin<'_>> {
        self.staging.heap.pin(self.segment(), self.slot(), self.version)
    }

    /// Refuses new readers. The buffer is freed when no cell pins its slot any more, and not before `not_before`: a
    /// peer that reads without the node's help may hold a lease until then.
    pub fn release(mut self, not_before: MonoTime) {
        self.end(not_before);
    }

    fn end(&mut self, not_before: MonoTime) {
        let Some(chunk) = self.chunk.take() else { return };
        if !self.staging.is_mapped_here() {
            return; // the parent's record
        }
        // The result does not matter: the slot is DEAD now, or the record was killed before and the slot may be FREE
        // already.
        let _ = self.staging.heap.kill(
            self.staging.segment.shape().segment,
            chunk.slot(),
            self.version,
            not_before,
        );
        self.staging.allocator().drain(chunk);
    }
}

impl fmt::Debug for StagedRecord {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("StagedRecord");
        debug.field("chunk", &self.chunk).field("version", &self.version).finish_non_exhaustive()
    }
}

impl Drop for StagedRecord {
    fn drop(&mut self) {
        self.end(MonoTime(0));
    }
}
