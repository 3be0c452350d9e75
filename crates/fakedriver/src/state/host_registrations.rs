//! Registered host memory. Devices have another address for it than the host: a second mapping of the same pages.
//! Only memory that cannot be mapped twice, for example private memory, has one address for both.
//!
//! Stricter than a real driver: whole pages only, and registered memory must still be mapped when it is unregistered.

use std::ffi::c_int;
use std::fs;

use super::{Access, Api, Done, DriverState, require};
use crate::codes::{ALREADY_REGISTERED, INVALID_VALUE, NOT_REGISTERED, NOT_SUPPORTED};
use crate::memory::{self, PAGE};

/// `CU_MEMHOSTREGISTER_PORTABLE`, `…_DEVICEMAP`, `…_READ_ONLY`
const PORTABLE: u32 = 1;
const MAPPED: u32 = 2;
const READ_ONLY: u32 = 8;

#[derive(Debug)]
pub(super) struct HostRegistration {
    pub(super) bytes: u64,
    /// Start address for devices.
    pub(super) address: u64,
    flags: u32,
    pub(super) device: c_int,
}

impl HostRegistration {
    /// Returns whether a device may access its bytes.
    pub(super) fn allows(&self, device: c_int, access: Access) -> bool {
        self.flags & MAPPED != 0
            && (self.device == device || self.flags & PORTABLE != 0)
            && (access == Access::Read || self.flags & READ_ONLY == 0)
    }
}

impl DriverState {
    pub(crate) fn register(&mut self, at: u64, bytes: u64, flags: u32) -> Done {
        let device = self.current()?;
        // HIP's header has a name for the third flag, which some of its runtimes reject and the others ignore.
        let known = PORTABLE | MAPPED | if self.api == Api::Cuda { READ_ONLY } else { 0 };
        require(flags & !known == 0, INVALID_VALUE)?;
        require(at > 0 && at.is_multiple_of(PAGE), INVALID_VALUE)?;
        require(bytes > 0 && bytes.is_multiple_of(PAGE), INVALID_VALUE)?;
        let is_read_only = flags & READ_ONLY != 0;
        require(!is_read_only || self.settings.has_readonly, NOT_SUPPORTED)?;
        let overlaps =
            |(&start, other): (&u64, &HostRegistration)| start < at + bytes && at < start + other.bytes;
        require(!self.registrations.iter().any(overlaps), ALREADY_REGISTERED)?;
        let needed = if is_read_only { Access::Read } else { Access::Write };
        let mappings = mappings(at, bytes, needed).ok_or(INVALID_VALUE)?;
        let alias = match mappings.are_shared && flags & MAPPED != 0 {
            true => memory::duplicate(&mappings.pieces, !is_read_only).ok(),
            false => None,
        };
        let address = alias.unwrap_or(at);
        self.registrations.insert(at, HostRegistration { bytes, address, flags, device });
        Ok(())
    }

    pub(crate) fn device_address(&self, at: u64, flags: u32) -> Result<u64, c_int> {
        self.current()?;
        require(flags == 0, INVALID_VALUE)?;
        let contains = |(start, registration): &(&u64, &HostRegistration)| {
            (**start..**start + registration.bytes).contains(&at) && registration.flags & MAPPED != 0
        };
        let (start, registration) = self.registrations.iter().find(contains).ok_or(INVALID_VALUE)?;
        Ok(registration.address + (at - start))
    }

    pub(crate) fn unregister(&mut self, at: u64) -> Done {
        self.current()?;
        let registration = self.registrations.remove(&at).ok_or(NOT_REGISTERED)?;
        if registration.address != at {
            memory::unmap(registration.address, registration.bytes);
        }
        if mappings(at, registration.bytes, Access::Read).is_none() {
            self.violations.push("host memory was unmapped before it was unregistered".to_owned());
        }
        Ok(())
    }
}

/// Mappings of a range of host memory.
struct Mappings {
    /// Start and length of each piece.
    pieces: Vec<(u64, u64)>,
    are_shared: bool,
}

/// Reads the mappings of a range from `/proc`; `None` if this process does not have the access to all of it.
fn mappings(at: u64, bytes: u64, access: Access) -> Option<Mappings> {
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
            if !rights.starts_with(if access == Access::Write { "rw" } else { "r" }) {
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
    use crate::memory::DeviceAllocation;
    use crate::settings::Settings;

    #[repr(align(4096))]
    struct Page([u8; PAGE as usize]);

    fn state(settings: &str) -> DriverState {
        let mut state = DriverState::new(Settings::parse(settings));
        state.init(0).unwrap();
        let context = state.retain(0).unwrap();
        state.set_context(context).unwrap();
        state
    }

    #[test]
    fn device_without_read_only_registration_reports_unsupported() {
        let page = Page([0; PAGE as usize]);
        let at = std::ptr::from_ref(&page.0).addr() as u64;
        for (settings, code) in [("readonly=0", Err(NOT_SUPPORTED)), ("", Ok(()))] {
            let mut state = state(settings);
            assert_eq!(state.attribute(113, 0), Ok(code.is_ok().into()));
            assert_eq!(state.register(at, PAGE, PORTABLE | MAPPED | READ_ONLY), code);
            assert_eq!(
                state.leaks(),
                if code.is_ok() { "1 registrations, 1 contexts" } else { "1 contexts" }
            );
        }
    }

    #[test]
    fn registered_private_memory_keeps_its_address() {
        let page = Page([0; PAGE as usize]);
        let at = std::ptr::from_ref(&page.0).addr() as u64;
        let mut state = state("");
        state.register(at, PAGE, PORTABLE | MAPPED).unwrap();
        assert_eq!(state.device_address(at, 0), Ok(at));
        state.unregister(at).unwrap();
        assert!(mappings(at, PAGE, Access::Write).is_some(), "host memory was unmapped");
    }

    /// Memory whose pages have different protection is several mappings, and one system call would only handle the
    /// first of them.
    #[test]
    fn registered_shared_memory_has_alias_until_unregistered() {
        let byte = |address: u64| std::ptr::with_exposed_provenance_mut::<u8>(address as usize);
        let memory = DeviceAllocation::new(0, 3 * PAGE).unwrap();
        let at = memory.map_anywhere(true).unwrap();
        memory::protect(at + PAGE, PAGE, false).unwrap();
        for page in 0..3 {
            // SAFETY: the view is mapped during the life of the allocation, and no reference to it exists.
            unsafe { byte(memory.view() + page * PAGE).write(10 + page as u8) };
        }
        let (inode, maps) = (memory.inode().to_string(), || fs::read_to_string("/proc/self/maps").unwrap());
        let times_mapped =
            || maps().lines().filter(|line| line.split_whitespace().any(|word| word == inode)).count();
        let before = times_mapped();
        let mut state = state("");
        assert_eq!(
            state.register(at, 3 * PAGE, PORTABLE | MAPPED),
            Err(INVALID_VALUE),
            "the second page is read-only"
        );
        state.register(at, 3 * PAGE, PORTABLE | MAPPED | READ_ONLY).unwrap();
        let alias = state.device_address(at, 0).unwrap();
        assert!(alias.abs_diff(at) >= 3 * PAGE, "{alias:#x} and {at:#x}");
        assert_eq!(state.device_address(at + PAGE + 5, 0), Ok(alias + PAGE + 5));
        for page in 0..3 {
            // SAFETY: the registration has three pages, and no thread writes them now.
            assert_eq!(unsafe { byte(alias + page * PAGE).read() }, 10 + page as u8);
            assert!(
                mappings(alias + page * PAGE, PAGE, Access::Write).is_none(),
                "the registration is read-only"
            );
        }
        assert!(times_mapped() > before);
        state.unregister(at).unwrap();
        assert_eq!(times_mapped(), before);
        assert_eq!(state.leaks(), "1 contexts");
        memory::unmap(at, 3 * PAGE);
    }
}
