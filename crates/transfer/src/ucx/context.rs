//! A UCX context and its worker, each given back on drop.
//!
//! Owns how UCX is set up: options, features, thread mode. Knows nothing of endpoints.
//!
//! Invariants: both are made, used and dropped on the progress thread, and the worker goes before its context.

use std::ffi::{CString, c_int};

use super::error::{Status, UcxError};
use super::sys::{self, Api, RawStatus, Zeroed};
use super::worker::WorkerConfig;

/// UCX interface version that we were written against: the oldest that loads, so that none complains.
const API_VERSION: (u32, u32) = (1, 13);

/// Set in every context. Rendezvous is for two-sided protocols; leaving it on makes UCX prepare for it.
const RNDV_THRESH: &str = "inf";

/// Names by which shared memory is among the transports. Those can notice dead peers, which error mode PEER requires,
/// but do not say so unasked; asking when they are not in use makes UCX complain.
const SHARED_MEMORY: [&str; 5] = ["posix", "sysv", "sm", "shm", "all"];

pub(super) struct Context {
    api: &'static Api,
    pub(super) raw: *mut sys::Context,
}

impl Context {
    pub(super) fn new(api: &'static Api, config: &WorkerConfig) -> Result<Self, UcxError> {
        let options = Options::read(api)?;
        options.set("RNDV_THRESH", RNDV_THRESH)?;
        options.set("KEEPALIVE_INTERVAL", &format!("{}ms", config.keepalive.as_millis().max(1)))?;
        if config.tls.as_ref().is_none_or(|tls| SHARED_MEMORY.iter().any(|name| tls.contains(name))) {
            options.set("MM_ERROR_HANDLING", "y")?;
        }
        if let Some(tls) = &config.tls {
            options.set("TLS", tls)?;
        }
        if let Some(devices) = &config.net_devices {
            options.set("NET_DEVICES", devices)?;
        }
        let params = sys::Params {
            field_mask: sys::UCP_PARAM_FIELD_FEATURES | sys::UCP_PARAM_FIELD_NAME,
            features: sys::UCP_FEATURE_RMA | sys::UCP_FEATURE_WAKEUP,
            name: c"moontide".as_ptr(),
            ..sys::Params::zeroed()
        };
        let mut raw = std::ptr::null_mut();
        // SAFETY: params and options are valid for the call, which copies what it keeps.
        let status =
            unsafe { (api.ucp_init_version)(API_VERSION.0, API_VERSION.1, &params, options.raw, &mut raw) };
        check("ucp_init", status)?;
        Ok(Self { api, raw })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: made by ucp_init, dropped once, after the worker (see the order of fields in Engine).
        unsafe { (self.api.ucp_cleanup)(self.raw) };
    }
}

/// UCX's options, filled from its environment variables.
struct Options {
    api: &'static Api,
    raw: *mut sys::Config,
}

impl Options {
    fn read(api: &'static Api) -> Result<Self, UcxError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: null asks for the default prefix and no file; the result goes to a valid place.
        let status = unsafe { (api.ucp_config_read)(std::ptr::null(), std::ptr::null(), &mut raw) };
        check("ucp_config_read", status)?;
        Ok(Self { api, raw })
    }

    fn set(&self, option: &'static str, value: &str) -> Result<(), UcxError> {
        let name = CString::new(option).map_err(|_| UcxError::ZeroByte { option })?;
        let value = CString::new(value).map_err(|_| UcxError::ZeroByte { option })?;
        // SAFETY: live options and two terminated strings, which UCX copies.
        check("ucp_config_modify", unsafe {
            (self.api.ucp_config_modify)(self.raw, name.as_ptr(), value.as_ptr())
        })
    }
}

impl Drop for Options {
    fn drop(&mut self) {
        // SAFETY: made by ucp_config_read, released once.
        unsafe { (self.api.ucp_config_release)(self.raw) };
    }
}

pub(super) struct Worker {
    api: &'static Api,
    pub(super) raw: *mut sys::Worker,
    /// Readable when there may be something to progress; UCX's own, lives as long as the worker.
    pub(super) event_fd: c_int,
}

impl Worker {
    pub(super) fn new(context: &Context) -> Result<Self, UcxError> {
        let api = context.api;
        let params = sys::WorkerParams {
            field_mask: sys::UCP_WORKER_PARAM_FIELD_THREAD_MODE,
            thread_mode: sys::UCS_THREAD_MODE_SINGLE,
            ..sys::WorkerParams::zeroed()
        };
        let mut raw = std::ptr::null_mut();
        // SAFETY: a live context and valid parameters.
        check("ucp_worker_create", unsafe { (api.ucp_worker_create)(context.raw, &params, &mut raw) })?;
        let mut worker = Self { api, raw, event_fd: -1 };
        // SAFETY: a live worker of a context with the wakeup feature.
        check("ucp_worker_get_efd", unsafe { (api.ucp_worker_get_efd)(raw, &mut worker.event_fd) })?;
        Ok(worker)
    }

    pub(super) fn address(&self) -> Result<Vec<u8>, UcxError> {
        let mut attr = sys::WorkerAttr { field_mask: sys::UCP_WORKER_ATTR_FIELD_ADDRESS, ..Zeroed::zeroed() };
        // SAFETY: a live worker, and attributes of which it fills the address.
        check("ucp_worker_query", unsafe { (self.api.ucp_worker_query)(self.raw, &mut attr) })?;
        // SAFETY: UCX says that the address has this many bytes; it is ours until released.
        let bytes =
            unsafe { std::slice::from_raw_parts(attr.address.cast::<u8>(), attr.address_length) }.to_vec();
        // SAFETY: released once, to the worker that made it.
        unsafe { (self.api.ucp_worker_release_address)(self.raw, attr.address) };
        Ok(bytes)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // SAFETY: made by ucp_worker_create, destroyed once, with nothing in flight (else the engine was leaked).
        unsafe { (self.api.ucp_worker_destroy)(self.raw) };
    }
}

/// Turns the status of a call into a result.
pub(super) fn check(call: &'static str, status: RawStatus) -> Result<(), UcxError> {
    if status == sys::UCS_OK { Ok(()) } else { Err(UcxError::Call { call, status: Status::new(status) }) }
}
