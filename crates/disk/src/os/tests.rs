//! Files of the operating system: names, lengths, and features that a file system may lack.

use std::io;
use std::path::{Path, PathBuf};

use super::*;
use crate::buffer::{AlignedBuf, Buffer};
use crate::storage::{Op, OpKind, run_one};

/// A storage whose directory is removed when it is dropped.
struct TempStorage {
    root: PathBuf,
    storage: OsStorage,
}

impl TempStorage {
    fn new(name: &str, direct: bool) -> TempStorage {
        let root =
            std::env::temp_dir().join(format!("moontide-disk-os-{name}-{direct}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        // Nested directories: both are created.
        let storage = OsStorage::open_with(&root.join("storage"), IoEngine::Auto, direct).unwrap();
        TempStorage { root, storage }
    }
}

impl Drop for TempStorage {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

fn kind<T>(result: io::Result<T>) -> io::ErrorKind {
    result.map(drop).unwrap_err().kind()
}

#[test]
fn engine_name_round_trips() {
    for choice in [IoEngine::Auto, IoEngine::Uring, IoEngine::Posix] {
        assert_eq!(choice.to_string().parse(), Ok(choice));
    }
    assert_eq!("aio".parse::<IoEngine>(), Err(UnknownEngine { name: "aio".to_owned() }));
    assert_eq!(IoEngine::default(), IoEngine::Auto);
}

#[test]
fn files_and_directories_are_created_listed_renamed_removed() {
    let temp = TempStorage::new("names", true);
    let storage = &temp.storage;
    storage.create_dir(Path::new("d")).unwrap();
    storage.create_dir(Path::new("d")).unwrap();
    assert_eq!(kind(storage.create_dir(Path::new("x/y"))), io::ErrorKind::NotFound);
    let file = storage.open(Path::new("d/a"), OpenMode::Create).unwrap();
    storage.allocate(&file, 5000).unwrap();
    assert_eq!(kind(storage.open(Path::new("d/a"), OpenMode::Create)), io::ErrorKind::AlreadyExists);
    assert_eq!(kind(storage.open(Path::new("d"), OpenMode::Read)), io::ErrorKind::IsADirectory);
    assert_eq!(kind(storage.open(Path::new("b"), OpenMode::Write)), io::ErrorKind::NotFound);
    assert_eq!(kind(storage.create_dir(Path::new("d/a"))), io::ErrorKind::AlreadyExists);
    storage.open(Path::new("d/b"), OpenMode::Create).unwrap();
    storage.rename(Path::new("d/a"), Path::new("d/b")).unwrap();
    storage.sync_dir(Path::new("d")).unwrap();
    storage.sync_dir(Path::new("")).unwrap();
    let entry = |name: &str, is_dir, len| DirEntry { name: name.to_owned(), is_dir, len };
    assert_eq!(storage.list(Path::new("d")).unwrap(), [entry("b", false, 5000)]);
    assert_eq!(storage.list(Path::new("")).unwrap(), [entry("d", true, 0)]);
    storage.remove(Path::new("d/b")).unwrap();
    assert_eq!(kind(storage.remove(Path::new("d/b"))), io::ErrorKind::NotFound);
    assert_eq!(storage.len(&file).unwrap(), 5000);
}

#[test]
fn non_utf8_names_are_not_listed() {
    use std::os::unix::ffi::OsStrExt;
    let temp = TempStorage::new("text", true);
    let foreign = std::ffi::OsStr::from_bytes(b"\xff\xfe");
    fs::write(temp.storage.root.join(foreign), b"").unwrap();
    assert_eq!(temp.storage.list(Path::new("")).unwrap(), []);
}

#[test]
fn allocate_reserves_and_releases_space() {
    use std::os::unix::fs::MetadataExt;
    const LEN: u64 = 8 << 20;
    for direct in [true, false] {
        let temp = TempStorage::new("allocate", direct);
        let storage = &temp.storage;
        let file = storage.open(Path::new("f"), OpenMode::Create).unwrap();
        let allocated = || file.downcast::<OsFile>().file.metadata().unwrap().blocks() * 512;
        storage.allocate(&file, LEN).unwrap();
        assert_eq!(storage.len(&file).unwrap(), LEN);
        assert!(allocated() >= LEN, "{} bytes", allocated());
        storage.allocate(&file, 4096).unwrap();
        assert_eq!(storage.len(&file).unwrap(), 4096);
        assert!(allocated() < LEN);
        storage.allocate(&file, 0).unwrap();
        assert_eq!(storage.len(&file).unwrap(), 0);
        let too_much = storage.allocate(&file, 1 << 62).unwrap_err().kind();
        assert!(matches!(too_much, io::ErrorKind::StorageFull | io::ErrorKind::FileTooLarge), "{too_much:?}");
        assert_eq!(storage.len(&file).unwrap(), 0);
    }
}

#[test]
fn file_system_without_direct_io_uses_page_cache() {
    let temp = TempStorage::new("buffered", false);
    let storage = &temp.storage;
    assert!(!storage.is_direct());
    let file = storage.open(Path::new("f"), OpenMode::Create).unwrap();
    assert!(!file.downcast::<OsFile>().direct);
    for config in [IoEngine::Posix, IoEngine::Auto] {
        let mut queue: Box<dyn Queue> = match config {
            IoEngine::Posix => Box::new(PosixQueue),
            _ => storage.queue(&QueueConfig::default()),
        };
        // Nothing is aligned here.
        let moon = Buffer::Borrowed(b"moon and tide");
        run(&mut *queue, OpKind::Write, &file, 3, moon).unwrap();
        run(&mut *queue, OpKind::Sync, &file, 0, Buffer::None).unwrap();
        let mut bytes = [0; 5];
        run(&mut *queue, OpKind::Read, &file, 11, Buffer::BorrowedMut(&mut bytes)).unwrap();
        assert_eq!(&bytes, b" tide");
        let block = Buffer::Owned(AlignedBuf::zeroed(1));
        let short = run(&mut *queue, OpKind::Read, &file, 0, block).unwrap_err();
        assert_eq!(short.kind(), io::ErrorKind::UnexpectedEof);
    }
}

fn run(queue: &mut dyn Queue, kind: OpKind, file: &File, offset: u64, buffer: Buffer<'_>) -> io::Result<()> {
    run_one(queue, Op { tag: 0, kind, file: file.clone(), offset, buffer }).result
}

#[test]
fn write_to_file_opened_for_reading_fails() {
    let temp = TempStorage::new("readonly", true);
    let storage = &temp.storage;
    storage.open(Path::new("f"), OpenMode::Create).unwrap();
    let file = storage.open(Path::new("f"), OpenMode::Read).unwrap();
    let queues: [Box<dyn Queue>; 2] = [Box::new(PosixQueue), storage.queue(&QueueConfig::default())];
    for mut queue in queues {
        let buffer = Buffer::Owned(AlignedBuf::zeroed(1));
        let refused = run(&mut *queue, OpKind::Write, &file, 0, buffer).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EBADF));
    }
}

#[test]
fn free_space_is_within_total_space() {
    let temp = TempStorage::new("space", true);
    let space = temp.storage.space().unwrap();
    assert!(0 < space.free && space.free <= space.total, "{space:?}");
}

#[test]
fn path_outside_root_panics() {
    let temp = TempStorage::new("paths", true);
    for path in ["/etc/passwd", "../x", "d/../../x"] {
        let attempt = || drop(temp.storage.open(Path::new(path), OpenMode::Read));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(attempt)).is_err(), "{path}");
    }
}

#[test]
fn files_and_directories_are_private() {
    use std::os::unix::fs::PermissionsExt;
    for direct in [true, false] {
        let temp = TempStorage::new("private", direct);
        temp.storage.create_dir(Path::new("d")).unwrap();
        temp.storage.open(Path::new("d/f"), OpenMode::Create).unwrap();
        for (path, expected) in
            [("", 0o700), ("storage", 0o700), ("storage/d", 0o700), ("storage/d/f", 0o600)]
        {
            let mode = fs::metadata(temp.root.join(path)).unwrap().permissions().mode();
            assert_eq!(mode & 0o777, expected, "{path:?}");
        }
    }
}
