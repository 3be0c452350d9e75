//! [`Driver`]: finds and loads a vendor's driver at run time.
//!
//! Invariants:
//! - Never unloaded: drivers start threads and keep their mappings.
//! - One process: drivers do not survive a fork, so a [`Driver`] that a child inherited fails every call before it
//!   reaches the library.

use std::ffi::{CStr, c_int};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, PoisonError};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use moontide_heap::ProcessToken;

use super::error::DeviceError;
use super::ffi::{Attribute, DriverApi, DriverCalls, VendorApi};
use super::vendor::Vendor;

static LOADED: Mutex<Vec<Driver>> = Mutex::new(Vec::new());

/// A loaded driver. Cheap to copy; exists as long as the process.
#[derive(Clone, Copy)]
pub struct Driver(&'static Loaded);

struct Loaded {
    vendor: Vendor,
    path: PathBuf,
    api: DriverApi,
    vendor_api: VendorApi,
    /// Written once, before another thread has the driver.
    version: AtomicI32,
    made_in: ProcessToken,
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Driver({} {} from {})", self.vendor(), self.version(), self.path().display())
    }
}

impl Driver {
    /// Loads a driver from `path`, else from the path in [`Vendor::env`], else from where the loader finds it, and
    /// initializes it.
    ///
    /// Runs the library's initialisers: pass only files that are a driver.
    pub fn load(vendor: Vendor, path: Option<&Path>) -> Result<Driver, DeviceError> {
        let given = path.map(Path::to_owned).or_else(|| std::env::var_os(vendor.env()).map(PathBuf::from));
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        let is_same = |driver: &&Driver| {
            driver.vendor() == vendor
                && match &given {
                    Some(path) => driver.path() == path,
                    None => vendor.libraries().iter().any(|name| driver.path() == Path::new(name)),
                }
        };
        if let Some(driver) = loaded.iter().find(is_same) {
            return driver.check_process();
        }
        let library = match &given {
            Some(path) => open(vendor, path),
            None => {
                let attempts = vendor.libraries().iter().map(|name| open(vendor, Path::new(name)));
                // If none loads, return the error of the first name.
                attempts
                    .reduce(|first, next| first.or_else(|error| next.map_err(|_| error)))
                    .expect("at least one name")
            }
        };
        let driver = start(vendor, library?)?;
        loaded.push(driver);
        Ok(driver)
    }

    /// Returns the vendor.
    pub fn vendor(self) -> Vendor {
        self.0.vendor
    }

    /// Returns the name or path by which the library was loaded.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// Returns the version that the driver reports, as `major.minor`.
    pub fn version(self) -> String {
        let (version, vendor) = (self.raw_version(), self.vendor());
        let (major, minor) = vendor.pick((1000, 10), (10_000_000, 100_000));
        format!("{}.{}", version / major, version % major / minor)
    }

    pub(super) fn raw_version(self) -> c_int {
        self.0.version.load(Ordering::Relaxed)
    }

    pub(super) fn vendor_api(self) -> &'static VendorApi {
        &self.0.vendor_api
    }

    /// Returns this driver, or fails if it was inherited through a fork.
    pub(super) fn check_process(self) -> Result<Driver, DeviceError> {
        if self.0.made_in.is_valid() { Ok(self) } else { Err(DeviceError::Forked) }
    }

    /// Returns an attribute of a device; 0 if its vendor does not have the attribute.
    pub(super) fn attribute(self, attribute: Attribute, device: c_int) -> Result<c_int, DeviceError> {
        let mut value = 0;
        let Some(number) = attribute.number(self.vendor()) else { return Ok(value) };
        // SAFETY: a valid pointer for the result.
        unsafe { self.device_attribute(&mut value, number, device) }?;
        Ok(value)
    }

    /// Converts the code of a call to a result.
    pub(super) fn check(self, call: &'static str, code: c_int) -> Result<(), DeviceError> {
        if code == 0 {
            return Ok(());
        }
        check(&self.0.vendor_api, call, code)
    }
}

impl DriverCalls for Driver {
    fn api(self) -> &'static DriverApi {
        &self.0.api
    }

    fn result(self, cuda: &'static str, hip: &'static str, code: c_int) -> Result<(), DeviceError> {
        self.check(self.vendor().pick(cuda, hip), code)
    }
}

/// Returns the error of a code, with the driver's text.
#[cold]
fn check(vendor_api: &VendorApi, call: &'static str, code: c_int) -> Result<(), DeviceError> {
    let mut text = std::ptr::null();
    match vendor_api {
        // SAFETY: a valid pointer for the result.
        VendorApi::Cuda { error_string, .. } => unsafe {
            error_string(code, &mut text);
        },
        // SAFETY: accepts any number.
        VendorApi::Hip { error_string, .. } => text = unsafe { error_string(code) },
    }
    let text = if text.is_null() {
        "error code unknown to the driver".to_owned()
    } else {
        // SAFETY: drivers return constants that end with a zero.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    };
    Err(DeviceError::Call { call, code, text })
}

struct Opened {
    path: PathBuf,
    api: DriverApi,
    vendor_api: VendorApi,
}

/// Loads one candidate and resolves its functions.
fn open(vendor: Vendor, path: &Path) -> Result<Opened, DeviceError> {
    // SAFETY: initialisers of drivers may run in any process.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| {
        // The loader repeats the path before its reason.
        let (reason, name) = (error.to_string(), path.display().to_string());
        let reason = reason.strip_prefix(&name).unwrap_or(&reason).trim_start_matches(": ").to_owned();
        DeviceError::NotInstalled { vendor, path: path.to_owned(), reason }
    })?;
    // SAFETY: the driver according to its name and symbols; forgotten below, so it remains loaded.
    let found = unsafe { DriverApi::resolve(&library, vendor) }
        // SAFETY: as above.
        .and_then(|api| Ok((api, unsafe { VendorApi::resolve(&library, vendor) }?)));
    std::mem::forget(library);
    match found {
        Ok((api, vendor_api)) => Ok(Opened { path: path.to_owned(), api, vendor_api }),
        Err(symbol) => Err(DeviceError::Symbol { vendor, path: path.to_owned(), symbol }),
    }
}

/// Initializes a driver whose functions are all resolved.
fn start(vendor: Vendor, Opened { path, api, vendor_api }: Opened) -> Result<Driver, DeviceError> {
    let (version, made_in) = (AtomicI32::new(0), ProcessToken::of_this_process());
    // Leaked like the library, also if it fails: a few hundred bytes per attempt.
    let driver = Driver(Box::leak(Box::new(Loaded { vendor, path, api, vendor_api, version, made_in })));
    // SAFETY: no flags are defined; a valid pointer for the version.
    unsafe {
        driver.init(0)?;
        driver.get_version(driver.0.version.as_ptr())?;
    }
    Ok(driver)
}
