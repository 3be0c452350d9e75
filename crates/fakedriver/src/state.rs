//! [`DriverState`]: resources that were created and not yet freed, and the rules for both.
//!
//! Invariant: every entry was checked when it was created, so freeing it only has to find it, with the same
//! arguments.

mod host_registrations;
mod streams;

pub(crate) use streams::StreamOp;

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::ffi::c_int;
use std::rc::Rc;

use crate::codes::{
    INVALID_CONTEXT, INVALID_DEVICE, INVALID_HANDLE, INVALID_VALUE, MAP_FAILED, NOT_INITIALIZED,
    NOT_SUPPORTED, OUT_OF_MEMORY,
};
use crate::memory::{self, DeviceAllocation};
use crate::settings::Settings;
use host_registrations::HostRegistration;
use streams::Stream;

/// Vendor API of a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Api {
    Cuda,
    Hip,
}

type Done = Result<(), c_int>;

/// Access to memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Access {
    Read,
    Write,
}

/// Relevant fields of `CUmemAllocationProp`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Prop {
    pub(crate) kind: c_int,
    pub(crate) handle_types: c_int,
    pub(crate) location_kind: c_int,
    pub(crate) device: c_int,
    /// All other fields combined; must be 0.
    pub(crate) rest: u64,
}

#[derive(Debug)]
struct Allocation {
    pages: Rc<DeviceAllocation>,
    can_export: bool,
}

#[derive(Debug)]
struct Mapping {
    pages: Rc<DeviceAllocation>,
    access: BTreeSet<c_int>,
}

#[derive(Debug)]
struct Opened {
    pages: DeviceAllocation,
    count: u32,
    owner: u32,
}

#[derive(Debug)]
pub(crate) struct DriverState {
    pub(crate) settings: Settings,
    pub(crate) api: Api,
    is_initialized: bool,
    handles_made: u64,
    allocations: BTreeMap<u64, Allocation>,
    reservations: BTreeMap<u64, u64>,
    mappings: BTreeMap<u64, Mapping>,
    /// Allocated without virtual memory management.
    pointers: BTreeMap<u64, DeviceAllocation>,
    opened: BTreeMap<u64, Opened>,
    streams: BTreeMap<u64, Stream>,
    /// Registered host memory, by its address for the host.
    registrations: BTreeMap<u64, HostRegistration>,
    /// Reference count of each device's primary context.
    retained: BTreeMap<c_int, u32>,
    /// Exported descriptors, with their inodes.
    exported: Vec<(c_int, u64)>,
    violations: Vec<String>,
    /// Whether the devices have a permanent error.
    is_broken: bool,
}

// SAFETY: the counts in `Rc` are accessed only under the lock of the call log.
unsafe impl Send for DriverState {}

thread_local! {
    /// Current context of CUDA, 0 for none. `DEVICE` is the current device of HIP.
    static CONTEXT: Cell<usize> = const { Cell::new(0) };
    static DEVICE: Cell<c_int> = const { Cell::new(0) };
}

/// "Address" of the context of device 0.
const CONTEXTS_BEGIN: usize = 0x1000;

impl DriverState {
    pub(crate) fn new(settings: Settings) -> DriverState {
        DriverState {
            settings,
            api: Api::Cuda,
            is_initialized: false,
            handles_made: 0,
            allocations: BTreeMap::new(),
            reservations: BTreeMap::new(),
            mappings: BTreeMap::new(),
            pointers: BTreeMap::new(),
            opened: BTreeMap::new(),
            streams: BTreeMap::new(),
            registrations: BTreeMap::new(),
            retained: BTreeMap::new(),
            exported: vec![],
            violations: vec![],
            is_broken: false,
        }
    }

    /// Describes the resources that are left, and the violations.
    pub(crate) fn leaks(&self) -> String {
        let open = self.exported.iter().filter(|&&(fd, inode)| memory::inode(fd) == Some(inode)).count();
        let counts = [
            (self.allocations.len(), "handles"),
            (self.reservations.len(), "reservations"),
            (self.mappings.len(), "mappings"),
            (self.pointers.len(), "allocations"),
            (self.opened.len(), "opened"),
            (self.streams.len(), "streams"),
            (self.registrations.len(), "registrations"),
            (self.retained.values().sum::<u32>() as usize, "contexts"),
            (open, "descriptors"),
        ];
        let mut words: Vec<String> =
            counts.iter().filter(|(n, _)| *n > 0).map(|(n, what)| format!("{n} {what}")).collect();
        words.extend(self.violations.iter().cloned());
        if words.is_empty() { "nothing left".to_owned() } else { words.join(", ") }
    }

    pub(crate) fn init(&mut self, flags: u32) -> Done {
        require(flags == 0, INVALID_VALUE)?;
        self.is_initialized = true;
        Ok(())
    }

    pub(crate) fn version(&self) -> c_int {
        self.settings.version.unwrap_or(match self.api {
            Api::Cuda => 13_010,
            Api::Hip => 70_125_424,
        })
    }

    pub(crate) fn check_initialized(&self) -> Done {
        require(self.is_initialized, NOT_INITIALIZED)
    }

    pub(crate) fn device(&self, device: c_int) -> Done {
        self.check_initialized()?;
        require((0..self.settings.devices).contains(&device), INVALID_DEVICE)
    }

    pub(crate) fn attribute(&self, attribute: c_int, device: c_int) -> Result<c_int, c_int> {
        self.device(device)?;
        let Settings { has_vmm, has_fd, has_atomics, has_readonly, .. } = self.settings;
        Ok(match (self.api, attribute) {
            (Api::Cuda, 102) | (Api::Hip, 89) => has_vmm.into(),
            (Api::Cuda, 103) => has_fd.into(),
            (Api::Cuda, 113) => has_readonly.into(),
            (Api::Cuda, 86) | (Api::Hip, 15) => has_atomics.into(),
            (Api::Cuda, 75) | (Api::Hip, 23) => 9,
            (Api::Cuda, 76) | (Api::Hip, 61) => 0,
            _ => return Err(INVALID_VALUE),
        })
    }

    pub(crate) fn retain(&mut self, device: c_int) -> Result<usize, c_int> {
        self.device(device)?;
        *self.retained.entry(device).or_insert(0) += 1;
        Ok(CONTEXTS_BEGIN + device as usize)
    }

    pub(crate) fn release_context(&mut self, device: c_int) -> Done {
        self.device(device)?;
        let count = self.retained.get_mut(&device).filter(|count| **count > 0).ok_or(INVALID_CONTEXT)?;
        *count -= 1;
        if *count == 0 {
            // The context is gone, and with it the memory allocated in it.
            let is_used =
                self.pointers.values().any(|pages| pages.device == device) || !self.opened.is_empty();
            if is_used || !self.mappings.is_empty() {
                self.violations.push(format!("context {device} was released before its memory"));
            }
            if self.streams.values().any(|stream| stream.device == device) {
                self.violations.push(format!("context {device} was released before its streams"));
            }
            if self.registrations.values().any(|registration| registration.device == device) {
                self.violations.push(format!("context {device} was released before its registrations"));
            }
        }
        Ok(())
    }

    pub(crate) fn context(&self) -> Result<usize, c_int> {
        self.check_initialized()?;
        Ok(CONTEXT.get())
    }

    pub(crate) fn set_context(&mut self, context: usize) -> Done {
        self.check_initialized()?;
        let is_retained =
            |(device, count): (&c_int, &u32)| CONTEXTS_BEGIN + *device as usize == context && *count > 0;
        require(context == 0 || self.retained.iter().any(is_retained), INVALID_CONTEXT)?;
        CONTEXT.set(context);
        Ok(())
    }

    pub(crate) fn hip_device(&self) -> Result<c_int, c_int> {
        self.check_initialized()?;
        Ok(DEVICE.get())
    }

    pub(crate) fn set_hip_device(&mut self, device: c_int) -> Done {
        self.device(device)?;
        DEVICE.set(device);
        Ok(())
    }

    /// Returns the current device, which most calls need.
    pub(crate) fn current(&self) -> Result<c_int, c_int> {
        self.check_initialized()?;
        match self.api {
            Api::Hip => Ok(DEVICE.get()),
            Api::Cuda => {
                let device = CONTEXT.get().checked_sub(CONTEXTS_BEGIN).ok_or(INVALID_CONTEXT)? as c_int;
                let count = self.retained.get(&device).copied().unwrap_or(0);
                require(count > 0, INVALID_CONTEXT).map(|()| device)
            }
        }
    }

    fn check_prop(&self, prop: &Prop) -> Done {
        self.check_initialized()?;
        require(self.settings.has_vmm, NOT_SUPPORTED)?;
        require(prop.kind == 1 && prop.location_kind == 1 && prop.rest == 0, INVALID_VALUE)?;
        require(prop.handle_types == 0 || prop.handle_types == 1, NOT_SUPPORTED)?;
        require(prop.handle_types == 0 || self.settings.has_fd, NOT_SUPPORTED)?;
        self.device(prop.device)
    }

    pub(crate) fn granularity(&self, prop: &Prop, option: c_int) -> Result<u64, c_int> {
        self.check_prop(prop)?;
        require(option == 0 || option == 1, INVALID_VALUE)?;
        Ok(self.settings.granularity)
    }

    fn check_bytes(&self, bytes: u64) -> Done {
        require(bytes > 0 && bytes.is_multiple_of(self.settings.granularity), INVALID_VALUE)
    }

    pub(crate) fn create(&mut self, bytes: u64, prop: &Prop, flags: u64) -> Result<u64, c_int> {
        self.check_prop(prop)?;
        require(flags == 0, INVALID_VALUE)?;
        self.check_bytes(bytes)?;
        require(bytes <= self.settings.memory, OUT_OF_MEMORY)?;
        let pages = Rc::new(DeviceAllocation::new(prop.device, bytes)?);
        Ok(self.add_allocation(Allocation { pages, can_export: prop.handle_types == 1 }))
    }

    fn add_allocation(&mut self, allocation: Allocation) -> u64 {
        self.handles_made += 1;
        let handle = 0x00ab_0000 + self.handles_made;
        self.allocations.insert(handle, allocation);
        handle
    }

    pub(crate) fn release(&mut self, handle: u64) -> Done {
        self.check_initialized()?;
        self.allocations.remove(&handle).map(drop).ok_or(INVALID_VALUE)
    }

    pub(crate) fn reserve(
        &mut self,
        bytes: u64,
        alignment: u64,
        hint: u64,
        flags: u64,
    ) -> Result<u64, c_int> {
        self.check_initialized()?;
        self.check_bytes(bytes)?;
        require(flags == 0 && hint == 0, INVALID_VALUE)?;
        require(alignment == 0 || alignment.is_power_of_two(), INVALID_VALUE)?;
        let address = memory::reserve(bytes, alignment.max(self.settings.granularity))?;
        self.reservations.insert(address, bytes);
        Ok(address)
    }

    pub(crate) fn free_addresses(&mut self, address: u64, bytes: u64) -> Done {
        self.check_initialized()?;
        require(self.reservations.get(&address) == Some(&bytes), INVALID_VALUE)?;
        require(!self.mappings.contains_key(&address), INVALID_VALUE)?;
        self.reservations.remove(&address);
        memory::unmap(address, bytes);
        Ok(())
    }

    pub(crate) fn map(&mut self, address: u64, bytes: u64, offset: u64, handle: u64, flags: u64) -> Done {
        self.check_initialized()?;
        let allocation = self.allocations.get(&handle).ok_or(INVALID_VALUE)?;
        require(flags == 0 && offset == 0 && bytes == allocation.pages.bytes, INVALID_VALUE)?;
        require(self.reservations.get(&address) == Some(&bytes), INVALID_VALUE)?;
        require(!self.mappings.contains_key(&address), INVALID_VALUE)?;
        let pages = Rc::clone(&allocation.pages);
        pages.map_at(address)?;
        self.mappings.insert(address, Mapping { pages, access: BTreeSet::new() });
        Ok(())
    }

    pub(crate) fn unmap(&mut self, address: u64, bytes: u64) -> Done {
        self.check_initialized()?;
        let mapping = self.mappings.get(&address).ok_or(INVALID_VALUE)?;
        require(mapping.pages.bytes == bytes, INVALID_VALUE)?;
        memory::clear(address, bytes)?;
        self.mappings.remove(&address);
        Ok(())
    }

    /// Grants access. `access`: kind and number of a location, and flags.
    pub(crate) fn set_access(&mut self, address: u64, bytes: u64, access: &[(c_int, c_int, c_int)]) -> Done {
        self.check_initialized()?;
        require(!access.is_empty(), INVALID_VALUE)?;
        for &(kind, device, flags) in access {
            require(kind == 1 && flags == 3, INVALID_VALUE)?;
            self.device(device)?;
        }
        let mapping = self.mappings.get_mut(&address).ok_or(INVALID_VALUE)?;
        require(mapping.pages.bytes == bytes, INVALID_VALUE)?;
        let owner = mapping.pages.device;
        let can_access = |&(_, device, _): &_| self.settings.can_access(device, owner);
        require(access.iter().all(can_access), INVALID_DEVICE)?;
        mapping.access.extend(access.iter().map(|&(_, device, _)| device));
        if self.settings.host_cannot_access { Ok(()) } else { memory::protect(address, bytes, true) }
    }

    pub(crate) fn export(&mut self, handle: u64, kind: c_int, flags: u64) -> Result<c_int, c_int> {
        self.check_initialized()?;
        let allocation = self.allocations.get(&handle).ok_or(INVALID_VALUE)?;
        require(flags == 0 && kind == 1 && allocation.can_export, INVALID_VALUE)?;
        let fd = allocation.pages.duplicate()?;
        self.exported.push((fd, allocation.pages.inode()));
        Ok(fd)
    }

    pub(crate) fn import(&mut self, fd: c_int, kind: c_int) -> Result<u64, c_int> {
        self.check_initialized()?;
        require(self.settings.has_vmm && self.settings.has_fd, NOT_SUPPORTED)?;
        require(kind == 1, INVALID_VALUE)?;
        let pages = DeviceAllocation::open(&format!("/proc/self/fd/{fd}")).ok_or(INVALID_VALUE)?;
        Ok(self.add_allocation(Allocation { pages: Rc::new(pages), can_export: true }))
    }

    pub(crate) fn alloc(&mut self, bytes: u64) -> Result<u64, c_int> {
        let device = self.current()?;
        require(bytes > 0, INVALID_VALUE)?;
        require(bytes <= self.settings.memory, OUT_OF_MEMORY)?;
        let pages = DeviceAllocation::new(device, bytes)?;
        let address = pages.map_anywhere(!self.settings.host_cannot_access)?;
        self.pointers.insert(address, pages);
        Ok(address)
    }

    pub(crate) fn free(&mut self, address: u64) -> Done {
        self.current()?;
        let pages = self.pointers.remove(&address).ok_or(INVALID_VALUE)?;
        memory::unmap(address, pages.bytes);
        Ok(())
    }

    /// Returns a handle: process, descriptor and inode of the memfd.
    pub(crate) fn ipc_handle(&self, address: u64) -> Result<[u8; 64], c_int> {
        self.current()?;
        let pages = self.pointers.get(&address).ok_or(INVALID_VALUE)?;
        let mut handle = [0; 64];
        handle[..4].copy_from_slice(b"FAKE");
        handle[4..8].copy_from_slice(&std::process::id().to_le_bytes());
        let fd = std::os::fd::AsRawFd::as_raw_fd(&pages.fd);
        handle[8..12].copy_from_slice(&fd.to_le_bytes());
        handle[16..24].copy_from_slice(&pages.inode().to_le_bytes());
        Ok(handle)
    }

    pub(crate) fn ipc_open(&mut self, handle: &[u8; 64], flags: u32) -> Result<u64, c_int> {
        let device = self.current()?;
        require(flags == 1, INVALID_VALUE)?;
        require(handle[..4] == *b"FAKE", INVALID_HANDLE)?;
        let number = |at: usize| u32::from_le_bytes(handle[at..at + 4].try_into().expect("four bytes"));
        let inode = u64::from_le_bytes(handle[16..24].try_into().expect("eight bytes"));
        // A process cannot open its own memory.
        require(number(4) != std::process::id(), INVALID_CONTEXT)?;
        if let Some((&address, opened)) =
            self.opened.iter_mut().find(|(_, opened)| opened.pages.inode() == inode)
        {
            opened.count += 1;
            return Ok(address);
        }
        let path = format!("/proc/{}/fd/{}", number(4), number(8));
        let pages = DeviceAllocation::open(&path).filter(|pages| pages.inode() == inode).ok_or(MAP_FAILED)?;
        require(self.settings.can_access(device, pages.device), INVALID_DEVICE)?;
        let address = pages.map_anywhere(!self.settings.host_cannot_access)?;
        self.opened.insert(address, Opened { pages, count: 1, owner: number(4) });
        Ok(address)
    }

    /// Overwrites memory opened by a handle whose owner has exited: its contents are undefined.
    fn poison_orphans(&self) {
        for opened in self.opened.values().filter(|opened| !memory::is_running(opened.owner)) {
            // SAFETY: this value's own mapping of the whole allocation.
            unsafe {
                let at = std::ptr::with_exposed_provenance_mut::<u8>(opened.pages.view() as usize);
                at.write_bytes(0xdb, opened.pages.bytes as usize);
            }
        }
    }

    /// Returns the device of an address, which is the only supported attribute.
    pub(crate) fn pointer_attribute(&self, attribute: c_int, address: u64) -> Result<c_int, c_int> {
        self.current()?;
        require(attribute == 9, INVALID_VALUE)?;
        let contains = |start: u64, len: u64| (start..start + len).contains(&address);
        let mapped = self.mappings.iter().map(|(&start, mapping)| (start, &*mapping.pages));
        let mut memory = mapped.chain(self.allocated_or_opened());
        if let Some((_, pages)) = memory.find(|&(start, pages)| contains(start, pages.bytes)) {
            return Ok(pages.device);
        }
        let mut registrations = self.registrations.values();
        let found = registrations.find(|registration| contains(registration.address, registration.bytes));
        found.map(|registration| registration.device).ok_or(INVALID_VALUE)
    }

    pub(crate) fn ipc_close(&mut self, address: u64) -> Done {
        self.current()?;
        let opened = self.opened.get_mut(&address).ok_or(INVALID_VALUE)?;
        opened.count -= 1;
        if opened.count == 0 {
            let opened = self.opened.remove(&address).expect("found above");
            memory::unmap(address, opened.pages.bytes);
        }
        Ok(())
    }

    /// Returns the address at which this driver accesses a range of device addresses, if the current device may do
    /// so.
    fn resolve(&self, address: u64, bytes: u64, access: Access) -> Result<u64, c_int> {
        let device = self.current()?;
        self.poison_orphans();
        let contains =
            |start: u64, len: u64| address >= start && address.saturating_add(bytes) <= start + len;
        let mapped = self.mappings.iter().filter(|(_, mapping)| mapping.access.contains(&device));
        let mapped = mapped.map(|(&start, mapping)| (start, &*mapping.pages));
        let mut memory = mapped.chain(self.allocated_or_opened());
        if let Some((start, pages)) = memory.find(|&(start, pages)| contains(start, pages.bytes)) {
            return Ok(pages.view() + (address - start));
        }
        let allows = |registration: &HostRegistration| {
            contains(registration.address, registration.bytes) && registration.allows(device, access)
        };
        require(self.registrations.values().any(allows), INVALID_VALUE).map(|()| address)
    }

    /// Returns whether a range overlaps device memory, so that it cannot be the host's range of a copy.
    fn is_device_memory(&self, address: u64, bytes: u64) -> bool {
        let overlaps = |start: u64, len: u64| start < address.saturating_add(bytes) && address < start + len;
        let mapped = self.mappings.iter().map(|(&start, mapping)| (start, &*mapping.pages));
        let mut memory = mapped.chain(self.allocated_or_opened());
        memory.any(|(start, pages)| overlaps(start, pages.bytes))
            || self.registrations.iter().any(|(&host, registration)| {
                registration.address != host && overlaps(registration.address, registration.bytes)
            })
    }

    /// Iterates over memory that was allocated without virtual memory management or opened, with its addresses.
    fn allocated_or_opened(&self) -> impl Iterator<Item = (u64, &DeviceAllocation)> {
        let opened = self.opened.iter().map(|(&start, opened)| (start, &opened.pages));
        self.pointers.iter().map(|(&start, pages)| (start, pages)).chain(opened)
    }
}

fn require(holds: bool, code: c_int) -> Done {
    if holds { Ok(()) } else { Err(code) }
}
