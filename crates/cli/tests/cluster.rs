//! Clusters of real processes: every call, and what is left of the calls when processes are killed, memory is short, or
//! the network is slow.
//!
//! ```text
//!   this test: stores ──┬── grpc, frames ──▶ moontide master
//!     threads, tasks    ├── mapped memory ─▶ moontide node ┐
//!                       └── TCP [proxy] ───▶ moontide node ┴── reports ──▶ master
//! ```
//!
//! What must hold in all of it: a get brings the bytes that were put, or says that there are none, or fails with a typed
//! error within its deadline; never other bytes. What else holds is said at each test.
//!
//! | variable | meaning |
//! |---|---|
//! | `MOONTIDE_SEED` | repeats the choices of a run (not its interleaving, which is the machine's) |
//! | `MOONTIDE_CLUSTER=full` | the full sizes: objects of 1 GiB, 100,000 keys, more of everything |

#![allow(unreachable_pub, missing_docs, reason = "a program of several files, not a library")]

#[path = "cluster/content.rs"]
mod content;
#[path = "cluster/kit.rs"]
mod kit;
#[path = "cluster/readers.rs"]
mod readers;

#[path = "cluster/calls.rs"]
mod calls;
#[path = "cluster/counters.rs"]
mod counters;
#[path = "cluster/goodbye.rs"]
mod goodbye;
#[path = "cluster/killed.rs"]
mod killed;
#[path = "cluster/many.rs"]
mod many;
#[path = "cluster/pressure.rs"]
mod pressure;
#[path = "cluster/proxy.rs"]
mod proxy;
#[path = "cluster/restart.rs"]
mod restart;
#[path = "cluster/slow.rs"]
mod slow;
