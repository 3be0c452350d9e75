//! Memory of a "device": memfds, and mappings of them. All system calls are here.

use std::ffi::{CString, c_int};
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use crate::codes::OPERATING_SYSTEM;

const NAME: &str = "moontide-fake-device-";

/// A piece of a device's memory.
#[derive(Debug)]
pub(crate) struct Pages {
    pub(crate) fd: OwnedFd,
    pub(crate) bytes: u64,
    pub(crate) device: c_int,
}

impl Pages {
    pub(crate) fn new(device: c_int, bytes: u64) -> Result<Pages, c_int> {
        let name = CString::new(format!("{NAME}{device}")).expect("no zeros");
        // SAFETY: a valid name.
        let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(OPERATING_SYSTEM);
        }
        // SAFETY: just made.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: ours.
        if unsafe { libc::ftruncate(fd.as_raw_fd(), bytes as libc::off_t) } != 0 {
            return Err(OPERATING_SYSTEM);
        }
        Ok(Pages { fd, bytes, device })
    }

    /// What lies behind a descriptor or a file of `/proc`, if it is such memory.
    pub(crate) fn open(path: &str) -> Option<Pages> {
        let target = std::fs::read_link(path).ok()?;
        let name = target.to_str()?.strip_prefix("/memfd:")?.strip_prefix(NAME)?;
        let device = name.split(' ').next()?.parse().ok()?;
        let file = File::options().read(true).write(true).open(path).ok()?;
        let bytes = file.metadata().ok()?.len();
        Some(Pages { fd: file.into(), bytes, device })
    }

    /// Tells memfds apart.
    pub(crate) fn inode(&self) -> u64 {
        inode(self.fd.as_raw_fd()).unwrap_or(0)
    }

    /// One more descriptor for it.
    pub(crate) fn duplicate(&self) -> Result<c_int, c_int> {
        // SAFETY: ours. Not close-on-exec, as no driver promises it.
        let fd = unsafe { libc::fcntl(self.fd.as_raw_fd(), libc::F_DUPFD, 3) };
        if fd < 0 { Err(OPERATING_SYSTEM) } else { Ok(fd) }
    }

    /// Maps all of it: at an address that was reserved, accessible to nobody; else anywhere, for use.
    pub(crate) fn map(&self, at: Option<u64>) -> Result<u64, c_int> {
        let (flags, access) = match at {
            Some(_) => (libc::MAP_SHARED | libc::MAP_FIXED, libc::PROT_NONE),
            None => (libc::MAP_SHARED, libc::PROT_READ | libc::PROT_WRITE),
        };
        map(at.unwrap_or(0), self.bytes, access, flags, self.fd.as_raw_fd())
    }
}

/// The inode behind a descriptor, if it is open.
pub(crate) fn inode(fd: c_int) -> Option<u64> {
    Some(std::fs::metadata(format!("/proc/self/fd/{fd}")).ok()?.ino())
}

/// Addresses without memory.
pub(crate) fn reserve(bytes: u64, alignment: u64) -> Result<u64, c_int> {
    let anonymous = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
    let base = map(0, bytes + alignment, libc::PROT_NONE, anonymous, -1)?;
    let address = base.next_multiple_of(alignment.max(1));
    if address > base {
        unmap(base, address - base);
    }
    let end = base + alignment - address;
    if end > 0 {
        unmap(address + bytes, end);
    }
    Ok(address)
}

/// Puts a bare reservation in a mapping's place.
pub(crate) fn clear(address: u64, bytes: u64) -> Result<(), c_int> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    map(address, bytes, libc::PROT_NONE, flags, -1).map(drop)
}

/// What was mapped or reserved is gone.
pub(crate) fn unmap(address: u64, bytes: u64) {
    // SAFETY: a range that this crate mapped, and no longer uses.
    unsafe { libc::munmap(std::ptr::without_provenance_mut(address as usize), bytes as usize) };
}

/// Whether the host may touch a range.
pub(crate) fn protect(address: u64, bytes: u64, accessible: bool) -> Result<(), c_int> {
    let access = if accessible { libc::PROT_READ | libc::PROT_WRITE } else { libc::PROT_NONE };
    // SAFETY: a range that this crate mapped.
    let code =
        unsafe { libc::mprotect(std::ptr::without_provenance_mut(address as usize), bytes as usize, access) };
    if code == 0 { Ok(()) } else { Err(OPERATING_SYSTEM) }
}

fn map(at: u64, bytes: u64, access: c_int, flags: c_int, fd: c_int) -> Result<u64, c_int> {
    let at = std::ptr::without_provenance_mut(at as usize);
    // SAFETY: a fresh range, or with MAP_FIXED one that this crate reserved.
    let address = unsafe { libc::mmap(at, bytes as usize, access, flags, fd, 0) };
    if address == libc::MAP_FAILED { Err(OPERATING_SYSTEM) } else { Ok(address.expose_provenance() as u64) }
}
