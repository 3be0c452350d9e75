//! The master: groups of metadata behind three doors.
//!
//! [`Service`] is the one handler: it turns messages into commands of [`moontide_meta`]. Around it stand the doors, which
//! own sockets and threads and decide nothing: gRPC for every call, the framed protocol for the hot ones, HTTP for
//! operators. [`Server`] puts them together, from a [`MasterConfig`].
//!
//! Reading order: [`Server`], [`MasterConfig`], the identity of a cluster, [`Service`], then the doors and their metrics.
//!
//! Invariant: nothing is served before this master's term is durable, and a request means the same at both doors.

#![forbid(unsafe_code)]

mod server;

mod config;
pub mod election;
mod identity;

mod service;

mod frame_door;
mod grpc_door;

mod admin;
mod metrics;
mod seats;

pub use config::{
    ADMIN_LISTEN_DEFAULT, AdmissionName, ConfigError, ENVIRONMENT_PREFIX, FRAME_LISTEN_DEFAULT,
    GRPC_LISTEN_DEFAULT, InvalidConfig, Loaded, MasterConfig, Origin, PlacementName, Setting, ValidConfig,
    WrongValue,
};
pub use grpc_door::{CODE_METADATA, code_of};
pub use identity::IdentityError;
pub use server::{Addresses, Server, StartError};
pub use service::{MasterStats, NodeInfo, ReadSums, Role, Service, ServiceConfig, SessionStream, StreamOver};
