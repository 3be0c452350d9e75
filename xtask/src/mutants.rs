//! `cargo xtask mutants`: deliberate mutants, each with the test that must detect it.
//!
//! Owns the table [`MUTANTS`]. The mutations are in the sources, behind `moontide_rt::mutation_enabled("name")`. An
//! environment variable enables them in a separate build (`--cfg mutation`), one build for all. Without a mutation every
//! test of the table must pass; with its mutation each must fail within its time limit. A test that hangs until the limit
//! has detected nothing.
//!
//! Some crates plant mutants in tests of their own, which pass when the mutant is found. Those that need no other build stand
//! in the table, too.

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{self, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::command::{Command, CommandError};

/// A mutation and the test that must detect it.
struct Mutant {
    name: &'static str,
    /// Source file of the mutation.
    location: &'static str,
    /// What would happen to a user.
    impact: &'static str,
    /// What finds it.
    test: Test,
    activation: Activation,
}

/// How a mutation is enabled.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Activation {
    /// By the environment: the test fails.
    Environment,
    /// By the test itself, which then passes.
    InTest,
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

/// How long a test may take, with a mutant or without. Most need less than a second; the slowest wait for leases to end, on
/// machines that have other things to do.
const LIMIT: Duration = Duration::from_secs(45);

/// Environment variable that enables a mutation.
const MUTATION_ENV: &str = "MOONTIDE_MUTATION";

#[rustfmt::skip] // a table
const MUTANTS: &[Mutant] = &[
    Mutant {
        name: "removal-certain-while-unsettled",
        location: "crates/meta/src/group/remove.rs",
        impact: "A removal is answered as done although a node that is away has the object, which is back with the node.",
        test: test("meta", "group", "removal_with_lost_node_is_pending_and_later_report_is_dropped"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "upsert-certain-while-unsettled",
        location: "crates/meta/src/group/put.rs",
        impact: "A replacement is answered as done although a node that is away has the old version, which is back with the node if the new one is lost.",
        test: test("meta", "group", "upsert_with_lost_node_is_pending_and_older_version_is_dropped"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "replaced-and-never-written",
        location: "crates/meta/src/group/invalidations.rs",
        impact: "An object whose replacement was never written is gone, and routers go on sending requests to it.",
        test: test("meta", "model", "group_matches_model"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "removal-before-kill",
        location: "crates/meta/src/group/remove.rs",
        impact: "A removal is answered before the nodes have killed the object, and a reader who knows the place still gets it.",
        test: test("meta", "group", "removal_waits_for_kill"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "evicted-taken-for-dead",
        location: "crates/meta/src/group/remove.rs",
        impact: "A removal of what was evicted a moment ago is answered as done while a node still has it, and a new master finds it again.",
        test: test("meta", "terms", "removal_of_evicted_object_waits_for_node"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "reclaim-answers-kill",
        location: "crates/meta/src/group/remove.rs",
        impact: "A removal is answered as done while the node has not written it to its disk, and a crash of the node brings the object back.",
        test: test("meta", "disk", "answer_to_reclaim_does_not_end_removal"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "beat-before-close",
        location: "crates/node/src/index_gate.rs",
        impact: "A process that was stopped and goes on serves removed objects in place for a moment.",
        test: unit("node", "index_gate::tests::stale_index_is_closed_before_next_heartbeat"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "tenant-leak",
        location: "crates/meta/src/tenant.rs",
        impact: "After 4,096 tenant names, used once and empty since, no new tenant can store anything.",
        test: test("meta", "group", "tenants_without_objects_are_forgotten_and_too_many_are_refused"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "silent-master",
        location: "crates/client/src/cluster.rs",
        impact: "Two masters that do not respond make a whole batch fail, also the keys of the healthy master.",
        test: test("client", "masters", "silent_masters_delay_only_their_own_keys"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "stale-range",
        location: "crates/client/src/range.rs",
        impact: "A range of an object that has moved to another node cannot be read, however often it is asked for.",
        test: test("client", "store", "range_of_moved_object_is_looked_up_again"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "refused-kill-believed",
        location: "crates/meta/src/group/remove.rs",
        impact: "A removal is answered as done although the node could not write it to its full disk, and a restart brings the object back.",
        test: test("meta", "group", "kill_refusal_leaves_removal_pending_unless_epoch_is_stale"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "range-free-when-accepted",
        location: "crates/meta/src/group/remove.rs",
        impact: "Memory is given to a new object while a reader still holds the old one in it, and the reader sees strange bytes.",
        test: test("meta", "group", "expired_reservation_is_freed_after_reclaim_is_done"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "tombstone-forgotten",
        location: "crates/meta/src/group/tick.rs",
        impact: "An object that was removed is back when a node that had not confirmed the kill reports again.",
        test: test("meta", "terms", "object_with_refused_kill_is_not_restored_by_later_report"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "reservation-for-ever",
        location: "crates/meta/src/group/tick.rs",
        impact: "The memory of a writer that crashed is never given back, and its key can never be put again.",
        test: test("meta", "group", "expired_reservation_is_freed_after_reclaim_is_done"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "late-segment-believed",
        location: "crates/meta/src/group/nodes.rs",
        impact: "A node that was away for hours brings back what was removed meanwhile.",
        test: test("meta", "group", "report_after_rejoin_window_is_not_trusted"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "missed-term-believed",
        location: "crates/meta/src/group/nodes.rs",
        impact: "A node that missed a whole term brings back what that term's master removed for certain.",
        test: test("meta", "terms", "long_absent_segment_that_missed_a_term_is_not_trusted"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "given-up-and-believed",
        location: "crates/meta/src/group/nodes.rs",
        impact: "What was removed for certain while a node was out of reach comes back when its master is replaced.",
        test: test("meta", "terms", "segment_absent_beyond_window_is_not_trusted_by_next_master"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "lateness-not-inherited",
        location: "crates/meta/src/group/handoff.rs",
        impact: "A node that came too late is believed as soon as its group goes to another master.",
        test: test("meta", "terms", "stale_segment_is_stale_for_next_owner_after_handoff"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "ghost-forgotten",
        location: "crates/meta/src/group/nodes.rs",
        impact: "Processes beside a node that was killed and started again read removed objects in the dead one's memory.",
        test: test("meta", "terms", "removal_is_pending_until_clients_detect_node_restart"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "mount-said-twice-taken-as-new",
        location: "crates/meta/src/group/nodes.rs",
        impact: "A repeated message makes a full segment count as empty: its objects are lost and their memory leaks.",
        test: test("meta", "terms", "repeated_mount_is_idempotent"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "no-wait-for-old-leases",
        location: "crates/meta/src/group/nodes.rs",
        impact: "A new master gives out memory that a one-sided reader or writer of the time before still uses.",
        test: test("meta", "group", "removal_with_lost_node_is_pending_and_later_report_is_dropped"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "older-version-wins",
        location: "crates/meta/src/group/report.rs",
        impact: "After a restart of the master a get brings the version before the last acknowledged put.",
        test: test("meta", "terms", "newest_reported_version_wins_regardless_of_arrival"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "report-of-an-older-term-believed",
        location: "crates/meta/src/group/report.rs",
        impact: "A report that was meant for the master before is taken for the present, and the index names what is gone.",
        test: test("meta", "group", "report_of_older_term_is_rejected_and_higher_term_steps_down"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "removed-reported-and-believed",
        location: "crates/meta/src/group/report.rs",
        impact: "A node that was away for a minute brings back what was removed meanwhile.",
        test: test("meta", "group", "removal_with_lost_node_is_pending_and_later_report_is_dropped"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "put-end-without-epoch",
        location: "crates/meta/src/group/put.rs",
        impact: "A writer that was too slow completes another caller's put, whose bytes are not written yet.",
        test: test("meta", "group", "put_start_restarts_own_put_and_rejects_other_callers"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "upsert-before-kill",
        location: "crates/meta/src/group/put.rs",
        impact: "An upsert is acknowledged while the old version can be read, and a get after it brings the old bytes.",
        test: test("meta", "group", "upsert_ends_only_after_old_version_is_killed"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "lease-evicted",
        location: "crates/meta/src/group/evict.rs",
        impact: "What a reader has leased is evicted and overwritten while it is being read.",
        test: test("meta", "group", "leased_or_pinned_object_resists_eviction_and_unforced_remove"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "higher-term-ignored",
        location: "crates/meta/src/group.rs",
        impact: "A replaced master acknowledges puts that no reader can find.",
        test: test("meta", "group", "report_of_older_term_is_rejected_and_higher_term_steps_down"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "handoff-although-removed",
        location: "crates/meta/src/group/handoff.rs",
        impact: "Right after a group moved to another master, a removed object is still found there.",
        test: test("meta", "terms", "handoff_object_is_served_until_removed"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "tombstones-not-inherited",
        location: "crates/meta/src/group/handoff.rs",
        impact: "An object that was removed before its group moved to another master comes back with a node that was away.",
        test: test("meta", "terms", "object_removed_before_handoff_is_not_restored"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "tail-written-while-shared",
        location: "crates/blocks/src/cache.rs",
        impact: "Of two forks, one writes its next token over the other's.",
        test: test("blocks", "model", "cache_matches_list_model_for_random_histories"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "taken-back-rows-written",
        location: "crates/blocks/src/cache.rs",
        impact: "A reader's rows change under its eyes when a draft's tokens are taken back and others added.",
        test: test("blocks", "cache", "truncated_tokens_remain_readable_in_open_view"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "named-before-complete",
        location: "crates/blocks/src/cache.rs",
        impact: "A request shares a block whose rows are not computed yet.",
        test: test("blocks", "model", "cache_matches_list_model_for_random_histories"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "reused-while-read",
        location: "crates/blocks/src/cache.rs",
        impact: "A reader sees another sequence's rows, since a block was given out again too early.",
        test: test("blocks", "model", "cache_matches_list_model_for_random_histories"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "holes-not-in-names",
        location: "crates/blocks/src/sequence.rs",
        impact: "A sequence finds rows in the store that were computed in the presence of other tokens.",
        test: test("blocks", "model", "cache_matches_list_model_for_random_histories"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "salt-forgotten",
        location: "crates/blocks/src/hash.rs",
        impact: "One tenant's blocks are found by another.",
        test: test("blocks", "cache", "cached_prefix_is_reused_within_salt_except_last_token"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "order-in-the-masters-term",
        location: "crates/master/src/service/node_session.rs",
        impact: "With several masters nodes refuse every order: nothing is ever removed or evicted, and memory fills up.",
        test: test("client", "masters", "calls_reach_the_master_that_hosts_the_key"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "orders-not-repeated",
        location: "crates/master/src/service/node_session.rs",
        impact: "A removal during a short break of the network is never carried out, and its memory never comes back.",
        test: unit("master", "service::node_session::tests::unanswered_commands_are_resent_on_new_stream"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "unconfirmed-removal-certain",
        location: "crates/master/src/service/remove.rs",
        impact: "A master that was replaced without knowing answers removals as done while the new one has the object.",
        test: test("client", "masters", "registry_outage_keeps_serving_and_removals_return_pending"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "lost-group-answered",
        location: "crates/master/src/service/hosting.rs",
        impact: "A master that lost a group answers for it from a stale index.",
        test: test("master", "hosting", "group_is_served_only_while_hosted_and_not_handing_off"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "frozen-group-answered",
        location: "crates/master/src/service/hosting.rs",
        impact: "What is put or removed while a group is on its activation to another master is not known there.",
        test: test("master", "hosting", "group_is_served_only_while_hosted_and_not_handing_off"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "lease-from-the-answer",
        location: "crates/master/src/election/elector.rs",
        impact: "A master believes in its lease after it has ended, and removes for certain what another one is serving.",
        test: test("master", "hosting", "lease_starts_when_renewal_is_sent"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "expelled-and-hosting",
        location: "crates/master/src/election/elector.rs",
        impact: "A master whose lease ended goes on answering for groups that another one has, with an index of its own.",
        test: test("master", "hosting", "master_that_lost_membership_releases_all_groups"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "group-of-the-living-taken",
        location: "crates/master/src/election/state.rs",
        impact: "Masters take groups from each other without end, and no put in them ever succeeds.",
        test: unit("master", "election::state::tests::first_master_claims_all_groups_and_hands_off_when_stable"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "replaced-and-hosting",
        location: "crates/master/src/election/state.rs",
        impact: "A master serves a group after the registry assigned it to another master.",
        test: unit("master", "election::state::tests::lease_is_confirmed_for_half_and_superseded_master_releases"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "term-used-again",
        location: "crates/master/src/election/cluster_state.rs",
        impact: "Two masters have a group in the same term, and nodes cannot tell whose commands and grants are void.",
        test: unit("master", "election::state::tests::groups_of_dead_master_are_rebalanced_with_higher_terms"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "begin-of-an-older-term",
        location: "crates/heap/src/shm/owner.rs",
        impact: "A writer with a grant of a replaced master writes into memory that the new master has granted to another writer.",
        test: test("heap", "heap", "begin_rejects_invalid_grants"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "term-not-adopted",
        location: "crates/node/src/memory.rs",
        impact: "After a restart of the master its nodes keep the previous term and refuse every put of the new one.",
        test: test("node", "master_unavailable", "restarted_master_receives_full_report"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "stale-index-open",
        location: "crates/node/src/logic/timing.rs",
        impact: "Processes beside a node that is cut off from its master read removed objects for ever.",
        test: unit("node", "logic::timing::tests::index_is_open_only_within_self_fence_timeout"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "stale-reads-served",
        location: "crates/node/src/index_gate.rs",
        impact: "A node that is cut off from its master serves removed objects to peers who remember the place.",
        test: test("node", "master_unavailable", "node_without_master_serves_until_self_fence_timeout"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "old-answer-taken-for-new",
        location: "crates/node/src/session.rs",
        impact: "Processes beside a node that had stood still for minutes read objects that were removed meanwhile.",
        test: test("node", "stalls", "stale_heartbeat_ack_does_not_reopen_index"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "late-begin-left",
        location: "crates/node/src/logic/commands.rs",
        impact: "Memory of a write that began after its reservation was given up is never free again.",
        test: unit("node", "logic::commands::tests::reply_after_epoch_fence_depends_on_command_and_slot_word"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "order-done-twice",
        location: "crates/node/src/executor.rs",
        impact: "A command that is sent again on a new stream is executed again, on a slot that may belong to another object by then.",
        test: unit("node", "executor::tests::random_commands_keep_heap_usage_and_model_consistent"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "command-of-any-term-executed",
        location: "crates/node/src/logic/commands.rs",
        impact: "A master that was replaced has objects killed which the new one has acknowledged.",
        test: unit("node", "logic::commands::tests::stale_or_unsupported_command_is_refused_with_code"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "reclaim-done-while-held",
        location: "crates/node/src/logic/commands.rs",
        impact: "A node says that memory is free while a process of its host still reads there.",
        test: unit("node", "executor::tests::random_commands_keep_heap_usage_and_model_consistent"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "digest-unchecked",
        location: "crates/client/src/read.rs",
        impact: "Bytes that were damaged in memory or on the activation are returned as if they were right.",
        test: test("client", "corruption", "bytes_that_do_not_match_their_digest_are_not_returned"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "stale-place-kept",
        location: "crates/client/src/logic/retry.rs",
        impact: "A get of an object that has moved or was removed fails instead of asking the master where it is.",
        test: unit("client", "logic::retry::tests::classify_sends_corrupt_to_other_replica_and_gone_to_relookup"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "wrong-master-a-miss",
        location: "crates/client/src/cluster.rs",
        impact: "While groups move between masters, objects that are there seem to be missing, and are computed again.",
        test: test("client", "masters", "joining_or_leaving_master_loses_no_keys"),
        activation: Activation::Environment,
    },
    Mutant {
        name: "disk: RenameBeforeSync",
        location: "crates/disk/src/mutation.rs",
        impact: "A crash leaves a file under its name whose bytes were never written.",
        test: test("disk", "crash", "mutations::mutation_bucket_rename_before_sync_is_detected"),
        activation: Activation::InTest,
    },
    Mutant {
        name: "disk: NameUnsynced",
        location: "crates/disk/src/mutation.rs",
        impact: "What was written to disk and acknowledged is lost by a crash.",
        test: test("disk", "crash", "mutations::mutation_unsynced_bucket_name_is_detected"),
        activation: Activation::InTest,
    },
    Mutant {
        name: "disk: EntriesUnsynced",
        location: "crates/disk/src/mutation.rs",
        impact: "What was written to the one large file and acknowledged is lost by a crash.",
        test: test("disk", "crash", "mutations::mutation_unsynced_entry_is_detected"),
        activation: Activation::InTest,
    },
    Mutant {
        name: "disk: TombstoneUnsynced",
        location: "crates/disk/src/mutation.rs",
        impact: "What was removed from a disk is back after a crash.",
        test: test("disk", "crash", "mutations::mutation_unsynced_tombstone_is_detected"),
        activation: Activation::InTest,
    },
    Mutant {
        name: "disk: FooterBelieved",
        location: "crates/disk/src/mutation.rs",
        impact: "A damaged sector makes records of a disk appear that were never written.",
        test: test("disk", "crash", "mutations::mutation_unchecked_footer_is_detected"),
        activation: Activation::InTest,
    },
    Mutant {
        name: "disk: PagesBelieved",
        location: "crates/disk/src/mutation.rs",
        impact: "Damaged sectors are served as if they were right.",
        test: test("disk", "crash", "mutations::mutation_unchecked_page_digests_is_detected"),
        activation: Activation::InTest,
    },
    Mutant {
        name: "node: KilledUntold",
        location: "crates/node/src/disk/test_hooks.rs",
        impact: "What was removed while it was being written to disk is read from there afterwards.",
        test: unit("node", "disk::tests::mutations::mutation_kill_not_sent_to_disk_is_detected"),
        activation: Activation::InTest,
    },
    Mutant {
        name: "node: KilledAbsentUntold",
        location: "crates/node/src/disk/test_hooks.rs",
        impact: "What was removed after its memory was in use again is back from disk after a crash.",
        test: unit("node", "disk::tests::mutations::mutation_kill_of_reused_slot_not_sent_to_disk_is_detected"),
        activation: Activation::InTest,
    },
    Mutant {
        name: "node: JobsNotAwaited, writes (offload-outlives-session)",
        location: "crates/node/src/disk/test_hooks.rs",
        impact: "A write to disk that a former session ordered brings back what was removed in the next one.",
        test: unit("node", "disk::tests::mutations::mutation_inventory_end_before_foreign_write_is_detected"),
        activation: Activation::InTest,
    },
    Mutant {
        name: "node: JobsNotAwaited, removals",
        location: "crates/node/src/disk/test_hooks.rs",
        impact: "A removal is answered as certain while an earlier one of the same object is not on disk yet, and a crash brings the object back.",
        test: unit("node", "disk::tests::mutations::mutation_inventory_end_before_durable_removal_is_detected"),
        activation: Activation::InTest,
    },
    Mutant {
        name: "node: RetryStarved (tombstone-starved)",
        location: "crates/node/src/disk/test_hooks.rs",
        impact: "Under steady removals, one that the disk refused once is never written.",
        test: unit("node", "disk::tests::mutations::mutation_starved_retry_of_removals_is_detected"),
        activation: Activation::InTest,
    },
    Mutant {
        name: "node: EvictedLater",
        location: "crates/node/src/disk/test_hooks.rs",
        impact: "An object that was evicted from the disk and then removed is back after a crash.",
        test: unit("node", "disk::tests::mutations::mutation_eviction_reported_before_completion_is_detected"),
        activation: Activation::InTest,
    },
    Mutant {
        name: "node: PromotedUnasked",
        location: "crates/node/src/disk/test_hooks.rs",
        impact: "An object that was promoted from disk for an ended session appears in memory that was granted to another object.",
        test: unit("node", "disk::tests::mutations::mutation_publish_of_cancelled_promotion_is_detected"),
        activation: Activation::InTest,
    },
    Mutant {
        name: "node: ToldUnseen",
        location: "crates/node/src/disk/test_hooks.rs",
        impact: "The master learns of records that have left the disk since it was scanned.",
        test: unit("node", "disk::tests::mutations::mutation_inventory_without_presence_check_is_detected"),
        activation: Activation::InTest,
    },
    Mutant {
        name: "node: BegunUnasked",
        location: "crates/node/src/disk/test_hooks.rs",
        impact: "A cancelled promotion takes a slot that was granted to another object.",
        test: unit("node", "disk::tests::mutations::mutation_start_of_cancelled_promotion_is_detected"),
        activation: Activation::InTest,
    },
    Mutant {
        name: "node: ToldToEnded",
        location: "crates/node/src/disk/test_hooks.rs",
        impact: "A record that was written to disk is reported to no master and is never read from there.",
        test: unit("node", "disk::tests::mutations::mutation_notice_to_ended_session_is_detected"),
        activation: Activation::InTest,
    },
    Mutant {
        name: "node: GoneUnseen",
        location: "crates/node/src/disk/test_hooks.rs",
        impact: "The master forgets a record that has just come to the disk, and its space is never used again.",
        test: unit("node", "disk::tests::mutations::mutation_gone_notice_without_presence_check_is_detected"),
        activation: Activation::InTest,
    },
];

/// What is wanted.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Options {
    /// Print the table and run nothing.
    pub(crate) list: bool,
    /// Name of the one mutant to run.
    pub(crate) only: Option<String>,
}

/// Why not all is well.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MutantsError {
    #[error("no mutant is called `{0}`; see `cargo xtask mutants --list`")]
    Unknown(String),
    #[error(transparent)]
    Build(#[from] CommandError),
    #[error("cargo built no test `{0}`")]
    NotBuilt(String),
    #[error("cannot run {what}: {source}")]
    NotRun { what: String, source: std::io::Error },
    #[error("{log} does not report one test run; does the test `{test}` exist?")]
    NoSuchTest { test: String, log: String },
    #[error("{count} of the tests fail without a mutation; see {logs}")]
    BaselineFailed { count: usize, logs: String },
    #[error("{count} of the mutants survived; see {logs}")]
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
    let wanted = |mutant: &&Mutant| options.only.as_ref().is_none_or(|only| mutant.name == only);
    let mutants: Vec<&Mutant> = MUTANTS.iter().filter(wanted).collect();
    match &options.only {
        Some(name) if mutants.is_empty() => return Err(MutantsError::Unknown(name.clone())),
        _ => {}
    }
    if options.list {
        for mutant in mutants {
            println!(
                "{}\n    in {}, detected by {}\n    {}",
                mutant.name, mutant.location, mutant.test, mutant.impact
            );
        }
        return Ok(());
    }
    // Build for all mutants, even for one: with other packages selected, cargo would rebuild their dependencies.
    let bench = TestBinaries::build(root, target_dir, &MUTANTS.iter().collect::<Vec<_>>())?;
    println!("without a mutation:");
    let mut tests: Vec<Test> = mutants.iter().map(|mutant| mutant.test).collect();
    tests.sort_unstable();
    tests.dedup();
    let mut unhealthy = 0;
    for test in tests {
        let (outcome, seconds) = bench.run(test, None)?;
        unhealthy += usize::from(outcome != Outcome::Passed);
        println!("  {:<6} {seconds:>5.1} s  {test}", if outcome == Outcome::Passed { "ok" } else { "FAIL" });
    }
    if unhealthy > 0 {
        return Err(MutantsError::BaselineFailed {
            count: unhealthy,
            logs: bench.logs.display().to_string(),
        });
    }
    println!("\n{:<34} {:<40} {:>7}  detected by", "mutant", "location", "seconds");
    let mut survived = 0;
    for mutant in &mutants {
        let (outcome, seconds) = bench.run(mutant.test, Some(mutant))?;
        let found = mutant.is_detected(outcome);
        survived += usize::from(!found);
        let by = match outcome {
            _ if found => mutant.test.to_string(),
            Outcome::Hung => format!("SURVIVED: {} did not end", mutant.test),
            Outcome::Passed | Outcome::Failed => format!("SURVIVED: {} passed", mutant.test),
        };
        println!("{:<34} {:<40} {seconds:>7.1}  {by}", mutant.name, mutant.location);
    }
    println!("\n{} mutants, {} detected, {survived} survived", mutants.len(), mutants.len() - survived);
    match survived {
        0 => Ok(()),
        count => Err(MutantsError::Survived { count, logs: bench.logs.display().to_string() }),
    }
}

impl Mutant {
    fn is_detected(&self, outcome: Outcome) -> bool {
        outcome == if self.activation == Activation::Environment { Outcome::Failed } else { Outcome::Passed }
    }
}

impl std::fmt::Display for Test {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Test { package, binary, name } = self;
        write!(f, "{package}/{} {name}", binary.unwrap_or("lib"))
    }
}

/// The tests, built.
struct TestBinaries {
    root: PathBuf,
    logs: PathBuf,
    /// By crate and file.
    programs: BTreeMap<(String, Option<String>), PathBuf>,
}

impl TestBinaries {
    /// Builds the test binaries of these mutants.
    fn build(root: &Path, target_dir: &str, mutants: &[&Mutant]) -> Result<TestBinaries, MutantsError> {
        let target_dir = format!("{target_dir}/mutation");
        let build = |more: &str| {
            Command::cargo(&format!("test --no-run --locked {}{more}", targets(mutants)))
                .env("RUSTFLAGS", "--cfg mutation")
                .env("CARGO_TARGET_DIR", &target_dir)
        };
        println!("$ {}", build(""));
        build("").run(root)?;
        // Everything is built: this call only lists the binaries.
        let output = build(" --message-format=json").output(root)?;
        let logs = root.join(&target_dir).join("logs");
        let made = std::fs::create_dir_all(&logs);
        made.map_err(|source| MutantsError::NotRun { what: logs.display().to_string(), source })?;
        Ok(TestBinaries { root: root.to_owned(), logs, programs: programs(&output) })
    }

    /// Runs a test, with a mutation or without.
    fn run(&self, test: Test, mutant: Option<&Mutant>) -> Result<(Outcome, f64), MutantsError> {
        let key = (format!("moontide-{}", test.package), test.binary.map(str::to_owned));
        let program = self.programs.get(&key).ok_or_else(|| MutantsError::NotBuilt(test.to_string()))?;
        let name = mutant.map_or_else(|| format!("baseline {test}"), |mutant| mutant.name.to_owned());
        let log = self.logs.join(format!("{}.log", name.replace([' ', ':', '/'], "-")));
        let not_run = |source| MutantsError::NotRun { what: test.to_string(), source };
        let output = File::create(&log).map_err(not_run)?;
        let mut child = process::Command::new(program);
        child.args([test.name, "--exact", "--nocapture"]).env_remove(MUTATION_ENV);
        if let Some(mutant) = mutant.filter(|mutant| mutant.activation == Activation::Environment) {
            child.env(MUTATION_ENV, mutant.name);
        }
        child.current_dir(self.root.join("crates").join(test.package));
        child.stdin(Stdio::null()).stdout(output.try_clone().map_err(not_run)?).stderr(output);
        let began = Instant::now();
        let outcome = wait(child.spawn().map_err(not_run)?, LIMIT).map_err(not_run)?;
        let output = std::fs::read(&log).map_err(not_run)?;
        if !String::from_utf8_lossy(&output).contains("running 1 test") {
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

/// Arguments of cargo that select the tests of these mutants.
fn targets(mutants: &[&Mutant]) -> String {
    let mut words: Vec<String> = vec![];
    for Mutant { test, .. } in mutants {
        words.push(format!("-p moontide-{}", test.package));
        words.push(test.binary.map_or_else(|| "--lib".to_owned(), |binary| format!("--test {binary}")));
    }
    words.sort_unstable();
    words.dedup();
    words.join(" ")
}

/// The programs in an answer of cargo, one JSON object a line.
fn programs(output: &str) -> BTreeMap<(String, Option<String>), PathBuf> {
    let messages = output.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
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
    fn mutant_table_matches_switches_in_sources() {
        let root = crate::workspace_root();
        let by_switch = MUTANTS.iter().filter(|mutant| mutant.activation == Activation::Environment);
        for mutant in by_switch.clone() {
            let source = std::fs::read_to_string(root.join(mutant.location)).unwrap();
            assert!(
                source.contains(&format!("mutation_enabled(\"{}\")", mutant.name)),
                "{} in {}",
                mutant.name,
                mutant.location
            );
        }
        let mut all = vec![];
        sources(&root.join("crates"), &mut all);
        let mut in_sources: Vec<&str> = all
            .iter()
            .flat_map(|source| source.split("moontide_rt::mutation_enabled(\"").skip(1))
            .map(|rest| rest.split('"').next().unwrap())
            .collect();
        in_sources.sort_unstable();
        in_sources.dedup();
        let mut listed: Vec<&str> = by_switch.map(|mutant| mutant.name).collect();
        listed.sort_unstable();
        assert_eq!(in_sources, listed);
    }

    #[test]
    fn every_mutant_has_unique_name_and_existing_test() {
        let mut names: Vec<&str> = MUTANTS.iter().map(|mutant| mutant.name).collect();
        names.sort_unstable();
        assert!(names.windows(2).all(|pair| pair[0] != pair[1]), "{names:?}");
        for Mutant { test, impact, .. } in MUTANTS {
            let mut all = vec![];
            sources(&crate::workspace_root().join("crates").join(test.package), &mut all);
            let function = format!("fn {}(", test.name.rsplit("::").next().unwrap());
            assert!(all.iter().any(|source| source.contains(&function)), "no {function} in {}", test.package);
            assert!(impact.ends_with('.'), "{impact}");
        }
    }

    #[test]
    fn test_binaries_are_parsed_from_cargo_messages() {
        let output = r#"
{"reason":"compiler-artifact","manifest_path":"/x/crates/meta/Cargo.toml","target":{"kind":["lib"],"name":"moontide_meta"},"profile":{"test":false},"executable":null}
{"reason":"compiler-artifact","manifest_path":"/x/crates/meta/Cargo.toml","target":{"kind":["lib"],"name":"moontide_meta"},"profile":{"test":true},"executable":"/t/meta-1"}
{"reason":"compiler-artifact","manifest_path":"/x/crates/meta/Cargo.toml","target":{"kind":["test"],"name":"group"},"profile":{"test":true},"executable":"/t/group-2"}
{"reason":"build-finished","success":true}
"#;
        let key = |binary: Option<&str>| ("moontide-meta".to_owned(), binary.map(str::to_owned));
        let found = programs(output);
        assert_eq!(found.get(&key(None)), Some(&PathBuf::from("/t/meta-1")));
        assert_eq!(found.get(&key(Some("group"))), Some(&PathBuf::from("/t/group-2")));
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn hanging_test_does_not_count_as_detection() {
        let sleeps = process::Command::new("sleep").arg("60").spawn().unwrap();
        assert_eq!(wait(sleeps, Duration::from_millis(50)).unwrap(), Outcome::Hung);
        let fails = process::Command::new("false").spawn().unwrap();
        assert_eq!(wait(fails, Duration::from_secs(10)).unwrap(), Outcome::Failed);
        assert!(MUTANTS.iter().all(|mutant| !mutant.is_detected(Outcome::Hung)));
    }
}
