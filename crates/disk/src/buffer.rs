//! [`Buffer`]: memory that goes into an operation by value and comes back with its result.
//!
//! Everything that direct I/O touches starts on a multiple of [`BLOCK_BYTES`] and has a length that is one: the memory,
//! the place in the file, the number of bytes.

use std::alloc::{Layout, alloc, dealloc, handle_alloc_error};
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;

use rustix::mm::{Advice, madvise};

/// What addresses, offsets and lengths of direct I/O are multiples of. 4 KiB suits every SSD and file system.
pub const BLOCK_BYTES: usize = 4096;

/// Buffers from this size on lie on huge pages, where the system has them.
const HUGE_BYTES: usize = 2 << 20;

/// Memory of an operation.
#[derive(Debug, Default)]
pub enum Buffer<'a> {
    /// None: a sync has no bytes.
    #[default]
    None,
    /// Its own memory.
    Owned(Aligned),
    /// Somebody's memory, which a read fills.
    Fill(&'a mut [u8]),
    /// Somebody's memory, which a write only looks at.
    Lent(&'a [u8]),
}

impl Buffer<'_> {
    /// The bytes.
    pub fn as_slice(&self) -> &[u8] {
        match self {
            Buffer::None => &[],
            Buffer::Owned(bytes) => bytes,
            Buffer::Fill(bytes) => bytes,
            Buffer::Lent(bytes) => bytes,
        }
    }

    /// The bytes, if they may be changed.
    pub fn as_mut_slice(&mut self) -> Option<&mut [u8]> {
        match self {
            Buffer::None | Buffer::Lent(_) => None,
            Buffer::Owned(bytes) => Some(bytes),
            Buffer::Fill(bytes) => Some(bytes),
        }
    }

    /// How many bytes.
    pub fn len(&self) -> usize {
        self.as_slice().len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Whether direct I/O takes it.
    pub fn is_aligned(&self) -> bool {
        let bytes = self.as_slice();
        bytes.len().is_multiple_of(BLOCK_BYTES)
            && (bytes.is_empty() || bytes.as_ptr().addr().is_multiple_of(BLOCK_BYTES))
    }
}

/// Zeroed memory that starts on a block and is whole blocks long.
pub struct Aligned {
    start: NonNull<u8>,
    len: usize,
}

impl Aligned {
    /// At least `len` bytes, all zero: rounded up to whole blocks, at least one.
    pub fn zeroed(len: usize) -> Aligned {
        let len = len.max(1).next_multiple_of(BLOCK_BYTES);
        let layout = Aligned::layout(len);
        // SAFETY: the layout is not empty.
        let start = unsafe { alloc(layout) };
        let Some(start) = NonNull::new(start) else { handle_alloc_error(layout) };
        if len >= HUGE_BYTES {
            // A disk takes a request in a bounded number of pieces, and pages that follow each other are one. If it is
            // refused, pages are small.
            // SAFETY: the range was just allocated and is whole pages; advice changes nothing of what it holds.
            let _ = unsafe {
                madvise(start.as_ptr().cast(), len / HUGE_BYTES * HUGE_BYTES, Advice::LinuxHugepage)
            };
        }
        // SAFETY: allocated with this length; zeros are bytes.
        unsafe { start.as_ptr().write_bytes(0, len) };
        Aligned { start, len }
    }

    fn layout(len: usize) -> Layout {
        let align = if len >= HUGE_BYTES { HUGE_BYTES } else { BLOCK_BYTES };
        Layout::from_size_align(len, align).expect("a length that fits in memory")
    }
}

impl Drop for Aligned {
    fn drop(&mut self) {
        // SAFETY: allocated by `zeroed` with this layout, and given back once.
        unsafe { dealloc(self.start.as_ptr(), Aligned::layout(self.len)) };
    }
}

// SAFETY: it owns its memory, as a boxed slice does.
unsafe impl Send for Aligned {}
// SAFETY: shared access only reads.
unsafe impl Sync for Aligned {}

impl Deref for Aligned {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: allocated with this length, initialised, and borrowed with `self`.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }
}

impl DerefMut for Aligned {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and exclusive with `self`.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

impl fmt::Debug for Aligned {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Aligned({} bytes)", self.len)
    }
}
