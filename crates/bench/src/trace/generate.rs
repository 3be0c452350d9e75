//! Synthetic requests. Equal parameters and seed give equal requests.
//!
//! ```text
//!   arrivals   Poisson, at one rate for all users together
//!   user       Zipf among the users
//!   session    one per user, until it ends: randomly after each turn, or when its context is full
//!   prompt     [ system prompt │ user │ assistant │ user │ assistant │ … │ user ]
//!                Zipf, one per session                   all earlier turns, and new tokens
//!   block      shared between sessions within the system prompt; private to its session after it
//! ```
//!
//! The hash of a block is chained over the hashes before it, so that equal hashes imply equal prefixes.

use std::collections::HashMap;

use moontide_rt::{SplitMix64, mix64};

use super::{BLOCKS_MAX, BlockHash, Header, Request};

/// Mean number of tokens that a user adds per turn.
const USER_TOKENS_MEAN: f64 = 180.0;
/// Mean number of output tokens.
const OUTPUT_TOKENS_MEAN: f64 = 320.0;
/// Maximum number of tokens that a turn adds, for input and for output.
const TURN_TOKENS_MAX: u64 = 8192;
/// Minimum number of tokens of a system prompt.
const SYSTEM_TOKENS_MIN: u64 = 600;
/// Maximum number of tokens of a system prompt; the logarithm is uniformly distributed.
const SYSTEM_TOKENS_MAX: u64 = 12_000;
/// Context length at which a session ends.
const CONTEXT_TOKENS_MAX: u64 = 131_072;

/// Parameters of the generated traffic.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct TraceParams {
    /// Number of users.
    pub(crate) users: u32,
    /// Number of requests of all users.
    pub(crate) requests: u64,
    /// Skew of users and system prompts: the n-th is drawn in proportion to 1 / n^zipf.
    pub(crate) zipf: f64,
    /// Number of system prompts.
    pub(crate) system_prompts: u32,
    /// Requests per second of all users.
    pub(crate) rate: f64,
    /// Probability that a session ends after a turn.
    pub(crate) end: f64,
}

/// An open session.
struct Session {
    id: u64,
    system: u32,
    turns: u32,
    /// Tokens of all turns so far, with the system prompt.
    tokens: u64,
    /// Hashes of the complete blocks.
    blocks: Vec<BlockHash>,
}

/// Iterator of generated requests.
pub(crate) struct Generator {
    params: TraceParams,
    header: Header,
    rng: SplitMix64,
    users: Zipf,
    systems: Zipf,
    system_tokens: Vec<u64>,
    open: HashMap<u32, Session>,
    sessions: u64,
    generated: u64,
    at_s: f64,
}

impl Generator {
    /// Creates a generator at the start of a trace.
    pub(crate) fn new(params: TraceParams, header: Header) -> Generator {
        let mut rng = SplitMix64::new(header.seed);
        let span = (SYSTEM_TOKENS_MAX as f64 / SYSTEM_TOKENS_MIN as f64).ln();
        let system_tokens = (0..params.system_prompts)
            .map(|_| (SYSTEM_TOKENS_MIN as f64 * (span * rng.fraction()).exp()) as u64)
            .collect();
        Generator {
            params,
            header,
            users: Zipf::new(params.users, params.zipf),
            systems: Zipf::new(params.system_prompts, params.zipf),
            rng,
            system_tokens,
            open: HashMap::new(),
            sessions: 0,
            generated: 0,
            at_s: 0.0,
        }
    }

    fn begin(&mut self) -> Session {
        let system = self.systems.draw(&mut self.rng);
        self.sessions += 1;
        let tokens = self.system_tokens[system as usize];
        Session { id: self.sessions, system, turns: 0, tokens, blocks: vec![] }
    }

    /// Appends the hashes of the blocks that have become complete.
    fn complete(&self, session: &mut Session) {
        let block_tokens = u64::from(self.header.block_tokens);
        let shared = self.system_tokens[session.system as usize] / block_tokens;
        let complete = (session.tokens / block_tokens).min(BLOCKS_MAX as u64);
        for at in session.blocks.len() as u64..complete {
            let before = session.blocks.last().map_or(self.header.seed, |hash| hash.0);
            let content = if at < shared { u64::from(session.system) } else { !session.id };
            session.blocks.push(BlockHash(mix64(mix64(before ^ 0x6d6f_6f6e_7469_6465) ^ content)));
        }
    }
}

impl Iterator for Generator {
    type Item = Request;

    fn next(&mut self) -> Option<Request> {
        if self.generated == self.params.requests {
            return None;
        }
        self.generated += 1;
        self.at_s += exponential(&mut self.rng, 1.0 / self.params.rate);
        let user = self.users.draw(&mut self.rng);
        let mut session = match self.open.remove(&user) {
            Some(session) => session,
            None => self.begin(),
        };
        let user_tokens = tokens(&mut self.rng, USER_TOKENS_MEAN);
        let output_tokens = tokens(&mut self.rng, OUTPUT_TOKENS_MEAN);
        session.tokens += user_tokens;
        self.complete(&mut session);
        let request = Request {
            at_us: (self.at_s * 1e6) as u64,
            session: session.id,
            turn: session.turns,
            input_tokens: session.tokens,
            output_tokens,
            blocks: session.blocks.clone(),
        };
        session.tokens += output_tokens;
        session.turns += 1;
        let ends = self.rng.fraction() < self.params.end;
        let full = CONTEXT_TOKENS_MAX.min(BLOCKS_MAX as u64 * u64::from(self.header.block_tokens));
        if !ends && session.tokens + 2 * TURN_TOKENS_MAX < full {
            self.open.insert(user, session);
        }
        Some(request)
    }
}

/// Distribution that draws index n in proportion to 1 / (n + 1)^exponent.
struct Zipf {
    /// Cumulative weights.
    sums: Vec<f64>,
}

impl Zipf {
    fn new(count: u32, exponent: f64) -> Zipf {
        let mut sum = 0.0;
        let weights = (1..=count).map(|n| f64::from(n).powf(-exponent));
        Zipf {
            sums: weights
                .map(|weight| {
                    sum += weight;
                    sum
                })
                .collect(),
        }
    }

    fn draw(&self, rng: &mut SplitMix64) -> u32 {
        let all = self.sums.last().copied().unwrap_or(0.0);
        let at = rng.fraction() * all;
        let found = self.sums.partition_point(|sum| *sum <= at);
        found.min(self.sums.len() - 1) as u32
    }
}

fn exponential(rng: &mut SplitMix64, mean: f64) -> f64 {
    -mean * (1.0 - rng.fraction()).ln()
}

fn tokens(rng: &mut SplitMix64, mean: f64) -> u64 {
    (exponential(rng, mean) as u64 + 1).min(TURN_TOKENS_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    const PARAMS: TraceParams =
        TraceParams { users: 50, requests: 2000, zipf: 1.1, system_prompts: 4, rate: 10.0, end: 0.2 };

    fn generate(seed: u64, params: TraceParams) -> Vec<Request> {
        Generator::new(params, Header { block_bytes: 4096, block_tokens: 128, seed }).collect()
    }

    #[test]
    fn same_seed_generates_same_requests() {
        assert_eq!(generate(7, PARAMS), generate(7, PARAMS));
        assert_ne!(generate(7, PARAMS), generate(8, PARAMS));
    }

    #[test]
    fn turn_extends_blocks_of_previous_turn() {
        let mut before: BTreeMap<u64, Request> = BTreeMap::new();
        let mut last_at = 0;
        for request in generate(1, PARAMS) {
            assert!(request.at_us >= last_at);
            last_at = request.at_us;
            assert_eq!(request.blocks.len() as u64, request.input_tokens / 128);
            match before.get(&request.session) {
                None => assert_eq!(request.turn, 0),
                Some(earlier) => {
                    assert_eq!(request.turn, earlier.turn + 1);
                    assert!(request.blocks.starts_with(&earlier.blocks));
                    assert!(request.input_tokens > earlier.input_tokens + earlier.output_tokens);
                }
            }
            before.insert(request.session, request);
        }
        assert!(before.len() > 100);
    }

    /// Equal hashes have equal positions and equal preceding hashes, and sessions share them exactly when they share a
    /// system prompt.
    #[test]
    fn equal_block_hashes_imply_equal_prefixes() {
        let mut prefix_of: BTreeMap<BlockHash, Vec<BlockHash>> = BTreeMap::new();
        let requests = generate(3, PARAMS);
        for request in &requests {
            for (at, block) in request.blocks.iter().enumerate() {
                let prefix = &request.blocks[..at];
                assert_eq!(prefix_of.entry(*block).or_insert_with(|| prefix.to_vec()), prefix);
            }
        }
        let firsts: std::collections::BTreeSet<_> =
            requests.iter().filter_map(|request| request.blocks.first()).collect();
        assert!(
            (2..=4).contains(&firsts.len()),
            "expected one first block per system prompt: {}",
            firsts.len()
        );
    }

    #[test]
    fn arrival_rate_and_session_length_match_parameters() {
        let requests = generate(5, TraceParams { requests: 20_000, ..PARAMS });
        let seconds = requests.last().unwrap().at_us as f64 / 1e6;
        assert!((1900.0..2100.0).contains(&seconds), "20000 requests at 10 per second took {seconds} s");
        let turns =
            requests.len() as f64 / requests.iter().filter(|request| request.turn == 0).count() as f64;
        assert!((4.0..6.0).contains(&turns), "{turns} turns per session, expected 1 / 0.2");
    }

    #[test]
    fn extreme_parameters_respect_block_and_token_limits() {
        let long = TraceParams { users: 1, requests: 3000, system_prompts: 1, end: 0.0, ..PARAMS };
        for block_tokens in [1, 16, 1 << 20] {
            let header = Header { block_bytes: 1, block_tokens, seed: 1 };
            for request in Generator::new(long, header) {
                assert!(request.blocks.len() <= BLOCKS_MAX);
                assert!(request.input_tokens <= CONTEXT_TOKENS_MAX);
            }
        }
    }
}
