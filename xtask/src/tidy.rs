//! `cargo xtask tidy`: conventions that no compiler checks.
//!
//! Owns the list of checks and the report. The checks are functions from facts to [`Finding`]s: [`crates`] checks
//! dependencies, [`pages`] documentation, [`sources`] source files, [`unsafe_code`] the number of `unsafe`, [`words`]
//! vocabulary, [`workflows`] the rights of CI, [`worlds`] what simulated worlds run. [`tree`] holds the files of the checkout,
//! so that a test can construct a violation in memory.

mod crates;
mod pages;
mod sources;
mod tree;
mod unsafe_code;
mod words;
mod workflows;
mod worlds;

use std::fmt;
use std::path::Path;

use crate::command::{Command, CommandError};
use tree::Tree;

/// One violation: location, what is wrong and, if that is not obvious, what to do.
#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Finding {
    /// `path` or `path:line`, from the workspace root.
    location: String,
    what: String,
}

impl Finding {
    fn new(location: impl Into<String>, what: impl Into<String>) -> Self {
        Self { location: location.into(), what: what.into() }
    }
}

impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.location, self.what)
    }
}

/// Reason why tidy failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum TidyError {
    #[error("tidy: {0} finding(s), listed above")]
    Findings(usize),
    #[error("tidy cannot read the checkout: {0}")]
    Unreadable(#[from] std::io::Error),
    #[error("tidy cannot ask cargo: {0}")]
    Cargo(#[from] CommandError),
    #[error(transparent)]
    Metadata(#[from] crates::MetadataError),
}

/// Runs every check and prints every finding.
pub(crate) fn run(root: &Path) -> Result<(), TidyError> {
    let tree = Tree::load(root)?;
    let metadata = Command::cargo("metadata --no-deps --format-version 1 --locked").output(root)?;
    let packages = crates::parse_metadata(&metadata)?;

    let mut findings = crates::direction(&packages);
    findings.extend(crates::testing_feature(&packages));
    for ban in crates::bans_for(&packages) {
        let listing = Command::cargo(&format!(
            "tree --package {} --edges normal --all-features --prefix depth --locked",
            ban.package
        ));
        findings.extend(crates::banned(&ban, &listing.output(root)?));
    }
    findings.extend(pages::paths_on_map(&tree));
    findings.extend(pages::links(&tree));
    findings.extend(sources::headers(&tree));
    findings.extend(sources::lengths(&tree));
    findings.extend(sources::purity(&tree));
    findings.extend(worlds::simulated_code_is_shipped(&tree));
    findings.extend(worlds::leaves_are_replaced(&tree));
    findings.extend(words::vocabulary(&tree));
    findings.extend(workflows::harmless(&tree));
    let (inventory, unread) = unsafe_code::inventory(&tree);
    findings.extend(unread);
    findings.extend(unsafe_code::ratchet(&tree, &inventory));
    findings.extend(unsafe_code::forbidden(&tree, &unsafe_code::roots(&metadata)?, &inventory));

    report(findings)?;
    println!("tidy: {} crates and {} files are in order", packages.len(), tree.len());
    Ok(())
}

/// Prints the table of the numbers of `unsafe`.
pub(crate) fn print_unsafe(root: &Path) -> Result<(), TidyError> {
    let (inventory, unread) = unsafe_code::inventory(&Tree::load(root)?);
    print!("{}", unsafe_code::table(&inventory));
    report(unread)
}

fn report(mut findings: Vec<Finding>) -> Result<(), TidyError> {
    findings.sort();
    findings.iter().for_each(|finding| println!("{finding}"));
    if findings.is_empty() { Ok(()) } else { Err(TidyError::Findings(findings.len())) }
}
