//! In-memory registry, for tests and the simulation. It implements the full contract of [`Registry`], without
//! durability.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use moontide_types::{Clock, MonoTime, SystemClock, Term};
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::cluster_state::{ClusterIdentity, ClusterState, MasterAddresses};
use super::registry::{DocumentVersion, Registry, RegistryError, Snapshot};

/// Content of a registry. Time is an argument.
#[derive(Clone, Debug, Default)]
pub struct RegistryState {
    identity: Option<ClusterIdentity>,
    document: Option<ClusterState>,
    members: BTreeMap<u32, Member>,
}

#[derive(Clone, Debug)]
struct Member {
    addresses: MasterAddresses,
    lease: Duration,
    expiry: MonoTime,
}

impl RegistryState {
    /// As [`Registry::identity`].
    pub fn identity(&mut self, draft: &ClusterIdentity) -> ClusterIdentity {
        self.identity.get_or_insert_with(|| draft.clone()).clone()
    }

    /// As [`Registry::read`].
    pub fn read(&mut self, now: MonoTime) -> Snapshot {
        self.members.retain(|_, member| member.expiry > now);
        let version = |document: &ClusterState| DocumentVersion(document.version.to_string());
        Snapshot {
            document: self.document.as_ref().map(|document| (version(document), document.clone())),
            members: self.members.iter().map(|(&number, m)| (number, m.addresses.clone())).collect(),
        }
    }

    /// As [`Registry::write`].
    pub fn write(&mut self, version: Option<&DocumentVersion>, document: &ClusterState) -> bool {
        let current = self.document.as_ref().map(|document| DocumentVersion(document.version.to_string()));
        let matches = current.as_ref() == version;
        if matches {
            self.document = Some(document.clone());
        }
        matches
    }

    /// As [`Registry::join`].
    pub fn join(&mut self, now: MonoTime, number: Term, addresses: &MasterAddresses, lease: Duration) {
        let member = Member { addresses: addresses.clone(), lease, expiry: now.after(lease) };
        self.members.insert(number.get(), member);
    }

    /// As [`Registry::renew`].
    pub fn renew(&mut self, now: MonoTime, number: Term) -> bool {
        match self.members.get_mut(&number.get()).filter(|member| member.expiry > now) {
            Some(member) => {
                member.expiry = now.after(member.lease);
                true
            }
            None => false,
        }
    }

    /// As [`Registry::remove`].
    pub fn remove(&mut self, number: Term) {
        self.members.remove(&number.get());
    }
}

/// A [`RegistryState`] that several masters of one process share.
#[derive(Clone, Debug, Default)]
pub struct MemoryRegistry {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<RegistryState>,
    unavailable: Mutex<bool>,
    notify: Notify,
}

impl MemoryRegistry {
    /// Makes the registry unreachable, or reachable again.
    pub fn set_unavailable(&self, unavailable: bool) {
        *self.shared.unavailable.lock() = unavailable;
        self.shared.notify.notify_waiters();
    }

    fn with<'a, T: Send + 'a>(
        &'a self,
        call: impl FnOnce(&mut RegistryState, MonoTime) -> T + Send + 'a,
    ) -> BoxFuture<'a, Result<T, RegistryError>> {
        async move {
            if *self.shared.unavailable.lock() {
                let (address, reason) = ("memory".into(), "set unavailable by the test".into());
                return Err(RegistryError::Unreachable { address, reason });
            }
            let done = call(&mut self.shared.state.lock(), SystemClock.now());
            self.shared.notify.notify_waiters();
            Ok(done)
        }
        .boxed()
    }
}

impl Registry for MemoryRegistry {
    fn identity<'a>(
        &'a self,
        draft: &'a ClusterIdentity,
    ) -> BoxFuture<'a, Result<ClusterIdentity, RegistryError>> {
        self.with(move |state, _| state.identity(draft))
    }

    fn read(&self) -> BoxFuture<'_, Result<Snapshot, RegistryError>> {
        self.with(|state, now| state.read(now))
    }

    fn write<'a>(
        &'a self,
        version: Option<&'a DocumentVersion>,
        document: &'a ClusterState,
    ) -> BoxFuture<'a, Result<bool, RegistryError>> {
        self.with(move |state, _| state.write(version, document))
    }

    fn join<'a>(
        &'a self,
        number: Term,
        addresses: &'a MasterAddresses,
        lease: Duration,
    ) -> BoxFuture<'a, Result<(), RegistryError>> {
        self.with(move |state, now| state.join(now, number, addresses, lease))
    }

    fn renew(&self, number: Term) -> BoxFuture<'_, Result<bool, RegistryError>> {
        self.with(move |state, now| state.renew(now, number))
    }

    fn remove(&self, number: Term) -> BoxFuture<'_, Result<(), RegistryError>> {
        self.with(move |state, _| state.remove(number))
    }

    fn changed<'a>(&'a self, seen: &'a Snapshot, wait: Duration) -> BoxFuture<'a, ()> {
        async move {
            let deadline = tokio::time::Instant::now() + wait;
            loop {
                let notified = self.shared.notify.notified();
                if *seen != self.shared.state.lock().read(SystemClock.now()) {
                    return;
                }
                // Leases expire without a notification.
                let soon = deadline.min(tokio::time::Instant::now() + Duration::from_millis(20));
                let _ = tokio::time::timeout_at(soon, notified).await;
                if tokio::time::Instant::now() >= deadline {
                    return;
                }
            }
        }
        .boxed()
    }
}
