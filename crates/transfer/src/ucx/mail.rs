//! What UCX's callbacks report, until the progress thread reads it.
//!
//! Invariants:
//! - A callback only notes what happened; it neither enters UCX nor runs code of a caller, so nothing unwinds through C.
//! - UCX runs callbacks on the thread that called it, and only the progress thread does: hence a thread-local box.

use std::cell::RefCell;
use std::ffi::c_void;

use super::sys::{self, RawStatus, Zeroed};

thread_local! {
    /// What UCX's callbacks reported to this thread since it was last read.
    static MAIL: RefCell<Mail> = const { RefCell::new(Mail { completions: Vec::new(), failures: Vec::new() }) };
}

#[derive(Default)]
pub(super) struct Mail {
    pub(super) completions: Vec<Completion>,
    /// Endpoints of which UCX said that the peer is gone.
    pub(super) failures: Vec<(u64, RawStatus)>,
}

pub(super) struct Completion {
    pub(super) id: u64,
    pub(super) status: RawStatus,
    pub(super) request: *mut c_void,
}

/// `ucp_send_nbx_callback_t`; the user data is the number of the operation.
pub(super) unsafe extern "C" fn on_done(request: *mut c_void, status: RawStatus, user: *mut c_void) {
    MAIL.with_borrow_mut(|mail| mail.completions.push(Completion { id: user as u64, status, request }));
}

/// `ucp_err_handler_cb_t`; the argument is the number of the endpoint.
pub(super) unsafe extern "C" fn on_failure(arg: *mut c_void, _ep: *mut sys::Ep, status: RawStatus) {
    MAIL.with_borrow_mut(|mail| mail.failures.push((arg as u64, status)));
}

/// Empties the box.
pub(super) fn take() -> Mail {
    MAIL.with_borrow_mut(std::mem::take)
}

/// Parameters of a call that reports to `on_done` under this number.
pub(super) fn callback(id: u64) -> sys::RequestParam {
    sys::RequestParam {
        op_attr_mask: sys::UCP_OP_ATTR_FIELD_CALLBACK | sys::UCP_OP_ATTR_FIELD_USER_DATA,
        cb: Some(on_done),
        user_data: id as *mut c_void,
        ..sys::RequestParam::zeroed()
    }
}
