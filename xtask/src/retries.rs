//! Retries of tests: allowed for one abort inside UCX, counted, and refused for anything else.
//!
//! `.config/nextest.toml` lets nextest start the tests of UCX again, whatever their failure was. This module reads
//! nextest's report after a run: an attempt that failed before the test passed must show [`UCX_ABORT`] in its output.
//! UCX 1.22 has no such abort; libraries of distributions do.

use std::path::{Path, PathBuf};

/// A failed assertion of UCX while endpoints are wired up: file and message, in one line of output.
const UCX_ABORT: [&str; 2] = ["ucp_request.c", "got REP message"];

/// Where nextest writes the report of its default profile, under the target directory.
const REPORT: &str = "nextest/default/junit.xml";

/// Why the retries of a run are not acceptable.
#[derive(Debug, thiserror::Error)]
pub(crate) enum RetriesError {
    #[error("cannot read the report of nextest, {path}: {source}")]
    Report { path: String, source: std::io::Error },
    #[error(
        "passed only when retried, and not because of the abort inside UCX ({}): {}",
        UCX_ABORT.join(": "),
        .0.join(", ")
    )]
    NotUcx(Vec<String>),
}

pub(crate) fn report_path(root: &Path, target_dir: &str) -> PathBuf {
    root.join(target_dir).join(REPORT)
}

/// Number of failed attempts of tests that passed later.
pub(crate) fn count(report: &Path) -> Result<usize, RetriesError> {
    let text = std::fs::read_to_string(report)
        .map_err(|source| RetriesError::Report { path: report.display().to_string(), source })?;
    count_in(&text)
}

fn count_in(report: &str) -> Result<usize, RetriesError> {
    let (mut aborts, mut others) = (0, Vec::new());
    for case in report.split("<testcase ").skip(1) {
        for attempt in case.split("<flakyFailure ").skip(1) {
            let attempt = attempt.split("</flakyFailure>").next().unwrap_or_default();
            let is_abort = attempt.lines().any(|line| UCX_ABORT.iter().all(|part| line.contains(part)));
            if is_abort {
                aborts += 1;
            } else {
                others.push(test_name(case));
            }
        }
    }
    if others.is_empty() { Ok(aborts) } else { Err(RetriesError::NotUcx(others)) }
}

/// `package::binary test`, from the attributes of a test case.
fn test_name(case: &str) -> String {
    let attribute = |name: &str| {
        let start = case.find(&format!("{name}=\""))? + name.len() + 2;
        case[start..].split('"').next()
    };
    format!("{} {}", attribute("classname").unwrap_or("?"), attribute("name").unwrap_or("?"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(outputs: &[&str]) -> String {
        let attempts: String = outputs
            .iter()
            .map(|output| {
                format!(
                    "<flakyFailure time=\"0.1\" message=\"process aborted\" type=\"test abort\">process aborted\n\
                     <system-err>{output}\n</system-err>\n</flakyFailure>\n"
                )
            })
            .collect();
        format!(
            "<testsuites name=\"nextest-run\"><testsuite name=\"moontide-transfer::ucx\">\n\
             <testcase name=\"idle_worker_sleeps\" classname=\"moontide-transfer::ucx\" time=\"1\"/>\n\
             <testcase name=\"get\" classname=\"moontide-transfer::ucx\" time=\"1\">\n{attempts}</testcase>\n\
             </testsuite></testsuites>\n"
        )
    }

    const ABORT: &str =
        "[h:1:0:2] ucp_request.c:7  Assertion `a&lt;b&apos; failed: req 0x1 ep 0x2: got REP message";

    #[test]
    fn ucx_aborts_are_counted() {
        assert_eq!(count_in(&report(&[])).unwrap(), 0);
        assert_eq!(count_in(&report(&[ABORT, ABORT])).unwrap(), 2);
    }

    #[test]
    fn other_retried_failure_is_refused_and_named() {
        for outputs in
            [&["assertion failed"][..], &[ABORT, "got REP message"], &["ucp_request.c\ngot REP message"]]
        {
            let error = count_in(&report(outputs)).unwrap_err().to_string();
            assert!(error.ends_with(": moontide-transfer::ucx get"), "{error}");
        }
    }

    #[test]
    fn missing_report_is_an_error() {
        let missing = report_path(Path::new("/nowhere"), "target");
        assert!(
            count(&missing).unwrap_err().to_string().contains("/nowhere/target/nextest/default/junit.xml")
        );
    }
}
