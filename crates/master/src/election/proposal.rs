//! [`Proposal`]: a change of a tenant that the service asks the elector to write to the registry.

use tokio::sync::oneshot;

use super::cluster_state::{TenantChange, TenantState};

/// A change of the cluster state, with a channel to the caller that waits for it.
#[derive(Debug)]
pub(crate) struct Proposal {
    pub(crate) tenant: String,
    pub(crate) change: TenantChange,
    pub(crate) agreed: oneshot::Sender<TenantState>,
}
