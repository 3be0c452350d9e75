//! Checks on the workflows of GitHub: what a pull request runs has no rights, no secrets, and no code that its owner can
//! replace unseen.
//!
//! Reads lines, not YAML: the forms that pass are those that stand there today.

use super::Finding;
use super::tree::Tree;

const DIRECTORY: &str = ".github/workflows/";

/// What every workflow must say at its top level.
const READ_ONLY: &str = "permissions:\n  contents: read\n\n";

/// Words that no workflow may contain, each with its reason.
const BANNED: &[(&str, &str)] = &[
    ("pull_request_target", "runs the code of a pull request with the rights of the project"),
    ("secrets.", "a pull request could read it"),
    ("workflow_run", "runs after the code of a pull request with the rights of the project"),
    (": write", "a pull request could use it"),
];

/// Every workflow can only read, and names its actions by commit.
pub(super) fn harmless(tree: &Tree) -> Vec<Finding> {
    let mut findings = vec![];
    for (path, text) in tree.files().filter(|(path, _)| path.starts_with(DIRECTORY)) {
        if !text.contains(&format!("\n{READ_ONLY}")) {
            let what = "does not say `permissions:`, `  contents: read`, and nothing more, at its top level";
            findings.push(Finding::new(path, what));
        }
        for (number, line) in (1..).zip(text.lines()) {
            let location = || format!("{path}:{number}");
            let line = line.split(" #").next().unwrap_or_default();
            for (word, why) in BANNED.iter().filter(|(word, _)| line.contains(word)) {
                findings.push(Finding::new(location(), format!("says `{word}`: {why}")));
            }
            if let Some((_, action)) = line.split_once("uses:")
                && !is_pinned(action.trim())
            {
                let what = format!("uses `{}`; name the commit, and the version in a comment", action.trim());
                findings.push(Finding::new(location(), what));
            }
        }
    }
    findings
}

fn is_pinned(action: &str) -> bool {
    let commit = action.split_once('@').map_or("", |(_, commit)| commit);
    commit.len() == 40 && commit.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn findings(workflow: &str) -> Vec<String> {
        let tree = Tree::of(&[(".github/workflows/ci.yml", workflow), ("docs/a.yml", "uses: a@v4\n")]);
        harmless(&tree).iter().map(ToString::to_string).collect()
    }

    #[test]
    fn workflow_with_rights_or_secrets_is_reported() {
        let good = format!("name: CI\non: push\n{READ_ONLY}jobs:\n  x:\n");
        assert!(findings(&good).is_empty());
        for (worse, word) in [
            ("on: pull_request_target\n", "pull_request_target"),
            ("    env:\n      TOKEN: ${{ secrets.TOKEN }}\n", "secrets."),
            ("    permissions:\n      contents: write\n", ": write"),
            ("    permissions: write-all\n", ": write"),
        ] {
            let found = findings(&format!("{good}{worse}"));
            assert!(matches!(&found[..], [one] if one.contains(&format!("`{word}`"))), "{found:?}");
        }
        let found = findings("name: CI\non: push\njobs:\n");
        assert!(matches!(&found[..], [one] if one.contains("contents: read")), "{found:?}");
        let more = good.replace("contents: read\n", "contents: read\n  packages: read\n");
        assert_eq!(findings(&more).len(), 1);
    }

    #[test]
    fn action_that_is_not_pinned_by_commit_is_reported() {
        let with = |action: &str| findings(&format!("name: CI\n{READ_ONLY}      - uses: {action}\n"));
        assert!(with("actions/checkout@de0fac2e4500dabe0009e67214ff5f5447ce83dd # v6.0.2").is_empty());
        for action in [
            "actions/checkout@v6",
            "actions/checkout",
            "actions/checkout@de0fac2",
            "actions/checkout@main # de0fac2e4500dabe0009e67214ff5f5447ce83dd",
            "docker://alpine:3",
        ] {
            let found = with(action);
            assert!(matches!(&found[..], [one] if one.contains("name the commit")), "{action}: {found:?}");
        }
    }
}
