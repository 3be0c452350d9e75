//! Why a device's memory could not be had, and what to do next.

use std::path::PathBuf;

use super::driver::Vendor;

/// Why a driver, a device or a region of its memory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// The driver's library does not load.
    #[error("{path}: {reason}; install the {vendor} driver, or name its library with {env}", env = vendor.env())]
    Absent {
        /// Whose.
        vendor: Vendor,
        /// What was asked for.
        path: PathBuf,
        /// What the loader says.
        reason: String,
    },
    /// The library is not the driver's, or an old one's.
    #[error("{path} has no {symbol}; regions need {need} or newer", need = vendor.need())]
    Symbol {
        /// Whose.
        vendor: Vendor,
        /// The library.
        path: PathBuf,
        /// The first that is missing.
        symbol: &'static str,
    },
    /// The driver refused.
    #[error("{call} failed with {code} ({text}); {hint}", hint = hint(call, *code))]
    Call {
        /// Which call.
        call: &'static str,
        /// Its answer.
        code: i32,
        /// What the driver calls it.
        text: String,
    },
    /// The driver cannot say that a copy is over, however it is asked: the device's context has an error that stays.
    #[error(
        "{call} failed with {code} ({text}), and so did what was asked after it: a copy may not have ended, and its bytes on \
         both sides are nothing to rely on; end this process, no other call will work in it"
    )]
    Unfinished {
        /// Which call.
        call: &'static str,
        /// Its answer.
        code: i32,
        /// What the driver calls it.
        text: String,
    },
    /// The driver was loaded before this process was forked off, and does not work on this side.
    #[error(
        "the driver was loaded before the fork; start processes that use a device by exec, or load it after the fork"
    )]
    Forked,
    /// A region without bytes, or more than can be addressed.
    #[error("a region of {bytes} bytes; ask for at least one, and for less than the device has")]
    Length {
        /// What was asked for.
        bytes: u64,
    },
    /// Memory that is no window.
    #[error("a window of {bytes} bytes at {at:#x}; give whole pages of {page} bytes that begin at a page")]
    Window {
        /// Where it begins.
        at: usize,
        /// How long it is.
        bytes: usize,
        /// How long a page is.
        page: usize,
    },
    /// What came over the socket is no offer of a region.
    #[error("this is no offer of a device region; both sides must run the same release")]
    Offer,
    /// The region is another vendor's.
    #[error(
        "the region is in memory of {theirs}, the driver is for {ours}; import it with the driver of its vendor"
    )]
    Vendor {
        /// The offer's.
        theirs: Vendor,
        /// The driver's.
        ours: Vendor,
    },
    /// The address is on another device.
    #[error("the address is on device {found}, the region is used by device {ours}; copy it there first")]
    OtherDevice {
        /// The address's.
        found: i32,
        /// The region's.
        ours: i32,
    },
    /// A call to the operating system failed.
    #[error("{what}: {source}")]
    System {
        /// What was attempted.
        what: &'static str,
        /// The answer.
        source: rustix::io::Errno,
    },
}

impl DeviceError {
    /// The same, of a call that should have said that a copy is over.
    pub(super) fn unfinished(self) -> DeviceError {
        match self {
            DeviceError::Call { call, code, text } => DeviceError::Unfinished { call, code, text },
            other => other,
        }
    }
}

/// What to do about the refusals that people meet. CUDA and HIP number them alike.
fn hint(call: &str, code: i32) -> &'static str {
    match code {
        712 => "another window has some of these pages already: open one for all of them",
        _ if call.contains("HostRegister") => {
            "the memory must be mapped, and this process be able to write it unless the device registers what can only be \
             read (HIP: none does); pinned pages count against ulimit -l"
        }
        2 => "the device's memory is full: ask for less, or end what holds it",
        1 | 101 => "is there such a device, and can it access its peer? `moontide doctor` lists both",
        100 => {
            "no device is visible: look at CUDA_VISIBLE_DEVICES or HIP_VISIBLE_DEVICES, and the container's devices"
        }
        3 | 4 => "the driver is starting or ending: do not use devices at a process's exit",
        800 | 304 => "the system forbids it: look at the container's privileges and limits (ulimit -n)",
        801 => "this driver or device cannot share memory so: `moontide doctor` says what it can",
        803 => "kernel module and library differ: restart the machine after a driver's update",
        _ => "`moontide doctor` says what the driver can; docs/devices.md says what was tested",
    }
}
