//! Opening: what the files tell goes into the index.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hashbrown::HashMap;
use parking_lot::Mutex;
use tracing::{info, warn};

use crate::backend::bucket::files::Files;
use crate::backend::bucket::format::Told;
use crate::backend::bucket::index::{BUCKET_MAX, Index, hash};
use crate::backend::bucket::scan::{BucketFile, Seen, scan};
use crate::backend::bucket::{Bucket, BucketBackend, BucketConfig};
use crate::backend::claims::Claims;
use crate::backend::order::Order;
use crate::backend::tombstones::Tombstones;
use crate::backend::{Found, OpenError, RecordName, Recovery};
use crate::buffer::BLOCK_BYTES;
use crate::record::Placed;
use crate::storage::{Queue, Storage};

/// How often the scan says how far it is.
const PROGRESS_EVERY: Duration = Duration::from_secs(5);

impl BucketBackend {
    /// Opens a tier, empty or not, and tells `found` of every record that can be read. Payloads are not read: whether
    /// they are what was written is found out by whoever reads them, every time.
    pub fn open(
        storage: Arc<dyn Storage>,
        queue: &mut dyn Queue,
        config: BucketConfig,
        found: &mut dyn FnMut(Found<'_>),
    ) -> Result<(BucketBackend, Recovery), OpenError> {
        config.validate()?;
        let (tombstones, bad_blocks) =
            Tombstones::open(&storage, queue).map_err(OpenError::io("reading the log of removals"))?;
        let files = BucketFile::list(&*storage).map_err(OpenError::io("listing the buckets"))?;
        let next = files.first().map_or(0, |newest| newest.number.saturating_add(1));
        if next > BUCKET_MAX {
            let file = BucketFile::name(next - 1, false);
            return Err(OpenError::Foreign { file, why: "its number is none that was given".into() });
        }
        let backend = BucketBackend {
            order: Order::new(config.order),
            files: Files::new(config.open_files_max),
            storage,
            config,
            index: Index::default(),
            buckets: Mutex::new(HashMap::new()),
            tombstones,
            claims: Claims::default(),
            next: AtomicU64::new(next),
            used: AtomicU64::new(0),
            unknown: AtomicU64::new(0),
            unopened: AtomicU64::new(0),
        };
        let mut recovery = Recovery { files: files.len() as u64, ..Recovery::default() };
        if bad_blocks > 0 {
            // The last one may have been torn by a crash, before anybody was told that its removals are done.
            warn!(bad_blocks, "blocks of the log of removals are damaged");
        }
        let buckets = backend.load(queue, &files, &mut recovery, found);
        backend.take_in(&files, buckets);
        recovery.bytes = backend.used.load(Ordering::Relaxed);
        if let Err(error) = backend.forget_removals(queue) {
            warn!(%error, "the log of removals cannot be shortened");
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

    /// Scans the buckets, the newest first: of two records with the same name the newer one wins.
    fn load(
        &self,
        queue: &mut dyn Queue,
        files: &[BucketFile],
        recovery: &mut Recovery,
        found: &mut dyn FnMut(Found<'_>),
    ) -> HashMap<u64, Bucket> {
        let finished: Vec<BucketFile> = files.iter().filter(|file| !file.temporary).cloned().collect();
        let mut buckets: HashMap<u64, Bucket> = HashMap::new();
        let (mut last_number, mut scanned, mut said) = (None, 0, Instant::now());
        scan(&*self.storage, queue, &finished, &mut |file, _, seen| {
            if last_number.replace(file.number) != Some(file.number) {
                scanned += 1;
                if said.elapsed() >= PROGRESS_EVERY {
                    said = Instant::now();
                    info!(scanned, of = finished.len(), records = recovery.records, "reading buckets");
                }
            }
            let bucket = buckets.entry(file.number).or_default();
            match seen {
                Seen::Record(told) => self.load_record(bucket, file.number, &told, recovery, found),
                Seen::Bad { offset, why } => {
                    // Maybe a record stands there that can be read another time.
                    bucket.kept += 1;
                    self.unknown.fetch_add(1, Ordering::Relaxed);
                    recovery.bad(&BucketFile::name(file.number, false), offset, why);
                }
            }
        });
        buckets
    }

    fn load_record(
        &self,
        bucket: &mut Bucket,
        number: u64,
        told: &Told<'_>,
        recovery: &mut Recovery,
        found: &mut dyn FnMut(Found<'_>),
    ) {
        let name = RecordName::of(&told.header);
        if self.tombstones.covers(&name.id, name.version) {
            recovery.removed += 1;
            bucket.removed.push((name.id, name.version));
            return;
        }
        bucket.kept += 1;
        bucket.hashes.push(hash(&name.id));
        let placed = Placed { offset: told.offset, layout: told.layout };
        if self.index.insert(&name, number, &placed) {
            recovery.records += 1;
            let Told { header, key, attributes, layout, .. } = told;
            found(Found { header, key, attributes, disk_len: layout.len });
        } else {
            bucket.hidden.push(name.id);
        }
    }

    /// Takes over all files; deletes those that were never finished, and those in which nothing is left.
    fn take_in(&self, files: &[BucketFile], mut known: HashMap<u64, Bucket>) {
        for file in files.iter().rev() {
            let bytes = file.len.next_multiple_of(BLOCK_BYTES as u64);
            // A finished file of which the scan told nothing at all has no records.
            let mut bucket = if file.temporary {
                Bucket::default()
            } else {
                known.remove(&file.number).unwrap_or_default()
            };
            bucket.bytes = bytes;
            bucket.temporary = file.temporary;
            let empty = bucket.kept == 0;
            self.used.fetch_add(bytes, Ordering::Relaxed);
            self.buckets.lock().insert(file.number, bucket);
            if empty {
                self.delete(file.number);
            } else {
                self.order.insert(file.number);
            }
        }
    }
}

impl BucketBackend {
    /// Tells all records that can be found from what stands on the disk; how many could not be told.
    pub(super) fn tell_all(&self, queue: &mut dyn Queue, found: &mut dyn FnMut(Found<'_>)) -> u64 {
        let mut expected: HashMap<u64, u64> = HashMap::new();
        let mut files: Vec<BucketFile> = vec![];
        {
            let buckets = self.buckets.lock();
            for (&number, bucket) in buckets.iter().filter(|(_, bucket)| !bucket.hashes.is_empty()) {
                expected.insert(number, self.index.count_bucket(number, &bucket.hashes));
                files.push(BucketFile { number, temporary: false, len: bucket.bytes });
            }
        }
        files.retain(|file| expected[&file.number] > 0);
        files.sort_by_key(|file| file.number);
        scan(&*self.storage, queue, &files, &mut |file, _, seen| {
            let Seen::Record(told) = seen else { return };
            let place = self.index.get(&RecordName::of(&told.header));
            if place.is_some_and(|place| (place.bucket, place.offset) == (file.number, told.offset)) {
                let left = expected.get_mut(&file.number).expect("all files are in it");
                *left = left.saturating_sub(1);
                let Told { header, key, attributes, layout, .. } = &told;
                found(Found { header, key, attributes, disk_len: layout.len });
            }
        });
        expected.values().sum()
    }
}

impl BucketConfig {
    fn validate(&self) -> Result<(), OpenError> {
        let check = |what, value: u64, min, max| {
            let fits = (min..=max).contains(&value);
            if fits { Ok(()) } else { Err(OpenError::Config { what, value, min, max }) }
        };
        check("limit_bytes", self.limit_bytes, 1 << 16, u64::MAX / 2)?;
        // Offsets in the index are 32 bits of blocks; the footer has 32 bits for the copies of fronts, of 8 KiB each.
        check("bucket_bytes_max", self.bucket_bytes_max, 1 << 14, 1 << 43)?;
        check("bucket_records_max", self.bucket_records_max as u64, 1, 1 << 18)?;
        check("open_files_max", self.open_files_max as u64, 1, 1 << 20)
    }
}
