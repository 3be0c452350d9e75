//! Everything that is read from a disk, under arbitrary bytes: none may panic, and what is accepted means something.
//!
//! Each function takes its input as it is, and again with the right checksums, which random changes never hit.

use moontide_types::record::{HEADER_BYTES, Header, WORD_OFFSET, trailer_crc};
use moontide_types::{Epoch, ObjectId};

use crate::backend::{footer, tombstones};
use crate::buffer::BLOCK_BYTES;
use crate::record::{DiskLayout, Placed, decode_front, verify_record};
use crate::samples::{Sample, id};

/// The front of a record, and what follows as its payload.
pub fn front(data: &[u8]) {
    check_front(data);
    let mut sealed = data.to_vec();
    if seal_header(&mut sealed).is_none() {
        return;
    }
    check_front(&sealed);
    let Ok(header) = Header::decode(sealed.first_chunk().expect("a header")) else { return };
    let digests = 8 * header.stripe_len.div_ceil(moontide_types::bounds::PAGE_BYTES) as usize;
    let Some(rest) = sealed.get(HEADER_BYTES + digests..) else { return };
    let (key_len, attributes_len) = (header.key_len as usize, header.attributes_len as usize);
    let Some((key, rest)) = rest.split_at_checked(key_len) else { return };
    let Some(attributes) = rest.get(..attributes_len) else { return };
    let crc = trailer_crc(key, attributes);
    sealed[92..96].copy_from_slice(&crc.to_le_bytes());
    _ = seal_header(&mut sealed);
    check_front(&sealed);
}

/// Puts the right CRC into a header.
fn seal_header(bytes: &mut [u8]) -> Option<()> {
    let header = bytes.first_chunk_mut::<HEADER_BYTES>()?;
    let state = header[WORD_OFFSET];
    header[WORD_OFFSET] &= !3;
    let crc = crc32c::crc32c(&header[..HEADER_BYTES - 4]);
    header[WORD_OFFSET] = state;
    header[HEADER_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
    Some(())
}

fn check_front(bytes: &[u8]) {
    _ = verify_record(bytes);
    let Ok(front) = decode_front(bytes) else { return };
    assert_eq!(front.header.encode()[..], bytes[..HEADER_BYTES]);
    let used = HEADER_BYTES + front.digests.as_bytes().len() + front.key.len() + front.attributes.len();
    let DiskLayout { front_len, len, head_len } = front.layout;
    assert!(used as u64 <= front_len && front_len <= head_len && head_len <= len);
    assert!(front_len + front.header.stripe_len <= len && len.is_multiple_of(BLOCK_BYTES as u64));
}

/// How many records a bucket has, in four bytes; its footer; and its last block.
pub fn bucket_footer(data: &[u8]) {
    let Some((count, bytes)) = data.split_first_chunk() else { return };
    let mut block = [0; BLOCK_BYTES];
    let len = bytes.len().min(BLOCK_BYTES);
    block[..len].copy_from_slice(&bytes[..len]);
    // The file is as long as the tail wants it to be: any other length is refused at once.
    let number = |at: usize| u64::from_le_bytes(*block[at..].first_chunk().expect("8 bytes"));
    let file_len = number(16).wrapping_add(number(24)).wrapping_add(BLOCK_BYTES as u64);
    _ = footer::Tail::decode(&block, file_len);
    seal_block(&mut block);
    if let Some(tail) = footer::Tail::decode(&block, file_len) {
        assert!(tail.footer_offset + tail.footer_len < file_len);
    }

    let mut bytes = bytes.to_vec();
    bytes.resize(bytes.len().next_multiple_of(BLOCK_BYTES), 0);
    let count = u32::from_le_bytes(*count).min(bytes.len() as u32 / 32);
    let tail = footer::Tail { count, footer_offset: 1 << 40, footer_len: bytes.len() as u64 };
    check_entries(&bytes, &tail);
    (0..count).for_each(|index| footer::seal_entry(&mut bytes, index));
    check_entries(&bytes, &tail);
}

fn check_entries(bytes: &[u8], tail: &footer::Tail) {
    for told in (0..tail.count).filter_map(|index| footer::decode_entry(bytes, tail, index)) {
        assert!(told.offset + told.layout.len <= tail.footer_offset);
        assert_eq!(told.key.len(), told.header.key_len as usize);
        assert_eq!(DiskLayout::of(&told.header), told.layout);
    }
    assert!(footer::decode_entry(bytes, tail, tail.count).is_none());
}

/// A block of the log of removals.
pub fn removals(data: &[u8]) {
    let mut block = [0; BLOCK_BYTES];
    let len = data.len().min(BLOCK_BYTES);
    block[..len].copy_from_slice(&data[..len]);
    check_removals(&block);
    seal_block(&mut block);
    check_removals(&block);
}

fn check_removals(block: &[u8; BLOCK_BYTES]) {
    let Some(entries) = tombstones::decode(block) else { return };
    let entries: Vec<(ObjectId, Epoch)> = entries.collect();
    if entries.is_empty() {
        return; // nobody writes a block without any
    }
    let again = tombstones::encode(&entries);
    let block = again.first_chunk().expect("a block");
    let decoded = tombstones::decode(block).expect("what was decoded can be encoded");
    assert!(decoded.eq(entries));
}

fn seal_block(block: &mut [u8; BLOCK_BYTES]) {
    let crc = crc32c::crc32c(&block[..BLOCK_BYTES - 4]);
    block[BLOCK_BYTES - 4..].copy_from_slice(&crc.to_le_bytes());
}

/// Valid inputs of [`front`], without the zeros at their ends.
pub fn front_seeds() -> Vec<Vec<u8>> {
    let samples = [
        Sample::new(1, 1, 0),
        Sample::new(2, 3, 100),
        Sample::with_key(3, 1, 700, b"tenant's key", b"\x05\x00\x02\x00ab", 0),
        Sample::new(4, 9, 600_000),
    ];
    samples.iter().map(|sample| trimmed(sample.encode(), 1500)).collect()
}

/// Valid inputs of [`bucket_footer`].
pub fn bucket_footer_seeds() -> Vec<Vec<u8>> {
    (1..6).map(|count| footer_seed(count, 300)).chain([tail_seed()]).collect()
}

fn footer_seed(count: u64, len: usize) -> Vec<u8> {
    let samples: Vec<Sample> = (0..count).map(|number| Sample::new(number, 1, len)).collect();
    let mut offset = 0;
    let mut placed = vec![];
    for sample in &samples {
        let layout = DiskLayout::of(&sample.header);
        placed.push((sample.source(), Placed { offset, layout }));
        offset += layout.len;
    }
    let mut footer = footer::encode_footer(&placed, offset);
    footer.truncate(footer.len() - BLOCK_BYTES);
    let mut seed = (count as u32).to_le_bytes().to_vec();
    seed.extend(trimmed(footer, 1800));
    seed
}

/// The start of a tail; the rest of the block is zeros and a CRC that [`bucket_footer`] puts there.
fn tail_seed() -> Vec<u8> {
    let tail = footer::Tail { count: 1, footer_offset: 4096, footer_len: 4096 };
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

/// A seed without the zeros at its end, and no longer than a corpus allows.
fn trimmed(mut bytes: Vec<u8>, max: usize) -> Vec<u8> {
    bytes.truncate(max);
    let used = bytes.iter().rposition(|byte| *byte != 0).map_or(0, |last| last + 1);
    bytes.truncate(used);
    bytes
}
