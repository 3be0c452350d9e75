//! [`OffsetBackend`]: all records in one file of fixed size, `data.moontide`, with a table of entries at its start.
//!
//! The file is created once and keeps its size and its content: at a restart the table lists the records.
//! [`mod@format`] describes the file; [`table`] holds the entries, [`space`] the free blocks, [`group_sync`] the syncs,
//! [`open`] the start.
//!
//! # Order of writes
//!
//! ```text
//!  write    data ─▶ sync ─▶ entries ─▶ sync ─▶ in the index, acknowledged      one pair of syncs per batch
//!  remove   tombstone durable ─▶ not in the index, acknowledged ┐
//!  evict    not in the index ───────────────────────────────────┴▶ entry cleared ─▶ sync ─▶ slot and range are free
//! ```
//!
//! Invariants:
//!
//! * an entry on the disk refers to bytes that were durable before it;
//! * a range is allocated only when no entry on the disk refers to it and no reader uses it: a [`RecordLocation`] holds
//!   it;
//! * a slot is allocated only when it is durably free, so that no entry is overwritten by another one;
//! * after a failed sync nothing is written until the file is opened again ([`group_sync`]); reads continue.
//!
//! Entries of removed records are cleared with the next batch, or when the space is needed. Until then the tombstones
//! keep them from reappearing.
//!
//! Lock order: a shard of the index, then `unlinked`, then one of `evicting`, `orphans`, `space` or the eviction queue;
//! the locks of the table and of the syncs are taken with none of them held.

mod format;
mod group_sync;
mod inspect;
mod open;
mod space;
mod table;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use moontide_rt::collections::HashMap;
use moontide_rt::sync::Mutex;
use moontide_types::{Epoch, ObjectId};
use tracing::{error, warn};

use crate::backend::batch_io::{PreambleScan, run_batch, scan_preambles};
use crate::backend::claims::WriteClaims;
use crate::backend::eviction_queue::EvictionQueue;
use crate::backend::tombstones::Tombstones;
use crate::backend::{
    Backend, Eviction, EvictionPolicy, RecordId, RecordLocation, RecordSource, ScannedRecord, Usage,
    WriteError,
};
use crate::buffer::BLOCK_BYTES;
use crate::mutation::Mutation;
use crate::record::{DiskLayout, WriteOps};
use crate::storage::{File, Queue};
use format::{Entry, Geometry};
use group_sync::GroupSync;
use moontide_rt::mutation_enabled;
use space::{BlockRange, SpaceMap};
use table::{Change, SlotNumber, Table};

pub use inspect::inspect;

/// Shards of the index.
const INDEX_SHARDS: usize = 64;

/// Settings of an [`OffsetBackend`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffsetConfig {
    /// Limit of the bytes on the disk: the file, and space for the tombstone log. Applies when the file is created:
    /// later it keeps its size.
    pub limit_bytes: u64,
    /// Maximum number of records, regardless of their size; fixed when the file is created. Default: one per 64 KiB, at
    /// least 4,096.
    pub entries: Option<u32>,
    /// Eviction policy.
    pub eviction_policy: EvictionPolicy,
}

impl OffsetConfig {
    /// Returns the defaults with this limit.
    pub fn with_limit(limit_bytes: u64) -> OffsetConfig {
        OffsetConfig { limit_bytes, entries: None, eviction_policy: EvictionPolicy::default() }
    }
}

/// Backend with all records in one file.
#[derive(Debug)]
pub struct OffsetBackend {
    file: File,
    geometry: Geometry,
    limit: u64,
    tombstones: Tombstones,
    table: Table,
    syncs: GroupSync,
    space: Mutex<SpaceMap>,
    index: Vec<Mutex<BTreeMap<RecordId, IndexedRecord>>>,
    claims: WriteClaims,
    /// Slots of the records in the index.
    eviction: EvictionQueue,
    /// Records that are no longer in the index and whose entries have to be cleared.
    unlinked: Mutex<Vec<UnlinkedRecord>>,
    /// Records chosen for eviction, by slot.
    evicting: Mutex<HashMap<u32, UnlinkedRecord>>,
    /// Unreadable records: they take space and are evicted first.
    orphans: Mutex<Vec<UnlinkedRecord>>,
    sequence: AtomicU64,
    records: AtomicU64,
    /// Whether all of the table was read and is durable: only then no unknown record can reappear.
    complete: bool,
}

/// A record that can be found.
#[derive(Debug)]
struct IndexedRecord {
    slot: SlotNumber,
    range: BlockRange,
    preamble_read_len: u64,
}

/// A record that is no longer in the index, but still has its entry and its range.
#[derive(Debug)]
struct UnlinkedRecord {
    name: RecordId,
    slot: SlotNumber,
    range: BlockRange,
}

/// A record that is being written.
struct PlannedRecord<'a> {
    /// Index in the caller's list.
    index: usize,
    source: RecordSource<'a>,
    name: RecordId,
    layout: DiskLayout,
    slot: SlotNumber,
    range: BlockRange,
}

impl PlannedRecord<'_> {
    fn into_unlinked(self) -> UnlinkedRecord {
        UnlinkedRecord { name: self.name, slot: self.slot, range: self.range }
    }
}

impl OffsetBackend {
    fn shard(&self, id: &ObjectId) -> &Mutex<BTreeMap<RecordId, IndexedRecord>> {
        // Ids are hashes: any of their bytes is uniform.
        &self.index[usize::from(id.0[15]) % INDEX_SHARDS]
    }

    /// Whether this stripe is on the disk in this version or a newer one.
    fn has(&self, name: &RecordId) -> bool {
        let last = RecordId { id: name.id, version: Epoch::MAX, stripe: u16::MAX };
        let index = self.shard(&name.id).lock();
        index.range(name..=&last).any(|(other, _)| other.stripe == name.stripe)
    }

    /// Reserves slot and range for a record, if records of `refused` bytes were refused before it.
    fn plan<'a>(
        &self,
        index: usize,
        source: RecordSource<'a>,
        refused: u64,
    ) -> Result<PlannedRecord<'a>, WriteError> {
        let layout = DiskLayout::of_source(&source)?;
        let name = RecordId::of(source.header);
        if self.tombstones.covers(&name.id, name.version) {
            return Err(WriteError::Removed);
        }
        if self.has(&name) {
            return Err(WriteError::Exists);
        }
        let range = {
            let mut space = self.space.lock();
            let blocks = layout.len / BLOCK_BYTES as u64;
            if !space.could_hold(blocks) {
                return Err(WriteError::TooLarge { bytes: layout.len });
            }
            let blocks = u32::try_from(blocks).expect("an area holds less than 2³² blocks");
            space.alloc(blocks).ok_or_else(|| {
                let free = (self.geometry.data_blocks() - space.used_blocks()) * BLOCK_BYTES as u64;
                // Enough may be free, but fragmented: then the neighbours of a free range must be evicted.
                let (all, missing) = (refused + layout.len, (refused + layout.len).saturating_sub(free));
                WriteError::Full { needed: if missing > 0 { missing } else { all } }
            })?
        };
        let Some(&slot) = self.table.alloc(1).first() else {
            self.space.lock().free(range);
            return Err(WriteError::Full { needed: refused + layout.len });
        };
        Ok(PlannedRecord { index, source, name, layout, slot, range })
    }

    /// Writes records whose names the caller has claimed.
    fn write_claimed(
        &self,
        queue: &mut dyn Queue,
        records: &[RecordSource<'_>],
        indices: &[usize],
        results: &mut [Result<(), WriteError>],
    ) {
        if self.syncs.is_poisoned() {
            indices.iter().for_each(|&index| results[index] = Err(WriteError::Io));
            return;
        }
        let mut planned = Vec::with_capacity(indices.len());
        let mut refused = 0;
        for &index in indices {
            let mut plan = self.plan(index, records[index], refused);
            // Frees the space of removed records when it is needed.
            if matches!(plan, Err(WriteError::Full { .. })) && self.clear_unlinked(queue) {
                plan = self.plan(index, records[index], refused);
            }
            match plan {
                Ok(plan) => planned.push(plan),
                Err(error) => {
                    if let WriteError::Full { .. } = error {
                        refused += DiskLayout::of(records[index].header).len;
                    }
                    results[index] = Err(error);
                }
            }
        }
        let planned = self.write_data(queue, planned, results);
        if !planned.is_empty() {
            self.write_entries(queue, planned, results);
        }
    }

    /// Writes the bytes of records and makes them durable. Returns the records for which that succeeded.
    fn write_data<'a>(
        &self,
        queue: &mut dyn Queue,
        planned: Vec<PlannedRecord<'a>>,
        results: &mut [Result<(), WriteError>],
    ) -> Vec<PlannedRecord<'a>> {
        let ops = planned.iter().enumerate().flat_map(|(number, plan)| {
            let mut ops = WriteOps::new(&self.file, plan.range.first_block * BLOCK_BYTES as u64);
            ops.record(&plan.source);
            ops.map(move |op| (number, op))
        });
        let written = run_batch(queue, planned.len(), ops);
        let synced = if written.iter().any(Result::is_ok) { self.syncs.sync(queue) } else { Ok(()) };
        if let Err(error) = &synced {
            error!(%error, "sync of the data file failed; writes are refused until it is opened again");
        }
        let mut durable = vec![];
        for (plan, written) in planned.into_iter().zip(written) {
            match (&synced, written) {
                (Ok(()), Ok(())) => durable.push(plan),
                (_, written) => {
                    results[plan.index] =
                        Err(written.err().map_or(WriteError::Io, |error| write_error(&error)));
                    // No entry refers to it.
                    self.table.free(plan.slot);
                    self.space.lock().free(plan.range);
                }
            }
        }
        durable
    }

    /// Writes the entries of records whose bytes are durable, clears those of unlinked records, and syncs both.
    fn write_entries(
        &self,
        queue: &mut dyn Queue,
        planned: Vec<PlannedRecord<'_>>,
        results: &mut [Result<(), WriteError>],
    ) {
        let unlinked = std::mem::take(&mut *self.unlinked.lock());
        let new = planned.iter().map(|plan| {
            let entry = Entry {
                name: plan.name,
                sequence: self.sequence.fetch_add(1, Ordering::Relaxed), // only a counter
                first_block: plan.range.first_block,
                blocks: plan.range.blocks,
                // At most `blocks`.
                preamble_blocks: (plan.layout.preamble_read_len / BLOCK_BYTES as u64) as u32,
            };
            Change { slot: plan.slot, entry: Some(entry) }
        });
        let cleared = unlinked.iter().map(|gone| Change { slot: gone.slot, entry: None });
        let changes: Vec<Change> = new.chain(cleared).collect();
        let written = self.change(queue, &changes);
        let (new, cleared) = written.split_at(planned.len());
        for (plan, &durable) in planned.into_iter().zip(new) {
            if durable {
                let index = plan.index;
                results[index] = self.insert(plan);
            } else {
                results[plan.index] = Err(WriteError::Io);
                // Its entry may be on the disk all the same, so it is cleared like that of any unlinked record.
                self.unlinked.lock().push(plan.into_unlinked());
            }
        }
        self.free_cleared(unlinked, cleared);
    }

    /// Changes the table. Returns which of the changes are durable.
    fn change(&self, queue: &mut dyn Queue, changes: &[Change]) -> Vec<bool> {
        let written = self.table.write(queue, changes);
        if mutation_enabled(Mutation::EntriesUnsynced) {
            return written;
        }
        match self.syncs.sync(queue) {
            Ok(()) => written,
            Err(error) => {
                error!(%error, "sync of the table failed; writes are refused until the file is opened again");
                vec![false; changes.len()]
            }
        }
    }

    /// Inserts a written record into the index.
    fn insert(&self, plan: PlannedRecord<'_>) -> Result<(), WriteError> {
        let mut index = self.shard(&plan.name.id).lock();
        // A removal searches the index after it has added its tombstone: one of the two sees the other.
        if self.tombstones.covers(&plan.name.id, plan.name.version) {
            self.unlinked.lock().push(plan.into_unlinked());
            return Err(WriteError::Removed);
        }
        self.eviction.insert(plan.slot.0.into());
        self.records.fetch_add(1, Ordering::Relaxed); // only a statistic
        let PlannedRecord { name, layout, slot, range, .. } = plan;
        // If both entries are on the disk after a crash, the higher sequence wins.
        self.unlinked.lock().extend(self.orphans.lock().extract_if(.., |gone| gone.name == name));
        index.insert(name, IndexedRecord { slot, range, preamble_read_len: layout.preamble_read_len });
        Ok(())
    }

    fn location(&self, record: &IndexedRecord) -> RecordLocation {
        let block = BLOCK_BYTES as u64;
        RecordLocation {
            file: self.file.clone(),
            offset: record.range.first_block * block,
            len: u64::from(record.range.blocks) * block,
            preamble_read_len: record.preamble_read_len,
            read_guard: Some(record.range.guard.clone()),
        }
    }

    /// Removes a record from the index.
    fn take_out(
        &self,
        index: &mut BTreeMap<RecordId, IndexedRecord>,
        name: &RecordId,
    ) -> Option<UnlinkedRecord> {
        let IndexedRecord { slot, range, .. } = index.remove(name)?;
        self.eviction.remove(slot.0.into());
        self.records.fetch_sub(1, Ordering::Relaxed); // only a statistic
        Some(UnlinkedRecord { name: *name, slot, range })
    }

    /// Clears the entries of all unlinked records. Returns whether any was cleared.
    fn clear_unlinked(&self, queue: &mut dyn Queue) -> bool {
        let unlinked = std::mem::take(&mut *self.unlinked.lock());
        let count = unlinked.len();
        self.clear(queue, unlinked) < count
    }

    /// Clears entries. Those that cannot be cleared durably are kept for the next attempt; returns their number.
    fn clear(&self, queue: &mut dyn Queue, unlinked: Vec<UnlinkedRecord>) -> usize {
        if unlinked.is_empty() {
            return 0;
        }
        if self.syncs.is_poisoned() {
            let count = unlinked.len();
            self.unlinked.lock().extend(unlinked);
            return count;
        }
        let changes: Vec<Change> =
            unlinked.iter().map(|gone| Change { slot: gone.slot, entry: None }).collect();
        let cleared = self.change(queue, &changes);
        self.free_cleared(unlinked, &cleared);
        cleared.iter().filter(|cleared| !**cleared).count()
    }

    /// Frees slots and ranges of durably cleared entries, and keeps the rest for the next attempt.
    fn free_cleared(&self, unlinked: Vec<UnlinkedRecord>, cleared: &[bool]) {
        for (gone, &cleared) in unlinked.into_iter().zip(cleared) {
            if cleared {
                self.table.free(gone.slot);
                self.space.lock().free(gone.range);
            } else {
                self.unlinked.lock().push(gone);
            }
        }
    }

    /// Compacts the tombstone log.
    fn compact_tombstones(&self, queue: &mut dyn Queue) {
        self.clear_unlinked(queue);
        let mut needed = self.claims.objects();
        needed.extend(self.unlinked.lock().iter().map(|gone| gone.name.id));
        needed.extend(self.evicting.lock().values().map(|gone| gone.name.id));
        needed.extend(self.orphans.lock().iter().map(|gone| gone.name.id));
        let keep = |id: &ObjectId, _| !self.complete || needed.contains(id);
        if let Err(error) = self.tombstones.compact(queue, keep) {
            warn!(%error, "cannot compact the tombstone log; retrying later");
        }
    }
}

impl Backend for OffsetBackend {
    fn write(&self, queue: &mut dyn Queue, records: &[RecordSource<'_>]) -> Vec<Result<(), WriteError>> {
        let names: Vec<RecordId> = records.iter().map(|record| RecordId::of(record.header)).collect();
        let mut results = vec![Ok(()); records.len()];
        self.claims.write_each(&names, |indices| self.write_claimed(queue, records, indices, &mut results));
        results
    }

    fn locate(&self, name: &RecordId) -> Option<RecordLocation> {
        let index = self.shard(&name.id).lock();
        let record = index.get(name)?;
        self.eviction.touch(record.slot.0.into());
        Some(self.location(record))
    }

    /// The entry is kept until the space is needed: the record may be readable again after a restart.
    fn drop_corrupt(&self, name: &RecordId) {
        let mut index = self.shard(&name.id).lock();
        let gone = self.take_out(&mut index, name);
        self.orphans.lock().extend(gone);
    }

    fn remove(&self, queue: &mut dyn Queue, names: &[(ObjectId, Epoch)]) -> io::Result<()> {
        self.tombstones.append(queue, names)?;
        for &(id, version) in names {
            let first = RecordId { id, version: Epoch::ZERO, stripe: 0 };
            let last = RecordId { id, version, stripe: u16::MAX };
            let mut index = self.shard(&id).lock();
            let gone: Vec<RecordId> = index.range(first..=last).map(|(name, _)| *name).collect();
            for name in gone {
                let gone = self.take_out(&mut index, &name);
                self.unlinked.lock().extend(gone);
            }
            let covered = |gone: &mut UnlinkedRecord| gone.name.id == id && gone.name.version <= version;
            self.unlinked.lock().extend(self.orphans.lock().extract_if(.., covered));
        }
        if self.tombstones.needs_compaction() {
            self.compact_tombstones(queue);
        }
        Ok(())
    }

    fn prepare_eviction(&self, bytes: u64) -> Option<Eviction> {
        let mut eviction = Eviction { names: vec![], bytes: 0, handles: vec![] };
        let mut choose = |gone: UnlinkedRecord| {
            eviction.bytes += u64::from(gone.range.blocks) * BLOCK_BYTES as u64;
            eviction.handles.push(gone.slot.0.into());
            self.evicting.lock().insert(gone.slot.0, gone);
            eviction.bytes < bytes
        };
        let mut more = bytes > 0;
        while more {
            let Some(gone) = self.orphans.lock().pop() else { break };
            more = choose(gone);
        }
        let mut names = vec![];
        while more {
            let Some(slot) = self.eviction.pop() else { break };
            // None: the record was removed meanwhile.
            let slot = SlotNumber(slot as u32); // was inserted as a u32
            let Some(name) = self.table.entry(slot).map(|entry| entry.name) else { continue };
            let mut index = self.shard(&name.id).lock();
            if index.get(&name).is_none_or(|record| record.slot != slot) {
                continue;
            }
            let gone = self.take_out(&mut index, &name).expect("it was just found");
            names.push(name);
            more = choose(gone);
        }
        eviction.names = names;
        (!eviction.handles.is_empty()).then_some(eviction)
    }

    fn finish_eviction(&self, queue: &mut dyn Queue, eviction: Eviction) -> io::Result<()> {
        let gone: Vec<UnlinkedRecord> = {
            let mut evicting = self.evicting.lock();
            eviction.handles.iter().filter_map(|&slot| evicting.remove(&(slot as u32))).collect()
        };
        self.clear_unlinked(queue);
        // Not by way of the list of unlinked records, from which another thread might take them.
        match self.clear(queue, gone) {
            0 => Ok(()),
            left => Err(io::Error::other(format!("cannot clear {left} entries of the table"))),
        }
    }

    fn scan(&self, queue: &mut dyn Queue, found: &mut dyn FnMut(ScannedRecord<'_>)) -> Vec<RecordId> {
        let mut skipped = Vec::new();
        for shard in &self.index {
            // The guards keep the ranges from being reused meanwhile.
            let names: Vec<(RecordId, RecordLocation)> =
                shard.lock().iter().map(|(&name, record)| (name, self.location(record))).collect();
            let scans = names.iter().enumerate().map(|(tag, (_, location))| PreambleScan {
                tag,
                file: Ok(location.file.clone()),
                offset: location.offset,
                len: location.len,
                preamble_read_len: location.preamble_read_len,
            });
            scan_preambles(queue, scans, &mut |tag, preamble| {
                let (name, location) = &names[tag];
                if !self.contains(name) {
                    return; // removed meanwhile
                }
                match preamble {
                    Ok(preamble) if preamble.matches(name, location.len, location.preamble_read_len) => {
                        found(preamble.scanned());
                    }
                    _ => skipped.push(*name),
                }
            });
        }
        skipped
    }

    fn contains(&self, name: &RecordId) -> bool {
        self.shard(&name.id).lock().contains_key(name)
    }

    fn names(&self) -> Vec<RecordId> {
        let mut names = Vec::new();
        for shard in &self.index {
            names.extend(shard.lock().keys().copied());
        }
        names
    }

    fn usage(&self) -> Usage {
        let space = self.space.lock();
        let metadata = self.geometry.file_len - self.geometry.data_blocks() * BLOCK_BYTES as u64;
        Usage {
            bytes: metadata + space.used_blocks() * BLOCK_BYTES as u64 + self.tombstones.log_bytes(),
            limit: self.limit,
            records: self.records.load(Ordering::Relaxed), // only a statistic
        }
    }
}

/// Returns the write error for a failed operation.
fn write_error(error: &io::Error) -> WriteError {
    if error.kind() == io::ErrorKind::StorageFull { WriteError::NoSpace } else { WriteError::Io }
}
