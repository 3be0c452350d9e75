//! [`inspect`]: visits the records in the data file of a tier without opening it.

use std::path::Path;
use std::sync::Arc;

use super::open::{DATA, read_superblocks, scan_table, slot_offset};
use crate::backend::batch_io::{PreambleScan, scan_preambles, verify_payload};
use crate::backend::tombstones::Tombstones;
use crate::backend::{OpenError, RecordLocation};
use crate::record::{InspectedRecord, InspectedState};
use crate::storage::{OpenMode, Queue, Storage};

/// Visits every record of a tier without changes. With `verify` the payloads are read, too. The tier may be in use:
/// records that are written or removed meanwhile are missing or corrupt.
pub fn inspect(
    storage: &Arc<dyn Storage>,
    queue: &mut dyn Queue,
    verify: bool,
    each: &mut dyn FnMut(InspectedRecord<'_>),
) -> Result<(), OpenError> {
    let (tombstones, _) =
        Tombstones::inspect(storage, queue).map_err(OpenError::io("read the tombstone log"))?;
    let file = storage.open(Path::new(DATA), OpenMode::Read).map_err(OpenError::io("open the data file"))?;
    let len = storage.len(&file).map_err(OpenError::io("get the length of the data file"))?;
    let Some((geometry, _)) = read_superblocks(queue, &file, len) else {
        return Err(OpenError::Foreign { file: DATA.into(), reason: "both superblocks are corrupt".into() });
    };
    let table = scan_table(queue, &file, &geometry);
    let mut corrupt = |offset, reason: &str| {
        let state = InspectedState::Corrupt { reason: reason.into() };
        each(InspectedRecord { file: DATA, offset, len: 0, name: None, state });
    };
    for block in table.unreadable {
        corrupt(geometry.table_block(block), "cannot read a block of the table");
    }
    for slot in table.corrupt {
        corrupt(slot_offset(&geometry, slot), "corrupt table entry");
    }
    let mut entries = table.used;
    entries.sort_unstable_by_key(|(_, entry)| entry.first_block);
    let scans = entries.iter().enumerate().map(|(tag, (_, entry))| PreambleScan {
        tag,
        file: Ok(file.clone()),
        offset: entry.offset(),
        len: entry.len(),
        preamble_read_len: entry.preamble_read_len(),
    });
    // The scan uses the queue during the callback, so payloads are read with another one.
    let mut payloads = verify.then(|| storage.queue(&Default::default()));
    scan_preambles(queue, scans, &mut |tag, preamble| {
        let entry = &entries[tag].1;
        let (offset, len) = (entry.offset(), entry.len());
        let removed = tombstones.covers(&entry.name.id, entry.name.version);
        let state = match (&preamble, &mut payloads) {
            (Err(error), _) => InspectedState::Corrupt { reason: error.to_string() },
            (Ok(preamble), _) if !preamble.matches(&entry.name, len, entry.preamble_read_len()) => {
                InspectedState::Corrupt { reason: "record does not match its entry".into() }
            }
            _ if removed => InspectedState::Removed,
            (Ok(_), Some(queue)) => {
                let (file, preamble_read_len) = (file.clone(), entry.preamble_read_len());
                verify_payload(
                    &mut **queue,
                    entry.name,
                    RecordLocation { file, offset, len, preamble_read_len, read_guard: None },
                )
            }
            (Ok(_), None) => InspectedState::Ok,
        };
        let name = preamble.as_ref().ok().map(|preamble| (&preamble.header, preamble.section));
        each(InspectedRecord { file: DATA, offset, len, name, state });
    });
    Ok(())
}
