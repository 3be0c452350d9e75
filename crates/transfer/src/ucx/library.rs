//! Finding and loading OpenUCX at run time.
//!
//! Owns the one libucp of the process. Nothing is linked, so a machine without UCX runs everything else, and learns
//! from [`UcxAbsent`] what to do should it want UCX.
//!
//! Invariants:
//! - One UCX per process. Its four libraries find each other by soname: the libucp of a second installation would be
//!   bound to the libucs of the first. [`Ucx::load`] refuses another path once one is loaded.
//! - Never unloaded: UCX starts threads and patches memory functions of the C library, neither of which it undoes.
//! - Loading leaves the process's signal handlers as they were. UCX claims SIGHUP for its debug mode, and older ones
//!   claim SIGSEGV, SIGBUS, SIGFPE and SIGILL to print backtraces; all of these are somebody else's here.

use std::ffi::{c_int, c_uint};
use std::mem::{ManuallyDrop, MaybeUninit};
use std::path::{Path, PathBuf};

use libloading::os::unix::{Library, RTLD_GLOBAL, RTLD_LOCAL, RTLD_NOW};
use parking_lot::Mutex;

use super::error::{UcxAbsent, UcxVersion};
use super::sys::Api;

/// Names the libucp to load when the configuration does not.
pub const ENV: &str = "MOONTIDE_UCX";

/// The oldest UCX on which the engine is turned on. Older ones load, for tests.
pub const MIN_FOR_USE: UcxVersion = UcxVersion { major: 1, minor: 19 };

/// From this version on an endpoint can say over which transports it runs.
pub(super) const MIN_FOR_TRANSPORTS: UcxVersion = UcxVersion { major: 1, minor: 14 };

/// What the loader is asked for when nobody names a file: the soname first, the name of development packages second.
const NAMES: [&str; 2] = ["libucp.so.0", "libucp.so"];

/// What libucp needs, in the order in which each finds its own needs loaded already.
const SIBLINGS: [&str; 3] = ["libucm.so.0", "libucs.so.0", "libuct.so.0"];

/// Signals that some version of UCX takes over when it is loaded.
const SIGNALS: [c_int; 5] = [libc::SIGHUP, libc::SIGILL, libc::SIGBUS, libc::SIGFPE, libc::SIGSEGV];

static LOADED: Mutex<Option<Ucx>> = Mutex::new(None);

/// Whether a UCX older than [`MIN_FOR_USE`] will do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OldVersions {
    /// No: its gaps in error handling are known and not ours to work around.
    #[default]
    Refuse,
    /// Yes. For tests of the bindings.
    AllowOld,
}

/// A loaded UCX. Cheap to copy; lives as long as the process.
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
    /// Loads UCX from `path`, else from the file that [`ENV`] names, else from where the loader finds it.
    ///
    /// The library's initialisers run here: name only files that are OpenUCX.
    pub fn load(path: Option<&Path>) -> Result<Self, UcxAbsent> {
        let named = path.map(Path::to_owned).or_else(|| std::env::var_os(ENV).map(PathBuf::from));
        let mut slot = LOADED.lock();
        if let Some(ucx) = *slot {
            return match named {
                Some(refused) if refused != ucx.path => {
                    Err(UcxAbsent::AnotherLoaded { loaded: ucx.path.to_owned(), refused })
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

    /// Whether the engine may run on this version, and if not, why.
    pub fn usable(&self, old: OldVersions) -> Result<(), UcxAbsent> {
        if self.version < MIN_FOR_USE && old == OldVersions::Refuse {
            return Err(UcxAbsent::TooOld { found: self.version, need: MIN_FOR_USE });
        }
        Ok(())
    }

    /// The version that the library says it has.
    pub fn version(&self) -> UcxVersion {
        self.version
    }

    /// The name or path by which the library was loaded.
    pub fn path(&self) -> &Path {
        self.path
    }

    pub(super) fn api(&self) -> &'static Api {
        self.api
    }
}

/// Opens one candidate, with the help of its neighbours if the loader does not find those by itself.
fn open(path: &Path) -> Result<Ucx, UcxAbsent> {
    let saved = SIGNALS.map(|signal| (signal, current_action(signal)));
    let library = dlopen(path, RTLD_LOCAL).or_else(|first| {
        // A path without a directory was searched for; there are no neighbours to try.
        let Some(dir) = path.parent().filter(|dir| !dir.as_os_str().is_empty()) else { return Err(first) };
        for sibling in SIBLINGS {
            // Global, so that what is loaded next binds to it; kept, as libucp is.
            let _ = dlopen(&dir.join(sibling), RTLD_GLOBAL).map(ManuallyDrop::new);
        }
        dlopen(path, RTLD_LOCAL)
    });
    for (signal, action) in saved {
        restore_action(signal, action);
    }
    let library = ManuallyDrop::new(library.map_err(|error| UcxAbsent::NotLoaded {
        path: path.to_owned(),
        reason: error.to_string(),
        need: MIN_FOR_USE,
    })?);

    let library = libloading::Library::from(ManuallyDrop::into_inner(library));
    let library = Box::leak(Box::new(library));
    // SAFETY: the file is OpenUCX's libucp as far as its name and the symbols say, and the leak keeps it loaded.
    let api = unsafe { Api::resolve(library) }.map_err(|symbol| UcxAbsent::NoSymbol {
        path: path.to_owned(),
        symbol,
        need: MIN_FOR_USE,
    })?;
    let (mut major, mut minor, mut release): (c_uint, c_uint, c_uint) = (0, 0, 0);
    // SAFETY: three valid places for the three numbers that it writes.
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
    // SAFETY: UCX's initialisers only set up its own state, but for the signal handlers, which `open` restores.
    unsafe { Library::open(Some(path), RTLD_NOW | scope) }
}

/// The present disposition of a signal, if the kernel tells.
fn current_action(signal: c_int) -> Option<libc::sigaction> {
    let mut action = MaybeUninit::<libc::sigaction>::uninit();
    // SAFETY: a null new action only asks; the answer is written to a place of the right type.
    let result = unsafe { libc::sigaction(signal, std::ptr::null(), action.as_mut_ptr()) };
    // SAFETY: on success the kernel's answer has filled the struct.
    (result == 0).then(|| unsafe { action.assume_init() })
}

fn restore_action(signal: c_int, action: Option<libc::sigaction>) {
    let Some(action) = action else { return };
    // SAFETY: the action was in force a moment ago, so its handler is valid.
    unsafe { libc::sigaction(signal, &action, std::ptr::null_mut()) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn absence_says_what_to_do() {
        let refused = open(Path::new("/nonexistent/libucp.so.0")).unwrap_err();
        assert!(matches!(refused, UcxAbsent::NotLoaded { .. }));
        let text = refused.to_string();
        assert!(
            text.contains("/nonexistent/libucp.so.0") && text.contains(ENV) && text.contains("1.19"),
            "{text}"
        );
        assert_eq!(text.lines().count(), 1);
    }

    #[test]
    fn versions_compare_by_number() {
        assert!(UcxVersion { major: 1, minor: 9 } < UcxVersion { major: 1, minor: 19 });
        assert!(UcxVersion { major: 2, minor: 0 } > MIN_FOR_USE);
    }
}
