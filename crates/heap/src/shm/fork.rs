//! Whether a mapping was made by this process or inherited from the one that forked it.
//!
//! Mappings are not inherited (MADV_DONTFORK), so in a child every older guard points at nothing, or worse, at
//! something else. One page that the kernel zeroes in a child tells them apart for the price of a load. A
//! child that maps regions of its own gets a token of its own.

use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Proof that a mapping was made in a certain process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Token(u64);

impl Token {
    /// The token of this process.
    pub(crate) fn of_this_process() -> Token {
        let mark = mark();
        match mark.load(Ordering::Relaxed) {
            0 => {
                // First use, or first use after a fork. The counter was copied by the fork like all ordinary
                // memory, so the next number differs from every ancestor's.
                let fresh = LAST.fetch_add(1, Ordering::Relaxed) + 1;
                match mark.compare_exchange(0, fresh, Ordering::Relaxed, Ordering::Relaxed) {
                    Ok(_) => Token(fresh),
                    Err(by_another_thread) => Token(by_another_thread),
                }
            }
            armed => Token(armed),
        }
    }

    /// Whether what was made under this token is still there: `false` in a forked child.
    #[inline]
    pub(crate) fn is_valid(self) -> bool {
        mark().load(Ordering::Relaxed) == self.0
    }
}

static LAST: AtomicU64 = AtomicU64::new(0);

/// A page of private memory with MADV_WIPEONFORK.
struct Mark(NonNull<AtomicU64>);

// SAFETY: the page lives as long as the process and holds an atomic.
unsafe impl Send for Mark {}
// SAFETY: as above.
unsafe impl Sync for Mark {}

#[inline]
fn mark() -> &'static AtomicU64 {
    static MARK: OnceLock<Mark> = OnceLock::new();
    let mark = MARK.get_or_init(|| {
        const PAGE: usize = 4096;
        // SAFETY: a fresh private mapping at an address that the kernel chooses.
        let page = unsafe {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), PAGE, access, MapFlags::PRIVATE)
        }
        .expect("one page of memory");
        // SAFETY: the page was mapped just above.
        unsafe { rustix::mm::madvise(page, PAGE, Advice::LinuxWipeOnFork) }.expect("Linux 4.14 or newer");
        Mark(NonNull::new(page.cast::<AtomicU64>()).expect("mmap does not return null"))
    });
    // SAFETY: zeroed, aligned memory is an AtomicU64; the page is never unmapped, and a child inherits it.
    unsafe { mark.0.as_ref() }
}
