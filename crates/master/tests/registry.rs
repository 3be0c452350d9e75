//! Conformance tests of the registries: with a real etcd, started here, and with a fake API server of Kubernetes.
//!
//! `MOONTIDE_ETCD` is the path of etcd, if it is not on the search path; with `MOONTIDE_ETCD=skip` its
//! tests are not run, which is a failure under `CI=true`.
//! `MOONTIDE_SEED` repeats the choices of the random run, but not its interleaving.

#[path = "registry/api_server.rs"]
mod api_server;
#[path = "registry/conformance.rs"]
mod conformance;
#[path = "registry/electors.rs"]
mod electors;
#[path = "registry/etcd.rs"]
mod etcd;
#[path = "registry/etcd_users.rs"]
mod etcd_users;
#[path = "../../types/tests/support/not_run.rs"]
mod not_run;

use std::time::{Duration, Instant};

use api_server::{ApiServer, Fault};
use conformance::{LEASE, all_calls_fail_in_time, at, document, recovers, term};
use etcd::{Etcd, LossyProxy};
use moontide_master::election::RegistryError;
use tokio::time::sleep;

/// Runs each conformance test on each registry.
macro_rules! conformance_tests {
    ($($test:ident),* $(,)?) => {
        mod by_etcd {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                let Some(etcd) = super::Etcd::start(1).await else { return };
                super::conformance::$test(&|| etcd.open("some/prefix")).await;
            })*
        }

        mod by_kubernetes {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                let server = super::ApiServer::start().await;
                super::conformance::$test(&|| server.open("moontide")).await;
            })*
        }
    };
}

conformance_tests!(
    concurrent_first_writes_create_state_once,
    compare_and_swap_with_stale_version_fails,
    member_without_renewal_expires_after_lease_not_earlier,
    removed_member_is_not_listed_and_cannot_renew,
    change_wakes_waiter,
    waiter_ignores_renewals_and_wakes_at_lease_expiry,
    cluster_identity_is_created_once,
);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clusters_in_one_etcd_are_isolated() {
    let Some(etcd) = Etcd::start(1).await else { return };
    // One prefix is a prefix of the other.
    let (one, two) = (etcd.open("a"), etcd.open("a0"));
    assert!(one.write(None, &document()).await.unwrap());
    one.join(term(1), &at(1), LEASE).await.unwrap();
    let nothing = two.read().await.unwrap();
    assert!(nothing.document.is_none() && nothing.members.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stopped_etcd_times_out_calls_and_recovers() {
    let Some(etcd) = Etcd::start(1).await else { return };
    let registry = etcd.open("prefix");
    registry.write(None, &document()).await.unwrap();
    registry.join(term(1), &at(1), Duration::from_secs(60)).await.unwrap();
    let snapshot = registry.read().await.unwrap();
    etcd.servers[0].stop();
    for _ in 0..2 {
        all_calls_fail_in_time(&registry, &snapshot, Some(term(1))).await;
        // A registry that connects for the first time.
        all_calls_fail_in_time(&etcd.open("prefix"), &snapshot, None).await;
    }
    etcd.servers[0].resume();
    let recovered = recovers(&registry).await;
    // A write or a join that timed out may have been executed: the state is one of the two.
    assert!(recovered.document.is_some() && recovered.members.contains_key(&1));
    assert!(registry.renew(term(1)).await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn write_with_lost_reply_is_unreachable_not_conflict() {
    let Some(etcd) = Etcd::start(1).await else { return };
    let proxy = LossyProxy::start(&etcd.servers[0]).await;
    let (registry, other) = (proxy.open("prefix"), etcd.open("prefix"));
    registry.write(None, &document()).await.unwrap();
    let (version, current) = registry.read().await.unwrap().document.unwrap();
    let next = current.with_next_term().unwrap().0;
    proxy.lose_one();
    let error = registry.write(Some(&version), &next).await.unwrap_err();
    assert!(matches!(error, RegistryError::Unreachable { .. }), "{error}");
    assert_eq!(other.read().await.unwrap().document.unwrap().1, next, "the write was executed");
    // Idempotent calls are retried, without an error.
    proxy.lose_one();
    registry.join(term(1), &at(1), Duration::from_secs(60)).await.unwrap();
    proxy.lose_one();
    assert!(registry.renew(term(1)).await.unwrap());
    proxy.lose_one();
    assert_eq!(registry.read().await.unwrap(), other.read().await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn state_survives_etcd_kill_and_restart() {
    let Some(mut etcd) = Etcd::start(1).await else { return };
    let registry = etcd.open("prefix");
    registry.write(None, &document()).await.unwrap();
    registry.join(term(1), &at(1), Duration::from_secs(60)).await.unwrap();
    let snapshot = registry.read().await.unwrap();
    etcd.servers[0].kill();
    let started = Instant::now();
    let error = registry.read().await.unwrap_err();
    assert!(started.elapsed() < Duration::from_secs(2));
    assert!(matches!(&error, RegistryError::Unreachable { .. }), "{error}");
    assert!(error.to_string().contains("refused"), "the reason is missing: {error}");
    all_calls_fail_in_time(&registry, &snapshot, Some(term(1))).await;
    etcd.servers[0].restart();
    assert_eq!(recovers(&registry).await, snapshot);
    let (version, current) = snapshot.document.as_ref().unwrap();
    assert!(registry.write(Some(version), &current.with_next_term().unwrap().0).await.unwrap());
    assert!(registry.renew(term(1)).await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn registry_works_with_one_of_three_etcd_servers_down() {
    let Some(mut etcd) = Etcd::start(3).await else { return };
    let registry = etcd.open("prefix");
    registry.write(None, &document()).await.unwrap();
    registry.join(term(1), &at(1), Duration::from_secs(60)).await.unwrap();
    for round in 0..2 {
        // First the current server is stopped, then killed. If it was the leader, the others elect a new one.
        if round == 0 {
            etcd.servers[0].stop();
        } else {
            etcd.servers[0].kill();
        }
        recovers(&registry).await;
        let started = Instant::now();
        for _ in 0..10 {
            let (version, current) = registry.read().await.unwrap().document.unwrap();
            assert!(registry.write(Some(&version), &current.with_next_term().unwrap().0).await.unwrap());
            assert!(registry.renew(term(1)).await.unwrap());
        }
        let took = started.elapsed();
        println!("ten rounds without one server took {took:?}");
        assert!(took < Duration::from_secs(5), "an unresponsive server is not tried every time: {took:?}");
        // A new registry finds the other servers, too.
        let fresh = recovers(&etcd.open("prefix")).await;
        assert_eq!(fresh.members.len(), 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn api_server_failures_are_classified_and_recoverable() {
    let server = ApiServer::start().await;
    let registry = server.open("moontide");
    registry.write(None, &document()).await.unwrap();
    registry.join(term(1), &at(1), Duration::from_secs(60)).await.unwrap();
    let snapshot = registry.read().await.unwrap();
    for (fault, text) in [(Fault::Refuse(500), "500"), (Fault::Refuse(429), "429"), (Fault::Cut, "")] {
        server.always(Some(fault));
        let error = registry.read().await.unwrap_err();
        assert!(matches!(error, RegistryError::Unreachable { .. }), "{fault:?}: {error}");
        assert!(error.to_string().contains(text), "{fault:?}: {error}");
        all_calls_fail_in_time(&registry, &snapshot, Some(term(1))).await;
        server.always(None);
        assert_eq!(recovers(&registry).await, snapshot, "{fault:?}");
    }
    server.always(Some(Fault::Hang));
    all_calls_fail_in_time(&registry, &snapshot, Some(term(1))).await;
    server.always(None);
    assert_eq!(recovers(&registry).await, snapshot);
    for code in [401, 403] {
        server.always(Some(Fault::Refuse(code)));
        let error = registry.read().await.unwrap_err();
        assert!(matches!(error, RegistryError::Denied { .. }), "{error}");
    }
    server.always(None);
    assert!(registry.renew(term(1)).await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn membership_survives_renewal_with_lost_reply() {
    let server = ApiServer::start().await;
    let registry = server.open("moontide");
    registry.join(term(1), &at(1), Duration::from_secs(60)).await.unwrap();
    server.once(Fault::DoneButCut);
    registry.renew(term(1)).await.unwrap_err();
    assert!(registry.renew(term(1)).await.unwrap(), "the object has changed, but belongs to this member");
    // After a removal, or with another object of the same name, the renewal fails.
    registry.remove(term(1)).await.unwrap();
    registry.join(term(2), &at(2), Duration::from_secs(60)).await.unwrap();
    let other = server.open("moontide");
    other.remove(term(2)).await.unwrap();
    other.join(term(2), &at(2), Duration::from_secs(60)).await.unwrap();
    assert!(!registry.renew(term(2)).await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn member_that_renews_just_before_expiry_is_not_removed() {
    let server = ApiServer::start().await;
    let (one, observer) = (server.open("moontide"), server.open("moontide"));
    one.join(term(1), &at(1), LEASE).await.unwrap();
    observer.read().await.unwrap();
    sleep(LEASE * 3 / 4).await;
    observer.read().await.unwrap();
    sleep(LEASE / 2).await;
    server.next_delete_is_late();
    assert_eq!(observer.read().await.unwrap().members.len(), 1, "the precondition of the deletion failed");
    assert!(one.renew(term(1)).await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deleted_cluster_state_is_not_recreated_by_stale_version() {
    let server = ApiServer::start().await;
    let registry = server.open("moontide");
    registry.write(None, &document()).await.unwrap();
    let (version, current) = registry.read().await.unwrap().document.unwrap();
    server.lose("moontide");
    assert!(!registry.write(Some(&version), &current).await.unwrap());
    assert!(registry.read().await.unwrap().document.is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interrupted_or_expired_watch_is_restarted() {
    let server = ApiServer::start().await;
    let (one, two) = (server.open("moontide"), server.open("moontide"));
    one.write(None, &document()).await.unwrap();
    let snapshot = two.read().await.unwrap();
    for fault in [Fault::Forget, Fault::Refuse(410), Fault::Cut] {
        server.next_watch(fault);
        let watches = server.watches();
        let acting = async {
            sleep(Duration::from_millis(600)).await;
            assert!(server.watches() >= watches + 2, "{fault:?}: the watch is restarted");
            one.join(term(1), &at(1), Duration::from_secs(60)).await.unwrap();
            Instant::now()
        };
        let waiting = async {
            two.changed(&snapshot, Duration::from_secs(10)).await;
            Instant::now()
        };
        let (acted, woken) = tokio::join!(acting, waiting);
        assert!(woken.saturating_duration_since(acted) < Duration::from_millis(500), "{fault:?}");
        one.remove(term(1)).await.unwrap();
        assert_eq!(two.read().await.unwrap(), snapshot);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn api_server_outage_longer_than_lease_removes_no_member() {
    let server = ApiServer::start().await;
    let (one, two) = (server.open("moontide"), server.open("moontide"));
    one.join(term(1), &at(1), LEASE).await.unwrap();
    two.join(term(2), &at(2), LEASE).await.unwrap();
    let snapshot = one.read().await.unwrap();
    assert_eq!(snapshot, two.read().await.unwrap());
    server.always(Some(Fault::Refuse(503)));
    let end = Instant::now() + LEASE * 2;
    while Instant::now() < end {
        one.read().await.unwrap_err();
        two.renew(term(2)).await.unwrap_err();
        sleep(Duration::from_millis(100)).await;
    }
    server.always(None);
    assert_eq!(one.read().await.unwrap(), snapshot);
    assert!(one.renew(term(1)).await.unwrap() && two.renew(term(2)).await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replaced_token_file_is_read_again() {
    let server = ApiServer::start().await;
    let file = std::env::temp_dir().join(format!("moontide-version-{}", std::process::id()));
    std::fs::write(&file, "first\n").unwrap();
    server.expect_token("first");
    let registry = server.open_with_token("moontide", &file);
    registry.read().await.unwrap();
    server.expect_token("second");
    let error = registry.read().await.unwrap_err();
    assert!(matches!(error, RegistryError::Denied { .. }), "{error}");
    std::fs::write(&file, "second\n").unwrap();
    registry.read().await.unwrap();
    std::fs::remove_file(&file).unwrap();
    let error = registry.read().await.unwrap_err();
    assert!(error.to_string().contains("version"), "{error}");
}
