//! [`DeviceMemory`]: memory of a device that holds the bytes of records, and [`DeviceSlice`]: a range of it, with
//! offsets from its start.
//!
//! A node has one slice for each of its device segments. It reads their bytes for peers that cannot access the
//! device's memory, and never writes through it. This crate knows no driver; the implementations are elsewhere.

use std::fmt::Debug;
use std::io;
use std::sync::Arc;

/// Memory of a device that this process uses. It remains valid during the life of the value.
pub trait DeviceMemory: Debug + Send + Sync {
    /// Returns the length in bytes.
    fn bytes(&self) -> u64;

    /// Copies bytes from the device's memory to host memory.
    ///
    /// # Panics
    /// If they exceed the memory.
    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()>;
}

/// A range of a device's memory. Keeps the memory alive.
#[derive(Clone, Debug)]
pub struct DeviceSlice {
    memory: Arc<dyn DeviceMemory>,
    offset: u64,
    len: u64,
}

impl DeviceSlice {
    /// Takes `len` bytes at `offset` of the memory.
    ///
    /// # Panics
    /// If they exceed the memory.
    pub fn new(memory: Arc<impl DeviceMemory + 'static>, offset: u64, len: u64) -> DeviceSlice {
        let all = memory.bytes();
        DeviceSlice { memory, offset: 0, len: all }.subslice(offset, len)
    }

    /// Takes `len` bytes at `offset` of this slice.
    ///
    /// # Panics
    /// If they exceed the slice.
    pub fn subslice(&self, offset: u64, len: u64) -> DeviceSlice {
        let end = offset.checked_add(len);
        assert!(
            end.is_some_and(|end| end <= self.len),
            "{len} bytes at {offset} exceed device memory of {} bytes",
            self.len
        );
        DeviceSlice { memory: Arc::clone(&self.memory), offset: self.offset + offset, len }
    }

    /// Returns the length in bytes.
    #[expect(clippy::len_without_is_empty, reason = "a segment is never empty")]
    pub fn len(&self) -> u64 {
        self.len
    }

    /// Copies bytes from the slice to host memory.
    ///
    /// # Panics
    /// If they exceed the slice.
    pub(crate) fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let end = offset.checked_add(into.len() as u64);
        assert!(end.is_some_and(|end| end <= self.len), "range exceeds the device slice");
        self.memory.read(self.offset + offset, into)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug)]
    struct Counting;

    impl DeviceMemory for Counting {
        fn bytes(&self) -> u64 {
            100
        }

        fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
            (offset as u8..).zip(into).for_each(|(value, byte)| *byte = value);
            Ok(())
        }
    }

    #[test]
    fn subslice_offsets_are_relative_to_its_parent() {
        let slice = DeviceSlice::new(Arc::new(Counting), 10, 50);
        let part = slice.subslice(20, 30);
        assert_eq!((slice.len(), part.len()), (50, 30));
        let mut bytes = [0; 3];
        part.read(27, &mut bytes).unwrap();
        assert_eq!(bytes, [57, 58, 59]);
    }

    #[test]
    #[should_panic(expected = "exceed device memory of 50 bytes")]
    fn subslice_beyond_its_parent_panics() {
        DeviceSlice::new(Arc::new(Counting), 10, 50).subslice(21, 30);
    }
}
