//! [`Faults`]: injected faults; [`Times`]: drawn durations; [`Counters`]: statistics.

use std::time::Duration;

use moontide_rt::SplitMix64;

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
    /// Drawn durations of single operations, in addition to the latency. They are meant for a simulated world, in which a
    /// stall takes no time.
    pub times: Times,
}

/// Drawn durations of operations. A part of each is before the effect of the operation, the rest after it: others see
/// the effect before the caller does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// An operation usually takes up to this.
    pub usual_max: Duration,
    /// An operation takes 50 ms to 60 s.
    pub stall_permille: u32,
    /// A sync of a file or directory takes 1 ms to 10 s.
    pub slow_sync_permille: u32,
}

impl Times {
    /// No operation takes time.
    pub const NONE: Times = Times { usual_max: Duration::ZERO, stall_permille: 0, slow_sync_permille: 0 };

    /// Draws the duration of an operation, as the times before and after its effect. Draws nothing if all times are 0.
    pub(super) fn draw(&self, rng: &mut SplitMix64, is_sync: bool) -> (Duration, Duration) {
        let micros = if rng.chance(self.stall_permille) {
            rng.log_uniform(50_000, 60_000_000)
        } else if is_sync && rng.chance(self.slow_sync_permille) {
            rng.log_uniform(1000, 10_000_000)
        } else if self.usual_max.is_zero() {
            return (Duration::ZERO, Duration::ZERO);
        } else {
            rng.below(self.usual_max.as_micros() as u64 + 1)
        };
        let before = rng.below(micros + 1);
        (Duration::from_micros(before), Duration::from_micros(micros - before))
    }
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
    /// Operations that took 50 ms or more by [`Times`].
    pub stalls: u64,
    /// Sectors lost by failed syncs.
    pub lost_sectors: u64,
    /// Restarts of the disk.
    pub restarts: u64,
}
