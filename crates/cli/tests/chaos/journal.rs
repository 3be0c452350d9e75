//! Journals of the clients' calls: one file per life of a client, with appended records of 40 bytes. A put is recorded
//! before it starts and after it ends, so that every value that is read was announced. A killed client loses only the
//! record of its current call.

use std::fs::File;
use std::io::Write;
use std::path::Path;
use std::sync::Mutex;

use moontide_client::StoreError;
use moontide_types::ErrorCode;
use rustix::time::{ClockId, clock_gettime};

use crate::value::{KeyId, Version};

/// Nanoseconds of the monotonic clock, which all processes of this machine share.
pub fn now() -> u64 {
    let time = clock_gettime(ClockId::Monotonic);
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A put is about to start.
    Begin,
    /// A put has ended. [`Outcome::Absent`]: another version exists and was kept.
    Put,
    /// An upsert has ended.
    Upsert,
    /// A removal has ended. [`Outcome::Absent`]: no such object.
    Remove,
    /// A get has ended. [`Outcome::Absent`]: a miss.
    Get,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    Ok,
    Absent,
    Failed(ErrorCode),
    /// Bytes that no client put.
    Wrong,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Record {
    pub kind: Kind,
    pub outcome: Outcome,
    /// Life of the client.
    pub life: u32,
    pub key: KeyId,
    /// Version that was put or read.
    pub version: Version,
    pub start: u64,
    pub end: u64,
}

const BYTES: usize = 40;

/// Result of a get whose bytes were checked.
pub type CheckedGet = Result<Option<Result<Version, String>>, StoreError>;

impl Record {
    /// Record of a get. Prints what is wrong with wrong bytes.
    pub fn of_get(life: u32, key: KeyId, start: u64, end: u64, got: &CheckedGet) -> Record {
        let (outcome, version) = match got {
            Ok(Some(Ok(version))) => (Outcome::Ok, *version),
            Ok(Some(Err(what))) => {
                println!("WRONG at {end}: {what}");
                (Outcome::Wrong, Version(0))
            }
            Ok(None) => (Outcome::Absent, Version(0)),
            Err(error) => (Outcome::Failed(error.code()), Version(0)),
        };
        Record { kind: Kind::Get, outcome, life, key, version, start, end }
    }

    /// Record of a removal.
    pub fn of_removal(
        life: u32,
        key: KeyId,
        start: u64,
        end: u64,
        removed: &Result<bool, StoreError>,
    ) -> Record {
        let outcome = match removed {
            Ok(true) => Outcome::Ok,
            Ok(false) => Outcome::Absent,
            Err(error) => Outcome::Failed(error.code()),
        };
        Record { kind: Kind::Remove, outcome, life, key, version: Version(0), start, end }
    }

    fn encode(&self) -> [u8; BYTES] {
        let outcome = match self.outcome {
            Outcome::Ok => 0,
            Outcome::Absent => u16::MAX,
            Outcome::Wrong => u16::MAX - 1,
            Outcome::Failed(code) => code as u16,
        };
        let mut bytes = [0; BYTES];
        bytes[0] = self.kind as u8;
        bytes[2..4].copy_from_slice(&outcome.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.life.to_le_bytes());
        for (at, word) in [self.key.0, self.version.0, self.start, self.end].into_iter().enumerate() {
            bytes[8 + 8 * at..16 + 8 * at].copy_from_slice(&word.to_le_bytes());
        }
        bytes
    }

    fn decode(bytes: &[u8]) -> Record {
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().expect("8 bytes"));
        let kinds = [Kind::Begin, Kind::Put, Kind::Upsert, Kind::Remove, Kind::Get];
        let outcome = match u16::from_le_bytes([bytes[2], bytes[3]]) {
            0 => Outcome::Ok,
            u16::MAX => Outcome::Absent,
            wrong if wrong == u16::MAX - 1 => Outcome::Wrong,
            code => Outcome::Failed(ErrorCode::try_from(u32::from(code)).expect("a known code")),
        };
        Record {
            kind: kinds[usize::from(bytes[0])],
            outcome,
            life: word(4) as u32,
            key: KeyId(word(8)),
            version: Version(word(16)),
            start: word(24),
            end: word(32),
        }
    }
}

/// Journal of one life of a client.
#[derive(Debug)]
pub struct Journal {
    file: Mutex<File>,
    life: u32,
}

impl Journal {
    pub fn create(folder: &Path, life: u32) -> Journal {
        let path = folder.join(format!("{life:06}.journal"));
        let file = File::options().create_new(true).append(true).open(path).expect("a journal");
        Journal { file: Mutex::new(file), life }
    }

    pub fn life(&self) -> u32 {
        self.life
    }

    /// Writes records immediately, so that a kill does not lose them.
    pub fn note(&self, records: impl IntoIterator<Item = Record>) {
        let bytes: Vec<u8> = records.into_iter().flat_map(|record| record.encode()).collect();
        self.file.lock().expect("no holder panics").write_all(&bytes).expect("the journal is writable");
    }
}

/// Reads all records of all lives; those of one life are in order.
pub fn read_all(folder: &Path) -> Vec<Record> {
    let entries = std::fs::read_dir(folder).expect("the folder").flatten().map(|entry| entry.path());
    let mut paths: Vec<_> =
        entries.filter(|path| path.extension().is_some_and(|end| end == "journal")).collect();
    paths.sort();
    // Ignores a record truncated by the kill of its client; its call had not finished either.
    let records = |bytes: Vec<u8>| bytes.chunks_exact(BYTES).map(Record::decode).collect::<Vec<_>>();
    paths.into_iter().flat_map(|path| records(std::fs::read(path).expect("a journal"))).collect()
}

#[test]
fn records_round_trip() {
    for (kind, outcome) in [
        (Kind::Begin, Outcome::Ok),
        (Kind::Put, Outcome::Absent),
        (Kind::Upsert, Outcome::Failed(ErrorCode::Corrupt)),
        (Kind::Remove, Outcome::Failed(ErrorCode::Pending)),
        (Kind::Get, Outcome::Wrong),
    ] {
        let (key, version) = (KeyId::own(7, 1 << 39), Version::new(8, 9));
        let record = Record { kind, outcome, life: 0xfeed, key, version, start: 1 << 60, end: u64::MAX };
        assert_eq!(Record::decode(&record.encode()), record);
    }
}
