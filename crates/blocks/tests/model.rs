//! Random histories against a naive model: every sequence as a plain list of rows.
//!
//! What a token leaves in the cache depends, as in a real model, on everything that was visible when it was computed: a
//! row's bytes are made from a number that is a digest of the rows before it, the token and its position. So a block that
//! is shared, restored or moved wrongly shows, and so does one that was written while it was seen.
//!
//! 400 histories by default; `MOONTIDE_HISTORIES=100000` for more, `MOONTIDE_SEED=n` for one alone.

mod support;

use std::collections::HashMap;

use moontide_blocks::{
    Attention, BlockHash, BlocksError, Cache, CacheConfig, Dtype, Held, Keep, Order, ParkError, Parked,
    Placement, Plane, SequenceId, Shape, Token,
};
use support::{Memory, Random, Watch, mix};

const OPERATIONS: u64 = 80;
const HISTORIES: u64 = 400;

#[test]
fn any_history_is_what_plain_lists_say() {
    if let Some(seed) = number("MOONTIDE_SEED") {
        return history(seed);
    }
    let histories = number("MOONTIDE_HISTORIES").unwrap_or(HISTORIES);
    let mut done = Done::default();
    for seed in 0..histories {
        println!("MOONTIDE_SEED={seed}");
        History::new(seed).run(&mut done);
        if seed % 10_000 == 9_999 {
            eprintln!("{} of {histories} histories", seed + 1);
        }
    }
    println!("{done:?}");
    done.everything_happened();
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name)
        .ok()
        .map(|text| text.parse().unwrap_or_else(|_| panic!("{name} is a number, not {text}")))
}

fn history(seed: u64) {
    History::new(seed).run(&mut Done::default());
}

/// How often things came about: a model test that never does them shows nothing.
#[derive(Debug, Default)]
struct Done {
    counts: HashMap<&'static str, u64>,
}

impl Done {
    fn add(&mut self, what: &'static str) {
        *self.counts.entry(what).or_default() += 1;
    }

    fn everything_happened(&self) {
        for what in [
            "allocated",
            "shared a prefix",
            "full",
            "appended",
            "append refused",
            "filled",
            "filled in part",
            "fork",
            "truncated",
            "freed",
            "spilled",
            "restored",
            "parked",
            "park refused",
            "resumed",
            "resumed in part",
            "grew",
            "shrank",
            "shrink refused",
            "thinned",
            "held",
            "pinned",
            "pinned while being filled",
            "a pin outlived its sequence",
            "watched",
            "a view outlived its sequence",
            "cleared",
        ] {
            assert!(self.counts.contains_key(what), "never: {what}; {self:?}");
        }
    }
}

/// A sequence as a plain list.
#[derive(Clone, Debug)]
struct Plain {
    root: BlockHash,
    tokens: Vec<(Token, u32)>,
    /// What the rows of complete tokens are made from.
    rows: Vec<u64>,
    next: u32,
}

impl Plain {
    fn push(&mut self, token: Token) {
        self.tokens.push((token, self.next));
        self.next += 1;
    }

    /// The number of the next row, given all before it.
    fn next_row(&self) -> u64 {
        let (token, position) = self.tokens[self.rows.len()];
        let mut sum = u64::from_le_bytes(*self.root.0.first_chunk().unwrap());
        for row in &self.rows {
            sum = mix(sum ^ row);
        }
        mix(sum ^ u64::from(token) << 32 ^ u64::from(position))
    }
}

/// The bytes of one head of a row.
fn bytes(row: u64, plane: Plane, layer: u32, head: usize, len: usize) -> Vec<u8> {
    let place = u64::from(layer) << 8 | (head as u64) << 1 | u64::from(plane == Plane::Values);
    (0..len).map(|at| mix(row ^ mix(place) ^ at as u64) as u8).collect()
}

struct History {
    random: Random,
    shape: Shape,
    blocks_max: u32,
    contiguous: bool,
    cache: Cache,
    plain: HashMap<SequenceId, Plain>,
    parked: Vec<(Parked, Plain)>,
    held: Vec<Held>,
    /// What was pinned, of which sequence, and what it showed then.
    pinned: Vec<(Held, SequenceId, Vec<u64>)>,
    store: Memory,
    watch: Option<(Watch, SequenceId, Vec<u64>)>,
    log: Vec<String>,
}

impl History {
    fn new(seed: u64) -> History {
        let mut random = Random::new(seed);
        let attention = match random.below(3) {
            0 => Attention::Latent { rank: 3, rope: 1 },
            _ => Attention::Heads { kv_heads: random.below(3) as u32 + 1, dim: 2 },
        };
        let shape = Shape {
            layers: random.below(2) as u32 + 1,
            block_tokens: random.below(4) as u32 + 1,
            attention,
            dtype: [Dtype::F8, Dtype::Bf16, Dtype::F32][random.below(3) as usize],
            order: [Order::TokenMajor, Order::HeadMajor][random.below(2) as usize],
        };
        let contiguous = random.below(4) == 0;
        let placement = match contiguous {
            true => Placement::Contiguous { reserve: random.below(3) as u32 },
            false => Placement::Paged,
        };
        let blocks_max = 40;
        let blocks = random.below(20) as u32 + 6;
        let config =
            CacheConfig { blocks_max, sequences_max: 12, placement, ..CacheConfig::new(shape, blocks) };
        let cache = Cache::new(&config).expect("a small arena");
        History {
            random,
            shape,
            blocks_max,
            contiguous,
            cache,
            plain: HashMap::new(),
            parked: Vec::new(),
            held: Vec::new(),
            pinned: Vec::new(),
            store: Memory::default(),
            watch: None,
            log: Vec::new(),
        }
    }

    fn run(mut self, done: &mut Done) {
        for _ in 0..OPERATIONS {
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                self.step(done);
                self.check();
            }));
            if let Err(panic) = outcome {
                eprintln!("{:?}, contiguous: {}\n{}", self.shape, self.contiguous, self.log.join("\n"));
                std::panic::resume_unwind(panic);
            }
        }
        self.watch = None;
        self.held.clear();
        self.pinned.clear();
        for id in self.plain.drain().map(|(id, _)| id).collect::<Vec<_>>() {
            self.cache.free(id).unwrap();
        }
        self.cache.clear();
        let stats = self.cache.stats();
        assert_eq!((stats.free, stats.held), (stats.blocks, 0), "all blocks are free in the end");
    }

    /// Some sequence.
    fn any(&mut self) -> Option<SequenceId> {
        let mut ids: Vec<_> = self.plain.keys().copied().collect();
        ids.sort_unstable_by_key(|id| id.to_bits());
        let at = self.random.below(ids.len().max(1) as u64) as usize;
        ids.get(at).copied()
    }

    fn step(&mut self, done: &mut Done) {
        let operation = self.random.below(100);
        self.log.push(format!("operation {operation}"));
        match operation {
            0..16 => self.allocate(done),
            16..42 => self.append(done),
            42..60 => self.fill(done),
            60..66 => self.fork(done),
            66..69 => self.truncate(done),
            69..77 => self.free(done),
            77..79 => self.spill(done),
            79..82 => self.restore(done),
            82..86 => self.park(done),
            86..90 => self.resume(done),
            90..92 => self.resize(done),
            92..94 => self.thin(done),
            94..96 => self.hold(done),
            96..98 => self.watch(done),
            98 => self.pin(done),
            _ => {
                self.cache.clear();
                done.add("cleared");
            }
        }
    }

    fn allocate(&mut self, done: &mut Done) {
        let root = BlockHash::root(["", "salt"][self.random.below(2) as usize], "");
        // Few different tokens, so that prefixes are met again.
        let prompt: Vec<Token> =
            (0..self.random.below(14)).map(|_| (self.random.below(8) == 0) as Token).collect();
        self.log.push(format!("allocate {prompt:?}"));
        match self.cache.allocate(&prompt, root) {
            Ok(allocated) => {
                let mut plain = Plain { root, tokens: Vec::new(), rows: Vec::new(), next: 0 };
                prompt.iter().for_each(|token| plain.push(*token));
                for _ in 0..allocated.shared_tokens {
                    plain.rows.push(plain.next_row());
                }
                assert!(allocated.shared_tokens < prompt.len().max(1), "the last token is to be computed");
                if allocated.shared_tokens > 0 {
                    done.add("shared a prefix");
                }
                self.plain.insert(allocated.id, plain);
                done.add("allocated");
            }
            Err(BlocksError::Sequences { .. }) => assert_eq!(self.plain.len(), 12),
            Err(BlocksError::Full(_)) => done.add("full"),
            Err(error) => panic!("{error}"),
        }
    }

    fn append(&mut self, done: &mut Done) {
        let Some(id) = self.any() else { return };
        let token = self.random.below(2) as Token;
        match self.cache.append(id, token) {
            Ok(()) => {
                self.plain.get_mut(&id).unwrap().push(token);
                done.add("appended");
            }
            Err(BlocksError::Full(_)) => done.add("append refused"),
            Err(error) => panic!("{error}"),
        }
    }

    fn fill(&mut self, done: &mut Done) {
        let Some(id) = self.any() else { return };
        let mut fill = match self.cache.fill(id) {
            Ok(fill) => fill,
            Err(BlocksError::Full(_)) => return,
            Err(error) => panic!("{error}"),
        };
        let plain = self.plain.get_mut(&id).unwrap();
        assert_eq!(fill.tokens(), plain.rows.len()..plain.tokens.len());
        if self.pinned.len() < 2 && self.random.below(10) == 0 {
            // In the same block, perhaps, in which rows are written now.
            self.pinned.push((self.cache.pin(id).unwrap(), id, plain.rows.clone()));
            done.add("pinned while being filled");
        }
        let count = fill.tokens().len();
        let complete =
            if self.random.below(3) > 0 { count } else { self.random.below(count as u64 + 1) as usize };
        let mut rows = Vec::new();
        for _ in 0..complete {
            plain.rows.push(plain.next_row());
            rows.push(*plain.rows.last().unwrap());
        }
        // Junk, where rows are not complete: nobody may ever see it.
        rows.resize(count, u64::MAX);
        for &plane in self.shape.planes() {
            for layer in 0..self.shape.layers {
                let heads = 0..self.shape.heads();
                let dense: Vec<u8> = rows
                    .iter()
                    .flat_map(|row| heads.clone().map(move |head| (row, head)))
                    .flat_map(|(row, head)| bytes(*row, plane, layer, head, self.shape.row_bytes()))
                    .collect();
                fill.write(plane, layer, &dense);
            }
        }
        fill.complete(complete);
        if self.random.below(10) == 0 {
            // Given up: as if nothing had been written.
            drop(fill);
            plain.rows.truncate(plain.rows.len() - complete);
            return;
        }
        assert_eq!(self.cache.free(id), Err(BlocksError::Busy(id)));
        assert_eq!(self.cache.fork(id), Err(BlocksError::Busy(id)));
        self.cache.commit(fill).unwrap();
        done.add(if complete == count { "filled" } else { "filled in part" });
    }

    fn fork(&mut self, done: &mut Done) {
        let Some(id) = self.any() else { return };
        match self.cache.fork(id) {
            Ok(child) => {
                let mut plain = self.plain[&id].clone();
                if let Some((_, position)) = plain.tokens.get(plain.rows.len()) {
                    plain.next = *position;
                }
                plain.tokens.truncate(plain.rows.len());
                self.plain.insert(child, plain);
                done.add("fork");
            }
            Err(BlocksError::Sequences { .. }) => assert_eq!(self.plain.len(), 12),
            Err(BlocksError::Full(_)) if self.contiguous => {}
            Err(error) => panic!("{error}"),
        }
    }

    fn truncate(&mut self, done: &mut Done) {
        let Some(id) = self.any() else { return };
        let plain = self.plain.get_mut(&id).unwrap();
        let tokens = self.random.below(plain.tokens.len() as u64 + 2) as usize;
        self.cache.truncate(id, tokens).unwrap();
        if let Some((_, position)) = plain.tokens.get(tokens) {
            plain.next = *position;
            done.add("truncated");
        }
        plain.tokens.truncate(tokens);
        plain.rows.truncate(tokens);
    }

    fn free(&mut self, done: &mut Done) {
        let Some(id) = self.any() else { return };
        self.cache.free(id).unwrap();
        self.plain.remove(&id);
        assert_eq!(self.cache.append(id, 0), Err(BlocksError::Unknown(id)));
        done.add("freed");
    }

    fn spill(&mut self, done: &mut Done) {
        let Some(id) = self.any() else { return };
        self.store.moody(&mut self.random);
        if self.cache.spill(id, &self.store).is_ok_and(|all| all) {
            done.add("spilled");
        }
    }

    fn restore(&mut self, done: &mut Done) {
        let Some(id) = self.any() else { return };
        self.store.moody(&mut self.random);
        match self.cache.restore(id, &self.store) {
            Ok(restored) => {
                let plain = self.plain.get_mut(&id).unwrap();
                for _ in 0..restored {
                    plain.rows.push(plain.next_row());
                }
                assert!(
                    restored == 0 || plain.rows.len() < plain.tokens.len(),
                    "the last token is to be computed"
                );
                if restored > 0 {
                    done.add("restored");
                }
            }
            Err(ParkError::Store(_) | ParkError::Blocks(BlocksError::Full(_))) => {}
            Err(error) => panic!("{error}"),
        }
    }

    fn park(&mut self, done: &mut Done) {
        let Some(id) = self.any() else { return };
        self.store.moody(&mut self.random);
        match self.cache.park(id, &self.store) {
            Ok(parked) => {
                let plain = self.plain.remove(&id).unwrap();
                assert_eq!(parked.filled(), plain.rows.len());
                let elsewhere = Parked::from_bytes(&parked.to_bytes());
                assert_eq!(elsewhere.as_ref(), Some(&parked), "names follow from the rest");
                self.parked.push((parked, plain));
                done.add("parked");
            }
            Err(ParkError::Store(_) | ParkError::Refused) => done.add("park refused"),
            Err(error) => panic!("{error}"),
        }
    }

    fn resume(&mut self, done: &mut Done) {
        let Some((parked, mut plain)) = self.parked.pop() else { return };
        self.store.moody(&mut self.random);
        match self.cache.resume(&parked, &self.store) {
            Ok(id) => {
                let filled = self.cache.filled_of(id).unwrap();
                done.add(if filled >= plain.rows.len() { "resumed" } else { "resumed in part" });
                plain.rows.truncate(filled);
                // Others may have computed more of it in the meantime.
                while plain.rows.len() < filled {
                    plain.rows.push(plain.next_row());
                }
                self.plain.insert(id, plain);
            }
            Err(ParkError::Store(_)) => self.parked.push((parked, plain)),
            Err(ParkError::Blocks(BlocksError::Sequences { .. } | BlocksError::Full(_))) => {
                self.parked.push((parked, plain));
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn resize(&mut self, done: &mut Done) {
        let blocks = self.random.below(u64::from(self.blocks_max)) as u32 + 1;
        let before = self.cache.stats().blocks;
        match self.cache.resize(blocks) {
            Ok(()) => done.add(if blocks > before { "grew" } else { "shrank" }),
            Err(BlocksError::Full(_)) => done.add("shrink refused"),
            Err(error) => panic!("{error}"),
        }
    }

    fn thin(&mut self, done: &mut Done) {
        let Some(id) = self.any() else { return };
        let worth: Vec<f32> = (0..20).map(|_| self.random.below(100) as f32).collect();
        self.cache.add_worth(id, &worth).unwrap();
        let mut part = |up_to| self.random.below(up_to) as usize;
        let keep = Keep { first: part(3), last: part(3), budget: part(12) };
        let plain = self.plain.get_mut(&id).unwrap();
        match self.cache.thin(id, &keep) {
            Ok(positions) => {
                if positions.len() < plain.tokens.len() {
                    done.add("thinned");
                    assert_eq!(positions.len(), keep.budget);
                }
                let stays: Vec<bool> = plain.tokens.iter().map(|(_, at)| positions.contains(at)).collect();
                let mut stay = stays.iter();
                plain.tokens.retain(|_| *stay.next().unwrap());
                let mut stay = stays.iter();
                plain.rows.retain(|_| *stay.next().unwrap());
            }
            Err(BlocksError::Incomplete(_)) => assert!(plain.rows.len() < plain.tokens.len()),
            Err(BlocksError::Full(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }

    fn hold(&mut self, done: &mut Done) {
        if self.random.below(2) == 0 {
            self.held.pop();
        } else if let Some(id) = self.any() {
            self.held.push(self.cache.hold(id).unwrap());
            done.add("held");
        }
    }

    /// What is pinned shows what it showed, while everything changes.
    fn pin(&mut self, done: &mut Done) {
        if self.pinned.len() > 1 {
            let (_, id, _) = self.pinned.remove(0);
            if !self.plain.contains_key(&id) {
                done.add("a pin outlived its sequence");
            }
        } else if let Some(id) = self.any() {
            let rows = self.plain[&id].rows.clone();
            self.pinned.push((self.cache.pin(id).unwrap(), id, rows));
            done.add("pinned");
        }
    }

    /// A reader enters and looks at a sequence, and goes on looking while everything changes.
    fn watch(&mut self, done: &mut Done) {
        if let Some((_, id, _)) = self.watch.take() {
            if !self.plain.contains_key(&id) {
                done.add("a view outlived its sequence");
            }
        } else if let Some(id) = self.any() {
            let rows = self.plain[&id].rows.clone();
            self.watch = Some((Watch::new(self.cache.reader().unwrap(), id), id, rows));
            done.add("watched");
        }
    }

    /// Everything that can be seen is as the lists say.
    fn check(&mut self) {
        let held: Vec<&Held> = self.held.iter().chain(self.pinned.iter().map(|(held, ..)| held)).collect();
        if let Err(contradiction) = self.cache.audit(&held) {
            panic!("{contradiction}");
        }
        for (id, plain) in &self.plain {
            let tokens: Vec<Token> = plain.tokens.iter().map(|(token, _)| *token).collect();
            assert_eq!(self.cache.tokens(*id).unwrap(), tokens, "{id}");
            let positions: Vec<u32> = plain.tokens.iter().map(|(_, position)| *position).collect();
            assert_eq!(self.cache.positions(*id).unwrap(), positions, "{id}");
            support::check_view(&self.shape, &self.cache.view(*id).unwrap(), &plain.rows, &bytes);
            if self.contiguous && !plain.rows.is_empty() {
                assert!(self.cache.view(*id).unwrap().contiguous(Plane::Keys, 0).is_some(), "{id}");
            }
        }
        if let Some((watch, _, rows)) = &self.watch {
            support::check_view(&self.shape, &watch.view(), rows, &bytes);
        }
        for (pinned, _, rows) in &self.pinned {
            support::check_pinned(&self.shape, pinned, rows, &bytes);
        }
        // No block is in two sequences, unless what it holds is the same in both.
        let mut owners: HashMap<u32, &[u64]> = HashMap::new();
        for (id, plain) in &self.plain {
            for (at, block) in self.cache.blocks_of(*id).unwrap().into_iter().enumerate() {
                let from = (at * self.shape.block_tokens as usize).min(plain.rows.len());
                let to = (from + self.shape.block_tokens as usize).min(plain.rows.len());
                let mine = &plain.rows[from..to];
                let theirs = owners.entry(block).or_insert(mine);
                let common = mine.len().min(theirs.len());
                assert_eq!(mine[..common], theirs[..common], "block {block}");
            }
        }
    }
}
