//! A UCX context and its worker, each released on drop.
//!
//! Owns the setup of UCX: options, features, thread mode. Does not handle endpoints.
//!
//! Invariants: both are created, used and dropped on the progress thread, and the worker is dropped before its context.

use std::ffi::{CString, c_int};
use std::time::Duration;

use super::error::{Status, UcxError};
use super::library::OldVersions;
use super::sys::{self, Api, RawStatus, Zeroed};

/// Version of the UCX interface that this code uses: the oldest that loads, so that no version logs a warning.
const API_VERSION: (u32, u32) = (1, 13);

/// Set in every context. Rendezvous is for two-sided protocols; if it is on, UCX prepares for it.
const RNDV_THRESH: &str = "inf";

/// Names of the shared-memory transports. They can detect dead peers, which error mode PEER requires, but only with an
/// option. If the option is set and none of them is in use, UCX logs a warning.
const SHARED_MEMORY: [&str; 5] = ["posix", "sysv", "sm", "shm", "all"];

/// Interval at which UCX probes silent peers. Its own default of 20 s is longer than most deadlines of callers.
const KEEPALIVE: Duration = Duration::from_secs(1);

/// Configuration of a worker. Unset options come from UCX's environment variables (`UCX_TLS`, …).
#[derive(Clone, Debug)]
pub struct WorkerConfig {
    /// Transports that UCX may use, comma separated (its option `TLS`).
    pub tls: Option<String>,
    /// Network devices that UCX may use, comma separated (its option `NET_DEVICES`).
    pub net_devices: Option<String>,
    /// Whether endpoints that run over TCP only are accepted. For tests.
    pub allow_tcp: bool,
    /// Whether a UCX older than [`MIN_FOR_USE`](super::MIN_FOR_USE) is accepted. For tests.
    pub old_versions: OldVersions,
    /// Interval at which UCX probes silent peers.
    pub keepalive: Duration,
}

impl Default for WorkerConfig {
    /// Everything but TCP, unless the environment sets `UCX_TLS`. Over TCP, UCX serves gets by messages, and an owner
    /// does not always survive the exit of a reader.
    fn default() -> Self {
        let tls = std::env::var_os("UCX_TLS").is_none().then(|| "^tcp".to_owned());
        Self {
            tls,
            net_devices: None,
            allow_tcp: false,
            old_versions: OldVersions::Refuse,
            keepalive: KEEPALIVE,
        }
    }
}

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
        // SAFETY: params and options are valid for the call, which copies the parts that it keeps.
        let status =
            unsafe { (api.ucp_init_version)(API_VERSION.0, API_VERSION.1, &params, options.raw, &mut raw) };
        check("ucp_init", status)?;
        Ok(Self { api, raw })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: created by ucp_init, dropped once, after the worker (see the order of fields in Engine).
        unsafe { (self.api.ucp_cleanup)(self.raw) };
    }
}

/// Options of UCX, initialised from its environment variables.
struct Options {
    api: &'static Api,
    raw: *mut sys::Config,
}

impl Options {
    fn read(api: &'static Api) -> Result<Self, UcxError> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: null selects the default prefix and no file; the result pointer is valid.
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
        // SAFETY: created by ucp_config_read, released once.
        unsafe { (self.api.ucp_config_release)(self.raw) };
    }
}

pub(super) struct Worker {
    api: &'static Api,
    pub(super) raw: *mut sys::Worker,
    /// Readable when there may be something to progress; owned by UCX, lives as long as the worker.
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
        // SAFETY: a live worker, and attributes whose address field it fills.
        check("ucp_worker_query", unsafe { (self.api.ucp_worker_query)(self.raw, &mut attr) })?;
        // SAFETY: UCX returned this length of the address; the address is valid until it is released.
        let bytes =
            unsafe { std::slice::from_raw_parts(attr.address.cast::<u8>(), attr.address_length) }.to_vec();
        // SAFETY: released once, to the worker that created it.
        unsafe { (self.api.ucp_worker_release_address)(self.raw, attr.address) };
        Ok(bytes)
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // SAFETY: created by ucp_worker_create, destroyed once, with nothing in flight (else the engine was leaked).
        unsafe { (self.api.ucp_worker_destroy)(self.raw) };
    }
}

/// Converts the status of a call into a result.
pub(super) fn check(call: &'static str, status: RawStatus) -> Result<(), UcxError> {
    if status == sys::UCS_OK { Ok(()) } else { Err(UcxError::Call { call, status: Status::new(status) }) }
}
