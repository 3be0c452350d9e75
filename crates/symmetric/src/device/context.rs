//! [`Context`]: a device as the calling thread's current one.
//!
//! Owns one reference to a device's primary context (CUDA; HIP has a device number per thread and no reference
//! count). The thread's previous choice is restored after every use, because the caller launches kernels of its own.

use std::ffi::{c_int, c_void};

use super::driver::Driver;
use super::error::DeviceError;
use super::ffi::{DriverCalls, VendorApi};

/// A device that this process uses.
#[derive(Debug)]
pub(super) struct Context {
    current: CurrentContext,
    is_retained: bool,
}

/// Value that is made current: a CUDA context, or a HIP device number.
#[derive(Clone, Copy, Debug)]
pub(super) struct CurrentContext {
    pub(super) driver: Driver,
    pub(super) device: c_int,
    /// Address that only the driver dereferences.
    context: usize,
}

impl Context {
    pub(super) fn retain(driver: Driver, ordinal: c_int) -> Result<Context, DeviceError> {
        let mut current = CurrentContext { driver: driver.check_process()?, device: 0, context: 0 };
        // SAFETY: a valid pointer for the result.
        unsafe { driver.device_get(&mut current.device, ordinal) }?;
        if let VendorApi::Cuda { retain, .. } = driver.vendor_api() {
            let mut context: *mut c_void = std::ptr::null_mut();
            // SAFETY: as above.
            driver.check("cuDevicePrimaryCtxRetain", unsafe { retain(&mut context, current.device) })?;
            current.context = context.addr();
        }
        Ok(Context { current, is_retained: true })
    }

    pub(super) fn current(&self) -> CurrentContext {
        self.current
    }

    /// Keeps the reference until the process exits: something that belongs to the context could not be freed.
    pub(super) fn keep(&mut self) {
        self.is_retained = false;
    }

    /// Releases the reference; does nothing the second time.
    pub(super) fn release(&mut self) -> Result<(), DeviceError> {
        if !self.is_retained {
            return Ok(());
        }
        if let VendorApi::Cuda { release, .. } = self.current.driver.vendor_api() {
            // SAFETY: this value owns one reference, and everything that was created through it is freed.
            let code = unsafe { release(self.current.device) };
            self.current.driver.check("cuDevicePrimaryCtxRelease_v2", code)?;
        }
        self.is_retained = false;
        Ok(())
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // In a forked child the reference belongs to the parent.
        if self.current.driver.check_process().is_ok() && self.release().is_err() {
            let _ = self.release();
        }
    }
}

impl CurrentContext {
    /// Runs `run` with this device as the thread's current one.
    pub(super) fn with_current(
        self,
        run: &mut dyn FnMut() -> Result<(), DeviceError>,
    ) -> Result<(), DeviceError> {
        let before = self.thread_current()?;
        self.make_current(self.id())?;
        let result = run();
        let restored = self.make_current(before);
        if restored.is_err() {
            // The caller's kernels must not start on this device: retry once, and return the error.
            let _ = self.make_current(before);
        }
        result.and(restored)
    }

    fn id(self) -> usize {
        match self.driver.vendor_api() {
            VendorApi::Cuda { .. } => self.context,
            VendorApi::Hip { .. } => self.device as usize,
        }
    }

    fn thread_current(self) -> Result<usize, DeviceError> {
        match self.driver.vendor_api() {
            VendorApi::Cuda { get_current, .. } => {
                let mut context: *mut c_void = std::ptr::null_mut();
                // SAFETY: a valid pointer for the result.
                self.driver.check("cuCtxGetCurrent", unsafe { get_current(&mut context) })?;
                Ok(context.addr())
            }
            VendorApi::Hip { get_device, .. } => {
                let mut device = 0;
                // SAFETY: as above.
                self.driver.check("hipGetDevice", unsafe { get_device(&mut device) })?;
                Ok(device as usize)
            }
        }
    }

    fn make_current(self, id: usize) -> Result<(), DeviceError> {
        match self.driver.vendor_api() {
            VendorApi::Cuda { set_current, .. } => {
                // SAFETY: a context to which this process holds a reference, or the one that the driver returned as
                // current.
                let code = unsafe { set_current(std::ptr::without_provenance_mut(id)) };
                self.driver.check("cuCtxSetCurrent", code)
            }
            VendorApi::Hip { set_device, .. } => {
                // SAFETY: accepts any number.
                self.driver.check("hipSetDevice", unsafe { set_device(id as c_int) })
            }
        }
    }
}
