//! [`DevicePart`]: bytes of a rank's own region in a [`DeviceWorld`], by offsets of their own.
//!
//! A node has one for each of its segments whose records' bytes are a device's. It reads them for peers that are not ranks;
//! nobody writes through it.

use std::sync::Arc;

use super::error::DeviceError;
use super::world::DeviceWorld;

/// A part of a rank's own region.
#[derive(Clone, Debug)]
pub struct DevicePart {
    world: Arc<DeviceWorld>,
    offset: u64,
    len: u64,
}

impl DevicePart {
    /// `len` bytes of this rank's region from `offset` on.
    ///
    /// # Panics
    /// If they reach beyond the region's end.
    pub fn new(world: Arc<DeviceWorld>, offset: u64, len: u64) -> DevicePart {
        let (end, all) = (offset.checked_add(len), world.region(world.rank()).len());
        assert!(end.is_some_and(|end| end <= all), "{len} bytes at {offset} are beyond a region of {all}");
        DevicePart { world, offset, len }
    }

    /// How long it is.
    #[expect(clippy::len_without_is_empty, reason = "a segment is never empty")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Copies bytes out of it.
    ///
    /// # Panics
    /// If they reach beyond its end.
    pub(crate) fn read(&self, offset: u64, into: &mut [u8]) -> Result<(), DeviceError> {
        let end = offset.checked_add(into.len() as u64);
        assert!(end.is_some_and(|end| end <= self.len), "bytes of this part");
        self.world.region(self.world.rank()).read(self.offset + offset, into)
    }
}
