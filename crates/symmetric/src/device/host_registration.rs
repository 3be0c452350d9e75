//! [`HostRegistration`]: host memory that devices can access, at addresses of their own.
//!
//! ```text
//!   register (pins the pages) → get the device address … synchronize → unregister → release context
//! ```
//!
//! Owns a registration with the driver and a reference to the device's context; the memory belongs to the caller.
//! Invariants as in `region`: only completed steps are undone, undoing is tried twice, and a forked child undoes
//! nothing.
//!
//! A device reads host memory over its link: suitable for words that it polls and for bytes that it uses once.

use std::ffi::c_void;
use std::ptr::NonNull;

use moontide_heap::ProcessToken;

use super::context::{Context, CurrentContext};
use super::driver::Driver;
use super::error::DeviceError;
use super::ffi::{Attribute, DriverCalls, REGISTER_MAPPED, REGISTER_PORTABLE, REGISTER_READ_ONLY};
use super::region::ordinal;

/// Access of devices to registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HostAccess {
    /// Devices only read. Required for memory that this process itself maps read-only; not every device supports
    /// that. The others can still register memory that this process may write.
    Read,
    /// Devices read and write.
    ReadWrite,
}

/// Host memory that is registered with a driver.
#[derive(Debug)]
pub struct HostRegistration {
    /// Start address for the host: the driver's key, never dereferenced here.
    at: usize,
    len: usize,
    /// Start address for devices.
    address: u64,
    is_registered: bool,
    context: Context,
    made_in: ProcessToken,
}

/// Any thread that copies may use it.
const _: () = {
    const fn is_shareable<T: Send + Sync>() {}
    is_shareable::<HostRegistration>();
};

impl HostRegistration {
    /// Pins `len` bytes at `at` and registers them with the devices of this process; `device` is the one whose
    /// address for them is returned. Both must be multiples of a page.
    ///
    /// # Safety
    /// The bytes remain mapped, at the same addresses and to the same memory, during the life of the registration.
    /// Devices read them (and write, with [`HostAccess::ReadWrite`]) concurrently with the host: a caller that
    /// launches kernels follows the rules of the memory, and writes nothing through a registration that was opened
    /// for reading.
    pub unsafe fn open(
        driver: Driver,
        device: u32,
        at: NonNull<u8>,
        len: usize,
        access: HostAccess,
    ) -> Result<HostRegistration, DeviceError> {
        // SAFETY: a query without side effects.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) }.max(1) as usize;
        let host: *mut c_void = at.as_ptr().cast();
        if len == 0 || !len.is_multiple_of(page) || !host.addr().is_multiple_of(page) {
            return Err(DeviceError::HostRegistration { at: host.addr(), bytes: len, page });
        }
        let context = Context::retain(driver, ordinal(device))?;
        let made_in = ProcessToken::of_this_process();
        let mut registration =
            HostRegistration { at: host.addr(), len, address: 0, is_registered: false, context, made_in };
        registration.context.current().with_current(&mut || {
            let mut flags = REGISTER_PORTABLE | REGISTER_MAPPED;
            if access == HostAccess::Read && can_be_read_only(registration.context.current())? {
                flags |= REGISTER_READ_ONLY;
            }
            // SAFETY: the caller guarantees that it is mapped; the driver rejects memory that it cannot pin.
            unsafe { driver.host_register(host, len, flags) }?;
            registration.is_registered = true;
            // SAFETY: a valid pointer; registered just above.
            unsafe { driver.host_address(&mut registration.address, host, 0) }
        })?;
        Ok(registration)
    }

    /// Returns the start address for devices, which may differ from the host's.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Returns the length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "a registration is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Waits for the devices, ends the registration, and returns the first error. Dropping does the same and ignores
    /// errors.
    pub fn close(mut self) -> Result<(), DeviceError> {
        self.end()
    }

    fn end(&mut self) -> Result<(), DeviceError> {
        if !self.made_in.is_valid() {
            return Err(DeviceError::Forked);
        }
        let mut result = self.undo();
        if result.is_err() {
            // A call may report the error of an earlier kernel instead of doing its own work.
            let _ = self.undo();
        }
        if self.is_registered {
            // The pages remain pinned, and belong to the context.
            self.context.keep();
        } else {
            let released = self.context.release();
            if released.is_err() {
                let _ = self.context.release();
            }
            result = result.and(released);
        }
        result
    }

    fn undo(&mut self) -> Result<(), DeviceError> {
        if !self.is_registered {
            return Ok(());
        }
        let driver = self.context.current().driver;
        self.context.current().with_current(&mut || {
            // SAFETY: no arguments. The error of a kernel is returned, and does not keep the pages pinned.
            let idle = unsafe { driver.synchronize() };
            // SAFETY: the start of this registration; the devices no longer use it.
            unsafe { driver.host_unregister(std::ptr::without_provenance_mut(self.at)) }?;
            self.is_registered = false;
            idle
        })
    }
}

/// Returns whether a device can access memory that this process itself maps read-only.
pub(super) fn can_be_read_only(current: CurrentContext) -> Result<bool, DeviceError> {
    match current.driver.attribute(Attribute::ReadOnlyRegister, current.device) {
        // Drivers before CUDA 11.1 do not have the attribute.
        Err(DeviceError::Call { code: 1, .. }) => Ok(false),
        value => Ok(value? != 0),
    }
}

impl Drop for HostRegistration {
    fn drop(&mut self) {
        let _ = self.end();
    }
}
