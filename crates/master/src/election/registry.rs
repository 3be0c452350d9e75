//! [`Registry`]: interface to etcd or Kubernetes. It contains no election logic.

use std::collections::BTreeMap;
use std::error::Error;
use std::fmt;
use std::time::Duration;

use futures_util::future::BoxFuture;
use moontide_types::Term;

use super::cluster_state::{ClusterIdentity, ClusterState, MasterAddresses};

/// Version of the stored cluster state, for compare-and-swap. Opaque: defined by the registry.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct DocumentVersion(pub String);

/// Content of a registry at a point in time.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Snapshot {
    /// Cluster state and its version; `None` before the first master.
    pub document: Option<(DocumentVersion, ClusterState)>,
    /// Live masters, by id.
    pub members: BTreeMap<u32, MasterAddresses>,
}

/// Error of a call of a registry. All of them may be temporary.
#[derive(Debug, thiserror::Error)]
pub enum RegistryError {
    /// The registry is unreachable, or did not respond in time.
    #[error("cannot reach registry {address}: {reason}; check that it runs at this address")]
    Unreachable {
        /// Address of the registry.
        address: String,
        /// Error of the transport.
        reason: String,
    },
    /// The registry denied access.
    #[error("registry {address} denied access: {reason}; check the credentials and their permissions")]
    Denied {
        /// Address of the registry.
        address: String,
        /// Error text of the registry.
        reason: String,
    },
    /// The registry contains invalid data.
    #[error(
        "registry {address} contains {what} that is invalid: {reason}; use a separate prefix or name for this cluster"
    )]
    Malformed {
        /// Address of the registry.
        address: String,
        /// Kind of the data.
        what: &'static str,
        /// Error of the decoder.
        reason: String,
    },
}

/// Registry of masters: identity, cluster state and leases.
///
/// A membership ends one lease after its last renewal. The registry measures the time, or each observer from the time
/// at which it observed the last renewal; clocks of two hosts are never compared. Calls time out within one or two
/// seconds if the registry does not respond.
pub trait Registry: Send + Sync + fmt::Debug {
    /// Returns the stored identity of the cluster, or stores and returns `draft` if there is none.
    fn identity<'a>(
        &'a self,
        draft: &'a ClusterIdentity,
    ) -> BoxFuture<'a, Result<ClusterIdentity, RegistryError>>;

    /// Reads the current content. Members and cluster state may be of slightly different times; the cluster state is
    /// not older than any that this process has read or written before.
    fn read(&self) -> BoxFuture<'_, Result<Snapshot, RegistryError>>;

    /// Replaces the cluster state of `version`; without a version none may exist. Returns false if another process has
    /// replaced it before. After an error it is unknown whether it was replaced.
    fn write<'a>(
        &'a self,
        version: Option<&'a DocumentVersion>,
        document: &'a ClusterState,
    ) -> BoxFuture<'a, Result<bool, RegistryError>>;

    /// Joins as a member. `number` is the id of the master, which no master had before.
    fn join<'a>(
        &'a self,
        number: Term,
        addresses: &'a MasterAddresses,
        lease: Duration,
    ) -> BoxFuture<'a, Result<(), RegistryError>>;

    /// Renews the lease of a member. Returns false if its membership has ended; it must join again with another id.
    fn renew(&self, number: Term) -> BoxFuture<'_, Result<bool, RegistryError>>;

    /// Ends a membership: the own one, or that of a process that has exited.
    fn remove(&self, number: Term) -> BoxFuture<'_, Result<(), RegistryError>>;

    /// Waits until the content may differ from `seen`, at most for `wait`. May return early, also after an error.
    fn changed<'a>(&'a self, seen: &'a Snapshot, wait: Duration) -> BoxFuture<'a, ()>;
}

/// Returns the text of the innermost source of an error; the outer errors of libraries contain no details.
pub(super) fn root_cause(error: &(dyn Error + 'static)) -> String {
    let causes = std::iter::successors(Some(error), |&cause| cause.source());
    causes.last().expect("iterator starts with the error itself").to_string()
}
