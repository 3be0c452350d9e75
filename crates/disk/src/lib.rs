//! Records on SSD: I/O engines, three backends, recovery.
//!
//! A node writes evicted records to its disk and reads them back. This crate makes that durable and verified: a write
//! that was acknowledged survives a crash, a removal stays a removal, and no read returns bytes that do not match their
//! digests. It does not decide which records are written: that is up to the masters and the node.
//!
//! | type | meaning |
//! |---|---|
//! | [`Storage`] | a tree of files: [`OsStorage`], or [`SimulatedDisk`] with power failures |
//! | [`Queue`] | moves bytes for one thread, many operations at a time (io_uring or system calls) |
//! | [`Backend`] | a set of records on a storage: [`BucketBackend`], [`FileBackend`], [`OffsetBackend`] |
//! | [`RecordId`], [`RecordLocation`] | object, version and stripe of a record; its place on the disk |
//! | [`read_records`] | reads records at their locations, and verifies every page |
//!
//! Reading order: [`Storage`] and [`Queue`], the layer over a disk: files of the operating system (`os`, with the
//! engines `posix` and `uring`) or a simulated disk (`simulated`); `record` (format of a record on disk) and `read`
//! (reads and verifies records); [`Backend`] and its three implementations.
//!
//! # Example: a record survives a power failure
//!
//! ```
//! use std::sync::Arc;
//!
//! use moontide_disk::samples::SampleRecord;
//! use moontide_disk::*;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! // A simulated disk; 1 is the seed of its failures. A node uses `OsStorage::open(directory, IoEngine::Auto)`.
//! let disk = SimulatedDisk::new(1);
//! let storage: Arc<dyn Storage> = Arc::new(disk.clone());
//! let queue = &mut *storage.queue(&QueueConfig::default());
//! let config = BackendConfig { limit_bytes: 8 << 20, eviction_policy: EvictionPolicy::Fifo };
//! let (backend, _) = BackendKind::Bucket.open(storage.clone(), queue, config, &mut |_| ())?;
//!
//! // Two records as they are in the memory of a node. `Ok` means that the record is durable.
//! let (kept, removed) = (SampleRecord::new(1, 1, 300_000), SampleRecord::new(2, 1, 5_000));
//! for written in backend.write(queue, &[kept.source(), removed.source()]) {
//!     written?;
//! }
//! backend.remove(queue, &[(removed.name().id, removed.name().version)])?;
//!
//! // The machine loses power and starts again. The scan at the start finds what was acknowledged, and nothing that was
//! // removed.
//! drop(backend);
//! disk.restart();
//! let queue = &mut *storage.queue(&QueueConfig::default());
//! let mut found = vec![];
//! let (backend, _) = BackendKind::Bucket.open(storage.clone(), queue, config, &mut |record| {
//!     found.push(RecordId::of(record.header));
//! })?;
//! assert_eq!(found, [kept.name()]);
//!
//! // The read verifies header, key and every page. The payload follows the preamble, without a copy.
//! let location = backend.locate(&kept.name()).ok_or("the record was found")?;
//! let mut memory = AlignedBuf::zeroed(location.len as usize);
//! let job = ReadJob::whole(kept.name(), location, &mut memory);
//! let header = read_records(queue, vec![job]).remove(0)?;
//! assert_eq!(&memory[header.payload_offset as usize..][..300_000], kept.payload());
//! # Ok(())
//! # }
//! ```
//!
//! The feature `testing` adds the simulated disk, delayed syncs, sample records and the fuzz targets. What ships does not
//! enable it.

mod buffer;
mod storage;

mod os;
#[cfg(any(test, feature = "testing"))]
mod simulated;

mod read;
mod record;

mod backend;
mod kind;

#[cfg(any(test, feature = "testing"))]
pub mod fuzzing;
#[doc(hidden)]
pub mod mutation;
#[cfg(any(test, feature = "testing"))]
pub mod samples;

pub use backend::{
    BUCKET_BYTES_MAX_DEFAULT, BUCKET_RECORDS_MAX_DEFAULT, BucketBackend, BucketConfig,
    OPEN_FILES_MAX_DEFAULT, inspect_buckets,
};
pub use backend::{
    Backend, BadRecord, Eviction, EvictionPolicy, OpenError, RecordId, RecordLocation, RecordSource,
    Recovery, ScannedRecord, Usage, WriteError,
};
pub use backend::{FileBackend, FileConfig, OffsetBackend, OffsetConfig, inspect_files, inspect_offset};
pub use buffer::{AlignedBuf, BLOCK_BYTES, Buffer};
pub use kind::{BackendConfig, BackendKind, UnknownBackend};
pub use os::{IoEngine, OsStorage, UnknownEngine};
pub use read::{ReadError, ReadJob, read_records};
pub use record::{
    Corruption, DiskLayout, InspectedRecord, InspectedState, PreambleError, RecordPreamble, decode_header,
    decode_preamble, verify, verify_record,
};
#[cfg(any(test, feature = "testing"))]
pub use simulated::{Counters, Faults, SECTOR_BYTES, SimulatedDisk, Times};
pub use storage::{
    Completion, DirEntry, DiskSpace, File, Op, OpKind, OpSource, OpenMode, QUEUE_DEPTH_DEFAULT, Queue,
    QueueConfig, RegisteredMemory, Storage, run_all, run_one, sync,
};
