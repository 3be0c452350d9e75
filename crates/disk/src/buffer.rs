//! [`Buffer`]: memory that is passed into an operation by value and returned with its result.
//!
//! Direct I/O requires multiples of [`BLOCK_BYTES`]: the address of the memory, the offset in the file, and the number
//! of bytes.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use rustix::mm::{Advice, madvise};

/// Alignment of addresses, offsets and lengths for direct I/O. 4 KiB suits every SSD and file system.
pub const BLOCK_BYTES: usize = 4096;

/// Size from which buffers use huge pages, if the system has them.
const HUGE_BYTES: usize = 2 << 20;

/// Memory of an operation.
#[derive(Debug, Default)]
pub enum Buffer<'a> {
    /// No memory: a sync has no bytes.
    #[default]
    None,
    /// Memory owned by the operation.
    Owned(AlignedBuf),
    /// Memory of the caller, which a read fills.
    BorrowedMut(&'a mut [u8]),
    /// Memory of the caller, which a write only reads.
    Borrowed(&'a [u8]),
}

impl Buffer<'_> {
    /// Returns the bytes.
    pub fn as_slice(&self) -> &[u8] {
        match self {
            Buffer::None => &[],
            Buffer::Owned(bytes) => bytes,
            Buffer::BorrowedMut(bytes) => bytes,
            Buffer::Borrowed(bytes) => bytes,
        }
    }

    /// Returns the bytes, if they may be changed.
    pub fn as_mut_slice(&mut self) -> Option<&mut [u8]> {
        match self {
            Buffer::None | Buffer::Borrowed(_) => None,
            Buffer::Owned(bytes) => Some(bytes),
            Buffer::BorrowedMut(bytes) => Some(bytes),
        }
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.as_slice().len()
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether the address and length suit direct I/O.
    pub fn is_aligned(&self) -> bool {
        let bytes = self.as_slice();
        bytes.len().is_multiple_of(BLOCK_BYTES)
            && (bytes.is_empty() || bytes.as_ptr().addr().is_multiple_of(BLOCK_BYTES))
    }
}

/// Zeroed memory that starts on a block and has whole blocks.
pub struct AlignedBuf {
    start: NonNull<u8>,
    len: usize,
}

impl AlignedBuf {
    /// Allocates at least `len` zero bytes, rounded up to whole blocks, at least one.
    pub fn zeroed(len: usize) -> AlignedBuf {
        let len = len.max(1).next_multiple_of(BLOCK_BYTES);
        let layout = AlignedBuf::layout(len);
        // SAFETY: the layout is not empty.
        let start = unsafe { alloc(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        if len >= HUGE_BYTES {
            // A disk accepts a limited number of scatter segments per request, and adjacent pages form one segment. If
            // the advice is refused, pages are small.
            // SAFETY: the range was just allocated and is whole pages; advice does not change its content.
            let _ = unsafe {
                madvise(start.as_ptr().cast(), len / HUGE_BYTES * HUGE_BYTES, Advice::LinuxHugepage)
            };
        }
        // SAFETY: allocated with this length; zeros are bytes.
        unsafe { start.as_ptr().write_bytes(0, len) };
        AlignedBuf { start, len }
    }

    fn layout(len: usize) -> Layout {
        let align = if len >= HUGE_BYTES { HUGE_BYTES } else { BLOCK_BYTES };
        Layout::from_size_align(len, align).expect("the length fits into the address space")
    }
}

impl Drop for AlignedBuf {
    fn drop(&mut self) {
        // SAFETY: allocated by `zeroed` with this layout, and freed once.
        unsafe { dealloc(self.start.as_ptr(), AlignedBuf::layout(self.len)) };
    }
}

// SAFETY: it owns its memory, like a boxed slice.
unsafe impl Send for AlignedBuf {}
// SAFETY: shared access only reads.
unsafe impl Sync for AlignedBuf {}

impl Deref for AlignedBuf {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: allocated with this length, initialised, and borrowed with `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for AlignedBuf {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and exclusive with `self`.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl fmt::Debug for AlignedBuf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "AlignedBuf({} bytes)", self.len)
    }
}
