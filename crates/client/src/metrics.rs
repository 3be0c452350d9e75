//! [`StoreMetrics`]: counters of a client.
//!
//! Invariant: `gets = hits_local + hits_remote + hits_disk + misses + gets_failed`. Each object of a get, range or
//! reference is counted once, when its result is known.
//!
//! A zero-copy read takes a quarter of a microsecond; a counter shared by two threads would double that. So every
//! thread counts these reads on its own cache line, and readers of the metrics sum them up.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use moontide_rt::sync::Mutex;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeMetric};
use prometheus_client::metrics::counter::{ConstCounter, Counter};
use prometheus_client::registry::Registry;

/// Zero-copy reads of one thread.
#[derive(Debug, Default)]
#[repr(align(128))]
pub(crate) struct ThreadCounters {
    hits: AtomicU64,
    bytes: AtomicU64,
}

impl ThreadCounters {
    /// Counts a read. Only the owning thread calls this, so that a load and a store are enough.
    #[inline]
    pub(crate) fn hit(&self, bytes: u64) {
        self.hits.store(self.hits.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        self.bytes.store(self.bytes.load(Ordering::Relaxed) + bytes, Ordering::Relaxed);
    }
}

#[derive(Debug, Default)]
struct ThreadCounterSet {
    open: Vec<Arc<ThreadCounters>>,
    /// Sum of the threads that have ended.
    hits: u64,
    bytes: u64,
}

macro_rules! counters {
    ($($(#[doc = $doc:literal])+ $name:ident;)*) => {
        /// Counters of a store.
        #[derive(Clone, Debug, Default)]
        pub struct StoreMetrics {
            threads: Arc<Mutex<ThreadCounterSet>>,
            $($(#[doc = $doc])+ pub(crate) $name: Counter,)*
        }

        /// Values of the counters of a store.
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct StoreStats {
            $($(#[doc = $doc])+ pub $name: u64,)*
        }

        impl StoreMetrics {
            /// Returns the current values.
            pub fn stats(&self) -> StoreStats {
                let (hits, bytes) = self.thread_sums();
                let mut stats = StoreStats { $($name: self.$name.get(),)* };
                stats.gets += hits;
                stats.hits_local += hits;
                stats.bytes_read += bytes;
                stats
            }
        }

        impl StoreStats {
            /// Returns every counter with its name.
            pub fn by_name(&self) -> Vec<(&'static str, u64)> {
                self.each().into_iter().map(|(name, _, value)| (name, value)).collect()
            }

            /// Returns names, help texts and values.
            fn each(&self) -> Vec<(&'static str, &'static str, u64)> {
                vec![$((stringify!($name), concat!($($doc),+), self.$name),)*]
            }
        }
    };
}

counters! {
    /// Objects requested by gets.
    gets;
    /// Gets served from mapped local memory.
    hits_local;
    /// Gets served from the memory of a node over a link.
    hits_remote;
    /// Gets served from a disk.
    hits_disk;
    /// Gets of objects that do not exist.
    misses;
    /// Gets that failed.
    gets_failed;
    /// Bytes returned by gets.
    bytes_read;
    /// Objects put.
    puts;
    /// Puts of objects that already existed.
    puts_already_existed;
    /// Puts that failed.
    puts_failed;
    /// Bytes of stored objects.
    bytes_written;
    /// Reads whose bytes mismatched their digest.
    corrupt;
    /// Attempts after the first.
    retries;
    /// Reads from a second replica because the first was slow.
    hedges;
    /// Hedges that were faster than the first replica.
    hedges_won;
    /// Gets that shared the fetch of another thread.
    gets_coalesced;
    /// Look-ups answered by the location cache.
    location_cache_hits;
    /// Cached locations that were stale.
    location_cache_stale;
}

impl StoreMetrics {
    /// Creates the counters of a thread.
    pub(crate) fn thread_counters(&self) -> Arc<ThreadCounters> {
        let mut threads = self.threads.lock();
        let ThreadCounterSet { open, hits, bytes } = &mut *threads;
        open.retain(|counters| {
            // Only this list has a reference: the thread has ended.
            let ended = Arc::strong_count(counters) == 1;
            if ended {
                *hits += counters.hits.load(Ordering::Acquire);
                *bytes += counters.bytes.load(Ordering::Acquire);
            }
            !ended
        });
        let counters = Arc::<ThreadCounters>::default();
        open.push(Arc::clone(&counters));
        counters
    }

    fn thread_sums(&self) -> (u64, u64) {
        let threads = self.threads.lock();
        let sum = |field: fn(&ThreadCounters) -> &AtomicU64| {
            threads.open.iter().map(|counters| field(counters).load(Ordering::Relaxed)).sum::<u64>()
        };
        (threads.hits + sum(|counters| &counters.hits), threads.bytes + sum(|counters| &counters.bytes))
    }

    /// Adds the counters to a registry, as `moontide_client_…`.
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
    fn thread_counters_are_summed_and_outlive_threads() {
        let metrics = StoreMetrics::default();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let counters = metrics.thread_counters();
                    (0..1000).for_each(|_| counters.hit(3));
                });
            }
        });
        metrics.gets.inc();
        metrics.misses.inc();
        drop(metrics.thread_counters());
        let stats = metrics.stats();
        assert_eq!((stats.gets, stats.hits_local, stats.bytes_read), (4001, 4000, 12_000));
        assert_eq!(
            stats.gets,
            stats.hits_local + stats.hits_remote + stats.hits_disk + stats.misses + stats.gets_failed
        );
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry).unwrap();
        assert!(text.contains("moontide_client_hits_local_total 4000"), "{text}");
    }
}
