//! A node: owns memory, serves transfers to and from it, and executes the commands of the masters.
//!
//! The node decides nothing about objects: a master decides where an object is stored and when it is removed. The node
//! guarantees that bytes are not reused while they are read. The headers in its memory are authoritative: a master
//! without state rebuilds it from the node's reports.
//!
//! ```
//! use std::time::Duration;
//!
//! use moontide_master::{MasterConfig, Server};
//! use moontide_node::{Node, NodeConfig};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // A master on free ports; usually a separate process.
//! let free = "127.0.0.1:0".parse()?;
//! let config = MasterConfig { grpc_listen: free, frame_listen: free, admin_listen: free, ..Default::default() };
//! let master = Server::start(config)?;
//!
//! let config = NodeConfig {
//!     master: master.addresses().grpc.to_string(),
//!     memory_bytes: 64 << 20,
//!     ..NodeConfig::default()
//! };
//! let node = Node::start(config)?;
//! assert!(node.wait_until_mounted(Duration::from_secs(5)));
//! println!("{} serves at {:?}", node.id(), node.addresses());
//! node.shutdown();
//! # Ok(())
//! # }
//! ```
//!
//! Reading order: [`NodeConfig`], `node` ([`Node`]: startup and shutdown), `core` (composition of the parts), `memory`,
//! `owner` (requests of peers),
//! `executor` (commands of masters), `slot_fills` and `copier` (copies from other nodes), `disk` (disk tier), `session` (sessions with masters), `logic` (pure decisions),
//! `event_router`, `flush` (writes before a stop), `drain` (moves to other nodes), `index_gate` (heartbeat and local index), `admin` and `metrics`.

mod admin;
mod capabilities;
mod config;
mod copier;
mod core;
mod disk;
mod drain;
mod event_router;
mod executor;
mod flush;
mod index_gate;
mod logic;
mod memory;
mod metrics;
mod node;
mod owner;
mod prefault;
mod remote_reads;
mod session;
mod slot_fills;
mod status;
mod sync_marks;
#[cfg(feature = "testing")]
pub mod testing;

pub use config::{
    BYTES_PER_SLOT_DEFAULT, COPY_BYTES_PER_S_DEFAULT, DRAIN_TIMEOUT_DEFAULT, DiskConfig,
    FLUSH_TIMEOUT_DEFAULT, MASTER_DEFAULT, MASTER_START_TIMEOUT, MEMORY_BYTES_DEFAULT, NodeConfig,
    READ_THREADS_DEFAULT, SEGMENT_BYTES_MAX_DEFAULT, SELF_FENCE_TIMEOUT_DEFAULT, STAGING_BYTES_DEFAULT,
};
pub use disk::{DiskError, IdentityError};
pub use flush::FlushCanceller;
pub use logic::segment_plan::{PlanError, SegmentPlan};
pub use memory::{ExternalMemory, MemoryError};
pub use moontide_disk::{BackendKind, EvictionPolicy, IoEngine};
pub use moontide_heap::HugePages;
pub use node::{Addresses, Node, StartError};
