//! Gets and puts of this crate compared to the plain C loop in `loop.c`, on the same library, transports, sizes and
//! batches.
//!
//! ```text
//! MOONTIDE_UCX_LIB=…/libucp.so.0 cargo test --release -p moontide-transfer --test ucx -- --ignored --nocapture ratio
//! ```
//! Prints a JSON line per point: the loop (best of its two ways to wait at the owner), this crate when a thread starts
//! a batch and waits for it, this crate when each completion starts the next operation, and both ratios. Best of
//! [`ROUNDS`] each. The waiting thread is woken by the progress thread, which costs 5 to 20 µs per batch; the chain
//! needs no wake-up. Needs `cc`.

use std::collections::BTreeMap;
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::{Duration, Instant};

use moontide_transfer::ucx::{Endpoint, Get, Put, RemoteKey, Ucx, UcxError, UcxWorker};

use crate::peer::{Buffer, OWNED_LEN, Owner, config, library, within};

/// The two sides alternate, so that a load peak of the machine does not affect only one of them.
const ROUNDS: usize = 3;
const POINT: Duration = Duration::from_millis(150);
const BATCHES: [usize; 2] = [1, 4];
const SIZES: [usize; 5] = [64 << 10, 256 << 10, 1 << 20, 4 << 20, 16 << 20];
/// From this size on the crate should reach nine tenths of the loop.
const SIZE_OF_INTEREST: usize = 256 << 10;

/// Direction, operations in flight, bytes.
type Point = (String, usize, usize);

/// Prints every point, and fails if the median ratio of chained operations of the sizes of interest is too low.
pub(crate) fn compare() {
    let Some(ucx) = library() else { return };
    let loop_binary = std::env::temp_dir().join(format!("moontide-ucx-loop-{}", std::process::id()));
    let built = Command::new("cc")
        .args(["-O2", "-o"])
        .arg(&loop_binary)
        .arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/ucx/loop.c"))
        .arg("-ldl")
        .status()
        .expect("cc runs");
    assert!(built.success(), "loop.c does not compile");

    for tls in ["cma,posix,self", "tcp,self"] {
        let (mut c, mut waits, mut chains) = (BTreeMap::new(), BTreeMap::new(), BTreeMap::new());
        for _ in 0..ROUNDS {
            for owner in ["busy", "sleep"] {
                let output = Command::new(&loop_binary)
                    .arg(ucx.path())
                    .args([tls, &POINT.as_millis().to_string(), owner])
                    .output()
                    .expect("the loop runs");
                let text = String::from_utf8(output.stdout).expect("text");
                text.lines().filter_map(parse).for_each(|(point, rate)| keep_best(&mut c, point, rate));
            }
            measure(tls, &ucx, |point, waiting, chained| {
                keep_best(&mut waits, point.clone(), waiting);
                keep_best(&mut chains, point, chained);
            });
        }
        let mut ratios = Vec::new();
        for (point, chained) in &chains {
            let (op, in_flight, bytes) = point;
            let (plain, waiting) = (c[point], waits[point]);
            let (wait_ratio, ratio) = (waiting / plain, chained / plain);
            println!(
                "{{\"tls\":\"{tls}\",\"op\":\"{op}\",\"in_flight\":{in_flight},\"bytes\":{bytes},\"c_gb_s\":{plain:.2},\
                 \"wait_gb_s\":{waiting:.2},\"chain_gb_s\":{chained:.2},\
                 \"wait_ratio\":{wait_ratio:.2},\"chain_ratio\":{ratio:.2}}}"
            );
            if *bytes >= SIZE_OF_INTEREST {
                ratios.push(ratio);
            }
        }
        ratios.sort_by(f64::total_cmp);
        let middle = ratios[ratios.len() / 2];
        println!(
            "{{\"tls\":\"{tls}\",\"middle_chain_ratio\":{middle:.2},\"least_chain_ratio\":{:.2}}}",
            ratios[0]
        );
        assert!(middle >= 0.9, "{tls}: throughput is {middle:.2} of the plain loop");
    }
    let _ = std::fs::remove_file(loop_binary);
}

fn keep_best(best: &mut BTreeMap<Point, f64>, point: Point, rate: f64) {
    let entry = best.entry(point).or_insert(rate);
    *entry = entry.max(rate);
}

/// Parses a line of the C loop, which has the fields in this order.
fn parse(line: &str) -> Option<(Point, f64)> {
    let field = |name: &str| {
        let start = line.find(&format!("\"{name}\":"))? + name.len() + 3;
        let rest = &line[start..];
        Some(rest[..rest.find([',', '}'])?].trim_matches('"').to_owned())
    };
    let point = (field("op")?, field("in_flight")?.parse().ok()?, field("bytes")?.parse().ok()?);
    Some((point, field("gb_s")?.parse().ok()?))
}

/// Runs the same loop through the handles of this crate.
fn measure(tls: &str, ucx: &Ucx, mut report: impl FnMut(Point, f64, f64)) {
    let owner = Owner::start(tls);
    let worker = UcxWorker::start(ucx, config(tls)).unwrap();
    let (end, key) = owner.reach(&worker);
    let local = Buffer::new(OWNED_LEN);
    local.bytes_mut().fill(0x5a);
    let load = Arc::new(Load { end, key, local, base: owner.base });
    for op in ["get", "put"] {
        for in_flight in BATCHES {
            for len in SIZES {
                let waiting = load.wait_for_batches(op, in_flight, len);
                let chained = load.chain(op, in_flight, len);
                report((op.to_owned(), in_flight, len), waiting, chained);
            }
        }
    }
    drop((load, worker));
    owner.end();
}

struct Load {
    end: Endpoint,
    key: RemoteKey,
    local: Buffer,
    base: u64,
}

impl Load {
    fn start(
        &self,
        op: &str,
        slot: usize,
        len: usize,
        done: impl FnOnce(Result<(), UcxError>) + Send + 'static,
    ) {
        let (key, remote, local) = (&self.key, self.base + (slot * len) as u64, self.local.at(slot * len));
        let deadline = within(10.0);
        // SAFETY: never freed.
        unsafe {
            match op {
                "get" => self.end.get(Get { key, remote, local, len, deadline }, done),
                _ => self.end.put(Put { key, remote, local, len, deadline }, done),
            }
        }
    }

    /// Starts batches on one thread and waits for all of each.
    fn wait_for_batches(&self, op: &str, in_flight: usize, len: usize) -> f64 {
        let (report, reports) = channel();
        let batch = || {
            for slot in 0..in_flight {
                let report = report.clone();
                self.start(op, slot, len, move |result| drop(report.send(result)));
            }
            for _ in 0..in_flight {
                reports.recv().unwrap().unwrap();
            }
        };
        (0..4).for_each(|_| batch());
        let (start, mut operations) = (Instant::now(), 0);
        while start.elapsed() < POINT {
            batch();
            operations += in_flight;
        }
        (operations * len) as f64 / start.elapsed().as_secs_f64() / 1e9
    }

    /// Starts the next operation of a slot from the completion of the previous one.
    fn chain(self: &Arc<Self>, op: &'static str, in_flight: usize, len: usize) -> f64 {
        let (report, reports) = channel();
        let start = Instant::now();
        for slot in 0..in_flight {
            ChainSlot { load: Arc::clone(self), op, slot, len, start, operations: 0, report: report.clone() }
                .start_next();
        }
        drop(report);
        let operations: usize = reports.iter().sum();
        (operations * len) as f64 / start.elapsed().as_secs_f64() / 1e9
    }
}

struct ChainSlot {
    load: Arc<Load>,
    op: &'static str,
    slot: usize,
    len: usize,
    start: Instant,
    operations: usize,
    report: Sender<usize>,
}

impl ChainSlot {
    fn start_next(mut self) {
        let load = Arc::clone(&self.load);
        load.start(self.op, self.slot, self.len, move |result| {
            result.unwrap();
            self.operations += 1;
            if self.start.elapsed() < POINT {
                self.start_next();
            } else {
                let _ = self.report.send(self.operations);
            }
        });
    }
}
