//! The only call of this crate that needs `unsafe`: a raw system call.

use std::os::fd::OwnedFd;

use rustix::io::Errno;
use rustix::io_uring::{io_uring_params, io_uring_setup};

/// Creates a ring of four entries, to check whether the kernel allows it.
pub(super) fn probe_io_uring() -> Result<(OwnedFd, io_uring_params), Errno> {
    let mut params = io_uring_params::default();
    // SAFETY: the parameters are all zero: no flags, no descriptor of another ring. The kernel writes them and nothing
    // else; the ring's memory is never mapped.
    let ring = unsafe { io_uring_setup(4, &mut params) }?;
    Ok((ring, params))
}
