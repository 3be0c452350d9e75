//! Checks on source files: each opens with a header comment, none is too long, and pure code neither reads a clock nor
//! blocks.

use super::Finding;
use super::tree::Tree;

/// Above this a file holds more than one idea.
const LINES_MAX: usize = 900;
/// Files that may be longer, each with its reason in a comment. Empty, and meant to stay so.
const LONG_FILES: &[&str] = &[];

/// Every source file of our crates and of xtask opens with `//!`.
pub(super) fn headers(tree: &Tree) -> Vec<Finding> {
    let sources = tree.files().filter(|(path, _)| wants_header(path));
    let without = sources.filter(|(_, text)| !text.starts_with("//!"));
    without
        .map(|(path, _)| {
            Finding::new(
                format!("{path}:1"),
                "opens without `//!`; say what the file owns and what it does not",
            )
        })
        .collect()
}

/// No Rust file in `crates/` has more than [`LINES_MAX`] lines. A list of messages, each field with its comment, is
/// one idea at any length.
pub(super) fn lengths(tree: &Tree) -> Vec<Finding> {
    let ours = tree.files().filter(|(path, _)| {
        path.starts_with("crates/") && path.ends_with(".rs") && !LONG_FILES.contains(path)
    });
    ours.filter_map(|(path, text)| {
        let lines = text.lines().count();
        (lines > LINES_MAX)
            .then(|| Finding::new(path, format!("{lines} lines, more than {LINES_MAX}; split it by idea")))
    })
    .collect()
}

/// Pure code: time, randomness and I/O results are arguments.
const PURE: &[&str] = &["crates/meta/src/", "crates/node/src/logic", "crates/client/src/logic"];

/// Names that pure code must not contain, and what to do instead.
const IMPURE: &[(&str, &str)] = &[
    ("SystemClock", "take the time as an argument"),
    ("Instant::", "take the time as an argument"),
    ("SystemTime", "take the time as an argument"),
    ("std::thread", "return an effect; threads belong to the master"),
    ("std::fs", "return an effect; files belong to the master"),
    ("std::net", "return an effect; sockets belong to the master"),
    ("std::env", "take it as an argument"),
    ("Mutex", "one thread at a time calls it; locks belong to the master"),
    ("RwLock", "one thread at a time calls it; locks belong to the master"),
    ("std::sync::atomic", "one thread at a time calls it"),
    ("RandomState", "its seed differs from run to run; use a hasher with a fixed seed"),
    ("tokio", "pure code does not block"),
];

/// Pure code is deterministic: the same inputs give the same effects. Comments are not checked.
pub(super) fn purity(tree: &Tree) -> Vec<Finding> {
    let mut findings = vec![];
    for (path, text) in tree.files().filter(|(path, _)| PURE.iter().any(|pure| path.starts_with(pure))) {
        for (number, line) in (1..).zip(text.lines()) {
            let code = line.split("//").next().unwrap_or("");
            for (name, instead) in IMPURE.iter().filter(|(name, _)| code.contains(name)) {
                findings.push(Finding::new(format!("{path}:{number}"), format!("names `{name}`; {instead}")));
            }
        }
    }
    findings
}

fn wants_header(path: &str) -> bool {
    let parts: Vec<&str> = path.split('/').collect();
    path.ends_with(".rs") && matches!(parts.as_slice(), ["crates", _, "src", ..] | ["xtask", "src", ..])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn source_without_header_comment_is_reported() {
        let tree = Tree::of(&[
            ("crates/heap/src/lib.rs", "//! The heap.\n"),
            ("crates/heap/src/alloc/bins.rs", "use std::fmt;\n//! Too late.\n"),
            ("crates/heap/tests/loom.rs", "#![cfg(loom)]\n"),
            ("fuzz/fuzz_targets/frame.rs", "#![no_main]\n"),
            ("xtask/src/main.rs", "fn main() {}\n"),
        ]);
        let locations: Vec<String> = headers(&tree).into_iter().map(|finding| finding.location).collect();
        assert_eq!(locations, ["crates/heap/src/alloc/bins.rs:1", "xtask/src/main.rs:1"]);
    }

    #[test]
    fn clock_lock_or_runtime_in_pure_code_is_reported() {
        let tree = Tree::of(&[
            (
                "crates/meta/src/lib.rs",
                "//! No Instant::now() here.\nuse std::time::Duration; // not SystemTime\n",
            ),
            ("crates/meta/src/group.rs", "fn f() { let t = Instant::now(); }\nuse std::sync::Mutex;\n"),
            ("crates/meta/tests/model.rs", "use std::sync::Mutex;\n"),
            ("crates/master/src/lib.rs", "use std::sync::Mutex;\n"),
            ("crates/node/src/logic/timing.rs", "use tokio::time;\n"),
        ]);
        let locations: Vec<String> = purity(&tree).into_iter().map(|finding| finding.location).collect();
        let expected =
            ["crates/meta/src/group.rs:1", "crates/meta/src/group.rs:2", "crates/node/src/logic/timing.rs:1"];
        assert_eq!(locations, expected);
    }

    #[test]
    fn overlong_file_is_reported() {
        let full = "line\n".repeat(LINES_MAX);
        let over = "line\n".repeat(LINES_MAX + 1);
        let tree = Tree::of(&[
            ("crates/heap/src/lib.rs", &full),
            ("crates/heap/tests/stress.rs", &over),
            ("docs/long.md", &over),
        ]);
        let findings = lengths(&tree);
        assert_eq!(findings.len(), 1);
        assert_eq!(findings[0].location, "crates/heap/tests/stress.rs");
        assert!(findings[0].what.starts_with("901 lines"), "{}", findings[0]);
    }
}
