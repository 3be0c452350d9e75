//! Memory of a "device": memfds and mappings of them; second mappings of host memory. Contains all system calls.
//!
//! An allocation has a view, a mapping through which this driver accesses it and whose address is never returned. The
//! process gets addresses of other mappings, whose protection determines the access of the host; copies do not depend
//! on it.

use std::ffi::{CString, c_int};
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use crate::codes::OPERATING_SYSTEM;

const NAME: &str = "moontide-fake-device-";

const READ_WRITE: c_int = libc::PROT_READ | libc::PROT_WRITE;

/// Page size in bytes.
pub(crate) const PAGE: u64 = 4096;

/// An allocation of device memory.
#[derive(Debug)]
pub(crate) struct DeviceAllocation {
    pub(crate) fd: OwnedFd,
    pub(crate) bytes: u64,
    pub(crate) device: c_int,
    /// Address of a mapping of the whole allocation, readable and writable; mapped during the life of the value.
    view: u64,
}

impl Drop for DeviceAllocation {
    fn drop(&mut self) {
        unmap(self.view, self.bytes);
    }
}

impl DeviceAllocation {
    pub(crate) fn new(device: c_int, bytes: u64) -> Result<DeviceAllocation, c_int> {
        let name = CString::new(format!("{NAME}{device}")).expect("no zeros");
        // SAFETY: a valid name.
        let fd = unsafe { libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC) };
        if fd < 0 {
            return Err(OPERATING_SYSTEM);
        }
        // SAFETY: created just above.
        let fd = unsafe { OwnedFd::from_raw_fd(fd) };
        // SAFETY: an open descriptor of this value.
        if unsafe { libc::ftruncate(fd.as_raw_fd(), bytes as libc::off_t) } != 0 {
            return Err(OPERATING_SYSTEM);
        }
        DeviceAllocation::with_view(fd, bytes, device)
    }

    /// Opens the allocation of a descriptor or a file of `/proc`; `None` if it is something else.
    pub(crate) fn open(path: &str) -> Option<DeviceAllocation> {
        let target = std::fs::read_link(path).ok()?;
        let name = target.to_str()?.strip_prefix("/memfd:")?.strip_prefix(NAME)?;
        let device = name.split(' ').next()?.parse().ok()?;
        let file = File::options().read(true).write(true).open(path).ok()?;
        let bytes = file.metadata().ok()?.len();
        DeviceAllocation::with_view(file.into(), bytes, device).ok()
    }

    fn with_view(fd: OwnedFd, bytes: u64, device: c_int) -> Result<DeviceAllocation, c_int> {
        let view = map(0, bytes, READ_WRITE, libc::MAP_SHARED, fd.as_raw_fd())?;
        Ok(DeviceAllocation { fd, bytes, device, view })
    }

    /// Returns the address at which this driver accesses the bytes.
    pub(crate) fn view(&self) -> u64 {
        self.view
    }

    /// Returns the inode, which identifies the memfd.
    pub(crate) fn inode(&self) -> u64 {
        inode(self.fd.as_raw_fd()).unwrap_or(0)
    }

    /// Returns a further descriptor.
    pub(crate) fn duplicate(&self) -> Result<c_int, c_int> {
        // SAFETY: an open descriptor of this value. Not close-on-exec, since no driver guarantees it.
        let fd = unsafe { libc::fcntl(self.fd.as_raw_fd(), libc::F_DUPFD, 3) };
        if fd < 0 { Err(OPERATING_SYSTEM) } else { Ok(fd) }
    }

    /// Maps the whole allocation at a reserved address, without access.
    pub(crate) fn map_at(&self, at: u64) -> Result<(), c_int> {
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        map(at, self.bytes, libc::PROT_NONE, flags, self.fd.as_raw_fd()).map(drop)
    }

    /// Maps the whole allocation at any address, with or without access for the host.
    pub(crate) fn map_anywhere(&self, accessible: bool) -> Result<u64, c_int> {
        let access = if accessible { READ_WRITE } else { libc::PROT_NONE };
        map(0, self.bytes, access, libc::MAP_SHARED, self.fd.as_raw_fd())
    }
}

/// Returns the inode of a descriptor, if it is open.
pub(crate) fn inode(fd: c_int) -> Option<u64> {
    Some(std::fs::metadata(format!("/proc/self/fd/{fd}")).ok()?.ino())
}

/// Returns whether a process exists and has not exited.
pub(crate) fn is_running(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state follows the name, which may contain any character.
    stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(['Z', 'X']))
}

/// Reserves addresses without memory.
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

/// Replaces a mapping by a reservation without memory.
pub(crate) fn clear(address: u64, bytes: u64) -> Result<(), c_int> {
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED;
    map(address, bytes, libc::PROT_NONE, flags, -1).map(drop)
}

/// Removes a mapping or a reservation.
pub(crate) fn unmap(address: u64, bytes: u64) {
    // SAFETY: a range that this crate mapped and no longer uses.
    unsafe { libc::munmap(std::ptr::without_provenance_mut(address as usize), bytes as usize) };
}

/// Sets the access of the host to a range: read-only, or read and write.
pub(crate) fn protect(address: u64, bytes: u64, writable: bool) -> Result<(), c_int> {
    let access = if writable { READ_WRITE } else { libc::PROT_READ };
    // SAFETY: a range that this crate mapped and that contains no Rust value: nothing relies on its protection.
    let code =
        unsafe { libc::mprotect(std::ptr::without_provenance_mut(address as usize), bytes as usize, access) };
    if code == 0 { Ok(()) } else { Err(OPERATING_SYSTEM) }
}

/// Maps shared pages of the host a second time, in the same order. `pieces`: start and length; each piece is in one
/// mapping.
pub(crate) fn duplicate(pieces: &[(u64, u64)], writable: bool) -> Result<u64, c_int> {
    let bytes = pieces.iter().map(|&(_, len)| len).sum();
    let alias = reserve(bytes, PAGE)?;
    let mut at = alias;
    let done = pieces.iter().try_for_each(|&(start, len)| {
        duplicate_at(at, start, len)?;
        at += len;
        Ok(())
    });
    match done.and_then(|()| protect(alias, bytes, writable)) {
        Ok(()) => Ok(alias),
        Err(code) => {
            unmap(alias, bytes);
            Err(code)
        }
    }
}

fn duplicate_at(at: u64, start: u64, len: u64) -> Result<(), c_int> {
    let [start, at] = [start, at].map(|address| std::ptr::without_provenance_mut(address as usize));
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: an old length of zero means that the pages also remain mapped at `start`. The replaced range at `at` is
    // a part of the caller's reservation, which nothing else uses.
    let alias = unsafe { libc::mremap(start, 0, len as usize, flags, at) };
    if alias == libc::MAP_FAILED {
        return Err(OPERATING_SYSTEM);
    }
    // Copies access it by the number alone.
    alias.expose_provenance();
    Ok(())
}

fn map(at: u64, bytes: u64, access: c_int, flags: c_int, fd: c_int) -> Result<u64, c_int> {
    let at = std::ptr::without_provenance_mut(at as usize);
    // SAFETY: a new range, or with MAP_FIXED one that this crate reserved.
    let address = unsafe { libc::mmap(at, bytes as usize, access, flags, fd, 0) };
    if address == libc::MAP_FAILED { Err(OPERATING_SYSTEM) } else { Ok(address.expose_provenance() as u64) }
}
