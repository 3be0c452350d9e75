//! `moontide bench ep-rank`: one rank of `bench ep`. Runs all cases and says one JSON line about each.
//!
//! A rank's region holds, one behind the other: a channel that pulls, a channel that pushes, and the memory of the bare
//! loop, which is laid out as a channel's rows are and used under the same rules, with barriers around that nobody times.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use moontide_ep::{Buffers, Channel, Dtype, Shape, Tokens, bf16_bytes};
use moontide_heap::{HugePages, Rank, RankSet, World, WorldConfig, WorldShape};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::super::figures::{BenchError, median};
use super::super::transfer::wrong;
use super::routes::{Draw, Routes};
use super::{Case, Round, Told, Way};

/// For a rank that is ended by somebody else.
const PATIENCE: Duration = Duration::from_secs(60);
/// Pings of a ping-pong that are timed together, and how often: the middle counts, because a rank may lose its core.
const PINGS: u64 = 100;
const PING_ROUNDS: u64 = 200;

/// What a rank is told.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct RankArgs {
    #[arg(long)]
    path: PathBuf,
    #[arg(long)]
    rank: u32,
    #[arg(long)]
    ranks: u32,
    #[arg(long, value_delimiter = ',')]
    tokens: Vec<u32>,
    #[arg(long, value_delimiter = ',', value_enum)]
    routes: Vec<Routes>,
    #[arg(long, value_delimiter = ',', value_enum)]
    returns: Vec<Way>,
    #[arg(long)]
    hidden: u32,
    #[arg(long)]
    top_k: u32,
    #[arg(long)]
    experts: u32,
    #[arg(long)]
    rounds: u32,
    #[arg(long)]
    steps: u32,
    #[arg(long)]
    seed: u64,
    #[arg(long)]
    no_pin: bool,
}

/// Runs the rank.
pub(in super::super) fn run(args: &RankArgs) -> Result<(), BenchError> {
    end_with_parent();
    let shape = |way: Way| Shape {
        ranks: args.ranks as usize,
        tokens_max: args.tokens.iter().copied().max().unwrap_or(1).max(1) as usize,
        hidden: args.hidden as usize,
        top_k: args.top_k as usize,
        experts_per_rank: args.experts as usize,
        send: Dtype::Bf16,
        back: Dtype::Bf16,
        buffers: Buffers::One,
        returns: way.returns(),
    };
    let channel_bytes = shape(Way::Pull).bytes().map_err(wrong)?;
    let bare_rows = Bare::bytes(&shape(Way::Pull));
    let bytes = 2 * channel_bytes + bare_rows + 4096;
    let config = WorldConfig {
        path: args.path.clone(),
        rank: Rank(args.rank),
        shape: WorldShape { ranks: args.ranks, bytes: bytes.next_multiple_of(4096) },
        huge: HugePages::IfAllowed,
        timeout: PATIENCE,
    };
    // SAFETY: all ranks are this program, and use the regions as the head of this file says.
    let world = Arc::new(unsafe { World::join(&config) }.map_err(wrong)?);
    // SAFETY: as above.
    let mut pull = unsafe { Channel::open(&world, 0, shape(Way::Pull), PATIENCE) }.map_err(wrong)?;
    // SAFETY: as above.
    let mut push =
        unsafe { Channel::open(&world, channel_bytes, shape(Way::Push), PATIENCE) }.map_err(wrong)?;
    let bare = Bare { world: Arc::clone(&world), first: 2 * channel_bytes, shape: shape(Way::Pull) };
    // Only now: channels ask how many cores there are.
    if !args.no_pin {
        pin(args.rank as usize, args.ranks as usize);
    }
    let line_ns = ping_pong(&world, 2 * channel_bytes + bare_rows)?;
    for &way in &args.returns {
        for &routes in &args.routes {
            for &tokens in &args.tokens {
                let channel = if way == Way::Pull { &mut pull } else { &mut push };
                let told = measure(args, Case { tokens, routes, way }, channel, &bare)?;
                let line = serde_json::to_string(&Told { line_ns, ..told }).map_err(wrong)?;
                println!("{line}");
            }
        }
    }
    Ok(())
}

/// Ends this process when standard input does: its parent has ended, or wants nothing more.
fn end_with_parent() {
    let _ = std::thread::Builder::new().name("parent".into()).spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(0);
    });
}

/// Gives this rank a core of its own, if there are enough.
fn pin(rank: usize, ranks: usize) {
    let Ok(allowed) = sched_getaffinity(None) else { return };
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect();
    if cores.len() >= ranks {
        let mut own = CpuSet::new();
        own.set(cores[rank]);
        // Where it is refused, the scheduler does what it can.
        let _ = sched_setaffinity(None, &own);
    }
}

/// Half of the time in which a cache line goes to the other rank and back.
fn ping_pong(world: &World, offset: u64) -> Result<Option<f64>, BenchError> {
    if world.shape().ranks < 2 {
        return Ok(None);
    }
    let word = |rank: u32| {
        let place = world.at(Rank(rank), offset, 64);
        // SAFETY: a line that is used for nothing else, and by all as an atomic.
        unsafe { AtomicU64::from_ptr(place.cast().as_ptr()) }
    };
    let (me, mut took) = (world.rank().0, Vec::new());
    world.barrier(PATIENCE).map_err(wrong)?;
    if me < 2 {
        let (mine, theirs) = (word(me), word(1 - me));
        for round in 0..PING_ROUNDS {
            let began = Instant::now();
            for ping in round * PINGS + 1..=(round + 1) * PINGS {
                if me == 0 {
                    theirs.store(ping, Ordering::Release);
                }
                while mine.load(Ordering::Acquire) < ping {
                    std::hint::spin_loop();
                }
                if me == 1 {
                    theirs.store(ping, Ordering::Release);
                }
            }
            took.push(began.elapsed().as_nanos() as f64 / PINGS as f64 / 2.0);
        }
    }
    world.barrier(PATIENCE).map_err(wrong)?;
    Ok((me < 2).then(|| median(took)))
}

/// What all ranks send in a case, as far as the bare loop needs it.
struct Plan {
    rows: Vec<u8>,
    experts: Vec<i32>,
    weights: Vec<f32>,
    /// For each of this rank's tokens the ranks that it goes to.
    to: Vec<RankSet>,
    /// The slots that come to this rank from others.
    slots: Vec<usize>,
}

impl Plan {
    fn new(args: &RankArgs, case: Case, shape: &Shape) -> Plan {
        let experts_of = |rank: usize| {
            case.routes.draw(&Draw {
                ranks: shape.ranks,
                rank,
                tokens: case.tokens as usize,
                top_k: shape.top_k,
                experts: shape.experts_per_rank,
                seed: args.seed,
            })
        };
        let targets = |experts: &[i32]| -> Vec<RankSet> {
            let rank_of = |&expert: &i32| Rank(expert as u32 / shape.experts_per_rank as u32);
            let one = |experts: &[i32]| experts.iter().filter(|expert| **expert >= 0).map(rank_of).collect();
            experts.chunks_exact(shape.top_k).map(one).collect()
        };
        let me = args.rank as usize;
        let experts = experts_of(me);
        let mut slots = Vec::new();
        for source in (0..shape.ranks).filter(|&source| source != me) {
            let to = targets(&experts_of(source));
            let here = to.iter().enumerate().filter(|(_, to)| to.contains(Rank(args.rank)));
            slots.extend(here.map(|(token, _)| source * shape.tokens_max + token));
        }
        // Whole numbers that bf16 can tell, so that sums are exact.
        let numbers: Vec<f32> =
            (0..case.tokens as usize * shape.hidden).map(|at| ((at * 7 + me) % 100) as f32).collect();
        let weights = vec![1.0 / shape.top_k as f32; experts.len()];
        Plan { rows: bf16_bytes(&numbers), to: targets(&experts), experts, weights, slots }
    }
}

/// One case: ours and the bare loop in turns.
fn measure(args: &RankArgs, case: Case, channel: &mut Channel, bare: &Bare) -> Result<Told, BenchError> {
    let plan = Plan::new(args, case, &bare.shape);
    let row_bytes = Dtype::Bf16.row_bytes(bare.shape.hidden);
    let mut results = vec![0; plan.rows.len()];
    let expected: Vec<u8> = {
        let rows = plan.rows.chunks_exact(row_bytes).zip(&plan.to);
        rows.flat_map(|(row, to)| {
            let mut sum = vec![0; row_bytes];
            Dtype::Bf16.sum(std::iter::repeat_n(row, to.len()), bare.shape.hidden, &mut sum);
            sum
        })
        .collect()
    };
    let calls_before = channel.futex_calls();
    let mut rounds = Vec::new();
    // The first round warms up and is not told.
    for round in 0..=args.rounds {
        let mut figures = Round::default();
        for ours in if round % 2 == 0 { [true, false] } else { [false, true] } {
            results.fill(0xff);
            if ours {
                figures = Round {
                    bare_dispatch: figures.bare_dispatch,
                    bare_combine: figures.bare_combine,
                    ..ours_round(args.steps, &plan, channel, &mut results)?
                };
            } else {
                (figures.bare_dispatch, figures.bare_combine) =
                    bare.round(args.steps, &plan, &mut results)?;
            }
            if results != expected {
                let who = if ours { "the exchange" } else { "the bare loop" };
                return Err(wrong(format!("results of {who} are wrong: a figure would mean nothing")));
            }
        }
        if round > 0 {
            rounds.push(figures);
        }
    }
    let steps = u64::from(args.steps) * (u64::from(args.rounds) + 1);
    let calls = (channel.futex_calls() - calls_before) as f64 / steps as f64;
    Ok(Told { rounds, line_ns: None, futex_calls_per_step: calls })
}

/// Steps of ours.
fn ours_round(
    steps: u32,
    plan: &Plan,
    channel: &mut Channel,
    results: &mut [u8],
) -> Result<Round, BenchError> {
    let (mut dispatches, mut works, mut combines) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..steps {
        let began = Instant::now();
        let tokens = Tokens { rows: &plan.rows, experts: &plan.experts, weights: &plan.weights };
        let mut received = channel.dispatch(tokens, PATIENCE).map_err(wrong)?;
        let dispatched = Instant::now();
        received.for_each(|work| work.back.copy_from_slice(work.row));
        let worked = Instant::now();
        received.combine(results, PATIENCE).map_err(wrong)?;
        let combined = Instant::now();
        dispatches.push((dispatched - began).as_nanos() as f64);
        works.push((worked - dispatched).as_nanos() as f64);
        combines.push((combined - worked).as_nanos() as f64);
    }
    Ok(Round {
        dispatch: median(dispatches),
        work: median(works),
        combine: median(combines),
        ..Round::default()
    })
}

/// The work that cannot be avoided, and nothing around it.
struct Bare {
    world: Arc<World>,
    /// Where its memory begins: slots of rows, then slots of what goes back.
    first: u64,
    shape: Shape,
}

impl Bare {
    fn bytes(shape: &Shape) -> u64 {
        (2 * shape.slots() * Bare::stride(shape)) as u64
    }

    fn stride(shape: &Shape) -> usize {
        Dtype::Bf16.row_bytes(shape.hidden).next_multiple_of(64)
    }

    fn row(&self, rank: Rank, slot: usize) -> *mut u8 {
        let stride = Bare::stride(&self.shape);
        self.world.at(rank, self.first + (slot * stride) as u64, stride as u64).as_ptr()
    }

    fn back(&self, rank: Rank, slot: usize) -> *mut u8 {
        self.row(rank, self.shape.slots() + slot)
    }

    /// Steps; the middle of the times for copying and for summing, in nanoseconds.
    fn round(&self, steps: u32, plan: &Plan, results: &mut [u8]) -> Result<(f64, f64), BenchError> {
        let (me, row_bytes) = (self.world.rank(), Dtype::Bf16.row_bytes(self.shape.hidden));
        let first = me.index() * self.shape.tokens_max;
        let meet = || self.world.barrier(PATIENCE).map(|_| ()).map_err(wrong);
        let (mut copies, mut sums) = (Vec::new(), Vec::new());
        for _ in 0..steps {
            meet()?;
            let began = Instant::now();
            for (token, (row, to)) in plan.rows.chunks_exact(row_bytes).zip(&plan.to).enumerate() {
                for rank in to.iter().filter(|&rank| rank != me) {
                    // SAFETY: our slot there; its owner waits in the next barrier, or is here.
                    unsafe {
                        let place = self.row(rank, first + token);
                        std::ptr::copy_nonoverlapping(row.as_ptr(), place, row_bytes);
                    }
                }
            }
            copies.push(began.elapsed().as_nanos() as f64);
            meet()?;
            for &slot in &plan.slots {
                // SAFETY: our own memory between two barriers.
                unsafe { std::ptr::copy_nonoverlapping(self.row(me, slot), self.back(me, slot), row_bytes) };
            }
            for (token, row) in plan.rows.chunks_exact(row_bytes).enumerate() {
                if plan.to[token].contains(me) {
                    // SAFETY: as above.
                    unsafe {
                        let place = self.back(me, first + token);
                        std::ptr::copy_nonoverlapping(row.as_ptr(), place, row_bytes);
                    }
                }
            }
            meet()?;
            let began = Instant::now();
            for (token, result) in results.chunks_exact_mut(row_bytes).enumerate() {
                let rows = plan.to[token].iter().map(|rank| {
                    // SAFETY: complete since the barrier, and not written before the next one.
                    unsafe { std::slice::from_raw_parts(self.back(rank, first + token), row_bytes) }
                });
                Dtype::Bf16.sum(rows, self.shape.hidden, result);
            }
            sums.push(began.elapsed().as_nanos() as f64);
        }
        meet()?;
        Ok((median(copies), median(sums)))
    }
}
