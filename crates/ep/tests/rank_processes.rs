//! Whole worlds: ranks are processes, and results equal a reference bit by bit, while ranks are killed or stopped.
//!
//! All ranks are this binary, started again with a role. Each draws its own tokens and checks its own results against
//! the mixture of experts in `reference.rs`, with the experts of those ranks that took part. All memory that must not
//! be read any more is poisoned.
//!
//! | variable | meaning |
//! |---|---|
//! | `MOONTIDE_SEED` | repeats the random choices of a run (not its interleaving, which depends on the machine) |
//! | `MOONTIDE_TESTS=full` | 100,000 steps with random delays and stops, 200 kills at random moments, and a rank of 8 killed in every phase |

#![allow(unreachable_pub, missing_docs, reason = "a program of several files, not a library")]

#[path = "../../heap/tests/common/libtest.rs"]
mod libtest;
#[path = "rank_processes/processes.rs"]
mod processes;
#[path = "rank_processes/rank_main.rs"]
mod rank_main;
#[path = "rank_processes/reference.rs"]
mod reference;
#[path = "rank_processes/scenarios.rs"]
mod scenarios;

use std::process::ExitCode;

const TESTS: [(&str, fn()); 11] = [
    ("two_ranks_match_reference", || scenarios::sweep(2)),
    ("four_ranks_match_reference", || scenarios::sweep(4)),
    ("eight_ranks_match_reference", || scenarios::sweep(8)),
    ("combine_and_next_dispatch_share_one_barrier", scenarios::overlapped),
    ("channels_do_not_wait_for_each_other", scenarios::two_channels),
    ("runs_with_same_seed_are_bit_identical", scenarios::same_bits),
    ("rank_killed_in_any_phase_is_excluded_and_rejoins", scenarios::killed_in_every_phase),
    ("rank_killed_at_random_moment_is_excluded_and_rejoins", scenarios::killed_at_any_moment),
    ("other_ranks_continue_after_rank_0_is_killed", scenarios::rank_0_killed),
    ("stopped_rank_is_excluded_and_rejoins", scenarios::stopped),
    ("random_delays_and_stops_do_not_change_results", scenarios::soak),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some(role) = processes::Role::of_this_process(&arguments) {
        rank_main::run(&role);
        return ExitCode::SUCCESS;
    }
    libtest::run(&TESTS, &[], &arguments)
}
