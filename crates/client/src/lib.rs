//! Client library: puts and gets of objects in a cluster.
//!
//! [`Store`] is the blocking interface, [`AsyncStore`] the one for tasks; both share everything below. The client keeps
//! no objects: its only state about them is a cache of their last known locations.
//!
//! ```
//! use std::time::Duration;
//!
//! use moontide_client::{PutOptions, Store, StoreConfig};
//! use moontide_master::{MasterConfig, Server};
//! use moontide_node::{Node, NodeConfig};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // A cluster in this process: a master, and a node with 64 MiB. Usually these are processes: `moontide dev`.
//! let free = "127.0.0.1:0".parse()?;
//! let config = MasterConfig { grpc_listen: free, frame_listen: free, admin_listen: free, ..Default::default() };
//! let server = Server::start(config)?;
//! let master = server.addresses().grpc.to_string();
//! let node = Node::start(NodeConfig { master: master.clone(), memory_bytes: 64 << 20, ..Default::default() })?;
//! assert!(node.wait_until_mounted(Duration::from_secs(5)));
//!
//! // The application. Threads share one store.
//! let store = Store::connect(StoreConfig::new(master))?;
//! store.put(b"prefix-0001", &[42; 600_000])?;
//! if let Some(bytes) = store.get_ref(b"prefix-0001")? {
//!     // Zero-copy if a local node has it: no call and no copy.
//!     assert_eq!(bytes.len(), 600_000);
//! }
//! // Several buffers become one object. It expires after a minute, unless it is evicted before.
//! let for_a_minute = PutOptions { ttl: Some(Duration::from_secs(60)), ..PutOptions::default() };
//! store.put_with(b"prefix-0002", &[b"a part", b" and another"], &for_a_minute)?;
//! assert_eq!(store.get(b"prefix-0002")?.as_deref(), Some(&b"a part and another"[..]));
//! assert!(store.get(b"never put")?.is_none());
//! # Ok(())
//! # }
//! ```
//!
//! The folder `examples/rust` of the repository has complete programs: put and get, zero-copy reads, batches,
//! invalidations.
//!
//! Reading order: [`StoreConfig`], [`StoreError`], `cluster` (the masters), `nodes` (links to the nodes), `local`
//! (shared memory of local nodes), `replica_list` (locations of an object), `read` and `get`, `range`, `put` and
//! `write`, `write_plan`, `in_place`, `rank_store`, `metadata`, `bulk`, `operators`, `drain`, `invalidations`, `blocks`; [`logic`] holds the pure
//! decisions. The lowest layer is the [`link`](LinkConfig): one connection to one master, shared by all threads and
//! tasks of the process.

#![deny(unsafe_code)]

mod single_flight;

// Model checkers compile only the modules above; `--cfg shuttle` excludes the rest.
#[cfg(not(shuttle))]
mod config;
#[cfg(not(shuttle))]
mod error;

#[cfg(not(shuttle))]
mod cluster;
#[cfg(not(shuttle))]
mod nodes;

#[cfg(not(shuttle))]
mod local;
#[cfg(not(shuttle))]
mod replica_list;

#[cfg(not(shuttle))]
mod get;
#[cfg(not(shuttle))]
mod range;
#[cfg(not(shuttle))]
mod read;

#[cfg(not(shuttle))]
mod in_place;
#[cfg(not(shuttle))]
mod put;
#[cfg(not(shuttle))]
mod rank_store;
#[cfg(not(shuttle))]
mod write;
#[cfg(not(shuttle))]
mod write_plan;

#[cfg(not(shuttle))]
mod bulk;
#[cfg(not(shuttle))]
mod drain;
#[cfg(not(shuttle))]
mod invalidations;
#[cfg(not(shuttle))]
mod metadata;
#[cfg(not(shuttle))]
mod operators;

#[cfg(not(shuttle))]
mod async_store;
#[cfg(not(shuttle))]
mod store;

#[cfg(not(shuttle))]
mod blocks;

#[cfg(not(shuttle))]
pub mod logic;
#[cfg(not(shuttle))]
mod metrics;

#[cfg(not(shuttle))]
mod link;

#[cfg(not(shuttle))]
pub use async_store::AsyncStore;
#[cfg(not(shuttle))]
pub use blocks::RemoteBlockStore;
#[cfg(not(shuttle))]
pub use bulk::{BulkProgress, BulkRemoval, BulkSelection};
#[cfg(not(shuttle))]
pub use config::{
    ASYNC_CALLS_MAX_DEFAULT, ASYNC_QUEUE_MAX_DEFAULT, CONNECT_DEFAULT, Hedge, LOCATION_CACHE_ENTRIES_DEFAULT,
    MASTER_DEFAULT, PutOptions, StoreConfig, TIMEOUT_DEFAULT,
};
#[cfg(not(shuttle))]
pub use drain::DrainProgress;
#[cfg(not(shuttle))]
pub use error::StoreError;
#[cfg(not(shuttle))]
pub use get::{GetInto, ObjectRef};
#[cfg(not(shuttle))]
pub use in_place::{InPlaceWrite, RecordAddress};
#[cfg(not(shuttle))]
pub use invalidations::{Invalidation, Invalidations};
#[cfg(not(shuttle))]
pub use metadata::{KeyPage, ObjectInfo};
#[cfg(not(shuttle))]
pub use metrics::{StoreMetrics, StoreStats};
#[cfg(not(shuttle))]
pub use nodes::NodeInfo;
#[cfg(not(shuttle))]
pub use operators::{Evicted, SegmentInfo, SegmentState, TenantInfo};
#[cfg(not(shuttle))]
pub use put::{PutItem, PutOutcome};
#[cfg(not(shuttle))]
pub use rank_store::{
    DeviceKernelCell, PendingRecord, PushCommitError, PushWriter, RankLayout, RankStore, RankStoreError,
    ReadyRecord, Ticket, WaitOutcome,
};
#[cfg(not(shuttle))]
pub use store::Store;
#[cfg(not(shuttle))]
pub use write_plan::{ObjectLocation, StripeLocation, WritePlan};

#[cfg(not(shuttle))]
pub use moontide_heap::{KernelCell, SharedSlotHold};
#[cfg(not(shuttle))]
pub use moontide_symmetric::{PageOutcome, RecordProgress};
#[cfg(not(shuttle))]
pub use moontide_types::record::PinClass;
#[cfg(not(shuttle))]
pub use moontide_types::{InvalidPlace, Medium, Place, Spread};

#[cfg(not(shuttle))]
pub use link::{
    AsyncLink, BATCH_BYTES_MAX, BATCHES_INFLIGHT_MAX, BlockingLink, CONNECT_MS_DEFAULT, Call,
    INFLIGHT_DEFAULT, INFLIGHT_MAX, KeyResult, LinkConfig, LinkError, LinkLoad, LookupEntry, LookupReply,
    MasterHint, ProtocolError, Rejection, TIMEOUT_MS_DEFAULT,
};
