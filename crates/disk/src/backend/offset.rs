//! [`OffsetBackend`]: all records in one file of a fixed size, `data.moontide`, with a table of them at its front.
//!
//! The file is made once and keeps its size and its content: at a restart the table says what is in it. [`mod@format`] draws
//! it; [`table`] keeps the entries, [`space`] the blocks, [`syncs`] the durability, [`open`] the start.
//!
//! # Order of writing
//!
//! ```text
//!  write    data ─▶ sync ─▶ entries ─▶ sync ─▶ found, acknowledged      one pair of syncs per batch
//!  remove   tombstone, durable ─▶ not found, acknowledged ┐
//!  evict    not found ─▶ the master hears of it ──────────┴▶ entry cleared ─▶ sync ─▶ slot and range are free
//! ```
//!
//! Invariants:
//!
//! * an entry on the disk names bytes that were durable before it;
//! * a range is given out only when no entry on the disk names it and nobody reads it: a [`Location`] holds it;
//! * a slot is given out only when it is durably free, so that no entry is overwritten by another one;
//! * after a failed sync nothing is written any more until the file is opened again ([`syncs`]); reads go on.
//!
//! Entries of removed records are cleared with the next batch, or when the space is wanted. Until then the tombstones
//! keep them from coming back.
//!
//! Lock order: a shard of the index, then `leaving`, then one of `evicting`, `debris`, `data` or the order; the locks of
//! the table and of the syncs are taken with none of them held.

mod format;
mod inspect;
mod open;
mod space;
mod syncs;
mod table;

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};

use hashbrown::HashMap;
use moontide_types::{Epoch, ObjectId};
use parking_lot::Mutex;
use tracing::{error, warn};

use crate::backend::claims::Claims;
use crate::backend::order::Order;
use crate::backend::scatter::{Scan, run_for_each, scan_fronts};
use crate::backend::tombstones::Tombstones;
use crate::backend::{
    Backend, Eviction, EvictionOrder, Found, Location, RecordName, Source, Usage, WriteError,
};
use crate::buffer::BLOCK_BYTES;
use crate::planted::{Bug, planted};
use crate::record::{DiskLayout, WriteOps};
use crate::storage::{File, Queue};
use format::{Entry, Geometry};
use space::{Data, Range};
use syncs::Syncs;
use table::{Change, SlotNumber, Table};

pub use inspect::inspect;

/// Shards of the index.
const INDEX_SHARDS: usize = 64;

/// How the tier is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OffsetConfig {
    /// Bytes that may be used: the file, and some room for the log of removals. Only asked for when the file is made:
    /// later it keeps its size.
    pub limit_bytes: u64,
    /// How many records fit, whatever their size; fixed when the file is made. One per 64 KiB unless told otherwise, at
    /// least 4,096.
    pub entries: Option<u32>,
    /// Who goes first when it is full.
    pub order: EvictionOrder,
}

impl OffsetConfig {
    /// All defaults, with this limit.
    pub fn with_limit(limit_bytes: u64) -> OffsetConfig {
        OffsetConfig { limit_bytes, entries: None, order: EvictionOrder::default() }
    }
}

/// All records in one file.
#[derive(Debug)]
pub struct OffsetBackend {
    file: File,
    geometry: Geometry,
    limit: u64,
    tombstones: Tombstones,
    table: Table,
    syncs: Syncs,
    data: Mutex<Data>,
    index: Vec<Mutex<BTreeMap<RecordName, Stored>>>,
    claims: Claims,
    /// Slots of what is in the index.
    order: Order,
    /// Not found any more; their entries are to be cleared.
    leaving: Mutex<Vec<Leaving>>,
    /// Chosen for eviction, by slot.
    evicting: Mutex<HashMap<u32, Leaving>>,
    /// What could not be read: it takes space and is the first to go.
    debris: Mutex<Vec<Leaving>>,
    sequence: AtomicU64,
    records: AtomicU64,
    /// Whether all of the table was read and is durable: only then nothing unknown can come back.
    complete: bool,
}

/// A record that can be found.
#[derive(Debug)]
struct Stored {
    slot: SlotNumber,
    range: Range,
    head_len: u64,
}

/// A record that cannot be found any more, but has its entry and its range still.
#[derive(Debug)]
struct Leaving {
    name: RecordName,
    slot: SlotNumber,
    range: Range,
}

/// A record on its way to the disk.
struct Planned<'a> {
    /// Its place in the caller's list.
    place: usize,
    source: Source<'a>,
    name: RecordName,
    layout: DiskLayout,
    slot: SlotNumber,
    range: Range,
}

impl Planned<'_> {
    fn leaving(self) -> Leaving {
        Leaving { name: self.name, slot: self.slot, range: self.range }
    }
}

impl OffsetBackend {
    fn shard(&self, id: &ObjectId) -> &Mutex<BTreeMap<RecordName, Stored>> {
        // Ids are hashes: any byte of theirs is as good as another.
        &self.index[usize::from(id.0[15]) % INDEX_SHARDS]
    }

    /// Whether a record is on the disk, in this version or a newer one.
    fn has(&self, name: &RecordName) -> bool {
        let last = RecordName { id: name.id, version: Epoch::MAX, stripe: u16::MAX };
        let index = self.shard(&name.id).lock();
        index.range(name..=&last).any(|(other, _)| other.stripe == name.stripe)
    }

    /// Finds room for a record, if others of `refused` bytes found none before it.
    fn plan<'a>(&self, place: usize, source: Source<'a>, refused: u64) -> Result<Planned<'a>, WriteError> {
        let layout = DiskLayout::of_source(&source)?;
        let name = RecordName::of(source.header);
        if self.tombstones.covers(&name.id, name.version) {
            return Err(WriteError::Removed);
        }
        if self.has(&name) {
            return Err(WriteError::Exists);
        }
        let range = {
            let mut data = self.data.lock();
            let blocks = layout.len / BLOCK_BYTES as u64;
            if !data.could_hold(blocks) {
                return Err(WriteError::TooLarge { bytes: layout.len });
            }
            let blocks = u32::try_from(blocks).expect("an allocator could hold it");
            data.alloc(blocks).ok_or_else(|| {
                let free = (self.geometry.data_blocks() - data.used_blocks()) * BLOCK_BYTES as u64;
                // Enough may be free, but in pieces: then the neighbours of a piece must go.
                let (all, missing) = (refused + layout.len, (refused + layout.len).saturating_sub(free));
                WriteError::Full { wanted: if missing > 0 { missing } else { all } }
            })?
        };
        let Some(&slot) = self.table.take(1).first() else {
            self.data.lock().free(range);
            return Err(WriteError::Full { wanted: refused + layout.len });
        };
        Ok(Planned { place, source, name, layout, slot, range })
    }

    /// Writes records whose names the caller has claimed.
    fn write_claimed(
        &self,
        queue: &mut dyn Queue,
        records: &[Source<'_>],
        places: &[usize],
        results: &mut [Result<(), WriteError>],
    ) {
        if self.syncs.is_broken() {
            places.iter().for_each(|&place| results[place] = Err(WriteError::Io));
            return;
        }
        let mut planned = Vec::with_capacity(places.len());
        let mut refused = 0;
        for &place in places {
            let mut plan = self.plan(place, records[place], refused);
            // What was removed gives its space back when it is wanted, which is now.
            if matches!(plan, Err(WriteError::Full { .. })) && self.clear_leaving(queue) {
                plan = self.plan(place, records[place], refused);
            }
            match plan {
                Ok(plan) => planned.push(plan),
                Err(error) => {
                    if let WriteError::Full { .. } = error {
                        refused += DiskLayout::of(records[place].header).len;
                    }
                    results[place] = Err(error);
                }
            }
        }
        let planned = self.write_data(queue, planned, results);
        if !planned.is_empty() {
            self.write_entries(queue, planned, results);
        }
    }

    /// Writes the bytes of records and makes them durable; those of which that went well.
    fn write_data<'a>(
        &self,
        queue: &mut dyn Queue,
        planned: Vec<Planned<'a>>,
        results: &mut [Result<(), WriteError>],
    ) -> Vec<Planned<'a>> {
        let ops = planned.iter().enumerate().flat_map(|(number, plan)| {
            let mut ops = WriteOps::new(&self.file, plan.range.first_block * BLOCK_BYTES as u64);
            ops.record(&plan.source);
            ops.map(move |op| (number, op))
        });
        let written = run_for_each(queue, planned.len(), ops);
        let synced = if written.iter().any(Result::is_ok) { self.syncs.sync(queue) } else { Ok(()) };
        if let Err(error) = &synced {
            error!(%error, "a sync of the tier's file has failed; it takes no more writes until it is opened again");
        }
        let mut durable = vec![];
        for (plan, written) in planned.into_iter().zip(written) {
            match (&synced, written) {
                (Ok(()), Ok(())) => durable.push(plan),
                (_, written) => {
                    results[plan.place] = Err(written.err().map_or(WriteError::Io, |error| refusal(&error)));
                    // No entry names it.
                    self.table.give_back(plan.slot);
                    self.data.lock().free(plan.range);
                }
            }
        }
        durable
    }

    /// Writes the entries of records whose bytes are durable, clears those that are to go, and makes all that durable.
    fn write_entries(
        &self,
        queue: &mut dyn Queue,
        planned: Vec<Planned<'_>>,
        results: &mut [Result<(), WriteError>],
    ) {
        let leaving = std::mem::take(&mut *self.leaving.lock());
        let new = planned.iter().map(|plan| {
            let entry = Entry {
                name: plan.name,
                sequence: self.sequence.fetch_add(1, Ordering::Relaxed), // a counter, nothing more
                first_block: plan.range.first_block,
                blocks: plan.range.blocks,
                head_blocks: (plan.layout.head_len / BLOCK_BYTES as u64) as u32, // no longer than the record
            };
            Change { slot: plan.slot, entry: Some(entry) }
        });
        let cleared = leaving.iter().map(|gone| Change { slot: gone.slot, entry: None });
        let changes: Vec<Change> = new.chain(cleared).collect();
        let written = self.change(queue, &changes);
        let (new, cleared) = written.split_at(planned.len());
        for (plan, &durable) in planned.into_iter().zip(new) {
            if durable {
                let place = plan.place;
                results[place] = self.insert(plan);
            } else {
                results[plan.place] = Err(WriteError::Io);
                // Its entry may be on the disk all the same, so it leaves as any other does.
                self.leaving.lock().push(plan.leaving());
            }
        }
        self.settle(leaving, cleared);
    }

    /// Changes the table; which of the changes are durable.
    fn change(&self, queue: &mut dyn Queue, changes: &[Change]) -> Vec<bool> {
        let written = self.table.write(queue, changes);
        if planted(Bug::EntriesUnsynced) {
            return written;
        }
        match self.syncs.sync(queue) {
            Ok(()) => written,
            Err(error) => {
                error!(%error, "a sync of the tier's table has failed; it takes no more writes until it is opened again");
                vec![false; changes.len()]
            }
        }
    }

    /// A record can be found from now on.
    fn insert(&self, plan: Planned<'_>) -> Result<(), WriteError> {
        let mut index = self.shard(&plan.name.id).lock();
        // Whoever removes looks here after its tombstone is known: one of the two sees the other.
        if self.tombstones.covers(&plan.name.id, plan.name.version) {
            self.leaving.lock().push(plan.leaving());
            return Err(WriteError::Removed);
        }
        self.order.insert(plan.slot.0.into());
        self.records.fetch_add(1, Ordering::Relaxed); // a figure
        let Planned { name, layout, slot, range, .. } = plan;
        // If both were on the disk after a crash, the sequence would tell which one counts.
        self.leaving.lock().extend(self.debris.lock().extract_if(.., |gone| gone.name == name));
        index.insert(name, Stored { slot, range, head_len: layout.head_len });
        Ok(())
    }

    fn location(&self, stored: &Stored) -> Location {
        let block = BLOCK_BYTES as u64;
        Location {
            file: self.file.clone(),
            offset: stored.range.first_block * block,
            len: u64::from(stored.range.blocks) * block,
            front_len: stored.head_len,
            hold: Some(stored.range.hold.clone()),
        }
    }

    /// A record cannot be found from now on.
    fn take_out(&self, index: &mut BTreeMap<RecordName, Stored>, name: &RecordName) -> Option<Leaving> {
        let Stored { slot, range, .. } = index.remove(name)?;
        self.order.remove(slot.0.into());
        self.records.fetch_sub(1, Ordering::Relaxed); // a figure
        Some(Leaving { name: *name, slot, range })
    }

    /// Clears the entries of all that is to go; whether there was something and it is gone.
    fn clear_leaving(&self, queue: &mut dyn Queue) -> bool {
        let leaving = std::mem::take(&mut *self.leaving.lock());
        if leaving.is_empty() {
            return false;
        }
        if self.syncs.is_broken() {
            self.leaving.lock().extend(leaving);
            return false;
        }
        let changes: Vec<Change> =
            leaving.iter().map(|gone| Change { slot: gone.slot, entry: None }).collect();
        let cleared = self.change(queue, &changes);
        self.settle(leaving, &cleared);
        cleared.contains(&true)
    }

    /// Gives back what is durably cleared, and keeps the rest for the next time.
    fn settle(&self, leaving: Vec<Leaving>, cleared: &[bool]) {
        for (gone, &cleared) in leaving.into_iter().zip(cleared) {
            if cleared {
                self.table.give_back(gone.slot);
                self.data.lock().free(gone.range);
            } else {
                self.leaving.lock().push(gone);
            }
        }
    }

    /// Drops what nobody needs from a log of removals that has become long.
    fn shorten_tombstones(&self, queue: &mut dyn Queue) {
        self.clear_leaving(queue);
        let mut left = self.claims.objects();
        left.extend(self.leaving.lock().iter().map(|gone| gone.name.id));
        left.extend(self.evicting.lock().values().map(|gone| gone.name.id));
        left.extend(self.debris.lock().iter().map(|gone| gone.name.id));
        let keep = |id: &ObjectId, _| !self.complete || left.contains(id);
        if let Err(error) = self.tombstones.rewrite(queue, keep) {
            warn!(%error, "the log of removals could not be written anew; it is tried again");
        }
    }
}

impl Backend for OffsetBackend {
    fn write(&self, queue: &mut dyn Queue, records: &[Source<'_>]) -> Vec<Result<(), WriteError>> {
        let names: Vec<RecordName> = records.iter().map(|record| RecordName::of(record.header)).collect();
        let mut results = vec![Ok(()); records.len()];
        self.claims.write_each(&names, |places| self.write_claimed(queue, records, places, &mut results));
        results
    }

    fn locate(&self, name: &RecordName) -> Option<Location> {
        let index = self.shard(&name.id).lock();
        let stored = index.get(name)?;
        self.order.touch(stored.slot.0.into());
        Some(self.location(stored))
    }

    /// Its entry stays until its space is wanted: who could not read it now may be able to after a restart.
    fn drop_damaged(&self, name: &RecordName) {
        let mut index = self.shard(&name.id).lock();
        let gone = self.take_out(&mut index, name);
        self.debris.lock().extend(gone);
    }

    fn remove(&self, queue: &mut dyn Queue, names: &[(ObjectId, Epoch)]) -> io::Result<()> {
        self.tombstones.append(queue, names)?;
        for &(id, version) in names {
            let first = RecordName { id, version: Epoch::ZERO, stripe: 0 };
            let last = RecordName { id, version, stripe: u16::MAX };
            let mut index = self.shard(&id).lock();
            let gone: Vec<RecordName> = index.range(first..=last).map(|(name, _)| *name).collect();
            for name in gone {
                let gone = self.take_out(&mut index, &name);
                self.leaving.lock().extend(gone);
            }
            let covered = |gone: &mut Leaving| gone.name.id == id && gone.name.version <= version;
            self.leaving.lock().extend(self.debris.lock().extract_if(.., covered));
        }
        if self.tombstones.wants_rewrite() {
            self.shorten_tombstones(queue);
        }
        Ok(())
    }

    fn prepare_eviction(&self, bytes: u64) -> Option<Eviction> {
        let mut eviction = Eviction { names: vec![], bytes: 0, parts: vec![] };
        let mut choose = |gone: Leaving| {
            eviction.bytes += u64::from(gone.range.blocks) * BLOCK_BYTES as u64;
            eviction.parts.push(gone.slot.0.into());
            self.evicting.lock().insert(gone.slot.0, gone);
            eviction.bytes < bytes
        };
        let mut more = bytes > 0;
        while more {
            let Some(gone) = self.debris.lock().pop() else { break };
            more = choose(gone);
        }
        let mut names = vec![];
        while more {
            let Some(slot) = self.order.take_first() else { break };
            // None: it was removed since.
            let slot = SlotNumber(slot as u32); // as it went in
            let Some(name) = self.table.entry(slot).map(|entry| entry.name) else { continue };
            let mut index = self.shard(&name.id).lock();
            if index.get(&name).is_none_or(|stored| stored.slot != slot) {
                continue;
            }
            let gone = self.take_out(&mut index, &name).expect("just seen");
            names.push(name);
            more = choose(gone);
        }
        eviction.names = names;
        (!eviction.parts.is_empty()).then_some(eviction)
    }

    fn finish_eviction(&self, queue: &mut dyn Queue, eviction: Eviction) {
        let gone: Vec<Leaving> = {
            let mut evicting = self.evicting.lock();
            eviction.parts.iter().filter_map(|&slot| evicting.remove(&(slot as u32))).collect()
        };
        self.leaving.lock().extend(gone);
        self.clear_leaving(queue);
    }

    fn scan(&self, queue: &mut dyn Queue, found: &mut dyn FnMut(Found<'_>)) -> u64 {
        let mut untold = 0;
        for shard in &self.index {
            // Their holds keep the ranges from being given to others meanwhile.
            let names: Vec<(RecordName, Location)> =
                shard.lock().iter().map(|(&name, stored)| (name, self.location(stored))).collect();
            let scans = names.iter().enumerate().map(|(tag, (_, location))| Scan {
                tag,
                file: Ok(location.file.clone()),
                offset: location.offset,
                len: location.len,
                head_len: location.front_len,
            });
            scan_fronts(queue, scans, &mut |tag, front| {
                let (name, location) = &names[tag];
                match front {
                    Ok(front) if front.is_named(name, location.len, location.front_len) => {
                        if self.contains(name) {
                            found(front.found());
                        }
                    }
                    _ => untold += u64::from(self.contains(name)),
                }
            });
        }
        untold
    }

    fn contains(&self, name: &RecordName) -> bool {
        self.shard(&name.id).lock().contains_key(name)
    }

    fn usage(&self) -> Usage {
        let data = self.data.lock();
        let books = self.geometry.file_len - self.geometry.data_blocks() * BLOCK_BYTES as u64;
        Usage {
            bytes: books + data.used_blocks() * BLOCK_BYTES as u64 + self.tombstones.log_bytes(),
            limit: self.limit,
            records: self.records.load(Ordering::Relaxed), // a figure
        }
    }
}

/// What a failed operation means for a record.
fn refusal(error: &io::Error) -> WriteError {
    if error.kind() == io::ErrorKind::StorageFull { WriteError::NoSpace } else { WriteError::Io }
}
