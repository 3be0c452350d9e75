//! The crash matrix: data on the disk is corrupted, or the power fails, at every possible point.
//!
//! Every test runs for each backend in `crash/kinds.rs`; a new backend needs one line there. `crash/harness.rs` defines
//! the invariants: acknowledged records are stored with the right bytes, removed records do not reappear, no read
//! returns wrong bytes, and the tier accepts writes again.
//!
//! By default a sample of all points is tested; with `MOONTIDE_TESTS=full` in the environment, all of them.

#[path = "crash/corruption.rs"]
mod corruption;
#[path = "crash/faults.rs"]
mod faults;
#[path = "crash/harness.rs"]
mod harness;
#[path = "crash/history.rs"]
mod history;
#[path = "crash/kinds.rs"]
mod kinds;

/// Mutations exist in debug builds only.
#[cfg(debug_assertions)]
#[path = "crash/mutations.rs"]
mod mutations;

/// Whether all points are tested.
fn full() -> bool {
    std::env::var_os("MOONTIDE_TESTS").is_some_and(|value| value == "full")
}
