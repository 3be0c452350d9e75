//! Drivers of the tests: parameters of the ranks, and the faults injected into them.

use std::collections::HashSet;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::processes::{RankOutput, RankProcesses, Rng, seed};
use crate::rank_main::{DEADLINE, KILL_POINTS, NO_KILL, NO_RESTART};

/// Time limit of a whole test: CI machines are slow, hangs are longer.
const WITHIN: Duration = Duration::from_secs(120);

fn is_full() -> bool {
    std::env::var("MOONTIDE_TESTS").is_ok_and(|form| form == "full")
}

pub fn sweep(ranks: u32) {
    RankProcesses::start("sweep", ranks, seed(), |_| 0).finish(WITHIN);
}

pub fn overlapped() {
    RankProcesses::start("overlapped", 4, seed(), |_| 0).finish(WITHIN);
}

pub fn two_channels() {
    RankProcesses::start("two_channels", 3, seed(), |_| 0).finish(WITHIN);
}

pub fn same_bits() {
    let seed = seed();
    let mut digests = HashSet::new();
    for delays in 0..3 {
        let lines = RankProcesses::start("same_bits", 4, seed, |_| delays).finish(WITHIN);
        assert!(lines.iter().all(|lines| lines.len() == 1), "one digest per rank: {lines:?}");
        digests.insert(lines);
    }
    assert_eq!(digests.len(), 1, "seed {seed}: {digests:?}");
}

/// Observed loss of a rank.
struct Loss {
    /// Number of ranks that reported it as late, before it was excluded.
    reports: usize,
    /// Longest duration of the step in which a rank lost it.
    longest: Duration,
}

/// Reads output until every survivor has lost `victim`.
fn wait_for_loss(processes: &RankProcesses, ranks: u32, victim: u32) -> Loss {
    let mut loss = Loss { reports: 0, longest: Duration::ZERO };
    let mut lost_by = HashSet::new();
    let only_victim = (1u64 << victim).to_string();
    while lost_by.len() + 1 < ranks as usize {
        let RankOutput { rank, line } = processes.next_output(WITHIN);
        let Some(line) = line else {
            assert_eq!(rank, victim, "seed {}: rank {rank} exited", processes.seed);
            continue;
        };
        match line.split(' ').collect::<Vec<_>>()[..] {
            ["late", ranks] => {
                assert_eq!(ranks, only_victim, "seed {}: rank {rank} reports other ranks", processes.seed);
                loss.reports += 1;
            }
            ["lost", ranks, millis] => {
                assert_eq!(ranks, only_victim, "seed {}: rank {rank} lost other ranks", processes.seed);
                lost_by.insert(rank);
                loss.longest = loss.longest.max(Duration::from_millis(millis.parse().unwrap()));
            }
            _ => {}
        }
    }
    loss
}

/// Reads output until `rank` has joined, and returns its generation.
fn wait_for_join(processes: &RankProcesses, rank: u32) -> u64 {
    loop {
        let output = processes.next_output(WITHIN);
        let line = output.line.filter(|_| output.rank == rank).unwrap_or_default();
        if let Some(generation) = line.strip_prefix("joined ") {
            return generation.parse().unwrap();
        }
    }
}

/// Checks a loss. Two waits of a step may each run into the deadline; the rest is for a busy machine.
fn check_loss(loss: &Loss, processes: &RankProcesses, point: &str) {
    assert!(loss.reports > 0, "seed {}: no rank reported the kill at {point}", processes.seed);
    let most = DEADLINE * 2 + Duration::from_secs(2);
    assert!(loss.longest < most, "seed {}: {:?} for a kill at {point}", processes.seed, loss.longest);
}

pub fn killed_in_every_phase() {
    let worlds: &[u32] = if is_full() { &[2, 4, 8] } else { &[2, 4] };
    for &ranks in worlds {
        let victim = ranks - 1;
        let losses = (KILL_POINTS.len() as u64) << 8;
        let extra = |rank| if rank == victim { losses } else { losses | NO_KILL };
        let mut processes = RankProcesses::start("killable", ranks, seed(), extra);
        assert_eq!(wait_for_join(&processes, victim), 1);
        for (index, point) in KILL_POINTS.iter().enumerate() {
            let loss = wait_for_loss(&processes, ranks, victim);
            processes.wait_killed(victim);
            check_loss(&loss, &processes, point);
            // The next process is killed at the next point, the last one not at all; it sees no loss.
            let next = if index + 1 < KILL_POINTS.len() { index as u64 + 1 } else { NO_KILL };
            processes.spawn(victim, next);
            assert_eq!(wait_for_join(&processes, victim), index as u64 + 2, "a new generation");
        }
        processes.finish(WITHIN);
    }
}

pub fn killed_at_any_moment() {
    let (ranks, victim) = (3, 1);
    let kills = if is_full() { 200 } else { 4 };
    let mut rng = Rng::new(seed());
    let extra = |_| kills << 8 | NO_KILL;
    let mut processes = RankProcesses::start("killable", ranks, rng.next(), extra);
    wait_for_join(&processes, victim);
    for kill in 0..kills {
        std::thread::sleep(Duration::from_micros(rng.below(30_000) as u64));
        processes.signal(victim, Signal::KILL);
        let loss = wait_for_loss(&processes, ranks, victim);
        processes.wait_killed(victim);
        check_loss(&loss, &processes, "a random point");
        // The new process has seen none of the losses so far.
        let due = if kill + 1 < kills { 1 } else { 0 };
        processes.spawn(victim, due << 8 | NO_KILL);
        assert_eq!(wait_for_join(&processes, victim), kill + 2);
    }
    processes.finish(WITHIN);
}

pub fn rank_0_killed() {
    let mut processes = RankProcesses::start("killable", 3, seed(), |_| 1 << 8 | NO_RESTART);
    wait_for_join(&processes, 0);
    std::thread::sleep(Duration::from_millis(20));
    processes.signal(0, Signal::KILL);
    let loss = wait_for_loss(&processes, 3, 0);
    processes.wait_killed(0);
    check_loss(&loss, &processes, "rank 0");
    processes.finish(WITHIN);
}

pub fn stopped() {
    let processes = RankProcesses::start("stopped", 3, seed(), |_| 0);
    let mut joined = 0;
    while joined < 3 {
        joined += u32::from(processes.next_output(WITHIN).line.as_deref() == Some("joined"));
    }
    processes.signal(2, Signal::STOP);
    std::thread::sleep(DEADLINE * 2);
    processes.signal(2, Signal::CONT);
    let lines = processes.finish(WITHIN);
    assert_eq!(lines[2], ["excluded", "done true"], "it was excluded, and rejoined");
    for lines in &lines[..2] {
        assert_eq!(lines, &["done false"]);
    }
}

pub fn soak() {
    let steps = if is_full() { 100_000 } else { 400 };
    let ranks = 4;
    let processes = RankProcesses::start("soak", ranks, seed(), |_| steps);
    let mut rng = Rng::new(processes.seed);
    let mut running = ranks;
    let mut stops = 0;
    let began = Instant::now();
    let mut joined = 0;
    while running > 0 {
        match processes.try_next_output(Duration::from_millis(rng.below(40) as u64)) {
            Some(RankOutput { line: None, .. }) => running -= 1,
            Some(_) => joined += 1,
            // Not while ranks join: a rank stopped then would be missing from the join.
            None if joined == ranks => {
                let rank = rng.below(ranks as usize) as u32;
                processes.signal(rank, Signal::STOP);
                std::thread::sleep(Duration::from_millis(rng.below(30) as u64));
                processes.signal(rank, Signal::CONT);
                stops += 1;
            }
            None => {}
        }
        assert!(began.elapsed() < Duration::from_secs(steps / 20 + 120), "seed {}", processes.seed);
    }
    eprintln!("{steps} steps, {stops} stops, {:?}", began.elapsed());
    processes.finish(WITHIN);
}
