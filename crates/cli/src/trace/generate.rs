//! Requests of made-up users. The same shape and seed give the same requests.
//!
//! ```text
//!   arrivals   Poisson, at a rate for all users together
//!   who        Zipf among the users
//!   session    the user's, until it ends: by chance after each turn, or when its context is full
//!   prompt     [ system prompt │ user │ assistant │ user │ assistant │ … │ user ]
//!                Zipf among a few, one per session      all said before, and something new
//!   block      shared between sessions while it lies within the system prompt; its session's own from there on
//! ```
//!
//! A block's hash is a chain over the hashes before it, so that equal hashes mean equal prefixes.

use std::collections::HashMap;

use super::{BLOCKS_MAX, BlockHash, Header, Request};

/// Mean tokens that a user adds in a turn.
const USER_TOKENS_MEAN: f64 = 180.0;
/// Mean tokens of an answer.
const OUTPUT_TOKENS_MEAN: f64 = 320.0;
/// A turn adds no more than this, in or out.
const TURN_TOKENS_MAX: u64 = 8192;
/// System prompts have from this many tokens …
const SYSTEM_TOKENS_MIN: u64 = 600;
/// … to this many, the logarithm uniform.
const SYSTEM_TOKENS_MAX: u64 = 12_000;
/// A session ends when its context is that long.
const CONTEXT_TOKENS_MAX: u64 = 131_072;

/// What traffic looks like.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Shape {
    /// How many users there are.
    pub(crate) users: u32,
    /// How many requests they make.
    pub(crate) requests: u64,
    /// How unequal users and system prompts are: the n-th is drawn in proportion to 1 / n^zipf.
    pub(crate) zipf: f64,
    /// How many system prompts there are.
    pub(crate) system_prompts: u32,
    /// Requests per second, of all users.
    pub(crate) rate: f64,
    /// How likely a session ends after a turn.
    pub(crate) end: f64,
}

/// A conversation that goes on.
struct Session {
    id: u64,
    system: u32,
    turns: u32,
    /// Everything said so far.
    tokens: u64,
    /// Hashes of its complete blocks.
    blocks: Vec<BlockHash>,
}

/// Makes requests, one after the other.
pub(crate) struct Generator {
    shape: Shape,
    header: Header,
    dice: Dice,
    users: Zipf,
    systems: Zipf,
    system_tokens: Vec<u64>,
    open: HashMap<u32, Session>,
    sessions: u64,
    made: u64,
    at_s: f64,
}

impl Generator {
    /// At the beginning of a trace.
    pub(crate) fn new(shape: Shape, header: Header) -> Generator {
        let mut dice = Dice(header.seed);
        let span = (SYSTEM_TOKENS_MAX as f64 / SYSTEM_TOKENS_MIN as f64).ln();
        let system_tokens = (0..shape.system_prompts)
            .map(|_| (SYSTEM_TOKENS_MIN as f64 * (span * dice.share()).exp()) as u64)
            .collect();
        Generator {
            shape,
            header,
            users: Zipf::new(shape.users, shape.zipf),
            systems: Zipf::new(shape.system_prompts, shape.zipf),
            dice,
            system_tokens,
            open: HashMap::new(),
            sessions: 0,
            made: 0,
            at_s: 0.0,
        }
    }

    fn begin(&mut self) -> Session {
        let system = self.systems.draw(&mut self.dice);
        self.sessions += 1;
        let tokens = self.system_tokens[system as usize];
        Session { id: self.sessions, system, turns: 0, tokens, blocks: vec![] }
    }

    /// Hashes of the blocks that have become complete.
    fn complete(&self, session: &mut Session) {
        let block_tokens = u64::from(self.header.block_tokens);
        let shared = self.system_tokens[session.system as usize] / block_tokens;
        let complete = (session.tokens / block_tokens).min(BLOCKS_MAX as u64);
        for at in session.blocks.len() as u64..complete {
            let before = session.blocks.last().map_or(self.header.seed, |hash| hash.0);
            let content = if at < shared { u64::from(session.system) } else { !session.id };
            session.blocks.push(BlockHash(mix(mix(before ^ 0x6d6f_6f6e_7469_6465) ^ content)));
        }
    }
}

impl Iterator for Generator {
    type Item = Request;

    fn next(&mut self) -> Option<Request> {
        if self.made == self.shape.requests {
            return None;
        }
        self.made += 1;
        self.at_s += self.dice.exponential(1.0 / self.shape.rate);
        let user = self.users.draw(&mut self.dice);
        let mut session = match self.open.remove(&user) {
            Some(session) => session,
            None => self.begin(),
        };
        let said = self.dice.tokens(USER_TOKENS_MEAN);
        let output_tokens = self.dice.tokens(OUTPUT_TOKENS_MEAN);
        session.tokens += said;
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
        let ends = self.dice.share() < self.shape.end;
        let full = CONTEXT_TOKENS_MAX.min(BLOCKS_MAX as u64 * u64::from(self.header.block_tokens));
        if !ends && session.tokens + 2 * TURN_TOKENS_MAX < full {
            self.open.insert(user, session);
        }
        Some(request)
    }
}

/// Draws the n-th of some in proportion to 1 / (n + 1)^exponent.
struct Zipf {
    /// Sums up to and with each.
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

    fn draw(&self, dice: &mut Dice) -> u32 {
        let all = self.sums.last().copied().unwrap_or(0.0);
        let at = dice.share() * all;
        let found = self.sums.partition_point(|sum| *sum <= at);
        found.min(self.sums.len() - 1) as u32
    }
}

/// SplitMix64. Ours, so that no release of a library changes the traces of old seeds.
struct Dice(u64);

impl Dice {
    fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        mix(self.0)
    }

    /// From 0 to below 1, in steps of 2^-53.
    fn share(&mut self) -> f64 {
        (self.draw() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn exponential(&mut self, mean: f64) -> f64 {
        -mean * (1.0 - self.share()).ln()
    }

    fn tokens(&mut self, mean: f64) -> u64 {
        (self.exponential(mean) as u64 + 1).min(TURN_TOKENS_MAX)
    }
}

/// The finisher of SplitMix64: every bit of the input moves every bit of the output.
fn mix(mut z: u64) -> u64 {
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    const SHAPE: Shape =
        Shape { users: 50, requests: 2000, zipf: 1.1, system_prompts: 4, rate: 10.0, end: 0.2 };

    fn generate(seed: u64, shape: Shape) -> Vec<Request> {
        Generator::new(shape, Header { block_bytes: 4096, block_tokens: 128, seed }).collect()
    }

    #[test]
    fn the_same_seed_gives_the_same_requests() {
        assert_eq!(generate(7, SHAPE), generate(7, SHAPE));
        assert_ne!(generate(7, SHAPE), generate(8, SHAPE));
    }

    #[test]
    fn a_turn_repeats_the_conversation_and_adds_to_it() {
        let mut before: BTreeMap<u64, Request> = BTreeMap::new();
        let mut last_at = 0;
        for request in generate(1, SHAPE) {
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

    /// Equal hashes stand at equal places behind equal hashes, and sessions share them exactly when they share a
    /// system prompt.
    #[test]
    fn equal_hashes_mean_equal_prefixes() {
        let mut prefix_of: BTreeMap<BlockHash, Vec<BlockHash>> = BTreeMap::new();
        let requests = generate(3, SHAPE);
        for request in &requests {
            for (at, block) in request.blocks.iter().enumerate() {
                let prefix = &request.blocks[..at];
                assert_eq!(prefix_of.entry(*block).or_insert_with(|| prefix.to_vec()), prefix);
            }
        }
        let firsts: std::collections::BTreeSet<_> =
            requests.iter().filter_map(|request| request.blocks.first()).collect();
        assert!((2..=4).contains(&firsts.len()), "as many as system prompts: {}", firsts.len());
    }

    #[test]
    fn arrivals_and_users_are_as_asked() {
        let requests = generate(5, Shape { requests: 20_000, ..SHAPE });
        let seconds = requests.last().unwrap().at_us as f64 / 1e6;
        assert!((1900.0..2100.0).contains(&seconds), "20000 requests at 10 a second took {seconds}");
        let turns =
            requests.len() as f64 / requests.iter().filter(|request| request.turn == 0).count() as f64;
        assert!((4.0..6.0).contains(&turns), "{turns} turns a session, 1 / 0.2 are expected");
    }

    #[test]
    fn extreme_shapes_stay_within_the_bounds() {
        let long = Shape { users: 1, requests: 3000, system_prompts: 1, end: 0.0, ..SHAPE };
        for block_tokens in [1, 16, 1 << 20] {
            let header = Header { block_bytes: 1, block_tokens, seed: 1 };
            for request in Generator::new(long, header) {
                assert!(request.blocks.len() <= BLOCKS_MAX);
                assert!(request.input_tokens <= CONTEXT_TOKENS_MAX);
            }
        }
    }
}
