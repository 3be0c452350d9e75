//! [`Index`]: location of each record. 40 bytes per record, plus those of empty entries of the table.
//!
//! Keyed by the object's id, whose bits are uniform: all versions and stripes of an object have the same hash, so that
//! a removal finds them together.

use hashbrown::HashTable;
use moontide_rt::sync::RwLock;
use moontide_types::{Epoch, ObjectId};

use crate::backend::RecordId;
use crate::buffer::BLOCK_BYTES;
use crate::record::PlacedRecord;

/// Number of shards with separate locks: more than there are threads.
const SHARDS: usize = 64;

const STRIPE_BITS: u32 = 10;
const PREAMBLE_BITS: u32 = 14;
const BUCKET_BITS: u32 = 40;

/// Maximum bucket number: at a thousand buckets per second they last for 34 years.
pub(crate) const BUCKET_MAX: u64 = (1 << BUCKET_BITS) - 1;

const _: () = assert!(STRIPE_BITS + PREAMBLE_BITS + BUCKET_BITS == u64::BITS);
const _: () = assert!(moontide_types::limits::STRIPES_MAX <= 1 << STRIPE_BITS);
const _: () = assert!(size_of::<Entry>() == 40);

/// Location of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BucketLocation {
    pub(crate) bucket: u64,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) preamble_read_len: u64,
}

/// Id and location of a record; lengths and offsets in blocks.
#[derive(Clone, Copy, Debug)]
struct Entry {
    id: ObjectId,
    version: Epoch,
    /// `bucket:40 | preamble_read_len:14 | stripe:10`
    packed: u64,
    offset: u32,
    len: u32,
}

/// Locations of all records.
#[derive(Debug)]
pub(crate) struct Index {
    shards: Vec<RwLock<HashTable<Entry>>>,
}

/// A record that was removed from the index.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RemovedEntry {
    pub(crate) name: RecordId,
    pub(crate) bucket: u64,
}

/// Returns the hash of an object in the [`Index`].
pub(crate) fn hash(id: &ObjectId) -> u64 {
    id.as_u128() as u64
}

impl Default for Index {
    fn default() -> Index {
        Index { shards: std::iter::repeat_with(RwLock::default).take(SHARDS).collect() }
    }
}

impl Index {
    /// Returns the shard of a hash, chosen by other bits than the position in its table.
    fn shard(&self, hash: u64) -> &RwLock<HashTable<Entry>> {
        &self.shards[(hash >> 32) as usize % SHARDS]
    }

    /// Returns the location of a record.
    pub(crate) fn get(&self, name: &RecordId) -> Option<BucketLocation> {
        let hash = hash(&name.id);
        let shard = self.shard(hash).read();
        shard.find(hash, |entry| entry.name() == *name).map(Entry::location)
    }

    /// Returns the records of buckets.
    pub(crate) fn names_in(&self, is_chosen: impl Fn(u64) -> bool) -> Vec<RecordId> {
        let mut names = Vec::new();
        for shard in &self.shards {
            names.extend(shard.read().iter().filter(|entry| is_chosen(entry.bucket())).map(Entry::name));
        }
        names
    }

    /// Whether the index has this stripe in this version or a newer one.
    pub(crate) fn contains_at_least(&self, name: &RecordId) -> bool {
        let hash = hash(&name.id);
        self.shard(hash).read().iter_hash(hash).any(|entry| {
            let found = entry.name();
            found.id == name.id && found.stripe == name.stripe && found.version >= name.version
        })
    }

    /// Inserts a record. Returns `false` if it exists.
    pub(crate) fn insert(&self, name: &RecordId, bucket: u64, placed: &PlacedRecord) -> bool {
        self.insert_if(name, bucket, placed, || true)
    }

    /// Like [`Index::insert`], if `is_allowed`. No search of this index is between that call and the insertion.
    pub(crate) fn insert_if(
        &self,
        name: &RecordId,
        bucket: u64,
        placed: &PlacedRecord,
        is_allowed: impl FnOnce() -> bool,
    ) -> bool {
        let hash = hash(&name.id);
        let mut shard = self.shard(hash).write();
        if shard.find(hash, |entry| entry.name() == *name).is_some() || !is_allowed() {
            return false;
        }
        shard.insert_unique(hash, Entry::new(name, bucket, placed), |entry| self::hash(&entry.id));
        true
    }

    /// Removes a record.
    pub(crate) fn remove(&self, name: &RecordId) -> Option<RemovedEntry> {
        self.take(hash(&name.id), |entry| entry.name() == *name).pop()
    }

    /// Removes all records of an object in this version and older ones.
    pub(crate) fn remove_up_to(&self, id: &ObjectId, version: Epoch) -> Vec<RemovedEntry> {
        self.take(hash(id), |entry| entry.id == *id && entry.version <= version)
    }

    /// Removes the records of a bucket whose objects have these hashes.
    pub(crate) fn remove_bucket(&self, bucket: u64, hashes: &[u64]) -> Vec<RemovedEntry> {
        hashes
            .iter()
            .flat_map(|&hash| {
                self.take(hash, |entry| self::hash(&entry.id) == hash && entry.bucket() == bucket)
            })
            .collect()
    }

    /// Counts the records of a bucket whose objects have these hashes.
    pub(crate) fn count_bucket(&self, bucket: u64, hashes: &[u64]) -> u64 {
        let mut hashes = hashes.to_vec();
        hashes.sort_unstable();
        hashes.dedup();
        let count = |&hash: &u64| {
            let shard = self.shard(hash).read();
            shard
                .iter_hash(hash)
                .filter(|entry| self::hash(&entry.id) == hash && entry.bucket() == bucket)
                .count()
        };
        hashes.iter().map(count).sum::<usize>() as u64
    }

    /// Number of records.
    pub(crate) fn len(&self) -> u64 {
        self.shards.iter().map(|shard| shard.read().len() as u64).sum()
    }

    fn take(&self, hash: u64, matches: impl Fn(&Entry) -> bool) -> Vec<RemovedEntry> {
        let mut shard = self.shard(hash).write();
        let mut taken = vec![];
        while let Ok(found) = shard.find_entry(hash, &matches) {
            let (entry, _) = found.remove();
            taken.push(RemovedEntry { name: entry.name(), bucket: entry.bucket() });
        }
        taken
    }
}

impl Entry {
    fn new(name: &RecordId, bucket: u64, placed: &PlacedRecord) -> Entry {
        let blocks =
            |bytes: u64| u32::try_from(bytes / BLOCK_BYTES as u64).expect("a bucket has at most 16 TiB");
        let preamble = u64::from(blocks(placed.layout.preamble_read_len));
        assert!(bucket <= BUCKET_MAX && preamble < 1 << PREAMBLE_BITS && name.stripe < 1 << STRIPE_BITS);
        Entry {
            id: name.id,
            version: name.version,
            packed: bucket << (PREAMBLE_BITS + STRIPE_BITS)
                | preamble << STRIPE_BITS
                | u64::from(name.stripe),
            offset: blocks(placed.offset),
            len: blocks(placed.layout.len),
        }
    }

    fn name(&self) -> RecordId {
        let stripe = (self.packed & ((1 << STRIPE_BITS) - 1)) as u16;
        RecordId { id: self.id, version: self.version, stripe }
    }

    fn bucket(&self) -> u64 {
        self.packed >> (PREAMBLE_BITS + STRIPE_BITS)
    }

    fn location(&self) -> BucketLocation {
        let bytes = |blocks: u64| blocks * BLOCK_BYTES as u64;
        BucketLocation {
            bucket: self.bucket(),
            offset: bytes(self.offset.into()),
            len: bytes(self.len.into()),
            preamble_read_len: bytes(self.packed >> STRIPE_BITS & ((1 << PREAMBLE_BITS) - 1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::DiskLayout;
    use crate::samples::id;

    fn name(number: u64, version: u64, stripe: u16) -> RecordId {
        RecordId { id: id(number), version: Epoch::from_bits(version).unwrap(), stripe }
    }

    fn placed(offset: u64, len: u64, preamble_read_len: u64) -> PlacedRecord {
        PlacedRecord {
            offset,
            layout: DiskLayout { preamble_len: preamble_read_len, len, preamble_read_len },
        }
    }

    #[test]
    fn get_returns_inserted_location() {
        let index = Index::default();
        let large = placed(1 << 43, (1 << 40) + (33 << 20), 33 << 20);
        assert!(index.insert(&name(1, 5, 1023), BUCKET_MAX, &large));
        assert!(!index.insert(&name(1, 5, 1023), 7, &placed(0, 4096, 4096)), "it exists");
        assert!(index.insert(&name(1, 6, 0), 7, &placed(4096, 8192, 4096)));
        let location = BucketLocation {
            bucket: BUCKET_MAX,
            offset: 1 << 43,
            len: (1 << 40) + (33 << 20),
            preamble_read_len: 33 << 20,
        };
        assert_eq!(index.get(&name(1, 5, 1023)), Some(location));
        assert_eq!(index.get(&name(1, 5, 0)), None);
        assert!(index.contains_at_least(&name(1, 5, 0)) && !index.contains_at_least(&name(1, 7, 0)));
        assert_eq!(index.len(), 2);
    }

    #[test]
    fn removal_covers_all_stripes_and_older_versions() {
        let index = Index::default();
        for (version, stripe) in [(1, 0), (1, 1), (2, 0), (3, 0)] {
            assert!(index.insert(&name(1, version, stripe), version, &placed(0, 4096, 4096)));
        }
        assert!(index.insert(&name(2, 1, 0), 1, &placed(0, 4096, 4096)));
        let mut taken: Vec<_> =
            index.remove_up_to(&id(1), Epoch::from_bits(2).unwrap()).iter().map(|t| t.name).collect();
        taken.sort();
        assert_eq!(taken, [name(1, 1, 0), name(1, 1, 1), name(1, 2, 0)]);
        assert_eq!(index.len(), 2);
        let hashes = [hash(&id(1)), hash(&id(2))];
        assert_eq!(index.remove_bucket(1, &hashes).len(), 1);
        assert!(index.remove(&name(1, 3, 0)).is_some() && index.remove(&name(1, 3, 0)).is_none());
    }
}
