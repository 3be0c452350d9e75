//! A long sequence from a node of this host, straight into its blocks.

use std::time::Instant;

use moontide_blocks::{
    Attention, BlockHash, Cache, CacheConfig, Dtype, Order, Plane, SequenceId, Shape, Token,
};
use moontide_client::{BlockStore, PutOptions};

use super::super::figures::{BenchError, Line, median, spread};
use super::super::store::{BenchCluster, Size};
use super::super::transfer::wrong;
use super::Args;

/// Beside copies of the same pieces.
const RATIO: f64 = 0.8;
const TOKENS: usize = 4096;

/// As a model of eight milliard parameters has it, with fewer layers when it must be quick.
fn shape(args: &Args) -> Shape {
    let attention = Attention::Heads { kv_heads: 8, dim: 128 };
    let layers = if args.quick { 8 } else { 32 };
    Shape { layers, block_tokens: 16, attention, dtype: Dtype::Bf16, order: Order::TokenMajor }
}

pub(super) fn run(args: &Args) -> Result<(), BenchError> {
    let shape = shape(args);
    let blocks = shape.blocks_for(TOKENS) as u32;
    let bytes = u64::from(blocks) * shape.block_bytes() as u64;
    let node_bytes = (2 * bytes).next_multiple_of(1 << 30);
    let cluster = BenchCluster::start(Size { nodes: 1, node_bytes, groups: 1 })?;
    for verified in [true, false] {
        let store = cluster.store(|config| config.verify_local = verified)?;
        let store = BlockStore::new(store, "kv1/bench/", "0", PutOptions::default());
        let mut cache = Cache::new(&CacheConfig::new(shape, 2 * blocks + 2)).map_err(wrong)?;
        let root = BlockHash::root("", "");
        // One token more: the last is always left to be computed.
        let prompt: Vec<Token> = (0..=TOKENS as Token).collect();
        let first = cache.allocate(&prompt, root).map_err(wrong)?.id;
        write(&mut cache, first)?;
        if !cache.spill(first, &store).map_err(wrong)? {
            return Err(wrong("the store did not take all blocks"));
        }
        // What the bare side copies from: as many bytes, which nobody else has touched.
        let own: Vec<u8> = (0..bytes).map(|at| (at ^ at >> 8) as u8).collect();
        cache.free(first).map_err(wrong)?;
        let (mut ours, mut bare) = (Vec::new(), Vec::new());
        for repeat in 0..=args.repeats() {
            cache.clear();
            let id = cache.allocate(&prompt, root).map_err(wrong)?.id;
            let began = Instant::now();
            let restored = cache.restore(id, &store).map_err(wrong)?;
            let took = began.elapsed().as_secs_f64();
            if restored != TOKENS {
                return Err(wrong(format!("{restored} of {TOKENS} tokens came back")));
            }
            check(&cache, id)?;
            cache.free(id).map_err(wrong)?;
            cache.clear();
            let id = cache.allocate(&prompt, root).map_err(wrong)?.id;
            let bare_took = copy(&mut cache, id, &own)?;
            cache.free(id).map_err(wrong)?;
            // The first time pages are new to this process.
            if repeat > 0 {
                ours.push(bytes as f64 / took);
                bare.push(bytes as f64 / bare_took);
            }
        }
        let ratios: Vec<f64> = ours.iter().zip(&bare).map(|(ours, bare)| ours / bare).collect();
        Line::new("blocks", "restore")
            .with("tokens", TOKENS)
            .with("bytes", bytes)
            .with("verified", verified)
            .number("gb_per_s", median(ours) / 1e9)
            .number("bare_gb_per_s", median(bare) / 1e9)
            .against("ratio", median(ratios.clone()), RATIO, true)
            .number("ratio_spread", spread(&ratios))
            .print();
    }
    Ok(())
}

/// What a row begins with.
fn mark(plane: Plane, layer: u32, token: usize) -> u8 {
    (token as u32 * 7 + layer * 31 + u32::from(plane == Plane::Values)) as u8
}

fn write(cache: &mut Cache, id: SequenceId) -> Result<(), BenchError> {
    let shape = *cache.shape();
    let mut fill = cache.fill(id).map_err(wrong)?;
    let tokens = fill.tokens();
    for &plane in shape.planes() {
        for layer in 0..shape.layers {
            let dense: Vec<u8> = tokens
                .clone()
                .flat_map(|token| vec![mark(plane, layer, token); shape.heads() * shape.row_bytes()])
                .collect();
            fill.write(plane, layer, &dense);
        }
    }
    fill.complete(tokens.len());
    cache.commit(fill).map_err(wrong)
}

/// That the rows are those that were written; a byte of each.
fn check(cache: &Cache, id: SequenceId) -> Result<(), BenchError> {
    let view = cache.view(id).map_err(wrong)?;
    let shape = cache.shape();
    for &plane in shape.planes() {
        for layer in 0..shape.layers {
            for token in 0..view.tokens() {
                let block_tokens = shape.block_tokens as usize;
                let rows = view.rows(plane, layer, token / block_tokens);
                let row = rows.head(token % block_tokens, shape.heads() - 1);
                if row.last() != Some(&mark(plane, layer, token)) {
                    return Err(wrong(format!("token {token} of layer {layer} came back wrong")));
                }
            }
        }
    }
    Ok(())
}

/// Copies the same pieces into the sequence's blocks.
fn copy(cache: &mut Cache, id: SequenceId, own: &[u8]) -> Result<f64, BenchError> {
    let shape = *cache.shape();
    let block_tokens = shape.block_tokens as usize;
    let mut from = own.chunks_exact(block_tokens * shape.heads() * shape.row_bytes());
    let mut fill = cache.fill(id).map_err(wrong)?;
    let began = Instant::now();
    for token in (0..TOKENS).step_by(block_tokens) {
        for &plane in shape.planes() {
            for layer in 0..shape.layers {
                let from = from.next().ok_or_else(|| wrong("more pieces than bytes"))?;
                fill.rows(plane, layer, token).copy_from(from);
            }
        }
    }
    Ok(began.elapsed().as_secs_f64())
}
