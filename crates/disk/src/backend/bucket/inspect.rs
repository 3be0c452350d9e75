//! [`inspect`]: visits the buckets of a tier without opening it.

use std::sync::Arc;

use crate::backend::bucket::format::FooterEntry;
use crate::backend::bucket::scan::{BucketFile, ScanItem, scan};
use crate::backend::tombstones::Tombstones;
use crate::backend::{OpenError, RecordId, RecordLocation};
use crate::buffer::AlignedBuf;
use crate::read::{ReadJob, read_records};
use crate::record::{InspectedRecord, InspectedState, decode_trailer};
use crate::storage::{File, Queue, Storage};

/// Visits every record of a tier, the newest bucket first, without changes. With `verify` the payloads are read, too.
/// The tier may be in use: buckets that are written or deleted meanwhile are missing or corrupt.
pub fn inspect(
    storage: &Arc<dyn Storage>,
    queue: &mut dyn Queue,
    verify: bool,
    each: &mut dyn FnMut(InspectedRecord<'_>),
) -> Result<(), OpenError> {
    let (tombstones, _) =
        Tombstones::inspect(storage, queue).map_err(OpenError::io("read the tombstone log"))?;
    let mut files = BucketFile::list(&**storage).map_err(OpenError::io("list the buckets"))?;
    files.retain(|file| !file.temporary);
    // The scan uses the queue during the callback, so payloads are read with another one.
    let mut payloads = verify.then(|| storage.queue(&Default::default()));
    scan(&**storage, queue, &files, &mut |bucket, file, item| {
        let name = BucketFile::name(bucket.number, false);
        match item {
            ScanItem::Bad { offset, reason } => {
                let state = InspectedState::Corrupt { reason };
                each(InspectedRecord { file: &name, offset, len: 0, name: None, state });
            }
            ScanItem::Record(entry) => {
                let removed = tombstones.covers(&entry.header.id, entry.header.word.epoch());
                let state = match (removed, file, &mut payloads) {
                    (true, ..) => InspectedState::Removed,
                    (false, Some(file), Some(queue)) => verify_payload(&mut **queue, file, &entry),
                    (false, ..) => InspectedState::Ok,
                };
                // The scan has already verified it; this result borrows from the footer.
                let section = decode_trailer(&entry.header, entry.key, entry.attributes).ok();
                let record = section.map(|section| (&entry.header, section));
                let (offset, len) = (entry.offset, entry.layout.len);
                each(InspectedRecord { file: &name, offset, len, name: record, state });
            }
        }
    });
    Ok(())
}

fn verify_payload(queue: &mut dyn Queue, file: &File, entry: &FooterEntry<'_>) -> InspectedState {
    let (len, preamble_read_len) = (entry.layout.len, entry.layout.preamble_read_len);
    let location =
        RecordLocation { file: file.clone(), offset: entry.offset, len, preamble_read_len, read_guard: None };
    let mut memory = AlignedBuf::zeroed(len as usize);
    let job = ReadJob::whole(RecordId::of(&entry.header), location, &mut memory);
    match read_records(queue, vec![job]).pop() {
        Some(Err(error)) => InspectedState::Corrupt { reason: error.to_string() },
        _ => InspectedState::Ok,
    }
}
