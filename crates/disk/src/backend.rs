//! [`Backend`]: storage of records on the disk. Three implementations, with one record format and one way of reading.
//!
//! | backend | a record is | purpose |
//! |---|---|---|
//! | [`bucket`] | one of many in a file that is written at once | the default: large sequential writes, cheap eviction
//! |
//! | [`file_per_key`] | a file | inspection with other tools |
//! | [`offset`] | a range of one large file | a fixed size on disk, no file system work per object |
//!
//! A backend maps ids ([`RecordId`]) to locations ([`RecordLocation`]); [`crate::record`] defines the content of a
//! record, and [`crate::read`] reads it. The index of each backend is in memory, rebuilt by a scan at the start.
//!
//! Rules for all backends:
//!
//! * [`Backend::write`] returns Ok for a record only when it is durable.
//! * [`Backend::remove`] returns only when the removal is durable.
//! * Records chosen by [`Backend::prepare_eviction`] can no longer be found; [`Backend::finish_eviction`] deletes their
//!   files, and holders of a [`RecordLocation`] can still read to the end.
//! * Space in use, including the backend's own metadata, never exceeds the limit.

mod batch_io;
mod bucket;
mod claims;
mod eviction_queue;
mod file_per_key;
mod offset;
mod recovery;
pub(crate) mod tombstones;

#[cfg(test)]
mod conformance;

use std::fmt;
use std::sync::Arc;

use moontide_types::record::Header;
use moontide_types::{Epoch, ObjectId};

use crate::storage::{File, Queue};

#[cfg(any(test, feature = "testing"))]
pub(crate) use bucket::format as footer;
pub use bucket::{
    BUCKET_BYTES_MAX_DEFAULT, BUCKET_RECORDS_MAX_DEFAULT, BucketBackend, BucketConfig,
    OPEN_FILES_MAX_DEFAULT, inspect as inspect_buckets,
};
pub use file_per_key::{FileBackend, FileConfig, inspect as inspect_files};
pub use offset::{OffsetBackend, OffsetConfig, inspect as inspect_offset};
pub use recovery::{BadRecord, OpenError, Recovery};

/// Identifies a record: one stripe of one version of an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RecordId {
    /// Id of the object.
    pub id: ObjectId,
    /// Version of the object.
    pub version: Epoch,
    /// Index of the stripe.
    pub stripe: u16,
}

impl RecordId {
    /// Returns the id of the record with this header.
    pub fn of(header: &Header) -> RecordId {
        RecordId { id: header.id, version: header.word.epoch(), stripe: header.stripe_index }
    }
}

/// A record to write, in memory that does not change meanwhile.
#[derive(Clone, Copy, Debug)]
pub struct RecordSource<'a> {
    /// Header as in memory: state READY. The writer sets the payload offset.
    pub header: &'a Header,
    /// Payload. Written without a copy if it starts on a block of 4 KiB.
    pub payload: &'a [u8],
    /// Page digests as stored.
    pub digests: &'a [u8],
    /// Tenant and key as stored.
    pub key: &'a [u8],
    /// Attributes as stored.
    pub attributes: &'a [u8],
}

/// A record found by a scan: everything but the payload.
#[derive(Clone, Copy, Debug)]
pub struct ScannedRecord<'a> {
    /// Header as on disk.
    pub header: &'a Header,
    /// Tenant and key as stored.
    pub key: &'a [u8],
    /// Attributes as stored.
    pub attributes: &'a [u8],
    /// Bytes that the record takes on the disk.
    pub disk_len: u64,
}

/// Location of a record on the disk. The file remains readable while this lives, even if its name is removed.
#[derive(Clone, Debug)]
pub struct RecordLocation {
    /// File that contains the record.
    pub file: File,
    /// Offset of the record in the file, a multiple of the block size.
    pub offset: u64,
    /// Bytes of the record, whole blocks.
    pub len: u64,
    /// [`DiskLayout::preamble_read_len`](crate::DiskLayout::preamble_read_len) of the record.
    pub preamble_read_len: u64,
    /// Keeps the range from being reused for another record while this lives, in backends that reuse ranges of a file.
    #[expect(dead_code, reason = "held for its reference count, never read")]
    pub(crate) read_guard: Option<Arc<()>>,
}

impl RecordLocation {
    /// Returns the bytes of the blocks that follow the preamble: the payload, unless it is so small that it is read
    /// together with the preamble.
    pub fn payload_blocks(&self) -> u64 {
        self.len - self.preamble_read_len
    }
}

/// Reason why a record was not written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum WriteError {
    /// The same record, or a newer version, is already on the disk.
    #[error("the record, or a newer version, is already on disk")]
    Exists,
    /// The record alone is larger than the limit, or than a file of the backend may be.
    #[error("a record of {bytes} bytes does not fit into the disk tier")]
    TooLarge {
        /// Bytes that it would take.
        bytes: u64,
    },
    /// This version or a newer one was removed: the record must not reappear.
    #[error("the record was removed")]
    Removed,
    /// The record has no digests: reads could not be verified.
    #[error("records without digests are not written to disk")]
    Digestless,
    /// Sections of the record in memory do not match its header.
    #[error("the record is corrupt in memory")]
    Corrupt,
    /// The limit is reached: evict first.
    #[error("the disk tier is full; {needed} more bytes are needed")]
    Full {
        /// Bytes to evict.
        needed: u64,
    },
    /// The disk is full, although the limit is not reached: other programs use it, too.
    #[error("no space left on the disk")]
    NoSpace,
    /// An I/O error.
    #[error("disk I/O error")]
    Io,
}

/// An eviction in progress. Dropping it without [`Backend::finish_eviction`] leaks the space until the next start.
#[derive(Debug)]
#[must_use]
pub struct Eviction {
    /// Evicted records. Masters have to be notified before their space is reused.
    pub names: Vec<RecordId>,
    /// Bytes that will be freed.
    pub bytes: u64,
    /// State of the backend to finish the eviction.
    pub(crate) handles: Vec<u64>,
}

/// Space and number of records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Usage {
    /// Bytes on the disk, including those of unfinished evictions.
    pub bytes: u64,
    /// Limit in bytes.
    pub limit: u64,
    /// Records that can be found.
    pub records: u64,
}

/// Order of eviction when the limit is reached.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EvictionPolicy {
    /// Oldest write first.
    #[default]
    Fifo,
    /// Least recently read or written first.
    Lru,
}

/// Storage of records on a disk.
pub trait Backend: Send + Sync + fmt::Debug {
    /// Writes records. Returns the result of each, in order. Writes as many as fit: call [`Backend::prepare_eviction`]
    /// after [`WriteError::Full`].
    fn write(&self, queue: &mut dyn Queue, records: &[RecordSource<'_>]) -> Vec<Result<(), WriteError>>;

    /// Returns the location of a record. Counts as a use.
    fn locate(&self, name: &RecordId) -> Option<RecordLocation>;

    /// Makes a record that failed verification unreachable. Need not be durable.
    fn drop_corrupt(&self, name: &RecordId);

    /// Removes these versions and all older ones durably, including records that are not on the disk, so that none
    /// reappears with a file that was temporarily unreadable.
    fn remove(&self, queue: &mut dyn Queue, names: &[(ObjectId, Epoch)]) -> std::io::Result<()>;

    /// Chooses records whose space is at least `bytes` together, or all records.
    fn prepare_eviction(&self, bytes: u64) -> Option<Eviction>;

    /// Deletes the chosen records durably. After an error, a crash may restore some of them; they still cannot be found, and
    /// the next eviction tries again to free their space.
    fn finish_eviction(&self, queue: &mut dyn Queue, eviction: Eviction) -> std::io::Result<()>;

    /// Visits every record that can be found, from its bytes on the disk: for an inventory. Records written or removed
    /// meanwhile may or may not be visited. Counts as no use; payloads are not read. Files, or parts of them, that
    /// cannot be read now are skipped; returns the skipped records.
    fn scan(&self, queue: &mut dyn Queue, found: &mut dyn FnMut(ScannedRecord<'_>)) -> Vec<RecordId>;

    /// Whether a record can be found. Counts as no use.
    fn contains(&self, name: &RecordId) -> bool;

    /// Returns all records that can be found, from memory: also of a disk that no longer responds.
    fn names(&self) -> Vec<RecordId>;

    /// Returns space and number of records.
    fn usage(&self) -> Usage;
}
