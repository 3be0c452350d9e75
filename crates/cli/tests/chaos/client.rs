//! Client process: one thread puts, one upserts, two remove, two read. Each call is recorded in the journal.
//!
//! An environment variable sets the [`Role`] of a client. It runs until the end file exists. It writes the number of
//! its keys to a progress file, so that other clients read them, and that its next life continues after them.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::time::Duration;

use moontide_client::{PutItem, PutOptions, PutOutcome, Store, StoreConfig, StoreError};

use crate::content::Rng;
use crate::journal::{CheckedGet, Journal, Kind, Outcome, Record, now};
use crate::value::{HEADER, KeyId, Version, check, value};

/// Environment variable with the [`Role`] of a client process.
pub const ROLE: &str = "MOONTIDE_CHAOS_CLIENT";

/// Timeout of a call.
pub const DEADLINE: Duration = Duration::from_secs(2);
/// Tolerance for late responses on a machine with two cores and a dozen busy processes.
pub const LATE: Duration = Duration::from_millis(1500);

/// Keys that all clients write, replace and remove.
const HOT: usize = 400;
/// Number of its latest keys that a client puts, reads or removes again.
const RECENT: u64 = 3000;

/// Parameters of a client.
#[derive(Clone, Debug)]
pub struct Role {
    /// Directory of the journals.
    pub folder: PathBuf,
    /// Unique number of this life of the client.
    pub life: u32,
    /// Index of this writer, and number of writers.
    pub writer: u64,
    pub writers: u64,
    /// Addresses of the masters, separated by commas.
    pub masters: String,
    /// Uses shared memory.
    pub local: bool,
    pub seed: u64,
}

impl Role {
    pub fn encode(&self) -> String {
        let Role { folder, life, writer, writers, masters, local, seed } = self;
        format!("{} {life} {writer} {writers} {masters} {local} {seed}", folder.display())
    }

    fn decode(text: &str) -> Role {
        let mut words = text.split(' ');
        let mut next = || words.next().expect("a client's role has seven words");
        let folder = next().into();
        Role {
            folder,
            life: next().parse().expect("a life"),
            writer: next().parse().expect("a writer"),
            writers: next().parse().expect("a number of writers"),
            masters: next().to_owned(),
            local: next().parse().expect("a boolean"),
            seed: next().parse().expect("a seed"),
        }
    }
}

/// File whose existence ends all clients.
pub fn end_file(folder: &Path) -> PathBuf {
    folder.join("end")
}

/// Runs a client.
pub fn run(role: &str) {
    let role = Role::decode(role);
    let client = Client::new(role);
    let (mut rng, stop) = (Rng::new(client.role.seed), AtomicBool::new(false));
    std::thread::scope(|scope| {
        let jobs: [fn(&Client, &mut Rng); 6] =
            [Client::write, Client::replace, Client::remove, Client::remove, Client::read, Client::read];
        for job in jobs {
            let (mut rng, stop, client) = (rng.fork(), &stop, &client);
            scope.spawn(move || {
                while !stop.load(Ordering::Relaxed) {
                    job(client, &mut rng);
                }
            });
        }
        let end = end_file(&client.role.folder);
        while !end.exists() {
            client.read_progress();
            std::thread::sleep(Duration::from_millis(50));
        }
        stop.store(true, Ordering::Relaxed);
    });
}

struct Client {
    role: Role,
    store: Store,
    journal: Journal,
    sequence: AtomicU32,
    /// Keys that each writer has written so remote.
    written: Vec<AtomicU64>,
    progress: File,
}

impl Client {
    fn new(role: Role) -> Client {
        let config = StoreConfig { shm: role.local, timeout: DEADLINE, ..StoreConfig::new(&role.masters) };
        // Retries while no master is reachable.
        let store = loop {
            match Store::connect(config.clone()) {
                Ok(store) => break store,
                Err(error) => {
                    println!("not connected yet: {error}");
                    assert!(
                        !end_file(&role.folder).exists(),
                        "end file created before a master was reachable"
                    );
                    std::thread::sleep(Duration::from_millis(50));
                }
            }
        };
        let path = progress_file(&role.folder, role.writer);
        let progress = File::options().create(true).truncate(false).write(true).open(path);
        let client = Client {
            journal: Journal::create(&role.folder, role.life),
            sequence: AtomicU32::new(0),
            written: (0..role.writers).map(|_| AtomicU64::new(0)).collect(),
            progress: progress.expect("a file for the progress"),
            store,
            role,
        };
        client.read_progress();
        client
    }

    fn read_progress(&self) {
        for (writer, written) in self.written.iter().enumerate() {
            let bytes = std::fs::read(progress_file(&self.role.folder, writer as u64)).unwrap_or_default();
            if let Ok(bytes) = <[u8; 8]>::try_from(&bytes[..]) {
                written.fetch_max(u64::from_le_bytes(bytes), Ordering::Relaxed);
            }
        }
    }

    fn version(&self) -> Version {
        Version::new(self.role.life, self.sequence.fetch_add(1, Ordering::Relaxed))
    }

    fn own_written(&self) -> &AtomicU64 {
        &self.written[self.role.writer as usize]
    }

    /// Returns a key that was probably written.
    fn some_key(&self, rng: &mut Rng, writer: u64) -> KeyId {
        let written = self.written[writer as usize].load(Ordering::Relaxed);
        if written == 0 || rng.draw().is_multiple_of(4) {
            return KeyId::hot(rng.within(0, HOT) as u64);
        }
        // Also old keys: they were evicted, or are on a disk.
        let span = if rng.draw().is_multiple_of(8) { written } else { written.min(RECENT) };
        KeyId::own(writer, written - 1 - rng.draw() % span)
    }

    /// Returns a few keys, shared and own.
    fn some_keys(&self, rng: &mut Rng) -> Vec<KeyId> {
        let mut keys: Vec<KeyId> =
            (0..rng.within(1, 12)).map(|_| self.some_key(rng, self.role.writer)).collect();
        keys.sort();
        keys.dedup();
        keys
    }

    // ------------------------------------------------------------------------------------------------------ writing

    /// Puts one batch of new keys, or a few existing keys.
    fn write(&self, rng: &mut Rng) {
        let first = self.own_written().load(Ordering::Relaxed);
        let is_new = first == 0 || !rng.draw().is_multiple_of(3);
        let keys: Vec<KeyId> = if is_new {
            let count = rng.within(1, 40) as u64;
            (first..first + count).map(|number| KeyId::own(self.role.writer, number)).collect()
        } else {
            self.some_keys(rng)
        };
        self.put(&keys, false, rng);
        if is_new {
            let written = first + keys.len() as u64;
            self.own_written().store(written, Ordering::Relaxed);
            self.progress.write_all_at(&written.to_le_bytes(), 0).expect("the progress is written");
        }
        std::thread::sleep(Duration::from_millis(rng.within(5, 40) as u64));
    }

    /// Upserts a few existing keys.
    fn replace(&self, rng: &mut Rng) {
        let keys = self.some_keys(rng);
        self.put(&keys, true, rng);
        std::thread::sleep(Duration::from_millis(rng.within(5, 40) as u64));
    }

    fn put(&self, keys: &[KeyId], upsert: bool, rng: &mut Rng) {
        let replicas = 1 + (rng.draw() % 2) as u8;
        let options = PutOptions { replicas, replicas_min: 1, upsert, ..PutOptions::default() };
        let versions: Vec<Version> = keys.iter().map(|_| self.version()).collect();
        let values: Vec<Vec<u8>> =
            keys.iter().zip(&versions).map(|(key, version)| value(*key, *version, some_len(rng))).collect();
        let names: Vec<String> = keys.iter().map(|key| key.name()).collect();
        let parts: Vec<[&[u8]; 1]> = values.iter().map(|value| [&value[..]]).collect();
        let items: Vec<PutItem<'_>> =
            names.iter().zip(&parts).map(|(name, parts)| PutItem { key: name.as_bytes(), parts }).collect();
        let start = now();
        let record = |at: usize, kind, outcome, end| Record {
            kind,
            outcome,
            life: self.journal.life(),
            key: keys[at],
            version: versions[at],
            start,
            end,
        };
        self.journal.note((0..keys.len()).map(|at| record(at, Kind::Begin, Outcome::Ok, start)));
        let outcomes = self.store.put_batch(&items, &options);
        let end = now();
        let kind = if upsert { Kind::Upsert } else { Kind::Put };
        self.journal.note(outcomes.into_iter().enumerate().map(|(at, outcome)| {
            let outcome = match outcome {
                Ok(PutOutcome::Stored) => Outcome::Ok,
                Ok(PutOutcome::AlreadyExists) => Outcome::Absent,
                Err(error) => failed(&error),
            };
            record(at, kind, outcome, end)
        }));
    }

    // ----------------------------------------------------------------------------------------------------- removing

    /// Removes a few keys, shared and own.
    fn remove(&self, rng: &mut Rng) {
        let keys = self.some_keys(rng);
        let names: Vec<String> = keys.iter().map(|key| key.name()).collect();
        let names: Vec<&[u8]> = names.iter().map(String::as_bytes).collect();
        let start = now();
        let outcomes = self.store.remove_batch(&names, true);
        let end = now();
        let life = self.journal.life();
        let removals = keys.into_iter().zip(outcomes);
        self.journal.note(removals.map(|(key, removed)| Record::of_removal(life, key, start, end, &removed)));
        std::thread::sleep(Duration::from_millis(rng.within(10, 60) as u64));
    }

    // ------------------------------------------------------------------------------------------------------ reading

    /// Runs one get, or one batch of gets.
    fn read(&self, rng: &mut Rng) {
        let writer = rng.draw() % self.role.writers;
        let key = self.some_key(rng, writer);
        let name = key.name();
        match rng.within(0, 8) {
            0..3 => {
                let start = now();
                let got = self.store.get(name.as_bytes());
                self.note_get(key, start, now(), &got.map(|got| got.map(|bytes| check(key, &bytes))));
            }
            3..6 => {
                let start = now();
                let got = self.store.get_ref(name.as_bytes());
                let end = now();
                let first = got.as_ref().map(|got| got.as_ref().map(|bytes| check(key, bytes)));
                let first = first.map_err(StoreError::clone);
                self.note_get(key, start, end, &first);
                if let Ok(Some(held)) = got {
                    // A held reference does not change, even if the object is removed or replaced.
                    std::thread::sleep(Duration::from_millis(rng.within(0, 10) as u64));
                    let again = check(key, &held).and_then(|version| {
                        if matches!(&first, Ok(Some(Ok(seen))) if *seen == version) {
                            Ok(())
                        } else {
                            Err("content changed".to_owned())
                        }
                    });
                    if let Err(what) = again {
                        self.note_get(key, start, now(), &Ok(Some(Err(format!("held: {what}")))));
                    }
                }
            }
            _ => {
                let keys: Vec<KeyId> = (0..rng.within(2, 16)).map(|_| self.some_key(rng, writer)).collect();
                let names: Vec<String> = keys.iter().map(|key| key.name()).collect();
                let names: Vec<&[u8]> = names.iter().map(String::as_bytes).collect();
                let start = now();
                let got = self.store.get_batch(&names);
                let end = now();
                for (key, got) in keys.into_iter().zip(got) {
                    self.note_get(key, start, end, &got.map(|got| got.map(|bytes| check(key, &bytes))));
                }
            }
        }
        std::thread::sleep(Duration::from_millis(2));
    }

    fn note_get(&self, key: KeyId, start: u64, end: u64, got: &CheckedGet) {
        self.journal.note([Record::of_get(self.journal.life(), key, start, end, got)]);
    }
}

fn progress_file(folder: &Path, writer: u64) -> PathBuf {
    folder.join(format!("written-{writer}"))
}

fn failed(error: &StoreError) -> Outcome {
    Outcome::Failed(error.code())
}

/// Mostly small, some as large as a KV block, so that memory fills up and objects are offloaded.
fn some_len(rng: &mut Rng) -> usize {
    match rng.within(0, 100) {
        0..80 => rng.within(HEADER, 2048),
        80..98 => rng.within(2048, 32 << 10),
        _ => rng.within(32 << 10, 512 << 10),
    }
}
