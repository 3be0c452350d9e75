//! `moontide bench mixed`: mixed reads and writes of many callers, also under overload.
//!
//! A get that misses is followed by a put, as in an inference engine. With `--overload` the benchmark has three phases:
//! closed loop to measure the peak rate; open loop with a multiple of the peak rate, where requests arrive regardless
//! of earlier responses; closed loop again to measure the recovery time.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::Args as ClapArgs;
use moontide_client::{AsyncStore, PutOptions, StoreConfig};
use moontide_rt::SplitMix64;
use parking_lot::Mutex;

use super::cluster::{BenchCluster, Size};
use super::random_bytes;
use crate::arguments::{seconds, transfer_bytes};
use crate::measure::{Percentiles, percentiles};
use crate::process::resident_bytes;
use crate::results::{BenchError, ResultRow, check_gates, wrong};

pub(crate) const EXAMPLES: &str = "\
Examples:
  moontide bench mixed                            16 callers, 256 KiB objects, 10 seconds
  moontide bench mixed --bytes 64K --callers 64 --seconds 30
  moontide bench mixed --overload 10 --seconds 60   ten times the peak rate
  moontide bench mixed --master 10.0.0.7:7400     in an existing cluster

Progress goes to standard error every second, results as JSON lines to standard output:
  closed            closed loop: requests per second, hit rate, latency
  overload          goodput is responses within --timeout-ms; `share` is goodput / peak; refused requests failed
                    immediately; memory is the largest resident set of the client process
  recovered         time after the overload until the closed loop reaches 90 % of the peak again";

#[derive(Clone, Debug, ClapArgs)]
pub(crate) struct Args {
    /// Number of callers of the closed loop
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u16).range(1..=4096))]
    callers: u16,
    /// Object size, in bytes or with suffix K or M
    #[arg(long, default_value = "256K", value_parser = transfer_bytes)]
    bytes: u64,
    /// Number of distinct objects; their popularity is skewed
    #[arg(long, default_value_t = 4000, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    objects: u32,
    /// Duration in seconds
    #[arg(long, default_value = "10", value_parser = long_seconds)]
    seconds: f64,
    /// Offered rate of the overload phase, as a multiple of the peak rate
    #[arg(long, value_name = "TIMES", value_parser = seconds)]
    overload: Option<f64>,
    /// Timeout of a request in milliseconds
    #[arg(long, default_value_t = 500, value_parser = clap::value_parser!(u32).range(1..=60_000))]
    timeout_ms: u32,
    /// Also use shared memory; otherwise all requests use TCP
    #[arg(long)]
    local: bool,
    /// gRPC address of the master of an existing cluster [default: start a cluster]
    #[arg(long, value_name = "HOST:PORT")]
    master: Option<String>,
    /// Seed of the requested objects
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Fail if a result misses its target by more than a factor of two
    #[arg(long)]
    gate: bool,
}

fn long_seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.1..=86_400.0).contains(&seconds) => Ok(seconds),
        _ => Err("not a number of seconds from 0.1 to 86400".into()),
    }
}

/// Target of goodput under overload / peak.
const SHARE_TARGET: f64 = 0.8;
/// Target of the recovery time.
const RECOVERY_TARGET_S: f64 = 5.0;
/// Duration of the measurement of the peak.
const PEAK: Duration = Duration::from_secs(5);

pub(crate) fn run(args: &Args) -> Result<(), BenchError> {
    let node_bytes = (u64::from(args.objects) * (args.bytes + 8192)).max(256 << 20).next_multiple_of(1 << 28);
    let cluster = match &args.master {
        Some(_) => None,
        None => Some(BenchCluster::start(Size { nodes: 1, node_bytes, groups: 4 })?),
    };
    let address =
        args.master.clone().or(cluster.as_ref().map(|c| c.address.clone())).expect("an address or a cluster");
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().map_err(wrong)?;
    let others: Vec<u32> = cluster.iter().flat_map(BenchCluster::pids).collect();
    let outcome = runtime.block_on(measure(args, address, &others));
    // Drops tasks that still wait for responses.
    runtime.shutdown_timeout(Duration::from_secs(1));
    outcome?;
    if args.gate { check_gates() } else { Ok(()) }
}

async fn measure(args: &Args, address: String, others: &[u32]) -> Result<(), BenchError> {
    // Resident memory of master and node, including the objects.
    let memory = || -> Result<f64, BenchError> {
        let bytes = others.iter().map(|&pid| resident_bytes(pid)).sum::<Result<u64, _>>()?;
        Ok(bytes as f64 / 1048576.0)
    };
    let config = StoreConfig {
        shm: args.local,
        timeout: Duration::from_millis(args.timeout_ms.into()),
        // Queued requests are served within half of the timeout if each takes about a millisecond.
        async_queue_max: (args.timeout_ms as usize).max(16),
        ..StoreConfig::new(address)
    };
    let store = AsyncStore::connect(config).await.map_err(wrong)?;
    let workload = Arc::new(MixedWorkload {
        store,
        value: random_bytes(args.seed, args.bytes as usize).into(),
        objects: args.objects,
        counts: Counts::default(),
    });
    let Some(times) = args.overload else {
        let span = Duration::from_secs_f64(args.seconds);
        let peak = closed(&workload, args.callers, span, args.seed).await?;
        return peak.print("closed", args);
    };
    // Warm-up: stores all objects and fills the location cache.
    closed(&workload, args.callers, PEAK, args.seed).await?;
    let peak = closed(&workload, args.callers, PEAK, args.seed).await?;
    peak.print("closed", args)?;
    let rate = peak.good_per_s * times;
    let before = memory()?;
    let span = Duration::from_secs_f64(args.seconds);
    let over = open(&workload, rate, span, args).await?;
    over.line("overload", args)
        .number("times", times)
        .number("offered_per_s", over.offered_per_s)
        .number("refused_per_s", over.refused_per_s)
        .number("late_per_s", over.late_per_s)
        .number("memory_mib", over.memory as f64 / 1048576.0)
        .number("cluster_memory_mib_before", before)
        .number("cluster_memory_mib", memory()?)
        .with_target("share", over.good_per_s / peak.good_per_s, SHARE_TARGET, true)
        .print();
    // Closed loop, second by second, until the rate is back.
    let ended = Instant::now();
    let mut recovered = None;
    while recovered.is_none() && ended.elapsed() < Duration::from_secs(30) {
        let after = closed(&workload, args.callers, Duration::from_secs(1), args.seed).await?;
        if after.good_per_s >= 0.9 * peak.good_per_s {
            recovered = Some(ended.elapsed().as_secs_f64() - 1.0);
        }
    }
    let took = recovered.unwrap_or(f64::from(u16::MAX));
    ResultRow::new("mixed", "recovered").with_target("seconds", took, RECOVERY_TARGET_S, false).print();
    Ok(())
}

/// State shared by all callers.
struct MixedWorkload {
    store: AsyncStore,
    value: Bytes,
    objects: u32,
    counts: Counts,
}

#[derive(Debug, Default)]
struct Counts {
    offered: AtomicU64,
    hits: AtomicU64,
    puts: AtomicU64,
    refused: AtomicU64,
    late: AtomicU64,
    failed: AtomicU64,
    nanos: Mutex<Vec<u32>>,
}

/// Results of a phase.
struct PhaseResult {
    good_per_s: f64,
    offered_per_s: f64,
    refused_per_s: f64,
    late_per_s: f64,
    failed: u64,
    hit_rate: f64,
    took: Percentiles,
    memory: u64,
}

impl Counts {
    /// Takes and resets the counters.
    fn take(&self, span: Duration, memory: u64) -> PhaseResult {
        let take = |counter: &AtomicU64| counter.swap(0, Ordering::Relaxed) as f64;
        let (hits, puts) = (take(&self.hits), take(&self.puts));
        let per_s = |count: f64| count / span.as_secs_f64();
        PhaseResult {
            good_per_s: per_s(hits + puts),
            offered_per_s: per_s(take(&self.offered)),
            refused_per_s: per_s(take(&self.refused)),
            late_per_s: per_s(take(&self.late)),
            failed: take(&self.failed) as u64,
            hit_rate: hits / (hits + puts).max(1.0),
            took: Percentiles::new(std::mem::take(&mut self.nanos.lock())),
            memory,
        }
    }
}

impl PhaseResult {
    fn line(&self, case: &str, args: &Args) -> ResultRow {
        let line = ResultRow::new("mixed", case)
            .with("bytes", args.bytes)
            .with("local", args.local)
            .number("good_per_s", self.good_per_s)
            .number("gb_per_s", self.good_per_s * args.bytes as f64 / 1e9)
            .number("hit_rate", self.hit_rate)
            .with("failed", self.failed);
        percentiles(line, &self.took)
    }

    fn print(&self, case: &str, args: &Args) -> Result<(), BenchError> {
        self.line(case, args).with("callers", args.callers).print();
        Ok(())
    }
}

impl MixedWorkload {
    /// Draws a key: small numbers much more often than large ones.
    fn choose(&self, rng: &mut SplitMix64) -> Vec<u8> {
        let unit = rng.fraction();
        let rank = (f64::from(self.objects).powf(unit) - 1.0) as u32;
        format!("mixed-{rank}").into_bytes()
    }

    /// Runs one request: a get, and a put after a miss. Returns whether it was a hit.
    async fn request(&self, key: &[u8]) -> Result<bool, moontide_client::StoreError> {
        if self.store.get(key).await?.is_some_and(|bytes| bytes.len() == self.value.len()) {
            return Ok(true);
        }
        self.store.put(key, self.value.clone(), &PutOptions::default()).await?;
        Ok(false)
    }

    /// Runs one request and counts its result.
    async fn serve(&self, key: Vec<u8>, deadline: Duration) {
        use moontide_types::ErrorCode::{Busy, DeadlineExceeded, InProgress};
        let counts = &self.counts;
        let started = Instant::now();
        counts.offered.fetch_add(1, Ordering::Relaxed);
        let result = self.request(&key).await;
        let took = started.elapsed();
        match result {
            Ok(_) if took > deadline => counts.late.fetch_add(1, Ordering::Relaxed),
            Ok(true) => counts.hits.fetch_add(1, Ordering::Relaxed),
            Ok(false) => counts.puts.fetch_add(1, Ordering::Relaxed),
            Err(error) => match error.code() {
                Busy | InProgress => counts.refused.fetch_add(1, Ordering::Relaxed),
                DeadlineExceeded => counts.late.fetch_add(1, Ordering::Relaxed),
                _ => counts.failed.fetch_add(1, Ordering::Relaxed),
            },
        };
        let mut nanos = counts.nanos.lock();
        if nanos.len() < 4 << 20 {
            nanos.push(took.as_nanos().min(u32::MAX.into()) as u32);
        }
    }
}

/// Runs a closed loop.
async fn closed(
    workload: &Arc<MixedWorkload>,
    callers: u16,
    span: Duration,
    seed: u64,
) -> Result<PhaseResult, BenchError> {
    let over = Arc::new(AtomicBool::new(false));
    let started = Instant::now();
    let deadline = Duration::from_secs(3600);
    let tasks: Vec<_> = (0..callers)
        .map(|caller| {
            let (workload, over) = (Arc::clone(workload), Arc::clone(&over));
            let mut rng = SplitMix64::new(seed ^ u64::from(caller) << 32);
            tokio::spawn(async move {
                while !over.load(Ordering::Relaxed) {
                    workload.serve(workload.choose(&mut rng), deadline).await;
                }
            })
        })
        .collect();
    print_progress(workload, started, span, "closed loop").await;
    over.store(true, Ordering::Relaxed);
    for task in tasks {
        task.await.map_err(wrong)?;
    }
    Ok(workload.counts.take(started.elapsed(), resident_bytes(std::process::id())?))
}

/// Runs an open loop with `rate` requests per second.
async fn open(
    workload: &Arc<MixedWorkload>,
    rate: f64,
    span: Duration,
    args: &Args,
) -> Result<PhaseResult, BenchError> {
    let started = Instant::now();
    let deadline = Duration::from_millis(args.timeout_ms.into());
    let (arrivals, mut rng) = (Arc::clone(workload), SplitMix64::new(args.seed ^ 77));
    let memory = Arc::new(AtomicU64::new(0));
    let largest = Arc::clone(&memory);
    let source = tokio::spawn(async move {
        let mut clock = tokio::time::interval(Duration::from_millis(1));
        let (mut sent, mut ticks) = (0u64, 0u64);
        while started.elapsed() < span {
            clock.tick().await;
            // All requests that are due, including those delayed because this task was late.
            let due = (started.elapsed().as_secs_f64() * rate) as u64;
            for _ in sent..due {
                let (workload, key) = (Arc::clone(&arrivals), arrivals.choose(&mut rng));
                tokio::spawn(async move { workload.serve(key, deadline).await });
            }
            sent = due.max(sent);
            ticks += 1;
            if ticks.is_multiple_of(64) {
                largest.fetch_max(resident_bytes(std::process::id()).unwrap_or(0), Ordering::Relaxed);
            }
        }
    });
    print_progress(workload, started, span, "overload").await;
    source.await.map_err(wrong)?;
    let memory = memory.load(Ordering::Relaxed).max(resident_bytes(std::process::id())?);
    Ok(workload.counts.take(started.elapsed(), memory))
}

/// Prints progress every second.
async fn print_progress(workload: &MixedWorkload, started: Instant, span: Duration, what: &str) {
    let mut last = 0;
    while started.elapsed() < span {
        let left = span.saturating_sub(started.elapsed());
        tokio::time::sleep(left.min(Duration::from_secs(1))).await;
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let served = count(&workload.counts.hits) + count(&workload.counts.puts);
        let seconds = started.elapsed().as_secs_f64();
        let (refused, late) = (count(&workload.counts.refused), count(&workload.counts.late));
        eprintln!(
            "  {what}: {seconds:.0} s, {} responses/s, {refused} refused, {late} late",
            served.saturating_sub(last)
        );
        last = served;
    }
}
