//! Benchmark of a local get in place by id: probe the index, pin, check CRC and id, release.
//!
//! `cargo bench -p moontide-heap --bench local_get` prints a table; `-- --json` JSON lines; `-- --quick` leaves out
//! the large case; `-- --objects N` sets the size; `-- --huge` puts index and headers on huge pages, which the
//! operator must have reserved (`sysctl vm.nr_hugepages=800` for ten million objects). The baseline has no protocol
//! at all: one random line of a table as large as the index, then the two lines of a random entry of a table as large
//! as the headers, each address known only after the previous line has arrived.

use std::hint::black_box;
use std::time::{Duration, Instant};

use moontide_heap::{
    Grant, HeapConfig, HugePages, LocalHeap, Lookup, NodeHeap, PayloadWriter, Reader, RecordSpec,
    ShmListener, connect,
};
use moontide_rt::SplitMix64;
use moontide_types::record::{Attributes, KeySection, RecordFlags};
use moontide_types::{
    Epoch, Extent, Generation, Key, NodeId, ObjectId, SegmentId, SlotId, SystemClock, Tenant,
    TenantGeneration, Term,
};

/// Gets per timed batch: long enough for the clock's resolution, short enough for a median.
const BATCH: usize = 256;

fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let has = |flag: &str| arguments.iter().any(|a| a == flag);
    let chosen =
        arguments.iter().position(|a| a == "--objects").and_then(|at| arguments.get(at + 1)?.parse().ok());
    let sizes = match chosen {
        Some(objects) => vec![objects],
        None if has("--quick") => vec![100_000],
        None => vec![100_000, 10_000_000],
    };
    let huge = if has("--huge") { HugePages::Reserved } else { HugePages::Auto };
    for objects in sizes {
        run(objects, huge, has("--quick"), has("--json"));
    }
}

fn run(objects: u32, huge: HugePages, quick: bool, json: bool) {
    eprintln!("filling {objects} objects …");
    let started = Instant::now();
    let (node, ids) = fill(objects, huge);
    let put_ns = started.elapsed().as_nanos() as f64 / f64::from(objects);
    let local = connect_in_process(&node);
    let rounds = if quick { 200 } else { 4000 };

    let order = shuffled(objects, 1);
    let keys: Vec<ObjectId> = order.iter().take(rounds * BATCH).map(|&n| ids[n as usize]).collect();
    let keys: Vec<ObjectId> = keys.iter().copied().cycle().take(rounds * BATCH).collect();
    let mut reader = local.reader().expect("a vacant lane");
    node.heartbeat();
    let one = time_batches(&keys, |id| get(&mut reader, id));
    let baseline = time_baseline(objects, rounds);

    // Two readers on different keys, each on a thread of its own, compared with one.
    let half = keys.len() / 2;
    let rate_one = rate(&node, &local, &[&keys[..half]], quick);
    let rate_two = rate(&node, &local, &[&keys[..half], &keys[half..]], quick);

    let target_ns: f64 = if objects <= 100_000 { 300.0 } else { 500.0 };
    let rows = [
        ("local_get_median_ns", one.median, format!("≤ {target_ns}")),
        ("local_get_p90_ns", one.p90, "reported".into()),
        ("baseline_lookup_median_ns", baseline.median, "baseline".into()),
        ("local_get_over_baseline", one.median / baseline.median, "reported".into()),
        ("one_reader_million_per_s", rate_one / 1e6, "reported".into()),
        ("two_readers_over_one", rate_two / rate_one, "≥ 1.7".into()),
        ("put_by_node_mean_ns", put_ns, "reported".into()),
    ];
    for (name, value, target) in rows {
        if json {
            println!(
                r#"{{"bench":"local_get","objects":{objects},"case":"{name}","value":{value:.2},"target":"{target}"}}"#
            );
        } else {
            println!("{objects:>10} objects  {name:<28} {value:>10.2}   {target}");
        }
    }
    assert_eq!(node.index_region().overflowed(), 0, "objects are missing in the index");
    assert!(one.median <= 2.0 * target_ns.max(baseline.median), "a get takes more than twice its target");
    assert!(rate_two >= 0.85 * rate_one, "two readers reach less than half of their target rate");
}

/// Runs one get as an inference engine does, clock included. Checks the header; does not touch the bytes.
#[inline]
fn get(reader: &mut Reader<'_>, id: &ObjectId) {
    match reader.get(id, SystemClock.now_coarse()) {
        Lookup::Hit(guard) => black_box(guard.header().stripe_len),
        other => panic!("object {id} not found: {other:?}"),
    };
}

struct Timing {
    median: f64,
    p90: f64,
}

fn time_batches(keys: &[ObjectId], mut get: impl FnMut(&ObjectId)) -> Timing {
    let per_get = keys.chunks_exact(BATCH).map(|batch| {
        let started = Instant::now();
        batch.iter().for_each(&mut get);
        started.elapsed().as_nanos() as f64 / BATCH as f64
    });
    timing(per_get.collect())
}

fn timing(mut per_get: Vec<f64>) -> Timing {
    per_get.sort_by(f64::total_cmp);
    Timing { median: per_get[per_get.len() / 2], p90: per_get[per_get.len() * 9 / 10] }
}

/// Returns the gets per second of all threads together, each repeating its own keys for a fixed time.
fn rate(node: &NodeHeap, local: &LocalHeap, shares: &[&[ObjectId]], quick: bool) -> f64 {
    let duration = if quick { Duration::from_millis(200) } else { Duration::from_secs(1) };
    let best = (0..3).map(|_| {
        node.heartbeat();
        std::thread::scope(|scope| {
            let threads: Vec<_> = shares
                .iter()
                .map(|share| {
                    scope.spawn(move || {
                        let mut reader = local.reader().expect("a vacant lane");
                        let (started, mut done) = (Instant::now(), 0u64);
                        for batch in share.chunks_exact(BATCH).cycle() {
                            batch.iter().for_each(|id| get(&mut reader, id));
                            done += BATCH as u64;
                            if started.elapsed() >= duration {
                                break;
                            }
                        }
                        done as f64 / started.elapsed().as_secs_f64()
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().expect("no panic")).sum::<f64>()
        })
    });
    best.fold(0.0, f64::max)
}

/// Measures two dependent random reads in tables as large as index and headers, 16 + 128 bytes per object.
fn time_baseline(objects: u32, rounds: usize) -> Timing {
    let index: Vec<u64> =
        (0..u64::from(objects) * 2).map(|n| n.wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
    let headers = vec![[1u64; 16]; objects as usize];
    let mut random = SplitMix64::new(7);
    let (mut sum, mut added) = (0, 0);
    let per_get = (0..rounds).map(|_| {
        let started = Instant::now();
        for _ in 0..BATCH {
            let at = scale(random.next_u64().wrapping_add(added), index.len());
            let slot = scale(index[at], headers.len());
            let header = &headers[slot];
            sum += header[0];
            // All values are 1, but the processor must load them before it knows the next address.
            added += header[15] - 1;
        }
        started.elapsed().as_nanos() as f64 / BATCH as f64
    });
    let timing = timing(per_get.collect());
    black_box(sum);
    timing
}

fn fill(objects: u32, huge: HugePages) -> (NodeHeap, Vec<ObjectId>) {
    let term = Term::new(1).expect("small");
    let heap = NodeHeap::create(HeapConfig {
        node: NodeId(1),
        generation: Generation(1),
        slots_max: objects.into(),
        huge,
    })
    .expect("memory for the index region");
    let units = objects.next_multiple_of(8);
    let segment = heap.add_segment(objects, units, HugePages::Auto).expect("memory for the segment");
    segment.adopt_term(term);
    heap.index_region().set_open(true);
    let mut random = SplitMix64::new(42);
    let mut ids = Vec::with_capacity(objects as usize);
    for n in 0..objects {
        let id =
            ObjectId((u128::from(random.next_u64()) << 64 | u128::from(random.next_u64())).to_le_bytes());
        let key = n.to_le_bytes();
        let (slot, epoch) = (SlotId(n), Epoch::new(term, u64::from(n) + 1).expect("small"));
        let record = RecordSpec {
            id,
            flags: RecordFlags::NONE,
            object_len: 64,
            stripe_index: 0,
            stripe_count: 1,
            stripe_offset: 0,
            stripe_len: 64,
            key: KeySection { tenant: Tenant::DEFAULT, key: Key::new(&key).expect("4 bytes") },
            attributes: &Attributes::default(),
            id_key: 1,
            tenant_generation: TenantGeneration(0),
        };
        let extent = Extent { start: n, units: 1 };
        let grant = Grant { slot, epoch, term, extent, record, writer: PayloadWriter::Node };
        heap.begin(SegmentId(0), &grant).expect("an empty segment");
        let root = heap.claim(SegmentId(0), slot, epoch).expect("just begun").fill(&[n as u8; 64]);
        heap.commit(SegmentId(0), slot, epoch, root, PayloadWriter::Node).expect("just filled");
        ids.push(id);
    }
    (heap, ids)
}

/// Connects a client in this process, with mappings of its own as any other client.
fn connect_in_process(node: &NodeHeap) -> LocalHeap {
    let path = std::env::temp_dir().join(format!("moontide-bench-{}", std::process::id()));
    let _ = std::fs::remove_file(&path);
    // SAFETY: node and client are this program.
    let listener = unsafe { ShmListener::bind(&path, &[], Duration::from_secs(3600)) }.expect("a socket");
    let local = std::thread::scope(|scope| {
        scope.spawn(|| listener.handshake(listener.accept().expect("a connection"), node).expect("a client"));
        // SAFETY: node and client are this program.
        unsafe { connect(&path, Duration::from_secs(5), u64::MAX) }.expect("the listener is bound").0
    });
    std::fs::remove_file(&path).expect("the socket");
    local
}

fn scale(random: u64, len: usize) -> usize {
    ((u128::from(random) * len as u128) >> 64) as usize
}

fn shuffled(count: u32, seed: u64) -> Vec<u32> {
    let mut order: Vec<u32> = (0..count).collect();
    let mut random = SplitMix64::new(seed);
    for at in (1..order.len()).rev() {
        order.swap(at, random.index(at + 1));
    }
    order
}
