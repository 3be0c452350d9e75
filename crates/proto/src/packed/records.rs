//! [`Packed`]: fixed records, stored consecutively without separators and without a count.

use std::marker::PhantomData;

use crate::layout::FixedRecord;
use crate::packed::PackedError;

/// Array of records of one type, checked by [`Packed::decode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Packed<'a, T> {
    bytes: &'a [u8],
    records: PhantomData<T>,
}

impl<'a, T: FixedRecord> Packed<'a, T> {
    /// Creates a view. Fails if the length or a record is invalid, or if there are more than `max` records; the
    /// number is checked first.
    pub fn decode(bytes: &'a [u8], max: usize) -> Result<Packed<'a, T>, PackedError> {
        let left = bytes.len() % T::BYTES;
        let count = bytes.len() / T::BYTES;
        if count > max {
            return Err(PackedError::TooMany { found: count, max });
        }
        if left != 0 {
            return Err(PackedError::TrailingBytes { left });
        }
        for (index, record) in bytes.chunks_exact(T::BYTES).enumerate() {
            T::decode(record).map_err(|source| PackedError::Record { index, source })?;
        }
        Ok(Packed { bytes, records: PhantomData })
    }

    /// Returns the encoded form.
    pub fn as_encoded(&self) -> &'a [u8] {
        self.bytes
    }

    /// Returns the number of records.
    pub fn len(&self) -> usize {
        self.bytes.len() / T::BYTES
    }

    /// Returns whether there are no records.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Returns the record at `index`.
    pub fn get(&self, index: usize) -> Option<T> {
        let start = index.checked_mul(T::BYTES)?;
        let record = self.bytes.get(start..start.checked_add(T::BYTES)?)?;
        Some(decode_checked(record))
    }

    /// Returns `len` records from `start` on.
    pub fn range(&self, start: usize, len: usize) -> Option<Packed<'a, T>> {
        let end = start.checked_add(len)?.checked_mul(T::BYTES)?;
        let bytes = self.bytes.get(start.checked_mul(T::BYTES)?..end)?;
        Some(Packed { bytes, records: PhantomData })
    }

    /// Iterates over the records in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = T> + use<'a, T> {
        self.bytes.chunks_exact(T::BYTES).map(decode_checked)
    }
}

fn decode_checked<T: FixedRecord>(record: &[u8]) -> T {
    T::decode(record).expect("checked by Packed::decode")
}

/// Builder of a [`Packed`] array.
#[derive(Clone, Debug)]
pub struct PackedBuilder<T> {
    bytes: Vec<u8>,
    records: PhantomData<T>,
}

impl<T: FixedRecord> Default for PackedBuilder<T> {
    fn default() -> Self {
        PackedBuilder { bytes: vec![], records: PhantomData }
    }
}

impl<T: FixedRecord> PackedBuilder<T> {
    /// Creates a builder with capacity for `records` records.
    pub fn with_capacity(records: usize) -> PackedBuilder<T> {
        PackedBuilder { bytes: Vec::with_capacity(records * T::BYTES), records: PhantomData }
    }

    /// Returns the number of records.
    pub fn len(&self) -> usize {
        self.bytes.len() / T::BYTES
    }

    /// Returns whether there are no records.
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// Appends a record.
    ///
    /// # Panics
    /// If the record is not valid.
    pub fn push(&mut self, record: &T) {
        record.encode(&mut self.bytes);
    }

    /// Returns the encoded form.
    pub fn finish(self) -> Vec<u8> {
        self.bytes
    }
}

impl<T: FixedRecord> Extend<T> for PackedBuilder<T> {
    fn extend<I: IntoIterator<Item = T>>(&mut self, records: I) {
        records.into_iter().for_each(|record| self.push(&record));
    }
}

impl<T: FixedRecord> FromIterator<T> for PackedBuilder<T> {
    fn from_iter<I: IntoIterator<Item = T>>(records: I) -> Self {
        let mut builder = PackedBuilder::default();
        builder.extend(records);
        builder
    }
}
