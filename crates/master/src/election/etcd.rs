//! [`EtcdRegistry`]: registry in etcd.
//!
//! | key | value |
//! |---|---|
//! | `<prefix>/identity` | [`ClusterIdentity`] |
//! | `<prefix>/document` | [`ClusterState`]; its version is the revision of its last change |
//! | `<prefix>/masters/<id>` | [`MasterAddresses`]; expires with the lease of the member |
//!
//! All reads are linearizable. etcd measures the time: its leases have whole seconds, at least two, and restart after a
//! change of the etcd leader. So a membership may last longer than requested, but never shorter.

mod endpoints;
mod tls;
mod user;
mod wire;

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use moontide_types::Term;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep, timeout};
use tonic::transport::Endpoint;
use tonic::{Code, Status};

use self::endpoints::{CALL, Endpoints, Idempotence, reason};
use self::tls::EtcdConnector;
pub use self::user::{ETCD_PASSWORD_VARIABLE, EtcdUser};
use self::wire::{
    Compare, DeleteRequest, EmptyResponse, KeyValue, LeaseGrantRequest, LeaseGrantResponse,
    LeaseKeepAliveResponse, LeaseRequest, Operation, PutRequest, RangeRequest, RangeResponse, TARGET_CREATE,
    TARGET_MOD, TxnRequest, TxnResponse, WatchCreate, WatchRequest, WatchResponse, call, compare, operation,
};
use super::address::EtcdTlsFiles;
use super::cluster_state::{ClusterIdentity, ClusterState, MEMBERS_MAX, MasterAddresses, check_count};
use super::registry::{DocumentVersion, Registry, RegistryError, Snapshot};

/// Delay after a failed watch, so that callers that wait in a loop do not spin.
const WATCH_PAUSE: Duration = Duration::from_millis(100);

/// Registry under a prefix in etcd.
#[derive(Debug)]
pub struct EtcdRegistry {
    endpoints: Endpoints,
    prefix: String,
    /// Address for error messages.
    address: String,
    /// Leases of the members that joined through this object, by id.
    leases: Mutex<BTreeMap<u32, i64>>,
}

impl EtcdRegistry {
    /// Creates a registry under `prefix` in the etcd with these servers (`host:port`). Connects at the first call.
    /// Must be called inside a tokio runtime.
    pub fn connect(
        endpoints: &[String],
        prefix: &str,
        tls: Option<&EtcdTlsFiles>,
        user: Option<&EtcdUser>,
    ) -> Result<EtcdRegistry, RegistryError> {
        let address = format!("etcd://{}/{prefix}", endpoints.join(","));
        let malformed =
            |what: &str| RegistryError::Unreachable { address: address.clone(), reason: what.into() };
        let denied = |reason| RegistryError::Denied { address: address.clone(), reason };
        if endpoints.is_empty() {
            return Err(malformed("no server given"));
        }
        let connector = EtcdConnector::new(tls).map_err(denied)?;
        if let Some(user) = user {
            // A missing password is an error of the start; a wrong one is known only to etcd.
            user.password(std::env::var(ETCD_PASSWORD_VARIABLE).ok()).map_err(denied)?;
            if tls.is_none() {
                tracing::warn!(
                    registry = address,
                    "the password of etcd is sent without encryption; add ?ca=FILE to the address"
                );
            }
        }
        let scheme = if tls.is_some() { "https" } else { "http" };
        let mut servers = vec![];
        for endpoint in endpoints {
            let invalid = |error: &dyn std::fmt::Display| malformed(&format!("{endpoint:?}: {error}"));
            // The connector decides about TLS; the origin is what requests say.
            let server =
                Endpoint::from_shared(format!("http://{endpoint}")).map_err(|error| invalid(&error))?;
            let origin = format!("{scheme}://{endpoint}").parse().map_err(|error| invalid(&error))?;
            servers.push(server.origin(origin));
        }
        Ok(EtcdRegistry {
            endpoints: Endpoints::new(servers, connector, user.cloned()),
            prefix: prefix.into(),
            address,
            leases: Mutex::new(BTreeMap::new()),
        })
    }

    fn key(&self, name: &str) -> Vec<u8> {
        format!("{}/{name}", self.prefix).into_bytes()
    }

    fn master_key(&self, number: Term) -> Vec<u8> {
        self.key(&format!("masters/{number}"))
    }

    fn failed(&self, status: &Status) -> RegistryError {
        let (address, reason) = (self.address.clone(), reason(status));
        match status.code() {
            Code::PermissionDenied | Code::Unauthenticated | Code::InvalidArgument => {
                RegistryError::Denied { address, reason }
            }
            _ => RegistryError::Unreachable { address, reason },
        }
    }

    fn malformed(&self, what: &'static str, reason: impl ToString) -> RegistryError {
        RegistryError::Malformed { address: self.address.clone(), what, reason: reason.to_string() }
    }

    async fn txn(&self, idempotence: Idempotence, txn: TxnRequest) -> Result<TxnResponse, RegistryError> {
        let response = self.endpoints.unary(Instant::now() + CALL, idempotence, call::TXN, &txn).await;
        response.map_err(|status| self.failed(&status))
    }

    /// Reads cluster state and members of one revision. Returns them with the revision.
    async fn load(&self) -> Result<(i64, Snapshot), RegistryError> {
        let document = range(self.key("document"), vec![]);
        // '0' follows '/' in ASCII: the range has all keys with the prefix "masters/".
        let masters = range(self.key("masters/"), self.key("masters0"));
        let both = TxnRequest { success: vec![document, masters], ..TxnRequest::default() };
        let response = self.txn(Idempotence::Idempotent, both).await?;
        let revision = response.header.unwrap_or_default().revision;
        let mut ranges = response.responses.into_iter().map(|outcome| outcome.range.unwrap_or_default().kvs);
        let (documents, masters) = (ranges.next().unwrap_or_default(), ranges.next().unwrap_or_default());
        let document = documents.into_iter().next().map(|kv| {
            let document = ClusterState::decode(&kv.value)
                .map_err(|reason| self.malformed("a cluster state", reason))?;
            Ok((DocumentVersion(kv.mod_revision.to_string()), document))
        });
        check_count("members", masters.len(), MEMBERS_MAX)
            .map_err(|reason| self.malformed("the members", reason))?;
        let members = masters.iter().map(|kv| self.member(kv)).collect::<Result<_, RegistryError>>()?;
        Ok((revision, Snapshot { document: document.transpose()?, members }))
    }

    fn member(&self, kv: &KeyValue) -> Result<(u32, MasterAddresses), RegistryError> {
        let name = String::from_utf8_lossy(&kv.key);
        let number = name.rsplit('/').next().and_then(|text| text.parse().ok()).map(Term::new);
        let Some(Ok(number)) = number else {
            return Err(
                self.malformed("a member", format!("key {name:?} does not end with the id of a master"))
            );
        };
        let addresses =
            MasterAddresses::decode(&kv.value).map_err(|reason| self.malformed("a member", reason))?;
        Ok((number.get(), addresses))
    }

    /// Waits until a key under the prefix changes after `revision`, or the watch fails.
    async fn watch(&self, revision: i64) -> Result<(), Status> {
        // Starts with the revision after the last read, so no change is missed.
        let create = WatchCreate {
            key: self.key(""),
            range_end: format!("{}0", self.prefix).into_bytes(),
            start_revision: revision + 1,
        };
        let request = WatchRequest { create: Some(create) };
        let mut responses = self.endpoints.stream::<_, WatchResponse>(call::WATCH, request).await?;
        while let Some(response) = responses.message().await? {
            let is_compacted = response.compact_revision > 0; // so something has changed
            if is_compacted || !response.events.is_empty() {
                return Ok(());
            }
            if response.canceled {
                return Err(Status::unavailable(response.cancel_reason));
            }
        }
        Err(Status::unavailable("watch ended"))
    }
}

impl Registry for EtcdRegistry {
    fn identity<'a>(
        &'a self,
        draft: &'a ClusterIdentity,
    ) -> BoxFuture<'a, Result<ClusterIdentity, RegistryError>> {
        async move {
            let key = self.key("identity");
            let value = serde_json::to_vec(draft).expect("numbers are valid JSON");
            let create = TxnRequest {
                compare: vec![is_absent(&key)],
                success: vec![put(key.clone(), value), range(key.clone(), vec![])],
                failure: vec![range(key, vec![])],
            };
            let response = self.txn(Idempotence::Idempotent, create).await?;
            let ranges = response.responses.into_iter().filter_map(|outcome| outcome.range);
            let Some(kv) = ranges.flat_map(|range| range.kvs).next() else {
                return Err(self.malformed("an identity", "it was deleted again"));
            };
            ClusterIdentity::decode(&kv.value).map_err(|reason| self.malformed("an identity", reason))
        }
        .boxed()
    }

    fn read(&self) -> BoxFuture<'_, Result<Snapshot, RegistryError>> {
        async move { Ok(self.load().await?.1) }.boxed()
    }

    fn write<'a>(
        &'a self,
        version: Option<&'a DocumentVersion>,
        document: &'a ClusterState,
    ) -> BoxFuture<'a, Result<bool, RegistryError>> {
        async move {
            let key = self.key("document");
            let unchanged = match version {
                None => is_absent(&key),
                Some(DocumentVersion(text)) => {
                    let revision = text
                        .parse()
                        .map_err(|_| self.malformed("a version", format!("{text:?} is no revision")))?;
                    Compare {
                        target: TARGET_MOD,
                        key: key.clone(),
                        revision: Some(compare::Revision::Mod(revision)),
                        ..Compare::default()
                    }
                }
            };
            let json = document.encode().map_err(|reason| self.malformed("a cluster state", reason))?;
            let replace =
                TxnRequest { compare: vec![unchanged], success: vec![put(key, json)], failure: vec![] };
            // Not idempotent: a repetition would find its own first write and report a conflict.
            Ok(self.txn(Idempotence::Never, replace).await?.succeeded)
        }
        .boxed()
    }

    fn join<'a>(
        &'a self,
        number: Term,
        addresses: &'a MasterAddresses,
        lease: Duration,
    ) -> BoxFuture<'a, Result<(), RegistryError>> {
        async move {
            let deadline = Instant::now() + CALL;
            let grant = LeaseGrantRequest { ttl_seconds: whole_seconds(lease) };
            let granted =
                self.endpoints.unary(deadline, Idempotence::Idempotent, call::LEASE_GRANT, &grant).await;
            let LeaseGrantResponse { id } = granted.map_err(|status| self.failed(&status))?;
            let value = serde_json::to_vec(addresses).expect("strings are valid JSON");
            let put = PutRequest { key: self.master_key(number), value, lease: id };
            let put = self
                .endpoints
                .unary::<_, EmptyResponse>(deadline, Idempotence::Idempotent, call::PUT, &put)
                .await;
            put.map_err(|status| self.failed(&status))?;
            self.leases.lock().insert(number.get(), id);
            Ok(())
        }
        .boxed()
    }

    fn renew(&self, number: Term) -> BoxFuture<'_, Result<bool, RegistryError>> {
        async move {
            let Some(id) = self.leases.lock().get(&number.get()).copied() else { return Ok(false) };
            let deadline = Instant::now() + CALL;
            let (alive, key) = (LeaseRequest { id }, range_request(self.master_key(number), vec![]));
            // Another master may have removed the key, which does not end the lease.
            let (alive, there) = tokio::try_join!(
                self.endpoints.first::<_, LeaseKeepAliveResponse>(deadline, call::LEASE_KEEP_ALIVE, &alive),
                self.endpoints.unary::<_, RangeResponse>(
                    deadline,
                    Idempotence::Idempotent,
                    call::RANGE,
                    &key
                ),
            )
            .map_err(|status| self.failed(&status))?;
            let is_member = alive.ttl_seconds > 0 && there.kvs.iter().any(|kv| kv.lease == id);
            if !is_member {
                self.leases.lock().remove(&number.get());
            }
            Ok(is_member)
        }
        .boxed()
    }

    fn remove(&self, number: Term) -> BoxFuture<'_, Result<(), RegistryError>> {
        async move {
            let deadline = Instant::now() + CALL;
            let own_lease = self.leases.lock().get(&number.get()).copied();
            let removed: Result<EmptyResponse, Status> = match own_lease {
                Some(id) => {
                    let lease = LeaseRequest { id };
                    self.endpoints.unary(deadline, Idempotence::Idempotent, call::LEASE_REVOKE, &lease).await
                }
                None => {
                    let key = DeleteRequest { key: self.master_key(number) };
                    self.endpoints.unary(deadline, Idempotence::Idempotent, call::DELETE, &key).await
                }
            };
            match removed {
                Err(status) if status.code() != Code::NotFound => Err(self.failed(&status)),
                _ => {
                    self.leases.lock().remove(&number.get());
                    Ok(())
                }
            }
        }
        .boxed()
    }

    fn changed<'a>(&'a self, seen: &'a Snapshot, wait: Duration) -> BoxFuture<'a, ()> {
        async move {
            // A snapshot does not contain its revision. A new read returns one, and finds changes since `seen`.
            let changed = async {
                match self.load().await {
                    Ok((_, now)) if now != *seen => {}
                    Ok((revision, _)) => {
                        if let Err(status) = self.watch(revision).await {
                            tracing::debug!(
                                registry = self.address,
                                reason = reason(&status),
                                "watch failed"
                            );
                            sleep(WATCH_PAUSE).await;
                        }
                    }
                    Err(_) => sleep(WATCH_PAUSE).await, // the next read reports the error
                }
            };
            let _ = timeout(wait, changed).await;
        }
        .boxed()
    }
}

fn range_request(key: Vec<u8>, range_end: Vec<u8>) -> RangeRequest {
    RangeRequest { key, range_end }
}

fn range(key: Vec<u8>, range_end: Vec<u8>) -> Operation {
    Operation { request: Some(operation::Request::Range(range_request(key, range_end))) }
}

fn put(key: Vec<u8>, value: Vec<u8>) -> Operation {
    Operation { request: Some(operation::Request::Put(PutRequest { key, value, lease: 0 })) }
}

fn is_absent(key: &[u8]) -> Compare {
    Compare {
        target: TARGET_CREATE,
        key: key.into(),
        revision: Some(compare::Revision::Create(0)),
        ..Compare::default()
    }
}

/// Rounds a lease up to whole seconds, the unit of etcd: a membership must not end earlier than requested.
fn whole_seconds(lease: Duration) -> i64 {
    i64::try_from(lease.as_millis().div_ceil(1000)).unwrap_or(i64::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lease_is_rounded_up_to_whole_seconds() {
        for (millis, seconds) in [(1, 1), (1000, 1), (1001, 2), (2000, 2), (4999, 5)] {
            assert_eq!(whole_seconds(Duration::from_millis(millis)), seconds, "{millis} ms");
        }
    }
}
