//! Moves bytes between processes and hosts. It has no metadata: the caller knows which node stores which record.
//!
//! A caller passes a batch of [`Op`]s to a [`Link`]: gets and puts between its own memory and a range of a record at a
//! peer. Bytes are addressed by segment, generation, slot, epoch and offset, never by a pointer. The peer checks all
//! fields before it accesses memory ([`Owner`]).
//!
//! ```
//! use std::sync::Arc;
//! use std::time::{Duration, Instant};
//!
//! use moontide_transfer::sample::{SampleNode, SampleNodeConfig};
//! use moontide_transfer::tcp::{TcpConfig, TcpEngine, TcpServer, TcpServerConfig};
//! use moontide_transfer::{EngineKind, Engines, Metrics, Op, Peer, run};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // Server: a node's memory with a few known records, served on loopback.
//! let metrics = Metrics::new();
//! let sample = Arc::new(SampleNode::new(SampleNodeConfig::default())?);
//! let server = TcpServer::start(TcpServerConfig::default(), sample.clone(), metrics.clone())?;
//!
//! // Client: the best engine of this process that reaches the node.
//! let tcp = Arc::new(TcpEngine::new(TcpConfig::default(), metrics.clone()));
//! let engines = Engines::new(vec![tcp], metrics);
//! let address = server.addresses()[0].to_string();
//! let peer = Peer { node: sample.config().node, addresses: vec![(EngineKind::Tcp, address)] };
//! let deadline = Instant::now() + Duration::from_secs(5);
//! let link = engines.connect(&peer, deadline)?;
//!
//! // Reads one record directly into `bytes`; its pages are digested as they arrive.
//! let config = sample.config();
//! let mut bytes = vec![0; config.record_bytes as usize];
//! let mut digests = [0; 4];
//! let op = Op::get(config.target(3), 0, &mut bytes).digested(config.digest_context(3), &mut digests)?;
//! let mut batch = [op];
//! run(&*link, &mut batch, deadline)?;
//! assert_eq!(batch[0].outcome(), Some(Ok(())));
//! assert_eq!(bytes, config.content(3));
//! # Ok(())
//! # }
//! ```
//!
//! Reading order: [`op`](Op) (operations), [`engine`](Engine) (transports), `framing` (splits a batch into frames),
//! [`tcp`], [`shm`], [`ucx`]; [`topology`] and [`rails`] choose the network path to a peer; [`owner`](Owner) is the
//! server side.

#[cfg(not(shuttle))]
mod batch;
#[cfg(all(feature = "testing", not(shuttle)))]
mod carried;
#[cfg(not(shuttle))]
mod engine;
#[cfg(not(shuttle))]
mod engine_kind;
#[cfg(not(shuttle))]
mod error;
#[cfg(not(shuttle))]
mod op;
#[cfg(not(shuttle))]
mod owner;
#[cfg(not(shuttle))]
mod transfer;

#[cfg(not(shuttle))]
mod framing;
#[cfg(not(shuttle))]
pub mod rails;
#[cfg(not(shuttle))]
pub mod topology;

pub mod tcp;

#[cfg(not(shuttle))]
pub mod shm;

#[cfg(not(shuttle))]
pub mod ucx;

#[cfg(not(shuttle))]
pub mod sample;

#[cfg(not(shuttle))]
mod metrics;

#[cfg(not(shuttle))]
pub use batch::{Batch, Winner, put_in_one_round_trip, run_batches, run_batches_unless_late, run_hedged};
#[cfg(all(feature = "testing", not(shuttle)))]
pub use carried::{CarriedEngine, CarriedRequest, Carrier};
#[cfg(not(shuttle))]
pub use engine::{
    Engine, EngineUnavailable, Engines, Link, Peer, Pending, PipelinedPut, Score, WaitMode, call, run,
};
#[cfg(not(shuttle))]
pub use engine_kind::EngineKind;
#[cfg(not(shuttle))]
pub use error::{ConnectionError, PeerName, TransferError};
#[cfg(not(shuttle))]
pub use metrics::Metrics;
#[cfg(not(shuttle))]
pub use op::{Direction, Op, OpCore, OpError, Target};
#[cfg(not(shuttle))]
pub use owner::{Owner, PeerIdentity, check_tenant, is_granted, pin_record};
#[cfg(all(feature = "testing", not(shuttle)))]
pub use owner::{serve_read, serve_write};
#[cfg(not(shuttle))]
pub use transfer::{CompletedOp, OwnedOp, Transfer};
