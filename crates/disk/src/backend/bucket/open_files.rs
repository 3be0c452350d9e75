//! [`OpenFileCache`]: open files of buckets, up to a limit. A file that is dropped here remains open for other holders.

use moontide_rt::collections::HashMap;
use moontide_rt::sync::Mutex;

use crate::backend::EvictionPolicy;
use crate::backend::eviction_queue::EvictionQueue;
use crate::storage::File;

/// Open files by bucket.
#[derive(Debug)]
pub(crate) struct OpenFileCache {
    open: Mutex<HashMap<u64, File>>,
    used: EvictionQueue,
    max: usize,
}

impl OpenFileCache {
    pub(crate) fn new(max: usize) -> OpenFileCache {
        OpenFileCache { open: Mutex::default(), used: EvictionQueue::new(EvictionPolicy::Lru), max }
    }

    /// Returns the file of a bucket, if it is open.
    pub(crate) fn get(&self, bucket: u64) -> Option<File> {
        let file = self.open.lock().get(&bucket).cloned()?;
        self.used.touch(bucket);
        Some(file)
    }

    /// Adds a file, and drops the least recently used one if there are too many.
    pub(crate) fn insert(&self, bucket: u64, file: File) {
        let mut open = self.open.lock();
        open.insert(bucket, file);
        self.used.insert(bucket);
        while open.len() > self.max {
            let Some(oldest) = self.used.pop() else { return };
            open.remove(&oldest);
        }
    }

    /// Drops the file of a bucket.
    pub(crate) fn remove(&self, bucket: u64) {
        let mut open = self.open.lock();
        open.remove(&bucket);
        self.used.remove(bucket);
    }

    #[cfg(test)]
    pub(crate) fn len(&self) -> usize {
        self.open.lock().len()
    }
}
