//! Finds and loads OpenUCX at run time.
//!
//! Owns the only libucp of the process. Nothing is linked, so a machine without UCX runs everything else;
//! [`UcxUnavailable`] describes how to install it.
//!
//! Invariants:
//! - One UCX per process. Its four libraries find each other by soname: the libucp of a second installation would bind
//!   to the libucs of the first. [`Ucx::load`] refuses another path once one is loaded.
//! - Never unloaded: UCX starts threads and patches memory functions of the C library, and undoes neither.
//! - Loading preserves the signal handlers of the process. UCX installs a handler for SIGHUP in its debug mode, and
//!   older versions for SIGSEGV, SIGBUS, SIGFPE and SIGILL to print backtraces; other code of the process owns these
//!   signals.

use std::ffi::{c_int, c_uint};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};
use moontide_rt::sync::Mutex;

use super::error::{ENV, UcxUnavailable};
use super::sys::Api;
use super::version::{MIN_FOR_USE, UcxVersion};

/// Names to load when no path is given: first the soname, then the name in development packages.
const NAMES: [&str; 2] = ["libucp.so.0", "libucp.so"];

/// Libraries that libucp needs, in an order in which each one's dependencies are already loaded.
const SIBLINGS: [&str; 3] = ["libucm.so.0", "libucs.so.0", "libuct.so.0"];

/// Signals that some version of UCX handles when it is loaded.
const SIGNALS: [c_int; 5] = [libc::SIGHUP, libc::SIGILL, libc::SIGBUS, libc::SIGFPE, libc::SIGSEGV];

static LOADED: Mutex<Option<Ucx>> = Mutex::new(None);

/// Whether a UCX older than [`MIN_FOR_USE`] is accepted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OldVersions {
    /// Not accepted: its error handling has known gaps that this crate does not work around.
    #[default]
    Refuse,
    /// Accepted, for tests of the bindings.
    AllowOld,
}

/// Loaded UCX library. Cheap to copy; lives as long as the process.
#[derive(Clone, Copy)]
pub struct Ucx {
    api: &'static Api,
    path: &'static Path,
    version: UcxVersion,
}

impl std::fmt::Debug for Ucx {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Ucx")
            .field("path", &self.path)
            .field("version", &self.version)
            .finish_non_exhaustive()
    }
}

impl Ucx {
    /// Loads UCX from `path`, else from the path in [`ENV`], else from the search path of the loader.
    ///
    /// The initialisers of the library run here: pass only files that are OpenUCX.
    pub fn load(path: Option<&Path>) -> Result<Self, UcxUnavailable> {
        let named = path.map(Path::to_owned).or_else(|| std::env::var_os(ENV).map(PathBuf::from));
        let mut slot = LOADED.lock();
        if let Some(ucx) = *slot {
            return match named {
                Some(refused) if refused != ucx.path => {
                    Err(UcxUnavailable::AnotherLoaded { loaded: ucx.path.to_owned(), refused })
                }
                _ => Ok(ucx),
            };
        }
        let ucx = match named {
            Some(path) => open(&path)?,
            None => NAMES
                .iter()
                .map(|name| open(Path::new(name)))
                .reduce(Result::or)
                .expect("NAMES is not empty")?,
        };
        tracing::info!(path = %ucx.path.display(), version = %ucx.version, "UCX loaded");
        *slot = Some(ucx);
        Ok(ucx)
    }

    /// Checks whether the engine may run on this version; otherwise returns the reason.
    pub fn usable(&self, old: OldVersions) -> Result<(), UcxUnavailable> {
        if self.version < MIN_FOR_USE && old == OldVersions::Refuse {
            return Err(UcxUnavailable::TooOld { found: self.version, need: MIN_FOR_USE });
        }
        Ok(())
    }

    /// Returns the version that the library reports.
    pub fn version(&self) -> UcxVersion {
        self.version
    }

    /// Returns the name or path from which the library was loaded.
    pub fn path(&self) -> &Path {
        self.path
    }

    pub(super) fn api(&self) -> &'static Api {
        self.api
    }
}

/// Opens one candidate. If the loader does not find its sibling libraries, loads them first.
fn open(path: &Path) -> Result<Ucx, UcxUnavailable> {
    let saved = SIGNALS.map(|signal| (signal, current_action(signal)));
    let library = dlopen(path, RTLD_LOCAL).or_else(|first| {
        // A path without a directory was searched for by the loader; there are no siblings to try.
        let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) else { return Err(first) };
        for sibling in SIBLINGS {
            // Global, so that libraries loaded later bind to it; never unloaded, like libucp.
            let _ = dlopen(&dir.join(sibling), RTLD_GLOBAL).map(ManuallyDrop::new);
        }
        dlopen(path, RTLD_LOCAL)
    });
    for (signal, action) in saved {
        restore_action(signal, action);
    }
    let library = ManuallyDrop::new(library.map_err(|error| UcxUnavailable::NotLoaded {
        path: path.to_owned(),
        reason: error.to_string(),
        need: MIN_FOR_USE,
    })?);

    let library = libloading::Library::from(ManuallyDrop::into_inner(library));
    let library = Box::leak(Box::new(library));
    // SAFETY: by its name and symbols the file is OpenUCX's libucp, and the leak keeps it loaded.
    let api = unsafe { Api::resolve(library) }.map_err(|symbol| UcxUnavailable::NoSymbol {
        path: path.to_owned(),
        symbol,
        need: MIN_FOR_USE,
    })?;
    let (mut major, mut minor, mut release): (c_uint, c_uint, c_uint) = (0, 0, 0);
    // SAFETY: three valid pointers for the three numbers that it writes.
    unsafe { (api.ucp_get_version)(&mut major, &mut minor, &mut release) };
    Ok(Ucx {
        api: Box::leak(Box::new(api)),
        path: Box::leak(path.to_owned().into_boxed_path()),
        version: UcxVersion {
            major: u16::try_from(major).unwrap_or(u16::MAX),
            minor: u16::try_from(minor).unwrap_or(u16::MAX),
        },
    })
}

fn dlopen(path: &Path, scope: c_int) -> Result<Library, libloading::Error> {
    // SAFETY: UCX's initialisers only set up its own state, except for the signal handlers, which `open` restores.
    unsafe { Library::open(Some(path), RTLD_NOW | scope) }
}

/// Returns the current disposition of a signal, if the kernel returns it.
fn current_action(signal: c_int) -> Option<libc::sigaction> {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: a null new action only queries; the result is written to memory of the right type.
    let result = unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) };
    // SAFETY: on success the kernel has filled the struct.
    (result == 0).then(|| unsafe { action.assume_init() })
}

fn restore_action(signal: c_int, action: Option<libc::sigaction>) {
    let Some(action) = action else { return };
    // SAFETY: the action was in force before `dlopen`, so its handler is valid.
    unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn load_error_names_path_variable_and_minimum_version() {
        let refused = open(Path::new("/nonexistent/libucp.so.0")).unwrap_err();
        assert!(matches!(refused, UcxUnavailable::NotLoaded { .. }));
        let text = refused.to_string();
        assert!(
            text.contains("/nonexistent/libucp.so.0") && text.contains(ENV) && text.contains("1.19"),
            "{text}"
        );
        assert_eq!(text.lines().count(), 1);
    }

    #[test]
    fn versions_compare_numerically() {
        assert!(UcxVersion { major: 1, minor: 9 } < UcxVersion { major: 1, minor: 19 });
        assert!(UcxVersion { major: 2, minor: 0 } > MIN_FOR_USE);
    }
}
