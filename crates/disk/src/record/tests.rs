//! The record format: records round-trip, and no other bytes are accepted.

use moontide_rt::SplitMix64;

use super::*;
use crate::buffer::Buffer;
use crate::samples::SampleRecord;
use crate::simulated::SimulatedDisk;
use crate::storage::{File, OpKind, OpenMode, Storage};

fn samples() -> Vec<SampleRecord> {
    let mut all: Vec<SampleRecord> =
        [0, 1, 511, 3000, 4095, 4096, 5000, 8192, 70_000, 262_144, 300_000, 1 << 20, (3 << 20) + 5]
            .into_iter()
            .zip(1..)
            .map(|(len, number)| SampleRecord::new(number, 7, len))
            .collect();
    all.push(SampleRecord::with_key(50, 1, 10, &[b'k'; 4096], &[9; 100], 0));
    all.push(SampleRecord::with_key(51, 1, 200_000, &[b'k'; 4096], &[9; 4096], 0));
    all.push(SampleRecord::with_key(52, 1, 3 << 20, b"shifted", &[], 24));
    all
}

#[test]
fn record_round_trips() {
    for sample in samples() {
        let layout = DiskLayout::of_source(&sample.source()).unwrap();
        assert!(layout.len.is_multiple_of(4096) && layout.preamble_read_len.is_multiple_of(4096));
        assert!(layout.preamble_len.is_multiple_of(if sample.payload().len() >= 4096 { 4096 } else { 512 }));
        let bytes = sample.encode();
        let preamble = verify_record(&bytes).unwrap();
        assert_eq!(preamble.layout, layout);
        assert_eq!((preamble.key, preamble.attributes), (sample.source().key, sample.source().attributes));
        assert_eq!(preamble.digests.as_bytes(), sample.source().digests);
        assert_eq!(Header { payload_offset: sample.header.payload_offset, ..preamble.header }, sample.header);
        for len in [0, 127, 128, layout.preamble_len as usize - 1] {
            assert!(
                matches!(decode_preamble(&bytes[..len]), Err(PreambleError::Short { .. })),
                "truncated to {len}"
            );
        }
    }
}

#[test]
fn flipped_bit_in_preamble_is_detected() {
    for sample in [
        SampleRecord::with_key(1, 2, 700_000, b"key", b"\x05\x00\x02\x00ab", 0),
        SampleRecord::new(3, 4, 100),
    ] {
        let mut bytes = sample.encode();
        let source = sample.source();
        let used = 128 + source.digests.len() + source.key.len() + source.attributes.len();
        for bit in 0..used * 8 {
            bytes[bit / 8] ^= 1 << (bit % 8);
            assert!(verify_record(&bytes).is_err(), "bit {bit}");
            bytes[bit / 8] ^= 1 << (bit % 8);
        }
        verify_record(&bytes).unwrap();
    }
}

#[test]
fn flipped_byte_in_payload_is_detected() {
    let sample = SampleRecord::new(1, 2, 300_000);
    let mut bytes = sample.encode();
    let layout = DiskLayout::of(&sample.header);
    for at in (0..300_000).step_by(997).chain([299_999]) {
        bytes[layout.preamble_len as usize + at] ^= 0x40;
        let index = at as u64 / PAGE_BYTES;
        assert_eq!(verify_record(&bytes).unwrap_err(), Corruption::Page { index });
        bytes[layout.preamble_len as usize + at] ^= 0x40;
    }
    let end = layout.preamble_len as usize + 299_999;
    assert!(matches!(verify_record(&bytes[..end]), Err(Corruption::Preamble(PreambleError::Short { .. }))));
}

#[test]
fn record_that_contradicts_its_header_is_not_written() {
    let sample = SampleRecord::new(1, 2, 300_000);
    let good = sample.source();
    assert!(DiskLayout::of_source(&good).is_ok());
    let refused = |source: RecordSource<'_>| DiskLayout::of_source(&source).unwrap_err();
    let (mut key, mut digests) = (good.key.to_vec(), good.digests.to_vec());
    key[3] ^= 1;
    digests[8] ^= 1;
    assert_eq!(refused(RecordSource { key: &key, ..good }), WriteError::Corrupt);
    assert_eq!(refused(RecordSource { digests: &digests, ..good }), WriteError::Corrupt);
    assert_eq!(refused(RecordSource { digests: &digests[8..], ..good }), WriteError::Corrupt);
    assert_eq!(refused(RecordSource { payload: &good.payload[1..], ..good }), WriteError::Corrupt);
    assert_eq!(refused(RecordSource { attributes: &[0], ..good }), WriteError::Corrupt);
    let flags = moontide_types::record::RecordFlags::DIGESTLESS;
    let digestless = Header { flags, ..*good.header };
    assert_eq!(refused(RecordSource { header: &digestless, digests: &[], ..good }), WriteError::Digestless);
}

#[test]
fn preamble_with_wrong_state_or_payload_offset_is_rejected() {
    let sample = SampleRecord::new(1, 2, 10);
    let mut bytes = sample.encode();
    for state in [State::Free, State::Writing, State::Dead] {
        let header = disk_header(&sample.header);
        let header = Header { word: header.word.with_state(state), ..header };
        bytes[..128].copy_from_slice(&header.encode());
        assert_eq!(decode_preamble(&bytes).unwrap_err(), PreambleError::State { found: state });
    }
    let header = Header { payload_offset: 1024, ..disk_header(&sample.header) };
    bytes[..128].copy_from_slice(&header.encode());
    let error = PreambleError::PayloadOffset { found: 1024, expected: 512 };
    assert_eq!(decode_preamble(&bytes).unwrap_err(), error);
}

#[test]
fn arbitrary_bytes_are_rejected_as_record() {
    let seed = 1;
    let mut rng = SplitMix64::new(seed);
    for round in 0..20_000 {
        let mut bytes = vec![0; rng.below(600) as usize];
        crate::samples::fill(rng.next_u64(), &mut bytes);
        if let Some(magic) = bytes.get_mut(..6) {
            magic.copy_from_slice(b"MTRC\x02\x00");
        }
        assert!(verify_record(&bytes).is_err(), "seed {seed}, round {round}");
    }
}

/// Applies write operations to memory.
fn apply(ops: WriteOps<'_>) -> (Vec<u8>, Vec<usize>) {
    let (mut bytes, mut lens) = (vec![], vec![]);
    for op in ops {
        assert_eq!(op.kind, OpKind::Write);
        assert!(op.buffer.is_aligned() && op.offset.is_multiple_of(4096), "{op:?}");
        assert_eq!(op.offset as usize, bytes.len(), "writes are contiguous");
        bytes.extend_from_slice(op.buffer.as_slice());
        lens.push(op.buffer.len());
    }
    (bytes, lens)
}

fn file() -> File {
    SimulatedDisk::new(0).open("file".as_ref(), OpenMode::Create).unwrap()
}

#[test]
fn write_ops_produce_encoded_records() {
    let samples = samples();
    let mut ops = WriteOps::new(&file(), 0);
    let mut expected = vec![];
    for sample in &samples {
        let placed = ops.record(&sample.source());
        assert_eq!(placed.offset as usize, expected.len());
        expected.extend(sample.encode());
    }
    ops.bytes(b"footer".to_vec());
    expected.extend_from_slice(b"footer");
    expected.resize(expected.len().next_multiple_of(4096), 0);
    assert_eq!(ops.position() as usize, expected.len());
    assert_eq!(apply(ops).0, expected);
}

#[test]
fn write_ops_merge_small_records_and_borrow_payload() {
    let large: Vec<SampleRecord> = (0..16).map(|number| SampleRecord::new(number, 1, 1 << 20)).collect();
    let mut ops = WriteOps::new(&file(), 0);
    large.iter().for_each(|sample| _ = ops.record(&sample.source()));
    let lens = apply(ops).1;
    assert_eq!(lens.len(), 32, "a preamble and a payload each");

    let shifted: Vec<SampleRecord> =
        (0..16).map(|n| SampleRecord::with_key(n, 1, 1 << 20, b"k", &[], 8)).collect();
    let mut ops = WriteOps::new(&file(), 0);
    shifted.iter().for_each(|sample| _ = ops.record(&sample.source()));
    let lens = apply(ops).1;
    assert!(lens.len() <= 40, "{} operations", lens.len());

    let tiny: Vec<SampleRecord> = (0..1000).map(|number| SampleRecord::new(number, 1, 700)).collect();
    let mut ops = WriteOps::new(&file(), 0);
    tiny.iter().for_each(|sample| _ = ops.record(&sample.source()));
    let lens = apply(ops).1;
    assert_eq!(lens.len(), 4, "1,000 blocks in pieces of 256");

    let aligned = SampleRecord::new(9, 1, 1 << 20);
    let mut ops = WriteOps::new(&file(), 0);
    ops.record(&aligned.source());
    let borrowed = ops.filter(|op| matches!(op.buffer, Buffer::Borrowed(_))).count();
    assert_eq!(borrowed, 1, "the payload is not copied");
}
