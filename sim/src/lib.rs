//! A whole cluster in one thread, under virtual time, from one seed.
//!
//! What is shipped runs here as it is: the master's [`Group`](moontide_meta::Group) and
//! [`Sessions`](moontide_meta::Sessions), and the nodes' [`NodeHeap`](moontide_heap::NodeHeap) with real shared memory.
//! What is simulated lies between them: time, the network, and the faults. The oracle knows every put and every removal
//! that was acknowledged; a get gives exactly the bytes of a put, or nothing.
//!
//! Reading order: [`run`] and the world with its events; the network; the master, the nodes and the clients; the
//! faults; the oracle.
//!
//! Invariant: nothing but the seed decides. The trace of all events is hashed, and the same seed gives the same hash.

#![forbid(unsafe_code)]

mod world;

mod event;
mod network;

mod client;
mod master;
mod node;

mod faults;
mod oracle;

pub use faults::FaultPlan;
pub use network::NetworkPlan;
pub use world::{Plan, Summary, Violation, run};
