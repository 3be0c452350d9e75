//! Some seeds in every run of the tests; more by `cargo run --release -p moontide-sim -- --seeds 10000`.

use std::time::Duration;

use moontide_sim::{FaultPlan, NetworkPlan, Plan, run};

#[test]
fn promises_hold() {
    let (mut hits, mut puts, mut removals) = (0, 0, 0);
    let plan = Plan { length: Duration::from_secs(60), ..Plan::default() };
    for seed in 1..=50 {
        let done = run(seed, &plan, false).unwrap_or_else(|violation| panic!("{violation}"));
        hits += done.hits;
        puts += done.puts;
        removals += done.removals;
    }
    // A simulation in which nothing works keeps all promises too.
    assert!(
        hits > 5_000 && puts > 3_000 && removals > 1_000,
        "{hits} hits, {puts} puts, {removals} removals"
    );
}

#[test]
fn same_seed_same_trace() {
    let plan = Plan { length: Duration::from_secs(30), ..Plan::default() };
    for seed in 100..104 {
        let (first, second) = (run(seed, &plan, false), run(seed, &plan, false));
        assert_eq!(first, second);
    }
    assert_ne!(run(1, &plan, false).unwrap().trace, run(2, &plan, false).unwrap().trace);
}

#[test]
fn without_faults_most_gets_find_something() {
    let network = NetworkPlan { lost_permille: 0, twice_permille: 0, slow_permille: 0 };
    let faults =
        FaultPlan { master_every_ms: 0, silence_every_ms: 0, restart_every_ms: 0, client_every_ms: 0 };
    let plan = Plan { length: Duration::from_secs(60), network, faults, ..Plan::default() };
    let done = run(1, &plan, false).unwrap();
    assert!(done.hits > done.misses, "{done:?}");
}
