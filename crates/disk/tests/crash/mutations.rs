//! Mutations that the crash matrix must detect.

use moontide_disk::mutation::Mutation;
use moontide_rt::with_mutation;

use crate::corruption::{flip_metadata, flip_payloads};
use crate::harness::Check;
use crate::history::{crash, operations};
use crate::kinds::{Kind, default_kind, kind};

/// Runs histories with crashes, up to the first failure.
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

fn assert_detected(mutation: Mutation, matrix: fn() -> Check, expected: &str) {
    let error = with_mutation(Some(mutation), matrix).expect_err("the mutation is not detected");
    assert!(error.contains(expected), "{mutation:?} is detected, but as: {error}");
}

#[test]
fn mutation_bucket_rename_before_sync_is_detected() {
    assert_detected(Mutation::RenameBeforeSync, histories, "");
}

#[test]
fn mutation_unsynced_bucket_name_is_detected() {
    assert_detected(Mutation::NameUnsynced, histories, "is lost");
}

#[test]
fn mutation_unsynced_tombstone_is_detected() {
    assert_detected(Mutation::TombstoneUnsynced, histories, "reappears after its removal");
}

#[test]
fn mutation_unchecked_footer_is_detected() {
    assert_detected(Mutation::FooterBelieved, || flip_metadata(default_kind()), "");
}

#[test]
fn mutation_unchecked_page_digests_is_detected() {
    assert_detected(Mutation::PagesBelieved, || flip_payloads(default_kind()), "wrong bytes");
}

#[test]
fn mutation_file_rename_before_sync_is_detected() {
    assert_detected(Mutation::RenameBeforeSync, || histories_of(kind("file")), "");
}

#[test]
fn mutation_unsynced_file_name_is_detected() {
    assert_detected(Mutation::NameUnsynced, || histories_of(kind("file")), "is lost");
}

#[test]
fn mutation_unsynced_entry_is_detected() {
    assert_detected(Mutation::EntriesUnsynced, || histories_of(kind("offset")), "is lost");
}

#[test]
fn mutation_unsynced_tombstone_in_other_backends_is_detected() {
    for name in ["file", "offset"] {
        let matrix = || histories_of(kind(name));
        let error = with_mutation(Some(Mutation::TombstoneUnsynced), matrix)
            .expect_err("the mutation is not detected");
        assert!(error.contains("reappears after its removal"), "{name}: {error}");
    }
}
