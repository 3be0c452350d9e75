//! Reading: right bytes or an error, whatever the disk does.

use super::*;
use crate::buffer::Aligned;
use crate::record::{DiskLayout, FrontError, WriteOps, run_writes};
use crate::samples::{Random, Sample};
use crate::simulated::{Faults, SimulatedDisk};
use crate::storage::{File, Mode, QueueConfig, Storage};

const LENS: [usize; 9] = [0, 100, 4096, 5000, 262_144, 262_145, 600_000, 1 << 20, (2 << 20) + 77];

fn write(disk: &SimulatedDisk, samples: &[Sample]) -> Vec<(RecordName, Location)> {
    let file = disk.open("file".as_ref(), Mode::Create).unwrap();
    let mut ops = WriteOps::new(&file, 0);
    let places: Vec<_> = samples.iter().map(|sample| ops.record(&sample.source())).collect();
    run_writes(&mut *disk.queue(&QueueConfig::default()), ops).unwrap();
    let locations = places.iter().map(|placed| location(&file, placed.offset, placed.layout));
    samples.iter().map(Sample::name).zip(locations).collect()
}

fn location(file: &File, offset: u64, layout: DiskLayout) -> Location {
    Location { file: file.clone(), offset, len: layout.len, front_len: layout.head_len, hold: None }
}

type Answers = Vec<(Result<Header, ReadError>, Aligned)>;

fn read(disk: &SimulatedDisk, depth: usize, places: &[(RecordName, Location)]) -> Answers {
    let mut memory: Vec<Aligned> = places.iter().map(|(_, at)| Aligned::zeroed(at.len as usize)).collect();
    let jobs = places.iter().zip(&mut memory).map(|((name, location), into)| ReadJob {
        name: *name,
        location: location.clone(),
        into,
    });
    let queue = &mut *disk.queue(&QueueConfig { depth, registered: None });
    read_records(queue, jobs.collect()).into_iter().zip(memory).collect()
}

fn samples() -> Vec<Sample> {
    LENS.into_iter().zip(0..).map(|(len, number)| Sample::new(number, 3, len)).collect()
}

#[test]
fn what_was_written_is_read() {
    for depth in [1, 2, 32] {
        let disk = SimulatedDisk::new(depth as u64);
        let samples = samples();
        let places = write(&disk, &samples);
        for (sample, (answer, bytes)) in samples.iter().zip(read(&disk, depth, &places)) {
            let header = answer.unwrap();
            assert_eq!(RecordName::of(&header), sample.name());
            let payload = &bytes[header.payload_offset as usize..][..header.stripe_len as usize];
            assert!(payload == sample.payload(), "{} bytes at depth {depth}", payload.len());
            assert_eq!(decode_front(&bytes).unwrap().key, sample.key());
        }
    }
}

#[test]
fn no_flipped_bit_gets_through() {
    let seed = 5;
    let mut random = Random(seed);
    let disk = SimulatedDisk::new(seed);
    let samples = samples();
    let places = write(&disk, &samples);
    for (sample, (name, location)) in samples.iter().zip(&places) {
        let layout = DiskLayout::of(&sample.header);
        let source = sample.source();
        let used = (128 + source.digests.len() + source.key.len()) as u64;
        for round in 0..200 {
            // Half in the front, half in the payload; never in the padding, which nobody looks at.
            let bit = match sample.payload().len() as u64 * 8 {
                0 => random.below(used * 8),
                _ if round % 2 == 0 => random.below(used * 8),
                payload => layout.front_len * 8 + random.below(payload),
            };
            disk.flip_bit("file", location.offset * 8 + bit);
            let answer = read(&disk, 32, &[(*name, location.clone())]).pop().unwrap().0;
            assert!(answer.is_err(), "seed {seed}: bit {bit} of {} bytes", sample.payload().len());
            disk.flip_bit("file", location.offset * 8 + bit);
        }
        assert!(read(&disk, 32, &[(*name, location.clone())])[0].0.is_ok());
    }
}

#[test]
fn one_failure_does_not_spoil_the_others() {
    let disk = SimulatedDisk::new(1);
    let samples = samples();
    let mut places = write(&disk, &samples);
    // The wrong one, a damaged one, and one beyond the end.
    places[1].0 = samples[2].name();
    disk.flip_bit("file", (places[6].1.offset + 4096 + 300_000) * 8);
    let end = places[8].1.offset + (1 << 20);
    disk.truncate("file", end);
    let answers: Vec<_> = read(&disk, 4, &places).into_iter().map(|(answer, _)| answer).collect();
    for (index, answer) in answers.into_iter().enumerate() {
        match index {
            1 => assert_eq!(answer.unwrap_err(), ReadError::OtherRecord),
            6 => assert_eq!(answer.unwrap_err(), ReadError::Damaged(Damage::Page { index: 1 })),
            8 => assert_eq!(answer.unwrap_err(), ReadError::Io(io::ErrorKind::UnexpectedEof)),
            _ => assert!(answer.is_ok(), "record {index}: {answer:?}"),
        }
    }
}

#[test]
fn a_place_of_another_size_is_another_record() {
    let disk = SimulatedDisk::new(1);
    let places = write(&disk, &samples());
    let (name, right) = places[6].clone();
    let short = Location { len: right.len - 4096, ..right.clone() };
    assert_eq!(read(&disk, 4, &[(name, short)])[0].0, Err(ReadError::OtherRecord));
    let shifted = Location { offset: right.offset + 4096, len: right.len - 4096, ..right };
    let answer = read(&disk, 4, &[(name, shifted)])[0].0;
    assert!(matches!(answer, Err(ReadError::Damaged(Damage::Front(FrontError::Header(_))))), "{answer:?}");
}

#[test]
fn a_failing_disk_gives_errors_or_right_bytes() {
    for seed in 0..100 {
        let disk = SimulatedDisk::new(seed);
        let samples = samples();
        let places = write(&disk, &samples);
        disk.set_faults(Faults {
            read_error_permille: 50,
            flipped_read_permille: 100,
            short_permille: 300,
            ..Faults::default()
        });
        for (sample, (answer, bytes)) in samples.iter().zip(read(&disk, 8, &places)) {
            if let Ok(header) = answer {
                let payload = &bytes[header.payload_offset as usize..][..header.stripe_len as usize];
                assert!(payload == sample.payload(), "seed {seed}: wrong bytes");
            }
        }
    }
}
