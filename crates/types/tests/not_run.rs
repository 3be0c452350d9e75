//! The helper for tests that cannot run: a message, and a failure in CI only.

#[path = "support/not_run.rs"]
mod support;

#[test]
fn missing_requirement_is_reported_outside_ci() {
    support::report(&"needs root", false);
}

#[test]
#[should_panic(expected = "this test must run under CI=true: needs root")]
fn missing_requirement_fails_in_ci() {
    support::report(&"needs root", true);
}

#[test]
fn variable_ci_decides() {
    let outcome = std::panic::catch_unwind(|| support::not_run("an example"));
    assert_eq!(outcome.is_err(), std::env::var("CI").is_ok_and(|value| value == "true"));
}
