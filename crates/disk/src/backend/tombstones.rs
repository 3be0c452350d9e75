//! [`Tombstones`]: removed versions of objects, so that a restart does not restore them.
//!
//! One file, `removed.log`, of blocks of 4 KiB. A block is written once and never changed: a torn write can only affect
//! the removals in this block, which are not acknowledged yet.
//!
//! ```text
//!  0       4         6       8                                                          4092    4096
//!  ├ magic ┼ version ┼ count ┼ count × ( id 16 B │ version 8 B ) ─────┤ zeros ──────────┼ CRC-32C ┤
//! ```
//!
//! In memory: the highest removed version of each object. When the log has become much longer than its content, the
//! backend compacts it: it rewrites the log without obsolete removals ([`Tombstones::compact`]) to `removed.tmp`, which
//! is synced and renamed, and then the directory is synced.
//!
//! After a failed write or sync the file is not appended to again, because its content is unknown: the next removal
//! rewrites the whole log.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use moontide_rt::collections::HashMap;
use moontide_rt::sync::{Mutex, RwLock};
use moontide_rt::{mark, mutation_enabled};
use moontide_types::{Epoch, ObjectId};

use crate::buffer::{AlignedBuf, BLOCK_BYTES, Buffer};
use crate::mutation::Mutation;
use crate::record::run_writes;
use crate::storage::{File, Op, OpKind, OpenMode, Queue, Storage, run_one, sync};

const LOG: &str = "removed.log";
const TEMPORARY: &str = "removed.tmp";

const MAGIC: [u8; 4] = *b"MTRM";
const VERSION: u16 = 1;
const ENTRIES_OFFSET: usize = 8;
const ENTRY_BYTES: usize = 24;
const CRC_OFFSET: usize = BLOCK_BYTES - 4;

/// Removals in one block.
const ENTRIES_MAX: usize = (CRC_OFFSET - ENTRIES_OFFSET) / ENTRY_BYTES;

/// Length up to which a log is never rewritten: it is read quickly.
const COMPACT_BYTES_MIN: u64 = 1 << 20;

/// Growth of the log since its last compaction that triggers the next one.
const COMPACT_FACTOR: u64 = 3;

/// Blocks per read.
const READ_BLOCKS: u64 = 256;

/// Maximum number of further reads of a bad block.
const READ_ATTEMPTS_MAX: usize = 4;

/// Removed versions of objects.
#[derive(Debug)]
pub(crate) struct Tombstones {
    storage: Arc<dyn Storage>,
    removed: RwLock<HashMap<ObjectId, Tombstone>>,
    pending: Mutex<PendingRemovals>,
    /// Locked before `pending`, and that before `removed`.
    log: Mutex<TombstoneLog>,
    /// Bytes of the log, for callers that must not wait while it is written.
    log_len: AtomicU64,
    /// Bytes of the log after its last compaction.
    compacted_len: AtomicU64,
}

#[derive(Clone, Copy, Debug)]
struct Tombstone {
    version: Epoch,
    /// Generation of the log when the removal was appended.
    generation: u32,
}

/// Removals that are not being written yet.
#[derive(Debug, Default)]
struct PendingRemovals {
    entries: Vec<(ObjectId, Epoch)>,
    /// Number of calls that have added removals.
    tickets: u64,
}

#[derive(Debug)]
struct TombstoneLog {
    /// The file, if it may be appended to.
    file: Option<File>,
    len: u64,
    generation: u32,
    /// Calls up to this ticket are completed. `failed` holds the errors of those that have not returned yet.
    completed: u64,
    failed: HashMap<u64, io::ErrorKind>,
}

impl Tombstones {
    /// Reads the log, and returns the number of bad blocks. A log that cannot be read at all is an error: without it,
    /// removed objects would reappear.
    pub(crate) fn open(storage: &Arc<dyn Storage>, queue: &mut dyn Queue) -> io::Result<(Tombstones, u64)> {
        match storage.remove(Path::new(TEMPORARY)) {
            Err(err) if err.kind() != io::ErrorKind::NotFound => return Err(err),
            _ => {}
        }
        // An earlier process may have exited between a rename and this sync: appends to a file whose name is not
        // durable would be lost with it. All backends open this log first, and their files are in this directory.
        storage.sync_dir(Path::new(""))?;
        Tombstones::read(storage, queue, OpenMode::Write)
    }

    /// Like [`Tombstones::open`], without changes to the disk: the result must not be appended to.
    pub(crate) fn inspect(
        storage: &Arc<dyn Storage>,
        queue: &mut dyn Queue,
    ) -> io::Result<(Tombstones, u64)> {
        Tombstones::read(storage, queue, OpenMode::Read)
    }

    fn read(
        storage: &Arc<dyn Storage>,
        queue: &mut dyn Queue,
        mode: OpenMode,
    ) -> io::Result<(Tombstones, u64)> {
        let mut removed = HashMap::new();
        // Removals that were read have generation 0: no write from before this start is still in progress.
        let mut log =
            TombstoneLog { file: None, len: 0, generation: 1, completed: 0, failed: HashMap::new() };
        let mut bad = 0;
        match storage.open(Path::new(LOG), mode) {
            Err(err) if err.kind() == io::ErrorKind::NotFound => {}
            Err(err) => return Err(err),
            Ok(file) => {
                // An incomplete last block was never acknowledged.
                let blocks = storage.len(&file)? / BLOCK_BYTES as u64;
                bad = read_blocks(queue, &file, blocks, &mut removed)?;
                log.len = blocks * BLOCK_BYTES as u64;
                log.file = Some(file);
            }
        }
        let tombstones = Tombstones {
            storage: storage.clone(),
            removed: RwLock::new(removed),
            pending: Mutex::default(),
            log_len: AtomicU64::new(log.len),
            compacted_len: AtomicU64::new(0),
            log: Mutex::new(log),
        };
        Ok((tombstones, bad))
    }

    /// Whether this version, or a newer one, was removed.
    pub(crate) fn covers(&self, id: &ObjectId, version: Epoch) -> bool {
        self.removed.read().get(id).is_some_and(|removed| removed.version >= version)
    }

    /// Number of objects with a tombstone.
    pub(crate) fn len(&self) -> usize {
        self.removed.read().len()
    }

    /// Returns the length of the log. Does not wait for I/O.
    pub(crate) fn log_bytes(&self) -> u64 {
        self.log_len.load(Ordering::Relaxed)
    }

    /// Appends removals; they are durable when it returns. [`Tombstones::covers`] includes them earlier. Calls that
    /// arrive during a write share the next sync.
    pub(crate) fn append(&self, queue: &mut dyn Queue, entries: &[(ObjectId, Epoch)]) -> io::Result<()> {
        if entries.is_empty() {
            return Ok(());
        }
        let ticket = {
            let mut pending = self.pending.lock();
            pending.entries.extend_from_slice(entries);
            pending.tickets += 1;
            pending.tickets
        };
        let mut log = self.log.lock();
        if ticket <= log.completed {
            return log.failed.remove(&ticket).map_or(Ok(()), |kind| Err(kind.into()));
        }
        let (entries, last) = {
            let mut pending = self.pending.lock();
            (std::mem::take(&mut pending.entries), pending.tickets)
        };
        self.add(&entries, log.generation);
        let result = self.write(queue, &mut log, &entries);
        if let Err(err) = &result {
            // It is unknown whether these are in the log; it does no harm to have them in memory.
            log.file = None;
            let others = log.completed + 1..=last;
            let kind = err.kind();
            log.failed.extend(others.filter(|&other| other != ticket).map(|other| (other, kind)));
        }
        log.completed = last;
        result
    }

    /// Whether the log has become much longer than after its last compaction.
    pub(crate) fn needs_compaction(&self) -> bool {
        let compacted = self.compacted_len.load(Ordering::Relaxed);
        self.log_bytes() > COMPACT_BYTES_MIN.max(COMPACT_FACTOR * compacted)
    }

    /// Rewrites the log without removals for which `keep` returns false, except those since the last compaction: a
    /// record that was being written when its object was removed may still be in flight to the disk.
    pub(crate) fn compact(
        &self,
        queue: &mut dyn Queue,
        keep: impl Fn(&ObjectId, Epoch) -> bool,
    ) -> io::Result<()> {
        let mut log = self.log.lock();
        let generation = log.generation;
        let retain = |id: &ObjectId, removed: &Tombstone| {
            removed.generation == generation || keep(id, removed.version)
        };
        self.rewrite(queue, &mut log, &retain)?;
        // Dropped only now: while the old log may still be read, its removals must be in memory; otherwise a record
        // could be written that the next start treats as removed.
        self.removed.write().retain(|id, removed| retain(id, removed));
        self.compacted_len.store(log.len, Ordering::Relaxed);
        log.generation += 1;
        Ok(())
    }

    fn add(&self, entries: &[(ObjectId, Epoch)], generation: u32) {
        let mut removed = self.removed.write();
        for &(id, version) in entries {
            add(&mut removed, id, Tombstone { version, generation });
        }
    }

    fn write(
        &self,
        queue: &mut dyn Queue,
        log: &mut TombstoneLog,
        entries: &[(ObjectId, Epoch)],
    ) -> io::Result<()> {
        let Some(file) = log.file.clone() else {
            mark!("log of removals replaced after a failed write", log.len > 0);
            return self.rewrite(queue, log, &|_, _| true);
        };
        let end = write_blocks(queue, &file, log.len, entries)?;
        if !mutation_enabled(Mutation::TombstoneUnsynced) {
            sync(queue, &file)?;
        }
        log.len = end;
        self.log_len.store(end, Ordering::Relaxed);
        Ok(())
    }

    fn rewrite(
        &self,
        queue: &mut dyn Queue,
        log: &mut TombstoneLog,
        retain: &dyn Fn(&ObjectId, &Tombstone) -> bool,
    ) -> io::Result<()> {
        // Until the new file is durably in place, there is none that may be appended to.
        log.file = None;
        let entries: Vec<(ObjectId, Epoch)> = {
            let removed = self.removed.read();
            removed
                .iter()
                .filter(|(id, removed)| retain(id, removed))
                .map(|(&id, removed)| (id, removed.version))
                .collect()
        };
        let temporary = Path::new(TEMPORARY);
        match self.storage.remove(temporary) {
            Err(err) if err.kind() != io::ErrorKind::NotFound => return Err(err),
            _ => {}
        }
        let file = self.storage.open(temporary, OpenMode::Create)?;
        let len = write_blocks(queue, &file, 0, &entries)?;
        if !mutation_enabled(Mutation::TombstoneUnsynced) {
            sync(queue, &file)?;
        }
        self.storage.rename(temporary, Path::new(LOG))?;
        self.storage.sync_dir(Path::new(""))?;
        (log.file, log.len) = (Some(file), len);
        self.log_len.store(len, Ordering::Relaxed);
        Ok(())
    }
}

fn add(removed: &mut HashMap<ObjectId, Tombstone>, id: ObjectId, new: Tombstone) {
    let current = removed.entry(id).or_insert(new);
    if new.version >= current.version {
        *current = new;
    }
}

/// Writes blocks from `offset` on, and returns their end.
fn write_blocks(
    queue: &mut dyn Queue,
    file: &File,
    offset: u64,
    entries: &[(ObjectId, Epoch)],
) -> io::Result<u64> {
    let writes = entries.chunks(ENTRIES_MAX * READ_BLOCKS as usize);
    let mut end = offset;
    let ops = writes.map(|entries| {
        let buffer = encode(entries);
        let offset = end;
        end += buffer.len() as u64;
        Op { tag: 0, kind: OpKind::Write, file: file.clone(), offset, buffer: Buffer::Owned(buffer) }
    });
    run_writes(queue, ops)?;
    Ok(end)
}

/// Reads `blocks` blocks, and returns the number of bad ones.
fn read_blocks(
    queue: &mut dyn Queue,
    file: &File,
    blocks: u64,
    removed: &mut HashMap<ObjectId, Tombstone>,
) -> io::Result<u64> {
    let mut bad = 0;
    for first in (0..blocks).step_by(READ_BLOCKS as usize) {
        let count = READ_BLOCKS.min(blocks - first) as usize;
        let offset = first * BLOCK_BYTES as u64;
        let buffer = Buffer::Owned(AlignedBuf::zeroed(count * BLOCK_BYTES));
        let done = run_one(queue, Op { tag: 0, kind: OpKind::Read, file: file.clone(), offset, buffer });
        done.result?;
        for (block, index) in done.buffer.as_slice().as_chunks().0.iter().zip(first..) {
            let valid = decode_into(block, removed) || read_again(queue, file, index, removed);
            bad += u64::from(!valid);
        }
    }
    Ok(bad)
}

/// Reads a bad block again, several times: a lost removal would restore its object.
fn read_again(
    queue: &mut dyn Queue,
    file: &File,
    index: u64,
    removed: &mut HashMap<ObjectId, Tombstone>,
) -> bool {
    (0..READ_ATTEMPTS_MAX).any(|_| {
        let (offset, buffer) = (index * BLOCK_BYTES as u64, Buffer::Owned(AlignedBuf::zeroed(BLOCK_BYTES)));
        let done = run_one(queue, Op { tag: 0, kind: OpKind::Read, file: file.clone(), offset, buffer });
        let block = done.buffer.as_slice().first_chunk();
        done.result.is_ok() && block.is_some_and(|block| decode_into(block, removed))
    })
}

fn decode_into(block: &[u8; BLOCK_BYTES], removed: &mut HashMap<ObjectId, Tombstone>) -> bool {
    let Some(entries) = decode(block) else { return false };
    entries.for_each(|(id, version)| add(removed, id, Tombstone { version, generation: 0 }));
    true
}

/// Encodes removals as blocks; the last one is padded with zeros.
pub(crate) fn encode(entries: &[(ObjectId, Epoch)]) -> AlignedBuf {
    let mut buffer = AlignedBuf::zeroed(entries.len().div_ceil(ENTRIES_MAX) * BLOCK_BYTES);
    for (block, entries) in buffer.chunks_exact_mut(BLOCK_BYTES).zip(entries.chunks(ENTRIES_MAX)) {
        block[..4].copy_from_slice(&MAGIC);
        block[4..6].copy_from_slice(&VERSION.to_le_bytes());
        block[6..8].copy_from_slice(&(entries.len() as u16).to_le_bytes());
        for (entry, (id, version)) in block[ENTRIES_OFFSET..].chunks_exact_mut(ENTRY_BYTES).zip(entries) {
            entry[..16].copy_from_slice(&id.0);
            entry[16..].copy_from_slice(&version.bits().to_le_bytes());
        }
        let crc = crc32c::crc32c(&block[..CRC_OFFSET]);
        block[CRC_OFFSET..].copy_from_slice(&crc.to_le_bytes());
    }
    buffer
}

/// Returns the removals in a block, if it is valid. Accepts any bytes.
pub(crate) fn decode(block: &[u8; BLOCK_BYTES]) -> Option<impl Iterator<Item = (ObjectId, Epoch)>> {
    let (body, crc) = block.split_last_chunk::<4>()?;
    let count = usize::from(u16::from_le_bytes([block[6], block[7]]));
    let valid = block[..4] == MAGIC
        && block[4..6] == VERSION.to_le_bytes()
        && count <= ENTRIES_MAX
        && crc32c::crc32c(body) == u32::from_le_bytes(*crc);
    let entries = block[ENTRIES_OFFSET..].as_chunks::<ENTRY_BYTES>().0;
    valid.then(|| {
        entries.iter().take(count).filter_map(|entry| {
            let (id, version) = entry.split_first_chunk::<16>()?;
            let version = Epoch::from_bits(u64::from_le_bytes(version.try_into().ok()?)).ok()?;
            Some((ObjectId(*id), version))
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::{fill, id};
    use crate::simulated::{Faults, SimulatedDisk};
    use crate::storage::QueueConfig;
    use moontide_rt::SplitMix64;

    fn epoch(bits: u64) -> Epoch {
        Epoch::from_bits(bits).unwrap()
    }

    fn open(disk: &SimulatedDisk) -> (Tombstones, u64) {
        let storage: Arc<dyn Storage> = Arc::new(disk.clone());
        Tombstones::open(&storage, &mut *disk.queue(&QueueConfig::default())).unwrap()
    }

    #[test]
    fn tombstones_survive_restart() {
        let disk = SimulatedDisk::new(1);
        let queue = &mut *disk.queue(&QueueConfig::default());
        let tombstones = open(&disk).0;
        assert!(!tombstones.covers(&id(1), epoch(1)));
        tombstones.append(queue, &[(id(1), epoch(5)), (id(2), epoch(7))]).unwrap();
        tombstones.append(queue, &[(id(1), epoch(3))]).unwrap();
        let many: Vec<_> = (10..1000).map(|n| (id(n), epoch(n))).collect();
        tombstones.append(queue, &many).unwrap();
        disk.restart();
        let (tombstones, bad) = open(&disk);
        assert_eq!((tombstones.len(), bad), (992, 0));
        assert!(tombstones.covers(&id(1), epoch(5)) && tombstones.covers(&id(1), epoch(4)));
        assert!(!tombstones.covers(&id(1), epoch(6)), "newer versions are not removed");
        assert!(tombstones.covers(&id(999), epoch(999)));
    }

    #[test]
    fn corrupt_block_is_skipped_and_torn_end_is_overwritten() {
        let disk = SimulatedDisk::new(1);
        let queue = &mut *disk.queue(&QueueConfig::default());
        let tombstones = open(&disk).0;
        for n in 0..3 {
            tombstones.append(queue, &[(id(n), epoch(1))]).unwrap();
        }
        disk.flip_bit(LOG, 4096 * 8 + 100);
        let (tombstones, bad) = open(&disk);
        assert_eq!(bad, 1);
        assert_eq!([0, 1, 2].map(|n| tombstones.covers(&id(n), epoch(1))), [true, false, true]);
        // A torn end is overwritten.
        disk.truncate(LOG, 3 * 4096 - 1);
        let (tombstones, _) = open(&disk);
        tombstones.append(queue, &[(id(7), epoch(1))]).unwrap();
        let (tombstones, _) = open(&disk);
        assert_eq!([0, 2, 7].map(|n| tombstones.covers(&id(n), epoch(1))), [true, false, true]);
    }

    #[test]
    fn compaction_keeps_needed_and_new_tombstones() {
        let disk = SimulatedDisk::new(1);
        let queue = &mut *disk.queue(&QueueConfig::default());
        let tombstones = open(&disk).0;
        for n in 0..300 {
            tombstones.append(queue, &[(id(n % 10), epoch(n + 1))]).unwrap();
        }
        assert!(tombstones.needs_compaction(), "300 blocks for 10 removals");
        tombstones.compact(queue, |_, _| false).unwrap();
        assert_eq!(tombstones.len(), 10, "they were appended after the last compaction");
        assert!(!tombstones.needs_compaction());
        tombstones.append(queue, &[(id(50), epoch(1))]).unwrap();
        tombstones.compact(queue, |object, _| *object == id(3)).unwrap();
        disk.restart();
        let (tombstones, bad) = open(&disk);
        assert_eq!((tombstones.len(), bad), (2, 0));
        assert!(tombstones.covers(&id(3), epoch(294)) && tombstones.covers(&id(50), epoch(1)));
    }

    #[test]
    fn acknowledged_tombstones_survive_write_and_sync_faults() {
        for seed in 0..50 {
            let disk = SimulatedDisk::new(seed);
            let queue = &mut *disk.queue(&QueueConfig::default());
            let tombstones = open(&disk).0;
            let mut acknowledged = vec![];
            disk.set_faults(Faults {
                sync_error_permille: 300,
                torn_write_permille: 100,
                ..Faults::default()
            });
            for n in 0..30 {
                if tombstones.append(queue, &[(id(n), epoch(1))]).is_ok() {
                    acknowledged.push(n);
                }
            }
            disk.set_faults(Faults::default());
            assert!(acknowledged.len() < 30, "seed {seed}: no fault occurred");
            disk.restart();
            let (tombstones, _) = open(&disk);
            for n in acknowledged {
                assert!(tombstones.covers(&id(n), epoch(1)), "seed {seed}: removal {n} is lost");
            }
        }
    }

    #[test]
    fn concurrent_appends_are_all_durable() {
        let disk = SimulatedDisk::new(3);
        let tombstones = open(&disk).0;
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (tombstones, disk) = (&tombstones, &disk);
                scope.spawn(move || {
                    let queue = &mut *disk.queue(&QueueConfig::default());
                    for n in 0..100 {
                        tombstones.append(queue, &[(id(thread * 1000 + n), epoch(1))]).unwrap();
                    }
                });
            }
        });
        disk.restart();
        assert_eq!(open(&disk).0.len(), 400);
    }

    #[test]
    fn arbitrary_blocks_are_refused() {
        let mut rng = SplitMix64::new(9);
        for _ in 0..10_000 {
            let mut block = [0; BLOCK_BYTES];
            fill(rng.next_u64(), &mut block);
            block[..6].copy_from_slice(b"MTRM\x01\x00");
            assert!(decode(&block).is_none());
        }
        let mut block: [u8; BLOCK_BYTES] = encode(&[(id(1), epoch(2))])[..].try_into().unwrap();
        assert_eq!(decode(&block).unwrap().collect::<Vec<_>>(), [(id(1), epoch(2))]);
        for bit in 0..BLOCK_BYTES * 8 {
            block[bit / 8] ^= 1 << (bit % 8);
            assert!(decode(&block).is_none(), "bit {bit}");
            block[bit / 8] ^= 1 << (bit % 8);
        }
    }
}
