//! [`Load`]: objects, and callers that get and put at a constant rate, for as long as objects move.
//!
//! Latencies count from the time at which a call was due, not from its start, so that a stall shows in all calls behind it.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use moontide_client::Store;
use moontide_rt::SplitMix64;

use crate::measure::Percentiles;
use crate::results::{BenchError, Progress, wrong};

/// Objects and rates.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct LoadArgs {
    /// KiB of each object
    #[arg(long, default_value_t = 1024, value_parser = clap::value_parser!(u64).range(4..=65_536))]
    pub(super) object_kib: u64,
    /// Gets per second, of random objects
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(super) gets_per_s: u32,
    /// Puts per second, of objects of 64 KiB; each replaces an earlier one
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub(super) puts_per_s: u32,
    /// Seconds of load before anything moves
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub(super) seconds: u64,
    /// Seed of the keys that are read
    #[arg(long, default_value_t = 1)]
    pub(super) seed: u64,
}

/// Threads that get; a get that takes long delays only those of its own thread.
const READERS: usize = 4;

/// Objects that the puts replace in turn.
const WRITTEN_OBJECTS: u64 = 64;

/// Number of phases.
const PHASES: usize = 4;

/// Outcomes of gets.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Outcomes {
    pub(super) gets: u64,
    pub(super) misses: u64,
    pub(super) errors: u64,
}

impl Outcomes {
    /// Gets that did not return the object.
    pub(super) fn failed(self) -> u64 {
        self.misses + self.errors
    }

    /// Share of the gets that returned the object.
    pub(super) fn hit_rate(self) -> f64 {
        1.0 - self.failed() as f64 / self.gets.max(1) as f64
    }

    fn add(&mut self, other: Outcomes) {
        self.gets += other.gets;
        self.misses += other.misses;
        self.errors += other.errors;
    }
}

/// What the readers have seen.
#[derive(Debug, Default)]
struct Seen {
    /// Nanoseconds of the gets of each phase.
    nanos: [Vec<u32>; PHASES],
    /// Outcomes of each second since the start of the load, with the phase in which the second began.
    seconds: Vec<(usize, Outcomes)>,
}

/// Objects, and what the callers have seen.
#[derive(Debug)]
pub(super) struct Load {
    pub(super) objects: u64,
    content: Vec<u8>,
    phase: AtomicUsize,
    stop: AtomicBool,
    seen: Mutex<Seen>,
}

impl Load {
    /// Objects of `bytes` bytes in all.
    pub(super) fn new(args: &LoadArgs, bytes: u64) -> Load {
        let mut rng = SplitMix64::new(args.seed);
        let mut content = vec![0; (args.object_kib as usize) << 10];
        content.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&rng.next_u64().to_le_bytes()));
        Load {
            objects: bytes / content.len() as u64,
            content,
            phase: AtomicUsize::new(0),
            stop: AtomicBool::new(false),
            seen: Mutex::default(),
        }
    }

    fn key(number: u64) -> String {
        format!("moved-{number:09}")
    }

    /// Bytes of an object: its number, then the same for all.
    fn object(&self, number: u64) -> Vec<u8> {
        let mut bytes = self.content.clone();
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        bytes
    }

    fn is_right(&self, number: u64, got: &[u8]) -> bool {
        got.len() == self.content.len() && got[..8] == number.to_le_bytes() && got[8..] == self.content[8..]
    }

    /// Puts all objects.
    pub(super) fn fill(&self, store: &Store) -> Result<(), BenchError> {
        let mut progress = Progress::new(format!("{} objects", self.objects), self.objects);
        for number in 0..self.objects {
            store.put(Load::key(number).as_bytes(), &self.object(number)).map_err(wrong)?;
            progress.at(number + 1);
        }
        Ok(())
    }

    /// Reads all objects and compares their bytes. Returns the number of those that are lost.
    pub(super) fn count_lost(&self, store: &Store) -> Result<u64, BenchError> {
        let mut lost = 0;
        for number in 0..self.objects {
            match store.get(Load::key(number).as_bytes()).map_err(wrong)? {
                Some(got) if self.is_right(number, &got) => {}
                Some(_) => return Err(wrong(format!("object {number} has other bytes at the end"))),
                None => lost += 1,
            }
        }
        Ok(lost)
    }

    /// Runs `work` while clients get and put.
    pub(super) fn run<T>(
        &self,
        store: &Store,
        args: &LoadArgs,
        work: impl FnOnce() -> Result<T, BenchError>,
    ) -> Result<T, BenchError> {
        std::thread::scope(|scope| {
            let end = EndLoad(&self.stop);
            let start = Instant::now();
            let readers: Vec<_> = (0..READERS)
                .map(|reader| {
                    let per_s = f64::from(args.gets_per_s) / READERS as f64;
                    scope.spawn(move || self.read(store, start, per_s, args.seed + reader as u64))
                })
                .collect();
            let writer = scope.spawn(move || self.write(store, args.puts_per_s.into()));
            let done = work();
            drop(end);
            for caller in readers.into_iter().chain([writer]) {
                caller.join().expect("callers do not panic")?;
            }
            done
        })
    }

    /// Counts the gets that are due from now on in another phase.
    pub(super) fn begin_phase(&self, phase: usize) {
        self.phase.store(phase, Ordering::Relaxed);
    }

    /// Latencies of the gets of a phase.
    pub(super) fn latencies(&self, phase: usize) -> Percentiles {
        let mut seen = self.seen.lock().expect("readers do not panic");
        Percentiles::new(std::mem::take(&mut seen.nanos[phase]))
    }

    /// Outcomes of all gets.
    pub(super) fn outcomes(&self) -> Outcomes {
        let seen = self.seen.lock().expect("readers do not panic");
        let mut all = Outcomes::default();
        seen.seconds.iter().for_each(|(_, second)| all.add(*second));
        all
    }

    /// Lowest hit rate of a second that began in a phase.
    pub(super) fn lowest_hit_rate(&self, phase: usize) -> f64 {
        let seen = self.seen.lock().expect("readers do not panic");
        let of_phase = seen.seconds.iter().filter(|(of, second)| *of == phase && second.gets > 0);
        of_phase.map(|(_, second)| second.hit_rate()).fold(1.0, f64::min)
    }

    /// Calls `each` at a constant rate until the load ends, with the time at which the call was due.
    fn at_rate(
        &self,
        per_s: f64,
        mut each: impl FnMut(Instant) -> Result<(), BenchError>,
    ) -> Result<(), BenchError> {
        let (start, interval) = (Instant::now(), Duration::from_secs_f64(1.0 / per_s));
        for number in 0u32.. {
            let due = start + interval * number;
            std::thread::sleep(due.saturating_duration_since(Instant::now()));
            if self.stop.load(Ordering::Relaxed) {
                break;
            }
            each(due)?;
        }
        Ok(())
    }

    fn read(&self, store: &Store, start: Instant, per_s: f64, seed: u64) -> Result<(), BenchError> {
        let mut rng = SplitMix64::new(seed);
        self.at_rate(per_s, |due| {
            let (number, phase) = (rng.next_u64() % self.objects, self.phase.load(Ordering::Relaxed));
            let got = store.get(Load::key(number).as_bytes());
            let nanos = due.elapsed().as_nanos().min(u32::MAX.into()) as u32;
            let mut outcome = Outcomes { gets: 1, ..Outcomes::default() };
            match got {
                Ok(Some(got)) if self.is_right(number, &got) => {}
                Ok(Some(_)) => return Err(wrong(format!("object {number} has other bytes"))),
                Ok(None) => outcome.misses = 1,
                Err(_) => outcome.errors = 1,
            }
            let mut seen = self.seen.lock().expect("readers do not panic");
            seen.nanos[phase].push(nanos);
            let second = due.saturating_duration_since(start).as_secs() as usize;
            while seen.seconds.len() <= second {
                seen.seconds.push((phase, Outcomes::default()));
            }
            seen.seconds[second].1.add(outcome);
            Ok(())
        })
    }

    fn write(&self, store: &Store, per_s: f64) -> Result<(), BenchError> {
        let mut number = 0u64;
        self.at_rate(per_s, |_| {
            let key = format!("written-{}", number % WRITTEN_OBJECTS);
            number += 1;
            let bytes = vec![number as u8; 64 << 10];
            let _removed = store.remove(key.as_bytes(), true).map_err(wrong)?;
            store.put(key.as_bytes(), &bytes).map(drop).map_err(wrong)
        })
    }
}

/// Ends the load, also after an error.
struct EndLoad<'a>(&'a AtomicBool);

impl Drop for EndLoad<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}
