//! Records in files of the operating system, through the public API: buckets are written, found, read and inspected.
//! Also the bytes themselves, which must not change between releases.

use std::path::PathBuf;
use std::sync::Arc;

use moontide_disk::samples::{SampleRecord, id};
use moontide_disk::{
    AlignedBuf, Backend, BucketBackend, BucketConfig, InspectedState, IoEngine, OsStorage, QueueConfig,
    ReadJob, RecordId, Storage, decode_preamble, fuzzing, inspect_buckets, read_records, verify_record,
};
use moontide_types::Epoch;

/// A directory that is removed when it is dropped.
struct TempDir(PathBuf);

impl TempDir {
    fn new(name: &str) -> TempDir {
        let path = std::env::temp_dir().join(format!("moontide-records-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        TempDir(path)
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        _ = std::fs::remove_dir_all(&self.0);
    }
}

fn check(engine: IoEngine) {
    let dir = TempDir::new(&format!("{engine:?}"));
    let storage: Arc<dyn Storage> = Arc::new(OsStorage::open(&dir.0, engine).unwrap());
    let queue = &mut *storage.queue(&QueueConfig::default());
    let config = BucketConfig { bucket_bytes_max: 4 << 20, ..BucketConfig::with_limit(64 << 20) };
    let lens = [0, 100, 4095, 4096, 100_000, 1 << 20, (1 << 20) + 1, (5 << 20) + 4097];
    // Aligned payloads are written without a copy, the others are copied.
    let samples: Vec<SampleRecord> = lens
        .into_iter()
        .zip(0..)
        .flat_map(|(len, n)| {
            [SampleRecord::new(n, 1, len), SampleRecord::with_key(100 + n, 1, len, b"shifted", &[], 40)]
        })
        .collect();
    let sources: Vec<_> = samples.iter().map(SampleRecord::source).collect();
    {
        let (backend, _) = BucketBackend::open(storage.clone(), queue, config.clone(), &mut |_| ()).unwrap();
        assert!(backend.write(queue, &sources).iter().all(Result::is_ok));
        backend.remove(queue, &[(id(3), Epoch::from_bits(1).unwrap())]).unwrap();
    }
    let mut found = 0;
    let (backend, recovery) =
        BucketBackend::open(storage.clone(), queue, config, &mut |_| found += 1).unwrap();
    assert_eq!((found, recovery.records, recovery.removed, recovery.bad_count), (15, 15, 1, 0));

    let left: Vec<&SampleRecord> = samples.iter().filter(|sample| sample.header.id != id(3)).collect();
    let locations: Vec<_> = left.iter().map(|sample| backend.locate(&sample.name()).unwrap()).collect();
    let mut memory: Vec<AlignedBuf> =
        locations.iter().map(|at| AlignedBuf::zeroed(at.len as usize)).collect();
    let jobs = left.iter().zip(locations).zip(&mut memory);
    let jobs = jobs.map(|((sample, location), into)| ReadJob::whole(sample.name(), location, into));
    for ((result, sample), bytes) in read_records(queue, jobs.collect()).into_iter().zip(&left).zip(&memory) {
        let header = result.unwrap();
        assert_eq!(RecordId::of(&header), sample.name());
        assert!(bytes[header.payload_offset as usize..].starts_with(sample.payload()));
        assert_eq!(decode_preamble(bytes).unwrap().key, sample.key());
    }
    let mut states = vec![];
    inspect_buckets(&storage, queue, true, &mut |record| states.push(record.state)).unwrap();
    assert_eq!(states.iter().filter(|state| **state == InspectedState::Ok).count(), 15);
    assert_eq!(states.iter().filter(|state| **state == InspectedState::Removed).count(), 1);
}

#[test]
fn bucket_records_round_trip_on_files_with_auto_engine() {
    check(IoEngine::Auto);
}

#[test]
fn bucket_records_round_trip_on_files_with_posix_engine() {
    check(IoEngine::Posix);
}

/// Prevents a release from being unable to read the records of an older one. If this fails, the format has changed: it
/// needs a new version number, and a reader for the old one.
#[test]
fn on_disk_format_matches_golden_checksums() {
    let record = SampleRecord::with_key(7, 3, 5000, b"golden", b"\x05\x00\x02\x00ab", 0).encode();
    assert_eq!(record.len(), 4096 + 8192);
    verify_record(&record).unwrap();
    assert_eq!(crc32c::crc32c(&record), GOLDEN_RECORD_CRC, "a record");
    let footers: Vec<u8> = fuzzing::bucket_footer_seeds().concat();
    assert_eq!(crc32c::crc32c(&footers), GOLDEN_FOOTERS_CRC, "footers and a tail");
    let removals: Vec<u8> = fuzzing::removals_seeds().concat();
    assert_eq!(crc32c::crc32c(&removals), GOLDEN_REMOVALS_CRC, "the tombstone log");
}

const GOLDEN_RECORD_CRC: u32 = 0x20a8_f753;
const GOLDEN_FOOTERS_CRC: u32 = 0xe220_c783;
const GOLDEN_REMOVALS_CRC: u32 = 0xfe38_6258;

#[test]
fn fuzz_seeds_are_accepted_by_their_targets() {
    fuzzing::front_seeds().iter().for_each(|seed| fuzzing::front(seed));
    fuzzing::bucket_footer_seeds().iter().for_each(|seed| fuzzing::bucket_footer(seed));
    fuzzing::removals_seeds().iter().for_each(|seed| fuzzing::removals(seed));
    assert!(fuzzing::front_seeds()[..3].iter().all(|seed| {
        let mut whole = seed.clone();
        whole.resize(4096, 0);
        verify_record(&whole).is_ok()
    }));
}
