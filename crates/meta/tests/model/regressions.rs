//! Shrunk sequences that once failed in the model test.

use moontide_meta::PlacementKind::{self, FreeRatio, Random, Topology};
use moontide_meta::{DrainMode, OffloadTrigger};

use crate::command::{Command, Put};
use crate::{run, run_with};
use Command::*;

/// The simplest put: an empty object, one replica.
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
        spread: 0,
        disk_replicas: 0,
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
    if let Err(error) = run(placement, commands) {
        panic!("{error}");
    }
}

/// Failure: a put was acknowledged while the version that it replaced was still readable. Cause: the same caller
/// restarted it, and only the first reservation was marked as a replacement. Fix: the group keeps the mark by id.
#[test]
fn restarted_upsert_waits_for_the_old_version() {
    let by_caller_1 = Put { caller: 1, ..put(4) };
    check(
        Random,
        &[
            PutStart(put(0)),
            PutWhole(put(0)),
            PutWhole(put(4)),
            PutWhole(Put { upsert: true, ..by_caller_1.clone() }),
            PutWhole(by_caller_1),
        ],
    );
}

/// Failure: as above. Cause: the new version's node was lost and returned, and the record created from its report had
/// no mark. Fix: as above.
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

/// Failure: a tenant exceeded its quota. Cause: a put that replaces an object was not checked against the quota at all.
/// Fix: it is checked, minus the replaced object.
#[test]
fn upsert_counts_against_quota() {
    check(
        Random,
        &[
            PutWhole(put(5)),
            Quota { tenant: 1, units: 1, objects: 0 },
            PutWhole(Put { len: 473, ..upsert(5) }),
        ],
    );
}

/// Failure: a leased extent was reclaimed. Cause: its node reported the record as DEAD, and the group ignored the
/// lease. Fix: the lease delays the reclaim.
#[test]
fn record_killed_by_node_is_not_reclaimed_while_leased() {
    check(Random, &[PutWhole(put(2)), Lookup { key: 2, lease_ms: 1 }, Scrub { segment: 5, slot: 0 }, Settle]);
}

/// Failure: an object that a node reported again in the same term was never completed. Cause: only the term
/// distinguished reported records from puts in progress. Fix: a separate flag.
#[test]
fn object_reported_again_in_same_term_is_completed_by_reports() {
    check(
        FreeRatio,
        &[
            PutStart(put(0)),
            WriteAll { put: 0 },
            PutWhole(striped(2, 2)),
            PutStart(replicas(1, 3)),
            WriteSome { put: 0, published: 0 },
            Reconnect { node: 1, segments: 0 },
            Commit { put: 0, location: 0 },
            Commit { put: 0, location: 1 },
            Report { segment: 2, count: 3 },
        ],
    );
}

/// Failure: arithmetic overflow in the list of free slots, and before that a lookup returned a free slot. Cause: the
/// response to a reclaim overtook the report stream, which then reported the slot a second time. Fix: slots freed since
/// the start of the report are kept until its end.
#[test]
fn reclaim_result_before_report_does_not_free_slot_twice() {
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
/// have restored it. Cause: only the locations of the current version were killed. Fix: draining locations without a
/// confirmed kill are killed and waited for, too.
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

/// Failure: an upsert was acknowledged while a replica of the old version, which its writer had reported as failed, was
/// readable. Cause and fix: as above.
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

/// Failure: two replicas of an object shared a node. Cause: a returning stripe took the first vacant location instead
/// of its own. Fix: it takes its own, if that is known.
#[test]
fn reported_stripes_return_to_their_own_replica() {
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

/// Failure: an object was lost although one copy of each stripe existed. Cause: they belonged to different replicas.
/// Fix: they are combined.
#[test]
fn stripes_of_different_replicas_are_merged_into_one() {
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

/// Failure, found by review: a removal was acknowledged before its kill was executed. Cause: a late report stated that
/// an earlier owner had freed the slot. Fix: such a report does not apply to the current version.
#[test]
fn late_report_of_freed_slot_does_not_confirm_newer_kill() {
    let put_on_node_3 = |key| PutWhole(Put { local: Some(3), ..put(key) });
    check(
        Random,
        &[
            put_on_node_3(2),
            Remove { key: 2, force: true },
            Execute { node: 3, count: 255, refuse: false },
            Respond { node: 3, count: 255 },
            put_on_node_3(4),
            Remove { key: 4, force: true },
            Report { segment: 5, count: 255 },
        ],
    );
}

/// No failure so far, but too rare in random sequences: a key has two complete versions, because the first one was
/// evicted and its node had not received the command when the master crashed. The newer one wins, in either order.
#[test]
fn newest_complete_version_wins_after_a_crash() {
    for (older, newer) in [(0, 3), (3, 0)] {
        let put_on = |node| PutWhole(Put { local: Some(node), ..put(2) });
        let mut commands =
            vec![put_on(older), Evict { target_permille: 0, objects: 8 }, put_on(newer), Crash];
        commands.extend((0..4).map(|node| Mount { node, segments: 0 }));
        commands.push(Settle);
        check(Random, &commands);
    }
}

/// Failure: a put was acknowledged while the version that it replaced was still readable. Cause: a node that was absent
/// when the put began reported the old version, and its reclaim was only in progress. Fix: PutEnd waits as long as a
/// released version may be READY.
#[test]
fn put_end_waits_for_old_version_reported_by_returning_node() {
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

/// Failure: an object of which every stripe was readable was not found. Cause: the stripes belonged to two replicas,
/// and were combined only after the sweep. Fix: lookups combine readable stripes.
#[test]
fn lookup_uses_stripes_of_different_replicas() {
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

/// Failure: a removed object reappeared. Cause: its tombstone was dropped when the last absent node was given up, while
/// a present node had not confirmed the kill yet. Fix: the tombstone is kept as long as a kill is unconfirmed.
#[test]
fn tombstone_is_kept_until_kill_is_confirmed() {
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

/// Failure: a removed object reappeared with the second report. Cause and fix: as above, with a refused kill.
#[test]
fn tombstone_is_kept_after_refused_kill() {
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

/// Failure, found by review: a removal was acknowledged as `NotFound` while a node was still writing the object to its
/// disk, so that a crash of the master right after it would have restored the object. Cause: the offload timed out, the
/// object was evicted, and a reclaim does not stop the write. Fix: a version released on a node with a disk is killed
/// there before it is reclaimed.
#[test]
fn removal_waits_for_offload_in_progress() {
    check(
        Random,
        &[
            PutWhole(Put { local: Some(3), ..put(2) }),
            Evict { target_permille: 0, objects: 1 },
            Execute { node: 3, count: 255, refuse: false },
            Advance { ms: 31_000 },
            Tick { budget: 255 },
            DiskStatus { node: 3, accepts: false },
            Evict { target_permille: 0, objects: 1 },
            Execute { node: 3, count: 255, refuse: false },
            Respond { node: 3, count: 255 },
            Remove { key: 2, force: true },
        ],
    );
}

/// Failure: the model expected an object to survive that a drain evicted. Cause: after a restart of the node, it looked
/// at the phase of the lost segment, which has the same name. Fix: it looks at all segments of the name.
#[test]
fn drain_after_restart_may_evict() {
    let simple = |key| Put { len: 700, caller: 1, ..put(key) };
    check(
        Random,
        &[
            PutWhole(simple(1)),
            Restart { node: 0 },
            PutWhole(Put { local: Some(0), ..simple(0) }),
            Drain { segment: 0, mode: DrainMode::Evict },
            PutWhole(simple(0)),
            Tick { budget: 255 },
        ],
    );
}

/// Failure: a key was invalidated, but readable. Cause: the harness. While all messages are delivered, the scrubber's
/// report takes the last known replica, and the report of a node that has just reconnected brings another; the watcher
/// polled only after both. Fix: it polls between them.
#[test]
fn object_that_leaves_and_returns_between_two_reports_is_invalidated() {
    check(
        FreeRatio,
        &[
            PutWhole(Put { local: Some(0), ..put(0) }),
            PutWhole(Put { preferred: Some(1), ..replicas(1, 3) }),
            Reconnect { node: 1, segments: 0 },
            Scrub { segment: 1, slot: 6 },
            CrashNode { node: 3 },
            Settle,
        ],
    );
}

/// Failure: a replacement was acknowledged while the older version was being written to disk. Cause: its memory had been
/// unmounted meanwhile, so there was nothing to kill, and the group waited for no node. Fix: it is `Pending`.
#[test]
fn replacement_of_object_in_unmounted_segment_is_pending() {
    check(
        Topology,
        &[
            PutStart(replicas(0, 3)),
            PutWhole(Put { len: 300 << 10, ..put(3) }),
            Evict { target_permille: 0, objects: 1 },
            Execute { node: 2, count: 1, refuse: false },
            Unmount { segment: 3 },
            PutWhole(upsert(3)),
        ],
    );
}

/// A notice of a record on disk was rejected. Cause: the group remembered the length of a page as the stripe length of an
/// object that is shorter than a page, if its writer asked for two stripes. Fix: a single stripe is as long as the object.
#[test]
fn short_object_with_requested_stripes_can_be_offloaded() {
    let short = Put { len: 1, stripes: Some(2), ..replicas(0, 3) };
    run(Random, &[PutWhole(short), StopAndStart { node: 0 }]).unwrap();
}

/// Failure: an object with a missing stripe caused no invalidation, and was never dropped from the index. Cause: it was
/// demoted after its node was lost and before the sweep of the node's memory, which then did not find it. Fix: demotion
/// remembers it.
#[test]
fn object_demoted_before_sweep_of_its_lost_stripe_is_invalidated() {
    let striped = Put { upsert: true, caller: 1, ..striped(0, 1) };
    let commands = [
        Restart { node: 3 },
        Flush { node: 0 },
        PutWhole(Put { len: 700, caller: 1, ..put(1) }),
        PutWhole(Put { len: 700, caller: 1, ..put(1) }),
        StopAndStart { node: 0 },
        PutWhole(striped),
        Tick { budget: 255 },
        Restart { node: 0 },
        Settle,
        Demote { objects: 1 },
    ];
    run_with(FreeRatio, OffloadTrigger::Put, &commands).unwrap();
}

/// The model took the acknowledgement of a put for wrong: a report had completed the object, and its node was lost before
/// any lookup.
#[test]
fn put_that_was_completed_by_report_and_lost_is_acknowledged() {
    check(
        Random,
        &[
            PutStart(put(0)),
            Execute { node: 0, count: 1, refuse: false },
            PutStart(put(1)),
            Crash,
            WriteAll { put: 0 },
            Mount { node: 1, segments: 2 },
            StopAndStart { node: 1 },
            PutEnd { put: 0, failed: 0 },
        ],
    );
}

/// Failure: the group freed a record that was moved, and the model took that for a loss. Cause: the harness. The second
/// copy into a slot counted as killed, because the slot had been freed after the first one was refused. Fix: the grant of
/// a slot ends that.
#[test]
fn source_of_a_repeated_copy_is_freed() {
    check(
        FreeRatio,
        &[
            PutWhole(Put { len: 307_200, stripes: Some(2), upsert: true, caller: 1, ..replicas(0, 2) }),
            StopAndStart { node: 2 },
            Drain { segment: 1, mode: DrainMode::Move },
            Drain { segment: 2, mode: DrainMode::Keep },
            Tick { budget: 255 },
            Execute { node: 3, count: 1, refuse: true },
            StopAndStart { node: 0 },
        ],
    );
}

/// Failure: the source of a drain remained a location after the copy. Cause: its node connected again during the copy, so
/// that the segment had another index. Fix: the group remembers the source by name.
#[test]
fn source_that_was_mounted_again_during_the_copy_is_freed() {
    check(
        FreeRatio,
        &[
            PutWhole(replicas(1, 2)),
            Drain { segment: 0, mode: DrainMode::Move },
            Tick { budget: 2 },
            Reconnect { node: 0, segments: 2 },
            Report { segment: 0, count: 1 },
            StopAndStart { node: 0 },
        ],
    );
}

/// Failure: the slot of a copy was freed while the copy was made. Cause: a report about the version that the slot had held
/// before, which was newer than the copied one. Fix: reports do not free a slot that a command fills.
#[test]
fn late_report_does_not_free_the_slot_of_a_copy() {
    check(
        FreeRatio,
        &[
            PutWhole(Put { preferred: Some(1), ..replicas(1, 2) }),
            PutWhole(replicas(2, 3)),
            PutWhole(replicas(3, 3)),
            Drain { segment: 2, mode: DrainMode::Move },
            Drain { segment: 3, mode: DrainMode::Move },
            Job { tenant: 0, kind: 2, force: false },
            StopAndStart { node: 3 },
        ],
    );
}
