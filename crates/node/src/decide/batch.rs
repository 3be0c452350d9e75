//! When what is to be written to disk is written: [`Batch`] closes by size, count or age, and [`Throttle`] keeps to a
//! bandwidth.

use std::time::Duration;

use moontide_types::MonoTime;

/// When a batch of offloads is written.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// A batch of so many bytes is large enough.
    pub bytes: u64,
    /// And one of so many records.
    pub records: usize,
    /// Nothing waits longer for company, if none comes.
    pub idle: Duration,
    /// Nothing waits longer than this, whatever comes.
    pub age: Duration,
}

impl Default for Limits {
    fn default() -> Limits {
        Limits {
            bytes: 64 << 20, // half a second's writing on a slow disk, and long enough for a fast one
            records: 4096,
            idle: Duration::from_millis(10),
            age: Duration::from_millis(200),
        }
    }
}

/// What waits to be written together.
#[derive(Clone, Copy, Debug, Default)]
pub struct Batch {
    bytes: u64,
    records: usize,
    first: Option<MonoTime>,
    last: MonoTime,
}

impl Batch {
    pub fn add(&mut self, bytes: u64, now: MonoTime) {
        self.bytes += bytes;
        self.records += 1;
        self.first.get_or_insert(now);
        self.last = now;
    }

    /// How long to wait for more; none: write it now.
    pub fn wait(&self, limits: &Limits, now: MonoTime) -> Option<Duration> {
        let first = self.first?;
        if self.bytes >= limits.bytes || self.records >= limits.records {
            return None;
        }
        let left = |limit: Duration, since: MonoTime| limit.checked_sub(now.since(since));
        let wait = left(limits.age, first)?.min(left(limits.idle, self.last)?);
        (wait > Duration::ZERO).then_some(wait)
    }
}

/// Keeps writing to a bandwidth: whoever has written more than its share waits.
#[derive(Clone, Copy, Debug)]
pub struct Throttle {
    /// 0 is no limit.
    bytes_per_s: u64,
    /// When what was written so far is paid for.
    paid: MonoTime,
}

/// What may be written at once after a pause.
const BURST: Duration = Duration::from_millis(250);

impl Throttle {
    pub fn new(bytes_per_s: u64) -> Throttle {
        Throttle { bytes_per_s, paid: MonoTime(0) }
    }

    /// So many bytes are about to be written: how long to wait before.
    pub fn take(&mut self, bytes: u64, now: MonoTime) -> Duration {
        if self.bytes_per_s == 0 {
            return Duration::ZERO;
        }
        let earliest = MonoTime(now.0.saturating_sub(BURST.as_nanos() as u64));
        let begin = self.paid.max(earliest);
        let nanos = u128::from(bytes) * 1_000_000_000 / u128::from(self.bytes_per_s);
        self.paid = begin.after(Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX)));
        begin.since(now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_batch_closes_by_size_count_idleness_or_age() {
        let ms = Duration::from_millis;
        let limits = Limits { bytes: 100, records: 3, idle: ms(10), age: ms(50) };
        let mut batch = Batch::default();
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
        assert_eq!(batch.wait(&limits, MonoTime(45 * MS)), Some(ms(5)), "age comes before idleness");
        assert_eq!(batch.wait(&limits, MonoTime(50 * MS)), None, "age");
    }

    #[test]
    fn writing_keeps_to_its_bandwidth_after_a_burst() {
        let mut throttle = Throttle::new(1_000_000);
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
        assert_eq!(Throttle::new(0).take(u64::MAX, MonoTime(0)), Duration::ZERO, "no limit");
    }
}
