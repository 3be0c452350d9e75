//! What an application talks to.
//!
//! Owns the client's side of every conversation; stores nothing. So far it holds the **link**: one connection to
//! one master over the framed protocol, shared by everybody in the process. Put and get, the choice of replicas,
//! hedging, verification and the fast path of the same host are built on it and follow.
//!
//! Two links with the same calls: [`BlockingLink`] for threads, [`AsyncLink`] for tasks of a tokio runtime. Reading
//! order: [`LinkConfig`], [`BlockingLink`], [`AsyncLink`], [`LinkError`], then the module `link`, which draws how
//! the parts fit.
//!
//! ```no_run
//! use moontide_client::{BlockingLink, LinkConfig};
//! use moontide_proto::convert::CallerId;
//! use moontide_types::{Key, Tenant};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let link = BlockingLink::connect(LinkConfig::new("10.0.0.7:7001", CallerId(0x5eed)))?;
//! match link.exist_one(Tenant::DEFAULT, Key::new(b"prefix-0001")?)? {
//!     Ok(present) => println!("{present}"),
//!     Err(code) => println!("the master cannot say: {}", code.hint()),
//! }
//! # Ok(())
//! # }
//! ```

#![forbid(unsafe_code)]

mod link;

pub use link::{
    AsyncLink, BATCH_BYTES_MAX, BATCHES_INFLIGHT_MAX, BlockingLink, CONNECT_MS_DEFAULT, Call,
    DEADLINE_MS_DEFAULT, INFLIGHT_DEFAULT, INFLIGHT_MAX, KeyResult, Known, LinkConfig, LinkError, LinkLoad,
    Located, LookupReply, ProtocolError, Rejection,
};
