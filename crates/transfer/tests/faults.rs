//! Faults of the TCP engine: killed and stopped owners, broken and throttled streams, peers that send invalid replies
//! or none, callers that abort, and clients that send malformed requests.
//!
//! ```text
//!   this test ── link ──▶ [proxy: fragments, breaks, delays] ──▶ owner: this binary again, with a role
//!      └──────── link ──▶ fake peer: a thread that follows the protocol up to a point
//! ```
//!
//! Checked in all tests: a transfer ends with the right bytes or with a typed error, not later than its deadline;
//! memory that was returned to the caller is not accessed; correct clients are not affected; and at the end no
//! descriptor and no thread is leaked.
//!
//! | variable | meaning |
//! |---|---|
//! | `MOONTIDE_SEED` | repeats the random choices of a run (not its interleaving, which depends on the machine) |
//! | `MOONTIDE_TESTS=full` | long form: more repetitions |
//!
//! These tests do not use libtest, because owners must start without a test harness; [`main`] supports the part of its
//! command line that `cargo test` and `cargo nextest` need.

#![allow(unreachable_pub, missing_docs, reason = "a program of several files, not a library")]

#[path = "faults/aborts.rs"]
mod aborts;
#[path = "faults/bad_replies.rs"]
mod bad_replies;
#[path = "faults/bad_requests.rs"]
mod bad_requests;
#[path = "faults/connection_limits.rs"]
mod connection_limits;
#[path = "faults/cuts.rs"]
mod cuts;
#[path = "faults/harness.rs"]
mod harness;
#[path = "faults/killed.rs"]
mod killed;
#[path = "faults/leaks.rs"]
mod leaks;
#[path = "faults/process.rs"]
mod process;
#[path = "faults/proxy.rs"]
mod proxy;
#[path = "faults/raw.rs"]
mod raw;

use std::process::ExitCode;

use harness::TestSelection;

const TESTS: &[(&str, fn())] = &[
    ("transfer_to_killed_owner_fails_typed_and_link_reconnects", killed::killed),
    ("transfer_to_stopped_owner_ends_by_deadline_and_link_recovers", killed::stopped),
    ("concurrent_callers_return_by_deadline_while_owner_is_killed", killed::concurrent_callers),
    ("rail_failures_are_reset_after_sustained_success", killed::failures_reset),
    ("transfers_are_correct_over_fragmented_streams", cuts::fragmented),
    ("get_over_broken_stream_is_correct_or_typed_error", cuts::broken_gets),
    ("put_over_broken_stream_is_correct_or_typed_error", cuts::broken_puts),
    ("slow_stream_is_not_treated_as_stalled", cuts::slow_is_not_stalled),
    ("invalid_reply_is_typed_error_and_writes_no_memory", bad_replies::invalid_replies),
    ("unanswered_transfer_ends_by_deadline", bad_replies::no_reply),
    ("connect_to_unresponsive_peer_ends_by_deadline", bad_replies::connecting),
    ("wait_on_shared_connection_ends_by_own_deadline", bad_replies::shared_connection),
    ("transfer_from_endless_sender_ends_by_deadline", bad_replies::endless),
    ("malformed_frames_do_not_affect_other_clients", bad_requests::frames),
    ("aborted_get_does_not_write_memory", aborts::gets),
    ("get_past_deadline_does_not_write_memory", aborts::deadlines),
    ("aborted_put_does_not_read_memory", aborts::puts),
    ("polled_transfer_survives_abort_of_another", aborts::futures_survive),
    ("batch_ends_if_link_breaks_while_starting", aborts::broken_while_starting),
    ("closed_links_leak_no_descriptors_or_threads", leaks::counts),
    ("client_that_does_not_read_is_closed_and_its_pin_released", connection_limits::stalled_reader),
    ("client_that_stops_sending_is_closed_and_its_claim_released", connection_limits::stalled_writer),
    ("connection_over_limit_is_refused_until_one_closes", connection_limits::limit),
    ("batch_over_inflight_limit_completes", connection_limits::more_than_in_flight),
    ("silent_connections_make_room_for_others", connection_limits::silent),
    ("one_host_gets_its_share_of_connections", connection_limits::per_peer),
    ("connection_without_request_is_closed_and_link_opens_another", connection_limits::unused),
    ("slow_large_body_is_ended_and_others_wait_or_are_busy", connection_limits::bodies),
];

/// Takes half a minute; `cargo test -p moontide-transfer --test faults -- --ignored` runs it.
const IGNORED: &[&str] = &["rail_failures_are_reset_after_sustained_success"];

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if process::is_role(&arguments) {
        process::owner(&arguments);
    }
    let selection = TestSelection::from_arguments(&arguments, TESTS, IGNORED);
    for (name, test) in selection.tests {
        if selection.list {
            println!("{name}: test");
            continue;
        }
        let began = std::time::Instant::now();
        let finished = watch(name);
        test(); // a failure is a panic, which ends the process with an error
        finished.store(true, std::sync::atomic::Ordering::SeqCst);
        println!("test {name} ... ok ({:.1} s)", began.elapsed().as_secs_f64());
    }
    ExitCode::SUCCESS
}

/// Starts a watchdog. A transfer that never ends blocks a thread that cannot be ended: then the watchdog prints the
/// running threads and aborts the process.
fn watch(name: &'static str) -> std::sync::Arc<std::sync::atomic::AtomicBool> {
    let finished = std::sync::Arc::<std::sync::atomic::AtomicBool>::default();
    let watched = std::sync::Arc::clone(&finished);
    let limit = std::time::Duration::from_secs(harness::count(75, 1200).into());
    std::thread::spawn(move || {
        std::thread::sleep(limit);
        if !watched.load(std::sync::atomic::Ordering::SeqCst) {
            eprintln!("{name} has not ended after {limit:?}; running threads:");
            eprintln!("{}", harness::running_threads().join("\n"));
            std::process::abort();
        }
    });
    finished
}
