//! The engines behind [`Queue`], real and simulated: all have the same results and errors, and leave nothing in flight.

mod engine_support;
#[path = "../../types/tests/support/not_run.rs"]
mod not_run;

use std::collections::BTreeMap;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::Path;
use std::time::{Duration, Instant};

use engine_support::{TempDir, in_child, logged, warnings};
use moontide_disk::{
    AlignedBuf, BLOCK_BYTES, Buffer, Completion, File, IoEngine, Op, OpKind, OpSource, OpenMode, OsStorage,
    Queue, QueueConfig, RegisteredMemory, SimulatedDisk, Storage, run_all, run_one, sync,
};
use moontide_rt::SplitMix64;
use not_run::not_run;

const BLOCK: u64 = BLOCK_BYTES as u64;

fn op<'a>(kind: OpKind, file: &File, offset: u64, buffer: Buffer<'a>) -> Op<'a> {
    Op { tag: 0, kind, file: file.clone(), offset, buffer }
}

/// Returns every available engine, each with its own directory.
fn storages(name: &str) -> Vec<(Box<dyn Storage>, Option<TempDir>)> {
    let mut storages: Vec<(Box<dyn Storage>, Option<TempDir>)> = vec![];
    for engine in [IoEngine::Posix, IoEngine::Uring] {
        let dir = TempDir::new(&format!("{name}-{engine}"));
        let storage = OsStorage::open(dir.path(), engine).unwrap();
        if engine == IoEngine::Uring && storage.engine() != "uring" {
            not_run("the kernel refuses io_uring; only the other engines run");
            continue;
        }
        storages.push((Box::new(storage), Some(dir)));
    }
    storages.push((Box::new(SimulatedDisk::new(1)), None));
    storages
}

/// Fills memory with a pseudo-random pattern, so that no bytes can be mistaken for others.
fn pattern(seed: u64, bytes: &mut [u8]) {
    let mut rng = SplitMix64::new(seed);
    for chunk in bytes.chunks_mut(8) {
        chunk.copy_from_slice(&rng.next_u64().to_le_bytes()[..chunk.len()]);
    }
}

fn pattern_of(seed: u64, len: usize) -> AlignedBuf {
    let mut bytes = AlignedBuf::zeroed(len);
    pattern(seed, &mut bytes);
    bytes
}

fn read_all(queue: &mut dyn Queue, file: &File, offset: u64, len: usize) -> io::Result<Vec<u8>> {
    let done = run_one(queue, op(OpKind::Read, file, offset, Buffer::Owned(AlignedBuf::zeroed(len))));
    done.result.map(|()| done.buffer.as_slice().to_vec())
}

// -- model ------------------------------------------------------------------------------------------------------------

/// One operation of the model test, in blocks of the file.
#[derive(Clone, Copy, Debug)]
struct PlannedOp {
    kind: OpKind,
    block: u64,
    blocks: u64,
    seed: u64,
}

#[test]
fn engines_agree_on_bytes_and_errors() {
    const FILE_BLOCKS: u64 = 96;
    const BATCHES: usize = 1000;
    let seed = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0x5eed_u64);
    println!("seed {seed}");
    let mut rng = SplitMix64::new(seed);
    let storages = storages("model");
    let mut arenas: Vec<AlignedBuf> = storages.iter().map(|_| AlignedBuf::zeroed(1 << 20)).collect();
    let mut queues: Vec<_> = (storages.iter().zip(&arenas))
        .map(|((storage, _), arena)| {
            // Some buffers are inside the registered memory, some outside, some overlap its end.
            let memory = RegisteredMemory { address: arena.as_ptr().addr(), len: 96 << 10 };
            storage.queue(&QueueConfig { depth: 7, registered: Some(memory) })
        })
        .collect();
    let files: Vec<File> =
        storages.iter().map(|(storage, _)| storage.open(Path::new("f"), OpenMode::Create).unwrap()).collect();
    let mut model: Vec<u8> = vec![];
    let mut counts = BTreeMap::<String, usize>::new();
    for batch in 0..BATCHES {
        if rng.below(8) == 0 {
            // Any length: the end of a file need not be the end of a block.
            let len = rng.below(FILE_BLOCKS * BLOCK);
            model.resize(len as usize, 0);
            for ((storage, _), file) in storages.iter().zip(&files) {
                storage.allocate(file, len).unwrap();
                assert_eq!(storage.len(file).unwrap(), len);
            }
        }
        let plan = plan(&mut rng, FILE_BLOCKS, model.len() as u64);
        for planned in plan.iter().filter(|planned| planned.kind == OpKind::Write) {
            let (start, end) = (planned.block * BLOCK, (planned.block + planned.blocks) * BLOCK);
            model.resize(model.len().max(end as usize), 0);
            pattern(planned.seed, &mut model[start as usize..end as usize]);
        }
        for (number, queue) in queues.iter_mut().enumerate() {
            let done = run_planned(&mut **queue, &files[number], &mut arenas[number], &plan);
            for (planned, (result, bytes)) in plan.iter().zip(done) {
                let context = format!("seed {seed}, batch {batch}, {}, {planned:?}", queue.engine());
                let (start, end) = (planned.block * BLOCK, (planned.block + planned.blocks) * BLOCK);
                let expected = match planned.kind {
                    OpKind::Read if end > model.len() as u64 => Err(io::ErrorKind::UnexpectedEof),
                    _ => Ok(()),
                };
                assert_eq!(result, expected, "{context}");
                if planned.kind == OpKind::Read && result.is_ok() {
                    assert!(bytes == model[start as usize..end as usize], "{context}: wrong bytes");
                }
                *counts.entry(format!("{} {:?} {:?}", queue.engine(), planned.kind, result)).or_default() +=
                    1;
            }
        }
    }
    println!("{counts:#?}");
    assert!(counts.len() >= 4 * storages.len(), "reads, short reads, writes and syncs on every engine");
    for ((storage, _), (file, queue)) in storages.iter().zip(files.iter().zip(&mut queues)) {
        storage.allocate(file, model.len().next_multiple_of(BLOCK_BYTES) as u64).unwrap();
        let bytes = read_all(&mut **queue, file, 0, model.len()).unwrap();
        assert!(bytes[..model.len()] == model, "{}", queue.engine());
    }
}

/// Returns operations with disjoint blocks, so that their order does not matter. Reads past the end are not combined
/// with writes, which would move it.
fn plan(rng: &mut SplitMix64, file_blocks: u64, len: u64) -> Vec<PlannedOp> {
    let reads_only = rng.below(2) == 0;
    let mut plan = vec![];
    let mut block = rng.below(4);
    while block < file_blocks && plan.len() < 20 {
        let blocks = (1 + rng.below(16)).min(file_blocks - block);
        let kind = match rng.below(64) {
            0 => OpKind::Sync,
            1..=30 if !reads_only => OpKind::Write,
            _ => OpKind::Read,
        };
        if kind != OpKind::Read || reads_only || (block + blocks) * BLOCK <= len {
            plan.push(PlannedOp { kind, block, blocks, seed: rng.next_u64() });
        }
        block += blocks + rng.below(24);
    }
    plan
}

/// Runs a plan, with borrowed memory that is partly registered, and with owned memory.
fn run_planned(
    queue: &mut dyn Queue,
    file: &File,
    arena: &mut AlignedBuf,
    plan: &[PlannedOp],
) -> Vec<(Result<(), io::ErrorKind>, Vec<u8>)> {
    let mut rest = &mut arena[..];
    let mut ops = vec![];
    for planned in plan {
        let len = (planned.blocks * BLOCK) as usize;
        let owned = planned.seed % 3 == 0;
        let buffer = match planned.kind {
            OpKind::Sync => Buffer::None,
            OpKind::Read if owned => Buffer::Owned(AlignedBuf::zeroed(len)),
            OpKind::Write if owned => Buffer::Owned(pattern_of(planned.seed, len)),
            OpKind::Read | OpKind::Write => {
                let (bytes, after) = std::mem::take(&mut rest).split_at_mut(len);
                rest = after;
                if planned.kind == OpKind::Read {
                    Buffer::BorrowedMut(bytes)
                } else {
                    pattern(planned.seed, bytes);
                    Buffer::Borrowed(bytes)
                }
            }
        };
        let offset = if planned.kind == OpKind::Sync { 0 } else { planned.block * BLOCK };
        ops.push(op(planned.kind, file, offset, buffer));
    }
    let outcome =
        |done: Completion<'_>| (done.result.map_err(|err| err.kind()), done.buffer.as_slice().to_vec());
    run_all(queue, ops).into_iter().map(outcome).collect()
}

// -- queue and source -------------------------------------------------------------------------------------------------

/// Reads in bursts, with statistics.
struct Bursts<'f> {
    file: &'f File,
    /// Numbers of operations of the remaining bursts. A burst begins when all previous operations have ended.
    bursts: Vec<usize>,
    left: usize,
    in_flight: usize,
    in_flight_max: usize,
    ended: usize,
}

impl<'a> OpSource<'a> for Bursts<'_> {
    fn next(&mut self) -> Option<Op<'a>> {
        if self.left == 0 && self.in_flight == 0 {
            self.left = self.bursts.pop()?;
        }
        self.left = self.left.checked_sub(1)?;
        self.in_flight += 1;
        self.in_flight_max = self.in_flight_max.max(self.in_flight);
        Some(op(OpKind::Read, self.file, 0, Buffer::Owned(AlignedBuf::zeroed(BLOCK_BYTES))))
    }

    fn done(&mut self, done: Completion<'a>) {
        done.result.unwrap();
        self.in_flight -= 1;
        self.ended += 1;
    }
}

#[test]
fn queue_fills_to_its_depth_and_runs_later_ops() {
    for (storage, _dir) in storages("depth") {
        let file = storage.open(Path::new("f"), OpenMode::Create).unwrap();
        storage.allocate(&file, BLOCK).unwrap();
        for depth in [1, 2, 5, 32] {
            let mut queue = storage.queue(&QueueConfig { depth, registered: None });
            let bursts = vec![100, 1, 3, 7];
            let mut source =
                Bursts { file: &file, bursts, left: 0, in_flight: 0, in_flight_max: 0, ended: 0 };
            queue.run(&mut source);
            assert_eq!((source.ended, source.in_flight), (111, 0), "{}", queue.engine());
            let expected = if queue.engine() == "posix" { 1 } else { depth };
            assert_eq!(source.in_flight_max, expected, "{}", queue.engine());
        }
    }
}

#[test]
fn empty_op_succeeds_and_out_of_range_op_is_invalid() {
    for (storage, _dir) in storages("empty") {
        let file = storage.open(Path::new("f"), OpenMode::Create).unwrap();
        let mut queue = storage.queue(&QueueConfig::default());
        for kind in [OpKind::Read, OpKind::Write] {
            run_one(&mut *queue, op(kind, &file, 0, Buffer::None)).result.unwrap();
            let beyond = op(kind, &file, i64::MAX as u64 + 1 - BLOCK, Buffer::Owned(AlignedBuf::zeroed(1)));
            assert_eq!(run_one(&mut *queue, beyond).result.unwrap_err().kind(), io::ErrorKind::InvalidInput);
        }
        assert_eq!(storage.len(&file).unwrap(), 0);
    }
}

#[test]
fn unaligned_direct_operations_are_refused() {
    for (storage, _dir) in storages("unaligned") {
        let file = storage.open(Path::new("f"), OpenMode::Create).unwrap();
        storage.allocate(&file, 4 * BLOCK).unwrap();
        let mut queue = storage.queue(&QueueConfig::default());
        let mut memory = AlignedBuf::zeroed(2 * BLOCK_BYTES);
        for (offset, range) in [(1, 0..BLOCK_BYTES), (0, 0..BLOCK_BYTES - 1), (0, 8..8 + BLOCK_BYTES)] {
            let refused = catch_unwind(AssertUnwindSafe(|| {
                run_one(&mut *queue, op(OpKind::Read, &file, offset, Buffer::BorrowedMut(&mut memory[range])))
                    .result
            }));
            if cfg!(debug_assertions) {
                assert!(refused.is_err(), "a debug assertion detects the bug");
            } else {
                assert_eq!(refused.unwrap().unwrap_err().kind(), io::ErrorKind::InvalidInput);
            }
        }
        assert!(read_all(&mut *queue, &file, 0, BLOCK_BYTES).is_ok(), "the queue still works");
    }
}

/// A source of reads that panics at a given point.
struct Panicking<'a> {
    ops: Vec<Op<'a>>,
    taken: usize,
    ended: usize,
    panic_at_next: usize,
    panic_at_done: usize,
}

impl<'a> OpSource<'a> for Panicking<'a> {
    fn next(&mut self) -> Option<Op<'a>> {
        assert!(self.taken != self.panic_at_next, "next panics");
        self.taken += 1;
        self.ops.pop()
    }

    fn done(&mut self, _: Completion<'a>) {
        assert!(self.ended != self.panic_at_done, "done panics");
        self.ended += 1;
    }
}

#[test]
fn panic_in_op_source_leaves_no_op_in_flight() {
    const OPS: usize = 32;
    const LEN: usize = 1 << 20;
    let never = usize::MAX;
    for (storage, _dir) in storages("panic") {
        let file = storage.open(Path::new("f"), OpenMode::Create).unwrap();
        let mut queue = storage.queue(&QueueConfig { depth: OPS, registered: None });
        let mut memory = AlignedBuf::zeroed(OPS * LEN);
        pattern(1, &mut memory);
        run_one(&mut *queue, op(OpKind::Write, &file, 0, Buffer::Borrowed(&memory))).result.unwrap();
        for (panic_at_next, panic_at_done) in [(never, 0), (never, 3), (OPS / 2, never), (OPS, never)] {
            memory.fill(0xaa);
            let chunks = memory.chunks_mut(LEN).enumerate();
            let ops = chunks
                .map(|(number, chunk)| {
                    op(OpKind::Read, &file, (number * LEN) as u64, Buffer::BorrowedMut(chunk))
                })
                .collect();
            let mut source = Panicking { ops, taken: 0, ended: 0, panic_at_next, panic_at_done };
            let panicked = catch_unwind(AssertUnwindSafe(|| queue.run(&mut source))).is_err();
            assert!(panicked, "{}", queue.engine());
            drop(source);
            memory.fill(0x55);
            std::thread::sleep(Duration::from_millis(50));
            assert!(memory.iter().all(|byte| *byte == 0x55), "{}: written to after the run", queue.engine());
        }
        let bytes = read_all(&mut *queue, &file, 0, LEN).unwrap();
        assert!(bytes == pattern_of(1, OPS * LEN)[..LEN], "{}", queue.engine());
    }
}

#[test]
fn queue_works_after_moving_to_another_thread() {
    for (storage, _dir) in storages("threads") {
        let file = storage.open(Path::new("f"), OpenMode::Create).unwrap();
        let memory = pattern_of(2, 1 << 16);
        let registered = Some(RegisteredMemory { address: memory.as_ptr().addr(), len: memory.len() });
        let mut queue = storage.queue(&QueueConfig { depth: 4, registered });
        run_one(&mut *queue, op(OpKind::Write, &file, 0, Buffer::Borrowed(&memory))).result.unwrap();
        let engine = queue.engine();
        for _ in 0..3 {
            let file = file.clone();
            let (bytes, back) = std::thread::spawn(move || {
                let bytes = read_all(&mut *queue, &file, 0, 1 << 16).unwrap();
                sync(&mut *queue, &file).unwrap();
                (bytes, queue)
            })
            .join()
            .unwrap();
            assert!(bytes[..] == memory[..]);
            queue = back;
            assert_eq!(queue.engine(), engine);
            let reopened = storage.open(Path::new("f"), OpenMode::Read).unwrap();
            assert!(read_all(&mut *queue, &reopened, 0, 1 << 16).unwrap()[..] == memory[..]);
        }
    }
}

#[test]
fn removed_file_stays_readable() {
    for (storage, _dir) in storages("removed") {
        let mut queue = storage.queue(&QueueConfig::default());
        let file = storage.open(Path::new("f"), OpenMode::Create).unwrap();
        let bytes = pattern_of(3, 1 << 16);
        run_one(&mut *queue, op(OpKind::Write, &file, 0, Buffer::Borrowed(&bytes))).result.unwrap();
        storage.remove(Path::new("f")).unwrap();
        assert!(storage.list(Path::new("")).unwrap().is_empty());
        assert_eq!(storage.open(Path::new("f"), OpenMode::Read).unwrap_err().kind(), io::ErrorKind::NotFound);
        assert!(read_all(&mut *queue, &file, 0, 1 << 16).unwrap()[..] == bytes[..]);
    }
}

// -- features that a system may refuse
// ----------------------------------------------------------------------------------

/// Writes, syncs and reads back.
fn check_io(storage: &dyn Storage, queue: &mut dyn Queue, memory: &mut [u8]) {
    let file = storage.open(Path::new("io"), OpenMode::Create).unwrap();
    pattern(7, memory);
    let expected = memory.to_vec();
    run_one(queue, op(OpKind::Write, &file, 0, Buffer::Borrowed(memory))).result.unwrap();
    sync(queue, &file).unwrap();
    memory.fill(0);
    run_one(queue, op(OpKind::Read, &file, 0, Buffer::BorrowedMut(memory))).result.unwrap();
    assert!(memory == expected);
    storage.remove(Path::new("io")).unwrap();
}

#[test]
fn missing_io_uring_falls_back_to_posix_with_one_warning() {
    in_child("missing_io_uring_falls_back_to_posix_with_one_warning", || {
        forbid_io_uring();
        let dir = TempDir::new("seccomp");
        for choice in [IoEngine::Auto, IoEngine::Uring] {
            let lines = logged(|| {
                let storage = OsStorage::open(dir.path(), choice).unwrap();
                assert_eq!(storage.engine(), "posix");
                for _ in 0..3 {
                    let mut queue = storage.queue(&QueueConfig::default());
                    assert_eq!((queue.engine(), queue.is_registered()), ("posix", false));
                    check_io(&storage, &mut *queue, &mut AlignedBuf::zeroed(1 << 20));
                }
            });
            let warnings = warnings(&lines);
            assert_eq!(warnings.len(), 1, "{lines:?}");
            assert!(warnings[0].contains("Operation not permitted") && warnings[0].contains("slower"));
        }
        let lines = logged(|| drop(OsStorage::open(dir.path(), IoEngine::Posix).unwrap()));
        assert!(warnings(&lines).is_empty(), "posix was requested: {lines:?}");
    });
}

/// Makes the kernel refuse a ring to this thread, like the default seccomp filters of containers.
fn forbid_io_uring() {
    let statement = |code: u32, value: u32| libc::sock_filter { code: code as u16, jt: 0, jf: 0, k: value };
    let equal = |value: u32| libc::sock_filter { jf: 1, ..statement(libc::BPF_JMP | libc::BPF_JEQ, value) };
    let action = |value: u32| statement(libc::BPF_RET, value);
    let mut filter = [
        // The first word of the data is the number of the system call.
        statement(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0),
        equal(libc::SYS_io_uring_setup as u32),
        action(libc::SECCOMP_RET_ERRNO | libc::EPERM as u32),
        action(libc::SECCOMP_RET_ALLOW),
    ];
    let program = libc::sock_fprog { len: filter.len() as u16, filter: filter.as_mut_ptr() };
    // SAFETY: the program outlives the calls, which only change what the kernel allows this thread.
    unsafe {
        assert_eq!(libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
        assert_eq!(libc::prctl(libc::PR_SET_SECCOMP, libc::SECCOMP_MODE_FILTER, &program), 0);
    }
}

#[test]
fn memlock_limit_does_not_prevent_io_and_is_logged_once() {
    in_child("memlock_limit_does_not_prevent_io_and_is_logged_once", || {
        const LIMIT: u64 = 8 << 20;
        let dir = TempDir::new("memlock");
        let limit = libc::rlimit { rlim_cur: LIMIT, rlim_max: LIMIT };
        // SAFETY: the limit outlives the call.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_MEMLOCK, &limit) }, 0);
        // SAFETY: these have no arguments in memory.
        let unprivileged = unsafe { libc::getuid() } != 0 || {
            let user = Some(65534);
            std::os::unix::fs::chown(dir.path(), user, user).unwrap();
            // SAFETY: as above; this process does nothing else.
            unsafe { libc::setgid(65534) == 0 && libc::setuid(65534) == 0 }
        };
        assert!(unprivileged, "cannot drop root privileges");
        let mut logged_before = false;
        for len in [1 << 20, 64 << 20, 64 << 20] {
            let mut memory = AlignedBuf::zeroed(len);
            let (mut is_uring, mut is_registered) = (false, false);
            let lines = logged(|| {
                let storage = OsStorage::open(dir.path(), IoEngine::Auto).unwrap();
                let registered = Some(RegisteredMemory { address: memory.as_ptr().addr(), len });
                let mut queue = storage.queue(&QueueConfig { depth: 8, registered });
                (is_uring, is_registered) = (queue.engine() == "uring", queue.is_registered());
                eprintln!("{}: {} MiB under a limit of 8 MiB: {is_registered}", queue.engine(), len >> 20);
                check_io(&storage, &mut *queue, &mut memory);
            });
            // The first refusal is logged, for the whole process. A kernel that does not count pinned memory refuses
            // none.
            let refused = is_uring && !is_registered;
            let count = lines.iter().filter(|line| line.contains("RLIMIT_MEMLOCK")).count();
            assert_eq!(count, usize::from(refused && !logged_before), "{lines:?}");
            logged_before |= refused;
        }
    });
}

#[test]
fn full_disk_fails_allocate_without_changing_file() {
    const SIZE: u64 = 1 << 20;
    let mount_point = TempDir::new("full");
    let path = mount_point.path().to_owned();
    // A mount namespace belongs to a thread, and ends with it.
    let mounted = std::thread::spawn(move || {
        let target = std::ffi::CString::new(path.to_str().unwrap()).unwrap();
        // SAFETY: the strings end with a zero and outlive the calls.
        let mounted = unsafe {
            let (none, tmpfs, options) = (c"none".as_ptr(), c"tmpfs".as_ptr(), c"size=1m".as_ptr());
            let private = libc::MS_REC | libc::MS_PRIVATE;
            libc::unshare(libc::CLONE_NEWNS) == 0
                && libc::mount(none, c"/".as_ptr(), std::ptr::null(), private, std::ptr::null()) == 0
                && libc::mount(tmpfs, target.as_ptr(), tmpfs, 0, options.cast()) == 0
        };
        if !mounted {
            return false;
        }
        for engine in [IoEngine::Posix, IoEngine::Uring] {
            let storage = OsStorage::open(&path, engine).unwrap();
            assert_eq!(storage.space().unwrap().total, SIZE);
            let file = storage.open(Path::new("f"), OpenMode::Create).unwrap();
            storage.allocate(&file, SIZE / 2).unwrap();
            let free = storage.space().unwrap().free;
            let full = storage.allocate(&file, 2 * SIZE).unwrap_err();
            assert_eq!(full.kind(), io::ErrorKind::StorageFull);
            assert_eq!(storage.len(&file).unwrap(), SIZE / 2);
            assert_eq!(storage.space().unwrap().free, free, "a failed allocation is released");
            let mut queue = storage.queue(&QueueConfig::default());
            let buffer = Buffer::Owned(pattern_of(1, SIZE as usize));
            let full = run_one(&mut *queue, op(OpKind::Write, &file, SIZE / 2, buffer)).result.unwrap_err();
            assert_eq!(full.kind(), io::ErrorKind::StorageFull, "{}", queue.engine());
            drop((file, queue));
            storage.remove(Path::new("f")).unwrap();
            // The kernel may close the file of a finished io_uring request a moment later.
            let until = Instant::now() + Duration::from_secs(10);
            while storage.space().unwrap().free < SIZE && Instant::now() < until {
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(storage.space().unwrap().free, SIZE);
        }
        true
    });
    if !mounted.join().unwrap() {
        not_run("no permission to mount a small file system");
    }
}
