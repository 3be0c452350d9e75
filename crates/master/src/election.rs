//! Ownership of groups in a cluster with several masters.
//!
//! A [`Registry`] (etcd or Kubernetes) stores one [`ClusterState`], which changes by compare-and-swap only, and the
//! leases of the live masters. [`ElectionState`] computes a plan from a snapshot of the registry; it is pure logic
//! without clock and I/O. The elector executes the plan: it connects registry, state and service.
//!
//! | | |
//! |---|---|
//! | id of a master | a term, taken from the cluster state when the master joins; no two processes ever have the same |
//! | claim of a group | the master writes itself as its owner, with a new term |
//! | loss of a group | the cluster state has another owner, or the lease of this master is gone |
//! | *unconfirmed* lease | no confirmed renewal for half a lease |
//!
//! An unconfirmed master continues to serve: nodes fence its grants, because each node accepts only the highest term
//! that it knows. Operations that nodes cannot fence are restricted: removals and upserts return `Pending`, and no leases are
//! granted.
//!
//! Invariant: the term of a group increases with every change of its owner, because both are written together.

mod address;
mod cluster_state;
mod elector;
mod etcd;
mod handoff;
mod kubernetes;
#[cfg(any(test, feature = "testing"))]
mod memory;
mod proposal;
mod registry;
mod state;

pub use address::{EtcdTlsFiles, RegistryAddress, RegistryAddressError};
pub use cluster_state::{
    ClusterIdentity, ClusterState, GroupAssignment, GroupOwner, MasterAddresses, TenantChange, TenantState,
};
pub(crate) use elector::Elector;
pub use etcd::{ETCD_PASSWORD_VARIABLE, EtcdRegistry, EtcdUser};
pub(crate) use handoff::HandoffInbox;
pub use kubernetes::{KubernetesRegistry, KubernetesServer};
#[cfg(any(test, feature = "testing"))]
pub use memory::{MemoryRegistry, RegistryState};
pub(crate) use proposal::Proposal;
pub use registry::{DocumentVersion, Registry, RegistryError, Snapshot};
pub use state::{ElectionPlan, ElectionState, GroupTransfer};
