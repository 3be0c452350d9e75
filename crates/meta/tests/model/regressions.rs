//! What the model has found: each sequence once failed, as it was shrunk.

use moontide_meta::PlacementKind::{self, FreeRatio, Random, Topology};

use crate::command::{Command, Put};
use crate::run;
use Command::*;

/// The plainest put: an empty object, one replica.
fn put(key: u8) -> Put {
    Put {
        key,
        len: 0,
        replicas: 1,
        replicas_min: 1,
        stripes: None,
        upsert: false,
        one_sided: false,
        ttl_ms: 0,
        pin: 0,
        cohort: None,
        parent: false,
        caller: 0,
        local: None,
        preferred: None,
    }
}

fn replicas(key: u8, replicas: u8) -> Put {
    Put { replicas, ..put(key) }
}

fn upsert(key: u8) -> Put {
    Put { upsert: true, ..put(key) }
}

/// Two stripes per replica, of 256 and 44 KiB.
fn striped(key: u8, replicas: u8) -> Put {
    Put { len: 300 << 10, stripes: Some(2), replicas, ..put(key) }
}

#[track_caller]
fn check(placement: PlacementKind, commands: &[Command]) {
    if let Err(what) = run(placement, commands) {
        panic!("{what}");
    }
}

/// Failure: a put was acknowledged while the version that it replaced could still be read. Cause: the same caller
/// started it again, and only the first reservation knew that it replaced something. Fix: the group remembers by id.
#[test]
fn restarted_upsert_waits_for_the_old_version() {
    let by_one = Put { caller: 1, ..put(4) };
    check(
        Random,
        &[
            PutStart(put(0)),
            PutWhole(put(0)),
            PutWhole(put(4)),
            PutWhole(Put { upsert: true, ..by_one.clone() }),
            PutWhole(by_one),
        ],
    );
}

/// Failure: as above. Cause: the new version's node was lost and came back, so that a report brought it, without the
/// mark. Fix: as above.
#[test]
fn reported_upsert_waits_for_the_old_version() {
    check(
        Random,
        &[
            PutStart(put(0)),
            PutStart(put(0)),
            PutWhole(put(5)),
            PutWhole(Put { local: Some(3), ..upsert(5) }),
            Lose { node: 3 },
            Tick { budget: 255 },
            Mount { node: 3, segments: 2 },
            Report { segment: 5, count: 1 },
            PutEnd { put: 0, failed: 0 },
        ],
    );
}

/// Failure: a tenant got over its quota. Cause: a put that replaces an object was not held against it at all. Fix: it
/// is, less what it replaces.
#[test]
fn replacing_put_keeps_to_the_quota() {
    check(
        Random,
        &[
            PutWhole(put(5)),
            Quota { tenant: 1, units: 1, objects: 0 },
            PutWhole(Put { len: 473, ..upsert(5) }),
        ],
    );
}

/// Failure: a leased range was reclaimed. Cause: its node reported the record as DEAD, and the lease was not looked
/// at. Fix: it is.
#[test]
fn record_that_its_node_killed_keeps_its_lease() {
    check(Random, &[PutWhole(put(2)), Lookup { key: 2, lease_ms: 1 }, Scrub { segment: 5, slot: 0 }, Settle]);
}

/// Failure: an object that a node brought back in the same term was never complete. Cause: what reports bring was told
/// from puts in progress by the term alone. Fix: by a mark of its own.
#[test]
fn what_comes_back_in_the_same_term_is_completed_by_its_reports() {
    check(
        FreeRatio,
        &[
            PutStart(put(0)),
            WriteAll { put: 0 },
            PutWhole(striped(2, 2)),
            PutStart(replicas(1, 3)),
            WriteSome { put: 0, published: 0 },
            Reconnect { node: 1, segments: 0 },
            Commit { put: 0, place: 0 },
            Commit { put: 0, place: 1 },
            Report { segment: 2, count: 3 },
        ],
    );
}

/// Failure: arithmetic overflow in the list of free slots, and before that a slot served that was free. Cause: the
/// answer to a reclaim overtook the report's stream, which then brought the slot a second time. Fix: what was freed
/// since the report began is remembered until its end.
#[test]
fn answer_to_a_reclaim_may_overtake_the_report() {
    check(
        Topology,
        &[
            PutWhole(put(5)),
            Remove { key: 5, force: false },
            Reconnect { node: 3, segments: 0 },
            Report { segment: 5, count: 1 },
            Advance { ms: 31_000 },
            Settle,
            PutStart(Put { preferred: Some(0), ..replicas(0, 2) }),
            PutWhole(replicas(2, 3)),
            PutStart(replicas(1, 2)),
        ],
    );
}

/// Failure: a removal was acknowledged while an evicted version of the key was READY on its node, so that a crash would
/// have brought it back. Cause: only the places of the present version were killed. Fix: those that drain and of which
/// no node has said that they are dead are killed and waited for, too.
#[test]
fn removal_waits_for_evicted_versions() {
    check(
        Random,
        &[
            PutStart(Put { len: 300 << 10, ..put(3) }),
            WriteAll { put: 0 },
            Reconnect { node: 1, segments: 0 },
            PutEnd { put: 0, failed: 0 },
            Reconnect { node: 2, segments: 0 },
            PutStart(Put { replicas: 3, replicas_min: 3, ..put(0) }),
            Execute { node: 0, count: 1, refuse: true },
            PutStart(put(3)),
            Remove { key: 3, force: true },
            Settle,
        ],
    );
}

/// Failure: as above, with a version that a put in progress was replacing. Cause and fix: as above.
#[test]
fn removal_waits_for_replaced_versions() {
    check(
        Random,
        &[
            PutStart(put(0)),
            PutStart(Put { local: Some(3), ..put(2) }),
            WriteAll { put: 0 },
            PutEnd { put: 0, failed: 0 },
            PutWhole(upsert(2)),
            Remove { key: 2, force: true },
            Reconnect { node: 3, segments: 0 },
            Settle,
        ],
    );
}

/// Failure: an upsert was acknowledged while a replica of the old version, which its writer had called failed, could be
/// read. Cause and fix: as above.
#[test]
fn upsert_waits_for_failed_replicas_of_the_old_version() {
    check(
        Random,
        &[
            PutStart(replicas(5, 2)),
            PutStart(put(2)),
            PutStart(put(0)),
            WriteAll { put: 2 },
            PutEnd { put: 2, failed: 6 },
            PutWhole(upsert(5)),
            Reconnect { node: 3, segments: 0 },
            PutEnd { put: 0, failed: 0 },
        ],
    );
}

/// Failure: two replicas of an object shared a node. Cause: a stripe that came back took the first vacant place instead
/// of its own. Fix: its own, if it is known.
#[test]
fn stripes_come_back_to_their_own_replica() {
    check(
        Random,
        &[
            PutWhole(replicas(0, 2)),
            PutWhole(striped(1, 2)),
            Reconnect { node: 3, segments: 0 },
            Reconnect { node: 2, segments: 0 },
            WriteAll { put: 0 },
            Settle,
        ],
    );
}

/// Failure: an object was lost although one of each of its stripes was there. Cause: they belonged to different
/// replicas. Fix: they are brought together.
#[test]
fn stripes_of_different_replicas_make_one() {
    check(
        Random,
        &[
            PutWhole(Put { local: Some(0), ..striped(0, 2) }),
            Lose { node: 3 },
            Mount { node: 3, segments: 0 },
            Tick { budget: 255 },
            Unmount { segment: 1 },
            Settle,
        ],
    );
}

/// Failure, found by reading: a removal was acknowledged before its kill was carried out. Cause: the report said late
/// that the slot had been freed by its owner of before. Fix: that says nothing about the present one.
#[test]
fn late_report_of_an_earlier_owner_acknowledges_nothing() {
    let there = |key| PutWhole(Put { local: Some(3), ..put(key) });
    check(
        Random,
        &[
            there(2),
            Remove { key: 2, force: true },
            Execute { node: 3, count: 255, refuse: false },
            Answer { node: 3, count: 255 },
            there(4),
            Remove { key: 4, force: true },
            Report { segment: 5, count: 255 },
        ],
    );
}

/// No failure so far, but too rare in random sequences: two complete versions are left of a key, because the first one
/// was evicted and its node had not heard of it when the master crashed. The newer one wins, in either order.
#[test]
fn newest_complete_version_wins_after_a_crash() {
    for (older, newer) in [(0, 3), (3, 0)] {
        let there = |node| PutWhole(Put { local: Some(node), ..put(2) });
        let mut commands = vec![there(older), Evict { target_permille: 0, objects: 8 }, there(newer), Crash];
        commands.extend((0..4).map(|node| Mount { node, segments: 0 }));
        commands.push(Settle);
        check(Random, &commands);
    }
}

/// Failure: a put was acknowledged while the version that it replaced could still be read. Cause: a node that was away
/// when the put began brought the old version back, and its reclaim was under way only. Fix: an end waits as long as a
/// version that was given up may be alive.
#[test]
fn a_version_that_comes_back_holds_up_the_end_of_its_replacement() {
    check(
        Random,
        &[
            Execute { node: 0, count: 1, refuse: false },
            PutWhole(Put { len: 300 << 10, ..replicas(0, 3) }),
            Settle,
            PutWhole(replicas(5, 2)),
            Lose { node: 3 },
            PutStart(upsert(5)),
            Job { tenant: 0, kind: 0, force: false },
            Mount { node: 3, segments: 0 },
            Report { segment: 5, count: 1 },
            Execute { node: 0, count: 1, refuse: false },
            ReportEnd { segment: 5 },
            WriteAll { put: 0 },
            PutStart(put(1)),
            Report { segment: 1, count: 3 },
            PutEnd { put: 1, failed: 0 },
        ],
    );
}

/// Failure: an object of which every stripe could be read was not found. Cause: the stripes were of two replicas, and
/// made one only when the sweep had come by. Fix: readers put together what can be read.
#[test]
fn stripes_are_read_from_whichever_replica_has_them() {
    check(
        Topology,
        &[
            PutStart(striped(0, 2)),
            Crash,
            WriteAll { put: 0 },
            Mount { node: 1, segments: 0 },
            Mount { node: 3, segments: 2 },
            Mount { node: 2, segments: 2 },
            Settle,
            Reconnect { node: 1, segments: 0 },
        ],
    );
}

/// Failure: a removed object came back. Cause: its tombstone was forgotten when the last absent node was given up, while
/// a node that was there had not confirmed the kill yet. Fix: it is kept as long as a kill is outstanding.
#[test]
fn a_tombstone_is_kept_until_the_kill_is_confirmed() {
    check(
        Random,
        &[
            PutStart(Put { len: 0, caller: 2, ..put(1) }),
            PutWhole(Put { len: 307200, caller: 2, ..put(1) }),
            PutWhole(Put { len: 307200, preferred: Some(0), replicas_min: 1, ..replicas(2, 2) }),
            Lose { node: 0 },
            PutWhole(Put { len: 0, local: Some(3), ..put(5) }),
            Tick { budget: 1 },
            Remove { key: 5, force: false },
            Advance { ms: 60000 },
            Tick { budget: 0 },
            Reconnect { node: 3, segments: 0 },
            Settle,
        ],
    );
}

/// Failure: a removed object came back with the second report. Cause and fix: as above, with a kill that was refused.
#[test]
fn a_tombstone_is_kept_when_the_kill_was_refused() {
    check(
        Random,
        &[
            Unmount { segment: 3 },
            PutWhole(Put { len: 0, ..put(5) }),
            Reconnect { node: 2, segments: 0 },
            Remove { key: 5, force: false },
            Report { segment: 4, count: 1 },
            Execute { node: 2, count: 1, refuse: true },
            Settle,
            Tick { budget: 0 },
            Reconnect { node: 2, segments: 0 },
            Report { segment: 4, count: 1 },
        ],
    );
}

/// Failure, found by reading: a removal was acknowledged as `NotFound` while a node was still writing the object to its
/// disk, so that a crash of the master right after it would have brought the object back. Cause: the offload took longer
/// than its time, the object was evicted, and a reclaim does not stop the write. Fix: what is given up on a node with a
/// disk is killed there before it is reclaimed.
#[test]
fn a_removal_waits_for_what_is_still_being_written_to_disk() {
    check(
        Random,
        &[
            PutWhole(Put { local: Some(3), ..put(2) }),
            Evict { target_permille: 0, objects: 1 },
            Execute { node: 3, count: 255, refuse: false },
            Advance { ms: 31_000 },
            Tick { budget: 255 },
            DiskStatus { node: 3, takes: false },
            Evict { target_permille: 0, objects: 1 },
            Execute { node: 3, count: 255, refuse: false },
            Answer { node: 3, count: 255 },
            Remove { key: 2, force: true },
        ],
    );
}
