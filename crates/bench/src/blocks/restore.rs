//! Restore of a long sequence from a local node directly into its blocks.

use std::time::Instant;

use moontide_blocks::{
    Attention, BlockHash, Cache, CacheConfig, CacheShape, DimOrder, Dtype, Plane, SequenceId, Token,
};
use moontide_client::{PutOptions, RemoteBlockStore};

use super::Args;
use crate::measure::{median, relative_range};
use crate::results::{BenchError, ResultRow, wrong};
use crate::store::{BenchCluster, Size};

/// Target of the throughput relative to plain copies of the same pieces.
const RATIO: f64 = 0.8;
const TOKENS: usize = 4096;

/// Cache shape of a model with eight billion parameters, with fewer layers for `--quick`.
fn shape(args: &Args) -> CacheShape {
    let attention = Attention::Heads { kv_heads: 8, dim: 128 };
    let layers = if args.quick { 8 } else { 32 };
    CacheShape { layers, block_tokens: 16, attention, dtype: Dtype::Bf16, order: DimOrder::TokenMajor }
}

pub(super) fn run(args: &Args) -> Result<(), BenchError> {
    let shape = shape(args);
    let blocks = shape.blocks_for(TOKENS) as u32;
    let bytes = u64::from(blocks) * shape.block_bytes() as u64;
    let node_bytes = (2 * bytes).next_multiple_of(1 << 30);
    let cluster = BenchCluster::start(Size { nodes: 1, node_bytes, groups: 1 })?;
    for verified in [true, false] {
        let store = cluster.store(|config| config.verify_shm = verified)?;
        let store = RemoteBlockStore::new(store, "kv1/bench/", "0", PutOptions::default());
        let mut cache = Cache::new(&CacheConfig::new(shape, 2 * blocks + 2)).map_err(wrong)?;
        let root = BlockHash::root("", "");
        // One token more: the cache never restores the last token, which must be computed.
        let prompt: Vec<Token> = (0..=TOKENS as Token).collect();
        let first = cache.allocate(&prompt, root).map_err(wrong)?.id;
        write(&mut cache, first)?;
        if !cache.spill(first, &store).map_err(wrong)? {
            return Err(wrong("store did not accept all blocks"));
        }
        // Source of the baseline copies: as many bytes, not used otherwise.
        let source: Vec<u8> = (0..bytes).map(|at| (at ^ at >> 8) as u8).collect();
        cache.free(first).map_err(wrong)?;
        let (mut restores, mut baseline) = (Vec::new(), Vec::new());
        for repeat in 0..=args.repeats() {
            cache.clear();
            let id = cache.allocate(&prompt, root).map_err(wrong)?.id;
            let started = Instant::now();
            let restored = cache.restore(id, &store).map_err(wrong)?;
            let took = started.elapsed().as_secs_f64();
            if restored != TOKENS {
                return Err(wrong(format!("restored only {restored} of {TOKENS} tokens")));
            }
            check(&cache, id)?;
            cache.free(id).map_err(wrong)?;
            cache.clear();
            let id = cache.allocate(&prompt, root).map_err(wrong)?.id;
            let baseline_took = copy(&mut cache, id, &source)?;
            cache.free(id).map_err(wrong)?;
            // The first repeat includes page faults.
            if repeat > 0 {
                restores.push(bytes as f64 / took);
                baseline.push(bytes as f64 / baseline_took);
            }
        }
        let ratios: Vec<f64> =
            restores.iter().zip(&baseline).map(|(restore, baseline)| restore / baseline).collect();
        ResultRow::new("blocks", "restore")
            .with("tokens", TOKENS)
            .with("bytes", bytes)
            .with("verified", verified)
            .number("gb_per_s", median(restores) / 1e9)
            .number("baseline_gb_per_s", median(baseline) / 1e9)
            .with_target("ratio", median(ratios.clone()), RATIO, true)
            .number("ratio_range", relative_range(&ratios))
            .print();
    }
    Ok(())
}

/// Byte that fills a row.
fn row_marker(plane: Plane, layer: u32, token: usize) -> u8 {
    (token as u32 * 7 + layer * 31 + u32::from(plane == Plane::Values)) as u8
}

fn write(cache: &mut Cache, id: SequenceId) -> Result<(), BenchError> {
    let shape = *cache.shape();
    let mut fill = cache.writer(id).map_err(wrong)?;
    let tokens = fill.tokens();
    for &plane in shape.planes() {
        for layer in 0..shape.layers {
            let dense: Vec<u8> = tokens
                .clone()
                .flat_map(|token| vec![row_marker(plane, layer, token); shape.heads() * shape.row_bytes()])
                .collect();
            fill.write(plane, layer, &dense);
        }
    }
    fill.mark_written(tokens.len());
    cache.commit(fill).map_err(wrong)
}

/// Checks one byte of each row.
fn check(cache: &Cache, id: SequenceId) -> Result<(), BenchError> {
    let view = cache.view(id).map_err(wrong)?;
    let shape = cache.shape();
    for &plane in shape.planes() {
        for layer in 0..shape.layers {
            for token in 0..view.tokens() {
                let block_tokens = shape.block_tokens as usize;
                let rows = view.rows(plane, layer, token / block_tokens);
                let row = rows.head(token % block_tokens, shape.heads() - 1);
                if row.last() != Some(&row_marker(plane, layer, token)) {
                    return Err(wrong(format!("token {token} of layer {layer} has wrong content")));
                }
            }
        }
    }
    Ok(())
}

/// Copies the same pieces into the blocks of the sequence; returns the seconds.
fn copy(cache: &mut Cache, id: SequenceId, source: &[u8]) -> Result<f64, BenchError> {
    let shape = *cache.shape();
    let block_tokens = shape.block_tokens as usize;
    let mut from = source.chunks_exact(block_tokens * shape.heads() * shape.row_bytes());
    let mut fill = cache.writer(id).map_err(wrong)?;
    let started = Instant::now();
    for token in (0..TOKENS).step_by(block_tokens) {
        for &plane in shape.planes() {
            for layer in 0..shape.layers {
                let from = from.next().ok_or_else(|| wrong("source of the baseline is too short"))?;
                fill.rows(plane, layer, token).copy_from(from);
            }
        }
    }
    Ok(started.elapsed().as_secs_f64())
}
