//! Attacks on the shipped program: a real master and real nodes, and requests that no client of this project sends, made by
//! hand: frames, generated messages, gRPC, or bytes that are no protocol at all. Each test does what a hostile process can do,
//! and asserts that it is refused, while a real client is served.

#![allow(unreachable_pub, missing_docs, reason = "a program of several files, not a library")]

#[path = "cluster/harness.rs"]
mod harness;
#[path = "../../types/tests/support/not_run.rs"]
mod not_run;
#[path = "attacks/peer.rs"]
mod peer;

#[path = "attacks/capabilities.rs"]
mod capabilities;
#[path = "attacks/control_plane.rs"]
mod control_plane;
#[path = "attacks/data_plane.rs"]
mod data_plane;
