//! Moving bytes between processes and hosts. Knows nothing of metadata: who has what is decided elsewhere.
//!
//! A caller hands a batch of [`Op`]s to a [`Link`]: gets and puts between its own memory and a range of a record at a
//! peer. Bytes are named by segment, generation, slot, epoch and offset, never by an address, and the peer checks all of
//! it before it touches one ([`Owner`]).
//!
//! ```
//! use std::sync::Arc;
//! use std::time::{Duration, Instant};
//!
//! use moontide_transfer::sample::{Sample, SampleConfig};
//! use moontide_transfer::tcp::{Server, ServerConfig, TcpConfig, TcpEngine};
//! use moontide_transfer::{EngineKind, Engines, Metrics, Op, Peer, run};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // The far end: a node's memory with a few known records, served on loopback.
//! let metrics = Metrics::new();
//! let sample = Arc::new(Sample::new(SampleConfig::default())?);
//! let server = Server::start(ServerConfig::default(), sample.clone(), metrics.clone())?;
//!
//! // The near end: the best of this process's engines that reaches the node.
//! let tcp = Arc::new(TcpEngine::new(TcpConfig::default(), metrics.clone()));
//! let engines = Engines::new(vec![tcp], metrics);
//! let address = server.addresses()[0].to_string();
//! let peer = Peer { node: sample.config().node, addresses: vec![(EngineKind::Tcp, address)] };
//! let deadline = Instant::now() + Duration::from_secs(5);
//! let link = engines.connect(&peer, deadline)?;
//!
//! // One record, straight into our memory; its pages are digested as they arrive.
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
//! Reading order: [`op`](Op) (what is asked), [`engine`](Engine) (who does it), `plan` (how a batch is cut), [`tcp`],
//! [`shm`], [`ucx`]; [`topology`] and [`rails`] say which ways lead to a peer; [`owner`](Owner) is the far end.

#[cfg(not(shuttle))]
mod engine;
#[cfg(not(shuttle))]
mod error;
#[cfg(not(shuttle))]
mod op;
#[cfg(not(shuttle))]
mod owner;
#[cfg(not(shuttle))]
mod together;
#[cfg(not(shuttle))]
mod transfer;

#[cfg(not(shuttle))]
mod plan;
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
mod sync;

#[cfg(not(shuttle))]
pub use engine::{
    Engine, EngineKind, Engines, Link, NotSuited, OneGo, Peer, Pending, Score, Waiting, call, run,
};
#[cfg(not(shuttle))]
pub use error::{Failure, Name, TransferError};
#[cfg(not(shuttle))]
pub use metrics::Metrics;
#[cfg(not(shuttle))]
pub use op::{Direction, Op, OpCore, OpError, Target};
#[cfg(not(shuttle))]
pub use owner::{Caller, Capabilities, Owner};
#[cfg(not(shuttle))]
pub use together::{Batch, Winner, put_in_one_go, run_hedged, run_together};
#[cfg(not(shuttle))]
pub use transfer::{DoneOp, OwnedOp, Transfer};
