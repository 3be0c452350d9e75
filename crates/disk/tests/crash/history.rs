//! Histories with a crash after every single write, sync and change of a name.

use moontide_disk::SimulatedDisk;
use moontide_disk::samples::SampleRecord;
use moontide_rt::SplitMix64;

use crate::full;
use crate::harness::{Check, CrashHarness};
use crate::kinds::{Kind, kinds};

const LENS: [usize; 8] = [0, 300, 3000, 4096, 5000, 9000, 30_000, 270_000];

/// Returns a record whose length and content follow from its id.
fn sample(number: u64, version: u64) -> SampleRecord {
    let len = LENS[SplitMix64::new(number * 8 + version).below(LENS.len() as u64) as usize];
    SampleRecord::new(number, version, len)
}

/// Runs a history that follows from the seed. Ends when the power is off.
fn run_history(harness: &mut CrashHarness, seed: u64) -> Check {
    let mut rng = SplitMix64::new(seed);
    let mut next = 1;
    if !harness.open()? {
        return Ok(());
    }
    for step in 0..14 {
        if harness.disk.is_off() {
            return Ok(());
        }
        match (step, rng.below(8)) {
            (0, _) | (_, 0..=3) => {
                let count = 1 + rng.below(6);
                let mut batch: Vec<SampleRecord> =
                    (next..next + count).map(|number| sample(number, 1)).collect();
                // Sometimes a newer version of an earlier object, or one that may have been evicted.
                batch.push(sample(1 + rng.below(next), 1 + rng.below(3)));
                next += count;
                harness.write(batch)?;
            }
            (_, 4 | 5) => {
                let (a, b) = (1 + rng.below(next), 1 + rng.below(next));
                harness.remove(&[(a, 1), (b, 2)])?;
            }
            (_, 6) => harness.evict(1 + rng.below(150_000))?,
            _ => {
                if !harness.open()? {
                    return Ok(());
                }
            }
        }
        // The invariants must hold before a crash, too: this distinguishes a bug from a loss by the crash.
        if !harness.disk.is_off() {
            harness.check()?;
        }
    }
    Ok(())
}

/// Runs one history with a crash after `crash_after` operations, and a second crash while the tier is opened again.
pub(crate) fn crash(kind: Kind, seed: u64, chance: u64, crash_after: u64) -> Check {
    let disk = SimulatedDisk::new(seed << 32 | chance << 16 | crash_after);
    let mut harness = CrashHarness::new(kind, disk);
    harness.disk.crash_after(crash_after);
    run_history(&mut harness, seed)?;
    harness.restart();
    if chance % 2 == 1 {
        harness.disk.crash_after(crash_after % 5);
        harness.open()?;
        harness.restart();
    }
    if !harness.open()? {
        return Err("cannot open the tier after the crash".into());
    }
    harness.check()?;
    harness.check_use(1_000_000)?;
    // Open again, without a crash.
    if !harness.open()? {
        return Err("cannot open the tier again".into());
    }
    harness.check()
}

/// Returns the number of operations of a history without a crash.
pub(crate) fn operations(kind: Kind, seed: u64) -> Result<u64, String> {
    let mut harness = CrashHarness::new(kind, SimulatedDisk::new(seed));
    run_history(&mut harness, seed)?;
    Ok(harness.disk.operations())
}

#[test]
fn crash_after_any_operation_loses_and_revives_no_record() {
    let (seeds, chances) = if full() { (40, 8) } else { (3, 2) };
    for kind in kinds() {
        let mut crashes = 0;
        for seed in 0..seeds {
            let operations =
                operations(kind, seed).unwrap_or_else(|error| panic!("{}, seed {seed}: {error}", kind.name));
            for crash_after in 0..=operations {
                for chance in 0..chances {
                    crash(kind, seed, chance, crash_after).unwrap_or_else(|error| {
                        panic!(
                            "{}, seed {seed}, chance {chance}, crash after {crash_after}: {error}",
                            kind.name
                        )
                    });
                    crashes += 1;
                }
            }
        }
        assert!(crashes > 200, "{}: only {crashes} crashes", kind.name);
    }
}
