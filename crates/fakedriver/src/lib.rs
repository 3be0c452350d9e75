//! A driver without a device: exports those functions of `libcuda.so.1` and `libamdhip64.so` that regions use, on memory of
//! the host. For tests only; in no wheel and no release.
//!
//! "Device memory" is a memfd, a "device pointer" is an address of a mapping of it: two processes that pass a descriptor
//! really share bytes, and memory that was mapped but not made accessible really faults. With `blind=1` all of it faults: only
//! copies reach it, as on most machines. Without, processors may play the part of kernels.
//!
//! Shared memory of the host has another address for devices than for the host. Neither is taken for the other.
//!
//! Stricter than a real driver where that finds mistakes: everything must be undone in order and with the exact arguments
//! with which it was done. Which code a mistake gets is the one that the vendors' headers list for the call. Work in a stream is
//! done as late as is allowed, when somebody waits for it.
//!
//! | variable | what |
//! |---|---|
//! | `MOONTIDE_FAKE_DRIVER` | `devices=2,vmm=0,fd=0,atomics=1,readonly=0,blind=1,peers=0-1+1-2,granularity=65536,memory=1048576,version=60000000` |
//! | `MOONTIDE_FAKE_DRIVER_LOG` | a file that gets a line per call, and one at exit that says what was left |
//! | `MOONTIDE_FAKE_DRIVER_FAIL` | `cuMemMap:2`: the second such call fails, with 999; `cuMemMap:2:800` with 800 |
//!
//! Beyond the vendors' functions there is `moontide_fake_left`, which says what is left at any time, and `moontide_fake_break`,
//! after which the devices do nothing any more, as after a kernel that used a wrong address.
//!
//! | file | what |
//! |---|---|
//! | `exports` | the functions under both vendors' names |
//! | `ledger` | what was made and not yet undone, and the rules; streams and memory of the host have files of their own |
//! | `pages` | memfds and mappings |
//! | `journal` | the log, planned failures, the report |
//! | `settings` | the first variable |

mod exports;
mod journal;
mod ledger;
mod pages;
mod settings;

/// What calls answer. CUDA and HIP number them alike.
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

    /// As `cuGetErrorString` says it.
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
