//! `moontide bench local`: local objects, compared with plain memory operations.

use std::collections::HashMap;
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};

use clap::Args as ClapArgs;
use moontide_client::{PutItem, PutOptions, Store};
use moontide_rt::SplitMix64;
use moontide_types::limits::PAGE_BYTES;
use moontide_types::record::DigestContext;
use moontide_types::{Epoch, ObjectId};

use super::cluster::{BenchCluster, Size};
use super::{BenchEffort, random_bytes};
use crate::measure::{Percentiles, compared, interleave, timed};
use crate::results::{BenchError, Progress, ResultRow, check_gates, wrong};

pub(crate) const EXAMPLES: &str = "\
Examples:
  moontide bench local                       zero-copy reads of 10^5 small objects, copies and puts of 64 KiB to 16 MiB
  moontide bench local --quick               two sizes, fewer objects; less precise
  moontide bench local --objects 1000000     more objects than the CPU caches hold

Every result is one JSON object per line on standard output:
    in_place          zero-copy get by key: id hash, index, pin; payload not read; baseline: a lookup in a HashMap
    get_into          copy into the caller's memory; `verified`: with comparison of the digest; baseline: copies within the
                      memory of this process, of the same size and in the same random order
    put               put into the node's memory, with digests and both calls to the master; baseline: a copy and a digest
    ratio, target     store / baseline, median of the repeats, and its target";

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// Number of small objects for zero-copy gets [default: 100000; quick: 10000]
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    objects: Option<u32>,
    #[command(flatten)]
    effort: BenchEffort,
}

/// Length of the small objects.
const SMALL: usize = 4096;

/// Target of a zero-copy get by key, in microseconds.
const IN_PLACE_US: f64 = 1.0;

/// Targets of a copy relative to a plain one, with and without verification.
const VERIFIED: f64 = 0.65;
const UNVERIFIED: f64 = 0.9;

pub(crate) fn run(args: &Args) -> Result<(), BenchError> {
    let effort = &args.effort;
    let objects = args.objects.unwrap_or(if effort.quick { 10_000 } else { 100_000 });
    let small_bytes = u64::from(objects) * 8192;
    let node_bytes = (4 * effort.set_bytes()).max(2 * small_bytes).next_multiple_of(1 << 30);
    let cluster = BenchCluster::start(Size { nodes: 1, node_bytes, groups: 1 })?;
    let store = cluster.store(|_| ())?;
    in_place(&store, objects, effort)?;
    let unverified = cluster.store(|config| config.verify_shm = false)?;
    for bytes in effort.sizes() {
        copies(&store, &unverified, bytes, effort)?;
        puts(&store, bytes, effort)?;
    }
    if effort.gate { check_gates() } else { Ok(()) }
}

fn in_place(store: &Store, objects: u32, effort: &BenchEffort) -> Result<(), BenchError> {
    let mut progress = Progress::new("putting small objects", objects.into());
    let keys: Vec<[u8; 64]> = (0..objects)
        .map(|n| {
            let mut key = [b'k'; 64];
            key[..4].copy_from_slice(&n.to_le_bytes());
            key
        })
        .collect();
    let value = random_bytes(effort.seed, SMALL);
    for (batch, part) in keys.chunks(1000).enumerate() {
        let parts: [&[u8]; 1] = [&value];
        let items: Vec<PutItem<'_>> = part.iter().map(|key| PutItem { key, parts: &parts }).collect();
        for put in store.put_batch(&items, &PutOptions::default()) {
            put.map_err(wrong)?;
        }
        progress.at(batch as u64 * 1000);
    }
    let map: HashMap<[u8; 64], u64> = keys.iter().map(|key| (*key, 1)).collect();
    for threads in [1, 2] {
        let ours = |repeat: u64| {
            let reader = |thread: u64| {
                let (keys, mut rng) = (&keys, SplitMix64::new(effort.seed ^ repeat << 8 ^ thread));
                move || {
                    // One measurement has 100 gets, because reading the clock costs a tenth of a get.
                    for _ in 0..GETS_PER_SAMPLE {
                        let held = store.get_ref(&keys[rng.index(keys.len())]).map_err(wrong)?;
                        let held = held.filter(|held| held.is_zero_copy());
                        black_box(held.ok_or_else(|| wrong("object was not read zero-copy"))?.len());
                    }
                    Ok(())
                }
            };
            timed((0..threads).map(reader).collect(), effort.span(), GETS_PER_SAMPLE)
        };
        let baseline = |repeat: u64| {
            let reader = |thread: u64| {
                let (keys, map, mut rng) = (&keys, &map, SplitMix64::new(effort.seed ^ repeat << 8 ^ thread));
                move || {
                    for _ in 0..GETS_PER_SAMPLE {
                        black_box(map[&keys[rng.index(keys.len())]]);
                    }
                    Ok(())
                }
            };
            timed((0..threads).map(reader).collect(), effort.span(), GETS_PER_SAMPLE)
        };
        ours(99)?;
        let [ours, baseline] = interleave(effort.repeats(), |side, repeat| match side {
            0 => ours(repeat),
            _ => baseline(repeat),
        })?;
        let (took, baseline_took) = (ours.took(), baseline.took());
        let each = |percentiles: &Percentiles, share| percentiles.micros(share) / GETS_PER_SAMPLE as f64;
        ResultRow::new("local", "in_place")
            .with("objects", objects)
            .with("bytes", SMALL)
            .with("threads", threads)
            .with_target("us", each(&took, 0.5), IN_PLACE_US, false)
            .number("p99_us", each(&took, 0.99))
            .number("baseline_us", each(&baseline_took, 0.5))
            .number("per_s", ours.rate())
            .print();
    }
    Ok(())
}

/// Gets per measurement.
const GETS_PER_SAMPLE: u64 = 100;

fn copies(store: &Store, unverified: &Store, bytes: u64, effort: &BenchEffort) -> Result<(), BenchError> {
    let count = (effort.set_bytes() / bytes).max(4) as usize;
    let keys: Vec<String> = (0..count).map(|n| format!("copies-{bytes}-{n}")).collect();
    let content = random_bytes(effort.seed, bytes as usize);
    for key in &keys {
        store.put(key.as_bytes(), &content).map_err(wrong)?;
    }
    // Source of the baseline copies, and the target of all copies.
    let own = random_bytes(effort.seed, count * bytes as usize);
    let mut target = vec![1u8; (256 << 20).max(2 * bytes as usize)];
    for (verified, target_ratio) in [(true, VERIFIED), (false, UNVERIFIED)] {
        let ours = if verified { store } else { unverified };
        let sides = interleave(effort.repeats(), |side, repeat| {
            let mut rng = SplitMix64::new(effort.seed ^ repeat);
            let target = &mut target;
            let offsets = target.len() / bytes as usize;
            let (own, keys) = (&own, &keys);
            let mover = move || {
                let at = rng.index(keys.len());
                let into = &mut target[rng.index(offsets) * bytes as usize..][..bytes as usize];
                if side == 0 {
                    let len = ours.get_into(keys[at].as_bytes(), into).map_err(wrong)?;
                    return if len == Some(into.len()) { Ok(()) } else { Err(wrong("an object is missing")) };
                }
                into.copy_from_slice(&own[at * bytes as usize..][..bytes as usize]);
                black_box(into[0]);
                Ok(())
            };
            timed(vec![mover], effort.span(), bytes)
        });
        let [ours, baseline] = sides?;
        let line = ResultRow::new("local", "get_into").with("bytes", bytes).with("verified", verified);
        compared(line, &ours, &baseline, Some(target_ratio)).print();
    }
    store.remove_batch(&keys.iter().map(|key| key.as_bytes()).collect::<Vec<_>>(), true);
    Ok(())
}

fn puts(store: &Store, bytes: u64, effort: &BenchEffort) -> Result<(), BenchError> {
    let number = AtomicU64::new(0);
    let content = random_bytes(effort.seed, (256 << 20).max(bytes as usize));
    let mut baseline_memory = vec![1u8; (256 << 20).max(bytes as usize)];
    let offsets = content.len() / bytes as usize;
    let context = DigestContext {
        id: ObjectId([1; 16]),
        version: Epoch::from_bits(1).expect("an epoch"),
        stripe: 0,
        len: bytes,
    };
    let mut written: Vec<String> = Vec::new();
    let sides = interleave(effort.repeats(), |side, repeat| {
        let mut rng = SplitMix64::new(effort.seed ^ repeat);
        let (content, baseline_memory, number, put) = (&content, &mut baseline_memory, &number, &mut written);
        put.clear();
        let mover = || {
            let from = &content[rng.index(offsets) * bytes as usize..][..bytes as usize];
            if side == 0 {
                let key = format!("put-{bytes}-{}", number.fetch_add(1, Ordering::Relaxed));
                store.put(key.as_bytes(), from).map_err(wrong)?;
                put.push(key);
                return Ok(());
            }
            let into = &mut baseline_memory[rng.index(offsets) * bytes as usize..][..bytes as usize];
            for (index, (to, from)) in
                into.chunks_mut(PAGE_BYTES as usize).zip(from.chunks(PAGE_BYTES as usize)).enumerate()
            {
                to.copy_from_slice(from);
                black_box(context.page(index as u64, to));
            }
            Ok(())
        };
        let run = timed(vec![mover], effort.span(), bytes)?;
        // Frees space for the next measurement; not measured.
        store.remove_batch(&put.iter().map(|key| key.as_bytes()).collect::<Vec<_>>(), true);
        Ok(run)
    });
    let [ours, baseline] = sides?;
    compared(ResultRow::new("local", "put").with("bytes", bytes), &ours, &baseline, None).print();
    Ok(())
}
