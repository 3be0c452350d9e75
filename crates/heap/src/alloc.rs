//! Allocation of a segment's 512-byte units.
//!
//! Master and node keep separate bookkeeping and do not share it:
//!
//! ```text
//!   master   Allocator   chooses a range       two-level bins over block records   28 bytes a block
//!   node     ExtentMap   refuses an overlap    one bit per unit                    1/4096 of the memory
//! ```
//!
//! Neither touches the memory of the segment. Both are plain values and deterministic: the same calls give the same
//! results.

mod allocator;
mod bins;
mod blocks;
mod extent_map;
mod huge;
mod rebuild;

pub use allocator::{Align, AllocStats, Allocation, Allocator};
pub use blocks::BlockRef;
pub use extent_map::{ClaimError, ExtentMap};
pub use rebuild::RebuildError;

use moontide_types::limits::{PAYLOAD_ALIGN, UNIT_BYTES};

/// Units of a 4 KiB page, the alignment of payloads of 4 KiB and more.
pub const PAGE_UNITS: u32 = (PAYLOAD_ALIGN / UNIT_BYTES) as u32;

const _: () = assert!(PAGE_UNITS.is_power_of_two());
