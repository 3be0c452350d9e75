//! [`Region`]: a piece of memory that one process owns and others map.
//!
//! Today a region is a memfd. Whatever else memory may come from later (a device's, by its driver) has the
//! same two halves: a descriptor that is passed over a Unix socket, and a mapping of a fixed length.
//! Everything above says `(region, offset)`, never an address.
//!
//! | seal | who maps it | what nobody can do any more |
//! |---|---|---|
//! | [`Protection::OwnerWrites`] | owner read-write, others read-only | map it for writing, write it, change its size |
//! | [`Protection::AllWrite`] | all read-write | change its size |
//!
//! A read-only descriptor alone is no protection, since it can be opened again through `/proc`; the seal is.
//! The size is sealed before anyone imports a region, because touching memory behind the end of a file that
//! shrank kills the process. Seals themselves are sealed, so that no importer can add one and lock others out.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;

use rustix::fs::{MemfdFlags, SealFlags};
use rustix::mm::{Advice, MapFlags, ProtFlags};

use crate::shm::fork::ProcessToken;
use crate::sync::AtomicU64;

/// Why a region could not be made or mapped.
#[derive(Debug, thiserror::Error)]
pub enum RegionError {
    /// A length that is 0 or no multiple of the page size.
    #[error("a region of {len} bytes is not a positive multiple of {align}")]
    Length {
        /// What was asked for.
        len: u64,
        /// The page size.
        align: u64,
    },
    /// A call to the operating system failed.
    #[error("{call} for a region of {len} bytes: {source}{}", hint(*source))]
    System {
        /// Which call.
        call: &'static str,
        /// The region's length.
        len: u64,
        /// Its answer.
        source: rustix::io::Errno,
    },
    /// The descriptor has another length than its owner says.
    #[error("the imported region has {found} bytes, its owner says {expected}")]
    Size {
        /// Length of the file.
        found: u64,
        /// Length according to the owner.
        expected: u64,
    },
    /// The memory is somebody's already.
    #[error("{len} bytes at {offset} of this rank's region were lent before: start one node in them")]
    Lent {
        /// Where they start.
        offset: u64,
        /// How many.
        len: u64,
    },
    /// Another process's node was in this memory, and others may still read what it had.
    #[error("this rank came in another one's place, and its memory is not empty: start a new world")]
    Inherited,
    /// The descriptor lacks a seal without which mapping it would be unsafe.
    #[error("the imported region has seals {found:#x}, needs {needed:#x}")]
    Seals {
        /// What is sealed.
        found: u32,
        /// What must be.
        needed: u32,
    },
}

/// What to do about the refusals that people meet.
fn hint(errno: rustix::io::Errno) -> &'static str {
    match errno {
        rustix::io::Errno::NOMEM => " (not enough memory, or not enough huge pages: see vm.nr_hugepages)",
        rustix::io::Errno::MFILE | rustix::io::Errno::NFILE => " (raise the limit on open files)",
        _ => "",
    }
}

/// Whether a region lies on huge pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum HugePages {
    /// Whatever the machine gives: huge pages if the operator allows them for shared memory
    /// (`/sys/kernel/mm/transparent_hugepage/shmem_enabled` at `advise`), ordinary ones if not.
    #[default]
    IfAllowed,
    /// 2 MiB pages that the operator reserved (`vm.nr_hugepages`); an error if there are too few.
    Reserved,
}

impl HugePages {
    /// Size of a page, of which a region's length is a multiple.
    pub fn page_bytes(self) -> u64 {
        match self {
            HugePages::IfAllowed => 4096,
            HugePages::Reserved => 2 << 20,
        }
    }
}

/// Who may write a region once it is sealed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protection {
    /// Only the mapping that the owner has already.
    OwnerWrites,
    /// Everyone who maps it.
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

/// A mapped piece of shared memory.
#[derive(Debug)]
pub struct Region {
    /// Kept by the owner, who passes it on; an importer needs none once it has mapped the region.
    fd: Option<OwnedFd>,
    /// Where in the descriptor's memory it starts.
    at: u64,
    base: NonNull<u8>,
    len: usize,
    writable: bool,
    made_in: ProcessToken,
}

// SAFETY: a region is an address range that stays mapped for as long as the value lives; all access goes
// through atomics or through pointers whose users state their own rules.
unsafe impl Send for Region {}
// SAFETY: as above.
unsafe impl Sync for Region {}

impl Region {
    /// Makes a region of zeroed memory, maps it for writing, and then seals it.
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
        // The owner's mapping comes first: FUTURE_WRITE lets existing ones live.
        let mut region = Region::map(&fd, 0, len, ProtFlags::READ | ProtFlags::WRITE)?;
        rustix::fs::fcntl_add_seals(&fd, protection.seals()).map_err(system("F_ADD_SEALS"))?;
        region.fd = Some(fd);
        Ok(region)
    }

    /// Maps a region that another process made, after checking that it is as long as its owner says and
    /// sealed, so that nobody can make it shorter under this process.
    pub fn import(fd: OwnedFd, len: u64, protection: Protection) -> Result<Region, RegionError> {
        let size = sealed_size(&fd, len, protection)?;
        if size != len {
            return Err(RegionError::Size { found: size, expected: len });
        }
        Region::map(&fd, 0, len, protection.importer_access())
    }

    /// As [`Region::import`], and keeps the descriptor: for memory of which parts are passed on.
    pub(crate) fn import_whole(fd: OwnedFd, len: u64, protection: Protection) -> Result<Region, RegionError> {
        let mut region = Region::import_part(&fd, (0, len), protection)?;
        region.fd = Some(fd);
        Ok(region)
    }

    /// As [`Region::import`], of a part of what the descriptor stands for: from `at` on, `len` bytes.
    pub(crate) fn import_part(
        fd: &OwnedFd,
        (at, len): (u64, u64),
        protection: Protection,
    ) -> Result<Region, RegionError> {
        let size = sealed_size(fd, len, protection)?;
        let align = HugePages::IfAllowed.page_bytes();
        let end = at.checked_add(len).filter(|_| at.is_multiple_of(align));
        let end = end.ok_or(RegionError::Length { len: at, align })?;
        if size < end {
            return Err(RegionError::Size { found: size, expected: end });
        }
        Region::map(fd, at, len, protection.importer_access())
    }

    /// A part of a region that was made here, as a region of its own: mapped a second time, and there for as long as
    /// it lives, whatever becomes of the whole.
    ///
    /// # Panics
    /// If the region was imported without its descriptor.
    pub(crate) fn part(&self, (at, len): (u64, u64), protection: Protection) -> Result<Region, RegionError> {
        let whole = self.fd.as_ref().expect("a region whose descriptor is here");
        let fd = whole.try_clone().map_err(|error| RegionError::System {
            call: "dup",
            len,
            source: rustix::io::Errno::from_io_error(&error).unwrap_or(rustix::io::Errno::MFILE),
        })?;
        let at = at.checked_add(self.at).ok_or(RegionError::Length { len: at, align: 1 })?;
        let mut part = Region::import_part(&fd, (at, len), protection)?;
        part.fd = Some(fd);
        Ok(part)
    }

    fn map(fd: &OwnedFd, at: u64, len: u64, access: ProtFlags) -> Result<Region, RegionError> {
        let system = |call| move |source| RegionError::System { call, len, source };
        let len_usize = len as usize; // 64-bit targets only, see lib.rs
        // SAFETY: a fresh mapping at an address that the kernel chooses; it overlaps nothing.
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
        };
        for (call, advice) in
            [("MADV_DONTFORK", Advice::LinuxDontFork), ("MADV_DONTDUMP", Advice::LinuxDontDump)]
        {
            // A child must not inherit pins, and a core dump must not carry a terabyte of cache.
            // SAFETY: the range was mapped just above.
            unsafe { rustix::mm::madvise(base.as_ptr().cast(), len_usize, advice) }.map_err(system(call))?;
        }
        // A wish, which most machines do not grant; on reserved huge pages it means nothing.
        // SAFETY: as above.
        let _ = unsafe { rustix::mm::madvise(base.as_ptr().cast(), len_usize, Advice::LinuxHugepage) };
        Ok(region)
    }

    /// Its length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "a region is never empty")]
    pub fn len(&self) -> u64 {
        self.len as u64
    }

    /// The descriptor of a region that was made here, to be passed on.
    ///
    /// # Safety
    /// Whoever gets it may write the region unless it is sealed, and must keep to the same rules as everyone else
    /// who maps it.
    ///
    /// # Panics
    /// If the region was imported.
    pub unsafe fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_ref().expect("a region that was made here").as_fd()
    }

    /// Where in the descriptor's memory it starts: 0 unless it is a part.
    pub(crate) fn offset(&self) -> u64 {
        self.at
    }

    /// Its first byte. Valid for [`Region::len`] bytes while the region lives, in this process only: a forked
    /// child has no mapping.
    pub fn base(&self) -> NonNull<u8> {
        self.base
    }

    /// A piece of the region as atomics.
    ///
    /// # Panics
    /// If the piece is misaligned or reaches beyond the end.
    pub(crate) fn atomics(&self, offset: u64, count: u64) -> &[AtomicU64] {
        // SAFETY: AtomicU64 accepts every bit pattern; other processes touch these bytes atomically only.
        unsafe { self.slice(offset, count) }
    }

    /// A piece of the region as values of `T`.
    ///
    /// # Safety
    /// Every bit pattern must be a `T`, and whatever other threads or processes change in it must be atomics.
    ///
    /// # Panics
    /// If the piece is misaligned or reaches beyond the end.
    pub(crate) unsafe fn slice<T>(&self, offset: u64, count: u64) -> &[T] {
        let bytes = count.checked_mul(size_of::<T>() as u64).expect("a piece of the region");
        let end = offset.checked_add(bytes).expect("a piece of the region");
        assert!(end <= self.len() && offset.is_multiple_of(align_of::<T>() as u64));
        // SAFETY: in bounds and aligned (the base is page-aligned) by the line above; the caller vouches for T.
        unsafe { std::slice::from_raw_parts(self.base.as_ptr().add(offset as usize).cast(), count as usize) }
    }

    /// Whether the mapping is there at all: not in a child that was forked after it was made.
    #[inline]
    pub(crate) fn is_here(&self) -> bool {
        self.made_in.is_valid()
    }

    /// Whether this process may write it.
    pub fn is_writable(&self) -> bool {
        self.writable
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        if !self.is_here() {
            // There is no mapping here, and another one may stand in its place.
            return;
        }
        // SAFETY: the range is ours, and nothing borrows from it any more.
        let unmapped = unsafe { rustix::mm::munmap(self.base.as_ptr().cast(), self.len) };
        debug_assert!(unmapped.is_ok());
    }
}

/// The size of a descriptor that is sealed as it must be.
fn sealed_size(fd: &OwnedFd, len: u64, protection: Protection) -> Result<u64, RegionError> {
    check_len(len, HugePages::IfAllowed.page_bytes())?;
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
