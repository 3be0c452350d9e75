//! What a rank process does. A check that fails is a panic, which ends it with an error.

use std::hash::{DefaultHasher, Hasher};
use std::sync::Arc;
use std::time::{Duration, Instant};

use moontide_ep::*;
use moontide_heap::{HugePages, Rank, RankSet, World, WorldConfig, WorldShape};
use rustix::process::Signal;

use crate::reference::{Batch, ROUTES, Routes, compute_grouped, compute_in_place};
use crate::troupe::{Dice, Role, say};

/// For what must happen: a machine may be busy.
const PATIENCE: Duration = Duration::from_secs(60);
/// After which a rank is given up where ranks die.
pub const DEADLINE: Duration = Duration::from_millis(1200);

const SMALL: Shape = Shape {
    ranks: 0,
    tokens_max: 6,
    hidden: 40,
    top_k: 4,
    experts_per_rank: 8,
    send: Dtype::Bf16,
    back: Dtype::Bf16,
    buffers: Buffers::One,
    returns: Returns::Pull,
};

pub fn play(role: &Role) {
    match role.scene.as_str() {
        "sweep" => sweep(role),
        "crossing" => crossing(role),
        "two_channels" => two_channels(role),
        "same_bits" => same_bits(role),
        "mortal" => mortal(role),
        "stopped" => stopped(role),
        "soak" => soak(role),
        other => panic!("no scene {other}"),
    }
}

/// Joins a world that has room for channels of these shapes, one after the other, and opens them.
fn open(role: &Role, shapes: &[Shape], timeout: Duration) -> (Arc<World>, Vec<Channel>) {
    let bytes: u64 = shapes.iter().map(|shape| shape.bytes().unwrap()).sum();
    let config = WorldConfig {
        path: role.path.clone(),
        rank: Rank(role.rank),
        shape: WorldShape { ranks: role.ranks, bytes: bytes.next_multiple_of(4096) },
        huge: HugePages::IfAllowed,
        timeout,
    };
    // SAFETY: all ranks are this program.
    let world = Arc::new(unsafe { World::join(&config) }.expect("join"));
    let mut offset = 0;
    let channels = shapes.iter().map(|&shape| {
        // SAFETY: channels lie one behind the other, and nothing else does.
        let mut channel = unsafe { Channel::open(&world, offset, shape, timeout) }.expect("open");
        channel.poison(true);
        offset += shape.bytes().unwrap();
        channel
    });
    let channels = channels.collect();
    (world, channels)
}

/// Every shape: K from 1 to 8, all dtypes, pull and push, one buffer and two, and the size of a real model.
fn sweep(role: &Role) {
    let ranks = role.ranks as usize;
    let mut shapes: Vec<Shape> = (1..=8).map(|top_k| Shape { ranks, top_k, ..SMALL }).collect();
    let dtypes = [Dtype::F32, Dtype::F16, Dtype::Bf16, Dtype::Fp8];
    shapes.extend(dtypes.map(|send| {
        let back = if send == Dtype::Fp8 { Dtype::Bf16 } else { send };
        Shape { ranks, send, back, hidden: 300, returns: Returns::Push, ..SMALL }
    }));
    shapes.push(Shape { ranks, buffers: Buffers::Two, experts_per_rank: 5, tokens_max: 1, ..SMALL });
    shapes.push(Shape { ranks, hidden: 7168, top_k: 8, tokens_max: 2, ..SMALL });
    let (_world, channels) = open(role, &shapes, PATIENCE);
    let mut dice = Dice(role.seed ^ u64::from(role.rank) << 32);
    for mut channel in channels {
        let shape = *channel.shape();
        let steps = if shape.hidden > 1000 { 3 } else { 12 };
        for step in 0..steps {
            let routes = ROUTES[step % ROUTES.len()];
            // Nobody, everybody at the limit, and anything between.
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
                _ => dice.below(shape.tokens_max + 1),
            };
            let batch = Batch::draw(&shape, count, routes, &mut dice);
            let summed = match step % 2 {
                0 => in_place(&mut channel, &batch, PATIENCE),
                _ => grouped(&mut channel, &batch),
            };
            assert_eq!(summed.ranks, RankSet::first(ranks));
        }
    }
}

/// A step with experts in place; checks the results.
fn in_place(channel: &mut Channel, batch: &Batch, timeout: Duration) -> Summed {
    let (shape, me) = (*channel.shape(), channel.rank().0);
    let mut results = room(&shape, batch);
    let compute = compute_in_place(shape, me);
    let summed = channel.moe_forward(batch.tokens(), &mut results, timeout, compute).expect("a step");
    check(&shape, batch, summed, &results);
    summed
}

/// A step with experts on the grouped layout; checks the results.
fn grouped(channel: &mut Channel, batch: &Batch) -> Summed {
    let (shape, me) = (*channel.shape(), channel.rank().0);
    let rows = shape.experts_per_rank * shape.slots();
    let mut packed = vec![0xff; rows * shape.send.row_bytes(shape.hidden)];
    let mut results = room(&shape, batch);
    let sent = channel.send(batch.tokens()).expect("send");
    let mut received = sent.wait_packed(&mut packed, PATIENCE).map_err(|late| late.error).expect("dispatch");
    compute_grouped(shape, me, &packed, &mut received);
    let summed = received.combine(&mut results, PATIENCE).expect("combine");
    check(&shape, batch, summed, &results);
    summed
}

fn room(shape: &Shape, batch: &Batch) -> Vec<u8> {
    vec![0xff; batch.count * shape.back.row_bytes(shape.hidden)]
}

fn check(shape: &Shape, batch: &Batch, summed: Summed, results: &[u8]) {
    let expected = batch.expected(shape, summed);
    if results == expected {
        return;
    }
    let bytes = shape.back.row_bytes(shape.hidden);
    let wrong = results.chunks(bytes).zip(expected.chunks(bytes)).position(|(one, other)| one != other);
    panic!("token {} of {} is wrong (ranks {}): {shape:?}", wrong.unwrap(), batch.count, summed.ranks);
}

/// Two buffers: each turn gives back a step and sends the next, with one barrier.
fn crossing(role: &Role) {
    let ranks = role.ranks as usize;
    let shapes = [Returns::Pull, Returns::Push].map(|returns| Shape {
        ranks,
        buffers: Buffers::Two,
        returns,
        ..SMALL
    });
    let (_world, channels) = open(role, &shapes, PATIENCE);
    let mut dice = Dice(role.seed ^ u64::from(role.rank) << 32);
    for mut channel in channels {
        let shape = *channel.shape();
        let mut compute = compute_in_place(shape, role.rank);
        let batches: Vec<Batch> = (0..40)
            .map(|step| {
                let count = dice.below(shape.tokens_max + 1);
                Batch::draw(&shape, count, ROUTES[step % ROUTES.len()], &mut dice)
            })
            .collect();
        let mut received = channel.dispatch(batches[0].tokens(), PATIENCE).expect("dispatch");
        for (batch, next) in batches.iter().zip(&batches[1..]) {
            compute(&mut received);
            nap(&mut dice);
            let mut results = room(&shape, batch);
            let crossed =
                received.give_back_and_send(next.tokens()).map_err(|(error, _)| error).expect("send");
            let (summed, next) =
                crossed.sum_into(&mut results, PATIENCE).map_err(|late| late.error).expect("sum");
            assert_eq!(summed.ranks, RankSet::first(ranks));
            check(&shape, batch, summed, &results);
            received = next;
        }
        compute(&mut received);
        let batch = batches.last().unwrap();
        let mut results = room(&shape, batch);
        let summed = received.combine(&mut results, PATIENCE).expect("combine");
        check(&shape, batch, summed, &results);
        // And on with ordinary steps.
        for batch in &batches[..5] {
            in_place(&mut channel, batch, PATIENCE);
        }
    }
}

/// Two threads, a channel each, at their own pace.
fn two_channels(role: &Role) {
    let shape = Shape { ranks: role.ranks as usize, ..SMALL };
    let (_world, channels) = open(role, &[shape, shape], PATIENCE);
    std::thread::scope(|scope| {
        for (number, mut channel) in channels.into_iter().enumerate() {
            scope.spawn(move || {
                let mut dice = Dice(role.seed ^ u64::from(role.rank) << 32 ^ number as u64);
                for step in 0..[40, 130][number] {
                    let count = dice.below(shape.tokens_max + 1);
                    let batch = Batch::draw(&shape, count, ROUTES[step % ROUTES.len()], &mut dice);
                    nap(&mut dice);
                    in_place(&mut channel, &batch, PATIENCE);
                }
            });
        }
    });
}

/// The same tokens, other delays: `extra` decides about the latter. Says a digest of all results.
fn same_bits(role: &Role) {
    let shape = Shape { ranks: role.ranks as usize, top_k: 8, hidden: 500, ..SMALL };
    let (_world, mut channels) = open(role, &[shape], PATIENCE);
    let channel = &mut channels[0];
    let mut dice = Dice(role.seed ^ u64::from(role.rank) << 32);
    let mut delays = Dice(role.extra ^ u64::from(role.rank) << 32);
    let mut digest = DefaultHasher::new();
    for _ in 0..25 {
        let batch = Batch::draw(&shape, shape.tokens_max, Routes::Any, &mut dice);
        let mut results = room(&shape, &batch);
        nap(&mut delays);
        let compute = compute_in_place(shape, role.rank);
        channel.moe_forward(batch.tokens(), &mut results, PATIENCE, compute).expect("a step");
        digest.write(&results);
    }
    say(&format!("digest {:x}", digest.finish()));
}

/// Stands still for a moment, mostly not at all.
fn nap(dice: &mut Dice) {
    match dice.below(20) {
        0 => std::thread::sleep(Duration::from_micros(dice.below(2000) as u64)),
        1 => std::thread::yield_now(),
        _ => {}
    }
}

/// Where a rank kills itself.
pub const DEATHS: [&str; 6] = ["idle", "sent", "received", "worked", "returned", "summed"];
/// Steps before a rank kills itself.
const STEPS_OF_LIFE: usize = 5;
/// A number that is no place to die at.
pub const IMMORTAL: u64 = 99;

/// `extra`: the place in [`DEATHS`] where this process kills itself, and above the lowest byte how often others will be
/// killed and come back. Ends after twenty steps with everyone, once that has happened.
fn mortal(role: &Role) {
    let shape = Shape { ranks: role.ranks as usize, ..SMALL };
    let all = RankSet::first(shape.ranks);
    let (death, losses_due) = (DEATHS.get((role.extra & 0xff) as usize), role.extra >> 8);
    let (world, mut channels) = open(role, &[shape], PATIENCE);
    let channel = &mut channels[0];
    let mut dice = Dice(role.seed ^ u64::from(role.rank) << 32 ^ world.generation().0 << 48);
    let (mut whole_steps, mut losses, mut step) = (0, 0, 0);
    let mut members = all;
    let is_lonely = role.extra & 0xff == LONELY;
    // All survivors end with the same step: who ended before the others would be missed.
    while if is_lonely { step < LONELY_STEPS } else { losses < losses_due || whole_steps < 20 } {
        let count = dice.below(shape.tokens_max + 1);
        let batch = Batch::draw(&shape, count, ROUTES[step % ROUTES.len()], &mut dice);
        let die_at = |place| {
            if death == Some(&place) && step == STEPS_OF_LIFE {
                let _ = rustix::process::kill_process(rustix::process::getpid(), Signal::KILL);
            }
        };
        die_at("idle");
        let began = Instant::now();
        let mut sent = channel.send(batch.tokens()).expect("send");
        die_at("sent");
        let mut received = loop {
            match sent.wait(DEADLINE) {
                Ok(received) => break received,
                Err(late) => sent = late_says(late),
            }
        };
        die_at("received");
        compute_in_place(shape, role.rank)(&mut received);
        die_at("worked");
        let mut results = room(&shape, &batch);
        let mut returned = received.give_back();
        die_at("returned");
        let summed = loop {
            match returned.sum_into(&mut results, DEADLINE) {
                Ok(summed) => break summed,
                Err(late) => returned = late_says(late),
            }
        };
        die_at("summed");
        check(&shape, &batch, summed, &results);
        let lost = members.without(summed.ranks);
        if !lost.is_empty() {
            say(&format!("lost {} {}", lost.bits(), began.elapsed().as_millis()));
            losses += 1;
        }
        members = summed.ranks;
        whole_steps = if members == all { whole_steps + 1 } else { 0 };
        if step == 0 {
            // Only now: who is killed before a step with everyone is late for the others, but not lost.
            say(&format!("joined {}", world.generation()));
        }
        step += 1;
    }
    assert!(losses >= losses_due);
}

/// As a place to die at: nobody will come back.
pub const LONELY: u64 = 98;
/// Steps of those who stay; the conductor kills in the first of them.
const LONELY_STEPS: usize = 3000;

/// Reports who is late, and goes on without.
fn late_says<S: InStep>(late: Late<S>) -> S {
    assert!(!late.missing().is_empty(), "{}", late.error);
    say(&format!("late {}", late.missing().bits()));
    late.leave_behind()
}

/// A rank that is stopped for longer than the others wait finds out, comes back, and goes on.
fn stopped(role: &Role) {
    let shape = Shape { ranks: role.ranks as usize, ..SMALL };
    let all = RankSet::first(shape.ranks);
    let (_world, mut channels) = open(role, &[shape], PATIENCE);
    let channel = &mut channels[0];
    channel.leave_behind(true);
    say("joined");
    let mut dice = Dice(role.seed ^ u64::from(role.rank) << 32);
    let (mut whole_steps, mut came_back, mut lost) = (0, false, false);
    while !(lost && whole_steps >= 20) {
        let count = dice.below(shape.tokens_max + 1);
        let batch = Batch::draw(&shape, count, Routes::Any, &mut dice);
        let mut results = room(&shape, &batch);
        let compute = compute_in_place(shape, role.rank);
        match channel.moe_forward(batch.tokens(), &mut results, DEADLINE, compute) {
            Ok(summed) => {
                check(&shape, &batch, summed, &results);
                lost |= summed.ranks != all;
                whole_steps = if summed.ranks == all { whole_steps + 1 } else { 0 };
            }
            Err(error) => {
                assert!(is_excluded(error), "{error}");
                say("excluded");
                channel.rejoin(PATIENCE).expect("rejoin");
                (came_back, lost, whole_steps) = (true, true, 0);
            }
        }
        // Slow enough for the conductor's stop to fall between.
        std::thread::sleep(Duration::from_micros(200));
    }
    say(&format!("done {came_back}"));
}

fn is_excluded(error: StepError) -> bool {
    matches!(
        error,
        StepError::Send(SendError::Excluded) | StepError::Wait(moontide_heap::WaitError::Excluded)
    )
}

/// `extra` steps with delays of this rank's own, while the conductor stops ranks now and then.
fn soak(role: &Role) {
    let shape = Shape { ranks: role.ranks as usize, tokens_max: 3, hidden: 16, ..SMALL };
    let crossing = Shape { buffers: Buffers::Two, ..shape };
    let (_world, mut channels) = open(role, &[shape, crossing], PATIENCE);
    say("joined");
    let all = RankSet::first(shape.ranks);
    let mut dice = Dice(role.seed ^ u64::from(role.rank) << 32);
    for step in 0..role.extra as usize {
        let count = dice.below(shape.tokens_max + 1);
        let batch = Batch::draw(&shape, count, ROUTES[step % ROUTES.len()], &mut dice);
        nap(&mut dice);
        let summed = in_place(&mut channels[step % 2], &batch, PATIENCE);
        assert_eq!(summed.ranks, all);
    }
}
