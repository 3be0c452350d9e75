//! The group against a naive model: random sequences of everything that clients, nodes, operators and crashes do.
//!
//! A sequence goes to the [`Group`](moontide_meta::Group) and to plain models beside it: a list of words per node, the
//! puts with what was acknowledged of them, the leases that readers hold. After every step the group's own audit and
//! the models' checks must hold. A failing sequence is shrunk and printed with its seed.
//!
//! `MOONTIDE_MODEL_CASES=100000 cargo test -p moontide-meta --release --test model` runs more sequences than the
//! usual 2,000. What was found this way stands in `regressions` below.

#[path = "model/command.rs"]
mod command;

#[path = "model/node.rs"]
mod node;

#[path = "model/disk.rs"]
mod disk;

#[path = "model/world.rs"]
mod world;

#[path = "model/clients.rs"]
mod clients;

#[path = "model/cluster.rs"]
mod cluster;

#[path = "model/check.rs"]
mod check;

#[path = "model/watcher.rs"]
mod watcher;

#[path = "model/regressions.rs"]
mod regressions;

use std::cell::Cell;

use command::{Command, command, disk_command};
use moontide_meta::{GroupStats, PlacementKind};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestError, TestRunner};
use world::World;

const CASES: u32 = 2_000;

/// The answer is what the last master counted.
fn run(placement: PlacementKind, commands: &[Command]) -> Result<GroupStats, String> {
    let mut world = World::new(placement);
    // Most of a sequence is about a cluster that runs.
    for node in 0..4 {
        world.step(&Command::Mount { node, segments: 0 })?;
    }
    for (at, command) in commands.iter().enumerate() {
        world.step(command).map_err(|what| format!("step {at}, {command:?}: {what}"))?;
    }
    world.last_watch()?;
    Ok(*world.group.stats())
}

#[test]
fn group_is_as_the_model_says() {
    let cases =
        std::env::var("MOONTIDE_MODEL_CASES").ok().map(|cases| cases.parse().expect("a number of cases"));
    let config = Config {
        cases: cases.unwrap_or(CASES),
        failure_persistence: None,
        max_shrink_iters: 20_000,
        ..Config::default()
    };
    let placement = prop::sample::select(PlacementKind::ALL.to_vec());
    // Half of the sequences are about everything, half about disks.
    let commands =
        prop_oneof![prop::collection::vec(command(), 1..140), prop::collection::vec(disk_command(), 1..140)];
    let sequence = (placement, commands);
    let seen: [Cell<u64>; 6] = Default::default();
    let tested = TestRunner::new(config).run(&sequence, |(placement, commands)| {
        let stats = run(placement, &commands).map_err(TestCaseError::fail)?;
        let counts = [
            stats.offloads_ordered,
            stats.offloaded_objects,
            stats.demoted_objects,
            stats.promoted_objects,
            stats.recovered_objects,
            stats.disk_evicted,
        ];
        for (sum, count) in seen.iter().zip(counts) {
            sum.set(sum.get() + count);
        }
        Ok(())
    });
    match tested {
        // Sequences in which nothing gets to disk and back would show nothing.
        Ok(()) => assert!(seen.iter().all(|sum| sum.get() > 0), "{seen:?}"),
        Err(TestError::Fail(why, (placement, commands))) => {
            let commands: Vec<String> = commands.iter().map(|command| format!("    {command:?},")).collect();
            panic!("{why}\n  with {placement:?} and\n{}", commands.join("\n"));
        }
        Err(TestError::Abort(why)) => panic!("{why}"),
    }
}
