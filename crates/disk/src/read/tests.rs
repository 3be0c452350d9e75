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
    let jobs = records.iter().zip(&mut memory).map(|((name, location), into)| ReadJob {
        name: *name,
        location: location.clone(),
        into,
    });
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
