//! The bytes of a bucket behind its records: the footer and the tail.
//!
//! ```text
//!  0                                footer_offset                                    + footer_len   + 4096
//!  ├─ record 0 ─┼─ record 1 ─┼─ … ──┼─ directory: 32 B per record ─┼─ copies ─┤ zeros ┼─── tail ─────┤
//!
//!  directory entry:   offset 8 │ len 8 │ copy_offset 4 │ copy_len 4 │ zeros 4 │ CRC-32C 4
//!  copy of a front:   header 128 │ tenant+key │ attributes
//!  tail:              magic 4 │ version 2 │ zeros 2 │ count 4 │ zeros 4 │ footer_offset 8 │ footer_len 8 │ zeros … │ CRC-32C 4
//! ```
//!
//! With the footer one or two reads tell all that is in a bucket, instead of one per record. It is only a copy: the
//! records say the same, and stand one after the other from the first byte on. So whatever is damaged here costs time,
//! but no record: an entry or copy that is bad is looked up in the record itself.
//!
//! A directory entry's CRC covers its index too, and also the copy that it points to, so that neither an entry in
//! another's place nor the copy of another record is believed.

use moontide_types::record::{HEADER_BYTES, Header};

use crate::backend::Source;
use crate::buffer::BLOCK_BYTES;
use crate::planted::{Bug, planted};
use crate::record::{DiskLayout, Placed, decode_header, decode_trailer, disk_header};

const MAGIC: [u8; 4] = *b"MTBK";
const VERSION: u16 = 1;
const BLOCK: u64 = BLOCK_BYTES as u64;

/// Length of a directory entry.
const ENTRY_BYTES: usize = 32;

/// The last block of a bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Tail {
    /// How many records there are.
    pub(crate) count: u32,
    /// Where the footer starts, and the records end.
    pub(crate) footer_offset: u64,
    /// Length of the footer: whole blocks.
    pub(crate) footer_len: u64,
}

impl Tail {
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

    /// The tail of a file of this length, if its last block is one. For any bytes.
    pub(crate) fn decode(block: &[u8; BLOCK_BYTES], file_len: u64) -> Option<Tail> {
        let (body, crc) = block.split_last_chunk::<4>()?;
        let sound = block[..4] == MAGIC
            && block[4..6] == VERSION.to_le_bytes()
            && crc32c::crc32c(body) == u32::from_le_bytes(*crc);
        let tail =
            Tail { count: u32_at(block, 8), footer_offset: u64_at(block, 16), footer_len: u64_at(block, 24) };
        // The last inequality bounds what is allocated for the footer by what is on the disk.
        let fits = tail.footer_offset.is_multiple_of(BLOCK)
            && tail.footer_len.is_multiple_of(BLOCK)
            && tail.footer_offset.checked_add(tail.footer_len).and_then(|end| end.checked_add(BLOCK))
                == Some(file_len)
            && u64::from(tail.count) * ENTRY_BYTES as u64 <= tail.footer_len;
        (sound && fits).then_some(tail)
    }
}

/// Bytes that a record takes in the footer.
pub(crate) fn footer_share(header: &Header) -> u64 {
    ENTRY_BYTES as u64 + copy_len(header)
}

/// Length of a file with records of `records_len` bytes and these shares of the footer.
pub(crate) fn file_len(records_len: u64, footer_shares: u64) -> u64 {
    records_len + footer_shares.next_multiple_of(BLOCK) + BLOCK
}

fn copy_len(header: &Header) -> u64 {
    HEADER_BYTES as u64 + u64::from(header.key_len) + u64::from(header.attributes_len)
}

/// Footer and tail behind these records.
pub(crate) fn encode_footer(records: &[(Source<'_>, Placed)], footer_offset: u64) -> Vec<u8> {
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
        // A bucket has at most some millions of records with fronts of at most 8 KiB.
        entry[16..20].copy_from_slice(&u32::try_from(copy_offset).expect("a bounded footer").to_le_bytes());
        entry[20..24].copy_from_slice(&(copy.len() as u32).to_le_bytes());
        let crc = entry_crc(index as u64, &entry, copy);
        entry[28..].copy_from_slice(&crc.to_le_bytes());
        footer.extend_from_slice(&entry);
    }
    footer.extend_from_slice(&copies);
    footer.resize(footer.len().next_multiple_of(BLOCK_BYTES), 0);
    let tail = Tail { count: records.len() as u32, footer_offset, footer_len: footer.len() as u64 };
    footer.extend_from_slice(&tail.encode());
    footer
}

fn entry_crc(index: u64, entry: &[u8; ENTRY_BYTES], copy: &[u8]) -> u32 {
    let crc = crc32c::crc32c_append(crc32c::crc32c(&index.to_le_bytes()), &entry[..28]);
    crc32c::crc32c_append(crc, copy)
}

/// Gives an entry the CRC that it would have if it were right, for tests of what comes behind that check.
pub(crate) fn seal_entry(footer: &mut [u8], index: u32) {
    let Some(entry) = footer.as_chunks::<ENTRY_BYTES>().0.get(index as usize) else { return };
    let (copy_offset, copy_len) = (u32_at(entry, 16) as usize, u32_at(entry, 20) as usize);
    let Some(copy) = footer.get(copy_offset..).and_then(|copies| copies.get(..copy_len)) else { return };
    let crc = entry_crc(index.into(), entry, copy);
    footer[index as usize * ENTRY_BYTES + 28..][..4].copy_from_slice(&crc.to_le_bytes());
}

/// A record as the footer tells of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Told<'a> {
    /// Its first byte.
    pub(crate) offset: u64,
    /// Its header.
    pub(crate) header: Header,
    /// Where its parts stand.
    pub(crate) layout: DiskLayout,
    /// Tenant and key, as they are stored.
    pub(crate) key: &'a [u8],
    /// Attributes, as they are stored.
    pub(crate) attributes: &'a [u8],
}

/// What a footer says of the record with this index, if that can be believed. For any bytes.
pub(crate) fn decode_entry<'a>(footer: &'a [u8], tail: &Tail, index: u32) -> Option<Told<'a>> {
    let entries = footer.as_chunks::<ENTRY_BYTES>().0.get(..tail.count as usize)?;
    let entry = entries.get(index as usize)?;
    let (offset, len) = (u64_at(entry, 0), u64_at(entry, 8));
    let (copy_offset, copy_len) = (u32_at(entry, 16) as usize, u32_at(entry, 20) as usize);
    let copy = footer.get(copy_offset..)?.get(..copy_len)?;
    if entry_crc(index.into(), entry, copy) != u32_at(entry, 28) && !planted(Bug::FooterBelieved) {
        return None;
    }
    let (header, layout) = decode_header(copy).ok()?;
    let (key, attributes) = copy.get(HEADER_BYTES..)?.split_at_checked(header.key_len as usize)?;
    let sound = attributes.len() == header.attributes_len as usize
        && layout.len == len
        && offset.is_multiple_of(BLOCK)
        && offset.checked_add(len).is_some_and(|end| end <= tail.footer_offset)
        && decode_trailer(&header, key, attributes).is_ok();
    sound.then_some(Told { offset, header, layout, key, attributes })
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
    use crate::samples::{Random, Sample, fill};

    fn footer(samples: &[Sample]) -> (Vec<u8>, Tail, u64) {
        let (mut offset, mut placed) = (0, vec![]);
        for sample in samples {
            let layout = DiskLayout::of(&sample.header);
            placed.push((sample.source(), Placed { offset, layout }));
            offset += layout.len;
        }
        let shares = samples.iter().map(|sample| footer_share(&sample.header)).sum();
        let footer = encode_footer(&placed, offset);
        let len = offset + footer.len() as u64;
        assert_eq!(len, file_len(offset, shares));
        let tail = Tail::decode(footer.last_chunk().unwrap(), len).unwrap();
        (footer, tail, len)
    }

    #[test]
    fn a_footer_tells_what_was_written() {
        let samples: Vec<Sample> = (0..100).map(|n| Sample::new(n, 2, n as usize * 500)).collect();
        let (footer, tail, len) = footer(&samples);
        assert_eq!(tail.count, 100);
        let mut offset = 0;
        for (sample, index) in samples.iter().zip(0..) {
            let told = decode_entry(&footer, &tail, index).unwrap();
            assert_eq!((told.offset, told.key), (offset, sample.key()));
            assert_eq!(told.header.root, sample.header.root);
            offset += told.layout.len;
        }
        assert!(decode_entry(&footer, &tail, 100).is_none());
        assert_eq!(Tail::decode(footer.last_chunk().unwrap(), len + 4096), None, "a file of another length");
    }

    #[test]
    fn a_flipped_bit_spoils_one_entry_and_never_changes_one() {
        let samples: Vec<Sample> = (0..6).map(|n| Sample::new(n, 2, 3000)).collect();
        let (mut footer, tail, len) = footer(&samples);
        let told = |footer: &[u8]| -> Vec<Option<(u64, Header)>> {
            (0..6).map(|index| decode_entry(footer, &tail, index).map(|t| (t.offset, t.header))).collect()
        };
        let good = told(&footer);
        for bit in 0..footer.len() * 8 {
            footer[bit / 8] ^= 1 << (bit % 8);
            let seen = told(&footer);
            let lost = seen.iter().filter(|entry| entry.is_none()).count();
            assert!(lost <= 1, "bit {bit} spoils {lost}");
            assert!(seen.iter().zip(&good).all(|(a, b)| a.is_none() || a == b), "bit {bit} changes one");
            let tail_damaged = Tail::decode(footer.last_chunk().unwrap(), len).is_none();
            assert_eq!(tail_damaged, bit / 8 >= footer.len() - 4096, "bit {bit}");
            footer[bit / 8] ^= 1 << (bit % 8);
        }
    }

    #[test]
    fn arbitrary_footers_are_refused() {
        let seed = 4;
        let mut random = Random(seed);
        for round in 0..3000 {
            let mut bytes = vec![0; 4096 * (1 + random.below(3) as usize)];
            fill(random.next(), &mut bytes);
            let tail = Tail {
                count: random.below(200) as u32,
                footer_offset: 4096 * random.below(1000),
                footer_len: bytes.len() as u64,
            };
            for index in 0..tail.count {
                assert!(decode_entry(&bytes, &tail, index).is_none(), "seed {seed}, round {round}");
            }
            assert_eq!(Tail::decode(bytes.last_chunk().unwrap(), 1 << 20), None);
        }
    }
}
