//! Records on SSD: I/O engines, three backends, recovery.
//!
//! Reading order: [`Storage`] and [`Queue`], the layer over a disk, with the system's files behind it (`os`, with the
//! engines `posix` and `uring`) or a simulated one (`simulated`); `record`, what a record looks like on disk, and
//! `read`, how it is read and verified; [`Backend`] and the three of them.

mod buffer;
mod storage;

mod os;
mod posix;
mod simulated;
mod uring;

mod read;
mod record;

mod backend;
mod kind;

#[doc(hidden)]
pub mod fuzzing;
#[doc(hidden)]
pub mod planted;
#[doc(hidden)]
pub mod samples;

pub use backend::{
    BUCKET_BYTES_MAX_DEFAULT, BUCKET_RECORDS_MAX_DEFAULT, BucketBackend, BucketConfig,
    OPEN_FILES_MAX_DEFAULT, inspect_buckets,
};
pub use backend::{
    Backend, BadRecord, Eviction, EvictionOrder, Found, Location, OpenError, RecordName, Recovery, Source,
    Usage, WriteError,
};
pub use backend::{FileBackend, FileConfig, OffsetBackend, OffsetConfig, inspect_files, inspect_offset};
pub use buffer::{Aligned, BLOCK_BYTES, Buffer};
pub use kind::{BackendConfig, BackendKind, UnknownBackend};
pub use os::{EngineChoice, OsStorage, UnknownEngine};
pub use read::{ReadError, ReadJob, read_records};
pub use record::{
    Damage, DiskLayout, Front, FrontError, Inspected, InspectedState, decode_front, decode_header, verify,
    verify_record,
};
pub use simulated::{Counters, Faults, SECTOR_BYTES, SimulatedDisk};
pub use storage::{
    Done, Entry, File, Mode, Op, OpKind, QUEUE_DEPTH_DEFAULT, Queue, QueueConfig, RegisteredMemory, Space,
    Storage, Work, run_all, run_one, sync,
};
