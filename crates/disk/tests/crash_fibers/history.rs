//! A history: threads use one tier until the power fails, the tier is recovered and checked, and again.

use std::sync::Arc;
use std::time::Duration;

use moontide_disk::mutation::Mutation;
use moontide_disk::{
    AlignedBuf, Backend, Faults, Queue, QueueConfig, ReadError, ReadJob, RecordId, SimulatedDisk, Storage,
    Times, read_records,
};
use moontide_rt::sim::{self, Failure, Report, WorldConfig};
use moontide_rt::{SplitMix64, mix64, thread, with_mutation};

use crate::kinds::Kind;
use crate::oracle::{Coincidences, Oracle};

/// Failures of the power in a history.
const ROUNDS: u64 = 3;

/// Calls of each thread until it ends, if the power does not fail before.
const CALLS: u64 = 15;

/// Numbers of objects: few, so that threads meet.
const OBJECTS: u64 = 24;

/// Runs a seed in a world of its own.
pub(crate) fn run_seed(kind: Kind, seed: u64, mutation: Option<Mutation>) -> Result<Report<Stats>, Failure> {
    // All fibers are on one thread of the operating system, for which the mutation is enabled.
    sim::run(&WorldConfig::drawn(seed), move || with_mutation(mutation, || History::new(kind, seed).run()))
}

/// What a history, or many of them, contained.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stats {
    pub(crate) virtual_time: Duration,
    pub(crate) steps: u64,
    acknowledged_writes: u64,
    acknowledged_removals: u64,
    evicted: u64,
    verified_reads: u64,
    scanned: u64,
    recovered: u64,
    power_failures: u64,
    interrupted_recoveries: u64,
    failed_operations: u64,
    full: u64,
    torn_writes: u64,
    lost_sectors: u64,
    stalls: u64,
    coincidences: Coincidences,
}

impl Stats {
    pub(crate) fn add(&mut self, other: &Stats) {
        macro_rules! add {
            ($($field:ident $(. $inner:ident)?),+) => {
                $(self.$field $(.$inner)? += other.$field $(.$inner)?;)+
            };
        }
        add!(acknowledged_writes, acknowledged_removals, evicted, verified_reads, scanned, recovered);
        add!(
            power_failures,
            interrupted_recoveries,
            failed_operations,
            full,
            torn_writes,
            lost_sectors,
            stalls
        );
        add!(coincidences.removals_during_write, coincidences.writes_acknowledged_during_removal);
        add!(
            coincidences.evictions_during_removal,
            coincidences.writes_interrupted,
            coincidences.removals_interrupted
        );
    }

    /// Checks that `seeds` histories together contained all that they are for.
    pub(crate) fn assert_enough(&self, seeds: u64) {
        let enough = [
            ("acknowledged writes", self.acknowledged_writes, 20),
            ("acknowledged removals", self.acknowledged_removals, 5),
            ("evicted records", self.evicted, 5),
            ("verified reads", self.verified_reads, 20),
            ("scanned records", self.scanned, 20),
            ("recovered records", self.recovered, 10),
            ("failures of the power", self.power_failures, 1),
            ("failed operations", self.failed_operations, 1),
            ("stalls", self.stalls, 1),
        ];
        for (what, count, per_seed) in enough {
            assert!(count >= seeds * per_seed, "only {count} {what} in {seeds} seeds");
        }
        let rare = [
            ("interrupted recoveries", self.interrupted_recoveries),
            ("refusals of a full disk", self.full),
            ("torn writes", self.torn_writes),
            ("sectors lost by failed syncs", self.lost_sectors),
            ("removals during a write", self.coincidences.removals_during_write),
            ("writes during a removal", self.coincidences.writes_acknowledged_during_removal),
            ("evictions during a removal", self.coincidences.evictions_during_removal),
            ("writes interrupted by a power failure", self.coincidences.writes_interrupted),
            ("removals interrupted by a power failure", self.coincidences.removals_interrupted),
        ];
        for (what, count) in rare {
            assert!(count >= seeds / 20, "only {count} {what} in {seeds} seeds");
        }
    }
}

/// What the threads of a history share.
#[derive(Clone)]
struct History {
    kind: Kind,
    disk: SimulatedDisk,
    oracle: Arc<Oracle>,
    rng: SplitMix64,
    faults: Faults,
    think_max: Duration,
}

/// Draws the faults of a seed: each kind of fault only in some of them.
fn draw_faults(rng: &mut SplitMix64) -> Faults {
    let mut permille = |choices: [u32; 4]| choices[rng.index(4)];
    Faults {
        read_error_permille: permille([0, 0, 5, 50]),
        write_error_permille: permille([0, 0, 5, 30]),
        torn_write_permille: permille([0, 0, 5, 30]),
        sync_error_permille: permille([0, 0, 10, 100]),
        name_error_permille: permille([0, 0, 5, 30]),
        no_space_permille: permille([0, 0, 5, 30]),
        flipped_read_permille: permille([0, 0, 0, 20]),
        short_permille: permille([0, 10, 200, 500]),
        capacity: None,
        latency: None,
        times: Times {
            usual_max: Duration::from_micros([50, 500, 5000, 50_000][rng.index(4)]),
            stall_permille: [0, 1, 5, 20][rng.index(4)],
            slow_sync_permille: [0, 0, 50, 500][rng.index(4)],
        },
    }
}

impl History {
    fn new(kind: Kind, seed: u64) -> History {
        let mut rng = SplitMix64::new(mix64(seed.wrapping_add(1)));
        let disk = SimulatedDisk::new(rng.next_u64());
        let faults = draw_faults(&mut rng);
        let think_max = Duration::from_micros([100, 10_000, 1_000_000][rng.index(3)]);
        History { kind, disk, oracle: Arc::default(), rng, faults, think_max }
    }

    fn run(mut self) -> Stats {
        let mut stats = Stats::default();
        for _ in 0..ROUNDS {
            let backend = self.recover(&mut stats);
            let mut faults = self.faults;
            if self.rng.chance(200) {
                faults.capacity = Some(self.rng.log_uniform(100_000, 2_000_000));
            }
            self.disk.set_faults(faults);
            self.use_tier(&backend, &mut stats);
            drop(backend);
            self.disk.set_faults(Faults::default());
            self.disk.restart();
        }
        let backend = self.recover(&mut stats);
        self.assert_usable(&*backend);
        let counters = self.disk.counters();
        stats.failed_operations = counters.errors;
        stats.full = counters.no_space;
        stats.torn_writes = counters.torn_writes;
        stats.lost_sectors = counters.lost_sectors;
        stats.stalls = counters.stalls;
        stats.coincidences = self.oracle.coincidences();
        stats
    }

    /// Opens the tier after a restart, without faults but sometimes with another failure of the power, and checks every record.
    fn recover(&mut self, stats: &mut Stats) -> Arc<dyn Backend> {
        while self.rng.chance(300) {
            self.disk.crash_after(self.rng.below(12));
            // It may succeed, if it needs fewer operations.
            let opened = self.open(&mut 0);
            stats.interrupted_recoveries += u64::from(self.disk.is_off());
            drop(opened);
            self.disk.restart();
        }
        let backend = self.open(&mut stats.recovered).expect("the tier opens on a disk without faults");
        let mut reader = Reader::new(self);
        for name in self.oracle.names() {
            reader.read(&*backend, &name);
        }
        stats.verified_reads += reader.verified;
        backend
    }

    fn open(&self, recovered: &mut u64) -> Option<Arc<dyn Backend>> {
        let began = self.oracle.place();
        let storage: Arc<dyn Storage> = Arc::new(self.disk.clone());
        let mut found = vec![];
        let queue = &mut *self.disk.queue(&QueueConfig::default());
        let opened = (self.kind.open)(storage, queue, &mut |record| found.push(RecordId::of(record.header)));
        found.sort();
        for name in &found {
            self.oracle.assert_may_exist(name, began, "was recovered");
        }
        for pair in found.windows(2) {
            assert_ne!(pair[0], pair[1], "a record was found twice");
        }
        *recovered += found.len() as u64;
        opened.ok().map(|(backend, _)| backend.into())
    }

    /// Runs the threads until they have made their calls or the power fails.
    fn use_tier(&mut self, backend: &Arc<dyn Backend>, stats: &mut Stats) {
        let roles: [(&str, Call); 8] = [
            ("writer-1", Actor::write),
            ("writer-2", Actor::write),
            ("writer-3", Actor::write),
            ("reader-1", Actor::read),
            ("reader-2", Actor::read),
            ("remover", Actor::remove),
            ("evictor", Actor::evict),
            ("scanner", Actor::scan),
        ];
        let ending = self.rng.below(10);
        if ending < 4 {
            self.disk.crash_after(self.rng.below(250));
        }
        let threads = roles.map(|(name, call)| {
            let history = History { rng: SplitMix64::new(self.rng.next_u64()), ..self.clone() };
            let backend = backend.clone();
            let run = move || Actor::new(history, backend).repeat(call);
            thread::Builder::new().name(name.to_owned()).spawn(run).expect("a stack")
        });
        let power = (4..8).contains(&ending).then(|| {
            let (disk, oracle) = (self.disk.clone(), self.oracle.clone());
            let after = Duration::from_micros(self.rng.log_uniform(1000, 20_000_000));
            let run = move || {
                thread::sleep(after);
                disk.crash_after(0);
                oracle.power_failed();
            };
            thread::Builder::new().name("power".to_owned()).spawn(run).expect("a stack")
        });
        for thread in threads {
            stats.add(&thread.join().expect("a panic ends the run"));
        }
        if let Some(power) = power {
            power.join().expect("a panic ends the run");
        }
        stats.power_failures += u64::from(self.disk.is_off());
    }

    /// Checks that the tier accepts writes, after an eviction if it is full.
    fn assert_usable(&self, backend: &dyn Backend) {
        let queue = &mut *self.disk.queue(&QueueConfig::default());
        if let Some(eviction) = backend.prepare_eviction(u64::MAX) {
            backend.finish_eviction(queue, eviction).expect("an eviction on a disk without faults");
        }
        let sample = moontide_disk::samples::SampleRecord::new(1_000_000, 1, 5000);
        let results = backend.write(queue, &[sample.source()]);
        assert_eq!(results, [Ok(())], "the tier refuses a write");
        assert!(backend.contains(&sample.name()));
    }
}

/// Reads and verifies records, with a queue of its own.
struct Reader {
    disk: SimulatedDisk,
    oracle: Arc<Oracle>,
    queue: Box<dyn Queue>,
    verified: u64,
}

impl Reader {
    fn new(history: &History) -> Reader {
        let queue = history.disk.queue(&QueueConfig::default());
        Reader { disk: history.disk.clone(), oracle: history.oracle.clone(), queue, verified: 0 }
    }

    /// Faults of the disk until now. If none was added, no operation has failed.
    fn faults(&self) -> (u64, bool) {
        let counters = self.disk.counters();
        (counters.errors + counters.no_space + counters.flipped_reads, self.disk.is_off())
    }

    fn read(&mut self, backend: &dyn Backend, name: &RecordId) {
        let (began, faults) = (self.oracle.place(), self.faults());
        let Some(location) = backend.locate(name) else {
            let lost = self.oracle.is_stored(name, began) && self.faults() == faults && !faults.1;
            assert!(!lost, "{name:?} is lost{}", self.oracle.story(name));
            return;
        };
        self.oracle.assert_may_exist(name, began, "is located");
        let mut memory = AlignedBuf::zeroed(location.len as usize);
        let job = ReadJob::whole(*name, location, &mut memory);
        match read_records(&mut *self.queue, vec![job]).pop().expect("one job") {
            Ok(header) => {
                let payload = &memory[header.payload_offset as usize..][..header.stripe_len as usize];
                assert!(payload == self.oracle.sample(name).payload(), "{name:?} was read with wrong bytes");
                self.verified += 1;
            }
            // A location keeps its record readable, also if it is removed or evicted meanwhile.
            Err(error) if self.faults() == faults && !faults.1 => {
                panic!("{name:?} cannot be read, without a fault: {error}")
            }
            Err(ReadError::Corrupt(_)) => {
                self.oracle.dropped(name);
                backend.drop_corrupt(name);
            }
            Err(_) => {}
        }
    }
}

/// A call that a thread makes again and again.
type Call = fn(&mut Actor);

/// A thread of a history.
struct Actor {
    history: History,
    backend: Arc<dyn Backend>,
    reader: Reader,
    stats: Stats,
}

impl Actor {
    fn new(history: History, backend: Arc<dyn Backend>) -> Actor {
        let reader = Reader::new(&history);
        Actor { history, backend, reader, stats: Stats::default() }
    }

    fn repeat(mut self, call: Call) -> Stats {
        for _ in 0..CALLS {
            let think = self.history.rng.below(self.history.think_max.as_micros() as u64 + 1);
            thread::sleep(Duration::from_micros(think));
            if self.history.disk.is_off() {
                break;
            }
            call(&mut self);
        }
        self.stats.verified_reads = self.reader.verified;
        self.stats
    }

    fn draw_record(&mut self) -> (u64, u64) {
        (1 + self.history.rng.below(OBJECTS), 1 + self.history.rng.below(8))
    }

    fn draw_name(&mut self) -> Option<RecordId> {
        let names = self.history.oracle.names();
        (!names.is_empty()).then(|| names[self.history.rng.index(names.len())])
    }

    fn write(&mut self) {
        let count = 1 + self.history.rng.below(5);
        let records: Vec<(u64, u64)> = (0..count).map(|_| self.draw_record()).collect();
        let (called, samples) = self.history.oracle.write_called(&records);
        let sources: Vec<_> = samples.iter().map(|sample| sample.source()).collect();
        let results = self.backend.write(&mut *self.reader.queue, &sources);
        self.history.oracle.write_answered(called, &samples, &results);
        self.stats.acknowledged_writes += results.iter().filter(|result| result.is_ok()).count() as u64;
    }

    fn read(&mut self) {
        let Some(name) = self.draw_name() else { return };
        self.reader.read(&*self.backend, &name);
    }

    fn remove(&mut self) {
        let names = (0..1 + self.history.rng.below(2)).filter_map(|_| {
            let name = self.draw_name()?;
            Some((name.id, name.version))
        });
        let names: Vec<_> = names.collect();
        let call = self.history.oracle.remove_called(&names);
        let done = self.backend.remove(&mut *self.reader.queue, &names).is_ok();
        self.history.oracle.remove_answered(call, done);
        self.stats.acknowledged_removals += u64::from(done);
    }

    fn evict(&mut self) {
        let began = self.history.oracle.eviction_called();
        let chosen = self.backend.prepare_eviction(1 + self.history.rng.below(40_000));
        let names = chosen.as_ref().map(|eviction| eviction.names.clone()).unwrap_or_default();
        let count = names.len() as u64;
        let eviction = self.history.oracle.eviction_chosen(began, names);
        let Some(chosen) = chosen else { return };
        if self.backend.finish_eviction(&mut *self.reader.queue, chosen).is_ok() {
            self.history.oracle.eviction_done(eviction);
            self.stats.evicted += count;
        }
    }

    fn scan(&mut self) {
        let (began, faults) = (self.history.oracle.place(), self.reader.faults());
        let mut found = vec![];
        let mut each = |record: moontide_disk::ScannedRecord<'_>| found.push(RecordId::of(record.header));
        let skipped = self.backend.scan(&mut *self.reader.queue, &mut each);
        for name in &found {
            self.history.oracle.assert_may_exist(name, began, "was scanned");
        }
        self.stats.scanned += found.len() as u64;
        if self.reader.faults() == faults && !faults.1 {
            for name in self.history.oracle.names() {
                let is_stored = self.history.oracle.is_stored(&name, began);
                let visited = found.contains(&name) || skipped.contains(&name);
                assert!(visited || !is_stored, "{name:?} is lost from the scan");
            }
        }
    }
}
