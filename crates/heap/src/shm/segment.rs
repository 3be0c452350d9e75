//! Two regions of a segment: the header table, which only the node writes, and the payload.
//!
//! ```text
//!   headers:  0      4096
//!             ├ page ─┤─ slot 0 │ slot 1 │ …  (128 B each: the record's header with its word) ─┤
//!   payload:  ├─ units of 512 B, allocated as extents ──────────────────────────────────────────┤
//! ```
//!
//! Read access: a slot's **word** always; its **header** and its extent's **bytes** only under a pin that was granted
//! for READY (or for WRITING, by the one writer). The owner changes header bytes only while no pin can be granted or
//! held: after FREE → WRITING and before the response to the reservation, and before WRITING → READY.
//!
//! A **device segment** ([`PayloadMemory::Device`]) has its records' bytes in a device's memory, at the same offsets
//! as in the payload region. Everything else, which the node's processor writes, is in the same two regions as for
//! other segments; of the payload region only the pages with trailers are ever touched. Access to the bytes through
//! the payload region fails.

use std::cell::UnsafeCell;
use std::ptr::NonNull;

use moontide_types::limits::{SEGMENT_UNITS_MAX, SEGMENTS_PER_NODE_MAX, SLOTS_PER_SEGMENT_MAX, UNIT_BYTES};
use moontide_types::record::{HEADER_BYTES, Header, HeaderError, RecordLayout, WORD_OFFSET, Word};
use moontide_types::{Generation, NodeId, SegmentId, SlotId, Span};

use crate::shm::device_slice::DeviceSlice;
use crate::shm::region::{HugePages, Protection, Region, RegionError};
use crate::word::AtomicWord;

const PAGE_BYTES: u64 = 4096;
const MAGIC: u64 = u64::from_le_bytes(*b"MTSEGMT1");

/// First page of the header region. Written once, before another process can see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
struct SegmentInfoPage {
    magic: u64,
    segment: u32,
    slots: u32,
    generation: u64,
    units: u64,
    /// Index of this segment's first slot among all slots of the node, for touch bitmaps.
    first_global_slot: u64,
    /// Owner of the segment.
    node: u64,
    node_generation: u64,
    /// [`PayloadMemory`] as a number.
    medium: u64,
}

/// Maximum number of slots of a node: all of its segments with all of their slots.
const SLOTS_PER_NODE_MAX: u64 = (SEGMENTS_PER_NODE_MAX as u64) << 32;

/// Slot of the header table.
#[repr(C, align(128))]
struct HeaderSlot {
    head: UnsafeCell<[u8; WORD_OFFSET]>,
    word: AtomicWord,
    tail: UnsafeCell<[u8; HEADER_BYTES - WORD_OFFSET - 8]>,
}

const _: () = assert!(size_of::<HeaderSlot>() == HEADER_BYTES);
const _: () = assert!(std::mem::offset_of!(HeaderSlot, word) == WORD_OFFSET);
const _: () = assert!(size_of::<SegmentInfoPage>() as u64 <= PAGE_BYTES);

/// Memory that holds the bytes of a segment's records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum PayloadMemory {
    /// The payload region.
    Host = 0,
    /// Memory of a device. The payload region has the same layout but holds only the trailers.
    Device = 1,
}

impl PayloadMemory {
    pub(crate) fn from_number(number: u64) -> Option<PayloadMemory> {
        [PayloadMemory::Host, PayloadMemory::Device].into_iter().find(|&medium| medium as u64 == number)
    }
}

/// Identity and size of a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentDescriptor {
    /// Id of the segment, unique at its node.
    pub segment: SegmentId,
    /// Incarnation of the segment.
    pub generation: Generation,
    /// Number of slots of the header table.
    pub slots: u32,
    /// Length of the payload in units of 512 bytes.
    pub units: u32,
    /// Index of its first slot among all slots of the node.
    pub first_global_slot: u64,
    /// Memory that holds its records' bytes.
    pub medium: PayloadMemory,
}

/// Reason why two regions are not a segment.
#[derive(Debug, thiserror::Error)]
pub enum SegmentError {
    /// A region could not be created or mapped.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The slots of all segments exceed the size of the index and the touch bitmaps.
    #[error("segment of {slots} slots exceeds slots_max: {used} of {max} slots are in use")]
    SlotsMax {
        /// Slots of this segment.
        slots: u32,
        /// Slots of the node's other segments.
        used: u64,
        /// Maximum number of slots of the node.
        max: u64,
    },
    /// A count is 0 or exceeds its limit, or the payload is not whole pages.
    #[error(
        "segment {segment} with {slots} slots and {units} units: both must be at least 1, the units a multiple of 8 \
         (whole pages of 4 KiB), the segment id below {SEGMENTS_PER_NODE_MAX}"
    )]
    Bounds {
        /// Requested segment id.
        segment: SegmentId,
        /// Requested number of slots.
        slots: u32,
        /// Requested number of units.
        units: u32,
    },
    /// The first page does not match the announced descriptor.
    #[error("header region does not start with the info page of the announced segment")]
    Page,
}

/// Memory of a segment's payload.
#[derive(Debug)]
pub(crate) enum SegmentMemory {
    /// New memory, with this kind of pages.
    Owned(HugePages),
    /// Memory that other processes map too, such as a part of a larger region. Only the segment writes it.
    External(Region),
    /// As `External`, except for the records' bytes, which are in the device slice.
    Device(Region, DeviceSlice),
}

/// Both regions, at the owner or at a client.
#[derive(Debug)]
pub(crate) struct SegmentRegions {
    pub(crate) shape: SegmentDescriptor,
    pub(crate) headers: Region,
    pub(crate) payload: Region,
    /// Memory of the records' bytes, at the owner of a device segment.
    device: Option<DeviceSlice>,
}

impl SegmentDescriptor {
    pub(crate) fn check(&self) -> Result<(), SegmentError> {
        let SegmentDescriptor { segment, slots, units, .. } = *self;
        let fits = segment.0 < SEGMENTS_PER_NODE_MAX
            && (1..=SLOTS_PER_SEGMENT_MAX).contains(&slots)
            && (1..=SEGMENT_UNITS_MAX).contains(&units)
            && self.payload_bytes().is_multiple_of(PAGE_BYTES)
            && self.first_global_slot <= SLOTS_PER_NODE_MAX;
        if fits { Ok(()) } else { Err(SegmentError::Bounds { segment, slots, units }) }
    }

    /// Returns the length of the payload region in bytes.
    pub fn payload_bytes(&self) -> u64 {
        u64::from(self.units) * UNIT_BYTES
    }

    /// Returns the length of the header region in bytes: a multiple of a huge page, whether it uses huge pages or
    /// not. Ordinary pages that are never touched cost nothing.
    pub fn header_bytes(&self) -> u64 {
        let bytes = PAGE_BYTES + u64::from(self.slots) * HEADER_BYTES as u64;
        bytes.next_multiple_of(HugePages::Reserved.page_bytes())
    }

    fn page(&self, (node, node_generation): (NodeId, Generation)) -> SegmentInfoPage {
        SegmentInfoPage {
            magic: MAGIC,
            segment: self.segment.0,
            slots: self.slots,
            generation: self.generation.0,
            units: self.units.into(),
            first_global_slot: self.first_global_slot,
            node: node.0,
            node_generation: node_generation.0,
            medium: self.medium as u64,
        }
    }
}

impl SegmentRegions {
    pub(crate) fn create(
        shape: SegmentDescriptor,
        owner: (NodeId, Generation),
        huge: HugePages,
        payload: SegmentMemory,
    ) -> Result<SegmentRegions, SegmentError> {
        shape.check()?;
        let header_bytes = shape.header_bytes();
        let headers = Region::create("moontide-headers", header_bytes, huge, Protection::OwnerWrites)?;
        let expected = shape.payload_bytes();
        let (payload, device) = match payload {
            SegmentMemory::Owned(huge) => {
                (Region::create("moontide-payload", expected, huge, Protection::AllWrite)?, None)
            }
            SegmentMemory::External(payload) => (payload, None),
            SegmentMemory::Device(payload, device) => (payload, Some(device)),
        };
        for found in [Some(payload.len()), device.as_ref().map(DeviceSlice::len)].into_iter().flatten() {
            if found != expected {
                return Err(RegionError::Size { found, expected }.into());
            }
        }
        // SAFETY: the region is at least a page long, page-aligned, and no other thread or process has seen it yet.
        unsafe { headers.base().cast::<SegmentInfoPage>().write(shape.page(owner)) };
        Ok(SegmentRegions { shape, headers, payload, device })
    }

    /// Combines two imported regions. They must match the descriptor and belong to `owner`: a guard on another node's
    /// memory would be a pin in a ledger that this node never scans.
    pub(crate) fn import(
        shape: SegmentDescriptor,
        owner: (NodeId, Generation),
        headers: Region,
        payload: Region,
    ) -> Result<SegmentRegions, SegmentError> {
        shape.check()?;
        if headers.len() < shape.header_bytes() || payload.len() < shape.payload_bytes() {
            return Err(SegmentError::Page);
        }
        // SAFETY: the owner writes the page before it sends the region, and never again.
        let page = unsafe { &headers.slice::<SegmentInfoPage>(0, 1)[0] };
        if *page != shape.page(owner) {
            return Err(SegmentError::Page);
        }
        Ok(SegmentRegions { shape, headers, payload, device: None })
    }

    /// Returns whether the records' bytes are in the payload region.
    #[inline]
    pub(crate) fn has_bytes(&self) -> bool {
        self.shape.medium == PayloadMemory::Host
    }

    /// Lets the kernel provide the memory of a range of the payload ([`Region::populate`]). Does nothing for a device segment.
    pub(crate) fn populate(&self, at: u64, len: u64) -> std::io::Result<()> {
        if self.has_bytes() { self.payload.populate(at, len) } else { Ok(()) }
    }

    /// Returns the device slice with the records' bytes, at the owner of a device segment.
    pub(crate) fn device(&self) -> Option<&DeviceSlice> {
        self.device.as_ref()
    }

    #[inline]
    fn slot(&self, slot: SlotId) -> Option<&HeaderSlot> {
        if slot.0 >= self.shape.slots {
            return None;
        }
        let offset = PAGE_BYTES + u64::from(slot.0) * HEADER_BYTES as u64;
        // SAFETY: the word is atomic; the rest is in an UnsafeCell and read only under the rules of `header`.
        Some(unsafe { &self.headers.slice::<HeaderSlot>(offset, 1)[0] })
    }

    /// Returns the word of a slot, or `None` if the slot is out of range.
    #[inline]
    pub(crate) fn word(&self, slot: SlotId) -> Option<&AtomicWord> {
        self.slot(slot).map(|slot| &slot.word)
    }

    /// Returns the index of a slot among all slots of the node.
    #[inline]
    pub(crate) fn global_slot(&self, slot: SlotId) -> u64 {
        self.shape.first_global_slot + u64::from(slot.0)
    }

    /// Prefetches the slot's two cache lines.
    #[inline]
    pub(crate) fn prefetch(&self, slot: SlotId) {
        if let Some(slot) = self.slot(slot) {
            crate::index::prefetch(slot.head.get());
            crate::index::prefetch(slot.tail.get().wrapping_byte_add(64));
        }
    }

    /// Reads and checks a slot's header, with `word` as its word.
    ///
    /// # Safety
    /// The header must not change during the call: the caller holds a pin that was granted on `word`, or is the owner
    /// with the segment's lock.
    #[inline]
    pub(crate) unsafe fn header(&self, slot: SlotId, word: Word) -> Result<Header, HeaderError> {
        let slot = self.slot(slot).expect("slot of this segment");
        let mut bytes = [0; HEADER_BYTES];
        // SAFETY: the caller guarantees that no thread writes head or tail during the call.
        let (head, tail) = unsafe { (&*slot.head.get(), &*slot.tail.get()) };
        bytes[..WORD_OFFSET].copy_from_slice(head);
        bytes[WORD_OFFSET..WORD_OFFSET + 8].copy_from_slice(&word.bits().to_le_bytes());
        bytes[WORD_OFFSET + 8..].copy_from_slice(tail);
        Header::decode(&bytes)
    }

    /// Writes a slot's header, except for the word.
    ///
    /// # Safety
    /// The caller is the owner with the segment's lock, and the slot is WRITING with no pin granted yet, or about to
    /// be published with its writer done.
    pub(crate) unsafe fn write_header(&self, slot: SlotId, header: &Header) {
        let slot = self.slot(slot).expect("slot of this segment");
        let bytes = header.encode();
        // SAFETY: the caller guarantees that no thread reads or writes head or tail during the call; the owner's
        // mapping is
        // writable.
        unsafe {
            (*slot.head.get()).copy_from_slice(&bytes[..WORD_OFFSET]);
            (*slot.tail.get()).copy_from_slice(&bytes[WORD_OFFSET + 8..]);
        }
    }

    /// Returns layout and range of a record in the payload region, or `None` if the header's range is outside of it.
    /// The rest of the header is trusted; the range is checked because it may come from a faulty owner.
    #[inline]
    pub(crate) fn record_span(&self, header: &Header) -> Option<(RecordLayout, Span)> {
        let layout = header.layout().ok()?;
        let span = layout.span_from(header.payload_offset).ok()?;
        (span.end() <= self.payload.len()).then_some((layout, span))
    }

    /// Returns the address of payload bytes in this process, if they are in range and in host memory.
    pub(crate) fn payload_at(&self, span: Span) -> Option<NonNull<u8>> {
        let is_in_host = self.has_bytes() && span.end() <= self.payload.len();
        // SAFETY: inside of the region.
        is_in_host.then(|| unsafe { self.payload.base().add(span.offset() as usize) })
    }

    /// Returns the address of a slot's word in this process.
    pub(crate) fn word_at(&self, slot: SlotId) -> NonNull<u64> {
        NonNull::from(self.word(slot).expect("slot of this segment")).cast()
    }

    /// Returns bytes of the payload region.
    ///
    /// # Safety
    /// No thread may write them during the life of the slice: the caller holds a pin on the record they belong to.
    #[inline]
    pub(crate) unsafe fn bytes(&self, span: Span) -> &[u8] {
        // SAFETY: `slice` checks the bounds; the caller guarantees the rest.
        unsafe { self.payload.slice(span.offset(), span.len()) }
    }

    /// Returns bytes of the payload region for writing.
    ///
    /// # Safety
    /// No other thread may read or write them during the life of the slice: the caller is the one writer of the
    /// record they belong to, or of this part of it.
    ///
    /// # Panics
    /// If the range is out of bounds, or the region is mapped read-only in this process.
    #[expect(clippy::mut_from_ref, reason = "exclusive by the protocol, which the caller guarantees")]
    pub(crate) unsafe fn bytes_mut(&self, span: Span) -> &mut [u8] {
        assert!(span.end() <= self.payload.len() && self.payload.is_writable());
        // SAFETY: in bounds by the line above; the caller guarantees exclusive access.
        unsafe {
            let at = self.payload.base().as_ptr().add(span.offset() as usize);
            std::slice::from_raw_parts_mut(at, span.len() as usize)
        }
    }

    /// Copies bytes into the payload region.
    ///
    /// # Safety
    /// No other thread may read or write them during the call: the caller is the one writer of the record they belong
    /// to.
    ///
    /// # Panics
    /// If the range is out of bounds, or the region is mapped read-only in this process.
    pub(crate) unsafe fn write_bytes(&self, offset: u64, bytes: &[u8]) {
        let end = offset.checked_add(bytes.len() as u64).expect("a range of the region");
        assert!(end <= self.payload.len() && self.payload.is_writable());
        // SAFETY: in bounds by the line above; the caller guarantees exclusive access. `bytes` is not part of the
        // region, since
        // the caller would otherwise hold a reference to bytes that no other thread may read.
        unsafe {
            let to = self.payload.base().as_ptr().add(offset as usize);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shm::{fields_of, page};

    #[test]
    fn segment_info_page_matches_formats_doc() {
        page::assert_fields(
            "Segment",
            &fields_of!(SegmentInfoPage: magic, segment, slots, generation, units, first_global_slot, node, node_generation, medium),
        );
    }
}
