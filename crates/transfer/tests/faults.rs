//! Faults of the TCP engine: owners that are killed and stopped, streams that are cut and throttled, peers that lie or
//! say nothing, callers who give up, and strangers who send whatever they like.
//!
//! ```text
//!   this test ── link ──▶ [proxy: small pieces, cuts, slowness] ──▶ owner: this binary again, with a role
//!      └──────── link ──▶ liar: a thread that speaks the protocol up to a point
//! ```
//!
//! What must hold in all of it: a transfer ends with the right bytes or with a typed error, not later than its deadline;
//! memory that was given back is not touched; nobody who does nothing wrong is hurt; and at the end no descriptor and no
//! thread is left.
//!
//! | variable | meaning |
//! |---|---|
//! | `MOONTIDE_SEED` | repeats the choices of a run (not its interleaving, which is the machine's) |
//! | `MOONTIDE_FAULTS=full` | the long form: more of everything |
//!
//! There is no libtest here, because owners must start bare; [`main`] speaks as much of its language as `cargo test`
//! and `cargo nextest` need.

#![allow(unreachable_pub, missing_docs, reason = "a program of several files, not a library")]

#[path = "faults/aborts.rs"]
mod aborts;
#[path = "faults/crowd.rs"]
mod crowd;
#[path = "faults/cuts.rs"]
mod cuts;
#[path = "faults/killed.rs"]
mod killed;
#[path = "faults/kit.rs"]
mod kit;
#[path = "faults/leaks.rs"]
mod leaks;
#[path = "faults/liars.rs"]
mod liars;
#[path = "faults/process.rs"]
mod process;
#[path = "faults/proxy.rs"]
mod proxy;
#[path = "faults/raw.rs"]
mod raw;
#[path = "faults/strangers.rs"]
mod strangers;

use std::process::ExitCode;

use kit::Wanted;

const TESTS: &[(&str, fn())] = &[
    ("killed_owner_is_a_typed_error_and_the_link_finds_the_next", killed::killed),
    ("stopped_owner_is_given_up_by_the_deadline_and_the_link_recovers", killed::stopped),
    ("callers_of_all_kinds_come_back_while_their_owner_is_killed", killed::crowd),
    ("a_rail_that_worked_for_long_is_not_paused_for_long", killed::forgiven),
    ("whatever_the_pieces_everything_arrives", cuts::pieces),
    ("a_cut_get_is_right_or_a_typed_error", cuts::cut_gets),
    ("a_cut_put_is_right_or_a_typed_error", cuts::cut_puts),
    ("a_slow_stream_is_no_stalled_one", cuts::slow_is_not_stalled),
    ("lies_are_typed_errors_and_touch_nothing", liars::lies),
    ("silence_ends_with_the_deadline", liars::silence),
    ("connecting_ends_with_the_deadline", liars::connecting),
    ("a_wait_ends_with_its_own_deadline_not_with_somebody_elses", liars::deadlines_of_others),
    ("a_peer_that_does_not_stop_sending_is_cut_off_at_the_deadline", liars::endless),
    ("a_hundred_thousand_frames_of_strangers_hurt_nobody", strangers::frames),
    ("aborted_memory_is_not_written", aborts::gets),
    ("memory_is_not_written_after_a_deadline", aborts::deadlines),
    ("aborted_memory_is_not_read", aborts::puts),
    ("futures_of_others_survive_an_abort", aborts::futures_survive),
    ("a_batch_whose_link_breaks_while_it_starts_ends", aborts::broken_while_starting),
    ("descriptors_and_threads_come_back", leaks::counts),
    ("who_never_reads_is_given_up_and_its_pin_released", crowd::stalled_reader),
    ("who_never_sends_the_rest_is_given_up_and_its_claim_released", crowd::stalled_writer),
    ("connections_beyond_the_limit_are_refused_and_find_room_later", crowd::limit),
    ("more_frames_than_may_be_in_flight_all_arrive", crowd::more_than_in_flight),
];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if process::is_role(&arguments) {
        process::owner(&arguments);
    }
    let wanted = Wanted::from_arguments(&arguments, TESTS);
    for (name, test) in wanted.tests {
        if wanted.list {
            println!("{name}: test");
            continue;
        }
        let began = std::time::Instant::now();
        let over = watch(name);
        test(); // a failure is a panic, which ends the process with an error
        over.store(true, std::sync::atomic::Ordering::SeqCst);
        println!("test {name} ... ok ({:.1} s)", began.elapsed().as_secs_f64());
    }
    ExitCode::SUCCESS
}

/// A transfer that never ends hangs a thread that nobody can end: then the process ends, with a word about who runs.
fn watch(name: &'static str) -> std::sync::Arc<std::sync::atomic::AtomicBool> {
    let over = std::sync::Arc::<std::sync::atomic::AtomicBool>::default();
    let watched = std::sync::Arc::clone(&over);
    let limit = std::time::Duration::from_secs(kit::count(75, 1200).into());
    std::thread::spawn(move || {
        std::thread::sleep(limit);
        if !watched.load(std::sync::atomic::Ordering::SeqCst) {
            eprintln!("{name} has not ended after {limit:?}; threads that run:");
            eprintln!("{}", kit::running_threads().join("\n"));
            std::process::abort();
        }
    });
    over
}
