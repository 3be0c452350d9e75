//! [`Region`]: shared memory that one process owns and others map.
//!
//! Today a region is a memfd. Memory of other origin (a device's, through its driver) has the same two parts: a
//! descriptor that is sent over a Unix socket, and a mapping of a fixed length. All other code uses `(region,
//! offset)`, never an address.
//!
//! | protection | mapped by | prevented by the seals |
//! |---|---|---|
//! | [`Protection::OwnerWrites`] | owner read-write, others read-only | new writable mappings, writes, changes of the
//! size |
//! | [`Protection::AllWrite`] | all read-write | changes of the size |
//!
//! A read-only descriptor alone is no protection, since it can be reopened through `/proc`; the seal is. The size is
//! sealed before any process imports a region, because access beyond the end of a file that shrank kills the process.
//! Seals themselves are sealed, so that no importer can add one and lock others out.

use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use moontide_rt::process::Owned;
use moontide_rt::sync::AtomicU64;
use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::shm::fork::ProcessToken;

/// Failure to create or map a region.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// The length is 0 or no multiple of the page size.
    #[error("region of {len} bytes is not a positive multiple of {align}")]
    Length {
        /// Requested length in bytes.
        len: u64,
        /// Page size in bytes.
        align: u64,
    },
    /// A system call failed.
    #[error("{call} for a region of {len} bytes: {source}{}", hint(*source))]
    System {
        /// Name of the system call.
        call: &'static str,
        /// Length of the region in bytes.
        len: u64,
        /// Error number of the call.
        source: rustix::io::Errno,
    },
    /// The descriptor has another length than its owner announced.
    #[error("imported region has {found} bytes, its owner announced {expected}")]
    Size {
        /// Length of the file.
        found: u64,
        /// Length that the owner announced.
        expected: u64,
    },
    /// The descriptor lacks a seal without which the mapping would be unsafe.
    #[error("imported region has seals {found:#x}, needs {needed:#x}")]
    Seals {
        /// Seals of the descriptor.
        found: u32,
        /// Required seals.
        needed: u32,
    },
}

/// Returns advice for the errors that operators can fix.
fn hint(errno: rustix::io::Errno) -> &'static str {
    match errno {
        rustix::io::Errno::NOMEM => " (not enough memory, or not enough huge pages: see vm.nr_hugepages)",
        rustix::io::Errno::MFILE | rustix::io::Errno::NFILE => " (raise the limit on open files)",
        _ => "",
    }
}

/// Page size of a region.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HugePages {
    /// Huge pages if the operator allows them for shared memory (`/sys/kernel/mm/transparent_hugepage/shmem_enabled`
    /// is `advise`), ordinary pages otherwise.
    #[default]
    Auto,
    /// Pages of 2 MiB that the operator reserved (`vm.nr_hugepages`). Creation fails if there are too few.
    Reserved,
}

impl HugePages {
    /// Returns the page size in bytes. A region's length is a multiple of it.
    pub fn page_bytes(self) -> u64 {
        match self {
            HugePages::Auto => 4096,
            HugePages::Reserved => 2 << 20,
        }
    }
}

/// Write access to a sealed region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protection {
    /// Only the owner, through the mapping that it made before sealing.
    OwnerWrites,
    /// All processes that map it.
    AllWrite,
}

impl Protection {
    fn seals(self) -> SealFlags {
        let size = SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        match self {
            Protection::OwnerWrites => size | SealFlags::FUTURE_WRITE,
            Protection::AllWrite => size,
        }
    }

    fn importer_access(self) -> ProtFlags {
        match self {
            Protection::OwnerWrites => ProtFlags::READ,
            Protection::AllWrite => ProtFlags::READ | ProtFlags::WRITE,
        }
    }
}

/// The descriptor of a region.
#[derive(Debug)]
struct KeptDescriptor {
    fd: OwnedFd,
    _owned: Owned,
}

impl KeptDescriptor {
    fn new(fd: OwnedFd) -> KeptDescriptor {
        let raw = fd.as_raw_fd();
        // SAFETY: this runs if the process was killed in a simulated world. Then `fd` is never dropped.
        let close = move || unsafe { rustix::io::close(raw) };
        KeptDescriptor { fd, _owned: Owned::new(close) }
    }
}

/// A mapped range of shared memory.
#[derive(Debug)]
pub struct Region {
    /// Kept by the owner, which sends it to others; an importer does not need it after mapping the region.
    fd: Option<KeptDescriptor>,
    /// Offset of the region in the descriptor's memory.
    at: u64,
    base: NonNull<u8>,
    len: usize,
    writable: bool,
    made_in: ProcessToken,
    _owned: Owned,
}

// SAFETY: a region is an address range that remains mapped for the life of the value; all access goes
// through atomics or through pointers whose users state their own rules.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Creates a region of zeroed memory, maps it writable, and then seals it.
    pub fn create(
        name: &str,
        len: u64,
        huge: HugePages,
        protection: Protection,
    ) -> Result<Region, RegionError> {
        check_len(len, huge.page_bytes())?;
        let system = |call| move |source| RegionError::System { call, len, source };
        let mut flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
        if huge == HugePages::Reserved {
            flags |= MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB;
        }
        let fd = rustix::fs::memfd_create(name, flags).map_err(system("memfd_create"))?;
        rustix::fs::ftruncate(&fd, len).map_err(system("ftruncate"))?;
        // The owner's mapping comes first: FUTURE_WRITE does not affect existing mappings.
        let mut region = Region::map(&fd, 0, len, ProtFlags::READ | ProtFlags::WRITE)?;
        rustix::fs::fcntl_add_seals(&fd, protection.seals()).map_err(system("F_ADD_SEALS"))?;
        region.fd = Some(KeptDescriptor::new(fd));
        Ok(region)
    }

    /// Maps a region of another process, after checking that it has the length that its owner announced and is
    /// sealed, so that no process can shrink it.
    pub fn import(fd: OwnedFd, len: u64, protection: Protection) -> Result<Region, RegionError> {
        let size = sealed_size(&fd, len, protection)?;
        if size != len {
            return Err(RegionError::Size { found: size, expected: len });
        }
        Region::map(&fd, 0, len, protection.importer_access())
    }

    /// As [`Region::import`], and keeps the descriptor: for memory whose parts are sent to other processes.
    pub fn import_whole(fd: OwnedFd, len: u64, protection: Protection) -> Result<Region, RegionError> {
        let mut region = Region::import_range(&fd, (0, len), protection)?;
        region.fd = Some(KeptDescriptor::new(fd));
        Ok(region)
    }

    /// As [`Region::import`], for the range of `len` bytes at `at` of the descriptor's memory.
    pub(crate) fn import_range(
        fd: &OwnedFd,
        (at, len): (u64, u64),
        protection: Protection,
    ) -> Result<Region, RegionError> {
        let size = sealed_size(fd, len, protection)?;
        let align = HugePages::Auto.page_bytes();
        let end = at.checked_add(len).filter(|_| at.is_multiple_of(align));
        let end = end.ok_or(RegionError::Length { len: at, align })?;
        if size < end {
            return Err(RegionError::Size { found: size, expected: end });
        }
        Region::map(fd, at, len, protection.importer_access())
    }

    /// Maps a range of this region a second time, as a region of its own, which does not depend on the life of this
    /// one.
    ///
    /// # Panics
    /// If the region was imported without keeping its descriptor.
    pub fn subregion(&self, (at, len): (u64, u64), protection: Protection) -> Result<Region, RegionError> {
        let whole = self.fd.as_ref().expect("a region with its descriptor");
        let fd = whole.fd.try_clone().map_err(|error| RegionError::System {
            call: "dup",
            len,
            source: rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::MFILE),
        })?;
        let at = at.checked_add(self.at).ok_or(RegionError::Length { len: at, align: 1 })?;
        let mut subregion = Region::import_range(&fd, (at, len), protection)?;
        subregion.fd = Some(KeptDescriptor::new(fd));
        Ok(subregion)
    }

    fn map(fd: &OwnedFd, at: u64, len: u64, access: ProtFlags) -> Result<Region, RegionError> {
        let system = |call| move |source| RegionError::System { call, len, source };
        let len_usize = len as usize; // 64-bit targets only, see lib.rs
        // SAFETY: a new mapping at an address that the kernel chooses; it overlaps nothing.
        let base =
            unsafe { rustix::mm::mmap(std::ptr::null_mut(), len_usize, access, MapFlags::SHARED, fd, at) }
                .map_err(system("mmap"))?;
        let base = NonNull::new(base.cast::<u8>()).expect("mmap does not return null");
        let region = Region {
            fd: None,
            at,
            base,
            len: len_usize,
            writable: access.contains(ProtFlags::WRITE),
            made_in: ProcessToken::of_this_process(),
            _owned: Owned::new(move || {
                // SAFETY: the range was mapped just above for the process that was killed, none of whose code runs.
                let unmapped = unsafe { rustix::mm::munmap(base.as_ptr().cast(), len_usize) };
                debug_assert!(unmapped.is_ok());
            }),
        };
        for (call, advice) in
            [("MADV_DONTFORK", Advice::LinuxDontFork), ("MADV_DONTDUMP", Advice::LinuxDontDump)]
        {
            // A child must not inherit pins, and a core dump must not contain a terabyte of cache.
            // SAFETY: the range was mapped just above.
            unsafe { rustix::mm::madvise(base.as_ptr().cast(), len_usize, advice) }.map_err(system(call))?;
        }
        // Advice that most machines ignore; it has no effect on reserved huge pages.
        // SAFETY: as above.
        let _ = unsafe { rustix::mm::madvise(base.as_ptr().cast(), len_usize, Advice::LinuxHugepage) };
        Ok(region)
    }

    /// Returns the length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// Lets the kernel provide the memory of a range, which is at least one page, as if each of its pages had been written. No
    /// byte changes. The range is cut off at the end of the region.
    pub fn populate(&self, at: u64, len: u64) -> std::io::Result<()> {
        let at = at.min(self.len());
        let len = len.min(self.len() - at) as usize;
        // SAFETY: the range is in the mapping, which lives as long as the region. The call changes no byte, so that it may run
        // beside readers and writers of this and other processes.
        unsafe {
            let base = self.base().as_ptr().add(at as usize);
            Ok(rustix::mm::madvise(base.cast(), len, Advice::LinuxPopulateWrite)?)
        }
    }

    /// Returns the descriptor of a region that was created here, for sending it to another process.
    ///
    /// # Safety
    /// A process that gets the descriptor may write the region unless it is sealed, and must follow the same rules as
    /// all other processes that map it.
    ///
    /// # Panics
    /// If the region was imported.
    pub unsafe fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("a region that was created here").fd.as_fd()
    }

    /// Returns the offset of the region in the descriptor's memory: 0 unless it is a subregion.
    pub(crate) fn offset(&self) -> u64 {
        self.at
    }

    /// Returns the first byte. Valid for [`Region::len`] bytes during the life of the region, in this process only: a
    /// forked child has no mapping.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// Returns a range of the region as atomics.
    ///
    /// # Panics
    /// If the range is misaligned or out of bounds.
    pub(crate) fn atomics(&self, offset: u64, count: u64) -> &[AtomicU64] {
        // SAFETY: AtomicU64 accepts every bit pattern; other processes access these bytes atomically only.
        unsafe { self.slice(offset, count) }
    }

    /// Returns a range of the region as values of `T`.
    ///
    /// # Safety
    /// Every bit pattern must be a `T`, and the parts that other threads or processes change must be atomics.
    ///
    /// # Panics
    /// If the range is misaligned or out of bounds.
    pub unsafe fn slice<T>(&self, offset: u64, count: u64) -> &[T] {
        let bytes = count.checked_mul(size_of::<T>() as u64).expect("a range of the region");
        let end = offset.checked_add(bytes).expect("a range of the region");
        assert!(end <= self.len() && offset.is_multiple_of(align_of::<T>() as u64));
        // SAFETY: in bounds and aligned (the base is page-aligned) by the line above; the caller guarantees T.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset as usize).cast(), count as usize) }
    }

    /// Returns whether the mapping exists in this process: `false` in a child that was forked after it was made.
    #[inline]
    pub fn is_mapped_here(&self) -> bool {
        self.made_in.is_valid()
    }

    /// Returns whether this process may write the region.
    pub fn is_writable(&self) -> bool {
        self.writable
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if !self.is_mapped_here() {
            // This process has no such mapping, and another one may be at its address.
            return;
        }
        // SAFETY: the range belongs to this value, and nothing borrows from it any more.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}

/// Checks the seals of a descriptor and returns its size.
fn sealed_size(fd: &OwnedFd, len: u64, protection: Protection) -> Result<u64, RegionError> {
    check_len(len, HugePages::Auto.page_bytes())?;
    let system = |call| move |source| RegionError::System { call, len, source };
    let found = rustix::fs::fcntl_get_seals(fd).map_err(system("F_GET_SEALS"))?;
    let needed = protection.seals();
    if !found.contains(needed) {
        return Err(RegionError::Seals { found: found.bits(), needed: needed.bits() });
    }
    Ok(rustix::fs::fstat(fd).map_err(system("fstat"))?.st_size as u64)
}

fn check_len(len: u64, align: u64) -> Result<(), RegionError> {
    if len == 0 || !len.is_multiple_of(align) || len > isize::MAX as u64 {
        return Err(RegionError::Length { len, align });
    }
    Ok(())
}
