//! The two calls of this crate that need `unsafe`: a raw system call, and loading a foreign library.

use std::os::fd::OwnedFd;

use libloading::os::unix::{Library, RTLD_LAZY, RTLD_LOCAL};
use rustix::io::Errno;
use rustix::io_uring::{io_uring_params, io_uring_setup};

/// A ring of a few entries, as the kernel's answer to whether it gives us one.
pub(super) fn ring() -> Result<(OwnedFd, io_uring_params), Errno> {
    let mut params = io_uring_params::default();
    // SAFETY: the parameters are all zero: no flags, no descriptor of another ring. The kernel writes them and nothing
    // else; the ring's memory is never mapped.
    let ring = unsafe { io_uring_setup(4, &mut params) }?;
    Ok((ring, params))
}

/// Whether the loader finds a library, which is loaded for that and stays loaded until the process ends.
pub(super) fn loads(name: &str) -> bool {
    // SAFETY: names are those of drivers' libraries, whose initialisers are made to run in any process, and the process
    // is about to end. It is never unloaded, so nothing that it started is left without its code.
    match unsafe { Library::open(Some(name), RTLD_LAZY | RTLD_LOCAL) } {
        Ok(library) => {
            std::mem::forget(library);
            true
        }
        Err(_) => false,
    }
}
