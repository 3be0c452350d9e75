//! The clock of the process.
//!
//! In an ordinary build [`Instant`] is that of std. With `--cfg sim` it is a type of its own, whose [`Instant::now`] in a
//! simulated world returns the world's virtual time. The type differs from std's on purpose: code that still reads std's
//! clock does not compile together with code that reads this one.

#[cfg(sim)]
pub use crate::sim::Instant;
#[cfg(not(sim))]
pub use std::time::Instant;

/// Returns the present time.
#[inline]
#[must_use]
pub fn now() -> Instant {
    Instant::now()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn instant_arithmetic_is_that_of_std() {
        let start = now();
        let later = start + Duration::from_millis(1500);
        assert_eq!(later - start, Duration::from_millis(1500));
        assert_eq!(later - Duration::from_millis(1500), start);
        assert_eq!(later.duration_since(start), Duration::from_millis(1500));
        // An earlier time is no negative duration.
        assert_eq!(start.duration_since(later), Duration::ZERO);
        assert_eq!(start.saturating_duration_since(later), Duration::ZERO);
        assert_eq!(start.checked_duration_since(later), None);
        assert_eq!(start.checked_add(Duration::MAX), None);
        assert_eq!(start.checked_sub(Duration::MAX), None);
        assert!(now() >= start && start.elapsed() < Duration::from_secs(3600));
    }
}
