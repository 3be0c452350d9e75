//! [`Slab`]: all records of a group, densely packed, each followed by its key.
//!
//! Records are sorted into classes by the length of their key. A class is an array of equal strides, split into chunks.
//! A removal moves the last record of the class into the hole, so that
//!
//! * an array never has a hole: memory in use is `Σ records × stride`, rounded up to a page per class, and empty chunks
//!   at the end return to the operating system immediately, whichever records were removed;
//! * a random record can be sampled, and a descending cursor visits all records.
//!
//! The cost: a removal renumbers one other record, and the caller must update all copies of its [`RecordRef`]
//! ([`Slab::remove`] returns the old one). A cursor that counts down from the end visits every record that remains: a
//! record that moves into a hole comes from the part that was already visited.

use memmap2::{Advice, MmapMut};
use moontide_rt::SplitMix64;
use moontide_types::limits::KEY_BYTES_MAX;
use zerocopy::{FromBytes, IntoBytes};

use crate::ids::{NONE, RecordRef};
use crate::record::{RECORD_BYTES, Record};

/// Key bytes of each class: every 8 bytes up to 128, then four classes per doubling. This wastes at most a fifth, and
/// an eighth on average.
const CLASS_KEY_BYTES: [usize; CLASSES] = {
    let mut bytes = [0; CLASSES];
    let mut class = 0;
    while class < CLASSES {
        bytes[class] = if class < 16 {
            8 * (class + 1)
        } else {
            let (doubling, quarter) = ((class - 16) / 4, (class - 16) % 4);
            (128 << doubling) + (32 << doubling) * (quarter + 1)
        };
        class += 1;
    }
    bytes
};
const CLASSES: usize = 36;
const _: () = assert!(CLASS_KEY_BYTES[15] == 128 && CLASS_KEY_BYTES[CLASSES - 1] == KEY_BYTES_MAX);
const _: () = assert!(RecordRef::LARGEST < NONE);

impl RecordRef {
    /// Greater than every record's number.
    pub(crate) const LARGEST: u32 = (CLASSES as u32) << RecordRef::INDEX_BITS;
}

/// Size of a chunk: one huge page, if the system grants huge pages on request. With millions of records, the TLB miss
/// for a record costs as much as the cache miss itself. Unmapping a chunk takes some tens of microseconds.
const CHUNK_BYTES: usize = 2 << 20;

/// First chunk of a class for which huge pages are requested. Earlier chunks are resident only as far as they are used,
/// so that a small group stays small.
const HUGE_FROM_CHUNK: usize = 4;

/// Returns the class with the smallest stride that holds the key.
fn class_of(key_len: usize) -> usize {
    CLASS_KEY_BYTES.partition_point(|&bytes| bytes < key_len)
}

#[derive(Debug)]
struct Class {
    stride: usize,
    /// Records per chunk.
    per_chunk: u32,
    len: usize,
    chunks: Vec<MmapMut>,
}

impl Class {
    fn new(key_bytes: usize) -> Class {
        let stride = RECORD_BYTES + key_bytes;
        Class { stride, per_chunk: (CHUNK_BYTES / stride) as u32, len: 0, chunks: vec![] }
    }

    fn at(&self, index: usize) -> (usize, std::ops::Range<usize>) {
        assert!(index < self.len, "record index {index} out of range");
        // In 32 bits, because a 32-bit division is faster.
        let (chunk, within) = (index as u32 / self.per_chunk, (index as u32 % self.per_chunk) as usize);
        (chunk as usize, within * self.stride..(within + 1) * self.stride)
    }

    fn bytes(&self, index: usize) -> &[u8] {
        let (chunk, range) = self.at(index);
        &self.chunks[chunk][range]
    }

    fn bytes_mut(&mut self, index: usize) -> &mut [u8] {
        let (chunk, range) = self.at(index);
        &mut self.chunks[chunk][range]
    }
}

/// All records of a group.
#[derive(Debug)]
pub(crate) struct Slab {
    classes: Vec<Class>,
    len: usize,
}

/// The system has no memory for another chunk, or a class is full.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NoMemory;

impl Slab {
    pub(crate) fn new() -> Slab {
        Slab { classes: CLASS_KEY_BYTES.iter().map(|&bytes| Class::new(bytes)).collect(), len: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Memory mapped for records, touched or not.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.classes.iter().flat_map(|class| &class.chunks).map(|chunk| chunk.len()).sum()
    }

    pub(crate) fn get(&self, at: RecordRef) -> &Record {
        Record::ref_from_prefix(self.classes[at.class()].bytes(at.index())).expect("aligned strides").0
    }

    pub(crate) fn get_mut(&mut self, at: RecordRef) -> &mut Record {
        Record::mut_from_prefix(self.classes[at.class()].bytes_mut(at.index())).expect("aligned strides").0
    }

    /// Returns the record with its key.
    pub(crate) fn with_key(&self, at: RecordRef) -> (&Record, &[u8]) {
        let bytes = self.classes[at.class()].bytes(at.index());
        let (record, rest) = Record::ref_from_prefix(bytes).expect("aligned strides");
        (record, &rest[..record.key_len()])
    }

    /// Appends a record to the class of its key.
    pub(crate) fn insert(&mut self, record: &Record, key: &[u8]) -> Result<RecordRef, NoMemory> {
        debug_assert_eq!(record.key_len(), key.len());
        let number = class_of(key.len());
        let class = &mut self.classes[number];
        if class.len > RecordRef::INDEX_MAX as usize {
            return Err(NoMemory);
        }
        if class.len == class.chunks.len() * class.per_chunk as usize {
            let chunk = MmapMut::map_anon(CHUNK_BYTES).map_err(|_| NoMemory)?;
            if class.chunks.len() >= HUGE_FROM_CHUNK {
                // Only a hint: a kernel without huge pages refuses it, which is harmless.
                let _ = chunk.advise(Advice::HugePage);
            }
            class.chunks.push(chunk);
        }
        let index = class.len;
        class.len += 1;
        let bytes = class.bytes_mut(index);
        bytes[..RECORD_BYTES].copy_from_slice(record.as_bytes());
        bytes[RECORD_BYTES..][..key.len()].copy_from_slice(key);
        self.len += 1;
        Ok(RecordRef::new(number, index))
    }

    /// Removes a record. If another record moved into the hole, returns the old number of that record; its new number
    /// is `at`.
    #[must_use]
    pub(crate) fn remove(&mut self, at: RecordRef) -> Option<RecordRef> {
        let class = &mut self.classes[at.class()];
        let (index, last) = (at.index(), class.len - 1);
        assert!(index <= last, "record index {index} out of range");
        if index != last {
            let (from_chunk, from) = class.at(last);
            let (to_chunk, to) = class.at(index);
            if from_chunk == to_chunk {
                class.chunks[to_chunk].copy_within(from, to.start);
            } else {
                let (lower, upper) = class.chunks.split_at_mut(from_chunk);
                lower[to_chunk][to].copy_from_slice(&upper[0][from]);
            }
        }
        class.len = last;
        self.len -= 1;
        // Keeps one empty chunk, so that a class that grows and shrinks around a boundary does not map and unmap.
        let needed = last.div_ceil(class.per_chunk as usize) + 1;
        class.chunks.truncate(needed);
        (index != last).then(|| RecordRef::new(at.class(), last))
    }

    /// Returns a random record.
    pub(crate) fn sample(&self, rng: &mut SplitMix64) -> Option<RecordRef> {
        if self.len == 0 {
            return None;
        }
        let mut index = rng.index(self.len);
        for (number, class) in self.classes.iter().enumerate() {
            if index < class.len {
                return Some(RecordRef::new(number, index));
            }
            index -= class.len;
        }
        unreachable!("lengths of the classes sum to the length")
    }

    /// Returns the record before `cursor` in descending order; `None` starts after the last one.
    pub(crate) fn previous(&self, cursor: Option<RecordRef>) -> Option<RecordRef> {
        let (class, below) = match cursor {
            None => (CLASSES - 1, usize::MAX),
            // The class may have shrunk in the meantime.
            Some(cursor) => (cursor.class().min(CLASSES - 1), cursor.index()),
        };
        let below = below.min(self.classes[class].len);
        if below > 0 {
            return Some(RecordRef::new(class, below - 1));
        }
        let lower = (0..class).rev().find(|&class| self.classes[class].len > 0)?;
        Some(RecordRef::new(lower, self.classes[lower].len - 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::TenantIndex;
    use moontide_types::{Epoch, ObjectId};

    fn put(slab: &mut Slab, number: u64, key_len: usize) -> RecordRef {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&number.to_le_bytes());
        let key = vec![number as u8; key_len];
        let record = Record::new(ObjectId(id), Epoch::ZERO, TenantIndex(0), key_len, number);
        slab.insert(&record, &key).unwrap()
    }

    #[test]
    fn size_class_fits_every_key_length() {
        for len in 1..=KEY_BYTES_MAX {
            let class = class_of(len);
            assert!(CLASS_KEY_BYTES[class] >= len);
            assert!(class == 0 || CLASS_KEY_BYTES[class - 1] < len);
            assert!(CLASS_KEY_BYTES[class] <= (len + 7).max(len * 5 / 4 + 1), "{len}");
        }
        assert_eq!(RECORD_BYTES + CLASS_KEY_BYTES[class_of(64)], 144);
    }

    #[test]
    fn slab_matches_map_after_random_removals() {
        let seed = 11;
        let mut rng = SplitMix64::new(seed);
        let mut slab = Slab::new();
        // Expected content: record reference to (number, key length).
        let mut expected = std::collections::HashMap::new();
        for number in 0..20_000u64 {
            let key_len = 1 + rng.index(200);
            let at = put(&mut slab, number, key_len);
            expected.insert(at, (number, key_len));
        }
        let full = slab.memory_bytes();
        while expected.len() > 500 {
            let at = slab.sample(&mut rng).unwrap();
            expected.remove(&at).expect("sampled record exists");
            if let Some(old) = slab.remove(at) {
                let moved = expected.remove(&old).expect("moved record existed");
                expected.insert(at, moved);
            }
        }
        assert_eq!(slab.len(), 500);
        for (&at, &(number, key_len)) in &expected {
            let (record, key) = slab.with_key(at);
            assert_eq!((record.object_len(), key), (number, &vec![number as u8; key_len][..]), "seed {seed}");
        }
        assert!(slab.memory_bytes() <= full, "empty chunks are unmapped");
        // A descending cursor visits every record once.
        let mut visited = 0;
        let mut cursor = None;
        while let Some(at) = slab.previous(cursor) {
            assert!(expected.contains_key(&at));
            visited += 1;
            cursor = Some(at);
        }
        assert_eq!(visited, 500);
    }

    #[test]
    fn slab_memory_shrinks_after_removals() {
        let mut slab = Slab::new();
        let mut rng = SplitMix64::new(3);
        for number in 0..500_000 {
            put(&mut slab, number, 64);
        }
        let full = slab.memory_bytes();
        for _ in 0..450_000 {
            let at = slab.sample(&mut rng).unwrap();
            let _ = slab.remove(at);
        }
        // A tenth, the partly filled chunk and the empty chunk that is kept.
        assert!(slab.memory_bytes() <= full / 10 + 2 * CHUNK_BYTES, "{} of {full}", slab.memory_bytes());
    }

    #[test]
    fn slab_previous_accepts_stale_cursor() {
        let mut slab = Slab::new();
        for number in 0..10 {
            put(&mut slab, number, 8);
        }
        assert_eq!(slab.previous(Some(RecordRef::new(0, 99))), Some(RecordRef::new(0, 9)));
        assert_eq!(slab.previous(Some(RecordRef::new(50, 3))), Some(RecordRef::new(0, 9)));
        assert_eq!(slab.previous(Some(RecordRef::new(0, 0))), None);
    }
}
