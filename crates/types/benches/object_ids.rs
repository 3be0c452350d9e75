//! Time of object ids one by one and in batches, in one run; ns per key.
//!
//! `cargo bench -p moontide-types --bench object_ids` prints a table; `-- --json` JSON lines; `-- --quick` is
//! short. The two variants alternate, slice by slice, so that other load on the machine affects both.

use std::hint::black_box;
use std::time::{Duration, Instant};

use moontide_types::{Key, ObjectId, TenantGeneration, TenantIdKey};

/// Case: name, keys of a batch, length in bytes of the key at an index of the batch.
type Case = (&'static str, usize, fn(usize) -> usize);
const CASES: &[Case] = &[
    ("1 key of 64 B", 1, |_| 64),
    ("4 keys of 64 B", 4, |_| 64),
    ("8 keys of 64 B", 8, |_| 64),
    ("16 keys of 64 B", 16, |_| 64),
    ("100 keys of 64 B", 100, |_| 64),
    ("100 keys of 32 B", 100, |_| 32),
    ("100 keys of 300 B", 100, |_| 300),
    ("100 keys of 1 to 200 B", 100, |n| 1 + n * 73 % 200),
    ("100 keys of 1 to 1000 B", 100, |n| 1 + n * 739 % 1000),
];

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let has = |flag: &str| arguments.iter().any(|a| a == flag);
    let json = has("--json");
    let slice = Duration::from_millis(if has("--quick") { 5 } else { 50 });

    let id_key = TenantIdKey::new(1, [7; 32]);
    let generation = TenantGeneration(0);
    for &(case, count, len) in CASES {
        let keys: Vec<Vec<u8>> =
            (0..count).map(|n| (0..len(n)).map(|i| (i * 31 + n * 7) as u8).collect()).collect();
        let keys = || keys.iter().map(|key| Key::new(key).expect("not empty, not long"));
        let mut out: Vec<ObjectId> = Vec::with_capacity(count);
        let (mut singles, mut batches) = (vec![], vec![]);
        for _ in 0..9 {
            singles.push(nanos(slice, count, || {
                out.clear();
                out.extend(keys().map(|key| id_key.object_id(generation, black_box(key))));
                black_box(&out);
            }));
            batches.push(nanos(slice, count, || {
                out.clear();
                id_key.object_ids(generation, black_box(keys()), &mut out);
                black_box(&out);
            }));
        }
        let (single, batch) = (median(singles), median(batches));
        if json {
            println!(
                r#"{{"bench":"object_ids","case":"{case}","unit":"ns/key","single":{single:.1},"batch":{batch:.1}}}"#
            );
        } else {
            let gain = single / batch;
            println!("{case:<26} one by one {single:>7.1}   batch {batch:>7.1} ns/key   ×{gain:.1}");
        }
    }
}

/// Measures ns per key of a call that handles `count` keys, over one time slice.
fn nanos(slice: Duration, count: usize, mut call: impl FnMut()) -> f64 {
    let (started, mut calls) = (Instant::now(), 0);
    loop {
        (0..16).for_each(|_| call());
        calls += 16;
        let elapsed = started.elapsed();
        if elapsed >= slice {
            return elapsed.as_nanos() as f64 / (calls * count) as f64;
        }
    }
}

fn median(mut samples: Vec<f64>) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}
