//! A test that cannot run here: reported, and a failure under `CI=true`.
//!
//! Test programs of every crate include this file by `#[path]`, so it uses the standard library only. A long form that
//! is selected by a variable is no such test; it is `#[ignore]`d, or documented where it is declared.

use std::fmt::Display;

/// Reports that the calling test, or a part of it, does not run; the caller returns. Panics under `CI=true`, where
/// everything that tests need is installed: otherwise a missing tool would look like success.
#[track_caller]
pub(crate) fn not_run(reason: impl Display) {
    report(&reason, std::env::var("CI").is_ok_and(|value| value == "true"));
}

#[track_caller]
pub(crate) fn report(reason: &dyn Display, is_ci: bool) {
    println!("NOT RUN: {reason}");
    assert!(!is_ci, "this test must run under CI=true: {reason}");
}
