//! Files of the operating system: names, lengths, and what a file system may refuse.

use std::io;
use std::path::{Path, PathBuf};

use super::*;
use crate::buffer::{Aligned, Buffer};
use crate::storage::{Op, OpKind, run_one};

/// A storage whose directory is removed at the end.
struct Temporary {
    root: PathBuf,
    storage: OsStorage,
}

impl Temporary {
    fn new(name: &str, direct: bool) -> Temporary {
        let root =
            std::env::temp_dir().join(format!("moontide-disk-os-{name}-{direct}-{}", std::process::id()));
        let _ = fs::remove_dir_all(&root);
        // A directory in a directory: both are made.
        let storage = OsStorage::open_with(&root.join("storage"), EngineChoice::Auto, direct).unwrap();
        Temporary { root, storage }
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.root);
    }
}

fn kind<T>(result: io::Result<T>) -> io::ErrorKind {
    result.map(drop).unwrap_err().kind()
}

#[test]
fn engine_names_are_read_as_they_are_written() {
    for choice in [EngineChoice::Auto, EngineChoice::Uring, EngineChoice::Posix] {
        assert_eq!(choice.to_string().parse(), Ok(choice));
    }
    assert_eq!("aio".parse::<EngineChoice>(), Err(UnknownEngine { name: "aio".to_owned() }));
    assert_eq!(EngineChoice::default(), EngineChoice::Auto);
}

#[test]
fn names_are_made_listed_renamed_and_removed() {
    let temporary = Temporary::new("names", true);
    let storage = &temporary.storage;
    storage.create_dir(Path::new("d")).unwrap();
    storage.create_dir(Path::new("d")).unwrap();
    assert_eq!(kind(storage.create_dir(Path::new("x/y"))), io::ErrorKind::NotFound);
    let file = storage.open(Path::new("d/a"), Mode::Create).unwrap();
    storage.allocate(&file, 5000).unwrap();
    assert_eq!(kind(storage.open(Path::new("d/a"), Mode::Create)), io::ErrorKind::AlreadyExists);
    assert_eq!(kind(storage.open(Path::new("d"), Mode::Read)), io::ErrorKind::IsADirectory);
    assert_eq!(kind(storage.open(Path::new("b"), Mode::Write)), io::ErrorKind::NotFound);
    assert_eq!(kind(storage.create_dir(Path::new("d/a"))), io::ErrorKind::AlreadyExists);
    storage.open(Path::new("d/b"), Mode::Create).unwrap();
    storage.rename(Path::new("d/a"), Path::new("d/b")).unwrap();
    storage.sync_dir(Path::new("d")).unwrap();
    storage.sync_dir(Path::new("")).unwrap();
    let entry = |name: &str, is_dir, len| Entry { name: name.to_owned(), is_dir, len };
    assert_eq!(storage.list(Path::new("d")).unwrap(), [entry("b", false, 5000)]);
    assert_eq!(storage.list(Path::new("")).unwrap(), [entry("d", true, 0)]);
    storage.remove(Path::new("d/b")).unwrap();
    assert_eq!(kind(storage.remove(Path::new("d/b"))), io::ErrorKind::NotFound);
    assert_eq!(storage.len(&file).unwrap(), 5000);
}

#[test]
fn names_that_are_not_text_are_not_listed() {
    use std::os::unix::ffi::OsStrExt;
    let temporary = Temporary::new("text", true);
    let foreign = std::ffi::OsStr::from_bytes(b"\xff\xfe");
    fs::write(temporary.storage.root.join(foreign), b"").unwrap();
    assert_eq!(temporary.storage.list(Path::new("")).unwrap(), []);
}

#[test]
fn allocated_space_is_taken_and_given_back() {
    use std::os::unix::fs::MetadataExt;
    const LEN: u64 = 8 << 20;
    for direct in [true, false] {
        let temporary = Temporary::new("allocate", direct);
        let storage = &temporary.storage;
        let file = storage.open(Path::new("f"), Mode::Create).unwrap();
        let taken = || os_file(&file).file.metadata().unwrap().blocks() * 512;
        storage.allocate(&file, LEN).unwrap();
        assert_eq!(storage.len(&file).unwrap(), LEN);
        assert!(taken() >= LEN, "{} bytes", taken());
        storage.allocate(&file, 4096).unwrap();
        assert_eq!(storage.len(&file).unwrap(), 4096);
        assert!(taken() < LEN);
        storage.allocate(&file, 0).unwrap();
        assert_eq!(storage.len(&file).unwrap(), 0);
        let too_much = storage.allocate(&file, 1 << 62).unwrap_err().kind();
        assert!(matches!(too_much, io::ErrorKind::StorageFull | io::ErrorKind::FileTooLarge), "{too_much:?}");
        assert_eq!(storage.len(&file).unwrap(), 0);
    }
}

#[test]
fn file_system_without_direct_io_is_served_through_the_page_cache() {
    let temporary = Temporary::new("buffered", false);
    let storage = &temporary.storage;
    assert!(!storage.is_direct());
    let file = storage.open(Path::new("f"), Mode::Create).unwrap();
    assert!(!os_file(&file).direct);
    for config in [EngineChoice::Posix, EngineChoice::Auto] {
        let mut queue: Box<dyn Queue> = match config {
            EngineChoice::Posix => Box::new(PosixQueue),
            _ => storage.queue(&QueueConfig::default()),
        };
        // Nothing is aligned here.
        let moon = Buffer::Lent(b"moon and tide");
        run(&mut *queue, OpKind::Write, &file, 3, moon).unwrap();
        run(&mut *queue, OpKind::Sync, &file, 0, Buffer::None).unwrap();
        let mut bytes = [0; 5];
        run(&mut *queue, OpKind::Read, &file, 11, Buffer::Fill(&mut bytes)).unwrap();
        assert_eq!(&bytes, b" tide");
        let block = Buffer::Owned(Aligned::zeroed(1));
        let short = run(&mut *queue, OpKind::Read, &file, 0, block).unwrap_err();
        assert_eq!(short.kind(), io::ErrorKind::UnexpectedEof);
    }
}

fn run(queue: &mut dyn Queue, kind: OpKind, file: &File, offset: u64, buffer: Buffer<'_>) -> io::Result<()> {
    run_one(queue, Op { tag: 0, kind, file: file.clone(), offset, buffer }).result
}

#[test]
fn file_opened_to_be_read_cannot_be_written() {
    let temporary = Temporary::new("readonly", true);
    let storage = &temporary.storage;
    storage.open(Path::new("f"), Mode::Create).unwrap();
    let file = storage.open(Path::new("f"), Mode::Read).unwrap();
    let queues: [Box<dyn Queue>; 2] = [Box::new(PosixQueue), storage.queue(&QueueConfig::default())];
    for mut queue in queues {
        let buffer = Buffer::Owned(Aligned::zeroed(1));
        let refused = run(&mut *queue, OpKind::Write, &file, 0, buffer).unwrap_err();
        assert_eq!(refused.raw_os_error(), Some(libc::EBADF));
    }
}

#[test]
fn space_is_that_of_the_file_system() {
    let temporary = Temporary::new("space", true);
    let space = temporary.storage.space().unwrap();
    assert!(0 < space.free && space.free <= space.total, "{space:?}");
}

#[test]
fn no_path_leads_out_of_the_root() {
    let temporary = Temporary::new("paths", true);
    for path in ["/etc/passwd", "../x", "d/../../x"] {
        let attempt = || drop(temporary.storage.open(Path::new(path), Mode::Read));
        assert!(std::panic::catch_unwind(std::panic::AssertUnwindSafe(attempt)).is_err(), "{path}");
    }
}
