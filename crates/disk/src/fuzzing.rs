//! Fuzz targets for all data read from disk, with arbitrary bytes: no decoder may panic, and accepted data must be
//! valid.
//!
//! Each function uses its input unchanged, and again with correct checksums, which random changes never produce.

use moontide_types::record::{HEADER_BYTES, Header, WORD_OFFSET, trailer_crc};
use moontide_types::{Epoch, ObjectId};

use crate::backend::{footer, tombstones};
use crate::buffer::BLOCK_BYTES;
use crate::record::{DiskLayout, PlacedRecord, decode_preamble, verify_record};
use crate::samples::{SampleRecord, id};

/// The preamble of a record, and the bytes after it as its payload.
pub fn front(data: &[u8]) {
    check_preamble(data);
    let mut fixed = data.to_vec();
    if fix_header_crc(&mut fixed).is_none() {
        return;
    }
    check_preamble(&fixed);
    let Ok(header) = Header::decode(fixed.first_chunk().expect("a header")) else { return };
    let digests = 8 * header.stripe_len.div_ceil(moontide_types::limits::PAGE_BYTES) as usize;
    let Some(rest) = fixed.get(HEADER_BYTES + digests..) else { return };
    let (key_len, attributes_len) = (header.key_len as usize, header.attributes_len as usize);
    let Some((key, rest)) = rest.split_at_checked(key_len) else { return };
    let Some(attributes) = rest.get(..attributes_len) else { return };
    let crc = trailer_crc(key, attributes);
    fixed[92..96].copy_from_slice(&crc.to_le_bytes());
    _ = fix_header_crc(&mut fixed);
    check_preamble(&fixed);
}

/// Sets the CRC of a header.
pub(crate) fn fix_header_crc(bytes: &mut [u8]) -> Option<()> {
    let header = bytes.first_chunk_mut::<HEADER_BYTES>()?;
    let state = header[WORD_OFFSET];
    header[WORD_OFFSET] &= !3;
    let crc = crc32c::crc32c(&header[..HEADER_BYTES - 4]);
    header[WORD_OFFSET] = state;
    header[HEADER_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
    Some(())
}

fn check_preamble(bytes: &[u8]) {
    _ = verify_record(bytes);
    let Ok(preamble) = decode_preamble(bytes) else { return };
    assert_eq!(preamble.header.encode()[..], bytes[..HEADER_BYTES]);
    let used =
        HEADER_BYTES + preamble.digests.as_bytes().len() + preamble.key.len() + preamble.attributes.len();
    let DiskLayout { preamble_len, len, preamble_read_len } = preamble.layout;
    assert!(used as u64 <= preamble_len && preamble_len <= preamble_read_len && preamble_read_len <= len);
    assert!(preamble_len + preamble.header.stripe_len <= len && len.is_multiple_of(BLOCK_BYTES as u64));
}

/// A bucket: number of records (four bytes), footer, and last block.
pub fn bucket_footer(data: &[u8]) {
    let Some((count, bytes)) = data.split_first_chunk() else { return };
    let mut block = [0; BLOCK_BYTES];
    let len = bytes.len().min(BLOCK_BYTES);
    block[..len].copy_from_slice(&bytes[..len]);
    // The file has the length that the tail requires: any other length is refused at once.
    let number = |at: usize| u64::from_le_bytes(*block[at..].first_chunk().expect("8 bytes"));
    let file_len = number(16).wrapping_add(number(24)).wrapping_add(BLOCK_BYTES as u64);
    _ = footer::FooterTail::decode(&block, file_len);
    fix_block_crc(&mut block);
    if let Some(tail) = footer::FooterTail::decode(&block, file_len) {
        assert!(tail.footer_offset + tail.footer_len < file_len);
    }

    let mut bytes = bytes.to_vec();
    bytes.resize(bytes.len().next_multiple_of(BLOCK_BYTES), 0);
    let count = u32::from_le_bytes(*count).min(bytes.len() as u32 / 32);
    let tail = footer::FooterTail { count, footer_offset: 1 << 40, footer_len: bytes.len() as u64 };
    check_entries(&bytes, &tail);
    (0..count).for_each(|index| footer::set_entry_crc(&mut bytes, index));
    check_entries(&bytes, &tail);
}

fn check_entries(bytes: &[u8], tail: &footer::FooterTail) {
    for entry in (0..tail.count).filter_map(|index| footer::decode_entry(bytes, tail, index)) {
        assert!(entry.offset + entry.layout.len <= tail.footer_offset);
        assert_eq!(entry.key.len(), entry.header.key_len as usize);
        assert_eq!(DiskLayout::of(&entry.header), entry.layout);
    }
    assert!(footer::decode_entry(bytes, tail, tail.count).is_none());
}

/// A block of the tombstone log.
pub fn removals(data: &[u8]) {
    let mut block = [0; BLOCK_BYTES];
    let len = data.len().min(BLOCK_BYTES);
    block[..len].copy_from_slice(&data[..len]);
    check_removals(&block);
    fix_block_crc(&mut block);
    check_removals(&block);
}

fn check_removals(block: &[u8; BLOCK_BYTES]) {
    let Some(entries) = tombstones::decode(block) else { return };
    let entries: Vec<(ObjectId, Epoch)> = entries.collect();
    if entries.is_empty() {
        return; // such a block is never written
    }
    let again = tombstones::encode(&entries);
    let block = again.first_chunk().expect("a block");
    let decoded = tombstones::decode(block).expect("decoded entries can be encoded");
    assert!(decoded.eq(entries));
}

fn fix_block_crc(block: &mut [u8; BLOCK_BYTES]) {
    let crc = crc32c::crc32c(&block[..BLOCK_BYTES - 4]);
    block[BLOCK_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
}

/// Valid inputs of [`front`], without trailing zeros.
pub fn front_seeds() -> Vec<Vec<u8>> {
    let samples = [
        SampleRecord::new(1, 1, 0),
        SampleRecord::new(2, 3, 100),
        SampleRecord::with_key(3, 1, 700, b"tenant's key", b"\x05\x00\x02\x00ab", 0),
        SampleRecord::new(4, 9, 600_000),
    ];
    samples.iter().map(|sample| trimmed(sample.encode(), 1500)).collect()
}

/// Valid inputs of [`bucket_footer`].
pub fn bucket_footer_seeds() -> Vec<Vec<u8>> {
    (1..6).map(|count| footer_seed(count, 300)).chain([tail_seed()]).collect()
}

fn footer_seed(count: u64, len: usize) -> Vec<u8> {
    let samples: Vec<SampleRecord> = (0..count).map(|number| SampleRecord::new(number, 1, len)).collect();
    let mut offset = 0;
    let mut placed = vec![];
    for sample in &samples {
        let layout = DiskLayout::of(&sample.header);
        placed.push((sample.source(), PlacedRecord { offset, layout }));
        offset += layout.len;
    }
    let mut footer = footer::encode_footer(&placed, offset);
    footer.truncate(footer.len() - BLOCK_BYTES);
    let mut seed = (count as u32).to_le_bytes().to_vec();
    seed.extend(trimmed(footer, 1800));
    seed
}

/// Start of a tail; the rest of the block is zeros and a CRC that [`bucket_footer`] sets.
fn tail_seed() -> Vec<u8> {
    let tail = footer::FooterTail { count: 1, footer_offset: 4096, footer_len: 4096 };
    let mut seed = 1u32.to_le_bytes().to_vec();
    seed.extend(trimmed(tail.encode().to_vec(), 64));
    seed
}

/// Valid inputs of [`removals`].
pub fn removals_seeds() -> Vec<Vec<u8>> {
    let entries =
        |count: u64| (0..count).map(|n| (id(n), Epoch::from_bits(n + 1).expect("small"))).collect::<Vec<_>>();
    [1, 2, 50].into_iter().map(|count| trimmed(tombstones::encode(&entries(count)).to_vec(), 1800)).collect()
}

/// Removes trailing zeros of a seed, and truncates it to the limit of a corpus.
fn trimmed(mut bytes: Vec<u8>, max: usize) -> Vec<u8> {
    bytes.truncate(max);
    let used = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    bytes.truncate(used);
    bytes
}
