//! Histories with a crash after every single write, sync and change of a name.

use moontide_disk::SimulatedDisk;
use moontide_disk::samples::{Random, Sample};

use crate::full;
use crate::kinds::{Kind, kinds};
use crate::world::{Check, World};

const LENS: [usize; 8] = [0, 300, 3000, 4096, 5000, 9000, 30_000, 270_000];

/// A record whose length follows from its name, as all of it does.
fn sample(number: u64, version: u64) -> Sample {
    let len = LENS[Random(number * 8 + version).below(LENS.len() as u64) as usize];
    Sample::new(number, version, len)
}

/// What happens, all of it following from the seed. Ends when the power is gone.
fn play(world: &mut World, seed: u64) -> Check {
    let mut random = Random(seed);
    let mut next = 1;
    if !world.open()? {
        return Ok(());
    }
    for step in 0..14 {
        if world.disk.is_off() {
            return Ok(());
        }
        match (step, random.below(8)) {
            (0, _) | (_, 0..=3) => {
                let count = 1 + random.below(6);
                let mut batch: Vec<Sample> = (next..next + count).map(|number| sample(number, 1)).collect();
                // Sometimes a newer version of one of before, or one that may have been evicted.
                batch.push(sample(1 + random.below(next), 1 + random.below(3)));
                next += count;
                world.write(batch)?;
            }
            (_, 4 | 5) => {
                let (a, b) = (1 + random.below(next), 1 + random.below(next));
                world.remove(&[(a, 1), (b, 2)])?;
            }
            (_, 6) => world.evict(1 + random.below(150_000))?,
            _ => {
                if !world.open()? {
                    return Ok(());
                }
            }
        }
        // What is true before a crash must be true after it; a look now tells a mistake from a loss.
        if !world.disk.is_off() {
            world.check()?;
        }
    }
    Ok(())
}

/// One history with a crash after `crash_after` operations, and a second one while the tier is opened again.
pub(crate) fn crash(kind: Kind, seed: u64, chance: u64, crash_after: u64) -> Check {
    let disk = SimulatedDisk::new(seed << 32 | chance << 16 | crash_after);
    let mut world = World::new(kind, disk);
    world.disk.crash_after(crash_after);
    play(&mut world, seed)?;
    world.restart();
    if chance % 2 == 1 {
        world.disk.crash_after(crash_after % 5);
        world.open()?;
        world.restart();
    }
    if !world.open()? {
        return Err("the tier cannot be opened after the crash".into());
    }
    world.check()?;
    world.check_use(1_000_000)?;
    // And once more, without a crash.
    if !world.open()? {
        return Err("the tier cannot be opened again".into());
    }
    world.check()
}

/// Operations of a history without a crash.
pub(crate) fn operations(kind: Kind, seed: u64) -> Result<u64, String> {
    let mut world = World::new(kind, SimulatedDisk::new(seed));
    play(&mut world, seed)?;
    Ok(world.disk.operations())
}

#[test]
fn a_crash_after_every_operation_loses_and_revives_nothing() {
    let (seeds, chances) = if full() { (40, 8) } else { (3, 2) };
    for kind in kinds() {
        let mut crashes = 0;
        for seed in 0..seeds {
            let operations =
                operations(kind, seed).unwrap_or_else(|why| panic!("{}, seed {seed}: {why}", kind.name));
            for crash_after in 0..=operations {
                for chance in 0..chances {
                    crash(kind, seed, chance, crash_after).unwrap_or_else(|why| {
                        panic!(
                            "{}, seed {seed}, chance {chance}, crash after {crash_after}: {why}",
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
