//! Checks that a simulated world runs what ships: shipped code takes what a world replaces from `rt` and `tasks`, does not ask
//! whether it is simulated, and is not repeated by the simulation.

use super::Finding;
use super::tree::Tree;

/// Code that simulated worlds run.
const RUNS_IN_WORLDS: &[&str] = &["crates/disk/src/", "crates/node/src/"];

/// What stays outside: the operating system's disk, the runtime and sockets of an ordinary node, and tests.
const OUTSIDE: &[&str] = &[
    "crates/disk/src/os",
    "crates/disk/src/backend/conformance.rs",
    "crates/node/src/admin.rs",
    "crates/node/src/node.rs",
];

/// Names that no world replaces, each module with its names and what replaces them.
const NOT_REPLACED: &[(&str, &[&str], &str)] = &[
    ("std", &["thread"], "moontide_rt::thread"),
    (
        "std::sync",
        &["Barrier", "Condvar", "Mutex", "Once", "OnceLock", "RwLock", "mpsc"],
        "moontide_rt::sync",
    ),
    ("parking_lot", &["Condvar", "Mutex", "RwLock"], "moontide_rt::sync"),
    ("std::time", &["Instant", "SystemTime"], "moontide_rt::time"),
    ("std::collections", &["HashMap", "HashSet"], "moontide_rt::collections"),
    ("tokio", &["net", "spawn", "task", "time"], "moontide_tasks"),
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
        for (of, names, instead) in NOT_REPLACED {
            for (start, name) in names_of(&code, of).filter(|(_, name)| names.contains(name)) {
                let what =
                    format!("names `{of}::{name}`, which no simulated world replaces; use `{instead}`");
                findings.push(Finding::new(place(path, &code, start), what));
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
        let code = without_comments(text);
        let at = |offset: usize| place(path, &code, offset);
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

fn without_comments(text: &str) -> String {
    text.lines().map(|line| format!("{}\n", line.split("//").next().unwrap_or_default())).collect()
}

fn place(path: &str, code: &str, offset: usize) -> String {
    format!("{path}:{}", 1 + code[..offset].matches('\n').count())
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
            ("crates/disk/src/os/uring.rs", "use std::thread;\n"),
            ("crates/master/src/server.rs", "use std::thread;\n"),
        ]);
        let locations: Vec<String> =
            leaves_are_replaced(&tree).into_iter().map(|finding| finding.location).collect();
        assert_eq!(
            locations,
            ["crates/disk/src/backend.rs:1", "crates/node/src/owner.rs:2", "crates/node/src/owner.rs:1"]
        );
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
}
