//! Writers, readers and the reclaimer: the processes that are killed and stopped. One thread each.
//!
//! Any of them may end or stand still between any two instructions; none of them knows. A wrong byte is said to
//! the conductor, with everything known about it, and ends the process with [`WRONG`].

use std::collections::BTreeMap;
use std::fmt::Write;
use std::io::ErrorKind;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use moontide_heap::{DoorError, Guard, LocalHeap, Lookup, Reader, join};
use moontide_types::{MonoTime, ObjectId};

use crate::common::{id_of, now};
use crate::payload::{Dice, Predicted};
use crate::wire::{Answer, KEYS, Kind, Placed, Request, ask, key_bytes, say};

/// Exit code of a process that saw a wrong byte.
pub const WRONG: i32 = 86;

/// A gap in a reader's own time that is longer than this may have been a SIGSTOP.
const GAP: Duration = Duration::from_millis(40);

/// Guards that a reader holds at most.
const GUARDS_MAX: usize = 50;

pub fn run(kind: Kind, door: &Path, seed: u64) -> ! {
    let mut tally = Tally::default();
    let (heap, socket) = enter(door, &mut tally);
    say(&format!("joined {}", std::process::id()));
    let dice = Dice::new(seed);
    match kind {
        Kind::Writer => write(&heap, &socket, dice, tally),
        Kind::Reader => read(&heap, dice, tally),
        Kind::Reclaimer => reclaim(&socket, dice, tally),
    }
}

/// What a client hears of a node that did not wait for it.
const CLOSED: [ErrorKind; 3] = [ErrorKind::UnexpectedEof, ErrorKind::BrokenPipe, ErrorKind::ConnectionReset];

fn enter(door: &Path, tally: &mut Tally) -> (LocalHeap, OwnedFd) {
    for _ in 0..20 {
        // SAFETY: the owner and all its clients are this program, which keeps to the protocol; with the planted
        // bug it does not, and reads what it should not, which is the point.
        match unsafe { join(door, Duration::from_secs(5), u64::MAX) } {
            Ok(joined) => return joined,
            // Stopped on the doorstep for longer than the node waits for a greeting.
            Err(DoorError::System { source, .. }) if CLOSED.contains(&source.kind()) => {
                tally.add("joins_interrupted", 1);
            }
            Err(error) => wrong(&format!("cannot join: {error}")),
        }
    }
    wrong("interrupted 20 times while joining")
}

fn wrong(text: &str) -> ! {
    let text: String = text.chars().filter(|&c| c != '\n').take(3000).collect();
    say(&format!("wrong {} {text}", std::process::id()));
    std::process::exit(WRONG)
}

/// Counts that reach the conductor every now and then; a killed process takes its last ones along.
#[derive(Default)]
struct Tally {
    counts: BTreeMap<&'static str, u64>,
    said: Option<Instant>,
}

impl Tally {
    fn add(&mut self, name: &'static str, count: u64) {
        *self.counts.entry(name).or_default() += count;
    }

    fn say_sometimes(&mut self) {
        let now = Instant::now();
        if self.said.is_some_and(|said| now - said < Duration::from_millis(20)) {
            return;
        }
        self.said = Some(now);
        let mut line = "tally".to_string();
        for (name, count) in std::mem::take(&mut self.counts) {
            write!(line, " {name}={count}").expect("a string");
        }
        say(&line);
    }
}

/// Stands still, mostly not at all, rarely for longer than a reservation lasts.
fn dawdle(dice: &mut Dice) {
    match dice.below(1000) {
        0..8 => std::thread::sleep(Duration::from_millis(dice.between(1, 30))),
        8 => std::thread::sleep(Duration::from_millis(dice.between(320, 500))),
        _ => {}
    }
}

fn write(heap: &LocalHeap, socket: &OwnedFd, mut dice: Dice, mut tally: Tally) -> ! {
    let mut cells = heap.reader().expect("a group of cells");
    let mut predicted = Predicted::default();
    loop {
        tally.say_sometimes();
        let (key, len) = (dice.below(KEYS), dice.payload_len());
        let placed = match ask(socket, Request::Begin { key, len }) {
            Answer::Granted(placed) => placed,
            Answer::NotNow => {
                tally.add("begins_refused", 1);
                std::thread::sleep(Duration::from_micros(500));
                continue;
            }
            other => wrong(&format!("begin of key {key} was answered {other:?}")),
        };
        dawdle(&mut dice);
        let Placed { segment, slot, epoch } = placed;
        let Some(mut claim) = cells.claim(segment, slot, epoch) else {
            tally.add("claims_refused", 1);
            continue;
        };
        dawdle(&mut dice);
        if dice.percent(2) {
            drop(claim);
            if ask(socket, Request::Abort(placed)) != Answer::Done {
                wrong(&format!("abort of {placed:?} was refused"));
            }
            tally.add("aborts", 1);
            continue;
        }
        let root = claim.fill(predicted.bytes(key, epoch, len as usize));
        dawdle(&mut dice);
        drop(claim);
        dawdle(&mut dice);
        match ask(socket, Request::Commit { placed, root }) {
            Answer::Done => tally.add("commits", 1),
            Answer::Late => tally.add("commits_late", 1),
            other => wrong(&format!("commit of {placed:?} was answered {other:?}")),
        }
    }
}

/// A guard that is looked at again later.
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
        let complaint = if guard.header().object_len != bytes.len() as u64 {
            Some(format!("{} bytes of an object of {}", bytes.len(), guard.header().object_len))
        } else {
            predicted.judge(key, epoch, bytes)
        };
        if let Some(complaint) = complaint {
            let (segment, slot) = guard.place();
            let age = now().since(self.acquired);
            wrong(&format!(
                "{when}, key {key} version {epoch} in slot {slot} of segment {segment} at {:#x}, guard {age:?} old: \
                 {complaint}",
                guard.header().payload_offset,
            ));
        }
    }
}

fn read(heap: &LocalHeap, mut dice: Dice, mut tally: Tally) -> ! {
    let ids: Vec<ObjectId> = (0..KEYS).map(|key| id_of(&key_bytes(key))).collect();
    let mut reader = heap.reader().expect("a group of cells");
    let mut predicted = Predicted::default();
    let mut held: Vec<Held<'_>> = Vec::new();
    let (mut last, mut last_gap) = (now(), MonoTime(0));
    loop {
        tally.say_sometimes();
        if dice.below(2000) == 0 {
            // The next reader finds cells of this one's guards in its groups.
            drop(reader);
            reader = heap.reader().expect("groups come back");
        }
        let key = dice.below(KEYS);
        match reader.get(&ids[key as usize], now()) {
            Lookup::Hit(guard) => {
                let acquired = now();
                let hit = Held { guard, key, acquired, until: acquired };
                hit.check(&mut predicted, "at the hit");
                tally.add("hits", 1);
                if dice.below(16) == 0 && hit.guard.verify() != Some(true) {
                    wrong(&format!("key {key} version {}: the digests do not match", hit.guard.version()));
                }
                hold(&mut reader, hit, &mut held, &mut dice, &mut tally);
            }
            Lookup::Miss => tally.add("misses", 1),
            Lookup::Full => wrong("a reader with few guards is full"),
            Lookup::Closed => tally.add("closed", 1),
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
            old.check(&mut predicted, "under an old guard");
            tally.add("rechecks", 1);
            let (segment, slot) = old.guard.place();
            // Under a guard the slot cannot be anything but READY or DEAD in this version.
            if let Lookup::Miss = reader.get_at(segment, slot, old.guard.version(), now()) {
                tally.add("rechecks_dead", 1);
                if last_gap > old.acquired {
                    // The conductor knows whether this gap was its doing.
                    say(&format!("survived {} {} {}", std::process::id(), old.acquired.0, now().0));
                }
            }
        }
        if dice.percent(10) {
            std::thread::sleep(Duration::from_micros(300));
        }
    }
}

/// Keeps some of the hits for up to 200 ms, some of those twice.
fn hold<'h>(
    reader: &mut Reader<'h>,
    mut hit: Held<'h>,
    held: &mut Vec<Held<'h>>,
    dice: &mut Dice,
    tally: &mut Tally,
) {
    if held.len() + 2 > GUARDS_MAX || dice.percent(40) {
        return;
    }
    let Held { key, acquired, .. } = hit;
    let mut until = || acquired.after(Duration::from_millis(dice.below(200)));
    let first_until = until();
    let second_until = until();
    if dice.percent(20) {
        match reader.clone_guard(&hit.guard) {
            Some(guard) => {
                tally.add("clones", 1);
                held.push(Held { guard, key, acquired, until: second_until });
            }
            None => tally.add("clones_refused", 1),
        }
    }
    hit.until = first_until;
    held.push(hit);
}

/// Decides what dies: a trickle always, and as much as it takes when room is scarce. The owner does the killing,
/// since only the owner writes words.
fn reclaim(socket: &OwnedFd, mut dice: Dice, mut tally: Tally) -> ! {
    loop {
        tally.say_sometimes();
        let scarce = matches!(ask(socket, Request::Reclaim), Answer::Room { percent } if percent < 3);
        for _ in 0..dice.between(1, if scarce { 100 } else { 4 }) {
            let request = Request::Kill { key: dice.below(KEYS), writing: dice.percent(10) };
            if ask(socket, request) == Answer::Done {
                tally.add("kills_ordered", 1);
            }
        }
        std::thread::sleep(Duration::from_micros(dice.below(3000)));
    }
}
