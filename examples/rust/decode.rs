//! Small language model that decodes on paged views, compared with a dense reference. A second process continues with
//! the blocks that the first one saved in the store.
//!
//! ```text
//! moontide dev &                                             # a cluster on this machine
//! cargo run -p moontide-client --example decode first        # computes everything, saves its blocks
//! cargo run -p moontide-client --example decode again        # new process: restores the blocks, continues
//! ```
//!
//! The model has two layers with two heads and fixed random weights. Attention reads the blocks of a sequence in place;
//! the reference keeps keys and values in plain vectors. Both must agree in every bit.

#![forbid(unsafe_code)]

use std::error::Error;

use moontide_blocks::{
    Attention, BlockHash, Cache, CacheConfig, CacheShape, DimOrder, Dtype, Plane, SequenceId, SequenceWriter,
    Token,
};
use moontide_client::{PutOptions, RemoteBlockStore, Store, StoreConfig};

const LAYERS: usize = 2;
const HEADS: usize = 2;
const DIM: usize = 8;
const WIDTH: usize = HEADS * DIM;
const WORDS: usize = 50;
const PROMPT: [Token; 18] = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3];

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let tokens = match arguments.first().map(String::as_str) {
        Some("first") => 12,
        Some("again") => 24,
        _ => return Err("usage: decode first|again".into()),
    };
    let master = std::env::var("MOONTIDE_MASTER").unwrap_or_else(|_| "127.0.0.1:7400".to_owned());
    let result = decode(&master, tokens)?;
    println!("{} of {} prompt tokens came from the store", result.restored, PROMPT.len());
    println!("output: {:?}", result.output);
    Ok(())
}

/// Result of a run.
#[derive(Debug)]
pub(crate) struct Decoded {
    /// Prompt tokens restored from the store.
    pub(crate) restored: usize,
    /// Generated tokens.
    pub(crate) output: Vec<Token>,
}

/// Generates `count` tokens after the prompt, and saves the computed blocks.
pub(crate) fn decode(master: &str, count: usize) -> Result<Decoded, Box<dyn Error>> {
    let attention = Attention::Heads { kv_heads: HEADS as u32, dim: DIM as u32 };
    let layers = LAYERS as u32;
    let shape =
        CacheShape { layers, block_tokens: 4, attention, dtype: Dtype::F32, order: DimOrder::TokenMajor };
    let mut cache = Cache::new(&CacheConfig::new(shape, 64))?;
    // The prefix identifies everything that the bytes depend on: model, weights, layout.
    let store = Store::connect(StoreConfig::new(master))?;
    let store = RemoteBlockStore::new(store, "kv1/tiny-example/1/", "0", PutOptions::default());

    let id = cache.allocate(&PROMPT, BlockHash::root("", ""))?.id;
    let restored = cache.restore(id, &store)?;

    let model = Model::new();
    let mut reference = Dense::default();
    let mut output = Vec::new();
    for at in 0..PROMPT.len() + count - 1 {
        let token = cache.tokens(id)?[at];
        let expected = model.step(token, at, &mut reference);
        if at >= restored {
            let mut writer = cache.writer(id)?;
            let paged = model.step(token, at, &mut Paged { cache: &cache, id, writer: &mut writer });
            assert_eq!(paged, expected, "paged and dense must agree at token {at}");
            writer.mark_written(1);
            cache.commit(writer)?;
        }
        if at + 1 >= PROMPT.len() {
            let next = argmax(&expected);
            output.push(next);
            cache.append(id, next)?;
        }
    }
    cache.spill(id, &store)?;
    cache.free(id)?;
    Ok(Decoded { restored, output })
}

/// Storage of a model's keys and values.
trait Kv {
    /// Stores those of the current token.
    fn put(&mut self, layer: usize, key: &[f32], value: &[f32]);
    /// Visits those of every earlier token, for one head, in order.
    fn scan(&self, layer: usize, head: usize, to: &mut dyn FnMut(&[f32], &[f32]));
}

/// Keys and values in plain vectors.
#[derive(Default)]
struct Dense {
    rows: [Vec<(Vec<f32>, Vec<f32>)>; LAYERS],
}

impl Kv for Dense {
    fn put(&mut self, layer: usize, key: &[f32], value: &[f32]) {
        self.rows[layer].push((key.to_vec(), value.to_vec()));
    }

    fn scan(&self, layer: usize, head: usize, to: &mut dyn FnMut(&[f32], &[f32])) {
        let part = head * DIM..(head + 1) * DIM;
        // The last row is the current token's, which the model adds itself.
        let rows = &self.rows[layer];
        for (key, value) in &rows[..rows.len() - 1] {
            to(&key[part.clone()], &value[part.clone()]);
        }
    }
}

/// Keys and values in blocks, read and written in place.
struct Paged<'a> {
    cache: &'a Cache,
    id: SequenceId,
    writer: &'a mut SequenceWriter,
}

impl Kv for Paged<'_> {
    fn put(&mut self, layer: usize, key: &[f32], value: &[f32]) {
        for (plane, numbers) in [(Plane::Keys, key), (Plane::Values, value)] {
            let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            self.writer.write(plane, layer as u32, &bytes);
        }
    }

    fn scan(&self, layer: usize, head: usize, to: &mut dyn FnMut(&[f32], &[f32])) {
        let view = self.cache.view(self.id).expect("the sequence exists");
        for block in 0..view.block_count() {
            let keys = view.rows(Plane::Keys, layer as u32, block);
            let values = view.rows(Plane::Values, layer as u32, block);
            for token in 0..keys.tokens() {
                to(keys.numbers(token, head), values.numbers(token, head));
            }
        }
    }
}

/// Weights: matrices of `WIDTH` columns.
struct Model {
    words: Vec<f32>,
    layers: Vec<[Vec<f32>; 4]>,
}

impl Model {
    fn new() -> Model {
        let mut state = 42_u64;
        let mut matrix = |rows: usize| -> Vec<f32> {
            let mut number = || {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                ((state >> 40) as f32 / (1 << 24) as f32 - 0.5) * 0.8
            };
            (0..rows * WIDTH).map(|_| number()).collect()
        };
        let words = matrix(WORDS);
        let layers =
            (0..LAYERS).map(|_| [matrix(WIDTH), matrix(WIDTH), matrix(WIDTH), matrix(WIDTH)]).collect();
        Model { words, layers }
    }

    /// Returns the score of each word as the next token.
    fn step(&self, token: Token, position: usize, kv: &mut dyn Kv) -> Vec<f32> {
        let mut state: Vec<f32> = self.words[token as usize % WORDS * WIDTH..][..WIDTH].to_vec();
        for (at, number) in state.iter_mut().enumerate() {
            *number += ((position * (at + 1)) as f32 * 0.1).sin();
        }
        for (layer, [query, key, value, out]) in self.layers.iter().enumerate() {
            let (query, key, value) = (times(query, &state), times(key, &state), times(value, &state));
            kv.put(layer, &key, &value);
            let mut seen = Vec::with_capacity(WIDTH);
            for head in 0..HEADS {
                let part = head * DIM..(head + 1) * DIM;
                let query = &query[part.clone()];
                let (mut weights, mut sum) = (0.0, vec![0.0; DIM]);
                let mut add = |key: &[f32], value: &[f32]| {
                    let weight = (dot(query, key) / (DIM as f32).sqrt()).exp();
                    weights += weight;
                    sum.iter_mut().zip(value).for_each(|(sum, value)| *sum += weight * value);
                };
                kv.scan(layer, head, &mut add);
                add(&key[part.clone()], &value[part]);
                seen.extend(sum.into_iter().map(|number| number / weights));
            }
            for (number, change) in state.iter_mut().zip(times(out, &seen)) {
                *number += change;
            }
        }
        self.words.chunks_exact(WIDTH).map(|word| dot(word, &state)).collect()
    }
}

fn times(matrix: &[f32], vector: &[f32]) -> Vec<f32> {
    matrix.chunks_exact(vector.len()).map(|row| dot(row, vector)).collect()
}

fn dot(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

fn argmax(numbers: &[f32]) -> Token {
    let best = numbers.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    best.map_or(0, |(at, _)| at as Token)
}
