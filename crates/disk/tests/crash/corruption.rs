//! Files that are truncated or have a flipped bit: intact records are found with the right bytes, corrupt ones are
//! never returned.

use std::collections::BTreeMap;

use moontide_disk::samples::SampleRecord;
use moontide_disk::{RecordId, SimulatedDisk};
use moontide_rt::SplitMix64;

use crate::full;
use crate::harness::{Check, CrashHarness, Status};
use crate::kinds::{Kind, kinds};

/// The files of a closed tier, and the locations of its records.
pub(crate) struct ClosedTier {
    kind: Kind,
    /// All files by path.
    files: BTreeMap<String, Vec<u8>>,
    records: Vec<StoredRecord>,
}

struct StoredRecord {
    number: u64,
    len: usize,
    file: String,
    offset: usize,
    encoded: Vec<u8>,
    /// Bytes at the start that are not padding.
    preamble_used: usize,
    payload: std::ops::Range<usize>,
}

const LENS: [usize; 8] = [100, 4096, 0, 5000, 700, 8192, 3000, 4097];

impl ClosedTier {
    /// Writes eight records, and writes and removes another one.
    pub(crate) fn new(kind: Kind) -> ClosedTier {
        let mut harness = CrashHarness::new(kind, SimulatedDisk::new(1));
        assert!(harness.open().expect("an empty tier"), "an empty tier");
        let samples = || LENS.into_iter().zip(1..).map(|(len, number)| SampleRecord::new(number, 1, len));
        harness.write(samples().collect()).expect("no faults");
        harness.write(vec![SampleRecord::new(100, 1, 50)]).expect("no faults");
        harness.remove(&[(100, 1)]).expect("no faults");
        let paths = harness.disk.files();
        let files: BTreeMap<_, _> =
            paths.into_iter().map(|(path, _)| (path.clone(), harness.disk.read_file(&path))).collect();
        let records = samples().zip(1..).map(|(sample, number)| {
            let encoded = sample.encode();
            let (file, offset) = find(&files, &encoded).expect("a record is in a file, on a block");
            let source = sample.source();
            let start = moontide_disk::DiskLayout::of(&sample.header).preamble_len as usize;
            StoredRecord {
                number,
                len: sample.payload().len(),
                file,
                offset,
                encoded,
                preamble_used: 128 + source.digests.len() + source.key.len(),
                payload: start..start + sample.payload().len(),
            }
        });
        let records = records.collect();
        ClosedTier { kind, files, records }
    }

    /// Opens a copy with one file changed, and checks it. `intact` selects the records that must be stored.
    fn check(&self, file: &str, changed: &[u8], intact: impl Fn(&StoredRecord) -> bool) -> Check {
        let disk = SimulatedDisk::new(1);
        for (path, bytes) in &self.files {
            disk.write_file(path, if path == file { changed } else { bytes });
        }
        let mut harness = CrashHarness::new(self.kind, disk);
        let samples = self
            .records
            .iter()
            .map(|stored| (SampleRecord::new(stored.number, 1, stored.len), Status::Written));
        // A removal is lost if its log is corrupt; this is unavoidable.
        let removed = if file.starts_with("removed") { Status::Unknown } else { Status::Removed };
        harness.expect(samples.chain([(SampleRecord::new(100, 1, 50), removed)]));
        if !harness.open()? {
            return Err("cannot open the tier".into());
        }
        let names: Vec<RecordId> = self
            .records
            .iter()
            .filter(|stored| intact(stored))
            .map(|stored| SampleRecord::new(stored.number, 1, stored.len).name())
            .collect();
        harness.check_with(|name| names.contains(name))
    }

    /// Truncates the file to `len` bytes, and checks.
    pub(crate) fn truncate(&self, file: &str, len: usize) -> Check {
        let what = |error| format!("{}: {file} truncated to {len} bytes: {error}", self.kind.name);
        self.check(file, &self.files[file][..len], |stored| {
            stored.file != file || stored.offset + stored.encoded.len() <= len
        })
        .map_err(what)
    }

    /// Flips one bit of the file, and checks.
    pub(crate) fn flip(&self, file: &str, bit: usize) -> Check {
        let mut changed = self.files[file].clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        let what = |error| format!("{}: bit {bit} of {file}: {error}", self.kind.name);
        self.check(file, &changed, |stored| !stored.uses(file, bit / 8)).map_err(what)
    }

    /// Returns the positions in a file that are neither payload nor zero.
    fn metadata(&self, file: &str) -> Vec<usize> {
        let used = |at: usize| {
            let stored = self.records.iter().find(|stored| stored.covers(file, at));
            stored.map_or(self.files[file][at] != 0, |stored| at - stored.offset < stored.preamble_used)
        };
        (0..self.files[file].len()).filter(|&at| used(at)).collect()
    }

    /// Returns the paths of all files.
    fn names(&self) -> Vec<&String> {
        self.files.keys().collect()
    }
}

impl StoredRecord {
    fn covers(&self, file: &str, at: usize) -> bool {
        self.file == file && (self.offset..self.offset + self.encoded.len()).contains(&at)
    }

    /// Whether the byte is part of the data of this record.
    fn uses(&self, file: &str, at: usize) -> bool {
        self.covers(file, at) && {
            let at = at - self.offset;
            at < self.preamble_used || self.payload.contains(&at)
        }
    }
}

fn find(files: &BTreeMap<String, Vec<u8>>, encoded: &[u8]) -> Option<(String, usize)> {
    files.iter().find_map(|(path, bytes)| {
        let offset = (0..bytes.len()).step_by(4096).find(|&at| bytes[at..].starts_with(encoded))?;
        Some((path.clone(), offset))
    })
}

#[test]
fn truncated_file_keeps_records_before_its_end() {
    for kind in kinds() {
        let tier = ClosedTier::new(kind);
        for file in tier.names() {
            let len = tier.files[file].len();
            // Around every block, and some in between; all of them in a full run.
            let step = if full() { 1 } else { 509 };
            let boundaries = (0..=len).filter(|at| full() || (at + 2) % 4096 < 5);
            for len in boundaries.chain((0..len).step_by(step)) {
                tier.truncate(file, len).unwrap();
            }
        }
    }
}

#[test]
fn flipped_metadata_bit_loses_no_other_record() {
    for kind in kinds() {
        let tier = ClosedTier::new(kind);
        let mut rng = SplitMix64::new(7);
        for file in tier.names() {
            for at in tier.metadata(file) {
                if full() {
                    (0..8).for_each(|bit| tier.flip(file, at * 8 + bit).unwrap());
                } else {
                    tier.flip(file, at * 8 + rng.below(8) as usize).unwrap();
                }
            }
        }
    }
}

#[test]
fn random_bit_flips_never_return_wrong_bytes() {
    let flips = if full() { 100_000 } else { 2000 };
    for kind in kinds() {
        let tier = ClosedTier::new(kind);
        let (names, seed) = (tier.names(), 11);
        let mut rng = SplitMix64::new(seed);
        for _ in 0..flips {
            let file = names[rng.below(names.len() as u64) as usize];
            let bits = tier.files[file].len() as u64 * 8;
            if bits > 0 {
                tier.flip(file, rng.below(bits) as usize)
                    .unwrap_or_else(|error| panic!("seed {seed}: {error}"));
            }
        }
    }
}

/// For the mutation tests: flips a bit of every metadata byte, up to the first failure.
#[cfg(debug_assertions)]
pub(crate) fn flip_metadata(kind: Kind) -> Check {
    let tier = ClosedTier::new(kind);
    let mut rng = SplitMix64::new(3);
    for file in tier.names() {
        for at in tier.metadata(file) {
            tier.flip(file, at * 8 + rng.below(8) as usize)?;
        }
    }
    Ok(())
}

/// Like [`flip_metadata`], for payloads.
#[cfg(debug_assertions)]
pub(crate) fn flip_payloads(kind: Kind) -> Check {
    let tier = ClosedTier::new(kind);
    for stored in tier.records.iter().filter(|stored| stored.len > 0) {
        tier.flip(&stored.file, (stored.offset + stored.payload.start) * 8 + 3)?;
    }
    Ok(())
}
