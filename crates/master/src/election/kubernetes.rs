//! [`KubernetesRegistry`]: masters that meet at the API server of Kubernetes.
//!
//! | object | what it holds |
//! |---|---|
//! | Secret `<name>-identity` | [`Identity`]; never changed |
//! | Lease `<name>` | [`Document`], in an annotation; its token is the object's version |
//! | Lease `<name>-master-<number>` | a member: its lease, when it renewed, and its [`MasterAddresses`] in an annotation |
//!
//! Nobody at the server ends a lease. Whoever sees that a member has not renewed for as long as its lease lasts (see
//! [`Liveness`]) deletes the object, if it still is as it was seen. So a member that renews and one that deletes cannot both
//! succeed, and a member learns that it is none any more from its own object being gone.
//!
//! Invariant: a change names the object's version and its uid. Without a uid, a server would make a Lease that is gone anew.

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
use self::liveness::{Liveness, Sign};
use self::objects::{DeleteOptions, Event, Lease, LeaseList, LeaseSpec, Metadata, Secret, micro_time};
use super::document::{Document, Identity, MasterAddresses};
use super::registry::{Registry, RegistryError, Snapshot, Token};

/// By which the objects of a cluster are found.
const LABEL: &str = "moontide/cluster";
/// Of the document, in an annotation. A server keeps 256 KiB of annotations with an object.
const DOCUMENT: &str = "moontide/document";
/// Of a member's addresses, in an annotation.
const ADDRESSES: &str = "moontide/addresses";
/// Of the identity, in the secret's data.
const IDENTITY: &str = "identity";
/// After a watch that failed: whoever waits in a loop must not turn in it without rest.
const WATCH_PAUSE: Duration = Duration::from_millis(100);

/// A place at an API server.
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
    /// The objects of the members that joined here, as they were written last.
    ours: BTreeMap<u32, Lease>,
}

/// The objects of a cluster.
struct Sight {
    /// From where a watch goes on.
    version: String,
    snapshot: Snapshot,
}

impl KubernetesRegistry {
    /// A place of this name in a namespace. Connects when it is first asked; must be called inside a runtime.
    pub fn connect(
        server: KubernetesServer,
        namespace: &str,
        name: &str,
    ) -> Result<KubernetesRegistry, RegistryError> {
        let api = Api::new(server).map_err(|error| RegistryError::Denied {
            address: format!("kubernetes://{namespace}/{name}"),
            why: error.to_string(),
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
        // "moontide/cluster=<name>", as it may stand behind a question mark.
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
        let (address, why) = (self.address(), error.to_string());
        match error {
            error if error.is_denied() => RegistryError::Denied { address, why },
            ApiError::Malformed(_) => RegistryError::Malformed { address, what: "something", why },
            _ => RegistryError::Unreachable { address, why },
        }
    }

    fn malformed(&self, what: &'static str, why: impl ToString) -> RegistryError {
        RegistryError::Malformed { address: self.address(), what, why: why.to_string() }
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

    /// False: it is there, but not as `options` want it.
    async fn delete(&self, name: &str, options: Option<&impl Serialize>) -> Result<bool, ApiError> {
        let path = format!("{}/{name}", self.leases());
        match self.api.call::<_, serde_json::Value>(Method::DELETE, &path, options).await {
            Ok(_) => Ok(true),
            Err(error) if error.is_not_found() => Ok(true),
            Err(error) if error.is_conflict() => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// What takes several calls may take as long as one.
    async fn within<T>(
        &self,
        calls: impl Future<Output = Result<T, RegistryError>>,
    ) -> Result<T, RegistryError> {
        match timeout(api::CALL, calls).await {
            Ok(outcome) => outcome,
            Err(_) => Err(self.failed(api::no_answer())),
        }
    }

    /// All objects of the cluster, after those who did not renew were deleted.
    async fn look(&self) -> Result<Sight, RegistryError> {
        let list = self.api.call(Method::GET, &self.selected(), None::<&Lease>).await;
        let list: LeaseList = list.map_err(|error| self.failed(error))?;
        let mut document = None;
        let (mut members, mut signs, mut leases) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        for lease in list.items {
            if lease.metadata.name == self.name {
                document = Some(self.document(&lease)?);
            } else if let Some((number, sign, addresses)) = self.member(&lease)? {
                members.insert(number, addresses);
                signs.insert(number, sign);
                leases.insert(number, lease);
            }
        }
        let dead = self.state.lock().liveness.look(SystemClock.now(), &signs);
        for number in dead {
            let lease = &leases[&number];
            let deleted =
                self.delete(&lease.metadata.name, Some(&DeleteOptions::exactly(&lease.metadata))).await;
            match deleted {
                Ok(true) => {
                    tracing::info!(number, "a master did not renew its lease; it is no member any more")
                }
                // It has just renewed, which the next look will show.
                Ok(false) => continue,
                Err(error) => return Err(self.failed(error)),
            }
            members.remove(&number);
        }
        Ok(Sight { version: list.metadata.resource_version, snapshot: Snapshot { document, members } })
    }

    fn document(&self, lease: &Lease) -> Result<(Token, Document), RegistryError> {
        let Some(json) = lease.metadata.annotations.get(DOCUMENT) else {
            let why = format!("the lease {} has no annotation {DOCUMENT}", self.name);
            return Err(self.malformed("a document", why));
        };
        let document = Document::decode(json.as_bytes()).map_err(|why| self.malformed("a document", why))?;
        Ok((token(&lease.metadata), document))
    }

    /// None: it is something else that has our label.
    fn member(&self, lease: &Lease) -> Result<Option<(u32, Sign, MasterAddresses)>, RegistryError> {
        let metadata = &lease.metadata;
        let rest = metadata.name.strip_prefix(&self.name).and_then(|rest| rest.strip_prefix("-master-"));
        let Some(Ok(number)) = rest.and_then(|text| text.parse().ok()).map(Term::new) else {
            return Ok(None);
        };
        let malformed = |why: String| self.malformed("a member", format!("lease {}: {why}", metadata.name));
        let spec = &lease.spec;
        let (Some(seconds), Some(renewed)) = (spec.lease_duration_seconds, &spec.renew_time) else {
            return Err(malformed("it has no duration, or was never renewed".into()));
        };
        let addresses = metadata.annotations.get(ADDRESSES);
        let addresses = addresses.ok_or_else(|| malformed(format!("it has no annotation {ADDRESSES}")))?;
        let addresses = serde_json::from_str(addresses).map_err(|why| malformed(why.to_string()))?;
        let mark = format!("{} {renewed}", metadata.uid);
        Ok(Some((number.get(), Sign { mark, lease: Duration::from_secs(seconds.into()) }, addresses)))
    }

    /// Until something has changed that a snapshot tells of, or a member's lease has run out.
    async fn watch(&self, sight: &Sight, wait: Duration) -> Result<(), ApiError> {
        let seconds = wait.as_secs().saturating_add(1);
        let path = format!(
            "{}&watch=1&allowWatchBookmarks=true&resourceVersion={}&timeoutSeconds={seconds}",
            self.selected(),
            sight.version
        );
        let mut watch = self.api.watch(&path).await?;
        loop {
            let end = self.state.lock().liveness.next_end();
            let left = end.map_or(wait, |end| end.since(SystemClock.now()));
            let Ok(event) = timeout(left, watch.next()).await else { return Ok(()) };
            match event? {
                None => return Err(ApiError::NoAnswer("the watch ended".into())),
                Some(Event::Bookmark) => {}
                Some(Event::Over { code, why }) => return Err(ApiError::Refused { code, message: why }),
                Some(Event::Gone(lease)) if self.is_ours(&lease) => return Ok(()),
                Some(Event::Is(lease)) if self.tells(sight, &lease) => return Ok(()),
                Some(Event::Gone(_) | Event::Is(_)) => {}
            }
            self.state.lock().liveness.in_contact(SystemClock.now());
        }
    }

    fn is_ours(&self, lease: &Lease) -> bool {
        lease.metadata.name == self.name || !matches!(self.member(lease), Ok(None))
    }

    /// Whether this is new. A renewal is not, but it is remembered.
    fn tells(&self, sight: &Sight, lease: &Lease) -> bool {
        if lease.metadata.name == self.name {
            let known = sight.snapshot.document.as_ref().map(|(token, _)| token);
            return known != Some(&token(&lease.metadata));
        }
        match self.member(lease) {
            Ok(None) => false,
            Ok(Some((number, sign, addresses))) => {
                self.state.lock().liveness.see(SystemClock.now(), number, &sign);
                sight.snapshot.members.get(&number) != Some(&addresses)
            }
            Err(_) => true, // the read that follows will say it
        }
    }

    /// Writes that a member of ours lives. None: its object is gone.
    async fn refresh(&self, mut lease: Lease) -> Result<Option<Lease>, ApiError> {
        lease.spec.renew_time = Some(micro_time(SystemTime::now()));
        match self.put(&lease).await {
            Ok(written) => return Ok(Some(written)),
            Err(error) if error.is_not_found() => return Ok(None),
            Err(error) if !error.is_conflict() => return Err(error),
            Err(_) => {}
        }
        // Gone, or changed: by an earlier renewal whose answer was lost, or by somebody who wrote an annotation.
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
    fn identity<'a>(&'a self, draft: &'a Identity) -> BoxFuture<'a, Result<Identity, RegistryError>> {
        self.within(async move {
            let name = format!("{}-identity", self.name);
            let path = format!("{}/{name}", self.secrets());
            let get = || self.api.call::<_, Secret>(Method::GET, &path, None::<&Secret>);
            let secret = match get().await {
                Err(error) if error.is_not_found() => {
                    let json = serde_json::to_vec(draft).expect("numbers are JSON");
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
                return Err(self.malformed("an identity", format!("the secret has no field {IDENTITY}")));
            };
            // What a decoder says may quote what it read: that must not reach a log.
            let json = BASE64_STANDARD.decode(data);
            let json = json.map_err(|_| self.malformed("an identity", "it is not base64"))?;
            serde_json::from_slice(&json).map_err(|_| self.malformed("an identity", "it is not one of ours"))
        })
        .boxed()
    }

    fn read(&self) -> BoxFuture<'_, Result<Snapshot, RegistryError>> {
        async move { Ok(self.within(self.look()).await?.snapshot) }.boxed()
    }

    fn write<'a>(
        &'a self,
        token: Option<&'a Token>,
        document: &'a Document,
    ) -> BoxFuture<'a, Result<bool, RegistryError>> {
        async move {
            let json = String::from_utf8(document.encode()).expect("JSON is text");
            let mut lease =
                Lease::new(self.metadata(self.name.clone(), DOCUMENT, json), LeaseSpec::default());
            let written = match token {
                None => self.post(&lease).await,
                Some(Token(text)) => {
                    let Some((uid, version)) = text.split_once('/') else {
                        return Err(self.malformed("a token", format!("{text:?} is not one of ours")));
                    };
                    lease.metadata.uid = uid.into();
                    lease.metadata.resource_version = version.into();
                    self.put(&lease).await
                }
            };
            match written {
                Ok(_) => Ok(true),
                Err(error) if error.is_conflict() => Ok(false),
                // Where there was one; a namespace that is not there is another matter.
                Err(error) if error.is_not_found() && token.is_some() => Ok(false),
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
            let json = serde_json::to_string(addresses).expect("strings are JSON");
            let now = micro_time(SystemTime::now());
            let spec = LeaseSpec {
                holder_identity: Some(number.to_string()),
                lease_duration_seconds: Some(whole_seconds(lease)),
                acquire_time: Some(now.clone()),
                renew_time: Some(now),
            };
            let mut lease = Lease::new(self.metadata(self.member_name(number), ADDRESSES, json), spec);
            let joined = match self.post(&lease).await {
                // Nobody else has this number: an earlier try of ours, whose answer was lost.
                Err(error) if error.is_conflict() => {
                    let found = self.get(&lease.metadata.name).await.map_err(|error| self.failed(error))?;
                    lease.metadata.uid = found.metadata.uid;
                    lease.metadata.resource_version = found.metadata.resource_version;
                    self.put(&lease).await
                }
                joined => joined,
            };
            let joined = joined.map_err(|error| self.failed(error))?;
            self.state.lock().ours.insert(number.get(), joined);
            Ok(())
        })
        .boxed()
    }

    fn renew(&self, number: Term) -> BoxFuture<'_, Result<bool, RegistryError>> {
        async move {
            let Some(lease) = self.state.lock().ours.get(&number.get()).cloned() else { return Ok(false) };
            let refresh = async { self.refresh(lease).await.map_err(|error| self.failed(error)) };
            let refreshed = self.within(refresh).await?;
            let mut state = self.state.lock();
            let is_member = refreshed.is_some();
            match refreshed {
                Some(lease) => state.ours.insert(number.get(), lease),
                None => state.ours.remove(&number.get()),
            };
            Ok(is_member)
        }
        .boxed()
    }

    fn remove(&self, number: Term) -> BoxFuture<'_, Result<(), RegistryError>> {
        async move {
            let gone = self.delete(&self.member_name(number), None::<&Lease>).await;
            gone.map_err(|error| self.failed(error))?;
            self.state.lock().ours.remove(&number.get());
            Ok(())
        }
        .boxed()
    }

    fn changed<'a>(&'a self, seen: &'a Snapshot, wait: Duration) -> BoxFuture<'a, ()> {
        async move {
            let changed = async {
                // A watch that ends, or whose beginning is forgotten, begins anew with a look.
                loop {
                    let Ok(sight) = self.within(self.look()).await else {
                        return sleep(WATCH_PAUSE).await; // the read that follows will say it
                    };
                    if sight.snapshot != *seen {
                        return;
                    }
                    if let Err(error) = self.watch(&sight, wait).await {
                        tracing::debug!(registry = self.address(), %error, "a watch broke");
                        sleep(WATCH_PAUSE).await;
                    }
                }
            };
            let _ = timeout(wait, changed).await;
        }
        .boxed()
    }
}

fn token(metadata: &Metadata) -> Token {
    Token(format!("{}/{}", metadata.uid, metadata.resource_version))
}

/// Leases count whole seconds; a member must not be gone sooner than it asked for.
fn whole_seconds(lease: Duration) -> u32 {
    u32::try_from(lease.as_millis().div_ceil(1000)).unwrap_or(i32::MAX as u32).max(1)
}
