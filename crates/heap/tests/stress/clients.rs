//! Writers, readers and the reclaimer: the processes that are killed and stopped. One thread each.
//!
//! Each of them may be killed or stopped between any two instructions. A process that sees a wrong byte reports it to
//! the driver, with all details, and exits with [`WRONG`].

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use moontide_heap::{Guard, LocalHeap, Lookup, Reader, ShmError, connect};
use moontide_types::{MonoTime, ObjectId};

use crate::common::{id_of, now};
use crate::payload::{Predicted, Rng};
use crate::wire::{KEYS, Kind, Request, Response, SlotVersion, call, key_bytes, report};

/// Exit code of a process that saw a wrong byte.
pub const WRONG: i32 = 86;

/// A gap in a reader's own time above this may be a SIGSTOP.
const GAP: Duration = Duration::from_millis(40);

/// Maximum number of guards of a reader.
const GUARDS_MAX: usize = 50;

pub fn run(kind: Kind, socket: &Path, seed: u64) -> ! {
    let mut counters = Counters::default();
    let (heap, socket) = connect_with_retry(socket, &mut counters);
    report(&format!("connected {}", std::process::id()));
    let rng = Rng::new(seed);
    match kind {
        Kind::Writer => write(&heap, &socket, rng, counters),
        Kind::Reader => read(&heap, rng, counters),
        Kind::Reclaimer => reclaim(&socket, rng, counters),
    }
}

/// Errors of a client for which the node's handshake has timed out.
const CLOSED: [ErrorKind; 3] = [ErrorKind::UnexpectedEof, ErrorKind::BrokenPipe, ErrorKind::ConnectionReset];

fn connect_with_retry(path: &Path, counters: &mut Counters) -> (LocalHeap, OwnedFd) {
    for _ in 0..20 {
        // SAFETY: the owner and all its clients are this program, which follows the protocol; with the mutation it
        // does
        // not, and reads bytes that it must not read, which the test must detect.
        match unsafe { connect(path, Duration::from_secs(5), u64::MAX) } {
            Ok(connected) => return connected,
            // Stopped during the handshake for longer than the node waits.
            Err(ShmError::System { source, .. }) if CLOSED.contains(&source.kind()) => {
                counters.add("connects_interrupted", 1);
            }
            Err(error) => wrong(&format!("cannot connect: {error}")),
        }
    }
    wrong("interrupted 20 times while connecting")
}

fn wrong(text: &str) -> ! {
    let text: String = text.chars().filter(|&c| c != '\n').take(3000).collect();
    report(&format!("wrong {} {text}", std::process::id()));
    std::process::exit(WRONG)
}

/// Counters that are reported to the driver periodically; those of a killed process since its last report are lost.
#[derive(Default)]
struct Counters {
    counts: BTreeMap<&'static str, u64>,
    reported: Option<Instant>,
}

impl Counters {
    fn add(&mut self, name: &'static str, count: u64) {
        *self.counts.entry(name).or_default() += count;
    }

    fn report_periodically(&mut self) {
        let now = Instant::now();
        if self.reported.is_some_and(|reported| now - reported < Duration::from_millis(20)) {
            return;
        }
        self.reported = Some(now);
        let mut line = "counters".to_string();
        for (name, count) in std::mem::take(&mut self.counts) {
            write!(line, " {name}={count}").expect("a string");
        }
        report(&line);
    }
}

/// Pauses at random: usually not at all, rarely for longer than a reservation.
fn pause(rng: &mut Rng) {
    match rng.below(1000) {
        0..8 => std::thread::sleep(Duration::from_millis(rng.between(1, 30))),
        8 => std::thread::sleep(Duration::from_millis(rng.between(320, 500))),
        _ => {}
    }
}

fn write(heap: &LocalHeap, socket: &OwnedFd, mut rng: Rng, mut counters: Counters) -> ! {
    let mut cells = heap.reader().expect("a vacant lane");
    let mut predicted = Predicted::default();
    loop {
        counters.report_periodically();
        let (key, len) = (rng.below(KEYS), rng.payload_len());
        let location = match call(socket, Request::Begin { key, len }) {
            Response::Granted(location) => location,
            Response::Busy => {
                counters.add("begins_refused", 1);
                std::thread::sleep(Duration::from_micros(500));
                continue;
            }
            other => wrong(&format!("unexpected response {other:?} to begin of key {key}")),
        };
        pause(&mut rng);
        let SlotVersion { segment, slot, epoch } = location;
        let Some(mut claim) = cells.claim(segment, slot, epoch) else {
            counters.add("claims_refused", 1);
            continue;
        };
        pause(&mut rng);
        if rng.percent(2) {
            drop(claim);
            if call(socket, Request::Abort(location)) != Response::Done {
                wrong(&format!("abort of {location:?} was refused"));
            }
            counters.add("aborts", 1);
            continue;
        }
        let root = claim.fill(predicted.bytes(key, epoch, len as usize));
        pause(&mut rng);
        drop(claim);
        pause(&mut rng);
        match call(socket, Request::Commit { location, root }) {
            Response::Done => counters.add("commits", 1),
            Response::Late => counters.add("commits_late", 1),
            other => wrong(&format!("unexpected response {other:?} to commit of {location:?}")),
        }
    }
}

/// A guard whose bytes are checked again later.
struct Held<'h> {
    guard: Guard<'h>,
    key: u64,
    acquired: MonoTime,
    until: MonoTime,
}

impl Held<'_> {
    fn check(&self, predicted: &mut Predicted, when: &str) {
        let (guard, key, epoch) = (&self.guard, self.key, self.guard.version());
        let bytes = guard.bytes();
        let difference = if guard.header().object_len != bytes.len() as u64 {
            Some(format!("{} bytes of an object of {}", bytes.len(), guard.header().object_len))
        } else {
            predicted.compare(key, epoch, bytes)
        };
        if let Some(difference) = difference {
            let (segment, slot) = guard.location();
            let age = now().since(self.acquired);
            wrong(&format!(
                "{when}, key {key} version {epoch} in slot {slot} of segment {segment} at {:#x}, guard {age:?} old: \
                 {difference}",
                guard.header().payload_offset,
            ));
        }
    }
}

fn read(heap: &LocalHeap, mut rng: Rng, mut counters: Counters) -> ! {
    let ids: Vec<ObjectId> = (0..KEYS).map(|key| id_of(&key_bytes(key))).collect();
    let mut reader = heap.reader().expect("a vacant lane");
    let mut predicted = Predicted::default();
    let mut held: Vec<Held<'_>> = Vec::new();
    let (mut last, mut last_gap) = (now(), MonoTime(0));
    loop {
        counters.report_periodically();
        if rng.below(2000) == 0 {
            // The next reader finds cells of this one's guards in its lanes.
            drop(reader);
            reader = heap.reader().expect("a vacant lane");
        }
        let key = rng.below(KEYS);
        match reader.get(&ids[key as usize], now()) {
            Lookup::Hit(guard) => {
                let acquired = now();
                let hit = Held { guard, key, acquired, until: acquired };
                hit.check(&mut predicted, "at the hit");
                counters.add("hits", 1);
                if rng.below(16) == 0 && hit.guard.verify() != Some(true) {
                    wrong(&format!("key {key} version {}: digests do not match", hit.guard.version()));
                }
                hold(&mut reader, hit, &mut held, &mut rng, &mut counters);
            }
            Lookup::Miss => counters.add("misses", 1),
            Lookup::Full => wrong("a reader with few guards is full"),
            Lookup::Closed => counters.add("closed", 1),
        }
        let time = now();
        if time.since(last) > GAP {
            last_gap = time;
        }
        last = time;
        let mut at = 0;
        while at < held.len() {
            if held[at].until > time {
                at += 1;
                continue;
            }
            let old = held.swap_remove(at);
            old.check(&mut predicted, "in a later check");
            counters.add("rechecks", 1);
            let (segment, slot) = old.guard.location();
            // Under a guard the slot can only be READY or DEAD in this version.
            if let Lookup::Miss = reader.get_at(segment, slot, old.guard.version(), now()) {
                counters.add("rechecks_dead", 1);
                if last_gap > old.acquired {
                    // The driver knows whether it caused this gap.
                    report(&format!("survived {} {} {}", std::process::id(), old.acquired.0, now().0));
                }
            }
        }
        if rng.percent(10) {
            std::thread::sleep(Duration::from_micros(300));
        }
    }
}

/// Keeps some of the hits for up to 200 ms, and clones some of those.
fn hold<'h>(
    reader: &mut Reader<'h>,
    mut hit: Held<'h>,
    held: &mut Vec<Held<'h>>,
    rng: &mut Rng,
    counters: &mut Counters,
) {
    if held.len() + 2 > GUARDS_MAX || rng.percent(40) {
        return;
    }
    let Held { key, acquired, .. } = hit;
    let mut until = || acquired.after(Duration::from_millis(rng.below(200)));
    let first_until = until();
    let second_until = until();
    if rng.percent(20) {
        match reader.clone_guard(&hit.guard) {
            Some(guard) => {
                counters.add("clones", 1);
                held.push(Held { guard, key, acquired, until: second_until });
            }
            None => counters.add("clones_refused", 1),
        }
    }
    hit.until = first_until;
    held.push(hit);
}

/// Decides which objects are killed: a few all the time, and many when space is scarce. The owner kills them, since
/// only the owner writes words.
fn reclaim(socket: &OwnedFd, mut rng: Rng, mut counters: Counters) -> ! {
    loop {
        counters.report_periodically();
        let scarce = matches!(call(socket, Request::Reclaim), Response::Free { percent } if percent < 3);
        for _ in 0..rng.between(1, if scarce { 100 } else { 4 }) {
            let request = Request::Kill { key: rng.below(KEYS), writing: rng.percent(10) };
            if call(socket, request) == Response::Done {
                counters.add("kills_requested", 1);
            }
        }
        std::thread::sleep(Duration::from_micros(rng.below(3000)));
    }
}
