//! Checks that a simulated world runs what ships: shipped code takes what a world replaces from `rt` and `tasks`, does not ask
//! whether it is simulated, and is not repeated by the simulation.

use super::Finding;
use super::tree::Tree;

/// Code that simulated worlds run. They run others, too: parts of `heap` and `transfer`, next to code for processes and sockets,
/// which they do not run.
const RUNS_IN_WORLDS: &[&str] = &["crates/disk/src/", "crates/node/src/"];

/// What stays outside: the operating system's disk, the runtime and sockets of an ordinary node, and tests.
const OUTSIDE: &[&str] = &[
    "crates/disk/src/os",
    "crates/disk/src/backend/conformance.rs",
    "crates/node/src/admin.rs",
    "crates/node/src/node.rs",
];

/// Paths that no world replaces, each with what replaces it.
const NOT_REPLACED: &[(&str, &str)] = &[
    ("std::thread", "moontide_rt::thread"),
    ("std::sync::Barrier", "moontide_rt::sync"),
    ("std::sync::Condvar", "moontide_rt::sync::Condvar"),
    ("std::sync::Mutex", "moontide_rt::sync::Mutex"),
    ("std::sync::RwLock", "moontide_rt::sync::RwLock"),
    ("std::sync::mpsc", "moontide_rt::sync::mpsc"),
    ("parking_lot", "moontide_rt::sync"),
    ("std::time::Instant", "moontide_rt::time::Instant"),
    ("std::time::SystemTime", "moontide_rt::time"),
    ("std::collections::HashMap", "moontide_rt::collections::HashMap"),
    ("std::collections::HashSet", "moontide_rt::collections::HashSet"),
    ("tokio::net", "moontide_tasks"),
    ("tokio::runtime", "moontide_tasks"),
    ("tokio::spawn", "moontide_tasks::spawn"),
    ("tokio::task", "moontide_tasks"),
    ("tokio::time", "moontide_tasks::time"),
];

/// Code that worlds run has no clock, thread, lock or timer of its own: it would wait in real time, or see an order that does
/// not follow from the seed. Comments and unit tests at the end of a file are not checked.
pub(super) fn leaves_are_replaced(tree: &Tree) -> Vec<Finding> {
    let runs = |path: &str| RUNS_IN_WORLDS.iter().any(|place| path.starts_with(place));
    let is_test = |path: &str| path.contains("/tests/") || path.ends_with("/tests.rs");
    let is_outside = |path: &str| OUTSIDE.iter().any(|place| path.starts_with(place)) || is_test(path);
    let mut findings = vec![];
    for (path, text) in tree.files().filter(|(path, _)| runs(path) && !is_outside(path)) {
        let shipped = text.split("#[cfg(test)]\nmod tests {").next().unwrap_or(text);
        let code = without_comments(shipped);
        for of in ["std", "tokio", "parking_lot"] {
            for (start, path_there) in paths_of(&code, of) {
                // Also a module, or all of it, by which such a name can be reached.
                let reaches = |name: &str| {
                    let module = path_there.trim_end_matches("::*");
                    name == path_there
                        || path_there.starts_with(&format!("{name}::"))
                        || name.starts_with(&format!("{module}::"))
                            && (module != path_there || module.contains("::"))
                };
                for (name, instead) in NOT_REPLACED.iter().filter(|(name, _)| reaches(name)).take(1) {
                    let what = format!(
                        "names `{path_there}`, but no simulated world replaces `{name}`; use `{instead}`"
                    );
                    findings.push(Finding::new(place(path, &code, start), what));
                }
            }
        }
    }
    findings
}

/// Where `cfg(sim)` may stand, besides tests: the leaves that a simulated world replaces, and what runs only in one.
const SIMULATED: &[&str] = &["crates/rt/src/", "crates/tasks/src/", "sim/src/", "xtask/"];

/// Names of shipped crates that the simulation may use. What it cannot name it cannot decide about: sessions, commands,
/// memory and disk tier of a node run as shipped. Of the transfers it carries the requests from node to node.
const NAMED_BY_SIMULATION: &[(&str, &[&str])] = &[
    (
        "moontide_node",
        &["testing", "BackendKind", "DiskConfig", "EvictionPolicy", "SELF_FENCE_TIMEOUT_DEFAULT"],
    ),
    ("moontide_disk", &["SimulatedDisk", "Faults", "Times"]),
    (
        "moontide_transfer",
        &[
            "CarriedEngine",
            "CarriedRequest",
            "Carrier",
            "EngineKind",
            "Owner",
            "Peer",
            "PeerIdentity",
            "Target",
            "serve_read",
            "serve_write",
        ],
    ),
];

/// Shipped code does not ask whether it is simulated, and the simulation does not repeat what a node does.
pub(super) fn simulated_code_is_shipped(tree: &Tree) -> Vec<Finding> {
    let mut findings = vec![];
    for (path, text) in tree.files().filter(|(path, _)| path.ends_with(".rs")) {
        let code = without_comments(text);
        let at = |offset: usize| place(path, &code, offset);
        if !SIMULATED.iter().any(|place| path.starts_with(place)) && !path.contains("/tests/") {
            let attributes = code.match_indices("cfg").filter(|(start, _)| {
                let attribute = code[*start..].split([']', ';', '{']).next().unwrap_or_default();
                attribute.split(|c| !is_word(c)).any(|word| word == "sim")
            });
            let what = "asks whether it is simulated; replace a name of `rt` or `tasks` instead";
            findings.extend(attributes.map(|(start, _)| Finding::new(at(start), what)));
        }
        if path.starts_with("sim/src/") {
            for (of, allowed) in NAMED_BY_SIMULATION {
                let is_allowed =
                    |path: &str| path.split("::").nth(1).is_some_and(|name| allowed.contains(&name));
                for (start, path) in paths_of(&code, of).iter().filter(|(_, path)| !is_allowed(path)) {
                    let what =
                        format!("names `{path}`; the simulation runs nodes and repeats none of their parts");
                    findings.push(Finding::new(at(*start), what));
                }
            }
        }
    }
    findings
}

fn without_comments(text: &str) -> String {
    text.lines().map(|line| format!("{}\n", line.split("//").next().unwrap_or_default())).collect()
}

fn place(path: &str, code: &str, offset: usize) -> String {
    format!("{path}:{}", 1 + code[..offset].matches('\n').count())
}

/// Paths in the code that begin with the crate `of`, each with its place. Braces are expanded.
fn paths_of(code: &str, of: &str) -> Vec<(usize, String)> {
    let mut found = vec![];
    for (start, _) in code.match_indices(&format!("{of}::")) {
        // In quotes it is the name of a deliberate bug; a longer word is another crate.
        let is_path = code[..start].chars().next_back().is_none_or(|c| c != '"' && c != ':' && !is_word(c));
        if is_path {
            let mut paths = vec![];
            expand(&code[start + of.len() + 2..], of, &mut paths);
            found.extend(paths.into_iter().map(|path| (start, path)));
        }
    }
    found
}

fn is_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

/// Adds the paths of the tree with which the code begins, below `prefix`. Returns the code after it.
fn expand<'a>(code: &'a str, prefix: &str, paths: &mut Vec<String>) -> &'a str {
    let code = code.trim_start();
    if let Some(mut rest) = code.strip_prefix('{') {
        loop {
            rest = expand(rest, prefix, paths);
            // After a tree there may be another name for it.
            let Some(end) = rest.find([',', '}']) else { return "" };
            let ends = rest[end..].starts_with('}');
            rest = rest[end + 1..].trim_start();
            if ends {
                return rest;
            }
        }
    }
    let end = code.find(|c| !is_word(c) && c != '*').unwrap_or(code.len());
    let (name, rest) = code.split_at(end);
    if name.is_empty() {
        return code;
    }
    let path = format!("{prefix}::{name}");
    match rest.strip_prefix("::").filter(|below| !below.starts_with('<')) {
        Some(below) => expand(below, &path, paths),
        None => {
            paths.push(path);
            rest
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_or_lock_that_no_world_replaces_is_reported() {
        let tree = Tree::of(&[
            (
                "crates/node/src/owner.rs",
                "use std::time::{Duration, Instant}; // std::thread\nuse std::thread;\n#[cfg(test)]\nmod tests {\nstd::thread::sleep\n",
            ),
            ("crates/disk/src/backend.rs", "fn f() { parking_lot::Mutex::new(()); }\n"),
            ("crates/disk/src/a.rs", "use std::{fmt, sync::{atomic::{AtomicU64, Ordering}, Mutex}};\n"),
            ("crates/disk/src/b.rs", "use std::sync::*;\n"),
            ("crates/disk/src/c.rs", "use std::time;\n"),
            ("crates/disk/src/d.rs", "use std::sync::{Arc, atomic::AtomicU64};\nuse tokio::sync::watch;\n"),
            ("crates/disk/src/e.rs", "moontide_rt::sync::mpsc::channel();\nmoontide_std::thread::x();\n"),
            ("crates/disk/src/os/uring.rs", "use std::thread;\n"),
            ("crates/master/src/server.rs", "use std::thread;\n"),
        ]);
        let locations: Vec<String> =
            leaves_are_replaced(&tree).into_iter().map(|finding| finding.location).collect();
        assert_eq!(
            locations,
            [
                "crates/disk/src/a.rs:1",
                "crates/disk/src/b.rs:1",
                "crates/disk/src/backend.rs:1",
                "crates/disk/src/c.rs:1",
                "crates/node/src/owner.rs:1",
                "crates/node/src/owner.rs:2"
            ]
        );
    }

    #[test]
    fn code_that_asks_whether_it_is_simulated_is_reported() {
        let tree = Tree::of(&[
            ("crates/rt/src/sync.rs", "#[cfg(sim)]\n"),
            ("crates/disk/tests/crash_fibers.rs", "#![cfg(sim)]\n"),
            (
                "crates/node/src/owner.rs",
                "//! cfg(sim)\n#[cfg(not(sim))]\n#[cfg(any(\n    test,\n    sim,\n))]\n",
            ),
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
        assert!(
            findings[1].starts_with("sim/src/node.rs:2: names `moontide_node::logic::x`"),
            "{findings:?}"
        );
    }
}
