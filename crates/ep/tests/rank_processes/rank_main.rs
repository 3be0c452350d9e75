//! Main functions of rank processes. A failed check is a panic, which ends the process with an error.

use std::hash::{DefaultHasher, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use moontide_ep::*;
use moontide_heap::HugePages;
use moontide_symmetric::{Rank, RankSet, World, WorldConfig, WorldShape};
use rustix::process::Signal;

use crate::processes::{Rng, Role, print_line};
use crate::reference::{Batch, ROUTES, Routes, compute_grouped, compute_in_place};

/// Timeout where every rank takes part: the machine may be busy.
const TIMEOUT: Duration = Duration::from_secs(60);
/// Time after which a rank is excluded in scenarios where ranks exit.
pub const DEADLINE: Duration = Duration::from_millis(1200);

const SMALL: ChannelConfig = ChannelConfig {
    ranks: 0,
    tokens_max: 6,
    hidden: 40,
    top_k: 4,
    experts_per_rank: 8,
    dispatch_dtype: Dtype::Bf16,
    combine_dtype: Dtype::Bf16,
    buffering: Buffering::Single,
    combine_mode: CombineMode::Pull,
};

pub fn run(role: &Role) {
    match role.scenario.as_str() {
        "sweep" => sweep(role),
        "overlapped" => overlapped(role),
        "two_channels" => two_channels(role),
        "same_bits" => same_bits(role),
        "killable" => killable(role),
        "stopped" => stopped(role),
        "soak" => soak(role),
        other => panic!("unknown scenario {other}"),
    }
}

/// Joins a world with space for channels of these shapes, one after the other, and opens them.
fn open(role: &Role, shapes: &[ChannelConfig], timeout: Duration) -> (Arc<World>, Vec<Channel>) {
    let bytes: u64 = shapes.iter().map(|shape| shape.bytes().unwrap()).sum();
    let config = WorldConfig {
        path: role.path.clone(),
        rank: Rank(role.rank),
        shape: WorldShape { ranks: role.ranks, bytes: bytes.next_multiple_of(4096) },
        huge: HugePages::Auto,
        timeout,
    };
    // SAFETY: all ranks are this program.
    let world = Arc::new(unsafe { World::join(&config) }.expect("join"));
    let mut offset = 0;
    let channels = shapes.iter().map(|&shape| {
        // SAFETY: channels are at consecutive offsets, and nothing else is in the regions.
        let mut channel = unsafe { Channel::open(&world, offset, shape, timeout) }.expect("open");
        channel.poison(true);
        offset += shape.bytes().unwrap();
        channel
    });
    let channels = channels.collect();
    (world, channels)
}

/// Runs all configurations: K from 1 to 8, all dtypes, pull and push, one buffer and two, and the size of a real model.
fn sweep(role: &Role) {
    let ranks = role.ranks as usize;
    let mut shapes: Vec<ChannelConfig> =
        (1..=8).map(|top_k| ChannelConfig { ranks, top_k, ..SMALL }).collect();
    let dtypes = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::Fp8];
    shapes.extend(dtypes.map(|dispatch_dtype| {
        let combine_dtype = if dispatch_dtype == Dtype::Fp8 { Dtype::Bf16 } else { dispatch_dtype };
        ChannelConfig {
            ranks,
            dispatch_dtype,
            combine_dtype,
            hidden: 300,
            combine_mode: CombineMode::Push,
            ..SMALL
        }
    }));
    shapes.push(ChannelConfig {
        ranks,
        buffering: Buffering::Double,
        experts_per_rank: 5,
        tokens_max: 1,
        ..SMALL
    });
    shapes.push(ChannelConfig { ranks, hidden: 7168, top_k: 8, tokens_max: 2, ..SMALL });
    let (_world, channels) = open(role, &shapes, TIMEOUT);
    let mut rng = Rng::new(role.seed ^ u64::from(role.rank) << 32);
    for mut channel in channels {
        let shape = *channel.shape();
        let steps = if shape.hidden > 1000 { 3 } else { 12 };
        for step in 0..steps {
            let routes = ROUTES[step % ROUTES.len()];
            // No tokens, the most tokens on all ranks, and numbers between.
            let count = match step {
                0 => 0,
                1 | 2 => shape.tokens_max,
                3 => {
                    if role.rank == 0 {
                        0
                    } else {
                        shape.tokens_max
                    }
                }
                _ => rng.below(shape.tokens_max + 1),
            };
            let batch = Batch::draw(&shape, count, routes, &mut rng);
            let report = match step % 2 {
                0 => in_place(&mut channel, &batch, TIMEOUT),
                _ => grouped(&mut channel, &batch),
            };
            assert_eq!(report.ranks, RankSet::first(ranks));
        }
    }
}

/// Runs a step with experts that read tokens in place; checks the results.
fn in_place(channel: &mut Channel, batch: &Batch, timeout: Duration) -> CombineReport {
    let (shape, me) = (*channel.shape(), channel.rank().0);
    let mut results = result_buffer(&shape, batch);
    let compute = compute_in_place(shape, me);
    let report = channel.moe_forward(batch.tokens(), &mut results, timeout, compute).expect("a step");
    check(&shape, batch, report, &results);
    report
}

/// Runs a step with experts on the grouped layout; checks the results.
fn grouped(channel: &mut Channel, batch: &Batch) -> CombineReport {
    let (shape, me) = (*channel.shape(), channel.rank().0);
    let rows = shape.experts_per_rank * shape.slots();
    let mut packed = vec![0xff; rows * shape.dispatch_dtype.row_bytes(shape.hidden)];
    let mut results = result_buffer(&shape, batch);
    let dispatching = channel.start_dispatch(batch.tokens()).expect("dispatch");
    let mut dispatched =
        dispatching.wait_packed(&mut packed, TIMEOUT).map_err(|timeout| timeout.error).expect("dispatch");
    compute_grouped(shape, me, &packed, &mut dispatched);
    let report = dispatched.combine(&mut results, TIMEOUT).expect("combine");
    check(&shape, batch, report, &results);
    report
}

fn result_buffer(shape: &ChannelConfig, batch: &Batch) -> Vec<u8> {
    vec![0xff; batch.count * shape.combine_dtype.row_bytes(shape.hidden)]
}

fn check(shape: &ChannelConfig, batch: &Batch, report: CombineReport, results: &[u8]) {
    let expected = batch.expected(shape, report);
    if results == expected {
        return;
    }
    let bytes = shape.combine_dtype.row_bytes(shape.hidden);
    let wrong = results.chunks(bytes).zip(expected.chunks(bytes)).position(|(one, other)| one != other);
    panic!("token {} of {} is wrong (ranks {}): {shape:?}", wrong.unwrap(), batch.count, report.ranks);
}

/// Two buffers: each iteration combines a step and dispatches the next in one phase.
fn overlapped(role: &Role) {
    let ranks = role.ranks as usize;
    let shapes = [CombineMode::Pull, CombineMode::Push].map(|combine_mode| ChannelConfig {
        ranks,
        buffering: Buffering::Double,
        combine_mode,
        ..SMALL
    });
    let (_world, channels) = open(role, &shapes, TIMEOUT);
    let mut rng = Rng::new(role.seed ^ u64::from(role.rank) << 32);
    for mut channel in channels {
        let shape = *channel.shape();
        let mut compute = compute_in_place(shape, role.rank);
        let batches: Vec<Batch> = (0..40)
            .map(|step| {
                let count = rng.below(shape.tokens_max + 1);
                Batch::draw(&shape, count, ROUTES[step % ROUTES.len()], &mut rng)
            })
            .collect();
        let mut dispatched = channel.dispatch(batches[0].tokens(), TIMEOUT).expect("dispatch");
        for (batch, next) in batches.iter().zip(&batches[1..]) {
            compute(&mut dispatched);
            random_delay(&mut rng);
            let mut results = result_buffer(&shape, batch);
            let overlapped = dispatched
                .start_combine_and_dispatch(next.tokens())
                .map_err(|(error, _)| error)
                .expect("combine and dispatch");
            let (report, next) =
                overlapped.sum_into(&mut results, TIMEOUT).map_err(|timeout| timeout.error).expect("sum");
            assert_eq!(report.ranks, RankSet::first(ranks));
            check(&shape, batch, report, &results);
            dispatched = next;
        }
        compute(&mut dispatched);
        let batch = batches.last().unwrap();
        let mut results = result_buffer(&shape, batch);
        let report = dispatched.combine(&mut results, TIMEOUT).expect("combine");
        check(&shape, batch, report, &results);
        // Ordinary steps afterwards.
        for batch in &batches[..5] {
            in_place(&mut channel, batch, TIMEOUT);
        }
    }
}

/// Two threads, a channel each, each at its own speed.
fn two_channels(role: &Role) {
    let shape = ChannelConfig { ranks: role.ranks as usize, ..SMALL };
    let (_world, channels) = open(role, &[shape, shape], TIMEOUT);
    std::thread::scope(|scope| {
        for (number, mut channel) in channels.into_iter().enumerate() {
            scope.spawn(move || {
                let mut rng = Rng::new(role.seed ^ u64::from(role.rank) << 32 ^ number as u64);
                for step in 0..[40, 130][number] {
                    let count = rng.below(shape.tokens_max + 1);
                    let batch = Batch::draw(&shape, count, ROUTES[step % ROUTES.len()], &mut rng);
                    random_delay(&mut rng);
                    in_place(&mut channel, &batch, TIMEOUT);
                }
            });
        }
    });
}

/// The same tokens with different delays, which `extra` determines. Prints a digest of all results.
fn same_bits(role: &Role) {
    let shape = ChannelConfig { ranks: role.ranks as usize, top_k: 8, hidden: 500, ..SMALL };
    let (_world, mut channels) = open(role, &[shape], TIMEOUT);
    let channel = &mut channels[0];
    let mut rng = Rng::new(role.seed ^ u64::from(role.rank) << 32);
    let mut delays = Rng::new(role.extra ^ u64::from(role.rank) << 32);
    let mut digest = DefaultHasher::new();
    for _ in 0..25 {
        let batch = Batch::draw(&shape, shape.tokens_max, Routes::Any, &mut rng);
        let mut results = result_buffer(&shape, &batch);
        random_delay(&mut delays);
        let compute = compute_in_place(shape, role.rank);
        channel.moe_forward(batch.tokens(), &mut results, TIMEOUT, compute).expect("a step");
        digest.write(&results);
    }
    print_line(&format!("digest {:x}", digest.finish()));
}

/// Delays this rank for a short time, mostly not at all.
fn random_delay(rng: &mut Rng) {
    match rng.below(20) {
        0 => std::thread::sleep(Duration::from_micros(rng.below(2000) as u64)),
        1 => std::thread::yield_now(),
        _ => {}
    }
}

/// Points at which a rank kills itself.
pub const KILL_POINTS: [&str; 6] = ["idle", "dispatching", "dispatched", "computed", "combining", "combined"];
/// Steps before a rank kills itself.
const STEPS_BEFORE_KILL: usize = 5;
/// In place of an index of [`KILL_POINTS`]: the rank does not kill itself.
pub const NO_KILL: u64 = 99;

/// `extra`: the index in [`KILL_POINTS`] at which this process kills itself, and above the lowest byte how often others
/// will be killed and restarted. Ends after twenty steps with all ranks, once that has happened.
fn killable(role: &Role) {
    let shape = ChannelConfig { ranks: role.ranks as usize, ..SMALL };
    let all = RankSet::first(shape.ranks);
    let (kill_point, losses_due) = (KILL_POINTS.get((role.extra & 0xff) as usize), role.extra >> 8);
    let (world, mut channels) = open(role, &[shape], TIMEOUT);
    let channel = &mut channels[0];
    let mut rng = Rng::new(role.seed ^ u64::from(role.rank) << 32 ^ world.generation().0 << 48);
    let (mut whole_steps, mut losses, mut step) = (0, 0, 0);
    let mut members = all;
    let no_restart = role.extra & 0xff == NO_RESTART;
    // All survivors end with the same step: the others would miss a rank that ended earlier.
    while if no_restart { step < NO_RESTART_STEPS } else { losses < losses_due || whole_steps < 20 } {
        let count = rng.below(shape.tokens_max + 1);
        let batch = Batch::draw(&shape, count, ROUTES[step % ROUTES.len()], &mut rng);
        let kill_at = |point| {
            if kill_point == Some(&point) && step == STEPS_BEFORE_KILL {
                let _ = rustix::process::kill_process(rustix::process::getpid(), Signal::KILL);
            }
        };
        kill_at("idle");
        let began = Instant::now();
        let mut dispatching = channel.start_dispatch(batch.tokens()).expect("dispatch");
        kill_at("dispatching");
        let mut dispatched = loop {
            match dispatching.wait(DEADLINE) {
                Ok(dispatched) => break dispatched,
                Err(timeout) => dispatching = exclude_missing(timeout),
            }
        };
        kill_at("dispatched");
        compute_in_place(shape, role.rank)(&mut dispatched);
        kill_at("computed");
        let mut results = result_buffer(&shape, &batch);
        let mut combining = dispatched.start_combine();
        kill_at("combining");
        let report = loop {
            match combining.finish(&mut results, DEADLINE) {
                Ok(report) => break report,
                Err(timeout) => combining = exclude_missing(timeout),
            }
        };
        kill_at("combined");
        check(&shape, &batch, report, &results);
        let lost = members.without(report.ranks);
        if !lost.is_empty() {
            print_line(&format!("lost {} {}", lost.bits(), began.elapsed().as_millis()));
            losses += 1;
        }
        members = report.ranks;
        whole_steps = if members == all { whole_steps + 1 } else { 0 };
        if step == 0 {
            // Only now: a rank that is killed before a step with all ranks is late for the others, but not lost.
            print_line(&format!("joined {}", world.generation()));
        }
        step += 1;
    }
    assert!(losses >= losses_due);
}

/// In place of an index of [`KILL_POINTS`]: killed ranks are not restarted.
pub const NO_RESTART: u64 = 98;
/// Steps of the survivors; the driver kills in one of the first.
const NO_RESTART_STEPS: usize = 3000;

/// Prints the missing ranks, and excludes them.
fn exclude_missing<S: StepStage>(timeout: StepTimeout<S>) -> S {
    assert!(!timeout.missing().is_empty(), "{}", timeout.error);
    print_line(&format!("late {}", timeout.missing().bits()));
    timeout.exclude_missing()
}

/// A rank that is stopped for longer than the others wait gets an error, rejoins, and continues.
fn stopped(role: &Role) {
    let shape = ChannelConfig { ranks: role.ranks as usize, ..SMALL };
    let all = RankSet::first(shape.ranks);
    let (_world, mut channels) = open(role, &[shape], TIMEOUT);
    let channel = &mut channels[0];
    channel.set_auto_exclude(true);
    print_line("joined");
    let mut rng = Rng::new(role.seed ^ u64::from(role.rank) << 32);
    let (mut whole_steps, mut rejoined, mut lost) = (0, false, false);
    while !(lost && whole_steps >= 20) {
        let count = rng.below(shape.tokens_max + 1);
        let batch = Batch::draw(&shape, count, Routes::Any, &mut rng);
        let mut results = result_buffer(&shape, &batch);
        let compute = compute_in_place(shape, role.rank);
        match channel.moe_forward(batch.tokens(), &mut results, DEADLINE, compute) {
            Ok(report) => {
                check(&shape, &batch, report, &results);
                lost |= report.ranks != all;
                whole_steps = if report.ranks == all { whole_steps + 1 } else { 0 };
            }
            Err(error) => {
                assert!(is_excluded(error), "{error}");
                print_line("excluded");
                channel.rejoin(TIMEOUT).expect("rejoin");
                (rejoined, lost, whole_steps) = (true, true, 0);
            }
        }
        // Slow enough for the driver's stop to fall between steps.
        std::thread::sleep(Duration::from_micros(200));
    }
    print_line(&format!("done {rejoined}"));
}

fn is_excluded(error: StepError) -> bool {
    matches!(
        error,
        StepError::Dispatch(DispatchError::Excluded)
            | StepError::Wait(moontide_symmetric::WaitError::Excluded)
    )
}

/// Runs `extra` steps with random delays, while the driver stops ranks at intervals.
fn soak(role: &Role) {
    let shape = ChannelConfig { ranks: role.ranks as usize, tokens_max: 3, hidden: 16, ..SMALL };
    let overlapping = ChannelConfig { buffering: Buffering::Double, ..shape };
    let (_world, mut channels) = open(role, &[shape, overlapping], TIMEOUT);
    print_line("joined");
    let all = RankSet::first(shape.ranks);
    let mut rng = Rng::new(role.seed ^ u64::from(role.rank) << 32);
    for step in 0..role.extra as usize {
        let count = rng.below(shape.tokens_max + 1);
        let batch = Batch::draw(&shape, count, ROUTES[step % ROUTES.len()], &mut rng);
        random_delay(&mut rng);
        let report = in_place(&mut channels[step % 2], &batch, TIMEOUT);
        assert_eq!(report.ranks, all);
    }
}
