//! [`FlushMonitor`]: how long a stopping node waits for its masters to have its objects written to its disk.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use moontide_proto::v1::FlushStatus;
use moontide_types::MonoTime;

/// Time without an answer after which the node no longer waits for a master: several heartbeats of a flush.
const SILENCE_MAX: Duration = Duration::from_secs(2);

/// Answers of the masters during a flush.
#[derive(Debug, Default)]
pub(crate) struct FlushMonitor {
    /// Last answer of each master, and the time since which it is silent.
    masters: BTreeMap<Arc<str>, (Option<FlushStatus>, MonoTime)>,
}

impl FlushMonitor {
    /// Records the answer of a master.
    pub(crate) fn answered(&mut self, master: &Arc<str>, status: FlushStatus, now: MonoTime) {
        self.masters.insert(Arc::clone(master), (Some(status), now));
    }

    /// Forgets the answer of a master that responds, but does not know all objects: groups have moved to it, and are not
    /// reported yet.
    pub(crate) fn outdated(&mut self, master: &Arc<str>, now: MonoTime) {
        self.masters.insert(Arc::clone(master), (None, now));
    }

    /// Whether there is nothing to wait for: each of these masters has nothing left to write, or does not answer. The
    /// silence of a master begins when it is first named here.
    pub(crate) fn is_over(&mut self, masters: &[Arc<str>], now: MonoTime) -> bool {
        masters.iter().fold(true, |over, master| {
            let (status, since) = *self.masters.entry(Arc::clone(master)).or_insert((None, now));
            over && (status.is_some_and(|status| status.objects == 0) || now.since(since) >= SILENCE_MAX)
        })
    }

    /// Whether each of these masters has nothing left to write.
    pub(crate) fn is_complete(&self, masters: &[Arc<str>]) -> bool {
        masters.iter().all(|master| self.has_nothing_left(master))
    }

    fn has_nothing_left(&self, master: &Arc<str>) -> bool {
        let status = self.masters.get(master).and_then(|&(status, _)| status);
        status.is_some_and(|status| status.objects == 0)
    }

    /// Returns the sum over these masters.
    pub(crate) fn sum(&self, masters: &[Arc<str>]) -> FlushStatus {
        let mut sum = FlushStatus::default();
        let statuses = masters.iter().filter_map(|master| self.masters.get(master)?.0);
        for status in statuses {
            sum.objects = sum.objects.saturating_add(status.objects);
            sum.bytes = sum.bytes.saturating_add(status.bytes);
            sum.refused = sum.refused.saturating_add(status.refused);
        }
        sum
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn left(objects: u64) -> FlushStatus {
        FlushStatus { objects, bytes: objects * 10, refused: 1 }
    }

    #[test]
    fn flush_is_over_when_each_master_has_nothing_left_or_is_silent() {
        let masters: [Arc<str>; 2] = ["a".into(), "b".into()];
        let mut monitor = FlushMonitor::default();
        assert!(monitor.is_over(&[], MonoTime(0)), "no master, no command");
        assert!(!monitor.is_over(&masters, MonoTime(0)));
        assert!(!monitor.is_over(&masters, MonoTime(1999 * MS)));
        assert!(monitor.is_over(&masters, MonoTime(2000 * MS)), "none has answered");
        monitor.answered(&masters[0], left(3), MonoTime(1500 * MS));
        monitor.answered(&masters[1], left(0), MonoTime(1500 * MS));
        assert_eq!(monitor.sum(&masters), FlushStatus { objects: 3, bytes: 30, refused: 2 });
        assert!(!monitor.is_over(&masters, MonoTime(3499 * MS)));
        assert!(monitor.is_over(&masters, MonoTime(3500 * MS)), "a master that stopped to answer");
        assert!(!monitor.is_complete(&masters) && monitor.is_complete(&masters[1..]));
        monitor.answered(&masters[0], left(0), MonoTime(1600 * MS));
        assert!(monitor.is_over(&masters, MonoTime(1600 * MS)));
        assert!(monitor.is_over(&masters[..1], MonoTime(1600 * MS)));
    }

    #[test]
    fn master_that_takes_over_during_the_flush_is_waited_for() {
        let (old, new): (Arc<str>, Arc<str>) = ("old".into(), "new".into());
        let mut monitor = FlushMonitor::default();
        assert!(!monitor.is_over(&[Arc::clone(&old)], MonoTime(0)));
        monitor.answered(&old, left(3), MonoTime(5000 * MS));
        let masters = [new];
        assert!(!monitor.is_over(&masters, MonoTime(5000 * MS)), "its silence has just begun");
        assert!(!monitor.is_over(&masters, MonoTime(6999 * MS)));
        monitor.answered(&masters[0], left(0), MonoTime(6999 * MS));
        assert!(monitor.is_over(&masters, MonoTime(6999 * MS)));
        monitor.outdated(&masters[0], MonoTime(7000 * MS));
        assert!(!monitor.is_over(&masters, MonoTime(7000 * MS)), "it got more groups");
        monitor.outdated(&masters[0], MonoTime(8000 * MS));
        assert!(!monitor.is_complete(&masters));
        assert!(!monitor.is_over(&masters, MonoTime(9999 * MS)), "it responds while it gets the reports");
        assert!(monitor.is_over(&masters, MonoTime(10000 * MS)));
        assert_eq!(monitor.sum(&masters).objects, 0, "the old master is not counted");
    }
}
