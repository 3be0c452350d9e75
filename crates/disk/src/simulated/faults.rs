//! [`Faults`]: injected faults; [`Counters`]: statistics.

use std::time::Duration;

/// Injected faults. Probabilities are in permille, independent for each operation; 0 by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// A read fails with EIO.
    pub read_error_permille: u32,
    /// A write or an allocation fails with EIO and changes nothing.
    pub write_error_permille: u32,
    /// A write fails with EIO, and some of its sectors were changed.
    pub torn_write_permille: u32,
    /// A sync of a file or directory fails with EIO. Unsynced data of the file may be lost permanently; names remain
    /// pending for the next sync.
    pub sync_error_permille: u32,
    /// A creation, rename or removal of a name fails with EIO and changes nothing.
    pub name_error_permille: u32,
    /// A write, an allocation or a new name fails with ENOSPC and changes nothing.
    pub no_space_permille: u32,
    /// A read returns one wrong bit; the disk has the right one.
    pub flipped_read_permille: u32,
    /// A read or write takes several steps, interleaved with other operations.
    pub short_permille: u32,
    /// Capacity of the disk in bytes; practically unlimited if not set.
    pub capacity: Option<u64>,
    /// Duration of every operation.
    pub latency: Option<Duration>,
}

/// Statistics of a disk. Operations without power are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Reads of files.
    pub reads: u64,
    /// Writes of files, and allocations.
    pub writes: u64,
    /// Syncs of files and directories.
    pub syncs: u64,
    /// Names created, renamed or removed.
    pub names: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Operations that failed with EIO, including torn writes.
    pub errors: u64,
    /// Operations that failed with ENOSPC.
    pub no_space: u64,
    /// Torn writes.
    pub torn_writes: u64,
    /// Reads with a flipped bit.
    pub flipped_reads: u64,
    /// Reads and writes that took several steps.
    pub short_transfers: u64,
    /// Sectors lost by failed syncs.
    pub lost_sectors: u64,
    /// Restarts of the disk.
    pub restarts: u64,
}
