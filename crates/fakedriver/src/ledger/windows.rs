//! Memory of the host that devices were given. A device has another address for it than the host: a second mapping of the
//! same pages. Only what cannot be mapped twice, private memory for example, has the host's address for both.
//!
//! Stricter than a real driver: whole pages only, and what is registered must still be mapped when it is given back.

use std::ffi::c_int;
use std::fs;

use super::{Api, Done, Ledger, Use, require};
use crate::codes::{ALREADY_REGISTERED, INVALID_VALUE, NOT_REGISTERED, NOT_SUPPORTED};
use crate::pages::{self, PAGE};

/// `CU_MEMHOSTREGISTER_PORTABLE`, `…_DEVICEMAP`, `…_READ_ONLY`
const PORTABLE: u32 = 1;
const MAPPED: u32 = 2;
const READ_ONLY: u32 = 8;

#[derive(Debug)]
pub(super) struct Window {
    pub(super) bytes: u64,
    /// Where it begins for devices.
    pub(super) address: u64,
    flags: u32,
    pub(super) device: c_int,
}

impl Window {
    /// Whether a device may use its bytes so.
    pub(super) fn admits(&self, device: c_int, how: Use) -> bool {
        self.flags & MAPPED != 0
            && (self.device == device || self.flags & PORTABLE != 0)
            && (how == Use::Read || self.flags & READ_ONLY == 0)
    }
}

impl Ledger {
    pub(crate) fn register(&mut self, at: u64, bytes: u64, flags: u32) -> Done {
        let device = self.current()?;
        // HIP's header has a name for the third flag, which some of its runtimes refuse and the others ignore.
        let known = PORTABLE | MAPPED | if self.api == Api::Cuda { READ_ONLY } else { 0 };
        require(flags & !known == 0, INVALID_VALUE)?;
        require(at > 0 && at.is_multiple_of(PAGE), INVALID_VALUE)?;
        require(bytes > 0 && bytes.is_multiple_of(PAGE), INVALID_VALUE)?;
        let is_read_only = flags & READ_ONLY != 0;
        require(!is_read_only || self.settings.has_readonly, NOT_SUPPORTED)?;
        let overlaps = |(&start, window): (&u64, &Window)| start < at + bytes && at < start + window.bytes;
        require(!self.windows.iter().any(overlaps), ALREADY_REGISTERED)?;
        let pinned_for = if is_read_only { Use::Read } else { Use::Write };
        let mappings = mappings(at, bytes, pinned_for).ok_or(INVALID_VALUE)?;
        let twin = match mappings.are_shared && flags & MAPPED != 0 {
            true => pages::duplicate(&mappings.pieces, !is_read_only).ok(),
            false => None,
        };
        self.windows.insert(at, Window { bytes, address: twin.unwrap_or(at), flags, device });
        Ok(())
    }

    pub(crate) fn window_address(&self, at: u64, flags: u32) -> Result<u64, c_int> {
        self.current()?;
        require(flags == 0, INVALID_VALUE)?;
        let holds = |(start, window): &(&u64, &Window)| {
            (**start..**start + window.bytes).contains(&at) && window.flags & MAPPED != 0
        };
        let (start, window) = self.windows.iter().find(holds).ok_or(INVALID_VALUE)?;
        Ok(window.address + (at - start))
    }

    pub(crate) fn unregister(&mut self, at: u64) -> Done {
        self.current()?;
        let window = self.windows.remove(&at).ok_or(NOT_REGISTERED)?;
        if window.address != at {
            pages::unmap(window.address, window.bytes);
        }
        if mappings(at, window.bytes, Use::Read).is_none() {
            self.complaints.push("memory of the host was unmapped before its window".to_owned());
        }
        Ok(())
    }
}

/// What a range of the host's memory consists of.
struct Mappings {
    /// Where each piece begins, and its length.
    pieces: Vec<(u64, u64)>,
    are_shared: bool,
}

/// By what the kernel says; none if this process may not use all of the range so.
fn mappings(at: u64, bytes: u64, how: Use) -> Option<Mappings> {
    let text = fs::read_to_string("/proc/self/maps").expect("a list of mappings");
    let (mut reached, target) = (at, at + bytes);
    let mut found = Mappings { pieces: vec![], are_shared: true };
    // Sorted by address.
    for line in text.lines() {
        let mut words = line.split(' ');
        let (range, rights) = (words.next().expect("a range"), words.next().expect("rights"));
        let (start, end) = range.split_once('-').expect("start-end");
        let [start, end] = [start, end].map(|word| u64::from_str_radix(word, 16).expect("an address"));
        if reached < target && (start..end).contains(&reached) {
            if !rights.starts_with(if how == Use::Write { "rw" } else { "r" }) {
                return None;
            }
            found.are_shared &= rights.ends_with('s');
            found.pieces.push((reached, end.min(target) - reached));
            reached = end;
        }
    }
    (reached >= target).then_some(found)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::Pages;
    use crate::settings::Settings;

    #[repr(align(4096))]
    struct Page([u8; PAGE as usize]);

    fn ledger(settings: &str) -> Ledger {
        let mut ledger = Ledger::new(Settings::parse(settings));
        ledger.init(0).unwrap();
        let context = ledger.retain(0).unwrap();
        ledger.set_context(context).unwrap();
        ledger
    }

    #[test]
    fn a_device_without_read_only_windows_says_that_it_has_none() {
        let page = Page([0; PAGE as usize]);
        let at = std::ptr::from_ref(&page.0).addr() as u64;
        for (settings, code) in [("readonly=0", Err(NOT_SUPPORTED)), ("", Ok(()))] {
            let mut ledger = ledger(settings);
            assert_eq!(ledger.attribute(113, 0), Ok(code.is_ok().into()));
            assert_eq!(ledger.register(at, PAGE, PORTABLE | MAPPED | READ_ONLY), code);
            assert_eq!(ledger.left(), if code.is_ok() { "1 windows, 1 contexts" } else { "1 contexts" });
        }
    }

    #[test]
    fn private_memory_has_one_address() {
        let page = Page([0; PAGE as usize]);
        let at = std::ptr::from_ref(&page.0).addr() as u64;
        let mut ledger = ledger("");
        ledger.register(at, PAGE, PORTABLE | MAPPED).unwrap();
        assert_eq!(ledger.window_address(at, 0), Ok(at));
        ledger.unregister(at).unwrap();
        assert!(mappings(at, PAGE, Use::Write).is_some(), "what is the host's stays mapped");
    }

    /// Memory whose pages have different rights is several mappings, and only the first of them would be looked at by one
    /// call to the kernel.
    #[test]
    fn shared_memory_has_a_second_address_that_ends_with_its_window() {
        let byte = |address: u64| std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
        let memory = Pages::new(0, 3 * PAGE).unwrap();
        let at = memory.map_anywhere(true).unwrap();
        pages::protect(at + PAGE, PAGE, false).unwrap();
        for page in 0..3 {
            // SAFETY: the view is mapped as long as its pages live, and no reference to it exists.
            unsafe { byte(memory.view() + page * PAGE).write(10 + page as u8) };
        }
        let (inode, maps) = (memory.inode().to_string(), || fs::read_to_string("/proc/self/maps").unwrap());
        let times_mapped =
            || maps().lines().filter(|line| line.split_whitespace().any(|word| word == inode)).count();
        let before = times_mapped();
        let mut ledger = ledger("");
        assert_eq!(ledger.register(at, 3 * PAGE, PORTABLE | MAPPED), Err(INVALID_VALUE), "the second page");
        ledger.register(at, 3 * PAGE, PORTABLE | MAPPED | READ_ONLY).unwrap();
        let twin = ledger.window_address(at, 0).unwrap();
        assert!(twin.abs_diff(at) >= 3 * PAGE, "{twin:#x} and {at:#x}");
        assert_eq!(ledger.window_address(at + PAGE + 5, 0), Ok(twin + PAGE + 5));
        for page in 0..3 {
            // SAFETY: the window has three pages, and nobody writes them now.
            assert_eq!(unsafe { byte(twin + page * PAGE).read() }, 10 + page as u8);
            assert!(mappings(twin + page * PAGE, PAGE, Use::Write).is_none(), "opened to be read");
        }
        assert!(times_mapped() > before);
        ledger.unregister(at).unwrap();
        assert_eq!(times_mapped(), before);
        assert_eq!(ledger.left(), "1 contexts");
        pages::unmap(at, 3 * PAGE);
    }
}
