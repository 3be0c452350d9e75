//! Timing of transfers in the background: [`OffloadBatch`] closes by size, count or age, and [`ByteThrottle`] limits the
//! bandwidth.

use std::time::Duration;

use moontide_types::MonoTime;

/// Limits at which a batch of offloads is written.
#[derive(Clone, Copy, Debug)]
pub(crate) struct BatchLimits {
    /// Bytes that close a batch.
    pub(crate) bytes: u64,
    /// Records that close a batch.
    pub(crate) records: usize,
    /// Time without a new record after which a batch is written.
    pub(crate) idle: Duration,
    /// Maximum time that a record waits in a batch.
    pub(crate) age: Duration,
}

impl Default for BatchLimits {
    fn default() -> BatchLimits {
        BatchLimits {
            bytes: 64 << 20, // half a second of writes on a slow disk, and long enough for a fast one
            records: 4096,
            idle: Duration::from_millis(10),
            age: Duration::from_millis(200),
        }
    }
}

/// Records that wait to be written together.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct OffloadBatch {
    bytes: u64,
    records: usize,
    first: Option<MonoTime>,
    last: MonoTime,
}

impl OffloadBatch {
    pub(crate) fn add(&mut self, bytes: u64, now: MonoTime) {
        self.bytes += bytes;
        self.records += 1;
        self.first.get_or_insert(now);
        self.last = now;
    }

    /// Returns the time to wait for more records; `None`: write the batch now.
    pub(crate) fn wait(&self, limits: &BatchLimits, now: MonoTime) -> Option<Duration> {
        let first = self.first?;
        if self.bytes >= limits.bytes || self.records >= limits.records {
            return None;
        }
        let left = |limit: Duration, since: MonoTime| limit.checked_sub(now.since(since));
        let wait = left(limits.age, first)?.min(left(limits.idle, self.last)?);
        (wait > Duration::ZERO).then_some(wait)
    }
}

/// Limits writes to disk, or copies of other nodes' records, to a bandwidth: what is ahead of it waits.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ByteThrottle {
    /// 0: no limit.
    bytes_per_s: u64,
    /// Time at which the bytes so far are within the bandwidth.
    next_free: MonoTime,
}

/// Time for which unused bandwidth accumulates during a pause.
const BURST: Duration = Duration::from_millis(250);

impl ByteThrottle {
    pub(crate) fn new(bytes_per_s: u64) -> ByteThrottle {
        ByteThrottle { bytes_per_s, next_free: MonoTime(0) }
    }

    /// Accounts for `bytes` bytes and returns the time to wait before they are transferred.
    pub(crate) fn take(&mut self, bytes: u64, now: MonoTime) -> Duration {
        if self.bytes_per_s == 0 {
            return Duration::ZERO;
        }
        let earliest = MonoTime(now.0.saturating_sub(BURST.as_nanos() as u64));
        let begin = self.next_free.max(earliest);
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_s);
        self.next_free = begin.after(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)));
        begin.since(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn batch_closes_by_size_count_idle_time_or_age() {
        let ms = Duration::from_millis;
        let limits = BatchLimits { bytes: 100, records: 3, idle: ms(10), age: ms(50) };
        let mut batch = OffloadBatch::default();
        assert_eq!(batch.wait(&limits, MonoTime(0)), None, "nothing to wait for");
        batch.add(10, MonoTime(0));
        assert_eq!(batch.wait(&limits, MonoTime(0)), Some(ms(10)));
        assert_eq!(batch.wait(&limits, MonoTime(10 * MS)), None, "idle");
        let mut full = batch;
        full.add(90, MonoTime(MS));
        assert_eq!(full.wait(&limits, MonoTime(MS)), None, "size");
        let mut many = batch;
        many.add(1, MonoTime(MS));
        many.add(1, MonoTime(MS));
        assert_eq!(many.wait(&limits, MonoTime(MS)), None, "count");
        batch.add(1, MonoTime(45 * MS));
        assert_eq!(batch.wait(&limits, MonoTime(45 * MS)), Some(ms(5)), "age ends before idle");
        assert_eq!(batch.wait(&limits, MonoTime(50 * MS)), None, "age");
    }

    #[test]
    fn throttle_limits_bandwidth_after_burst() {
        let mut throttle = ByteThrottle::new(1_000_000);
        let second = 1_000 * MS;
        assert_eq!(throttle.take(250_000, MonoTime(second)), Duration::ZERO, "the burst");
        let mut waited = Duration::ZERO;
        let mut now = second;
        for _ in 0..100 {
            let wait = throttle.take(10_000, MonoTime(now));
            now += wait.as_nanos() as u64;
            waited += wait;
        }
        let about = waited.as_millis();
        assert!((980..=1000).contains(&about), "1,000,000 bytes took {about} ms");
        assert_eq!(ByteThrottle::new(0).take(u64::MAX, MonoTime(0)), Duration::ZERO, "no limit");
    }
}
