//! [`DeviceRegion`]: a piece of a device's memory that one process owns and others map.
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
//!   all, at the end, and from wherever a step failed:
//!     synchronize → end the stream → unmap → free addresses → release → close descriptor → release context
//! ```
//!
//! Copies go through the region's own stream, which does not wait for the kernels of whoever else uses the device, and end
//! before the call returns: see `copy`.
//!
//! Invariants:
//! - A field is set when its step succeeded and cleared when the step is undone, so undoing never does more than was done.
//! - Addresses are freed only when nothing is mapped there, whatever the driver answered before.
//! - In a forked child nothing is undone: the driver's state is the parent's.
//!
//! A call may report what an earlier kernel did wrong instead of doing its own work (`cuda.h`: "may also return error codes
//! from previous, asynchronous launches"), so undoing is tried a second time before it is given up.

use std::ffi::{c_int, c_void};
use std::os::fd::{AsFd, AsRawFd, FromRawFd, OwnedFd};
use std::sync::{Mutex, PoisonError};

use super::AtomicDomain;
use super::calls::{
    ACCESS_READ_WRITE, ALLOCATION_PINNED, AccessDesc, AllocationProp, Attribute, GRANULARITY_RECOMMENDED,
    HANDLE_POSIX_FD, HIP_FD_BY_VALUE, IPC_LAZY_PEER_ACCESS, IpcHandle, LOCATION_DEVICE, Location,
    POINTER_DEVICE_ORDINAL, STREAM_NON_BLOCKING,
};
use super::context::Context;
use super::driver::{Driver, Vendor};
use super::error::DeviceError;
use super::offer::{DeviceOffer, Share};
use crate::shm::ProcessToken;

/// Drivers cut small allocations out of blocks of this size, and a handle opens the whole block: what we share by handle
/// fills blocks, so that nobody else's bytes are in them.
const IPC_BLOCK: u64 = 2 << 20;

/// How a region gets to other processes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sharing {
    /// As a descriptor. The memory lives as long as any process maps it.
    Descriptor,
    /// As a handle of 64 bytes, where the device or driver cannot do descriptors. The memory ends with its owner: importers
    /// must have let go before.
    Handle,
}

/// What to make.
#[derive(Clone, Copy, Debug)]
pub struct DeviceConfig<'a> {
    /// On which device, by its number in this process.
    pub device: u32,
    /// How large at least; rounded up to what the device gives.
    pub bytes: u64,
    /// Devices that may access it besides, by their numbers in this process.
    pub peers: &'a [u32],
    /// None: what the device can do, descriptors first.
    pub sharing: Option<Sharing>,
}

/// A piece of a device's memory.
#[derive(Debug)]
pub struct DeviceRegion {
    len: u64,
    sharing: Sharing,
    domain: AtomicDomain,
    is_owner: bool,
    /// Set once it can be passed on.
    handle_to_share: Option<[u8; 64]>,
    is_mapped: bool,
    /// Reserved, allocated or opened.
    address: Option<u64>,
    allocation: Option<u64>,
    /// What copies go through.
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
    /// Makes a region of zeroed memory.
    pub fn create(driver: Driver, config: &DeviceConfig<'_>) -> Result<DeviceRegion, DeviceError> {
        let DeviceConfig { device, bytes, peers, sharing } = *config;
        let context = Context::retain(driver, ordinal(device))?;
        let mut region = DeviceRegion::empty(context, bytes, sharing.unwrap_or(Sharing::Descriptor), true)?;
        region.context.place().within(&mut || {
            if sharing.is_none() {
                region.sharing = region.best_sharing()?;
            }
            region.domain = region.native_domain()?;
            region.open_stream()?;
            match region.sharing {
                Sharing::Descriptor => region.make(device, peers),
                Sharing::Handle => region.make_the_old_way(),
            }
        })?;
        Ok(region)
    }

    /// Maps a region that another process made. `device` is the one of this process that will access it, which must be the
    /// region's or a peer of it.
    pub fn import(driver: Driver, device: u32, offer: DeviceOffer) -> Result<DeviceRegion, DeviceError> {
        let (theirs, ours) = (offer.vendor, driver.vendor());
        if theirs != ours {
            return Err(DeviceError::Vendor { theirs, ours });
        }
        let sharing = match &offer.share {
            Share::Descriptor(_) => Sharing::Descriptor,
            Share::Handle(_) => Sharing::Handle,
        };
        let context = Context::retain(driver, ordinal(device))?;
        let mut region = DeviceRegion::empty(context, offer.len, sharing, false)?;
        region.domain = offer.domain;
        region.context.place().within(&mut || {
            region.open_stream()?;
            match &offer.share {
                Share::Descriptor(fd) => region.take_in(device, fd),
                Share::Handle(handle) => region.open(handle),
            }
        })?;
        Ok(region)
    }

    fn empty(
        context: Context,
        len: u64,
        sharing: Sharing,
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
        self.context.place().driver
    }

    fn best_sharing(&self) -> Result<Sharing, DeviceError> {
        let can = |attribute| self.driver().attribute(attribute, self.context.place().device);
        let has_both = can(Attribute::Vmm)? != 0 && can(Attribute::PosixFd)? != 0;
        Ok(if has_both { Sharing::Descriptor } else { Sharing::Handle })
    }

    fn native_domain(&self) -> Result<AtomicDomain, DeviceError> {
        let carries = self.driver().attribute(Attribute::HostAtomics, self.context.place().device)?;
        Ok(if carries == 0 { AtomicDomain::Device } else { AtomicDomain::Both })
    }

    fn open_stream(&mut self) -> Result<(), DeviceError> {
        let mut stream = 0;
        // SAFETY: a valid place.
        unsafe { self.driver().stream_create(&mut stream, STREAM_NON_BLOCKING) }?;
        self.stream = Some(stream);
        Ok(())
    }

    /// The owner's steps, by descriptor.
    fn make(&mut self, device: u32, peers: &[u32]) -> Result<(), DeviceError> {
        let driver = self.driver();
        let prop = allocation_on(device);
        let granularity = granularity(driver, &prop)?;
        self.len = self.len.next_multiple_of(granularity);
        let mut allocation = 0;
        // SAFETY: valid places; the flags must be zero.
        unsafe { driver.mem_create(&mut allocation, self.len as usize, &prop, 0) }?;
        self.allocation = Some(allocation);
        let devices: Vec<u32> = std::iter::once(device).chain(peers.iter().copied()).collect();
        self.map(granularity, &devices)?;
        self.zero()?;
        let mut fd: c_int = -1;
        // SAFETY: a descriptor is written to a place for an int; the handle is ours.
        unsafe { driver.export((&raw mut fd).cast::<c_void>(), allocation, HANDLE_POSIX_FD, 0) }?;
        if fd < 0 {
            return Err(DeviceError::System {
                what: "the exported descriptor",
                source: rustix::io::Errno::BADF,
            });
        }
        // SAFETY: the driver made it for us, and we close it.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // Drivers do not promise it. What was started in between has a descriptor that it does not know of.
        rustix::io::fcntl_setfd(&fd, rustix::io::FdFlags::CLOEXEC)
            .map_err(|source| DeviceError::System { what: "F_SETFD", source })?;
        self.fd = Some(fd);
        Ok(())
    }

    /// The importer's steps, by descriptor.
    fn take_in(&mut self, device: u32, fd: &OwnedFd) -> Result<(), DeviceError> {
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
        // SAFETY: a valid place for the handle; the descriptor as this version of the driver takes it.
        unsafe { driver.import(&mut allocation, shareable, HANDLE_POSIX_FD) }?;
        self.allocation = Some(allocation);
        self.map(granularity, &[device])
    }

    fn map(&mut self, alignment: u64, devices: &[u32]) -> Result<(), DeviceError> {
        let (driver, len) = (self.driver(), self.len as usize);
        let allocation = self.allocation.expect("comes before its addresses");
        let mut address = 0;
        // SAFETY: a valid place; no wish for an address, no flags.
        unsafe { driver.address_reserve(&mut address, len, alignment as usize, 0, 0) }?;
        self.address = Some(address);
        // SAFETY: addresses and memory are ours, and as long as each other.
        unsafe { driver.mem_map(address, len, 0, allocation, 0) }?;
        self.is_mapped = true;
        let access: Vec<AccessDesc> = devices
            .iter()
            .map(|&device| AccessDesc { location: on(device), flags: ACCESS_READ_WRITE })
            .collect();
        // SAFETY: the range was mapped just above, the slice has that length.
        unsafe { driver.set_access(address, len, access.as_ptr(), access.len()) }
    }

    /// The owner's steps, by handle.
    fn make_the_old_way(&mut self) -> Result<(), DeviceError> {
        let driver = self.driver();
        self.len = self.len.next_multiple_of(IPC_BLOCK);
        let mut address = 0;
        // SAFETY: a valid place.
        unsafe { driver.mem_alloc(&mut address, self.len as usize) }?;
        self.address = Some(address);
        self.zero()?;
        let mut handle = IpcHandle([0; 64]);
        // SAFETY: a valid place; the address was allocated just above.
        unsafe { driver.ipc_get(&mut handle, address) }?;
        self.handle_to_share = Some(handle.0);
        Ok(())
    }

    fn open(&mut self, handle: &[u8; 64]) -> Result<(), DeviceError> {
        let mut address = 0;
        // SAFETY: a valid place; the flag that the call demands.
        unsafe { self.driver().ipc_open(&mut address, IpcHandle(*handle), IPC_LAZY_PEER_ACCESS) }?;
        self.address = Some(address);
        Ok(())
    }

    /// Fills with zeros, and waits: nobody may get the region before.
    fn zero(&self) -> Result<(), DeviceError> {
        self.run(&|stream| {
            // SAFETY: the whole of what was mapped or allocated.
            unsafe { self.driver().fill(self.address(), 0, self.len as usize, stream) }
        })
    }

    /// Its length in bytes, rounded up to what the device gives.
    #[expect(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Where it lies for the devices of this process. Nothing that the host could read, unless the driver says so.
    pub fn address(&self) -> u64 {
        self.address.expect("set until the region ends")
    }

    /// How it gets to others.
    pub fn sharing(&self) -> Sharing {
        self.sharing
    }

    /// Whose atomic operations on its words are atomic to each other.
    pub fn atomic_domain(&self) -> AtomicDomain {
        self.domain
    }

    /// What another process needs to import it. The descriptor is a copy, to be sent and dropped.
    ///
    /// # Safety
    /// Whoever gets it may write the region, and must keep to the same rules as everyone else who maps it.
    ///
    /// # Panics
    /// If the region was imported.
    pub unsafe fn offer(&self) -> Result<DeviceOffer, DeviceError> {
        assert!(self.is_owner, "a region that was made here");
        self.here()?;
        let share = match (&self.fd, self.handle_to_share) {
            (Some(fd), _) => Share::Descriptor(
                rustix::io::fcntl_dupfd_cloexec(fd.as_fd(), 3)
                    .map_err(|source| DeviceError::System { what: "copy a descriptor", source })?,
            ),
            (None, handle) => Share::Handle(handle.expect("one of both")),
        };
        Ok(DeviceOffer { vendor: self.driver().vendor(), len: self.len, domain: self.domain, share })
    }

    /// Copies bytes into the region, and waits until they are there; for kernels that use the region it does not wait: see
    /// [`DeviceRegion::settle`].
    ///
    /// # Panics
    /// If they reach beyond the end.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), DeviceError> {
        self.copy(offset, bytes.len() as u64, &|target, stream| {
            // SAFETY: inside the region; the slice has that length, and `copy` waits while it is borrowed.
            unsafe { self.driver().copy_in(target, bytes.as_ptr().cast(), bytes.len(), stream) }
        })
    }

    /// Copies bytes out of the region. What kernels are still writing is not waited for: see [`DeviceRegion::settle`].
    ///
    /// # Panics
    /// If they reach beyond the end.
    pub fn read(&self, offset: u64, bytes: &mut [u8]) -> Result<(), DeviceError> {
        let (place, len) = (bytes.as_mut_ptr(), bytes.len());
        self.copy(offset, len as u64, &|source, stream| {
            // SAFETY: inside the region; the slice has that length, is ours alone, and `copy` waits while it is borrowed.
            unsafe { self.driver().copy_out(place.cast(), source, len, stream) }
        })
    }

    /// Copies into the region from another address of the same device of this process, and waits until the bytes are there.
    /// What is still being written at `source` is not waited for: see [`DeviceRegion::settle`].
    ///
    /// # Safety
    /// The region's device may read `len` bytes from `source`, nobody writes or frees them before this returns, and they do
    /// not overlap the target.
    ///
    /// # Panics
    /// If they reach beyond the region's end.
    pub unsafe fn write_from_device(&self, offset: u64, source: u64, len: u64) -> Result<(), DeviceError> {
        self.copy(offset, len, &|target, stream| {
            self.check_same_device(source)?;
            // SAFETY: the target is inside the region; for the source the caller vouches.
            unsafe { self.driver().copy_across(target, source, len as usize, stream) }
        })
    }

    /// Copies out of the region to another address of the same device of this process, and waits until the bytes are there.
    ///
    /// # Safety
    /// The region's device may write `len` bytes to `target`, nobody else uses or frees them before this returns, and they
    /// do not overlap the source.
    ///
    /// # Panics
    /// If they reach beyond the region's end.
    pub unsafe fn read_to_device(&self, offset: u64, target: u64, len: u64) -> Result<(), DeviceError> {
        self.copy(offset, len, &|source, stream| {
            self.check_same_device(target)?;
            // SAFETY: the source is inside the region; for the target the caller vouches.
            unsafe { self.driver().copy_across(target, source, len as usize, stream) }
        })
    }

    /// Waits for everything that this process has under way on the region's device: what its kernels wrote before is there.
    /// Copies do not do that by themselves, their stream waits for no other.
    pub fn settle(&self) -> Result<(), DeviceError> {
        self.here()?;
        // SAFETY: takes nothing.
        self.context.place().within(&mut || unsafe { self.driver().synchronize() })
    }

    /// Refuses addresses on another device than the one that [`DeviceRegion::settle`] waits for. Within the context.
    fn check_same_device(&self, address: u64) -> Result<(), DeviceError> {
        let (mut found, ours): (c_int, c_int) = (-1, self.context.place().device);
        let place = (&raw mut found).cast();
        // SAFETY: a valid place for an int, which this attribute is.
        unsafe { self.driver().pointer_attribute(place, POINTER_DEVICE_ORDINAL, address) }?;
        if found == ours { Ok(()) } else { Err(DeviceError::OtherDevice { found, ours }) }
    }

    /// Starts a copy at a piece of the region, and waits until it is over. One thread at a time: in the stream one copy comes
    /// after the other anyway, and an answer to a wait is then about the waiter's own.
    fn copy(
        &self,
        offset: u64,
        len: u64,
        start: &dyn Fn(u64, u64) -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let piece = self.piece(offset, len)?;
        if len == 0 {
            return Ok(());
        }
        let _one_at_a_time = self.copying.lock().unwrap_or_else(PoisonError::into_inner);
        self.context.place().within(&mut || self.run(&|stream| start(piece, stream)))
    }

    /// Puts work into the stream and waits until it is over, whatever the driver answered: the bytes that it uses are only
    /// borrowed. An answer may be about somebody else's kernel, so one that is bad is not believed before the stream and the
    /// whole context were asked once more. If none of them can say that the work is over, the context has an error that
    /// stays (`cuda.h`: "the process must be terminated"): the driver has stopped its engines, and nothing of it moves bytes
    /// any more. Nothing better can be had, and [`DeviceError::Unfinished`] says it.
    fn run(&self, start: &dyn Fn(u64) -> Result<(), DeviceError>) -> Result<(), DeviceError> {
        let (driver, stream) = (self.driver(), self.stream.expect("set until the region ends"));
        let started = start(stream);
        // SAFETY: our stream.
        let Err(first) = (unsafe { driver.stream_synchronize(stream) }) else { return started };
        // SAFETY: as above; the second takes nothing.
        let is_over = unsafe { driver.stream_synchronize(stream).is_ok() || driver.synchronize().is_ok() };
        match started {
            _ if !is_over => Err(first.unfinished()),
            Ok(()) => Err(first),
            Err(refused) => Err(refused),
        }
    }

    fn piece(&self, offset: u64, len: u64) -> Result<u64, DeviceError> {
        self.here()?;
        let end = offset.checked_add(len).expect("a piece of the region");
        assert!(end <= self.len, "{end} is beyond a region of {}", self.len);
        Ok(self.address() + offset)
    }

    fn here(&self) -> Result<(), DeviceError> {
        if self.made_in.is_valid() { Ok(()) } else { Err(DeviceError::Forked) }
    }

    /// Gives everything back and says what went wrong first. Dropping does the same and says nothing.
    pub fn close(mut self) -> Result<(), DeviceError> {
        self.end()
    }

    /// Gives back what is left.
    fn end(&mut self) -> Result<(), DeviceError> {
        self.here()?;
        let mut result = self.undo();
        if result.is_err() {
            // See the head of this file.
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
            // What is left belongs to the context.
            self.context.keep();
        }
        result
    }

    fn undo(&mut self) -> Result<(), DeviceError> {
        if self.is_undone() {
            return Ok(());
        }
        self.context.place().within(&mut || self.undo_steps())
    }

    fn is_undone(&self) -> bool {
        self.address.is_none() && self.allocation.is_none() && self.stream.is_none()
    }

    fn undo_steps(&mut self) -> Result<(), DeviceError> {
        let (driver, len) = (self.driver(), self.len as usize);
        let mut idle = Ok(());
        if self.address.is_some() {
            // SAFETY: takes nothing. What a kernel did wrong is told, and keeps no memory.
            idle = unsafe { driver.synchronize() };
        }
        if let Some(stream) = self.stream {
            // SAFETY: ours, and nobody copies any more. A stream that cannot be ended keeps no memory.
            match unsafe { driver.stream_destroy(stream) } {
                Ok(()) => self.stream = None,
                Err(error) => idle = idle.and(Err(error)),
            }
        }
        if let Some(address) = self.address {
            if self.is_mapped {
                // SAFETY: the whole of our mapping, which the devices no longer use.
                unsafe { driver.mem_unmap(address, len) }?;
                self.is_mapped = false;
            }
            // SAFETY: ours, and nothing is mapped there any more; or allocated or opened by us.
            unsafe {
                match (self.sharing, self.is_owner) {
                    (Sharing::Descriptor, _) => driver.address_free(address, len),
                    (Sharing::Handle, true) => driver.mem_free(address),
                    (Sharing::Handle, false) => driver.ipc_close(address),
                }
            }?;
            self.address = None;
        }
        if let Some(allocation) = self.allocation {
            // SAFETY: ours, released once.
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
    // No driver has as many; it answers that there is no such device.
    c_int::try_from(device).unwrap_or(c_int::MAX)
}

fn on(device: u32) -> Location {
    Location { kind: LOCATION_DEVICE, id: ordinal(device) }
}

/// Memory on a device that can be exported as a descriptor.
pub(super) fn allocation_on(device: u32) -> AllocationProp {
    AllocationProp {
        kind: ALLOCATION_PINNED,
        handle_types: HANDLE_POSIX_FD,
        location: on(device),
        win32_metadata: std::ptr::null_mut(),
        flags: [0; 8],
    }
}

/// Of what lengths of such memory are multiples.
pub(super) fn granularity(driver: Driver, prop: &AllocationProp) -> Result<u64, DeviceError> {
    let mut bytes = 0;
    // SAFETY: valid places.
    unsafe { driver.granularity(&mut bytes, prop, GRANULARITY_RECOMMENDED) }?;
    Ok((bytes as u64).max(1))
}
