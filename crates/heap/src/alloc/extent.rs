//! shim
pub use moontide_types::Extent;
pub use moontide_types::bounds::UNIT_BYTES;
pub const PAGE_UNITS: u32 = 8;
