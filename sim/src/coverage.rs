//! [`COINCIDENCES`]: what a campaign of seeds has to reach. Shipped code and the world count them by name. [`MUTATIONS`]:
//! deliberate bugs that it has to detect.

/// Coincidences that were, or could be, the cause of a defect. A name that no place has any more is never reached, and fails
/// the campaign.
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
    "about to write removals",
    "about to take a snapshot",
];

/// Deliberate bugs in shipped code, each of which some of the first thousand seeds must detect.
pub const MUTATIONS: &[&str] = &[
    // An acknowledged removal returns.
    "reclaim-answers-kill",
    "moontide_node::disk::test_hooks::KilledUntold",
    "moontide_node::disk::test_hooks::KilledAbsentUntold",
    "moontide_node::disk::test_hooks::JobsNotAwaited",
    "refused-kill-believed",
    "moontide_disk::mutation::TombstoneUnsynced",
];
