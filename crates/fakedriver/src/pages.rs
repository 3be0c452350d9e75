//! Memory of a "device": memfds, and mappings of them; second mappings of the host's memory. All system calls are here.
//!
//! A piece of a device's memory has a view, at which this driver reaches it and of which nobody is told. What the process is
//! told are addresses of other mappings, whose rights say what a processor may do there; copies do not depend on them.

use std::ffi::{CString, c_int};
use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use crate::codes::OPERATING_SYSTEM;

const NAME: &str = "moontide-fake-device-";

const READ_WRITE: c_int = libc::PROT_READ | libc::PROT_WRITE;

/// The least that is mapped.
pub(crate) const PAGE: u64 = 4096;

/// A piece of a device's memory.
#[derive(Debug)]
pub(crate) struct Pages {
    pub(crate) fd: OwnedFd,
    pub(crate) bytes: u64,
    pub(crate) device: c_int,
    /// All of it, to be read and written; mapped as long as the value lives.
    view: u64,
}

impl Drop for Pages {
    fn drop(&mut self) {
        unmap(self.view, self.bytes);
    }
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
        Pages::viewed(fd, bytes, device)
    }

    /// What lies behind a descriptor or a file of `/proc`, if it is such memory.
    pub(crate) fn open(path: &str) -> Option<Pages> {
        let target = std::fs::read_link(path).ok()?;
        let name = target.to_str()?.strip_prefix("/memfd:")?.strip_prefix(NAME)?;
        let device = name.split(' ').next()?.parse().ok()?;
        let file = File::options().read(true).write(true).open(path).ok()?;
        let bytes = file.metadata().ok()?.len();
        Pages::viewed(file.into(), bytes, device).ok()
    }

    fn viewed(fd: OwnedFd, bytes: u64, device: c_int) -> Result<Pages, c_int> {
        let view = map(0, bytes, READ_WRITE, libc::MAP_SHARED, fd.as_raw_fd())?;
        Ok(Pages { fd, bytes, device, view })
    }

    /// Where this driver reaches its bytes.
    pub(crate) fn view(&self) -> u64 {
        self.view
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

    /// Maps all of it at an address that was reserved, accessible to nobody.
    pub(crate) fn map_at(&self, at: u64) -> Result<(), c_int> {
        let flags = libc::MAP_SHARED | libc::MAP_FIXED;
        map(at, self.bytes, libc::PROT_NONE, flags, self.fd.as_raw_fd()).map(drop)
    }

    /// Maps all of it anywhere: for a processor to use, or not.
    pub(crate) fn map_anywhere(&self, accessible: bool) -> Result<u64, c_int> {
        let access = if accessible { READ_WRITE } else { libc::PROT_NONE };
        map(0, self.bytes, access, libc::MAP_SHARED, self.fd.as_raw_fd())
    }
}

/// The inode behind a descriptor, if it is open.
pub(crate) fn inode(fd: c_int) -> Option<u64> {
    Some(std::fs::metadata(format!("/proc/self/fd/{fd}")).ok()?.ino())
}

/// Whether a process is there, and has not ended.
pub(crate) fn is_running(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // Behind the name, which may have anything in it, comes the state.
    stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(['Z', 'X']))
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

/// What the host may do with a range: read it, or write it as well.
pub(crate) fn protect(address: u64, bytes: u64, writable: bool) -> Result<(), c_int> {
    let access = if writable { READ_WRITE } else { libc::PROT_READ };
    // SAFETY: a range that this crate mapped, and that is no memory of any Rust value: nothing relies on its rights.
    let code =
        unsafe { libc::mprotect(std::ptr::without_provenance_mut(address as usize), bytes as usize, access) };
    if code == 0 { Ok(()) } else { Err(OPERATING_SYSTEM) }
}

/// Maps shared pages of the host a second time, in the same order. `pieces`: where they begin, and how long they are; each
/// lies in one mapping.
pub(crate) fn duplicate(pieces: &[(u64, u64)], writable: bool) -> Result<u64, c_int> {
    let bytes = pieces.iter().map(|&(_, len)| len).sum();
    let twin = reserve(bytes, PAGE)?;
    let mut at = twin;
    let done = pieces.iter().try_for_each(|&(start, len)| {
        duplicate_at(at, start, len)?;
        at += len;
        Ok(())
    });
    match done.and_then(|()| protect(twin, bytes, writable)) {
        Ok(()) => Ok(twin),
        Err(code) => {
            unmap(twin, bytes);
            Err(code)
        }
    }
}

fn duplicate_at(at: u64, start: u64, len: u64) -> Result<(), c_int> {
    let [start, at] = [start, at].map(|address| std::ptr::without_provenance_mut(address as usize));
    let flags = libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED;
    // SAFETY: an old length of zero means that the pages stay where they are, too. What they replace at `at` is a piece of the
    // caller's reservation, which nobody else knows of.
    let twin = unsafe { libc::mremap(start, 0, len as usize, flags, at) };
    if twin == libc::MAP_FAILED {
        return Err(OPERATING_SYSTEM);
    }
    // Copies get there by the number alone.
    twin.expose_provenance();
    Ok(())
}

fn map(at: u64, bytes: u64, access: c_int, flags: c_int, fd: c_int) -> Result<u64, c_int> {
    let at = std::ptr::without_provenance_mut(at as usize);
    // SAFETY: a fresh range, or with MAP_FIXED one that this crate reserved.
    let address = unsafe { libc::mmap(at, bytes as usize, access, flags, fd, 0) };
    if address == libc::MAP_FAILED { Err(OPERATING_SYSTEM) } else { Ok(address.expose_provenance() as u64) }
}
