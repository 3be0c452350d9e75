//! Opens a tier: scans the files and builds the index.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use moontide_rt::collections::{HashMap, HashSet};
use moontide_rt::sync::Mutex;
use moontide_rt::time::Instant;
use tracing::{info, warn};

use crate::backend::bucket::format::FooterEntry;
use crate::backend::bucket::index::{BUCKET_MAX, Index, hash};
use crate::backend::bucket::open_files::OpenFileCache;
use crate::backend::bucket::scan::{BucketFile, ScanItem, scan};
use crate::backend::bucket::{Bucket, BucketBackend, BucketConfig};
use crate::backend::claims::WriteClaims;
use crate::backend::eviction_queue::EvictionQueue;
use crate::backend::tombstones::Tombstones;
use crate::backend::{OpenError, RecordId, Recovery, ScannedRecord};
use crate::buffer::BLOCK_BYTES;
use crate::record::PlacedRecord;
use crate::storage::{Queue, Storage};

/// Interval of progress messages.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(5);

impl BucketBackend {
    /// Opens a tier, empty or not, and calls `found` for every record that can be read. Payloads are not read: every
    /// later read verifies them.
    pub fn open(
        storage: Arc<dyn Storage>,
        queue: &mut dyn Queue,
        config: BucketConfig,
        found: &mut dyn FnMut(ScannedRecord<'_>),
    ) -> Result<(BucketBackend, Recovery), OpenError> {
        config.validate()?;
        let (tombstones, bad_blocks) =
            Tombstones::open(&storage, queue).map_err(OpenError::io("read the tombstone log"))?;
        let files = BucketFile::list(&*storage).map_err(OpenError::io("list the buckets"))?;
        let next = files.first().map_or(0, |newest| newest.number.saturating_add(1));
        if next > BUCKET_MAX {
            let file = BucketFile::name(next - 1, false);
            return Err(OpenError::Foreign { file, reason: "its number exceeds the maximum".into() });
        }
        let backend = BucketBackend {
            eviction: EvictionQueue::new(config.eviction_policy),
            files: OpenFileCache::new(config.open_files_max),
            storage,
            config,
            index: Index::default(),
            buckets: Mutex::new(HashMap::new()),
            tombstones,
            claims: WriteClaims::default(),
            next: AtomicU64::new(next),
            used: AtomicU64::new(0),
            unknown: AtomicU64::new(0),
            open_failures: AtomicU64::new(0),
        };
        let mut recovery = Recovery { files: files.len() as u64, ..Recovery::default() };
        if bad_blocks > 0 {
            // A crash may have torn the last block, before its removals were acknowledged.
            warn!(bad_blocks, "corrupt blocks in the tombstone log");
        }
        let buckets = backend.load(queue, &files, &mut recovery, found);
        backend.adopt_files(&files, buckets);
        recovery.bytes = backend.used.load(Ordering::Relaxed);
        if let Err(error) = backend.compact_tombstones(queue) {
            warn!(%error, "cannot compact the tombstone log");
        }
        info!(
            files = recovery.files,
            records = recovery.records,
            removed = recovery.removed,
            bad = recovery.bad_count,
            "buckets opened"
        );
        Ok((backend, recovery))
    }

    /// Scans the buckets, the newest first: of two records with the same id the newer file wins.
    fn load(
        &self,
        queue: &mut dyn Queue,
        files: &[BucketFile],
        recovery: &mut Recovery,
        found: &mut dyn FnMut(ScannedRecord<'_>),
    ) -> HashMap<u64, Bucket> {
        let finished: Vec<BucketFile> = files.iter().filter(|file| !file.temporary).cloned().collect();
        let mut buckets: HashMap<u64, Bucket> = HashMap::new();
        let (mut last_number, mut scanned, mut logged) = (None, 0, Instant::now());
        scan(&*self.storage, queue, &finished, &mut |file, _, item| {
            if last_number.replace(file.number) != Some(file.number) {
                scanned += 1;
                if logged.elapsed() >= PROGRESS_INTERVAL {
                    logged = Instant::now();
                    info!(scanned, of = finished.len(), records = recovery.records, "reading buckets");
                }
            }
            let bucket = buckets.entry(file.number).or_default();
            match item {
                ScanItem::Record(entry) => self.load_record(bucket, file.number, &entry, recovery, found),
                ScanItem::Bad { offset, reason } => {
                    // There may be a record that can be read another time.
                    bucket.live_records += 1;
                    self.unknown.fetch_add(1, Ordering::Relaxed);
                    recovery.bad(&BucketFile::name(file.number, false), offset, reason);
                }
            }
        });
        buckets
    }

    fn load_record(
        &self,
        bucket: &mut Bucket,
        number: u64,
        entry: &FooterEntry<'_>,
        recovery: &mut Recovery,
        found: &mut dyn FnMut(ScannedRecord<'_>),
    ) {
        let name = RecordId::of(&entry.header);
        if self.tombstones.covers(&name.id, name.version) {
            recovery.removed += 1;
            bucket.removed.push((name.id, name.version));
            return;
        }
        bucket.live_records += 1;
        bucket.hashes.push(hash(&name.id));
        let placed = PlacedRecord { offset: entry.offset, layout: entry.layout };
        if self.index.insert(&name, number, &placed) {
            recovery.records += 1;
            let FooterEntry { header, key, attributes, layout, .. } = entry;
            found(ScannedRecord { header, key, attributes, disk_len: layout.len });
        } else {
            bucket.unreachable.push(name.id);
        }
    }

    /// Adds all files; deletes unfinished ones and those without live records.
    fn adopt_files(&self, files: &[BucketFile], mut scanned: HashMap<u64, Bucket>) {
        for file in files.iter().rev() {
            let bytes = file.len.next_multiple_of(BLOCK_BYTES as u64);
            // A finished file without any scan result has no records.
            let mut bucket = if file.temporary {
                Bucket::default()
            } else {
                scanned.remove(&file.number).unwrap_or_default()
            };
            bucket.bytes = bytes;
            bucket.temporary = file.temporary;
            let empty = bucket.live_records == 0;
            self.used.fetch_add(bytes, Ordering::Relaxed);
            self.buckets.lock().insert(file.number, bucket);
            if empty {
                _ = self.delete(file.number);
            } else {
                self.eviction.insert(file.number);
            }
        }
    }
}

impl BucketBackend {
    /// Visits all records that can be found, from the disk. Returns the number of records that could not be read.
    pub(super) fn scan_all(
        &self,
        queue: &mut dyn Queue,
        found: &mut dyn FnMut(ScannedRecord<'_>),
    ) -> Vec<RecordId> {
        // Number of records that are left to find in each file, and those that were found.
        let mut expected: HashMap<u64, (u64, Vec<RecordId>)> = HashMap::new();
        let mut files: Vec<BucketFile> = vec![];
        {
            let buckets = self.buckets.lock();
            for (&number, bucket) in buckets.iter().filter(|(_, bucket)| !bucket.hashes.is_empty()) {
                let records = self.index.count_bucket(number, &bucket.hashes);
                if records > 0 {
                    expected.insert(number, (records, vec![]));
                    files.push(BucketFile { number, temporary: false, len: bucket.bytes });
                }
            }
        }
        files.sort_by_key(|file| file.number);
        scan(&*self.storage, queue, &files, &mut |file, _, item| {
            let ScanItem::Record(entry) = item else { return };
            let location = self.index.get(&RecordId::of(&entry.header));
            if location.is_some_and(|found| (found.bucket, found.offset) == (file.number, entry.offset)) {
                // A file without missing records needs no list any more.
                if let Some((left, names)) = expected.get_mut(&file.number) {
                    names.push(RecordId::of(&entry.header));
                    *left = left.saturating_sub(1);
                    if *left == 0 {
                        expected.remove(&file.number);
                    }
                }
                let FooterEntry { header, key, attributes, layout, .. } = &entry;
                found(ScannedRecord { header, key, attributes, disk_len: layout.len });
            }
        });
        if expected.is_empty() {
            return vec![];
        }
        let seen: HashSet<RecordId> = expected.values().flat_map(|(_, names)| names).copied().collect();
        let mut missing = self.index.names_in(|bucket| expected.contains_key(&bucket));
        missing.retain(|name| !seen.contains(name));
        missing
    }
}

impl BucketConfig {
    fn validate(&self) -> Result<(), OpenError> {
        let check = |what, value: u64, min, max| {
            let in_range = (min..=max).contains(&value);
            if in_range { Ok(()) } else { Err(OpenError::Config { what, value, min, max }) }
        };
        check("limit_bytes", self.limit_bytes, 1 << 16, u64::MAX / 2)?;
        // Offsets in the index are 32 bits of blocks; the footer has 32 bits for the copies of preambles, of 8 KiB
        // each.
        check("bucket_bytes_max", self.bucket_bytes_max, 1 << 14, 1 << 43)?;
        check("bucket_records_max", self.bucket_records_max as u64, 1, 1 << 18)?;
        check("open_files_max", self.open_files_max as u64, 1, 1 << 20)
    }
}
