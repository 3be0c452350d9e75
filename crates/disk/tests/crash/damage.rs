//! Files that are cut or have a bit flipped: what is undamaged is found and right, what is damaged is never read wrong.

use std::collections::BTreeMap;

use moontide_disk::samples::{Random, Sample};
use moontide_disk::{RecordName, SimulatedDisk};

use crate::full;
use crate::kinds::{Kind, kinds};
use crate::world::{Check, Status, World};

/// A tier that was closed, and where its records stand.
pub(crate) struct Closed {
    kind: Kind,
    /// All files.
    files: BTreeMap<String, Vec<u8>>,
    records: Vec<Stored>,
}

struct Stored {
    number: u64,
    len: usize,
    file: String,
    offset: usize,
    encoded: Vec<u8>,
    /// Bytes at the start that are not padding.
    front_used: usize,
    payload: std::ops::Range<usize>,
}

const LENS: [usize; 8] = [100, 4096, 0, 5000, 700, 8192, 3000, 4097];

impl Closed {
    /// Writes eight records, and has one more removed.
    pub(crate) fn new(kind: Kind) -> Closed {
        let mut world = World::new(kind, SimulatedDisk::new(1));
        assert!(world.open().expect("an empty tier"), "an empty tier");
        let samples = || LENS.into_iter().zip(1..).map(|(len, number)| Sample::new(number, 1, len));
        world.write(samples().collect()).expect("a good write");
        world.write(vec![Sample::new(100, 1, 50)]).expect("a good write");
        world.remove(&[(100, 1)]).expect("a good removal");
        let paths = world.disk.files();
        let files: BTreeMap<_, _> =
            paths.into_iter().map(|(path, _)| (path.clone(), world.disk.read_file(&path))).collect();
        let records = samples().zip(1..).map(|(sample, number)| {
            let encoded = sample.encode();
            let (file, offset) = place(&files, &encoded).expect("a record stands in a file, on a block");
            let source = sample.source();
            let start = moontide_disk::DiskLayout::of(&sample.header).front_len as usize;
            Stored {
                number,
                len: sample.payload().len(),
                file,
                offset,
                encoded,
                front_used: 128 + source.digests.len() + source.key.len(),
                payload: start..start + sample.payload().len(),
            }
        });
        let records = records.collect();
        Closed { kind, files, records }
    }

    /// Opens a copy with one file changed, and checks it. `intact` says which records must be there.
    fn check(&self, file: &str, changed: &[u8], intact: impl Fn(&Stored) -> bool) -> Check {
        let disk = SimulatedDisk::new(1);
        for (path, bytes) in &self.files {
            disk.write_file(path, if path == file { changed } else { bytes });
        }
        let mut world = World::new(self.kind, disk);
        let samples =
            self.records.iter().map(|stored| (Sample::new(stored.number, 1, stored.len), Status::Written));
        // That a removal is forgotten when its log is damaged cannot be helped.
        let removed = if file.starts_with("removed") { Status::Open } else { Status::Removed };
        world.know(samples.chain([(Sample::new(100, 1, 50), removed)]));
        if !world.open()? {
            return Err("it cannot be opened".into());
        }
        let names: Vec<RecordName> = self
            .records
            .iter()
            .filter(|stored| intact(stored))
            .map(|stored| Sample::new(stored.number, 1, stored.len).name())
            .collect();
        world.check_with(|name| names.contains(name))
    }

    /// The file is cut to this length.
    pub(crate) fn cut(&self, file: &str, len: usize) -> Check {
        let what = |why| format!("{}: {file} cut to {len} bytes: {why}", self.kind.name);
        self.check(file, &self.files[file][..len], |stored| {
            stored.file != file || stored.offset + stored.encoded.len() <= len
        })
        .map_err(what)
    }

    /// One bit of the file is flipped.
    pub(crate) fn flip(&self, file: &str, bit: usize) -> Check {
        let mut changed = self.files[file].clone();
        changed[bit / 8] ^= 1 << (bit % 8);
        let what = |why| format!("{}: bit {bit} of {file}: {why}", self.kind.name);
        self.check(file, &changed, |stored| !stored.uses(file, bit / 8)).map_err(what)
    }

    /// Bytes of a file that are not payload, and not zero anyway.
    fn metadata(&self, file: &str) -> Vec<usize> {
        let used = |at: usize| {
            let stored = self.records.iter().find(|stored| stored.covers(file, at));
            stored.map_or(self.files[file][at] != 0, |stored| at - stored.offset < stored.front_used)
        };
        (0..self.files[file].len()).filter(|&at| used(at)).collect()
    }

    /// Files that matter: not the ones of another size than these tests are made for.
    fn names(&self) -> Vec<&String> {
        self.files.keys().collect()
    }
}

impl Stored {
    fn covers(&self, file: &str, at: usize) -> bool {
        self.file == file && (self.offset..self.offset + self.encoded.len()).contains(&at)
    }

    /// Whether the byte means something for this record.
    fn uses(&self, file: &str, at: usize) -> bool {
        self.covers(file, at) && {
            let at = at - self.offset;
            at < self.front_used || self.payload.contains(&at)
        }
    }
}

fn place(files: &BTreeMap<String, Vec<u8>>, encoded: &[u8]) -> Option<(String, usize)> {
    files.iter().find_map(|(path, bytes)| {
        let offset = (0..bytes.len()).step_by(4096).find(|&at| bytes[at..].starts_with(encoded))?;
        Some((path.clone(), offset))
    })
}

#[test]
fn a_file_that_is_cut_keeps_what_is_before_the_cut() {
    for kind in kinds() {
        let closed = Closed::new(kind);
        for file in closed.names() {
            let len = closed.files[file].len();
            // Around every block, and some in between; all of them if there is time.
            let step = if full() { 1 } else { 509 };
            let near = (0..=len).filter(|at| full() || (at + 2) % 4096 < 5);
            for cut in near.chain((0..len).step_by(step)) {
                closed.cut(file, cut).unwrap();
            }
        }
    }
}

#[test]
fn a_flipped_bit_of_metadata_loses_no_other_record() {
    for kind in kinds() {
        let closed = Closed::new(kind);
        let mut random = Random(7);
        for file in closed.names() {
            for at in closed.metadata(file) {
                if full() {
                    (0..8).for_each(|bit| closed.flip(file, at * 8 + bit).unwrap());
                } else {
                    closed.flip(file, at * 8 + random.below(8) as usize).unwrap();
                }
            }
        }
    }
}

#[test]
fn random_flips_are_never_read() {
    let flips = if full() { 100_000 } else { 2000 };
    for kind in kinds() {
        let closed = Closed::new(kind);
        let (names, seed) = (closed.names(), 11);
        let mut random = Random(seed);
        for _ in 0..flips {
            let file = names[random.below(names.len() as u64) as usize];
            let bits = closed.files[file].len() as u64 * 8;
            if bits > 0 {
                closed
                    .flip(file, random.below(bits) as usize)
                    .unwrap_or_else(|why| panic!("seed {seed}: {why}"));
            }
        }
    }
}

/// For the test that shows that mistakes are found: every bit of the metadata, up to the first complaint.
#[cfg(debug_assertions)]
pub(crate) fn flip_metadata(kind: Kind) -> Check {
    let closed = Closed::new(kind);
    let mut random = Random(3);
    for file in closed.names() {
        for at in closed.metadata(file) {
            closed.flip(file, at * 8 + random.below(8) as usize)?;
        }
    }
    Ok(())
}

/// The same for payloads.
#[cfg(debug_assertions)]
pub(crate) fn flip_payloads(kind: Kind) -> Check {
    let closed = Closed::new(kind);
    for stored in closed.records.iter().filter(|stored| stored.len > 0) {
        closed.flip(&stored.file, (stored.offset + stored.payload.start) * 8 + 3)?;
    }
    Ok(())
}
