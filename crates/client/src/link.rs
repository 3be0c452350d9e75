//! Link: one connection to one master, shared by all threads and tasks of the process.
//!
//! ```text
//!   exist_one, lookup_one            exist, lookup, call
//!        │ one key                        │ a batch
//!   ┌────▼─────┐  a batch of them   ┌─────▼──────────────┐
//!   │KeyBatcher├────────────────────► Table: in flight   │   RequestTracker: pure, the same for both links
//!   └──────────┘                    └─────┬──────▲───────┘
//!                                  frames │      │ replies, in any order
//!                      ┌──────────────────▼──────┴──────────────────┐
//!                      │ BlockingLink: the callers' own threads     │   sockets
//!                      │ AsyncLink: one driver task                 │
//!                      └────────────────────────────────────────────┘
//! ```
//!
//! Common to both: a connection opens with Hello; at most `inflight_max` requests are in flight. A single key is sent
//! at once while fewer than [`BATCHES_INFLIGHT_MAX`] batches of its kind are in flight, and is batched otherwise, so
//! that a lone caller never waits for other keys. Every wait has a deadline. A broken connection fails all waiting
//! calls, and the next call reconnects.
//!
//! Reading order: [`config`], [`error`], [`call`] (requests and replies), [`frames`] (bytes), [`batcher`], [`table`]
//! and [`tracker`] (pure logic), [`handshake`] and [`reconnect`] (connecting), then the two links.

mod config;
mod error;

mod call;
mod frames;

mod batcher;
mod table;
mod tracker;

mod handshake;
mod reconnect;

mod blocking;

mod async_link;
mod driver;

pub use async_link::AsyncLink;
pub use batcher::{BATCH_BYTES_MAX, BATCHES_INFLIGHT_MAX};
pub use blocking::BlockingLink;
pub use call::{Call, KeyResult, LookupEntry, LookupReply};
pub use config::{
    CONNECT_MS_DEFAULT, INFLIGHT_DEFAULT, INFLIGHT_MAX, LinkConfig, LinkLoad, MasterHint, TIMEOUT_MS_DEFAULT,
};
pub use error::{LinkError, ProtocolError, Rejection};
