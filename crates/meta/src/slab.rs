//! [`Slab`]: all records of a group, dense, with their keys behind them.
//!
//! Records are sorted into classes by the length of their key; a class is an array of equal strides, cut into
//! chunks. Removing a record moves the last one of its class into the hole, so that
//!
//! * an array never has a hole: memory in use is `Σ records × stride`, rounded up to a page per class, and the
//!   chunks at its end go back to the operating system as soon as they are empty, whatever was removed;
//! * a record can be drawn at random, and all can be visited by counting down.
//!
//! The price: a removal renames one other record, and whoever holds its [`Ref`] must be told ([`Slab::remove`] says
//! which). Counting a cursor down from the end visits every record that stays: what moves into a hole comes from
//! the part that was visited already.

use memmap2::{Advice, MmapMut};
use moontide_types::bounds::KEY_BYTES_MAX;
use zerocopy::{FromBytes, IntoBytes};

use crate::random::Rng;
use crate::record::{RECORD_BYTES, Record};

/// Names a record until a removal renames it: `class:6 | index:26`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Ref(u32);

const INDEX_BITS: u32 = 26;
const INDEX_MASK: u32 = (1 << INDEX_BITS) - 1;

impl Ref {
    fn new(class: usize, index: usize) -> Ref {
        Ref((class as u32) << INDEX_BITS | index as u32)
    }

    /// From the form that is stored; [`NONE`](crate::record::NONE) is no record.
    pub(crate) fn from_number(number: u32) -> Option<Ref> {
        (number != crate::record::NONE).then_some(Ref(number))
    }

    pub(crate) fn number(self) -> u32 {
        self.0
    }

    fn class(self) -> usize {
        (self.0 >> INDEX_BITS) as usize
    }

    fn index(self) -> usize {
        (self.0 & INDEX_MASK) as usize
    }
}

/// Key bytes of each class: every 8 bytes up to 128, then four classes to each doubling, which wastes at most a
/// fifth and an eighth on average.
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
const _: () = assert!(Ref::LARGEST < crate::record::NONE);

impl Ref {
    /// Above every record's number.
    pub(crate) const LARGEST: u32 = (CLASSES as u32) << INDEX_BITS;
}

/// A chunk is one huge page, if the machine grants huge pages to those who ask: with millions of records, finding the
/// page of one costs as much as the cache miss itself. Giving a chunk back takes some tens of microseconds.
const CHUNK_BYTES: usize = 2 << 20;

/// Huge pages are asked for from this chunk of a class on. The chunks before are resident only as far as they are
/// used, so that a small group is small.
const HUGE_FROM_CHUNK: usize = 4;

/// The class with the smallest stride that holds the key.
fn class_of(key_len: usize) -> usize {
    CLASS_KEY_BYTES.partition_point(|&bytes| bytes < key_len)
}

#[derive(Debug)]
struct Class {
    stride: usize,
    /// Records of one chunk.
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
        assert!(index < self.len, "a record that is there");
        // In 32 bits, which a division is quicker in.
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

/// The machine gave no memory for another chunk, or a class is full.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct NoMemory;

impl Slab {
    pub(crate) fn new() -> Slab {
        Slab { classes: CLASS_KEY_BYTES.iter().map(|&bytes| Class::new(bytes)).collect(), len: 0 }
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Memory that is mapped for records, whether it was touched or not.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.classes.iter().flat_map(|class| &class.chunks).map(|chunk| chunk.len()).sum()
    }

    pub(crate) fn get(&self, at: Ref) -> &Record {
        Record::ref_from_prefix(self.classes[at.class()].bytes(at.index())).expect("aligned strides").0
    }

    pub(crate) fn get_mut(&mut self, at: Ref) -> &mut Record {
        Record::mut_from_prefix(self.classes[at.class()].bytes_mut(at.index())).expect("aligned strides").0
    }

    /// The record with its key.
    pub(crate) fn with_key(&self, at: Ref) -> (&Record, &[u8]) {
        let bytes = self.classes[at.class()].bytes(at.index());
        let (record, rest) = Record::ref_from_prefix(bytes).expect("aligned strides");
        (record, &rest[..record.key_len()])
    }

    /// Appends a record to the class of its key.
    pub(crate) fn insert(&mut self, record: &Record, key: &[u8]) -> Result<Ref, NoMemory> {
        debug_assert_eq!(record.key_len(), key.len());
        let number = class_of(key.len());
        let class = &mut self.classes[number];
        if class.len > INDEX_MASK as usize {
            return Err(NoMemory);
        }
        if class.len == class.chunks.len() * class.per_chunk as usize {
            let chunk = MmapMut::map_anon(CHUNK_BYTES).map_err(|_| NoMemory)?;
            if class.chunks.len() >= HUGE_FROM_CHUNK {
                // A wish; a kernel without huge pages refuses it, and nothing is lost.
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
        Ok(Ref::new(number, index))
    }

    /// Removes a record. If another one moved into its place, that one was called by the returned name until now
    /// and is called `at` from now on.
    #[must_use]
    pub(crate) fn remove(&mut self, at: Ref) -> Option<Ref> {
        let class = &mut self.classes[at.class()];
        let (index, last) = (at.index(), class.len - 1);
        assert!(index <= last, "a record that is there");
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
        // One empty chunk stays, so that a class that grows and shrinks around a boundary does not map and unmap.
        let needed = last.div_ceil(class.per_chunk as usize) + 1;
        class.chunks.truncate(needed);
        (index != last).then(|| Ref::new(at.class(), last))
    }

    /// A record drawn at random.
    pub(crate) fn draw(&self, rng: &mut Rng) -> Option<Ref> {
        if self.len == 0 {
            return None;
        }
        let mut index = rng.below(self.len);
        for (number, class) in self.classes.iter().enumerate() {
            if index < class.len {
                return Some(Ref::new(number, index));
            }
            index -= class.len;
        }
        unreachable!("the classes' lengths sum to the length")
    }

    /// The record before `cursor`, counting down; `None` starts behind the last one.
    pub(crate) fn before(&self, cursor: Option<Ref>) -> Option<Ref> {
        let (class, below) = match cursor {
            None => (CLASSES - 1, usize::MAX),
            // The class may have shrunk since.
            Some(cursor) => (cursor.class().min(CLASSES - 1), cursor.index()),
        };
        let below = below.min(self.classes[class].len);
        if below > 0 {
            return Some(Ref::new(class, below - 1));
        }
        let lower = (0..class).rev().find(|&class| self.classes[class].len > 0)?;
        Some(Ref::new(lower, self.classes[lower].len - 1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tenant::TenantIx;
    use moontide_types::{Epoch, ObjectId};

    fn put(slab: &mut Slab, number: u64, key_len: usize) -> Ref {
        let mut id = [0; 16];
        id[..8].copy_from_slice(&number.to_le_bytes());
        let key = vec![number as u8; key_len];
        let record = Record::new(ObjectId(id), Epoch::ZERO, TenantIx(0), key_len, number);
        slab.insert(&record, &key).unwrap()
    }

    #[test]
    fn every_key_length_has_a_class_that_holds_it() {
        for len in 1..=KEY_BYTES_MAX {
            let class = class_of(len);
            assert!(CLASS_KEY_BYTES[class] >= len);
            assert!(class == 0 || CLASS_KEY_BYTES[class - 1] < len);
            assert!(CLASS_KEY_BYTES[class] <= (len + 7).max(len * 5 / 4 + 1), "{len}");
        }
        assert_eq!(RECORD_BYTES + CLASS_KEY_BYTES[class_of(64)], 136);
    }

    #[test]
    fn removing_moves_the_last_and_gives_memory_back() {
        let seed = 11;
        let mut rng = Rng::new(seed);
        let mut slab = Slab::new();
        // What should be there: name to number.
        let mut there = std::collections::HashMap::new();
        for number in 0..20_000u64 {
            let key_len = 1 + rng.below(200);
            let at = put(&mut slab, number, key_len);
            there.insert(at, (number, key_len));
        }
        let full = slab.memory_bytes();
        while there.len() > 500 {
            let at = slab.draw(&mut rng).unwrap();
            there.remove(&at).expect("a record that is there");
            if let Some(old) = slab.remove(at) {
                let moved = there.remove(&old).expect("what moved was there");
                there.insert(at, moved);
            }
        }
        assert_eq!(slab.len(), 500);
        for (&at, &(number, key_len)) in &there {
            let (record, key) = slab.with_key(at);
            assert_eq!((record.object_len(), key), (number, &vec![number as u8; key_len][..]), "seed {seed}");
        }
        assert!(slab.memory_bytes() <= full, "chunks are given back");
        // Counting down meets all of them once.
        let mut met = 0;
        let mut cursor = None;
        while let Some(at) = slab.before(cursor) {
            assert!(there.contains_key(&at));
            met += 1;
            cursor = Some(at);
        }
        assert_eq!(met, 500);
    }

    #[test]
    fn a_class_of_equal_keys_falls_with_what_is_removed() {
        let mut slab = Slab::new();
        let mut rng = Rng::new(3);
        for number in 0..500_000 {
            put(&mut slab, number, 64);
        }
        let full = slab.memory_bytes();
        for _ in 0..450_000 {
            let at = slab.draw(&mut rng).unwrap();
            let _ = slab.remove(at);
        }
        // A tenth, the chunk that is begun and the one that is kept.
        assert!(slab.memory_bytes() <= full / 10 + 2 * CHUNK_BYTES, "{} of {full}", slab.memory_bytes());
    }

    #[test]
    fn a_cursor_from_another_time_still_leads_down() {
        let mut slab = Slab::new();
        for number in 0..10 {
            put(&mut slab, number, 8);
        }
        assert_eq!(slab.before(Some(Ref::new(0, 99))), Some(Ref::new(0, 9)));
        assert_eq!(slab.before(Some(Ref::new(50, 3))), Some(Ref::new(0, 9)));
        assert_eq!(slab.before(Some(Ref::new(0, 0))), None);
    }
}
