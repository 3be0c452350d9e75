//! Checks on source files: each opens with a header comment, none is too long, pure code neither reads a clock nor
//! blocks, and a simulated world runs what ships.

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

/// Where `cfg(sim)` may stand: the leaves that a simulated world replaces, and what runs only in one.
const SIMULATED: &[&str] = &["crates/rt/src/", "crates/tasks/src/", "sim/src/", "/tests/", "xtask/"];

/// Names of shipped crates that the simulation may use. What it cannot name it cannot decide about: sessions, commands,
/// memory and disk tier of a node run as shipped.
const NAMED_BY_SIMULATION: &[(&str, &[&str])] = &[
    (
        "moontide_node",
        &["testing", "BackendKind", "DiskConfig", "EvictionPolicy", "SELF_FENCE_TIMEOUT_DEFAULT"],
    ),
    ("moontide_disk", &["SimulatedDisk", "Faults", "Times"]),
    ("moontide_transfer", &["Owner", "PeerIdentity", "Target", "serve_read", "serve_write"]),
];

/// Shipped code does not ask whether it is simulated, and the simulation does not repeat what a node does.
pub(super) fn simulated_code_is_shipped(tree: &Tree) -> Vec<Finding> {
    let mut findings = vec![];
    for (path, text) in tree.files().filter(|(path, _)| path.ends_with(".rs")) {
        let code: String = text.lines().map(|line| format!("{}\n", without_comment(line))).collect();
        let at = |offset: usize| format!("{path}:{}", 1 + code[..offset].matches('\n').count());
        if !SIMULATED.iter().any(|place| path.contains(place)) {
            let attributes = code.match_indices("cfg").filter(|(start, _)| {
                let line = code[*start..].lines().next().unwrap_or_default();
                line.split(|c: char| !c.is_alphanumeric() && c != '_').any(|word| word == "sim")
            });
            let what = "asks whether it is simulated; replace a name of `rt` or `tasks` instead";
            findings.extend(attributes.map(|(start, _)| Finding::new(at(start), what)));
        }
        if path.starts_with("sim/src/") {
            for (of, allowed) in NAMED_BY_SIMULATION {
                for (start, name) in names_of(&code, of).filter(|(_, name)| !allowed.contains(name)) {
                    let what = format!(
                        "names `{of}::{name}`; the simulation runs nodes and repeats none of their parts"
                    );
                    findings.push(Finding::new(at(start), what));
                }
            }
        }
    }
    findings
}

fn without_comment(line: &str) -> &str {
    line.split("//").next().unwrap_or("")
}

/// Names that follow `of::` in the code, alone or in braces, each with its place.
fn names_of<'a>(code: &'a str, of: &str) -> impl Iterator<Item = (usize, &'a str)> {
    let of = format!("{of}::");
    // In quotes it is the name of a deliberate bug.
    let starts = code.match_indices(&of).filter(|(start, _)| !code[..*start].ends_with('"'));
    let starts: Vec<usize> = starts.map(|(start, _)| start + of.len()).collect();
    starts.into_iter().flat_map(move |start| {
        let rest = &code[start..];
        let list = match rest.strip_prefix('{') {
            Some(inner) => inner.split('}').next().unwrap_or(inner),
            None => rest.split(|c: char| !c.is_alphanumeric() && c != '_').next().unwrap_or(rest),
        };
        let names = list.split(',').map(|name| name.trim().split("::").next().unwrap_or_default());
        names.filter(|name| !name.is_empty()).map(move |name| (start, name)).collect::<Vec<_>>()
    })
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
    fn code_that_asks_whether_it_is_simulated_is_reported() {
        let tree = Tree::of(&[
            ("crates/rt/src/sync.rs", "#[cfg(sim)]\n"),
            ("crates/disk/tests/crash_fibers.rs", "#![cfg(sim)]\n"),
            ("crates/node/src/owner.rs", "//! cfg(sim)\n#[cfg(not(sim))]\n#[cfg(any(test, sim))]\n"),
        ]);
        let findings = simulated_code_is_shipped(&tree);
        let locations: Vec<String> = findings.into_iter().map(|finding| finding.location).collect();
        assert_eq!(locations, ["crates/node/src/owner.rs:2", "crates/node/src/owner.rs:3"]);
    }

    #[test]
    fn part_of_a_node_in_the_simulation_is_reported() {
        let tree = Tree::of(&[
            (
                "sim/src/plan.rs",
                "use moontide_disk::{Faults, Times};\nuse moontide_node::testing::TestNode;\n",
            ),
            (
                "sim/src/node.rs",
                "use moontide_disk::{Faults, BucketBackend};\nlet it = moontide_node::logic::x();\n",
            ),
            ("sim/tests/seeds.rs", "use moontide_disk::BucketBackend;\n"),
        ]);
        let mut findings: Vec<String> =
            simulated_code_is_shipped(&tree).iter().map(ToString::to_string).collect();
        findings.sort();
        assert_eq!(findings.len(), 2, "{findings:?}");
        assert!(
            findings[0].starts_with("sim/src/node.rs:1: names `moontide_disk::BucketBackend`"),
            "{findings:?}"
        );
        assert!(findings[1].starts_with("sim/src/node.rs:2: names `moontide_node::logic`"), "{findings:?}");
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
