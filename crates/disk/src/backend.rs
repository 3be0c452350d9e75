//! [`Backend`]: where records stand on the disk. Three ways, one record format, one way of reading.
//!
//! | backend | a record is | for |
//! |---|---|---|
//! | [`bucket`] | one of many in a file written in one go | the default: large sequential writes, cheap eviction |
//! | [`file_per_key`] | a file | looking at with other tools |
//! | [`offset`] | a range of one large file | a fixed size on disk, no file system work per object |
//!
//! A backend knows names ([`RecordName`]) and places ([`Location`]); what is in a record is the business of
//! [`crate::record`], and reading it that of [`crate::read`]. The index of each is in memory, rebuilt by a scan at the
//! start.
//!
//! Rules that all of them keep:
//!
//! * [`Backend::write`] answers Ok for a record only when it would survive a crash.
//! * [`Backend::remove`] returns only when the removal would survive a crash.
//! * What [`Backend::prepare_eviction`] has chosen cannot be found any more; its files go with
//!   [`Backend::finish_eviction`], and whoever holds a [`Location`] still reads it to the end.
//! * Space in use, the backend's own books included, never exceeds the limit.

mod bucket;
mod claims;
mod file_per_key;
mod offset;
mod order;
mod recovery;
mod scatter;
pub(crate) mod tombstones;

#[cfg(test)]
mod trial;

use std::fmt;
use std::sync::Arc;

use moontide_types::record::Header;
use moontide_types::{Epoch, ObjectId};

use crate::storage::{File, Queue};

pub(crate) use bucket::format as footer;
pub use bucket::{
    BUCKET_BYTES_MAX_DEFAULT, BUCKET_RECORDS_MAX_DEFAULT, BucketBackend, BucketConfig,
    OPEN_FILES_MAX_DEFAULT, inspect as inspect_buckets,
};
pub use file_per_key::{FileBackend, FileConfig, inspect as inspect_files};
pub use offset::{OffsetBackend, OffsetConfig, inspect as inspect_offset};
pub use recovery::{BadRecord, OpenError, Recovery};

/// A record on disk: one stripe of one version of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RecordName {
    /// The object.
    pub id: ObjectId,
    /// Its version.
    pub version: Epoch,
    /// Which stripe.
    pub stripe: u16,
}

impl RecordName {
    /// The name of the record with this header.
    pub fn of(header: &Header) -> RecordName {
        RecordName { id: header.id, version: header.word.epoch(), stripe: header.stripe_index }
    }
}

/// A record to be written, in memory that does not change meanwhile.
#[derive(Clone, Copy, Debug)]
pub struct Source<'a> {
    /// Its header as it stands in memory: READY. Where the payload starts is set by the writer.
    pub header: &'a Header,
    /// Its payload. Written without a copy if it starts on a block of 4 KiB.
    pub payload: &'a [u8],
    /// Its page digests, as they are stored.
    pub digests: &'a [u8],
    /// Tenant and key, as they are stored.
    pub key: &'a [u8],
    /// Attributes, as they are stored.
    pub attributes: &'a [u8],
}

/// A record found by the scan at the start: everything but the payload.
#[derive(Clone, Copy, Debug)]
pub struct Found<'a> {
    /// Its header.
    pub header: &'a Header,
    /// Tenant and key, as they are stored.
    pub key: &'a [u8],
    /// Attributes, as they are stored.
    pub attributes: &'a [u8],
    /// Bytes that it takes on the disk.
    pub disk_len: u64,
}

/// Where a record stands. The file stays readable while this lives, whatever becomes of its name.
#[derive(Clone, Debug)]
pub struct Location {
    /// The file.
    pub file: File,
    /// First byte of the record in it: whole blocks.
    pub offset: u64,
    /// Bytes of the record: whole blocks.
    pub len: u64,
    /// Bytes before the payload, if that starts on a block; for a small record, all of it.
    pub front_len: u64,
    /// Keeps the range from being given to another record while this lives, where ranges of a file are used again.
    #[expect(dead_code, reason = "it is held, not looked at")]
    pub(crate) hold: Option<Arc<()>>,
}

/// Why a record was not written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WriteError {
    /// The same record, or a newer version, is on the disk already.
    #[error("it is on the disk already")]
    Exists,
    /// It alone is larger than the limit, or than what a file of the backend holds.
    #[error("a record of {bytes} bytes does not fit into the tier")]
    TooLarge {
        /// Bytes that it would take.
        bytes: u64,
    },
    /// It was removed, in this version or a newer one: it must not come back.
    #[error("it was removed")]
    Removed,
    /// It has no digests: nobody could say whether it was read right.
    #[error("a record without digests is not written to disk")]
    Digestless,
    /// Its parts in memory are not what its header says.
    #[error("the record is damaged in memory")]
    Damaged,
    /// The limit is reached: evict first.
    #[error("the tier is full; {wanted} more bytes are wanted")]
    Full {
        /// Bytes that must be evicted.
        wanted: u64,
    },
    /// The disk is full, although the limit is not reached: others use it, too.
    #[error("no space left on the disk")]
    NoSpace,
    /// The disk failed.
    #[error("the disk failed")]
    Io,
}

/// Records on their way out. Dropping it without [`Backend::finish_eviction`] leaks their space until the next start.
#[derive(Debug)]
#[must_use]
pub struct Eviction {
    /// The records, which the master must hear of before their space is used again.
    pub names: Vec<RecordName>,
    /// Bytes that will be free.
    pub bytes: u64,
    /// What the backend needs to finish.
    pub(crate) parts: Vec<u64>,
}

/// How much is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes on the disk, those on their way out included.
    pub bytes: u64,
    /// Bytes that may be used.
    pub limit: u64,
    /// Records that can be found.
    pub records: u64,
}

/// Who goes first when the limit is reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EvictionOrder {
    /// What was written first.
    #[default]
    Fifo,
    /// What was read, or written, longest ago.
    Lru,
}

/// Where records stand on the disk.
pub trait Backend: Send + Sync + fmt::Debug {
    /// Writes records; the answer is how each one went, in order. Writes what fits: call
    /// [`Backend::prepare_eviction`] for [`WriteError::Full`].
    fn write(&self, queue: &mut dyn Queue, records: &[Source<'_>]) -> Vec<Result<(), WriteError>>;

    /// Where a record stands. Counts as a use.
    fn locate(&self, name: &RecordName) -> Option<Location>;

    /// A record was read and is not what was written: it cannot be found any more. Need not survive a crash.
    fn drop_damaged(&self, name: &RecordName);

    /// Removes records for good; those that are not there as well, in this version and all older ones, so that they do
    /// not come back with a file that could not be read for a while.
    fn remove(&self, queue: &mut dyn Queue, names: &[(ObjectId, Epoch)]) -> std::io::Result<()>;

    /// Chooses records whose space is at least `bytes` together, or all there are.
    fn prepare_eviction(&self, bytes: u64) -> Option<Eviction>;

    /// Deletes what was chosen.
    fn finish_eviction(&self, queue: &mut dyn Queue, eviction: Eviction);

    /// Tells every record that can be found, from what stands on the disk: for a master that has to be told anew. What
    /// comes or goes meanwhile may or may not be among them. Counts as no use; payloads are not read. A file, or a part
    /// of one, that cannot be read just now is left out and counted: the answer is how many records could not be told.
    fn scan(&self, queue: &mut dyn Queue, found: &mut dyn FnMut(Found<'_>)) -> u64;

    /// Whether a record can be found. Counts as no use.
    fn contains(&self, name: &RecordName) -> bool;

    /// How much is stored.
    fn usage(&self) -> Usage;
}
