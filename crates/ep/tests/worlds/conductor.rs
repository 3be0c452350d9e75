//! What the ranks of each test are told, and what is done to them.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::scenes::{DEADLINE, DEATHS, IMMORTAL, LONELY};
use crate::troupe::{Dice, Said, Troupe, seed};

/// For a whole test: CI machines are slow, hangs are longer.
const WITHIN: Duration = Duration::from_secs(120);

fn is_full() -> bool {
    std::env::var("MOONTIDE_EP").is_ok_and(|form| form == "full")
}

pub fn sweep(ranks: u32) {
    Troupe::start("sweep", ranks, seed(), |_| 0).finish(WITHIN);
}

pub fn crossing() {
    Troupe::start("crossing", 4, seed(), |_| 0).finish(WITHIN);
}

pub fn two_channels() {
    Troupe::start("two_channels", 3, seed(), |_| 0).finish(WITHIN);
}

pub fn same_bits() {
    let seed = seed();
    let mut digests = HashSet::new();
    for delays in 0..3 {
        let lines = Troupe::start("same_bits", 4, seed, |_| delays).finish(WITHIN);
        assert!(lines.iter().all(|lines| lines.len() == 1), "one digest each: {lines:?}");
        digests.insert(lines);
    }
    assert_eq!(digests.len(), 1, "seed {seed}: {digests:?}");
}

/// What is known of a rank's death.
struct Loss {
    /// Who reported it as late, before anybody had excluded it.
    reports: usize,
    /// The longest that a rank needed for the step in which it lost it.
    longest: Duration,
}

/// Listens until every survivor has lost `victim`.
fn wait_for_loss(troupe: &Troupe, ranks: u32, victim: u32) -> Loss {
    let mut loss = Loss { reports: 0, longest: Duration::ZERO };
    let mut lost_by = HashSet::new();
    let only = (1u64 << victim).to_string();
    while lost_by.len() + 1 < ranks as usize {
        let Said { rank, line } = troupe.listen(WITHIN);
        let Some(line) = line else {
            assert_eq!(rank, victim, "seed {}: rank {rank} ended", troupe.seed);
            continue;
        };
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["late", ranks] => {
                assert_eq!(ranks, only, "seed {}: rank {rank} blames others", troupe.seed);
                loss.reports += 1;
            }
            ["lost", ranks, millis] => {
                assert_eq!(ranks, only, "seed {}: rank {rank} lost others", troupe.seed);
                lost_by.insert(rank);
                loss.longest = loss.longest.max(Duration::from_millis(millis.parse().unwrap()));
            }
            _ => {}
        }
    }
    loss
}

/// Listens until `rank` has joined, and returns as which incarnation.
fn wait_for_join(troupe: &Troupe, rank: u32) -> u64 {
    loop {
        let said = troupe.listen(WITHIN);
        let line = said.line.filter(|_| said.rank == rank).unwrap_or_default();
        if let Some(generation) = line.strip_prefix("joined ") {
            return generation.parse().unwrap();
        }
    }
}

/// Two waits of a step may each run into the deadline; the rest is for a busy machine.
fn check_loss(loss: &Loss, troupe: &Troupe, place: &str) {
    assert!(loss.reports > 0, "seed {}: nobody reported the death in {place}", troupe.seed);
    let most = DEADLINE * 2 + Duration::from_secs(2);
    assert!(loss.longest < most, "seed {}: {:?} for a death in {place}", troupe.seed, loss.longest);
}

pub fn killed_in_every_phase() {
    let worlds: &[u32] = if is_full() { &[2, 4, 8] } else { &[2, 4] };
    for &ranks in worlds {
        let victim = ranks - 1;
        let losses = (DEATHS.len() as u64) << 8;
        let extra = |rank| if rank == victim { losses } else { losses | IMMORTAL };
        let mut troupe = Troupe::start("mortal", ranks, seed(), extra);
        assert_eq!(wait_for_join(&troupe, victim), 1);
        for (death, place) in DEATHS.iter().enumerate() {
            let loss = wait_for_loss(&troupe, ranks, victim);
            troupe.wait_killed(victim);
            check_loss(&loss, &troupe, place);
            // The next incarnation dies at the next place, the last one not at all; it sees no loss.
            let next = if death + 1 < DEATHS.len() { death as u64 + 1 } else { IMMORTAL };
            troupe.enter(victim, next);
            assert_eq!(wait_for_join(&troupe, victim), death as u64 + 2, "a new generation");
        }
        troupe.finish(WITHIN);
    }
}

pub fn killed_at_any_moment() {
    let (ranks, victim) = (3, 1);
    let kills = if is_full() { 200 } else { 4 };
    let mut dice = Dice(seed());
    let extra = |_| kills << 8 | IMMORTAL;
    let mut troupe = Troupe::start("mortal", ranks, dice.next(), extra);
    wait_for_join(&troupe, victim);
    for kill in 0..kills {
        std::thread::sleep(Duration::from_micros(dice.below(30_000) as u64));
        troupe.signal(victim, Signal::KILL);
        let loss = wait_for_loss(&troupe, ranks, victim);
        troupe.wait_killed(victim);
        check_loss(&loss, &troupe, "any place");
        // It has seen none of the losses so far.
        let due = if kill + 1 < kills { 1 } else { 0 };
        troupe.enter(victim, due << 8 | IMMORTAL);
        assert_eq!(wait_for_join(&troupe, victim), kill + 2);
    }
    troupe.finish(WITHIN);
}

pub fn rank_0_killed() {
    let mut troupe = Troupe::start("mortal", 3, seed(), |_| 1 << 8 | LONELY);
    wait_for_join(&troupe, 0);
    std::thread::sleep(Duration::from_millis(20));
    troupe.signal(0, Signal::KILL);
    let loss = wait_for_loss(&troupe, 3, 0);
    troupe.wait_killed(0);
    check_loss(&loss, &troupe, "rank 0");
    troupe.finish(WITHIN);
}

pub fn stopped() {
    let troupe = Troupe::start("stopped", 3, seed(), |_| 0);
    let mut joined = 0;
    while joined < 3 {
        joined += u32::from(troupe.listen(WITHIN).line.as_deref() == Some("joined"));
    }
    troupe.signal(2, Signal::STOP);
    std::thread::sleep(DEADLINE * 2);
    troupe.signal(2, Signal::CONT);
    let lines = troupe.finish(WITHIN);
    assert_eq!(lines[2], ["excluded", "done true"], "it found out, and came back");
    for lines in &lines[..2] {
        assert_eq!(lines, &["done false"]);
    }
}

pub fn soak() {
    let steps = if is_full() { 100_000 } else { 400 };
    let ranks = 4;
    let troupe = Troupe::start("soak", ranks, seed(), |_| steps);
    let mut dice = Dice(troupe.seed);
    let mut open = ranks;
    let mut stops = 0;
    let began = Instant::now();
    let mut joined = 0;
    while open > 0 {
        match troupe.try_listen(Duration::from_millis(dice.below(40) as u64)) {
            Some(Said { line: None, .. }) => open -= 1,
            Some(_) => joined += 1,
            // Stopped while it joins, a rank would be missed at the door; that is another matter.
            None if joined == ranks => {
                let rank = dice.below(ranks as usize) as u32;
                troupe.signal(rank, Signal::STOP);
                std::thread::sleep(Duration::from_millis(dice.below(30) as u64));
                troupe.signal(rank, Signal::CONT);
                stops += 1;
            }
            None => {}
        }
        assert!(began.elapsed() < Duration::from_secs(steps / 20 + 120), "seed {}", troupe.seed);
    }
    eprintln!("{steps} steps, {stops} stops, {:?}", began.elapsed());
    troupe.finish(WITHIN);
}
