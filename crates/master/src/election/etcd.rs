//! [`EtcdRegistry`]: masters that meet at etcd.
//!
//! | key | value |
//! |---|---|
//! | `<prefix>/identity` | [`Identity`] |
//! | `<prefix>/document` | [`Document`]; its token is the revision that changed it last |
//! | `<prefix>/masters/<number>` | [`MasterAddresses`]; ends with the member's lease |
//!
//! All reads are linearizable. Times are etcd's: a lease there counts whole seconds, two at least, and begins anew when etcd
//! itself has changed its leader, so a member may live longer than it asked for, and never shorter.

mod endpoints;
mod wire;

use std::collections::BTreeMap;
use std::time::Duration;

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use moontide_types::Term;
use parking_lot::Mutex;
use tokio::time::{Instant, sleep, timeout};
use tonic::transport::{Certificate, ClientTlsConfig, Endpoint, Identity as TlsIdentity};
use tonic::{Code, Status};

use self::endpoints::{CALL, Endpoints, Repeat, reason};
use self::wire::{
    Compare, DeleteRequest, Done, KeyValue, LeaseGrantRequest, LeaseGrantResponse, LeaseKeepAliveResponse,
    LeaseRequest, Operation, PutRequest, RangeRequest, RangeResponse, TARGET_CREATE, TARGET_MOD, TxnRequest,
    TxnResponse, WatchCreate, WatchRequest, WatchResponse, call, compare, operation,
};
use super::document::{Document, Identity, MasterAddresses};
use super::registry::{Registry, RegistryError, Snapshot, Token, root_cause};

/// After a watch that failed: whoever waits in a loop must not turn in it without rest.
const WATCH_PAUSE: Duration = Duration::from_millis(100);

/// What secures the way to etcd, in PEM.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EtcdTls {
    /// Certificates of those who may vouch for a server.
    pub ca: Vec<u8>,
    /// Who we are: certificate and key. Etcd may take its common name for a user.
    pub client: Option<(Vec<u8>, Vec<u8>)>,
}

/// A place in etcd.
#[derive(Debug)]
pub struct EtcdRegistry {
    endpoints: Endpoints,
    prefix: String,
    /// For errors: as the operator wrote it.
    address: String,
    /// Of the members that joined here: number and lease.
    leases: Mutex<BTreeMap<u32, i64>>,
}

impl EtcdRegistry {
    /// A place under `prefix` in the etcd that has these servers (`host:port`). Connects when it is first asked; must be
    /// called inside a runtime.
    pub fn connect(
        endpoints: &[String],
        prefix: &str,
        tls: Option<&EtcdTls>,
    ) -> Result<EtcdRegistry, RegistryError> {
        let address = format!("etcd://{}/{prefix}", endpoints.join(","));
        let malformed =
            |what: &str| RegistryError::Unreachable { address: address.clone(), why: what.into() };
        if endpoints.is_empty() {
            return Err(malformed("it names no server"));
        }
        let scheme = if tls.is_some() { "https" } else { "http" };
        let mut servers = vec![];
        for endpoint in endpoints {
            let server = Endpoint::from_shared(format!("{scheme}://{endpoint}"));
            let mut server = server.map_err(|error| malformed(&format!("{endpoint:?}: {error}")))?;
            if let Some(tls) = tls {
                let mut config = ClientTlsConfig::new().ca_certificate(Certificate::from_pem(&tls.ca));
                if let Some((certificate, key)) = &tls.client {
                    config = config.identity(TlsIdentity::from_pem(certificate, key));
                }
                server = server.tls_config(config).map_err(|error| malformed(&root_cause(&error)))?;
            }
            servers.push(server);
        }
        Ok(EtcdRegistry {
            endpoints: Endpoints::new(servers),
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
        let (address, why) = (self.address.clone(), reason(status));
        match status.code() {
            Code::PermissionDenied | Code::Unauthenticated | Code::InvalidArgument => {
                RegistryError::Denied { address, why }
            }
            _ => RegistryError::Unreachable { address, why },
        }
    }

    fn malformed(&self, what: &'static str, why: impl ToString) -> RegistryError {
        RegistryError::Malformed { address: self.address.clone(), what, why: why.to_string() }
    }

    async fn txn(&self, repeat: Repeat, txn: TxnRequest) -> Result<TxnResponse, RegistryError> {
        let answer = self.endpoints.unary(Instant::now() + CALL, repeat, call::TXN, &txn).await;
        answer.map_err(|status| self.failed(&status))
    }

    /// The document and the members, as they were at one revision, which is returned with them.
    async fn look(&self) -> Result<(i64, Snapshot), RegistryError> {
        let document = range(self.key("document"), vec![]);
        // '0' follows '/': everything that begins with "masters/".
        let masters = range(self.key("masters/"), self.key("masters0"));
        let both = TxnRequest { success: vec![document, masters], ..TxnRequest::default() };
        let answer = self.txn(Repeat::Harmless, both).await?;
        let revision = answer.header.unwrap_or_default().revision;
        let mut ranges = answer.responses.into_iter().map(|outcome| outcome.range.unwrap_or_default().kvs);
        let (documents, masters) = (ranges.next().unwrap_or_default(), ranges.next().unwrap_or_default());
        let document = documents.into_iter().next().map(|kv| {
            let document = Document::decode(&kv.value).map_err(|why| self.malformed("a document", why))?;
            Ok((Token(kv.mod_revision.to_string()), document))
        });
        let members = masters.iter().map(|kv| self.member(kv)).collect::<Result<_, RegistryError>>()?;
        Ok((revision, Snapshot { document: document.transpose()?, members }))
    }

    fn member(&self, kv: &KeyValue) -> Result<(u32, MasterAddresses), RegistryError> {
        let name = String::from_utf8_lossy(&kv.key);
        let number = name.rsplit('/').next().and_then(|text| text.parse().ok()).map(Term::new);
        let Some(Ok(number)) = number else {
            return Err(self.malformed("a member", format!("{name:?} does not end with a number")));
        };
        let addresses = serde_json::from_slice(&kv.value).map_err(|why| self.malformed("a member", why))?;
        Ok((number.get(), addresses))
    }

    /// Until something happens under the prefix after `revision`, or the watch breaks.
    async fn watch(&self, revision: i64) -> Result<(), Status> {
        // The one revision after what was seen: nothing in between is missed.
        let create = WatchCreate {
            key: self.key(""),
            range_end: format!("{}0", self.prefix).into_bytes(),
            start_revision: revision + 1,
        };
        let question = WatchRequest { create: Some(create) };
        let mut answers = self.endpoints.stream::<_, WatchResponse>(call::WATCH, question).await?;
        while let Some(answer) = answers.message().await? {
            // Cancelled: what happened since is forgotten already, which means that something has.
            if answer.canceled || !answer.events.is_empty() {
                return Ok(());
            }
        }
        Err(Status::unavailable("the watch ended"))
    }
}

impl Registry for EtcdRegistry {
    fn identity<'a>(&'a self, draft: &'a Identity) -> BoxFuture<'a, Result<Identity, RegistryError>> {
        async move {
            let key = self.key("identity");
            let value = serde_json::to_vec(draft).expect("numbers are JSON");
            let create = TxnRequest {
                compare: vec![is_absent(&key)],
                success: vec![put(key.clone(), value), range(key.clone(), vec![])],
                failure: vec![range(key, vec![])],
            };
            let answer = self.txn(Repeat::Harmless, create).await?;
            let ranges = answer.responses.into_iter().filter_map(|outcome| outcome.range);
            let Some(kv) = ranges.flat_map(|range| range.kvs).next() else {
                return Err(self.malformed("an identity", "it is gone again"));
            };
            // What a decoder says may quote what it read: that must not reach a log.
            serde_json::from_slice(&kv.value)
                .map_err(|_| self.malformed("an identity", "it is not one of ours"))
        }
        .boxed()
    }

    fn read(&self) -> BoxFuture<'_, Result<Snapshot, RegistryError>> {
        async move { Ok(self.look().await?.1) }.boxed()
    }

    fn write<'a>(
        &'a self,
        token: Option<&'a Token>,
        document: &'a Document,
    ) -> BoxFuture<'a, Result<bool, RegistryError>> {
        async move {
            let key = self.key("document");
            let unchanged = match token {
                None => is_absent(&key),
                Some(Token(text)) => {
                    let revision = text
                        .parse()
                        .map_err(|_| self.malformed("a token", format!("{text:?} is no revision")))?;
                    Compare {
                        target: TARGET_MOD,
                        key: key.clone(),
                        revision: Some(compare::Revision::Mod(revision)),
                        ..Compare::default()
                    }
                }
            };
            let replace = TxnRequest {
                compare: vec![unchanged],
                success: vec![put(key, document.encode())],
                failure: vec![],
            };
            // Twice would find its own first time, and call it somebody else's.
            Ok(self.txn(Repeat::Never, replace).await?.succeeded)
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
            let until = Instant::now() + CALL;
            let grant = LeaseGrantRequest { ttl_seconds: whole_seconds(lease) };
            let granted = self.endpoints.unary(until, Repeat::Harmless, call::LEASE_GRANT, &grant).await;
            let LeaseGrantResponse { id } = granted.map_err(|status| self.failed(&status))?;
            let value = serde_json::to_vec(addresses).expect("strings are JSON");
            let put = PutRequest { key: self.master_key(number), value, lease: id };
            let put = self.endpoints.unary::<_, Done>(until, Repeat::Harmless, call::PUT, &put).await;
            put.map_err(|status| self.failed(&status))?;
            self.leases.lock().insert(number.get(), id);
            Ok(())
        }
        .boxed()
    }

    fn renew(&self, number: Term) -> BoxFuture<'_, Result<bool, RegistryError>> {
        async move {
            let Some(id) = self.leases.lock().get(&number.get()).copied() else { return Ok(false) };
            let until = Instant::now() + CALL;
            let (alive, key) = (LeaseRequest { id }, range_request(self.master_key(number), vec![]));
            // Somebody may have removed the key, which leaves the lease alone.
            let (alive, there) = tokio::try_join!(
                self.endpoints.first::<_, LeaseKeepAliveResponse>(until, call::LEASE_KEEP_ALIVE, &alive),
                self.endpoints.unary::<_, RangeResponse>(until, Repeat::Harmless, call::RANGE, &key),
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
            let until = Instant::now() + CALL;
            let ours = self.leases.lock().get(&number.get()).copied();
            let removed: Result<Done, Status> = match ours {
                Some(id) => {
                    let lease = LeaseRequest { id };
                    self.endpoints.unary(until, Repeat::Harmless, call::LEASE_REVOKE, &lease).await
                }
                None => {
                    let key = DeleteRequest { key: self.master_key(number) };
                    self.endpoints.unary(until, Repeat::Harmless, call::DELETE, &key).await
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
            // A snapshot does not say at which revision it was read. One more look does, and finds what has changed since.
            let changed = async {
                match self.look().await {
                    Ok((_, now)) if now != *seen => {}
                    Ok((revision, _)) => {
                        if let Err(status) = self.watch(revision).await {
                            tracing::debug!(registry = self.address, why = reason(&status), "a watch broke");
                            sleep(WATCH_PAUSE).await;
                        }
                    }
                    Err(_) => sleep(WATCH_PAUSE).await, // the read that follows will say it
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

/// Etcd counts leases in seconds; a member must not be gone sooner than it asked for.
fn whole_seconds(lease: Duration) -> i64 {
    i64::try_from(lease.as_millis().div_ceil(1000)).unwrap_or(i64::MAX).max(1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_is_never_shorter_than_asked_for() {
        for (asked, seconds) in [(1, 1), (1000, 1), (1001, 2), (2000, 2), (4999, 5)] {
            assert_eq!(whole_seconds(Duration::from_millis(asked)), seconds, "{asked} ms");
        }
    }
}
