//! The race tests detect the mutations that they are about.

use moontide_disk::Faults;

use super::devices::{failing_directory_is_excluded, removed_in_all_directories};
use super::races::{
    cancelled_before_promoted, evicted_and_notified, evicted_with_errors, gone_during_inventory,
    killed_after_reuse, killed_while_written, removal_fails_under_steady_traffic,
    session_begins_during_removal, session_ends_while_promoted, session_ends_while_written,
    unreadable_during_inventory, written_while_missed,
};
use super::*;

#[test]
fn mutation_kill_not_sent_to_disk_is_detected() {
    assert!(!killed_while_written(BackendKind::Bucket, Some(Mutation::KilledUntold)));
}

#[test]
fn mutation_eviction_reported_before_completion_is_detected() {
    for backend in BackendKind::ALL {
        assert!(!evicted_and_notified(backend, Some(Mutation::EvictedLater)), "{backend}");
    }
}

#[test]
fn mutation_ignored_error_of_eviction_is_detected() {
    for backend in BackendKind::ALL {
        assert!(!evicted_with_errors(backend, Some(Mutation::EvictionErrorIgnored)), "{backend}");
    }
}

#[test]
fn mutation_unreadable_records_kept_is_detected() {
    for backend in BackendKind::ALL {
        assert!(unreadable_during_inventory(backend, Some(Mutation::UnreadableKept)), "{backend}");
    }
}

#[test]
fn mutation_publish_of_cancelled_promotion_is_detected() {
    assert!(!session_ends_while_promoted(Some(Mutation::PromotedUnasked)));
}

#[test]
fn mutation_inventory_without_presence_check_is_detected() {
    assert!(!gone_during_inventory(true, Some(Mutation::ToldUnseen)));
    assert!(!gone_during_inventory(false, Some(Mutation::ToldUnseen)));
}

#[test]
fn mutation_start_of_cancelled_promotion_is_detected() {
    assert!(!cancelled_before_promoted(CommandKind::Kill, Some(Mutation::BegunUnasked)));
    assert!(!cancelled_before_promoted(CommandKind::Reclaim, Some(Mutation::BegunUnasked)));
}

#[test]
fn mutation_notice_to_ended_session_is_detected() {
    assert!(!session_ends_while_written(Some(Mutation::ToldToEnded)));
}

#[test]
fn mutation_gone_notice_without_presence_check_is_detected() {
    assert!(!written_while_missed(Some(Mutation::GoneUnseen)));
}

#[test]
fn mutation_kill_of_reused_slot_not_sent_to_disk_is_detected() {
    assert!(!killed_after_reuse(BackendKind::Bucket, Some(Mutation::KilledAbsentUntold)));
}

#[test]
fn mutation_inventory_end_before_foreign_write_is_detected() {
    assert!(!session_ends_while_written(Some(Mutation::JobsNotAwaited)));
}

#[test]
fn mutation_inventory_end_before_durable_removal_is_detected() {
    assert!(!session_begins_during_removal(Some(Mutation::JobsNotAwaited)));
}

#[test]
fn mutation_starved_retry_of_removals_is_detected() {
    assert!(!removal_fails_under_steady_traffic(Some(Mutation::RetryStarved)));
}

#[test]
fn mutation_removal_in_one_directory_is_detected() {
    assert!(!removed_in_all_directories(Some(Mutation::RemovedOnOne)));
}

#[test]
fn mutation_exclusion_that_is_not_durable_is_detected() {
    let faults = Faults { sync_error_permille: 1000, write_error_permille: 1000, ..Faults::default() };
    assert!(!failing_directory_is_excluded(1, faults, Some(Mutation::ExcludedInMemory)));
}
