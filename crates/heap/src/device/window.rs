//! [`HostWindow`]: memory of the host that devices see, at addresses of their own.
//!
//! ```text
//!   register (pins the pages) → ask for the address … synchronize → unregister → release context
//! ```
//!
//! Owns a registration with the driver and a count on the device's context; the memory is the caller's. Invariants as in
//! `region`: what was not done is not undone, undoing is tried twice, and a forked child undoes nothing.
//!
//! A device reads the host's memory over its link: good for words that it polls and for bytes that it uses once.

use std::ffi::c_void;
use std::ptr::NonNull;

use super::calls::{Attribute, REGISTER_MAPPED, REGISTER_PORTABLE, REGISTER_READ_ONLY};
use super::context::{Context, Place};
use super::driver::Driver;
use super::error::DeviceError;
use super::region::ordinal;
use crate::shm::ProcessToken;

/// What devices do with a window.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WindowAccess {
    /// They only read. Needed for memory that this process itself may only read; not every device can do that. Those that
    /// cannot still get a window to memory that this process may write.
    Read,
    /// They read and write.
    ReadWrite,
}

/// Memory of the host that is registered with a driver.
#[derive(Debug)]
pub struct HostWindow {
    /// Where it begins for the host: the driver's key, nothing is read or written by it here.
    at: usize,
    len: usize,
    /// Where it begins for devices.
    address: u64,
    is_registered: bool,
    context: Context,
    made_in: ProcessToken,
}

/// Whoever copies may look through it, from any thread.
const _: () = {
    const fn is_shareable<T: Send + Sync>() {}
    is_shareable::<HostWindow>();
};

impl HostWindow {
    /// Pins `len` bytes from `at` and makes them known to the devices of this process; `device` is the one that is asked for
    /// their address. Both must be multiples of a page.
    ///
    /// # Safety
    /// The bytes stay mapped, at the same addresses, as long as the window lives, and so does what is mapped there. Devices
    /// read them (and write, with [`WindowAccess::ReadWrite`]) while the host does: whoever starts kernels keeps to the rules
    /// that the memory has, and writes nothing through a window that was opened to be read.
    pub unsafe fn open(
        driver: Driver,
        device: u32,
        at: NonNull<u8>,
        len: usize,
        access: WindowAccess,
    ) -> Result<HostWindow, DeviceError> {
        // SAFETY: a question.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) }.max(1) as usize;
        let host: *mut c_void = at.as_ptr().cast();
        if len == 0 || !len.is_multiple_of(page) || !host.addr().is_multiple_of(page) {
            return Err(DeviceError::Window { at: host.addr(), bytes: len, page });
        }
        let context = Context::retain(driver, ordinal(device))?;
        let made_in = ProcessToken::of_this_process();
        let mut window =
            HostWindow { at: host.addr(), len, address: 0, is_registered: false, context, made_in };
        window.context.place().within(&mut || {
            let mut flags = REGISTER_PORTABLE | REGISTER_MAPPED;
            if access == WindowAccess::Read && can_be_read_only(window.context.place())? {
                flags |= REGISTER_READ_ONLY;
            }
            // SAFETY: mapped, says the caller; the driver refuses what it cannot pin.
            unsafe { driver.host_register(host, len, flags) }?;
            window.is_registered = true;
            // SAFETY: a valid place; registered just above.
            unsafe { driver.host_address(&mut window.address, host, 0) }
        })?;
        Ok(window)
    }

    /// Where it begins for devices; not every machine calls it as the host does.
    pub fn address(&self) -> u64 {
        self.address
    }

    /// Its length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "a window is never empty")]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Ends the window when the devices no longer use it, and says what went wrong first. Dropping does the same and says
    /// nothing.
    pub fn close(mut self) -> Result<(), DeviceError> {
        self.end()
    }

    fn end(&mut self) -> Result<(), DeviceError> {
        if !self.made_in.is_valid() {
            return Err(DeviceError::Forked);
        }
        let mut result = self.undo();
        if result.is_err() {
            // A call may report what an earlier kernel did wrong instead of doing its work.
            let _ = self.undo();
        }
        if self.is_registered {
            // The pages stay pinned, and belong to the context.
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
        let driver = self.context.place().driver;
        self.context.place().within(&mut || {
            // SAFETY: takes nothing. What a kernel did wrong is told, and keeps no pages.
            let idle = unsafe { driver.synchronize() };
            // SAFETY: where our registration begins; the devices no longer use it.
            unsafe { driver.host_unregister(std::ptr::without_provenance_mut(self.at)) }?;
            self.is_registered = false;
            idle
        })
    }
}

/// Whether a device can be shown memory that this process itself may only read.
pub(super) fn can_be_read_only(place: Place) -> Result<bool, DeviceError> {
    match place.driver.attribute(Attribute::ReadOnlyRegister, place.device) {
        // Drivers before CUDA 11.1 do not know the question.
        Err(DeviceError::Call { code: 1, .. }) => Ok(false),
        answer => Ok(answer? != 0),
    }
}

impl Drop for HostWindow {
    fn drop(&mut self) {
        let _ = self.end();
    }
}
