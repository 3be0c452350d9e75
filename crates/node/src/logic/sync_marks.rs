//! [`SyncMarks`]: when this node was last in sync with a master of each group, for the masters that come later.
//!
//! A master that gave up a node increments the group's number of exclusions before it acknowledges removals without the
//! node. So a node must be able to say which number it has seen, also after a restart: its disk has kept the records.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use moontide_proto::v1;
use moontide_types::{GroupId, MonoTime};

use super::groups::HostedGroups;

/// First line of the marks as text.
const MAGIC_LINE: &str = "moontide sync marks, version 1";

/// Marks of all groups.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct SyncMarks {
    marks: BTreeMap<GroupId, Mark>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Mark {
    exclusion: u32,
    /// `None`: by an earlier process.
    at: Option<MonoTime>,
}

/// Which responses to heartbeats of a session may be recorded: those to heartbeats that were sent after all segments were
/// mounted and reported. Responses to earlier ones do not speak of all segments.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SyncGate {
    first: Option<u64>,
}

impl SyncGate {
    /// The node mounts segments.
    pub(crate) fn close(&mut self) {
        self.first = None;
    }

    /// Sends a heartbeat; `complete`: all segments are mounted and reported.
    pub(crate) fn sends(&mut self, heartbeat: u64, complete: bool) {
        if complete {
            self.first.get_or_insert(heartbeat);
        }
    }

    /// Returns the groups of a response that may be recorded: those whose segments are mounted.
    pub(crate) fn filter(
        &self,
        heartbeat: u64,
        in_sync: Vec<(GroupId, u32)>,
        mounted: &HostedGroups,
    ) -> Vec<(GroupId, u32)> {
        let open = self.first.is_some_and(|first| heartbeat >= first);
        in_sync.into_iter().filter(|(group, _)| open && mounted.contains_key(group)).collect()
    }
}

impl SyncMarks {
    /// Records that the node was in sync with these groups at `at`. Returns whether a number has changed.
    pub(crate) fn record(&mut self, in_sync: &[(GroupId, u32)], at: MonoTime) -> bool {
        let mut changed = false;
        for &(group, exclusion) in in_sync {
            let before = self.marks.get(&group).map(|mark| mark.exclusion);
            // A lower number is from a master that no longer owns the group.
            if before.is_none_or(|before| before <= exclusion) {
                self.marks.insert(group, Mark { exclusion, at: Some(at) });
                changed |= before != Some(exclusion);
            }
        }
        changed
    }

    /// Adds the marks of another file by an earlier process. The higher number counts.
    pub(crate) fn merge(&mut self, other: SyncMarks) {
        for (group, mark) in other.marks {
            let own = self.marks.entry(group).or_insert(mark);
            if own.exclusion < mark.exclusion {
                *own = mark;
            }
        }
    }

    /// Returns the marks for a mount.
    pub(crate) fn to_wire(&self, now: MonoTime) -> Vec<v1::SyncMark> {
        let ago = |at| now.since(at).as_millis() as u64; // the clock has 64 bits of nanoseconds
        let wire = |(group, mark): (&GroupId, &Mark)| v1::SyncMark {
            group: group.0.into(),
            exclusion: mark.exclusion,
            ago_ms: mark.at.map_or(u64::MAX, ago),
        };
        self.marks.iter().map(wire).collect()
    }

    /// Returns the numbers as text.
    pub(crate) fn to_text(&self) -> String {
        let mut text = format!("{MAGIC_LINE}\n");
        for (group, mark) in &self.marks {
            writeln!(text, "{} {}", group.0, mark.exclusion).expect("a string accepts all writes");
        }
        text
    }

    /// Returns marks by an earlier process from their text; `None` if it is malformed.
    pub(crate) fn from_text(text: &str) -> Option<SyncMarks> {
        let mut lines = text.lines();
        if lines.next()? != MAGIC_LINE {
            return None;
        }
        let mark = |line: &str| {
            let (group, exclusion) = line.split_once(' ')?;
            Some((GroupId(group.parse().ok()?), Mark { exclusion: exclusion.parse().ok()?, at: None }))
        };
        Some(SyncMarks { marks: lines.map(mark).collect::<Option<_>>()? })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use moontide_types::Term;

    use super::*;

    #[test]
    fn marks_outlive_the_process_without_their_times() {
        let (mut marks, at) = (SyncMarks::default(), MonoTime(7));
        assert!(marks.to_wire(at).is_empty());
        assert!(marks.record(&[(GroupId(2), 0), (GroupId(9), 4)], at));
        let later = at.after(Duration::from_secs(1));
        assert!(!marks.record(&[(GroupId(9), 4)], later), "only the time has changed");
        assert!(!marks.record(&[(GroupId(9), 3)], later.after(Duration::from_secs(1))), "a deposed master");
        let wire = |group, exclusion, ago_ms| v1::SyncMark { group, exclusion, ago_ms };
        assert_eq!(marks.to_wire(later), [wire(2, 0, 1000), wire(9, 4, 0)]);
        let read = SyncMarks::from_text(&marks.to_text()).unwrap();
        assert_eq!(read.to_wire(later), [wire(2, 0, u64::MAX), wire(9, 4, u64::MAX)]);
    }

    #[test]
    fn only_responses_after_complete_reports_of_mounted_groups_count() {
        let mounted: HostedGroups = [(GroupId(1), Term::ZERO)].into();
        let (mut gate, in_sync) = (SyncGate::default(), vec![(GroupId(1), 5), (GroupId(2), 5)]);
        let check = |gate: &SyncGate, heartbeat, expected: &[(GroupId, u32)]| {
            assert_eq!(gate.filter(heartbeat, in_sync.clone(), &mounted), expected, "heartbeat {heartbeat}");
        };
        gate.sends(1, false);
        check(&gate, 1, &[]);
        gate.sends(2, true);
        gate.sends(3, true);
        check(&gate, 1, &[]);
        check(&gate, 2, &[(GroupId(1), 5)]);
        check(&gate, 3, &[(GroupId(1), 5)]);
        gate.close();
        check(&gate, 3, &[]);
        gate.sends(4, false);
        gate.sends(5, true);
        check(&gate, 4, &[]);
        check(&gate, 5, &[(GroupId(1), 5)]);
    }

    #[test]
    fn malformed_text_is_rejected() {
        for line in ["1", "x 1", "1 -1", "70000 1", ""] {
            assert_eq!(SyncMarks::from_text(&format!("{MAGIC_LINE}\n2 3\n{line}\n")), None, "{line:?}");
        }
        assert_eq!(SyncMarks::from_text(""), None);
        assert_eq!(SyncMarks::from_text("other\n1 2\n"), None);
        assert_eq!(SyncMarks::from_text(MAGIC_LINE), Some(SyncMarks::default()));
    }
}
