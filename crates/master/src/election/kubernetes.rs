//! [`KubernetesRegistry`]: registry at the API server of Kubernetes.
//!
//! | object | content |
//! |---|---|
//! | Secret `<name>-identity` | [`ClusterIdentity`]; never changed |
//! | Lease `<name>` | [`ClusterState`], in an annotation; its version is the uid and version of the object |
//! | Lease `<name>-master-<id>` | a member: lease, time of the last renewal, [`MasterAddresses`] in an annotation |
//!
//! The API server does not expire leases. A master that observes no renewal of a member for the duration of its lease
//! (see [`Liveness`]) deletes the object, with its observed version as a precondition. So a renewal and a deletion
//! cannot both succeed, and a member detects the loss of its membership when its own object is gone.
//!
//! Invariant: an update contains the version and the uid of the object. Without a uid, the API server would create a
//! deleted Lease again.

mod api;
mod liveness;
mod objects;

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use hyper::Method;
use moontide_types::{Clock, SystemClock, Term};
use parking_lot::Mutex;
use serde::Serialize;
use tokio::time::{sleep, timeout};

pub use self::api::KubernetesServer;
use self::api::{Api, ApiError};
use self::liveness::{LeaseObservation, Liveness};
use self::objects::{DeleteOptions, Event, Lease, LeaseList, LeaseSpec, Metadata, Secret, micro_time};
use super::cluster_state::{ClusterIdentity, ClusterState, MEMBERS_MAX, MasterAddresses, check_count};
use super::registry::{DocumentVersion, Registry, RegistryError, Snapshot};

/// Label of the objects of a cluster.
const LABEL: &str = "moontide/cluster";
/// Annotation with the cluster state. The API server limits the annotations of an object to 256 KiB.
const DOCUMENT: &str = "moontide/document";
/// Annotation with the addresses of a member.
const ADDRESSES: &str = "moontide/addresses";
/// Field of the Secret with the identity.
const IDENTITY: &str = "identity";
/// Delay after a failed watch, so that callers that wait in a loop do not spin.
const WATCH_PAUSE: Duration = Duration::from_millis(100);

/// Registry under a name in a namespace.
#[derive(Debug)]
pub struct KubernetesRegistry {
    api: Api,
    namespace: String,
    name: String,
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    liveness: Liveness,
    /// Objects of the members that joined through this registry, in their last written form.
    own: BTreeMap<u32, Lease>,
}

/// Objects of a cluster.
struct ClusterObjects {
    /// Version from which a watch continues.
    version: String,
    snapshot: Snapshot,
}

impl KubernetesRegistry {
    /// Creates a registry with this name in a namespace. Connects at the first call. Must be called inside a tokio
    /// runtime.
    pub fn connect(
        server: KubernetesServer,
        namespace: &str,
        name: &str,
    ) -> Result<KubernetesRegistry, RegistryError> {
        let api = Api::new(server).map_err(|error| RegistryError::Denied {
            address: format!("kubernetes://{namespace}/{name}"),
            reason: error.to_string(),
        })?;
        Ok(KubernetesRegistry {
            api,
            namespace: namespace.into(),
            name: name.into(),
            state: Mutex::new(State::default()),
        })
    }

    fn address(&self) -> String {
        format!("kubernetes://{}/{}", self.namespace, self.name)
    }

    fn leases(&self) -> String {
        format!("/apis/coordination.k8s.io/v1/namespaces/{}/leases", self.namespace)
    }

    fn selected(&self) -> String {
        // "moontide/cluster=<name>", escaped for a query.
        format!("{}?labelSelector={}%3D{}", self.leases(), LABEL.replace('/', "%2F"), self.name)
    }

    fn secrets(&self) -> String {
        format!("/api/v1/namespaces/{}/secrets", self.namespace)
    }

    fn member_name(&self, number: Term) -> String {
        format!("{}-master-{number}", self.name)
    }

    fn metadata(&self, name: String, annotation: &str, value: String) -> Metadata {
        Metadata {
            name,
            labels: BTreeMap::from([(LABEL.into(), self.name.clone())]),
            annotations: BTreeMap::from([(annotation.into(), value)]),
            ..Metadata::default()
        }
    }

    fn failed(&self, error: ApiError) -> RegistryError {
        let (address, reason) = (self.address(), error.to_string());
        match error {
            error if error.is_denied() => RegistryError::Denied { address, reason },
            ApiError::Malformed(_) => RegistryError::Malformed { address, what: "an object", reason },
            _ => RegistryError::Unreachable { address, reason },
        }
    }

    fn malformed(&self, what: &'static str, reason: impl ToString) -> RegistryError {
        RegistryError::Malformed { address: self.address(), what, reason: reason.to_string() }
    }

    async fn get(&self, name: &str) -> Result<Lease, ApiError> {
        self.api.call(Method::GET, &format!("{}/{name}", self.leases()), None::<&Lease>).await
    }

    async fn put(&self, lease: &Lease) -> Result<Lease, ApiError> {
        let path = format!("{}/{}", self.leases(), lease.metadata.name);
        self.api.call(Method::PUT, &path, Some(lease)).await
    }

    async fn post(&self, lease: &Lease) -> Result<Lease, ApiError> {
        self.api.call(Method::POST, &self.leases(), Some(lease)).await
    }

    /// Deletes a Lease. Returns false if it exists but violates the preconditions of `options`.
    async fn delete(&self, name: &str, options: Option<&impl Serialize>) -> Result<bool, ApiError> {
        let path = format!("{}/{name}", self.leases());
        match self.api.call::<_, serde_json::Value>(Method::DELETE, &path, options).await {
            Ok(_) => Ok(true),
            Err(error) if error.is_not_found() => Ok(true),
            Err(error) if error.is_conflict() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Applies the timeout of one call to several calls.
    async fn within<T>(
        &self,
        calls: impl Future<Output = Result<T, RegistryError>>,
    ) -> Result<T, RegistryError> {
        match timeout(api::CALL, calls).await {
            Ok(outcome) => outcome,
            Err(_) => Err(self.failed(api::no_response())),
        }
    }

    /// Reads all objects of the cluster, and deletes members whose lease has expired.
    async fn load(&self) -> Result<ClusterObjects, RegistryError> {
        let list = self.api.call(Method::GET, &self.selected(), None::<&Lease>).await;
        let list: LeaseList = list.map_err(|error| self.failed(error))?;
        // And the object with the state.
        check_count("members", list.items.len(), MEMBERS_MAX + 1)
            .map_err(|reason| self.malformed("the members", reason))?;
        let mut document = None;
        let (mut members, mut observations, mut leases) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        for lease in list.items {
            if lease.metadata.name == self.name {
                document = Some(self.document(&lease)?);
            } else if let Some((number, observation, addresses)) = self.member(&lease)? {
                members.insert(number, addresses);
                observations.insert(number, observation);
                leases.insert(number, lease);
            }
        }
        let dead = self.state.lock().liveness.observe_all(SystemClock.now(), &observations);
        for number in dead {
            let lease = &leases[&number];
            let deleted =
                self.delete(&lease.metadata.name, Some(&DeleteOptions::exactly(&lease.metadata))).await;
            match deleted {
                Ok(true) => {
                    tracing::info!(master_id = number, "lease of a master expired; removed from the members")
                }
                // The member has just renewed its lease; the next read returns it.
                Ok(false) => continue,
                Err(error) => return Err(self.failed(error)),
            }
            members.remove(&number);
        }
        Ok(ClusterObjects {
            version: list.metadata.resource_version,
            snapshot: Snapshot { document, members },
        })
    }

    fn document(&self, lease: &Lease) -> Result<(DocumentVersion, ClusterState), RegistryError> {
        let Some(json) = lease.metadata.annotations.get(DOCUMENT) else {
            let reason = format!("lease {} has no annotation {DOCUMENT}", self.name);
            return Err(self.malformed("a cluster state", reason));
        };
        let document = ClusterState::decode(json.as_bytes())
            .map_err(|reason| self.malformed("a cluster state", reason))?;
        Ok((version(&lease.metadata), document))
    }

    /// Parses the Lease of a member. Returns `None` for another object with the same label.
    fn member(
        &self,
        lease: &Lease,
    ) -> Result<Option<(u32, LeaseObservation, MasterAddresses)>, RegistryError> {
        let metadata = &lease.metadata;
        let rest = metadata.name.strip_prefix(&self.name).and_then(|rest| rest.strip_prefix("-master-"));
        let Some(Ok(number)) = rest.and_then(|text| text.parse().ok()).map(Term::new) else {
            return Ok(None);
        };
        let malformed =
            |reason: String| self.malformed("a member", format!("lease {}: {reason}", metadata.name));
        let spec = &lease.spec;
        let (Some(seconds), Some(renewed)) = (spec.lease_duration_seconds, &spec.renew_time) else {
            return Err(malformed("duration or renewal time is missing".into()));
        };
        let addresses = metadata.annotations.get(ADDRESSES);
        let addresses = addresses.ok_or_else(|| malformed(format!("annotation {ADDRESSES} is missing")))?;
        let addresses = MasterAddresses::decode(addresses.as_bytes()).map_err(malformed)?;
        let renewal = format!("{} {renewed}", metadata.uid);
        Ok(Some((
            number.get(),
            LeaseObservation { renewal, lease: Duration::from_secs(seconds.into()) },
            addresses,
        )))
    }

    /// Waits until the content differs from the snapshot, or the lease of a member expires.
    async fn watch(&self, objects: &ClusterObjects, wait: Duration) -> Result<(), ApiError> {
        let seconds = wait.as_secs().saturating_add(1);
        let path = format!(
            "{}&watch=1&allowWatchBookmarks=true&resourceVersion={}&timeoutSeconds={seconds}",
            self.selected(),
            objects.version
        );
        let mut watch = self.api.watch(&path).await?;
        loop {
            let end = self.state.lock().liveness.next_end();
            let left = end.map_or(wait, |end| end.since(SystemClock.now()));
            let Ok(event) = timeout(left, watch.next()).await else { return Ok(()) };
            match event? {
                None => return Err(ApiError::NoResponse("watch ended".into())),
                Some(Event::Bookmark) => {}
                Some(Event::Closed { code, message }) => return Err(ApiError::Refused { code, message }),
                Some(Event::Deleted(lease)) if self.is_member_or_state(&lease) => return Ok(()),
                Some(Event::Updated(lease)) if self.is_change(objects, &lease) => return Ok(()),
                Some(Event::Deleted(_) | Event::Updated(_)) => {}
            }
            self.state.lock().liveness.in_contact(SystemClock.now());
        }
    }

    fn is_member_or_state(&self, lease: &Lease) -> bool {
        lease.metadata.name == self.name || !matches!(self.member(lease), Ok(None))
    }

    /// Returns whether the event changes the snapshot. A renewal does not; it is recorded in the liveness.
    fn is_change(&self, objects: &ClusterObjects, lease: &Lease) -> bool {
        if lease.metadata.name == self.name {
            let known = objects.snapshot.document.as_ref().map(|(version, _)| version);
            return known != Some(&version(&lease.metadata));
        }
        match self.member(lease) {
            Ok(None) => false,
            Ok(Some((number, observation, addresses))) => {
                self.state.lock().liveness.observe(SystemClock.now(), number, &observation);
                objects.snapshot.members.get(&number) != Some(&addresses)
            }
            Err(_) => true, // the next read reports the error
        }
    }

    /// Renews the Lease of an own member. Returns `None` if the object is gone.
    async fn refresh(&self, mut lease: Lease) -> Result<Option<Lease>, ApiError> {
        lease.spec.renew_time = Some(micro_time(SystemTime::now()));
        match self.put(&lease).await {
            Ok(written) => return Ok(Some(written)),
            Err(error) if error.is_not_found() => return Ok(None),
            Err(error) if !error.is_conflict() => return Err(error),
            Err(_) => {}
        }
        // The object is gone or was changed: by an earlier renewal whose response was lost, or by a change of
        // annotations.
        match self.get(&lease.metadata.name).await {
            Err(error) if error.is_not_found() => Ok(None),
            Err(error) => Err(error),
            Ok(found) if found.metadata.uid != lease.metadata.uid => Ok(None),
            Ok(found) => {
                lease.metadata.resource_version = found.metadata.resource_version;
                self.put(&lease).await.map(Some)
            }
        }
    }
}

impl Registry for KubernetesRegistry {
    fn identity<'a>(
        &'a self,
        draft: &'a ClusterIdentity,
    ) -> BoxFuture<'a, Result<ClusterIdentity, RegistryError>> {
        self.within(async move {
            let name = format!("{}-identity", self.name);
            let path = format!("{}/{name}", self.secrets());
            let get = || self.api.call::<_, Secret>(Method::GET, &path, None::<&Secret>);
            let secret = match get().await {
                Err(error) if error.is_not_found() => {
                    let json = serde_json::to_vec(draft).expect("numbers are valid JSON");
                    let labels = BTreeMap::from([(LABEL.into(), self.name.clone())]);
                    let secret = Secret {
                        api_version: "v1".into(),
                        kind: "Secret".into(),
                        metadata: Metadata { name, labels, ..Metadata::default() },
                        data: BTreeMap::from([(IDENTITY.into(), BASE64_STANDARD.encode(json))]),
                        immutable: true,
                    };
                    match self.api.call(Method::POST, &self.secrets(), Some(&secret)).await {
                        Err(error) if error.is_conflict() => get().await,
                        created => created,
                    }
                }
                found => found,
            };
            let secret = secret.map_err(|error| self.failed(error))?;
            let Some(data) = secret.data.get(IDENTITY) else {
                return Err(self.malformed("an identity", format!("secret has no field {IDENTITY}")));
            };
            let json = BASE64_STANDARD.decode(data);
            let json = json.map_err(|_| self.malformed("an identity", "it is no valid base64"))?;
            ClusterIdentity::decode(&json).map_err(|reason| self.malformed("an identity", reason))
        })
        .boxed()
    }

    fn read(&self) -> BoxFuture<'_, Result<Snapshot, RegistryError>> {
        async move { Ok(self.within(self.load()).await?.snapshot) }.boxed()
    }

    fn write<'a>(
        &'a self,
        version: Option<&'a DocumentVersion>,
        document: &'a ClusterState,
    ) -> BoxFuture<'a, Result<bool, RegistryError>> {
        async move {
            let json = document.encode().map_err(|reason| self.malformed("a cluster state", reason))?;
            let json = String::from_utf8(json).expect("JSON is text");
            let mut lease =
                Lease::new(self.metadata(self.name.clone(), DOCUMENT, json), LeaseSpec::default());
            let written = match version {
                None => self.post(&lease).await,
                Some(DocumentVersion(text)) => {
                    let Some((uid, resource_version)) = text.split_once('/') else {
                        return Err(self.malformed("a version", format!("{text:?} is no uid/version")));
                    };
                    lease.metadata.uid = uid.into();
                    lease.metadata.resource_version = resource_version.into();
                    self.put(&lease).await
                }
            };
            match written {
                Ok(_) => Ok(true),
                Err(error) if error.is_conflict() => Ok(false),
                // Only if the object existed: without a version, the namespace is missing.
                Err(error) if error.is_not_found() && version.is_some() => Ok(false),
                Err(error) => Err(self.failed(error)),
            }
        }
        .boxed()
    }

    fn join<'a>(
        &'a self,
        number: Term,
        addresses: &'a MasterAddresses,
        lease: Duration,
    ) -> BoxFuture<'a, Result<(), RegistryError>> {
        self.within(async move {
            let json = serde_json::to_string(addresses).expect("strings are valid JSON");
            let now = micro_time(SystemTime::now());
            let spec = LeaseSpec {
                holder_identity: Some(number.to_string()),
                lease_duration_seconds: Some(whole_seconds(lease)),
                acquire_time: Some(now.clone()),
                renew_time: Some(now),
            };
            let mut lease = Lease::new(self.metadata(self.member_name(number), ADDRESSES, json), spec);
            let joined = match self.post(&lease).await {
                // Ids are unique: the object is from an earlier attempt whose response was lost.
                Err(error) if error.is_conflict() => {
                    let found = self.get(&lease.metadata.name).await.map_err(|error| self.failed(error))?;
                    lease.metadata.uid = found.metadata.uid;
                    lease.metadata.resource_version = found.metadata.resource_version;
                    self.put(&lease).await
                }
                joined => joined,
            };
            let joined = joined.map_err(|error| self.failed(error))?;
            self.state.lock().own.insert(number.get(), joined);
            Ok(())
        })
        .boxed()
    }

    fn renew(&self, number: Term) -> BoxFuture<'_, Result<bool, RegistryError>> {
        async move {
            let Some(lease) = self.state.lock().own.get(&number.get()).cloned() else { return Ok(false) };
            let refresh = async { self.refresh(lease).await.map_err(|error| self.failed(error)) };
            let refreshed = self.within(refresh).await?;
            let mut state = self.state.lock();
            let is_member = refreshed.is_some();
            match refreshed {
                Some(lease) => state.own.insert(number.get(), lease),
                None => state.own.remove(&number.get()),
            };
            Ok(is_member)
        }
        .boxed()
    }

    fn remove(&self, number: Term) -> BoxFuture<'_, Result<(), RegistryError>> {
        async move {
            let gone = self.delete(&self.member_name(number), None::<&Lease>).await;
            gone.map_err(|error| self.failed(error))?;
            self.state.lock().own.remove(&number.get());
            Ok(())
        }
        .boxed()
    }

    fn changed<'a>(&'a self, seen: &'a Snapshot, wait: Duration) -> BoxFuture<'a, ()> {
        async move {
            let changed = async {
                // After the end of a watch, or if its start version is too old, everything is read again.
                loop {
                    let Ok(objects) = self.within(self.load()).await else {
                        return sleep(WATCH_PAUSE).await; // the next read reports the error
                    };
                    if objects.snapshot != *seen {
                        return;
                    }
                    if let Err(error) = self.watch(&objects, wait).await {
                        tracing::debug!(registry = self.address(), %error, "watch failed");
                        sleep(WATCH_PAUSE).await;
                    }
                }
            };
            let _ = timeout(wait, changed).await;
        }
        .boxed()
    }
}

fn version(metadata: &Metadata) -> DocumentVersion {
    DocumentVersion(format!("{}/{}", metadata.uid, metadata.resource_version))
}

/// Rounds a lease up to whole seconds, the unit of Leases: a membership must not end earlier than requested.
fn whole_seconds(lease: Duration) -> u32 {
    u32::try_from(lease.as_millis().div_ceil(1000)).unwrap_or(i32::MAX as u32).max(1)
}
