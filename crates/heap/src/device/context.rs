//! A device as the calling thread's current one.
//!
//! Owns one count on a device's primary context (CUDA; HIP has a number per thread and nothing to count). The thread's own
//! choice is put back after every use: whoever calls us has kernels of their own to start.

use std::ffi::{c_int, c_void};

use super::calls::OwnCalls;
use super::driver::Driver;
use super::error::DeviceError;

/// A device that is in use by this process.
#[derive(Debug)]
pub(super) struct Context {
    place: Place,
    is_retained: bool,
}

/// What is made current: a context of CUDA's, or HIP's number of a device.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) driver: Driver,
    pub(super) device: c_int,
    /// An address that only the driver looks at.
    context: usize,
}

impl Context {
    pub(super) fn retain(driver: Driver, ordinal: c_int) -> Result<Context, DeviceError> {
        let mut place = Place { driver: driver.here()?, device: 0, context: 0 };
        // SAFETY: a valid place for the answer.
        unsafe { driver.device_get(&mut place.device, ordinal) }?;
        if let OwnCalls::Cuda { retain, .. } = driver.own() {
            let mut context: *mut c_void = std::ptr::null_mut();
            // SAFETY: as above.
            driver.check("cuDevicePrimaryCtxRetain", unsafe { retain(&mut context, place.device) })?;
            place.context = context.addr();
        }
        Ok(Context { place, is_retained: true })
    }

    pub(super) fn place(&self) -> Place {
        self.place
    }

    /// Never gives the count back: something that the context has could not be.
    pub(super) fn keep(&mut self) {
        self.is_retained = false;
    }

    /// Gives the count back; does nothing the second time.
    pub(super) fn release(&mut self) -> Result<(), DeviceError> {
        if !self.is_retained {
            return Ok(());
        }
        if let OwnCalls::Cuda { release, .. } = self.place.driver.own() {
            // SAFETY: this value counts once, and nothing that it made is left.
            let code = unsafe { release(self.place.device) };
            self.place.driver.check("cuDevicePrimaryCtxRelease_v2", code)?;
        }
        self.is_retained = false;
        Ok(())
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // Of a process that was forked off it is not ours to give back.
        if self.place.driver.here().is_ok() && self.release().is_err() {
            let _ = self.release();
        }
    }
}

impl Place {
    /// Runs something with this device as the thread's current one.
    pub(super) fn within(self, run: &mut dyn FnMut() -> Result<(), DeviceError>) -> Result<(), DeviceError> {
        let before = self.current()?;
        self.make_current(self.own())?;
        let result = run();
        let restored = self.make_current(before);
        if restored.is_err() {
            // The caller's kernels must not start on our device: once more, and it is told.
            let _ = self.make_current(before);
        }
        result.and(restored)
    }

    fn own(self) -> usize {
        match self.driver.own() {
            OwnCalls::Cuda { .. } => self.context,
            OwnCalls::Hip { .. } => self.device as usize,
        }
    }

    fn current(self) -> Result<usize, DeviceError> {
        match self.driver.own() {
            OwnCalls::Cuda { get_current, .. } => {
                let mut context: *mut c_void = std::ptr::null_mut();
                // SAFETY: a valid place for the answer.
                self.driver.check("cuCtxGetCurrent", unsafe { get_current(&mut context) })?;
                Ok(context.addr())
            }
            OwnCalls::Hip { get_device, .. } => {
                let mut device = 0;
                // SAFETY: as above.
                self.driver.check("hipGetDevice", unsafe { get_device(&mut device) })?;
                Ok(device as usize)
            }
        }
    }

    fn make_current(self, place: usize) -> Result<(), DeviceError> {
        match self.driver.own() {
            OwnCalls::Cuda { set_current, .. } => {
                // SAFETY: a context that we hold, or what the driver told was current.
                let code = unsafe { set_current(std::ptr::without_provenance_mut(place)) };
                self.driver.check("cuCtxSetCurrent", code)
            }
            OwnCalls::Hip { set_device, .. } => {
                // SAFETY: takes any number.
                self.driver.check("hipSetDevice", unsafe { set_device(place as c_int) })
            }
        }
    }
}
