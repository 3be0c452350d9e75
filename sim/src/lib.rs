//! A whole cluster in one thread, under virtual time, from one seed.
//!
//! What is shipped runs here as it is: the master's [`Service`](moontide_master::Service); the nodes'
//! [`NodeHeap`](moontide_heap::NodeHeap) with real shared memory, and what a node decides
//! ([`moontide_node::decide`]); what a client decides ([`moontide_client::decide`]). What is simulated lies between them:
//! time and clocks, the network, processes that stop and end, and queues in the place of threads. The oracle knows every
//! put and every removal that was acknowledged.
//!
//! Reading order: [`Plan`] and [`run`], the world with its events; the network and the clocks; the master, the nodes and the clients; the
//! faults; the oracle; [`Campaign`], which runs many seeds.
//!
//! Invariant: nothing but the seed decides. The trace of all events is hashed, and the same seed gives the same hash.

#![forbid(unsafe_code)]

mod plan;
mod world;

mod clock;
mod dice;
mod event;
mod network;
mod scene;
mod trace;

mod client;
mod master;
mod node;

mod faults;
mod oracle;

mod campaign;

pub use campaign::Campaign;
pub use faults::{FaultCounts, FaultKind};
pub use oracle::Tally;
pub use plan::{LENGTH_DEFAULT, NetworkPlan, Plan};
pub use world::{Summary, Violation, run};
