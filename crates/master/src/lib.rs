//! The master: metadata of groups, served over three protocols.
//!
//! [`Service`] handles every call: it translates messages to calls of [`moontide_meta`]. The servers own sockets and
//! threads and contain no logic: gRPC for all calls, the frame protocol for the hot ones, HTTP for operators.
//! [`Server`] starts all of them from a [`MasterConfig`].
//!
//! | type | meaning |
//! |---|---|
//! | [`Server`] | a running master: sockets, threads, election |
//! | [`MasterConfig`] | its settings, from file, environment and flags |
//! | [`Service`] | the handler of all calls; runs without sockets in tests and in the simulation |
//! | [`SessionStream`] | the connection of a node's session: reports in, commands out |
//! | [`election`] | several masters: registry, cluster state, claims of groups, handoffs |
//!
//! # Example: a master answers a lookup
//!
//! ```
//! use moontide_master::{MasterConfig, Role, Server};
//! use moontide_proto::convert::{ExistResponse, Wire};
//! use moontide_proto::{PackedKeysBuilder, v1};
//! use moontide_types::Key;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // On free ports. Without a registry and without `data_dir`: a new cluster, with one master.
//! let free = "127.0.0.1:0".parse()?;
//! let config = MasterConfig { grpc_listen: free, frame_listen: free, admin_listen: free, ..Default::default() };
//! let master = Server::start(config)?;
//! println!("clients and nodes connect to {}", master.addresses().grpc);
//!
//! // The service is what both protocol servers call. A call is a batch of keys.
//! let service = master.service();
//! assert!(matches!(service.role(), Role::Leader { .. }));
//! let mut keys = PackedKeysBuilder::new();
//! keys.push(Key::new(b"prefix-0001")?)?;
//! keys.push(Key::new(b"prefix-0002")?)?;
//! let context = v1::RequestContext { timeout_ms: 1_000, ..Default::default() };
//! let request = v1::ExistRequest { context: Some(context), keys: keys.finish().into() };
//! let response = service.exist(&request);
//!
//! // No node has registered: the cluster is empty, and not ready for puts. `moontide_node` has an example with one.
//! let response = ExistResponse::from_wire(&response)?;
//! let presence = response.body().ok_or("the call failed")?;
//! assert!(presence.present.iter().eq([false, false]));
//! assert!(!service.is_ready());
//! master.shutdown();
//! # Ok(())
//! # }
//! ```
//!
//! Reading order: [`Server`], [`MasterConfig`], the identity of a cluster, [`Service`] (its calls are in
//! `service/objects.rs` for clients, `service/nodes.rs` for nodes, `service/admin.rs` for operators), then the servers
//! and metrics, then [`election`].
//!
//! Invariants: the master serves no call before its term is durable; a request has the same meaning over gRPC and over
//! the frame protocol.

#![forbid(unsafe_code)]

mod server;

mod config;
pub mod election;
mod identity;

mod service;

mod frame_server;
mod grpc_server;

mod access;
mod admin;
mod metrics;

pub use config::{
    ADMIN_LISTEN_DEFAULT, FRAME_LISTEN_DEFAULT, GRPC_LISTEN_DEFAULT, MasterConfig, ValidConfig,
};
pub use grpc_server::{CODE_METADATA, code_of};
pub use identity::IdentityError;
pub use server::{Addresses, Server, StartError};
pub use service::{
    MasterStats, NodeInfo, ReadTotals, Role, Service, ServiceConfig, SessionSecret, SessionStream,
    StreamClosed,
};
