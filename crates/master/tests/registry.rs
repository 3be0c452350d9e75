//! Registries against what they promise: etcd as it is, started here, and an API server of ours that behaves like
//! Kubernetes'.
//!
//! `MOONTIDE_ETCD` says where etcd is, if it is not on the path; with `MOONTIDE_ETCD=skip` its tests are left out.
//! `MOONTIDE_SEED` repeats the choices of the random run, not its interleaving, which is the machine's.

#[path = "registry/api_server.rs"]
mod api_server;
#[path = "registry/candidates.rs"]
mod candidates;
#[path = "registry/etcd.rs"]
mod etcd;
#[path = "registry/promises.rs"]
mod promises;

use std::time::{Duration, Instant};

use api_server::{ApiServer, Fault};
use etcd::{Etcd, LossyWay};
use moontide_master::election::RegistryError;
use promises::{LEASE, all_calls_fail_in_time, at, document, heals, term};
use tokio::time::sleep;

/// Each promise, on each registry.
macro_rules! promised {
    ($($promise:ident),* $(,)?) => {
        mod by_etcd {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $promise() {
                let Some(etcd) = super::Etcd::start(1).await else { return };
                super::promises::$promise(&|| etcd.open("some/place")).await;
            })*
        }

        mod by_kubernetes {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $promise() {
                let server = super::ApiServer::start().await;
                super::promises::$promise(&|| server.open("moontide")).await;
            })*
        }
    };
}

promised!(
    the_first_document_is_created_once,
    the_slower_loses_the_compare_and_swap,
    who_does_not_renew_is_gone_after_its_lease_and_not_before,
    a_removal_is_seen_by_the_others_and_by_the_removed,
    changes_wake_who_waits,
    who_waits_sleeps_through_renewals_and_wakes_when_a_lease_ends,
    an_identity_is_given_once,
);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clusters_in_one_etcd_do_not_see_each_other() {
    let Some(etcd) = Etcd::start(1).await else { return };
    // The names are chosen so that one begins with the other.
    let (one, two) = (etcd.open("a"), etcd.open("a0"));
    assert!(one.write(None, &document()).await.unwrap());
    one.join(term(1), &at(1), LEASE).await.unwrap();
    let nothing = two.read().await.unwrap();
    assert!(nothing.document.is_none() && nothing.members.is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_etcd_that_says_nothing_fails_calls_in_time_and_heals_when_it_goes_on() {
    let Some(etcd) = Etcd::start(1).await else { return };
    let registry = etcd.open("place");
    registry.write(None, &document()).await.unwrap();
    registry.join(term(1), &at(1), Duration::from_secs(60)).await.unwrap();
    let seen = registry.read().await.unwrap();
    etcd.servers[0].stop();
    for _ in 0..2 {
        all_calls_fail_in_time(&registry, &seen, Some(term(1))).await;
        // One that connects to it for the first time.
        all_calls_fail_in_time(&etcd.open("place"), &seen, None).await;
    }
    etcd.servers[0].go_on();
    let healed = heals(&registry).await;
    // A write that was given up may have been carried out, and a join: what is there is one of the two documents.
    assert!(healed.document.is_some() && healed.members.contains_key(&1));
    assert!(registry.renew(term(1)).await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_write_whose_answer_was_lost_is_not_called_somebody_elses() {
    let Some(etcd) = Etcd::start(1).await else { return };
    let way = LossyWay::to(&etcd.servers[0]).await;
    let (registry, other) = (way.open("place"), etcd.open("place"));
    registry.write(None, &document()).await.unwrap();
    let (token, current) = registry.read().await.unwrap().document.unwrap();
    let next = current.with_next_term().unwrap().0;
    way.lose_one();
    let error = registry.write(Some(&token), &next).await.unwrap_err();
    assert!(matches!(error, RegistryError::Unreachable { .. }), "{error}");
    assert_eq!(other.read().await.unwrap().document.unwrap().1, next, "it was done");
    // What may be done twice is, and nobody notices.
    way.lose_one();
    registry.join(term(1), &at(1), Duration::from_secs(60)).await.unwrap();
    way.lose_one();
    assert!(registry.renew(term(1)).await.unwrap());
    way.lose_one();
    assert_eq!(registry.read().await.unwrap(), other.read().await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_etcd_that_is_killed_and_comes_back_still_has_everything() {
    let Some(mut etcd) = Etcd::start(1).await else { return };
    let registry = etcd.open("place");
    registry.write(None, &document()).await.unwrap();
    registry.join(term(1), &at(1), Duration::from_secs(60)).await.unwrap();
    let seen = registry.read().await.unwrap();
    etcd.servers[0].kill();
    let began = Instant::now();
    let error = registry.read().await.unwrap_err();
    assert!(began.elapsed() < Duration::from_secs(2));
    assert!(matches!(&error, RegistryError::Unreachable { .. }), "{error}");
    assert!(error.to_string().contains("refused"), "it says what is wrong: {error}");
    all_calls_fail_in_time(&registry, &seen, Some(term(1))).await;
    etcd.servers[0].restart();
    assert_eq!(heals(&registry).await, seen);
    let (token, current) = seen.document.as_ref().unwrap();
    assert!(registry.write(Some(token), &current.with_next_term().unwrap().0).await.unwrap());
    assert!(registry.renew(term(1)).await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_three_servers_one_may_die_and_one_that_is_stopped_is_left_alone() {
    let Some(mut etcd) = Etcd::start(3).await else { return };
    let registry = etcd.open("place");
    registry.write(None, &document()).await.unwrap();
    registry.join(term(1), &at(1), Duration::from_secs(60)).await.unwrap();
    for round in 0..2 {
        // First the one that is asked first says nothing, then it is dead. Was it the leader, the others elect one.
        if round == 0 {
            etcd.servers[0].stop();
        } else {
            etcd.servers[0].kill();
        }
        heals(&registry).await;
        let began = Instant::now();
        for _ in 0..10 {
            let (token, current) = registry.read().await.unwrap().document.unwrap();
            assert!(registry.write(Some(&token), &current.with_next_term().unwrap().0).await.unwrap());
            assert!(registry.renew(term(1)).await.unwrap());
        }
        let took = began.elapsed();
        println!("ten rounds without one server took {took:?}");
        assert!(took < Duration::from_secs(5), "who does not answer is not asked every time: {took:?}");
        // One that begins now finds the others too.
        let fresh = heals(&etcd.open("place")).await;
        assert_eq!(fresh.members.len(), 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failures_of_an_api_server_are_told_apart_and_pass() {
    let server = ApiServer::start().await;
    let registry = server.open("moontide");
    registry.write(None, &document()).await.unwrap();
    registry.join(term(1), &at(1), Duration::from_secs(60)).await.unwrap();
    let seen = registry.read().await.unwrap();
    for (fault, said) in [(Fault::Refuse(500), "500"), (Fault::Refuse(429), "429"), (Fault::Cut, "")] {
        server.always(Some(fault));
        let error = registry.read().await.unwrap_err();
        assert!(matches!(error, RegistryError::Unreachable { .. }), "{fault:?}: {error}");
        assert!(error.to_string().contains(said), "{fault:?}: {error}");
        all_calls_fail_in_time(&registry, &seen, Some(term(1))).await;
        server.always(None);
        assert_eq!(heals(&registry).await, seen, "{fault:?}");
    }
    server.always(Some(Fault::Hang));
    all_calls_fail_in_time(&registry, &seen, Some(term(1))).await;
    server.always(None);
    assert_eq!(heals(&registry).await, seen);
    for code in [401, 403] {
        server.always(Some(Fault::Refuse(code)));
        let error = registry.read().await.unwrap_err();
        assert!(matches!(error, RegistryError::Denied { .. }), "{error}");
    }
    server.always(None);
    assert!(registry.renew(term(1)).await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_renewal_whose_answer_was_lost_does_not_cost_the_membership() {
    let server = ApiServer::start().await;
    let registry = server.open("moontide");
    registry.join(term(1), &at(1), Duration::from_secs(60)).await.unwrap();
    server.once(Fault::DoneButCut);
    registry.renew(term(1)).await.unwrap_err();
    assert!(registry.renew(term(1)).await.unwrap(), "the object has changed, but it is ours");
    // A removal in between is no such thing, nor is another object of the same name.
    registry.remove(term(1)).await.unwrap();
    registry.join(term(2), &at(2), Duration::from_secs(60)).await.unwrap();
    let other = server.open("moontide");
    other.remove(term(2)).await.unwrap();
    other.join(term(2), &at(2), Duration::from_secs(60)).await.unwrap();
    assert!(!registry.renew(term(2)).await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_member_that_renews_at_the_last_moment_stays_one() {
    let server = ApiServer::start().await;
    let (one, observer) = (server.open("moontide"), server.open("moontide"));
    one.join(term(1), &at(1), LEASE).await.unwrap();
    observer.read().await.unwrap();
    sleep(LEASE * 3 / 4).await;
    observer.read().await.unwrap();
    sleep(LEASE / 2).await;
    server.next_delete_is_late();
    assert_eq!(observer.read().await.unwrap().members.len(), 1, "it was not as it had been seen");
    assert!(one.renew(term(1)).await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_document_that_somebody_deleted_is_not_brought_back_by_its_token() {
    let server = ApiServer::start().await;
    let registry = server.open("moontide");
    registry.write(None, &document()).await.unwrap();
    let (token, current) = registry.read().await.unwrap().document.unwrap();
    server.lose("moontide");
    assert!(!registry.write(Some(&token), &current).await.unwrap());
    assert!(registry.read().await.unwrap().document.is_none());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_watch_whose_beginning_is_forgotten_begins_anew() {
    let server = ApiServer::start().await;
    let (one, two) = (server.open("moontide"), server.open("moontide"));
    one.write(None, &document()).await.unwrap();
    let seen = two.read().await.unwrap();
    for fault in [Fault::Forget, Fault::Refuse(410), Fault::Cut] {
        server.next_watch(fault);
        let watches = server.watches();
        let acting = async {
            sleep(Duration::from_millis(600)).await;
            assert!(server.watches() >= watches + 2, "{fault:?}: it watches again");
            one.join(term(1), &at(1), Duration::from_secs(60)).await.unwrap();
            Instant::now()
        };
        let waiting = async {
            two.changed(&seen, Duration::from_secs(10)).await;
            Instant::now()
        };
        let (acted, woken) = tokio::join!(acting, waiting);
        assert!(woken.saturating_duration_since(acted) < Duration::from_millis(500), "{fault:?}");
        one.remove(term(1)).await.unwrap();
        assert_eq!(two.read().await.unwrap(), seen);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_api_server_that_was_away_for_longer_than_a_lease_expels_nobody() {
    let server = ApiServer::start().await;
    let (one, two) = (server.open("moontide"), server.open("moontide"));
    one.join(term(1), &at(1), LEASE).await.unwrap();
    two.join(term(2), &at(2), LEASE).await.unwrap();
    let seen = one.read().await.unwrap();
    assert_eq!(seen, two.read().await.unwrap());
    server.always(Some(Fault::Refuse(503)));
    let end = Instant::now() + LEASE * 2;
    while Instant::now() < end {
        one.read().await.unwrap_err();
        two.renew(term(2)).await.unwrap_err();
        sleep(Duration::from_millis(100)).await;
    }
    server.always(None);
    assert_eq!(one.read().await.unwrap(), seen);
    assert!(one.renew(term(1)).await.unwrap() && two.renew(term(2)).await.unwrap());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_that_is_replaced_is_read_again() {
    let server = ApiServer::start().await;
    let file = std::env::temp_dir().join(format!("moontide-token-{}", std::process::id()));
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
    assert!(error.to_string().contains("token"), "{error}");
}
