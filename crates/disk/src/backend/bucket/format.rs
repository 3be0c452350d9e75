//! Footer and tail: the bytes of a bucket after its records.
//!
//! ```text
//!  0                                footer_offset                                    + footer_len   + 4096
//!  ├─ record 0 ─┼─ record 1 ─┼─ … ──┼─ directory: 32 B per record ─┼─ copies ─┤ zeros ┼─── tail ─────┤
//!
//!  directory entry:   offset 8 │ len 8 │ copy_offset 4 │ copy_len 4 │ zeros 4 │ CRC-32C 4
//!  copy of preamble:  header 128 │ tenant+key │ attributes
//!  tail:              magic 4 │ version 2 │ zeros 2 │ count 4 │ zeros 4 │ footer_offset 8 │ footer_len 8 │ zeros … │
//!                     CRC-32C 4
//! ```
//!
//! With the footer, one or two reads return everything that is in a bucket, instead of one read per record. It is only
//! a copy: the records contain the same data, and are adjacent from the first byte on. So corruption of the footer
//! costs time, but no record: for a bad entry or copy the record itself is read.
//!
//! The CRC of a directory entry also covers its index and the copy that it points to, so that neither an entry at the
//! wrong position nor the copy of another record is accepted.

use moontide_rt::mutation_enabled;
use moontide_types::record::{HEADER_BYTES, Header};

use crate::backend::RecordSource;
use crate::buffer::BLOCK_BYTES;
use crate::mutation::Mutation;
use crate::record::{DiskLayout, PlacedRecord, decode_header, decode_trailer, disk_header};

const MAGIC: [u8; 4] = *b"MTBK";
const VERSION: u16 = 1;
const BLOCK: u64 = BLOCK_BYTES as u64;

/// Length of a directory entry.
const ENTRY_BYTES: usize = 32;

/// The last block of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FooterTail {
    /// Number of records.
    pub(crate) count: u32,
    /// Offset of the footer, and end of the records.
    pub(crate) footer_offset: u64,
    /// Length of the footer, whole blocks.
    pub(crate) footer_len: u64,
}

impl FooterTail {
    pub(crate) fn encode(&self) -> [u8; BLOCK_BYTES] {
        let mut block = [0; BLOCK_BYTES];
        block[..4].copy_from_slice(&MAGIC);
        block[4..6].copy_from_slice(&VERSION.to_le_bytes());
        block[8..12].copy_from_slice(&self.count.to_le_bytes());
        block[16..24].copy_from_slice(&self.footer_offset.to_le_bytes());
        block[24..32].copy_from_slice(&self.footer_len.to_le_bytes());
        let crc = crc32c::crc32c(&block[..BLOCK_BYTES - 4]);
        block[BLOCK_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
        block
    }

    /// Decodes the tail of a file of length `file_len`, if its last block is a valid one. Accepts any bytes.
    pub(crate) fn decode(block: &[u8; BLOCK_BYTES], file_len: u64) -> Option<FooterTail> {
        let (body, crc) = block.split_last_chunk::<4>()?;
        let valid = block[..4] == MAGIC
            && block[4..6] == VERSION.to_le_bytes()
            && crc32c::crc32c(body) == u32::from_le_bytes(*crc);
        let tail = FooterTail {
            count: u32_at(block, 8),
            footer_offset: u64_at(block, 16),
            footer_len: u64_at(block, 24),
        };
        // The last inequality limits the allocation for the footer to the size on the disk.
        let fits = tail.footer_offset.is_multiple_of(BLOCK)
            && tail.footer_len.is_multiple_of(BLOCK)
            && tail.footer_offset.checked_add(tail.footer_len).and_then(|end| end.checked_add(BLOCK))
                == Some(file_len)
            && u64::from(tail.count) * ENTRY_BYTES as u64 <= tail.footer_len;
        (valid && fits).then_some(tail)
    }
}

/// Returns the bytes that a record takes in the footer.
pub(crate) fn footer_share(header: &Header) -> u64 {
    ENTRY_BYTES as u64 + copy_len(header)
}

/// Returns the length of a file with records of `records_len` bytes and these shares of the footer.
pub(crate) fn file_len(records_len: u64, footer_shares: u64) -> u64 {
    records_len + footer_shares.next_multiple_of(BLOCK) + BLOCK
}

fn copy_len(header: &Header) -> u64 {
    HEADER_BYTES as u64 + u64::from(header.key_len) + u64::from(header.attributes_len)
}

/// Encodes footer and tail for these records.
pub(crate) fn encode_footer(records: &[(RecordSource<'_>, PlacedRecord)], footer_offset: u64) -> Vec<u8> {
    let (mut footer, mut copies) = (vec![], vec![]);
    for (index, (source, placed)) in records.iter().enumerate() {
        let copy_offset = records.len() * ENTRY_BYTES + copies.len();
        let start = copies.len();
        copies.extend_from_slice(&disk_header(source.header).encode());
        copies.extend_from_slice(source.key);
        copies.extend_from_slice(source.attributes);
        let copy = &copies[start..];
        let mut entry = [0; ENTRY_BYTES];
        entry[..8].copy_from_slice(&placed.offset.to_le_bytes());
        entry[8..16].copy_from_slice(&placed.layout.len.to_le_bytes());
        // A bucket has at most some millions of records with preambles of at most 8 KiB.
        entry[16..20].copy_from_slice(&u32::try_from(copy_offset).expect("a bounded footer").to_le_bytes());
        entry[20..24].copy_from_slice(&(copy.len() as u32).to_le_bytes());
        let crc = entry_crc(index as u64, &entry, copy);
        entry[28..].copy_from_slice(&crc.to_le_bytes());
        footer.extend_from_slice(&entry);
    }
    footer.extend_from_slice(&copies);
    footer.resize(footer.len().next_multiple_of(BLOCK_BYTES), 0);
    let tail = FooterTail { count: records.len() as u32, footer_offset, footer_len: footer.len() as u64 };
    footer.extend_from_slice(&tail.encode());
    footer
}

fn entry_crc(index: u64, entry: &[u8; ENTRY_BYTES], copy: &[u8]) -> u32 {
    let crc = crc32c::crc32c_append(crc32c::crc32c(&index.to_le_bytes()), &entry[..28]);
    crc32c::crc32c_append(crc, copy)
}

/// Sets the CRC of an entry, for tests of the checks after that of the CRC.
#[cfg(any(test, feature = "testing"))]
pub(crate) fn set_entry_crc(footer: &mut [u8], index: u32) {
    let Some(entry) = footer.as_chunks::<ENTRY_BYTES>().0.get(index as usize) else { return };
    let (copy_offset, copy_len) = (u32_at(entry, 16) as usize, u32_at(entry, 20) as usize);
    let Some(copy) = footer.get(copy_offset..).and_then(|copies| copies.get(..copy_len)) else { return };
    let crc = entry_crc(index.into(), entry, copy);
    footer[index as usize * ENTRY_BYTES + 28..][..4].copy_from_slice(&crc.to_le_bytes());
}

/// A record according to the footer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FooterEntry<'a> {
    /// Offset of the record.
    pub(crate) offset: u64,
    /// Header as on disk.
    pub(crate) header: Header,
    /// Layout of the record.
    pub(crate) layout: DiskLayout,
    /// Tenant and key as stored.
    pub(crate) key: &'a [u8],
    /// Attributes as stored.
    pub(crate) attributes: &'a [u8],
}

/// Decodes the footer entry with this index, if it is valid. Accepts any bytes.
pub(crate) fn decode_entry<'a>(footer: &'a [u8], tail: &FooterTail, index: u32) -> Option<FooterEntry<'a>> {
    let entries = footer.as_chunks::<ENTRY_BYTES>().0.get(..tail.count as usize)?;
    let entry = entries.get(index as usize)?;
    let (offset, len) = (u64_at(entry, 0), u64_at(entry, 8));
    let (copy_offset, copy_len) = (u32_at(entry, 16) as usize, u32_at(entry, 20) as usize);
    let copy = footer.get(copy_offset..)?.get(..copy_len)?;
    if entry_crc(index.into(), entry, copy) != u32_at(entry, 28)
        && !mutation_enabled(Mutation::FooterBelieved)
    {
        return None;
    }
    let (header, layout) = decode_header(copy).ok()?;
    let (key, attributes) = copy.get(HEADER_BYTES..)?.split_at_checked(header.key_len as usize)?;
    let valid = attributes.len() == header.attributes_len as usize
        && layout.len == len
        && offset.is_multiple_of(BLOCK)
        && offset.checked_add(len).is_some_and(|end| end <= tail.footer_offset)
        && decode_trailer(&header, key, attributes).is_ok();
    valid.then_some(FooterEntry { offset, header, layout, key, attributes })
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::samples::{SampleRecord, fill};
    use moontide_rt::SplitMix64;

    fn footer(samples: &[SampleRecord]) -> (Vec<u8>, FooterTail, u64) {
        let (mut offset, mut placed) = (0, vec![]);
        for sample in samples {
            let layout = DiskLayout::of(&sample.header);
            placed.push((sample.source(), PlacedRecord { offset, layout }));
            offset += layout.len;
        }
        let shares = samples.iter().map(|sample| footer_share(&sample.header)).sum();
        let footer = encode_footer(&placed, offset);
        let len = offset + footer.len() as u64;
        assert_eq!(len, file_len(offset, shares));
        let tail = FooterTail::decode(footer.last_chunk().unwrap(), len).unwrap();
        (footer, tail, len)
    }

    #[test]
    fn footer_entries_round_trip() {
        let samples: Vec<SampleRecord> =
            (0..100).map(|n| SampleRecord::new(n, 2, n as usize * 500)).collect();
        let (footer, tail, len) = footer(&samples);
        assert_eq!(tail.count, 100);
        let mut offset = 0;
        for (sample, index) in samples.iter().zip(0..) {
            let entry = decode_entry(&footer, &tail, index).unwrap();
            assert_eq!((entry.offset, entry.key), (offset, sample.key()));
            assert_eq!(entry.header.root, sample.header.root);
            offset += entry.layout.len;
        }
        assert!(decode_entry(&footer, &tail, 100).is_none());
        assert_eq!(FooterTail::decode(footer.last_chunk().unwrap(), len + 4096), None, "another file length");
    }

    #[test]
    fn flipped_bit_loses_at_most_one_entry_and_alters_none() {
        let samples: Vec<SampleRecord> = (0..6).map(|n| SampleRecord::new(n, 2, 3000)).collect();
        let (mut footer, tail, len) = footer(&samples);
        let decode = |footer: &[u8]| -> Vec<Option<(u64, Header)>> {
            (0..6).map(|index| decode_entry(footer, &tail, index).map(|t| (t.offset, t.header))).collect()
        };
        let expected = decode(&footer);
        for bit in 0..footer.len() * 8 {
            footer[bit / 8] ^= 1 << (bit % 8);
            let found = decode(&footer);
            let lost = found.iter().filter(|entry| entry.is_none()).count();
            assert!(lost <= 1, "bit {bit} loses {lost} entries");
            assert!(
                found.iter().zip(&expected).all(|(a, b)| a.is_none() || a == b),
                "bit {bit} changes an entry"
            );
            let tail_corrupt = FooterTail::decode(footer.last_chunk().unwrap(), len).is_none();
            assert_eq!(tail_corrupt, bit / 8 >= footer.len() - 4096, "bit {bit}");
            footer[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn arbitrary_footers_are_refused() {
        let seed = 4;
        let mut rng = SplitMix64::new(seed);
        for round in 0..3000 {
            let mut bytes = vec![0; 4096 * (1 + rng.below(3) as usize)];
            fill(rng.next_u64(), &mut bytes);
            let tail = FooterTail {
                count: rng.below(200) as u32,
                footer_offset: 4096 * rng.below(1000),
                footer_len: bytes.len() as u64,
            };
            for index in 0..tail.count {
                assert!(decode_entry(&bytes, &tail, index).is_none(), "seed {seed}, round {round}");
            }
            assert_eq!(FooterTail::decode(bytes.last_chunk().unwrap(), 1 << 20), None);
        }
    }
}
