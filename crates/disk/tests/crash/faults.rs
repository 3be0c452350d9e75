//! Histories on a disk that fails one operation in ten.

use moontide_disk::samples::{Random, Sample};
use moontide_disk::{Faults, SimulatedDisk};

use crate::full;
use crate::kinds::{Kind, kinds};
use crate::world::{Check, World};

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
};

/// Openings that fail one after the other before the test gives up.
const ATTEMPTS_MAX: usize = 200;

fn open(world: &mut World) -> Check {
    for _ in 0..ATTEMPTS_MAX {
        if world.open()? {
            return Ok(());
        }
    }
    Err("it cannot be opened".into())
}

fn play(kind: Kind, seed: u64) -> Check {
    let mut world = World::new(kind, SimulatedDisk::new(seed));
    let mut random = Random(seed);
    open(&mut world)?;
    world.disk.set_faults(FAULTS);
    let mut next = 1;
    for _ in 0..25 {
        match random.below(10) {
            0..=4 => {
                let count = 1 + random.below(5);
                let lens = [0, 500, 4096, 9000, 40_000];
                let batch = (next..next + count).map(|n| Sample::new(n, 1, lens[random.below(5) as usize]));
                let batch = batch.collect();
                next += count;
                world.write(batch)?;
            }
            5 | 6 => world.remove(&[(1 + random.below(next), 1)])?,
            7 => world.evict(1 + random.below(50_000))?,
            8 => open(&mut world)?,
            _ => {
                world.restart();
                open(&mut world)?;
            }
        }
        world.check_among_faults()?;
    }
    world.disk.set_faults(Faults::default());
    world.restart();
    if !world.open()? {
        return Err("it cannot be opened without faults".into());
    }
    world.check()?;
    world.check_use(1_000_000)
}

#[test]
fn a_failing_disk_costs_time_but_no_record() {
    let seeds = if full() { 5000 } else { 200 };
    for kind in kinds() {
        for seed in 0..seeds {
            play(kind, seed).unwrap_or_else(|why| panic!("{}, seed {seed}: {why}", kind.name));
        }
    }
}
