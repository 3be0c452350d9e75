//! A node: owns memory, serves transfers to and from it, and does what a master orders.
//!
//! It decides nothing about objects. Where something is put, and when it goes, a master says; that bytes are not reused
//! while somebody looks at them is the node's. Headers in its memory are the truth from which a master that has
//! forgotten everything is told again.
//!
//! ```
//! use std::time::Duration;
//!
//! use moontide_master::{MasterConfig, Server};
//! use moontide_node::{Node, NodeConfig};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // A master on free ports; usually a process of its own.
//! let free = "127.0.0.1:0".parse()?;
//! let doors = MasterConfig { grpc_listen: free, frame_listen: free, admin_listen: free, ..Default::default() };
//! let master = Server::start(doors)?;
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
//! Reading order: [`NodeConfig`], `node` ([`Node`]: how the parts are put together), `memory`, `owner` (what peers ask),
//! `orders` (what a master orders), `disk` (what does not fit into memory), `session` (what is said to the master), `decide` (what follows from what), `keeper`
//! (beats and the index), `admin` and `metrics`.

mod admin;
mod config;
// Not for programs: what the simulation runs on virtual time.
#[doc(hidden)]
pub mod decide;
mod disk;
mod keeper;
mod lines;
mod memory;
mod metrics;
mod node;
mod orders;
mod owner;
mod session;
mod status;

pub use config::{
    DRAIN_DEFAULT, DiskConfig, InvalidConfig, LOAD_THREADS_DEFAULT, LOCAL_STALE_MAX_DEFAULT, MASTER_DEFAULT,
    MASTER_WAIT, MEMORY_BYTES_DEFAULT, NodeConfig, SEGMENT_BYTES_MAX_DEFAULT, SLOT_BYTES_DEFAULT,
    STAGING_BYTES_DEFAULT, WrongValue,
};
pub use decide::plan::{PlanError, SegmentPlan};
pub use disk::{DiskError, IdentityError};
pub use memory::{LentMemory, MemoryError};
pub use moontide_disk::{BackendKind, EngineChoice, EvictionOrder};
pub use moontide_heap::HugePages;
pub use node::{Addresses, Node, StartError};
