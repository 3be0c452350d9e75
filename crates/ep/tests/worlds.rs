//! Whole worlds: ranks as processes, results equal to a reference bit by bit, whoever is killed or stopped when.
//!
//! All ranks are this binary, started again with a role. Each draws tokens of its own and checks its own results against
//! the mixture of experts in `reference.rs`, with the experts of those ranks that took part. Everywhere memory that must
//! not be read any more is poisoned.
//!
//! | variable | meaning |
//! |---|---|
//! | `MOONTIDE_SEED` | repeats the choices of a run (not its interleaving, which is the machine's) |
//! | `MOONTIDE_EP=full` | 100,000 steps with random delays and stops, 200 kills at random moments, and a rank of 8 killed in every phase |

#![allow(unreachable_pub, missing_docs, reason = "a program of several files, not a library")]

#[path = "worlds/conductor.rs"]
mod conductor;
#[path = "../../heap/tests/common/libtest.rs"]
mod libtest;
#[path = "worlds/reference.rs"]
mod reference;
#[path = "worlds/scenes.rs"]
mod scenes;
#[path = "worlds/troupe.rs"]
mod troupe;

use std::process::ExitCode;

const TESTS: [(&str, fn()); 11] = [
    ("two_ranks_agree_with_the_reference", || conductor::sweep(2)),
    ("four_ranks_agree_with_the_reference", || conductor::sweep(4)),
    ("eight_ranks_agree_with_the_reference", || conductor::sweep(8)),
    ("returns_and_dispatches_share_a_barrier", conductor::crossing),
    ("channels_do_not_wait_for_each_other", conductor::two_channels),
    ("runs_are_the_same_bit_by_bit", conductor::same_bits),
    ("a_rank_may_die_in_every_phase_and_come_back", conductor::killed_in_every_phase),
    ("ranks_may_die_at_any_moment", conductor::killed_at_any_moment),
    ("rank_0_may_die", conductor::rank_0_killed),
    ("a_rank_that_stood_still_is_left_behind_and_rejoins", conductor::stopped),
    ("delays_and_stops_change_nothing", conductor::soak),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if let Some(role) = troupe::Role::of_this_process(&arguments) {
        scenes::play(&role);
        return ExitCode::SUCCESS;
    }
    libtest::run(&TESTS, &arguments)
}
