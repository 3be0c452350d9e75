//! `cargo xtask mutants`: bugs that somebody could make, each with the test that must find it.
//!
//! Owns the table [`BUGS`]. The bugs stand in the sources, behind `moontide_types::planted("name")`, and are switched on by
//! the environment in a build of their own (`--cfg planted`): one build for all of them. Without a bug every test of the
//! table must pass; with its bug each must fail within its time. A test that hangs until then has found nothing.
//!
//! Some crates plant bugs in tests of their own, which pass when the bug is found. Those that need no other build stand
//! in the table, too.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{self, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::command::{Command, CommandError};

/// A bug, and what is to find it.
struct Bug {
    name: &'static str,
    /// Where it is planted.
    place: &'static str,
    /// What would happen to a user.
    harm: &'static str,
    /// What finds it.
    test: Test,
    way: Way,
}

/// How a bug is switched on.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Way {
    /// By the environment: the test fails.
    Environment,
    /// By the test itself, which then passes.
    Itself,
}

/// A test.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Test {
    /// Its crate, without `moontide-`.
    package: &'static str,
    /// Its file in `tests/`; none: it is beside the sources.
    binary: Option<&'static str>,
    name: &'static str,
}

const fn test(package: &'static str, binary: &'static str, name: &'static str) -> Test {
    Test { package, binary: Some(binary), name }
}

const fn unit(package: &'static str, name: &'static str) -> Test {
    Test { package, binary: None, name }
}

/// How long a test may take, with a bug or without. Most need less than a second; the slowest wait for leases to end, on
/// machines that have other things to do.
const LIMIT: Duration = Duration::from_secs(45);

/// The name of the environment variable that plants a bug.
const VARIABLE: &str = "MOONTIDE_PLANTED";

#[rustfmt::skip] // a table
const BUGS: &[Bug] = &[
    Bug {
        name: "removal-certain-while-unsettled",
        place: "crates/meta/src/group/remove.rs",
        harm: "A removal is answered as done although a node that is away has the object, which is back with the node.",
        test: test("meta", "group", "a_node_that_cannot_be_reached_makes_a_removal_pending_and_its_report_is_refused"),
        way: Way::Environment,
    },
    Bug {
        name: "replaced-and-never-written",
        place: "crates/meta/src/group/departures.rs",
        harm: "An object whose replacement was never written is gone, and routers go on sending requests to it.",
        test: test("meta", "model", "group_is_as_the_model_says"),
        way: Way::Environment,
    },
    Bug {
        name: "removal-before-kill",
        place: "crates/meta/src/group/remove.rs",
        harm: "A removal is answered before the nodes have killed the object, and a reader who knows the place still gets it.",
        test: test("meta", "group", "a_removal_waits_for_the_kill"),
        way: Way::Environment,
    },
    Bug {
        name: "evicted-taken-for-dead",
        place: "crates/meta/src/group/remove.rs",
        harm: "A removal of what was evicted a moment ago is answered as done while a node still has it, and a new master finds it again.",
        test: test("meta", "terms", "a_removal_of_what_was_evicted_waits_for_the_node"),
        way: Way::Environment,
    },
    Bug {
        name: "refused-kill-believed",
        place: "crates/meta/src/group/remove.rs",
        harm: "A removal is answered as done although the node could not write it to its full disk, and a restart brings the object back.",
        test: test("meta", "group", "a_kill_that_the_node_refuses_leaves_the_removal_pending"),
        way: Way::Environment,
    },
    Bug {
        name: "range-free-when-accepted",
        place: "crates/meta/src/group/remove.rs",
        harm: "Memory is given to a new object while a reader still holds the old one in it, and the reader sees strange bytes.",
        test: test("meta", "group", "a_reservation_ends_by_time_and_its_range_comes_back_when_the_node_says_so"),
        way: Way::Environment,
    },
    Bug {
        name: "tombstone-forgotten",
        place: "crates/meta/src/group/tick.rs",
        harm: "An object that was removed is back when a node that had not confirmed the kill reports again.",
        test: test("meta", "terms", "what_a_node_would_not_kill_is_remembered_as_removed"),
        way: Way::Environment,
    },
    Bug {
        name: "reservation-for-ever",
        place: "crates/meta/src/group/tick.rs",
        harm: "The memory of a writer that crashed is never given back, and its key can never be put again.",
        test: test("meta", "group", "a_reservation_ends_by_time_and_its_range_comes_back_when_the_node_says_so"),
        way: Way::Environment,
    },
    Bug {
        name: "late-segment-believed",
        place: "crates/meta/src/group/nodes.rs",
        harm: "A node that was away for hours brings back what was removed meanwhile.",
        test: test("meta", "group", "what_comes_back_too_late_is_not_believed"),
        way: Way::Environment,
    },
    Bug {
        name: "missed-term-believed",
        place: "crates/meta/src/group/nodes.rs",
        harm: "A node that missed a whole term brings back what that term's master removed for certain.",
        test: test("meta", "terms", "who_missed_a_term_is_not_believed_if_that_one_may_have_removed_without_it"),
        way: Way::Environment,
    },
    Bug {
        name: "given-up-and-believed",
        place: "crates/meta/src/group/nodes.rs",
        harm: "What was removed for certain while a node was out of reach comes back when its master is replaced.",
        test: test("meta", "terms", "who_was_given_up_by_a_master_that_was_then_replaced_is_not_believed"),
        way: Way::Environment,
    },
    Bug {
        name: "lateness-not-inherited",
        place: "crates/meta/src/group/inherit.rs",
        harm: "A node that came too late is believed as soon as its group goes to another master.",
        test: test("meta", "terms", "who_came_late_is_late_for_the_heir_as_well"),
        way: Way::Environment,
    },
    Bug {
        name: "ghost-forgotten",
        place: "crates/meta/src/group/nodes.rs",
        harm: "Processes beside a node that was killed and started again read removed objects in the dead one's memory.",
        test: test("meta", "terms", "removals_wait_until_nobody_takes_a_dead_process_for_alive"),
        way: Way::Environment,
    },
    Bug {
        name: "mount-said-twice-taken-as-new",
        place: "crates/meta/src/group/nodes.rs",
        harm: "A repeated message makes a full segment count as empty: its objects are lost and their memory leaks.",
        test: test("meta", "terms", "a_mount_that_is_said_twice_changes_nothing"),
        way: Way::Environment,
    },
    Bug {
        name: "no-wait-for-old-leases",
        place: "crates/meta/src/group/nodes.rs",
        harm: "A new master gives out memory that a one-sided reader or writer of the time before still uses.",
        test: test("meta", "group", "a_node_that_cannot_be_reached_makes_a_removal_pending_and_its_report_is_refused"),
        way: Way::Environment,
    },
    Bug {
        name: "older-version-wins",
        place: "crates/meta/src/group/report.rs",
        harm: "After a restart of the master a get brings the version before the last acknowledged put.",
        test: test("meta", "terms", "of_two_versions_that_nodes_bring_the_newer_one_is_found_in_whatever_order_they_come"),
        way: Way::Environment,
    },
    Bug {
        name: "report-of-an-older-term-believed",
        place: "crates/meta/src/group/report.rs",
        harm: "A report that was meant for the master before is taken for the present, and the index names what is gone.",
        test: test("meta", "group", "an_older_term_is_refused_and_a_higher_one_ends_this_master"),
        way: Way::Environment,
    },
    Bug {
        name: "removed-reported-and-believed",
        place: "crates/meta/src/group/report.rs",
        harm: "A node that was away for a minute brings back what was removed meanwhile.",
        test: test("meta", "group", "a_node_that_cannot_be_reached_makes_a_removal_pending_and_its_report_is_refused"),
        way: Way::Environment,
    },
    Bug {
        name: "put-end-without-epoch",
        place: "crates/meta/src/group/put.rs",
        harm: "A writer that was too slow completes somebody else's put, whose bytes are not there yet.",
        test: test("meta", "group", "somebody_elses_put_is_in_progress_and_ones_own_is_started_again"),
        way: Way::Environment,
    },
    Bug {
        name: "upsert-before-kill",
        place: "crates/meta/src/group/put.rs",
        harm: "An upsert is acknowledged while the old version can be read, and a get after it brings the old bytes.",
        test: test("meta", "group", "an_upsert_is_acknowledged_only_after_the_old_version_was_killed"),
        way: Way::Environment,
    },
    Bug {
        name: "lease-evicted",
        place: "crates/meta/src/group/evict.rs",
        harm: "What a reader has leased is evicted and overwritten while it is being read.",
        test: test("meta", "group", "leased_and_pinned_objects_stay_unless_forced"),
        way: Way::Environment,
    },
    Bug {
        name: "higher-term-ignored",
        place: "crates/meta/src/group.rs",
        harm: "A master that was replaced goes on acknowledging puts which nobody will find.",
        test: test("meta", "group", "an_older_term_is_refused_and_a_higher_one_ends_this_master"),
        way: Way::Environment,
    },
    Bug {
        name: "heirloom-although-removed",
        place: "crates/meta/src/group/inherit.rs",
        harm: "Right after a group moved to another master, a removed object is still found there.",
        test: test("meta", "terms", "what_was_inherited_is_found_until_it_is_removed"),
        way: Way::Environment,
    },
    Bug {
        name: "tombstones-not-inherited",
        place: "crates/meta/src/group/inherit.rs",
        harm: "An object that was removed before its group moved to another master comes back with a node that was away.",
        test: test("meta", "terms", "what_was_removed_before_the_group_went_does_not_come_back_to_the_heir"),
        way: Way::Environment,
    },
    Bug {
        name: "tail-written-while-shared",
        place: "crates/blocks/src/cache.rs",
        harm: "Of two forks, one writes its next token over the other's.",
        test: test("blocks", "model", "any_history_is_what_plain_lists_say"),
        way: Way::Environment,
    },
    Bug {
        name: "taken-back-rows-written",
        place: "crates/blocks/src/cache.rs",
        harm: "A reader's rows change under its eyes when a draft's tokens are taken back and others added.",
        test: test("blocks", "cache", "tokens_that_are_taken_back_stay_with_whoever_saw_them"),
        way: Way::Environment,
    },
    Bug {
        name: "named-before-complete",
        place: "crates/blocks/src/cache.rs",
        harm: "A request shares a block whose rows nobody has computed yet.",
        test: test("blocks", "model", "any_history_is_what_plain_lists_say"),
        way: Way::Environment,
    },
    Bug {
        name: "reused-while-read",
        place: "crates/blocks/src/cache.rs",
        harm: "A reader sees another sequence's rows, since a block was given out again too early.",
        test: test("blocks", "model", "any_history_is_what_plain_lists_say"),
        way: Way::Environment,
    },
    Bug {
        name: "holes-not-in-names",
        place: "crates/blocks/src/sequence.rs",
        harm: "A sequence finds rows in the store that were computed in the presence of other tokens.",
        test: test("blocks", "model", "any_history_is_what_plain_lists_say"),
        way: Way::Environment,
    },
    Bug {
        name: "salt-forgotten",
        place: "crates/blocks/src/hash.rs",
        harm: "One tenant's blocks are found by another.",
        test: test("blocks", "cache", "a_prefix_is_found_again_but_not_across_salts_and_not_whole"),
        way: Way::Environment,
    },
    Bug {
        name: "order-in-the-masters-term",
        place: "crates/master/src/service/outbox.rs",
        harm: "With several masters nodes refuse every order: nothing is ever removed or evicted, and memory fills up.",
        test: test("client", "masters", "keys_are_found_whoever_hosts_them"),
        way: Way::Environment,
    },
    Bug {
        name: "orders-not-repeated",
        place: "crates/master/src/service/outbox.rs",
        harm: "A removal during a short break of the network is never carried out, and its memory never comes back.",
        test: unit("master", "service::outbox::tests::what_has_no_answer_is_sent_again_on_a_new_stream"),
        way: Way::Environment,
    },
    Bug {
        name: "unconfirmed-removal-certain",
        place: "crates/master/src/service/remove.rs",
        harm: "A master that was replaced without knowing answers removals as done while the new one has the object.",
        test: test("client", "masters", "without_a_registry_serving_goes_on_and_removals_are_not_certain"),
        way: Way::Environment,
    },
    Bug {
        name: "lost-group-answered",
        place: "crates/master/src/service/hosting.rs",
        harm: "A master that lost a group goes on answering for it, from an index that nobody keeps up to date.",
        test: test("master", "hosting", "a_group_is_answered_for_while_it_is_hosted_and_not_frozen"),
        way: Way::Environment,
    },
    Bug {
        name: "frozen-group-answered",
        place: "crates/master/src/service/hosting.rs",
        harm: "What is put or removed while a group is on its way to another master is not known there.",
        test: test("master", "hosting", "a_group_is_answered_for_while_it_is_hosted_and_not_frozen"),
        way: Way::Environment,
    },
    Bug {
        name: "lease-from-the-answer",
        place: "crates/master/src/election/campaign.rs",
        harm: "A master believes in its lease after it has ended, and removes for certain what another one is serving.",
        test: test("master", "hosting", "a_lease_counts_from_when_its_renewal_was_sent"),
        way: Way::Environment,
    },
    Bug {
        name: "expelled-and-hosting",
        place: "crates/master/src/election/campaign.rs",
        harm: "A master whose lease ended goes on answering for groups that another one has, with an index of its own.",
        test: test("master", "hosting", "who_is_no_member_any_more_lets_go_of_everything"),
        way: Way::Environment,
    },
    Bug {
        name: "group-of-the-living-taken",
        place: "crates/master/src/election/candidate.rs",
        harm: "Masters take groups from each other without end, and no put in them ever succeeds.",
        test: unit("master", "election::candidate::tests::the_first_takes_all_and_later_ones_are_given_their_share_when_things_are_quiet"),
        way: Way::Environment,
    },
    Bug {
        name: "replaced-and-hosting",
        place: "crates/master/src/election/candidate.rs",
        harm: "A master goes on serving a group after the registry gave it to somebody else.",
        test: unit("master", "election::candidate::tests::who_was_replaced_lets_go_and_who_cannot_renew_is_not_sure"),
        way: Way::Environment,
    },
    Bug {
        name: "term-used-again",
        place: "crates/master/src/election/document.rs",
        harm: "Two masters have a group in the same term, and no node can tell whose orders and grants are void.",
        test: unit("master", "election::candidate::tests::what_a_dead_one_had_is_shared_by_the_rest_at_once_and_in_higher_terms"),
        way: Way::Environment,
    },
    Bug {
        name: "begin-of-an-older-term",
        place: "crates/heap/src/shm/owner.rs",
        harm: "A writer with a grant of a replaced master writes into memory that the new one gives to somebody else.",
        test: test("heap", "heap", "begin_refuses_whatever_does_not_fit_the_books"),
        way: Way::Environment,
    },
    Bug {
        name: "term-not-adopted",
        place: "crates/node/src/memory.rs",
        harm: "After a restart of the master its nodes go on obeying the one before, and refuse every put of the new one.",
        test: test("node", "away", "a_master_that_was_restarted_is_told_everything"),
        way: Way::Environment,
    },
    Bug {
        name: "stale-index-open",
        place: "crates/node/src/decide/pace.rs",
        harm: "Processes beside a node that is cut off from its master read removed objects for ever.",
        test: unit("node", "decide::pace::tests::the_index_is_open_while_the_master_knows_of_it"),
        way: Way::Environment,
    },
    Bug {
        name: "stale-reads-served",
        place: "crates/node/src/keeper.rs",
        harm: "A node that is cut off from its master serves removed objects to peers who remember the place.",
        test: test("node", "away", "without_a_master_it_serves_and_closes_the_index_after_a_while"),
        way: Way::Environment,
    },
    Bug {
        name: "old-answer-taken-for-new",
        place: "crates/node/src/session.rs",
        harm: "Processes beside a node that had stood still for minutes read objects that were removed meanwhile.",
        test: test("node", "frozen", "an_old_answer_that_is_read_late_does_not_open_the_index"),
        way: Way::Environment,
    },
    Bug {
        name: "late-begin-left",
        place: "crates/node/src/decide/orders.rs",
        harm: "Memory of a write that began after its reservation was given up is never free again.",
        test: unit("node", "decide::orders::tests::every_word_leads_to_its_answer"),
        way: Way::Environment,
    },
    Bug {
        name: "order-done-twice",
        place: "crates/node/src/orders.rs",
        harm: "An order that is sent again on a new stream is carried out again, and its slot may be somebody else's by then.",
        test: unit("node", "orders::tests::random_orders_keep_heap_books_and_model_together"),
        way: Way::Environment,
    },
    Bug {
        name: "order-of-any-term-obeyed",
        place: "crates/node/src/decide/orders.rs",
        harm: "A master that was replaced has objects killed which the new one has acknowledged.",
        test: unit("node", "decide::orders::tests::orders_for_others_are_refused_with_the_reason"),
        way: Way::Environment,
    },
    Bug {
        name: "reclaim-done-while-held",
        place: "crates/node/src/decide/orders.rs",
        harm: "A node says that memory is free while a process of its host still reads there.",
        test: unit("node", "orders::tests::random_orders_keep_heap_books_and_model_together"),
        way: Way::Environment,
    },
    Bug {
        name: "digest-unchecked",
        place: "crates/client/src/read.rs",
        harm: "Bytes that were damaged in memory or on the way are returned as if they were right.",
        test: test("client", "damage", "bytes_that_do_not_match_their_digest_are_not_returned"),
        way: Way::Environment,
    },
    Bug {
        name: "stale-place-kept",
        place: "crates/client/src/decide/retry.rs",
        harm: "A get of an object that has moved or was removed fails instead of asking the master where it is.",
        test: unit("client", "decide::retry::tests::every_code_has_a_verdict_and_corruption_goes_elsewhere"),
        way: Way::Environment,
    },
    Bug {
        name: "wrong-master-a-miss",
        place: "crates/client/src/cluster.rs",
        harm: "While groups move between masters, objects that are there seem to be missing, and are computed again.",
        test: test("client", "masters", "a_master_that_leaves_or_comes_takes_no_key_along"),
        way: Way::Environment,
    },
    Bug {
        name: "disk: RenameBeforeSync",
        place: "crates/disk/src/planted.rs",
        harm: "A crash leaves a file under its name whose bytes were never written.",
        test: test("disk", "crash", "planted::a_bucket_named_before_it_is_durable_is_found"),
        way: Way::Itself,
    },
    Bug {
        name: "disk: NameUnsynced",
        place: "crates/disk/src/planted.rs",
        harm: "What was written to disk and acknowledged is lost by a crash.",
        test: test("disk", "crash", "planted::a_name_that_is_not_durable_is_found"),
        way: Way::Itself,
    },
    Bug {
        name: "disk: EntriesUnsynced",
        place: "crates/disk/src/planted.rs",
        harm: "What was written to the one large file and acknowledged is lost by a crash.",
        test: test("disk", "crash", "planted::an_entry_that_is_not_durable_is_found"),
        way: Way::Itself,
    },
    Bug {
        name: "disk: TombstoneUnsynced",
        place: "crates/disk/src/planted.rs",
        harm: "What was removed from a disk is back after a crash.",
        test: test("disk", "crash", "planted::a_removal_that_is_not_durable_is_found"),
        way: Way::Itself,
    },
    Bug {
        name: "disk: FooterBelieved",
        place: "crates/disk/src/planted.rs",
        harm: "A damaged sector makes records of a disk appear that were never written.",
        test: test("disk", "crash", "planted::a_footer_that_is_believed_is_found"),
        way: Way::Itself,
    },
    Bug {
        name: "disk: PagesBelieved",
        place: "crates/disk/src/planted.rs",
        harm: "Damaged sectors are served as if they were right.",
        test: test("disk", "crash", "planted::pages_that_are_believed_are_found"),
        way: Way::Itself,
    },
    Bug {
        name: "node: KilledUntold",
        place: "crates/node/src/disk/planted.rs",
        harm: "What was removed while it was being written to disk is read from there afterwards.",
        test: unit("node", "disk::tests::planted::a_kill_of_which_the_disk_does_not_hear_is_noticed"),
        way: Way::Itself,
    },
    Bug {
        name: "node: EvictedLater",
        place: "crates/node/src/disk/planted.rs",
        harm: "An object that was evicted from the disk and then removed is back after a crash.",
        test: unit("node", "disk::tests::planted::eviction_that_is_told_before_it_is_finished_is_noticed"),
        way: Way::Itself,
    },
    Bug {
        name: "node: PromotedUnasked",
        place: "crates/node/src/disk/planted.rs",
        harm: "An object that was brought back from disk for a session that is over appears in memory that was given to somebody else.",
        test: unit("node", "disk::tests::planted::promotion_that_nobody_wants_any_more_is_noticed"),
        way: Way::Itself,
    },
    Bug {
        name: "node: ToldUnseen",
        place: "crates/node/src/disk/planted.rs",
        harm: "The master learns of records that have left the disk since it was scanned.",
        test: unit("node", "disk::tests::planted::telling_what_is_gone_is_noticed"),
        way: Way::Itself,
    },
    Bug {
        name: "node: BegunUnasked",
        place: "crates/node/src/disk/planted.rs",
        harm: "A promotion that was cancelled takes a slot that was given to somebody else.",
        test: unit("node", "disk::tests::planted::promotion_that_begins_after_it_was_cancelled_is_noticed"),
        way: Way::Itself,
    },
    Bug {
        name: "node: ToldToEnded",
        place: "crates/node/src/disk/planted.rs",
        harm: "What was written to disk is told to nobody, and is never read from there.",
        test: unit("node", "disk::tests::planted::telling_a_session_that_is_over_is_noticed"),
        way: Way::Itself,
    },
    Bug {
        name: "node: GoneUnseen",
        place: "crates/node/src/disk/planted.rs",
        harm: "The master forgets a record that has just come to the disk, and its space is never used again.",
        test: unit("node", "disk::tests::planted::telling_as_gone_what_has_come_is_noticed"),
        way: Way::Itself,
    },
];

/// What is wanted.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Options {
    /// Print the table and run nothing.
    pub(crate) list: bool,
    /// One bug, by its name.
    pub(crate) only: Option<String>,
}

/// Why not all is well.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MutantsError {
    #[error("no bug is called `{0}`; see `cargo xtask mutants --list`")]
    Unknown(String),
    #[error(transparent)]
    Build(#[from] CommandError),
    #[error("cargo built no test `{0}`")]
    NotBuilt(String),
    #[error("cannot run {what}: {source}")]
    NotRun { what: String, source: std::io::Error },
    #[error("{log} does not say that one test was run: is there a test `{test}`?")]
    NoSuchTest { test: String, log: String },
    #[error("{count} of the tests fail without any bug; see {logs}")]
    Unhealthy { count: usize, logs: String },
    #[error("{count} of the bugs survived; see {logs}")]
    Survived { count: usize, logs: String },
}

/// What became of a test.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Outcome {
    Passed,
    Failed,
    /// It did not end in time.
    Hung,
}

/// Prints the table, or runs it.
pub(crate) fn run(root: &Path, target_dir: &str, options: &Options) -> Result<(), MutantsError> {
    let wanted = |bug: &&Bug| options.only.as_ref().is_none_or(|only| bug.name == only);
    let bugs: Vec<&Bug> = BUGS.iter().filter(wanted).collect();
    match &options.only {
        Some(name) if bugs.is_empty() => return Err(MutantsError::Unknown(name.clone())),
        _ => {}
    }
    if options.list {
        for bug in bugs {
            println!("{}\n    in {}, found by {}\n    {}", bug.name, bug.place, bug.test, bug.harm);
        }
        return Ok(());
    }
    // All of them, also for one: with other crates chosen, cargo would build their dependencies anew.
    let bench = Bench::build(root, target_dir, &BUGS.iter().collect::<Vec<_>>())?;
    println!("without any bug:");
    let mut tests: Vec<Test> = bugs.iter().map(|bug| bug.test).collect();
    tests.sort_unstable();
    tests.dedup();
    let mut unhealthy = 0;
    for test in tests {
        let (outcome, seconds) = bench.run(test, None)?;
        unhealthy += usize::from(outcome != Outcome::Passed);
        println!("  {:<6} {seconds:>5.1} s  {test}", if outcome == Outcome::Passed { "ok" } else { "FAIL" });
    }
    if unhealthy > 0 {
        return Err(MutantsError::Unhealthy { count: unhealthy, logs: bench.logs.display().to_string() });
    }
    println!("\n{:<34} {:<40} {:>7}  caught by", "bug", "planted in", "seconds");
    let mut survived = 0;
    for bug in &bugs {
        let (outcome, seconds) = bench.run(bug.test, Some(bug))?;
        let found = bug.is_found(outcome);
        survived += usize::from(!found);
        let by = match outcome {
            _ if found => bug.test.to_string(),
            Outcome::Hung => format!("NOBODY: {} did not end", bug.test),
            Outcome::Passed | Outcome::Failed => format!("NOBODY: not by {}", bug.test),
        };
        println!("{:<34} {:<40} {seconds:>7.1}  {by}", bug.name, bug.place);
    }
    println!("\n{} bugs, {} caught, {survived} survived", bugs.len(), bugs.len() - survived);
    match survived {
        0 => Ok(()),
        count => Err(MutantsError::Survived { count, logs: bench.logs.display().to_string() }),
    }
}

impl Bug {
    fn is_found(&self, outcome: Outcome) -> bool {
        outcome == if self.way == Way::Environment { Outcome::Failed } else { Outcome::Passed }
    }
}

impl std::fmt::Display for Test {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Test { package, binary, name } = self;
        write!(f, "{package}/{} {name}", binary.unwrap_or("lib"))
    }
}

/// The tests, built.
struct Bench {
    root: PathBuf,
    logs: PathBuf,
    /// By crate and file.
    programs: BTreeMap<(String, Option<String>), PathBuf>,
}

impl Bench {
    /// Builds what the bugs need, once.
    fn build(root: &Path, target_dir: &str, bugs: &[&Bug]) -> Result<Bench, MutantsError> {
        let target_dir = format!("{target_dir}/planted");
        let build = |more: &str| {
            Command::cargo(&format!("test --no-run --locked {}{more}", targets(bugs)))
                .env("RUSTFLAGS", "--cfg planted")
                .env("CARGO_TARGET_DIR", &target_dir)
        };
        println!("$ {}", build(""));
        build("").run(root)?;
        // Everything is built: this only tells where.
        let told = build(" --message-format=json").output(root)?;
        let logs = root.join(&target_dir).join("logs");
        let made = std::fs::create_dir_all(&logs);
        made.map_err(|source| MutantsError::NotRun { what: logs.display().to_string(), source })?;
        Ok(Bench { root: root.to_owned(), logs, programs: programs(&told) })
    }

    /// Runs a test, with a bug or without one.
    fn run(&self, test: Test, bug: Option<&Bug>) -> Result<(Outcome, f64), MutantsError> {
        let key = (format!("moontide-{}", test.package), test.binary.map(str::to_owned));
        let program = self.programs.get(&key).ok_or_else(|| MutantsError::NotBuilt(test.to_string()))?;
        let name = bug.map_or_else(|| format!("healthy {test}"), |bug| bug.name.to_owned());
        let log = self.logs.join(format!("{}.log", name.replace([' ', ':', '/'], "-")));
        let not_run = |source| MutantsError::NotRun { what: test.to_string(), source };
        let output = File::create(&log).map_err(not_run)?;
        let mut child = process::Command::new(program);
        child.args([test.name, "--exact", "--nocapture"]).env_remove(VARIABLE);
        if let Some(bug) = bug.filter(|bug| bug.way == Way::Environment) {
            child.env(VARIABLE, bug.name);
        }
        child.current_dir(self.root.join("crates").join(test.package));
        child.stdin(Stdio::null()).stdout(output.try_clone().map_err(not_run)?).stderr(output);
        let began = Instant::now();
        let outcome = wait(child.spawn().map_err(not_run)?, LIMIT).map_err(not_run)?;
        let told = std::fs::read(&log).map_err(not_run)?;
        if !String::from_utf8_lossy(&told).contains("running 1 test") {
            let (test, log) = (test.to_string(), log.display().to_string());
            return Err(MutantsError::NoSuchTest { test, log });
        }
        Ok((outcome, began.elapsed().as_secs_f64()))
    }
}

/// Waits for a child, for so long at most.
fn wait(mut child: process::Child, limit: Duration) -> std::io::Result<Outcome> {
    let end = Instant::now() + limit;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(if status.success() { Outcome::Passed } else { Outcome::Failed });
        }
        if Instant::now() >= end {
            child.kill()?;
            child.wait()?;
            return Ok(Outcome::Hung);
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// What cargo is to build for these bugs.
fn targets(bugs: &[&Bug]) -> String {
    let mut words: Vec<String> = vec![];
    for Bug { test, .. } in bugs {
        words.push(format!("-p moontide-{}", test.package));
        words.push(test.binary.map_or_else(|| "--lib".to_owned(), |binary| format!("--test {binary}")));
    }
    words.sort_unstable();
    words.dedup();
    words.join(" ")
}

/// The programs in an answer of cargo, one JSON object a line.
fn programs(told: &str) -> BTreeMap<(String, Option<String>), PathBuf> {
    let messages = told.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    messages
        .filter_map(|message| {
            let (program, target) = (message["executable"].as_str()?, &message["target"]);
            // Our crates are called like their folders.
            let crate_folder =
                Path::new(message["manifest_path"].as_str()?).parent()?.file_name()?.to_str()?;
            let is_test = target["kind"].as_array()?.iter().any(|kind| kind == "test");
            let file = if is_test { Some(target["name"].as_str()?.to_owned()) } else { None };
            message["profile"]["test"]
                .as_bool()?
                .then(|| ((format!("moontide-{crate_folder}"), file), PathBuf::from(program)))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All sources below a folder.
    fn sources(folder: &Path, all: &mut Vec<String>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                sources(&path, all);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                all.push(std::fs::read_to_string(&path).unwrap());
            }
        }
    }

    #[test]
    fn the_table_and_the_sources_name_the_same_bugs() {
        let root = crate::workspace_root();
        let by_switch = BUGS.iter().filter(|bug| bug.way == Way::Environment);
        for bug in by_switch.clone() {
            let source = std::fs::read_to_string(root.join(bug.place)).unwrap();
            assert!(source.contains(&format!("planted(\"{}\")", bug.name)), "{} in {}", bug.name, bug.place);
        }
        let mut all = vec![];
        sources(&root.join("crates"), &mut all);
        let mut planted: Vec<&str> = all
            .iter()
            .flat_map(|source| source.split("moontide_types::planted(\"").skip(1))
            .map(|rest| rest.split('"').next().unwrap())
            .collect();
        planted.sort_unstable();
        planted.dedup();
        let mut listed: Vec<&str> = by_switch.map(|bug| bug.name).collect();
        listed.sort_unstable();
        assert_eq!(planted, listed);
    }

    #[test]
    fn every_bug_has_a_name_of_its_own_and_a_test_that_is_there() {
        let mut names: Vec<&str> = BUGS.iter().map(|bug| bug.name).collect();
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
        for Bug { test, harm, .. } in BUGS {
            let mut all = vec![];
            sources(&crate::workspace_root().join("crates").join(test.package), &mut all);
            let function = format!("fn {}(", test.name.rsplit("::").next().unwrap());
            assert!(all.iter().any(|source| source.contains(&function)), "no {function} in {}", test.package);
            assert!(harm.ends_with('.'), "{harm}");
        }
    }

    #[test]
    fn programs_are_found_in_what_cargo_says() {
        let told = r#"
{"reason":"compiler-artifact","manifest_path":"/x/crates/meta/Cargo.toml","target":{"kind":["lib"],"name":"moontide_meta"},"profile":{"test":false},"executable":null}
{"reason":"compiler-artifact","manifest_path":"/x/crates/meta/Cargo.toml","target":{"kind":["lib"],"name":"moontide_meta"},"profile":{"test":true},"executable":"/t/meta-1"}
{"reason":"compiler-artifact","manifest_path":"/x/crates/meta/Cargo.toml","target":{"kind":["test"],"name":"group"},"profile":{"test":true},"executable":"/t/group-2"}
{"reason":"build-finished","success":true}
"#;
        let key = |binary: Option<&str>| ("moontide-meta".to_owned(), binary.map(str::to_owned));
        let found = programs(told);
        assert_eq!(found.get(&key(None)), Some(&PathBuf::from("/t/meta-1")));
        assert_eq!(found.get(&key(Some("group"))), Some(&PathBuf::from("/t/group-2")));
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn a_test_that_hangs_has_found_nothing() {
        let sleeps = process::Command::new("sleep").arg("60").spawn().unwrap();
        assert_eq!(wait(sleeps, Duration::from_millis(50)).unwrap(), Outcome::Hung);
        let fails = process::Command::new("false").spawn().unwrap();
        assert_eq!(wait(fails, Duration::from_secs(10)).unwrap(), Outcome::Failed);
        assert!(BUGS.iter().all(|bug| !bug.is_found(Outcome::Hung)));
    }
}
