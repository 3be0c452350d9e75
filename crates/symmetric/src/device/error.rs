//! [`DeviceError`]: errors of drivers and device memory, with advice.

use std::path::PathBuf;

use super::vendor::Vendor;

/// Reason why a driver, a device or a region of its memory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The driver's library cannot be loaded.
    #[error("{path}: {reason}; install the {vendor} driver, or name its library with {env}", env = vendor.env())]
    NotInstalled {
        /// Vendor of the driver.
        vendor: Vendor,
        /// Name or path of the library.
        path: PathBuf,
        /// Error of the loader.
        reason: String,
    },
    /// The library is not the driver's, or of an old version.
    #[error("{path} has no {symbol}; regions need {need} or newer", need = vendor.min_version())]
    Symbol {
        /// Vendor of the driver.
        vendor: Vendor,
        /// Name or path of the library.
        path: PathBuf,
        /// First missing function.
        symbol: &'static str,
    },
    /// A call of the driver failed.
    #[error("{call} failed with {code} ({text}); {hint}", hint = hint(call, *code))]
    Call {
        /// Name of the call.
        call: &'static str,
        /// Error code of the call.
        code: i32,
        /// Text of the driver for the code.
        text: String,
    },
    /// The driver cannot confirm that a copy is complete: the device's context has a permanent error.
    #[error(
        "{call} failed with {code} ({text}), and so did the calls after it: a copy may not have ended, and its bytes on \
         both sides are undefined; stop this process, no other driver call will succeed in it"
    )]
    Incomplete {
        /// Name of the call.
        call: &'static str,
        /// Error code of the call.
        code: i32,
        /// Text of the driver for the code.
        text: String,
    },
    /// The driver was loaded before this process was forked, and does not work in the child.
    #[error(
        "driver was loaded before the fork; start processes that use a device with exec, or load it after the fork"
    )]
    Forked,
    /// The region's length is 0, or exceeds the address space.
    #[error("region of {bytes} bytes is invalid; request at least one byte, and less than the device has")]
    Length {
        /// Requested length in bytes.
        bytes: u64,
    },
    /// The range cannot be registered.
    #[error(
        "cannot register {bytes} bytes at {at:#x}; register whole pages of {page} bytes from a page boundary"
    )]
    HostRegistration {
        /// Start address of the range.
        at: usize,
        /// Length of the range in bytes.
        bytes: usize,
        /// Page size in bytes.
        page: usize,
    },
    /// The received message is not an export of a region.
    #[error("received message is not a device export; both processes must run the same release")]
    Export,
    /// The region belongs to a device of another vendor.
    #[error(
        "region is in memory of {theirs}, the driver is for {ours}; import it with the driver of its vendor"
    )]
    Vendor {
        /// Vendor of the region.
        theirs: Vendor,
        /// Vendor of the driver.
        ours: Vendor,
    },
    /// The address is on another device.
    #[error("address is on device {found}, the region is used by device {ours}; copy it there first")]
    OtherDevice {
        /// Device of the address.
        found: i32,
        /// Device of the region.
        ours: i32,
    },
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// Attempted operation.
        what: &'static str,
        /// Error number of the call.
        source: rustix::io::Errno,
    },
}

impl DeviceError {
    /// Converts the error of a call that waits for a copy to [`DeviceError::Incomplete`].
    pub(super) fn incomplete(self) -> DeviceError {
        match self {
            DeviceError::Call { call, code, text } => DeviceError::Incomplete { call, code, text },
            other => other,
        }
    }
}

/// Returns advice for the errors that users can fix. CUDA and HIP use the same numbers.
fn hint(call: &str, code: i32) -> &'static str {
    match code {
        712 => "some of these pages are already registered: register all of them at once",
        _ if call.contains("HostRegister") => {
            "the memory must be mapped, and this process able to write it unless the device registers read-only memory \
             (HIP: none does); pinned pages count against ulimit -l"
        }
        2 => "the device's memory is full: request less, or stop the process that uses it",
        1 | 101 => "check that the device exists and can access its peer: `moontide doctor` lists both",
        100 => {
            "no device is visible: check CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES, and the container's devices"
        }
        3 | 4 => "the driver is starting or stopping: do not use devices during process exit",
        800 | 304 => "the system does not permit it: check the container's privileges and limits (ulimit -n)",
        801 => {
            "this driver or device cannot share memory in this way: `moontide doctor` lists its capabilities"
        }
        803 => "kernel module and library differ: restart the machine after a driver update",
        _ => {
            "`moontide doctor` lists the driver's capabilities; docs/devices.md lists the tested configurations"
        }
    }
}
