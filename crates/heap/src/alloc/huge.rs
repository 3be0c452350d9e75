//! Huge pages for a large slab.
//!
//! A step of the allocator among millions of blocks is a few scattered reads. On ordinary pages each of them also
//! takes a TLB miss; on huge pages the same step takes two thirds of the time. Most machines grant huge pages on
//! request (`/sys/kernel/mm/transparent_hugepage/enabled` is `madvise`).

use rustix::mm::{Advice, madvise};

/// Shorter slabs gain nothing from huge pages.
const HUGE_PAGE_BYTES: usize = 2 << 20;

const PAGE_BYTES: usize = 4096;

/// Requests huge pages for the memory of `slab`, used or not. The kernel may ignore the advice; nothing depends on
/// it.
pub(super) fn advise_huge_pages<T>(slab: &mut Vec<T>) {
    let start = slab.as_mut_ptr().addr().next_multiple_of(PAGE_BYTES);
    let end = slab.as_mut_ptr().addr() + slab.capacity() * size_of::<T>();
    let Some(bytes) = end.checked_sub(start).filter(|&bytes| bytes >= HUGE_PAGE_BYTES) else { return };
    let start = slab.as_mut_ptr().with_addr(start);
    // SAFETY: whole pages of memory that the slab owns; the advice changes how they are backed, not their contents.
    let _ = unsafe { madvise(start.cast(), bytes - bytes % PAGE_BYTES, Advice::LinuxHugepage) };
}
