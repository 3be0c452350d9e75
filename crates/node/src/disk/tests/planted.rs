//! The scenes notice the mistakes that they are about.

use super::races::{
    cancelled_before_promoted, evicted_and_told, gone_while_told, killed_while_written,
    session_ends_while_promoted, session_ends_while_written, written_while_missed,
};
use super::*;

#[test]
fn a_kill_of_which_the_disk_does_not_hear_is_noticed() {
    assert!(!killed_while_written(BackendKind::Bucket, Some(Bug::KilledUntold)));
}

#[test]
fn eviction_that_is_told_before_it_is_finished_is_noticed() {
    for backend in BackendKind::ALL {
        assert!(!evicted_and_told(backend, Some(Bug::EvictedLater)), "{backend}");
    }
}

#[test]
fn promotion_that_nobody_wants_any_more_is_noticed() {
    assert!(!session_ends_while_promoted(Some(Bug::PromotedUnasked)));
}

#[test]
fn telling_what_is_gone_is_noticed() {
    assert!(!gone_while_told(true, Some(Bug::ToldUnseen)));
    assert!(!gone_while_told(false, Some(Bug::ToldUnseen)));
}

#[test]
fn promotion_that_begins_after_it_was_cancelled_is_noticed() {
    assert!(!cancelled_before_promoted(OrderKind::Kill, Some(Bug::BegunUnasked)));
    assert!(!cancelled_before_promoted(OrderKind::Reclaim, Some(Bug::BegunUnasked)));
}

#[test]
fn telling_a_session_that_is_over_is_noticed() {
    assert!(!session_ends_while_written(Some(Bug::ToldToEnded)));
}

#[test]
fn telling_as_gone_what_has_come_is_noticed() {
    assert!(!written_while_missed(Some(Bug::GoneUnseen)));
}
