//! [`StoreMetrics`]: what a client counts.
//!
//! Sums that hold: `requested = hits_local + hits_remote + hits_disk + misses + failed`, each counted once per object
//! that a get, a range or a reference asked for, when its answer is known.
//!
//! Reads in place take a quarter of a microsecond; a counter that two threads share would cost them as much again. So
//! every thread counts those on a line of its own, and whoever asks adds them up.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::registry::Registry;

/// One thread's reads in place.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct Lane {
    hits: AtomicU64,
    bytes: AtomicU64,
}

impl Lane {
    /// Counts a read. Only the lane's own thread calls this, so that a load and a store are enough.
    #[inline]
    pub(crate) fn hit(&self, bytes: u64) {
        self.hits.store(self.hits.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        self.bytes.store(self.bytes.load(Ordering::Relaxed) + bytes, Ordering::Relaxed);
    }
}

#[derive(Debug, Default)]
struct Lanes {
    open: Vec<Arc<Lane>>,
    /// Of threads that have ended.
    hits: u64,
    bytes: u64,
}

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident;)*) => {
        /// Counters of a store.
        #[derive(Clone, Debug, Default)]
        pub struct StoreMetrics {
            lanes: Arc<Mutex<Lanes>>,
            $($(#[doc = $doc])+ pub(crate) $name: Counter,)*
        }

        /// What a store has counted.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct StoreStats {
            $($(#[doc = $doc])+ pub $name: u64,)*
        }

        impl StoreMetrics {
            /// The counters now.
            pub fn stats(&self) -> StoreStats {
                let (hits, bytes) = self.lanes();
                let mut stats = StoreStats { $($name: self.$name.get(),)* };
                stats.requested += hits;
                stats.hits_local += hits;
                stats.bytes_read += bytes;
                stats
            }
        }

        impl StoreStats {
            /// Every counter by its name.
            pub fn by_name(&self) -> Vec<(&'static str, u64)> {
                self.each().into_iter().map(|(name, _, value)| (name, value)).collect()
            }

            /// Names, meanings and values.
            fn each(&self) -> Vec<(&'static str, &'static str, u64)> {
                vec![$((stringify!($name), concat!($($doc),+), self.$name),)*]
            }
        }
    };
}

counters! {
    /// Objects asked for.
    requested;
    /// Of these, read in memory of this host.
    hits_local;
    /// Of these, read over a link.
    hits_remote;
    /// Of these, read from a disk.
    hits_disk;
    /// Of these, not there.
    misses;
    /// Of these, ended with an error.
    failed;
    /// Bytes of all hits.
    bytes_read;
    /// Objects put.
    puts;
    /// Of these, those that were there already.
    puts_existed;
    /// Of these, those that failed.
    puts_failed;
    /// Bytes of objects that were stored.
    bytes_written;
    /// Reads whose bytes did not match their digest.
    corrupt;
    /// Attempts after the first.
    retries;
    /// Second replicas asked beside a slow first one.
    hedges;
    /// Of these, those that were faster.
    hedges_won;
    /// Gets that shared the fetch of another thread.
    joined;
    /// Remembered places that were used.
    locations_used;
    /// Places that were not right any more.
    locations_stale;
}

impl StoreMetrics {
    /// A lane for a thread.
    pub(crate) fn lane(&self) -> Arc<Lane> {
        let mut lanes = self.lanes.lock();
        let Lanes { open, hits, bytes } = &mut *lanes;
        open.retain(|lane| {
            // Nobody but this list has it: its thread has ended.
            let ended = Arc::strong_count(lane) == 1;
            if ended {
                *hits += lane.hits.load(Ordering::Acquire);
                *bytes += lane.bytes.load(Ordering::Acquire);
            }
            !ended
        });
        let lane = Arc::<Lane>::default();
        open.push(Arc::clone(&lane));
        lane
    }

    fn lanes(&self) -> (u64, u64) {
        let lanes = self.lanes.lock();
        let sum = |field: fn(&Lane) -> &AtomicU64| {
            lanes.open.iter().map(|lane| field(lane).load(Ordering::Relaxed)).sum::<u64>()
        };
        (lanes.hits + sum(|lane| &lane.hits), lanes.bytes + sum(|lane| &lane.bytes))
    }

    /// Adds them to a registry, as `moontide_client_…`.
    pub fn register(&self, registry: &mut Registry) {
        registry.register_collector(Box::new(self.clone()));
    }
}

impl Collector for StoreMetrics {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> Result<(), std::fmt::Error> {
        for (name, help, value) in self.stats().each() {
            let counter = ConstCounter::new(value);
            let name = format!("moontide_client_{name}");
            let metric = encoder.encode_descriptor(&name, help.trim(), None, counter.metric_type())?;
            counter.encode(metric)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lanes_are_added_up_and_outlive_their_threads() {
        let metrics = StoreMetrics::default();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let lane = metrics.lane();
                    (0..1000).for_each(|_| lane.hit(3));
                });
            }
        });
        metrics.requested.inc();
        metrics.misses.inc();
        drop(metrics.lane());
        let stats = metrics.stats();
        assert_eq!((stats.requested, stats.hits_local, stats.bytes_read), (4001, 4000, 12_000));
        assert_eq!(
            stats.requested,
            stats.hits_local + stats.hits_remote + stats.hits_disk + stats.misses + stats.failed
        );
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        assert!(text.contains("moontide_client_hits_local_total 4000"), "{text}");
    }
}
