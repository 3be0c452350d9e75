//! A made-up trace of conversations, in virtual time: what sharing saves, and what contiguous runs waste.
//!
//! Requests come when the trace says; a token of an answer takes 25 ms. A request that finds no room waits until there is
//! some, and one that cannot go on is put back and begins anew. The same trace runs with every way of placing blocks.

use std::collections::{HashMap, VecDeque};

use moontide_blocks::{BlockHash, BlocksError, Cache, CacheConfig, Placement, SequenceId, Token};

use super::super::figures::{BenchError, Line, Progress};
use super::super::transfer::wrong;
use super::Args;
use super::speed::{SMALL, complete};
use crate::trace::{Generator, Header, Request, Shape, Summary};

/// Of a token of an answer.
const TOKEN_US: u64 = 25_000;

pub(super) fn run(args: &Args) -> Result<(), BenchError> {
    let requests = if args.quick { 1_000 } else { 5_000 };
    let header = Header { block_bytes: 1, block_tokens: SMALL.block_tokens, seed: args.seed };
    let shape = Shape { users: 200, requests, zipf: 1.1, system_prompts: 8, rate: 4.0, end: 0.2 };
    let trace: Vec<Request> = Generator::new(shape, header).collect();
    let mut summary = Summary::new(header);
    trace.iter().for_each(|request| summary.add(request));
    let blocks = 16_384;
    for (name, placement, shared) in [
        ("paged, shared", Placement::Paged, true),
        ("paged", Placement::Paged, false),
        ("contiguous", Placement::Contiguous { reserve: 0 }, false),
        ("contiguous, 16 in reserve", Placement::Contiguous { reserve: 16 }, false),
    ] {
        let config = CacheConfig { placement, ..CacheConfig::new(SMALL, blocks) };
        let mut engine = Engine::new(&config, &trace, shared)?;
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

/// A sequence at work.
struct Active {
    id: SequenceId,
    request: usize,
    began_us: u64,
    answered: u64,
}

struct Engine<'t> {
    cache: Cache,
    trace: &'t [Request],
    /// Each conversation's blocks as they are in the end: what is said now is in the next prompt.
    sessions: HashMap<u64, &'t Request>,
    shared: bool,
    now_us: u64,
    waiting: VecDeque<usize>,
    /// The first of those that wait found no room, and nothing was freed since.
    blocked: bool,
    active: Vec<Active>,
    told: Told,
}

/// What came of it.
#[derive(Default)]
struct Told {
    peak_held: u32,
    held_sum: u64,
    asked: u64,
    /// How often the first in the queue was refused.
    waits: u64,
    /// How often of those there were enough free blocks, only not together.
    scattered: u64,
    put_back: u64,
    fragmentation_sum: f64,
    fragmentation_max: f64,
    done: u64,
}

impl<'t> Engine<'t> {
    fn new(config: &CacheConfig, trace: &'t [Request], shared: bool) -> Result<Engine<'t>, BenchError> {
        Ok(Engine {
            cache: Cache::new(config).map_err(wrong)?,
            trace,
            sessions: trace.iter().map(|request| (request.session, request)).collect(),
            shared,
            now_us: 0,
            waiting: VecDeque::new(),
            blocked: false,
            active: Vec::new(),
            told: Told::default(),
        })
    }

    /// The token of a conversation at this place.
    fn token(&self, session: u64, at: u64) -> Token {
        let block = (at / u64::from(SMALL.block_tokens)) as usize;
        let known = self.sessions.get(&session).and_then(|last| last.blocks.get(block));
        let content = known.map_or(session, |hash| hash.0);
        (content ^ content >> 32 ^ at << 7) as Token
    }

    /// Lets time pass: answers grow, and come to their ends.
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
        active.began_us + (active.answered + 1) * TOKEN_US
    }

    /// One token for each sequence whose turn it is.
    fn step(&mut self) -> Result<(), BenchError> {
        for at in (0..self.active.len()).rev() {
            if self.next_token(&self.active[at]) > self.now_us {
                continue;
            }
            let Active { id, request, answered, .. } = self.active[at];
            let asked = &self.trace[request];
            let token = self.token(asked.session, asked.input_tokens + answered);
            match self.cache.append(id, token) {
                Ok(()) => {
                    complete(&mut self.cache, id)?;
                    self.active[at].answered += 1;
                    if answered + 1 >= asked.output_tokens {
                        self.active.swap_remove(at);
                        self.cache.free(id).map_err(wrong)?;
                        self.blocked = false;
                        self.told.done += 1;
                    }
                }
                Err(BlocksError::Full(_)) => {
                    self.active.swap_remove(at);
                    self.cache.free(id).map_err(wrong)?;
                    self.blocked = false;
                    self.told.put_back += 1;
                    self.waiting.push_front(request);
                }
                Err(error) => return Err(wrong(error)),
            }
        }
        Ok(())
    }

    /// Begins what waits, in order, as long as there is room.
    fn admit(&mut self) -> Result<(), BenchError> {
        while let Some(&request) = self.waiting.front().filter(|_| !self.blocked) {
            let asked = &self.trace[request];
            let prompt: Vec<Token> =
                (0..asked.input_tokens).map(|at| self.token(asked.session, at)).collect();
            // Nothing is found where nothing is to be shared.
            let salt = if self.shared { String::new() } else { format!("{request} {}", self.told.put_back) };
            match self.cache.allocate(&prompt, BlockHash::root(&salt, "")) {
                Ok(allocated) => {
                    complete(&mut self.cache, allocated.id)?;
                    self.waiting.pop_front();
                    let (id, began_us) = (allocated.id, self.now_us);
                    self.active.push(Active { id, request, began_us, answered: 0 });
                    self.look();
                }
                Err(BlocksError::Full(full)) => {
                    self.told.waits += 1;
                    self.told.scattered += u64::from(full.free >= full.wanted);
                    self.blocked = true;
                }
                Err(error) => return Err(wrong(error)),
            }
        }
        Ok(())
    }

    fn look(&mut self) {
        let stats = self.cache.stats();
        let told = &mut self.told;
        let held = stats.held + stats.reserved;
        told.peak_held = told.peak_held.max(held);
        told.held_sum += u64::from(held);
        told.fragmentation_sum += stats.fragmentation;
        told.fragmentation_max = told.fragmentation_max.max(stats.fragmentation);
        told.asked += 1;
    }

    /// Until everything is answered; says when that was.
    fn finish(&mut self) -> Result<u64, BenchError> {
        while !self.active.is_empty() || !self.waiting.is_empty() {
            if self.active.is_empty() {
                return Err(wrong("a prompt is larger than all blocks"));
            }
            let next = self.active.iter().map(|active| self.next_token(active)).min().unwrap_or(self.now_us);
            self.run_until(next)?;
        }
        Ok(self.now_us)
    }

    fn line(&mut self, name: &str, end_us: u64) -> Line {
        let stats = self.cache.stats();
        let (told, counts) = (&self.told, stats.counts);
        let mean = |sum: f64| sum / told.asked.max(1) as f64;
        Line::new("blocks", "traffic")
            .with("placement", name)
            .with("blocks", stats.blocks)
            .with("requests", told.done)
            .number("hit_rate", counts.shared_tokens as f64 / counts.prompt_tokens.max(1) as f64)
            .with("held_blocks_peak", told.peak_held)
            .number("held_blocks_mean", mean(told.held_sum as f64))
            .with("waits", told.waits)
            .with("waits_although_free", told.scattered)
            .with("put_back", told.put_back)
            .with("moved_blocks", counts.moved_blocks)
            .with("evicted_blocks", counts.evicted_blocks)
            .number("fragmentation_mean", mean(told.fragmentation_sum))
            .number("fragmentation_max", told.fragmentation_max)
            .number("virtual_s", end_us as f64 / 1e6)
    }
}
