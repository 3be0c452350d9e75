//! [`inspect`]: a look at the file of a tier from outside.

use std::path::Path;
use std::sync::Arc;

use super::open::{DATA, read_superblocks, scan_table, slot_offset};
use crate::backend::scatter::{Scan, scan_fronts, verify_payload};
use crate::backend::tombstones::Tombstones;
use crate::backend::{Location, OpenError};
use crate::record::{Inspected, InspectedState};
use crate::storage::{Mode, Queue, Storage};

/// Tells of every record in a tier and changes nothing. With `verify` the payloads are read, too. A tier that is in use
/// may be looked at: what comes or goes meanwhile is missing or bad.
pub fn inspect(
    storage: &Arc<dyn Storage>,
    queue: &mut dyn Queue,
    verify: bool,
    each: &mut dyn FnMut(Inspected<'_>),
) -> Result<(), OpenError> {
    let (tombstones, _) =
        Tombstones::inspect(storage, queue).map_err(OpenError::io("reading the log of removals"))?;
    let file = storage.open(Path::new(DATA), Mode::Read).map_err(OpenError::io("opening the tier's file"))?;
    let len = storage.len(&file).map_err(OpenError::io("asking for the length of the tier's file"))?;
    let Some((geometry, _)) = read_superblocks(queue, &file, len) else {
        return Err(OpenError::Foreign {
            file: DATA.into(),
            why: "both of its superblocks are damaged".into(),
        });
    };
    let table = scan_table(queue, &file, &geometry);
    let mut damaged = |offset, why: &str| {
        let state = InspectedState::Damaged { why: why.into() };
        each(Inspected { file: DATA, offset, len: 0, name: None, state });
    };
    for block in table.unreadable {
        damaged(geometry.table_block(block), "a block of the table cannot be read");
    }
    for slot in table.damaged {
        damaged(slot_offset(&geometry, slot), "an entry of the table is damaged");
    }
    let mut entries = table.used;
    entries.sort_unstable_by_key(|(_, entry)| entry.first_block);
    let scans = entries.iter().enumerate().map(|(tag, (_, entry))| Scan {
        tag,
        file: Ok(file.clone()),
        offset: entry.offset(),
        len: entry.len(),
        head_len: entry.head_len(),
    });
    // The scan has the queue while it tells of a record, so payloads are read through another one.
    let mut payloads = verify.then(|| storage.queue(&Default::default()));
    scan_fronts(queue, scans, &mut |tag, front| {
        let entry = &entries[tag].1;
        let (offset, len) = (entry.offset(), entry.len());
        let removed = tombstones.covers(&entry.name.id, entry.name.version);
        let state = match (&front, &mut payloads) {
            (Err(error), _) => InspectedState::Damaged { why: error.to_string() },
            (Ok(front), _) if !front.is_named(&entry.name, len, entry.head_len()) => {
                InspectedState::Damaged { why: "another record than its entry names".into() }
            }
            _ if removed => InspectedState::Removed,
            (Ok(_), Some(queue)) => {
                let (file, front_len) = (file.clone(), entry.head_len());
                verify_payload(
                    &mut **queue,
                    entry.name,
                    Location { file, offset, len, front_len, hold: None },
                )
            }
            (Ok(_), None) => InspectedState::Ok,
        };
        let name = front.as_ref().ok().map(|front| (&front.header, front.section));
        each(Inspected { file: DATA, offset, len, name, state });
    });
    Ok(())
}
