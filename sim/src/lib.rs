//! Deterministic simulation: a whole cluster in one thread, under virtual time, from one seed.
//!
//! Shipped code runs unchanged: the master's `Service` and its election; whole nodes
//! (`moontide_node::testing`) with their threads, tasks, sessions, shared memory and disk; and the decisions of clients
//! (`moontide_client::logic`). Simulated are time and clocks, the network, the disks below the storage interface, and processes
//! that pause and exit. Threads and tasks of nodes are fibers of a world of `moontide_rt::sim`; masters and clients are state
//! machines that its first thread drives. The oracle knows every acknowledged put and removal.
//!
//! ```
//! # #[cfg(sim)] // in an ordinary build there is nothing to simulate
//! # {
//! use std::time::Duration;
//!
//! use moontide_sim::{RunPlan, run};
//!
//! // Five seconds of faults and load, then the checks at the end: all faults are healed, every client can put and get,
//! // everything is removed, and all space is free again. The plan is drawn from the seed: number of processes, sizes,
//! // load, and which faults occur.
//! let plan = RunPlan { length: Duration::from_secs(5), ..RunPlan::draw(3) };
//! let first = run(3, &plan, false, None).unwrap_or_else(|violation| panic!("{violation}"));
//! println!("{} events, {} acknowledged puts", first.events, first.tally.puts);
//!
//! // The same seed gives the same history, event by event.
//! let second = run(3, &plan, false, None).unwrap_or_else(|violation| panic!("{violation}"));
//! assert_eq!(first.trace, second.trace);
//! # }
//! ```
//!
//! `cargo xtask sim --seeds 1000` runs many seeds. A violation prints its seed and how to repeat it with a trace.
//!
//! Reading order: `RunPlan` and `run`, the world with its events; the network and the clocks; the master, the nodes
//! and the clients; the faults; the oracle; `SeedSweep`, which runs many seeds.
//!
//! Invariant: a run depends on nothing but its seed. The trace of all events is hashed, and the same seed gives the
//! same hash.

#![forbid(unsafe_code)]
// In an ordinary build there is nothing to simulate.
#![cfg(sim)]

mod plan;
mod world;

mod clock;
mod context;
mod event;
mod network;
mod rng;
mod trace;

mod client;
mod links;
mod master;
mod node;

mod faults;
mod oracle;

mod coverage;
mod sweep;

pub use coverage::{COINCIDENCES, MUTATIONS};
pub use faults::{FaultCounts, FaultKind};
pub use oracle::OpTotals;
pub use plan::{AimedFault, DiskPlan, LENGTH_DEFAULT, NetworkPlan, RunPlan};
pub use sweep::{SeedSweep, SweepError};
pub use world::{Summary, Violation, run};
