//! [`Files`]: open files of buckets, no more than a bound. One that is closed here stays open for whoever holds it.

use hashbrown::HashMap;
use parking_lot::Mutex;

use crate::backend::EvictionOrder;
use crate::backend::order::Order;
use crate::storage::File;

/// Open files by bucket.
#[derive(Debug)]
pub(crate) struct Files {
    open: Mutex<HashMap<u64, File>>,
    used: Order,
    max: usize,
}

impl Files {
    pub(crate) fn new(max: usize) -> Files {
        Files { open: Mutex::default(), used: Order::new(EvictionOrder::Lru), max }
    }

    /// The file of a bucket, if it is open.
    pub(crate) fn get(&self, bucket: u64) -> Option<File> {
        let file = self.open.lock().get(&bucket).cloned()?;
        self.used.touch(bucket);
        Some(file)
    }

    /// Keeps a file open, and closes the one that was not used for the longest time if there are too many.
    pub(crate) fn insert(&self, bucket: u64, file: File) {
        let mut open = self.open.lock();
        open.insert(bucket, file);
        self.used.insert(bucket);
        while open.len() > self.max {
            let Some(oldest) = self.used.take_first() else { return };
            open.remove(&oldest);
        }
    }

    /// Closes the file of a bucket.
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
