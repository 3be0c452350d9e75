//! [`inspect`]: a look at the buckets of a tier from outside.

use std::sync::Arc;

use crate::backend::bucket::format::Told;
use crate::backend::bucket::scan::{BucketFile, Seen, scan};
use crate::backend::tombstones::Tombstones;
use crate::backend::{Location, OpenError, RecordName};
use crate::buffer::Aligned;
use crate::read::{ReadJob, read_records};
use crate::record::{Inspected, InspectedState, decode_trailer};
use crate::storage::{File, Queue, Storage};

/// Tells of every record in a tier, the newest bucket first, and changes nothing. With `verify` the payloads are read,
/// too. A tier that is in use may be looked at: buckets that come or go meanwhile are missing or bad.
pub fn inspect(
    storage: &Arc<dyn Storage>,
    queue: &mut dyn Queue,
    verify: bool,
    each: &mut dyn FnMut(Inspected<'_>),
) -> Result<(), OpenError> {
    let (tombstones, _) =
        Tombstones::inspect(storage, queue).map_err(OpenError::io("reading the log of removals"))?;
    let mut files = BucketFile::list(&**storage).map_err(OpenError::io("listing the buckets"))?;
    files.retain(|file| !file.temporary);
    // The scan has the queue while it tells of a record, so payloads are read through another one.
    let mut payloads = verify.then(|| storage.queue(&Default::default()));
    scan(&**storage, queue, &files, &mut |bucket, file, seen| {
        let name = BucketFile::name(bucket.number, false);
        match seen {
            Seen::Bad { offset, why } => {
                let state = InspectedState::Damaged { why };
                each(Inspected { file: &name, offset, len: 0, name: None, state });
            }
            Seen::Record(told) => {
                let removed = tombstones.covers(&told.header.id, told.header.word.epoch());
                let state = match (removed, file, &mut payloads) {
                    (true, ..) => InspectedState::Removed,
                    (false, Some(file), Some(queue)) => verify_payload(&mut **queue, file, &told),
                    (false, ..) => InspectedState::Ok,
                };
                // The scan has checked it already; what is decoded here borrows from the footer.
                let section = decode_trailer(&told.header, told.key, told.attributes).ok();
                let record = section.map(|section| (&told.header, section));
                let (offset, len) = (told.offset, told.layout.len);
                each(Inspected { file: &name, offset, len, name: record, state });
            }
        }
    });
    Ok(())
}

fn verify_payload(queue: &mut dyn Queue, file: &File, told: &Told<'_>) -> InspectedState {
    let (len, front_len) = (told.layout.len, told.layout.head_len);
    let location = Location { file: file.clone(), offset: told.offset, len, front_len, hold: None };
    let mut memory = Aligned::zeroed(len as usize);
    let job = ReadJob { name: RecordName::of(&told.header), location, into: &mut memory };
    match read_records(queue, vec![job]).pop() {
        Some(Err(error)) => InspectedState::Damaged { why: error.to_string() },
        _ => InspectedState::Ok,
    }
}
