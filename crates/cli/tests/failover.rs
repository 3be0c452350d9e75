//! What a cluster of real processes promises when one of them is killed: how soon it goes on, what becomes of writers who began
//! before, when memory of killed processes is free, and that what was removed stays so.
//!
//! | variable | meaning |
//! |---|---|
//! | `MOONTIDE_SEED` | repeats the choices of a run (not its interleaving, which is the machine's) |
//! | `MOONTIDE_CLUSTER=full` | the full sizes: a reader is killed a thousand times |
//! | `MOONTIDE_ETCD` | the program of `etcd`, if it is not in the path: without it tests of several masters are passed over |

#![allow(unreachable_pub, missing_docs, reason = "a program of several files, not a library")]

#[path = "cluster/content.rs"]
mod content;
#[path = "cluster/kit.rs"]
mod kit;
#[path = "cluster/readers.rs"]
mod readers;

#[path = "failover/fleet.rs"]
mod fleet;
#[path = "failover/full.rs"]
mod full;
#[path = "failover/held.rs"]
mod held;
#[path = "failover/master.rs"]
mod master;
#[path = "failover/masters.rs"]
mod masters;
#[path = "failover/removed.rs"]
mod removed;
