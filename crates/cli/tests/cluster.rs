//! Clusters of real processes: every call, also when processes are killed, memory is short, or the network is slow.
//!
//! ```text
//!   this test: stores ──┬── grpc, frames ──▶ moontide master
//!     threads, tasks    ├── mapped memory ─▶ moontide node ┐
//!                       └── TCP [proxy] ───▶ moontide node ┴── reports ──▶ master
//! ```
//!
//! Invariant of all tests: a get returns the bytes that were put, or a miss, or fails with a typed error within its
//! timeout; never other bytes. Each test states its further invariants.
//!
//! | variable | meaning |
//! |---|---|
//! | `MOONTIDE_SEED` | repeats the random choices of a run (not its interleaving) |
//! | `MOONTIDE_TESTS=full` | full sizes: objects of 1 GiB, 400,000 keys, more repetitions |

#![allow(unreachable_pub, missing_docs, reason = "a program of several files, not a library")]

#[path = "cluster/content.rs"]
mod content;
#[path = "cluster/harness.rs"]
mod harness;
#[path = "cluster/readers.rs"]
mod readers;

#[path = "cluster/calls.rs"]
mod calls;
#[path = "cluster/counters.rs"]
mod counters;
#[path = "cluster/killed.rs"]
mod killed;
#[path = "cluster/many.rs"]
mod many;
#[path = "cluster/placed.rs"]
mod placed;
#[path = "cluster/pressure.rs"]
mod pressure;
#[path = "cluster/proxy.rs"]
mod proxy;
#[path = "cluster/repaired.rs"]
mod repaired;
#[path = "cluster/restart.rs"]
mod restart;
#[path = "cluster/rotation.rs"]
mod rotation;
#[path = "cluster/shutdown.rs"]
mod shutdown;
#[path = "cluster/slow.rs"]
mod slow;
