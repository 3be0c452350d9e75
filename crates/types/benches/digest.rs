//! Digest throughput compared with a plain read and a memcpy of the same memory, in one run.
//!
//! `cargo bench -p moontide-types --bench digest` prints a table; `-- --json` JSON lines; `-- --quick` is short.
//! *hot*: one 256 KiB page repeatedly, as a page is digested right after it was received or copied.
//! *cold*: all pages of 1 GiB in random order, so that every page comes from memory.

use std::hint::black_box;
use std::time::{Duration, Instant};

use moontide_types::limits::PAGE_BYTES;
use moontide_types::record::DigestContext;
use moontide_types::{Epoch, Key, ObjectId, TenantGeneration, TenantIdKey};

const PAGE: usize = PAGE_BYTES as usize;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let has = |flag: &str| arguments.iter().any(|a| a == flag);
    let (quick, json) = (has("--quick"), has("--json"));
    let slice = Duration::from_millis(if quick { 30 } else { 300 });
    let cold_bytes = if quick { 64 << 20 } else { 1 << 30 };

    let memory: Vec<u8> = (0..cold_bytes).map(|i| (i as u32).wrapping_mul(2_654_435_761) as u8).collect();
    let mut target = vec![0u8; PAGE];
    let context = DigestContext {
        id: ObjectId([5; 16]),
        version: Epoch::from_bits(1).expect("small"),
        stripe: 0,
        len: PAGE_BYTES,
    };
    let report = |case: &str, unit: &str, value: Sample, target: &str| {
        let Sample { median, low, high } = value;
        if json {
            println!(
                r#"{{"bench":"digest","case":"{case}","unit":"{unit}","median":{median:.2},"low":{low:.2},"high":{high:.2},"target":"{target}"}}"#
            );
        } else {
            println!("{case:<32} {median:>9.2} {unit:<5} ({low:.2} … {high:.2})   {target}");
        }
    };

    for (temperature, pages) in [("hot", 1), ("cold", cold_bytes / PAGE)] {
        let order = shuffled(pages);
        let page = |n: usize| &memory[order[n % pages] * PAGE..][..PAGE];
        let read = throughput(slice, |n| black_box(sum(page(n))));
        let copy = throughput(slice, |n| {
            target.copy_from_slice(page(n));
            u64::from(black_box(&target)[0])
        });
        let digest = throughput(slice, |n| black_box(context.page(0, page(n))));
        let ratio = |other: &Sample| Sample::exactly(digest.median / other.median);
        let goal = if temperature == "hot" { "≥ 20-class" } else { "reported" };
        let (per_read, per_copy) = (ratio(&read), ratio(&copy));
        report(&format!("plain read, {temperature}"), "GB/s", read, "baseline");
        report(&format!("memcpy, {temperature}"), "GB/s", copy, "baseline");
        report(&format!("page digest, {temperature}"), "GB/s", digest, goal);
        report(&format!("page digest ÷ plain read, {temperature}"), "×", per_read, "reported");
        report(&format!("page digest ÷ memcpy, {temperature}"), "×", per_copy, "reported");
    }

    // Cost for small objects: page and root of 4 KiB, and the id of a 64-byte key.
    let small = DigestContext { len: 4096, ..context };
    let nanos = |sample: Sample| {
        // `throughput` counts pages of 256 KiB; convert its GB/s to ns per call.
        let ns = |gbps: f64| PAGE as f64 / gbps;
        Sample { median: ns(sample.median), low: ns(sample.high), high: ns(sample.low) }
    };
    let root = throughput(slice, |_| black_box(small.payload(&memory[..4096], |_| ())));
    report("digests and root of 4 KiB, hot", "ns", nanos(root), "reported");
    let id_key = TenantIdKey::new(1, [7; 32]);
    let id = throughput(slice, |n| {
        let mut key = [b'k'; 64];
        key[..8].copy_from_slice(&n.to_le_bytes());
        let key = Key::new(&key).expect("64 bytes");
        black_box(id_key.object_id(TenantGeneration(0), key)).as_u128() as u64
    });
    report("object id of a 64-byte key", "ns", nanos(id), "106–159 in a trial");
}

struct Sample {
    median: f64,
    low: f64,
    high: f64,
}

impl Sample {
    fn exactly(value: f64) -> Sample {
        Sample { median: value, low: value, high: value }
    }
}

/// Measures GB/s of a call that handles one page: median and range of 9 time slices.
fn throughput(slice: Duration, mut call: impl FnMut(usize) -> u64) -> Sample {
    let mut samples: Vec<f64> = (0..9)
        .map(|_| {
            let (started, mut calls, mut sum) = (Instant::now(), 0usize, 0u64);
            loop {
                for _ in 0..16 {
                    sum = sum.wrapping_add(call(calls));
                    calls += 1;
                }
                let elapsed = started.elapsed();
                if elapsed >= slice {
                    black_box(sum);
                    return (calls * PAGE) as f64 / elapsed.as_nanos() as f64;
                }
            }
        })
        .collect();
    samples.sort_by(f64::total_cmp);
    Sample { median: samples[4], low: samples[0], high: samples[8] }
}

/// Reads a page; the compiler can vectorise the loop to the width of the machine.
fn sum(page: &[u8]) -> u64 {
    page.chunks_exact(8).fold(0, |sum, word| sum ^ u64::from_le_bytes(word.try_into().expect("8 bytes")))
}

fn shuffled(count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    let mut state = 9u64;
    for at in (1..count).rev() {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        order.swap(at, (state >> 33) as usize % (at + 1));
    }
    order
}
