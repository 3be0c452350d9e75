//! [`DeviceRegion`]: a range of a device's memory that one process owns and others map.
//!
//! ```text
//!   owner, by descriptor                       importer
//!     stream → granularity → create →            stream → import (and close the descriptor) →
//!     reserve → map → set access →               reserve → map → set access
//!     fill → wait → export
//!
//!   owner, by handle (older devices)           importer
//!     stream → alloc → fill → wait → get handle  stream → open handle
//!
//!   all, at the end, and after a failed step:
//!     synchronize → destroy the stream → unmap → free addresses → release → close descriptor → release context
//! ```
//!
//! Copies use the region's own stream, which does not wait for kernels of other users of the device, and are complete
//! before the call returns: see `copy`.
//!
//! Invariants:
//! - A field is set when its step succeeds and cleared when the step is undone, so undoing never does more than was
//!   done.
//! - Addresses are freed only when nothing is mapped there, whatever the driver returned before.
//! - In a forked child nothing is undone: the driver's state belongs to the parent.
//!
//! A call may report the error of an earlier kernel instead of doing its own work (`cuda.h`: "may also return error
//! codes from previous, asynchronous launches"), so undoing is tried a second time before it is abandoned.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use moontide_heap::ProcessToken;

use super::atomic_domain::AtomicDomain;
use super::context::Context;
use super::driver::Driver;
use super::error::DeviceError;
use super::export::{DeviceExport, ShareableHandle};
use super::ffi::{
    ACCESS_READ_WRITE, ALLOCATION_PINNED, AccessDesc, AllocationProp, Attribute, DriverCalls,
    GRANULARITY_RECOMMENDED, HANDLE_POSIX_FD, HIP_FD_BY_VALUE, IPC_LAZY_PEER_ACCESS, IpcHandle,
    LOCATION_DEVICE, Location, POINTER_DEVICE_ORDINAL, STREAM_NON_BLOCKING,
};
use super::vendor::Vendor;

/// Drivers take small allocations from blocks of this size, and a handle opens the whole block: regions shared by
/// handle fill whole blocks, so that they contain no other data.
const IPC_BLOCK: u64 = 2 << 20;

/// Way in which a region is shared with other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HandleType {
    /// A POSIX descriptor. The memory exists as long as any process maps it.
    PosixFd,
    /// An IPC handle of 64 bytes, for devices or drivers without descriptors. The memory exists as long as its owner:
    /// importers must close it before.
    Ipc,
}

/// Configuration of a region.
#[derive(Clone, Copy, Debug)]
pub struct DeviceConfig<'a> {
    /// Device number in this process.
    pub device: u32,
    /// Minimum length in bytes; rounded up to the device's granularity.
    pub bytes: u64,
    /// Further devices that may access it, by their numbers in this process.
    pub peers: &'a [u32],
    /// `None`: the best way that the device supports, descriptors first.
    pub sharing: Option<HandleType>,
}

/// A mapped range of a device's memory.
#[derive(Debug)]
pub struct DeviceRegion {
    len: u64,
    sharing: HandleType,
    domain: AtomicDomain,
    is_owner: bool,
    /// Set once the region can be shared.
    handle_to_share: Option<[u8; 64]>,
    is_mapped: bool,
    /// Reserved, allocated or opened address.
    address: Option<u64>,
    allocation: Option<u64>,
    /// Stream of all copies.
    stream: Option<u64>,
    copying: Mutex<()>,
    fd: Option<OwnedFd>,
    context: Context,
    made_in: ProcessToken,
}

/// Several threads may copy at the same time.
const _: () = {
    const fn is_shareable<T: Send + Sync>() {}
    is_shareable::<DeviceRegion>();
};

impl DeviceRegion {
    /// Creates a region of zeroed memory.
    pub fn create(driver: Driver, config: &DeviceConfig<'_>) -> Result<DeviceRegion, DeviceError> {
        let DeviceConfig { device, bytes, peers, sharing } = *config;
        let context = Context::retain(driver, ordinal(device))?;
        let mut region = DeviceRegion::empty(context, bytes, sharing.unwrap_or(HandleType::PosixFd), true)?;
        region.context.current().with_current(&mut || {
            if sharing.is_none() {
                region.sharing = region.best_sharing()?;
            }
            region.domain = region.native_domain()?;
            region.open_stream()?;
            match region.sharing {
                HandleType::PosixFd => region.create_with_fd(device, peers),
                HandleType::Ipc => region.create_with_ipc(),
            }
        })?;
        Ok(region)
    }

    /// Maps a region of another process. `device` is the device of this process that will access it, which must be
    /// the region's or a peer of it.
    pub fn import(driver: Driver, device: u32, export: DeviceExport) -> Result<DeviceRegion, DeviceError> {
        let (theirs, ours) = (export.vendor, driver.vendor());
        if theirs != ours {
            return Err(DeviceError::Vendor { theirs, ours });
        }
        let sharing = match &export.share {
            ShareableHandle::Descriptor(_) => HandleType::PosixFd,
            ShareableHandle::Handle(_) => HandleType::Ipc,
        };
        let context = Context::retain(driver, ordinal(device))?;
        let mut region = DeviceRegion::empty(context, export.len, sharing, false)?;
        region.domain = export.domain;
        region.context.current().with_current(&mut || {
            region.open_stream()?;
            match &export.share {
                ShareableHandle::Descriptor(fd) => region.import_fd(device, fd),
                ShareableHandle::Handle(handle) => region.open_ipc(handle),
            }
        })?;
        Ok(region)
    }

    fn empty(
        context: Context,
        len: u64,
        sharing: HandleType,
        is_owner: bool,
    ) -> Result<DeviceRegion, DeviceError> {
        if len == 0 || len > 1 << 46 {
            return Err(DeviceError::Length { bytes: len });
        }
        Ok(DeviceRegion {
            len,
            sharing,
            domain: AtomicDomain::Device,
            is_owner,
            handle_to_share: None,
            is_mapped: false,
            address: None,
            allocation: None,
            stream: None,
            copying: Mutex::default(),
            fd: None,
            context,
            made_in: ProcessToken::of_this_process(),
        })
    }

    fn driver(&self) -> Driver {
        self.context.current().driver
    }

    fn best_sharing(&self) -> Result<HandleType, DeviceError> {
        let can = |attribute| self.driver().attribute(attribute, self.context.current().device);
        let has_both = can(Attribute::Vmm)? != 0 && can(Attribute::PosixFd)? != 0;
        Ok(if has_both { HandleType::PosixFd } else { HandleType::Ipc })
    }

    fn native_domain(&self) -> Result<AtomicDomain, DeviceError> {
        let carries = self.driver().attribute(Attribute::HostAtomics, self.context.current().device)?;
        Ok(if carries == 0 { AtomicDomain::Device } else { AtomicDomain::Both })
    }

    fn open_stream(&mut self) -> Result<(), DeviceError> {
        let mut stream = 0;
        // SAFETY: a valid pointer.
        unsafe { self.driver().stream_create(&mut stream, STREAM_NON_BLOCKING) }?;
        self.stream = Some(stream);
        Ok(())
    }

    /// Steps of the owner, with a descriptor.
    fn create_with_fd(&mut self, device: u32, peers: &[u32]) -> Result<(), DeviceError> {
        let driver = self.driver();
        let prop = allocation_on(device);
        let granularity = granularity(driver, &prop)?;
        self.len = self.len.next_multiple_of(granularity);
        let mut allocation = 0;
        // SAFETY: valid pointers; the flags must be zero.
        unsafe { driver.mem_create(&mut allocation, self.len as usize, &prop, 0) }?;
        self.allocation = Some(allocation);
        let devices: Vec<u32> = std::iter::once(device).chain(peers.iter().copied()).collect();
        self.map(granularity, &devices)?;
        self.zero()?;
        let mut fd: c_int = -1;
        // SAFETY: the descriptor is written to a pointer to an int; the handle belongs to this region.
        unsafe { driver.export((&raw mut fd).cast::<c_void>(), allocation, HANDLE_POSIX_FD, 0) }?;
        if fd < 0 {
            return Err(DeviceError::System { what: "export a descriptor", source: rustix::io::Errno::BADF });
        }
        // SAFETY: the driver created it for this call, and this value closes it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // Drivers do not guarantee CLOEXEC. A process started in between inherits the descriptor.
        rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)
            .map_err(|source| DeviceError::System { what: "F_SETFD", source })?;
        self.fd = Some(fd);
        Ok(())
    }

    /// Steps of the importer, with a descriptor.
    fn import_fd(&mut self, device: u32, fd: &OwnedFd) -> Result<(), DeviceError> {
        let driver = self.driver();
        let granularity = granularity(driver, &allocation_on(device))?;
        let mut number = fd.as_raw_fd();
        let by_value = driver.vendor() == Vendor::Cuda || driver.raw_version() >= HIP_FD_BY_VALUE;
        let shareable = if by_value {
            std::ptr::without_provenance_mut(number as usize)
        } else {
            (&raw mut number).cast()
        };
        let mut allocation = 0;
        // SAFETY: a valid pointer for the handle; the descriptor in the form that this version of the driver takes.
        unsafe { driver.import(&mut allocation, shareable, HANDLE_POSIX_FD) }?;
        self.allocation = Some(allocation);
        self.map(granularity, &[device])
    }

    fn map(&mut self, alignment: u64, devices: &[u32]) -> Result<(), DeviceError> {
        let (driver, len) = (self.driver(), self.len as usize);
        let allocation = self.allocation.expect("allocated before its addresses are reserved");
        let mut address = 0;
        // SAFETY: a valid pointer; no preferred address, no flags.
        unsafe { driver.address_reserve(&mut address, len, alignment as usize, 0, 0) }?;
        self.address = Some(address);
        // SAFETY: addresses and memory belong to this region and have the same length.
        unsafe { driver.mem_map(address, len, 0, allocation, 0) }?;
        self.is_mapped = true;
        let access: Vec<AccessDesc> = devices
            .iter()
            .map(|&device| AccessDesc { location: on(device), flags: ACCESS_READ_WRITE })
            .collect();
        // SAFETY: the range was mapped just above, the slice has that length.
        unsafe { driver.set_access(address, len, access.as_ptr(), access.len()) }
    }

    /// Steps of the owner, with an IPC handle.
    fn create_with_ipc(&mut self) -> Result<(), DeviceError> {
        let driver = self.driver();
        self.len = self.len.next_multiple_of(IPC_BLOCK);
        let mut address = 0;
        // SAFETY: a valid pointer.
        unsafe { driver.mem_alloc(&mut address, self.len as usize) }?;
        self.address = Some(address);
        self.zero()?;
        let mut handle = IpcHandle([0; 64]);
        // SAFETY: a valid pointer; the address was allocated just above.
        unsafe { driver.ipc_get(&mut handle, address) }?;
        self.handle_to_share = Some(handle.0);
        Ok(())
    }

    fn open_ipc(&mut self, handle: &[u8; 64]) -> Result<(), DeviceError> {
        let mut address = 0;
        // SAFETY: a valid pointer; the flag that the call requires.
        unsafe { self.driver().ipc_open(&mut address, IpcHandle(*handle), IPC_LAZY_PEER_ACCESS) }?;
        self.address = Some(address);
        Ok(())
    }

    /// Fills the region with zeros and waits: no other process may get it before.
    fn zero(&self) -> Result<(), DeviceError> {
        self.run(&|stream| {
            // SAFETY: the whole range that was mapped or allocated.
            unsafe { self.driver().fill(self.address(), 0, self.len as usize, stream) }
        })
    }

    /// Returns the length in bytes, rounded up to the device's granularity.
    #[expect(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Returns the address for the devices of this process. The host can read it only if the driver allows it.
    pub fn address(&self) -> u64 {
        self.address.expect("set until the region is closed")
    }

    /// Returns the way in which the region is shared.
    pub fn sharing(&self) -> HandleType {
        self.sharing
    }

    /// Returns the set of processors whose atomic operations on its words are atomic to each other.
    pub fn atomic_domain(&self) -> AtomicDomain {
        self.domain
    }

    /// Returns the data with which another process imports the region. The descriptor is a copy, to be sent and
    /// dropped.
    ///
    /// # Safety
    /// A process that gets it may write the region, and must follow the same rules as all other processes that map
    /// it.
    ///
    /// # Panics
    /// If the region was imported.
    pub unsafe fn export(&self) -> Result<DeviceExport, DeviceError> {
        assert!(self.is_owner, "only the owner exports a region");
        self.check_process()?;
        let share = match (&self.fd, self.handle_to_share) {
            (Some(fd), _) => ShareableHandle::Descriptor(
                rustix::io::fcntl_dupfd_cloexec(fd.as_fd(), 3)
                    .map_err(|source| DeviceError::System { what: "copy a descriptor", source })?,
            ),
            (None, handle) => ShareableHandle::Handle(handle.expect("a descriptor or a handle")),
        };
        Ok(DeviceExport { vendor: self.driver().vendor(), len: self.len, domain: self.domain, share })
    }

    /// Copies bytes into the region and waits until they are written. Does not wait for kernels that use the region:
    /// see [`DeviceRegion::synchronize`].
    ///
    /// # Panics
    /// If they exceed the region.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.copy(offset, bytes.len() as u64, &|target, stream| {
            // SAFETY: inside the region; the slice has that length, and `copy` waits while it is borrowed.
            unsafe { self.driver().copy_in(target, bytes.as_ptr().cast(), bytes.len(), stream) }
        })
    }

    /// Copies bytes from the region. Does not wait for kernels that are still writing: see
    /// [`DeviceRegion::synchronize`].
    ///
    /// # Panics
    /// If they exceed the region.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let (target, len) = (bytes.as_mut_ptr(), bytes.len());
        self.copy(offset, len as u64, &|source, stream| {
            // SAFETY: inside the region; the slice has that length and no other reference to it exists, and `copy`
            // waits
            // while it is borrowed.
            unsafe { self.driver().copy_out(target.cast(), source, len, stream) }
        })
    }

    /// Copies into the region from another address of the same device of this process, and waits until the bytes are
    /// written. Does not wait for kernels that are still writing at `source`: see [`DeviceRegion::synchronize`].
    ///
    /// # Safety
    /// The region's device may read `len` bytes from `source`, nothing writes or frees them before this function
    /// returns, and they do not overlap the target.
    ///
    /// # Panics
    /// If they exceed the region.
    pub unsafe fn write_from_device(&self, offset: u64, source: u64, len: u64) -> Result<(), DeviceError> {
        self.copy(offset, len, &|target, stream| {
            self.check_same_device(source)?;
            // SAFETY: the target is inside the region; the caller vouches for the source.
            unsafe { self.driver().copy_across(target, source, len as usize, stream) }
        })
    }

    /// Copies from the region to another address of the same device of this process, and waits until the bytes are
    /// written.
    ///
    /// # Safety
    /// The region's device may write `len` bytes to `target`, nothing else uses or frees them before this function
    /// returns, and they do not overlap the source.
    ///
    /// # Panics
    /// If they exceed the region.
    pub unsafe fn read_to_device(&self, offset: u64, target: u64, len: u64) -> Result<(), DeviceError> {
        self.copy(offset, len, &|source, stream| {
            self.check_same_device(target)?;
            // SAFETY: the source is inside the region; the caller vouches for the target.
            unsafe { self.driver().copy_across(target, source, len as usize, stream) }
        })
    }

    /// Waits for all work of this process on the region's device: writes of its earlier kernels are complete then.
    /// Copies do not wait for it, because their stream is independent of others.
    pub fn synchronize(&self) -> Result<(), DeviceError> {
        self.check_process()?;
        // SAFETY: no arguments.
        self.context.current().with_current(&mut || unsafe { self.driver().synchronize() })
    }

    /// Fails for addresses on another device than the one that [`DeviceRegion::synchronize`] waits for. Needs the
    /// current context.
    fn check_same_device(&self, address: u64) -> Result<(), DeviceError> {
        let (mut found, ours): (c_int, c_int) = (-1, self.context.current().device);
        let out = (&raw mut found).cast();
        // SAFETY: a valid pointer to an int, the type of this attribute.
        unsafe { self.driver().pointer_attribute(out, POINTER_DEVICE_ORDINAL, address) }?;
        if found == ours { Ok(()) } else { Err(DeviceError::OtherDevice { found, ours }) }
    }

    /// Starts a copy at a range of the region, and waits until it is complete. One thread at a time: the stream runs
    /// copies in sequence anyway, and the result of a wait is then about the caller's own copy.
    fn copy(
        &self,
        offset: u64,
        len: u64,
        start: &dyn Fn(u64, u64) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let address = self.address_of(offset, len)?;
        if len == 0 {
            return Ok(());
        }
        let _exclusive = self.copying.lock().unwrap_or_else(PoisonError::into_inner);
        self.context.current().with_current(&mut || self.run(&|stream| start(address, stream)))
    }

    /// Enqueues work into the stream and waits until it is complete, whatever the driver returned: the work uses
    /// bytes that are only borrowed. An error may be about another user's kernel, so it is not final before the
    /// stream and the whole context were synchronized once more. If all of them fail, the context has a permanent
    /// error (`cuda.h`: "the process must be terminated"): the driver has stopped its engines, and none of them
    /// copies bytes any more. There is no better guarantee, and the result is [`DeviceError::Incomplete`].
    fn run(&self, start: &dyn Fn(u64) -> Result<(), DeviceError>) -> Result<(), DeviceError> {
        let (driver, stream) = (self.driver(), self.stream.expect("set until the region is closed"));
        let started = start(stream);
        // SAFETY: the region's own stream.
        let Err(first) = (unsafe { driver.stream_synchronize(stream) }) else { return started };
        // SAFETY: as above; the second has no arguments.
        let is_complete =
            unsafe { driver.stream_synchronize(stream).is_ok() || driver.synchronize().is_ok() };
        match started {
            _ if !is_complete => Err(first.incomplete()),
            Ok(()) => Err(first),
            Err(error) => Err(error),
        }
    }

    fn address_of(&self, offset: u64, len: u64) -> Result<u64, DeviceError> {
        self.check_process()?;
        let end = offset.checked_add(len).expect("a range of the region");
        assert!(end <= self.len, "range ends at {end}, the region at {}", self.len);
        Ok(self.address() + offset)
    }

    fn check_process(&self) -> Result<(), DeviceError> {
        if self.made_in.is_valid() { Ok(()) } else { Err(DeviceError::Forked) }
    }

    /// Frees everything and returns the first error. Dropping does the same and ignores errors.
    pub fn close(mut self) -> Result<(), DeviceError> {
        self.end()
    }

    /// Frees what is left.
    fn end(&mut self) -> Result<(), DeviceError> {
        self.check_process()?;
        let mut result = self.undo();
        if result.is_err() {
            // See the header of this file.
            let _ = self.undo();
        }
        self.fd = None;
        if self.is_undone() {
            let released = self.context.release();
            if released.is_err() {
                let _ = self.context.release();
            }
            result = result.and(released);
        } else {
            // The remaining resources belong to the context.
            self.context.keep();
        }
        result
    }

    fn undo(&mut self) -> Result<(), DeviceError> {
        if self.is_undone() {
            return Ok(());
        }
        self.context.current().with_current(&mut || self.undo_steps())
    }

    fn is_undone(&self) -> bool {
        self.address.is_none() && self.allocation.is_none() && self.stream.is_none()
    }

    fn undo_steps(&mut self) -> Result<(), DeviceError> {
        let (driver, len) = (self.driver(), self.len as usize);
        let mut idle = Ok(());
        if self.address.is_some() {
            // SAFETY: no arguments. The error of a kernel is returned, and does not keep the memory from being freed.
            idle = unsafe { driver.synchronize() };
        }
        if let Some(stream) = self.stream {
            // SAFETY: the region's own stream, and no thread copies any more. A failure does not keep the memory from
            // being freed.
            match unsafe { driver.stream_destroy(stream) } {
                Ok(()) => self.stream = None,
                Err(error) => idle = idle.and(Err(error)),
            }
        }
        if let Some(address) = self.address {
            if self.is_mapped {
                // SAFETY: the whole mapping of this region, which the devices no longer use.
                unsafe { driver.mem_unmap(address, len) }?;
                self.is_mapped = false;
            }
            // SAFETY: reserved by this region, and nothing is mapped there any more; or allocated or opened by it.
            unsafe {
                match (self.sharing, self.is_owner) {
                    (HandleType::PosixFd, _) => driver.address_free(address, len),
                    (HandleType::Ipc, true) => driver.mem_free(address),
                    (HandleType::Ipc, false) => driver.ipc_close(address),
                }
            }?;
            self.address = None;
        }
        if let Some(allocation) = self.allocation {
            // SAFETY: the region's own allocation, released once.
            unsafe { driver.mem_release(allocation) }?;
            self.allocation = None;
        }
        idle
    }
}

impl Drop for DeviceRegion {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

pub(super) fn ordinal(device: u32) -> c_int {
    // No driver has as many devices; it returns an invalid-device error.
    c_int::try_from(device).unwrap_or(c_int::MAX)
}

fn on(device: u32) -> Location {
    Location { kind: LOCATION_DEVICE, id: ordinal(device) }
}

/// Returns the properties of device memory that can be exported as a descriptor.
pub(super) fn allocation_on(device: u32) -> AllocationProp {
    AllocationProp {
        kind: ALLOCATION_PINNED,
        handle_types: HANDLE_POSIX_FD,
        location: on(device),
        win32_metadata: std::ptr::null_mut(),
        flags: [0; 8],
    }
}

/// Returns the number of bytes of which lengths of such memory are multiples.
pub(super) fn granularity(driver: Driver, prop: &AllocationProp) -> Result<u64, DeviceError> {
    let mut bytes = 0;
    // SAFETY: valid pointers.
    unsafe { driver.granularity(&mut bytes, prop, GRANULARITY_RECOMMENDED) }?;
    Ok((bytes as u64).max(1))
}
