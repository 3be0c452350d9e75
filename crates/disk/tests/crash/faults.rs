//! Histories on a disk that fails one operation in ten.

use moontide_disk::samples::SampleRecord;
use moontide_disk::{Faults, SimulatedDisk, Times};
use moontide_rt::SplitMix64;

use crate::full;
use crate::harness::{Check, CrashHarness};
use crate::kinds::{Kind, kinds};

const FAULTS: Faults = Faults {
    read_error_permille: 50,
    write_error_permille: 30,
    torn_write_permille: 40,
    sync_error_permille: 50,
    name_error_permille: 30,
    no_space_permille: 40,
    flipped_read_permille: 50,
    short_permille: 200,
    capacity: None,
    latency: None,
    times: Times::NONE,
};

/// Maximum number of consecutive failed opens.
const ATTEMPTS_MAX: usize = 200;

fn open(harness: &mut CrashHarness) -> Check {
    for _ in 0..ATTEMPTS_MAX {
        if harness.open()? {
            return Ok(());
        }
    }
    Err("cannot open the tier".into())
}

fn run_seed(kind: Kind, seed: u64) -> Check {
    let mut harness = CrashHarness::new(kind, SimulatedDisk::new(seed));
    let mut rng = SplitMix64::new(seed);
    open(&mut harness)?;
    harness.disk.set_faults(FAULTS);
    let mut next = 1;
    for _ in 0..25 {
        match rng.below(10) {
            0..=4 => {
                let count = 1 + rng.below(5);
                let lens = [0, 500, 4096, 9000, 40_000];
                let batch =
                    (next..next + count).map(|n| SampleRecord::new(n, 1, lens[rng.below(5) as usize]));
                let batch = batch.collect();
                next += count;
                harness.write(batch)?;
            }
            5 | 6 => harness.remove(&[(1 + rng.below(next), 1)])?,
            7 => harness.evict(1 + rng.below(50_000))?,
            8 => open(&mut harness)?,
            _ => {
                harness.restart();
                open(&mut harness)?;
            }
        }
        harness.check_among_faults()?;
    }
    harness.disk.set_faults(Faults::default());
    harness.restart();
    if !harness.open()? {
        return Err("cannot open the tier without faults".into());
    }
    harness.check()?;
    harness.check_use(1_000_000)
}

#[test]
fn random_disk_faults_lose_no_acknowledged_record() {
    let seeds = if full() { 5000 } else { 200 };
    for kind in kinds() {
        for seed in 0..seeds {
            run_seed(kind, seed).unwrap_or_else(|error| panic!("{}, seed {seed}: {error}", kind.name));
        }
    }
}
