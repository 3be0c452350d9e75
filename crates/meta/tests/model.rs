//! The group against a naive model: random sequences of all actions of clients, nodes, operators and crashes.
//!
//! The test applies a sequence to the [`Group`](moontide_meta::Group) and to simple models: a list of words per node,
//! the puts with their acknowledgements, the leases of readers. After every step the group's audit and the checks of
//! the models must pass. A failing sequence is shrunk and printed with its seed.
//!
//! `MOONTIDE_CASES=100000 cargo test -p moontide-meta --release --test model` runs more sequences than the default of
//! 2,000. Sequences that failed once are in `regressions`.

#[path = "model/command.rs"]
mod command;

#[path = "model/node.rs"]
mod node;

#[path = "model/disk.rs"]
mod disk;

#[path = "model/copies.rs"]
mod copies;

#[path = "model/harness.rs"]
mod harness;

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
use harness::ModelHarness;
use moontide_meta::{GroupStats, OffloadTrigger, PlacementKind};
use proptest::prelude::*;
use proptest::test_runner::{Config, TestCaseError, TestError, TestRunner};

const CASES: u32 = 2_000;

/// Runs a sequence with the default settings.
fn run(placement: PlacementKind, commands: &[Command]) -> Result<GroupStats, String> {
    run_with(placement, OffloadTrigger::Evict, commands)
}

/// Runs a sequence. Returns the counters of the last master.
fn run_with(
    placement: PlacementKind,
    offload: OffloadTrigger,
    commands: &[Command],
) -> Result<GroupStats, String> {
    let mut harness = ModelHarness::new(placement, offload);
    // Most sequences need a running cluster.
    for node in 0..4 {
        harness.step(&Command::Mount { node, segments: 0 })?;
    }
    for (at, command) in commands.iter().enumerate() {
        // A master changes the rule with the traffic.
        harness.group.set_eviction_rule(at as u64 / 5);
        harness.step(command).map_err(|error| format!("step {at}, {command:?}: {error}"))?;
    }
    harness.check_final_invalidations()?;
    Ok(*harness.group.stats())
}

#[test]
fn group_matches_model() {
    let cases =
        std::env::var("MOONTIDE_CASES").ok().map(|cases| cases.parse().expect("MOONTIDE_CASES is a number"));
    let config = Config {
        cases: cases.unwrap_or(CASES),
        failure_persistence: None,
        max_shrink_iters: 20_000,
        ..Config::default()
    };
    let placement = prop::sample::select(PlacementKind::ALL.to_vec());
    // Half of the sequences use all commands, half mostly those for disks.
    let commands =
        prop_oneof![prop::collection::vec(command(), 1..140), prop::collection::vec(disk_command(), 1..140)];
    let offload = prop::sample::select(vec![OffloadTrigger::Evict, OffloadTrigger::Put]);
    let sequence = (placement, offload, commands);
    let sums: [Cell<u64>; 8] = Default::default();
    let tested = TestRunner::new(config).run(&sequence, |(placement, offload, commands)| {
        let stats = run_with(placement, offload, &commands).map_err(TestCaseError::fail)?;
        let counts = [
            stats.offloads_started,
            stats.offloaded_objects,
            stats.demoted_objects,
            stats.promoted_objects,
            stats.recovered_objects,
            stats.disk_evicted,
            stats.copied_records,
            stats.copies_failed,
        ];
        for (sum, count) in sums.iter().zip(counts) {
            sum.set(sum.get() + count);
        }
        Ok(())
    });
    match tested {
        // Sequences in which no object moves to disk and back, or to another node, would prove nothing.
        Ok(()) => assert!(sums.iter().all(|sum| sum.get() > 0), "{sums:?}"),
        Err(TestError::Fail(reason, (placement, offload, commands))) => {
            let commands: Vec<String> = commands.iter().map(|command| format!("    {command:?},")).collect();
            panic!("{reason}\n  with {placement:?}, {offload:?} and\n{}", commands.join("\n"));
        }
        Err(TestError::Abort(reason)) => panic!("{reason}"),
    }
}
