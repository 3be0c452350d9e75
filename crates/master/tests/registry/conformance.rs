//! Conformance tests of [`Registry`], independent of the implementation. Each takes a function that opens another
//! client of the same registry, as another process does.

use std::collections::BTreeMap;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use moontide_master::election::{ClusterIdentity, ClusterState, MasterAddresses, Registry, Snapshot};
use moontide_types::Term;
use tokio::time::{sleep, timeout};

/// Shortest lease of etcd with its default settings.
pub(crate) const LEASE: Duration = Duration::from_secs(2);
/// Maximum delay of the detection of a change.
const WAKE: Duration = Duration::from_millis(500);
/// Timeout of every wait.
const TIMEOUT: Duration = Duration::from_secs(20);

pub(crate) type Open<'a> = &'a (dyn Fn() -> Arc<dyn Registry> + Sync);

pub(crate) fn document() -> ClusterState {
    ClusterState::new(NonZeroU16::new(4).unwrap())
}

pub(crate) fn term(number: u32) -> Term {
    Term::new(number).unwrap()
}

pub(crate) fn at(number: u32) -> MasterAddresses {
    MasterAddresses { grpc: format!("m{number}:7400"), frame: format!("m{number}:7401") }
}

fn members(numbers: &[u32]) -> BTreeMap<u32, MasterAddresses> {
    numbers.iter().map(|&number| (number, at(number))).collect()
}

/// Reads until `wanted` holds.
pub(crate) async fn read_until(
    registry: &Arc<dyn Registry>,
    what: &str,
    wanted: impl Fn(&Snapshot) -> bool,
) -> Snapshot {
    let end = Instant::now() + TIMEOUT;
    loop {
        let snapshot = registry.read().await.unwrap();
        if wanted(&snapshot) {
            return snapshot;
        }
        assert!(Instant::now() < end, "{what}: still {snapshot:?}");
        sleep(Duration::from_millis(50)).await;
    }
}

pub(crate) async fn concurrent_first_writes_create_state_once(open: Open<'_>) {
    let (one, two) = (open(), open());
    assert_eq!(one.read().await.unwrap(), Snapshot { document: None, members: BTreeMap::new() });
    let (first, second) = (document(), document().with_next_term().unwrap().0);
    let (a, b) = tokio::join!(one.write(None, &first), two.write(None, &second));
    let (a, b) = (a.unwrap(), b.unwrap());
    assert!(a ^ b, "one of two creates it: {a} {b}");
    let stored = one.read().await.unwrap().document.unwrap().1;
    assert_eq!(stored, if a { first } else { second });
    assert!(!two.write(None, &document()).await.unwrap(), "the state exists already");
    assert_eq!(two.read().await.unwrap().document.unwrap().1, stored);
}

pub(crate) async fn compare_and_swap_with_stale_version_fails(open: Open<'_>) {
    let (one, two) = (open(), open());
    assert!(one.write(None, &document()).await.unwrap());
    let mut stale = vec![];
    for _ in 0..5 {
        let (version, current) = one.read().await.unwrap().document.unwrap();
        let (same, _) = two.read().await.unwrap().document.unwrap();
        assert_eq!(version, same, "all clients see the same version of a state");
        let (next, new_term) = current.with_next_term().unwrap();
        let (a, b) = tokio::join!(one.write(Some(&version), &next), two.write(Some(&same), &next));
        assert!(a.unwrap() ^ b.unwrap(), "exactly one of two writes succeeds");
        let snapshot = two.read().await.unwrap().document.unwrap();
        assert_eq!((snapshot.1.last_term, &snapshot.1), (new_term.get(), &next));
        stale.push(version);
    }
    for version in &stale {
        assert!(!two.write(Some(version), &document()).await.unwrap(), "{version:?} is outdated");
    }
    // Changes of members do not change the version of the state.
    let (version, current) = one.read().await.unwrap().document.unwrap();
    two.join(term(9), &at(9), LEASE).await.unwrap();
    assert!(one.write(Some(&version), &current.with_next_term().unwrap().0).await.unwrap());
}

pub(crate) async fn member_without_renewal_expires_after_lease_not_earlier(open: Open<'_>) {
    let (one, two, observer) = (open(), open(), open());
    one.join(term(1), &at(1), LEASE).await.unwrap();
    two.join(term(2), &at(2), LEASE).await.unwrap();
    assert_eq!(observer.read().await.unwrap().members, members(&[1, 2]));
    sleep(Duration::from_millis(700)).await;
    let sent = Instant::now();
    assert!(two.renew(term(2)).await.unwrap());
    let end = sent + TIMEOUT;
    let gone = loop {
        assert!(one.renew(term(1)).await.unwrap(), "a member that renews is listed");
        let snapshot = observer.read().await.unwrap().members;
        assert!(snapshot.contains_key(&1), "a member that renews is listed");
        if !snapshot.contains_key(&2) {
            break sent.elapsed();
        }
        assert!(Instant::now() < end, "the member does not expire");
        sleep(Duration::from_millis(100)).await;
    };
    println!("a lease of {LEASE:?} ended after {gone:?}");
    assert!(gone >= LEASE, "gone after {gone:?}");
    assert!(gone <= LEASE + Duration::from_secs(2), "gone after {gone:?} only");
    assert!(!two.renew(term(2)).await.unwrap(), "the membership has ended");
    assert!(!two.renew(term(2)).await.unwrap(), "every further renewal fails, too");
    assert!(one.renew(term(1)).await.unwrap());
    two.join(term(3), &at(3), LEASE).await.unwrap();
    assert_eq!(observer.read().await.unwrap().members, members(&[1, 3]));
    assert!(two.renew(term(3)).await.unwrap());
}

pub(crate) async fn removed_member_is_not_listed_and_cannot_renew(open: Open<'_>) {
    let (one, two) = (open(), open());
    let long = Duration::from_secs(60);
    for (registry, number) in [(&one, 1), (&two, 2), (&two, 3)] {
        registry.join(term(number), &at(number), long).await.unwrap();
    }
    one.remove(term(1)).await.unwrap();
    assert_eq!(two.read().await.unwrap().members, members(&[2, 3]));
    assert!(!one.renew(term(1)).await.unwrap());
    one.remove(term(2)).await.unwrap();
    assert_eq!(two.read().await.unwrap().members, members(&[3]), "a member of another process");
    assert!(!two.renew(term(2)).await.unwrap(), "although its lease has not expired");
    assert!(two.renew(term(3)).await.unwrap());
    one.remove(term(2)).await.expect("removal of a missing member succeeds");
    assert!(!one.renew(term(3)).await.unwrap(), "it joined through another registry object");
}

pub(crate) async fn change_wakes_waiter(open: Open<'_>) {
    let (one, two) = (open(), open());
    let long = Duration::from_secs(30);
    one.write(None, &document()).await.unwrap();
    one.join(term(1), &at(1), long).await.unwrap();
    let mut snapshot = two.read().await.unwrap();
    for step in 0..4 {
        let waiting = async {
            two.changed(&snapshot, TIMEOUT).await;
            Instant::now()
        };
        let acting = async {
            sleep(Duration::from_millis(400)).await;
            let acted = Instant::now();
            match step {
                0 => {
                    let (version, current) = snapshot.document.as_ref().unwrap();
                    let next = current.with_next_term().unwrap().0;
                    assert!(one.write(Some(version), &next).await.unwrap());
                }
                1 => one.join(term(2), &at(2), long).await.unwrap(),
                2 => one.remove(term(2)).await.unwrap(),
                _ => one.remove(term(1)).await.unwrap(),
            }
            acted
        };
        let (woken, acted) = tokio::join!(waiting, acting);
        let took = woken.checked_duration_since(acted).expect("not woken before the change");
        println!("step {step}: woken after {took:?}");
        assert!(took < WAKE, "step {step}: {took:?}");
        let next = two.read().await.unwrap();
        assert_ne!(next, snapshot, "step {step}");
        snapshot = next;
    }
    // A change before the start of the wait counts, too.
    one.join(term(4), &at(4), long).await.unwrap();
    timeout(WAKE, two.changed(&snapshot, TIMEOUT)).await.expect("it has changed already");
}

pub(crate) async fn waiter_ignores_renewals_and_wakes_at_lease_expiry(open: Open<'_>) {
    let (one, two, observer) = (open(), open(), open());
    one.join(term(1), &at(1), LEASE).await.unwrap();
    let snapshot = observer.read().await.unwrap();
    let started = Instant::now();
    let wait = Duration::from_secs(3);
    let renewing = async {
        while started.elapsed() < wait + Duration::from_millis(200) {
            assert!(one.renew(term(1)).await.unwrap());
            sleep(Duration::from_millis(250)).await;
        }
    };
    let waiting = async {
        observer.changed(&snapshot, wait).await;
        started.elapsed()
    };
    let (slept, ()) = tokio::join!(waiting, renewing);
    assert!(slept >= wait * 9 / 10, "nothing had changed after {slept:?}");
    assert!(slept < wait + WAKE, "it waits for {wait:?} at most: {slept:?}");
    two.join(term(2), &at(2), LEASE).await.unwrap();
    let snapshot = read_until(&observer, "both", |snapshot| snapshot.members.len() == 2).await;
    let started = Instant::now();
    while observer.read().await.unwrap() == snapshot {
        observer.changed(&snapshot, TIMEOUT).await;
        assert!(
            started.elapsed() < LEASE + Duration::from_secs(3),
            "the lease of a member expires without renewals"
        );
    }
}

pub(crate) async fn cluster_identity_is_created_once(open: Open<'_>) {
    let drafts: Vec<ClusterIdentity> = (1..=8u8)
        .map(|n| ClusterIdentity {
            cluster: n.into(),
            id_key: 7,
            secret: [n; 32],
            groups: NonZeroU16::new(16).unwrap(),
        })
        .collect();
    let registries: Vec<_> = drafts.iter().map(|_| open()).collect();
    let given =
        join_all(registries.iter().zip(&drafts).map(|(registry, draft)| registry.identity(draft))).await;
    let given: Vec<ClusterIdentity> = given.into_iter().map(Result::unwrap).collect();
    assert!(drafts.contains(&given[0]));
    assert!(given.iter().all(|identity| *identity == given[0]), "{given:?}");
    assert_eq!(open().identity(&drafts[0]).await.unwrap(), given[0]);
    assert_eq!(open().read().await.unwrap().document, None, "an identity is no cluster state");
}

/// Checks that all calls fail within two seconds. `number` is a member that joined through `registry`, if there is one;
/// the renewal of another member returns false without a call.
pub(crate) async fn all_calls_fail_in_time(
    registry: &Arc<dyn Registry>,
    snapshot: &Snapshot,
    number: Option<Term>,
) {
    let draft =
        ClusterIdentity { cluster: 1, id_key: 1, secret: [1; 32], groups: NonZeroU16::new(4).unwrap() };
    let version = snapshot.document.as_ref().map(|(version, _)| version);
    let document = document();
    let (addresses, new) = (at(4_000_000), term(4_000_000));
    let started = Instant::now();
    let (identity, read, write, join, renew, remove, ()) = timeout(TIMEOUT, async {
        tokio::join!(
            registry.identity(&draft),
            registry.read(),
            registry.write(version, &document),
            registry.join(new, &addresses, LEASE),
            registry.renew(number.unwrap_or(new)),
            registry.remove(term(3_999_999)),
            registry.changed(snapshot, Duration::from_secs(1)),
        )
    })
    .await
    .expect("calls time out");
    let took = started.elapsed();
    println!("calls failed after {took:?}: {}", read.as_ref().unwrap_err());
    // All calls run at once, each with a limit of two seconds: one after the other, or one of them retried, would take
    // four. The rest is for a busy machine.
    assert!(took < Duration::from_millis(3500), "two seconds, plus scheduling delay: {took:?}");
    assert!(identity.is_err() && read.is_err() && write.is_err() && join.is_err(), "{write:?} {join:?}");
    assert!(renew.is_err() == number.is_some() && remove.is_err(), "{renew:?} {remove:?}");
}

/// Waits until calls succeed again.
pub(crate) async fn recovers(registry: &Arc<dyn Registry>) -> Snapshot {
    let end = Instant::now() + TIMEOUT;
    loop {
        match registry.read().await {
            Ok(snapshot) => return snapshot,
            Err(error) => assert!(Instant::now() < end, "no recovery: {error}"),
        }
        sleep(Duration::from_millis(50)).await;
    }
}
