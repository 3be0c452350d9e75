//! Which groups a master answers for: those that it was given, until they are somebody else's.

mod support;

use std::num::NonZeroU16;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering::SeqCst};
use std::time::{Duration, Instant};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use moontide_master::election::{
    Document, Hosting, Identity, MasterAddresses, MemoryRegistry, Registry, RegistryError, Snapshot, Token,
};
use moontide_master::{MasterConfig, Role, Server, Service, ServiceConfig};
use moontide_types::{ErrorCode, GroupId, SystemClock, Term};
use support::{config, object_codes, put_start};

const LEASE: Duration = Duration::from_millis(1000);

fn term(number: u32) -> Term {
    Term::new(number).unwrap()
}

/// What a writer is told.
fn asked(service: &Service) -> ErrorCode {
    let answer = service.put_start(&put_start(&["key"], 100));
    let code = object_codes(&answer.objects)[0];
    ErrorCode::try_from(u32::from(code)).expect("there is no node to write to")
}

fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let end = Instant::now() + Duration::from_secs(5);
    while !is_so() {
        assert!(Instant::now() < end, "{what}: not in time");
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn member(registry: Arc<dyn Registry>) -> Server {
    let config = MasterConfig { lease_ms: LEASE.as_millis() as u32, ..config() };
    Server::start_at(config, Some(registry)).unwrap()
}

#[test]
fn a_group_is_answered_for_while_it_is_hosted_and_not_frozen() {
    let config = ServiceConfig { shared: true, groups: NonZeroU16::MIN, ..ServiceConfig::for_tests() };
    let service = Service::new(config, Arc::new(SystemClock));
    assert_eq!(asked(&service), ErrorCode::WrongMaster, "it was given nothing");
    let group = GroupId(0);
    service.host(Hosting { group, term: term(5), previous: term(4), witnessed: false }, None);
    assert_eq!(asked(&service), ErrorCode::NoSpace);
    assert!(service.freeze(group).is_some());
    assert_eq!(asked(&service), ErrorCode::Retry, "what is put now would not be inherited");
    service.thaw(group);
    assert_eq!(asked(&service), ErrorCode::NoSpace);
    service.lose(group);
    assert_eq!(asked(&service), ErrorCode::WrongMaster);
    assert_eq!(service.hosted_count(), 0);
}

#[test]
fn who_is_no_member_any_more_lets_go_of_everything() {
    let registry = MemoryRegistry::default();
    // It may not come back as somebody new: the other one would share with it before anybody has looked.
    let first = member(Arc::new(Hampered { joins: AtomicU32::new(1), ..Hampered::of(&registry) }));
    until("the first has all groups", || first.service().hosted_count() == 4);
    let second = member(Arc::new(registry.clone()));
    // As if its lease had ended: it was stopped, or cut off, for longer than that.
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(registry.remove(first.term())).unwrap();
    let hosted = || (first.service().hosted_count(), second.service().hosted_count());
    until("the second has all groups, and the first none", || hosted() == (0, 4));
}

/// A registry that does not do all that it is asked, or not at once.
#[derive(Debug)]
struct Hampered {
    registry: MemoryRegistry,
    /// How often one may join.
    joins: AtomicU32,
    /// After which time a renewal is answered.
    renewals_take: Duration,
}

impl Hampered {
    fn of(registry: &MemoryRegistry) -> Self {
        let joins = AtomicU32::new(u32::MAX);
        Self { registry: registry.clone(), joins, renewals_take: Duration::ZERO }
    }
}

impl Registry for Hampered {
    fn identity<'a>(&'a self, draft: &'a Identity) -> BoxFuture<'a, Result<Identity, RegistryError>> {
        self.registry.identity(draft)
    }

    fn read(&self) -> BoxFuture<'_, Result<Snapshot, RegistryError>> {
        self.registry.read()
    }

    fn write<'a>(
        &'a self,
        token: Option<&'a Token>,
        document: &'a Document,
    ) -> BoxFuture<'a, Result<bool, RegistryError>> {
        self.registry.write(token, document)
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
                let (address, why) = ("test".to_owned(), "it has joined often enough".to_owned());
                async { Err(RegistryError::Unreachable { address, why }) }.boxed()
            }
        }
    }

    fn renew(&self, number: Term) -> BoxFuture<'_, Result<bool, RegistryError>> {
        async move {
            let renewed = self.registry.renew(number).await;
            tokio::time::sleep(self.renewals_take).await;
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
fn a_lease_counts_from_when_its_renewal_was_sent() {
    // Every answer comes when half of the lease is over, so that it confirms nothing any more.
    let master = member(Arc::new(Hampered {
        renewals_take: LEASE * 11 / 20,
        ..Hampered::of(&MemoryRegistry::default())
    }));
    let mut looks = 0;
    until("it has all groups", || {
        looks += 1;
        let role = master.service().role();
        assert!(matches!(role, Role::Member { confirmed: false, .. }), "{role:?} at look {looks}");
        master.service().hosted_count() == 4
    });
    let end = Instant::now() + LEASE;
    while Instant::now() < end {
        let role = master.service().role();
        assert!(matches!(role, Role::Member { confirmed: false, .. }), "{role:?}");
        std::thread::sleep(Duration::from_millis(2));
    }
}
