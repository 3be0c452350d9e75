//! [`Faults`], what goes wrong; [`Counters`], what happened; [`Rng`], by which chance.

use std::time::Duration;

/// What goes wrong. Chances are in permille, for each operation by itself; none by default.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Faults {
    /// A read fails with EIO.
    pub read_error_permille: u32,
    /// A write or an allocation fails with EIO and changes nothing.
    pub write_error_permille: u32,
    /// A write fails with EIO, and some of its sectors were changed.
    pub torn_write_permille: u32,
    /// A sync of a file or directory fails with EIO. What a file's sync should have made durable may be lost for good;
    /// names wait for the next one.
    pub sync_error_permille: u32,
    /// Making, renaming or removing a name fails with EIO and changes nothing.
    pub name_error_permille: u32,
    /// A write, an allocation or a new name fails with ENOSPC and changes nothing.
    pub no_space_permille: u32,
    /// A read gets one bit wrong, although it is right on the disk.
    pub flipped_read_permille: u32,
    /// A read or write is done in several steps, between which others may come.
    pub short_permille: u32,
    /// Bytes that fit on the disk; as good as endless if not set.
    pub capacity: Option<u64>,
    /// How long every operation takes.
    pub latency: Option<Duration>,
}

/// What happened. Operations without power are not counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Reads of files.
    pub reads: u64,
    /// Writes of files, and allocations.
    pub writes: u64,
    /// Syncs of files and directories.
    pub syncs: u64,
    /// Names made, renamed or removed.
    pub names: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Bytes written.
    pub written_bytes: u64,
    /// Operations that failed with EIO, torn writes included.
    pub errors: u64,
    /// Operations that failed with ENOSPC.
    pub no_space: u64,
    /// Writes that were torn.
    pub torn_writes: u64,
    /// Reads with a bit flipped.
    pub flipped_reads: u64,
    /// Reads and writes that took several steps.
    pub short_transfers: u64,
    /// Sectors that a failed sync lost.
    pub lost_sectors: u64,
    /// Times that the disk was restarted.
    pub restarts: u64,
}

/// Chance that follows from a seed (SplitMix64): small, and the same on every machine.
#[derive(Clone, Debug)]
pub(super) struct Rng(u64);

impl Rng {
    pub(super) fn new(seed: u64) -> Rng {
        Rng(seed)
    }

    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number less than `bound`, which is not 0. The bias of the remainder does not matter here.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// Draws nothing where nothing can happen, so that a fault that is off does not change the fate of the rest.
    pub(super) fn chance(&mut self, permille: u32) -> bool {
        permille > 0 && self.below(1000) < u64::from(permille)
    }

    pub(super) fn coin(&mut self) -> bool {
        self.next() >> 63 == 1
    }
}
