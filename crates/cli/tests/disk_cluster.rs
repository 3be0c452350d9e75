//! Clusters of real processes whose nodes have disks: objects that do not fit into memory are readable, also after a
//! node was killed, with a slow, full or corrupt disk, and as an unprivileged user.
//!
//! ```text
//!   this test: stores ──▶ moontide master ◀── disk records ───── moontide node ──▶ memory
//!                  └────── mapped memory, TCP ──────────────────▶    │
//!                                                                    └──▶ disk: bucket, file or offset
//! ```
//!
//! Invariant of all tests: a get returns the bytes that were put, or a miss; never other bytes. An acknowledged object
//! is lost only by a removal, by eviction from a full disk, or by a crash before it was on disk.
//!
//! `MOONTIDE_SEED` and `MOONTIDE_TESTS=full` are those of the cluster tests without disks. Measurements are printed.

#![allow(unreachable_pub, missing_docs, reason = "a program of several files, not a library")]

mod common;

#[path = "cluster/content.rs"]
mod content;
#[path = "cluster/harness.rs"]
mod harness;
#[path = "../../types/tests/support/not_run.rs"]
mod not_run;
#[path = "cluster/readers.rs"]
mod readers;

#[path = "disk_cluster/disk_harness.rs"]
mod disk_harness;

#[path = "disk_cluster/corruption.rs"]
mod corruption;
#[path = "disk_cluster/fill.rs"]
mod fill;
#[path = "disk_cluster/full.rs"]
mod full;
#[path = "disk_cluster/killed.rs"]
mod killed;
#[path = "disk_cluster/restarted.rs"]
mod restarted;
#[path = "disk_cluster/several.rs"]
mod several;
#[path = "disk_cluster/sizes.rs"]
mod sizes;
#[path = "disk_cluster/stalled.rs"]
mod stalled;
#[path = "disk_cluster/stopped.rs"]
mod stopped;
#[path = "disk_cluster/striped.rs"]
mod striped;
#[path = "disk_cluster/unprivileged.rs"]
mod unprivileged;
