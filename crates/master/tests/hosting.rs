//! Hosted groups: a master serves only the groups that it owns.

mod support;

use std::num::NonZeroU16;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering::SeqCst};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use moontide_master::election::{
    ClusterIdentity, ClusterState, DocumentVersion, GroupAssignment, MasterAddresses, MemoryRegistry,
    Registry, RegistryError, Snapshot,
};
use moontide_master::{MasterConfig, Role, Server, Service, ServiceConfig};
use moontide_proto::v1;
use moontide_types::{ErrorCode, GroupId, SystemClock, Term};
use support::{config, object_codes, put_start};

const LEASE: Duration = Duration::from_millis(1000);

fn term(number: u32) -> Term {
    Term::new(number).unwrap()
}

/// Returns the code of a PutStart.
fn put_start_code(service: &Service) -> ErrorCode {
    let response = service.put_start(&put_start(&["key"], 100));
    let code = object_codes(&response.objects)[0];
    ErrorCode::try_from(u32::from(code)).expect("it fails, because there is no node")
}

fn wait_until(what: &str, mut holds: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(5);
    while !holds() {
        assert!(Instant::now() < end, "timeout waiting for: {what}");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn member(registry: Arc<dyn Registry>) -> Server {
    let config = MasterConfig { registry_lease_ms: LEASE.as_millis() as u32, ..config() };
    Server::start_at(config, Some(registry)).unwrap()
}

#[test]
fn group_is_served_only_while_hosted_and_not_handing_off() {
    let config = ServiceConfig { multi_master: true, groups: NonZeroU16::MIN, ..ServiceConfig::for_tests() };
    let service = Service::new(config, Arc::new(SystemClock));
    assert_eq!(put_start_code(&service), ErrorCode::WrongMaster, "no group is hosted");
    let group = GroupId(0);
    service.host(GroupAssignment { group, term: term(5), previous: term(4), exclusion: 0 }, None);
    assert_eq!(put_start_code(&service), ErrorCode::NoSpace);
    assert!(service.begin_handoff(group).is_some());
    assert_eq!(put_start_code(&service), ErrorCode::Retry, "a put after the export would be lost");
    service.cancel_handoff(group);
    assert_eq!(put_start_code(&service), ErrorCode::NoSpace);
    service.release_group(group);
    assert_eq!(put_start_code(&service), ErrorCode::WrongMaster);
    assert_eq!(service.hosted_count(), 0);
}

#[test]
fn removal_job_fails_if_its_group_has_moved() {
    let config = ServiceConfig { multi_master: true, groups: NonZeroU16::MIN, ..ServiceConfig::for_tests() };
    let service = Service::new(config, Arc::new(SystemClock));
    let host = |number: u32| {
        let (term, previous) = (term(number), term(number - 1));
        service.host(GroupAssignment { group: GroupId(0), term, previous, exclusion: 0 }, None);
    };
    host(5);
    let context = put_start(&["key"], 100).context;
    let request = v1::RemoveByPrefixRequest { context: context.clone(), prefix: "k".into(), force: true };
    let started = service.remove_by_prefix(&request);
    assert_eq!((started.context.unwrap().code, started.groups), (0, 1));
    let state = || {
        let status = service.get_job(&v1::GetJobRequest { context: context.clone(), job: started.job });
        (status.state(), ErrorCode::try_from(status.code).ok())
    };
    assert_eq!(state(), (v1::JobState::Running, None));
    service.release_group(GroupId(0));
    let moved = (v1::JobState::Failed, Some(ErrorCode::WrongMaster));
    assert_eq!(state(), moved);
    host(7);
    assert_eq!(state(), moved, "the group has returned without the job");
}

/// A caller that asks a restarted master must not get the result of another job.
#[test]
fn jobs_are_known_to_their_tenant_and_not_to_later_processes() {
    let config = ServiceConfig { groups: NonZeroU16::MIN, ..ServiceConfig::for_tests() };
    let own = put_start(&["key"], 100).context.unwrap();
    let start = |service: &Service| {
        let context = Some(own.clone());
        let request = v1::RemoveByPrefixRequest { context, prefix: "k".into(), force: true };
        service.remove_by_prefix(&request).job
    };
    let code = |service: &Service, context: &v1::RequestContext, job| {
        let request = v1::GetJobRequest { context: Some(context.clone()), job };
        ErrorCode::try_from(service.get_job(&request).context.unwrap().code).ok()
    };
    let service = Service::new(config.clone(), Arc::new(SystemClock));
    let first = start(&service);
    assert_eq!(code(&service, &own, first), None);
    let other = v1::RequestContext { tenant: "other".into(), ..own.clone() };
    assert_eq!(code(&service, &other, first), Some(ErrorCode::NotFound));
    std::thread::sleep(Duration::from_millis(5));
    let restarted = Service::new(config, Arc::new(SystemClock));
    assert_ne!(start(&restarted), first);
    assert_eq!(code(&restarted, &own, first), Some(ErrorCode::NotFound));
}

#[test]
fn master_that_lost_membership_releases_all_groups() {
    let registry = MemoryRegistry::default();
    // The first master cannot join again: otherwise the second would hand off groups to it before the check.
    let faulty = Arc::new(FaultyRegistry { joins: AtomicU32::new(1), ..FaultyRegistry::of(&registry) });
    let first = member(Arc::<FaultyRegistry>::clone(&faulty));
    wait_until("the first has all groups", || first.service().hosted_count() == 4);
    let second = member(Arc::new(registry.clone()));
    // As after the expiry of its lease, when the master was stopped or partitioned for longer than the lease.
    faulty.is_expired.store(true, SeqCst);
    let hosted = || (first.service().hosted_count(), second.service().hosted_count());
    wait_until("the second has all groups, and the first none", || hosted() == (0, 4));
}

/// Registry that limits joins and delays renewals.
#[derive(Debug)]
struct FaultyRegistry {
    registry: MemoryRegistry,
    /// Remaining number of joins.
    joins: AtomicU32,
    /// Delay of the response of a renewal.
    renewal_delay: Duration,
    /// The next renewal finds that the lease has expired.
    is_expired: AtomicBool,
}

impl FaultyRegistry {
    fn of(registry: &MemoryRegistry) -> Self {
        let joins = AtomicU32::new(u32::MAX);
        Self {
            registry: registry.clone(),
            joins,
            renewal_delay: Duration::ZERO,
            is_expired: AtomicBool::new(false),
        }
    }
}

impl Registry for FaultyRegistry {
    fn identity<'a>(
        &'a self,
        draft: &'a ClusterIdentity,
    ) -> BoxFuture<'a, Result<ClusterIdentity, RegistryError>> {
        self.registry.identity(draft)
    }

    fn read(&self) -> BoxFuture<'_, Result<Snapshot, RegistryError>> {
        self.registry.read()
    }

    fn write<'a>(
        &'a self,
        version: Option<&'a DocumentVersion>,
        document: &'a ClusterState,
    ) -> BoxFuture<'a, Result<bool, RegistryError>> {
        self.registry.write(version, document)
    }

    fn join<'a>(
        &'a self,
        number: Term,
        addresses: &'a MasterAddresses,
        lease: Duration,
    ) -> BoxFuture<'a, Result<(), RegistryError>> {
        let joins = self.joins.fetch_update(SeqCst, SeqCst, |left| left.checked_sub(1));
        match joins {
            Ok(_) => self.registry.join(number, addresses, lease),
            Err(_) => {
                let (address, reason) = ("test".to_owned(), "no joins left".to_owned());
                async { Err(RegistryError::Unreachable { address, reason }) }.boxed()
            }
        }
    }

    fn renew(&self, number: Term) -> BoxFuture<'_, Result<bool, RegistryError>> {
        async move {
            if self.is_expired.load(SeqCst) {
                self.registry.remove(number).await?;
            }
            let renewed = self.registry.renew(number).await;
            tokio::time::sleep(self.renewal_delay).await;
            renewed
        }
        .boxed()
    }

    fn remove(&self, number: Term) -> BoxFuture<'_, Result<(), RegistryError>> {
        self.registry.remove(number)
    }

    fn changed<'a>(&'a self, seen: &'a Snapshot, wait: Duration) -> BoxFuture<'a, ()> {
        self.registry.changed(seen, wait)
    }
}

#[test]
fn lease_starts_when_renewal_is_sent() {
    // Every response arrives after half of the lease, so it never confirms the lease.
    let master = member(Arc::new(FaultyRegistry {
        renewal_delay: LEASE * 11 / 20,
        ..FaultyRegistry::of(&MemoryRegistry::default())
    }));
    let mut polls = 0;
    wait_until("it has all groups", || {
        polls += 1;
        let role = master.service().role();
        assert!(matches!(role, Role::Member { confirmed: false, .. }), "{role:?} at poll {polls}");
        master.service().hosted_count() == 4
    });
    let end = Instant::now() + LEASE;
    while Instant::now() < end {
        let role = master.service().role();
        assert!(matches!(role, Role::Member { confirmed: false, .. }), "{role:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
