//! The leaves below every other crate: what production takes from the operating system or from a library, and what a
//! test replaces.
//!
//! - [`sync`]: atomics, locks and channels. A model checker replaces them (`--cfg loom`, `--cfg shuttle`).
//! - [`thread`](mod@thread), [`time`], [`collections`], [`fs`]: threads, clocks, hash tables, small files. With [`sync`] they are all
//!   that a simulated world replaces (`--cfg sim`).
//! - [`process::Owned`]: what a world takes back from a process that it kills.
//! - [`mark!`]: places that a world counts.
//! - [`mutation_enabled`], [`mutations!`]: deliberate bugs that tests enable to prove that they detect them.
//! - [`SplitMix64`]: pseudo-random numbers from a seed; [`mix64`]: its mixing of bits.
//! - [`Backoff`]: growing pauses between attempts.
//!
//! The crate knows no object, node or message, and uses neither tokio nor any crate of the workspace. In an ordinary
//! build its names are those of std and parking_lot, or inlined functions: no dispatch, no cost.
//!
//! # Example
//!
//! A value that one thread publishes and another one awaits. The same code runs in production and in a model:
//!
//! ```
//! use std::time::Duration;
//!
//! use moontide_rt::sync::{Arc, Condvar, Mutex, lock, wait};
//!
//! let shared = Arc::new((Mutex::new(None), Condvar::new()));
//! let publisher = std::thread::spawn({
//!     let shared = Arc::clone(&shared);
//!     move || {
//!         *lock(&shared.0) = Some(7);
//!         shared.1.notify_all();
//!     }
//! });
//! let mut value = lock(&shared.0);
//! while value.is_none() {
//!     let notified;
//!     (value, notified) = wait(&shared.1, value, Duration::from_secs(60));
//!     assert!(notified, "the publisher is running");
//! }
//! assert_eq!(*value, Some(7));
//! # publisher.join().unwrap();
//! ```
//!
//! Attempts with growing pauses. Neither type reads a clock or waits, so that equal seeds give equal pauses:
//!
//! ```
//! use std::time::Duration;
//!
//! use moontide_rt::{Backoff, SplitMix64};
//!
//! let (mut backoff, mut random) = (Backoff::new(Duration::from_millis(50), Duration::from_secs(1)), SplitMix64::new(7));
//! let mut waited = Duration::ZERO;
//! let attempts = (1..).find(|attempt| {
//!     let is_reached = *attempt == 4;
//!     if !is_reached {
//!         waited += backoff.pause(Duration::ZERO, random.next_u64());
//!     }
//!     is_reached
//! });
//! assert_eq!((attempts, backoff.failures()), (Some(4), 3));
//! // Between half and all of 50, 100 and 200 ms.
//! assert!((175..=350).contains(&waited.as_millis()));
//! ```

mod backoff;
pub mod collections;
pub mod fs;
mod marks;
mod mutation;
pub mod process;
mod random;
#[cfg(sim)]
pub mod sim;
pub mod sync;
pub mod thread;
pub mod time;

pub use backoff::Backoff;
pub use mutation::{Mutation, MutationSwitch, mutation_enabled, weakened, with_mutation};
pub use random::{SplitMix64, mix64};
