//! Jobs: removals of many objects end when the objects cannot return.

mod common;

use common::{GroupHarness, config, reported};
use moontide_meta::{JobId, JobKind, JobState, PutOptions};
use moontide_types::{Epoch, ErrorCode, Generation, NodeId, SegmentId, SessionId, Term};

const KIB: u64 = 1024;

fn start(harness: &mut GroupHarness, prefix: &str) -> JobId {
    harness.group.start_job(harness.tenant, JobKind::Prefix(prefix.as_bytes().into()), false).unwrap()
}

/// Returns state, removed objects and code of a job.
fn status(harness: &GroupHarness, job: JobId) -> (JobState, u64, Option<ErrorCode>) {
    let status = harness.group.job(job).unwrap();
    (status.state, status.removed, status.code)
}

/// The node returns, in the term of its records, and reports one object in its first slot.
fn report(harness: &mut GroupHarness, node: u64, key: &'static str, epoch: Epoch, term: Term) {
    harness.mount(node, 0, epoch.term(), true);
    let (now, name) = (harness.now, (NodeId(node), SegmentId(0)));
    let record = reported(harness, key, epoch, 0);
    harness.group.report(now, name, Generation(1), term, 0, [record], &mut harness.effects).unwrap();
    harness.group.report_end(now, name, Generation(1), term, 1, &mut harness.effects).unwrap();
    harness.settle();
}

#[test]
fn removal_jobs_match_prefix_or_pattern_and_skip_later_puts() {
    let mut harness = GroupHarness::new(&[1]);
    for key in ["a/1", "a/2", "b/1", "b/22"] {
        harness.put(key, KIB);
    }
    let prefix = start(&mut harness, "a/");
    let pattern =
        harness.group.start_job(harness.tenant, JobKind::pattern("^b/[0-9]$").unwrap(), false).unwrap();
    harness.put("a/3", KIB);
    harness.tick();
    for (job, removed) in [(prefix, 2), (pattern, 1)] {
        assert_eq!(status(&harness, job), (JobState::Running, removed, None), "the node has not answered");
    }
    harness.run_commands();
    harness.tick();
    for (job, removed) in [(prefix, 2), (pattern, 1)] {
        assert_eq!(status(&harness, job), (JobState::Done, removed, None));
    }
    assert!(
        harness.exists("a/3") && harness.exists("b/22") && !harness.exists("a/1") && !harness.exists("b/1")
    );
}

#[test]
fn job_waits_for_versions_that_were_released_before_it() {
    let mut harness = GroupHarness::new(&[1]);
    harness.put("a/1", KIB);
    let evicted = harness.group.evict(harness.now, 0, 1, &mut harness.effects).objects;
    assert_eq!((evicted, harness.exists("a/1")), (1, false));
    let job = start(&mut harness, "a/");
    harness.tick();
    assert_eq!(status(&harness, job), (JobState::Running, 0, None), "the node may still have it");
    harness.run_commands();
    harness.tick();
    assert_eq!(status(&harness, job), (JobState::Done, 0, None));
}

#[test]
fn job_removes_objects_that_a_node_reports_later() {
    let mut harness = GroupHarness::with(config(2));
    let (old, term) = (Term::new(1).unwrap(), Term::new(2).unwrap());
    let job = start(&mut harness, "k");
    harness.tick();
    assert_eq!(status(&harness, job), (JobState::Running, 0, Some(ErrorCode::Pending)), "nodes may report");
    report(&mut harness, 1, "k", Epoch::new(old, 9).unwrap(), term);
    harness.advance(std::time::Duration::from_secs(120));
    for _ in 0..4 {
        harness.tick();
        harness.run_commands();
    }
    assert_eq!((status(&harness, job), harness.exists("k")), ((JobState::Done, 1, None), false));
}

#[test]
fn job_whose_node_is_lost_is_not_done_before_the_node_has_returned() {
    let mut harness = GroupHarness::new(&[1, 2]);
    let options = PutOptions { local_node: Some(NodeId(2)), ..PutOptions::default() };
    let epoch = harness.start_with("k", KIB, &options).unwrap();
    harness.end("k", epoch).unwrap();
    let job = start(&mut harness, "k");
    harness.tick();
    harness.group.node_lost(harness.now, NodeId(2), SessionId(200), &mut harness.effects);
    harness.commands.clear();
    harness.tick();
    harness.tick();
    assert_eq!(status(&harness, job), (JobState::Running, 1, Some(ErrorCode::Pending)));
    let term = Term::new(1).unwrap();
    report(&mut harness, 2, "k", epoch, term);
    assert!(!harness.exists("k"), "it was removed");
    for _ in 0..4 {
        harness.tick();
        harness.run_commands();
    }
    assert_eq!(status(&harness, job), (JobState::Done, 1, None));
}

/// A master that a change of the master has made: it has never seen the disk of a node that is down.
#[test]
fn object_on_disk_that_no_master_has_seen_does_not_return_after_a_job() {
    let mut harness = GroupHarness::with(config(2));
    harness.advance(std::time::Duration::from_secs(120));
    let job = start(&mut harness, "k");
    for _ in 0..4 {
        harness.tick();
    }
    assert_eq!(status(&harness, job), (JobState::Done, 0, None));
    harness.mount_disk(1, 0, true);
    let epoch = Epoch::new(Term::new(1).unwrap(), 9).unwrap();
    let record = harness.on_disk("k", epoch);
    harness.notice(1, common::session(1, 0), &record, true).unwrap();
    assert!(!harness.exists("k"), "it was removed");
}

/// The node opens another session between two ticks, so that no tick sees it away.
#[test]
fn job_scans_again_if_a_node_was_away_between_two_ticks() {
    let mut harness = GroupHarness::new(&[1]);
    let epoch = harness.put("k", KIB);
    let evicted = harness.group.evict(harness.now, 0, 1, &mut harness.effects).objects;
    assert_eq!((evicted, harness.exists("k")), (1, false));
    let job = start(&mut harness, "k");
    harness.tick();
    assert_eq!(status(&harness, job).0, JobState::Running, "the node has not confirmed the eviction");
    harness.group.node_lost(harness.now, NodeId(1), SessionId(100), &mut harness.effects);
    harness.commands.clear();
    report(&mut harness, 1, "k", epoch, Term::new(1).unwrap());
    assert!(harness.exists("k"), "it is reported again");
    for _ in 0..4 {
        harness.tick();
        harness.run_commands();
    }
    assert_eq!((status(&harness, job), harness.exists("k")), ((JobState::Done, 1, None), false));
}

#[test]
fn repeated_calls_join_the_running_job() {
    let mut harness = GroupHarness::new(&[1]);
    harness.put("a/1", KIB);
    let first = start(&mut harness, "a/");
    harness.tick();
    harness.put("a/2", KIB);
    for _ in 0..100 {
        assert_eq!(start(&mut harness, "a/"), first);
    }
    assert_ne!(start(&mut harness, "b/"), first);
    for _ in 0..3 {
        harness.tick();
        harness.run_commands();
    }
    assert_eq!(status(&harness, first), (JobState::Done, 2, None), "also what was put before the last call");
    assert_ne!(start(&mut harness, "a/"), first, "it is done");
}
