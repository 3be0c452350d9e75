//! [`ProcessToken`]: detects whether a mapping was made by this process or inherited through a fork.
//!
//! Mappings are not inherited (MADV_DONTFORK), so in a child every older guard points at nothing, or at something
//! else. One page that the kernel zeroes in a child distinguishes the two for the price of a load. A child that maps
//! regions of its own gets a token of its own.

use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Proof that a value was made in a certain process, and not inherited through a fork.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessToken(u64);

impl ProcessToken {
    /// Returns the token of this process.
    pub fn of_this_process() -> ProcessToken {
        let word = token_word();
        match word.load(Ordering::Relaxed) {
            0 => {
                // First use, or first use after a fork. The fork copied the counter like all ordinary memory, so the
                // next number differs from every ancestor's.
                let fresh = LAST.fetch_add(1, Ordering::Relaxed) + 1;
                match word.compare_exchange(0, fresh, Ordering::Relaxed, Ordering::Relaxed) {
                    Ok(_) => ProcessToken(fresh),
                    Err(by_another_thread) => ProcessToken(by_another_thread),
                }
            }
            token => ProcessToken(token),
        }
    }

    /// Returns whether values made under this token are still valid: `false` in a forked child.
    #[inline]
    pub fn is_valid(self) -> bool {
        token_word().load(Ordering::Relaxed) == self.0
    }
}

/// A value that each process has for itself: a forked child starts with a new one and does not touch its parent's,
/// whose locks may be held and whose threads do not exist in the child.
#[derive(Debug)]
pub struct PerProcess<T: 'static>(OnceLock<Incarnation<T>>);

#[derive(Debug)]
struct Incarnation<T: 'static> {
    made_in: ProcessToken,
    value: T,
    /// Value of a forked child.
    next: OnceLock<Box<Incarnation<T>>>,
}

impl<T> Incarnation<T> {
    fn new(value: T) -> Incarnation<T> {
        Incarnation { made_in: ProcessToken::of_this_process(), value, next: OnceLock::new() }
    }
}

impl<T> PerProcess<T> {
    /// Creates an empty cell.
    #[allow(clippy::new_without_default)] // for statics
    pub const fn new() -> PerProcess<T> {
        PerProcess(OnceLock::new())
    }

    /// Returns this process's value, and creates it with `make` at the first call.
    pub fn get_or_init(&'static self, make: impl Fn() -> T) -> &'static T {
        let mut found = self.0.get_or_init(|| Incarnation::new(make()));
        while !found.made_in.is_valid() {
            found = found.next.get_or_init(|| Box::new(Incarnation::new(make())));
        }
        &found.value
    }
}

static LAST: AtomicU64 = AtomicU64::new(0);

/// Page of private memory with MADV_WIPEONFORK.
struct WipeOnForkPage(NonNull<AtomicU64>);

// SAFETY: the page exists as long as the process and holds an atomic.
unsafe impl Send for WipeOnForkPage {}
// SAFETY: as above.
unsafe impl Sync for WipeOnForkPage {}

#[inline]
fn token_word() -> &'static AtomicU64 {
    static PAGE: OnceLock<WipeOnForkPage> = OnceLock::new();
    let page = PAGE.get_or_init(|| {
        const PAGE_BYTES: usize = 4096;
        // SAFETY: a new private mapping at an address that the kernel chooses.
        let page = unsafe {
            let access = ProtFlags::READ | ProtFlags::WRITE;
            rustix::mm::mmap_anonymous(std::ptr::null_mut(), PAGE_BYTES, access, MapFlags::PRIVATE)
        }
        .expect("one page of memory");
        // SAFETY: the page was mapped just above.
        unsafe { rustix::mm::madvise(page, PAGE_BYTES, Advice::LinuxWipeOnFork) }
            .expect("Linux 4.14 or newer");
        WipeOnForkPage(NonNull::new(page.cast::<AtomicU64>()).expect("mmap does not return null"))
    });
    // SAFETY: zeroed, aligned memory is an AtomicU64; the page is never unmapped, and a child inherits it.
    unsafe { page.0.as_ref() }
}
