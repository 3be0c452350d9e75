//! What [`Registry`] promises, whatever stands behind it. Each takes a way to open the same place again, as processes do.

use std::collections::BTreeMap;
use std::num::NonZeroU16;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use moontide_master::election::{Document, Identity, MasterAddresses, Registry, Snapshot};
use moontide_types::Term;
use tokio::time::{sleep, timeout};

/// The shortest that etcd takes as it is.
pub(crate) const LEASE: Duration = Duration::from_secs(2);
/// How soon a change must be noticed.
const WAKE: Duration = Duration::from_millis(500);
/// Longest of anything that is waited for.
const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) type Open<'a> = &'a (dyn Fn() -> Arc<dyn Registry> + Sync);

pub(crate) fn document() -> Document {
    Document::new(NonZeroU16::new(4).unwrap())
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

/// Reads until it is as wanted.
pub(crate) async fn until(
    registry: &Arc<dyn Registry>,
    what: &str,
    wanted: impl Fn(&Snapshot) -> bool,
) -> Snapshot {
    let end = Instant::now() + PATIENCE;
    loop {
        let snapshot = registry.read().await.unwrap();
        if wanted(&snapshot) {
            return snapshot;
        }
        assert!(Instant::now() < end, "{what}: still {snapshot:?}");
        sleep(Duration::from_millis(50)).await;
    }
}

pub(crate) async fn the_first_document_is_created_once(open: Open<'_>) {
    let (one, two) = (open(), open());
    assert_eq!(one.read().await.unwrap(), Snapshot { document: None, members: BTreeMap::new() });
    let (first, second) = (document(), document().with_next_term().unwrap().0);
    let (a, b) = tokio::join!(one.write(None, &first), two.write(None, &second));
    let (a, b) = (a.unwrap(), b.unwrap());
    assert!(a ^ b, "one of two creates it: {a} {b}");
    let stored = one.read().await.unwrap().document.unwrap().1;
    assert_eq!(stored, if a { first } else { second });
    assert!(!two.write(None, &document()).await.unwrap(), "it is there already");
    assert_eq!(two.read().await.unwrap().document.unwrap().1, stored);
}

pub(crate) async fn the_slower_loses_the_compare_and_swap(open: Open<'_>) {
    let (one, two) = (open(), open());
    assert!(one.write(None, &document()).await.unwrap());
    let mut stale = vec![];
    for _ in 0..5 {
        let (token, current) = one.read().await.unwrap().document.unwrap();
        let (same, _) = two.read().await.unwrap().document.unwrap();
        assert_eq!(token, same, "a token says which document it stands for, to everybody");
        let (next, drawn) = current.with_next_term().unwrap();
        let (a, b) = tokio::join!(one.write(Some(&token), &next), two.write(Some(&same), &next));
        assert!(a.unwrap() ^ b.unwrap(), "a term is drawn by one of two");
        let seen = two.read().await.unwrap().document.unwrap();
        assert_eq!((seen.1.last_term, &seen.1), (drawn.get(), &next));
        stale.push(token);
    }
    for token in &stale {
        assert!(!two.write(Some(token), &document()).await.unwrap(), "{token:?} is of the past");
    }
    // Members come and go without touching what the token stands for.
    let (token, current) = one.read().await.unwrap().document.unwrap();
    two.join(term(9), &at(9), LEASE).await.unwrap();
    assert!(one.write(Some(&token), &current.with_next_term().unwrap().0).await.unwrap());
}

pub(crate) async fn who_does_not_renew_is_gone_after_its_lease_and_not_before(open: Open<'_>) {
    let (one, two, observer) = (open(), open(), open());
    one.join(term(1), &at(1), LEASE).await.unwrap();
    two.join(term(2), &at(2), LEASE).await.unwrap();
    assert_eq!(observer.read().await.unwrap().members, members(&[1, 2]));
    sleep(Duration::from_millis(700)).await;
    let sent = Instant::now();
    assert!(two.renew(term(2)).await.unwrap());
    let end = sent + PATIENCE;
    let gone = loop {
        assert!(one.renew(term(1)).await.unwrap(), "it renews");
        let seen = observer.read().await.unwrap().members;
        assert!(seen.contains_key(&1), "it renews");
        if !seen.contains_key(&2) {
            break sent.elapsed();
        }
        assert!(Instant::now() < end, "it lives for ever");
        sleep(Duration::from_millis(100)).await;
    };
    println!("a lease of {LEASE:?} ended after {gone:?}");
    assert!(gone >= LEASE, "gone after {gone:?}");
    assert!(gone <= LEASE + Duration::from_secs(2), "gone after {gone:?} only");
    assert!(!two.renew(term(2)).await.unwrap(), "it must join again");
    assert!(!two.renew(term(2)).await.unwrap(), "and is told so as often as it asks");
    assert!(one.renew(term(1)).await.unwrap());
    two.join(term(3), &at(3), LEASE).await.unwrap();
    assert_eq!(observer.read().await.unwrap().members, members(&[1, 3]));
    assert!(two.renew(term(3)).await.unwrap());
}

pub(crate) async fn a_removal_is_seen_by_the_others_and_by_the_removed(open: Open<'_>) {
    let (one, two) = (open(), open());
    let long = Duration::from_secs(60);
    for (registry, number) in [(&one, 1), (&two, 2), (&two, 3)] {
        registry.join(term(number), &at(number), long).await.unwrap();
    }
    one.remove(term(1)).await.unwrap();
    assert_eq!(two.read().await.unwrap().members, members(&[2, 3]));
    assert!(!one.renew(term(1)).await.unwrap());
    one.remove(term(2)).await.unwrap();
    assert_eq!(two.read().await.unwrap().members, members(&[3]), "somebody else's");
    assert!(!two.renew(term(2)).await.unwrap(), "its lease would have lived");
    assert!(two.renew(term(3)).await.unwrap());
    one.remove(term(2)).await.expect("it is gone already");
    assert!(!one.renew(term(3)).await.unwrap(), "it has not joined here");
}

pub(crate) async fn changes_wake_who_waits(open: Open<'_>) {
    let (one, two) = (open(), open());
    let long = Duration::from_secs(30);
    one.write(None, &document()).await.unwrap();
    one.join(term(1), &at(1), long).await.unwrap();
    let mut seen = two.read().await.unwrap();
    for step in 0..4 {
        let waiting = async {
            two.changed(&seen, PATIENCE).await;
            Instant::now()
        };
        let acting = async {
            sleep(Duration::from_millis(400)).await;
            let acted = Instant::now();
            match step {
                0 => {
                    let (token, current) = seen.document.as_ref().unwrap();
                    let next = current.with_next_term().unwrap().0;
                    assert!(one.write(Some(token), &next).await.unwrap());
                }
                1 => one.join(term(2), &at(2), long).await.unwrap(),
                2 => one.remove(term(2)).await.unwrap(),
                _ => one.remove(term(1)).await.unwrap(),
            }
            acted
        };
        let (woken, acted) = tokio::join!(waiting, acting);
        let took = woken.checked_duration_since(acted).expect("not before anything happened");
        println!("step {step}: woken after {took:?}");
        assert!(took < WAKE, "step {step}: {took:?}");
        let next = two.read().await.unwrap();
        assert_ne!(next, seen, "step {step}");
        seen = next;
    }
    // What happened before it began to wait is a change too.
    one.join(term(4), &at(4), long).await.unwrap();
    timeout(WAKE, two.changed(&seen, PATIENCE)).await.expect("it has changed already");
}

pub(crate) async fn who_waits_sleeps_through_renewals_and_wakes_when_a_lease_ends(open: Open<'_>) {
    let (one, two, observer) = (open(), open(), open());
    one.join(term(1), &at(1), LEASE).await.unwrap();
    let seen = observer.read().await.unwrap();
    let began = Instant::now();
    let wait = Duration::from_secs(3);
    let renewing = async {
        while began.elapsed() < wait + Duration::from_millis(200) {
            assert!(one.renew(term(1)).await.unwrap());
            sleep(Duration::from_millis(250)).await;
        }
    };
    let waiting = async {
        observer.changed(&seen, wait).await;
        began.elapsed()
    };
    let (slept, ()) = tokio::join!(waiting, renewing);
    assert!(slept >= wait * 9 / 10, "nothing had changed after {slept:?}");
    assert!(slept < wait + WAKE, "it waits for {wait:?} at most: {slept:?}");
    two.join(term(2), &at(2), LEASE).await.unwrap();
    let seen = until(&observer, "both", |snapshot| snapshot.members.len() == 2).await;
    let began = Instant::now();
    while observer.read().await.unwrap() == seen {
        observer.changed(&seen, PATIENCE).await;
        assert!(began.elapsed() < LEASE + Duration::from_secs(3), "nobody renews");
    }
}

pub(crate) async fn an_identity_is_given_once(open: Open<'_>) {
    let drafts: Vec<Identity> = (1..=8u8)
        .map(|n| Identity {
            cluster: n.into(),
            id_key: 7,
            secret: [n; 32],
            groups: NonZeroU16::new(16).unwrap(),
        })
        .collect();
    let registries: Vec<_> = drafts.iter().map(|_| open()).collect();
    let given =
        join_all(registries.iter().zip(&drafts).map(|(registry, draft)| registry.identity(draft))).await;
    let given: Vec<Identity> = given.into_iter().map(Result::unwrap).collect();
    assert!(drafts.contains(&given[0]));
    assert!(given.iter().all(|identity| *identity == given[0]), "{given:?}");
    assert_eq!(open().identity(&drafts[0]).await.unwrap(), given[0]);
    assert_eq!(open().read().await.unwrap().document, None, "an identity is no document");
}

/// All calls end within two seconds, and fail. `number`: a member that joined there, if one did; who did not is told that it
/// is none, without a question.
pub(crate) async fn all_calls_fail_in_time(
    registry: &Arc<dyn Registry>,
    snapshot: &Snapshot,
    number: Option<Term>,
) {
    let draft = Identity { cluster: 1, id_key: 1, secret: [1; 32], groups: NonZeroU16::new(4).unwrap() };
    let token = snapshot.document.as_ref().map(|(token, _)| token);
    let document = document();
    let (addresses, new) = (at(4_000_000), term(4_000_000));
    let began = Instant::now();
    let (identity, read, write, join, renew, remove, ()) = timeout(PATIENCE, async {
        tokio::join!(
            registry.identity(&draft),
            registry.read(),
            registry.write(token, &document),
            registry.join(new, &addresses, LEASE),
            registry.renew(number.unwrap_or(new)),
            registry.remove(term(3_999_999)),
            registry.changed(snapshot, Duration::from_secs(1)),
        )
    })
    .await
    .expect("calls end by themselves");
    let took = began.elapsed();
    println!("calls failed after {took:?}: {}", read.as_ref().unwrap_err());
    assert!(took < Duration::from_millis(2200), "two seconds, and the scheduler's due: {took:?}");
    assert!(identity.is_err() && read.is_err() && write.is_err() && join.is_err(), "{write:?} {join:?}");
    assert!(renew.is_err() == number.is_some() && remove.is_err(), "{renew:?} {remove:?}");
}

/// All calls succeed again, by themselves.
pub(crate) async fn heals(registry: &Arc<dyn Registry>) -> Snapshot {
    let end = Instant::now() + PATIENCE;
    loop {
        match registry.read().await {
            Ok(snapshot) => return snapshot,
            Err(error) => assert!(Instant::now() < end, "it does not heal: {error}"),
        }
        sleep(Duration::from_millis(50)).await;
    }
}
