//! Random histories against a naive model: every sequence as a plain list of rows.
//!
//! The rows of a token depend, as in a real model, on everything that was visible when they were computed: a row's
//! bytes are derived from a digest of the rows before it, the token and its position. So the test detects a block that
//! is shared, restored or moved wrongly, and one that was written while it was visible.
//!
//! 400 histories by default; `MOONTIDE_CASES=100000` for more, `MOONTIDE_SEED=n` for a single one.

mod support;

use std::collections::HashMap;

use moontide_blocks::{
    Attention, BlockHash, BlockPlacement, Cache, CacheConfig, CacheError, CacheShape, DimOrder, Dtype,
    PinnedBlocks, Plane, PrunePolicy, SequenceId, SuspendError, SuspendedSequence, Token,
};
use moontide_rt::SplitMix64;
use support::{MemoryStore, Watch, mix};

const OPERATIONS: u64 = 80;
const HISTORIES: u64 = 400;

#[test]
fn cache_matches_list_model_for_random_histories() {
    if let Some(seed) = number("MOONTIDE_SEED") {
        return history(seed);
    }
    let histories = number("MOONTIDE_CASES").unwrap_or(HISTORIES);
    let mut coverage = Coverage::default();
    for seed in 0..histories {
        println!("MOONTIDE_SEED={seed}");
        History::new(seed).run(&mut coverage);
        if seed % 10_000 == 9_999 {
            eprintln!("{} of {histories} histories", seed + 1);
        }
    }
    println!("{coverage:?}");
    coverage.check_complete();
}

fn number(name: &str) -> Option<u64> {
    std::env::var(name)
        .ok()
        .map(|text| text.parse().unwrap_or_else(|_| panic!("{name} must be a number, not {text}")))
}

fn history(seed: u64) {
    History::new(seed).run(&mut Coverage::default());
}

/// Counts of events: a model test in which an event never happens does not test it.
#[derive(Debug, Default)]
struct Coverage {
    counts: HashMap<&'static str, u64>,
}

impl Coverage {
    fn add(&mut self, event: &'static str) {
        *self.counts.entry(event).or_default() += 1;
    }

    fn check_complete(&self) {
        for event in [
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
            "suspended",
            "suspend refused",
            "resumed",
            "resumed in part",
            "grew",
            "shrank",
            "shrink refused",
            "pruned",
            "held",
            "pinned",
            "pinned while being filled",
            "a pin outlived its sequence",
            "watched",
            "a view outlived its sequence",
            "cleared",
        ] {
            assert!(self.counts.contains_key(event), "event never happened: {event}; {self:?}");
        }
    }
}

/// Model of a sequence: plain lists.
#[derive(Clone, Debug)]
struct SequenceModel {
    root: BlockHash,
    tokens: Vec<(Token, u32)>,
    /// Numbers from which the rows of complete tokens are derived.
    rows: Vec<u64>,
    next: u32,
}

impl SequenceModel {
    fn push(&mut self, token: Token) {
        self.tokens.push((token, self.next));
        self.next += 1;
    }

    /// Returns the number of the next row, given all before it.
    fn next_row(&self) -> u64 {
        let (token, position) = self.tokens[self.rows.len()];
        let mut sum = u64::from_le_bytes(*self.root.0.first_chunk().unwrap());
        for row in &self.rows {
            sum = mix(sum ^ row);
        }
        mix(sum ^ u64::from(token) << 32 ^ u64::from(position))
    }
}

/// Returns the bytes of one head of a row.
fn bytes(row: u64, plane: Plane, layer: u32, head: usize, len: usize) -> Vec<u8> {
    let index = u64::from(layer) << 8 | (head as u64) << 1 | u64::from(plane == Plane::Values);
    (0..len).map(|at| mix(row ^ mix(index) ^ at as u64) as u8).collect()
}

struct History {
    random: SplitMix64,
    shape: CacheShape,
    blocks_max: u32,
    contiguous: bool,
    cache: Cache,
    models: HashMap<SequenceId, SequenceModel>,
    suspended: Vec<(SuspendedSequence, SequenceModel)>,
    held: Vec<PinnedBlocks>,
    /// Pins, each with its sequence and the rows at the time of the pin.
    pinned: Vec<(PinnedBlocks, SequenceId, Vec<u64>)>,
    store: MemoryStore,
    watch: Option<(Watch, SequenceId, Vec<u64>)>,
    log: Vec<String>,
}

impl History {
    fn new(seed: u64) -> History {
        let mut random = support::random(seed);
        let attention = match random.below(3) {
            0 => Attention::Latent { rank: 3, rope: 1 },
            _ => Attention::Heads { kv_heads: random.below(3) as u32 + 1, dim: 2 },
        };
        let shape = CacheShape {
            layers: random.below(2) as u32 + 1,
            block_tokens: random.below(4) as u32 + 1,
            attention,
            dtype: [Dtype::F8, Dtype::Bf16, Dtype::F32][random.below(3) as usize],
            order: [DimOrder::TokenMajor, DimOrder::HeadMajor][random.below(2) as usize],
        };
        let contiguous = random.below(4) == 0;
        let placement = match contiguous {
            true => BlockPlacement::Contiguous { reserve: random.below(3) as u32 },
            false => BlockPlacement::Paged,
        };
        let blocks_max = 40;
        let blocks = random.below(20) as u32 + 6;
        let config =
            CacheConfig { blocks_max, sequences_max: 12, placement, ..CacheConfig::new(shape, blocks) };
        let cache = Cache::new(&config).expect("arena is small");
        History {
            random,
            shape,
            blocks_max,
            contiguous,
            cache,
            models: HashMap::new(),
            suspended: Vec::new(),
            held: Vec::new(),
            pinned: Vec::new(),
            store: MemoryStore::default(),
            watch: None,
            log: Vec::new(),
        }
    }

    fn run(mut self, coverage: &mut Coverage) {
        for _ in 0..OPERATIONS {
            let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                self.step(coverage);
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
        for id in self.models.drain().map(|(id, _)| id).collect::<Vec<_>>() {
            self.cache.free(id).unwrap();
        }
        self.cache.clear();
        let stats = self.cache.stats();
        assert_eq!((stats.free, stats.in_use), (stats.blocks, 0), "blocks were leaked");
    }

    /// Returns a random sequence.
    fn any(&mut self) -> Option<SequenceId> {
        let mut ids: Vec<_> = self.models.keys().copied().collect();
        ids.sort_unstable_by_key(|id| id.to_bits());
        let at = self.random.below(ids.len().max(1) as u64) as usize;
        ids.get(at).copied()
    }

    fn step(&mut self, coverage: &mut Coverage) {
        let operation = self.random.below(100);
        self.log.push(format!("operation {operation}"));
        match operation {
            0..16 => self.allocate(coverage),
            16..42 => self.append(coverage),
            42..60 => self.write_rows(coverage),
            60..66 => self.fork(coverage),
            66..69 => self.truncate(coverage),
            69..77 => self.free(coverage),
            77..79 => self.spill(coverage),
            79..82 => self.restore(coverage),
            82..86 => self.suspend(coverage),
            86..90 => self.resume(coverage),
            90..92 => self.resize(coverage),
            92..94 => self.prune(coverage),
            94..96 => self.hold(coverage),
            96..98 => self.watch(coverage),
            98 => self.pin(coverage),
            _ => {
                self.cache.clear();
                coverage.add("cleared");
            }
        }
    }

    fn allocate(&mut self, coverage: &mut Coverage) {
        let root = BlockHash::root(["", "salt"][self.random.below(2) as usize], "");
        // Few different tokens, so that prefixes repeat.
        let prompt: Vec<Token> =
            (0..self.random.below(14)).map(|_| (self.random.below(8) == 0) as Token).collect();
        self.log.push(format!("allocate {prompt:?}"));
        match self.cache.allocate(&prompt, root) {
            Ok(allocated) => {
                let mut model = SequenceModel { root, tokens: Vec::new(), rows: Vec::new(), next: 0 };
                prompt.iter().for_each(|token| model.push(*token));
                for _ in 0..allocated.cached_tokens {
                    model.rows.push(model.next_row());
                }
                assert!(
                    allocated.cached_tokens < prompt.len().max(1),
                    "last token is not left to be computed"
                );
                if allocated.cached_tokens > 0 {
                    coverage.add("shared a prefix");
                }
                self.models.insert(allocated.id, model);
                coverage.add("allocated");
            }
            Err(CacheError::Sequences { .. }) => assert_eq!(self.models.len(), 12),
            Err(CacheError::Full(_)) => coverage.add("full"),
            Err(error) => panic!("{error}"),
        }
    }

    fn append(&mut self, coverage: &mut Coverage) {
        let Some(id) = self.any() else { return };
        let token = self.random.below(2) as Token;
        match self.cache.append(id, token) {
            Ok(()) => {
                self.models.get_mut(&id).unwrap().push(token);
                coverage.add("appended");
            }
            Err(CacheError::Full(_)) => coverage.add("append refused"),
            Err(error) => panic!("{error}"),
        }
    }

    fn write_rows(&mut self, coverage: &mut Coverage) {
        let Some(id) = self.any() else { return };
        let mut writer = match self.cache.writer(id) {
            Ok(writer) => writer,
            Err(CacheError::Full(_)) => return,
            Err(error) => panic!("{error}"),
        };
        let model = self.models.get_mut(&id).unwrap();
        assert_eq!(writer.tokens(), model.rows.len()..model.tokens.len());
        if self.pinned.len() < 2 && self.random.below(10) == 0 {
            // Possibly in the same block in which rows are written now.
            self.pinned.push((self.cache.pin(id).unwrap(), id, model.rows.clone()));
            coverage.add("pinned while being filled");
        }
        let count = writer.tokens().len();
        let complete =
            if self.random.below(3) > 0 { count } else { self.random.below(count as u64 + 1) as usize };
        let mut rows = Vec::new();
        for _ in 0..complete {
            model.rows.push(model.next_row());
            rows.push(*model.rows.last().unwrap());
        }
        // Arbitrary data in incomplete rows: no reader may ever see it.
        rows.resize(count, u64::MAX);
        for &plane in self.shape.planes() {
            for layer in 0..self.shape.layers {
                let heads = 0..self.shape.heads();
                let dense: Vec<u8> = rows
                    .iter()
                    .flat_map(|row| heads.clone().map(move |head| (row, head)))
                    .flat_map(|(row, head)| bytes(*row, plane, layer, head, self.shape.row_bytes()))
                    .collect();
                writer.write(plane, layer, &dense);
            }
        }
        writer.mark_written(complete);
        if self.random.below(10) == 0 {
            // Dropped: as if nothing had been written.
            drop(writer);
            model.rows.truncate(model.rows.len() - complete);
            return;
        }
        assert_eq!(self.cache.free(id), Err(CacheError::Busy(id)));
        assert_eq!(self.cache.fork(id), Err(CacheError::Busy(id)));
        self.cache.commit(writer).unwrap();
        coverage.add(if complete == count { "filled" } else { "filled in part" });
    }

    fn fork(&mut self, coverage: &mut Coverage) {
        let Some(id) = self.any() else { return };
        match self.cache.fork(id) {
            Ok(child) => {
                let mut model = self.models[&id].clone();
                if let Some((_, position)) = model.tokens.get(model.rows.len()) {
                    model.next = *position;
                }
                model.tokens.truncate(model.rows.len());
                self.models.insert(child, model);
                coverage.add("fork");
            }
            Err(CacheError::Sequences { .. }) => assert_eq!(self.models.len(), 12),
            Err(CacheError::Full(_)) if self.contiguous => {}
            Err(error) => panic!("{error}"),
        }
    }

    fn truncate(&mut self, coverage: &mut Coverage) {
        let Some(id) = self.any() else { return };
        let model = self.models.get_mut(&id).unwrap();
        let tokens = self.random.below(model.tokens.len() as u64 + 2) as usize;
        self.cache.truncate(id, tokens).unwrap();
        if let Some((_, position)) = model.tokens.get(tokens) {
            model.next = *position;
            coverage.add("truncated");
        }
        model.tokens.truncate(tokens);
        model.rows.truncate(tokens);
    }

    fn free(&mut self, coverage: &mut Coverage) {
        let Some(id) = self.any() else { return };
        self.cache.free(id).unwrap();
        self.models.remove(&id);
        assert_eq!(self.cache.append(id, 0), Err(CacheError::Unknown(id)));
        coverage.add("freed");
    }

    fn spill(&mut self, coverage: &mut Coverage) {
        let Some(id) = self.any() else { return };
        self.store.change_fault_mode(&mut self.random);
        if self.cache.spill(id, &self.store).is_ok_and(|all| all) {
            coverage.add("spilled");
        }
    }

    fn restore(&mut self, coverage: &mut Coverage) {
        let Some(id) = self.any() else { return };
        self.store.change_fault_mode(&mut self.random);
        match self.cache.restore(id, &self.store) {
            Ok(restored) => {
                let model = self.models.get_mut(&id).unwrap();
                for _ in 0..restored {
                    model.rows.push(model.next_row());
                }
                assert!(
                    restored == 0 || model.rows.len() < model.tokens.len(),
                    "last token is not left to be computed"
                );
                if restored > 0 {
                    coverage.add("restored");
                }
            }
            Err(SuspendError::Store(_) | SuspendError::Blocks(CacheError::Full(_))) => {}
            Err(error) => panic!("{error}"),
        }
    }

    fn suspend(&mut self, coverage: &mut Coverage) {
        let Some(id) = self.any() else { return };
        self.store.change_fault_mode(&mut self.random);
        match self.cache.suspend(id, &self.store) {
            Ok(suspended) => {
                let model = self.models.remove(&id).unwrap();
                assert_eq!(suspended.computed_tokens(), model.rows.len());
                let parsed = SuspendedSequence::from_bytes(&suspended.to_bytes());
                assert_eq!(parsed.as_ref(), Some(&suspended), "hashes differ after a round trip");
                self.suspended.push((suspended, model));
                coverage.add("suspended");
            }
            Err(SuspendError::Store(_) | SuspendError::Refused) => coverage.add("suspend refused"),
            Err(error) => panic!("{error}"),
        }
    }

    fn resume(&mut self, coverage: &mut Coverage) {
        let Some((suspended, mut model)) = self.suspended.pop() else { return };
        self.store.change_fault_mode(&mut self.random);
        match self.cache.resume(&suspended, &self.store) {
            Ok(id) => {
                let filled = self.cache.computed_tokens(id).unwrap();
                coverage.add(if filled >= model.rows.len() { "resumed" } else { "resumed in part" });
                model.rows.truncate(filled);
                // Other sequences may have computed more of it in the meantime.
                while model.rows.len() < filled {
                    model.rows.push(model.next_row());
                }
                self.models.insert(id, model);
            }
            Err(SuspendError::Store(_)) => self.suspended.push((suspended, model)),
            Err(SuspendError::Blocks(CacheError::Sequences { .. } | CacheError::Full(_))) => {
                self.suspended.push((suspended, model));
            }
            Err(error) => panic!("{error}"),
        }
    }

    fn resize(&mut self, coverage: &mut Coverage) {
        let blocks = self.random.below(u64::from(self.blocks_max)) as u32 + 1;
        let before = self.cache.stats().blocks;
        match self.cache.resize(blocks) {
            Ok(()) => coverage.add(if blocks > before { "grew" } else { "shrank" }),
            Err(CacheError::Full(_)) => coverage.add("shrink refused"),
            Err(error) => panic!("{error}"),
        }
    }

    fn prune(&mut self, coverage: &mut Coverage) {
        let Some(id) = self.any() else { return };
        let scores: Vec<f32> = (0..20).map(|_| self.random.below(100) as f32).collect();
        self.cache.add_scores(id, &scores).unwrap();
        let mut part = |up_to| self.random.below(up_to) as usize;
        let policy = PrunePolicy { sink_tokens: part(3), recent_tokens: part(3), tokens_max: part(12) };
        let model = self.models.get_mut(&id).unwrap();
        match self.cache.prune(id, &policy) {
            Ok(positions) => {
                if positions.len() < model.tokens.len() {
                    coverage.add("pruned");
                    assert_eq!(positions.len(), policy.tokens_max);
                }
                let kept: Vec<bool> = model.tokens.iter().map(|(_, at)| positions.contains(at)).collect();
                let mut keep = kept.iter();
                model.tokens.retain(|_| *keep.next().unwrap());
                let mut keep = kept.iter();
                model.rows.retain(|_| *keep.next().unwrap());
            }
            Err(CacheError::Incomplete(_)) => assert!(model.rows.len() < model.tokens.len()),
            Err(CacheError::Full(_)) => {}
            Err(error) => panic!("{error}"),
        }
    }

    fn hold(&mut self, coverage: &mut Coverage) {
        if self.random.below(2) == 0 {
            self.held.pop();
        } else if let Some(id) = self.any() {
            self.held.push(self.cache.pin_full_blocks(id).unwrap());
            coverage.add("held");
        }
    }

    /// Pins a sequence: the pinned rows stay the same while everything changes.
    fn pin(&mut self, coverage: &mut Coverage) {
        if self.pinned.len() > 1 {
            let (_, id, _) = self.pinned.remove(0);
            if !self.models.contains_key(&id) {
                coverage.add("a pin outlived its sequence");
            }
        } else if let Some(id) = self.any() {
            let rows = self.models[&id].rows.clone();
            self.pinned.push((self.cache.pin(id).unwrap(), id, rows));
            coverage.add("pinned");
        }
    }

    /// Opens a view of a sequence, which stays open while everything changes.
    fn watch(&mut self, coverage: &mut Coverage) {
        if let Some((_, id, _)) = self.watch.take() {
            if !self.models.contains_key(&id) {
                coverage.add("a view outlived its sequence");
            }
        } else if let Some(id) = self.any() {
            let rows = self.models[&id].rows.clone();
            self.watch = Some((Watch::new(self.cache.reader().unwrap(), id), id, rows));
            coverage.add("watched");
        }
    }

    /// Checks that everything visible matches the lists.
    fn check(&mut self) {
        let held: Vec<&PinnedBlocks> =
            self.held.iter().chain(self.pinned.iter().map(|(held, ..)| held)).collect();
        if let Err(error) = self.cache.audit(&held) {
            panic!("{error}");
        }
        for (id, model) in &self.models {
            let tokens: Vec<Token> = model.tokens.iter().map(|(token, _)| *token).collect();
            assert_eq!(self.cache.tokens(*id).unwrap(), tokens, "{id}");
            let positions: Vec<u32> = model.tokens.iter().map(|(_, position)| *position).collect();
            assert_eq!(self.cache.positions(*id).unwrap(), positions, "{id}");
            support::check_view(&self.shape, &self.cache.view(*id).unwrap(), &model.rows, &bytes);
            if self.contiguous && !model.rows.is_empty() {
                assert!(self.cache.view(*id).unwrap().contiguous(Plane::Keys, 0).is_some(), "{id}");
            }
        }
        if let Some((watch, _, rows)) = &self.watch {
            support::check_view(&self.shape, &watch.view(), rows, &bytes);
        }
        for (pinned, _, rows) in &self.pinned {
            support::check_pinned(&self.shape, pinned, rows, &bytes);
        }
        // A block is in two sequences only if its content is the same in both.
        let mut owners: HashMap<u32, &[u64]> = HashMap::new();
        for (id, model) in &self.models {
            for (at, block) in self.cache.blocks_of(*id).unwrap().into_iter().enumerate() {
                let from = (at * self.shape.block_tokens as usize).min(model.rows.len());
                let to = (from + self.shape.block_tokens as usize).min(model.rows.len());
                let own = &model.rows[from..to];
                let other = owners.entry(block).or_insert(own);
                let common = own.len().min(other.len());
                assert_eq!(own[..common], other[..common], "block {block}");
            }
        }
    }
}
