//! `moontide bench push`: writes of pages from one process into the memory of another, compared with plain copies.
//!
//! There are two ranks: this process is the producer and runs the master; a child process is the consumer, whose memory
//! receives the objects (`consumer`). Each object is reserved, copied page by page, flagged, detected by the consumer, committed and
//! later removed. The baseline copies the same pages into memory of the same kind outside of the store.

mod consumer;

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::Args as ClapArgs;
use moontide_client::{PageOutcome, RankLayout, RankStore, Store, StoreConfig};
use moontide_heap::{HugePages, Protection, Region};
use moontide_master::{MasterConfig, Server};
use moontide_node::{ExternalMemory, Node, NodeConfig};
use moontide_symmetric::{Rank, World, WorldConfig, WorldShape};
use moontide_types::{Clock, SystemClock};

use crate::measure::{Percentiles, median, relative_range};
use crate::results::{BenchError, Progress, ResultRow, check_gates, io, wrong};
use crate::scratch::Scratch;
use consumer::Consumer;

pub(super) use consumer::{RankArgs, run as run_rank};

pub(super) const EXAMPLES: &str = "\
Examples:
  moontide bench push                    pages of 128, 256 and 512 KiB, objects of 8 MiB: ten seconds
  moontide bench push --object-mib 64 --page-kib 256
  moontide bench push --quick            fewer rounds, less precise

Every result is one JSON object per line on standard output, one per page size:
  ratio        time of plain copies / time to copy the pages of an object into the other rank's memory and set the flag;
               median and range over the rounds
  push_us      reserve, copy, flag and commit: the whole put, p50 and p99
  open_us      reserve alone: a call to the master and one to the node
  seen_us      from setting the flag until the other process detects it, p50 and p99";

const STEP_TIMEOUT: Duration = Duration::from_secs(30);
/// Number of objects stored at a time: more bytes than the CPU caches hold.
const LIVE: usize = 8;
const SLOT_BYTES: u64 = 64 << 10;
/// Target of the ratio with pages of 256 KiB.
const TARGET: f64 = 0.9;

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// Page sizes in KiB
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u64).range(1..=1 << 20), default_value = "128,256,512")]
    page_kib: Vec<u64>,
    /// Object size in MiB
    #[arg(long, value_parser = clap::value_parser!(u64).range(1..=1024), default_value_t = 8)]
    object_mib: u64,
    /// Rounds of pushes and baseline copies
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=10_000), default_value_t = 15)]
    rounds: u32,
    /// Objects per round
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=10_000), default_value_t = 20)]
    objects: u32,
    /// Use fewer rounds and objects
    #[arg(long)]
    quick: bool,
    /// Fail if a result misses its target by more than a factor of two
    #[arg(long)]
    gate: bool,
}

/// Runs the producer.
pub(super) fn run(args: &Args) -> Result<(), BenchError> {
    let mut args = args.clone();
    if args.quick {
        (args.rounds, args.objects) = (5, 5);
    }
    let bytes = args.object_mib << 20;
    // Space for the stored objects in each group's segment, and for objects being reclaimed.
    let memory_bytes = (bytes * (LIVE as u64 + 4) * 2).max(64 << 20);
    // A region has whole pages.
    let memory_bytes = memory_bytes.next_multiple_of(HugePages::Auto.page_bytes());
    let scratch =
        Scratch::new(&std::env::temp_dir(), "moontide-bench-push").map_err(io("creating a directory"))?;
    let server = Server::start(MasterConfig {
        grpc_listen: "127.0.0.1:0".parse().expect("an address"),
        frame_listen: "127.0.0.1:0".parse().expect("an address"),
        admin_listen: "127.0.0.1:0".parse().expect("an address"),
        groups: Some(1),
        reallocation_delay_ms: 0,
        ..MasterConfig::default()
    })
    .map_err(wrong)?;
    let master = server.addresses().grpc.to_string();
    let path = scratch.path().join("world");
    let mut consumer = Consumer::start(&path, &master, memory_bytes)?;
    let (rank_store, _node) = join(&path, &master, Rank(0), memory_bytes)?;
    let source: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
    let baseline = Region::create(
        "moontide-baseline",
        (bytes * LIVE as u64).next_multiple_of(4096),
        HugePages::Auto,
        Protection::AllWrite,
    )
    .map_err(wrong)?;
    for &page_kib in &args.page_kib {
        measure(&args, page_kib << 10, &rank_store, &mut consumer, &source, &baseline)?;
    }
    if args.gate { check_gates() } else { Ok(()) }
}

/// Joins the world and starts a node in the memory of the rank.
fn join(path: &Path, master: &str, rank: Rank, memory_bytes: u64) -> Result<(RankStore, Node), BenchError> {
    let shape = WorldShape { ranks: 2, bytes: RankStore::region_bytes(memory_bytes, SLOT_BYTES) };
    let config =
        WorldConfig { path: path.to_owned(), rank, shape, huge: HugePages::Auto, timeout: STEP_TIMEOUT };
    // SAFETY: both ranks are this program, and use their regions only through `RankStore`.
    let world = Arc::new(unsafe { World::join(&config) }.map_err(wrong)?);
    // SAFETY: as above.
    let region = unsafe { world.reserve(0, memory_bytes) }.map_err(wrong)?;
    // SAFETY: as above.
    let memory = unsafe { ExternalMemory::new(region) };
    let config = NodeConfig {
        master: master.to_owned(),
        memory_bytes,
        bytes_per_slot: SLOT_BYTES,
        listen: vec!["127.0.0.1:0".parse().expect("an address")],
        admin_listen: None,
        ..NodeConfig::default()
    };
    let node = Node::start_with_memory(config, memory).map_err(wrong)?;
    if !node.wait_until_mounted(STEP_TIMEOUT) {
        return Err(wrong("timed out waiting for the master to mount the node's segments"));
    }
    let plan = node.segments();
    let own =
        RankLayout { node: node.id(), segments: plan.count, segment_bytes: plan.bytes(), slots: plan.slots };
    let store = Store::connect(StoreConfig::new(master)).map_err(wrong)?;
    // SAFETY: as above.
    let rank_store =
        unsafe { RankStore::open(world, store, memory_bytes, own, STEP_TIMEOUT) }.map_err(wrong)?;
    Ok((rank_store, node))
}

/// Ratios and throughput per round; durations of puts and their parts in nanoseconds.
#[derive(Default)]
struct Times {
    ratios: Vec<f64>,
    ours_gb_per_s: Vec<f64>,
    baseline_gb_per_s: Vec<f64>,
    puts: Vec<u32>,
    opens: Vec<u32>,
    seen: Vec<u32>,
}

fn measure(
    args: &Args,
    page_bytes: u64,
    rank_store: &RankStore,
    consumer: &mut Consumer,
    source: &[u8],
    baseline: &Region,
) -> Result<(), BenchError> {
    let mut times = Times::default();
    let mut live: Vec<String> = Vec::new();
    let mut progress = Progress::new(format!("pages of {} KiB", page_bytes >> 10), args.rounds.into());
    let nanos = |took: Duration| took.as_nanos() as u32;
    // The first rounds include page faults and do not count.
    let warm = (LIVE as u32 * 2).div_ceil(args.objects).max(2);
    for round in 0..args.rounds + warm {
        let (mut push_time, mut baseline_time) = (Duration::ZERO, Duration::ZERO);
        for object in 0..args.objects {
            let key = format!("push-{page_bytes}-{round}-{object}");
            let started = Instant::now();
            let push = rank_store
                .open_for_write(key.as_bytes(), source.len() as u64, page_bytes, Some(Rank(1)))
                .map_err(wrong)?;
            let opened = started.elapsed();
            consumer.expect(push.ticket())?;
            let copying = Instant::now();
            let mut last = PageOutcome::Pending;
            for (page, bytes) in (0..).zip(source.chunks(page_bytes as usize)) {
                last = push.write_page(page, bytes).map_err(wrong)?;
            }
            let raised = SystemClock.now();
            let copied = copying.elapsed();
            if last != PageOutcome::Complete {
                return Err(wrong(format!("last page did not complete {key}: {last:?}")));
            }
            let seen = consumer.seen()?;
            let committing = Instant::now();
            push.commit().map_err(wrong)?;
            let put = opened + copied + committing.elapsed();
            live.push(key);
            if live.len() > LIVE {
                rank_store.store().remove(live.remove(0).as_bytes(), true).map_err(wrong)?;
            }

            let copying = Instant::now();
            copy_baseline(source, page_bytes as usize, baseline, object as usize % LIVE);
            baseline_time += copying.elapsed();
            push_time += copied;
            if round >= warm {
                times.puts.push(nanos(put));
                times.opens.push(nanos(opened));
                times.seen.push(seen.saturating_sub(raised.0) as u32);
            }
        }
        if round >= warm {
            let bytes = source.len() as f64 * f64::from(args.objects) / 1e9;
            times.ratios.push(baseline_time.as_secs_f64() / push_time.as_secs_f64());
            times.ours_gb_per_s.push(bytes / push_time.as_secs_f64());
            times.baseline_gb_per_s.push(bytes / baseline_time.as_secs_f64());
            progress.at(u64::from(round - warm));
        }
    }
    for key in live {
        rank_store.store().remove(key.as_bytes(), true).map_err(wrong)?;
    }
    let ratio = median(times.ratios.clone());
    let [puts, opens, seen] = [times.puts, times.opens, times.seen].map(Percentiles::new);
    let line = ResultRow::new("push", "pages")
        .with("page_kib", page_bytes >> 10)
        .with("object_mib", args.object_mib)
        .number("ratio_range", relative_range(&times.ratios))
        .number("gb_per_s", median(times.ours_gb_per_s))
        .number("baseline_gb_per_s", median(times.baseline_gb_per_s))
        .number("push_us_p50", puts.micros(0.5))
        .number("push_us_p99", puts.micros(0.99))
        .number("open_us_p50", opens.micros(0.5))
        .number("seen_us_p50", seen.micros(0.5))
        .number("seen_us_p99", seen.micros(0.99));
    if page_bytes == 256 << 10 {
        line.with_target("ratio", ratio, TARGET, true).print();
    } else {
        line.number("ratio", ratio).print();
    }
    Ok(())
}

fn copy_baseline(source: &[u8], page_bytes: usize, baseline: &Region, index: usize) {
    let start = index * source.len();
    assert!(start + source.len() <= baseline.len() as usize);
    for (page, bytes) in source.chunks(page_bytes).enumerate() {
        // SAFETY: inside the region, which no other thread or process uses.
        unsafe {
            let to = baseline.base().as_ptr().add(start + page * page_bytes);
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), to, bytes.len());
        }
    }
}
