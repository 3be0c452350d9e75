//! Several directories: records are spread over them, removals are durable in all, and one that fails or does not respond is
//! excluded for good.

use std::path::Path;

use moontide_disk::Faults;

use super::*;
use crate::disk::DiskDirectories;

const KIB: u64 = 1024;
const DIRECTORIES: usize = 3;
const RECORDS: u64 = 24;

/// Name of a file in each real directory, which is gone when the directory was emptied.
const CONTENT: &str = "0000000000000001.bucket";

/// Simulated disks, and real directories for the agreement which of them are valid.
struct Disks {
    base: PathBuf,
    disks: Mutex<Vec<SimulatedDisk>>,
    setup: Setup,
    shared: Arc<SharedState>,
}

impl Drop for Disks {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.base);
    }
}

impl Disks {
    fn new(setup: Setup) -> Disks {
        Disks::with_count(DIRECTORIES, setup)
    }

    fn with_count(count: usize, setup: Setup) -> Disks {
        static NUMBER: AtomicU64 = AtomicU64::new(0);
        let number = NUMBER.fetch_add(1, Ordering::SeqCst);
        let base = std::env::temp_dir().join(format!("moontide-devices-{}-{number}", std::process::id()));
        let disks = (0..count as u64).map(SimulatedDisk::new).collect();
        Disks { base, disks: Mutex::new(disks), setup, shared: Arc::default() }
    }

    fn dir(&self, number: usize) -> PathBuf {
        self.base.join(number.to_string())
    }

    /// Starts a node on these directories. A directory that it empties gets a new disk.
    fn start_on(&self, numbers: &[usize]) -> Arc<Harness> {
        let dirs: Vec<PathBuf> = numbers.iter().map(|&number| self.dir(number)).collect();
        let mut next = self.shared.epochs.fetch_add(100, Ordering::SeqCst);
        let next = std::cell::RefCell::new(&mut next);
        let random = || {
            **next.borrow_mut() += 1;
            Ok(**next.borrow())
        };
        let opened = DiskDirectories::open(&dirs, 7, self.setup.backend, Some(NodeId(1)), random).unwrap();
        let mut disks = self.disks.lock();
        for &number in numbers {
            let content = self.dir(number).join(CONTENT);
            if !content.exists() {
                disks[number] = SimulatedDisk::new(number as u64);
                std::fs::write(content, "").unwrap();
            }
        }
        let used = numbers.iter().map(|&number| (self.dir(number), disks[number].clone())).collect();
        let (members, shared) = (opened.members, Arc::clone(&self.shared));
        Harness::on_several(used, members, self.setup, shared).unwrap()
    }

    fn start(&self) -> Arc<Harness> {
        let all: Vec<usize> = (0..self.disks.lock().len()).collect();
        self.start_on(&all)
    }

    fn set_faults(&self, number: usize, faults: Faults) {
        self.disks.lock()[number].set_faults(faults);
    }

    /// Ends a node by a crash.
    fn crash(&self, harness: &Harness) {
        let disks = self.disks.lock();
        disks.iter().for_each(|disk| disk.crash_after(0));
        harness.end();
        for disk in disks.iter() {
            disk.restart();
            disk.set_faults(Faults::default());
        }
    }
}

impl Harness {
    /// Stores records at once, so that all directories get some.
    fn store_all(&self) -> Vec<RecordId> {
        let slots = || (0..).map(SlotId);
        let names: Vec<RecordId> =
            (0..RECORDS).zip(slots()).map(|(number, slot)| self.put(slot, number, 20 * KIB)).collect();
        let commands: Vec<u64> =
            names.iter().zip(slots()).map(|(name, slot)| self.offload(*name, slot)).collect();
        commands.into_iter().for_each(|command| assert_eq!(self.outcome(command), Ok(())));
        names
    }

    fn on_device(&self, names: &[RecordId], device: usize) -> Vec<RecordId> {
        let backend = &self.tier.devices[device].backend;
        names.iter().copied().filter(|name| backend.contains(name)).collect()
    }

    fn wait_until_idle(&self) {
        let until = Instant::now() + HANG_TIMEOUT;
        while !self.tier.is_idle() {
            assert!(Instant::now() < until, "a job does not end");
            moontide_rt::thread::sleep(Duration::from_millis(1));
        }
    }

    fn wait_until_excluded(&self, device: usize) {
        let until = Instant::now() + HANG_TIMEOUT;
        // The last step of an exclusion.
        while self.tier.devices[device].open_offloads.lock().is_some() {
            assert!(Instant::now() < until, "directory {device} is not excluded");
            moontide_rt::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn setup(backend: BackendKind) -> Setup {
    Setup {
        backend,
        slots: 64,
        units: 64,
        staging_bytes: 8 << 20,
        exclude_after: Duration::from_millis(60),
        ..Setup::default()
    }
}

fn sorted(mut names: Vec<RecordId>) -> Vec<RecordId> {
    names.sort_unstable();
    names
}

#[test]
fn records_are_spread_over_directories_and_found_after_crash() {
    for backend in BackendKind::ALL {
        let disks = Disks::new(setup(backend));
        let harness = disks.start();
        let names = harness.store_all();
        for device in 0..DIRECTORIES {
            assert!(!harness.on_device(&names, device).is_empty(), "{backend}: directory {device} is empty");
        }
        // Of one batch, all directories load their part.
        let staged = harness.tier.stage(&read_ops(&names), Instant::now() + HANG_TIMEOUT);
        staged.iter().zip(&names).for_each(|(pin, name)| harness.check(*name, pin.as_ref().unwrap()));
        drop(staged);
        // A record that is written again stays where it is.
        let again = harness.offload(names[0], SlotId(0));
        assert_eq!(harness.outcome(again), Ok(()));
        let copies = (0..DIRECTORIES).flat_map(|device| harness.on_device(&names, device)).count();
        assert_eq!(copies as u64, RECORDS);
        let (removed, kept) = names.split_at(8);
        let commands: Vec<u64> = removed.iter().map(|name| harness.remove(*name)).collect();
        commands.into_iter().for_each(|command| assert_eq!(harness.outcome(command), Ok(())));
        harness.check_sum();
        disks.crash(&harness);
        let harness = disks.start();
        assert_eq!(sorted(harness.inventory(SessionId(6))), sorted(kept.to_vec()), "{backend}");
        kept.iter().for_each(|name| harness.fetch(*name).unwrap());
        harness.end();
    }
}

/// Removes records and crashes. Returns whether none of them is found afterwards.
pub(super) fn removed_in_all_directories(mutation: Option<Mutation>) -> bool {
    let disks = Disks::new(Setup { mutation, ..setup(BackendKind::Bucket) });
    let harness = disks.start();
    let names = harness.store_all();
    let commands: Vec<u64> = names.iter().map(|name| harness.remove(*name)).collect();
    commands.into_iter().for_each(|command| assert_eq!(harness.outcome(command), Ok(())));
    disks.crash(&harness);
    let harness = disks.start();
    let found = harness.inventory(SessionId(6));
    harness.end();
    found.is_empty()
}

#[test]
fn removal_is_durable_in_all_directories_before_reply() {
    assert!(removed_in_all_directories(None));
}

/// A directory fails all removals until it is excluded. Returns whether removed records stay away after a restart with all
/// directories.
pub(super) fn failing_directory_is_excluded(
    failing: usize,
    faults: Faults,
    mutation: Option<Mutation>,
) -> bool {
    let disks = Disks::new(Setup { mutation, ..setup(BackendKind::Bucket) });
    let harness = disks.start();
    let names = harness.store_all();
    let there = harness.on_device(&names, failing);
    disks.set_faults(failing, faults);
    assert_eq!(
        harness.outcome(harness.remove(there[0])),
        Err(ErrorCode::DiskError),
        "not durable everywhere"
    );
    harness.wait_until_excluded(failing);
    harness.flush();
    let gone: Vec<(ObjectId, Epoch)> = harness.log.entries.lock().iter().fold(vec![], |mut gone, entry| {
        if let LogEntry::Gone { versions, .. } = entry {
            gone.extend(versions);
        }
        gone
    });
    let is_gone = |name: &RecordId| gone.contains(&(name.id, name.version));
    assert!(there[1..].iter().all(is_gone), "the masters know that its records are gone");
    assert!(names.iter().filter(|name| !there.contains(name)).all(|name| !is_gone(name)));
    // The others work: removals are durable, writes go to them, their records are served.
    assert_eq!(harness.outcome(harness.remove(there[1])), Ok(()));
    let new = harness.store(SlotId(40), 40, 20 * KIB);
    assert!(harness.on_device(&[new], failing).is_empty());
    let kept: Vec<RecordId> = names.iter().copied().filter(|name| !there.contains(name)).collect();
    kept.iter().for_each(|name| harness.fetch(*name).unwrap());
    assert_eq!(harness.fetch(there[2]), Err(ErrorCode::Gone));
    disks.crash(&harness);
    let harness = disks.start();
    let found = harness.inventory(SessionId(6));
    harness.end();
    let expected = kept.iter().chain([&new]).all(|name| found.contains(name));
    assert!(expected, "{} of {}", found.len(), kept.len() + 1);
    !found.contains(&there[0]) && !found.contains(&there[1])
}

#[test]
fn directory_whose_removals_fail_is_excluded_and_emptied_at_the_next_start() {
    for failing in 0..DIRECTORIES {
        let faults = Faults { sync_error_permille: 1000, write_error_permille: 1000, ..Faults::default() };
        assert!(failing_directory_is_excluded(failing, faults, None), "directory {failing}");
    }
    let full = Faults { no_space_permille: 1000, ..Faults::default() };
    assert!(failing_directory_is_excluded(1, full, None));
}

#[test]
fn directory_that_does_not_respond_is_excluded() {
    let disks = Disks::new(setup(BackendKind::Bucket));
    let harness = disks.start();
    let names = harness.store_all();
    let there = harness.on_device(&names, 1);
    disks.set_faults(1, Faults { latency: Some(Duration::from_secs(5)), ..Faults::default() });
    let began = Instant::now();
    let removal = harness.remove(there[0]);
    let write = (harness.put(SlotId(40), 40, 20 * KIB), SlotId(40));
    let slow = harness.tier.stage(&read_ops(&there[1..2]), Instant::now() + Duration::from_millis(100));
    assert_eq!(slow[0].as_ref().map(|_| ()), Err(&ErrorCode::DeadlineExceeded));
    assert_eq!(harness.outcome(removal), Ok(()), "it is not waited for");
    assert_eq!(harness.outcome(harness.offload(write.0, write.1)), Ok(()));
    // An inventory ends without it.
    let kept: Vec<RecordId> = names.iter().copied().filter(|name| !there.contains(name)).collect();
    let found = harness.inventory(SessionId(6));
    assert!(kept.iter().all(|name| found.contains(name)) && there.iter().all(|name| !found.contains(name)));
    kept.iter().for_each(|name| harness.fetch(*name).unwrap());
    harness.end();
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}: an operation was waited for", began.elapsed());
}

/// The first two of five directories fail, and the others are busy all the time.
#[test]
fn several_directories_are_excluded_at_once_under_load() {
    let disks = Disks::with_count(5, setup(BackendKind::Bucket));
    let harness = disks.start();
    let names = harness.store_all();
    let bad: Vec<RecordId> = [0, 1].iter().flat_map(|&device| harness.on_device(&names, device)).collect();
    let good: Vec<RecordId> = names.iter().copied().filter(|name| !bad.contains(name)).collect();
    // Each operation takes a while, so that one runs at each check.
    let busy = Faults { latency: Some(Duration::from_millis(5)), ..Faults::default() };
    (2..5).for_each(|number| disks.set_faults(number, busy));
    let faults = Faults { sync_error_permille: 1000, write_error_permille: 1000, ..Faults::default() };
    (0..2).for_each(|number| disks.set_faults(number, faults));
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                while !stop.load(Ordering::SeqCst) {
                    good.iter().for_each(|name| harness.fetch(*name).unwrap());
                    harness.tier.cache.evict_one();
                }
            });
        }
        assert_eq!(harness.outcome(harness.remove(bad[0])), Err(ErrorCode::DiskError));
        harness.wait_until_excluded(0);
        harness.wait_until_excluded(1);
        stop.store(true, Ordering::SeqCst);
    });
    assert_eq!(harness.outcome(harness.remove(bad[0])), Ok(()));
    disks.crash(&harness);
    let harness = disks.start();
    assert_eq!(sorted(harness.inventory(SessionId(6))), sorted(good));
    harness.end();
}

#[test]
fn one_unreadable_record_excludes_no_directory() {
    let disks = Disks::new(setup(BackendKind::Bucket));
    let harness = disks.start();
    let names = harness.store_all();
    let there = harness.on_device(&names, 1);
    disks.set_faults(1, Faults { read_error_permille: 1000, ..Faults::default() });
    let until = Instant::now() + 4 * harness.setup.exclude_after;
    while Instant::now() < until {
        assert_eq!(harness.fetch(there[0]), Err(ErrorCode::DiskError));
        moontide_rt::thread::sleep(Duration::from_millis(5));
    }
    assert!(!harness.tier.devices[1].is_excluded());
    // Another one, too.
    let until = Instant::now() + HANG_TIMEOUT;
    while !harness.tier.devices[1].is_excluded() {
        assert!(Instant::now() < until, "the directory is not excluded");
        let _ = harness.fetch(there[0]);
        let _ = harness.fetch(there[1]);
        moontide_rt::thread::sleep(Duration::from_millis(5));
    }
    harness.end();
}

/// A write that hangs is moved to another directory, which replies once; a record whose load hung can be loaded there.
#[test]
fn jobs_of_directory_that_hangs_are_done_by_others() {
    let disks = Disks::new(setup(BackendKind::Bucket));
    let harness = disks.start();
    let names = harness.store_all();
    let there = harness.on_device(&names, 2);
    disks.set_faults(2, Faults { latency: Some(Duration::from_millis(1500)), ..Faults::default() });
    let slots: Vec<SlotId> = (30..42).map(SlotId).collect();
    let new: Vec<RecordId> = slots.iter().map(|slot| harness.put(*slot, slot.0.into(), 20 * KIB)).collect();
    let commands: Vec<u64> =
        new.iter().zip(&slots).map(|(name, slot)| harness.offload(*name, *slot)).collect();
    let again = names.iter().position(|name| *name == there[0]).unwrap() as u32;
    let slow = harness.tier.stage(&read_ops(&there[..1]), Instant::now() + Duration::from_millis(50));
    assert_eq!(slow[0].as_ref().map(|_| ()), Err(&ErrorCode::DeadlineExceeded));
    for command in &commands {
        assert_eq!(harness.outcome(*command), Ok(()));
    }
    harness.wait_until_excluded(2);
    harness.wait_until_idle();
    assert_eq!(harness.outcome(harness.offload(there[0], SlotId(again))), Ok(()), "its slot has it still");
    let began = Instant::now();
    harness.fetch(there[0]).unwrap();
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    // The operations that hung end, and say nothing more.
    moontide_rt::thread::sleep(Duration::from_millis(1600));
    harness.flush();
    for command in commands {
        let entries = harness.log.entries.lock();
        let is_final = |entry: &&LogEntry| {
            matches!(entry, LogEntry::Result(_, result)
                if result.command_id == command && result.status != CommandStatus::Accepted)
        };
        assert_eq!(entries.iter().filter(is_final).count(), 1, "one reply");
    }
    harness.check_sum();
    harness.end();
}

#[test]
fn directory_is_not_excluded_if_all_fail() {
    let disks = Disks::new(setup(BackendKind::Bucket));
    let harness = disks.start();
    let names = harness.store_all();
    let faults = Faults { sync_error_permille: 1000, ..Faults::default() };
    (0..DIRECTORIES).for_each(|number| disks.set_faults(number, faults));
    assert_eq!(harness.outcome(harness.remove(names[0])), Err(ErrorCode::DiskError));
    moontide_rt::thread::sleep(4 * harness.setup.exclude_after);
    assert!(harness.tier.devices.iter().all(|device| !device.is_excluded()));
    (0..DIRECTORIES).for_each(|number| disks.set_faults(number, Faults::default()));
    harness.wait_until_idle();
    disks.crash(&harness);
    let harness = disks.start();
    assert_eq!(sorted(harness.inventory(SessionId(6))), sorted(names[1..].to_vec()));
    harness.end();
}

#[test]
fn directory_that_was_left_out_returns_empty() {
    let disks = Disks::new(setup(BackendKind::Bucket));
    let harness = disks.start();
    let names = harness.store_all();
    let there = harness.on_device(&names, 2);
    disks.crash(&harness);
    let harness = disks.start_on(&[0, 1]);
    assert_eq!(harness.outcome(harness.remove(there[0])), Ok(()));
    disks.crash(&harness);
    let harness = disks.start();
    let found = harness.inventory(SessionId(6));
    assert_eq!(found.len(), names.len() - there.len());
    assert!(there.iter().all(|name| !found.contains(name)));
    assert!(Path::new(&disks.dir(2)).join(CONTENT).exists(), "it is used again");
    harness.end();
}
