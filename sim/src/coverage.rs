//! [`COINCIDENCES`]: what a campaign of seeds has to reach. Shipped code and the world count them by name. [`MUTATIONS`]:
//! deliberate bugs that it has to detect.

/// Coincidences that were, or could be, the cause of a defect.
pub const COINCIDENCES: &[&str] = &[
    "reclaim while a removal is not durable",
    "power lost while a removal is not durable",
    "process killed while a removal is not durable",
    "process ends while a removal waits for another attempt",
    "write ends after its session",
    "write ends after the removal of its version",
    "write ends after its session and a removal of its version",
    "kill while a writer has the pin",
    "kill of a version that is not in its slot",
    "record evicted or removed between scan and notice",
    "record removed or evicted while it is read from disk",
    "promotion cancelled between begin and publication",
    "copy cancelled before its begin",
    "copy cancelled between begin and publication",
    "source of a copy is gone",
    "record copied to the host of its readers",
    "record moved for the balance of the nodes",
    "log of removals replaced after a failed write",
    "disk full at a removal",
    "self-fence while a peer reads",
    "stream broken with results that are not acknowledged",
    "grant of an earlier term",
    "change during a snapshot",
    "node stops with jobs of its disk",
];

/// Places in shipped code at which a run may delay the thread that is there.
pub(crate) const PLACES: &[&str] = &[
    "about to write pinned records",
    "about to tell of written records",
    "about to finish an eviction",
    "told of an eviction",
    "about to tell of a missed record",
    "about to publish read records",
    "about to begin a promoted record",
    "about to publish a promoted record",
    "about to tell of found records",
    "about to describe records",
    "about to begin a copied record",
    "about to publish copied records",
    "about to tell of copied records",
    "about to write removals",
    "about to take a snapshot",
];

/// Deliberate bugs in shipped code. `--mutations` fails unless the seeds detect each.
pub const MUTATIONS: &[&str] = &[
    // An acknowledged removal returns.
    "reclaim-answers-kill",
    "moontide_node::disk::test_hooks::KilledUntold",
    "moontide_node::disk::test_hooks::KilledAbsentUntold",
    "moontide_node::disk::test_hooks::JobsNotAwaited",
    "refused-kill-believed",
    "moontide_disk::mutation::TombstoneUnsynced",
];

#[cfg(test)]
mod tests {
    use std::path::{Path, PathBuf};

    use super::*;

    fn add_sources(dir: &Path, texts: &mut String) {
        let mut paths: Vec<PathBuf> =
            std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
        paths.sort();
        for path in paths {
            if path.is_dir() {
                add_sources(&path, texts);
            } else if path.extension().is_some_and(|extension| extension == "rs")
                && !path.ends_with("sim/src/coverage.rs")
            {
                texts.push_str(&std::fs::read_to_string(path).unwrap());
            }
        }
    }

    /// A campaign would wait for a renamed place without notice.
    #[test]
    fn every_place_and_coincidence_is_named_in_the_code() {
        let root = Path::new(env!("CARGO_MANIFEST_DIR"));
        let mut texts = String::new();
        for crate_dir in ["../crates/disk/src", "../crates/node/src", "src"] {
            add_sources(&root.join(crate_dir), &mut texts);
        }
        for name in PLACES.iter().chain(COINCIDENCES) {
            assert!(texts.contains(&format!("{name:?}")), "{name}");
        }
    }
}
