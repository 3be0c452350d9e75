//! Who hosts which group, where there is more than one master.
//!
//! Masters meet at a [`Registry`]: etcd, or Kubernetes. It keeps one [`Document`], which is changed by compare-and-swap only,
//! and knows which masters live, by leases. Everything else follows: [`Candidate`] looks at what the registry says and
//! decides, without a clock or a socket of its own; the campaign carries messages between the two and the service.
//!
//! | | |
//! |---|---|
//! | number of a master | a term, taken from the document when the master joins; no two processes ever have the same |
//! | taking a group | writing oneself as its owner, with a term that nobody had before |
//! | losing a group | the document names another owner, or the registry says that the lease is gone |
//! | not knowing | no renewal for half a lease: *unconfirmed* |
//!
//! An unconfirmed master goes on: what it grants is fenced by the nodes, each of which obeys the highest term that it has
//! seen. Only what no node can fence is left: removals are answered as pending, and no leases are given.
//!
//! Invariant: a group's term rises whenever its owner changes, because both are written at once.

mod address;
mod campaign;
mod candidate;
mod document;
mod estate;
mod etcd;
mod kubernetes;
mod memory;
mod registry;

pub use address::{BadRegistryAddress, EtcdTlsFiles, RegistryAddress};
pub(crate) use campaign::{Campaign, Proposal};
pub use candidate::{Candidate, Gift, Plan, Standing};
pub use document::{Document, Hosting, Identity, MasterAddresses, Owner, TenantChange, TenantEntry};
pub(crate) use estate::Estates;
pub use etcd::{EtcdRegistry, EtcdTls};
pub use kubernetes::{KubernetesRegistry, KubernetesServer};
pub use memory::{Board, MemoryRegistry};
pub use registry::{Registry, RegistryError, Snapshot, Token};
