//! Whether a mapping was made by this process or inherited from the one that forked it.
//!
//! Mappings are not inherited (MADV_DONTFORK), so in a child every older guard points at nothing, or worse, at
//! something else. One page that the kernel zeroes in a child tells them apart for the price of a load. A
//! child that maps regions of its own gets a token of its own.

use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags};

/// Proof that something was made in a certain process, and not inherited from the one that forked it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProcessToken(u64);

impl ProcessToken {
    /// The token of this process.
    pub fn of_this_process() -> ProcessToken {
        let mark = mark();
        match mark.load(Ordering::Relaxed) {
            0 => {
                // First use, or first use after a fork. The counter was copied by the fork like all ordinary
                // memory, so the next number differs from every ancestor's.
                let fresh = LAST.fetch_add(1, Ordering::Relaxed) + 1;
                match mark.compare_exchange(0, fresh, Ordering::Relaxed, Ordering::Relaxed) {
                    Ok(_) => ProcessToken(fresh),
                    Err(by_another_thread) => ProcessToken(by_another_thread),
                }
            }
            armed => ProcessToken(armed),
        }
    }

    /// Whether what was made under this token is still there: `false` in a forked child.
    #[inline]
    pub fn is_valid(self) -> bool {
        mark().load(Ordering::Relaxed) == self.0
    }
}

/// A value of which each process has its own: a forked child begins with a new one and leaves its parent's alone, whose
/// locks may be held and whose threads are missing.
#[derive(Debug)]
pub struct PerProcess<T: 'static>(OnceLock<Incarnation<T>>);

#[derive(Debug)]
struct Incarnation<T: 'static> {
    made_in: ProcessToken,
    value: T,
    /// That of a child.
    next: OnceLock<Box<Incarnation<T>>>,
}

impl<T> Incarnation<T> {
    fn new(value: T) -> Incarnation<T> {
        Incarnation { made_in: ProcessToken::of_this_process(), value, next: OnceLock::new() }
    }
}

impl<T> PerProcess<T> {
    /// None yet.
    #[allow(clippy::new_without_default)] // for statics
    pub const fn new() -> PerProcess<T> {
        PerProcess(OnceLock::new())
    }

    /// This process's value.
    pub fn get_or_init(&'static self, make: impl Fn() -> T) -> &'static T {
        let mut found = self.0.get_or_init(|| Incarnation::new(make()));
        while !found.made_in.is_valid() {
            found = found.next.get_or_init(|| Box::new(Incarnation::new(make())));
        }
        &found.value
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
