//! Clusters of real processes whose nodes have disks: what memory cannot hold is found again, also after a node was
//! killed, on a disk that is slow, full or damaged, and by an ordinary user.
//!
//! ```text
//!   this test: stores ──▶ moontide master ◀── what is on disk ── moontide node ──▶ memory
//!                  └────── mapped memory, TCP ──────────────────▶    │
//!                                                                    └──▶ disk: bucket, file or offset
//! ```
//!
//! What must hold in all of it: a get brings the bytes that were put, or says that there are none; never other bytes. An
//! object that was acknowledged is given up only by whoever may: a removal, a disk with a limit, a crash before it was
//! on disk.
//!
//! `MOONTIDE_SEED` and `MOONTIDE_CLUSTER=full` mean what they mean for the tests of clusters without disks. Figures are
//! printed.

#![allow(unreachable_pub, missing_docs, reason = "a program of several files, not a library")]

mod common;

#[path = "cluster/content.rs"]
mod content;
#[path = "cluster/kit.rs"]
mod kit;
#[path = "cluster/readers.rs"]
mod readers;

#[path = "disk_cluster/scene.rs"]
mod scene;

#[path = "disk_cluster/damaged.rs"]
mod damaged;
#[path = "disk_cluster/fill.rs"]
mod fill;
#[path = "disk_cluster/full.rs"]
mod full;
#[path = "disk_cluster/killed.rs"]
mod killed;
#[path = "disk_cluster/ordinary.rs"]
mod ordinary;
#[path = "disk_cluster/restarted.rs"]
mod restarted;
