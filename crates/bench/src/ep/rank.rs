//! `moontide bench ep-rank`: one rank of `bench ep`. Runs all cases and prints one JSON line for each.
//!
//! The region of a rank contains, in this order: a pull channel, a push channel, and the memory of the baseline loop,
//! which has the layout of a channel's rows and follows the same rules, with barriers that are not measured.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use moontide_ep::{Buffering, Channel, ChannelConfig, Dtype, Tokens, bf16_bytes};
use moontide_heap::HugePages;
use moontide_symmetric::{Rank, RankSet, World, WorldConfig, WorldShape};
use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};

use super::routes::{RouteParams, Routes};
use super::{Case, CombineModeArg, RankReport, Round};
use crate::measure::median;
use crate::results::{BenchError, wrong};

/// Timeout for a rank that another process killed.
const RANK_TIMEOUT: Duration = Duration::from_secs(60);
/// Pings per measurement, and measurements: the median counts, because a rank may be descheduled.
const PINGS: u64 = 100;
const PING_ROUNDS: u64 = 200;

/// Arguments of a rank.
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
    combine_mode: Vec<CombineModeArg>,
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
pub(crate) fn run(args: &RankArgs) -> Result<(), BenchError> {
    end_with_parent();
    let shape = |combine_mode: CombineModeArg| ChannelConfig {
        ranks: args.ranks as usize,
        tokens_max: args.tokens.iter().copied().max().unwrap_or(1).max(1) as usize,
        hidden: args.hidden as usize,
        top_k: args.top_k as usize,
        experts_per_rank: args.experts as usize,
        dispatch_dtype: Dtype::Bf16,
        combine_dtype: Dtype::Bf16,
        buffering: Buffering::Single,
        combine_mode: combine_mode.mode(),
    };
    let channel_bytes = shape(CombineModeArg::Pull).bytes().map_err(wrong)?;
    let baseline_rows = BaselineExchange::bytes(&shape(CombineModeArg::Pull));
    let bytes = 2 * channel_bytes + baseline_rows + 4096;
    let config = WorldConfig {
        path: args.path.clone(),
        rank: Rank(args.rank),
        shape: WorldShape { ranks: args.ranks, bytes: bytes.next_multiple_of(4096) },
        huge: HugePages::Auto,
        timeout: RANK_TIMEOUT,
    };
    // SAFETY: all ranks are this program, and use the regions as described at the head of this file.
    let world = Arc::new(unsafe { World::join(&config) }.map_err(wrong)?);
    // SAFETY: as above.
    let mut pull =
        unsafe { Channel::open(&world, 0, shape(CombineModeArg::Pull), RANK_TIMEOUT) }.map_err(wrong)?;
    // SAFETY: as above.
    let mut push = unsafe { Channel::open(&world, channel_bytes, shape(CombineModeArg::Push), RANK_TIMEOUT) }
        .map_err(wrong)?;
    let baseline = BaselineExchange {
        world: Arc::clone(&world),
        first: 2 * channel_bytes,
        shape: shape(CombineModeArg::Pull),
    };
    // After opening the channels, which read the number of cores.
    if !args.no_pin {
        pin(args.rank as usize, args.ranks as usize);
    }
    let line_ns = ping_pong(&world, 2 * channel_bytes + baseline_rows)?;
    for &combine_mode in &args.combine_mode {
        for &routes in &args.routes {
            for &tokens in &args.tokens {
                let channel = if combine_mode == CombineModeArg::Pull { &mut pull } else { &mut push };
                let report = measure(args, Case { tokens, routes, combine_mode }, channel, &baseline)?;
                let line = serde_json::to_string(&RankReport { line_ns, ..report }).map_err(wrong)?;
                println!("{line}");
            }
        }
    }
    Ok(())
}

/// Exits at the end of standard input, that is, with the parent.
fn end_with_parent() {
    let _ = std::thread::Builder::new().name("parent".into()).spawn(|| {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        std::process::exit(0);
    });
}

/// Pins this rank to a core if there are enough.
fn pin(rank: usize, ranks: usize) {
    let Ok(allowed) = sched_getaffinity(None) else { return };
    let cores: Vec<usize> = (0..CpuSet::MAX_CPU).filter(|&core| allowed.is_set(core)).collect();
    if cores.len() >= ranks {
        let mut own = CpuSet::new();
        own.set(cores[rank]);
        // Best effort: a failure leaves the placement to the scheduler.
        let _ = sched_setaffinity(None, &own);
    }
}

/// Measures half of the round trip of a cache line to the other rank.
fn ping_pong(world: &World, offset: u64) -> Result<Option<f64>, BenchError> {
    if world.shape().ranks < 2 {
        return Ok(None);
    }
    let word = |rank: u32| {
        let line = world.at(Rank(rank), offset, 64);
        // SAFETY: a cache line that is used for nothing else, and by all ranks as an atomic.
        unsafe { AtomicU64::from_ptr(line.cast().as_ptr()) }
    };
    let (me, mut took) = (world.rank().0, Vec::new());
    world.barrier(RANK_TIMEOUT).map_err(wrong)?;
    if me < 2 {
        let (own, peer) = (word(me), word(1 - me));
        for round in 0..PING_ROUNDS {
            let started = Instant::now();
            for ping in round * PINGS + 1..=(round + 1) * PINGS {
                if me == 0 {
                    peer.store(ping, Ordering::Release);
                }
                while own.load(Ordering::Acquire) < ping {
                    std::hint::spin_loop();
                }
                if me == 1 {
                    peer.store(ping, Ordering::Release);
                }
            }
            took.push(started.elapsed().as_nanos() as f64 / PINGS as f64 / 2.0);
        }
    }
    world.barrier(RANK_TIMEOUT).map_err(wrong)?;
    Ok((me < 2).then(|| median(took)))
}

/// Tokens of this rank in a case, and the slots that other ranks fill.
struct RoutePlan {
    rows: Vec<u8>,
    experts: Vec<i32>,
    weights: Vec<f32>,
    /// Target ranks of each token of this rank.
    to: Vec<RankSet>,
    /// Slots of this rank that other ranks fill.
    slots: Vec<usize>,
}

impl RoutePlan {
    fn new(args: &RankArgs, case: Case, shape: &ChannelConfig) -> RoutePlan {
        let experts_of = |rank: usize| {
            case.routes.draw(&RouteParams {
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
        // Integers that bf16 represents exactly, so that sums are exact.
        let numbers: Vec<f32> =
            (0..case.tokens as usize * shape.hidden).map(|at| ((at * 7 + me) % 100) as f32).collect();
        let weights = vec![1.0 / shape.top_k as f32; experts.len()];
        RoutePlan { rows: bf16_bytes(&numbers), to: targets(&experts), experts, weights, slots }
    }
}

/// Measures one case: exchange and baseline loop alternate.
fn measure(
    args: &RankArgs,
    case: Case,
    channel: &mut Channel,
    baseline: &BaselineExchange,
) -> Result<RankReport, BenchError> {
    let plan = RoutePlan::new(args, case, &baseline.shape);
    let row_bytes = Dtype::Bf16.row_bytes(baseline.shape.hidden);
    let mut results = vec![0; plan.rows.len()];
    let expected: Vec<u8> = {
        let rows = plan.rows.chunks_exact(row_bytes).zip(&plan.to);
        rows.flat_map(|(row, to)| {
            let mut sum = vec![0; row_bytes];
            Dtype::Bf16.sum(std::iter::repeat_n(row, to.len()), baseline.shape.hidden, &mut sum);
            sum
        })
        .collect()
    };
    let calls_before = channel.futex_calls();
    let mut rounds = Vec::new();
    // The first round is a warm-up and is not reported.
    for round in 0..=args.rounds {
        let mut values = Round::default();
        for ours in if round % 2 == 0 { [true, false] } else { [false, true] } {
            results.fill(0xff);
            if ours {
                values = Round {
                    baseline_dispatch: values.baseline_dispatch,
                    baseline_combine: values.baseline_combine,
                    ..exchange_round(args.steps, &plan, channel, &mut results)?
                };
            } else {
                (values.baseline_dispatch, values.baseline_combine) =
                    baseline.round(args.steps, &plan, &mut results)?;
            }
            if results != expected {
                let side = if ours { "exchange" } else { "baseline loop" };
                return Err(wrong(format!("wrong results of the {side}")));
            }
        }
        if round > 0 {
            rounds.push(values);
        }
    }
    let steps = u64::from(args.steps) * (u64::from(args.rounds) + 1);
    let calls = (channel.futex_calls() - calls_before) as f64 / steps as f64;
    Ok(RankReport { rounds, line_ns: None, futex_calls_per_step: calls })
}

/// Runs the steps of a round of the exchange.
fn exchange_round(
    steps: u32,
    plan: &RoutePlan,
    channel: &mut Channel,
    results: &mut [u8],
) -> Result<Round, BenchError> {
    let (mut dispatches, mut works, mut combines) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..steps {
        let started = Instant::now();
        let tokens = Tokens { rows: &plan.rows, experts: &plan.experts, weights: &plan.weights };
        let mut received = channel.dispatch(tokens, RANK_TIMEOUT).map_err(wrong)?;
        let dispatched = Instant::now();
        received.for_each(|work| work.output.copy_from_slice(work.row));
        let worked = Instant::now();
        received.combine(results, RANK_TIMEOUT).map_err(wrong)?;
        let combined = Instant::now();
        dispatches.push((dispatched - started).as_nanos() as f64);
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

/// Baseline: the unavoidable work of an exchange without a protocol.
struct BaselineExchange {
    world: Arc<World>,
    /// Offset of its memory: slots of rows, then slots of outputs.
    first: u64,
    shape: ChannelConfig,
}

impl BaselineExchange {
    fn bytes(shape: &ChannelConfig) -> u64 {
        (2 * shape.slots() * BaselineExchange::stride(shape)) as u64
    }

    fn stride(shape: &ChannelConfig) -> usize {
        Dtype::Bf16.row_bytes(shape.hidden).next_multiple_of(64)
    }

    fn row(&self, rank: Rank, slot: usize) -> *mut u8 {
        let stride = BaselineExchange::stride(&self.shape);
        self.world.at(rank, self.first + (slot * stride) as u64, stride as u64).as_ptr()
    }

    fn output(&self, rank: Rank, slot: usize) -> *mut u8 {
        self.row(rank, self.shape.slots() + slot)
    }

    /// Runs the steps of a round; returns the medians of the copy and sum times in nanoseconds.
    fn round(&self, steps: u32, plan: &RoutePlan, results: &mut [u8]) -> Result<(f64, f64), BenchError> {
        let (me, row_bytes) = (self.world.rank(), Dtype::Bf16.row_bytes(self.shape.hidden));
        let first = me.index() * self.shape.tokens_max;
        let barrier = || self.world.barrier(RANK_TIMEOUT).map(|_| ()).map_err(wrong);
        let (mut copies, mut sums) = (Vec::new(), Vec::new());
        for _ in 0..steps {
            barrier()?;
            let started = Instant::now();
            for (token, (row, to)) in plan.rows.chunks_exact(row_bytes).zip(&plan.to).enumerate() {
                for rank in to.iter().filter(|&rank| rank != me) {
                    // SAFETY: the slot of this rank there; its owner waits in the next barrier, or is in the same
                    // phase.
                    unsafe {
                        let target = self.row(rank, first + token);
                        std::ptr::copy_nonoverlapping(row.as_ptr(), target, row_bytes);
                    }
                }
            }
            copies.push(started.elapsed().as_nanos() as f64);
            barrier()?;
            for &slot in &plan.slots {
                // SAFETY: the memory of this rank between two barriers.
                unsafe {
                    std::ptr::copy_nonoverlapping(self.row(me, slot), self.output(me, slot), row_bytes)
                };
            }
            for (token, row) in plan.rows.chunks_exact(row_bytes).enumerate() {
                if plan.to[token].contains(me) {
                    // SAFETY: as above.
                    unsafe {
                        let target = self.output(me, first + token);
                        std::ptr::copy_nonoverlapping(row.as_ptr(), target, row_bytes);
                    }
                }
            }
            barrier()?;
            let started = Instant::now();
            for (token, result) in results.chunks_exact_mut(row_bytes).enumerate() {
                let rows = plan.to[token].iter().map(|rank| {
                    // SAFETY: complete since the barrier, and not written before the next one.
                    unsafe { std::slice::from_raw_parts(self.output(rank, first + token), row_bytes) }
                });
                Dtype::Bf16.sum(rows, self.shape.hidden, result);
            }
            sums.push(started.elapsed().as_nanos() as f64);
        }
        barrier()?;
        Ok((median(copies), median(sums)))
    }
}
