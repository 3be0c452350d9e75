//! Time to sign and to verify capabilities, one by one and in batches; ns per capability.
//!
//! `cargo bench -p moontide-proto --bench capabilities` prints a table; `-- --json` JSON lines; `-- --quick` is short. The
//! cases alternate, slice by slice, so that other load on the machine affects all.

use std::hint::black_box;
use std::time::{Duration, Instant};

use moontide_proto::{
    AccessRight, Capability, CapabilityKey, CapabilityScope, CapabilitySecret, RecordShape, sign_all,
};
use moontide_types::{
    Epoch, Extent, Generation, NodeId, ObjectId, SegmentId, SlotId, TenantGeneration, Term,
};

/// Numbers of capabilities that are signed together.
const BATCHES: [usize; 6] = [1, 3, 8, 16, 100, 4096];

fn scope(right: AccessRight, slot: u32) -> CapabilityScope {
    CapabilityScope {
        right,
        stripe: 0,
        segment: SegmentId(1),
        generation: Generation(2),
        slot: SlotId(slot),
        term: Term::new(3).expect("a term"),
        epoch: Epoch::from_bits(4).expect("an epoch"),
        id: ObjectId([5; 16]),
    }
}

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let has = |flag: &str| arguments.iter().any(|a| a == flag);
    let json = has("--json");
    let slice = Duration::from_millis(if has("--quick") { 5 } else { 50 });
    let shape = RecordShape {
        extent: Extent { start: 16, units: 8 },
        object_len: 3000,
        stripe_offset: 0,
        stripe_len: 3000,
        stripe_count: 1,
        digestless: false,
        id_key: 1,
        tenant_generation: TenantGeneration(2),
    };
    let secret = CapabilitySecret::new([7; 32]);
    let keys: Vec<CapabilityKey> = (0..8).map(|node| secret.key_of(NodeId(node), 1)).collect();
    let mut signed: Vec<Capability> = Vec::with_capacity(BATCHES[BATCHES.len() - 1]);
    for (name, right) in [("read", AccessRight::Read), ("write", AccessRight::Write(shape))] {
        let scopes: Vec<CapabilityScope> = (0..4096).map(|slot| scope(right, slot)).collect();
        let capabilities: Vec<Capability> = scopes.iter().map(|scope| keys[0].sign(scope)).collect();
        let verify_all = |key: &CapabilityKey, expected: bool| {
            for (scope, capability) in scopes.iter().zip(&capabilities) {
                assert_eq!(key.verify(black_box(scope), black_box(*capability)), expected);
            }
        };
        let (mut verified, mut refused, mut batches) = (vec![], vec![], vec![vec![]; BATCHES.len()]);
        for _ in 0..9 {
            verified.push(nanos(slice, scopes.len(), || verify_all(&keys[0], true)));
            refused.push(nanos(slice, scopes.len(), || verify_all(&keys[1], false)));
            for (times, count) in batches.iter_mut().zip(BATCHES) {
                times.push(nanos(slice, count, || {
                    signed.clear();
                    let scopes = scopes[..count].iter().enumerate();
                    sign_all(
                        scopes.map(|(at, scope)| (&keys[at % keys.len()], *black_box(scope))),
                        &mut signed,
                    );
                    black_box(&signed);
                }));
            }
        }
        let report = |case: String, times: Vec<f64>| {
            let value = median(times);
            if json {
                println!(r#"{{"bench":"capabilities","case":"{case}","unit":"ns","value":{value:.1}}}"#);
            } else {
                println!("{case:<28} {value:>7.1} ns");
            }
        };
        report(format!("{name}: verify"), verified);
        report(format!("{name}: refuse"), refused);
        for (times, count) in batches.into_iter().zip(BATCHES) {
            report(format!("{name}: sign {count} together"), times);
        }
    }
}

/// Measures ns per capability of a call that handles `count` of them, over one time slice.
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
