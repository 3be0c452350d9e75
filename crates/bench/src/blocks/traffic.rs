//! A synthetic trace of chat sessions in virtual time: savings by prefix sharing and waste of contiguous placement.
//!
//! Requests arrive as in the trace; an output token takes 25 ms. A request without enough free blocks waits; one that
//! runs out of blocks is preempted and starts again. The same trace runs with every block placement.

use std::collections::{HashMap, VecDeque};

use moontide_blocks::{BlockHash, BlockPlacement, Cache, CacheConfig, CacheError, SequenceId, Token};

use super::Args;
use super::speed::{SMALL, complete};
use crate::results::{BenchError, Progress, ResultRow, wrong};
use crate::trace::{Generator, Header, Request, Summary, TraceParams};

/// Time of an output token.
const TOKEN_US: u64 = 25_000;

pub(super) fn run(args: &Args) -> Result<(), BenchError> {
    let requests = if args.quick { 1_000 } else { 5_000 };
    let header = Header { block_bytes: 1, block_tokens: SMALL.block_tokens, seed: args.seed };
    let params = TraceParams { users: 200, requests, zipf: 1.1, system_prompts: 8, rate: 4.0, end: 0.2 };
    let trace: Vec<Request> = Generator::new(params, header).collect();
    let mut summary = Summary::new(header);
    trace.iter().for_each(|request| summary.add(request));
    let blocks = 16_384;
    for (name, placement, shared) in [
        ("paged, shared", BlockPlacement::Paged, true),
        ("paged", BlockPlacement::Paged, false),
        ("contiguous", BlockPlacement::Contiguous { reserve: 0 }, false),
        ("contiguous, 16 in reserve", BlockPlacement::Contiguous { reserve: 16 }, false),
    ] {
        let config = CacheConfig { placement, ..CacheConfig::new(SMALL, blocks) };
        let mut engine = SimulatedEngine::new(&config, &trace, shared)?;
        let mut progress = Progress::new(format_args!("{requests} requests, {name}"), requests);
        for (at, request) in trace.iter().enumerate() {
            engine.run_until(request.at_us)?;
            engine.waiting.push_back(at);
            engine.admit()?;
            progress.at(at as u64);
        }
        let end = engine.finish()?;
        engine.line(name, end).number("ideal_hit_rate", summary.ideal_hit_rate()).print();
    }
    Ok(())
}

/// A running sequence.
struct Active {
    id: SequenceId,
    request: usize,
    started_us: u64,
    generated: u64,
}

struct SimulatedEngine<'t> {
    cache: Cache,
    trace: &'t [Request],
    /// Last request of each session; its blocks include the outputs of all earlier turns.
    sessions: HashMap<u64, &'t Request>,
    shared: bool,
    now_us: u64,
    waiting: VecDeque<usize>,
    /// The first waiting request did not fit, and no block was freed since.
    blocked: bool,
    active: Vec<Active>,
    report: TrafficReport,
}

/// Counters of a run.
#[derive(Default)]
struct TrafficReport {
    peak_held: u32,
    held_sum: u64,
    samples: u64,
    /// Number of times that the first waiting request did not fit.
    waits: u64,
    /// Number of these times with enough free blocks that were not contiguous.
    scattered: u64,
    preempted: u64,
    fragmentation_sum: f64,
    fragmentation_max: f64,
    done: u64,
}

impl<'t> SimulatedEngine<'t> {
    fn new(
        config: &CacheConfig,
        trace: &'t [Request],
        shared: bool,
    ) -> Result<SimulatedEngine<'t>, BenchError> {
        Ok(SimulatedEngine {
            cache: Cache::new(config).map_err(wrong)?,
            trace,
            sessions: trace.iter().map(|request| (request.session, request)).collect(),
            shared,
            now_us: 0,
            waiting: VecDeque::new(),
            blocked: false,
            active: Vec::new(),
            report: TrafficReport::default(),
        })
    }

    /// Returns the token of a session at a position.
    fn token(&self, session: u64, at: u64) -> Token {
        let block = (at / u64::from(SMALL.block_tokens)) as usize;
        let known = self.sessions.get(&session).and_then(|last| last.blocks.get(block));
        let content = known.map_or(session, |hash| hash.0);
        (content ^ content >> 32 ^ at << 7) as Token
    }

    /// Advances the time: generates output tokens and finishes sequences.
    fn run_until(&mut self, until_us: u64) -> Result<(), BenchError> {
        while let Some(next) = self.active.iter().map(|active| self.next_token(active)).min() {
            if next > until_us {
                break;
            }
            self.now_us = next;
            self.step()?;
            self.admit()?;
        }
        self.now_us = until_us;
        Ok(())
    }

    fn next_token(&self, active: &Active) -> u64 {
        active.started_us + (active.generated + 1) * TOKEN_US
    }

    /// Generates one token for each sequence that is due.
    fn step(&mut self) -> Result<(), BenchError> {
        for at in (0..self.active.len()).rev() {
            if self.next_token(&self.active[at]) > self.now_us {
                continue;
            }
            let Active { id, request, generated, .. } = self.active[at];
            let request_data = &self.trace[request];
            let token = self.token(request_data.session, request_data.input_tokens + generated);
            match self.cache.append(id, token) {
                Ok(()) => {
                    complete(&mut self.cache, id)?;
                    self.active[at].generated += 1;
                    if generated + 1 >= request_data.output_tokens {
                        self.active.swap_remove(at);
                        self.cache.free(id).map_err(wrong)?;
                        self.blocked = false;
                        self.report.done += 1;
                    }
                }
                Err(CacheError::Full(_)) => {
                    self.active.swap_remove(at);
                    self.cache.free(id).map_err(wrong)?;
                    self.blocked = false;
                    self.report.preempted += 1;
                    self.waiting.push_front(request);
                }
                Err(error) => return Err(wrong(error)),
            }
        }
        Ok(())
    }

    /// Starts waiting requests in order while they fit.
    fn admit(&mut self) -> Result<(), BenchError> {
        while let Some(&request) = self.waiting.front().filter(|_| !self.blocked) {
            let request_data = &self.trace[request];
            let prompt: Vec<Token> =
                (0..request_data.input_tokens).map(|at| self.token(request_data.session, at)).collect();
            // Without sharing, a unique salt prevents hits.
            let salt =
                if self.shared { String::new() } else { format!("{request} {}", self.report.preempted) };
            match self.cache.allocate(&prompt, BlockHash::root(&salt, "")) {
                Ok(allocated) => {
                    complete(&mut self.cache, allocated.id)?;
                    self.waiting.pop_front();
                    let (id, started_us) = (allocated.id, self.now_us);
                    self.active.push(Active { id, request, started_us, generated: 0 });
                    self.sample();
                }
                Err(CacheError::Full(full)) => {
                    self.report.waits += 1;
                    self.report.scattered += u64::from(full.free >= full.needed);
                    self.blocked = true;
                }
                Err(error) => return Err(wrong(error)),
            }
        }
        Ok(())
    }

    fn sample(&mut self) {
        let stats = self.cache.stats();
        let report = &mut self.report;
        let held = stats.in_use + stats.reserved;
        report.peak_held = report.peak_held.max(held);
        report.held_sum += u64::from(held);
        report.fragmentation_sum += stats.fragmentation;
        report.fragmentation_max = report.fragmentation_max.max(stats.fragmentation);
        report.samples += 1;
    }

    /// Runs until all requests are finished; returns the virtual time.
    fn finish(&mut self) -> Result<u64, BenchError> {
        while !self.active.is_empty() || !self.waiting.is_empty() {
            if self.active.is_empty() {
                return Err(wrong("a prompt needs more blocks than the cache has"));
            }
            let next = self.active.iter().map(|active| self.next_token(active)).min().unwrap_or(self.now_us);
            self.run_until(next)?;
        }
        Ok(self.now_us)
    }

    fn line(&mut self, name: &str, end_us: u64) -> ResultRow {
        let stats = self.cache.stats();
        let (report, counts) = (&self.report, stats.counts);
        let mean = |sum: f64| sum / report.samples.max(1) as f64;
        ResultRow::new("blocks", "traffic")
            .with("placement", name)
            .with("blocks", stats.blocks)
            .with("requests", report.done)
            .number("hit_rate", counts.cached_tokens as f64 / counts.prompt_tokens.max(1) as f64)
            .with("held_blocks_peak", report.peak_held)
            .number("held_blocks_mean", mean(report.held_sum as f64))
            .with("waits", report.waits)
            .with("waits_although_free", report.scattered)
            .with("preempted", report.preempted)
            .with("moved_blocks", counts.moved_blocks)
            .with("evicted_blocks", counts.evicted_blocks)
            .number("fragmentation_mean", mean(report.fragmentation_sum))
            .number("fragmentation_max", report.fragmentation_max)
            .number("virtual_s", end_us as f64 / 1e6)
    }
}
