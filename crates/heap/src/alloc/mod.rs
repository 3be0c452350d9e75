//! Ranges of a segment: who may use which 512-byte units.
//!
//! Two parties keep books, and they do not share them:
//!
//! ```text
//!   master   Allocator   chooses a range       two-level bins over block records   24 bytes a block
//!   node     ExtentMap   refuses an overlap    one bit per unit                    1/4096 of the memory
//! ```
//!
//! Neither touches the memory of the segment; both are plain values, decided by their arguments alone: the
//! same calls give the same answers.

mod allocator;
mod bins;
mod blocks;
mod extent;
mod extent_map;
mod rebuild;

mod model;

#[doc(hidden)]
pub mod fuzz;

pub use allocator::{Align, AllocStats, Allocation, Allocator};
pub use blocks::BlockRef;
pub use extent::{Extent, PAGE_UNITS, UNIT_BYTES};
pub use extent_map::{ClaimError, ExtentMap};
pub use rebuild::RebuildError;
