//! Checks on vocabulary: one word for one thing, and the field's own words.
//!
//! Owns two lists. [`WORDS`] are metaphors and vague pronouns that once stood for standard terms. [`NAMES`] are settings,
//! flags, metrics and environment variables under names that no longer exist. Neither may come back.

use super::Finding;
use super::tree::Tree;

/// Words that no file may contain, as a whole word or as a part of an identifier, and what to write instead. Plurals and
/// other forms are listed on their own.
const WORDS: &[(&str, &str)] = &[
    ("anew", "again"),
    ("bequeath", "hand off"),
    ("bequest", "handoff"),
    ("bequests", "handoffs"),
    ("departure", "invalidation"),
    ("departures", "invalidations"),
    ("door", "listener, server or socket"),
    ("doors", "listeners, servers or sockets"),
    ("estate", "handoff"),
    ("estates", "handoffs"),
    ("heir", "new owner"),
    ("heirloom", "handoff"),
    ("heirs", "new owners"),
    ("mailbox", "queue"),
    ("nobody", "no thread, no process, no caller"),
    ("obedience", "command execution"),
    ("obey", "execute, adopt"),
    ("obeyed", "executed, adopted"),
    ("obeys", "executes, adopts"),
    ("ousted", "superseded"),
    ("planted", "a mutation"),
    ("platter", "disk image"),
    ("porter", "rendezvous thread"),
    ("puppet", "child process"),
    ("puppets", "child processes"),
    ("somebody", "another process, another caller"),
    ("throne", "master host"),
    ("troupe", "rank processes"),
    ("visitor", "client"),
    ("visitors", "clients"),
    ("whoever", "the caller, the reader, the node"),
];

/// Names of the public surface that are gone, and the names that took their place.
const NAMES: &[(&str, &str)] = &[
    ("--disk-engine", "--disk-io-engine"),
    ("--disk-load-threads", "--disk-read-threads"),
    ("--disk-order", "--disk-eviction-policy"),
    ("--local-stale-max", "--self-fence-timeout"),
    ("--reallocate-wait-ms", "--reallocation-delay-ms"),
    ("--slot-bytes", "--bytes-per-slot"),
    ("MOONTIDE_CONFORMANCE_NEEDS", "MOONTIDE_REQUIRE_DEVICE"),
    ("MOONTIDE_HISTORIES", "MOONTIDE_CASES"),
    ("MOONTIDE_MODEL_CASES", "MOONTIDE_CASES"),
    ("MOONTIDE_PLANTED", "MOONTIDE_MUTATION"),
    ("MOONTIDE_STORM", "MOONTIDE_STRESS"),
    ("[\"places\"]", "[\"locations\"]"),
    ("absence_max_ms", "node_rejoin_window_ms"),
    ("add_order", "add_command"),
    ("damaged_bytes", "corrupt_bytes"),
    ("disk_throttled_ms", "disk_throttled_seconds"),
    ("handled_requests", "requests"),
    ("header_taken_slots", "slots_used"),
    ("in_one_go", "in_one_round_trip"),
    ("is_in_place", "is_zero_copy"),
    ("local_stale_max", "self_fence_timeout"),
    ("memory_all_bytes", "memory_capacity_bytes"),
    ("moontide_master_stored_objects", "moontide_master_objects"),
    ("offloads_ordered", "offloads_started"),
    ("orders_outstanding", "commands_pending"),
    ("orders_refused", "commands_refused"),
    ("patience_ms", "lookup_timeout_ms"),
    ("reads_requested_keys", "read_keys"),
    ("reallocate_wait_ms", "reallocation_delay_ms"),
    ("shared_tokens", "cached_tokens"),
    ("space_all_units", "memory_capacity_bytes"),
];

/// Words that are names in a file: `nobody` is a user of Linux.
const EXCEPTIONS: &[(&str, &str)] = &[("crates/cli/tests/disk_cluster/unprivileged.rs", "nobody")];

/// The only file that may contain them.
const LISTS: &str = "xtask/src/tidy/words.rs";

/// No source, message definition or page contains a word or a name that was replaced.
pub(super) fn vocabulary(tree: &Tree) -> Vec<Finding> {
    let mut findings = vec![];
    for (path, text) in tree.files().filter(|(path, _)| is_checked(path)) {
        for (number, line) in (1..).zip(text.lines()) {
            let location = || format!("{path}:{number}");
            for word in words_of(line) {
                if let Ok(found) = WORDS.binary_search_by(|(banned, _)| (*banned).cmp(&word)) {
                    let (word, instead) = WORDS[found];
                    if EXCEPTIONS.contains(&(path, word)) {
                        continue;
                    }
                    findings.push(Finding::new(location(), format!("says `{word}`; write: {instead}")));
                }
            }
            for (name, instead) in NAMES.iter().filter(|(name, _)| line.contains(name)) {
                findings.push(Finding::new(location(), format!("names `{name}`, which is `{instead}` now")));
            }
        }
    }
    findings
}

fn is_checked(path: &str) -> bool {
    let kinds = [".rs", ".py", ".pyi", ".md", ".toml", ".proto"];
    kinds.iter().any(|kind| path.ends_with(kind)) && path != LISTS
}

/// The words of a line in lower case; identifiers are split where a person would: `shm_socket`, `ShmListener`.
fn words_of(line: &str) -> impl Iterator<Item = String> {
    line.split(|c: char| !c.is_ascii_alphabetic()).filter(|part| !part.is_empty()).flat_map(|part| {
        let mut words: Vec<String> = vec![];
        let mut was_lower = false;
        for letter in part.chars() {
            if words.is_empty() || (letter.is_ascii_uppercase() && was_lower) {
                words.push(String::new());
            }
            was_lower = letter.is_ascii_lowercase();
            words.last_mut().expect("one was pushed").push(letter.to_ascii_lowercase());
        }
        words
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_are_sorted() {
        assert!(WORDS.is_sorted() && NAMES.is_sorted());
    }

    #[test]
    fn replaced_word_is_reported_in_prose_and_in_identifiers() {
        let tree = Tree::of(&[
            ("crates/heap/src/a.rs", "struct DoorError;\nlet frame_door = 1; // indoors\n"),
            ("docs/b.md", "Outdoor adoration.\nWhoever asks.\n"),
            ("python/c.py", "def departures(): ...\n"),
            (LISTS, "door\n"),
            ("fuzz/corpus/d", "door\n"),
        ]);
        let places: Vec<String> = vocabulary(&tree).into_iter().map(|finding| finding.location).collect();
        assert_eq!(
            places,
            ["crates/heap/src/a.rs:1", "crates/heap/src/a.rs:2", "docs/b.md:2", "python/c.py:1"]
        );
    }

    #[test]
    fn replaced_name_is_reported_with_its_successor() {
        let tree = Tree::of(&[("docs/node.md", "Set `--slot-bytes` to the size of an object.\n")]);
        let findings = vocabulary(&tree);
        assert_eq!(findings.len(), 1);
        assert!(findings[0].what.contains("--bytes-per-slot"), "{}", findings[0]);
    }
}
