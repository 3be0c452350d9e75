//! Creates the file, or opens it: reads the table and builds the index.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use moontide_rt::collections::{HashMap, HashSet};
use moontide_rt::sync::Mutex;
use tracing::{info, warn};

use super::format::{ENTRIES_PER_BLOCK, ENTRY_BYTES, Entry, Geometry, Slot};
use super::group_sync::GroupSync;
use super::space::{RangeConflict, SpaceMap, conflicts};
use super::table::{Change, SlotNumber, Table};
use super::{INDEX_SHARDS, IndexedRecord, OffsetBackend, OffsetConfig, UnlinkedRecord};
use crate::backend::batch_io::{PreambleScan, READS_MAX, scan_preambles};
use crate::backend::claims::WriteClaims;
use crate::backend::eviction_queue::EvictionQueue;
use crate::backend::tombstones::Tombstones;
use crate::backend::{OpenError, RecordId, Recovery, ScannedRecord};
use crate::buffer::{AlignedBuf, BLOCK_BYTES, Buffer};
use crate::storage::{self, File, Op, OpKind, OpenMode, Queue, Storage, run_all, run_one};

/// Name of the data file.
pub(super) const DATA: &str = "data.moontide";
/// Name of the file during its creation.
const TEMPORARY: &str = "data.moontide.tmp";

/// Maximum space for the tombstone log: many times its length after a compaction.
const LOG_BYTES_MAX: u64 = 4 << 20;

/// Blocks of the table that are read in one operation: 1 MiB.
const READ_BLOCKS: u32 = 256;

/// Maximum number of operations in memory while the table is read: 32 MiB.
const READS_IN_FLIGHT: usize = 32;

const BLOCK: u64 = BLOCK_BYTES as u64;

impl OffsetConfig {
    fn geometry(&self) -> Result<Geometry, OpenError> {
        let bytes = self.limit_bytes - (self.limit_bytes / 8).min(LOG_BYTES_MAX);
        let (table, value) = (u64::from(self.entries.unwrap_or(4096)) * ENTRY_BYTES as u64, self.limit_bytes);
        let config =
            || OpenError::Config { what: "limit_bytes", value, min: 2 * table + 8 * BLOCK, max: 1 << 60 };
        if self.limit_bytes > 1 << 60 {
            return Err(config());
        }
        Geometry::new(bytes, self.entries).ok_or_else(config)
    }
}

impl OffsetBackend {
    /// Opens the tier, or creates it, and calls `found` for every record; corrupt ones are skipped and listed.
    pub fn open(
        storage: Arc<dyn Storage>,
        queue: &mut dyn Queue,
        config: OffsetConfig,
        found: &mut dyn FnMut(ScannedRecord<'_>),
    ) -> Result<(OffsetBackend, Recovery), OpenError> {
        let configured = config.geometry()?;
        let (tombstones, _) =
            Tombstones::open(&storage, queue).map_err(OpenError::io("read the tombstone log"))?;
        let (file, geometry) = open_file(&*storage, queue, configured)?;
        if geometry.file_len != configured.file_len {
            warn!(
                file_bytes = geometry.file_len,
                configured_bytes = configured.file_len,
                "the data file keeps the size with which it was created; delete the file to change it"
            );
        }
        let limit =
            if geometry.file_len == configured.file_len { config.limit_bytes } else { geometry.file_len };

        let mut recovery = Recovery { files: 1, ..Recovery::default() };
        let scan = scan_table(queue, &file, &geometry);
        for block in &scan.unreadable {
            recovery.bad(DATA, geometry.table_block(*block), "cannot read a block of the table");
        }
        for slot in &scan.corrupt {
            recovery.bad(DATA, slot_offset(&geometry, *slot), "corrupt table entry");
        }
        let (entries, mut gone) = partition_entries(&geometry, &tombstones, scan.used, &mut recovery);
        gone.extend(&scan.corrupt);
        let valid = scan_records(queue, &file, &entries, found, &mut recovery);

        let table = Table::new(file.clone(), geometry, &entries);
        let syncs = GroupSync::new(file.clone());
        // Entries that are dropped must be cleared durably before their space is reused.
        let complete = scan.unreadable.is_empty();
        let rewrite = tombstones.len() > 0;
        let cleared = complete && write_changes(queue, &table, &syncs, scan.repaired, &gone, rewrite);
        if !cleared {
            warn!(
                "cannot read or write the table of the disk tier; writes are refused until it is opened again"
            );
            syncs.poison();
        }
        if cleared && tombstones.len() > 0 {
            // Everything that they cover is durably removed.
            if let Err(error) = tombstones.compact(queue, |_, _| false) {
                warn!(%error, "cannot compact the tombstone log; retrying later");
            }
        }

        let used: Vec<(u64, u32)> =
            entries.iter().map(|(_, entry)| (entry.first_block, entry.blocks)).collect();
        let (space, ranges) = SpaceMap::new(geometry.data_start() / BLOCK, geometry.data_blocks(), &used);
        let eviction = EvictionQueue::new(config.eviction_policy);
        let mut index: Vec<Mutex<BTreeMap<RecordId, IndexedRecord>>> = vec![];
        index.resize_with(INDEX_SHARDS, Mutex::default);
        let mut backend = OffsetBackend {
            file,
            geometry,
            limit,
            tombstones,
            table,
            syncs,
            space: Mutex::new(space),
            index,
            claims: WriteClaims::default(),
            eviction,
            unlinked: Mutex::default(),
            evicting: Mutex::new(HashMap::new()),
            orphans: Mutex::default(),
            sequence: AtomicU64::new(
                entries.iter().map(|(_, entry)| entry.sequence.saturating_add(1)).max().unwrap_or(0),
            ),
            records: AtomicU64::new(recovery.records),
            complete: cleared,
        };
        // In the order in which they were written.
        let mut records: Vec<_> = entries.into_iter().zip(ranges).zip(valid).collect();
        records.sort_unstable_by_key(|(((_, entry), _), _)| entry.sequence);
        for (((slot, entry), range), valid) in records {
            if valid {
                backend.eviction.insert(slot.0.into());
                let record = IndexedRecord { slot, range, preamble_read_len: entry.preamble_read_len() };
                backend.shard(&entry.name.id).lock().insert(entry.name, record);
            } else {
                backend.orphans.get_mut().push(UnlinkedRecord { name: entry.name, slot, range });
            }
        }
        recovery.bytes = crate::backend::Backend::usage(&backend).bytes;
        info!(
            records = recovery.records,
            removed = recovery.removed,
            bad = recovery.bad_count,
            "data file opened"
        );
        Ok((backend, recovery))
    }
}

/// Opens or creates the file, and returns it with its geometry.
fn open_file(
    storage: &dyn Storage,
    queue: &mut dyn Queue,
    configured: Geometry,
) -> Result<(File, Geometry), OpenError> {
    remove_if_exists(storage, TEMPORARY).map_err(OpenError::io("remove a temporary file"))?;
    let file = match storage.open(Path::new(DATA), OpenMode::Write) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return create(storage, queue, configured),
        file => file.map_err(OpenError::io("open the data file"))?,
    };
    let len = storage.len(&file).map_err(OpenError::io("get the length of the data file"))?;
    let Some((geometry, copies)) = read_superblocks(queue, &file, len) else {
        // Too short for a superblock and a block of the table: it has no records.
        if len < 2 * BLOCK {
            return create(storage, queue, configured);
        }
        return Err(OpenError::Foreign { file: DATA.into(), reason: "both superblocks are corrupt".into() });
    };
    if len < geometry.file_len || copies < 2 {
        warn!(
            len,
            file_bytes = geometry.file_len,
            copies,
            "a superblock or the end of the data file is corrupt; repairing it"
        );
        if let Err(error) = repair(storage, queue, &file, &geometry, len) {
            warn!(%error, "cannot repair the data file");
        }
    }
    Ok((file, geometry))
}

fn remove_if_exists(storage: &dyn Storage, path: &str) -> io::Result<()> {
    match storage.remove(Path::new(path)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// Creates the file: it is renamed only when it is complete and durable.
fn create(
    storage: &dyn Storage,
    queue: &mut dyn Queue,
    geometry: Geometry,
) -> Result<(File, Geometry), OpenError> {
    let temporary = Path::new(TEMPORARY);
    let file = storage.open(temporary, OpenMode::Create).map_err(OpenError::io("create the data file"))?;
    repair(storage, queue, &file, &geometry, 0).map_err(OpenError::io("allocate the data file"))?;
    storage.rename(temporary, Path::new(DATA)).map_err(OpenError::io("rename the data file"))?;
    storage.sync_dir(Path::new("")).map_err(OpenError::io("sync the directory of the disk tier"))?;
    Ok((file, geometry))
}

/// Sets the length of the file and writes its superblocks.
fn repair(
    storage: &dyn Storage,
    queue: &mut dyn Queue,
    file: &File,
    geometry: &Geometry,
    len: u64,
) -> io::Result<()> {
    if len < geometry.file_len {
        storage.allocate(file, geometry.file_len)?;
    }
    let ops = [0, geometry.second_superblock()].map(|offset| {
        let mut block = AlignedBuf::zeroed(BLOCK_BYTES);
        geometry.encode(&mut block);
        Op { tag: 0, kind: OpKind::Write, file: file.clone(), offset, buffer: Buffer::Owned(block) }
    });
    for done in run_all(queue, ops) {
        done.result?;
    }
    storage::sync(queue, file)
}

/// Returns the geometry of a file, and the number of superblocks that agree on it.
pub(super) fn read_superblocks(queue: &mut dyn Queue, file: &File, len: u64) -> Option<(Geometry, u32)> {
    let mut read = |offset| {
        let reads = (0..READS_MAX).filter_map(|_| read_blocks(queue, file, offset, 1).ok());
        reads.filter_map(|bytes| Geometry::decode(&bytes)).next()
    };
    let first = read(0);
    let offset = first.map_or((len / BLOCK).saturating_sub(1) * BLOCK, |first| first.second_superblock());
    // The one at the end must refer to this very length: otherwise it is the payload of a record.
    let second = read(offset).filter(|second| second.second_superblock() == offset && offset > 0);
    let copies =
        u32::from(first.is_some()) + u32::from(second.is_some() && (first.is_none() || first == second));
    Some((first.or(second)?, copies))
}

fn read_blocks(queue: &mut dyn Queue, file: &File, offset: u64, blocks: u32) -> io::Result<AlignedBuf> {
    let buffer = Buffer::Owned(AlignedBuf::zeroed(blocks as usize * BLOCK_BYTES));
    let done = run_one(queue, Op { tag: 0, kind: OpKind::Read, file: file.clone(), offset, buffer });
    done.result?;
    match done.buffer {
        Buffer::Owned(bytes) => Ok(bytes),
        _ => unreachable!("a queue returns the buffer of the operation"),
    }
}

/// Content of the table.
#[derive(Debug, Default)]
pub(super) struct TableScan {
    pub(super) used: Vec<(SlotNumber, Entry)>,
    pub(super) corrupt: Vec<SlotNumber>,
    /// Slots with a flipped bit, with their corrected content.
    repaired: Vec<Change>,
    /// Blocks that could not be read.
    pub(super) unreadable: Vec<u32>,
}

/// Content of a slot.
#[derive(Clone, Copy, Debug)]
struct SlotRead {
    slot: Slot,
    /// Whether it was corrupt and could be corrected.
    repaired: bool,
}

impl TableScan {
    fn add(&mut self, number: SlotNumber, SlotRead { slot, repaired }: SlotRead) {
        let entry = match slot {
            Slot::Free => None,
            Slot::Used(entry) => {
                self.used.push((number, entry));
                Some(entry)
            }
            Slot::Corrupt => {
                self.corrupt.push(number);
                None
            }
        };
        if repaired {
            self.repaired.push(Change { slot: number, entry });
        }
    }
}

/// Reads the table sequentially, in large pieces.
pub(super) fn scan_table(queue: &mut dyn Queue, file: &File, geometry: &Geometry) -> TableScan {
    let mut scan = TableScan::default();
    let pieces: Vec<(u32, u32)> = (0..geometry.table_blocks())
        .step_by(READ_BLOCKS as usize)
        .map(|first| (first, READ_BLOCKS.min(geometry.table_blocks() - first)))
        .collect();
    for pieces in pieces.chunks(READS_IN_FLIGHT) {
        let ops = pieces.iter().map(|&(first, blocks)| {
            let buffer = Buffer::Owned(AlignedBuf::zeroed(blocks as usize * BLOCK_BYTES));
            let offset = geometry.table_block(first);
            Op { tag: 0, kind: OpKind::Read, file: file.clone(), offset, buffer }
        });
        for (done, &(first, blocks)) in run_all(queue, ops).into_iter().zip(pieces) {
            let bytes = done.result.is_ok().then(|| done.buffer.as_slice());
            for block in 0..blocks {
                let bytes = bytes.map(|bytes| &bytes[block as usize * BLOCK_BYTES..][..BLOCK_BYTES]);
                scan_block(queue, file, geometry, first + block, bytes, &mut scan);
            }
        }
    }
    scan
}

/// Adds a block of the table. A block with invalid slots is read again: a slot is accepted from any reading in which it
/// is valid, since no flipped bit produces a valid entry, and is corrupt only if two readings have the same bytes.
/// Slots that are still ambiguous make the block unreadable: a slot that is cleared cannot be restored, so it must not
/// be cleared in error.
fn scan_block(
    queue: &mut dyn Queue,
    file: &File,
    geometry: &Geometry,
    block: u32,
    bytes: Option<&[u8]>,
    scan: &mut TableScan,
) {
    let mut readings: Vec<Vec<u8>> = bytes.map(<[u8]>::to_vec).into_iter().collect();
    for reads in 1..=READS_MAX {
        let slots: Option<Vec<SlotRead>> =
            (0..ENTRIES_PER_BLOCK as usize).map(|slot| resolve_slot(geometry, &readings, slot)).collect();
        if let Some(slots) = slots {
            for (slot, number) in slots.into_iter().zip(block * ENTRIES_PER_BLOCK..) {
                scan.add(SlotNumber(number), slot);
            }
            return;
        }
        if reads < READS_MAX {
            let reading = read_blocks(queue, file, geometry.table_block(block), 1);
            readings.extend(reading.ok().map(|bytes| bytes.to_vec()));
        }
    }
    scan.unreadable.push(block);
}

/// Resolves a slot from several readings of a block, if they are unambiguous.
fn resolve_slot(geometry: &Geometry, readings: &[Vec<u8>], slot: usize) -> Option<SlotRead> {
    let slot_bytes = |reading: &'_ Vec<u8>| -> [u8; ENTRY_BYTES] { reading.as_chunks().0[slot] };
    let mut corrupt = vec![];
    for bytes in readings.iter().map(slot_bytes) {
        match Slot::decode(&bytes, geometry) {
            Slot::Corrupt if corrupt.contains(&bytes) => {
                let slot = Slot::decode_corrupt(&bytes, geometry);
                return Some(SlotRead { slot, repaired: slot != Slot::Corrupt });
            }
            Slot::Corrupt => corrupt.push(bytes),
            slot => return Some(SlotRead { slot, repaired: false }),
        }
    }
    None
}

/// Returns the offset of a slot in the file.
pub(super) fn slot_offset(geometry: &Geometry, slot: SlotNumber) -> u64 {
    geometry.table_block(0) + u64::from(slot.0) * ENTRY_BYTES as u64
}

/// Separates the entries of existing records, in the order of the file, from the slots to clear: those of removed
/// records, and of two conflicting entries the older one, whose bytes were overwritten.
fn partition_entries(
    geometry: &Geometry,
    tombstones: &Tombstones,
    entries: Vec<(SlotNumber, Entry)>,
    recovery: &mut Recovery,
) -> (Vec<(SlotNumber, Entry)>, Vec<SlotNumber>) {
    let removed = |entry: &Entry| tombstones.covers(&entry.name.id, entry.name.version);
    let (removed, mut entries): (Vec<_>, Vec<_>) = entries.into_iter().partition(|(_, entry)| removed(entry));
    recovery.removed = removed.len() as u64;
    let mut gone: Vec<SlotNumber> = removed.into_iter().map(|(slot, _)| slot).collect();

    entries.sort_unstable_by_key(|&(_, entry)| std::cmp::Reverse(entry.sequence));
    let mut names = HashSet::new();
    let ranges = entries.iter().map(|(_, entry)| (entry.first_block, entry.blocks));
    let overlapping: HashSet<usize> = conflicts(geometry.data_start() / BLOCK, ranges)
        .into_iter()
        .map(|RangeConflict(number)| number)
        .collect();
    let mut number = 0;
    entries.retain(|&(slot, entry)| {
        let conflicts = overlapping.contains(&number) || !names.insert(entry.name);
        number += 1;
        if conflicts {
            recovery.bad(DATA, entry.offset(), "overwritten by a later record");
            gone.push(slot);
        }
        !conflicts
    });
    entries.sort_unstable_by_key(|(_, entry)| entry.first_block);
    (entries, gone)
}

/// Reads the preambles of records, and passes valid ones to `found`. Returns which records are valid.
fn scan_records(
    queue: &mut dyn Queue,
    file: &File,
    entries: &[(SlotNumber, Entry)],
    found: &mut dyn FnMut(ScannedRecord<'_>),
    recovery: &mut Recovery,
) -> Vec<bool> {
    let mut valid = vec![false; entries.len()];
    let scans = entries.iter().enumerate().map(|(tag, (_, entry))| PreambleScan {
        tag,
        file: Ok(file.clone()),
        offset: entry.offset(),
        len: entry.len(),
        preamble_read_len: entry.preamble_read_len(),
    });
    scan_preambles(queue, scans, &mut |tag, preamble| {
        let entry = &entries[tag].1;
        match preamble {
            Ok(preamble) if preamble.matches(&entry.name, entry.len(), entry.preamble_read_len()) => {
                valid[tag] = true;
                recovery.records += 1;
                found(preamble.scanned());
            }
            Ok(_) => recovery.bad(DATA, entry.offset(), "record does not match its entry"),
            Err(error) => recovery.bad(DATA, entry.offset(), error),
        }
    });
    valid
}

/// Writes corrected entries and clears slots durably. Returns whether that succeeded.
///
/// If `rewrite`, the whole table is written. An earlier process may have exited before it synced its writes, or its
/// sync may have failed: then slots appear to be clear that are not, and a crash would restore their entries. Only
/// another write makes them durable; before that no tombstone may be dropped.
fn write_changes(
    queue: &mut dyn Queue,
    table: &Table,
    syncs: &GroupSync,
    repaired: Vec<Change>,
    gone: &[SlotNumber],
    rewrite: bool,
) -> bool {
    if !repaired.is_empty() {
        warn!(entries = repaired.len(), "corrected flipped bits in table entries");
    }
    // A corrected entry may also be one to clear, for example of a removed record. The later change of a slot counts.
    let mut changes = repaired;
    changes.extend(gone.iter().map(|&slot| Change { slot, entry: None }));
    table.write(queue, &changes).into_iter().all(|written| written)
        && (!rewrite || table.write_all(queue))
        && syncs.sync(queue).is_ok()
}
