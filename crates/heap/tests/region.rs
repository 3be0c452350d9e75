//! Seals of a region, tested with the system calls that an importer could make.

use std::os::fd::{AsRawFd, OwnedFd};

use moontide_heap::{HugePages, Protection, Region, RegionError};
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, SealFlags};
use rustix::io::Errno;
use rustix::mm::{MapFlags, MprotectFlags, ProtFlags};

const LEN: u64 = 64 << 10;

fn region(protection: Protection) -> Region {
    Region::create("test", LEN, HugePages::Auto, protection).unwrap()
}

fn duplicate(region: &Region) -> OwnedFd {
    // SAFETY: the tests write through it only what they check.
    unsafe { region.fd() }.try_clone_to_owned().unwrap()
}

fn map(fd: &OwnedFd, access: ProtFlags) -> Result<*mut core::ffi::c_void, Errno> {
    // SAFETY: a new mapping at an address that the kernel chooses; the tests leak it.
    unsafe { rustix::mm::mmap(std::ptr::null_mut(), LEN as usize, access, MapFlags::SHARED, fd, 0) }
}

#[test]
fn owner_writes_region_is_read_only_for_importers() {
    let owner = region(Protection::OwnerWrites);
    let fd = duplicate(&owner);
    let writable = ProtFlags::READ | ProtFlags::WRITE;
    assert_eq!(map(&fd, writable), Err(Errno::PERM));
    assert_eq!(rustix::io::write(&fd, b"x"), Err(Errno::PERM));
    // A descriptor can always be reopened with other rights; the seal still holds.
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    let again = rustix::fs::open(path, OFlags::RDWR, Mode::empty()).unwrap();
    assert_eq!(map(&again, writable), Err(Errno::PERM));
    // A read-only mapping cannot be made writable either, nor can holes be punched into it.
    let read_only = map(&fd, ProtFlags::READ).unwrap();
    // SAFETY: the range was mapped by the line above.
    let upgraded =
        unsafe { rustix::mm::mprotect(read_only, LEN as usize, MprotectFlags::READ | MprotectFlags::WRITE) };
    assert_eq!(upgraded, Err(Errno::ACCESS));
    let punch = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    assert_eq!(rustix::fs::fallocate(&fd, punch, 0, 4096), Err(Errno::PERM));
    // The owner's own mapping still works, and the importer sees it.
    let importer = Region::import(fd, LEN, Protection::OwnerWrites).unwrap();
    assert!(owner.is_writable() && !importer.is_writable());
    // SAFETY: both mappings exist, and no other thread uses them.
    unsafe {
        owner.base().write(42);
        assert_eq!(importer.base().read_volatile(), 42);
    }
}

#[test]
fn region_cannot_be_resized_or_sealed_again() {
    for protection in [Protection::OwnerWrites, Protection::AllWrite] {
        let owner = region(protection);
        for len in [0, LEN / 2, LEN * 2] {
            assert_eq!(
                rustix::fs::ftruncate(duplicate(&owner), len),
                Err(Errno::PERM),
                "{protection:?} to {len}"
            );
        }
        // An importer that could seal the payload against writing would lock every other client out.
        assert_eq!(rustix::fs::fcntl_add_seals(duplicate(&owner), SealFlags::FUTURE_WRITE), Err(Errno::PERM));
    }
}

#[test]
fn importer_can_write_all_write_region() {
    let owner = region(Protection::AllWrite);
    let importer = Region::import(duplicate(&owner), LEN, Protection::AllWrite).unwrap();
    assert!(importer.is_writable());
    // SAFETY: both mappings exist, and no other thread uses them.
    unsafe {
        importer.base().add(LEN as usize - 1).write(7);
        assert_eq!(owner.base().add(LEN as usize - 1).read_volatile(), 7);
    }
}

#[test]
fn import_of_unsealed_or_wrong_size_region_is_rejected() {
    let unsealed =
        rustix::fs::memfd_create("unsealed", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
    rustix::fs::ftruncate(&unsealed, LEN).unwrap();
    let refused = Region::import(unsealed, LEN, Protection::AllWrite).unwrap_err();
    assert!(matches!(refused, RegionError::Seals { .. }), "{refused}");
    let owner = region(Protection::AllWrite);
    let refused = Region::import(duplicate(&owner), LEN, Protection::OwnerWrites).unwrap_err();
    assert!(
        matches!(refused, RegionError::Seals { .. }),
        "an index region that others can write was imported: {refused}"
    );
    let refused = Region::import(duplicate(&owner), LEN * 2, Protection::AllWrite).unwrap_err();
    assert!(matches!(refused, RegionError::Size { .. }), "{refused}");
    let file = std::fs::File::open("/proc/self/exe").unwrap();
    assert!(
        Region::import(file.into(), 4096, Protection::AllWrite).is_err(),
        "an ordinary file was imported"
    );
}

#[test]
fn invalid_region_length_is_rejected() {
    for len in [0, 1, 4095, 4097, u64::MAX, 1 << 63] {
        let refused = Region::create("test", len, HugePages::Auto, Protection::AllWrite);
        assert!(matches!(refused, Err(RegionError::Length { .. })), "{len}");
    }
    let odd = Region::create("test", 4096, HugePages::Reserved, Protection::AllWrite);
    assert!(matches!(odd, Err(RegionError::Length { align: 0x20_0000, .. })));
}

#[test]
fn reserved_huge_pages_work_or_error_names_them() {
    let free = std::fs::read_to_string("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages");
    let free: u64 = free.ok().and_then(|text| text.trim().parse().ok()).unwrap_or(0);
    let created = Region::create("test", 2 << 20, HugePages::Reserved, Protection::AllWrite);
    match created {
        Ok(region) => {
            assert!(free > 0);
            // SAFETY: the mapping exists, and no other thread uses it.
            unsafe { region.base().write(1) };
        }
        Err(error) => {
            assert_eq!(free, 0, "{error}");
            assert!(error.to_string().contains("huge pages"), "{error}");
        }
    }
}
