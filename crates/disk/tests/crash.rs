//! The crash matrix: what is on the disk is damaged, or the power goes, at every place where it can.
//!
//! Every test runs for each backend in `crash/kinds.rs`; a new one joins by a line there. What must hold is said once, in
//! `crash/world.rs`: what was acknowledged is there with the right bytes, what was removed is gone, nothing is ever read
//! wrong, and the tier can be written to again.
//!
//! In CI a sample of all places is tried; with `MOONTIDE_CRASH=full` in the environment, all of them.

#[path = "crash/damage.rs"]
mod damage;
#[path = "crash/faults.rs"]
mod faults;
#[path = "crash/history.rs"]
mod history;
#[path = "crash/kinds.rs"]
mod kinds;
#[path = "crash/world.rs"]
mod world;

/// The mistakes are there in debug builds only.
#[cfg(debug_assertions)]
#[path = "crash/planted.rs"]
mod planted;

/// Whether all places are to be tried.
fn full() -> bool {
    std::env::var_os("MOONTIDE_CRASH").is_some_and(|value| value == "full")
}
