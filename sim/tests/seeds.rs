//! Runs some seeds as tests; run more with `cargo xtask sim --seeds 1000`.

#![cfg(sim)]

use std::time::Duration;

use moontide_sim::{FaultCounts, FaultKind, OpTotals, RunPlan, Summary, run};

/// Returns the plan of a short run with as many faults as a long one.
fn plan(seed: u64, seconds: u64) -> RunPlan {
    let mut plan = RunPlan { length: Duration::from_secs(seconds), ..RunPlan::draw(seed) };
    plan.faults.iter_mut().for_each(|(_, every)| *every /= 4);
    plan
}

fn kept(seed: u64, plan: &RunPlan) -> Summary {
    run(seed, plan, false, None).unwrap_or_else(|violation| panic!("{violation}"))
}

#[test]
fn invariants_hold_under_random_faults() {
    let (mut tally, mut faults, mut terms) = (OpTotals::default(), FaultCounts::default(), 0);
    for seed in 1..=90 {
        let done = kept(seed, &plan(seed, 45));
        tally.merge(&done.tally);
        faults.merge(&done.faults);
        terms = terms.max(done.terms);
    }
    // A simulation without successful operations, or without faults, would violate nothing.
    assert!(tally.puts > 3_000 && tally.hits > 10_000 && tally.removals > 2_000, "{tally:?}");
    assert!(tally.replacements > 1_000 && tally.remembered > 4_000 && tally.pending > 100, "{tally:?}");
    for &kind in FaultKind::ALL {
        assert!(faults.of(kind) > 0, "no seed had a {}", kind.name());
    }
    assert!(terms > 2);
}

#[test]
fn same_seed_same_trace() {
    for seed in 100..106 {
        let first = kept(seed, &plan(seed, 60));
        // In another thread, whose hash maps are seeded otherwise.
        let second = std::thread::spawn(move || kept(seed, &plan(seed, 60))).join().unwrap();
        assert_eq!(first, second);
    }
    assert_ne!(kept(1, &plan(1, 30)).trace, kept(2, &plan(2, 30)).trace);
}

#[test]
fn run_without_faults_mostly_hits_and_leaves_no_removal_pending() {
    let plan = RunPlan {
        nodes: 3,
        keys: 20,
        object_bytes_max: 600,
        replicas_max: 2,
        upserts_percent: 0,
        removals_percent: 0,
        units: 2048,
        slots: 120,
        ..plan(1, 120)
    }
    .without_faults();
    let done = kept(1, &plan);
    let OpTotals { hits, misses, pending, .. } = done.tally;
    assert!(hits > 10 * misses && pending == 0, "{:?}", done.tally);
    assert_eq!(done.faults.of(FaultKind::Lost) + done.faults.of(FaultKind::StreamBroken), 0);
}
