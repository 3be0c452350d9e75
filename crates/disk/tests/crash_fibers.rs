//! The crash matrix with several threads at a time: backends on the simulated disk in a simulated world, while threads
//! write, read, remove, evict and scan. Compiled with `--cfg sim`; `cargo xtask ci --only fibers` runs it.
//!
//! Operations of the disk take drawn times, from microseconds to a stall of a minute; syncs are slow or fail, writes are
//! torn, the disk is full, threads stall, and the power fails at any step, also during recovery. `crash_fibers/oracle.rs`
//! defines the invariants.
//!
//! A failure prints the seed. `MOONTIDE_SEED=<n>` runs one seed, `MOONTIDE_SEEDS=<n>` as many; `MOONTIDE_TESTS=full` runs
//! 5000.
#![cfg(sim)]

#[path = "crash_fibers/history.rs"]
mod history;
#[path = "crash/kinds.rs"]
#[expect(dead_code, reason = "the other crash matrix uses all of it")]
mod kinds;
#[path = "crash_fibers/oracle.rs"]
mod oracle;

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use history::{Stats, run_seed};
use kinds::{kind, kinds};
use moontide_disk::mutation::Mutation;
use moontide_disk::samples::SampleRecord;
use moontide_disk::{Backend, Faults, OpenMode, QueueConfig, SimulatedDisk, Storage, Times, WriteError};
use moontide_rt::sim::{self, FailureKind, WorldConfig};
use moontide_rt::thread;
use moontide_rt::time::Instant;

/// Seeds of each backend in CI.
const SEEDS: u64 = 300;

/// Seeds within which a mutation must be detected.
const MUTATION_SEEDS: u64 = 300;

/// Returns the seeds to run.
fn seeds() -> std::ops::Range<u64> {
    let number = |name| std::env::var(name).ok().map(|text| text.parse().expect("a number"));
    match (number("MOONTIDE_SEED"), number("MOONTIDE_SEEDS")) {
        (Some(seed), _) => seed..seed + 1,
        (None, Some(count)) => 0..count,
        (None, None) if std::env::var_os("MOONTIDE_TESTS").is_some_and(|value| value == "full") => 0..5000,
        (None, None) => 0..SEEDS,
    }
}

/// CPU time of the process.
fn cpu_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ProcessCPUTime);
    Duration::new(time.tv_sec as u64, time.tv_nsec as u32)
}

/// Runs all seeds of a backend, prints what they did, and checks that they did enough to mean something.
fn run_seeds(name: &str) {
    let (seeds, cpu) = (seeds(), cpu_time());
    let count = seeds.end - seeds.start;
    let mut total = Stats::default();
    for seed in seeds {
        let report = run_seed(kind(name), seed, None).unwrap_or_else(|failure| panic!("{name}: {failure}"));
        total.add(&report.value);
        total.virtual_time += report.elapsed;
        total.steps += report.steps;
    }
    let cpu = cpu_time() - cpu;
    let speed = total.virtual_time.as_secs_f64() / cpu.as_secs_f64();
    println!("{name}: {count} seeds, {speed:.0} virtual seconds per CPU second ({cpu:.1?}): {total:#?}");
    if count >= SEEDS {
        total.assert_enough(count);
    }
}

#[test]
fn bucket_backend_is_correct_with_concurrent_threads() {
    run_seeds("bucket");
}

#[test]
fn bucket_backend_with_lru_is_correct_with_concurrent_threads() {
    run_seeds("bucket-lru");
}

#[test]
fn file_backend_is_correct_with_concurrent_threads() {
    run_seeds("file");
}

#[test]
fn offset_backend_is_correct_with_concurrent_threads() {
    run_seeds("offset");
}

#[test]
fn equal_seeds_give_equal_histories() {
    for kind in kinds() {
        for seed in 0..10 {
            let run =
                || run_seed(kind, seed, None).unwrap_or_else(|failure| panic!("{}: {failure}", kind.name));
            let (first, again) = (run(), run());
            assert_eq!(first.value, again.value, "{}, seed {seed}", kind.name);
            assert_eq!(
                (first.trace, first.steps, first.elapsed),
                (again.trace, again.steps, again.elapsed),
                "{}, seed {seed}",
                kind.name
            );
        }
    }
}

/// Runs seeds with a mutation until one fails with one of these messages.
fn assert_detected(mutation: Mutation, name: &str, expected: &[&str]) {
    for seed in 0..MUTATION_SEEDS {
        let Err(failure) = run_seed(kind(name), seed, Some(mutation)) else { continue };
        let FailureKind::Panic { message, .. } = &failure.kind else { panic!("{mutation:?}: {failure}") };
        assert!(
            expected.iter().any(|expected| message.contains(expected)),
            "{mutation:?} in {name} is detected, but as: {failure}"
        );
        println!("{mutation:?} in {name}: detected by seed {seed}: {message}");
        return;
    }
    panic!("{mutation:?} in {name} is not detected by {MUTATION_SEEDS} seeds");
}

#[test]
fn mutation_unsynced_tombstone_is_detected_in_each_backend() {
    for kind in kinds() {
        assert_detected(Mutation::TombstoneUnsynced, kind.name, &["after its removal"]);
    }
}

#[test]
fn mutation_unsynced_name_is_detected() {
    for name in ["bucket", "file"] {
        assert_detected(Mutation::NameUnsynced, name, &["is lost"]);
    }
}

#[test]
fn mutation_rename_before_sync_is_detected() {
    for name in ["bucket", "file"] {
        assert_detected(Mutation::RenameBeforeSync, name, &["is lost", "cannot be read", "found twice"]);
    }
}

#[test]
fn mutation_unsynced_entry_is_detected() {
    assert_detected(Mutation::EntriesUnsynced, "offset", &["is lost"]);
}

#[test]
fn mutation_unchecked_page_digests_is_detected() {
    assert_detected(Mutation::PagesBelieved, "bucket", &["wrong bytes"]);
}

/// Failure: a reader and a scan found a record after its removal had been answered. Cause: the bucket backend inserted a
/// written record into its index and looked for a tombstone only then; a removal that was answered before the insertion
/// had searched the index in vain. Fix: the backend looks for the tombstone under the lock of the insertion.
#[test]
fn record_whose_write_ends_after_its_removal_is_never_found() {
    for kind in kinds() {
        let mut removed_first = 0;
        for seed in 0..200 {
            let config = WorldConfig { switch_per_million: 200_000, ..WorldConfig::new(seed) };
            let report = sim::run(&config, move || {
                let disk = SimulatedDisk::new(seed);
                let storage: Arc<dyn Storage> = Arc::new(disk.clone());
                let queue = &mut *disk.queue(&QueueConfig::default());
                let (backend, _) = (kind.open)(storage, queue, &mut |_| ()).unwrap();
                let backend: Arc<dyn Backend> = backend.into();
                let times = Times { usual_max: Duration::from_micros(200), ..Times::NONE };
                disk.set_faults(Faults { times, ..Faults::default() });
                let sample = SampleRecord::new(1, 1, 5000);
                let name = sample.name();
                let writer = thread::spawn({
                    let (backend, disk) = (backend.clone(), disk.clone());
                    let write =
                        move || backend.write(&mut *disk.queue(&QueueConfig::default()), &[sample.source()]);
                    move || write()[0]
                });
                backend.remove(queue, &[(name.id, name.version)]).unwrap();
                let removed_first = !writer.is_finished();
                while !writer.is_finished() {
                    assert!(!backend.contains(&name), "found after its removal");
                    thread::yield_now();
                }
                assert!(!backend.contains(&name), "found after its removal and its write");
                assert!(matches!(writer.join().unwrap(), Ok(()) | Err(WriteError::Removed)));
                removed_first
            });
            let report = report.unwrap_or_else(|failure| panic!("{}: {failure}", kind.name));
            removed_first += u32::from(report.value);
        }
        assert!(removed_first > 5, "{}: the removal was first in {removed_first} worlds", kind.name);
    }
}

#[test]
fn effect_of_a_slow_operation_is_visible_before_it_ends() {
    let mut early = 0;
    for seed in 0..50 {
        let report = sim::run(&WorldConfig::new(seed), move || {
            let disk = SimulatedDisk::new(seed);
            let times = Times { stall_permille: 1000, ..Times::NONE };
            disk.set_faults(Faults { times, ..Faults::default() });
            let (start, disk) = (Instant::now(), Arc::new(disk));
            let creator = thread::spawn({
                let disk = disk.clone();
                move || drop(disk.open(Path::new("f"), OpenMode::Create).unwrap())
            });
            while disk.files().is_empty() {
                thread::sleep(Duration::from_millis(1));
            }
            let seen = start.elapsed();
            creator.join().unwrap();
            let ended = start.elapsed();
            assert!(ended >= Duration::from_millis(50), "a stall of {ended:?}");
            assert_eq!(disk.counters().stalls, 1);
            ended - seen
        });
        let left = report.unwrap_or_else(|failure| panic!("{failure}")).value;
        early += u32::from(left > Duration::from_millis(10));
    }
    assert!(early > 25, "the effect was early in {early} of 50 worlds");
}
