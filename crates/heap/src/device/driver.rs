//! Finding and loading a vendor's driver at run time.
//!
//! Invariants:
//! - Never unloaded: drivers start threads and keep what they mapped.
//! - One process: drivers do not survive a fork, so a [`Driver`] that a child inherited refuses every call before it
//!   reaches the library.

use std::ffi::{CStr, c_int};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::{Mutex, PoisonError};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use super::calls::{Attribute, Calls, OwnCalls};
use super::error::DeviceError;
use crate::shm::ProcessToken;

/// Whose driver.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Vendor {
    /// NVIDIA's, by the driver's own interface.
    Cuda,
    /// AMD's, by HIP's runtime.
    Hip,
}

impl Vendor {
    /// Both.
    pub const ALL: [Vendor; 2] = [Vendor::Cuda, Vendor::Hip];

    /// Names the library to load when the caller does not.
    pub fn env(self) -> &'static str {
        self.pick("MOONTIDE_CUDA_LIB", "MOONTIDE_HIP_LIB")
    }

    /// The oldest driver that has every call.
    pub fn need(self) -> &'static str {
        self.pick("the driver of CUDA 10.2 (440.33)", "ROCm 6.0")
    }

    /// What the loader is asked for when nobody names a file.
    fn libraries(self) -> &'static [&'static str] {
        match self {
            Vendor::Cuda => &["libcuda.so.1"],
            // The plain name comes with development packages only.
            Vendor::Hip => &["libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6"],
        }
    }

    pub(super) fn pick<T>(self, cuda: T, hip: T) -> T {
        match self {
            Vendor::Cuda => cuda,
            Vendor::Hip => hip,
        }
    }
}

impl fmt::Display for Vendor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.pick("CUDA", "HIP"))
    }
}

static LOADED: Mutex<Vec<Driver>> = Mutex::new(Vec::new());

/// A loaded driver. Cheap to copy; lives as long as the process.
#[derive(Clone, Copy)]
pub struct Driver(&'static Loaded);

struct Loaded {
    vendor: Vendor,
    path: PathBuf,
    calls: Calls,
    own: OwnCalls,
    /// Written once, before anyone else has the driver.
    version: AtomicI32,
    made_in: ProcessToken,
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Driver({} {} from {})", self.vendor(), self.version(), self.path().display())
    }
}

impl Driver {
    /// Loads a driver from `path`, else from the file that [`Vendor::env`] names, else from where the loader finds it, and
    /// starts it.
    ///
    /// The library's initialisers run here: name only files that are a driver.
    pub fn load(vendor: Vendor, path: Option<&Path>) -> Result<Driver, DeviceError> {
        let named = path.map(Path::to_owned).or_else(|| std::env::var_os(vendor.env()).map(PathBuf::from));
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        let is_it = |driver: &&Driver| {
            driver.vendor() == vendor
                && match &named {
                    Some(path) => driver.path() == path,
                    None => vendor.libraries().iter().any(|name| driver.path() == Path::new(name)),
                }
        };
        if let Some(driver) = loaded.iter().find(is_it) {
            return driver.here();
        }
        let library = match &named {
            Some(path) => open(vendor, path),
            None => {
                let tries = vendor.libraries().iter().map(|name| open(vendor, Path::new(name)));
                // What the first name gives is told if none loads.
                tries.reduce(|first, next| first.or_else(|error| next.map_err(|_| error))).expect("has names")
            }
        };
        let driver = start(vendor, library?)?;
        loaded.push(driver);
        Ok(driver)
    }

    /// Whose it is.
    pub fn vendor(self) -> Vendor {
        self.0.vendor
    }

    /// The name or path by which the library was loaded.
    pub fn path(&self) -> &Path {
        &self.0.path
    }

    /// The version that the driver says it has, as `major.minor`.
    pub fn version(self) -> String {
        let (version, vendor) = (self.raw_version(), self.vendor());
        let (major, minor) = vendor.pick((1000, 10), (10_000_000, 100_000));
        format!("{}.{}", version / major, version % major / minor)
    }

    pub(super) fn raw_version(self) -> c_int {
        self.0.version.load(Ordering::Relaxed)
    }

    pub(super) fn calls(self) -> &'static Calls {
        &self.0.calls
    }

    pub(super) fn own(self) -> &'static OwnCalls {
        &self.0.own
    }

    /// This driver, unless it was inherited by a fork.
    pub(super) fn here(self) -> Result<Driver, DeviceError> {
        if self.0.made_in.is_valid() { Ok(self) } else { Err(DeviceError::Forked) }
    }

    /// What a device answers about itself; 0 where its vendor has no such thing.
    pub(super) fn attribute(self, attribute: Attribute, device: c_int) -> Result<c_int, DeviceError> {
        let mut value = 0;
        let Some(number) = attribute.number(self.vendor()) else { return Ok(value) };
        // SAFETY: a valid place for the answer.
        unsafe { self.device_attribute(&mut value, number, device) }?;
        Ok(value)
    }

    /// A call's answer as a result.
    pub(super) fn check(self, call: &'static str, code: c_int) -> Result<(), DeviceError> {
        if code == 0 {
            return Ok(());
        }
        check(&self.0.own, call, code)
    }
}

/// The error that a code stands for, in the driver's words.
#[cold]
fn check(own: &OwnCalls, call: &'static str, code: c_int) -> Result<(), DeviceError> {
    let mut text = std::ptr::null();
    match own {
        // SAFETY: a valid place for the answer.
        OwnCalls::Cuda { error_string, .. } => unsafe {
            error_string(code, &mut text);
        },
        // SAFETY: takes any number.
        OwnCalls::Hip { error_string, .. } => text = unsafe { error_string(code) },
    }
    let text = if text.is_null() {
        "unknown to the driver".to_owned()
    } else {
        // SAFETY: drivers answer with constants that end with a zero.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    };
    Err(DeviceError::Call { call, code, text })
}

struct Opened {
    path: PathBuf,
    calls: Calls,
    own: OwnCalls,
}

/// Loads one candidate and finds its functions.
fn open(vendor: Vendor, path: &Path) -> Result<Opened, DeviceError> {
    // SAFETY: initialisers of drivers are made to run in any process.
    let library = unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.map_err(|error| {
        // The loader repeats the path in front of its reason.
        let (reason, name) = (error.to_string(), path.display().to_string());
        let reason = reason.strip_prefix(&name).unwrap_or(&reason).trim_start_matches(": ").to_owned();
        DeviceError::Absent { vendor, path: path.to_owned(), reason }
    })?;
    // SAFETY: the driver as far as its name and symbols say; forgotten below, so it stays loaded.
    let found = unsafe { Calls::resolve(&library, vendor) }
        // SAFETY: as above.
        .and_then(|calls| Ok((calls, unsafe { OwnCalls::resolve(&library, vendor) }?)));
    std::mem::forget(library);
    match found {
        Ok((calls, own)) => Ok(Opened { path: path.to_owned(), calls, own }),
        Err(symbol) => Err(DeviceError::Symbol { vendor, path: path.to_owned(), symbol }),
    }
}

/// Starts it, once it is known to be whole.
fn start(vendor: Vendor, Opened { path, calls, own }: Opened) -> Result<Driver, DeviceError> {
    let (version, made_in) = (AtomicI32::new(0), ProcessToken::of_this_process());
    // Leaked like the library, also if it does not start: a few hundred bytes for each time that somebody tries again.
    let driver = Driver(Box::leak(Box::new(Loaded { vendor, path, calls, own, version, made_in })));
    // SAFETY: no flags are defined; a valid place for the version.
    unsafe {
        driver.init(0)?;
        driver.get_version(driver.0.version.as_ptr())?;
    }
    Ok(driver)
}
