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

fn remove_by_prefix(service: &Service, prefix: &'static str, groups: &[u32]) -> v1::StartJobResponse {
    let (context, prefix) = (put_start(&["key"], 100).context, prefix.into());
    service.remove_by_prefix(&v1::RemoveByPrefixRequest {
        context,
        prefix,
        force: true,
        groups: groups.to_vec(),
    })
}

/// Returns state, code and lost groups of some groups of a job.
fn job(service: &Service, job: u64, groups: &[u32]) -> (v1::JobState, Option<ErrorCode>, Vec<u32>) {
    let context = put_start(&["key"], 100).context;
    let status = service.get_job(&v1::GetJobRequest { context, job, groups: groups.to_vec() });
    (status.state(), ErrorCode::try_from(status.code).ok(), status.lost_groups)
}

#[test]
fn removal_job_names_groups_that_have_moved() {
    let groups = NonZeroU16::new(3).unwrap();
    let config = ServiceConfig { multi_master: true, groups, ..ServiceConfig::for_tests() };
    let service = Service::new(config, Arc::new(SystemClock));
    let host = |group: u16, number: u32| {
        let (term, previous) = (term(number), term(number - 1));
        service.host(GroupAssignment { group: GroupId(group), term, previous, exclusion: 0 }, None);
    };
    let running = (v1::JobState::Running, None, vec![]);
    let lost = |groups: &[u32]| (v1::JobState::Failed, Some(ErrorCode::WrongMaster), groups.to_vec());
    host(0, 5);
    host(1, 5);
    let started = remove_by_prefix(&service, "k", &[]);
    assert_eq!(started.groups, [0, 1]);
    assert_eq!(job(&service, started.job, &[]), running);
    service.release_group(GroupId(0));
    assert_eq!(job(&service, started.job, &[]), lost(&[0]));
    assert_eq!(job(&service, started.job, &[1]), running, "the rest goes on");
    // A job of the next term has the same number within its group.
    host(0, 7);
    assert_eq!(remove_by_prefix(&service, "other", &[0, 2]).groups, [0], "another master hosts group 2");
    assert_eq!(job(&service, started.job, &[]), lost(&[0]), "the group has returned without the job");

    let elsewhere = remove_by_prefix(&service, "k", &[2]).context.unwrap();
    assert_eq!(elsewhere.code, ErrorCode::WrongMaster as u32);
    assert!(service.begin_handoff(GroupId(1)).is_some());
    assert_eq!(job(&service, started.job, &[1]), running, "it is not done here any more, and not lost yet");
    assert_eq!(remove_by_prefix(&service, "k", &[0, 1]).groups, [0], "a group in a handoff is left out");
    let all = remove_by_prefix(&service, "k", &[]).context.unwrap();
    assert_eq!(all.code, ErrorCode::Retry as u32, "but not from a call for all groups");
}

/// A caller that asks a restarted master must not get the result of another job.
#[test]
fn jobs_are_known_to_their_tenant_and_not_to_later_processes() {
    let config = ServiceConfig { groups: NonZeroU16::MIN, ..ServiceConfig::for_tests() };
    let own = put_start(&["key"], 100).context.unwrap();
    let start = |service: &Service| {
        let context = Some(own.clone());
        let request = v1::RemoveByPrefixRequest { context, prefix: "k".into(), force: true, groups: vec![] };
        service.remove_by_prefix(&request).job
    };
    let code = |service: &Service, context: &v1::RequestContext, job| {
        let request = v1::GetJobRequest { context: Some(context.clone()), job, groups: vec![] };
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

/// Mounts a segment of a new node that names a term. Returns the code.
fn mount_with_term(service: &Service, node: u64, named: u32) -> Option<ErrorCode> {
    let context = put_start(&["key"], 100).context;
    let opened = service.open_session(&v1::OpenSessionRequest {
        context: context.clone(),
        node,
        boot_id: node,
        topology: Some(v1::Topology::default()),
        protocol_min: 2,
        protocol_max: 2,
        ..Default::default()
    });
    let spec = v1::SegmentSpec {
        generation: 1,
        medium: v1::Medium::Memory.into(),
        units: 1_000,
        slots: 100,
        group: Some(0),
        term: named,
        ..Default::default()
    };
    let context = context.map(|context| v1::RequestContext { session: opened.session, ..context });
    let request = v1::MountSegmentsRequest {
        context,
        segments: vec![spec],
        capability_rotation: 1,
        ..Default::default()
    };
    ErrorCode::try_from(service.mount_segments(&request).results[0].code).ok()
}

#[test]
fn term_that_no_registry_has_lost_uses_up_none() {
    // Failure, found by review: a node that named the last term made the masters of a cluster release a group for good,
    // because there was no term above it to claim it with. Fix: terms far above those of the registry are not believed.
    let master = member(Arc::new(MemoryRegistry::default()));
    let service = master.service();
    wait_until("it has all groups", || service.hosted_count() == 4);
    let term_of_group = || {
        let context = put_start(&["key"], 100).context;
        let map = service.get_group_map(&v1::GetGroupMapRequest { context }).map.unwrap();
        let of = map.masters.iter().find_map(|m| {
            let at = m.groups.iter().position(|&group| group == 0)?;
            m.terms.get(at).copied()
        });
        of.unwrap_or(0)
    };
    let before = term_of_group();
    assert_eq!(mount_with_term(service, 1, Term::MAX.get()), Some(ErrorCode::WrongMaster));
    let end = Instant::now() + LEASE;
    while Instant::now() < end {
        assert_eq!((service.hosted_count(), term_of_group()), (4, before));
        std::thread::sleep(Duration::from_millis(5));
    }
    // A registry that was restored from a backup has lost some terms, which nodes know.
    assert_eq!(mount_with_term(service, 2, before + 100), Some(ErrorCode::WrongMaster));
    wait_until("the group has a term above that", || {
        service.hosted_count() == 4 && term_of_group() > before + 100
    });
}

#[test]
fn invented_tenants_use_up_no_durable_state() {
    let service = Service::new(ServiceConfig::for_tests(), Arc::new(SystemClock));
    let of = |tenant: String| {
        put_start(&["key"], 100).context.map(|context| v1::RequestContext { tenant, ..context })
    };
    let code = |context: Option<v1::ResponseContext>| ErrorCode::try_from(context.unwrap().code).ok();
    let remove_all = |tenant: String| {
        let request =
            v1::RemoveAllRequest { context: of(tenant), force: true, generation: 0, groups: vec![] };
        code(service.remove_all(&request).now_or_never().expect("it does not wait").context)
    };
    let set_quota = |tenant: &str, objects_max| {
        let request = v1::SetTenantQuotaRequest { context: of(tenant.to_owned()), bytes_max: 0, objects_max };
        code(service.set_tenant_quota(&request).now_or_never().expect("it does not wait").context)
    };
    // A quota that is lifted leaves nothing.
    for n in 0..5_000 {
        let name = format!("limited-{n}");
        assert_eq!((set_quota(&name, 7), set_quota(&name, 0)), (None, None), "{name}");
    }
    assert_eq!(set_quota("known", 7), None);
    // The number of jobs is limited as well, after the generation has changed.
    let refused = (0..5_000)
        .map(|n| remove_all(format!("invented-{n}")))
        .position(|code| code == Some(ErrorCode::TooManyTenants));
    assert_eq!(refused, Some(4_095), "the limit, less the tenant with a quota");
    assert_eq!(remove_all("another".into()), Some(ErrorCode::TooManyTenants));
    assert_ne!(remove_all("invented-0".into()), Some(ErrorCode::TooManyTenants), "a known tenant");
    assert_eq!(set_quota("known", 8), None);
    // Puts need no durable state.
    let request = v1::PutStartRequest { context: of("newcomer".into()), ..put_start(&["key"], 100) };
    assert_eq!(code(service.put_start(&request).context), None);
}
