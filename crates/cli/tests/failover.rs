//! What a cluster of real processes promises when one of them is killed: how soon it goes on, what becomes of writers who began
//! before, when memory of killed processes is free, and that what was removed stays so.
//!
//! | variable | meaning |
//! |---|---|
//! | `MOONTIDE_SEED` | repeats the choices of a run (not its interleaving, which is the machine's) |
//! | `MOONTIDE_CLUSTER=full` | the full sizes: a reader is killed a thousand times |

#![allow(unreachable_pub, missing_docs, reason = "a program of several files, not a library")]

#[path = "cluster/content.rs"]
mod content;
#[path = "cluster/kit.rs"]
mod kit;
#[path = "cluster/readers.rs"]
mod readers;

#[path = "failover/full.rs"]
mod full;
#[path = "failover/held.rs"]
mod held;
#[path = "failover/master.rs"]
mod master;
#[path = "failover/removed.rs"]
mod removed;
