//! One connection to one master, shared by everybody in the process.
//!
//! ```text
//!   exist_one, lookup_one            exist, lookup, call
//!        │ a key                          │ a batch
//!   ┌────▼─────┐  a batch of them   ┌─────▼──────────────┐
//!   │ Gather   ├────────────────────► Table: in flight   │   Traffic: pure, the same for both links
//!   └──────────┘                    └─────┬──────▲───────┘
//!                                  frames │      │ replies, in any order
//!                      ┌──────────────────▼──────┴──────────────────┐
//!                      │ BlockingLink: the callers' own threads     │   sockets
//!                      │ AsyncLink: one driver task                 │
//!                      └────────────────────────────────────────────┘
//! ```
//!
//! What is the same for both: a connection opens with Hello; at most `inflight_max` requests are in flight; single
//! keys go out at once while fewer than [`BATCHES_INFLIGHT_MAX`] batches of their kind are in flight and gather
//! into one batch otherwise, so that a lone caller never waits for company; every wait has a deadline; a connection
//! that breaks fails everybody who waits, and the next call connects again.
//!
//! Reading order: [`config`], [`error`], [`call`] (what can be asked), [`frames`] (bytes), [`gather`], [`table`]
//! and [`traffic`] (decisions), [`hello`] and [`backoff`] (connecting), then the two links.

mod config;
mod error;

mod call;
mod frames;

mod gather;
mod table;
mod traffic;

mod backoff;
mod hello;

mod blocking;

mod driver;
mod tasks;

pub use blocking::BlockingLink;
pub use call::{Call, KeyResult, Located, LookupReply};
pub use config::{
    CONNECT_MS_DEFAULT, DEADLINE_MS_DEFAULT, INFLIGHT_DEFAULT, INFLIGHT_MAX, Known, LinkConfig, LinkLoad,
};
pub use error::{LinkError, ProtocolError, Rejection};
pub use gather::{BATCH_BYTES_MAX, BATCHES_INFLIGHT_MAX};
pub use tasks::AsyncLink;
