//! Moving bytes between processes and hosts. Knows nothing of metadata: who has what is decided elsewhere.
//!
//! A caller hands a batch of [`Op`]s to a [`Link`]: gets and puts between its own memory and a range of a record at a
//! peer. Bytes are named by segment, generation, slot, epoch and offset, never by an address, and the peer checks all of
//! it before it touches one ([`Owner`]).
//!
//! Reading order: [`op`](Op) (what is asked), [`engine`](Engine) (who does it), [`plan`] (how a batch is cut), [`tcp`],
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
pub mod sample;

#[cfg(not(shuttle))]
mod metrics;
mod sync;

#[cfg(not(shuttle))]
pub use engine::{Engine, EngineKind, Engines, Link, NotSuited, Peer, Pending, Score, Waiting, call, run};
#[cfg(not(shuttle))]
pub use error::{Failure, Name, TransferError};
#[cfg(not(shuttle))]
pub use metrics::Metrics;
#[cfg(not(shuttle))]
pub use op::{Direction, Op, OpCore, OpError, Target};
#[cfg(not(shuttle))]
pub use owner::{Caller, Capabilities, Owner};
#[cfg(not(shuttle))]
pub use transfer::{DoneOp, OwnedOp, Transfer};
