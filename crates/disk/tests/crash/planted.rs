//! Mistakes that the matrix must find: a matrix that finds none of them would prove nothing.

use moontide_disk::planted::{Bug, with_planted};

use crate::damage::{flip_metadata, flip_payloads};
use crate::history::{crash, operations};
use crate::kinds::{Kind, default_kind, kind};
use crate::world::Check;

/// Histories with crashes, up to the first complaint.
fn histories() -> Check {
    histories_of(default_kind())
}

fn histories_of(kind: Kind) -> Check {
    for seed in 0..5 {
        for crash_after in 0..=operations(kind, seed)? {
            for chance in 0..2 {
                crash(kind, seed, chance, crash_after)?;
            }
        }
    }
    Ok(())
}

fn found(bug: Bug, matrix: fn() -> Check, complaint: &str) {
    let why = with_planted(Some(bug), matrix).expect_err("the mistake is not found");
    assert!(why.contains(complaint), "{bug:?} is found, but as: {why}");
}

#[test]
fn a_bucket_named_before_it_is_durable_is_found() {
    found(Bug::RenameBeforeSync, histories, "");
}

#[test]
fn a_name_that_is_not_durable_is_found() {
    found(Bug::NameUnsynced, histories, "is lost");
}

#[test]
fn a_removal_that_is_not_durable_is_found() {
    found(Bug::TombstoneUnsynced, histories, "is back after its removal");
}

#[test]
fn a_footer_that_is_believed_is_found() {
    found(Bug::FooterBelieved, || flip_metadata(default_kind()), "");
}

#[test]
fn pages_that_are_believed_are_found() {
    found(Bug::PagesBelieved, || flip_payloads(default_kind()), "wrong bytes");
}

#[test]
fn a_file_named_before_it_is_durable_is_found() {
    found(Bug::RenameBeforeSync, || histories_of(kind("file")), "");
}

#[test]
fn a_name_of_a_file_that_is_not_durable_is_found() {
    found(Bug::NameUnsynced, || histories_of(kind("file")), "is lost");
}

#[test]
fn an_entry_that_is_not_durable_is_found() {
    found(Bug::EntriesUnsynced, || histories_of(kind("offset")), "is lost");
}

#[test]
fn removals_that_are_not_durable_are_found_in_all_backends() {
    for name in ["file", "offset"] {
        let matrix = || histories_of(kind(name));
        let why = with_planted(Some(Bug::TombstoneUnsynced), matrix).expect_err("the mistake is not found");
        assert!(why.contains("is back after its removal"), "{name}: {why}");
    }
}
