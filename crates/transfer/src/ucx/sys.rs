//! The part of the UCP application interface that this crate uses: types, constants and the table of function pointers.
//!
//! Owns no policy and no resource. The definitions follow the OpenUCX headers (`ucp/api/ucp.h`, `ucp/api/ucp_def.h`,
//! `ucs/type/status.h`), versions 1.13 to 1.22, checked by a C program printing `sizeof` and `offsetof`.
//!
//! Invariants:
//! - UCX only appends fields to its parameter structs, and reads or writes a field only if its bit is set in the
//!   struct's mask. So one declaration serves every version, as long as the offsets below hold.
//! - A struct here is at least as long as in the newest known version, and is zeroed except for the fields that are
//!   set.
//! - `ucs_status_t` is a *packed* enum: one signed byte, not an `int`.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::mem::offset_of;

use libloading::Library;

/// `ucs_status_t`: zero is success, one is "in progress", negative is failure.
pub(super) type RawStatus = i8;
/// `ucs_status_ptr_t`: null is success, the top 100 values of the address space are failures, the rest is a request.
pub(super) type StatusPtr = *mut c_void;

macro_rules! opaque {
    ($($(#[$doc:meta])* $name:ident)*) => { $(
        $(#[$doc])*
        #[repr(C)]
        pub(super) struct $name { _private: [u8; 0] }
    )* };
}

opaque! {
    /// `struct ucp_config`
    Config
    /// `struct ucp_context`
    Context
    /// `struct ucp_worker`
    Worker
    /// `struct ucp_ep`
    Ep
    /// `struct ucp_mem`
    Mem
    /// `struct ucp_rkey`
    Rkey
    /// `struct ucp_address`
    Address
}

pub(super) const UCS_OK: RawStatus = 0;
pub(super) const UCS_ERR_BUSY: RawStatus = -15;
#[cfg(test)]
pub(super) const UCS_ERR_CANCELED: RawStatus = -16;
pub(super) const UCS_ERR_LAST: RawStatus = -100;

pub(super) const UCS_THREAD_MODE_SINGLE: c_int = 0;

pub(super) const UCP_PARAM_FIELD_FEATURES: u64 = 1 << 0;
pub(super) const UCP_PARAM_FIELD_NAME: u64 = 1 << 8;
pub(super) const UCP_FEATURE_RMA: u64 = 1 << 1;
pub(super) const UCP_FEATURE_WAKEUP: u64 = 1 << 4;

pub(super) const UCP_WORKER_PARAM_FIELD_THREAD_MODE: u64 = 1 << 0;
pub(super) const UCP_WORKER_ATTR_FIELD_ADDRESS: u64 = 1 << 1;

pub(super) const UCP_EP_PARAM_FIELD_REMOTE_ADDRESS: u64 = 1 << 0;
pub(super) const UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE: u64 = 1 << 1;
pub(super) const UCP_EP_PARAM_FIELD_ERR_HANDLER: u64 = 1 << 2;
pub(super) const UCP_ERR_HANDLING_MODE_PEER: c_int = 1;
pub(super) const UCP_EP_CLOSE_FLAG_FORCE: u32 = 1 << 0;
/// Since 1.14.
pub(super) const UCP_EP_ATTR_FIELD_TRANSPORTS: u64 = 1 << 3;

pub(super) const UCP_MEM_MAP_PARAM_FIELD_ADDRESS: u64 = 1 << 0;
pub(super) const UCP_MEM_MAP_PARAM_FIELD_LENGTH: u64 = 1 << 1;

pub(super) const UCP_OP_ATTR_FIELD_CALLBACK: u32 = 1 << 1;
pub(super) const UCP_OP_ATTR_FIELD_USER_DATA: u32 = 1 << 2;
pub(super) const UCP_OP_ATTR_FIELD_FLAGS: u32 = 1 << 4;
pub(super) const UCP_OP_ATTR_FIELD_MEMH: u32 = 1 << 8;

/// `ucp_params_t`
#[repr(C)]
pub(super) struct Params {
    pub(super) field_mask: u64,
    pub(super) features: u64,
    pub(super) request_size: usize,
    pub(super) request_init: *const c_void,
    pub(super) request_cleanup: *const c_void,
    pub(super) tag_sender_mask: u64,
    pub(super) mt_workers_shared: c_int,
    pub(super) estimated_num_eps: usize,
    pub(super) estimated_num_ppn: usize,
    pub(super) name: *const c_char,
    /// Since 1.16.
    pub(super) node_local_id: usize,
}

/// `ucp_worker_params_t`
#[repr(C)]
pub(super) struct WorkerParams {
    pub(super) field_mask: u64,
    pub(super) thread_mode: c_int,
    pub(super) cpu_mask: [u64; 16],
    pub(super) events: c_uint,
    pub(super) user_data: *mut c_void,
    pub(super) event_fd: c_int,
    pub(super) flags: u64,
    pub(super) name: *const c_char,
    pub(super) am_alignment: usize,
    pub(super) client_id: u64,
}

/// `ucp_worker_attr_t`
#[repr(C)]
pub(super) struct WorkerAttr {
    pub(super) field_mask: u64,
    pub(super) thread_mode: c_int,
    pub(super) address_flags: u32,
    pub(super) address: *mut Address,
    pub(super) address_length: usize,
    pub(super) max_am_header: usize,
    pub(super) name: [c_char; 32],
    pub(super) max_debug_string: usize,
}

/// `ucp_err_handler_cb_t`
pub(super) type ErrorCallback = unsafe extern "C" fn(arg: *mut c_void, ep: *mut Ep, status: RawStatus);

/// `ucs_sock_addr_t`
#[repr(C)]
pub(super) struct SockAddr {
    pub(super) addr: *const c_void,
    pub(super) addrlen: u32,
}

/// `ucp_ep_params_t`
#[repr(C)]
pub(super) struct EpParams {
    pub(super) field_mask: u64,
    pub(super) address: *const Address,
    pub(super) err_mode: c_int,
    pub(super) err_handler_cb: Option<ErrorCallback>,
    pub(super) err_handler_arg: *mut c_void,
    pub(super) user_data: *mut c_void,
    pub(super) flags: c_uint,
    pub(super) sockaddr: SockAddr,
    pub(super) conn_request: *mut c_void,
    pub(super) name: *const c_char,
    pub(super) local_sockaddr: SockAddr,
}

/// `ucp_transport_entry_t`; the strings belong to the context.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct TransportEntry {
    pub(super) transport_name: *const c_char,
    pub(super) device_name: *const c_char,
}

/// `ucp_transports_t`
#[repr(C)]
pub(super) struct Transports {
    pub(super) entries: *mut TransportEntry,
    pub(super) num_entries: c_uint,
    pub(super) entry_size: usize,
}

/// `ucp_ep_attr_t`
#[repr(C)]
pub(super) struct EpAttr {
    pub(super) field_mask: u64,
    pub(super) name: [c_char; 32],
    pub(super) local_sockaddr: [u64; 16],
    pub(super) remote_sockaddr: [u64; 16],
    pub(super) transports: Transports,
    pub(super) user_data: *mut c_void,
}

/// `ucp_mem_map_params_t`
#[repr(C)]
pub(super) struct MemMapParams {
    pub(super) field_mask: u64,
    pub(super) address: *mut c_void,
    pub(super) length: usize,
    pub(super) flags: c_uint,
    pub(super) prot: c_uint,
    pub(super) memory_type: c_int,
    /// Since 1.14.
    pub(super) exported_memh_buffer: *const c_void,
}

/// `ucp_send_nbx_callback_t`
pub(super) type DoneCallback =
    unsafe extern "C" fn(request: *mut c_void, status: RawStatus, user: *mut c_void);

/// `ucp_request_param_t`
#[repr(C)]
pub(super) struct RequestParam {
    pub(super) op_attr_mask: u32,
    pub(super) flags: u32,
    pub(super) request: *mut c_void,
    pub(super) cb: Option<DoneCallback>,
    pub(super) datatype: u64,
    pub(super) user_data: *mut c_void,
    pub(super) reply_buffer: *mut c_void,
    pub(super) memory_type: c_int,
    pub(super) recv_info: *mut c_void,
    pub(super) memh: *mut Mem,
    /// The three below since 1.22.
    pub(super) remote_datatype: u64,
    pub(super) remote: *const c_void,
    pub(super) remote_count: usize,
}

/// Marks structs for which all-zero bytes are a valid value, and the value that an empty mask requires.
///
/// # Safety
/// Every field is an integer, a raw pointer, an array of those, or an `Option` of a function pointer.
pub(super) unsafe trait Zeroed: Sized {
    /// Returns the struct with every bit clear.
    fn zeroed() -> Self {
        // SAFETY: the implementor guarantees that zero bytes are a valid value of each field.
        unsafe { std::mem::zeroed() }
    }
}

// SAFETY: integers, raw pointers and optional function pointers only; see each definition above.
unsafe impl Zeroed for Params {}
// SAFETY: as above.
unsafe impl Zeroed for WorkerParams {}
// SAFETY: as above.
unsafe impl Zeroed for WorkerAttr {}
// SAFETY: as above.
unsafe impl Zeroed for EpParams {}
// SAFETY: as above.
unsafe impl Zeroed for EpAttr {}
// SAFETY: as above.
unsafe impl Zeroed for MemMapParams {}
// SAFETY: as above.
unsafe impl Zeroed for RequestParam {}
// SAFETY: as above.
unsafe impl Zeroed for TransportEntry {}

// Offsets agreed by the headers of 1.13 and 1.22 on every 64-bit target; sizes are those of 1.22.
#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(size_of::<Params>() == 88);
    assert!(offset_of!(Params, request_size) == 16);
    assert!(offset_of!(Params, mt_workers_shared) == 48);
    assert!(offset_of!(Params, name) == 72);

    assert!(size_of::<WorkerParams>() == 200);
    assert!(offset_of!(WorkerParams, thread_mode) == 8);
    assert!(offset_of!(WorkerParams, cpu_mask) == 16);
    assert!(offset_of!(WorkerParams, events) == 144);
    assert!(offset_of!(WorkerParams, event_fd) == 160);
    assert!(offset_of!(WorkerParams, client_id) == 192);

    assert!(size_of::<WorkerAttr>() == 80);
    assert!(offset_of!(WorkerAttr, address) == 16);
    assert!(offset_of!(WorkerAttr, address_length) == 24);

    assert!(size_of::<EpParams>() == 104);
    assert!(offset_of!(EpParams, address) == 8);
    assert!(offset_of!(EpParams, err_mode) == 16);
    assert!(offset_of!(EpParams, err_handler_cb) == 24);
    assert!(offset_of!(EpParams, user_data) == 40);
    assert!(offset_of!(EpParams, sockaddr) == 56);
    assert!(offset_of!(EpParams, local_sockaddr) == 88);

    assert!(size_of::<TransportEntry>() == 16);
    assert!(size_of::<Transports>() == 24);
    assert!(size_of::<EpAttr>() == 328);
    assert!(offset_of!(EpAttr, local_sockaddr) == 40);
    assert!(offset_of!(EpAttr, remote_sockaddr) == 168);
    assert!(offset_of!(EpAttr, transports) == 296);

    assert!(size_of::<MemMapParams>() == 48);
    assert!(offset_of!(MemMapParams, address) == 8);
    assert!(offset_of!(MemMapParams, length) == 16);
    assert!(offset_of!(MemMapParams, prot) == 28);
    assert!(offset_of!(MemMapParams, memory_type) == 32);

    assert!(size_of::<RequestParam>() == 96);
    assert!(offset_of!(RequestParam, flags) == 4);
    assert!(offset_of!(RequestParam, cb) == 16);
    assert!(offset_of!(RequestParam, user_data) == 32);
    assert!(offset_of!(RequestParam, memory_type) == 48);
    assert!(offset_of!(RequestParam, memh) == 64);
};

macro_rules! api {
    ($(fn $name:ident($($arg:ty),* $(,)?) $(-> $ret:ty)?;)*) => {
        /// Every UCP function that this crate calls, resolved once.
        pub(super) struct Api {
            $(pub(super) $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
        }

        impl Api {
            /// Resolves every symbol, or returns the name of the first missing one.
            ///
            /// # Safety
            /// `library` is OpenUCX's libucp, and stays loaded for as long as the table is used.
            pub(super) unsafe fn resolve(library: &Library) -> Result<Self, &'static str> {
                Ok(Self {
                    $($name: {
                        // SAFETY: the OpenUCX headers declare this signature under this name, and the caller keeps the
                        // library loaded.
                        unsafe {
                            *library
                                .get::<unsafe extern "C" fn($($arg),*) $(-> $ret)?>(
                                    concat!(stringify!($name), "\0").as_bytes(),
                                )
                                .map_err(|_| stringify!($name))?
                        }
                    },)*
                })
            }
        }
    };
}

api! {
    fn ucp_get_version(*mut c_uint, *mut c_uint, *mut c_uint);
    fn ucp_config_read(*const c_char, *const c_char, *mut *mut Config) -> RawStatus;
    fn ucp_config_modify(*mut Config, *const c_char, *const c_char) -> RawStatus;
    fn ucp_config_release(*mut Config);
    fn ucp_init_version(c_uint, c_uint, *const Params, *const Config, *mut *mut Context) -> RawStatus;
    fn ucp_cleanup(*mut Context);
    fn ucp_worker_create(*mut Context, *const WorkerParams, *mut *mut Worker) -> RawStatus;
    fn ucp_worker_destroy(*mut Worker);
    fn ucp_worker_query(*mut Worker, *mut WorkerAttr) -> RawStatus;
    fn ucp_worker_release_address(*mut Worker, *mut Address);
    fn ucp_worker_progress(*mut Worker) -> c_uint;
    fn ucp_worker_get_efd(*mut Worker, *mut c_int) -> RawStatus;
    fn ucp_worker_arm(*mut Worker) -> RawStatus;
    fn ucp_ep_create(*mut Worker, *const EpParams, *mut *mut Ep) -> RawStatus;
    fn ucp_ep_close_nbx(*mut Ep, *const RequestParam) -> StatusPtr;
    fn ucp_ep_query(*mut Ep, *mut EpAttr) -> RawStatus;
    fn ucp_ep_flush_nbx(*mut Ep, *const RequestParam) -> StatusPtr;
    fn ucp_mem_map(*mut Context, *const MemMapParams, *mut *mut Mem) -> RawStatus;
    fn ucp_mem_unmap(*mut Context, *mut Mem) -> RawStatus;
    fn ucp_rkey_pack(*mut Context, *mut Mem, *mut *mut c_void, *mut usize) -> RawStatus;
    fn ucp_rkey_buffer_release(*mut c_void);
    fn ucp_ep_rkey_unpack(*mut Ep, *const c_void, *mut *mut Rkey) -> RawStatus;
    fn ucp_rkey_destroy(*mut Rkey);
    fn ucp_get_nbx(*mut Ep, *mut c_void, usize, u64, *mut Rkey, *const RequestParam) -> StatusPtr;
    fn ucp_put_nbx(*mut Ep, *const c_void, usize, u64, *mut Rkey, *const RequestParam) -> StatusPtr;
    fn ucp_request_free(*mut c_void);
}

/// Result of a call that may complete later.
#[must_use]
pub(super) enum CallOutcome {
    /// Completed at once; the callback will not run.
    Done,
    /// The callback will run, from `ucp_worker_progress` or from closing the endpoint.
    Pending,
    /// Refused; the callback will not run.
    Failed(RawStatus),
}

impl CallOutcome {
    /// Decodes a `ucs_status_ptr_t`. The callback receives the request itself.
    pub(super) fn from_ptr(ptr: StatusPtr) -> Self {
        let value = ptr as isize;
        match value {
            0 => Self::Done,
            // UCS_PTR_IS_ERR: the pointer, read as a signed number, lies in [UCS_ERR_LAST, 0).
            v if v < 0 && v >= UCS_ERR_LAST as isize => Self::Failed(v as RawStatus),
            _ => Self::Pending,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn status_pointer_decodes_as_done_failed_or_pending() {
        assert!(matches!(CallOutcome::from_ptr(std::ptr::null_mut()), CallOutcome::Done));
        assert!(matches!(
            CallOutcome::from_ptr(-16isize as StatusPtr),
            CallOutcome::Failed(UCS_ERR_CANCELED)
        ));
        assert!(matches!(CallOutcome::from_ptr(-100isize as StatusPtr), CallOutcome::Failed(UCS_ERR_LAST)));
        assert!(matches!(CallOutcome::from_ptr(-101isize as StatusPtr), CallOutcome::Pending));
        assert!(matches!(CallOutcome::from_ptr(0x7f00_0000_1000usize as StatusPtr), CallOutcome::Pending));
    }
}
