//! [`Tombstones`]: which objects were removed, so that a restart does not bring them back.
//!
//! One file, `removed.log`, of blocks of 4 KiB. A block is written once and never touched again: a torn write can only
//! hit the removals that it carries, and these are not acknowledged yet.
//!
//! ```text
//!  0       4         6       8                                                          4092    4096
//!  ├ magic ┼ version ┼ count ┼ count × ( id 16 B │ version 8 B ) ─────┤ zeros ──────────┼ CRC-32C ┤
//! ```
//!
//! In memory: the highest removed version of each object. When the log has become much longer than what it says, the
//! backend has it written anew without what nobody needs any more ([`Tombstones::rewrite`]): to `removed.tmp`, synced,
//! renamed, directory synced.
//!
//! After a failed write or sync the file is not appended to again, for nobody knows what is in it: the next removal
//! writes the whole log anew.

use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use hashbrown::HashMap;
use moontide_types::{Epoch, ObjectId};
use parking_lot::{Mutex, RwLock};

use crate::buffer::{Aligned, BLOCK_BYTES, Buffer};
use crate::planted::{Bug, planted};
use crate::record::run_writes;
use crate::storage::{File, Mode, Op, OpKind, Queue, Storage, run_one, sync};

const LOG: &str = "removed.log";
const TEMPORARY: &str = "removed.tmp";

const MAGIC: [u8; 4] = *b"MTRM";
const VERSION: u16 = 1;
const ENTRIES_OFFSET: usize = 8;
const ENTRY_BYTES: usize = 24;
const CRC_OFFSET: usize = BLOCK_BYTES - 4;

/// Removals in one block.
const ENTRIES_MAX: usize = (CRC_OFFSET - ENTRIES_OFFSET) / ENTRY_BYTES;

/// A log up to this length is never written anew: it is read in a moment.
const REWRITE_BYTES_MIN: u64 = 1 << 20;

/// How many times longer than it was when it was written anew the log may become.
const REWRITE_FACTOR: u64 = 3;

/// Blocks that are read at a time.
const READ_BLOCKS: u64 = 256;

/// How often a bad block is read again.
const READ_ATTEMPTS_MAX: usize = 4;

/// Which versions of which objects were removed.
#[derive(Debug)]
pub(crate) struct Tombstones {
    storage: Arc<dyn Storage>,
    removed: RwLock<HashMap<ObjectId, Removed>>,
    waiting: Mutex<Waiting>,
    /// Taken before `waiting`, and this before `removed`.
    log: Mutex<Log>,
    /// Bytes of the log, for those who must not wait while it is written.
    log_len: AtomicU64,
    /// Bytes that it had when it was written anew the last time.
    anew_len: AtomicU64,
}

#[derive(Clone, Copy, Debug)]
struct Removed {
    version: Epoch,
    /// Which writing of the log was the last one before it.
    generation: u32,
}

/// Removals that nobody writes yet.
#[derive(Debug, Default)]
struct Waiting {
    entries: Vec<(ObjectId, Epoch)>,
    /// How many callers have put something here, ever.
    tickets: u64,
}

#[derive(Debug)]
struct Log {
    /// The file, if it may be appended to.
    file: Option<File>,
    len: u64,
    generation: u32,
    /// Callers up to this one have been answered for, and how it went for those that failed and have not heard.
    answered: u64,
    failed: HashMap<u64, io::ErrorKind>,
}

impl Tombstones {
    /// Reads the log; also how many blocks of it were bad. A log that cannot be read at all is an error: without it
    /// removed objects would come back.
    pub(crate) fn open(storage: &Arc<dyn Storage>, queue: &mut dyn Queue) -> io::Result<(Tombstones, u64)> {
        match storage.remove(Path::new(TEMPORARY)) {
            Err(err) if err.kind() != io::ErrorKind::NotFound => return Err(err),
            _ => {}
        }
        // An earlier process may have died, or failed, between a rename and this: what is appended to a file whose name is
        // not durable would be lost with it. All backends open this first, and what they write is in this directory.
        storage.sync_dir(Path::new(""))?;
        Tombstones::read(storage, queue, Mode::Write)
    }

    /// The same without changing anything: it must not be appended to.
    pub(crate) fn inspect(
        storage: &Arc<dyn Storage>,
        queue: &mut dyn Queue,
    ) -> io::Result<(Tombstones, u64)> {
        Tombstones::read(storage, queue, Mode::Read)
    }

    fn read(storage: &Arc<dyn Storage>, queue: &mut dyn Queue, mode: Mode) -> io::Result<(Tombstones, u64)> {
        let mut removed = HashMap::new();
        // What is read has generation 0: nothing of before this start is still on its way to the disk.
        let mut log = Log { file: None, len: 0, generation: 1, answered: 0, failed: HashMap::new() };
        let mut bad = 0;
        match storage.open(Path::new(LOG), mode) {
            Err(err) if err.kind() == io::ErrorKind::NotFound => {}
            Err(err) => return Err(err),
            Ok(file) => {
                // A block that the file does not hold all of was never acknowledged.
                let blocks = storage.len(&file)? / BLOCK_BYTES as u64;
                bad = read_blocks(queue, &file, blocks, &mut removed)?;
                log.len = blocks * BLOCK_BYTES as u64;
                log.file = Some(file);
            }
        }
        let tombstones = Tombstones {
            storage: storage.clone(),
            removed: RwLock::new(removed),
            waiting: Mutex::default(),
            log_len: AtomicU64::new(log.len),
            anew_len: AtomicU64::new(0),
            log: Mutex::new(log),
        };
        Ok((tombstones, bad))
    }

    /// Whether this version, or a newer one, was removed.
    pub(crate) fn covers(&self, id: &ObjectId, version: Epoch) -> bool {
        self.removed.read().get(id).is_some_and(|removed| removed.version >= version)
    }

    /// How many objects are known to be removed.
    pub(crate) fn len(&self) -> usize {
        self.removed.read().len()
    }

    /// Bytes of the log. Does not wait for a disk.
    pub(crate) fn log_bytes(&self) -> u64 {
        self.log_len.load(Ordering::Relaxed)
    }

    /// Records removals; when it returns, they are durable. From before that on [`Tombstones::covers`] knows them.
    /// Callers that come while another one writes share the next sync.
    pub(crate) fn append(&self, queue: &mut dyn Queue, entries: &[(ObjectId, Epoch)]) -> io::Result<()> {
        if entries.is_empty() {
            return Ok(());
        }
        let ticket = {
            let mut waiting = self.waiting.lock();
            waiting.entries.extend_from_slice(entries);
            waiting.tickets += 1;
            waiting.tickets
        };
        let mut log = self.log.lock();
        if ticket <= log.answered {
            return log.failed.remove(&ticket).map_or(Ok(()), |kind| Err(kind.into()));
        }
        let (entries, last) = {
            let mut waiting = self.waiting.lock();
            (std::mem::take(&mut waiting.entries), waiting.tickets)
        };
        self.learn(&entries, log.generation);
        let result = self.write(queue, &mut log, &entries);
        if let Err(err) = &result {
            // Whether these are in the log is not known; that they are known here does no harm.
            log.file = None;
            let others = log.answered + 1..=last;
            let kind = err.kind();
            log.failed.extend(others.filter(|&other| other != ticket).map(|other| (other, kind)));
        }
        log.answered = last;
        result
    }

    /// Whether the log has become much longer than it was when it was written anew.
    pub(crate) fn wants_rewrite(&self) -> bool {
        let anew = self.anew_len.load(Ordering::Relaxed);
        self.log_bytes() > REWRITE_BYTES_MIN.max(REWRITE_FACTOR * anew)
    }

    /// Writes the log anew, without removals that `keep` does not want, unless they came after the last writing: a
    /// record that was being written when its object was removed may still be on its way to the disk.
    pub(crate) fn rewrite(
        &self,
        queue: &mut dyn Queue,
        keep: impl Fn(&ObjectId, Epoch) -> bool,
    ) -> io::Result<()> {
        let mut log = self.log.lock();
        let generation = log.generation;
        let stays =
            |id: &ObjectId, removed: &Removed| removed.generation == generation || keep(id, removed.version);
        self.write_anew(queue, &mut log, &stays)?;
        // Forgotten only now: while the old log may still be read, what it says must be known, or a record would be
        // written that the next start takes for a removed one.
        self.removed.write().retain(|id, removed| stays(id, removed));
        self.anew_len.store(log.len, Ordering::Relaxed);
        log.generation += 1;
        Ok(())
    }

    fn learn(&self, entries: &[(ObjectId, Epoch)], generation: u32) {
        let mut removed = self.removed.write();
        for &(id, version) in entries {
            learn(&mut removed, id, Removed { version, generation });
        }
    }

    fn write(&self, queue: &mut dyn Queue, log: &mut Log, entries: &[(ObjectId, Epoch)]) -> io::Result<()> {
        let Some(file) = log.file.clone() else { return self.write_anew(queue, log, &|_, _| true) };
        let end = write_blocks(queue, &file, log.len, entries)?;
        if !planted(Bug::TombstoneUnsynced) {
            sync(queue, &file)?;
        }
        log.len = end;
        self.log_len.store(end, Ordering::Relaxed);
        Ok(())
    }

    fn write_anew(
        &self,
        queue: &mut dyn Queue,
        log: &mut Log,
        stays: &dyn Fn(&ObjectId, &Removed) -> bool,
    ) -> io::Result<()> {
        // Until the new one is in its place for good, there is none that could be appended to.
        log.file = None;
        let entries: Vec<(ObjectId, Epoch)> = {
            let removed = self.removed.read();
            removed
                .iter()
                .filter(|(id, removed)| stays(id, removed))
                .map(|(&id, removed)| (id, removed.version))
                .collect()
        };
        let temporary = Path::new(TEMPORARY);
        match self.storage.remove(temporary) {
            Err(err) if err.kind() != io::ErrorKind::NotFound => return Err(err),
            _ => {}
        }
        let file = self.storage.open(temporary, Mode::Create)?;
        let len = write_blocks(queue, &file, 0, &entries)?;
        if !planted(Bug::TombstoneUnsynced) {
            sync(queue, &file)?;
        }
        self.storage.rename(temporary, Path::new(LOG))?;
        self.storage.sync_dir(Path::new(""))?;
        (log.file, log.len) = (Some(file), len);
        self.log_len.store(len, Ordering::Relaxed);
        Ok(())
    }
}

fn learn(removed: &mut HashMap<ObjectId, Removed>, id: ObjectId, new: Removed) {
    let known = removed.entry(id).or_insert(new);
    if new.version >= known.version {
        *known = new;
    }
}

/// Appends blocks; where they end.
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

/// Reads that many blocks; how many of them were bad.
fn read_blocks(
    queue: &mut dyn Queue,
    file: &File,
    blocks: u64,
    removed: &mut HashMap<ObjectId, Removed>,
) -> io::Result<u64> {
    let mut bad = 0;
    for first in (0..blocks).step_by(READ_BLOCKS as usize) {
        let count = READ_BLOCKS.min(blocks - first) as usize;
        let offset = first * BLOCK_BYTES as u64;
        let buffer = Buffer::Owned(Aligned::zeroed(count * BLOCK_BYTES));
        let done = run_one(queue, Op { tag: 0, kind: OpKind::Read, file: file.clone(), offset, buffer });
        done.result?;
        for (block, index) in done.buffer.as_slice().as_chunks().0.iter().zip(first..) {
            let good = decode_into(block, removed) || read_again(queue, file, index, removed);
            bad += u64::from(!good);
        }
    }
    Ok(bad)
}

/// A bad block is read again a few times before it is given up: a removal that is lost brings its object back.
fn read_again(
    queue: &mut dyn Queue,
    file: &File,
    index: u64,
    removed: &mut HashMap<ObjectId, Removed>,
) -> bool {
    (0..READ_ATTEMPTS_MAX).any(|_| {
        let (offset, buffer) = (index * BLOCK_BYTES as u64, Buffer::Owned(Aligned::zeroed(BLOCK_BYTES)));
        let done = run_one(queue, Op { tag: 0, kind: OpKind::Read, file: file.clone(), offset, buffer });
        let block = done.buffer.as_slice().first_chunk();
        done.result.is_ok() && block.is_some_and(|block| decode_into(block, removed))
    })
}

fn decode_into(block: &[u8; BLOCK_BYTES], removed: &mut HashMap<ObjectId, Removed>) -> bool {
    let Some(entries) = decode(block) else { return false };
    entries.for_each(|(id, version)| learn(removed, id, Removed { version, generation: 0 }));
    true
}

/// Removals as blocks, the last one filled up with zeros.
pub(crate) fn encode(entries: &[(ObjectId, Epoch)]) -> Aligned {
    let mut buffer = Aligned::zeroed(entries.len().div_ceil(ENTRIES_MAX) * BLOCK_BYTES);
    for (block, entries) in buffer.chunks_exact_mut(BLOCK_BYTES).zip(entries.chunks(ENTRIES_MAX)) {
        block[..4].copy_from_slice(&MAGIC);
        block[4..6].copy_from_slice(&VERSION.to_le_bytes());
        block[6..8].copy_from_slice(&(entries.len() as u16).to_le_bytes());
        for (place, (id, version)) in block[ENTRIES_OFFSET..].chunks_exact_mut(ENTRY_BYTES).zip(entries) {
            place[..16].copy_from_slice(&id.0);
            place[16..].copy_from_slice(&version.bits().to_le_bytes());
        }
        let crc = crc32c::crc32c(&block[..CRC_OFFSET]);
        block[CRC_OFFSET..].copy_from_slice(&crc.to_le_bytes());
    }
    buffer
}

/// The removals in a block, if it is one and undamaged. For any bytes.
pub(crate) fn decode(block: &[u8; BLOCK_BYTES]) -> Option<impl Iterator<Item = (ObjectId, Epoch)>> {
    let (body, crc) = block.split_last_chunk::<4>()?;
    let count = usize::from(u16::from_le_bytes([block[6], block[7]]));
    let good = block[..4] == MAGIC
        && block[4..6] == VERSION.to_le_bytes()
        && count <= ENTRIES_MAX
        && crc32c::crc32c(body) == u32::from_le_bytes(*crc);
    let entries = block[ENTRIES_OFFSET..].as_chunks::<ENTRY_BYTES>().0;
    good.then(|| {
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
    use crate::samples::{Random, fill, id};
    use crate::simulated::{Faults, SimulatedDisk};
    use crate::storage::QueueConfig;

    fn epoch(bits: u64) -> Epoch {
        Epoch::from_bits(bits).unwrap()
    }

    fn open(disk: &SimulatedDisk) -> (Tombstones, u64) {
        let storage: Arc<dyn Storage> = Arc::new(disk.clone());
        Tombstones::open(&storage, &mut *disk.queue(&QueueConfig::default())).unwrap()
    }

    #[test]
    fn removals_survive() {
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
        assert!(!tombstones.covers(&id(1), epoch(6)), "newer ones are not removed");
        assert!(tombstones.covers(&id(999), epoch(999)));
    }

    #[test]
    fn a_bad_block_is_skipped_alone() {
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
        // A torn end is written over.
        disk.truncate(LOG, 3 * 4096 - 1);
        let (tombstones, _) = open(&disk);
        tombstones.append(queue, &[(id(7), epoch(1))]).unwrap();
        let (tombstones, _) = open(&disk);
        assert_eq!([0, 2, 7].map(|n| tombstones.covers(&id(n), epoch(1))), [true, false, true]);
    }

    #[test]
    fn a_rewritten_log_holds_what_is_kept_and_what_is_new() {
        let disk = SimulatedDisk::new(1);
        let queue = &mut *disk.queue(&QueueConfig::default());
        let tombstones = open(&disk).0;
        for n in 0..300 {
            tombstones.append(queue, &[(id(n % 10), epoch(n + 1))]).unwrap();
        }
        assert!(tombstones.wants_rewrite(), "300 blocks for 10 removals");
        tombstones.rewrite(queue, |_, _| false).unwrap();
        assert_eq!(tombstones.len(), 10, "they came after the last writing");
        assert!(!tombstones.wants_rewrite());
        tombstones.append(queue, &[(id(50), epoch(1))]).unwrap();
        tombstones.rewrite(queue, |object, _| *object == id(3)).unwrap();
        disk.restart();
        let (tombstones, bad) = open(&disk);
        assert_eq!((tombstones.len(), bad), (2, 0));
        assert!(tombstones.covers(&id(3), epoch(294)) && tombstones.covers(&id(50), epoch(1)));
    }

    #[test]
    fn after_a_failure_the_log_is_written_anew() {
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
            assert!(acknowledged.len() < 30, "seed {seed}: something must have failed");
            disk.restart();
            let (tombstones, _) = open(&disk);
            for n in acknowledged {
                assert!(tombstones.covers(&id(n), epoch(1)), "seed {seed}: removal {n} is lost");
            }
        }
    }

    #[test]
    fn callers_share_syncs_and_all_are_durable() {
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
        let mut random = Random(9);
        for _ in 0..10_000 {
            let mut block = [0; BLOCK_BYTES];
            fill(random.next(), &mut block);
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
