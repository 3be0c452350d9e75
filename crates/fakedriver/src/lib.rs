//! Driver without a device: exports the functions of `libcuda.so.1` and `libamdhip64.so` that regions use, on host
//! memory. For tests only; not part of any wheel or release.
//!
//! "Device memory" is a memfd, a "device pointer" is an address of a mapping of it: two processes that send a
//! descriptor really share bytes, and memory that was mapped without access really faults. With `blind=1` all of it
//! faults: only copies can access it, as on most machines. Otherwise host threads may act as kernels.
//!
//! Registered shared host memory has different addresses for devices and for the host. The driver accepts neither in
//! place of the other.
//!
//! Stricter than a real driver where that detects errors: everything must be undone in order and with the exact
//! arguments with which it was done. The error code of a violation is the one that the vendors' headers list for the
//! call. Work in a stream runs as late as is allowed, when the caller waits for it.
//!
//! | variable | value |
//! |---|---|
//! | `MOONTIDE_FAKE_DRIVER` | `devices=2,vmm=0,fd=0,atomics=1,readonly=0,blind=1,peers=0-1+1-2,granularity=65536,memory=1048576,version=60000000` |
//! | `MOONTIDE_FAKE_DRIVER_LOG` | file that gets a line per call, and one at exit with the resources that are left |
//! | `MOONTIDE_FAKE_DRIVER_FAIL` | `cuMemMap:2`: the second such call fails, with 999; `cuMemMap:2:800` with 800 |
//!
//! Beyond the vendors' functions there is `moontide_fake_leaks`, which returns the resources that are left, and
//! `moontide_fake_break`, after which the devices do no more work, as after a kernel that used an invalid address.
//!
//! # Example
//!
//! A program that loads a driver at run time loads this library instead. `moontide doctor` then lists its two devices:
//!
//! ```text
//! cargo build -p moontide-fakedriver
//! library=$PWD/target/debug/libmoontide_fakedriver.so
//! MOONTIDE_CUDA_LIB=$library MOONTIDE_FAKE_DRIVER=devices=2 moontide doctor
//! ```
//!
//! `crates/heap/tests/device_regions.rs` runs processes on it that share regions.
//!
//! | file | contents |
//! |---|---|
//! | `exports` | functions under both vendors' names |
//! | `state` | resources that were created and not yet freed, and the rules; streams and host memory have files of
//! their own |
//! | `memory` | memfds and mappings |
//! | `call_log` | log, injected failures, report at exit |
//! | `settings` | parser of the first variable |

mod call_log;
mod exports;
mod memory;
mod settings;
mod state;

/// Return codes of calls. CUDA and HIP use the same numbers.
mod codes {
    use std::ffi::c_int;

    pub(crate) const INVALID_VALUE: c_int = 1;
    pub(crate) const OUT_OF_MEMORY: c_int = 2;
    pub(crate) const NOT_INITIALIZED: c_int = 3;
    pub(crate) const INVALID_DEVICE: c_int = 101;
    pub(crate) const INVALID_CONTEXT: c_int = 201;
    pub(crate) const MAP_FAILED: c_int = 205;
    pub(crate) const OPERATING_SYSTEM: c_int = 304;
    pub(crate) const INVALID_HANDLE: c_int = 400;
    pub(crate) const ILLEGAL_ADDRESS: c_int = 700;
    pub(crate) const ALREADY_REGISTERED: c_int = 712;
    pub(crate) const NOT_REGISTERED: c_int = 713;
    pub(crate) const NOT_SUPPORTED: c_int = 801;
    pub(crate) const UNKNOWN: c_int = 999;

    /// Returns the text of `cuGetErrorString`.
    pub(crate) fn text(code: c_int) -> Option<&'static std::ffi::CStr> {
        Some(match code {
            0 => c"no error",
            INVALID_VALUE => c"invalid argument",
            OUT_OF_MEMORY => c"out of memory",
            NOT_INITIALIZED => c"initialization error",
            INVALID_DEVICE => c"invalid device ordinal",
            INVALID_CONTEXT => c"invalid device context",
            MAP_FAILED => c"mapping of buffer object failed",
            OPERATING_SYSTEM => c"OS call failed or operation not supported on this OS",
            INVALID_HANDLE => c"invalid resource handle",
            ILLEGAL_ADDRESS => c"an illegal memory access was encountered",
            ALREADY_REGISTERED => c"part or all of the requested memory range is already mapped",
            NOT_REGISTERED => c"pointer does not correspond to a registered memory region",
            NOT_SUPPORTED => c"operation not supported",
            UNKNOWN => c"unknown error",
            _ => return None,
        })
    }
}
