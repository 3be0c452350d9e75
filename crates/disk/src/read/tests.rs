//! Reads return the right bytes or an error, whatever the disk does.

use moontide_rt::SplitMix64;

use super::*;
use crate::buffer::AlignedBuf;
use crate::record::{DiskLayout, PreambleError, WriteOps, run_writes};
use crate::samples::SampleRecord;
use crate::simulated::{Faults, SimulatedDisk};
use crate::storage::{File, OpenMode, QueueConfig, Storage};

const LENS: [usize; 9] = [0, 100, 4096, 5000, 262_144, 262_145, 600_000, 1 << 20, (2 << 20) + 77];

fn write(disk: &SimulatedDisk, samples: &[SampleRecord]) -> Vec<(RecordId, RecordLocation)> {
    let file = disk.open("file".as_ref(), OpenMode::Create).unwrap();
    let mut ops = WriteOps::new(&file, 0);
    let placed: Vec<_> = samples.iter().map(|sample| ops.record(&sample.source())).collect();
    run_writes(&mut *disk.queue(&QueueConfig::default()), ops).unwrap();
    let locations = placed.iter().map(|placed| location(&file, placed.offset, placed.layout));
    samples.iter().map(SampleRecord::name).zip(locations).collect()
}

fn location(file: &File, offset: u64, layout: DiskLayout) -> RecordLocation {
    RecordLocation {
        file: file.clone(),
        offset,
        len: layout.len,
        preamble_read_len: layout.preamble_read_len,
        read_guard: None,
    }
}

type ReadResults = Vec<(Result<Header, ReadError>, AlignedBuf)>;

fn read(disk: &SimulatedDisk, depth: usize, records: &[(RecordId, RecordLocation)]) -> ReadResults {
    let mut memory: Vec<AlignedBuf> =
        records.iter().map(|(_, at)| AlignedBuf::zeroed(at.len as usize)).collect();
    let jobs = records
        .iter()
        .zip(&mut memory)
        .map(|((name, location), into)| ReadJob::whole(*name, location.clone(), into));
    let queue = &mut *disk.queue(&QueueConfig { depth, registered: None });
    read_records(queue, jobs.collect()).into_iter().zip(memory).collect()
}

fn samples() -> Vec<SampleRecord> {
    LENS.into_iter().zip(0..).map(|(len, number)| SampleRecord::new(number, 3, len)).collect()
}

#[test]
fn records_round_trip_at_every_queue_depth() {
    for depth in [1, 2, 32] {
        let disk = SimulatedDisk::new(depth as u64);
        let samples = samples();
        let records = write(&disk, &samples);
        for (sample, (result, bytes)) in samples.iter().zip(read(&disk, depth, &records)) {
            let header = result.unwrap();
            assert_eq!(RecordId::of(&header), sample.name());
            let payload = &bytes[header.payload_offset as usize..][..header.stripe_len as usize];
            assert!(payload == sample.payload(), "{} bytes at depth {depth}", payload.len());
            assert_eq!(decode_preamble(&bytes).unwrap().key, sample.key());
        }
    }
}

#[test]
fn flipped_bit_on_disk_fails_the_read() {
    let seed = 5;
    let mut rng = SplitMix64::new(seed);
    let disk = SimulatedDisk::new(seed);
    let samples = samples();
    let records = write(&disk, &samples);
    for (sample, (name, location)) in samples.iter().zip(&records) {
        let layout = DiskLayout::of(&sample.header);
        let source = sample.source();
        let used = (128 + source.digests.len() + source.key.len()) as u64;
        for round in 0..200 {
            // Half in the preamble, half in the payload; never in the padding, which is not checked.
            let bit = match sample.payload().len() as u64 * 8 {
                0 => rng.below(used * 8),
                _ if round % 2 == 0 => rng.below(used * 8),
                payload => layout.preamble_len * 8 + rng.below(payload),
            };
            disk.flip_bit("file", location.offset * 8 + bit);
            let result = read(&disk, 32, &[(*name, location.clone())]).pop().unwrap().0;
            assert!(result.is_err(), "seed {seed}: bit {bit} of {} bytes", sample.payload().len());
            disk.flip_bit("file", location.offset * 8 + bit);
        }
        assert!(read(&disk, 32, &[(*name, location.clone())])[0].0.is_ok());
    }
}

#[test]
fn failed_read_does_not_affect_others_in_batch() {
    let disk = SimulatedDisk::new(1);
    let samples = samples();
    let mut records = write(&disk, &samples);
    // A wrong id, a corrupt record, and one past the end of the file.
    records[1].0 = samples[2].name();
    disk.flip_bit("file", (records[6].1.offset + 4096 + 300_000) * 8);
    let end = records[8].1.offset + (1 << 20);
    disk.truncate("file", end);
    let results: Vec<_> = read(&disk, 4, &records).into_iter().map(|(result, _)| result).collect();
    for (index, result) in results.into_iter().enumerate() {
        match index {
            1 => assert_eq!(result.unwrap_err(), ReadError::WrongRecord),
            6 => assert_eq!(result.unwrap_err(), ReadError::Corrupt(Corruption::Page { index: 1 })),
            8 => assert_eq!(result.unwrap_err(), ReadError::Io(io::ErrorKind::UnexpectedEof)),
            _ => assert!(result.is_ok(), "record {index}: {result:?}"),
        }
    }
}

#[test]
fn location_of_wrong_size_fails_the_read() {
    let disk = SimulatedDisk::new(1);
    let records = write(&disk, &samples());
    let (name, right) = records[6].clone();
    let short = RecordLocation { len: right.len - 4096, ..right.clone() };
    assert_eq!(read(&disk, 4, &[(name, short)])[0].0, Err(ReadError::WrongRecord));
    let shifted = RecordLocation { offset: right.offset + 4096, len: right.len - 4096, ..right };
    let result = read(&disk, 4, &[(name, shifted)])[0].0;
    assert!(
        matches!(result, Err(ReadError::Corrupt(Corruption::Preamble(PreambleError::Header(_))))),
        "{result:?}"
    );
}

#[test]
fn read_on_faulty_disk_returns_error_or_right_bytes() {
    for seed in 0..100 {
        let disk = SimulatedDisk::new(seed);
        let samples = samples();
        let records = write(&disk, &samples);
        disk.set_faults(Faults {
            read_error_permille: 50,
            flipped_read_permille: 100,
            short_permille: 300,
            ..Faults::default()
        });
        for (sample, (result, bytes)) in samples.iter().zip(read(&disk, 8, &records)) {
            if let Ok(header) = result {
                let payload = &bytes[header.payload_offset as usize..][..header.stripe_len as usize];
                assert!(payload == sample.payload(), "seed {seed}: wrong bytes");
            }
        }
    }
}

/// Returns every part of `pages` pages of a record, and the empty part at its start.
fn parts_of(location: &RecordLocation, pages: u64) -> Vec<Span> {
    let (payload, step) = (location.payload_blocks(), pages * PAGE_BYTES);
    let part = |start: u64| Span::new(start, step.min(payload - start)).unwrap();
    let parts = (0..payload).step_by(step as usize).map(part);
    std::iter::once(Span::new(0, 0).unwrap()).filter(|_| payload > 0).chain(parts).collect()
}

fn read_part(
    disk: &SimulatedDisk,
    (name, location): &(RecordId, RecordLocation),
    part: Span,
) -> (Result<Header, ReadError>, AlignedBuf) {
    let mut memory = AlignedBuf::zeroed((location.preamble_read_len + part.len()) as usize);
    let job = ReadJob::part(*name, location.clone(), part, &mut memory);
    let queue = &mut *disk.queue(&QueueConfig { depth: 8, registered: None });
    (read_records(queue, vec![job]).pop().unwrap(), memory)
}

#[test]
fn parts_of_records_round_trip() {
    let disk = SimulatedDisk::new(3);
    let samples = samples();
    for (sample, record) in samples.iter().zip(write(&disk, &samples)) {
        for pages in [1, 2, 4] {
            for part in parts_of(&record.1, pages) {
                let (result, bytes) = read_part(&disk, &record, part);
                let header = result.unwrap();
                assert_eq!(RecordId::of(&header), sample.name());
                assert_eq!(decode_preamble(&bytes).unwrap().key, sample.key());
                let len = part.len().min(header.stripe_len.saturating_sub(part.offset())) as usize;
                let found = &bytes[record.1.preamble_read_len as usize..][..len];
                assert!(found == &sample.payload()[part.offset() as usize..][..len], "{part:?}");
            }
        }
    }
}

#[test]
fn flipped_bit_fails_reads_of_its_part_only() {
    let disk = SimulatedDisk::new(4);
    let samples = samples();
    let records = write(&disk, &samples);
    let (sample, record) = samples.iter().zip(&records).max_by_key(|(s, _)| s.payload().len()).unwrap();
    let preamble_len = record.1.preamble_read_len;
    let parts: Vec<Span> = parts_of(&record.1, 2).into_iter().filter(|part| !part.is_empty()).collect();
    assert!(parts.len() > 2, "{} bytes", sample.payload().len());
    for (index, part) in parts.iter().enumerate() {
        let bit = (record.1.offset + preamble_len + part.offset() + 7) * 8;
        disk.flip_bit("file", bit);
        for (other, part) in parts.iter().enumerate() {
            assert_eq!(read_part(&disk, record, *part).0.is_err(), other == index);
        }
        disk.flip_bit("file", bit);
    }
    // Every read verifies the preamble: here, a digest.
    disk.flip_bit("file", (record.1.offset + 130) * 8);
    assert!(parts.iter().all(|part| read_part(&disk, record, *part).0.is_err()));
}
