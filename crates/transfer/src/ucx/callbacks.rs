//! Results reported by UCX callbacks, stored until the progress thread reads them.
//!
//! Invariants:
//! - A callback only stores a result; it neither calls UCX nor runs code of a caller, so nothing unwinds through C.
//! - UCX runs callbacks on the thread that called it, which is always the progress thread: hence a thread-local buffer.

use std::cell::RefCell;
use std::ffi::c_void;

use super::sys::{self, RawStatus, Zeroed};

thread_local! {
    /// Results reported to this thread since the last [`take`].
    static RESULTS: RefCell<CallbackResults> =
        const { RefCell::new(CallbackResults { completions: Vec::new(), failures: Vec::new() }) };
}

#[derive(Default)]
pub(super) struct CallbackResults {
    pub(super) completions: Vec<Completion>,
    /// Endpoints whose peer UCX reported as lost.
    pub(super) failures: Vec<(u64, RawStatus)>,
}

pub(super) struct Completion {
    pub(super) id: u64,
    pub(super) status: RawStatus,
    pub(super) request: *mut c_void,
}

/// `ucp_send_nbx_callback_t`; the user data is the id of the operation.
pub(super) unsafe extern "C" fn on_done(request: *mut c_void, status: RawStatus, user: *mut c_void) {
    RESULTS
        .with_borrow_mut(|results| results.completions.push(Completion { id: user as u64, status, request }));
}

/// `ucp_err_handler_cb_t`; the argument is the id of the endpoint.
pub(super) unsafe extern "C" fn on_failure(arg: *mut c_void, _ep: *mut sys::Ep, status: RawStatus) {
    RESULTS.with_borrow_mut(|results| results.failures.push((arg as u64, status)));
}

/// Takes all stored results.
pub(super) fn take() -> CallbackResults {
    RESULTS.with_borrow_mut(std::mem::take)
}

/// Returns the parameters of a call that reports to `on_done` under this id.
pub(super) fn callback(id: u64) -> sys::RequestParam {
    sys::RequestParam {
        op_attr_mask: sys::UCP_OP_ATTR_FIELD_CALLBACK | sys::UCP_OP_ATTR_FIELD_USER_DATA,
        cb: Some(on_done),
        user_data: id as *mut c_void,
        ..sys::RequestParam::zeroed()
    }
}
