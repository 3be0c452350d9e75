//! [`Index`]: which record stands where. 40 bytes a record, and those of an empty place in the table.
//!
//! Found by the object's id, whose bits are uniform: all versions and stripes of an object are neighbours, so that a
//! removal finds them together.

use hashbrown::HashTable;
use moontide_types::{Epoch, ObjectId};
use parking_lot::RwLock;

use crate::backend::RecordName;
use crate::buffer::BLOCK_BYTES;
use crate::record::Placed;

/// Parts with a lock of their own: more than there are threads.
const SHARDS: usize = 64;

const STRIPE_BITS: u32 = 10;
const HEAD_BITS: u32 = 14;
const BUCKET_BITS: u32 = 40;

/// The largest bucket number: at a thousand buckets a second they last for 34 years.
pub(crate) const BUCKET_MAX: u64 = (1 << BUCKET_BITS) - 1;

const _: () = assert!(STRIPE_BITS + HEAD_BITS + BUCKET_BITS == u64::BITS);
const _: () = assert!(moontide_types::bounds::STRIPES_MAX <= 1 << STRIPE_BITS);
const _: () = assert!(size_of::<Entry>() == 40);

/// Where a record stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) bucket: u64,
    pub(crate) offset: u64,
    pub(crate) len: u64,
    pub(crate) head_len: u64,
}

/// A name and its place; lengths and offsets in blocks.
#[derive(Clone, Copy, Debug)]
struct Entry {
    id: ObjectId,
    version: Epoch,
    /// `bucket:40 | head:14 | stripe:10`
    packed: u64,
    offset: u32,
    len: u32,
}

/// Which record stands where.
#[derive(Debug)]
pub(crate) struct Index {
    shards: Vec<RwLock<HashTable<Entry>>>,
}

/// A record that was taken out.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Taken {
    pub(crate) name: RecordName,
    pub(crate) bucket: u64,
}

/// What [`Index`] finds an object by.
pub(crate) fn hash(id: &ObjectId) -> u64 {
    id.as_u128() as u64
}

impl Default for Index {
    fn default() -> Index {
        Index { shards: std::iter::repeat_with(RwLock::default).take(SHARDS).collect() }
    }
}

impl Index {
    /// The shard is chosen by other bits than the place in its table.
    fn shard(&self, hash: u64) -> &RwLock<HashTable<Entry>> {
        &self.shards[(hash >> 32) as usize % SHARDS]
    }

    /// Where a record stands.
    pub(crate) fn get(&self, name: &RecordName) -> Option<Place> {
        let hash = hash(&name.id);
        let shard = self.shard(hash).read();
        shard.find(hash, |entry| entry.name() == *name).map(Entry::place)
    }

    /// Whether this stripe is there in this version or a newer one.
    pub(crate) fn has_as_new(&self, name: &RecordName) -> bool {
        let hash = hash(&name.id);
        self.shard(hash).read().iter_hash(hash).any(|entry| {
            let found = entry.name();
            found.id == name.id && found.stripe == name.stripe && found.version >= name.version
        })
    }

    /// Puts a record in, unless it is there; whether it was put in.
    pub(crate) fn insert(&self, name: &RecordName, bucket: u64, placed: &Placed) -> bool {
        let hash = hash(&name.id);
        let mut shard = self.shard(hash).write();
        if shard.find(hash, |entry| entry.name() == *name).is_some() {
            return false;
        }
        shard.insert_unique(hash, Entry::new(name, bucket, placed), |entry| self::hash(&entry.id));
        true
    }

    /// Takes a record out.
    pub(crate) fn remove(&self, name: &RecordName) -> Option<Taken> {
        self.take(hash(&name.id), |entry| entry.name() == *name).pop()
    }

    /// Takes out all records of an object in this version and older ones.
    pub(crate) fn remove_up_to(&self, id: &ObjectId, version: Epoch) -> Vec<Taken> {
        self.take(hash(id), |entry| entry.id == *id && entry.version <= version)
    }

    /// Takes out the records of a bucket whose objects have these hashes.
    pub(crate) fn remove_bucket(&self, bucket: u64, hashes: &[u64]) -> Vec<Taken> {
        hashes
            .iter()
            .flat_map(|&hash| {
                self.take(hash, |entry| self::hash(&entry.id) == hash && entry.bucket() == bucket)
            })
            .collect()
    }

    /// How many records of a bucket there are, whose objects have these hashes.
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

    /// How many records there are.
    pub(crate) fn len(&self) -> u64 {
        self.shards.iter().map(|shard| shard.read().len() as u64).sum()
    }

    fn take(&self, hash: u64, wanted: impl Fn(&Entry) -> bool) -> Vec<Taken> {
        let mut shard = self.shard(hash).write();
        let mut taken = vec![];
        while let Ok(found) = shard.find_entry(hash, &wanted) {
            let (entry, _) = found.remove();
            taken.push(Taken { name: entry.name(), bucket: entry.bucket() });
        }
        taken
    }
}

impl Entry {
    fn new(name: &RecordName, bucket: u64, placed: &Placed) -> Entry {
        let blocks =
            |bytes: u64| u32::try_from(bytes / BLOCK_BYTES as u64).expect("a bucket of at most 16 TiB");
        let head = u64::from(blocks(placed.layout.head_len));
        assert!(bucket <= BUCKET_MAX && head < 1 << HEAD_BITS && name.stripe < 1 << STRIPE_BITS);
        Entry {
            id: name.id,
            version: name.version,
            packed: bucket << (HEAD_BITS + STRIPE_BITS) | head << STRIPE_BITS | u64::from(name.stripe),
            offset: blocks(placed.offset),
            len: blocks(placed.layout.len),
        }
    }

    fn name(&self) -> RecordName {
        let stripe = (self.packed & ((1 << STRIPE_BITS) - 1)) as u16;
        RecordName { id: self.id, version: self.version, stripe }
    }

    fn bucket(&self) -> u64 {
        self.packed >> (HEAD_BITS + STRIPE_BITS)
    }

    fn place(&self) -> Place {
        let bytes = |blocks: u64| blocks * BLOCK_BYTES as u64;
        Place {
            bucket: self.bucket(),
            offset: bytes(self.offset.into()),
            len: bytes(self.len.into()),
            head_len: bytes(self.packed >> STRIPE_BITS & ((1 << HEAD_BITS) - 1)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::record::DiskLayout;
    use crate::samples::id;

    fn name(number: u64, version: u64, stripe: u16) -> RecordName {
        RecordName { id: id(number), version: Epoch::from_bits(version).unwrap(), stripe }
    }

    fn placed(offset: u64, len: u64, head_len: u64) -> Placed {
        Placed { offset, layout: DiskLayout { front_len: head_len, len, head_len } }
    }

    #[test]
    fn what_is_put_in_is_found() {
        let index = Index::default();
        let large = placed(1 << 43, (1 << 40) + (33 << 20), 33 << 20);
        assert!(index.insert(&name(1, 5, 1023), BUCKET_MAX, &large));
        assert!(!index.insert(&name(1, 5, 1023), 7, &placed(0, 4096, 4096)), "it is there");
        assert!(index.insert(&name(1, 6, 0), 7, &placed(4096, 8192, 4096)));
        let place =
            Place { bucket: BUCKET_MAX, offset: 1 << 43, len: (1 << 40) + (33 << 20), head_len: 33 << 20 };
        assert_eq!(index.get(&name(1, 5, 1023)), Some(place));
        assert_eq!(index.get(&name(1, 5, 0)), None);
        assert!(index.has_as_new(&name(1, 5, 0)) && !index.has_as_new(&name(1, 7, 0)));
        assert_eq!(index.len(), 2);
    }

    #[test]
    fn a_removal_takes_all_stripes_and_older_versions() {
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
