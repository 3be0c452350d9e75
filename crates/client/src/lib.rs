//! What an application talks to: puts and gets of objects in a cluster.
//!
//! [`Store`] is for threads, [`AsyncStore`] for tasks; both share everything below. The client's side of every
//! conversation is here, and it stores nothing but where objects were last seen.
//!
//! ```no_run
//! use moontide_client::{PutOptions, Store, StoreConfig};
//!
//! # fn main() -> Result<(), moontide_client::StoreError> {
//! let store = Store::connect(StoreConfig::new("127.0.0.1:7400"))?;
//! store.put(b"prefix-0001", &[42; 600_000])?;
//! if let Some(bytes) = store.get_ref(b"prefix-0001")? {
//!     // In place, if a node on this host has it: no call and no copy.
//!     assert_eq!(bytes.len(), 600_000);
//! }
//! let twice = PutOptions { replicas: 2, ..PutOptions::default() };
//! store.put_with(b"prefix-0002", &[b"a part", b" and another"], &twice)?;
//! # Ok(())
//! # }
//! ```
//!
//! Reading order: [`StoreConfig`], [`StoreError`], `cluster` (the master), `nodes` (links to those that hold bytes),
//! `local` (memory of this host), `place` (where an object is), `read` and `get`, `range`, `put` and `write`, `plan`,
//! `in_place`, `hop`, `operate`, `departures`, `blocks`;
//! [`decide`] is what of it is pure. Below lies the [`link`](LinkConfig): one connection to one master, shared by
//! everybody in the process.

#![deny(unsafe_code)]

/// Everything but what a model checker runs by itself (`--cfg shuttle`): that is [`flights`] alone.
macro_rules! the_rest {
    ($($item:item)*) => { $(#[cfg(not(shuttle))] $item)* };
}

mod flights;
mod sync;

the_rest! {
    mod config;
    mod error;

    mod cluster;
    mod nodes;

    mod local;
    mod place;

    mod get;
    mod range;
    mod read;

    mod hop;
    mod in_place;
    mod plan;
    mod put;
    mod write;

    mod departures;
    mod operate;

    mod store;
    mod tasks;

    mod blocks;

    pub mod decide;
    mod metrics;

    mod link;

    pub use blocks::BlockStore;
    pub use config::{
        CONNECT_DEFAULT, DEADLINE_DEFAULT, Hedge, LOCATIONS_DEFAULT, PutOptions, StoreConfig, WAITING_DEFAULT,
        WORKING_DEFAULT,
    };
    pub use departures::{Departure, Departures};
    pub use error::StoreError;
    pub use get::{GetInto, ObjectRef};
    pub use hop::{Arrived, Awaited, Cut, Hop, HopError, NotCommitted, Push, SightCell, Ticket, Wait};
    pub use in_place::{PlaceOf, PlanInPlace};
    pub use metrics::{StoreMetrics, StoreStats};
    pub use nodes::NodeInfo;
    pub use operate::{KeyPage, ObjectInfo};
    pub use plan::{Location, StripePlace, WritePlan};
    pub use put::{Put, PutItem};
    pub use store::Store;
    pub use tasks::AsyncStore;

    pub use moontide_heap::{Counted, KernelCell, Progress, SharedStay};
    pub use moontide_proto::Medium;

    pub use link::{
        AsyncLink, BATCH_BYTES_MAX, BATCHES_INFLIGHT_MAX, BlockingLink, CONNECT_MS_DEFAULT, Call,
        DEADLINE_MS_DEFAULT, INFLIGHT_DEFAULT, INFLIGHT_MAX, KeyResult, Known, LinkConfig, LinkError, LinkLoad,
        Located, LookupReply, ProtocolError, Rejection,
    };
}
