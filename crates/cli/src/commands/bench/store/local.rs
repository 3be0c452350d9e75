//! `moontide bench local`: objects in memory of this host, beside what memory alone does.

use std::collections::HashMap;
use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};

use clap::Args as ClapArgs;
use moontide_client::{PutItem, PutOptions, Store};
use moontide_meta::Rng;
use moontide_types::bounds::PAGE_BYTES;
use moontide_types::record::DigestContext;
use moontide_types::{Epoch, ObjectId};

use super::super::figures::{BenchError, Line, Progress, nothing_is_grossly_slow};
use super::super::transfer::{timed, wrong};
use super::cluster::{BenchCluster, Size};
use super::turns::{compared, take_turns};
use super::{Effort, noise};

pub(crate) const EXAMPLES: &str = "\
Examples:
  moontide bench local                       10^5 small objects in place, copies and puts of 64 KiB to 16 MiB
  moontide bench local --quick               two sizes, fewer objects; figures are rough
  moontide bench local --objects 1000000     more objects than caches hold

Every result is one JSON object per line on standard output:
  in_place          one look-up by key: id hash, index, pin, nothing copied, bytes not touched; bare: a look-up in a
                    HashMap of this process
  get_into          a copy into the caller's memory; `verified` says whether it was compared with its digest; bare: copies
                    between this process's own memory of the same size, in the same random order
  put               bytes into the node's memory, with digests and both calls to the master; bare: a copy and a digest
  ratio, target     ours / bare, the middle of the repeats, and what we aim for";

/// How it is measured.
#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// Small objects that are looked up in place [default: 100000; quick: 10000].
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    objects: Option<u32>,
    #[command(flatten)]
    effort: Effort,
}

/// Length of the small objects.
const SMALL: usize = 4096;

/// Most that an in-place get by key may take, in microseconds.
const IN_PLACE_US: f64 = 1.0;

/// A copy beside a plain one, compared with its digest and not.
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
    let unverified = cluster.store(|config| config.verify_local = false)?;
    for bytes in effort.sizes() {
        copies(&store, &unverified, bytes, effort)?;
        puts(&store, bytes, effort)?;
    }
    if effort.gate { nothing_is_grossly_slow() } else { Ok(()) }
}

fn in_place(store: &Store, objects: u32, effort: &Effort) -> Result<(), BenchError> {
    let mut progress = Progress::new("putting small objects", objects.into());
    let keys: Vec<[u8; 64]> = (0..objects)
        .map(|n| {
            let mut key = [b'k'; 64];
            key[..4].copy_from_slice(&n.to_le_bytes());
            key
        })
        .collect();
    let value = noise(effort.seed, SMALL);
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
                let (keys, mut rng) = (&keys, Rng::new(effort.seed ^ repeat << 8 ^ thread));
                move || {
                    // One measurement is of a hundred: the clock costs a tenth of a get.
                    for _ in 0..HUNDRED {
                        let held = store.get_ref(&keys[rng.below(keys.len())]).map_err(wrong)?;
                        let held = held.filter(|held| held.is_in_place());
                        black_box(held.ok_or_else(|| wrong("an object is not in place"))?.len());
                    }
                    Ok(())
                }
            };
            timed((0..threads).map(reader).collect(), effort.span(), HUNDRED)
        };
        let bare = |repeat: u64| {
            let reader = |thread: u64| {
                let (keys, map, mut rng) = (&keys, &map, Rng::new(effort.seed ^ repeat << 8 ^ thread));
                move || {
                    for _ in 0..HUNDRED {
                        black_box(map[&keys[rng.below(keys.len())]]);
                    }
                    Ok(())
                }
            };
            timed((0..threads).map(reader).collect(), effort.span(), HUNDRED)
        };
        ours(99)?;
        let [ours, bare] = take_turns(effort.repeats(), |side, repeat| match side {
            0 => ours(repeat),
            _ => bare(repeat),
        })?;
        let (took, bare_took) = (ours.took(), bare.took());
        let each = |percentiles: &super::super::figures::Percentiles, share| {
            percentiles.micros(share) / HUNDRED as f64
        };
        Line::new("local", "in_place")
            .with("objects", objects)
            .with("bytes", SMALL)
            .with("threads", threads)
            .against("us", each(&took, 0.5), IN_PLACE_US, false)
            .number("p99_us", each(&took, 0.99))
            .number("bare_us", each(&bare_took, 0.5))
            .number("per_s", ours.rate())
            .print();
    }
    Ok(())
}

/// Look-ups of one measurement.
const HUNDRED: u64 = 100;

fn copies(store: &Store, unverified: &Store, bytes: u64, effort: &Effort) -> Result<(), BenchError> {
    let count = (effort.set_bytes() / bytes).max(4) as usize;
    let keys: Vec<String> = (0..count).map(|n| format!("copies-{bytes}-{n}")).collect();
    let content = noise(effort.seed, bytes as usize);
    for key in &keys {
        store.put(key.as_bytes(), &content).map_err(wrong)?;
    }
    // Memory of the same size in this process, and where copies go.
    let own = noise(effort.seed, count * bytes as usize);
    let mut target = vec![1u8; (256 << 20).max(2 * bytes as usize)];
    for (verified, target_ratio) in [(true, VERIFIED), (false, UNVERIFIED)] {
        let ours = if verified { store } else { unverified };
        let sides = take_turns(effort.repeats(), |side, repeat| {
            let mut rng = Rng::new(effort.seed ^ repeat);
            let target = &mut target;
            let places = target.len() / bytes as usize;
            let (own, keys) = (&own, &keys);
            let mover = move || {
                let at = rng.below(keys.len());
                let into = &mut target[rng.below(places) * bytes as usize..][..bytes as usize];
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
        let [ours, bare] = sides?;
        let line = Line::new("local", "get_into").with("bytes", bytes).with("verified", verified);
        compared(line, &ours, &bare, Some(target_ratio)).print();
    }
    store.remove_batch(&keys.iter().map(|key| key.as_bytes()).collect::<Vec<_>>(), true);
    Ok(())
}

fn puts(store: &Store, bytes: u64, effort: &Effort) -> Result<(), BenchError> {
    let number = AtomicU64::new(0);
    let content = noise(effort.seed, (256 << 20).max(bytes as usize));
    let mut bare_memory = vec![1u8; (256 << 20).max(bytes as usize)];
    let places = content.len() / bytes as usize;
    let context = DigestContext {
        id: ObjectId([1; 16]),
        version: Epoch::from_bits(1).expect("an epoch"),
        stripe: 0,
        len: bytes,
    };
    let mut written: Vec<String> = Vec::new();
    let sides = take_turns(effort.repeats(), |side, repeat| {
        let mut rng = Rng::new(effort.seed ^ repeat);
        let (content, bare_memory, number, put) = (&content, &mut bare_memory, &number, &mut written);
        put.clear();
        let mover = || {
            let from = &content[rng.below(places) * bytes as usize..][..bytes as usize];
            if side == 0 {
                let key = format!("put-{bytes}-{}", number.fetch_add(1, Ordering::Relaxed));
                store.put(key.as_bytes(), from).map_err(wrong)?;
                put.push(key);
                return Ok(());
            }
            let into = &mut bare_memory[rng.below(places) * bytes as usize..][..bytes as usize];
            for (index, (to, from)) in
                into.chunks_mut(PAGE_BYTES as usize).zip(from.chunks(PAGE_BYTES as usize)).enumerate()
            {
                to.copy_from_slice(from);
                black_box(context.page(index as u64, to));
            }
            Ok(())
        };
        let run = timed(vec![mover], effort.span(), bytes)?;
        // Room for the next one, outside of the measurement.
        store.remove_batch(&put.iter().map(|key| key.as_bytes()).collect::<Vec<_>>(), true);
        Ok(run)
    });
    let [ours, bare] = sides?;
    compared(Line::new("local", "put").with("bytes", bytes), &ours, &bare, None).print();
    Ok(())
}
