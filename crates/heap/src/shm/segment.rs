//! A segment's two regions: the header table, which only the node writes, and the payload.
//!
//! ```text
//!   headers:  0      4096
//!             ├ page ─┤─ slot 0 │ slot 1 │ …  (128 B each: the record's header with its word) ─┤
//!   payload:  ├─ units of 512 B, handed out as extents ─────────────────────────────────────────┤
//! ```
//!
//! What may be read when: a slot's **word** always; its **header** and its extent's **bytes** only under a pin
//! that was granted for READY (or for WRITING, by the one writer). The owner changes header bytes only while
//! no pin can be granted or held: after FREE → WRITING and before the reservation is answered, and before
//! WRITING → READY.
//!
//! A segment **of a device** ([`Medium::Device`]) has its records' bytes in a device's memory, at the same offsets as they would
//! have here. What the node's processor writes, which is all but these bytes, is in the same two regions as ever, so nothing
//! else differs; of the payload region only the pages with trailers are ever touched. Whoever wants the bytes here is refused.

use std::cell::UnsafeCell;
use std::ptr::NonNull;

use moontide_types::bounds::{SEGMENT_UNITS_MAX, SEGMENTS_PER_NODE_MAX, SLOTS_PER_SEGMENT_MAX, UNIT_BYTES};
use moontide_types::record::{HEADER_BYTES, Header, HeaderError, RecordLayout, WORD_OFFSET, Word};
use moontide_types::{Generation, NodeId, SegmentId, SlotId, Span};

use crate::device::DevicePart;
use crate::shm::region::{HugePages, Protection, Region, RegionError};
use crate::word::AtomicWord;

const PAGE_BYTES: u64 = 4096;
const MAGIC: u64 = u64::from_le_bytes(*b"MTSEGMT1");

/// The first page of the header region. Written once, before anyone else can see it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
struct SegmentPage {
    magic: u64,
    segment: u32,
    slots: u32,
    generation: u64,
    units: u64,
    /// Number of this segment's first slot among all slots of the node, for touch bitmaps.
    first_number: u64,
    /// Whose segment it is.
    node: u64,
    node_generation: u64,
    /// [`Medium`], as a number.
    medium: u64,
}

/// Most slots of one node: all of its segments with all of their slots.
const SLOTS_PER_NODE_MAX: u64 = (SEGMENTS_PER_NODE_MAX as u64) << 32;

/// One slot of the header table.
#[repr(C, align(128))]
struct HeaderSlot {
    head: UnsafeCell<[u8; WORD_OFFSET]>,
    word: AtomicWord,
    tail: UnsafeCell<[u8; HEADER_BYTES - WORD_OFFSET - 8]>,
}

const _: () = assert!(size_of::<HeaderSlot>() == HEADER_BYTES);
const _: () = assert!(std::mem::offset_of!(HeaderSlot, word) == WORD_OFFSET);
const _: () = assert!(size_of::<SegmentPage>() as u64 <= PAGE_BYTES);

/// Where the bytes of a segment's records are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Medium {
    /// In the payload region.
    Host = 0,
    /// In a device's memory, of which the payload region is only the outline.
    Device = 1,
}

impl Medium {
    pub(crate) fn from_number(number: u64) -> Option<Medium> {
        [Medium::Host, Medium::Device].into_iter().find(|&medium| medium as u64 == number)
    }
}

/// How large a segment is, and who it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SegmentShape {
    /// Its number at its node.
    pub segment: SegmentId,
    /// Which incarnation.
    pub generation: Generation,
    /// Headers in its table.
    pub slots: u32,
    /// Units of payload.
    pub units: u32,
    /// Number of its first slot among all slots of the node.
    pub first_number: u64,
    /// Where its records' bytes are.
    pub medium: Medium,
}

/// Why two regions are not a segment.
#[derive(Debug, thiserror::Error)]
pub enum SegmentError {
    /// A region could not be made or mapped.
    #[error(transparent)]
    Region(#[from] RegionError),
    /// The slots of all segments exceed what the index and the touch bitmaps are made for.
    #[error("{slots} more slots, {used} are in use, and the heap was made for {max} (slots_max)")]
    SlotsMax {
        /// Slots of this segment.
        slots: u32,
        /// Slots of the others.
        used: u64,
        /// All that there may be.
        max: u64,
    },
    /// A count is 0 or beyond its bound, or the payload is not made of whole pages.
    #[error(
        "segment {segment} with {slots} slots and {units} units: both must be at least 1, the units a multiple of 8 \
         (whole pages of 4 KiB), the number below {SEGMENTS_PER_NODE_MAX}"
    )]
    Bounds {
        /// Its number.
        segment: SegmentId,
        /// Its slots.
        slots: u32,
        /// Its units.
        units: u32,
    },
    /// The first page is not the one that the owner announced.
    #[error("the header region does not start with the announced segment's page")]
    Page,
}

/// Where a segment's payload lies.
#[derive(Debug)]
pub(crate) enum SegmentMemory {
    /// In memory of its own, on these pages.
    New(HugePages),
    /// In memory that others know too, such as a rank's of a [`World`](crate::World). Nobody else writes it.
    Given(Region),
    /// As above, but for the records' bytes, which are a device's.
    OfDevice(Region, DevicePart),
}

/// Both regions, from either side.
#[derive(Debug)]
pub(crate) struct SegmentRegions {
    pub(crate) shape: SegmentShape,
    pub(crate) headers: Region,
    pub(crate) payload: Region,
    /// Where the owner finds the bytes of a segment of a device.
    device: Option<DevicePart>,
}

impl SegmentShape {
    pub(crate) fn check(&self) -> Result<(), SegmentError> {
        let SegmentShape { segment, slots, units, .. } = *self;
        let fits = segment.0 < SEGMENTS_PER_NODE_MAX
            && (1..=SLOTS_PER_SEGMENT_MAX).contains(&slots)
            && (1..=SEGMENT_UNITS_MAX).contains(&units)
            && self.payload_bytes().is_multiple_of(PAGE_BYTES)
            && self.first_number <= SLOTS_PER_NODE_MAX;
        if fits { Ok(()) } else { Err(SegmentError::Bounds { segment, slots, units }) }
    }

    /// Length of the payload region.
    pub fn payload_bytes(&self) -> u64 {
        u64::from(self.units) * UNIT_BYTES
    }

    /// Length of the header region: a multiple of a huge page, whether it lies on such or not. Ordinary pages
    /// that are never touched cost nothing.
    pub fn header_bytes(&self) -> u64 {
        let bytes = PAGE_BYTES + u64::from(self.slots) * HEADER_BYTES as u64;
        bytes.next_multiple_of(HugePages::Reserved.page_bytes())
    }

    fn page(&self, (node, node_generation): (NodeId, Generation)) -> SegmentPage {
        SegmentPage {
            magic: MAGIC,
            segment: self.segment.0,
            slots: self.slots,
            generation: self.generation.0,
            units: self.units.into(),
            first_number: self.first_number,
            node: node.0,
            node_generation: node_generation.0,
            medium: self.medium as u64,
        }
    }
}

impl SegmentRegions {
    pub(crate) fn create(
        shape: SegmentShape,
        of: (NodeId, Generation),
        huge: HugePages,
        payload: SegmentMemory,
    ) -> Result<SegmentRegions, SegmentError> {
        shape.check()?;
        let header_bytes = shape.header_bytes();
        let headers = Region::create("moontide-headers", header_bytes, huge, Protection::OwnerWrites)?;
        let expected = shape.payload_bytes();
        let (payload, device) = match payload {
            SegmentMemory::New(huge) => {
                (Region::create("moontide-payload", expected, huge, Protection::AllWrite)?, None)
            }
            SegmentMemory::Given(payload) => (payload, None),
            SegmentMemory::OfDevice(payload, device) => (payload, Some(device)),
        };
        for found in [Some(payload.len()), device.as_ref().map(DevicePart::len)].into_iter().flatten() {
            if found != expected {
                return Err(RegionError::Size { found, expected }.into());
            }
        }
        // SAFETY: the region is at least a page long, page-aligned, and nobody else has seen it yet.
        unsafe { headers.base().cast::<SegmentPage>().write(shape.page(of)) };
        Ok(SegmentRegions { shape, headers, payload, device })
    }

    /// Joins two imported regions, which must be as the owner announced them, and the owner's: a guard on another
    /// node's memory would be named in a ledger into which that node never looks.
    pub(crate) fn import(
        shape: SegmentShape,
        of: (NodeId, Generation),
        headers: Region,
        payload: Region,
    ) -> Result<SegmentRegions, SegmentError> {
        shape.check()?;
        if headers.len() < shape.header_bytes() || payload.len() < shape.payload_bytes() {
            return Err(SegmentError::Page);
        }
        // SAFETY: the page is written before the region is passed on, and never again.
        let page = unsafe { &headers.slice::<SegmentPage>(0, 1)[0] };
        if *page != shape.page(of) {
            return Err(SegmentError::Page);
        }
        Ok(SegmentRegions { shape, headers, payload, device: None })
    }

    /// Whether the records' bytes are in the payload region.
    #[inline]
    pub(crate) fn has_bytes(&self) -> bool {
        self.shape.medium == Medium::Host
    }

    /// The device's part that has the records' bytes, at the owner of a segment of a device.
    pub(crate) fn device(&self) -> Option<&DevicePart> {
        self.device.as_ref()
    }

    #[inline]
    fn slot(&self, slot: SlotId) -> Option<&HeaderSlot> {
        if slot.0 >= self.shape.slots {
            return None;
        }
        let offset = PAGE_BYTES + u64::from(slot.0) * HEADER_BYTES as u64;
        // SAFETY: the word is atomic, the rest is behind UnsafeCell and read by rule only.
        Some(unsafe { &self.headers.slice::<HeaderSlot>(offset, 1)[0] })
    }

    /// The word of a slot, if there is such a slot.
    #[inline]
    pub(crate) fn word(&self, slot: SlotId) -> Option<&AtomicWord> {
        self.slot(slot).map(|slot| &slot.word)
    }

    /// The number of a slot among all slots of the node.
    #[inline]
    pub(crate) fn number(&self, slot: SlotId) -> u64 {
        self.shape.first_number + u64::from(slot.0)
    }

    /// Asks for the slot's two cache lines ahead of their use.
    #[inline]
    pub(crate) fn prefetch(&self, slot: SlotId) {
        if let Some(slot) = self.slot(slot) {
            crate::index::prefetch(slot.head.get());
            crate::index::prefetch(slot.tail.get().wrapping_byte_add(64));
        }
    }

    /// Reads and checks a slot's header, taking `word` for its word.
    ///
    /// # Safety
    /// The header must not change meanwhile: the caller holds a pin that was granted on `word`, or is the
    /// owner with the segment's lock.
    #[inline]
    pub(crate) unsafe fn header(&self, slot: SlotId, word: Word) -> Result<Header, HeaderError> {
        let slot = self.slot(slot).expect("a slot of this segment");
        let mut bytes = [0; HEADER_BYTES];
        // SAFETY: nobody writes head or tail meanwhile, says the caller.
        let (head, tail) = unsafe { (&*slot.head.get(), &*slot.tail.get()) };
        bytes[..WORD_OFFSET].copy_from_slice(head);
        bytes[WORD_OFFSET..WORD_OFFSET + 8].copy_from_slice(&word.bits().to_le_bytes());
        bytes[WORD_OFFSET + 8..].copy_from_slice(tail);
        Header::decode(&bytes)
    }

    /// Writes everything of a slot's header but the word.
    ///
    /// # Safety
    /// The caller is the owner with the segment's lock, and the slot is WRITING with no pin granted yet, or
    /// about to be published with its writer done.
    pub(crate) unsafe fn write_header(&self, slot: SlotId, header: &Header) {
        let slot = self.slot(slot).expect("a slot of this segment");
        let bytes = header.encode();
        // SAFETY: nobody reads or writes head or tail meanwhile, says the caller; the owner's mapping is writable.
        unsafe {
            (*slot.head.get()).copy_from_slice(&bytes[..WORD_OFFSET]);
            (*slot.tail.get()).copy_from_slice(&bytes[WORD_OFFSET + 8..]);
        }
    }

    /// Where a record lies in the payload region, if the header speaks of bytes inside of it. A header is
    /// believed about everything but this: it may come from a confused owner.
    #[inline]
    pub(crate) fn record_span(&self, header: &Header) -> Option<(RecordLayout, Span)> {
        let layout = header.layout().ok()?;
        let span = layout.span_from(header.payload_offset).ok()?;
        (span.end() <= self.payload.len()).then_some((layout, span))
    }

    /// Where bytes of the payload lie in this process, if they are inside of it, and in memory of the host.
    pub(crate) fn payload_at(&self, span: Span) -> Option<NonNull<u8>> {
        let is_here = self.has_bytes() && span.end() <= self.payload.len();
        // SAFETY: inside of the region.
        is_here.then(|| unsafe { self.payload.base().add(span.offset() as usize) })
    }

    /// Where the word of a slot lies in this process.
    pub(crate) fn word_at(&self, slot: SlotId) -> NonNull<u64> {
        NonNull::from(self.word(slot).expect("a slot of this segment")).cast()
    }

    /// Bytes of the payload region.
    ///
    /// # Safety
    /// Nobody may write them while the slice lives: the caller holds a pin on the record they belong to.
    #[inline]
    pub(crate) unsafe fn bytes(&self, span: Span) -> &[u8] {
        // SAFETY: `slice` checks the bounds; the caller vouches for the rest.
        unsafe { self.payload.slice(span.offset(), span.len()) }
    }

    /// Bytes of the payload region, to be changed.
    ///
    /// # Safety
    /// Nobody else may read or write them while the slice lives: the caller is the one writer of the record they
    /// belong to, or of this part of it.
    ///
    /// # Panics
    /// If they do not fit, or the region cannot be written from here.
    #[expect(clippy::mut_from_ref, reason = "exclusive by the protocol, which the caller vouches for")]
    pub(crate) unsafe fn bytes_mut(&self, span: Span) -> &mut [u8] {
        assert!(span.end() <= self.payload.len() && self.payload.is_writable());
        // SAFETY: in bounds by the line above; exclusive, says the caller.
        unsafe {
            let at = self.payload.base().as_ptr().add(span.offset() as usize);
            std::slice::from_raw_parts_mut(at, span.len() as usize)
        }
    }

    /// Copies bytes into the payload region.
    ///
    /// # Safety
    /// Nobody else may read or write them meanwhile: the caller is the one writer of the record they belong
    /// to.
    ///
    /// # Panics
    /// If they do not fit, or the region cannot be written from here.
    pub(crate) unsafe fn write_bytes(&self, offset: u64, bytes: &[u8]) {
        let end = offset.checked_add(bytes.len() as u64).expect("a piece of the region");
        assert!(end <= self.payload.len() && self.payload.is_writable());
        // SAFETY: in bounds by the line above, exclusive by the caller's word; `bytes` is not part of the
        // region, or the caller would have to hold a reference to what nobody may read.
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
    fn the_page_is_drawn_as_it_is() {
        page::assert_fields(
            "Segment",
            &fields_of!(SegmentPage: magic, segment, slots, generation, units, first_number, node, node_generation, medium),
        );
    }
}
