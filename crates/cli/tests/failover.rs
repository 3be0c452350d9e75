//! Guarantees of a cluster of real processes when one of them is killed: recovery time, results of writes in progress,
//! release of the memory of killed processes, and that removed objects stay removed.
//!
//! | variable | meaning |
//! |---|---|
//! | `MOONTIDE_SEED` | repeats the random choices of a run (not its interleaving) |
//! | `MOONTIDE_TESTS=full` | full sizes: a reader is killed a thousand times |
//! | `MOONTIDE_ETCD` | path of `etcd`, if it is not in PATH; without etcd, tests of several masters are not run |

#![allow(unreachable_pub, missing_docs, reason = "a program of several files, not a library")]

#[path = "cluster/content.rs"]
mod content;
#[path = "cluster/harness.rs"]
mod harness;
#[path = "../../types/tests/support/not_run.rs"]
mod not_run;
#[path = "cluster/readers.rs"]
mod readers;

#[path = "failover/bulk.rs"]
mod bulk;
#[path = "failover/flush.rs"]
mod flush;
#[path = "failover/full.rs"]
mod full;
#[path = "failover/leases.rs"]
mod leases;
#[path = "failover/master.rs"]
mod master;
#[path = "failover/masters.rs"]
mod masters;
#[path = "failover/masters_harness.rs"]
mod masters_harness;
#[path = "chaos/net.rs"]
mod net;
#[path = "failover/removed.rs"]
mod removed;
#[path = "failover/silence.rs"]
mod silence;
