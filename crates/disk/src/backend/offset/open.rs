//! How the file is made, and how a start finds again what is in it.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use hashbrown::{HashMap, HashSet};
use parking_lot::Mutex;
use tracing::{info, warn};

use super::format::{ENTRIES_PER_BLOCK, ENTRY_BYTES, Entry, Geometry, Slot};
use super::space::{Contradiction, Data, contradictions};
use super::syncs::Syncs;
use super::table::{Change, SlotNumber, Table};
use super::{INDEX_SHARDS, Leaving, OffsetBackend, OffsetConfig, Stored};
use crate::backend::claims::Claims;
use crate::backend::order::Order;
use crate::backend::scatter::{READS_MAX, Scan, scan_fronts};
use crate::backend::tombstones::Tombstones;
use crate::backend::{Found, OpenError, RecordName, Recovery};
use crate::buffer::{Aligned, BLOCK_BYTES, Buffer};
use crate::storage::{self, File, Mode, Op, OpKind, Queue, Storage, run_all, run_one};

/// The file.
pub(super) const DATA: &str = "data.moontide";
/// The file while it is made.
const TEMPORARY: &str = "data.moontide.tmp";

/// Room for the log of removals, at most: many times what it has when it is written anew.
const LOG_BYTES_MAX: u64 = 4 << 20;

/// Blocks of the table that are read in one operation: 1 MiB.
const READ_BLOCKS: u32 = 256;

/// Operations whose bytes are in memory at a time while the table is read: 32 MiB.
const READS_AT_A_TIME: usize = 32;

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
    /// Opens the tier, or makes it. Every record that is there goes to `found`; single bad ones are skipped and listed.
    pub fn open(
        storage: Arc<dyn Storage>,
        queue: &mut dyn Queue,
        config: OffsetConfig,
        found: &mut dyn FnMut(Found<'_>),
    ) -> Result<(OffsetBackend, Recovery), OpenError> {
        let wanted = config.geometry()?;
        let (tombstones, _) =
            Tombstones::open(&storage, queue).map_err(OpenError::io("read the log of removals"))?;
        let (file, geometry) = open_file(&*storage, queue, wanted)?;
        if geometry.file_len != wanted.file_len {
            warn!(
                file_bytes = geometry.file_len,
                wanted_bytes = wanted.file_len,
                "the tier's file keeps the size with which it was made; to change it, delete the file"
            );
        }
        let limit = if geometry.file_len == wanted.file_len { config.limit_bytes } else { geometry.file_len };

        let mut recovery = Recovery { files: 1, ..Recovery::default() };
        let scan = scan_table(queue, &file, &geometry);
        for block in &scan.unreadable {
            recovery.bad(DATA, geometry.table_block(*block), "a block of the table cannot be read");
        }
        for slot in &scan.damaged {
            recovery.bad(DATA, slot_offset(&geometry, *slot), "an entry of the table is damaged");
        }
        let (entries, mut gone) = sort_out(&geometry, &tombstones, scan.used, &mut recovery);
        gone.extend(&scan.damaged);
        let sound = scan_records(queue, &file, &entries, found, &mut recovery);

        let table = Table::new(file.clone(), geometry, &entries);
        let syncs = Syncs::new(file.clone());
        // What the table names now and no longer will must be gone from it before its space is used again.
        let complete = scan.unreadable.is_empty();
        let rewrite = tombstones.len() > 0;
        let cleared = complete && write_changes(queue, &table, &syncs, scan.repaired, &gone, rewrite);
        if !cleared {
            warn!("the tier's table cannot be read or written; it takes no writes until it is opened again");
            syncs.refuse();
        }
        if cleared && tombstones.len() > 0 {
            // All that they cover is gone.
            if let Err(error) = tombstones.rewrite(queue, |_, _| false) {
                warn!(%error, "the log of removals could not be written anew; it is tried again");
            }
        }

        let used: Vec<(u64, u32)> =
            entries.iter().map(|(_, entry)| (entry.first_block, entry.blocks)).collect();
        let (data, ranges) = Data::new(geometry.data_start() / BLOCK, geometry.data_blocks(), &used);
        let order = Order::new(config.order);
        let mut index: Vec<Mutex<BTreeMap<RecordName, Stored>>> = vec![];
        index.resize_with(INDEX_SHARDS, Mutex::default);
        let mut backend = OffsetBackend {
            file,
            geometry,
            limit,
            tombstones,
            table,
            syncs,
            data: Mutex::new(data),
            index,
            claims: Claims::default(),
            order,
            leaving: Mutex::default(),
            evicting: Mutex::new(HashMap::new()),
            debris: Mutex::default(),
            sequence: AtomicU64::new(
                entries.iter().map(|(_, entry)| entry.sequence.saturating_add(1)).max().unwrap_or(0),
            ),
            records: AtomicU64::new(recovery.records),
            complete: cleared,
        };
        // In the order in which they were written.
        let mut stored: Vec<_> = entries.into_iter().zip(ranges).zip(sound).collect();
        stored.sort_unstable_by_key(|(((_, entry), _), _)| entry.sequence);
        for (((slot, entry), range), sound) in stored {
            if sound {
                backend.order.insert(slot.0.into());
                let stored = Stored { slot, range, head_len: entry.head_len() };
                backend.shard(&entry.name.id).lock().insert(entry.name, stored);
            } else {
                backend.debris.get_mut().push(Leaving { name: entry.name, slot, range });
            }
        }
        recovery.bytes = crate::backend::Backend::usage(&backend).bytes;
        info!(
            records = recovery.records,
            removed = recovery.removed,
            bad = recovery.bad_count,
            "tier opened"
        );
        Ok((backend, recovery))
    }
}

/// Opens the file, or makes it; and where its parts stand.
fn open_file(
    storage: &dyn Storage,
    queue: &mut dyn Queue,
    wanted: Geometry,
) -> Result<(File, Geometry), OpenError> {
    remove_if_there(storage, TEMPORARY).map_err(OpenError::io("remove what an earlier start left"))?;
    let file = match storage.open(Path::new(DATA), Mode::Write) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return create(storage, queue, wanted),
        file => file.map_err(OpenError::io("open the tier's file"))?,
    };
    let len = storage.len(&file).map_err(OpenError::io("ask for the length of the tier's file"))?;
    let Some((geometry, copies)) = read_superblocks(queue, &file, len) else {
        // Too short for a superblock and a block of the table: there is nothing to lose.
        if len < 2 * BLOCK {
            return create(storage, queue, wanted);
        }
        return Err(OpenError::Foreign {
            file: DATA.into(),
            why: "both of its superblocks are damaged".into(),
        });
    };
    if len < geometry.file_len || copies < 2 {
        warn!(
            len,
            file_bytes = geometry.file_len,
            copies,
            "the tier's file is damaged at an end; it is repaired"
        );
        if let Err(error) = repair(storage, queue, &file, &geometry, len) {
            warn!(%error, "the tier's file could not be repaired");
        }
    }
    Ok((file, geometry))
}

fn remove_if_there(storage: &dyn Storage, path: &str) -> io::Result<()> {
    match storage.remove(Path::new(path)) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        result => result,
    }
}

/// Makes the file: it has its name only when it is whole and durable.
fn create(
    storage: &dyn Storage,
    queue: &mut dyn Queue,
    geometry: Geometry,
) -> Result<(File, Geometry), OpenError> {
    let temporary = Path::new(TEMPORARY);
    let file = storage.open(temporary, Mode::Create).map_err(OpenError::io("make the tier's file"))?;
    repair(storage, queue, &file, &geometry, 0).map_err(OpenError::io("allocate the tier's file"))?;
    storage.rename(temporary, Path::new(DATA)).map_err(OpenError::io("name the tier's file"))?;
    storage.sync_dir(Path::new("")).map_err(OpenError::io("sync the tier's directory"))?;
    Ok((file, geometry))
}

/// Gives the file its length and its superblocks.
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
        let mut block = Aligned::zeroed(BLOCK_BYTES);
        geometry.encode(&mut block);
        Op { tag: 0, kind: OpKind::Write, file: file.clone(), offset, buffer: Buffer::Owned(block) }
    });
    for done in run_all(queue, ops) {
        done.result?;
    }
    storage::sync(queue, file)
}

/// Where the parts of a file stand, and how many of its two superblocks say so.
pub(super) fn read_superblocks(queue: &mut dyn Queue, file: &File, len: u64) -> Option<(Geometry, u32)> {
    let mut read = |offset| {
        let reads = (0..READS_MAX).filter_map(|_| read_blocks(queue, file, offset, 1).ok());
        reads.filter_map(|bytes| Geometry::decode(&bytes)).next()
    };
    let first = read(0);
    let offset = first.map_or((len / BLOCK).saturating_sub(1) * BLOCK, |first| first.second_superblock());
    // One at the end must be about this very length: else it is what somebody wrote as a record.
    let second = read(offset).filter(|second| second.second_superblock() == offset && offset > 0);
    let copies =
        u32::from(first.is_some()) + u32::from(second.is_some() && (first.is_none() || first == second));
    Some((first.or(second)?, copies))
}

fn read_blocks(queue: &mut dyn Queue, file: &File, offset: u64, blocks: u32) -> io::Result<Aligned> {
    let buffer = Buffer::Owned(Aligned::zeroed(blocks as usize * BLOCK_BYTES));
    let done = run_one(queue, Op { tag: 0, kind: OpKind::Read, file: file.clone(), offset, buffer });
    done.result?;
    match done.buffer {
        Buffer::Owned(bytes) => Ok(bytes),
        _ => unreachable!("a buffer comes back as it went in"),
    }
}

/// What stands in the table.
#[derive(Debug, Default)]
pub(super) struct TableScan {
    pub(super) used: Vec<(SlotNumber, Entry)>,
    pub(super) damaged: Vec<SlotNumber>,
    /// Slots that a flipped bit had damaged, with what stood there before.
    repaired: Vec<Change>,
    /// Blocks that could not be read.
    pub(super) unreadable: Vec<u32>,
}

/// What was read from a slot.
#[derive(Clone, Copy, Debug)]
struct Read {
    slot: Slot,
    /// Whether it was damaged and could be put right.
    repaired: bool,
}

impl TableScan {
    fn take_in(&mut self, number: SlotNumber, Read { slot, repaired }: Read) {
        let entry = match slot {
            Slot::Free => None,
            Slot::Used(entry) => {
                self.used.push((number, entry));
                Some(entry)
            }
            Slot::Damaged => {
                self.damaged.push(number);
                None
            }
        };
        if repaired {
            self.repaired.push(Change { slot: number, entry });
        }
    }
}

/// Reads the table, from front to end in large pieces.
pub(super) fn scan_table(queue: &mut dyn Queue, file: &File, geometry: &Geometry) -> TableScan {
    let mut scan = TableScan::default();
    let pieces: Vec<(u32, u32)> = (0..geometry.table_blocks())
        .step_by(READ_BLOCKS as usize)
        .map(|first| (first, READ_BLOCKS.min(geometry.table_blocks() - first)))
        .collect();
    for pieces in pieces.chunks(READS_AT_A_TIME) {
        let ops = pieces.iter().map(|&(first, blocks)| {
            let buffer = Buffer::Owned(Aligned::zeroed(blocks as usize * BLOCK_BYTES));
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

/// Takes in a block of the table. One that does not look right is read again: a slot is what any reading says, for no
/// flipped bit makes an entry, and damaged only if two readings see the same bytes. What is still not clear then is
/// taken for unreadable: cleared slots do not come back, so that must not be done in error.
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
        let slots: Option<Vec<Read>> =
            (0..ENTRIES_PER_BLOCK as usize).map(|slot| settle_slot(geometry, &readings, slot)).collect();
        if let Some(slots) = slots {
            for (slot, number) in slots.into_iter().zip(block * ENTRIES_PER_BLOCK..) {
                scan.take_in(SlotNumber(number), slot);
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

/// What several readings of a block say of a slot, if that is clear.
fn settle_slot(geometry: &Geometry, readings: &[Vec<u8>], slot: usize) -> Option<Read> {
    let seen = |reading: &'_ Vec<u8>| -> [u8; ENTRY_BYTES] { reading.as_chunks().0[slot] };
    let mut damaged = vec![];
    for bytes in readings.iter().map(seen) {
        match Slot::decode(&bytes, geometry) {
            Slot::Damaged if damaged.contains(&bytes) => {
                let slot = Slot::decode_damaged(&bytes, geometry);
                return Some(Read { slot, repaired: slot != Slot::Damaged });
            }
            Slot::Damaged => damaged.push(bytes),
            slot => return Some(Read { slot, repaired: false }),
        }
    }
    None
}

/// First byte of a slot in the file.
pub(super) fn slot_offset(geometry: &Geometry, slot: SlotNumber) -> u64 {
    geometry.table_block(0) + u64::from(slot.0) * ENTRY_BYTES as u64
}

/// Parts the entries of records that are there, in the order of the file, from the slots of those that are not: removed
/// ones, and of two that contradict each other the one that was written first, whose bytes are no longer there.
fn sort_out(
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
    let overlapping: HashSet<usize> = contradictions(geometry.data_start() / BLOCK, ranges)
        .into_iter()
        .map(|Contradiction(number)| number)
        .collect();
    let mut number = 0;
    entries.retain(|&(slot, entry)| {
        let contradicts = overlapping.contains(&number) || !names.insert(entry.name);
        number += 1;
        if contradicts {
            recovery.bad(DATA, entry.offset(), "a later record stands in its place");
            gone.push(slot);
        }
        !contradicts
    });
    entries.sort_unstable_by_key(|(_, entry)| entry.first_block);
    (entries, gone)
}

/// Reads the fronts of records and gives those that are right to `found`; which of them these are.
fn scan_records(
    queue: &mut dyn Queue,
    file: &File,
    entries: &[(SlotNumber, Entry)],
    found: &mut dyn FnMut(Found<'_>),
    recovery: &mut Recovery,
) -> Vec<bool> {
    let mut sound = vec![false; entries.len()];
    let scans = entries.iter().enumerate().map(|(tag, (_, entry))| Scan {
        tag,
        file: Ok(file.clone()),
        offset: entry.offset(),
        len: entry.len(),
        head_len: entry.head_len(),
    });
    scan_fronts(queue, scans, &mut |tag, front| {
        let entry = &entries[tag].1;
        match front {
            Ok(front) if front.is_named(&entry.name, entry.len(), entry.head_len()) => {
                sound[tag] = true;
                recovery.records += 1;
                found(front.found());
            }
            Ok(_) => recovery.bad(DATA, entry.offset(), "another record than its entry names"),
            Err(error) => recovery.bad(DATA, entry.offset(), error),
        }
    });
    sound
}

/// Puts right what was repaired and clears slots, for good; whether that went well.
///
/// If `rewrite`, all of the table is written anew. An earlier process may have died before it synced what it had written,
/// or its sync may have failed: then slots look clear that are not, and a crash would bring their entries back. Nothing
/// but another write makes them durable; before that no tombstone may go.
fn write_changes(
    queue: &mut dyn Queue,
    table: &Table,
    syncs: &Syncs,
    repaired: Vec<Change>,
    gone: &[SlotNumber],
    rewrite: bool,
) -> bool {
    if !repaired.is_empty() {
        warn!(entries = repaired.len(), "entries of the tier's table had a flipped bit and were put right");
    }
    // What was repaired may be gone all the same: removed, say. The later change of a slot counts.
    let mut changes = repaired;
    changes.extend(gone.iter().map(|&slot| Change { slot, entry: None }));
    table.write(queue, &changes).into_iter().all(|written| written)
        && (!rewrite || table.write_all(queue))
        && syncs.sync(queue).is_ok()
}
